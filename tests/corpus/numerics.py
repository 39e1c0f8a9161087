"""Iterative solvers that stop on a tolerance, and other numerical loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._case import call, floats, positive, randn, register


def _definite(n: int, spread: float) -> Tensor:
    q = torch.linalg.qr(randn(n, n)).Q
    return q @ torch.diag(torch.linspace(1, spread, n)) @ q.T


@register(balanced=lambda: call(torch.ones(3, 3)), skewed=lambda: call(positive(3, 3).exp()))
def sinkhorn_until_tolerance(x: Tensor) -> Tensor:
    error, rounds = 1.0, 0
    while error > 1e-4 and rounds < 50:
        x = x / x.sum(1, keepdim=True)
        x = x / x.sum(0, keepdim=True)
        error = (x.sum(1) - 1).abs().max().item()
        rounds += 1
    return x


@register(near=lambda: call(floats(2), 1.5), far=lambda: call(floats(2), 90.0))
def newton_square_root(a: Tensor, guess: float) -> Tensor:
    x = torch.full_like(a, guess)
    for _ in range(30):
        step = (x * x - a) / (2 * x)
        x = x - step
        if step.abs() < 1e-4:
            break
    return x


@register(
    identity=lambda: call(_definite(4, 1.0), randn(4)),
    spread=lambda: call(_definite(4, 50.0), randn(4)),
)
def conjugate_gradient(a: Tensor, b: Tensor) -> Tensor:
    x, r = torch.zeros_like(b), b
    p, rr = r, r @ r
    for _ in range(len(b)):
        if rr.sqrt() < 1e-4:
            return x
        ap = a @ p
        alpha = rr / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        p, rr = r + (r @ r) / rr * p, r @ r
    return x


@register(
    dominant=lambda: call(torch.diag(floats(9, 1, 1))),
    close=lambda: call(torch.diag(floats(3, 2.5, 1))),
)
def power_iteration(a: Tensor) -> Tensor:
    v = torch.ones(len(a)) / len(a) ** 0.5
    value = torch.zeros(())
    for _ in range(60):
        w = a @ v
        previous, value = value, v @ w
        v = w / w.norm()
        if torch.abs(value - previous) < 1e-4:
            break
    return torch.cat([v, value[None]])


@register(
    coarse=lambda: call(randn(9), 0.5, 0.5),
    fine=lambda: call(randn(9), 0.5, 0.01),
    other=lambda: call(randn(9), 0.25, 0.01),
)
def threshold_by_bisection(x: Tensor, fraction: float, tol: float) -> float:
    low, high = x.min().item(), x.max().item()
    while high - low > tol:
        middle = (low + high) / 2
        if (x > middle).float().mean().item() > fraction:
            low = middle
        else:
            high = middle
    return low


@register(
    separated=lambda: call(
        torch.cat([randn(3, 2), randn(3, 2) + 9]), floats(0, 0, 9, 9).view(2, 2)
    ),
    empty_cluster=lambda: call(randn(5, 2), floats(0, 0, 99, 99).view(2, 2)),
    slow=lambda: call(torch.linspace(0, 9, 10).view(5, 2), floats(0, 0, 1, 1).view(2, 2)),
)
def kmeans_with_empty_clusters(x: Tensor, centres: Tensor) -> Tensor:
    for _ in range(6):
        nearest = torch.cdist(x, centres).argmin(1)
        moved = centres.clone()
        for k in range(len(centres)):
            members = x[nearest == k]
            if len(members) == 0:
                moved[k] = x[0]
            else:
                moved[k] = members.mean(0)
        if torch.allclose(moved, centres):
            break
        centres = moved
    return centres


@register(accepts=lambda: call(floats(0.2, 0.1), 0.1), backtracks=lambda: call(floats(3, 4), 8.0))
def backtracking_line_search(x: Tensor, step: float) -> Tensor:
    value, grad = (x**4).sum(), 4 * x**3
    while ((x - step * grad) ** 4).sum() > value - 0.5 * step * (grad @ grad):
        step *= 0.5
    return x - step * grad


@register(smooth=lambda: call(floats(1.0), 0.1), stiff=lambda: call(floats(1.0), 30.0))
class AdaptiveEuler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1) * 0.01)

    def forward(self, y: Tensor, rate: float) -> tuple[Tensor, int]:
        t, dt, steps = 0.0, 0.5, 0
        while t < 1 and steps < 60:
            full = y + dt * (-rate * y + self.bias)
            half = y + dt / 2 * (-rate * y + self.bias)
            half = half + dt / 2 * (-rate * half + self.bias)
            if (error := (full - half).abs().max()) > 0.05:
                dt = dt / 2
                continue
            y, t, steps = half, t + dt, steps + 1
            if error < 0.01:
                dt = dt * 2
        return y, steps


@register(full_rank=lambda: call(torch.eye(3) + 0.1), dependent=lambda: call(torch.ones(3, 3)))
def gram_schmidt_with_rank_check(a: Tensor) -> Tensor:
    basis: list[Tensor] = []
    for v in a:
        for b in basis:
            v = v - (v @ b) * b
        if v.norm() > 1e-4:
            basis.append(v / v.norm())
    return torch.stack(basis)


@register(
    no_swap=lambda: call(floats(4, 1, 1, 3).view(2, 2)),
    swap=lambda: call(floats(0, 2, 1, 1).view(2, 2)),
)
def elimination_with_pivoting(a: Tensor) -> Tensor:
    a, sign = a.clone(), 1
    for k in range(len(a)):
        pivot = k + a[k:, k].abs().argmax().item()
        if pivot != k:
            a[[k, pivot]] = a[[pivot, k]]
            sign = -sign
        for i in range(k + 1, len(a)):
            a[i, k:] -= a[i, k] / a[k, k] * a[k, k:]
    return sign * a.diagonal().prod()


@register(pass_through=lambda: call(floats(0.1, 0.2)), clipped=lambda: call(floats(3, 4)))
def projected_gradient(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + 0.1 * x.sign()
        norm = x.norm()
        if norm > 1:
            x = x / norm
    return x


@register(
    reached=lambda: call(torch.eye(3)),
    grows=lambda: call(torch.eye(3) + torch.diag(floats(1, 1), 1)),
)
def transitive_closure(adjacency: Tensor) -> Tensor:
    reach = adjacency > 0
    while True:
        grown = reach | ((reach.float() @ reach.float()) > 0)
        if (grown == reach).all():
            return grown
        reach = grown
