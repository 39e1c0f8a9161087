"""State outside of the model: whatever eager gives when it changes, a `BendedModule` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.borders.world.kinds import programs
from tests.borders.world.world import Program, check

_PROGRAMS = dict(programs())


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=_PROGRAMS)
def test_state_is_what_it_is_in_eager(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path)
