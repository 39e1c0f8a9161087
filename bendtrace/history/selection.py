"""Saying which values of a run are meant, while it is going on."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bendtrace.errors import InputError
from bendtrace.history.entries import LayerEntry
from bendtrace.recording.watcher import unwatched

__all__ = ["Selection", "Spec"]

Spec = (
    str
    | int
    | re.Pattern[str]
    | type[nn.Module]
    | nn.Module
    | Callable[[LayerEntry], Any]
    | Iterable[Any]
)

_WILD = re.compile(r"[*?\[]")


@dataclass(eq=False)
class _Want:
    """One thing that was asked for."""

    key: Any
    met: bool = False

    def matches(self, names: tuple[str, ...]) -> bool:
        if isinstance(self.key, re.Pattern):
            return any(map(self.key.fullmatch, names))
        if not isinstance(self.key, str):
            return False
        if _WILD.search(self.key):
            return any(fnmatch.fnmatchcase(name, self.key) for name in names)
        return self.key in names


class Selection:
    """Values that are meant by names, modules, positions or functions.

    Args:
        spec: one of these, or several in a list:

            - a name of a layer, with or without position and pass (`conv2d_3_7`, `relu_1:2`);
            - a name of a module, with or without pass (`features.6`): the values it gives;
            - a pattern for such names, with `*`, or compiled;
            - a position, also counted from the end;
            - a module, or a class of modules: the values that they give;
            - a function of the entry: whatever it returns is kept, the value itself for True,
              nothing for False and None.

    Raises:
        InputError: it is none of these.
    """

    def __init__(self, spec: Spec) -> None:
        single = isinstance(spec, (str, int, re.Pattern, nn.Module)) or callable(spec)
        try:
            keys = [spec] if single else list(spec)  # type: ignore[arg-type]
        except TypeError:
            keys = [spec]
        for key in keys:
            if isinstance(key, bool) or not (
                isinstance(key, (str, int, re.Pattern, nn.Module)) or callable(key)
            ):
                raise InputError(
                    f"what to save is said by names, positions, modules or functions, not {key!r}"
                )
        self._functions = [_Want(key) for key in keys if _is_function(key)]
        self._names = [_Want(key) for key in keys if isinstance(key, (str, re.Pattern))]
        self._positions = {key: _Want(key) for key in keys if isinstance(key, int)}
        self._modules = [_Want(key) for key in keys if _is_module(key)]

    @property
    def last(self) -> int:
        """How many of the last layers can be meant by positions from the end."""
        return -min((key for key in self._positions if key < 0), default=0)

    @property
    def asks_for_results(self) -> bool:
        """Whether what modules, or the run, give can be meant."""
        return bool(self._names or self._modules or self._positions)

    @property
    def needs_entries(self) -> bool:
        """Whether entries have to be made to tell what is meant."""
        return bool(self._functions)

    def layer(self, names: tuple[str, ...], position: int) -> bool:
        """Whether a layer is meant by its names or its position."""
        found = False
        for want in self._names:
            if want.matches(names):
                want.met = found = True
        want_at = self._positions.get(position)
        if want_at is not None:
            want_at.met = found = True
        return found

    def from_the_end(self, position: int, count: int) -> bool:
        """Whether a layer is meant by its position from the end."""
        want = self._positions.get(position - count)
        if want is not None:
            want.met = True
        return want is not None

    def module(self, module: nn.Module | None, names: tuple[str, ...]) -> bool:
        """Whether what a module gives is meant."""
        found = False
        for want in self._names:
            if want.matches(names):
                want.met = found = True
        for want in self._modules:
            key = want.key
            if module is key or (isinstance(key, type) and isinstance(module, key)):
                want.met = found = True
        return found

    def made_of(self, entry: LayerEntry) -> Any:
        """Return what the functions make of an entry: True for the value, None for nothing.

        They do not shift the random numbers of the run, and nothing of them is recorded.
        """
        for want in self._functions:
            state = unwatched(torch.get_rng_state, (), {})
            made = unwatched(want.key, (entry,), {})
            unwatched(torch.set_rng_state, (state,), {})
            want.met = True
            if made is not None and made is not False:
                return made
        return None

    def unmet(self) -> list[Any]:
        """Return what was asked for and did not come up."""
        wants = [*self._names, *self._modules, *self._positions.values()]
        return [want.key for want in wants if not want.met]


def _is_module(key: Any) -> bool:
    return isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))


def _is_function(key: Any) -> bool:
    return callable(key) and not _is_module(key)
