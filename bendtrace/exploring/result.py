"""What a search has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, overload

from bendtrace._lazy import tabulate
from bendtrace._places import place_text
from bendtrace.history.sizes import counted

__all__ = ["Exploration", "Find", "Unfound"]


@dataclass(frozen=True)
class Unfound:
    """A side of a branch that no input is known to take; that does not say that there is none.

    Attributes:
        kind: "if", "while", "assert", ...; see `BranchCoverage`.
        text: source of the condition.
        file: the file it is in.
        line: its line, counted from 1.
        side: which side, True or False.
        module_path: the module whose forward asks; "" for the model itself.
        iteration: in loops over things, the iteration of each loop around it, counted from 0.
        watched: whether something that the inputs decide leads to it. Else plain Python values
            decide it, or no run has come to it.
    """

    kind: str
    text: str
    file: str
    line: int
    side: bool
    module_path: str
    iteration: tuple[int, ...]
    watched: bool

    def _row(self) -> tuple[str, ...]:
        text = shorten(self.text, 60, placeholder=" ...")
        where = place_text(self.file, self.line)
        iteration = ".".join(map(str, self.iteration))
        return (self.kind, text, where, self.module_path, iteration, str(self.side))


@dataclass(frozen=True, eq=False)
class Find(Unfound):
    """A side of a branch, and an input with which the model has taken it.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
        raised: the name of the error that the model raised with them; "" for none.
        run: the number of the run that took it, counted from 1.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    raised: str
    run: int


_SHOWN = 40


class Exploration(Sequence[Find]):
    """What a search has found: a list of finds that prints as a table.

    Attributes:
        not_found: the sides that are left. That an input was not found does not say that there is
            none.
        runs: how often the model was run.
        seconds: how long the search took.
    """

    def __init__(
        self, finds: Sequence[Find], not_found: Sequence[Unfound], runs: int, seconds: float
    ) -> None:
        self._finds = list(finds)
        self.not_found: list[Unfound] = list(not_found)
        self.runs = runs
        self.seconds = seconds

    @property
    def inputs(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The inputs, as (args, kwargs), each once, without those with which the model raises."""
        found = {find.run: (find.args, find.kwargs) for find in self if not find.raised}
        return list(found.values())

    @overload
    def __getitem__(self, index: int) -> Find: ...
    @overload
    def __getitem__(self, index: slice) -> Exploration: ...
    def __getitem__(self, index: int | slice) -> Find | Exploration:
        if isinstance(index, slice):
            return Exploration(self._finds[index], self.not_found, self.runs, self.seconds)
        return self._finds[index]

    def __len__(self) -> int:
        return len(self._finds)

    @property
    def _head(self) -> str:
        sides = counted(len(self) + sum(left.watched for left in self.not_found), "side")
        return (
            f"inputs found for {len(self)} of {sides} never taken "
            f"({counted(self.runs, 'run')} of the model)"
        )

    def _tables(self, form: str) -> list[tuple[str, str]]:
        names = ("branch", "source", "at", "module", "iteration", "side")
        found = [(*find._row(), f"raises {find.raised}" if find.raised else "") for find in self]
        tables = []
        for title, columns, rows in (
            ("found", (*names, ""), found),
            ("not found, which does not say that no input takes them", names,
             [left._row() for left in self.not_found if left.watched]),
        ):  # fmt: skip
            if rows:
                kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
                cells = [[row[i] for i in kept] for row in rows[:_SHOWN]]
                heads = [columns[i] for i in kept]
                text = tabulate.tabulate(cells, heads, tablefmt=form, disable_numparse=True)
                more = len(rows) - _SHOWN
                tables.append((title, f"{text}\n... and {more} more" if more > 0 else str(text)))
        return tables

    @property
    def _foot(self) -> list[str]:
        """Say in a line what is not listed."""
        count = sum(not left.watched for left in self.not_found)
        which = "that plain Python values decide, or that no run has come to"
        return [f"not found either: {counted(count, 'side')} {which}"] if count else []

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        parts = [f"{title}:\n{table}" for title, table in self._tables("simple")]
        return "\n\n".join([self._head, *parts, *self._foot])

    def _repr_html_(self) -> str:
        parts = [f"<p>{title}</p>{table}" for title, table in self._tables("html")]
        foot = [f"<p>{line}</p>" for line in self._foot]
        return "".join([f"<p>{self._head}</p>", *parts, *foot])
