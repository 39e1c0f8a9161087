"""Gradients, random numbers, dtypes and modes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.registry.issues._issue import issue
from tools.scoreboard.case import Step, Wrap, tried

Steps = Iterator[Step]
X = torch.arange(1.0, 5.0)


@issue(195418, "inference mode within a function has no effect")
def inference(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x + 1

    call = wrap(model)
    for number in range(2):
        out = call((X * (number + 1)).requires_grad_())
        told = out.requires_grad, out.is_inference()
        yield Step("inputs" if number else "traced", (out.clone(), told))


@issue(114338, "gradients that a function turns on are lost where the caller turned them off")
def turned_on(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x + 1

    call = wrap(model)
    with torch.no_grad():
        out = call(torch.zeros(3, requires_grad=True))
    yield Step("traced", (out.detach(), out.requires_grad))
    out = call(torch.ones(3, requires_grad=True))
    yield Step("change", (out.detach(), out.requires_grad))


@issue(107187, "torch.manual_seed in a function is ignored")
def seeded(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.rand(4)

    call = wrap(model)
    for number in range(3):
        yield Step("inputs" if number else "traced", (call(X), torch.rand(1)))


@issue(95161, "a function that seeds and draws without arguments draws otherwise each time")
def seeded_without_arguments(wrap: Wrap) -> Steps:
    def model() -> Tensor:
        torch.manual_seed(0)
        made = torch.rand(2, 2)
        return made + made

    call = wrap(model)
    for number in range(3):
        yield Step("inputs" if number else "traced", call())


@issue(118735, "a generator that is seeded outside gives other numbers", inductor=True)
def own_generator(wrap: Wrap) -> Steps:
    generator = torch.default_generator
    call = wrap(lambda x: x * torch.rand(4))
    for seed in (5, 5, 6):
        generator.manual_seed(seed)
        yield Step("inputs" if seed == 6 else "traced", call(X))


@issue(143431, "what is drawn differs from eager's, also on a CPU")
def drawn_order(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        order = torch.argsort(torch.rand(2, 4), dim=-1)[:, :3]
        return x[torch.arange(2).unsqueeze(-1), order]

    call = wrap(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        yield Step("inputs" if seed == 2 else "traced", call(torch.arange(8.0).reshape(2, 4)))


@issue(141557, "dropout of a model in eval mode that is always on", inductor=True)
def always_on(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, p=0.5)

    call = wrap(Model().eval())
    for number in range(2):
        torch.manual_seed(0)
        yield Step("inputs" if number else "traced", call(X + number))


@issue(158643, "dropout and an in-place relu one after the other")
def dropout_and_relu(wrap: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 2))
    call = wrap(model)
    for number in range(2):
        torch.manual_seed(number)
        yield Step("inputs" if number else "traced", call(X + number))
    model.eval()
    yield Step("change", call(X))


@issue(177630, "a product of matrices of two dtypes succeeds where it is an error")
def two_dtypes(wrap: Wrap) -> Steps:
    call = wrap(lambda a, b: torch.matmul(a, b) + 1)
    yield Step("traced", call(torch.ones(2, 3, 4), torch.ones(2, 4, 5)))
    yield Step("change", tried(call, torch.ones(2, 3, 4).half(), torch.ones(2, 4, 5)))


@issue(171191, "attention of two dtypes succeeds where it is an error")
def attention_of_two_dtypes(wrap: Wrap) -> Steps:
    call = wrap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2)
    q = torch.ones(1, 1, 2, 4)
    yield Step("traced", call(q, q, q))
    yield Step("change", tried(call, q.double(), q, q))


@issue(197091, "ldexp has the dtype of one of its operands", inductor=True)
def dtype_of_ldexp(wrap: Wrap) -> Steps:
    call = wrap(lambda a, b: torch.ldexp(a, b))
    yield Step("traced", call(torch.ones(3), torch.ones(3)))
    yield Step("change", call(torch.ones(3, dtype=torch.bool), torch.ones(3).half()))
    yield Step("change", call(torch.ones(3).half(), torch.ones(3)))
    yield Step("change", call(torch.ones(3, dtype=torch.int64), torch.ones(3).bfloat16()))


@issue(175966, "large integers overflow", inductor=True)
def large_integers(wrap: Wrap) -> Steps:
    call = wrap(lambda x: torch.arange(0, 11) * torch.tensor([int(1e9)]) + x)
    yield Step("traced", call(torch.zeros(1, dtype=torch.int64)))
    yield Step("inputs", call(torch.ones(1, dtype=torch.int64)))


@issue(143566, "integers are shifted by more than they have bits", inductor=True)
def shifted(wrap: Wrap) -> Steps:
    call = wrap(lambda x, by: torch.bitwise_left_shift(x, by) + 1)
    yield Step("traced", call(torch.tensor([1000, 2]), torch.tensor([3, 4])))
    yield Step("inputs", call(torch.tensor([1000, 2]), torch.tensor([62, 63])))


@issue(191308, "a product of int8 matrices has another dtype", inductor=True)
def int8_product(wrap: Wrap) -> Steps:
    call = wrap(lambda a, b: torch.matmul(a, b))
    yield Step("traced", call(torch.ones(1, 1, 2).char(), torch.ones(1, 2, 2).char()))
    yield Step("inputs", call(torch.ones(2, 3, 2).char() * 90, torch.ones(2, 2, 2).char()))


@issue(190764, "sums of int32 products that overflow", inductor=True)
def int32_products(wrap: Wrap) -> Steps:
    def model(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x @ y + x @ z).sum(dim=1)

    call = wrap(model)
    big = torch.full((2, 2), 2**30, dtype=torch.int32)
    yield Step("traced", call(big, big, big))
    yield Step("inputs", call(big - 1, big, -big))


@issue(121238, "a step of an optimizer in half precision")
def half_step(wrap: Wrap) -> Steps:
    def step(parameter: Tensor, average: Tensor, norm: Tensor) -> Tensor:
        return parameter.addcdiv_(average, norm * 0.19, value=-1)

    call = wrap(step)
    for number in range(2):
        parameter = (X * 7.3 + number).half()
        out = call(parameter, (X * 0.37).half(), (X * 0.011 + 0.3).half())
        yield Step("inputs" if number else "traced", (out, parameter))


@issue(153411, "a number from a tensor becomes a tensor again")
def number_and_back(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        return torch.tensor([x.item()]) * 2

    call = wrap(model)
    yield Step("traced", call(torch.tensor([3.14])))
    yield Step("inputs", call(torch.tensor([-2.0])))
