"""The lines between two ranks: each runs across at a height of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Run", "heights"]

_CLOSE = 6.0  # lines nearer to each other than this are taken for one
_ROUNDS = 40


@dataclass(eq=False)
class Run:
    """A net between two ranks.

    Attributes:
        tops: where it meets the upper rank.
        bottoms: where it meets the lower rank.
        joins: whether it ends at the line of another net, which has to be there still.
        track: at which height it runs across, from 0 at the top; -1 if it need not.
    """

    tops: list[float] = field(default_factory=list)
    bottoms: list[float] = field(default_factory=list)
    joins: bool = False
    track: int = -1

    @property
    def start(self) -> float:
        """Its leftmost point."""
        return min(*self.tops, *self.bottoms, float("inf"))

    @property
    def stop(self) -> float:
        """Its rightmost point."""
        return max(*self.tops, *self.bottoms, float("-inf"))


def heights(runs: Sequence[Run]) -> int:
    """Choose the track of each net, so that few lines cross and none lie upon each other.

    Returns:
        How many tracks there are.
    """
    across = [run for run in runs if run.stop > run.start]
    ordered = _ordered(sorted(across, key=lambda run: (run.start, run.stop)))
    count = 0
    for place, run in enumerate(ordered):
        above = (r for r in ordered[:place] if _meet(r, run))
        run.track = 1 + max((r.track for r in above), default=-1)
        count = max(count, run.track + 1)
    return count


def _meet(one: Run, other: Run) -> bool:
    return one.start < other.stop + _CLOSE and other.start < one.stop + _CLOSE


def _ordered(runs: list[Run]) -> list[Run]:
    """Put nets in order from the top down, by exchanging neighbours."""
    if len(runs) < 2:
        return runs
    costs: dict[tuple[Run, Run], int] = {}

    def gain(upper: Run, lower: Run) -> int:
        """Return how much better it is the other way round."""
        key = (upper, lower)
        if key not in costs:
            costs[key] = _cost(upper, lower) - _cost(lower, upper) if _meet(upper, lower) else 0
        return costs[key]

    for _ in range(_ROUNDS):
        changed = False
        for place in range(1, len(runs)):
            # Carry it up past all that it gains from, or is indifferent to.
            total, best, target = 0, 0, place
            for above in range(place - 1, -1, -1):
                total += gain(runs[above], runs[place])
                if total > best:
                    best, target = total, above
            if target != place:
                runs.insert(target, runs.pop(place))
                changed = True
        if not changed:
            break
    return runs


def _cost(upper: Run, lower: Run) -> int:
    """Count crossings, and places where lines would lie upon each other, which are worse."""
    cost = 0
    for x in lower.tops:
        cost += upper.start < x < upper.stop
    for x in upper.bottoms:
        cost += lower.start < x < lower.stop
    for x in upper.bottoms:
        cost += 100 * any(abs(x - top) < _CLOSE for top in lower.tops)
    if lower.joins:
        cost += 100 * any(x in upper.tops and x not in upper.bottoms for x in lower.tops)
    return cost
