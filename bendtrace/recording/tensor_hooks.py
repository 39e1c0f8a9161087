"""Hooks that a model puts on tensors that it computes, which each replay puts on its own.

`tensor.register_hook(function)` gives a handle, by which the hook can be taken away again. The tape
has a tensor without content that carries it, and taking it away is an op of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bendtrace.recording.transforms import as_one_op

__all__ = ["REGISTERS", "HandleOfRun", "registers"]

REGISTERS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})


@functools.cache
def registers(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return what does the same as one of `REGISTERS`, and gives a tensor with the handle."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        carrier = torch.empty(0)
        carrier.handle = function(*args, **kwargs)  # type: ignore[attr-defined]
        return carrier

    call.__name__ = call.__qualname__ = function.__name__
    return call


@as_one_op
def remove(carrier: Any) -> None:
    carrier.handle.remove()


remove.gives_nothing = True  # type: ignore[attr-defined]


class HandleOfRun(RemovableHandle):
    """What a model is given as the handle of a hook while it is recorded.

    Args:
        carrier: the tensor that has it.
    """

    def __init__(self, carrier: Any) -> None:
        self.__dict__.update(vars(carrier.handle))
        self._carrier = carrier

    def remove(self) -> None:
        """Take the hook away."""
        remove(self._carrier)

    def __getstate__(self) -> Any:
        return self._carrier.handle.__getstate__()
