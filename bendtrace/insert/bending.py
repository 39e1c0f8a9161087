"""Bending a model: callbacks at activations and weights that are selected by name."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.insert.bend import (
    OPERATORS,
    Bend,
    BendingParameter,
    CallbackChain,
    Operation,
    Value,
    value_of,
)
from bendtrace.insert.bend_callbacks import Capture, DrawingBend, Lambda, required_value
from bendtrace.insert.bend_catalogue import (
    Activation,
    BendHandle,
    BendSpec,
    CallbackInsertions,
    Catalogue,
    Filter,
    Restoring,
    activation_table,
    compile_pattern,
    is_bendable_dtype,
    passes_filter,
    weight_table,
)
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, subclasses_of
from bendtrace.insert.plan import StateTensor
from bendtrace.insert.resolver import Knowledge, describe_where, flat
from bendtrace.insert.where import Where, near_misses
from bendtrace.log.nodes import Text
from bendtrace.log.path_views import Node
from bendtrace.python.checks import required_path
from bendtrace.watch.owners import states_of

if TYPE_CHECKING:
    from bendtrace import bends, module  # `bends` has the public name of `BendingConfig`

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
    by_name = dict(parameters or {})
    found = {}
    for name, config in data.get("configs", {}).items():
        found[name] = BendingConfig.from_dict(config, parameters=by_name)
        by_name.update((parameter.name, parameter) for parameter in found[name].parameters)
    return found


# Bends as plain values: callbacks by class and arguments, parameters by name.

_PACKAGE = __name__.rpartition(".")[0]


def encode_bends(bends: Iterable[BendSpec]) -> dict[str, Any]:
    """Return bends as plain values, ready for JSON.

    Raise `InputError` if a callback is made from a function, or is applied at something that
    cannot be saved.
    """
    writer = _BendWriter()
    listed = [writer.bend(bend) for bend in bends]
    return {"parameters": writer.parameters, "callbacks": writer.callbacks, "bends": listed}


def decode_bends(data: Any, parameters: Mapping[str, BendingParameter]) -> list[BendSpec]:
    """Create bends from a result of `encode_bends`, with parameters for those of the same name.

    Raise `InputError` if the data is invalid, or names an unknown class of callbacks.
    """
    try:
        return list(_BendReader(data, parameters).bends())
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"these are not stored bends: {error!r}") from error


class _BendWriter:
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
        first = self._named.setdefault(parameter.name, parameter)
        if first is not parameter:
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


class _BendReader:
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
    found = {_class_name(cls): cls for cls in subclasses_of(Bend)}  # the latest for each name
    if name not in found:
        raise InputError(
            f"there is no class of callbacks {name!r}; known classes: "
            f"{', '.join(sorted(found))}. Define your own classes before loading"
        )
    return found[name]


# Bending a model: callbacks at activations and weights that are selected by name.


Out: TypeAlias = str | os.PathLike[str] | TextIO | None


class Bending:
    """The bends of one model.

    Args:
        owner: where the callbacks are inserted.
        knowledge: the recorded runs of the model.

    Attributes:
        versions: the versions of the model's weights.
        configs: configurations by name.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> gain = bt.bends.BendingParameter("gain", 2.0)
        >>> _ = bended.bend(bt.bends.Scale(gain), "0$")
        >>> bended.bending.controllables, bended.bending.bended_keys()
        ({'gain': BendingParameter('gain', 2.0)}, ['0'])
        >>> bended.bending.save_config_as("louder")
        >>> bended.bending.reset()
        >>> with bended.bending.set_config("louder"):
        ...     bended(torch.tensor([0.5]))
        tensor([0.7616])
    """

    def __init__(self, owner: module.BendedModule, knowledge: Knowledge) -> None:
        self._owner = owner
        self._catalogue = Catalogue(knowledge)
        self.versions: Versions = Versions(knowledge.model)
        self.configs: dict[str, BendingConfig] = {}
        self._sources = Sources(owner, self._catalogue, self.versions)

    # Bending

    def bend(
        self,
        callback: Bend | BendingConfig | Callable[[Tensor], Any],
        *where: Where,
        weights: bool | None = None,
        activations: bool = True,
        allow_none: bool = False,
    ) -> BendHandle:
        """Bend activations and weights from now on (see `BendedModule.bend`)."""
        if isinstance(callback, BendingConfig):
            if where:
                raise InputError("a configuration already contains its patterns: pass it alone")
            specs = list(callback)
        else:
            specs = [BendSpec(_as_bend(callback), tuple(flat(where)), weights, activations)]
        for spec in specs:
            if not spec.where:
                raise InputError("pass patterns for the names of what to bend")
        specs = [self._catalogue.named(spec) for spec in specs]
        for spec in specs:
            if not allow_none:
                self._catalogue.require_meaning(spec)
        self._require_distinct(specs)
        sources = [CallbackInsertions(spec, allow_none) for spec in specs]
        self._sources.add(sources)
        return BendHandle(sources, self._sources.remove)

    def reset(self, *what: Any) -> None:
        """Stop bending.

        Args:
            *what: callbacks, and names or patterns of bent values; without any, everything.

        Raises:
            InputError: nothing that is bent matches.
        """
        if not what:
            self._sources.set(())
            return
        for source, gone in [drop for item in what for drop in self._dropped(item)]:
            source.without |= gone
        left = tuple(source for source in self._sources if self._keys(source))
        self._sources.set(left)

    def update(self, name: str | None = None, value: Value | None = None) -> None:
        """Set a parameter, or match the patterns again.

        Args:
            name: the name of the parameter; None for none.
            value: its new value.

        Raises:
            InputError: no callback has a parameter of that name, or the value is not in its range.
        """
        if name is None:
            self._sources.renew()
            return
        controllables = self.controllables
        if name not in controllables:
            raise InputError(
                f"no callback has a parameter {name!r}; {near_misses(name, controllables)}"
            )
        if value is None:
            raise InputError(f"pass a value for parameter {name!r}")
        controllables[name].value = value

    @property
    def controllables(self) -> dict[str, BendingParameter]:
        """The parameters of all callbacks, by name."""
        every = (p for source in self._sources for p in source.spec.callback.parameters)
        return {parameter.name: parameter for parameter in every}

    @property
    def callbacks(self) -> list[Bend]:
        """The callbacks, each once."""
        return list(dict.fromkeys(source.spec.callback for source in self._sources))

    def bended_keys(self) -> list[str]:
        """Return the names of everything that is bent: node paths, and names of the state dict."""
        return list(dict.fromkeys(key for source in self._sources for key in self._keys(source)))

    @contextmanager
    def capture(self, *callbacks: Capture) -> Iterator[None]:
        """Make capturing callbacks keep the values they see, within a `with` statement.

        Args:
            *callbacks: which callbacks; without any, all that bend the model.

        Raises:
            InputError: one of them does not capture values of this model.
        """
        with capturing(callbacks, [c for one in self.callbacks for c in _captures(one)]):
            yield

    def _keys(self, source: CallbackInsertions) -> list[str]:
        return self._catalogue.keys(source.spec, source.without)

    def _dropped(self, item: Any) -> list[tuple[CallbackInsertions, frozenset[str]]]:
        """Return the bends to stop."""
        if not isinstance(item, (str, re.Pattern, Bend)):
            raise InputError(f"reset() takes callbacks, names and patterns, not {item!r}")
        names = {found.name: found.names for found in self._catalogue.activations()}
        drops = []
        for source in self._sources:
            keys = self._keys(source)
            if isinstance(item, Bend):
                gone = frozenset(keys if source.spec.callback is item else ())
            else:
                pattern = compile_pattern(item)
                gone = frozenset(
                    key
                    for key in keys
                    if any(n == item or pattern.fullmatch(n) for n in names.get(key, (key,)))
                )
            if gone:
                drops.append((source, gone))
        if not drops:
            keys = self.bended_keys()
            text = item if isinstance(item, str) else getattr(item, "pattern", "")
            hint = f"; {near_misses(text, keys)}" if keys else ""
            raise InputError(f"{item!r} matches nothing that is bent{hint}")
        return drops

    def _require_distinct(self, specs: Iterable[BendSpec]) -> None:
        controllables = self.controllables
        for parameter in (p for spec in specs for p in spec.callback.parameters):
            if controllables.setdefault(parameter.name, parameter) is not parameter:
                raise InputError(
                    f"another parameter already has the name {parameter.name!r}: give each a "
                    "name of its own"
                )

    # Names

    @property
    def weight_names(self) -> list[str]:
        """The names of the parameters, as in the state dict."""
        return list(self._catalogue.parameters())

    def activation_names(self, flt: Filter = None, exclude: Filter = None) -> list[str]:
        """Return the names of the activations: node paths, and names of inputs."""
        return [found.name for found in self.activations(flt, exclude)]

    def activations(self, flt: Filter = None, exclude: Filter = None) -> list[Activation]:
        """Return the known activations.

        Args:
            flt: patterns; a name has to match one of them from its start.
            exclude: patterns that a name must not match.

        Raises:
            InputError: nothing has been traced yet.
        """
        if not self._catalogue.is_traced:
            raise InputError("nothing has been traced yet: call the module or its trace() first")
        return [
            found
            for found in self._catalogue.activations()
            if found.level == "whole"
            and found.shape is not None
            and passes_filter(found.names, flt, exclude)
        ]

    def print_activations(
        self, flt: Filter = None, exclude: Filter = None, out: Out = None
    ) -> Text:
        """Print a table of the activations, and return it.

        Args:
            flt: patterns; a name has to match one of them from its start.
            exclude: patterns that a name must not match.
            out: a file to write the table to instead, or its path.
        """
        return written(activation_table(self.activations(flt, exclude)), out)

    def print_weights(self, flt: Filter = None, exclude: Filter = None, out: Out = None) -> Text:
        """Print a table of the parameters, and return it.

        Args:
            flt: patterns; a name has to match one of them from its start.
            exclude: patterns that a name must not match.
            out: a file to write the table to instead, or its path.
        """
        listed = self._catalogue.parameters().items()
        return written(
            weight_table(item for item in listed if passes_filter((item[0],), flt, exclude)), out
        )

    # Configurations

    def bending_config(self, name: str | None = None) -> BendingConfig:
        """Return the active bends, or those saved under a name, as a configuration.

        Raises:
            InputError: there is no configuration of that name.
        """
        if name is None:
            return BendingConfig(*(source.spec for source in self._sources))
        if name not in self.configs:
            raise InputError(
                f"there is no configuration {name!r}; {near_misses(name, self.configs)}"
            )
        return BendingConfig(*self.configs[name])

    def save_config_as(self, name: str, *, force: bool = False) -> None:
        """Save the active bends under a name.

        Raises:
            InputError: the name is taken, and `force` is not set.
        """
        if name in self.configs and not force:
            raise InputError(f"there is a configuration {name!r} already; force=True replaces it")
        self.configs[name] = self.bending_config()

    def set_config(self, config: str | BendingConfig) -> Restoring:
        """Bend by a configuration, and by nothing else.

        Returns:
            Returns a context manager that restores the earlier bends at its end.
        """
        chosen = self.bending_config(config) if isinstance(config, str) else config
        before = tuple(self._sources)
        self.reset()
        try:
            self.bend(chosen)
        except Exception:
            self._sources.set(before)
            raise
        return Restoring(lambda: self._sources.set(before))

    def save_configs(self, path: str | os.PathLike[str]) -> None:
        """Write all named configurations to a JSON file."""
        write_configs(path, self.configs)

    def load_configs(self, path: str | os.PathLike[str]) -> None:
        """Add the named configurations of a JSON file, replacing those with the same names.

        Parameters of this model's callbacks are reused for parameters of the same name in the file.
        """
        self.configs.update(read_configs(path, self.controllables))

    # Versions of the weights

    @property
    def version(self) -> str:
        """The version of the weights in use; for mixtures, the weight of each version."""
        return str(self.versions)

    def add_version(
        self,
        name: str,
        weights: Mapping[str, Tensor] | nn.Module | None = None,
        *,
        strict: bool = True,
        force: bool = False,
    ) -> None:
        """Save weights as a version under a name. They are copied.

        Args:
            name: the name.
            weights: a state dict, or a module that has one; None saves the weights as they are bent
                now.
            strict: whether all parameters are required.
            force: whether a version of the same name is replaced.

        Raises:
            InputError: these are not weights of this model, or the name is taken.
        """
        if weights is None:
            weights, strict = self.bended_state_dict(), False
        elif isinstance(weights, nn.Module):
            weights = weights.state_dict()
        self.versions.add(name, weights, strict=strict, force=force)
        self._sources.change_version()

    def remove_version(self, name: str) -> None:
        """Remove a version that is not in use."""
        self.versions.remove(name)

    def set_version(self, name: str | None = None) -> Restoring:
        """Use a version of the weights; None for the model's own.

        Returns:
            Returns a context manager that restores the earlier version at its end.
        """
        return self.interpolate_versions({ORIGINAL if name is None else name: 1.0})

    def interpolate_versions(self, mixture: Mapping[str, Any]) -> Restoring:
        """Use a mixture of versions.

        Args:
            mixture: the weight of each version, as a number or a parameter. The model's own weights
                are the version "original". Only the proportions matter.

        Returns:
            Returns a context manager that restores the earlier version at its end.
        """
        before = self.versions.mixture
        self._choose(self.versions.checked(mixture))
        return Restoring(lambda: self._choose(before))

    def _choose(self, mixture: dict[str, Any]) -> None:
        self.versions.mixture = mixture
        self._sources.change_version()

    def bended_state_dict(self) -> dict[str, Tensor]:
        """Return the weights that are bent, or from another version, as a run uses them."""
        own = self._catalogue.states()
        found: dict[str, Tensor] = {}
        steps: list[tuple[Interjection, Iterable[str]]] = [(self.versions, self.versions.needed)]
        for source in self._sources:
            bent = self._catalogue.weights(source.spec, source.without)
            steps.append((source.spec.callback, bent))
        with torch.no_grad():
            for callback, names in steps:
                for name in names:
                    value = found.get(name, own[name])
                    found[name] = callback.after(NodePass(name), Inputs(()), value)
            return {name: value.detach().clone() for name, value in found.items()}

    # Copies of the model

    def _copyable_state(self, memo: dict[int, Any] | None) -> Any:
        """Return the part of the bends' state that a copy of the model needs.

        The memo has the objects copied so far, for a deep copy; None when everything is pickled.
        """
        state = self.versions, self.configs, self._sources.copyable_state()
        if memo is None:
            return state
        for source in self._sources:
            memo.update((id(item), item) for item in source.spec.where if isinstance(item, Node))
        return copy.deepcopy(state, memo)

    def _restore(self, state: Any) -> None:
        """Restore the result of `_copyable_state`, once the insertions of the copy exist again."""
        self.versions, self.configs, sources = state
        self._sources = Sources(self._owner, self._catalogue, self.versions)
        self._sources.restore(sources)


def _as_bend(callback: Any) -> Bend:
    if isinstance(callback, Bend):
        return callback
    if isinstance(callback, (str, type)) or not callable(callback):
        hint = f": make one, {callback.__name__}(...)" if isinstance(callback, type) else ""
        raise InputError(
            f"bend() takes a bending callback or a function of a tensor, not {callback!r}{hint}"
        )
    return Lambda(callback)


def _captures(callback: Bend) -> Iterator[Capture]:
    for inner in getattr(callback, "callbacks", (callback,)):
        if isinstance(inner, Capture):
            yield inner


@contextmanager
def capturing(chosen: Sequence[Capture], found: Sequence[Capture]) -> Iterator[None]:
    """Make the chosen ones of the callbacks that capture keep the values they see, or all."""
    for callback in chosen:
        if all(callback is not other for other in found):
            raise InputError(f"{callback!r} does not capture anything of this model")
    with ExitStack() as stack:
        for callback in chosen or found:
            stack.enter_context(callback.capture())
        yield


def written(text: Text, out: Out) -> Text:
    """Print a text, or write it to a file, and return it."""
    if out is None:
        print(text)
    elif hasattr(out, "write"):
        out.write(f"{text}\n")
    else:
        with open(out, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    return text


# The insertions of the bends of a model, in the order in which the bends were made.


class Sources:
    """The bends of one model, and their insertions.

    A version of the weights comes first, so that bends apply to the weights of any version.
    """

    def __init__(
        self, owner: module.BendedModule, catalogue: Catalogue, versions: Versions
    ) -> None:
        self._owner = owner
        self._catalogue = catalogue
        self._versions = versions
        self._version: Insertion | None = None
        self._needed: tuple[str, ...] = ()
        self._sources: tuple[CallbackInsertions, ...] = ()

    def __iter__(self) -> Iterator[CallbackInsertions]:
        return iter(self._sources)

    def copyable_state(self) -> Any:
        """Return the part of their state that a copy of the model needs."""
        numbers = {id(made): number for number, made in enumerate(self._owner.insertions)}
        version = None if self._version is None else numbers[id(self._version)]
        rows = [
            (
                source.spec, source.allow_none, source.without,
                [numbers[id(made)] for made in source.insertions],
            )
            for source in self._sources
        ]  # fmt: skip
        return version, self._needed, rows

    def restore(self, state: Any) -> None:
        """Restore the result of `copyable_state`, if the same insertions exist."""
        version, self._needed, rows = state
        every = self._owner.insertions
        self._version = None if version is None else every[version]
        sources = []
        for spec, allow_none, without, numbers in rows:
            source = CallbackInsertions(spec, allow_none)
            source.without = without
            source.insertions = tuple(every[number] for number in numbers)
            sources.append(source)
        self._sources = tuple(sources)

    def add(self, sources: list[CallbackInsertions]) -> None:
        """Add bends: all of them, or none if one fails."""
        try:
            for source in sources:
                self._place(source)
        except Exception:
            for source in sources:
                source.lift()
            raise
        self._sources = (*self._sources, *sources)

    def remove(self, source: CallbackInsertions) -> None:
        """Remove one bend."""
        source.lift()
        self._sources = tuple(other for other in self._sources if other is not source)

    def set(self, sources: tuple[CallbackInsertions, ...]) -> None:
        """Use these bends, and no others."""
        for source in self._sources:
            source.lift()
        self._sources = sources
        self.renew()

    def renew(self) -> None:
        """Remove and insert everything again."""
        for source in self._sources:
            source.lift()
        if self._version is not None:
            self._version.remove()
        needed, self._version = self._versions.needed, None
        if needed:
            tensors: Any = [*map(StateTensor, needed)]
            self._version = self._owner.interject(tensors, self._versions)
        self._needed = needed
        for source in self._sources:
            self._place(source)

    def change_version(self) -> None:
        """Insert the version of the weights in use."""
        if self._versions.needed != self._needed:
            self.renew()

    def where(self, spec: BendSpec, without: frozenset[str] = frozenset()) -> list[Any]:
        """Return where the patterns of a bend apply."""
        selector = self._catalogue.selector(spec, without)
        found: list[Any] = [] if selector is None else [selector]
        found += self._catalogue.inputs(spec, without)
        return found + [StateTensor(name) for name in self._catalogue.weights(spec, without)]

    def _place(self, source: CallbackInsertions) -> None:
        spec, owner = source.spec, self._owner
        insertions = []
        named = self.where(spec, source.without)
        others = [item for item in spec.others if describe_where(item) not in source.without]
        if others:
            made = owner.interject(others, spec.callback, allow_none=source.allow_none)
            insertions.append(made)
        if named:  # it is known that they match something, or may
            insertions.append(owner.interject(named, spec.callback, allow_none=True))
        source.insertions = tuple(insertions)


# Versions of a model's weights, and mixtures of them.

ORIGINAL = "original"


class Versions(Interjection):
    """Named sets of weights that replace those of a model.

    As an interjection at parameters and buffers it returns the weights of the version in use. It
    never writes to the model's own weights.

    Args:
        model: the model.

    Attributes:
        mixture: the weight of each version. The version "original" is the model itself.
    """

    self_contained = True

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._weights: dict[str, dict[str, Tensor]] = {}
        self.mixture: dict[str, Any] = {ORIGINAL: 1.0}

    @property
    def label(self) -> str:
        """The name in reports and graphs."""
        return f"version {self}"

    def __repr__(self) -> str:
        if len(self.mixture) == 1:
            return next(iter(self.mixture))
        return " + ".join(f"{weight!r} * {name}" for name, weight in self.mixture.items())

    __str__ = __repr__

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all versions, the model's own first."""
        return ORIGINAL, *self._weights

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of weights in which the version in use may differ from the model."""
        found: dict[str, None] = {}
        for name in self.mixture:
            found.update(dict.fromkeys(self._weights.get(name, ())))
        return tuple(found)

    def __contains__(self, name: object) -> bool:
        return name == ORIGINAL or name in self._weights

    def weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights that are stored for a version."""
        self._require(name)
        return dict(self._weights.get(name, {}))

    def add(self, name: str, weights: Mapping[str, Tensor], *, strict: bool, force: bool) -> None:
        """Save copies of weights, some or all of a state dict of the model, under a name.

        With `strict`, all parameters are required; with `force`, a version of that name may be
        replaced. Raise `InputError` if the weights are not those of the model, or the name is
        taken.
        """
        if not isinstance(name, str) or not name or name == ORIGINAL:
            raise InputError(f"a version cannot be called {name!r}: {ORIGINAL!r} is the model's")
        if name in self._weights and not force:
            raise InputError(f"there is a version {name!r} already; force=True replaces it")
        own = dict(states_of(self._model))
        for key, tensor in weights.items():
            if key not in own:
                raise InputError(
                    f"version {name!r}: the model has no {key!r}; {near_misses(key, own)}"
                )
            if tensor.shape != own[key].shape:
                raise InputError(
                    f"version {name!r}: {key!r} has shape {tuple(tensor.shape)}, but shape "
                    f"{tuple(own[key].shape)} in the model"
                )
        missing = [
            key
            for key, tensor in own.items()
            if isinstance(tensor, nn.Parameter) and key not in weights
        ]
        if strict and missing:
            raise InputError(
                f"version {name!r} lacks "
                f"{', '.join(map(repr, missing[:5]))}{', ...' if len(missing) > 5 else ''}; with "
                "strict=False it uses the model's"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._weights[name] = {
                key: tensor.detach().clone()
                for key, tensor in weights.items()
                if is_bendable_dtype(tensor.dtype)
            }

    def remove(self, name: str) -> None:
        """Remove a version. Raise `InputError` if the version does not exist, or is in use."""
        self._require(name)
        if name == ORIGINAL or name in self.mixture:
            raise InputError(f"version {name!r} is in use: set another one first")
        del self._weights[name]

    def checked(self, mixture: Mapping[str, Any]) -> dict[str, Any]:
        """Return a validated mixture.

        Raise `InputError` if a version does not exist, or its weight is not a number.
        """
        if not mixture:
            raise InputError("a mixture needs at least one version")
        for name, weight in mixture.items():
            self._require(name)
            required_value(f"the weight of version {name!r}", weight)
        _shares(mixture)
        return dict(mixture)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Return the weight of the version in use."""
        weights = {name: self._stored_weight(name, at.path, output) for name in self.mixture}
        if len(weights) == 1:
            return next(iter(weights.values()))
        mixed: Any = None
        for name, share in _shares(self.mixture).items():
            part = weights[name] * share
            mixed = part if mixed is None else mixed + part
        return mixed

    def _stored_weight(self, version: str, name: str, own: Tensor) -> Tensor:
        weights = self._weights.get(version, {})
        tensor = weights.get(name)
        if tensor is None:
            return own
        if tensor.device != own.device or tensor.dtype != own.dtype:
            with torch.inference_mode(False), torch.no_grad():
                tensor = weights[name] = tensor.to(own.device, own.dtype)
        return tensor

    def _require(self, name: str) -> None:
        if name not in self:
            raise InputError(f"there is no version {name!r}; {near_misses(str(name), self.names)}")


def _shares(mixture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weight of each version; the sum is one."""
    values: dict[str, Any] = {name: value_of(weight) for name, weight in mixture.items()}
    total = sum(values.values())
    if not total:
        raise InputError(f"the weights of versions add up to {total!r}: {dict(mixture)!r}")
    return {name: value / total for name, value in values.items()}


def bend(
    bended: module.BendedModule[Any],
    /,
    callback: Bend | bends.BendingConfig | Callable[[Tensor], Any],
    *where: Where,
    weights: bool | None = None,
    activations: bool = True,
    allow_none: bool = False,
) -> BendHandle:
    """Bend activations and weights from now on.

    Args:
        bended: the model.
        callback: a bending callback, a function of a tensor, or a `BendingConfig` alone.
        *where: patterns for names. A pattern for activations (see `print_activations`) matches
            from the start of the name; a pattern for weights has to match in full, including
            the last part (`conv.weight`, `.*bias`). Everything else that `interject` accepts is
            accepted, too.
        weights: whether patterns apply to weights: None for the weights that they match in
            full, True also for the parameters that they match from the start, False for no
            weights.
        activations: whether patterns apply to activations.
        allow_none: whether to accept that nothing has such a name so far.

    Returns:
        A handle, which is also a context manager: `remove()`, `report()`.

    Raises:
        InputError: nothing has such a name, or an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        >>> x = torch.ones(1, 2)
        >>> before = bended(x)
        >>> handle = bended.bend(bt.bends.Bias(1.0), "0$")
        >>> torch.equal(bended(x), before + 1)
        True
        >>> bended.reset()
        >>> torch.equal(bended(x), before)
        True
    """
    return bended._bending.bend(
        callback, *where, weights=weights, activations=activations, allow_none=allow_none
    )


def activation_names(
    bended: module.BendedModule[Any], flt: Filter = None, exclude: Filter = None
) -> list[str]:
    """Return the names of the activations that the patterns of `bend` are matched against.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> bended = bt.BendedModule(model)
        >>> _ = bended(torch.ones(1, 2))
        >>> bended.activation_names()
        ['input', 'sub_0', 'sub_1']
        >>> bended.activation_names(flt="1")
        ['sub_1']
    """
    return bended._bending.activation_names(flt, exclude)


def print_activations(
    bended: module.BendedModule[Any], flt: Filter = None, exclude: Filter = None, out: Out = None
) -> Text:
    """Print a table of the activations, and return it (see `Bending.print_activations`).

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> bended = bt.BendedModule(model)
        >>> _ = bended(torch.ones(1, 2))
        >>> _ = bended.print_activations()
        -----  -----------  ------------------
        input  placeholder  torch.Size([1, 2])
        sub_0  call_module  torch.Size([1, 3])
        sub_1  call_module  torch.Size([1, 3])
        -----  -----------  ------------------
    """
    return bended._bending.print_activations(flt, exclude, out)


def print_weights(
    bended: module.BendedModule[Any], flt: Filter = None, exclude: Filter = None, out: Out = None
) -> Text:
    """Print a table of the parameters, and return it (see `Bending.print_weights`).

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.LayerNorm(2)))
        >>> _ = bended.print_weights()
        name      shape            dtype            min    max    mean    stddev
        --------  ---------------  -------------  -----  -----  ------  --------
        0.weight  torch.Size([2])  torch.float32      1      1       1         0
        0.bias    torch.Size([2])  torch.float32      0      0       0         0
    """
    return bended._bending.print_weights(flt, exclude, out)
