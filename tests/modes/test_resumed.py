"""Each program recorded or resumed by script where a replay would do."""

from __future__ import annotations

import bendtrace as bt
from tests.past_joins import past_joins, resumed_anywhere
from tests.registry.comparing import compare, each
from tests.registry.program import Program


@each(share=7, start=1)
def test_recorded_past_joins_it_does_what_is_known(program: Program) -> None:
    with past_joins():
        compare(program, "joined", bt.BendedModule)


@each(share=7, start=2)
def test_resumed_anywhere_it_does_what_is_known(program: Program) -> None:
    with resumed_anywhere(1):
        compare(program, "resumed", bt.BendedModule)
