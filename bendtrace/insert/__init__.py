"""Insertions: the user's code at the nodes of a model, on every path that its runs can take.

Insertions in a `BendedModule` become ops of the tape, *gates* (`gates.py`): before a node, after
it, in its place, or at a parameter. While a run is recorded, an *inserter* is asked at each module
call and op (`inserter.py` defines what it may do, and has the one that adds gates).
`LiveNames` (`log/nodes.py`) gives it the node path immediately. This is the path that the tree of
paths will have afterwards, because both use one registry by place in the source. A gate holds no
user code: it asks the `InsertionPlan` of the call (`plan.py`) what to call, so that a trace works
for any insertion at its places. `engine/dispatcher.py` keeps one trace tree for each set of places.
For everything else, a gate is an opaque op: its output is guarded like any result, and a changed
value that changes a branch diverges and resumes. The script of a resumed run contains the gate's
output, so no interjection is called twice. A gate counts its passes in the call, so one gate in a
loop serves all iterations, and an interjection at some passes is skipped at the others.

Usually, no op is recorded for insertions. A *splicer* (`splicer.py`) finds where the gates of a
plan go in a recorded run, and has the graph write its segments with them (`engine/source.py`). One
graph serves all sets of places. `record/scopes.py` counts, where the call of a module ends, whether
only the caller has its output. In the code, a gate stands in a `SplicedGate`, which compares the
kind of what it returns with the kind of the value. If they differ, it raises `Unfit`. The
dispatcher then records the run with ops for the gates. An `Attempt` (`gates.py`) has kept what the
gates returned, and they return it again. Resumed runs follow the script into the same graph, and
the inserter passes values through gates without ops. The first run of a model does the same, but
its first gate becomes an op if it cannot be spliced.

`where.py` resolves what people pass as a place. `log/run.py` resolves a string in one run, also
for logs, and `resolver.py` in all runs of a model. Every entry point uses these two, so that a
name selects the same node everywhere. `registry.py` keeps the insertions in order; `Knowledge`
(`resolver.py`) holds the recorded runs. If there are none, `registry.py` also resolves names
while the first call is recorded: the inserter reports each node. `insertion.py` counts, and
`selector_source.py` finds the decision that led a run past a node. `leaves.py` takes values
apart into tensors and numbers, and puts them together again. `inserter.py` also replaces
parameters, and knows which functions work in place. `gradients.py` gives a node aliases of its
inputs, so that their gradients belong to it alone. On plain modules, `native.py` calls
interjections through torch's own hooks. `hook_store.py` makes an interjection of each hook of a
`HookManager`: an insertion in a `BendedModule`, or attached to a plain module. Selectors
(`selector_algebra.py`), patches (`patch_kinds.py`), bends (`bend.py`) and `rewriting.py` build on
this.
"""
