"""Every row of the tables in docs/guarded.md: what it promises is what happens.

A case is a model that depends on what its row names and on nothing else that changes. It is
called twice, then that is changed, and it is called twice again; whatever eager gives in such a
sequence, the `BendedModule` has to give, served as the last cell of the row says.
"""

from __future__ import annotations

import array
import builtins
import calendar
import codecs
import collections
import colorsys
import configparser
import contextvars
import copy
import copyreg
import ctypes
import datetime
import functools
import linecache
import logging
import math
import mmap
import operator
import os
import random
import re
import sys
import threading
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.cuda import memory_allocated
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from bendtrace.python.results import can_exchange, can_exchange_operands
from bendtrace.tape.tape import OpKind
from bendtrace.watch.functions import SHAPES
from tests.promise import Inputs, bits, footprint, outcome, random_states, state
from tests.registry.program import Program, Wrap, add

PAGE = Path(__file__).parent.parent / "docs" / "guarded.md"
Maker = Callable[[], Any]
Change = Callable[[Any, pytest.MonkeyPatch], Any]


@functools.cache
def rows() -> dict[str, str]:
    """The first and the last cell of each row of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {row[0]: row[-1] for row in cells if row[0] != "the run depends on"}
    assert len(found) == sum(row[0] != "the run depends on" for row in cells), "two rows alike"
    return found


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and what changes after two calls.

    Attributes:
        make: builds the model.
        given: makes its argument, or a tuple of them.
        other: makes those of the calls after the change, if they are what changes.
        change: changes something else.
        mode: a context to call in after the change.
        live_at: text of the source line that a reason to run live names.
        calls: how many calls there are before the change.
    """

    make: Callable[[], Callable[..., Any]]
    given: Maker
    other: Maker | None = None
    change: Change | None = None
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    live_at: str = ""
    calls: int = 2

    @property
    def changes(self) -> bool:
        """Whether anything changes after the first calls."""
        return (self.other, self.change, self.mode) != (None, None, nullcontext)


CASES: dict[str, list[Case]] = {}


def grid() -> Tensor:
    return torch.arange(1.0, 7.0).view(2, 3)


def case(row: str, given: Maker = grid, **options: Any) -> Callable[[Any], Any]:
    """Decorate a model of one argument or more, a class of modules, or a maker of a model."""

    def adding(subject: Any) -> Any:
        make = subject
        code = getattr(subject, "__code__", None)
        if code is not None and (code.co_argcount or code.co_flags & 4):
            make = lambda: subject  # noqa: E731
        made = Case(make, given, **options)
        CASES.setdefault(row, []).append(made)
        seen = "unseen" if rows().get(row, "").startswith("not seen") else "guarded"
        name = f"guarded.{row}-{len(CASES[row])}"
        add(Program(name, functools.partial(drive, made), frozenset({seen})))
        return subject

    return adding


def sets(**values: Any) -> Change:
    """A change of attributes of the model."""
    return lambda model, patch: [setattr(model, name, value) for name, value in values.items()]


# What is seen of a call


class Seen(NamedTuple):
    """All that eager and a replay have to agree on after a call."""

    output: Any
    error: Any
    arguments: Any
    random: Any
    state: Any


def drive(case: Case, wrap: Wrap) -> Iterator[Seen]:
    """Make the calls of a case, with the change between them."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = case.make()
    call = wrap(model)
    with pytest.MonkeyPatch.context() as patch:
        for number in range(case.calls + 2):
            changed = number >= case.calls
            if number == case.calls and case.change is not None:
                case.change(model, patch)
            given = ((case.other if changed else None) or case.given)()
            inputs: Inputs = (given if isinstance(given, tuple) else (given,)), {}
            with case.mode() if changed else nullcontext():
                found = outcome(lambda *args: differentiated(call, args), inputs, 7)
            error = found[1] and (type(found[1]).__name__, str(found[1]))
            yield Seen(found[0], error, found[2], found[3], state(model))


def called(case: Case, bent: bool) -> tuple[list[Seen], list[str], bool, Any]:
    """Go through a case.

    Returns:
        What is seen of each call, how it was served, whether calls leave anything changed, and
        what was called.
    """
    stats: list[Any] = []
    made: list[Any] = []

    def wrap(model: Any) -> Callable[..., Any]:
        made.append(bt.BendedModule(model) if bent else model)

        def call(*args: Any) -> Any:
            before.append((bits([args, {}]), random_states()))
            stats.append(copy.copy(made[0].stats) if bent else None)
            prints, drawn = footprint(), (random.getstate(), str(np.random.get_state()))
            try:
                return made[0](*args)
            finally:
                draws.append(drawn != (random.getstate(), str(np.random.get_state())))
                assert footprint() == prints or not bent  # torch itself may load more of itself

        return call

    before: list[Any] = []
    draws: list[bool] = []
    seen: list[Seen] = []
    served, effects = [], False
    for one in drive(case, wrap):
        seen.append(one)
        effects = effects or one[2:4] != before[-1] or one.state != seen[0].state
        # Of what Python and numpy draw, and of what only the output of the next call shows.
        effects = effects or draws[-1] or one.output != seen[0].output
        served.append(how(stats[-1], made[0].stats) if bent else "")
    return seen, served, effects, made[0]


def differentiated(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call, go back through what has a gradient, and return the output and all gradients."""
    out = call(*args)
    parts = [t.sum() for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if parts and torch.is_grad_enabled():
        torch.stack([part.double() for part in parts]).sum().backward()
    return out, [t.grad for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_leaf]


def how(before: Any, after: bt.Stats) -> str:
    for name in ("live", "resumes", "traces", "replays"):
        if getattr(after, name) != getattr(before, name):
            return name
    return "neither"


ONCE = ["traces", "replays", "replays", "replays"]
SERVED = {
    "retraced": ["traces", "replays", "traces", "replays"],
    "live once": ["live", "traces", "replays"],
    "resumes": ["traces", "replays", "resumes", "replays"],
    "live twice": ["live", "live", "traces", *["replays"] * 5],
    "an input": ["traces"] * 3 + ["replays"] * 5,
    **dict.fromkeys(("read again", "done again", "switched again", "one op", "not seen"), ONCE),
}


@pytest.mark.each
@pytest.mark.parametrize("row", rows())
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_the_page_says(row: str) -> None:
    promise = re.split(r"[,;:(]", rows()[row])[0].strip()
    assert CASES.get(row), "a row without a case"
    for one in CASES[row]:
        check(one, promise)


def check(case: Case, promise: str) -> None:
    wanted, _, effects, _ = called(case, bent=False)
    given, served, _, bended = called(case, bent=True)
    last = case.calls - 1
    if case.changes:
        assert wanted[last + 1] != wanted[last], "the model does not depend on it"
    if promise == "not seen":
        assert served == SERVED[promise]
        assert given[last + 1].output == given[last].output, "it is seen by now"
        return
    assert given == wanted
    if promise == "live":
        assert served[-1] == "live", served
        assert served[last] == ("replays" if case.changes else "live"), served
        places = re.findall(rf"{__file__}:(\d+)", str(bended.why_live))
        lines = [linecache.getline(__file__, int(place)) for place in places]
        assert case.live_at
        # A function begins with its decorators, where the text stands as well.
        named = [line for line in lines if case.live_at in line and "live_at" not in line]
        assert named, bended.why_live
        return
    assert served == SERVED[promise], (served, bended.last_mismatch, bended.why_live)
    if promise == "done again":
        assert effects, "it does nothing"
    if promise == "one op":
        (trace,) = bended.traces
        calls = [op for op in trace.ops if op.kind is OpKind.CALL and op.target not in SHAPES]
        assert len(calls) == 1, trace


def test_every_case_has_a_row() -> None:
    assert set(CASES) - set(rows()) == set()


# Arguments


@case("which arguments there are", other=lambda: (grid(), grid()))
@case("which arguments there are", lambda: (grid(), None), other=lambda: (grid(), grid()))
def optional(x: Tensor, y: Any = None) -> Tensor:
    return x if y is None else x * y


NESTED = "their nesting, types, lengths and keys"


@case(NESTED, lambda: [grid()], other=lambda: [grid(), grid()])
@case(NESTED, lambda: [grid()], other=lambda: ((grid(),),))
@case(NESTED, lambda: {"a": grid()}, other=lambda: {"b": grid()})
@case(NESTED, lambda: {"a": grid(), "b": 1}, other=lambda: {"b": 1, "a": grid()})
@case(NESTED, lambda: Box(grid()), other=lambda: OtherBox(grid()))
def nested(tree: Any) -> Any:
    if isinstance(tree, Box):
        return tree.value * len(type(tree).__name__)
    return list(tree.items()) if isinstance(tree, dict) else type(tree)(x * len(tree) for x in tree)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class OtherBox(Box):
    pass


NUMBERS = "numbers that Python uses: `if n > 3`, `range(n)`"
PASSED_ON = "numbers that only operations use: `x * n`"


@case(NUMBERS, lambda: (grid(), 2), other=lambda: (grid(), 5))
@case(NUMBERS, lambda: (grid(), 2.5), other=lambda: (grid(), 5.5))
def number_used(x: Tensor, n: Any) -> Tensor:
    return x + 1 if n > 3 else x


@case(PASSED_ON, lambda: (grid(), 2), other=lambda: (grid(), 5))
@case(PASSED_ON, lambda: (grid(), (2.5,)), other=lambda: (grid(), (5.5,)))
def number_passed_on(x: Tensor, n: Any) -> Tensor:
    return x * (n[0] if isinstance(n, tuple) else n) + 1


PLAIN = "other plain values; numbers in lists, dicts and objects"


@case(PLAIN, lambda: (grid(), True), other=lambda: (grid(), False))
@case(PLAIN, lambda: (grid(), True), other=lambda: (grid(), 1.0))
@case(PLAIN, lambda: (grid(), "ab"), other=lambda: (grid(), "abc"))
@case(PLAIN, lambda: (grid(), torch.float64), other=lambda: (grid(), torch.float16))
@case(PLAIN, lambda: (grid(), [2]), other=lambda: (grid(), [3]))
@case(PLAIN, lambda: (grid(), {"n": 2}), other=lambda: (grid(), {"n": 3}))
@case(PLAIN, lambda: (grid(), Box(2)), other=lambda: (grid(), Box(3)))
def plain_value(x: Tensor, value: Any) -> Any:
    return x * len(repr(vars(value) if isinstance(value, Box) else value)), value


@case("numpy arrays", lambda: (grid(), np.ones(3)), other=lambda: (grid(), np.zeros(3)))
def array_given(x: Tensor, values: Any) -> Tensor:
    return x * float(values.sum())


@case("which arguments are the same object", lambda: (grid(), grid()), other=lambda: (grid(),) * 2)
def same(x: Tensor, y: Tensor) -> Any:
    return x * 2 if x is y else x * 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


GENERATOR = "a `torch.Generator`, `random.Random` or generator of numpy that is drawn from"


@case(GENERATOR, lambda: (grid(), generator(1)), other=lambda: (grid(), generator(2)))
def generator_given(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.rand(3, generator=generator)


@case(GENERATOR, lambda: (grid(), random.Random(1)), other=lambda: (grid(), random.Random(2)))
def generator_of_python_given(x: Tensor, generator: random.Random) -> Tensor:
    return x * generator.random()


@case(GENERATOR, lambda: (grid(), random.Random(1)), other=lambda: (grid(), random.Random(2)))
def generator_of_python_that_keeps_a_number(x: Tensor, generator: random.Random) -> Tensor:
    return x * generator.gauss(0, 1)


@case(
    GENERATOR,
    lambda: (grid(), np.random.default_rng(1)),
    other=lambda: (grid(), np.random.default_rng(2)),
)
def generator_of_numpy_given(x: Tensor, generator: Any) -> Tensor:
    return x * generator.random()


UNKNOWN = "iterators, `bytearray` and the like as arguments; iterators and generators anywhere"


@case(UNKNOWN, lambda: (grid(), iter([1, 2])), live_at="next(steps)")
@case(UNKNOWN, lambda: (grid(), bytearray(b"a")), live_at="next(steps)")
def iterator_given(x: Tensor, steps: Any) -> Tensor:
    return x * (next(steps) if hasattr(steps, "__next__") else steps[0])


# Tensors


FACTS = "type, dtype, device, layout, number of dimensions, `requires_grad`"


@case(FACTS, other=lambda: grid().double())
@case(FACTS, other=lambda: grid().to("meta"))
@case(FACTS, other=lambda: grid().to_sparse())
@case(FACTS, other=lambda: grid().unsqueeze(0))
@case(FACTS, other=lambda: grid().requires_grad_())
@case(FACTS, other=lambda: nn.Parameter(grid(), requires_grad=False))
def facts(x: Tensor) -> Any:
    return x * 2, x.dtype, x.dim(), x.requires_grad, type(x).__name__


SIZES = "sizes and strides that Python uses: `if len(x) > 3`"


@case(SIZES, other=lambda: torch.ones(5, 3))
@case(SIZES, other=lambda: grid().t().contiguous().t())
@case(SIZES, other=lambda: torch.ones(2, 9)[:, ::3])
def sizes_used(x: Tensor) -> Tensor:
    y = x if len(x) < 3 else x - 1
    return y * 2 if x.stride(-1) == 1 else y * 3


SIZES_PASSED = "sizes that only operations use: `x.view(x.shape[0], -1)`"


@case(SIZES_PASSED, other=lambda: torch.ones(5, 4))
def sizes_passed_on(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], 2) + x.view(x.size(0), -1).sum(1, keepdim=True) / x.numel()


MADE_BY_C = "numbers that `int`, `len`, `math` or `range` make of sizes and values"


@case(MADE_BY_C, other=lambda: grid() + 1)
def number_of_a_value(x: Tensor) -> Tensor:
    return x * int(x.sum())


@case(MADE_BY_C, other=lambda: grid() - 3)
def number_of_a_length(x: Tensor) -> Tensor:
    return x * len(x[x > 1])


RESULTS = "metadata of results, read by Python: `y.shape`, `y.is_contiguous()`"


@case(RESULTS, other=lambda: grid() - 3)
def sizes_of_results(x: Tensor) -> Tensor:
    return x * 2 if x.relu().nonzero().shape[0] > 5 else x * 3


@case(RESULTS, other=lambda: torch.ones(2, 6)[:, ::2])
def strides_of_results(x: Tensor) -> Tensor:
    y = x * 1
    return x + 1 if y[:, :2].detach().reshape(-1).is_contiguous() and x[0].is_contiguous() else x


def tagged(value: int) -> Tensor:
    x = grid()
    x.tag = value  # type: ignore[attr-defined]
    return x


@case("attributes set on an argument: `x.tag`", lambda: tagged(2), other=lambda: tagged(3))
@case("attributes set on an argument: `x.tag`", other=lambda: tagged(3))
def tag_read(x: Tensor) -> Tensor:
    return x * getattr(x, "tag", 1)


# Values


@case("values that only operations use: `x.relu()`", other=lambda: -grid())
def values_passed_on(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.exp())


VALUES = "values that Python uses: `if x.any()`, `.item()`, `tolist()`, text that it reads"


@case(VALUES, other=lambda: -grid())
def branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


@case(VALUES, other=lambda: grid() + 1)
def integer(x: Tensor) -> Tensor:
    return x.repeat(int(x.max()), 1)


@case(VALUES, other=lambda: grid() + 5)
def listed(x: Tensor) -> Any:
    return [x * 2 for value in x[0].tolist() if value > 3], f"{x[0, 0]:.1f}"


@case(
    "values that are printed to the screen, or in the message of a `torch._assert` that holds",
    other=lambda: -grid(),
)
def printed(x: Tensor) -> Tensor:
    torch._assert((x < 100).all(), f"{x}")
    print(f"{x.sum():.2f}", x.max().item())
    return x * 2


@case(
    "whether an operation returns its input, a view or a copy", other=lambda: torch.ones(3, 2).t()
)
def contiguous(x: Tensor) -> Tensor:
    y = x * 1
    z = (y if len(x) > 9 else y.t() if x.sum() > 6 else y).contiguous()
    z.add_(1)
    return y + (2 if z is y else 3)


RAISES = (
    "whether an operation raises, if the model has a handler; its message, if the handler reads it"
)


@case(RAISES, lambda: (grid(), torch.tensor([1])), other=lambda: (grid(), torch.tensor([9])))
def caught(x: Tensor, index: Tensor) -> Tensor:
    try:
        return x[index] + 1
    except IndexError:
        return x * 2


@case(RAISES, lambda: (grid(), torch.tensor([9])), other=lambda: (grid(), torch.tensor([100])))
def text_asked_for(x: Tensor, index: Tensor) -> Tensor:
    try:
        return x[index] + 1
    except IndexError as error:
        return x * len(str(error))


if can_exchange_operands():

    @case(
        "arrays of `x.numpy()`, and what numpy and other packages make of them",
        other=lambda: grid() + 1,
    )
    def sorted_by_numpy(x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.sort(x.detach().numpy())[::-1].copy())

    @case(
        "answers about such arrays: `if array.max() > 0`, `len(array)`, `int(array.argmax())`",
        other=lambda: -grid() - 1,
    )
    def asked_of_an_array(x: Tensor) -> Tensor:
        return x * 2 if x.detach().numpy().max() > 0 else x * 3


def pair(same: bool) -> tuple[Tensor, Tensor]:
    x = grid()
    return x, x.view(3, 2) if same else x.clone()


ADDRESSES = "whether tensors begin at one address: `x.data_ptr() == y.data_ptr()`"


@case(ADDRESSES, lambda: pair(True), other=lambda: pair(False))
@case(ADDRESSES, lambda: pair(False), other=lambda: pair(True))
def address_compared(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    return z * 3 if x.data_ptr() == y.data_ptr() != z.data_ptr() else z + y.sum()


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (one.data_ptr() for one in self.parameters())
        return x * self.a if [a] == [b] else x + self.b


case(ADDRESSES, change=lambda m, p: setattr(m.b, "data", m.a.data))(Shares)


@case(
    "whether a tensor has a `.grad`, a `.grad_fn`, or a base",
    change=lambda m, p: setattr(m.w, "grad", torch.ones(3)),
)
class HasGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2 if self.w.grad is None else x * self.w.grad + 1


# Modules


class Layer(nn.Module):
    """Depends on everything that a module can hold."""

    def __init__(self, read: Callable[[Any, Tensor], Any] | None = None, value: Any = None) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.read, self.value = read, value

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.fc(x)) if self.read is None else self.read(self, x)


def reading(read: Callable[[Any, Tensor], Any], value: Callable[[], Any]) -> Callable[[], Layer]:
    """A maker of a module whose forward is `read(self, x)`, with `value` in an attribute."""
    return lambda: Layer(read, value())


def change(row: str, make: Any, *changes: Change, **options: Any) -> None:
    """Add a case for each of some changes to the same model."""
    for one in changes:
        case(row, change=one, **options)(make)


def deep(levels: int) -> Box:
    return Box(deep(levels - 1) if levels else 2.0)


def deepest(box: Any) -> Any:
    return deepest(box.value) if isinstance(box.value, Box) else box


def first(model: Any, x: Tensor) -> Tensor:
    return x * model.value[0]


case(UNKNOWN, live_at="next(m.value)")(
    reading(lambda m, x: x * next(m.value), lambda: iter(range(99)))
)
CONTENT = (
    "counters, deques, `bytearray`, partials, bound methods, registries, objects of any depth: "
    "what they hold"
)


def alters(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.value[0] += 1


for value in (
    lambda: bytearray(b"a"),
    lambda: array.array("f", [1]),
    lambda: collections.Counter({0: 1}),
    lambda: collections.deque([1]),
):
    change(CONTENT, reading(first, value), alters)
change(
    CONTENT, reading(lambda m, x: x * deepest(m.value).value, lambda: deep(12)),
    lambda m, p: p.setattr(deepest(m.value), "value", 3.0),
)  # fmt: skip
change(
    CONTENT, reading(lambda m, x: x * m.value()[0], lambda: functools.partial(list, [2])),
    lambda m, p: m.value.args[0].insert(0, 3),
)  # fmt: skip
change(
    "optimizers, schedulers and distributions: what they hold",
    reading(
        lambda m, x: x * m.value.param_groups[0]["lr"],
        lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5),
    ),
    lambda m, p: p.setitem(m.value.param_groups[0], "lr", 0.25),
)


class Moved:
    def go(self) -> int:
        return 2


def moves(moved: Moved) -> Any:
    return Moved, ()


copyreg.pickle(Moved, moves)
MOVED = Moved()
case("functions that are found by a computed name, by operators, by descriptors", calls=1)(
    lambda: lambda x: x * copy.copy(MOVED).go()
)

ATTRIBUTES = "`training` and other plain attributes of all modules"
change(ATTRIBUTES, Layer, lambda m, p: m.eval(), lambda m, p: setattr(m.drop, "p", 0.1))
change(ATTRIBUTES, reading(lambda m, x: x * m.value, lambda: 2), sets(value=3), sets(value=2.0))

HELD = "lists, dicts, sets, numpy arrays and objects in attributes"
change(HELD, reading(lambda m, x: x * m.value[0], lambda: [2]), lambda m, p: m.value.insert(0, 3))
change(
    HELD, reading(lambda m, x: x * m.value["a"], lambda: {"a": 2}), lambda m, p: m.value.update(a=3)
)
change(HELD, reading(lambda m, x: x * len(m.value), lambda: {1}), lambda m, p: m.value.add(2))
change(
    HELD,
    reading(lambda m, x: x * m.value.value, lambda: Box(2)),
    lambda m, p: setattr(m.value, "value", 3),
)
change(
    HELD,
    reading(lambda m, x: x * float(m.value.sum()), lambda: np.ones(3)),
    lambda m, p: m.value.fill(3),
)
change(
    HELD, reading(lambda m, x: x * m.value[0], lambda: [2] * 999), lambda m, p: m.value.insert(0, 3)
)
change(
    HELD,
    reading(lambda m, x: x * m.value["a"], lambda: collections.UserDict(a=2)),
    lambda m, p: m.value.update(a=3),
)

REFERENCES = "weak references to what its modules hold (`nn.LSTM` has some)"


class Refers(nn.Module):
    """Holds a weight, and a weak reference to it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.reference = weakref.ref(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.reference()
        return x * 2 if weight is None else self.fc(x) @ weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc1 = nn.LSTM(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, number: int = 1) -> Tensor:
        return self.rnn(getattr(self, f"fc{number}")(x))[0]


def other_weight(model: Any, patch: Any) -> None:
    model.fc.weight = nn.Parameter(torch.ones(3, 3))


change(REFERENCES, Refers, other_weight)
change(REFERENCES, Recurrent, lambda m, p: m.rnn.eval())

IDENTITIES = (
    "which submodules and functions there are, and their order; the order of parameters, and which "
    "are None or tied"
)
change(
    IDENTITIES, Layer,
    sets(drop=nn.Identity()), lambda m, p: setattr(m.fc, "bias", None),
    lambda m, p: setattr(m.fc, "forward", torch.neg), sets(read=lambda m, x: x),
)  # fmt: skip
change(
    IDENTITIES, reading(lambda m, x: m.fc(x) if m.value is m.fc.weight else x, lambda: None),
    lambda m, p: setattr(m, "value", m.fc.weight),
)  # fmt: skip
change(
    IDENTITIES,
    reading(
        lambda m, x: functools.reduce(lambda y, layer: layer(y), m.value.values(), x),
        lambda: nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU6()}),
    ),
    lambda m, p: m.value.update({"a": m.value.pop("a")}),
)


class Shifted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + 1


change("the class of a module", Layer, sets(__class__=Shifted))


def twice(module: nn.Module) -> dict[str, Any]:
    return {name: nn.Parameter(held.detach() * 2) for name, held in module._parameters.items()}


change(
    "the tables of a module (parameters, submodules, hooks), or all of its attributes in one",
    Layer,
    lambda m, p: vars(m.fc).update(_parameters=twice(m.fc)),
    lambda m, p: vars(m).update(_modules={**m._modules, "fc": nn.Identity()}),
    lambda m, p: setattr(m.fc, "__dict__", {**vars(m.fc), "_parameters": twice(m.fc)}),
)


def fill(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})


PARAMETERS = "parameters, buffers and tensors in attributes: their values, or others in their place"
change(
    PARAMETERS, Layer, fill, lambda m, p: m.fc.weight.data.fill_(2),
    lambda m, p: setattr(m.fc, "weight", nn.Parameter(torch.ones(3, 3))),
)  # fmt: skip
change(
    PARAMETERS, reading(lambda m, x: x * m.value, lambda: torch.ones(3)), sets(value=torch.zeros(3))
)
change(
    PARAMETERS, lambda: nn.BatchNorm1d(3).eval(), lambda m, p: m.running_mean.fill_(1),
    lambda m, p: m.register_buffer("running_var", torch.full((3,), 9.0)),
)  # fmt: skip

STATE_FACTS = "their dtype, device, `requires_grad`, sizes and strides, where Python reads them"
change(
    STATE_FACTS,
    reading(lambda m, x: x * len(m.value) if m.value.is_cpu else x, lambda: torch.ones(3)),
    sets(value=torch.ones(5)), sets(value=torch.ones(3, device="meta")),
)  # fmt: skip
change(
    STATE_FACTS,
    reading(lambda m, x: x * 2 if m.fc.weight.requires_grad else x, lambda: None),
    lambda m, p: m.requires_grad_(False),
)


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    return parametrizations.weight_norm(nn.Linear(3, 3))


change(
    "parametrizations, weight norm, adapters around layers", parametrized,
    lambda m, p: m.parametrizations.weight.original0.data.mul_(2),
)  # fmt: skip

WRITES = (
    "what forward changes: tensors in place, attributes, buffers, lists, dicts, deques, gradients"
)


@case(WRITES, lambda: (grid(), [1], {"a": 1}, Box(1)))
class Writes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.hidden = torch.zeros(3)

    def forward(self, x: Tensor, notes: list[Any], table: dict[str, Any], box: Box) -> Tensor:
        x.add_(1)
        self.hidden = self.hidden + self.norm(x).sum(0)
        notes.append(x * 2)
        table["b"] = self.hidden
        box.value = x.shape[0]
        return x * self.hidden


@case(WRITES)
class ShiftsADeque(Layer):
    def __init__(self) -> None:
        super().__init__(value=collections.deque([torch.zeros(3), torch.ones(3)], maxlen=2))

    def forward(self, x: Tensor) -> Tensor:
        self.value.append(x.sum(0))
        return x * sum(self.value)


@case(WRITES)
class GoesBackInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.fc(x).sum().backward()
        return torch.autograd.grad(self.fc(x).sum(), self.fc.weight)[0]


@case("attributes that it sets on tensors: `y.tag = n`")
def tags(x: Tensor) -> Tensor:
    y = x * 2
    y.tag, x.tag = x.shape[0], y  # type: ignore[attr-defined]
    return y


@case("variables around a function that forward changes (`nonlocal`)")
def rebinds() -> Callable[[Tensor], Tensor]:
    total = torch.zeros(3)

    def model(x: Tensor) -> Tensor:
        nonlocal total
        total = total + x.sum(0)
        return x * total

    return model


ADDED_TO = "lists and deques that it appends to, and does not read"


@case(ADDED_TO)
class AppendsToAList(Layer):
    def __init__(self) -> None:
        super().__init__(value=[])

    def forward(self, x: Tensor) -> Tensor:
        self.value.append(x.mean().item())
        return x * 2


@case(ADDED_TO)
class AppendsToADeque(Layer):
    def __init__(self) -> None:
        super().__init__(value={"sums": collections.deque()})

    def forward(self, x: Tensor) -> Tensor:
        self.value["sums"].extend([x.sum().item(), x])
        return x * 2


UNWRITABLE = "what it changes otherwise: attributes of classes"


IN_TWO_CALLS = (
    "sets and long lists that it changes, if it uses them by `in`, `add`, `discard`, `append`, "
    "`[i]`, `len`, `sorted`, `list`, `sum`, `min`, `max` and the like only"
)


@case(IN_TWO_CALLS, calls=6)
class AddsToASet(Layer):
    def __init__(self) -> None:
        super().__init__(value=set())
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.n in self.value:
            return x
        self.value.add(self.n)
        return x * self.n


KEYED = (
    "dicts whose keys keep changing, by forward or between calls, if it uses them by such "
    "operations only: a cache by length, a counter by expert"
)


@case(KEYED, calls=6)
class FillsACache(Layer):
    def __init__(self) -> None:
        super().__init__(value={})
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.n not in self.value:
            self.value[self.n] = torch.arange(self.n).cos().sum()
        return x * self.value[self.n]


@case(
    "lists and deques whose length keeps changing, by forward or between calls, if it uses them by "
    "such operations only: the losses so far",
    calls=6,
)
class ReadsLosses(Layer):
    def __init__(self) -> None:
        super().__init__(value=[])

    def forward(self, x: Tensor) -> Tensor:
        self.value.append(x.mean().item())
        return x * self.value[-1] + sum(self.value)


@case(KEYED, calls=6)
class CountsByKey(Layer):
    def __init__(self) -> None:
        super().__init__(value=collections.Counter())
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.value[self.n] += 2
        return x * self.value[self.n]


class WritesIntoAnArray(Layer):
    def __init__(self) -> None:
        super().__init__(value=np.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.value[0] += 1
        return x * float(self.value[0])


if can_exchange_operands():
    case(
        "numpy arrays that it changes, or that change between calls, as long as [code that can be "
        "watched](errors/live_state.md#arrays-of-numpy-that-change) uses them: a histogram, a ring "
        "buffer, a running mean",
        calls=1,
    )(WritesIntoAnArray)


@case(IN_TWO_CALLS, calls=6)
class WritesIntoALongList(Layer):
    def __init__(self) -> None:
        super().__init__(value=[0] * 999)

    def forward(self, x: Tensor) -> Tensor:
        self.value[0] += 1
        return x * self.value[0]


class CountsInItsClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInItsClass.calls += 1
        return x * CountsInItsClass.calls


@case(UNWRITABLE, live_at="CountsInItsClass.calls += 1")
def counts_in_its_class() -> CountsInItsClass:
    CountsInItsClass.calls = 0
    return CountsInItsClass()


MOVING = (
    "numbers that keep changing, by forward or between calls: a counter, a running mean, a "
    "temperature"
)


@case(MOVING, calls=6)
class Counter(Layer):
    def __init__(self) -> None:
        super().__init__(value=0)

    def forward(self, x: Tensor) -> Tensor:
        self.value += 1
        return x * self.value


@case(MOVING, calls=6)
class RunningMean(Layer):
    def __init__(self) -> None:
        super().__init__(value={"mean": 0.0})

    def forward(self, x: Tensor) -> Tensor:
        self.value["mean"] = 0.9 * self.value["mean"] + x.mean().item()
        return x * self.value["mean"]


COUNT = 0


@case(MOVING, calls=6)
def counts() -> Callable[[Tensor], Tensor]:
    globals()["COUNT"] = 0

    def model(x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    return model


EVERY_CALL = (
    "other plain values that change with each call, and numbers that Python needs by value in each "
    "call"
)


@case(EVERY_CALL, calls=6, live_at="self.value +=")
class Lengthens(Layer):
    def __init__(self) -> None:
        super().__init__(value="")

    def forward(self, x: Tensor) -> Tensor:
        self.value += "a"
        return x * len(self.value)


@case(EVERY_CALL, calls=16, live_at="self.value += 1")
class NeedsItByValue(Layer):
    def __init__(self) -> None:
        super().__init__(value=0)

    def forward(self, x: Tensor) -> Tensor:
        self.value += 1
        return x * ord(chr(self.value))


@case("parameters that the first call makes: lazy modules", calls=1)
def lazy() -> nn.Module:
    return nn.LazyLinear(2)


# Python around the model


SCALE, TABLE, WEIGHT = 2.0, {"a": [2.0]}, torch.ones(3)
SETTINGS = types.ModuleType("settings_of_the_model")
SETTINGS.SCALE = 2.0  # type: ignore[attr-defined]


def doubled(x: Tensor) -> Tensor:
    return x * 2


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


scaled.offset = 1.0  # type: ignore[attr-defined]
GLOBALS = "globals that its code names, also in other modules"


def puts(name: str, value: Any) -> Change:
    return lambda model, patch: patch.setitem(globals(), name, value)


change(GLOBALS, lambda: lambda x: x * SCALE, puts("SCALE", 3.0))
change(GLOBALS, lambda: lambda x: x * TABLE["a"][0], lambda m, p: p.setitem(TABLE, "a", [3.0]))
change(GLOBALS, lambda: lambda x: doubled(x), puts("doubled", torch.sin))
change(
    GLOBALS, lambda: lambda x: x * SETTINGS.SCALE, lambda m, p: p.setattr(SETTINGS, "SCALE", 3.0)
)
OWN_FILE = sys.modules[__name__]
change(GLOBALS, lambda: lambda x: x * OWN_FILE.SCALE, puts("SCALE", 3.0))
change(GLOBALS, lambda: lambda x: OWN_FILE.scaled_by(x, 2), puts("SCALE", 3.0))


def scaled_by(x: Tensor, n: int) -> Tensor:
    return x * SCALE * n


OF_TORCH = (
    "methods of the user's that methods of torch's classes call: `_conv_forward` of a convolution, "
    "`_call` of a transform"
)


class Strong(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias) * SCALE


class Bends(torch.distributions.Transform):
    def _call(self, x: Tensor) -> Tensor:
        return scaled_by(x, self.event_dim + 1)

    @property
    def event_dim(self) -> int:  # type: ignore[override]
        return 1


class Samples(torch.distributions.Laplace):
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.loc * SCALE


def transforming() -> Callable[[Tensor], Tensor]:
    bends = Bends()
    return lambda x: bends(x)


change(OF_TORCH, lambda: Strong(2, 2, 1), puts("SCALE", 3.0))
change(OF_TORCH, transforming, puts("SCALE", 3.0))
change(OF_TORCH, lambda: lambda x: Samples(x, 1.0).sample(), puts("SCALE", 3.0))
change(
    "tensors in globals and closures: their values, or others in their place",
    lambda: lambda x: x * WEIGHT,
    puts("WEIGHT", torch.zeros(3)),
)


def closing(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def using(module: types.ModuleType) -> Callable[[Tensor], Tensor]:
    return lambda x: x * module.SCALE


def refills(value: Any) -> Change:
    return lambda model, patch: setattr(model.__closure__[0], "cell_contents", value)


change(
    "tensors in globals and closures: their values, or others in their place",
    lambda: closing(torch.ones(3)),
    refills(torch.zeros(3)),
)
CLOSURES = "plain values, objects and modules in closures"
change(CLOSURES, lambda: closing(2.0), refills(3.0))
change(CLOSURES, lambda: using(SETTINGS), lambda m, p: p.setattr(SETTINGS, "SCALE", 3.0))

FUNCTIONS = "functions: their code, defaults and attributes"
change(
    FUNCTIONS, lambda: lambda x: scaled(x) + scaled.offset,
    lambda m, p: p.setattr(scaled, "__defaults__", (3.0,)),
    lambda m, p: p.setattr(scaled, "__code__", (lambda x, by: x - by).__code__),
    lambda m, p: p.setattr(scaled, "offset", 5.0),
)  # fmt: skip
change(
    FUNCTIONS, lambda: lambda x: shifted(x),
    lambda m, p: p.setattr(shifted, "__kwdefaults__", {"by": 3.0, "table": {"by": 1.0}}),
    lambda m, p: p.setitem(keywords_of(shifted), "by", 3.0),
    lambda m, p: p.setitem(keywords_of(shifted)["table"], "by", 3.0),
)  # fmt: skip


def shifted(x: Tensor, *, by: float = 2.0, table: dict[str, float] = {"by": 1.0}) -> Tensor:  # noqa: B006
    return x * table["by"] + by


def keywords_of(function: Any) -> dict[str, Any]:
    return function.__kwdefaults__  # type: ignore[no-any-return]


class Base(nn.Module):
    power = 2

    def scaled(self, x: Tensor) -> Tensor:
        return x**self.power

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Derived(Base):
    pass


CLASSES = "classes: attributes and methods that its code names, what hides inherited ones"
change(
    CLASSES, Derived,
    lambda m, p: p.setattr(Base, "power", 3),
    lambda m, p: p.setattr(Derived, "power", 3, raising=False),
    lambda m, p: p.setattr(Base, "scaled", lambda self, x: x + 9),
    lambda m, p: p.setattr(Base, "forward", lambda self, x: x - 9),
)  # fmt: skip
change(
    CLASSES, lambda: nn.Sequential(nn.Tanh(), nn.Tanh()),
    lambda m, p: p.setattr(nn.Tanh, "forward", lambda self, x: x.sin()),
)  # fmt: skip


class Helper:
    """No module; its methods read attributes, a global and a class attribute."""

    bias = 1.0

    def __init__(self) -> None:
        self.factor = 2.0

    @property
    def scale(self) -> float:
        return self.factor * SCALE

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale + self.bias


HELPERS = "helper objects: their attributes, methods, and what these read"
for use in (
    reading(lambda m, x: m.value(x), Helper),
    reading(lambda m, x: m.value(x), lambda: functools.partial(Helper())),
    reading(lambda m, x: m.value(x), lambda: Helper().__call__),
):
    change(HELPERS, use, puts("SCALE", 3.0), lambda m, p: p.setattr(Helper, "bias", 3.0))
change(
    HELPERS, reading(lambda m, x: m.value(x), Helper), lambda m, p: setattr(m.value, "factor", 3.0),
    lambda m, p: p.setattr(Helper, "__call__", lambda self, x: x),
)  # fmt: skip

CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=2.0)


class Within:
    """Sets a context variable for a while."""

    def __enter__(self) -> None:
        self.token = CONTEXT.set(3.0)

    def __exit__(self, *error: object) -> None:
        CONTEXT.reset(self.token)


case("context variables", mode=Within)(lambda: lambda x: x * CONTEXT.get())


@functools.lru_cache
def cached(n: int) -> float:
    return SCALE * n


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.arange(float(n))


def empties(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "SCALE", 3.0)
    cached.cache_clear()


@case("what `functools.lru_cache` keeps: plain values", change=empties)
def from_a_cache() -> Callable[[Tensor], Tensor]:
    cached.cache_clear()
    return lambda x: x * cached(3)


@functools.lru_cache
def halves(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0] * 2, shape[1] // 2


@case(
    "what it keeps by traced scalars, if its function only computes",
    lambda: torch.ones(3, 4),
    other=lambda: torch.ones(3, 8) if can_exchange() else torch.ones(3, 4) * 2,
)
def shapes_from_a_cache(x: Tensor) -> Tensor:
    return x.reshape(halves(tuple(x.shape)))


@functools.lru_cache
def total(n: int) -> float:
    return float(torch.arange(n).sum() * SCALE)


@functools.lru_cache
def multiples(n: int) -> Tensor:
    return torch.arange(n) * SCALE


def fills_others(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "SCALE", 3.0)
    total.cache_clear()
    multiples.cache_clear()


@functools.lru_cache
def steps(n: int) -> list[Tensor]:
    return [torch.arange(n), torch.ones(n)]


TENSORS = "tensors that it keeps, and numbers that it keeps of tensors"


@case(TENSORS, change=fills_others)
def total_from_a_cache() -> Callable[[Tensor], Tensor]:
    total.cache_clear()
    return lambda x: x * total(3)


@case("other objects that it keeps, and results of functions that do more than compute", calls=1)
def list_from_a_cache() -> Callable[[Tensor], Tensor]:
    steps.cache_clear()
    return lambda x: x * steps(3)[0]


@case(TENSORS, change=fills_others)
def tensor_from_a_cache() -> Callable[[Tensor], Tensor]:
    multiples.cache_clear()
    return lambda x: x * multiples(3)


@functools.lru_cache(maxsize=1)
def positions(n: int) -> Tensor:
    return torch.arange(n) / n


@case("results of operations on tensors, where each run fills the cache", calls=1)
def levels_from_a_cache() -> Callable[[Tensor], Tensor]:
    positions.cache_clear()
    return lambda x: x * positions(3) + positions(2)[:, None] * positions(1)


@functools.lru_cache
def noise(n: int) -> Tensor:
    return torch.randn(n)


def test_a_cache_that_is_emptied_is_filled_anew() -> None:
    results = []
    for called in (model := lambda x: x * noise(3), bt.BendedModule(model)):
        torch.manual_seed(0)
        noise.cache_clear()
        results.append([])
        for number in range(8):
            if number == 5:
                noise.cache_clear()
            results[-1].append(bits(called(torch.ones(3))))
    assert results[0] == results[1]


ENVIRONMENT = 'environment variables: `os.environ["NAME"]`, `os.getenv("NAME")`'


def environment(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("BENDTRACE_TEST", "3")


change(ENVIRONMENT, lambda: lambda x: x * float(os.getenv("BENDTRACE_TEST", "2")), environment)
change(
    ENVIRONMENT,
    lambda: lambda x: x * float(os.environ.get("PWD", "").count("/") + 2),
    lambda m, p: p.setenv("PWD", "/a/b/c/d/e/f/g/h/i"),
)
change(ENVIRONMENT, lambda: lambda x: x * 2 if "BENDTRACE_TEST" in os.environ else x, environment)
change(
    ENVIRONMENT, lambda: lambda x: x * len(os.environ["PATH"]),
    lambda m, p: p.setenv("PATH", os.environ["PATH"] + ":/elsewhere"),
)  # fmt: skip
change(
    ENVIRONMENT, lambda: lambda x: x * len(os.path.expanduser("~")),
    lambda m, p: p.setenv("HOME", "/at/home"),
)  # fmt: skip
EXCHANGED = (
    "functions of torch, `torch.nn.functional`, `torch.Tensor`, `torch.linalg`, numpy and math "
    "that are replaced: `torch.sin = f`"
)
layer_norm, view = nn.functional.layer_norm, Tensor.view
change(EXCHANGED, lambda: lambda x: x * math.sqrt(4), lambda m, p: p.setattr(math, "sqrt", abs))
change(
    EXCHANGED, lambda: lambda x: x * float(np.hypot(3, 4)),
    lambda m, p: p.setattr(np, "hypot", lambda a, b: a),
)  # fmt: skip
change(EXCHANGED, lambda: lambda x: torch.sin(x), lambda m, p: p.setattr(torch, "sin", torch.cos))
change(
    EXCHANGED, lambda: lambda x: x.sin(),
    lambda m, p: p.setattr(Tensor, "sin", lambda self: self + 1),
)  # fmt: skip
change(
    EXCHANGED, lambda: nn.LayerNorm(3),
    lambda m, p: p.setattr(
        nn.functional, "layer_norm", lambda *args, **kwargs: layer_norm(*args, **kwargs) * 2
    ),
)  # fmt: skip
change(
    EXCHANGED, lambda: lambda x: x.view(-1),
    lambda m, p: p.setattr(Tensor, "view", lambda self, *sizes: view(self, *sizes) * 2),
)  # fmt: skip
change(
    EXCHANGED, lambda: lambda x: torch.linalg.norm(x),
    lambda m, p: p.setattr(torch.linalg, "norm", lambda x: x.max()),
)  # fmt: skip
change(
    "clocks: `time.time()`, `time.perf_counter()`",
    lambda: lambda x: x * (time.time() // 1e12), lambda m, p: p.setattr(time, "time", lambda: 3e12),
)  # fmt: skip


# Modes and settings


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


class Attribute:
    """Sets an attribute, or calls a setter, for a while."""

    def __init__(self, put: Callable[[Any], Any], value: Any, before: Any) -> None:
        self.put, self.value, self.before = put, value, before

    def __enter__(self) -> None:
        self.put(self.value)

    def __exit__(self, *error: object) -> None:
        self.put(self.before)


class Negates(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.ones else out


NEGATES = Negates()


class NegatesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.ops.aten.ones.default else out


MODES = "grad and inference mode, autocast, default dtype and device"


class Modal(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x), torch.is_grad_enabled(), torch.ones(1)


for mode in (
    torch.no_grad, torch.inference_mode, autocast, lambda: torch.device("meta"),
    lambda: Attribute(torch.set_default_dtype, torch.float64, torch.float32),
):  # fmt: skip
    case(MODES, mode=mode)(Modal)
case(
    "function modes around the call (`TorchFunctionMode`): they see what the model calls",
    mode=lambda: NEGATES,
    live_at="def __torch_function__",
)(Modal)

SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "deterministic": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True, False
    ),
    "precision": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high", "highest"
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.enabled,
        torch._C._set_mkldnn_enabled, False, True,
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled,
        lambda on: setattr(torch.backends.cudnn, "enabled", on), False, True,
    ),
    "attention": (
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False, True
    ),
    "anomaly": (
        torch.is_anomaly_enabled, lambda on: torch.set_anomaly_enabled(on, False), True, False
    ),
    "fast path": (
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled,
        False, True,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads, 2, 1),
}  # fmt: skip

FLAGS = (
    "deterministic algorithms, float32 precision, MKLDNN, cuDNN, attention, anomaly detection, "
    "threads"
)
for ask, put, value, before in SWITCHES.values():
    case(FLAGS, mode=functools.partial(Attribute, put, value, before))(
        functools.partial(lambda ask: lambda x: (x * 2, ask()), ask)
    )

case("dispatch modes and hooks on saved tensors around the call", mode=NegatesBelow)(Modal)
case(
    "dispatch modes and hooks on saved tensors around the call", lambda: grid().requires_grad_(),
    mode=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
)(lambda: lambda x: x.exp())  # fmt: skip

INSIDE = "modes that forward switches itself: grad, inference, autocast, device, function modes"


@case(INSIDE, lambda: grid().requires_grad_())
class Switches(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.fc(x)
        with torch.inference_mode():
            z = self.fc(x)
        with autocast():
            w = self.fc(x)
        with Negates():
            v = torch.ones(3)
        with torch.device("cpu"):
            return y + w + x, z.clone(), v, torch.ones(3) * x


SET_INSIDE = (
    "settings that forward changes for a while: default dtype, `sdpa_kernel`, deterministic "
    "algorithms, MKLDNN, cuDNN, threads, checks of distributions"
)


@case(SET_INSIDE)
def other_default_dtype(x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return x.double() + torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


@case(SET_INSIDE, lambda: torch.ones(1, 1, 2, 4))
def other_attention(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@case(SET_INSIDE)
def deterministic_inside(x: Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return x * 2, torch.empty(3)
    finally:
        torch.use_deterministic_algorithms(False)


@case(
    "other settings that it changes: default device, precision, anomaly detection",
    live_at="torch.set_default_device",
)
def other_default_device(x: Tensor) -> Tensor:
    torch.set_default_device("cpu")
    y = torch.ones(3)
    torch.set_default_device(None)
    return x + y


# Randomness


DRAWN = "random numbers of torch, Python and numpy; arrays of them"


@case(DRAWN)
def draws(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x) * torch.rand(3) + torch.randn_like(x)


@case("seeding: `manual_seed`, `fork_rng`, `random.seed`, `numpy.random.seed`")
def seeds(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = torch.rand(3)
    return x * y + torch.rand(3)


@case("a generator in an attribute or global, drawn from")
class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__(value=generator(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(3, generator=self.value)


@case(
    "a generator that forward seeds, or asks for its state; `initial_seed()`",
    live_at="manual_seed(",
)
class SeedsItsGenerator(OwnGenerator):
    def forward(self, x: Tensor) -> Tensor:
        self.value.manual_seed(3)
        return x * torch.rand(3, generator=self.value)


@case(
    "a generator that forward seeds, or asks for its state; `initial_seed()`",
    live_at="initial_seed()",
)
def seed_asked_for(x: Tensor) -> Tensor:
    return x * torch.initial_seed()


@case(DRAWN)
def pythons(x: Tensor) -> Tensor:
    random.seed(x.shape[0])
    return x * random.random()


@case(DRAWN)
def numpys(x: Tensor) -> Tensor:
    np.random.seed(x.shape[0])
    return x * np.random.rand()


if can_exchange_operands():

    @case(DRAWN)
    def numpys_array(x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(*x.shape))


@case("`numpy.random.shuffle`; draws that C code makes unseen", live_at="np.random.shuffle(")
def shuffled(x: Tensor) -> Tensor:
    order = np.arange(len(x))
    np.random.shuffle(order)
    return x[torch.from_numpy(order)]


# What is one operation


def needing() -> Tensor:
    return grid().requires_grad_()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 7


def scripts() -> Callable[[Tensor], Tensor]:
    scripted = torch.jit.script(nn.Softplus())
    return lambda x: scripted(x)


@bt.opaque
def smoothed(x: Tensor) -> Tensor:
    return torch.from_numpy(np.convolve(x.detach().numpy().ravel(), [0.5, 0.5]))


@torch.library.custom_op("bendtrace_guarded::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    x += 1


def other_values() -> Tensor:
    return (grid() * 0.5).requires_grad_()


IS_EXP = torch.tensor(True)
ONE_OP = {
    "an `autograd.Function`, with its own backward": lambda x: Cube.apply(x),
    "scripted and traced functions and modules (`torch.jit`)": scripts,
    "`vmap`, `grad`, `jvp` and other transforms": lambda x: torch.func.vmap(lambda r: r.exp() * 2)(
        x
    ),
    "higher-order operations: `torch.cond`, `while_loop`": lambda x: torch.cond(
        IS_EXP, lambda y: y.exp(), lambda y: y - 1, (x,)
    ),
    "a function named by `bt.opaque`": lambda x: smoothed(x),
}
for row, one_op in ONE_OP.items():
    case(row, needing, other=other_values)(one_op)


@case("numbers that such an operation closes over or reads", other=lambda: torch.ones(5, 3))
def closes_over_a_size(x: Tensor) -> Tensor:
    n = x.shape[0]
    return torch.func.vmap(lambda row: row * n)(x)


@case("custom operators (`torch.ops`), those that write in place too", other=lambda: grid() * 2)
def custom(x: Tensor) -> Tensor:
    torch.ops.bendtrace_guarded.add_one(x)
    return x


@case("submodules that `torch.compile` compiled: they run as they are", other=lambda: grid() * 2)
class HoldsCompiled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


SOMETIMES = (
    "whether a function named by `bt.opaque`, or an `autograd.Function` with branches, returns "
    "a tensor, a number or None"
)


@bt.opaque
def sometimes(x: Tensor) -> Any:
    return x * 2 if x.sum() > 0 else None


@bt.opaque
def number_or_none(x: Tensor) -> Any:
    return 3 if x.sum() > 0 else None


@bt.opaque
def tensor_or_number(x: Tensor) -> Any:
    return x * 2 if x.sum() > 0 else 3.0


class Sometimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2 if x.sum() > 0 else None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


for given, other in ((grid, lambda: -grid()), (lambda: -grid(), grid)):
    for kind in (sometimes, number_or_none, tensor_or_number, lambda x: Sometimes.apply(x)):

        @case(SOMETIMES, given, other=other)
        def takes(x: Tensor, kind: Any = kind) -> Any:
            found = kind(x)
            return x - 1 if found is None else found + x


# What runs live


def hooked(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.fc.register_forward_hook(lambda module, args, out: out * 2)


FORWARD_HOOKS = "forward hooks on modules, yours and those of packages: `spectral_norm`"


@case(FORWARD_HOOKS)
class HookedLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        hooked(self, None)


@case("full backward hooks on modules")
class HookedBackward(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_full_backward_hook(lambda module, given, out: None)


@case(
    'backward hooks that torch calls "non-full", in calls with gradients; others, if forward '
    "computes gradients; hooks of a `HookManager()`",
    live_at="lambda module, given, out: given",
)
class ComputesHookedGradients(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_full_backward_hook(lambda module, given, out: given)

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.fc(y).sum(), y)
        return found


change(
    FORWARD_HOOKS,
    lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    lambda m, p: m.weight_orig.data.add_(torch.eye(3)),
)


@case("hooks that forward puts on tensors (`y.register_hook(f)`)")
def hooked_within(x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    z = y * 2
    z.register_hook(lambda gradient: gradient * 3)
    return torch.autograd.grad(z.sum(), y)[0] * x


change(
    "hooks on parameters and on tensors among the arguments", Layer,
    lambda m, p: m.fc.weight.register_hook(lambda gradient: gradient * 2),
)  # fmt: skip

ESCAPES = (
    "content handed to other code: by `numpy()` to texts and buffers, by `data_ptr()` to code that "
    "does more than to compare it, storages, dlpack, pickle"
)


@case(ESCAPES, live_at="x.numpy()")
def to_numpy(x: Tensor) -> Tensor:
    return x * x.numpy().tobytes()[0]


@case(ESCAPES, live_at="y.data_ptr()")
def to_a_pointer(x: Tensor) -> Tensor:
    y = x.clone()
    (ctypes.c_float * 1).from_address(y.data_ptr())[0] = 5.0
    return x * y


@case(ESCAPES, live_at="x.data_ptr()")
def to_a_key(x: Tensor) -> Tensor:
    return x * len({x.data_ptr(): 1, x.view(-1).data_ptr(): 2})


@case(ESCAPES, live_at="from_dlpack(x)")
def to_dlpack(x: Tensor) -> Tensor:
    return x + torch.from_dlpack(x)


MADE_HERE = (
    "tensors made by old constructors, by numpy, with modules, or as copies: `Variable(y)`, "
    "`torch.LongTensor([1])`, `from_numpy`, `nn.Parameter(y)`, `nn.Linear(3, 3)`, `deepcopy`"
)


@case(MADE_HERE)
def legacy(x: Tensor) -> Tensor:
    return Variable(x) * torch.Tensor([1, 2, 3]) + x[torch.LongTensor([0])]


@case(MADE_HERE)
def parameter_made(x: Tensor) -> Tensor:
    return x * nn.Parameter(torch.ones(3))


@case(MADE_HERE)
def made_by_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.ones(3))


@case(MADE_HERE)
def module_made(x: Tensor) -> Tensor:
    made = nn.Linear(3, 3)
    return made(x) + copy.deepcopy(made)(x)


MADE = "tensors made unseen: by a `torch.FloatTensor` that C code calls, `frombuffer`"
FLOATS = torch.FloatTensor


@case(MADE, live_at="map(FLOATS")
def made_by_c_code(x: Tensor) -> Tensor:
    return x * next(map(FLOATS, [[1, 2, 3]]))


@case(MADE, live_at="torch.frombuffer(")
def made_of_a_buffer(x: Tensor) -> Tensor:
    return x * torch.frombuffer(bytearray(4), dtype=torch.float32)


SHARED = "an array that is written to, or kept, while a tensor shares its memory"


@case(SHARED, live_at="torch.from_numpy(")
def written_to(x: Tensor) -> Tensor:
    values = np.ones(1)
    y = torch.from_numpy(values)
    values[0] = 2
    return x * y


@case("threads that forward starts", live_at="thread.start()")
def threaded(x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found[0]


SAVED = "`saved_tensors_hooks` in forward; checkpoints in others, or with a `context_fn`"


@case(SAVED, needing, live_at="checkpoint(torch.exp")
def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(
        lambda x: checkpoint(torch.exp, x, use_reentrant=False), x * 2, use_reentrant=False
    )


CHECKPOINTS = "what a block under `checkpoint(..., use_reentrant=False)` changes outside of it"


@case(CHECKPOINTS, needing, live_at="checkpoint(self.part")
class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def part(self, x: Tensor) -> Tensor:
        self.times += 1
        return x.exp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x * 2, use_reentrant=False)  # type: ignore[no-any-return]


@case(SAVED, needing, live_at="save_on_cpu()")
def saved(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.exp() * 2


# What Cube.apply comes down to; since torch 2.14 it is that itself.
past = super(torch.autograd.function._SingleLevelFunction, Cube).apply


@case(
    "`apply` of an `autograd.Function`, looked up before the run (since torch 2.14, a C++ one)",
    needing,
    live_at="past(x)",
)
def calls_past_apply(x: Tensor) -> Tensor:
    return past(x) * 2


@case("dispatch modes in forward", live_at="with NegatesBelow()")
def dispatched(x: Tensor) -> Tensor:
    with NegatesBelow():
        return x * torch.ones(3)


@case("forward-mode differentiation in forward", live_at="forward_ad.dual_level()")
def forward_mode(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(dual * dual).tangent


SWITCHED_OFF = "`DisableTorchFunction`, `swap_tensors`, `y.real = ...`"


@case(SWITCHED_OFF, live_at="torch._C.DisableTorchFunction()")
def without_modes(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x * 2


@case(SWITCHED_OFF, live_at="swap_tensors(")
def swapped(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    torch.utils.swap_tensors(y, z)
    return y - z * 2


@case(SWITCHED_OFF, live_at="y.real = ")
def real_part(x: Tensor) -> Tensor:
    y = torch.complex(x, x)
    y.real = x * 3
    return y


READS_CHANGES = "one operation that reads what forward changes, or closes over its values"


@case(READS_CHANGES, live_at="self.part(x)")
class PartReads(Layer):
    @bt.opaque
    def part(self, x: Tensor) -> Tensor:
        return x * self.value

    def forward(self, x: Tensor) -> Tensor:
        self.value = float(x.shape[0])
        return self.part(x)


@case(READS_CHANGES, live_at="bt.opaque(lambda")
def closes_over(x: Tensor) -> Tensor:
    total = x.sum()
    return bt.opaque(lambda y: y * total)(x)


def gives_a_module(x: Tensor) -> Any:
    return x * 2, nn.ReLU()


case("outputs that cannot be made again: modules, generators", live_at="def gives_a_module")(
    gives_a_module
)


OPENED = (
    "files that forward opens, or that the standard library opens for it: `configparser`, `bz2`, "
    "`tokenize`"
)
READ_OUTSIDE = (
    "what the standard library reads otherwise: `argparse`, `sqlite3`, `mmap`, `ctypes`, locks, "
    "`os.environb`, names of log levels, handlers of `codecs`"
)


@case(OPENED, live_at="open(")
def read(x: Tensor) -> Tensor:
    with open(__file__) as file:
        return x * len(file.readline())


BUSY = (
    "how much GPU memory is in use, and how far the GPU has got: `torch.cuda.memory_allocated()`, "
    "`Event.query()`"
)


@case(BUSY, live_at="torch.cuda.memory_allocated()")
def asks_for_memory(x: Tensor) -> Tensor:
    return x * (2 if torch.cuda.memory_allocated() < 1 << 40 else 3)


@case(BUSY, live_at="memory_allocated()")
def asks_for_memory_by_name(x: Tensor) -> Tensor:
    return x * (2 if memory_allocated() < 1 << 40 else 3)


@case(OPENED, live_at="Path(")
def read_path(x: Tensor) -> Tensor:
    return x * len(Path(__file__).read_text())


@case(OPENED, live_at="configparser.ConfigParser().read(")
def read_settings(x: Tensor) -> Tensor:
    return x * len(configparser.ConfigParser().read("/dev/null"))


@case(READ_OUTSIDE, live_at="ctypes.c_int(")
def asks_c(x: Tensor) -> Tensor:
    return x * ctypes.c_int(3).value


@case(READ_OUTSIDE, live_at="os.environb")
def asks_for_bytes(x: Tensor) -> Tensor:
    return x * (2 if os.environb.get(b"BENDTRACE_SET") else 3)


@case(READ_OUTSIDE, live_at="logging.getLevelName(")
def names_a_level(x: Tensor) -> Tensor:
    return x * len(logging.getLevelName(7))


codecs.register_error("bendtrace", codecs.replace_errors)


@case(READ_OUTSIDE, live_at='.encode("ascii", "bendtrace")')
def encodes(x: Tensor) -> Tensor:
    return x * len("abc".encode("ascii", "bendtrace"))


@case(READ_OUTSIDE, live_at="str(mmap.mmap)")
def takes_a_type(x: Tensor) -> Tensor:
    return x * len(str(mmap.mmap))


LISTED = "environment variables that it sets, or lists"


@case(LISTED, live_at="sorted(")
def listed_variables(x: Tensor) -> Tensor:
    return x * len(sorted(os.environ))


@case(LISTED, live_at="len(os")
def counted_variables(x: Tensor) -> Tensor:
    return x * len(os.environ)


@case(LISTED, live_at="os.environ[")
def set_variable(x: Tensor) -> Tensor:
    os.environ["BENDTRACE_SET"] = "1"
    return x * 2


# What stands around the model


BY_NAME = (
    "clocks taken by name (`from time import time`), `datetime.now()`, whether a file is there, "
    "the stack"
)


@case(BY_NAME, live_at="time_ns()")
def clock_by_name(x: Tensor) -> Tensor:
    return x * 2 if time_ns() else x


@case(BY_NAME, live_at="datetime.datetime.now()")
def date_of_today(x: Tensor) -> Tensor:
    return x * 2 if datetime.datetime.now() else x


@case(BY_NAME, live_at="os.path.exists(")
def asks_for_a_file(x: Tensor) -> Tensor:
    return x * 2 if os.path.exists("/") else x


@case("globals named by a computed string: `globals()[name]`, `eval`, `importlib`", live_at="SC")
def computed_global(x: Tensor) -> Any:
    return x * globals()["SC" + "ALE"]


ENTROPY = "randomness that nothing can seed: `os.urandom`, `uuid4`, `secrets`, `default_rng()`"


@case(ENTROPY, live_at="uuid4()")
def draws_a_uuid(x: Tensor) -> Tensor:
    return x * 2 if uuid.uuid4() else x


@case(ENTROPY, live_at="default_rng()")
def makes_a_generator(x: Tensor) -> Tensor:
    return x * 2 if np.random.default_rng().random() < 2 else x


change(
    "functions of the standard library that are replaced: `operator.add = f`",
    lambda: lambda x: x * operator.index(2),
    lambda m, p: p.setattr(operator, "index", lambda number: 5),
)
case(
    "`__name__`, `__doc__` and the like of classes and functions",
    mode=lambda: Attribute(lambda name: setattr(Base, "__name__", name), "Other", "Base"),
)(lambda: lambda x: x * len(Base.__name__))  # fmt: skip
INSTALLED_CLASSES = (
    "classes of installed packages that are changed; `__bases__` that are replaced, `ABC.register`"
)
change(
    INSTALLED_CLASSES,
    reading(lambda m, x: x * (m.value.order() + 2), networkx.Graph),
    lambda m, p: p.setattr(networkx.Graph, "order", lambda self: 5),
)


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + getattr(self.weight, "tag", 0)


change(
    "attributes that are set on a parameter or buffer between calls (`weight.tag = 1`)", Tagged,
    lambda m, p: p.setattr(m.weight, "tag", 3.0, raising=False),
)  # fmt: skip


class Double:
    def factor(self) -> int:
        return 2


class Triple:
    def factor(self) -> int:
        return 3


class Inheriting(Double):
    pass


INHERITING = Inheriting()
case(
    INSTALLED_CLASSES,
    mode=lambda: Attribute(lambda b: setattr(Inheriting, "__bases__", b), (Triple,), (Double,)),
)(lambda: lambda x: x * INHERITING.factor())
change(
    "a new global that hides a builtin", lambda: lambda x: x * len([1]),
    lambda m, p: p.setitem(globals(), "len", lambda x: 9),
)  # fmt: skip
change(
    "builtins that are replaced: `builtins.divmod = f`", lambda: lambda x: x * divmod(7, 2)[0],
    lambda m, p: p.setattr(builtins, "divmod", lambda a, b: (5, 6)),
)  # fmt: skip
PUT = (
    "modules that forward imports, replaced in `sys.modules`; methods that are added to "
    "`torch.Tensor`"
)
sys.modules["of_a_model"] = types.ModuleType("of_a_model")
sys.modules["of_a_model"].factor = 2  # type: ignore[attr-defined]


def imports(x: Tensor) -> Tensor:
    import of_a_model

    return x * of_a_model.factor


change(
    PUT, lambda: imports,
    lambda m, p: p.setitem(sys.modules, "of_a_model", types.SimpleNamespace(factor=3)),
)  # fmt: skip
change(
    PUT, lambda: lambda x: x.doubled() if hasattr(x, "doubled") else x,
    lambda m, p: p.setattr(Tensor, "doubled", lambda self: self * 2, raising=False),
)  # fmt: skip


def test_filters_of_warnings_are_compared_by_what_they_contain() -> None:
    """Each `catch_warnings` around a call makes the same filters again."""

    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            warnings.warn("positive", stacklevel=1)
        return x * 2

    bended = bt.BendedModule(model)
    for number in range(6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bended(torch.full((2,), number - 2.5))
    assert bended.stats == bt.Stats(traces=2, replays=4, retraces=1, resumes=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="positive"):
            bended(torch.ones(2))


LOGGER = logging.getLogger("of a model")
OF_PYTHON = (
    "Python's settings: levels of loggers, filters of warnings, the precision of `decimal`, "
    "`reprlib`, `calendar`, `csv`, the time zone, `copyreg`, `random.getstate`"
)
OF_PACKAGES = (
    "settings of packages: how numpy prints and what it raises, options of pandas, the verbosity "
    "of transformers"
)
case(OF_PYTHON, mode=lambda: Attribute(LOGGER.setLevel, "DEBUG", "NOTSET"))(
    lambda: lambda x: x * LOGGER.getEffectiveLevel()
)
case(OF_PYTHON, mode=lambda: Attribute(random.seed, 3, 0))(
    lambda: lambda x: x * (random.getstate()[1][3] % 97)
)
case(OF_PYTHON, mode=lambda: Attribute(calendar.setfirstweekday, 6, 0))(
    lambda: lambda x: x * (1 + calendar.firstweekday())
)
case(OF_PACKAGES, mode=lambda: Attribute(np.setbufsize, 16384, 8192))(
    lambda: lambda x: x * np.getbufsize()
)
change(
    "attributes of modules of torch and numpy that are no functions: `torch.pi`, one of your own",
    lambda: lambda x: x * torch.pi, lambda m, p: p.setattr(torch, "pi", 3.0),
)  # fmt: skip
change(
    "attributes of modules of libraries that code assigns, or looks for by a text, also where they "
    'are not there yet: `getattr(library, "flag", 0)`',
    lambda: lambda x: x * getattr(colorsys, "flag", 2),
    lambda m, p: p.setattr(colorsys, "flag", 3, raising=False),
)

# What is not seen

case(
    "settings of torch that are not named above: `torch.jit.enable_onednn_fusion`",
    mode=lambda: Attribute(torch.jit.enable_onednn_fusion, True, False),
)(lambda: lambda x: x * (2 if torch.jit.onednn_fusion_enabled() else 3))
change(
    "functions of torch and numpy that are replaced elsewhere than above",
    lambda: lambda x: x * float(np.polynomial.polynomial.polyval(2, [1, 1])),
    lambda m, p: p.setattr(np.polynomial.polynomial, "polyval", lambda x, c: 9.0),
)
case(
    "files, clocks and variables that installed packages look at by themselves",
    change=lambda model, patch: patch.setenv("CUDA_VISIBLE_DEVICES", "0,1"),
)(lambda: lambda x: x * len(torch.cuda._parse_visible_devices()))
