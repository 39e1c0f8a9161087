"""Streams of random inputs for models that are changed at nodes, and for models that write.

Each is compared with the same change made by native hooks, or with the model itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tools.benchmarks.feeding import Call, Fed, feed, known
from tools.benchmarks.streams import (
    WIDTH,
    EarlyExit,
    Episode,
    Gated,
    Leaving,
    Mixtral,
    Mixture,
    Shrinking,
    Stream,
    normal,
    scaled,
)
from tools.benchmarks.ways import WrongOutput, assert_right

__all__ = ["CHANGES", "Change", "change_of", "fed_changed"]

Hook = Callable[[nn.Module], object]
Insert = Callable[[bt.BendedModule], object]


# Models that write to what outlives the call, catch errors, or cast


class Asking(Gated):
    """Gated layers, of which each part is a method."""

    def forward(self, x: Tensor) -> Tensor:
        for number, (gate, other) in enumerate(zip(self.gates, self.others, strict=True)):
            h = self.opened(number, gate, x)
            side = bool(h.mean() > 0)
            self.take(side)
            x = torch.relu(h) + x if side else torch.tanh(other(h)) + x
        return x

    def opened(self, number: int, gate: nn.Module, x: Tensor) -> Tensor:
        """Return what a layer asks about."""
        return gate(x)  # type: ignore[no-any-return]

    def take(self, side: bool) -> None:
        """Go to a side."""


class WritesBuffer(Asking):
    count: Tensor

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("count", torch.zeros(()))

    def opened(self, number: int, gate: nn.Module, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().opened(number, gate, x)


class CountsSides(Asking):
    sides: Tensor

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("sides", torch.zeros(2))

    def take(self, side: bool) -> None:
        self.sides[int(side)] += 1


class WritesArgument(Gated):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.01)
        return super().forward(x)


class Tries(Asking):
    def opened(self, number: int, gate: nn.Module, x: Tensor) -> Tensor:
        try:
            return super().opened(number, gate, x)
        except RuntimeError:
            return x


class Casts(Gated):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class WritesCache(Asking):
    """Each layer writes to its place in a cache, and reads the places before it."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("cache", torch.zeros(12, WIDTH))

    def opened(self, number: int, gate: nn.Module, x: Tensor) -> Tensor:
        h = super().opened(number, gate, x)
        self.cache[number] = h[0]
        return h + 0.1 * self.cache[: number + 1].mean(0)


# Models that run live


class Counts(Asking):
    """Counts its calls."""

    steps = 0

    def __init__(self) -> None:
        super().__init__(12)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = super().forward(x)
        return x if self.steps % 3 else -x


class Collects(Asking):
    """Keeps a number of each call in a list."""

    def __init__(self) -> None:
        super().__init__(12)
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.means.append(x.mean().item())
        return x


class ReadsArray(Asking):
    """Passes content to numpy."""

    def __init__(self) -> None:
        super().__init__(12)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * float(x.detach().numpy().max())


class LooksUp(Asking):
    """Looks up a number of each call by its text."""

    table: Mapping[str, float] = {}

    def __init__(self) -> None:
        super().__init__(12)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.table.get(f"{x.mean().item():.6f}", 2.0)


class EarlyBert(nn.Module):
    """A BERT of transformers that ends when it is sure."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=6, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64,
        )  # fmt: skip
        self.bert, self.head = BertModel(config), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.bert.embeddings(ids)
        for layer in self.bert.encoder.layer:
            h = layer(h)
            h = h[0] if isinstance(h, tuple) else h
            chances: Tensor = self.head(h[:, 0] * 2).softmax(-1)
            if chances.max() > 0.8:
                break
        return chances


def _tokens(generator: torch.Generator) -> tuple[Tensor]:
    length = int(torch.randint(4, 24, (), generator=generator))
    return (torch.randint(3, 99, (1, length), generator=generator),)


def _fixed_tokens(generator: torch.Generator) -> tuple[Tensor]:
    return (torch.randint(3, 99, (1, 12), generator=generator),)


# What is inserted, by native hooks and by us


def _scaled(value: Any) -> Any:
    return value * 1.01


class _Looking(bt.Interjection):
    """Looks at every value, and does nothing."""

    observes = True

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        pass


def _hooked_one(place: str, change: Callable[[Any], Any] = _scaled) -> Hook:
    return lambda model: model.get_submodule(place).register_forward_hook(
        lambda module, inputs, output: change(output)
    )


def _one(place: str) -> tuple[Hook, Insert]:
    return _hooked_one(place), lambda bended: bended.interject(
        bended.model.get_submodule(place), _scaled
    )


def _hooked_all(model: nn.Module, change: Callable[[Any], Any]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: change(output))


_ALL = (
    functools.partial(_hooked_all, change=_scaled),
    lambda bended: bended.interject(nn.Linear, _scaled),
)
_OBSERVED = (
    functools.partial(_hooked_all, change=lambda output: None),
    lambda bended: bended.interject(nn.Linear, _Looking()),
)


def _patch(place: str) -> tuple[Hook, Insert]:
    return _hooked_one(place, lambda output: output + 0.1), lambda bended: bended.patch(
        {bended.model.get_submodule(place): bt.patches.AddPatch(value=0.1)}
    ).__enter__()


def _bend(place: str) -> tuple[Hook, Insert]:
    return _hooked_one(place), lambda bended: bended.bend(
        bt.bends.Scale(1.01), bended.model.get_submodule(place)
    )


def _second(place: str) -> tuple[Hook, Insert]:
    def hook(model: nn.Module) -> None:
        passes = [0]

        def change(module: nn.Module, inputs: Any, output: Any) -> Any:
            passes[0] += 1
            return _scaled(output) if passes[0] == 2 else None

        model.register_forward_pre_hook(lambda module, inputs: passes.__setitem__(0, 0))
        model.get_submodule(place).register_forward_hook(change)

    return hook, lambda bended: bended.interject(
        bended.model.get_submodule(place), _scaled, passes=[1]
    )


_NOTHING: tuple[Hook, Insert] = (lambda model: None, lambda bended: None)


# What one call is


def _forward(call: Call, model: nn.Module, args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return call(*args)


def _loss(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found.square().mean()


def _gradients(call: Call, model: nn.Module, args: tuple[Any, ...]) -> Any:
    model.zero_grad()
    loss = _loss(call(*args))
    loss.backward()
    return loss.detach()


def _train(call: Call, model: nn.Module, args: tuple[Any, ...]) -> Any:
    loss = _gradients(call, model, args)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)
    return loss


@dataclass(frozen=True)
class Change:
    """A stream for a model in which something is inserted, or which does more than to compute.

    Attributes:
        name: what stands in the table.
        make: makes the model.
        draw: draws the arguments of a call.
        inserted: puts native hooks on the model, and inserts the same in a `BendedModule`.
        run: makes one call of the model, or of the `BendedModule`.
        quick: whether it is one of those for a look.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Any, ...]]
    inserted: tuple[Hook, Insert] = _NOTHING
    run: Callable[[Call, nn.Module, tuple[Any, ...]], Any] = _forward
    quick: bool = False


def _gated() -> nn.Module:
    return Gated(12)


_ROW = normal(1, WIDTH)

CHANGES = (
    Change("12 gated layers, one node changed", _gated, _ROW, _one("gates.5"), quick=True),
    Change("12 gated layers, all nodes changed", _gated, _ROW, _ALL),
    Change("12 gated layers, all nodes observed", _gated, _ROW, _OBSERVED),
    Change("12 gated layers, a patch", _gated, _ROW, _patch("gates.5")),
    Change("12 gated layers, a bend", _gated, _ROW, _bend("gates.5")),
    Change("12 gated layers, one node changed, with gradients", _gated, _ROW, _one("gates.5"),
           _gradients),
    Change("12 gated layers, one node changed, a training step", _gated, _ROW, _one("gates.5"),
           _train, quick=True),
    Change("while x.norm() > tol, the second pass changed", Shrinking, scaled, _second("step"),
           quick=True),
    Change("MoE, 8 tokens, one node changed", Mixture, normal(8, WIDTH), _one("routers.1")),
    Change("early exit, one node changed", EarlyExit, _ROW, _one("layers.2")),
    Change("early exit, the second pass of its head changed", EarlyExit, _ROW, _second("head")),
    Change("rows that leave, one node changed", Leaving, normal(6, WIDTH), _one("layer")),
    Change("RL episode, one node changed", Episode, normal(4, scale=0.05), _one("policy.0")),
    Change("Mixtral, one node changed", Mixtral, _tokens, _one("model.model.layers.0.self_attn."
           "o_proj")),
    Change("BERT with early exits, one node changed", EarlyBert, _fixed_tokens,
           _one("bert.encoder.layer.1.output.dense")),
    Change("12 gated layers, a buffer written", WritesBuffer, _ROW, quick=True),
    Change("12 gated layers, a buffer that counts sides", CountsSides, _ROW),
    Change("12 gated layers, an argument written", lambda: WritesArgument(12), _ROW),
    Change("12 gated layers, a static cache", WritesCache, _ROW),
    Change("12 gated layers, ops in `try`", lambda: Tries(12), _ROW, quick=True),
    Change("12 gated layers, autocast", lambda: Casts(12), _ROW),
    Change("12 gated layers, a buffer written, one node changed", WritesBuffer, _ROW,
           _one("gates.5")),
    Change("12 gated layers, calls are counted", Counts, _ROW, quick=True),
    Change("12 gated layers, calls are counted, one node changed", Counts, _ROW, _one("gates.5")),
    Change("12 gated layers, a list that grows", Collects, _ROW),
    Change("12 gated layers, a list that grows, one node changed", Collects, _ROW, _one("gates.5")),
    Change("12 gated layers, content for numpy", ReadsArray, _ROW),
    Change("12 gated layers, content for numpy, one node changed", ReadsArray, _ROW,
           _one("gates.5")),
    Change("12 gated layers, content for numpy, all nodes changed", ReadsArray, _ROW, _ALL),
    Change("12 gated layers, a text as a key", LooksUp, _ROW),
    Change("12 gated layers, a text as a key, one node changed", LooksUp, _ROW, _one("gates.5")),
)  # fmt: skip


def change_of(name: str) -> Change:
    """Return a change by its name.

    Raises:
        KeyError: if there is none.
    """
    return {change.name: change for change in CHANGES}[name]


def fed_changed(name: str, calls: int, size: int) -> Fed:
    """Feed a stream to a model with native hooks, and to its `BendedModule`.

    Args:
        name: of the change.
        calls: how many.
        size: how many calls are one part.

    Returns:
        What `feed` returns, and the counts of `stats`, the `states` and `pairs` that are known.

    Raises:
        WrongOutput: if a call gives or leaves other bits than the model with native hooks.
    """
    change = change_of(name)
    stream = Stream(name, change.make, change.draw)
    model, own, third = (stream.model() for _ in range(3))
    bended = bt.BendedModule(own)
    hook, insert = change.inserted
    hook(model)
    insert(bended)

    def compare(number: int, wanted: Any, given: Any) -> None:
        assert_right(f"bended, in call {number} of {name!r},", given, wanted, exact=True)
        for one, other in zip(_state(model), _state(own), strict=True):
            if not torch.equal(one, other):
                raise WrongOutput(f"call {number} of {name!r} leaves other state than the model")

    def called(call: Call, model: nn.Module) -> Call:
        return lambda *args: (change.run(call, model, args), args)

    found = feed(
        stream, called(model, model), called(bended, own), calls, size, compare,
        warm=called(third, third),
    )  # fmt: skip
    return found | {"compared": found["calls"]} | known(bended)


def _state(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and gradients."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads]
