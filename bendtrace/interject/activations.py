"""Handing out activations: what nodes gave in one call of a model."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bendtrace.errors import InputError, NodePathError
from bendtrace.history.copies import copied
from bendtrace.interject.bends.catalogue import NamedActivations, leaves_of
from bendtrace.interject.bends.spec import compiled
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.passes import Passes
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.paths.view import Node, NodePath

__all__ = ["Activations", "get_activations", "inputs_of"]

# What no node path has in it, and regular expressions have.
_PATTERN = re.compile(r"[\\^$*+?(){}]")
_OPTIONS = frozenset(
    {"allow_none", "args", "bended", "detach", "kwargs", "passes", "return_output"}
)
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


class InsertionRegistry(Protocol):
    """What keeps the insertions of a model."""

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """What is inserted."""

    def make(self, where: Any, what: Any, *, allow_none: bool = False) -> Insertion:
        """Make an insertion without putting it in."""

    def add(self, *insertions: Insertion) -> None:
        """Put insertions in."""

    def remove(self, *insertions: Insertion) -> None:
        """Take insertions away."""


class Bended(Protocol):
    """A model that things can be inserted in."""

    _board: Any
    _model: Callable[..., Any]
    _signature: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""


class Activations(dict[str, Any]):
    """What nodes gave, by their paths.

    A node that was executed several times has a path for each pass: `relu:1`, `relu:2`. What
    gave a container is here as such a container. Whatever else a node was asked for by, as a
    key finds it too, if it is the only one. The keys are `NodePath`: strings that mean these nodes
    wherever they are given, also where the same text typed by hand would be ambiguous.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     for _ in range(2):
        ...         x = torch.relu(x - 1)
        ...     return x
        >>> found = bt.BendedModule(model).get_activations("relu", args=(torch.tensor([3.0]),))
        >>> found
        {'relu:1': tensor([2.]), 'relu:2': tensor([1.])}
        >>> found.passes("relu")
        [tensor([2.]), tensor([1.])]
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, list[str]]) -> None:
        super().__init__(values)
        self._names = dict(names)

    def passes(self, path: str) -> list[Any]:
        """Return what a node gave, for each pass that is here, in order."""
        if path in self:
            return [self[path]]
        start = f"{path}:"
        return [value for key, value in self.items() if key.startswith(start)]

    def __missing__(self, key: str) -> Any:
        meant = self._names.get(key, [])
        if len(meant) == 1:
            return self[meant[0]]
        if key.endswith(":1") and key[:-2] in self:
            return self[key[:-2]]
        several = meant or [name for name in self if name.startswith(f"{key}:")]
        if several:
            listed = ", ".join(map(repr, several))
            raise NodePathError(f"{key!r} is {listed}: name one", key, tuple(several))
        if key in self._names:
            raise NodePathError(f"this call did not come by {key!r}", key, tuple(self))
        listed = ", ".join(map(repr, self)) or "nothing"
        raise NodePathError(f"there is no {key!r} among these activations: {listed}", key)


class _Observer(Interjection):
    """Keeps what nodes give.

    Args:
        passes: which passes are kept.
        detach: whether snapshots are kept, instead of the tensors themselves.
        late: whether it sees what others at the node have made of it.
    """

    observes = True

    def __init__(self, passes: Passes, detach: bool, late: bool) -> None:
        self.late = late
        self.kept: dict[tuple[str, int], Any] = {}
        self.counts: dict[str, int] = {}
        # Of the tensors themselves gradients may be asked for.
        self.deferrable = detach
        self._passes = passes
        self._detach = detach
        self._thread = threading.get_ident()

    @property
    def label(self) -> str:
        """What reports call it."""
        return "get_activations"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep it."""
        if threading.get_ident() != self._thread:  # of a call that somebody else makes
            return
        path = at.path or "output"
        self.counts[path] = max(self.counts.get(path, 0), at.number + 1)
        if self._passes.needs_total or self._passes.admits(at.number, None):
            self.kept[path, at.number] = _snapshot(output) if self._detach else output

    def rows(self, names_passes: bool) -> dict[str, Any]:
        """Return what was kept, by path."""
        found: dict[str, Any] = {}
        for (path, number), value in self.kept.items():
            total = self.counts[path]
            if self._passes.admits(number, total):
                key = f"{path}:{number + 1}" if names_passes or total > 1 else path
                found[NodePath(key)] = value
        return found


def _snapshot(value: Any) -> Any:
    shape, found = take_apart(value)
    with torch.inference_mode(False), torch.no_grad():
        kept = [copied(item.detach()) if isinstance(item, Tensor) else item for item in found]
    return assemble(shape, kept)


def get_activations(
    model: Bended,
    where: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: Any = None,
    detach: bool = True,
    bended: bool = True,
    return_output: bool = False,
    allow_none: bool = False,
) -> Any:
    r"""Call a `BendedModule` once, and return what nodes gave in that call.

    The call is an ordinary one: along known paths as far as they go, with whatever is inserted in
    the model, with random numbers drawn and buffers changed.

    Args:
        model: the `BendedModule`.
        where: which nodes: a node path (also of a part, `lstm|sub_0`, of an input, `fc.input`, of
            a pass, `relu:2`), a name of a module, and all else that `BendedModule.interject`
            takes, or several of these. A string with one of `\ ^ $ * + ? ( ) { }` in it is a
            regular expression: it means the activations that have a name which it matches from
            the beginning.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        passes: which passes of each node: numbers from 0, or from the end where negative, or a
            function of the number; None for all.
        detach: whether to return snapshots: copies without a graph, which nothing can change any
            more. Else the tensors themselves: gradients can be taken with respect to them, and
            what the model does to them in place is seen.
        bended: whether to return the values that the model goes on with, or those before anything
            inserted at the node was called.
        return_output: whether to return what the model gave, as well.
        allow_none: whether it is right that the call comes by no node that is meant. If not, a
            `NeverFiredWarning` says why it did not.

    Returns:
        An `Activations`, which is a dict, by node path, with the number of the pass if the node
        had several (`relu:1`, `relu:2`). With `return_output` that and the output.

    Raises:
        NodePathError: nothing is meant.
        InputError: something given makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> def halved(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return torch.relu(x)
        >>> bended = bt.BendedModule(halved)
        >>> _ = bended(torch.tensor([4.0, -3.0]))
        >>> found = get_activations(bended, ["div", "relu"], (torch.tensor([2.0, 0.0]),))
        >>> found
        {'div': tensor([1., 0.]), 'relu': tensor([1., 0.])}
        >>> list(get_activations(bended, "div", (torch.tensor([4.0, -3.0]),)))
        ['div:1', 'div:2', 'div:3']
    """
    board: InsertionRegistry = model._board
    items = list(_flat(where))
    if not items:
        raise InputError("say of which nodes the activations are wanted")
    admitted = Passes(passes)
    made: list[tuple[Any, _Observer, Insertion]] = []
    for item in items:
        observer = _Observer(admitted, detach, late=bended)
        insertion = _made(board, model._model, item, observer, allow_none)
        if passes is not None and any(want.passes is not None for want in insertion.wants):
            raise InputError(f"{item!r} names passes: give them either there or with passes=")
        made.append((item, observer, insertion))
    insertions = [insertion for _, _, insertion in made]
    others = () if bended else board.insertions
    board.remove(*others)
    board.add(*insertions, *others)
    try:
        output = model(*args, **(kwargs or {}))
    finally:
        board.remove(*insertions)
    if not allow_none:
        for insertion in insertions:
            insertion.warn_if_never_fired(_users_level())
    found = _gathered(made)
    return (found, output) if return_output else found


def inputs_of(
    model: Bended, kwargs: Mapping[str, Any] | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model's keyword arguments, some of which came among options.

    Args:
        model: the `BendedModule`.
        kwargs: those that came as a dict.
        inputs: those that came as they are.

    Raises:
        InputError: the model has an argument by the name of an option, or one was given twice.
    """
    taken = _OPTIONS & model._signature.parameters
    if taken and inputs:
        raise InputError(
            f"the model has an argument of its own called {min(taken)}, which would be taken for "
            "an option: give its arguments in args=(...) and kwargs={...}"
        )
    twice = inputs.keys() & (kwargs or {}).keys()
    if twice:
        raise InputError(f"{min(twice)!r} is given twice, also in kwargs=")
    return {**(kwargs or {}), **inputs}


def _users_level() -> int:
    """The `stacklevel` by which a warning of what is called here names the line of the user."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    return level


def _flat(where: Any) -> Iterator[Any]:
    if isinstance(where, (list, tuple, set, frozenset)):
        for item in where:
            yield from _flat(item)
    else:
        yield where


def _gathered(made: Iterable[tuple[Any, _Observer, Insertion]]) -> Activations:
    values: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for item, observer, insertion in made:
        named = any(want.passes is not None for want in insertion.wants)
        rows = observer.rows(named)
        values.update(rows)
        said = item._path if isinstance(item, Node) else item
        if isinstance(said, str):
            names[said] = list(rows)
    return Activations(values, names)


def _made(
    board: InsertionRegistry,
    model: Callable[..., Any],
    item: Any,
    observer: _Observer,
    allow_none: bool,
) -> Insertion:
    if isinstance(item, Tensor):
        raise InputError(
            "get_activations is told which nodes; what the model is given goes by keyword, or "
            "into args=(...)"
        )
    if isinstance(item, str) and _PATTERN.search(item):
        item = NamedActivations((compiled(item),), leaves_of(model))
    return board.make(item, observer, allow_none=allow_none)
