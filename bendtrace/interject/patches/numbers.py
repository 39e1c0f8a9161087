"""Patches of the numbers that modules have as attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from bendtrace.errors import InputError
from bendtrace.interject.patches.base import Patch

__all__ = ["with_numbers"]


@contextlib.contextmanager
def with_numbers(numbers: Mapping[tuple[nn.Module, str], Any], others: Any) -> Iterator[None]:
    """Within it, numbers that modules have are patched, and another context is entered.

    Args:
        numbers: the patches, by module and attribute.
        others: the other context.

    Raises:
        InputError: something is not a patch, or makes something else than a number.
    """
    new = {}
    for (owner, name), given in numbers.items():
        value = getattr(owner, name)
        for patch in [given] if isinstance(given, Patch) else given:
            if not isinstance(patch, Patch):
                raise InputError(f"the value at {name!r} is not a patch: {patch!r}")
            made = patch.op(value)
            value = value if made is None else made
        if type(value) not in (bool, int, float):
            raise InputError(f"the number at {name!r} can only become a number, not {value!r}")
        new[owner, name] = value
    missing = object()
    before = {(owner, name): vars(owner).get(name, missing) for owner, name in new}
    try:
        for (owner, name), value in new.items():
            setattr(owner, name, value)
        with others:
            yield
    finally:
        for (owner, name), old in before.items():
            if old is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
