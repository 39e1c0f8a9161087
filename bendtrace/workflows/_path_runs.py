"""Ops that run a second time on the side, with changed inputs, while a model runs unchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.calls import Call, own_copy
from bendtrace.errors import SiteError
from bendtrace.history.copies import tensors_in
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.registry import InsertionGroup
from bendtrace.module import BendedModule
from bendtrace.paths.nodes import NodePath
from bendtrace.preserved_state import PreservedState
from bendtrace.tape.tape import Op, Ref, refs_in
from bendtrace.workflows._grids import Metric, number_of
from bendtrace.workflows._path_edges import Edges, Flow
from bendtrace.workflows._sites import unlike

Pass = tuple[str, int]  # a node and its pass


def _with_changed(recorded: Any, given: Any, changed: Mapping[int, Any]) -> Any:
    """Return arguments with the values of some ops replaced.

    Args:
        recorded: the arguments as the tape has them.
        given: the arguments of the same call in another run.
        changed: the replacements.
    """
    kind = type(recorded)
    if kind is Ref:
        return changed.get(recorded.index, given)
    if not any(ref.index in changed for ref in refs_in(recorded)):
        return given
    if kind in (tuple, list):
        pairs = zip(recorded, given, strict=True)
        return kind(_with_changed(old, new, changed) for old, new in pairs)
    if kind is dict:
        return {key: _with_changed(old, given[key], changed) for key, old in recorded.items()}
    if kind is slice:
        ends = ("start", "stop", "step")
        return slice(
            *(_with_changed(getattr(recorded, e), getattr(given, e), changed) for e in ends)
        )
    raise SiteError(f"a value inside a {type(given).__name__} cannot be replaced", "")


class _Aside(Interjection):
    """Runs ops twice: as they are, and once more on changed inputs.

    Attributes:
        into: for each op that runs on the side those of its inputs that are changed.
        values: the changed values, by their ops; at first those that a cell begins with.
    """

    self_contained = True
    label = "path_patching"

    def __init__(self, ops: list[Op], places: Mapping[Pass, int]) -> None:
        self.into: Mapping[int, set[int]] = {}
        self.values: dict[int, Any] = {}
        self._places = places
        self._ops = ops

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        index = self._places.get((at.path, at.number))
        if index is None or index not in self.into or index in self.values:
            return call(*inputs, **inputs.kwargs)
        op = self._ops[index]
        recorded = tuple(op.args), op.kwargs
        changed = {source: self.value(source) for source in self.into[index]}
        args, kwargs = _with_changed(recorded, (tuple(inputs), inputs.kwargs), changed)
        if op.writes:  # into a copy, and before the node itself writes
            copies = {
                ref.index: changed.get(ref.index, value).clone()
                for ref, value in _pairs(recorded, (tuple(inputs), inputs.kwargs))
                if ref.index in op.writes
            }
            args, kwargs = _with_changed(recorded, (args, kwargs), copies)
        before = _random_state()
        output = call(*inputs, **inputs.kwargs)
        after = _random_state()
        _set_random_state(before)
        aside = call(*args, **kwargs)
        _set_random_state(after)
        self._require_alike(at.path, aside, output)
        self.values[index] = aside
        return output

    def value(self, index: int) -> Any:
        """Return the output of an op in the changed run, or an element of an output."""
        if index not in self.values:
            op = self._ops[index]
            if op.target is not operator.getitem or not isinstance(op.args[0], Ref):
                raise SiteError(
                    f"the run did not reach op {index} ({op.target}), as it did before with "
                    "the same inputs: the model depends on something else",
                    "",
                )
            self.values[index] = self.value(op.args[0].index)[op.args[1]]
        return self.values[index]

    def _require_alike(self, path: str, aside: Any, output: Any) -> None:
        changed, plain = list(tensors_in(aside)), list(tensors_in(output))
        if len(changed) != len(plain):
            raise SiteError(
                f"with the change, {path!r} returns a different number of tensors", path
            )
        for one, other in zip(changed, plain, strict=True):
            if why := unlike(one, other):
                raise SiteError(
                    f"with and without the change, the output of {path!r} is {why}: paths "
                    "cannot be patched through it",
                    path,
                )


class _Given(Interjection):
    """Gives nodes changed inputs.

    Attributes:
        changed: for each node and pass the replacements, by op.
        reached: the nodes and passes that ran.
    """

    self_contained = True
    label = "path_patching"

    def __init__(self, recorded: Mapping[Pass, tuple[Any, Any]]) -> None:
        self.changed: Mapping[Pass, Mapping[int, Any]] = {}
        self.reached: set[Pass] = set()
        self._recorded = recorded

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        changed = self.changed.get((at.path, at.number))
        if changed is None:
            return None
        self.reached.add((at.path, at.number))
        copies = {i: v.clone() if isinstance(v, Tensor) else v for i, v in changed.items()}
        recorded = self._recorded[at.path, at.number]
        args, kwargs = _with_changed(recorded, (tuple(inputs), inputs.kwargs), copies)
        return Inputs(tuple(args), kwargs)


class Runs:
    """Runs with ops on the side, and runs whose receivers get the side results.

    It is also a context manager: the insertions that all cells need stay active while it lasts.

    Args:
        bended: the model.
        flow: the patched run.
        needed: the ops that run on the side, for each cell.
        made: the edges of each cell.
        still: restores the state at the beginning of each run.
        call: the inputs.
        metric: of the output.
    """

    def __init__(
        self,
        bended: BendedModule,
        flow: Flow,
        needed: Mapping[Any, list[int]],
        made: Mapping[Any, Edges],
        still: PreservedState,
        call: Call,
        metric: Metric,
    ) -> None:
        self._bended = bended
        self._still = still
        self._call = call
        self._metric = metric
        self._flow = flow
        aside = {
            flow.place(index): index
            for indices in needed.values()
            for index in indices
            if not flow.is_element(index)
        }
        self._aside = _Aside(flow.ops, aside)
        ends = [end.spot for edges in made.values() for end in edges.ends]
        inner = [spot for spot in ends if not spot.is_output]
        self._given = _Given({(spot.path, spot.number): flow.arguments(spot) for spot in inner})
        self._put: dict[str, Tensor] = {}
        self._group = InsertionGroup(bended)
        for where, what in (
            (sorted({NodePath(path) for path, _ in aside}), self._aside),
            (sorted({NodePath(spot.path) for spot in inner}), self._given),
        ):
            if where:
                self._group.make(where, what)
        outputs = {path for spot in ends if spot.is_output for path, _ in flow.outputs(spot)}
        for path in sorted(outputs):
            self._group.make(NodePath(path), partial(self._replacement, path))

    def __enter__(self) -> Self:
        self._group.put_in()
        return self

    def __exit__(self, *error: object) -> None:
        self._group.remove()

    def _replacement(self, path: str, value: Tensor) -> Tensor | None:
        given = self._put.get(path)
        return None if given is None else given.clone()

    def value(self, made: Edges, known: dict[int, Tensor]) -> float:
        """Return the metric for some edges, and the values sent along them."""
        aside, given = self._aside, self._given
        aside.into, aside.values = made.into, dict(known)
        self._run()
        changed: dict[Pass, dict[int, Any]] = {}
        for end in made.ends:
            values = {source: aside.value(source) for source in end.sources}
            if end.spot.is_output:
                for path, index in self._flow.outputs(end.spot):
                    if index in values:
                        self._put[path] = values[index]
            else:
                changed[end.spot.path, end.spot.number] = values
        aside.into, aside.values = {}, {}
        given.changed, given.reached = changed, set()
        try:
            output = self._run()
        finally:
            self._put, given.changed = {}, {}
        if gone := changed.keys() - given.reached:
            path = min(gone)[0]
            raise SiteError(f"with other receivers patched, the run did not reach {path!r}", path)
        return number_of(self._metric, output)

    def _run(self) -> Any:
        copy = own_copy(self._call)
        self._still.rewind()
        try:
            return copy.to(self._bended)
        finally:
            self._aside.into = {}


def _pairs(recorded: Any, given: Any) -> list[tuple[Ref, Any]]:
    if type(recorded) is Ref:
        return [(recorded, given)]
    if type(recorded) in (tuple, list):
        return [pair for old, new in zip(recorded, given, strict=True) for pair in _pairs(old, new)]
    if type(recorded) is dict:
        return [pair for key, old in recorded.items() for pair in _pairs(old, given[key])]
    return []


def _random_state() -> tuple[Tensor, list[Tensor] | None]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Tensor, list[Tensor] | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
