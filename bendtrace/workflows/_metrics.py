"""What a metric gives, as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError

__all__ = ["Metric", "number_of", "required_metric", "scalar_of"]

Metric = Callable[[Any], Any]


def required_metric(metric: Any) -> Metric:
    """Return a metric, if it is one.

    Raises:
        InputError: it cannot be called.
    """
    if not callable(metric):
        raise InputError(
            f"metric= is a function of the model's output that gives a number, not {metric!r}"
        )
    return metric  # type: ignore[no-any-return]


def scalar_of(metric: Metric, output: Any) -> Tensor | float:
    """Return what a metric makes of an output: a tensor without dimensions, or a number.

    Raises:
        InputError: it gave something else.
    """
    value = metric(output)
    if isinstance(value, Tensor):
        if value.dim() or value.is_complex():
            raise InputError(
                "metric= has to give a number or a tensor without dimensions, not a tensor of "
                f"shape {tuple(value.shape)} and {value.dtype}; take its mean or sum, or one item"
            )
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"metric= has to give a number or a tensor without dimensions, not {value!r}"
        ) from None


def number_of(metric: Metric, output: Any) -> float:
    """Return what a metric makes of an output, as a number.

    Raises:
        InputError: it gave something else.
    """
    value = scalar_of(metric, output)
    return value.detach().to(torch.float64).item() if isinstance(value, Tensor) else value
