"""State outside of the model: in installed packages, classes and objects of others."""

from __future__ import annotations

import collections
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from tests.promise import bits


def test_numbers_that_a_run_leaves_anywhere_are_plain() -> None:
    class Holder:
        attribute: Any = 0

    class Slotted:
        __slots__ = ("value",)

    counts, queue, tags, keyed = collections.Counter(), collections.deque([1]), set(), {}
    slotted, kept = Slotted(), 0

    def model(x: torch.Tensor, k: int) -> torch.Tensor:
        nonlocal kept
        Holder.attribute, kept = k + 1, k * 6
        queue.append(k * 2)
        counts["a"] = k * 3
        slotted.value = k * 5
        tags.add(k * 7)
        keyed[k * 8] = k
        return x

    bended = bt.BendedModule(model)
    for k in (2, 3):
        bended(torch.ones(2), k)
        left = (Holder.attribute, kept, queue[-1], counts["a"], slotted.value, *tags, *keyed)
        assert {type(number) for number in left} == {int}
        assert (Holder.attribute, kept, queue[-1], counts["a"]) == (k + 1, k * 6, k * 2, k * 3)
        assert Holder().attribute == k + 1


# State outside of the model

_INSTALLED = """
class Settings:
    scale = 2.0
    options = {"a": 2.0}

class Act:
    v = 2.0
    def __call__(self, x): return x * self.v

class State:
    def __init__(self): self.inner = Settings()

act, state, flags, held = Act(), State(), frozenset("a"), (State(),)
def by_class(x): return x * Settings.scale
def by_options(x): return x * Settings.options["a"]
def by_object(x): return x * state.inner.scale
def by_tuple(x): return x * held[0].inner.scale
def by_flags(x): return x * (2 if "a" in flags else 3)
def by_callable(x): return act(x)
"""


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "by_class": "Settings.scale = 3.0",
        "by_options": "Settings.options['a'] = 3.0",
        "by_object": "state.inner.scale = 3.0",
        "by_tuple": "held[0].inner.scale = 3.0",
        "by_flags": "flags = frozenset()",
        "by_callable": "act.v = 3.0",
    }.items(),
)
def test_state_of_an_installed_package(
    name: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"installed_{name}"
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"{package}.py").write_text(_INSTALLED)
    monkeypatch.syspath_prepend(str(folder))
    installed = importlib.import_module(package)
    function = getattr(installed, name)

    def model(x: torch.Tensor) -> torch.Tensor:
        return function(x) + 1

    bended, x = bt.BendedModule(model), torch.arange(1.0, 4.0)
    for step in ("", "", "", change, "", ""):
        exec(step, vars(installed))
        assert bits(bended(x)) == bits(model(x))
    del sys.modules[package]


_MOVING = """
import collections, functools, itertools, random
import numpy

asked, queued = iter(iter(range(9)).__next__, 99), iter(collections.deque(range(9)))
ids, sides = itertools.count(), itertools.cycle([1, 2, 3])
rows, pairs = iter([5, 6, 7, 8, 9]), zip([1, 2, 3, 4, 5], "abcde")
keys, left = iter({1: 2, 3: 4, 5: 6, 7: 8, 9: 0}), map(abs, [-1, -2, -3, -4, -5])
chance, drawn = random.Random(0), numpy.random.default_rng(0)

def numbers():
    number = 0
    while True:
        number += 1
        yield number

made = numbers()

@functools.lru_cache
def kept(n):
    return n

def held():
    inside = iter(range(1, 9))
    return lambda: next(inside)

class Owner:
    def __init__(self):
        self.rest = reversed([1, 2, 3, 4, 5])

    def __call__(self):
        return next(self.rest)

by_closure, by_object = held(), Owner()

def by_count(): return next(ids)
def by_cycle(): return next(sides)
def by_list(): return next(rows)
def by_zip(): return next(pairs)[0]
def by_keys(): return next(keys)
def by_map(): return next(left)
def by_generator(): return next(made)
def by_two_steps(): return 0 * next(made) + next(made) + 1000
def by_sentinel(): return next(asked)
def by_deque(): return next(queued)
def by_random(): return chance.random()
def by_numpy(): return float(drawn.random())
def by_cache(): return kept(2) + kept.cache_info().hits
def by_none_of_them(): return 2 if rows is not None and chance is not None else 3
"""


@pytest.mark.parametrize("name", re.findall(r"by_\w+(?=[(,]| =)", _MOVING))
def test_what_moves_on_in_an_installed_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_moving.py").write_text(_MOVING)
    monkeypatch.syspath_prepend(str(folder))
    installed = importlib.import_module("installed_moving")

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * function()

    x = torch.ones(2)
    outputs = []
    for wrap in (lambda model: model, bt.BendedModule):
        importlib.reload(installed)
        function = getattr(installed, name)
        called: Any = wrap(model)
        outputs.append([bits(called(x)) for _ in range(4)])
    assert outputs[0] == outputs[1]
    if name == "by_none_of_them":
        assert called.stats.replays == 3
    del sys.modules["installed_moving"]


def test_an_argument_of_an_installed_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_argument.py").write_text(_INSTALLED)
    monkeypatch.syspath_prepend(str(folder))
    settings = importlib.import_module("installed_argument").Settings

    def model(x: torch.Tensor, owner: Any) -> torch.Tensor:
        return x * owner.scale

    bended, x = bt.BendedModule(model), torch.ones(3)
    for scale in (2.0, 2.0, 3.0, 3.0, 2.0):
        settings.scale = scale
        assert bits(bended(x, settings)) == bits(x * scale)


def test_attributes_that_are_answered_by_any_error() -> None:
    class Strict:
        __slots__ = ("other", "scale")

        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    class Lax:
        __slots__ = ("scale",)

        def __getattr__(self, name: str) -> float:
            return 5.0

    holder, lax = nn.Module(), Lax()
    holder.settings = Strict(2.0)

    def model(x: torch.Tensor, given: Lax) -> torch.Tensor:
        return x * holder.settings.scale * given.scale

    bended, x = bt.BendedModule(model), torch.ones(3)
    for number in (2.0, 2.0, 3.0, 3.0):
        holder.settings.scale = number
        assert bits(bended(x, lax)) == bits(model(x, lax))
    lax.scale = 7.0
    assert bits(bended(x, lax)) == bits(model(x, lax))


MARGIN = [0.5]


class Margin(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - MARGIN[0]).relu().sum()


def test_a_module_that_forward_makes_is_foreseen() -> None:
    bended, x = bt.BendedModule(lambda x: Margin()(x) + x), torch.arange(1.0, 4.0)
    for number in range(6):
        MARGIN[0] = 0.5 + number // 3
        assert bits(bended(x)) == bits(Margin()(x) + x)
    MARGIN[0] = 0.5
    assert bended.stats == bt.module.Stats(traces=2, replays=4, retraces=1)
