"""What torch.fx, torch.export and make_fx capture once and for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from tests.registry.issues._issue import issue
from tools.scoreboard.case import Step, Wrap

Steps = Iterator[Step]
X = torch.arange(1.0, 5.0)


@issue(105445, "hooks before a module are left out, such as those of spectral_norm")
def hooks_left_out(wrap: Wrap) -> Steps:
    model = spectral_norm(nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model.weight_orig.add_(5)
    call = wrap(model)
    yield Step("traced", call(X))
    with torch.no_grad():
        model.weight_orig.mul_(3)
    yield Step("change", call(X))


@issue(159787, "what forward appends to a list is a tensor without values")
def bank(wrap: Wrap) -> Steps:
    held: list[Tensor] = []

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            held.append(x.clone())
            return x + y

    call = wrap(Model())
    for number in range(2):
        out = call(X * (number + 1), X)
        yield Step("inputs" if number else "traced", (out, len(held), held[-1].sum()))


@issue(153062, "a hook sees buffers without values")
def hook_sees_buffers(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.buffer.sum() + x.sum()  # type: ignore[operator, union-attr]

    model = Model()
    held: list[Tensor] = []

    def log(module: nn.Module, given: Any, out: Any) -> None:
        held.extend(buffer + 0 for buffer in module.buffers())

    model.register_forward_hook(log)
    call = wrap(model)
    for number in range(2):
        yield Step("inputs" if number else "traced", (call(X + number), [h.sum() for h in held]))


@issue(163189, "a buffer that begins as None is given a tensor without values")
def buffer_from_none(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", None)

        def forward(self, x: Tensor) -> Tensor:
            before = x * 0 if self.last is None else self.last
            self.last = x * 2
            return x + before

    model = Model()
    call = wrap(model)
    for number in range(3):
        out = call(X + number)
        assert model.last is not None
        yield Step("inputs" if number else "traced", (out, model.last * 1))


@issue(43512, "a tensor that is no parameter is taken as a constant")
def constant_weight(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.arange(8.0).reshape(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    model.weight = model.weight + 1
    yield Step("change", call(X))


@issue(79513, "a size that is made a tensor stays what it was")
def size_as_tensor(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        return x / torch.tensor(x.shape[0])

    call = wrap(model)
    yield Step("traced", call(torch.ones(3)))
    yield Step("inputs", call(torch.ones(5)))


@issue(102085, "a check of dimensions, and the statistics of a batch")
def batch_statistics(wrap: Wrap) -> Steps:
    model = nn.BatchNorm1d(2)
    call = wrap(model)
    for number in range(2):
        out = call(torch.arange(8.0).reshape(4, 2) * (number + 1))
        assert model.running_mean is not None
        assert model.num_batches_tracked is not None
        state = model.running_mean.clone(), model.num_batches_tracked.clone()
        yield Step("inputs" if number else "traced", (out, state))
    model.eval()
    yield Step("change", call(torch.ones(4, 2)))


@issue(140011, "a size that may vary is kept as a constant")
def varying_size(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.reshape(rows, -1).sum(-1)
        return out * rows if rows > 3 else out - rows

    call = wrap(model)
    for rows in (2, 5, 3, 4):
        yield Step("inputs" if rows != 2 else "traced", call(torch.ones(rows, 2, 2)))


@issue(130379, "a constant that is made without gradients")
def constant_without_gradients(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.tensor(4) + x + y
            return z * z

    call = wrap(Model())
    yield Step("traced", call(X, X))
    yield Step("inputs", call(-X, X * 2))


@issue(117685, "a threshold that is a parameter is compared with once and for all")
def parameter_as_threshold(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.threshold = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x]) if self.threshold < 0.5 else x

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    with torch.no_grad():
        model.threshold.fill_(0.9)
    yield Step("change", call(X))


@issue(150428, "modules that are in a plain list")
def modules_in_a_list(wrap: Wrap) -> Steps:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [Part(), Part()]

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    with torch.no_grad():
        model.parts[0].a.fill_(10.0)
    yield Step("change", call(X))
    model.parts.append(Part())
    yield Step("change", call(X))


@issue(98422, "methods that are called as functions of the class")
def methods_of_the_class(wrap: Wrap) -> Steps:
    call = wrap(lambda x: torch.Tensor.flip(torch.Tensor.flatten(x), dims=[0]))
    yield Step("traced", call(torch.arange(6.0).reshape(2, 3)))
    yield Step("inputs", call(torch.arange(8.0).reshape(2, 2, 2)))
