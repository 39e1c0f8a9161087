"""What a case of the scoreboard is: a program that makes calls, and changes things between them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

__all__ = ["KINDS", "Case", "Drive", "Kind", "Raised", "Refused", "Step", "Wrap", "tried"]

# What is new about a call: nothing, its inputs, or something around it.
Kind = Literal["traced", "inputs", "change"]
KINDS: tuple[Kind, ...] = ("traced", "inputs", "change")


class Step(NamedTuple):
    """What came out of one call.

    Attributes:
        kind: "traced" for the first call, "inputs" for one with other inputs, "change" for one
            before which something changed: parameters, modes, globals, attributes, dtypes.
        value: what the call returned, and whatever else it did that can be seen.
    """

    kind: Kind
    value: Any


class Raised(NamedTuple):
    """An error that a call ended in."""

    error: Exception

    def __repr__(self) -> str:
        return f"Raised({type(self.error).__name__})"


class Refused(Exception):
    """A tracer says that it cannot run something."""


# Makes of a function or module what is called in its place; eager is the identity.
Wrap = Callable[[Any], Any]
Drive = Callable[[Wrap], Iterator[Step]]


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        suite: which suite it belongs to.
        name: its name there; for an issue of others the repository and the number.
        drive: runs it: a generator that is given what wraps the models, and yields after each call.
        about: one line on it.
        inductor: whether it is about code that only inductor generates.
    """

    suite: str
    name: str
    drive: Drive
    about: str = ""
    inductor: bool = False


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and return what it returns, or the error as a `Raised`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return Raised(error)


def seeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the same random numbers each time: of torch, Python and numpy."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return function(*args, **kwargs)
