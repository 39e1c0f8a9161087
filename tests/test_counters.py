"""Python ints that count the rounds of a loop: exported as numbers that the loop carries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.export.exporting import Exported, difference
from bendtrace.python.bytecode import assign, local_in
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.varying import Lifting, counters_at
from tests.shares import some

INPUTS = [torch.ones(3) * scale for scale in (0.1, 1.0, 3.0, 9.0, 99.0)]
LARGE = torch.ones(3) * 2.0**20  # takes more rounds than any of them


def exported(model: Callable[..., Any], *inputs: Any) -> Exported:
    return bt.BendedModule(model).export(*(inputs or INPUTS))


def assert_equal(made: Exported, model: Callable[..., Any], *args: Any) -> None:
    with torch.no_grad():
        assert difference(made(*args), model(*args)) is None


def limited(x: Tensor) -> tuple[Tensor, int]:
    step = 0
    while x.norm() > 1 and step < 50:
        x = x * 0.5
        step += 1
    return x, step


def left_inside(x: Tensor) -> tuple[Tensor, int]:
    step = 10
    while True:
        x = x * 0.5
        if x.norm() < 1:
            break
        step -= 2
    return x + step, step


def scaled_by_it(x: Tensor) -> Tensor:
    step = 0
    while x.norm() > 1:
        step = step + 1
        x = x * 0.5 + step * 0.001 - x / (step + 2)
    return x


def alternating(x: Tensor) -> Tensor:
    step = 0
    while x.norm() > 1:
        x = x * 0.5 if step % 2 == 0 else x * 0.75
        step += 1
    return x


def picks_rows(x: Tensor) -> Tensor:
    step, found = 0, torch.zeros(64)
    while x.norm() > 1:
        x = x * 0.5
        found = found.index_fill(0, torch.tensor([3]), 1.0) + found[step]
        step += 1
    return found + step


def nested(x: Tensor) -> tuple[Tensor, int]:
    outer = 0
    while x.norm() > 1:
        inner = 0
        while x.sum() > 20:
            x = x * 0.25
            inner += 1
        x = x * 0.5 + inner
        x = x - inner
        outer += 1
    return x, outer


def is_large(x: Tensor) -> bool:
    return bool(x.norm() > 1)


def asked_by_a_helper(x: Tensor) -> tuple[Tensor, int]:
    step = 0
    while is_large(x):
        x = x * 0.5
        step += 1
    return x, step


COUNTING = (
    limited, left_inside, scaled_by_it, alternating, picks_rows, nested, asked_by_a_helper,
)  # fmt: skip


@pytest.mark.parametrize("model", some(COUNTING, chosen=[limited]))
def test_a_counted_loop_runs_for_longer_than_any_input_took(model: Callable[..., Any]) -> None:
    made = exported(model)
    assert "while_loop(" in made.source
    for x in (*INPUTS, LARGE, LARGE / 3, -LARGE):
        assert_equal(made, model, x)


@pytest.mark.more
def test_the_limit_of_a_counted_loop_is_a_question() -> None:
    made = exported(limited)
    assert any("`step < 50`" in str(one) for one in made.unseen)
    with pytest.raises(RuntimeError, match=r"`step < 50` at .* was always True"):
        made(torch.ones(3) * 2.0**60)
    made = exported(limited, *INPUTS, torch.ones(3) * 2.0**60)
    assert_equal(made, limited, torch.ones(3) * 2.0**60)
    assert_equal(made, limited, torch.ones(3) * 2.0**90)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        number = 0
        while number < len(self.layers):
            x = self.layers[number](x)
            if x.norm() < 0.7:
                break
            number += 1
        return x, number


@pytest.mark.more
def test_a_counter_that_picks_layers_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = Layers()
    stream = (torch.randn(3) * 10 for _ in itertools.count())
    made = exported(model, *itertools.islice(stream, 20))
    assert "while_loop(" not in made.source
    equal, messages = 0, []
    for x in itertools.islice(stream, 50):
        try:
            assert_equal(made, model, x)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            equal += 1
    assert equal > 25
    assert all("x.norm() < 0.7" in message for message in messages)


def lengthened(x: Tensor) -> Tensor:
    step = 0
    while x.norm() < 2:
        x = torch.cat([x, x])
        step += 1
    return x * step


@pytest.mark.all
def test_what_is_no_loop_with_a_lifted_counter_is_exported_round_by_round() -> None:
    inputs = [torch.ones(3) * scale for scale in (0.3, 0.5, 1.0, 2.0)]
    made = exported(lengthened, *inputs)
    assert "while_loop(" not in made.source
    for x in inputs:
        assert_equal(made, lengthened, x * 1.1)


def tells_types(x: Tensor) -> Any:
    step = 0
    while x.norm() > 1:
        x = x * 0.5 if type(step) is int else x * 0.25
        step += 1
    return x


def looks_at_variables(x: Tensor) -> Any:
    step = 0
    while x.norm() > 1:
        x = x * len(locals()) / 4
        step += 1
    return x


def written_out(x: Tensor) -> Any:
    step = 0
    while x.norm() > 1:
        x = x * (0.5 if str(step) != "1" else 0.25)
        step += 1
    return x


@pytest.mark.more
@pytest.mark.parametrize("model", some([tells_types, looks_at_variables, written_out], 3))
def test_code_that_could_tell_the_difference_is_given_its_int(model: Callable[..., Any]) -> None:
    made = exported(model)
    for x in INPUTS:
        assert_equal(made, model, x)


def test_a_lifted_run_gives_what_the_model_gives() -> None:
    lifting = Lifting()
    recording = record(
        limited, (LARGE,), {}, Signature(limited), reads_states=True, lifting=lifting
    )
    assert [name for _, name in lifting.lifted.values()] == ["step"]
    assert lifting.needed_counters(recording.tape) == frozenset()
    x, step = recording.result
    assert type(step) is int
    assert difference((x, step), limited(LARGE)) is None


def test_counters_are_found_in_while_loops_only() -> None:
    def counts(items: list[int]) -> int:
        outside, up, down, other = 0, 0, 9, 0
        outside += 1
        for _ in items:
            other += 1
        while up < 5:
            up += 1
            down = down - 2
        return outside + up + down + other

    def names(code: Any) -> set[str]:
        return {n for at in range(0, len(code.co_code), 2) for n in counters_at(code, at)}

    assert counts([1]) == 1 + 5 - 1 + 1
    assert names(counts.__code__) == {"up", "down"}
    assert counters_at(counts.__code__, 0) == frozenset()
    assert names(looks_at_variables.__code__) == set()


def test_a_variable_of_a_running_frame_is_assigned() -> None:
    import sys

    def outer() -> tuple[int, int]:
        one, other = 1, 2

        def inner() -> None:
            frame = sys._getframe(1)
            assert local_in(frame, "one") == 1
            assert local_in(frame, "nothing") is None
            assign(frame, "one", 5)

        inner()
        return one, other

    assert outer() == (5, 2)
