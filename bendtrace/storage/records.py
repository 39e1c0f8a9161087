"""Entries of a log as rows of plain JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar

from bendtrace._plain import DEVICE, DTYPE, TUPLE, Codec, Form
from bendtrace.graph.export import GRAPH_CODEC
from bendtrace.history.entries import LayerEntry, ModuleEntry, ParameterUse, Source
from bendtrace.history.text import Facts

__all__ = ["FACTS", "LAYERS", "MODULES", "Rows"]

T = TypeVar("T")
_ABSENT = object()


class Rows(Generic[T]):
    """Writes instances of one class as rows: an object each, with a key for each field.

    Fields that have their default are left out.

    Args:
        cls: a dataclass or named tuple.
        forms: fields that are written in a plainer way than values of any type.
        codec: what the rest is written with.
        without: fields that are not written.
    """

    def __init__(
        self,
        cls: type[T],
        forms: Mapping[str, Form],
        codec: Codec,
        without: Collection[str] = (),
    ) -> None:
        self._cls = cls
        self._codec = codec
        fields = {name: value for name, value in _defaults(cls).items() if name not in without}
        self._fields = [(name, forms.get(name), fields[name]) for name in fields]
        self._forms = {name: forms.get(name) for name in fields}

    def write(self, record: T) -> dict[str, Any]:
        """Return a row."""
        row = {}
        for name, form, default in self._fields:
            value = getattr(record, name)
            if type(value) is not type(default) or value != default:
                row[name] = self._codec.write(form, value)
        return row

    def read(self, row: Mapping[str, Any]) -> T:
        """Return the instance that a row describes.

        Raises:
            ValueError: if a value makes no sense.
            LookupError: if there is a field that the class does not have.
            TypeError: if one is missing.
        """
        read, forms = self._codec.read, self._forms
        return self._cls(**{name: read(forms[name], data) for name, data in row.items()})

    def read_all(self, rows: Iterable[Mapping[str, Any]]) -> list[T]:
        """Return the instances that rows describe."""
        return [self.read(row) for row in rows]


def _defaults(cls: type[Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {name: cls._field_defaults.get(name, _ABSENT) for name in cls._fields}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            absent = field.default is dataclasses.MISSING
            defaults[field.name] = _ABSENT if absent else field.default
    return defaults


def _nested(rows: Rows[Any], cls: type[Any]) -> Form:
    return Form(cls, lambda codec, value: rows.write(value), lambda codec, row: rows.read(row))


def _several(rows: Rows[Any]) -> Form:
    return Form(
        list,
        lambda codec, values: [rows.write(value) for value in values],
        lambda codec, data: rows.read_all(data),
    )


_SOURCE = _nested(Rows(Source, {}, GRAPH_CODEC), Source)
_PARAMETERS = _several(Rows(ParameterUse, {"shape": TUPLE}, GRAPH_CODEC))
LAYERS = Rows(
    LayerEntry,
    {
        "element": TUPLE,
        "shape": TUPLE,
        "dtype": DTYPE,
        "device": DEVICE,
        "state": _PARAMETERS,
        "scopes": TUPLE,
        "output_of": TUPLE,
        "source": _SOURCE,
        "flow": TUPLE,
    },
    GRAPH_CODEC,
    without=("saved", "gradient"),
)
MODULES = Rows(ModuleEntry, {"source": _SOURCE, "flow": TUPLE}, GRAPH_CODEC)
FACTS = Rows(Facts, {}, GRAPH_CODEC)
