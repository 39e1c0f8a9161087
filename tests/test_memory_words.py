"""Words of memory: other ones after each change that they are read for, and only then."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python import versions as memory_words
from bendtrace.python.versions import Reader, Unreadable, Words, offsets
from tests.promise import bits

readable = pytest.mark.skipif(
    offsets() is None, reason="the words of this Python's objects cannot be read, so none are"
)


class Thing:
    """What has attributes."""

    count = 1


class Other:
    """Another class of the same layout."""


class Derived(Thing):
    """A class with a base."""


def function(x: Any, y: Any = 1, *, z: Any = 2) -> Any:
    return x, y, z


def another(x: Any, y: Any = 3, *, z: Any = 4) -> Any:
    return y, x, z


class World:
    """One object of each kind, and all that is read of them."""

    def __init__(self) -> None:
        self.thing = Thing()
        self.table: dict[Any, Any] = {"a": 1}
        self.empty: dict[Any, Any] = {}
        self.ordered: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.cell = types.CellType("held")
        self.namespace = type("Made", (), {"a": 1})
        self.derived = type("Made", (Thing,), {})
        self.function = types.FunctionType(
            function.__code__, globals(), "copied", function.__defaults__
        )
        self.function.__kwdefaults__ = dict(function.__kwdefaults__ or {})

    def reader(self, asks: bool = False) -> Reader:
        places = offsets()
        assert places is not None
        if asks:  # as where no version is in memory
            places = places._replace(version=None)
        found = Words(places)
        found.add_version(self.table)
        found.add_version(vars(self.namespace))
        found.add_empty(self.empty)
        found.add_empty(self.ordered)
        found.add_class(self.thing, Thing)
        found.add_attributes(self.thing, vars(self.thing))
        found.add_attributes(self.function, vars(self.function))
        found.add_content(self.cell, self.cell.cell_contents)
        found.add_bases(self.derived, self.derived.__mro__)
        found.add_written(self.function)
        return found.reader()


CHANGES: dict[str, Callable[[World], object]] = {
    "an entry": lambda w: w.table.__setitem__("a", 2),
    "another order": lambda w: w.table.__setitem__("a", w.table.pop("a")),
    "an attribute of a class": lambda w: setattr(w.namespace, "a", 2),
    "a new attribute of a class": lambda w: setattr(w.namespace, "b", 2),
    "a lost attribute of a class": lambda w: delattr(w.namespace, "a"),
    "an entry in an empty dict": lambda w: w.empty.__setitem__("a", 1),
    "an entry in an empty ordered dict": lambda w: w.ordered.__setitem__("a", 1),
    "another class": lambda w: setattr(w.thing, "__class__", Other),
    "other attributes": lambda w: setattr(w.thing, "__dict__", {}),
    "other attributes of a function": lambda w: setattr(w.function, "__dict__", {}),
    "another content of a cell": lambda w: setattr(w.cell, "cell_contents", "other"),
    "no content of a cell": lambda w: delattr(w.cell, "cell_contents"),
    "another base": lambda w: setattr(w.derived, "__bases__", (Derived,)),
    "another code": lambda w: setattr(w.function, "__code__", another.__code__),
    "other defaults": lambda w: setattr(w.function, "__defaults__", (7,)),
    "no defaults": lambda w: setattr(w.function, "__defaults__", None),
    "other keywords": lambda w: setattr(w.function, "__kwdefaults__", {"z": 3}),
    "another keyword": lambda w: (w.function.__kwdefaults__ or {}).update(z=5),
}


@readable
@pytest.mark.each
@pytest.mark.parametrize("asks", [False, True], ids=["read", "asked"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_words_are_others_after_each_change(change, asks):
    world = World()
    reader = world.reader(asks)
    reader.read()  # in 3.12, that torch watches a dict since it was asked is part of its version
    before = reader.read()
    assert before[reader.begin :] == reader.fixed
    # What only reads, or writes to others, changes nothing.
    assert (world.table["a"], world.function(0), vars(world.thing)) == (1, (0, 1, 2), {})
    World()
    assert reader.read() == before
    change(world)
    assert reader.read() != before


class Counting:
    """Has an attribute that its method assigns."""

    def step(self) -> None:
        self.count = object()


@readable
@pytest.mark.parametrize("asks", [False, True], ids=["read", "asked"])
def test_each_store_that_the_interpreter_has_specialised_changes_a_word(asks):
    places = offsets()
    assert places is not None
    early, thing, layer = Counting(), Counting(), nn.Linear(2, 2)
    for _ in range(100):
        early.step()  # before there is a dict
    table = {key: object() for key in range(40)}

    def item() -> None:
        table[7] = object()

    def attribute() -> None:
        layer.unrelated = object()

    for holder, store in (
        (vars(early), early.step), (vars(thing), thing.step), (vars(layer), attribute),
        (table, item),
    ):  # fmt: skip
        words = Words(places._replace(version=None) if asks else places)
        words.add_version(holder)
        reader, seen = words.reader(), set()
        for _ in range(200):
            store()
            seen.add(reader.read())
        assert len(seen) == 200


@readable
def test_what_points_to_another_object_is_not_taken_for_what_was_expected():
    world = World()
    reader = world.reader()
    world.thing.__class__ = Other  # type: ignore[assignment]
    assert reader.read()[reader.begin :] != reader.fixed


@readable
def test_what_is_read_is_kept_alive():
    world = World()
    watched = weakref.ref(world.thing)
    reader = world.reader()
    before = reader.read()
    del world
    gc.collect()
    assert watched() is not None
    assert reader.read() == before
    del reader
    gc.collect()
    assert watched() is None


@readable
def test_what_has_no_such_words_is_refused():
    class Slotted:
        __slots__ = ("a",)

    class Mapping(dict):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 0

    found = Words(offsets())  # type: ignore[arg-type]
    for add in (
        lambda: found.add_version(collections.OrderedDict()),
        lambda: found.add_version(types.MappingProxyType(Mapping())),
        lambda: found.add_empty(Mapping()),
        lambda: found.add_attributes(Other, vars(Other)),  # type: ignore[arg-type]
        lambda: found.add_attributes(Slotted(), {}),
        lambda: found.add_written(len),  # type: ignore[arg-type]
        lambda: found.add_content("no cell", 1),  # type: ignore[arg-type]
        lambda: Words(offsets()).reader(),  # type: ignore[arg-type]
    ):
        with pytest.raises(Unreadable):
            add()


def test_nothing_is_read_where_a_probe_does_not_find_what_it_looks_for(monkeypatch):
    for name in ("_word", "tracks_changes"):
        monkeypatch.setattr(memory_words, name, lambda what: 0)
        memory_words.offsets.cache_clear()
        found = offsets()
        # Without versions of dicts, the other words are read.
        assert found is None if name == "_word" else found is None or found.version is None
        monkeypatch.undo()
    memory_words.offsets.cache_clear()


@readable
def test_nothing_is_read_without_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(Unreadable):
        World().reader()


class Model(nn.Module):
    """A model of repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x * self.gain

    def louder(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x * self.gain


@pytest.mark.parametrize("reads", [False, pytest.param(True, marks=readable)])
def test_a_model_is_checked_alike_with_words_and_without(monkeypatch, reads):
    if not reads:
        monkeypatch.setattr("bendtrace.engine.check.offsets", lambda: None)
    monkeypatch.setattr(Model, "forward", Model.forward)  # puts it back
    model, x = Model(), torch.randn(2, 3)
    bended = bt.BendedModule(model)
    for number, change in enumerate(
        (
            lambda: setattr(model, "gain", 3.0),
            lambda: setattr(model.layers[1], "__class__", nn.Identity),
            lambda: setattr(Model, "forward", Model.louder),
            lambda: model.layers.append(nn.Linear(3, 3)),
            lambda: model.layers[0].__dict__.update(bias=torch.zeros(3)),
        ),
        1,
    ):
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
        assert (bended.stats.traces, bended.stats.replays) == (number, 2 * number)
        change()
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))


class Doubled(nn.Parameter):
    """Counts double where the model asks for the class."""


class Picky(nn.Module):
    """Goes by the rank of a parameter, and by that of what it computes from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        y = y.sin() if y.dim() == 1 else y.cos()
        return y.sum() * self.scale if self.scale.dim() == 1 else y.sum() + self.scale


@pytest.mark.parametrize("reads", [False, pytest.param(True, marks=readable)])
def test_classes_and_ranks_may_change_while_the_tables_do_not(monkeypatch, reads):
    if not reads:
        monkeypatch.setattr("bendtrace.engine.check.offsets", lambda: None)
    model, x = Picky(), torch.randn(4, 3)
    bended = bt.BendedModule(model)
    changes: tuple[Callable[[], object], ...] = (
        lambda: None,
        lambda: setattr(model.weight, "data", torch.full((3,), 2.0)),
        lambda: setattr(model.weight, "data", torch.full((3, 3), 2.0)),
        lambda: setattr(model.weight, "__class__", Doubled),
        lambda: setattr(model.scale, "data", torch.ones(1, 3)),
        lambda: setattr(model.scale, "data", torch.full((3,), 2.0)),
    )
    for change in changes:
        change()
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == 4  # the first, and one for each new rank or class
    assert bended.stats.live == 0


def _fails() -> bytes:
    raise AssertionError("what is no longer there is read")


@readable
@pytest.mark.parametrize("alone", [True, False], ids=["one thread", "two threads"])
def test_entries_of_tables_are_read_without_keeping_them(monkeypatch, alone):
    monkeypatch.setattr(memory_words.threading, "active_count", lambda: 1 if alone else 2)
    tables = [{"a": torch.ones(3), "b": None}, {"c": nn.Parameter(torch.ones(2, 2))}]
    entries = memory_words.TableEntries(
        tables, [Tensor, type(None), nn.Parameter], [(tables[0], "a", 1), (tables[1], "c", 2)]
    )
    for _ in range(2):
        assert entries.are_same(b"")
        entries.read(b"words")
    reader = entries._reader
    assert reader is not None
    assert not weakref.getweakrefcount(tables[0]["a"])
    old = weakref.ref(tables[0]["a"])
    tables[0]["a"] = torch.zeros(4)
    assert old() is None
    entries._reader = reader._replace(read=_fails)
    assert entries.are_same(b"")  # without reading what is no longer there
    entries.read(b"words")
    assert entries.are_same(b"")
    assert entries._reader is not reader
    kept = tables[0]["a"]
    tables[0]["a"] = nn.Parameter(torch.zeros(4))  # of another class, and the old one lives on
    entries.read(b"words")
    assert not entries.are_same(b"")
    tables[0]["a"] = kept
    entries.read(b"words")
    assert entries.are_same(b"")
    tables[1]["c"].data = torch.ones(2)
    assert not entries.are_same(b"")
    tables[1]["c"].data = torch.ones(2, 2)
    assert entries.are_same(b"")
    tables[1]["c"].__class__ = Doubled
    for words in (b"", b"words"):
        assert not entries.are_same(words)


@readable
def test_what_was_written_to_is_asked_once():
    model, x = Model(), torch.randn(2, 3)
    bended = bt.BendedModule(model)
    for _ in range(2):
        bended(x)
    (program,) = bended._trees.plain.programs()
    bended(x)  # in 3.12, that torch watches a dict since it was asked is part of its version
    names = program.check_code.function.__globals__
    asked: list[str] = []
    for name in ("ask", "model"):
        noted = functools.partial(asked.append, name)
        names[name] = lambda *given, ask=names[name], noted=noted: noted() or ask(*given)
    for _ in range(2):
        bended(x)
    assert not asked
    model.unrelated = 1  # an attribute that nothing reads
    del model.unrelated
    for _ in range(3):
        bended(x)
    assert asked == ["model"]
    Model.unrelated = 1  # type: ignore[attr-defined]
    del Model.unrelated  # type: ignore[attr-defined]
    for _ in range(3):
        bended(x)
    assert asked == ["model", "ask", "model"]
    assert bended.stats.traces == 1
