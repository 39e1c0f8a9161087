"""Checks of arguments: they raise an `InputError` with the name and value of the option."""

from __future__ import annotations

import math
from typing import Any

from bendtrace.errors import InputError

__all__ = ["required_choice", "required_int", "required_number"]


def required_choice(name: str, value: Any, *choices: str) -> str:
    """Return an option that has to be one of several words."""
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(f'"{choice}"' for choice in choices)
        raise InputError(f"{name}= is {words}, not {value!r}")
    return value


def required_int(name: str, value: Any, least: int | None = None, *, or_none: bool = False) -> Any:
    """Return an option that has to be an int, with an optional minimum; None only where allowed."""
    if (or_none and value is None) or (
        type(value) is int and (least is None or value >= least)
    ):  # fmt: skip
        return value
    kind = {None: "an int", 1: "a positive int"}.get(least, f"an int of at least {least}")
    raise InputError(f"{name}= has to be {kind}, not {value!r}")


def required_number(
    name: str, value: Any, *, or_none: bool = False, finite: bool = False
) -> Any:  # fmt: skip
    """Return an option that has to be a number of at least 0; None only where allowed."""
    if or_none and value is None:
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0 or (finite and value == math.inf):
        raise InputError(f"{name}= has to be a number of at least 0, not {value!r}")
    return value
