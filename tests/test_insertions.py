"""Insertions: one mechanism, in every kind of run."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import InputError, InterjectionError, NodePathError
from bendtrace.log.mirror import NodeRef
from tests.promise import bits


class Watch(bt.Interjection):
    """Notes where it is called, and keeps every value."""

    observes = True
    wants_inputs = True

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        self.seen.append((at.path, at.number))


class Branching(nn.Module):
    """Linear, a branch on the values, a loop until they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.big = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.norm() > 3:
            x = torch.sigmoid(self.big(x))
        while x.sum() > 1:
            x = torch.tanh(x) * 0.5
        return x


SMALL, LARGE = torch.zeros(2, 3), torch.full((2, 3), 50.0)


def branching() -> Branching:
    torch.manual_seed(3)
    model = Branching()
    nn.init.constant_(model.a.weight, 0.4)
    nn.init.constant_(model.a.bias, 0.0)
    nn.init.constant_(model.big.weight, 0.3)
    return model


def by_hand(
    model: Branching,
    x: Tensor,
    sigmoid: Callable[[Tensor], Tensor] = lambda v: v,
    tanh: Callable[[Tensor, int], Tensor] = lambda v, number: v,
    big: Callable[[Tensor], Tensor] = lambda v: v,
) -> Tensor:
    x = model.a(x)
    if x.norm() > 3:
        x = sigmoid(torch.sigmoid(big(model.big(x))))
    number = 0
    while x.sum() > 1:
        x = tanh(torch.tanh(x), number) * 0.5
        number += 1
    return x


def assert_same(given: Any, wanted: Any) -> None:
    assert bits(given) == bits(wanted)


# Every run


def test_a_changed_value_is_the_same_recorded_and_replayed() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    wanted = by_hand(model, LARGE, sigmoid=lambda v: v * 0.5)
    bended(LARGE)
    with bended.interject("sigmoid", lambda v: v * 0.5):
        before = bended.stats.replays
        for _ in range(3):
            assert_same(bended(LARGE), wanted)
        assert bended.stats.replays == before + 3
    assert_same(bended(LARGE), by_hand(model, LARGE))


def test_a_change_that_takes_another_branch_retraces_and_is_replayed_afterwards() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    bended(SMALL)
    assert "sigmoid" not in list(bended.traces[0].tree)
    with bended.interject("a", lambda v: v + 100) as handle:
        wanted = by_hand_shifted(model, SMALL)
        for _ in range(3):
            assert_same(bended(SMALL), wanted)
    assert handle.report().changed
    assert bended.stats.live == 0


def by_hand_shifted(model: Branching, x: Tensor) -> Tensor:
    twin = copy.deepcopy(model)
    twin.a.register_forward_hook(lambda module, args, output: output + 100)
    result: Tensor = twin(x)
    return result


def test_an_insertion_holds_on_a_path_that_was_never_traced_before() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    with bended.interject(model.big, lambda v: v - 1) as handle:
        bended(SMALL)
        assert not handle.report().rows
        wanted = by_hand(model, LARGE, big=lambda v: v - 1)
        assert_same(bended(LARGE), wanted)
        assert_same(bended(LARGE), wanted)
    assert handle.report().paths == ("big",)


def test_a_resumed_run_does_not_call_an_interjection_twice() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    watch = Watch()
    with bended.interject("a", watch):
        bended(SMALL)
        before = bended.stats.resumes
        bended(LARGE)
    assert bended.stats.resumes == before + 1
    assert watch.seen == [("a", 0), ("a", 0)]


def test_a_model_that_has_to_run_live_calls_interjections_in_every_call() -> None:
    class Live(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() + torch.tensor([*x.numpy().flat])

    bended = bt.BendedModule(Live())
    x = torch.tensor([-1.0, 2.0])
    with bended.interject("relu", lambda v: v + 1) as handle:
        for _ in range(3):
            assert_same(bended(x), x.relu() + 1 + x)
    assert bended.stats.live == 3
    assert handle.report().fired == 3


def test_traces_with_other_insertions_never_mix() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.tensor([-1.0, 2.0])
    for _ in range(2):
        assert_same(bended(x), x.relu().sin())
        with bended.interject("relu", lambda v: v + 1):
            assert_same(bended(x), (x.relu() + 1).sin())
            with bended.interject("sin", lambda v: v * 2):
                assert_same(bended(x), (x.relu() + 1).sin() * 2)
        with bended.interject("sin", lambda v: v * 3):
            assert_same(bended(x), x.relu().sin() * 3)


def test_another_interjection_at_the_same_place_goes_along_the_same_trace() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.tensor([-1.0, 2.0])
    for factor in (2.0, 3.0, 4.0):
        with bended.interject("relu", lambda v, factor=factor: v * factor):
            assert_same(bended(x), (x.relu() * factor).sin())
    assert bended.stats.replays == 2


def test_a_changed_shape_is_part_of_the_trace() -> None:
    bended = bt.BendedModule(lambda x: x.relu().reshape(-1) * x.shape[0])
    x = torch.randn(4, 3)
    with bended.interject("relu", lambda v: v[:2]):
        for _ in range(2):
            assert_same(bended(x), x.relu()[:2].reshape(-1) * 4)
        assert bended.stats.replays == 1
    with bended.interject("relu", lambda v: v[:1]):  # the same place, another shape
        assert_same(bended(x), x.relu()[:1].reshape(-1) * 4)


def test_a_shape_that_python_reads_after_an_insertion_is_looked_at_in_each_replay() -> None:
    def summed(x: Tensor) -> Tensor:
        y = x.relu()
        total = y[0]
        for i in range(1, y.shape[0]):
            total = total + y[i]
        return total

    bended = bt.BendedModule(summed)
    x = torch.randn(4, 3)
    rows = [2]
    with bended.interject("relu", lambda v: v[: rows[0]]):
        for count in (2, 3, 2, 1, 3):
            rows[0] = count
            wanted = x.relu()[0]
            for i in range(1, count):
                wanted = wanted + x.relu()[i]
            assert_same(bended(x), wanted)
    assert bended.stats.replays == 2


def test_several_insertions_at_a_node_are_called_in_the_order_in_which_they_were_made() -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    x = torch.tensor([-1.0, 2.0])
    with bended.interject("relu", lambda v: v + 1), bended.interject("relu", lambda v: v * 10):
        for _ in range(2):
            assert_same(bended(x), (x.relu() + 1) * 10)
    with bended.interject("relu", lambda v: v * 10), bended.interject("relu", lambda v: v + 1):
        for _ in range(2):
            assert_same(bended(x), x.relu() * 10 + 1)


def test_what_is_called_before_a_node_nests_around_it() -> None:
    calls = []

    class Around(bt.Interjection):
        def __init__(self, name: str) -> None:
            self.name = name

        def before(self, at: bt.NodePass, inputs: bt.Inputs) -> None:
            calls.append(f"before {self.name}")

        def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
            calls.append(f"after {self.name}")

    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2)))
    for name in ("first", "second"):
        bended.interject(bended[0], Around(name))
    for _ in range(2):
        calls.clear()
        bended(torch.ones(1, 2))
        assert calls == ["before second", "before first", "after first", "after second"]


def test_removing_one_insertion_leaves_the_others_whatever_the_order() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.tensor([-1.0, 2.0])
    first = bended.interject("relu", lambda v: v + 1)
    second = bended.interject("sin", lambda v: v * 2)
    assert bended.insertions == (first, second)
    first.remove()
    first.remove()
    assert not first.active
    assert_same(bended(x), x.relu().sin() * 2)
    second.remove()
    assert_same(bended(x), x.relu().sin())
    assert bended.insertions == ()


# Where


def test_every_way_of_saying_where_means_the_same_node() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    bended = bt.BendedModule(model)
    x = torch.randn(3, 2)
    trace = bended.trace(x)
    log = bt.trace(bended, x)
    wanted = model(x) + 1
    ways: list[Any] = [
        "sub_1", "1", model[1], nn.ReLU, re.compile(r"^sub_1$"), bt.node_selector.Activations.ReLU,
        lambda node: node.path == "sub_1", trace.tree.sub_1, ["sub_1"],
    ]  # fmt: skip
    for where in ways:
        with bended.interject(where, lambda v: v + 1) as handle:
            assert_same(bended(x), wanted)
        assert handle.report().paths == ("sub_1",), where
    for where in ("relu_1", NodeRef("relu"), "sub_1.relu", log["relu_1"], trace.tree.sub_1.relu):
        with bended.interject(where, lambda v: v + 1) as handle:
            assert_same(bended(x), wanted)
        assert handle.report().paths == ("sub_1.relu",), where


def test_inputs_outputs_parts_and_parameters_are_places() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
            y = self.fc(x)
            return {"y": y * scale, "pair": (y, x.max(0).values)}

    model = Two()
    bended = bt.BendedModule(model)
    x, scale = torch.randn(3, 2), torch.tensor(2.0)
    weight = model.fc.weight.detach().clone()

    def run(**changes: Any) -> Any:
        with_x = changes.get("x", lambda v: v)(x)
        given = changes.get("input", lambda v: v)(with_x)
        w = changes.get("weight", lambda v: v)(model.fc.weight)
        y = F.linear(given, w, model.fc.bias)
        values = changes.get("values", lambda v: v)(with_x.max(0).values)
        out = y * changes.get("scale", lambda v: v)(scale)
        out = changes.get("y", lambda v: v)(out)
        return {"y": out, "pair": (y, values)}

    bended(x, scale=scale)
    places = {
        "x": "x", "scale": "scale", "fc.input": "input", "fc.weight": "weight",
        "output|y": "y", "max.values": "values", "output|pair.sub_1": "values",
    }  # fmt: skip
    for where, name in places.items():
        with bended.interject(where, lambda v: v * 3) as handle:
            for _ in range(2):
                given = bended(x, scale=scale)
                wanted = run(**{name: lambda v: v * 3})
                if where == "max.values":
                    wanted["pair"] = (wanted["pair"][0], wanted["pair"][1])
                assert_same(given, wanted)
        assert handle.report().fired == 2, where
    assert_same(model.fc.weight.detach(), weight)


def test_a_parameter_of_a_module_that_is_called_at_two_places_can_be_exchanged_at_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.fc(x + 1)

    model = Twice()
    bended = bt.BendedModule(model)
    x = torch.randn(3, 2)
    one, two = model(x)
    bended(x)
    other = F.linear(x + 1, model.fc.weight * 2, model.fc.bias)
    with bended.interject("fc_1.weight", lambda w: w * 2):
        for _ in range(2):
            assert_same(bended(x), (one, other))
    with bended.interject(bended.trace(x).tree.fc.weight, lambda w: w * 2):
        assert_same(bended(x)[1], two)
    both = F.linear(x, model.fc.weight * 2, model.fc.bias), other
    with bended.interject("fc.weight", lambda w: w * 2):  # the parameter, wherever it is used
        for _ in range(2):
            assert_same(bended(x), both)


def test_tied_parameters_are_told_apart_by_the_module_that_uses_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.outer = nn.Linear(2, 2, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.sin(self.inner(x)))

    model = Tied()
    bended = bt.BendedModule(model)
    x, w = torch.randn(3, 2), model.inner.weight
    bended(x)
    tree = bended.trace(x).tree
    with bended.interject(tree.outer.weight, lambda v: v * 2):
        for _ in range(2):
            assert_same(bended(x), F.linear(torch.sin(F.linear(x, w)), w * 2))
    with bended.interject(tree.inner.weight, lambda v: v * 2):
        for _ in range(2):
            assert_same(bended(x), F.linear(torch.sin(F.linear(x, w * 2)), w))
    for name in ("inner.weight", "outer.weight"):  # of the state dict: wherever it is used
        with bended.interject(name, lambda v: v * 2):
            for _ in range(2):
                assert_same(bended(x), F.linear(torch.sin(F.linear(x, w * 2)), w * 2))


def test_a_parameter_is_handed_out_as_a_copy() -> None:
    model = nn.Linear(2, 2)
    bended = bt.BendedModule(model)
    x, weight = torch.randn(3, 2), model.weight.detach().clone()
    wanted = F.linear(x, model.weight * 2, model.bias)
    bended(x)
    with bended.interject("weight", lambda w: w.mul_(2)):
        for _ in range(2):
            given = bended(x)
            assert_same(given.detach(), wanted.detach())
    assert_same(model.weight.detach(), weight)
    given.sum().backward()
    (gradient,) = torch.autograd.grad(wanted.sum(), model.weight)
    assert_same(model.weight.grad, gradient)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("sigmoyd", "did you mean 'sigmoid'"),
        ("big.lin", "did you mean 'linear'"),
        (re.compile("conv"), "/conv/ selects no known node; there are 'a', "),
        (nn.Conv1d, "Conv1d selects no known node"),
        (lambda node: False, "selects no known node"),
        (bt.node_selector.Activations.GELU, "selects no known node"),
    ],
)
def test_what_means_nothing_is_an_error_that_shows_near_misses(where: Any, message: str) -> None:
    bended = bt.BendedModule(branching())
    bended(LARGE)
    with pytest.raises(NodePathError, match=re.escape(message)):
        bended.interject(where, lambda v: v)
    assert bended.insertions == ()
    with bended.interject(where, lambda v: v * 0, allow_none=True):
        assert_same(bended(LARGE), by_hand(branching(), LARGE))


def test_a_name_under_a_branch_not_taken_is_said_to_be_perhaps_there() -> None:
    bended = bt.BendedModule(branching())
    bended(SMALL)
    with pytest.raises(NodePathError, match=r"test_insertions.py:\d+ `x.norm\(\) > 3`"):
        bended.interject("sigmoid", lambda v: v)


def test_a_name_behind_a_branch_that_leaves_is_said_to_be_perhaps_there() -> None:
    def leaving(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.relu()
        y = x.exp()
        return y.tanh()

    bended = bt.BendedModule(leaving)
    bended(torch.ones(2))
    for name in ("exp", "tanh"):
        with pytest.raises(NodePathError, match=r"test_insertions.py:\d+ `x.sum\(\) > 0`"):
            bended.interject(name, lambda v: v)
    with pytest.raises(NodePathError) as caught:
        bended.interject("sinh", lambda v: v)
    assert "branch" not in str(caught.value)


def test_a_wrong_name_is_answered_by_what_all_runs_have() -> None:
    bended = bt.BendedModule(lambda x: x.exp() if x.sum() > 0 else x.tanh())
    bended(torch.ones(2))
    bended(-torch.ones(2))
    for wrong, right, other in (("exb", "exp", "tanh"), ("tahn", "tanh", "exp")):
        with pytest.raises(NodePathError, match=f"did you mean '{right}'") as caught:
            bended.interject(wrong, lambda v: v)
        assert f"in other runs there is '{other}'" in str(caught.value)
        assert {right, other} < set(caught.value.completions)


def test_a_name_is_looked_for_in_the_first_call() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    bended = bt.BendedModule(model)
    handle = bended.interject("batch_norn", lambda v: v)
    state = torch.get_rng_state()
    with pytest.raises(NodePathError, match="no node 'batch_norn'"):
        bended(torch.randn(4, 2))
    assert bended.stats.traces == 0
    assert handle.targets[0].place is None
    handle.remove()
    torch.set_rng_state(state)
    x = torch.randn(4, 2)
    rng = torch.get_rng_state()
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    bended = bt.BendedModule(model)
    with bended.interject("sub_0.batch_norm", lambda v: v + 1):
        given = bended(x)
    torch.set_rng_state(rng)
    twin = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    assert_same(given, twin[1](twin[0](x) + 1))
    assert model[0].num_batches_tracked == 1
    assert_same(model[0].running_mean, twin[0].running_mean)


@pytest.mark.parametrize(
    ("where", "what", "message"),
    [
        (3, lambda v: v, "where= takes a node path"),
        ([], lambda v: v, "where= is empty"),
        (int, lambda v: v, "of modules"),
        (nn.ReLU(), lambda v: v, "is not a submodule of the model: pass"),
        ("a", 3, "only an interjection"),
        ("a", nn.ReLU, "only an interjection"),
        ("a", bt.Interjection(), "overrides none of"),
        ("norm", lambda v: v, None),
        ("bool", lambda v: v, "a Python number, which cannot be replaced; choose"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(
    where: Any, what: Any, message: str | None
) -> None:
    bended = bt.BendedModule(branching())
    bended(SMALL)
    if message is None:
        bended.interject(where, what).remove()
        return
    with pytest.raises(bt.BendtraceError, match=re.escape(message)):
        bended.interject(where, what)
    assert bended.insertions == ()


def test_what_works_around_a_node_cannot_be_put_at_a_value() -> None:
    class Before(bt.Interjection):
        def before(self, at: bt.NodePass, inputs: bt.Inputs) -> None:
            pass

    bended = bt.BendedModule(nn.Linear(2, 2))
    bended(torch.ones(1, 2))
    for where, word in (("weight", "a parameter or buffer"), ("input", "an input")):
        with pytest.raises(InputError, match=word):
            bended.interject(where, Before())


# Passes


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, [0, 1, 2, 3]),
        ({"passes": 0}, [0]),
        ({"passes": [0, -1]}, [0, 3]),
        ({"passes": [-2]}, [2]),
        ({"passes": range(1, 3)}, [1, 2]),
        ({"passes": lambda number: number > 1}, [2, 3]),
        ({"every": 2}, [0, 2]),
        ({"passes": lambda number: number > 0, "every": 2}, [2]),
    ],
)
def test_passes_say_in_which_executions_an_insertion_is_called(
    options: dict[str, Any], counts: list[int]
) -> None:
    def looped(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.sin(x) + 1
        return x

    bended = bt.BendedModule(looped)
    x = torch.randn(3)
    wanted = x
    for number in range(4):
        y = torch.sin(wanted)
        wanted = (y * 2 if number in counts else y) + 1
    if options.get("passes") in ([0, -1], [-2]):  # the number of all passes is known after a call
        bended(x)
    with bended.interject("sin", lambda v: v * 2, **options) as handle:
        for _ in range(2):
            assert_same(bended(x), wanted)
    assert list(handle.report().rows[0].passes) == counts


def test_a_pass_can_be_named_in_the_path() -> None:
    bended = bt.BendedModule(lambda x: [torch.sin(x * i) for i in range(3)])
    x = torch.randn(3)
    bended(x)
    with bended.interject("sin:2", lambda v: v + 1):
        for _ in range(2):
            assert_same(bended(x), [torch.sin(x * 0), torch.sin(x) + 1, torch.sin(x * 2)])
    with pytest.raises(InputError, match="names passes"):
        bended.interject("sin:2", lambda v: v, passes=[0])


def test_the_last_pass_is_that_of_the_run_without_the_insertion() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    total = 0

    def count(v: Tensor, number: int) -> Tensor:
        nonlocal total
        total = number + 1
        return v

    by_hand(model, LARGE, tanh=count)
    assert total > 1
    wanted = by_hand(model, LARGE, tanh=lambda v, number: v * 0 if number == total - 1 else v)
    bended(LARGE)
    with bended.interject("tanh", lambda v: v * 0, passes=[-1]) as handle:
        for _ in range(2):
            assert_same(bended(LARGE), wanted)
    assert handle.report().rows[0].passes == {total - 1: 2}


@pytest.mark.parametrize("passes", ["last", 1.5, [True], [None]])
def test_passes_that_are_no_numbers_are_refused(passes: Any) -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    with pytest.raises(InputError, match="passes="):
        bended.interject("relu", lambda v: v, passes=passes)
    with pytest.raises(InputError, match="every="):
        bended.interject("relu", lambda v: v, every=0)


# Looking ahead


def test_a_selector_that_looks_ahead_is_decided_by_a_run_without_insertions() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.norm(x), 0.5)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model, twin = Drops(), Drops()
    twin.load_state_dict(model.state_dict())
    twin.layers[2].register_forward_hook(lambda module, args, output: output * 2)
    bended = bt.BendedModule(model)
    x = torch.randn(4, 3)
    bended(x)
    twin(x)
    bended.interject(bt.node_selector.last(nn.Linear), lambda v: v * 2)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = twin(x)
        torch.manual_seed(seed)
        assert_same(bended(x), wanted)
    assert_same(model.state_dict(), twin.state_dict())
    assert bended.insertions[0].report().paths == ("layers_2",)


def test_what_depends_on_the_whole_run_needs_a_known_one() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() < 3:
            x = torch.sin(x) + 1
        return x

    for where, options in [("sin", {"passes": [-1]}), (bt.node_selector.last(torch.sin), {})]:
        bended = bt.BendedModule(model)
        handle = bended.interject(where, lambda v: v * 1.5, **options)
        for _ in range(2):
            with pytest.raises(InputError, match="call the model once before you insert it"):
                bended(torch.zeros(2))
        assert bended.stats.traces == 0
        handle.remove()
        bended(torch.zeros(2))
        with bended.interject(where, lambda v: v * 0 + 5, **options):
            assert_same(bended(torch.zeros(2)), torch.full((2,), 6.0))
            with pytest.raises(InputError, match="call the model once before you insert it"):
                bended(torch.full((2,), 9.0))  # by a way that is not known


def test_looking_ahead_draws_no_random_numbers_and_runs_no_code_of_the_model() -> None:
    calls: list[int] = []

    def model(x: Tensor) -> Tensor:
        calls.append(1)
        x = x + torch.rand(())
        return torch.sin(x) if x.sum() > 0 else x

    bended = bt.BendedModule(model)
    bended(torch.ones(2))
    state = torch.get_rng_state()
    bended.interject("sin", lambda v: v * 2, passes=[-1])
    with pytest.raises(InputError, match="call the model once before you insert it"):
        bended(torch.ones(2))  # which way it takes depends on what is drawn
    assert len(calls) == 1
    assert_same(torch.get_rng_state(), state)


# Reports


def test_a_report_says_where_how_often_and_whether_anything_changed() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.tensor([1.0, 2.0])
    handle = bended.interject("relu", lambda v: v * 1.0)
    assert handle.report().notes == ("no call was made",)
    bended(x)
    report = handle.report()
    assert (report.fired, report.changed, report.paths) == (1, False, ("relu",))
    assert str(report) == "function at 'relu': called once at 1 node\n  relu: once, no change"
    handle.remove()
    other = bended.interject("sin", lambda v: v * 2)
    bended(x)
    bended(x)
    assert other.report().to_dict() == {
        "label": "function", "where": "'sin'", "fired": 2, "notes": [],
        "nodes": [{"path": "sin", "passes": {"0": 2}, "changed": 2, "backward": 0}],
    }  # fmt: skip
    other.clear_report()
    assert other.report().fired == 0


def test_values_that_are_not_numbers_count_as_unchanged_if_they_stay_so() -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    with bended.interject("relu", lambda v: v.clone()) as handle:
        bended(torch.tensor([float("nan"), 1.0]))
    assert not handle.report().changed


def test_a_value_that_is_written_into_counts_as_changed() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    x = torch.tensor([1.0, 2.0])

    def add(value: Tensor) -> None:
        value.add_(1)

    with bended.interject("relu", add) as handle:
        for _ in range(2):
            assert_same(bended(x), (x + 1) * 2)
    assert handle.report().changed


def test_an_insertion_that_never_fired_warns_and_names_the_branch() -> None:
    model = branching()
    bended = bt.BendedModule(model)
    bended(LARGE)
    with (
        pytest.warns(
            bt.errors.NeverFiredWarning,
            match=r"branch at test_insertions.py:\d+ `x.norm\(\) > 3` was not taken for this input",
        ) as caught,
        bended.interject("sigmoid", lambda v: v),
    ):
        bended(SMALL)
    assert caught[0].filename == __file__


class Staged(nn.Module):
    """A loop of so many rounds, and two branches, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.high, self.low = (nn.Linear(2, 2, bias=False) for _ in range(3))
        for linear in (self.cell, self.high, self.low):
            nn.init.eye_(linear.weight)

    def forward(self, x: Tensor, rounds: Tensor) -> Tensor:
        for _ in range(rounds.item()):
            x = self.cell(x)
        if x[0] > 5:
            x = x * 2
        if x[1] > 5:
            return self.high(x).tanh()
        return self.low(x).exp()


@pytest.mark.parametrize("where", ["high", "high.linear", "tanh", re.compile("^high$"), "high$"])
def test_the_branch_that_is_named_is_the_one_that_the_node_is_under(where: Any) -> None:
    """Not that at which the run first differs from those that came by the node."""
    bended = bt.BendedModule(Staged())
    bended(torch.tensor([9.0, 9.0]), torch.tensor(3))
    bended(torch.tensor([1.0, 1.0]), torch.tensor(2))
    if where == "high$":
        inserted: Any = bended.bend(bt.bends.Scale(2.0), where)
    else:
        inserted = bended.interject(where, torch.zeros_like)
    bended(torch.tensor([1.0, 1.0]), torch.tensor(5))
    (note,) = inserted.report().notes
    assert re.fullmatch(
        r"branch at test_insertions.py:\d+ `x\[1\] > 5` was not taken for this input", note
    )


def test_a_branch_that_was_taken_and_left_is_named_for_what_follows_it() -> None:
    bended = bt.BendedModule(Staged())
    bended(torch.tensor([1.0, 1.0]), torch.tensor(1))
    handle = bended.interject("exp", torch.zeros_like)
    bended(torch.tensor([9.0, 9.0]), torch.tensor(2))
    (note,) = handle.report().notes
    assert re.search(r"`x\[1\] > 5` was taken for this input$", note)


def test_a_loop_that_ended_earlier_is_named() -> None:
    bended = bt.BendedModule(Staged())
    bended(torch.tensor([1.0, 1.0]), torch.tensor(2))
    handle = bended.interject("cell", torch.zeros_like)
    bended(torch.tensor([1.0, 1.0]), torch.tensor(0))
    (note,) = handle.report().notes
    assert re.search(r"`(range\()?rounds.item\(\)\)?` was 0 for this input$", note)


def test_of_a_module_that_no_run_came_by_it_is_said_where_it_may_be() -> None:
    model = Staged()
    bended = bt.BendedModule(model)
    for where in (model.high, "high", "high.weight"):
        handle = bended.interject(where, torch.zeros_like)
        bended(torch.tensor([1.0, 1.0]), torch.tensor(1))
        (note,) = handle.report().notes
        assert re.match(r"it may be in a branch that no run has taken: .*`x\[1\] > 5`", note)
        handle.remove()


def test_of_a_parameter_it_is_said_why_its_module_was_not_called() -> None:
    bended = bt.BendedModule(Staged())
    bended(torch.tensor([9.0, 9.0]), torch.tensor(1))
    handle = bended.interject("high.weight", torch.zeros_like)
    bended(torch.tensor([1.0, 1.0]), torch.tensor(1))
    (note,) = handle.report().notes
    assert re.search(r"`x\[1\] > 5` was not taken for this input$", note)


def test_a_report_says_if_only_the_passes_or_the_backward_pass_were_missing() -> None:
    class Told(bt.Interjection):
        def backward(self, at: bt.NodePass, grad_input: Any, grad_output: Any) -> None: ...

    bended = bt.BendedModule(lambda x: x.relu())
    x = torch.ones(2, requires_grad=True)
    late = bended.interject("relu", torch.zeros_like, passes=1)
    told = bended.interject("relu", Told())
    out = bended(x)
    assert late.report().notes == (
        "'relu' had one pass, none of which is selected (passes [1], from 0)",
    )
    assert told.report().notes == ("no backward pass reached 'relu'",)
    out.sum().backward()
    assert told.report().notes == ()
    assert told.report().rows[0].backward == 1


def test_what_stands_instead_counts_as_a_change_only_if_it_is_one() -> None:
    class Same(bt.Interjection):
        def instead(self, at: bt.NodePass, call: Any, inputs: bt.Inputs) -> Any:
            return call(*inputs, **inputs.kwargs)

    class OfMore(bt.Interjection):
        def instead(self, at: bt.NodePass, call: Any, inputs: bt.Inputs) -> Any:
            return call(inputs[0] * 2, **inputs.kwargs)

    class Written(bt.Interjection):
        def instead(self, at: bt.NodePass, call: Any, inputs: bt.Inputs) -> Any:
            return call(*inputs, **inputs.kwargs).mul_(2)

    class WrittenBefore(bt.Interjection):
        def instead(self, at: bt.NodePass, call: Any, inputs: bt.Inputs) -> Any:
            inputs[0].add_(1)
            return call(*inputs, **inputs.kwargs)

    class Without(bt.Interjection):
        def instead(self, at: bt.NodePass, call: Any, inputs: bt.Inputs) -> Any:
            return torch.zeros(2)

    bended = bt.BendedModule(lambda x: torch.softmax(x.relu(), dim=-1))
    for kind, changes in (
        (Same, False), (OfMore, True), (Written, True), (WrittenBefore, True), (Without, True)
    ):  # fmt: skip
        with bended.interject("softmax", kind()) as handle:
            for _ in range(2):
                bended(torch.tensor([1.0, 2.0]))
        assert (kind, handle.report().changed) == (kind, changes)
        assert handle.report().fired == 2


def test_there_is_no_warning_without_a_call_nor_where_the_block_raises() -> None:
    bended = bt.BendedModule(branching())
    bended(LARGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bended.interject("sigmoid", lambda v: v):
            pass
        with pytest.raises(ZeroDivisionError):
            raise_within(bended)
    assert bended.insertions == ()


def raise_within(bended: bt.BendedModule) -> None:
    with bended.interject("sigmoid", lambda v: v):
        bended(SMALL)
        raise ZeroDivisionError


# What goes wrong in an interjection


@pytest.mark.parametrize(
    ("model", "where", "what", "message"),
    [
        (lambda x: x.relu(), "relu", lambda v: (v,), "relu .* expected a tensor, got a tuple of 1"),
        (lambda x: x.relu(), "relu", lambda v: 3, "expected a tensor, got 3"),
        (lambda x: x.max(0), "max", lambda v: v[:1], "expected a max of 2, got a tuple of 1"),
        (lambda x: x.sum().item() * x, "item", lambda v: 1, "expected a float, got 1"),
        (lambda x: {"a": x}, "", lambda v: {"b": v["a"]}, "with the keys 'a', got a dict"),
        (lambda x: [x, None], "", lambda v: [v[0], 1], r"at \[1\]: None became 1"),
    ],
)
def test_a_value_of_another_structure_raises(
    model: Any, where: str, what: Any, message: str
) -> None:
    bended = bt.BendedModule(model)
    x = torch.ones(2, 2)
    bended(x)
    place: Any = where or (lambda node: node.path == "")
    with bended.interject(place, what, allow_none=True):
        for _ in range(2):
            with pytest.raises(InterjectionError, match=message) as caught:
                bended(x)
            assert caught.value.path == where
    assert_same(bended(x), model(x))


def test_what_an_interjection_raises_comes_out_as_it_is() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return torch.relu(x)
        except ZeroDivisionError:
            return -x

    bended = bt.BendedModule(careful)
    x = torch.tensor([1.0])
    with bended.interject("relu", lambda v: v / (1 // 0)):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                bended(x)
    assert_same(bended(x), x)


def test_an_observer_that_changes_a_value_raises() -> None:
    class Liar(bt.Interjection):
        observes = True

        def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
            return output + 1

    bended = bt.BendedModule(lambda x: x.relu())
    with (
        bended.interject("relu", Liar()),
        pytest.raises(InterjectionError, match="declares observes=True"),
    ):
        bended(torch.ones(2))


def test_numbers_that_decide_a_branch_can_be_exchanged() -> None:
    def decided(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1

    bended = bt.BendedModule(decided)
    x = torch.ones(2)
    with bended.interject("item", lambda v: -v):
        for _ in range(3):
            assert_same(bended(x), x - 1)
            assert_same(bended(-x), -x + 1)
    assert bended.stats.live == 0


# What the model is part of, and copies


def test_a_bended_module_inside_another_keeps_its_insertions() -> None:
    inner = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model = nn.Sequential(inner, nn.Linear(2, 2))
    outer = bt.BendedModule(model)
    x = torch.randn(3, 2)
    plain = model(x)
    for _ in range(2):
        assert_same(outer(x), plain)
    with inner.interject(nn.ReLU, lambda v: v + 1):
        wanted = model[1](inner.model(x) + 1)
        for _ in range(3):
            assert_same(model(x), wanted)
            assert_same(outer(x), wanted)
    for _ in range(2):
        assert_same(outer(x), plain)
    assert outer.stats.live == 0
    assert outer.stats.traces == 2


@pytest.mark.more
def test_torch_compile_around_a_bended_module_leaves_what_is_inserted_alone() -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    compiled = torch.compile(lambda x: bended(x + 1) * 2, backend="eager")
    x = torch.randn(3)
    for _ in range(2):
        assert_same(compiled(x), (x + 1).relu() * 2)
    with bended.interject("relu", lambda v: v + 1):
        for _ in range(2):
            assert_same(compiled(x), ((x + 1).relu() + 1) * 2)
    assert_same(compiled(x), (x + 1).relu() * 2)


def doubled(value: Tensor) -> Tensor:
    return value * 2


def test_copies_have_the_insertions_and_are_independent() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(3, 2)
    bended(x)
    bended.interject("sub_0.linear", doubled)
    bended.interject(bended[1], doubled)
    bended.interject("sub_0.weight", doubled)
    bended.interject(bt.node_selector.Activations.ReLU, doubled, passes=[0])
    wanted = bended(x)
    for other in (copy.deepcopy(bended), pickle.loads(pickle.dumps(bended))):
        assert len(other.insertions) == 4
        for _ in range(2):
            assert_same(other(x), wanted)
        for insertion in other.insertions:
            insertion.remove()
        assert_same(other(x), other.model(x))
    assert_same(bended(x), wanted)


def test_a_trace_of_a_bended_module_has_what_is_inserted() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.randn(3)
    plain = bt.trace(bended, x)
    with bended.interject("relu", lambda v: v + 1):
        for trace in (bt.trace(bended, x, save="all"), bended.trace(x)):
            assert_same(trace.output, (x.relu() + 1).sin())
            names = [name for name in trace.graph if "__" in name]
            assert names == ["relu__function"]
            assert list(trace.graph.predecessors("sin")) == names
    assert_same(trace.replay(x), (x.relu() + 1).sin())  # a trace keeps what was inserted
    assert list(trace.tree) == list(plain.tree)  # what is inserted is no node of the model


def test_log_forward_pass_sees_the_inserted_value() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.randn(3)
    bended.interject("relu", lambda v: v + 1)
    log = bt.log_forward_pass(bended, x)
    assert_same(log["relu_1"].tensor_contents, x.relu())
    assert_same(log["sin_1"].tensor_contents, (x.relu() + 1).sin())


def test_names_of_nodes_stay_put_whatever_is_inserted() -> None:
    def relu(value: Tensor) -> Tensor:
        return value + 1

    def twice(x: Tensor) -> Tensor:
        return torch.relu(torch.sin(torch.relu(x)) * 2)

    plain = bt.BendedModule(twice)
    x = torch.randn(3)
    wanted = list(plain.trace(x).tree)
    bended = bt.BendedModule(twice)
    with bended.interject(bt.node_selector.matches_function(torch.relu), relu):
        bended(x)
        assert list(bended.trace(x).tree) == wanted
    assert list(bended.trace(x).tree) == wanted
    with bended.interject(".relu_1", relu):
        assert_same(bended(x), twice(x) + 1)


# Others


def test_nothing_that_was_inserted_is_kept_alive_by_the_paths() -> None:
    bended = bt.BendedModule(lambda x: x.relu().sin())
    x = torch.randn(3)
    found = []
    for where in ("relu", "sin"):
        watch = Watch()
        found.append(weakref.ref(watch))
        with bended.interject(where, watch):
            bended(x)
            bended(x)
        del watch
    gc.collect()
    assert [reference() for reference in found] == [None, None]


def test_threads_have_their_own_runs_of_the_same_insertions() -> None:
    bended = bt.BendedModule(branching())
    counts = Watch()
    bended.interject("a", counts)
    model = branching()
    inputs = [SMALL, LARGE] * 8
    wanted = [model(x) for x in inputs]
    given: list[Any] = [None] * len(inputs)

    def work(number: int) -> None:
        given[number] = bended(inputs[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(given, wanted)
    assert len(counts.seen) == len(inputs)
    assert bended.insertions[0].report().fired == len(inputs)


def test_the_users_own_hooks_stay_and_fire_inside_what_is_inserted() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(1) or output + 1)
    bended = bt.BendedModule(model)
    x = torch.randn(3, 2)
    with bended.interject(model[0], lambda v: v * 2):
        for _ in range(2):
            assert_same(bended(x), model(x) * 2)
    assert len(calls) == 4


def test_the_hooks_of_a_manager_are_called_by_replays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1))
    bended = bt.BendedModule(model)
    calls: list[Any] = []

    def after(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
        calls.append(("after", module.name, tuple(inputs[0].shape)))
        return (outputs[0] * 2,)

    def before(module: nn.Module, inputs: Any) -> tuple[Tensor]:
        calls.append(("before", module.name))
        return (inputs[0] + 1,)

    def hook(manager: bt.HookManager) -> None:
        manager.register_forward_hook(after, first=model[0], last=model[2])
        manager.register_forward_pre_hook(before, last=model[2])

    hook(bended.hooks)
    assert [repr(handle) for handle in bended.insertions] == [
        "<insertion of after[first] at the module Linear, active>",
        "<insertion of after[last] at the module Linear, active>",
        "<insertion of before[last] at the module Linear, active>",
    ]
    plain = bt.HookManager()
    hook(plain)
    x = torch.randn(3, 2)
    for number in range(3):
        calls.clear()
        with plain.hook_all_context():
            wanted = model(x)
        plain.deactivate_all_hooks()
        eager = list(calls)
        calls.clear()
        assert_same(bended(x), wanted)
        assert calls == eager
        assert bended.stats.replays == number
    bended.hooks.deactivate_all_hooks(hook_types=[before])
    for _ in range(2):
        with plain.hook_all_context(hook_types=[after]):
            wanted = model(x)
        assert_same(bended(x), wanted)
    assert (bended.stats.traces, bended.stats.replays, bended.stats.live) == (2, 3, 0)
    bended.hooks.deactivate_all_hooks()
    assert bended.insertions == ()
    assert_same(bended(x), model(x))


def test_a_hook_that_may_look_at_what_the_run_assigns_makes_calls_live() -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            self.note = x * 2
            result: Tensor = self.act(x)
            return result

    model = Notes()
    bended = bt.BendedModule(model)
    bended.hooks.register_forward_hook(
        lambda module, inputs, outputs: (outputs[0] + model.note,), act=model.act
    )
    for value in (1.0, 2.0, 3.0):
        assert_same(bended(torch.tensor(value)), torch.tensor(value * 3))


def test_what_the_run_assigns_can_be_looked_at_by_an_interjection() -> None:
    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.note = x * 2
            return torch.relu(x)

    model = Notes()
    bended = bt.BendedModule(model)
    with bended.interject("relu", lambda v: v + model.note):
        for value in (1.0, 2.0, 3.0):
            assert_same(bended(torch.tensor(value)), torch.tensor(value * 3))
        assert bended.stats.live == 3
    with bended.interject("relu", lambda v: v + 1):  # which does not name it
        for value in (1.0, 2.0, 3.0):
            assert_same(bended(torch.tensor(value)), torch.tensor(value + 1))


@pytest.mark.parametrize("inplace", [False, True])
def test_ops_in_place_take_values_from_what_is_inserted(inplace: bool) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = F.relu(y, inplace=inplace)
        return y * 3, z

    def changed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = F.relu(y) + 1
        return (z if inplace else y) * 3, z

    bended = bt.BendedModule(model)
    x = torch.randn(4, requires_grad=True)
    with bended.interject("relu", lambda v: v + 1):
        for _ in range(2):
            given, wanted = bended(x), changed(x)
            assert_same([v.detach() for v in given], [v.detach() for v in wanted])
            grads = [torch.autograd.grad(sum(v.sum() for v in pair), x) for pair in (given, wanted)]
            assert_same(grads[0], grads[1])


class Inside(torch.autograd.Function):
    """Calls a module in its forward, where no tracer can see what it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Any:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, None


@pytest.mark.parametrize("where", [nn.Linear, "b", "b.weight", re.compile("b"), lambda node: True])
def test_a_module_that_is_called_inside_of_one_op_is_refused(where: Any) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return Inside.apply(self.a(x), self.b)

    bended = bt.BendedModule(Hidden())
    x = torch.randn(2, 3)
    plain = bended(x)
    for _ in range(2):
        with (
            pytest.raises(InterjectionError, match="b is inserted inside something"),
            bended.interject(where, lambda v: v * 2),
        ):
            bended(x)
    assert_same(bended(x), plain)
    with bended.interject("a", lambda v: v * 2):
        wanted = Inside.apply(bended.model.a(x) * 2, bended.model.b)
        assert_same(bended(x).detach(), wanted.detach())
    with bended.interject(where, lambda v: v, allow_none=True):
        assert_same(bended(x), plain)


def test_a_path_that_tests_something_older_first_does_nothing_twice() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(self.norm(torch.tanh(x)))
            return y + 1 if x.sum() > 0 else y - 1

    model = Trains()
    twin = copy.deepcopy(model)
    bended = bt.BendedModule(model)
    x = torch.randn(3, 4).abs()
    fired = []
    changes: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda v: v.clone(), x), (lambda v: v, -x), (lambda v: v.clone(), -x), (lambda v: v, x),
    ]  # fmt: skip
    for seed, (change, given) in enumerate(changes * 2):
        with (
            bended.interject(lambda node: node.path == "tanh", change),
            bended.interject(lambda node: node.path == "norm", fired.append),
        ):
            torch.manual_seed(seed)
            out = bended(given)
        torch.manual_seed(seed)
        assert_same(out, twin(given))
        assert_same(model.state_dict(), twin.state_dict())
        assert len(fired) == seed + 1


def test_a_container_that_an_interjection_changes_is_the_one_the_model_holds() -> None:
    class Fills(nn.Module):
        def forward(self, table: dict[str, Tensor]) -> dict[str, Tensor]:
            table["y"] = table["x"] * 2
            return table

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fills()

        def forward(self, x: Tensor) -> Tensor:
            table = {"x": x}
            self.inner(table)
            return table["y"]

    bended = bt.BendedModule(Holds())
    x = torch.randn(3)

    def change(table: dict[str, Tensor]) -> None:
        table["y"] = table["y"] + 1

    with bended.interject("inner", change):
        for _ in range(2):
            assert_same(bended(x), x * 2 + 1)
    with bended.interject("inner", lambda table: {**table, "y": table["y"] + 1}):
        for _ in range(2):
            assert_same(bended(x), x * 2)  # another dict, which nobody holds


def test_what_functions_close_over_is_changed_once() -> None:
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    calls: list[int] = []

    def model(x: Tensor) -> Tensor:
        calls.append(1)
        y = norm(x).tanh()
        return y if y.sum() > 0 else -y

    bended = bt.BendedModule(model)
    bended.interject("tanh", lambda v: v + 1, passes=[0])
    x = torch.randn(5, 4)
    y = other(x).tanh() + 1
    assert_same(bended(x), y if y.sum() > 0 else -y)
    assert_same(norm.state_dict(), other.state_dict())
    assert len(calls) == 1


@pytest.mark.more
@pytest.mark.parametrize("where", ["layers.0.self_attn", "layers.0.linear1", "layers.1"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_fused_path_is_not_taken_past_what_is_inserted(where: str, mode: Any) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    hooked = copy.deepcopy(model)

    def change(value: Any) -> Any:
        return (value[0] * 2, value[1]) if isinstance(value, tuple) else value * 2

    hooked.get_submodule(where).register_forward_hook(lambda m, args, output: change(output))
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3, 4)
    with mode(), bended.interject(model.get_submodule(where), change):
        for _ in range(2):
            # The fused kernel of the last layer has all of it: only what eager's hook meets, a
            # layer in pieces, would have other bits on some processors.
            assert_same(bended(x), change(model(x)) if where == "layers.1" else hooked(x))


def test_parameters_are_exchanged_wherever_the_model_gives_them_out() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("n", torch.tensor(2))

        def forward(self, x: Tensor) -> Any:
            return x[: self.n] * self.w, self.w, {"n": self.n}

    bended = bt.BendedModule(Gives())
    x = torch.randn(3, 4)
    bended(x)
    with bended.interject("w", lambda w: w * 3), bended.interject("n", lambda n: n - 1):
        w = torch.full((4,), 3.0)
        for _ in range(2):
            given = bended(x)
            assert_same(given[0].detach(), x[:1] * w)
            assert_same([given[1].detach(), given[2]], [w, {"n": torch.tensor(1)}])


def test_functions_that_only_look_like_working_in_place_do_not() -> None:
    bended = bt.BendedModule(lambda x: (k := x > 0, ~k))
    x = torch.randn(4)
    bended(x)
    with bended.interject("invert", torch.ones_like):
        for _ in range(2):
            assert_same(bended(x), (x > 0, torch.ones(4, dtype=torch.bool)))


def test_a_predicate_of_passes_is_asked_anew() -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    on = [True]
    x = torch.ones(2)
    with bended.interject("relu", lambda v: v + 1, passes=lambda number: on[0]):
        assert_same(bended(x), x + 1)
        on[0] = False
        assert_same(bended(x), x)


def test_gradients_told_of_a_node_whose_input_is_written_to_later_raise_or_are_right() -> None:
    class Told(bt.Interjection):
        def backward(self, at: bt.NodePass, grad_input: Any, grad_output: Any) -> None:
            pass

    def model(x: Tensor) -> Tensor:
        y = x * 2
        z = y.view(-1)
        z.relu_()
        return y + 1

    bended = bt.BendedModule(model)
    x = torch.randn(3, requires_grad=True)
    with bended.interject("mul", Told()):
        for _ in range(2):
            given = bended(x)
            wanted = model(x)
            assert_same(given.detach(), wanted.detach())
            grads = [torch.autograd.grad(v.sum(), x) for v in (given, wanted)]
            assert_same(grads[0], grads[1])
    with (
        bended.interject("view", Told()),
        pytest.raises(InterjectionError, match="changed in place that is a view"),
    ):
        bended(x)


def test_the_whole_of_what_args_take_is_refused() -> None:
    bended = bt.BendedModule(lambda x, *more: x + sum(more))
    x = torch.ones(2)
    bended(x, x, x)
    with (
        bended.interject("more", lambda v: v),
        pytest.raises(InterjectionError, match=r"args\|sub_0"),
    ):
        bended(x, x, x)
    with bended.interject("more|sub_0", lambda v: v * 2):
        for _ in range(2):
            assert_same(bended(x, x, x), x + 2 * x + x)


def test_methods_that_call_parts_of_the_model_themselves_come_by_what_is_inserted() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.encoder(x))

        def generate(self, x: Tensor) -> Any:
            memory = self.encoder(x)
            return self.head(memory) + self(x)

    model = Both()
    hooked = copy.deepcopy(model)
    hooked.encoder[1][0].register_forward_hook(lambda module, args, output: output * 2)
    before = dict(vars(model.encoder))
    for warm in (False, True):
        bended = bt.BendedModule(copy.deepcopy(model))
        x = torch.randn(4, 3)
        if warm:
            bended(x)
        for where in (bended.model.encoder[1][0], "encoder.sub_1.sub_0"):
            with bended.interject(where, lambda v: v * 2) as handle:
                if not warm and isinstance(where, str):
                    bended(x)  # a path is looked for in the first call
                for _ in range(2):
                    assert_same(bended.generate(x), hooked.generate(x))
            assert handle.report().paths == ("encoder.sub_1.sub_0",)
        with bended.interject("encoder.1.0.weight", lambda w: w * 0):
            assert_same(bended.generate(x).shape, torch.Size([4, 2]))
            zero = copy.deepcopy(model)
            nn.init.zeros_(zero.encoder[1][0].weight)
            assert_same(bended.generate(x).detach(), zero.generate(x).detach())
    assert vars(model.encoder).keys() == before.keys()


# What an insertion changes besides the value


class Scaled(nn.Module):
    """Reads attributes after the node at which something is inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        self.scale, self.scales = 1.0, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.drop(self.o(h)) * self.scale * self.scales[0]


def _sets_an_attribute(model: Scaled, to: float) -> None:
    model.scale = to


def _sets_an_item(model: Scaled, to: float) -> None:
    model.scales[0] = to


def _switches_the_mode(model: Scaled, to: float) -> None:
    model.drop.train(to > 1.5)


@pytest.mark.parametrize("change", [_sets_an_attribute, _sets_an_item, _switches_the_mode])
def test_an_insertion_may_change_what_the_model_reads_later(
    change: Callable[[Scaled, float], None],
) -> None:
    torch.manual_seed(0)
    model = Scaled()
    eager, bended = copy.deepcopy(model), bt.BendedModule(model)
    to = [1.0]
    bended.interject("relu", lambda value: change(model, to[0]))
    for step, number in enumerate((1.0, 2.0, 2.0, 2.0, 3.0, 1.0, 2.0)):
        to[0] = number
        x = torch.randn(3, 4)
        change(eager, number)
        torch.manual_seed(step)
        wanted = eager(x)
        torch.manual_seed(step)
        assert bits(bended(x)) == bits(wanted), step


class Inner(nn.Module):
    def forward(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        held["h"] = torch.relu(held["x"])
        return held


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = {"x": x}
        returned = self.inner(held)
        return held["h"], returned["h"]


def _looks(value: dict[str, Tensor]) -> None:
    assert set(value) == {"x", "h"}


def _replaces(value: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**value, "h": value["h"] * 3}


def _changes(value: dict[str, Tensor]) -> None:
    value["h"] = value["h"] * 5


@pytest.mark.parametrize(
    "inserted", [(_looks, _replaces), (_replaces, _looks), (_looks, _changes), (_changes, _changes)]
)
def test_a_dict_is_changed_or_replaced_as_native_hooks_do_it(
    inserted: tuple[Callable[[Any], Any], ...],
) -> None:
    model, eager, x = Outer(), Outer(), torch.rand(3)
    bended = bt.BendedModule(model)
    for one in inserted:
        bended.interject("inner", one)
        eager.inner.register_forward_hook(lambda module, args, out, one=one: one(out))
    for _ in range(3):
        assert bits(bended(x)) == bits(eager(x))


def test_a_dict_that_was_changed_in_place_is_not_replaced_as_well() -> None:
    bended, x = bt.BendedModule(Outer()), torch.rand(3)
    bended.interject("inner", _changes)
    bended.interject("inner", _replaces)
    with pytest.raises(InterjectionError, match="in place"):
        bended(x)


def test_threads_that_change_and_replace_a_dict_do_not_disturb_each_other() -> None:
    bended, x = bt.BendedModule(Outer()), torch.ones(2)
    replaced, done, here = threading.Event(), threading.Event(), threading.local()

    def inserted(value: dict[str, Tensor]) -> dict[str, Tensor]:
        role = getattr(here, "role", "")
        if role == "replaces":
            value = {**value, "h": value["h"] * 3}
            replaced.set()
            assert done.wait(10)
            return value
        if role == "changes":
            assert replaced.wait(10)
        value["h"] = value["h"] * 0
        return value

    bended.interject("inner", inserted)
    bended(x)
    bended(x)
    found: dict[str, Any] = {}

    def run(role: str) -> None:
        here.role = role
        found[role] = bended(x)
        if role == "changes":
            done.set()

    threads = [threading.Thread(target=run, args=(role,)) for role in ("replaces", "changes")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value.tolist() for value in found["replaces"]] == [[1, 1], [3, 3]]
    assert [value.tolist() for value in found["changes"]] == [[0, 0], [0, 0]]


def test_the_keys_of_a_dict_stay_in_their_order() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x, "b": x * 2}

    model = nn.Sequential(Pairs())
    bended = bt.BendedModule(model)
    bended.interject("0", lambda value: {"b": value["b"], "a": value["a"]})
    with pytest.raises(InterjectionError, match="order"):
        bended(torch.ones(2))


def test_an_insertion_may_return_a_new_dict_and_later_none() -> None:
    model, eager, x = Outer(), Outer(), torch.rand(3)
    bended, turn = bt.BendedModule(model), [0]

    def now_and_then(value: dict[str, Tensor]) -> dict[str, Tensor] | None:
        return {**value, "h": value["h"] * 3} if turn[0] % 3 == 0 else None

    bended.interject("inner", now_and_then)
    eager.inner.register_forward_hook(lambda module, args, out: now_and_then(out))
    for turn[0] in range(7):
        assert bits(bended(x)) == bits(eager(x)), turn


# What an insertion and the model share, under whatever names


PHASE = 0


class Setting:
    """An object that a model has, with a method."""

    def __init__(self) -> None:
        self.on, self.table = False, {"n": 0}

    def turn(self, on: bool) -> None:
        self.on = on


class Sharing(nn.Module):
    """Changes things before the node at which something is inserted, and reads others after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.25)
        self.setting, self.log, self.flags = Setting(), [0.0], [0]
        self.on, self.now, self.here = False, -1, [0]

    def turn(self, on: bool) -> None:
        self.on = on


class Reads(Sharing):
    """Reads after the node what an insertion has changed."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
            if self.on or self.setting.on or self.flags[0] or self.setting.table["n"]:
                x = x * 2
        return x


class Appends(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        if len(self.log) > 2:
            del self.log[:]
        return self.act(self.layers[0](x))


class Counts(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        global PHASE
        PHASE = 1 - PHASE
        return self.act(self.layers[0](x))


class Tags(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.layers[0].weight
        weight.tag = 1 - getattr(weight, "tag", 0)
        return self.act(self.layers[0](x))


class Sets(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        self.drop.p = 0.75 - self.drop.p
        return self.act(self.layers[0](x))


class Passes(Sharing):
    """Leaves at its end what it found."""

    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        for number, layer in enumerate(self.layers):
            self.now = self.here[0] = number
            x = self.act(layer(x))
        self.now = self.here[0] = -1
        self.drop.train()
        return x


class Removes(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        self.extra = x.sum()
        x = self.act(self.layers[0](x))
        del self.extra
        return x


def _turned(turn: Callable[[bool], None]) -> Any:
    def insertion(value: Tensor) -> None:
        turn(bool(value.sum() > 0))

    return insertion


def _put(held: Any, key: Any) -> Any:
    def insertion(value: Tensor) -> None:
        held[key] = int(value.sum() > 0)

    return insertion


def _held(thing: Any, read: Callable[[Any], Any]) -> Any:
    return lambda value: value * (1 + read(thing))


def _of_list(held: list[float]) -> Any:
    return lambda value: value * (1 + len(held))


def _of_global(model: Any) -> Any:
    return lambda value: value * (1 + PHASE)


def _of_tag(weight: Any) -> Any:
    return lambda value: value * (1 + weight.tag)


def _of_attribute(model: Any) -> Any:
    return lambda value: value * (2 + model.now)


def _of_name(model: Any) -> Any:
    return lambda value: value * (2 + getattr(model, "".join(("n", "ow"))))


def _of_item(model: Any) -> Any:
    return lambda value: value * (2 + model.here[0])


def _of_extra(model: Any) -> Any:
    return lambda value: value * model.extra


def _of_rate(drop: nn.Dropout) -> Any:
    return lambda value: value * drop.p


SHARED: dict[str, tuple[type[Sharing], Callable[[Any], Any]]] = {
    "a list of the model, held": (Appends, lambda m: _of_list(m.log)),
    "a global": (Counts, _of_global),
    "what is set on a parameter": (Tags, lambda m: _of_tag(m.layers[0].weight)),
    "an attribute of a module of torch": (Sets, lambda m: _of_rate(m.drop)),
    "a module of torch": (Passes, lambda m: m.drop),
    "an attribute that is put back": (Passes, _of_attribute),
    "the same, by a computed name": (Passes, _of_name),
    "an item that is put back": (Passes, _of_item),
    "a list whose item is put back, held": (Passes, lambda m: _held(m.here, lambda h: h[0])),
    "an attribute that is removed": (Removes, _of_extra),
    "changes by a method": (Reads, lambda m: _turned(lambda on: m.turn(on))),
    "changes by a bound method": (Reads, lambda m: _turned(m.turn)),
    "changes by a method of an object": (Reads, lambda m: _turned(m.setting.turn)),
    "changes an item of what it holds": (Reads, lambda m: _put(m.flags, 0)),
    "changes an item of a dict": (Reads, lambda m: _put(m.setting.table, "n")),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_an_insertion_shares_with_the_model_is_as_it_is_then(name: str) -> None:
    global PHASE
    kind, make = SHARED[name]
    outputs: list[list[Any]] = []
    for is_bended in (False, True):
        torch.manual_seed(0)
        PHASE = 0
        model = kind()
        what = make(model)
        call: Callable[[Tensor], Any] = model
        if is_bended:
            call = bt.BendedModule(model)
            call.interject("act", what)
        else:
            model.act.register_forward_hook(lambda _, inputs, output, what=what: what(output))
        outputs.append([bits(call(torch.randn(4))) for _ in range(12)])
    assert outputs[0] == outputs[1]


def test_variables_of_a_function_that_an_insertion_changes_are_as_they_are_then() -> None:
    is_on = False

    def model(x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return torch.sin(h) if is_on else torch.cos(h)

    def switch(value: Tensor) -> None:
        nonlocal is_on
        is_on = bool(value.sum() > 0)

    bended = bt.BendedModule(model)
    bended.interject("tanh", switch)
    for _ in range(12):
        x = torch.randn(4)
        h = torch.tanh(x)
        assert bits(bended(x)) == bits(torch.sin(h) if h.sum() > 0 else torch.cos(h))


def test_what_shares_nothing_with_the_model_is_replayed() -> None:
    model = Reads()
    bended = bt.BendedModule(model)
    seen: list[Any] = []
    sums: dict[str, Tensor] = {}

    def note(value: Tensor) -> None:
        seen.append(value.shape)
        sums["last"] = value.sum()

    bended.interject("act", note)
    bended.interject("act", lambda value: value + model.layers[0].bias)
    bended.interject("act", nn.Linear(4, 4))
    for _ in range(6):
        bended(torch.randn(4))
    assert (bended.stats.live, bended.stats.replays) == (0, 5)


# Leaves that forward makes


def energy(x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((z * z * z).sum(), z)
    return grad * 2 if x.sum() > 0 else z.detach() - grad


def dropped(x: Tensor) -> Tensor:
    z = x.detach()
    z.requires_grad_()
    (z * z).sum().backward()
    assert z.grad is not None
    return z.grad if x.sum() > 0 else -z.grad


def looped(x: Tensor) -> Tensor:
    z = x * 0
    for _ in range(3):
        z = z.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(((z - x) ** 2).sum(), z)
        z = z - 0.1 * grad
        if z.sum() > 0.5:
            break
    return z


def kept(x: Tensor) -> Tensor:
    z = nn.Parameter(x * 2)
    (grad,) = torch.autograd.grad((z * z).sum(), z)
    return grad if grad.sum() > 0 else grad * 3


def detached(x: Tensor) -> Tensor:
    z = torch.ones(2, requires_grad=True)
    z.detach_()
    return z * x if x.sum() > 0 else z + x


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
@pytest.mark.parametrize("model", [energy, dropped, looped, kept, detached])
@pytest.mark.parametrize("is_known", [False, True])
def test_leaves_that_forward_makes_are_looked_at(
    model: Callable[[Tensor], Tensor], is_known: bool
) -> None:
    probe = bt.BendedModule(model)
    probe(torch.ones(2))
    paths = {str(entry.node_path).partition(":")[0] for entry in probe.traces[0].entries}
    for path in sorted(paths - {"None", ""}):
        bended = bt.BendedModule(model)
        if is_known:
            bended(torch.ones(2))
        with bended.interject(f".{path}", lambda value: None, allow_none=True):
            for x in (torch.ones(2), -torch.ones(2), torch.ones(2), torch.full((2,), -2.0)):
                assert_same(bended(x), model(x))


@pytest.mark.parametrize("change", [lambda v: v + 1, lambda v: (v.detach() + 1).requires_grad_()])
def test_the_result_of_requires_grad_is_replaced(change: Callable[[Tensor], Tensor]) -> None:
    def by_hand(x: Tensor) -> Tensor:
        z = change(x.detach().requires_grad_())
        (grad,) = torch.autograd.grad((z * z * z).sum(), z)
        return grad * 2 if x.sum() > 0 else z.detach() - grad

    for is_known in (False, True):
        bended = bt.BendedModule(energy)
        if is_known:
            bended(torch.ones(2))
        with bended.interject("requires_grad_", change):
            for x in (torch.ones(2), -torch.ones(2), torch.ones(2)):
                assert_same(bended(x), by_hand(x))


def test_a_leaf_whose_flag_is_set_by_a_statement_cannot_be_replaced() -> None:
    bended, x = bt.BendedModule(dropped), torch.ones(2)
    with bended.interject("requires_grad_", lambda value: value + 1):
        for _ in range(2):
            with pytest.raises(bt.errors.InterjectionError, match="drops what requires_grad_"):
                bended(x)
    with bended.interject("detach", lambda value: value + 1):
        for x in (torch.ones(2), -torch.ones(2), torch.ones(2)):
            assert_same(bended(x), (x + 1) * (2 if x.sum() > 0 else -2))


@pytest.mark.parametrize("is_live", [False, True])
def test_calls_are_counted_whenever_somebody_asks_and_few_wait_for_that(is_live: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y * float(max(y.numpy().flat)) if is_live else y

    model, x = Model(), torch.ones(2, 4)
    bended = bt.BendedModule(model)
    with torch.no_grad():
        bended(x)
        handle = bended.interject(model.layer, lambda value: value * 2)
        for _ in range(1200):
            bended(x)
    assert len(handle._tally.noted) < 600
    assert [(row.fired, row.changed) for row in handle.report().rows] == [(1200, 1200)]
    handle.clear_report()
    assert handle.report().rows == ()


# What a model changes, and an insertion may read.


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_positive = False
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.is_positive = bool(x.sum() > 0)
        self.latest = x * 2
        return self.linear(x)


class _Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = _Part()
        self.step = 0
        self.mode = "a"

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.mode = "b" if x[0, 0] > 0 else "c"
        x = self.part(x)
        return x * self.step if x.sum() > 0 else -x


def _looks(value: Tensor, at: bt.NodePass) -> Tensor:
    assert isinstance(at.module, _Part)
    return value * (2 if at.module.is_positive else 3)


def _adds(value: Tensor, at: bt.NodePass) -> Tensor:
    assert isinstance(at.module, _Part)
    return value + at.module.latest


class _Looking(bt.Interjection):
    def after(self, at: bt.NodePass, inputs: Any, output: Any) -> Any:
        return _looks(output, at)


class _Holding(bt.Interjection):
    def __init__(self) -> None:
        self.model: Any = None

    def after(self, at: bt.NodePass, inputs: Any, output: Any) -> Any:
        return output * (2 if self.model is not None and self.model.mode == "b" else 3)


class _Counting(bt.Interjection):
    def __init__(self) -> None:
        self.calls, self.sums, self.factors = 0, [], {"all": 2.0}  # type: ignore[var-annotated]

    def after(self, at: bt.NodePass, inputs: Any, output: Any) -> Any:
        self.calls += 1
        self.sums.append(output.detach().sum())
        return output * self.factors["all"] * self.calls


def _called_beside_a_hook(what: Any, same: Any, hold: bool = False) -> bt.BendedModule:
    torch.manual_seed(0)
    model = _Stepping()
    other = copy.deepcopy(model)
    bended = bt.BendedModule(other)
    bended.interject("part", what)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        at = bt.NodePass("part", module=module)
        return same.after(at, inputs, output) if hasattr(same, "after") else same(output, at)

    model.part.register_forward_hook(hook)
    for number in range(24):
        if hold and number == 12:
            what.model, same.model = other, model
        x = torch.randn(2, 4)
        assert torch.equal(bended(x), model(x)), number
        assert (other.step, other.mode) == (model.step, model.mode)
        assert other.part.is_positive == model.part.is_positive
    return bended


def test_an_interjection_that_holds_nothing_of_the_model_is_replayed_beside_changes() -> None:
    what, same = _Counting(), _Counting()
    bended = _called_beside_a_hook(what, same)
    assert what.calls == same.calls == 24
    assert torch.equal(torch.stack(what.sums), torch.stack(same.sums))
    assert bended.stats.live == 0
    assert bended.stats.replays > 5


@pytest.mark.parametrize("what", [_looks, _adds, _Looking()], ids=["looks", "adds", "class"])
def test_what_is_inserted_may_look_at_a_module_that_the_run_changes(what: Any) -> None:
    bended = _called_beside_a_hook(what, what)
    assert "self.part.is_positive" in str(bended.why_live)


def test_an_interjection_may_come_to_hold_the_model_later() -> None:
    bended = _called_beside_a_hook(_Holding(), _Holding(), hold=True)
    assert "self.mode" in str(bended.why_live)
