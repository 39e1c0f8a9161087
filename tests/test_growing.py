"""Caches that a replay makes longer: what was there is let go at once, and put back where need be.

Of each model the replays are compared with eager in what they return, in what they leave in the
cache, and in what they raise; and how much memory they hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tools.benchmarks.memory import peak_of

BYTES = 8 * 64 * 16 * 4  # of one tensor in a cache of 64 rows


class Cache:
    """Keys of some layers."""

    def __init__(self, layers: int = 4, rows: int = 64) -> None:
        torch.manual_seed(rows)
        self.keys = [Layer(torch.randn(8, rows, 16)) for _ in range(layers)]

    def tensors(self) -> list[Tensor]:
        return [layer.keys for layer in self.keys]


class Layer:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update(self, new: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, new], dim=-2)
        return self.keys


class Attends(nn.Module):
    """A layer for each entry of a cache, with a question after each."""

    def __init__(self, ask: Callable[[Tensor, int], Any] = lambda x, index: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.ask = ask

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for index, (layer, kept) in enumerate(zip(self.layers, cache.keys, strict=True)):
            keys = kept.update(layer(x))
            x = (x @ keys.transpose(-1, -2)).softmax(-1) @ keys
            answer = self.ask(x, index)
            if answer is not None:
                x = x + answer
        return x


def inputs(value: float = 1.0) -> Tensor:
    return torch.full((8, 1, 16), value)


def called(model: Any, x: Tensor, cache: Cache) -> Any:
    """What a call returns or raises, and what it leaves in the cache."""
    with torch.no_grad():
        try:
            given = model(x, cache)
        except Exception as error:
            given = f"{type(error).__name__}: {error}"
    return given, cache.tensors()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.stride() == other.stride()
        return alike and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_as_eager(model: nn.Module, bended: bt.BendedModule, x: Tensor, **sizes: int) -> None:
    assert same(called(bended, x, Cache(**sizes)), called(model, x, Cache(**sizes)))


def questions(x: Tensor, index: int) -> Any:
    return x * 2 if x.sum() > 0 else None


@pytest.mark.more
def test_a_cache_is_there_once() -> None:
    for ask in (lambda x, index: None, questions):
        model = Attends(ask)
        bended = bt.BendedModule(model)
        called(bended, inputs(), Cache())
        one, other = Cache(), Cache()
        eager, kept = peak_of(lambda m=model, c=one: called(m, inputs(), c)[0])
        replay, left = peak_of(lambda m=bended, c=other: called(m, inputs(), c)[0])
        assert bended.stats.replays >= 1
        assert 4 * BYTES < eager < 6 * BYTES
        assert replay <= eager
        assert left == kept == 4 * 8 * 16 * 4


def test_a_resumed_run_has_the_cache_that_was_there() -> None:
    model = Attends(questions)
    bended = bt.BendedModule(model)
    for value in (1.0, -1.0, 0.25, -0.5, 1.0, -3.0, float("nan")):
        for rows in (64, 1, 3):
            assert_as_eager(model, bended, inputs(value), rows=rows)
            assert_as_eager(model, bended, inputs(value), rows=rows)
    assert bended.stats.resumes >= 1
    assert bended.stats.replays > 20


def nth(x: Tensor, index: int) -> Any:
    """Branch in the third layer only, when two layers have grown."""
    return x * 2 if index == 2 and x.sum() > 0 else None


@pytest.mark.parametrize("held", ["nothing", "tensors", "views", "storages"])
def test_whoever_has_what_was_there_has_it_still(held: str) -> None:
    """A resumed run puts back the very tensor, or the very memory, if somebody has it."""
    model = Attends(nth)
    for x in (inputs(-1.0), inputs()):
        bended = bt.BendedModule(model)
        called(bended, inputs(), Cache())
        called(bended, inputs(), Cache())
        mine, theirs = Cache(), Cache()
        kept = {
            "nothing": lambda t: None,
            "tensors": lambda t: t,
            "views": lambda t: t[:, :1],
            "storages": lambda t: t.untyped_storage(),
        }[held]
        before = [kept(t) for t in mine.tensors()]
        assert same(called(bended, x, mine), called(model, x, theirs))
        if held in ("tensors", "views"):
            assert all(same(b, kept(t)) for b, t in zip(before, Cache().tensors(), strict=True))


def test_what_is_put_back_is_the_tensor_that_somebody_has() -> None:
    seen: list[Any] = []

    class Looks(Attends):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            seen.append([layer.keys for layer in cache.keys])
            return super().forward(x, cache)

    bended = bt.BendedModule(Looks(nth))
    for x in (inputs(), inputs()):
        called(bended, x, Cache())
    cache = Cache()
    tensors = cache.tensors()
    seen.clear()
    called(bended, inputs(-1.0), cache)
    assert bended.stats.resumes == 1
    assert all(one is other for one, other in zip(seen[0], tensors, strict=True))


@pytest.mark.parametrize(
    "change",
    [lambda keys: keys.requires_grad_(), lambda keys: keys.to_sparse()],
    ids=["requires grad", "sparse"],
)
def test_what_cannot_be_cut_out_is_put_back_as_it_was(change: Callable[[Tensor], Tensor]) -> None:
    """A leaf that requires grad and sparse tensors: nobody has them but the cache."""

    class Looks(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Any:
            (kept,) = cache.keys
            about = kept.keys.requires_grad, kept.keys.is_leaf
            more = x.to_sparse() if kept.keys.is_sparse else x
            kept.keys = torch.cat([kept.keys, more])
            total = kept.keys.sum()
            return (total * 2 if x.sum() > 0 else total, *about)

    def given(model: Any, value: float) -> Any:
        cache = Cache(layers=1)
        cache.keys[0].keys = change(cache.keys[0].keys)
        returned, (keys,) = called(model, torch.full((8, 64, 16), value), cache)
        return returned, keys.detach().to_dense(), keys.requires_grad

    bended = bt.BendedModule(Looks())
    for value in (1.0, 1.0, -1.0, -1.0, 1.0):
        assert same(given(bended, value), given(bended.model, value))
    assert bended.stats.replays >= 2


@pytest.mark.parametrize("index", range(4))
def test_an_error_leaves_the_cache_as_eager_does(index: int) -> None:
    """Also where the layers before have grown by then."""

    class Fails(Attends):
        def forward(self, x: Tensor, cache: Cache, other: Any = None) -> Tensor:
            return super().forward(x, cache)

    model = Fails()
    bended = bt.BendedModule(model)
    called(bended, inputs(), Cache()), called(bended, inputs(), Cache())

    def cache() -> Cache:
        made = Cache()
        made.keys[index].keys = torch.randn(7, 64, 16, generator=torch.Generator())
        return made

    one, other = cache(), cache()
    one.keys[index].keys = other.keys[index].keys.clone()
    wanted, given = called(model, inputs(), one), called(bended, inputs(), other)
    assert isinstance(wanted[0], str)
    assert isinstance(given[0], str)
    assert same(given[1], wanted[1])
    assert [len(t[0]) for t in given[1]] == [65] * index + [64] * (4 - index)


def test_an_error_behind_the_exchange() -> None:
    """The keys are longer, and then what is done with them fails."""

    def ask(x: Tensor, index: int) -> Any:
        return x.new_zeros(1)[torch.tensor(1 if x.sum() > 1e3 else 0)] if index == 2 else None

    class Looks(Attends):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            x, picked = x[..., :16], x[..., 16:].long()
            for layer, kept in zip(self.layers, cache.keys, strict=True):
                keys = kept.update(layer(x))
                x = x + keys.mean(1, keepdim=True).gather(-1, picked)
            return x

    model = Looks(ask)
    bended = bt.BendedModule(model)
    good = torch.cat([inputs(), torch.zeros(8, 1, 16)], -1)
    bad = torch.cat([inputs(), torch.full((8, 1, 16), 16.0)], -1)
    for x in (good, good, bad, good, bad):
        assert same(called(bended, x, Cache()), called(model, x, Cache()))
    assert bended.stats.replays >= 2


def test_what_was_there_may_be_read_afterwards() -> None:
    """Its size, itself, or a view of it, behind questions, and in what is returned."""

    class Reads(Attends):
        def forward(self, x: Tensor, cache: Cache) -> Any:
            old = [layer.keys for layer in cache.keys[:2]]
            x = super().forward(x, cache)
            y = x * 2 if x.mean() > 0 else x
            return y + old[0].size(1) + old[1].mean(), old[1][:, :2], old[0].shape

    model = Reads(questions)
    bended = bt.BendedModule(model)
    for value in (1.0, 1.0, -1.0, 0.5, -0.5, -1.0, 1.0):
        for rows in (64, 3):
            assert_as_eager(model, bended, inputs(value), rows=rows)
    assert bended.stats.replays >= 3


class Flags(Attends):
    """LazyModule questions decide what becomes of the cache."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        asked, before = x, [layer.keys for layer in cache.keys]
        x = super().forward(x, cache)
        if asked.sum() > 0:
            cache.keys[0].keys = before[0]
        if asked.mean() > 3:
            cache.keys[1].keys = cache.keys[1].keys[:, 1:]
        if asked.mean() > 8:
            cache.keys[2].keys.mul_(2)
        return x


class Shortens(Attends):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        asked = x
        for layer in cache.keys:
            size = layer.keys.size(1)
            keys = layer.update(x)
            x = (x @ keys.transpose(-1, -2)).softmax(-1) @ keys
            if asked.mean() > 0:
                layer.keys = keys[:, -size:]
            if asked.mean() > 8:
                keys.add_(1)
        return x


class Undoes(Attends):
    """One side puts back what was there, in the first layer or in all."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        asked, before = x, [layer.keys for layer in cache.keys]
        x = super().forward(x, cache)
        if asked.sum() > 0:
            for layer, keys in zip(cache.keys, before, strict=True):
                layer.keys = keys
        return x


class ReadsLater(Attends):
    """One side reads what was there, and its size."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        asked, before = x, cache.keys[0].keys
        x = super().forward(x, cache)
        return x * before.mean() + before.shape[1] if asked.sum() > 0 else x


class ReadsTheSize(Attends):
    """Both sides do, behind a question."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        asked, before = x, cache.keys[0].keys.shape
        x = super().forward(x, cache)
        x = x * 2 if asked.sum() > 0 else x
        return x + before[1] * x.new_ones(before[1], 1, 16)[:1]


@pytest.mark.more
@pytest.mark.parametrize("make", [Flags, Shortens, Undoes, ReadsLater, ReadsTheSize])
def test_later_questions_decide_what_is_kept(make: type[Attends]) -> None:
    for ask in (lambda x, index: None, questions):
        model = make(ask)
        bended = bt.BendedModule(model)
        called(bended, inputs(-1.0), Cache(rows=3))
        torch.manual_seed(0)  # which caches do as well
        for x in torch.randn(60, 1, 1, 1) * 10 + torch.randn(60, 8, 1, 16):
            assert_as_eager(model, bended, x, rows=3)
        assert bended.stats.replays > 20


def test_tensors_that_are_one_stay_one() -> None:
    model = Attends(nth)
    for again in (inputs(), inputs(-1.0)):
        bended = bt.BendedModule(model)

        def cache(kind: str) -> Cache:
            made = Cache()
            if kind == "same":
                made.keys[1].keys = made.keys[0].keys
            if kind == "memory":
                made.keys[1].keys = made.keys[0].keys.view(8, 64, 16)
            return made

        for kind in ("", "same", "memory"):
            for x in (inputs(), inputs(), again, inputs()):
                one, other = cache(kind), cache(kind)
                assert same(called(bended, x, one), called(model, x, other))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad, torch.no_grad])
def test_modes(mode: Any) -> None:
    model = Attends(nth)
    bended = bt.BendedModule(model)
    for value in (1.0, 1.0, -1.0, 1.0, -1.0, -1.0):
        with mode():
            one, other = Cache(), Cache()
            given, wanted = bended(inputs(value), one), model(inputs(value), other)
            assert same((given, one.tensors()), (wanted, other.tensors()))
            assert given.requires_grad == wanted.requires_grad
            assert [t.is_inference() for t in one.tensors()] == [
                t.is_inference() for t in other.tensors()
            ]


def test_nothing_is_left_of_a_call() -> None:
    model = Attends(questions)
    bended = bt.BendedModule(model)
    for value in (1.0, -1.0, 1.0, -1.0):
        cache = Cache()
        called(bended, inputs(value), cache)
        gone = weakref.ref(cache.keys[0].keys)
        del cache
        assert gone() is None


class Holder(nn.Module):
    """The cache is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.past = torch.randn(8, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.past = torch.cat([self.past, x], 1)
        x = x * self.past.mean()
        return x + 1 if x.sum() > 0 else x - 1


def test_state_of_the_model() -> None:
    torch.manual_seed(0)
    one = Holder()
    other = Holder()
    other.past = one.past.clone()
    bended = bt.BendedModule(other)
    for value in (1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0):
        assert torch.equal(bended(inputs(value)), one(inputs(value)))
        assert torch.equal(other.past, one.past)


class MeanByNumpy(nn.Module):
    """A list that gets longer, of which numpy takes numbers by value."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.mean().item())
        return x * float(np.mean(self.losses[-5:]))


def test_a_list_whose_floats_python_needs_is_not_recorded_for_each_content() -> None:
    model, bended = MeanByNumpy(), bt.BendedModule(MeanByNumpy())
    own = torch.Generator().manual_seed(0)
    for _ in range(60):
        x = torch.randn(3, generator=own)
        assert torch.equal(bended(x), model(x))
    assert bended.model.losses == model.losses
    assert bended.stats.traces < 30
