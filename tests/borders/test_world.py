"""State outside of the model: whatever eager gives when it changes, a `BendedModule` gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import bendtrace as bt
from tests.borders.world.kinds import programs
from tests.borders.world.programs import PROGRAMS
from tests.borders.world.world import Program, check, check_behind_a_branch
from tests.shares import some

_MADE = dict(programs())


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    """Run finalizers of what these programs have left, not in the runs of other tests."""
    yield
    gc.collect()


@pytest.mark.parametrize("program", some(_MADE.values(), 8), ids=list(_MADE))
def test_state_is_what_it_is_in_eager(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path)


@pytest.mark.parametrize("program", some(PROGRAMS.values(), 3), ids=list(PROGRAMS))
def test_code_and_the_world_are_as_in_eager(program: Program, tmp_path: Path) -> None:
    check(program, tmp_path)


_EACH = [*enumerate([*_MADE, *PROGRAMS])]


@pytest.mark.parametrize(
    ("plan", "name"),
    some(_EACH, 40, chosen=lambda case: "tensor_method" in case[1]),
    ids=[name for _, name in _EACH],
)
def test_code_behind_a_branch_is_as_in_eager(plan: int, name: str, tmp_path: Path) -> None:
    check_behind_a_branch({**_MADE, **PROGRAMS}[name], tmp_path, plan)


@pytest.mark.parametrize("kind", ["counter", "deque", "array", "optimizer", "dataclass", "method"])
@pytest.mark.parametrize("place", ["global", "helper", "attribute", "registry", "default"])
def test_what_changes_between_calls_is_replayed_meanwhile(
    kind: str, place: str, tmp_path: Path
) -> None:
    bended = check(_MADE[f"{kind}-{place}-between"], tmp_path)
    assert bended.stats.replays >= 3, (bended.stats, bended.why_live)
    assert bended.stats.live == 0


def test_code_that_was_not_foreseen_is_known_after_one_live_call(tmp_path: Path) -> None:
    bended = check(PROGRAMS["singledispatch-reads"], tmp_path)
    assert bended.stats == bt.Stats(traces=3, replays=2, retraces=2, live=1)


def test_a_reason_to_run_live_names_the_line(tmp_path: Path) -> None:
    bended = check(PROGRAMS["clock_time"], tmp_path)
    (reason,) = bended.why_live
    assert "time.time at " in reason
    assert "main.py:" in reason
