"""Exceptions as control flow: try, except, finally, assert, suppress."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from ._case import call, floats, ints, negative, positive, randn, register


@register(matches=lambda: call(randn(2, 3)), mismatched=lambda: call(randn(3, 2)))
class ExceptOnShapeMismatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.proj(x)
        except RuntimeError:
            return self.proj(x.T)


@register(definite=lambda: call(torch.eye(2) * 2), singular=lambda: call(torch.ones(2, 2)))
def cholesky_with_jitter(a: Tensor) -> Tensor:
    jitter = 0.0
    while True:
        try:
            return torch.linalg.cholesky(a + jitter * torch.eye(2))
        except torch.linalg.LinAlgError:
            jitter = max(jitter * 10, 1e-3)


@register(small=lambda: call(positive(3)), large=lambda: call(positive(3) + 5))
def assert_on_data(x: Tensor) -> Tensor:
    assert x.min() > 0, "expected positive values"
    y = x.log()
    assert torch.isfinite(y).all()
    return y if y.min() > 0 else y.exp()


@register(holds=lambda: call(positive(3)), fails=lambda: call(negative(3)))
def assertion_caught(x: Tensor) -> Tensor:
    try:
        assert (x > 0).all(), "negative"
    except AssertionError as error:
        return x * len(str(error))
    return x.sqrt()


@register(present=lambda: call(ints(1), randn(2)), absent=lambda: call(ints(4), randn(2)))
def key_error_from_traced_int(key: Tensor, x: Tensor) -> Tensor:
    try:
        return x * {1: 2.0}[key.item()]
    except KeyError:
        return x.neg()


@register(inside=lambda: call(ints(1), randn(3)), outside=lambda: call(ints(3), randn(3)))
def index_error_from_tensor(i: Tensor, x: Tensor) -> Tensor:
    try:
        return x[i.item()]
    except IndexError:
        return x.sum()


@register(zero=lambda: call(floats(0, 0)), nonzero=lambda: call(floats(1, 3)))
def zero_division_of_items(x: Tensor) -> Tensor:
    try:
        ratio = 1 / x.sum().item()
    except ZeroDivisionError:
        ratio = 0.0
    return (x + 1) * ratio


class _Overflow(Exception):
    def __init__(self, partial: Tensor) -> None:
        self.partial = partial


def _checked_product(x: Tensor) -> Tensor:
    total = torch.ones(())
    for v in x:
        total = total * v
        if total > 100:
            raise _Overflow(total)
    return total


@register(completes=lambda: call(floats(1, 2, 3)), overflows=lambda: call(floats(50, 4, 1)))
def custom_exception_carries_tensor(x: Tensor) -> Tensor:
    try:
        return _checked_product(x)
    except _Overflow as overflow:
        return overflow.partial.log()


@register(ok=lambda: call(floats(4, 9)), failed=lambda: call(floats(4, -9)))
def try_else_finally(x: Tensor) -> list[Tensor]:
    out = []
    try:
        if x.min() < 0:
            raise ValueError("negative")
    except ValueError:
        out.append(x.abs())
    else:
        out.append(x.sqrt())
    finally:
        out.append(x.sum())
    return out


@register(kept=lambda: call(randn(2), randn(2)), suppressed=lambda: call(randn(2), randn(3)))
def suppressed_broadcast_error(x: Tensor, y: Tensor) -> Tensor:
    z = x * 3
    with contextlib.suppress(RuntimeError):
        z = z + y
    return z


@register(first=lambda: call(ints(1)), second=lambda: call(ints(2)), third=lambda: call(ints(3)))
def reraised_as_another_type(n: Tensor) -> Tensor:
    try:
        try:
            if n == 2:
                raise ValueError
            if n == 3:
                raise TypeError
        except ValueError as error:
            raise LookupError from error
    except LookupError:
        return n * 10
    except TypeError:
        return n - 10
    return n


@register(short=lambda: call(randn(2)), long=lambda: call(randn(4)))
def stop_iteration_ends_loop(x: Tensor) -> Tensor:
    rows, total = iter(x), x.new_zeros(())
    while True:
        try:
            total = total * 0.5 + next(rows)
        except StopIteration:
            return total
