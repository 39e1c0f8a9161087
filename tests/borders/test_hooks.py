"""Hooks on the model: they fire as often as in eager, in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import bendtrace as bt
from tests.borders.border import Border, Case
from tests.promise import assert_promise, bits, randn_inputs

border = Border()


class Hooked(nn.Module):
    """Two layers, the inner one with a hook, and a list of what fired."""

    def __init__(self, put: Callable[[nn.Module, list[Any]], Any] | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.fired: list[Any] = []
        if put is not None:
            put(self.fc, self.fired)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).relu())


def note(fired: list[Any], name: str, result: Any = None) -> Callable[..., Any]:
    def hook(module: nn.Module, *rest: Any) -> Any:
        fired.append(name)
        return None if result is None else result(*rest)

    return hook


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda m, f: m.register_forward_hook(note(f, "forward")),
    "forward that changes the output": lambda m, f: m.register_forward_hook(
        note(f, "forward", lambda args, out: out * 2)
    ),
    "forward with keywords": lambda m, f: m.register_forward_hook(
        note(f, "keywords", lambda args, kwargs, out: out + len(kwargs)), with_kwargs=True
    ),
    "forward always": lambda m, f: m.register_forward_hook(note(f, "always"), always_call=True),
    "pre": lambda m, f: m.register_forward_pre_hook(note(f, "pre")),
    "pre that changes the input": lambda m, f: m.register_forward_pre_hook(
        note(f, "pre", lambda args: (args[0] * 3,))
    ),
    "pre with keywords": lambda m, f: m.register_forward_pre_hook(
        note(f, "pre", lambda args, kwargs: ((args[0] + 1,), kwargs)), with_kwargs=True
    ),
    "full backward": lambda m, f: m.register_full_backward_hook(note(f, "backward")),
    "full backward that changes the gradient": lambda m, f: m.register_full_backward_hook(
        note(f, "backward", lambda given, out: tuple(g * 2 for g in given if g is not None))
    ),
    "full backward pre": lambda m, f: m.register_full_backward_pre_hook(note(f, "backward pre")),
    "two": lambda m, f: [
        m.register_forward_hook(note(f, "second")),
        m.register_forward_hook(note(f, "first"), prepend=True),
    ],
}


def differentiate(model: Callable[..., Any], rows: int) -> Any:
    """Return the bits of the output, of the input's gradient and of what fired."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    out = model(x)
    out.pow(2).sum().backward()
    return bits([out.detach(), x.grad])


def pair(put: Any = None) -> tuple[Hooked, Hooked, bt.BendedModule]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Hooked(put))
    return made[0], made[1], bt.BendedModule(made[1])


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_put_before_the_first_call(kind: str) -> None:
    eager, model, bended = pair(HOOKS[kind])
    for rows in (3, 3, 5, 3, 5):
        assert differentiate(bended, rows) == differentiate(eager, rows)
        assert model.fired == eager.fired
        assert model.fired
        assert bits(model.fc.weight.grad) == bits(eager.fc.weight.grad)
    if "backward" not in kind:
        calls = [randn_inputs(3, 4)] * 3
        assert_promise(lambda: Hooked(HOOKS[kind]), calls, mode=torch.no_grad)
    reason = [r for r in bended.why_live if "hook" in r]
    assert reason
    assert f"{__file__}:" in reason[0]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_put_and_removed_between_calls(kind: str) -> None:
    eager, model, bended = pair()
    handles: list[Any] = []
    for step in range(9):
        if step in (3, 6):
            for handle in handles:
                handle.remove()
            handles.clear()
        if step == 3:
            for one in (eager, model):
                put = HOOKS[kind](one.fc, one.fired)
                handles += put if isinstance(put, list) else [put]
        assert differentiate(bended, 3 + step % 2) == differentiate(eager, 3 + step % 2), step
        assert model.fired == eager.fired, step
    assert len(model.fired) >= 3
    assert bended.stats.replays >= 3


@pytest.mark.parametrize("kind", ["forward", "pre", "full backward", "forward always"])
def test_hooks_on_the_outermost_module(kind: str) -> None:
    eager, model, bended = pair()
    for one in (eager, model):
        HOOKS[kind](one, one.fired)
    for rows in (3, 3, 5, 3):
        assert differentiate(bended, rows) == differentiate(eager, rows)
        assert model.fired == eager.fired
    assert len(model.fired) == 4


GLOBAL: dict[str, Any] = {
    "forward": modules.register_module_forward_hook,
    "pre": modules.register_module_forward_pre_hook,
    "full backward": modules.register_module_full_backward_hook,
    "backward pre": modules.register_module_full_backward_pre_hook,
}


@contextmanager
def for_all_modules(kind: str, fired: list[Any]) -> Iterator[None]:
    def hook(module: nn.Module, *rest: Any) -> None:
        if isinstance(module, nn.Linear):
            fired.append(type(module).__name__)

    handle = GLOBAL[kind](hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", GLOBAL)
def test_hooks_for_all_modules_put_and_removed_between_calls(kind: str) -> None:
    eager, _, bended = pair()
    for step in range(8):
        wanted: list[Any] = []
        given: list[Any] = []
        if step in (2, 3, 6):
            with for_all_modules(kind, wanted):
                expected = differentiate(eager, 3)
            with for_all_modules(kind, given):
                assert differentiate(bended, 3) == expected
            assert len(given) == len(wanted) == 2
        else:
            assert differentiate(bended, 3) == differentiate(eager, 3)
    assert bended.stats.replays >= 3
    assert any("hooks are registered for all modules" in reason for reason in bended.why_live)


@pytest.mark.parametrize("kind", ["state dict", "load"])
def test_hooks_that_forward_does_not_reach_do_not_stop_replays(kind: str) -> None:
    eager, model, bended = pair()
    fired: dict[nn.Module, int] = {eager: 0, model: 0}

    def hook(module: nn.Module, *_: Any) -> None:
        fired[module] += 1

    for one in fired:
        if kind == "state dict":
            one.register_state_dict_post_hook(hook)
        else:
            one.register_load_state_dict_post_hook(hook)
    for step in range(3):
        assert differentiate(bended, 3) == differentiate(eager, 3)
        for caller in (eager, bended):
            caller.load_state_dict({k: v * 0.5 for k, v in caller.state_dict().items()})
        assert list(fired.values()) == [step + 1] * 2
    assert bended.stats.replays == 2


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_fire_in_replays_too(register: str) -> None:
    eager, _, bended = pair()
    fired: dict[nn.Module, list[int]] = {}
    for one in (eager, bended.model):
        hook = fired.setdefault(one, []).append
        getattr(one.fc.weight, register)(lambda g, hook=hook: hook(g.numel()))
    for rows in (3, 3, 5, 3):
        assert differentiate(bended, rows) == differentiate(eager, rows)
    assert list(fired.values()) == [[16] * 4] * 2
    assert bended.stats.replays == 3


def test_hooks_on_inputs_fire_in_replays_too() -> None:
    _, _, bended = pair()
    fired: list[int] = []
    for step in range(3):
        x = torch.ones(3, 4, requires_grad=True)
        x.register_hook(lambda g: fired.append(1))
        bended(x).sum().backward()
        assert len(fired) == step + 1
    assert bended.stats.replays == 2


@border.replays
class PutInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        handle = self.fc.register_forward_hook(lambda m, a, out: out * 2)
        y = self.fc(x)
        handle.remove()
        return y + self.fc(x)


@border.live("hook", at="register_forward_hook")
class PutInForwardForGood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if not self.fc._forward_hooks:
            self.fc.register_forward_hook(lambda m, a, out: out * 2)
        return y


@border.each
def test_hooks_put_by_forward(case: Case) -> None:
    case.check()
