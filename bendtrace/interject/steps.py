"""Autograd steps that change nothing, but see the gradients that pass through them.

They are added where a call of a module begins and ends. A recorder sees them as ops.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function

from bendtrace.source.internals import keeps_version

__all__ = [
    "NOT_NUMBERED",
    "NOT_WRITABLE",
    "Gradients",
    "Node",
    "enter",
    "leave_as_view",
    "leave_in_place",
    "overlaps_itself",
    "rebase",
    "root",
    "storage",
]

Gradients = tuple[Tensor | None, ...]
Node = Any  # the nodes of autograd's graph have no common class
# In what torch (2.13, 2.14) says where a tensor of a read-only entry, or a view of it, is written.
NOT_WRITABLE = "created inside a custom Function"
NOT_NUMBERED = 2**64 - 1  # the sequence number of what accumulates the gradients of leaves


class Traffic(Protocol):
    """Receives gradients in backward passes."""

    def left(self, places: Sequence[int], gradient: Tensor | None) -> None:
        """Record the gradient of an output."""

    def entered(self, gradients: Gradients) -> Gradients:
        """Return the gradients to pass on for inputs."""


def enter(
    traffic: Traffic, tensors: Sequence[Tensor], writable: bool
) -> tuple[tuple[Tensor, ...], Node]:
    """Return tensors that share values and storage with others, and the step's autograd node.

    Args:
        traffic: receives the gradients.
        tensors: the other tensors.
        writable: whether they can be changed in place; if not, torch refuses it (`NOT_WRITABLE`).
    """
    step = _Entry if writable else _ReadOnlyEntry
    inside: tuple[Tensor, ...] = step.apply(*tensors)
    node: Node = inside[0].grad_fn
    # Not held strongly: what leads from the outputs to here holds it, and refers to this node.
    node.traffic = weakref.ref(traffic)
    return inside, node


def leave_in_place(traffic: Traffic, places: Sequence[int], tensor: Tensor) -> bool:
    """Add a step to a tensor's own history; return False if torch refuses that."""
    _made.exits.append((traffic, places))
    try:
        _in_place(_Exit, tensor)
    except RuntimeError:  # several views that were made at once cannot be changed in place
        return False
    finally:
        _made.exits.pop()
    return True


def leave_as_view(traffic: Traffic, places: Sequence[int], tensor: Tensor) -> Tensor:
    """Return a view that comes after a step; autograd refuses to change it in place."""
    _made.exits.append((traffic, places))
    try:
        view: Tensor = _ExitView.apply(tensor)
    finally:
        _made.exits.pop()
    return view


def rebase(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the history of another with the same storage.

    Raises:
        RuntimeError: autograd refuses to change it in place.
    """
    _in_place(_Rebase, tensor, other)


class _Made(threading.local):
    """Marks the step that is being created: as an argument, a recorder would record it."""

    def __init__(self) -> None:
        self.exits: list[tuple[Traffic, Sequence[int]]] = []


_made = _Made()


class _Entry(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # A detached tensor is not a view to autograd, so that it can be changed in place, and
        # shares the counter of such changes, so that they are noticed. Seen in torch 2.13;
        # test_hook_gradients.py would notice a change.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        traffic: Traffic | None = ctx.traffic()
        return gradients if traffic is None else traffic.entered(gradients)


class _ReadOnlyEntry(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tensors  # as views to autograd, of several of which none can be changed in place

    backward = staticmethod(_Entry.backward)


class _Exit(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        ctx.traffic, ctx.places = _made.exits[-1]
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.traffic.left(ctx.places, gradient)
        return gradient


class _ExitView(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.traffic, ctx.places = _made.exits[-1]
        return tensor.view_as(tensor)

    backward = staticmethod(_Exit.backward)


class _Rebase(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, gradient


def _in_place(step: type[Function], tensor: Tensor, *others: Tensor) -> None:
    """Enter a step into a tensor's history.

    To autograd it is an in-place change, which would invalidate what ops have saved for their
    backward pass. Nothing is changed, so they may continue to use it.
    """
    with keeps_version(tensor):
        step.apply(tensor, *others)
    # A view looks up its history again if the change counter differs from the last look-up. It has
    # to do that now: at the next change the counter will be what it was in between.
    _: Node = tensor.grad_fn


# What steps can be entered into


def root(tensor: Tensor) -> Tensor:
    """Return the base of a view, or the tensor itself: in-place changes go into its history."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def storage(tensor: Tensor) -> int:
    """Return a value that is equal for tensors with the same storage."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensors that consist of others
        return id(tensor)
    return found


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as after `expand` and `unfold`."""
    if not tensor._is_view() or tensor.is_sparse or tensor.is_nested:
        return False
    reach = 0  # the distance between elements of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
