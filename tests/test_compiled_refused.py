"""Paths that look as if they could be run ahead of their guards, and must not be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bendtrace as bt
from bendtrace.engine.compile_attempts import _Comparison
from tests.compiled.common import assert_promise_with, states
from tests.promise import bits

X = torch.ones(4, 4)
RECURRENT = nn.LSTM(4, 4, 2, dropout=0.5)
IN_USE = nn.LSTM(4, 4, 2, dropout=0.5).eval()


def attended(x: Tensor, chance: float = 0.0) -> Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=chance)


def served(model: Callable[..., Any], calls: list[tuple[Any, ...]]) -> bt.BendedModule:
    """Compare all calls with eager, the random state included."""
    bended = bt.BendedModule(model, backend="eager", backend_options={"drop_slower": False})
    for number, args in enumerate(calls):
        torch.manual_seed(number)
        wanted, state = bits(model(*args)), torch.get_rng_state()
        torch.manual_seed(number)
        assert bits(bended(*args)) == wanted
        assert torch.equal(torch.get_rng_state(), state)
    return bended


DRAWING: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "a dropout whose chance is an argument": (
        lambda x, p: functional.dropout(x, p, True), [(X, 0.0)] * 4 + [(X, 0.5)] * 2,
    ),
    "the same before a branch": (
        lambda x, p: functional.dropout(x, p) + (1 if x.sum() > 0 else 2),
        [(X, 0.0)] * 4 + [(X, 0.5), (-X, 0.5)],
    ),
    "a dropout of a batch that was empty": (
        lambda x: functional.dropout(x, 0.5, True), [(X[:0],)] * 4 + [(X,)] * 2,
    ),
    "attention with a chance of dropout": (
        attended, [(X, 0.0)] * 4 + [(X, 0.5)],
    ),
    "a recurrent layer in training": (
        lambda x: RECURRENT(x)[0], [(X,)] * 4,
    ),
    "noise of a batch that was empty": (
        lambda x: x + torch.rand_like(x), [(X[:0],)] * 4 + [(X,)] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAWING)
def test_what_may_draw_random_numbers_is_not_compiled(case: str) -> None:
    bended = served(*DRAWING[case])
    assert bended.compiled.hits == 0
    assert any("random numbers" in reason for reason in bended.compiled.reasons)


def test_a_change_of_sizes_in_place_is_refused_with_what_to_write_instead() -> None:
    bended = served(lambda x: (x + 1).unsqueeze_(0) * 2, [(X,)] * 4)
    (reason,) = bended.compiled.reasons
    assert "unsqueeze_ changes the sizes" in reason
    assert "write x = x.unsqueeze(...)" in reason


def test_whether_a_tensor_contains_something_is_asked_in_the_graph() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        if 0 in x.round():
            return x * 2
        return x - 1 if y in x else x + 1

    none, some, one = torch.full((3,), 2.0), torch.tensor([0.0, 2, 3]), torch.tensor([2.0])
    bended = served(model, [(none, one)] * 5 + [(some, one), (none, one + 1)] * 3)
    assert bended.compiled.hits >= 3
    assert bended.compiled.failures >= 2


QUIET: dict[str, Callable[..., Any]] = {
    "a dropout that is off": lambda x: functional.dropout(x, 0.5, False) + 1,
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "a recurrent layer": lambda x: IN_USE(x)[0],
}


@pytest.mark.parametrize("case", QUIET)
def test_what_could_draw_and_does_not_is_compiled(case: str) -> None:
    assert served(QUIET[case], [(X,)] * 5).compiled.hits == 3


@torch.library.custom_op("tests_compiled::logged", mutates_args=())
def logged(x: Tensor) -> Tensor:
    """Draw noise for some values, and count calls."""
    LOG.append(None)
    return x + torch.rand(4) if x[0, 0] > 1 else x * 2


@logged.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


LOG: list[None] = []


@pytest.mark.parametrize("how", ["itself", "packet", "overload"])
def test_operators_of_others_are_called_as_often_as_the_model_calls_them(how: str) -> None:
    packet = torch.ops.tests_compiled.logged
    function: Any = {"itself": logged, "packet": packet, "overload": packet.default}[how]
    LOG.clear()
    calls = [(X,)] * 4 + [(-X,), (2 * X,), (X,)]
    bended = served(lambda x: function(x) + 1, calls)
    assert len(LOG) == 2 * len(calls)
    assert bended.compiled.hits == 0
    assert "custom operator" in bended.compiled.reasons[0]


RAISING: dict[str, tuple[Callable[..., Any], Tensor, Tensor]] = {
    "a loss of shares": (
        lambda x: functional.binary_cross_entropy(x, torch.ones(4)) + 1,
        torch.full((4,), 0.5), torch.full((4,), 1.5),
    ),
    "a window that leaves gaps": (
        lambda window: torch.istft(torch.ones(9, 4, dtype=torch.cfloat), 16, window=window) + 1,
        torch.ones(16), torch.zeros(16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISING)
def test_errors_that_compiled_code_would_not_raise_are_raised(case: str) -> None:
    model, good, bad = RAISING[case]
    bended = bt.BendedModule(model, backend="aot_eager", backend_options={"drop_slower": False})
    for _ in range(4):
        assert bits(bended(good)) == bits(model(good))
    with pytest.raises(RuntimeError) as wanted:
        model(bad)
    with pytest.raises(RuntimeError) as error:
        bended(bad)
    assert str(error.value) == str(wanted.value)
    assert "raises an error for some values" in bended.compiled.reasons[0]


def test_statistics_that_a_schema_keeps_quiet_about_are_not_written_ahead() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("variance", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.native_batch_norm(
                x, None, None, self.mean, self.variance, True, 0.5, 1e-5
            )[0]  # fmt: skip
            return out + 1 if x.sum() > 0 else out

    eager, model = Normed(), Normed()
    bended = bt.BendedModule(model, backend="eager", backend_options={"drop_slower": False})
    for number in range(8):
        x = torch.randn(4, 4) + (-5 if number == 6 else 5)
        assert bits(bended(x)) == bits(eager(x))
        assert bits(dict(model.named_buffers())) == bits(dict(eager.named_buffers()))
    assert bended.compiled.hits == 0


def test_the_smallest_integer_has_no_absolute_value() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if abs(x[0].item()) > 100 else x - 1

    small, smallest = torch.tensor([3, 2]), torch.tensor([-(2**63), 2])
    bended = served(model, [(small,)] * 4 + [(smallest,), (torch.tensor([-101, 2]),)])
    assert bended.compiled.hits == 2
    assert bended.compiled.failures == 2


# What compiled code has to return


def test_compiled_results_are_compared_in_all_that_python_can_read_of_a_tensor() -> None:
    plain = torch.ones(2, 2)
    with torch.inference_mode():
        inference = torch.ones(2, 2)
    tagged = torch.ones(2, 2)
    tagged.tag = 1  # type: ignore[attr-defined]
    others = {
        "dtype of": plain.double(),
        "device of": plain.to("meta"),
        "shape of": torch.ones(2, 3),
        "requires_grad of": torch.ones(2, 2, requires_grad=True),
        "layout of": plain.to_sparse(),
        "another kind of node": inference,
        "strides (2, 1)": torch.ones(4, 4)[::2, ::2],
        "attributes": tagged,
    }
    for reason, other in others.items():
        assert reason in (_Comparison([]).between(plain, other) or ""), reason
    assert _Comparison([]).between([plain, plain[0]], [plain.clone(), torch.ones(2)])
    assert _Comparison([]).between(plain, plain + 1)
    assert _Comparison([]).between(plain, plain.clone()) is None


SQUEEZED: dict[str, Callable[[Tensor], Any]] = {
    "asked": lambda x: x * x[None, x > 0].squeeze(1).ndim,
    "all": lambda x: x * torch.squeeze(x[None, x > 0]).ndim,
    "length of the shape": lambda x: x * len(x[None, x > 0].squeeze(1).shape),
    "an overload": lambda x: x * torch.ops.aten.squeeze.dims(x[None, x > 0], [1]).ndim,
    "keywords": lambda x: x * torch.squeeze(input=x[None, x > 0], dim=1).ndim,
    "returned": lambda x: x[None, x > 0].squeeze(1) * 2,
}


@pytest.mark.parametrize("case", SQUEEZED)
def test_values_that_decide_how_many_dimensions_there_are(case: str) -> None:
    values = [(3.0, 1, 1), (2.0, 1, 3), (3.0, -1, -1), (-3.0, -2, 1), (1.0, 1, 1)] * 2
    calls = [lambda some=some: ((torch.tensor(some),), {}) for some in values]
    bended = assert_promise_with("eager", lambda: SQUEEZED[case], calls)
    assert any("how many dimensions squeeze" in row["reason"] for row in bended.compiled)


def test_a_dimension_of_fixed_size_is_dropped_in_compiled_code() -> None:
    def model(x: Tensor) -> Tensor:
        return x[x > 0][:, None].squeeze(1) * 2

    values = [(3.0, 1, 1), (2.0, 1, 3), (3.0, -1, -1), (-3.0, -2, 1), (1.0, 1, 1)] * 2
    calls = [lambda some=some: ((torch.tensor(some),), {}) for some in values]
    assert states(assert_promise_with("eager", lambda: model, calls)) == ["used"]


def times_an_array(x: Tensor) -> Tensor:
    return x.relu() * torch.from_numpy(np.ones(4, np.float32)) + 1


def test_an_array_of_numpy_is_named_and_the_ops_around_it_are_compiled() -> None:
    bended = served(times_an_array, [(X * k,) for k in range(33)])
    (reason,) = {row["reason"] for row in bended.compiled}
    assert re.match(
        r"from_numpy is called with an array of numpy \(at .*times_an_array|.*from_numpy", reason
    )
    assert "frame" not in repr(bended.compiled)


def test_results_of_the_meta_device_have_no_values_to_compare() -> None:
    bended = served(lambda x: x * 2 + 1, [(torch.ones(3, device="meta"),)] * 6)
    assert states(bended) == ["used"]


@pytest.mark.all
@pytest.mark.parametrize("name", ["big_bird", "longformer"])
def test_attention_in_blocks_is_compiled_in_segments_and_says_why(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.hf_models import MODELS

    (tiny,) = [one for one in MODELS if one.name == name]
    model = tiny.make()
    bended = bt.BendedModule(model, backend="aot_eager", backend_options={"drop_slower": False})
    with torch.no_grad():
        for number in range(24):
            inputs = tiny.inputs(seed=number % 3)
            assert bits(bended(**inputs)) == bits(model(**inputs))
    report = bended.compiled
    assert sum(row["state"] == "used" for row in report.segments) > 20
    (row,) = report
    assert row["state"] == "not compiled"
    for reason in report.reasons:
        assert re.search(rf"\(at .*modeling_{name}.py:\d+: `", reason), reason
        assert "Unsupported" not in reason
