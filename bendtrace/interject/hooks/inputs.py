"""An input of a call whose gradients are watched, and the tensor that stands in for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.interject.hooks.steps import Node, root

__all__ = ["Alias", "Watch"]


class Alias:
    """An input, and what the module was given for it.

    Attributes:
        original: the input; while the call runs, the caller has it.
        inside: what the module was given: the same storage, with a history of its own.
        nodes: what had computed the input, and what it is a view of, if it is one.
        is_leaf: whether that was no op.
        is_rebased: whether the input was given the history of what stood in for it.
    """

    def __init__(self, original: Tensor, inside: Tensor) -> None:
        self.original: Callable[[], Tensor | None] = weakref.ref(original)
        self.inside = inside
        self._version = inside._version
        self._entry: Node = inside.grad_fn
        self._node: Node = root(original).grad_fn
        self.nodes = {original.grad_fn, self._node} - {None}
        self.is_leaf = root(original).is_leaf
        self.is_rebased = False
        if getattr(original, "__dict__", None):
            inside.__dict__.update(original.__dict__)

    @property
    def is_written(self) -> bool:
        """Whether the storage was changed in place."""
        return self.inside._version != self._version

    @property
    def has_history(self) -> bool:
        """Whether autograd knows that what stood in for the input was changed."""
        return self.inside.grad_fn is not self._entry

    @property
    def original_has_history(self) -> bool:
        """Whether autograd knows that the input itself was changed."""
        original = self.original()
        return original is not None and root(original).grad_fn is not self._node


class Watch:
    """Notices that an input, or an output that is (a view of) it, is changed in place later.

    The history of the one does not show what is done to the other. No harm is done if the input
    is not there any more by then, or if nothing else uses it.

    Args:
        alias: the input, and what stood in for it and is (a view of) an output.
        name: what the module is called.
    """

    def __init__(self, alias: Alias, name: str) -> None:
        self._name = name
        # It has the count of changes that the two share, and none of their memory.
        self._probe = alias.inside.detach()
        self._probe.data = self._probe.new_empty(0)
        self._version = self._probe._version
        self._was_written: bool | None = None  # unknown as long as the input is there
        self._through: dict[int, Tensor | None] = {}
        original = alias.original()
        assert original is not None  # the caller has it
        self._root = weakref.ref(root(original), self._ends)
        root(original).register_hook(self._check)

    def _ends(self, root: Any) -> None:
        self._was_written = self._probe._version != self._version

    @property
    def _is_written(self) -> bool:
        if self._was_written is None:
            return self._probe._version != self._version
        return self._was_written

    def passes(self, gradient: Tensor | None) -> None:
        """Note the gradient that has passed through the call; called in a backward pass."""
        if self._is_written:
            self._through[torch._C._current_graph_task_id()] = gradient

    def _check(self, gradient: Tensor) -> None:
        """See to it that a changed input gets no gradient but that through the call."""
        if not self._is_written:
            return
        through = self._through.pop(torch._C._current_graph_task_id(), None)
        if through is None or not torch.equal(through.flatten(), gradient.flatten()):
            raise InputError(
                f"module {self._name!r} returns its input, or a view of it, which was changed in "
                "place after the call while the input was used elsewhere, so that the gradients "
                "that pass through the call cannot be told from others: deactivate its backward "
                "hooks"
            )
