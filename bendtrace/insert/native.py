"""Interjections at the calls of plain modules, with torch's own hooks.

Everything attached to a module is called by one `Station`, in the order of attachment. Up to three
of torch's hooks are registered on the module: one before the call; one that runs first after it, so
that other hooks see what they would see without watched gradients; and one that runs in its own
turn. They call user code, so a recorded run of a model with such hooks is not replayed. Insertions
in a `BendedModule` are replayed.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bendtrace.errors import InterjectionError
from bendtrace.insert.gradients import CallGradients
from bendtrace.insert.inserter import may_write
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import (
    StructureMismatch,
    TensorExchange,
    all_tensors_in,
    collect,
    take_apart,
    with_tensors,
)
from bendtrace.insert.plan import forms_of
from bendtrace.tape.watchers import current_watcher

_lock = threading.RLock()
_orders = itertools.count()


class Counts:
    """The number of calls of each module in the current call of the model on a thread."""

    def __init__(self) -> None:
        self._passes: dict[tuple[int, str], int] = {}

    def begin(self, *call: Any) -> None:
        """Reset the counts, because a call of the model begins."""
        thread = threading.get_ident()
        for key in [key for key in self._passes if key[0] == thread]:
            del self._passes[key]

    def next(self, name: str) -> int:
        """Count a call of a module, and return its number."""
        key = threading.get_ident(), name
        number = self._passes.get(key, 0)
        self._passes[key] = number + 1
        return number


class AttachedInterjection:
    """An interjection at the calls of one module, which may be counted. It sees the path."""

    active = True  # as long as it is installed: nobody else takes it away

    def __init__(
        self, module: nn.Module, what: Interjection, path: str, counts: Counts | None = None
    ) -> None:
        self.module = module
        self.what = what
        self.path = path
        self.counts = counts
        self.order: int = next(_orders)
        forms = forms_of(what)
        self.before: bool = "before" in forms
        self.after: bool = "after" in forms
        self.backward: bool = "backward" in forms
        self.copies: bool = "copies" in forms and self.after and may_write(module, None, (), {})

    @property
    def is_paired(self) -> bool:
        """Return whether the end of a call has to be matched with its beginning."""
        return self.backward or self.copies or (self.before and self.counts is not None)

    def at(self, module: nn.Module) -> NodePass:
        """Return the next call of a module, as the interjection sees it."""
        number = 0 if self.counts is None else self.counts.next(self.path)
        return NodePass(self.path, number, module)

    def install(self) -> None:
        """Make the module call it, in the order of attachment."""
        with _lock:
            station = _station_of(self.module) or Station(self.module)
            found = {one.order: one for one in (*station.entries, self)}
            station.entries = tuple(found[order] for order in sorted(found))
            station.update()

    def remove(self) -> None:
        """Stop the module from calling it."""
        with _lock:
            station = _station_of(self.module)
            if station is not None:
                station.entries = tuple(one for one in station.entries if one is not self)
                station.update()


def _station_of(module: nn.Module) -> Station | None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, _Stage) and hook.station.module is module:
            return hook.station
    return None


class Station:
    """Calls everything that is attached to a module."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module  # None for the station of a copy, which nothing else is attached to
        self.entries: tuple[AttachedInterjection, ...] = ()  # what is attached, in order
        self._stages: dict[Callable[..., Any], RemovableHandle] = {}
        self._open: list[_OpenCall] = []

    @property
    def pairs_calls(self) -> bool:
        """Return whether the end of a call has to be matched with its beginning."""
        return any(one.is_paired for one in self.entries)

    def update(self) -> None:
        """Register the torch hooks that are needed, and remove the others."""
        if self.module is None:
            return
        # The end of each call has to be recorded, except that of an interrupted one.
        self._forget_interrupted()
        ending = self.pairs_calls or bool(self._open)
        self._install(_enter_call, self.pairs_calls or any(one.before for one in self.entries))
        self._install(_close_call, ending)
        self._install(_leave_call, ending or any(one.after for one in self.entries))

    def _install(self, stage: Callable[..., Any], is_needed: bool) -> None:
        installed = self._stages.get(stage)
        if not is_needed and installed is not None:
            self._stages.pop(stage).remove()
        if not is_needed or installed is not None:
            return
        assert self.module is not None
        hook = _Stage(self, stage)
        if stage is _enter_call:
            handle = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            is_first = stage is _close_call  # which has to be done after an error, too
            handle = self.module.register_forward_hook(
                hook, with_kwargs=True, always_call=is_first, prepend=is_first
            )
        self._stages[stage] = handle

    def begin(self, call: _OpenCall) -> None:
        """Note that a call has begun."""
        with _lock:
            self._forget_interrupted()
            self._open.append(call)
        _local.calls.append(call)

    def _forget_interrupted(self) -> None:
        self._open = [call for call in self._open if call.is_running()]
        while _local.calls and not _local.calls[-1].is_running():
            _local.calls.pop()

    def call_of(self, module: nn.Module) -> _OpenCall | None:
        """The call of a module that is running on this thread."""
        calls = reversed(_local.calls)
        return next((one for one in calls if one.station is self and one.module is module), None)

    def end(self, call: _OpenCall) -> None:
        """Note that a call has ended."""
        if call in _local.calls:
            _local.calls.remove(call)
        with _lock:
            self._open = [one for one in self._open if one is not call]
            if not self.pairs_calls:
                self.update()

    # A copied module has the same attachments, with their own station.

    def __getstate__(self) -> dict[str, Any]:
        return {"entries": self.entries}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Station(None)), **state)


class _Stage:
    """The object that torch calls."""

    runs_user_code = True  # marks it for recorded runs as user code

    def __init__(self, station: Station, stage: Callable[..., Any]) -> None:
        self.station = station  # the station with the entries
        self._stage = stage

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        if torch.compiler.is_compiling():  # torch._dynamo cannot handle it as a whole
            stage = torch._dynamo.disable(self._stage)
            return stage(self.station, module, *values)
        return self._stage(self.station, module, *values)


class _OpenCall:
    """A call of a module, until it ends."""

    def __init__(self, station: Station, module: nn.Module) -> None:
        self.station = station  # the station with the entries
        self.module = module
        self._at = {one.order: one.at(module) for one in station.entries if one.is_paired}
        self.gradients: CallGradients | None = None  # manages its gradients, if they are needed
        self.exchange: TensorExchange = TensorExchange({})  # has replaced inputs by aliases
        self.same: dict[int, Tensor] = {}  # the result of `CallGradients.close`
        self.copies: Any = None  # the inputs as they were; None if nobody needs them
        # To distinguish a normal end from an error, which torch reports in the same way.
        self._handled = sys.exception()
        self._thread = threading.get_ident()
        frame = sys._getframe(3)  # in which torch calls the hooks, if it is not compiled
        self._frame = id(frame) if frame.f_code.co_name == "inner" else None

    def is_running(self) -> bool:
        """Return whether the call is still running, as far as can be determined."""
        if self._frame is None:
            return True
        # `sys._getframe` shows the frames of the asking thread alone.
        is_own = self._thread == threading.get_ident()
        frame = sys._getframe() if is_own else sys._current_frames().get(self._thread)
        while frame is not None and id(frame) != self._frame:
            frame = frame.f_back
        return frame is not None

    @property
    def has_failed(self) -> bool:
        """Return whether the call is ending with an error."""
        return sys.exception() is not self._handled

    def at(self, one: AttachedInterjection) -> NodePass:
        """Return the call, as an attached interjection sees it."""
        return self._at.get(one.order) or one.at(self.module)

    def watch(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Watch the gradients of the call; return the inputs for the module."""
        entries = self.station.entries
        receivers = [(one.what, self.at(one), None) for one in entries if one.backward]
        if not receivers or not torch.is_grad_enabled():
            return given
        with _hidden_from_recorder():
            inputs = all_tensors_in(given)
            self.gradients = CallGradients(receivers, inputs)
            inside = self.gradients.enter()
            self.exchange = TensorExchange(dict(zip(map(id, inputs), inside, strict=True)))
            watched: tuple[Any, ...] = self.exchange.into(given)
        return watched


class _OpenCalls(threading.local):
    def __init__(self) -> None:
        self.calls: list[_OpenCall] = []


_local = _OpenCalls()


def _hidden_from_recorder() -> AbstractContextManager[Any]:
    """Hide this code from a recorded run, as far as possible."""
    return nullcontext() if current_watcher() is None else torch._C.DisableTorchFunction()


def _enter_call(
    station: Station, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    call = _OpenCall(station, module)
    if station.pairs_calls:
        station.begin(call)
    given = args, kwargs
    for one in station.entries:
        if one.before:
            inputs = one.what.before(call.at(one), Inputs(*given))
            if inputs is not None:
                given = tuple(inputs), getattr(inputs, "kwargs", given[1])
    new = call.watch(given)
    if any(one.copies for one in station.entries):
        call.copies = with_tensors(new, [tensor.clone() for tensor in all_tensors_in(new)])
    return None if new[0] is args and new[1] is kwargs else new


def _close_call(
    station: Station, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    call = station.call_of(module)
    if call is None:
        return None
    if call.has_failed:
        station.end(call)
    if call.gradients is None:
        return None
    with _hidden_from_recorder():
        call.exchange.undo()
        outputs = all_tensors_in(output)
        call.same = call.gradients.close(outputs)
        if not call.same:
            return None
        return with_tensors(output, [call.same.get(id(one), one) for one in outputs])


def _leave_call(
    station: Station, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    call = station.call_of(module)
    given: Any = args, kwargs
    entries = station.entries
    if call is not None:
        station.end(call)
        if call.gradients is not None:
            given = with_tensors(given, call.gradients.inside_of(all_tensors_in(given), call.same))
    value, gradients = output, None if call is None else call.gradients
    if gradients is not None and not gradients.of_hooks:
        value = _watch_outputs(gradients, value)
    for one in entries:
        if one.after:
            at = one.at(module) if call is None else call.at(one)
            copies = call.copies if call is not None and one.copies else given
            inputs = Inputs(*copies) if one.what.wants_inputs else Inputs(())
            result = one.what.after(at, inputs, value)
            if result is not None and result is not value:
                value = _accept_result(one.what, at, value, result)
    if gradients is not None and gradients.of_hooks:  # those of what forward hooks returned
        value = _watch_outputs(gradients, value)
    return None if value is output else value  # so that the containers are the module's own


def _watch_outputs(gradients: CallGradients, value: Any) -> Any:
    with _hidden_from_recorder():
        return with_tensors(value, gradients.leave(all_tensors_in(value)))


def _accept_result(what: Interjection, at: NodePass, value: Any, result: Any) -> Any:
    """Return the result of an interjection, if it can replace a module's value."""
    if getattr(what, "checks_itself", False):
        return result
    shape, found = take_apart(value)
    try:
        collect(shape, result, found)
    except StructureMismatch as error:
        raise InterjectionError(
            f"{what.label} at {at.path or '<root>'} returned a value that cannot replace the "
            f"module's value: {error}",
            at.path,
        ) from None
    return result
