"""Guard code: writing the checks of single captured values, and that two names are one object.

A run tells by identity which tensors and containers are one, and what follows from it: what is
written to one of them shows in all. So objects that were distinct have to be distinct again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.source import Source
from bendtrace.tape.captured import (
    COPIED,
    UNSET,
    Access,
    Captured,
    CaptureKind,
    Copy,
    Keys,
    Length,
    TensorFacts,
    has_attributes,
    is_told_by_identity,
    same_keys,
    slot_of,
    slots_of,
)
from bendtrace.torch_rules.arrays import overlap


@dataclass(frozen=True)
class Check:
    """One thing that is checked before a run.

    Attributes:
        text: what is wrong if it fails.
        part: what it is about; None for checks about several.
        guard: number of the guard on the tape, for a condition that a flow step put.
    """

    text: str
    part: Captured | None = None
    guard: int | None = None


class GuardCode:
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
        self.marked: set[Captured] = {
            change.part for change in recording.changes if change.part.kind is CaptureKind.TENSOR
        }
        if recording.environment.asks_tags:
            parts = recording.environment.parts
            self.marked |= {part for part in parts if part.kind is CaptureKind.TENSOR}
        self._analysis = analysis

    def note(self, text: str, part: Captured | None = None, guard: int | None = None) -> int:
        """Return the number of a new check."""
        self.checks.append(Check(text, part, guard))
        return len(self.checks) - 1

    def ask(self, source: Source, part: Captured) -> None:
        """Ask of a part whether it is what it was, as far as that matters."""
        name, kind, label, size = source.part(part), part.kind, part.label, part.size

        def fail_if(condition: str, text: str) -> None:
            source.line(f"if {condition}: return {self.note(text, part)}")

        if part.access is Access.FIXED:
            if isinstance(size, Length) and kind is CaptureKind.DICT:
                fail_if(f"len({name}) != {size.number}", f"{label} has gained or lost attributes")
                return
            if kind in _SAME_FOR_EVER:
                return
        elif kind is not CaptureKind.ALIAS:
            source.take((part,))
        if kind is CaptureKind.PLAIN:
            wrong = f"{label} is not {part.value!r}"
            if part.value is None or type(part.value) is bool:
                fail_if(f"{name} is not {part.value}", wrong)
            else:
                constant = source.bound(part.value)
                fail_if(f"{name} is not {constant} and not identical({name}, {constant})", wrong)
        elif kind is CaptureKind.ALIAS:
            first = part.value
            if first.kind in (CaptureKind.MODULE, CaptureKind.IDENTITY):
                name = source.constant(first.value)
            else:
                source.take((first,))
            wrong = f"{label} is not the same as {first.label}"
            if part.parent is not None:
                source.take((part.parent,))
            fail_if(f"{source.reach(part)} is not {name}", wrong)
        elif kind in (CaptureKind.MODULE, CaptureKind.IDENTITY):
            fail_if(f"{name} is not {source.constant(part.value)}", f"{label} was replaced")
        else:
            exact = source.constant(part.type)
            fail_if(f"type({name}) is not {exact}", f"{label} is not a {part.type.__name__}")
        if isinstance(size, TensorFacts):
            _check_tensor(source, part, size, self._analysis, part in self.marked, fail_if)
        elif isinstance(size, (Length, Keys)) and kind in (CaptureKind.LIST, CaptureKind.TUPLE):
            fail_if(f"len({name}) != {size.number}", f"{label} does not have {size.number} items")
            if isinstance(size, Length) and part.type is collections.deque:
                wrong = f"{label} does not hold {size.most} items at most"
                fail_if(f"{name}.maxlen != {size.most}", wrong)
        elif isinstance(size, Keys) and kind is CaptureKind.DICT:
            keys = size.items
            other = f"tuple({name}) != {source.constant(keys)}"
            if not keys and part.type is dict:
                other = name
            elif keys and all(type(key) is str for key in keys):
                other += f" or {{*map(type, {name})}} != {source.bound(_TEXTS)}"
            else:
                source.names["same_keys"] = same_keys
                other = f"not same_keys({name}, {source.constant(keys)})"
            fail_if(other, f"{label} has other keys")
        if kind in _CONTAINERS and has_attributes(part.type) and isinstance(size, Keys):
            other = f"tuple({name}.__dict__) != {source.constant(size.own)}"
            fail_if(other, f"{label} has other attributes than it had, or in another order")
        if isinstance(size, Keys) and kind is CaptureKind.OBJECT:
            own = size.own
            if own or part.type.__dictoffset__:
                other = (
                    f"tuple({name}.__dict__) != {source.constant(own)}"
                    if own
                    else f"{name}.__dict__"
                )
                fail_if(other, f"{label} has other attributes than it had, or in another order")
            for slot in set(slots_of(part.type)) - {str(key) for key in size.keys}:
                source.names.update(slot_of=slot_of, UNSET=UNSET)
                has = f"slot_of({name}, {slot!r}) is not UNSET"
                fail_if(has, f"{label} has an attribute {slot}")
        elif isinstance(size, Copy):
            fail_if(_other_content(source, part, size.content), f"{label} has other content")


_TEXTS = {str}
_CONTAINERS = (CaptureKind.LIST, CaptureKind.TUPLE, CaptureKind.DICT)
_SAME_FOR_EVER = frozenset(
    {CaptureKind.MODULE, CaptureKind.IDENTITY, CaptureKind.ALIAS, CaptureKind.TUPLE}
)
# Types of which two values are the same if they are equal.
_BY_VALUE = frozenset({type(None), bool, int, str, bytes})


def _other_content(source: Source, part: Captured, content: Any) -> str:
    name = source.part(part)
    if part.type in (set, frozenset):
        if not content:
            return name
        types = tuple(kind for kind, _ in content)
        if _BY_VALUE.issuperset(types):
            members = source.bound(tuple(member for _, member in content))
            return (
                f"tuple({name}) != {members} or tuple(map(type, {name})) != {source.bound(types)}"
            )
    return f"{source.constant(content)} != {source.constant(COPIED[part.kind])}({name})"


def _check_tensor(
    source: Source,
    part: Captured,
    facts: TensorFacts,
    analysis: Analysis,
    marked: bool,
    fail_if: Callable[[str, str], None],
) -> None:
    name, label = source.part(part), part.label
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


class AliasGuards:
    """Writes what is asked about the tensors, containers and objects of arguments and model.

    Args:
        recording: the run that the guards come from.
        questions: writes what is asked of parts.
        ignored: parts that are not checked.
        ties: whether it is asked in any case that no argument is something the model holds.
    """

    def __init__(
        self,
        recording: Recording,
        questions: GuardCode,
        ignored: frozenset[Captured],
        ties: bool = False,
    ) -> None:
        self._ties = ties
        self._recording = recording
        self._questions = questions
        kinds = _DISTINCT + (_COMPARED if recording.environment.compares_identity else ())
        several = [
            part
            for part in recording.environment.parts
            if part.kind in kinds and part not in ignored
        ]
        self._given = [part for part in several if part.is_argument]
        self._arrays = [part for part in several if part.kind is CaptureKind.ARRAY]
        self._tensors = [
            part
            for part in recording.environment.parts
            if part.kind is CaptureKind.TENSOR and not part.is_argument and part not in ignored
        ]
        self._held = [
            part for part in several if not part.is_argument and part.access is not Access.FIXED
        ]

    def write_held(self, source: Source) -> None:
        """Write `distinct(A)`: whether the things that the model holds are still as many.

        Tied ones are known as such. That others have become one and the same is asked when a dict
        that the model consists of was written to, and each time where they are in others.
        """
        source.begin("distinct(A)")
        source.take(self._held)
        if len(self._held) > 1:
            tied = self._questions.note(
                "two things that the model holds are now one and the same object"
            )
            names = ", ".join(f"id({source.part(part)})" for part in self._held)
            source.line(f"if len({{{names}}}) != {len(self._held)}: return {tied}")
        if not any(part.is_argument for part in self._arrays):
            self._ask_for_memory(source, self._tensors)
        source.line("return None")

    def ask(self, source: Source) -> None:
        """Ask what has to be asked each time."""
        given, held = self._given, set(self._held)
        if len(given) > 1:
            names = [source.part(part) for part in given]
            same = f"{' is '.join(names)}"
            if len(given) > 2:
                same = f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}"
            number = self._questions.note("two arguments are now one and the same object")
            source.line(f"if {same}: return {number}")
        matters = bool(self._recording.changes) or self._recording.environment.compares_identity
        if any(
            part.parent is not None
            and (part.parent in held or (matters and not _is_versioned(part.parent)))
            for part in held
        ):
            source.line("number = distinct(A)")
            source.line("if number is not None: return number")
        self._ask_for_strangers(source)
        given = [part for part in self._given if part.kind is CaptureKind.TENSOR]
        is_given = any(part.is_argument for part in self._arrays)
        self._ask_for_memory(source, [*given, *self._tensors] if is_given else given)

    def _ask_for_memory(self, source: Source, tensors: list[Captured]) -> None:
        """Ask which tensors are in the memory of which arrays, and would change with them.

        Even if the run writes to none: a run that continues from it may.
        """
        if not tensors or not self._arrays:
            return
        used = [*tensors, *self._arrays]
        source.take([p for p in used if not p.is_argument and p.access is not Access.FIXED])
        known = self._recording.environment.shared_memory
        pairs = {
            (one, other)
            for one, tensor in enumerate(tensors)
            for other, array in enumerate(self._arrays)
            if (tensor, array) in known
        }
        source.names["overlap"] = overlap
        held = "".join(f"{source.part(part)}, " for part in tensors)
        arrays = "".join(f"{source.part(part)}, " for part in self._arrays)
        number = self._questions.note("other tensors are in the memory of arrays now")
        source.line(f"if overlap(({held}), ({arrays})) != {source.bound(pairs)}: return {number}")

    def _ask_for_strangers(self, source: Source) -> None:
        """Ask whether an argument is something that the model holds now, if it might be asked."""
        given, held, environment = self._given, self._held, self._recording.environment
        objects = [
            part
            for part in given
            if part.kind is CaptureKind.OBJECT
            and (environment.compares_identity or is_told_by_identity(part.type))
        ]
        what = "an argument is now what the model holds itself"
        if objects:
            # Whose identities are known: the parts are guarded by them, and members do not change.
            known = [
                part.value
                for part in environment.parts
                if part.kind is CaptureKind.IDENTITY and not part.is_argument
            ]
            source.names["known"] = frozenset(map(id, [*known, *environment.members]))
            names = ", ".join(f"id({source.part(part)})" for part in objects)
            source.line(f"if not known.isdisjoint(({names},)): return {self._questions.note(what)}")
        if not (self._ties or environment.compares_identity):
            # What is written to a container shows in whatever else is the same one.
            changes = bool(self._recording.changes) or bool(objects)
            held = [part for part in held if changes and part.kind is not CaptureKind.TENSOR]
            given = [part for part in given if part.kind is not CaptureKind.TENSOR]
        if not given or not held:
            return
        source.take(held)
        names = ", ".join(f"id({source.part(part)})" for part in given)
        own = ", ".join(f"id({source.part(part)})" for part in held)
        number = self._questions.note(what)
        source.line(f"if not {{{names}}}.isdisjoint(({own},)): return {number}")


def _is_versioned(holder: Captured) -> bool:
    """Whether it is noticed when something is written to what holds a part."""
    is_dict = holder.kind is CaptureKind.DICT and type(holder.value) is dict
    return is_dict and holder.access is Access.FIXED


_DISTINCT = (
    CaptureKind.TENSOR, CaptureKind.LIST, CaptureKind.DICT, CaptureKind.OBJECT, CaptureKind.SET,
    CaptureKind.LARGE, CaptureKind.ARRAY, CaptureKind.GROWING,
)  # fmt: skip
# What nothing is written to, so that only `is` tells whether two of them are one.
_COMPARED = (CaptureKind.TUPLE,)
