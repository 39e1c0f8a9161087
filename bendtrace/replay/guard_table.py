"""The guards of a trace as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bendtrace._later import tabulate
from bendtrace.recording.iterations import user_code
from bendtrace.recording.tape import Guard
from bendtrace.replay.analysis import GuardKind

__all__ = ["GuardTable"]


class GuardTable:
    """The guards of a trace as a table.

    Args:
        guards: the guards.
        kinds: when each is tested.
        names: name of each op's node.
    """

    def __init__(
        self, guards: Sequence[Guard], kinds: Sequence[GuardKind], names: Sequence[str]
    ) -> None:
        self._rows = list(zip(guards, kinds, strict=True))
        self._names = names

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Guard:
        return self._rows[number][0]

    def kind(self, number: int) -> GuardKind:
        """Return when a guard is tested."""
        return self._rows[number][1]

    def to_list(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        rows = []
        for number, (guard, kind) in enumerate(self._rows):
            place = ""
            text = ""
            if guard.site is not None:
                found, _, _ = user_code(guard.scope, guard.site)
                place, text = str(found), found.text
            rows.append(
                {
                    "number": number,
                    "when": kind.value,
                    "node": self._names[guard.index],
                    "test": guard.test.value,
                    "expected": repr(guard.expected),
                    "source": text,
                    "at": place,
                }
            )
        return rows

    def __repr__(self) -> str:
        rows = [[*{**row, "at": os.path.basename(row["at"])}.values()] for row in self.to_list()]
        headers = ["#", "when", "node", "test", "expected", "source", "at"]
        return tabulate.tabulate(rows, headers, disable_numparse=True)
