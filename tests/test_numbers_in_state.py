"""Numbers in a model's state that keep changing are inputs; what it appends is appended."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import sys
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.modes.test_inserted import Seeing
from tests.past_joins import past_joins, resumed_anywhere
from tests.promise import bits

COUNTS = {"n": 0}


@dataclasses.dataclass
class Meter:
    n: int = 0
    mean: float = 0.0
    seen: list[Any] = dataclasses.field(default_factory=list)

    def update(self, value: float) -> None:
        self.n += 1
        self.mean += (value - self.mean) / self.n


class Lower(dict[str, Any]):
    """Takes keys in capitals for others."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key.lower())


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Holds(nn.Module):
    """Holds numbers of all kinds, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.step, self.ema, self.temperature = 0, 0.0, 1.0
        self.table: dict[str, Any] = {"n": 0, "name": "a"}
        self.items, self.last = [0, 0.5], [0.0] * 3
        self.pair: tuple[Any, ...] = (0, 0.5, (1, "a"))
        self.window: Any = collections.deque([0.0, 0.5], maxlen=2)
        self.meter, self.slotted = Meter(), Slotted()
        self.settings = types.SimpleNamespace(n=0, name="a")
        self.counter: Any = collections.Counter()
        self.losses: list[Any] = []
        self.latest: Any = collections.deque(maxlen=400)
        self.metrics: dict[str, Any] = {"train": {"loss": [], "n": 0}}
        self.nested: list[Any] = [[], [1]]
        self.lower = Lower(loss=[])
        self.history: dict[str, list[Any]] = {"sum": [], "n": []}

    def forward(self, x: Tensor) -> Any:
        self.step += 1
        return self.fc(x) * self.step


def held(model: Any) -> Any:
    """What a model holds, parameters excluded."""
    if not isinstance(model, nn.Module):
        cells = {name: cell.cell_contents for name, cell in _cells(model)}
        return bits(cells)
    own = {key: value for key, value in vars(model).items() if key[0] != "_"}
    slotted = own.pop("slotted", None)
    own = {
        key: [*value] if isinstance(value, collections.deque) else value
        for key, value in own.items()
    }
    return bits(own), None if slotted is None else bits(slotted.value)


def _cells(function: Any) -> Any:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return bits(call(*args))
    except Exception as error:
        return type(error), str(error)


def stream(
    make: Callable[[], Any],
    calls: int = 40,
    change: Callable[[Any, int], None] | None = None,
    sizes: tuple[int, ...] = (2,),
    observed: bool = False,
) -> bt.BendedModule:
    """Compare calls with the model's own; return what has served them."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    bended = bt.BendedModule(make())
    if observed:
        bended.interject(lambda node: True, Seeing(), allow_none=True)
    with torch.no_grad():
        for number in range(calls):
            x = torch.randn(sizes[number % len(sizes)], 3)
            for model in (eager, bended.model):
                if change is not None:
                    change(model, number)
            COUNTS["n"] = 3 * number
            wanted = outcome(eager, x)
            after, COUNTS["n"] = COUNTS["n"], 3 * number
            found = outcome(bended, x)
            assert found == wanted, (number, found, wanted)
            assert bits(after) == bits(COUNTS["n"]), number
            assert held(bended.model) == held(eager), number
    return bended


STREAMS: dict[str, tuple[str, int]] = {
    "a counter": ("self.step += 1; y = y * self.step", 3),
    "an average": ("self.ema = 0.9 * self.ema + x.mean().item(); y = y + self.ema", 3),
    "every third call": ("self.step += 1\nif self.step % 3 == 0: y = y.relu()", 5),
    "a warm-up": ("self.step += 1; y = y * min(1.0, self.step / 10)", 4),
    "layers in turn": ("self.step += 1; y = y * [0.5, 1, 2][self.step % 3]", 6),
    "a dict": ("self.table['n'] += 2; y = y + self.table['n']", 3),
    "a list": ("self.items[1] *= 1.25; y = y + self.items[1]", 3),
    "another list": ("self.last = [*self.last[1:], x.mean().item()]; y = y * sum(self.last)", 6),
    "a deque": ("self.window.append(x.mean().item()); y = y * sum(self.window)", 5),
    "a tuple": ("self.pair = self.pair[0] + 1, x.max().item(); y = y * sum(self.pair)", 5),
    "a tuple in a tuple": (
        "n, last, (k, name) = self.pair; self.pair = n + 1, x.max().item(), (n - k, name)\n"
        "y = y * last + k if n % 2 else y - last",
        6,
    ),
    "a tuple that is only written": ("self.pair = len(x), x.max().item()", 5),
    "a tuple in a dict": (
        "n, last = self.table.get('n') or (0, 0.5); self.table['n'] = n + 1, last / 2 + n", 5,
    ),
    "a dataclass": ("self.meter.update(x.sum().item()); y = y - self.meter.mean", 3),
    "a slot": ("self.slotted.value -= 1; y = y * self.slotted.value", 3),
    "settings": ("self.settings.n += 1; y = y * self.settings.n", 3),
    "a `Counter`": ("self.counter['calls'] += 1; y = y * self.counter['calls']", 4),
    "a global": ("COUNTS['n'] += 1; y = y * COUNTS['n']", 3),
    "what is only written": ("self.step = len(x); self.ema = x.max().item()", 3),
    "several": (
        "self.step += 1; self.ema += x.sum().item(); self.items[0] = self.step - self.items[0]\n"
        "if y.sum() > 0: self.table['n'] += self.step; y = y * self.ema\n"
        "else: self.meter.n -= 1",
        9,
    ),
    "a cosine": ("self.step += 1; y = y * (math.cos(math.pi * self.step / 100) + 1)", 7),
    "a temperature": (
        "if self.step % 5 == 0: self.temperature = max(0.5, 2 * math.exp(-0.003 * self.step))\n"
        "self.step += 1; y = y / self.temperature",
        10,
    ),
    "an item": ("self.step += 1; y = y * [*range(99)][self.step]", 7),
    "a key": ("self.step += 1; y = y * {n: n for n in range(99)}[self.step]", 7),
    "a large number": ("self.step = self.step * 7 + 1; y = y * (self.step % 5)", 3),
    "no number": ("self.ema = self.ema / 2 - math.inf * (self.ema != 0); y = y + self.ema", 8),
    "a minimum": ("self.ema = min(self.ema, x.min().item()); y = y * self.ema", 6),
    "a swap": ("self.step, self.items[0] = self.items[0] + 1, self.step; y = y * self.step", 5),
    "a property": ("self.twice += 1; y = y * self.twice", 3),
    "a `__setattr__`": ("self.watched += 1; y = y * self.watched + self.writes", 3),
    "an appended list": ("self.losses.append(x.mean().item()); self.step += 1", 3),
    "appended items": ("self.step += 1; self.history['n'].extend([{'v': x.sum()}, self.step])", 3),
    "what is in a dict": (
        "part = self.metrics['train']; part['loss'].append(x.mean().item()); part['n'] += 1", 3
    ),
    "by a key of each": (
        "for key, value in (('loss', x.sum().item()), ('more', len(x))):\n"
        "    self.metrics['train'].setdefault(key, []).append(value)", 3
    ),
    "by the operator": ("self.losses += [x.mean().item()]; self.losses.extend(x[0].tolist())", 1),
    "beside nested lists": ("self.losses.append(1); self.nested.append(x.sum().item())", 1),
    "an appended deque": ("self.latest.append((y, x.max().item()))", 1),
}  # fmt: skip


class _Own(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.writes = 1, 0

    @property
    def twice(self) -> int:
        return 2 * self.hidden

    @twice.setter
    def twice(self, value: int) -> None:
        self.hidden = value - self.hidden

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "watched":
            object.__setattr__(self, "writes", self.writes + 1)
        super().__setattr__(name, value)


def written(statements: str, base: type[Holds] = Holds) -> Callable[[], Any]:
    """Return a maker of a model with some statements in its forward, which no other code has."""
    lines = "".join(f"    {line}\n" for line in statements.splitlines())
    space: dict[str, Any] = {"math": math, "COUNTS": COUNTS, "torch": torch, "__name__": __name__}
    exec(f"def forward(self, x):\n    y = self.fc(x)\n{lines}    return y\n", space)
    made = type("Written", (base,), {"forward": space["forward"], "__module__": __name__})

    def make() -> Any:
        model = made()
        if "watched" in statements:
            model.watched = 0
        return model

    return make


@pytest.mark.parametrize("name", STREAMS)
def test_calls_are_replayed(name: str) -> None:
    statements, most = STREAMS[name]
    is_own = "twice" in statements or "watched" in statements
    bended = stream(written(statements, _Own if is_own else Holds))
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.traces <= most, bended.stats
    assert bended.stats.replays >= 40 - most


class Counts(Holds):
    """Has lists and dicts for what it counts, by computed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bins, self.totals = [0] * 9, [0.0] * 9
        self.by_number: dict[int, Any] = dict.fromkeys(range(9), 0)
        self.other: Any = self.bins


K = "k = min(8, int(x[0, 0].abs() * 4))\n"
KEYED: dict[str, tuple[str, int]] = {
    "a histogram": (f"{K}self.bins[k] += 1; y = y * self.bins[k] + k", 16),
    "that is only written": (f"{K}self.bins[k] += 1; y = y + 1", 16),
    "sums": (f"{K}self.totals[k] += x.mean().item(); y = y * sum(self.totals)", 16),
    "from the end": (f"{K}self.bins[-1 - k] += 2; y = y * self.bins[2]", 16),
    "several": (
        f"{K}for j in (x[0].abs() * 4).long().clamp(0, 8).tolist(): self.bins[j] += 1\n"
        "y = y * max(self.bins) + self.bins.index(max(self.bins))", 20,
    ),
    "branches": (
        f"{K}self.bins[k] += 1\nif self.bins[k] > self.bins[0]: self.totals[k] = 0.5; y = y + 1",
        30,
    ),
    "a dict": (f"{K}self.by_number[k] += 1; y = y * self.by_number[k]", 30),
    "the last time": (f"{K}self.step += 1; self.by_number[k] = self.step; y = y + k", 30),
    "another name": (f"{K}self.other[k] += 1; y = y * self.bins[k]", 16),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYED)
def test_items_by_computed_numbers_are_no_path_each(name: str) -> None:
    statements, most = KEYED[name]
    bended = stream(written(statements, Counts), 90)
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.traces <= most, bended.stats


@pytest.mark.more
@pytest.mark.parametrize("mode", ["observed", "resumed", "joined"])
@pytest.mark.parametrize("name", KEYED)
def test_items_by_computed_numbers_are_those_of_eager(name: str, mode: str) -> None:
    modes = {"resumed": lambda: resumed_anywhere(3, most=4), "joined": past_joins}
    with modes.get(mode, nullcontext)():
        stream(written(KEYED[name][0], Counts), 60, observed=mode == "observed")


@pytest.mark.more
@pytest.mark.parametrize("name", KEYED)
def test_items_that_the_user_replaces_are_read(name: str) -> None:
    def change(model: Any, number: int) -> None:
        if number % 20 == 10:
            model.bins, model.by_number[3] = [number] * 9, number
        elif number % 20 == 15:
            model.other, model.totals[2] = [*range(12)], 0.25
        elif number == 50:
            model.bins[4], model.totals = 0.5, [1] * 9
        elif number == 70:
            model.bins, model.by_number = model.other, {n: n for n in range(12, -1, -1)}

    stream(written(KEYED[name][0], Counts), 90, change)


@pytest.mark.more
def test_an_index_that_is_too_large_raises_what_it_raises_in_eager() -> None:
    statements = "k = int(x[0, 0].abs() * 6); self.bins[k] += 1; y = y + self.bins[k]"
    stream(written(statements, Counts), 90)


def test_a_tuple_that_is_in_two_places_is_compared() -> None:
    statements = (
        "y = y * (2 if self.pair is self.items else 3) + self.pair[0]\n"
        "self.pair = self.pair[0] + 1, x.max().item()\n"
        "self.items = self.pair if self.pair[0] % 3 else (1, 0.5)"
    )
    stream(written(statements), 30)


def test_variables_around_a_function_are_inputs() -> None:
    def make() -> Callable[[Tensor], Any]:
        n, total, best = 0, torch.zeros(3), -math.inf

        def model(x: Tensor) -> Any:
            nonlocal n, total, best
            n, total = n + 1, total * 0.5 + x.sum(0)
            best = max(best, x.max().item())
            return x * n + total, best

        return model

    bended = stream(make)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 32


ODD = (0.0, -0.0, 1, math.nan, -math.inf, 2**70, -3, 1e-320, True, None, 0.5, "a", 2, -0.0, 3.0)


@pytest.mark.more
def test_numbers_that_the_user_sets_are_exact() -> None:
    """Also other types, and what is no number: these are compared, as ever."""

    def make() -> Any:
        return written("y = y * (self.temperature or 2); self.step = self.temperature")()

    def change(model: Any, number: int) -> None:
        model.temperature = ODD[number % len(ODD)] if number < 45 else number / 7

    bended = stream(make, 80, change)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 40


@pytest.mark.parametrize("name", ["a counter", "several", "an appended list", "a `Counter`"])
def test_what_the_user_resets_goes_on_from_there(name: str) -> None:
    def change(model: Any, number: int) -> None:
        if number % 11 == 10:
            fresh = Holds()
            for key in ("step", "ema", "table", "items", "counter", "losses"):
                setattr(model, key, getattr(fresh, key))

    bended = stream(written(STREAMS[name][0]), 60, change)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 40


@pytest.mark.more
@pytest.mark.parametrize("failing", ["y = y.view(len(x) * 5)", "y = y / (1 // (self.step % 4))"])
def test_an_error_leaves_what_it_leaves_in_eager(failing: str) -> None:
    """The numbers are written, and the items are there, that came before the error."""
    statements = (
        "self.step += 1; self.losses.append(self.step); self.ema += x.sum().item()\n"
        f"if self.step % 4 == 0: {failing}\n"
        "self.losses.append(0.5); self.items[0] += 1; y = y * self.items[0]"
    )
    bended = stream(written(statements))
    assert bended.stats.live == 0
    assert bended.stats.replays >= 20


@pytest.mark.more
def test_a_resumed_run_computes_with_the_numbers_of_its_call() -> None:
    statements = (
        "self.step += 1; self.ema = 0.5 * self.ema + x.sum().item(); y = y * self.ema\n"
        "before = self.step\n"
        "for row in y:\n"
        "    if row.sum() > self.ema: y = y + before; self.items[0] += before\n"
        "    elif row.max() > 1: self.table['n'] = self.step * len(x); self.losses.append(before)"
    )
    bended = stream(written(statements), 120, sizes=(1, 2, 3))
    assert bended.stats.resumes >= 2
    assert bended.stats.live == 0
    assert bended.stats.replays >= 80


BY_VALUE = {
    "its type": "self.step += 1; y = y * self.step * (type(self.step) is int)",
    "a text": "self.step += 1; y = y * len(f'{self.step}' + str(self.step))",
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_numbers_that_python_needs_run_live_in_the_end(name: str) -> None:
    bended = stream(written(BY_VALUE[name]))
    assert bended.stats.traces <= 14
    assert bended.stats.live >= 20 or bended.stats.replays >= 20


READ = {
    "its length": "self.losses.append(1); y = y * len(self.losses)",
    "by another name": "log = self.losses; log.append(1); y = y * len(log)",
    "now and then": "self.losses.append(self.step); self.step += 1\n"
    "if self.step % 5 == 0: y = y * sum(self.losses)",
    "from the end": "self.nested[1].append(1); y = y * len(self.nested[-1])",
    "by another key": "self.lower['loss'].append(1); y = y * len(self.lower['LOSS'])",
    "its truth": "y = y * 2 if self.losses else y\nself.losses += [1]",
    "the truth in a dict": "part = self.metrics['train']\n"
    "if part['loss']: y = y * 2\n"
    "part['loss'].append(1)",
    "its length in a dict": "part = self.metrics['train']; part['loss'].append(1)\n"
    "for key in ('loss', 'n'): y = y * (len(part[key]) if key == 'loss' else 1)",
    "what it is in": "part = self.metrics['train']; part['loss'].append(1); y = (y, part)",
    "by a method of what it is in": "get = self.metrics['train'].get; get('loss').append(1)\n"
    "y = y * len(get('loss'))",
    "what comes out": "self.losses.append(1); y = (y, self.losses)",
    "by a computed name": "self.losses.append(1); y = y * len(getattr(self, 'los' + 'ses'))",
    "all attributes": "self.losses.append(1); y = y * len(vars(self)['losses'])",
    "a method that is kept": "add = self.losses.append; add(1); y = y * len(add.__self__)",
    "what is taken out": "self.losses.append(1); y = y * self.losses.pop()",
    "a new one": "self.losses = self.losses + [1]; y = y * self.losses[-1]",
    "a copy": "import copy; self.losses.append(1); y = y * len(copy.copy(self).losses)",
    "an index": "self.history['n'].append(len(x)); y = y * self.history['n'][0]",
    "the items of all": "self.history['n'].append(1); y = y * sum(map(len, self.history.values()))",
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_as_well_is_not_taken_for_what_is_only_added_to(name: str) -> None:
    bended = stream(written(READ[name]))
    assert bended.stats.traces <= 16


@pytest.mark.parametrize("reads", [True, False])
def test_a_list_with_two_names_is_read_by_the_other(reads: bool) -> None:
    def make() -> Any:
        model = written("self.losses.append(x[0, 0].item()); y = y * len(self.other)")()
        model.other = model.losses if reads else []
        return model

    bended = stream(make)
    assert (bended.stats.live == 0) is not reads


def test_a_list_that_gets_another_name_between_calls() -> None:
    def make() -> Any:
        model = written("self.losses.append(1); y = y * (1 + len(self.other))")()
        model.other = []
        return model

    def change(model: Any, number: int) -> None:
        if number == 20:
            model.losses = model.other

    stream(make, 40, change)


def test_a_method_that_no_run_has_called_may_read_what_grows() -> None:
    """By its name alone it might be called: `x.mean()`."""

    class Logs:
        def __init__(self) -> None:
            self.values: list[float] = []

        def mean(self) -> float:
            return sum(self.values) / len(self.values)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logs = Logs()

        def forward(self, x: Tensor) -> Any:
            self.logs.values.append(x.mean().item())
            return self.ask(x) if x.sum() > 4 else x

        def ask(self, x: Tensor) -> Tensor:
            return x * self.logs.mean()

    def change(model: Any, number: int) -> None:
        assert len(model.logs.values) == number

    bended = stream(Model, 60, change)
    assert bended.stats.live <= 10
    assert bended.stats.replays >= 40
    assert any("reads it" in reason for reason in bended.why_live) == bool(bended.stats.live)


@pytest.mark.parametrize("most", [1, 5])
def test_a_full_deque_lets_go_of_items(most: int) -> None:
    def make() -> Any:
        model = written("self.latest.extend([('n', (x.shape[0],)), x[0, 0].item()])")()
        model.latest = collections.deque([0.5], maxlen=most)
        return model

    bended = stream(make, sizes=(1, 2, 3))
    assert bended.stats.replays >= 33


WINDOWS = {
    "a deque": ("self.latest.append(x.mean().item())", 10),
    "a list": (
        "self.latest.append(x.mean().item())\nif len(self.latest) > 10: self.latest.pop(0)",
        0,
    ),
    "a deque of tensors": ("self.latest.append(x.mean())", 8),
    "a slice": ("self.latest.append(x.mean()); self.latest = self.latest[-8:]", 0),
    "a long deque": ("self.latest.append(x.mean().item())", 30),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_holds_the_latest_calls_is_replayed_once_it_is_full(name: str) -> None:
    statement, most = WINDOWS[name]

    def make() -> Any:
        model = written(f"{statement}\ny = y * (sum(self.latest) / len(self.latest))")()
        model.latest = collections.deque(maxlen=most) if most else []
        return model

    bended = stream(make, 260 if most == 30 else 60)
    assert bended.stats.replays >= 40
    assert most == 30 or bended.stats.live == 0


def test_a_constant_that_comes_back_does_not_change_on_every_call() -> None:
    def make() -> Any:  # each length is a path: first with None, then with a tensor
        model = written(
            "y = (y if self.last is None else y + self.last) * len(f'{len(x)}'); self.last = y[:1]"
        )()
        model.last = None
        return model

    def change(model: Any, number: int) -> None:
        if number % 2 == 0:
            model.last = None

    bended = stream(make, 80, change, sizes=(1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6))
    assert bended.stats.live == 0
    assert bended.stats.replays >= 60


def test_a_text_that_becomes_a_tensor_and_a_text_again() -> None:
    def make() -> Any:
        model = written("y = y + self.last if torch.is_tensor(self.last) else y * len(self.last)\n"
                        "self.last = y")()  # fmt: skip
        model.last = ""
        return model

    def change(model: Any, number: int) -> None:
        if number % 3 == 0:
            model.last = "a" * number

    assert stream(make, 60, change).stats.live > 0


KEPT = {
    "a set": "self.table['seen'].add((x.shape[0], 'a'))",
    "a frozen set": "self.table['seen'].add(frozenset({(x.shape[0],)}))",
    "a long list": "self.table['long'][3] = (x.shape[0], (x.shape[0], x.sum().item()))",
    "a long dict": "self.table['many'][x.shape[0], 'a'] = (x.shape[0],)",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_runs_live_leaves_plain_numbers_in_tuples(name: str) -> None:
    def make() -> Any:
        model = written(KEPT[name])()
        many = dict.fromkeys(range(2000), 0)
        model.table.update(seen=set(), long=[0.5] * 2000, many=many)
        return model

    assert stream(make, 10, sizes=(1, 2, 3)).stats.live > 0


def test_a_long_list_is_appended_to() -> None:
    def make() -> Any:
        model = written("self.losses.append(1.5)")()
        model.losses = [0.5] * 2000
        return model

    assert stream(make).stats.replays == 39


def test_appended_tensors_are_those_of_the_call() -> None:
    bended = bt.BendedModule(written("self.losses.append(y); self.losses.append(x); y = y * 2")())
    kept = bended.model.losses
    for _ in range(5):
        x = torch.randn(2, 3)
        bended(x)
        assert kept[-1] is x
        assert torch.equal(kept[-2], bended.model.fc(x))
    assert bended.stats.replays == 4
    assert bended.model.losses is kept


def test_insertions_find_the_same_nodes() -> None:
    make = written("self.step += 1; y = torch.relu(y * (self.step * 0.5) + self.step); y = y * 2")
    names = []
    outputs = []
    for calls in (1, 10):
        torch.manual_seed(0)
        bended = bt.BendedModule(make())
        for _ in range(calls):
            bended(torch.ones(2, 3))
        names.append(bended.activation_names())
        bended.model.step = 3
        with bended.interject("relu", lambda value: value * 0.75):
            outputs.append([bits(bended(torch.ones(2, 3))) for _ in range(4)])
    assert names[0] == names[1]
    assert outputs[0] == outputs[1]


def test_what_people_look_at() -> None:
    class Model(Holds):
        def forward(self, x: Tensor) -> Any:
            self.step += 1
            return self.fc(x) if self.step % 3 == 0 else x

    bended = stream(Model)
    assert "self.step % 3 == 0" in str(bended.tree)
    trace = bended.latest_trace
    assert "counter" not in str(trace)
    assert not any(str(node).startswith("counter") for node in trace.graph.nodes)
    with torch.no_grad():
        assert trace.replay(torch.ones(2, 3)).shape == (2, 3)


def test_another_thread_sees_numbers() -> None:
    """While a run is recorded as well; what it asks for is not asked by the run."""
    bended = bt.BendedModule(written("y = y / self.temperature; self.step += 1")())
    model, eager = bended.model, copy.deepcopy(bended.model)
    is_over, seen = threading.Event(), set()

    def look() -> None:
        while not is_over.is_set():
            seen.add(type(model.temperature + 1.0))
            seen.add(type(f"{model.step}"))
            assert model.temperature > 0

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(60):
            model.temperature = eager.temperature = 1.0 + number % 50
            x = torch.randn(2, 3)
            assert bits(bended(x)) == bits(eager(x))
            assert model.step == number + 1
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert seen <= {float, str}
    assert bended.stats.live == 0


def test_a_compiled_path_takes_numbers_as_inputs() -> None:
    torch.manual_seed(0)
    bended = bt.BendedModule(written("y = (y / self.temperature).tanh()")(), backend="aot_eager")
    eager = copy.deepcopy(bended.model)
    with torch.no_grad():
        for number in range(30):
            bended.model.temperature = eager.temperature = 1.0 + number / 8
            x = torch.randn(2, 3)
            assert bits(bended(x)) == bits(eager(x))
    assert bended.stats.traces == 3
