"""Among many programs, the one that fits is found, and no other is taken."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.engine.program import Program
from bendtrace.errors import TraceLimitWarning
from tests.promise import bits


def by_size(x: Tensor, n: int = 0, flag: bool = False) -> Tensor:
    return x + len((0,) * x.shape[0]) + len(range(x.size(-1))) * 10 + (100 if n == 3 else n) + flag


def kept(bended: bt.BendedModule) -> int:
    return sum(1 for _ in bended._trees.plain.programs())


def test_each_size_is_served_by_its_own_program() -> None:
    bended = bt.BendedModule(by_size, max_traces=None)
    sizes = [(n, m) for n in range(1, 6) for m in range(1, 6)]
    for _ in range(2):
        random.Random(1).shuffle(sizes)
        for size in sizes:
            x = torch.randn(size)
            assert bits(bended(x)) == bits(by_size(x))
    assert bended.stats.traces == len(sizes)
    assert bended.stats.replays == len(sizes)


def test_only_few_of_many_programs_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bended = bt.BendedModule(by_size, max_traces=None)
    for n in range(1, 41):
        bended(torch.ones(n, 2))
    asked: list[Program] = []
    admits = Program.admits

    def noting(self: Program, *args: Any) -> bool:
        asked.append(self)
        return admits(self, *args)

    monkeypatch.setattr(Program, "admits", noting)
    for n in (1, 20, 40, 20):
        asked.clear()
        assert bended(torch.ones(n, 2)).shape == (n, 2)
        assert len(asked) == 1
    asked.clear()
    bended(torch.ones(50, 2))  # a size that is new
    assert not asked


def test_numbers_of_other_types_are_told_apart() -> None:
    bended = bt.BendedModule(by_size, max_traces=None)
    calls: list[tuple[Any, ...]] = [(torch.ones(2, 2), n) for n in range(8)]
    calls += [(torch.ones(2, 2), True), (torch.ones(2, 2), 1.0), (torch.ones(2, 2), 3.0)]
    calls += [(torch.ones(2, 2), 1, True), (torch.ones(2, 2, dtype=torch.float64), 1)]
    calls += [(torch.ones(1, 2, 2), 1), (torch.ones(2), 1), (torch.ones(2, 2, 2), 1)]
    for _ in range(3):
        for args in calls:
            assert bits(bended(*args)) == bits(by_size(*args))
    assert bended.stats.replays >= 2 * len(calls)


def test_programs_that_were_forgotten_are_not_found() -> None:
    bended = bt.BendedModule(by_size, max_traces=6)
    for n in range(1, 7):
        bended(torch.ones(n, 2))
    with pytest.warns(TraceLimitWarning):
        bended(torch.ones(7, 2))
    for n in [*range(8, 20), *range(19, 0, -1)]:
        x = torch.randn(n, 2)
        assert bits(bended(x)) == bits(by_size(x))
    assert kept(bended) == 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_have_no_sizes_are_no_obstacle() -> None:
    def total(x: Tensor) -> Tensor:
        if x.is_nested:
            return x.to_padded_tensor(0.0).sum()
        return x.sum() + len((0,) * x.shape[0])

    bended = bt.BendedModule(total, max_traces=None)
    for n in range(1, 9):
        bended(torch.ones(n))
    for _ in range(2):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert bits(bended(nested)) == bits(total(nested))
        assert bits(bended(torch.tensor(2.0).expand(1))) == bits(total(torch.tensor([2.0])))


def test_a_thousand_paths_that_branch_off_each_other() -> None:
    def halve(x: Tensor) -> Tensor:
        while x > 1:
            x = x / 2
        return x

    bended = bt.BendedModule(halve, max_traces=None)
    for n in range(40):
        x = torch.tensor(2.0**n)
        assert bits(bended(x)) == bits(halve(x))


def test_each_of_many_outcomes_of_one_guard_has_its_own_path() -> None:
    def model(x: Tensor) -> Tensor:
        n = x[0].item()
        return x * len((0,) * int(n)) if n != 3 else x - 1

    values = [0, 1, 2, 3, *range(4, 40), 1.0, 2.0, 2**40]
    bended = bt.BendedModule(lambda x: x + len(str(x.item())), max_traces=None)
    eager: Any = bended.model
    for _ in range(2):
        for value in [*values, 0.0, -0.0, float("nan"), float("inf"), True, False]:
            x = torch.tensor(value)
            assert bits(bended(x)) == bits(eager(x))
    bended = bt.BendedModule(model, max_traces=20)
    for number in range(20):
        bended(torch.tensor([number, 2]))
    bended(torch.tensor([20, 2]))  # one run was recorded with a number that stayed traced
    with pytest.warns(TraceLimitWarning):
        bended(torch.tensor([21, 2]))
    for number in [*range(30), *range(29, -1, -1)]:  # among them some that were forgotten
        x = torch.tensor([number, 2])
        assert bits(bended(x)) == bits(model(x))
