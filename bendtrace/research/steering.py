"""Steering vectors: differences of means, and adding them while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bendtrace.debug.calls import Call, as_rows, calls_of, own_copy, values_in_call
from bendtrace.errors import InputError, InterjectionError
from bendtrace.insert.bend import Expression, value_of
from bendtrace.insert.insertion import Insertion, Report
from bendtrace.insert.interjection import Effect, Inputs, Interjection, NodePass, depends_on
from bendtrace.insert.leaves import describe
from bendtrace.insert.patch_kinds import is_constant_index
from bendtrace.insert.registry import InsertionGroup, InsertionHandle, is_root
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.where import Where
from bendtrace.log.nodes import NodePath
from bendtrace.module import BendedModule, bended_of, required_bended
from bendtrace.record.redirection import redirect_target
from bendtrace.tape.tape import TensorMeta


@dataclass(frozen=True)
class SteeringVectors:
    """Directions, by node path, and the means whose differences they are.

    Attributes:
        vectors: a vector for each node, with the size of its last axis.
        positive: the mean over the positive examples, in double precision.
        negative: the mean over the negative ones.
        counts: the number of examples in each set, positive first.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 1))
        >>> one, other = torch.tensor([[1.0, 3.0], [3.0, 3.0]]), torch.zeros(4, 2)
        >>> found = bt.workflows.steering_vector(model, one, other, "0", position=None)
        >>> found
        <SteeringVectors of 2 and 4 examples: sub_0: norm 3.606>
        >>> found["sub_0"], found.positive["sub_0"], found.counts
        (tensor([2., 3.]), tensor([2., 3.], dtype=torch.float64), (2, 4))
    """

    vectors: dict[str, Tensor]
    positive: dict[str, Tensor] = field(repr=False)
    negative: dict[str, Tensor] = field(repr=False)
    counts: tuple[int, int]

    @property
    def vector(self) -> Tensor:
        """The vector, if there is only one.

        Raises:
            InputError: there are several.
        """
        if len(self.vectors) != 1:
            listed = ", ".join(map(repr, self.vectors))
            raise InputError(f"there are several vectors: name one of {listed}")
        return next(iter(self.vectors.values()))

    def __getitem__(self, path: str) -> Tensor:
        return self.vectors[path]

    def __repr__(self) -> str:
        shown = ", ".join(f"{path}: norm {v.norm():.4g}" for path, v in self.vectors.items())
        return f"<SteeringVectors of {self.counts[0]} and {self.counts[1]} examples: {shown}>"


def steering_vector(
    model: Callable[..., Any],
    positive: Any,
    negative: Any,
    where: Where,
    *,
    position: int | slice | Callable[[Tensor, Call], Tensor] | None = -1,
    reduce: str | Callable[[Tensor, Tensor], Tensor] = "mean",
) -> SteeringVectors:
    """Return the difference of the means of activations over two sets of inputs.

    The direction of Turner et al., "Activation Addition" (2023), and of Rimsky et al., "Steering
    Llama 2 via Contrastive Activation Addition" (2023). Batches are run one by one; only sums
    in double precision are kept.

    Args:
        model: a module, a function or a `BendedModule`.
        positive: inputs (see `Call.of`), or a list or another iterable of inputs, such as a
            `DataLoader`. A tuple is the arguments of one call.
        negative: the same for the other set.
        where: nodes; see `BendedModule.interject`. The output of each has to be one tensor.
        position: the position on the second axis, for values with three or more axes (batch,
            position, size); a slice for the mean over several; None for the mean over all axes but
            the last; or a function of the value and the `Call` (to use its attention mask, for
            example) that returns a row for each example: (examples, size).
        reduce: "mean", or a function of all rows of both sets, (examples, size) each, that returns
            a vector. The function needs all rows in memory.

    Returns:
        `SteeringVectors`, for each node and pass.

    Raises:
        InputError: an option is invalid, a set is empty, or the output of a node does not fit.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 1))
        >>> one, other = torch.tensor([[1.0, 3.0], [3.0, 3.0]]), torch.zeros(4, 2)
        >>> found = bt.workflows.steering_vector(model, one, other, "0", position=None)
        >>> found.vector
        tensor([2., 3.])
    """
    if reduce != "mean" and not callable(reduce):
        raise InputError(
            f"reduce= has to be 'mean' or a function of the rows of both sets, not {reduce!r}"
        )
    if isinstance(position, bool) or not (
        position is None or isinstance(position, (int, slice)) or callable(position)
    ):
        raise InputError(
            "position= has to be a position, a slice, None or a function of the value, not "
            f"{position!r}"
        )
    bended = bended_of(model)
    one, other = (
        _Sums(bended, batches, where, position, callable(reduce))
        for batches in (positive, negative)
    )
    for mine, theirs in ((one, other), (other, one)):
        mine.name_as(theirs)
    if one.totals.keys() != other.totals.keys():
        odd = min(one.totals.keys() ^ other.totals.keys())
        raise InputError(f"only one of the two sets reaches {odd!r}: the paths differ")
    vectors = {}
    for path in _passes_in_order(one.totals):
        if callable(reduce):
            made = reduce(torch.cat(one.rows[path]), torch.cat(other.rows[path]))
            if not isinstance(made, Tensor) or made.dim() != 1:
                raise InputError(f"reduce= has to return a vector, not {describe(made)}")
            vectors[path] = made
        else:
            vectors[path] = (one.mean(path) - other.mean(path)).to(one.dtypes[path])
    first, second = ({path: sums.mean(path) for path in vectors} for sums in (one, other))
    counts = max(one.counts.values()), max(other.counts.values())
    return SteeringVectors(vectors, first, second, counts)


def _passes_in_order(paths: Iterable[str]) -> list[str]:
    """Return node paths with the passes of each one after another."""
    split = [path.partition(":") for path in paths]
    nodes = {node: place for place, (node, _, _) in reversed([*enumerate(split)])}
    split.sort(key=lambda parts: (nodes[parts[0]], int(parts[2] or 0)))
    return ["".join(parts) for parts in split]


class _Sums:
    """Sums over the outputs of nodes, along a loader."""

    def __init__(
        self, bended: BendedModule, batches: Any, where: Any, position: Any, keeps_rows: bool
    ) -> None:
        self.totals: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.rows: dict[str, list[Tensor]] = {}
        for call in map(own_copy, calls_of(batches)):  # a cache in it would grow with each call
            with torch.no_grad():
                found = values_in_call(bended, call, where)
            for path, value in found.items():
                rows = _rows_at(value, call, position, path)
                self.dtypes.setdefault(path, value.dtype)
                total = rows.to(torch.float64).sum(0)
                if not callable(position):
                    rows = rows.to(value.dtype)
                self._add(path, total, len(rows), [rows] if keeps_rows else [])
        self.name_as(self)
        if not any(self.counts.values()):
            raise InputError(f"no example of one of the two sets reaches {where!r}")

    def _add(self, path: str, total: Tensor, count: int, rows: list[Tensor]) -> None:
        self.totals[path] = self.totals[path] + total if path in self.totals else total
        self.counts[path] = self.counts.get(path, 0) + count
        self.rows.setdefault(path, []).extend(rows)

    def name_as(self, other: _Sums) -> None:
        """Call the only pass of some calls the first, where others have several."""
        for path in [path for path in self.totals if f"{path}:1" in other.totals]:
            first = f"{path}:1"
            self._add(first, self.totals.pop(path), self.counts.pop(path), self.rows.pop(path))
            self.dtypes[first] = self.dtypes.pop(path)

    def mean(self, path: str) -> Tensor:
        """Return the mean of the rows of a node, in double precision."""
        return self.totals[path] / self.counts[path]


def _rows_at(given: Any, call: Call, position: Any, path: str) -> Tensor:
    value = as_rows(given, path, "position")
    if callable(position):
        return as_rows(value, path, "position", position(value, call))
    if position is None:
        return _mean(value) if value.dim() > 2 else value
    if value.dim() < 3:
        raise InputError(
            f"{path} has shape {tuple(value.shape)}, which has no axis of positions: pass "
            "position=None"
        )
    try:
        taken = value[:, position]
    except IndexError:
        raise InputError(
            f"there is no position {position} in the output of {path}, {tuple(value.shape)}"
        ) from None
    if isinstance(position, slice) and not taken.shape[1]:
        raise InputError(
            f"{position} selects nothing in the output of {path}, {tuple(value.shape)}"
        )
    return _mean(taken) if taken.dim() > 2 else taken


def _mean(value: Tensor) -> Tensor:
    """Return the mean over all axes but the first and the last, in double precision."""
    return value.flatten(1, -2).mean(1, dtype=torch.float64)


class _Steps(Interjection):
    """Counts the calls of the model within one call of a method of it, such as `generate`."""

    observes = True
    blind = True
    self_contained = True
    deferrable = True  # where steps matter, what is added has no effect to be compiled
    label = "steps"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generation: object = None
        self._counting = False
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the step: 0 before the first call of the model."""
        # A part of the model, such as an encoder, can be called before the model itself.
        return self._number if self._current() is self._generation else 0

    def before(self, at: NodePass, inputs: Inputs) -> None:
        generation = self._current()
        is_same = generation is not None and generation is self._generation
        self._number = self._number + 1 if is_same else 0
        self._generation = generation

    def _current(self) -> object:
        """Return the identity of the present generation; None outside of any."""
        if self._counting:
            return self
        # It is kept here, so that another one cannot have its identity.
        return redirect_target(self._model)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within it, calls of the model are the steps of one generation."""
        if self._counting:
            raise InputError("the steps of a generation are counted already")
        self._counting, self._generation, self._number = True, None, 0
        try:
            yield
        finally:
            self._counting, self._generation, self._number = False, None, 0


@dataclass(eq=False, repr=False)
class _Adds(Interjection):
    vector: Tensor | Expression
    scale: Any
    positions: Any
    steps: Callable[[int], bool]
    counter: _Steps
    normalise: str | None

    self_contained = True
    label = "steer"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        if self.steps is not _always and not self.steps(self.counter.number):
            return None
        if not isinstance(output, Tensor):
            raise _error(
                at,
                f"the value is {describe(output)}; name the tensor in it, such as "
                f"'{at.path}.output|sub_0'",
            )
        vector, scale = value_of(self.vector), value_of(self.scale)
        positions = self.positions(output) if callable(self.positions) else self.positions
        return self._steer(output, vector, scale, positions, at, self._plus)

    def _steer(
        self,
        value: Tensor,
        vector: Any,
        scale: Any,
        positions: Any,
        at: NodePass,
        add: Callable[[Tensor, Tensor, NodePass], Tensor],
    ) -> Tensor:
        vector = vector.to(device=value.device, dtype=value.dtype)
        if self.normalise == "vector":
            vector = vector / vector.norm(dim=-1, keepdim=True)
        if positions is None:
            return add(value, scale * vector, at)
        index = _position_index(positions, value, at)
        made = value.clone()
        made[index] = add(value[index], scale * vector, at)
        return made

    @depends_on("vector", "scale", "positions", "normalise")
    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return its effect on a tensor."""
        if self.steps is not _always:
            return "it depends on the step of a generation"
        if not is_constant_index(self.positions):
            return "its positions depend on more than numbers"
        vector, scale = value_of(self.vector), value_of(self.scale)
        if not isinstance(vector, Tensor) or not vector.dim():
            return "its vector has no axis"
        if isinstance(scale, Tensor):
            given: tuple[Any, ...] = (vector, scale)
        elif type(scale) is float and like.dtype.is_floating_point:
            given = vector, torch.tensor(scale, dtype=torch.float64)
        else:
            given = (vector,)

        def steered(value: Tensor, vector: Tensor, factor: Any = scale) -> Tensor:
            return self._steer(value, vector, factor, self.positions, at, self._sum)

        plain = None if len(given) == 2 else repr(scale)
        key = _Adds, repr(self.positions), self.normalise, plain, isinstance(scale, Tensor)
        return Effect(steered, given, key)

    def _plus(self, value: Tensor, added: Tensor, at: NodePass) -> Tensor:
        try:
            return self._sum(value, added, at)
        except RuntimeError:
            raise _unfit_vector(value, added, at) from None

    def _sum(self, value: Tensor, added: Tensor, at: NodePass) -> Tensor:
        made = value + added
        if made.shape != value.shape:
            raise _unfit_vector(value, added, at)
        if self.normalise == "value":
            made = made * (value.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True))
        return made


def _unfit_vector(value: Tensor, added: Tensor, at: NodePass) -> InterjectionError:
    return _error(
        at, f"a vector of shape {tuple(added.shape)} cannot be added to {tuple(value.shape)}"
    )


def _error(at: NodePass, text: str) -> InterjectionError:
    return InterjectionError(f"steer at {at.path}: {text}", at.path)


def _always(number: int) -> bool:
    return True


def _position_index(positions: Any, value: Tensor, at: NodePass) -> Any:
    """Return an index of positions of the second axis."""
    if value.dim() < 2:
        raise _error(at, f"{tuple(value.shape)} has no axis of positions; do not pass positions=")
    if isinstance(positions, slice):
        return slice(None), positions
    if isinstance(positions, Tensor) and positions.dtype is torch.bool:
        if positions.shape == value.shape[1:2]:
            return slice(None), positions.to(value.device)
        if positions.shape == value.shape[:2]:
            return positions.to(value.device)
        raise _error(
            at,
            f"a mask of shape {tuple(positions.shape)} fits neither the "
            f"positions nor the examples and positions of {tuple(value.shape)}",
        )
    several = [positions] if isinstance(positions, int) else positions
    if isinstance(positions, Tensor):
        several = positions.flatten().tolist()
    elif any(isinstance(p, bool) for p in several):
        raise _error(
            at, f"{positions!r} are truth values, not positions: return a mask as a tensor"
        )
    listed = [int(p) for p in several]
    length = value.shape[1]
    beyond = [p for p in listed if not -length <= p < length]
    if beyond:
        raise _error(
            at,
            f"there is no position {beyond[0]}, this pass has {length}; "
            "with a cache later passes only see new tokens: pass steps='prompt', or positions "
            "from the end",
        )
    return slice(None), torch.tensor(listed, device=value.device)


class Steering(InsertionHandle):
    """Vectors that are added while the model runs, until they are removed; a context manager.

    Attributes:
        model: the `BendedModule` to call.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()))
        >>> steering = bt.workflows.steer(bended, torch.tensor([1.0, -1.0]), "0")
        >>> steering(torch.zeros(1, 2))
        tensor([[1., 0.]])
        >>> steering.reports()
        [steer at '0': called once at 1 node
          sub_0: once, changed the value once]
        >>> steering.remove()
        >>> steering, bended(torch.zeros(1, 2))
        (<Steering at '0', removed>, tensor([[0., 0.]]))
    """

    def __init__(self, bended: BendedModule, group: InsertionGroup, counter: _Steps) -> None:
        super().__init__(bended, group)
        self._counter = counter

    def reports(self) -> list[Report]:
        """Return for each vector the nodes where it was called, and whether it changed anything."""
        return [insertion.report() for insertion in self._vectors]

    @property
    def _vectors(self) -> list[Insertion]:
        return [one for one in self._group.insertions if one.what is not self._counter]

    def generation(self) -> AbstractContextManager[None]:
        """Treat calls within this context as the steps of one generation, the first as the prompt.

        For loops written by hand: within `generate()`, and every other method of the model, steps
        are always counted.
        """
        return self._counter.counted()

    def __repr__(self) -> str:
        where = ", ".join(describe_where(insertion.where) for insertion in self._vectors)
        active = all(insertion.active for insertion in self._vectors)
        return f"<Steering at {where}{'' if active else ', removed'}>"


def steer(
    model: BendedModule,
    vectors: Tensor | Expression | Mapping[str, Tensor] | SteeringVectors,
    where: Where | None = None,
    *,
    scale: float | Tensor | Expression = 1.0,
    positions: Any = None,
    steps: Any = "all",
    normalise: bool | str = False,
) -> Steering:
    """Add vectors to the outputs of nodes, from now on: `value + scale * vector`.

    Args:
        model: a `BendedModule`.
        vectors: a vector with the size of the last axis (or any value that can be added), or
            several by node path. A `BendingParameter` can be changed while it is inserted.
        where: the nodes, for one vector; see `BendedModule.interject`. Not allowed with several.
        scale: a number, or a `BendingParameter`.
        positions: the positions on the second axis of the current pass's output: a number (negative
            ones from the end), several, a slice, a mask of positions or of examples and positions,
            or a function of the value that returns one of these. None for all. With a cache, passes
            after the prompt have one position.
        steps: the calls of the model within one call of `generate` (or another method): "all",
            "prompt" (the first one), "new" (the others), numbers counted from 0, a slice (`slice(2,
            None)`: from step 2 on), or a function of the number. A direct call of the model is a
            prompt; see `Steering.generation` for your own loops.
        normalise: "vector" (or True) to scale the vector to length 1 first, "value" to scale the
            sum to the length of the original value, position by position.

    Returns:
        A handle, which is also a context manager.

    Raises:
        InputError: an argument is invalid.
        NodePathError: `where` matches no node.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()))
        >>> x = torch.zeros(1, 3, 2)
        >>> with bt.workflows.steer(bended, torch.tensor([1.0, -1.0]), "0", scale=2, positions=-1):
        ...     bended(x)
        tensor([[[0., 0.],
                 [0., 0.],
                 [2., 0.]]])
    """
    wanted = _by_place(vectors, where)
    chosen = _chooser(steps)
    if normalise not in (False, True, None, "vector", "value"):
        raise InputError(f"normalise= has to be 'vector', 'value' or False, not {normalise!r}")
    norm = "vector" if normalise is True else normalise or None
    if isinstance(scale, bool) or not isinstance(scale, (int, float, Tensor, Expression)):
        raise InputError(f"scale= has to be a number or a BendingParameter, not {scale!r}")
    if isinstance(positions, (list, tuple, range)) and positions:
        fits = all(isinstance(p, int) and not isinstance(p, bool) for p in positions)
    elif isinstance(positions, Tensor):
        fits = not positions.is_floating_point()
    else:
        fits = positions is None or isinstance(positions, (int, slice)) or callable(positions)
    if not fits or isinstance(positions, bool):
        raise InputError(
            "positions= takes numbers, a slice, a mask or a function of the value, not "
            f"{positions!r}"
        )
    bended = required_bended(model, "what is steered")
    counter, group = _Steps(bended.model), InsertionGroup(bended)
    if chosen is not _always:
        group.make(is_root, counter, allow_none=True)
    for place, vector in wanted:
        group.make(place, _Adds(vector, scale, positions, chosen, counter, norm))
    return Steering(bended, group, counter)


def _by_place(vectors: Any, where: Any) -> list[tuple[Any, Any]]:
    if isinstance(vectors, SteeringVectors):
        own = {NodePath(path): vector for path, vector in vectors.vectors.items()}
        vectors = own if where is None else vectors.vector
    if isinstance(vectors, Mapping):
        if not vectors:
            raise InputError("no vectors were given")
        if where is not None:
            raise InputError("vectors by node path already name their nodes: do not pass where=")
        found = list(vectors.items())
    elif where is None:
        raise InputError("pass the nodes at which to add the vector as where=")
    else:
        found = [(where, vectors)]
    for _, vector in found:
        if not isinstance(vector, (Tensor, Expression)):
            raise InputError(
                f"a steering vector has to be a tensor or a BendingParameter, not {vector!r}"
            )
        value = value_of(vector)
        if not isinstance(value, Tensor) or not value.dim():
            raise InputError(f"a steering vector needs at least one axis, and {value!r} has none")
    return found


def _chooser(steps: Any) -> Callable[[int], bool]:
    if steps == "all" or steps is None:
        return _always
    if steps == "prompt":
        return lambda number: number == 0
    if steps == "new":
        return lambda number: number > 0
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0:
        return lambda number: number == steps
    if isinstance(steps, slice):
        start, stop, step = steps.start or 0, steps.stop, steps.step or 1
        parts = [part for part in (start, stop, step) if part is not None]
        if all(type(part) is int and part >= 0 for part in parts) and step > 0:
            return lambda number: (
                number >= start and (stop is None or number < stop) and (number - start) % step == 0
            )
    elif isinstance(steps, (list, tuple, set, frozenset, range)):
        numbers = frozenset(steps)
        if all(type(number) is int and number >= 0 for number in numbers):
            return lambda number: number in numbers
    elif callable(steps):
        return lambda number: bool(steps(number))
    raise InputError(
        "steps= has to be 'all', 'prompt', 'new', numbers counted from 0, a slice without "
        f"negative numbers, or a function of the number, not {steps!r}: the last step is not "
        "known in advance"
    )
