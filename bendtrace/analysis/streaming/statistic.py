"""What every statistic of a stream can do: take in rows, be added up, say its result."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bendtrace.errors import InputError

__all__ = ["Count", "Statistic", "decoded", "encoded", "merge_states"]


class Statistic:
    """What is known of a stream of rows, in memory that does not grow with the stream.

    Subclasses keep what they know in attributes that are tensors, numbers, strings, None, or
    lists, tuples and dicts of these, and override `update`, `merge` and `result`. They check what
    they are given before they change anything.

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
        """Take in rows.

        Args:
            rows: `(n, *shape)`; one row for each sample, n may be 0.
        """
        raise NotImplementedError

    def merge(self, other: Self) -> None:
        """Add what another statistic of the same kind and settings has taken in.

        Raises:
            InputError: it cannot be added.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """Return what is known."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return all that it holds: tensors, numbers, strings, None, and containers of these."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what another held, as `state_dict` returned it."""
        vars(self).update(copy.deepcopy(state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.result()!r})"


class Count(Statistic):
    """How many rows there were.

    Example:
        >>> import torch, bendtrace as bt
        >>> count = bt.analysis.Count()
        >>> count.update(torch.zeros(3, 2))
        >>> count.result()
        3
    """

    def __init__(self) -> None:
        self.count = 0

    def update(self, rows: Tensor) -> None:
        """Take in rows, `(n, *shape)`."""
        self.count += rows.shape[0]

    def merge(self, other: Self) -> None:
        """Add another count."""
        self.count += other.count

    def result(self) -> int:
        """Return how many rows there were."""
        return self.count


def merge_states(state: Any, other: Any) -> None:
    """Add what another state knows to a state: a statistic, or a dict or list of such states.

    Raises:
        InputError: they cannot be added.
    """
    if type(state) is not type(other):
        raise InputError(
            f"a {type(other).__name__} cannot be added to a {type(state).__name__}: states are of "
            "the same kind"
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
            f"how to add a {type(state).__name__} is not known: keep a `Statistic` in the state, "
            "or override `merge_state`"
        )


def encoded(state: Any) -> Any:
    """Return a state as plain containers of tensors and numbers, which `torch.load` takes.

    Example:
        >>> encoded({"seen": Count()})
        {'items': [('seen', {'statistic': 'bendtrace.analysis.streaming.statistic.Count',
        'values': {'count': 0}})]}
    """
    if isinstance(state, Statistic):
        cls = type(state)
        return {
            "statistic": f"{cls.__module__}.{cls.__qualname__}",
            "values": state.state_dict(),
        }
    if isinstance(state, dict):
        return {"items": [(key, encoded(item)) for key, item in state.items()]}
    if isinstance(state, (list, tuple)):
        return {"list": [encoded(item) for item in state]}
    return {"value": state.clone() if isinstance(state, Tensor) else state}


def decoded(plain: Any) -> Any:
    """Return the state that `encoded` was given; lists and tuples come back as lists.

    Raises:
        InputError: it holds a kind of statistic that is not known here.

    Example:
        >>> decoded(encoded([Count()]))
        [Count(0)]
    """
    if "statistic" in plain:
        kind = Statistic._kinds.get(plain["statistic"])
        if kind is None:
            raise InputError(
                f"a statistic {plain['statistic']} is not known: import the module that defines it"
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
