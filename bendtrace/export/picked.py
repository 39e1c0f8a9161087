"""Copies in the place of views: what an index that comes out of a tensor picks.

In the model, `x[n]` is a view of `x`. In a program it is a copy, as its index is a tensor. Nothing
tells them apart until one of them is written to in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bendtrace.export.values import Outdated, Several, Tensors, Value, leaves, rebuilt
from bendtrace.tape.tape import Op, Ref

USED_LATE = (
    "what this index out of a tensor picks is used after that tensor is written to: copy it with "
    "clone()"
)
WRITTEN = (
    "it writes in place to what an index out of a tensor picks: compute a new value, and assign "
    "it to that index"
)


def memory_of(value: Value) -> frozenset[int]:
    """Return what the tensors in a value may share memory with."""
    return frozenset().union(*(one.memory for one in leaves(value) if isinstance(one, Tensors)))


def outdated(value: Value, written: frozenset[int], picked: set[int]) -> Value:
    """Return a value after a write, in which copies of what was written are outdated.

    Args:
        value: the value before.
        written: the memory that is written to.
        picked: the memory of all copies.
    """

    def after(leaf: Value) -> Value:
        if isinstance(leaf, Tensors) and leaf.memory & written and leaf.memory & picked - written:
            return Outdated()
        return leaf

    return rebuilt(value, after)


def is_outdated(value: Value) -> bool:
    """Return whether a part of a value is a copy of what was written to since."""
    return isinstance(value, Outdated) or (
        isinstance(value, Several) and any(isinstance(leaf, Outdated) for leaf in leaves(value))
    )


def is_stored_back(op: Op, ops: Sequence[Op]) -> bool:
    """Return whether an in-place op is that of an augmented assignment, such as `x[n] += 1`."""
    taken, after = op.args[0] if op.args else None, ops[op.index + 1 : op.index + 2]
    if type(taken) is not Ref or not after or after[0].target is not Tensor.__setitem__:
        return False
    read, store = ops[taken.index], after[0]
    return (
        read.target is Tensor.__getitem__
        and repr(read.args[:2]) == repr(store.args[:2])
        and store.args[2] in (Ref(op.index), Ref(taken.index))
    )
