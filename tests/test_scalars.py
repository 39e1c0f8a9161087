"""Traced scalars behave as plain numbers, tell the tracer, and are inert after the run."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from typing import Any

import pytest
import torch

import bendtrace as bt
from bendtrace.errors import DivergenceError
from bendtrace.tape.scalars import TRACED


def steps(trace: bt.Trace) -> list[tuple[str, Any]]:
    return [(step.kind, step.value) for step in trace.flow_steps if step.kind != "shape"]


def test_isinstance_holds_and_torch_takes_them_as_they_are() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        n = x.shape[0]
        sizes = torch.Size((n, 2))
        y = torch.zeros(n, 2).expand(sizes).reshape(n * 2) + torch.arange(n * 2) + n
        return y, isinstance(n, int) and n.__class__ is int and not isinstance(n, str)

    trace = bt.trace(model, torch.ones(3))
    assert trace.output[1] is True
    assert torch.equal(trace.replay(torch.ones(5))[0], model(torch.ones(5))[0])


def test_code_that_asks_for_the_exact_type_is_given_plain_numbers() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
        n = x.shape[0]
        return x * n, type(n) is int, (n > 2) is True

    bended = bt.BendedModule(model)
    for n in (3, 1, 3):
        assert bended(torch.ones(n))[1:] == (True, n > 2)
    assert bended.stats.replays == 1


@pytest.mark.parametrize(
    "compute",
    [
        lambda n: n + 1, lambda n: 1 + n, lambda n: n - 1, lambda n: 7 - n, lambda n: n * 2,
        lambda n: n / 2, lambda n: 2 / n, lambda n: n // 2, lambda n: 7 // n, lambda n: n % 3,
        lambda n: 7 % n, lambda n: n**2, lambda n: 2**n, lambda n: -n, lambda n: +n,
        lambda n: abs(-n), lambda n: ~n, lambda n: n << 1, lambda n: n >> 1, lambda n: n & 6,
        lambda n: n | 8, lambda n: n ^ 3, lambda n: divmod(n, 3)[1], lambda n: divmod(17, n)[0],
        lambda n: round(n / 3, 1), lambda n: round(n), lambda n: math.floor(n / 2),
        lambda n: math.ceil(n / 2), lambda n: math.trunc(n / 2), lambda n: max(n, 3),
        lambda n: min(n, 3), lambda n: sum([n, n]), lambda n: pow(n, 2), lambda n: pow(n, 2, 3),
        lambda n: float(n), lambda n: n.bit_length(), lambda n: n.real, lambda n: (n / 2).hex(),
        lambda n: math.sqrt(n), lambda n: complex(n).imag, lambda n: n > 2, lambda n: n == 5,
        lambda n: (n > 2) + 1, lambda n: not n, lambda n: f"{n:03d}", lambda n: str(n),
        lambda n: "%d" % n,  # noqa: UP031 lambda n: [0] * n, lambda n: "ab" * n, lambda n: n in (4, 5),
        lambda n: {5: "five"}.get(n), lambda n: [1, 2, 3, 4, 5, 6][n], lambda n: hash(n),
        lambda n: operator.index(n), lambda n: n is None, lambda n: n == "five",
        lambda n: sorted([n, 3, 7]), lambda n: math.gcd(n, 10), lambda n: bytes(n),
        lambda n: n.as_integer_ratio(), lambda n: (n / 2).is_integer(), lambda n: repr(n / 3),
    ],
)  # fmt: skip
def test_arithmetic_and_conversions_are_those_of_a_plain_number(compute: Any) -> None:
    def model(x: torch.Tensor) -> Any:
        return compute(x.shape[0])

    trace = bt.trace(model, torch.ones(5))
    wanted = compute(5)
    assert type(trace.output) is type(wanted)
    assert trace.output == wanted
    given = trace.replay(torch.ones(5))
    assert type(given) is type(wanted)
    assert given == wanted
    bended = bt.BendedModule(model)
    for n in (5, 4, 5, 1, 3, 4):
        assert bended(torch.ones(n)) == compute(n)


def test_using_a_number_in_an_op_puts_no_guard_and_asking_for_its_value_does() -> None:
    free = bt.trace(lambda x: x * x.shape[0] + torch.full_like(x, x.sum().item()), torch.ones(3))
    assert steps(free) == []
    assert torch.equal(free.replay(torch.ones(7)), torch.ones(7) * 14)
    bound = bt.trace(lambda x: x * int(x.shape[0]), torch.ones(3))
    assert steps(bound) == [("int", 3)]
    with pytest.raises(DivergenceError, match="was 3 when traced and is 7 now"):
        bound.replay(torch.ones(7))


def test_a_scalar_that_outlives_its_run_is_a_plain_number_for_ever() -> None:
    kept: list[Any] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape[0])
        kept.append(x.sum().item())
        return x

    bt.trace(model, torch.ones(3))
    n, s = kept
    assert torch.equal(torch.ones(2) * n, torch.full((2,), 3.0))
    assert torch.zeros(n).shape == (3,)
    assert [n + 1, 1 + n, n == 3, n > 5, hash(n), f"{n}", s / 2] == [4, 4, True, False, 3, "3", 1.5]
    assert all(type(v) not in TRACED for v in (n + 1, n * s, -n, n > 2))
    assert type(pickle.loads(pickle.dumps(n))) is int
    assert json.loads(json.dumps([int(n)])) == [3]
    assert copy.deepcopy(n) == 3
    assert list(range(n)) == [0, 1, 2]


def test_a_scalar_of_one_run_in_another_does_not_hide_the_other_ones() -> None:
    kept: list[Any] = []
    bt.trace(lambda x: kept.append(x.shape[0]), torch.ones(3))

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if kept[0] + x.shape[0] > 5 else x - 1

    bended = bt.BendedModule(model)
    for n in (3, 2, 3, 2):
        assert torch.equal(bended(torch.ones(n)), torch.ones(n) + (1 if n == 3 else -1))
    assert bended.stats.traces == 2


def test_numpy_takes_the_plain_value() -> None:
    numpy = pytest.importorskip("numpy", reason="needs the test extra")

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * float(numpy.sqrt(x.shape[0]))

    bended = bt.BendedModule(model)
    for n in (4, 9, 4):
        assert torch.equal(bended(torch.ones(n)), torch.ones(n) * n**0.5)
    assert bended.stats.replays == 1


def test_an_error_of_arithmetic_is_guarded() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * (6 // (x.shape[0] - 2))
        except ZeroDivisionError:
            return -x

    bended = bt.BendedModule(model)
    for n in (2, 3, 2, 3, 5):
        assert torch.equal(bended(torch.ones(n)), model(torch.ones(n)))
    assert bended.stats.replays >= 2


def test_an_error_of_arithmetic_that_nothing_catches() -> None:
    bended = bt.BendedModule(lambda x: x * (6 // (x.shape[0] - 2)))
    for n in (3, 5, 2, 4, 2):
        if n == 2:
            with pytest.raises(ZeroDivisionError):
                bended(torch.ones(n))
        else:
            assert torch.equal(bended(torch.ones(n)), torch.ones(n) * (6 // (n - 2)))
    assert bended.stats.replays == 2
