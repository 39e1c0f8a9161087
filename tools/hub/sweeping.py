"""All types of models of `transformers`, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tools.hub.building import build, quiet
from tools.hub.checking import Checked, check
from tools.hub.inputs import guessed


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        model_type: the type, a name in `AutoConfig`.
        outcome: "itself", "refused", "wrong", "not built" or "no inputs".
        why: what to say about it.
        checked: all that was found, of a model that was run.
    """

    model_type: str
    outcome: str
    why: str = ""
    checked: Checked | None = None

    def __str__(self) -> str:
        if self.checked is None:
            return f"{self.model_type:34} {self.outcome:10} {self.why[:120]}"
        seen = self.checked
        way = "live: " + seen.live[0] if seen.live else f"{seen.replays} replays"
        return (
            f"{self.model_type:34} {self.outcome:10} {seen.kind}, {seen.ops} ops, {way} {self.why}"
        )


def row(model_type: str, move: Callable[[Any], Any] = lambda value: value) -> Row:
    """Build a model, find inputs for it, and check everything.

    Args:
        model_type: the type, a name in `AutoConfig`.
        move: moves models and inputs to where they are to run.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            model = build(model_type)
        except Exception as error:
            return Row(model_type, "not built", _line(error))
        try:
            kind, inputs = guessed(model)
        except ValueError as error:
            return Row(model_type, "no inputs", _line(error))
        others = []
        for seed, sizes in ((1, {}), (2, {"length": 11})):
            try:
                others.append(guessed(model, seed, **sizes)[1])
            except ValueError:  # of this size only
                continue
        with torch.no_grad():
            checked = check(
                model_type, lambda: move(build(model_type)), move(inputs), tuple(map(move, others))
            )
        checked.kind = kind
        return Row(model_type, checked.outcome, _line(*checked.faults, *checked.refused), checked)


def sweep(model_types: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each type."""
    return map(row, model_types)


def counted(rows: Iterable[Row]) -> str:
    """Return how many rows there are of each outcome, and how many models ran live."""
    rows = list(rows)
    counts = Counter(row.outcome for row in rows)
    lines = [f"{outcome:10} {count:4}" for outcome, count in counts.most_common()]
    live = sum(row.checked is not None and bool(row.checked.live) for row in rows)
    return "\n".join([*lines, f"of them live {live:4}", f"{'all':10} {len(rows):4}"])


def _line(*what: object) -> str:
    return " | ".join(" ".join(str(item).split()) for item in what)[:400]
