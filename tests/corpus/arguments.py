"""Arguments of every kind: flags, enums, keywords, containers, records, aliases."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._case import call, floats, negative, positive, randn, register


@register(without=lambda: call(randn(2, 3)), with_mask=lambda: call(randn(2, 3), floats(1, 0, 1)))
class OptionalTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.proj(x)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1)


@register(
    mean=lambda: call(randn(3, 2), "mean"),
    max=lambda: call(randn(3, 2), "max"),
    last=lambda: call(randn(3, 2), "last"),
)
def string_argument(x: Tensor, pool: str) -> Tensor:
    if pool == "mean":
        return x.mean(0)
    if pool == "max":
        return x.amax(0)
    return x[-1]


@register(on=lambda: call(randn(3), True), off=lambda: call(randn(3), False))
def bool_argument(x: Tensor, normalise: bool) -> Tensor:
    return x / x.norm() if normalise else x


@register(
    true=lambda: call(randn(3), True),
    one=lambda: call(randn(3), 1),
    one_float=lambda: call(randn(3), 1.0),
)
def equal_arguments_of_different_types(x: Tensor, n: bool | int | float) -> Tensor:
    if isinstance(n, bool):
        return x.flip(0)
    return x.long() * n if isinstance(n, int) else x * n + 0.5


class Reduction(enum.Enum):
    NONE = enum.auto()
    SUM = enum.auto()


@register(none=lambda: call(randn(3), Reduction.NONE), sum=lambda: call(randn(3), Reduction.SUM))
def enum_argument(x: Tensor, reduction: Reduction) -> Tensor:
    loss = x.square()
    return loss.sum() if reduction is Reduction.SUM else loss


@register(
    default=lambda: call(randn(2, 4)),
    scaled=lambda: call(randn(2, 4), scale=2.0),
    bare=lambda: call(randn(2, 4), bias=False),
)
class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, *, scale: float = 1.0, bias: bool = True) -> Tensor:
        y = F.linear(x, self.weight, self.offset if bias else None)
        return y if scale == 1.0 else y * scale


@register(one=lambda: call(randn(2)), three=lambda: call(randn(2), randn(3), randn(1)))
def star_args(*xs: Tensor) -> Tensor:
    return torch.cat([x * (i + 1) for i, x in enumerate(xs)])


@register(
    none=lambda: call(x=randn(2)), two=lambda: call(x=randn(2), scale=floats(2), shift=floats(1))
)
def star_kwargs(x: Tensor, **extra: Tensor) -> Tensor:
    for name, value in sorted(extra.items()):
        x = x * value if name == "scale" else x + value
    return x


@register(
    positional=lambda: call(randn(2), 2),
    keyword=lambda: call(randn(2), power=3),
    default=lambda: call(randn(2)),
)
def default_argument(x: Tensor, power: int = 1) -> Tensor:
    y = x
    for _ in range(power - 1):
        y = y * x
    return y


@register(
    flat=lambda: call({"a": randn(2), "parts": []}),
    nested=lambda: call({"a": randn(2), "parts": [(randn(2), {"w": floats(2)}), (randn(2), {})]}),
)
def nested_containers(batch: dict[str, Any]) -> Tensor:
    total = batch["a"]
    for x, options in batch["parts"]:
        total = total + x * options.get("w", 1)
    return total


@dataclass
class Graph:
    """A dataclass argument."""

    nodes: Tensor
    edges: list[tuple[int, int]]
    weight: Tensor | None = None


@register(
    plain=lambda: call(Graph(randn(3, 2), [(0, 1)])),
    weighted=lambda: call(Graph(randn(3, 2), [(0, 1), (2, 1)], floats(2, 3))),
    isolated=lambda: call(Graph(randn(3, 2), [])),
)
def dataclass_argument_and_output(graph: Graph) -> Graph:
    nodes = graph.nodes.clone()
    for i, (a, b) in enumerate(graph.edges):
        message = graph.nodes[a] if graph.weight is None else graph.nodes[a] * graph.weight[i]
        nodes[b] += message
    return replace(graph, nodes=nodes)


class State(NamedTuple):
    """A named tuple argument."""

    hidden: Tensor
    step: int


@register(
    running=lambda: call(State(positive(2), 1)),
    reset=lambda: call(State(positive(2), 4)),
    cold=lambda: call(State(negative(2), 1)),
)
def named_tuple_argument_and_output(state: State) -> State:
    if state.step > 3:
        return State(torch.zeros_like(state.hidden), 0)
    if state.hidden.sum() < 0:
        return state._replace(hidden=-state.hidden)
    return State(state.hidden.tanh(), state.step + 1)


def _self_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = randn(3, 4)
    return call(x, x)


@register(self_attention=_self_call, cross_attention=lambda: call(randn(3, 4), randn(3, 4)))
class SameTensorTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 8)
        self.q = nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        if q is k:
            a, b = self.qk(q).chunk(2, -1)
        else:
            a, b = self.q(q), k
        return (a @ b.T).softmax(-1)


@register(relu=lambda: call(randn(3), torch.relu), twice=lambda: call(randn(3), F.gelu, 2))
def callable_argument(x: Tensor, activation: Callable[[Tensor], Tensor], times: int = 1) -> Tensor:
    for _ in range(times):
        x = activation(x)
    return x


@register(
    number=lambda: call(randn(2), 2.5),
    tensor=lambda: call(randn(2), floats(1, 2)),
    pair=lambda: call(randn(2), (1, 2)),
)
def isinstance_dispatch(x: Tensor, other: Any) -> Tensor:
    if isinstance(other, Tensor):
        return x @ other
    if isinstance(other, tuple):
        return x * other[0] + other[1]
    return x * other


@register(
    square=lambda: call(randn(4), (2, 2)),
    flat=lambda: call(randn(4), ()),
)
def tuple_of_ints_argument(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape).sum(-1) if shape else x


@register(
    sized=lambda: call([randn(2), randn(3)]),
    empty=lambda: call([]),
    missing=lambda: call([None, randn(1)]),
)
def list_with_missing_tensors(parts: list[Tensor | None]) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else torch.zeros(1)


@register(
    identity=lambda: call(randn(2)),
    override=lambda: call(randn(2), options={"eps": 1.0, "inplace": False}),
)
def dict_of_options(x: Tensor, options: dict[str, Any] | None = None) -> Tensor:
    settings = {"eps": 0.0, **(options or {})}
    return x / (x.abs() + settings["eps"]) if settings["eps"] else x.clone()
