"""Calls of modules, recorded as scopes around the ops in them."""

from __future__ import annotations

import os
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.python.internals import internal
from bendtrace.python.lazy import LazyModule
from bendtrace.record.encoding import Encoder
from bendtrace.record.tape_writer import TrackedTensor
from bendtrace.record.values import RunValues
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.tape import ModuleCall
from bendtrace.watch.executed import CodeMonitor
from bendtrace.watch.rank_sync import has_joint_hooks

if TYPE_CHECKING:
    from bendtrace.insert.inserter import Inserter
    from bendtrace.python import statements
    from bendtrace.watch import collectives
else:
    collectives = LazyModule("bendtrace.watch.collectives")
    statements = LazyModule("bendtrace.python.statements")

# Where `make_fx` and `torch.fx` call modules while they have replaced `nn.Module.__call__`.
_FX = frozenset(
    os.path.join(os.path.dirname(torch.__file__), "fx", *parts)
    for parts in (("_symbolic_trace.py",), ("experimental", "proxy_tensor.py"))
)
# How modules call one after the other those that they hold, and how they find items among them.
_CHAIN = internal("torch.nn.Sequential.forward.__code__")
_ITEMS = [kind.__getitem__ for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict)]


def _count_local() -> int:
    # Measured: how many the call itself adds depends on the version (fewer since CPython 3.14).
    thing = object()
    return sys.getrefcount(thing)


def _is_tracked_alone(tensor: Tensor) -> bool:
    """Return whether there is no weak reference to a tensor, except for those of recorders."""
    return all(type(one) is TrackedTensor for one in weakref.getweakrefs(tensor))


# The references to what only a variable holds, as they are counted from there.
REFERENCES_OF_LOCAL = _count_local()


class Scopes:
    """Records the calls of modules in one run; an inserter runs them, with its ops around them."""

    def __init__(
        self,
        values: RunValues,
        encoder: Encoder,
        code_monitor: CodeMonitor,
        inserter: Inserter | None,
    ) -> None:
        self._writer = values.writer
        self._tape = values.tape
        self._values = values
        self._encoder = encoder
        self._environment = values.environment
        self._code_monitor = code_monitor
        self._observer = values.observer
        self._inserter = inserter
        self._calls_of: dict[int, int] = {}
        self._strangers: dict[int, tuple[str, nn.Module]] = {}

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call as a scope."""
        path = self._environment.module_paths.get(id(module))
        if path is None:
            path = self._substitute_path(module)
        number = self._calls_of.get(id(module), 0)
        self._calls_of[id(module)] = number + 1
        outer = self._writer.scope
        scope = ModuleCall(path, module, number, outer, len(self._tape.ops))
        scope.training = getattr(module, "training", False)  # not of a frozen script
        frame = sys._getframe(3)  # the caller of the module, behind `nn.Module.__call__`
        while frame.f_code.co_filename in _FX and frame.f_back is not None:
            frame = frame.f_back  # make_fx has replaced `nn.Module.__call__`
        scope.site = self._writer.site(frame)
        if id(module) in self._environment.shared_modules:
            scope.called = self._name_called(module, outer, frame)
        if self._inserter is not None:
            with self._code_monitor.pause():
                return self._inserter.module(scope, args, kwargs, frame, self._resume_in_scope)
        return self._call_in_scope(scope, args, kwargs)

    def _name_called(self, module: nn.Module, outer: ModuleCall, frame: FrameType) -> str:
        """Return the name in the enclosing module that a module with several names is called by."""
        owner = outer.module
        if owner is None:
            return ""
        iterates = getattr(type(owner), "__iter__", None) is nn.Sequential.__iter__
        if iterates and frame.f_code is _CHAIN:
            keys: Any = [(sum(call.parent is outer for call in self._tape.calls), True)]
        else:
            keys = statements.callee_keys(frame, owner)
        found, names = owner, []
        for key, is_item in keys:
            inner = found._modules
            if is_item and getattr(type(found), "__getitem__", None) not in _ITEMS:
                return ""
            name = [*inner][key] if type(key) is int and -len(inner) <= key < len(inner) else key
            if (part := inner.get(name)) is None:
                return ""
            found = part
            names.append(name)
        return ".".join(names) if found is module else ""

    def _resume_in_scope(
        self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._code_monitor.resume():
            return self._call_in_scope(scope, args, kwargs)

    def _call_in_scope(
        self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        outer, module = self._writer.scope, scope.module
        assert module is not None
        scope.start = scope.stop = len(self._tape.ops)
        scope.args = tuple([self._record_value(value) for value in args])
        if kwargs:
            scope.kwargs = {name: self._record_value(value) for name, value in kwargs.items()}
        if self._observer is not None:
            with torch._C.DisableTorchFunction():
                self._observer.module_starts(scope, (args, kwargs), self._written_op)
        self._tape.calls.append(scope)
        self._writer.scope = scope
        try:
            # Not `module(...)`: the intercept of that call has led here.
            if has_joint_hooks(module):
                with collectives.with_joint_hooks(module):
                    output = module._call_impl(*args, **kwargs)
            else:
                output = module._call_impl(*args, **kwargs)
            # Asked first: what is recorded below refers to the output as well.
            is_referenced = (
                type(output) is not Tensor or sys.getrefcount(output) > REFERENCES_OF_LOCAL
            )
            scope.is_sole = not is_referenced and _is_tracked_alone(output)
            scope.context = self._writer.context()
            scope.output = self._record_value(output)
            if self._observer is not None:
                with torch._C.DisableTorchFunction():
                    scope.stop = len(self._tape.ops)
                    self._observer.module_ends(scope, output, self._written_op)
        finally:
            self._writer.scope = outer
            scope.stop = len(self._tape.ops)
        return output

    def _record_value(self, value: Any) -> Any:
        """Record the arguments or the output of a module."""
        kind = type(value)
        if kind is Tensor and (ref := self._values.existing_ref(value)) is not None:
            return ref
        if kind in PLAIN_TYPES:
            return value
        with torch._C.DisableTorchFunction():  # what is read here is not the model's reading
            noted = self._encoder.leniently(value)
            self._writer.writes.begin()
        return noted

    def _written_op(self, tensor: Tensor) -> int | None:
        """Return the op of a tensor that was written to since the op returned it; else None."""
        tracked, writes = self._writer.tracked.get(id(tensor)), self._writer.writes
        if tracked is None or tracked() is not tensor or tracked.ref is None:
            return None
        writes.begin()
        writes.receive(tracked.ref, tensor, tracked.version)
        found = tracked.ref.index if writes.stale else None
        writes.begin()
        return found

    def _substitute_path(self, module: nn.Module) -> str:
        """Return a substitute for the path of a module that belongs to no other."""
        cached = self._strangers.get(id(module))
        if cached is None:
            name = type(module).__name__
            before = sum(type(other).__name__ == name for _, other in self._strangers.values())
            cached = (f"<{name}#{before + 1}>" if before else f"<{name}>", module)
            self._strangers[id(module)] = cached
        return cached[0]
