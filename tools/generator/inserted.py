"""What is inserted in random programs, at some of their nodes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.node_selector import Candidate
from tests.promise import bits

__all__ = ["KINDS", "Inserted", "insert"]

# The kind, a number that decides where, and whether at the second pass of a node only.
Inserted = tuple[str, int, bool]

_Seen = list[Any]


def insert(bended: bt.BendedModule, inserted: Inserted, seen: _Seen) -> bt.Insertion:
    """Insert something in a program.

    Args:
        bended: the program.
        inserted: what, and where.
        seen: is made longer by what the insertion is called with.

    Returns:
        The insertion.
    """
    kind, where, is_second = inserted

    def selects(node: Candidate) -> bool:  # not what may hold memory that nobody wrote to
        what = type(node.module) if node.module is not None else node.function
        name = getattr(what, "__name__", "")
        is_made = any(part in name for part in ("empty", "new", "Tensor", "resize"))
        return not is_made and zlib.crc32(f"{where} {name}".encode()) % 3 == 0

    what = KINDS[kind](seen)
    what.self_contained = True  # `bits` could read anything, and then calls would run live
    return bended.interject(selects, what, passes=[1] if is_second else None, allow_none=True)


class _Interjection(bt.Interjection):
    """Notes what it is called with, and does something to it."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen

    def note(self, at: bt.NodePass, value: Any) -> None:
        self.seen.append((at.number, bits(value)))


class _Change(_Interjection):
    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        self.note(at, output)
        return output * 1.5 if _is_float(output) else None


class _Look(_Interjection):
    observes = True

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        self.note(at, output)


class _Draw(_Interjection):
    """A function that returns another value at each call."""

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        self.note(at, output)
        return output + torch.rand(()) if _is_float(output) else None


class _Write(_Interjection):
    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        self.note(at, output)
        if _is_float(output) and not output.requires_grad and output.numel():
            with torch.no_grad():
                output.view(output.shape).mul_(0.5)


class _Before(_Interjection):
    wants_inputs = True

    def before(self, at: bt.NodePass, inputs: bt.Inputs) -> bt.Inputs:
        self.note(at, _kinds(inputs))
        return bt.Inputs(tuple(v * 0.5 if _is_float(v) else v for v in inputs), inputs.kwargs)

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        self.note(at, [_kinds(inputs), output])
        return output


class _Instead(_Interjection):
    def instead(self, at: bt.NodePass, call: Callable[..., Any], inputs: bt.Inputs) -> Any:
        output = call(*inputs, **inputs.kwargs)
        self.note(at, output)
        return output


class _Backward(_Interjection):
    def backward(self, at: bt.NodePass, grad_input: Any, grad_output: Any) -> Any:
        self.note(at, [list(grad_input), list(grad_output)])
        return tuple(None if grad is None else grad * 2 for grad in grad_input)


def _kinds(inputs: bt.Inputs) -> list[Any]:
    """Say what inputs are, without their content, which may be memory that nobody wrote to."""
    return [(v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else v for v in inputs]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


KINDS: dict[str, Callable[[_Seen], bt.Interjection]] = {
    "change": _Change, "look": _Look, "draw": _Draw, "write": _Write, "before": _Before,
    "instead": _Instead, "backward": _Backward,
}  # fmt: skip
