"""Python arithmetic on values read from tensors, and its way back into tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._case import call, floats, ints, positive, randn, register


@register(first=lambda: call(floats(1, 4)), second=lambda: call(floats(6, 4)))
def min_and_max_of_items(x: Tensor) -> Tensor:
    a, b = x[0].item(), x[1].item()
    low, high = min(a, b), max(a, b)
    return x.clamp(low + 0.5, high) * (2 if low == a else 3)


@register(small=lambda: call(ints(1, 2, 3)), large=lambda: call(ints(10, 20, 30)))
def sum_of_items(x: Tensor) -> Tensor:
    total = sum(x.tolist())
    return x / total if total > 10 else x * sum(v.item() for v in x)


@register(rising=lambda: call(floats(1, 2, 3)), falling=lambda: call(floats(3, 2, 1)))
def sorted_items(x: Tensor) -> Tensor:
    values = x.tolist()
    ranked = sorted(values)
    return x - ranked[1] if ranked == values else torch.tensor(ranked)


@register(positive=lambda: call(floats(2.5)), negative=lambda: call(floats(-2.5)))
def abs_of_item(x: Tensor) -> Tensor:
    v = x.item()
    return torch.full((2,), abs(v)) if abs(v) == v else x + abs(v)


@register(
    down=lambda: call(floats(2.4)), up=lambda: call(floats(2.6)), tie=lambda: call(floats(0.5))
)
def round_of_item(x: Tensor) -> Tensor:
    n = round(x.item())
    return torch.arange(n) * round(x.item(), 1)


@register(
    exact=lambda: call(ints(8)), remainder=lambda: call(ints(9)), negative=lambda: call(ints(-2))
)
def divmod_of_item(n: Tensor) -> Tensor:
    q, r = divmod(n.item(), 4)
    return torch.ones(r + 1) * q if r else torch.tensor(q)


@register(square=lambda: call(ints(2), randn(2)), root=lambda: call(floats(0.5), randn(2)))
def pow_of_item(n: Tensor, x: Tensor) -> Tensor:
    p = pow(x.abs().max().item(), n.item())
    return x.abs() ** n.item() * p if n.item() >= 1 else x * p


@register(warm=lambda: call(randn(3) + 4), cold=lambda: call(randn(3) - 4))
def float_item_feeds_operations(x: Tensor) -> Tensor:
    t = x.mean().item() * 1.5 + 0.25
    return torch.exp(x / t) if t > 0 else torch.add(x, x, alpha=-t)


@register(
    low=lambda: call(floats(1.9)),
    high=lambda: call(floats(3.1)),
    negative=lambda: call(floats(-1.9)),
)
def int_conversion(x: Tensor) -> Tensor:
    n = int(x)
    return x.repeat(n) if n > 0 else x - n


@register(low=lambda: call(floats(0.25), randn(2)), high=lambda: call(floats(4), randn(2)))
def float_conversion(t: Tensor, x: Tensor) -> Tensor:
    scale = float(t)
    return x * scale if scale > 1 else x / (scale + 1)


@register(short=lambda: call(floats(3, 4)), long=lambda: call(floats(30, 40)))
def math_sqrt(x: Tensor) -> Tensor:
    length = math.sqrt(x.square().sum().item())
    return x / length if length > 10 else x


@register(one=lambda: call(floats(0.3)), three=lambda: call(floats(2.1)))
def math_ceil(x: Tensor) -> Tensor:
    n = math.ceil(x.item())
    out = x.new_zeros(n, 2)
    for i in range(n):
        out[i] = x - i
    return out


@register(few=lambda: call(randn(3), ints(2)), many=lambda: call(randn(3), ints(100)))
def math_log(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(math.log2(n.item()))):
        x = x.sin()
    return x * math.log(n.item())


@register(zero=lambda: call(ints(0), randn(3)), one=lambda: call(ints(1), randn(3)))
def formatted_key(n: Tensor, x: Tensor) -> Tensor:
    table = {"mode_0": torch.sin, "mode_1": torch.cos}
    return table[f"mode_{n.item()}"](x)


@register(half=lambda: call(floats(0.5)), third=lambda: call(floats(1 / 3)))
def formatted_float_key(x: Tensor) -> Tensor:
    return x * {"0.50": 2.0, "0.33": 3.0}[f"{x.item():.2f}"]


@register(even=lambda: call(ints(6)), odd=lambda: call(ints(9)), large=lambda: call(ints(1 << 40)))
def bits_of_item(n: Tensor) -> Tensor:
    bits, v = [], n.item()
    while v:
        bits.append(v & 1)
        v >>= 1
    return torch.tensor(bits)


@register(
    none=lambda: call(floats(-1, -1)),
    one=lambda: call(floats(-1, 1)),
    two=lambda: call(floats(1, 1)),
)
def arithmetic_on_bools(x: Tensor) -> Tensor:
    n = bool(x[0] > 0) + bool(x[1] > 0)
    return x.repeat(n + 1)


@register(
    equal=lambda: call(floats(0.1, 0.1)),
    near=lambda: call(floats(0.1, 0.1000001)),
    far=lambda: call(floats(0.1, 0.2)),
)
def exact_and_close_comparison(x: Tensor) -> Tensor:
    a, b = x.tolist()
    if a == b:
        return x.neg()
    return x.abs() if math.isclose(a, b, rel_tol=1e-4) else x.sum()


@register(before=lambda: call(floats(1), floats(2)), after=lambda: call(floats(5), floats(2)))
def two_items_compared(x: Tensor, y: Tensor) -> Tensor:
    return x * y.item() if x.item() < y.item() else y - x.item()


@register(
    finite=lambda: call(floats(3)),
    infinite=lambda: call(floats(float("inf"))),
    nan=lambda: call(floats(float("nan"))),
)
def special_values_of_item(x: Tensor) -> Tensor:
    v = x.item()
    if v != v:
        return torch.zeros(1)
    return x.sign() if math.isinf(v) else x * v


@register(fits=lambda: call(ints(20)), exceeds_int64=lambda: call(ints(30)))
def python_integers_are_unbounded(n: Tensor) -> Tensor:
    f = math.factorial(n.item())
    return n * 2 if f > 2**63 - 1 else n + f


@register(low=lambda: call(positive(3)), high=lambda: call(positive(3) * 50))
def item_stored_then_branched_on(x: Tensor) -> tuple[Tensor, float]:
    stats = {"mean": x.mean().item(), "max": x.max().item()}
    y = x - stats["mean"]
    if stats["max"] > 5:
        y = y / stats["max"]
    return y, stats["max"] - stats["mean"]


@register(positive=lambda: call(floats(0.0)), negative=lambda: call(floats(-0.0)))
def sign_of_zero(x: Tensor) -> Tensor:
    return x + 1 if math.copysign(1.0, x.item()) > 0 else x - 1


@register(
    mixed=lambda: call(torch.eye(3)[:2]),
    all=lambda: call(torch.ones(2, 3)),
    none=lambda: call(torch.zeros(2, 3)),
)
def truths_of_a_list_compared_by_identity(x: Tensor) -> Tensor:
    count = 0
    for found in x.any(1).tolist():
        if found is True:
            count += 1
    return x * count


@register(mixed=lambda: call(torch.eye(3)[:2]), none=lambda: call(torch.zeros(2, 3)))
def truths_of_a_list_compared_in_a_generator(x: Tensor) -> Tensor:
    truths = (x > 0).tolist()
    return x + sum(found is not truths[0][0] for row in truths for found in row)


@register(few=lambda: call(floats(1, 2)), more=lambda: call(floats(1, 2, 3)))
def types_of_the_items_of_a_list(x: Tensor) -> Tensor:
    return x * sum(1 for value in x.long().tolist() if type(value) is int)


@register(mixed=lambda: call(torch.eye(3)[:2]), none=lambda: call(torch.zeros(2, 3)))
def truths_of_a_list_given_to_torch(x: Tensor) -> Tensor:
    for keep in x.any(1).tolist():
        x = x + x.sum(0, keepdim=keep)
    return x


@register(
    first=lambda: call(floats(1, 0, 1)),
    later=lambda: call(floats(0, 0, 1)),
    never=lambda: call(floats(0, 0, 0)),
)
def first_truth_of_a_list(x: Tensor) -> Tensor:
    for found in (x > 0).tolist():
        if found:
            break
        x = x + 1
    return x
