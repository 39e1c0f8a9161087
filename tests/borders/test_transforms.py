"""Functions that call functions: functorch, higher-order ops, compiled and custom ones."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Stateful, given
from tests.promise import bits

border = Border(
    "The .grad attribute of a Tensor that is not a leaf",
    ".isinstance.treespec, LeafSpec",
    "flex_attention called without",
)
HIGHER = {"modes": [nullcontext], "inputs": DEFAULT[:3] * 2}  # each new size compiles
TRANSFORM = "function|transform|unknown origin"


def energy(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


@border.either(TRANSFORM)
def mapped(x: Tensor) -> Tensor:
    return vmap(lambda row: row * row.sum())(x) + 1


@border.either(TRANSFORM)
def mapped_over_two(x: Tensor) -> Any:
    return vmap(lambda a, b: (a * b, a.sum()), in_dims=(0, None))(x, x[0])


@border.either(TRANSFORM)
def mapped_in_chunks(x: Tensor) -> Tensor:
    return vmap(torch.sin, chunk_size=2)(x)


@border.either(TRANSFORM)
def mapped_twice(x: Tensor) -> Tensor:
    return vmap(vmap(lambda value: value * 2 + 1))(x)


@border.either(TRANSFORM)
def mapped_with_randomness(x: Tensor) -> Tensor:
    return vmap(lambda row: row + torch.rand(4), randomness="different")(x)


@border.either(TRANSFORM)
def mapped_and_the_same_random(x: Tensor) -> Tensor:
    return vmap(lambda row: row + torch.rand(4), randomness="same")(x)


@border.either(TRANSFORM)
def mapped_by_a_function_that_reads_shapes(x: Tensor) -> Tensor:
    return vmap(lambda row: row.view(2, row.shape[0] // 2).sum(0) * row.numel())(x)


@border.either(TRANSFORM)
def mapped_over_a_captured_tensor(x: Tensor) -> Tensor:
    scale = x.mean()
    return vmap(lambda row: row * scale)(x)


@border.either(TRANSFORM)
def gradient(x: Tensor) -> Tensor:
    return grad(energy)(x) * 2


@border.either(TRANSFORM)
def gradient_of_gradient(x: Tensor) -> Tensor:
    return grad(lambda y: grad(energy)(y).sum())(x)


@border.either(TRANSFORM)
def gradient_and_value(x: Tensor) -> Any:
    return torch.func.grad_and_value(energy)(x)


@border.either(TRANSFORM)
def jacobians(x: Tensor) -> Any:
    return jacrev(torch.tanh)(x[0]), jacfwd(torch.tanh)(x[0])


@border.either(TRANSFORM)
def hessians(x: Tensor) -> Tensor:
    return hessian(energy)(x[0])


@border.either(TRANSFORM)
def forward_mode(x: Tensor) -> Any:
    return jvp(torch.sin, (x,), (x * 2,))


@border.either(TRANSFORM)
def reverse_mode(x: Tensor) -> Any:
    value, pull = vjp(torch.sin, x)
    return value, pull(torch.ones_like(x))


@border.either(TRANSFORM)
def gradients_per_sample(x: Tensor) -> Tensor:
    return vmap(grad(energy))(x)


@border.either(TRANSFORM)
def with_python_control_flow(x: Tensor) -> Tensor:
    return grad(lambda y: y.sum() * 2 if y.shape[0] > 3 else (y**2).sum())(x)


@border.either(TRANSFORM)
def with_a_branch_on_a_value(x: Tensor) -> Tensor:
    return grad(lambda y: energy(y) if x.sum() > 0 else (y**2).sum())(x)


@border.either(TRANSFORM)
def that_changes_what_it_closes_over(x: Tensor) -> Any:
    seen: list[int] = []

    def row(y: Tensor) -> Tensor:
        seen.append(len(seen))
        return y * 2

    return vmap(row)(x), seen


SEEN: list[int] = []
FACTOR = torch.ones(4) * 3


def counting_row(row: Tensor) -> Tensor:
    SEEN.append(len(SEEN))
    return row * FACTOR


class Row:
    """A callable with a setting."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, row: Tensor) -> Tensor:
        return row * self.factor


@border.either(TRANSFORM)
def of_a_function_with_defaults(x: Tensor) -> Tensor:
    mean, n = x.detach().mean(), x.shape[0]
    return vmap(lambda row, s=mean, n=n: row * s + n)(x)


@border.either(TRANSFORM)
def of_a_partial_function(x: Tensor) -> Tensor:
    return vmap(functools.partial(torch.mul, x.detach().mean()))(x)


@border.either(TRANSFORM)
def of_an_object(x: Tensor) -> Tensor:
    return vmap(Row(float(x.detach().mean())))(x) + vmap(Row(x.shape[0]))(x)


@border.either(TRANSFORM)
def of_a_function_made_by_one(x: Tensor) -> Tensor:
    def scaled_by(n: int) -> Any:
        return lambda row: row * n

    return vmap(scaled_by(x.shape[0]))(x)


@border.either(TRANSFORM)
def of_another_transform_of_a_closure(x: Tensor) -> Tensor:
    scale = x.detach().sum()
    return vmap(grad(lambda row: (row * scale).sin().sum()))(x)


@border.either(TRANSFORM)
def with_a_value_read_inside(x: Tensor) -> Tensor:
    return x * grad(lambda y: (y**2).sum() * FACTOR[0].item())(x)


class Vectorised(Stateful):
    """Transforms of its own methods and modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.drop = nn.Dropout(0.5)

    def row(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * self.calls

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            return vmap(self.fc)(x)
        if self.kind == "method":
            return vmap(self.row)(x)
        if self.kind == "closure":
            return vmap(lambda row: self.fc(row) * self.calls)(x) + self.calls
        return vmap(self.drop, randomness="different")(x)


@border.either(TRANSFORM)
def of_a_module() -> nn.Module:
    return Vectorised("module")


@border.either("calls|" + TRANSFORM, at="self.calls", inputs=DEFAULT * 2)
def of_a_method_that_counts() -> nn.Module:
    return Vectorised("method")


@border.either("self.calls|" + TRANSFORM, at="self.calls")
def of_a_closure_over_a_module() -> nn.Module:
    return Vectorised("closure")


@border.either(TRANSFORM)
def of_dropout() -> nn.Module:
    return Vectorised("drop")


@border.replays
class Functional(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        half = {name: p * 0.5 for name, p in self.fc.named_parameters()}
        return functional_call(self.fc, half, (x,)) + self.fc(x)


@border.either(TRANSFORM)
class GradientsOfParameters(Stateful):
    def forward(self, x: Tensor) -> Any:
        parameters = dict(self.fc.named_parameters())

        def loss(p: Any, row: Tensor) -> Tensor:
            return functional_call(self.fc, p, (row,)).sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)


@border.either(TRANSFORM)
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parameters, buffers = torch.func.stack_module_state(list(self.members))
        base = self.members[0]
        return vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)


@border.live("dual|forward", at="dual_level")
class Dual(Stateful):
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x * 2)
            return tuple(torch.autograd.forward_ad.unpack_dual(self.fc(dual)))


@border.replays
def autograd_functional(x: Tensor) -> Any:
    y = x.detach()
    return torch.autograd.functional.jacobian(torch.sin, y[0]), x


@border.replays
def batched_gradients(x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    with torch.enable_grad():
        out = y.sin().sum(1)
    (found,) = torch.autograd.grad(out, y, torch.eye(len(x)), is_grads_batched=True)
    return found


@border.replays(**HIGHER)
def a_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


@border.replays(**HIGHER)
def a_condition_that_closes_over_values(x: Tensor) -> Tensor:
    y, n = x.exp(), x.shape[0]
    return torch.cond(x.sum() > 0, lambda z: z + y, lambda z: z * n - y, (x,))


@border.replays
def a_condition_on_a_bool(x: Tensor) -> Tensor:
    return torch.cond(x.shape[0] > 3, lambda y: y.sin(), lambda y: y.cos(), (x,))


@border.replays(**HIGHER, gradients=False)
def a_loop(x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))


@border.either(TRANSFORM)
def a_scan(x: Tensor) -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a + b, x.detach(), dim=0, combine_mode="generic")


@border.replays(**HIGHER)
def a_map(x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as torch_map

    return torch_map(lambda row, y: row + y, x, x.detach()[0] * 2)


@border.either(TRANSFORM)
def flexible_attention(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q = x.detach()[None, None]
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)


@border.replays
class CompiledInPlace(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.fc.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return x.sin() * 2


@torch.compile(backend="eager")
def compiled_in_place(x: Tensor) -> Tensor:
    return x.add_(1)


@torch.compile(backend="eager")
def compiled_with_a_break(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


@border.replays
def a_compiled_function(x: Tensor) -> Tensor:
    return compiled(x) + 1


@border.replays
def a_compiled_function_that_works_in_place(x: Tensor) -> Tensor:
    y = x * 1
    compiled_in_place(y)
    return y * 2


@border.replays
def a_compiled_function_that_branches(x: Tensor) -> Tensor:
    return compiled_with_a_break(x)


@torch.compiler.disable
def never_compiled(x: Tensor) -> Tensor:
    return x * 2


@border.replays
def a_function_that_is_never_compiled(x: Tensor) -> Tensor:
    return never_compiled(x) if not torch.compiler.is_compiling() else x


@torch.library.custom_op("bendtrace_borders::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * factor)


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: Any, gradient: Tensor) -> Any:
    return gradient * 100, None


scaled.register_autograd(_scaled_backward)


@torch.library.custom_op("bendtrace_borders::fill", mutates_args={"x"})
def fill(x: Tensor, value: float) -> None:
    x.numpy().fill(value)


@torch.library.custom_op("bendtrace_borders::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x * 2


@torch.library.custom_op("bendtrace_borders::chunks", mutates_args=())
def chunks(x: Tensor) -> list[Tensor]:
    return [row.clone() for row in x]


@torch.library.custom_op("bendtrace_borders::count", mutates_args=())
def count(x: Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("bendtrace_borders::bump", mutates_args={"x"})
def bump(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@torch.library.custom_op("bendtrace_borders::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(4)


@border.replays
def a_custom_op(x: Tensor) -> Tensor:
    return scaled(x, 2.0) + torch.ops.bendtrace_borders.scaled(x, x.shape[0] / 2)


@border.replays
def a_custom_op_s_overload(x: Tensor) -> Tensor:
    return torch.ops.bendtrace_borders.scaled.default(x, 2.0) * 2


@border.replays
def a_custom_op_that_mutates(x: Tensor) -> Tensor:
    y = x.detach() * 1
    fill(y, 3.0)
    return x + y


@border.replays
def a_custom_op_that_mutates_a_view_of_an_argument(x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.ops.bendtrace_borders.fill(x.detach()[0], 5.0)
    return x * 2


@border.replays
def a_custom_op_that_mutates_and_returns(x: Tensor) -> Any:
    y = x.detach() * 1
    return bump(y) + y, y


@border.replays
def a_custom_op_with_two_results(x: Tensor) -> Tensor:
    first, second = pair(x.detach())
    return first - second + x


@border.replays
def a_custom_op_with_a_list(x: Tensor) -> Any:
    return torch.stack(chunks(x.detach())) + x


@border.replays
def a_custom_op_with_a_number(x: Tensor) -> Tensor:
    n = count(x)
    return x * n if n > 2 else x + n


@border.replays
def a_custom_op_with_random_numbers(x: Tensor) -> Tensor:
    return noisy(x.detach())


@border.replays
def aten_ops(x: Tensor) -> Any:
    y = torch.ops.aten.add.Tensor(x, x, alpha=2)
    return torch.ops.aten.relu(y), torch.ops.aten.sym_size.int(y, 0) * y


@border.replays
def aten_ops_in_place(x: Tensor) -> Tensor:
    y = x * 1
    torch.ops.aten.add_.Tensor(y, 1)
    torch.ops.aten.mul.out(y, y, out=y.detach())
    return y


@border.replays(
    inputs=[given(torch.ones(3), torch.ones(3)), given(torch.zeros(3), torch.ones(3))] * 3
)
def prims_and_refs(x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.prims.add(x, y) * 2


@torch.library.custom_op("bendtrace_borders::nested", mutates_args=())
def nested_calls(x: Tensor) -> Tensor:
    """A kernel that calls a module, seeds and draws."""
    torch.manual_seed(4)
    return nn.ReLU()(x) + torch.rand(4)


@border.live("seeds")
def a_custom_op_that_calls_a_module_and_seeds(x: Tensor) -> Tensor:
    return nested_calls(x.detach()) + x


class Small(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        return y * x.shape[-1] + y.sum(-1, keepdim=True)


AROUND: dict[str, Any] = {
    "vmap": lambda call, x: vmap(call)(x),
    "grad": lambda call, x: grad(lambda y: call(y).sum())(x),
    "jacrev": lambda call, x: jacrev(call)(x[0]),
    "jacfwd": lambda call, x: jacfwd(call)(x[0]),
    "jvp": lambda call, x: jvp(call, (x,), (x,)),
    "hessian": lambda call, x: hessian(lambda y: call(y).sum())(x[0]),
    "per sample": lambda call, x: vmap(grad(lambda y: call(y).sum()))(x),
    "functional": lambda call, x: functional_call(
        call, {k: v * 2 for k, v in call.named_parameters()}, (x,)
    ),
    "compiled": lambda call, x: torch.compile(call, backend="eager")(x),
    "fake": lambda call, x: _fake(call, x),
}


def _fake(call: Any, x: Tensor) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = call(mode.from_tensor(x))
    return type(out).__name__, out.shape, out.dtype


@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_transforms_around_a_wrapped_model(transform: str) -> None:
    torch.manual_seed(0)
    model = Small()
    bended = bt.BendedModule(model)
    for step in range(3):
        for rows in (3, 5):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows + step))
            wanted, given = (AROUND[transform](one, x) for one in (model, bended))
            assert bits(given) == bits(wanted)
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.replays >= 3


def test_a_function_that_a_transform_calls_is_called_as_often_as_in_eager() -> None:
    def model(x: Tensor) -> Any:
        return vmap(counting_row)(x), len(SEEN)

    bended = bt.BendedModule(model)
    for step in range(5):
        FACTOR.fill_(step)
        x = torch.ones(3 + step % 2, 4)
        results = []
        for call in (model, bended):
            del SEEN[step:]
            results.append((bits(call(x)), list(SEEN)))
        assert results[0] == results[1], step


class CompiledSubmodule(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.quick = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.quick(self.fc(x)) * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_submodule_runs_as_it_is_while_it_is_traced() -> None:
    torch.manual_seed(0)
    eager = CompiledSubmodule()
    torch.manual_seed(0)
    model = CompiledSubmodule()
    bended = bt.BendedModule(model)
    for rows in (3, 3, 5, 3):
        x = torch.randn(rows, 4)
        for one in (eager, bended):
            one(x).sum().backward()
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert bits(mine.grad) == bits(other.grad)
        assert bits(bended(x)) == bits(eager(x))
    assert bended.stats.replays >= 6
