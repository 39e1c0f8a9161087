"""Kept values: copies that are made only when the original is written to, and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.history.entries import LayerEntry
from bendtrace.source.internals import internal
from bendtrace.tape.captured import requires_grad
from bendtrace.torch_rules.mode_queries import unseen

_PLAIN = frozenset({Tensor, nn.Parameter})
_LAZY = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip
# Where they are missing, what is done makes copies of memory that is shared until a write.
_address = internal("torch._C._data_address", lambda tensor: tensor.untyped_storage().data_ptr())
_is_shared = internal("torch._C._is_cow_tensor", lambda tensor: True)


def lazily_copied(value: Tensor) -> Tensor:
    """Return a tensor with the present values of another; nothing is copied before a write.

    Tensors that torch cannot copy lazily are copied at once.
    """
    # Not for quantised values, whose copy would have no quantizer, nor for tensors that are only
    # marked as conjugated or negated: the copy would lose the mark, and with it the values.
    if (
        value.dtype in _LAZY
        and type(value) in _PLAIN
        and value.layout is torch.strided
        and not value.is_neg()
    ):
        try:
            # Private to torch (seen in 2.13 to 2.15). tests/test_capture.py notices if later writes
            # reach kept values, or if anything is copied without a write.
            return value._lazy_clone()
        except RuntimeError:  # memory of others, such as numpy's, or none at all
            pass
    return copied(value)


def lazily_copied_unless(value: Tensor, fixed: Container[int]) -> Tensor | None:
    """Copy an exact `Tensor` lazily; return None if it needs a closer look."""
    if value.layout is not torch.strided or value.dtype not in _LAZY or value.is_neg():
        return None
    try:
        if value.untyped_storage()._cdata in fixed:
            return None
        return value._lazy_clone()
    except RuntimeError:  # see `lazily_copied`
        return None


def copied(value: Tensor) -> Tensor:
    """Return a copy with the same alignment and strides, even if they overlap or leave gaps."""
    if (
        type(value) not in _PLAIN
        or value.layout is not torch.strided
        or value.is_nested
        or value.is_quantized
        or value.is_meta
        or not value.numel()
    ):
        return value.clone()
    shift = _shift(value)
    if not shift:
        copy = value.clone()
        if copy.stride() == value.stride():
            return copy
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = value.new_empty(extent + shift)
    flat[shift:].copy_(value.as_strided((extent,), (1,)))
    return flat.as_strided(value.shape, value.stride(), shift)


_ALIGNMENT = 64  # bytes, of memory that torch allocates


def _shift(value: Tensor) -> int:
    """Return the offset of a tensor, in elements, from an address that torch would choose.

    Kernels can round differently for other alignments.
    """
    try:
        address = _address(value) + value.storage_offset() * value.itemsize
    except RuntimeError:  # without memory, as inside torch.vmap
        return 0
    return int(address % _ALIGNMENT // value.itemsize)


def materialize(tensor: Tensor) -> None:
    """Give a tensor memory of its own, if it shares memory until a write.

    torch cannot change the size of shared memory, and writes through its address go unnoticed.
    """
    with unseen():
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return
        with contextlib.suppress(RuntimeError):  # without memory, as inside torch.vmap
            if _is_shared(tensor):
                tensor.data_ptr()


def tensors_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors in a value and the containers and dataclasses in it."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), seen)


Key = tuple[int, tuple[Any, ...]]


class Gradients:
    """The gradients of the latest backward pass through a run.

    Args:
        convert: applied to gradients before they are kept; None for nothing.

    Attributes:
        kept: the gradients, by op and element.
        watched: the values whose gradients are requested.
        wanted: those whose gradients are kept; None for all.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor] | None) -> None:
        self.kept: dict[Key, Tensor] = {}
        self._convert = convert
        self.watched: set[Key] = set()
        self.wanted: Container[Key] | None = None
        self._entries: dict[Key, list[LayerEntry]] = {}
        # How many values other than leaves have hooks, and in which backward pass one was called.
        self._inner, self._task = 0, -1

    def attach(self, key: Key, entry: LayerEntry) -> None:
        """Give an entry its gradient, now or when it is computed."""
        entry.gradient = self.kept.get(key)
        self._entries.setdefault(key, []).append(entry)

    def watch(self, key: Key, tensor: Tensor) -> None:
        """Keep the gradient of a tensor, as long as an owner is alive."""
        if not requires_grad(tensor):
            return
        self.watched.add(key)
        weak, is_leaf = weakref.ref(self), tensor.is_leaf
        self._inner += not is_leaf

        def hook(gradient: Tensor | None) -> None:
            keeper = weak()
            if keeper is not None and gradient is not None:  # None: nobody has used the value
                keeper._keep(key, gradient, is_leaf)

        handle = tensor.register_hook(hook)
        if is_leaf:  # it may be the caller's, and outlive the log
            weakref.finalize(self, handle.remove)

    def _keep(self, key: Key, gradient: Tensor, is_leaf: bool) -> None:
        """Keep a gradient, except that of a leaf from outside the run."""
        task = torch._C._current_graph_task_id()
        if not is_leaf:
            self._task = task
        elif self._inner and task != self._task:
            return
        if self.wanted is not None and key not in self.wanted:
            return
        with torch.no_grad():
            try:
                value = gradient.detach()
            except RuntimeError:  # one of a batch of gradients is not a tensor that could be kept
                return
            if self._convert is not None:
                value = self._convert(value)
            self.kept[key] = value.clone()
        for entry in self._entries.get(key, ()):
            entry.gradient = self.kept[key]
