"""Paths join where runs are in the same state, and nowhere else."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.engine import comparison
from bendtrace.errors import DivergenceError, NondeterminismError
from bendtrace.python import stacks
from bendtrace.python.bytecode import read_later
from bendtrace.record import states
from tests.past_joins import past_joins

pytestmark = pytest.mark.skipif(
    stacks.frame_layout() is None,
    reason="the frames of this Python cannot be read: paths do not join",
)

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {}
WEIGHT = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
OTHER = nn.Parameter(torch.tensor([4.0, 5.0, 6.0]))


class Noted:
    """An object that a branch changes."""

    latest: Tensor

    def __init__(self) -> None:
        self.count = 0


class Around:
    """A context that knows its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = False

    def __enter__(self) -> Around:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True


NOTED = Noted()


def program(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Register a program of two questions and something that only what follows reads."""
    PROGRAMS[function.__name__] = function
    return function


def asks(value: Tensor) -> bool:
    """Ask the second question, the one that paths could join at."""
    return bool(value > 0)


@program
def a_flag(x: Tensor) -> Any:
    flag = False
    if x[0] > 0:
        flag = True
    y = x * 2 if asks(x[1]) else x * 3
    return y + 1 if flag else y


@program
def a_number_of_times(x: Tensor) -> Any:
    count = 0
    for value in x[:1]:
        if value > 0:
            count += 1
    y = x * 2 if asks(x[1]) else x * 3
    return y, count


@program
def a_list_that_grew(x: Tensor) -> Any:
    found: list[int] = []
    if x[0] > 0:
        found.append(1)
    y = x * 2 if asks(x[1]) else x * 3
    return y, list(found)


@program
def a_dict_and_its_order(x: Tensor) -> Any:
    found = {"a": 1, "b": 2}
    if x[0] > 0:
        found["a"] = found.pop("a")
    y = x * 2 if asks(x[1]) else x * 3
    return y, list(found)


@program
def an_order_that_is_kept_apart(x: Tensor) -> Any:
    found = collections.OrderedDict(a=1, b=2)
    if x[0] > 0:
        found.move_to_end("a")
    y = x * 2 if asks(x[1]) else x * 3
    return y, list(found)


@program
def two_lists_or_one(x: Tensor) -> Any:
    one: list[int] = []
    other = one if x[0] > 0 else []
    y = x * 2 if asks(x[1]) else x * 3
    one.append(1)
    return y, list(other)


@program
def two_arrays_in_one_memory(x: Tensor) -> Any:
    one = numpy.array([1, 2])
    other = one[:1] if x[0] > 0 else one.copy()[:1]
    y = x * 2 if asks(x[1]) else x * 3
    one[0] = 7
    return y, int(other[0])


@program
def a_list_in_order(x: Tensor) -> Any:
    found = [1, 2] if x[0] > 0 else [2, 1]
    y = x * 2 if asks(x[1]) else x * 3
    return y + found[0]


@program
def a_tuple(x: Tensor) -> Any:
    found = (1, 2) if x[0] > 0 else (2, 1)
    y = x * 2 if asks(x[1]) else x * 3
    return y + found[0]


@program
def a_closure(x: Tensor) -> Any:
    step = 1

    def add(value: Tensor) -> Tensor:
        return value + step

    if x[0] > 0:
        step = 2
    y = x * 2 if asks(x[1]) else x * 3
    return add(y)


@program
def a_generator(x: Tensor) -> Any:
    numbers = (n for n in (1, 2, 3))
    if x[0] > 0:
        next(numbers)
    y = x * 2 if asks(x[1]) else x * 3
    return y + next(numbers)


@program
def a_loop_of_a_generator(x: Tensor) -> Any:
    def numbers() -> Iterator[int]:
        for n in (1, 2, 3):
            yield n * 2

    found = numbers()
    next(found)
    if x[0] > 0:
        next(found)
    y = x * 2 if asks(x[1]) else x * 3
    return y + next(found)


@program
def a_question_in_a_loop_of_a_generator(x: Tensor) -> Any:
    def numbers() -> Iterator[int]:
        for n in (1, 2) if x[0] > 0 else (3, 4):
            yield (7 if asks(x[1]) else 8) * n

    found = 0
    for number in numbers():
        found = found * 50 + number
    return x, found


@program
def an_iterator(x: Tensor) -> Any:
    numbers = iter([1, 2, 3])
    if x[0] > 0:
        next(numbers)
    y = x * 2 if asks(x[1]) else x * 3
    return y + next(numbers)


@program
def a_loop_around(x: Tensor) -> Any:
    found = x
    for factor in (2, 3) if x[0] > 0 else (5, 7):
        found = found * factor if asks(x[1]) else found + factor
    return found


@program
def operands_that_wait(x: Tensor) -> Any:
    return [1 if x[0] > 0 else 2, x * 2 if asks(x[1]) else x * 3]


@program
def two_names_for_one(x: Tensor) -> Any:
    one, other = x + 1, x + 1
    if x[0] > 0:
        other = one
    y = x * 2 if asks(x[1]) else x * 3
    return y + 1 if one is other else y


@program
def two_views_of_one_memory(x: Tensor) -> Any:
    one = x + 1
    other = one.view(-1) if x[0] > 0 else one.clone()
    y = x * 2 if asks(x[1]) else x * 3
    other.mul_(2)
    return y + one


@program
def what_requires_grad(x: Tensor) -> Any:
    one = x + 1
    if x[0] > 0:
        one = one.detach().requires_grad_()
    y = x * 2 if asks(x[1]) else x * 3
    return y + 1 if one.requires_grad else y


@program
def what_has_another_dtype(x: Tensor) -> Any:
    one = x + 1 if x[0] > 0 else (x + 1).double()
    y = x * 2 if asks(x[1]) else x * 3
    return y, one.dtype, one


@program
def an_exception_that_is_handled(x: Tensor) -> Any:
    try:
        if x[0] > 0:
            raise ValueError("positive")
        found = 0
    except ValueError:
        found = 1
        y = x * 2 if asks(x[1]) else x * 3
        return y + found
    y = x * 2 if asks(x[1]) else x * 3
    return y + found


@program
def an_exception_that_is_looked_at(x: Tensor) -> Any:
    number = 1 if x[0] > 0 else 2
    try:
        raise ValueError(number)
    except ValueError:
        y = x * 2 if asks(x[1]) else x * 3
        return y + sys.exc_info()[1].args[0]  # type: ignore[union-attr]


@program
def an_object_of_the_users(x: Tensor) -> Any:
    noted = Noted()
    if x[0] > 0:
        noted.count += 1
    y = x * 2 if asks(x[1]) else x * 3
    return y + noted.count


@program
def an_object_around(x: Tensor) -> Any:
    NOTED.count = 1 if x[0] > 0 else 2
    y = x * 2 if asks(x[1]) else x * 3
    return y + NOTED.count


@program
def a_bound_method(x: Tensor) -> Any:
    found: list[int] = []
    keep = found.append if x[0] > 0 else [].append
    y = x * 2 if asks(x[1]) else x * 3
    keep(1)
    return y, list(found)


@program
def a_partial_function(x: Tensor) -> Any:
    scale = functools.partial(torch.mul, other=2 if x[0] > 0 else 3)
    y = x * 2 if asks(x[1]) else x * 3
    return scale(y)


@program
def a_set(x: Tensor) -> Any:
    found = {1}
    if x[0] > 0:
        found.add(2)
    y = x * 2 if asks(x[1]) else x * 3
    return y + len(found)


@program
def grad_mode(x: Tensor) -> Any:
    with torch.set_grad_enabled(bool(x[0] > 0)):
        y = x * 2 if asks(x[1]) else x * 3
        return y, torch.is_grad_enabled()


@program
def an_element_that_nothing_used(x: Tensor) -> Any:
    low, high = x.chunk(2)
    kept = low if x[0] > 0 else high
    y = x * 2 if asks(x[1]) else x * 3
    return y, kept + 1


@program
def a_number_that_was_asked_before(x: Tensor) -> Any:
    first = x[0].item()
    sign = x * 5 if first > 0 else x * 7
    y = sign * 2 if asks(x[1]) else sign * 3
    return y + 1 if first > 0 else y - 1


@program
def a_number_that_c_holds(x: Tensor) -> Any:
    def value(n: int) -> int:
        return 1 if x[n] > 0 else 10

    summed, most = sum(value(n) for n in range(3)), max(value(n) for n in range(3))
    return x * summed, most, list(map(value, (0, 1)))


@program
def a_default_of_a_function(x: Tensor) -> Any:
    def add(value: Tensor, step: int = 1 if x[0] > 0 else 2) -> Tensor:
        return value + step

    y = x * 2 if asks(x[1]) else x * 3
    return add(y)


@program
def a_comprehension(x: Tensor) -> Any:
    return [(1 if value > 0 else -1) for value in x]


@program
def a_way_out_of_a_with(x: Tensor) -> Any:
    around = Around("a") if x[0] > 0 else Around("b")
    with around:
        y = x * 2 if asks(x[1]) else x * 3
    return y, around.name, around.left


@program
def a_variable_that_only_a_handler_reads(x: Tensor) -> Any:
    flag = 1 if x[0] > 0 else 2
    try:
        y = x * 2 if asks(x[1]) else x * 3
        if not asks(x[2]):
            raise ValueError
        flag = 3
    except ValueError:
        return x, flag
    return y, flag


@program
def a_variable_that_only_the_next_round_reads(x: Tensor) -> Any:
    flag = 0
    for value in x:
        if flag == 1 and asks(value):
            return x * 5
        flag = 1 if value > 0 else 2
    return x


@program
def a_variable_that_is_looked_at(x: Tensor) -> Any:
    flag = 1 if x[0] > 0 else 2
    y = x * 2 if asks(x[1]) else x * 3
    return y, locals()["flag"]


@program
def a_variable_that_is_deleted(x: Tensor) -> Any:
    if x[0] > 0:
        flag = 1
    y = x * 2 if asks(x[1]) else x * 3
    try:
        del flag
    except UnboundLocalError:
        return y + 1
    return y


@program
def a_variable_that_a_comprehension_hides(x: Tensor) -> Any:
    n = 1 if x[0] > 0 else 2
    found = [n for n in (5, 6) if asks(x[1])]
    return x * 2 if asks(x[2]) else x * 3, n, found


@program
def a_variable_of_a_function_around(x: Tensor) -> Any:
    n = 1 if x[0] > 0 else 2

    def add(value: Tensor) -> Tensor:
        n_here = 4 if asks(x[1]) else 5
        return value + n * n_here

    return add(x * 2) if asks(x[2]) else x


@program
def a_sign_of_zero(x: Tensor) -> Any:
    zero = 0.0 if x[0] > 0 else -0.0
    y = x * 2 if asks(x[1]) else x * 3
    return y, math.copysign(1, zero)


@program
def one_of_two_numbers_of_the_run(x: Tensor) -> Any:
    first, second = x[1].item(), x[2].item()
    number = first if x[0] > 0 else second
    y = x * 2 if asks(x[1]) else x * 3
    return y * number, first, second


@program
def a_parameter_or_not(x: Tensor) -> Any:
    one = torch.ones(3, requires_grad=True) if x[0] > 0 else torch.ones(3)
    y = x * 2 if asks(x[1]) else x * 3
    return y * one


@program
def a_leaf(x: Tensor) -> Any:
    one = torch.ones(3, requires_grad=True) if x[0] > 0 else torch.ones(3) * WEIGHT
    y = x * 2 if asks(x[1]) else x * 3
    return y * one, one.is_leaf


@program
def what_has_another_rank(x: Tensor) -> Any:
    one = x + 1 if x[0] > 0 else (x + 1)[None]
    y = x * 2 if asks(x[1]) else x * 3
    return y, len(one.shape), one


@program
def an_attribute_of_a_tensor(x: Tensor) -> Any:
    one = x + 1
    one.noted = 1 if x[0] > 0 else 2  # type: ignore[attr-defined]
    y = x * 2 if asks(x[1]) else x * 3
    return y + one.noted  # type: ignore[attr-defined]


@program
def a_grad_mode_that_is_set(x: Tensor) -> Any:
    torch.set_grad_enabled(bool(x[0] > 0))
    y = x * WEIGHT if asks(x[1]) else x * 3 * WEIGHT
    torch.set_grad_enabled(True)
    return y


@program
def a_method_of_one_of_two(x: Tensor) -> Any:
    one, other = Around("a"), Around("b")
    leave = one.__exit__ if x[0] > 0 else other.__exit__
    y = x * 2 if asks(x[1]) else x * 3
    leave()
    return y, one.left, other.left


@program
def a_size(x: Tensor) -> Any:
    size = torch.Size((3, 1) if x[0] > 0 else (1, 3))
    y = x * 2 if asks(x[1]) else x * 3
    return y.view(size), frozenset(size)


@program
def a_frozen_set(x: Tensor) -> Any:
    found = frozenset((1,)) if x[0] > 0 else frozenset((2,))
    y = x * 2 if asks(x[1]) else x * 3
    return y + min(found)


@program
def a_slice(x: Tensor) -> Any:
    part = slice(0, 2) if x[0] > 0 else slice(1, 3)
    y = x * 2 if asks(x[1]) else x * 3
    return y[part]


class Summed(Noted):
    """Asks a question when it is added to."""

    def __radd__(self, other: Any) -> Any:
        del other
        return self.count * 2 if asks(SEEN[0]) else self.count * 3


SEEN: list[Tensor] = []


@program
def a_weight_or_another(x: Tensor) -> Any:
    one = WEIGHT.contiguous() if x[0] > 0 else OTHER.contiguous()  # which copies neither
    y = x * 2 if asks(x[1]) else x * 3
    return y, one is WEIGHT


@program
def a_weight_that_is_given_back_or_copied(x: Tensor) -> Any:
    one = WEIGHT.contiguous() if x[0] > 0 else WEIGHT.clone()
    del one
    y = x * 2 if asks(x[1]) else x * 3
    return y * WEIGHT


@program
def a_size_that_is_counted_on(x: Tensor) -> Any:
    size = x.size(0) if x[0] > 0 else x.size(0) + 2
    y = x * 2 if asks(x[1]) else x * 3
    size = size + 1
    y = y + 1 if asks(x[2]) else y
    return y, size


@program
def a_number_added_to_a_size(x: Tensor) -> Any:
    number = (3 if x[0] > 0 else 5) + x.size(0)
    for value in x[1:]:
        number = number + 1
        x = x * 2 if asks(value) else x * 3
    return x, number


@program
def what_c_is_given(x: Tensor) -> Any:
    SEEN[:] = [x[1]]
    return x + ((1 if x[0] > 0 else 2) + Summed())


class Notes(nn.Module):
    """Notes the first answer in an attribute, and reads it after the second question."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        self.noted = 1 if x[0] > 0 else 2
        y = x * 2 if asks(x[1]) else x * 3
        return y + self.noted


INPUTS = [torch.tensor(signs) for signs in itertools.product((1.0, -1.0), repeat=3)]
# Each order comes to another state first.
ORDERS = [INPUTS, INPUTS[::-1], INPUTS[3:] + INPUTS[:3], INPUTS[5:] + INPUTS[:5]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other and type(one) is type(other))


def is_right(function: Callable[[Tensor], Any], order: list[Tensor]) -> bool:
    bended = bt.BendedModule(function)
    inputs = order * 2
    return all(same(bended(x.clone()), function(x.clone())) for x in inputs)


@pytest.mark.parametrize("order", range(len(ORDERS)))
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_only_later_code_reads_keeps_states_apart(name: str, order: int) -> None:
    assert is_right(PROGRAMS[name], ORDERS[order])


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_an_attribute_keeps_states_apart(order: int) -> None:
    assert is_right(Notes(), ORDERS[order])


class Twice(nn.Module):
    """Is given its own buffer, or something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(3.0) + 5)
        self.shift = nn.Parameter(torch.ones(3) * 0.5)
        self.last = torch.zeros(3)
        self.kept = {"last": torch.ones(3)}

    def forward(self, x: Tensor, y: Tensor, signs: Tensor) -> Any:
        h = x * 1.0
        self.last = y.view(3) if signs[0] > 0 else self.kept["last"]
        z = torch.where(self.scale > 0, self.shift, self.scale)
        if signs[1] > 0:
            h = z[:]
        self.kept["last"] = x * 2 if signs[2] > 0 else z.contiguous()
        return h, z


def test_runs_that_were_given_a_buffer_are_not_compared_with_others() -> None:
    model, other = Twice(), Twice()
    bended = bt.BendedModule(model)
    for is_given, *signs in (
        (False, -1.0, 1.0, -1.0), (False, -1.0, 1.0, 1.0), (True, 1.0, 1.0, -1.0),
        (True, 1.0, -1.0, 1.0), (True, -1.0, -1.0, -1.0),
    ):  # fmt: skip
        given = [called.scale if is_given else torch.zeros(3) for called in (model, other)]
        y, asked = torch.ones(3), torch.tensor(signs)
        assert same(bended(given[0], y, asked), other(given[1], y, asked))
        assert torch.equal(model.last, other.last)
        assert torch.equal(model.kept["last"], other.kept["last"])


def test_a_state_that_cannot_be_read_after_an_op_that_gives_nothing() -> None:
    def model(x: Tensor) -> Tensor:
        x = x + 0.5
        x[0] = 1
        while math.sin(x.sum().item()) > 0:
            x = x + 1
        return x

    assert is_right(model, [torch.full((3,), float(number)) for number in range(6)])


def test_a_mode_around_a_call_keeps_no_states_apart() -> None:
    class Around(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return op(*args, **(kwargs or {}))

    def model(x: Tensor) -> Tensor:
        for bias in (0.0, 4.0):
            x = x.relu() + 1 if x.sum() > bias else x - 3
        return x

    bended = bt.BendedModule(model)
    for value, around in (
        (2.0, contextlib.nullcontext),
        (-2.0, Around),
        (5.0, contextlib.nullcontext),
    ):
        with around():
            x = torch.tensor([value])
            assert torch.equal(bended(x), model(x))
    assert len(bended.tree) == 1


def test_what_is_written_before_it_is_read_keeps_no_states_apart() -> None:
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def routed(x: Tensor) -> Tensor:
        for _ in range(4):
            chosen = int(x.argmax())
            expert = experts[chosen]
            x = expert(x)
        return x

    bended = bt.BendedModule(routed)
    torch.manual_seed(0)
    for x in torch.randn(400, 4):
        assert torch.equal(bended(x), routed(x))
    asked = [data for _, data in bended.graph.nodes(data=True) if data.get("known_by") == "state"]
    assert len(asked) <= 5  # x is the argument in the first round


def test_variables_are_alive_until_they_are_read_last() -> None:
    def code(x: Any, n: int) -> Any:
        for i in range(n):
            j = i * 2
            print(x)
            try:
                j = print(n)
            except ValueError:
                print(j)
        return lambda: x

    at = {}
    for step in dis.get_instructions(code):
        if step.opname.startswith("CALL"):
            names = enumerate(code.__code__.co_varnames)
            at[len(at)] = {n for k, n in names if read_later(code.__code__, step.offset) >> k & 1}
    assert at == {0: {"x", "n"}, 1: {"x", "n", "j"}, 2: {"x", "n", "j"}, 3: {"x", "n"}}


def test_code_that_asks_for_attributes_joins() -> None:
    def asks(x: Tensor) -> Tensor:
        if hasattr(x, "doubled"):
            return x
        for position in range(6):
            x = x + getattr(x, "none", 1) if x[position] > 0 else x * 2
        return x

    bended = bt.BendedModule(asks)
    torch.manual_seed(0)
    for x in torch.randn(100, 6):
        assert torch.equal(bended(x), asks(x))
    assert bended.stats.traces <= 12, bended.stats
    assert bended.stats.live == 0


class Reading(nn.Module):
    """A block that asks its weight for metadata."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1.1))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.read(self.weight) else x


class ReadingInBranches(nn.Module):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other = Reading(read), Reading(read)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        for gate in gates:
            if gate > 0.5:
                x = self.one(x)
            elif gate < -0.5:
                x = self.other(x)
        return x


READ: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda weight: weight.dtype is torch.float32,
    "dim": lambda weight: weight.dim() == 1,
    "requires_grad": lambda weight: weight.requires_grad,
    "device": lambda weight: weight.device.type == "cpu",
    "is_contiguous": lambda weight: weight.is_contiguous(),
    "shape": lambda weight: weight.shape[0] > 2,
}


@pytest.mark.parametrize("read", READ)
def test_metadata_of_weights_that_branches_read_keeps_no_states_apart(read: str) -> None:
    """What one branch has asked a weight, another may ask again."""
    model = ReadingInBranches(READ[read])
    bended = bt.BendedModule(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        x = torch.randn(3, generator=generator)
        gates = torch.randn(5, generator=generator)
        assert torch.equal(bended(x, gates), model(x, gates))
    assert bended.stats.traces <= 12


def test_metadata_that_only_one_branch_has_read_is_no_other_run() -> None:
    def model(x: Tensor, gates: Tensor) -> Any:
        size = len(x) if gates[0] > 0 else 2 * len(x)
        if gates[1] > 0:
            size = x.dim()
        if gates[2] > 0:
            size = 2
        if gates[3] > 0:
            x = x + 1
        return x * size, x.dim()

    bended = bt.BendedModule(model)
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        x = torch.randn(2 + number % 2, 2, generator=generator)
        gates = torch.randn(4, generator=generator)
        assert same(bended(x, gates), model(x, gates))


def test_branches_join() -> None:
    layers = [nn.Linear(4, 4) for _ in range(10)]

    def gated(x: Tensor) -> Tensor:
        for layer in layers:
            h = layer(x)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) + x
        return x

    bended = bt.BendedModule(gated)
    torch.manual_seed(0)
    for x in torch.randn(400, 4):
        assert torch.equal(bended(x), gated(x))
    assert bended.stats.traces < 20, bended.stats  # of 20 pairs of a question and an answer
    assert bended.stats.live == 0


class Remembers(nn.Module):
    """Notes its latest value, and how often it went each way, before each question."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)
        self.kept = {"last": torch.zeros(3)}
        self.noted = Noted()
        self.noted.latest = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.sum(0)
        for gate in range(8):
            self.last = y * 1
            self.kept["last"] = y + 1
            y = torch.relu(y) + 1 if x[gate].mean() > 0 else torch.tanh(y) - 1
            self.noted.count, self.noted.latest = gate // 4, y
        return y


def test_branches_behind_changed_attributes_join() -> None:
    """What has been changed so far is part of a state, and can be read."""
    model, other = Remembers(), Remembers()
    bended = bt.BendedModule(model)
    torch.manual_seed(0)
    for x in torch.randn(200, 8, 3):
        assert torch.equal(bended(x), other(x))
        assert torch.equal(model.last, other.last)
        assert torch.equal(model.kept["last"], other.kept["last"])
        assert torch.equal(model.noted.latest, other.noted.latest)
        assert model.noted.count == other.noted.count
    assert bended.stats.traces < 18  # of 16 pairs of a question and an answer
    assert bended.stats.live == 0


def test_loops_close() -> None:
    def halve(x: Tensor) -> Tensor:
        while x.norm() > 0.1:
            x = x * 0.7
        return x

    bended = bt.BendedModule(halve)
    torch.manual_seed(0)
    for scale in torch.rand(200) * 50:
        x = torch.ones(2) * scale
        assert torch.equal(bended(x), halve(x))
    assert bended.stats.traces <= 4, bended.stats


def test_a_trace_goes_the_way_of_its_run_alone() -> None:
    def model(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x

    trace = bt.trace(model, torch.tensor([3.0]))
    assert torch.equal(trace.replay(torch.tensor([2.5])), torch.tensor([0.625]))
    for rounds in (0.5, 1.5, 9.0):
        with pytest.raises(DivergenceError, match=r"x\.norm"):
            trace.replay(torch.tensor([rounds]))
    bended = bt.BendedModule(model)
    bended(torch.tensor([3.0]))
    assert torch.equal(bended(torch.tensor([9.0])), model(torch.tensor([9.0])))
    assert bended.stats.replays == 1


def test_what_is_counted_as_traces_is_what_was_recorded() -> None:
    def model(x: Tensor) -> Tensor:
        for value in (0.0, 1.0, 2.0):
            x = x + 1 if x.sum() > value else x - 1
        return x

    bended = bt.BendedModule(model)
    for x in torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 3:
        assert torch.equal(bended(x), model(x))
    (program,) = bended.tree.programs
    assert program.traces == bended.stats.traces == len(bended.traces)
    assert program.runs == 50


def test_gradients_are_those_of_the_path_taken() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def gated(x: Tensor) -> Tensor:
        for layer in layers:
            h = layer(x)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) * x
        return x

    bended = bt.BendedModule(gated)
    torch.manual_seed(0)
    for x in torch.randn(100, 4):
        found = []
        for call in (gated, bended):
            layers.zero_grad()
            given = x.clone().requires_grad_()
            call(given).sum().backward()
            found.append([given.grad, *(p.grad for p in layers.parameters())])
        for one, other in zip(*found, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_reading_a_state_leaves_views_as_they_are() -> None:
    """A view of what has come to require grad counts as a leaf, until its grad_fn is asked for."""
    weight = nn.Parameter(torch.ones(2))

    def model(x: Tensor) -> Tensor:
        x = x + 0
        view = x.view(-1)
        x += weight
        if x.sum() > 0:
            x = x * 2
        view[torch.tensor([True, False])] = 0
        return x

    for call in (model, bt.BendedModule(model)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            call(torch.ones(2))


def test_random_numbers_are_drawn_as_by_the_model() -> None:
    def noisy(x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.dropout(x, 0.3, True)
            x = x + torch.rand(4) if x.sum() > 1 else x - torch.rand(4)
        return x

    bended = bt.BendedModule(noisy)
    for seed in range(60):
        found = []
        for call in (noisy, bended):
            torch.manual_seed(seed)
            found.append((call(torch.ones(4)), torch.get_rng_state()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
    assert bended.stats.traces < 16, bended.stats


READER = states._StateWalk
_begin, _frame = READER.__init__, READER._frame
_tensor, _scalar, _facts = READER._tensor, READER._scalar, READER._facts


def frame_without(**held: Any) -> Callable[..., Any]:
    return lambda self, stack: _frame(self, stack._replace(**held))


def tensor_without(*facts: int) -> Callable[..., Any]:
    def read(self: Any, tensor: Tensor) -> Any:
        return [fact for k, fact in enumerate(_tensor(self, tensor)) if k not in facts]

    return read


def facts_without(number: int) -> Callable[..., Any]:
    def read(self: Any, tensor: Tensor) -> Any:
        facts = _facts(self, tensor)
        return facts[:number] + facts[number + 1 :]

    return read


class Blind(dict[int, int]):
    """What has been met is met for the first time."""

    def get(self, key: int, default: Any = None) -> Any:
        return default


def unseeing(self: Any, *given: Any) -> None:
    _begin(self, *given)
    self._seen = Blind()


# Parts of the key: what reads each, something that leaves it out, and programs that are then in
# one state where they were in several.
LEFT_OUT: dict[str, tuple[Any, str, Callable[..., Any], tuple[str, ...]]] = {
    "variables": (READER, "_frame", frame_without(slots=[]), ("a_flag", "a_number_of_times")),
    "the stack": (
        READER, "_frame", frame_without(below=[]),
        ("operands_that_wait", "a_loop_of_a_generator"),
    ),
    "what C is given": (READER, "_frame", frame_without(operands=None), ("what_c_is_given",)),
    "what a variable holds": (states, "read_later", lambda *_: 0, ("a_flag",)),
    "lists": (READER, "list", lambda self, found: len(found), ("a_list_in_order",)),
    "tuples": (READER, "tuple", lambda self, found: len(found), ("a_tuple",)),
    "sets": (READER, "set", lambda self, found: 0, ("a_set",)),
    "frozen sets": (READER, "frozenset", lambda self, found: 0, ("a_frozen_set",)),
    "slices": (READER, "slice", lambda self, found: 0, ("a_slice",)),
    "sizes": (READER, "Size", lambda self, found: 0, ("a_size",)),
    "mappings": (READER, "_mapping", lambda self, found: len(found), ("a_dict_and_its_order",)),
    "content of objects": (
        READER, "_other", lambda self, value, kind: id(kind),
        ("an_object_of_the_users", "an_order_that_is_kept_apart"),
    ),
    "arrays": (READER, "_array", lambda self, array: 0, ("two_arrays_in_one_memory",)),
    "which objects are one": (READER, "__init__", unseeing, ("two_lists_or_one",)),
    "iterators": (READER, "_read_by_reduce", lambda self, iterator: 0, ("an_iterator",)),
    "generators": (READER, "_generator", lambda self, generator: 0, ("a_generator",)),
    "cells": (READER, "_cell", lambda self, cell: 0, ("a_closure",)),
    "defaults": (
        READER, "_function", lambda self, function: id(function.__code__),
        ("a_default_of_a_function",),
    ),
    "partial functions": (READER, "partial", lambda self, partial: 0, ("a_partial_function",)),
    "methods": (READER, "method", lambda self, method: 0, ("a_method_of_one_of_two",)),
    "methods of C": (READER, "_builtin", lambda self, method: 0, ("a_bound_method",)),
    "which value a tensor is": (
        READER, "_tensor", tensor_without(0), ("an_element_that_nothing_used",),
    ),
    "which weight a tensor is": (READER, "_tensor", tensor_without(1), ("a_weight_or_another",)),
    "dtypes": (READER, "_facts", facts_without(1), ("what_has_another_dtype",)),
    "ranks": (READER, "_facts", facts_without(2), ("what_has_another_rank",)),
    "what requires grad": (READER, "_facts", facts_without(5), ("a_parameter_or_not",)),
    "what is a leaf": (READER, "_facts", facts_without(6), ("a_leaf",)),
    "memory": (READER, "_tensor", tensor_without(3), ("two_views_of_one_memory",)),
    "attributes of tensors": (
        READER, "_tensor", tensor_without(4), ("an_attribute_of_a_tensor",),
    ),
    "which number a scalar is": (
        READER, "_scalar", lambda self, scalar: _scalar(self, scalar)[:1],
        ("one_of_two_numbers_of_the_run",),
    ),
    "changes": (READER, "changes", lambda self: (), ("an_object_around",)),
    "modes and exceptions": (
        states, "_global_state", lambda modes: (),
        ("a_grad_mode_that_is_set", "an_exception_that_is_looked_at"),
    ),
}  # fmt: skip


def asked_in(function: Callable[[Tensor], Any]) -> int:
    """Return in how many states a program asks what is asked in the end."""
    bended = bt.BendedModule(function)
    for x in INPUTS * 2:
        bended(x.clone())
    return sum(data["text"] == "bool(value > 0)" for _, data in bended.graph.nodes(data=True))


@pytest.mark.parametrize("part", LEFT_OUT)
def test_each_part_of_a_state_keeps_some_apart(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, programs = LEFT_OUT[part]
    # Runs are compared as they are added, which finds most of what would be wrong.
    monkeypatch.setattr(comparison, "repeats_path", lambda *_: True)
    apart = [asked_in(PROGRAMS[program]) for program in programs]
    kinds = [
        kind
        for kind, reader in states._READERS.items()
        if kind.__name__ == name or reader is getattr(owner, name, None)
    ]
    for kind in kinds:
        monkeypatch.setitem(states._READERS, kind, instead)
    if hasattr(owner, name):
        monkeypatch.setattr(owner, name, instead)
    for program, number in zip(programs, apart, strict=True):
        assert asked_in(PROGRAMS[program]) < number, program


def test_what_c_may_hold_is_in_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "may_hide", lambda *_: False)
    monkeypatch.setattr(comparison, "repeats_path", lambda *_: True)
    assert not all(is_right(PROGRAMS["a_number_that_c_holds"], order) for order in ORDERS)


def test_a_run_that_does_not_fit_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is missing in the key, a run is compared with what is known where it joins."""
    monkeypatch.setattr(states._StateWalk, "changes", lambda self: ())
    with pytest.raises(NondeterminismError, match="where it did"):
        is_right(Notes(), INPUTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_past_joins_calls_do_what_is_known(name: str) -> None:
    with past_joins():
        assert is_right(PROGRAMS[name], INPUTS)


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_recorded_past_joins_a_wrong_one_is_found(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays would go wrong unnoticed, in some orders of calls."""
    monkeypatch.setattr(READER, "_other", lambda self, value, kind: id(kind))
    with past_joins(), pytest.raises(NondeterminismError, match="where it did"):
        is_right(PROGRAMS["an_object_of_the_users"], ORDERS[order])


def test_a_value_that_is_used_many_times_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + x
        return x

    bended = bt.BendedModule(model)
    bended(torch.ones(2))
    (program,) = bended._trees.plain.programs()
    walk: Any = object.__new__(READER)
    walk._ops, walk.holes = program.recording.tape.ops, {}
    described = []
    describe = READER._describe

    def noted(self: Any, index: int, *rest: Any) -> Any:
        described.append(index)
        return describe(self, index, *rest)

    monkeypatch.setattr(READER, "_describe", noted)
    last, before = walk._describe(12, 12, {}), walk._describe(11, 12, {})
    assert last != before
    assert last == walk._describe(12, 12, {})
    assert len(described) == 2 * (2 * 12 + 1) + 2 * 11 + 1  # and not some thousand times


def test_numbers_that_are_asked_for_are_told_apart_by_their_bits() -> None:
    def model(x: Tensor) -> Tensor:
        return x * len(f"{x[0].item()!r}")

    bended = bt.BendedModule(model)
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32).item()
    numbers = [0.0, -0.0, 1.5, math.nan, -1.5, math.inf, other_nan]
    for number in numbers * 3:
        x = torch.tensor([number, 2.0])
        assert torch.equal(bended(x)[1:], model(x)[1:])
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2 * len(numbers)


def test_frames_are_read_as_they_are() -> None:
    """Reading the same frames twice gives the same, whatever runs in between."""
    places = stacks.frame_layout()
    assert places is not None
    read: list[Any] = []

    class Asked:
        def __bool__(self) -> bool:
            read.append(stacks.read_frame(sys._getframe(1), sys._getframe(), places))
            return True

    def inner(asked: Asked, number: int) -> list[Any]:
        with threading.Lock():
            return [number, [n for n in (1, 2) if asked], {"k": 1 if asked else 2}]

    for number in range(200):
        found = inner(Asked(), number)
        assert found == [number, [1, 2], {"k": 1}]
    for stack in read:
        assert stack is not None
        assert any(type(value) is Asked for value in (*stack.slots, *(stack.operands or ())))
