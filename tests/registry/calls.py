"""Programs of one function or class, called with tensors of a few numbers."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import bendtrace as bt
from tests.registry.program import Program, add, calling

# Makes the arguments of a call, and may change the model that it receives.
Call = Callable[[Any], tuple[Any, ...]]
Look = Callable[[Any, Any], Any]


def case(
    *calls: Call,
    look: Look = lambda model, out: out,
    around: Iterable[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
    served: Callable[[bt.BendedModule], None] | None = None,
    name: str = "",
    **cannot: str,
) -> Callable[[Any], Any]:
    """Register a function, a class of modules, or what makes a model without an argument.

    Args:
        calls: each makes the arguments of one call, and may change the model that it receives.
        look: gives what is compared, of the model and its output; may change the output.
        around: the contexts to call in, one after the other.
        served: asserts how plain calls in the first context were served.
        name: what it is called, if not like the function or class.
        cannot: for modes that refuse it, a pattern of the message.
    """

    def adding(program: Any) -> Any:
        is_made = isinstance(program, type) or not inspect.signature(program).parameters
        make = program if is_made else lambda: program
        owner = getattr(program, "func", program)
        file = owner.__module__.rpartition(".")[2]
        prepared = [lambda model, call=call: (call(model), {}) for call in calls]
        add(
            Program(
                f"{file}.{name or program.__name__}",
                calling(make, prepared, look=look, around=around),
                frozenset({"single", file}),
                cannot,
                ("None of the inputs", "An output with one"),
                served,
            )
        )
        return program

    return adding


def x(*values: float) -> Call:
    """One tensor with these numbers."""
    return lambda model: (torch.tensor([float(value) for value in values]),)


def args(make: Callable[[], tuple[Any, ...]]) -> Call:
    """Arguments that do not depend on the model."""
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
MIXED = random.Random(1).choices(SIGNS, k=60)


def in_turn(served: str, count: int) -> Callable[[bt.BendedModule], None]:
    """Return what asserts how often calls were served in a way, and that none of them was live."""

    def check(bended: bt.BendedModule) -> None:
        assert (getattr(bended.stats, served), bended.stats.live) == (count, 0), bended.stats

    return check
