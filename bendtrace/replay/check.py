"""Writing the check of the input guards, which is made before a run."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bendtrace.recording.objects import kept_in
from bendtrace.recording.parts import (
    Access,
    Array,
    AttributeKey,
    Part,
    PartKind,
    exact_items,
    exact_members,
)
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import (
    refs_in,
)
from bendtrace.replay.analysis import Analysis, GuardKind, counts
from bendtrace.replay.source import Source, define, fails, needed_for, test_of

__all__ = ["Check", "CheckWriter"]


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


class CheckWriter:
    """Writes `check(A)`: None if all input guards hold, else the number of one that fails.

    Args:
        recording: the run that the guards come from.
        analysis: its guards, sorted.
        ignored: parts that are not checked, because the run is going to be live anyway.

    Attributes:
        checks: what each number stands for.
    """

    def __init__(
        self, recording: Recording, analysis: Analysis, ignored: frozenset[Part] = frozenset()
    ) -> None:
        self.checks: list[Check] = []
        self._recording = recording
        self._analysis = analysis
        self._ignored = ignored
        self._keys_of: dict[int, list[Any]] = {}
        self._held: Counter[int] = Counter()  # how many submodules are in a table
        for part in recording.surroundings.parts:
            if part.parent is not None:
                self._keys_of.setdefault(part.parent.index, []).append(part.key)
                whole = part.value if part.kind is PartKind.ALIAS else part
                self._held[part.parent.index] += whole.kind is PartKind.MODULE
        self._reached: set[int] = set()  # in the function that is being written
        # State tensors on which the run sets attributes that were not there.
        self._marked = {
            change.part for change in recording.changes if change.part.kind is PartKind.TENSOR
        }

    def write(self) -> Source:
        """Return the source of `check` and of `compare`, which it calls when in doubt."""
        surroundings = self._recording.surroundings
        simple = [part for part in surroundings.parts if self._is_simple(part)]
        mappings = [
            part
            for part in surroundings.parts
            if part.access is Access.FIXED
            and part.kind is PartKind.DICT
            and part not in self._ignored
        ]
        source = Source()
        self._write_measurement(source, mappings)
        self._write_comparison(source, simple)
        self._reached.clear()
        source.line("def check(A):")
        source.indent = 1
        source.line("if list(map(len, mappings)) != lengths:")
        source.line("    number = measure()")
        source.line("    if number is not None: return number")
        # Only of tables of submodules is the order asked for: forward walks containers.
        ordered = [part for part in mappings if self._held[part.index] > 1]
        source.names.update(
            ordered=[part.value for part in ordered],
            orders=[tuple(self._keys_of[part.index]) for part in ordered],
        )
        moved = self._note("submodules are in another order")
        source.line(f"if list(map(tuple, ordered)) != orders: return {moved}")
        modules = [part for part in surroundings.parts if part.kind is PartKind.MODULE]
        source.names.update(
            modules=[part.value for part in modules], classes=[part.type for part in modules]
        )
        changed = self._note("a module is of another class now")
        source.line(f"if list(map(type, modules)) != classes: return {changed}")
        namespaces = surroundings.namespaces.values()
        codes = [f for f in surroundings.functions if "site-packages" not in f.__code__.co_filename]
        source.names.update(
            namespaces=[namespace for namespace, _ in namespaces],
            sizes=[size for _, size in namespaces],
            functions=codes, written=list(map(_WRITTEN, codes)), read=_WRITTEN,
        )  # fmt: skip
        grown = self._note("a class has gained or lost attributes")
        source.line(f"if list(map(len, namespaces)) != sizes: return {grown}")
        edited = self._note("a function has another code, or other defaults")
        source.line(f"if list(map(read, functions)) != written: return {edited}")
        source.line("if not all(map(is_, chain(map(call, getters, holders)), expected)):")
        source.line("    number = compare()")
        source.line("    if number is not None: return number")
        skipped = {id(part) for part in simple} | {id(part) for part in mappings}
        for part in surroundings.parts:
            first = part.value if part.kind is PartKind.ALIAS else part
            if id(part) not in skipped and part not in self._ignored and first not in self._ignored:
                self._write_part(source, part)
        distinct = [
            part
            for part in surroundings.parts
            if part.is_argument and part.kind in _DISTINCT and part not in self._ignored
        ]
        if len(distinct) > 1:
            same = ", ".join(f"id({source.part(part)})" for part in distinct)
            number = self._note("two arguments are now one and the same object")
            source.line(f"if len({{{same}}}) != {len(distinct)}: return {number}")
        if surroundings.hook_dicts:
            source.names["hooks"] = surroundings.hook_dicts
            others = self._note("the modules have other hooks")
            if not any(surroundings.hooks):
                source.line(f"if any(hooks): return {others}")
            else:
                source.names.update(hooked=surroundings.hooks, items=_items_of)
                source.line(f"if list(map(items, hooks)) != hooked: return {others}")
        if surroundings.read_caches:
            source.names.update(cached=surroundings.read_caches, all_kept=_all_kept)
            cleared = self._note("a cache does not hold any more what the run took from it")
            source.line(f"if not all_kept(cached): return {cleared}")
        self._write_conditions(source)
        source.line("return None")
        return source

    def _note(self, text: str, part: Part | None = None, guard: int | None = None) -> int:
        self.checks.append(Check(text, part, guard))
        return len(self.checks) - 1

    # A model has hundreds of plain attributes that hardly ever change. In the usual case each
    # is the very object that it was, which the interpreter finds out without bytecode.

    def _is_simple(self, part: Part) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (PartKind.DICT, PartKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)
            and part not in self._ignored
        )

    def _write_measurement(self, source: Source, mappings: list[Part]) -> None:
        self._reached.clear()
        source.line("def measure():")
        source.indent = 1
        for part in mappings:
            self._write_part(source, part)
        source.line("return None")
        source.indent = 0
        source.names.update(
            mappings=[part.value for part in mappings], lengths=[part.size for part in mappings]
        )

    def _write_comparison(self, source: Source, simple: list[Part]) -> None:
        held: dict[int, list[Part]] = {}
        for part in simple:
            assert part.parent is not None
            held.setdefault(part.parent.index, []).append(part)
        getters, holders, expected = [], [], []
        self._reached.clear()
        source.line("def compare():")
        source.indent = 1
        for parts in held.values():
            # A getter of a single key would not return a tuple.
            chosen = parts if len(parts) > 1 else parts * 2
            getters.append(operator.itemgetter(*(part.key for part in chosen)))
            assert parts[0].parent is not None
            holders.append(parts[0].parent.value)
            expected += [part.value for part in chosen]
            for part in parts:
                self._write_part(source, part)
        source.line("return None")
        source.indent = 0
        source.names.update(
            getters=getters, holders=holders, expected=expected, is_=operator.is_,
            chain=chain.from_iterable, call=_call,
        )  # fmt: skip

    def _write_part(self, source: Source, part: Part) -> None:
        name, kind, label = source.part(part), part.kind, part.label

        def fail_if(condition: str, text: str) -> None:
            source.line(f"if {condition}: return {self._note(text, part)}")

        if part.access is Access.FIXED:
            if kind is PartKind.DICT:
                fail_if(f"len({name}) != {part.size}", f"{label} has gained or lost attributes")
                return
            if kind in _SAME_FOR_EVER:
                return
        elif kind is not PartKind.ALIAS:
            self._reach(source, part)
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
            wrong = f"{label} is not the same as {first.label}"
            if part.parent is not None:
                self._reach(source, part.parent)
            fail_if(f"{source.reach(part)} is not {name}", wrong)
        elif kind in (PartKind.MODULE, PartKind.IDENTITY):
            fail_if(f"{name} is not {source.constant(part.value)}", f"{label} was replaced")
        else:
            exact = source.constant(part.type)
            fail_if(f"type({name}) is not {exact}", f"{label} is not a {part.type.__name__}")
        if kind is PartKind.TENSOR:
            _check_tensor(source, part, self._analysis, part in self._marked, fail_if)
        elif kind in (PartKind.LIST, PartKind.TUPLE):
            fail_if(f"len({name}) != {part.size}", f"{label} does not have {part.size} items")
        elif kind is PartKind.DICT:
            keys = tuple(key for key in part.size if not isinstance(key, AttributeKey))
            fail_if(f"tuple({name}) != {source.constant(keys)}", f"{label} has other keys")
        elif kind is PartKind.OBJECT:
            held = sum(1 for key in part.size if key.access is Access.DICT)
            if held:
                fail_if(f"len({name}.__dict__) != {held}", f"{label} has gained or lost attributes")
        elif kind in _WHOLE:
            reader = source.constant(_WHOLE[kind])
            fail_if(
                f"{source.constant(part.size)} != {reader}({name})", f"{label} has other content"
            )

    def _reach(self, source: Source, part: Part) -> None:
        """Give a part its name, after what it is reached from."""
        if part.access is not Access.FIXED and part.index not in self._reached:
            self._reached.add(part.index)
            if part.parent is not None:
                self._reach(source, part.parent)
            source.line(f"{source.part(part)} = {source.reach(part)}")

    def _write_conditions(self, source: Source) -> None:
        ops = self._recording.tape.ops
        guards = [
            (number, guard)
            for number, guard in enumerate(self._recording.tape.guards)
            if self._analysis.kinds[number] is GuardKind.INPUT
            and not any(
                ops[index].target in self._ignored
                for index in needed_for(ops, [guard.index])
                if isinstance(ops[index].target, Part)
            )
        ]
        needed = needed_for(ops, (guard.index for _, guard in guards if not counts(guard, ops)))
        for _, guard in guards:
            if counts(guard, ops):
                needed |= needed_for(ops, (ref.index for ref in refs_in(ops[guard.index].args)))
        # In the tape's order: a condition may protect the arithmetic of a later one.
        events: list[tuple[int, int, Any]] = [(index, -1, ops[index]) for index in needed]
        events += [(guard.position - 1, number, guard) for number, guard in guards]
        tested: set[tuple[Any, ...]] = set()
        for _, number, event in sorted(events, key=lambda item: item[:2]):
            if number < 0:
                if isinstance(event.target, Part):
                    self._reach(source, event.target)
                define(source, event)
            elif test_of(event) not in tested:
                tested.add(test_of(event))
                failed = self._note("", guard=number)
                source.line(f"if {fails(source, event, ops)}: return {failed}", event.index)


# What is exchanged in a function that is edited in place, as notebooks do when they reload.
_WRITTEN = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WHOLE = {PartKind.SET: exact_members, PartKind.LARGE: exact_items, PartKind.ARRAY: Array}


def _all_kept(cached: list[tuple[Any, Any]]) -> bool:
    return all(any(kept is tensor for kept in kept_in(cache)) for cache, tensor in cached)


def _items_of(hooks: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(hooks.items())


def _call(getter: Callable[[Any], Any], holder: Any) -> Any:
    return getter(holder)


_call = getattr(operator, "call", _call)  # since Python 3.11
_DISTINCT = (PartKind.TENSOR, PartKind.LIST, PartKind.DICT, PartKind.OBJECT)
_SAME_FOR_EVER = frozenset({PartKind.MODULE, PartKind.IDENTITY, PartKind.ALIAS, PartKind.TUPLE})


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
