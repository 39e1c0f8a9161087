"""Names of nodes during a run: the same names that the tree of paths will use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from bendtrace.paths.events import bound, parameters_of
from bendtrace.paths.naming import Holders, Registry, identifier
from bendtrace.recording.names import base_name_of
from bendtrace.source.sites import Site
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.tape import ModuleCall

__all__ = ["LiveNames"]


class LiveNames:
    """Names nodes as the run reaches them.

    Args:
        registry: the registry of node names, shared with the trees of other runs.
        function: the function that is run.
        root: the scope around the run.
        prefix: path of what is run, where that is a part of a model.
        path_of: for a method of a model, gives the paths of the modules that it calls, from their
            qualified names: those that they have in runs of the model.
    """

    def __init__(
        self,
        registry: Registry,
        function: Callable[..., Any],
        root: ModuleCall,
        prefix: str = "",
        path_of: Callable[[str], str] | None = None,
    ) -> None:
        self._registry = registry
        self._function = function
        self._root = root
        self._holders = Holders(function if isinstance(function, nn.Module) else None)
        # By identity; all of these are kept by the tape.
        self._prefix = prefix
        self._path_of = path_of
        self._paths: dict[int, str] = {id(root): prefix}
        self._parameters: dict[int, list[tuple[str, Any]]] = {}
        self._numbers: dict[int, tuple[Site, int]] = {}
        self._named: dict[tuple[str, int, Any], str] = {}

    def path(self, scope: ModuleCall) -> str:
        """Return the path of a named call."""
        return self._paths[id(scope)]

    def call(self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name a call of a module, and its arguments."""
        outer = scope.parent
        if outer is None or (outer is self._root and isinstance(self._function, nn.Module)):
            path = self._prefix
        elif outer is self._root and self._path_of is not None and scope.path:
            path = self._path_of(scope.path)
        else:
            path = self._below(self._paths[id(outer)], scope)
        self._paths[id(scope)] = path
        known = self._parameters.get(id(scope.module))
        if known is None:
            known = self._parameters[id(scope.module)] = parameters_of(scope.module)
        self._inputs(path, bound(known, args, kwargs))
        return path

    def rename(self, scope: ModuleCall, path: str) -> None:
        """Give a call the path that it has in other runs."""
        self._paths[id(scope)] = path

    def function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name the arguments of a function that is not a module."""
        self._inputs("", bound(parameters_of(self._function), args, kwargs))

    def arguments(
        self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call, by the names of the inputs in the tree."""
        owner = self._function if scope is self._root else scope.module
        known = self._parameters.get(id(owner))
        if known is None:
            known = self._parameters[id(owner)] = parameters_of(owner)
        path = self._paths[id(scope)]
        with self._registry.lock:
            return {
                self._registry.reserve(path, ("input", name), identifier(name)): value
                for name, value in bound(known, args, kwargs).items()
                if not isinstance(value, _NO_NODES) and _may_hold_values(value)
            }

    def op(
        self, scope: ModuleCall, site: Site | None, function: Any, states: Iterable[str]
    ) -> tuple[str, str]:
        """Name a call of a function.

        Args:
            scope: the module call that it happens in.
            site: its place in the source.
            function: the function.
            states: the labels of parameters and buffers among its arguments.

        Returns:
            Its path, and its name without a number.
        """
        base = base_name_of(function)
        path, number = self._paths[id(scope)], self._number(site)
        name = self._named.get((path, number, base))
        if name is None:
            with self._registry.lock:
                for state in states:
                    label = self._holders.state(state, scope)
                    self._registry.reserve(path, ("state", label), identifier(label))
                name = self._registry.reserve(path, ("op", number, base), identifier(base))
            self._named[path, number, base] = name
        return (f"{path}.{name}" if path else name), base

    def knows(self, scope: ModuleCall, site: Site | None, function: Any) -> bool:
        """Return whether `op` has already named such a call."""
        key = self._paths[id(scope)], self._number(site), base_name_of(function)
        return key in self._named

    def relative(self, scope: ModuleCall) -> str:
        """Return the name of the module in the code around a call."""
        return self._holders.module(scope)

    def _below(self, outer: str, scope: ModuleCall) -> str:
        relative = self._holders.module(scope)
        key = "call", self._number(scope.site), relative
        with self._registry.lock:
            name = self._registry.name(outer, key, identifier(relative or "forward"))
        return f"{outer}.{name}" if outer else name

    def _inputs(self, path: str, given: dict[str, Any]) -> None:
        with self._registry.lock:
            for name, value in given.items():
                if not isinstance(value, _NO_NODES) and _may_hold_values(value):
                    self._registry.reserve(path, ("input", name), identifier(name))

    def _number(self, site: Site | None) -> int:
        if site is None:
            return 0
        known = self._numbers.get(id(site))
        if known is None:
            with self._registry.lock:
                known = self._numbers[id(site)] = site, self._registry.site(site)
        return known[1]


def _may_hold_values(value: Any) -> bool:
    kind = type(value)
    if kind in TRACED or isinstance(value, Tensor):
        return True
    if kind in PLAIN_TYPES:
        return False
    if isinstance(value, (tuple, list)):
        return any(map(_may_hold_values, value))
    if isinstance(value, dict):
        return any(map(_may_hold_values, value.values()))
    return True


_NO_NODES = (type(None), str, bytes, type, nn.Module)
