"""Python around the tensors: threads, caches, context, iterators, and what only Python knows."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Stateful
from tests.promise import bits, randn_inputs

border = Border(".*torch.jit.(fork|wait)")
SAME = [randn_inputs(3, 4)] * 6


@border.live("origin|thread")
def computed_by_another_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(lambda: x * 2).result()
    return x + y


@border.live("origin|thread")
def returned_by_another_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * 2).result()


@border.live("thread", at="thread")
def written_by_another_thread(x: Tensor) -> Tensor:
    y = x * 1
    thread = threading.Thread(target=lambda: y.detach().add_(1))
    thread.start()
    thread.join()
    return y * 2


@border.live("thread")
def a_number_from_another_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        largest = pool.submit(lambda: float(x.detach().max())).result()
    return x * largest


@border.live("origin|thread")
class AModuleInAnotherThread(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            a, b = pool.map(self.fc, [x, x * 2])
        return a + b


@border.live("origin|thread")
def random_numbers_in_another_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: torch.rand(4)).result()
    return x * drawn + torch.rand(4)


@border.replays
def forked_by_torch(x: Tensor) -> Tensor:
    future = torch.jit.fork(torch.sin, x)
    return torch.jit.wait(future) + x


@functools.cache
def cached_scale(n: int) -> float:
    return n * 0.5


@functools.cache
def cached_table(n: int) -> Tensor:
    return torch.arange(n).float()


@border.either("cache", at="cached_scale")
def a_cached_number(x: Tensor) -> Tensor:
    return x * cached_scale(x.shape[0])


@border.either("cache", at="cached_table")
def a_cached_tensor(x: Tensor) -> Tensor:
    return x * cached_table(x.shape[1]) + cached_table(4)


@border.either("cache", at="self.table")
class ACachedMethod(Stateful):
    @functools.lru_cache(maxsize=8)  # noqa: B019 - models do write it
    def table(self, n: int) -> Tensor:
        return torch.arange(n).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.table(4)


@border.replays
class ACachedProperty(Stateful):
    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(4).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.table


@border.replays(inputs=DEFAULT * 2)
class ACacheOfItsOwn(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(4).float() * len(x)
        return self.fc(x) + self.tables[len(x)]


scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)


def reads_a_context_variable(x: Tensor) -> Tensor:
    return x * scale.get()


@border.replays
def sets_a_context_variable(x: Tensor) -> Tensor:
    token = scale.set(float(x.shape[0]))
    try:
        return x * scale.get()
    finally:
        scale.reset(token)


def chunks(x: Tensor) -> Iterator[Tensor]:
    for row in x:
        yield row * 2


@border.replays
def a_generator_within_the_call(x: Tensor) -> Any:
    return sum(chunks(x)), next(chunks(x)), [row for row, _ in zip(chunks(x), "ab", strict=False)]


@border.live("content cannot be guarded|generator|iterator", inputs=SAME)
class AGeneratorAcrossCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = (k * 0.5 for k in range(100))

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.steps)


@border.live("content cannot be guarded|generator|iterator", inputs=SAME)
class AGeneratorOfTensorsAcrossCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = self.make()
        next(self.steps)

    def make(self) -> Iterator[Any]:
        total = torch.zeros(4)
        while True:
            x = yield total
            if x is not None:
                total = total + x.sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps.send(x.detach()) * x


@border.live("steps", inputs=SAME)
def a_generator_in_a_closure() -> Callable[[Tensor], Tensor]:
    steps = iter(range(100))

    def model(x: Tensor) -> Tensor:
        return x * next(steps)

    return model


@border.replays(inputs=SAME * 2)
class CountsInACounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return x * self.counts["calls"]


@border.replays
def default_dicts(x: Tensor) -> Any:
    found = defaultdict(list)
    for i, row in enumerate(x):
        found[i % 2].append(row)
    return {key: torch.stack(rows) for key, rows in found.items()}


@dataclasses.dataclass
class Output:
    first: Tensor
    size: int
    extra: Any = None


class Pair(NamedTuple):
    a: Tensor
    b: Any


Old = namedtuple("Old", "x y")


@border.replays
def dataclasses_returned(x: Tensor) -> Any:
    out = Output(x * 2, x.shape[0])
    return dataclasses.replace(out, extra=[out.first + 1])


@border.replays
def named_tuples_returned(x: Tensor) -> Any:
    pair = Pair(x * 2, {"n": x.shape[1]})
    return pair._replace(a=pair.a + 1), Old(*pair)


@border.replays
def trees(x: Tensor) -> Any:
    made = {"a": x * 2, "b": [x + 1, (x.sum(), 3)]}
    leaves, spec = pytree.tree_flatten(made)
    doubled = pytree.tree_map(lambda leaf: leaf * 2, made)
    return doubled, pytree.tree_unflatten(leaves[::-1], spec), len(leaves)


@border.replays
def weak_values(x: Tensor) -> Tensor:
    kept = weakref.WeakValueDictionary()
    y = x * 2
    kept["y"] = y
    return kept["y"] + 1


@border.live("asks for an id", at="seen = {id(y)")
def identities(x: Tensor) -> Tensor:
    y = x * 2
    seen = {id(y): y}
    return seen[id(y)] if y is not x else x


@border.replays
def compared_identities(x: Tensor) -> Tensor:
    y = x * 2
    return y if id(y) != id(x) and id(x) == id(x) else x


@border.replays
def hashes(x: Tensor) -> Any:
    first, second = x * 2, x * 3
    table = {first: 1, second: 2}
    return first * table[first] + second * table[second]


@border.replays
def partials_and_operators(x: Tensor) -> Tensor:
    twice = functools.partial(torch.mul, 2)
    return functools.reduce(torch.add, map(twice, x.unbind()))


@border.replays
def exceptions(x: Tensor) -> Tensor:
    try:
        x[100]
    except IndexError as error:
        return x * len(str(error).split())
    return x


@border.replays
def recursion(x: Tensor) -> Tensor:
    def halve(y: Tensor) -> Tensor:
        return y if len(y) <= 1 else halve(y[: len(y) // 2]) + y[0]

    return halve(x)


@border.replays
class ClosuresHeld(Stateful):
    def __init__(self) -> None:
        super().__init__()
        factor = torch.ones(4) * 3
        self.scale = lambda x: x * factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.fc(x))


@border.replays(inputs=SAME)
def a_nonlocal_counter() -> Callable[[Tensor], Tensor]:
    count = 0

    def model(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return model


@border.replays
def a_nonlocal_tensor() -> Callable[[Tensor], Tensor]:
    total = torch.zeros(4)

    def model(x: Tensor) -> Tensor:
        nonlocal total
        total = total + x.detach().sum(0)
        return x * total

    return model


def a_global_number(x: Tensor) -> Tensor:
    return x * FACTORS["global"]


FACTORS = {"global": 2.0}


class Helper:
    """An object that is no module; its methods read a global and a class attribute."""

    bias = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x * FACTORS["global"] + self.bias


helper = Helper()


def a_helper_object(x: Tensor) -> Tensor:
    return helper.apply(x)


class HoldsAHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.apply(x)


def _changed_between(model: Callable[..., Any], change: Callable[[int], Any]) -> bt.BendedModule:
    bended = bt.BendedModule(model)
    for step in range(6):
        change(step // 2)
        (x,), _ = randn_inputs(3, 4, seed=step)()
        assert bits(bended(x)) == bits(model(x)), step
    return bended


def test_a_context_variable_set_by_the_caller() -> None:
    token = scale.set(0.0)
    try:
        _changed_between(reads_a_context_variable, lambda n: scale.set(float(n)))
    finally:
        scale.reset(token)


def test_a_cache_that_is_emptied_and_filled_anew() -> None:
    base = [1.0]

    @functools.cache
    def factor(n: int) -> float:
        return n * base[0]

    def model(x: Tensor) -> Tensor:
        return x * factor(x.shape[0])

    def change(n: int) -> None:
        base[0] = float(n)
        factor.cache_clear()

    _changed_between(model, change)


def test_globals_that_a_helper_reads(monkeypatch: Any) -> None:
    def change(n: int) -> None:
        monkeypatch.setitem(FACTORS, "global", float(n))
        monkeypatch.setattr(Helper, "bias", float(n + 1))

    for model in (a_global_number, a_helper_object, HoldsAHelper()):
        _changed_between(model, change)


def test_environment_read_through_a_module_attribute(monkeypatch: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return x * (2 if torch.backends.mkldnn.enabled else 3)

    _changed_between(model, lambda n: monkeypatch.setattr(torch.backends.mkldnn, "enabled", n != 1))


def test_threads_that_use_the_same_wrapped_model_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    bended = bt.BendedModule(model)
    inputs = [torch.randn(2 + i % 3, 4) for i in range(24)]
    wanted = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(bended, inputs))
    assert bits(given) == bits(wanted)


_FACTOR = [2]


@functools.lru_cache
def _times_factor(number: int) -> int:
    return number * _FACTOR[0]


def test_a_cache_that_is_cleared_is_filled_again() -> None:
    model = lambda x: x * _times_factor(x.shape[0])  # noqa: E731
    _times_factor.cache_clear()
    bended, x = bt.BendedModule(model), torch.ones(2)
    assert [bended(x)[0].item() for _ in range(3)] == [4.0] * 3
    assert bended.stats.replays == 2
    _times_factor.cache_clear()
    assert bended(x)[0].item() == 4.0  # the model keeps this result: so must this call
    _FACTOR[0] = 7
    try:
        assert torch.equal(bended(x), model(x))
        assert _times_factor.cache_info().currsize == 1
        assert model(x)[0].item() == 4.0
    finally:
        _FACTOR[0] = 2
        _times_factor.cache_clear()


@pytest.mark.parametrize("first", [-1, 1])
def test_a_cache_filled_behind_a_branch_and_then_with_other_results(first: int) -> None:
    def model(x: Tensor) -> Tensor:
        return x * _times_factor(3) if x.sum() > 0 else x + 1

    _times_factor.cache_clear()
    bended, x = bt.BendedModule(model), torch.ones(2)
    for sign in (first, 1, -1, 1):
        assert torch.equal(bended(sign * x), model(sign * x))
    _FACTOR[0] = 7
    _times_factor.cache_clear()
    _times_factor(3)
    _FACTOR[0] = 2
    for sign in (1, -1, 1):
        assert torch.equal(bended(sign * x), model(sign * x))
    assert torch.equal(model(x), x * 21)  # which Python gives as well
    _times_factor.cache_clear()
    assert torch.equal(bended(x), x * 6)


@functools.lru_cache
def _tensor_of_factor(size: int) -> Tensor:
    return torch.ones(size) * _FACTOR[0]


HELD = torch.ones(2, 3)
HELD_TOO = [torch.ones(2, 3), 1]
TABLE = {HELD: 5.0}
PAIRS = {(HELD, 1): 5.0}
one_and_the_same = operator.is_


@functools.lru_cache(maxsize=8)
def _mean(x: Tensor) -> Any:
    return x.mean()


class ByIdentity:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __hash__(self) -> int:
        return hash(self.x)

    def __eq__(self, other: Any) -> bool:
        return type(other) is ByIdentity and self.x is other.x


OBJECTS = {ByIdentity(HELD): 5.0}


def _in_a_local_set(x: Tensor) -> Tensor:
    y = x.contiguous()
    return x + len({x, y})


_LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "in": lambda x: x + 1 if x in TABLE else x - 1,
    "get": lambda x: x + TABLE.get(x, 1.0),
    "tuples": lambda x: x + PAIRS.get((x, 1), 1.0),
    "objects": lambda x: x + OBJECTS.get(ByIdentity(x), 1.0),
    "hash": lambda x: x + 1 if hash(x) == hash(HELD) else x - 1,
    "cache": lambda x: x - _mean(x),
    "a local set": _in_a_local_set,
}
_TESTS: dict[str, Callable[[Tensor], Tensor]] = {
    "is_": lambda x: x + 1 if operator.is_(x, HELD) else x - 1,
    "under another name": lambda x: x + 1 if one_and_the_same(x, HELD) else x - 1,
    "in a list": lambda x: x + 1 if x is HELD_TOO[0] else x - 1,
}


@pytest.mark.parametrize("name", [*_LOOKUPS, *_TESTS])
def test_a_tensor_that_is_told_from_others_by_its_identity(name: str) -> None:
    _mean.cache_clear()
    model = (_LOOKUPS | _TESTS)[name]
    bended = bt.BendedModule(model)
    odd = torch.arange(6.0).view(3, 2)
    others = [torch.zeros(2, 3), torch.full((2, 3), 2.0), odd.t(), odd.t().contiguous()]
    for x in [HELD, *others, HELD_TOO[0], HELD, *others]:
        assert torch.equal(bended(x), model(x))
    if name in _LOOKUPS:
        assert bended.stats.replays == 0
        assert any("by its identity" in reason for reason in bended.why_live), bended.why_live
    else:
        assert bended.stats.live == 0


class Plain:
    def __init__(self) -> None:
        self.scale = 2.0


@dataclasses.dataclass(eq=False)
class Data:
    scale: float = 2.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


def _removed(one: Any) -> int:
    held = [1, HOLDER.items[0]]
    with contextlib.suppress(ValueError):
        held.remove(one)
    return len(held)


@functools.cache
def _numbered(one: Any) -> float:
    HOLDER.calls += 1
    return float(HOLDER.calls)


HOLDER = types.SimpleNamespace()
the_id, the_hash = id, hash
_FOUND: dict[str, tuple[bool, Callable[[Tensor, Any], Tensor]]] = {  # with whether it may replay
    "==": (True, lambda x, one: x + (1 if one == HOLDER.items[0] else 2)),
    "is": (True, lambda x, one: x + (1 if one is HOLDER.items[0] else 2)),
    "two ids": (True, lambda x, one: x + (1 if id(one) == id(HOLDER.items[0]) else 2)),
    "in a list": (True, lambda x, one: x + (1 if one in HOLDER.items else 2)),
    "index": (True, lambda x, one: x + (HOLDER.items.index(one) if one in HOLDER.items else 5)),
    "lists": (True, lambda x, one: x + (1 if [one] == HOLDER.items else 2)),
    "remove": (True, lambda x, one: x + _removed(one)),
    "contains": (True, lambda x, one: x + (1 if operator.contains(HOLDER.items, one) else 2)),
    "a set": (False, lambda x, one: x + (1 if one in HOLDER.members else 2)),
    "a dict": (False, lambda x, one: x + HOLDER.table.get(one, 1.0)),
    "pairs": (False, lambda x, one: x + HOLDER.pairs.get((one, 1), 1.0)),
    "deque": (False, lambda x, one: x + (1 if one in HOLDER.queue else 2)),
    "a cache": (False, lambda x, one: x + _numbered(one)),
    "id": (False, lambda x, one: x + HOLDER.ids.get(id(one), 1.0)),
    "ids": (False, lambda x, one: x + len({*map(id, [one])} & HOLDER.ids.keys())),
    "another name": (False, lambda x, one: x + HOLDER.ids.get(the_id(one), 1.0)),
    "hashes": (False, lambda x, one: x + len({*map(hash, [one])} & HOLDER.hashes.keys())),
    "another hash": (False, lambda x, one: x + HOLDER.hashes.get(the_hash(one), 1.0)),
    "hash": (False, lambda x, one: x + HOLDER.hashes.get(hash(one), 1.0)),
}


@pytest.mark.parametrize("kind", [Plain, Data, Slotted, torch.Generator])
@pytest.mark.parametrize("name", _FOUND)
def test_an_object_that_is_told_from_others_by_its_identity(name: str, kind: Any) -> None:
    may_replay, model = _FOUND[name]
    several = [kind() for _ in range(3)]
    first, x = several[0], torch.ones(2)

    def all_of(call: Callable[..., Tensor]) -> list[Tensor]:
        vars(HOLDER).clear()
        vars(HOLDER).update(items=[first], calls=0)
        if not may_replay:
            vars(HOLDER).update(
                members={first}, table={first: 5.0}, pairs={(first, 1): 5.0}, ids={id(first): 5.0},
                hashes={hash(first): 5.0}, queue=collections.deque([first]),
            )  # fmt: skip
        _numbered.cache_clear()
        return [call(x, several[number]) for number in (0, 0, 1, 2, 1, 0, 2, 2, 0)]

    bended = bt.BendedModule(model)
    assert bits(all_of(bended)) == bits(all_of(model))
    assert bool(bended.stats.live) is not may_replay, bended.why_live


class Remembers(nn.Module):
    """Keeps what it was given, and tells what it meets again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.last = way, None
        self.met: set[Any] = set()
        self.times: dict[Any, float] = {}
        self.listed: list[Any] = []

    def forward(self, x: Tensor, one: Any) -> Tensor:
        if self.way == "the last one":
            known, self.last = one == self.last, one
        elif self.way == "the last tensor":
            known, self.last = x is self.last, x
        elif self.way == "a set":
            known = (x, one) in self.met
            self.met.add((x, one))
        elif self.way == "a list":
            known = one in self.listed
            self.listed.append(one)
        else:
            key = x if self.way == "tensors" else one
            known = key in self.times
            self.times[key] = self.times.get(key, 1.0) + 1
            x = x * self.times[key]
        return x + 1 if known else x - 1


@pytest.mark.parametrize(
    "way", ["the last one", "the last tensor", "a set", "a list", "tensors", "objects"]
)
def test_what_a_call_was_given_and_later_calls_meet_again(way: str) -> None:
    eager, model = Remembers(way), Remembers(way)
    bended = bt.BendedModule(model)
    several, tensors = [Plain() for _ in range(3)], [torch.full((2,), n + 1.0) for n in range(3)]
    for number in (0, 0, 1, 1, 0, 2, 0, 0, 2, 2, 1, 0):
        given = tensors[number], several[number]
        assert torch.equal(bended(*given), eager(*given))
        assert model.last is eager.last
        assert len(model.met) == len(eager.met)
        assert list(map(id, model.times)) == list(map(id, eager.times))
        assert list(model.times.values()) == list(eager.times.values())
        assert list(map(id, model.listed)) == list(map(id, eager.listed))


def _ranks(shape: torch.Size, mask: Tensor | None) -> Tensor:
    return torch.ones(shape) if mask is None else mask.cumsum(0) / shape[0]


@pytest.mark.parametrize("size", [1, 3, None])
def test_a_cache_by_a_tensor_of_the_run_which_no_later_call_can_give(size: int | None) -> None:
    ranks = functools.lru_cache(maxsize=size)(_ranks)

    def model(x: Tensor, leave: bool = False) -> Any:
        mask = x > 0
        assert ranks(x.shape, mask) is ranks(x.shape, mask)
        return (x * ranks(x.shape, mask), mask) if leave else x * ranks(x.shape, mask)

    bended = bt.BendedModule(model)
    for length in (2, 3, 2, 3, 2):
        x = torch.randn(length, 4)
        assert torch.equal(bended(x), x * _ranks(x.shape, x > 0))
    assert (bended.stats.traces, bended.stats.replays, bended.stats.live) == (2, 3, 0)
    left = [bended(torch.ones(2, 4), True) for _ in range(3)]  # the cache could be asked for these
    for output, mask in left:
        assert torch.equal(output, torch.ones(2, 4) * _ranks(mask.shape, mask))
        assert ranks(mask.shape, mask) is ranks(mask.shape, mask)
    assert bended.stats.live == 3


def test_a_cache_by_a_tensor_of_the_caller() -> None:
    ranks = functools.lru_cache(maxsize=2)(_ranks)
    model = lambda x, mask: x * ranks(x.shape, mask)  # noqa: E731
    bended = bt.BendedModule(model)
    x, masks = torch.randn(2, 4), [torch.randn(2, 4) > 0 for _ in range(3)]
    for number in (0, 0, 1, 0, 2, 1, 0, 0, 0):
        mask = masks[number]
        output = bended(x, mask)
        hits = ranks.cache_info().hits
        assert torch.equal(output, x * _ranks(x.shape, mask))
        assert torch.equal(model(x, mask), output)
        assert ranks.cache_info().hits == hits + 1  # the call has left it there


@pytest.mark.parametrize("size", [1, 2])
def test_a_cache_by_a_tensor_of_the_run_beside_one_that_can_be_found(size: int) -> None:
    ranks = functools.lru_cache(maxsize=size)(_ranks)
    shape = torch.Size([2, 4])
    bended = bt.BendedModule(lambda x: x * ranks(x.shape, x > 0))
    for _ in range(3):
        kept = ranks(shape, None)
        x = torch.randn(2, 4)
        assert torch.equal(bended(x), x * _ranks(x.shape, x > 0))
        bended(-x)  # a run of two evicts the first entry of two
        assert ranks(shape, None) is not kept


@pytest.mark.parametrize("cached", [_times_factor, _tensor_of_factor])
def test_a_cache_that_others_fill_between_the_runs_of_two_paths(cached: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return x * cached(2) if x.sum() > 0 else x + 1

    def fill(factor: int) -> None:
        _FACTOR[0] = factor
        cached.cache_clear()
        cached(2)
        _FACTOR[0] = 2

    cached.cache_clear()
    bended, x = bt.BendedModule(model), torch.ones(2)
    for factor in (None, 5, 7, 5):
        if factor is not None:
            fill(factor)
        for sign in (-1, -1) if factor is None else (1, 1, -1, 1):
            assert torch.equal(bended(sign * x), model(sign * x))
    assert torch.equal(bended(x), x * (10 if cached is _times_factor else 5))


def test_arguments_that_are_called_like_others_or_by_no_name() -> None:
    def model(*a: float, **k: float) -> Tensor:
        return torch.ones(2) * sum(a) + sum(n * value for n, value in enumerate(k.values(), 1))

    bended = bt.BendedModule(model)
    for given in (
        {"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}, {"k": 1.0, "b": 3.0}, {"a[0]": 2.0}, {},
        {"**a": 1.0, "a": 3.0}, {"a": 1.0, "**a": 3.0}, {"a b": 2.0, "": 1.0},
    ) * 2:  # fmt: skip
        for positional in ((), (1.0,)):
            assert torch.equal(bended(*positional, **given), model(*positional, **given))
