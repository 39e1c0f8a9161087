"""Interjections that hand activations out and in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bendtrace.errors import InputError
from bendtrace.interject.bends.containers import replaced
from bendtrace.interject.interjection import Inputs, Interjection, NodePass

__all__ = ["Given", "Snapshots"]


class Snapshots(Interjection):
    """Takes snapshots of what nodes give."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self._taken: dict[str, list[Any]] = {}

    @property
    def taken(self) -> dict[str, Any]:
        """For each node path what it gave; a list where it was called several times."""
        return {path: got[0] if len(got) == 1 else got for path, got in self._taken.items()}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Take a snapshot."""
        with torch.inference_mode(False), torch.no_grad():
            copy = replaced(output, at, lambda tensor, _: tensor.detach().clone())
        self._taken.setdefault(at.path, []).append(copy)


class Given(Interjection):
    """Gives values in the place of what nodes give.

    Args:
        values: for each node path its value, or a list of one for each pass.
    """

    self_contained = True

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._unused = set(self._values)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Return the value that was given."""
        self._unused.discard(at.path)
        value = self._values[at.path]
        if not isinstance(value, list) or isinstance(output, list):
            return value
        if at.number >= len(value):
            raise InputError(
                f"{at.path!r} was given {len(value)} values, and is called more often than that"
            )
        return value[at.number]

    def require_used(self) -> None:
        """Raise if a value was not used.

        Raises:
            InputError: the model did not come by a node.
        """
        if self._unused:
            listed = ", ".join(map(repr, sorted(self._unused)))
            raise InputError(f"the model did not come by {listed}, so what was given is not used")
