"""Context managers inside forward: grad modes, autocast, and user-defined ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._case import call, negative, positive, randn, register


@register(positive=lambda: call(positive(2, 3)), negative=lambda: call(negative(2, 3)))
class NoGradBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 3)
        self.teacher = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
            if x.sum() < 0:
                target = -target
        return self.student(x) - target, target


@register(train=lambda: call(randn(2, 3), True), frozen=lambda: call(randn(2, 3), False))
class SetGradEnabledByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor, finetune: bool) -> Tensor:
        with torch.set_grad_enabled(finetune):
            h = self.backbone(x).relu()
        return self.head(h) if finetune else self.head(h.detach() * 2)


@register(small=lambda: call(randn(2, 4)), large=lambda: call(randn(2, 4) * 100))
class AutocastBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
            if h.abs().max() > 20:
                h = h / h.abs().max()
        return self.b(h.float())


@register(low=lambda: call(randn(2, 3), True), full=lambda: call(randn(2, 3), False))
class AutocastByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: Tensor, low_precision: bool) -> Tensor:
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        with cast if low_precision else contextlib.nullcontext():
            y = self.proj(x)
        return y


@contextlib.contextmanager
def _scaled(x: Tensor, by: float) -> Iterator[Tensor]:
    x.mul_(by)
    try:
        yield x
    finally:
        x.div_(by)


@register(up=lambda: call(positive(3)), down=lambda: call(negative(3)))
def generator_context_manager(x: Tensor) -> list[Tensor]:
    y = x.clone()
    with _scaled(y, 4.0 if x.sum() > 0 else 0.5) as inner:
        seen = inner + 1
        if seen.min() > 1:
            seen = seen * inner
    return [seen, y]


@register(two=lambda: call(randn(3), [2.0, 4.0]), none=lambda: call(randn(3), []))
def exit_stack(x: Tensor, factors: list[float]) -> Tensor:
    y = x.clone()
    with contextlib.ExitStack() as stack:
        for factor in factors:
            stack.enter_context(_scaled(y, factor))
        inner = y.exp()
    return inner - y


class _Timeline:
    def __init__(self, x: Tensor) -> None:
        self.x, self.log = x, []

    def __enter__(self) -> list[Tensor]:
        return self.log

    def __exit__(self, kind: object, *_: object) -> bool:
        self.log.append(self.x.sum() if kind is None else self.x.prod())
        return True


@register(completes=lambda: call(positive(3)), raises=lambda: call(negative(3)))
def exit_method_swallows_exception(x: Tensor) -> list[Tensor]:
    with _Timeline(x) as log:
        log.append(x.exp())
        if x.max() < 0:
            raise ValueError
        log.append(x.log())
    return log


@register(grad=lambda: call(positive(2)), no_grad=lambda: call(negative(2)))
class DecoratedHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2))

    @torch.no_grad()
    def frozen(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale if x[0] > 0 else self.frozen(x)
        return y + 1 if y.requires_grad else y - 1
