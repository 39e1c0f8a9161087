"""The gradients that go through one execution of a node, and through nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InterjectionError
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.plan import Entry
from bendtrace.interject.structure import describe

__all__ = ["ALIAS", "Through"]


class _Alias(torch.autograd.Function):
    """Gives a node its inputs under other names, so that their gradients are the node's alone."""

    @staticmethod
    def forward(ctx: Any, through: Through, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.through = through
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.through.leaves(grads)


# In what torch says (2.13 and 2.14) where such an alias, or a view of one, is written to.
ALIAS = "created inside a custom Function"


class Through:
    """One execution of a node, from its forward to its backward pass.

    The inputs are replaced by aliases, whose gradients autograd does not mix with those of other
    uses.

    Args:
        entries: the insertions that are told.
        at: the execution.
    """

    def __init__(self, entries: list[Entry], at: NodePass) -> None:
        self._entries = entries
        self._at = at
        self._count = 0
        self._aliased: list[int] = []
        self._outputs: list[Tensor | None] = []

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take note of the inputs; return what the node is to be given."""
        given = list(tensors)
        self._count = len(given)
        self._aliased = [
            i for i, tensor in enumerate(given) if torch.is_grad_enabled() and tensor.requires_grad
        ]
        if self._aliased:
            aliases = _Alias.apply(self, *(given[i] for i in self._aliased))
            for i, tensor in zip(self._aliased, aliases, strict=True):
                given[i] = tensor
        return given

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Take note of the outputs."""
        self._outputs = [None] * len(outputs)
        watched = [tensor for tensor in outputs if tensor.requires_grad]
        if not watched or not torch.is_grad_enabled():
            return
        for i, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._keeps(i))
        if not self._aliased:  # no gradient will arrive at the inputs
            self._hook_end(watched)

    def leaves(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Tell the insertions of the gradients of the aliases; return what they become."""
        given: list[Tensor | None] = [None] * self._count
        for i, grad in zip(self._aliased, grads, strict=True):
            given[i] = grad
        outputs, self._outputs = tuple(self._outputs), [None] * len(self._outputs)
        now = tuple(given)
        for entry in self._entries:
            result = entry.what.backward(self._at, now, outputs)
            if result is not None:
                now = self._checked(entry, result, now)
            entry.insertion.fired_backward(self._at)
        return tuple(now[i] for i in self._aliased)

    def _keeps(self, position: int) -> Any:
        def keep(grad: Tensor) -> None:
            self._outputs[position] = grad

        return keep

    def _hook_end(self, watched: list[Tensor]) -> None:
        def ended(grads: Any) -> None:
            self.leaves(())

        if len(watched) == 1:
            watched[0].register_hook(ended)
            return
        torch.autograd.graph.register_multi_grad_hook(watched, ended)

    def _checked(
        self, entry: Entry, result: Any, before: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        if isinstance(result, Tensor) and len(before) == 1:
            result = (result,)
        if not isinstance(result, (tuple, list)) or len(result) != len(before):
            raise self._error(entry, f"{len(before)} gradients, one for each input", result)
        for i, (new, old) in enumerate(zip(result, before, strict=True)):
            if new is None or new is old:
                continue
            if i not in self._aliased:
                raise self._error(entry, f"None for input {i}, which has no gradient", new)
            if not isinstance(new, Tensor):
                raise self._error(entry, f"a tensor or None for input {i}", new)
            if old is not None and new.shape != old.shape:
                raise self._error(entry, f"shape {tuple(old.shape)} for input {i}", new)
        return tuple(result)

    def _error(self, entry: Entry, expected: str, got: Any) -> InterjectionError:
        shown = f"shape {tuple(got.shape)}" if isinstance(got, Tensor) else describe(got)
        path = self._at.path
        return InterjectionError(
            f"{entry.what.label} at {path or '<root>'}: process_backward has to return {expected}; "
            f"it returned {shown}",
            path,
        )
