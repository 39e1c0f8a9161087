"""Timing ways to do the same, in turn."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Times", "interleaved", "once", "summary"]

# A sample is made of as many calls as take about this long: clocks are not exact below it.
_SAMPLE = 5e-4
_MOST_CALLS = 20


@dataclass(frozen=True)
class Times:
    """What the rounds took, in seconds a call.

    Attributes:
        median: of all rounds.
        low: the lower quartile.
        high: the upper quartile.
        least: the shortest round.
        rounds: how many there were.
        samples: the rounds, in their order.
    """

    median: float
    low: float
    high: float
    least: float
    rounds: int
    samples: tuple[float, ...]

    def json(self) -> dict[str, float]:
        """Return it as plain data, without the rounds."""
        return {name: value for name, value in asdict(self).items() if name != "samples"}

    def relative_to(self, other: Times) -> Times:
        """Divide each round by that of another way, which had the machine at the same time.

        Args:
            other: what it took turns with; where it did not, its median is divided by.
        """
        if other.rounds >= self.rounds:
            pairs = zip(self.samples, other.samples[: self.rounds], strict=True)
            return summary([sample / paired for sample, paired in pairs])
        return summary([sample / other.median for sample in self.samples])


def summary(seconds: list[float]) -> Times:
    """Return the median and the spread of some times."""
    several = seconds if len(seconds) > 1 else seconds * 2
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return Times(median, low, high, min(seconds), len(seconds), tuple(seconds))


def once(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long one call takes, without the garbage of others."""
    return _sample(call, 1, clock)


def interleaved(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Time each way, round by round in turn, so that what disturbs meets all of them alike.

    Args:
        ways: what to call, by name.
        rounds: how many rounds there are.
        seconds: a way that has taken longer than this in all sits out what is left, but for the
            first three rounds.
        clock: which time is meant: that of the wall, or the thread's own.
    """
    calls: dict[str, int] = {}
    for name, call in ways.items():
        call()
        took = max(once(call, clock), 1e-7)
        calls[name] = max(1, min(_MOST_CALLS, round(_SAMPLE / took)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffled = list(ways), random.Random(0)
    for number in range(rounds):
        for name in order:
            spent = samples[name]
            if number >= 3 and sum(spent) * calls[name] > seconds:
                continue
            call = ways[name]
            if calls[name] > 1:
                call()  # the way before has emptied the processor's caches
            spent.append(_sample(call, calls[name], clock))
        shuffled.shuffle(order)  # whoever comes before has filled the processor's caches
    return {name: summary(spent) for name, spent in samples.items()}


def _sample(call: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    # Also what a call has to free is its own, but not what others left to the collector.
    was_enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        begun = clock()
        for _ in range(calls):
            call()
        return (clock() - begun) / calls
    finally:
        if was_enabled:
            gc.enable()
