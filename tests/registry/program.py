"""A program: a model, the calls of it, and what the modes of `tests/modes/` cannot do with it."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import bendtrace as bt
from tests.promise import Inputs, random_states, seed_everything, settings, state

# Makes of a model what is called in its place; in eager the model itself.
Wrap = Callable[[Any], Callable[..., Any]]
# Makes all calls, and yields after each of them all that can be seen of it.
Drive = Callable[[Wrap], Iterator[Any]]
# Makes the arguments of a call, and may first change the model that it receives.
Prepare = Callable[[Any], Inputs]


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        name: its name, after the file that it stands in.
        drive: makes the calls.
        tags: the group that it belongs to, and what it is about.
        cannot: for each mode that refuses it, a pattern of the message.
        ignores: patterns of warnings that it may cause.
        served: asserts how its plain calls were served.
        served_with_gradients: the same, of calls whose arguments require gradients.
    """

    name: str
    drive: Drive
    tags: frozenset[str]
    cannot: dict[str, str] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    served: Callable[[bt.BendedModule], None] | None = None
    served_with_gradients: Callable[[bt.BendedModule], None] | None = None


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Register a program."""
    if program.name in PROGRAMS:
        raise ValueError(f"two programs are named {program.name!r}")
    PROGRAMS[program.name] = program


def calling(
    make: Callable[[], Callable[..., Any]],
    calls: Iterable[Prepare],
    *,
    look: Callable[[Any, Any], Any] = lambda model, output: output,
    around: Iterable[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
) -> Drive:
    """Return a drive that makes a model and calls it.

    Args:
        make: makes the model.
        calls: makes the arguments of each call.
        look: gives what is compared, of the model and its output; may change the output.
        around: the contexts to call in; in each of them, all calls of a new model are made.
    """

    def drive(wrap: Wrap) -> Iterator[Any]:
        for context in around:
            _seed(0)
            model = make()
            called = wrap(model)
            for seed, prepare in enumerate(calls):
                args, kwargs = prepare(model)
                _seed(seed)
                printed = io.StringIO()
                with (
                    contextlib.redirect_stdout(printed),
                    contextlib.redirect_stderr(printed),
                    context(),
                ):
                    result = _tried(lambda: look(model, called(*args, **kwargs)))  # noqa: B023
                left = printed.getvalue(), random_states(), settings(), state(model)
                yield [result, args, kwargs], left

    return drive


def _seed(seed: int) -> None:
    seed_everything(seed)
    random.seed(seed)
    np.random.seed(seed)


def _tried(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error that the model raises."""
    try:
        return call()
    except Exception as error:
        return "raised", type(error).__name__, str(error)


def cannot(names: Mapping[str, str] | Iterable[str], **reasons: str) -> None:
    """Say of registered programs which modes refuse them, and with which message."""
    for name in names:
        PROGRAMS[name].cannot.update(reasons)
