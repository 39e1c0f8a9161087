"""The promise with a backend: what eager gives, and that compiled paths gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

import bendtrace as bt
from tests.promise import Inputs, footprint, outcome, state

# Without measuring, which would leave it to the machine what is compared.
ALWAYS = {"drop_slower": False}


def assert_promise_with(
    backend: Any,
    make: Callable[[], Callable[..., Any]],
    calls: Iterable[Callable[[], Inputs]],
    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
) -> bt.BendedModule:
    """Call a model and its `BendedModule` with a backend in turn; compare bit by bit."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    model = make()
    bended = bt.BendedModule(model, backend=backend, backend_options=ALWAYS)
    for seed, inputs in enumerate(calls):
        with mode():
            wanted = outcome(eager, inputs(), seed)
            before = footprint()
            given = outcome(bended, inputs(), seed)
            assert footprint() == before, f"call {seed}"
        call = f"call {seed}"
        assert type(given[1]) is type(wanted[1]), f"{call}: {given[1]!r}, not {wanted[1]!r}"
        assert str(given[1]) == str(wanted[1]), call
        assert given[0] == wanted[0], f"{call}: another output"
        assert given[2] == wanted[2], f"{call}: other arguments afterwards"
        assert given[3] == wanted[3], f"{call}: another RNG state afterwards"
        assert state(model) == state(eager), f"{call}: other state afterwards"
    return bended


def states(bended: bt.BendedModule) -> list[str]:
    """Return what became of each path that was looked at."""
    return [row["state"] for row in bended.compiled]
