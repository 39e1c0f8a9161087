"""Running a model on real inputs, and recording what happens.

`record` in `recorded_call.py` binds the arguments by name and scans everything that the run can
read (`watch/scan.py` goes through arguments, modules and objects, and through what code names:
closures, globals, members of classes). The result of the scan is one flat list of captured values,
the `Environment`. Then it calls the model under a `Recorder`, a `TorchFunctionMode`. The model's
own Python runs on real tensors. The recorder sees each call of a torch function, and appends an
`Op` to the `Tape` (`tape/tape.py`) by its `TapeWriter` (`tape_writer.py`). An op holds the
function, its arguments with tensors replaced by references to the ops that produced them
(`values.py`, `encoding.py`), its place in the source (`python/sites.py`), the module call around it
(`scopes.py`, which reads in the source by which of its names a module is called), and the grad and
autocast state (`tape/contexts.py`).

Several objects share this work, one for each of these aspects. Most ops are ordinary: a torch
function that writes to nothing (`watch/functions.py` reads that from its schemas) receives
tensors that are on the tape and plain values, and returns a new tensor. For these, the *fast
path* (`fast_path.py`) does everything in one function, which is the main reason why tracing is
cheap. It leaves unusual ops to the `Recorder`. Both record the same, and
`tests/test_fast_path.py` compares them for every model of the corpus.

Arrays of `x.numpy()` are followed as well (`arrays.py`): before each instruction that works on one,
an object that records an op takes the place of an operand (`python/results.py`). On the tape, a
tensor stands for each array (`array_functions.py`).

A block under `torch.utils.checkpoint` without reentry is recorded op by op, and the tape notes
where it begins and ends (`checkpoints.py`). Torch's own hooks save nothing in it, in a replay as
in eager; what the backward pass calls is a `Block`, which does the recorded ops again, or, after
the first run, the model's own function. A call may go through a block in several portions, along
known code and in resumed Python: `Hold` takes the block from one to the next. Gates keep the
insertions of the call for it, and how often each was passed. An observer is not called again.

After the run, `finish.py` compares the environment with its former state. Attributes, buffers,
lists and dicts that the run changed become part of the tape, so that a replay changes them too.
Whatever a replay could not do adds a line to `Tape.blockers`, with its place in the source
(`python/sites.py`): such calls run live.
"""
