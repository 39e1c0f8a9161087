"""Small models with data-dependent Python control flow, one `Case` each."""

from __future__ import annotations

from . import (
    arguments,
    branches,
    containers,
    contexts,
    decoding,
    dtypes,
    errors,
    functions,
    halting,
    indexing,
    iteration,
    loops,
    making,
    matching,
    modules,
    mutation,
    numerics,
    recursion,
    routing,
    scalars,
    seeds,
    sequences,
    shapes,
    state,
    vision,
)
from ._case import REGISTRY, Case

CASES: tuple[Case, ...] = tuple(REGISTRY.values())

__all__ = [
    "CASES",
    "Case",
    "arguments",
    "branches",
    "containers",
    "contexts",
    "decoding",
    "dtypes",
    "errors",
    "functions",
    "halting",
    "indexing",
    "iteration",
    "loops",
    "making",
    "matching",
    "modules",
    "mutation",
    "numerics",
    "recursion",
    "routing",
    "scalars",
    "seeds",
    "sequences",
    "shapes",
    "state",
    "vision",
]
