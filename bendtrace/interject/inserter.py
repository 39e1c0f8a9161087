"""Putting gates into a run while it is recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.graph.names import base_name_of
from bendtrace.interject.candidate import Candidate
from bendtrace.interject.errors import InterjectionError
from bendtrace.interject.gates import AfterGate, BeforeGate, Gate, InsteadGate, StateGate, noted
from bendtrace.interject.gradients import ALIAS
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.plan import Plan, Slot
from bendtrace.interject.structure import Leaf, filled, refilled, take_apart
from bendtrace.paths.events import bound, parameters_of
from bendtrace.paths.holders import dotted
from bendtrace.paths.live import LiveNames
from bendtrace.paths.naming import Registry, identifier
from bendtrace.recording.contexts import Context, current_context
from bendtrace.recording.functions import (
    CONTEXT,
    ESCAPES,
    METADATA,
    RESHAPES_IN_PLACE,
    SETTERS,
    SHAPES,
    VALUES,
    is_named_in_place,
    name_of,
)
from bendtrace.recording.inserter import Stage
from bendtrace.recording.places import user_place
from bendtrace.recording.tape import ModuleCall

__all__ = ["LiveInserter", "Within", "is_meant_within"]

Run = Callable[..., Any]

# What gives no value that a node of the tree stands for.
_UNNAMED = frozenset(
    {*CONTEXT, *METADATA, *SHAPES, *ESCAPES, *SETTERS, Tensor.tolist, Tensor.__setitem__}
)


# What is given to these has to be the very tensors of the graph.
_GOING_BACK = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})


class Within(NamedTuple):
    """Where in a model a part of it is that is run by itself.

    Attributes:
        model: the model.
        name: qualified name of the part.
        path: its node path.
    """

    model: Callable[..., Any]
    name: str
    path: str


def is_meant_within(plan: Plan, module: nn.Module, within: Within) -> bool:
    """Whether something of a plan is, or may be, in the calls of a part of a model."""
    for slot in plan.slots:
        matcher = slot.place.matcher
        if slot.place.role == "state":
            if matcher.name.startswith(f"{within.name}."):
                return True
            continue
        paths = getattr(matcher, "paths", (getattr(matcher, "path", None),))
        if getattr(matcher, "is_broad", False) or any(
            path is not None and f"{path}.".startswith(f"{within.path}.") for path in paths
        ):
            return True
        for name, inner in module.named_modules(prefix=within.name):
            path = ".".join(map(identifier, name.split(".")))
            base = path.rpartition(".")[2]
            scope = name.rpartition(".")[0]
            if matcher.matches(Candidate(path, base, inner, name, None, None, scope)):
                return True
    return False


class _Spot:
    """A node of the run, and the slots at it."""

    __slots__ = ("after", "before", "candidate", "inputs", "instead", "number", "seen", "slots")

    def __init__(self, candidate: Candidate, plan: Plan) -> None:
        self.candidate = candidate
        self.number = 0  # passes that have begun
        self.seen = False  # whether what it gives is known
        self.slots = plan.slots_at("node", candidate)
        self.inputs = plan.slots_at("input", candidate) if candidate.function is None else ()
        told = () if candidate.function in _GOING_BACK else ("backward",)
        self.before = _with(self.slots, "before", *told)
        self.instead = _with(self.slots, "instead")
        self.after = _with(self.slots, "after", *told)


def _with(slots: tuple[Slot, ...], *forms: str) -> tuple[Slot, ...]:
    return tuple(slot for slot in slots if not slot.forms.isdisjoint(forms))


class LiveInserter:
    """An `Inserter` that puts the gates of a plan into one run.

    Args:
        plan: the insertions.
        registry: gives the names of nodes, as in all trees of the model.
        function: what is run.
        within: where that is, if it is a part of the model.

    Attributes:
        plan: as given.
    """

    def __init__(
        self,
        plan: Plan,
        registry: Registry,
        function: Callable[..., Any],
        within: Within | None = None,
    ) -> None:
        self._within = within
        self.plan = plan
        self._registry = registry
        self._function = function
        self._spots: dict[str, _Spot] = {}
        self._recomputed = 0  # how many checkpointed blocks the run is in
        self._states = plan.states()
        self._exchanged: dict[tuple[tuple[Slot, ...], Context], Tensor] = {}
        model = function if within is None else within.model
        self._state_names = _state_names(model) if self._states else {}
        self._has_output_slots = any(
            slot.place.matcher.needs_output for slot in plan.slots if slot.place.role == "node"
        )

    @property
    def passes(self) -> dict[str, int]:
        """How often each node was come by."""
        return {path: spot.number for path, spot in self._spots.items()}

    # Being asked

    def begins(self, stage: Stage) -> None:
        """Get ready for a run (see `recording.inserter.Inserter`)."""
        self._stage = stage
        prefix = "" if self._within is None else self._within.path
        self._names = LiveNames(self._registry, self._function, stage.scope, prefix)
        self._entry = current_context()

    def starts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Exchange what a function is given (see `recording.inserter.Inserter`)."""
        if isinstance(self._function, nn.Module):
            return args, kwargs
        self._names.function(args, kwargs)
        spot = self._root = self._spot("", "forward", self._stage.scope)
        spot.number += 1
        return self._before(spot, self._stage.scope, args, kwargs, frame)

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Exchange what a function gave (see `recording.inserter.Inserter`)."""
        if isinstance(self._function, nn.Module):
            return output
        if self._states:
            output = self._with_states(output, frame)
        return self._after(self._root, self._root.number - 1, (), {}, output, frame)

    def module(
        self,
        scope: ModuleCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        run: Run,
    ) -> Any:
        """Run the call of a module (see `recording.inserter.Inserter`)."""
        path = self._names.call(scope, args, kwargs)
        if self._states:
            args, kwargs = self._with_states((args, kwargs), frame)
        spot = self._spots.get(path)
        if spot is None:
            base = identifier(self._names.relative(scope)) if path else ""
            spot = self._spot(path, base, scope)
        number = spot.number
        spot.number += 1
        written = _written(spot, args, kwargs)
        if spot.before or spot.inputs or written is not None:
            args, kwargs = self._before(spot, scope, args, kwargs, frame, written)
        if spot.instead:
            output = self._instead(spot, number, args, kwargs, frame)
        else:
            output = run(scope, args, kwargs)
        if self._states:
            output = self._with_states(output, frame, scope)
        return self._after(spot, number, args, kwargs, output, frame, written)

    def op(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType,
        run: Run,
    ) -> Any:  # fmt: skip
        """Run the call of a function (see `recording.inserter.Inserter`)."""
        given = args, kwargs
        if self._states:
            args, kwargs = self._with_states(given, frame)
        if function in _UNNAMED:
            return self._run(run, function, args, kwargs, frame)
        stage, names = self._stage, self._names
        scope, site = stage.scope, stage.site(frame)
        states = [] if names.knows(scope, site, function) else self._labels(given)
        path, base = names.op(scope, site, function, states)
        if function in VALUES:  # Python takes what they give before anybody could exchange it
            return run(function, args, kwargs, frame)
        spot = self._spots.get(path)
        if spot is None:
            candidate = Candidate(
                path, base, None, "", function, scope.module, self._qualified(scope), site
            )
            candidate.uses_parameter = any(
                isinstance(tensor, nn.Parameter) for tensor in _tensors_in(given)
            )
            spot = self._spots[path] = _Spot(candidate, self.plan)
        number = spot.number
        spot.number += 1
        written = _written(spot, args, kwargs)
        # What only reshapes a tensor in place can be let do so: no op has saved what it changes.
        copied = None if name_of(function) in RESHAPES_IN_PLACE else written
        if spot.before or copied is not None:
            args, kwargs = self._before(spot, scope, args, kwargs, frame, copied)
        if spot.instead:
            output = self._instead(spot, number, args, kwargs, frame)
        else:
            output = self._run(run, function, args, kwargs, frame)
        return self._after(spot, number, args, kwargs, output, frame, written)

    def _run(
        self, run: Run, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:  # fmt: skip
        """Run a function; say why if it may not write into what was given another name."""
        try:
            return run(function, args, kwargs, frame)
        except RuntimeError as error:
            if ALIAS not in str(error):
                raise
            raise noted(
                InterjectionError(
                    f"at {user_place(frame)} a tensor is changed in place that is a view of what a "
                    "node was given whose gradients an interjection is told of: torch cannot tell "
                    "these gradients from others then",
                    base_name_of(function),
                )
            ) from error

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Name arithmetic (see `recording.inserter.Inserter`)."""
        self._names.op(self._stage.scope, self._stage.site(frame), function, ())

    def recomputed(self, entering: bool) -> None:
        """Note that a checkpointed block begins or ends (see `recording.inserter.Inserter`)."""
        self._recomputed += 1 if entering else -1

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Whether something is inserted below a call (see `recording.inserter.Inserter`)."""
        if scope.module is None:
            return False
        below = f"{self._names.path(scope)}." if self._names.path(scope) else ""
        inside = frozenset(identifier(name) for name, _ in scope.module.named_modules() if name)
        if any(slot.place.is_below(below, inside) for slot in self.plan.slots):
            return True
        # Who looks wherever a function says so is not there to change which way is taken.
        wanted = {
            slot
            for slot in self.plan.slots
            if not ("observes" in slot.forms and getattr(slot.place.matcher, "is_broad", False))
        }
        inner = scope.module.named_modules(prefix=scope.path)
        return any(
            not wanted.isdisjoint(self._slots_at(module, path))
            for path, module in inner
            if path != scope.path
        )

    def _slots_at(self, module: nn.Module, path: str) -> list[Slot]:
        """Return the slots at the calls of a module."""
        parts = [identifier(part) for part in path.split(".")] if path else []
        node = Candidate(
            ".".join(parts), parts[-1] if parts else "", module, path, None, None,
            path.rpartition(".")[0],
        )  # fmt: skip
        return [slot for role in ("node", "input") for slot in self.plan.slots_at(role, node)]

    def _qualified(self, scope: ModuleCall | None) -> str:
        """Return the qualified name of the module of a call, in the whole model."""
        path = "" if scope is None else scope.path
        if self._within is None or path.startswith("<"):
            return path
        return f"{self._within.name}.{path}" if path else self._within.name

    def inside(self, module: nn.Module, path: str) -> None:
        """Refuse what is inserted where no gate can be (see `recording.inserter.Inserter`)."""
        slots = self._slots_at(module, path)
        slots += [
            slot
            for name, listed in self._states.items()
            for slot in listed
            if path and name.rpartition(".")[0] == path
        ]
        if any("permits" not in slot.forms for slot in slots):
            what = path or type(module).__name__
            raise noted(
                InterjectionError(
                    f"{what} is called inside of something that is recorded as one op (an "
                    "autograd.Function, a transform, bendtrace.opaque), where nothing can be "
                    "inserted; leave it out, or permit it with allow_none=True",
                    what,
                )
            )

    # Gates

    def _gate(self, gate: Gate, values: Sequence[Any], frame: FrameType) -> Any:
        """Put a gate on the tape."""
        self._require_once(gate.at.path)
        return self._stage.gate(gate, tuple(values), frame)

    def _require_once(self, path: str) -> None:
        """Refuse what the backward pass will run again."""
        if self._recomputed and torch.is_grad_enabled():
            raise noted(
                InterjectionError(
                    f"{path or '<root>'} is inside torch.utils.checkpoint, which runs it again in "
                    "the backward pass, past what is inserted: switch checkpointing off",
                    path,
                )
            )

    def _spot(self, path: str, base: str, scope: ModuleCall) -> _Spot:
        outer = scope.parent
        candidate = Candidate(
            path, base, scope.module, self._qualified(scope), None,
            None if outer is None else outer.module, self._qualified(outer),
            scope.site,
        )  # fmt: skip
        spot = self._spots[path] = _Spot(candidate, self.plan)
        return spot

    def _at(self, spot: _Spot, number: int) -> NodePass:
        node = spot.candidate
        return NodePass(node.path, number, node.module, node.function, node.scope_path)

    def _before(
        self,
        spot: _Spot,
        scope: ModuleCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        written: Tensor | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Exchange what a node is given."""
        places = self._input_places(spot, scope, args, kwargs)
        slots = (*spot.before, *places)
        if not slots and written is None:
            return args, kwargs
        whole = any("before" in slot.forms for slot in spot.before)
        shape, values = take_apart((args, kwargs), objects=whole)
        number = next((i for i, value in enumerate(values) if value is written), None)
        at = self._at(spot, spot.number - 1)
        gate = BeforeGate(at, slots, shape, self.plan, places, number)
        given = self._through(gate, shape, values, values, frame)
        if given is None:
            return args, kwargs
        put, changed = given
        exchanged: tuple[tuple[Any, ...], dict[str, Any]] = put((args, kwargs), shape, changed)
        return exchanged

    def _after(
        self,
        spot: _Spot,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        frame: FrameType,
        written: Tensor | None = None,
    ) -> Any:
        """Exchange what a node gave."""
        slots = spot.after
        if self._has_output_slots:
            if not spot.seen:
                spot.seen = True
                self._see(spot, output)
            slots = spot.after
        if (not slots and written is None) or (output is None and spot.candidate.function):
            return output  # Python code that assigns to an index gives nothing, and is no node
        whole = any(not slot.place.dig for slot in slots if "after" in slot.forms)
        shape, values = take_apart(output, objects=whole)
        wanted, handed = None, list(values)
        if any("inputs" in slot.forms for slot in slots):
            wanted, inputs = take_apart((args, kwargs))
            handed += inputs
        if written is not None:
            handed.append(written)
        gate = AfterGate(
            self._at(spot, number), slots, shape, self.plan, wanted, written is not None
        )
        given = self._through(gate, shape, values, handed, frame)
        if given is None:
            return output
        put, changed = given
        return put(output, shape, changed)

    def _instead(
        self, spot: _Spot, number: int, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:  # fmt: skip
        """Call what is there instead of a function."""
        shape, values = take_apart((args, kwargs))
        gate = InsteadGate(self._at(spot, number), spot.instead, shape, self.plan)
        return self._gate(gate, values, frame)

    def _through(
        self, gate: Any, shape: Any, values: list[Any], handed: list[Any], frame: FrameType
    ) -> tuple[Callable[..., Any], list[Any]] | None:
        """Put a gate on the tape; return the values with what it gave, None if nothing is new."""
        given = self._gate(gate, handed, frame)
        numbers, put = gate.exchanged, refilled
        if gate.tells_in_place:
            *given, in_place = given
            put = filled if self._stage.expect(in_place, frame) else refilled
        elif len(numbers) == 1:
            given = (given,)
        changed = list(values)
        for number, value in zip(numbers, given, strict=True):
            changed[number] = value
        if all(new is old for new, old in zip(changed, values, strict=True)):
            return None
        return put, changed

    def _see(self, spot: _Spot, output: Any) -> None:
        """Look at what a node gave, for those that are placed by it."""
        with torch._C.DisableTorchFunction():
            _, values = take_apart(output, objects=False)
            tensor = next((value for value in values if isinstance(value, Tensor)), None)
            if tensor is not None:
                spot.candidate.shape, spot.candidate.dtype = tuple(tensor.shape), tensor.dtype
        spot.after += _with(self.plan.slots_after(spot.candidate), "after")

    # Inputs, parameters and buffers

    def _input_places(
        self, spot: _Spot, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[Slot, tuple[Any, ...]]:
        """Return what leads to the inputs that insertions are for, in arguments and keywords."""
        if not spot.inputs:
            return {}
        owner = self._function if spot.candidate.module is None else spot.candidate.module
        positions = tuple(_At((0, i)) for i in range(len(args)))
        named = {name: _At((1, name)) for name in kwargs}
        given = bound(parameters_of(owner), positions, named)
        found: dict[Slot, tuple[Any, ...]] = {}
        for name, where in given.items():
            node = self._registry.reserve(
                self._names.path(scope), ("input", name), identifier(name)
            )
            for slot in spot.inputs:
                if slot.place.argument == node:
                    keys = _resolved(where, slot.place.dig)
                    if keys is not None:
                        found[slot] = keys
        return found

    def _with_states(self, value: Any, frame: FrameType, scope: ModuleCall | None = None) -> Any:
        """Exchange the parameters and buffers in arguments that there are insertions for."""
        kind = type(value)
        if kind is tuple or kind is list:
            items = [self._with_states(item, frame, scope) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return kind(items)
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            new = self._with_states(parts, frame, scope)
            return value if new is parts else slice(*new)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = [self._with_states(item, frame, scope) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else kind(*items)
        if kind is dict:
            items = [self._with_states(item, frame, scope) for item in value.values()]
            if all(new is old for new, old in zip(items, value.values(), strict=True)):
                return value
            return dict(zip(value, items, strict=True))
        if not isinstance(value, Tensor):
            return value
        slots = self._state_slots(value, scope or self._stage.scope)
        if not slots:
            return value
        now = current_context()
        key = slots, now._replace(grad=now.grad or self._entry.grad)
        known = self._exchanged.get(key)
        if known is None:
            shown = next((slot.place.shown for slot in slots if slot.place.shown), "")
            at = NodePass(shown or slots[0].place.matcher.name)
            gate = StateGate(at, slots, Leaf(Tensor, 0), self.plan)
            with torch.set_grad_enabled(key[1].grad and not now.inference):
                known = self._exchanged[key] = self._gate(gate, (value,), frame)
        else:
            self._require_once(slots[0].place.matcher.name)
        return known

    def _state_slots(self, tensor: Tensor, scope: ModuleCall) -> tuple[Slot, ...]:
        """Return the slots at a parameter or buffer, as the code of a call uses it."""
        every = self._state_names.get(id(tensor), ())
        part = self._stage.state(tensor)
        label = "" if part is None else dotted(str(part.label).removeprefix("self."))
        # Of several names, that is the one in a call by which the running module knows it.
        here = self._qualified(scope)
        called = next((n for n in every if n.rpartition(".")[0] == here), *every[:1] or (label,))
        path = self._names.path(scope)
        return tuple(
            slot
            for name in dict.fromkeys((*every, label))
            for slot in self._states.get(name, ())
            if slot.place.matcher.holder is None
            or (name in (called, label) and _is_held(slot.place.matcher.holder, path))
        )

    def _labels(self, value: Any) -> list[str]:
        """What the surroundings call the parameters and buffers in arguments."""
        found = []
        for tensor in _tensors_in(value):
            part = self._stage.state(tensor)
            if part is not None:
                found.append(str(part.label))
        return found


def _is_held(holder: str | None, here: str) -> bool:
    """Whether code uses a parameter as that of a call: the call's own, or that around it."""
    return holder is None or holder == here or not here or holder.startswith(f"{here}.")


class _At(tuple[Any, ...]):
    """What leads to an argument."""


def _resolved(where: Any, dig: tuple[Any, ...]) -> tuple[Any, ...] | None:
    for position, key in enumerate((*dig, None)):
        if isinstance(where, _At):
            return (*where, *dig[position:])
        if key is None:
            raise noted(
                InterjectionError(
                    "the whole of what *args or **kwargs take cannot be exchanged, only what is in "
                    "it: name it, as in 'args|sub_0' or 'kwargs|name'",
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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif type(value) is slice:
        yield from _tensors_in((value.start, value.stop, value.step))
    elif type(value) is dict:
        for item in value.values():
            yield from _tensors_in(item)


def _state_names(function: Callable[..., Any]) -> dict[int, tuple[str, ...]]:
    """Return the qualified names of the parameters and buffers of a model, by identity."""
    found: dict[int, tuple[str, ...]] = {}
    if isinstance(function, nn.Module):
        for listed in (
            function.named_parameters(remove_duplicate=False),
            function.named_buffers(remove_duplicate=False),
        ):
            for name, tensor in listed:
                found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found


def _written(spot: _Spot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a node works on in place, if what is inserted there has to know."""
    if not spot.before and not spot.instead and all("observes" in s.forms for s in spot.after):
        return None
    node = spot.candidate
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
        if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
            return None  # which torch refuses, and so it shall
    return given


def _works_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function, going by its name and flags, gives back what it was given, changed."""
    if is_named_in_place(getattr(function, "__name__", "")):
        return True
    position = _flag_position(function)
    if position is None:
        return False
    flag = args[position] if position < len(args) else kwargs.get("inplace", False)
    return flag is True


@functools.cache
def _flag_position(function: Any) -> int | None:
    """Where a function of torch takes the flag `inplace`."""
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None
