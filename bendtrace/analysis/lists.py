"""Several analysers as one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.errors import InputError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass

__all__ = ["AnalyserList"]


class AnalyserList(Analyser):
    """Several analysers, inserted, fed, merged and saved as one.

    Each stays what it is, with its own results and its own `enabled`; while the list is not
    `enabled`, none of them sees anything. Targets and sample numbers that are set here are set for
    all. The results have one level more: `{node path: {analyser: {name: value}}}`.

    Args:
        analysers: the analysers, which are called by the names of their classes (`RunningMean`,
            `RunningMean_1`), or a dict of them by name.

    Raises:
        InputError: one of them is none.

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

    # What is looked at has to be known of the class: watching gradients has a price.
    def __new__(cls, analysers: Any = ()) -> Self:
        """Make one that looks at what its members look at."""
        made: type[Any] = cls
        if cls is AnalyserList:
            analysers = analysers.values() if isinstance(analysers, Mapping) else analysers
            kinds = [type(item) for item in analysers if isinstance(item, Analyser)]
            if any(kind._overrides("backward") for kind in kinds):
                forward = any(kind._overrides("after") for kind in kinds)
                made = _WithGradients if forward else _GradientsOnly
        found: Self = super().__new__(made)
        return found

    def __init__(self, analysers: Iterable[Analyser] | Mapping[str, Analyser]) -> None:
        super().__init__()
        self.analysers = _named(analysers)
        members = self.analysers.values()
        self.self_contained = all(item.self_contained for item in members)
        self.wants_inputs = any(item.wants_inputs for item in members)

    def __iter__(self) -> Iterator[Analyser]:
        return iter(self.analysers.values())

    def __len__(self) -> int:
        return len(self.analysers)

    def __getitem__(self, key: int | str) -> Analyser:
        """Return one by its name or position."""
        try:
            return self.analysers[key] if isinstance(key, str) else list(self)[key]
        except LookupError:
            raise InputError(
                f"there is no analyser {key!r} here, but {', '.join(self.analysers)}"
            ) from None

    @property
    def settings(self) -> dict[str, Any]:
        """The analysers by name."""
        return {"analysers": self.analysers}

    @property
    def levels(self) -> tuple[str, ...]:
        """What the keys of the results are: nodes, analysers, and those of the analysers.

        Raises:
            InputError: these are not the same for all.
        """
        inner = {item.levels[1:] for item in self}
        if len(inner) > 1:
            listed = ", ".join(f"{name} {item.levels}" for name, item in self.analysers.items())
            raise InputError(
                f"the results of these analysers go by different levels, {listed}: ask each for "
                "its own table"
            )
        return ("node", "analyser", *(inner.pop() if inner else ()))

    # What is known of the batch

    @property
    def targets(self) -> Tensor | None:
        """The labels of the batch that comes next, for all of them."""
        return self._targets

    @targets.setter
    def targets(self, targets: Any) -> None:
        Analyser.targets.__set__(self, targets)  # type: ignore[attr-defined]
        for item in self:
            item.targets = self._targets

    @property
    def samples(self) -> Tensor | None:
        """Which samples of the data set are in the batch that comes next, for all of them."""
        return self._samples

    @samples.setter
    def samples(self, samples: Any) -> None:
        Analyser.samples.__set__(self, samples)  # type: ignore[attr-defined]
        for item in self:
            item.samples = self._samples

    # Seeing

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Hand on what a node gave."""
        if self.enabled:
            for item in self:
                item.after(at, inputs, output)

    def update(
        self,
        key: str,
        value: Any,
        targets: Any = None,
        samples: Any = None,
        *,
        number: int = 0,
    ) -> None:
        """Hand a value to all of them; see `Analyser.update`."""
        if self.enabled:
            for item in self:
                item.update(key, value, targets, samples, number=number)

    def reset(self) -> None:
        """Have all of them forget what they saw."""
        for item in self:
            item.reset()

    # As a pattern for other analysers

    def start(self, key: str) -> Any:
        """Return a state for each."""
        return {name: item.start(key) for name, item in self.analysers.items()}

    def update_state(self, state: Any, value: Tensor, batch: Batch) -> None:
        """Have each take a value in."""
        for name, item in self.analysers.items():
            item.update_state(state[name], value, batch)

    def merge_state(self, state: Any, other: Any) -> None:
        """Add the states of each."""
        for name, item in self.analysers.items():
            item.merge_state(state[name], other[name])

    def result(self, state: Any) -> dict[Any, Any]:
        """Return what came out of each."""
        return {name: item.result(state[name]) for name, item in self.analysers.items()}

    # What came out

    @property
    def calls(self) -> dict[str, int]:
        """How many values were seen under each key, by that member that saw most."""
        found: dict[str, int] = {}
        for item in self:
            for path, calls in item.calls.items():
                found[path] = max(calls, found.get(path, 0))
        return found

    @property
    def results(self) -> dict[str, dict[Any, Any]]:
        """What came out, by node path, analyser and name."""
        found: dict[str, dict[Any, Any]] = {}
        for name, item in self.analysers.items():
            for path, result in item.results.items():
                found.setdefault(path, {})[name] = result
        return found

    # Copies, and what others have seen

    def merge(self, other: Self) -> None:
        """Add what the members of another list have seen to those of this one.

        Raises:
            InputError: it has other members. Nothing has changed then.
        """
        self._check_alike(other)
        made = copy.deepcopy(self.analysers)
        for name, item in made.items():
            item.merge(other.analysers[name])
        self._take_over(made)

    def state_dict(self) -> dict[str, Any]:
        """Return what all have seen."""
        members = [(name, item.state_dict()) for name, item in self.analysers.items()]
        return {"analyser": AnalyserList.__name__, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget all that was seen, and take over what another list has seen.

        Raises:
            InputError: it has other members. Nothing has changed then.
        """
        if state.get("analyser") != AnalyserList.__name__:
            raise InputError(f"this is the state of a {state.get('analyser')}, not {self.label}")
        members = dict(state["members"])
        if list(members) != list(self.analysers):
            raise InputError(
                f"this list has {', '.join(self.analysers)}; the state is of one with "
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
        """How many bytes the tensors that they hold take."""
        return sum(item.nbytes for item in self)

    @property
    def label(self) -> str:
        """What reports call it."""
        return f"AnalyserList of {', '.join(item.label for item in self)}"

    def __repr__(self) -> str:
        listed = "\n".join(f"  {name}: {item!r}" for name, item in self.analysers.items())
        state = "" if self.enabled else " disabled"
        return f"<AnalyserList{state}\n{listed}>"


class _WithGradients(AnalyserList):
    """Some look at what nodes give, some at gradients."""

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> None:
        """Hand on the gradients of a node."""
        if self.enabled:
            for item in self:
                item.backward(at, grad_input, grad_output)


class _GradientsOnly(_WithGradients):
    """All look at gradients."""

    after = Interjection.after


def _named(analysers: Any) -> dict[str, Analyser]:
    items = (
        list(analysers.items())
        if isinstance(analysers, Mapping)
        else [(None, item) for item in analysers]
    )
    found: dict[str, Analyser] = {}
    for name, item in items:
        if not isinstance(item, Analyser):
            raise InputError(f"a list of analysers was given, with {item!r} in it, which is none")
        if any(item is other for other in found.values()):
            raise InputError(f"{item.label} is in the list twice, and would see everything twice")
        for form in ("before", "instead"):
            if type(item)._overrides(form):
                raise InputError(f"{item.label} overrides `{form}`: insert it by itself")
        found[name if name is not None else _free(item._name, found)] = item
    return found


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
