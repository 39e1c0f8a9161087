"""Whether what a compiled path gave is what a replay gave, within what compilers are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bendtrace.recording.parts import PLAIN_TYPES, attributes_of, identical
from bendtrace.recording.writes import storage_of

__all__ = ["difference", "laid_out"]

# How far values may be apart, relative to the largest one: far more than reordered sums cost,
# far less than a wrong graph does.
_ALLOWED = {
    torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3,
    torch.float16: 5e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


def difference(
    ours: Any, theirs: Any, known: Iterable[Tensor]
) -> tuple[str | None, dict[int, tuple[int, ...]]]:
    """Say how an output differs from the one that a replay gave; None if it does not.

    That a tensor is laid out in memory in another order is told apart from that: the second thing
    given is the right order of dimensions, by the ids of such tensors.

    Args:
        ours: what the compiled path gave.
        theirs: what the replay gave.
        known: what was there before: arguments and state.
    """
    compared = _Comparison(list(known))
    return compared.between(ours, theirs), compared.laid_out


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in the order in which they lie in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a tensor, or a copy, whose dimensions lie in memory in a certain order."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.permute(order_of(tensor)).is_contiguous()


class _Comparison:
    def __init__(self, known: list[Tensor]) -> None:
        self.laid_out: dict[int, tuple[int, ...]] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given to another
        self._ours: list[Tensor] = known
        self._theirs: list[Tensor] = list(known)

    def between(self, ours: Any, theirs: Any) -> str | None:
        if type(ours) is not type(theirs):
            return f"it gives a {type(ours).__name__}, and not a {type(theirs).__name__}"
        if isinstance(ours, Tensor):
            return self._between_tensors(ours, theirs)
        if type(ours) in PLAIN_TYPES:
            same = identical(ours, theirs) or (
                type(ours) is float and abs(ours - theirs) <= 1e-3 * max(1.0, abs(theirs))
            )
            return None if same else f"it gives {ours!r}, and not {theirs!r}"
        if id(ours) in self._seen:
            return None if self._seen[id(ours)] == id(theirs) else "it gives other objects"
        self._seen[id(ours)] = id(theirs)
        self._kept += (ours, theirs)
        if isinstance(ours, (list, tuple)):
            pairs = list(zip(ours, theirs, strict=False))
            if len(ours) != len(theirs):
                return f"it gives {len(ours)} things, and not {len(theirs)}"
        elif isinstance(ours, dict):
            if tuple(ours) != tuple(theirs):
                return "it gives other keys"
            pairs = [(ours[key], theirs[key]) for key in ours]
        else:
            pairs = []
        if not isinstance(ours, torch.nn.Module):
            mine, others = attributes_of(ours), attributes_of(theirs)
            if mine.keys() != others.keys():
                return "it gives an object with other attributes"
            pairs += [(mine[key], others[key]) for key in mine]
        return next(filter(None, (self.between(*pair) for pair in pairs)), None)

    def _between_tensors(self, ours: Tensor, theirs: Tensor) -> str | None:
        if ours is theirs:
            return None
        for name in ("dtype", "device", "shape", "requires_grad", "layout"):
            mine, others = getattr(ours, name), getattr(theirs, name)
            if mine != others:
                return f"{name} of a result is {mine}, and not {others}"
        if ours.is_inference() != theirs.is_inference() or ours.is_leaf != theirs.is_leaf:
            return "a result is another kind of node of the autograd graph"
        if ours.stride() != theirs.stride() and ours.numel() > 1:
            if not (_is_dense(ours) and _is_dense(theirs)):
                return f"a result has strides {ours.stride()}, and not {theirs.stride()}"
            self.laid_out[id(ours)] = order_of(theirs)
        if vars(ours).keys() != vars(theirs).keys():
            return f"a result has attributes {sorted(vars(ours))}, and not {sorted(vars(theirs))}"
        if _relations(ours, self._ours) != _relations(theirs, self._theirs):
            return "its results share memory in another way"
        self._ours.append(ours)
        self._theirs.append(theirs)
        with torch.no_grad():
            return _between_values(ours.detach(), theirs.detach())


def _relations(tensor: Tensor, others: list[Tensor]) -> list[tuple[bool, bool]]:
    """How a tensor is related to others: whether it is one of them, or in the same memory."""
    storage = storage_of(tensor)
    return [
        (other is tensor, bool(tensor.numel()) and storage != 0 and storage_of(other) == storage)
        for other in others
    ]


def _between_values(ours: Tensor, theirs: Tensor) -> str | None:
    allowed = _ALLOWED.get(ours.dtype)
    if not ours.numel():
        return None
    if allowed is None:
        return None if torch.equal(ours, theirs) else f"results of {ours.dtype} are not equal"
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(ours.isnan(), theirs.isnan()):
        return "other results are finite"
    if not finite.any():
        return None
    far = torch.float64 if not ours.is_complex() else torch.complex128
    wanted = theirs[finite].to(far)
    apart = float((ours[finite].to(far) - wanted).abs().max())
    scale = max(1.0, float(wanted.abs().max()))
    if apart <= allowed * scale:
        return None
    return f"results are {apart:.3g} apart, with values up to {scale:.3g}"
