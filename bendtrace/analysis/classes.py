"""Analysers for the samples of each class apart."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.gradients import of, see_gradients
from bendtrace.analysis.lists import AnalyserList
from bendtrace.analysis.streaming.statistic import Count
from bendtrace.errors import InputError
from bendtrace.interject.interjection import Interjection

__all__ = ["PerClassAnalyser", "PerClassVersusAnalyser"]


class PerClassAnalyser(Analyser):
    """Another analyser, for the samples of each class apart.

    Set `targets` to the labels of each batch, whole numbers (batch,), before the model is called.
    The results have one level more: `{node path: {class: {name: value}}}`. A class is there at a
    node once a sample of it came by.

    Args:
        analyser: what is done for each class; it serves as a pattern, and sees nothing itself.

    Raises:
        InputError: it is none, or one that does not look at what nodes give or their gradients.

    Example:
        >>> import torch, bendtrace as bt
        >>> analyser = bt.analysis.PerClassAnalyser(bt.analysis.RunningMean())
        >>> analyser.targets = torch.tensor([0, 1, 0])
        >>> analyser.update("fc", torch.tensor([[1.0], [5.0], [3.0]]))
        >>> analyser.to_dict()
        {'fc': {0: {'count': 2, 'mean': [2.0]}, 1: {'count': 1, 'mean': [5.0]}}}
    """

    needs_targets = True

    # Whether gradients are looked at has to be known of the class: watching them has a price.
    def __new__(cls, analyser: Analyser | None = None) -> Self:
        """Make one that looks at what the pattern looks at."""
        made: type[Any] = cls
        if looks_at_gradients(analyser):
            made = {
                PerClassAnalyser: _GradientsPerClass,
                PerClassVersusAnalyser: _GradientsPerClassVersus,
            }.get(cls, cls)
        found: Self = super().__new__(made)
        return found

    def __init__(self, analyser: Analyser) -> None:
        _check_pattern(analyser)
        super().__init__(per_pass=_per_pass(analyser))
        self.analyser = analyser
        self.self_contained = analyser.self_contained

    @property
    def label(self) -> str:
        """What reports call it."""
        return f"{self._name} of {self.analyser.label}"

    @property
    def levels(self) -> tuple[str, ...]:
        """What the keys of the results are: nodes, classes, and those of the analyser."""
        return ("node", "class", *self.analyser.levels[1:])

    def start(self, key: str) -> Any:
        """Return the states of the classes at a node: none so far."""
        return {"key": key, "rows": Count(), "classes": {}}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Hand the samples of each class to the analyser."""
        targets = _labels(batch.targets)
        samples = batch.samples
        if samples is None:  # counted at the node, and not within a class
            samples = torch.arange(len(targets)) + state["rows"].count
        batch = Batch(targets, samples)
        known = state["classes"]
        fresh = {}
        for label in targets.unique().tolist():
            chosen = targets == label
            inner = known.get(label)
            if inner is None:
                inner = fresh[label] = self.analyser.start(state["key"])
            rows = value[chosen.to(value.device)]
            self.analyser.update_state(inner, rows, batch.select(chosen))
        known.update(fresh)  # not before the value was seen to fit the known ones
        state["rows"].update(value)

    def merge_state(self, state: Any, other: Any) -> None:
        """Add what another saw, class by class."""
        state["rows"].merge(other["rows"])
        for label, inner in other["classes"].items():
            if label not in state["classes"]:
                state["classes"][label] = self.analyser.start(state["key"])
            self.analyser.merge_state(state["classes"][label], inner)

    def result(self, state: Any) -> dict[Any, Any]:
        """Return what came out for each class."""
        classes = state["classes"]
        return {label: self.analyser.result(classes[label]) for label in sorted(classes)}


class PerClassVersusAnalyser(PerClassAnalyser):
    """Another analyser, for the samples of each class, and for all samples of the others.

    The results are `{node path: {class: {"class": {...}, "rest": {...}}}}`. The rest is what the
    analyser would say of all samples of other classes at the node. It is merged from what was kept
    of these, so the analyser has to be one that can be merged.

    Args:
        analyser: what is done on each side; it serves as a pattern, and sees nothing itself.

    Example:
        >>> import torch, bendtrace as bt
        >>> analyser = bt.analysis.PerClassVersusAnalyser(bt.analysis.RunningMean())
        >>> analyser.targets = torch.tensor([0, 1, 2])
        >>> analyser.update("fc", torch.tensor([[1.0], [5.0], [3.0]]))
        >>> analyser.to_dict()["fc"][0]
        {'class': {'count': 1, 'mean': [1.0]}, 'rest': {'count': 2, 'mean': [4.0]}}
    """

    @property
    def levels(self) -> tuple[str, ...]:
        """What the keys of the results are: nodes, classes, sides, and those of the analyser."""
        return ("node", "class", "side", *self.analyser.levels[1:])

    def result(self, state: Any) -> dict[Any, Any]:
        """Return what came out for each class, and for the rest."""
        classes = state["classes"]
        found = {}
        for label in sorted(classes):
            rest = self.analyser.start(state["key"])
            for other in sorted(classes):
                if other != label:
                    self.analyser.merge_state(rest, classes[other])
            found[label] = {
                "class": self.analyser.result(classes[label]),
                "rest": self.analyser.result(rest),
            }
        return found


class _GradientsPerClass(PerClassAnalyser):
    """Looks at gradients."""

    after = Interjection.after
    backward = see_gradients


class _GradientsPerClassVersus(PerClassVersusAnalyser):
    """Looks at gradients."""

    after = Interjection.after
    backward = see_gradients


def looks_at_gradients(analyser: Any) -> bool:
    """Whether an analyser looks at gradients, and at nothing else."""
    return isinstance(analyser, Analyser) and (
        type(analyser)._overrides("backward") and not type(analyser)._overrides("after")
    )


def _check_pattern(analyser: Any) -> None:
    if not isinstance(analyser, Analyser):
        raise InputError(f"an analyser is needed, to be used for each class; not {analyser!r}")
    if isinstance(analyser, AnalyserList):
        for inner in analyser:
            _check_pattern(inner)
        kinds = {(type(inner).backward is see_gradients and of(inner)) for inner in analyser}
        if len(kinds) > 1 or len(set(map(_per_pass, analyser))) > 1:
            raise InputError(
                "the analysers of this list do not look at the same: at what nodes give, at "
                "gradients of inputs or of outputs, at all passes together or each apart; give a "
                "list for each of these"
            )
    elif type(analyser).backward is not see_gradients:
        if type(analyser).after is not Analyser.after:
            raise InputError(
                f"{analyser.label} has an `after` or a `backward` of its own, so that what it "
                "looks at cannot be told apart by class"
            )


def _per_pass(analyser: Analyser) -> bool:
    while isinstance(analyser, AnalyserList) and len(analyser):
        analyser = analyser[0]
    return analyser.per_pass


def _labels(targets: Tensor | None) -> Tensor:
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        seen = None if targets is None else f"{targets.dtype}, {tuple(targets.shape)}"
        raise InputError(
            f"classes are told by targets of whole numbers, (batch,); these are {seen}"
        )
    return targets.to(torch.int64)
