"""Which cases the shortest run has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.conftest import _drawn, _needed_option, _of_today, pytest_xdist_make_scheduler


class Item(NamedTuple):
    """A case, as pytest collects it."""

    nodeid: str
    markers: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


CASES: list[Any] = [
    Item("a.py::test_alone"),
    *(Item(f"a.py::test_several[{number}]") for number in range(5)),
    Item("a.py::test_several[long]", ("all",)),
    Item("a.py::test_long", ("more",)),
    *(Item(f"a.py::test_guards[{number}]", ("each",)) for number in range(3)),
]


def of_day(day: str) -> list[str]:
    drawn = _drawn(CASES, day)
    return [item.nodeid for item in CASES if _needed_option(item, drawn) is None]


def test_the_shortest_run_has_one_case_of_each_test_and_all_guards() -> None:
    found = of_day("2026-01-01")
    assert found == of_day("2026-01-01")
    assert found[0] == "a.py::test_alone"
    assert found[2:] == [f"a.py::test_guards[{number}]" for number in range(3)]


def test_days_draw_all_cases_in_turn_but_those_of_longer_runs() -> None:
    drawn = {of_day(f"2026-01-{day:02}")[1] for day in range(1, 32)}
    assert drawn == {f"a.py::test_several[{number}]" for number in range(5)}


@pytest.mark.parametrize(
    ("item", "option"),
    [(CASES[6], "--all"), (CASES[7], "--more"), (CASES[1], "--more")],
    ids=["sweep", "long", "not drawn"],
)
def test_the_others_need_an_option(item: Any, option: str) -> None:
    assert _needed_option(item, set()) == option


def test_of_tests_with_many_cases_each_day_runs_a_ninth() -> None:
    few: list[Any] = [(Item(f"a.py::test_few[{number}]"), "--more") for number in range(12)]
    many: list[Any] = [(Item(f"a.py::test_many[{number}]"), "--more") for number in range(120)]
    others: list[Any] = [(Item("a.py::test_many[drawn]"), None), (Item("a.py::test_long"), "--all")]
    days = [_of_today([*few, *many, *others], f"2026-01-0{day}") for day in range(1, 10)]
    for one, two in itertools.pairwise([*days, days[0]]):
        assert one & two == {item.nodeid for item, _ in few}
        assert 3 < len(one - two) < 30
    assert set().union(*days) == {item.nodeid for item, _ in (*few, *many)}


@pytest.mark.parametrize("brief", [True, False])
def test_the_shortest_run_gives_each_file_to_one_worker(brief: bool) -> None:
    scheduling = pytest.importorskip("xdist.scheduler")
    config: Any = SimpleNamespace(
        option=SimpleNamespace(brief=brief), getvalue=lambda name: ["popen", "popen"]
    )
    found = pytest_xdist_make_scheduler(config, None)
    assert isinstance(found, scheduling.LoadFileScheduling) is brief
