"""Inputs that take sides never taken: found by search, and verified by running the model itself."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from tests.planted import MODELS, Planted
from tests.shares import some


def lines_run(model: Callable[..., Any], args: Any, kwargs: Any) -> set[tuple[str, int]]:
    """Run a model itself, and return the lines that Python came to."""
    lines: set[tuple[str, int]] = set()

    def watch(frame: Any, event: str, _: Any) -> Any:
        if "torch" in frame.f_code.co_filename.split("/tests/")[0].rsplit("/", 3):
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        model(*args, **kwargs)
    finally:
        sys.settrace(before)
    return lines


def explore(name: str, **options: Any) -> tuple[Planted, bt.BendedModule, Any]:
    planted = MODELS[name]
    bended = bt.BendedModule(planted.model())
    return planted, bended, bended.explore(planted.inputs, planted.domain, **options)


def left_of(planted: Planted, found: Any) -> set[str]:
    """Return the rare branches of which a side was not found."""
    rare = planted.lines("rare")
    return {left.text for left in found.not_found
            if left.line in rare and left.kind not in ("and", "or")}  # fmt: skip


@pytest.mark.parametrize(("name", "tries"), some([
    ("numbers", 15), ("nested", 40), ("network", 40), ("tokens", 60), ("loops", 30),
], chosen=[("numbers", 15), ("loops", 30)]))  # fmt: skip
@pytest.mark.more
def test_planted_branches_are_found_and_the_model_itself_takes_them(name: str, tries: int) -> None:
    planted, bended, found = explore(name, seconds=None, tries=tries)
    assert len(planted.lines("rare")) == 8
    assert left_of(planted, found) == set()
    never = planted.lines("never")
    assert never
    assert not [find for find in found if find.line in never and find.side and find.kind == "if"]
    assert never <= {left.line for left in found.not_found}
    for find in found:  # the body of each begins in the line below it
        if find.kind == "if" and find.side:
            ran = lines_run(bended.model, find.args, find.kwargs)
            assert (find.file, find.line + 1) in ran


@pytest.mark.all
def test_nine_in_ten_of_40_planted_branches_are_found_in_a_minute() -> None:
    began, rare, left = time.process_time(), 0, 0
    for name in MODELS:
        planted, _, found = explore(name, seconds=10.0)
        rare += len(planted.lines("rare"))
        left += len(left_of(planted, found))
    assert rare == 40
    assert rare - left >= 36
    assert time.process_time() - began < 60


@pytest.mark.all
@pytest.mark.parametrize("name", MODELS)
def test_random_inputs_do_not_take_what_is_planted(name: str) -> None:
    planted = MODELS[name]
    model, generator = planted.model(), torch.Generator().manual_seed(0)
    rare = planted.bodies("rare")
    for _ in range(300):
        args = []
        for given, domain in zip(planted.inputs, planted.domain.values(), strict=True):
            low, high = (domain.low, domain.high) if isinstance(domain, bt.Domain) else domain
            if isinstance(given, int):
                args.append(int(torch.randint(low, high, (), generator=generator)))
            elif given.is_floating_point():
                args.append(low + (high - low) * torch.rand(given.shape, generator=generator))
            else:
                args.append(torch.randint(low, high + 1, given.shape, generator=generator))
        ran = lines_run(model, args, {})
        assert not {line for file, line in ran if file.endswith("planted.py")} & rare


def gated(x: Tensor) -> Tensor:
    if x.sum() > 15:
        x = x * 2
        if x[0] == 3.25:
            x = x + 1
    return x


def test_finds_given_to_the_model_complete_its_coverage() -> None:
    bended = bt.BendedModule(gated)
    found = bended.explore(torch.zeros(3), {"x": (0.0, 10.0)}, seconds=None, tries=40)
    assert not bended.traces  # the search itself is no call of the model
    bended(torch.zeros(3))
    assert len(bended.coverage()) == 2
    for args, kwargs in found.inputs:
        assert torch.equal(bended(*args, **kwargs), gated(*args, **kwargs))
    assert len(bended.coverage()) == 0


def test_sides_that_calls_have_taken_are_not_searched_for() -> None:
    bended = bt.BendedModule(gated)
    bended(torch.tensor([3.25 / 2, 10.0, 20.0]))
    found = bended.explore(torch.zeros(3), {"x": (0.0, 10.0)}, seconds=None, tries=30)
    assert [(find.text, find.side) for find in found] == [("x[0] == 3.25", False)]
    assert found.not_found == []


@pytest.mark.more
def test_a_search_with_the_same_seed_and_tries_finds_the_same() -> None:
    first, second = (explore("tokens", seconds=None, tries=25, seed=5)[2] for _ in range(2))
    assert first.runs == second.runs == 25
    assert len(first) > 2
    assert [(f.text, f.side, f.run) for f in first] == [(f.text, f.side, f.run) for f in second]
    for (args, _), (others, _) in zip(first.inputs, second.inputs, strict=True):
        assert torch.equal(args[0], others[0])


class Stateful(nn.Module):
    """Writes to all kinds of state, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.2)
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        y = self.dropout(self.norm(x)) + random.random() + float(numpy.random.rand())
        if self.count > 1 or self.calls > 1:
            y = y + 100
        if x.sum() > 39:
            y = y + 1
        return y


def test_nothing_of_the_model_changes_and_each_run_finds_it_as_it_was() -> None:
    torch.manual_seed(0)
    model = Stateful()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    x = torch.arange(8.0).view(2, 4) / 8
    given = x.clone()
    found = bt.BendedModule(model).explore(x, {"x": (-5.0, 5.0)}, seconds=None, tries=25)
    assert [(find.text, find.side) for find in found] == [("x.sum() > 39", True)]
    assert "self.count > 1 or self.calls > 1" in {left.text for left in found.not_found}
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, model.seen, set(vars(model))) == (0, [], attributes)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state()[1], states[2])


COUNTS = {"calls": 0}


def counting(x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    if COUNTS["calls"] > 1:
        return x
    if x.max() > 9.9:
        x.zero_()
    return x * 2


def test_globals_and_inputs_that_a_function_changes_are_restored() -> None:
    x = torch.zeros(3)
    found = bt.BendedModule(counting).explore(x, {"x": (0.0, 10.0)}, seconds=None, tries=15)
    assert COUNTS == {"calls": 0}
    assert [(find.text, find.side) for find in found] == [("x.max() > 9.9", True)]
    assert bool(found[0].args[0].max() > 9.9)  # as it was before the model wrote to it
    assert torch.equal(x, torch.zeros(3))


def strict(x: Tensor) -> Tensor:
    assert x.sum() < 79, "too much"
    if x.mean() < -9:
        raise ValueError("too little")
    return x


def test_sides_that_raise_are_found_and_their_inputs_are_told_apart() -> None:
    found = bt.BendedModule(strict).explore(
        torch.zeros(8), {"x": (-10.0, 10.0)}, seconds=None, tries=20
    )
    assert [(find.kind, find.side, find.raised) for find in found] == [
        ("assert", False, "AssertionError"), ("if", True, "ValueError")
    ]  # fmt: skip
    assert found.inputs == []
    with pytest.raises(AssertionError, match="too much"):
        strict(*found[0].args)
    with pytest.raises(ValueError, match="too little"):
        strict(*found[1].args)


def opaque_mean(x: Tensor) -> Tensor:
    if x.max() > 9.99:
        x = x + float(x.numpy().tobytes()[0])
    return x


def test_models_that_run_live_are_searched_as_well() -> None:
    bended = bt.BendedModule(opaque_mean)
    found = bended.explore(torch.zeros(20), {"x": (-10.0, 10.0)}, seconds=None, tries=15)
    assert [(find.text, find.side) for find in found] == [("x.max() > 9.99", True)]


def mixed(x: Tensor, mask: Tensor | None = None, *, options: dict[str, Any]) -> Tensor:
    if options["scale"] * x.sum() > 700:
        x = x + 1
    if mask is not None and mask.sum() == 0 and x[0] > 9:
        x = x + 2
    if options["mode"] == "b":
        x = x * 2
    return x


def test_masks_numbers_and_values_within_containers_are_searched() -> None:
    inputs = (
        (torch.zeros(8),), {"mask": torch.ones(8, dtype=torch.bool),
                            "options": {"scale": 1.0, "mode": "a"}},
    )  # fmt: skip
    found = bt.BendedModule(mixed).explore(
        inputs,
        {"x": (-10.0, 10.0), "options['scale']": (0.0, 10.0), "mask": bt.Domain(values=[0, 1]),
         "options['mode']": bt.Domain(values=["a", "b"])},
        seconds=None, tries=60,
    )  # fmt: skip
    assert {find.text for find in found if find.kind == "if"} == {
        "options[\"scale\"] * x.sum() > 700", 'options["mode"] == "b"',
        "mask is not None and mask.sum() == 0 and x[0] > 9",
    }  # fmt: skip


@pytest.mark.more
def test_what_has_no_domain_stays_as_it_is_and_finds_lie_in_the_domain() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > y.sum():
            x = x + 1
        if y.sum() > 0:
            x = x + 2
        return x

    y = torch.zeros(2)
    found = bt.BendedModule(model).explore(
        {"x": torch.full((2,), -1.0), "y": y}, {"x": (-1.0, 0.25)}, seconds=None, tries=20
    )
    assert [find.text for find in found] == ["x.sum() > y.sum()"]
    assert torch.equal(found[0].kwargs["y"], y)
    assert found[0].kwargs["x"].min() >= -1
    assert found[0].kwargs["x"].max() <= 0.25
    assert [left.text for left in found.not_found] == ["y.sum() > 0"]


def sized(ids: Tensor, mask: Tensor) -> Tensor:
    if ids.shape[1] > 7 and ids.shape[0] == 1:
        return ids * mask
    return ids + mask


def test_sizes_with_one_name_stay_the_same() -> None:
    sizes = {1: ("length", 1, 12)}
    found = bt.BendedModule(sized).explore(
        (torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4)),
        {"ids": bt.Domain(0, 9, sizes=sizes), "mask": bt.Domain(sizes=sizes)},
        seconds=None, tries=30,
    )  # fmt: skip
    ids, mask = next(find for find in found if find.kind == "if").args
    assert 7 < ids.shape[1] == mask.shape[1] <= 12
    assert torch.equal(mask, torch.ones_like(mask))


class Gate(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        if x.norm() > self.limit:
            x = x / 2
        return x


@pytest.mark.more
def test_each_module_that_asks_has_sides_of_its_own() -> None:
    model = nn.Sequential(Gate(15.0), Gate(9.0), Gate(1e3))
    found = bt.BendedModule(model).explore(
        torch.zeros(4), {"input": (-10.0, 10.0)}, seconds=None, tries=40
    )
    assert {(find.module_path, find.side) for find in found} == {("0", True), ("1", True)}
    assert [(left.module_path, left.side) for left in found.not_found] == [("2", True)]
    assert "module" in str(found)


def test_the_table_says_what_was_found_and_claims_nothing_of_the_rest() -> None:
    found = bt.BendedModule(Gate(100.0)).explore(
        torch.zeros(4), {"x": (-10.0, 10.0)}, seconds=None, tries=5
    )
    assert str(found).startswith("inputs found for 0 of 1 side never taken (5 runs of the model)")
    assert "not found, which does not say that no input takes them:" in str(found)
    assert "x.norm() &gt; self.limit" in found._repr_html_()
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(("domain", "message"), [
    ({}, "a domain says which inputs may differ"),
    ((0.0, 1.0), "a domain says which inputs may differ"),
    ({"y": (0.0, 1.0)}, r"the inputs have no part 'y' to have a domain; there are: x"),
    ({"x": 3}, r"a domain is a Domain or a pair \(low, high\), not 3"),
    ({"x": (1.0, 0.0)}, "a domain from 1.0 to 0.0 has nothing in it"),
    ({"x": (0.0, float("inf"))}, "finite numbers, not inf"),
    ({"x": ("a", 1.0)}, "finite numbers, not 'a'"),
    ({"x": (1.0, 2.0)}, r"x has elements from 0.0 to 0.0, outside of Domain\(1.0, 2.0\)"),
])  # fmt: skip
def test_a_domain_that_makes_no_sense_is_refused(domain: Any, message: str) -> None:
    bended = bt.BendedModule(gated)
    with pytest.raises(InputError, match=message):
        bended.explore(torch.zeros(3), domain)


@pytest.mark.parametrize(("options", "message"), [
    ({}, "needs low and high, values or sizes"),
    ({"low": 1}, "low and high, or values"),
    ({"low": 1, "high": 2, "values": [1]}, "low and high, or values"),
    ({"values": []}, "list of what may be there"),
    ({"sizes": {1: (3, 2)}}, "the least and the greatest size"),
    ({"sizes": {1: 4}}, "the least and the greatest size"),
    ({"sizes": {"n": (1, 2)}}, "the least and the greatest size"),
])  # fmt: skip
def test_a_domain_with_wrong_arguments_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bt.Domain(**options)


@pytest.mark.parametrize(("inputs", "domain", "message"), [
    (torch.zeros(3), {"x": bt.Domain(sizes={1: (1, 2)})}, "x has 1 dimensions, and none is 1"),
    (torch.zeros(3), {"x": bt.Domain(sizes={0: (4, 5)})}, "dimension 0 of x has size 3"),
    (torch.zeros(3), {"x": bt.Domain(values=[1, 2])}, "x has elements outside of"),
    (torch.zeros(3), {"x": bt.Domain(values=["a"])}, "are numbers"),
    ("text", {"x": (0, 1)}, "x is not a number"),
    (7, {"x": (0, 1)}, "x is 7, which is outside of"),
    (7, {"x": bt.Domain(sizes={0: (1, 2)})}, "x has no sizes"),
    ([], {"x": (0, 1)}, "the list has none"),
])  # fmt: skip
def test_inputs_that_do_not_lie_in_the_domain_are_refused(
    inputs: Any, domain: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bt.BendedModule(gated).explore(inputs, domain)


@pytest.mark.parametrize(("options", "message"), [
    ({"seconds": -1.0}, "seconds="), ({"tries": 0}, "tries="), ({"seed": "a"}, "seed="),
    ({"seconds": None}, "give seconds= or tries="),
])  # fmt: skip
def test_a_budget_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bt.BendedModule(gated).explore(torch.zeros(3), {"x": (0.0, 1.0)}, **options)


def test_a_search_in_a_model_with_insertions_is_refused() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    bended.interject("relu", torch.zeros_like)
    with pytest.raises(InputError, match="take away what is inserted"):
        bended.explore(torch.zeros(3), {"input": (0.0, 1.0)})


def test_a_model_that_raises_with_all_inputs_or_cannot_be_restored_is_refused() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError

    with pytest.raises(InputError, match="raises a RuntimeError with the inputs"):
        bt.BendedModule(fails).explore(torch.zeros(3), {"x": (0.0, 1.0)})
    numbers = iter(range(9))
    with pytest.raises(InputError, match="cannot be restored: numbers is a range_iterator"):
        bt.BendedModule(lambda x: x + next(numbers)).explore(torch.zeros(3), {"x": (0.0, 1.0)})
    assert next(numbers) == 0


def test_the_side_of_the_start_is_known_where_python_decides_and_nothing_happens() -> None:
    def model(x: Tensor) -> Tensor:
        v = float(x.sum()) * 2
        if v > 7:
            return x * 2
        return x

    found = bt.BendedModule(model).explore(
        torch.zeros(3), {"x": (-5.0, 5.0)}, seconds=None, tries=20
    )
    assert [(find.text, find.side) for find in found] == [("v > 7", True)]
    assert not found.not_found


def test_a_method_of_the_model_of_that_name_is_the_models() -> None:
    class Agent(nn.Module):
        def explore(self, rate: float) -> float:
            return rate * 2

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert bt.BendedModule(Agent()).explore(1.5) == 3.0
