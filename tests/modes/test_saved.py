"""Each program recorded with all values, and their gradients: the run is what it is without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bendtrace as bt
from tests.modes.test_gradients import differentiated
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def saving(model: Any, **options: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return bt.trace(model, *args, save="all", **options, **kwargs).output

    return call


@each("border", "single", "corpus", share=12)
def test_a_run_that_is_saved_is_the_run_itself(program: Program) -> None:
    compare(program, "saved", saving)


@each("gradients", "single", "corpus", share=16, start=1)
def test_gradients_that_are_saved_are_those_of_the_run_itself(program: Program) -> None:
    compare(
        program, "saved gradients",
        lambda model: differentiated(saving(model, save_gradients=True)), differentiated,
    )  # fmt: skip
