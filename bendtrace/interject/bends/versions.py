"""Versions of a model's weights, and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.interject.bends.callbacks import checked
from bendtrace.interject.bends.catalogue import is_bendable_dtype, near
from bendtrace.interject.bends.parameter import value_of
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.torch_rules.owners import states_of

__all__ = ["ORIGINAL", "Versions"]

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
            checked(f"the weight of version {name!r}", weight)
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
