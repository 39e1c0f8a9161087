"""The kinds of differences between two runs, as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bendtrace._compare import same_bits
from bendtrace._places import place_text
from bendtrace.flow import FlowStep, LoopFlowStep
from bendtrace.history.entries import LayerEntry, ModuleEntry, Source, number_text


@dataclass(frozen=True)
class ValueDifference:
    """How far two values of the same shape are apart.

    Attributes:
        differing: the number of elements that differ: in a bit, or, for different dtypes, in value.
        elements: the number of elements.
        max_abs: the largest absolute difference; elements that are nan or the same infinity on both
            sides count as equal. None if there is no such number.
        max_rel: the largest difference relative to the larger of the two magnitudes; None as
            above.
        first: index of the first element that differs, in row-major order.
        a: its value in the first run.
        b: its value in the second run.
        nan_a: the number of elements that are nan in the first run only.
        nan_b: the number of elements that are nan in the second run only.
    """

    differing: int
    elements: int
    max_abs: float | None = None
    max_rel: float | None = None
    first: tuple[int, ...] = ()
    a: Any = None
    b: Any = None
    nan_a: int = 0
    nan_b: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values, ready for JSON."""
        plain = asdict(self)
        plain["first"] = list(self.first)
        for key in ("max_abs", "max_rel", "a", "b"):
            value = plain[key]
            if not isinstance(value, (bool, int, float, type(None))) or (
                type(value) is float and not math.isfinite(value)
            ):
                plain[key] = repr(value)
        return plain

    def __str__(self) -> str:
        if not self.elements:
            return "value"
        if self.elements == 1 and not self.first:
            return _pair(self.a, self.b)
        nans = [f"{count} nan only in {run}"
                for count, run in ((self.nan_a, "a"), (self.nan_b, "b")) if count]  # fmt: skip
        parts = []
        if self.max_abs == 0 and not nans:
            parts = ["in bits only"]
        elif self.max_abs:
            parts = [f"max abs {self.max_abs:.3g}"]
        parts += [f"{self.differing} of {self.elements} differ", *nans]
        index = ", ".join(map(str, self.first))
        return f"{', '.join(parts)}, first [{index}]: {_pair(self.a, self.b)}"


def compare_numbers(a: Any, b: Any) -> ValueDifference | None:
    """Compare two numbers taken from tensors; None if they are equal."""
    if same_bits(a, b):
        return None
    try:
        distance = 0.0 if a == b else abs(a - b)
        scale = max(abs(a), abs(b))
        distance, relative = float(distance), float(distance / scale) if scale else 0.0
    except (TypeError, ValueError, ArithmeticError):
        return ValueDifference(1, 1, a=a, b=b)
    return ValueDifference(1, 1, distance, relative, a=a, b=b)


def compare_tensors(
    a: Tensor, b: Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> ValueDifference | None:
    """Compare two saved tensors of one shape.

    Args:
        a: the value in the first run.
        b: the value in the second run.
        rtol: as in `torch.isclose`; with both tolerances at 0, only equal bits count as equal.
        atol: as in `torch.isclose`.

    Returns:
        How they differ; None if they are equal.

    Example:
        >>> import torch
        >>> print(compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])))
        max abs 0.5, 1 of 2 differ, first [1]: 2.0 -> 2.5
    """
    a, b = a.detach(), b.detach()
    plain = all(t.layout is torch.strided and not t.is_quantized and not t.is_nested
                and not t.is_meta for t in (a, b))  # fmt: skip
    if not plain:
        a, b = (t.to_dense() if t.layout is not torch.strided and not t.is_nested else t
                for t in (a, b))  # fmt: skip
        if a.is_meta or b.is_meta or a.is_nested or b.is_nested or a.is_quantized:
            return None if same_bits(a, b) else ValueDifference(0, 0)
    a, b = a.cpu().resolve_conj().resolve_neg(), b.cpu().resolve_conj().resolve_neg()
    if a.numel() == 0:
        return None
    if rtol or atol:
        wide = torch.promote_types(a.dtype, b.dtype)
        differs = ~torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    else:
        differs = _differing(a, b)
    flat = differs.reshape(-1)
    count = int(flat.sum())
    if not count:
        return None
    position = int(flat.to(torch.uint8).argmax())
    first = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), a.shape))
    max_abs, max_rel = _distances(a, b)
    nans = [t.isnan() for t in (a, b)]
    return ValueDifference(
        differing=count,
        elements=a.numel(),
        max_abs=max_abs,
        max_rel=max_rel,
        first=first,
        a=a.reshape(-1)[position].item(),
        b=b.reshape(-1)[position].item(),
        nan_a=int((nans[0] & ~nans[1]).sum()),
        nan_b=int((nans[1] & ~nans[0]).sum()),
    )


_WIDEST = 40
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Say for each element whether it differs: in a bit, or, between dtypes, in value."""
    if a.dtype == b.dtype:
        if a.is_complex():
            return _differing(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
        plain = _SAME_SIZE[a.dtype.itemsize]
        # reshape, since a single number cannot be viewed in another dtype of its own size
        # everywhere, and contiguous, since views of a dtype want that.
        bits = [t.contiguous().reshape(-1).view(plain).reshape(t.shape) for t in (a, b)]
        return bits[0] != bits[1]
    a, b = _wide(a), _wide(b)
    return (a != b) & ~(a.isnan() & b.isnan())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _distances(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    a, b = _wide(a), _wide(b)
    distance = (a - b).abs()
    # What is nan, or the same infinity, on both sides has nan for a distance, which is left out.
    return _largest(distance), _largest(distance / torch.maximum(a.abs(), b.abs()))


def _largest(t: Tensor) -> float | None:
    known = t[~t.isnan()]
    return float(known.max()) if known.numel() else None


def _pair(a: Any, b: Any) -> str:
    for digits in (6, 9, 17):
        told = _short(a, digits), _short(b, digits)
        if told[0] != told[1]:
            break
    return f"{told[0]} -> {told[1]}"


def _short(value: Any, digits: int) -> str:
    if type(value) is float and not value.is_integer():
        return f"{value:.{digits}g}"
    text = repr(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


_BY_TYPE = (bool, int, float, str, type(None))


def loop_text(step: FlowStep) -> str:
    """Return the source text of a flow step: a kind of statement and its expression."""
    if step.kind == "while":
        return f"while {step.text}"
    return f"{step.kind} {step.text}" if step.kind in ("if", "assert") else step.text


@dataclass(frozen=True, eq=False)
class LayerChange:
    """A layer, number or state that both runs have, with differences.

    Attributes:
        a: the entry in the first run.
        b: the entry in the second run.
        aspects: the differing properties, with their values in both runs: "function", "arguments"
            (those that differ), "parents" (labels; only if more than an op in between was added or
            removed), "parameters", "shape", "dtype", "device", "grad_fn".
        value: how far the values are apart; None if they are equal or were not compared.
        gradient: how far the gradients are apart; None as above.
    """

    a: LayerEntry
    b: LayerEntry
    aspects: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    value: ValueDifference | None = None
    gradient: ValueDifference | None = None

    @property
    def what(self) -> tuple[str, ...]:
        """The names of the differing properties, including "value" and "gradient"."""
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
    """A flow step with another outcome in the other run, or without a counterpart.

    Attributes:
        kind: "side" for a condition with another outcome, "iterations" for a loop with more or
            fewer iterations, "index" for another chosen item, "value" for another number that
            Python read, "removed" and "added" for a step of one run only.
        a: the step in the first run.
        b: the step in the second run.
    """

    kind: Literal["side", "iterations", "index", "value", "removed", "added"]
    a: FlowStep | None
    b: FlowStep | None

    @property
    def step(self) -> FlowStep:
        """The step in the first run, or, if it does not exist there, in the second."""
        step = self.a if self.a is not None else self.b
        assert step is not None
        return step

    def value_in(self, step: FlowStep | None) -> str:
        """Return the outcome of a step as text."""
        if step is None:
            return "-"
        if self.kind == "iterations" and isinstance(step, LoopFlowStep):
            return step.how_often
        rounded = {number_text(side.value) for side in (self.a, self.b) if side is not None}
        is_close = self.a is not None and self.b is not None and len(rounded) == 1
        return repr(step.value) if is_close else number_text(step.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        steps = {key: None if step is None else step.to_dict()
                 for key, step in (("a", self.a), ("b", self.b))}  # fmt: skip
        return {"kind": self.kind, **steps}

    def __str__(self) -> str:
        step = self.step
        place = f"`{loop_text(step)}` ({place_text(step.file, step.line)})"
        if step.iteration:
            place += f" in iteration {'.'.join(map(str, step.iteration))}"
        if self.kind in ("removed", "added"):
            return f"{place}: only in {'a' if self.b is None else 'b'}"
        return f"{place}: {self.value_in(self.a)} in a, {self.value_in(self.b)} in b"


@dataclass(frozen=True, eq=False)
class ModuleChange:
    """A module that only one run has, or that differs between the runs.

    Attributes:
        kind: "added", "removed", "renamed", "class", "calls" (called more or less often),
            "training" or "parameters" (another number of them).
        a: the first call of the module in the first run; None for the root, which has no entry, and
            if there is no call.
        b: the first call of the module in the second run.
        before: the property in the first run: a name, a class, a number of calls ...
        after: the property in the second run.
    """

    kind: Literal["added", "removed", "renamed", "class", "calls", "training", "parameters"]
    a: ModuleEntry | None
    b: ModuleEntry | None
    before: Any = None
    after: Any = None

    @property
    def name(self) -> str:
        """The module's name: in the first run, if it exists there."""
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
    """The first point where two runs diverge.

    Attributes:
        kind: "flow" for a flow step with another outcome, "layers" for one that only one run has,
            "change" if the runs took the same path and only computed values differ.
        a: the item in the first run; None if it does not exist there.
        b: the item in the second run; None if it does not exist there.
        after: label, in the first run, of the last entry before it that both runs have.
        text: a description in one line.
    """

    kind: Literal["flow", "layers", "change"]
    a: FlowStep | LayerEntry | None
    b: FlowStep | LayerEntry | None
    after: str
    text: str

    @property
    def source(self) -> tuple[str, int] | None:
        """Its file and line, in the first run if it exists there; None if unknown."""
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
