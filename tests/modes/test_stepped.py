"""Each program gone through step by step: finishing it is calling the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def stepped(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run = bt.BendedModule.step(bt.BendedModule(model), *args, **kwargs)
        for position in range(0, len(run) + 1, 1 + len(run) // 3):
            _ = run.goto(position).variables
        return run.finish()

    return call


@each(share=24, start=1)
def test_finishing_a_run_after_looking_around_is_calling_the_model(program: Program) -> None:
    compare(program, "stepped", stepped, refusal="^this run cannot be stepped through: ")
