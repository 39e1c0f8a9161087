"""Collecting the outputs of nodes in the calls of a model, batch by batch."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.harvesting.filling import Filling, require_place
from bendtrace.harvesting.paths import Path, PathNames
from bendtrace.harvesting.settings import Settings
from bendtrace.history.copies import copied
from bendtrace.interject.gates import of_this_run
from bendtrace.interject.group import InsertionGroup
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.passes import Passes
from bendtrace.module import BendedModule
from bendtrace.recording.recorder import Recording

__all__ = ["Collector"]

_OUTPUT = "output"  # the node of the whole model, as in the trees of paths


class _Watch(Interjection):
    """Hands over the output of a node."""

    observes = True
    late = True
    label = "harvest"
    # The functions that it calls work on the value alone.
    self_contained = True
    deferrable = True
    needs_paths = True

    def __init__(self, collector: Collector, rule: _Rule | None) -> None:
        self._collector = collector
        self._rule = rule
        self._thread = threading.get_ident()

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        if self._rule is not None and threading.get_ident() == self._thread:
            self._collector.take(at, self._rule, output)


class _Watched(Insertion):
    """An insertion that reports the path of each call."""

    told: Callable[[Recording], None] | None = None
    last: Recording | None = None
    has_met = False  # only the first time counts, and this is called for each batch

    def ran(self, recording: Recording) -> None:
        if recording is not self.last:
            super().ran(recording)
            self.last = recording
        if self.told is not None:
            kept = of_this_run()
            if self not in kept:
                kept[self] = True
                self.told(recording)

    def fired(self, at: NodePass, changed: bool, times: int = 1) -> None:
        if not self.has_met:
            self.has_met = True
            super().fired(at, changed)


class _Rule:
    """How the values of a node become rows.

    Attributes:
        asked: the text that the node was requested by, if it was text.
        takes_all: whether a value is stored as it is.
        axis: the axis that counts the samples, None if there is none.
        made_axis: that axis of the result of `change`.
        change: reduces the value; None to store it as it is.
        is_named: whether `change` is one of ours, which reduce tensors only.
        wants_batch: whether `change` takes the batch as well.
    """

    def __init__(self, settings: Settings, said: Any) -> None:
        self.asked = said if isinstance(said, str) else ""
        self.axis: int | None = _for_node(settings.batch_axis, said, 0)
        rule = _for_node(settings.reduce, said, None)
        self.takes_all = rule is None and self.axis == 0
        self.change: Callable[..., Any] | None = None
        self.is_named = isinstance(rule, str)
        self.made_axis = self.axis
        self.wants_batch = False
        if self.is_named:
            self.change = _named(rule, self.axis, settings.feature_axis)
            self.made_axis = None if self.axis is None else 0
        elif rule is not None:
            self.change = rule
            self.wants_batch = _takes_two(rule)


def _for_node(rules: Any, said: Any, otherwise: Any) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    try:
        return rules.get(said, otherwise)
    except TypeError:  # a selector that cannot be a key
        return otherwise


def _takes_two(function: Callable[..., Any]) -> bool:
    if isinstance(function, nn.Module):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in positional and p.default is p.empty]) == 2


def _named(name: str, axis: int | None, feature_axis: int | None) -> Callable[[Tensor], Tensor]:
    def reduced(value: Tensor) -> Tensor:
        dims, shape = value.dim(), tuple(value.shape)
        if not dims:
            return value
        features = -1 if feature_axis is None else feature_axis
        if feature_axis is None and dims > 3:  # of images, the last axis is the width
            raise InputError(
                f"reduce={name!r} keeps the axis of the features, which a value of shape {shape} "
                "does not show: pass feature_axis=1 if channels come first, or feature_axis=-1"
            )
        if not -dims <= features < dims:
            raise InputError(f"a value of shape {shape} has no axis feature_axis={features}")
        kept = {features % dims}
        if axis is not None:
            if not -dims <= axis < dims:
                raise InputError(f"a value of shape {shape} has no axis batch_axis={axis}")
            kept.add(axis % dims)
        others = [d for d in range(dims) if d not in kept]
        if any(not shape[d] for d in others):
            raise InputError(f"a value of shape {shape} has no {name}: an axis is empty")
        if not others:
            made = value
        elif name == "mean":
            if not value.is_floating_point() and not value.is_complex():
                raise InputError(
                    f"the mean of {value.dtype} cannot be computed without rounding: pass a "
                    "function, such as lambda value: value.double().mean(1)"
                )
            made = value.mean(others, keepdim=True)
        elif name == "max":
            made = value.amax(others, keepdim=True)
        else:
            made = value
            for d in others:
                made = made.narrow(d, shape[d] - 1, 1)
        order = list(range(dims))
        if axis is not None:  # the samples come first, wherever they were
            order.insert(0, order.pop(axis))
        return made.permute(order).squeeze([n for n, d in enumerate(order) if d in others])

    return reduced


class Collector:
    """Insertions that copy the outputs of nodes to the current shard.

    Args:
        bended: the model.
        settings: the options of the harvest.
        several: whether the model may be called several times per batch.

    Attributes:
        filling: the shard.
        places: the source locations of the reached nodes, by path.
    """

    def __init__(self, bended: BendedModule, settings: Settings, several: bool = True) -> None:
        self.filling: Filling = Filling(settings.shard_samples, settings.shard_bytes)
        self.places: dict[str, str] = {}
        self._bended = bended
        self._settings = settings
        self._several = several
        self._is_stacked = isinstance(settings.passes, str)
        self._passes = Passes(None if self._is_stacked else settings.passes)
        # One pass keeps the name of the node.
        self._is_single = type(settings.passes) is int
        self._waits = self._is_stacked or self._passes.needs_total
        # Whether the first pass of a node can be taken as it is.
        self._takes_all = settings.passes is None and settings.dtype is None and not several
        self._names = PathNames()
        self._runs: list[Recording] = []
        self._before: dict[str, int] = {}  # passes in earlier calls of the same batch
        self._most: dict[str, int] = {}
        self._kept: dict[tuple[str, int], tuple[_Rule, Tensor]] = {}
        self._batch: Any = None
        self._size = 0
        self._group = self._insert()

    def _insert(self) -> InsertionGroup:
        group = InsertionGroup(self._bended)
        for said in self._settings.where or (_OUTPUT,):
            rule = _Rule(self._settings, said) if self._settings.where else None
            made = group.make(
                said, _Watch(self, rule), allow_none=self._settings.allow_none, kind=_Watched
            )
            if self._settings.passes is not None and any(target.passes for target in made.targets):
                raise InputError(f"{said!r} names passes: give them either there or with passes=")
        first = group.insertions[0]
        assert isinstance(first, _Watched)
        first.told = self._ran
        return group

    def __enter__(self) -> Collector:
        self._group.put_in()
        return self

    def __exit__(self, *error: object) -> None:
        self._group.remove()

    def warn_of_unmet(self) -> None:
        """Warn of the nodes that no batch reached."""
        if self._settings.where:
            for insertion in self._group.insertions:
                insertion.warn_if_never_fired(2)

    # Batches

    def begin(self, batch: Any, size: int) -> None:
        """Begin a batch with some number of samples."""
        self._batch, self._size = batch, size
        self._runs = []
        if self._most:
            self._before, self._most = {}, {}

    def end(self) -> Path:
        """End the batch, and return its path."""
        if self._waits:
            self._finish_passes()
        self._batch = None
        return self._names.of(self._runs)

    def drop(self) -> None:
        """Drop the batch."""
        self._kept = {}
        self._batch = None
        self.filling.drop_batch()

    def _ran(self, recording: Recording) -> None:
        self._runs.append(recording)
        # The passes of the next call of the same batch continue the count.
        if self._several:
            self._before.update(self._most)

    def take(self, at: NodePass, rule: _Rule, value: Any) -> None:
        """Store the output of a node in a pass."""
        if self._takes_all and rule.takes_all and not at.number and type(value) is Tensor:
            column = self.filling.columns.get(at.path)
            if column is not None and self.places.get(at.path) == at.place:
                if column.put_alike(value, self._size):
                    return
        path, number = at.path or _OUTPUT, at.number
        require_place(path, self.places.setdefault(path, at.place), at.place)
        if self._before:
            number += self._before.get(path, 0)
        self._most[path] = number + 1
        if not self._waits and not self._passes.admits(number, None):
            return
        rows = self._made_of(at, rule, value)
        if self._waits:
            with torch.no_grad():
                self._kept[path, number] = rule, copied(rows.detach())
            return
        self._store(path, number, rule, rows)

    def _finish_passes(self) -> None:
        kept, self._kept = self._kept, {}
        totals: dict[str, int] = {}
        for path, number in kept:
            totals[path] = max(totals.get(path, 0), number + 1)
        if self._is_stacked:
            for path in totals:
                passes = [(rule, rows) for (p, _), (rule, rows) in kept.items() if p == path]
                shapes = {tuple(rows.shape) for _, rows in passes}
                if len(shapes) > 1:
                    raise InputError(
                        f"the passes of {path!r} differ in shape ({sorted(shapes)}), and "
                        "cannot be stacked: do not pass passes=, and each pass has a separate "
                        "name"
                    )
                rule = passes[0][0]
                axis = 0 if rule.axis is None else 1
                stacked = torch.stack([rows for _, rows in passes], axis)
                self._store(path, 0, rule, stacked)
            return
        for (path, number), (rule, rows) in kept.items():
            if self._passes.admits(number, totals[path]):
                self._store(path, number, rule, rows)

    def _made_of(self, at: NodePass, rule: _Rule, value: Any) -> Tensor:
        """Return the rows, along the first dimension; without samples the value."""
        change = rule.change if isinstance(value, Tensor) or not rule.is_named else None
        if change is not None:
            with torch.no_grad():
                given = (value, self._batch) if rule.wants_batch else (value,)
                value = change(*given)
        if not isinstance(value, Tensor):
            if type(value) in (bool, int, float) and rule.axis is None:
                return torch.tensor(value)
            raise InputError(_no_tensor(at, value, change is not None))
        axis, size = rule.made_axis, self._size
        if axis is None:
            return value
        if not -value.dim() <= axis < value.dim() or value.shape[axis] != size:
            raise InputError(
                f"{(at.path or _OUTPUT)!r} returned a tensor of shape {tuple(value.shape)} for "
                f"a batch of {size} samples, which are not its axis {axis}: pass their axis as "
                "batch_axis=, or None to store the tensor once for each batch, or make rows "
                "of it with reduce="
            )
        return value if axis == 0 else value.movedim(axis, 0)

    def _store(self, path: str, number: int, rule: _Rule, rows: Tensor) -> None:
        key = path if self._is_single or not number else f"{path}:{number + 1}"
        dtype = self._settings.dtype
        if dtype is None or not rows.is_floating_point():
            dtype = rows.dtype
        if rule.axis is None:
            rows = rows.unsqueeze(0)
        if rows.requires_grad:  # a model can switch gradients on
            rows = rows.detach()
        self.filling.add(key, rule.asked, rows, rule.axis is not None, dtype)


def _no_tensor(at: NodePass, value: Any, is_reduced: bool) -> str:
    path = at.path or _OUTPUT
    inside = f"{path}.output" if at.path and at.module is not None else path
    made = ", reduced," if is_reduced else ""
    what = f"{path!r}{made} gave {type(value).__name__}"
    if isinstance(value, (tuple, list, Mapping)) and not is_reduced:
        part = next(iter(value), "key") if isinstance(value, Mapping) else "sub_0"
        return (
            f"{what}, but only tensors can be stored: name a part, such as '{inside}|{part}', "
            "or select one with reduce="
        )
    if type(value) in (bool, int, float):
        return f"{what}, one for the whole batch: pass batch_axis=None"
    return f"{what}, but only tensors can be stored: convert it with reduce="
