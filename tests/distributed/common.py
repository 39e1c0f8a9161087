"""Models and comparisons for what runs on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import bendtrace as bt


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Branching(nn.Module):
    """Two blocks, and one more layer if the values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        if x.sum() > 0:
            x = self.extra(x)
        return x * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(mixed.reshape(batch, length, -1))


def rank() -> int:
    return dist.get_rank()


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def batches(count: int, shape: tuple[int, ...] = (4, 8), own: bool = False) -> list[Tensor]:
    """Some inputs, the same on all ranks or each rank its own; the branch goes both ways."""
    generator = torch.Generator().manual_seed(1 + (rank() if own else 0))
    return [
        torch.randn(shape, generator=generator) + (0.7 if i % 2 else -0.7) for i in range(count)
    ]


class Trained(NamedTuple):
    """What some steps of training gave."""

    outputs: list[Tensor]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]


def train(
    model: Callable[[Tensor], Any], parameters: list[nn.Parameter], inputs: list[Tensor]
) -> Trained:
    """Take a step for each input, in a loop of plain PyTorch."""
    # Not by Adam, which makes much of gradients that are nothing but rounding.
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    outputs, gradients = [], []
    for x in inputs:
        optimizer.zero_grad()
        out = full(model(x))
        out.pow(2).mean().backward()
        outputs.append(out.detach().clone())
        gradients.append([None if p.grad is None else full(p.grad).clone() for p in parameters])
        optimizer.step()
    return Trained(outputs, gradients, [full(p).detach().clone() for p in parameters])


def assert_same(one: Trained, other: Trained) -> None:
    """Bit for bit."""
    _compare(one, other, lambda a, b: torch.equal(a, b))


def assert_close(one: Trained, other: Trained) -> None:
    """As far as another order of sums allows."""
    _compare(one, other, lambda a, b: torch.allclose(a, b, atol=1e-4, rtol=1e-4))


def _compare(one: Trained, other: Trained, alike: Callable[[Tensor, Tensor], bool]) -> None:
    for step, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        assert alike(a, b), f"output {step}: {(a - b).abs().max()}"
    for step, (found, expected) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a is None) == (b is None), f"gradient {number} of step {step}"
            if a is not None and b is not None:
                assert alike(a, b), f"gradient {number} of step {step}: {(a - b).abs().max()}"
    for number, (a, b) in enumerate(zip(one.parameters, other.parameters, strict=True)):
        assert alike(a, b), f"parameter {number}: {(a - b).abs().max()}"


def assert_replays(bended: bt.BendedModule, *, calls: int) -> None:
    """Both sides of the branch are known, and nothing had to run live."""
    assert bended.why_live == (), bended.why_live
    stats = bended.stats
    assert stats.live == 0
    assert stats.replays + stats.traces == calls
    assert stats.replays >= calls - 2


def everywhere(value: Any) -> list[Any]:
    """What all ranks have for a value, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
