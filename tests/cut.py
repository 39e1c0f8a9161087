"""Models that can be cut into by hand, to compare with what is inserted in them.

Their forwards call functions by way of `Cut.at`. What `cuts` has under a name is called in place of
the function there, with the function and its arguments; an untouched model has no cuts. So a
model that was cut into by hand is ordinary eager code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from tests.promise import bits, footprint, state

Cuts = dict[str, Callable[..., Any]]


class Cut(nn.Module):
    """A model in which functions can be called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: Cuts = {}

    def at(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cut = self.cuts.get(name)
        return function(*args, **kwargs) if cut is None else cut(function, *args, **kwargs)


class Block(Cut):
    """Static: functions, a method, modules, state that is written, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.at("up", self.up, x)
        hidden = self.at("norm", self.norm, self.at("softplus", F.softplus, hidden, 2.0))
        hidden = self.at("drop", self.drop, hidden)
        scores = self.at("softmax", torch.softmax, hidden, dim=-1)
        both = self.at("mul", torch.mul, scores, hidden)
        down = self.at("down", self.down, self.at("relu", Tensor.relu, both))
        return self.at("add", torch.add, x, down) * hidden.mean()


class Experts(Cut):
    """Data-dependent: each expert is called for the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.at("softmax", F.softmax, self.gate(x), dim=-1)
        weights, chosen = scores.max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) > 0:
                done = self.at("gelu", F.gelu, self.at(f"expert {number}", expert, x[rows]))
                out = out.index_add(0, rows, done * weights[rows, None])
        return self.at("add", torch.add, out, x)


class Refine(Cut):
    """Data-dependent: a loop with an early exit."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        nn.init.eye_(self.step.weight)

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while x.norm() > 1:
            x = self.at("mul", torch.mul, self.at("tanh", torch.tanh, self.step(x)), 0.5)
            steps += 1
            if steps > 6 or x.sum() < -3:
                x = self.at("neg", torch.neg, x)
                break
        return x + steps


def batches(*shape: int, seeds: Sequence[int] = (0, 1, 2), scale: float = 1.0) -> list[Tensor]:
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return [batch * scale for batch in made]


def run(call: Callable[..., Any], model: Any, batch: Tensor, seed: int) -> Any:
    """Return the bits of all that a forward and a backward pass give and leave."""
    if isinstance(model, nn.Module):
        model.zero_grad()
    given = batch.clone().requires_grad_()
    torch.manual_seed(seed)
    out = call(given)
    tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if tensors:
        weighed = [(t * torch.arange(1.0, 1 + t.numel()).view_as(t)).sum() for t in tensors]
        sum(weighed).backward()  # type: ignore[union-attr]
    held = [p.grad for p in model.parameters()] if isinstance(model, nn.Module) else []
    kept = dict(model.state_dict()) if isinstance(model, nn.Module) else {}
    return bits([out, given.grad, held, kept, torch.get_rng_state()])


def assert_as_by_hand(
    make: Callable[[], Cut],
    insert: Callable[[bt.BendedModule], Any],
    cuts: Cuts,
    calls: Sequence[Tensor],
    *,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    changes: bool = True,
) -> bt.BendedModule:
    """Compare a model with insertions to one that was cut by hand: live, replayed, and without.

    Args:
        make: makes the model, the same one under the same seed.
        insert: inserts something; returns what has a `remove()`.
        cuts: the same by hand.
        calls: the inputs.
        mode: a context to call in.
        changes: whether it should make a difference.
    """

    def made() -> Cut:
        torch.manual_seed(0)
        return make()

    hand, plain, model = made(), made(), made()
    bended = bt.BendedModule(model)
    hand.cuts = cuts
    numbered = [(batch, seed) for seed, batch in enumerate(calls)]
    with mode():
        handle = insert(bended)
        seen = footprint()
        before = state(model)
        for turn in range(3):
            replays = bended.stats.replays
            wanted = [run(hand, hand, batch, seed) for batch, seed in numbered]
            assert [run(bended, model, batch, seed) for batch, seed in numbered] == wanted, turn
            untouched = [run(plain, plain, batch, seed) for batch, seed in numbered]
            assert (untouched != wanted) == changes
        # One may be recorded again where a fourth number makes numbers stay traced.
        assert bended.stats.replays >= replays + len(calls) - 1
        assert bended.stats.live == 0
        assert footprint() == seen
        handle.remove()
        model.load_state_dict(plain.state_dict())
        for _ in range(2):
            wanted = [run(plain, plain, batch, seed) for batch, seed in numbered]
            assert [run(bended, model, batch, seed) for batch, seed in numbered] == wanted
    fresh = made()
    model.load_state_dict(fresh.state_dict())
    model.zero_grad()
    assert state(model) == before
    return bended
