"""Which elements of a value in a run depend on some elements of its inputs."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bendtrace.history.validate import MISSING, Validator
from bendtrace.tape.contexts import ContextSwitch
from bendtrace.tape.tape import (
    Op,
    OpKind,
    Ref,
    TensorMeta,
    map_refs,
    refs_in,
)
from bendtrace.torch_rules.functions import METADATA, SHAPES, name_of

__all__ = ["Elements"]

_DRAWS = 5
_SHAPES = frozenset({*SHAPES, *METADATA})
# Each element of their output depends on the elements at its place, but trials with other values
# do not always show it.
_COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isclose"})
# With whole numbers that depend on the inputs these return elements of their inputs, or compute
# with the numbers at a place. Others can move values anywhere.
_LOCAL = frozenset(
    {
        "abs", "add", "cat", "chunk", "clone", "contiguous", "cumsum", "div", "double", "embedding",
        "embedding_bag", "expand", "expand_as", "flatten", "flip", "float", "gather", "getitem",
        "half", "index_select", "int", "long", "mul", "neg", "permute", "repeat", "reshape",
        "split", "squeeze", "stack", "sub", "sum", "t", "take", "take_along_dim", "to",
        "transpose", "type", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip


class Elements:
    """Follows single elements through a recorded run, op by op.

    Each op runs twice, on values that differ only in the followed elements; the elements that
    differ in its output are followed next. The values that depend on the inputs are those of the
    run, and random ones too, so that the selection of a relu, a gate or a maximum in this run does
    not matter. Weights, masks and constants keep their values. Numbers are computed in double
    precision, so that rounding errors of one element do not reach another.

    Args:
        trace: a trace with all its activations.
        sources: the ops of the inputs that are followed.
        seed: for the random values.

    Attributes:
        coarse: ops whose whole output is assumed to depend on all of their inputs, and why.
    """

    def __init__(self, trace: Any, sources: list[int], seed: int) -> None:
        self.coarse: dict[int, str] = {}
        self._ops: list[Op] = trace.ops
        self._saved = Validator(trace.ops, trace._capture, {}, seed)
        self._random = trace._capture.random
        self._seed = seed
        self._reached = self._descendants(sources)
        self._bases: dict[Any, tuple[list[Any], list[Any]]] = {}
        self._plain: dict[tuple[int, int], Any] = {}
        # What depends on any of them: all else of a value stays as it was in the run, such as the
        # scores that a mask sets to -inf.
        self._dependent: dict[int, Any] = {i: _all_of(trace.ops[i].meta) for i in sources}
        self._mark(self._dependent, len(self._ops) - 1)

    @property
    def reached(self) -> set[int]:
        """The ops whose values depend on the followed inputs."""
        return self._reached

    def follow(self, marked: dict[int, Tensor], target: int) -> Any:
        """Return the elements of a value that depend on some elements of the inputs.

        Args:
            marked: a mask of elements for each input op.
            target: op of the value.

        Returns:
            A mask with the value's shape, or a tuple of masks for several values; None if nothing
            depends on them.
        """
        marks: dict[int, Any] = dict(marked)
        self._mark(marks, target)
        return marks.get(target)

    def reaches(self, marked: dict[int, Tensor], targets: tuple[int, ...]) -> bool:
        """Return whether some values depend on some elements of the inputs at all."""
        marks: dict[int, Any] = dict(marked)
        self._mark(marks, max(targets))
        return any(_any(marks.get(target)) for target in targets)

    def _mark(self, marks: dict[int, Any], last: int) -> None:
        """Add the marks of the ops up to one to those of the inputs."""
        for index in range(last + 1):
            op = self._ops[index]
            if op.kind is OpKind.INPUT or index not in self._reached or op.target in _SHAPES:
                continue
            given = {}
            for ref in refs_in((op.args, op.kwargs)):
                mark = self._mark_of(op, ref, marks)
                if _any(mark):
                    given[ref.index] = mark
            if given:
                marks[index] = self._through(op, given)

    def _descendants(self, sources: list[int]) -> set[int]:
        reached = set(sources)
        for op in self._ops:
            if op.target in _SHAPES:
                continue
            read = {ref.index for ref in refs_in((op.args, op.kwargs))} | set(op.reads.values())
            if read & reached:
                reached.add(op.index)
        return reached

    # Marks

    def _mark_of(self, op: Op, ref: Ref, marks: dict[int, Any]) -> Any:
        writer = op.reads.get(ref.index)
        if writer is None:
            return marks.get(ref.index)
        if self.is_all_of(writer, ref.index):
            return marks.get(writer)
        # Through a view of other elements: which ones is not known.
        mark = marks.get(ref.index), marks.get(writer)
        if not _any(mark):
            return None
        self.coarse[op.index] = "it reads memory that was written through another view"
        return _all_of(self._ops[ref.index].meta)

    def is_all_of(self, writer: int, index: int) -> bool:
        """Whether the output of a writing op is the whole output of another op."""
        given, made = self._ops[index].meta, self._ops[writer].meta
        if index not in self._ops[writer].writes:
            return False
        return made is None or (isinstance(made, TensorMeta) and made == given)

    def _through(self, op: Op, given: dict[int, Any]) -> Any:
        whole = _all_of(op.meta if op.meta is not None or not op.writes else
                        self._ops[op.writes[0]].meta)  # fmt: skip
        if op.index in self.coarse:
            return whole
        if op.kind is OpKind.SCALAR and op.target is operator.getitem and len(op.args) == 2:
            held = given.get(getattr(op.args[0], "index", -1))
            if isinstance(held, tuple) and isinstance(op.args[1], int):
                return held[op.args[1]]
        if self._unable(op):
            return whole
        name = name_of(op.target).strip("_")
        if name in _COMPARING and isinstance(whole, Tensor):
            return _together(whole.shape, given)
        if name not in _LOCAL and any(
            self._is_whole(op, index) and _any(mark) for index, mark in given.items()
        ):
            self.coarse[op.index] = "it receives integers that depend on values"
            return whole
        found = None
        for draw in range(_DRAWS):
            try:
                plain = self._carried_out(op, draw, {})
                other = self._carried_out(op, draw, given)
            except Exception as error:  # values that it does not take: their effect is unknown
                self.coarse[op.index] = f"{type(error).__name__}: {error}"
                return whole
            mark = _differing(plain, other, whole)
            if mark is _UNLIKE:
                self.coarse[op.index] = "its sizes depend on values"
                return whole
            found = mark if found is None else _either(found, mark)
        return found

    def _is_whole(self, op: Op, index: int) -> bool:
        """Whether an op is given a tensor of whole numbers."""
        meta = self._ops[index].meta
        if not isinstance(meta, TensorMeta) or meta.dtype is torch.bool:
            return False
        return not (meta.dtype.is_floating_point or meta.dtype.is_complex)

    def _unable(self, op: Op) -> bool:
        if op.raised is not None:
            self.coarse[op.index] = "it raised an error that the model caught"
        elif (reason := self._saved.unable(op)) is not None:
            self.coarse[op.index] = reason
        return op.index in self.coarse

    # Values

    def _carried_out(self, op: Op, draw: int, given: dict[int, Any]) -> Any:
        """Run an op on a draw of values, with other values for the marked elements."""
        if not given and (op.index, draw) in self._plain:
            return self._plain[op.index, draw]
        try:
            made = self._run(op, draw, given, wide=True)
        except RuntimeError:  # of tensors that are single precision by themselves
            made = self._run(op, draw, given, wide=False)
        if not given:
            self._plain[op.index, draw] = made
        return made

    def _run(self, op: Op, draw: int, given: dict[int, Any], wide: bool) -> Any:
        values = {}
        for ref in refs_in((op.args, op.kwargs)):
            value = self._drawn(op, ref, draw, given.get(ref.index))
            values[ref.index] = _copied(value, wide)
        args, kwargs = map_refs((op.args, op.kwargs), lambda ref: values[ref.index])
        before = torch.get_rng_state()
        switch = ContextSwitch()
        try:
            torch.set_rng_state(self._random.get(op.index, before))
            switch.to(op.context)
            with torch.no_grad():
                out = op.target(*args, **kwargs)
        finally:
            switch.restore()
            torch.set_rng_state(before)
        return values[op.writes[0]] if out is None and op.writes else out

    def _drawn(self, op: Op, ref: Ref, draw: int, mark: Any) -> Any:
        source = op.reads.get(ref.index, ref.index)
        if source not in self._reached and ref.index not in self._reached:
            return self._read(op, ref)
        key = (op.index, ref.index) if source != ref.index else ref.index
        if key not in self._bases:
            generator = torch.Generator().manual_seed(self._seed + zlib.crc32(str(key).encode()))
            value = self._read(op, ref)
            bases, others = _draws(value, generator)
            dependent = self._mark_of(op, ref, self._dependent)
            # What does not depend on the inputs is as it was in the run, which is the first draw.
            bases = [_chosen(bases[0], base, dependent) for base in bases]
            self._bases[key] = bases, others
        bases, others = self._bases[key]
        return _chosen(bases[draw], others[draw], mark)

    def _read(self, op: Op, ref: Ref) -> Any:
        value = self._saved.value(op, ref)
        if value is MISSING:
            raise LookupError("it reads a value that was not kept")
        return value


class _Unlike:
    """Results of different sizes."""


_UNLIKE = _Unlike()


def _draws(value: Any, generator: torch.Generator) -> tuple[list[Any], list[Any]]:
    """Return values to compute with, the first of the run, and others that differ everywhere."""
    if isinstance(value, tuple):
        parts = [_draws(item, generator) for item in value]
        return tuple(
            [tuple(part[side][draw] for part in parts) for draw in range(_DRAWS)] for side in (0, 1)
        )  # type: ignore[return-value]
    if isinstance(value, bool):
        return [value] * _DRAWS, [not value] * _DRAWS
    if isinstance(value, float):
        return [value] * _DRAWS, [-2 * value or 1.0] * _DRAWS
    if isinstance(value, int):
        raise LookupError("it receives an integer that depends on values")
    if not isinstance(value, Tensor):
        raise LookupError(f"it receives a {type(value).__name__}")
    if value.dtype is torch.bool:
        # What a mask hides in the run, it need not hide for other inputs.
        some = (torch.rand(value.shape, generator=generator) < 0.5).to(value.device)
        on = torch.ones_like(value)
        masks = [value, on, ~on, some, ~some]
        return masks, [~mask for mask in masks]
    if not value.is_floating_point() and not value.is_complex():
        # Indices have to stay in range: others of the same tensor are.
        low, high = (value.min(), value.max()) if value.numel() else (value, value)
        if value.numel() and low == high:
            only = torch.where(value > 0, value - 1, value + 1)
            return [value] * _DRAWS, [only] * _DRAWS
        count = high - low + 1
        near = [low + (value - low + step) % count for step in (1, -1)]
        spread = torch.rand(value.shape, generator=generator).to(value.device)
        far = 1 + (spread * (count - 1)).to(value.dtype)
        ends = [torch.where(value == end, other, end) for end, other in ((high, low), (low, high))]
        return [value] * _DRAWS, [*ends, *near, low + (value - low + far) % count]
    real = value.abs().detach().to(torch.float64) if value.is_complex() else value.double()

    def noise() -> Tensor:
        return torch.randn(real.shape, generator=generator, dtype=torch.float64).to(real.device)

    def swing() -> Tensor:
        drawn = torch.rand(real.shape, generator=generator, dtype=torch.float64)
        return drawn.to(real.device)

    run = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
    one, two = noise(), noise()
    bases = [run, one.to(run.dtype), -one.to(run.dtype), two.to(run.dtype), -two.to(run.dtype)]
    others = [torch.where(run == 0, noise().to(run.dtype), -run * (1.5 + swing()))]
    others += [-base * (1.5 + swing()) for base in bases[1:3]]
    # Great ones as well, so that other values become the greatest.
    others += [-base.sgn() * (100 + 900 * swing()) for base in bases[3:]]
    return bases, others


def _chosen(base: Any, other: Any, mark: Any) -> Any:
    if mark is None:
        return base
    if isinstance(base, tuple):
        marks = mark if isinstance(mark, tuple) else (mark,) * len(base)
        return tuple(map(_chosen, base, other, marks))
    if isinstance(base, Tensor):
        return torch.where(mark, other, base) if isinstance(mark, Tensor) else other
    return other if _any(mark) else base


def _copied(value: Any, wide: bool) -> Any:
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_copied(item, wide) for item in value)
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.is_complex():
        return value.to(torch.complex128 if wide else torch.complex64, copy=True)
    if value.is_floating_point():
        return value.to(torch.float64 if wide else torch.float32, copy=True)
    return value.clone()


def _differing(one: Any, other: Any, whole: Any) -> Any:
    """Return masks of the elements that differ between two results."""
    if isinstance(whole, tuple):
        if not isinstance(one, (tuple, list)) or not len(one) == len(other) == len(whole):
            return _UNLIKE
        parts = tuple(map(_differing, one, other, whole))
        return _UNLIKE if any(part is _UNLIKE for part in parts) else parts
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if isinstance(whole, Tensor) and not one.shape == other.shape == whole.shape:
            return _UNLIKE
        differ = one != other
        if one.is_floating_point() or one.is_complex():
            differ = differ & ~(one.isnan() & other.isnan())
        return differ
    return bool(one != other)


def _together(shape: Any, given: dict[int, Any]) -> Tensor:
    """Return the places of a shape at which any of some masks has an element."""
    found = torch.zeros(shape, dtype=torch.bool)
    for mark in given.values():
        if isinstance(mark, Tensor):
            found = found.to(mark.device) | mark.expand(shape)
        elif _any(mark):
            found = torch.ones_like(found)
    return found


def _either(one: Any, other: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(map(_either, one, other))
    return one | other


def _any(mark: Any) -> bool:
    if mark is None:
        return False
    if isinstance(mark, tuple):
        return any(map(_any, mark))
    return bool(mark.any()) if isinstance(mark, Tensor) else bool(mark)


def _all_of(meta: Any) -> Any:
    if isinstance(meta, TensorMeta):
        return torch.ones(meta.shape, dtype=torch.bool, device=meta.device)
    if isinstance(meta, tuple):
        return tuple(map(_all_of, meta))
    return True


def bisected(mask: Tensor, matters: Callable[[Tensor], bool]) -> Tensor:
    """Return the elements of a mask that matter individually, by halving the sets that matter.

    Args:
        mask: the elements to test.
        matters: whether any element of a mask matters.
    """
    found = torch.zeros_like(mask)
    places = mask.flatten().nonzero().flatten()
    pending = [places]
    while pending:
        part = pending.pop()
        if not len(part):
            continue
        asked = torch.zeros_like(mask).flatten()
        asked[part] = True
        if not matters(asked.reshape(mask.shape)):
            continue
        if len(part) == 1:
            found.view(-1)[part] = True
        else:
            middle = len(part) // 2
            pending += [part[:middle], part[middle:]]
    return found
