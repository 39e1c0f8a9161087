"""Something around a function changes between calls, and what was captured stays as it was."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.registry.issues._issue import issue
from tools.scoreboard.case import Step, Wrap, tried

Steps = Iterator[Step]
SCALES = [1.0, 2.0, 3.0]
X = torch.arange(1.0, 5.0)


def shift(x: Tensor) -> Tensor:
    return x + 20


@issue(176851, "a class attribute changes between calls")
def class_attribute(wrap: Wrap) -> Steps:
    class Settings:
        factor = 1.0

    call = wrap(lambda x: x * Settings.factor)
    yield Step("traced", call(X))
    Settings.factor = 10.0
    yield Step("change", call(X))


@issue(124357, "an attribute of the module that forward reads changes between calls")
def attribute(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = -1
            self.cache = torch.ones(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.cache + self.offset + x

    model = Model()
    call = wrap(model)
    for kind, offset in (("traced", 6), ("change", 8), ("change", 10)):
        model.offset = offset
        yield Step(kind, call(torch.zeros(3)))  # type: ignore[arg-type]


@issue(124717, "a flag that turns a part of the module off is set for one call")
def disabled(wrap: Wrap) -> Steps:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.disabled = False

        def forward(self, x: Tensor) -> Tensor:
            out = x * x
            return out if self.disabled else out + 1

    model = Adapted()
    call = wrap(model)
    yield Step("traced", call(X))
    model.disabled = True
    yield Step("change", call(X))
    model.disabled = False
    yield Step("change", call(X))


@issue(115774, "a cache that is written to is exchanged by another one")
def exchanged_cache(wrap: Wrap) -> Steps:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(2)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            self.cache[at] = x
            return self.cache.clone()

    model = Cache()
    call = wrap(model)
    yield Step("traced", call(torch.tensor([2.0]), torch.tensor([0])))
    model.cache = torch.zeros(2)
    yield Step("change", call(torch.tensor([1.0]), torch.tensor([1])))


@issue(111785, "an attribute becomes a view of another row of a buffer")
def moving_view(wrap: Wrap) -> Steps:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 6))
            self.row = self.rows

        def forward(self, x: Tensor) -> None:
            self.row.copy_(x)

    model = Rows()
    call = wrap(model)
    for number in range(4):
        model.row = model.rows[number : number + 1]
        call(torch.ones(1, 6) + number)
        yield Step("change" if number else "traced", model.rows.clone())


@issue(108898, "a global function is replaced by another one")
def global_function(wrap: Wrap) -> Steps:
    def model(x: Tensor) -> Tensor:
        return shift(x.sin()) + 1

    before = globals()["shift"]
    try:
        call = wrap(model)
        yield Step("traced", call(X))
        globals()["shift"] = lambda x: x.cos()
        yield Step("change", call(X))
    finally:
        globals()["shift"] = before


@issue(93782, "a function in a closure is replaced by another one")
def closed_over_function(wrap: Wrap) -> Steps:
    total: Callable[[list[Tensor]], Any] = sum
    items = [torch.ones(4), torch.ones(4), torch.ones(4)]

    def model(x: Tensor) -> Tensor:
        result = x
        for _ in range(3):
            result = result + total(items)
        return result

    call = wrap(model)
    yield Step("traced", call(X))
    total = lambda tensors: tensors[0]  # noqa: E731
    yield Step("change", call(X))


@issue(120861, "an argument is at first the very list that is also a global")
def alias_of_a_global(wrap: Wrap) -> Steps:
    call = wrap(lambda numbers, x: x + SCALES[-1] + numbers[-1])
    yield Step("traced", call(SCALES, X))
    yield Step("inputs", call(SCALES[::-1], X))
    yield Step("inputs", call([1.0, 2.0], X))
    yield Step("inputs", call([1.0, 2.0, 3.0, 2.0], X))


@issue(178365, "functions with one code differ in the defaults of their parameters")
def defaults(wrap: Wrap) -> Steps:
    def make(offset: int) -> Callable[[Tensor], Tensor]:
        def moved(x: Tensor, by: int = offset) -> Tensor:
            return x + by

        return moved

    call = wrap(lambda function, x: function(x) * 2)
    for number in range(3):
        yield Step("change" if number else "traced", call(make(number), X))


@issue(197860, "the code of a method is exchanged")
def code_of_a_method(wrap: Wrap) -> Steps:
    def double(self: Any, x: Tensor) -> Tensor:
        return x * 2.0

    def nine(self: Any, x: Tensor) -> Tensor:
        return x * 9.0

    class Model:
        method = double

    model = Model()
    call = wrap(lambda x: model.method(x))
    yield Step("traced", call(X))
    double.__code__ = nine.__code__
    yield Step("change", call(X))


@issue(197811, "two closures of one factory hold different methods of Tensor")
def methods_in_closures(wrap: Wrap) -> Steps:
    def make(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def apply(x: Tensor, y: Tensor) -> Tensor:
            return op(x, y)

        return apply

    x, y = torch.tensor(6.0), torch.tensor(3.0)
    yield Step("traced", wrap(make(torch.Tensor.__add__))(x, y))
    yield Step("change", wrap(make(torch.Tensor.__mul__))(x, y))


@issue(197859, "an entry of __dict__ comes to stand before a submodule of that name")
def shadowed_submodule(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)  # type: ignore[no-any-return]

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    other = nn.Linear(4, 4, bias=False)
    object.__setattr__(model, "part", other)
    yield Step("change", call(X))


@issue(192905, "nested regions with different flags share what was captured for one flag")
def nested_regions(wrap: Wrap) -> Steps:
    region = torch.compiler.nested_compile_region

    @region
    def inner(flag: bool, x: Tensor) -> Tensor:
        return x.sin() if flag else x.cos()

    @region
    def outer(flag: bool, x: Tensor) -> Tensor:
        return inner(flag, x) + 1

    def model(x: Tensor) -> Tensor:
        for flag in (True, False, True, False):
            x = outer(flag, x)
        return x

    call = wrap(model)
    yield Step("traced", call(X))
    yield Step("inputs", call(-X))


@issue(191821, "a global is assigned between two calls of one region")
def reassigned_global(wrap: Wrap) -> Steps:
    held = types.SimpleNamespace(value=torch.tensor(0.0))

    @torch.compiler.nested_compile_region
    def region() -> Tensor:
        return held.value + 1

    def model(x: Tensor) -> Tensor:
        for _ in range(2):
            held.value = x
            x = region()
        return x

    call = wrap(model)
    yield Step("traced", call(torch.tensor(0.0)))
    yield Step("inputs", call(torch.tensor(5.0)))


@issue(117758, "a forward hook is registered after the first call")
def late_hook(wrap: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[Tensor] = []
    call = wrap(model)
    yield Step("traced", (call(X), len(seen)))
    handle = model[0].register_forward_hook(lambda m, i, out: seen.append(out.detach().sum()))
    yield Step("change", (call(X), list(seen)))
    handle.remove()
    yield Step("change", (call(X), len(seen)))


@issue(117265, "forward of a layer is replaced after the first call")
def replaced_forward(wrap: Wrap) -> Steps:
    layer = nn.Linear(4, 4, bias=False)
    call = wrap(lambda x: layer(x))
    yield Step("traced", call(X))
    layer.forward = lambda x: 3.5 * x  # type: ignore[method-assign]
    yield Step("change", call(X))


@issue(100977, "a call without gradients is followed by one with gradients")
def gradients_later(wrap: Wrap) -> Steps:
    layer = nn.Linear(4, 2)
    call = wrap(layer)
    with torch.no_grad():
        yield Step("traced", call(X))
    out = call(X)
    tried(lambda: out.sum().backward())
    yield Step("change", (out, out.requires_grad, layer.weight.grad))


@issue(196173, "a branch depends on which of two objects an attribute is, and exchanges them")
def identity_of_an_attribute(wrap: Wrap) -> Steps:
    class Holder:
        def __init__(self) -> None:
            self.left, self.right = object(), object()
            self.current = self.left

    def model(x: Tensor, holder: Holder) -> Tensor:
        is_left = holder.current is holder.left
        holder.current = holder.right if is_left else holder.left
        return x.square() if is_left else -x

    holder = Holder()
    call = wrap(model)
    for number in range(5):
        out = call(X, holder)
        yield Step("change" if number else "traced", (out, holder.current is holder.left))


@issue(68190, "the training flag given to a function is kept as it was at capture")
def training_flag(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=self.training)

    model = Model()
    call = wrap(model)
    torch.manual_seed(3)
    yield Step("traced", call(X))
    model.eval()
    torch.manual_seed(3)
    yield Step("change", call(X))


@issue(163303, "a parameter that is also in a list is captured as a constant")
def parameter_in_a_list(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(4))
            self.flat = [self.p]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.flat[0]

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    with torch.no_grad():
        model.p.mul_(3)
    yield Step("change", call(X))
    model.p = nn.Parameter(torch.full((4,), 7.0))
    model.flat = [model.p]
    yield Step("change", call(X))


@issue(118922, "a tensor that is a plain attribute is captured as a constant")
def plain_tensor(wrap: Wrap) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b

    model = Model()
    call = wrap(model)
    yield Step("traced", call(X))
    model.b.mul_(2)
    yield Step("change", call(X))
    model.b = torch.full((4,), 9.0)
    yield Step("change", call(X))
