"""Sorts guards by what they need: the arguments alone, the run, or no test at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import torch
from torch import Tensor

from bendtrace.tape.captured import Captured
from bendtrace.tape.guards import ErrorGuard, LengthGuard
from bendtrace.tape.tape import Guard, Op, OpKind, Tape, TensorMeta, has_tensors
from bendtrace.watch.functions import (
    FLEETING,
    INHERITED,
    METADATA,
    RANK_DEPENDS_ON_NUMBERS,
    RANK_DEPENDS_ON_SIZES,
    RANKS,
    RESHAPES_IN_PLACE,
    SETTERS,
    SHAPES,
    VALUES,
    is_foreign,
    is_torchs_function,
    may_lack_dimension,
    reads_metadata,
    table_name,
)
from bendtrace.watch.writes import works_in_place


class GuardKind(Enum):
    """When a guard can be tested."""

    INPUT = "input"  # before the run, from sizes and other metadata of arguments and state
    DATA = "data"  # in the run, once the value is there
    IMPLIED = "implied"  # never: it follows from metadata that is tested before the run


class NumberOrigin(Enum):
    """Where a number comes from."""

    STATIC = 0  # from sizes and arguments: known while a function is compiled
    SIZE = 1  # from a size that depends on values
    VALUE = 2  # out of a tensor


def number_origin(op: Op, known: Mapping[int, NumberOrigin], varies: bool) -> NumberOrigin | None:
    """Return where the number that an op returns comes from, if it returns one, or several.

    Args:
        op: the op.
        known: the same for the ops before it that return numbers.
        varies: whether it is given tensors whose sizes depend on values.
    """
    target = op.target
    if op.kind is OpKind.INPUT and not isinstance(op.meta, TensorMeta):
        return NumberOrigin.STATIC
    if op.kind is OpKind.CALL:
        if target in SHAPES or target is Tensor.__len__:
            return NumberOrigin.SIZE if varies else NumberOrigin.STATIC
        if target in METADATA:
            return NumberOrigin.STATIC
        is_value = target in VALUES or target is Tensor.tolist  # or of `item`, `equal`, ...
        return NumberOrigin.VALUE if is_value or type(op.meta) in (bool, int, float) else None
    if op.kind is not OpKind.SCALAR or has_tensors(op.meta):
        return None
    found = [known[index] for index in op.operands if index in known]
    if len(found) != len(op.operands):
        return None
    # A counter begins with a constant.
    return max(found, key=lambda kind: kind.value, default=NumberOrigin.STATIC)


class Analysis:
    """Sorts the guards of a tape."""

    def __init__(self, tape: Tape) -> None:
        self._ops = tape.ops
        self._counters, self._rounds = tape.counters, tape.rounds
        self._counted: set[int] = set()  # counters that no number in the state is part of
        # True if no op of the tape changes the shape of a tensor in place, so that shapes can be
        # read later than they were recorded.
        self.fixed_metadata: bool = not any(
            op.kind is OpKind.CALL
            and (table_name(op.target) in RESHAPES_IN_PLACE or _may_reshape(op))
            for op in tape.ops
        )
        self._reshaped: set[int] = set()  # by then: what may have another shape than before the run
        self._is_untouched = True  # by then: no tensor may have another graph than before the run
        self._state: list[Captured] = []
        # Per op, as bits: the state tensors that its value came from.
        self._sources: list[int] = []
        self._steady_type: list[bool] = []
        # Per op, whether it gives as many dimensions whatever the sizes and values are.
        self.steady_rank: list[bool] = []
        self.computable: set[int] = set()  # ops whose value needs no tensor op to be carried out
        for op in tape.ops:
            self._follow(op)
            if op.kind is OpKind.CALL and _may_reshape(op):
                self._reshaped.update(op.operands)
            # A write to a view, or to what shares its memory, is a write to all of them.
            self._is_untouched = self._is_untouched and not _may_touch(op)
        typed = ranked = 0
        self.kinds: list[GuardKind] = []  # the kind of each guard, in the tape's order
        for guard in tape.guards:
            kind, needs_type, needs_rank = self._sort(guard)
            self.kinds.append(kind)
            typed |= needs_type
            ranked |= needs_rank
        # State tensors whose dtype and device implied guards rely on.
        self.typed_state: frozenset[Captured] = frozenset(self._parts(typed))
        # State tensors whose number of dimensions implied guards rely on.
        self.ranked_state: frozenset[Captured] = frozenset(self._parts(ranked))

    @property
    def needs_values(self) -> bool:
        """Return whether there are guards that only the run itself can test."""
        return GuardKind.DATA in self.kinds

    def _parts(self, bits: int) -> Iterable[Captured]:
        return (part for i, part in enumerate(self._state) if bits >> i & 1)

    def _follow(self, op: Op) -> None:
        sources, steady_type, steady_rank = 0, True, True
        for index in op.operands:
            sources |= self._sources[index]
            steady_type = steady_type and self._steady_type[index]
            steady_rank = steady_rank and self.steady_rank[index]
        if op.kind is OpKind.STATE:
            sources = 1 << len(self._state)
            self._state.append(op.target)
        elif op.kind is OpKind.UNKNOWN:
            steady_type = steady_rank = False
        elif op.kind is OpKind.CALL:
            is_torchs = is_torchs_function(op.target) and not is_foreign(op.target)
            steady_type = steady_type and is_torchs and self.fixed_metadata
            steady_rank = (
                steady_type and steady_rank and table_name(op.target) not in RANK_DEPENDS_ON_SIZES
            )
            if steady_rank and table_name(op.target) in RANK_DEPENDS_ON_NUMBERS:
                given = (self._ops[index].meta for index in op.operands)
                steady_rank = all(isinstance(meta, TensorMeta) for meta in given)
        if op.index in self._counters and op.kind is OpKind.SCALAR:
            if self._counted.issuperset(op.operands):
                self._counted.add(op.index)
        self._sources.append(sources)
        self._steady_type.append(steady_type)
        self.steady_rank.append(steady_rank)
        if self._is_computable(op):
            self.computable.add(op.index)

    def _is_computable(self, op: Op) -> bool:
        if op.is_given:
            return not isinstance(op.meta, tuple)  # a number, not a TensorMeta
        if op.kind is OpKind.SCALAR:
            # What is computed with a counter is asked in each round of a loop.
            return (
                self.computable.issuperset(op.operands)
                and op.index not in self._rounds
                and (op.index in self._counters or self._counters.isdisjoint(op.operands))
            )
        return (
            is_metadata_read(op)
            and op.raised is None
            and self.fixed_metadata  # else it may be asked after a change
            and table_name(op.target) != "_version"
            and all(self._ops[index].is_given for index in op.operands)
            and self._reshaped.isdisjoint(op.operands)
            and (table_name(op.target) not in FLEETING or self._is_untouched)
        )

    def _sort(self, guard: Guard) -> tuple[GuardKind, int, int]:
        op = self._ops[guard.index]
        if guard.index in self._counted:
            return GuardKind.IMPLIED, 0, 0  # by the path from the beginning of the run
        if isinstance(guard, ErrorGuard):
            if op.raised is None and may_lack_dimension(op) and len(op.operands) == 1:
                index = op.operands[0]
                if self.steady_rank[index]:
                    return GuardKind.IMPLIED, 0, self._sources[index]
            return GuardKind.DATA, 0, 0
        if guard.index in self.computable and guard.other is None:
            return GuardKind.INPUT, 0, 0
        if (
            asks_for_slices(guard, self._ops)
            and all(self._ops[index].is_given for index in op.operands)
            and self._reshaped.isdisjoint(op.operands)
        ):
            return GuardKind.INPUT, 0, 0
        if is_metadata_read(op) and op.raised is None:
            refs = op.operands
            sources = 0
            for index in refs:
                sources |= self._sources[index]
            name = table_name(op.target)
            steady = all(self._steady_type[index] and self.steady_rank[index] for index in refs)
            if name in INHERITED and steady:
                # Which dtype a sum has depends on whether one of the two is a scalar tensor.
                return GuardKind.IMPLIED, sources, sources
            is_rank = name in RANKS or (op.target in SHAPES and isinstance(guard, LengthGuard))
            if is_rank and all(self.steady_rank[index] for index in refs):
                return GuardKind.IMPLIED, 0, sources
        return GuardKind.DATA, 0, 0


def _may_reshape(op: Op) -> bool:
    """Return whether an op may change the shape of an argument, though its name does not say so."""
    return "out" in op.kwargs or bool(
        op.writes and (is_foreign(op.target) or not is_torchs_function(op.target))
    )


def _may_touch(op: Op) -> bool:
    """Return whether an op may change a tensor's version, or its place in the autograd graph."""
    return op.kind is OpKind.CALL and bool(
        op.writes
        or op.target in SETTERS
        or table_name(op.target) == "retain_grad"
        or not is_torchs_function(op.target)
        or works_in_place(op)
    )


def is_metadata_read(op: Op) -> bool:
    """Return whether an op only looks at a tensor's metadata."""
    return op.kind is OpKind.CALL and reads_metadata(op.target)


def tested_ops(guard: Guard, ops: list[Op]) -> list[int]:
    """Return the ops whose values an input guard is tested with."""
    return ops[guard.index].operands if asks_for_slices(guard, ops) else [guard.index]


def asks_for_slices(guard: Guard, ops: list[Op]) -> bool:
    """Return whether a guard is on how many slices a tensor has: a size, and no value."""
    op = ops[guard.index]
    return isinstance(guard, LengthGuard) and op.target in (Tensor.unbind, torch.unbind)
