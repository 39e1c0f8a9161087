"""Hooks on modules of a BendedModule are called as they are in the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.insert import native as station
from tests.hooked import Log, leaf, traces_of_hooks
from tests.promise import bits, state


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def manager() -> Iterator[bt.HookManager]:
    with bt.HookManager() as made:
        yield made
    assert not station._local.calls


class Branching(nn.Module):
    """A loop of as many rounds as the input asks for, over a layer called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("rounds", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        h = self.act(self.first(x))
        rounds = 0
        while h.norm() > 1 and rounds < 4:
            h = h + self.blocks[rounds % 2](h) * 0.1
            h = h / 2
            rounds += 1
        self.rounds += rounds
        h = self.drop(self.norm(h))
        if scale is not None:
            h = h * scale
        return {"out": h, "more": [h.sum(), None]}


def hook_all(manager: bt.HookManager, log: Log, model: Any) -> None:
    log.register(
        manager,
        first=model.first,
        act=model.act,
        block=model.blocks[0],
        other=model.blocks[1],
        norm=model.norm,
        drop=model.drop,
    )


def change(module: Any, inputs: Any, outputs: Any) -> Any:
    return tuple(value * 1.5 for value in outputs)


def replace(module: Any, inputs: Any) -> Any:
    return tuple(value + 0.25 for value in inputs)


def double(module: Any, grad_in: Any, grad_out: Any) -> Any:
    return tuple(gradient * 2 for gradient in grad_in)


def nothing(manager: bt.HookManager, log: Log, model: Any) -> None:
    pass


def changing(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.register_forward_hook(change, block=model.blocks[0])
    manager.register_forward_pre_hook(replace, norm=model.norm)
    manager.register_backward_hook(double, act=model.act)
    hook_all(manager, log, model)


def some_off(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.deactivate_module_hooks(model.first, model.act, model.norm)


def backward_only(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.deactivate_all_hooks()
    manager.activate_all_hooks(category="backward_hook")


def all_off(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.deactivate_all_hooks()


def all_on(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.activate_all_hooks()


def removed(manager: bt.HookManager, log: Log, model: Any) -> None:
    manager.remove_all_hooks()


Step = Callable[[bt.HookManager, Log, Any], None]
PROGRAMS: dict[str, list[Step]] = {
    "before the first call": [hook_all, nothing, nothing, removed, nothing],
    "after some calls": [nothing, nothing, hook_all, nothing, all_off, all_on, nothing, removed],
    "changing values": [changing, nothing, some_off, nothing, backward_only, removed, nothing],
    "on and off": [changing, all_off, nothing, all_on, all_off, all_on, backward_only, removed],
}


@pytest.mark.more
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inserted", [True, False], ids=["inserted", "native"])
def test_in_a_bended_module_hooks_are_called_as_in_the_model(
    program: list[Step], training: bool, inserted: bool
) -> None:
    logs: list[Log] = []
    results: list[list[Any]] = []
    for bend in (False, True):
        torch.manual_seed(0)
        model: Any = Branching().train(training)
        called = bt.BendedModule(model) if bend else model
        before = [dict(vars(module)) for module in model.modules()]
        manager, log, result = bt.HookManager(called if inserted else None), Log(), []
        for number, step in enumerate(program):
            step(manager, log, called)
            if inserted and bend:
                assert traces_of_hooks(model) == []
                active = [one for one in manager.name_to_hookhandle.values() if one.active]
                assert len(called.insertions) == len(active)
            for scale in (0.1, 1.0, 3.0):
                torch.manual_seed(number)
                x = (leaf(3, 4, seed=number) * scale).detach().requires_grad_()
                keywords = {"scale": torch.tensor(2.0)} if number % 2 else {}
                model.zero_grad()
                out = called(x, **keywords)
                with torch.no_grad():
                    again = called(x, **keywords)
                out["out"].pow(2).sum().backward()
                gradients = [p.grad for p in model.parameters()]
                result.append(bits([out, again, x.grad, gradients]))
                result.append(state(model))
        assert [list(vars(module)) for module in model.modules()] == list(map(list, before))
        assert traces_of_hooks(model) == []
        logs.append(log)
        results.append(result)
    eager, bended = (log.events for log in logs)
    assert [event[:2] for event in bended] == [event[:2] for event in eager]
    if inserted:  # a layer that works in place is given a copy: within an event all is the same
        assert list(map(bits, bended)) == list(map(bits, eager))
    else:
        assert bits(bended) == bits(eager)
    assert len(eager) > 30
    assert results[1] == results[0]


class Stateful(nn.Module):
    """A batch norm, a buffer that counts up, a branch, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Counting()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.twice(x, more=x)
        if y.sum() > 0:
            y = self.linear(y)
        y = self.twice(self.norm(y))
        return y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        self.total += x.detach().sum(0)
        return self.linear(x) + (0 if more is None else more)


def looks(log: list[Any], m: Any, i: Any, o: Any) -> None:
    state = [value.clone() for value in m.state_dict().values()]
    log.append((m.name, m.training, state, torch.is_grad_enabled(), o[0].requires_grad))


def computes(log: list[Any], m: Any, i: Any, o: Any) -> None:
    log.append(F.linear(i[0], next(m.parameters()).view(-1, 3)).detach())


def calls_it_again(log: list[Any], m: Any, i: Any, o: Any) -> None:
    log.append(o[0].detach().clone())
    if len(log) % 3 == 0:
        log.append(m(i[0]).detach())


def in_place(log: list[Any], m: Any, i: Any, o: Any) -> None:
    o[0].mul_(2)


def draws(log: list[Any], m: Any, i: Any, o: Any) -> Any:
    return (o[0] + torch.rand(3), *o[1:])


def fails_once(log: list[Any], m: Any, i: Any, o: Any) -> None:
    log.append(len(log))
    if len(log) == 3:
        raise ZeroDivisionError("the third time")


def keeps_gradients(log: list[Any], m: Any, i: Any, o: Any) -> None:
    o[0].retain_grad()
    o[0].register_hook(lambda gradient: log.append(gradient))


@pytest.mark.parametrize("inserted", [True, False], ids=["inserted", "native"])
@pytest.mark.parametrize("where", ["twice", "linear", "norm"])
@pytest.mark.parametrize(
    "hook", [looks, computes, calls_it_again, in_place, draws, fails_once, keeps_gradients]
)
def test_whatever_a_hook_does(hook: Callable[..., Any], where: str, inserted: bool) -> None:
    if inserted and hook is calls_it_again and where != "linear":
        return  # what is inserted in a model is not called in calls of a module by themselves
    results = []
    for bend in (False, True):
        torch.manual_seed(0)
        model = Stateful()
        called = bt.BendedModule(model) if bend else model
        log: list[Any] = []
        result: list[Any] = []
        with bt.HookManager(called if inserted else None) as manager:
            for number in range(7):
                if number == 1:
                    manager.register_forward_hook(
                        lambda m, i, o, log=log: hook(log, m, i, o),
                        **{where: getattr(model, where)},
                    )
                x = leaf(4, 3, seed=number).detach() * (1 if number % 2 else -1)
                torch.manual_seed(number)
                try:
                    out = called(x)
                except ZeroDivisionError as error:
                    result.append(str(error))
                else:
                    out.sum().backward()
                    result.append(bits(out))
                result.append(state(model))
        results.append((result, bits(log)))
    assert results[1] == results[0]


def test_hooks_on_the_bended_module_itself(manager: bt.HookManager, log: Log) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    bended = bt.BendedModule(model)
    log.register(manager, whole=bended)
    for _ in range(3):
        x = leaf(2)
        out = bended(x)
        assert bits(out) == bits(model(x))
        out.sum().backward()
        assert [kind for kind, _ in log.kinds] == ["before", "after", "backward"]
        assert bits(log.take()[2][2][0]) == bits(x.grad)
    assert bended.stats.replays >= 1, "hooks around a model are no hooks in it"


def test_a_bended_module_has_a_manager_of_its_own() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    seen: list[str] = []

    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        seen.append(module.name)

    x = leaf(2)
    plain = bended(x)
    bended.hooks.register_forward_hook(hook, bended[0], last=bended[1])
    assert bended.hooks is bended.hooks
    for _ in range(3):
        assert bits(bended(x)) == bits(plain)
    assert seen == ["0", "last"] * 3
    twin = copy.deepcopy(bended)
    assert twin.hooks is not bended.hooks
    bended.hooks.remove_all_hooks()
    bended(x)
    assert len(seen) == 6


def test_traces_and_logs_of_a_model_with_hooks(manager: bt.HookManager, log: Log) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    log.register(manager, linear=model[0], relu=model[1])
    x = leaf(2)
    trace = bt.trace(model, x)
    assert [kind for kind, _ in log.kinds] == ["before", "after"] * 2
    trace.output.sum().backward()
    assert [event[:2] for event in log.take()[-2:]] == [
        ("backward", "relu"),
        ("backward", "linear"),
    ]
    assert bits(trace.output) == bits(model(x))
    history = bt.log_forward_pass(model, x, layers_to_save="all")
    assert torch.equal(history["0"].tensor_contents, F.linear(x, *model[0].parameters()))


def test_hooks_of_a_manager_are_no_part_of_a_model(
    manager: bt.HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    manager.register_forward_hook(lambda m, i, o: print("called"), linear=bended[0])
    for _ in range(4):
        bended(torch.ones(2))
    assert capsys.readouterr().out.split() == ["called"] * 4


class Twice(nn.Module):
    """A layer that is given one tensor in two places, and asks whether it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Same()

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        out: Tensor = self.part(y, y)
        return out + y


class Same(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b if a is b else a + b


def test_a_tensor_that_is_given_twice_stays_one_for_the_module() -> None:
    seen = []
    for bend in (False, True):
        model = Twice()
        called = bt.BendedModule(model) if bend else model
        log = Log()
        manager = bt.HookManager(called)
        manager.register_backward_hook(log.backward, part=model.part)
        manager.register_backward_hook(double, part=model.part)
        for _ in range(2):
            x = leaf(3)
            out = called(x)
            out.sum().backward()
            seen.append((bits(out), bits(log.gradients()), bits(x.grad)))
    assert seen[:2] == seen[2:]


def test_hooks_of_a_bended_module_come_and_go_with_its_insertions() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    log = Log()
    log.register(bended.hooks, linear=bended[0])
    assert len(bended.insertions) == 3
    bended(leaf(2)).sum().backward()
    assert [kind for kind, _ in log.kinds] == ["before", "after", "backward"]
    assert (bended.insertions[1].report().fired, log.take()[0][1]) == (1, "linear")
    with pytest.raises(InputError, match="a module with active hooks cannot be pickled"):
        pickle.dumps(bended)
    twin = copy.deepcopy(bended)
    twin(leaf(2))
    assert [kind for kind, _ in log.kinds] == ["before", "after"]
    log.take()
    bended.remove_all()
    assert not any(one.active for one in bended.hooks.name_to_hookhandle.values())
    bended(leaf(2))
    twin(leaf(2))  # its hooks are those of the original
    assert log.take() == []
    bended.hooks.activate_all_hooks()
    bended(leaf(2)).sum().backward()
    assert len(log.take()) == 3


def test_hooks_of_one_kind_are_called_in_the_order_of_registration() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Tanh()))
    called: list[str] = []
    for number in range(3):
        bended.hooks.register_forward_pre_hook(
            lambda m, i, number=number: called.append(f"before {number}"), bended[0], activate=False
        )
        bended.hooks.register_forward_hook(
            lambda m, i, o, number=number: called.append(f"after {number}"),
            bended[0],
            activate=False,
        )
    for number in (4, 1, 5, 0, 2, 3):
        list(bended.hooks.name_to_hookfn.values())[number].activate()
    bended(leaf(2))
    assert called == [f"{when} {number}" for when in ("before", "after") for number in range(3)]


def test_a_hook_is_not_activated_within_a_call() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.Tanh(), nn.ReLU()))
    other = bended.hooks.register_forward_hook(print, relu=bended[1], activate=False)
    bended.hooks.register_forward_hook(lambda m, i, o: other.activate(), tanh=bended[0])
    with pytest.raises(
        InputError,
        match="insertions cannot be added while the model is running",
    ):
        bended(leaf(2))
    assert not other.handles[0].active
