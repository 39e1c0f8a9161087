"""What became of the paths of a model that were to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bendtrace._later import tabulate
from bendtrace.compiled.attempts import State
from bendtrace.compiled.bodies import Body
from bendtrace.compiled.path import CompiledPath

__all__ = ["CompiledReport"]


class CompiledReport:
    """The paths that were compiled, or why they were not; prints as a table.

    Attributes:
        backend: the backend.
        segments: a row for each piece of a segment that was compiled, as plain values.
        hits: calls that compiled paths have served.
        failures: calls that a compiled path was tried on and that went another way.
        seconds: how long compiling took.
    """

    def __init__(
        self,
        backend: str | None,
        paths: tuple[CompiledPath, ...] = (),
        bodies: tuple[Body, ...] = (),
    ) -> None:
        self.backend = backend
        self._paths, self._bodies = paths, bodies
        self.hits = sum(path.hits for path in paths)
        self.failures = sum(path.failures for path in paths)
        self.seconds = sum(path.seconds for path in paths) + sum(body.seconds for body in bodies)
        self.segments = [
            {
                "functions": body.functions,
                "ops": len(body.functions),
                "state": body.state.value,
                "reason": body.reason,
                "warm_up": body.seconds,
                "graphs": body.graphs,
                "hits": body.hits,
                "speed": body.speed,
            }
            for body in bodies
        ]

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_list())

    def to_list(self) -> list[dict[str, Any]]:
        """Return a row for each path, as plain values, ready for JSON."""
        return [
            {
                "path": number,
                "ops": len(path.recording.tape.ops),
                "state": path.state.value,
                "reason": path.reason,
                "warm_up": path.seconds,
                "graphs": path.graphs,
                "hits": path.hits,
                "failures": path.failures,
                "speed": path.speed,
            }
            for number, path in enumerate(self._paths)
        ]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why paths are not compiled; empty if all are."""
        found = [path.reason for path in self._paths if path.state is State.REFUSED]
        return tuple(dict.fromkeys(found))

    def _table_of_segments(self) -> str:
        rows = [
            [
                _shortened(body.functions), len(body.functions), body.state.value,
                f"{body.seconds:.1f} s", body.graphs, body.hits,
                "" if body.speed is None else f"{body.speed:.1f}x", body.reason,
            ]
            for body in self._bodies
        ]  # fmt: skip
        headers = ["segment", "ops", "state", "warm-up", "graphs", "hits", "over replay",
                   "reason"]  # fmt: skip
        return str(tabulate.tabulate(rows, headers, disable_numparse=True))

    def __repr__(self) -> str:
        if self.backend is None:
            return "no backend: calls are replayed, bit for bit as the model itself"
        segments = f"\n\n{self._table_of_segments()}" if self.segments else ""
        if not self._paths:
            return f"{self.backend}: no path was taken often enough so far{segments}"
        rows = [
            [
                row["path"], row["ops"], row["state"], f"{row['warm_up']:.1f} s", row["graphs"],
                row["hits"], row["failures"],
                "" if row["speed"] is None else f"{row['speed']:.1f}x", row["reason"],
            ]
            for row in self.to_list()
        ]  # fmt: skip
        headers = ["path", "ops", "state", "warm-up", "graphs", "hits", "failures", "over replay",
                   "reason"]  # fmt: skip
        paths = tabulate.tabulate(rows, headers, disable_numparse=True)
        return f"{self.backend}\n{paths}{segments}"


def _shortened(functions: tuple[str, ...]) -> str:
    if len(functions) > _FUNCTIONS:
        functions = (*functions[: _FUNCTIONS - 2], "...", functions[-1])
    return ", ".join(functions)


_FUNCTIONS = 6  # that are shown of a segment
