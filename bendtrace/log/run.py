"""Run: one recorded run of a model, with the views derived from its recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from bendtrace.flow import FlowSteps, steps_of
from bendtrace.log.entries import layer_type, number_type
from bendtrace.log.names import RunNames
from bendtrace.log.nodes import Events, Registry
from bendtrace.log.path_tree import Builder, ModuleVisit, StepSource
from bendtrace.log.path_views import CandidateGraph, RunNodes, Tree, candidates_of
from bendtrace.python.lazy import LazyModule
from bendtrace.record.recorder import Recording

if TYPE_CHECKING:
    from bendtrace.log import building, mirror
    from bendtrace.log.building import RunData
    from bendtrace.log.mirror import Graph
else:
    building = LazyModule("bendtrace.log.building")
    mirror = LazyModule("bendtrace.log.mirror")


class Run:
    """The views of one recorded run: each is derived when it is first asked for, and kept.

    Runs that share a registry give the nodes that they have in common the same names.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> run = bt.trace(model, torch.ones(1, 2))._run
        >>> run.names
        ['input', '_0_weight', '_0_bias', 'linear', 'relu']
        >>> [node.path for node in run.candidates]
        ['', 'sub_0', 'sub_0.linear', 'sub_1', 'sub_1.relu']
        >>> [node.path for node in run.candidates.followers(run.candidates.nodes["sub_0"])]
        ['sub_1', 'sub_1.relu']
    """

    def __init__(
        self, recording: Recording, function: Callable[..., Any], registry: Registry | None = None
    ) -> None:
        self.recording = recording
        self.function = function
        self.registry: Registry = Registry() if registry is None else registry
        self.torchlens: bool = False  # how the log names layers; see `Namer`

    @property
    def names(self) -> list[str]:
        """The name of each op's node in the mirror."""
        return self.recording.names

    @property
    def steps(self) -> FlowSteps:
        """Where the model's Python depended on the inputs."""
        return steps_of(self.recording)

    @cached_property
    def graph(self) -> Graph:
        """The networkx mirror, at op level."""
        return mirror.mirror(self.recording, self.function)

    @cached_property
    def _builder(self) -> Builder:
        builder = Builder(Events(self.recording, self.function), self.registry)
        with self.registry.lock:
            ModuleVisit(builder, builder.events.root, builder.root).run()
        builder.finish()
        return builder

    @cached_property
    def tree(self) -> Tree:
        """The tree of node paths."""
        builder = self._builder
        return Tree(builder.root, builder.events.origins, StepSource(builder))

    @cached_property
    def candidates(self) -> CandidateGraph:
        """The nodes that something can be inserted at, and how values flow between them."""
        return candidates_of(self.nodes)

    @cached_property
    def nodes(self) -> RunNodes:
        """The nodes, with their passes."""
        return RunNodes(self._builder)

    @cached_property
    def log(self) -> RunData:
        """The log, without what only a capture knows."""
        return building.build_log(
            self.recording, name_of_function(self.function), self.tree, self.torchlens
        )

    @cached_property
    def naming(self) -> RunNames:
        """The meanings of strings; the log is built for those that look like names of layers."""
        ops = self.recording.tape.ops

        @functools.cache
        def layer_types() -> frozenset[str]:
            found = {layer_type(op) for op in ops} | {number_type(op, ops) for op in ops}
            return frozenset({"input", "output", *filter(None, found)})

        return RunNames(self.tree, lambda: self.log, layer_types)

    @cached_property
    def naming_without_log(self) -> RunNames:
        """The meanings of strings besides layers: those of runs with insertions differ."""
        return RunNames(self.tree, None)


def name_of_function(function: Callable[..., Any]) -> str:
    """Return the name of a model: its class, or the name of a function."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(function, functools.partial):
        return f"partial({name_of_function(function.func)})"
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]
