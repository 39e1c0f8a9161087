"""Branches on dtype, device and autograd properties, and casts chosen at run time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, ints, randn, register


@register(float32=lambda: call(randn(3)), float64=lambda: call(randn(3).double()))
def dtype_equality(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return x.exp()
    return x.float() + 1


@register(floating=lambda: call(randn(4)), integer=lambda: call(ints(4, 5, 6)))
def is_floating_point(x: Tensor) -> Tensor:
    return x - x.mean() if x.is_floating_point() else x - x.min()


@register(
    half=lambda: call(randn(3), "half"),
    double=lambda: call(randn(3), "double"),
    same=lambda: call(randn(3), "float"),
)
class CastNamedByString(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes = {"half": torch.bfloat16, "double": torch.float64, "float": torch.float32}

    def forward(self, x: Tensor, precision: str) -> Tensor:
        y = x.to(self.dtypes[precision])
        if y.dtype is x.dtype:
            return y
        return (y * 3).to(x.dtype)


@register(leaf=lambda: call(randn(3).requires_grad_()), constant=lambda: call(randn(3)))
def requires_grad_branch(x: Tensor) -> Tensor:
    if x.requires_grad:
        return (x * 2).detach()
    return x.cos()


@register(
    bool=lambda: call(randn(3) > 0), int=lambda: call(ints(1, 0, 2)), float=lambda: call(randn(3))
)
def mask_of_any_dtype(mask: Tensor) -> Tensor:
    scores = torch.linspace(0, 1, 3)
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, 0)
    if mask.dtype in (torch.int32, torch.int64):
        return scores.masked_fill(mask.bool(), 0)
    return scores + mask


@register(promoted=lambda: call(randn(3), ints(1, 2, 3)), plain=lambda: call(randn(3), randn(3)))
def promoted_dtype(x: Tensor, y: Tensor) -> Tensor:
    common = torch.promote_types(x.dtype, y.dtype)
    if y.dtype != common:
        y = y.to(common) / 2
    return x + y


@register(
    complex=lambda: call(torch.complex(randn(3), randn(3, seed=1))), real=lambda: call(randn(3))
)
def complex_branch(x: Tensor) -> Tensor:
    return x.abs() if x.is_complex() else x.square()


@register(cpu=lambda: call(randn(2), "cpu"), default=lambda: call(randn(2), None))
def device_of_argument(x: Tensor, device: str | None) -> Tensor:
    if device is None:
        device = x.device.type
        x = x + 1
    zeros = torch.zeros(2, device=device)
    return zeros + x if x.device.type == "cpu" else zeros


@register(overflow=lambda: call(randn(3) * 1e6), fits=lambda: call(randn(3)))
def dtype_chosen_by_magnitude(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.abs().max() > torch.finfo(torch.float16).max else torch.float16
    return x.to(dtype).sum()


@register(used=lambda: call(randn(2, 3).requires_grad_()), unused=lambda: call(randn(2, 3)))
class GradientInsideForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.energy(y).square().sum(), y)
        return (x - 0.1 * grad).detach() if x.requires_grad else grad
