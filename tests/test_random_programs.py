"""Random programs, written by hypothesis, do what eager does."""

from __future__ import annotations

import collections
import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

import bendtrace as bt
from tests.shares import some
from tools.generator import Call, Program, Unlike, check, programs
from tools.generator.found import FOUND


@pytest.mark.more
@pytest.mark.parametrize("examples", some([5, 500], chosen=[5]))
def test_random_programs_do_what_eager_does(examples: int) -> None:
    seen: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(world=0))
    def one(program: Program) -> None:
        note(str(program))
        counts = check(program)
        seen["programs"] += 1
        seen["calls"] += len(program.calls)
        seen["raising calls"] += counts.raised
        seen["replaying"] += counts.replays > 0
        seen["diverging"] += counts.retraces > 0
        seen["resuming"] += counts.resumes > 0
        seen["live"] += counts.live > 0
        seen["inserted, replaying"] += counts.inserted_replays > 0

    one()
    share = {name: count / seen["programs"] for name, count in seen.items()}
    if examples < 500:  # a few, many of them much alike: their shares say little
        assert min(seen[kind] for kind in ("replaying", "diverging", "resuming")) > 0, share
        return
    assert share["calls"] > 4, share
    assert share["replaying"] > 0.5, share
    assert share["diverging"] > 0.4, share
    assert share["resuming"] > 0.15, share
    assert share["live"] < 0.15, share
    assert share["inserted, replaying"] > 0.05, share
    assert seen["raising calls"] < 0.2 * seen["calls"], share


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_once_wrong_does_what_eager_does(name: str) -> None:
    check(FOUND[name])


_PROGRAM = Program(
    """\
import torch
from torch import nn

SEEN = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        SEEN.append(1)
        self.total += x
        if x.sum() > 100:
            raise ValueError("too much")
        return x.mul_(2) * self.w + torch.rand(3)
""",
    (Call("normal(1, 3)"), Call("normal(2, 3)"), Call("normal(3, 3, plus=1000)")),
)


def _output(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    return bended.model(x) + 1


def _layout(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    return bended.model(x).expand(1, 3).expand(2, 3)[0]


def _argument(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    return bended.model(x.clone())


def _rng(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    output = bended.model(x)
    torch.rand(1)
    return output


def _state(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    output = bended.model(x)
    bended.total += 1
    return output


def _globals(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    output = bended.model(x)
    type(bended.model).forward.__globals__["SEEN"].pop()
    return output


def _gradient(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    output = bended.model(x)
    output.register_hook(lambda gradient: gradient * 2)
    return output


def _error(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    try:
        return bended.model(x)
    except ValueError as error:
        raise ValueError("far too much") from error


def _earlier(bended: bt.BendedModule, x: torch.Tensor) -> Any:
    output = bended.model(x)
    with torch.no_grad():
        for earlier in bended.__dict__.setdefault("earlier", []):
            earlier.add_(1)
    bended.earlier.append(output)
    return output


@pytest.mark.parametrize(
    ("forward", "noticed"),
    [
        (_output, "call 0: other result"),
        (_layout, "call 0: other layout"),
        (_argument, "call 0: other arguments"),
        (_rng, "call 0: other rng"),
        (_state, "call 0: other state"),
        (_globals, "call 0: other globals"),
        (_gradient, "call 0: other gradients"),
        (_error, r"call 2: ValueError\('far too much'\), not ValueError\('too much'\)"),
        (_earlier, "call 1: earlier outputs changed"),
    ],
)
def test_the_comparison_notices(
    monkeypatch: pytest.MonkeyPatch, forward: Any, noticed: str
) -> None:
    monkeypatch.setattr(bt.BendedModule, "forward", forward)
    with pytest.raises(Unlike, match=noticed.replace(": ", "(, resumed)?: ", 1)):
        check(_PROGRAM)


def test_the_source_of_a_program_can_be_read() -> None:
    with _PROGRAM.modules(1) as (module,):
        assert inspect.getsource(module.Model.forward) in _PROGRAM.source
        trace = bt.trace(module.Model(), torch.ones(3))
        assert [step.text for step in trace.flow_steps] == ["x.sum() > 100"]


@pytest.mark.more
@pytest.mark.parametrize("examples", some([5, 500], chosen=[5]))
def test_random_programs_in_a_world_that_changes_do_what_eager_does(examples: int) -> None:
    seen: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(world=1))
    def one(program: Program) -> None:
        note(str(program))
        counts = check(program)
        seen["programs"] += 1
        seen["with a world"] += bool(program.world or program.told)
        seen["with changes"] += any("here." in c.step or "world." in c.step for c in program.calls)
        seen["replaying"] += counts.replays > 0

    one()
    assert seen["with a world"] > 0.5 * seen["programs"], seen
    assert seen["with changes"] > 0, seen
    assert seen["replaying"] > 0, seen
