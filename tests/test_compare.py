from __future__ import annotations

import enum
import struct
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bendtrace.python.compare import same_bits


def float_of(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


QUIET, PAYLOAD = float_of(0x7FF8000000000000), float_of(0x7FF8000000000001)

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Output:
    hidden: Any
    score: float = 0.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Tagged(OrderedDict):
    """Like Hugging Face's outputs: a dict with attributes of its own."""


def tagged(tag: str, **items: Any) -> Tagged:
    made = Tagged(items)
    made.tag = tag
    return made


def tensors() -> list[torch.Tensor]:
    x = torch.arange(6.0).reshape(2, 3)
    return [
        x,
        x.double(),
        x.reshape(3, 2),
        x.bfloat16(),
        x.half(),
        x.to(torch.float8_e5m2),
        x.bool(),
        x.long(),
        x + 1j,
        x[:0],
        torch.tensor(1.0),
        x.to_sparse(),
        x.to_sparse_csr(),
        x.to("meta"),
        torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged),
        x.clone().requires_grad_(),
        torch.nn.Parameter(x),
    ]


@pytest.mark.filterwarnings("ignore:.*[Ss]parse CSR.*", "ignore:.*nested tensors.*")
def test_tensors_equal_their_copies_and_nothing_else() -> None:
    for i, one in enumerate(tensors()):
        for j, other in enumerate(tensors()):
            assert same_bits(one, other) is (i == j), (one, other)


def test_strides_do_not_count() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert same_bits(x, x.t().contiguous().t())


def test_conjugate_and_negative_views_are_compared_by_value() -> None:
    z = torch.tensor([1 + 2j])
    assert same_bits(z.conj(), z.conj().resolve_conj())
    assert same_bits(z.conj().imag, torch.tensor([-2.0]))
    assert not same_bits(z.conj(), z)


def test_every_bit_of_a_nan_counts() -> None:
    assert same_bits(QUIET, QUIET)
    assert not same_bits(QUIET, PAYLOAD)
    one, other = (torch.tensor([bits]) for bits in (0x7FC00000, 0x7FC00001))
    one, other = one.int().view(torch.float32), other.int().view(torch.float32)
    assert bool(one.isnan() and other.isnan())
    assert same_bits(one, one.clone())
    assert not same_bits(one, other)


def test_the_sign_of_zero_counts() -> None:
    assert not same_bits(0.0, -0.0)
    assert not same_bits(complex(0.0, 0.0), complex(0.0, -0.0))
    assert not same_bits(torch.zeros(2), -torch.zeros(2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ((1, 2), Point(1, 2)),
        ([1, 2], [1]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Output([1]), Output([2])),
        (Slotted(1), Slotted(2)),
        (tagged("x", a=1), tagged("y", a=1)),
        (tagged("x", a=1), tagged("x", a=2)),
        (Color.RED, Color.BLUE),
        ({1, 2}, {1, 3}),
        (len, max),
        (lambda: 1, lambda: 1),
        (int, float),
        (np.float32([1]), np.float64([1])),
        (np.zeros(2), np.zeros((2, 1))),
        (np.float64(0.0), np.float64(-0.0)),
        (torch.float32, torch.float64),
        (None, 0),
        (b"a", "a"),
    ],
)
def test_these_differ(one: Any, other: Any) -> None:
    assert not same_bits(one, other)
    assert not same_bits([{"deep": (one,)}], [{"deep": (other,)}])
    assert same_bits(one, one)


def test_objects_are_looked_into() -> None:
    def make() -> Any:
        x = torch.ones(2)
        return [
            Output(x, QUIET), Slotted([x]), tagged("t", a=x), Point(x, {"k": (x,)}), Color.RED,
            {1, 2}, np.array([QUIET]), np.array([None, "a"], dtype=object), torch.Size([1]), "s",
            torch.ones(2, 2).max(0), slice(1, None), range(3),
        ]  # fmt: skip

    assert same_bits(make(), make())


def test_values_may_hold_themselves() -> None:
    def make(end: int) -> list[Any]:
        made: list[Any] = [torch.ones(1), end]
        made.append({"self": made})
        return made

    assert same_bits(make(1), make(1))
    assert not same_bits(make(1), make(2))


def test_what_only_claims_to_be_a_number_is_none() -> None:
    class Claims:
        __class__ = int

        def __eq__(self, other: object) -> bool:
            return other == 3

    assert isinstance(Claims(), int)
    assert not same_bits(Claims(), 3)
