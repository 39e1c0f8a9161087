"""The benchmarks run, say what cannot be done, and refuse to time what is wrong."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python import stacks
from tests.promise import bits
from tools.benchmarks import comparing, page, starting
from tools.benchmarks.__main__ import main, measured, middle
from tools.benchmarks.budgets import BUDGETS, table_of_budgets
from tools.benchmarks.changes import CHANGES, fed_changed
from tools.benchmarks.comparing import compared, compared_alone, merged
from tools.benchmarks.feeding import after_first, fed, feed, relative
from tools.benchmarks.growth import exponent
from tools.benchmarks.models import CASES, Case, case_of, inputs_of
from tools.benchmarks.sections import SECTIONS, Options
from tools.benchmarks.streams import STREAMS, Stream, stream_of
from tools.benchmarks.table import ratio
from tools.benchmarks.timing import interleaved, summary
from tools.benchmarks.ways import WAYS, Refused, Way, WrongOutput, assert_right, reason_of
from tools.benchmarks.worker import TASKS, ask, carry_out

pytestmark = pytest.mark.all

SMALL = tuple(case.name for case in CASES if case.quick)
SMALL_STREAMS = tuple(stream.name for stream in STREAMS if stream.quick)
SMALL_CHANGES = tuple(change.name for change in CHANGES if change.quick)
EAGER = WAYS[0]
DOCS = page.DOCS


def prepared(call: Any) -> Any:
    return lambda model, args: lambda: call(model, *args)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What a quick run without fresh processes finds."""
    options = Options(
        rounds=1, seconds=0.05, threads=(1,), models=SMALL, streams=SMALL_STREAMS,
        changes=SMALL_CHANGES, quick=True, here=True,
    )  # fmt: skip
    names = [section.name for section in SECTIONS if section.name != "starting"]
    found = measured(names, options)
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_quick_run_has_a_row_for_each_model_and_way(report: dict[str, Any]) -> None:
    calls = report["sections"]["calls"]
    assert set(calls) == {"1", "check", "guards"}
    assert [one["modules"] for one in calls["guards"]] == [26, 202, 402]
    assert tuple(calls["1"]) == tuple(calls["check"]) == SMALL
    for cells in calls["1"].values():
        assert {"eager", "flat list", "replay", "bended", "torch.fx"} <= set(cells)
        for name, cell in cells.items():
            assert ("median" in cell) != ("reason" in cell), name
    tables = {table.name: table for table in page.tables_of(report)}
    for table in tables.values():
        assert table.rows, table.name
        for row in table.rows:
            assert len(row) == len(table.headers), table.name
    assert [row[0] for row in tables["calls-1"].rows] == list(SMALL)
    assert {row[0] for row in tables["growth"].rows} == {
        "ops in a loop", "ops in a chain", "traces by inputs", "traces by values",
        "traces by iterations", "data guards", "input guards",
    }  # fmt: skip


def test_what_cannot_be_done_is_said_and_no_cell_of_a_model_is_empty(
    report: dict[str, Any],
) -> None:
    cells = report["sections"]["calls"]["1"]["20 gated layers"]
    assert cells["torch.fx"] == {"reason": "refuses: a branch on values"}
    assert cells["make_fx"] == {"reason": "refuses: a branch on values"}
    for table in page.tables_of(report):
        if table.name != "budgets":
            assert all(cell for row in table.rows for cell in row), table.name


def test_budgets_stand_beside_what_was_measured(report: dict[str, Any]) -> None:
    rows = {row[0]: row for row in table_of_budgets(report["sections"]).rows}
    for budget in BUDGETS:
        assert (budget.text in rows) == (budget.section in report["sections"])
    assert rows["tracing GPT-2 small"][2] == "not measured"
    sections = {"calls": {"1": {"a": _cells(bended=2.0), "b": _cells(bended=0.5)}, "check": {}}}
    rows = {row[0]: row for row in table_of_budgets(sections).rows}
    assert rows["a replayed call"][2:] == ["2.00x (a)", "missed (1 of 2 kept)", "a 2.00x"]
    assert rows["guard check, input guards only"][2] == "not measured"


def test_more_is_better_where_a_budget_is_a_least(report: dict[str, Any]) -> None:
    cells = _cells(**{"bended, inductor": 0.25, "torch.compile": 1.0})
    sections = {"calls": {"1": {"MoE": cells}, "check": {}}}
    rows = {row[0]: row for row in table_of_budgets(sections).rows}
    assert rows["compiled, times faster than torch.compile"][2:4] == ["4.00x (MoE)", "met"]


def _cells(**medians: float) -> dict[str, Any]:
    return {name: {"median": median} for name, median in {"eager": 1.0, **medians}.items()}


def test_a_way_of_ours_that_gives_other_bits_stops_the_run() -> None:
    case = case_of("20 gated layers")
    wrong = Way("bended", prepared(lambda model, x: model(x) + 1e-7), ours=True)
    with pytest.raises(WrongOutput, match="bended gives other bits than the model"):
        compared(case, (EAGER, wrong), 1, 0.01)


def test_a_way_that_becomes_wrong_after_its_first_call_is_found() -> None:
    called: list[int] = []

    def model_once(model: nn.Module, x: Tensor) -> Tensor:
        called.append(1)
        return model(x) if len(called) == 1 else torch.zeros_like(model(x))

    wrong = Way("bended, inductor", prepared(model_once), exact=False, ours=True)
    with pytest.raises(WrongOutput, match="something else"):
        compared(case_of("20 gated layers"), (EAGER, wrong), 1, 0.01)


def test_a_way_of_others_that_is_wrong_has_a_cell_that_says_so() -> None:
    wrong = Way("other", prepared(lambda model, x: -model(x)))
    close = Way("close", prepared(lambda model, x: model(x) * (1 + 1e-6)), exact=False)
    cells = compared(case_of("20 gated layers"), (EAGER, wrong, close), 1, 0.01)
    assert cells["other"] == {"reason": "wrong output"}
    assert cells["close"]["rounds"] == 1
    assert cells["eager"]["relative"]["median"] == 1.0


def test_an_error_of_ours_is_no_refusal() -> None:
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("a fault")

    def refuses(model: nn.Module, x: Tensor) -> Tensor:
        raise Refused("not one list")

    case = case_of("20 gated layers")
    with pytest.raises(ValueError, match="a fault"):
        compared(case, (EAGER, Way("bended", prepared(fails), ours=True)), 1, 0.01)
    ways = (EAGER, Way("flat", prepared(refuses), ours=True), Way("other", prepared(fails)))
    cells = compared(case, ways, 1, 0.01)
    assert cells["flat"] == {"reason": "not one list"}
    assert cells["other"] == {"reason": "ValueError: a fault"}


def test_what_is_not_installed_is_said_and_the_run_goes_on() -> None:
    absent = Way("absent", EAGER.prepare, package="no_such_package", alone=True)
    case = case_of("20 gated layers")
    assert compared(case, (EAGER, absent), 1, 0.01)["absent"] == {"reason": "not installed"}
    alone = compared_alone([(case, absent, EAGER)], 1, 0.01)[case.name]
    assert alone["absent"] == {"reason": "not installed"}
    assert "median" in alone["eager"]


def test_eager_is_timed_before_anything_changes_torch() -> None:
    seen: list[str] = []

    def noting(name: str) -> Way:
        def call(model: nn.Module, x: Tensor) -> Tensor:
            seen.append(name)
            return model(x)

        return Way(name, prepared(call))

    cases = [case_of(name) for name in SMALL]
    found = compared_alone([(case, noting("peer"), noting("eager")) for case in cases], 1, 0.01)
    assert tuple(found) == SMALL
    assert "eager" not in seen[seen.index("peer") :]
    for cells in found.values():
        assert cells["peer"]["median"] / cells["eager"]["median"] == pytest.approx(
            cells["peer"]["relative"]["median"]
        )


def test_a_model_that_cannot_be_compared_leaves_the_others_alone() -> None:
    def refuses(model: nn.Module, x: Tensor) -> Tensor:
        raise Refused("gives tokens")

    one, other = (case_of(name) for name in SMALL)
    pairs = [(one, EAGER, Way("without", prepared(refuses))), (other, replace(EAGER), EAGER)]
    found = compared_alone(pairs, 1, 0.01)
    assert found[one.name]["without"] == {"reason": "gives tokens"}
    assert "median" in found[other.name]["eager"]


def test_what_several_processes_found_is_put_together() -> None:
    one, other = (
        {"median": m, "low": m / 2, "high": m * 2, "rounds": 3, "least": m / 2,
         "relative": {"median": m, "low": m / 2, "high": m * 2}}
        for m in (1.0, 3.0)
    )  # fmt: skip
    both = merged([one, other])
    assert both["median"] == both["relative"]["median"] == 2.0
    assert (both["low"], both["high"], both["rounds"]) == (0.5, 6.0, 6)
    refused = {"reason": "refuses"}
    assert merged([refused, refused]) == refused
    assert merged([refused, one])["median"] == 1.0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_known_growth(power: float) -> None:
    sizes = [10, 32, 100, 316, 1000]
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_of_several_runs_the_ratio_in_the_middle_stands_beside_their_range() -> None:
    def run(ratio: float) -> dict[str, Any]:
        relative = {"median": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
        cells = {"eager": {"median": 1.0}, "bended": {"median": ratio, "relative": relative}}
        return {"minutes": 2.0, "sections": {"calls": [cells, {"reason": "refuses"}]}}

    report = middle([run(ratio) for ratio in (0.82, 1.03, 1.06, 0.86)])
    cells, refused = report["sections"]["calls"]
    assert ratio(cells["bended"]) == "0.86x (0.82-1.06 in 4 runs)"
    assert (cells["eager"], ratio(refused)) == ({"median": 1.0}, "refuses")
    assert ratio(middle([run(0.5)])["sections"]["calls"][0]["bended"]) == "0.50x (0.40-0.60)"


def test_the_exponent_looks_past_what_does_not_grow() -> None:
    sizes = [1, 10, 100, 1000, 10000]
    assert exponent(sizes, [50 + size for size in sizes]) > 0.9
    assert exponent(sizes, [7.0] * 5) == pytest.approx(0.0)
    quadratic = [1000 * size + size**2 for size in sizes]
    assert exponent(sizes, quadratic) > 1.3


def test_each_way_is_called_equally_often_and_in_turn() -> None:
    called: list[str] = []
    clock = _ticking(1.0)
    ways = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = interleaved(ways, 4, clock=clock)
    assert {name: called.count(name) for name in "abc"} == dict.fromkeys("abc", 6)
    rounds = [called[start : start + 3] for start in range(6, 18, 3)]
    assert [sorted(one) for one in rounds] == [list("abc")] * 4
    # The one before has filled the processor's caches, so it is not always the same.
    assert len(set(map(tuple, rounds))) > 2
    assert {took.median for took in times.values()} == {1.0}
    assert all(took.rounds == 4 for took in times.values())


def test_a_way_that_took_its_time_sits_out_the_rest() -> None:
    times = interleaved({"slow": lambda: None}, 10, seconds=4.5, clock=_ticking(1.0))
    assert times["slow"].rounds == 5
    times = interleaved({"slow": lambda: None}, 10, seconds=0.0, clock=_ticking(1.0))
    assert times["slow"].rounds == 3


def _ticking(step: float) -> Any:
    now: Iterator[float] = iter(step * number for number in range(10_000))
    return lambda: next(now)


def test_a_summary_has_the_quartiles() -> None:
    found = summary([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high, found.least) == (2.0, 3.0, 4.0, 1.0)
    assert found.rounds == 5


def test_rounds_are_compared_with_the_rounds_of_the_same_time() -> None:
    eager = summary([1.0, 10.0, 2.0])  # the machine was slow in the second round
    shares = summary([3.0, 30.0, 6.0]).relative_to(eager)
    assert (shares.low, shares.median, shares.high) == (3.0, 3.0, 3.0)
    assert summary([3.0]).relative_to(eager).median == 3.0, "one that sat out the other rounds"
    assert summary([3.0, 30.0, 6.0]).relative_to(summary([2.0])).median == 3.0, "not in turn"
    assert "samples" not in eager.json()


def test_all_models_are_called_and_go_elsewhere_where_they_say_so() -> None:
    for case in CASES:
        if not case.is_installed() or case.name in ("GPT-2 small", "ResNet-18"):
            continue
        model, args = case.model(), inputs_of(case)
        with torch.no_grad():
            assert_right(case.name, case.model()(*args), model(*args), exact=True)
            if case.elsewhere is None:
                continue
            bended = bt.BendedModule(model)
            bended(*args)
            bended(case.elsewhere(*args))
            assert bended.stats.retraces == 1, case.name


def test_an_unknown_model_or_section_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no model is called 'resnet-50': there are tiny"):
        case_of("resnet-50")
    with pytest.raises(SystemExit):
        main(["nosuch"])
    assert "no section 'nosuch': there are calls, tracing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calls", "--models", "resnet-50"])
    assert "no model is called 'resnet-50'" in capsys.readouterr().err


def test_what_a_stream_reports_adds_up(report: dict[str, Any]) -> None:
    streams, changed = (report["sections"][name] for name in ("streams", "changes"))
    assert (tuple(streams), tuple(changed)) == (SMALL_STREAMS, SMALL_CHANGES)
    for name, found in {**streams, **changed}.items():
        assert found["calls"] == found["compared"] == 60, name
        assert found["traces"] + found["replays"] + found["live"] == found["calls"], name
        assert found["live"] == 0, name
        for parts in found["seconds"].values():
            assert len(parts) == 60 // found["size"] == 3
            assert all(part > 0 for part in parts)
    gated = streams["8 gated layers"]
    table = next(table for table in page.tables_of(report) if table.name == "streams")
    assert [row[0] for row in table.rows] == [*SMALL_STREAMS, "geometric mean"]
    changes = next(table for table in page.tables_of(report) if table.name == "changes")
    assert [row[0] for row in changes.rows] == [*SMALL_CHANGES, "geometric mean"]
    assert "first 20" in table.headers
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert (row["recorded"], row["live"]) == (str(gated["traces"]), "0")
    assert row["torch.compile, last 20"] == "not measured"
    if stacks.frame_layout() is not None:
        assert (gated["states"], gated["pairs"], row["pairs"]) == (8, 16, "16")
        assert all(0 < found["states"] < found["pairs"] for found in streams.values())


def test_each_call_of_a_stream_has_inputs_of_its_own_and_the_same_each_time() -> None:
    for stream in STREAMS:
        first, again, other = stream.inputs(0), stream.inputs(0), stream.inputs(1)
        assert bits(first) == bits(again) != bits(other), stream.name
        with torch.no_grad():
            torch.manual_seed(0)
            wanted = stream.model()(*first)
            torch.manual_seed(0)
            assert_right(stream.name, stream.model()(*again), wanted, exact=True)
    assert len({stream.name for stream in STREAMS}) == len(STREAMS)


class Wrong:
    """Gives what the model gives, but for one call."""

    def __init__(self, model: nn.Module, call: int) -> None:
        self.model, self.calls, self.call = model, 0, call

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        output = self.model(*args)
        return output * (1 + 1e-6) if self.calls == self.call else output


@pytest.mark.parametrize("number", [0, 29])
def test_a_wrong_output_in_a_stream_stops_the_run(number: int) -> None:
    with pytest.raises(WrongOutput, match=f"in call {number} of '8 gated layers', gives other"):
        fed("8 gated layers", 30, 10, lambda model: Wrong(model, number + 1))


def test_state_that_a_stream_leaves_otherwise_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgets(bended: bt.BendedModule, *args: Any) -> Any:
        output = bended.model(*args)
        bended.model.count.zero_()
        return output

    monkeypatch.setattr(bt.BendedModule, "forward", forgets)
    with pytest.raises(WrongOutput, match=r"call 0 of .* leaves other state"):
        fed_changed("12 gated layers, a buffer written", 1, 1)


def test_random_numbers_that_a_stream_draws_otherwise_stop_the_run() -> None:
    stream = stream_of("8 gated layers")
    model = stream.model()

    def drawing(x: Tensor) -> Tensor:
        torch.rand(())
        return model(x)

    with torch.no_grad(), pytest.raises(WrongOutput, match="draws other random numbers"):
        feed(stream, model, drawing, 1, 1, lambda number, wanted, given: None)


def test_both_ways_are_fed_the_same_in_turn_with_the_same_seed() -> None:
    called: list[tuple[str, float, float]] = []

    def noting(name: str) -> Any:
        return lambda x: called.append((name, float(x), float(torch.rand(()))))

    stream = Stream("numbers", lambda: nn.Identity(), lambda g: (torch.rand((), generator=g),))
    found = feed(stream, noting("eager"), noting("other"), 5, 2, lambda *args: None)
    in_turn = called[-10:]
    assert [name for name, _, _ in in_turn] == ["eager", "other"] * 5
    for one, other in zip(in_turn[::2], in_turn[1::2], strict=True):
        assert one[1:] == other[1:]
    assert len({x for _, x, _ in in_turn}) == 5
    assert (found["calls"], len(found["seconds"]["eager"])) == (5, 3)
    late = feed(stream, noting("eager"), noting("other"), 5, 2, lambda *args: None, until=0.0)
    assert late["calls"] == 0


def test_a_part_of_a_stream_is_compared_with_the_same_part_of_eager() -> None:
    found = {"seconds": {"eager": [1.0, 2.0, 4.0], "other": [10.0, 1.0, 4.0]}}
    assert relative(found) == [10.0, 0.5, 1.0]
    assert after_first(relative(found)) == 0.75
    assert after_first([3.0]) == 3.0


def test_streams_of_torch_compile_say_what_they_found_or_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(task: str, *, name: str, **arguments: Any) -> Any:
        seconds = {"eager": [1.0, 2.0], "other": [30.0, 1.0]}
        found = {"calls": 4, "size": 2, "seconds": seconds}
        if task == "stream":
            return found | {"traces": 9, "pairs": None, "live": 2}
        if name == "NMS":
            raise TimeoutError
        if name == "early exit":
            raise RuntimeError("stream failed:\nKilled")
        reason = {"reason": "3 calls in 60 s"} if name == "beam search" else {}
        return found | {"graphs": 3, "breaks": {"a": 1, "b": 1}, "differ": 1} | reason

    monkeypatch.setattr("tools.benchmarks.sections.ask", answer)
    names = ("8 gated layers", "NMS", "early exit", "beam search")
    found = measured(["streams"], Options(streams=names, changes=()))
    (table,) = (table for table in page.tables_of(found) if table.name == "streams")
    assert [row[5] for row in table.rows] == [
        "0.50x (2 breaks, 3 graphs, 1 outputs differ)", "- (no answer in 120 s)", "- (Killed)",
        "- (3 calls in 60 s)", "0.50x, of 1",
    ]  # fmt: skip
    assert table.rows[0][2:5] == ["30.00x", "0.50x", "0.50x"]
    assert table.rows[0][6:] == ["9", "-", "2"]
    rows = {row[0]: row for row in table_of_budgets(found["sections"]).rows}
    assert rows["a call in a stream, after the first hundred"][3] == "met"
    assert rows["runs recorded in a stream, of pairs of a state and an answer"][2] == "not measured"


def test_models_are_chosen_among_those_of_all_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Options] = []
    named: list[list[str]] = []

    def look(names: Any, options: Options, keep: Any) -> dict[str, Any]:
        seen.append(options)
        named.append(names)
        return {"machines": {}, "minutes": 0.0, "sections": {}}

    monkeypatch.setattr("tools.benchmarks.__main__.measured", look)
    main(["streams", "--models", "MoE, 1", "solver"])
    main(["--quick"])
    main(["streams", "--models", "12 gated layers, a p"])
    assert named == [
        ["streams", "changes"], [section.name for section in SECTIONS], ["streams", "changes"]
    ]  # fmt: skip
    assert seen[2].changes == ("12 gated layers, a patch",)
    assert not seen[2].models
    assert seen[0].streams == ("MoE, 1 token", "solver, nested loops")
    assert seen[0].models == ("solver",)
    assert (seen[1].models, seen[1].streams) == (SMALL, SMALL_STREAMS)
    assert seen[1].changes == SMALL_CHANGES


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"stream .* was not done in 0 s"):
        ask("stream", limit=0.05, name="8 gated layers", calls=1000, size=100)


def test_a_fresh_process_answers_and_says_why_it_failed() -> None:
    found = ask("checking", case="20 gated layers", rounds=1, seconds=0.01)
    assert found == found | {"guards": 20}
    with pytest.raises(RuntimeError, match="no model is called 'none'"):
        ask("memory", case="none")


def test_a_task_carried_out_here_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    carry_out("memory", {"case": "20 gated layers"}, before + 1)
    assert torch.get_num_threads() == before


def test_reasons_are_short_and_in_words() -> None:
    assert reason_of(RuntimeError("Could not guard on data-dependent expression u0")) == (
        "refuses: a branch on values"
    )
    assert reason_of(WrongOutput("x gives other bits")) == "wrong output"
    assert len(reason_of(RuntimeError("word " * 100))) < 80


def test_packages_are_those_beyond_torch_s() -> None:
    assert "torch" not in starting.packages("bendtrace")
    assert "sympy" not in starting.packages("bendtrace")
    assert "tabulate" in starting.packages("bendtrace")


def test_a_script_that_fails_says_so() -> None:
    assert starting.run_python("print('heard')\nprint('[1, 2]')") == [1, 2]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        starting.run_python("1 / 0")


def test_the_page_is_filled_between_its_markers_and_nowhere_else(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    text = (DOCS / "performance.md").read_text()
    (tmp_path / "performance.md").write_text(text)
    page.write_docs(report, tmp_path)
    written = (tmp_path / "performance.md").read_text()
    outside = [re.sub(r"(<!-- table.*?-->).*?(<!-- end)", r"\1\2", t, flags=re.S)
               for t in (text, written)]  # fmt: skip
    assert outside[0] == outside[1]
    assert "| 20 gated layers" in written
    assert "`python -m tools.benchmarks growth`" in written
    assert json.loads((tmp_path / "performance.json").read_text()) == report
    svg = (tmp_path / "measured" / "performance.svg").read_text()
    assert svg.startswith("<svg")
    assert "20 gated layers, bended: " in svg
    page.write_docs(report, tmp_path)
    assert (tmp_path / "performance.md").read_text() == written


def test_what_was_not_measured_again_stays_in_the_page(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    (tmp_path / "performance.md").write_text((DOCS / "performance.md").read_text())
    page.write_docs(report, tmp_path)
    written = (tmp_path / "performance.md").read_text()
    calls = {name: {"calls": report[name]["calls"]} for name in ("machines", "sections")}
    page.write_docs({**report, **calls}, tmp_path)
    assert (tmp_path / "performance.md").read_text() == written
    assert json.loads((tmp_path / "performance.json").read_text()) == report
    page.write_docs({**report, **calls, "machines": {"calls": {"peers": "none"}}}, tmp_path)
    assert "- **calls.** peers: none" in (tmp_path / "performance.md").read_text()
    machines = json.loads((tmp_path / "performance.json").read_text())["machines"]
    assert machines == {**report["machines"], "calls": {"peers": "none"}}


def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(kind: str, largest: int) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setitem(TASKS, "growth", stops)
    found = tmp_path / "found.json"
    with pytest.raises(RuntimeError, match="stopped"):
        main(["--quick", "--json", str(found), "leaving", "growth"])
    assert list(json.loads(found.read_text())["sections"]) == ["leaving"]


def test_the_page_has_a_place_for_each_table(report: dict[str, Any]) -> None:
    text = (DOCS / "performance.md").read_text()
    marked = set(re.findall(r"<!-- table: ([\w-]+) -->", text))
    assert len(re.findall("<!-- table", text)) == len(re.findall("<!-- end -->", text))
    made = {table.name for table in page.tables_of(report)}
    made = {"calls" if name.startswith("calls-") else name for name in made}
    assert made <= marked
    assert marked - made == {"machines", "imports", "cold"}


def test_a_page_without_a_place_for_a_table_is_filled_all_the_same(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    text = (DOCS / "performance.md").read_text()
    without = re.sub(r"<!-- table: streams -->.*?<!-- end -->\n", "", text, flags=re.S)
    assert without != text
    (tmp_path / "performance.md").write_text(without)
    page.write_docs(report, tmp_path)
    written = (tmp_path / "performance.md").read_text()
    assert "benchmarks streams`" not in written
    assert "`python -m tools.benchmarks growth`" in written


def test_what_was_found_prints_again(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found, drawn = tmp_path / "found.json", tmp_path / "drawn.svg"
    found.write_text(json.dumps(report))
    main(["--from-json", str(found), "--figure", str(drawn)])
    printed = capsys.readouterr().out
    for table in page.tables_of(report):
        assert table.title in printed
    assert drawn.read_text().endswith("</svg>\n")


def test_options_leave_out_what_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def answer(task: str, **arguments: Any) -> Any:
        asked.append((task, arguments))
        return {"eager": {"median": 1.0}}

    monkeypatch.setattr("tools.benchmarks.sections.ask", answer)
    options = Options(threads=(1, 2), models=("solver",), peers=False)
    measured(["calls"], options)
    assert {task for task, _ in asked} == {"compare", "checking", "guards"}
    compared_ways = [arguments["only"] for task, arguments in asked if task == "compare"]
    assert compared_ways == [
        ["eager", "flat list", "replay", "bended", "bended, inductor"],
        ["eager", "replay", "bended", "bended, inductor"],
    ]
    asked.clear()
    with pytest.raises(KeyError):  # the answer of this test knows no other way
        measured(["calls"], replace(options, peers=True))
    assert ("alone", "nnsight") in {(task, arguments.get("way")) for task, arguments in asked}


def test_growth_is_measured_at_even_steps(report: dict[str, Any]) -> None:
    for found in report["sections"]["growth"].values():
        sizes = found["sizes"]
        steps = [math.log10(b / a) for a, b in itertools.pairwise(sizes)]
        assert all(0.4 < step < 0.6 for step in steps)
        for values in found["series"].values():
            assert len(values) == len(sizes)
            assert all(value >= 0 for value in values)


def test_a_case_is_the_same_each_time() -> None:
    case = Case("case", lambda: nn.Linear(2, 2), (3, 2))
    assert torch.equal(case.model().weight, case.model().weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(*(inputs_of(case)[0] for _ in range(2)))
    assert not torch.equal(inputs_of(case)[0], inputs_of(case, seed=1)[0])
    assert comparing.inputs_of is inputs_of
