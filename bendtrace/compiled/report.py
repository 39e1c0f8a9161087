"""The report on the compiled paths of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import shorten
from typing import Any

from bendtrace._lazy import tabulate
from bendtrace.compiled.attempts import State
from bendtrace.compiled.path import CompiledPath
from bendtrace.compiled.segments import Body

__all__ = ["CompiledReport"]


class CompiledReport:
    """The paths that were compiled, or why they were not; prints as a table.

    Attributes:
        backend: the backend.
        segments: a row for each piece of a segment that was compiled, as plain values.
        hits: calls that compiled paths have served.
        failures: calls that a compiled path was tried on and that went another way.
        seconds: how long compiling took.
        kept: with a `cache_dir`, the result for each path, one line each.
        without: why no segments were compiled; "" if some were.
    """

    def __init__(
        self,
        backend: str | None,
        paths: tuple[CompiledPath, ...] = (),
        bodies: tuple[Body, ...] = (),
        kept: tuple[str, ...] = (),
        without: str = "",
    ) -> None:
        self.kept = kept
        self.backend = backend
        self._paths = paths
        self.hits: int = sum(path.hits for path in paths)
        self.failures: int = sum(path.failures for path in paths)
        self.seconds: float | int = sum(path.seconds for path in paths) + sum(
            body.seconds for body in bodies
        )
        self.without: str = "" if bodies else without
        self.segments: list[dict[str, Any]] = [
            {"functions": body.functions, "ops": len(body.functions), **body.row()}
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
                **path.row(),
                "failures": path.failures,
            }
            for number, path in enumerate(self._paths)
        ]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why paths are not compiled; empty if all are."""
        found = [path.reason for path in self._paths if path.state is State.REFUSED]
        return tuple(dict.fromkeys(found))

    def __repr__(self) -> str:
        if self.backend is None:
            return "no backend: calls are replayed, bit for bit as the model itself"
        segments = f"\n\nno segments: {self.without}" if self.without else ""
        if self.segments:
            segments = f"\n\n{_table(self.segments, *_OF_SEGMENTS)}"
        if not self._paths:
            return f"{self.backend}: no path was taken often enough so far{segments}"
        kept = "".join(f"\n{line}" for line in self.kept)
        paths = self.to_list()
        reasons = dict.fromkeys(row["reason"] for row in [*paths, *self.segments])
        cut = "".join(f"\n\n{why}" for why in reasons if why and why != _FORMATS["reason"](why))
        return f"{self.backend}\n{_table(paths, *_OF_PATHS)}{segments}{cut}{kept}"


def _table(rows: list[dict[str, Any]], *columns: str) -> str:
    """Return some columns of rows as a table."""
    cells = [
        [_FORMATS[name](row[name]) if name in _FORMATS else row[name] for name in columns]
        for row in rows
    ]
    headers = [_HEADERS.get(name, name) for name in columns]
    return str(tabulate.tabulate(cells, headers, disable_numparse=True))


def _shortened(functions: tuple[str, ...]) -> str:
    if len(functions) > _FUNCTIONS:
        functions = (*functions[: _FUNCTIONS - 2], "...", functions[-1])
    return ", ".join(functions)


_FUNCTIONS = 6  # that are shown of a segment
_OF_PATHS = (
    "path", "ops", "state", "warm_up", "graphs", "hits", "failures", "speed", "reason",
)  # fmt: skip
_OF_SEGMENTS = (
    "functions", "ops", "state", "warm_up", "graphs", "hits", "speed", "reason",
)  # fmt: skip
_HEADERS = {"functions": "segment", "warm_up": "warm-up", "speed": "over replay"}
_FORMATS: dict[str, Callable[[Any], Any]] = {
    "functions": _shortened,
    "reason": lambda reason: shorten(reason, 70, placeholder=" ..."),
    "warm_up": lambda seconds: f"{seconds:.1f} s",
    "speed": lambda speed: "" if speed is None else f"{speed:.1f}x",
}
