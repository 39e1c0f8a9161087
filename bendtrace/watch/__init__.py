"""The world of a recording: what code may read, and what torch hides from a mode.

Instructions show what code may read: `reachability.py` follows the names that the model's
functions and classes use (`code_facts.py`), through helpers and into other modules. It stops at
the code of installed packages (`provenance.py` says what comes from where). Everything it finds
is captured as well, and so is guarded. The result of a search is stored with a code version
(`python/versions.py`) of everything that it depended on: the functions, classes and modules that
the names referred to, and their code. `python/bytecode.py` reads the bytecode for it.

A scan is cached as well (`scan_cache.py`), as long as a run that uses it is alive. The next run
of the model reuses its captured values if everything that decided where the scan led is
unchanged: the same objects in the same places (`findings.py` reads these into flat lists, which C
compares), the same classes, code and code versions, and the same facts about tensors and copies.
Otherwise it scans again. After the run, the same lists show what the run changed.

torch tells a mode which function is called by looking its name up. If somebody has replaced the
function (`torch.Tensor.view = mine`), and the replacement calls the original, torch reports the
name of the replacement. `monkeypatches.py` knows what has been replaced. So the right op is
recorded, and replays check whether the replacement has changed.

While a run is recorded, a profiler sees each function that begins (`executed.py`), and knows which
functions and types of the standard library give the same each time; a run that used another is
live.

What the mode does not see is intercepted at a few entry points (`intercepts.py`). They are
replaced while at least one run is recorded, and restored afterwards. Among them are module calls,
`autograd.Function`, scripted functions, the transforms of functorch, seeding, threads, modes,
clocks, files and environment variables (`host_io.py`). Old constructors, parameters and numpy
arrays are intercepted too (`functions.py`); `writes.py` watches the memory of arrays while
tensors share it. Each intercept first asks for the recorder of the calling thread
(`tape/watchers.py`). Then it records the function as one op, or marks the run as not repeatable.
Some things cannot be intercepted at any entry point; `code_facts.py` recognises them by their
names. Code that asks whether there are function modes (`has_torch_function`), as fused layers do,
receives the answer of eager: a profiler (`executed.py`) sees the question before torch answers
it, and hides the recorder meanwhile (`mode_queries.py`).

Lists and deques that code only appends to (`growing.py`) are not looked into: all code that may
run, or all that did, is searched for other uses of their names. What the run has added is a
change. Where the keys of a dict or set keep changing, an object that records each operation takes
its place while a run goes on (`containers.py`), as it does for generators of numpy. Each replay
does the operations again. Code may do nothing else with it (`growing.py`). If it does, the run is
live, and `TraceTree.exclude` has the content guarded from then on.

What the ranks of a process group do together is intercepted as well: `collectives.py` knows which
functions are collectives and how tensors are spread, and records what DDP and FSDP2 do around a
forward as ops. Before each collective of the model, and at the end of a call, the ranks tell each
other what they are about to do (`rank_sync.py`), through the store by which they found
each other (`collectives.py`), in live, traced and replayed runs alike. `distributed.py` is the
public part.
"""
