"""Values of all kinds as plain JSON, and back."""

from __future__ import annotations

import enum
import json
import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bendtrace.log.plain import Codec, Remembered
from tests.stored import exact


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    HIGH = 3


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Name(str):
    __slots__ = ()


texts = st.text(st.characters(codec=None, exclude_categories=()))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**100), 2**100)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.binary()
    | st.sampled_from([torch.float32, torch.device("cuda", 1), torch.strided, ...])
    | st.builds(range, st.integers(), st.integers(), st.integers(1)),
    lambda inner: st.lists(inner)
    | st.tuples(inner, inner)
    | st.dictionaries(texts | st.integers() | st.tuples(texts), inner)
    | st.builds(slice, inner, inner, inner)
    | st.lists(st.integers(0), max_size=4).map(torch.Size)
    | st.sets(st.integers() | texts)
    | st.frozensets(st.floats(allow_nan=False)),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None)
@given(plain)
def test_every_plain_value_survives_json(value: Any) -> None:
    text = json.dumps(Codec().encode(value), allow_nan=False)
    assert text.isascii()
    assert exact(Codec().decode(json.loads(text))) == exact(value)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(2**63) - 1, 2**53 + 1, -0.0, math.inf, complex(math.nan, -0.0), "\ud83d\ude00"[:1],
     "\ud83d" + "\ude00", "\0", {"$tuple": [1]}, {1: 2, "1": 3}, (), [()], struct.unpack(
         ">d", bytes.fromhex("7ff8000000000123"))[0]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_json_readers_stumble_over_survive(value: Any) -> None:
    text = json.dumps(Codec().encode(value), allow_nan=False)
    assert exact(Codec().decode(json.loads(text))) == exact(value)


@pytest.mark.parametrize(
    ("value", "kind", "text", "inner"),
    [
        (Colour.RED, "Colour", "<Colour.RED: 'r'>", "r"),
        (Level.HIGH, "Level", "<Level.HIGH: 3>", 3),
        (Name("a"), "Name", "'a'", "a"),
        (Fraction(1, 2), "Fraction", "Fraction(1, 2)", None),
        (Broken(), "Broken", "<Broken>", None),
        (int, "type", "<class 'int'>", None),
    ],
)
def test_objects_of_the_users_are_remembered_by_their_text(
    value: Any, kind: str, text: str, inner: Any
) -> None:
    codec = Codec()
    read = codec.decode(json.loads(json.dumps(codec.encode([value]))))[0]
    assert isinstance(read, Remembered)
    assert (read.kind.rpartition(".")[2], repr(read), read.value) == (kind, text, inner)
    assert codec.encode([read]) == codec.encode([value])


def test_what_contains_itself_or_is_very_deep_is_remembered_by_its_text() -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    assert repr(Codec().decode(Codec().encode(loop))) == "[1, [1, [...], [...]], [1, [...], [...]]]"
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    assert repr(Codec().decode(json.loads(json.dumps(Codec().encode(deep))))) == repr(deep)


@pytest.mark.parametrize(
    "data",
    [{"$jump": 1}, {"$int": "z"}, {"$int": 1}, {"$tuple": 1}, {"$float": "7ff8"}, {"$bytes": 3},
     {"$tuple": [], "more": 1}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$object": {"kind": "x"}},
     {"$range": ["0x0", "0x1", "0x0"]}, {"$slice": []}],
    ids=str,
)  # fmt: skip
def test_json_that_encodes_nothing_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown kind|invalid|invalid literal|Incorrect|arg"):
        Codec().decode([data])
