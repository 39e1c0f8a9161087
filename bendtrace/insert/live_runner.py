"""Calls what is inserted at modules and torch functions while the model runs by itself, unrecorded.

A call that has to run live costs little more than the model with native hooks this way. It serves
insertions that can only be at calls of modules, and of functions that torch reports to a mode; for
all others, such as those of numpy, the run is recorded.

Where insertions are, each module has a `_ModuleInterceptor` in its place while such a call runs,
and a `_FunctionInterceptor` receives the calls of functions. They find the path of a call by the
frames around it, which are compared with those seen before:

```
model() -> forward -> layer() -> interceptor -> layer's own call -> gate -> insertion
           `--------- frames ---------'
```
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_testing_overrides

from bendtrace.insert.gates import AfterGate
from bendtrace.insert.inserter import UNNAMED, LiveInserter, NodeSlots
from bendtrace.insert.interjection import subclasses_of
from bendtrace.insert.leaves import LeafShape
from bendtrace.insert.plan import InsertionPlan, Slot
from bendtrace.insert.resolver import Knowledge
from bendtrace.insert.selector_algebra import Layers
from bendtrace.insert.selector_naming import FunctionSelector
from bendtrace.insert.where import Selected
from bendtrace.log.path_views import Candidate
from bendtrace.python.internals import internal
from bendtrace.python.sites import PACKAGE, TORCH, Site, SiteTable
from bendtrace.record.module_proxy import REDIRECTING, call_itself
from bendtrace.record.op_names import base_name_of
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall
from bendtrace.watch.functions import (
    DESCEND,
    SPECIAL,
    OpOverload,
    OpOverloadPacket,
    ScriptModule,
    inner_twin,
)
from bendtrace.watch.intercepts import INTERCEPT_CODES, running_compiled_code
from bendtrace.watch.monkeypatches import may_be_patched, original_of
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
# A recursion has another place at each depth, and on each way to it: to find one again among more
# would take longer than to look at its frames.
_MOST_PLACES = 256
# Functions that compile what they are given, which no mode may see; and the call of an autograd
# function, which recorders may follow (`watch/intercepts.py`).
_UNSEEN_INSIDE = frozenset(
    {"cond", "while_loop", "scan", "associative_scan", "flex_attention", "apply"}
)
_RECOMPUTES = os.path.join(TORCH, "utils", "checkpoint.py")
_NOT_OF_MODELS = (TORCH, PACKAGE)


class LiveRunner:
    """Runs a model with insertions at calls of its modules, and of torch functions."""

    def __init__(
        self,
        knowledge: Knowledge,
        plan: InsertionPlan,
        modules: list[nn.Module],
        functions: _FunctionPlaces,
    ) -> None:
        self._knowledge = knowledge
        self._model: Any = knowledge.model
        self._plan = plan
        self._modules = modules
        self._functions = functions
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

        The run is the one that the call is likely to be like, for reports; None if none is.
        """
        with _lock:
            run = self._idle.pop() if self._idle else None
        if run is None:
            run = _InsertionRun(self._knowledge, self._plan, self._modules, self._functions)
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
            with run.mode or nullcontext(), _compiled_code(run.mode):
                if self._is_around:
                    frame = sys._getframe()
                    output = run.module(self._model, self._itself, args, dict(kwargs), frame)
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


def _compiled_code(mode: _FunctionInterceptor | None) -> AbstractContextManager[None]:
    """Return a context in which a mode sees what torch.compile has compiled."""
    if mode is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return running_compiled_code()


def runner_of(knowledge: Knowledge, plan: InsertionPlan) -> LiveRunner | None:
    """Return a runner of a model with insertions; None if some need a recorded run."""
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
    functions = _FunctionPlaces()
    for slot in plan.slots:
        modules = _modules_at(knowledge, slot, parts, functions)
        if modules is None:
            return None
        found.update((id(module), module) for module in modules)
    if not found.keys() <= set(map(id, parts.values())):
        return None
    if functions:
        if any(run.environment.names & _UNSEEN_INSIDE for run in knowledge.recordings()):
            return None
        if any(functions.may_have(n.function) and _is_met_inside(n) for n in _nodes_of(knowledge)):
            return None
    return LiveRunner(knowledge, plan, [*found.values()], functions)


def _is_called_otherwise(module: nn.Module) -> bool:
    """Return whether the call of a module goes past interceptors, or has been compiled."""
    return type(module).__call__ is not nn.Module.__call__ or REDIRECTING in vars(module)


def _nodes_of(knowledge: Knowledge) -> Iterator[Candidate]:
    for run in knowledge.recordings():
        yield from knowledge.nodes_of(run).candidates.values()


def _is_met_inside(node: Candidate) -> bool:
    """Return whether only the recorder has got to a node, through its own code: see `DESCEND`."""
    return node.site is not None and any(
        code.co_filename.startswith(PACKAGE) for code, _ in node.site.chain
    )


def _modules_at(
    knowledge: Knowledge, slot: Slot, parts: dict[str, nn.Module], functions: _FunctionPlaces
) -> list[nn.Module] | None:
    """Return the modules at whose calls an insertion may be; None if a run has to be recorded.

    The parts are modules by qualified name. `functions` receives the functions at whose calls it
    may be.
    """
    matcher = slot.place.matcher
    if slot.place.role == "state" or matcher.needs_output:
        return None
    if isinstance(matcher, Selected) and isinstance(matcher.selector, (FunctionSelector, Layers)):
        if not functions.add_selector(matcher.selector):
            return None
        is_of_modules = isinstance(matcher.selector, Layers)
    else:
        is_of_modules = getattr(matcher, "is_of_modules", False)
        if not is_of_modules:
            return _modules_at_paths(knowledge, slot, functions)
    nodes = (Candidate("", "", part, name, None, None, "") for name, part in parts.items())
    return [node.module for node in nodes if node.module and matcher.matches(node)]


def _modules_at_paths(
    knowledge: Knowledge, slot: Slot, functions: _FunctionPlaces
) -> list[nn.Module] | None:
    matcher = slot.place.matcher
    paths = getattr(matcher, "paths", None) or (getattr(matcher, "path", None),)
    found = []
    for path in paths:
        if path is None:
            return None
        at = [knowledge.nodes_of(run).candidates.get(path) for run in knowledge.recordings()]
        nodes = [node for node in at if node is not None]
        modules = {id(node.module): node.module for node in nodes}
        module = next(iter(modules.values()), None)
        if module is None and nodes and slot.place.role == "node":
            if not all(node.module is None and functions.add(node) for node in nodes):
                return None
            continue
        if len(modules) != 1 or module is None:
            return None
        found.append(module)
    return found


class _FunctionPlaces:
    """The torch functions at whose calls insertions may be."""

    def __init__(self) -> None:
        self._bases: set[str] = set()
        self._selectors: list[FunctionSelector | Layers] = []

    def __bool__(self) -> bool:
        return bool(self._bases or self._selectors)

    def add(self, node: Candidate) -> bool:
        """Add the function of a known node; return whether torch reports its calls."""
        self._bases.add(node.base)
        return _is_reported(node.function)

    def add_selector(self, selector: FunctionSelector | Layers) -> bool:
        """Add what a selector selects; return whether torch reports the calls of all of these."""
        self._selectors.append(selector)
        if isinstance(selector, FunctionSelector):
            return all(map(_is_reported, selector.functions))
        # A function of autograd is one of them if it has the name of a layer.
        classes = subclasses_of(torch.autograd.Function)
        named = (Candidate("", "", None, "", one.apply, None, "") for one in classes)
        return not any(map(selector.matches, named))

    def may_have(self, function: Any) -> bool:
        """Return whether insertions may be at calls of a function."""
        # A path belongs to a place in the code, whichever function of that name is called there.
        node = Candidate("", "", None, "", function, None, "")
        return _is_reported(function) and (
            base_name_of(function) in self._bases or any(s.matches(node) for s in self._selectors)
        )


def _is_reported(function: Any) -> bool:
    """Return whether torch reports the calls of a function to modes, and recordings name them."""
    try:
        if function in SPECIAL or function in UNNAMED:
            return False
    except TypeError:  # it is not hashable
        return False
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return True
    if isinstance(function, FunctionType):
        return function in get_testing_overrides() or function in vars(Tensor).values()
    owner = function if isinstance(function, BuiltinFunctionType) else None
    owner = getattr(function, "__objclass__", owner)  # the class of a method
    return owner is not None and str(owner.__module__).split(".")[0] == "torch"


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


class _FunctionInterceptor(TorchFunctionMode):
    """Takes the calls of functions at which insertions may be."""

    def __init__(self, run: _InsertionRun, places: _FunctionPlaces) -> None:
        super().__init__()
        self._run = run
        self._places = places
        self._wanted: dict[Any, bool] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if may_be_patched(func):  # torch finds a function by its name: it would be called twice
            func = original_of(func, sys._getframe(1))
        wanted = self._wanted.get(func)
        if wanted is None:
            wanted = self._wanted[func] = self._places.may_have(func)
        if _local.run is not self._run or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if wanted:
            return self._run.function(func, args, kwargs, sys._getframe(1))
        if func in DESCEND:  # with nodes that no run has shown yet
            with self:
                return inner_twin(func)(*args, **kwargs)
        return func(*args, **kwargs)


class _CallerFrame(NamedTuple):
    """A frame around the call of a module."""

    code: CodeType  # what runs in it
    at: int  # the instruction
    module: nn.Module | None  # the module that it calls, if it is torch's own code for that


class _CallPlace:
    """Where a module or a function is called."""

    __slots__ = ("gate", "inner", "is_inside", "is_recomputed", "outer", "scope", "site", "spot")

    def __init__(
        self, frames: tuple[_CallerFrame, ...], scope: ModuleCall, spot: NodeSlots | None
    ) -> None:
        outermost = len(frames)
        while outermost and frames[outermost - 1].code.co_filename.startswith(_NOT_OF_MODELS):
            outermost -= 1
        # The frames around the call, innermost first, up to the model's own outermost one.
        self.inner: tuple[_CallerFrame, ...] = frames[:outermost]
        self.outer: tuple[_CallerFrame, ...] = frames[outermost:]  # those around them
        self.scope: ModuleCall = scope  # the call of the module; for a function, that around it
        # What is inserted there; None for a function that has not been called there.
        self.spot: NodeSlots | None = spot
        # For a function, the place of the call in the code of the module; None for a module.
        self.site: Site | None = None
        self.gate: AfterGate | None = None  # receives the result; None if more has to be done
        files = [one.code.co_filename for one in frames]
        # True if the call is inside of something that is one op.
        self.is_inside: bool = any(file.startswith(AS_ONE) for file in files)
        # True if the backward pass does it again, if there is one.
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
    """One call of the model after the other, with insertions at calls of modules and functions."""

    def __init__(
        self,
        knowledge: Knowledge,
        plan: InsertionPlan,
        modules: list[nn.Module],
        functions: _FunctionPlaces,
    ) -> None:
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
        self._stage = _UnrecordedStage(root)
        self._inserter.begins(self._stage)
        self._whole = ModuleCall("", model, 0, root, 0)
        self._inserter.names.call(self._whole, (), {})
        # Receives the calls of functions; None if nothing is inserted at any.
        self.mode: _FunctionInterceptor | None = None
        if functions:
            self.mode = _FunctionInterceptor(self, functions)
        # The places keep the code of their frames alive, so that no number is used again.
        self._calls: dict[tuple[Any, int, int], list[_CallPlace]] = {}
        # Where modules are called, by the identity of the module.
        self.places: dict[int, list[_CallPlace]] = {id(module): [] for module in modules}
        self.outermost: FrameType | None = None  # the model's own in this call, if known yet
        self.outer: tuple[_CallerFrame, ...] = ()  # the frames around it

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
        """Call a module by `own`, and what is inserted there."""
        places = self.places[id(module)]
        place = self._known(places, frame)
        if place is None:
            place = self._place(module, frame)
            places.append(place)
        spot = place.spot
        assert spot is not None
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

    def _known(self, places: list[_CallPlace], frame: FrameType) -> _CallPlace | None:
        """Return the place that a frame is at, if it is one of these."""
        for place in places:
            if place.is_at(frame, self):
                return place
        if len(places) >= _MOST_PLACES:
            places.clear()
        return None

    def _through(
        self,
        place: _CallPlace,
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

    def function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Call a torch function, and what is inserted there; see `module`."""
        places = self._calls.setdefault((function, id(frame.f_code), frame.f_lasti), [])
        place = self._known(places, frame)
        if place is None:
            frames, scope = self._caller(None, frame)
            place = _CallPlace(frames, scope, None)
            place.site = self._sites.find(frame)
            places.append(place)
        spot = place.spot
        if place.is_inside or (spot is not None and not spot.slots):
            return function(*args, **kwargs)
        if place.gate is None or spot is None or spot.written(args, kwargs) is not None:
            return self._function_through(place, function, args, kwargs, frame)
        path = spot.candidate.path
        try:
            output = function(*args, **kwargs)
        except Exception:
            self._inserter.raised.add(path)
            raise
        place.gate.counts = path not in self._inserter.raised
        spot.number += 1
        if type(output) is Tensor:
            return _call_gate(place.gate, (output,))
        number = spot.number - 1
        return self._inserter.take_output(spot, number, args, kwargs, output, frame, place.scope)

    def _function_through(
        self, place: _CallPlace, function: Any, args: Any, kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Call a function as the inserter does in a recorded run."""
        stage, outer = self._stage, (self._stage.scope, self._stage.current_site)
        stage.scope, stage.current_site = place.scope, place.site
        if place.is_recomputed:
            self._inserter.recomputed(True)
        try:
            output = self._inserter.op(function, args, kwargs, frame, _call_function)
            if place.spot is None:
                place.spot = self._inserter.spot_of_op(place.scope, place.site, function)
                place.gate = self._gate_of(place, place.spot)
            return output
        finally:
            if place.is_recomputed:
                self._inserter.recomputed(False)
            stage.scope, stage.current_site = outer

    def _caller(
        self, module: nn.Module | None, frame: FrameType | None
    ) -> tuple[tuple[_CallerFrame, ...], ModuleCall]:
        """Return the frames around a call, and the call of a module that is the innermost.

        The module is None for a call of a function.
        """
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
                if inner is not None:
                    assert begun is not None
                    calls.append((inner, begun))
                inner, begun = called, frame
        if inner is not None and inner is not self._model:
            assert begun is not None
            calls.append((inner, begun))
        scope = self._whole
        for called, caller in reversed(calls):
            scope = self._scope(called, self._sites.find(caller), scope)
        # Other functions of torch that call modules may be called in another way in recorded runs:
        # names would differ.
        if scope.module is not None and scope is not self._whole:
            paths = self._knowledge.paths_of(scope.module)
            if self._inserter.names.path(scope) not in paths and len(paths) == 1:
                if any(_is_of_torch(one.code) for one in frames):
                    self._inserter.names.rename(scope, paths[0])
        return tuple(frames), scope

    def _place(self, module: nn.Module, frame: FrameType | None) -> _CallPlace:
        """Find out where a module is called."""
        frames, scope = self._caller(module, frame)
        spot = self._inserter.spot_of(scope)
        place = _CallPlace(frames, scope, spot)
        if not getattr(module, "inplace", False):
            place.gate = self._gate_of(place, spot)
        return place

    def _gate_of(self, place: _CallPlace, spot: NodeSlots) -> AfterGate | None:
        """Return a gate that needs nothing but the output, and is all there is at a call."""
        slots = spot.after
        is_once = not (place.is_inside or place.is_recomputed)
        if not (slots and slots == spot.slots and not spot.inputs and is_once):
            return None
        if any(not slot.forms <= _PLAIN_FORMS or slot.place.dig for slot in slots):
            return None
        gate = AfterGate(self._inserter.at(spot, 0), slots, LeafShape(Tensor, 0), self._plan)
        gate.counts = True
        return gate

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


def _call_function(function: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType) -> Any:
    return function(*args, **kwargs)


def _call_gate(gate: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a gate: modules and functions that are called in it are no nodes."""
    run, _local.run = _local.run, None
    try:
        return gate(*args)
    finally:
        _local.run = run


class _UnrecordedStage:
    """The stage of an inserter (see `Stage`) in a call that is not recorded."""

    follows_script = False
    is_in_block = False

    def __init__(self, scope: ModuleCall) -> None:
        self.scope: ModuleCall = scope
        self.current_site: Site | None = None

    def site(self, frame: FrameType) -> Site | None:
        return self.current_site

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
