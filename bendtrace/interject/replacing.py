"""Calls a model with given values instead of the outputs of some nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bendtrace.errors import InputError
from bendtrace.interject.cut_points import is_named
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.resolver import node_meant
from bendtrace.interject.suffixes import own
from bendtrace.paths.view import Node

__all__ = ["call_with"]


def call_with(
    model: Any,
    given: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    bended: bool,
) -> Any:
    """Call a model with given values instead of its own.

    Args:
        model: the `BendedModule`.
        given: the values, by node path.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        bended: whether the values replace those after the insertions at the nodes.

    Raises:
        InputError: the model did not reach a node, or reached it several times, or the value of a
            node cannot be given.
    """
    board = model._board
    others = () if bended else board.insertions
    made = []
    for text, value in given.items():
        node = node_meant(model, text)
        where = text if node is None else node
        insertion = board.make(where, _Replacement(text, value, bended))
        if node is not None:
            _require_there(text, node, insertion)
        made.append(insertion)
    board.remove(*others)
    board.add(*made, *others)
    try:
        output = model(*args, **kwargs)
    finally:
        board.remove(*made)
    for text, insertion in zip(given, made, strict=True):
        report = insertion.report()
        if not report.rows:
            raise InputError(
                f"the model did not reach {text!r}, so the value given for it was not used: "
                + "; ".join(report.notes)
            )
    return output


def _require_there(text: str, node: Node, insertion: Insertion) -> None:
    """Raise for a path that is an alias of another node in another run."""
    for target in insertion.targets:
        place = target.place
        if place is not None and place.shown and not is_named(node._data, place.shown):
            raise InputError(
                f"the value of {text!r} cannot be set: in a known run this is a name of "
                f"{place.shown!r}. Give a value inside of it, or call the model with these "
                "arguments first"
            )


class _Replacement(Interjection):
    """Replaces the output of a node by a given value.

    Args:
        text: the requested name of the node.
        value: the value.
        late: whether it runs after all other insertions there.
    """

    _only_outputs = True

    def __init__(self, text: str, value: Any, late: bool) -> None:
        self._text = text
        self._value = value
        self._path: str | None = None
        self.late = late

    @property
    def label(self) -> str:
        return "from_activations"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        if self._path not in (None, at.path):
            raise InputError(
                f"{self._text!r} matches both {self._path!r} and {at.path!r}: name one"
            )
        self._path = at.path
        if at.number and ":" not in self._text:
            raise InputError(
                f"{self._text!r} has several passes in this run: name one, as in '{at.path}:1'"
            )
        return own(self._value)
