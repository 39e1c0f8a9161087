"""Hooks on modules, kept in one place: `HookManager` and what it gives.

The names are those of TackleBox, and so is what they mean.

>>> import torch, bendtrace as bt
>>> model = torch.nn.ReLU()
>>> manager = bt.hooks.HookManager()
>>> _ = manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] + 1,), relu=model)
>>> model(torch.tensor([-1.0, 2.0]))
tensor([1., 3.])
>>> manager.remove_all_hooks()
"""

from bendtrace.interject.hooks.function import HookFunction
from bendtrace.interject.hooks.handle import HookHandle
from bendtrace.interject.hooks.manager import HookManager

__all__ = [
    "HookFunction",
    "HookHandle",
    "HookManager",
]
