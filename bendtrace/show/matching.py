"""Matches the modules, flow steps and entries of two runs.

Items at the same place match: in the same module, at the same expression of the same function.
Between two versions of a model, code has moved and modules have been renamed or wrapped; then items
of one kind between the same neighbours match. The passes of a place are distinguished by their
loops and calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bendtrace.flow import FlowStep, LogicalFlowStep, LoopFlowStep
from bendtrace.log.entries import LayerEntry, ModuleEntry, Source, number_text
from bendtrace.log.run_log import RunLog
from bendtrace.python.compare import same_bits
from bendtrace.python.sites import place_text

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
                else pair_keys(inner_a, inner_b)
            )
            partners.update((free_a[i], free_b[j]) for i, j in found)
    return partners


def pair_keys(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Pair equal keys of two sequences, keeping their order.

    Keys that are unique on both sides are anchors (the patience method); the items between two
    anchors are aligned in the same way, and short sections without anchors by their longest blocks.
    The time is about linear in the length of the sequences.

    Example:
        >>> pair_keys("abcab", "xabab")
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
    """Return a longest subset of pairs that increases on both sides."""
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
    return increasing(_unique_pairs(_number_repeats(a), _number_repeats(b)))


def _runs(keys: Sequence[Hashable], length: int) -> list[Hashable]:
    return [tuple(keys[i : i + length]) for i in range(len(keys) - length + 1)]


def _number_repeats(keys: Sequence[Hashable]) -> list[Hashable]:
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

        None in modules with installed code: there an entry has the source of the module
        call.
        """
        call = self.calls.get(entry.scopes[-1]) if entry.scopes else None
        return None if call is not None and call.source == entry.source else entry.source

    @cached_property
    def conditions(self) -> set[tuple[str, str]]:
        """The conditions that were evaluated, as function and expression."""
        return {(step.place.function, step.text) for step in self.steps}

    def side(self, flow: Iterable[int], conditions: set[tuple[str, str]]) -> Hashable:
        """Return the innermost of some conditions among flow steps, and the side that was taken."""
        for number in reversed(tuple(flow)):
            step = self.steps[number]
            condition = step.place.function, step.text
            if (
                isinstance(step, LogicalFlowStep)
                and step.kind != "while"
                and condition in conditions
            ):
                return *condition, bool(step.value)
        return None

    def iteration(self, flow: Iterable[int]) -> tuple[int, ...]:
        """Return the iteration of an item, as far as its flow steps show it."""
        return next((self.steps[n].iteration for n in reversed(tuple(flow))
                     if self.steps[n].iteration), ())  # fmt: skip


@dataclass
class _SourceSite:
    """The events at one place of the source, in one module: its passes."""

    keys: tuple[Hashable, ...]
    contexts: dict[tuple[Hashable, Hashable], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Matching:
    """The matching of two runs."""

    def __init__(self, a: RunIndex, b: RunIndex) -> None:
        self.a = a
        self.b = b
        self._same_source = _SameSource(a, b)

    @cached_property
    def modules(self) -> dict[str, str]:
        """For names of modules in `a`, the name of the same module in `b`; the root is ""."""
        names_a, names_b = list(self.a.classes), list(self.b.classes)
        shifted = _shifts(self.a.classes, self.b.classes)
        found = match(
            _transpose_rows(
                [_module_keys(name, self.a.classes[name], shifted) for name in names_a], 4
            ),
            _transpose_rows(
                [_module_keys(name, self.b.classes[name], shifted) for name in names_b], 4
            ),
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
        partners = set(self.modules.values())
        return {name: name if name in partners else ("only in b", name) for name in run.classes}


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
    """Yield the lists in which a name, or a module above it, is numbered."""
    parts = name.split(".") if name else []
    for length, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join(parts[:length])


def _shifts(a: dict[str, str], b: dict[str, str]) -> set[str]:
    """Return the parents, with a trailing dot, whose numbered modules have shifted."""
    return {
        f"{name.rpartition('.')[0]}."
        for name in a.keys() & b.keys()
        if name.rpartition(".")[2].isdecimal() and a[name] != b[name]
    }


class _SameSource:
    """Decides whether both runs ran the same source of a function, or two versions of it.

    In the same source, two expressions are two places, however similar. In two versions of it, the
    one may be the other after an edit.
    """

    def __init__(self, a: RunIndex, b: RunIndex) -> None:
        # The conditions that were decided in both runs.
        self.conditions = a.conditions & b.conditions
        lines = [_lines_of_functions(run) for run in (a, b)]
        self._same = {
            function
            for function in lines[0].keys() & lines[1].keys()
            if _have_equal_lines(lines[0][function], lines[1][function])
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


def _lines_of_functions(run: RunIndex) -> dict[_Function, dict[int, set[str]]]:
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


def _have_equal_lines(a: dict[int, set[str]], b: dict[int, set[str]]) -> bool:
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
) -> list[_SourceSite]:
    sites: dict[Hashable, _SourceSite] = {}
    calls = {
        label: (call.source.function, call.source.text)
        for label, call in run.calls.items()
        if call.source is not None
    }
    for position, entry in enumerate(run.entries):
        identity = (entry.kind, entry.name, entry.element)
        if identity not in sites:
            sites[identity] = _SourceSite(_entry_keys(run, entry, modules, same_source))
        context = run.iteration(entry.flow), tuple(map(calls.get, entry.scopes))
        sites[identity].contexts[context].append(position)
    return list(sites.values())


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
) -> list[_SourceSite]:
    sites: dict[Hashable, _SourceSite] = {}
    for number, step in enumerate(run.steps):
        module = modules.get(step.module_path, step.module_path)
        place = step.place
        is_whole = step.guard is None
        identity = (step.module_path, step.kind, place.file, place.span, step.text, is_whole)
        if identity not in sites:
            line = same_source.line_of_step(run, step)
            what = (step.kind, is_whole)
            sites[identity] = _SourceSite((
                (what, module, place.function, step.text, line),
                (what, module, place.function, step.text),
                (what, place.function, step.text),
                (what, module, line),
            ))  # fmt: skip
        sites[identity].contexts[step.iteration, None].append(number)
    return list(sites.values())


def _match_sites(a: list[_SourceSite], b: list[_SourceSite], rounds: int) -> dict[int, int]:
    found = match(
        _transpose_rows([site.keys for site in a], rounds),
        _transpose_rows([site.keys for site in b], rounds),
        single=int(rounds == _ROUNDS),
    )
    pairs: dict[int, int] = {}
    for i, j in found.items():
        pairs.update(_match_passes(a[i], b[j]))
    return pairs


def _match_passes(a: _SourceSite, b: _SourceSite) -> dict[int, int]:
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


def _transpose_rows(rows: Sequence[tuple[Hashable, ...]], width: int) -> list[list[Hashable]]:
    return [[row[column] for row in rows] for column in range(width)]


# The kinds of differences between two runs, as plain data.


@dataclass(frozen=True)
class ValueDifference:
    """The distance between two values of the same shape.

    Attributes:
        differing: the number of elements that differ: in a bit, or, for different dtypes, in value.
        elements: the number of elements.
        max_abs: the largest absolute difference; elements that are nan or the same infinity on both
            sides count as equal. None if there is no such number.
        max_rel: the largest difference relative to the larger of the two magnitudes; None as
            above.
        first: index of the first element that differs, in row-major order.
        a: its value in the first run.
        b: its value in the second run.
        nan_a: the number of elements that are nan in the first run only.
        nan_b: the number of elements that are nan in the second run only.
    """

    differing: int
    elements: int
    max_abs: float | None = None
    max_rel: float | None = None
    first: tuple[int, ...] = ()
    a: Any = None
    b: Any = None
    nan_a: int = 0
    nan_b: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values, ready for JSON."""
        plain = asdict(self)
        plain["first"] = list(self.first)
        for key in ("max_abs", "max_rel", "a", "b"):
            value = plain[key]
            if not isinstance(value, (bool, int, float, type(None))) or (
                type(value) is float and not math.isfinite(value)
            ):
                plain[key] = repr(value)
        return plain

    def __str__(self) -> str:
        if not self.elements:
            return "value"
        if self.elements == 1 and not self.first:
            return _distinct_texts(self.a, self.b)
        nans = [f"{count} nan only in {run}"
                for count, run in ((self.nan_a, "a"), (self.nan_b, "b")) if count]  # fmt: skip
        parts = []
        if self.max_abs == 0 and not nans:
            parts = ["in bits only"]
        elif self.max_abs:
            parts = [f"max abs {self.max_abs:.3g}"]
        parts += [f"{self.differing} of {self.elements} differ", *nans]
        index = ", ".join(map(str, self.first))
        return f"{', '.join(parts)}, first [{index}]: {_distinct_texts(self.a, self.b)}"


def compare_numbers(a: Any, b: Any) -> ValueDifference | None:
    """Compare two numbers taken from tensors; None if they are equal."""
    if same_bits(a, b):
        return None
    try:
        distance = 0.0 if a == b else abs(a - b)
        scale = max(abs(a), abs(b))
        distance, relative = float(distance), float(distance / scale) if scale else 0.0
    except (TypeError, ValueError, ArithmeticError):
        return ValueDifference(1, 1, a=a, b=b)
    return ValueDifference(1, 1, distance, relative, a=a, b=b)


def compare_tensors(
    a: Tensor, b: Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> ValueDifference | None:
    """Compare two saved tensors of one shape; return None if they are equal.

    The tolerances are those of `torch.isclose`; with both at 0, only equal bits count as equal.

    Example:
        >>> import torch
        >>> print(compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])))
        max abs 0.5, 1 of 2 differ, first [1]: 2.0 -> 2.5
    """
    a, b = a.detach(), b.detach()
    plain = all(t.layout is torch.strided and not t.is_quantized and not t.is_nested
                and not t.is_meta for t in (a, b))  # fmt: skip
    if not plain:
        a, b = (t.to_dense() if t.layout is not torch.strided and not t.is_nested else t
                for t in (a, b))  # fmt: skip
        if a.is_meta or b.is_meta or a.is_nested or b.is_nested or a.is_quantized:
            return None if same_bits(a, b) else ValueDifference(0, 0)
    a, b = a.cpu().resolve_conj().resolve_neg(), b.cpu().resolve_conj().resolve_neg()
    if a.numel() == 0:
        return None
    if rtol or atol:
        dtype = torch.promote_types(a.dtype, b.dtype)
        differs = ~torch.isclose(a.to(dtype), b.to(dtype), rtol=rtol, atol=atol, equal_nan=True)
    else:
        differs = _differing(a, b)
    flat = differs.reshape(-1)
    count = int(flat.sum())
    if not count:
        return None
    position = int(flat.to(torch.uint8).argmax())
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), a.shape))
    wide = _wide(a), _wide(b)
    distance = (wide[0] - wide[1]).abs()
    relative = distance / torch.maximum(wide[0].abs(), wide[1].abs())
    nan_a, nan_b = a.isnan(), b.isnan()
    at_a, at_b = (t.reshape(-1)[position].item() for t in (a, b))
    return ValueDifference(
        count, a.numel(), _maximum(distance), _maximum(relative), first, at_a, at_b,
        int((nan_a & ~nan_b).sum()), int((nan_b & ~nan_a).sum()),
    )  # fmt: skip


_WIDEST = 40
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Say for each element whether it differs: in a bit, or, between dtypes, in value."""
    if a.dtype == b.dtype:
        if a.is_complex():
            return _differing(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
        plain = _SAME_SIZE[a.dtype.itemsize]
        # reshape, since a single number cannot be viewed in another dtype of its own size
        # everywhere, and contiguous, since views of a dtype want that.
        bits = [t.contiguous().reshape(-1).view(plain).reshape(t.shape) for t in (a, b)]
        return bits[0] != bits[1]
    a, b = _wide(a), _wide(b)
    return (a != b) & ~(a.isnan() & b.isnan())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _maximum(t: Tensor) -> float | None:
    """Return the largest distance; None if all are nan, as of equal infinities."""
    numbers = t[~t.isnan()]
    return float(numbers.max()) if numbers.numel() else None


def _distinct_texts(a: Any, b: Any) -> str:
    for digits in (6, 9, 17):
        texts = _short_number(a, digits), _short_number(b, digits)
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} -> {texts[1]}"


def _short_number(value: Any, digits: int) -> str:
    if type(value) is float and not value.is_integer():
        return f"{value:.{digits}g}"
    text = repr(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


_BY_TYPE = (bool, int, float, str, type(None))


def loop_text(step: FlowStep) -> str:
    """Return the source text of a flow step: a kind of statement and its expression."""
    if step.kind == "while":
        return f"while {step.text}"
    return f"{step.kind} {step.text}" if step.kind in ("if", "assert") else step.text


class RunChange:
    """A difference between two runs, with the fields of its plain form."""

    _plain_form: ClassVar[tuple[str, ...]] = ("kind", "a", "b")

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {name: _plain_value(getattr(self, name)) for name in self._plain_form}


@dataclass(frozen=True, eq=False)
class LayerChange(RunChange):
    """A layer, number or state that both runs have, with differences.

    Attributes:
        a: the entry in the first run.
        b: the entry in the second run.
        aspects: the differing properties, with their values in both runs: "function", "arguments"
            (those that differ), "parents" (labels; only if more than an op in between was added or
            removed), "parameters", "shape", "dtype", "device", "grad_fn".
        value: how far the values are apart; None if they are equal or were not compared.
        gradient: how far the gradients are apart; None as above.
    """

    a: LayerEntry
    b: LayerEntry
    aspects: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    value: ValueDifference | None = None
    gradient: ValueDifference | None = None

    @property
    def what(self) -> tuple[str, ...]:
        """The names of the differing properties, including "value" and "gradient"."""
        more = {"value": self.value, "gradient": self.gradient}
        return (*self.aspects, *(name for name, found in more.items() if found is not None))

    _plain_form = ("a", "b", "what", "aspects", "value", "gradient")

    def __str__(self) -> str:
        parts = [
            f"{name} {_path_text(x)} -> {_path_text(y)}" for name, (x, y) in self.aspects.items()
        ]
        if self.value is not None:
            parts.append(str(self.value))
        if self.gradient is not None:
            parts.append(f"gradient {self.gradient}")
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class FlowChange(RunChange):
    """A flow step with another outcome in the other run, or without a counterpart.

    Attributes:
        kind: "side" for a condition with another outcome, "iterations" for a loop with more or
            fewer iterations, "index" for another chosen item, "value" for another number that
            Python read, "removed" and "added" for a step of one run only.
        a: the step in the first run.
        b: the step in the second run.
    """

    kind: Literal["side", "iterations", "index", "value", "removed", "added"]
    a: FlowStep | None
    b: FlowStep | None

    @property
    def step(self) -> FlowStep:
        """The step in the first run, or, if it does not exist there, in the second."""
        step = self.a if self.a is not None else self.b
        assert step is not None
        return step

    def value_in(self, step: FlowStep | None) -> str:
        """Return the outcome of a step as text."""
        if step is None:
            return "-"
        if self.kind == "iterations" and isinstance(step, LoopFlowStep):
            return step.how_often
        rounded = {number_text(side.value) for side in (self.a, self.b) if side is not None}
        is_close = self.a is not None and self.b is not None and len(rounded) == 1
        return repr(step.value) if is_close else number_text(step.value)

    def __str__(self) -> str:
        step = self.step
        place = f"`{loop_text(step)}` ({place_text(step.file, step.line)})"
        if step.iteration:
            place += f" in iteration {'.'.join(map(str, step.iteration))}"
        if self.kind in ("removed", "added"):
            return f"{place}: only in {'a' if self.b is None else 'b'}"
        return f"{place}: {self.value_in(self.a)} in a, {self.value_in(self.b)} in b"


@dataclass(frozen=True, eq=False)
class ModuleChange(RunChange):
    """A module that only one run has, or that differs between the runs.

    Attributes:
        kind: "added", "removed", "renamed", "class", "calls" (called more or less often),
            "training" or "parameters" (another number of them).
        a: the first call of the module in the first run; None for the root, which has no entry, and
            if there is no call.
        b: the first call of the module in the second run.
        before: the property in the first run: a name, a class, a number of calls ...
        after: the property in the second run.
    """

    kind: Literal["added", "removed", "renamed", "class", "calls", "training", "parameters"]
    a: ModuleEntry | None
    b: ModuleEntry | None
    before: Any = None
    after: Any = None

    @property
    def name(self) -> str:
        """The module's name: in the first run, if it exists there."""
        entry = self.a if self.a is not None else self.b
        return "" if entry is None else entry.name

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        before, after = _plain_value(self.before), _plain_value(self.after)
        return {"kind": self.kind, "module": self.name, "before": before, "after": after}

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if self.kind in ("added", "removed"):
            entry = self.b if self.kind == "added" else self.a
            class_name = "" if entry is None else f" ({entry.class_name})"
            return f"{name}{class_name}: only in {'b' if self.kind == 'added' else 'a'}"
        if self.kind == "renamed":
            before, after = (name or "the model itself" for name in (self.before, self.after))
            return f"{before}: is {after} in b"
        return f"{name}: {self.kind} {self.before} -> {self.after}"


@dataclass(frozen=True, eq=False)
class Parting(RunChange):
    """The first point where two runs diverge.

    Attributes:
        kind: "flow" for a flow step with another outcome, "layers" for one that only one run has,
            "change" if the runs took the same path and only computed values differ.
        a: the item in the first run; None if it does not exist there.
        b: the item in the second run; None if it does not exist there.
        after: label, in the first run, of the last entry before it that both runs have.
        text: a description in one line.
    """

    kind: Literal["flow", "layers", "change"]
    a: FlowStep | LayerEntry | None
    b: FlowStep | LayerEntry | None
    after: str
    text: str

    @property
    def source(self) -> tuple[str, int] | None:
        """Its file and line, in the first run if it exists there; None if unknown."""
        for side in (self.a, self.b):
            if isinstance(side, FlowStep):
                return side.file, side.line
            if side is not None and side.source is not None:
                return side.source.file, side.source.line
        return None

    _plain_form = ("kind", "text", "after", "a", "b", "source")

    def __str__(self) -> str:
        return self.text


def _plain_value(value: Any) -> Any:
    if isinstance(value, LayerEntry):
        return value.label
    if isinstance(value, (RunChange, FlowStep, ValueDifference)):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain_value(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, Source):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, _BY_TYPE) else str(value)


def _path_text(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return str(value).removeprefix("torch.")
