"""Ops carried out aside, on changed inputs, while a model runs as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.calls import Call
from bendtrace.errors import SiteError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.module import BendedModule
from bendtrace.paths.nodes import NodePath
from bendtrace.recording.tape import Op, Ref, refs_in
from bendtrace.still import Still
from bendtrace.workflows._copies import own_copy
from bendtrace.workflows._metrics import Metric, number_of
from bendtrace.workflows._path_cells import Cells
from bendtrace.workflows._path_edges import Edges, Flow
from bendtrace.workflows._site_values import unlike

__all__ = ["Aside", "Given", "Runs", "with_changed"]


def with_changed(recorded: Any, given: Any, changed: Mapping[int, Any]) -> Any:
    """Return arguments with some values exchanged.

    Args:
        recorded: the arguments as the tape has them.
        given: the arguments of the same call in another run.
        changed: what takes the place of the values of ops.
    """
    kind = type(recorded)
    if kind is Ref:
        return changed.get(recorded.index, given)
    if not any(ref.index in changed for ref in refs_in(recorded)):
        return given
    if kind in (tuple, list):
        return kind(
            with_changed(old, new, changed) for old, new in zip(recorded, given, strict=True)
        )
    if kind is dict:
        return {key: with_changed(old, given[key], changed) for key, old in recorded.items()}
    if kind is slice:
        return slice(
            with_changed(recorded.start, given.start, changed),
            with_changed(recorded.stop, given.stop, changed),
            with_changed(recorded.step, given.step, changed),
        )
    raise SiteError(f"a value inside of a {type(given).__name__} cannot be exchanged", "")


class Aside(Interjection):
    """Carries ops out twice: as they are, and for itself on changed inputs.

    Args:
        ops: the ops of a run along the same path.

    Attributes:
        places: the op at each place, a node and its pass.
        into: for each op that is carried out aside those of its inputs that are changed.
        values: the changed values, by the op that gave them; what is known of them to begin with.
    """

    self_contained = True
    label = "path_patching"

    def __init__(self, ops: list[Op], places: Mapping[tuple[str, int], int]) -> None:
        self.places = places
        self.into: Mapping[int, set[int]] = {}
        self.values: dict[int, Any] = {}
        self._ops = ops

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the node, and once more aside."""
        index = self.places.get((at.path, at.number))
        if index is None or index not in self.into or index in self.values:
            return call(*inputs, **inputs.kwargs)
        op = self._ops[index]
        changed = {source: self.value(source) for source in self.into[index]}
        args, kwargs = with_changed(
            (tuple(op.args), op.kwargs), (tuple(inputs), inputs.kwargs), changed
        )
        if op.writes:  # into a copy, and before the node itself writes
            copies = {
                ref.index: changed.get(ref.index, value).clone()
                for ref, value in _pairs(
                    (tuple(op.args), op.kwargs), (tuple(inputs), inputs.kwargs)
                )
                if ref.index in op.writes
            }
            args, kwargs = with_changed((tuple(op.args), op.kwargs), (args, kwargs), copies)
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
        """Return what an op gives in the changed run, or an element of what it gives."""
        if index not in self.values:
            op = self._ops[index]
            if op.target is operator.getitem and isinstance(op.args[0], Ref):
                self.values[index] = self.value(op.args[0].index)[op.args[1]]
            else:
                raise SiteError(
                    f"the run did not come by op {index} ({op.target}), as it did before with the "
                    "same inputs: the model depends on something else",
                    "",
                )
        return self.values[index]

    def _require_alike(self, path: str, aside: Any, output: Any) -> None:
        pairs = zip(_tensors(aside), _tensors(output), strict=False)
        if len(_tensors(aside)) != len(_tensors(output)):
            raise SiteError(f"with the change, {path!r} gives another number of tensors", path)
        for changed, plain in pairs:
            if why := unlike(changed, plain):
                raise SiteError(
                    f"with the change and as it is, what {path!r} gives is {why}: paths cannot be "
                    "patched through it",
                    path,
                )


class Given(Interjection):
    """Gives nodes changed inputs.

    Args:
        recorded: the arguments of nodes on the tape, by node and pass.

    Attributes:
        changed: what takes the place of which values, for each node and pass.
        came: the nodes and passes that came up.
    """

    self_contained = True
    label = "path_patching"

    def __init__(self, recorded: Mapping[tuple[str, int], tuple[Any, Any]]) -> None:
        self.changed: Mapping[tuple[str, int], Mapping[int, Any]] = {}
        self.came: set[tuple[str, int]] = set()
        self._recorded = recorded

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Exchange the inputs."""
        changed = self.changed.get((at.path, at.number))
        if changed is None:
            return None
        self.came.add((at.path, at.number))
        copies = {
            index: value.clone() if isinstance(value, Tensor) else value
            for index, value in changed.items()
        }
        args, kwargs = with_changed(
            self._recorded[at.path, at.number], (tuple(inputs), inputs.kwargs), copies
        )
        return Inputs(tuple(args), kwargs)


class Runs:
    """Runs in which ops are carried out aside, and runs that receivers are given the outcome in.

    Also a context manager: what is needed for all cells is inserted for as long as it lasts.

    Args:
        bended: the model.
        flow: the run that is patched.
        cells: what is to be run.
        still: has the runs begin alike.
        call: the inputs.
        metric: of the output.
    """

    def __init__(
        self,
        bended: BendedModule,
        flow: Flow,
        cells: Cells,
        still: Still,
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
            for needed in cells.needed.values()
            for index in needed
            if not flow.is_element(index)
        }
        self._aside = Aside(flow.ops, aside)
        ends = [end.spot for made in cells.made.values() for end in made.ends]
        self._given = Given({
            (spot.path, spot.number): flow.arguments(spot) for spot in ends if not spot.is_output
        })  # fmt: skip
        self._outputs = {
            NodePath(path) for spot in ends if spot.is_output for path, _ in flow.outputs(spot)
        }
        self._wheres = [
            (sorted({NodePath(path) for path, _ in aside}), self._aside),
            (sorted({NodePath(spot.path) for spot in ends if not spot.is_output}), self._given),
        ]
        self._put: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        board = self._bended._board
        made = [board.make(where, what) for where, what in self._wheres if where]
        made += [board.make(path, partial(self._exchange, path)) for path in sorted(self._outputs)]
        board.add(*made)
        self._insertions = made
        return self

    def __exit__(self, *_: object) -> None:
        self._bended._board.remove(*self._insertions)

    def _exchange(self, path: str, value: Tensor) -> Tensor | None:
        given = self._put.get(path)
        return None if given is None else given.clone()

    def value(self, made: Edges, known: dict[int, Tensor]) -> float:
        """Return the metric for some edges, and the values that are sent along them."""
        aside, given = self._aside, self._given
        aside.into, aside.values = made.into, dict(known)
        self._run()
        changed: dict[tuple[str, int], dict[int, Any]] = {}
        for end in made.ends:
            values = {source: aside.value(source) for source in end.sources}
            if end.spot.is_output:
                for path, index in self._flow.outputs(end.spot):
                    if index in values:
                        self._put[path] = values[index]
            else:
                changed[end.spot.path, end.spot.number] = values
        aside.into, aside.values = {}, {}
        given.changed, given.came = changed, set()
        try:
            output = self._run()
        finally:
            self._put, given.changed = {}, {}
        if gone := changed.keys() - given.came:
            path = min(gone)[0]
            raise SiteError(f"with other receivers patched, the run did not come by {path!r}", path)
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


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _random_state() -> tuple[Tensor, list[Tensor] | None]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Tensor, list[Tensor] | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
