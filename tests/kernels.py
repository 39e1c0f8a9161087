"""Which kernels a run takes: where two runs take different ones, their bits may differ.

Some of torch's modules ask whether anything is hooked to them, or whether two of their arguments
are one object, and take other kernels then. On one processor these may agree, and on the next one
not. So a test that compares bits has to compare runs that take the same.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["kernels", "seen"]

# What multiplies, or is said to be several ops at once.
_TOLD = ("mm", "bmm", "conv", "linear", "attention", "encoder")


def kernels(call: Callable[[], object]) -> collections.Counter[tuple[str, str]]:
    """Return how often each kernel that multiplies was called with which shapes."""
    with torch.autograd.profiler.profile(record_shapes=True, use_kineto=False) as profile:
        call()
    return collections.Counter(
        (event.name, str(event.input_shapes))
        for event in profile.function_events
        if event.name.startswith("aten::") and any(part in event.name for part in _TOLD)
    )


def seen(model: Any, *, backward: bool = False) -> Callable[..., Any]:
    """Return a model with hooks of torch's own on all of its modules, which change nothing.

    Args:
        model: the model.
        backward: whether to look at gradients, too.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_hook(lambda *_: None)
            if backward:
                module.register_full_backward_hook(lambda *_: None)
    return model  # type: ignore[no-any-return]
