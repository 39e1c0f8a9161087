"""Writing the check of the input guards, which is made before a run."""

from __future__ import annotations

import operator
import types
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
    slots_of,
)
from bendtrace.recording.reach import is_installed, is_installed_file
from bendtrace.recording.recorder import Recording
from bendtrace.recording.tape import (
    refs_in,
)
from bendtrace.recording.usage import compares_identity
from bendtrace.replay.analysis import Analysis, GuardKind, counts
from bendtrace.replay.source import Source, define, fails, needed_for, test_of
from bendtrace.replay.versions import version_of

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
        self._children: dict[int, list[Part]] = {}
        self._held: Counter[int] = Counter()  # how many submodules are in a table
        for part in recording.surroundings.parts:
            if part.parent is not None:
                self._children.setdefault(part.parent.index, []).append(part)
                whole = part.value if part.kind is PartKind.ALIAS else part
                self._held[part.parent.index] += whole.kind is PartKind.MODULE
        self._reached: set[int] = set()  # in the function that is being written
        self._settled: set[int] = set()  # parts that follow from the version of a dict
        # Whose attributes a dict holds, and what is looked at in all modules.
        self._module_of = {
            id(vars(part.value)): part
            for part in recording.surroundings.parts
            if part.kind is PartKind.MODULE
        }
        walked = [part for part in recording.surroundings.parts if part.access is Access.FIXED]
        self._known = {id(part.value) for part in walked if part.kind is PartKind.DICT}
        self._known |= set(map(id, recording.surroundings.hook_dicts))
        self._hollow: list[Part] = []  # containers that are empty, in such dicts
        # State tensors on which the run sets attributes that were not there.
        self._marked = {
            change.part for change in recording.changes if change.part.kind is PartKind.TENSOR
        }

    def write(self) -> Source:
        """Return the source of `check` and of `compare` and `measure`, which it calls in doubt."""
        surroundings = self._recording.surroundings
        source = Source()
        counted, versioned = self._settle()
        tables = self._tables(versioned)
        self._write_distinct(source)
        self._write_comparison(source, versioned, tables)
        self._write_look(source, tables)
        simple = [part for part in surroundings.parts if self._is_simple(part)]
        self._write_search(source, simple)
        self._write_measurement(source, [*counted, *self._hollow])
        self._reached.clear()
        source.names["getitem"] = operator.getitem
        source.line("def check(A):")
        source.indent = 1
        source.line("now = list(map(version, chain((map(held, owners), dicts))))")
        source.line("if now != seen[0]:")
        source.line("    number = compare(now, A)")
        source.line("    if number is not None: return number")
        source.line("    seen[0] = now")
        hooked = any(surroundings.hooks)
        source.names["empty"] = [part.value for part in counted if not part.size]
        if not hooked:
            source.names["empty"] += surroundings.hook_dicts
        if source.names["empty"]:
            source.line("if any(empty):")
            source.line("    number = measure()")
            source.line("    if number is not None: return number")
        if self._hollow:
            hosts = [part.parent.value for part in self._hollow if part.parent is not None]
            source.names.update(hosts=hosts, hollow=[part.key for part in self._hollow])
            source.line("if any(map(getitem, hosts, hollow)):")
            source.line("    number = measure()")
            source.line("    if number is not None: return number")
        full = [part for part in counted if part.size]
        if full:
            source.names.update(
                mappings=[part.value for part in full], lengths=[part.size for part in full]
            )
            source.line("if list(map(len, mappings)) != lengths:")
            source.line("    number = measure()")
            source.line("    if number is not None: return number")
        self._write_wholes(source, full)
        if simple:
            source.line("if not all(map(is_, map(getitem, holders, keys), expected)):")
            source.line("    number = search()")
            source.line("    if number is not None: return number")
        if tables:
            source.line("if list(map(type, chain(map(values, tables)))) != kinds:")
            source.line("    number = look()")
            source.line("    if number is not None: return number")
        skipped = {id(part) for part in (*simple, *counted)} | self._settled
        skipped |= {id(part) for table in tables for part in self._children[table.index]}
        for part in surroundings.parts:
            first = part.value if part.kind is PartKind.ALIAS else part
            if id(part) not in skipped and part not in self._ignored and first not in self._ignored:
                self._write_part(source, part)
        things = set(self._held_things())
        distinct = [
            part
            for part in surroundings.parts
            if part.is_argument and part.kind in _DISTINCT and part not in self._ignored
        ]
        if len(distinct) > 1:
            names = [source.part(part) for part in distinct]
            same = f"{' is '.join(names)}"
            if len(distinct) > 2:
                same = f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}"
            number = self._note("two arguments are now one and the same object")
            source.line(f"if {same}: return {number}")
        if any(part.parent is not None and part.parent in things for part in things):
            source.line("number = distinct(A)")
            source.line("if number is not None: return number")
        self._write_strangers(source, distinct)
        if hooked:
            source.names.update(
                hooks=surroundings.hook_dicts, hooked=surroundings.hooks, items=_items_of
            )
            others = self._note(_OTHER_HOOKS)
            source.line(f"if list(map(items, hooks)) != hooked: return {others}")
        if surroundings.read_caches:
            source.names.update(cached=surroundings.read_caches, all_kept=_all_kept)
            cleared = self._note("a cache does not hold any more what the run took from it")
            source.line(f"if not all_kept(cached): return {cleared}")
        self._write_conditions(source)
        source.line("return None")
        return source

    def _write_strangers(self, source: Source, arguments: list[Part]) -> None:
        """Ask whether an argument is something that the model holds now, if it might be asked."""
        surroundings = self._recording.surroundings
        held = self._held_things()
        own_code = [f for f in surroundings.functions if not is_installed_file(_file_of(f))]
        if not any(map(_asks_for_identity, own_code)):
            # What is written to a container shows in whatever else is the same one.
            changes = bool(self._recording.changes)
            held = [part for part in held if changes and part.kind is not PartKind.TENSOR]
            arguments = [part for part in arguments if part.kind is not PartKind.TENSOR]
        if not arguments or not held:
            return
        for part in held:
            self._reach(source, part)
        given = ", ".join(f"id({source.part(part)})" for part in arguments)
        own = ", ".join(f"id({source.part(part)})" for part in held)
        number = self._note("an argument is now what the model holds itself")
        source.line(f"if not {{{given}}}.isdisjoint(({own},)): return {number}")

    def _note(self, text: str, part: Part | None = None, guard: int | None = None) -> int:
        self.checks.append(Check(text, part, guard))
        return len(self.checks) - 1

    def _settle(self) -> tuple[list[Part], list[tuple[Part, list[Part]]]]:
        """Sort out what follows from the versions of the dicts that the model consists of.

        Returns:
            The dicts of which the number of entries is asked each time, and those of which the
            version is, with what they hold that cannot change without another version.
        """
        counted: list[Part] = []
        held: dict[int, tuple[Part, list[Part]]] = {}
        for part in self._recording.surroundings.parts:
            if part.access is Access.FIXED:
                # Each module has many empty tables: that they are is found out in one go.
                if part.kind is PartKind.DICT and (not part.size or type(part.value) is not dict):
                    if part not in self._ignored:
                        counted.append(part)
                elif type(part.value) is dict and part.kind in (PartKind.DICT, PartKind.IDENTITY):
                    held[part.index] = part, []
                continue
            root = self._root_of(part)
            if root is not None and root.index in held and part not in self._ignored:
                held[root.index][1].append(part)
                self._settled.add(id(part))
            elif self._is_hollow(part) and part.parent is not None and part.parent.index in held:
                self._hollow.append(part)
                self._settled.add(id(part))
        hosts = {part.parent.index for part in self._hollow if part.parent is not None}
        versioned = [
            (part, parts)
            for part, parts in held.values()
            if parts
            or (part.kind is PartKind.DICT and part not in self._ignored)
            or part.index in hosts
        ]
        self._settled |= {id(part) for part, _ in versioned}
        versioned.sort(key=lambda item: id(item[0].value) not in self._module_of)
        return counted, versioned

    def _tables(self, versioned: list[tuple[Part, list[Part]]]) -> list[Part]:
        """Find tables of parameters or buffers, each of which is asked for its type alone."""
        return [
            table
            for table, _ in versioned
            if len(self._children.get(table.index, ())) == table.size
            and self._is_table(self._children[table.index])
        ]

    def _is_table(self, parts: list[Part]) -> bool:
        asked = self._analysis.typed_state | self._analysis.ranked_state | self._marked
        tensors = {part for part in parts if part.kind is PartKind.TENSOR}
        nothing = all(part.value is None for part in parts if part not in tensors)
        free = tensors.isdisjoint(asked) and self._ignored.isdisjoint(parts)
        return bool(tensors) and nothing and free

    def _root_of(self, part: Part) -> Part | None:
        """Return the fixed dict that holds a part which changes with an entry of it alone."""
        if part.access is not Access.ITEM or part.parent is None:
            return None
        if not self._is_steady(part):
            return None
        holder = part.parent
        if holder.access is Access.FIXED:
            return holder
        # What a tuple holds is the same for as long as it is the same tuple.
        return self._root_of(holder) if holder.kind is PartKind.TUPLE else None

    def _is_hollow(self, part: Part) -> bool:
        """Whether a part is an empty container in a fixed dict.

        What holds plain values now may hold tensors the next time, so that it is not kept, but
        taken from where it is each time.
        """
        return (
            part.access is Access.ITEM
            and part.parent is not None
            and part.parent.access is Access.FIXED
            and part.type in (dict, list, set)
            and part.kind in (PartKind.DICT, PartKind.LIST, PartKind.SET)
            and not part.size
            and part not in self._ignored
        )

    def _is_steady(self, part: Part) -> bool:
        """Whether a part cannot change itself, other than by another thing in its place."""
        if part.kind is PartKind.ALIAS:
            return part.value.kind in (PartKind.MODULE, PartKind.IDENTITY)
        if part.kind in (PartKind.TUPLE, PartKind.SET):
            return part.type in (tuple, frozenset)
        return part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)

    def _write_comparison(
        self, source: Source, versioned: list[tuple[Part, list[Part]]], tables: list[Part]
    ) -> None:
        """Write what is asked of the dicts that were written to since they were asked last."""
        found = (self._module_of.get(id(part.value)) for part, _ in versioned)
        owners = [part.value for part in found if part is not None]  # they come first
        source.names.update(
            version=version_of, seen=[[None] * len(versioned)], owners=owners,
            held=operator.attrgetter("__dict__"),  # takes less time than `vars`
            dicts=[part.value for part, _ in versioned[len(owners) :]], chain=chain.from_iterable,
        )  # fmt: skip
        hollow: dict[int, list[Part]] = {}
        for part in self._hollow:
            if part.parent is not None:
                hollow.setdefault(part.parent.index, []).append(part)
        self._reached.clear()
        source.line("def compare(now, A):")
        source.indent = 1
        source.line("was = seen[0]")
        for number, (holder, parts) in enumerate(versioned):
            source.line(f"if now[{number}] != was[{number}]:")
            source.indent = 2
            source.line("pass")
            if holder.kind is PartKind.DICT and holder not in self._ignored:
                self._write_part(source, holder)
                self._write_order(source, holder)
                self._write_tables(source, holder)
                if holder in tables:
                    keys = source.bound({part.key for part in self._children[holder.index]})
                    lost = self._note(f"{holder.label} has gained or lost attributes", holder)
                    source.line(f"if {source.part(holder)}.keys() != {keys}: return {lost}")
            for part in parts:
                self._write_part(source, part)
            for part in hollow.get(holder.index, ()):
                exact = source.constant(part.type)
                wrong = self._note(f"{part.label} is not a {part.type.__name__}", part)
                source.line(f"if type({source.reach(part)}) is not {exact}: return {wrong}")
            source.indent = 1
        source.line("return distinct(A)")
        source.indent = 0

    def _write_distinct(self, source: Source) -> None:
        """Write whether the tensors and containers of the model are still as many.

        Tied ones are known as such. That others have become one and the same is asked when a dict
        that the model consists of was written to, and each time where they are in others.
        """
        self._reached.clear()
        source.line("def distinct(A):")
        source.indent = 1
        held = self._held_things()
        for part in held:
            self._reach(source, part)
        if len(held) > 1:
            tied = self._note("two things that the model holds are now one and the same object")
            names = ", ".join(f"id({source.part(part)})" for part in held)
            source.line(f"if len({{{names}}}) != {len(held)}: return {tied}")
        source.line("return None")
        source.indent = 0

    def _held_things(self) -> list[Part]:
        return [
            part
            for part in self._recording.surroundings.parts
            if not part.is_argument
            and part.access is not Access.FIXED
            and part.kind in _DISTINCT
            and part not in self._ignored
        ]

    def _write_tables(self, source: Source, part: Part) -> None:
        """Write whether a module has the very dicts that were walked."""
        module = self._module_of.get(id(part.value))
        if module is None:
            return
        tables = tuple(item for item in part.value.items() if id(item[1]) in self._known)
        other = self._note(f"the attributes of {module.label}, or its tables, were replaced", part)
        source.names["consists_of"] = _consists_of
        given = f"{source.bound(module.value)}, {source.part(part)}, {source.bound(tables)}"
        source.line(f"if not consists_of({given}): return {other}")

    def _write_look(self, source: Source, tables: list[Part]) -> None:
        """Write what is asked of tensors one by one, if one of them is of another type."""
        held = [part for table in tables for part in self._children[table.index]]
        source.names.update(
            tables=[table.value for table in tables], kinds=[part.type for part in held],
            values=dict.values,
        )  # fmt: skip
        self._reached.clear()
        source.line("def look():")
        source.indent = 1
        for part in held:
            if part.kind is PartKind.TENSOR:
                self._write_part(source, part)
        source.line("return None")
        source.indent = 0

    def _write_order(self, source: Source, part: Part) -> None:
        # Only of tables of submodules and of parameters: forward walks these.
        children = self._children.get(part.index, ())
        tensors = sum(child.kind is PartKind.TENSOR for child in children)
        if self._held[part.index] > 1 or (tensors > 1 and len(children) == part.size):
            moved = self._note("submodules or parameters are in another order")
            keys = source.bound(tuple(child.key for child in self._children[part.index]))
            source.line(f"if tuple({source.part(part)}) != {keys}: return {moved}")

    def _write_wholes(self, source: Source, tables: list[Part]) -> None:
        """Write what is asked of all modules, and of all code, at once."""
        surroundings = self._recording.surroundings
        for part in tables:
            self._write_order(source, part)
        modules = [part for part in surroundings.parts if part.kind is PartKind.MODULE]
        if modules:
            source.names.update(
                modules=[part.value for part in modules], classes=[part.type for part in modules]
            )
            changed = self._note("a module is of another class now")
            source.line(f"if list(map(type, modules)) != classes: return {changed}")
        objects = [part for part in surroundings.parts if _may_change_class(part)]
        if objects:
            source.names.update(
                objects=[part.value for part in objects], sorts=[part.type for part in objects]
            )
            other = self._note("an object is of another class now")
            source.line(f"if list(map(type, objects)) != sorts: return {other}")
        self._write_namespaces(source)
        codes = [f for f in surroundings.functions if "site-packages" not in f.__code__.co_filename]
        if codes:
            source.names.update(functions=codes, written=list(map(_WRITTEN, codes)), read=_WRITTEN)
            edited = self._note("a function has another code, or other defaults")
            source.line(f"if list(map(read, functions)) != written: return {edited}")

    def _write_namespaces(self, source: Source) -> None:
        """Ask whether classes have the attributes that they had, of whatever value."""
        grown = self._note("a class has gained or lost attributes")
        own: list[tuple[Any, Any]] = []
        installed: list[tuple[Any, Any]] = []
        for namespace, names in self._recording.surroundings.namespaces.values():
            module = namespace.get("__module__")  # (of a metaclass's bases, a descriptor)
            finished = not isinstance(module, str) or is_installed(module)
            (installed if finished else own).append((namespace, names))
        if installed:
            source.names["namespaces"] = [namespace for namespace, _ in installed]
            source.names["sizes"] = [len(names) for _, names in installed]
            source.line(f"if list(map(len, namespaces)) != sizes: return {grown}")
        if own:
            source.names["classes_own"] = [namespace for namespace, _ in own]
            source.names["names_own"] = [names for _, names in own]
            source.line(f"if list(map(tuple, classes_own)) != names_own: return {grown}")
        if missing := self._recording.surroundings.missing:
            source.names["contains"] = operator.contains
            source.names["worlds"], source.names["missing"] = map(list, zip(*missing, strict=True))
            made = self._note("a global is there that was not")
            source.line(f"if any(map(contains, worlds, missing)): return {made}")

    # A class has many plain attributes that hardly ever change. In the usual case each is the
    # very object that it was, which the interpreter finds out without bytecode.

    def _is_simple(self, part: Part) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (PartKind.DICT, PartKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)
            and id(part) not in self._settled
            and part not in self._ignored
        )

    def _write_measurement(self, source: Source, mappings: list[Part]) -> None:
        self._reached.clear()
        source.line("def measure():")
        source.indent = 1
        for part in mappings:
            self._write_part(source, part)
        hooks = self._recording.surroundings.hook_dicts
        if hooks and not any(self._recording.surroundings.hooks):
            source.names["hooks"] = hooks
            source.line(f"if any(hooks): return {self._note(_OTHER_HOOKS)}")
        source.line("return None")
        source.indent = 0

    def _write_search(self, source: Source, simple: list[Part]) -> None:
        holders = [part.parent.value for part in simple if part.parent is not None]
        source.names.update(
            holders=holders, keys=[part.key for part in simple],
            expected=[part.value for part in simple], is_=operator.is_,
        )  # fmt: skip
        self._reached.clear()
        source.line("def search():")
        source.indent = 1
        for part in simple:
            self._write_part(source, part)
        source.line("return None")
        source.indent = 0

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
            else:
                self._reach(source, first)
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
            other = f"tuple({name}) != {source.constant(keys)}"
            if not keys and part.type is dict:
                other = name
            fail_if(other, f"{label} has other keys")
        elif kind is PartKind.OBJECT:
            held = sum(1 for key in part.size if key.access is Access.DICT)
            if held or part.type.__dictoffset__:
                fail_if(f"len({name}.__dict__) != {held}", f"{label} has gained or lost attributes")
            for slot in set(slots_of(part.type)) - {str(key) for key in part.size}:
                fail_if(f"hasattr({name}, {slot!r})", f"{label} has an attribute {slot}")
        elif kind in _WHOLE:
            fail_if(_other_content(source, part), f"{label} has other content")

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
_OTHER_HOOKS = "the modules have other hooks"
_WHOLE = {PartKind.SET: exact_members, PartKind.LARGE: exact_items, PartKind.ARRAY: Array}


def _all_kept(cached: list[tuple[Any, Any]]) -> bool:
    return all(any(kept is tensor for kept in kept_in(cache)) for cache, tensor in cached)


def _consists_of(
    module: Any, attributes: dict[str, Any], tables: tuple[tuple[str, Any], ...]
) -> bool:
    if vars(module) is not attributes:
        return False
    return all(attributes.get(name) is table for name, table in tables)


def _items_of(hooks: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(hooks.items())


_DISTINCT = (PartKind.TENSOR, PartKind.LIST, PartKind.DICT, PartKind.OBJECT)
_SAME_FOR_EVER = frozenset({PartKind.MODULE, PartKind.IDENTITY, PartKind.ALIAS, PartKind.TUPLE})


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


# Types of which two values are the same if they are equal.
_BY_VALUE = frozenset({type(None), bool, int, str, bytes})


_file_of = operator.attrgetter("__code__.co_filename")


def _asks_for_identity(function: types.FunctionType) -> bool:
    """Whether code, or code within it, asks whether two things are the same one."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        if compares_identity(code):
            return True
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return False


def _may_change_class(part: Part) -> bool:
    """Whether a thing that is known by identity is an object of a class in Python."""
    if part.kind is not PartKind.IDENTITY or part.access is Access.ROOT:
        return False
    steady = (type, types.ModuleType, types.FunctionType, types.MethodType)
    return bool(part.type.__flags__ & _HEAP) and not isinstance(part.value, steady)


_HEAP = 1 << 9  # of classes that were made by a class statement: only these can be exchanged


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
