"""Writes, and tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.registry.issues._issue import issue
from tools.scoreboard.case import Step, Wrap, tried

Steps = Iterator[Step]


def x() -> Tensor:
    return torch.arange(1.0, 5.0)


@issue(152425, "one element of an expanded tensor is written to", inductor=True)
def expanded_write(wrap: Wrap) -> Steps:
    def model(value: Tensor, n: int) -> Tensor:
        wide = value.expand((n,))
        wide[-1] = 3
        return wide

    call = wrap(model)
    numbers = torch.arange(2)
    yield Step("traced", (tried(call, numbers[0], 2), numbers.clone()))
    yield Step("inputs", (tried(call, numbers[1], 3), numbers.clone()))


@issue(97083, "a view is returned of what is written to around an if")
def view_around_an_if(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Tensor:
        a = value[0:1]
        b = a.squeeze()
        a[0] = 0
        if a[0] < 1e5:
            a[0] = 1
        a[0] = 2
        return b

    call = wrap(model)
    yield Step("traced", call(torch.tensor([1])))
    yield Step("inputs", call(torch.tensor([5])))


@issue(
    195422, "an argument is written to through what dropout returned in eval mode", inductor=True
)
def through_dropout(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Tensor:
        y = F.dropout(value, 0.5, False)
        y += y
        return y + value

    call = wrap(model)
    for number in range(2):
        given = x() * (number + 1)
        yield Step("inputs" if number else "traced", (call(given), given))


@issue(139789, "arguments that share memory come after such that do not, and one is written to")
def overlapping_later(wrap: Wrap) -> Steps:
    def model(one: Tensor, two: Tensor) -> Tensor:
        one.mul_(2)
        return one + two

    call = wrap(model)
    one, two = torch.ones(4), torch.ones(4)
    yield Step("traced", (call(one, two), one, two))
    base = torch.ones(8)
    yield Step("inputs", (call(base[:4], base[2:6]), base))


@issue(198095, "a view of an argument is returned that is itself a view of a written one")
def view_of_a_view(wrap: Wrap) -> Steps:
    def model(base: Tensor, part: Tensor) -> Any:
        base.add_(100)
        return part[0], part.view(-1)

    call = wrap(model)
    for number in range(2):
        base = torch.arange(24.0).reshape(4, 6) + number
        yield Step("inputs" if number else "traced", (call(base, base[1:]), base))


@issue(93363, "an argument that is a view with gradients is written to in place")
def written_view(wrap: Wrap) -> Steps:
    def model(part: Tensor) -> Tensor:
        part.add_(1.0)
        return part * 2

    call = wrap(model)
    for number in range(2):
        base = torch.full((4,), float(number), requires_grad=True).add(0.0)
        out = call(base[0::2])
        yield Step("inputs" if number else "traced", (out.detach(), base.detach()))


@issue(191449, "a view of an intermediate value is resized", inductor=True)
def resized_view(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Any:
        y = value * 2
        part = y.view(y.shape)
        part.resize_(1)
        return y, part

    call = wrap(model)
    yield Step("traced", tried(call, x()))
    yield Step("inputs", tried(call, x() * 3))


@issue(138269, "the result is written to a tensor that is given as out")
def given_out(wrap: Wrap) -> Steps:
    def model(one: Tensor, two: Tensor, out: Tensor) -> Tensor:
        return torch.add(one, two, out=out)

    call = wrap(model)
    for number in range(3):
        out = torch.zeros(4) if number < 2 else torch.zeros(8)[::2]
        given = call(x(), x() * number, out)
        yield Step("inputs" if number else "traced", (given, out, given is out))


@issue(153389, "a custom op that writes to its argument loses the write")
def writing_op(wrap: Wrap) -> Steps:
    name = "scoreboard::write_twice"
    if not hasattr(torch.ops.scoreboard, "write_twice"):

        @torch.library.custom_op(name, mutates_args={"out"})
        def write_twice(value: Tensor, out: Tensor) -> None:
            out.copy_(value * 2)

    def model(value: Tensor, out: Tensor) -> Tensor:
        part = out[3:]
        torch.ops.scoreboard.write_twice(value, part)
        return out + 1

    call = wrap(model)
    for number in range(2):
        out = torch.zeros(6)
        yield Step("inputs" if number else "traced", (call(torch.ones(3) + number, out), out))


@issue(113030, "a.data = b makes the two share what happens to one of them")
def assigned_data(wrap: Wrap) -> Steps:
    def model(one: Tensor, two: Tensor) -> Tensor:
        one.data = two
        two.data = torch.zeros(0)
        return one * 2

    call = wrap(model)
    for number in range(2):
        one, two = x(), x() * (number + 3)
        yield Step("inputs" if number else "traced", (tried(call, one, two), one, two))


@issue(94773, "a tensor is given other memory by set_, and an alias keeps the old one")
def set_memory(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Tensor:
        alias = value[:]
        value.set_(torch.ones(3, 4))
        return alias + 1

    call = wrap(model)
    for number in range(2):
        given = torch.arange(6.0).reshape(2, 3) + number
        yield Step("inputs" if number else "traced", (tried(call, given), given))


@issue(176854, "detach_ does not detach")
def detached(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Any:
        y = value * 2.0
        y.detach_()
        return y + 1.0, y.requires_grad

    call = wrap(model)
    for number in range(2):
        given = (x() + number).requires_grad_()
        out, requires = call(given)
        yield Step("inputs" if number else "traced", (out, requires, out.requires_grad))


@issue(100348, "a value and its detached alias come back as one", inductor=True)
def detached_alias(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> dict[str, Tensor]:
        loss = value.mean()
        return {"loss": loss, "told": loss.detach()}

    call = wrap(model)
    for number in range(2):
        given = (x() + number).requires_grad_()
        found = call(given)
        failed = tried(found["loss"].backward)
        yield Step(
            "inputs" if number else "traced",
            (found["loss"] is found["told"], found["told"].requires_grad, failed, given.grad),
        )


@issue(113793, "a parameter is written to through a view of it, step by step")
def parameter_through_a_view(wrap: Wrap) -> Steps:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    with torch.no_grad():
        view = parameter.view(-1)

    @torch.no_grad()
    def step(gradient: Tensor) -> Tensor:
        view.add_(gradient, alpha=-0.5)
        return view.sum()

    call = wrap(step)
    for number in range(3):
        out = call(torch.ones(6) * (number + 1))
        yield Step("inputs" if number else "traced", (out, parameter.detach().clone()))


@issue(139805, "the example arguments are one tensor, later ones are not")
def one_tensor_thrice(wrap: Wrap) -> Steps:
    def model(values: list[Tensor], y: Tensor, z: Tensor) -> Tensor:
        out = y.clone()
        for value in values:
            out = out + value * 0.5
        return out + z * y

    call = wrap(model)
    one = x()
    yield Step("traced", call([one, one, one], one, one))
    yield Step("inputs", call([x(), x() + 1, x() + 2], x() + 3, x() + 4))


@issue(118959, "arguments that are written to are not copied back")
def written_arguments(wrap: Wrap) -> Steps:
    def model(value: Tensor) -> Tensor:
        value.sub_(1).clamp_(0, 2)
        return torch.prod(value + 1)

    call = wrap(model)
    for number in range(2):
        given = x() * (number + 1)
        yield Step("inputs" if number else "traced", (call(given), given))


@issue(156, "an in-place layer changes the activation that a hook kept", "meta-pytorch/captum")
def kept_activation(wrap: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    kept: list[Any] = []
    model[0].register_forward_hook(lambda m, i, out: kept.append((out, out.detach().clone())))
    call = wrap(model)
    with torch.no_grad():
        for number in range(2):
            out = call(x() * (number - 0.5))
            yield Step("inputs" if number else "traced", (out, kept[-1][0].clone(), kept[-1][1]))


@issue(44, "an extracted activation is overwritten by the next layer", "ViCCo-Group/thingsvision")
def extracted(wrap: Wrap) -> Steps:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, image: Tensor) -> Any:
            before = self.conv(image)
            copied = before.clone()
            return copied, self.relu(before), before

    call = wrap(Features())
    with torch.no_grad():
        yield Step("traced", call(torch.arange(25.0).reshape(1, 1, 5, 5) - 12))
        yield Step("inputs", call(torch.arange(36.0).reshape(1, 1, 6, 6) - 18))
