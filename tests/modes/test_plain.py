"""Each program as it is: what eager gives, and calls that are served as the program says."""

from __future__ import annotations

from typing import Any

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


@each()
def test_it_gives_what_eager_gives(program: Program) -> None:
    made: list[bt.BendedModule] = []

    def wrap(model: Any) -> bt.BendedModule:
        made.append(bt.BendedModule(model))
        return made[-1]

    compare(program, "plain", wrap)
    if program.served is not None:
        program.served(made[0])
