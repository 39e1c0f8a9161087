"""Hooks that a model puts on tensors in its forward, and what it takes gradients with there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits


class Hooked(nn.Module):
    """A layer with a hook on what it gives.

    Args:
        hook: puts the hook there, given the model, the layer's output and the input.
    """

    def __init__(self, hook: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.hook = hook
        self.seen: list[Tensor] = []

    def see(self, grad: Tensor) -> None:
        self.seen = [*self.seen[:1], grad]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        self.hook(self, y, x)
        return y * y.sum()


def closes_over(model: Any, y: Tensor, x: Tensor) -> None:
    scale, rows = x.mean(), x.shape[0]
    y.register_hook(lambda grad: grad * scale + rows)


def taken_away(model: Any, y: Tensor, x: Tensor) -> None:
    first, second = (y.register_hook(lambda grad, k=k: grad * k) for k in (3, 7))
    (first if x.sum() > 8 else second).remove()


def within(model: Any, y: Tensor, x: Tensor) -> None:
    with y.register_hook(lambda grad: grad * 9):
        pass


def differentiates(model: Any, y: Tensor, x: Tensor) -> None:
    y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.register_hook(lambda g: g + grad)


def doubles(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


HOOKS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a function": lambda model, y, x: y.register_hook(lambda grad: grad * 3),
    "a method": lambda model, y, x: y.register_hook(model.see),
    "what was computed": closes_over,
    "taken away": taken_away,
    "within": within,
    "gradients in forward": differentiates,
    "on a weight": lambda model, y, x: model.layer.weight.register_hook(lambda grad: grad * 1.5),
    "on the input": lambda model, y, x: x.register_hook(lambda grad: grad * 1.5),
    "on a sum": lambda model, y, x: model.layer.bias.register_post_accumulate_grad_hook(doubles),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_tensors_are_put_there_by_each_replay(hook: str) -> None:
    model = Hooked(HOOKS[hook])
    bended = bt.BendedModule(copy.deepcopy(model))
    for step in range(8):
        inputs = [torch.rand(2 + step % 2, 4).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        wanted, given = model(inputs[0]), bended(inputs[1])
        assert bits(given) == bits(wanted)
        wanted.sum().backward()
        given.sum().backward()
        assert bits(inputs[1].grad) == bits(inputs[0].grad)
        for one, other in zip(bended.parameters(), model.parameters(), strict=True):
            assert bits(one.grad) == bits(other.grad)
        assert bits(bended.model.seen) == bits(model.seen)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2
    assert isinstance(given.grad_fn, type(wanted.grad_fn))


def test_a_hook_that_counts_is_counted() -> None:
    def make() -> Any:
        fired: list[float] = []

        def model(x: Tensor) -> Any:
            y = x * 2
            y.register_hook(lambda grad: fired.append(grad.sum().item()))
            return y.exp(), len(fired)

        return model

    model, bended = make(), bt.BendedModule(make())
    for number in range(4):
        for call in (model, bended):
            y, fired = call(torch.ones(2, requires_grad=True))
            assert fired == number
            y.sum().backward()


def test_a_hook_that_is_refused_is_refused_by_replays() -> None:
    bended = bt.BendedModule(lambda x: (x.register_hook(print), x + 1)[1])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            bended(torch.ones(2))


def test_a_handle_that_is_kept_makes_the_run_live() -> None:
    def model(x: Tensor) -> Any:
        y = x * 2
        return y, y.register_hook(lambda grad: grad * 3)

    bended = bt.BendedModule(model)
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        y, handle = bended(x)
        handle.remove()
        y.sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
    assert bended.stats.live == 3


# What gives a function besides tensors


def pulled_back(x: Tensor) -> Any:
    scale = x * 2
    output, pull = torch.func.vjp(lambda y: y.sin() * scale, x)
    return output, pull(x), pull(output)[0] * pull(scale, retain_graph=True)[0]


def with_more(x: Tensor) -> Any:
    output, pull, more = torch.func.vjp(lambda y: (y * 2, y + 1), x, has_aux=True)
    return output, pull(more), more


def drawn(x: Tensor) -> Any:
    output, pull = torch.func.vjp(nn.functional.dropout, x)
    return (pull(x)[0] if output.sum() > 4 else output), torch.rand(1)


def linear(x: Tensor) -> Any:
    output, push = torch.func.linearize(lambda y: y.reshape(y.shape[0], -1).sin() * len(x), x)
    return output, push(x), push(x * 2)


GIVE_FUNCTIONS = {
    "vjp": pulled_back,
    "vjp with more": with_more,
    "vjp that draws": drawn,
    "linearize": linear,
    "jacrev": lambda x: torch.func.jacrev(lambda y, z: y * z.sin(), argnums=(0, 1))(x[0], x[1]),
    "hessian": lambda x: torch.func.hessian(lambda y: (y**3).sum())(x[0]),
}


@pytest.mark.parametrize("name", GIVE_FUNCTIONS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_transforms_that_give_functions_are_replayed(name: str) -> None:
    model = GIVE_FUNCTIONS[name]
    bended = bt.BendedModule(model)
    for step in range(6):
        x = torch.rand(2 + step % 2, 3)
        torch.manual_seed(step)
        wanted = model(x)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        assert bits(bended(x)) == bits(wanted)
        assert torch.equal(torch.get_rng_state(), state)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_a_linearize_that_was_taken_before_runs_live() -> None:
    from torch.func import linearize

    def model(x: Tensor) -> Any:
        return linearize(lambda y: y.reshape(y.shape[0], -1).sin() * len(x), x)[1](x)

    bended = bt.BendedModule(model)
    for rows in (2, 3):
        x = torch.rand(rows, 3)
        assert bits(bended(x)) == bits(model(x))
    assert bended.why_live[0].startswith("torch.func.linearize, taken before the run")
