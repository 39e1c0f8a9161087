"""Comparing what a program returns with what the model returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bendtrace.errors import ExportError
from bendtrace.export.conditions import copies_of
from bendtrace.preserved_state import PreservedState
from bendtrace.recording.recorder import Recording
from bendtrace.source.internals import pytree

__all__ = ["Inputs", "compare", "difference", "tensors_in"]

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def compare(
    made: Callable[..., Any],
    calls: Sequence[Inputs],
    recordings: Sequence[Recording],
    tolerance: float | None = None,
    tell: Callable[[str], None] = lambda step: None,
    model: Callable[..., Any] | None = None,
) -> None:
    """Run a program with all inputs, and compare its outputs with those of the model.

    Args:
        made: the program.
        calls: the inputs.
        recordings: the runs of the model with them.
        tolerance: the largest accepted difference of floats; None for none.
        tell: called with "compare" before each of the inputs.
        model: the model, whose own rounding errors are accepted besides a tolerance.

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
        if different is not None and tolerance is not None and model is not None:
            errors = _rounding_errors(model, (args, kwargs), recording.result)
            different = difference(given, recording.result, tolerance, errors)
        if different is not None:
            hint = "" if tolerance is None else f" (tolerance={tolerance:g} is accepted)"
            raise ExportError(
                f"with input {number}, the program's output differs: {different}{hint}"
            )


class _Rounded(TorchDispatchMode):
    """Rounds the results of all operations once more, up or down at random.

    Parker, "Monte Carlo Arithmetic" (1997): so results differ by what rounding has left of them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(one.alias_info is not None for one in func._schema.returns):
            return out  # views, and what works in place
        return pytree.tree_map_only(Tensor, self._moved, out)

    def _moved(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype is torch.float64:
            return value
        chance = torch.rand(value.shape, generator=self._generator).to(value.device, value.dtype)
        return value + value * ((2 * chance - 1) * torch.finfo(value.dtype).eps)


def _rounding_errors(model: Callable[..., Any], call: Inputs, expected: Any) -> list[float]:
    """Return by how much each output of a model may be off; 0 where that is not known."""
    theirs = tensors_in(expected)
    errors = [0.0] * len(theirs)
    for seed in range(_SAMPLES):
        args, kwargs = copies_of(call)
        try:
            with PreservedState(model), torch.no_grad(), _Rounded(seed):
                ours = tensors_in(model(*args, **kwargs))
        except Exception:  # an input may lead to another side then
            continue
        if [one.shape for one in ours] != [one.shape for one in theirs]:
            continue
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            off = (one.double() - other.double()).abs()
            if off.numel() and bool(off.isfinite().all()):
                errors[place] = max(errors[place], float(off.max()))
    return errors


_SAMPLES = 4
_TIMES = 8  # sums in other orders are off by more than one rounding of their result


def difference(
    given: Any, expected: Any, tolerance: float | None = None, errors: Sequence[float] = ()
) -> str | None:
    """Return how the output of a program differs from that of the model; None if it does not.

    Args:
        given: the output of the program.
        expected: that of the model.
        tolerance: the largest accepted difference of floats; None for none.
        errors: the rounding errors of the model for each of its outputs.
    """
    ours, theirs = (tensors_in(value) for value in (given, expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} values in place of {len(theirs)}"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype is not other.dtype or one.shape != other.shape:
            what = f"{one.dtype}{list(one.shape)} in place of {other.dtype}{list(other.shape)}"
            return f"value {place} is a {what}"
        error = errors[place] * _TIMES if errors else 0.0
        if not _is_equal(one, other, tolerance, error):
            off = (one.double() - other.double()).abs().max() if one.numel() else 0.0
            return f"value {place} is off by {float(off):.3g}"
    return None


def _is_equal(one: Tensor, other: Tensor, tolerance: float | None, error: float) -> bool:
    if tolerance is not None and one.is_floating_point():
        accepted = max(tolerance, error)
        return torch.allclose(one, other, rtol=tolerance, atol=accepted, equal_nan=True)
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
