"""Hooks on the model: they fire as often as in eager, in each call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import bendtrace as bt
from tests.borders.border import Border
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
    if "backward" in kind:
        assert (bended.stats.live, bended.stats.traces) == (0, 1), bended.why_live
    else:  # the list is in the hook's closure and in the model, so that it is guarded
        assert all("self.fired changes" in reason for reason in bended.why_live)


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


class Branching(Hooked):
    """Goes one of two ways behind the hooked layer, which gives more than a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h, scale = self.fc(x)
        h = h.relu() if h.sum() > 0 else -h
        return self.out(h * scale)


class Several(nn.Linear):
    def forward(self, x: Tensor, scale: int = 2) -> Any:
        return super().forward(x) * scale, scale + 1


@pytest.mark.parametrize("kind", [kind for kind in HOOKS if "backward" in kind])
@pytest.mark.parametrize("inserted", [False, True])
def test_full_backward_hooks_on_paths_that_are_resumed(kind: str, inserted: bool) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Branching()
        model.fc = Several(4, 4)
        HOOKS[kind](model.fc, model.fired)
        if inserted and not made:  # by hand
            model.out.register_forward_hook(lambda module, args, out: out * 3)
        made.append(model)
    eager, model = made
    bended = bt.BendedModule(model)
    if inserted:
        bended.interject("out", lambda out: out * 3)
    for number in range(12):
        assert differentiate(bended, 3 + number) == differentiate(eager, 3 + number), number
        assert model.fired == eager.fired
        assert bits(model.fc.weight.grad) == bits(eager.fc.weight.grad)
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.replays >= 8, bended.stats


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


# What a hook does: it has the module, and a dict, a number and a list of the model's.
DOES: dict[str, tuple[str, dict[str, Any]]] = {
    "changes the output": ("return out * 2", {}),
    "is given keywords": ("return args[2] + len(args[1])", {"with_kwargs": True}),
    "is always called": ("return out - 1", {"always_call": True}),
    "branches": ("return out if out.mean() > 0 else -out", {}),
    "keeps the output": ("self.kept['fc'] = out.detach()", {}),
    "counts": ("self.calls += 1; return out * self.calls", {}),
    "appends a number": ("self.losses.append(out.mean().item())", {}),
    "appends a tensor": ("self.losses.append(out.detach())", {}),
    "draws": ("return out + torch.randn_like(out) * random.random()", {}),
    "writes in place": ("out.mul_(2)", {}),
    "looks at the module": ("return out + module.weight.sum() * module.training", {}),
    "raises": ("\n if out.sum() > 3: raise ValueError('too large')", {}),
    "replaces the input": ("return (args[0][0] * 3,)", {"before": True}),
    "replaces keywords": (
        "return (args[0][0] + 1,), args[1]", {"before": True, "with_kwargs": True},
    ),
    "is before the outermost module": ("return (args[0][0] * 3,)", {"before": True, "on": ""}),
    "is behind the outermost module": ("return out + 1", {"on": ""}),
}  # fmt: skip


class Does(nn.Module):
    """Two layers, with a hook."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.kept: dict[str, Any] = {}
        self.calls, self.losses = 0, []
        statements, options = DOES[name]
        options = {**options}
        space: dict[str, Any] = {"self": self, "torch": torch, "random": random}
        exec(f"def hook(module, *args):\n out = args[-1]; {statements}", space)
        module = self.get_submodule(options.pop("on", "fc"))
        before = options.pop("before", False)
        put = module.register_forward_pre_hook if before else module.register_forward_hook
        put(space["hook"], **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).relu())

    def left(self) -> Any:
        return bits([self.kept, self.calls, self.losses]), random.getstate(), torch.get_rng_state()


def outcome(model: Any, call: Callable[..., Any], number: int) -> Any:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).requires_grad_()
    torch.manual_seed(number)
    random.seed(number)
    try:
        out = call(x)
    except ValueError as error:
        return str(error), bits(model.left()[0])
    out.pow(2).sum().backward()
    left, pythons, torchs = model.left()
    return bits([out.detach(), x.grad, model.fc.weight.grad]), left, pythons, torchs.tolist()


@pytest.mark.parametrize("name", DOES)
def test_forward_hooks_are_part_of_the_run(name: str) -> None:
    eager, model = Does(name), Does(name)
    bended = bt.BendedModule(model)
    for number in range(24):
        assert outcome(model, bended, number) == outcome(eager, eager, number), number
    assert bended.stats.live == 0, bended.why_live
    assert bended.stats.traces <= 3, bended.stats


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


@border.either("hook", at="register_forward_hook")  # the first call puts one there
class PutInForwardForGood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if not self.fc._forward_hooks:
            self.fc.register_forward_hook(lambda m, a, out: out * 2)
        return y


@pytest.mark.more
def test_hooks_put_elsewhere_count_handles_up_and_change_nothing() -> None:
    """The models of transformers name what uses the class of handles, which counts them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=10,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    bended = bt.BendedModule(model)
    for number in range(4):
        handle = model.layers[0].register_forward_hook(lambda m, args, out: out * 2)
        other = nn.Linear(1, 1).register_forward_hook(lambda *_: None)
        handle.remove()
        ids = torch.full((1, 4), number)
        want = model(ids, use_cache=False).last_hidden_state
        assert torch.equal(bended(ids, use_cache=False).last_hidden_state, want)
        other.remove()
    assert bended.stats.traces == 1
    assert bended.stats.replays == 3
