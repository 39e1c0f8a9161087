"""Plain JSON for values that JSON cannot hold, and back, without any of the user's classes.

None, booleans, text, lists, dicts with text keys and the usual numbers are stored as they are.
Everything else is an object with one key that begins with a dollar sign: `{"$tuple": [1, 2]}`,
`{"$float": "nan"}`, `{"$dtype": "float32"}`. A value of an unknown kind is stored as its text.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch

_EXACT = 1 << 53  # JSON readers of other languages keep integers up to this
_DEEPEST = 100
_NESTED = frozenset({list, dict})


class Remembered:
    """A placeholder for an object of which only the text was kept, such as a member of an enum."""

    __slots__ = ("kind", "text", "value")

    def __init__(self, kind: str, text: str, value: Any = None) -> None:
        self.kind: str = kind  # qualified name of its class
        self.text: str = text  # its `repr`, which this object shares
        # For a member of an enum its value; for an instance of a subclass of a plain type (int,
        # float, str, bytes, bool) the plain value; otherwise None.
        self.value: Any = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remembered) and (other.kind, other.text) == (self.kind, self.text)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))

    def __repr__(self) -> str:
        return self.text


class Plainer(NamedTuple):
    """A plainer way to write a field whose type is known, used if the value is of that type."""

    kind: type[Any]
    write: Callable[[Codec, Any], Any]
    read: Callable[[Codec, Any], Any]


class Codec:
    """Converts values to plain JSON, and back.

    Args:
        records: bendtrace's own classes (named tuples and dataclasses) that are kept field by
            field.
        special: other classes of bendtrace by name: the class, a function that makes an instance
            writable, and a function that restores an instance.

    Example:
        >>> codec = Codec()
        >>> codec.encode((1, float("nan")))
        {'$tuple': [1, {'$float': 'nan'}]}
        >>> codec.decode({"$tuple": [1, {"$float": "nan"}]})
        (1, nan)
    """

    def __init__(
        self,
        records: tuple[type[Any], ...] = (),
        special: Mapping[str, tuple[type[Any], Callable[..., Any], Callable[..., Any]]]
        | None = None,
    ) -> None:
        special = special or {}
        self._fields = {cls: fields_of(cls) for cls in records}
        self._special = {cls: (f"${name}", out) for name, (cls, out, _) in special.items()}
        self._decoders: dict[str, Callable[[Any], Any]] = {
            **_DECODERS,
            "$tuple": lambda items: tuple(map(self.decode, _list(items))),
            "$size": lambda items: torch.Size(list(map(self.decode, _list(items)))),
            "$set": lambda items: set(map(self.decode, _list(items))),
            "$frozenset": lambda items: frozenset(map(self.decode, _list(items))),
            "$slice": lambda items: slice(*map(self.decode, _list(items))),
            "$dict": self._dict,
            "$object": self._remembered,
            "$other": self.decode,
        }
        for cls in records:
            self._decoders[f"${cls.__name__}"] = self._record(cls)
        for name, (_, _, back) in special.items():
            self._decoders[f"${name}"] = self._restorer(back)

    def encode(self, value: Any, around: tuple[int, ...] = ()) -> Any:
        """Return a value as plain JSON.

        A value that contains itself, or is nested too deeply, is stored as its text.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if value.isascii() else _encode_text(value)
        if kind is int:
            return value if -_EXACT <= value <= _EXACT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_name(value)}
        if len(around) > _DEEPEST or id(value) in around:
            return self._by_text(value)
        deeper = (*around, id(value))
        if kind is list:
            if all(type(item) is str and item.isascii() for item in value):
                return list(value)
            return [self.encode(item, deeper) for item in value]
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value) and all(
                map(_is_sound, value)
            ):
                return {key: self.encode(item, deeper) for key, item in value.items()}
            pairs = value.items()
            return {"$dict": [[self.encode(k, deeper), self.encode(v, deeper)] for k, v in pairs]}
        if kind in _ENCODERS:
            tag, encode = _ENCODERS[kind]
            return {tag: encode(value)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: [self.encode(item, deeper) for item in value]}
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return {"$slice": [self.encode(part, deeper) for part in parts]}
        if kind in self._fields:
            fields = self._fields[kind].items()
            content = {
                name: self.encode(item, deeper)
                for name, default in fields
                if not _is_default(item := getattr(value, name), default)
            }
            return {f"${kind.__name__}": content}
        if kind in self._special:
            tag, out = self._special[kind]
            return {tag: self.encode(out(value), deeper)}
        return self._by_text(value)

    def decode(self, data: Any) -> Any:
        """Return the value that plain JSON represents."""
        kind = type(data)
        if kind is list:
            decode = self.decode
            return [decode(item) if type(item) in _NESTED else item for item in data]
        if kind is not dict:
            return data
        for tag in data:
            if tag.startswith("$"):
                if len(data) != 1 or tag not in self._decoders:
                    raise ValueError(f"unknown kind of value, {tag!r}")
                try:
                    return self._decoders[tag](data[tag])
                except (TypeError, LookupError, AttributeError, RuntimeError, struct.error) as e:
                    raise ValueError(f"invalid {tag[1:]}: {e}") from None
        return {
            key: self.decode(item) if type(item) in _NESTED else item for key, item in data.items()
        }

    def write(self, form: Plainer | None, value: Any) -> Any:
        """Return a value as plain JSON, in its form if it has one and the value fits."""
        kind = type(value)
        if value is None or kind is bool or (kind is str and value.isascii()):
            return value if form is None or value is None else {"$other": value}
        if form is not None and kind is form.kind:
            return form.write(self, value)
        data = self.encode(value)
        # What is no object, or null, would be read by the form.
        return data if form is None or data is None or type(data) is dict else {"$other": data}

    def read(self, form: Plainer | None, data: Any) -> Any:
        """Return the value that `write` wrote."""
        kind = type(data)
        if form is None and kind not in _NESTED:
            return data
        if form is None or data is None or (kind is dict and _is_tagged(data)):
            return self.decode(data)
        try:
            return form.read(self, data)
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"invalid {form.kind.__name__}: {error}") from None

    def _record(self, cls: type[Any]) -> Callable[[Any], Any]:
        return lambda content: cls(**{key: self.decode(item) for key, item in content.items()})

    def _restorer(self, back: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda value: back(self.decode(value))

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in _list(pairs)}

    def _remembered(self, content: Any) -> Remembered:
        return Remembered(**{key: self.decode(item) for key, item in content.items()})

    def _by_text(self, value: Any) -> dict[str, Any]:
        if type(value) is Remembered:
            kind, text, plain = value.kind, value.text, value.value
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            text, plain = text_of(value), None
            if isinstance(value, Enum):
                plain = value.value
            for base in (bool, int, float, str, bytes, complex):
                if base in type(value).__mro__:
                    plain = base(value) if plain is None else plain
        content = {"kind": self.encode(kind), "text": self.encode(text)}
        if plain is not None:
            content["value"] = self.encode(plain)
        return {"$object": content}


def text_of(value: Any) -> str:
    """Return the repr of an object, or the name of its class if its repr fails."""
    try:
        return repr(value)
    except Exception:  # whatever the user's class does
        return f"<{type(value).__qualname__}>"


def _is_tagged(data: dict[str, Any]) -> bool:
    return len(data) == 1 and next(iter(data)).startswith("$")


_MISSING = object()


def fields_of(cls: type[Any]) -> dict[str, Any]:
    """Return the default of each field of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(cls):
        return {
            f.name: f.default_factory()
            if f.default_factory is not dataclasses.MISSING
            else (_MISSING if f.default is dataclasses.MISSING else f.default)
            for f in dataclasses.fields(cls)
            if f.init
        }
    names: tuple[str, ...] = cls._fields
    return {name: cls._field_defaults.get(name, _MISSING) for name in names}


def _is_default(value: Any, default: Any) -> bool:
    plain = (type(None), bool, int, str, tuple, list)
    if type(value) is not type(default) or type(value) not in plain:
        return False
    return (not value and not default) if type(value) in (tuple, list) else bool(value == default)


def _is_sound(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _encode_text(text: str) -> Any:
    if _is_sound(text):
        return text
    return {"$text": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}


def _float_name(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    bits = struct.pack(">d", value).hex()
    return "nan" if bits == "7ff8000000000000" else bits


def _float_of(name: str) -> float:
    if name in ("nan", "inf", "-inf"):
        return float(name)
    number: float = struct.unpack(">d", bytes.fromhex(name))[0]
    return number


def _torch(kind: type[Any]) -> Callable[[str], Any]:
    def decode(name: str) -> Any:
        value = getattr(torch, name, None)
        # Another torch may know more than this one.
        return value if isinstance(value, kind) else Remembered(f"torch.{kind.__name__}", name)

    return decode


def _device(name: str) -> Any:
    try:
        return torch.device(name)
    except RuntimeError:
        return Remembered("torch.device", name)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _name_in_torch(value: Any) -> str:
    return str(value).removeprefix("torch.")


_SEQUENCES: dict[type[Any], str] = {
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}
_ENCODERS: dict[type[Any], tuple[str, Callable[[Any], Any]]] = {
    complex: ("$complex", lambda value: struct.pack(">dd", value.real, value.imag).hex()),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    range: ("$range", lambda value: [hex(part) for part in (value.start, value.stop, value.step)]),
    type(...): ("$ellipsis", lambda value: None),
    torch.dtype: ("$dtype", _name_in_torch),
    torch.device: ("$device", str),
    torch.layout: ("$layout", _name_in_torch),
    torch.memory_format: ("$memory_format", _name_in_torch),
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": _float_of,
    "$text": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "$complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "$bytes": lambda text: base64.b64decode(text),
    "$range": lambda parts: range(*(int(part, 16) for part in parts)),
    "$ellipsis": lambda nothing: ...,
    "$dtype": _torch(torch.dtype),
    "$device": _device,
    "$layout": _torch(torch.layout),
    "$memory_format": _torch(torch.memory_format),
}

TUPLE = Plainer(
    tuple,
    lambda codec, value: [codec.encode(item) for item in value],
    lambda codec, data: tuple(map(codec.decode, _list(data))),
)
DTYPE = Plainer(
    torch.dtype,
    lambda codec, value: _name_in_torch(value),
    lambda codec, data: _torch(torch.dtype)(data),
)
DEVICE = Plainer(torch.device, lambda codec, value: str(value), lambda codec, data: _device(data))
