"""Rewriting: nodes replaced, removed or added between others, and modules exchanged.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> _ = bt.rewriting.replace(bended, "sub_0", torch.neg)
>>> bended(torch.tensor([0.0, 1.0]))
tensor([-0.0000, -0.7616])
"""

from bendtrace._rewriting import replace_module, replace_module_native
from bendtrace.interject.rewriting import between, remove, replace, splice

__all__ = [
    "between",
    "remove",
    "replace",
    "replace_module",
    "replace_module_native",
    "splice",
]
