"""Replacing the parameters and buffers of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bendtrace.interject.gates import Gate, StateGate
from bendtrace.interject.interjection import NodePass
from bendtrace.interject.plan import Plan, Slot
from bendtrace.interject.structure import Leaf
from bendtrace.paths.live import LiveNames
from bendtrace.paths.naming import dotted
from bendtrace.tape.contexts import Context, current_context
from bendtrace.tape.tape import ModuleCall
from bendtrace.tape.watchers import Stage
from bendtrace.torch_rules.owners import states_of

__all__ = ["States"]


class Host(Protocol):
    """The inserter of a run.

    Attributes:
        stage: the run.
        names: the names of its nodes.
        entry: the grad mode and other modes at the start of the run.
    """

    stage: Stage
    names: LiveNames
    entry: Context

    def put(self, gate: Gate, values: Sequence[Any], frame: FrameType) -> Any:
        """Put a gate on the tape."""

    def require_once(self, path: str) -> None:
        """Raise if the backward pass will run the current code again."""

    def qualified(self, scope: ModuleCall | None) -> str:
        """Return the qualified name of the module of a call, in the whole model."""


class States:
    """The parameters and buffers with insertions.

    Args:
        plan: the insertions of the run.
        model: the model.
        host: the inserter.

    Attributes:
        slots: the insertions at them, by qualified name.
        made: what the run has replaced so far, and goes on using: names, grad modes and tensors.
    """

    def __init__(self, plan: Plan, model: Callable[..., Any], host: Host) -> None:
        self.slots: dict[str, tuple[Slot, ...]] = plan.states()
        self._plan = plan
        self._host = host
        self._names = _state_names(model) if self.slots else {}
        self._known: dict[tuple[tuple[Slot, ...], Context], Tensor] = {}
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
        known = self._known.get(key)
        if known is None:
            shown = next((slot.place.shown for slot in slots if slot.place.shown), "")
            at = NodePass(shown or slots[0].place.matcher.name)
            gate = StateGate(at, slots, Leaf(Tensor, 0), self._plan)
            with torch.set_grad_enabled(key[1].grad and not now.inference):
                known = self._known[key] = self._host.put(gate, (value,), frame)
            self.made += at.path, key[1].grad, known
        else:
            self._host.require_once(slots[0].place.matcher.name)
        return known

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
            or (name in (called, label) and _is_held(slot.place.matcher.holder, path))
        )


def _is_held(holder: str | None, here: str) -> bool:
    """Return whether code uses a parameter as that of a call: the call's own, or that around it."""
    return holder is None or holder == here or not here or holder.startswith(f"{here}.")


def _state_names(function: Callable[..., Any]) -> dict[int, tuple[str, ...]]:
    """Return the qualified names of the parameters and buffers of a model, by identity."""
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in states_of(function) if isinstance(function, nn.Module) else ():
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found
