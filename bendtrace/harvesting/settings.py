"""The settings of a harvest: checked at the door, and compared when it is gone on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bendtrace.errors import InputError
from bendtrace.harvesting.telling import told
from bendtrace.interject.passes import Passes
from bendtrace.interject.resolver import describe_where

__all__ = ["STACK", "Settings", "flat"]

STACK = "stack"
_REDUCTIONS = ("mean", "max", "last")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Settings:
    """What decides what is harvested, and how it is stored.

    Attributes:
        where: which nodes, as given, one by one.
        reduce: what is made of the values: None, a name, a function, or one for each node.
        feature_axis: which axis named reductions keep, besides that of the samples.
        passes: which passes of a node that is executed several times.
        batch_axis: which axis of a value counts the samples; None for a value of the batch as a
            whole; or one for each node.
        dtype: what floating point numbers are stored as; None for what they are.
        ids: where ids are from: None for running numbers.
        keep: parts of the batch to store, by name.
        allow_none: whether it is right that nothing is meant.
        seed: seed of the random numbers of each batch; None to leave them alone.
        shard_samples: how many samples close a shard.
        shard_bytes: how many bytes close a shard.
        form: the format of the files.
        is_dealt: whether the loader gives each process its own part.
    """

    where: tuple[Any, ...]
    reduce: Any
    feature_axis: int
    passes: Any
    batch_axis: Any
    dtype: torch.dtype | None
    ids: Any
    keep: Mapping[str, Any]
    allow_none: bool
    seed: int | None
    shard_samples: int
    shard_bytes: int
    form: str
    is_dealt: bool

    def __post_init__(self) -> None:
        named = {item for item in self.where if isinstance(item, str)}
        only_named = len(named) == len(self.where)
        for option, said in (("reduce", self.reduce), ("batch_axis", self.batch_axis)):
            if isinstance(said, Mapping) and only_named and not named >= said.keys():
                wrong = next(key for key in said if key not in named)
                raise InputError(f"{option}= is about {wrong!r}, which is not among where=")
        for rule in self.reduce.values() if isinstance(self.reduce, Mapping) else (self.reduce,):
            if rule is not None and rule not in _REDUCTIONS and not callable(rule):
                raise InputError(
                    f"reduce= takes {', '.join(map(repr, _REDUCTIONS))}, a function of the value, "
                    f"a dict of these for each node, or None; not {rule!r}"
                )
        axes = self.batch_axis
        for axis in axes.values() if isinstance(axes, Mapping) else (axes,):
            if axis is not None and type(axis) is not int:
                raise InputError(
                    "batch_axis= takes the number of an axis, None for what has no samples, or a "
                    f"dict of these for each node; not {axis!r}"
                )
        if type(self.feature_axis) is not int:
            raise InputError(f"feature_axis= takes the number of an axis, not {self.feature_axis}")
        if not (isinstance(self.passes, str) and self.passes == STACK):
            if isinstance(self.passes, str):
                raise InputError(f"passes= knows one word, {STACK!r}, and not {self.passes!r}")
            Passes(self.passes)
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise InputError(
                "dtype= is what floating point numbers are stored as: torch.float64, float32, "
                f"float16 or bfloat16, not {self.dtype!r}"
            )
        for option in ("shard_samples", "shard_bytes"):
            value = getattr(self, option)
            if type(value) is not int or value < 1:
                raise InputError(f"{option}= has to be a positive int, not {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise InputError(f"seed= has to be an int from 0 below 2^63, not {self.seed!r}")
        for name in self.keep:
            if not isinstance(name, str) or not name or "#" in name or not name.isprintable():
                raise InputError(f"keep= gives names, and {name!r} is none that can be stored")

    def told(self) -> dict[str, Any]:
        """Return them as plain values, to be compared with those of another time."""
        return {
            "where": [describe_where(item) for item in self.where],
            "reduce": told(self.reduce),
            "feature_axis": self.feature_axis,
            "passes": told(self.passes),
            "batch_axis": told(self.batch_axis),
            "dtype": None if self.dtype is None else str(self.dtype),
            "ids": told(self.ids),
            "keep": told(self.keep),
            "seed": self.seed,
            "shard_samples": self.shard_samples,
            "shard_bytes": self.shard_bytes,
            "format": self.form,
            "sharded": self.is_dealt,
        }


def flat(where: Any) -> Iterator[Any]:
    """Yield what was said one by one."""
    if isinstance(where, (list, tuple, set, frozenset)):
        for item in where:
            yield from flat(item)
    else:
        yield where
