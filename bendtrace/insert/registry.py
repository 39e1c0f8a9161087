"""The insertion registry: all insertions of one model."""

from __future__ import annotations

import copy
import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError, NodePathError
from bendtrace.insert import gates
from bendtrace.insert.insertion import Insertion, What, as_interjection, blaming
from bendtrace.insert.interjection import Interjection, Passes, PassNumbers
from bendtrace.insert.plan import InsertionPlan, LocatedInsertion, Location, StateTensor, forms_of
from bendtrace.insert.resolver import Knowledge, describe_where, node_name_of
from bendtrace.insert.where import (
    AtPath,
    AtPaths,
    InCalls,
    LocationText,
    OfModule,
    Target,
    Where,
    aliased,
    near_misses,
    targets_named,
    targets_of,
)
from bendtrace.log.entries import layer_type_of
from bendtrace.log.nodes import Kind, NodePath, Pass, Role, TreeNode, identifier
from bendtrace.log.path_views import Candidate, Tree
from bendtrace.log.run import Run, RunNames, is_layer_name
from bendtrace.record.recorder import Recording
from bendtrace.tape.scalars import TRACED

if TYPE_CHECKING:
    from bendtrace.engine.dispatcher import Calls
    from bendtrace.module import BendedModule

_DEEPEST = 40  # calls inside of each other, before an insertion is asked whether it makes them
_OF_NODE = gates.InsteadGate._node.__code__
_MOST_NOTES = 16  # on why something was not called; more would not be read

# Where, what, and in which passes.
InsertionRow = tuple[str, tuple[Target, ...], Interjection, Passes, bool]


class InsertionRegistry:
    """The insertions of one model, in the order in which they were made.

    `changed` is called when they change, with whether there are any. The calls of the model are
    those that each thread is in.
    """

    def __init__(self, model: Knowledge, changed: Callable[[bool], None], calls: Calls) -> None:
        self._model = model
        self._changed = changed
        self._calls = calls
        self._lock = threading.RLock()
        self._insertions: tuple[Insertion, ...] = ()
        self._plan: tuple[tuple[Insertion, ...], InsertionPlan] | None = None

    def __bool__(self) -> bool:
        return bool(self._insertions)

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The active insertions."""
        return self._insertions

    def insert(
        self,
        where: Where | StateTensor,
        what: What,
        *,
        passes: PassNumbers | Passes = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Insert something; see `BendedModule.interject`."""
        insertion = self.make(
            where, what, passes=passes, every=every, calls=calls, allow_none=allow_none
        )
        self.add(insertion)
        return insertion

    def make(
        self,
        where: Where | StateTensor,
        what: What,
        *,
        passes: PassNumbers | Passes = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Create and check an insertion, without activating it."""
        interjection = as_interjection(what)
        if calls is not None:
            interjection = InCalls(interjection, calls)
        where, alias = aliased(where, self._model.model)
        if alias is not None:
            interjection = alias.around(interjection)
        chosen = passes if isinstance(passes, Passes) else Passes(passes, every)
        targets = targets_of(where, self._model, lenient=allow_none)
        named = [target.passes for target in targets if target.passes is not None]
        if named:
            if passes is not None or every is not None or len(targets) > 1:
                raise InputError(
                    f"{describe_where(where)} names passes: give them either there or with "
                    "passes=, and one node at a time"
                )
            chosen = Passes(named[0])
        for target in targets:
            if target.place is not None:
                _require_possible(target.place, interjection)
        insertion = Insertion(self, where, targets, interjection, chosen, allow_none)
        exact = all(
            target.place is None
            or target.place.role != "node"
            or isinstance(target.place.matcher, (AtPath, OfModule))
            for target in targets
        )
        insertion.is_checked = (
            allow_none or exact or self._is_matched(insertion, self._model.candidates())
        )
        return insertion

    def add(self, *insertions: Insertion) -> None:
        """Activate insertions, all together.

        Raise `InputError` if this thread is in a call of the model.
        """
        if insertions and self._calls.depth:
            raise InputError(
                "insertions cannot be added while the model is running, since they would take "
                "effect in the next call only: add them before or after the call"
            )
        with self._lock:
            self._insertions = (*self._insertions, *insertions)
            self._plan = None
            self._changed(bool(self._insertions))

    def remove(self, *insertions: Insertion) -> None:
        """Remove insertions."""
        with self._lock:
            kept = tuple(i for i in self._insertions if all(i is not gone for gone in insertions))
            if len(kept) < len(self._insertions):
                self._insertions, self._plan = kept, None
                self._changed(bool(kept))

    def clear(self) -> None:
        """Remove all insertions."""
        self.remove(*self._insertions)

    def holds(self, insertion: Insertion) -> bool:
        """Return whether an insertion is active."""
        return any(other is insertion for other in self._insertions)

    # Copies

    def copyable_rows(self, memo: dict[int, Any] | None) -> list[InsertionRow]:
        """Return the insertions for a copy of the model.

        The memo has the objects copied so far, for a deep copy; None when everything is pickled.
        """
        found: list[InsertionRow] = []
        for insertion in self._insertions:
            targets = tuple(target.without_nodes() for target in insertion.targets)
            location = LocationText(describe_where(insertion.where))
            options = insertion.passes, insertion.allow_none
            row: InsertionRow = location, targets, insertion.what, *options
            found.append(row if memo is None else copy.deepcopy(row, memo))
        return found

    def restore(self, *insertions: InsertionRow) -> None:
        """Restore the result of `copyable_rows`."""
        self.add(*(Insertion(self, *kept) for kept in insertions))

    # What runs need

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InsertionPlan | None:
        """Return the insertions of a call; None if there are none.

        Raises:
            NodePathError: a name matches no node in the first run that could show it.
            InterjectionError: one of them calls the model, which would call it without end.
        """
        insertions = self._insertions
        if not insertions:
            return None
        if self._calls.depth > _DEEPEST:
            self._refuse_call_of_insertion()
        cached = self._plan
        if cached is not None and cached[0] is insertions:
            return cached[1]
        self._look_up(insertions)
        is_open = any(
            not insertion.is_checked or any(target.is_open for target in insertion.targets)
            for insertion in insertions
        )
        looks_ahead = [
            insertion
            for insertion in insertions
            if insertion.passes.needs_total or any(target.is_ahead for target in insertion.targets)
        ]
        run = None
        if looks_ahead and (run := self._model.foreseen(args, kwargs)) is None:
            raise InputError(_AHEAD.format(looks_ahead[0]))
        plan = self._build_plan(insertions, run, is_open)
        if not looks_ahead and not is_open:
            self._plan = insertions, plan
        return plan

    def _refuse_call_of_insertion(self) -> None:
        """Raise if the innermost gate around this call has called one of the insertions."""
        # By the frames, not by a list of the active gates: keeping one would cost each gate in each
        # call, and this is asked only where calls are nested deeply.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not _OF_NODE:  # which calls the model's code
            entry = frame.f_locals.get("entry") if frame.f_globals is vars(gates) else None
            if entry is not None and entry.insertion._owner is self:
                raise InterjectionError(
                    f"{entry.what.label} at {describe_where(entry.insertion.where)} calls the "
                    "BendedModule that it is inserted in, which calls it again, without end: "
                    "call `bended.model`, in which nothing is inserted",
                    entry.place.shown,
                )
            frame = frame.f_back

    def _look_up(self, insertions: tuple[Insertion, ...]) -> None:
        """Look names and patterns up that no run had shown so far, if there are runs by now.

        Raise `NodePathError` if the runs have no such node.
        """
        for number, insertion in enumerate(insertions):
            with blaming(insertion, number):
                if any(target.is_open for target in insertion.targets):
                    targets = [
                        found
                        for target in insertion.targets
                        for found in self._find_targets(insertion, target)
                    ]
                    insertion.targets = tuple(targets)
                insertion.is_checked = insertion.is_checked or self._is_matched(
                    insertion, self._model.candidates()
                )

    def plan_of_parts(self) -> tuple[InsertionPlan, bool]:
        """Return the insertions with known locations, and whether there are others."""
        entries = []
        unknown = False
        modules = {node.module_path: node.module for node in self._model.modules()}
        for insertion in self._insertions:
            unknown = unknown or insertion.passes.needs_total
            for target in insertion.targets:
                place = target.place
                if place is None and target.is_open and target.original in modules:
                    module = modules[target.original]
                    assert module is not None
                    place = Location("node", OfModule(module))
                if place is None:
                    unknown = True
                else:
                    entries.append(LocatedInsertion(insertion, insertion.what, place))
        return InsertionPlan(entries), unknown

    def notes_on(self, insertion: Insertion) -> tuple[str, ...]:
        """Return notes on why an insertion was not called."""
        if not insertion.runs:
            return ("no call was made",)
        paths = dict.fromkeys(
            path for target in insertion.targets for path in self._paths_of(target)
        )
        notes = (self._note_on(insertion, path) for path in itertools.islice(paths, _MOST_NOTES))
        found = tuple(dict.fromkeys(filter(None, notes)))
        return found or self._hints(insertion) or ("no run reached a selected node",)

    def _hints(self, insertion: Insertion) -> tuple[str, ...]:
        """Return hints on where modules may be called that no known run has reached."""
        modules = {id(self._module_of(target)) for target in insertion.targets}
        names = [node.module_path for node in self._model.modules() if id(node.module) in modules]
        return tuple(dict.fromkeys(filter(None, map(self._model.hint, names))))

    def _module_of(self, target: Target) -> nn.Module | None:
        """Return the module whose calls are selected, or that has the selected parameter."""
        matcher = None if target.place is None else target.place.matcher
        if isinstance(matcher, StateTensor):
            holder = matcher.name.rpartition(".")[0]
            return next((n.module for n in self._model.modules() if n.module_path == holder), None)
        return matcher.module if isinstance(matcher, OfModule) else None

    def _paths_of(self, target: Target) -> Iterable[str]:
        """Return the known paths of the selected nodes."""
        matcher = None if target.place is None else target.place.matcher
        if isinstance(matcher, AtPath):
            return (matcher.path,)
        if isinstance(matcher, AtPaths):
            return sorted(matcher.paths)
        if (module := self._module_of(target)) is not None:
            return self._model.paths_of(module)
        if matcher is None or isinstance(matcher, StateTensor):
            return ()
        return [node.path for node in self._model.candidates() or () if matcher.matches(node)]

    def _note_on(self, insertion: Insertion, path: str) -> str:
        """Return why an insertion was not called at a node."""

        def counts(passes: int) -> bool:
            if insertion.passes.is_asked:  # a user function, which may count its calls
                return passes > 0
            return any(insertion.passes.admits(number, passes) for number in range(passes))

        passes = max(self._model.count_passes(path, run) for run in insertion.runs)
        if not counts(passes):
            why = self._model.why_not(path, insertion.runs, counts)
            if not passes:
                return why
            times = "one pass" if passes == 1 else f"{passes} passes"
            text = f"{path!r} had {times}, none of which is selected ({insertion.passes}, from 0)"
            return f"{text}: {why}" if why else text
        if not forms_of(insertion.what) & {"before", "instead", "after"}:
            return f"no backward pass reached {path!r}"
        return ""

    def _build_plan(
        self, insertions: tuple[Insertion, ...], run: Run | None, is_open: bool
    ) -> InsertionPlan:  # fmt: skip
        entries = []
        for insertion in insertions:
            for target in insertion.targets:
                place = target.place
                if target.is_ahead:
                    assert run is not None
                    place = target.ahead(run.candidates)
                    if not place.matcher.paths and not insertion.allow_none:
                        raise NodePathError(
                            f"{describe_where(target.original)} selects no node of this run; "
                            + near_misses("", list(run.candidates.nodes)),
                            repr(target.original),
                        )
                if place is not None:
                    entries.append(LocatedInsertion(insertion, insertion.what, place))
        lookup = None
        if is_open:
            lookup = NameLookup(self._model, insertions, _check_location, self._is_matched)
        totals = None
        if run is not None:
            totals = {node.path: len(node.passes) for node in run.tree.data.walk()}
        return InsertionPlan(entries, totals, lookup)

    def _find_targets(self, insertion: Insertion, target: Target) -> tuple[Target, ...]:
        """Look a name up in the known runs; return it as it is if there are none."""
        if not target.is_open:
            return (target,)
        targets = targets_of(target.original, self._model, lenient=insertion.allow_none)
        for found in targets:
            _check_location(insertion, found)
            if found.passes is not None:
                insertion.passes = Passes(found.passes)
        return targets

    def _is_matched(self, insertion: Insertion, nodes: Iterable[Candidate] | None) -> bool:
        """Return whether everything requested matches a node; these are None before a run.

        Raise `NodePathError` if the model was run, and has no such node.
        """
        holders = [*self._model.modules(), *(nodes or ())]
        for target in insertion.targets:
            if target.place is None or target.place.role != "node":
                continue
            matcher = target.place.matcher
            if isinstance(matcher, (AtPath, OfModule)) or any(map(matcher.matches, holders)):
                continue
            if nodes is None:
                return False
            is_pattern = isinstance(target.original, re.Pattern)
            text = (
                target.original.pattern if is_pattern else getattr(target.original, "__name__", "")
            )
            raise NodePathError(
                f"{describe_where(target.original)} selects no known node; "
                + near_misses(text, [node.path for node in nodes if node.path])
                + " (allow_none=True waits for a later run)",
                describe_where(target.original),
            )
        return True


_AHEAD = (
    "the nodes of {!r} depend on the whole run, which is known before a call only if the model has "
    "run with such inputs, under this grad mode, and neither a change of state nor a random number "
    "decides its way: call the model once before you insert it, or use node paths, modules or "
    "selectors that do not look ahead"
)


def _check_location(insertion: Insertion, target: Target) -> None:
    """Raise for an interjection that is not possible at its location."""
    if target.place is not None:
        _require_possible(target.place, insertion.what)


_AROUND = frozenset({"before", "instead", "backward"})


def _require_possible(place: Location, what: Interjection) -> None:
    """Raise for an interjection that is not possible at a location."""
    forms = forms_of(what)
    if place.role != "node" and forms & _AROUND:
        kind = "an input" if place.role == "input" else "a parameter or buffer"
        raise InputError(
            f"{what.label} works around a node, but {place.shown!r} is {kind}, which only has "
            "a value"
        )
    if place.role == "input" and place.matcher.path and what._only_outputs:
        raise InputError(
            f"{place.shown!r} is the input of a module: give the value of the node that computes it"
        )
    if place.dig and forms & _AROUND:
        raise InputError(
            f"{what.label} works around a node, but {place.shown!r} is a part of a node's output"
        )
    if place.role == "node" and place.matcher.needs_output and forms & _AROUND:
        raise InputError(
            f"{what.label} is called before the node, but {describe_where(place.matcher)} "
            "depends on the node's output"
        )


# Resolves the names of insertions in the first run that can show them, while it is recorded.
#
# No model runs for the sake of names alone: user code would act twice. The inserter reports each
# node that the run reaches, and a name that may lead to it is looked up in a tree of the nodes so
# far:
#
#     a call begins    its node, its arguments, and the parameters and buffers of the module
#     an op begins     its node
#     either ends      the parts of its output
#
# After the run, its complete tree decides. If a name means something else there, or nothing, the
# call raises, and neither the meaning of a name nor a path is kept.

Check = Callable[[Insertion, Target], None]
_PASS = re.compile(r"(.+):(\d+)", re.DOTALL)


class OneRun:
    """One run, as names are looked up in it."""

    def __init__(self, knowledge: Knowledge, tree: Tree, names: RunNames) -> None:
        self.model: Callable[..., Any] = knowledge.model
        self.hint: Callable[[str], str] = knowledge.hint
        self._tree = tree
        self._names = names

    def trees(self) -> Iterable[Tree]:
        """Return the tree of the run."""
        return [self._tree]

    def names(self) -> Iterable[RunNames]:
        """Return the names in the run."""
        return [self._names]

    def mirror_path(self, name: str) -> str:
        """Return "": a node of a mirror belongs to another run."""
        return ""


@dataclass(eq=False)
class _Name:
    """A name that no run has shown so far."""

    insertion: Insertion  # the insertion at it
    target: Target  # what the user gave
    text: str  # the name
    stem: str  # the name without a pass
    chosen: tuple[int, ...] | None  # the pass, counted from 0; None for all
    words: tuple[str, ...]  # the words of the stem, in order
    layer: tuple[str, int] | None  # type and number of the layer that it may name; None for none
    found: tuple[Target, ...] = ()  # what it means, as far as the run has shown


class NameLookup:
    """The names that a run has to resolve for its insertions, which are in order.

    `check` raises for an interjection that is not possible at its location. `is_matched` raises if
    a pattern matches none of some nodes, and returns whether it does. Raises `InputError` if a name
    can only be resolved after a run.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        insertions: Sequence[Insertion],
        check: Check,
        is_matched: Callable[[Insertion, Sequence[Candidate]], bool],
    ) -> None:
        self._knowledge = knowledge
        self._check = check
        self._is_matched = is_matched
        self._order = {id(insertion): number for number, insertion in enumerate(insertions)}
        self._unchecked = [insertion for insertion in insertions if not insertion.is_checked]
        self._names = [
            _insertion_name(insertion, target, knowledge)
            for insertion in insertions
            for target in insertion.targets
            if target.is_open
        ]
        self._of_type: Counter[str] = Counter()  # the layers so far
        self._ops: list[Candidate] = []  # of which the complete run shows what ran instead
        self._root = TreeNode("", "graph", "Graph", "call", path=NodePath())
        self._graphs: dict[str, TreeNode] = {"": self._root}

    def order(self, entry: LocatedInsertion) -> int:
        """Return the position of an entry among the insertions."""
        return self._order[id(entry.insertion)]

    def may_be_below(self, path: str, names: frozenset[str]) -> bool:
        """Return whether a name may lead below a call, through one of some names."""
        words = _words(path)
        inner = [_words(name) for name in names]
        return any(
            _begins(name.words, words) and any(_begins(name.words[len(words) :], w) for w in inner)
            for name in self._names
        )

    # What the run reaches

    def call(
        self, path: str, relative: str, module: str, arguments: Mapping[str, Any],
        states: Iterable[str] = (),
    ) -> list[LocatedInsertion]:  # fmt: skip
        """Look names up where a call begins; return what is inserted there.

        The relative name is the one of the module in the code around it. The arguments are given by
        the names of the inputs in the tree. The states are the parameters and buffers that it holds
        itself.
        """
        if not self._may_lead_to(path, relative):
            return []
        node = self._graph(path, relative, module)
        for name, value in arguments.items():
            self._value(node, name, name, value, "input")
        for name in states:
            self._add(node, identifier(name), name, "tensor", "state").key = name
        return self._resolve(path, relative)

    def op(self, node: Candidate) -> list[LocatedInsertion]:
        """Look names up where an op begins; return what is inserted there."""
        self._ops.append(node)
        path, base = node.path, node.base
        kind = layer_type_of(node.function)
        self._of_type[kind] += 1
        layer = kind, self._of_type[kind]
        place = Location("node", AtPath(NodePath(path)), shown=path)
        made = [
            entry
            for name in self._names
            if name.layer == layer and not name.found
            for entry in self._place_insertions(name, (Target(name.text, place),))
        ]
        if not self._may_lead_to(path, base):
            return made
        outer, _, name = path.rpartition(".")
        parent = self._graph(outer)
        if name not in parent.children:
            self._add(parent, name, base, "tensor", "op")
        return made + self._resolve(path, base)

    def output(self, path: str, base: str, value: Any, *, is_call: bool) -> list[LocatedInsertion]:
        """Look names up where a node ends; return what is inserted there.

        The base is its name without a number. `is_call` is for calls of modules, and of the model.
        """
        if not self._may_lead_to(path, base):
            return []
        if is_call:
            self._value(self._graph(path), "output", "output", value, "output")
        else:
            outer, _, name = path.rpartition(".")
            self._value(self._graph(outer), name, base, value, "op")
        return self._resolve(path, base)

    def _may_lead_to(self, path: str, base: str) -> bool:
        return any(self._lead_to(path, base))

    def _lead_to(self, path: str, base: str) -> Iterable[_Name]:
        """Yield the unresolved names that may belong to a node, or to a part of it."""
        outer = path.rpartition(".")[0]
        words, others = _words(path), _words(f"{outer}.{base}")
        for name in self._names:
            if not name.found and (_begins(name.words, words) or _begins(name.words, others)):
                yield name

    def _resolve(self, path: str, base: str) -> list[LocatedInsertion]:
        made: list[LocatedInsertion] = []
        tree = Tree(self._root)
        one_run = OneRun(self._knowledge, tree, RunNames(tree, None))
        for name in self._lead_to(path, base):
            try:
                targets = targets_named(name.stem, one_run)
            except NodePathError:
                continue  # which the complete tree shows as well
            made += self._place_insertions(name, targets)
        return made

    def _place_insertions(self, name: _Name, targets: Sequence[Target]) -> list[LocatedInsertion]:
        """Take what a name has turned out to mean; return what is inserted there."""
        for target in targets:
            self._check(name.insertion, target)
        if name.chosen is not None and targets:
            name.insertion.passes = Passes(name.chosen)
        name.found = tuple(Target(name.target.original, t.place, name.chosen) for t in targets)
        places = [target.place for target in targets if target.place is not None]
        return [LocatedInsertion(name.insertion, name.insertion.what, place) for place in places]

    # The tree so far

    def _graph(self, path: str, relative: str = "", module: str = "") -> TreeNode:
        cached = self._graphs.get(path)
        if cached is None:
            outer, _, name = path.rpartition(".")
            cached = self._add(self._graph(outer), name, relative or name, "graph", "call")
            self._graphs[path] = cached
        if module:
            cached.module, cached.key = module, relative
        return cached

    def _add(
        self, parent: TreeNode, name: str, label: str, kind: Kind, role: Role
    ) -> TreeNode:  # fmt: skip
        node = TreeNode(name, kind, "", role, path=parent.child_path(name), passes=[Pass(0)])
        node.label = label if label != name else ""
        parent.children[name] = node
        parent.spellings = None
        return node

    def _value(self, parent: TreeNode, name: str, label: str, value: Any, role: Role) -> None:
        items = _named_items(value)
        kind: Kind = "other" if items is None else "container"
        if isinstance(value, Tensor):
            kind, items = "tensor", None
        elif type(value) in TRACED or type(value) in (bool, int, float):
            kind = "number"
        node = self._add(parent, name, label, kind, role)
        for key, part, inner in items or ():
            self._value(node, identifier(part), part, inner, role)
            node.children[identifier(part)].key = key

    # After the run

    def settle(self, recording: Recording) -> None:
        """Have the complete run decide what the names mean.

        Raise `NodePathError` if a name means nothing, several things, or something else than what
        was found while the run was recorded.
        """
        run = self._knowledge.run(recording)
        one_run = OneRun(self._knowledge, run.tree, run.naming)
        updates: dict[int, tuple[Insertion, list[Target]]] = {}
        for name in self._names:
            insertion, target = name.insertion, name.target
            with blaming(insertion, self._order[id(insertion)]):
                try:
                    targets = targets_of(target.original, one_run)
                except NodePathError:
                    if insertion.allow_none and not name.found:
                        continue
                    if not name.found or targets_named(name.text, one_run):
                        raise
                    targets = name.found  # another function ran instead of this one
            if _target_places(targets, name.chosen) != _target_places(name.found):
                listed = " and ".join(repr(t.place.shown) for t in targets if t.place is not None)
                raise NodePathError(
                    f"only a complete run shows that {name.text!r} means {listed}: nothing was "
                    "inserted there in this call. Write that, or call the model once before",
                    name.text,
                )
            _, chosen = updates.setdefault(id(insertion), (insertion, list(insertion.targets)))
            for number in [i for i, other in enumerate(chosen) if other is target]:
                chosen[number : number + 1] = targets  # unless another thread has been faster
        for insertion in self._unchecked:
            with blaming(insertion, self._order[id(insertion)]):
                self._is_matched(insertion, [*run.nodes.candidates.values(), *self._ops])
        for insertion, chosen in updates.values():
            insertion.targets = tuple(chosen)
        for insertion in self._unchecked:
            insertion.is_checked = True

    def require_names(self) -> None:
        """Raise a `NodePathError` if a run of a method has not shown a name."""
        for name in self._names:
            if not name.found and not name.insertion.allow_none:
                raise NodePathError(f"this run has no node {name.text!r}", name.text)


def _insertion_name(insertion: Insertion, target: Target, knowledge: Knowledge) -> _Name:
    text = node_name_of(target.original, knowledge)
    assert text is not None
    named = _PASS.fullmatch(text)
    stem, chosen = text, None
    if named is not None:
        # A dot in front: of several calls of a module, a pass is one of a node.
        stem, chosen = f".{named[1].lstrip('.')}", (int(named[2]) - 1,)
    if ":" in stem:
        raise InputError(
            f"{text!r} names a pass of a call around the node, which only a complete run shows: "
            "call the model once before"
        )
    is_layer = is_layer_name(text) and not isinstance(text, NodePath)
    kind, *numbers = re.split("[_:]", text) if is_layer else ("",)
    layer = (kind, int(numbers[0])) if is_layer else None
    return _Name(insertion, target, text, stem, chosen, _words(stem), layer)


def _target_places(
    targets: Iterable[Target], chosen: tuple[int, ...] | None = None
) -> set[tuple[Any, Any]]:  # fmt: skip
    # A layer with one pass is the same as its first pass.
    return {(target.place, target.passes or chosen) for target in targets}


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a name or path, which are the same however it is spelled."""
    return tuple(word for word in re.findall(r"[^\W_]+", text) if word != "sub")


def _begins(words: tuple[str, ...], start: tuple[str, ...]) -> bool:
    return words[: len(start)] == start


def _named_items(value: Any) -> list[tuple[str | int, str, Any]] | None:
    """Return the key, the preferred name and the value of each item of a container, or None."""
    if isinstance(value, dict):
        return [(key if isinstance(key, (str, int)) else repr(key), str(key), value[key])
                for key in value]  # fmt: skip
    if not isinstance(value, (tuple, list)):
        return None
    fields = getattr(value, "_fields", None)
    if fields is None and hasattr(value, "n_sequence_fields"):
        fields = getattr(value, "__match_args__", ())
    names = list(fields or ())
    return [(i, names[i] if i < len(names) else f"sub_{i}", item) for i, item in enumerate(value)]


# Insertions of one model that are added and removed together.


class InsertionGroup:
    """Insertions of one model that are added and removed together; a context manager.

    Workflows and harvests, which need several insertions together, reach the model only through
    this class. All insertions are checked before the first one is inserted.
    """

    def __init__(self, model: BendedModule) -> None:
        self.insertions: list[Insertion] = []  # in the order in which they were made
        self._insertion_registry = model._insertion_registry
        self._knowledge = model._knowledge

    def recorded_runs(self) -> list[Recording]:
        """Return the known runs of the model, including those with insertions."""
        return list(self._knowledge.recordings())

    def make(
        self,
        where: Where,
        what: What,
        *,
        allow_none: bool = False,
        kind: type[Insertion] = Insertion,
    ) -> Insertion:
        """Create and check an insertion of the group, without activating it.

        With `allow_none`, `where` may match no node. Raise `NodePathError` if `where` matches no
        node.
        """
        made = self._insertion_registry.make(where, what, allow_none=allow_none)
        if kind is not Insertion:
            checked = made.is_checked
            made = kind(
                self._insertion_registry,
                made.where,
                made.targets,
                made.what,
                made.passes,
                allow_none,
            )
            made.is_checked = checked
        self.insertions.append(made)
        return made

    def insert_all(self, *order: Insertion) -> None:
        """Insert all together, in the order `order` if there is one."""
        self._insertion_registry.add(*(order or self.insertions))

    def surround(self, first: list[Insertion], last: list[Insertion]) -> None:
        """Insert some before, and others after, all existing insertions."""
        others = self._insertion_registry.insertions
        self._insertion_registry.remove(*others)
        self._insertion_registry.add(*first, *others, *last)

    def replace(self, number: int, where: Where) -> None:
        """Move an active insertion to other nodes."""
        old = self.insertions[number]
        old.remove()
        self.insertions[number] = self._insertion_registry.insert(where, old.what, allow_none=True)

    def remove(self) -> None:
        """Remove all of them. Further calls have no effect."""
        self._insertion_registry.remove(*self.insertions)

    def forget_plans(self) -> None:
        """Have the model examine all insertions again, after one of them has changed."""
        self._insertion_registry.add()

    def __enter__(self) -> Self:
        self.insert_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class InsertionHandle:
    """A handle on a group of insertions: calls the model, and removes them at the end."""

    def __init__(self, model: Any, group: InsertionGroup) -> None:
        self.model = model
        self._group = group
        group.insert_all()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def remove(self) -> None:
        """Remove the insertions. Further calls have no effect."""
        self._group.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                for insertion in self._group.insertions:
                    insertion.warn_if_never_fired(3)
        finally:
            self._group.remove()


def is_root(node: Candidate) -> bool:
    """Return whether a node is the call of the model itself."""
    return node.path == ""
