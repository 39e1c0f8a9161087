"""Taking a model out of Python: with its branches and loops, as one program.

`BendedModule.export` is what one calls; here is what it returns, and what runs its ONNX files.

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
