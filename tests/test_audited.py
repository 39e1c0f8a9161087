"""Programs that an audit found to be silently wrong, each the smallest that showed it.

Some were not silent: they were refused, with an error that blamed the program.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import io
import itertools
import math
import random
import signal
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import manual_seed as seed_all
from torch import nn

import bendtrace as bt
from tests.promise import Inputs, assert_promise, bits, state

Call = Callable[[Any], tuple[Any, ...]]
Look = Callable[[Any, Any], Any]


class Case(NamedTuple):
    """A program, what it is called with, and what of its outputs is compared."""

    make: Callable[[], Callable[..., Any]]
    calls: list[Call]
    look: Look


CASES: dict[str, Case] = {}


def case(*calls: Call, look: Look = lambda model, out: out) -> Callable[[Any], Any]:
    """Add a function, or a class of modules, to the programs.

    Args:
        calls: each makes the arguments of one call, and may change the model that it is given.
        look: gives what is compared, of the model and its output; may change the output.
    """

    def add(program: Any) -> Any:
        make = program if isinstance(program, type) else lambda: program
        CASES[program.__name__] = Case(make, list(calls), look)
        return program

    return add


def told(program: Case, wrap: Callable[[Any], Callable[..., Any]]) -> list[Any]:
    """Call a program and return all that it gives and changes, call by call."""
    torch.manual_seed(0)
    model = program.make()
    called = wrap(model)
    results = []
    for call in program.calls:
        arguments = call(model)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            out = program.look(model, called(*arguments))
        results.append([bits(out), printed.getvalue(), bits(arguments), state(model)])
    return results


def x(*values: float) -> Call:
    """One tensor with these numbers."""
    return lambda model: (torch.tensor([float(value) for value in values]),)


def args(make: Callable[[], tuple[Any, ...]]) -> Call:
    return lambda model: make()


def after(change: Callable[[Any], object], *values: float) -> Call:
    """One tensor, once the model is changed."""

    def call(model: Any) -> tuple[Any, ...]:
        change(model)
        return x(*(values or (1, 2, 3)))(model)

    return call


SOME = [x(1, 2, 3), x(2, 3, 4), x(5, 6, 7)]
SIGNS = [x(*signs) for signs in itertools.product((1, -1), repeat=3)] * 2
BOTH = [x(1, 2), x(1, 2), x(-1, -2), x(3, 3), x(-1, -1)]
BOTH_BACK = [x(-1, -2), x(-1, -2), x(1, 2), x(-3, -3), x(1, 1)]


# One thing given twice


def twice(*sizes: int) -> Call:
    def make() -> tuple[Any, ...]:
        size = tuple(sizes)
        return torch.tensor([1.0, 2.0]), size, size

    return args(make)


@case(twice(3, 4), twice(3, 4), twice(5, 6), twice(7, 8))
def a_tuple_given_twice(x: torch.Tensor, one: Any, other: Any) -> Any:
    return x * other[0] + one[1]


# Branches that join, with what they leave under one name


def keeping(value: Any) -> Callable[[], Any]:
    kept = [value]
    return lambda: kept


TENSOR_TWO, TENSOR_THREE = keeping(torch.ones(1) * 2), keeping(torch.ones(1) * 3)


@case(*SIGNS)
def tensors_of_two_closures(x: torch.Tensor) -> Any:
    kept = TENSOR_TWO() if x[0] > 0 else TENSOR_THREE()
    x = x * 2 if x[1] > 0 else x * 3
    x = x + 1 if x[2] > 0 else x - 1
    return x * kept[0]


def module(name: str, table: float) -> Any:
    """A module whose table has a name that a table of the other has too."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    source = f"import torch\nTABLE = torch.full((3,), {table})\ndef get():\n    return TABLE"
    exec(source, made.__dict__)
    return made


ONE, OTHER = module("audited_one", 2.0), module("audited_other", 3.0)


@case(*SIGNS)
def tables_of_two_modules(x: torch.Tensor) -> Any:
    table = ONE.get() if x[0] > 0 else OTHER.get()
    return table * x if x[1] > 0 else table + x


class Shown:
    """Two of these have one repr."""

    def __repr__(self) -> str:
        return "Shown"


FIRST, SECOND = Shown(), Shown()
TABLES = {FIRST: torch.ones(3), SECOND: torch.full((3,), 6.0)}


@case(*SIGNS)
def keys_of_one_repr(x: torch.Tensor) -> Any:
    table = TABLES[FIRST] if x[0] > 0 else TABLES[SECOND]
    return table * x if x[1] > 0 else table + x


TABLE = torch.full((3,), 4.0)


def get_table() -> torch.Tensor:
    return TABLE


@case(*[args(lambda c=c: (*c(None), torch.ones(3))) for c in SIGNS])
def an_argument_and_a_global(x: torch.Tensor, TABLE: Any) -> Any:
    table = TABLE if x[0] > 0 else get_table()
    return table * x if x[1] > 0 else table + x


class ConfigA:
    table = torch.ones(3)
    numbers: ClassVar = {"n": 0}


class ConfigB:
    table = torch.full((3,), 5.0)
    numbers: ClassVar = {"n": 0}


@case(*SIGNS)
def tables_of_two_classes(x: torch.Tensor) -> Any:
    table = ConfigA.table if x[0] > 0 else ConfigB.table
    return table * x if x[1] > 0 else table + x


def reset_configs(model: Any) -> None:
    ConfigA.numbers["n"] = ConfigB.numbers["n"] = 0


@case(
    *[after(reset_configs, *signs) for signs in itertools.product((1, -1), repeat=3)],
    look=lambda model, out: [out, ConfigA.numbers["n"], ConfigB.numbers["n"]],
)
def a_change_of_one_of_two_classes(x: torch.Tensor) -> Any:
    (ConfigA if x[0] > 0 else ConfigB).numbers["n"] = 5
    y = x * 2 if x[1] > 0 else x * 3
    return y * ConfigA.numbers["n"] + ConfigB.numbers["n"] if x[2] > 0 else y


@case(*SIGNS)
def a_name_that_holds_empty(x: torch.Tensor) -> Any:
    if x[0] > 0:
        held = "empty"
    x = x * 2 if x[1] > 0 else x * 3
    x = x + 1 if x[2] > 0 else x - 1
    try:
        k = len(held)
    except NameError:
        k = 9
    return x + k


ORDERS = [(1, -1, 1), (-1, 1, 1), (1, 1, 1), (1, 1, -1), (-1, 1, -1), (1, -1, -1), (1, 1, -1)]


@case(*[args(lambda s=s: (*x(*s)(None), {"a": torch.zeros(2)})) for s in ORDERS])
def a_view_or_a_copy_that_is_written(x: torch.Tensor, held: Any) -> Any:
    table = held["a"]
    y = table.view(-1) if x[0] > 0 else table.clone().view(-1)
    del table
    if x[1] > 0:
        y.add_(1)
    return y * 2 if x[2] > 0 else y * 3


@case(*[x(*s) for s in ORDERS])
class ViewOrCopyOfABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.held.view(-1) if x[0] > 0 else self.held.clone().view(-1)
        if x[1] > 0:
            y.add_(1)
        return y * 2 if x[2] > 0 else y * 3


# Branches that join while code of C has something in hand


MIXED = random.Random(1).choices(SIGNS, k=60)


@case(*MIXED)
def items_of_one_of_two_dicts(x: torch.Tensor) -> Any:
    one = {"a": 1, "b": 2, "c": 3}
    other, found = dict(one), 0
    for value in (one if x[0] > 0 else other).values():
        if x[1] > 0:
            one["c"] = 9
        found = found * 10 + value
    return x, found


@case(*MIXED)
def numbered_items_of_one_of_two_dicts(x: torch.Tensor) -> Any:
    one = {"a": 1, "b": 2, "c": 3}
    other, found = dict(one), 0
    for place, (_, value) in enumerate((one if x[0] > 0 else other).items()):
        if x[1] > 0:
            one["c"] = 9
        found = found * 10 + value * place
    return x, found


class Signed:
    """Asks for the sign of a tensor whenever somebody wants to know something of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "plus" if self.value > 0 else "minus"

    def __index__(self) -> int:
        return 1 if self.value > 0 else 2


@case(*MIXED)
def a_text_of_a_list_of_objects(x: torch.Tensor) -> Any:
    return x, str([Signed(value) for value in x])


@case(*MIXED)
def a_text_with_a_tuple_of_objects_in_it(x: torch.Tensor) -> Any:
    return x, f"{(Signed(x[0]), Signed(x[1]), Signed(x[2]))}"


@case(*MIXED)
def a_text_of_a_dict_of_objects(x: torch.Tensor) -> Any:
    return x, repr({"a": Signed(x[0]), "b": Signed(x[1])})


@case(*MIXED)
def a_text_of_an_object_of_c(x: torch.Tensor) -> Any:
    return x, repr(types.SimpleNamespace(a=Signed(x[0]), b=Signed(x[1]), c=Signed(x[2])))


@case(*MIXED)
def a_range_between_two_objects(x: torch.Tensor) -> Any:
    return x, list(range(Signed(x[0]), 10, Signed(x[1])))


@case(*MIXED)
def a_slice_between_two_objects(x: torch.Tensor) -> Any:
    found = list(range(9))
    found[Signed(x[0]) : Signed(x[1])] = [7, 7]
    return x, found, found[Signed(x[1]) : 8 : Signed(x[2])]


@case(*MIXED)
def what_several_generators_give(x: torch.Tensor) -> Any:
    def one(value: torch.Tensor) -> Iterator[int]:
        yield 1 if value > 0 else 2

    return x, [*next(zip(one(x[0]), one(x[1]), one(x[2]), strict=True))]


@case(*MIXED)
def what_a_call_is_given_by_a_generator(x: torch.Tensor) -> Any:
    def some() -> Iterator[int]:
        for value in x:
            yield 1 if value > 0 else 2

    def told(*given: int, last: int = 0) -> Any:
        return [*given, last]

    return x, told(*some()), told(*some(), last=3)


@case(*MIXED)
def what_a_call_is_given_by_a_list(x: torch.Tensor) -> Any:
    def told(*given: torch.Tensor) -> int:
        found = 0
        for value in given:
            found = found * 2 + (1 if value > 0 else 0)
        return found

    return x, told(*[value * 2 for value in x]), told(*(value * 3 for value in x))


@case(*MIXED)
def a_size_that_an_object_stands_for(x: torch.Tensor) -> Any:
    return torch.zeros(Signed(x[0]), Signed(x[1])), x.view(1, -1).expand(Signed(x[2]), -1)


@case(*MIXED)
def a_slice_of_a_tensor_up_to_an_object(x: torch.Tensor) -> Any:
    y = x.clone()
    y[Signed(x[1]) :] = 5
    return x[: Signed(x[0])], x[None, Signed(x[1]) : Signed(x[2])], y


@case(*MIXED)
def an_array_that_is_locked(x: torch.Tensor) -> Any:
    array = np.arange(3.0)
    if x[0] > 0:
        array.flags.writeable = False
    y = x * 2 if x[1] > 0 else x * 3
    try:
        array[0] = 7
    except ValueError:
        y = y + 1
    return y, array.tolist()


# Facts of a tensor that were asked before a write


@case(*SOME)
def a_version_after_a_write(x: torch.Tensor) -> Any:
    y = torch.zeros(3)
    before = y._version
    y[0] = x[0]
    return x * (y._version - before)


WEIGHT = torch.ones(1, requires_grad=True)


@case(*SOME)
def requires_grad_after_a_write(x: torch.Tensor) -> Any:
    y = torch.zeros(3)
    before = y.requires_grad
    y[0] = WEIGHT[0] * 2
    return x * (2 if y.requires_grad else 3), before


@case(*SOME)
def is_leaf_after_a_write_to_a_part(x: torch.Tensor) -> Any:
    y = x.clone()
    if y.is_leaf:
        x = x + 1
    y[1:] = WEIGHT
    return x * 2 if y.is_leaf else x * 3


@case(*SOME)
def sizes_of_two_outs(x: torch.Tensor) -> Any:
    values, indices = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    before = values.nbytes
    torch.max(x[None], 0, out=(values, indices))
    return values * (values.nbytes - before) * (values.dim() + 1) * values.size(0)


def outs(columns: int) -> Call:
    return args(lambda: (torch.ones(2, columns), torch.zeros(3), torch.zeros(3, dtype=torch.long)))


@case(outs(3), outs(3), outs(1))
def sizes_of_outs_that_are_given(x: torch.Tensor, values: Any, indices: Any) -> Any:
    torch.max(x, 0, out=(values, indices))
    return values * 2 if values.size(0) > 2 else values * 3


@case(*[x(1)] * 5)
class ABufferWhoseDataIsSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        self.held.data = torch.cat([self.held, self.held])
        return x * 2 if self.held.shape[0] > 4 else x * 5


@bt.opaque
def grow(held: torch.Tensor) -> None:
    held.resize_(held.shape[0] + 1).fill_(2)


@case(*[x(1, 2)] * 6)
class ABufferThatOneOpResizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        grow(self.held)
        size = self.held.shape[0]
        return x * size * (100 if size > 3 else 1)


@case(*[args(lambda s=s: (torch.ones(s),)) for s in ((2, 5), (2, 5), (1, 5), (3, 5), (1, 5))])
def a_rank_of_cov(x: torch.Tensor) -> Any:
    spread = torch.cov(x)
    return spread * 2 if spread.ndim == 0 else spread.sum(0) + 1


@case(*[args(lambda n=n: (torch.ones(2, 3, 4), n)) for n in (0, 0, 2, 1, 0)])
def a_rank_of_flatten_from_a_number(x: torch.Tensor, n: int) -> Any:
    y = x.flatten(n)
    return y * 2 if y.dim() == 1 else y * 3


@case(*[args(lambda n=n: (torch.ones(2, 2), n)) for n in (2, 2, 1, 0)])
def a_rank_of_tensordot_over_a_number(x: torch.Tensor, n: int) -> Any:
    y = torch.tensordot(x, x, n)
    return y * 2 if y.dim() == 0 else y * 3


@case(x(1, 2, 3), x(1, 2, 3), x(-1, -2, -3), x(-5, -5, 9))
def parts_that_share_memory(x: torch.Tensor) -> Any:
    one, other = torch.unsafe_split(x, 2)
    one.add_(1)
    if x.sum() > 7:
        return x * 2
    return x * 3 if other.sum() > 2 else x * 5


# What a run makes and returns


@case(*SOME, look=lambda model, out: [f() for f in out])
def closures_with_ten_variables(x: torch.Tensor) -> Any:
    tensors = [x * k for k in range(10)]

    def make(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any) -> Any:
        return lambda: [a, b, c, d, e, f, g, h, i, j]

    return make(*tensors), make(*tensors[::-1])


@case(*SOME, look=lambda model, out: [out.__name__, out.__doc__, out(2)])
def a_function_with_a_name(x: torch.Tensor) -> Any:
    def scaled(k: int) -> Any:
        """Scale."""
        return x * k

    scaled.__name__ = "named"
    return scaled


@case(*SOME, look=lambda model, out: list(out.items()))
def an_ordered_dict_with_one_moved(x: torch.Tensor) -> Any:
    found = collections.OrderedDict(a=x * 2, b=x * 3)
    found.move_to_end("a")
    return found


@case(*SOME, look=lambda model, out: out.tolist())
def an_array_of_objects(x: torch.Tensor) -> Any:
    found = np.empty(2, dtype=object)
    found[0], found[1] = x * 2, x * 3
    return found


@case(*SOME, look=lambda model, out: out.get())
def a_class_made_in_forward(x: torch.Tensor) -> Any:
    y = x * 2

    class Out:
        def get(self) -> Any:
            return y

    return Out()


@case(*SOME, look=lambda model, out: [out.strides, out.tolist()])
def an_array_in_the_order_of_columns(x: torch.Tensor) -> Any:
    return np.asfortranarray(np.arange(6.0).reshape(2, 3))


@case(*SOME, look=lambda model, out: out[0] is out[1])
def an_array_returned_twice(x: torch.Tensor) -> Any:
    found = np.ones(3)
    return found, found


# Numbers and texts


def number(value: Any) -> Call:
    return args(lambda: (torch.tensor([1.0, 2.0]), value))


NUMPY = [np.float64(2), np.float64(2), np.float64(3), np.float64(-0.0), np.float64(0.0)]


@case(*map(number, [*NUMPY, np.float32(2), np.int64(3), 3, True, 2.0, 1]))
def numpy_numbers(x: torch.Tensor, n: Any) -> Any:
    return x * n, n


def set_number(value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, "number", value)


@case(*[after(set_number(np.float32(n))) for n in (0.0, 0.0, -0.0, 1.0, 0.0)])
class HoldsANumpyNumber(nn.Module):
    number: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.number


@case(*[args(lambda b=b: (torch.ones(1), -8.0, b)) for b in (2.0, 2.0, 0.5, 1.5, 2.0)])
def a_power_of_a_negative_number(x: torch.Tensor, base: Any, power: Any) -> Any:
    root = base**power
    return x * 2 if isinstance(root, float) else x * 3


POWERS = [(float("nan"), 0.5), (-4.0, 0.5), (-4.0, float("inf")), (-float("inf"), 0.5), (4.0, 0.5)]


@case(*[args(lambda p=p: (torch.ones(1), *p)) for p in [*POWERS, (-8.0, 0.5), (-8.0, 2.0)]])
def a_power_of_a_number_that_is_not_finite(x: torch.Tensor, base: Any, power: Any) -> Any:
    root = base**power
    return x * 2 if isinstance(root, float) else x * 3


@case(*[x(*v) for v in ((2, 2), (2, 2), (1.5, 2), (-2, 2), (0.5, 2))])
def a_power_that_is_returned(x: torch.Tensor) -> Any:
    x.add_(0)  # so that the run cannot begin again
    return (-2.0) ** x[0].item(), x[1].item() ** -x[0].item()


@case(*SOME, x(1, 2))
def an_array_times_a_number(x: torch.Tensor) -> Any:
    array, size, first = np.ones(2, np.float32), x.shape[0], x[0].item()
    chosen = np.where(array > 0, array, size), np.clip(np.arange(3, dtype=np.int8), 0, size)
    return array * size, first - array, np.float32(0.1) * size, size + np.int8(1), chosen


@case(*SOME, x(1, 2))
def methods_of_the_types_of_numbers(x: torch.Tensor) -> Any:
    return float.hex(x[0].item()), int.bit_length(x.shape[0])


def tripled(n: Any) -> Any:
    return n * 3


@case(*[number(n) for n in (2.0, 2.0, 2, 2, 3, 3.0, 3)])
class NumbersAsKeysOfACache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tripled = functools.cache(tripled)

    def forward(self, x: torch.Tensor, n: Any) -> Any:
        return x * 2, self.tripled(n)


@case(*[number(n) for n in (0.5, 0.5, 2, -1.0)])
def a_complex_number_whose_zero_has_a_sign(x: torch.Tensor, n: Any) -> Any:
    return complex(n, -0.0), complex(x.shape[0], -0.0), x


@case(*SOME)
def a_size_is_no_symbol(x: torch.Tensor) -> Any:
    return x * 2 if isinstance(x.shape[0], torch.SymInt) else x * 3


@case(*SOME, x(1))
def a_text_of_a_size_that_is_printed(x: torch.Tensor) -> Any:
    print(f"{str(x.shape[0])!r}")
    return x


@case(*[x(*v) for v in ((2, 9), (2, 9), (1, 55), (2, 9), (3, 9), (2, 10))])
def a_text_of_one_thing_twice(x: torch.Tensor) -> Any:
    a, b = x[0], x[1]
    return x * len(str([a, b, a]))


@case(*[x(*v) for v in ((2, 9), (2, 9), (1, 5), (2, 9), (3, 9), (2, 10))])
def a_range_of_one_thing_twice(x: torch.Tensor) -> Any:
    a, b = x[0].long(), x[1].long()
    return x * len(range(a, b, a)), sum(list(range(20))[a:b:a])


def keyed(*keys: Any) -> list[Call]:
    return [args(lambda k=k: (torch.arange(3), {k: torch.arange(3)})) for k in keys]


@case(*keyed(1, 1, 1.0, True, 1, 0.0, -0.0))
def keys_that_are_equal(x: torch.Tensor, held: Any) -> Any:
    for key, value in held.items():
        x = x * key + value
    return x, [str(key) for key in held]


class Word(enum.StrEnum):
    A = "a"


@case(*[args(lambda k=k: (torch.ones(2), {k: 1.0})) for k in ("a", "a", Word.A)])
def keys_that_are_equal_texts(x: torch.Tensor, held: Any) -> Any:
    return [x * 2 if isinstance(key, Word) else x * 3 for key in held]


@case(*[args(lambda s=s: (torch.arange(3), {s})) for s in ((1, 2), (1, 2), (1.0, 2), (True, 2))])
def members_that_are_equal(x: torch.Tensor, held: Any) -> Any:
    for a, b in held:
        x = x * a + b
    return x


EMPTY = [range(0), range(0), range(5, 5), range(0, 3, 2), range(0, 4, 2)]


@case(*map(number, EMPTY))
def ranges_that_are_equal(x: torch.Tensor, n: Any) -> Any:
    return x * n.stop + n.start


# Code inside one op


class AppendsSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Any) -> Any:
        log.append(x.sum().item())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2, None


@case(*BOTH)
def a_list_that_one_op_fills(x: torch.Tensor) -> Any:
    log: list[float] = []
    y = AppendsSum.apply(x, log)
    return y * log[0], log


@bt.opaque
def flag(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.is_large = bool(x.sum() > 0)
    return x * 1


@case(*BOTH)
class AModelThatOneOpCallsItsContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_large = False

    def forward(self, x: torch.Tensor) -> Any:
        y = flag(self, x)
        return y * 5 if self.is_large else y


class Slotted:
    __slots__ = ("value",)


@bt.opaque
def fill_slot(x: torch.Tensor, held: Slotted) -> torch.Tensor:
    held.value = x.sum().item()
    return x * 1


@case(*BOTH)
def slots_that_one_op_fills(x: torch.Tensor) -> Any:
    held = Slotted()
    held.value = 0.0
    return fill_slot(x, held) * held.value


@bt.opaque
def fill_last(x: torch.Tensor, *held: list[float]) -> torch.Tensor:
    held[0][0] = x.sum().item()
    return x * 1


@case(*BOTH)
def more_lists_than_are_looked_through(x: torch.Tensor) -> Any:
    held = [[0.0] for _ in range(1200)]
    return fill_last(x, *held) * held[0][0]


@bt.opaque
def sort_it(x: torch.Tensor, held: list[int]) -> torch.Tensor:
    if x.sum() > 0:
        held.sort()
    return x * 1


@case(*BOTH)
def a_list_that_one_op_sorts_sometimes(x: torch.Tensor) -> Any:
    held = [2, 1]
    return sort_it(x, held) * held[0]


@bt.opaque
def note(x: torch.Tensor, held: Any) -> torch.Tensor:
    held["sum"] = x.sum().item()
    return x * 1


@case(*BOTH)
class ADictThatOneOpFills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"sum": 0.0}

    def forward(self, x: torch.Tensor) -> Any:
        return note(x, self.held) * self.held["sum"]


@case(*BOTH)
class AnAttributeThatOneOpSets(nn.Module):
    sum = 0.0

    @bt.opaque
    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.sum = x.sum().item()
        return x * 1

    def forward(self, x: torch.Tensor) -> Any:
        return self.note(x) + 1


@case(*BOTH_BACK)
class AFlagThatACheckpointSets(nn.Module):
    flag = False

    def block(self, h: torch.Tensor) -> torch.Tensor:
        self.flag = bool(h.sum() > 0)
        return h * 2

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return y * 5 if self.flag else y


@case(*SOME, x(1, 1), x(1, 1))
def a_dict_that_a_transform_fills(x: torch.Tensor) -> Any:
    seen = {}

    def loss(v: torch.Tensor) -> torch.Tensor:
        seen["n"] = v.shape[0]
        return (v * v).sum()

    return torch.func.grad(loss)(x) * seen["n"]


# Results of one op whose inside varies


@torch.jit.script
def script_maybe(x):
    # type: (Tensor) -> Optional[Tensor]
    if bool(x.sum() > 0):
        return None
    return x * 2


@case(*BOTH, *BOTH_BACK)
def a_script_that_returns_none(x: torch.Tensor) -> Any:
    y = script_maybe(x)
    return x * 2 if y is None else x * 3


@torch.jit.script
def script_text(x):
    # type: (Tensor) -> Dict[str, str]
    return {"k": "a" if bool(x.sum() > 0) else "b"}


@case(*BOTH)
def a_script_that_returns_a_text(x: torch.Tensor) -> Any:
    return x * ord(script_text(x)["k"])


@torch.jit.script
def script_pair(x):
    # type: (Tensor) -> Tuple[Tensor, Optional[Tensor]]
    if bool(x.sum() > 0):
        return x, None
    return x, x * 2


@case(*BOTH)
def a_script_that_returns_none_in_a_tuple(x: torch.Tensor) -> Any:
    return x * 2 if script_pair(x)[1] is None else x * 3


def nothing_or_double(x: torch.Tensor) -> Any:
    return None if x.sum() > 0 else x * 2


class Maybe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return nothing_or_double(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


@case(*BOTH_BACK)
def a_function_that_returns_none(x: torch.Tensor) -> Any:
    y = Maybe.apply(x)
    return x * 2 if y is None else x * 3


LIBRARY = torch.library.Library("audited", "FRAGMENT")
LIBRARY.define("maybe(Tensor x) -> Tensor?")
LIBRARY.impl("maybe", nothing_or_double, "CompositeImplicitAutograd")


@case(*BOTH_BACK)
def an_operator_that_returns_none(x: torch.Tensor) -> Any:
    y = torch.ops.audited.maybe(x)
    return x * 2 if y is None else x * 3


def varied(up: Callable[[Any], Any], down: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An op of its own that gives one or the other, in a dict."""
    return bt.opaque(lambda x: {"found": up(x) if x.sum() > 0 else down(x)})


some_text = varied(lambda x: "p", lambda x: "n")
some_list = varied(lambda x: [x, x], lambda x: [x])
some_tensor = varied(lambda x: x, lambda x: None)
some_number = varied(lambda x: 3, lambda x: 2.5)


@case(*BOTH)
def a_text_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * ord(some_text(x)["found"])


@case(*BOTH)
def a_list_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * len(some_list(x)["found"])


@case(*BOTH)
def none_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * 2 if some_tensor(x)["found"] is None else x * 3


@case(*BOTH)
def a_number_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    found = some_number(x)["found"]
    return x * 2 if isinstance(found, int) else x * found


# Hooks and backward in forward


def gradients(model: Any, out: Any) -> Any:
    out[0].backward()
    return out


@case(*SOME, look=gradients)
class AListThatAHookFills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        grads: list[Any] = []
        h = self.weight * x
        h.register_hook(lambda grad: grads.append(grad))
        return (h**2).sum(), grads


@case(*BOTH)
def a_hook_in_a_backward_in_forward(x: torch.Tensor) -> Any:
    seen: list[float] = []
    h = x.clone().requires_grad_()
    y = h * h
    y.register_hook(lambda grad: seen.append(float(grad.sum() * x.sum())))
    y.sum().backward()
    return x * seen[0]


@case(*[x(1, 2, 3)] * 3, x(2, 4, 6))
class AHookOfAParameterInABackwardInForward(nn.Module):
    last = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.register_hook(self.keep)

    def keep(self, grad: torch.Tensor) -> None:
        self.last = float(grad.sum())

    def forward(self, x: torch.Tensor) -> Any:
        self.weight.grad = None
        (self.weight * x).sum().backward()
        return self.last


# What becomes of tensors in the autograd graph


def frozen(*flags: bool) -> list[Call]:
    """Calls of a model whose weight gets gradients, or not."""

    def freeze(flag: bool) -> Call:
        def call(model: Any) -> tuple[Any, ...]:
            model.weight.requires_grad_(flag)
            return (torch.ones(2),)

        return call

    return [freeze(flag) for flag in flags]


@case(*frozen(False, False, True, True, False))
class ABufferThatIsWrittenThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> Any:
        self.held[0].add_(self.weight)
        y = x * 2 if self.held.requires_grad else x * 3
        self.held = self.held.detach()
        return y


@bt.opaque
def graft(held: torch.Tensor, weight: torch.Tensor) -> None:
    held.requires_grad_(weight.requires_grad)


@case(*frozen(False, False, True, True, False))
class ABufferThatOneOpMakesALeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        graft(self.held, self.weight)
        y = x * 2 if self.held.requires_grad else x * 3
        self.held = self.held.detach()
        return y


def error_of_backward(model: Any, out: Any) -> Any:
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@case(*SOME, look=error_of_backward)
def a_version_that_is_incremented(x: torch.Tensor) -> Any:
    y = x.clone().requires_grad_() * 1
    z = y * y
    torch.autograd.graph.increment_version(y)
    return z


@case(*SOME, look=error_of_backward)
def a_version_that_is_preserved(x: torch.Tensor) -> Any:
    y = x.clone().requires_grad_() * 1
    z = y * y
    with torch.autograd._unsafe_preserve_version_counter(y):
        y.add_(1)
    return z


def pair(one: bool) -> Call:
    def make() -> tuple[Any, ...]:
        made = torch.ones(2)
        return made, made.view(2) if one else torch.ones(2)

    return args(make)


@case(*map(pair, (False, False, True, False)))
def whether_arguments_share_memory(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * 2 if torch._C._is_alias_of(x, y) else x * 3


@case(*SOME)
def whether_memory_has_become_shared(x: torch.Tensor) -> Any:
    y = x.clone()
    before = y.is_shared()
    y.share_memory_()
    return before, y.is_shared()


@bt.opaque
def refill(held: torch.Tensor, x: torch.Tensor) -> None:
    held.data = torch.ones(x.shape)


@case(*[args(lambda n=n: (torch.ones(2, 2), torch.ones(n, 2))) for n in (2, 2, 3, 2, 4)])
def a_tensor_whose_data_one_op_sets(held: torch.Tensor, x: torch.Tensor) -> Any:
    refill(held, x)
    return held * 2 if held.shape[0] == 2 else held * 3


# Random numbers


def test_a_seed_that_forward_sets_under_another_name() -> None:
    """It is the seed from before: neither the seed nor the numbers show it in the first call."""

    def model(x: torch.Tensor) -> torch.Tensor:
        seed_all(7)
        return x + torch.rand(x.shape)

    bended, value = bt.BendedModule(model), torch.ones(3)
    for number in range(4):
        drawn = []
        for call in (model, bended):
            torch.manual_seed(7)
            torch.rand(number)
            drawn.append((call(value).tolist(), torch.rand(2).tolist()))
        assert drawn[0] == drawn[1], number


def test_what_is_undetectable_is_so_under_a_computed_name() -> None:
    def seed(x: torch.Tensor) -> torch.Tensor:
        return x * (getattr(torch, "".join(["initial_", "seed"]))() % 7)

    def address(x: torch.Tensor) -> torch.Tensor:
        return x * (getattr(torch._C, "_data_" + "address")(x) % 7)

    for model in (seed, address):
        bended = bt.BendedModule(model)
        for number in range(4):
            torch.manual_seed(number)
            value = torch.ones(3 + number)
            assert torch.equal(bended(value), model(value))


# Kernels that write to what they are given, which torch does not count


_aten = torch.ops.aten
_ON = torch.tensor([1])
UNCOUNTED: dict[str, Callable[..., torch.Tensor]] = {
    "an overload of batch norm": lambda x, m, v: _aten.native_batch_norm.default(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "batch norm as exported": lambda x, m, v: _aten._native_batch_norm_legit(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "batch norm that always updates": lambda x, m, v: _aten._batch_norm_with_update(
        x, None, None, m, v, 0.1, 1e-5
    )[0],
    "statistics of several devices": lambda x, m, v: (
        x * torch.batch_norm_update_stats(x, m, v, 0.1)[0]
    ),
    "observers of quantization": lambda x, m, v: torch.fused_moving_avg_obs_fake_quant(
        x, _ON, _ON, m[:1], v[:1], torch.ones(1), torch.zeros(1, dtype=torch.int32), 0.1, 0, 255, 0
    ),
    "noise of rrelu": lambda x, m, v: _aten.rrelu_with_noise(
        x, m.expand(4, 3).contiguous(), 0.1, 0.3, True
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kernel", UNCOUNTED)
def test_what_a_kernel_writes_uncounted_is_written_once(kernel: str, mode: Any) -> None:
    call = UNCOUNTED[kernel]

    def model(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> Any:
        y = call(x, m, v)
        return (y, m * 2) if gate > 0 else (y, v + m)

    def calls(sign: float) -> Callable[[], Inputs]:
        drawn = torch.randn(4, 3)
        return lambda: ((drawn.clone(), torch.zeros(3), torch.ones(3), torch.tensor(sign)), {})

    bended = assert_promise(lambda: model, list(map(calls, (1.0, 1.0, -1.0, -1.0, 1.0))), mode=mode)
    assert (bended.stats.replays, bended.stats.resumes) == (3, 1)


# Results whose rank and dtype do not follow from the inputs of an operator


_library = torch.library.Library("audited", "DEF")
for _schema, _function in {
    "dtype_by_values(Tensor x) -> Tensor": lambda x: x * 2 if float(x.sum()) > 0 else x.double(),
    "rank_by_values(Tensor x) -> Tensor": lambda x: x * 2 if float(x.sum()) > 0 else x.sum(),
    "relu(Tensor x) -> Tensor": lambda x: x + torch.rand_like(x),
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
_audited = torch.ops.audited


def rank_in_a_script(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x.sum()


def dtype_in_a_script(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x.double()


_scripted: Any = torch.jit.script
ranked, typed = _scripted(rank_in_a_script), _scripted(dtype_in_a_script)

BY_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an overload of squeeze": lambda x: _aten.squeeze.default(x[None, x > 0]).ndim,
    "another overload of squeeze": lambda x: len(_aten.squeeze.dim(x[None, x > 0], 1).shape),
    "an overload of corrcoef": lambda x: _aten.corrcoef.default(x[x > 0][:, None]).ndim,
    "the dtype of an operator": lambda x: _audited.dtype_by_values(x).dtype is torch.float64,
    "the dtype of an overload": lambda x: _audited.dtype_by_values.default(x).element_size() > 4,
    "the rank of an operator": lambda x: _audited.rank_by_values(x).ndim,
    "the dtype of a script": lambda x: (typed(x) * 2).dtype is torch.float64,
    "the rank of a script": lambda x: ranked(x).dim(),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_results_that_depend_on_more_than_metadata(name: str) -> None:
    asked = BY_VALUES[name]

    def model(x: torch.Tensor) -> Any:
        found = asked(x)
        return (x * 2, found) if found == 1 else (x * 3, found)

    def call(*values: float) -> Callable[[], Inputs]:
        return lambda: ((torch.tensor(values),), {})

    values = [(3, 1, 1), (2, 1, 3), (3, -1, -1), (-3, 1, -1), (-3, -1, 1), (1, 1, 1), (4, -1, 1)]
    bended = assert_promise(lambda: model, [call(*map(float, some)) for some in values])
    assert bended.stats.live == 0


# What scripted and traced modules hold


class CountsInBuffer(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x * self.seen


class BranchesAfter(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        return (found, x * 2) if x.sum() > 0 else (found, x - 1)


_torch_jit: Any = torch.jit
HELD_BY_JIT: dict[str, Callable[[], Any]] = {
    "traced": lambda: _torch_jit.trace(CountsInBuffer(), torch.ones(3, 2), check_trace=False),
    "scripted": lambda: _torch_jit.script(nn.BatchNorm1d(2)),
    "frozen": lambda: _torch_jit.freeze(_torch_jit.script(nn.Linear(2, 2).eval())),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("kind", HELD_BY_JIT)
def test_a_resume_writes_once_to_buffers_of_compiled_modules(kind: str, mode: Any) -> None:
    def call(sign: float) -> Callable[[], Inputs]:
        return lambda: ((torch.arange(6.0).reshape(3, 2) * sign,), {})

    bended = assert_promise(
        lambda: BranchesAfter(HELD_BY_JIT[kind]()),
        list(map(call, (1.0, 1.0, -1.0, -1.0, 1.0))),
        mode=mode,
    )
    assert (bended.stats.resumes, bended.stats.live) == (1, 0)


# Arrays in the memory of tensors


class _SharesLater(nn.Module):
    """Reads an array beside a buffer that it writes to: the two may be in one memory, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.put(False)

    def put(self, shared: bool) -> None:
        self.values = np.zeros(2, np.float32)
        self.total = torch.from_numpy(self.values) if shared else torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + self.total + torch.as_tensor(self.values)
        self.total.add_(1)
        return x + self.total + float(self.values[0])


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_an_array_that_comes_to_share_memory_between_calls(
    first: bool, signs: tuple[int, int]
) -> None:
    model, twin = _SharesLater(), _SharesLater()
    bended = bt.BendedModule(model)
    for shared in (first, not first, first, not first):
        model.put(shared)
        twin.put(shared)
        for sign in (*signs, *signs):
            x = sign * torch.ones(2)
            assert torch.equal(bended(x), twin(x)), (shared, sign)
            assert torch.equal(torch.from_numpy(model.values), torch.from_numpy(twin.values))
    assert bended.stats.replays > 0


@case(x(0, 0), x(0, 0), x(1, 2), x(0, 0), x(3, 4))
class AnArrayInTheMemoryOfABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(2, dtype=np.float32)
        self.register_buffer("held", torch.from_numpy(self.array))

    def forward(self, x: torch.Tensor) -> Any:
        self.held[:1].add_(x[:1])  # nothing, at first
        return x + float(self.array[0])


def array_and_tensor(one: bool) -> Call:
    def make() -> tuple[Any, ...]:
        array = np.ones(2, dtype=np.float32)
        return array, torch.from_numpy(array if one else array.copy())

    return args(make)


@case(*map(array_and_tensor, (False, False, True, False, True)))
def an_array_in_the_memory_of_an_argument(array: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    return x * float(array[0])


# Two that become one


@case(*[after(lambda model, one=one: model.link(one)) for one in (False, False, True, False)])
class TwoListsThatBecomeOne(nn.Module):
    a: ClassVar = [1.0]
    b: ClassVar = [1.0]

    def link(self, one: bool) -> None:
        type(self).a[0] = 1.0
        type(self).b = type(self).a if one else [1.0]

    def forward(self, x: torch.Tensor) -> Any:
        self.a[0] = 5.0
        return x * self.b[0]


GLOBAL_A, GLOBAL_B = [1.0], [1.0]


def link_globals(one: bool) -> Callable[[Any], None]:
    def link(model: Any) -> None:
        GLOBAL_A[0] = 1.0
        globals()["GLOBAL_B"] = GLOBAL_A if one else [1.0]

    return link


@case(*[after(link_globals(one)) for one in (False, False, True, False)])
def two_globals_that_become_one(x: torch.Tensor) -> Any:
    GLOBAL_A[0] = 5.0
    return x * GLOBAL_B[0]


VARIABLE_A: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE_A")
VARIABLE_B: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE_B")


def link_variables(one: bool) -> Callable[[Any], None]:
    def link(model: Any) -> None:
        made = [1.0]
        VARIABLE_A.set(made)
        VARIABLE_B.set(made if one else [1.0])

    return link


@case(*[after(link_variables(one)) for one in (False, False, True, False)])
def two_context_variables_that_become_one(x: torch.Tensor) -> Any:
    VARIABLE_A.get()[0] = 5.0
    return x * VARIABLE_B.get()[0]


def arrays(make: Callable[[], Any], one: bool) -> Call:
    def pair() -> tuple[Any, ...]:
        made = make()
        return torch.ones(2), made, made if one else make()

    return args(pair)


ARRAYS = [lambda: np.zeros(2), lambda: {1}, lambda: frozenset({1, 2}), lambda: list(range(600))]


@case(*[arrays(make, one) for make in ARRAYS for one in (True, True, False, True, False)])
def two_arguments_that_are_one_or_not(x: torch.Tensor, a: Any, b: Any) -> Any:
    return x * 2 if a is b else x * 3


COLUMNS = np.asfortranarray(np.arange(6.0).reshape(2, 3))
ROWS = np.ascontiguousarray(COLUMNS)


@case(*[args(lambda a=a: (torch.ones(2), a)) for a in (ROWS, ROWS, COLUMNS, ROWS)])
def strides_of_an_array(x: torch.Tensor, array: Any) -> Any:
    return x * array.strides[0]


# Branches that join, with what they leave in objects that look alike


def joins(name: str, one: Callable[[], Any], other: Callable[[], Any], use: Any) -> None:
    """Add a program whose first branch leaves one of two objects, which is used at its end."""

    def program(x: torch.Tensor) -> Any:
        held = one() if x[0] > 0 else other()
        x = x * 2 if x[1] > 0 else x * 3
        x = x + 1 if x[2] > 0 else x - 1
        return x * use(held)

    program.__name__ = name
    case(*[x(*s) for s in ((1, 1, 1), (-1, -1, -1), (1, -1, -1), (-1, 1, 1))], *SIGNS)(program)


def says(name: str, value: Any) -> Any:
    def said() -> None: ...

    setattr(said, name, value)
    return said


def reads_a_cell(*kept: str) -> Any:
    def read() -> Any:
        try:
            return value
        except NameError:
            return ""

    for value in kept:  # noqa: B007 - it is read by the function
        pass
    return read


def locked(array: Any) -> Any:
    array.setflags(write=False)
    return array


def noted(note: float) -> Any:
    return np.zeros(1, np.dtype("i4", metadata={"note": note}))


joins("names_of_functions", lambda: says("__name__", "a"), lambda: says("__name__", "bb"),
      lambda f: len(f.__name__))  # fmt: skip
joins("texts_of_functions", lambda: says("__doc__", "a"), lambda: says("__doc__", "bb"),
      lambda f: len(f.__doc__))  # fmt: skip
joins("annotations_of_functions", lambda: says("__annotations__", {"a": 1}),
      lambda: says("__annotations__", {"a": 2}), lambda f: f.__annotations__["a"])  # fmt: skip
joins("empty_cells", reads_a_cell, lambda: reads_a_cell("empty"), lambda f: len(f()) + 1)
joins("empty_cell_objects", types.CellType, lambda: types.CellType("empty"),
      lambda cell: 2 if "empty" in repr(cell) else 3)  # fmt: skip
joins("arrays_that_can_be_written", lambda: np.ones(1), lambda: locked(np.ones(1)),
      lambda array: 2 if array.flags.writeable else 3)  # fmt: skip
joins("notes_of_dtypes", lambda: noted(2.0), lambda: noted(3.0),
      lambda array: array.dtype.metadata["note"])  # fmt: skip


@case(*SIGNS, look=lambda model, out: [out(3), out.__annotations__])
def a_function_with_annotations(x: torch.Tensor) -> Any:
    def scaled(k: int, *, way: str = "a", more: list[int] | None = None) -> torch.Tensor:
        return x * k

    return scaled


@case(*SIGNS, look=lambda model, out: out(3))
def a_function_that_says_it_is_another(x: torch.Tensor) -> Any:
    @functools.wraps(nothing_to_read)
    def scaled(k: int, x: torch.Tensor = x) -> torch.Tensor:
        return x * k

    return scaled


def nothing_to_read(k: int = 1) -> float:
    return k


def two(k: int = 1) -> float:
    return 2 * k


def three(k: int = 1) -> float:
    return 3 * k


def reset(function: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        function.__code__, function.__defaults__ = nothing_to_read.__code__, (1,)

    return change


def with_code(k: int = 1) -> float:
    return k


def with_defaults(k: int = 1) -> float:
    return k


RESET = [after(reset(with_code), *s) for s in itertools.product((1, -1), repeat=3)] * 2
RESET += [after(reset(with_defaults), *s) for s in itertools.product((1, -1), repeat=3)] * 2


@case(*RESET, look=lambda model, out: [out, with_code()])
def code_that_is_exchanged(x: torch.Tensor) -> Any:
    if x[0] > 0:
        with_code.__code__ = two.__code__ if x[1] > 0 else three.__code__
    x = x * 2 if x[2] > 0 else x * 3
    return x * with_code()


@case(*RESET, look=lambda model, out: [out, with_defaults()])
def defaults_that_are_exchanged(x: torch.Tensor) -> Any:
    if x[0] > 0:
        with_defaults.__defaults__ = (2,) if x[1] > 0 else (3,)
    x = x * 2 if x[2] > 0 else x * 3
    return x * with_defaults()


class Once:
    def factor(self) -> float:
        return 1


class Twice(Once):
    def factor(self) -> float:
        return 2


@case(*SIGNS, look=lambda model, out: [out, type(model.held).__name__])
class AnObjectThatGetsAnotherClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = Once()

    def forward(self, x: torch.Tensor) -> Any:
        self.held.__class__ = Twice if x[0] > 0 else Once
        x = x * 2 if x[1] > 0 else x * 3
        return x * self.held.factor()


def scale(x: torch.Tensor, a: float, b: float = 1) -> torch.Tensor:
    return x * a + b


GIVEN = functools.partial(scale, a=5)


@case(*SIGNS)
class APartialOfAPartial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = functools.partial(scale, a=3)
        self.several = [functools.partial(scale, a=4)]

    def forward(self, x: torch.Tensor, given: Any = GIVEN) -> Any:
        made = functools.partial(scale, a=2) if x[0] > 0 else given
        x = x * 2 if x[1] > 0 else x * 3
        further = [functools.partial(f, b=2) for f in (self.held, *self.several, given, made)]
        return x * sum(len(f.keywords) for f in further), further


def set_tag(value: float) -> Callable[[Any], None]:
    return lambda model: setattr(model.held, "tag", value)


@case(*SOME, *[after(set_tag(tag)) for tag in (2, 2, 3)])
class APartialThatGetsATag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held: Any = functools.partial(scale, a=3)

    def forward(self, x: torch.Tensor) -> Any:
        tag = getattr(self.held, "tag", 1)
        self.held.tag = 7
        return x * tag


@case(*SOME, look=lambda model, out: [out[0].fill(7), out])
def arrays_that_share_memory(x: torch.Tensor) -> Any:
    found = np.arange(6.0)
    return found[:3], found


@case(*SOME, look=lambda model, out: [out.fill(7), out, model.held.tolist()])
class APartOfAnArrayThatTheModelHolds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = np.arange(6.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.held[:3]


LOOKS = {"vars": vars, "locals": locals}


@case(*SIGNS)
def variables_that_are_looked_at_by_another_name(x: torch.Tensor) -> Any:
    if x[0] > 0:
        more = 1  # noqa: F841 - it is looked at
    x = x * 2 if x[1] > 0 else x * 3
    x = x + 1 if x[2] > 0 else x - 1
    return x * len(LOOKS["vars"]()) * len(LOOKS["locals"]())


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.filterwarnings("ignore:An output with one:UserWarning")
@pytest.mark.parametrize("name", list(CASES))
def test_it_gives_what_eager_gives(name: str) -> None:
    program = CASES[name]
    wanted = told(program, lambda model: model)
    for number, (one, other) in enumerate(zip(told(program, bt.BendedModule), wanted, strict=True)):
        assert one == other, f"call {number}"


def down(x: torch.Tensor, count: int) -> torch.Tensor:
    if count:
        return down(x, count - 1)
    return x * 2 if x.sum() > 0 else x * 3


@pytest.fixture
def an_alarm() -> Iterator[None]:
    """Raise where the test has not come to an end after two minutes."""
    if not hasattr(signal, "SIGALRM"):
        pytest.skip("there are no alarms on this system")

    def ring(*_: object) -> None:
        pytest.fail("it does not come to an end", pytrace=False)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("an_alarm")
@pytest.mark.filterwarnings("ignore::bendtrace.errors.TraceLimitWarning")
def test_deep_calls_with_one_trace_come_to_an_end() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = down(x, 15)
        z = down(y - 1, 3)
        w = down(z + x.mean(), 20)
        return w if w.min() > 0 else w + 1

    bended = bt.BendedModule(model, max_traces=1)
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        x = torch.randn(2, 3, generator=generator) * 10 ** (number % 4)
        x = x.double() if number % 5 == 4 else x
        assert bits(bended(x)) == bits(model(x))


class Box:
    def __init__(self, held: float) -> None:
        self.held = held


MANY = types.MappingProxyType({n: Box(float(n)) for n in range(-1, 10_000)})


def scaled_by_last(x: torch.Tensor, held: Any = MANY) -> torch.Tensor:
    return x * held[-1].held


@pytest.mark.parametrize(
    "given", [(), (functools.partial(scaled_by_last, held=MANY),)], ids=["global", "argument"]
)
def test_more_objects_than_can_be_watched_make_a_model_run_live(given: Any) -> None:
    def model(x: torch.Tensor, function: Callable[..., Any] = scaled_by_last) -> torch.Tensor:
        return function(x)

    bended, x = bt.BendedModule(model), torch.ones(2)
    for number in range(4):
        MANY[-1].held = float(number)
        assert bits(bended(x, *given)) == bits(model(x, *given))
    assert bended.stats.replays == 0
    assert "more than 10000 objects" in bended.why_live[0]


class Scale(torch.autograd.Function):
    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


def test_what_a_function_keeps_in_its_context_is_no_attribute_of_the_model() -> None:
    class Model(nn.Module):
        scale = 3.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(x, self.scale)

    model = Model()
    bended, x = bt.BendedModule(model), torch.ones(2, requires_grad=True)
    for _ in range(3):
        (wanted,) = torch.autograd.grad(model(x).sum(), x)
        assert bits(torch.autograd.grad(bended(x).sum(), x)) == bits((wanted,))
    assert bended.stats.live == 0


class Kept(nn.Module):
    """Keeps a class of tensors that C code makes, as losses of GANs do."""

    def __init__(self, kind: Any = torch.FloatTensor) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kind(x.size()).fill_(2.0)


def kept_in_a_variable(x: torch.Tensor) -> torch.Tensor:
    size = x.size()
    kind = torch.FloatTensor if x.dtype is torch.float32 else torch.DoubleTensor
    return x + kind(size).fill_(3.0)


@pytest.mark.parametrize("model", [Kept(), kept_in_a_variable], ids=["attribute", "variable"])
def test_a_class_of_tensors_that_is_kept_is_called_with_plain_numbers(model: Any) -> None:
    bended = bt.BendedModule(model)
    for size in (2, 2, 3, 3, 2):
        x = torch.randn(size, 2)
        assert bits(bended(x)) == bits(model(x))


class Hooked(nn.Module):
    def __init__(self, fired: list[str]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Identity()
        self.register_buffer("held", torch.ones(2))
        self.a.register_full_backward_hook(lambda *_: fired.append("a"))
        self.b.register_backward_hook(lambda *_: fired.append("b"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.held) + self.a(self.b(x))


@pytest.mark.filterwarnings("ignore:Using a non-full backward", "ignore:Full backward hook")
def test_backward_hooks_are_no_reason_to_run_live_without_gradients() -> None:
    ours: list[str] = []
    theirs: list[str] = []
    model, same = Hooked(ours), Hooked(theirs)
    same.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model)

    def compare(make: Callable[[], torch.Tensor], *, grad: bool = False) -> bool:
        """Call both, go backward where there is a way; return whether the call was a replay."""
        found, replays = [], bended.stats.replays
        for called in (bended, same):
            x = make()
            with torch.set_grad_enabled(grad):
                out = called(x)
            for end in (out, x, same.held if called is same else model.held):
                if end.grad_fn is not None:
                    end.sum().backward(retain_graph=True)
            found.append(bits(out))
        assert found[0] == found[1]
        assert ours == theirs
        return bended.stats.replays > replays

    plain = functools.partial(torch.ones, 2)
    assert [compare(plain) for _ in range(3)] == [False, True, True]
    assert not any(compare(plain, grad=True) for _ in range(3))
    assert ours
    assert compare(plain)
    fired = len(ours)
    assert not any(compare(lambda: torch.ones(2, requires_grad=True) * 2) for _ in range(3))
    assert len(ours) > fired
    for one in (model, same):
        one.held = torch.ones(2, requires_grad=True) * 3
    fired = len(ours)
    assert not any(compare(plain) for _ in range(3))
    assert len(ours) > fired


NEGATIVE_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8 << 48))[0]


def test_the_sign_of_nan_in_a_container_is_noticed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many = [math.nan], dict.fromkeys(range(600), math.nan)

        def forward(self, x: torch.Tensor) -> Any:
            return [x * math.copysign(1.0, value) for value in (self.few[0], self.many[7])]

    model, x = Model(), torch.ones(2)
    bended = bt.BendedModule(model)
    for where in ("nothing", "few", "many"):
        if where != "nothing":
            getattr(model, where)[0 if where == "few" else 7] = NEGATIVE_NAN
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.replays


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scale_of.scale


def scale_of() -> None:
    """Has an attribute."""


def test_attributes_of_a_function_that_are_replaced_as_a_whole_are_noticed() -> None:
    bended, x = bt.BendedModule(scaled), torch.ones(2)
    for scale in (2.0, 3.0):
        scale_of.__dict__ = {"scale": scale}
        for _ in range(3):
            assert bits(bended(x)) == bits(scaled(x))
    assert bended.stats.replays


def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = a * 2 if a.sum() > 0 else b * 3
    return y + 1 if b.sum() > 0 else y


UNPACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a list": lambda x: mixed(*[x + 1, x - 1]),
    "a generator": lambda x: mixed(*(x * k for k in (1, 2))),
    "what torch returns": lambda x: mixed(*torch.max(x.view(2, 2), 0)),
    "what torch returns, in C": lambda x: sum(mixed(a, b) for a, b in zip(*x.topk(3))),  # noqa: B905
}


@pytest.mark.parametrize("name", UNPACKED)
def test_arguments_are_unpacked_of_what_python_frees_before_the_call(name: str) -> None:
    """What they were is a pointer to freed memory on the stack; reading it ended the process."""
    model = UNPACKED[name]
    bended = bt.BendedModule(model)
    for _ in range(12):
        x = torch.randn(4)
        assert bits(bended(x)) == bits(model(x))
