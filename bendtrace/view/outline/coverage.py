"""Coverage: the branches of the model's source with a side that was not seen."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, overload

from bendtrace._checks import required_choice
from bendtrace._lazy import tabulate
from bendtrace._places import is_installed, place_text
from bendtrace.recording.iterations import running_code
from bendtrace.replay.stretches import Failure
from bendtrace.replay.tree import TraceTree
from bendtrace.source.sites import Site, Span
from bendtrace.tape.tape import ModuleCall
from bendtrace.view.outline.structure import Turns, turns_text
from bendtrace.view.outline.walks import (
    Choice,
    Walk,
    choices_in,
    decided_by,
    function_of,
    loops_around,
    walks_of,
)

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
            told = [f"{side} {hits}x" if hits else f"never {side}" for side, hits in
                    ((True, self.true), (False, self.false))]  # fmt: skip
            return ", ".join(sorted(told, key=lambda text: text.startswith("never")))
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


class Coverage(Sequence[BranchCoverage]):
    """The branches with a side that was not seen: a list that prints as a table.

    It covers the functions that ran, including those of installed packages that the model consists
    of, but not those of torch and Python.

    Attributes:
        total: the number of branches in these functions.
        uneven: branches with both sides seen, but only one side in some iterations of the
            surrounding loops, or in some of their modules.
    """

    def __init__(
        self,
        branches: Sequence[BranchCoverage],
        total: int,
        uneven: Sequence[BranchCoverage] = (),
    ) -> None:
        self._branches = list(branches)
        self.total = total
        self.uneven: list[BranchCoverage] = list(uneven)

    @overload
    def __getitem__(self, index: int) -> BranchCoverage: ...
    @overload
    def __getitem__(self, index: slice) -> Coverage: ...
    def __getitem__(self, index: int | slice) -> BranchCoverage | Coverage:
        if isinstance(index, slice):
            return Coverage(self._branches[index], self.total, self.uneven)
        return self._branches[index]

    def __len__(self) -> int:
        return len(self._branches)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the branches as plain values, ready for JSON."""
        return [branch.to_dict() for branch in self._branches]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        both = self.total - len(self)
        head = f"branches seen on both sides: {both} of {self.total}"
        watched = [branch for branch in self._branches if branch.watched]
        others = [branch for branch in self._branches if not branch.watched]
        sections = [head]
        if watched:
            sections.append("decided by the inputs:\n" + _table(watched))
        if others:
            more = len(others) - _SHOWN
            left = f"\n... and {more} more" if more > 0 else ""
            sections.append(
                "decided by plain Python values, or not reached (judged by the operations under "
                f"them):\n{_table(others[:_SHOWN])}{left}"
            )
        if self.uneven:
            sections.append("one side only in some iterations or modules:\n" + _table(self.uneven))
        return "\n\n".join(sections)


_SHOWN = 40
# A branch, the module whose forward was running, the iteration of each loop around it, and a side.
Taken = tuple[Choice, str, tuple[int, ...], bool]


def _table(branches: Sequence[BranchCoverage]) -> str:
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


def sides_seen(
    tree: TraceTree,
) -> tuple[list[tuple[str, ast.AST]], list[Taken], set[Choice]]:
    """Return the functions that ran, and the sides of their branches that were seen.

    Returns:
        Functions, with their files; sides; and the branches that inputs decide. Of others the
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
    """Counts what was seen of each choice.

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
                self._count_decided(walk)
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
                    continue  # part of a condition that has a line of its own
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

    def _count_decided(self, walk: Walk) -> None:
        for event in walk.passed:
            if event.is_condition:
                raw = bool(event.outcome) is not event.header.inverted
                for choice, side in decided_by(event.place, raw):
                    self.exact[choice, side] += walk.hits
                    turn = event.module_path, event.iteration
                    self.turns[choice][turn][side] += walk.hits

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
