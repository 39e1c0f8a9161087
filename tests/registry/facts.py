"""Facts of tensors that a model asks for before and after a write."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

import bendtrace as bt
from tests.registry.calls import SOME, Call, after, args, case, x

# Facts of a tensor that were asked before a write


@case(*SOME)
def a_version_after_a_write(x: torch.Tensor) -> Any:
    y = torch.zeros(3)
    before = y._version
    y[0] = x[0]
    return x * (y._version - before)


WEIGHT = torch.ones(1, requires_grad=True)


@case(*SOME)
def requires_grad_after_a_write(x: torch.Tensor) -> Any:
    y = torch.zeros(3)
    before = y.requires_grad
    y[0] = WEIGHT[0] * 2
    return x * (2 if y.requires_grad else 3), before


@case(*SOME)
def is_leaf_after_a_write_to_a_part(x: torch.Tensor) -> Any:
    y = x.clone()
    if y.is_leaf:
        x = x + 1
    y[1:] = WEIGHT
    return x * 2 if y.is_leaf else x * 3


@case(*SOME)
def sizes_of_two_outs(x: torch.Tensor) -> Any:
    values, indices = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    before = values.nbytes
    torch.max(x[None], 0, out=(values, indices))
    return values * (values.nbytes - before) * (values.dim() + 1) * values.size(0)


def outs(columns: int) -> Call:
    return args(lambda: (torch.ones(2, columns), torch.zeros(3), torch.zeros(3, dtype=torch.long)))


@case(outs(3), outs(3), outs(1))
def sizes_of_outs_that_are_given(x: torch.Tensor, values: Any, indices: Any) -> Any:
    torch.max(x, 0, out=(values, indices))
    return values * 2 if values.size(0) > 2 else values * 3


@case(*[x(1)] * 5)
class ABufferWhoseDataIsSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        self.held.data = torch.cat([self.held, self.held])
        return x * 2 if self.held.shape[0] > 4 else x * 5


@bt.opaque
def grow(held: torch.Tensor) -> None:
    held.resize_(held.shape[0] + 1).fill_(2)


@case(*[x(1, 2)] * 6)
class ABufferThatOneOpResizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        grow(self.held)
        size = self.held.shape[0]
        return x * size * (100 if size > 3 else 1)


@case(*[args(lambda s=s: (torch.ones(s),)) for s in ((2, 5), (2, 5), (1, 5), (3, 5), (1, 5))])
def a_rank_of_cov(x: torch.Tensor) -> Any:
    spread = torch.cov(x)
    return spread * 2 if spread.ndim == 0 else spread.sum(0) + 1


@case(*[args(lambda n=n: (torch.ones(2, 3, 4), n)) for n in (0, 0, 2, 1, 0)])
def a_rank_of_flatten_from_a_number(x: torch.Tensor, n: int) -> Any:
    y = x.flatten(n)
    return y * 2 if y.dim() == 1 else y * 3


@case(*[args(lambda n=n: (torch.ones(2, 2), n)) for n in (2, 2, 1, 0)])
def a_rank_of_tensordot_over_a_number(x: torch.Tensor, n: int) -> Any:
    y = torch.tensordot(x, x, n)
    return y * 2 if y.dim() == 0 else y * 3


@case(x(1, 2, 3), x(1, 2, 3), x(-1, -2, -3), x(-5, -5, 9))
def parts_that_share_memory(x: torch.Tensor) -> Any:
    one, other = torch.unsafe_split(x, 2)
    one.add_(1)
    if x.sum() > 7:
        return x * 2
    return x * 3 if other.sum() > 2 else x * 5


# What becomes of tensors in the autograd graph


def frozen(*flags: bool) -> list[Call]:
    """Calls of a model whose weight gets gradients, or not."""

    def freeze(flag: bool) -> Call:
        def call(model: Any) -> tuple[Any, ...]:
            model.weight.requires_grad_(flag)
            return (torch.ones(2),)

        return call

    return [freeze(flag) for flag in flags]


@case(*frozen(False, False, True, True, False))
class ABufferThatIsWrittenThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> Any:
        self.held[0].add_(self.weight)
        y = x * 2 if self.held.requires_grad else x * 3
        self.held = self.held.detach()
        return y


@bt.opaque
def graft(held: torch.Tensor, weight: torch.Tensor) -> None:
    held.requires_grad_(weight.requires_grad)


@case(*frozen(False, False, True, True, False))
class ABufferThatOneOpMakesALeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        graft(self.held, self.weight)
        y = x * 2 if self.held.requires_grad else x * 3
        self.held = self.held.detach()
        return y


def error_of_backward(model: Any, out: Any) -> Any:
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@case(*SOME, look=error_of_backward)
def a_version_that_is_incremented(x: torch.Tensor) -> Any:
    y = x.clone().requires_grad_() * 1
    z = y * y
    torch.autograd.graph.increment_version(y)
    return z


@case(*SOME, look=error_of_backward)
def a_version_that_is_preserved(x: torch.Tensor) -> Any:
    y = x.clone().requires_grad_() * 1
    z = y * y
    with torch.autograd._unsafe_preserve_version_counter(y):
        y.add_(1)
    return z


def pair(one: bool) -> Call:
    def make() -> tuple[Any, ...]:
        made = torch.ones(2)
        return made, made.view(2) if one else torch.ones(2)

    return args(make)


@case(*map(pair, (False, False, True, False)))
def whether_arguments_share_memory(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * 2 if torch._C._is_alias_of(x, y) else x * 3


@case(*SOME)
def whether_memory_has_become_shared(x: torch.Tensor) -> Any:
    y = x.clone()
    before = y.is_shared()
    y.share_memory_()
    return before, y.is_shared()


@bt.opaque
def refill(held: torch.Tensor, x: torch.Tensor) -> None:
    held.data = torch.ones(x.shape)


@case(*[args(lambda n=n: (torch.ones(2, 2), torch.ones(n, 2))) for n in (2, 2, 3, 2, 4)])
def a_tensor_whose_data_one_op_sets(held: torch.Tensor, x: torch.Tensor) -> Any:
    refill(held, x)
    return held * 2 if held.shape[0] == 2 else held * 3

    def forward(self, x: torch.Tensor) -> Any:
        self.held[:1].add_(x[:1])  # nothing, at first
        return x + float(self.array[0])


def array_and_tensor(one: bool) -> Call:
    def make() -> tuple[Any, ...]:
        array = np.ones(2, dtype=np.float32)
        return array, torch.from_numpy(array if one else array.copy())

    return args(make)


@case(*map(array_and_tensor, (False, False, True, False, True)))
def an_array_in_the_memory_of_an_argument(array: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    return x * float(array[0])


class _SharesLater(nn.Module):
    """Reads an array beside a buffer that it writes to: the two may be in one memory, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.put(False)

    def put(self, shared: bool) -> None:
        self.values = np.zeros(2, np.float32)
        self.total = torch.from_numpy(self.values) if shared else torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + self.total + torch.as_tensor(self.values)
        self.total.add_(1)
        return x + self.total + float(self.values[0])


for _first in (False, True):
    for _sign in (1, -1):
        case(
            *[
                after(lambda model, shared=shared: model.put(shared), sign, sign)
                for shared in (_first, not _first, _first, not _first)
                for sign in (_sign, -_sign, _sign, -_sign)
            ],
            look=lambda model, out: (out, model.values.tolist()),
            name=f"an_array_that_comes_to_share_memory_{_first}_{_sign}",
        )(_SharesLater)


NEGATIVE_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8 << 48))[0]


def put(where: str, key: int) -> Call:
    """The sign of nan in a container of the model changes."""
    return after(lambda model: getattr(model, where).__setitem__(key, NEGATIVE_NAN))


@case(*SOME, *[put("few", 0)] * 3, *[put("many", 7)] * 3)
class TheSignOfNanInAContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = [math.nan], dict.fromkeys(range(600), math.nan)

    def forward(self, x: torch.Tensor) -> Any:
        return [x * math.copysign(1.0, value) for value in (self.few[0], self.many[7])]


def scale_by(scale: float) -> Call:
    """All attributes of a function are replaced at once."""
    return after(lambda model: setattr(scale_of, "__dict__", {"scale": scale}))


@case(*map(scale_by, (2.0, 2.0, 2.0, 3.0, 3.0, 3.0)))
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scale_of.scale


def scale_of() -> None:
    """Has an attribute."""


# Dimensions that a tensor may lack


def some_numbers(seed: int) -> Call:
    own = torch.Generator().manual_seed(seed)
    numbers = torch.randn(4, generator=own)
    return args(lambda: (numbers.clone(),))


POSITIVE = [some_numbers(seed) for seed in range(24)]


@case(*POSITIVE)
def a_length_that_is_caught(x: torch.Tensor) -> Any:
    try:
        return x * len(x[x > 0.5].squeeze())
    except TypeError:  # of a tensor without dimensions
        return x - 1


@case(*POSITIVE)
def a_size_that_is_caught(x: torch.Tensor) -> Any:
    kept = x[x > 0.5].squeeze()
    try:
        count = kept.size(0)
    except IndexError:
        count = -1
    return x * count


@case(*POSITIVE)
def a_stride_that_is_caught(x: torch.Tensor) -> Any:
    kept = x[x > 0.5].squeeze()
    try:
        step = kept.stride(dim=0)
    except (IndexError, RuntimeError):
        step = 2
    return x * step
