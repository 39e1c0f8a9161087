"""TorchScript inside a model: scripted and traced functions and modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.borders.border import Border, Stateful

border = Border(r".*torch\.jit\..* is (deprecated|not supported)")


def scripted(subject: Any) -> Any:
    """Script something without the warning that TorchScript is on its way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(subject)


def traced(subject: Any, *example: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(subject, example)


@scripted
def branching(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1


@scripted
def in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x


@scripted
def in_place_without_result(x: Tensor) -> None:
    x.mul_(3)


@scripted
def counting(x: Tensor) -> tuple[int, float, bool, Tensor]:
    return x.size(0), float(x.sum()), bool(x.max() > 1), x + 1


@scripted
def listing(x: Tensor, n: int) -> list[Tensor]:
    out = []
    for i in range(n):
        out.append(x * i)
    return out


@scripted
def naming(x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
    return {"double": x * scale, "same": x}


@scripted
def random(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@scripted
def appending(x: Tensor, seen: list[Tensor]) -> int:
    seen.append(x)
    return len(seen)


@scripted
def raising(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        raise ValueError("positive")
    return x


straight = traced(lambda x: x.relu() * 2 + x.mean(), torch.ones(2, 2))


class Steps(nn.Module):
    """What is scripted below: submodules, a buffer that it updates, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.calls: int = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        y = self.drop(self.fc(x))
        if self.calls > 1:
            y = y + 1
        return y + self.count


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).relu()


@border.replays
def a_function_that_branches(x: Tensor) -> Tensor:
    return branching(x) + 1


@border.replays
def a_function_that_works_in_place(x: Tensor) -> Tensor:
    y = x * 1
    z = in_place(y)
    return y + z


@border.replays
def a_function_that_works_in_place_on_an_argument(x: Tensor) -> Tensor:
    with torch.no_grad():
        in_place_without_result(x)
    return x * 2


@border.replays
def a_function_that_works_in_place_and_returns_nothing(x: Tensor) -> Tensor:
    y = x * 1
    in_place_without_result(y)
    return y * 2


@border.replays
def a_function_that_returns_numbers(x: Tensor) -> Any:
    n, total, large, y = counting(x)
    return y * n + total, large


@border.replays
def a_function_whose_numbers_decide(x: Tensor) -> Tensor:
    n, total, large, y = counting(x)
    return y * 2 if n > 3 or large else y * total


@border.replays
def a_function_that_returns_a_list(x: Tensor) -> Any:
    return listing(x, x.shape[0])


@border.replays
def a_function_that_returns_a_dict(x: Tensor) -> Any:
    found = naming(x)
    return found["double"] + found["same"]


@border.replays
def a_function_that_draws_random_numbers(x: Tensor) -> Tensor:
    return random(x)


@border.replays
def a_function_that_is_given_a_list(x: Tensor) -> Any:
    seen = [x + 1]
    n = appending(x, seen)
    return n, len(seen), seen[-1] * 2


@border.replays
def a_function_that_raises(x: Tensor) -> Tensor:
    try:
        return raising(x)
    except Exception:
        return x * 2


@border.replays
def a_traced_function(x: Tensor) -> Tensor:
    return straight(x)


@border.replays
class AScriptedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = scripted(Plain())

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * 2


@border.replays
class ATracedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = traced(Plain().eval(), torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * 2


@border.either("")
class AScriptedModuleWithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = scripted(Steps())

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


@border.either("unknown origin")
class AMethodOfAScriptedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = scripted(Plain())

    def forward(self, x: Tensor) -> Tensor:
        return self.plain.fc(x) + self.plain.norm.running_mean


@border.either("unknown origin")
class AScriptedModuleChangedByItsUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = scripted(Plain())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.plain.fc.weight.mul_(0.5)
        return self.plain(x)


@border.replays
def a_whole_scripted_model() -> Callable[..., Any]:
    return scripted(Plain())


@border.replays
def a_whole_scripted_function() -> Callable[..., Any]:
    return branching


@border.replays
class WithAScriptedHelperInAnAttribute(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.helper = branching

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.fc(x))
