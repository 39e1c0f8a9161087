"""Modules that values are passed through."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.errors import InterjectionError
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.report import Report
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.structure import describe

__all__ = ["Splice", "Spliced"]


def _picker(select: int | str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if select is None or callable(select):
        return select
    if not isinstance(select, str):
        return operator.itemgetter(select)
    attribute = operator.attrgetter(select)
    return lambda result: result[select] if isinstance(result, dict) else attribute(result)


class Spliced(Interjection):
    """Passes a value through a module.

    Args:
        module: the module.
        keep_error: whether the value stays as it is.
        select: selects the part of the module's output that is the value.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        keep_error: bool,
        select: int | str | Callable[[Any], Any] | None,
    ) -> None:
        self.module = module
        self.result: Any = None
        self.error: Tensor | None = None
        self._keep_error = keep_error
        self._pick = _picker(select)

    @property
    def label(self) -> str:
        """The class of the module."""
        return str(getattr(self.module, "__name__", type(self.module).__name__))

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Pass the value through the module."""
        result = self.module(output)
        made = self._selected(result, at)
        self.result, self.error = result, None
        if not isinstance(output, Tensor):
            if self._keep_error:
                raise self._refusal(at, f"the value is {describe(output)}, and has no error term")
            return made
        if not isinstance(made, Tensor):
            raise InterjectionError(
                f"{self.label} at {at.path or '<root>'} returned {describe(made)}: choose the "
                "part that replaces the value with select=",
                at.path,
            )
        if made.shape == output.shape:
            if torch.bool not in (made.dtype, output.dtype):  # which cannot be subtracted
                self.error = (output - made).detach()
        elif self._keep_error:
            shapes = f"{tuple(output.shape)} became {tuple(made.shape)}"
            raise self._refusal(at, f"the value of shape {shapes}")
        return _Kept.apply(made, output.detach()) if self._keep_error else made

    def _selected(self, result: Any, at: NodePass) -> Any:
        if self._pick is None:
            return result
        try:
            return self._pick(result)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise InterjectionError(
                f"{self.label} at {at.path or '<root>'} returned {describe(result)}, in which "
                f"select= finds nothing ({type(error).__name__}: {error})",
                at.path,
            ) from error

    def _refusal(self, at: NodePass, why: str) -> InterjectionError:
        return InterjectionError(
            f"{self.label} at {at.path or '<root>'}: keep_error= needs the error term, and {why}",
            at.path,
        )


class _Kept(torch.autograd.Function):
    """Continues with a value, and passes the gradient to the module's result for it.

    The same as `made + (value - made).detach()`, but without the rounding.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Splice:
    """A module that is spliced in, until it is removed. Also a context manager.

    Attributes:
        insertion: its insertion in the model.
    """

    def __init__(self, insertion: Insertion, spliced: Spliced) -> None:
        self.insertion = insertion
        self._spliced = spliced

    @property
    def module(self) -> Any:
        """The module."""
        return self._spliced.module

    @property
    def error(self) -> Tensor | None:
        """The value minus the reconstruction, of the last pass; None if shapes or dtypes differ."""
        return self._spliced.error

    @property
    def result(self) -> Any:
        """The full output of the module in the last pass, with its autograd graph.

        Use it for a loss, such as one on the features of a sparse autoencoder.
        """
        return self._spliced.result

    @property
    def active(self) -> bool:
        """Whether it is active."""
        return self.insertion.active

    def remove(self) -> None:
        """Remove it, and forget its results. Further calls have no effect."""
        self.insertion.remove()
        self._spliced.result = self._spliced.error = None

    def report(self) -> Report:
        """Return at which nodes and passes it was called, and whether it changed anything."""
        return self.insertion.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.insertion.warn_if_never_fired(3)
        finally:
            self.insertion.remove()

    def __repr__(self) -> str:
        state = "" if self.active else ", removed"
        where = describe_where(self.insertion.where)
        return f"<{self._spliced.label} spliced in at {where}{state}>"
