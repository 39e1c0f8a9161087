"""Structural pattern matching on traced values, shapes and containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._case import call, floats, ints, randn, register


@register(zero=lambda: call(ints(0)), two=lambda: call(ints(2)), other=lambda: call(ints(9)))
def match_traced_int(n: Tensor) -> Tensor:
    match n.item():
        case 0:
            return n - 1
        case 1 | 2:
            return n * 10
        case k:
            return n.repeat(k)


@register(
    square=lambda: call(randn(3, 3)),
    row=lambda: call(randn(1, 4)),
    tall=lambda: call(randn(4, 2)),
    volume=lambda: call(randn(2, 2, 2)),
)
def match_tuple_of_shape(x: Tensor) -> Tensor:
    match tuple(x.shape):
        case (a, b) if a == b:
            return x.trace()
        case (1, _):
            return x[0]
        case (_, b):
            return x.sum(0) / b
        case (first, *rest):
            return x.sum(0) * first * len(rest)


@register(
    origin=lambda: call(ints(0, 0)),
    axis=lambda: call(ints(0, 4)),
    diagonal=lambda: call(ints(2, 2)),
    far=lambda: call(ints(1, 9)),
)
def match_pair_of_items(x: Tensor) -> Tensor:
    match x.tolist():
        case [0, 0]:
            return x + 1
        case [0, y] | [y, 0]:
            return x * y
        case [a, b] if a == b:
            return x.sum()
        case _:
            return x.flip(0)


@dataclass
class Push:
    """An instruction with an operand."""

    value: Tensor


@dataclass
class Combine:
    """An instruction that names an operation."""

    name: str


@register(
    add=lambda: call([Push(floats(1)), Push(floats(2)), Combine("add")]),
    multiply=lambda: call([Push(floats(3)), Push(floats(2)), Combine("mul")]),
    unknown=lambda: call([Push(floats(3)), Combine("dup"), Combine("mul")]),
)
def match_class_patterns(program: list[Push | Combine]) -> Tensor:
    stack: list[Tensor] = []
    for instruction in program:
        match instruction:
            case Push(value):
                stack.append(value)
            case Combine(name="add" | "mul" as name):
                b, a = stack.pop(), stack.pop()
                stack.append(getattr(torch, name)(a, b))
            case Combine():
                stack.append(stack[-1])
    return stack.pop()


@register(
    scaled=lambda: call({"op": "scale", "x": randn(2), "by": 3.0}),
    joined=lambda: call({"op": "join", "x": randn(2), "parts": [randn(1), randn(3)]}),
    bare=lambda: call({"x": randn(2)}),
)
def match_mapping_patterns(request: dict[str, Any]) -> Tensor:
    match request:
        case {"op": "scale", "x": x, "by": float(by)}:
            return x * by
        case {"op": "join", "x": x, "parts": [*parts]}:
            return torch.cat([x, *parts])
        case _:
            return request["x"].neg()


@register(
    high=lambda: call(floats(0.9, 0.2)),
    low=lambda: call(floats(0.1, 0.9)),
    both=lambda: call(floats(0.9, 0.9)),
)
def match_tuple_of_conditions(p: Tensor) -> Tensor:
    match (bool(p[0] > 0.5), bool(p[1] > 0.5)):
        case (True, True):
            return p * 2
        case (True, False):
            return p[:1]
        case _:
            return p.cumsum(0)


@register(
    tensor=lambda: call(randn(2)), pair=lambda: call((randn(2), randn(2))), number=lambda: call(2.0)
)
def match_argument_type(x: Tensor | tuple[Tensor, Tensor] | float) -> Tensor:
    match x:
        case Tensor():
            return x.exp()
        case (a, b):
            return a - b
        case _:
            return torch.full((2,), x)
