"""Calls what is inserted at the calls of modules while the model runs by itself, unrecorded.

A call that has to run live costs little more than the model with native hooks this way. It serves
insertions that can only be at calls of modules; for all others, the run is recorded.

Where insertions are, each module has a `_ModuleInterceptor` in its place while such a call runs. It
finds the path of the call by the frames around it, which are compared with those seen before:

```
model() -> forward -> layer() -> interceptor -> layer's own call -> gate -> insertion
           `--------- frames ---------'
```
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.insert.gates import AfterGate
from bendtrace.insert.inserter import LiveInserter, NodeSlots
from bendtrace.insert.leaves import LeafShape
from bendtrace.insert.plan import InsertionPlan, Slot
from bendtrace.insert.resolver import Knowledge
from bendtrace.log.path_views import Candidate
from bendtrace.python.internals import internal
from bendtrace.python.sites import PACKAGE, TORCH, Site, SiteTable
from bendtrace.record.module_proxy import REDIRECTING, call_itself
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall
from bendtrace.watch.functions import ScriptModule
from bendtrace.watch.intercepts import INTERCEPT_CODES
from bendtrace.watch.owners import named_modules
from bendtrace.watch.rank_sync import is_joint

# `nn.Module.__call__` asks for it first (seen in torch 2.13), and nothing keeps a reference to it,
# as torch._dynamo does to `__call__` itself: see `_ModuleCall` in `watch/intercepts.py`.
_WRAPPED: Any = internal("torch.nn.Module._wrapped_call_impl.__code__", None, "calls of modules")
# Forms of an insertion that need nothing but a tensor that a module returns.
_PLAIN_FORMS = frozenset({"after", "observes", "permits"})
# Modules that call their parts by one fused function, unless somebody looks.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
# Code that calls other code as one op, and that calls it once more in the backward pass.
AS_ONE = (
    *(os.path.join(TORCH, name, "") for name in ("autograd", "_functorch", "_higher_order_ops")),
    os.path.join(PACKAGE, "watch", ""),
)
_RECOMPUTES = os.path.join(TORCH, "utils", "checkpoint.py")
_NOT_OF_MODELS = (TORCH, PACKAGE)


class LiveRunner:
    """Runs a model with insertions at calls of its modules.

    Args:
        knowledge: what is known of the model.
        plan: the insertions.
        modules: the modules at whose calls they may be.
    """

    def __init__(self, knowledge: Knowledge, plan: InsertionPlan, modules: list[nn.Module]) -> None:
        self._knowledge = knowledge
        self._model: Any = knowledge.model
        self._plan = plan
        self._modules = modules
        self._is_around = any(module is knowledge.model for module in modules)
        self._reported: Recording | None = None
        # The model itself may be redirected, see `redirect_calls`.
        self._stations = [
            _ModuleInterceptor(module) for module in modules if module is not knowledge.model
        ]
        self._idle: list[_InsertionRun] = []

    def call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], recording: Recording | None
    ) -> Any:
        """Call the model; the gates of this thread call the insertions (see `gates.applying`).

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            recording: the run that the call is likely to be like, for reports; None if none is.
        """
        with _lock:
            run = self._idle.pop() if self._idle else None
        if run is None:
            run = _InsertionRun(self._knowledge, self._plan, self._modules)
        outer, _local.run = _local.run, run
        with _lock:
            for mine in self._stations:
                attributes = mine.module.__dict__
                interceptor = attributes.get(REDIRECTING)
                if type(interceptor) is not _ModuleInterceptor:
                    mine.before, mine.users, interceptor = interceptor, 0, mine
                    attributes[REDIRECTING] = mine
                interceptor.users += 1
        try:
            if self._is_around:
                output = run.module(self._model, self._itself, args, dict(kwargs), sys._getframe())
            else:
                output = call_itself(self._model, args, kwargs)
            if recording is not self._reported and recording is not None:
                self._plan.ran(recording)
                self._reported = recording
            for entry in self._plan.entries:
                entry.insertion._tally.limit()
            return output
        finally:
            with _lock:
                for mine in self._stations:
                    attributes = mine.module.__dict__
                    interceptor = attributes.get(REDIRECTING)
                    if type(interceptor) is not _ModuleInterceptor:
                        continue  # somebody else has put something there
                    interceptor.users -= 1
                    if not interceptor.users:
                        if interceptor.before is None:
                            del attributes[REDIRECTING]
                        else:
                            attributes[REDIRECTING] = interceptor.before
            _local.run = outer
            run.ended()
            self._idle.append(run)

    def _itself(self, *args: Any, **kwargs: Any) -> Any:
        return call_itself(self._model, args, kwargs)


_OUTERMOST = LiveRunner.call.__code__


def runner_of(knowledge: Knowledge, plan: InsertionPlan) -> LiveRunner | None:
    """Return a runner of a model with insertions; None if some need a recorded run."""
    modules = _modules_with_insertions(knowledge, plan)
    return None if modules is None else LiveRunner(knowledge, plan, modules)


def _modules_with_insertions(knowledge: Knowledge, plan: InsertionPlan) -> list[nn.Module] | None:
    model: Any = knowledge.model
    if _WRAPPED is None or not isinstance(model, nn.Module) or is_joint(model):
        return None
    parts = dict(named_modules(model))
    if plan.totals or plan.lookup is not None or not plan.joins:
        return None
    for part in parts.values():
        if isinstance(part, (*_FUSED, ScriptModule)) or _is_called_otherwise(part):
            return None
    found: dict[int, nn.Module] = {}
    for slot in plan.slots:
        modules = _modules_at(knowledge, slot, parts)
        if modules is None:
            return None
        found.update((id(module), module) for module in modules)
    if not found.keys() <= set(map(id, parts.values())):
        return None
    return [*found.values()]


def _is_called_otherwise(module: nn.Module) -> bool:
    """Return whether the call of a module goes past interceptors, or has been compiled."""
    return type(module).__call__ is not nn.Module.__call__ or REDIRECTING in vars(module)


def _modules_at(
    knowledge: Knowledge, slot: Slot, parts: dict[str, nn.Module]
) -> list[nn.Module] | None:
    """Return the modules at whose calls an insertion may be; None if it may be elsewhere."""
    matcher = slot.place.matcher
    if slot.place.role == "state" or matcher.needs_output:
        return None
    if getattr(matcher, "is_of_modules", False):
        nodes = (Candidate("", "", part, name, None, None, "") for name, part in parts.items())
        return [node.module for node in nodes if node.module and matcher.matches(node)]
    paths = getattr(matcher, "paths", None) or (getattr(matcher, "path", None),)
    found = []
    for path in paths:
        if path is None:
            return None
        at = [knowledge.nodes_of(run).candidates.get(path) for run in knowledge.recordings()]
        modules = {id(node.module): node.module for node in at if node is not None}
        module = next(iter(modules.values()), None)
        if len(modules) != 1 or module is None:
            return None
        found.append(module)
    return found


class _CurrentRun(threading.local):
    run: _InsertionRun | None = None


_local = _CurrentRun()
_lock = threading.Lock()


class _ModuleInterceptor:
    """Takes the calls of a module while calls with insertions run."""

    __slots__ = ("before", "module", "users")

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module = module
        self.before: Any = None
        self.users: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, frame = _local.run, sys._getframe(1).f_back
        own = self.before or self.module._call_impl
        if run is None or frame is None or id(self.module) not in run.places:
            return own(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch._dynamo cannot handle it as a whole
            return torch._dynamo.disable(run.module)(self.module, own, args, kwargs, frame)
        return run.module(self.module, own, args, kwargs, frame)


class _CallerFrame(NamedTuple):
    """A frame around the call of a module.

    Attributes:
        code: what runs in it.
        at: the instruction.
        module: the module that it calls, if it is torch's own code for that.
    """

    code: CodeType
    at: int
    module: nn.Module | None


class _ModuleCallPlace:
    """Where a module is called.

    Attributes:
        inner: the frames around the call, innermost first, up to the model's own outermost one.
        outer: those around them.
        scope: the call.
        spot: what is inserted there.
        gate: receives what it returns, if that is a tensor; None if more has to be done.
        is_inside: whether the call is inside of something that is one op.
        is_recomputed: whether the backward pass does it again, if there is one.
    """

    __slots__ = ("gate", "inner", "is_inside", "is_recomputed", "outer", "scope", "spot")

    def __init__(
        self, frames: tuple[_CallerFrame, ...], scope: ModuleCall, spot: NodeSlots
    ) -> None:
        outermost = len(frames)
        while outermost and frames[outermost - 1].code.co_filename.startswith(_NOT_OF_MODELS):
            outermost -= 1
        self.inner: tuple[_CallerFrame, ...] = frames[:outermost]
        self.outer: tuple[_CallerFrame, ...] = frames[outermost:]
        self.scope: ModuleCall = scope
        self.spot: NodeSlots = spot
        self.gate: AfterGate | None = None
        files = [one.code.co_filename for one in frames]
        self.is_inside: bool = any(file.startswith(AS_ONE) for file in files)
        self.is_recomputed: bool = _RECOMPUTES in files and not self.is_inside

    def is_at(self, frame: FrameType | None, run: _InsertionRun) -> bool:
        """Return whether a frame, and those around it, are these."""
        called = frame
        for code, at, module in self.inner:
            if frame is None or frame.f_code is not code or frame.f_lasti != at:
                return False
            if module is not None and frame.f_locals["self"] is not module:
                return False
            called, frame = frame, frame.f_back
        if self.inner and called is run.outermost and self.outer == run.outer:
            return True  # what is around this frame was compared before
        outermost = called
        for code, at, module in self.outer:
            if frame is None or frame.f_code is not code or frame.f_lasti != at:
                return False
            if module is not None and frame.f_locals["self"] is not module:
                return False
            frame = frame.f_back
        if frame is None or frame.f_code is not _OUTERMOST:
            return False
        run.outermost, run.outer = outermost, self.outer
        return True


class _InsertionRun:
    """One call of the model after the other, with insertions.

    Args:
        knowledge: what is known of the model.
        plan: the insertions.
        modules: the modules at whose calls they may be.

    Attributes:
        places: where modules are called, by the identity of the module.
        outermost: the model's own outermost frame in this call; None if not known yet.
        outer: the frames around it.
    """

    def __init__(self, knowledge: Knowledge, plan: InsertionPlan, modules: list[nn.Module]) -> None:
        model: Any = knowledge.model
        knowledge.name_nodes()
        self._knowledge = knowledge
        self._model = model
        self._plan = plan
        self._names = {id(module): name for name, module in named_modules(model)}
        root = ModuleCall("", None, 0, None, 0)
        self._sites = SiteTable(INTERCEPT_CODES | {_OUTERMOST})
        self._scopes: dict[tuple[int, int, int], ModuleCall] = {}
        self._inserter = LiveInserter(plan, knowledge.registry, model)
        self._inserter.begins(_UnrecordedStage(root))
        self._whole = ModuleCall("", model, 0, root, 0)
        self._inserter.names.call(self._whole, (), {})
        self.places: dict[int, list[_ModuleCallPlace]] = {id(module): [] for module in modules}
        self.outermost: FrameType | None = None
        self.outer: tuple[_CallerFrame, ...] = ()

    def ended(self) -> None:
        """Forget what belongs to the call."""
        self.outermost = None
        self._inserter.begins_again()

    def module(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """Call a module, and what is inserted there.

        Args:
            module: the module.
            own: calls the module itself.
            args: its positional arguments.
            kwargs: its keyword arguments.
            frame: the frame that calls it.
        """
        places = self.places[id(module)]
        for place in places:
            if place.is_at(frame, self):
                break
        else:
            place = self._place(module, frame)
            places.append(place)
        spot = place.spot
        if place.gate is not None:
            number = spot.number
            spot.number += 1
            output = own(*args, **kwargs)
            if type(output) is Tensor:
                return _call_gate(place.gate, (output,))
            return self._inserter.take_output(
                spot, number, args, kwargs, output, frame, place.scope
            )
        if place.is_inside:
            self._inserter.inside(module, place.scope.path)
        elif spot.slots or spot.inputs:
            return self._through(place, own, args, kwargs, frame)
        return own(*args, **kwargs)

    def _through(
        self,
        place: _ModuleCallPlace,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """Call a module as the inserter does in a recorded run."""
        if place.is_recomputed:
            self._inserter.recomputed(True)
        try:
            return self._inserter.module(
                place.scope, args, kwargs, frame, lambda scope, args, kwargs: own(*args, **kwargs)
            )
        finally:
            if place.is_recomputed:
                self._inserter.recomputed(False)

    def _place(self, module: nn.Module, frame: FrameType | None) -> _ModuleCallPlace:
        """Find out where a module is called."""
        frames: list[_CallerFrame] = []
        calls: list[tuple[nn.Module, FrameType]] = []
        inner, begun = module, frame
        while frame is not None and frame.f_code is not _OUTERMOST:
            # The frames are read in full for a new place only. Hooks on all modules around would
            # know the callers as well, but would run in each call.
            called = frame.f_locals["self"] if frame.f_code is _WRAPPED else None
            frames.append(_CallerFrame(frame.f_code, frame.f_lasti, called))
            frame = frame.f_back
            if called is not None:
                assert begun is not None
                calls.append((inner, begun))
                inner, begun = called, frame
        if inner is not self._model:
            assert begun is not None
            calls.append((inner, begun))
        scope = self._whole
        for called, caller in reversed(calls):
            scope = self._scope(called, self._sites.find(caller), scope)
        # Other functions of torch that call modules may be called in another way in recorded runs:
        # names would differ.
        paths = self._knowledge.paths_of(module)
        if self._inserter.names.path(scope) not in paths and len(paths) == 1:
            if any(_is_of_torch(one.code) for one in frames):
                self._inserter.names.rename(scope, paths[0])
        spot = self._inserter.spot_of(scope)
        place, slots = _ModuleCallPlace(tuple(frames), scope, spot), spot.after
        is_once = not (place.is_inside or place.is_recomputed)
        is_plain = slots and slots == spot.slots and not spot.inputs and is_once
        if is_plain and not getattr(module, "inplace", False):
            if all(slot.forms <= _PLAIN_FORMS and not slot.place.dig for slot in slots):
                place.gate = AfterGate(
                    self._inserter.at(spot, 0), slots, LeafShape(Tensor, 0), self._plan
                )
                place.gate.counts = True
        return place

    def _scope(self, module: nn.Module, site: Site, outer: ModuleCall) -> ModuleCall:
        # The scope itself keeps all three alive, so that no number is used again.
        key = id(module), id(site), id(outer)
        scope = self._scopes.get(key)
        if scope is None:
            name = self._names.get(id(module), f"<{type(module).__name__}>")
            scope = self._scopes[key] = ModuleCall(name, module, 0, outer, 0)
            scope.site = site
            self._inserter.names.call(scope, (), {})
        return scope


def _is_of_torch(code: CodeType) -> bool:
    """Return whether code is torch's own, but not a module's."""
    return code.co_filename.startswith(TORCH) and not code.co_filename.startswith(_MODULES)


_MODULES = os.path.join(TORCH, "nn", "modules", "")


def _call_gate(gate: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a gate: modules that are called in it are no nodes."""
    run, _local.run = _local.run, None
    try:
        return gate(*args)
    finally:
        _local.run = run


class _UnrecordedStage:
    """The stage of an inserter (see `protocols.Stage`) in a call that is not recorded."""

    follows_script = False
    is_in_block = False

    def __init__(self, scope: ModuleCall) -> None:
        self.scope: ModuleCall = scope

    def site(self, frame: FrameType) -> Site | None:
        return None

    def gate(self, function: Callable[..., Any], args: tuple[Any, ...], frame: FrameType) -> Any:
        return _call_gate(function, args)

    def note_replacement(self, gate: Callable[[Any], Any]) -> None:
        """Do nothing."""

    def pass_through(
        self, function: Callable[[Any], Any], value: Tensor, scope: ModuleCall | None
    ) -> Any:
        return None

    def guard_ownership(self, tensor: Tensor, frame: FrameType) -> None:
        pass

    def block(self, reason: str) -> None:
        pass

    def expect(self, truth: Any, frame: FrameType) -> bool:
        return bool(truth)

    def state(self, tensor: Tensor) -> Captured | None:
        return None
