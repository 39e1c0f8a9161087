"""The folded form of a trace tree: programs, and in them branches, their sides, and ends."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from bendtrace.flow import _plain_json
from bendtrace.outline.events import Key
from bendtrace.outline.source import is_elif
from bendtrace.recording.sites import Place
from bendtrace.replay.analysis import GuardKind

__all__ = ["Branch", "End", "Flow", "ProgramOutline", "Taken", "in_order"]

T = TypeVar("T", bound=Hashable)


def in_order(start: T, leads_to: Callable[[T], Sequence[T]]) -> list[T]:
    """Return what can be reached such that each comes after all that lead to it, but for loops.

    Args:
        start: what comes first.
        leads_to: returns what comes right after something, in the order in which it is preferred.
    """
    done: list[T] = []
    seen, waiting = {start}, [(start, iter(leads_to(start)[::-1]))]
    while waiting:
        here, leads = waiting[-1]
        after = next((other for other in leads if other not in seen), None)
        if after is None:
            done.append(here)
            waiting.pop()
        else:
            seen.add(after)
            waiting.append((after, iter(leads_to(after)[::-1])))
    return done[::-1]


@dataclass(eq=False)
class End:
    """Where runs end.

    Attributes:
        kind: "return", "live" (what follows can only be run live) or "raise".
        text: the statement, the reason, or the name of the exception.
        file: the file it is in, or "" where that is not known.
        line: its line there.
        hits: how many runs ended here.
    """

    kind: str
    text: str
    file: str = ""
    line: int = 0
    hits: int = 0

    @property
    def where(self) -> str:
        """File, without its folder, and line; "" where they are not known."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the end as plain values, ready for JSON."""
        return {
            "end": self.kind, "text": self.text, "file": self.file, "line": self.line,
            "hits": self.hits,
        }  # fmt: skip


@dataclass(eq=False)
class Flow:
    """What stands under one side of a branch, or in the whole program, in the source's order.

    Attributes:
        owner: the branch that it belongs to; None for a whole program.
        branches: the branches right under it.
        ends: where runs end right under it.
    """

    owner: Branch | None = None
    branches: dict[Key, Branch] = field(default_factory=dict)
    ends: dict[tuple[str, str, str, int], End] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Branch | End]:
        yield from sorted(self.branches.values(), key=lambda branch: branch.order)
        yield from self.ends.values()

    def __bool__(self) -> bool:
        return bool(self.branches or self.ends)

    def walk(self) -> Iterator[Branch | End]:
        """Yield all branches and ends in it, at any depth, from top to bottom."""
        for item in self:
            yield item
            if isinstance(item, Branch):
                for taken in item.sides():
                    yield from taken.flow.walk()


@dataclass(eq=False)
class Taken:
    """One side of a branch; for a loop over things, its body.

    Attributes:
        value: the outcome of the condition; None for the body of a loop.
        hits: how often it was taken.
        flow: what stands under it.
    """

    value: Any
    flow: Flow
    hits: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the side as plain values, ready for JSON."""
        flow = [item.to_dict() for item in self.flow]
        return {"value": _plain_json(self.value), "hits": self.hits, "flow": flow}


@dataclass(eq=False)
class Branch:
    """A branch, loop or value of the source, with all that is known of its sides.

    Attributes:
        key: the same for all events that it stands for.
        inside: the flow that it is part of.
        order: sorts the branches of a flow as the source has them.
        kind: "if", "while", "for", "and", ...; "value" and "raised" where Python asked for
            something that is no condition.
        text: how its line reads.
        place: where in the source.
        modules: the modules whose forward it is in, as node paths.
        taken: its sides, by what the outcome looks like.
        when: when its guards are tested: before the run or in it.
        entered: for a loop, how often it was entered.
        rounds: for a loop, how often its body was begun in all.
        least: for a loop, the least rounds of one entry.
        most: for a loop, the most rounds of one entry.
        is_condition: whether its sides are True and False.
        is_loop: whether it is a loop over things, with a body instead of sides.
        is_joined: whether calls went along it in parts that were recorded in several runs, so
            that nothing tells the least and the most rounds.
    """

    key: Key
    inside: Flow
    order: tuple[Any, ...]
    kind: str
    text: str
    place: Place
    modules: dict[str, None] = field(default_factory=dict)
    taken: dict[str, Taken] = field(default_factory=dict)
    when: set[GuardKind | None] = field(default_factory=set)
    entered: int = 0
    rounds: int = 0
    least: float = math.inf
    most: int = 0
    _: KW_ONLY
    is_condition: bool = True
    is_loop: bool = False
    is_joined: bool = False

    def side(self, value: Any) -> Taken:
        """Return what is known of an outcome, which is added if it is new."""
        key = f"{type(value).__name__} {value!r}"
        if key not in self.taken:
            self.taken[key] = Taken(value, Flow(self))
        return self.taken[key]

    def sides(self) -> list[Taken]:
        """Return its sides, True before False, other values by how often they came up."""
        if self.is_condition:
            return sorted(self.taken.values(), key=lambda taken: not taken.value)
        return sorted(self.taken.values(), key=lambda taken: -taken.hits)

    def hits(self, value: bool) -> int:
        """Return how often a condition came out so."""
        return sum(taken.hits for taken in self.taken.values() if taken.value is value)

    def flow(self, value: Any) -> Flow:
        """Return what stands under an outcome of a condition."""
        found = [taken.flow for taken in self.taken.values() if taken.value is value]
        return found[0] if found else Flow(self)

    @property
    def total(self) -> int:
        """How often it was come by."""
        return sum(taken.hits for taken in self.taken.values())

    @property
    def is_settled(self) -> bool:
        """Whether its outcome is known from the inputs, before the run."""
        return GuardKind.DATA not in self.when and len(self.taken) < 2

    @property
    def is_elif(self) -> bool:
        """Whether it is an `elif`."""
        return self.kind == "if" and is_elif(self.place)

    @property
    def where(self) -> str:
        """File, without its folder, and line."""
        return f"{os.path.basename(self.place.file)}:{self.place.line}"

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
        if self.entered:
            row["iterations"] = {"entered": self.entered, "total": self.rounds}
            if not self.is_joined:
                row["iterations"] |= {"least": self.least, "most": self.most}
        return row


# From where (None: from the beginning), by which outcome, to where.
Step = tuple[Branch | None, str, Branch | End]


@dataclass(eq=False)
class ProgramOutline:
    """All known paths that share one set of input guards.

    Attributes:
        number: counts the programs from 1, in the order in which they were traced.
        inputs: what it was first called with.
        selected_by: what is so for this program and not for all others.
        traces: how many paths it has.
        runs: how many calls came to the end of one of them.
        flow: what happens in it.
        steps: how often a run came from one branch, by one of its sides, to the next.
    """

    number: int
    inputs: str
    selected_by: list[str]
    traces: int
    runs: int
    flow: Flow
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
