"""Python ints that count the rounds of a loop: replays carry them, and nobody sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine import program
from bendtrace.python import stacks
from tests.promise import bits

pytestmark = pytest.mark.skipif(
    stacks.frame_layout() is None,
    reason="the frames of this Python cannot be read: paths do not join",
)


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        steps = 0
        while x.norm() > 1:
            x = x * 0.5
            steps += 1
        y = x + 1
        return self.layer(y), steps, x.add(1)


class Scaled(Halving):
    """Computes with the count, and hands it to a layer in different ways."""

    def forward(self, x: Tensor) -> Any:
        steps, scale = 0, 1.0
        while x.norm() > 1:
            x = x * 0.5
            steps += 1
            scale = steps * 0.25 + 1
        y = torch.where(x > 0, x * steps, x - scale)
        if steps > 5:
            y = y + steps
        return {"y": y, "steps": steps, "more": (scale, steps - 1)}


class Nested(Halving):
    def forward(self, x: Tensor) -> Any:
        outer, left = 0, 40
        while x.norm() > 1:
            x, outer, inner = x * 0.5, outer + 1, 0
            while x.sum() > 3 and inner < 4:
                x = x - 0.3
                inner += 1
                left -= 2
        return x * outer, left, outer * left


class Limited(Halving):
    def forward(self, x: Tensor) -> Any:
        steps = 0
        while x.norm() > 1 and steps < 7:
            x = x * 0.5
            steps += 1
        return (x if steps != 3 else -x), steps


class Indexing(Halving):
    """Python needs the number: it is not lifted."""

    def forward(self, x: Tensor) -> Any:
        steps, choices = 0, [x, x * 2, x * 3]
        while x.norm() > 1:
            x = x * 0.5
            steps += 1
        return choices[steps % 3] + x, f"{steps} steps"


class Starting(Halving):
    """The count starts from an argument, and is kept in an attribute."""

    def forward(self, x: Tensor, start: int = 2) -> Any:
        steps = start
        while x.norm() > 1:
            x = x * 0.5
            steps += 1
        return x, steps, steps == start


MODELS = [Halving, Scaled, Nested, Limited, Indexing, Starting]


def inputs(number: int, seed: int = 0) -> Iterator[Tensor]:
    generator, scales = torch.Generator().manual_seed(seed), random.Random(seed)
    for _ in range(number):
        yield torch.randn(3, generator=generator) * 2 ** scales.uniform(0, 9)


def views(trace: bt.Trace) -> dict[str, Any]:
    """Return what people see of a trace."""
    nodes = trace.graph.nodes(data=True)
    return {
        "nodes": [(n, d["op"], str(d["target"]), str(d["args"])) for n, d in nodes],
        "edges": sorted((one, other) for one, other in trace.graph.edges()),
        "steps": str(trace.flow_steps),
        "tree": str(trace.tree),
        "table": str(trace.table()),
        "fx": trace.to_fx().code,
    }


@pytest.mark.parametrize("most", [0, 3, 8])
@pytest.mark.parametrize("make", MODELS)
def test_counts_are_those_of_eager(
    make: type[nn.Module], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_MANY", most)
    torch.manual_seed(0)
    model = make()
    bended = bt.BendedModule(model)
    for number, x in enumerate(inputs(60)):
        more = {"start": number % 4} if make is Starting else {}
        assert bits(bended(x, **more)) == bits(model(x, **more))


@pytest.mark.parametrize("make", [Halving, Scaled, Nested])
def test_what_people_see_is_as_if_nothing_were_lifted(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_MANY", 2)
    torch.manual_seed(0)
    model, seen = make(), 0
    bended = bt.BendedModule(model)
    for x in inputs(40):
        before = bended.stats.traces
        bended(x)
        trace = bended.latest_trace
        if bended.stats.traces > before and trace._recording.tape.counters:
            seen += 1
            assert views(trace) == views(bt.trace(model, x))
    assert seen


@pytest.mark.parametrize("make", [Halving, Nested])
def test_loops_that_count_close(make: type[nn.Module]) -> None:
    bended = bt.BendedModule(make())
    for x in inputs(80):
        bended(x)
    traces = bended.stats.traces
    assert traces < (14 if make is Halving else 26)  # 80 without
    if make is Nested:
        return  # it also asks how often the inner loop has run
    x = torch.full((3,), 2.0**30)  # takes more rounds than any before
    assert bits(bended(x)) == bits(bended.model(x))
    assert bended.stats.traces == traces


def test_calls_from_before_are_still_counted() -> None:
    bended = bt.BendedModule(Halving())
    for x in inputs(50):
        bended(x)
    assert any(trace._recording.tape.counters for trace in bended.traces)
    assert "50 runs" in str(bended.tree)


@pytest.mark.more
@pytest.mark.parametrize("node", ["mul", "add", "norm"])
@pytest.mark.parametrize("make", [Halving, Scaled, Nested])
def test_insertions_find_the_same_nodes(
    make: type[nn.Module], node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Any] = []
    for most in (2, 1000):
        monkeypatch.setattr(program, "_MANY", most)
        torch.manual_seed(0)
        bended = bt.BendedModule(make())
        for x in inputs(30):
            bended(x)
        assert (most == 2) is any(trace._recording.tape.counters for trace in bended.traces)
        if node not in bended.activation_names():
            pytest.skip(f"{make.__name__} has no {node}")
        with bended.interject(node, lambda value: value * 0.75):
            outputs.append([bits(bended(x)) for x in inputs(12, seed=1)])
    assert outputs[0] == outputs[1]


@pytest.mark.more
def test_what_is_compiled_counts_as_well() -> None:
    torch.manual_seed(0)
    model = Halving().eval()
    bended = bt.BendedModule(model, backend="aot_eager")
    with torch.no_grad():
        for x in inputs(60):
            assert bits(bended(x)) == bits(model(x))


def function(x: Tensor, tell: Callable[[int], Any]) -> Any:
    steps = 0
    while x.norm() > 1:
        x = x * 0.5
        steps += 1
    return x, tell(steps)


@pytest.mark.parametrize("tell", [type, str, bool, float, hash, lambda n: [n] * n, lambda n: n / 2])
def test_a_count_that_is_handed_on_is_an_int(tell: Callable[[int], Any]) -> None:
    bended = bt.BendedModule(function)
    for x in inputs(40):
        assert bits(bended(x, tell)) == bits(function(x, tell))


def test_a_count_whose_use_raises_an_error_that_is_caught() -> None:
    def model(x: Tensor) -> Any:
        left = 3
        while x.norm() > 1:
            x = x * 0.5
            left -= 1
        try:
            return x, 6 // left
        except ZeroDivisionError:
            return x, -1

    bended = bt.BendedModule(model)
    for x in inputs(60):
        assert bits(bended(x)) == bits(model(x))
