"""How far two saved values are from each other."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace._compare import same_bits

__all__ = ["ValueDifference", "compare_numbers", "compare_tensors"]


@dataclass(frozen=True)
class ValueDifference:
    """How far two values of the same shape are from each other.

    Attributes:
        differing: how many elements differ: in a bit, or, between dtypes, in value.
        elements: how many elements there are.
        max_abs: the largest absolute difference; elements that are nan or the same infinity on
            both sides count as equal. None if no number can be given.
        max_rel: the largest difference relative to the larger of the two magnitudes; None as
            above.
        first: index of the first element that differs, in the order of rows.
        a: its value in the first run.
        b: its value in the second run.
        nan_a: how many elements are nan in the first run only.
        nan_b: how many elements are nan in the second run only.
    """

    differing: int
    elements: int
    max_abs: float | None = None
    max_rel: float | None = None
    first: tuple[int, ...] = ()
    a: Any = None
    b: Any = None
    nan_a: int = 0
    nan_b: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values, ready for JSON."""
        plain = asdict(self)
        plain["first"] = list(self.first)
        for key in ("max_abs", "max_rel", "a", "b"):
            value = plain[key]
            if not isinstance(value, (bool, int, float, type(None))) or (
                type(value) is float and not math.isfinite(value)
            ):
                plain[key] = repr(value)
        return plain

    def __str__(self) -> str:
        if not self.elements:
            return "value"
        if self.elements == 1 and not self.first:
            return _pair(self.a, self.b)
        nans = [f"{count} nan only in {run}"
                for count, run in ((self.nan_a, "a"), (self.nan_b, "b")) if count]  # fmt: skip
        parts = []
        if self.max_abs == 0 and not nans:
            parts = ["in bits only"]
        elif self.max_abs:
            parts = [f"max abs {self.max_abs:.3g}"]
        parts += [f"{self.differing} of {self.elements} differ", *nans]
        index = ", ".join(map(str, self.first))
        return f"{', '.join(parts)}, first [{index}]: {_pair(self.a, self.b)}"


def compare_numbers(a: Any, b: Any) -> ValueDifference | None:
    """Compare two numbers that came out of tensors; None if they are the same."""
    if same_bits(a, b):
        return None
    try:
        distance = 0.0 if a == b else abs(a - b)
        scale = max(abs(a), abs(b))
        distance, relative = float(distance), float(distance / scale) if scale else 0.0
    except (TypeError, ValueError, ArithmeticError):
        return ValueDifference(1, 1, a=a, b=b)
    return ValueDifference(1, 1, distance, relative, a=a, b=b)


def compare_tensors(
    a: Tensor, b: Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> ValueDifference | None:
    """Compare two saved tensors of one shape.

    Args:
        a: the value in the first run.
        b: the value in the second run.
        rtol: as in `torch.isclose`; with both at 0 the same means the same bits.
        atol: as in `torch.isclose`.

    Returns:
        How they differ; None if they are the same.

    Example:
        >>> import torch
        >>> print(compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])))
        max abs 0.5, 1 of 2 differ, first [1]: 2.0 -> 2.5
    """
    a, b = a.detach(), b.detach()
    plain = all(t.layout is torch.strided and not t.is_quantized and not t.is_nested
                and not t.is_meta for t in (a, b))  # fmt: skip
    if not plain:
        a, b = (t.to_dense() if t.layout is not torch.strided and not t.is_nested else t
                for t in (a, b))  # fmt: skip
        if a.is_meta or b.is_meta or a.is_nested or b.is_nested or a.is_quantized:
            return None if same_bits(a, b) else ValueDifference(0, 0)
    a, b = a.cpu().resolve_conj().resolve_neg(), b.cpu().resolve_conj().resolve_neg()
    if a.numel() == 0:
        return None
    if rtol or atol:
        wide = torch.promote_types(a.dtype, b.dtype)
        differs = ~torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    else:
        differs = _differing(a, b)
    flat = differs.reshape(-1)
    count = int(flat.sum())
    if not count:
        return None
    position = int(flat.to(torch.uint8).argmax())
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), a.shape))
    max_abs, max_rel = _distances(a, b)
    nans = [t.isnan() for t in (a, b)]
    return ValueDifference(
        differing=count,
        elements=a.numel(),
        max_abs=max_abs,
        max_rel=max_rel,
        first=first,
        a=a.reshape(-1)[position].item(),
        b=b.reshape(-1)[position].item(),
        nan_a=int((nans[0] & ~nans[1]).sum()),
        nan_b=int((nans[1] & ~nans[0]).sum()),
    )


_WIDEST = 40
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Say for each element whether it differs: in a bit, or, between dtypes, in value."""
    if a.dtype == b.dtype:
        if a.is_complex():
            return _differing(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
        plain = _SAME_SIZE[a.dtype.itemsize]
        # reshape, since a single number cannot be viewed in another dtype of its own size
        # everywhere, and contiguous, since views of a dtype want that.
        bits = [t.contiguous().reshape(-1).view(plain).reshape(t.shape) for t in (a, b)]
        return bits[0] != bits[1]
    a, b = _wide(a), _wide(b)
    return (a != b) & ~(a.isnan() & b.isnan())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _distances(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    a, b = _wide(a), _wide(b)
    distance = (a - b).abs()
    # What is nan, or the same infinity, on both sides has nan for a distance, which is left out.
    return _largest(distance), _largest(distance / torch.maximum(a.abs(), b.abs()))


def _largest(t: Tensor) -> float | None:
    known = t[~t.isnan()]
    return float(known.max()) if known.numel() else None


def _pair(a: Any, b: Any) -> str:
    for digits in (6, 9, 17):
        told = _short(a, digits), _short(b, digits)
        if told[0] != told[1]:
            break
    return f"{told[0]} -> {told[1]}"


def _short(value: Any, digits: int) -> str:
    if type(value) is float and not value.is_integer():
        return f"{value:.{digits}g}"
    text = repr(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
