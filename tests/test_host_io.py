"""What a model asks of the world outside: clocks, the environment, files."""

from __future__ import annotations

import builtins
import io
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt

X = torch.ones(3)


def content(file: Any) -> str:
    with file:
        return str(file.read())


def names(trace: bt.Trace) -> list[str]:
    return [getattr(op.target, "__name__", "") for op in trace.ops]


def test_a_clock_is_read_by_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    bended = bt.BendedModule(lambda x: (x * 2, time.time(), time.monotonic_ns()))
    seen = [bended(X)[1:] for _ in range(4)]
    assert bended.stats == bt.Stats(traces=1, replays=3)
    for wall, ticks in seen:
        assert (type(wall), type(ticks)) == (float, int)
    for ticking in zip(*seen, strict=True):
        assert list(ticking) == sorted(ticking)
        assert ticking[0] < ticking[-1]
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert bended(X)[1] == 5.0


def test_what_follows_from_a_clock_is_a_branch_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refreshed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if time.time() > 4e9 else x * 3  # in the year 2096

    bended = bt.BendedModule(Refreshed())
    assert bended(X).tolist() == bended(X).tolist() == [3.0] * 3
    monkeypatch.setattr(time, "time", lambda: 5e9)
    assert bended(X).tolist() == bended(X).tolist() == [2.0] * 3
    assert bended.stats == bt.Stats(traces=2, replays=2, retraces=1, resumes=1)


def test_a_clock_that_was_exchanged_before_the_run_is_the_one_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 7.0)
    trace = bt.trace(lambda x: x * time.time(), X)
    assert trace.output.tolist() == [7.0] * 3


def test_a_missing_variable_raises_as_ever() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            return x * float(os.environ["BENDTRACE_NOT_THERE"])
        except KeyError as error:
            return x * len(error.args[0])

    bended = bt.BendedModule(model)
    for _ in range(2):
        assert torch.equal(bended(X), X * 19)
    with pytest.raises(KeyError, match="BENDTRACE_NOT_THERE"):
        bt.trace(lambda x: x * len(os.environ["BENDTRACE_NOT_THERE"]), X)
    with pytest.raises(TypeError, match="str expected"):
        bt.trace(lambda x: x * len(os.environ[1]), X)  # type: ignore[index]


def test_a_variable_on_a_side_of_a_branch_is_guarded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * float(os.environ.get("BENDTRACE_SIDE", "1"))
        return -x

    bended = bt.BendedModule(model)
    bended(-X), bended(X), bended(X)
    monkeypatch.setenv("BENDTRACE_SIDE", "4")
    for _ in range(2):
        assert torch.equal(bended(X), X * 4)
    assert "os.environ.get" in str(bended.last_mismatch)
    monkeypatch.delenv("BENDTRACE_SIDE")
    assert torch.equal(bended(X), X)
    assert bended.stats.live == 0


def test_variables_are_guarded_when_their_class_has_used_up_its_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # CPython 3.13 gives a class a thousand, and recordings write to this one.
    def read() -> str:
        return os.environ["BENDTRACE_OFTEN"]

    def model(x: Tensor) -> Tensor:
        return x * float(read())

    monkeypatch.setenv("BENDTRACE_OFTEN", "2")
    kind: Any = type(os.environ)
    for number in range(1_100):
        kind.of_a_test = number
        read(), os.environ.get("BENDTRACE_OFTEN")
    del kind.of_a_test
    bended = bt.BendedModule(model)
    for value in ("2", "3", "2", "4"):
        monkeypatch.setenv("BENDTRACE_OFTEN", value)
        assert torch.equal(bended(X), X * float(value))
    assert (read(), bended.stats.live) == ("4", 0)


def test_what_the_standard_library_asks_for_is_not_recorded(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    handler = logging.FileHandler(tmp_path / "log", delay=True)
    logger = logging.getLogger("of a model outside")
    logger.addHandler(handler)

    def model(x: Tensor) -> Tensor:
        logger.warning("called")
        import this_is_imported_now as module

        return x * module.SCALE

    (tmp_path / "this_is_imported_now.py").write_text(
        "import os, time\nSCALE = 2\nos.getenv('HOME'), time.time(), os.environ['PATH']\n"
        "open(__file__).close()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        trace = bt.trace(model, X)
    handler.close()
    logger.removeHandler(handler)
    assert not {"time", "environ"} & set(names(trace))
    assert not any("open" in reason for reason in trace.why_live)
    assert "called" in (tmp_path / "log").read_text()


def test_code_that_runs_in_an_import_is_the_model_s_where_that_calls_the_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "calls_a_model_now.py").write_text(
        "import os, torch, bendtrace as bt\n"
        "trace = bt.trace(lambda x: x * len(os.environ['PATH']), torch.ones(2))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = __import__("calls_a_model_now")
    assert "environ" in names(module.trace)


def test_a_file_that_is_opened_makes_the_run_live(tmp_path: Path) -> None:
    file = tmp_path / "scale"
    file.write_text("2")
    for read in (
        lambda: content(open(file)),
        lambda: content(io.open(file)),  # noqa: UP020
        lambda: file.read_text(),
    ):
        bended = bt.BendedModule(lambda x, read=read: x * float(read()))
        for text in ("2", "5"):
            file.write_text(text)
            assert torch.equal(bended(X), X * float(text))
        (reason,) = bended.why_live
        assert reason.startswith("open at ")
        assert Path(__file__).name in reason
        with pytest.raises(bt.errors.NotReplayableError, match="open"):
            bt.trace(lambda x, read=read: x * float(read()), X).replay(X)


def test_nothing_is_exchanged_afterwards_and_other_threads_see_nothing(tmp_path: Path) -> None:
    places: list[tuple[Any, str]] = [
        (time, "time"), (time, "perf_counter_ns"), (builtins, "open"), (io, "open"),
        (type(os.environ), "__getitem__"), (type(os.environ), "__iter__"),
    ]  # fmt: skip
    before = [vars(owner)[name] for owner, name in places]
    found: list[Any] = []

    def elsewhere() -> None:
        found.append((type(time.time()), os.environ.get("PATH"), len(os.environ)))
        (tmp_path / "elsewhere").write_text("written")

    thread = threading.Thread(target=elsewhere)
    go = bt.opaque(lambda: (thread.start(), thread.join(), None)[-1])

    def model(x: Tensor) -> Tensor:
        assert [vars(owner)[name] for owner, name in places] != before
        go()
        return x * 2

    trace = bt.trace(model, X)
    assert [vars(owner)[name] for owner, name in places] == before
    assert found == [(float, os.environ.get("PATH"), len(os.environ))]
    assert (tmp_path / "elsewhere").read_text() == "written"
    assert not {"environ", "time"} & set(names(trace))


def test_the_names_of_what_is_asked_for() -> None:
    trace = bt.trace(lambda x: x * time.perf_counter() * len(os.getenv("PATH", "")), X)
    assert {"perf_counter", "environ"} <= set(names(trace))
