"""Paths compiled by inductor: within its tolerance, and one synchronisation for each call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine import compile_settings as settings
from tests.compiled.models import Experts, Gated
from tests.cuda.waiting import waits

# Without what is done for speed by default, which takes longer to compile.
PLAIN = {"drop_slower": False, "options": {}}

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("c++") is None, reason="no compiler"
    ),
]


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def inputs(seed: int, rows: int = 16) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [Gated, Experts])
def test_results_are_eager_s_within_tolerance(make: Callable[[], nn.Module]) -> None:
    model = make()
    bended = bt.BendedModule(model, backend="inductor", backend_options=PLAIN)
    with torch.no_grad():
        for seed in (0, 0, 0, 0, 1, 2, 0):
            torch.testing.assert_close(bended(inputs(seed)), model(inputs(seed)))
    assert bended.compiled.hits >= 3
    assert bended.compiled.seconds > 0


def test_training_goes_as_in_eager_within_tolerance() -> None:
    model, twin = Gated(2), Gated(2)
    twin.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model, backend="inductor", backend_options=PLAIN)
    for seed in (0, 0, 0, 0, 1, 0):
        for module in (bended, twin):
            optimizer = torch.optim.SGD(module.parameters(), 1e-3)
            optimizer.zero_grad()
            module(inputs(seed)).square().mean().backward()
            optimizer.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            torch.testing.assert_close(mine, other)
    assert bended.compiled.hits >= 2


def test_what_is_compiled_by_default_works() -> None:
    bended = bt.BendedModule(
        lambda x: x.relu() if x.sum() > 0 else x, backend="inductor",
        backend_options={"drop_slower": False},
    )  # fmt: skip
    for _ in range(4):
        torch.testing.assert_close(bended(inputs(0)), inputs(0).relu() if inputs(0).sum() > 0
                                   else inputs(0))  # fmt: skip
    assert bended.compiled.hits == 2, bended.compiled


def test_where_the_default_does_not_compile_inductor_as_it_is_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "_FOR_CPU", {"cpp_wrapper": True, "cpp.cxx": ("no such",)})
    bended = bt.BendedModule(
        lambda x: x.sigmoid() + 3, backend="inductor", backend_options={"drop_slower": False}
    )
    for _ in range(4):
        torch.testing.assert_close(bended(inputs(0)), inputs(0).sigmoid() + 3)
    assert bended.compiled.hits == 2, bended.compiled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}])
def test_a_call_waits_for_the_gpu_once(options: dict[str, bool]) -> None:
    model, x = Gated().cuda(), inputs(0).cuda()
    options = {"drop_slower": False, **options}
    bended = bt.BendedModule(model, backend="inductor", backend_options=options)
    with torch.no_grad():
        for _ in range(6):
            bended(x)
        served, wanted = bended.compiled.hits, model(x)
        assert [waits(lambda: bended(x)) for _ in range(3)] == [1, 1, 1]
        assert bended.compiled.hits == served + 3
        torch.testing.assert_close(bended(x), wanted)
