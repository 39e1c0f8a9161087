"""Functions of Python that give a number of numpy's in one call, and of Python in the next.

Other programs with arrays are in `tests/registry/arrays.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.python.results import can_exchange_operands
from bendtrace.record import array_functions
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


def normed(x: Tensor) -> Tensor:
    norms = np.linalg.norm(x.numpy().reshape(2, 2), axis=1)
    return torch.from_numpy(norms / norms.max())


def in_the_memory_of_the_input(x: Tensor) -> Tensor:
    row = torch.from_numpy(np.asarray(x.numpy())[1:])
    if x[0] > 0:
        row.mul_(2)
    return row + x[1:]


def held_by_two(x: Tensor) -> Tensor:
    array = x.numpy() * 2
    one, other = torch.from_numpy(array), torch.from_numpy(array[::2])
    if x[0] > 0:
        one.add_(1)
    return one[::2] + other


def read_after_a_question(x: Tensor) -> Tensor:
    array = np.sort(x.numpy())
    return torch.from_numpy(array[1:]) if x[0] > 0 else torch.from_numpy(array * 2)


ON_ARRAYS = (normed, in_the_memory_of_the_input, held_by_two, read_after_a_question)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", ON_ARRAYS)
def test_arrays_that_no_tensor_stands_for(program: Callable[[Tensor], Tensor], mode: str) -> None:
    bended: Any = bt.BendedModule(program)
    with MODES[mode]():
        for x in torch.randn(40, 4, generator=torch.Generator().manual_seed(0)):
            given, same = x.clone(), x.clone()
            assert torch.equal(bended(given), program(same))
            assert torch.equal(given, same)
    assert bended.stats.live == 0


def test_no_tensor_stands_for_arrays_that_only_their_functions_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bended, made = bt.BendedModule(normed), []
    bended(torch.ones(4))
    inner = array_functions._standing_for
    monkeypatch.setattr(
        array_functions, "_standing_for", lambda *args: made.append(args) or inner(*args)
    )
    x = torch.rand(4)
    assert torch.equal(bended(x), normed(x))
    assert not made
