"""Replays that the model itself does again: equal ones pass, wrong ones raise and say where."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import AuditError, InputError

KEPT = [1.0]


@pytest.fixture
def _warnings() -> Iterator[None]:
    yield
    torch.jit.enable_onednn_fusion(False)


def loud() -> bool:
    """A setting that no replay sees (see `docs/limits.md`)."""
    return torch.jit.onednn_fusion_enabled()


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(2))
        self.calls = 0
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def _constant(self: Any, x: Tensor) -> Tensor:
    return self.norm(x) * (3.0 if loud() else 2.0)


def _other_op(self: Any, x: Tensor) -> Tensor:
    return x.cos() if loud() else x.sin()


def _more_ops(self: Any, x: Tensor) -> Tensor:
    y = x.sin()
    return y.exp() if loud() else y


def _buffer(self: Any, x: Tensor) -> Tensor:
    self.seen.add_(2 if loud() else 1)
    return x.sin()


def _attribute(self: Any, x: Tensor) -> Tensor:
    if loud():
        self.calls = 5
    return x.sin()


def _argument(self: Any, x: Tensor) -> Tensor:
    y = x.sin()
    x.add_(2.0 if loud() else 1.0)
    return y


def _random(self: Any, x: Tensor) -> Tensor:
    if loud():
        torch.rand(1)
    return x.sin()


def _error(self: Any, x: Tensor) -> Tensor:
    if loud():
        raise ValueError("too loud")
    return x.sin()


def _parameter(self: Any, x: Tensor) -> Tensor:
    if loud():
        with torch.no_grad():
            self.norm.weight.add_(0.0)
    return x.sin()


@pytest.mark.usefixtures("_warnings")
@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (_constant, r"output is different; first, it gives mul at .*:\d+ `.*` 3.0, not 2.0"),
        (_other_op, r"output is different; first, it calls cos at .*`x.cos\(\)`, not sin at "),
        (_more_ops, r"output is different; first, it calls exp at .*`y.exp\(\)` as well"),
        (_buffer, r"state is different; first, it gives add_ at .* 2, not 1"),
        (_attribute, r"state is different; it calls the same ops with the same arguments"),
        (_argument, r"arguments are different; first, it gives add_ at .* 2.0, not 1.0"),
        (_random, r"random numbers are different; first, it calls rand at .*, not sin"),
        (_error, r"the model raises ValueError\('too loud'\); .* raises ValueError"),
        (_parameter, r"writes to a tensor that the replay left; first, it calls "),
    ],
)
def test_a_wrong_replay_raises_and_names_what_differs(forward: Any, what: str) -> None:
    bended = bt.BendedModule(Model(forward))
    for _ in range(2):
        bended.audit(torch.randn(3, 2))
    assert bended.stats.replays == 1
    torch.jit.enable_onednn_fusion(True)
    with pytest.raises(AuditError, match=what):
        bended.audit(torch.randn(3, 2))
    assert bended.stats.replays == 2


def test_what_comes_from_autograd_is_copied_and_keeps_its_graph() -> None:
    layer = nn.Linear(2, 2)
    bended = bt.BendedModule(lambda x: x.add_(1).sin())
    for _ in range(2):
        x = layer(torch.ones(1, 2))
        bended.audit(x).sum().backward()
    assert bended.stats.replays == 1
    other = copy.deepcopy(layer)
    other.zero_grad()
    for _ in range(2):
        other(torch.ones(1, 2)).add_(1).sin().sum().backward()
    assert torch.equal(layer.weight.grad, other.weight.grad)


@pytest.mark.usefixtures("_warnings")
def test_a_share_of_the_replays_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.9, 0.2, 0.6, 0.1, 0.7])
    monkeypatch.setattr(random.Random, "random", lambda self: next(drawn))
    bended = bt.BendedModule(Model(_constant), audit=0.5)
    before = random.getstate()
    bended(torch.randn(3, 2))
    torch.jit.enable_onednn_fusion(True)
    for is_audited in (False, True, False, True, False):
        if is_audited:
            with pytest.raises(AuditError):
                bended(torch.randn(3, 2))
        else:
            bended(torch.randn(3, 2))
    assert random.getstate() == before


def test_parameters_that_nobody_writes_to_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    own = nn.Parameter.__deepcopy__
    monkeypatch.setattr(
        nn.Parameter, "__deepcopy__", lambda self, memo: copies.append(self) or own(self, memo)
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    bended = bt.BendedModule(model)
    for _ in range(3):
        bended.audit(torch.randn(4, 2))
    assert bended.stats.replays == 2
    assert copies == []


def _keeps(x: Tensor) -> Tensor:
    KEPT[0] = -KEPT[0]
    return x * 2


def test_what_cannot_be_audited_is_said() -> None:
    bended = bt.BendedModule(_keeps)
    for _ in range(2):
        bended(torch.ones(1))
    with pytest.raises(InputError, match=r"changes .*outside of the model"):
        bended.audit(torch.ones(1))
    model = nn.Linear(1, 1)
    model.lock = __import__("threading").Lock()
    bended = bt.BendedModule(model)
    bended(torch.ones(1))
    with pytest.raises(InputError, match="cannot be copied"):
        bended.audit(torch.ones(1))
    bended = bt.BendedModule(nn.ReLU())
    with (
        bended.interject("relu", torch.neg, allow_none=True),
        pytest.raises(InputError, match="nothing inserted"),
    ):
        bended.audit(torch.ones(1))


def _draws_from_a_closure() -> Callable[[Tensor], Tensor]:
    generator, numbers = torch.Generator().manual_seed(1), random.Random(1)
    return lambda x: x * torch.rand(2, generator=generator) + numbers.random()


class AddsToItsGradients(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            super().forward(x.detach()).sum().backward()
        return x + self.bias.grad


class HoldsATrace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize(
    "make", [_draws_from_a_closure, lambda: AddsToItsGradients(2, 2), HoldsATrace]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_copies_share_or_leave_out_is_no_difference(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    bended = bt.BendedModule(make(), audit=1.0)
    for _ in range(4):
        assert torch.equal(bended(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert bended.stats.replays


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "all", None])
def test_what_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(InputError, match="audit is a share"):
        bt.BendedModule(nn.ReLU(), audit=share)


def test_compiled_paths_are_not_audited() -> None:
    with pytest.raises(InputError, match="audit or backend"):
        bt.BendedModule(nn.ReLU(), audit=0.1, backend="eager")
