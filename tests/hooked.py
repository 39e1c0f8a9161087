"""What the tests of hooks share: hooks that write down, and modules to hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits

Event = tuple[Any, ...]
ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


class Log:
    """Hooks of all three kinds that write down what they are given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def before(self, module: Any, inputs: Any) -> None:
        self.events.append(("before", module.name, inputs))

    def after(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.events.append(("after", module.name, inputs, outputs))

    def backward(self, module: Any, grad_in: Any, grad_out: Any) -> None:
        self.events.append(("backward", module.name, grad_in, grad_out))

    def register(self, manager: bt.HookManager, **modules: nn.Module) -> None:
        manager.register_forward_pre_hook(self.before, **modules)
        manager.register_forward_hook(self.after, **modules)
        manager.register_backward_hook(self.backward, **modules)

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [event[:2] for event in self.events]

    def gradients(self) -> tuple[Any, Any]:
        """The one backward event there is."""
        ((_, _, grad_in, grad_out),) = self.take()
        return grad_in, grad_out


def values(value: Any) -> Any:
    """Tensors as the numbers in them, to be compared bit by bit but not by identity."""
    if isinstance(value, (tuple, list)):
        return [values(item) for item in value]
    return bits(value.contiguous()) if isinstance(value, Tensor) else value


class Function(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def traces_of_hooks(model: nn.Module) -> list[str]:
    """Whatever a module has only while hooks are there."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
              "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
              "_forward_hooks_always_called")  # fmt: skip
    found = [table for module in model.modules() for table in tables if getattr(module, table)]
    return found + ["name" for module in model.modules() if "name" in vars(module)]
