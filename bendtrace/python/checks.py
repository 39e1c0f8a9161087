"""Checks of arguments: they raise an `InputError` with the name and value of the option."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from bendtrace.python.lazy import errors


def did_you_mean(
    name: Any,
    names: Iterable[str],
    *,
    otherwise: str = "",
    cutoff: float = 0.6,
    quotes: bool = True,
) -> str:
    """Return the end of a message about a name that does not exist: `; did you mean 'relu'?`."""
    near = similar(name, names, 3, cutoff)
    words = " or ".join(map(repr if quotes else str, near))
    return f"; did you mean {words}?" if near else otherwise


def similar(name: Any, names: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the names that are spelled like one that does not exist, the most similar first."""
    return get_close_matches(str(name), list(names), most, cutoff)


def several(value: Any) -> list[Any]:
    """Return the items of a list, tuple or set as a list; anything else as the only item."""
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def free_name(wish: str, taken: Container[str], separator: str = "_", first: int = 1) -> str:
    """Return a name, with a number after it if it is taken.

    Example:
        >>> free_name("relu", ["relu", "relu_1"])
        'relu_2'
    """
    name, number = wish, first
    while name in taken:
        name = f"{wish}{separator}{number}"
        number += 1
    return name


def refuse_without_arguments(function: Any) -> None:
    """Raise if a function that is called with a value takes none, as far as that is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    if all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters):
        name = getattr(function, "__name__", type(function).__name__)
        raise errors.InputError(f"{name} is called with the value of a node, and takes no argument")


def required_arguments(
    args: Any, kwargs: Any, names: tuple[str, str] = ("args=", "kwargs=")
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model, which have to be a tuple or list, and a mapping or None.

    A tensor would be taken for the tuple of its rows, and a text for the tuple of its letters.
    """
    if type(args) not in (tuple, list):
        raise errors.InputError(
            f"{names[0]} has to be a tuple of the positional arguments, not a "
            f"{type(args).__qualname__}; for a single argument, pass (argument,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise errors.InputError(
            f"{names[1]} has to be a dict of the keyword arguments, not a "
            f"{type(kwargs).__qualname__}"
        )
    wrong = [key for key in kwargs or () if not isinstance(key, str)]
    if wrong:
        message = f"{names[1]} holds keyword arguments by name, but {wrong[0]!r} is not a name"
        raise errors.InputError(message)
    return tuple(args), dict(kwargs or {})


def required_choice(name: str, value: Any, *choices: str) -> str:
    """Return an option that has to be one of several words."""
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(f'"{choice}"' for choice in choices)
        raise errors.InputError(f"{name}= is {words}, not {value!r}")
    return value


def required_int(name: str, value: Any, least: int | None = None, *, or_none: bool = False) -> Any:
    """Return an option that has to be an int, with an optional minimum; None only where allowed."""
    if (or_none and value is None) or (
        type(value) is int and (least is None or value >= least)
    ):  # fmt: skip
        return value
    kind = {None: "an int", 1: "a positive int"}.get(least, f"an int of at least {least}")
    raise errors.InputError(f"{name}= has to be {kind}, not {value!r}")


def required_path(what: str, value: Any) -> str:
    """Return the text of a path; a number is none, although `open` takes it."""
    try:
        return str(os.fsdecode(value))
    except TypeError:
        raise errors.InputError(f"{what} has to be a path, not {shown(value)}") from None


def required_kind(what: str, value: Any, *kinds: type) -> Any:
    """Return an argument that has to be of one of some classes, which `what` says in words."""
    if not isinstance(value, kinds):
        raise errors.InputError(f"{what}, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value in one line, for an error."""
    text = repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return text if "\n" not in text and len(text) < 80 else f"a {type(value).__name__}"


def required_number(
    name: str, value: Any, *, or_none: bool = False, finite: bool = False
) -> Any:  # fmt: skip
    """Return an option that has to be a number of at least 0; None only where allowed."""
    if or_none and value is None:
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0 or (finite and value == math.inf):
        raise errors.InputError(f"{name}= has to be a number of at least 0, not {value!r}")
    return value


def is_inside(path: str, nodes: Container[str]) -> bool:
    """Return whether a node or module is one of some, or in one of them."""
    while path:
        if path in nodes:
            return True
        path = path.rpartition(".")[0]
    return False


def listed(names: list[str], most: int = 8) -> str:
    """Return names joined by commas, with the number of omitted ones."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
