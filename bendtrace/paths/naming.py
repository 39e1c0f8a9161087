"""Names of nodes: identifiers that are stable from run to run."""

from __future__ import annotations

import copy
import re
import threading
import unicodedata
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from keyword import iskeyword
from types import CodeType
from typing import Any

from torch import Tensor, nn

from bendtrace.paths.events import bound, parameters_of
from bendtrace.recording.names import base_name_of
from bendtrace.source.sites import Site
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.tape import ModuleCall
from bendtrace.torch_rules.owners import named_modules, states_of

OUTPUT = "output"  # no other node of a graph may take this name


def identifier(text: str) -> str:
    """Return a name for `text` that can be typed after a dot.

    Leading underscores are removed: the views of nodes reserve such names, and completion hides
    them. A name that would begin with a digit gets the prefix `sub_`, as parts of tuples do.

    Example:
        >>> [identifier(text) for text in ("layers.8", "0", "_conv", "class", "my key")]
        ['layers_8', 'sub_0', 'conv', 'class_', 'my_key']
    """
    text = unicodedata.normalize("NFKC", text)  # as Python does to names in source
    name = re.sub(r"\W+", "_", text).lstrip("_")
    if text.rstrip("])'\"") != text:
        name = name.rstrip("_")
    if not name:
        return "op"
    if not name.isidentifier():
        name = f"sub_{name}"
    if not name.isidentifier():
        name = "sub_" + re.sub(r"[^0-9A-Za-z_]", "_", name)
    return f"{name}_" if iskeyword(name) else name


@dataclass
class _Names:
    """The names below one node."""

    by_key: dict[Hashable, str] = field(default_factory=dict)
    first: dict[Hashable, str] = field(default_factory=dict)  # by the first part of a key
    reserved: dict[Hashable, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: {OUTPUT})
    counts: dict[str, int] = field(default_factory=dict)
    has_output: bool = False


class Registry:
    """The names of nodes, in all traces that share the registry.

    A node is identified by where it happens: the enclosing node, and the chain of instructions that
    led to it. The first node with a name gets the plain name, the next `linear_1`, and so on. Nodes
    that a second path shares with the first keep their names, whatever else is on that path.

    Attributes:
        lock: to be held while names are assigned.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._names: dict[str, _Names] = {}
        self._sites: dict[tuple[int, ...], int] = {}
        self._contents: dict[tuple[Any, ...], int] = {}
        # Code objects go by identity because hashing one is slow; they are kept alive, so that
        # an identity is never used twice.
        self._codes: dict[int, tuple[CodeType, int]] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What a code object says stays the same in other processes, its identity does not.
        kept = ("_names", "_sites", "_contents")
        return {name: copy.deepcopy(getattr(self, name)) for name in kept}

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        made = Registry()
        vars(made).update(self.__getstate__())
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    def site(self, site: Site | None) -> int:
        """Return the number of a site: the same in every trace; 0 for none."""
        if site is None:
            return 0
        known = self._known.get(site.identity)
        if known is None:
            codes = [self._number(code) for code, _ in site.chain]
            key = tuple(n for pair in zip(codes, site.identity[1::2], strict=True) for n in pair)
            known = self._sites.setdefault(key, len(self._sites) + 1)
            self._known[site.identity] = known
        return known

    def _number(self, code: CodeType) -> int:
        known = self._codes.get(id(code))
        if known is None:
            content = (
                code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code,
                code.co_linetable,
            )  # fmt: skip
            number = self._contents.setdefault(content, len(self._contents) + 1)
            known = self._codes[id(code)] = code, number
        return known[1]

    def name(self, parent: str, key: Hashable, base: str) -> str:
        """Return the name of a node.

        Args:
            parent: path of the node around it.
            key: identifies the node among those of the parent.
            base: the preferred name.
        """
        names = self._names.get(parent)
        if names is None:
            names = self._names[parent] = _Names()
        name = names.by_key.get(key)
        if name is not None:
            return name
        first = key[0] if type(key) is tuple and type(key[0]) is tuple else None
        name = names.reserved.pop(first, None) or self._give(names, base)
        names.by_key[key] = name
        if first is not None:
            names.first.setdefault(first, name)
        return name

    def reserve(self, parent: str, key: Hashable, base: str) -> str:
        """Return the name that a node will have whose output is not known yet.

        Nodes of values are identified by a key and a kind: `key` is the former.

        Args:
            parent: path of the node around it.
            key: identifies the node, whatever its output is.
            base: the preferred name.
        """
        names = self._names.get(parent)
        if names is None:
            names = self._names[parent] = _Names()
        name = names.reserved.get(key)
        if name is not None:
            return name
        name = names.first.get(key)
        if name is None:
            name = names.reserved[key] = names.first[key] = self._give(names, base)
        return name

    @staticmethod
    def _give(names: _Names, base: str) -> str:
        name = base
        while name in names.taken:
            names.counts[base] = names.counts.get(base, 0) + 1
            name = f"{base}_{names.counts[base]}"
        names.taken.add(name)
        return name

    def output(self, parent: str, key: Hashable) -> str:
        """Return the name of a graph's output: `output`, unless its structure differs."""
        names = self._names.setdefault(parent, _Names())
        if not names.has_output:
            names.has_output = True
            names.by_key[key] = OUTPUT
        return self.name(parent, key, OUTPUT)


class Holders:
    """Finds names relative to the module whose code is running.

    Args:
        root: the outermost module of the run, if there is one.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._modules: dict[int, dict[int, str]] = {}
        self._tensors: dict[int, dict[int, str]] = {}
        self._nameless: dict[tuple[int, str], list[nn.Module]] = {}
        self._by_path = dict(states_of(root)) if root is not None else {}

    def module(self, call: ModuleCall) -> str:
        """Return the name of the called module in the code around a call: `layers.8`."""
        outer = call.parent.module if call.parent is not None else None
        if outer is not None and call.module is not None:
            known = self._modules.get(id(outer))
            if known is None:
                known = self._modules[id(outer)] = {
                    id(module): name for name, module in named_modules(outer)
                }
            if id(call.module) in known:
                return known[id(call.module)]
        if call.path.startswith("<"):
            return self._unknown(call)
        return _relative(call.path, call.parent.path if call.parent is not None else "")

    def state(self, label: str, call: ModuleCall) -> str:
        """Return the name of a tensor in the code of a call: `weight`.

        Args:
            label: its label in the environment of the run.
            call: the call.
        """
        label = label.removeprefix("self.")
        tensor = self._by_path.get(label)
        if tensor is not None and call.module is not None:
            known = self._tensors.get(id(call.module))
            if known is None:
                known = self._tensors[id(call.module)] = {
                    id(held): name for name, held in reversed(list(states_of(call.module)))
                }
            if id(tensor) in known:
                return known[id(tensor)]
        return _relative(label, call.path)

    def _unknown(self, call: ModuleCall) -> str:
        """A name for a module that the model does not hold as one of its own.

        Such modules without state are all alike; others are told apart.
        """
        module, name = call.module, type(call.module).__name__
        if module is None or not states_of(module):
            return name
        seen = self._nameless.setdefault((id(call.parent), name), [])
        for position, other in enumerate(seen):
            if other is module:
                return f"{name}.{position}"
        seen.append(module)
        return f"{name}.{len(seen) - 1}"


def dotted(label: str) -> str:
    """Return a label with dots before all parts of it: `layers[0].weight` is `layers.0.weight`."""
    return ".".join(_split(label))


def _relative(path: str, base: str) -> str:
    """Return a path as seen from another, as far as the two have a beginning in common."""
    parts = _split(path)
    for part in _split(base):
        if len(parts) < 2 or parts[0] != part:
            break
        parts.pop(0)
    return ".".join(parts)


def _split(path: str) -> list[str]:
    return [part.strip("'\"") for part in re.split(r"\.|\[|\]", path) if part]


# Names of nodes during a run: the same names that the tree of paths will use.


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
