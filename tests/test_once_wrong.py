"""Programs that were once silently wrong, each the smallest that showed it."""

from __future__ import annotations

import collections
import copy
import importlib
import itertools
import pickle
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.errors import NondeterminismError
from tests.promise import Inputs, assert_promise, bits, state


def calls(*arguments: Callable[[], Any]) -> list[Callable[[], Inputs]]:
    def one(make: Callable[[], Any]) -> Callable[[], Inputs]:
        def inputs() -> Inputs:
            made = make()
            return (made if isinstance(made, tuple) else (made,)), {}

        return inputs

    return [one(make) for make in arguments]


def flat(k: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.full((3, 2), k)


def turned(k: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.full((2, 3), k).t()


def test_guards_after_one_on_identity_are_kept() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous()
        z = x * 2
        return z + y if x.sum() > 0 else z - y

    order = [flat(1), turned(1), turned(-1), flat(-1), turned(1), turned(-1)]
    assert_promise(lambda: model, calls(*order, *order))
    assert_promise(lambda: model, calls(*reversed(order), *order))


def test_a_model_that_asks_whether_it_got_a_copy() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.contiguous() is x else x * 3

    assert_promise(lambda: model, calls(turned(1), flat(1), turned(2), flat(2)))


@pytest.mark.parametrize(
    "is_one",
    [lambda x, y: x is y, lambda x, y: id(x) == id(y)],
    ids=["is", "id"],
)
def test_a_model_whose_helper_asks_whether_it_got_a_copy(
    is_one: Callable[[Any, Any], bool],
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous()
        return x * 2 if is_one(x, y) else x * 3

    assert_promise(lambda: model, calls(turned(1), flat(1), turned(2), flat(2)))


class Held(nn.Module):
    """Asks whether what a tensor tells of another tensor is one that the model holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.other = torch.ones(3)
        self.view = self.other[:]
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.weight.grad if self.name == "grad" else self.view._base
        return x * 2 if found is self.other else x * 3


@pytest.mark.parametrize("name", ["grad", "base"])
@pytest.mark.parametrize("order", list(itertools.permutations(("none", "own", "other"))))
def test_a_gradient_or_base_that_the_model_holds_or_not(name: str, order: tuple[str, ...]) -> None:
    model = Held(name)
    bended = bt.BendedModule(model)
    for held in order * 2:
        found = model.other if held == "own" else torch.ones(3)
        model.weight.grad = None if held == "none" else found
        model.view = torch.ones(3) if held == "none" else found[:]
        x = torch.ones(3)
        assert torch.equal(bended(x), model(x))


def test_a_resumed_run_is_not_given_a_weight_of_another_path_as_a_size() -> None:
    class Model(nn.Module):
        """Reads a size where, along another path, it reads a weight: ops of one number."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.one = nn.Parameter(torch.ones(2) * 7)
            self.other = nn.Parameter(torch.ones(2) * 9)

        def forward(self, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            if signs[0] > 0:
                return x + self.one * self.other
            y = x * 5
            size = y.size(0)
            return y if signs[1] > 0 else y * size

    def signs(one: float, other: float) -> Callable[[], Any]:
        return lambda: (torch.ones(2), torch.tensor([one, other]))

    order = [signs(1, 1), signs(-1, 1), signs(-1, -1), signs(-1, -1)]
    assert_promise(Model, calls(*order))


def test_a_dtype_depends_on_which_operand_is_a_scalar_tensor() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y.squeeze()
        return z * 2 if z.dtype == torch.float64 else z * 3

    def pair(n: int) -> Callable[[], Any]:
        return lambda: (torch.ones(3), torch.ones(n).double())

    assert_promise(lambda: model, calls(pair(3), pair(1), pair(3), pair(1)))


def test_metadata_is_read_where_the_model_read_it_also_in_a_resumed_run() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flag = x.requires_grad
            x.mul_(self.w)
            y = x * 2 if x.sum() > 0 else x * 3
            return y * (5 if flag else 7)

    plus, minus = (lambda: torch.ones(3)), (lambda: -torch.ones(3))
    assert_promise(Model, calls(plus, minus, plus, minus))


def test_the_sign_of_an_exponent_decides_the_type() -> None:
    def model(x: torch.Tensor) -> Any:
        power = 2 ** (x.shape[0] - 2)
        return (x * 2 if isinstance(power, int) else x * 3), power

    assert_promise(lambda: model, calls(*(lambda n=n: torch.ones(n) for n in (3, 1, 3, 1))))


def test_no_grad_inside_autocast_keeps_its_cache_of_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
                with torch.no_grad():
                    z = self.fc(x) * 2
                return self.fc(y + z).float().sum()

    torch.manual_seed(0)
    eager = Model()
    model = copy.deepcopy(eager)
    bended, x = bt.BendedModule(model), torch.randn(4, 8)
    for _ in range(3):
        eager(x).backward()
        bended(x).backward()
    assert bended.stats.replays == 2
    assert torch.equal(eager.fc.weight.grad, model.fc.weight.grad)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 2


square = _Square.apply  # bound before any run: the common way to write it


def test_an_autograd_function_bound_before_the_run_keeps_its_gradient() -> None:
    bended = bt.BendedModule(lambda x: square(x).sum())
    for _ in range(3):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        bended(x).backward()
        assert torch.equal(x.grad, torch.tensor([2.0, 4.0]))


class _Counts(nn.Module):
    """Keeps something between calls; `kind` says what and how."""

    shared = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.queue: deque[float] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.order = OrderedDict(a=1, b=2)
        self.large = [0] * 600
        if kind == "iterator":
            self.steps = iter(range(1, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "deque":
            self.queue.append(float(x.sum()))
            return x * len(self.queue)
        if self.kind == "set":
            self.seen.add(x.shape[0] + len(self.seen))
            return x * len(self.seen)
        if self.kind == "order":
            self.order.move_to_end(next(iter(self.order)))
            return x * next(iter(self.order.values()))
        if self.kind == "large":
            self.large[5] += 1
            return x * self.large[5]
        if self.kind == "iterator":
            return x * next(self.steps)
        if self.kind == "class":
            type(self).shared += 1
            return x * type(self).shared
        raise AssertionError(self.kind)


@pytest.mark.parametrize("kind", ["deque", "set", "order", "large", "iterator", "class"])
def test_what_a_model_keeps_between_calls(kind: str) -> None:
    x = torch.ones(2)
    _Counts.shared = 0
    eager = _Counts(kind)
    wanted = [eager(x) for _ in range(7)]
    _Counts.shared = 0
    bended = bt.BendedModule(_Counts(kind))
    assert [bits(bended(x)) for _ in range(7)] == [bits(value) for value in wanted]


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = x.shape[0]
        self.last = x
        return torch.zeros(3) + x


def test_what_was_assigned_before_an_error_stays_assigned() -> None:
    good, bad = (lambda: torch.ones(3)), (lambda: torch.ones(4))
    bended = assert_promise(_Fails, calls(good, bad, good, bad, good))
    assert bended.stats.replays >= 1
    model = _Fails()
    with pytest.raises(RuntimeError):
        bt.trace(model, torch.ones(4))
    assert type(model.n) is int
    assert state(model) is not None


def test_one_container_in_two_places_of_the_output_is_one_container() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            both = [x + 1]
            pair = (both, both)
            self.last = both
            return pair, pair

    ones = [lambda: torch.ones(2)] * 3
    bended = bt.BendedModule(Model())
    for inputs in calls(*ones):
        first, second = bended(*inputs()[0])
        assert first is second
        assert first[0] is first[1]
        assert bended.model.last is first[0]


def test_one_list_as_two_arguments_is_not_two_lists() -> None:
    def model(a: list[int], b: list[int], x: torch.Tensor) -> torch.Tensor:
        a.append(1)
        return x * len(b)

    def same() -> Any:
        one = [1]
        return one, one, torch.ones(1)

    assert_promise(lambda: model, calls(lambda: ([1], [1], torch.ones(1)), same) * 2)


def test_a_helper_that_asks_for_the_exact_type_of_an_argument() -> None:
    bended = bt.BendedModule(_scaled)
    for n in (2, 2.5, 2, 3):
        assert torch.equal(bended(torch.ones(2), n), _scaled(torch.ones(2), n))


def _is_int(n: Any) -> bool:
    return type(n) is int


def _scaled(x: torch.Tensor, n: float) -> torch.Tensor:
    return x * 2 if _is_int(n) else x * -1


def test_an_error_that_a_finally_block_drops() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x
        try:
            z = x + y
        finally:
            return z * 2  # noqa: B012 - that is the point

    short, long = (lambda: (torch.ones(3), torch.ones(3))), (lambda: (torch.ones(3), torch.ones(2)))
    assert_promise(lambda: model, calls(short, long, short, long))


def test_keywords_as_names_of_keyword_arguments() -> None:
    bended = bt.BendedModule(lambda x: x.random_(**{"from": 1, "to": 5}))
    for _ in range(3):
        torch.manual_seed(1)
        wanted = torch.ones(4).random_(1, 5)
        torch.manual_seed(1)
        assert torch.equal(bended(torch.ones(4)), wanted)


def test_a_copy_of_a_bended_module_is_on_its_own() -> None:
    bended = bt.BendedModule(nn.BatchNorm1d(2).eval())
    x = torch.ones(3, 2)
    bended(x)
    twin = copy.deepcopy(bended)
    twin.model.running_mean.fill_(7.0)
    assert torch.equal(twin(x), twin.model(x))
    assert not torch.equal(twin(x), bended(x))
    again = pickle.loads(pickle.dumps(bended))
    assert torch.equal(again(x), bended(x))


def test_a_gradient_that_is_there_or_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.w.grad is not None:
                self.w.grad.zero_()
            (self.w * x).sum().backward()
            return self.w.grad * 2

    assert_promise(Model, calls(*[lambda: torch.ones(3)] * 4))


def test_a_resumed_run_that_goes_another_way_is_an_error_also_if_the_model_catches_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        way = 2 if torch.jit.onednn_fusion_enabled() else 1  # a setting that is not guarded
        try:
            y = x + 1 if way == 1 else x * 5
        except Exception:
            y = x
        return y * 2 if y.sum() > 0 else y

    bended = bt.BendedModule(model)
    bended(torch.ones(2))
    bended(torch.ones(2))  # a replay: asks nobody
    torch.jit.enable_onednn_fusion(True)
    try:
        with pytest.raises(NondeterminismError, match="with all guards equal"):
            bended(-3 * torch.ones(2))
    finally:
        torch.jit.enable_onednn_fusion(False)


def test_a_view_that_torch_refuses_to_talk_about() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = x.view(-1)
        y = y + 1
        x.copy_(y)
        with torch.no_grad():
            view.add_(1)  # its base was changed under grad mode: its graph is undefined
        return y * 2

    def both() -> Any:
        return torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)

    assert_promise(lambda: model, calls(both, both, both))


def test_a_long_list_that_the_model_sorts_is_guarded_as_it_was() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        values = x.tolist()
        first = values[0]
        values.sort()
        return x * first

    up, down = (lambda: torch.arange(300.0)), (lambda: torch.arange(300.0).flip(0))
    assert_promise(lambda: model, calls(down, up, down, up))


def test_an_op_that_once_raised_is_carried_out_once_when_it_does_not() -> None:
    class Tries(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            try:
                x.add_(y)
            except RuntimeError:
                return x * 3
            return x * 2

    def inputs(n: int) -> Inputs:
        return (torch.ones(2, 3), torch.ones(n)), {}

    calls = [lambda n=n: inputs(n) for n in (2, 3, 2, 3, 3, 2)]
    assert assert_promise(Tries, calls).stats.replays == 4


def test_the_text_of_a_caught_error_is_part_of_the_path() -> None:
    def says(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, str]:
        try:
            return x + y, ""
        except RuntimeError as error:
            return x, str(error)

    def inputs(n: int) -> Inputs:
        return (torch.ones(2, 3), torch.ones(n)), {}

    calls = [lambda n=n: inputs(n) for n in (2, 4, 2, 4, 3, 3)]
    assert assert_promise(lambda: says, calls).stats.replays == 3


@pytest.mark.parametrize("base", [dict, collections.OrderedDict])
def test_an_item_and_an_attribute_of_one_name(base: type) -> None:
    class Output(base):  # type: ignore[misc, valid-type]
        pass

    def made(item: Any, attribute: Any) -> tuple[torch.Tensor, Any]:
        output = Output(a=item)
        output.a = attribute
        return torch.ones(2), output

    def model(x: torch.Tensor, output: Any) -> torch.Tensor:
        y = x * output["a"] + output.a
        output["a"] = y
        output.a = output.a * 2
        return y

    values = [(1.0, 1.0), (2.0, 1.0), (2.0, 5.0), (2.0, 5.0)]
    for kind in (float, torch.tensor):
        bended = bt.BendedModule(model)
        for item, attribute in values:
            (x, wanted), (_, found) = (made(kind(item), kind(attribute)) for _ in range(2))
            assert torch.equal(bended(x, found), model(x, wanted))
            assert torch.equal(found["a"], wanted["a"])
            assert found.a == wanted.a
        assert bended.stats.replays > 0


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
