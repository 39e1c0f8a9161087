"""Taking a model out of Python: with its branches and loops, as one program.

`BendedModule.export` is what one calls; here is what it returns, and what runs its ONNX files.

`exporting.py` records the model's runs with the given inputs, with the state at each question,
and `machine.py` lays them over each other by these states: questions with their ways on. Its
`View` finds where the sides of a question meet again (post-dominators) and which questions a loop
repeats (natural loops). `writer.py` writes that as one function of tensors in which a question is
`cond` and a loop `while_loop`, both of which are given all that they use. `ops.py` writes the ops
of a segment; numbers that come out of tensors stay tensors (`machine.py`). Sizes that values
decide are passed on as tensors as well (`exporting.py`): so a round of a loop can change them,
and a side requires of them only what holds there. What a side writes to is copied before, and no
two operands share memory. A *flag* says that a call came to a side that nobody has seen.
`conditions.py` writes what inputs have to have in common with the exported ones: as guards of the
program, and as operations on tensors for files. torch.export traces the function, and the program
is compared with the recorded runs before it is handed out; `targets.py` writes it to files, for
AOTInductor with outputs that it keeps apart and with checks of its inputs. Counters of `while`
loops are taken out of tensors while the runs are recorded. If the result has no form as a
program, the runs are recorded again without that. An error of torch.export is traced back to the
op that the refused line was written for. `insertions.py` records runs in which what is inserted
runs like code of the model (`Recorder.follow`), so that it is part of the program.

Example:
    >>> import torch, bendtrace as bt
    >>> exported = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x).export(torch.ones(2))
    >>> type(exported).__name__, type(exported.program).__name__
    ('Exported', 'ExportedProgram')
"""

from bendtrace.export.exporting import Exported
from bendtrace.export.targets import OnnxProgram
from bendtrace.export.writer import Unseen

__all__ = ["Exported", "OnnxProgram", "Unseen"]
__dir__ = __all__.copy
