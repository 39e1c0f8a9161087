"""Outputs that a run makes: functions, classes, arrays; numbers and texts."""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from tests.registry.calls import (
    SOME,
    Call,
    after,
    args,
    case,
    x,
)

# What a run makes and returns


@case(
    *SOME,
    look=lambda model, out: [f() for f in out],
)
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
def functions_of_numpys_in_c(x: torch.Tensor) -> Any:
    array, size = np.ones(2, np.float32), x.shape[0]
    chosen = np.where(array > 0, array, size), np.where([True, False], size, x[0].item())
    return chosen, str(np.result_type(np.float32, size)), np.concatenate([array, [size]])


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
