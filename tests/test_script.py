"""Resumes by script that are broken on purpose, in each of the ways that they could be wrong.

The stream below is right when nothing is broken; each break makes it fail, so that the comparison
with eager, or the resumed run itself, would notice the same fault in the engine.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine.comparison import Following
from bendtrace.engine.schedule import Schedule
from bendtrace.engine.stretches import Divergence
from bendtrace.errors import NondeterminismError
from bendtrace.record import effects, states
from bendtrace.record.script import Script
from bendtrace.record.states import _StateWalk
from bendtrace.tape.tape import RunState, Tape
from bendtrace.watch.functions import is_gate
from bendtrace.watch.writes import Writes
from tests.promise import bits, seed_everything


class Gated(nn.Module):
    """Layers that ask, write to a buffer and to the argument, and draw."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, total, first = x.view(-1), x.sum() * 0.5, x + 1
        for number, gate in enumerate(self.gates):
            h = gate(x) + 0.1 * torch.sin(self.count)
            self.count.add_(1)
            rows[number] = 0.5  # which x and all views of it see
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) + torch.rand(4)
        return x + rows[:4] + (first if total > 0 else -first)


def stream(calls: int = 40) -> bt.Stats:
    """Compare calls with eager: outputs, arguments, buffers, random numbers, calls of user code.

    Raises:
        AssertionError: something differs.
        NondeterminismError: a resumed run found that something was wrong.
    """
    seen: tuple[list[Any], list[Any]] = [], []

    class Change(bt.Interjection):
        self_contained = True

        def __init__(self, number: int) -> None:
            self.number = number

        def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Tensor) -> Tensor:
            seen[self.number].append(bits(output))
            return output * 1.5

    class Recorded(Change):
        self_contained = True

        def before(self, at: bt.NodePass, inputs: bt.Inputs) -> None:
            """Do nothing: with a call before a node, it cannot be spliced in."""

    torch.manual_seed(0)
    eager = Gated()
    torch.manual_seed(0)
    model = Gated()
    hook, at, none = Change(0), bt.NodePass("gates_1"), bt.Inputs(())
    eager.gates[1].register_forward_hook(lambda module, args, out: hook.after(at, none, out))
    bended = bt.BendedModule(model)
    bended.interject(model.gates[1], Recorded(1))
    with torch.no_grad():
        for seed in range(calls):
            found = []
            for call, module in ((eager, eager), (bended, model)):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
                seed_everything(seed)
                output = call(x)
                rng = torch.get_rng_state()
                found.append(bits([output, x, module.count, rng]))
            assert found[0] == found[1], f"call {seed}"
            assert seen[0] == seen[1], f"call {seed}: other calls of what is inserted"
    return bended.stats


def test_a_stream_that_resumes_by_script_is_right() -> None:
    stats = stream()
    assert stats.resumes > 1
    assert stats.live == 0


def by_size(x: Tensor) -> Tensor:
    best, _ = torch.tanh(x).max(0)
    best = torch.relu(best) * 2 + best
    if best.sum() > 0:
        best = best * 3
    return best + 1 if best.sum() > 10 else best - x


@pytest.mark.parametrize("place", ["tanh", "max"])
def test_a_result_that_was_a_copy_in_the_first_run_is_what_was_there_before(place: str) -> None:
    bended, copies = bt.BendedModule(by_size), True

    def maybe_copied(output: Any) -> Any:
        if not copies:
            return output
        return output + 0 if place == "tanh" else type(output)((output[0] + 0, output[1]))

    bended.interject(place, maybe_copied)
    ones = torch.ones(2, 4)
    for x in (ones, ones, -ones, -ones, ones):
        assert bits(bended(x)) == bits(by_size(x))
        copies = False
    # The first call resolves the name, and so is recorded with a gate, which asks.
    assert bended.stats == bt.Stats(3, 2, 2, 2)


script_of, take, of_segment = Divergence.script, Script.take, Schedule.of_segment


def held_of(divergence: Divergence, shape: tuple[int, ...]) -> list[int]:
    """Return the ops whose values a resumed run is handed, and which are tensors of a shape."""
    held = divergence.computed or {}
    return [i for i, value in held.items() if isinstance(value, Tensor) and value.shape == shape]


def test_two_holes_that_are_exchanged_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(self: Divergence) -> Any:
        assert self.computed is not None
        one, other = held_of(self, (3, 4))[-2:]
        self.computed[one], self.computed[other] = self.computed[other], self.computed[one]
        return script_of(self)

    monkeypatch.setattr(Divergence, "script", exchanged)
    with pytest.raises(AssertionError, match="call"):
        stream()


@pytest.mark.parametrize("shape", [(3, 4), ()], ids=["by an op", "by Python"])
def test_a_stand_in_that_is_read_is_noticed(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def less(self: Divergence) -> Any:
        assert self.computed is not None
        for index in held_of(self, shape):
            del self.computed[index]
        return script_of(self)

    monkeypatch.setattr(Divergence, "script", less)
    with pytest.raises(NondeterminismError, match="which no code of the model could reach any"):
        stream()


def test_a_write_that_is_done_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: Script, op: Any) -> None:
        take(self, op)
        if op.writes:
            self.values.pop(op.index, None)  # which has the recorder carry it out

    monkeypatch.setattr(Script, "take", taken)
    with pytest.raises(AssertionError, match="call"):
        stream()


def test_a_write_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(*given: Any) -> Schedule:
        made = of_segment(*given)
        made.needed = {i for i in made.needed if made.tape.ops[i].target != Tensor.__setitem__}
        return made

    monkeypatch.setattr(Schedule, "of_segment", less)
    with pytest.raises(AssertionError, match="call"):
        stream()


def test_user_code_that_is_called_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: Script, op: Any) -> None:
        take(self, op)
        if is_gate(op):
            self.values.pop(op.index, None)

    monkeypatch.setattr(Script, "take", taken)
    with pytest.raises(AssertionError, match="other calls of what is inserted"):
        stream()


def noted_reads() -> bool:
    """Whether what is read behind a script is known to have been written in it."""

    class Writing(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            part = self.count[:2]
            self.count.add_(1)
            return x + part if x.sum() > 0 else x - part

    bended = bt.BendedModule(Writing())
    for x in (torch.ones(2), -torch.ones(2)):
        bended(x)
    tape = bended.traces[-1]._recording.tape
    (written,) = (op.index for op in tape.ops if op.writes)
    return written in tape.ops[-1].reads.values()


def test_a_write_that_is_not_noted_is_missing_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted_reads()
    monkeypatch.setattr(Writes, "repeat", lambda self, op: None)
    assert not noted_reads()


def test_numbers_of_a_function_that_is_not_known_to_draw_are_drawn_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deep(x: Tensor, frames: int) -> Tensor:  # where a first run reads no states
        if frames:
            return deep(x, frames - 1)
        return x * 2 if x.sum() > 0 else x - 1

    def model(x: Tensor) -> Tensor:
        return deep(x + torch.rand(3), 20)

    monkeypatch.setattr(effects, "_may_draw_numbers", lambda function: False)
    bended = bt.BendedModule(model)
    for seed, sign in enumerate((9, -9, 9, -9)):
        found = []
        for called in (model, bended):
            torch.manual_seed(seed)
            found.append((bits(called(torch.full((3,), float(sign)))), bits(torch.rand(2))))
        assert found[0] == found[1]
    assert bended.stats.resumes == 1


class Asking(nn.Module):
    """Layers that do nothing but ask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = -x
        for layer in self.layers:
            h, y = layer(x), y * 1.5
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) - y
        return x - y


def ask(calls: int = 40) -> int:
    """Compare calls with eager, and return how many states were read."""
    model, count = Asking(), 0
    bended = bt.BendedModule(model)

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return _StateWalk(*given)

    with torch.no_grad(), mock.patch.object(states, "_StateWalk", counted):
        for seed in range(calls):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            assert bits(bended(x)) == bits(model(x)), f"call {seed}"
    assert bended.stats.live == 0
    return count


def test_a_state_that_follows_is_known_without_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    known = ask()
    monkeypatch.setattr(Following, "state", lambda self, tape: None)
    torch.manual_seed(0)
    assert known < ask()


def test_a_state_that_is_followed_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = Following.state

    def exchanged(self: Following, tape: Tape) -> RunState | None:
        found = follow(self, tape)
        return found and found._replace(holes=found.holes[::-1])

    monkeypatch.setattr(Following, "state", exchanged)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, NondeterminismError)):
        ask()
