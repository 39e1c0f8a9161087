"""What can differ between two runs, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from bendtrace.differences.values import ValueDifference
from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry, Source

__all__ = ["FlowChange", "LayerChange", "ModuleChange", "Parting", "loop_text", "where"]

_BY_TYPE = (bool, int, float, str, type(None))


def where(file: str, line: int) -> str:
    """Say a place of the source in short: the file's own name and the line."""
    return f"{os.path.basename(file)}:{line}"


def loop_text(step: FlowStep) -> str:
    """Say a flow step by its source: a kind of statement and its expression."""
    if step.kind == "while":
        return f"while {step.text}"
    return f"{step.kind} {step.text}" if step.kind in ("if", "assert") else step.text


@dataclass(frozen=True, eq=False)
class LayerChange:
    """A layer, number or state that is in both runs, and not the same in both.

    Attributes:
        a: it in the first run.
        b: it in the second run.
        aspects: what is not the same, with what it is in either run: "function", "arguments"
            (those that differ), "parents" (labels; only where more than an op in between came or
            went), "parameters", "shape", "dtype", "device", "grad_fn".
        value: how far the values are from each other; None if they are the same or were not
            compared.
        gradient: how far the gradients are from each other; None as above.
    """

    a: LayerEntry
    b: LayerEntry
    aspects: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    value: ValueDifference | None = None
    gradient: ValueDifference | None = None

    @property
    def what(self) -> tuple[str, ...]:
        """What is not the same, "value" and "gradient" included."""
        more = {"value": self.value, "gradient": self.gradient}
        return (*self.aspects, *(name for name, found in more.items() if found is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {
            "a": self.a.label,
            "b": self.b.label,
            "what": list(self.what),
            "aspects": {key: [_plain(x) for x in pair] for key, pair in self.aspects.items()},
            "value": None if self.value is None else self.value.to_dict(),
            "gradient": None if self.gradient is None else self.gradient.to_dict(),
        }

    def __str__(self) -> str:
        parts = [f"{name} {_text(x)} -> {_text(y)}" for name, (x, y) in self.aspects.items()]
        if self.value is not None:
            parts.append(str(self.value))
        if self.gradient is not None:
            parts.append(f"gradient {self.gradient}")
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class FlowChange:
    """A flow step that went otherwise in the other run, or is not there.

    Attributes:
        kind: "side" for a condition that was decided otherwise, "iterations" for a loop that ran
            more or less often, "index" for another item that was chosen, "value" for another
            number that Python read, "removed" and "added" for a step of one run only.
        a: the step in the first run.
        b: the step in the second run.
    """

    kind: Literal["side", "iterations", "index", "value", "removed", "added"]
    a: FlowStep | None
    b: FlowStep | None

    @property
    def step(self) -> FlowStep:
        """The step in the first run, or, if it is not there, in the second."""
        step = self.a if self.a is not None else self.b
        assert step is not None
        return step

    def value_in(self, step: FlowStep | None) -> str:
        """Say what a step came to."""
        if step is None:
            return "-"
        if self.kind == "iterations" and isinstance(step, LoopFlowStep):
            return step.how_often
        return repr(step.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        steps = {key: None if step is None else step.to_dict()
                 for key, step in (("a", self.a), ("b", self.b))}  # fmt: skip
        return {"kind": self.kind, **steps}

    def __str__(self) -> str:
        step = self.step
        place = f"`{loop_text(step)}` ({where(step.file, step.line)})"
        if step.iteration:
            place += f" in iteration {'.'.join(map(str, step.iteration))}"
        if self.kind in ("removed", "added"):
            return f"{place}: only in {'a' if self.b is None else 'b'}"
        return f"{place}: {self.value_in(self.a)} in a, {self.value_in(self.b)} in b"


@dataclass(frozen=True, eq=False)
class ModuleChange:
    """A module that is in one run only, or not the same in both.

    Attributes:
        kind: "added", "removed", "renamed", "class", "calls" (called more or less often),
            "training" or "parameters" (another number of them).
        a: the first call of the module in the first run; None for the root, which has no entry,
            and if there is none.
        b: the first call of the module in the second run.
        before: what it is in the first run: a name, a class, a number of calls ...
        after: what it is in the second run.
    """

    kind: Literal["added", "removed", "renamed", "class", "calls", "training", "parameters"]
    a: ModuleEntry | None
    b: ModuleEntry | None
    before: Any = None
    after: Any = None

    @property
    def name(self) -> str:
        """The module's name: in the first run, if it is there."""
        entry = self.a if self.a is not None else self.b
        return "" if entry is None else entry.name

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {
            "kind": self.kind,
            "module": self.name,
            "before": _plain(self.before),
            "after": _plain(self.after),
        }

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if self.kind in ("added", "removed"):
            entry = self.b if self.kind == "added" else self.a
            class_name = "" if entry is None else f" ({entry.class_name})"
            return f"{name}{class_name}: only in {'b' if self.kind == 'added' else 'a'}"
        if self.kind == "renamed":
            before, after = (name or "the model itself" for name in (self.before, self.after))
            return f"{before}: is {after} in b"
        return f"{name}: {self.kind} {self.before} -> {self.after}"


@dataclass(frozen=True, eq=False)
class Parting:
    """Where two runs first part.

    Attributes:
        kind: "flow" for a flow step that went otherwise, "layers" for one that is in one run
            only, "change" if the runs took the same path and only what they computed differs.
        a: what it is in the first run; None if it is not there.
        b: what it is in the second run; None if it is not there.
        after: label, in the first run, of the last entry that both runs have before it.
        text: all of it in one line.
    """

    kind: Literal["flow", "layers", "change"]
    a: FlowStep | LayerEntry | None
    b: FlowStep | LayerEntry | None
    after: str
    text: str

    @property
    def source(self) -> tuple[str, int] | None:
        """File and line where it is, in the first run if it is there; None if unknown."""
        for side in (self.a, self.b):
            if isinstance(side, FlowStep):
                return side.file, side.line
            if side is not None and side.source is not None:
                return side.source.file, side.source.line
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the parting as plain values, ready for JSON."""
        plain: dict[str, Any] = {"kind": self.kind, "text": self.text, "after": self.after}
        for key, side in (("a", self.a), ("b", self.b)):
            plain[key] = side.to_dict() if isinstance(side, FlowStep) else side and side.label
        plain["source"] = None if self.source is None else list(self.source)
        return plain

    def __str__(self) -> str:
        return self.text


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and not isinstance(value, Source):
        return [_plain(item) for item in value]
    return value if isinstance(value, _BY_TYPE) else str(value)


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return str(value).removeprefix("torch.")
