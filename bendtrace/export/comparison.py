"""Comparing what a program returns with what the model returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bendtrace.errors import ExportError
from bendtrace.export.conditions import copies_of
from bendtrace.recording.recorder import Recording

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def compare(
    made: Callable[..., Any],
    calls: Sequence[Inputs],
    recordings: Sequence[Recording],
    tolerance: float | None = None,
    tell: Callable[[str], None] = lambda step: None,
) -> None:
    """Run a program with all inputs, and compare its outputs with those of the model.

    Args:
        made: the program.
        calls: the inputs.
        recordings: the runs of the model with them.
        tolerance: the largest accepted difference of floats; None for none.
        tell: called with "compare" before each of the inputs.

    Raises:
        ExportError: an output differs.
    """
    for number, ((args, kwargs), recording) in enumerate(zip(calls, recordings, strict=True), 1):
        tell("compare")
        try:
            with torch.no_grad():
                own_args, own_kwargs = copies_of((args, kwargs))
                given = made(*own_args, **own_kwargs)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise ExportError(f"with input {number}, the program raises {first}") from error
        different = difference(given, recording.result, tolerance)
        if different is not None:
            raise ExportError(f"with input {number}, the program's output differs: {different}")


def difference(given: Any, expected: Any, tolerance: float | None = None) -> str | None:
    """Return how the output of a program differs from that of the model; None if it does not."""
    ours, theirs = (tensors_in(value) for value in (given, expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} values in place of {len(theirs)}"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype is not other.dtype or one.shape != other.shape:
            what = f"{one.dtype}{list(one.shape)} in place of {other.dtype}{list(other.shape)}"
            return f"value {place} is a {what}"
        if not _is_equal(one, other, tolerance):
            off = (one.double() - other.double()).abs().max() if one.numel() else 0.0
            return f"value {place} is off by {float(off):.3g}"
    return None


def _is_equal(one: Tensor, other: Tensor, tolerance: float | None) -> bool:
    if tolerance is not None and one.is_floating_point():
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors and numbers in a value, numbers as tensors."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in tensors_in(item)]
    if type(value) is float:
        return [torch.tensor(value, dtype=torch.float64)]
    if type(value) in (bool, int):
        return [torch.tensor(value)]
    return []
