"""Traced numbers go only to code that is known to ask them; other code receives plain numbers."""

from __future__ import annotations

import array
import ast
import bisect
import builtins
import calendar
import cmath
import collections
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import heapq
import importlib
import inspect
import io
import itertools
import json
import json as js
import math
import numbers
import operator
import os
import pickle
import pprint
import random
import re
import sqlite3
import statistics
import string
import struct
import sys
import textwrap
import time
import types
import typing
import warnings
import zlib
from collections import deque as dq
from collections.abc import Callable
from datetime import timedelta as td
from decimal import Decimal as D
from functools import partial
from json import dumps as jd
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop

import bendtrace as bt
from bendtrace.tape.plain_numbers import ASKING, needs_plain_numbers
from bendtrace.tape.scalars import _OVER, TRACED, TracedBool, TracedFloat, TracedInt
from bendtrace.watch import kinds, reachability
from tests.promise import bits

kind_of = type
half = partial(D, 1)
add_five = (5).__add__
FORMAT = "%*d"
BY_NAME = {"d": D, "ld": math.ldexp}


class Money(D):
    pass


class Colour(enum.IntEnum):
    RED = 2
    BLUE = 3


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


@typing.runtime_checkable
class HasIndex(typing.Protocol):
    def __index__(self) -> int: ...


@dataclasses.dataclass
class Point:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Holder:
    kind: Any = D


class Keeper:
    kind = D

    def __init__(self) -> None:
        self.found: Any = math.ldexp
        self.table = {"d": D}

    def of(self, n: Any) -> Any:
        return self.kind(n)

    def by_attribute(self, n: Any) -> Any:
        return self.found(1.0, n)

    def by_table(self, n: Any) -> Any:
        return self.table["d"](n)


pydantic: Any = None
yaml: Any = None
with contextlib.suppress(ImportError):
    pydantic = importlib.import_module("pydantic")
with contextlib.suppress(ImportError):
    yaml = importlib.import_module("yaml")
Model: Any = pydantic and pydantic.create_model("Model", k=(int | float, ...))
keeper, holder = Keeper(), Holder()
day = td(days=1)
packer = struct.Struct("i")


def settable(n: Any) -> bool:
    try:
        n.tag = 1
    except AttributeError:
        return False
    return True


def dumped(value: Any) -> str:
    text = io.StringIO()
    json.dump(value, text)
    return text.getvalue()


def imports(n: Any) -> Any:
    from decimal import Decimal
    from math import ldexp

    return Decimal(n), ldexp(1.0, n)


def imports_module(n: Any) -> Any:
    import decimal as d

    return d.Decimal(n)


def tells(n: Any, t: Any = type) -> bool:
    return t(n) is int


def told(n: Any, *, t: Any = type) -> bool:
    return t(n) is int


@functools.singledispatch
def dispatched(n: Any) -> str:
    return "object"


@dispatched.register
def _(n: int) -> str:
    return "int"


@functools.cache
def cached(n: Any) -> Any:
    return D(n)


def inner(n: Any) -> Any:
    def deep() -> Any:
        return [D(m) for m in (n,)]

    return deep()


def by_class(n: Any) -> Any:
    class Local(D):
        pass

    return Local(n)


def matched(n: Any) -> str:
    match n:
        case bool():
            return "bool"
        case int(k):
            return f"int {k}"
        case _:
            return "other"


# Each is given a size.
ON_SIZES: dict[str, Callable[[Any], Any]] = {
    "pow of three": lambda n: pow(3, n, 7),
    "pow of three, base": lambda n: pow(n, 3, 7),
    "ldexp": lambda n: math.ldexp(1.0, n),
    "permutations": lambda n: len(list(itertools.permutations(range(4), n))),
    "combinations": lambda n: len(list(itertools.combinations(range(4), n))),
    "repeat": lambda n: list(itertools.repeat("a", n)),
    "islice": lambda n: list(itertools.islice(range(9), n)),
    "width": lambda n: "%*d" % (n, 5),  # noqa: UP031
    "width of a global": lambda n: FORMAT % (n, 5),
    "character": lambda n: "%c" % n,  # noqa: UP031
    "hexadecimal": lambda n: "%x %05d %s %r %e" % (n, n, n, n, n),  # noqa: UP031
    "format": lambda n: f"{n:05d} {n!r:>4} {5:{n}}" + format(n, "b") + "{:>{w}}".format(1, w=n),
    "encoder": lambda n: json.JSONEncoder().encode([n]),
    "dump": lambda n: dumped([n, {"a": (n,)}]),
    "dumps": lambda n: json.dumps({"n": n}),
    "dumps of another name": lambda n: jd([n]) + js.dumps(n),
    "dumps with default": lambda n: json.dumps(Point(n), default=lambda p: p.a),
    "decoded": lambda n: json.loads(json.dumps(n)),
    "logarithm of a large one": lambda n: math.log(10**400 * n),
    "logarithm": lambda n: math.log(n) + math.log2(n) + math.log10(n),
    "sleep": lambda n: time.sleep(n * 0),
    "timedelta": lambda n: td(days=n).days,
    "timedelta times": lambda n: (day * n).days,
    "date": lambda n: datetime.date(2020, n, n).isoformat(),
    "replace": lambda n: datetime.date(2020, 1, 1).replace(day=n).day,
    "ordinal": lambda n: datetime.date.fromordinal(n).day,
    "time": lambda n: datetime.time(n).hour,
    "Decimal": lambda n: float(decimal.Decimal(n)),
    "Decimal of another name": lambda n: float(D(n)),
    "Decimal as a base": lambda n: float(Money(n)),
    "Decimal in a tuple": lambda n: float(D((0, (n,), 0))),
    "Decimal added": lambda n: float(D(1) + n),
    "Decimal in a table": lambda n: float(BY_NAME["d"](n)),
    "Decimal in a partial": lambda n: float(half.func(n)),
    "Decimal of an object": lambda n: float(keeper.of(n)),
    "function of an object": lambda n: keeper.by_attribute(n),
    "table of an object": lambda n: float(keeper.by_table(n)),
    "type of a dataclass": lambda n: float(holder.kind(n)),
    "Decimal by name": lambda n: float(getattr(decimal, "Decimal")(n)),  # noqa: B009
    "Decimal imported": imports,
    "module imported": imports_module,
    "import_module": lambda n: float(importlib.import_module("decimal").Decimal(n)),
    "sys.modules": lambda n: float(sys.modules["decimal"].Decimal(n)),
    "globals": lambda n: float(globals()["D"](n)),
    "map": lambda n: [float(d) for d in map(D, [n])],
    "nested": inner,
    "local class": by_class,
    "from_float": lambda n: float(D.from_float(n)),
    "Fraction": lambda n: float(fractions.Fraction(n, 3)),
    "Fraction times": lambda n: float(fractions.Fraction(1, 3) * n),
    "Fraction limited": lambda n: str(fractions.Fraction(1, 3).limit_denominator(n + 2)),
    "mean": lambda n: statistics.mean([n, 2]) + statistics.median([n, 1]),
    "deque": lambda n: len(dq([1, 2, 3], n)),
    "Counter": lambda n: sorted(collections.Counter([n, n, 2]).items()),
    "array": lambda n: array.array("i", [n]).tolist() * n,
    "struct": lambda n: struct.pack("i", n),
    "Struct": lambda n: packer.pack(n),
    "bytes": lambda n: (bytes(n), bytearray(n), bytes([n])),
    "to_bytes": lambda n: (n.to_bytes(2, "big"), int.to_bytes(n, 2, "big")),
    "bit_length": lambda n: (n.bit_length(), int.bit_length(n)),
    "hex": lambda n: (hex(n), oct(n), bin(n), chr(n + 60)),
    "crc": lambda n: zlib.crc32(b"abc", n),
    "hash": lambda n: hashlib.pbkdf2_hmac("sha1", b"a", b"b", n).hex(),
    "calendar": lambda n: calendar.monthrange(2000 + n, n),
    "seeded": lambda n: random.Random(n).random(),
    "seeded below": lambda n: random.Random(-n).random(),
    "choices": lambda n: random.Random(1).choices([1, 2, 3], k=n),
    "bisect": lambda n: bisect.bisect([1, 2, 3], n),
    "heap": lambda n: heapq.nsmallest(n, [5, 4, 3, 2, 1]),
    "comb": lambda n: (math.comb(5, n), math.perm(5, n), math.gcd(6, n), math.isqrt(n)),
    "factorial": lambda n: math.factorial(n) + math.prod([n, n]) + math.fsum([n, 0.1]),
    "divmod": lambda n: (divmod(7, n), divmod(n, 2), round(n, 1), round(n / 3, n), abs(-n)),
    "reduce": lambda n: functools.reduce(operator.mul, [n, n, 2]),
    "operators": lambda n: (operator.add(5, n), operator.index(n), operator.mod(7, n)),
    "add of five": lambda n: (5).__add__(n),
    "add of five, taken before": lambda n: add_five(n),
    "rsub mapped": lambda n: list(map((5).__rsub__, [n])),
    "add of int": lambda n: int.__add__(n, 5),
    "compared by a method": lambda n: (3).__lt__(n),
    "methodcaller": lambda n: operator.methodcaller("__add__", n)(5),
    "add by name": lambda n: getattr(5, "__mul__")(n),  # noqa: B009
    "is SupportsIndex": lambda n: isinstance(n, typing.SupportsIndex),
    "is a protocol": lambda n: isinstance(n, HasIndex),
    "is Hashable": lambda n: isinstance(n, collections.abc.Hashable),
    "is Integral": lambda n: isinstance(n, numbers.Integral),
    "is SymInt": lambda n: isinstance(n, torch.SymInt),
    "has __array__": lambda n: hasattr(n, "__array__"),
    "has node": lambda n: hasattr(n, "node"),
    "has __dict__": lambda n: hasattr(n, "__dict__"),
    "settable": settable,
    "setattr": lambda n: failing(lambda: setattr(n, "tag", 1)),
    "dir": lambda n: len(dir(n)),
    "kind_of": lambda n: kind_of(n) is int,
    "type of a default": tells,
    "type of a keyword": told,
    "type mapped": lambda n: list(map(type, [n])) == [int],
    "type by name": lambda n: getattr(builtins, "type")(n) is int,  # noqa: B009
    "class": lambda n: n.__class__ is int,
    "type's name": lambda n: type(n).__name__,
    "dispatched": dispatched,
    "matched": matched,
    "cached": lambda n: float(cached(n)),
    "size": lambda n: sys.getsizeof(n),
    "pickle": lambda n: len(pickle.dumps([n])),
    "copied": lambda n: (copy.copy(n), copy.deepcopy([n])),
    "pretty": lambda n: pprint.pformat([n]),
    "literal": lambda n: ast.literal_eval(repr([n])),
    "template": lambda n: string.Template("$n").substitute(n=n),
    "wrapped": lambda n: textwrap.wrap("a b c d", n),
    "substituted": lambda n: re.sub("a", "b", "aaaa", count=n),
    "enumeration": lambda n: Colour(n).name,
    "flags": lambda n: str(Bits(n)),
    "yaml": lambda n: yaml.dump({"n": [n]}),
    "yaml, object": lambda n: yaml.dump(dataclasses.asdict(Point(n))),
    "pydantic": lambda n: repr(Model(k=n)),
    "pydantic, validated": lambda n: repr(Model.model_validate({"k": n})),
    "pydantic, adapted": lambda n: repr(pydantic.TypeAdapter(int | float).validate_python(n)),
    "timedelta64": lambda n: np.timedelta64(n, "D").astype(int),
    "datetime64": lambda n: str(np.datetime64(n, "D")),
    "object array": lambda n: type(np.array([n, None])[0]).__name__,
    "object array, full": lambda n: type(np.full(2, n, dtype=object)[0]).__name__,
    "object array, assigned": lambda n: assigned(n),
    "numpy": lambda n: (np.zeros(n).sum(), np.arange(n).sum(), np.sqrt(n), np.int64(n)),
    "numpy, product": lambda n: np.prod([n]),
    "numpy, structured": lambda n: np.array([(n, 1)], dtype="i4,i4").tolist(),
    "numpy, binary": lambda n: np.binary_repr(n),
    "c_int": lambda n: ctypes.c_int(n).value,
    "sqlite": lambda n: sqlite3.connect(":memory:").execute("select ?", (n,)).fetchone(),
    "ordered": lambda n: sorted([3, n, 1], key=lambda m: -m),
    "sum": lambda n: (sum([n, n]), min(n, 2), max([n]), all([n]), any([n])),
    "range": lambda n: (list(range(n)), [0] * n, "a" * n, (1, 2, 3, 4)[n], [1, 2, 3][:n]),
    "zipped": lambda n: list(zip(range(n), itertools.count(n), strict=False)),
    "enumerated": lambda n: list(enumerate("ab", n)),
    "keys": lambda n: ({n: 1}[n], n in {2, 3}, {n}, n in range(9)),
    "text": lambda n: ("a".zfill(n), "a".center(n), "a,b,c".split(",", n), "a".ljust(n)),
    "complex": lambda n: (complex(n), cmath.sqrt(n), n**0.5, n**-1),
    "signature": lambda n: str(inspect.signature(lambda a: a).bind(n)),
    "namespace": lambda n: repr(types.SimpleNamespace(a=n)),
    "warned": lambda n: [str(w.message) for w in warn(n)],
    "error": lambda n: str(ValueError(n)),
    "error of an operator": lambda n: failing(lambda: n < "a"),
    "error of a call": lambda n: failing(lambda: n()),
    "error of a loop": lambda n: failing(lambda: [*n]),
    "error of an index": lambda n: failing(lambda: n[0]),
}  # fmt: skip


def assigned(n: Any) -> str:
    held = np.empty(1, dtype=object)
    held[0] = n
    return type(held[0]).__name__


def warn(n: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(f"{n}", stacklevel=1)
    return caught


def failing(function: Callable[[], Any]) -> str:
    with contextlib.suppress(ZeroDivisionError):
        try:
            function()
        except (TypeError, AttributeError) as error:
            return str(error)
    return ""


# Each is given a float.
ON_FLOATS: dict[str, Callable[[Any], Any]] = {
    "has __index__": lambda f: hasattr(f, "__index__"),
    "is SupportsIndex": lambda f: isinstance(f, typing.SupportsIndex),
    "is SupportsFloat": lambda f: isinstance(f, typing.SupportsFloat),
    "sleep": lambda f: time.sleep(f * 0),
    "fromtimestamp": lambda f: datetime.datetime.fromtimestamp(f, datetime.UTC).second,
    "timedelta": lambda f: td(seconds=f).total_seconds(),
    "Decimal": lambda f: float(D(f)),
    "Fraction": lambda f: str(fractions.Fraction(f)),
    "ratio": lambda f: (f.as_integer_ratio(), float.as_integer_ratio(f), f.hex(), f.is_integer()),
    "as an index": lambda f: failing(lambda: [1, 2, 3][f]),
    "as a range": lambda f: failing(lambda: range(f)),
    "shifted": lambda f: failing(lambda: f << 1),
    "inverted": lambda f: failing(lambda: ~f),
    "dumps": lambda f: json.dumps([f]),
    "pydantic": lambda f: repr(Model(k=f)),
    "yaml": lambda f: yaml.dump([f]),
    "struct": lambda f: struct.pack("d", f),
    "math": lambda f: (math.frexp(f), math.modf(f), math.floor(f), math.sin(f)),
    "math, of two": lambda f: (math.nextafter(f, 9), math.copysign(f, -f), math.fmod(f, 2)),
    "sum": lambda f: sum([f, 0.1, 0.2]) + math.fsum([f, 0.1]),
    "mean": lambda f: statistics.fmean([f, 2.0]),
    "object array": lambda f: type(np.array([f, None])[0]).__name__,
    "complex": lambda f: (complex(f, f), cmath.exp(f), f**2, round(f, 1), divmod(f, 2)),
    "array": lambda f: array.array("d", [f]).tolist(),
}  # fmt: skip
ON_BOOLS: dict[str, Callable[[Any], Any]] = {
    "pydantic": lambda b: repr(Model(k=b)),
    "dumps": lambda b: json.dumps([b]),
    "yaml": lambda b: yaml.dump([b]),
    "Decimal": lambda b: float(D(b)),
    "kind_of": lambda b: kind_of(b) is bool,
    "text": lambda b: f"{b} {b!r} {b:d}",
}  # fmt: skip


for _cases in (ON_SIZES, ON_FLOATS, ON_BOOLS):
    for _name in [name for name in _cases if name.partition(",")[0] in ("pydantic", "yaml")]:
        if globals()[_name.partition(",")[0]] is None:
            del _cases[_name]


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        out, found = function(*args)
    except Exception as error:
        return type(error), str(error)
    return bits(out), type(found).__qualname__, repr(found)


def of_size(function: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    return lambda x: (x * 2, function(x.shape[0]))


def of_argument(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, n: (x * n, function(n))


def of_kept_size(function: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    def model(x: Tensor) -> Any:
        held = Point(x.shape[0])
        return x * 2, function(held.a)

    return model


def of_float(function: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    return lambda x: (x * 2, function(x.sum().item()))


def of_bool(function: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    return lambda x: (x * 2, function((x > 0).all().item()))


def of_comparison(function: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    return lambda x: (x * 2, function(x.shape[0] > 2))


@pytest.mark.parametrize("name", ON_SIZES)
@pytest.mark.parametrize("make", [of_size, of_kept_size])
def test_code_of_others_receives_a_plain_size(make: Any, name: str) -> None:
    model = make(ON_SIZES[name])
    bended = bt.BendedModule(model)
    for size in (2, 3, 2, 3):
        x = torch.ones(size)
        assert outcome(bended, x) == outcome(model, x)


@pytest.mark.parametrize("name", ON_SIZES)
def test_code_of_others_receives_a_plain_argument(name: str) -> None:
    model = of_argument(ON_SIZES[name])
    bended = bt.BendedModule(model)
    for n in (2, 3, 2, 3):
        assert outcome(bended, torch.ones(2), n) == outcome(model, torch.ones(2), n)


@pytest.mark.parametrize("name", ON_FLOATS)
def test_code_of_others_receives_a_plain_float(name: str) -> None:
    model = of_float(ON_FLOATS[name])
    bended = bt.BendedModule(model)
    for size in (2, 3, 2, 3):
        x = torch.full((size,), 1.5)
        assert outcome(bended, x) == outcome(model, x)


@pytest.mark.parametrize("name", ON_BOOLS)
@pytest.mark.parametrize("make", [of_bool, of_comparison])
def test_code_of_others_receives_a_plain_bool(make: Any, name: str) -> None:
    model = make(ON_BOOLS[name])
    bended = bt.BendedModule(model)
    for size in (2, 3, 2, 3):
        x = torch.ones(size)
        assert outcome(bended, x) == outcome(model, x)


# Numbers that other code asks the model for


class Kept:
    def __init__(self, a: Any) -> None:
        self.a = a

    def named_later(self, n: Any) -> Any:
        return float(D(n))


kept = Kept(1)


def made_for_others(x: Tensor) -> Any:
    return x, statistics.mean(x.shape[0] for _ in range(2))


def given_by_a_generator(x: Tensor) -> Any:
    n = x.shape[0]
    return x, statistics.mean(n for _ in range(2))


def given_by_an_iterator(x: Tensor) -> Any:
    return x, statistics.mean(iter([x.shape[0], 1])), statistics.mean(map(abs, [x.shape[0], 1]))


def given_by_a_function(x: Tensor) -> Any:
    n = x.shape[0]
    return x, json.dumps([1, Kept(1)], default=lambda o: n if isinstance(o, Kept) else 0)


def made_by_a_function(x: Tensor) -> Any:
    return x, json.dumps([Kept(1)], default=lambda o: x.shape[0])


def held_by_an_object(x: Tensor) -> Any:
    return x, json.dumps([Kept(x.shape[0])], default=lambda o: o.a)


def by_a_computed_name(x: Tensor) -> Any:
    return x, getattr(kept, "_".join(("named", "later")))(x.shape[0])


def after_a_file(x: Tensor) -> Any:
    n, m, f = x.shape[0], [x.shape[0]], x.sum().item()
    with open(os.devnull):
        pass
    return x, json.dumps([n, m, f, x.shape[0]]), Kept(n).a


@pytest.mark.parametrize(
    "model",
    [
        made_for_others, given_by_a_generator, given_by_an_iterator, given_by_a_function,
        made_by_a_function, held_by_an_object, by_a_computed_name, after_a_file,
    ],
)  # fmt: skip
def test_others_are_given_plain_numbers_by_the_model(model: Callable[[Tensor], Any]) -> None:
    bended = bt.BendedModule(model)
    for size in (2, 3, 2, 3):
        found, expected = bended(torch.ones(size)), model(torch.ones(size))
        assert torch.equal(found[0], expected[0])
        assert found[1:] == expected[1:]


def test_numbers_that_no_other_code_receives_are_traced() -> None:
    def model(x: Tensor) -> Any:
        n = x.shape[0]
        if not isinstance(n, int):
            raise TypeError(f"{type(n)}")
        return x.view(n, 1) * math.sqrt(4.0) + n, type(n).__name__, f"{type(n)!r}", json.dumps([1])

    bended = bt.BendedModule(model)
    for size in (2, 3, 4):
        found, expected = bended(torch.ones(size)), model(torch.ones(size))
        assert torch.equal(found[0], expected[0])
        assert found[1:] == expected[1:] == ("int", "<class 'int'>", "[1]")
    assert (bended.stats.traces, bended.stats.replays) == (1, 2)


class Conditioned(nn.Module):
    """Has an attribute with the name of a function of torch that compiles what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.cond = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(x.size(0)):
            x = x + self.cond(x) / (step + 1)
        return x


def test_a_name_alone_makes_no_number_plain() -> None:
    model = Conditioned()
    bended = bt.BendedModule(model)
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
        x = torch.rand(size, 4)
        assert torch.equal(bended(x), model(x))
    assert (bended.stats.live, bended.stats.traces <= 6) == (0, True)


class Compiling(nn.Module):
    """Calls a function of torch that compiles what it is given, which no name in its code shows."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self.step, self.rate = 0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        size, double = x.size(0), [x.size(0) * 2]
        rate = self.rate
        if self.name == "one of two":
            sides = (lambda v: v * size + self.step, lambda v: v * rate - double[0])
            x = torch.abs(self.function(x.sum() > 0, *sides, (x,)))
        elif self.name == "rounds":
            start = torch.zeros((), dtype=torch.int64)
            x = self.function(
                lambda i, v: i < size, lambda i, v: (i + 1, v * rate + self.step), (start, x)
            )[1]
        else:
            x = self.function(lambda a, b: a * b + size, x, 0, combine_mode="generic")
        self.rate = self.rate * 0.75
        return x + size + self.step


@pytest.mark.parametrize(
    ("name", "function"),
    [("one of two", torch.cond), ("rounds", while_loop), ("sums", associative_scan)],
)
def test_what_torch_compiles_is_given_plain_numbers(name: str, function: Any) -> None:
    model, expected = Compiling(function, name), Compiling(function, name)
    bended = bt.BendedModule(model)
    for size in (2, 3, 4, 2, 5, 6, 7, 8):
        x = torch.randn(size, 3)
        assert torch.equal(bended(x), expected(x))
        state = model.step, model.rate
        assert state == (expected.step, expected.rate)
        assert [*map(type, state)] == [int, float]


def test_code_of_packages_may_name_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mamba of transformers does, in a branch that only the compiler of torch takes."""

    def model(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return associative_scan(torch.add, x, 0)
        h = x[0]
        for step in range(x.size(0)):
            h = h * 0.5 + x[step]
        return h

    monkeypatch.setattr(reachability, "is_finished", callable)  # True for every function
    monkeypatch.setattr(kinds, "function_needs_plain", lambda function: False)
    bended = bt.BendedModule(model)
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
        x = torch.rand(size, 4)
        assert torch.equal(bended(x), model(x))
    assert (bended.stats.live, bended.stats.traces <= 6) == (0, True)


@pytest.mark.parametrize(
    "text",
    [
        "type(x)", "type(x) is int", "type(x).__module__", "str(type(x))", "map(type, x)",
        "f'{type(x)} {type(y) is int}'", "[type(i) for i in x]", "type(x)(3).__name__",
        "type(x) if y else type(x).__name__", "print(type, x).__name__", "type('A', (), {})",
    ],
)  # fmt: skip
def test_code_that_does_more_with_types_than_name_them(text: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def model(x, y):\n    return {text}", space)
    assert needs_plain_numbers(space["model"].__code__, space)


# What is in the table

# Calls of them end, or tell the time.
_NOT_CALLED = {open, print, id, *(f for n, f in vars(time).items() if callable(f))}
GIVEN: list[Callable[[Any], tuple[Any, ...]]] = [
    lambda n: (n,),
    lambda n: (n, 2),
    lambda n: (2, n),
    lambda n: (1.5, n),
    lambda n: (n, n),
    lambda n: (2, n, 3),
    lambda n: (n, n, n),
    lambda n: ([n, 1],),
    lambda n: ([1, 2, 3, 4], n),
    lambda n: ([1, 2, n, 4], 2),
    lambda n: (n, [1, 2, 3, 4]),
    lambda n: ("abc", n),
    lambda n: (n, "05d"),
    lambda n: (n, int),
    lambda n: (operator.mul, [n, 3, 4]),
    lambda n: (lambda *a: a, [n, 3], [4, 5]),
    lambda n: ({n: 1},),
    lambda n: ([(n, 1)], [2, 3]),
]


def result_of(function: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        found = function(*arguments)
        if not isinstance(found, (*TRACED, int, float)) and hasattr(found, "__next__"):
            found = list(itertools.islice(found, 6))
        return re.sub(" at 0x[0-9a-f]+", "", repr(found))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("function", sorted(ASKING - _NOT_CALLED, key=repr), ids=repr)
def test_what_is_in_the_table_asks_traced_numbers(function: Any) -> None:
    for number in (2, -1, 1.0, 1.5, True):
        for given in GIVEN:
            traced = {int: TracedInt, float: TracedFloat, bool: TracedBool}[type(number)]
            scalar = traced(number, _OVER, None)
            assert result_of(function, given(scalar)) == result_of(function, given(number)), given(
                2
            )


HELD = {"int": 1, "float": 1.5}


class Exact:
    """Gives numbers to methods whose results Python takes for exact ones."""

    def __hash__(self) -> int:
        return HELD["int"]

    __index__ = __int__ = __length_hint__ = __hash__

    def __float__(self) -> float:
        return HELD["float"]

    def __complex__(self) -> complex:
        return complex(HELD["float"], 1)


class Hashed:
    def __init__(self) -> None:
        self.number = HELD["int"]

    def __hash__(self) -> int:
        return hash((self.number, 1))


ASKED: dict[str, Callable[[], Any]] = {
    "hash": lambda: hash(Exact()),
    "index": lambda: operator.index(Exact()),
    "int": lambda: int(Exact()),
    "float": lambda: float(Exact()),
    "length_hint": lambda: operator.length_hint(Exact()),
    "complex": lambda: complex(Exact()).real,
    "hash of a tuple": lambda: hash(Hashed()) % 97,
}


@pytest.mark.parametrize("name", ASKED)
def test_methods_whose_results_are_exact_numbers(name: str) -> None:
    """Of numbers in the state, which would be inputs soon, and of those out of tensors."""
    asked = ASKED[name]

    def held(x: Tensor) -> Tensor:
        return x * asked()

    def taken(x: Tensor) -> Tensor:
        HELD["int"], HELD["float"] = int(x.sum()), float(x.sum())
        return x * asked()

    bended, x = bt.BendedModule(held), torch.ones(2)
    for n in range(6):
        HELD.update({"int": n, "float": n + 0.5})
        assert bits(bended(x)) == bits(held(x))
    bended = bt.BendedModule(taken)
    for n in range(4):
        got, found = bended(x * n), dict(HELD)
        assert (bits(got), found) == (bits(taken(x * n)), HELD)
