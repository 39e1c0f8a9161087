"""The scoreboard: its programs are right for us, and it notices what is wrong."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.documents import ROOT
from tests.registry.issues import ISSUES
from tests.shares import some
from tools.scoreboard.__main__ import main
from tools.scoreboard.case import KINDS, Case, Step, Wrap, tried
from tools.scoreboard.judging import agree, is_repeatable, judge, truth
from tools.scoreboard.page import OUTCOMES, Report, figure, summary, write_page
from tools.scoreboard.suites import SUITES, suite_of
from tools.scoreboard.supervising import Supervisor
from tools.scoreboard.ways import OURS, WAYS, Way

WAY = {way.name: way for way in WAYS}

# The programs


@pytest.mark.parametrize("name", some([issue.name for issue in ISSUES], 4))
def test_what_was_wrong_elsewhere_is_right_here(name: str) -> None:
    case = suite_of("issues").case(name, None)
    wanted = truth(case)
    assert isinstance(wanted, list), f"eager itself: {wanted!r}"
    assert len(wanted) > 1
    result = judge(case, WAY[OURS], wanted)
    assert result.outcome == "right", result.why
    assert result.right == result.calls


def test_there_are_sixty_issues_each_with_its_own_number() -> None:
    assert len({issue.url for issue in ISSUES}) == len(ISSUES) >= 60
    assert all(issue.about and issue.number > 0 for issue in ISSUES)


@pytest.mark.parametrize(
    ("suite", "name"),
    some(
        [
            ("corpus", "while_true"),
            ("random", "1-3"),
            ("exportdb", "list_unpack"),
            ("module_db", "nn.GRU"),
            ("op_db", "cumsum"),
            ("transformers", "albert"),
        ],
        chosen=[("corpus", "while_true"), ("random", "1-3"), ("exportdb", "list_unpack")],
    ),
)
def test_a_program_of_each_suite_is_right_and_the_same_each_time(suite: str, name: str) -> None:
    pytest.importorskip(suite_of(suite).package)
    case = suite_of(suite).case(name, None)
    wanted = truth(case)
    assert isinstance(wanted, list), f"eager itself: {wanted!r}"
    assert wanted[0].kind == "traced"
    again = judge(case, Way(OURS, lambda model: model), wanted)
    assert again.outcome == "right", again.why  # exactly
    assert judge(case, WAY[OURS], wanted).outcome == "right"


# What is noticed


class Mode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x - 1


def turned(wrap: Wrap) -> Iterator[Step]:
    model = Mode()
    call = wrap(model)
    yield Step("traced", call(torch.ones(2)))
    yield Step("inputs", call(torch.ones(3)))
    model.eval()
    yield Step("change", call(torch.ones(2)))


CASE = Case("issues", "turned", turned)


def judged(way: Way) -> Any:
    return judge(CASE, way, truth(CASE))


def test_a_captured_mode_is_silently_wrong_after_a_change_only() -> None:
    result = judged(WAY["torch.fx"])
    assert result.outcome == "wrong"
    assert result.right == {"traced": 1, "inputs": 1, "change": 0}
    assert result.calls == {"traced": 1, "inputs": 1, "change": 1}
    assert "call 2 (change)" in result.why
    assert judged(WAY[OURS]).outcome == "right"


def test_an_error_that_eager_does_not_raise_is_a_refusal() -> None:
    def refuses(model: Any) -> Any:
        def call(*args: Any) -> Any:
            raise NotImplementedError("no loops")

        return call

    result = judged(Way("other", refuses))
    assert (result.outcome, result.why) == ("refused", "NotImplementedError: no loops")
    assert not any(result.right.values())
    ours = judged(Way(OURS, refuses))  # which says nothing, since it is no error of ours
    assert ours.outcome == "wrong"


def test_live_calls_are_counted_with_their_reason() -> None:
    def drive(wrap: Wrap) -> Iterator[Step]:
        call = wrap(lambda x: x * next(numbers))
        numbers = (n for n in range(9))
        for kind in KINDS:
            yield Step(kind, tried(call, torch.ones(2)))

    case = Case("corpus", "a generator", drive)
    result = judge(case, WAY[OURS], truth(case))
    assert (result.outcome, result.live) == ("right", 3)
    assert "generator" in result.why_live
    report = summary([vars(result)], {"not run": 0})
    assert report.live == {"corpus": 1}
    assert "100.0%" in report.live_table().text()


def test_a_refusal_that_the_program_catches_is_one_too() -> None:
    def drive(wrap: Wrap) -> Iterator[Step]:
        yield Step("traced", (tried(wrap(torch.sin), torch.ones(2)), 1))

    def refuses(model: Any) -> Any:
        return lambda x: model(x, no=1)

    case = Case("issues", "tried", drive)
    assert judge(case, Way("other", refuses), truth(case)).outcome == "refused"


def test_a_program_that_differs_each_time_is_noticed() -> None:
    numbers = itertools.count()

    def drive(wrap: Wrap) -> Iterator[Step]:
        yield Step("traced", wrap(lambda x: x)(torch.tensor(float(next(numbers)))))

    case = Case("corpus", "another each time", drive)
    wanted = truth(case)
    assert isinstance(wanted, list)
    assert not is_repeatable(case, wanted)
    same = suite_of("corpus").case("while_true", None)
    steps = truth(same)
    assert isinstance(steps, list)
    assert is_repeatable(same, steps)


def test_a_program_that_eager_does_not_run_is_invalid() -> None:
    def drive(wrap: Wrap) -> Iterator[Step]:
        raise ZeroDivisionError
        yield

    case = Case("issues", "broken", drive)
    assert judge(case, WAY[OURS], truth(case)).outcome == "invalid"


def test_we_have_to_be_exact_and_others_close() -> None:
    x = torch.ones(3)
    near = x * (1 + 2**-22)
    assert agree(near, x, exact=False)
    assert not agree(near, x, exact=True)
    assert not agree(x * 1.01, x, exact=False)
    assert not agree(x.double(), x, exact=False)
    assert not agree(x[:2], x, exact=False)
    assert not agree([x, 1], [x, 2], exact=False)
    assert not agree(torch.tensor([1, 2]), torch.tensor([1, 3]), exact=False)
    assert agree({"a": x}, {"a": near}, exact=False)
    nan = torch.tensor([float("nan")])
    assert agree(nan, nan.clone(), exact=True)


# Processes that crash and hang

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    case = json.loads(line)["case"]
    if case == "crashes":
        os.abort()
    if case == "hangs":
        time.sleep(1000)
    print(json.dumps({"case": case, "outcome": "right"}), flush=True)
"""


def test_a_crash_and_a_hang_are_told_and_the_next_case_runs(monkeypatch: Any) -> None:
    monkeypatch.setattr("tools.scoreboard.supervising._STARTING", 0.0)
    names = "one", "crashes", "two", "hangs", "three"
    with Supervisor([sys.executable, "-c", WORKER], most=2) as supervisor:
        found = [
            supervisor.ask(
                {"suite": "s", "case": name, "way": "w"}, 5.0 if name != "hangs" else 0.5
            )
            for name in names
        ]
    assert [f["outcome"] for f in found] == ["right", "crashed", "right", "hung", "right"]
    assert [f["case"] for f in found] == list(names)
    assert "SIGABRT" in found[1]["why"]


@pytest.mark.more
def test_a_run_goes_on_where_it_was_and_tells_of_another_one(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    options = ["--suite", "issues", "--limit", "2", "--way", OURS, "--out", str(tmp_path)]
    assert main(options) == 0
    results = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in results[1:]] == ["right", "right"]
    monkeypatch.setattr(Supervisor, "ask", lambda *_: pytest.fail("it ran again"))
    assert main(options) == 0
    assert "2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="of another run, by its backend"):
        main([*options, "--backend", "eager"])


# The page


def result(suite: str, case: str, way: str, outcome: str) -> dict[str, Any]:
    counts = dict.fromkeys(KINDS, 2)
    right = counts if outcome == "right" else dict.fromkeys(KINDS, 1)
    return {"suite": suite, "case": case, "way": way, "outcome": outcome, "right": right,
            "calls": counts, "why": "because"}  # fmt: skip


def test_a_summary_counts_by_way_and_leaves_out_what_eager_does_not_run() -> None:
    name = ISSUES[0].name
    report = summary(
        [
            result("issues", name, OURS, "right"), result("issues", name, "torch.fx", "wrong"),
            result("corpus", "a", OURS, "refused"), result("corpus", "a", "torch.fx", "hung"),
            result("corpus", "b", OURS, "invalid"), result("corpus", "b", "torch.fx", "crashed"),
        ],
        {"backend": "eager", "left out": {}, "not run": 0},
    )  # fmt: skip
    assert report.totals() == {
        OURS: {"right": 1, "refused": 1},
        "torch.fx": {"wrong": 1, "hung": 1},
    }
    assert report.calls_of(OURS, "change") == (3, 4)
    assert report.calls_of(OURS, "change", without=["corpus"]) == (2, 2)
    assert report.invalid == {"corpus": 1}
    assert [fault["case"] for fault in report.faults] == ["a"]
    row = report.issue_table().rows[0]
    assert row[0] == f"[{name}]({ISSUES[0].url})"
    assert row[2:] == ["right", "**wrong**"]
    assert figure(report).count("<title>") == 4


def test_the_page_is_written_from_its_data(tmp_path: Path) -> None:
    data = json.loads((ROOT / "docs" / "scoreboard.json").read_text())
    (tmp_path / "docs").mkdir()
    write_page(Report(**data), tmp_path / "docs" / "scoreboard.md")
    for name in ("scoreboard.md", "scoreboard.json", "measured/scoreboard.svg"):
        assert (tmp_path / "docs" / name).read_text() == (ROOT / "docs" / name).read_text(), name


def test_on_the_page_we_are_never_silently_wrong() -> None:
    report = Report(**json.loads((ROOT / "docs" / "scoreboard.json").read_text()))
    ours = report.totals()[OURS]
    assert ours["right"] > 100
    assert not any(ours[outcome] for outcome in ("wrong", "crashed", "hung"))
    assert set(ours) <= set(OUTCOMES)
    assert {suite.name for suite in SUITES} >= set(report.counts)
    assert sum(report.counts["issues"][OURS].values()) == len(ISSUES)
