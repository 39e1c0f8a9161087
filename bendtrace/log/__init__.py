"""A recorded run as people see it: node paths, the log, the mirror as a graph, files.

All views are derived from the recording, lazily and once. Views that need only the recording
belong to it (`Recording.view`): the names of nodes (`record/op_names.py`), and the flow steps with
those that each op ran under (`flow.py`). The kind of a flow step comes
from the syntax tree (`python/statements.py`), and iterations from the order of the records
(`record/iterations.py`). Views that depend on the model and the registry of node names belong to
a `Run` (`run.py`): the networkx mirror (`mirror.py`), the tree of node paths (`path_tree.py`),
the nodes as selectors see them (`path_views.py`), the log (`building.py`) and the meaning of
strings in the run. A `Trace` has one `Run`; a `BendedModule` keeps one for each
recording (`insert/resolver.py`).

A trace is also a *log*. `building.py` reads the tape once and creates a `LayerEntry` for each value
and a `ModuleEntry` for each module call. These are plain data that refer to each other by label, so
everything built on them, such as `run_log.py`, also works for a loaded log. `Namer` (`entries.py`)
counts layers as TorchLens does. Two ops are passes of one layer if they have the same
`Site.identity`, the place in the source within their module. Graphs are never compared for this.

An op does not only read its arguments. `watch/writes.py` uses torch's version counters to note
which op wrote into a tensor and which op reads it afterwards under another name. `Op.writes` and
`Op.reads` become parents in the log and "memory" edges in the mirror.

An *observer* keeps values during the run (`ValueCapture` in `capture.py`). It also takes lazy
clones: torch copies only when somebody writes. It does not do so with memory whose address others
may know (arguments, state, arrays handed to numpy), because a write would then move the memory away
from them. `StopRun` ends a run early. The model's own exception handlers do not catch it.

The tree of node paths: `path_tree.py` walks the tape, one module call after the other, `nodes.py`
assigns names that all traces of one `BendedModule` share, and `path_views.py` parses paths and is
the object that people use. `path_tree.py` also writes the code of a graph.

`saved_logs.py` writes logs so that a crash leaves the older log intact. `validate.py` needs the
run itself.
"""
