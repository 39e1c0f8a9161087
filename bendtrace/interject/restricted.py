"""Interjections that work in some calls of the model only, or on some rows of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bendtrace.errors import InputError, PatchError
from bendtrace.interject.gates import of_this_run
from bendtrace.interject.interjection import Inputs, Interjection, NodePass, Passes, PassNumbers

Rows: TypeAlias = int | slice | Iterable[int] | None


class Restricted(Interjection):
    """Has another interjection called under a condition, or with a part of the value."""

    def __init__(self, what: Interjection) -> None:
        self.what: Interjection = what
        for name in ("observes", "wants_inputs", "blind", "late", "self_contained", "needs_paths"):
            setattr(self, name, getattr(what, name))

    @property
    def label(self) -> str:
        """The label of the interjection."""
        return self.what.label

    def _forms(self) -> frozenset[str]:
        return self.what._forms()

    def __repr__(self) -> str:
        return repr(self.what)


class InCalls(Restricted):
    """Has an interjection called in some calls of the model, of those that reach it.

    Args:
        what: the interjection.
        calls: the numbers of the calls, from 0, or a predicate.
    """

    def __init__(self, what: Interjection, calls: PassNumbers) -> None:
        super().__init__(what)
        self._calls = Passes(calls, option="calls")
        if self._calls.needs_total:
            raise InputError(f"calls= counts from 0, since nobody knows the last call: {calls!r}")
        self._numbers = itertools.count()

    def _is_on(self) -> bool:
        kept = of_this_run()
        if id(self) not in kept:
            kept[id(self)] = self._calls.admits(next(self._numbers), None)
        return bool(kept[id(self)])

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Call the interjection in the calls that are chosen."""
        return self.what.before(at, inputs) if self._is_on() else None

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the interjection in the calls that are chosen, and otherwise the node."""
        if self._is_on():
            return self.what.instead(at, call, inputs)
        return call(*inputs, **inputs.kwargs)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection in the calls that are chosen."""
        return self.what.after(at, inputs, output) if self._is_on() else None

    def _backward_of_call(self) -> Callable[..., Any]:
        return self.what._backward_of_call() if self._is_on() else super().backward

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> Any:
        """Call the interjection in the calls that are chosen."""
        return self._backward_of_call()(at, grad_input, grad_output)


class OfRows(Restricted):
    """Has an interjection called with some rows of a tensor, and puts what it returns there.

    Args:
        what: the interjection.
        rows: the rows: indices of the first axis.
    """

    def __init__(self, what: Interjection, rows: Rows) -> None:
        super().__init__(what)
        self._rows: Any = rows
        if not isinstance(rows, slice):
            self._rows = list(rows) if isinstance(rows, Iterable) else [rows]
            if not self._rows or any(type(row) is not int for row in self._rows):
                raise InputError(f"rows= takes indices of rows, or a slice, not {rows!r}")

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection with the rows."""
        if not isinstance(output, Tensor) or not output.dim():
            raise PatchError(
                f"{self.label} at {at.path!r}: rows= needs a tensor with rows, not "
                f"{'a scalar' if isinstance(output, Tensor) else type(output).__name__}",
                path=at.path,
            )
        every = torch.arange(len(output), device=output.device)
        if not isinstance(self._rows, slice) and not all(
            -len(output) <= row < len(output) for row in self._rows
        ):
            raise PatchError(
                f"{self.label} at {at.path!r}: rows={self._rows}, but the value has "
                f"{len(output)} rows",
                path=at.path,
            )
        index = every[self._rows]
        part = output.index_select(0, index)
        made = self.what.after(at, inputs, part)
        if made is None or self.observes:
            return None
        if not isinstance(made, Tensor) or made.shape != part.shape or made.dtype != part.dtype:
            raise PatchError(
                f"{self.label} at {at.path!r}: with rows=, the new value has to have the shape and "
                f"dtype of the rows, {tuple(part.shape)} {part.dtype}",
                path=at.path,
            )
        return output.index_copy(0, index, made)
