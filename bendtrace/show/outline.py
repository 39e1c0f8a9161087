"""The folded form of a trace tree: programs, branches, sides and ends, and their text."""

from __future__ import annotations

import ast
import math
import os
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from textwrap import shorten
from typing import Any

from bendtrace.engine.guard_kinds import GuardKind
from bendtrace.engine.stretches import Failure
from bendtrace.engine.tree import TraceTree
from bendtrace.flow import _plain_json
from bendtrace.log.entries import Listing, counted, number_text
from bendtrace.python.checks import required_choice
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import InstructionPlace, Site, Span, is_installed, place_text
from bendtrace.record.iterations import running_code
from bendtrace.show.walks import (
    Choice,
    Key,
    PathEnd,
    Walk,
    choices_in,
    choices_of,
    function_of,
    is_elif,
    loops_around,
    walks_of,
)
from bendtrace.tape.tape import ModuleCall

# The module, the iteration of the loops around, and how often each side was taken.
Turns = dict[tuple[str, tuple[int, ...]], Counter[bool]]


@dataclass(eq=False)
class SideCode:
    """The code under one side of a branch, or in the whole program, in source order."""

    owner: OutlineBranch | None = None  # the branch that it belongs to; None for a whole program
    # The branches directly under it.
    branches: dict[Key, OutlineBranch] = field(default_factory=dict)
    # The ends of runs directly under it.
    ends: dict[tuple[str, str, str, int], PathEnd] = field(default_factory=dict)

    def __iter__(self) -> Iterator[OutlineBranch | PathEnd]:
        yield from sorted(self.branches.values(), key=lambda branch: branch.order)
        yield from self.ends.values()

    def __bool__(self) -> bool:
        return bool(self.branches or self.ends)

    def walk(self) -> Iterator[OutlineBranch | PathEnd]:
        """Yield all branches and ends in it, at any depth, from top to bottom."""
        for item in self:
            yield item
            if isinstance(item, OutlineBranch):
                for taken in item.sides():
                    yield from taken.flow.walk()


@dataclass(eq=False)
class BranchSide:
    """One side of a branch; for a loop over things, its body."""

    value: Any  # the outcome of the condition; None for the body of a loop
    flow: SideCode  # the code under it
    hits: int = 0  # how often it was taken

    def to_dict(self) -> dict[str, Any]:
        """Return the side as plain values, ready for JSON."""
        flow = [item.to_dict() for item in self.flow]
        return {"value": _plain_json(self.value), "hits": self.hits, "flow": flow}


@dataclass(eq=False)
class OutlineBranch:
    """A branch, loop or value of the source, with its sides.

    Attributes:
        key: the same for all events that it represents.
        inside: the flow that it is part of.
        order: sorts the branches of a flow as the source has them.
        kind: "if", "while", "for", "and", ...; "value" and "raised" if Python asked for something
            other than a condition.
        text: the text of its line.
        place: its place in the source.
        modules: the modules whose forward it is in, as node paths.
        taken: its sides, by the text of their outcome.
        turns: for a condition, how often each side was taken in each module and iteration.
        when: when its guards are tested: before the run or in it.
        entered: for a loop, how often it was entered.
        rounds: for a loop, the total number of iterations.
        least: for a loop, the fewest iterations of one entry.
        most: for a loop, the most iterations of one entry.
        is_condition: whether its sides are True and False.
        is_loop: whether it is a loop over an iterable, with a body instead of sides.
        is_joined: whether calls followed it in segments recorded in several runs, so that the
            fewest and the most iterations are unknown.
        is_counted: whether the total number of iterations is known; not so for a `while` with a
            test of several parts that is joined.
    """

    key: Key
    inside: SideCode
    order: tuple[Any, ...]
    kind: str
    text: str
    place: InstructionPlace
    modules: dict[str, None] = field(default_factory=dict)
    taken: dict[str, BranchSide] = field(default_factory=dict)
    turns: Turns = field(default_factory=lambda: defaultdict(Counter))
    when: set[GuardKind | None] = field(default_factory=set)
    entered: int = 0
    rounds: int = 0
    least: float = math.inf
    most: int = 0
    _: KW_ONLY
    is_condition: bool = True
    is_loop: bool = False
    is_joined: bool = False
    is_counted: bool = True

    def side(self, value: Any) -> BranchSide:
        """Return the side of an outcome; it is added if it is new."""
        key = f"{type(value).__name__} {value!r}"
        if key not in self.taken:
            self.taken[key] = BranchSide(value, SideCode(self))
        return self.taken[key]

    def sides(self) -> list[BranchSide]:
        """Return its sides, True before False, other values by frequency."""
        if self.is_condition:
            return sorted(self.taken.values(), key=lambda taken: not taken.value)
        return sorted(self.taken.values(), key=lambda taken: -taken.hits)

    def hits(self, value: bool) -> int:
        """Return how often a condition had an outcome."""
        return sum(taken.hits for taken in self.taken.values() if taken.value is value)

    def flow(self, value: Any) -> SideCode:
        """Return the code under an outcome of a condition."""
        found = (taken.flow for taken in self.taken.values() if taken.value is value)
        return next(found, SideCode(self))

    @property
    def total(self) -> int:
        """The number of times that it was reached."""
        return sum(taken.hits for taken in self.taken.values())

    @property
    def is_decided(self) -> bool:
        """True if its outcome is known from the inputs, before the run."""
        return GuardKind.DATA not in self.when and len(self.taken) < 2

    @property
    def is_elif(self) -> bool:
        """True if it is an `elif`."""
        return self.kind == "if" and is_elif(self.place)

    @property
    def where(self) -> str:
        """File, without its folder, and line."""
        return place_text(self.place.file, self.place.line)

    @property
    def never(self) -> list[bool]:
        """The sides of a condition that no run took."""
        if not self.is_condition or self.is_loop:
            return []
        return [value for value in (True, False) if not self.hits(value)]

    def to_dict(self) -> dict[str, Any]:
        """Return the branch as plain values, ready for JSON."""
        row: dict[str, Any] = {
            "kind": self.kind,
            "text": self.text,
            "file": self.place.file,
            "line": self.place.line,
            "column": self.place.span.column,
            "function": self.place.function,
            "modules": list(self.modules),
            "when": sorted(kind.value for kind in self.when if kind is not None),
            "outcomes": [taken.to_dict() for taken in self.sides()],
            "never": self.never,
        }
        if len(self.turns) > 1:
            row["turns"] = [
                {"module": module, "iteration": list(iteration), "true": often[True],
                 "false": often[False]}
                for (module, iteration), often in sorted(self.turns.items())
            ]  # fmt: skip
        if self.entered:
            row["iterations"] = {"entered": self.entered}
            if self.is_counted:
                row["iterations"]["total"] = self.rounds
            if not self.is_joined:
                row["iterations"] |= {"least": self.least, "most": self.most}
        return row


# From where (None: from the beginning), by which outcome, to where.
Step = tuple[OutlineBranch | None, str, OutlineBranch | PathEnd]


@dataclass(eq=False)
class ProgramOutline:
    """All known paths that share one set of input guards.

    Attributes:
        number: the number of the program, from 1, in the order in which they were traced.
        inputs: the inputs of its first call.
        selected_by: the properties of this program that not all others share.
        traces: the number of its paths.
        runs: the number of calls that came to the end of one of them.
        flow: its branches and ends, in order.
        steps: how often a run went from one branch, by one of its sides, to the next.
    """

    number: int
    inputs: str
    selected_by: list[str]
    traces: int
    runs: int
    flow: SideCode
    steps: Counter[Step] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the program as plain values, ready for JSON."""
        return {
            "number": self.number,
            "inputs": self.inputs,
            "selected_by": self.selected_by,
            "traces": self.traces,
            "runs": self.runs,
            "flow": [item.to_dict() for item in self.flow],
        }


_INDENT = "    "
_WIDEST = 64
_VALUES = 6

# Code, how often, and where.
Line = tuple[str, str, str]


def title(program: ProgramOutline) -> str:
    """Return the number of a program, and the inputs of its first call."""
    return f"program {program.number}: {program.inputs}"


def programs_as_text(programs: Sequence[ProgramOutline], mine: bool = False) -> Iterator[str]:
    """Yield each program as text; programs with the same text as an earlier one take one line."""
    numbers: dict[tuple[str, ...], int] = {}
    for program in programs:
        rows = list(_flow(program.flow, 1, mine))
        read = tuple(code for code, _, _ in rows)
        facts, more = program.selected_by[:_FACTS], len(program.selected_by) - _FACTS
        facts += [f"{more} more"] if more > 0 else []
        counts = f"{counted(program.traces, 'trace')}, {counted(program.runs, 'run')}"
        if read in numbers:
            where = f", where {' and '.join(facts)}" if facts else ""
            yield f"{title(program)}{where}; {counts}; same flow as program {numbers[read]}"
            continue
        numbers[read] = program.number
        lines = [title(program)]
        lines += [f"  {'and' if i else 'where'} {fact}" for i, fact in enumerate(facts)]
        yield "\n".join([*lines, f"  {counts}", *_aligned_rows(rows)])


def _aligned_rows(rows: list[Line]) -> Iterator[str]:
    width = min(max((len(code) for code, _, _ in rows), default=0), _WIDEST)
    middle = max((len(often) for _, often, _ in rows), default=0)
    for code, often, where in rows:
        if len(code) > width:
            indent = len(code) - len(code.lstrip())
            code = code[:indent] + shorten(code, max(width - indent, 20), placeholder=" ...")
        yield f"{code:<{width}}  {often:<{middle}}  {where}".rstrip()


_FACTS = 8


def _flow_items(flow: SideCode, mine: bool) -> Iterator[OutlineBranch | PathEnd]:
    """Yield the content of a flow; for branches of installed packages, of their sides."""
    for item in flow:
        if mine and isinstance(item, OutlineBranch) and is_installed(item.place.file):
            for taken in item.sides():
                yield from _flow_items(taken.flow, mine)
        else:
            yield item


def _flow(flow: SideCode, depth: int, mine: bool) -> Iterator[Line]:
    for item in _flow_items(flow, mine):
        if isinstance(item, PathEnd):
            code, where = end_text(item), item.where
            if item.kind == "live":
                code, where = "live only", item.text
            yield _INDENT * depth + code, counted(item.hits, "run"), where
        elif item.is_condition and not item.is_loop:
            yield from _condition_lines(item, depth, "", mine)
        else:
            yield from _sides(item, depth, mine)


def end_text(end: PathEnd) -> str:
    """Return how runs end, as text."""
    if end.kind == "return":
        return end.text
    return f"raise {end.text}" if end.kind == "raise" else f"live: {end.text}"


def _condition_lines(branch: OutlineBranch, depth: int, prefix: str, mine: bool) -> Iterator[Line]:
    indent = _INDENT * depth
    yield _heading(branch, indent + prefix)
    yield from _flow(branch.flow(True), depth + 1, mine)
    other = branch.flow(False)
    items = list(_flow_items(other, mine))
    if not items:
        return
    only = items[0] if len(items) == 1 else None
    if isinstance(only, OutlineBranch) and only.is_elif:
        yield from _condition_lines(only, depth, "el", mine)
        return
    yield f"{indent}else{':' if _colon(branch) else ' ...'}", _share(branch, False), ""
    yield from _flow(other, depth + 1, mine)


def _colon(branch: OutlineBranch) -> str:
    return ":" if branch.kind in ("if", "while", "for") else ""


def _sides(branch: OutlineBranch, depth: int, mine: bool) -> Iterator[Line]:
    """Yield a loop over an iterable and its body, or a value and the code after each outcome."""
    yield _heading(branch, _INDENT * depth)
    for taken in branch.sides():
        if branch.is_loop:
            yield from _flow(taken.flow, depth + 1, mine)
        elif taken.flow:
            yield f"{_INDENT * (depth + 1)}{outcome_text(taken.value)}:", f"{taken.hits}x", ""
            yield from _flow(taken.flow, depth + 2, mine)


def _heading(branch: OutlineBranch, prefix: str) -> Line:
    """Return the first line of a branch."""
    modules = [path for path in branch.modules if path]
    if len(modules) > 2:
        modules[1:] = [f"{len(modules) - 1} more"]
    where = f"{branch.where} in {' and '.join(modules)}" if modules else branch.where
    return prefix + branch.text + _colon(branch), summary(branch), where


def summary(branch: OutlineBranch) -> str:
    """Return the outcomes of a branch, and how often each occurred."""
    if branch.is_loop:
        return _rounds_text(branch)
    if branch.is_condition:
        if branch.kind == "while" and branch.entered:
            return _rounds_text(branch)
        return _share(branch, True)
    sides = branch.sides()
    if len(sides) == 1:
        return f"always {outcome_text(sides[0].value)}{_often(branch)}"
    shown = [f"{outcome_text(taken.value)} ({taken.hits}x)" for taken in sides[:_VALUES]]
    if len(sides) > _VALUES:
        shown.append(f"and {len(sides) - _VALUES} more")
    return ", ".join(shown)


def outcome_text(value: Any) -> str:
    """Return an outcome, cut short."""
    text = value if isinstance(value, str) and " " in value else number_text(value)
    return shorten(str(text), 24, placeholder="...") or "..."


def _rounds_text(branch: OutlineBranch) -> str:
    least, most = branch.least, branch.most
    loops = counted(branch.entered, "time")
    if not branch.is_counted:
        return f"entered {loops}"
    if branch.is_joined:
        return f"{counted(branch.rounds, 'iteration')} in all, entered {loops}"
    each = f"{most}" if least == most else f"{least} to {most}"
    return f"{each} {'iteration' if most == 1 else 'iterations'}, entered {loops}"


def _share(branch: OutlineBranch, value: bool) -> str:
    hits, total = branch.hits(value), branch.total
    if not hits:
        return f"never{_often(branch)}"
    if hits == total:
        return f"always{_often(branch)}"
    return turns_text(branch.turns, value) or f"{hits} of {total}"


def turns_text(turns: Turns, value: bool) -> str:
    """Return how often a side was taken in each module and iteration; "" for one, or many.

    Example:
        >>> experts = {("", (0,)): Counter([True, False]), ("", (1,)): Counter([False])}
        >>> turns_text(experts, True)
        'iteration 0: 1 of 2, 1: 0 of 1'
    """
    turns = {turn: often for turn, often in turns.items() if often.total()}
    if not 1 < len(turns) <= _VALUES:
        return ""
    several = [len({turn[place] for turn in turns}) > 1 for place in (0, 1)]
    parts = []
    for turn, often in sorted(turns.items()):
        names = [turn[0] or "the model itself"] * several[0]
        names += [".".join(map(str, turn[1])) or "outside"] * several[1]
        parts.append(f"{' '.join(names)}: {often[value]} of {often.total()}")
    return ("iteration " if not several[0] else "") + ", ".join(parts)


def _often(branch: OutlineBranch) -> str:
    return ", for these inputs" if branch.is_decided else f" ({branch.total}x)"


# Coverage: the branches of the model's source with a side that was not seen.

# Python's own code, which belongs to no model.
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


@dataclass(frozen=True)
class BranchCoverage:
    """A branch of the source, and how often each side was seen.

    Attributes:
        kind: "if", "while", "for-else", "assert", "conditional expression", "and", "or",
            "comprehension filter" or "case".
        text: source of the condition.
        file: the file it is in.
        line: its line, counted from 1.
        function: the function it is in.
        true: how often the condition was true.
        false: how often it was false; None if that leaves no trace.
        turns: how often each side was taken in each module and iteration, in words; "" if there was
            only one.
        watched: whether the counts are those of the condition itself, which depended on an input.
            Otherwise plain Python values decided it, and only whether a count is 0 has a meaning:
            whether a call ran an operation under that side.
    """

    kind: str
    text: str
    file: str
    line: int
    function: str
    true: int
    false: int | None
    watched: bool
    turns: str = ""

    @property
    def missing(self) -> tuple[bool, ...]:
        """The sides that were not seen."""
        return tuple(side for side, hits in ((True, self.true), (False, self.false)) if not hits)

    @property
    def seen(self) -> str:
        """A description of the sides that were seen."""
        if self.turns:
            return f"True in {self.turns}"
        if self.watched:
            parts = [f"{side} {hits}x" if hits else f"never {side}" for side, hits in
                    ((True, self.true), (False, self.false))]  # fmt: skip
            return ", ".join(sorted(parts, key=lambda text: text.startswith("never")))
        if not self.true and not self.false:
            return "nothing recorded under it"
        true = "True seen" if self.true else "nothing under True"
        if self.false is None:
            return f"{true}, False leaves no trace"
        return f"{true}, {'False seen' if self.false else 'nothing under False'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the branch as plain values, ready for JSON."""
        return {**vars(self), "missing": list(self.missing)}

    def __str__(self) -> str:
        where = place_text(self.file, self.line)
        return f"{self.kind} `{self.text}` at {where}: {self.seen}"


class Coverage(Listing[BranchCoverage]):
    """The branches with a side that was not seen: a list that prints as a table.

    It covers the functions that ran, including those of installed packages that the model consists
    of, but not those of torch and Python.

    Attributes:
        total: the number of branches in these functions.
        uneven: branches with both sides seen, but only one side in some iterations of the
            surrounding loops, or in some of their modules.
    """

    def __init__(
        self, branches: Sequence[BranchCoverage], total: int, uneven: Sequence[BranchCoverage] = ()
    ) -> None:
        super().__init__(branches)
        self.total = total
        self.uneven: list[BranchCoverage] = list(uneven)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the branches as plain values, ready for JSON."""
        return [branch.to_dict() for branch in self]

    def __str__(self) -> str:
        both = self.total - len(self)
        head = f"branches seen on both sides: {both} of {self.total}"
        watched = [branch for branch in self if branch.watched]
        others = [branch for branch in self if not branch.watched]
        sections = [head]
        if watched:
            sections.append("decided by the inputs:\n" + _branch_table(watched))
        if others:
            more = len(others) - _SHOWN
            left = f"\n... and {more} more" if more > 0 else ""
            sections.append(
                "decided by plain Python values, or not reached (judged by the operations under "
                f"them):\n{_branch_table(others[:_SHOWN])}{left}"
            )
        if self.uneven:
            sections.append(
                "one side only in some iterations or modules:\n" + _branch_table(self.uneven)
            )
        return "\n\n".join(sections)


_SHOWN = 40
# A branch, the module whose forward was running, the iteration of each loop around it, and a side.
Answers = tuple[Choice, str, tuple[int, ...], bool]


def _branch_table(branches: Sequence[BranchCoverage]) -> str:
    rows = [
        (branch.kind, shorten(branch.text, 60, placeholder=" ..."),
         place_text(branch.file, branch.line), branch.seen)
        for branch in branches
    ]  # fmt: skip
    return tabulate.tabulate(rows, ("branch", "source", "at", "seen"), disable_numparse=True)


def coverage(tree: TraceTree, only: str = "all") -> Coverage:
    """Compare the branches on a tree's paths with the source that they ran, or with the user's."""
    is_mine = required_choice("only", only, "all", "mine") == "mine"
    return _Survey(tree).result(is_mine)


def observed_sides(tree: TraceTree) -> tuple[list[tuple[str, ast.AST]], list[Answers], set[Choice]]:
    """Return the functions that ran, and the sides of their branches that were seen.

    Those are functions, with their files; sides; and the branches that inputs decide. Of others the
    module is not known, and is "".
    """
    survey = _Survey(tree)
    sides = [
        (choice, path, iteration[: loops_around(choice)], side)
        for choice, turns in survey.turns.items()
        for (path, iteration), often in turns.items()
        for side in (True, False)
        if often[side]
    ]
    for file, function in survey.functions:
        for choice in choices_in(file, function):
            if choice not in survey.turns:
                missing = survey._of(choice).missing
                sides += [(choice, "", (), side) for side in (True, False) if side not in missing]
    return list(survey.functions), sides, set(survey.turns)


class _Survey:
    """Counts the sides taken of each choice.

    A condition that depended on an input left a guard: its counts are exact. For others, only the
    operations under them count.
    """

    def __init__(self, tree: TraceTree) -> None:
        self.exact: Counter[tuple[Choice, bool]] = Counter()
        self.turns: dict[Choice, Turns] = defaultdict(lambda: defaultdict(Counter))
        self.raised: Counter[Failure] = Counter(tree.failures)
        self.by_place: dict[str, Counter[Span]] = {}
        self.functions: dict[tuple[str, ast.AST], None] = {}
        for program in sorted(tree.programs(), key=lambda program: program.serial):
            for walk in walks_of(program):
                for event in walk.outcome_events:
                    if event.is_condition:
                        raw = bool(event.outcome) is not event.header.inverted
                        for choice, side in choices_of(event.place, raw):
                            self.exact[choice, side] += walk.hits
                            turn = event.module_path, event.iteration
                            self.turns[choice][turn][side] += walk.hits
                if not (walk.ends and walk.has_raised):
                    self._count_places(walk)
                elif walk.end is not None and walk.end.file:  # the run was not recorded as a whole
                    self.raised[walk.end.text, walk.end.file, walk.end.line] += walk.hits

    def result(self, is_mine: bool) -> Coverage:
        found: list[BranchCoverage] = []
        uneven: list[BranchCoverage] = []
        total = 0
        for file, function in self.functions:
            if is_mine and is_installed(file):
                continue
            for choice in choices_in(file, function):
                branch = self._of(choice)
                if choice.kind in ("and", "or") and not branch.watched:
                    continue  # part of a condition that has its own line
                total += 1
                if branch.missing:
                    found.append(branch)
                elif any(len(+often) == 1 for often in self.turns[choice].values()):
                    turns = turns_text(self.turns[choice], True)
                    uneven += [replace(branch, turns=turns)] if turns else []
        for branches in (found, uneven):
            branches.sort(key=lambda branch: (branch.file, branch.line))
        return Coverage(found, total, uneven)

    def _of(self, choice: Choice) -> BranchCoverage:
        true, false = self.exact[choice, True], self.exact[choice, False]
        watched = bool(true or false)
        if choice.kind == "assert" and not false:
            false = self._raised_in(choice.file, (choice.span,), "AssertionError")
        shown_false: int | None = false
        if not watched or choice.is_partly_watched:
            true = true or self._under(choice, choice.if_true)
            if not false:
                shown_false = self._under(choice, choice.if_false) if choice.if_false else None
        return BranchCoverage(
            choice.kind, choice.text, choice.file, choice.line, choice.function, true,
            shown_false, watched,
        )  # fmt: skip

    def _under(self, choice: Choice, spans: tuple[Span, ...]) -> int:
        """Return how often a recorded segment with something in some source spans was passed."""
        places = self.by_place.get(choice.file, Counter())
        found = [hits for place, hits in places.items() if any(s.holds(place) for s in spans)]
        return max(found, default=0) + self._raised_in(choice.file, spans)

    def _raised_in(self, file: str, spans: tuple[Span, ...], only: str = "") -> int:
        # For a line that raised, not even the column is known.
        return sum(
            hits
            for (name, path, line), hits in self.raised.items()
            if path == file and any(s.line <= line <= s.end_line for s in spans)
            if only in ("", name)
        )

    def _count_places(self, walk: Walk) -> None:
        tape, (since, until) = walk.path.recording.tape, walk.positions
        sites: dict[tuple[int, int], tuple[ModuleCall, Site]] = {}
        for record in tape.ops[since:until]:
            if record.site is not None:
                sites[id(record.site), id(record.scope)] = record.scope, record.site
        for guard in tape.guards:
            if guard.site is not None and since <= guard.position <= until:
                sites[id(guard.site), id(guard.scope)] = guard.scope, guard.site
        for call in tape.calls:
            if not since <= call.start <= until:
                continue
            if call.site is not None and call.parent is not None:
                sites[id(call.site), id(call.parent)] = call.parent, call.site
        places = {place for scope, site in sites.values() for place, _ in running_code(scope, site)}
        for place in places:
            if is_standard(place.file):
                continue
            function = function_of(place)
            if function is not None:
                self.functions[place.file, function] = None
        for file, span in {(place.file, place.span) for place in places}:
            self.by_place.setdefault(file, Counter())[span] += walk.hits


def is_standard(file: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
