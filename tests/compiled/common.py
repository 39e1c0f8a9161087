"""The promise with a backend: what eager gives, and that compiled paths gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

import bendtrace as bt
from tests.promise import Inputs, assert_promise

# Without measuring, which would leave it to the machine what is compared.
ALWAYS = {"drop_slower": False}


def assert_promise_with(
    backend: Any,
    make: Callable[[], Callable[..., Any]],
    calls: Iterable[Callable[[], Inputs]],
    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
) -> bt.BendedModule:
    """Call a model and its `BendedModule` with a backend in turn; compare bit by bit."""
    return assert_promise(
        make, calls, mode=mode,
        wrap=lambda model: bt.BendedModule(model, backend=backend, backend_options=ALWAYS),
    )  # fmt: skip


def states(bended: bt.BendedModule) -> list[str]:
    """Return what became of each path that was looked at."""
    return [row["state"] for row in bended.compiled]
