"""Serving calls from recorded runs: the graph of states, its guards and its code.

`dispatcher.py` serves a call: it finds a program, and replays, resumes, records or runs live. A
tree (`tree.py`) has the programs of one model; a program (`program.py`) has a check and a graph
(`program_graph.py`); `Program._walk` goes from one exit of the graph to the next (`stretches.py`),
each of which has generated code. `Floor` (`dispatcher.py`) makes calls run the model itself without
looking at anything, if paths do not repeat, or if calls have to run live. It tries again from time
to time. What is inserted is called beside such a call, if it can only be at calls of modules and of
torch functions: interceptors receive these (`insert/live_runner.py`) and find the node path by the
frames around them. Other insertions need the recorder in live calls too. `module.py` is the module
that is called like the model, represents it in everything else (`record/module_proxy.py`), and has
the methods that inspect and change it.

`tree.py` keeps the programs of one model and finds the one whose check passes. If there are many,
`ProgramIndex` looks them up by the sizes and numbers that they require. The tree also knows when a
value changes on every call, so that the model has to run live. It keeps at most `max_traces` paths,
and drops first those that calls took least, where recent calls count more. The first time, a
`TraceLimitWarning` says what makes the model diverge so often.

`guard_kinds.py` classifies the guards. *Input guards* need only sizes and other metadata of the
arguments. *Data guards* need values. *Implied* guards follow from metadata that is checked before
the run: for example, the dtype of a result follows from the dtypes of the inputs. Two functions are
generated: `check(A)` (`check.py`) tests the input guards, and `run(A, E)` (`codegen.py`) contains
the ops in the recorded order as flat Python with the data guards in between. Which ops a run needs,
which guards stand between them, and when each value is used for the last time, is its *schedule*
(`schedule.py`). All code writers follow a schedule and add only text: `codegen.py` for whole runs
and segments, `suffix.py` for the rest of a run from given values, and `compiled_path.py`. The state
of torch around the call - modes, default dtype, settings - is compared as a whole
(`global_state.py`). Attributes of the model are checked by the versions of the dicts that hold them
(`python/versions.py`). `check.py` decides for which captured values this suffices, and generates
the checks of the others, and the checks that two names are one object. All of this is checked in
one step: `python/versions.py` probes where objects have the words of memory that differ after a
change (the version of a dict, the class of an object, the code of a function), and numpy reads them
in one go. CPython 3.13 and later have no versions in memory, so torch is asked for these. Only if a
word differs do the checks themselves run (`ask` in the generated code; `ask_attributes`, if a call
has only assigned attributes). The types of parameters and buffers are checked on every call: a
recording does not keep these tensors alive, so their memory must not be read once they may be gone.
For torch functions that are written in Python, the code calls what these functions end up calling
(`direct_calls.py`); replay.md says when.

`program.py` holds the known paths for one set of input guards, as code that branches: a **graph
of states**, into which `program_graph.py` joins runs at equal states (`stretches.py`).

While a run is recorded, `record/states.py` reads the state at each question: the frames
(`python/stacks.py` finds the interpreter's own layout by probing, and `python/bytecode.py` says
which variables are still read), everything that can be reached from them, everything that the run
has changed, and the values that an insertion around them still holds. Whether an op raises is also
a question (`ErrorGuard`), where the model could go on after the error. If a state cannot be read,
its key is the path that led to it, and its holes are all values so far: it equals only itself.
`record/states.py` also says when C code in progress may hold something that no frame shows.

`SegmentWriter` writes the ops between two states. A segment receives a list of the values that its
state can still reach, its *holes*. It frees each value after its last use, and returns a
`Departure` with the holes of the state at its end. Across segments, a `Hold` keeps autocast's cache
of cast weights, which would otherwise be cleared where the model's own blocks end: a weight that
was cast twice would have different gradients. A replay changes objects at its end. A cache that is
extended with `torch.cat` is replaced then, and cut out of the longer one if need be
(`cache_growth.py`). Each piece of a run counts the calls that took it, from question to question,
for the tree and for coverage. When a graph has eight pieces, the counters of its `while` loops are
lifted (`record/varying.py`): the ops that compute them are on the tape (`Tape.counters`), but are
not nodes, and `Recording.plain_ops` has the numbers in their place. Where inputs alone end a loop,
each number of rounds has a program, and none gets pieces: after four numbers, such a loop is among
the places where numbers differ (`TraceTree.varying`), and its counters are lifted in all new runs.
Lists that loops append to are values of ops in the same way (`record/accumulation.py`), and so is
what loops over the rows of tensors go through (`record/rows.py`). The same goes for numbers in the
model's state that differ in one recorded run after the other (`TraceTree.compare_numbers`):
`Environment.place` puts traced scalars in their places while a run goes on.

If an answer is not known, the call **resumes**. A `Divergence` has the parts of runs that the
call went along, and the holes of the state that it came to. A `Script` (`record/script.py`) puts
these parts in a row. The model's Python runs from its start under the recorder, and as long as it
is in the script, its ops are looked up and not carried out:

::

    replay   op  op  question  op  op  question?         the answer is unknown here
                                 |                       the holes of this state have values
    script   op  op  question  op  op  question?         an op returns its hole, or a stand-in
    Python   ----------------------------------> op op   from here on it is recorded

An op whose value is a hole returns that very tensor, with its memory and its gradient function. Any
other op returns a *stand-in*: an object of the right class without content, such as a tensor on the
meta device. A question gets the answer that the call got. So nothing is written, drawn, printed or
called twice. If the model, or an op after the script, needs the content of a stand-in, or if the
model does something that is not in the script, the call raises a `NondeterminismError`.
`ProgramGraph.add` compares what the run did with what was known (`comparison.py`), up to the
first new answer and from the next known state on, and adds what is new. If they differ, the graph
is given up.

Reading a state below many frames takes as long as some hundred ops. So a resumed run reads states
up to the first known one. From there on, as long as its answers are known, its states are those
that follow in the graph (`comparison.py`).

Reading states takes time, and most first runs are never left. So a first run with nothing
inserted reads only few states, and those only until the first op that must not be carried out
twice (`record/effects.py`); from there on, it reads all. If a call leaves a run at a state that
was not read, the model is recorded from its start without a script.

In some programs, paths must not join: those of harvests, which need the exact path of each call
(`Interjection.needs_paths`), and those whose graph was given up (`TraceTree.grow`). There,
`program_graph.py` replaces all states by states that equal only themselves, so that the graph is a
tree in which all values are kept. One of several processes never begins again: its runs read all
states. `from_activations` follows the code of a rest (`suffix.py`), and resumes by an exact script:
ops whose results are not held are carried out again.

`record/redirection.py` handles methods such as `generate` the other way round: called through the
`BendedModule`, they run as they are, and when they call the model, that call follows recorded
paths.

`speculation.py` implements `BendedModule(backend=...)`. It decides which path to compile, and
which one a call tries before it uses the tree. `compiled_path.py` is one such path: the call
checks its program's input guards, runs it, and then tests all its data guards together. If a
guard does not hold, the call drops the result. Before a path is compiled, `compile_probing.py`
reads from the tape what forbids it, and runs it op by op under a dispatch mode, which uses the
schemas of torch's operators to see what is written to and what is random. `compiled_path.py`
writes the path as one function that `torch.compile` takes whole, with the values that guards test
kept as tensors. `Extents` says in which masks value-dependent sizes were counted. A graph whose
results differ from those of a replay is not used. `compile_attempts.py` calls a graph directly
once torch.compile's guards have accepted it. It keeps apart what depends on which inputs, where a
graph would give gradients of zero and the model none. `speculation.py` also compiles the code
between two questions, for calls that combine segments in new ways: it writes segments that call a
compiled *body* in place of the ops, and fall back to the ops. Paths and bodies share the
generation of ops (`compiled_path.py`) and one class, `CompiledFunction` (`compile_attempts.py`),
which compiles, calls, compares and measures. `compile_settings.py` holds the user's settings, and
keeps what inductor compiles for other processes.

Insertions take part by *splices* (`compile_probing.py`): functions of tensors in place of the gates
of a path, and values that the graph returns. `insert/compiling.py` makes them. It asks each
insertion of a path for its *effect* (`insert/interjection.py`), and `insert/purity.py` finds the
effects of the user's functions. What was read for that is kept as `IdentityFacts`
(`insert/purity.py`): as long as they hold, no insertion is asked again. Observers are called after
the run; `insert/interjection.py` says which values they may keep without copying them.
"""
