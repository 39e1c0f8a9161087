"""Tables of a run: its ops with their arguments, its modules, parameters and buffers; its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bendtrace._checks import required_choice
from bendtrace._lazy import tabulate
from bendtrace.flow import FlowSteps, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry

__all__ = [
    "Table",
    "hash_of",
    "in_bytes",
    "in_percent",
    "in_seconds",
    "rounded",
    "table_of",
]


class Table(Sequence[Any]):
    """Rows of a result, which print as a table.

    Args:
        rows: named tuples of one kind.
        formats: how the fields of some columns are shown, by name.

    Example:
        >>> import torch, bendtrace as bt
        >>> table = bt.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2)).table("modules")
        >>> table[0].class_name, table.to_list()[0]["ops"]
        ('ReLU', 1)
    """

    def __init__(
        self, rows: Sequence[Any], formats: dict[str, Callable[[Any], str]] | None = None
    ) -> None:
        self._rows = tuple(rows)
        self._formats = formats or {}

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def _laid_out(self, form: str) -> str:
        if not self._rows:
            return "none"
        names = self._rows[0]._fields
        shown = [
            [self._formats.get(name, str)(value) for name, value in zip(names, row, strict=True)]
            for row in self._rows
        ]
        return str(tabulate.tabulate(shown, names, tablefmt=form, disable_numparse=True))

    def __str__(self) -> str:
        return self._laid_out("simple")

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows>"

    def _repr_html_(self) -> str:
        return self._laid_out("html")

    def to_list(self) -> list[dict[str, Any]]:
        """Return the rows as dicts of plain values."""
        return [row._asdict() for row in self._rows]


class OpRow(NamedTuple):
    """An op with its arguments, for `table("ops")`."""

    label: str
    function: str
    arguments: str
    shape: tuple[int, ...] | None
    dtype: str
    module: str
    nbytes: int


class ModuleRow(NamedTuple):
    """A module with all of its calls, for `table("modules")`."""

    name: str
    class_name: str
    calls: int
    parameters: int
    ops: int
    nbytes: int


class StateRow(NamedTuple):
    """A parameter or buffer that a run used, for `table("parameters")` and `table("buffers")`."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    trainable: bool
    ops: int


def table_of(entries: Sequence[LayerEntry], modules: Iterable[ModuleEntry], what: str) -> Table:
    """Return one of the tables of a run; see `RunLog.table`."""
    required_choice("what", what, "ops", "modules", "parameters", "buffers")
    ops = [entry for entry in entries if entry.kind == "op"]
    if what == "ops":
        rows: list[Any] = [
            OpRow(
                entry.label, entry.target or entry.function, entry.arguments, entry.shape,
                str(entry.dtype).removeprefix("torch."), entry.module, entry.nbytes,
            )
            for entry in ops
        ]  # fmt: skip
    elif what == "modules":
        calls: dict[str, list[ModuleEntry]] = {}
        for module in modules:
            calls.setdefault(module.name, []).append(module)
        rows = []
        for name, its in calls.items():
            labels = {call.label for call in its}
            inside = [entry for entry in ops if not labels.isdisjoint(entry.scopes)]
            nbytes = sum(entry.nbytes for entry in inside)
            first = its[0]
            rows.append(
                ModuleRow(name, first.class_name, len(its), first.parameters, len(inside), nbytes)
            )
    else:
        uses = [use for entry in entries for use in entry.state if entry.kind != "state"]
        wanted = [use for use in uses if use.is_parameter is (what == "parameters")]
        times: dict[str, int] = {}
        for use in wanted:
            times[use.name] = times.get(use.name, 0) + 1
        first_uses = {use.name: use for use in reversed(wanted)}
        rows = [
            StateRow(name, first_uses[name].shape, first_uses[name].nbytes,
                     first_uses[name].trainable, count)
            for name, count in times.items()
        ]  # fmt: skip
    return Table(rows, {"nbytes": in_bytes})


def hash_of(entries: Iterable[LayerEntry], steps: FlowSteps) -> str:
    """Return the hash of the structure of a run; see `RunLog.hash`."""
    values = [
        (
            entry.kind, entry.label, entry.target or entry.function, entry.arguments, entry.module,
            entry.shape, str(entry.dtype), entry.parents, [use.name for use in entry.state],
        )
        for entry in entries
    ]  # fmt: skip
    asked = [
        (
            step.kind, step.text, step.module_path, step.iteration,
            step.iterations if isinstance(step, LoopFlowStep) else _exact(step.value),
        )
        for step in steps
    ]  # fmt: skip
    text = json.dumps([values, asked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(value: Any) -> Any:
    """What is the same on every machine: a float may differ in its last digits."""
    return value if type(value) in (bool, int, str) else None


def rounded(value: float | None) -> str:
    """Return a number with three digits; "" for None."""
    return "" if value is None else f"{value:.3g}"


def in_percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{value:.0%}"


def in_seconds(value: float) -> str:
    """Return seconds as milliseconds."""
    return f"{value * 1e3:.3g} ms"


def in_bytes(value: int) -> str:
    """Return a size in bytes or KiB."""
    return f"{value / 1024:.3g} KiB" if value >= 1024 else f"{value} B"
