"""Rewriting a model: other ops, none, new ones on an edge, modules spliced in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError
from bendtrace.interject.board import Board
from bendtrace.interject.edges import Between, Edge, Sent
from bendtrace.interject.insertion import Insertion, as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.plan import forms_of
from bendtrace.interject.splicing import Splice, Spliced
from bendtrace.interject.structure import describe
from bendtrace.recording.functions import is_torchs_function

__all__ = ["between", "remove", "replace", "splice"]


class Bended(Protocol):
    """A model that things can be inserted in."""

    _board: Board


class Replacement(Interjection):
    """Calls another function in the place of a node."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.self_contained = is_torchs_function(function)

    @property
    def label(self) -> str:
        """The name of the function."""
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function."""
        return self._function(*inputs, **inputs.kwargs)


class Removal(Interjection):
    """Gives one of a node's inputs through."""

    label = "removed"

    def __init__(self, keep: int | str | Callable[[Inputs], Any]) -> None:
        self._keep = keep
        self.self_contained = not callable(keep)

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Give the input through."""
        keep = self._keep
        if callable(keep):
            return keep(inputs)
        given = dict(enumerate(inputs)) | inputs.kwargs
        if keep == 0 and not inputs and given:  # the first, though given by name
            keep = next(iter(given))
        value = given.get(keep)
        if not isinstance(value, Tensor):
            what = describe(value) if keep in given else "not there"
            raise InterjectionError(
                f"{at.path or '<root>'} cannot be removed: input {keep!r}, which would be given "
                f"through, is {what}; its inputs are {_listed(given)}; say with keep= which it is",
                at.path,
            )
        return value


def _listed(given: dict[Any, Any]) -> str:
    return ", ".join(f"{key!r}: {describe(value)}" for key, value in given.items()) or "none"


def replace(
    bended: Bended,
    where: Any,
    function: Callable[..., Any],
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Have another function called wherever a node comes up.

    Args:
        bended: a `BendedModule`.
        where: at which nodes: calls of functions, methods or modules; see `BendedModule.interject`.
        function: called with the node's arguments, also a module: its parameters can be trained.
            What it returns is what the node gives.
        passes: in which passes of each node; the others stay what they are.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> with bt.rewriting.replace(bended, "relu", torch.abs):
        ...     bended(torch.tensor([-2.0]))
        tensor([3.])
    """
    if isinstance(function, Interjection) or isinstance(function, type) or not callable(function):
        raise InputError(
            f"replace() takes a function of the node's arguments, or a module, not {function!r}"
        )
    return bended._board.insert(
        where, Replacement(function), passes=passes, every=every, allow_none=allow_none
    )


def remove(
    bended: Bended,
    where: Any,
    *,
    keep: int | str | Callable[[Inputs], Any] = 0,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Take nodes out: one of their inputs goes on in their place.

    Args:
        bended: a `BendedModule`.
        where: at which nodes, as for `replace`.
        keep: which input: its position, its name if it is given by name, or a function of the
            `Inputs`. As it stands, the first: `x` of `x.view(2, 3)`, and of `self.dropout(x)`.
        passes: in which passes of each node; the others stay what they are.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() + x * 2)
        >>> with bt.rewriting.remove(bended, "relu"), bt.rewriting.remove(bended, "add", keep=1):
        ...     bended(torch.tensor([-2.0]))
        tensor([-4.])
    """
    if isinstance(keep, bool) or not (isinstance(keep, (int, str)) or callable(keep)):
        raise InputError(f"keep= is a position, a name or a function of the inputs, not {keep!r}")
    return bended._board.insert(
        where, Removal(keep), passes=passes, every=every, allow_none=allow_none
    )


def between(
    bended: Bended,
    a: Any,
    b: Any,
    what: Any,
    *,
    passes: Any = None,
    every: int | None = None,
) -> Between:
    """Insert something on the edge between two nodes: other users of the first see nothing of it.

    Values are told by what they are: each tensor that `a` has given in this call of the model and
    that is among the arguments of `b`, unchanged since, is exchanged there for what `what` makes
    of it. What the edge leads through - a view, a sum - is a node of its own.

    Args:
        bended: a `BendedModule`.
        a: the node, input, parameter or part of an output that the edge begins at.
        b: the node that it leads to: the call of a function, method or module.
        what: a function of the value, a module, or an interjection that works after a node.
        passes: in which passes of `b`.
        every: in every how manieth pass.

    Returns:
        A handle, which is also a context manager: `remove()`, `report()`, `applied`.

    Raises:
        InputError: something given makes no sense.
        NodePathError: there is no such node.

    Example:
        >>> import torch, bendtrace as bt
        >>> def twice_used(x):
        ...     h = x.relu()
        ...     return h * 10 + h
        >>> bended = bt.BendedModule(twice_used)
        >>> with bt.rewriting.between(bended, "relu", "mul", torch.zeros_like):
        ...     bended(torch.ones(2))
        tensor([1., 1.])
    """
    inner = as_interjection(what)
    if forms_of(inner) & {"before", "instead", "backward", "inputs"}:
        raise InputError(
            f"{inner.label} works around a node, and between two nodes there is only a value: give "
            "a function of it, or an interjection that overrides nothing but after()"
        )
    sent = Sent()
    edge = Edge(sent, inner)
    board = bended._board
    beginning = board.make(a, sent)
    end = board.make(b, edge, passes=passes, every=every)
    board.add(beginning, end)
    return Between(board, edge, end, beginning)


def splice(
    bended: Bended,
    where: Any,
    module: Callable[..., Any],
    *,
    keep_error: bool = False,
    select: int | str | Callable[[Any], Any] | None = None,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Splice:
    """Pass what nodes give through a module, such as a sparse autoencoder.

    The module is trained like any other: its parameters are its own, not the model's.

    Args:
        bended: a `BendedModule`.
        where: at which nodes, inputs or parts of outputs; see `BendedModule.interject`.
        module: called with the value.
        keep_error: False: what the module makes of the value goes on. True: the value goes on as
            it is, bit by bit, and gradients go to what the module made of it, and by way of the
            module on to the value: that of `made + (value - made).detach()`.
        select: which part of what the module gives is the value, if that is not all of it: an
            index, a key, the name of an attribute, or a function of it.
        passes: in which passes of each node.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        A handle, which is also a context manager: `error` is the last error term, `result` all
        that the module gave last.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() + 1)
        >>> with bt.rewriting.splice(bended, "relu", torch.round) as handle:
        ...     bended(torch.tensor([0.75])), handle.error
        (tensor([2.]), tensor([-0.2500]))
        >>> with bt.rewriting.splice(bended, "relu", torch.round, keep_error=True):
        ...     bended(torch.tensor([0.75]))
        tensor([1.7500])
    """
    if isinstance(module, (Interjection, type)) or not callable(module):
        raise InputError(f"splice() takes a module, or a function of the value, not {module!r}")
    if isinstance(module, nn.Module) and any(
        module is part for part in getattr(bended, "modules", tuple)()
    ):
        raise InputError(f"{type(module).__name__} is a part of the model: splice in another one")
    spliced = Spliced(module, keep_error, select)
    return Splice(
        bended._board.insert(where, spliced, passes=passes, every=every, allow_none=allow_none),
        spliced,
    )
