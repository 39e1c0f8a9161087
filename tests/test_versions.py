"""Versions of dicts: equal as long as nobody has written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.python import versions
from bendtrace.python.versions import version_of


class Thing:
    """What has attributes."""


WRITES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "an attribute": lambda thing, table: setattr(thing, "a", 3),
    "an attribute, past the class": lambda thing, table: object.__setattr__(thing, "a", 3),
    "an equal value of another type": lambda thing, table: table.__setitem__("a", True),
    "a new attribute": lambda thing, table: setattr(thing, "c", 3),
    "no attribute any more": lambda thing, table: delattr(thing, "a"),
    "an update": lambda thing, table: table.update(a=5),
    "a default": lambda thing, table: table.setdefault("c"),
    "an entry taken out": lambda thing, table: table.pop("a"),
    "the last entry taken out": lambda thing, table: table.popitem(),
    "nothing any more": lambda thing, table: table.clear(),
    "another order": lambda thing, table: table.__setitem__("a", table.pop("a")),
    "a merge": lambda thing, table: table.__ior__({"a": 7}),
}


# Without versions, all is compared each time, as a test below does with any Python.
tells = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0),
    reason="Python 3.13.0 does not tell reliably what is written to dicts: torch does not ask it",
)


@tells
def test_torch_tells_versions_of_dicts():
    assert version_of is not versions._never_the_same


@tells
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_another_version_follows_each_way_of_writing(write):
    thing = Thing()
    thing.a, thing.b = 1, 2
    table = vars(thing)
    before = version_of(table)
    assert version_of(table) == before
    write(thing, table)
    after = version_of(table)
    assert after != before
    assert version_of(table) == after


def test_attributes_that_code_sets_over_and_over_are_noticed_each_time():
    thing = Thing()
    table = vars(thing)

    def store(value: object) -> None:
        thing.a = value  # the interpreter has a quick way for this once the line is warm

    seen = set()
    for number in range(200):
        store(number)
        seen.add(version_of(table))
    assert len(seen) == 200


def test_no_two_dicts_have_one_version_while_both_are_there():
    tables = [{"a": number} for number in range(50)]
    assert len({version_of(table) for table in tables}) == 50


@tells
def test_reading_and_copying_leave_the_version():
    table = {"a": 1, "b": 2}
    before = version_of(table)
    assert (table["a"], table.get("c"), list(table), dict(table)) == (1, None, ["a", "b"], table)
    assert version_of(table) == before


def test_a_version_that_does_not_tell_is_not_relied_on():
    assert not versions.tracks_changes(id)
    assert not versions.tracks_changes(len)
    assert not versions.tracks_changes(lambda table: tuple(table.items()))
    assert not versions.tracks_changes(lambda table: object())


@tells
def test_the_one_that_is_relied_on_tells():
    assert versions.tracks_changes(version_of)


def test_without_versions_all_is_compared_each_time(monkeypatch):
    monkeypatch.setattr("bendtrace.engine.check.version_of", versions._never_the_same)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    bended = bt.BendedModule(model)
    x = torch.ones(1, 2)
    for _ in range(3):
        assert torch.equal(bended(x), model(x))
    assert (bended.stats.traces, bended.stats.replays) == (1, 2)
    model[1].p = 0.25
    bended(x)
    assert bended.stats.traces == 2


def test_threads_that_write_and_check_agree_in_the_end():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaled()
    bended = bt.BendedModule(model)
    x = torch.ones(2)
    for scale in (1, 2):
        model.scale = scale
        bended(x)
    wrong = []

    def call() -> None:
        for _ in range(300):
            if bended(x)[0].item() not in (1.0, 2.0):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        model.scale = 1 + number % 2
    for thread in threads:
        thread.join()
    assert not wrong
    for scale in (2, 1, 2):
        model.scale = scale
        assert torch.equal(bended(x), x * scale)
