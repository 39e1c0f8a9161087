"""Each program with each replay done again by the model: right replays pass, and leave the same."""

from __future__ import annotations

import functools

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


@each("corpus", "border", share=5, start=2)
def test_right_replays_pass_and_leave_what_a_replay_leaves(program: Program) -> None:
    refusal = "such calls cannot be audited|cannot be copied"
    compare(program, "audited", functools.partial(bt.BendedModule, audit=1.0), refusal=refusal)
