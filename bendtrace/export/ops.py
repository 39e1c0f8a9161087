"""Writing the ops of a segment, with the numbers among their arguments as tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.engine.compile_probing import why_not_op
from bendtrace.engine.compiled_path import Expressions, wide_dtype
from bendtrace.engine.guard_kinds import NumberOrigin
from bendtrace.engine.schedule import Schedule
from bendtrace.engine.source import INFIX, gives_nothing
from bendtrace.errors import ExportError
from bendtrace.export.conditions import fact_of
from bendtrace.export.machine import (
    DTYPES,
    AnalysedRun,
    Constant,
    Numeral,
    Outdated,
    Several,
    Static,
    Tensors,
    Value,
    cite,
    gives_rows,
)
from bendtrace.record.effects import makes_anew
from bendtrace.tape.structure import Existing
from bendtrace.tape.tape import Op, OpKind, Ref, TensorMeta, argument_leaves, map_leaves, refs_in
from bendtrace.watch.functions import (
    METADATA,
    SHAPES,
    OpOverload,
    OpOverloadPacket,
    display_name,
    name_of,
)

if TYPE_CHECKING:
    from bendtrace.export.writer import ProgramWriter


class Scope:
    """A function under construction."""

    def __init__(self, depth: int) -> None:
        self.depth = depth  # 0 for `forward`, 1 for the sides of a question in it, and so on
        # Its lines, each with the op or guard that it comes from.
        self.lines: list[tuple[str, Any]] = []
        # The variable with the number of the unseen side that was taken, if there can be one.
        self.flag: str | None = None
        self.asked: list[int] = []  # the numbers of the unseen sides in it
        self.own: set[str] = set()  # the variables that it defines
        self.loops: set[str] = set()  # the arguments of the loops in it

    def add(self, text: str, record: Any = None) -> None:
        """Add a line."""
        self.lines.append((text, record))


class SegmentOps(Expressions):
    """Writes the ops of one segment, or without a schedule those of a question, into a scope."""

    def __init__(
        self, writer: ProgramWriter, scope: Scope, run: AnalysedRun, schedule: Schedule | None,
        values: dict[int, Value],
    ) -> None:  # fmt: skip
        super().__init__()
        self.names = writer.names
        self._writer, self._scope, self._run, self._schedule = writer, scope, run, schedule
        self._ops = run.recording.tape.ops
        self.values = values

    def op(self, index: int) -> Op:
        """Return an op of the run."""
        return self._ops[index]

    # Names

    def bound(self, value: Any) -> str:
        """Return a name that is bound to the value itself."""
        return self._writer.bound(value)

    def constant(self, value: Any) -> str:
        """Return an expression for a value that does not change."""
        if type(value) is str:  # in which variables could be found
            return self.bound(value)
        return super().constant(value)

    def name(self, index: int) -> str:
        """Return an expression for the value of an op, as an argument."""
        return self._text(self.value_of(index))

    def _text(self, value: Value) -> str:
        if isinstance(value, Tensors):
            return value.name
        if isinstance(value, Static):
            return value.text
        if isinstance(value, Numeral):
            return f"{value.name}.item()"
        if isinstance(value, Several):
            inner = ", ".join(map(self._text, value.items))
            return f"[{inner}]" if value.kind is list else f"({inner},)"
        assert isinstance(value, Constant), "what is outdated is refused before it is used"
        return self.constant(value.value)

    def value(self, value: Any) -> str:
        """Return an expression for recorded arguments."""
        if type(value) is _Named:
            return value.text
        if type(value) is Existing:
            return self._text(self._writer.part(value.part, None))
        return super().value(value)

    def value_of(self, index: int) -> Value:
        """Return the value of an op; compute it, if it was left out before."""
        op = self._ops[index]
        if index in self.values:
            if any(isinstance(leaf, Outdated) for leaf in argument_leaves(self.values[index])):
                raise ExportError(_USED_LATE, cite(op))
            return self.values[index]
        if op.is_given:
            found = self._writer.part(op.target, op)
            self.values[index] = found
            return found
        if self._schedule is not None and index in self._schedule.same:
            return self.value_of(self._schedule.same[index])
        is_pure = op.kind is OpKind.SCALAR or index in self._run.numbers.kinds
        if not is_pure:
            raise ExportError(
                f"{display_name(op.target)} gives something that the question before does not hold",
                cite(op),
            )
        self.emit(op)
        return self.values[index]

    def handed(self, index: int) -> Value:
        """Return the value of an op for later code, which may leave it unused."""
        return self.values[index] if index in self.values else self.value_of(index)

    # Ops

    def emit(self, op: Op) -> None:
        """Write an op."""
        reason = refusal_of(op)
        if reason is not None:
            raise ExportError(reason, cite(op))
        kind = self._run.numbers.kinds.get(op.index)
        is_size = kind is NumberOrigin.SIZE
        if op.is_element:
            self._emit_element(op)
        elif kind is NumberOrigin.STATIC or (is_size and type(op.meta) is not bool):
            self._emit_static(op, is_size)
        elif kind is not None:
            self._emit_number(op)
        else:
            self._emit_tensors(op)

    def _define(self, text: str, op: Op, prefix: str = "v") -> str:
        return self._writer.define(self._scope, prefix, text, op)

    def _emit_element(self, op: Op) -> None:
        owner = self.value_of(op.args[0].index)
        key = op.args[1]
        if isinstance(owner, Several) and type(key) is int:
            self.values[op.index] = owner.items[key]
        elif isinstance(owner, Tensors) and type(key) is int:  # a row, see `_emit_tensors`
            row = f"torch.full((1,), {key}, device={owner.name}.device)"
            name = self._define(f"{owner.name}.index_select(0, {row}).select(0, 0)", op)
            own = self._memory(op)  # the model has a view
            self._writer.picked |= own - owner.memory
            self.values[op.index] = self._unpack(name, op.meta, own | owner.memory, op)
        elif isinstance(owner, Numeral) or self._ops[op.args[0].index].target is Tensor.tolist:
            self._emit_number(op)
        else:
            raise ExportError(f"an element {key!r} of {display_name(op.target)} is used", cite(op))

    def _emit_static(self, op: Op, varies: bool) -> None:
        if (fact := fact_of(op)) is not None:
            self._writer.facts.add(fact)
        if op.kind is OpKind.CALL and type(op.meta) is tuple:
            tensor = self.value(op.args[0])
            word = "stride" if name_of(op.target) == "stride" else "size"
            items = tuple(
                Static(self._define(f"{tensor}.{word}({dim})", op, "s"), int, varies)
                for dim in range(len(op.meta))
            )
            self.values[op.index] = Several(items, (), torch.Size)
            return
        prefix = "s" if type(op.meta) is int else "k"
        text = (
            f"{self.value(op.args[0])}.size(0)"
            if name_of(op.target) == "__len__"
            else self.call(op)
        )
        name = self._define(text, op, prefix)
        self.values[op.index] = Static(name, type(op.meta), varies)

    def _emit_number(self, op: Op) -> None:
        kind = bool if op.target is Tensor.__bool__ else type(op.meta)
        if op.target is Tensor.tolist:
            self.values[op.index] = self._listed(op, op.args[0].index)
            return
        if kind is str:
            raise ExportError(
                "Python makes a text of a tensor, and an exported program has no texts: leave the "
                "text out, or compute with the tensor",
                cite(op),
            )
        if kind not in DTYPES:
            raise ExportError(
                f"{display_name(op.target)} takes something out of a tensor other than a number: "
                "keep to tensors, or to ints, floats and bools",
                cite(op),
            )
        is_call = op.kind is OpKind.CALL
        text = self._out_of(op, kind) if is_call else self._arithmetic(op)
        self.values[op.index] = Numeral(self._define(text, op, "n"), kind)

    def _listed(self, op: Op, index: int) -> Value:
        """Return a tensor as the list of its numbers."""
        tensor = self.value_of(index)
        meta = self._ops[index].meta
        if not isinstance(tensor, Tensors) or index in self._run.numbers.varying:
            raise ExportError("a list of numbers is as long as values say: keep a tensor", cite(op))
        wide = wide_dtype(meta.dtype)
        if wide is None or math.prod(meta.shape) > _LONGEST:
            raise ExportError("a long list of numbers is taken out of a tensor", cite(op))
        kind = next(k for k, dtype in DTYPES.items() if dtype is wide)
        self._scope.add(f"require(tuple({tensor.name}.shape) == {tuple(meta.shape)})", op)

        def of(shape: tuple[int, ...], at: str) -> Value:
            if not shape:
                text = f"{tensor.name}{f'[{at}]' if at else ''}.reshape(()).to({wide}, copy=True)"
                return Numeral(self._define(text, op, "n"), kind)
            items = (of(shape[1:], f"{at}, {i}" if at else str(i)) for i in range(shape[0]))
            return Several(tuple(items), (), list)

        return of(tuple(meta.shape), "")

    def _constant(self, op: Op) -> Tensor | None:
        """Return the tensor that `torch.tensor` makes of plain numbers; None for other ops."""
        if op.target is not torch.tensor or type(op.args[0]) not in (bool, int, float, list, tuple):
            return None
        options = {
            key: self._ops[item.index].meta if type(item) is Ref else item
            for key, item in op.kwargs.items()
        }
        kinds = {type(item) for item in options.values()}
        if [*refs_in(op.args)] or not kinds <= {torch.dtype, torch.device, str, type(None)}:
            return None
        for ref in refs_in(op.kwargs):
            self.value_of(ref.index)  # which notes what is asked
        constant: Tensor = torch.tensor(*op.args, **options)
        return constant

    def _gathered(self, op: Op) -> str | None:
        """Write what makes a tensor of a list of numbers out of tensors, or indexes by one."""
        is_made = op.target is torch.tensor and set(op.kwargs) <= {"dtype"}
        if not is_made and op.target not in (Tensor.__getitem__, Tensor.__setitem__):
            return None
        items = op.args[0 if is_made else 1]
        if type(items) is not list or not set(map(type, items)) <= {Ref, int, float, bool}:
            return None
        refs = {item.index for item in items if type(item) is Ref}
        tensors = {ref for ref in refs if isinstance(self.value_of(ref), Tensors)}
        if not refs or (tensors and not is_made):
            return None
        if any(self._ops[ref].meta.shape for ref in tensors) or not (
            tensors or self._numbers(items)
        ):
            return None
        dtype = op.meta.dtype if is_made else torch.int64
        numbers = (
            f"torch.full((), {self.constant(item)})"
            if type(item) is not Ref
            else self.name(item.index)
            if item.index in tensors
            else self.lifted(self.value_of(item.index), op)
            for item in items
        )
        texts = (f"torch.as_tensor({number}).to({dtype})" for number in numbers)
        text = f"torch.stack([{', '.join(texts)}])"
        if is_made:
            return text
        item = f"{self.value(op.args[0])}[{text}]"
        return f"{item} = {self._assigned(op)}" if op.target is Tensor.__setitem__ else item

    def _emit_tensors(self, op: Op) -> None:
        constant = self._constant(op)
        if constant is not None:  # torch saves no others that are made in a side or a loop (2.13)
            constant_text = self._text(self._writer.part(constant, op))
            name = self._define(f"{constant_text}.clone()", op)
            self.values[op.index] = self._unpack(name, op.meta, self._memory(op), op)
            return
        if self._run.numbers.has_varying_length(op.index) and gives_rows(op):
            self.values[op.index] = self.value_of(op.args[0].index)  # of which rows are picked
            return
        text = self._gathered(op)
        is_stored = op.target is Tensor.__setitem__
        if text is not None and not is_stored:
            name = self._define(text, op)
            self.values[op.index] = self._unpack(name, op.meta, self._memory(op), op)
            return
        is_index = (is_stored or op.target is Tensor.__getitem__) and text is None
        is_picked = is_index and any(map(self._is_index, refs_in(op.args[1])))
        if is_picked:
            text = self._indexed(op)
        elif text is None:
            args, kwargs = self._with_tensors(op)
            if is_stored:
                args = (*args[:2], _Named(self._assigned(op)))
            text = self.call(_op_with(op, args, kwargs))
        if is_stored:
            self._scope.add(text, op)
            self._outdate(op)
            return
        name = self._define(text, op)
        memory = self._memory(op)
        self._outdate(op)
        if is_picked:
            self._writer.picked |= memory - _memory_of(self.value_of(op.args[0].index))
        if op.writes and isinstance(op.meta, TensorMeta):
            first = op.args[0] if op.args else None
            if type(first) is Ref and first.index in op.writes:  # it gives that very tensor back
                owner = self.value_of(first.index)
                if isinstance(owner, Tensors):
                    self.values[op.index] = owner
                    return
        self.values[op.index] = self._unpack(name, op.meta, memory, op)

    def _unpack(self, name: str, meta: Any, memory: frozenset[int], op: Op) -> Value:
        if isinstance(meta, TensorMeta):
            self._writer.memory_of[name] = memory
            return Tensors(name, memory)
        if type(meta) is tuple:
            items = []
            for place, item in enumerate(meta):
                inner = self._define(f"{name}[{place}]", op)
                items.append(self._unpack(inner, item, memory, op))
            return Several(tuple(items))
        if meta is None:
            return Constant(None)
        raise ExportError(
            f"{display_name(op.target)} does not return a tensor: leave the question out", cite(op)
        )

    def _memory(self, op: Op) -> frozenset[int]:
        """Return the numbers of the memory that the result of an op may have."""
        own = self._writer.memory()
        if makes_anew(op.target) or name_of(op.target) in _ANEW or gives_nothing(op):
            return own
        for index in op.operands:
            for leaf in argument_leaves(self.value_of(index)):
                if isinstance(leaf, Tensors):
                    own |= leaf.memory
        return own

    def _outdate(self, op: Op) -> None:
        """Forget the copies of what an op writes to, which are views in the model."""
        written_to = op.writes
        if written_to and name_of(op.target).endswith("_") and type(op.args[0]) is Ref:
            written_to = (op.args[0].index,)  # not its views among the other arguments
        copied = self._writer.picked
        for target in written_to if copied else ():
            written = _memory_of(self.value_of(target))
            if written & copied and not _is_stored_back(op, self._ops):
                raise ExportError(_WRITTEN, cite(op))

            def after(leaf: Value, written: frozenset[int] = written) -> Value:
                memory = leaf.memory if isinstance(leaf, Tensors) else frozenset()
                return Outdated() if memory & written and memory & copied - written else leaf

            for index, value in self.values.items():
                self.values[index] = map_leaves(value, after)

    # Numbers among the arguments of functions

    def _numbers(self, value: Any) -> list[int]:
        indices = (ref.index for ref in refs_in(value))
        return [index for index in indices if isinstance(self.value_of(index), Numeral)]

    def _with_tensors(self, op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an op with tensors instead of numbers, where that is equal.

        Other numbers are passed with `item`, which torch.export may refuse.
        """
        numbers = self._numbers((op.args, op.kwargs))
        if not numbers or name_of(op.target).strip("_") not in _PLAIN_ARITHMETIC:
            return op.args, op.kwargs
        metas = [
            self._ops[index].meta
            for index in op.operands
            if isinstance(self._ops[index].meta, TensorMeta) and index not in numbers
        ]
        if len(metas) != 1 or len(op.args) != 2 or op.kwargs:
            return op.args, op.kwargs
        dtype, result = metas[0].dtype, getattr(op.meta, "dtype", None)
        kinds = [self.value_of(index) for index in numbers]
        fits = dtype in (torch.float32, torch.float64) and result in (dtype, torch.bool)
        whole = all(isinstance(n, Numeral) and n.type is int for n in kinds)
        fits = fits or (dtype is torch.int64 and whole and result in (dtype, torch.bool))
        if not fits:
            return op.args, op.kwargs
        made: dict[int, Ref] = {}
        for index in numbers:
            number = self.value_of(index)
            assert isinstance(number, Numeral)
            name = self._define(f"{number.name}.to({dtype})", op)
            made[index] = _Named(name)
        args = tuple(made.get(arg.index, arg) if type(arg) is Ref else arg for arg in op.args)
        return args, {}

    def _indexed(self, op: Op) -> str:
        """Write an index with numbers in it: what `select` does, with tensors."""
        owner, key = op.args[0], op.args[1]
        keys = list(key) if type(key) is tuple else [key]
        tensor = self.value(owner)
        places = [n for n, one in enumerate(keys) if type(one) is Ref and self._is_index(one)]
        simple = all(type(k) in (int, slice) or n in places for n, k in enumerate(keys))
        bounds = [one for one in keys if type(one) is slice and self._numbers(one)]
        if not simple or bounds:
            return self.call(op)
        if op.target is Tensor.__setitem__:
            if any(type(k) is slice for k in keys):
                return self.call(op)
            indices = []
            for n, one in enumerate(keys):
                text = self._counted(tensor, n, one) if n in places else f"torch.tensor({one})"
                indices.append(f"{text}.reshape(1)")
            return f"{tensor}[{', '.join(indices)},] = {self._assigned(op)}"
        # From the last one on, so that the dimensions before keep their numbers.
        text = tensor
        for n in reversed(range(len(keys))):
            one = keys[n]
            if n in places:
                at = self._counted(tensor, n, one)
                text = f"{text}.index_select({n}, {at}.reshape(1)).select({n}, 0)"
            elif type(one) is int:
                text = f"{text}.select({n}, {one})"
            else:
                colons = ", ".join([":"] * n + [self.value(one)])
                text = f"{text}[{colons}]"
        return text

    def _assigned(self, op: Op) -> str:
        """Return an expression for the value assigned to an index."""
        text = self.value(op.args[2])
        if type(op.args[2]) in (bool, int, float):  # torch saves no constant of a side (2.13)
            text = f"{self.value(op.args[0])}.new_full((), {text})"
        return text

    def _is_index(self, ref: Ref) -> bool:
        """Return whether a value is a single index that comes out of a tensor, or is one."""
        value, meta = self.value_of(ref.index), self._ops[ref.index].meta
        if isinstance(value, Numeral):
            return value.type is int
        return (
            isinstance(value, Tensors)
            and isinstance(meta, TensorMeta)
            and meta.shape == ()
            and meta.dtype in (torch.int64, torch.int32)
        )

    def _counted(self, tensor: str, dim: int, ref: Ref) -> str:
        value = self.value_of(ref.index)
        assert isinstance(value, (Numeral, Tensors))
        name = value.name
        return f"torch.where({name} < 0, {name} + {tensor}.size({dim}), {name})"

    # Numbers as tensors

    def lift(self, value: Any, op: Op) -> str:
        """Return an expression for a number as a tensor without dimensions, or a plain number."""
        if type(value) is not Ref:
            if type(value) is int and abs(value) >= _EXACT:
                raise ExportError(f"it computes with {value}, which is too large", cite(op))
            if type(value) not in (bool, int, float):
                raise ExportError(f"a number out of a tensor meets {value!r}", cite(op))
            return self.constant(value)
        return self.lifted(self.value_of(value.index), op)

    def lifted(self, value: Value, op: Op | None) -> str:
        """Return an expression for a value that is a number."""
        if isinstance(value, Numeral):
            return value.name
        if isinstance(value, Static):
            if value.varies and value.type is int:
                return f"torch.scalar_tensor({value.text}, dtype=torch.int64)"
            return value.text
        if isinstance(value, Constant) and type(value.value) in (bool, int, float):
            return self.constant(value.value)
        raise ExportError("a tensor is used as a number", "" if op is None else cite(op))

    def _out_of(self, op: Op, kind: type) -> str:
        name, first = name_of(op.target), op.args[0] if op.args else None
        if name in ("equal", "allclose") and op.target in _COMPARED:
            given = [self.value(arg) for arg in op.args]
            given += [f"{key}={self.value(item)}" for key, item in op.kwargs.items()]
            if name == "allclose":
                return f"torch.isclose({', '.join(given)}).all()"
            one, other = (self._ops[index].meta for index in op.operands)
            if one.shape != other.shape or not self._run.numbers.varying.isdisjoint(op.operands):
                raise ExportError("tensors of different sizes are compared", cite(op))
            return f"({given[0]} == {given[1]}).all()"
        if op.target is Tensor.__contains__ and not self._numbers(op.args[1:]):
            return f"({self.value(op.args[1])} == {self.value(first)}).any()"
        if len(op.args) != 1 or type(first) is not Ref:
            raise ExportError(f"{display_name(op.target)} takes more than a tensor", cite(op))
        tensor, dtype = self.name(first.index), self._ops[first.index].meta.dtype
        if op.target is Tensor.__bool__:
            text = f"{tensor}.clone()" if dtype is torch.bool else f"({tensor} != 0)"
            return f"{text}.reshape(())"
        wide = wide_dtype(dtype)
        if op.target not in _NUMBERS or wide is None or wide is not DTYPES[kind]:
            raise ExportError(
                f"{display_name(op.target)} of a tensor of {dtype} is asked for: compute it with "
                "tensors",
                cite(op),
            )
        return f"{tensor}.reshape(()).to({wide}, copy=True)"

    def _type(self, value: Any) -> type:
        if type(value) is not Ref:
            return type(value)
        found = self.value_of(value.index)
        return found.type if isinstance(found, (Numeral, Static)) else object

    def _arithmetic(self, op: Op) -> str:
        target, infix = op.target, INFIX.get(op.target)
        kinds = [self._type(arg) for arg in op.args]
        given = [self.lift(arg, op) for arg in op.args]
        if all(not isinstance(self.value_of(r.index), Numeral) for r in refs_in(op.args)):
            given[0] = f"torch.as_tensor({given[0]})"
        if target in _COMPARISONS:
            if {int, float} <= set(kinds):
                self._bound(op, kinds)
            return f"({given[0]} {infix} {given[1]})"
        if target in (operator.neg, operator.pos, operator.abs, abs) and kinds != [bool]:
            self._bound(op, kinds)
            return f"torch.{_UNARY[target]}({given[0]})"
        if target in (operator.add, operator.sub, operator.mul) and set(kinds) <= {int, float}:
            self._bound(op, kinds)  # an int that meets a float is exact as a float then
            return f"({given[0]} {infix} {given[1]})"
        if target is operator.truediv and set(kinds) <= {int, float}:
            self._bound(op, kinds)
            self._nonzero(op, given[1])
            whole = kinds[0] is int and kinds[1] is int
            left = f"torch.as_tensor({given[0]}).to(torch.float64)" if whole else given[0]
            return f"({left} / {given[1]})"
        if target in (operator.floordiv, operator.mod) and kinds == [int, int]:
            self._bound(op, kinds)
            self._nonzero(op, given[1])
            if type(op.args[0]) is int:  # which ONNX takes as a tensor only (torch 2.13)
                given[0] = f"torch.full((), {given[0]}, dtype=torch.int64)"
            if target is operator.mod:
                return f"torch.remainder({given[0]}, {given[1]})"
            return f'torch.div({given[0]}, {given[1]}, rounding_mode="floor")'
        if target in (operator.and_, operator.or_, operator.xor) and kinds == [bool, bool]:
            return f"({given[0]} {infix} {given[1]})"
        raise ExportError(
            f"{display_name(target)} of numbers out of tensors is computed in Python: compute it "
            "with tensors",
            cite(op),
        )

    def _bound(self, op: Op, kinds: list[type]) -> None:
        """Assert that integers are small enough to be neither rounded nor to overflow."""
        for argument, kind in zip(op.args, kinds, strict=True):
            if kind is int and type(argument) is Ref:
                number = self.value_of(argument.index)
                if isinstance(number, Numeral):
                    name = number.name
                    within = f"(({name} < {_SMALL}) & ({name} > -{_SMALL}))"
                    self._writer.demand(
                        self._scope, within, f"an integer in {cite(op)} is too large"
                    )

    def _nonzero(self, op: Op, text: str) -> None:
        if type(op.args[1]) is Ref:
            self._writer.demand(
                self._scope, f"torch.as_tensor({text} != 0)", f"division by zero in {cite(op)}"
            )


class _Named(Ref):
    """A variable that stands for its value."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        super().__init__(-1)
        self.text = text


def _op_with(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
    if args is op.args:
        return op
    made = Op(op.index, op.kind, op.target, args, kwargs, op.scope, op.site, op.context)
    made.meta = op.meta
    return made


def refusal_of(op: Op) -> str | None:
    """Return why an op has no place in a program, and what to do; None if it has one."""
    if op.kind is OpKind.CALL and isinstance(op.target, _OPERATORS):
        return None
    if op.target in SHAPES or op.target in METADATA:
        return None  # it cannot raise an error that the model may have a handler for
    name = name_of(op.target)
    if name == "_nested_tensor_from_mask_left_aligned":
        return (
            "nn.TransformerEncoder leaves out what the mask hides, by a nested tensor: construct "
            "it with enable_nested_tensor=False"
        )
    if name in _RECURRENT and len(op.args) > 3 and isinstance(op.args[3], (list, tuple)):
        return (
            "torch.export takes no RNN over a packed sequence: run it over the padded one, and "
            "mask what it returns"
        )
    reason = why_not_op(op, op.context)
    if reason is not None and "random" in reason and name.endswith(_STEADY):
        reason = None
    if reason is None and not op.context.is_usual:
        reason = f"{name} runs under autocast, in inference mode or under other settings"
    if reason is None:
        return None
    hints = (advice for words, advice in _ADVICE.items() if words in reason)
    return f"{reason}: {next(hints, 'leave it out of the model for the export')}"


_ADVICE = {
    "is called with": "call it with tensors and plain numbers; what never changes can be a buffer",
    "random": "call eval(), or pass random numbers as an input",
    "not torch's": "register it as an operator with torch.library.custom_op",
    "handler": "test for the case before, instead of catching the error",
    "raised": "test for the case before, instead of catching the error",
    "autocast": "convert the model with to(dtype), and export it without autocast",
    "constructor": "call a function such as torch.zeros instead",
    "statistics": "call eval()",
    "is asked for": "leave the question out, as its answer is the same for all inputs",
}
# Without dropout, though torch's schemas do not say so.
_STEADY = ("_cell", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
_OPERATORS = (OpOverload, OpOverloadPacket)
_ANEW = frozenset({"softmax", "log_softmax", "norm", "embedding", "cosine_similarity", "where"})
_EXACT, _SMALL = 1 << 53, 1 << 31
_LONGEST = 64
_COMPARED = frozenset({torch.equal, Tensor.equal, torch.allclose, Tensor.allclose})
_NUMBERS = frozenset({Tensor.item, Tensor.__int__, Tensor.__index__, Tensor.__float__})
_COMPARISONS = frozenset(
    {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)
_UNARY: dict[Any, str] = {
    operator.neg: "neg", operator.pos: "positive", operator.abs: "abs", abs: "abs",
}  # fmt: skip
# Of a tensor and a number, which is the same with a tensor without dimensions.
_PLAIN_ARITHMETIC = frozenset(
    {
        "add", "sub", "mul", "div", "truediv", "true_divide", "radd", "rsub", "rmul", "rtruediv",
        "eq", "ne", "lt", "le", "gt", "ge", "multiply", "subtract", "divide", "iadd", "isub",
        "imul", "itruediv", "rdiv", "idiv",
    }
)  # fmt: skip


# Copies in the place of views: what an index that comes out of a tensor picks.
#
# In the model, `x[n]` is a view of `x`. In a program it is a copy, as its index is a tensor.
# Nothing tells them apart until one of them is written to in place.

_USED_LATE = (
    "what this index out of a tensor picks is used after that tensor is written to: copy it with "
    "clone()"
)
_WRITTEN = (
    "it writes in place to what an index out of a tensor picks: compute a new value, and assign "
    "it to that index"
)


def _memory_of(value: Value) -> frozenset[int]:
    """Return the numbers of the memory that tensors in a value may have."""
    return frozenset().union(
        *(one.memory for one in argument_leaves(value) if isinstance(one, Tensors))
    )


def _is_stored_back(op: Op, ops: Sequence[Op]) -> bool:
    """Return whether an in-place op belongs to an augmented assignment, such as `x[n] += 1`."""
    taken, after = op.args[0] if op.args else None, ops[op.index + 1 : op.index + 2]
    if type(taken) is not Ref or not after or after[0].target is not Tensor.__setitem__:
        return False
    read, store = ops[taken.index], after[0]
    return (
        read.target is Tensor.__getitem__
        and repr(read.args[:2]) == repr(store.args[:2])
        and store.args[2] in (Ref(op.index), Ref(taken.index))
    )
