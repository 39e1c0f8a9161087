"""Configurations: lists of callbacks and what they bend, which can be saved to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.parameter import BendingParameter
from bendtrace.interject.bends.spec import BendSpec
from bendtrace.interject.bends.stored import decoded, encoded

__all__ = ["BendingConfig", "read_configs", "write_configs"]

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
        if not isinstance(bend, tuple) or len(bend) < 2 or not isinstance(bend[0], Bend):
            raise InputError(
                "a configuration takes tuples of a bending callback and one or more patterns, "
                f"not {bend!r}"
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
        return encoded(self.bends)

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
        return cls(*decoded(data, parameters or {}))

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
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def read_configs(
    path: str | os.PathLike[str], parameters: Mapping[str, BendingParameter] | None = None
) -> dict[str, BendingConfig]:
    """Read configurations from a JSON file. Parameters with the same name become one object."""
    try:
        with open(path, encoding="utf-8") as file:
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
