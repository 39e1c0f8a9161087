"""Reports of insertions: where they were called, how often, and whether they changed anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bendtrace.interject.interjection import NodePass
from bendtrace.paths.nodes import NodePath

__all__ = ["Report", "Row", "Tally"]


@dataclass
class Row:
    """The record of one node.

    Attributes:
        path: the node.
        passes: how often it was called in each pass.
        changed: the number of calls that changed the value, as far as this was checked: once it has
            changed a value in place, later new values count as changed.
        backward: how often it received gradients.
    """

    path: str
    passes: dict[int, int] = field(default_factory=dict)
    changed: int = 0
    backward: int = 0

    @property
    def fired(self) -> int:
        """How often it was called."""
        return sum(self.passes.values())


@dataclass(frozen=True)
class Report:
    """What an insertion has done so far.

    Attributes:
        label: the name of the insertion.
        where: its location.
        rows: the nodes at which it was called.
        notes: why it was not called elsewhere, one line each.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + x.exp())
        >>> handle = bended.interject(["relu", "exp"], lambda value: value.clamp(max=5))
        >>> for value in (1.0, 2.0):
        ...     _ = bended(torch.tensor([value]))
        >>> report = handle.report()
        >>> report
        function at 'relu', 'exp': called 4 times at 2 nodes
          relu: 2 times, no change
          exp: 2 times, changed the value once
        >>> report.fired, report.changed, report.paths
        (4, True, ('relu', 'exp'))
    """

    label: str
    where: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def fired(self) -> int:
        """How often it was called in total."""
        return sum(row.fired for row in self.rows)

    @property
    def changed(self) -> bool:
        """Whether it ever changed a value."""
        return any(row.changed for row in self.rows)

    @property
    def paths(self) -> tuple[str, ...]:
        """The nodes at which it was called."""
        return tuple(NodePath(row.path) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        return {
            "label": self.label,
            "where": self.where,
            "fired": self.fired,
            "nodes": [
                {
                    "path": row.path, "passes": {str(k): v for k, v in row.passes.items()},
                    "changed": row.changed, "backward": row.backward,
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        head = f"{self.label} at {self.where}: "
        if not self.rows:
            lines = [head + "never called"]
        else:
            nodes = "1 node" if len(self.rows) == 1 else f"{len(self.rows)} nodes"
            lines = [head + f"called {_times(self.fired)} at {nodes}"]
        for row in self.rows:
            passes = _passes(row.passes)
            parts = [_times(row.fired) + passes]
            parts.append(f"changed the value {_times(row.changed)}" if row.changed else "no change")
            if row.backward:
                parts.append(f"gradients {_times(row.backward)}")
            lines.append(f"  {row.path or '<root>'}: {', '.join(parts)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


class Tally:
    """Counts calls; thread-safe, since backward passes may run in several threads.

    Attributes:
        latest_reset: another object after each reset of counts, of any insertion.
    """

    latest_reset: ClassVar[object] = object()

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._waiting: set[Callable[[], None]] = set()

    def wait_for(self, settle: Callable[[], None]) -> None:
        """Note a function that counts calls which were not counted so far.

        It is called, perhaps in vain, before anybody reads the counts.
        """
        self._waiting.add(settle)

    def _settle(self) -> None:
        with self._settling:
            while self._waiting:
                self._waiting.pop()()

    def rows(self) -> tuple[Row, ...]:
        """Return the counts so far."""
        self._settle()
        with self._lock:
            return tuple(
                Row(row.path, dict(row.passes), row.changed, row.backward)
                for row in self._rows.values()
            )

    def called(self, at: NodePass, changed: bool, times: int = 1) -> None:
        """Count a call, or several."""
        with self._lock:
            row = self._row(at.path)
            row.passes[at.number] = row.passes.get(at.number, 0) + times
            row.changed += changed * times

    def told(self, at: NodePass) -> None:
        """Count gradients that were received."""
        with self._lock:
            row = self._row(at.path)
            row.backward += 1

    def has_changed(self, path: str) -> bool:
        """Return whether a value was changed at a node."""
        row = self._rows.get(path)
        return row is not None and row.changed > 0

    def clear(self) -> None:
        """Reset the counts."""
        self._settle()
        with self._lock:
            Tally.latest_reset = object()
            self._rows.clear()

    def _row(self, path: str) -> Row:
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = Row(path)
        return row


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _passes(passes: dict[int, int]) -> str:
    numbers = sorted(passes)
    if numbers in ([], [0]):
        return ""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f" in passes {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers))
    return f" in pass {shown}" if len(numbers) == 1 else f" in passes {shown}"
