"""Writing what is asked of one part of what a run can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bendtrace.recording.parts import (
    Access,
    Array,
    AttributeKey,
    Part,
    PartKind,
    exact_items,
    exact_members,
    has_attributes,
    slots_of,
)
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.source import Source

__all__ = ["Check", "Questions"]


@dataclass(frozen=True)
class Check:
    """One thing that is checked before a run.

    Attributes:
        text: what is wrong if it fails.
        part: what it is about; None for checks about several.
        guard: number of the guard on the tape, for a condition that a flow step put.
    """

    text: str
    part: Part | None = None
    guard: int | None = None


class Questions:
    """Writes lines that give the number of a check that fails.

    Args:
        recording: the run that the guards come from.
        analysis: its guards, sorted.

    Attributes:
        checks: what each number stands for.
        marked: state tensors on which the run sets attributes that were not there, or looks for
            some that may not be there.
    """

    def __init__(self, recording: Recording, analysis: Analysis) -> None:
        self.checks: list[Check] = []
        self.marked = {
            change.part for change in recording.changes if change.part.kind is PartKind.TENSOR
        }
        if recording.surroundings.asks_tags:
            parts = recording.surroundings.parts
            self.marked |= {part for part in parts if part.kind is PartKind.TENSOR}
        self._analysis = analysis

    def note(self, text: str, part: Part | None = None, guard: int | None = None) -> int:
        """Return the number of a new check."""
        self.checks.append(Check(text, part, guard))
        return len(self.checks) - 1

    def ask(self, source: Source, part: Part) -> None:
        """Ask of a part whether it is what it was, as far as that matters."""
        name, kind, label = source.part(part), part.kind, part.label

        def fail_if(condition: str, text: str) -> None:
            source.line(f"if {condition}: return {self.note(text, part)}")

        if part.access is Access.FIXED:
            if kind is PartKind.DICT:
                fail_if(f"len({name}) != {part.size}", f"{label} has gained or lost attributes")
                return
            if kind in _SAME_FOR_EVER:
                return
        elif kind is not PartKind.ALIAS:
            source.take((part,))
        if kind is PartKind.PLAIN:
            wrong = f"{label} is not {part.value!r}"
            if part.value is None or type(part.value) is bool:
                fail_if(f"{name} is not {part.value}", wrong)
            else:
                constant = source.bound(part.value)
                fail_if(f"{name} is not {constant} and not identical({name}, {constant})", wrong)
        elif kind is PartKind.ALIAS:
            first = part.value
            if first.kind in (PartKind.MODULE, PartKind.IDENTITY):
                name = source.constant(first.value)
            else:
                source.take((first,))
            wrong = f"{label} is not the same as {first.label}"
            if part.parent is not None:
                source.take((part.parent,))
            fail_if(f"{source.reach(part)} is not {name}", wrong)
        elif kind in (PartKind.MODULE, PartKind.IDENTITY):
            fail_if(f"{name} is not {source.constant(part.value)}", f"{label} was replaced")
        else:
            exact = source.constant(part.type)
            fail_if(f"type({name}) is not {exact}", f"{label} is not a {part.type.__name__}")
        if kind is PartKind.TENSOR:
            _check_tensor(source, part, self._analysis, part in self.marked, fail_if)
        elif kind in (PartKind.LIST, PartKind.TUPLE):
            size = part.size
            if isinstance(size, tuple):
                size = sum(not isinstance(key, AttributeKey) for key in size)
            fail_if(f"len({name}) != {size}", f"{label} does not have {size} items")
        elif kind is PartKind.DICT:
            keys = tuple(key for key in part.size if not isinstance(key, AttributeKey))
            other = f"tuple({name}) != {source.constant(keys)}"
            if not keys and part.type is dict:
                other = name
            fail_if(other, f"{label} has other keys")
        if kind in _CONTAINERS and has_attributes(part.type) and isinstance(part.size, tuple):
            named = [key for key in part.size if isinstance(key, AttributeKey)]
            held = sum(key.access is Access.DICT for key in named)
            fail_if(f"len({name}.__dict__) != {held}", f"{label} has gained or lost attributes")
        if kind is PartKind.OBJECT:
            held = sum(1 for key in part.size if key.access is Access.DICT)
            if held or part.type.__dictoffset__:
                fail_if(f"len({name}.__dict__) != {held}", f"{label} has gained or lost attributes")
            for slot in set(slots_of(part.type)) - {str(key) for key in part.size}:
                fail_if(f"hasattr({name}, {slot!r})", f"{label} has an attribute {slot}")
        elif kind in _WHOLE:
            fail_if(_other_content(source, part), f"{label} has other content")


_WHOLE = {PartKind.SET: exact_members, PartKind.LARGE: exact_items, PartKind.ARRAY: Array}
_CONTAINERS = (PartKind.LIST, PartKind.TUPLE, PartKind.DICT)
_SAME_FOR_EVER = frozenset({PartKind.MODULE, PartKind.IDENTITY, PartKind.ALIAS, PartKind.TUPLE})
# Types of which two values are the same if they are equal.
_BY_VALUE = frozenset({type(None), bool, int, str, bytes})


def _other_content(source: Source, part: Part) -> str:
    name = source.part(part)
    if part.type in (set, frozenset):
        if not part.size:
            return name
        types = tuple(kind for kind, _ in part.size)
        if _BY_VALUE.issuperset(types):
            members = source.bound(tuple(member for _, member in part.size))
            return (
                f"tuple({name}) != {members} or tuple(map(type, {name})) != {source.bound(types)}"
            )
    return f"{source.constant(part.size)} != {source.constant(_WHOLE[part.kind])}({name})"


def _check_tensor(
    source: Source,
    part: Part,
    analysis: Analysis,
    marked: bool,
    fail_if: Callable[[str, str], None],
) -> None:
    name, facts, label = source.part(part), part.size, part.label
    if part.is_argument or part in analysis.typed_state:
        fail_if(
            f"{name}.dtype is not {source.constant(facts.dtype)}",
            f"{label} is not of dtype {facts.dtype}",
        )
        fail_if(
            f"{name}.device != {source.constant(facts.device)}",
            f"{label} is not on device {facts.device}",
        )
        fail_if(
            f"{name}.layout is not {source.constant(facts.layout)}",
            f"{label} is not {facts.layout}",
        )
    if part.is_argument or part in analysis.ranked_state:
        fail_if(f"{name}.dim() != {facts.rank}", f"{label} does not have {facts.rank} dimensions")
    if part.is_argument or marked:
        held = f"len({name}.__dict__) != {facts.attributes}"
        fail_if(held if facts.attributes else f"{name}.__dict__", f"{label} has other attributes")
    if part.is_argument:
        fail_if(
            f"{name}.requires_grad is not {facts.requires_grad}",
            f"{label} {'does not require' if facts.requires_grad else 'requires'} grad",
        )
