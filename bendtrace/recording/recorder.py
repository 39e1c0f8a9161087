"""The recorder: runs a model on real inputs under a function mode and fills a tape."""

from __future__ import annotations

import copy
import functools
import operator
import os
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode

from bendtrace.errors import NondeterminismError
from bendtrace.recording import scalars
from bendtrace.recording.boundaries import BOUNDARY_CODES, watching
from bendtrace.recording.contexts import AutocastHold, current_context
from bendtrace.recording.encoding import Encoder, make_keys_plain, without_traced
from bendtrace.recording.functions import (
    CONTEXT,
    DESCEND,
    ESCAPES,
    METADATA,
    SHAPES,
    VALUES,
    entered,
    is_torchs_function,
    name_of,
)
from bendtrace.recording.handlers import raised_by
from bendtrace.recording.objects import held_by, holds_any
from bendtrace.recording.parts import PLAIN_TYPES, Access, Change, Part, PartKind, requires_grad
from bendtrace.recording.reach import names_in, reach_of
from bendtrace.recording.scalars import (
    TRACED,
    TracedBool,
    TracedFloat,
    TracedInt,
    TracedScalar,
    plain,
    retire,
)
from bendtrace.recording.sites import Site, SiteTable
from bendtrace.recording.structure import Existing, Made
from bendtrace.recording.surroundings import Surroundings
from bendtrace.recording.tape import (
    Guard,
    ModuleCall,
    Op,
    OpKind,
    Ref,
    Tape,
    TensorMeta,
    Test,
    map_refs,
    meta_of,
    refs_in,
)
from bendtrace.recording.usage import compares_identity, needs_plain_numbers, only_tests
from bendtrace.recording.watcher import current_watcher, unwatched

__all__ = ["Prefix", "Recorder", "Recording"]

_TRACED_AS = {int: TracedInt, float: TracedFloat, bool: TracedBool}
_SCALARS_FILE = scalars.__file__
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Longer results of `tolist` are guarded as a whole, not turned into traced scalars.
_LONG_LIST = 256


class Prefix:
    """The part of a run that was replayed before it diverged.

    Attributes:
        ops: the tape up to the divergence.
        values: what the replay computed, by op; ops without a value are carried out.
        errors: what ops raised in the replay.
        hold: on autocast's cache, until the run is past the prefix.
    """

    __slots__ = ("errors", "hold", "ops", "values")

    def __init__(
        self,
        ops: list[Op],
        values: dict[int, Any],
        errors: dict[int, Exception],
        hold: AutocastHold,
    ) -> None:
        self.ops = ops
        self.values = values
        self.errors = errors
        self.hold = hold


class Recording:
    """What a finished run leaves.

    Attributes:
        tape: the records.
        surroundings: what the run could read.
        root: the outermost scope; its `output` is the encoded output.
        changes: what the run changed in its surroundings, values encoded.
        result: what the model returned, free of traced scalars.
        is_transient: whether a next run with the same inputs would do something else, in a way
            that no guard notices: by then a cache is filled.
    """

    __slots__ = ("changes", "is_transient", "result", "root", "surroundings", "tape")

    def __init__(self, tape: Tape, surroundings: Surroundings, root: ModuleCall) -> None:
        self.tape = tape
        self.surroundings = surroundings
        self.root = root
        self.changes: list[Change] = []
        self.is_transient = False
        self.result: Any = None


class _Known(weakref.ref[Tensor]):
    """A tensor on the tape: which value it is. Weak, so that tracing keeps nothing alive."""

    __slots__ = ("graphless", "key", "parent", "ref")
    ref: Ref | None  # None while it is an element of a result that nobody used yet
    parent: Ref
    key: tuple[Any, ...]
    graphless: bool  # computed while grad mode was off, so that it cannot require grad


class Recorder(TorchFunctionMode):
    """Writes down one run.

    Args:
        surroundings: what the run can read.
        prefix: for a resumed run, what was carried out already.
    """

    def __init__(self, surroundings: Surroundings, prefix: Prefix | None = None) -> None:
        super().__init__()
        self.active = False
        self.tape = Tape(blockers=list(surroundings.blockers))
        self.surroundings = surroundings
        self._prefix = prefix
        self._arguments = tuple(p.value for p in surroundings.parts if p.access is Access.ROOT)
        self._resumed = 0 if prefix is None else len(prefix.ops)
        self._known: dict[int, _Known] = {}
        self._sites = SiteTable(BOUNDARY_CODES | {Recorder.run.__code__})
        self._calls_of: dict[int, int] = {}
        self._elements: dict[tuple[int, Any], Ref] = {}
        self._scalars: list[TracedScalar] = []
        self._facts: set[tuple[int, Any]] = set()
        self._aliases: dict[int, int] = {}  # ops that gave a tensor another op had given first
        self._root = ModuleCall("", None, 0, None, 0)
        self._scope = self._root
        self._encoder = Encoder(self)
        self._plain_numbers = surroundings.tells_numbers
        self._dtype = torch.get_default_dtype()
        self._within = False  # an op that the mode is not switched off for
        self._gone_astray: NondeterminismError | None = None

    # The run

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Recording:
        """Call `function` on the (traced) arguments and return what was recorded.

        Raises:
            Exception: whatever the function raises, as it is.
        """
        before = _python_random_states()
        seeds = self._seeds()
        self._start = _definition(function)
        self._entry = current_context(), torch.get_default_dtype()
        if any(getattr(_module, f"_global_{name}") for name in _GLOBAL_HOOKS):
            self._block("hooks are registered for all modules")
        self.active = True
        try:
            with watching(self), self:
                output = function(*args, **kwargs)
            return self._finish(output, before, seeds)
        except BaseException:
            self.active = False
            self._clean(list(self.surroundings.changes()))
            raise
        finally:
            self.active = False
            for scalar in self._scalars:
                retire(scalar)
            self._scalars.clear()
            if self._prefix is not None:
                self._prefix.hold.release()
            # A cycle of recorder and encoder must not keep what the caller gave alive.
            self._arguments, self._prefix = (), None

    def _block(self, reason: str, *names: str) -> None:
        """Note why the run must not be replayed, and where the model uses one of the names."""
        named = filter(None, map(self.surroundings.place_of, names))
        place = next(named, self._start)
        self.tape.block(f"{reason} (see {place})" if place else reason)

    def _seeds(self) -> list[int]:
        """The seeds of the generators that the run knows; reseeding one is not always seen."""
        parts = self.surroundings.parts
        known = [part.value for part in parts if part.type is torch.Generator]
        return [torch.initial_seed(), *(g.initial_seed() for g in known if g is not None)]

    def _finish(self, output: Any, random_states: tuple[Any, ...], seeds: list[int]) -> Recording:
        if self.tape.calls and self.tape.calls[0].path == "":
            self._root = self.tape.calls[0]
        recording = Recording(self.tape, self.surroundings, self._root)
        # The run may be the first to import numpy.
        now = zip(_python_random_states(), random_states, strict=False)
        if any(state != before for state, before in now):
            self._block("the run draws from Python's or numpy's random generator", *_RANDOM)
        if self._seeds() != seeds and not any(
            getattr(op.target, "__name__", "") == "manual_seed" for op in self.tape.ops
        ):
            self._block("the run seeds torch's random generator unseen")
        if (current_context(), torch.get_default_dtype()) != self._entry:
            self._block("the run leaves grad mode, autocast or the default dtype changed")
        changes = list(self.surroundings.changes())
        for reason in self.surroundings.blockers:
            self.tape.block(reason)
        for reason, cache in self.surroundings.filled_caches():
            # What a function computes in Python alone is the same when it comes from the cache.
            if self._has_ops_of(cache.__wrapped__):
                self.tape.block(reason)
                recording.is_transient = True
            if holds_any(cache, TRACED):  # which nobody may meet after the run
                cache.cache_clear()
        memo: dict[int, Any] = {}
        for change in changes:
            change.key = without_traced(change.key)
            encoded = self._encoder.output(
                change.value, f"what is assigned to {change.label}", memo
            )
            recording.changes.append(Change(change.part, change.key, encoded, change.deleted))
        self._root.output = self._encoder.output(output, "the output", memo)
        self._check_opaque_ops(recording.changes)
        self._root.stop = len(self.tape.ops)
        if self._gone_astray is not None:  # and the model caught it
            raise self._gone_astray
        if self._resumed > len(self.tape.ops):
            raise NondeterminismError("resumed, the run ended before the point where it diverged")
        self.active = False
        recording.result = without_traced(output, self._clean(changes))
        return recording

    def _has_ops_of(self, function: Any) -> bool:
        """Whether torch functions were called from within a function of the model's."""
        code = getattr(function, "__code__", None)
        for op in self.tape.ops:
            site, scope = op.site, op.scope
            while op.kind is OpKind.CALL and site is not None:
                if any(running is code for running, _ in site.chain):
                    return True
                if scope.parent is None:
                    break
                site, scope = scope.site, scope.parent
        return False

    def _check_opaque_ops(self, changes: list[Change]) -> None:
        """Block if code that is called as one op might read what the run changes.

        A replay changes objects only at its end. Other ops read no objects.
        """
        changed = {str(change.key) for change in changes if change.part.kind is not PartKind.TENSOR}
        if not changed:
            return
        for op in self.tape.ops:
            if op.kind is OpKind.CALL and not is_torchs_function(op.target):
                read = changed & self._names_read(op)
                if read:
                    where = f"at {op.site.place}" if op.site is not None else "in the run"
                    self.tape.block(
                        f"{name_of(op.target)} {where} is called as one op, and might read what "
                        f"the run changes: {', '.join(sorted(read))}"
                    )

    def _names_read(self, op: Op) -> frozenset[str]:
        """The names that the code of an opaque op uses, as far as it is known."""
        names: set[str] = set()
        waiting: list[Any] = [op.target, *op.args, *op.kwargs.values()]
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, types.CodeType):
                names.update(names_in(thing))
            elif isinstance(thing, Made):
                waiting += thing.args
            elif isinstance(thing, (tuple, list)):
                waiting += thing
            elif isinstance(thing, Existing):
                if thing.part.kind in (PartKind.MODULE, PartKind.OBJECT):
                    return self.surroundings.names
                waiting.append(thing.part.value)
            elif isinstance(thing, types.MethodType):
                waiting.append(thing.__func__)
            elif isinstance(thing, types.FunctionType):
                names |= reach_of(thing).names
            if isinstance(thing, types.MethodType) and isinstance(thing.__self__, type):
                names |= reach_of(thing.__self__, _FUNCTION_METHODS).names
        return frozenset(names)

    def _clean(self, changes: list[Change]) -> dict[int, Any]:
        """Make plain what the run left in its surroundings; return what is plain by now."""
        memo = {id(part.value): part.value for part in self.surroundings.parts}
        # A trace made inside the run can lead here, by way of this run's scalars.
        memo.update({id(own): own for own in (self, self.tape, self.surroundings, self._scalars)})
        for change in changes:
            change.key = without_traced(change.key)
            if not change.deleted:
                change.store(without_traced(change.value, memo))
            if isinstance(change.part.value, dict):
                make_keys_plain(change.part.value)
        for part in self.surroundings.parts:
            if part.kind is PartKind.SET and isinstance(part.value, set):
                traced = [member for member in part.value if type(member) in TRACED]
                part.value.difference_update(traced)
                part.value.update(map(without_traced, traced))
        return memo

    def argument(self, part: Part, value: Any) -> Any:
        """Record an argument part and return what the model is given for it."""
        op = self._emit(OpKind.INPUT, part, (), {}, None)
        if part.kind is PartKind.NUMBER:
            op.meta = value
            return self._scalar(_TRACED_AS[type(value)], value, Ref(op.index))
        self._bind_tensor(value, op)
        return value

    # What torch reports

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._within:
            return func(*_plain(args), **_plain(kwargs))
        frame = sys._getframe(1)
        if func in _SPECIAL:
            return self._special(func, args, kwargs, frame)
        return self._call(func, args, kwargs, frame)

    def _special(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        if func in CONTEXT:
            return func(*args, **kwargs)
        if func in METADATA:
            return self._metadata(func, args, kwargs, frame)
        if func in VALUES:
            how = VALUES[func]
            op, value = self._record(func, args, kwargs, frame)
            op.meta = value
            self._guard(Test.TRUTH if how == "bool" else Test.VALUE, op.index, value, how, frame)
            return value
        if func in DESCEND:
            with self:
                return entered(func)(*args, **kwargs)
        if func in ESCAPES:
            self.tape.block(
                f"{name_of(func)} at {_user_place(frame)} hands the content of a tensor to code "
                "that cannot be watched"
            )
            return func(*args, **kwargs)
        assert func is Tensor.tolist
        return self._tolist(func, args, kwargs, frame)

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        op, out = self._record(func, args, kwargs, frame)
        return self._bind(out, op, frame)

    def opaque_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function as one op (see `watcher.Watcher`)."""
        frame = sys._getframe(2)
        with torch._C.DisableTorchFunction():  # what is read here is not the model's reading
            op, args, kwargs = self._write(function, args, kwargs, frame)
            if self._holds_values(function, set()):
                self.tape.block(
                    f"{name_of(function)} at {_user_place(frame)} closes over values of the run, "
                    "which a replay could not exchange"
                )
        self._within = True
        try:
            out = self._carry_out(op, function, args, kwargs)
        finally:
            self._within = False
        with torch._C.DisableTorchFunction():
            return self._bind(out, op, frame)

    def _holds_values(self, thing: Any, seen: set[int]) -> bool:
        """Whether what is called as one op holds on to values that this run computed."""
        if type(thing) in TRACED:
            return True
        if isinstance(thing, Tensor):
            known = self._known.get(id(thing))
            if known is None or known() is not thing:
                return False
            return known.ref is None or self.tape.ops[known.ref.index].kind is not OpKind.STATE
        if id(thing) in seen:
            return False
        seen.add(id(thing))
        return any(self._holds_values(held, seen) for held in held_by(thing))

    def forgot_casts(self) -> None:
        """Note that autocast forgets what it has cast (see `watcher.Watcher`)."""
        self.tape.forgets.append(len(self.tape.ops))

    def forget(self, *tensors: Tensor) -> None:
        """Let go of tensors altogether, weak references included."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def unseen(self, what: str) -> None:
        """Note what a replay could not repeat (see `watcher.Watcher`)."""
        self.tape.block(f"{what} at {_user_place(sys._getframe(1))} cannot be watched")

    def here(self) -> str:
        """Say where the model is."""
        place = _user_place(sys._getframe(1))
        return f"at {place}" if place else f"in {self._start}"

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Op, Any]:
        """Put a call on the tape and carry it out."""
        op, args, kwargs = self._write(func, args, kwargs, frame)
        return op, self._carry_out(op, func, args, kwargs)

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Op, Any, dict[str, Any]]:
        """Put a call on the tape; return it and what the function is to be called with."""
        encoded, args = self._encoder.arguments(args)
        named: dict[str, Any] = {}
        if kwargs:
            values, usable = self._encoder.arguments(tuple(kwargs.values()))
            named = dict(zip(kwargs, values, strict=True))
            kwargs = dict(zip(kwargs, usable, strict=True))
        return self._emit(OpKind.CALL, func, encoded, named, frame), args, kwargs

    def _carry_out(self, op: Op, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do what an op says (or, resumed, take what it gave before)."""
        if self._prefix is not None and op.index in self._prefix.values:
            return self._prefix.values[op.index]
        try:
            if self._prefix is not None and op.index in self._prefix.errors:
                raise self._prefix.errors[op.index]
            return unwatched(func, args, kwargs)
        except Exception as error:
            op.raised = raised_by(op, error)
            raise

    def _metadata(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        fact = None
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            fact = (self.ref(args[0]).index, func)
            if fact in self._facts:
                return func(args[0])
        op, value = self._record(func, args, kwargs, frame)
        op.meta = value
        self._guard(Test.VALUE, op.index, value, "metadata", frame)
        if fact is not None:
            self._facts.add(fact)
        return value

    def _tolist(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        op, out = self._record(func, args, kwargs, frame)
        op.meta = out
        if args[0].numel() > _LONG_LIST:
            # The model may change the list it is given; what is guarded must stay as it was.
            op.meta = copy.deepcopy(out)
            self._guard(Test.VALUE, op.index, op.meta, "tolist", frame)
            return out
        return self._traced_list(out, Ref(op.index), frame)

    def _traced_list(self, value: Any, ref: Ref, frame: FrameType) -> Any:
        if type(value) is not list:
            return self._scalar(_TRACED_AS[type(value)], value, ref)
        self._guard(Test.LENGTH, ref.index, len(value), "length", frame)
        return [
            self._traced_list(item, self._element(ref, (i,), item), frame)
            for i, item in enumerate(value)
        ]

    # What traced scalars report

    def consume(self, scalar: TracedScalar, how: str) -> Any:
        """Guard the value of a traced scalar that Python needs (see `scalars.Origin`)."""
        index, value = self.scalar_ref(scalar).index, scalar._value
        if how == "bool":
            self._guard(Test.TRUTH, index, bool(value), how, _outside_scalars())
        else:
            self._guard(Test.VALUE, index, value, how, _outside_scalars())
        return value

    def arithmetic(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Record Python arithmetic on traced scalars (see `scalars.Origin`)."""
        traced = None
        try:
            result = function(*map(plain, operands))
            if current_watcher() is self:  # else within an op, which a replay does as a whole
                traced = _TRACED_AS.get(type(result))
        finally:
            if traced is None:  # it raised, or gave something that cannot be traced
                for operand in operands:
                    if type(operand) in TRACED:
                        operand._consume(getattr(function, "__name__", "arithmetic"))
        if traced is None:
            return result
        frame = _outside_scalars()
        if function in (pow, operator.pow):
            # Signs decide whether the result is an int, a float or complex.
            for operand in operands:
                if type(operand) in TRACED:
                    bool(operand >= 0)
        encoded, _ = self._encoder.arguments(operands)
        op = self._emit(OpKind.SCALAR, function, encoded, {}, frame)
        op.meta = result
        return self._traced(traced, result, Ref(op.index), frame)

    # Module calls

    def module_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call as a scope (see `watcher.Watcher`)."""
        path = self.surroundings.module_paths.get(id(module), f"<{type(module).__name__}>")
        number = self._calls_of.get(id(module), 0)
        self._calls_of[id(module)] = number + 1
        outer = self._scope
        scope = ModuleCall(path, module, number, outer, len(self.tape.ops))
        scope.site = self._site(sys._getframe(3))
        with torch._C.DisableTorchFunction():  # what is read here is not the model's reading
            scope.args = tuple(self._encoder.leniently(value) for value in args)
            scope.kwargs = {name: self._encoder.leniently(value) for name, value in kwargs.items()}
        self.tape.calls.append(scope)
        self._scope = scope
        try:
            output = module._call_impl(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                scope.output = self._encoder.leniently(output)
        finally:
            self._scope = outer
            scope.stop = len(self.tape.ops)
        return output

    # The tape

    def _site(self, frame: FrameType) -> Site | None:
        """Where `frame` is; None for what no code of the model's called: the model itself."""
        site = self._sites.find(frame)
        return site if site.chain else None

    def _emit(
        self, kind: OpKind, target: Any, args: Any, kwargs: dict[str, Any], frame: FrameType | None
    ) -> Op:
        ops = self.tape.ops
        site = None if frame is None else self._site(frame)
        if len(ops) < self._resumed:
            self._name_again(kind, target)
        elif self._prefix is not None and self._prefix.hold.release():
            self.forgot_casts()
        op = Op(len(ops), kind, target, args, kwargs, self._scope, site, current_context())
        if torch.get_default_dtype() is not self._dtype:
            place = _user_place(sys._getframe(1))
            self.tape.block(f"at {place} the run has changed the default dtype")
        if op.index < self._resumed:
            assert self._prefix is not None
            before = self._prefix.ops[op.index]
            if not before.does_the_same_as(op) and not self._means_the_same(before, op):
                self._gone_astray = NondeterminismError(
                    f"resumed, the run did {op} where it had done {before}, with all guards equal"
                    + (f" (at {site.place})" if site is not None else "")
                )
                raise self._gone_astray
        ops.append(op)
        return op

    def _name_again(self, kind: OpKind, target: Any) -> None:
        """Keep in step with a run that knew as two tensors what is one by now.

        Its prefix names the tensor a second time, from another place of the model's state.
        """
        assert self._prefix is not None
        ops = self.tape.ops
        while len(ops) < self._resumed:
            before = self._prefix.ops[len(ops)]
            if before.kind is not OpKind.STATE:
                return
            if kind is OpKind.STATE and str(before.target) == str(target):
                return
            try:
                tensor = before.target.read(self._arguments)
            except (LookupError, AttributeError, TypeError):
                return
            known = self._known.get(id(tensor))
            if known is None or known() is not tensor or known.ref is None:
                return
            part = self.surroundings.find(tensor)
            again = Op(
                len(ops), OpKind.STATE, part, (), {}, before.scope, before.site, before.context
            )
            again.meta = before.meta
            self._aliases[again.index] = self._aliases.get(known.ref.index, known.ref.index)
            ops.append(again)

    def _means_the_same(self, before: Op, op: Op) -> bool:
        """Whether two ops differ only in which of its names they call a tensor by.

        In the replay that diverged an op can have given back its input, where it had given a
        copy when it was recorded: now that input has two names.
        """

        def first_name(ref: Ref) -> Ref:
            return Ref(self._aliases.get(ref.index, ref.index))

        if before.kind is OpKind.STATE and op.kind is OpKind.STATE:
            return before.target.read(self._arguments) is op.target.read(self._arguments)
        arguments = [map_refs((some.args, some.kwargs), first_name) for some in (before, op)]
        return (
            arguments[0] == arguments[1]
            and before.kind is op.kind
            and (before.target == op.target or str(before.target) == str(op.target))
        )

    def _guard(self, test: Test, index: int, expected: Any, how: str, frame: FrameType) -> None:
        site = self._site(frame)
        position = len(self.tape.ops)
        self.tape.guards.append(Guard(position, index, test, expected, how, self._scope, site))

    # Values that ops give

    def _bind(self, out: Any, op: Op, frame: FrameType) -> Any:
        if isinstance(out, Tensor):
            known = self._known.get(id(out))
            if known is not None and known() is out:
                before = known.ref or self._element(known.parent, known.key, out)
                self._aliases[op.index] = self._aliases.get(before.index, before.index)
                if not _works_in_place(op):
                    # It gave back a tensor that has another name already. A replay in which
                    # it does not (because a copy was needed) must not mix the two up.
                    self._guard(Test.SAME, op.index, before.index, "", frame)
            elif not _works_in_place(op) and compares_identity(_users_code(frame)):
                for ref in refs_in((op.args, op.kwargs)):
                    if isinstance(self.tape.ops[ref.index].meta, TensorMeta):
                        self._guard(Test.OTHER, op.index, ref.index, "", frame)
            self._bind_tensor(out, op)
            if op.target in _OPTIONAL:
                self._guard_presence(op, frame)
            return out
        if out is None:
            if op.target in _SETTERS:
                self._facts.clear()
            elif op.target in _OPTIONAL:
                self._guard_presence(op, frame)
            return None
        kind = type(out)
        traced = _TRACED_AS.get(kind)
        if traced is not None:
            op.meta = out
            return self._traced(traced, out, Ref(op.index), frame)
        if kind is torch.Size or (kind is tuple and op.target in SHAPES):
            op.meta = tuple(out)
            self._guard(Test.LENGTH, op.index, len(out), "metadata", frame)
            ref = Ref(op.index)
            sizes = [self._scalar(TracedInt, size, (ref, (i,))) for i, size in enumerate(out)]
            if self._plain_numbers or needs_plain_numbers(frame.f_code):
                return kind([size._consume("type") for size in sizes])
            return kind(sizes)
        if isinstance(out, (tuple, list)):
            if kind is tuple or kind is list:
                how = "iter" if frame.f_code is _ITER_CODE else "length"
                self._guard(Test.LENGTH, op.index, len(out), how, frame)
            bound, op.meta = self._bind_elements(out, Ref(op.index), (), frame)
            return bound
        op.meta = out
        if out is torch.default_generator:  # what seeding returns
            return out
        if kind in PLAIN_TYPES:
            self._guard(Test.VALUE, op.index, out, "metadata", frame)
        else:
            self.tape.block(
                f"{name_of(op.target)} at {_user_place(frame)} gives a "
                f"{kind.__qualname__}, which cannot be followed"
            )
        return out

    def _guard_presence(self, op: Op, frame: FrameType) -> None:
        """Guard whether a tensor has a gradient, or a base."""
        test = self._emit(OpKind.SCALAR, operator.is_, (Ref(op.index), None), {}, frame)
        test.meta = op.meta is None
        self._guard(Test.VALUE, test.index, test.meta, "metadata", frame)

    def _bind_tensor(self, tensor: Tensor, op: Op) -> None:
        known = self._known[id(tensor)] = _Known(tensor)
        known.ref = Ref(op.index)
        known.graphless = (
            op.kind is OpKind.CALL and not op.context.grad and not requires_grad(tensor)
        )
        op.meta = meta_of(tensor)

    def _bind_elements(
        self, out: Any, ref: Ref, path: tuple[Any, ...], frame: FrameType
    ) -> tuple[Any, Any]:
        """Bind what a result contains; its elements get ops only once they are used."""
        bound, metas, changed = [], [], False
        for i, item in enumerate(out):
            meta = item
            if isinstance(item, Tensor):
                meta = meta_of(item)
                before = self._known.get(id(item))
                if before is not None and before() is item:
                    first = before.ref or self._element(before.parent, before.key, item)
                    element = self._element(ref, (*path, i), item)
                    self._aliases[element.index] = self._aliases.get(first.index, first.index)
                    self._guard(Test.SAME, element.index, first.index, "", frame)
                else:
                    known = self._known[id(item)] = _Known(item)
                    known.ref, known.parent, known.key = None, ref, (*path, i)
                    known.graphless = False
            elif type(item) in _TRACED_AS:
                source = (ref, (*path, i))
                item = self._traced(_TRACED_AS[type(item)], item, source, frame)
            elif isinstance(item, (tuple, list)):
                item, meta = self._bind_elements(item, ref, (*path, i), frame)
            changed = changed or item is not out[i]
            bound.append(item)
            metas.append(meta)
        kind = type(out)
        if not changed:
            return out, tuple(metas)
        return (kind(bound) if kind in (tuple, list) else tuple(bound)), tuple(metas)

    def _traced(self, kind: Any, value: Any, source: Any, frame: FrameType) -> Any:
        scalar = self._scalar(kind, value, source)
        if kind is TracedBool:
            if compares_identity(frame.f_code):
                return scalar._consume("type")
            if not only_tests(frame):
                return scalar._consume("bool")
        return (
            scalar._consume("type")
            if self._plain_numbers or needs_plain_numbers(frame.f_code)
            else scalar
        )

    def _scalar(self, kind: Any, value: Any, source: Any) -> Any:
        scalar = kind(value, self, source)
        self._scalars.append(scalar)
        return scalar

    def _element(self, ref: Ref, path: tuple[Any, ...], value: Any) -> Ref:
        """Return the op that takes an element out of a result, emitting it on first use."""
        for depth, key in enumerate(path):
            known = self._elements.get((ref.index, key))
            if known is None:
                op = self._emit(OpKind.SCALAR, operator.getitem, (ref, key), {}, None)
                parent = self.tape.ops[ref.index]
                op.scope, op.site, op.context = parent.scope, parent.site, parent.context
                if depth == len(path) - 1:
                    op.meta = plain(value)
                    if isinstance(value, Tensor):
                        op.meta = meta_of(value)
                known = self._elements[ref.index, key] = Ref(op.index)
            ref = known
        return ref

    # Arguments and outputs

    def ref(self, tensor: Tensor) -> Ref:
        """Return the value number of a tensor."""
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            if known.ref is None:
                known.ref = self._element(known.parent, known.key, tensor)
            if known.graphless and requires_grad(tensor):
                self._block_unseen_graph(known)
            return known.ref
        part = self.surroundings.find(tensor)
        if part is not None:
            op = self._emit(OpKind.STATE, part, (), {}, None)
        else:
            op = self._emit(OpKind.UNKNOWN, None, (), {}, None)
            place = _user_place(sys._getframe(1))
            use = f"is used at {place}" if place else f"is given out by {self._start}"
            self.tape.block(
                f"a tensor of unknown origin {use}: it was made by something that torch does not "
                "let a tracer see, or kept in a cache (name what made it with bendtrace.opaque)"
            )
        self._bind_tensor(tensor, op)
        return Ref(op.index)

    def _block_unseen_graph(self, known: _Known) -> None:
        """An op under no_grad gave this tensor, and yet it requires grad by now."""
        known.graphless = False
        place = _user_place(sys._getframe(1))
        self.tape.block(
            f"a tensor used at {place} got its gradient function from something that torch does "
            "not let a tracer see (an autograd.Function whose apply was taken before the run?)"
        )

    def scalar_ref(self, scalar: TracedScalar) -> Ref:
        """Return the value number of a traced scalar of this run."""
        source = scalar._source
        if type(source) is Ref:
            return source
        parent, path = source
        ref = scalar._source = self._element(parent, path, scalar)
        return ref


def _plain(value: Any) -> Any:
    """Make traced scalars in arguments plain, and guard them."""
    kind = type(value)
    if kind in TRACED:
        return value._consume("torch")
    if kind in (tuple, list, torch.Size):
        return kind([_plain(item) for item in value])
    return {key: _plain(item) for key, item in value.items()} if kind is dict else value


def _outside_scalars() -> FrameType:
    frame = sys._getframe(2)
    while frame.f_code.co_filename == _SCALARS_FILE and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _users_code(frame: FrameType) -> types.CodeType:
    """The innermost code that is not torch's own."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(_TORCH):
        found = found.f_back
    return (found or frame).f_code


def _user_place(frame: FrameType | None) -> str:
    """Where the nearest code is that is the model's; "" once the model has returned."""
    while frame is not None and frame.f_code not in _OUTSIDE:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, _TORCH)) and not _is_stdlibs(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_stdlibs(file: str) -> bool:
    return file.startswith(("<frozen", _STDLIB)) and "site-packages" not in file


def _definition(function: Callable[..., Any]) -> str:
    """Where a module's forward, or a function, is defined."""
    called = function.forward if isinstance(function, nn.Module) else function
    while isinstance(called, functools.partial):
        called = called.func
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _works_in_place(op: Op) -> bool:
    name = getattr(op.target, "__name__", "")
    return "out" in op.kwargs or (
        name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    )


def _python_random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    return random.getstate(), tuple(
        part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.get_state()
    )


# Seen from inside, what lies behind these is not the model.
_OUTSIDE = (Recorder._finish.__code__, Recorder.run.__code__)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_ITER_CODE = Tensor.__iter__.__code__
_GLOBAL_HOOKS = (
    "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks",
)  # fmt: skip
_OPTIONAL = frozenset(
    getattr(vars(torch._C.TensorBase)[name], "__get__")  # noqa: B009
    for name in ("grad", "_grad", "_base")
    if name in vars(torch._C.TensorBase)
)
_RANDOM = ("random", "rand", "randn", "randint", "choice", "shuffle", "uniform", "normal", "sample")
_FUNCTION_METHODS = frozenset({"forward", "setup_context"})  # of an autograd.Function
_SETTERS = frozenset(
    getattr(attribute, "__set__")  # noqa: B009 - a slot of the descriptor, not a known attribute
    for attribute in map(
        lambda name: getattr(Tensor, name, None), ("data", "requires_grad", "grad")
    )
)
_SPECIAL = frozenset({*CONTEXT, *METADATA, *VALUES, *DESCEND, *ESCAPES, Tensor.tolist})
