"""Branches that join: what they leave behind under one name, or in objects that look alike."""

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from tests.registry.calls import (
    MIXED,
    SIGNS,
    SOME,
    Call,
    after,
    args,
    case,
    x,
)

# A number that is too large to be traced in some calls

LARGE = [x(*numbers) for numbers in itertools.product((1, 300), (1, -1), (1, -1))]


@case(*LARGE, *LARGE[::-1])
def numbers_of_which_some_are_too_large(x: torch.Tensor) -> torch.Tensor:
    power = (x[0] * 1000).long().item() ** 4
    y = x * 2 if x[1] > 0 else x * 3
    return y + power % 7 if x[2] > 0 else y - power % 5


@case(*SIGNS)
class ComparesWithANumberOfNumpys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.least = np.float64(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        most = max(self.least, x.mean().item())
        y = x * 2 if x[1] > 0 else x * 3
        return y * most if x[2] > 0 else y - most


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


@case(
    *SIGNS,
    look=lambda model, out: [out(3), out.__annotations__],
)
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
