"""Recomputes each op of a log from the saved values, to check the log."""

from __future__ import annotations

import operator
import re
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.log.capture import ValueCapture, aligned_copy
from bendtrace.log.entries import counted, tensors_of
from bendtrace.python.checks import listed
from bendtrace.python.compare import same_bits
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.contexts import ContextSwitch
from bendtrace.tape.structure import Existing
from bendtrace.tape.tape import Op, OpKind, Ref, TensorMeta, Use, map_refs, refs_in
from bendtrace.watch.functions import (
    METADATA,
    SHAPES,
    UNINITIALIZED,
    VALUES,
    is_torchs_function,
    name_of,
    table_name,
)


@dataclass
class Validation:
    """The result of recomputing each op of a log.

    Attributes:
        ops: the number of ops that were recomputed and compared, bit by bit.
        wrong: labels of the ops with a different result.
        skipped: why other ops could not be recomputed, by label.
        edges: the number of edges that were tested by replacing a value.
        idle: (parent, child) of edges for which that changed nothing. Some ops use only the shape
            of an input, and some values make no difference (`relu` of negative ones): these are not
            errors, but worth a look.
    """

    ops: int = 0
    wrong: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    edges: int = 0
    idle: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        lines = [
            f"{counted(self.ops, 'op')} recomputed: "
            + ("bitwise equal" if not self.wrong else f"wrong: {listed(self.wrong)}"),
            f"{counted(self.edges, 'edge')} tried"
            + (f", {len(self.idle)} without effect: " if self.idle else "")
            + listed([f"{parent} -> {child}" for parent, child in self.idle]),
        ]
        lines += [f"not recomputed: {label} ({why})" for label, why in self.skipped.items()]
        return "\n".join(lines)


def validate(trace: Any, capture: ValueCapture | None, seed: int) -> Validation:
    """Check a trace with all its activations; see `Trace.validate`."""
    if capture is None or not capture.is_exact:
        raise InputError(
            "validation needs all activations in memory, unchanged: trace with save='all', "
            "and without save_device, save_dtype or save_to"
        )
    labels = {
        (entry.index, entry.element): entry.label
        for entry in trace.entries
        if entry.index is not None
    }
    return Validator(trace.ops, capture, labels, seed).run()


class Validator:
    """Recomputes ops, one by one, from the saved values."""

    def __init__(
        self, ops: list[Op], capture: ValueCapture, labels: dict[Any, str], seed: int
    ) -> None:
        self._ops = ops
        self._capture = capture
        self._labels = labels
        self._generator = torch.Generator().manual_seed(seed)
        self._graphs = {index for index, _ in capture.grad_fns}

    def run(self) -> Validation:
        """Recompute all of them; the random generator is restored."""
        found = Validation()
        state = torch.get_rng_state()
        try:
            for op in self._ops:
                is_call = op.kind is OpKind.CALL and op.target not in METADATA
                if is_call or (op.kind is OpKind.SCALAR and not _names_part(op)):
                    self._check(op, found)
        finally:
            torch.set_rng_state(state)
        return found

    def _check(self, op: Op, found: Validation) -> None:
        label = self._label(op)
        reason = self.unable(op)
        if reason is not None:
            found.skipped[label] = reason
            return
        given = {ref.index: self.value(op, ref) for ref in refs_in((op.args, op.kwargs))}
        for index, value in given.items():
            if value is MISSING:
                is_state = self._ops[index].kind is OpKind.STATE
                why = "state that has changed since" if is_state else "a value that was not saved"
                found.skipped[label] = f"it reads {why}"
                return
        try:
            again = self.carry_out(op, given)
        except _Random:
            found.skipped[label] = "it draws random numbers in an unexpected way"
            return
        except Exception:  # it cannot have run on what the log lists as its inputs
            found.wrong.append(label)
            return
        found.ops += 1
        if not self._same(op, again):
            found.wrong.append(label)
            return
        if op.target in SHAPES:
            return
        for index, value in given.items():
            is_state = self._ops[index].kind is OpKind.STATE
            if isinstance(value, Tensor) and value.numel() and not is_state:
                found.edges += 1
                if not self._matters(op, given, index, again):
                    found.idle.append((self._label(self._ops[index]), label))

    def _whole(self, op: Op) -> tuple[Op, tuple[Any, ...]]:
        """Return the op whose output an op only names a part of, with the keys; or the op."""
        path: tuple[Any, ...] = ()
        while op.kind is OpKind.SCALAR and _names_part(op):
            path = (*op.args[1:], *path)
            op = self._ops[op.args[0].index]
        return op, path

    def unable(self, op: Op) -> str | None:
        """Return why an op cannot be recomputed; None if it can."""
        if op.raised is not None:
            return f"it raised {op.raised.type.__name__}"
        is_torchs = is_torchs_function(op.target) or isinstance(op.target, types.MethodWrapperType)
        if op.kind is OpKind.CALL and not is_torchs:
            return "it is not a torch function"
        name = table_name(op.target)
        if name in UNINITIALIZED or (isinstance(op.target, type) and self._gives_sizes(op)):
            return "it returns uninitialised memory"
        if name == "storage_offset":
            return "it depends on memory addresses"
        if name in ("grad", "grad_fn", "backward"):
            return "it reads the autograd graph"
        if name == "data" and getattr(op.target, "__name__", "") == "__set__":
            return "it gives a tensor the memory of another one"
        if not all(map(_is_plain_output, (*op.args, *op.kwargs.values()))):
            return "it received an object"
        return None

    def _gives_sizes(self, op: Op) -> bool:
        """Return whether a constructor receives only sizes: `torch.FloatTensor(2, 3)`."""
        metas = (self._ops[a.index].meta if type(a) is Ref else a for a in op.args)
        return bool(op.args) and all(type(meta) in (int, tuple) for meta in metas)

    def value(self, op: Op, ref: Ref) -> Any:
        """Return the value of an op's input at that time; `MISSING` if it was not saved."""
        reread = self._capture.reread.get((op.index, ref.index))
        if reread is not None:
            return reread
        source = self._ops[ref.index]
        saved = self._capture.saved
        element: tuple[Any, ...] = ()
        if source.kind is OpKind.STATE:
            kept = self._capture.states.get(source.index)
            tensor = None if kept is None else kept.read()
            return MISSING if tensor is None else tensor
        if not tensors_of(source.meta):
            return source.meta
        while (source.index, element) not in saved:
            if source.kind is not OpKind.SCALAR or not isinstance(source.args[0], Ref):
                found = {path: saved.get((source.index, path), MISSING)
                         for path, _ in tensors_of(source.meta)}  # fmt: skip
                return _meta_at(source.meta, found, ()) if found else MISSING
            element = (source.args[1], *element)
            source = self._ops[source.args[0].index]
        return saved[source.index, element]

    def carry_out(self, op: Op, given: dict[int, Any]) -> Any:
        """Run an op on copies of its inputs; return its result, or the tensor that it wrote to."""
        records = op.context.grad and not op.context.inference
        copies = {
            index: _copy_value(value, records and self._had_graph(index))
            for index, value in given.items()
        }
        args, kwargs = map_refs((op.args, op.kwargs), lambda ref: copies[ref.index])
        random = self._capture.random.get(op.index)
        before = torch.get_rng_state() if random is None else random
        torch.set_rng_state(before)
        switch = ContextSwitch()
        try:
            switch.to(op.context)
            out = op.target(*args, **kwargs)
        finally:
            switch.restore()
        if random is None and not torch.equal(torch.get_rng_state(), before):
            raise _Random
        return copies[op.writes[0]] if out is None and op.writes else out

    def _had_graph(self, index: int) -> bool:
        return self._whole(self._ops[index])[0].index in self._graphs

    def _same(self, op: Op, again: Any) -> bool:
        tensors = tensors_of(op.meta)
        if op.meta is None and op.writes:
            tensors = [((), self._ops[op.writes[0]].meta)]
        if not tensors:
            if op.kind is OpKind.CALL and VALUES.get(op.target) is Use.FORMAT:
                return _GRAPH.sub("", again) == _GRAPH.sub("", op.meta)
            gives_nothing = op.kind is OpKind.CALL and op.meta is None
            return gives_nothing or same_bits(plainly(again), plainly(op.meta))
        for path, _ in tensors:
            value = again
            for key in path:
                value = value[key]
            saved = self._capture.saved.get((op.index, path))
            if not isinstance(saved, Tensor) or not same_bits(plainly(value), saved.detach()):
                return False
        return True

    def _matters(self, op: Op, given: dict[int, Any], index: int, again: Any) -> bool:
        """Return whether an op has another result for another value."""
        for scale in (1.0, 100.0):
            other = _other(given[index], scale, self._generator)
            if other is None:
                return True  # there is no other value
            try:
                result = self.carry_out(op, {**given, index: other})
            except Exception:  # it cares
                return True
            if not same_bits(plainly(result), plainly(again)):
                return True
        return False

    def _label(self, op: Op) -> str:
        source, path = self._whole(op)
        for key in ((op.index, ()), (source.index, path), (source.index, (0,))):
            if key in self._labels:
                return self._labels[key]
        return f"{getattr(op.target, '__name__', op.kind.value)} (op {op.index})"


def _names_part(op: Op) -> bool:
    """Return whether an op only names a part of another op's output."""
    if op.target is tuple:
        return True
    return op.target is operator.getitem and isinstance(op.args[0], Ref)


class _Random(Exception):
    """Raised when an op draws random numbers."""


MISSING = object()  # in place of a value that was not saved


def _is_plain_output(value: Any) -> bool:
    kind = type(value)
    if kind in (tuple, list):
        return all(map(_is_plain_output, value))
    if kind is dict:
        return all(map(_is_plain_output, value.values()))
    if kind is slice:
        return all(map(_is_plain_output, (value.start, value.stop, value.step)))
    return kind is Ref or kind in PLAIN_TYPES or isinstance(value, type)


def _meta_at(meta: Any, parts: dict[Any, Any], path: tuple[Any, ...]) -> Any:
    if isinstance(meta, TensorMeta):
        return parts[path]
    if isinstance(meta, tuple):
        return tuple(_meta_at(item, parts, (*path, i)) for i, item in enumerate(meta))
    return meta


def _copy_value(value: Any, with_graph: bool) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested:
            return value.detach().clone()
        # Kernels can depend on it: RNN kernels do, and torch.matmul asks even under no_grad.
        graph = with_graph or (
            isinstance(value, nn.Parameter) and value.requires_grad and not value.is_inference()
        )
        graph = graph and (value.is_floating_point() or value.is_complex())
        with torch.enable_grad():
            return aligned_copy(value.detach().requires_grad_(graph))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_copy_value(item, with_graph) for item in value)
    return value


def plainly(value: Any) -> Any:
    """Return a result with detached tensors, and sizes as tuples."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return tuple(map(plainly, value))
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    return value


# The part of a tensor's text about the autograd graph, which a copy lacks (torch 2.13).
_GRAPH = re.compile(r",\s+(grad_fn=<\w+>|requires_grad=True)(?=[,)])")


def _other(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor | None:
    """Return a tensor like another one with other values; None if there is none."""
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return None
    if tensor.device.type != "cpu":
        return None
    if tensor.dtype is torch.bool:
        return ~tensor
    if tensor.is_floating_point() or tensor.is_complex():
        noise = torch.randn(tensor.shape, generator=generator) * scale
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        if tensor.dtype.itemsize > 2:
            wide = tensor.dtype
        return (tensor.detach().to(wide) + noise).to(tensor.dtype)
    return None  # an index out of range would be a different error


def flops_of(ops: list[Op]) -> dict[int, int | None]:
    """Return the floating point operations of each op of a tape; None where they are unknown."""
    # Imports a good part of torch's compiler, which warns where there is no numpy.
    from torch.utils.flop_counter import FlopCounterMode

    found: dict[int, int | None] = {}
    cache: dict[str, int | None] = {}  # loops repeat themselves
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        for op in ops:
            if op.kind is not OpKind.CALL or not any(refs_in((op.args, op.kwargs))):
                continue
            if not is_torchs_function(op.target):
                found[op.index] = None
                continue
            given = map_refs((op.args, op.kwargs), lambda ref: ops[ref.index].meta)
            key = f"{name_of(op.target)} {id(op.target)} {given!r}"
            if key not in cache:
                before = counter.get_total_flops()
                done = _carry_out(op, ops)
                cache[key] = counter.get_total_flops() - before if done else None
            found[op.index] = cache[key]
    return found


def _carry_out(op: Op, ops: list[Op]) -> bool:
    """Run an op on tensors without values; return whether that was possible."""

    def stand_in(ref: Ref) -> Any:
        meta: Any = ops[ref.index].meta
        if isinstance(meta, TensorMeta):
            return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        return meta

    try:
        args, kwargs = map_refs((op.args, op.kwargs), stand_in)
        if any(isinstance(value, Existing) for value in (*args, *kwargs.values())):
            return False
        args = tuple("meta" if isinstance(value, torch.device) else value for value in args)
        op.target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    except Exception:  # it needs values, or does not support tensors without them
        return False
    return True
