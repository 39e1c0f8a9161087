"""Matches the modules, flow steps and entries of two runs.

Items at the same place match: in the same module, at the same expression of the same function.
Between two versions of a model, code has moved and modules have been renamed or wrapped; then items
of one kind between the same neighbours match. The passes of a place are distinguished by their
loops and calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain

from bendtrace.flow import FlowStep, LogicalFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry, Source
from bendtrace.history.run_log import RunLog

Pair = tuple[int, int]

# Up to so many pairs of keys, a stretch without anchors is compared in full.
_CELLS = 40_000
# Beyond, so many keys that follow a key distinguish it.
_COMPANY = (2, 4, 8, 16, 32)
_DEPTH = 32


def match(
    a: Sequence[Sequence[Hashable]], b: Sequence[Sequence[Hashable]], single: int = 0
) -> dict[int, int]:
    """Pair the items of two sequences, with weaker keys in each round.

    In the first round a key that is unique on both sides makes a pair wherever it is. In the
    following rounds, the items left over between two pairs are aligned in order. An item whose key
    is None skips the round.

    Args:
        a: for each round, the key of each item of one sequence.
        b: the same for the other.
        single: in so many of the last rounds, pair only keys that are left over once on each side.

    Returns:
        The position of the partner in `b`, by position in `a`.

    Example:
        >>> match([["x", "f", "y"], [0, 1, 2]], [["new", "x", "g", "y"], [9, 0, 1, 2]])
        {0: 1, 2: 3, 1: 2}
    """
    partners = dict(_unique_pairs(a[0], b[0]))
    for round_, (keys_a, keys_b) in enumerate(zip(a, b, strict=True)):
        only_single = round_ >= len(a) - single
        taken = set(partners.values())
        anchors = increasing(sorted(partners.items()))
        for part_a, part_b in _gaps(anchors, len(keys_a), len(keys_b)):
            free_a = [i for i in part_a if i not in partners and keys_a[i] is not None]
            free_b = [j for j in part_b if j not in taken and keys_b[j] is not None]
            if not free_a or not free_b:
                continue
            inner_a, inner_b = [keys_a[i] for i in free_a], [keys_b[j] for j in free_b]
            found = (
                increasing(_unique_pairs(inner_a, inner_b))
                if only_single
                else align(inner_a, inner_b)
            )
            partners.update((free_a[i], free_b[j]) for i, j in found)
    return partners


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Pair equal keys of two sequences, keeping their order.

    Keys that are unique on both sides are anchors (the patience method); the items between two
    anchors are aligned in the same way, and short sections without anchors by their longest blocks.
    The time is about linear in the length of the sequences.

    Example:
        >>> align("abcab", "xabab")
        [(0, 1), (1, 2), (3, 3), (4, 4)]
    """
    pairs: list[Pair] = []
    stretches = [(0, len(a), 0, len(b), 0)]
    while stretches:
        a0, a1, b0, b1, depth = stretches.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            pairs.append((a0, b0))
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
            pairs.append((a1, b1))
        if a0 == a1 or b0 == b1:
            continue
        part_a, part_b = a[a0:a1], b[b0:b1]
        anchors = increasing(_unique_pairs(part_a, part_b))
        if not anchors and len(part_a) * len(part_b) <= _CELLS:
            blocks = SequenceMatcher(None, part_a, part_b, autojunk=False).get_matching_blocks()
            pairs += [(a0 + i + k, b0 + j + k) for i, j, length in blocks for k in range(length)]
            continue
        if not anchors and depth < _DEPTH:
            anchors = _by_company(part_a, part_b)
        pairs += [(a0 + i, b0 + j) for i, j in anchors]
        if anchors:
            stretches += [
                (a0 + gap_a.start, a0 + gap_a.stop, b0 + gap_b.start, b0 + gap_b.stop, depth + 1)
                for gap_a, gap_b in _gaps(anchors, len(part_a), len(part_b))
            ]
    return sorted(pairs)


def increasing(pairs: Sequence[Pair]) -> list[Pair]:
    """Return a longest subset of pairs that increases on both sides.

    Args:
        pairs: sorted by their first items.
    """
    ends: list[int] = []  # the smallest second item that ends a choice of each length
    last: list[int] = []  # and which pair that is
    before: list[int] = []
    for number, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        last[length : length + 1] = [number]
    chosen: list[Pair] = []
    number = last[-1] if last else -1
    while number >= 0:
        chosen.append(pairs[number])
        number = before[number]
    return chosen[::-1]


def _unique_pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    often_a, often_b = Counter(a), Counter(b)
    places = {key: j for j, key in enumerate(b)}
    return [
        (i, places[key])
        for i, key in enumerate(a)
        if key is not None and often_a[key] == 1 and often_b[key] == 1
    ]


def _by_company(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Return anchors of two long sections in which no key is unique on both sides."""
    for length in _COMPANY:
        anchors = increasing(_unique_pairs(_runs(a, length), _runs(b, length)))
        if anchors:
            return anchors
    # All are similar: match by count.
    return increasing(_unique_pairs(_numbered(a), _numbered(b)))


def _runs(keys: Sequence[Hashable], length: int) -> list[Hashable]:
    return [tuple(keys[i : i + length]) for i in range(len(keys) - length + 1)]


def _numbered(keys: Sequence[Hashable]) -> list[Hashable]:
    seen: Counter[Hashable] = Counter()
    numbered: list[Hashable] = []
    for key in keys:
        numbered.append((key, seen[key]))
        seen[key] += 1
    return numbered


def _gaps(anchors: Sequence[Pair], length_a: int, length_b: int) -> Iterator[tuple[range, range]]:
    i, j = 0, 0
    for next_i, next_j in [*anchors, (length_a, length_b)]:
        if next_i > i and next_j > j:
            yield range(i, next_i), range(j, next_j)
        i, j = next_i + 1, next_j + 1


class RunIndex:
    """One of two runs, with indexes for repeated look-ups."""

    def __init__(self, history: RunLog) -> None:
        self.history = history
        self.entries: list[LayerEntry] = list(history.entries)
        self.steps: Sequence[FlowStep] = list(history.flow_steps)

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each entry in the order of the run, by label."""
        return {entry.label: number for number, entry in enumerate(self.entries)}

    @cached_property
    def calls(self) -> dict[str, ModuleEntry]:
        """The calls of modules, by label."""
        return {call.label: call for call in self.history.modules}

    @cached_property
    def modules(self) -> dict[str, list[ModuleEntry]]:
        """The calls of each module, by its name, in the order of the first calls."""
        modules: dict[str, list[ModuleEntry]] = {}
        for call in self.history.modules:
            modules.setdefault(call.name, []).append(call)
        return modules

    @cached_property
    def classes(self) -> dict[str, str]:
        """The class of each module, including the root's."""
        return {"": self.history.name} | {
            name: calls[0].class_name for name, calls in self.modules.items()
        }

    def classes_around(self, scopes: Sequence[str]) -> tuple[str, ...]:
        """Return the classes of the innermost of some module calls, including the root's."""
        inner = [self.calls[scope].class_name if scope in self.calls else ""
                 for scope in scopes[-3:]]  # fmt: skip
        return (self.history.name, *inner)[-3:]

    def own_source(self, entry: LayerEntry) -> Source | None:
        """Return the source of an entry in the code of its module.

        None in modules with installed code: there the source of an entry is that of the module
        call.
        """
        call = self.calls.get(entry.scopes[-1]) if entry.scopes else None
        return None if call is not None and call.source == entry.source else entry.source

    @cached_property
    def conditions(self) -> set[tuple[str, str]]:
        """The conditions that were evaluated, as function and expression."""
        return {(step.place.function, step.text) for step in self.steps}

    def side(self, flow: Iterable[int], known: set[tuple[str, str]]) -> Hashable:
        """Return the innermost of some conditions among flow steps, and the side that was taken.

        Args:
            flow: numbers of the flow steps.
            known: the conditions to consider.
        """
        for number in reversed(tuple(flow)):
            step = self.steps[number]
            condition = step.place.function, step.text
            if isinstance(step, LogicalFlowStep) and step.kind != "while" and condition in known:
                return *condition, bool(step.value)
        return None

    def iteration(self, flow: Iterable[int]) -> tuple[int, ...]:
        """Return the iteration of an item, as far as its flow steps show it."""
        return next((self.steps[n].iteration for n in reversed(tuple(flow))
                     if self.steps[n].iteration), ())  # fmt: skip


@dataclass
class _Site:
    """The events at one place of the source, in one module: its passes."""

    keys: tuple[Hashable, ...]
    contexts: dict[tuple[Hashable, Hashable], list[int]] = field(default_factory=dict)


class Matching:
    """The matching of two runs.

    Args:
        a: one run.
        b: the other.
    """

    def __init__(self, a: RunIndex, b: RunIndex) -> None:
        self.a = a
        self.b = b
        self._same_source = _SameSource(a, b)

    @cached_property
    def modules(self) -> dict[str, str]:
        """For names of modules in `a`, the name of the same module in `b`; the root is ""."""
        names_a, names_b = list(self.a.classes), list(self.b.classes)
        shifted = _shifted(self.a.classes, self.b.classes)
        found = match(
            _columns([_module_keys(name, self.a.classes[name], shifted) for name in names_a], 4),
            _columns([_module_keys(name, self.b.classes[name], shifted) for name in names_b], 4),
        )
        names = {names_a[i]: names_b[j] for i, j in found.items()}
        if "" not in names and "" not in names.values():
            names[""] = ""
        return names

    @cached_property
    def entries(self) -> dict[int, int]:
        """For positions of entries in `a`, the position of the matching entry in `b`."""
        a, b = (_entry_sites(run, self._module_ids(run), self._same_source)
                for run in (self.a, self.b))  # fmt: skip
        return _match_sites(a, b, rounds=_ROUNDS)

    @cached_property
    def back(self) -> dict[int, int]:
        """For positions of entries in `b`, the position of the matching entry in `a`."""
        return {j: i for i, j in self.entries.items()}

    @cached_property
    def steps(self) -> dict[int, int]:
        """For numbers of flow steps in `a`, the number of the matching step in `b`."""
        a, b = (_step_sites(run, self._module_ids(run), self._same_source)
                for run in (self.a, self.b))  # fmt: skip
        return _match_sites(a, b, rounds=4)

    def _module_ids(self, run: RunIndex) -> dict[str, Hashable]:
        """Return identifiers of modules for the keys of both runs."""
        if run is self.a:
            return {name: self.modules.get(name, ("only in a", name)) for name in run.classes}
        known = set(self.modules.values())
        return {name: name if name in known else ("only in b", name) for name in run.classes}


def _module_keys(name: str, class_name: str, shifted: set[str]) -> tuple[Hashable, ...]:
    owner, _, leaf = name.rpartition(".")
    exact: Hashable = (name, class_name)
    alike: Hashable = (leaf, class_name)
    if any(f"{above}." in shifted for above in _prefixes(name)):
        exact = None
    if f"{owner}." in shifted and leaf.isdecimal():
        exact = alike = None
    # The root has no name of its own: two roots match by class, or because both are roots.
    return exact, alike, class_name, leaf or None


def _prefixes(name: str) -> Iterator[str]:
    """Yield what a numbered module above a name, or the name itself, is numbered in."""
    parts = name.split(".") if name else []
    for length, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join(parts[:length])


def _shifted(a: dict[str, str], b: dict[str, str]) -> set[str]:
    """Return where modules were inserted or removed, so that the numbers of others have shifted.

    Returns:
        The names of the numbered modules' parents, with a trailing dot.
    """
    return {
        f"{name.rpartition('.')[0]}."
        for name in a.keys() & b.keys()
        if name.rpartition(".")[2].isdecimal() and a[name] != b[name]
    }


class _SameSource:
    """Whether both runs ran the same source of a function, or two versions of it.

    In the same source, another expression is another place, however similar; in another version it
    may be the edited one.

    Attributes:
        conditions: the conditions that were decided in both runs.
    """

    def __init__(self, a: RunIndex, b: RunIndex) -> None:
        self.conditions = a.conditions & b.conditions
        lines = [_lines(run) for run in (a, b)]
        self._same = {
            function
            for function in lines[0].keys() & lines[1].keys()
            if _agree(lines[0][function], lines[1][function])
        }
        self._same_innermost = {
            (classes[-1], file, function) for classes, file, function in self._same
        }

    def line(self, classes: tuple[str, ...], file: str, function: str, line: int) -> int | None:
        """Return the line if it is comparable between the runs."""
        return line if (classes, file, function) in self._same else None

    def line_of_step(self, run: RunIndex, step: FlowStep) -> int | None:
        """Return the line of a flow step if it is comparable between the runs."""
        function = (run.classes.get(step.module_path, ""), step.place.file, step.place.function)
        return step.line if function in self._same_innermost else None


# The modules that run them distinguish functions of one name in one file.
_Function = tuple[tuple[str, ...], str, str]


def _lines(run: RunIndex) -> dict[_Function, dict[int, set[str]]]:
    found: dict[_Function, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    around: dict[str, tuple[str, ...]] = {"": ()}  # the calls around a call, itself included
    seen: list[tuple[Sequence[str], Source | None]] = []
    for call in run.history.modules:
        around[call.label] = (*around.get(call.parent, ()), call.label)
        seen.append((around[call.label][:-1], call.source))
    seen += [(entry.scopes, run.own_source(entry)) for entry in run.entries]
    for scopes, source in seen:
        if source is not None:
            key = (run.classes_around(scopes), source.file, source.function)
            found[key][source.line].add(source.statement)
    return found


def _agree(a: dict[int, set[str]], b: dict[int, set[str]]) -> bool:
    """Return whether the lines seen in both runs have equal text, and none has moved."""
    both = a.keys() & b.keys()
    if not both or any(a[line].isdisjoint(b[line]) for line in both):
        return False
    where_a, where_b = _where(a), _where(b)
    return all(where_a[text] & where_b[text] for text in where_a.keys() & where_b.keys())


def _where(lines: dict[int, set[str]]) -> dict[str, set[int]]:
    where: dict[str, set[int]] = defaultdict(set)
    for line, texts in lines.items():
        for text in texts:
            where[text].add(line)
    return where


_ROUNDS = 6


def _entry_sites(
    run: RunIndex, modules: dict[str, Hashable], same_source: _SameSource
) -> list[_Site]:
    sites: dict[Hashable, _Site] = {}
    calls = {label: _call_text(call) for label, call in run.calls.items()}
    for position, entry in enumerate(run.entries):
        identity = (entry.kind, entry.name, entry.element)
        site = sites.get(identity)
        if site is None:
            keys = _entry_keys(run, entry, modules, same_source)
            site = sites[identity] = _Site(keys)
        called = tuple(calls.get(scope) for scope in entry.scopes)
        site.contexts.setdefault((run.iteration(entry.flow), called), []).append(position)
    return list(sites.values())


def _call_text(call: ModuleEntry) -> Hashable:
    return None if call.source is None else (call.source.function, call.source.text)


def _entry_keys(
    run: RunIndex, entry: LayerEntry, modules: dict[str, Hashable], same_source: _SameSource
) -> tuple[Hashable, ...]:
    """Return the keys of an entry, from the strictest to the most lenient."""
    kind, element, module = entry.kind, entry.element, modules.get(entry.module, entry.module)
    if kind in ("input", "output"):
        exact: tuple[Hashable, ...] = (kind, entry.node if kind == "input" else "", element)
        return exact, exact, None, None, kind, None
    if kind == "state":
        owner, _, leaf = entry.name.rpartition(".")
        named = (kind, modules.get(owner, owner), leaf)
        return named, named, None, None, None, None
    what = (kind, entry.layer_type, element)
    source = run.own_source(entry)
    function = text = line = None
    if source is not None:
        function, text = source.function, source.text
        classes = run.classes_around(entry.scopes)
        line = same_source.line(classes, source.file, function, source.line)
    side = run.side(entry.flow, same_source.conditions)
    return (
        (what, module, function, text, side, line),
        (what, module, function, text, side),
        (what, module, side, line),
        (what, function, text, side, line),
        (what, side, line),
        # Another kind of op may match the only op left over there.
        (kind, element, module, side, line),
    )


def _step_sites(
    run: RunIndex, modules: dict[str, Hashable], same_source: _SameSource
) -> list[_Site]:
    sites: dict[Hashable, _Site] = {}
    for number, step in enumerate(run.steps):
        module = modules.get(step.module_path, step.module_path)
        place = step.place
        is_whole = step.guard is None
        identity = (step.module_path, step.kind, place.file, place.span, step.text, is_whole)
        site = sites.get(identity)
        if site is None:
            line = same_source.line_of_step(run, step)
            what = (step.kind, is_whole)
            site = sites[identity] = _Site((
                (what, module, place.function, step.text, line),
                (what, module, place.function, step.text),
                (what, place.function, step.text),
                (what, module, line),
            ))  # fmt: skip
        site.contexts.setdefault((step.iteration, None), []).append(number)
    return list(sites.values())


def _match_sites(a: list[_Site], b: list[_Site], rounds: int) -> dict[int, int]:
    found = match(
        _columns([site.keys for site in a], rounds),
        _columns([site.keys for site in b], rounds),
        single=int(rounds == _ROUNDS),
    )
    pairs: dict[int, int] = {}
    for i, j in found.items():
        pairs.update(_match_passes(a[i], b[j]))
    return pairs


def _match_passes(a: _Site, b: _Site) -> dict[int, int]:
    """Pair the passes of a place: those in the same iteration of the same call, by number."""
    pairs: dict[int, int] = {}
    left_a: dict[Hashable, list[int]] = defaultdict(list)
    left_b: dict[Hashable, list[int]] = defaultdict(list)
    for left, site, other in ((left_a, a, b), (left_b, b, a)):
        for context, passes in site.contexts.items():
            both = min(len(passes), len(other.contexts.get(context, ())))
            if site is a:
                pairs.update(zip(passes[:both], other.contexts.get(context, ()), strict=False))
            left[context[0]] += passes[both:]
    # The call of the module has another text now, or is made elsewhere.
    for iteration, passes in left_a.items():
        pairs.update(zip(sorted(passes), sorted(left_b.get(iteration, ())), strict=False))
    if not pairs:  # another loop
        every_a, every_b = (sorted(chain(*left.values())) for left in (left_a, left_b))
        pairs.update(zip(every_a, every_b, strict=False))
    return pairs


def _columns(rows: Sequence[tuple[Hashable, ...]], width: int) -> list[list[Hashable]]:
    return [[row[column] for row in rows] for column in range(width)]
