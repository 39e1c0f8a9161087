"""A part of Python or torch that is not as expected is found, named, and not relied on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.python import bytecode, internals, sites
from bendtrace.record import iterations, self_test
from bendtrace.tape import plain_numbers
from bendtrace.watch import intercepts


@pytest.fixture(autouse=True)
def _all_on() -> Iterator[None]:
    yield
    for feature in [*internals._off]:
        internals.switch_on(feature)
    assert not internals.names_off()


def test_all_probes_hold_here() -> None:
    assert [self_test.probe_python(), self_test.probe_torch(), self_test.probe_flow()] == [
        [],
        [],
        [],
    ]


def test_probes_of_torch_hold_together_in_a_new_process() -> None:
    # Where they do not, each is recorded by itself, which takes three times as long.
    program = (
        "from bendtrace.record import self_test\n"
        "together = self_test._hold\n"
        "recorded = []\n"
        "self_test._hold = lambda model, _: recorded.append(model) or together(model, _)\n"
        "assert self_test.probe_torch() == []\n"
        "assert len(recorded) == 3, recorded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_probing_leaves_everything_as_it_was() -> None:
    threads = threading.active_count()
    states = torch.get_rng_state(), random.getstate(), dict(os.environ)
    self_test.probe_torch()
    self_test.probe_flow()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), dict(os.environ), threading.active_count()) == (*states[1:], threads)


READERS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "constants": (bytecode, "CONSTANTS", frozenset(), "identity"),  # type: ignore[dict-item]
    "comparisons": (self_test, "code_compares_identity", lambda code: False, "identity"),
    "types": (self_test, "needs_plain_numbers", lambda code: False, "identity"),
    "truths": (self_test, "only_tests", lambda frame, depth=0: True, "truth"),
    "names": (self_test, "global_uses", lambda code: iter(()), "names"),
    "handlers": (self_test, "is_covered", lambda code, offset: False, "handlers"),
    "iterations": (iterations, "_is_back", lambda before, mark: False, "iterations"),
    "tests of a while": (iterations, "first_offset", lambda code, offset: 0, "iterations"),
    "truths of comparisons": (
        iterations,
        "_record_asks",
        lambda record, items: False,
        "iterations",
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_instructions_that_errs_is_found(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, instead, feature = READERS[reader]
    if reader == "truths of comparisons" and not bytecode._HAS_ASKING:
        pytest.skip("with this Python, comparisons do not ask for truths themselves")
    compares: Any = bytecode._compares_identity  # of which nothing is known from before
    monkeypatch.setattr(
        bytecode, "_compares_identity", bytecode.cache_by_code(compares.__wrapped__)
    )
    monkeypatch.setattr(plain_numbers, "_plain", {})
    monkeypatch.setattr(owner, name, instead)
    failed = self_test.probe_python() + self_test.probe_flow()
    assert internals.is_off(feature)
    assert len(failed) == 1


@pytest.mark.parametrize("probe", self_test.TORCH_PROBES, ids=lambda probe: probe.part)
def test_a_part_of_torch_that_is_not_met_is_found(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = {
        "calls of modules": "_compiled_call_impl", "autograd.Function": "apply",
        "torch.manual_seed": "manual_seed", "torch.func": "vmap_impl", "clocks": "time",
        "the environment": "__getitem__", "saved tensors": "__enter__",
        "dispatch modes": "__enter__", "forward-mode differentiation": "enter_dual_level",
        "threads": "start", "files": "open", "random numbers of Python": "random",
    }  # fmt: skip
    if probe.part == "sizes and numbers":
        monkeypatch.setattr("bendtrace.record.values.TracedInt", lambda value, *_: value)
    else:
        kept = [e for e in intercepts._ENTRY_POINTS if e.name != met[probe.part]]
        assert len(kept) < len(intercepts._ENTRY_POINTS)
        monkeypatch.setattr(intercepts, "_ENTRY_POINTS", kept)
    failed = self_test.probe_torch()
    assert internals.is_off(probe.part), failed
    assert probe.names <= internals.names_off().keys()


def keeps_time(x: Tensor) -> Tensor:
    return x + time.monotonic()


def test_only_code_that_uses_what_is_off_runs_live() -> None:
    internals.switch_off("clocks", "clocks cannot be followed", frozenset({"monotonic"}))
    timed, plain = bt.BendedModule(keeps_time), bt.BendedModule(nn.ReLU())
    for _ in range(2):
        timed(torch.ones(2))
        plain(torch.ones(2))
    assert (timed.stats.live, plain.stats.live) == (2, 0)
    reason = timed.why_live[0]
    assert reason.startswith("monotonic (see ")
    assert reason.endswith("clocks cannot be followed")


def test_all_code_runs_live_where_calls_of_modules_are_not_seen() -> None:
    internals.switch_off("calls of modules", "calls are not seen", frozenset({""}))
    model = nn.Sequential(nn.ReLU())
    bended = bt.BendedModule(model)
    for value in (1.0, -1.0):
        x = torch.full((2,), value)
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 2
    assert "calls are not seen" in bended.why_live


def counts(x: Tensor) -> Tensor:
    for found in x.any(1).tolist():
        if found:
            x = x + 1
    return x


@pytest.mark.parametrize("feature", ["identity", "truth", "handlers", "places", "iterations"])
def test_what_comes_out_is_right_whatever_is_off(feature: str) -> None:
    internals.switch_off(feature, "a reason")
    bytecode._tests.clear()
    bended = bt.BendedModule(counts)
    for x in (torch.eye(2), torch.zeros(2, 2), torch.eye(2), torch.ones(2, 2)):
        assert torch.equal(bended(x), counts(x))
    assert bended.stats.live == 0
    bytecode._tests.clear()


def walks(x: Tensor) -> Tensor:  # of its own: what was read of code while a part was off is kept
    for found in x.any(1).tolist():
        if found:
            x = x + 1
    return x


def test_unknown_iterations_are_not_given_as_known_ones() -> None:
    x = torch.eye(2)
    before = bt.trace(walks, x)
    known = [step.iteration for step in before.flow_steps]
    assert known == [(), (0,), (1,)]
    internals.switch_off("iterations", "a reason")
    trace = bt.trace(walks, x)
    assert [step.iteration for step in trace.flow_steps] == [()] * 3
    loop = trace.flow_steps.of(bt.flow.LoopFlowStep)[0]
    assert (loop.iterations, loop.bound) == (None, 2)
    assert "an unknown number of iterations" in str(trace.flow_steps)
    assert "an unknown number of iterations" in trace.draw(rolled=True).svg


def test_what_is_off_is_said_once_and_at_the_line_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_test, "_looked", set())
    monkeypatch.setattr(self_test, "only_tests", lambda frame, depth=0: True)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            bt.trace(counts, torch.eye(2))
    assert [one.category for one in given] == [bt.errors.IncompatibleVersionWarning]
    assert given[0].filename == __file__
    text = str(given[0].message)
    assert "parts of bendtrace are switched off: truth values of tensors are plain" in text


def test_probes_of_torch_wait_until_no_mode_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: set[str] = set()
    monkeypatch.setattr(self_test, "_looked", looked)
    with torch.device("cpu"):
        bt.trace(counts, torch.eye(2))
    assert looked == {"python"}
    bt.trace(counts, torch.eye(2))
    assert looked == {"python", "torch"}


def test_places_that_are_off_have_a_line_only() -> None:
    internals.switch_off("places", "a reason")
    code = counts.__code__
    place = sites._place_of_code(code, len(code.co_code) - 2)
    assert (place.span.column, place.span.end_column) == (0, 0)
    assert place.line > code.co_firstlineno
