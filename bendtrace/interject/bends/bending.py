"""Bending a model: callbacks at activations and weights that are selected by name."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TextIO, TypeAlias

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.interject.bends.bend import Bend, BendingParameter, Value, value_of
from bendtrace.interject.bends.callbacks import Capture, Lambda, required_value
from bendtrace.interject.bends.catalogue import (
    Activation,
    BendHandle,
    BendSpec,
    Catalogue,
    Filter,
    Restoring,
    Source,
    activation_table,
    compile_pattern,
    is_bendable_dtype,
    kept,
    near,
    weight_table,
)
from bendtrace.interject.bends.config import BendingConfig, read_configs, write_configs
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.knowledge import Knowledge
from bendtrace.interject.plan import State
from bendtrace.interject.resolver import describe_where, flat
from bendtrace.interject.where import Where
from bendtrace.paths.nodes import Text
from bendtrace.paths.view import Node
from bendtrace.torch_rules.owners import states_of

Out: TypeAlias = str | os.PathLike[str] | TextIO | None


class Bending:
    """The bends of one model.

    Args:
        owner: where the callbacks are inserted.
        known: the recorded runs of the model.

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

    def __init__(self, owner: Owner, known: Knowledge) -> None:
        self._owner = owner
        self._catalogue = Catalogue(known)
        self.versions: Versions = Versions(known.model)
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
        sources = [Source(spec, allow_none) for spec in specs]
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
        known = self.controllables
        if name not in known:
            raise InputError(f"no callback has a parameter {name!r}; {near(name, known)}")
        if value is None:
            raise InputError(f"pass a value for parameter {name!r}")
        known[name].value = value

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
        found = [c for callback in self.callbacks for c in _captures(callback)]
        for callback in callbacks:
            if all(callback is not other for other in found):
                raise InputError(f"{callback!r} does not capture anything of this model")
        with ExitStack() as stack:
            for callback in callbacks or found:
                stack.enter_context(callback.capture())
            yield

    def _keys(self, source: Source) -> list[str]:
        return self._catalogue.keys(source.spec, source.without)

    def _dropped(self, item: Any) -> list[tuple[Source, frozenset[str]]]:
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
            hint = f"; {near(text, keys)}" if keys else ""
            raise InputError(f"{item!r} matches nothing that is bent{hint}")
        return drops

    def _require_distinct(self, specs: Iterable[BendSpec]) -> None:
        known = self.controllables
        for parameter in (p for spec in specs for p in spec.callback.parameters):
            if known.setdefault(parameter.name, parameter) is not parameter:
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
            and kept(found.names, flt, exclude)
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
        return written(weight_table(item for item in listed if kept((item[0],), flt, exclude)), out)

    # Configurations

    def bending_config(self, name: str | None = None) -> BendingConfig:
        """Return the active bends, or those saved under a name, as a configuration.

        Raises:
            InputError: there is no configuration of that name.
        """
        if name is None:
            return BendingConfig(*(source.spec for source in self._sources))
        if name not in self.configs:
            raise InputError(f"there is no configuration {name!r}; {near(name, self.configs)}")
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

    def _kept(self, memo: dict[int, Any] | None) -> Any:
        """Return the part of the bends' state that a copy of the model needs.

        Args:
            memo: the objects copied so far, for a deep copy; None when everything is pickled.
        """
        state = self.versions, self.configs, self._sources.kept()
        if memo is None:
            return state
        for source in self._sources:
            memo.update((id(item), item) for item in source.spec.where if isinstance(item, Node))
        return copy.deepcopy(state, memo)

    def _restore(self, kept: Any) -> None:
        """Restore the result of `kept`, once the insertions of the copy exist again."""
        self.versions, self.configs, sources = kept
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


class Owner(Protocol):
    """A model that accepts insertions."""

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """All active insertions."""

    def interject(self, where: Any, what: Any, *, allow_none: bool = False) -> Insertion:
        """Insert something."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""


class Sources:
    """The bends of one model, and their insertions.

    A version of the weights comes first, so that bends apply to the weights of any version.

    Args:
        owner: where they are inserted.
        catalogue: the values that can be bent.
        versions: the versions of the weights.
    """

    def __init__(self, owner: Owner, catalogue: Catalogue, versions: Versions) -> None:
        self._owner = owner
        self._catalogue = catalogue
        self._versions = versions
        self._version: Insertion | None = None
        self._held: tuple[str, ...] = ()
        self._sources: tuple[Source, ...] = ()

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def kept(self) -> Any:
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
        return version, self._held, rows

    def restore(self, kept: Any) -> None:
        """Restore the result of `kept`, if the same insertions exist."""
        version, self._held, rows = kept
        every = self._owner.insertions
        self._version = None if version is None else every[version]
        sources = []
        for spec, allow_none, without, numbers in rows:
            source = Source(spec, allow_none)
            source.without = without
            source.insertions = tuple(every[number] for number in numbers)
            sources.append(source)
        self._sources = tuple(sources)

    def add(self, sources: list[Source]) -> None:
        """Add bends: all of them, or none if one fails."""
        try:
            for source in sources:
                self._place(source)
        except Exception:
            for source in sources:
                source.lift()
            raise
        self._sources = (*self._sources, *sources)

    def remove(self, source: Source) -> None:
        """Remove one bend."""
        source.lift()
        self._sources = tuple(other for other in self._sources if other is not source)

    def set(self, sources: tuple[Source, ...]) -> None:
        """Use these bends, and no others."""
        for source in self._sources:
            source.lift()
        self._sources = sources
        self.renew()

    def renew(self) -> None:
        """Insert everything anew."""
        for source in self._sources:
            source.lift()
        if self._version is not None:
            self._version.remove()
        needed, self._version = self._versions.needed, None
        if needed:
            self._version = self._owner.interject(list(map(State, needed)), self._versions)
        self._held = needed
        for source in self._sources:
            self._place(source)

    def change_version(self) -> None:
        """Insert the version of the weights in use."""
        if self._versions.needed != self._held:
            self.renew()

    def where(self, spec: BendSpec, without: frozenset[str] = frozenset()) -> list[Any]:
        """Return where the patterns of a bend apply."""
        selector = self._catalogue.selector(spec, without)
        found: list[Any] = [] if selector is None else [selector]
        found += self._catalogue.inputs(spec, without)
        return found + [State(name) for name in self._catalogue.weights(spec, without)]

    def _place(self, source: Source) -> None:
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
        """The names of all versions, that of the model first."""
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
        """Save copies of weights under a name.

        Args:
            name: the name.
            weights: some or all of a state dict of the model.
            strict: whether all parameters are required.
            force: whether a version of that name may be replaced.

        Raises:
            InputError: the weights are not those of the model, or the name is taken.
        """
        if not isinstance(name, str) or not name or name == ORIGINAL:
            raise InputError(f"a version cannot be called {name!r}: {ORIGINAL!r} is the model's")
        if name in self._weights and not force:
            raise InputError(f"there is a version {name!r} already; force=True replaces it")
        own = dict(states_of(self._model))
        for key, tensor in weights.items():
            if key not in own:
                raise InputError(f"version {name!r}: the model has no {key!r}; {near(key, own)}")
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
        """Remove a version.

        Raises:
            InputError: the version does not exist, or is in use.
        """
        self._require(name)
        if name == ORIGINAL or name in self.mixture:
            raise InputError(f"version {name!r} is in use: set another one first")
        del self._weights[name]

    def checked(self, mixture: Mapping[str, Any]) -> dict[str, Any]:
        """Return a validated mixture.

        Raises:
            InputError: a version does not exist, or its weight is not a number.
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
        held = {name: self._held(name, at.path, output) for name in self.mixture}
        if len(held) == 1:
            return next(iter(held.values()))
        mixed: Any = None
        for name, share in _shares(self.mixture).items():
            part = held[name] * share
            mixed = part if mixed is None else mixed + part
        return mixed

    def _held(self, version: str, name: str, own: Tensor) -> Tensor:
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
            raise InputError(f"there is no version {name!r}; {near(str(name), self.names)}")


def _shares(mixture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weight of each version; the sum is one."""
    values: dict[str, Any] = {name: value_of(weight) for name, weight in mixture.items()}
    total = sum(values.values())
    if not total:
        raise InputError(f"the weights of versions add up to {total!r}: {dict(mixture)!r}")
    return {name: value / total for name, value in values.items()}
