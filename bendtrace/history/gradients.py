"""Keeping the gradients of a run's values, in the backward pass that comes after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace.history.entries import LayerEntry
from bendtrace.recording.parts import requires_grad

__all__ = ["Gradients"]

Key = tuple[int, tuple[Any, ...]]


class Gradients:
    """The gradients of the latest backward pass through a run.

    Args:
        convert: what to do with them before they are kept; None for nothing.

    Attributes:
        kept: the gradients, by op and element.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor] | None) -> None:
        self.kept: dict[Key, Tensor] = {}
        self._convert = convert
        self._entries: dict[Key, list[LayerEntry]] = {}
        # How many values besides leaves have hooks, and in which backward pass one was called.
        self._inner, self._task = 0, -1

    def attach(self, key: Key, entry: LayerEntry) -> None:
        """Give an entry its gradient, now or when it comes."""
        entry.gradient = self.kept.get(key)
        self._entries.setdefault(key, []).append(entry)

    def watch(self, key: Key, tensor: Tensor) -> None:
        """Have the gradient of a tensor kept, as long as there is someone to keep it."""
        if not requires_grad(tensor):
            return
        weak, is_leaf = weakref.ref(self), tensor.is_leaf
        self._inner += not is_leaf

        def hook(gradient: Tensor | None) -> None:
            keeper = weak()
            if keeper is not None and gradient is not None:  # None: nobody has used the value
                keeper._keep(key, gradient, is_leaf)

        handle = tensor.register_hook(hook)
        if is_leaf:  # it may be the caller's, and outlive the log
            weakref.finalize(self, handle.remove)

    def _keep(self, key: Key, gradient: Tensor, is_leaf: bool) -> None:
        """Keep a gradient, unless it is a leaf's and comes from something besides the run."""
        task = torch._C._current_graph_task_id()
        if not is_leaf:
            self._task = task
        elif self._inner and task != self._task:
            return
        with torch.no_grad():
            try:
                value = gradient.detach()
            except RuntimeError:  # one of a batch of gradients is no tensor that could be kept
                return
            if self._convert is not None:
                value = self._convert(value)
            self.kept[key] = value.clone()
        for entry in self._entries.get(key, ()):
            entry.gradient = self.kept[key]
