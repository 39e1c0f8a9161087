"""The base of statistics of a stream: they add rows, merge, save, and have a result."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError

__all__ = ["Count", "Statistic", "Tally", "UnitStatistic", "decoded", "encoded", "merge_states"]


class Statistic:
    """A statistic of a stream of rows, in memory that does not grow with the stream.

    Subclasses keep their state in attributes that are tensors, numbers, strings, None, or lists,
    tuples and dicts of these, and override `update`, `merge` and `result`. They check their
    arguments before they change anything.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Largest(bt.analysis.Statistic):
        ...     def __init__(self):
        ...         self.value = float("-inf")
        ...     def update(self, rows):
        ...         self.value = max([self.value, *rows.flatten().tolist()])
        ...     def merge(self, other):
        ...         self.value = max(self.value, other.value)
        ...     def result(self):
        ...         return self.value
        >>> largest = Largest()
        >>> largest.update(torch.tensor([1.0, 3.0]))
        >>> largest.update(torch.tensor([2.0]))
        >>> largest.result()
        3.0
    """

    _kinds: ClassVar[dict[str, type[Statistic]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Statistic._kinds[f"{cls.__module__}.{cls.__qualname__}"] = cls

    def update(self, rows: Tensor) -> None:
        """Add rows.

        Args:
            rows: `(n, *shape)`; one row for each sample; n may be 0.
        """
        raise NotImplementedError

    def merge(self, other: Self) -> None:
        """Add the rows of another statistic of the same kind and settings.

        Raises:
            InputError: it cannot be merged.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """Return the statistic."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, None, and containers of these."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.result()!r})"


class UnitStatistic(Statistic):
    """A statistic of each unit, for rows of one shape.

    Subclasses name their settings in `_settings`, those that only the result depends on in
    `_choices`, add rows of the right shape in `_take`, and merge another non-empty statistic in
    `_join`.
    """

    _settings: ClassVar[tuple[str, ...]] = ()
    _choices: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.count = 0
        self._shape: tuple[int, ...] | None = None

    def update(self, rows: Tensor) -> None:
        """Add rows, `(n, *shape)`.

        Raises:
            InputError: their shape differs from that of earlier rows.
        """
        rows = self._checked(rows)
        self._shape = tuple(rows.shape[1:])
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        raise NotImplementedError

    def _checked(self, rows: Tensor) -> Tensor:
        if rows.dim() == 0:
            raise InputError("rows need a dimension that counts them: pass (n, *shape)")
        shape = tuple(rows.shape[1:])
        if self._shape is not None and shape != self._shape:
            raise InputError(
                f"the statistic has units of shape {self._shape} so far, but these values have "
                f"{shape}: keep only dimensions whose sizes stay the same, such as keep=-1 or "
                "keep=()"
            )
        return rows.detach()

    def merge(self, other: Self) -> None:
        """Add the rows of another one.

        Raises:
            InputError: it has other settings, or its rows have another shape.
        """
        for name in self._settings:
            self._require_same(name, getattr(self, name), getattr(other, name))
        if self._shape is not None and other._shape is not None:
            self._require_same("the shape of the units", self._shape, other._shape)
        if other._shape is not None:
            if self._shape is None:
                self._take_over(other)
            elif other.count:
                self._join(other)

    def _take_over(self, other: Self) -> None:
        """Take the rows of another one in place of none."""
        own = {name: getattr(self, name) for name in self._choices}
        self.load_state_dict(other.state_dict())
        vars(self).update(own)

    def _require_same(self, name: str, mine: Any, theirs: Any) -> None:
        if isinstance(mine, Tensor):
            mine, theirs = mine.tolist(), theirs.tolist()
        if mine != theirs:
            raise InputError(f"{name} is {mine} here and {theirs} there: the two cannot be merged")

    def _join(self, other: Self) -> None:
        raise NotImplementedError


class Count(Statistic):
    """The number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> count = bt.analysis.Count()
        >>> count.update(torch.zeros(3, 2))
        >>> count.result()
        3
    """

    count: int

    def __init__(self) -> None:
        self.count = 0

    def update(self, rows: Tensor) -> None:
        """Add rows, `(n, *shape)`."""
        self.count += rows.shape[0]

    def merge(self, other: Self) -> None:
        """Add another count."""
        self.count += other.count

    def result(self) -> int:
        """Return the number of rows."""
        return self.count


class Tally(UnitStatistic):
    """The number of true rows of each unit, as integers.

    Attributes:
        count: the number of rows.

    Example:
        >>> import torch, bendtrace as bt
        >>> tally = bt.analysis.Tally()
        >>> tally.update(torch.tensor([[True, False], [True, True]]))
        >>> tally.result()
        tensor([2, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self._true: Tensor | None = None

    def _take(self, rows: Tensor) -> None:
        self._add(rows.to(torch.bool).sum(0), rows.shape[0])  # int64

    def _add(self, found: Tensor, count: int) -> None:
        known = self._true
        self._true = found if known is None else known + found.to(known.device)
        self.count += count

    def _join(self, other: Self) -> None:
        if other._true is not None:
            self._add(other._true, other.count)

    def result(self) -> Tensor:
        """Return the number of true rows, int64 with the shape of the units."""
        return torch.zeros((), dtype=torch.int64) if self._true is None else self._true.clone()


def merge_states(state: Any, other: Any) -> None:
    """Merge a state into another one: a statistic, or a dict or list of such states.

    Raises:
        InputError: they cannot be merged.
    """
    if type(state) is not type(other):
        raise InputError(
            f"a {type(other).__name__} cannot be added to a {type(state).__name__}: states "
            "need the same type"
        )
    if isinstance(state, Statistic):
        state.merge(other)
    elif isinstance(state, dict):
        for key, item in other.items():
            if key in state:
                merge_states(state[key], item)
            else:
                state[key] = copy.deepcopy(item)
    elif isinstance(state, (list, tuple)) and len(state) == len(other):
        for one, another in zip(state, other, strict=True):
            merge_states(one, another)
    else:
        raise InputError(
            f"cannot merge a {type(state).__name__}: keep a `Statistic` in the state, or "
            "override `merge_state`"
        )


def encoded(state: Any) -> Any:
    """Return a state as plain containers of tensors and numbers, which `torch.load` accepts.

    Example:
        >>> encoded({"seen": Count()})
        {'items': [('seen', {'statistic': 'bendtrace.analysis.streaming.statistic.Count',
        'values': {'count': 0}})]}
    """
    if isinstance(state, Statistic):
        cls = type(state)
        name = f"{cls.__module__}.{cls.__qualname__}"
        return {"statistic": name, "values": state.state_dict()}
    if isinstance(state, dict):
        return {"items": [(key, encoded(item)) for key, item in state.items()]}
    if isinstance(state, (list, tuple)):
        return {"list": [encoded(item) for item in state]}
    return {"value": state.clone() if isinstance(state, Tensor) else state}


def decoded(plain: Any) -> Any:
    """Return the state that `encoded` received; tuples come back as lists.

    Raises:
        InputError: it contains an unknown kind of statistic.

    Example:
        >>> decoded(encoded([Count()]))
        [Count(0)]
    """
    if "statistic" in plain:
        kind = Statistic._kinds.get(plain["statistic"])
        if kind is None:
            raise InputError(
                f"unknown kind of statistic, {plain['statistic']}: import the module that "
                "defines it"
            )
        made = kind.__new__(kind)
        made.load_state_dict(plain["values"])
        return made
    if "items" in plain:
        return {key: decoded(item) for key, item in plain["items"]}
    if "list" in plain:
        return [decoded(item) for item in plain["list"]]
    value = plain["value"]
    return value.clone() if isinstance(value, torch.Tensor) else value
