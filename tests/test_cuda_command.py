"""`python -m tests.cuda`, on the CPU: it finds what is wrong, and drops nothing silently."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.corpus import CASES
from tests.corpus._case import Case, call, positive
from tests.cuda import promising
from tests.cuda.__main__ import main, tried
from tests.cuda.moving import moved, tensors_in
from tests.cuda.page import page_of, tables_of, write_page
from tests.cuda.promising import corpus_case
from tests.cuda.rows import INCOMPARABLE, NOT_RUN, RIGHT, SKIPPED, WRONG, Options, Row
from tests.cuda.supervising import run_section
from tests.cuda.waiting import values_read
from tools.benchmarks.page import DOCS

CPU = Options()
FEW = ["corpus: rank_by_dim", "corpus: stochastic_depth"]
EVERY_SECTION = [
    *FEW, "tiny: gpt2", "CUDA streams", "no data guard", "Gated, eager", "Gated, inductor",
    "Experts",
]  # fmt: skip


# This module is a section too, for processes of their own.
def names(options: Options) -> list[str]:
    return [
        "fine", "ends its process", "raises", "breaks the device", "fine again", "takes long",
        "last",
    ]  # fmt: skip


BROKEN: list[str] = []


class OnDevice(Options):
    """Whose device cannot be used after a certain case."""

    def synchronize(self) -> None:
        if BROKEN:
            raise RuntimeError("device-side assert triggered")


def check(name: str, options: Options) -> Row:
    if name == "ends its process":
        os._exit(7)
    if name == "breaks the device":
        BROKEN.append(name)
    if name == "raises":
        raise ValueError("a fault")
    if name == "takes long":
        time.sleep(600)
    return Row(name, RIGHT, numbers={"process": os.getpid()})


class Broken(bt.BendedModule):
    """Gives other bits when it replays."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.stats.replays
        out = super().__call__(*args, **kwargs)
        return out * (1 + 1e-6) if self.stats.replays > before else out


@pytest.mark.all
def test_a_run_on_the_cpu_has_a_row_for_each_case_and_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "cuda.md"
    arguments = ["--device", "cpu", "--here", "--cases", *EVERY_SECTION, "--page", str(page)]
    assert main(arguments) == 0
    assert "0 wrong, in " in capsys.readouterr().out
    report = json.loads((tmp_path / "cuda.json").read_text())
    rows = {row["case"]: row for section in report["sections"].values() for row in section}
    assert rows["corpus: rank_by_dim"]["outcome"] == RIGHT
    assert rows["tiny: gpt2"]["numbers"]["replays"] >= 4
    assert rows["no data guard, no_grad"]["numbers"]["ratio"].endswith("x")
    assert rows["Gated, eager"]["numbers"]["hits"] > 0
    assert rows["Experts"]["numbers"]["replay"] == "0 read, 4 sizes"
    for name in ("CUDA streams: two in turn, without waiting", "Gated, inductor with CUDA graphs"):
        assert rows[name]["outcome"] == SKIPPED
        assert rows[name]["why"].startswith("needs a GPU: ")
    for table in tables_of(report):
        assert table.rows, table.name
        for cells in table.rows:
            assert len(cells) == len(table.headers), table.name
            assert all(cells), table.name
    text = page.read_text()
    assert text == page_of(report)
    assert "**No GPU has been tried.**" in text
    assert all(name in text for name, row in rows.items() if row["outcome"] != RIGHT)


def test_a_wrong_case_is_reported_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(promising.bt, "BendedModule", Broken)
    assert main(["--device", "cpu", "--here", "promise", "--cases", *FEW[:1]]) == 1
    printed = capsys.readouterr().out
    assert "wrong: corpus: rank_by_dim: call 1: another output" in printed
    assert "1 wrong, in " in printed


def test_a_model_that_differs_from_itself_is_not_comparable() -> None:
    numbers = itertools.count()

    def counts(x: Tensor) -> Tensor:
        return x + next(numbers)

    paths = {name: lambda: call(positive(2)) for name in ("one", "other")}
    row = corpus_case("counts", Case("counts", lambda: counts, paths), CPU)
    assert (row.outcome, row.why) == (
        INCOMPARABLE,
        "the model itself gives other bits each time, with deterministic algorithms too",
    )
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_that_is_deterministic_when_told_to_is_compared() -> None:
    numbers = itertools.count()

    def settles(x: Tensor) -> Tensor:
        return x + (0 if torch.are_deterministic_algorithms_enabled() else next(numbers))

    paths = {name: lambda: call(positive(2)) for name in ("one", "other")}
    row = corpus_case("settles", Case("settles", lambda: settles, paths), CPU)
    assert row.outcome == RIGHT
    assert row.why.startswith("with deterministic algorithms; without, the model itself gives")


@pytest.mark.all
def test_a_process_that_ends_is_one_case_and_the_rest_is_run() -> None:
    told: list[Row] = []
    options = OnDevice(only=("fine", "ends", "raises", "breaks"))
    rows = run_section(__name__, options, time.monotonic() + 300, told.append)
    assert rows == told
    assert {row.case: (row.outcome, row.why) for row in rows} == {
        "fine": (RIGHT, ""),
        "ends its process": (WRONG, "its process ended with exit code 7"),
        "raises": (WRONG, "ValueError: a fault"),
        "breaks the device": (
            WRONG,
            "RuntimeError: device-side assert triggered; the device could not be used any more, so "
            "the rest ran in a fresh process",
        ),
        "fine again": (RIGHT, ""),
    }
    assert len({rows[0].numbers["process"], rows[-1].numbers["process"], os.getpid()}) == 3


def test_a_process_that_hangs_is_ended_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # No grace, and less: a process that starts only when the time is up would say so itself.
    monkeypatch.setattr("tests.cuda.supervising._GRACE", -0.1)
    rows = run_section(__name__, Options(only=("takes long", "last")), time.monotonic() + 0.5)
    assert [(row.case, row.outcome, row.why) for row in rows] == [
        ("takes long", NOT_RUN, "it had not ended when the time was up"),
        ("last", NOT_RUN, "the time was up"),
    ]


def test_what_the_time_is_not_enough_for_is_listed() -> None:
    report = tried(["promise", "streams"], Options(only=("corpus", "CUDA")), 0.0)
    rows = [Row(**row) for section in report["sections"].values() for row in section]
    assert len(rows) > len(CASES)
    assert {(row.outcome, row.why) for row in rows} == {(NOT_RUN, "the time was up")}
    assert "corpus: stochastic_depth" in page_of(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "torch sees no CUDA device here; to run without one, pass --device cpu"),
        (["--device", "cuda"], "to run without one, pass --device cpu"),
        (["--device", "gpu"], "'gpu' is not a device: pass --device cuda or --device cpu"),
        (["--device", "meta"], "there is nothing for 'meta' here: pass --device cuda or"),
        (["speed"], "no section 'speed': there are promise, programs, operators, streams"),
    ],
)
def test_where_it_cannot_run_it_says_what_to_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_models_and_inputs_are_moved_with_all_that_is_in_them() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), torch.ones(2)
            self.kept = [torch.ones(1), "text"]

    model = Holds()
    assert moved(model, "cpu") is model
    parts = [*moved(model, "meta").parameters(), model.scale, model.kept[0]]
    assert {part.device.type for part in parts} == {"meta"}
    x = torch.ones(2, requires_grad=True)
    one, (other, number), shape = moved((x, [x, 3], torch.ones(1, 2).max(1)), "meta")
    assert one is other
    assert one.is_leaf
    assert one.requires_grad
    assert number == 3
    assert shape.values.device.type == "meta"
    assert len(tensors_in({"a": x, "b": (x, "text")})) == 2


def test_values_that_python_reads_are_counted() -> None:
    x = torch.tensor([1.0, 0.0])
    assert values_read(lambda: x * 2) == (0, 0)
    assert values_read(lambda: (x.sum().item(), bool(x.sum() > 0), x[x > 0])) == (2, 1)


def test_the_committed_page_shows_its_data(tmp_path: Path) -> None:
    report = json.loads((DOCS / "cuda.json").read_text())
    assert page_of(report) == (DOCS / "cuda.md").read_text()
    write_page(report, tmp_path / "other.md")
    assert "](other.json)" in (tmp_path / "other.md").read_text()
    assert ("**No GPU has been tried.**" in page_of(report)) is (report["device"] == "cpu")
