"""Composed analysers: lists of analysers, and one analyser per class of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.insert.interjection import Inputs, NodePass
from bendtrace.python.checks import free_name
from bendtrace.research.analyser import Analyser, Batch
from bendtrace.research.features import gradients_of, see_gradients
from bendtrace.research.streaming import Count


class AnalyserList(Analyser):
    """Several analysers that are inserted, updated, merged and saved together.

    Each keeps its own results and its own `enabled`; while the list is not `enabled`, all of them
    ignore values. Targets and sample numbers of the list are set for all. The results have one more
    level: `{node path: {analyser: {name: value}}}`.

    Args:
        analysers: the analysers, named after their classes (`RunningMean`, `RunningMean_1`), or a
            dict of analysers by name.

    Raises:
        InputError: one of them is not an analyser.

    Example:
        >>> import torch, bendtrace as bt
        >>> mean, extremes = bt.analysis.RunningMean(keep=()), bt.analysis.RunningMinMax(keep=())
        >>> analysers = bt.analysis.AnalyserList([mean, extremes])
        >>> analysers.update("relu", torch.tensor([[1.0, 3.0]]))
        >>> analysers.to_dict()["relu"]["RunningMinMax"]
        {'count': 2, 'min': 1.0, 'max': 3.0}
        >>> mean.to_dict()
        {'relu': {'count': 2, 'mean': 2.0}}
    """

    def __init__(self, analysers: Iterable[Analyser] | Mapping[str, Analyser]) -> None:
        super().__init__()
        self.analysers: dict[str, Analyser] = _name_analysers(analysers)
        members = self.analysers.values()
        self.self_contained: bool = all(item.self_contained for item in members)
        self.deferrable: bool = all(item.deferrable for item in members)
        self.wants_inputs: bool = any(item.wants_inputs for item in members)
        self._looking = {
            form: [item for item in members if form in item._forms()]
            for form in ("after", "backward")
        }

    def _forms(self) -> frozenset[str]:
        return frozenset(form for form, items in self._looking.items() if items)

    def __iter__(self) -> Iterator[Analyser]:
        return iter(self.analysers.values())

    def __len__(self) -> int:
        return len(self.analysers)

    def __getitem__(self, key: int | str) -> Analyser:
        """Return one analyser by name or position."""
        try:
            return self.analysers[key] if isinstance(key, str) else list(self)[key]
        except LookupError:
            raise InputError(
                f"there is no analyser {key!r} here, only {', '.join(self.analysers)}"
            ) from None

    @property
    def settings(self) -> dict[str, Any]:
        """The analysers by name."""
        return {"analysers": self.analysers}

    @property
    def levels(self) -> tuple[str, ...]:
        """The kinds of keys of the results: nodes, analysers, and those of the analysers.

        Raises:
            InputError: the analysers have different kinds.
        """
        inner = {item.levels[1:] for item in self}
        if len(inner) > 1:
            listed = ", ".join(f"{name} {item.levels}" for name, item in self.analysers.items())
            raise InputError(
                f"the results of these analysers have different levels, {listed}: call "
                "to_pandas() on each analyser"
            )
        return ("node", "analyser", *(inner.pop() if inner else ()))

    def _set_batch(self, name: str, found: Tensor | None) -> None:
        super()._set_batch(name, found)
        for item in self:
            item._set_batch(name, found)

    # Seeing

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Pass on the output of a node."""
        for item in self._looking["after"] if self.enabled else ():
            item.after(at, inputs, output)

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> None:
        """Pass on the gradients of a node."""
        for item in self._looking["backward"] if self.enabled else ():
            item.backward(at, grad_input, grad_output)

    def _backward_of_call(self) -> Callable[..., Any]:
        if type(self).backward is not AnalyserList.backward:
            return self.backward
        found = [item._backward_of_call() for item in self._looking["backward"]]

        def backward(*given: Any) -> None:
            for one in found if self.enabled else ():
                one(*given)

        return backward

    def update(
        self, key: str, value: Any, targets: Any = None, samples: Any = None, *, number: int = 0
    ) -> None:
        """Pass a value to all of them; see `Analyser.update`."""
        if self.enabled:
            for item in self:
                item.update(key, value, targets, samples, number=number)

    def reset(self) -> None:
        """Reset all of them."""
        for item in self:
            item.reset()

    # As a pattern for other analysers

    def start(self, key: str) -> Any:
        """Return a state for each."""
        return {name: item.start(key) for name, item in self.analysers.items()}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Update the state of each with a value."""
        for name, item in self.analysers.items():
            item.update_state(state[name], value, batch)

    def merge_state(self, state: Any, other: Any) -> None:
        """Add the states of each."""
        for name, item in self.analysers.items():
            item.merge_state(state[name], other[name])

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the results of each."""
        return {name: item.result(state[name]) for name, item in self.analysers.items()}

    # Results

    @property
    def calls(self) -> dict[str, int]:
        """The number of values under each key; the maximum over the members."""
        found: dict[str, int] = {}
        for item in self:
            for path, calls in item.calls.items():
                found[path] = max(calls, found.get(path, 0))
        return found

    @property
    def results(self) -> dict[str, dict[Any, Any]]:
        """The results, by node path, analyser and name."""
        found: dict[str, dict[Any, Any]] = {}
        for name, item in self.analysers.items():
            for path, result in item.results.items():
                found.setdefault(path, {})[name] = result
        return found

    # Copies, and other analysers

    def merge(self, other: Self) -> None:
        """Add the values of another list's members to those of this one.

        Raises:
            InputError: it has other members. Nothing has changed then.
        """
        self._check_alike(other)
        made = copy.deepcopy(self.analysers)
        for name, item in made.items():
            item.merge(other.analysers[name])
        self._take_over(made)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        members = [(name, item.state_dict()) for name, item in self.analysers.items()]
        return {"analyser": AnalyserList.__name__, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget all values, and load the states of another list.

        Raises:
            InputError: it has other members. Nothing has changed then.
        """
        if state.get("analyser") != AnalyserList.__name__:
            raise InputError(f"this is the state of a {state.get('analyser')}, not {self.label}")
        members = dict(state["members"])
        if list(members) != list(self.analysers):
            raise InputError(
                f"this list has {', '.join(self.analysers)}; the state belongs to one with "
                f"{', '.join(members)}"
            )
        made = copy.deepcopy(self.analysers)
        for name, item in made.items():
            item.load_state_dict(members[name])
        self._take_over(made)

    def _take_over(self, made: Mapping[str, Analyser]) -> None:
        for name, item in self.analysers.items():
            if isinstance(item, AnalyserList):
                item._take_over(made[name].analysers)  # type: ignore[attr-defined]
            else:
                item._states, item._calls = made[name]._states, made[name]._calls

    @property
    def nbytes(self) -> int:
        """The size of their tensors in bytes."""
        return sum(item.nbytes for item in self)

    @property
    def label(self) -> str:
        """The name in reports."""
        return f"AnalyserList of {', '.join(item.label for item in self)}"

    def __repr__(self) -> str:
        listed = "\n".join(f"  {name}: {item!r}" for name, item in self.analysers.items())
        state = "" if self.enabled else " disabled"
        return f"<AnalyserList{state}\n{listed}>"


def _name_analysers(analysers: Any) -> dict[str, Analyser]:
    items = (
        list(analysers.items())
        if isinstance(analysers, Mapping)
        else [(None, item) for item in analysers]
    )
    found: dict[str, Analyser] = {}
    for name, item in items:
        if not isinstance(item, Analyser):
            raise InputError(
                f"a list of analysers cannot contain {item!r}, which is not an analyser"
            )
        if any(item is other for other in found.values()):
            raise InputError(
                f"{item.label} is in the list twice, and would receive every value twice"
            )
        for form in ("before", "instead"):
            if type(item)._overrides(form):
                raise InputError(f"{item.label} overrides `{form}`: insert it on its own")
        found[name if name is not None else free_name(item._name, found)] = item
    return found


class PerClassAnalyser(Analyser):
    """One analyser for the samples of each class.

    Set `targets` to the labels of each batch, integers (batch,), before the model is called. The
    results have one more level: `{node path: {class: {name: value}}}`. A node has the classes of
    the samples that reached it.

    Args:
        analyser: the template for the analyser of each class; it receives no values itself.

    Raises:
        InputError: it is not an analyser, or uses neither outputs of nodes nor their gradients.

    Example:
        >>> import torch, bendtrace as bt
        >>> analyser = bt.analysis.PerClassAnalyser(bt.analysis.RunningMean())
        >>> analyser.targets = torch.tensor([0, 1, 0])
        >>> analyser.update("fc", torch.tensor([[1.0], [5.0], [3.0]]))
        >>> analyser.to_dict()
        {'fc': {0: {'count': 2, 'mean': [2.0]}, 1: {'count': 1, 'mean': [5.0]}}}
    """

    needs_targets = True

    def __init__(self, analyser: Analyser) -> None:
        _check_pattern(analyser)
        super().__init__(per_pass=_per_pass(analyser))
        self.analyser = analyser
        self.self_contained: bool = analyser.self_contained
        self.deferrable: bool = analyser.deferrable

    backward = see_gradients

    def _forms(self) -> frozenset[str]:
        return self.analyser._forms() & {"after", "backward"}

    @property
    def label(self) -> str:
        """The name in reports."""
        return f"{self._name} of {self.analyser.label}"

    @property
    def levels(self) -> tuple[str, ...]:
        """The kinds of keys of the results: nodes, classes, and those of the analyser."""
        return ("node", "class", *self.analyser.levels[1:])

    def start(self, key: str) -> Any:
        """Return the states of the classes at a node: empty at first."""
        return {"key": key, "rows": Count(), "classes": {}}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Pass the samples of each class to the analyser."""
        targets = _check_labels(batch.targets)
        samples = batch.samples
        if samples is None:  # counted at the node, and not within a class
            samples = torch.arange(len(targets)) + state["rows"].count
        batch = Batch(targets, samples)
        classes = state["classes"]
        fresh = {}
        for label in targets.unique().tolist():
            chosen = targets == label
            inner = classes.get(label)
            if inner is None:
                inner = fresh[label] = self.analyser.start(state["key"])
            rows = value[chosen.to(value.device)]
            self.analyser.update_state(inner, rows, batch.select(chosen))
        classes.update(fresh)  # not before the value was seen to fit the known ones
        state["rows"].update(value)

    def merge_state(self, state: Any, other: Any) -> None:
        """Add another state, class by class."""
        state["rows"].merge(other["rows"])
        for label, inner in other["classes"].items():
            if label not in state["classes"]:
                state["classes"][label] = self.analyser.start(state["key"])
            self.analyser.merge_state(state["classes"][label], inner)

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the results for each class."""
        classes = state["classes"]
        return {label: self.analyser.result(classes[label]) for label in sorted(classes)}


class PerClassVersusAnalyser(PerClassAnalyser):
    """Two analysers for each class: for its samples, and for all samples of the others.

    The results are `{node path: {class: {"class": {...}, "rest": {...}}}}`. The rest has the
    results for all samples of other classes at the node. It is merged from their states, so the
    analyser has to support merging.

    Args:
        analyser: the template for the analyser of each side; it receives no values itself.

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
        """The kinds of keys of the results: nodes, classes, sides, and the analyser's."""
        return ("node", "class", "side", *self.analyser.levels[1:])

    def result(self, state: Any) -> dict[Any, Any]:
        """Return the results for each class, and for the rest."""
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


def _check_pattern(analyser: Any) -> None:
    if not isinstance(analyser, Analyser):
        raise InputError(f"an analyser to use for each class is needed, not {analyser!r}")
    if isinstance(analyser, AnalyserList):
        for inner in analyser:
            _check_pattern(inner)
        forms = [(inner, inner._forms()) for inner in analyser]
        kinds = {"after" not in f and "backward" in f and gradients_of(inner) for inner, f in forms}
        if len(kinds) > 1 or len(set(map(_per_pass, analyser))) > 1:
            raise InputError(
                "the analysers of this list use different values: outputs of nodes, or "
                "gradients of inputs or of outputs, of all passes together or of each "
                "separately; create one list for each of these"
            )
    elif type(analyser).backward is not see_gradients:
        if type(analyser).after is not Analyser.after:
            raise InputError(
                f"{analyser.label} overrides `after` or `backward`, so its values cannot be "
                "separated by class"
            )


def _per_pass(analyser: Analyser) -> bool:
    while isinstance(analyser, AnalyserList) and len(analyser):
        analyser = analyser[0]
    return analyser.per_pass


def _check_labels(targets: Tensor | None) -> Tensor:
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        seen = None if targets is None else f"{targets.dtype}, {tuple(targets.shape)}"
        raise InputError(f"classes have to be integer targets, (batch,), not {seen}")
    return targets.to(torch.int64)
