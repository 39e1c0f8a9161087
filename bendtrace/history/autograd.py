"""Which op of a run made a node of torch's autograd graph."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from bendtrace.source.internals import internal
from bendtrace.tape.captured import requires_grad
from bendtrace.tape.tape import Op, OpKind

__all__ = ["GraphMarks"]

Key = tuple[int, tuple[Any, ...]]
_now: Callable[[], int] = internal(
    "torch._C._autograd._get_sequence_nr", lambda: 0, "the ops of nodes of the backward pass"
)


class GraphMarks:
    """Finds the op that made a node of the autograd graph, without keeping the graph alive.

    torch numbers the nodes of a thread in the order in which they are made (seen in 2.13,
    `tests/test_backward.py` notices a change). So the nodes of an op are those whose numbers were
    given out while it ran. Numbers of other threads can be the same; the marks in the metadata of
    nodes say where the graph of the run begins and ends.

    Attributes:
        places: for each value that has a node, the mark and the number of the node, and which of
            its outputs the value is.
        leaves: the arguments of the run that are leaves, by op.
    """

    def __init__(self) -> None:
        self.places: dict[Key, tuple[tuple[str, int], int]] = {}
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self._last: int = _now()
        self._starts: list[int] = []
        self._spans: list[tuple[int, int]] = []  # end, op

    def add(self, op: Op, element: tuple[Any, ...], tensor: Tensor, node: Any) -> None:
        """Note that an op has returned, or received, a tensor with a node."""
        now = _now()
        is_input = op.kind is OpKind.INPUT
        mark = node.metadata.setdefault(self, "before" if is_input else "run")
        if now > self._last and not is_input:
            self._starts.append(self._last)
            self._spans.append((now, op.index))
        self._last = now
        self.places[op.index, element] = (mark, node._sequence_nr()), tensor.output_nr

    def add_leaf(self, op: Op, tensor: Tensor) -> None:
        """Note that a leaf is an argument of the run."""
        self.leaves[op.index] = weakref.ref(tensor)

    def add_state(self, op: Op, tensor: Tensor) -> None:
        """Note that the run reads a tensor that none of its ops has returned."""
        node: Any = tensor.grad_fn if requires_grad(tensor) else None
        if node is not None:
            mark = node.metadata.setdefault(self, "before")
            self.places[op.index, ()] = (mark, node._sequence_nr()), tensor.output_nr
        self._last = _now()  # what has made it is no op of the run

    def mark_of(self, node: Any) -> Literal["run", "before", ""]:
        """Return whether a node made a value of the run, or one that the run received."""
        found: Literal["run", "before"] | None = node.metadata.get(self)
        return found or ""

    def op_of(self, number: int) -> int | None:
        """Return the op that made a node of the run, by the number of the node."""
        at = bisect.bisect_right(self._starts, number) - 1
        if at < 0 or number >= self._spans[at][0]:
            return None
        return self._spans[at][1]
