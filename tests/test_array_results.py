"""Functions of Python that give a number of numpy's in one call, and of Python in the next.

Other programs with arrays are in `tests/registry/arrays.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.python.results import can_exchange_operands
from tests.modes.test_inserted import Seeing
from tests.past_joins import past_joins, resumed_anywhere


def the_greater_of_a_number_and_zero(x: Tensor) -> Tensor:
    array = x.numpy()
    most = max(array[0], 0.0)
    x = x * 2 if array[1] > 0 else x
    return x * float(most)


def the_least_of_a_number_and_a_whole_one(x: Tensor) -> Tensor:
    least = min(x.numpy()[0], 1)
    return x + 1 if least > 0.5 else x


def a_sum_of_nothing_at_times(x: Tensor) -> Tensor:
    array = x.numpy()
    total = sum(array[array > 0.5])
    return x * 2 if total > 1 else x * float(total)


def the_greatest_or_a_default(x: Tensor) -> Tensor:
    array = x.numpy()
    most = max(array[array > 0.5], default=0)
    return x * 2 if most > 1 else x * float(most)


PROGRAMS = (
    the_greater_of_a_number_and_zero, the_least_of_a_number_and_a_whole_one,
    a_sum_of_nothing_at_times, the_greatest_or_a_default,
)  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext, "joined": past_joins, "resumed": lambda: resumed_anywhere(1),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_does_what_eager_does(program: Callable[[Tensor], Tensor], mode: str) -> None:
    bended: Any = bt.BendedModule(program)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    with MODES[mode]():
        assert all(torch.equal(bended(x), program(x)) for x in inputs)
    assert not (can_exchange_operands() and bended.stats.live)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_node_has_one_name_whatever_it_gives(program: Callable[[Tensor], Tensor]) -> None:
    bended: Any = bt.BendedModule(program)
    handle = bended.interject(lambda node: True, Seeing(), allow_none=True)
    for x in torch.randn(40, 4, generator=torch.Generator().manual_seed(0)):
        assert torch.equal(bended(x), program(x))
    found = (bt.node_selector.find(lambda node: True, trace) for trace in bended.traces)
    nodes = {node.path for listed in found for node in listed}
    assert nodes == set(handle.report().paths)
    assert len(bended.traces) > 2
