"""The op of each value: tensors by weak reference, numbers as traced scalars."""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.python.bytecode import code_compares_identity, only_tests
from bendtrace.python.internals import internal
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import place_at, user_place, users_code
from bendtrace.record.tape_writer import TapeWriter, TrackedTensor
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    attributes_of,
    is_inference,
    is_whole,
    requires_grad,
)
from bendtrace.tape.guards import (
    ClassGuard,
    LengthGuard,
    OtherGuard,
    SameGuard,
    ValueGuard,
    type_name_of,
)
from bendtrace.tape.plain_numbers import needs_plain_numbers
from bendtrace.tape.scalars import (
    TRACED,
    Origin,
    TracedBool,
    TracedFloat,
    TracedInt,
    TracedScalar,
    plain,
    put_source,
    retire,
)
from bendtrace.tape.structure import build_instance, referents
from bendtrace.tape.tape import (
    NumberMeta,
    Op,
    OpKind,
    Ref,
    Tape,
    TensorMeta,
    Use,
    meta_of,
    ref_to,
    refs_in,
    stands_for_number,
)
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import (
    GIVES_BACK,
    OPTIONAL,
    SHAPES,
    display_name,
    is_gate,
    is_inserted,
    is_loose,
    is_torchs_function,
    may_vary,
    works_on_arrays,
)
from bendtrace.watch.intercepts import is_function_apply
from bendtrace.watch.writes import storage_of, version_of, works_in_place

if TYPE_CHECKING:
    from bendtrace.python import row_loops, statements
    from bendtrace.record.accumulation import Accumulation
    from bendtrace.tape.protocols import Observer
else:
    statements = LazyModule("bendtrace.python.statements")
    row_loops = LazyModule("bendtrace.python.row_loops")

TRACED_AS: dict[type, Any] = {int: TracedInt, float: TracedFloat, bool: TracedBool}


class RunValues:
    """Identifies the values of a run by the ops that returned them.

    Args:
        writer: records the ops needed for that.
        environment: the values that the run can read.
        origin: the object that traced scalars report to.
        start: the place where the model's code begins, for messages.
        observer: sees tensors that existed before the run.

    Attributes:
        origin: as given.
        facts: those of the writer.
        gives_plain: whether the model receives plain numbers, which are guarded by value.
        is_called_by_foreign: says of code whether it runs on behalf of code that is not known to
            ask traced numbers; None as long as none has run.
        tensor_of_array: gives the tensor that stands for an array (see `arrays.py`).
        accumulation: the lists that loops append to, if they are followed.
    """

    def __init__(
        self,
        writer: TapeWriter,
        environment: Environment,
        origin: Origin,
        start: str,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer
        self.tape: Tape = writer.tape
        self.environment = environment
        self.facts: dict[tuple[int, Any], Any] = writer.facts
        self.scalars: list[TracedScalar] = []
        self._outside: list[tuple[weakref.ref[Tensor], int]] = []
        self._writer = writer
        self.origin = origin
        self._start = start
        self._elements: dict[tuple[int, Any], Ref] = {}
        self.gives_plain: bool = environment.tells_numbers
        self.is_called_by_foreign: Callable[[FrameType], bool] | None = None
        self.tensor_of_array: Callable[[Any], Tensor | None] = lambda _: None
        self.accumulation: Accumulation | None = None

    def retire(self) -> None:
        """Turn the traced scalars of the run into ordinary objects."""
        for scalar in self.scalars:
            retire(scalar)
        self.scalars.clear()
        self._outside.clear()

    def here(self) -> str:
        """Return the current place of the model, as text."""
        place = user_place(sys._getframe(1))
        return f"at {place}" if place else f"in {self._start}"

    def bind(self, out: Any, op: Op, frame: FrameType) -> Any:
        """Record the result of an op; return the value that the model receives for it."""
        if op.kind is OpKind.CALL and not is_torchs_function(op.target):
            self.facts.clear()
        if op.kind is OpKind.CALL and may_vary(op.target):
            self._writer.guard(ClassGuard, op.index, type_name_of(out), Use.RESULT, frame)
        if op.target in OPTIONAL:
            self.guard_presence(op, out is not None, frame)
        if isinstance(out, Tensor):
            tracked = self._writer.tracked.get(id(out))
            is_tracked = tracked is not None and tracked() is out
            if tracked is not None and is_tracked:
                before = tracked.ref or self.element(tracked.parent, tracked.key, out)
                self._writer.name_as(op.index, before.index)
                if not works_in_place(op):
                    # It returned a tensor that already has another name. A replay in which it does
                    # not (because a copy was needed) must not confuse the two.
                    self._guard_identity(op, op.index, before.index, frame)
            elif self._may_be_compared(op, frame) and not works_in_place(op):
                self._guard_identity(op, op.index, None, frame)
            self.bind_tensor(out, op)
            if works_on_arrays(op.target):
                self.tape.outlines[op.index] = outline_of(out)
            if op.target in OPTIONAL and self.environment.compares_identity and not is_tracked:
                self.tape.block(
                    f"{display_name(op.target)} at {user_place(frame)} may return a tensor that "
                    "the model holds, and its code tests whether two objects are one (`is`)"
                )
            return out
        if out is None:
            self.facts.clear()
            return None
        kind = type(out)
        traced = TRACED_AS.get(kind)
        if traced is not None:
            op.meta = out
            if kind is float and hasattr(op.target, "is_draw") and self._needs_plain(frame):
                if statements.is_compared(place_at(frame.f_code, frame.f_lasti)):
                    return self.scalar(traced, out, Ref(op.index))
                self.tape.block(
                    f"{display_name(op.target)} at {user_place(frame)} draws a number that code "
                    "needs by value"
                )
            return self.trace_number(traced, out, Ref(op.index), frame)
        if kind is torch.Size or (kind is tuple and op.target in SHAPES):
            op.meta = tuple(out)
            self.tape.outlines[op.index] = out
            self._writer.guard(LengthGuard, op.index, len(out), Use.METADATA, frame)
            ref = Ref(op.index)
            sizes = [self.scalar(TracedInt, size, (ref, (i,))) for i, size in enumerate(out)]
            if self._needs_plain(frame):
                return kind([self.origin.consume(size, Use.TYPE) for size in sizes])
            return kind(sizes)
        if isinstance(out, (tuple, list, dict)):
            self.tape.outlines[op.index] = outline_of(out)
        if isinstance(out, (tuple, list)):
            if kind is tuple or kind is list:
                use = Use.ITER if frame.f_code is _ITER_CODE else Use.LENGTH
                if row_loops.goes_through(op.target, frame):
                    varying, use = getattr(self.origin, "varying", None), Use.ROWS
                    if varying is not None and (rows := varying.rows(op, out, frame)):
                        return rows
                self._writer.guard(LengthGuard, op.index, len(out), use, frame)
            if self._varies_inside(op):
                self._guard_structure(out, op, frame)
            bound, op.meta = self._bind_elements(out, Ref(op.index), (), frame, is_gate(op))
            return bound
        if kind is dict and not any(isinstance(item, dict) for item in out.values()):
            keys = self._writer.emit(OpKind.SCALAR, tuple, (Ref(op.index),), {}, frame)
            keys.meta = tuple(out)
            self._writer.guard(ValueGuard, keys.index, keys.meta, Use.METADATA, frame)
            if self._varies_inside(op):
                self._guard_structure(out, op, frame)
            bound, op.meta = self._bind_elements(out, Ref(op.index), (), frame)
            return bound
        op.meta = out
        if out is torch.default_generator:  # what seeding returns
            return out
        if kind in PLAIN_TYPES or is_whole(kind):
            self._writer.guard(ValueGuard, op.index, out, Use.METADATA, frame)
        else:
            self.tape.block(
                f"{display_name(op.target)} at {user_place(frame)} returns a {kind.__qualname__}, "
                "which cannot be followed"
            )
        return out

    def _guard_identity(self, op: Op, index: int, same: int | None, frame: FrameType) -> None:
        """Guard which of the tensors that an op was given its result is, or an element of it.

        Each question is asked in the same way whatever the answer.

        Args:
            op: the op.
            index: the op that gives the result, or the element.
            same: the op that gave that tensor before; None if it is a new one.
            frame: the code that receives it.
        """
        aliases = self._writer.aliases
        if self._may_be_compared(op, frame):
            for ref in refs_in((op.args, op.kwargs)):
                if same is not None and aliases.get(ref.index, ref.index) == aliases.get(
                    same, same
                ):
                    same = ref.index
                    break
                if isinstance(self.tape.ops[ref.index].meta, TensorMeta):
                    self._writer.guard(OtherGuard, index, False, Use.RESULT, frame, ref.index)
        if same is not None:
            self._writer.guard(SameGuard, index, True, Use.RESULT, frame, same)

    def _may_be_compared(self, op: Op, frame: FrameType) -> bool:
        """Return whether it matters whether the result of an op is what the op was given.

        Code may test it. What is inserted, or is the user's own, may give back its value in one
        call and not in the next.
        """
        if works_on_arrays(op.target):
            return False
        is_getter = isinstance(op.target, types.MethodWrapperType)
        if not (is_getter or is_torchs_function(op.target) or is_function_apply(op.target)):
            return True
        if op.target in GIVES_BACK and self.environment.compares_identity:
            return True
        return code_compares_identity(users_code(frame))

    @staticmethod
    def _varies_inside(op: Op) -> bool:
        """Return whether the containers that an op returns may hold something else each time."""
        if is_gate(op):
            return False
        if works_on_arrays(op.target):
            return may_vary(op.target)
        return not is_torchs_function(op.target) or is_loose(op.target)

    def _guard_structure(self, out: Any, op: Op, frame: FrameType) -> None:
        """Guard everything but tensors and numbers in the result of a function not of torch."""
        try:
            structure = structure_of(out)
        except TypeError as error:
            self.tape.block(f"{display_name(op.target)} at {user_place(frame)} returns {error}")
            return
        looked = self._writer.emit(OpKind.SCALAR, structure_of, (Ref(op.index),), {}, frame)
        looked.meta = structure
        self._writer.guard(ValueGuard, looked.index, structure, Use.RESULT, frame)

    def guard_ownership(self, tensor: Tensor, frame: FrameType) -> None:
        """Guard that an insertion has returned no tensor that the model could compare it to."""
        if not self.environment.compares_identity:
            return
        script, owns = self._writer.script, self.environment.ownership_test
        found = None
        if script is not None and script.is_active:
            found = script.next_by(owns)
        if found is not None:
            # What was returned before was none that the model has; this one may be.
            result, (index, *before) = found
        else:
            tracked = self._writer.tracked.get(id(tensor))
            if tracked is None or tracked.ref is None:
                return
            op = self.tape.ops[tracked.ref.index]
            if op.index in self.tape.aliases or not is_inserted(op):  # guarded already
                return
            result, index = owns(tensor), op.index
            # The model can compare it to nothing that is gone.
            alive = {
                one.ref.index
                for one in self._writer.tracked.values()
                if one() is not None and one.ref
            }
            if script is not None:
                alive -= script.dead.keys()
            before = [
                one.index
                for one in self.tape.ops[:index]
                if (one.kind is OpKind.INPUT or is_gate(one))
                and isinstance(one.meta, TensorMeta)
                and one.index in alive
            ]
        looked = self._writer.emit(
            OpKind.SCALAR, owns, tuple(map(Ref, (index, *before))), {}, frame
        )
        looked.meta = result
        self._writer.guard(ValueGuard, looked.index, looked.meta, Use.RESULT, frame)
        if looked.meta:
            self.tape.block(
                f"what is inserted at {user_place(frame)} returns a tensor that the model holds, "
                "and its code tests whether two objects are one (`is`)"
            )

    def bind_tensor(self, tensor: Tensor, op: Op) -> TrackedTensor:
        """Record that an op returned a tensor."""
        tracked = self._writer.tracked[id(tensor)] = TrackedTensor(tensor)
        tracked.ref = ref_to(op.index)
        tracked.version = version_of(tensor)
        tracked.graphless = (
            op.kind is OpKind.CALL and not op.context.grad and not requires_grad(tensor)
        )
        op.meta = meta_of(tensor)
        if op.kind is OpKind.INPUT or op.kind is OpKind.STATE:
            self._outside.append((tracked, tracked.version))
        elif type(tensor) is not Tensor:
            self.tape.classes[op.index] = type(tensor)
        return tracked

    def writes_outside(self) -> bool:
        """Return whether the run has written to tensors that existed before it."""
        ops = self.tape.ops
        for op in ops:
            if op.writes and any(ops[i].kind in (OpKind.INPUT, OpKind.STATE) for i in op.writes):
                return True
        in_place = any(op.kind is OpKind.CALL and works_in_place(op) for op in ops)
        for foreign, version in self._outside:
            tensor = foreign()
            if tensor is None or version_of(tensor) != version:
                return True
            if in_place and (is_inference(tensor) or storage_of(tensor) == 0):
                return True  # torch does not count writes to it
        return False

    def trace_number(
        self, kind: Any, value: Any, source: Any, frame: FrameType, depth: int = 0
    ) -> Any:
        """Return a traced scalar, or a guarded plain one for code that could tell the difference.

        Args:
            kind: the type of the traced scalar.
            value: the number.
            source: the op that returns it, or an element of one.
            frame: the code that receives it.
            depth: the number of nested lists around it.
        """
        scalar = self.scalar(kind, value, source)
        if kind is TracedInt and self._is_too_large(scalar):
            return self.origin.consume(scalar, Use.TYPE)
        if kind is TracedBool:
            if code_compares_identity(frame.f_code):
                return self.origin.consume(scalar, Use.TYPE)
            if not only_tests(frame, depth):
                return self.origin.consume(scalar, Use.BOOL)
        return self.origin.consume(scalar, Use.TYPE) if self._needs_plain(frame) else scalar

    def _is_too_large(self, scalar: Any) -> bool:
        """Return whether a number is plain since torch has none like it, and C asks it otherwise.

        A run that follows a script has the numbers of another call, and asks for what this asked
        for.
        """
        script = self._writer.script
        if script is None or not script.is_active:
            return not -_LARGEST <= scalar._value < _LARGEST
        return script.asks_next(Use.TYPE, lambda: self.scalar_ref(scalar).index)

    def _needs_plain(self, frame: FrameType) -> bool:
        """Return whether code may pass a number that it receives to code not known to ask it."""
        return (
            self.gives_plain
            or needs_plain_numbers(frame.f_code, frame.f_globals)
            or (self.is_called_by_foreign is not None and self.is_called_by_foreign(frame))
        )

    def trace_list(self, value: Any, ref: Ref, frame: FrameType, depth: int = 0) -> Any:
        """Return a nested list of numbers, guarded in length, with traced scalars for the numbers.

        Args:
            value: the list, or a number in it.
            ref: its op.
            frame: the code that receives it.
            depth: the number of nested lists around it.
        """
        if type(value) is complex:
            self._writer.guard(ValueGuard, ref.index, value, Use.LIST, frame)
            return value
        if type(value) is not list:
            return self.trace_number(TRACED_AS[type(value)], value, ref, frame, depth)
        self._writer.guard(LengthGuard, ref.index, len(value), Use.LENGTH, frame)
        return [
            self.trace_list(item, self.element(ref, (i,), item), frame, depth + 1)
            for i, item in enumerate(value)
        ]

    def scalar(self, kind: Any, value: Any, source: Any) -> Any:
        """Return a traced scalar of some kind; `source` is its op, or an element of one."""
        scalar = kind(value, self.origin, source)
        self.scalars.append(scalar)
        return scalar

    def existing_ref(self, tensor: Tensor) -> Ref | None:
        """Return the value number of a tensor if it has one already, and has no attributes set."""
        tracked = self._writer.tracked.get(id(tensor))
        if tracked is None or tracked() is not tensor or tensor.__dict__:
            return None
        return tracked.ref

    def source_of(self, tensor: Tensor) -> int | tuple[int, tuple[Any, ...]] | None:
        """Return the op of a tensor, or its element of an op; None if unknown."""
        tracked = self._writer.tracked.get(id(tensor))
        if tracked is None or tracked() is not tensor:
            return None
        return (tracked.parent.index, tracked.key) if tracked.ref is None else tracked.ref.index

    def producer_of(self, tensor: Tensor) -> int | None:
        """Return the op that made a tensor; None if it was there before the run, or is unknown."""
        source = self.source_of(tensor)
        if source is None:
            return None
        index = source[0] if isinstance(source, tuple) else source
        return None if self.tape.ops[index].is_given else index

    def ref(self, tensor: Tensor) -> Ref:
        """Return the value number of a tensor."""
        tracked = self._writer.tracked.get(id(tensor))
        if tracked is not None and tracked() is tensor:
            if tracked.ref is None:
                tracked.ref = self.element(tracked.parent, tracked.key, tensor)
            if self._writer.script is not None:
                self._writer.require_alive((tracked.ref.index,))
            if tracked.graphless and requires_grad(tensor):
                self._look_at_graph(tracked, tensor)
            self._writer.writes.receive(tracked.ref, tensor, tracked.version)
            return tracked.ref
        part = self.environment.find(tensor) or self.environment.find_cached(tensor)
        if part is not None:
            op = self._writer.emit(OpKind.STATE, part, (), {}, None)
            if requires_grad(tensor):
                self.tape.trainable.add(op.index)
        else:
            op = self._writer.emit(OpKind.UNKNOWN, None, (), {}, None)
            place = user_place(sys._getframe(1))
            use = f"is used at {place}" if place else f"is returned by {self._start}"
            self.tape.block(
                f"a tensor of unknown origin {use}: it was created by something that torch "
                "does not let a tracer see, or kept in a cache (wrap its creator with "
                "bendtrace.opaque)"
            )
        if self._observer is not None:
            self._observer.state(op, tensor)
        tracked = self.bind_tensor(tensor, op)
        self._writer.writes.note_existing(tensor)
        self._writer.writes.receive(ref_to(op.index), tensor, tracked.version)
        return ref_to(op.index)

    def scalar_ref(self, scalar: TracedScalar) -> Ref:
        """Return the value number of a traced scalar of this run."""
        source = scalar._source
        if type(source) is not Ref:
            parent, path = source
            source = self.element(parent, path, scalar)
            put_source(scalar, source)
        if self._writer.script is not None:
            self._writer.require_alive((source.index,))
        return source

    def is_dead(self, scalar: TracedScalar) -> bool:
        """Return whether a resumed run has no value for a number, since no code reads it any more.

        It has none where the state from which the run goes on does not reach the number.
        """
        script, source = self._writer.script, scalar._source
        if script is None or script.is_active or scalar._origin is not self.origin:
            return False
        ref = source if type(source) is Ref else source[0]
        return ref.index in script.dead

    def holds_values(self, thing: Any, seen: set[int]) -> bool:
        """Return whether a function called as one op holds values that this run computed."""
        if type(thing) in TRACED:
            return True
        if isinstance(thing, Tensor):
            tracked = self._writer.tracked.get(id(thing))
            if tracked is None or tracked() is not thing:
                return False
            return tracked.ref is None or self.tape.ops[tracked.ref.index].kind is not OpKind.STATE
        if id(thing) in seen:
            return False
        seen.add(id(thing))
        return any(self.holds_values(referent, seen) for referent in referents(thing))

    def guard_presence(self, op: Op, is_present: bool, frame: FrameType) -> None:
        """Guard whether a tensor has a gradient, a base, or a gradient function."""
        test = self._writer.emit(OpKind.SCALAR, operator.is_, (Ref(op.index), None), {}, frame)
        test.meta = not is_present
        self._writer.guard(ValueGuard, test.index, test.meta, Use.METADATA, frame)

    def _bind_elements(
        self, out: Any, ref: Ref, path: tuple[Any, ...], frame: FrameType, at_once: bool = False
    ) -> tuple[Any, Any]:
        """Bind the content of a result; its elements get ops only once they are used.

        Elements of gates get theirs immediately: the same gate may give other tensors in one call,
        and the tensors that it was given in the next.
        """
        bound, metas, changed = [], [], False
        kind = type(out)
        for i, item in out.items() if kind is dict else enumerate(out):
            meta = item
            if isinstance(item, Tensor):
                meta = meta_of(item)
                before = self._writer.tracked.get(id(item))
                if before is not None and before() is item:
                    first = before.ref or self.element(before.parent, before.key, item)
                    element = self.element(ref, (*path, i), item)
                    self._writer.name_as(element.index, first.index)
                    op = self.tape.ops[ref.index]
                    self._guard_identity(op, element.index, first.index, frame)
                    # Its version does not say so: a run by script writes nothing.
                    if works_in_place(op) and not is_gate(op):
                        self.bind_tensor(item, self.tape.ops[element.index])
                else:
                    tracked = self._writer.tracked[id(item)] = TrackedTensor(item)
                    tracked.ref, tracked.parent, tracked.key = None, ref, (*path, i)
                    tracked.graphless = False
                    tracked.version = version_of(item)
                    if at_once:
                        tracked.ref = element = self.element(ref, (*path, i), item)
                        op = self.tape.ops[ref.index]
                        self._guard_identity(op, element.index, None, frame)
            elif type(item) in TRACED_AS:
                source = (ref, (*path, i))
                item = self.trace_number(TRACED_AS[type(item)], item, source, frame, 1 + len(path))
            elif isinstance(item, (tuple, list)):
                item, meta = self._bind_elements(item, ref, (*path, i), frame)
            changed = changed or item is not out[i]
            bound.append(item)
            metas.append(meta)
        if not changed:
            return out, tuple(metas)
        if kind is dict:
            return dict(zip(out, bound, strict=True)), tuple(metas)
        if kind not in (tuple, list):
            return build_instance(kind, bound, attributes_of(out)), tuple(metas)
        return kind(bound), tuple(metas)

    def exchange(self, old: Tensor, new: Tensor, ref: Ref) -> bool:
        """Let a tensor take the place of another; return False if it has its own name."""
        tracked = self._writer.tracked
        before = tracked.get(id(new))
        if new is old:
            assert before is not None
            before.version = version_of(new)  # it may have been changed in place
            return True
        if (before is not None and before() is new) or self.environment.find(new) is not None:
            return False
        was = tracked.pop(id(old), None)
        now = tracked[id(new)] = TrackedTensor(new)
        now.ref, now.version = ref, version_of(new)
        now.graphless = was is not None and was.graphless and not new.requires_grad
        return True

    def element(self, ref: Ref, path: tuple[Any, ...], value: Any) -> Ref:
        """Return the op that takes an element out of a result; it is emitted on first use."""
        for depth, key in enumerate(path):
            cached = self._elements.get((ref.index, key))
            if cached is None:
                op = self._writer.emit(OpKind.SCALAR, operator.getitem, (ref, key), {}, None)
                parent = self.tape.ops[ref.index]
                op.scope, op.site, op.context = parent.scope, parent.site, parent.context
                if depth == len(path) - 1:
                    op.meta = plain(value)
                    if isinstance(value, Tensor):
                        op.meta = meta_of(value)
                cached = self._elements[ref.index, key] = Ref(op.index)
            ref = cached
        return ref

    def _look_at_graph(self, tracked: TrackedTensor, tensor: Tensor) -> None:
        """Block a tensor that requires grad by now, if an op under no_grad returned it.

        A later op may have written into it what requires grad.
        """
        tracked.graphless = False
        if self._writer.writes.may_differentiate(tensor):
            return
        if self.tape.blockers:  # the known reason is more specific
            return
        self.tape.block(
            f"a tensor used {self.here()} got its gradient function from code that torch does not "
            "let a tracer see (a C++ extension?)"
        )


_LARGEST = 1 << 63


def outline_of(value: Any) -> Any:
    """Return a result with the descriptions of its tensors in place of these."""
    kind = type(value)
    if isinstance(value, Tensor):
        return NumberMeta(meta_of(value)) if stands_for_number(value) else meta_of(value)
    if isinstance(value, (tuple, list)):
        items = [outline_of(item) for item in value]
        return kind(items) if kind in (tuple, list) else build_instance(kind, items, {})
    if kind is dict:
        return {key: outline_of(item) for key, item in value.items()}
    return value


def structure_of(value: Any) -> tuple[Any, ...]:
    """Return a result without its tensors and numbers, which are separate values.

    Raises:
        TypeError: a part of it cannot be followed.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return (Tensor,)
    if kind in TRACED_AS or kind in TRACED:
        return (kind if kind in TRACED_AS else type(plain(value)),)
    if isinstance(value, (tuple, list)):
        return (kind, *map(structure_of, value))
    if kind is dict:
        return (kind, tuple(value), *map(structure_of, value.values()))
    if kind in PLAIN_TYPES:
        return kind, value
    raise TypeError(f"a {kind.__qualname__} inside a container, which cannot be followed")


_ITER_CODE: Any = internal("torch.Tensor.__iter__.__code__", None)
# The first character of what stands for a value in a text (see `texts.py`).
MARK = "\ue0b7"
# What a result is looked at with before the model receives it.
LOOKS: frozenset[Any] = frozenset({operator.is_, tuple, structure_of})
