"""What a forward does to its own module: registers, converts, freezes, loads, copies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Stateful

border = Border()
LONG = DEFAULT * 2


@border.either("")
class RegistersABuffer(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("last", x.detach().sum(0))
        return self.fc(x) + self.last


@border.either("", inputs=LONG)
class RegistersAParameterOnce(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_parameter("scale", nn.Parameter(torch.ones(4) * 2))
        return self.fc(x) * self.scale


@border.either("", inputs=LONG)
class AddsAModuleOnce(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if "act" not in self._modules:
            self.add_module("act", nn.Tanh())
        return self.act(self.fc(x))


@border.either("", inputs=LONG)
class DeletesAnAttribute(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if hasattr(self, "first"):
            del self.first
            return y * 2
        return y


@border.either("", inputs=LONG)
class WritesPastSetattr(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["last"] = x.detach().mean()
        object.__setattr__(self, "rows", x.shape[0])
        return self.fc(x) * self.rows + self.last


@border.either("", inputs=LONG)
class ReplacesAParameterInItsTable(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.fc._parameters["bias"], self.fc._parameters["weight"] = (
            self.fc._parameters["bias"],
            self.fc._parameters["weight"],
        )
        self.fc._buffers["seen"] = x.detach().sum()
        return y + self.fc.seen


@border.either("", inputs=LONG)
class ConvertsItself(Stateful):
    def forward(self, x: Tensor) -> Any:
        self.fc.double()
        y = self.fc(x.double()).float()
        self.fc.float()
        return y, self.fc.weight.dtype


@border.either("", inputs=LONG)
class FreezesItself(Stateful):
    def forward(self, x: Tensor) -> Any:
        self.fc.requires_grad_(False)
        y = self.fc(x)
        self.fc.requires_grad_(True)
        return y + self.fc.bias, y.requires_grad


@border.either("", inputs=LONG)
class SwitchesItsMode(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.eval()
        y = self.drop(self.norm(self.fc(x)))
        self.train()
        return y + self.drop(self.norm(x))


@border.either("", inputs=LONG)
class SwitchesItsModeForGood(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.fc(x))
        self.train(not self.training)
        return y


@border.either("", inputs=LONG)
class LoadsItself(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.load_state_dict({name: v * 0.5 for name, v in self.state_dict().items()})
        return y + self.fc(x)


@border.either("")
class ReturnsItsState(Stateful):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x), dict(self.named_parameters()), self.state_dict()["fc.bias"] * 2


@border.either("")
class AppliesAFunction(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.apply(lambda m: m.weight.data.mul_(0.5) if isinstance(m, nn.Linear) else None)
        return self.fc(x)


@border.either("")
class CallsACopy(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        twin = copy.copy(self.fc)
        return twin(x) + self.fc(x)


@border.either("", inputs=LONG)
class KeepsByShape(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = tuple(x.shape)
        if key not in self.kept:
            self.kept[key] = torch.arange(x.shape[0]).float()[:, None]
        return self.fc(x) + self.kept[key]


@border.either("", inputs=LONG)
class KeepsByName(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        name = f"mask_{x.shape[0]}"
        if not hasattr(self, name):
            self.register_buffer(name, torch.ones(x.shape[0], 1) * 2, persistent=False)
        return self.fc(x) * getattr(self, name)


@border.either("", inputs=LONG)
class KeepsItsOutputs(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(self.fc(x).detach().sum())
        self.outputs = self.outputs[-2:]
        return x + torch.stack(self.outputs).sum()


@border.either("", inputs=LONG)
class KeepsItsInput(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        before = getattr(self, "before", None)
        self.before = x.detach()
        return self.fc(x) if before is None or before.shape != x.shape else self.fc(x - before)


@border.either("", inputs=LONG)
class AsksForGradients(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        norm = 0.0 if self.fc.weight.grad is None else float(self.fc.weight.grad.norm())
        return self.fc(x) * (1 + norm)


@border.either("", inputs=LONG)
class ZeroesItsGradients(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad(set_to_none=False)
        return self.fc(x)


class AsksForOneGradient(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.fc.weight.grad is None else x * 3


def test_a_gradient_that_was_there_when_the_run_was_recorded() -> None:
    model = AsksForOneGradient()
    bended, x = bt.BendedModule(model), torch.ones(3, 4)
    for gradient in (torch.ones(4, 4), None, torch.ones(4, 4), None):
        model.fc.weight.grad = gradient
        for _ in range(2):
            assert torch.equal(bended(x), model(x))
    assert bended.stats.replays == 6


def test_a_view_that_was_one_when_the_run_was_recorded() -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if x._base is None else x * 3

    bended, whole = bt.BendedModule(model), torch.ones(4)
    for x in (whole[:2], torch.ones(2), whole[2:], torch.ones(2)):
        assert torch.equal(bended(x), model(x))


def halved(x: Tensor) -> Tensor | None:
    """A function for torch's modes, as other libraries have them, that may give nothing."""
    if has_torch_function_unary(x):
        return handle_torch_function(halved, (x,), x)  # type: ignore[no-any-return]
    return x / 2 if x.sum() > 0 else None


def test_a_function_of_another_library_that_gave_a_tensor_first() -> None:
    def model(x: Tensor) -> Tensor:
        half = halved(x)
        return x * 3 if half is None else half + 1

    bended = bt.BendedModule(model)
    for x in (torch.ones(2), -torch.ones(2), torch.ones(2) * 2, -torch.ones(2)):
        assert torch.equal(bended(x), model(x))
