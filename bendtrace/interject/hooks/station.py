"""What is installed on a module while hooks are active there, and taken off again afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bendtrace.errors import InputError
from bendtrace.interject.hooks.gradients import CallGradients
from bendtrace.interject.hooks.structure import tensors_of, with_tensors
from bendtrace.recording.watcher import current_watcher

if TYPE_CHECKING:
    from bendtrace.interject.hooks.function import Category
    from bendtrace.interject.hooks.handle import HookHandle

__all__ = ["activate", "deactivate"]

_lock = threading.RLock()


def activate(handle: HookHandle) -> None:
    """Have the module call a hook, in the order in which hooks were registered."""
    with _lock:
        station = _station_of(handle.module) or Station(handle.module)
        station.handles = tuple(sorted((*station.handles, handle), key=lambda one: one.order))
        station.update()


def deactivate(handle: HookHandle) -> None:
    """Have the module not call a hook any more."""
    with _lock:
        station = _station_of(handle.module)
        if station is not None:
            station.handles = tuple(one for one in station.handles if one is not handle)
            station.update()


def _station_of(module: nn.Module) -> Station | None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, _Stage) and hook.station.module is module:
            return hook.station
    return None


class Station:
    """All hooks of all managers that are active on a module, and what calls them.

    Up to three hooks of torch's are registered on the module: one that comes before the call; one
    that comes first after it, so that other hooks see what they would see without gradients being
    watched; and one that comes in its turn.

    Attributes:
        module: the module.
        handles: what is active, in the order of registration.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.handles: tuple[HookHandle, ...] = ()
        self._stages: dict[Callable[..., Any], RemovableHandle] = {}
        self._open: list[_Call] = []

    def of(self, category: Category) -> tuple[HookHandle, ...]:
        """The active hooks of a kind."""
        return tuple(one for one in self.handles if one.hook_fn.hook_type == category)

    @property
    def watches_gradients(self) -> bool:
        """Whether backward hooks are active, or were when a call began that goes on."""
        return bool(self._open or self.of("backward_hook"))

    def update(self) -> None:
        """Register what the active hooks need, and remove the rest."""
        backward = bool(self.of("backward_hook"))
        # A call that has begun has to be ended; one that was interrupted has not.
        self._forget_interrupted()
        ending = backward or bool(self._open)
        self._install(_enter, backward or bool(self.of("forward_pre_hook")))
        self._install(_close, ending)
        self._install(_leave, ending or bool(self.of("forward_hook")))

    def _install(self, stage: Callable[..., Any], is_needed: bool) -> None:
        installed = self._stages.get(stage)
        if not is_needed and installed is not None:
            self._stages.pop(stage).remove()
        if not is_needed or installed is not None:
            return
        hook = _Stage(self, stage)
        if stage is _enter:
            handle = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            is_first = stage is _close  # which has to be done after an error, too
            handle = self.module.register_forward_hook(
                hook, with_kwargs=True, always_call=is_first, prepend=is_first
            )
        self._stages[stage] = handle

    def begin(self, call: _Call) -> None:
        """Note that a call has begun."""
        with _lock:
            self._forget_interrupted()
            self._open.append(call)
        _local.calls.append(call)

    def _forget_interrupted(self) -> None:
        self._open = [call for call in self._open if call.is_running()]
        while _local.calls and not _local.calls[-1].is_running():
            _local.calls.pop()

    def call_of(self, module: nn.Module) -> _Call | None:
        """The call of a module that the calling thread is in."""
        calls = reversed(_local.calls)
        return next((one for one in calls if one.station is self and one.module is module), None)

    def end(self, call: _Call) -> None:
        """Note that a call has ended."""
        if call in _local.calls:
            _local.calls.remove(call)
        with _lock:
            self._open = [one for one in self._open if one is not call]
            if not self.of("backward_hook"):
                self.update()


class _Stage:
    """What torch calls."""

    def __init__(self, station: Station, stage: Callable[..., Any]) -> None:
        self.station = station
        self._stage = stage

    @property
    def is_replayable(self) -> bool:
        """Whether a recorded run can call the functions as ops of its own."""
        return not self.station.watches_gradients

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        if torch.compiler.is_compiling():  # as a whole it is beyond torch._dynamo
            stage = torch._dynamo.disable(self._stage)
            return stage(self.station, module, *values)
        return self._stage(self.station, module, *values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stage:
        return self  # as functions are: a copied module has the same hooks

    def __reduce__(self) -> NoReturn:
        names = ", ".join(handle.name for handle in self.station.handles)
        raise InputError(
            f"a module with active hooks cannot be pickled: deactivate {names} meanwhile"
        )


class _Call:
    """A call of a module whose gradients are watched, until it ends.

    Attributes:
        station: what watches it.
        module: the module that is called.
        gradients: what sees to its gradients.
        same: what `CallGradients.close` has returned.
    """

    def __init__(self, station: Station, module: nn.Module, gradients: CallGradients) -> None:
        self.station = station
        self.module = module
        self.gradients = gradients
        self.same: dict[int, Tensor] = {}
        # To tell an ordinary end from that by an error, which torch reports in the same way.
        self._handled = sys.exception()
        self._thread = threading.get_ident()
        frame = sys._getframe(3)  # in which torch calls the hooks, if it is not compiled
        self._frame = id(frame) if frame.f_code.co_name == "inner" else None

    def is_running(self) -> bool:
        """Whether the call has not been ended by an interrupt, as far as can be told."""
        if self._frame is None:
            return True
        is_own = self._thread == threading.get_ident()
        frame = sys._getframe() if is_own else sys._current_frames().get(self._thread)
        while frame is not None and id(frame) != self._frame:
            frame = frame.f_back
        return frame is not None

    @property
    def has_failed(self) -> bool:
        """Whether the call is being ended by an error."""
        return sys.exception() is not self._handled


class _Local(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_local = _Local()


def _unseen() -> AbstractContextManager[Any]:
    """While a run is recorded, keep what is done here out of the record, as far as it goes."""
    return nullcontext() if current_watcher() is None else torch._C.DisableTorchFunction()


class _Calls:
    """The calls of all forward, or all pre-forward, hooks of a module: what a replay repeats.

    Args:
        station: what has the hooks.
        module: the module.
        category: which of them.
        count: how many of the tensors are only looked at: the inputs, for forward hooks.
    """

    is_gate = True
    role = "hook"

    def __init__(self, station: Station, module: nn.Module, category: Category, count: int) -> None:
        self._station = station
        self._module = module
        self._category: Category = category
        self._count = count
        self.__name__ = f"module__{category}"  # no function is called like this
        self.__module__ = __name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Calls) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"a {self._category.replace('_', ' ')}"

    @property
    def _key(self) -> tuple[Any, ...]:
        return id(self._station), id(self._module), self._category, self._count

    def __call__(self, *tensors: Tensor) -> Any:
        """Call the hooks that are active by now; return the tensors that go on."""
        seen, changed = tensors[: self._count], tensors[self._count :]
        before = (seen,) if self._category == "forward_hook" else ()
        what = "outputs" if self._category == "forward_hook" else "inputs"
        for handle in self._station.of(self._category):
            if handle.active:
                returned = handle.call(self._module, *before, changed)
                changed = tuple(handle.checked(returned, changed, what))
        return changed[0] if len(changed) == 1 else changed


def _as_one_op(calls: _Calls, tensors: list[Tensor]) -> list[Tensor]:
    watcher = current_watcher()
    given = calls(*tensors) if watcher is None else watcher.hooks(calls, tuple(tensors))
    return list(given) if isinstance(given, tuple) else [given]


def _enter(
    station: Station, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given = args, kwargs
    inputs = tensors_of(given)
    changed = _as_one_op(_Calls(station, module, "forward_pre_hook", 0), inputs)
    new: Any = given if changed is inputs else with_tensors(given, changed)
    backward = station.of("backward_hook")
    if backward and torch.is_grad_enabled():
        with _unseen():
            gradients = CallGradients(module, backward, changed)
            new = gradients.enter(new)
        station.begin(_Call(station, module, gradients))
    return None if new is given else new


def _close(
    station: Station, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    call = station.call_of(module)
    if call is None:
        return None
    if call.has_failed:
        station.end(call)
    with _unseen():
        call.same = call.gradients.close(output)
        if not call.same:
            return None
        outputs = tensors_of(output)
        return with_tensors(output, [call.same.get(id(one), one) for one in outputs])


def _leave(
    station: Station, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    call = station.call_of(module)
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(output)
    if call is not None:
        station.end(call)
        inputs = call.gradients.inside_of(inputs, call.same)
    calls = _Calls(station, module, "forward_hook", len(inputs))
    changed = _as_one_op(calls, [*inputs, *outputs])
    if call is not None:
        with _unseen():
            changed = call.gradients.leave(changed)
    if changed is outputs:
        return None
    new = with_tensors(output, changed)
    return None if new is output else new  # so that the containers are the module's own
