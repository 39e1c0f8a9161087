"""The budgets, and whether what was measured keeps them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.benchmarks.feeding import after_first, relative
from tools.benchmarks.table import Table

__all__ = ["BUDGETS", "Budget", "table_of_budgets"]

# Models whose ops are so small that what is around them takes most of the time.
OVERHEAD_BOUND = (
    "tiny transformer", "loop RNN, 100 steps", "MoE", "MoE, masked", "20 gated layers", "solver",
    "greedy decoding", "tiny BERT",
)  # fmt: skip

Data = dict[str, Any]
# What was measured, by what (a model, say), and the limit that it has there.
Found = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Budget:
    """A line of the budgets.

    Attributes:
        text: what it says.
        section: which has to be measured for it.
        limit: what is to be kept; at most, or with `least` at least.
        values: reads what was measured.
        unit: of both.
        least: whether more is better.
    """

    text: str
    section: str
    limit: float
    values: Callable[[Data], Found]
    unit: str = "x"
    least: bool = False

    def kept(self, value: float) -> bool:
        """Whether a value keeps the budget."""
        return value >= self.limit if self.least else value <= self.limit


def _relative(
    way: str, to: str = "eager", only: tuple[str, ...] | None = None, kind: str | None = None
) -> Callable[[Data], Found]:
    def values(data: Data) -> Found:
        for name, cells in (data["1"] if kind is None else data[kind]).items():
            one, other = cells.get(way, {}), cells.get(to, {})
            if (only is None or name in only) and "median" in one and "median" in other:
                yield name, one["median"] / other["median"]

    return values


def _per_op(way: str, beyond: str | None = None) -> Callable[[Data], Found]:
    def values(data: Data) -> Found:
        found = data["per op"]
        yield (
            "500 ops of 4 by 4",
            ((found[way]["least"] - (found[beyond]["least"] if beyond else 0.0)) * 1e6),
        )

    return values


def _check(data: Data) -> Found:
    for name, cell in data["check"].items():
        yield name, cell["median"] * 1e6


def _check_of(modules: int) -> Callable[[Data], Found]:
    def values(data: Data) -> Found:
        for one in data.get("guards", []):
            if one["modules"] - modules in range(10):
                yield f"{one['modules']} modules", one["check"]["median"] * 1e6

    return values


def _tokens(data: Data) -> Found:
    for name, one in data["memory"].items():
        yield name, one["kept by all saved"] / max(1, one["saved one by one"])


def _peak(data: Data) -> Found:
    for name, one in data["memory"].items():
        yield name, one["trace's peak"] / max(1, one["eager's peak"])


def _import(data: Data) -> Found:
    yield "what is deferred included", data["imports"]["bendtrace, used"]["median"]


def _exponents(data: Data) -> Found:
    for kind, found in data.items():
        for name, exponent in found["exponents"].items():
            yield f"{name}, {kind}", exponent


def _faster_than_compile(data: Data) -> Found:
    yield from _relative("torch.compile", "bended, inductor", ("20 gated layers", "MoE"))(data)


def _streams(data: Data) -> Found:
    for name, one in data.items():
        yield name, after_first(relative(one))


def _mean_of_streams(data: Data) -> Found:
    if data:
        yield f"of {len(data)}", statistics.geometric_mean(value for _, value in _streams(data))


def _recordings(data: Data) -> Found:
    for name, one in data.items():
        if one["pairs"] is not None:
            yield name, one["traces"] / one["pairs"]


BUDGETS = (
    Budget(
        "tracing adds to an op, nothing saved", "tracing", 4.0, _per_op("trace, nothing saved"),
        "us",
    ),
    Budget(
        "saving everything adds to an op", "tracing", 1.5,
        _per_op("trace, all saved", "trace, nothing saved"), "us",
    ),
    Budget(
        "tracing a tiny transformer", "tracing", 2.0,
        _relative("trace, nothing saved", only=("tiny transformer", "tiny BERT"), kind="times"),
    ),
    Budget(
        "tracing GPT-2 small", "tracing", 1.1,
        _relative("trace, nothing saved", only=("GPT-2 small",), kind="times"),
    ),
    Budget("tensors alive in a trace, of eager's", "tracing", 1.0, _peak),
    Budget("kept by saving all, of what copies would take", "tracing", 1.0, _tokens),
    Budget(
        "a replayed call where overhead dominates", "calls", 0.6,
        _relative("bended", only=OVERHEAD_BOUND),
    ),
    Budget("a replayed call", "calls", 1.0, _relative("bended")),
    Budget(
        "a replay, of a flat list of the same calls", "calls", 1.1, _relative("replay", "flat list")
    ),
    Budget("guard check, input guards only", "calls", 10.0, _check, "us"),
    Budget("guard check, some 25 modules", "calls", 10.0, _check_of(25), "us"),
    Budget("guard check, some 200 modules", "calls", 20.0, _check_of(200), "us"),
    Budget("a compiled call", "calls", 1.0, _relative("bended, inductor")),
    Budget(
        "compiled, times faster than torch.compile", "calls", 3.0, _faster_than_compile, least=True
    ),
    Budget(
        "one interjection, of a native hook", "inserting", 1.0,
        _relative("one interjection", "a native hook", kind="inserting"),
    ),
    Budget("a call in a stream, after the first hundred", "streams", 1.0, _streams),
    Budget("the same, geometric mean", "streams", 0.9, _mean_of_streams),
    Budget("runs recorded in a stream, of pairs of a state and an answer", "streams", 2.0,
           _recordings),
    Budget("a call in a stream with something inserted, or that writes", "changes", 1.0, _streams),
    Budget("geometric mean of these", "changes", 0.9, _mean_of_streams),
    Budget("runs recorded for these, of pairs of a state and an answer", "changes", 2.0,
           _recordings),
    Budget("import over torch", "starting", 0.15, _import, "s"),
    Budget("exponent of growth", "growth", 1.1, _exponents, ""),
)  # fmt: skip


def table_of_budgets(sections: dict[str, Data]) -> Table:
    """Return a row for each budget that something was measured for, the missed ones told."""
    rows = []
    for budget in BUDGETS:
        if budget.section not in sections:
            continue
        found = list(budget.values(sections[budget.section]))
        sign = "at least" if budget.least else "at most"
        limit = f"{sign} {_said(budget.limit, budget.unit)}"
        if not found:
            rows.append([budget.text, limit, "not measured", "", ""])
            continue
        worst = (min if budget.least else max)(found, key=lambda pair: pair[1])
        missed = [pair for pair in found if not budget.kept(pair[1])]
        among = f"{len(found) - len(missed)} of {len(found)}" if len(found) > 1 else ""
        listed = "; ".join(f"{name} {_said(value, budget.unit)}" for name, value in missed)
        rows.append(
            [
                budget.text, limit, f"{_said(worst[1], budget.unit)} ({worst[0]})",
                f"missed ({among} kept)" if missed and among else "missed" if missed else "met",
                listed,
            ]
        )  # fmt: skip
    return Table(
        "budgets", "Budgets", ["what", "budget", "worst measured", "", "where it is missed"], rows,
        "python -m tools.benchmarks",
    )  # fmt: skip


def _said(value: float, unit: str) -> str:
    return f"{value:.2f}{unit}" if unit in ("x", "") else f"{value:.2f} {unit}"
