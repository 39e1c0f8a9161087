"""Adds gates to a run while it is recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError
from bendtrace.insert.gates import (
    AfterGate,
    BeforeGate,
    CountGate,
    EntryGate,
    Gate,
    InputsGate,
    InsteadGate,
    StateGate,
    attempt,
    fits,
    is_shared,
    noted,
    take_back,
    tensor_kind,
)
from bendtrace.insert.gradients import NOT_WRITABLE
from bendtrace.insert.interjection import NodePass
from bendtrace.insert.leaves import LeafShape, refill_value, take_apart, with_values, write_count
from bendtrace.insert.plan import InsertionPlan, LocatedInsertion, Slot
from bendtrace.log.nodes import LiveNames, Registry, bound, dotted, identifier, parameters_of
from bendtrace.log.path_views import Candidate
from bendtrace.python.bytecode import drops
from bendtrace.python.sites import Site, place_text, user_place
from bendtrace.record.op_names import base_name_of
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import PLAIN_TYPES, Captured
from bendtrace.tape.contexts import Context, current_context
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.tape import ModuleCall, Op, meta_of
from bendtrace.watch.code_facts import names_in
from bendtrace.watch.functions import (
    ADDRESS,
    CONTEXT,
    ESCAPES,
    METADATA,
    OF_AUTOGRAD,
    RESHAPES_IN_PLACE,
    SETTERS,
    SHAPES,
    VALUES,
    is_named_in_place,
    is_torchs_function,
    name_of,
    works_on_containers,
)
from bendtrace.watch.owners import is_leaf_module, named_modules, states_of
from bendtrace.watch.provenance import is_torchs
from bendtrace.watch.writes import storage_of

if TYPE_CHECKING:
    from bendtrace.insert.splicer import Splicer

Run = Callable[..., Any]
Undo = Callable[[], None]

# Kinds without a value that a node of the tree represents.
UNNAMED = frozenset(
    {*CONTEXT, *METADATA, *SHAPES, *ESCAPES, *SETTERS, ADDRESS, Tensor.tolist, Tensor.__setitem__}
)


class NodeSlots:
    """A node of the run, and the slots at it."""

    __slots__ = (
        "after", "before", "candidate", "inputs", "instead", "number", "place", "receivers", "seen",
        "slots",
    )  # fmt: skip

    def __init__(self, candidate: Candidate, plan: InsertionPlan, scope: ModuleCall | None) -> None:
        self.candidate: Candidate = candidate
        self.place: str | ModuleCall | None = scope  # before anyone asks: the call around it
        self.number: int = 0  # passes that have begun
        self.seen: bool = False  # whether its output is known
        self.meet(plan)

    def meet(self, plan: InsertionPlan) -> None:
        """Find the slots at the node."""
        candidate = self.candidate
        self.slots: tuple[Slot, ...] = plan.slots_at("node", candidate)
        self.inputs: tuple[Slot, ...] = (
            plan.slots_at("input", candidate) if candidate.function is None else ()
        )
        receivers = _slots_with(self.slots, "backward")
        self.receivers: tuple[Slot, ...] = () if candidate.function in OF_AUTOGRAD else receivers
        self.before: tuple[Slot, ...] = _slots_with(self.slots, "before")
        self.instead: tuple[Slot, ...] = _slots_with(self.slots, "instead")
        forms = ("after", "backward") if self.receivers else ("after",)
        self.after: tuple[Slot, ...] = _slots_with(self.slots, *forms)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the tensor that the node works on in place, if the insertions need it."""
        if not (self.before or self.receivers or self.instead) and all(
            "observes" in slot.forms for slot in self.after
        ):
            return None
        return inplace_target(self.candidate, args, kwargs)


def _slots_with(slots: tuple[Slot, ...], *forms: str) -> tuple[Slot, ...]:
    return tuple(slot for slot in slots if not slot.forms.isdisjoint(forms))


# The interfaces between a recorder and an inserter, which may add its own ops to a run.


class Stage(Protocol):
    """The interface that a recorder offers to an inserter."""

    @property
    def scope(self) -> ModuleCall:
        """The module call that the run is in."""

    def site(self, frame: FrameType) -> Site | None:
        """Return the site of `frame`."""

    def gate(self, function: Callable[..., Any], args: tuple[Any, ...], frame: FrameType) -> Any:
        """Record a call of `function` on the tape as one op, and return its result."""

    @property
    def follows_script(self) -> bool:
        """Return whether the run repeats earlier work (see `record/script.py`)."""

    @property
    def is_in_block(self) -> bool:
        """Return whether the run is in a block that the backward pass runs again."""

    def note_replacement(self, gate: Callable[[Any], Any]) -> None:
        """Note the gate that has let a function replace a result (see `pass_through`)."""

    def pass_through(
        self, function: Callable[[Any], Any], value: Tensor, scope: ModuleCall | None
    ) -> Any:
        """Let a function replace a result of a node, without another op.

        The scope is the call that returned it; None for an op. Return what the function returned;
        None if only an op can tell of it: the function was not called, or has returned a tensor
        that the run has already.
        """

    def guard_ownership(self, tensor: Tensor, frame: FrameType) -> None:
        """Guard that a tensor which a gate has returned is none that the model may compare to."""

    def block(self, reason: str) -> None:
        """Have the recording never be replayed."""

    def expect(self, truth: Any, frame: FrameType) -> bool:
        """Return a truth value from a gate; replays continue only while it is the same."""

    def state(self, tensor: Tensor) -> Captured | None:
        """Return the captured value for a tensor, if it existed before the run."""


class Inserter(Protocol):
    """Is called at each node of a run, and may emit ops before, after and instead of it."""

    pending: list[Sequence[Any]]  # the values that it needs again, once what is running is over
    code: Mapping[str, Any]  # what it has followed like the model's code, by name

    @property
    def sees_inputs(self) -> bool:
        """Return whether it may tell apart how the arguments of the function are passed."""

    def begins(self, stage: Stage) -> None:
        """Called before the run."""

    def starts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called with the arguments of the function; returns those to use."""

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Called with the output of the function; returns the output of the run."""

    def ended(self) -> None:
        """Called after the function has returned or raised."""

    def module(
        self, scope: ModuleCall, args: Any, kwargs: dict[str, Any], frame: FrameType, run: Run
    ) -> Any:
        """Run the call of a module, which `run` makes: scope, arguments and keyword arguments."""

    def op(
        self, function: Any, args: Any, kwargs: dict[str, Any], frame: FrameType, run: Run
    ) -> Any:
        """Run the call of a function, which `run` makes: function, arguments, keywords, frame."""

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Called before arithmetic on traced scalars is recorded on the tape."""

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Return whether there are insertions inside the call of a module."""

    def inside(self, module: nn.Module, path: str) -> None:
        """Called when a module is called inside a function that is recorded as one op."""

    @property
    def exchanges_state(self) -> bool:
        """Return whether parameters or buffers are exchanged in the run."""

    def recomputed(self, entering: bool) -> None:
        """Called when a block begins or ends that the backward pass runs again, unwatched."""


class LiveInserter:
    """An `Inserter` that adds the gates of a plan to one run.

    The registry gives the names of nodes, as in all trees of the model. If the function is a part
    of the model, its position says where. For a method of the model, `path_of` gives the paths of
    modules from qualified names. A splicer splices insertions into known code where it can; without
    one, each insertion is an op.
    """

    # What it has followed like the model's code, by name: nothing.
    code: Mapping[str, Any] = MappingProxyType({})
    stage: Stage
    names: LiveNames  # names of its nodes
    entry: Context  # the grad mode and other modes at the start of the run

    def __init__(
        self,
        plan: InsertionPlan,
        registry: Registry,
        function: Callable[..., Any],
        position: PartPosition | None = None,
        path_of: Callable[[str], str] | None = None,
        splicer: Splicer | None = None,
    ) -> None:
        self._splicer = splicer
        self._has_spliced = False
        self._position = position
        self._path_of = path_of
        self.plan = plan
        self._registry = registry
        self._function = function
        self._spots: dict[str, NodeSlots] = {}
        self.pending: list[Sequence[Any]] = []  # values needed again once what runs is over
        self.raised: set[str] = set()  # paths of functions that raised: no gate counts their passes
        self._undo: list[Undo] = []  # of the arguments of a function
        self._recomputed = 0  # how many checkpointed blocks the run is in
        self._model = function if position is None else position.model
        self._states = StateInsertions(plan, self._model, self)
        self.pending.append(self._states.made)
        self._has_output_slots = any(
            slot.place.matcher.needs_output for slot in plan.slots if slot.place.role == "node"
        )

    @property
    def sees_inputs(self) -> bool:
        """Return whether an insertion receives arguments as they are passed."""
        return self.plan.sees_inputs

    @property
    def passes(self) -> dict[str, int]:
        """The number of passes so far, by node."""
        return {path: spot.number for path, spot in self._spots.items()}

    # Being asked

    def begins(self, stage: Stage) -> None:
        """Prepare for a run (see `Inserter`)."""
        self.stage = stage
        prefix = "" if self._position is None else self._position.path
        self.names = LiveNames(self._registry, self._function, stage.scope, prefix, self._path_of)
        self.entry = current_context()

    def starts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the inputs of a function (see `Inserter`)."""
        if isinstance(self._function, nn.Module):
            return args, kwargs
        self.names.function(args, kwargs)
        spot = self._root = self._spot("", "forward", self.stage.scope)
        if self.plan.lookup is not None:
            inputs = self.names.arguments(self.stage.scope, args, kwargs)
            self._meet(spot, self.plan.lookup.call("", "", "", inputs))
        spot.number += 1
        args, kwargs = self._before(spot, self.stage.scope, args, kwargs, frame)
        return self._enter(spot, args, kwargs, frame, None, self._undo)

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Replace the output of a function (see `Inserter`)."""
        if isinstance(self._function, nn.Module):
            return output
        if self._states:
            output = self._states.exchanged(output, frame)
        return self._after(self._root, self._root.number - 1, (), {}, output, frame)

    def ended(self) -> None:
        """Put back what a function was given in lists (see `Inserter`)."""
        self._put_back(self._undo)

    def module(
        self,
        scope: ModuleCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        run: Run,
    ) -> Any:
        """Run the call of a module (see `Inserter`)."""
        path = self.names.call(scope, args, kwargs)
        if self._states:
            args, kwargs = self._states.exchanged((args, kwargs), frame)
        spot = self._spots.get(path) or self.spot_of(scope)
        if (lookup := self.plan.lookup) is not None:
            inputs = self.names.arguments(scope, args, kwargs)
            module = self.qualified(scope)
            relative = self.names.relative(scope) if path else ""
            own = scope.module
            states = () if own is None else (*own._parameters, *own._buffers)
            self._meet(spot, lookup.call(path, relative, module, inputs, states))
        number = spot.number
        spot.number += 1
        written = spot.written(args, kwargs)
        undo: list[Undo] = []
        try:
            if spot.before or spot.inputs:
                args, kwargs = self._before(spot, scope, args, kwargs, frame)
            if spot.receivers or written is not None:
                args, kwargs = self._enter(spot, args, kwargs, frame, written, undo)
            before = self._inputs_before(spot, args, kwargs, frame)
            self.pending.append(self._needed_after(*before, written))
            try:
                if spot.instead:
                    output = self._instead(spot, number, args, kwargs, frame)
                else:
                    output = run(scope, args, kwargs)
            finally:
                self.pending.pop()
            if self._states:
                output = self._states.exchanged(output, frame, scope)
            return self._after(spot, number, *before, output, frame, written, scope)
        finally:
            if undo:
                self._put_back(undo)

    # Where calls are met without a recorder (see `live_runner.py`)

    def spot_of(self, scope: ModuleCall) -> NodeSlots:
        """Return what is inserted at a call of a module that has its name."""
        path = self.names.path(scope)
        spot = self._spots.get(path)
        if spot is None:
            base = identifier(self.names.relative(scope)) if path else ""
            spot = self._spot(path, base, scope)
        return spot

    def spot_of_op(self, scope: ModuleCall, site: Site | None, function: Any) -> NodeSlots:
        """Return what is inserted at a call of a function that the run has made."""
        return self._spots[self.names.op(scope, site, function, ())[0]]

    def take_output(
        self, spot: NodeSlots, number: int, args: tuple[Any, ...], kwargs: dict[str, Any],
        output: Any, frame: FrameType, scope: ModuleCall,
    ) -> Any:  # fmt: skip
        """Replace the output of a module before which nothing is inserted."""
        return self._after(spot, number, args, kwargs, output, frame, None, scope)

    def begins_again(self) -> None:
        """Prepare for the next run in the same place."""
        for spot in self._spots.values():
            spot.number = 0
        self.raised.clear()
        self._states.made.clear()
        self.pending[:] = [self._states.made]

    def op(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType,
        run: Run,
    ) -> Any:  # fmt: skip
        """Run the call of a function (see `Inserter`)."""
        given = args, kwargs
        if self._states:
            args, kwargs = self._states.exchanged(given, frame)
        if function in UNNAMED:
            return self._run(run, function, args, kwargs, frame)
        stage, names = self.stage, self.names
        scope, site = stage.scope, stage.site(frame)
        states = [] if names.knows(scope, site, function) else self._labels(given)
        path, base = names.op(scope, site, function, states)
        # Python takes the former before they could be replaced. What is inserted sees the same in
        # each call, and containers of the state are followed only from the second one or so on.
        if function in VALUES or works_on_containers(function):
            return run(function, args, kwargs, frame)
        spot = self._spots.get(path)
        if spot is None:
            candidate = Candidate(
                path, base, None, "", function, scope.module, self.qualified(scope), site
            )
            candidate.uses_parameter = any(
                isinstance(tensor, nn.Parameter) for tensor in _tensors_among(given)
            )
            spot = self._spots[path] = NodeSlots(candidate, self.plan, scope)
            if self.plan.lookup is not None:
                self._meet(spot, self.plan.lookup.op(candidate))
        number = spot.number
        spot.number += 1
        written = spot.written(args, kwargs)
        if name_of(function) == "requires_grad_" and not drops(frame):
            written = None  # its result is what the model goes on with, and no value has changed
        # An op that only reshapes a tensor in place can be let through: no op has saved what it
        # changes.
        copied = written
        if name_of(function) in RESHAPES_IN_PLACE or (
            written is not None and overlaps(written, (*args, *kwargs.values()))
        ):
            copied = None
        undo: list[Undo] = []
        try:
            if spot.before:
                args, kwargs = self._before(spot, scope, args, kwargs, frame)
            if spot.receivers or copied is not None:
                args, kwargs = self._enter(spot, args, kwargs, frame, copied, undo)
            before = self._inputs_before(spot, args, kwargs, frame)
            self.pending.append(self._needed_after(*before, written))
            try:
                if spot.instead:
                    output = self._instead(spot, number, args, kwargs, frame)
                else:
                    output = self._run(run, function, args, kwargs, frame)
            except Exception:
                spot.number -= 1  # a call that raises is not a pass of a node in trees and logs
                self.raised.add(path)
                raise
            finally:
                self.pending.pop()
            return self._after(spot, number, *before, output, frame, written)
        finally:
            if undo:
                self._put_back(undo)

    def _run(
        self, run: Run, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:  # fmt: skip
        """Run a function; explain the error if it may not write into a replaced input."""
        try:
            return run(function, args, kwargs, frame)
        except RuntimeError as error:
            if NOT_WRITABLE not in str(error):
                raise
            raise noted(
                InterjectionError(
                    f"at {user_place(frame)} a tensor is changed in place that is a view of an "
                    "input of a node with a backward interjection: torch cannot separate the "
                    "gradients then",
                    base_name_of(function),
                )
            ) from error

    def leaves(self, op: Op) -> bool:
        """Return whether nothing is inserted at an op that is running (see `record/rows.py`)."""
        spot = self.spot_of_op(op.scope, op.site, op.target)
        return self.plan.lookup is None and not (self._has_output_slots or spot.slots)

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Name arithmetic (see `Inserter`)."""
        self.names.op(self.stage.scope, self.stage.site(frame), function, ())

    @property
    def exchanges_state(self) -> bool:
        """Return whether parameters or buffers are exchanged in the run."""
        return bool(self._states)

    def recomputed(self, entering: bool) -> None:
        """Record that a checkpointed block begins or ends (see `Inserter`)."""
        self._recomputed += 1 if entering else -1

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Return whether values below a call have insertions (see `Inserter`)."""
        if scope.module is None:
            return False
        below = f"{self.names.path(scope)}." if self.names.path(scope) else ""
        inside = frozenset(identifier(name) for name, _ in named_modules(scope.module) if name)
        # A fused op receives parameters as well as its parts do.
        slots = [slot for slot in self.plan.slots if slot.place.role != "state"]
        if any(slot.place.is_below(below, inside) for slot in slots):
            return True
        lookup = self.plan.lookup
        if lookup is not None and lookup.may_be_below(self.names.path(scope), inside):
            return True
        # An observer of all places that match a function must not change the path.
        wanted = {
            slot
            for slot in slots
            if not ("observes" in slot.forms and getattr(slot.place.matcher, "is_broad", False))
        }
        inner = named_modules(scope.module, scope.path)
        return any(
            not wanted.isdisjoint(self._slots_at(module, path))
            for path, module in inner
            if path != scope.path
        )

    def _slots_at(self, module: nn.Module, path: str) -> list[Slot]:
        parts = [identifier(part) for part in path.split(".")] if path else []
        node = Candidate(
            ".".join(parts), parts[-1] if parts else "", module, path, None, None,
            path.rpartition(".")[0],
        )  # fmt: skip
        return [slot for role in ("node", "input") for slot in self.plan.slots_at(role, node)]

    def qualified(self, scope: ModuleCall | None) -> str:
        """Return the qualified name of the module of a call, in the whole model."""
        path = "" if scope is None else scope.path
        if self._position is None or path.startswith("<"):
            return path
        return f"{self._position.name}.{path}" if path else self._position.name

    def inside(self, module: nn.Module, path: str) -> None:
        """Raise if an insertion is at a place without gates (see `Inserter`)."""
        slots = self._slots_at(module, path)
        slots += [
            slot
            for name, listed in self._states.slots.items()
            for slot in listed
            if path and name.rpartition(".")[0] == path
        ]
        if any("permits" not in slot.forms for slot in slots):
            what = path or type(module).__name__
            raise noted(
                InterjectionError(
                    f"{what} is inserted inside something that is recorded as one op (an "
                    "autograd.Function, a transform, bendtrace.opaque), where insertions are "
                    "not supported; leave it out, or accept this with allow_none=True",
                    what,
                )
            )

    # Gates

    def put(self, gate: Gate, values: Sequence[Any], frame: FrameType) -> Any:
        """Put a gate on the tape."""
        self.require_once(gate.at.path, any("backward" in slot.forms for slot in gate.slots))
        given = self.stage.gate(gate, tuple(values), frame)
        gate.counts = gate.at.path not in self.raised
        return given

    def require_once(self, path: str, backward: bool = False) -> None:
        """Raise if the backward pass will run the current code again without what is inserted.

        With `backward`, that receives gradients.
        """
        is_lost = self._recomputed or (backward and self.stage.is_in_block)
        if is_lost and torch.is_grad_enabled():
            raise noted(
                InterjectionError(
                    f"{path or '<root>'} is inside torch.utils.checkpoint, which runs it again "
                    "in the backward pass without the insertions: switch checkpointing off",
                    path,
                )
            )

    def _meet(self, spot: NodeSlots, entries: list[LocatedInsertion]) -> None:
        """Insert what names have turned out to mean at a node."""
        if entries:
            self.plan.add(entries)
            spot.meet(self.plan)
            if not self._states and self.plan.states():
                self._states = StateInsertions(self.plan, self._model, self)
                self.pending[0] = self._states.made  # not at the end, where nodes take theirs away

    def settle(self, recording: Recording) -> None:
        """Have a complete run decide what names mean.

        Raise `NodePathError` if a name is not one of the run, or ambiguous.
        """
        lookup = self.plan.lookup
        if lookup is None or recording.error is not None:
            return
        if self._path_of is None:
            lookup.settle(recording)
        else:
            lookup.require_names()

    def _spot(self, path: str, base: str, scope: ModuleCall) -> NodeSlots:
        outer = scope.parent
        candidate = Candidate(
            path, base, scope.module, self.qualified(scope), None,
            None if outer is None else outer.module, self.qualified(outer),
            scope.site,
        )  # fmt: skip
        spot = self._spots[path] = NodeSlots(candidate, self.plan, outer)
        return spot

    def at(self, spot: NodeSlots, number: int) -> NodePass:
        """Return a pass of a node."""
        node = spot.candidate
        if not isinstance(spot.place, str):
            spot.place = place_of_node(node.site, spot.place)
        return NodePass(
            node.path, number, node.module, node.function, node.scope_path, spot.place,
            node.qualified_name,
        )  # fmt: skip

    def _before(
        self,
        spot: NodeSlots,
        scope: ModuleCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = self._input_places(spot, scope, args, kwargs)
        slots = (*spot.before, *places)
        if not slots:
            return args, kwargs
        if all("blind" in slot.forms for slot in slots):
            self.put(CountGate(self.at(spot, spot.number - 1), slots, self.plan), (), frame)
            return args, kwargs
        shape, values = take_apart((args, kwargs), objects=bool(spot.before))
        gate = BeforeGate(self.at(spot, spot.number - 1), slots, shape, self.plan, places)
        return self._arguments_through(gate, shape, values, args, kwargs, frame)

    def _enter(
        self,
        spot: NodeSlots,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        written: Tensor | None,
        undo: list[Undo],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that a node works on: aliases of tensors, and a copy of one.

        The node receives its own lists and dicts, since it may change them. The tensor that it
        works on in place is `written`, if it has to be copied. `undo` receives what puts the former
        tensors back into lists and dicts.
        """
        if not spot.receivers and written is None:
            return args, kwargs
        shape, values = take_apart((args, kwargs), objects=False)
        number = next((i for i, value in enumerate(values) if value is written), None)
        gate = EntryGate(self.at(spot, spot.number - 1), spot.receivers, shape, self.plan, number)
        given = self._through(gate, (args, kwargs), values, values, frame)
        if given is None:
            return args, kwargs
        exchanged: tuple[tuple[Any, ...], dict[str, Any]]
        exchanged = refill_value((args, dict(kwargs)), shape, given[1], undo)
        if undo:
            self.pending.append(values)
        return exchanged

    def _put_back(self, undo: list[Undo]) -> None:
        """Put the tensors back that lists and dicts held before a node."""
        if undo:
            self.pending.pop()
        while undo:
            undo.pop()()

    def _after(
        self,
        spot: NodeSlots,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        frame: FrameType,
        written: Tensor | None = None,
        called: ModuleCall | None = None,
    ) -> Any:
        if self.plan.lookup is not None:
            node = spot.candidate
            is_call = node.function is None
            made = self.plan.lookup.output(node.path, node.base, output, is_call=is_call)
            self._meet(spot, made)
        slots = spot.after
        if self._has_output_slots:
            if not spot.seen:
                spot.seen = True
                self._see(spot, output)
            slots = spot.after
        if (not slots and written is None) or (output is None and spot.candidate.function):
            return output  # an assignment to an index returns nothing, and is not a node
        if self._splicer is not None:
            if self.stage.follows_script:
                return output  # it has been through there
            scope = None if spot.candidate.function is not None else called
            given = self._spliced_output(spot, number, output, scope)
            if given is not None:
                self._has_spliced = True
                return given
            self._splicer.is_apart = True
            if self._has_spliced:
                self.stage.block("what is inserted cannot be spliced in")
            self._splicer = None
        whole = any(not slot.place.dig for slot in slots if "after" in slot.forms)
        shape, values = take_apart(output, objects=whole)
        wanted, handed = None, list(values)
        if any("inputs" in slot.forms for slot in slots):
            wanted, inputs = take_apart((args, kwargs))
            handed += inputs
        if written is not None:
            handed.append(written)
        gate = AfterGate(
            self.at(spot, number), slots, shape, self.plan, wanted, written is not None
        )
        given = self._through(gate, (output,), values, handed, frame)
        if given is None:
            return output
        put, changed = given
        return put(output, shape, changed)

    def _spliced_output(
        self, spot: NodeSlots, number: int, output: Any, scope: ModuleCall | None
    ) -> Any:
        """Let the insertions replace an output as a splice does; None where that is impossible."""
        if type(output) is not Tensor:
            return None
        assert self._splicer is not None
        node = spot.candidate
        self.require_once(node.path)
        place = spot.place if isinstance(spot.place, ModuleCall) else None
        gate = self._splicer.gate(node.path, node, node.site, place)
        given, is_alike, may_be_op = None, False, False

        def through(value: Tensor) -> Any:
            nonlocal given, is_alike, may_be_op
            kind, version = tensor_kind(value), write_count(value)
            given = gate(value)
            is_written = write_count(value) != version
            if given is not value:
                is_alike = fits(kind, given, True)
                may_be_op = not is_written and not self._has_spliced
            elif is_written and is_shared(value):
                is_alike = False
            else:
                is_alike = kind is not None and tensor_kind(value) == kind
            return value if may_be_op and not is_alike else given

        replacement = self.stage.pass_through(through, output, scope)
        if given is None or (is_alike and replacement is not None):
            if replacement is not None:
                self.stage.note_replacement(gate)
            return replacement
        if may_be_op:  # which returns this, and calls nothing again
            take_back(gate)
            attempt().answers[node.path, number] = given
            return None
        self._splicer.is_apart = True
        self.stage.block("what is inserted has returned another kind of tensor than the node")
        return given

    def _inputs_before(
        self, spot: NodeSlots, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs that insertions are shown after a node: copies, if it may write."""
        slots = _slots_with(spot.after, "copies")
        if self._has_output_slots:  # it is not known yet whether they are here
            waiting = (s for s in self.plan.slots if s.place.role == "node")
            slots += _slots_with(
                tuple(s for s in waiting if s.place.matcher.needs_output), "copies"
            )
        node = spot.candidate
        if not slots or not may_write(node.module, node.function, args, kwargs):
            return args, kwargs
        shape, values = take_apart((args, kwargs))
        gate = InputsGate(self.at(spot, spot.number - 1), slots, shape, self.plan)
        return self._arguments_through(gate, shape, values, args, kwargs, frame)

    def _arguments_through(
        self,
        gate: Any,
        shape: Any,
        values: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that a gate gives for those of a node."""
        given = self._through(gate, (args, kwargs), values, values, frame)
        if given is None:
            return args, kwargs
        put, changed = given
        exchanged: tuple[tuple[Any, ...], dict[str, Any]] = put((args, kwargs), shape, changed)
        return exchanged

    def _needed_after(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], written: Tensor | None
    ) -> Sequence[Any]:
        """Return the values of a node's inputs that its gates need again after it."""
        if written is None and not any("inputs" in slot.forms for slot in self.plan.slots):
            return ()
        return [*take_apart((args, kwargs), objects=False)[1], written]

    def _instead(
        self, spot: NodeSlots, number: int, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:  # fmt: skip
        """Call the insertion instead of a function."""
        shape, values = take_apart((args, kwargs))
        gate = InsteadGate(self.at(spot, number), spot.instead, shape, self.plan)
        function = spot.candidate.function
        own = function is None or not is_torchs_function(function)
        if own and any(map(_can_be_filled, (*args, *kwargs.values()))):
            gate.given = args, kwargs
            self.stage.block("what is inserted stands for code that may fill its arguments")
        output = self.put(gate, values, frame)
        self.pending.append(output)
        try:
            for tensor in _tensors_among(output):
                self.stage.guard_ownership(tensor, frame)
        finally:
            self.pending.pop()
        return output

    def _through(
        self,
        gate: Any,
        whole: Sequence[Any],
        values: list[Any],
        handed: list[Any],
        frame: FrameType,
    ) -> tuple[Callable[..., Any], list[Any]] | None:
        """Add a gate to the tape; return the values with its results, or None if nothing is new."""
        self.pending.append(whole)
        try:
            given = self.put(gate, handed, frame)
            numbers, put = gate.exchanged, with_values
            if gate.tells_in_place:
                *given, in_place = given
                self.pending.append(given)
                try:
                    put = refill_value if self.stage.expect(in_place, frame) else with_values
                finally:
                    self.pending.pop()
            elif len(numbers) == 1:
                given = (given,)
            self.pending.append(given)
            try:
                for number, value in zip(numbers, given, strict=True):
                    if isinstance(value, Tensor) and value is not values[number]:
                        self.stage.guard_ownership(value, frame)
            finally:
                self.pending.pop()
        finally:
            self.pending.pop()
        changed = list(values)
        for number, value in zip(numbers, given, strict=True):
            changed[number] = value
        if all(new is old for new, old in zip(changed, values, strict=True)):
            return None
        return put, changed

    def _see(self, spot: NodeSlots, output: Any) -> None:
        """Show the output of a node to the insertions that select by it."""
        with torch._C.DisableTorchFunction():
            _, values = take_apart(output, objects=False)
            tensor = next((value for value in values if isinstance(value, Tensor)), None)
            if tensor is not None:
                spot.candidate.shape, spot.candidate.dtype = meta_of(tensor)[:2]
        spot.after += _slots_with(self.plan.slots_after(spot.candidate), "after")

    # Inputs, parameters and buffers

    def _input_places(
        self, spot: NodeSlots, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[Slot, tuple[Any, ...]]:
        """Return the positions, in arguments and keywords, of the inputs with insertions."""
        if not spot.inputs:
            return {}
        owner = self._function if spot.candidate.module is None else spot.candidate.module
        positions = tuple(_InputKeys((0, i)) for i in range(len(args)))
        named = {name: _InputKeys((1, name)) for name in kwargs}
        given = bound(parameters_of(owner), positions, named)
        found: dict[Slot, tuple[Any, ...]] = {}
        for name, where in given.items():
            node = self._registry.reserve(self.names.path(scope), ("input", name), identifier(name))
            for slot in spot.inputs:
                if slot.place.argument == node:
                    keys = _resolve(where, slot.place.dig)
                    if keys is not None:
                        found[slot] = keys
        return found

    def _labels(self, value: Any) -> list[str]:
        """Return the labels of the parameters and buffers in arguments."""
        found = []
        for tensor in _tensors_among(value):
            part = self.stage.state(tensor)
            if part is not None:
                found.append(str(part.label))
        return found


def _can_be_filled(value: Any) -> bool:
    """Return whether a function may write to an argument other than a tensor."""
    if isinstance(value, tuple):
        return any(map(_can_be_filled, value))
    return not (isinstance(value, Tensor) or type(value) in _UNFILLABLE)


_UNFILLABLE = PLAIN_TYPES | TRACED | {FunctionType}


def place_of_node(site: Site | None, scope: ModuleCall | None) -> str:
    """Return the place of a node: each instruction that leads to it, innermost first."""
    found: list[str] = []
    while True:
        for place in () if site is None else site.places:
            if not place.in_torch:
                line, column = place.span[:2]
                found.append(f"{place_text(place.file, line)}:{column}")
        if scope is None:
            return " < ".join(found)
        site, scope = scope.site, scope.parent


class _InputKeys(tuple[Any, ...]):
    """The keys that lead to an argument."""


def _resolve(where: Any, dig: tuple[Any, ...]) -> tuple[Any, ...] | None:
    for position, key in enumerate((*dig, None)):
        if isinstance(where, _InputKeys):
            return (*where, *dig[position:])
        if key is None:
            raise noted(
                InterjectionError(
                    "*args or **kwargs cannot be replaced as a whole, only its elements: name "
                    "one, as in 'args|sub_0' or 'kwargs|name'",
                    "",
                )
            )
        if isinstance(where, dict) and key in where:
            where = where[key]
        elif isinstance(where, tuple) and isinstance(key, int) and key < len(where):
            where = where[key]
        else:
            return None
    return None


def _tensors_among(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_among(item)
    elif type(value) is slice:
        yield from _tensors_among((value.start, value.stop, value.step))
    elif type(value) is dict:
        for item in value.values():
            yield from _tensors_among(item)


# Replacing the parameters and buffers of a model while it runs.


class StateInsertions:
    """The parameters and buffers with insertions."""

    def __init__(self, plan: InsertionPlan, model: Callable[..., Any], host: LiveInserter) -> None:
        self.slots: dict[str, tuple[Slot, ...]] = plan.states()  # at them, by qualified name
        self._plan = plan
        self._host = host
        self._names = _state_names(model) if self.slots else {}
        self._exchanges: dict[tuple[tuple[Slot, ...], Context], Tensor] = {}
        # What the run has replaced so far, and goes on using: names, grad modes and tensors.
        self.made: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self.slots)

    def exchanged(self, value: Any, frame: FrameType, scope: ModuleCall | None = None) -> Any:
        """Replace the parameters and buffers in arguments that have insertions."""
        kind = type(value)
        if kind is tuple or kind is list:
            items = [self.exchanged(item, frame, scope) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return kind(items)
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            new = self.exchanged(parts, frame, scope)
            return value if new is parts else slice(*new)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = [self.exchanged(item, frame, scope) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else kind(*items)
        if kind is dict:
            items = [self.exchanged(item, frame, scope) for item in value.values()]
            if all(new is old for new, old in zip(items, value.values(), strict=True)):
                return value
            return dict(zip(value, items, strict=True))
        if not isinstance(value, Tensor):
            return value
        slots = self._slots_of(value, scope or self._host.stage.scope)
        if not slots:
            return value
        now = current_context()
        key = slots, now._replace(grad=now.grad or self._host.entry.grad)
        cached = self._exchanges.get(key)
        if cached is None:
            shown = next((slot.place.shown for slot in slots if slot.place.shown), "")
            at = NodePass(shown or slots[0].place.matcher.name)
            gate = StateGate(at, slots, LeafShape(Tensor, 0), self._plan)
            with torch.set_grad_enabled(key[1].grad and not now.inference):
                cached = self._exchanges[key] = self._host.put(gate, (value,), frame)
            self.made += at.path, key[1].grad, cached
        else:
            self._host.require_once(slots[0].place.matcher.name)
        return cached

    def _slots_of(self, tensor: Tensor, scope: ModuleCall) -> tuple[Slot, ...]:
        """Return the slots at a parameter or buffer used in the code of a call."""
        every = self._names.get(id(tensor), ())
        part = self._host.stage.state(tensor)
        label = "" if part is None else dotted(str(part.label).removeprefix("self."))
        # Of several names, that of the call in which the running module has it.
        here = self._host.qualified(scope)
        called = next((n for n in every if n.rpartition(".")[0] == here), *every[:1] or (label,))
        path = self._host.names.path(scope)
        return tuple(
            slot
            for name in dict.fromkeys((*every, label))
            for slot in self.slots.get(name, ())
            if slot.place.matcher.holder is None
            or (name in (called, label) and _is_in_holder(slot.place.matcher.holder, path))
        )


def _is_in_holder(holder: str | None, here: str) -> bool:
    """Return whether code uses a parameter of its own call, or of a call around it."""
    return holder is None or holder == here or not here or holder.startswith(f"{here}.")


def _state_names(function: Callable[..., Any]) -> dict[int, tuple[str, ...]]:
    """Return the qualified names of the parameters and buffers of a model, by identity."""
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in states_of(function) if isinstance(function, nn.Module) else ():
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found


# Nodes that work in place, and their targets: insertions there have to update that tensor.


def overlaps(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether another argument shares memory with a tensor, which torch may refuse."""
    with torch._C.DisableTorchFunction():
        place = storage_of(tensor)
        return any(
            isinstance(arg, Tensor) and arg is not tensor and storage_of(arg) == place
            for arg in args
        )


def may_write(
    module: nn.Module | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether a call may write to its arguments: torch's own modules say so by a flag."""
    if module is None:
        return _works_in_place(function, args, kwargs) or "out" in kwargs
    return not is_leaf_module(module) or bool(getattr(module, "inplace", False))


def inplace_target(node: Candidate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a node works on in place; None if it does not."""
    if node.module is not None:
        of_torch = type(node.module).__module__.startswith("torch.nn.")
        if not of_torch or not getattr(node.module, "inplace", False):
            return None
    elif not _works_in_place(node.function, args, kwargs):
        return None
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, Tensor):
        return None
    with torch._C.DisableTorchFunction():
        base = given if given._base is None else given._base
        is_leaf = torch.is_grad_enabled() and base.is_leaf and base.requires_grad
        if is_leaf and getattr(node.function, "__name__", "") not in _TAKES_LEAVES:
            return None  # which torch refuses, and so it shall
    return given


# Whether a leaf is one is another thing after these: a run that goes on from there sees it so.
_TAKES_LEAVES = frozenset({"detach_", "requires_grad_"})


def _works_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function, judging by its name and flags, returns its argument, changed."""
    if is_named_in_place(getattr(function, "__name__", "")):
        return True
    position = _flag_position(function)
    if position is None:
        return False
    flag = args[position] if position < len(args) else kwargs.get("inplace", False)
    return flag is True


@functools.cache
def _flag_position(function: Any) -> int | None:
    """Return the position of the flag `inplace` among the arguments of a torch function."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None


# Insertions where only a part of a model is called: a module of it, or a method.


class PartPosition(NamedTuple):
    """The position in a model of a part that is run separately."""

    model: Callable[..., Any]
    name: str  # qualified name of the part
    path: str  # its node path


def refuse_reading(plan: InsertionPlan, method: MethodType) -> None:
    """Raise an `InputError` if a method of the model reads a weight itself that has insertions.

    They would not be called.
    """
    code: Any = getattr(method.__func__, "__code__", None)
    is_users = code is not None and not is_torchs(getattr(method, "__module__", None))
    names = names_in(code) if is_users else frozenset()
    for slot in plan.slots:
        weight = slot.place.matcher.name if slot.place.role == "state" else ""
        if weight and names.issuperset(weight.split(".")):
            raise InputError(
                f"{method.__name__} reads {weight} itself, and what is inserted there is called "
                "in calls of the model and of its modules only: use "
                f"bended.trace(fn={method.__name__!r}, ...).output, or remove the insertion"
            )


def may_apply_in(plan: InsertionPlan, module: nn.Module, position: PartPosition) -> bool:
    """Return whether insertions of a plan may apply to the calls of a part of a model."""
    for slot in plan.slots:
        matcher = slot.place.matcher
        if slot.place.role == "state":
            if matcher.name.startswith(f"{position.name}."):
                return True
            continue
        paths = getattr(matcher, "paths", (getattr(matcher, "path", None),))
        if getattr(matcher, "is_broad", False) or any(
            path is not None and f"{path}.".startswith(f"{position.path}.") for path in paths
        ):
            return True
        for name, inner in named_modules(module, position.name):
            path = ".".join(map(identifier, name.split(".")))
            base = path.rpartition(".")[2]
            scope = name.rpartition(".")[0]
            if matcher.matches(Candidate(path, base, inner, name, None, None, scope)):
                return True
    return False
