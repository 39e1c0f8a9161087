"""Selecting values of a run during the run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bendtrace.errors import InputError
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.names import is_layer_name
from bendtrace.paths.candidates import NodeSelector
from bendtrace.paths.nodes import NodePath
from bendtrace.paths.view import Node
from bendtrace.recording.names import NodeRef
from bendtrace.tape.watchers import unwatched
from bendtrace.torch_rules.functions import is_torchs_function
from bendtrace.torch_rules.owners import modules_in

__all__ = ["Selection", "Spec"]

Spec = (
    str
    | int
    | re.Pattern[str]
    | type[nn.Module]
    | nn.Module
    | Callable[[LayerEntry], Any]
    | Node
    | NodeRef
    | NodeSelector
    | LayerEntry
    | ModuleEntry
    | Iterable[Any]
)

_WILD = re.compile(r"[*?\[]")
_SINGLE = (str, int, re.Pattern, nn.Module, LayerEntry, ModuleEntry)
_DEFERRED = (Node, NodePath, NodeRef, NodeSelector)


@dataclass(eq=False)
class _Want:
    """One request."""

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
    """Values selected by names, modules, positions or functions.

    Args:
        spec: one of these, or several in a list:

            - a name of a layer, with or without position and pass (`conv2d_3_7`, `relu_1:2`);
            - a name of a module, with or without pass (`features.6`): the outputs of the module;
            - a pattern for such names, with `*`, or compiled;
            - a position, also counted from the end;
            - a module, or a class of modules: their outputs;
            - a function of the entry: its result is kept; True keeps the value itself, False and
              None keep nothing;
            - a node path, a tree node or a node of a mirror, an entry of a log, a selector or a
              torch function. Only the finished run can resolve these.
        model: the model to run.

    Attributes:
        deferred: the requests that only the finished run can resolve.

    Raises:
        InputError: the spec is none of these.
    """

    def __init__(self, spec: Spec, model: Any = None) -> None:
        single = isinstance(spec, (*_SINGLE, *_DEFERRED)) or callable(spec)
        try:
            keys = [spec] if single else list(spec)  # type: ignore[arg-type]
        except TypeError:
            keys = [spec]
        keys = [key.label if isinstance(key, LayerEntry) else key for key in keys]
        keys = [_called(key) if isinstance(key, ModuleEntry) else key for key in keys]
        for key in keys:
            if isinstance(key, bool) or not (
                isinstance(key, (str, int, re.Pattern, nn.Module, *_DEFERRED)) or callable(key)
            ):
                raise InputError(
                    "values to save are selected by names, positions, modules or functions, "
                    f"not by {key!r}"
                )
        modules = _module_names(model)
        self.deferred: list[_Want] = [_Want(key) for key in keys if _is_deferred(key, modules)]
        keys = [key for key in keys if all(key is not want.key for want in self.deferred)]
        self._functions = [_Want(key) for key in keys if _is_function(key)]
        self._names = [_Want(key) for key in keys if isinstance(key, (str, re.Pattern))]
        self._positions = {key: _Want(key) for key in keys if isinstance(key, int)}
        self._modules = [_Want(key) for key in keys if _is_module(key)]

    @property
    def last(self) -> int:
        """How many of the last layers positions from the end can select."""
        return -min((key for key in self._positions if key < 0), default=0)

    @property
    def asks_for_results(self) -> bool:
        """Whether outputs of modules, or of the run, can be selected."""
        return bool(self._names or self._modules or self._positions)

    @property
    def needs_entries(self) -> bool:
        """Whether entries are needed to decide what is selected."""
        return bool(self._functions)

    def layer(self, names: tuple[str, ...], position: int) -> bool:
        """Return whether a layer is selected by its names or its position."""
        found = False
        for want in self._names:
            if want.matches(names):
                want.met = found = True
        want_at = self._positions.get(position)
        if want_at is not None:
            want_at.met = found = True
        return found

    def from_the_end(self, position: int, count: int) -> bool:
        """Return whether a layer is selected by its position from the end."""
        want = self._positions.get(position - count)
        if want is not None:
            want.met = True
        return want is not None

    def module(self, module: nn.Module | None, names: tuple[str, ...]) -> bool:
        """Return whether the outputs of a module are selected."""
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
        """Return the results of the functions for an entry: True for the value, None for nothing.

        They do not advance the random numbers of the run, and are not recorded.
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
        """Return the requests that matched nothing."""
        wants = [*self._names, *self._modules, *self._positions.values(), *self.deferred]
        return [want.key for want in wants if not want.met]


def _called(entry: ModuleEntry) -> str:
    return entry.label if entry.passes > 1 else entry.name


def _module_names(model: Any) -> frozenset[str] | None:
    """Return the names of the modules of a model; None if they are not needed."""
    return None if model is None else frozenset(modules_in(model))


def _is_deferred(key: Any, modules: frozenset[str] | None) -> bool:
    """Return whether only the finished run can resolve a key.

    Args:
        key: the key.
        modules: the names of the modules; None if strings are names of layers or modules anyway.
    """
    if isinstance(key, _DEFERRED):
        return True
    if not isinstance(key, str):
        return callable(key) and not _is_module(key) and is_torchs_function(key)
    if modules is None or _WILD.search(key):
        return False
    name = re.sub(r":\d+$", "", key)
    if is_layer_name(name):  # a module can have the name of a layer, and then the name is ambiguous
        return any(name in (module, module.replace(".", "_")) for module in modules)
    return name not in modules


def _is_module(key: Any) -> bool:
    return isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))


def _is_function(key: Any) -> bool:
    return callable(key) and not _is_module(key) and not is_torchs_function(key)
