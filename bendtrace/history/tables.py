"""Tables of a run: its columns, ops, modules, parameters and buffers; its hash.

A fact about entries that tables and exports show is one `LogColumn`.
"""

from __future__ import annotations

import hashlib
import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bendtrace._checks import required_choice
from bendtrace._lazy import required_pandas, tabulate
from bendtrace.flow import FlowSteps, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry, size_text

if TYPE_CHECKING:
    import pandas


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


View = Literal["ops", "frame", "chrome", "model_explorer", "tensorboard"]


class LogColumn(NamedTuple):
    """A fact about each entry of a log, which tables and exports show.

    Attributes:
        name: its heading.
        views: where it is shown: in the table of ops, in the "frame" of pandas and parquet, and
            in the exports with these names.
        read: returns its value for an entry; None for the entry's attribute with that name.
    """

    name: str
    views: tuple[View, ...]
    read: Callable[[LayerEntry], Any] | None = None

    def value(self, entry: LayerEntry) -> Any:
        """Return its value for an entry."""
        return getattr(entry, self.name) if self.read is None else self.read(entry)


def shape_text(entry: LayerEntry) -> str:
    """Return the dtype and shape of a tensor as `float32[2, 3]`, or a number as it prints."""
    return repr(entry.value) if entry.shape is None else f"{_dtype(entry)}{list(entry.shape)}"


def _dtype(entry: LayerEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _target(entry: LayerEntry) -> str:
    return entry.target or entry.function


def _parameters(entry: LayerEntry) -> int:
    return sum(use.numel for use in entry.state if use.is_parameter)


def _place(entry: LayerEntry) -> str | None:
    return None if entry.source is None else str(entry.source)


def _source(entry: LayerEntry) -> str | None:
    return None if entry.source is None else f"{entry.source}: {entry.source.text}"


# Each view shows them in this order.
COLUMNS = (
    LogColumn("label", ("ops",)),
    LogColumn("function", ("ops", "model_explorer"), _target),
    LogColumn("shape", ("chrome", "tensorboard"), shape_text),
    LogColumn("arguments", ("ops", "chrome", "model_explorer", "tensorboard")),
    LogColumn("layer_type", ("frame",)),
    LogColumn("kind", ("frame",)),
    LogColumn("pass", ("frame",), lambda entry: entry.pass_number),
    LogColumn("passes", ("frame",)),
    LogColumn("shape", ("ops", "frame")),
    LogColumn("dtype", ("ops",), _dtype),
    LogColumn("dtype", ("frame",), lambda entry: str(entry.dtype)),
    LogColumn("device", ("frame",), lambda entry: str(entry.device)),
    LogColumn("bytes", ("frame",), lambda entry: entry.nbytes),
    LogColumn("function", ("frame",)),
    LogColumn("grad_fn", ("frame",)),
    LogColumn("module", ("ops", "frame", "chrome")),
    LogColumn("nbytes", ("ops",)),
    LogColumn("parents", ("frame",)),
    LogColumn("children", ("frame",)),
    LogColumn("parameters", ("frame",), _parameters),
    LogColumn("seconds", ("frame",), lambda entry: entry.time),
    LogColumn("flops", ("frame",)),
    LogColumn("node_path", ("frame",)),
    LogColumn("source", ("frame",), _place),
    LogColumn("source", ("chrome", "model_explorer"), _source),
    LogColumn("saved", ("frame",), lambda entry: entry.has_contents),
)


def facts_of(entry: LayerEntry, view: View) -> dict[str, Any]:
    """Return what a view shows of an entry, by the names of its columns."""
    return {column.name: column.value(entry) for column in COLUMNS if view in column.views}


def data_frame(entries: Sequence[LayerEntry]) -> pandas.DataFrame:
    """Return a row for each entry, indexed by label.

    Raises:
        ImportError: pandas is not installed.
    """
    rows = {entry.label: facts_of(entry, "frame") for entry in entries}
    frame = required_pandas().DataFrame.from_dict(rows, orient="index")
    return frame.rename_axis("label")  # type: ignore[no-any-return]


OpRow: type[OpRow] = namedtuple("OpRow", [c.name for c in COLUMNS if "ops" in c.views])  # type: ignore[misc]


class ModuleRow(NamedTuple):
    """A module with all of its calls, for `table("modules")`."""

    name: str
    class_name: str
    calls: int
    parameters: int
    ops: int
    nbytes: int
    time: float | None


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
        rows: list[Any] = [OpRow(**facts_of(entry, "ops")) for entry in ops]
    elif what == "modules":
        calls: dict[str, list[ModuleEntry]] = {}
        for module in modules:
            calls.setdefault(module.name, []).append(module)
        rows = []
        for name, its in calls.items():
            labels = {call.label for call in its}
            inside = [entry for entry in ops if not labels.isdisjoint(entry.scopes)]
            nbytes = sum(entry.nbytes for entry in inside)
            measured = [entry.time for entry in inside if entry.time is not None]
            first = its[0]
            rows.append(
                ModuleRow(name, first.class_name, len(its), first.parameters, len(inside), nbytes,
                          sum(measured) if measured else None)
            )  # fmt: skip
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
    return Table(rows, {"nbytes": size_text, "time": in_seconds})


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


def in_seconds(value: float | None) -> str:
    """Return seconds as milliseconds; "" for None."""
    return "" if value is None else f"{value * 1e3:.3g} ms"
