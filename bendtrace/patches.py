"""Patches: values that replace the value at a node, in part or as a whole.

The names and their meanings are those of graphpatch.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> with bended.patch({"sub_0.output": bt.patches.ZeroPatch(slice=0)}):
...     print(bended(torch.tensor([1.0, -1.0])))
tensor([0., 0.])
"""

from bendtrace.insert.patch_kinds import (
    AddPatch,
    CustomPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)

__all__ = [
    "AddPatch",
    "CustomPatch",
    "Patch",
    "ProbePatch",
    "RecordPatch",
    "ReplacePatch",
    "ZeroPatch",
]
__dir__ = __all__.copy
