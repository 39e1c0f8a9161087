"""What a scan has found that a run can read, and the contents of containers as flat lists."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter, getitem, methodcaller
from typing import Any, NamedTuple

from bendtrace.environment.code_facts import place_naming
from bendtrace.environment.content import WatchedContent
from bendtrace.source.versions import Depends, all_same
from bendtrace.tape.captured import Access, AttributeKey, Captured, CaptureKind, child_label

# What containers hold, read into flat lists that are compared in one go.
#
# A model consists of some hundred dicts, and code names some hundred globals. Looking at each by
# itself takes longer than a small model does; read one after the other into a few lists, they are
# compared by the loops of C.


WHOLE = (dict, OrderedDict)  # the types of dicts whose own methods can be relied on

_values = methodcaller("values")
_cell_contents = attrgetter("cell_contents")


class Places:
    """Where to look: dicts that modules consist of, names in namespaces, and cells.

    Args:
        parts: what a scan found.
        named: the names that it looked at in namespaces and cells, by index of their part.

    Attributes:
        dicts: those that are scanned as a whole.
        taken: the indices of all parts whose content is looked up here.
    """

    __slots__ = ("_cells", "_holders", "_names", "_parts", "_spaces", "dicts", "taken")

    def __init__(self, parts: Iterable[Captured], named: Mapping[int, dict[Any, Any]]) -> None:
        self._parts: list[Captured] = []
        self._holders: list[tuple[Captured, int, int]] = []  # with where its names begin and end
        self._cells: list[Captured] = []
        self._spaces: list[Any] = []
        self._names: list[str] = []
        for part in parts:
            value = part.value
            if part.access is not Access.FIXED:
                continue
            if part.kind is CaptureKind.DICT and type(value) in WHOLE:
                self._parts.append(part)
            elif part.kind is CaptureKind.IDENTITY and part.index in named:
                if isinstance(value, types.CellType):
                    self._cells.append(part)
                elif type(value) in (dict, types.MappingProxyType):
                    names = named[part.index]
                    begin = len(self._names)
                    self._names += names
                    self._spaces += [value] * len(names)
                    self._holders.append((part, begin, len(self._names)))
        self.dicts: list[Any] = [part.value for part in self._parts]
        self.taken: frozenset[int] = frozenset(
            part.index
            for part in chain(self._parts, self._cells, (part for part, _, _ in self._holders))
        )

    def read(self) -> Contents | None:
        """Read what is there now; None if a name is gone, or a cell empty."""
        try:
            named = [*map(getitem, self._spaces, self._names)]
            held = [*map(_cell_contents, (part.value for part in self._cells))]
        except (KeyError, ValueError):
            return None
        return Contents(self.dicts, named, held)

    def before(self, contents: Contents) -> dict[int, dict[Any, Any]]:
        """Return what each part held when its content was read, by index."""
        found: dict[int, dict[Any, Any]] = {}
        begin = 0
        for part, size in zip(self._parts, contents.sizes, strict=True):
            end = begin + size
            pairs = zip(contents.keys[begin:end], contents.values[begin:end], strict=True)
            found[part.index] = {key: value for key, value in pairs if key not in part.hidden}
            begin = end
        for part, begin, end in self._holders:
            pairs = zip(self._names[begin:end], contents.named[begin:end], strict=True)
            found[part.index] = dict(pairs)
        for part, value in zip(self._cells, contents.held, strict=True):
            found[part.index] = {part.label: value}
        return found


class Contents:
    """What was at some places when they were read.

    Attributes:
        sizes: how many entries each dict had.
        keys: their keys, one dict after the other.
        values: their values.
        named: what the names stood for.
        held: what the cells held.
    """

    __slots__ = ("held", "keys", "named", "sizes", "values")

    def __init__(self, dicts: list[dict[Any, Any]], named: list[Any], held: list[Any]) -> None:
        self.sizes: list[int] = [*map(len, dicts)]
        self.keys: list[Any] = [*chain.from_iterable(dicts)]
        self.values: list[Any] = [*chain.from_iterable(map(_values, dicts))]
        self.named: list[Any] = named
        self.held: list[Any] = held

    def same_as(self, other: Contents) -> bool:
        """Whether the same objects were at the same places, in the same order."""
        return (
            self.sizes == other.sizes
            and all_same(self.values, other.values)
            and all_same(self.keys, other.keys)
            and all_same(self.named, other.named)
            and all_same(self.held, other.held)
        )


# What a scan has found that a run can read.


class Route(NamedTuple):
    """How a scan reached a value.

    Attributes:
        parent: the part that holds the value; None if no part does.
        access: how the value is read from the parent.
        key: the key, attribute or position in the parent.
        label: how a person would write the value.
        is_argument: whether the value is an argument, or was reached from one.
        depth: how many parts lie between the value and the first one.
    """

    parent: Captured | None
    access: Access
    key: Any
    label: str
    is_argument: bool
    depth: int = 0

    def into(self, part: Captured, key: Any) -> Route:
        """Return the route to an item or attribute of a part that this route leads to."""
        access = key.access if isinstance(key, AttributeKey) else Access.ITEM
        label = child_label(part, key)
        return Route(part, access, key, label, self.is_argument, self.depth + 1)

    def traceable(self, kind: type) -> bool:
        """Whether the model receives a number as a traced one.

        It does for arguments, directly or in tuples. Elsewhere a number cannot be replaced
        without a change to the user's containers.
        """
        if not self.is_argument or kind not in (int, float):
            return False
        parent = self.parent
        while parent is not None and parent.type is tuple:
            parent = parent.parent
        return parent is None


class Found:
    """The parts that a run can read, and what else was learnt on the way to them.

    Args:
        function: the module or function to be run.
        plain_numbers: whether numbers among the arguments must not be traced.

    Attributes:
        function: as given.
        plain_numbers: as given.
        inserted: what else is run, by name.
        is_lazy: whether there are parameters that the first call makes.
        parts: everything found; parents before children.
        arguments: the parts that are, or are held by, arguments.
        own: the parts that no other run has.
        by_id: parts by the identity of what they are.
        held: what containers held, by index of their part.
        places: where to look whether they still hold it, all at once.
        contents: what was there.
        bare: tensors without attributes of their own.
        alone: what else has content that is looked at one by one.
        blockers: what was found that no guard can watch, one line each.
        module_paths: qualified name of each module, by identity.
        shared_modules: those that the model holds under several names, by identity.
        hook_dicts: the modules' own tables of hooks.
        hook_tables: of each the module's label, the table's name and what it held.
        names: all names that the code of the model uses, as far as it is known.
        stores: names of the attributes that it assigns, likewise.
        functions: the code of the model, likewise.
        tells_numbers: whether some of that code asks for the exact type of a number.
        tells_identity: whether it has `id` or `operator.is_` under another name.
        computes: whether some of that code looks attributes up by names that it computes.
        asks_tags: whether some of the user's asks for attributes that may not be there.
        missing: globals that some of it names and that are not there, by their namespace.
        sized: Python modules that code looks up computed names in, with the names in them.
        namespaces: those of the classes of the model, with the names in them.
        helpers: classes of other objects, with the members that are used.
        caches: each `functools.lru_cache`, with its label, what it had been asked, and whether it
            had no entries.
        members: the objects, no plain values, that are keys of dicts, or in sets and queues.
        cached: what they held when the run began, as far as it is not known to stay: results of the
            user's functions, and objects.
        generators: the parts that are random generators of torch.
        host_generators: those of Python and numpy.
        growing: lists and deques, by identity, that are not looked into: code only adds to them.
        watched_containers: dicts and sets, by identity, that are not looked into: their operations
            are ops.
        depends: what the code that was looked at depends on.
        watched_objects: what else is watched, by its content.
    """

    inserted: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, function: Callable[..., Any], plain_numbers: bool) -> None:
        self.function = function
        self.plain_numbers = plain_numbers
        self.is_lazy: bool = False
        self.parts: list[Captured] = []
        self.arguments: list[Captured] = []
        self.own: list[Captured] = self.parts
        self.by_id: dict[int, Captured] = {}
        self.held: dict[int, dict[Any, Any]] = {}
        self.places: Places = Places((), {})
        self.contents: Contents | None = self.places.read()
        self.bare: list[Captured] = []
        self.alone: list[Captured] = []
        self.blockers: list[str] = []
        self.module_paths: dict[int, str] = {}
        self.shared_modules: frozenset[int] = frozenset()
        self.hook_dicts: list[dict[Any, Any]] = []
        self.hook_tables: list[tuple[str, str, tuple[tuple[Any, Any], ...]]] = []
        self.names: frozenset[str] = frozenset()
        self.stores: frozenset[str] = frozenset()
        self.functions: list[types.FunctionType] = []
        self.tells_numbers = False
        self.tells_identity = False
        self.computes = False
        self.asks_tags = False
        self.missing: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self.sized: dict[int, tuple[Mapping[str, Any], frozenset[str]]] = {}
        self.namespaces: dict[int, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self.helpers: dict[type, frozenset[str]] = {}
        self.caches: list[tuple[str, functools._lru_cache_wrapper[Any], Any, bool]] = []
        self.members: list[Any] = []
        self.cached: dict[functools._lru_cache_wrapper[Any], list[tuple[Any, Any]]] = {}
        self.generators: list[Captured] = []
        self.host_generators: list[Captured] = []
        self.growing: dict[int, Any] = {}
        self.watched_containers: dict[int, Any] = {}
        self.depends: Depends = Depends()
        self.watched_objects: WatchedContent

    @property
    def hooks(self) -> list[tuple[Any, ...]]:
        """What the modules' tables of hooks held before the run, in the order of `hook_dicts`."""
        return [items for _, _, items in self.hook_tables]

    def find(self, thing: Any) -> Captured | None:
        """Return the part that `thing` is, or None if the run did not begin with it."""
        part = self.by_id.get(id(thing))
        return part if part is not None and part.value is thing else None

    def place_of(self, label: str) -> str:
        """Say where the model's code stores to what has a label, or mentions it; "" if nowhere."""
        name = label.rpartition(".")[2].partition("[")[0]
        return place_naming(name, self.functions)

    def block(self, reason: str, label: str) -> None:
        """Note what no guard can watch, with where the code mentions what has that label."""
        place = self.place_of(label)
        self.blockers.append(f"{reason} (see {place})" if place else reason)
