"""Autograd functions that a run follows: no gradient is computed, and they are given objects.

Such a function may write to a list or a module that it is given, so that its call is no op. Without
gradients nothing remains of the call but what its `forward` does, which runs as code of the model.
The rest is done here as torch does it in C (seen in torch 2.13 to 2.15; tests/test_boundaries.py
would notice a change).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bendtrace.tape.captured import PLAIN_TENSORS
from bendtrace.tape.watchers import call_silently, current_watcher


def can_follow(cls: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of an autograd function comes down to its `forward`."""
    return (
        not cls.__module__.startswith("torch.")
        and cls.setup_context is torch.autograd.Function.setup_context
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(type(one) in PLAIN_TENSORS for one in args if isinstance(one, Tensor))
    )


def follow(cls: Any, args: tuple[Any, ...]) -> Any:
    """Call the `forward` of an autograd function, and return what `apply` returns."""
    context = call_silently(lambda: cls._backward_cls(), (), {})
    context.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    output = cls.forward(context, *args)
    watcher = current_watcher()
    if watcher is not None and context.dirty_tensors:  # whose versions torch counts up
        watcher.unseen(f"ctx.mark_dirty, in a call of {cls.__name__} without gradients,")
    if type(output) is not tuple:
        return _returned(output, args) if isinstance(output, Tensor) else output
    return tuple(_returned(one, args) if isinstance(one, Tensor) else one for one in output)


def _returned(output: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Return what becomes of a tensor that `forward` returns: no argument is returned itself."""
    if any(output is one for one in args):
        return output.detach() if output.requires_grad else output.view_as(output)
    return output.detach_() if output.requires_grad and not output._is_view() else output
