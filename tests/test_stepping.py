"""A run that is gone through and changed is the run that eager does with the same changes."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import bendtrace as bt
from bendtrace.debug.stepping import SteppedRun
from bendtrace.errors import InputError, NodePathError
from bendtrace.watch.functions import inner_twin
from tests.promise import bits, random_states, state

# Models


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.norm(torch.relu(layer(x))))
        return x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [1]
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total.add_(x.sum(0).detach())
        self.total = self.total * 2
        return x * self.total + len(self.seen)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(x) if x.sum() > 0 else self.right(x)
        if h.mean() > x.mean():
            h = h - torch.rand_like(h)
        else:
            h = h * 2
        return h.tanh()


class Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while x.norm() > 1 and steps < 6:
            x = x / 2 + torch.randn(4) * 0.01
            steps += 1
        return x * steps


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        view = h[1:]
        view += 1
        h[0] = h[1] * 3
        before = h.clone()
        h.relu_()
        if (h == before).all():
            h.mul_(2)
        return h + before


class GivenBack(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        y = x.exp()
        x.mul_(2)
        return x, y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x[None])
        return self.head(out + c) + self.head(h)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gate = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            if len(rows) > 0:
                out[rows] += weights[rows] * expert(x[rows])
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x[None], x[None], x[None])
        return functional.layer_norm(y + x, (4,)) * weights.sum()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm(self.conv(x[:, None])), inplace=True)
        return functional.max_pool1d(functional.dropout(h, 0.3), 2)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {"old": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["new"] = x.sum(0)
        old = self.cache.pop("old")
        self.cache["new"] += old
        return self.cache["new"] * x


class Handling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x.cos()
        try:
            h = h @ torch.ones(3, 3)
        except RuntimeError:
            h = h @ torch.ones(4, 4)
        return h.sin()


class Sampling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = []
        scores = x.softmax(-1)
        for _ in range(4):
            token = torch.multinomial(scores, 1)
            tokens.append(token)
            scores = (scores + functional.one_hot(token[:, 0], 4) * 0.5).softmax(-1)
            if token.max() == 0:
                break
        return torch.cat(tokens, 1) + scores


class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return h - self.mean


class OwnDice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.dice)
        again = torch.rand(4, generator=self.dice)
        return x * noise + again.sqrt()


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 3).long().clamp(max=7)
        h = self.table(ids).mean(1)
        worst = h.abs().max().item()
        if worst > 1:
            h = h / worst
        return torch.einsum("ij,kj->ik", h, x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.inner(x)
        return {"first": first, "rest": [self.inner(first), first.sum()]}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0] * 2


class Customised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = Squared.apply(x.sin())
        h = h.half().float() if h.max() > 0.5 else h.double().float()
        return h.sort(-1)[0].cumsum(0)


class Split(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a.contiguous().masked_fill(b > 0, 0.0)
        b.zero_()
        rest, where = torch.max(torch.cat([a, b, x], -1), dim=-1, keepdim=True)
        return rest * where + x.T.reshape(x.shape)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def descend(self, x: Tensor, depth: int) -> Tensor:
        h = self.layer(x).relu()
        if depth < 3 and h.sum() > 1:
            h = self.descend(functional.dropout(h, 0.1), depth + 1) + h
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.descend(x, 0)


MODELS: list[type[nn.Module]] = [
    Normed, Counting, Branching, Halving, Written, GivenBack, Recurrent, Routed, Attending,
    Convolved, Caching, Handling, Sampling, Momentum, OwnDice, Looking, Nested, Customised, Split,
    Recursive,
]  # fmt: skip


# What eager does with the same changes

Change = tuple[Any, int, Any, tuple[Any, ...]]  # the function, which call of it, value, element


class Eager(TorchFunctionMode):
    """Replaces the results of some calls, and notes all results and the variables before one."""

    def __init__(self, changes: list[Change], look: tuple[Any, int] | None = None) -> None:
        super().__init__()
        self.changes = {(function, call): rest for function, call, *rest in changes}
        self.look = look
        self.seen: dict[str, Any] | None = None
        self.calls: Counter[Any] = Counter()
        self.results: dict[tuple[Any, int], Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.multi_head_attention_forward:  # the tracer goes into it, too
            with self:
                return inner_twin(func)(*args, **(kwargs or {}))
        key = func, self.calls[func]
        if key == self.look:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename != __file__:
                frame = frame.f_back
            self.seen = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in frame.f_locals.items()
                if isinstance(value, (Tensor, int, float))
            }
        out = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        if isinstance(out, Tensor):
            self.results[key] = out.detach().clone()
        if key not in self.changes:
            return out
        value, element = self.changes[key]
        if not isinstance(value, Tensor):
            return value
        if not element:
            return value.clone()
        items = list(out)
        items[element[0]] = value.clone()
        return tuple(items) if type(out) is tuple else type(out)(items)


def call_of(run: SteppedRun, number: int) -> tuple[Any, int]:
    """Return the function of an event, and which call of it that is."""
    event, tape = run._events[number], run.trace._recording.tape
    index = event.index if event.kind == "op" else tape.guards[event.index].index
    target = tape.ops[index].target
    return target, sum(op.target is target for op in tape.ops[:index] if not op.raised)


def tensor_like(meta: Any, generator: torch.Generator) -> Tensor | None:
    if not hasattr(meta, "shape") or not meta.dtype.is_floating_point:
        return None
    return torch.randn(meta.shape, generator=generator).to(meta.dtype)


def change(
    run: SteppedRun, dice: random.Random, known: Container[tuple[Any, int]]
) -> tuple[int, Change] | None:
    """Change something at random that eager can change; return the event and how."""
    tape = run.trace._recording.tape
    number = dice.randrange(len(run._events))
    event = run._events[number]
    target, call = call_of(run, number)
    if event.kind == "question":
        answer = tape.guards[event.index].answer
        if target is not Tensor.__bool__:
            return None  # eager shows no function mode what Python asks of numbers
        run.answer(number, not answer)
        return number, (target, call, not answer, ())
    meta: Any = tape.ops[event.index].meta
    if getattr(target, "__name__", "") == "given" or (target, call) not in known:
        return None
    value = tensor_like(meta, torch.Generator().manual_seed(dice.randrange(1000)))
    if value is None:
        return None
    run.set(number, value)
    return number, (target, call, value, ())


def content(value: Any) -> Any:
    """Return the numbers in a value, which copies can have at other strides."""
    return bits(value.detach().contiguous() if isinstance(value, Tensor) else value)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the bits of an output, or the error that was raised."""
    try:
        return bits(call())
    except (RuntimeError, IndexError) as error:  # a value that some op does not take
        return type(error), str(error)


def rehearse(kind: type[nn.Module], seed: int) -> int:
    """Go through a run at random, and compare; return how often it was changed."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model, x = kind(), torch.randn(3, 4)
    with torch.set_grad_enabled(dice.random() < 0.3):
        torch.manual_seed(seed + 1)
        start = bits(x), state(model), random_states()
        run = bt.BendedModule(model).step(x, budget=dice.choice([0, 200, 2**20, 2**30]))
        done: dict[int, Change] = {}

        def fresh(look: tuple[Any, int] | None = None) -> tuple[Any, Any, Any, Any, Eager]:
            twin, given = copy.deepcopy((model, x))
            before = torch.get_rng_state()
            own = [each for each in vars(twin).values() if isinstance(each, torch.Generator)]
            for twins, generator in zip(own, (
                each for each in vars(model).values() if isinstance(each, torch.Generator)
            ), strict=True):  # fmt: skip
                twins.set_state(generator.get_state())
            mode = Eager(list(done.values()), look)
            with mode:
                output = outcome(lambda: twin(given))
            after = random_states()
            torch.set_rng_state(before)
            return output, state(copy.deepcopy(twin)), bits(given), after, mode

        for _ in range(dice.randint(3, 7)):
            match dice.choice(["goto", "forward", "back", "change", "look", "value"]):
                case "goto":
                    run.goto(dice.randrange(len(run) + 1))
                case "forward":
                    run.forward(dice.randint(1, 5))
                case "back":
                    run.back(dice.randint(1, 5))
                case "change":
                    if len(run) and (made := change(run, dice, fresh()[-1].results)) is not None:
                        done = {n: each for n, each in done.items() if n < made[0]}
                        done[made[0]] = made[1]
                case "look" if run.position < len(run):
                    number = run.position
                    seen = run.variables
                    wanted = fresh(call_of(run, number))[-1].seen
                    for name, value in (wanted or {}).items():
                        assert content(seen[name]) == content(value), name
                case "value" if len(run):
                    number = dice.randrange(len(run))
                    if run._events[number].kind == "op":
                        value, key = run.value(number), call_of(run, number)
                        wanted = fresh()[-1].results.get(key)
                        if number in done:
                            wanted = done[number][2]
                        if wanted is not None:
                            assert content(value) == content(wanted)
            assert (bits(x), state(model), random_states()) == start
        output, after, given, numbers, _ = fresh()
        assert outcome(lambda: run.output) == output
        assert (bits(x), state(model), random_states()) == start
        assert outcome(run.finish) == output
        ends = bits(x), state(copy.deepcopy(model)), random_states()
        assert ends == (given, after, numbers)
    return len(done)


@pytest.mark.parametrize("kind", MODELS)
def test_runs_gone_through_at_random_are_fresh_runs_with_the_same_changes(
    kind: type[nn.Module],
) -> None:
    assert sum(rehearse(kind, seed) for seed in range(10)) > 0


# The parts


def asked(x: Tensor) -> Tensor:
    h = x * 2
    if x.shape[0] > 2:
        h = h + 1
    size = h.abs().max().item()
    if size > 3:
        h = h - 10
    for _ in range(int(h.sum().item()) % 3):
        h = h * 2
    return h.relu()


def asked_otherwise(x: Tensor, short: bool, large: bool, times: int) -> Tensor:
    h = x * 2
    if not short:
        h = h + 1
    if large:
        h = h - 10
    for _ in range(times):
        h = h * 2
    return h.relu()


def test_answers_to_questions_about_sizes_and_numbers_can_be_changed() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    run = bt.BendedModule(asked).step(x)
    steps = run.trace.flow_steps
    assert bits(run.output) == bits(asked(x))
    run.answer(next(step for step in steps if step.text == "size > 3"), False)
    count = next(step for step in run.trace.flow_steps if step.kind == "int")
    assert run.value(count) == 15.0
    assert [step.value for step in run.trace.flow_steps] == [3, True, False, 15.0]
    run.answer(count, 8.0)
    assert bits(run.output) == bits(asked_otherwise(x, False, False, 2))
    run.answer(next(step for step in steps if step.text == "x.shape[0] > 2"), False)
    assert bits(run.output) == bits(asked_otherwise(x, True, True, -24 % 3))
    with pytest.raises(InputError, match="has to be a bool, not 1"):
        run.answer(run.trace.flow_steps[1], 1)


def test_a_module_begins_after_the_question_before_it() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum() > -99 else x  # type: ignore[no-any-return]

    run = bt.BendedModule(Asks()).step(torch.ones(2))
    assert run.goto("linear").position == run.goto("linear.linear").position


def test_places_are_named_as_everywhere() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(3, 4)
    with torch.no_grad():
        run = bt.BendedModule(model).step(x)
        first = run.goto("inner.sub_0").position
        again = run.forward("inner").position
        assert again == run.goto("inner:2").position > first == run.goto("inner").position
        assert run.forward(99).back("inner").position == again
        assert run.goto("gelu_1").position == run.goto(run.trace["gelu_1_2:1"]).position
        assert run.goto("inner_1.sub_1.gelu").position > run.goto("inner.sub_1.gelu").position
        line = Nested.forward.__code__.co_firstlineno + 2
        assert run.goto(line=line).frames[-1].line == line
        assert run.goto(f"test_stepping.py:{line}").position == run.position > 0
        given = torch.ones(3, 4)
        output = bits(run.set("inner:1", given).output)
    handle = model.inner.register_forward_hook(
        lambda module, args, out, calls=[]: (calls.append(1), given if len(calls) == 1 else out)[1]
    )
    with torch.no_grad():
        torch.manual_seed(0)
        Nested(), torch.randn(3, 4)
        assert output == bits(model(x))
    handle.remove()


def test_places_that_are_not_there_are_refused() -> None:
    run = bt.BendedModule(asked).step(torch.ones(3))
    for place, error, text in (
        (99, InputError, "positions from 0 to"),
        ("sup", NodePathError, "did you mean"),
        ("test_stepping.py:1", InputError, "no event of the run is at"),
        (None, InputError, "a place, or line="),
        ("x", InputError, "not an op of the run"),
    ):
        with pytest.raises(error, match=text):
            run.goto(place)
    with pytest.raises(InputError, match="plain tensor, not 3"):
        run.set("mul", 3)
    with pytest.raises(InputError, match="is an op, not a question"):
        run.answer(0, True)
    with pytest.raises(InputError, match=r"0\.5 is not a place in a run"):
        run.forward(0.5)
    with pytest.raises(InputError, match="does not come in that part of the run"):
        run.back("mul")
    with pytest.raises(InputError, match="budget= has to be an int of at least 0"):
        bt.BendedModule(asked).step(torch.ones(3), budget=-1)
    assert run.position == 0


def test_what_happens_several_times_has_to_be_named_to_be_set() -> None:
    run = bt.BendedModule(Nested().eval()).step(torch.ones(3, 4))
    with pytest.raises(InputError, match="several times in the run, at the positions"):
        run.set("inner", torch.ones(3, 4))


def loud(x: Tensor) -> Tensor:
    print("sum", x.sum())
    return x * 2


def test_looking_around_prints_nothing_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = bt.BendedModule(loud).step(torch.ones(2))
    run.goto(-1).variables, run.goto(0).variables, run.finish()
    assert capsys.readouterr().out == "sum tensor(2.)\n"


def test_values_within_the_budget_are_not_computed_again() -> None:
    x = torch.randn(64, 64)

    def model(x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x @ x).tanh()
        return x

    def products(act: Callable[[], Any]) -> int:
        with torch.profiler.profile() as profile:
            act()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

    size = 64 * 64 * 4
    run = bt.BendedModule(model).step(x)
    assert products(lambda: run.goto(14).variables) == 0
    assert products(lambda: run.set(12, x).output) == 1
    assert run.nbytes == 16 * size
    run = bt.BendedModule(model).step(x, budget=5 * size)
    assert run.nbytes == 5 * size
    assert 0 < products(lambda: run.goto(14).variables) <= 7
    run = bt.BendedModule(model).step(x, budget=0)
    assert products(lambda: run.goto(14).variables) == 7


def test_a_run_that_raises_can_be_gone_through_and_mended() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.sum(0)
        return h @ torch.ones(3)

    run = bt.BendedModule(model).step(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="size"):
        _ = run.output
    assert run.goto("sum").variables["x"].shape == (2, 4)
    assert float(run.set("sum", torch.ones(3)).output) == 3.0


def test_runs_that_cannot_be_undone_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))

    def renamed(x: Tensor) -> Tensor:
        weight.requires_grad_(False)
        return x * weight

    def outside(x: Tensor) -> Tensor:
        return x * len(os.urandom(2))

    for model in renamed, outside:
        with pytest.raises(InputError, match="cannot be stepped through"):
            bt.BendedModule(model).step(torch.ones(2))
    assert weight.requires_grad
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    with bended.interject("relu", torch.exp), pytest.raises(InputError, match="nothing inserted"):
        bended.step(torch.ones(2))


def test_writes_to_parameters_are_undone_until_the_run_is_finished() -> None:
    layer = nn.Linear(2, 2)

    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.weight.mul_(2)
            layer.bias.data.add_(1)
        return layer(x)

    before, twin = state(layer), copy.deepcopy(layer)
    run = bt.BendedModule(model).step(torch.ones(2))
    assert run.goto(3).variables
    assert state(layer) == before
    run.finish()
    twin.weight.data.mul_(2), twin.bias.data.add_(1)
    assert bits(layer.weight.data) == bits(twin.weight.data)
    assert bits(layer.bias.data) == bits(twin.bias.data)
    with pytest.raises(InputError, match="finished"):
        _ = run.goto(1).variables


class CountsInAScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class HoldsAScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = CountsInAScript()
        self.inner = torch.jit.trace(inner, torch.ones(2), check_trace=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Resizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        is_long = self.held.numel() > 2
        torch.mul(x, 2, out=self.held)
        return self.held * (2 if is_long else 3)


class KeepsTheBits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("held", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        asks = self.held.requires_grad
        self.held.mul_(self.scale)  # writes what is there, and a graph
        return x * self.held * (3 if asks else 2)


@pytest.mark.parametrize("make", [HoldsAScript, Resizes, KeepsTheBits])
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:An output with one or more elements")
def test_scripts_and_shapes_are_put_back_until_the_run_is_finished(
    make: Callable[[], nn.Module],
) -> None:
    twin, model = make(), make()
    before = state(model)
    run = bt.BendedModule(model).step(torch.ones(2))
    for position in (1, 0, 2):
        _ = run.goto(position).variables
        assert state(model) == before
    assert bits(run.finish()) == bits(twin(torch.ones(2)))
    assert state(model) == state(twin)


def test_what_a_script_assigns_is_refused() -> None:
    model = nn.Sequential(torch.jit.script(AssignsInAScript()))
    with pytest.raises(InputError, match="may change what a script holds"):
        bt.BendedModule(model).step(torch.ones(2))


class AssignsInAScript(CountsInAScript):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


def test_a_model_that_has_changed_since_is_noticed() -> None:
    model = Momentum()
    run = bt.BendedModule(model).step(torch.ones(3, 4))
    with torch.no_grad():
        model.linear.weight.mul_(2)
    with pytest.raises(InputError, match="has changed since the run was begun"):
        _ = run.goto(1).variables


def test_gradients_of_stepped_runs_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(3, 4)
    for given in torch.randn(3, 4, requires_grad=True), torch.randn(3, 4):
        torch.manual_seed(1)
        run = bt.BendedModule(model).step(x)
        for place, call in ((4, 2), (4, 2), (0, 0)):
            found = []
            changed = run.set(place, given @ torch.ones(4, 8)).output
            torch.manual_seed(1)
            value = given @ torch.ones(4, 8)
            with Eager([(functional.linear, call, value, ())]):
                eager = model(x)
            for output in changed, eager:
                model.zero_grad()
                given.grad = None
                (output["first"].sum() + output["rest"][0].exp().sum()).backward()
                grads = [each.grad for each in model.parameters()]
                found.append(bits([grads, given.grad]))
                assert any(each is not None for each in grads)
            assert found[0] == found[1]


def test_a_run_prints_where_it_is() -> None:
    run = bt.BendedModule(asked).step(torch.ones(3)).goto("add")
    assert repr(run).startswith("<SteppedRun of asked: at 2 of ")
    assert "x.shape[0] > 2? True" in str(run)
    assert str(run.set(0, torch.zeros(3))).count("(changed)") == 1


class _Written(nn.Module):
    """Modules that return, and receive, what was written to after an op returned it."""

    class Indexed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y[0] = 5.0
            return y

    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            first = y[0]
            y.add_(1)
            return first

    def __init__(self) -> None:
        super().__init__()
        self.indexed, self.viewed, self.layer = self.Indexed(), self.Viewed(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.indexed(x)
        first = self.viewed(y)
        y.view(-1).mul_(2)
        left, _ = (y + 1).chunk(2)
        left[0] = 3.0
        return self.layer(y) + first + self.layer(left)


@pytest.mark.parametrize(
    "name",
    ["viewed", "viewed.output", "indexed.output", "viewed.input", "layer.input", "layer_1.input"],
)
def test_the_value_of_a_module_is_not_that_of_an_op_before_a_write(name: str) -> None:
    with torch.no_grad():
        run = bt.BendedModule(_Written()).step(torch.ones(2, 3))
    with pytest.raises(InputError, match=f"'{name}' was written to in place by"):
        run.value(name)
    run.goto(name)  # when it was computed is clear


def test_the_value_of_a_module_is_its_own_if_a_write_came_later() -> None:
    model, x = _Written(), torch.ones(2, 3)
    with torch.no_grad():
        run = bt.BendedModule(nn.Sequential(model, nn.ReLU(inplace=True))).step(x)
        assert torch.equal(run.value("0.output"), model(x))
        assert torch.equal(run.value("1.input"), model(x))
        assert torch.equal(run.value("output"), model(x).relu())
