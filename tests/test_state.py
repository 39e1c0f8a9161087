"""What a model keeps, what it writes to, and what is changed under it between the calls."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError
from tests.promise import Inputs, bits, footprint, outcome, state
from tests.torch_settings import default_dtype, deterministic

Change = Callable[[Any], Any]


class Pair:
    """A model and its `BendedModule`, called with the same things and compared each time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        torch.manual_seed(0)
        self.eager = make()
        torch.manual_seed(0)
        self.model = make()
        self.bended = bt.BendedModule(self.model)
        self._calls = 0

    def call(
        self,
        make: Callable[[], Any],
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> bool:
        """Call both and compare everything; say whether the call was a replay."""
        replays = self.bended.stats.replays
        self._calls += 1
        here = f"call {self._calls}"
        with mode():
            wanted = outcome(self.eager, _inputs(make), self._calls)
        with mode():
            before = footprint()
            given = outcome(self.bended, _inputs(make), self._calls)
            assert footprint() == before, here
        assert repr(given[1]) == repr(wanted[1]), here
        assert given[0] == wanted[0], f"{here}: another output"
        assert given[2] == wanted[2], f"{here}: other arguments afterwards"
        assert given[3] == wanted[3], f"{here}: another RNG state afterwards"
        assert _held(self.model) == _held(self.eager), f"{here}: other state afterwards"
        return self.bended.stats.replays > replays

    def change(self, change: Change, through: str = "model") -> None:
        """Do the same to both models, or to the eager one and the `BendedModule`."""
        for target in (self.eager, self.model if through == "model" else self.bended):
            torch.manual_seed(self._calls)
            change(target)


def _held(model: Any) -> str:
    """Return the state of a model, as text without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(state(model)))


def _inputs(make: Callable[[], Any]) -> Inputs:
    made = make()
    return (made if isinstance(made, tuple) else (made,)), {}


def ones(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape or (2, 3))


def replayed(make: Callable[[], Any], *inputs: Callable[[], Any], live: bool = False) -> None:
    """Call in turn, and then in turn again: the second round has to be replays, not live runs."""
    pair = Pair(make)
    for given in inputs:
        pair.call(given)
    assert [pair.call(given) for given in inputs] == [True] * len(inputs), (
        pair.bended.stats, pair.bended.last_mismatch, pair.bended.why_live,
    )  # fmt: skip
    assert pair.bended.stats.live == 0


def line_of(function: Any, text: str) -> str:
    """Return `file:line` of the first line with `text` in a function or class."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [i for i, line in enumerate(lines) if text in line][:1]
    return f"test_state.py:{start + number}"


def follows(make: Callable[[], Any], changes: Iterable[Change], through: str = "model") -> Pair:
    """Call three times after each change: the last of them has to be a replay."""
    pair = Pair(make)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    for number, change in enumerate((lambda model: None, *changes)):
        pair.change(change, through)
        pair.call(x.clone)
        pair.call(x.clone)
        assert pair.call(x.clone), (number, pair.bended.last_mismatch, pair.bended.why_live)
    return pair


# What forward keeps


class _Keeps(nn.Module):
    """Keeps something between calls; the subclasses say what and how."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.h: Any = torch.zeros(2, 3)
        self.register_buffer("total", torch.zeros(3))
        self.parts: Any = []


class HiddenState(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.fc(x) + self.h)
        return self.h * 2


class HiddenStateThatStartsAsNone(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.h = None

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.fc(x) if self.h is None else self.fc(x + self.h.detach())
        return self.h


class HiddenStateWrittenInPlace(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.h.mul_(0.5).add_(x)
        self.h[0] = 1
        return self.fc(self.h.clone())


class StateInATuple(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.parts = (torch.zeros(2, 3), [torch.ones(2, 3)], {"k": torch.ones(2, 3)})

    def forward(self, x: Tensor) -> Tensor:
        first, (second,), named = self.parts
        self.parts = (first + x, [second * 0.5], {"k": named["k"] - x})
        return first + second * named["k"]


class StateInAnExistingList(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [torch.zeros(2, 3), torch.zeros(2, 3)]

    def forward(self, x: Tensor) -> Tensor:
        self.parts[0] = self.parts[0] + x
        self.parts[1], self.h = self.h, self.parts[1] * 2
        return self.parts[0] + self.parts[1]


class StateInAnExistingDict(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"a": torch.zeros(2, 3)}

    def forward(self, x: Tensor) -> Tensor:
        self.parts["a"] = self.parts["a"] + x
        self.parts.update(b=x * 2)
        return self.parts["a"] * self.parts["b"]


class BufferInPlace(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        self.total[1] = 7
        return self.fc(x) + self.total


class BufferRebound(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total * 0.9 + x.mean(0)
        return x * self.total


class BufferRegisteredInForward(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("seen", x.mean(0), persistent=True)
        return x + self.seen


class BufferThatBecomesNone(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = x if self.total is None else x + self.total + 1
        self.total = None
        return y


class ParameterWrittenInPlace(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(0.9)
            self.fc.bias.copy_(x.mean(0))
        return self.fc(x)


class ParameterWrittenThroughData(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data.mul_(0.9)
        self.fc.bias.data = x.mean(0)
        return self.fc(x)


class SpectralNormByHand(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.fc.weight.t() @ self.total.add(1), dim=0)
            self.total.copy_(F.normalize(self.fc.weight @ v, dim=0))
        return F.linear(x, self.fc.weight / (self.total @ self.fc.weight @ v))


class AttributeOfASubmodule(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.last = self.fc(x).detach()
        return self.fc.last * 2


class AttributeComesAndGoes(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.scratch = x * 2
        y = self.scratch + 1
        del self.scratch
        return y


class ScalarFromTheInput(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.width, self.rows = x.shape[-1], [x.shape[0], float(x.shape[0] * 2)]
        return x * self.width


class Saturates(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n = min(self.n + 1, 2)
        return x * self.n


class Toggles(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        self.on = not self.on
        return x * 2 if self.on else x.sin()


class Warmed(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.total.copy_(x.mean(0))
            self.ready = True
        return x - self.total


class CountedInATensor(_Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n if self.n < 3 else x / self.n


class CachedByLength(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        if self.h is None or self.h.shape[0] < x.shape[0]:
            self.h = torch.arange(x.shape[0]).float()[:, None]
        return x + self.h[: x.shape[0]]


KEEPING = [
    HiddenState, HiddenStateThatStartsAsNone, HiddenStateWrittenInPlace, StateInATuple,
    StateInAnExistingList, StateInAnExistingDict, BufferInPlace, BufferRebound,
    BufferRegisteredInForward, BufferThatBecomesNone, ParameterWrittenInPlace,
    ParameterWrittenThroughData, SpectralNormByHand, AttributeOfASubmodule, AttributeComesAndGoes,
    ScalarFromTheInput, Saturates, Toggles, Warmed, CountedInATensor, CachedByLength,
]  # fmt: skip


@pytest.mark.parametrize("make", KEEPING, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad], ids=["grad", "no_grad"])
def test_state_that_forward_keeps_is_kept_by_a_replay(make: Any, mode: Any) -> None:
    pair = Pair(make)
    served = [pair.call(lambda k=k: torch.full((2, 3), float(k)), mode) for k in range(1, 9)]
    assert served[-3:] == [True] * 3, (pair.bended.last_mismatch, pair.bended.why_live)
    assert pair.bended.stats.live == 0


def test_a_hidden_state_that_requires_grad_from_the_call_before_keeps_its_history() -> None:
    torch.manual_seed(0)
    eager = HiddenState()
    model = copy.deepcopy(eager)
    bended = bt.BendedModule(model)
    for called in (eager, bended):
        sum(called(ones()()).sum() for _ in range(5)).backward()
    assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in eager.parameters()])
    assert bended.stats.replays >= 3


class _Grows(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.cat([self.h, x])
        return self.h.mean(0)


class _History(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.parts.append(x * 2)
        return torch.stack(self.parts).mean(0)


class _LastThree(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.parts.append(x * 2)
        if len(self.parts) > 3:
            self.parts.pop(0)
        return torch.stack(self.parts).mean(0)


@pytest.mark.parametrize("make", [_Grows, _LastThree])
def test_state_that_grows_up_to_a_point_or_by_size_alone_is_replayed(make: Any) -> None:
    pair = Pair(make)
    served = [pair.call(lambda k=k: torch.full((2, 3), float(k))) for k in range(10)]
    assert served[-4:] == [True] * 4, (pair.bended.last_mismatch, pair.bended.why_live)


def test_a_list_that_grows_at_each_call_ends_in_live_runs_that_say_so() -> None:
    pair = Pair(_History)
    for k in range(22):
        pair.call(lambda k=k: torch.full((2, 3), float(k)))
    says(pair, "self.parts", line_of(_History, "self.parts.append"))


# Counters


class _Settings:
    def __init__(self) -> None:
        self.n = 0


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * 2


class CounterInTheOutput(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n


class CounterThatDecides(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * 2 if self.n % 3 == 0 else x.sin()


class CounterInAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = [0, 5]

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return x * self.counts[0]


class CounterInADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return x * self.counts["calls"]


class CounterInSettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = _Settings()

    def forward(self, x: Tensor) -> Tensor:
        self.settings.n += 1
        return x + self.settings.n


class CounterOfASubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CounterInTheOutput()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class FloatSchedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.9
        return x * self.rate


COUNTERS = {
    Counter: "self.n += 1", CounterInTheOutput: "self.n += 1", CounterThatDecides: "self.n += 1",
    CounterInAList: "self.counts[0] += 1", CounterInADict: 'self.counts["calls"] += 1',
    CounterInSettings: "self.settings.n += 1", FloatSchedule: "self.rate *= 0.9",
}  # fmt: skip


def says(pair: Pair, attribute: str, place: str) -> None:
    """The latest call was live, and the reason names what changes and where."""
    live = pair.bended.stats.live
    pair.call(ones())
    assert pair.bended.stats.live == live + 1, pair.bended.stats
    reasons = pair.bended.why_live
    assert any(attribute in reason and place in reason for reason in reasons), (reasons, place)


@pytest.mark.parametrize("make", COUNTERS, ids=lambda cls: cls.__name__)
def test_a_counter_is_right_after_every_call(make: Any) -> None:
    pair = Pair(make)
    served = [pair.call(ones()) for _ in range(12)]
    if not all(served[-4:]):  # not an input of the replay: then live, with the reason
        statement = COUNTERS[make]
        says(pair, re.match(r"[\w.]+", statement)[0], line_of(make, statement))


def test_a_counter_of_a_submodule_is_right_after_every_call() -> None:
    pair = Pair(CounterOfASubmodule)
    served = [pair.call(ones()) for _ in range(12)]
    if not all(served[-4:]):
        says(pair, "inner.n", line_of(CounterInTheOutput, "self.n += 1"))


@pytest.mark.parametrize("make", COUNTERS, ids=lambda cls: cls.__name__)
def test_a_counter_that_the_user_resets_counts_on_from_there(make: Any) -> None:
    pair = Pair(make)
    fresh = state(pair.eager)
    start = {name: copy.deepcopy(value) for name, value in vars(pair.eager).items()}
    for _ in range(3):
        for _ in range(7):
            pair.call(ones())
        pair.change(lambda model: vars(model).update(copy.deepcopy(start)))
        assert state(pair.model) == fresh


# What forward writes into its arguments


@dataclasses.dataclass
class Batch:
    x: Tensor
    notes: list[Any]
    extra: dict[str, Any]


def _batch(**extra: Any) -> Batch:
    return Batch(torch.arange(6.0).view(2, 3), [1], {"a": torch.ones(3), **extra})


def _in_place(x: Tensor) -> Tensor:
    return x.add_(1).mul_(3)


def _in_place_on_a_view(x: Tensor) -> Tensor:
    x[0].view(-1)[1:].mul_(3)
    x.t()[0, 0] = 9
    return x.sum()


def _out_is_an_argument(x: Tensor) -> Tensor:
    return torch.add(x, 1, out=x)


def _indexed_assignment(x: Tensor) -> Tensor:
    x[x > 2] = 0
    x[0, ::2] = x[1, ::2]
    x[..., None, -1] += 1
    return x * 2


def _shape_in_place(x: Tensor) -> Tensor:
    x.t_()
    x.unsqueeze_(0)
    return x.sum(1)


def _resized(x: Tensor) -> Tensor:
    y = x.sum()
    x.resize_(1, 2)
    return y


def _set_to_another(x: Tensor) -> Tensor:
    y = x.sum()
    x.data = torch.ones(4)
    return y


def _asked_for_grad(x: Tensor) -> Tensor:
    x.requires_grad_()
    return (x * x).sum()


def _no_grad_any_more(x: Tensor) -> Tensor:
    y = x * 2
    y.requires_grad_()
    return y.detach_() + x


def _swapped(x: Tensor, y: Tensor) -> Tensor:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x - y


def _list_appended(x: Tensor, notes: list[Any]) -> Tensor:
    notes.append(x * 2)
    notes.insert(0, "first")
    return notes[-1] + 1


def _list_reordered(x: Tensor, notes: list[Any]) -> Tensor:
    notes.sort(reverse=True)
    notes.extend([x, x])
    notes.pop(1)
    del notes[0]
    return x * len(notes)


def _list_cleared(x: Tensor, notes: list[Any]) -> Tensor:
    n = len(notes)
    notes.clear()
    return x * n


def _dict_updated(x: Tensor, notes: dict[str, Any]) -> Tensor:
    notes["y"] = x * 2
    notes.setdefault("z", [x])
    notes.update(n=x.shape[0])
    notes.pop("a")
    return notes["y"] + 1


def _nested_containers(x: Tensor, notes: dict[str, Any]) -> Tensor:
    notes["a"].append({"x": x})
    notes["b"] = notes["a"]
    notes["a"][0].add_(1)
    return x + notes["a"][0]


def _object_changed(batch: Batch) -> Tensor:
    batch.x = batch.x * 2
    batch.notes.append(batch.x)
    batch.extra["a"].add_(1)
    batch.extra["b"] = batch.extra["a"] * 2
    return batch.x.sum() + batch.extra["b"].sum()


def _object_gains(batch: Batch) -> Tensor:
    batch.seen = batch.x.shape[0]  # type: ignore[attr-defined]
    return batch.x * 2


def _grid() -> Tensor:
    return torch.arange(6.0).view(2, 3)


WRITING: dict[Callable[..., Any], Callable[[], Any]] = {
    _in_place: _grid,
    _in_place_on_a_view: _grid,
    _out_is_an_argument: _grid,
    _indexed_assignment: _grid,
    _shape_in_place: _grid,
    _resized: _grid,
    _set_to_another: _grid,
    _asked_for_grad: _grid,
    _no_grad_any_more: _grid,
    _swapped: lambda: (_grid(), -_grid()),
    _list_appended: lambda: (_grid(), [1, 2]),
    _list_reordered: lambda: (_grid(), [2, 3, 1]),
    _list_cleared: lambda: (_grid(), [2, 3, 1]),
    _dict_updated: lambda: (_grid(), {"a": 1}),
    _nested_containers: lambda: (_grid(), {"a": [torch.ones(3)]}),
    _object_changed: _batch,
    _object_gains: _batch,
}


@pytest.mark.parametrize("model", WRITING, ids=lambda model: model.__name__[1:])
def test_what_forward_writes_into_its_arguments_a_replay_writes(model: Any) -> None:
    replayed(lambda: model, WRITING[model])


@pytest.mark.parametrize(
    "model", [_in_place, _in_place_on_a_view, _out_is_an_argument, _indexed_assignment],
    ids=lambda model: model.__name__[1:],
)  # fmt: skip
def test_an_argument_that_is_a_view_of_something_larger_writes_through(model: Any) -> None:
    bases: list[Tensor] = []

    def view() -> Tensor:
        bases.append(torch.arange(24.0).view(4, 6))
        return bases[-1][1:3, 1::2]

    replayed(lambda: model, view, _grid)
    assert len({str(bits(base)) for base in bases}) == 1


@pytest.mark.parametrize("leaf", [True, False])
def test_writing_into_an_argument_that_requires_grad(leaf: bool) -> None:
    """An error for a leaf; a change with history for what was computed."""

    def given() -> Tensor:
        x = _grid().requires_grad_()
        return x if leaf else x * 1

    pair = Pair(lambda: _in_place)
    for make in (given, _grid, given, _grid, given):
        pair.call(make)
    x, y = _grid().requires_grad_(), _grid().requires_grad_()
    if not leaf:
        _in_place(x * 1).sum().backward()
        pair.bended(y * 1).sum().backward()
        assert bits(x.grad) == bits(y.grad)


def test_two_arguments_that_share_memory() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    def shared() -> Any:
        base = torch.arange(6.0)
        return base[:4], base[2:]

    def apart() -> Any:
        return torch.arange(4.0), torch.arange(4.0)

    def same() -> Any:
        x = torch.arange(4.0)
        return x, x

    replayed(lambda: model, shared, apart, same)


# Hugging Face caches as arguments


def _cached(x: Tensor, cache: Any) -> Tensor:
    k, v = cache.update(x, x * 2, 0)
    if cache.get_seq_length() > 100:
        return k
    k2, _ = cache.update(k[..., -1:, :] + 1, v[..., -1:, :], 1)
    return k.sum() + k2.sum() + cache.get_seq_length()


def test_a_dynamic_cache_that_grows_with_each_call() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    pair = Pair(lambda: _cached)
    served = []
    caches = [transformers.DynamicCache() for _ in range(2)]
    order = iter([0, 1] * 8)

    def given() -> Any:
        k = next(order)
        return torch.full((1, 2, 3, 4), float(caches[k].get_seq_length())), caches[k]

    served = [pair.call(given) for _ in range(8)]
    assert all(served[2:]), (pair.bended.stats, pair.bended.last_mismatch, pair.bended.why_live)
    assert bits(caches[0]) == bits(caches[1])
    assert caches[0].get_seq_length() == 24


# Globals and closures

TENSOR = torch.ones(3)
RATE = 2.0
LIST: list[Any] = []
CONFIG = {"scale": 2.0, "w": torch.ones(3)}


def _reads_globals(x: Tensor) -> Tensor:
    return x * TENSOR * RATE + CONFIG["w"] * CONFIG["scale"] + len(LIST)


def _writes_globals(x: Tensor) -> Tensor:
    global TENSOR
    TENSOR = TENSOR + x.sum(0)
    CONFIG["w"] = CONFIG["w"] * 2
    return x * TENSOR


def _writes_globals_in_place(x: Tensor) -> Tensor:
    TENSOR.add_(x.sum(0))
    CONFIG["w"].mul_(2)
    return x * TENSOR


def _appends_to_a_global(x: Tensor) -> Tensor:
    LIST.append(x.sum())
    return x + len(LIST)


@contextmanager
def globals_kept() -> Iterator[None]:
    kept = {name: globals()[name] for name in ("TENSOR", "RATE", "LIST", "CONFIG")}
    globals().update(copy.deepcopy(kept))
    try:
        yield
    finally:
        globals().update(kept)


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
@pytest.mark.parametrize(
    "model", [_reads_globals, _writes_globals, _writes_globals_in_place, _appends_to_a_global],
    ids=lambda model: model.__name__[1:],
)  # fmt: skip
def test_globals_that_the_run_reads_or_writes(model: Any, module: bool) -> None:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x) * 1

    results, replays = [], 0
    for bent in (False, True):
        called = Calls() if module else model
        called = bt.BendedModule(called) if bent else called
        with globals_kept():
            results.append([])
            for k in range(8):
                out = called(torch.full((2, 3), k + 1.0))
                results[-1].append(bits([out, TENSOR, RATE, LIST, CONFIG]))
                if model is _reads_globals and k % 2:
                    globals()["TENSOR"] = TENSOR * 2
                    CONFIG["w"].add_(1)
        replays = called.stats.replays if bent else 0
    assert results[0] == results[1]
    if model is not _appends_to_a_global:
        assert replays >= 5, (called.stats, called.last_mismatch, called.why_live)


def _closure() -> Callable[[Tensor], Tensor]:
    memory = torch.zeros(3)

    def model(x: Tensor) -> Tensor:
        nonlocal memory
        memory = memory * 0.5 + x.sum(0)
        return x * memory

    return model


def _closure_in_place() -> Callable[[Tensor], Tensor]:
    memory, parts = torch.zeros(3), {"a": torch.zeros(3)}

    def model(x: Tensor) -> Tensor:
        memory.add_(x.sum(0))
        parts["a"] = parts["a"] + memory
        return x * parts["a"]

    return model


def _closure_counter() -> Callable[[Tensor], Tensor]:
    n = 0

    def model(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * n

    return model


REBINDING = {_closure: "memory = memory * 0.5", _closure_counter: "n += 1"}


@pytest.mark.parametrize("make", [_closure, _closure_in_place, _closure_counter])
def test_closures_that_the_run_writes(make: Any) -> None:
    pair = Pair(make)
    served = [pair.call(lambda k=k: torch.full((2, 3), float(k))) for k in range(9)]
    statement = REBINDING.get(make)
    if statement is None:
        assert served[-3:] == [True] * 3, (pair.bended.last_mismatch, pair.bended.why_live)
    elif not all(served[-3:]):
        says(pair, statement.split()[0], line_of(make, statement))


# Changes made by the user between calls


class Plain(nn.Module):
    """Reads attributes of every kind."""

    power = 1

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.norm = nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.scale, self.name, self.extra = 2.0, "a", None
        self.table: dict[str, Any] = {"k": 1.0}
        self.order = [1, 0, 2]
        self.fixed = torch.full((3,), 0.5)

    def helper(self, x: Tensor) -> Tensor:
        return x * self.w

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.act(self.fc(x)))) * self.scale + self.shift
        y = self.helper(y)[:, self.order] ** self.power + self.fixed
        if self.extra is not None:
            y = y + self.extra
        if "more" in self._modules:
            y = self.more(y)
        return y * self.table["k"] if self.name == "a" else y - len(self.table)


class Scaled(nn.Module):
    """A wrapper as adapters put around a layer."""

    def __init__(self, base: nn.Module, rank: int = 1) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((rank, 3), 0.5))
        self.up = nn.Parameter(torch.full((3, rank), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Renamed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 100


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def setting(name: str, *values: Callable[[], Any]) -> list[Change]:
    def one(value: Callable[[], Any]) -> Change:
        return lambda model: setattr(model, name, value())

    return [one(value) for value in values]


def _unfreeze(model: Any) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def _freeze(model: Any) -> None:
    model.requires_grad_(False)


def _tie(model: Any) -> None:
    model.shift = model.norm.running_mean


def _tie_parameters(model: Any) -> None:
    model.fc.bias = model.w


def _untie(model: Any) -> None:
    model.fc.bias = nn.Parameter(torch.ones(3))


def _filled(model: Any) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}


CHANGES: dict[str, list[Change]] = {
    "float attribute": setting("scale", lambda: 3.0, lambda: 3, lambda: 2.0, lambda: float("nan")),
    "string attribute": setting("name", lambda: "b", lambda: "a"),
    "attribute becomes a tensor": setting(
        "extra", lambda: torch.ones(3), lambda: 1.5, lambda: None
    ),
    "tensor attribute": setting("fixed", lambda: torch.zeros(3), lambda: torch.ones(1)),
    "tensor attribute of another dtype": setting("fixed", lambda: torch.ones(3).double()),
    "tensor attribute written in place": [lambda m: m.fixed.fill_(4), lambda m: m.fixed.zero_()],
    "dict": [
        lambda m: m.table.update(k=2.0),
        lambda m: m.table.update(z=1),
        lambda m: setattr(m, "table", {"k": torch.ones(3)}),
    ],
    "list": [lambda m: m.order.reverse(), lambda m: m.order.__setitem__(0, 0)],
    "buffer": [
        lambda m: m.shift.fill_(3),
        lambda m: setattr(m, "shift", torch.full((3,), 5.0)),
        lambda m: setattr(m, "shift", torch.full((2, 1), 5.0)),
        lambda m: m.register_buffer("shift", torch.ones(3)),
    ],
    "parameter": [
        lambda m: setattr(m, "w", nn.Parameter(torch.full((3,), 2.0))),
        lambda m: m.w.data.fill_(4),
        lambda m: setattr(m.w, "data", torch.full((3,), 7.0)),
        lambda m: setattr(m, "w", nn.Parameter(torch.ones(1))),
        lambda m: setattr(m, "w", nn.Parameter(torch.ones(3), requires_grad=False)),
        lambda m: m.register_parameter("w", nn.Parameter(torch.ones(3))),
    ],
    "parameter of a submodule": [
        lambda m: setattr(m.fc, "weight", nn.Parameter(torch.eye(3))),
        lambda m: setattr(m.fc, "bias", None),
        lambda m: setattr(m.fc, "bias", nn.Parameter(torch.ones(3))),
    ],
    "adapters": [
        lambda m: setattr(m, "fc", Scaled(m.fc)),
        lambda m: setattr(m, "fc", Scaled(m.fc, 2)),
        lambda m: m.fc.base.requires_grad_(False),
        lambda m: setattr(m, "fc", m.fc.base.base),
    ],
    "tied parameters": [_tie_parameters, lambda m: m.w.data.fill_(3), _untie],
    "tied buffers": [_tie, lambda m: m.shift.fill_(3)],
    "load_state_dict": [
        lambda m: m.load_state_dict(_filled(m)),
        lambda m: m.load_state_dict({k: v * 0 + 1 for k, v in _filled(m).items()}, assign=True),
        lambda m: m.load_state_dict({"w": torch.zeros(3)}, strict=False),
    ],
    "train and eval": [lambda m: m.eval(), lambda m: m.train(), lambda m: m.norm.eval()],
    "one submodule in eval mode": [lambda m: m.drop.eval(), lambda m: m.drop.train()],
    "freezing": [_freeze, _unfreeze, lambda m: m.w.requires_grad_(False)],
    "double and back": [lambda m: m.double(), lambda m: m.float()],
    "apply": [
        lambda m: m.apply(lambda part: setattr(part, "p", 0.25)),
        lambda m: m.apply(lambda part: part.train(False)),
        lambda m: m.apply(_constant),
    ],
    "adding and removing submodules": [
        lambda m: m.add_module("more", nn.Tanh()),
        lambda m: setattr(m, "more", nn.Linear(3, 3, bias=False)),
        lambda m: delattr(m, "more"),
        lambda m: setattr(m, "act", nn.GELU()),
        lambda m: setattr(m, "act", nn.Identity()),
    ],
    "deleting and giving back": [
        lambda m: delattr(m, "scale") or setattr(m, "scale", 4.0),
        lambda m: delattr(m, "shift") or setattr(m, "shift", torch.ones(3)),
        lambda m: setattr(m, "power", 2),
        lambda m: delattr(m, "power"),
    ],
    "another helper on the object": [
        lambda m: setattr(m, "helper", _doubled),
        lambda m: delattr(m, "helper"),
    ],
    "another forward on the object": [
        lambda m: setattr(m, "forward", _doubled),
        lambda m: delattr(m, "forward"),
    ],
    "another forward of a submodule": [
        lambda m: setattr(m.fc, "forward", _doubled),
        lambda m: delattr(m.fc, "forward"),
    ],
    "hyperparameters of submodules": [
        lambda m: setattr(m.norm, "momentum", 0.5),
        lambda m: setattr(m.norm, "eps", 0.5),
        lambda m: setattr(m.drop, "p", 0.1),
        lambda m: setattr(m.act, "inplace", True),
    ],
}


def _constant(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.5)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_made_between_calls_is_followed(name: str) -> None:
    if name == "double and back":
        pair = Pair(Plain)
        for change, dtype in zip(CHANGES[name], (torch.float64, torch.float32), strict=True):
            pair.change(change)
            pair.call(lambda dtype=dtype: torch.ones(2, 3, dtype=dtype))
            assert pair.call(lambda dtype=dtype: torch.ones(2, 3, dtype=dtype))
            assert not pair.call(ones()) or dtype is torch.float32
        return
    follows(Plain, CHANGES[name])


# Through the BendedModule itself: what `setattr`, `del` and the methods of nn.Module do to it.
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "double and back"])
def test_a_change_made_through_the_bended_module_is_followed(name: str) -> None:
    follows(Plain, CHANGES[name], through="bended")


VALUES_ONLY = {
    "parameter values": [lambda m: m.w.data.fill_(4), lambda m: m.fc.weight.data.mul_(2)],
    "buffer values": [lambda m: m.shift.fill_(3), lambda m: setattr(m, "shift", torch.ones(3))],
    "tensor attribute": [lambda m: m.fixed.fill_(4), lambda m: setattr(m, "fixed", torch.ones(3))],
    "new parameter": [lambda m: setattr(m, "w", nn.Parameter(torch.zeros(3)))],
    "loaded": [lambda m: m.load_state_dict(_filled(m))],
    "assigned": [lambda m: m.load_state_dict(_filled(m), assign=True)],
    "new layer of the same kind": [lambda m: setattr(m, "act", nn.ReLU())],
}


@pytest.mark.parametrize("name", [n for n in VALUES_ONLY if n != "new layer of the same kind"])
def test_other_values_of_tensors_need_no_new_trace(name: str) -> None:
    pair = follows(Plain, VALUES_ONLY[name])
    assert pair.bended.stats.traces == 1, pair.bended.last_mismatch


def test_a_class_attribute_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    follows(
        Plain,
        [
            lambda m: monkeypatch.setattr(Plain, "power", 2),
            lambda m: monkeypatch.setattr(Plain, "power", 3),
        ],
    )


def test_a_method_of_the_class_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(self: Plain, x: Tensor) -> Tensor:
        return x - self.w

    def forward(self: Plain, x: Tensor) -> Tensor:
        return self.helper(x) * 3

    follows(
        Plain,
        [
            lambda m: monkeypatch.setattr(Plain, "helper", helper),
            lambda m: monkeypatch.setattr(Plain, "forward", forward),
            lambda m: monkeypatch.undo(),
        ],
    )


def test_a_class_of_torch_whose_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) - 1

    follows(Plain, [lambda m: monkeypatch.setattr(nn.Linear, "forward", forward)])


def test_a_function_of_the_module_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _doubled(x) + 1

    follows(
        Model,
        [
            lambda m: monkeypatch.setitem(globals(), "_doubled", torch.sin),
            lambda m: monkeypatch.setitem(globals(), "_doubled", lambda x: x * 5),
        ],
    )


def test_another_class_for_the_same_object() -> None:
    follows(Plain, [lambda m: setattr(m, "__class__", Renamed)])
    follows(Plain, [lambda m: setattr(m.act, "__class__", nn.Tanh)])


def test_a_deleted_attribute_gives_the_error_of_eager() -> None:
    pair = Pair(Plain)
    pair.call(ones())
    pair.call(ones())
    for name in ("scale", "fixed", "w", "shift", "fc"):
        value = getattr(pair.model, name), getattr(pair.eager, name)
        pair.change(lambda model, name=name: delattr(model, name))
        pair.call(ones())
        setattr(pair.model, name, value[0])
        setattr(pair.eager, name, value[1])
        pair.call(ones())


# Whatever else forward can read, and how it can change


class Frozen(NamedTuple):
    a: float
    b: int = 1


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: float) -> None:
        self.a = a


class Tool:
    """Reached by attribute, call, method or property."""

    def __init__(self) -> None:
        self._a = 1.5

    @property
    def a(self) -> float:
        return self._a * 2

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._a

    def method(self, x: Tensor) -> Tensor:
        return x - self._a


class Color(enum.Enum):
    RED, BLUE = 1, 2


class Reads(nn.Module):
    """Forward is `read(self, x)`, with `v` as attribute."""

    inherited = 2.0

    def __init__(self, read: Callable[[Any, Tensor], Any], value: Any) -> None:
        super().__init__()
        self.read, self.v = read, value

    def meth(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


class ReadsMore(Reads):
    @property
    def half(self) -> float:
        return self.v / 2

    def __getattr__(self, name: str) -> Any:
        return self.v[name] if name == "found" else super().__getattr__(name)


def attribute(read: Callable[[Any, Tensor], Any], *values: Callable[[], Any]) -> Any:
    """A model that reads an attribute, and the values that it takes in turn."""
    return (lambda: ReadsMore(read, values[0]())), setting("v", *values[1:])


def written(read: Callable[[Any, Tensor], Any], value: Callable[[], Any], *writes: Change) -> Any:
    """A model that reads an attribute, and what writes into it."""
    return (lambda: ReadsMore(read, value())), [lambda m, w=write: w(m.v) for write in writes]


def _signed(model: Any, x: Tensor) -> Tensor:
    return x.abs().copysign(torch.tensor(model.v))


def _scaled_by_a_parameter() -> nn.Module:
    return ReadsMore(lambda m, x: x * m.v, nn.Parameter(torch.full((3,), 2.0)))


def _to_buffer(model: Any) -> None:
    value = model.v.detach() * 2
    del model.v
    model.register_buffer("v", value)


def _to_attribute(model: Any) -> None:
    del model.v
    model.v = torch.full((3,), 7.0)


def _to_number(model: Any) -> None:
    model.v = 3.0


READING: dict[str, tuple[Callable[[], Any], list[Change]]] = {
    "zero and minus zero": attribute(_signed, lambda: 0.0, lambda: -0.0, lambda: 0.0),
    "1, True and 1.0": attribute(
        lambda m, x: x.int() * m.v, lambda: 1, lambda: True, lambda: 1.0
    ),
    "complex": attribute(lambda m, x: x * m.v, lambda: 1j, lambda: 2j),
    "large": attribute(lambda m, x: x * (m.v % 7), lambda: 10**30, lambda: 10**31),
    "numpy scalar": attribute(
        lambda m, x: x * m.v, lambda: numpy.float32(2), lambda: numpy.float64(2), lambda: 3.0
    ),
    "numpy array": attribute(
        lambda m, x: x * torch.tensor(m.v), lambda: numpy.ones(3), lambda: numpy.zeros(3)
    ),
    "numpy array written": written(
        lambda m, x: x * torch.tensor(m.v), lambda: numpy.ones(3), lambda v: v.fill(3)
    ),
    "fraction": attribute(
        lambda m, x: x * float(m.v), lambda: Fraction(1, 2), lambda: Fraction(1, 3)
    ),
    "dtype": attribute(lambda m, x: x.to(m.v), lambda: torch.float64, lambda: torch.float16),
    "size": attribute(lambda m, x: x.reshape(m.v), lambda: torch.Size([3, 2]), lambda: (6,)),
    "slice": attribute(lambda m, x: x[:, m.v], lambda: slice(0, 1), lambda: slice(1, 3)),
    "range": attribute(lambda m, x: x * sum(m.v), lambda: range(3), lambda: range(4)),
    "bytes": attribute(lambda m, x: x * len(m.v), lambda: b"a", lambda: b"ab"),
    "enum": attribute(lambda m, x: x * m.v.value, lambda: Color.RED, lambda: Color.BLUE),
    "set": written(lambda m, x: x * len(m.v), lambda: {1}, lambda v: v.add(2), lambda v: v.pop()),
    "named tuple": attribute(lambda m, x: x * m.v.a, lambda: Frozen(1.0), lambda: Frozen(2.0)),
    "default dict": written(
        lambda m, x: x * m.v["k"], lambda: defaultdict(int, k=1), lambda v: v.update(k=3)
    ),
    "namespace": written(
        lambda m, x: x * m.v.a, lambda: SimpleNamespace(a=1), lambda v: setattr(v, "a", 3)
    ),
    "slots": written(lambda m, x: x * m.v.a, lambda: Slotted(1), lambda v: setattr(v, "a", 3)),
    "property of an object": written(
        lambda m, x: x * m.v.a, Tool, lambda v: setattr(v, "_a", 3)
    ),
    "callable object": written(lambda m, x: m.v(x), Tool, lambda v: setattr(v, "_a", 3)),
    "bound method": written(
        lambda m, x: m.v(x), lambda: Tool().method, lambda v: setattr(v.__self__, "_a", 3)
    ),
    "partial": written(
        lambda m, x: m.v(x), lambda: functools.partial(Tool().method),
        lambda v: setattr(v.func.__self__, "_a", 3),
    ),
    "keyword of a partial": written(
        lambda m, x: m.v(x), lambda: functools.partial(lambda x, tool: tool(x), tool=Tool()),
        lambda v: setattr(v.keywords["tool"], "_a", 3),
    ),
    "object in a closure": written(
        lambda m, x: m.v(x), lambda: (lambda tool: lambda x: tool(x))(Tool()),
        lambda v: setattr(v.__closure__[0].cell_contents, "_a", 3),
    ),
    "object in a default": written(
        lambda m, x: m.v(x), lambda: lambda x, tool=Tool(): tool(x),  # noqa: B008
        lambda v: setattr(v.__defaults__[0], "_a", 3),
    ),
    "default of a function": written(
        lambda m, x: m.v(x), lambda: lambda x, k=2: x * k,
        lambda v: setattr(v, "__defaults__", (5,)),
    ),
    "attribute of a function": written(
        lambda m, x: x * m.v.scale, lambda: _with_scale(), lambda v: setattr(v, "scale", 5)
    ),
    "property of the module": attribute(lambda m, x: x * m.half, lambda: 2.0, lambda: 5.0),
    "__getattr__ of the module": written(
        lambda m, x: x * m.found, lambda: {"found": 1.0}, lambda v: v.update(found=3.0)
    ),
    "strides of a tensor": attribute(
        lambda m, x: x @ m.v if m.v.is_contiguous() else x - m.v.stride(0),
        lambda: torch.arange(9.0).view(3, 3), lambda: torch.arange(9.0).view(3, 3).t(),
        lambda: torch.arange(18.0).view(6, 3)[::2],
    ),
    "requires_grad of a tensor": written(
        lambda m, x: (x * m.v).requires_grad * x, lambda: torch.ones(3),
        lambda v: v.requires_grad_(), lambda v: v.requires_grad_(False),
    ),
    "layers of a Sequential": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        [
            lambda m: m.append(nn.Tanh()),
            lambda m: m.insert(0, nn.Linear(3, 3)),
            lambda m: m.pop(0),
            lambda m: m.__setitem__(1, nn.GELU()),
            lambda m: m.__delitem__(-1),
        ],
    ),
    "layers of a ModuleList": (
        lambda: ReadsMore(
            lambda m, x: functools.reduce(lambda y, layer: layer(y), m.v, x),
            nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]),
        ),
        [lambda m: m.v.append(nn.Linear(3, 3)), lambda m: setattr(m, "v", m.v[:1])],
    ),
    "layers of a ModuleDict": written(
        lambda m, x: sum(layer(x) * len(name) for name, layer in m.v.items()),
        lambda: nn.ModuleDict({"a": nn.ReLU()}),
        lambda v: v.update({"bb": nn.Sigmoid()}), lambda v: v.pop("a"),
    ),
    "a ParameterList": written(
        lambda m, x: x + sum(m.v), lambda: nn.ParameterList([torch.ones(3)]),
        lambda v: v.append(torch.ones(3)), lambda v: v.__setitem__(0, torch.zeros(3)),
    ),
    "a ParameterDict": written(
        lambda m, x: x + sum(m.v[k] * len(k) for k in m.v),
        lambda: nn.ParameterDict({"a": torch.ones(3)}),
        lambda v: v.update({"zz": torch.ones(3)}), lambda v: v.pop("a"),
    ),
    "parameter, buffer, attribute, number": (
        _scaled_by_a_parameter, [_to_buffer, _to_attribute, _to_number]
    ),
    "a parameter hidden by an attribute": (
        _scaled_by_a_parameter,
        [lambda m: vars(m).update(v=torch.zeros(3)), lambda m: vars(m).pop("v")],
    ),
    "statistics of a norm": (
        lambda: nn.BatchNorm1d(3),
        [
            lambda m: setattr(m, "track_running_stats", False),
            lambda m: (setattr(m, "running_mean", None), setattr(m, "running_var", None)),
            lambda m: m.eval(),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READING)
def test_whatever_forward_reads_is_followed(name: str) -> None:
    make, changes = READING[name]
    follows(make, changes)


@pytest.mark.parametrize("name", ["inherited", "meth"])
def test_what_is_inherited_and_then_shadowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = {"inherited": 5.0, "meth": lambda self, x: x * 9}[name]
    read = {"inherited": lambda m, x: x * m.inherited, "meth": lambda m, x: m.meth(x)}[name]
    follows(
        lambda: ReadsMore(read, None),
        [
            lambda m: monkeypatch.setattr(ReadsMore, name, new, raising=False),
            lambda m: setattr(m, name, 7.0 if name == "inherited" else _doubled),
            lambda m: (delattr(m, name), monkeypatch.undo()),
            lambda m: monkeypatch.setattr(Reads, name, new),
        ],
    )


@pytest.mark.parametrize("value", ["tensor", "list", "dict"])
def test_what_a_class_holds_for_all_its_objects(value: str) -> None:
    class Model(nn.Module):
        table: Any = {"tensor": torch.ones(3), "list": [1.0], "dict": {0: 1.0}}[value]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table[0]

    write = {
        "tensor": lambda m: m.table.fill_(3),
        "list": lambda m: m.table.__setitem__(0, 3.0),
        "dict": lambda m: m.table.update({0: 3.0}),
    }[value]
    follows(
        Model,
        [
            write,
            lambda m: setattr(Model, "table", {0: 5.0}),
            lambda m: setattr(m, "table", {0: torch.full((3,), 2.0)}),
        ],
    )


def _with_scale() -> Any:
    def function(x: Tensor) -> Tensor:
        return x

    function.scale = 2  # type: ignore[attr-defined]
    return function


def _remembers(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - that is the point
    seen.append(1)
    return x * len(seen)


def test_a_default_that_the_function_itself_changes() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _remembers(x) + 1

    for called in (_remembers, Model()):
        results = []
        for bent in (False, True):
            _remembers.__defaults__[0].clear()  # type: ignore[index]
            model = bt.BendedModule(called) if bent else called
            results.append([bits(model(torch.ones(2))) for _ in range(8)])
        assert results[0] == results[1]


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(4), lambda: nn.Sequential(
    nn.LazyLinear(4), nn.LazyBatchNorm1d())], ids=["layer", "layers"])  # fmt: skip
def test_lazy_layers_are_made_by_the_first_call(lazy: Any) -> None:
    pair = Pair(lazy)
    served = [pair.call(ones()) for _ in range(4)]
    assert served[-1]


@pytest.mark.parametrize("held", ["list", "closure", "registered"])
def test_lazy_layers_that_the_model_does_not_register(held: str) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        layer = nn.LazyLinear(4)
        if held == "closure":
            return lambda x: layer(x), layer
        holder = nn.Module()
        holder.layers = [layer] if held == "list" else nn.ModuleList([layer])
        return lambda x: holder.layers[0](x), layer

    x = torch.ones(2, 3)
    (model, layer), (other, other_layer) = made(), made()
    bended = bt.BendedModule(other)
    torch.manual_seed(1)
    wanted = [bits(model(x)) for _ in range(4)]
    torch.manual_seed(1)
    assert [bits(bended(x)) for _ in range(4)] == wanted
    assert state(layer) == state(other_layer)
    assert (bended.stats.live, bended.stats.replays) == (1, 2)
    with pytest.raises(InputError, match="call it once first"):
        bt.trace(made()[0], x)
    bended = bt.BendedModule(made()[0])
    bended.interject(lambda node: True, lambda value: value, allow_none=True)
    with pytest.raises(InputError, match="call it once first"):
        bended(x)


def test_a_model_that_reaches_what_wraps_it() -> None:
    class Holder:
        bended: Any = None

    holder, x = Holder(), torch.ones(2)

    def model(x: Tensor) -> Tensor:
        return x * 2 if holder.bended is not None else x

    holder.bended = bended = bt.BendedModule(model)
    for n in range(4):
        assert bits(bended(x + n)) == bits(model(x + n))
    assert bended.stats.replays == 3


class Tagged(tuple):
    tag = 1


@pytest.mark.parametrize("holder", ["class", "object", "argument"])
def test_attributes_of_a_tuple_are_written(holder: str) -> None:
    class Model(nn.Module):
        tagged = Tagged([1])

        def forward(self, x: Tensor, given: Any = None) -> Tensor:
            tagged = self.tagged if given is None else given
            tagged.tag += 1
            return x * tagged.tag

    model, x = Model(), torch.ones(2)
    if holder == "object":
        model.tagged = Tagged([2])
    tagged = Tagged([3]) if holder == "argument" else model.tagged
    more = (tagged,) if holder == "argument" else ()
    bended = bt.BendedModule(model)
    for before in (1, 1, 1, 5, 5, 1):
        tagged.tag = before
        assert bits(bended(x, *more)) == bits(x * (before + 1))
        assert tagged.tag == before + 1
    assert bended.stats.replays + bended.stats.live >= 3


@pytest.mark.parametrize(
    "iterator",
    [
        lambda: iter(range(99)), lambda: iter([torch.ones(2) * k for k in range(99)]),
        lambda: (k for k in range(99)), lambda: map(float, range(99)), lambda: itertools.count(1),
    ],
    ids=["range", "list", "generator", "map", "count"],
)  # fmt: skip
@pytest.mark.parametrize("held", [False, True], ids=["argument", "attribute"])
def test_an_iterator_moves_on_at_each_call(iterator: Any, held: bool) -> None:
    def model(x: Tensor, steps: Any) -> Tensor:
        return x * next(steps)

    results = []
    for bent in (False, True):
        steps = iterator()
        if held:
            called = Reads(lambda m, x: x * next(m.v), steps)
            called = bt.BendedModule(called) if bent else called
            results.append([bits(called(torch.ones(2))) for _ in range(7)])
        else:
            called = bt.BendedModule(model) if bent else model
            results.append([bits(called(torch.ones(2), steps)) for _ in range(7)])
    assert results[0] == results[1]


FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "deterministic": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "precision": (
        lambda: len(torch.get_float32_matmul_precision()),
        lambda n: torch.set_float32_matmul_precision({7: "highest", 4: "high"}[n]), 4,
    ),
    "anomaly": (torch.is_anomaly_enabled, lambda on: torch.set_anomaly_enabled(on, False), True),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_torch_that_forward_reads(name: str) -> None:
    get, put, new = FLAGS[name]
    before = get()
    bended = bt.BendedModule(lambda x: x * get())
    try:
        for value in (before, new, before, new):
            put(value)
            for _ in range(2):
                assert torch.equal(bended(torch.ones(2)), torch.ones(2) * value)
    finally:
        put(before)


# Modes of torch


class Modal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Any:
        y = self.drop(self.norm(self.fc(x.float()).float()))
        z = self.fc(y) + torch.ones(3)
        return y, z, torch.is_grad_enabled(), z.requires_grad, y.dtype


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(False),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
}


@pytest.mark.more
@pytest.mark.parametrize("first", MODES)
def test_every_mode_after_every_other(first: str) -> None:
    def model_input() -> Tensor:
        return torch.arange(12.0, dtype=torch.float32).view(4, 3)

    pair = Pair(Modal)
    for second in MODES:
        for name in (first, second, first, second):
            pair.call(model_input, MODES[name])
    assert pair.call(model_input, MODES[first]), pair.bended.last_mismatch
    assert pair.bended.stats.live == 0


@pytest.mark.parametrize("first", [True, False])
def test_requires_grad_of_the_inputs(first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return y * 2 if y.requires_grad else y - torch.rand(())

    pair = Pair(Model)
    for grad in (first, not first, first, not first):
        served = pair.call(lambda grad=grad: ones()().requires_grad_(grad))
    assert served
    x = torch.randn(4, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    pair.eager(x).square().sum().backward()
    pair.bended(y).square().sum().backward()
    assert bits(x.grad) == bits(y.grad)


def test_moves_of_the_whole_model_to_other_dtypes_and_devices() -> None:
    moves: list[tuple[Change, Callable[[], Tensor]]] = [
        (lambda m: m.double(), lambda: torch.ones(2, 3).double()),
        (lambda m: m.to(torch.bfloat16), lambda: torch.ones(2, 3).bfloat16()),
        (lambda m: m.half(), lambda: torch.ones(2, 3).half()),
        (lambda m: m.float(), ones()),
        (lambda m: m.fc.double(), ones()),  # an error, in eager and here
        (lambda m: m.fc.float(), ones()),
        (lambda m: m.to(memory_format=torch.channels_last), ones()),
    ]
    for through in ("model", "bended"):
        pair = Pair(Plain)
        pair.call(ones())
        for change, given in moves:
            target = "model" if change is moves[4][0] else through
            pair.change(change, target)
            for _ in range(3):
                pair.call(given)
        assert pair.bended.stats.replays >= 2 * (len(moves) - 1)


def test_a_move_to_the_meta_device() -> None:
    bended = bt.BendedModule(Plain().eval())
    for _ in range(2):
        bended(torch.ones(2, 3))
    bended.to("meta")
    bended.model.fixed = bended.model.fixed.to("meta")
    for _ in range(3):
        out = bended(torch.ones(2, 3, device="meta"))
        assert out.is_meta
        assert out.shape == (2, 3)
    assert bended.stats.replays == 3
    bended.to_empty(device="cpu")
    bended.model.fixed = torch.zeros(3)
    bended.load_state_dict({k: torch.ones_like(v) for k, v in bended.state_dict().items()})
    for _ in range(2):
        assert bits(bended(torch.ones(2, 3))) == bits(bended.model(torch.ones(2, 3)))


# Random numbers


def _all_draws(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.3) + torch.randn(3) * torch.rand_like(x)
    y = y + torch.randint(0, 5, (3,)) + torch.randperm(3) + torch.bernoulli(torch.full((3,), 0.5))
    y = y + torch.normal(0.0, 1.0, (3,)) + torch.multinomial(torch.ones(4), 3)
    y.uniform_(0, 1).add_(torch.empty(3).exponential_())
    return F.gumbel_softmax(y) + F.rrelu(y, training=True) + torch.poisson(torch.ones(3))


def test_the_same_seed_gives_the_same_draws_and_the_same_state_afterwards() -> None:
    pair = Pair(lambda: _all_draws)
    assert [pair.call(ones()) for _ in range(4)] == [False, True, True, True]
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(bits([pair.bended(torch.ones(2, 3)), torch.get_rng_state()]))
    assert drawn[0] == drawn[1] != drawn[2]


def test_generators_and_forks_of_the_random_state() -> None:
    generator = torch.Generator()

    def model(x: Tensor) -> Tensor:
        y = x + torch.rand(3, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            y = y + torch.rand(3)
        return y + torch.rand(3)

    bended = bt.BendedModule(model)
    for seed in (0, 0, 1, 2):
        results = []
        for called in (model, bended):
            torch.manual_seed(seed)
            generator.manual_seed(seed)
            results.append(bits([called(torch.ones(3)), called(torch.ones(3))]))
            results[-1] = results[-1], bits([torch.get_rng_state(), generator.get_state()])
        assert results[0] == results[1]


class _Queue(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.queue = kind, collections.deque[Any](maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        queue = self.queue
        if self.kind == "numbers":
            queue.append(x.mean().item())
            if x[0] > 0:
                queue.rotate(1)
            return x * sum(queue) / len(queue)
        if self.kind == "tensors":
            queue.append(x.detach() * 2)
            return torch.stack(list(queue)).mean(0) + queue[0]
        queue.append(len(queue))
        if len(queue) == 3:
            queue.clear()
        return x + len(queue) + (queue.maxlen or 7)


@pytest.mark.parametrize("kind", ["numbers", "tensors", "lengths"])
def test_a_deque_that_forward_changes_and_reads(kind: str) -> None:
    model, eager = _Queue(kind), _Queue(kind)
    bended = bt.BendedModule(model)
    torch.manual_seed(0)
    for number in range(24):
        for one in (model, eager):
            if number == 12:
                one.queue = collections.deque(one.queue, maxlen=2)
            if number == 18:
                one.queue.clear()
        x = torch.randn(3)
        assert bits(bended(x)) == bits(eager(x))
        assert bits([*model.queue]) == bits([*eager.queue])
        assert model.queue.maxlen == eager.queue.maxlen
    assert bended.stats.replays >= 8


def test_a_deque_among_the_arguments() -> None:
    def model(x: Tensor, queue: collections.deque[Any]) -> Tensor:
        queue.append(x * 2)
        return x + queue[0] * len(queue)

    bended = bt.BendedModule(model)
    for number in range(6):
        x, first = torch.randn(2), [torch.randn(2)] * (1 + number % 2)
        mine, other = collections.deque(first), collections.deque(first)
        assert bits(bended(x, mine)) == bits(model(x, other))
        assert bits([*mine]) == bits([*other])
    assert (bended.stats.traces, bended.stats.replays) == (2, 4)
