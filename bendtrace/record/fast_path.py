"""The fast path: the usual op, recorded in one function.

`Recorder` handles a call that torch reports in several objects, each with its own concern. Most ops
are of one kind: a torch function that writes to nothing, with arguments that are plain values or
tensors already on the tape, returning a new tensor. For these, everything is done here, without
intermediate calls, because their time is most of the cost of tracing. Unusual ops are left to the
other objects.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bendtrace.python.bytecode import code_compares_identity
from bendtrace.python.internals import internal
from bendtrace.python.sites import Site, users_code
from bendtrace.record.encoding import Encoder
from bendtrace.record.tape_writer import TrackedTensor
from bendtrace.record.values import RunValues
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.contexts import (
    any_autocast,
    current_context,
    current_settings,
    dispatch_modes,
    mkldnn,
    precision,
)
from bendtrace.tape.tape import NOTHING, Op, OpKind, TensorMeta, describe_raised, ref_to
from bendtrace.tape.watchers import call_silently
from bendtrace.watch.functions import (
    GIVES_BACK,
    OPTIONAL,
    SPECIAL,
    is_pure,
    is_simple,
    may_vary,
    tells_sizes_from_tuples,
)
from bendtrace.watch.monkeypatches import may_be_patched

FastPath = Callable[[Any, tuple[Any, ...], dict[str, Any], FrameType], Any]


class _NeverTheSame:
    """Takes the global state to have changed before each op, none of which is a usual one then."""

    def check(self) -> bool:
        return False


# Checks in one call whether grad mode, autocast, default dtype, deterministic algorithms, TF32,
# reduced precision and threads are unchanged since it was created. Seen in torch 2.13 to 2.15;
# test_fast_path.py would notice a change.
_GlobalState = internal("torch._C._dynamo.guards.GlobalStateGuard", _NeverTheSame)
_inference = torch.is_inference_mode_enabled
_anomaly = torch.is_anomaly_enabled


class _FunctionKind(Enum):
    """The facts that the fast path needs about a function."""

    SIMPLE = "simple"  # works element by element, and writes to nothing
    PURE = "pure"  # writes to nothing and calls no Python
    USUAL = "usual"  # anything else that is recorded as a call
    SPECIAL = "special"  # not for the fast path


def fast_path_for(
    values: RunValues, encoder: Encoder, show: Callable[[Op, Any, Any], None]
) -> FastPath:
    """Return a function that records usual ops like `Recorder`, and returns their results.

    For other ops it does nothing, and returns `NOT_TAKEN`. The observer sees the values of the run;
    `show` passes it the result of any kind of op.
    """
    writer, observer = values.writer, values.observer
    ops, tracked_tensors, writes = writer.tape.ops, writer.tracked, writer.writes
    tracked_at = tracked_tensors.get
    boundaries, find, facts = writer.boundaries, writer.site, writer.facts
    ask_error = writer.ask_error
    sites: dict[tuple[int, ...], tuple[Site | None, bool]] = {}
    settings, product, mkl = current_settings(), precision(), mkldnn()
    on_cpu = not torch.cuda.is_available()  # where cuDNN and cuBLAS have no influence
    context, unchanged = current_context(), _GlobalState().check
    grad = context.grad
    unheeded: set[Any] = set()
    is_behind = writer.is_behind

    def renew() -> None:
        nonlocal context, grad, unchanged
        context, unchanged = writer.context(), _GlobalState().check
        grad = context.grad
        if context.inference or context.settings:
            # `check` would not notice the end of inference mode, or of all settings.
            unchanged = _never_unchanged

    def fast_path(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        nonlocal is_behind
        kind = _kinds.get(func)
        if kind is None:
            kind = _function_kind(func)
        if kind is _SPECIAL or "out" in kwargs:
            return NOT_TAKEN
        if is_behind:
            is_behind = writer.is_behind
            return NOT_TAKEN
        if not unchanged() or any_autocast() or _inference():
            renew()
            return NOT_TAKEN
        # Neither of them is noticed by the check above (seen in torch 2.13).
        if _anomaly() or parametrize._cache_enabled:
            return NOT_TAKEN
        if kind is _PURE and on_cpu:
            if precision() != product or mkldnn() != mkl:
                return NOT_TAKEN
        elif kind is not _SIMPLE and current_settings() != settings:
            return NOT_TAKEN
        # The arguments. (Tensors that it may write to have to be recorded one by one.)
        latest = writes.latest_unseen if kind is not _USUAL else _LATER
        begun = False
        encoded: list[Any] = []
        usable: list[Any] | None = None
        try:
            for value in args:
                type_ = type(value)
                if type_ is Tensor or type_ is _Parameter:
                    tracked: Any = tracked_at(id(value))
                    # The id of a tensor that is gone may be another's by now.
                    if tracked is not None and tracked() is value:
                        ref = tracked.ref
                        if (
                            ref is not None
                            and tracked.version == value._version
                            and ref.index > latest
                            and not (tracked.graphless and value.requires_grad)
                        ):
                            encoded.append(ref)
                            continue
                elif type_ in PLAIN_TYPES:
                    encoded.append(value)
                    continue
                if not begun:
                    begun = True
                    writer.begin()
                recorded, use = encoder.argument(value, type_)
                if use is not value:
                    if usable is None:
                        usable = list(args)
                    usable[len(encoded)] = use
                encoded.append(recorded)
        except RuntimeError:  # tensors of inference mode have no version
            return NOT_TAKEN
        named = {}
        if kwargs:
            if not begun:
                begun = True
                writer.begin()
            recorded, use = encoder.arguments(tuple(kwargs.values()))
            named = dict(zip(kwargs, recorded, strict=True))
            kwargs = dict(zip(kwargs, use, strict=True))
        # The site.
        key: list[int] = []
        walked: FrameType | None = frame
        while walked is not None:
            code = id(walked.f_code)
            if code in boundaries:
                break
            key.append(code)
            key.append(walked.f_lasti)
            walked = walked.f_back
        place = sites.get(tuple(key))
        if place is None:
            place = find(frame), code_compares_identity(users_code(frame))
            sites[tuple(key)] = place
        # The record.
        # Without `Op.__init__`, whose keywords would be passed for each op.
        op = _new(Op)
        op.index = index = len(ops)
        op.kind = _CALL
        op.target = func
        op.args = tuple(encoded)
        op.kwargs = named
        op.scope = writer.scope
        op.site, compares = place
        op.context = context
        op.meta = op.raised = None
        op.writes = ()
        op.reads = NOTHING
        ops.append(op)
        if begun and writes.stale:
            writes.note_reads(op)
            if observer is not None:
                for ref, tensor in writes.stale:
                    observer.reads(index, ref.index, tensor)
        if usable is not None:
            args = tuple(usable)
        failed: Exception | None
        try:
            if observer is not None:
                if func not in unheeded:
                    if observer.heeds(func):
                        observer.begins(op, args, kwargs)
                    else:
                        unheeded.add(func)
                started = perf_counter_ns()
            if kind is _USUAL:
                out = call_silently(func, args, kwargs)
                if begun:
                    writes.note_writes(op)
                    facts.clear() if op.writes else None
            elif kwargs:
                out = func(*args, **kwargs)
            else:
                out = func(*args)
            if observer is not None:
                observer.times[index] = perf_counter_ns() - started
        except Exception as error:
            op.raised, failed = describe_raised(op, error), error
        else:
            failed = None
        ask_error(op)
        if failed is not None:
            raise failed
        # The result.
        if type(out) is Tensor and not compares and func not in GIVES_BACK:
            tracked = tracked_at(id(out))
            if tracked is None or tracked() is not out:
                try:
                    shape, version = tuple(out.shape), out._version
                except RuntimeError:  # of a nested one, or of inference mode
                    shape = None
                if shape is not None:
                    tracked_tensors[id(out)] = tracked = TrackedTensor(out)
                    tracked.ref = ref_to(index)
                    tracked.version = version
                    tracked.graphless = not grad and not out.requires_grad
                    op.meta = _tuple(TensorMeta, (shape, out.dtype, out.device))
                    if observer is not None:
                        observer.gave(op, out)
                    return out
        bound = values.bind(out, op, frame)
        if observer is not None:
            show(op, args, out)
        return bound

    return fast_path


def _never_unchanged() -> bool:
    return False


def hooks_around() -> bool:
    """Return whether ops call other Python: dispatch modes, hooks for saved tensors."""
    if dispatch_modes():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _function_kind(func: Any) -> _FunctionKind:
    # (Functions that may return None are guarded by `RunValues.bind`.)
    is_special = func in SPECIAL or func in OPTIONAL or may_vary(func)
    if is_special or may_be_patched(func) or tells_sizes_from_tuples(func):
        kind = _SPECIAL
    elif is_pure(func):
        kind = _SIMPLE if is_simple(func) else _PURE
    else:
        kind = _USUAL
    _kinds[func] = kind
    return kind


_kinds: dict[Any, _FunctionKind] = {}
_SIMPLE, _PURE, _USUAL, _SPECIAL = _FunctionKind
_CALL = OpKind.CALL
NOT_TAKEN: Any = object()
_LATER = 1 << 60
_new, _tuple = Op.__new__, tuple.__new__
_Parameter = nn.Parameter
