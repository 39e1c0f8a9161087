"""Configurations: lists of callbacks and what they bend, which can be saved to a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace._checks import required_path
from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import (
    OPERATORS,
    Bend,
    BendingParameter,
    CallbackChain,
    Operation,
)
from bendtrace.interject.bends.callbacks import DrawingBend
from bendtrace.interject.bends.catalogue import BendSpec

_FORMAT = "bendtrace bends"
_VERSION = 1


class BendingConfig:
    r"""The callbacks that bend a model, and what each of them bends, in order.

    Args:
        *bends: tuples of a callback and one or more patterns.

    Example:
        >>> import bendtrace as bt
        >>> bt.bends.BendingConfig(
        ...     (bt.bends.Scale(2.0), r"conv\d$"), (bt.bends.Bias(1.0), "linear.weight")
        ... )
        BendingConfig(
          (Scale(scale=2.0), 'conv\\d$'),
          (Bias(bias=1.0), 'linear.weight'),
        )
    """

    def __init__(self, *bends: Any) -> None:
        self.bends: list[BendSpec] = []
        self.extend(bends)

    def append(self, bend: Any) -> None:
        """Add a tuple of a callback and patterns.

        Raises:
            InputError: it is not such a tuple.
        """
        if isinstance(bend, BendSpec):
            self.bends.append(bend)
            return
        if (
            not isinstance(bend, tuple)
            or len(bend) < 2
            or not isinstance(bend[0], Bend)
            or any(where is None or isinstance(where, (bool, int, float)) for where in bend[1:])
        ):
            raise InputError(
                "a configuration takes tuples of a bending callback, such as Lambda(function), and "
                f"one or more patterns, not {bend!r}"
            )
        self.bends.append(BendSpec(bend[0], bend[1:]))

    def extend(self, bends: Iterable[Any]) -> None:
        """Add several tuples."""
        for bend in bends:
            self.append(bend)

    @property
    def parameters(self) -> list[BendingParameter]:
        """The parameters of all callbacks, each once."""
        return list(dict.fromkeys(p for bend in self.bends for p in bend.callback.parameters))

    def __iter__(self) -> Iterator[BendSpec]:
        return iter(self.bends)

    def __len__(self) -> int:
        return len(self.bends)

    def __add__(self, other: Any) -> Self:
        if not isinstance(other, BendingConfig):
            return NotImplemented
        return type(self)(*self.bends, *other.bends)

    def __eq__(self, other: object) -> bool:
        """Return whether it bends the same by the same numbers, as after saving and loading."""
        if not isinstance(other, BendingConfig):
            return NotImplemented
        if self.bends == other.bends:
            return True
        try:
            return self.to_dict() == other.to_dict()
        except InputError:  # of a function, nobody can say what it does
            return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self.bends:
            return "BendingConfig()"
        lines = []
        for bend in self.bends:
            shown = ", ".join(map(repr, (bend.callback, *bend.where)))
            options = [] if bend.weights is None else [f"weights={bend.weights}"]
            options += [] if bend.activations else ["activations=False"]
            lines.append(f"  ({', '.join([shown, *options])}),\n")
        return f"BendingConfig(\n{''.join(lines)})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON.

        Raises:
            InputError: a callback is made from a function, or is applied at something that cannot
                be saved.
        """
        return encode_bends(self.bends)

    @classmethod
    def from_dict(
        cls, data: Any, *, parameters: Mapping[str, BendingParameter] | None = None
    ) -> BendingConfig:
        """Create a configuration from a result of `to_dict`.

        Args:
            data: the plain values.
            parameters: parameters to use instead of those of the same name.

        Raises:
            InputError: the data is invalid, or names an unknown class of callbacks.
        """
        return cls(*decode_bends(data, parameters or {}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file.

        Callbacks are saved as their class and arguments. Those that draw random numbers draw the
        same after loading, with or without a seed. Functions cannot be saved.
        """
        write_configs(path, {"": self})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        parameters: Mapping[str, BendingParameter] | None = None,
    ) -> BendingConfig:
        """Read it from a JSON file. No code in the file is run.

        Args:
            path: the file.
            parameters: parameters to use instead of those of the same name.
        """
        found = read_configs(path, parameters)
        if set(found) != {""}:
            raise InputError(
                f"{os.fspath(path)!r} holds the named configurations "
                f"{', '.join(map(repr, found))}: use load_configs()"
            )
        return found[""]


def write_configs(path: str | os.PathLike[str], configs: Mapping[str, BendingConfig]) -> None:
    """Write configurations to a JSON file, under their names."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "configs": {name: config.to_dict() for name, config in configs.items()},
    }
    text = json.dumps(data, indent=2)
    with open(required_path("the file of a configuration", path), "w", encoding="utf-8") as file:
        file.write(text + "\n")


def read_configs(
    path: str | os.PathLike[str], parameters: Mapping[str, BendingParameter] | None = None
) -> dict[str, BendingConfig]:
    """Read configurations from a JSON file. Parameters with the same name become one object."""
    try:
        with open(required_path("the file of a configuration", path), encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read bends from {os.fspath(path)!r}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise InputError(f"{os.fspath(path)!r} contains no bends")
    if data.get("version") != _VERSION:
        raise InputError(
            f"{os.fspath(path)!r} has version {data.get('version')!r}, but only version "
            f"{_VERSION} can be read"
        )
    known = dict(parameters or {})
    found = {}
    for name, config in data.get("configs", {}).items():
        found[name] = BendingConfig.from_dict(config, parameters=known)
        known.update((parameter.name, parameter) for parameter in found[name].parameters)
    return found


# Bends as plain values: callbacks by class and arguments, parameters by name.

_PACKAGE = __name__.rpartition(".")[0]


def encode_bends(bends: Iterable[BendSpec]) -> dict[str, Any]:
    """Return bends as plain values, ready for JSON.

    Raises:
        InputError: a callback is made from a function, or is applied at something that cannot be
            saved.
    """
    writer = _Writer()
    listed = [writer.bend(bend) for bend in bends]
    return {"parameters": writer.parameters, "callbacks": writer.callbacks, "bends": listed}


def decode_bends(data: Any, parameters: Mapping[str, BendingParameter]) -> list[BendSpec]:
    """Create bends from a result of `encode_bends`.

    Args:
        data: the plain values.
        parameters: parameters to use instead of those of the same name.

    Raises:
        InputError: the data is invalid, or names an unknown class of callbacks.
    """
    try:
        return list(_Reader(data, parameters).bends())
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"these are not stored bends: {error!r}") from error


class _Writer:
    """Writes callbacks and parameters, each once."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.callbacks: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._named: dict[str, BendingParameter] = {}

    def bend(self, bend: BendSpec) -> dict[str, Any]:
        for where in bend.where:
            if not isinstance(where, (str, re.Pattern)):
                raise InputError(
                    f"only bends with patterns can be saved to a file, not one at {where!r}"
                )
        data: dict[str, Any] = {
            "callback": self.callback(bend.callback),
            "where": [_pattern(where) for where in bend.where],
        }
        if bend.weights is not None:
            data["weights"] = bend.weights
        if not bend.activations:
            data["activations"] = False
        return data

    def callback(self, callback: Bend) -> int:
        number = self._numbers.get(id(callback))
        if number is None:
            if isinstance(callback, CallbackChain):
                data: Any = {"chain": [self.callback(inner) for inner in callback.callbacks]}
            else:
                name = _class_name(type(callback))
                arguments = {
                    key: self.value(value, f"{key} of {name}")
                    for key, value in callback.arguments.items()
                }
                data = {"class": name, "arguments": arguments}
                if isinstance(callback, DrawingBend) and callback.seed is None:
                    data["entropy"] = callback.entropy.hex()  # which has the part of a seed
            self.callbacks.append(data)
            number = self._numbers[id(callback)] = len(self.callbacks) - 1
        return number

    def value(self, value: Any, what: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [self.value(item, what) for item in value]
        if isinstance(value, complex):
            return {"$complex": [value.real, value.imag]}
        if isinstance(value, BendingParameter):
            return {"$parameter": self._parameter(value, what)}
        if isinstance(value, Operation):
            operands = [self.value(operand, what) for operand in value.operands]
            return {"$operation": [value.name, *operands]}
        if isinstance(value, Tensor):
            plain = value.detach().cpu()
            numbers = torch.view_as_real(plain) if plain.is_complex() else plain
            dtype = str(plain.dtype).removeprefix("torch.")
            return {"$tensor": numbers.tolist(), "dtype": dtype}
        raise InputError(
            f"{what} is {value!r}, which cannot be saved to a file; define a subclass of Bend "
            "instead of passing a function"
        )

    def _parameter(self, parameter: BendingParameter, what: str) -> str:
        known = self._named.setdefault(parameter.name, parameter)
        if known is not parameter:
            raise InputError(f"there are two parameters named {parameter.name!r}")
        if parameter.name not in self.parameters:
            data = {"value": self.value(parameter.value, what)}
            if parameter.range != (None, None):
                data["range"] = [self.value(bound, what) for bound in parameter.range]
            if parameter.clamp:
                data["clamp"] = True
            self.parameters[parameter.name] = data
        return parameter.name


def _pattern(where: str | re.Pattern[str]) -> str:
    if isinstance(where, str):
        return where
    flags = where.flags & ~re.UNICODE
    letters = "".join(
        letter
        for letter, flag in (("a", re.A), ("i", re.I), ("m", re.M), ("s", re.S), ("x", re.X))
        if flags & flag
    )
    return f"(?{letters}:{where.pattern})" if letters else where.pattern


class _Reader:
    """Creates callbacks and parameters from a writer's output."""

    def __init__(self, data: Any, parameters: Mapping[str, BendingParameter]) -> None:
        self._data = data
        self._parameters = dict(parameters)
        self._callbacks: dict[int, Bend] = {}

    def bends(self) -> Iterator[BendSpec]:
        for bend in self._data["bends"]:
            yield BendSpec(
                self._callback(bend["callback"]), tuple(map(str, bend["where"])),
                bend.get("weights"), bend.get("activations", True),
            )  # fmt: skip

    def _callback(self, number: int) -> Bend:
        made = self._callbacks.get(number)
        if made is None:
            data = self._data["callbacks"][number]
            if "chain" in data:
                made = CallbackChain(*map(self._callback, data["chain"]))
            else:
                arguments = {key: self._value(v) for key, v in data["arguments"].items()}
                made = _class_named(data["class"])(**arguments)
                if isinstance(made, DrawingBend) and "entropy" in data:
                    made.entropy = bytes.fromhex(data["entropy"])
            self._callbacks[number] = made
        return made

    def _value(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(map(self._value, data))
        if not isinstance(data, dict):
            return data
        if "$complex" in data:
            return complex(*data["$complex"])
        if "$parameter" in data:
            return self._parameter(data["$parameter"])
        if "$operation" in data:
            name, *operands = data["$operation"]
            return Operation(name if name in OPERATORS else "", tuple(map(self._value, operands)))
        dtype = getattr(torch, data["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"{data['dtype']!r} is not a dtype")
        if dtype.is_complex:
            return torch.view_as_complex(torch.tensor(data["$tensor"])).to(dtype)
        return torch.tensor(data["$tensor"], dtype=dtype)

    def _parameter(self, name: str) -> BendingParameter:
        made = self._parameters.get(name)
        if made is None:
            data = self._data["parameters"][name]
            bounds: Any = data.get("range")
            made = self._parameters[name] = BendingParameter(
                name, self._value(data["value"]), range=bounds, clamp=data.get("clamp", False)
            )
        return made


def _class_name(cls: type[Bend]) -> str:
    """Return the stored name of a class: its name, with the module for user classes."""
    own = cls.__module__.startswith(_PACKAGE)
    return cls.__qualname__ if own else f"{cls.__module__}:{cls.__qualname__}"


def _class_named(name: str) -> type[Bend]:
    # Only existing classes are used: no file can cause an import.
    found = {_class_name(cls): cls for cls in _subclasses(Bend)}  # the latest for each name
    if name not in found:
        raise InputError(
            f"there is no class of callbacks {name!r}; known classes: "
            f"{', '.join(sorted(found))}. Define your own classes before loading"
        )
    return found[name]


def _subclasses(cls: type[Bend]) -> Iterator[type[Bend]]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)
