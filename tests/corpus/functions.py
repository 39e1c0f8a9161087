"""Models that are plain functions, closures, partials, bound methods and callables."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register, register_factory

TABLE = torch.linspace(-1, 1, 8).view(4, 2)


@register(low=lambda: call(ints(0, 1)), high=lambda: call(ints(3, 2)))
def reads_global_tensor(index: Tensor) -> Tensor:
    rows = TABLE[index]
    return rows.exp() if rows.sum() > 0 else rows * 2


@register_factory(below=lambda: call(negative(3)), above=lambda: call(positive(3) + 3))
def closure_over_tensor() -> Callable[[Tensor], Tensor]:
    pivot = torch.randn(3).clamp(-0.1, 2)

    def model(x: Tensor) -> Tensor:
        return x - pivot if (x > pivot).all() else x * pivot

    return model


@register(
    first=lambda: call(ints(0), randn(3)),
    second=lambda: call(ints(1), randn(3)),
    third=lambda: call(ints(2), randn(3)),
)
def dispatch_to_partials(which: Tensor, x: Tensor) -> Tensor:
    ops = [
        functools.partial(torch.clamp, min=0),
        functools.partial(torch.roll, shifts=1),
        lambda v: v * v,
    ]
    return ops[which.item()](x)


@register_factory(small=lambda: call(floats(0.1)), large=lambda: call(floats(5)))
def partial_as_model() -> Callable[[Tensor], Tensor]:
    def model(weight: Tensor, x: Tensor, limit: float) -> Tensor:
        return x * weight if x.max() < limit else x / weight

    return functools.partial(model, torch.ones(1) * 3, limit=1.0)


class _Scaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2))

    def encode(self, x: Tensor) -> Tensor:
        return self._shift(x) if x.sum() > 0 else x * self.scale

    def _shift(self, x: Tensor) -> Tensor:
        return x + self.scale


@register_factory(shifted=lambda: call(positive(2)), scaled=lambda: call(negative(2)))
def bound_method_as_model() -> Callable[[Tensor], Tensor]:
    return _Scaler().encode


class _Polynomial:
    def __init__(self) -> None:
        self.coefficients = torch.randn(3)

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    @staticmethod
    def power(x: Tensor, n: int) -> Tensor:
        return x**n if n else torch.ones_like(x)

    def __call__(self, x: Tensor) -> Tensor:
        degree = self.degree if x.norm() < 1 else 1
        return sum(self.coefficients[n] * self.power(x, n) for n in range(degree + 1))


@register_factory(near=lambda: call(floats(0.1, 0.2)), far=lambda: call(floats(3, 4)))
def callable_object_as_model() -> Callable[[Tensor], Tensor]:
    return _Polynomial()


@register(odd=lambda: call(floats(1, 1, 1)), even=lambda: call(floats(1, -1, 1, -1)))
def nonlocal_counter(x: Tensor) -> Tensor:
    flips = 0

    def visit(v: Tensor) -> Tensor:
        nonlocal flips
        if v < 0:
            flips += 1
            return -v
        return v

    return torch.stack([visit(v) for v in x]) * (flips + 1)


@register(
    add=lambda: call("add", randn(2), randn(2)),
    sub=lambda: call("sub", randn(2), randn(2)),
    matmul=lambda: call("matmul", randn(2), randn(2)),
)
def operator_by_name(name: str, x: Tensor, y: Tensor) -> Tensor:
    return getattr(operator, name)(x, y + 1)


def _residual(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(f)
    def wrapped(x: Tensor) -> Tensor:
        y = f(x)
        return x + y if x.shape == y.shape else y

    return wrapped


@_residual
def _maybe_pool(x: Tensor) -> Tensor:
    return x.mean(0) if x.max() > 2 else x.tanh()


@register(pooled=lambda: call(randn(3, 2) + 5), residual=lambda: call(randn(3, 2) - 9))
def decorated_helper_function(x: Tensor) -> Tensor:
    return _maybe_pool(x)


@functools.lru_cache(maxsize=32)  # an entry that is evicted is traced anew
def _fibonacci(n: int) -> int:
    return n if n < 2 else _fibonacci(n - 1) + _fibonacci(n - 2)


@register(small=lambda: call(ints(3)), large=lambda: call(ints(10)))
def cached_python_helper(n: Tensor) -> Tensor:
    k = _fibonacci(n.item())
    return n.repeat(k) if k < 10 else n + k


class _Registry:
    handlers: dict[str, Callable[..., Any]] = {}  # noqa: RUF012

    @classmethod
    def handler(cls, f: Callable[..., Any]) -> Callable[..., Any]:
        cls.handlers[f.__name__] = f
        return f


@_Registry.handler
def _grow(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@_Registry.handler
def _shrink(x: Tensor) -> Tensor:
    return x[: len(x) // 2]


@register(
    grow=lambda: call(randn(2)), shrink=lambda: call(randn(16)), settled=lambda: call(randn(6))
)
def handlers_found_by_name(x: Tensor) -> Tensor:
    while not 4 <= len(x) <= 8:
        x = _Registry.handlers["_grow" if len(x) < 4 else "_shrink"](x)
    return x.cumsum(0)
