"""Drawing random programs in a process of its own: `python -m tools.scoreboard.drawing 0`.

What hypothesis draws depends on the modules that are imported, in whose source it looks for
constants. Here they are always the same.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

__all__ = ["BATCH", "programs_of"]

BATCH = 50


def programs_of(batch: int) -> list[Any]:
    """Return the programs of a batch, the same in each process."""
    from tools.generator import Call, Program

    command = [sys.executable, "-W", "ignore", "-m", "tools.scoreboard.drawing", str(batch)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        Program(d["source"], tuple(Call(**c) for c in d["calls"]), d["world"], tuple(d["told"]))
        for d in map(json.loads, lines)
    ]


def _draw(batch: int) -> None:
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings

    from tools.generator import Program, programs

    found: list[Program] = []

    @hypothesis.seed(1_000_003 + batch)
    @settings(
        max_examples=BATCH, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(statements=12))
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    for program in (found * BATCH)[:BATCH]:
        print(json.dumps(dataclasses.asdict(program)))


if __name__ == "__main__":
    _draw(int(sys.argv[1]))
