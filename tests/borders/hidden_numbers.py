"""Numbers that come from sizes and values, used where torch does not report to the tracer."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from tests.borders.border import Border, Stateful

border = Border()


class Scaled(torch.autograd.Function):
    """Multiplies by what its second argument holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: Any) -> Tensor:
        ctx.factor = holder["n"] if isinstance(holder, dict) else holder.n
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor * 2, None


@bt.opaque
def scaled(x: Tensor, holder: Any) -> Tensor:
    return x * holder.n


LAST: dict[str, Any] = {}


@bt.opaque
def scaled_by_the_last(x: Tensor) -> Tensor:
    return x * LAST["n"]


@border.either("")
def in_a_mapped_closure(x: Tensor) -> Tensor:
    n = x.shape[0]
    return vmap(lambda row: row * n + n / 2)(x)


@border.either("")
def in_a_differentiated_closure(x: Tensor) -> Any:
    n = x.shape[0]
    return grad(lambda y: (y**2 * n).sum())(x), jvp(lambda y: y * n, (x,), (x,))


@border.either("")
def in_a_functionalised_closure(x: Tensor) -> Tensor:
    n = x.shape[0]
    return vmap(functionalize(lambda row: row * n))(x)


@border.either("")
def as_a_size_in_a_mapped_closure(x: Tensor) -> Tensor:
    n = x.shape[0]
    return vmap(lambda row: row.sum() * torch.ones(n))(x)


@border.either("")
def from_a_value_in_a_mapped_closure(x: Tensor) -> Tensor:
    value = x.detach().sum().item()
    return vmap(lambda row: row * value)(x)


@border.either("")
def in_a_mapped_closure_before_a_branch(x: Tensor) -> Tensor:
    n, value = x.shape[0], x.detach().sum().item()
    y = vmap(lambda row: row * n + n / 2 + (value if value > 0.5 else 2 * value))(x)
    return y * 2 if y.detach().sum() > 0 else -y


@border.either("")
def in_a_checkpointed_closure(x: Tensor) -> Tensor:
    n = x.shape[0]
    y = x * 2 if x.requires_grad else (x * 2).requires_grad_()
    return checkpoint(lambda z: z * n, y, use_reentrant=True)


@border.either("")
def in_a_closure_checkpointed_the_other_way(x: Tensor) -> Tensor:
    n = x.shape[0]
    return checkpoint(lambda z: z * n, x, use_reentrant=False)


@border.either("")
def in_another_thread(x: Tensor) -> Tensor:
    n = x.shape[0]
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * n + torch.ones(n, 1)).result()


@border.either("")
def without_torch_functions(x: Tensor) -> Tensor:
    n = x.shape[0]
    with torch._C.DisableTorchFunction():
        return x * n + torch.add(x, 1, alpha=n) + x.clamp(max=n) + torch.full((4,), n)


@border.either("")
def as_sizes_without_torch_functions(x: Tensor) -> Any:
    n = x.shape[0]
    with torch._C.DisableTorchFunction():
        return x.view(n, -1) * torch.ones(n, 4), x[:n], x.reshape(-1)[n]


@border.either("")
def in_a_dict_given_to_a_function(x: Tensor) -> Tensor:
    return Scaled.apply(x, {"n": x.shape[0]})


@border.either("")
def in_an_object_given_to_a_function(x: Tensor) -> Tensor:
    return Scaled.apply(x, types.SimpleNamespace(n=x.shape[0]))


@border.either("")
class InAnAttributeOfAModuleGivenToAFunction(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.n = x.shape[0]
        return Scaled.apply(self.fc(x), self)


@border.either("")
class InAnAttributeReadByAnOpaqueMethod(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.n = x.shape[0]
        return self.part(x)

    @bt.opaque
    def part(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.n


@border.either("")
class APlainAttributeReadByAnOpaqueMethod(InAnAttributeReadByAnOpaqueMethod):
    def forward(self, x: Tensor) -> Tensor:
        self.n = 2.0 if x.shape[0] > 3 else 3.0
        return self.part(x)


@border.either("")
class ATensorAttributeReadByAnOpaqueMethod(InAnAttributeReadByAnOpaqueMethod):
    def forward(self, x: Tensor) -> Tensor:
        self.n = x.detach().mean()
        return self.part(x)


@border.either("")
def in_an_object_given_to_an_opaque_function(x: Tensor) -> Tensor:
    return scaled(x, types.SimpleNamespace(n=x.shape[0]))


@border.either("")
def in_a_global_read_by_an_opaque_function(x: Tensor) -> Tensor:
    LAST["n"] = x.shape[0]
    return scaled_by_the_last(x)


@border.either("")
def in_a_hook(x: Tensor) -> Tensor:
    n = x.shape[0]
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * n)
    return y


@border.either("")
def in_a_function_applied_to_each_element(x: Tensor) -> Tensor:
    n = x.shape[0]
    return x + x.detach().clone().apply_(lambda value: value * n)


@border.either("", gradients=False)
def in_a_condition(x: Tensor) -> Tensor:
    n = x.shape[0]
    return torch.cond(x.sum() > 0, lambda y: y * n, lambda y: y.cos(), (x,))


@border.either("")
class InTheForwardOfAHookedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc.register_forward_hook(lambda module, args, out: out * len(args[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * x.shape[0]
