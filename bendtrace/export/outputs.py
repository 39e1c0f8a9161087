"""What an exported program returns: tensors, and numbers as tensors, in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from bendtrace.errors import ExportError
from bendtrace.export.ops import SegmentOps
from bendtrace.export.values import DTYPES, Constant, Number, Several, Static, Tensors, Value
from bendtrace.tape.structure import Existing, Fixed, Instance
from bendtrace.tape.tape import Op, Ref

Given: TypeAlias = Callable[[Any, Op | None], Value]


def output_of(value: Any, ops: SegmentOps, part: Given, told: list[str]) -> Value:
    """Return what a run gives, with its structure."""
    kind = type(value)
    if kind is Ref:
        return ops.value_of(value.index)
    if kind in (tuple, list):
        return Several(tuple(output_of(item, ops, part, told) for item in value), (), kind)
    if kind is dict:
        items = tuple(output_of(item, ops, part, told) for item in value.values())
        return Several(items, tuple(value), dict)
    if kind is Existing:
        return part(value.part, None)
    if kind is Instance:
        return _instance(value, ops, part, told)
    if kind is Fixed:
        return Constant(value.value)
    if value is None or kind in (bool, int, float, str):
        return Constant(value)
    raise ExportError(
        f"the model returns a {getattr(value, 'cls', kind).__name__}: return tensors, numbers, "
        "tuples, lists and dicts",
        "its return",
    )


def _instance(value: Instance, ops: SegmentOps, part: Given, told: list[str]) -> Value:
    name = value.cls.__name__
    if issubclass(value.cls, tuple):
        kind, keys, inner = tuple, (), tuple(value.items)
    elif issubclass(value.cls, dict):
        kind, keys = dict, tuple(value.items)  # type: ignore[assignment]
        inner = tuple(value.items.values())
    else:
        raise ExportError(
            f"the model returns a {name}: return tensors, numbers, tuples, lists and dicts",
            "its return",
        )
    note = f"in place of a {name} it returns a {kind.__name__}"
    if note not in told:
        told.append(note)
    return Several(tuple(output_of(item, ops, part, told) for item in inner), keys, kind)


def write_output(value: Value, names: dict[str, Any], told: list[str]) -> str:
    """Return an expression for what the program returns."""
    note = "numbers that it returns are tensors without dimensions"

    def text(value: Value) -> str:
        if isinstance(value, Tensors):
            return value.name
        if isinstance(value, Number):
            if note not in told:
                told.append(note)
            return value.name
        if isinstance(value, Static):
            if note not in told:
                told.append(note)
            return f"torch.scalar_tensor({value.text}, dtype={DTYPES[value.type]})"
        if isinstance(value, Constant):
            if type(value.value) in (bool, int, float):
                if note not in told:
                    told.append(note)
                dtype = DTYPES[type(value.value)]
                return f"torch.full((), {value.value!r}, dtype={dtype})"
            bound = f"c_{len(names)}"
            names[bound] = value.value
            return bound
        assert isinstance(value, Several), "what is outdated is refused before it is returned"
        inner = [text(item) for item in value.items]
        if value.kind is dict:
            pairs = zip(value.keys, inner, strict=True)
            return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        return (
            f"[{', '.join(inner)}]"
            if value.kind is list
            else f"({''.join(i + ', ' for i in inner)})"
        )

    return text(value)
