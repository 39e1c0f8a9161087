"""Which conditions only one of two runs depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from bendtrace.differences.matching import Matching, Run

__all__ = ["GuardChange", "guard_changes"]


@dataclass(frozen=True, eq=False)
class GuardChange:
    """A guard that one run has only, or that had another outcome in the other.

    Attributes:
        kind: "removed", "added", or "expected" for another outcome.
        a: the guard in the first run, as a row of `RunLog.guard_rows()`; None if not there.
        b: the guard in the second run.
    """

    kind: Literal["removed", "added", "expected"]
    a: dict[str, Any] | None
    b: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {"kind": self.kind, "a": self.a, "b": self.b}

    def __str__(self) -> str:
        row = self.a or self.b or {}
        what = f"{row['test']} of `{row['source'] or row['node']}`"
        if self.a is not None and self.b is not None:
            return f"{what}: {self.a['expected']} in a, {self.b['expected']} in b"
        return f"{what}: only in {'a' if self.b is None else 'b'}, {row['expected']}"


def guard_changes(matching: Matching) -> list[GuardChange]:
    """Compare the guards of two runs.

    Args:
        matching: what of the runs is the same.
    """
    rows_a, rows_b = (_keyed(run, matching) for run in (matching.a, matching.b))
    changes = []
    for key, a in rows_a.items():
        b = rows_b.get(key)
        if b is None:
            changes.append(GuardChange("removed", a, None))
        elif a["expected"] != b["expected"]:
            changes.append(GuardChange("expected", a, b))
    changes += [GuardChange("added", None, b) for key, b in rows_b.items() if key not in rows_a]
    return changes


def _keyed(run: Run, matching: Matching) -> dict[Hashable, dict[str, Any]]:
    """Return guards by what they are about: the value, the test and the expression."""
    is_a = run is matching.a
    about: dict[str, Hashable] = {}
    for position, entry in enumerate(run.entries):
        known = matching.entries.get(position) if is_a else position
        about[entry.node] = known if known is not None else ("only in a", entry.node)
    often: Counter[Hashable] = Counter()
    found: dict[Hashable, dict[str, Any]] = {}
    for row in run.history.guard_rows():
        key = (about.get(row["node"]), row["test"], row["source"])
        found[key, often[key]] = row
        often[key] += 1
    return found
