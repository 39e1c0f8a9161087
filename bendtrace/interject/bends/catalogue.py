"""What there is to bend in a model, and what of it is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.interject.bends.activations import Activation, inputs_in, modules_of, of_candidate
from bendtrace.interject.bends.names import (
    NamedActivations,
    leaves_of,
    near,
    states_of,
    weights_named,
)
from bendtrace.interject.bends.spec import BendSpec
from bendtrace.interject.where import describe_where
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.naming import Registry
from bendtrace.paths.nodes import NodePath
from bendtrace.recording.recorder import Recording
from bendtrace.run import Run

__all__ = ["Catalogue", "Known"]

_NOTHING = frozenset[str]()


class Known(Protocol):
    """What is known of a model."""

    @property
    def model(self) -> Callable[..., Any]:
        """The model itself."""

    @property
    def registry(self) -> Registry:
        """Gives the names of its nodes."""

    def recordings(self) -> list[Recording]:
        """Return all runs, those without insertions first."""

    def run(self, recording: Recording) -> Run:
        """Return the views of a run."""


class Catalogue:
    """The activations and weights of a model.

    Args:
        known: what is known of the model.
    """

    def __init__(self, known: Known) -> None:
        self._known = known

    @property
    def model(self) -> Callable[..., Any]:
        """The model."""
        return self._known.model

    @property
    def is_traced(self) -> bool:
        """Whether any run is known."""
        return bool(self._known.recordings())

    def states(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, by all their names."""
        return dict(states_of(self.model))

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters, by all their names."""
        return {k: v for k, v in states_of(self.model) if isinstance(v, nn.Parameter)}

    def activations(self) -> list[Activation]:
        """Return the inputs and nodes of all runs, and the modules that no run has come by."""
        leaves = leaves_of(self.model)
        nodes: dict[str, Candidate] = {}
        inputs: dict[str, Activation] = {}
        for recording in self._known.recordings():
            for node in self._known.run(recording).candidates:
                nodes.setdefault(node.path, node)
            for given in inputs_in(recording, self._known.registry):
                inputs.setdefault(given.name, given)
        found = list(inputs.values())
        found += [a for node in nodes.values() if (a := of_candidate(node, leaves)) is not None]
        called = {node.module_path for node in nodes.values() if node.is_module}
        return found + [a for a in modules_of(self.model, leaves) if a.name not in called]

    def selector(self, spec: BendSpec, without: frozenset[str]) -> NamedActivations | None:
        """Return what selects the activations that are meant; None if only weights are.

        Patterns of which nothing is known yet may mean activations that are still to come.
        """
        if not spec.activations:
            return None
        seen = self.activations()
        named = tuple(
            pattern
            for pattern in spec.patterns
            if _means(pattern, seen) or not weights_named(self.model, (pattern,), spec.weights)
        )
        return NamedActivations(named, leaves_of(self.model), without) if named else None

    def inputs(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[NodePath]:
        """Return the inputs that are meant."""
        return [NodePath(a.name) for a in self._meant(spec, without) if a.op == "placeholder"]

    def weights(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[str]:
        """Return the parameters and buffers that are meant."""
        found = weights_named(self.model, spec.patterns, spec.weights)
        return [name for name in found if name not in without]

    def keys(self, spec: BendSpec, without: frozenset[str] = _NOTHING) -> list[str]:
        """Return the names of all that is meant."""
        found = [a.name for a in self._meant(spec, without)]
        found += [name for name in map(describe_where, spec.others) if name not in without]
        return found + self.weights(spec, without)

    def _meant(self, spec: BendSpec, without: frozenset[str]) -> list[Activation]:
        selector = self.selector(spec, without)
        return [
            found
            for found in self.activations()
            if selector is not None
            and found.name not in without
            and selector.means(found.level, found.names)
        ]

    def require_meaning(self, spec: BendSpec) -> None:
        """Refuse patterns that mean nothing.

        Raises:
            InputError: one does; it says what there is that looks like it.
        """
        seen = self.activations()
        for pattern in spec.patterns:
            if spec.activations and _means(pattern, seen):
                continue
            if weights_named(self.model, (pattern,), spec.weights):
                continue
            names = [a.name for a in seen if a.level != "inside"] if spec.activations else []
            names += [] if spec.weights is False else list(self.states())
            text = f"nothing to bend is called {pattern.pattern!r}; {near(pattern.pattern, names)}"
            if not self.is_traced:
                text += " (nothing has been traced yet, so only modules and weights are known)"
            raise InputError(f"{text} (allow_none=True waits for something to come up)")


def _means(pattern: re.Pattern[str], seen: list[Activation]) -> bool:
    selector = NamedActivations((pattern,), frozenset())
    return any(selector.means(found.level, found.names) for found in seen)
