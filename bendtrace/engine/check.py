"""Writing the check of the input guards, which is made before a run."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, compress, count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bendtrace.engine.guard_kinds import Analysis, GuardKind, tested_ops
from bendtrace.engine.source import GeneratedSource, define, dependencies_of, fails
from bendtrace.python.lazy import LazyModule
from bendtrace.python.versions import (
    WORD,
    Reader,
    TableEntries,
    Unreadable,
    Words,
    offsets,
    other_words,
    version_of,
)
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import (
    COPIED,
    PLAIN_TENSORS,
    UNSET,
    Access,
    Captured,
    CaptureKind,
    Copy,
    Keys,
    Length,
    TensorFacts,
    compares_by_identity,
    has_attributes,
    identical,
    is_number,
    read_of,
    same_keys,
    slot_names,
    slot_of,
)
from bendtrace.tape.structure import are_cached, entries_of, is_heap_type
from bendtrace.watch.monkeypatches import PATCHED, Monkeypatches, monkeypatches
from bendtrace.watch.provenance import is_installed_module
from bendtrace.watch.writes import overlap

if TYPE_CHECKING:
    from bendtrace.watch import containers, open_arrays
else:
    containers = LazyModule("bendtrace.watch.containers")
    open_arrays = LazyModule("bendtrace.watch.open_arrays")


class CheckWriter:
    """Writes `check(A)`: None if all input guards hold, else the number of one that fails.

    Parts in `ignored` are not checked, because the run is going to be live anyway. With `ties` it
    asks in any case that no argument is something the model holds. Replaced functions of torch are
    compared elsewhere if `patches` is None.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        ignored: frozenset[Captured] = frozenset(),
        ties: bool = False,
        patches: Monkeypatches | None = None,
    ) -> None:
        self._recording = recording
        self._analysis = analysis
        self._ignored = ignored
        self._questions = GuardCode(recording, analysis)
        self._classes = GuardClasses(recording, analysis, self._questions.marked, ignored)
        self._sameness = AliasGuards(recording, self._questions, ignored, ties)
        environment = recording.environment
        walked = [part for part in environment.parts if part.access is Access.FIXED]
        self._dict_ids = {id(part.value) for part in walked if part.kind is CaptureKind.DICT}
        self._dict_ids |= set(map(id, environment.hook_dicts))
        hooks = list(zip(environment.hook_dicts, environment.hooks, strict=True))
        self._hooked = [(table, items) for table, items in hooks if items]
        self._unhooked = [table for table, items in hooks if not items]
        self._empty = [part.value for part in self._classes.counted if not part.size]
        self._empty += self._unhooked
        self._codes = [
            function
            for function in environment.functions
            if "site-packages" not in function.__code__.co_filename
        ]
        self._asks_for_world = bool(
            environment.watched_objects and not environment.leaves_watched_objects
        )
        self._end_of_model = 0  # of the words that are versions of the model's own dicts
        self._patches = patches
        self._words = self._word_reader()
        # True if the check asks for these. One reading costs less than two.
        self.asks_for_patches: bool = patches is not None and self._words is not None

    @property
    def checks(self) -> list[Check]:
        """The checks, in the order of their numbers."""
        return self._questions.checks

    def write(self) -> GeneratedSource:
        """Return the source of `check`, and of what it calls in doubt."""
        source, environment = GeneratedSource(), self._recording.environment
        source.names.update(
            version=version_of, chain=chain.from_iterable, getitem=operator.getitem,
            is_=operator.is_, ne=operator.ne, compress=compress, count=count,
            other_words=other_words,
        )  # fmt: skip
        self._sameness.write_distinct(source)
        self._write_comparison(source, "model", self._classes.of_model)
        self._write_comparison(source, "spaces", self._classes.of_spaces)
        self._write_function(source, "look()", self._in_tables(CaptureKind.TENSOR))
        self._write_function(source, "in_classes()", self._classes.in_classes)
        self._write_function(source, "in_spaces()", self._classes.simple)
        source.begin("measure()")
        for part in (*self._classes.counted, *self._classes.hollow):
            self._questions.ask(source, part)
        if self._unhooked:
            source.names["unhooked"] = self._unhooked
            source.line(f"if any(unhooked): return {self._questions.note(_OTHER_HOOKS)}")
        source.line("return None")
        if self._words is not None:
            source.begin("ask(A)")
            self._ask_for_model(source)
            if self._asks_for_world:
                self._ask_for_world(source, "same")
            if self.asks_for_patches:
                source.names.update(monkeypatches=monkeypatches, patches=self._patches)
                others = self._questions.note("something else stands in for functions of torch")
                source.line(f"if monkeypatches() != patches: return {others}")
            source.line("return None")
        source.begin("check(A)")
        if self._words is not None:
            self._ask_for_words(source, self._words)
        else:
            self._ask_for_model(source)
        if self._classes.of_spaces:
            self._ask_for_versions(source, "spaces", "map(version, spaces_dicts)")
        self._ask_for_contents(source)
        self._ask_for_each(source)
        self._sameness.ask(source)
        self._ask_for_hooks(source)
        self._ask_for_caches(source)
        if self._asks_for_world and self._words is None:
            self._ask_for_world(source, "same")
        elif self._asks_for_world and environment.watched_objects.holds_more:
            self._ask_for_world(source, "holds_same")
        self._ask_for_conditions(source)
        source.line("return None")
        return source

    def _word_reader(self) -> Reader | None:
        """Return a reader of the memory words for all that `ask` checks; None if some have none."""
        environment, classes = self._recording.environment, self._classes
        places = offsets()
        if places is None:
            return None
        words = Words(places)
        try:
            for part, _ in classes.of_model:
                words.add_version(part.value)
                if (module := classes.module_of.get(id(part.value))) is not None:
                    words.add_attributes(module.value, part.value)
            self._end_of_model = words.end_of_versions
            if self._end_of_model != WORD * len(classes.of_model):  # in their order
                raise Unreadable
            for table in self._empty:
                words.add_empty(table)
            for part in environment.parts:
                if part.kind is CaptureKind.MODULE or may_change_class(part):
                    words.add_class(part.value, part.type)
            for namespace, _ in environment.namespaces.values():
                words.add_version(namespace)
            for part in classes.in_classes:
                if part.parent is not None:
                    words.add_version(part.parent.value)
            for function in self._codes:
                words.add_written(function)
            for part in classes.in_cells:
                if part.parent is not None:
                    words.add_content(part.parent.value, part.value)
            if self._asks_for_world:
                environment.watched_objects.add_to(words)
            for table in PATCHED if self._patches is not None else ():
                words.add_version(table)
            return words.reader()
        except Unreadable:
            return None

    # What is asked each time, in the order of `check`.

    def _ask_for_words(self, source: GeneratedSource, words: Reader) -> None:
        """Check together everything that `ask` checks one by one.

        They are read before it is asked, so that a thread that writes meanwhile is noticed.
        """
        end = self._end_of_model
        source.names.update(read_words=words.read, fixed=words.fixed, kept=words.kept, words=[None])
        source.line("read = read_words()")
        source.line("was = words[0]")
        source.line("if read == was: pass")
        # Only attributes have been assigned, as a model that counts its calls does in each.
        source.line(f"elif was is not None and read[{end}:] == was[{end}:]:")
        source.line(f"    number = model(other_words(read[:{end}], was[:{end}]), A)")
        source.line("    if number is not None: return number")
        source.line("    words[0] = read")
        source.line("else:")
        source.line("    number = ask(A)")
        source.line("    if number is not None: return number")
        if self._reads_entries:
            tables = [table.value for table in self._classes.tables]
            kinds = [part.type for part in self._in_tables()]
            source.names["entries"] = TableEntries(tables, kinds, self._ranks())
            source.line("    entries.read(read)")
        source.line(f"    if read[{words.begin}:] == fixed: words[0] = read")

    def _ask_for_model(self, source: GeneratedSource) -> None:
        """Check what the words show of the model's parts and code."""
        self._ask_for_attributes(source)
        if empty := self._empty:
            source.names["empty"] = empty
            self._ask_in_doubt(source, "any(empty)", "measure()")
        self._ask_for_classes(source)
        self._ask_for_namespaces(source)
        self._ask_for_code(source)
        self._ask_for_simple(source, "in_classes", self._classes.in_classes)
        for part in self._classes.in_cells:
            self._questions.ask(source, part)

    def _ask_for_attributes(self, source: GeneratedSource) -> None:
        """Check what the model's parts hold."""
        now = "map(version, chain((map(attributes, model_owners), model_dicts)))"
        self._ask_for_versions(source, "model", now)

    def _ask_for_versions(self, source: GeneratedSource, name: str, now: str) -> None:
        """Ask whether one of some dicts was written to."""
        source.line(f"now = list({now})")
        source.line(f"if now != {name}_seen[0]:")
        places = f"compress(count(), map(ne, now, {name}_seen[0]))"
        source.line(f"    number = {name}({places}, A)")
        source.line("    if number is not None: return number")
        source.line(f"    {name}_seen[0] = now")

    def _ask_for_contents(self, source: GeneratedSource) -> None:
        """Check together everything within reach that no word shows."""
        classes = self._classes
        if classes.hollow:
            hosts = [part.parent.value for part in classes.hollow if part.parent is not None]
            source.names.update(hosts=hosts, hollow=[part.key for part in classes.hollow])
            self._ask_in_doubt(source, "any(map(getitem, hosts, hollow))", "measure()")
        full = [part for part in classes.counted if part.size]
        if full:
            lengths = [part.size.number for part in full if isinstance(part.size, Length)]
            source.names.update(mappings=[part.value for part in full], lengths=lengths)
            self._ask_in_doubt(source, "list(map(len, mappings)) != lengths", "measure()")
        for part in full:
            self._ask_for_order(source, part)
        self._ask_for_missing(source)
        self._ask_for_simple(source, "in_spaces", classes.simple)
        if self._reads_entries:
            self._ask_in_doubt(source, "not entries.are_same(read)", "look()")
        elif classes.tables:
            source.names.update(
                tables=[dict.values(table.value) for table in classes.tables],
                kinds=[part.type for part in self._in_tables()],
            )
            self._ask_in_doubt(source, "list(map(type, chain(tables))) != kinds", "look()")
            if ranks := self._ranks():
                tables, keys, numbers = zip(*ranks, strict=True)
                source.names.update(dim=Tensor.dim, ranks=[*numbers], ranked_in=tables, ranked=keys)
                now = "list(map(dim, map(getitem, ranked_in, ranked)))"
                self._ask_in_doubt(source, f"{now} != ranks", "look()")

    @property
    def _reads_entries(self) -> bool:
        """True if words are read of what is in tables; to ask each takes longer if it is much."""
        return self._words is not None and len(self._in_tables()) > _FEW_ENTRIES

    def _ranks(self) -> list[tuple[dict[str, Any], str, int]]:
        """Return the tables, keys and ranks of the tensors in tables that have to have one."""
        ranked = [part for part in self._in_tables() if part in self._analysis.ranked_state]
        return [
            (part.parent.value, part.key, part.size.rank)
            for part in ranked
            if part.parent is not None and isinstance(part.size, TensorFacts)
        ]

    def _ask_for_missing(self, source: GeneratedSource) -> None:
        """Ask whether names that were in no namespace are there now."""
        environment = self._recording.environment
        if not environment.missing:
            return
        source.names.update(
            lacking=[space for space, _ in environment.missing.values()],
            lacking_seen=[None],
            has_more=functools.partial(_has_more, environment.missing, environment.sized),
        )
        made = self._questions.note("a global is there that was not")
        source.line("now = list(map(version, lacking))")
        source.line("if now != lacking_seen[0]:")
        source.line(f"    if has_more(): return {made}")
        source.line("    lacking_seen[0] = now")

    def _ask_for_simple(self, source: GeneratedSource, name: str, parts: list[Captured]) -> None:
        """Ask whether names stand for the very objects that they stood for."""
        if parts:
            source.names.update({
                f"{name}_held": [part.parent.value for part in parts if part.parent is not None],
                f"{name}_keys": [part.key for part in parts],
                f"{name}_were": [part.value for part in parts],
            })  # fmt: skip
            all_same = f"all(map(is_, map(getitem, {name}_held, {name}_keys), {name}_were))"
            self._ask_in_doubt(source, f"not {all_same}", f"{name}()")

    def _ask_in_doubt(self, source: GeneratedSource, doubt: str, call: str) -> None:
        """Ask a function which guard fails, if there is doubt."""
        source.line(f"if {doubt}:")
        source.line(f"    number = {call}")
        source.line("    if number is not None: return number")

    def _ask_for_classes(self, source: GeneratedSource) -> None:
        """Ask whether modules and other objects are of the classes that they were of."""
        environment = self._recording.environment
        modules = [part for part in environment.parts if part.kind is CaptureKind.MODULE]
        if modules:
            source.names.update(
                modules=[part.value for part in modules], classes=[part.type for part in modules]
            )
            changed = self._questions.note("a module is of another class now")
            source.line(f"if list(map(type, modules)) != classes: return {changed}")
        objects = [part for part in environment.parts if may_change_class(part)]
        if objects:
            source.names.update(
                objects=[part.value for part in objects], sorts=[part.type for part in objects]
            )
            other = self._questions.note("an object is of another class now")
            source.line(f"if list(map(type, objects)) != sorts: return {other}")

    def _ask_for_code(self, source: GeneratedSource) -> None:
        """Ask whether functions have the code that they had, and their defaults."""
        codes = self._codes
        if codes:
            keywords = [function.__kwdefaults__ for function in codes if function.__kwdefaults__]
            written = _writes_in(codes, keywords)
            source.names.update(functions=codes, written=written)
            edited = self._questions.note("a function has another code, or other defaults")
            if keywords:
                source.names.update(keywords=keywords, read=_writes_in, same=_same_objects)
                source.line(f"if not same(read(functions, keywords), written): return {edited}")
            else:
                source.names["writing"] = _WRITTEN
                now = "chain(map(writing, functions))"
                source.line(f"if not all(map(is_, {now}, written)): return {edited}")

    def _ask_for_namespaces(self, source: GeneratedSource) -> None:
        """Ask whether classes have the attributes that they had, of whatever value."""
        grown = self._questions.note("a class has gained or lost attributes")
        own: list[tuple[Any, Any]] = []
        installed: list[tuple[Any, Any]] = []
        for namespace, names in self._recording.environment.namespaces.values():
            module = namespace.get("__module__")  # (of a metaclass's bases, a descriptor)
            finished = not isinstance(module, str) or is_installed_module(module)
            (installed if finished else own).append((namespace, names))
        if installed:
            source.names["namespaces"] = [namespace for namespace, _ in installed]
            source.names["sizes"] = [len(names) for _, names in installed]
            source.line(f"if list(map(len, namespaces)) != sizes: return {grown}")
        if own:
            source.names["classes_own"] = [namespace for namespace, _ in own]
            source.names["names_own"] = [names for _, names in own]
            source.line(f"if list(map(tuple, classes_own)) != names_own: return {grown}")

    def _ask_for_order(self, source: GeneratedSource, part: Captured) -> None:
        """Check the order of a dict's entries, since forward may iterate over them."""
        children = self._classes.children.get(part.index, ())
        if len(children) < 2 and not any(type(child.key) is not str for child in children):
            return
        moved = self._questions.note(f"what {part.label} has is in another order")
        source.names["same_keys"] = same_keys
        now = name = source.part(part)
        if part.hidden:
            now = f"[key for key in {name} if key not in {source.bound(part.hidden)}]"
        wanted = tuple(child.key for child in children)
        other = f"not same_keys({now}, {source.bound(wanted)})"
        held = tuple(part.value) if type(part.value) is dict else ()
        if held and same_keys([key for key in held if key not in part.hidden], wanted):
            # Mostly they are the very keys that were there, which takes no bytecode to find out.
            same = f"len({name}) == {len(held)} and all(map(is_, {name}, {source.bound(held)}))"
            other = f"not ({same}) and {other}"
        source.line(f"if {other}: return {moved}")

    def _ask_for_each(self, source: GeneratedSource) -> None:
        """Ask of what is left, one by one."""
        covered = self._classes.covered()
        for part in self._recording.environment.parts:
            first = part.value if part.kind is CaptureKind.ALIAS else part
            if id(part) not in covered and self._ignored.isdisjoint((part, first)):
                self._questions.ask(source, part)

    def _ask_for_hooks(self, source: GeneratedSource) -> None:
        if self._hooked:
            tables, hooked = zip(*self._hooked, strict=True)
            source.names.update(hooks=[*tables], hooked=[*hooked], items=_hook_items)
            others = self._questions.note(_OTHER_HOOKS)
            source.line(f"if list(map(items, hooks)) != hooked: return {others}")

    def _ask_for_caches(self, source: GeneratedSource) -> None:
        environment = self._recording.environment
        if environment.read_caches:
            source.names.update(cached=environment.read_caches, all_kept=are_cached)
            cleared = self._questions.note(
                "a cache does not hold any more what the run took from it"
            )
            source.line(f"if not all_kept(cached): return {cleared}")
        if environment.caches:  # which runs that are added later may fill
            source.names.update(filled=environment.filled_caches, agree=_same_cache_entries)
            other = self._questions.note("a cache does not hold what the run put into it")
            source.line(f"if filled and not agree(filled): return {other}")

    def _ask_for_world(self, source: GeneratedSource, asking: str) -> None:
        """Ask whether all is as it was that is watched by its content, by a method of that."""
        name, world = f"world_{asking}", self._recording.environment.watched_objects
        source.names[name] = getattr(world, asking)
        other = self._questions.note("something that the model's code can read has changed")
        source.line(f"if not {name}(): return {other}")

    def _ask_for_conditions(self, source: GeneratedSource) -> None:
        """Ask what flow steps asked of arguments and of the model's numbers."""
        ops = self._recording.tape.ops
        guards = [
            (number, guard)
            for number, guard in enumerate(self._recording.tape.guards)
            if self._analysis.kinds[number] is GuardKind.INPUT
            and not any(
                ops[index].target in self._ignored
                for index in dependencies_of(ops, [guard.index])
                if isinstance(ops[index].target, Captured)
            )
        ]
        needed = dependencies_of(ops, (i for _, guard in guards for i in tested_ops(guard, ops)))
        # In the tape's order: a condition may protect the arithmetic of a later one.
        events: list[tuple[int, int, Any]] = [(index, -1, ops[index]) for index in needed]
        events += [(guard.position - 1, number, guard) for number, guard in guards]
        tested: set[tuple[Any, ...]] = set()
        for _, number, event in sorted(events, key=lambda item: item[:2]):
            if number < 0:
                if isinstance(event.target, Captured):
                    source.take((event.target,))
                define(source, event)
            elif event.key not in tested:
                tested.add(event.key)
                failed = self._questions.note("", guard=number)
                source.line(f"if {fails(source, event, ops)}: return {failed}", event.index)

    # What is asked in doubt.

    def _in_tables(self, *kinds: CaptureKind) -> list[Captured]:
        """Return what is in the tables of parameters and buffers, of some kinds or of all."""
        children = self._classes.children
        inside = [part for table in self._classes.tables for part in children[table.index]]
        return [part for part in inside if not kinds or part.kind in kinds]

    def _write_function(self, source: GeneratedSource, head: str, parts: list[Captured]) -> None:
        """Write a function that asks of some parts, one by one."""
        source.begin(head)
        for part in parts:
            self._questions.ask(source, part)
        source.line("return None")

    def _write_comparison(
        self, source: GeneratedSource, name: str, versioned: list[tuple[Captured, list[Captured]]]
    ) -> None:
        """Write what is asked of dicts that were written to since they were asked last."""
        classes, questions = self._classes, self._questions
        found = (classes.module_of.get(id(part.value)) for part, _ in versioned)
        owners = [part.value for part in found if part is not None]  # they come first
        source.names.update({
            f"{name}_seen": [[None] * len(versioned)], f"{name}_owners": owners,
            f"{name}_dicts": [part.value for part, _ in versioned[len(owners) :]],
            "attributes": operator.attrgetter("__dict__"),  # takes less time than `vars`
        })  # fmt: skip
        hollow: dict[int, list[Captured]] = {}
        for part in classes.hollow:
            if part.parent is not None:
                hollow.setdefault(part.parent.index, []).append(part)
        ties = set()
        for number, (holder, parts) in enumerate(versioned):
            source.begin(f"{name}_{number}(A)")
            if self._sameness.may_tie(holder):
                ties.add(number)
            if holder.kind is CaptureKind.DICT and holder not in self._ignored:
                questions.ask(source, holder)
                self._ask_for_order(source, holder)
                self._ask_for_tables(source, holder)
                if holder in classes.tables:
                    keys = source.bound({part.key for part in classes.children[holder.index]})
                    lost = questions.note(f"{holder.label} has gained or lost attributes", holder)
                    source.line(f"if {source.part(holder)}.keys() != {keys}: return {lost}")
            for part in parts:
                questions.ask(source, part)
            for part in hollow.get(holder.index, ()):
                exact = source.constant(part.type)
                wrong = questions.note(f"{part.label} is not a {part.type.__name__}", part)
                source.line(f"if type({source.reach(part)}) is not {exact}: return {wrong}")
            source.line("return None")
        source.indent = 0
        functions = "".join(f"{name}_{number}, " for number in range(len(versioned)))
        source.line(f"{name}_each, {name}_ties = ({functions}), {source.bound(ties)}")
        source.begin(f"{name}(places, A)")
        source.line("others = False")
        source.line("for place in places:")
        source.line(f"    number = {name}_each[place](A)")
        source.line("    if number is not None: return number")
        source.line(f"    others = others or place in {name}_ties")
        source.line("return distinct(A) if others else None")

    def _ask_for_tables(self, source: GeneratedSource, part: Captured) -> None:
        """Ask whether a module has the very dicts that were walked."""
        module = self._classes.module_of.get(id(part.value))
        if module is None:
            return
        tables = tuple(item for item in part.value.items() if id(item[1]) in self._dict_ids)
        other = self._questions.note(
            f"the attributes of {module.label}, or its tables, were replaced", part
        )
        names, held = [key for key, _ in tables], [table for _, table in tables]
        attributes = source.part(part)
        found = f"map({attributes}.get, {source.bound(names)})"
        same = f"all(map(is_, {found}, {source.bound(held)}))"
        source.line(
            f"if {source.bound(module.value)}.__dict__ is not {attributes} or not {same}: "
            f"return {other}"
        )


# What is exchanged in a function that is edited in place, as notebooks do when they reload.
_WRITTEN = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OTHER_HOOKS = "the modules have other hooks"
_FEW_ENTRIES = 32


def _has_more(
    missing: dict[int, tuple[Any, set[str]]], sized: dict[int, tuple[Any, frozenset[str]]]
) -> bool:
    """Return whether namespaces have names that they did not have."""
    return not all(space.keys().isdisjoint(names) for space, names in missing.values()) or not all(
        names.issuperset(space) for space, names in sized.values()
    )


def _writes_in(functions: list[Any], keywords: list[dict[str, Any]]) -> list[Any]:
    """Return what is written of functions, and what stands for keywords that nobody gives."""
    return [
        *chain.from_iterable(map(_WRITTEN, functions)),
        *chain.from_iterable(keywords),
        *chain.from_iterable(map(dict.values, keywords)),
    ]


def _same_objects(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _same_cache_entries(filled: dict[Any, list[tuple[Any, Any]]]) -> bool:
    """Return whether caches hold what they held after the run.

    If an entry is missing, the model would compute it again, and keep it: a replay would not.
    Nor would it drop one that has come into an empty cache.
    """
    for cache, before in filled.items():
        now = dict(entries_of(cache))
        if now and not before:
            return False
        if not all(key in now and identical(now[key], result) for key, result in before):
            return False
    return True


def _hook_items(hooks: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(hooks.items())


# Sorting the parts of an environment by how they are checked before a run.
#
# A model consists of dicts that live as long as it does. What they hold is another thing only if
# they were written to, which their versions tell, and much of it cannot change in itself.


def may_change_class(part: Captured) -> bool:
    """Return whether a thing that is known by identity is an object of a class in Python."""
    if part.kind is not CaptureKind.IDENTITY or part.access is Access.ROOT:
        return False
    steady = (type, types.ModuleType, types.FunctionType, types.MethodType)
    return is_heap_type(part.type) and not isinstance(part.value, steady)


class GuardClasses:
    """The parts of a run's environment, sorted by how they are checked.

    `marked` are the state tensors on which the run sets attributes that were not there; parts in
    `ignored` are not checked.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        marked: set[Captured],
        ignored: frozenset[Captured],
    ) -> None:
        parts = recording.environment.parts
        self._analysis, self._marked, self._ignored = analysis, marked, ignored
        self.children: dict[int, list[Captured]] = {}  # parts by the index of what holds them
        for part in parts:
            if part.parent is not None:
                self.children.setdefault(part.parent.index, []).append(part)
        # Modules by the identity of the dict that has their attributes.
        self.module_of: dict[int, Captured] = {
            id(vars(p.value)): p for p in parts if p.kind is CaptureKind.MODULE
        }
        self.counted: list[Captured] = []  # dicts of which the number of entries is asked each time
        self.hollow: list[Captured] = []  # empty containers in such dicts
        self._following: set[int] = set()  # parts that follow from the version of a dict
        versioned = self._versioned(parts)
        # Dicts of the model of which the version is, those of modules' attributes first, with what
        # they hold that cannot change without another version.
        self.of_model: list[tuple[Captured, list[Captured]]] = [
            pair for pair in versioned if pair[0].kind is CaptureKind.DICT
        ]
        # The same for namespaces of Python modules, to which all code may write.
        self.of_spaces: list[tuple[Captured, list[Captured]]] = [
            pair for pair in versioned if pair[0].kind is not CaptureKind.DICT
        ]
        # Tables of parameters or buffers, of which only classes and ranks are asked.
        self.tables: list[Captured] = [table for table, _ in versioned if self._is_table(table)]
        simple = [part for part in parts if self._is_simple(part)]
        # What else is usually the very object that it was, which the interpreter finds out without
        # bytecode.
        self.simple: list[Captured] = [
            part for part in simple if not _is_part_of_fixed(types.MappingProxyType, part)
        ]
        # The same in namespaces of classes.
        self.in_classes: list[Captured] = [
            part for part in simple if _is_part_of_fixed(types.MappingProxyType, part)
        ]
        # The same in the cells of functions.
        self.in_cells: list[Captured] = [part for part in parts if self._is_in_cell(part)]

    def covered(self) -> set[int]:
        """Return the identities of the parts that are not asked one by one each time."""
        inside = (part for table in self.tables for part in self.children[table.index])
        several = (self.simple, self.in_classes, self.in_cells, self.counted, inside)
        return self._following | {id(part) for part in chain.from_iterable(several)}

    def _versioned(self, parts: list[Captured]) -> list[tuple[Captured, list[Captured]]]:
        roots: dict[int, tuple[Captured, list[Captured]]] = {}
        for part in parts:
            if part.access is Access.FIXED:
                # Each module has many empty tables: that they are is found out in one go.
                if part.kind is CaptureKind.DICT and (
                    not part.size or type(part.value) is not dict
                ):
                    if part not in self._ignored:
                        self.counted.append(part)
                elif type(part.value) is dict and part.kind in (
                    CaptureKind.DICT,
                    CaptureKind.IDENTITY,
                ):
                    roots[part.index] = part, []
                continue
            root = self._root_of(part)
            if root is not None and root.index in roots and part not in self._ignored:
                roots[root.index][1].append(part)
                self._following.add(id(part))
            elif self._is_hollow(part) and part.parent is not None and part.parent.index in roots:
                self.hollow.append(part)
                self._following.add(id(part))
        hosts = {part.parent.index for part in self.hollow if part.parent is not None}
        versioned = [
            (part, parts)
            for part, parts in roots.values()
            if parts
            or (part.kind is CaptureKind.DICT and part not in self._ignored)
            or part.index in hosts
        ]
        self._following |= {id(part) for part, _ in versioned}
        versioned.sort(key=lambda item: id(item[0].value) not in self.module_of)
        return versioned

    def _is_table(self, table: Captured) -> bool:
        parts = self.children.get(table.index, ())
        if table.size != Length(len(parts)):
            return False
        asked = self._analysis.typed_state | self._marked
        tensors = {part for part in parts if part.kind is CaptureKind.TENSOR}
        nothing = all(part.value is None for part in parts if part not in tensors)
        free = tensors.isdisjoint(asked) and self._ignored.isdisjoint(parts)
        return bool(tensors) and nothing and free

    def _root_of(self, part: Captured) -> Captured | None:
        """Return the fixed dict that holds a part which changes with an entry of it alone."""
        if part.access is not Access.ITEM or part.parent is None:
            return None
        if not self._is_steady(part):
            return None
        holder = part.parent
        if holder.access is Access.FIXED:
            return holder
        # What a tuple holds is the same for as long as it is the same tuple.
        return self._root_of(holder) if holder.kind is CaptureKind.TUPLE else None

    def _is_hollow(self, part: Captured) -> bool:
        """Return whether a part is an empty container in a fixed dict.

        A container of plain values may hold tensors the next time, so that it is not kept, but
        taken from where it is each time.
        """
        return (
            part.access is Access.ITEM
            and part.parent is not None
            and part.parent.access is Access.FIXED
            and part.type in (dict, list, set)
            and part.kind in (CaptureKind.DICT, CaptureKind.LIST, CaptureKind.SET)
            and not part.size
            and part not in self._ignored
        )

    def _is_steady(self, part: Captured) -> bool:
        """Return whether a part cannot change itself, other than by another thing in its place."""
        if part.kind is CaptureKind.ALIAS:
            return part.value.kind in (CaptureKind.MODULE, CaptureKind.IDENTITY)
        if part.kind in (CaptureKind.TUPLE, CaptureKind.SET):
            return part.type in (tuple, frozenset)
        return part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)

    def _is_simple(self, part: Captured) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (CaptureKind.DICT, CaptureKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)
            and id(part) not in self._following
            and part not in self._ignored
        )

    def _is_in_cell(self, part: Captured) -> bool:
        return (
            part.access is Access.CELL
            and part.kind in (CaptureKind.PLAIN, CaptureKind.MODULE, CaptureKind.IDENTITY)
            and _is_part_of_fixed(types.CellType, part)
            and part not in self._ignored
        )


def _is_part_of_fixed(kind: type, part: Captured) -> bool:
    """Return whether a part is held by a fixed object of some type."""
    holder = part.parent
    return holder is not None and holder.access is Access.FIXED and type(holder.value) is kind


# Guard code: writing the checks of single captured values, and that two names are one object.
#
# A run tells by identity which tensors and containers are one, and what follows from it: what is
# written to one of them shows in all. So objects that were distinct have to be distinct again.


@dataclass(frozen=True)
class Check:
    """One thing that is checked before a run."""

    text: str  # what is wrong if it fails
    part: Captured | None = None  # what it is about; None for checks about several
    guard: int | None = None  # number of the guard on the tape, for one that a flow step put


class GuardCode:
    """Writes lines that give the number of a check that fails."""

    def __init__(self, recording: Recording, analysis: Analysis) -> None:
        self.checks: list[Check] = []  # what each number stands for
        # State tensors on which the run sets attributes that were not there, or looks for some that
        # may not be there.
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

    def ask(self, source: GeneratedSource, part: Captured) -> None:
        """Write the tests of whether a part is unchanged, as far as that matters."""
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
            for slot in set(slot_names(part.type)) - {str(key) for key in size.keys}:
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


def _other_content(source: GeneratedSource, part: Captured, content: Any) -> str:
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
    source: GeneratedSource,
    part: Captured,
    facts: TensorFacts,
    analysis: Analysis,
    marked: bool,
    fail_if: Callable[[str, str], None],
) -> None:
    name, label = source.part(part), part.label
    source.names.update(read_of=read_of)

    def read(attribute: str) -> str:
        if part.type in PLAIN_TENSORS:
            return f"{name}.{attribute}"
        return f"read_of({name}, {attribute!r})"

    if part.is_argument or part in analysis.typed_state:
        fail_if(
            f"{read('dtype')} is not {source.constant(facts.dtype)}",
            f"{label} is not of dtype {facts.dtype}",
        )
        fail_if(
            f"{read('device')} != {source.constant(facts.device)}",
            f"{label} is not on device {facts.device}",
        )
        fail_if(
            f"{read('layout')} is not {source.constant(facts.layout)}",
            f"{label} is not {facts.layout}",
        )
    if part.is_argument or part in analysis.ranked_state:
        fail_if(f"{read('ndim')} != {facts.rank}", f"{label} does not have {facts.rank} dimensions")
    if part.is_argument or marked:
        condition = f"len({name}.__dict__) != {facts.attributes}"
        fail_if(
            condition if facts.attributes else f"{name}.__dict__", f"{label} has other attributes"
        )
    if part.is_argument:
        fail_if(
            f"{read('requires_grad')} is not {facts.requires_grad}",
            f"{label} {'does not require' if facts.requires_grad else 'requires'} grad",
        )


class AliasGuards:
    """Writes what is asked about the tensors, containers and objects of arguments and model."""

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
        self._operated = recording.environment.operated_containers
        several += self._operated
        self._given = [part for part in several if part.is_argument]
        self._arrays = [part for part in several if part.kind is CaptureKind.ARRAY]
        opened = recording.environment.open_arrays
        self._open = [part for part in opened if not is_number(part.type)]
        self._tensors = [
            part
            for part in recording.environment.parts
            if part.kind is CaptureKind.TENSOR and not part.is_argument and part not in ignored
        ]
        self._kept_parts = [
            part for part in several if not part.is_argument and part.access is not Access.FIXED
        ]

    def may_tie(self, holder: Captured) -> bool:
        """Return whether another value in a fixed thing may be one that the model holds already."""
        return bool(self._arrays) or holder in self._holders

    @functools.cached_property
    def _holders(self) -> set[Captured]:
        """The fixed things that hold, maybe in others, what has to be distinct."""
        found = set()
        for part in self._kept_parts:
            while part.parent is not None:
                part = part.parent
            found.add(part)
        return found

    def write_distinct(self, source: GeneratedSource) -> None:
        """Write `distinct(A)`: whether the things that the model holds are still as many.

        Tied ones are known as such. That others have become one and the same is asked when a dict
        that the model consists of was written to, and each time where they are in others.
        """
        source.begin("distinct(A)")
        source.take(self._kept_parts)
        if len(self._kept_parts) > 1:
            tied = self._questions.note(
                "two things that the model holds are now one and the same object"
            )
            names = ", ".join(f"id({source.part(part)})" for part in self._kept_parts)
            source.line(f"if len({{{names}}}) != {len(self._kept_parts)}: return {tied}")
            if inside := self._inside(source):
                source.line(f"if not {{{names}}}.isdisjoint(({inside})): return {tied}")
        if not any(part.is_argument for part in self._arrays):
            self._ask_for_memory(source, self._tensors)
        source.line("return None")
        if self._open:
            tensors = [part for part in self._given if part.kind is CaptureKind.TENSOR]
            used = [*tensors, *self._tensors], [*self._arrays, *self._open]
            open_arrays.write_apart(source, self._open, *used, self._questions.note)

    def _inside(self, source: GeneratedSource) -> str:
        """Return an expression for the identities of what containers hold whose operations are ops.

        A number may be one of these, and is nothing that the model holds.
        """
        holders = [part for part in self._operated if part.type in containers.HOLDING]
        source.take(holders)
        found = ""
        for name, part in zip(map(source.part, holders), holders, strict=True):
            items = name if part.type is list else f"{name}.values()"
            found += f"*map(id, {items}), "
        return found

    def ask(self, source: GeneratedSource) -> None:
        """Write the tests that each check needs."""
        if self._open:
            open_arrays.ask_apart(source, self._open)
        given, state = self._given, set(self._kept_parts)
        if len(given) > 1:
            names = [source.part(part) for part in given]
            same = f"{' is '.join(names)}"
            if len(given) > 2:
                same = f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}"
            number = self._questions.note("two arguments are now one and the same object")
            source.line(f"if {same}: return {number}")
        matters = bool(self._recording.changes) or self._recording.environment.compares_identity
        matters = matters or bool(self._operated)
        may_hold = any(part.type in containers.HOLDING for part in self._operated)
        if (may_hold and len(state) > 1) or any(
            part.parent is not None
            and (part.parent in state or (matters and not _is_versioned(part.parent)))
            for part in state
        ):
            source.line("number = distinct(A)")
            source.line("if number is not None: return number")
        self._ask_for_strangers(source)
        given = [part for part in self._given if part.kind is CaptureKind.TENSOR]
        is_given = any(part.is_argument for part in self._arrays)
        self._ask_for_memory(source, [*given, *self._tensors] if is_given else given)

    def _ask_for_memory(self, source: GeneratedSource, tensors: list[Captured]) -> None:
        """Ask which tensors are in the memory of which arrays, and would change with them.

        Even if the run writes to none: a run that continues from it may.
        """
        if not tensors or not self._arrays:
            return
        used = [*tensors, *self._arrays]
        source.take([p for p in used if not p.is_argument and p.access is not Access.FIXED])
        overlaps = self._recording.environment.shared_memory
        pairs = {
            (one, other)
            for one, tensor in enumerate(tensors)
            for other, array in enumerate(self._arrays)
            if (tensor, array) in overlaps
        }
        source.names["overlap"] = overlap
        tensor_names = "".join(f"{source.part(part)}, " for part in tensors)
        arrays = "".join(f"{source.part(part)}, " for part in self._arrays)
        number = self._questions.note("other tensors are in the memory of arrays now")
        source.line(
            f"if overlap(({tensor_names}), ({arrays})) != {source.bound(pairs)}: return {number}"
        )

    def _ask_for_strangers(self, source: GeneratedSource) -> None:
        """Ask whether an argument is something that the model holds now, if it might be asked."""
        given, state, environment = self._given, self._kept_parts, self._recording.environment
        objects = [
            part
            for part in given
            if part.kind is CaptureKind.OBJECT
            and (environment.compares_identity or compares_by_identity(part.type))
        ]
        what = "an argument is now what the model holds itself"
        if objects:
            # Whose identities are known: the parts are guarded by them, and members do not change.
            insiders = [
                part.value
                for part in environment.parts
                if part.kind is CaptureKind.IDENTITY and not part.is_argument
            ]
            source.names["known"] = frozenset(map(id, [*insiders, *environment.members]))
            names = ", ".join(f"id({source.part(part)})" for part in objects)
            source.line(f"if not known.isdisjoint(({names},)): return {self._questions.note(what)}")
        if not (self._ties or environment.compares_identity):
            # What is written to a container shows in whatever else is the same one.
            changes = bool(self._recording.changes or objects or self._operated)
            state = [part for part in state if changes and part.kind is not CaptureKind.TENSOR]
            given = [part for part in given if part.kind is not CaptureKind.TENSOR]
        if not given or not state:
            return
        source.take(state)
        names = ", ".join(f"id({source.part(part)})" for part in given)
        own = ", ".join(f"id({source.part(part)})" for part in state)
        own = f"{own}, {self._inside(source)}"
        number = self._questions.note(what)
        source.line(f"if not {{{names}}}.isdisjoint(({own})): return {number}")


def _is_versioned(holder: Captured) -> bool:
    """Return whether it is noticed when something is written to what holds a part."""
    is_dict = holder.kind is CaptureKind.DICT and type(holder.value) is dict
    return is_dict and holder.access is Access.FIXED


_DISTINCT = (
    CaptureKind.TENSOR, CaptureKind.LIST, CaptureKind.DICT, CaptureKind.OBJECT, CaptureKind.SET,
    CaptureKind.LARGE, CaptureKind.ARRAY, CaptureKind.OPEN_ARRAY, CaptureKind.GROWING,
)  # fmt: skip
# What nothing is written to, so that only `is` tells whether two of them are one.
_COMPARED = (CaptureKind.TUPLE,)
