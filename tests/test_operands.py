"""Instructions, their operands and results are known in each Python that is supported."""

from __future__ import annotations

import dis
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.python import results
from bendtrace.record import arrays
from tests.promise import bits

IS_SUPPORTED = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 15)
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
exchanges = pytest.mark.skipif(
    sys.gettrace() is not None or not results.can_exchange(),
    reason="this Python does not let results be exchanged",
)


@pytest.mark.skipif(not IS_SUPPORTED, reason="a Python whose frames are not known")
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces the thread")
def test_results_and_operands_can_be_exchanged() -> None:
    assert results.can_exchange()
    assert results.can_exchange_operands()


# Instructions of the compiler only, or of the interpreter only; and the calls of 3.11, which follow
# others that are looked at.
INNER = {
    "EXTENDED_ARG", "ENTER_EXECUTOR", "JUMP", "JUMP_NO_INTERRUPT", "JUMP_IF_FALSE", "JUMP_IF_TRUE",
    "LOAD_METHOD", "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD",
    "POP_BLOCK", "SETUP_CLEANUP", "SETUP_FINALLY", "SETUP_WITH", "STORE_FAST_MAYBE_NULL",
    "ANNOTATIONS_PLACEHOLDER", "TIER1", "TIER2",
}  # fmt: skip
COUNTED = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "BUILD_MAP", "CALL_INTRINSIC_1"}


@pytest.mark.skipif(not IS_SUPPORTED, reason="a Python whose instructions are not known")
def test_each_instruction_is_in_a_list() -> None:
    listed = {*results._COUNTS, *results._TAKES_AS_MANY}
    listed |= results._TAKES_ONE | results._TAKES_NOTHING | INNER | COUNTED
    found = {
        name.replace("_FORWARD", "").replace("_BACKWARD", "") if "POP_JUMP" in name else name
        for name in dis.opmap
        if not name.startswith("INSTRUMENTED_")
    }
    assert {results._NAMES.get(name, name) for name in found} - listed == set()


def _sample(f: Any, a: Any, b: Any, k: Any, d: Any) -> Any:
    f(a)
    f(a, b)
    f(a, k=b)
    a.m(b)
    a.m(b, k=a)
    f(*a)
    f(*a, **d)
    return a[1:2]


@pytest.mark.skipif(not IS_SUPPORTED, reason="a Python whose instructions are not known")
def test_calls_have_the_operands_that_they_pass_on() -> None:
    function, one, two, words = object(), object(), object(), {"k": 3}
    found = [
        step for step in results.instructions(_sample.__code__).values() if "CALL" in step.name
    ]
    by_offset = {id(step): step for step in found}
    names = [step.name for step in by_offset.values()]
    assert len(names) == 7, names
    first = sys.version_info >= (3, 13)
    plain = [function, None] if first else [None, function]
    calls = [step for step in by_offset.values() if step.name == "CALL"]
    assert calls[0].size == 3
    assert results.callee_place([*plain, one]) == plain.index(function)
    assert results.arguments(calls[0], [*plain, one]) == [one]
    assert results.arguments(calls[1], [*plain, one, two]) == [one, two]
    assert results.arguments(calls[1], [function, one, two]) == [one, two]  # a method's
    star = [step for step in by_offset.values() if step.name == "CALL_FUNCTION_EX"]
    assert results.arguments(star[0], [*plain, (one, two)]) == [one, two]
    assert results.arguments(star[1], [*plain, (one,), words]) == [one, 3]
    assert results.arguments(star[1], [*plain, iter(()), words]) is None


# Signals that come while an instruction is looked at


class Alarm(Exception):
    """Is raised by a handler."""


def _interrupt(kind: type[BaseException]) -> Any:
    def handler(number: int, frame: FrameType | None) -> None:
        raise kind

    return handler


@contextmanager
def _interrupted(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let a signal come while the third instruction of a run is looked at."""
    looked: list[int] = []
    look = arrays.Arrays._look

    def interrupted(self: Any, *given: Any) -> Any:
        looked.append(1)
        if len(looked) == 3:
            signal.raise_signal(signal.SIGUSR1)
        return look(self, *given)

    monkeypatch.setattr(arrays.Arrays, "_look", interrupted)
    before = signal.signal(signal.SIGUSR1, _interrupt(kind))
    try:
        yield looked
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()


def _by_numpy(x: Tensor) -> Tensor:
    array = x.numpy()
    total = np.sum(array) + np.max(array)
    return x * float(total)


@exchanges
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Alarm])
def test_what_a_signal_raises_comes_out(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bended = bt.BendedModule(_by_numpy)
    x = torch.randn(4)
    with _interrupted(kind, monkeypatch) as looked, pytest.raises(kind):
        bended(x)
    assert len(looked) >= 3
    # Nothing of the run that was given up is left.
    for value in (x, torch.randn(4)):
        assert bits(bended(value)) == bits(_by_numpy(value))
    assert bended.stats.live == 0, bended.why_live


# Errors in place of results


def _reads(numbers: list[int], n: Any) -> Any:
    return numbers[n]


def _guarded(numbers: list[int], n: Any) -> Any:
    try:
        return numbers[n]
    except IndexError:
        return -1


class Awaiting:
    """Has its frame receive another number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended: list[bool] = []

    def __index__(self) -> int:
        assert results.exchange(sys._getframe(1), "other", self.ended.append)
        return self.number


@exchanges
@pytest.mark.parametrize("reads", [_reads, _guarded])
def test_an_error_ends_what_is_awaited(reads: Callable[..., Any]) -> None:
    found, failing = Awaiting(0), Awaiting(5)
    assert reads([3], found) == "other"
    assert found.ended == [True]
    try:
        assert reads([3], failing) == -1
    except IndexError:
        assert reads is _reads
    results.end_exchange()
    assert failing.ended == [False]
    again = Awaiting(0)
    assert reads([3], again) == "other"
    assert again.ended == [True]
