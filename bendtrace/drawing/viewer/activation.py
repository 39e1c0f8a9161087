"""A saved activation in a few numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["activation_data"]

_FIRST = 8  # values that are shown as they are
_BINS = 24


def activation_data(contents: Any) -> dict[str, Any] | None:
    """Describe a saved activation: range, mean, spread, first values and a histogram.

    Args:
        contents: what was saved of an entry, None for nothing. What is no dense tensor of
            numbers is described by its printed form.

    Returns:
        Plain values ready for JSON, or None if nothing was saved. Statistics are of the finite
        values, and texts, so that nan and infinities can be told.

    Example:
        >>> import torch
        >>> found = activation_data(torch.tensor([1.0, 2.0, 3.0, float("nan")]))
        >>> found["mean"], found["nan"], found["first"]
        ('2', 1, ['1', '2', '3', 'nan'])
    """
    if contents is None:
        return None
    if not isinstance(contents, Tensor):
        return {"text": _cut(repr(contents)), "type": type(contents).__name__}
    told = {"shape": tuple(contents.shape), "dtype": str(contents.dtype).removeprefix("torch.")}
    if contents.layout is not torch.strided or contents.is_quantized or contents.is_nested:
        return {**told, "text": _cut(repr(contents))}
    if contents.is_meta or not contents.numel():
        return told
    with torch.no_grad():
        flat = contents.detach().reshape(-1)
        first = [_number(value) for value in flat[:_FIRST].tolist()]
        return {**told, "first": first, **_statistics(flat)}


def _statistics(flat: Tensor) -> dict[str, Any]:
    if flat.is_complex():
        flat = flat.abs()
    # Wide enough for a sum of any dtype; what is double stays double.
    values = flat if flat.dtype is torch.float64 else flat.float()
    finite = values[values.isfinite()]
    counts: dict[str, Any] = {
        "zeros": int((values == 0).sum()),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }
    if not finite.numel():
        return counts
    low, high = finite.aminmax()
    spread = finite.std(correction=0)
    bins = finite.cpu().histc(_BINS) if bool(low < high) else None
    return {
        **counts,
        "min": _number(low.item()),
        "max": _number(high.item()),
        "mean": _number(finite.mean().item()),
        "std": _number(spread.item()),
        **({} if bins is None else {"bins": [int(count) for count in bins.tolist()]}),
    }


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:396]} ..."
