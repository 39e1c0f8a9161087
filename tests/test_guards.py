"""What a replay depends on: each thing that can change is followed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.errors import DivergenceError, ExportError
from bendtrace.export.machine import is_fixed
from bendtrace.tape.guards import ValueGuard
from bendtrace.tape.tape import Use
from tests.promise import assert_promise, bits, randn_inputs

FLAG = 1
TABLE = {"factor": 2.0}
GLOBAL = torch.ones(2)


def kinds(trace: bt.Trace) -> dict[str, str]:
    rows = trace.guards.to_list()
    return {row["source"]: row["when"] for row in rows}


def test_conditions_on_sizes_are_input_guards_and_conditions_on_values_data_guards() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1 and x.sum() > 0:
            return x.reshape(-1, 2) * x.shape[1]
        return x

    trace = bt.trace(model, torch.ones(2, 4))
    assert kinds(trace)["x.shape[0] > 1"] == "input"
    assert kinds(trace)["x.sum() > 0"] == "data"
    assert torch.equal(trace.replay(torch.ones(3, 6)), model(torch.ones(3, 6)))
    with pytest.raises(DivergenceError, match=r"and `x.shape\[0\] > 1` at .* was True"):
        trace.replay(torch.ones(1, 4))
    with pytest.raises(DivergenceError, match=r"if `x.sum\(\) > 0` at .* was True"):
        trace.replay(-torch.ones(2, 4))


def test_a_dtype_that_follows_from_the_inputs_needs_no_look_in_the_run() -> None:
    linear = nn.Linear(2, 2)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return y * 2 if y.dtype == torch.float32 else y

    trace = bt.trace(model, torch.ones(1, 2))
    assert set(kinds(trace).values()) == {"implied"}
    linear.double()
    with pytest.raises(
        bt.errors.DivergenceError, match=r"linear\.weight is not of dtype torch\.float32"
    ):
        trace.replay(torch.ones(1, 2))


def test_a_rank_that_depends_on_sizes_is_looked_at_in_the_run() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.squeeze()
        return y + 1 if y.dim() == 1 else y - 1

    bended = bt.BendedModule(model)
    for shape in ((1, 3), (2, 3), (1, 4), (2, 2), (3, 1)):
        assert torch.equal(bended(torch.ones(shape)), model(torch.ones(shape)))
    assert bended.stats.traces == 2


def test_an_op_that_returns_its_own_input_is_not_mistaken_for_a_copy() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.contiguous()
        y.add_(1)
        return x * 1, y

    bended = bt.BendedModule(model)
    for make in (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2).t(), lambda: torch.ones(2, 3)):
        assert bits(bended(make())) == bits(model(make()))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    flags: list[bool]
    extra: dict[str, Any]


def test_every_plain_thing_in_an_argument_is_guarded() -> None:
    def model(batch: Batch) -> torch.Tensor:
        y = batch.x * 2 if batch.flags[0] else batch.x
        return y + batch.extra.get("bias", 0) * len(batch.flags)

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    batches = [
        Batch(x, [True], {}), Batch(x, [False], {}), Batch(x, [True, True], {}),
        Batch(x, [True], {"bias": 1}), Batch(x, [True], {"bias": 1.0}),
        Batch(x, [True], {"bias": x}), Batch(x.double(), [True], {}), Batch(x, [1], {}),
        Batch(x, (True,), {}),
    ]  # fmt: skip
    for batch in batches * 2:
        assert bits(bended(batch)) == bits(model(batch))
    assert bended.stats.replays == len(batches)


def test_the_same_tensor_twice_is_another_call_than_two_tensors() -> None:
    def model(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q * 2 if q is k else q + k

    bended = bt.BendedModule(model)
    x, y = torch.ones(2), torch.ones(2)
    for pair in ((x, x), (x, y), (y, y), (y, x)):
        assert torch.equal(bended(*pair), model(*pair))
    assert bended.stats.traces == 2


def _with_globals(x: torch.Tensor) -> torch.Tensor:
    y = x * TABLE["factor"] + GLOBAL
    return y + 1 if FLAG == 1 else y


def test_globals_that_a_function_reads_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    bended = bt.BendedModule(_with_globals)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _with_globals(x)

    wrapped = bt.BendedModule(Model())
    x = torch.ones(2)
    for name, value in [
        ("FLAG", 1),
        ("FLAG", 2),
        ("GLOBAL", torch.zeros(2)),
        ("TABLE", {"factor": 5.0}),
    ]:
        monkeypatch.setitem(globals(), name, value)
        for called in (bended, wrapped, bended, wrapped):
            assert torch.equal(called(x), _with_globals(x))
    monkeypatch.setitem(TABLE, "factor", 7.0)
    for called in (bended, wrapped):
        assert torch.equal(called(x), _with_globals(x))
    assert bended.stats.replays >= 4


def test_closures_are_followed() -> None:
    factor, weight = 2, torch.ones(2)

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x + weight) * factor

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    assert torch.equal(bended(x), torch.full((2,), 4.0))
    factor = 3
    assert torch.equal(bended(x), torch.full((2,), 6.0))
    weight = torch.zeros(2)
    assert torch.equal(bended(x), torch.full((2,), 3.0))
    assert bended.stats.replays == 1


def test_settings_objects_of_modules_are_guarded() -> None:
    class Settings:
        def __init__(self) -> None:
            self.double, self.names = True, ["a"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if self.settings.double else x * len(self.settings.names)

    model = Model()
    bended, x = bt.BendedModule(model), torch.ones(2)
    for change in (
        lambda: None,
        lambda: setattr(model.settings, "double", False),
        lambda: model.settings.names.append("b"),
        lambda: setattr(model, "settings", Settings()),
    ):
        change()
        for _ in range(2):
            assert torch.equal(bended(x), model(x))
    assert bended.stats.replays == 4


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad, torch.enable_grad, torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("meta"),
    ],
)  # fmt: skip
def test_ambient_modes_are_followed(mode: Any) -> None:
    linear = nn.Linear(2, 2)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return y.to(torch.float32) + torch.ones(2, device=y.device)

    bended, x = bt.BendedModule(model), torch.ones(1, 2)
    for _ in range(2):
        assert bits(bended(x)) == bits(model(x))
        with mode():
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.replays >= 2


def test_the_default_dtype_is_followed() -> None:
    bended = bt.BendedModule(lambda x: x + torch.ones(2))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert bended(torch.ones(2, dtype=torch.float32)).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_outputs_are_built_anew_each_time() -> None:
    def model(x: torch.Tensor) -> dict[str, Any]:
        return {"list": [x + 1], "tuple": (1, x), "none": None, "n": x.shape[0]}

    bended = bt.BendedModule(model)
    first = bended(torch.ones(2))
    second, third = bended(torch.ones(2)), bended(torch.ones(2))
    assert bits(first) == bits(second)
    assert second is not third
    assert second["list"] is not third["list"]
    assert type(third["n"]) is int


def test_a_module_under_two_names_and_an_empty_place_for_one_are_no_other_order() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.register_module("none", None)
            self.c = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.c(self.a(x) + self.b(-x))
            return result

    bended = assert_promise(Shared, [randn_inputs(2, 4)] * 3)
    assert (bended.stats.traces, bended.stats.replays) == (1, 2)


def test_exported_programs_refuse_a_kind_of_guard_that_they_do_not_know() -> None:
    class ParityGuard(ValueGuard):
        subject = "the parity"

    assert not is_fixed(ValueGuard(0, 0, 1, Use.RESULT, None, None))
    with pytest.raises(ExportError, match="cannot test the parity"):
        is_fixed(ParityGuard(0, 0, 1, Use.RESULT, None, None))
