"""Gates that are spliced into paths known without them: as native hooks, from the first call on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InterjectionError, NeverFiredWarning
from bendtrace.insert import gates
from bendtrace.insert.gates import Attempt, KindTest, tensor_kind
from bendtrace.insert.splicer import has_gates
from bendtrace.record import scopes
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import Tape
from tests.promise import bits, seed_everything
from tests.shares import some

Change = Callable[[Tensor], Any]
Modules = dict[str, Change]


class Gated(nn.Module):
    """Layers that ask for a sign, which a change may turn."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for gate in self.gates:
            h = gate(x)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) - first
        return x


INPUTS = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


def double(value: Tensor) -> Tensor:
    return value * 2


def turned(value: Tensor) -> Tensor:
    return -value


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def outcome(call: Any, model: nn.Module, x: Tensor) -> Any:
    """Call a model, and return all that it did, as bits."""
    seed_everything(5)
    x, output = x.clone(), None
    try:
        output = call(x)
    except InterjectionError:
        raise
    except Exception as error:
        output = f"{type(error).__name__}: {error}"
    return bits([output, x, dict(model.named_buffers()), torch.get_rng_state()])


def compared(
    kind: type[nn.Module],
    *changes: Modules | Callable[[], Modules],
    inputs: list[Tensor] = INPUTS,
    before: list[Tensor] | None = None,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> bt.BendedModule:
    """Compare calls with native hooks: after plain calls, two with each set of changes.

    Args:
        kind: the class of the model.
        changes: changes of outputs by the names of modules; made for each side, if they are called.
        inputs: of plain calls, and of those with changes.
        before: of the plain calls before, if they are others.
        mode: what the calls are made under.

    Returns:
        What has made the calls with changes.
    """
    eager, model = make(kind), make(kind)
    bended = bt.BendedModule(model)
    with mode():
        for x in inputs if before is None else before:
            assert outcome(bended, model, x) == outcome(eager, eager, x)
        for number, change in enumerate(changes):
            sides = [change() if callable(change) else change for _ in range(2)]
            hooks = [
                eager.get_submodule(name).register_forward_hook(
                    lambda module, args, output, apply=apply: apply(output)
                )
                for name, apply in sides[0].items()
            ]
            there = [
                bended.interject(model.get_submodule(name), apply)
                for name, apply in sides[1].items()
            ]
            for x in (*inputs, *inputs):
                assert outcome(bended, model, x) == outcome(eager, eager, x), number
            for handle in (*hooks, *there):
                handle.remove()
            for x in inputs[:3]:
                assert outcome(bended, model, x) == outcome(eager, eager, x)
    return bended


def served(bended: bt.BendedModule) -> int:
    """Return how many calls went along known paths with gates spliced into them, to their end."""
    return sum(splicer.calls for splicer in bended._trees._splicers.values())


def are_apart(bended: bt.BendedModule) -> list[bool]:
    """Return, for each set of places, whether runs with what is inserted are recorded."""
    return [splicer.is_apart for splicer in bended._trees._splicers.values()]


MODES = [nullcontext, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
def test_changes_at_modules_are_those_of_native_hooks(mode: Any) -> None:
    bended = compared(
        Gated,
        {"gates.1": double},
        {"gates.0": turned, "gates.2": double},
        {"gates.3": lambda value: value * 0 + 1},
        {"gates.1": lambda value: None},
        {"gates.2": lambda value: value.clone().mul_(-1)},
        mode=mode,
    )
    assert not any(are_apart(bended))
    assert not bended._trees.inserted_runs()
    assert bended.stats.live == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changes_in_place_are_those_of_native_hooks(mode: Any) -> None:
    bended = compared(Gated, {"gates.1": lambda v: v.mul_(2), "gates.2": Tensor.neg_}, mode=mode)
    assert not any(are_apart(bended))
    assert served(bended) > 10


def test_the_first_call_with_something_inserted_is_a_replay() -> None:
    bended = bt.BendedModule(make(Gated))
    with torch.no_grad():
        bended(INPUTS[0])
        for gate in bended.model.gates:
            with bended.interject(gate, lambda value: value + 0):
                bended(INPUTS[0])
    assert bended.stats == bt.Stats(traces=1, replays=4)


def test_a_side_that_a_change_takes_is_recorded_once_for_all_places() -> None:
    bended = bt.BendedModule(make(Gated))
    with torch.no_grad():
        for x in INPUTS:
            bended(x)
        before = bended.stats.traces
        for _ in range(2):
            for gate in bended.model.gates:
                with bended.interject(gate, turned):
                    for x in INPUTS:
                        bended(x)
    assert bended.stats.traces <= 1 + 4  # the first run, and the other answer of each state
    assert served(bended) + (bended.stats.traces - before) == 2 * 4 * len(INPUTS)


class Ops(nn.Module):
    """Ops of all kinds, a loop, and a branch."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x + 1)
        for _ in range(4):
            if y.sum() > 60:
                break
            y = torch.sigmoid(y) + y * 1.5
        part = y.view(-1)[:4]
        w = torch.tanh(y) * part
        if w.sum() > 1:
            w = torch.cos(w)
        first, second = w.transpose(0, 1).reshape(-1).chunk(2)
        return torch.cat([first, second]) + w.view(-1).clone().add_(1)


PLACES = [
    ".add", ".relu", ".sigmoid", ".mul", ".add_1", ".view", ".getitem", ".tanh", ".mul_1", ".cos",
    ".transpose", ".reshape", ".cat", ".clone", ".view_1", ".sum", ".sum_1", ".relu:1",
    ".sigmoid:2", ".sigmoid:1", ".add_1:2", ".sum:1",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::bendtrace.errors.NameOrderWarning")
@pytest.mark.parametrize("place", some(PLACES, 3))
def test_changes_at_ops_are_those_of_runs_that_are_recorded_with_them(place: str) -> None:
    for change in (turned, lambda value: value + 0.25):
        spliced, x = bt.BendedModule(make(Ops)), INPUTS[0]
        for y in INPUTS[:4]:
            spliced(y)
        with spliced.interject(place, change):
            for y in INPUTS[:2]:
                recorded = bt.BendedModule(make(Ops))
                for here in (spliced, recorded):
                    if here is recorded:
                        here.interject(place, change)
                wanted = bits(recorded(y))
                assert bits(spliced(y)) == wanted
                assert bits(spliced(y)) == wanted
        assert bits(spliced(x)) == bits(make(Ops)(x))


@pytest.mark.parametrize("number", [1, 2, 3, None])
def test_a_change_at_one_pass_of_a_loop_only(number: int | None) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            passes = 0
            while x.norm() < 90 and passes < 6:
                x = self.layer(x) * 2 + x
                passes += 1
            return x

    eager, model = make(Loop), make(Loop)
    bended, passes = bt.BendedModule(model), 0

    def changed(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal passes
        passes += 1
        return output * 3 if number in (passes, None) else None

    eager.layer.register_forward_hook(changed)
    with torch.no_grad():
        for x in INPUTS:
            bended(x)
        before = bended.stats.traces
        place = "layer" if number is None else f"layer:{number}"
        with bended.interject(place, lambda value: value * 3):
            for x in (*INPUTS, *INPUTS):
                passes = 0
                assert bits(bended(x)) == bits(eager(x))
    assert bended.stats.traces <= before + 3
    assert served(bended) >= 2 * len(INPUTS) - 3


@pytest.mark.parametrize(
    "change",
    [
        double,
        lambda value: value * torch.sigmoid(value),
        lambda value: value.detach() * 2 + value,
        lambda value: value.register_hook(lambda gradient: gradient * 2) and None,
        lambda value: value.mul(2).requires_grad_(),
    ],
    ids=["double", "itself", "detached", "hook", "requires grad"],
)
def test_training_steps_are_equal(change: Change) -> None:
    found = []
    for is_eager in (True, False):
        model = make(Gated)
        call: Any = model if is_eager else bt.BendedModule(model)
        for x in () if is_eager else INPUTS:
            call(x)
        if is_eager:
            model.gates[1].register_forward_hook(lambda module, args, output: change(output))
        else:
            call.interject(model.gates[1], change)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        steps = []
        for x in (*INPUTS, *INPUTS):
            optimizer.zero_grad()
            loss = call(x).square().sum()
            loss.backward()
            optimizer.step()
            gradients = [parameter.grad for parameter in model.parameters()]
            steps.append(bits([loss, gradients, list(model.parameters())]))
        found.append(steps)
        if not is_eager:
            assert served(call) > 10
            assert not any(are_apart(call))
    assert found[0] == found[1]


def test_what_is_shown_is_what_serves_the_calls() -> None:
    bended, x = bt.BendedModule(make(Gated)), INPUTS[0]
    with torch.no_grad():
        bended(x)
        plain = bended.traces
        with bended.interject("gates_1", lambda value: value.t().contiguous().t()):
            bended(x)
            assert are_apart(bended) == [True]
            assert bended.explain(x).serving[0].names != plain[0].names
        with bended.interject("gates_1.linear", double):
            assert bended.explain(x).serving
            bended(x)
            assert [trace.names for trace in bended.traces] == [trace.names for trace in plain]


# What is written to, or drawn, before and after


class Writes(Gated):
    """Writes to a buffer and to its argument, and draws, behind the second layer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        given = x
        for number, gate in enumerate(self.gates):
            h = gate(x) + 0.1 * torch.sin(self.count)
            if number == 1:
                self.count.add_(1)
                given.mul_(0.5)
            x = torch.relu(h) + x if h.mean() > 0 else torch.tanh(h) + torch.rand(4)
        return x


def test_what_is_written_after_a_gate_is_written_once() -> None:
    change: Modules = {"gates.0": turned, "gates.1": lambda value: -value + 0.5}
    bended = compared(Writes, change, mode=torch.no_grad)
    assert bended.stats.live <= 1
    assert bended.stats.resumes > 1


def test_a_change_behind_what_must_not_be_done_twice_is_spliced_as_well() -> None:
    bended = compared(Writes, {"gates.3": double}, mode=torch.no_grad)
    assert are_apart(bended) == [False]


class Noisy(nn.Module):
    """Draws, and changes buffers, before each of its last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.drop(self.first(x.float())))
        x = torch.relu(x) if x.sum() > 0 else self.drop(x)
        return self.third(self.norm(x.float())) + torch.rand(4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_change_behind_what_was_drawn_may_be_of_another_kind(mode: Any) -> None:
    def made(first: int) -> Modules:
        calls = [first]

        def varying(value: Tensor) -> Tensor:
            calls[0] += 1
            return (value * 2).double().float() if calls[0] % 3 else (value * -2).t().clone().t()

        return {"first": double, "second": varying, "norm": turned}

    for first in range(3):
        compared(Noisy, lambda first=first: made(first), mode=mode)


def test_a_change_behind_what_only_some_paths_write_may_be_of_another_kind() -> None:
    class Model(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                self.count.add_(1)
            x = torch.tanh(x)
            if x.mean() > 10:
                x = x * 2
            return self.layer(x).float()

    for changes, is_apart in (({"layer": other_dtype}, True), ({"layer": double}, False)):
        bended = compared(Model, changes, mode=torch.no_grad)
        assert are_apart(bended) == [is_apart]


class InPlace(Gated):
    """Works in place on what its layers give."""

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            h = gate(x.float())
            h.mul_(1.5)
            x = torch.relu_(h) + x if h.mean() > 0 else h.add_(1)
        return x


@pytest.mark.parametrize("kind", [Gated, InPlace])
def test_changes_that_are_of_another_kind_in_some_calls(kind: type[nn.Module]) -> None:
    class Tolerant(kind):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    def kinds(first: int) -> Callable[[], Modules]:
        def made() -> Modules:
            calls: list[int] = [first]

            def varying(value: Tensor) -> Tensor:
                calls[0] += 1
                made = value * -1
                if calls[0] % 4 == 0:
                    return made.t().contiguous().t()
                return made.clone().requires_grad_() if calls[0] % 4 == 1 else made

            return {"gates.0": varying, "gates.1": double, "gates.2": varying}

        return made

    bended = compared(Tolerant, *(kinds(first) for first in range(4)), mode=torch.no_grad)
    assert all(are_apart(bended))


def other_dtype(value: Tensor) -> Tensor:
    return value.double()


def data_exchanged(value: Tensor) -> None:
    value.data = value.data.double()


def turned_around(value: Tensor) -> None:
    value.data = value.data.t()


def moved(value: Tensor) -> Tensor:
    made = torch.empty(value.numel() + 4)
    return made[4:].view(value.shape).copy_(value)


def with_attribute(value: Tensor) -> None:
    value.scale = 3  # type: ignore[attr-defined]


class Asks(nn.Module):
    """Asks for all that can be said about a value besides the numbers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(x)
        h = h * (h.storage_offset() + 2) * getattr(h, "scale", 1)
        h = h * 3 if h.requires_grad else h
        h = h * 5 if h.dtype == torch.float64 else h
        h = h * 7 if h.is_contiguous() else h
        return self.tanh(h.float() if h.shape[0] == 2 else h.t())


@pytest.mark.parametrize(
    "change",
    [
        other_dtype, data_exchanged, turned_around, moved, with_attribute,
        lambda value: value.requires_grad_(),
        lambda value: value[:1].expand(2, 4),
        lambda value: value.t().contiguous().t(),
        lambda value: nn.Parameter(value),
        lambda value: torch.cat([value, value]),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_recorded(change: Change) -> None:
    bended = compared(Asks, {"relu": change}, {"relu": change, "tanh": double})
    assert all(are_apart(bended))


def test_what_is_inserted_is_not_called_again_when_a_call_begins_again() -> None:
    called: list[str] = []

    def noted(name: str, change: Change) -> Change:
        def apply(value: Tensor) -> Any:
            called.append(name)
            return change(value)

        return apply

    bended = bt.BendedModule(make(Asks))
    with torch.no_grad():
        bended(INPUTS[0])
        bended.interject("relu", noted("relu", double))
        bended.interject("tanh", noted("tanh", other_dtype))
        output = bended(INPUTS[0])
    assert called == ["relu", "tanh"]
    assert are_apart(bended) == [True]
    assert output.dtype == torch.float64


def test_what_was_changed_meanwhile_is_not_changed_again() -> None:
    """What an insertion keeps itself, the model has changed in place: Python goes on from there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).add_(1))

    model, kept = make(Model), []

    def keeping(value: Tensor) -> Tensor:
        kept.append(value * 2)
        return kept[-1]

    bended = bt.BendedModule(model)
    with torch.no_grad():
        bended(INPUTS[0])
        bended.interject(model.a, keeping)
        bended.interject(model.b, other_dtype)
        wanted = nn.functional.linear(
            model.a(INPUTS[0]) * 2 + 1, model.b.weight, model.b.bias
        ).double()
        for calls in range(1, 4):  # from the second on, they are recorded
            assert bits(bended(INPUTS[0])) == bits(wanted)
            assert len(kept) == calls


# Values that somebody else has


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return self.kept


class KeepsView(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x)
        self.kept = output.view(-1)
        return output


class KeepsInList(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear(x)]
        return self.kept[0]


class GivesBack(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


class GivesView(GivesBack):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x[:]


class WorksInPlace(GivesBack):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x.add_(1)


class Contiguous(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = output = self.linear(x)
        return output.contiguous().float()


class Weak(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x)
        self.kept = weakref.ref(output)
        return output


HOLDERS = [Keeps, KeepsView, KeepsInList, GivesBack, GivesView, WorksInPlace, Contiguous]


def around(holder: type[nn.Module]) -> type[nn.Module]:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.holder, self.last = nn.Linear(4, 4), holder(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.holder(h)
            kept = self.holder.kept
            del self.holder.kept
            kept = kept[0] if isinstance(kept, list) else kept
            y = self.last(y + 1) + kept.view(2, 4) * 3
            return y * 2 if y.sum() > 0 else y - h

    return Around


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_that_somebody_else_has(holder: type[nn.Module], mode: Any) -> None:
    bended = compared(
        around(holder),
        {"holder": double},
        {"holder": lambda value: value.mul_(2) if mode is torch.no_grad else value},
        {"holder": turned, "last": double},
        {"first": turned},
        mode=mode,
    )
    is_refused = are_apart(bended)
    if holder not in (KeepsView, GivesView):  # where only the caller has the object itself
        assert is_refused[:2] == [True, True]
    if holder not in (GivesBack, GivesView, WorksInPlace):  # there, the caller has it as well
        assert not is_refused[-1]


class AsksItself(nn.Module):
    """Asks for the truth of its value, and of its sign, before it gives the value."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sum() * 2
        self.factor = 2 if y else 3
        return y


@pytest.mark.parametrize("change", [turned, lambda value: value * 0, lambda value: value.zero_()])
def test_a_value_that_was_asked_for_before_it_was_given(change: Change) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asks = AsksItself()

        def forward(self, x: Tensor) -> Tensor:
            y = self.asks(x)
            x = x * self.asks.factor
            return x + 1 if y else x - 1

    bended = compared(Around, {"asks": change}, mode=torch.no_grad)
    assert are_apart(bended) == [True]


@pytest.mark.parametrize("change", [double, Tensor.neg_, lambda value: (value * 2)[:]])
@pytest.mark.parametrize("place", ["longer", "keys"])
def test_a_cache_that_grows(place: str, change: Change) -> None:
    class Longer(nn.Module):
        def forward(self, cache: Tensor, new: Tensor) -> Tensor:
            return torch.cat([cache, new], 0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.longer = nn.Linear(4, 4), Longer()

        def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
            keys = self.keys(x)
            cache["keys"] = self.longer(cache["keys"], keys) if cache else keys
            return cache["keys"].sum(0) + x

    def generated(call: Any) -> Any:
        x, cache, outputs = INPUTS[0], dict[str, Tensor](), []
        for _ in range(5):
            x = call(x, cache)
            outputs.append(x)
        return bits([outputs, cache])

    eager, model = make(Model), make(Model)
    bended = bt.BendedModule(model)
    with torch.no_grad():
        for _ in range(2):
            assert generated(bended) == generated(eager)
        eager.get_submodule(place).register_forward_hook(lambda m, args, output: change(output))
        with bended.interject(place, change):
            for _ in range(2):
                assert generated(bended) == generated(eager)


def test_a_value_with_a_weak_reference_is_refused() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Weak()

        def forward(self, x: Tensor) -> Tensor:
            y = self.holder(x)
            del self.holder.kept
            return y * 3

    bended = compared(Around, {"holder": double})
    assert are_apart(bended) == [True]


def test_modules_inside_of_one_op_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.relu = nn.Linear(4, 4), nn.ReLU()
            self.as_one_op = bt.opaque(self.inside)

        def inside(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.as_one_op(self.relu(x)) * 2

    bended = bt.BendedModule(make(Model))
    bended(INPUTS[0])
    with (
        bended.interject(bended.model.inner, double),
        pytest.raises(InterjectionError, match="recorded as one op"),
    ):
        bended(INPUTS[0])
    wanted = bended.model(INPUTS[0])
    with bended.interject("relu", double):  # is recorded, since any place may be inside of it
        assert not torch.equal(bended(INPUTS[0]), wanted)
    assert are_apart(bended) == [True, True]


def test_a_fused_layer_is_taken_apart_for_what_is_inserted_in_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[None])

    changes: list[Modules] = [{"layer.linear1": double}, {"layer.norm1": double}]
    bended = compared(Model, *changes, mode=torch.no_grad)
    assert are_apart(bended) == [True, True]


# What a change gives that the model has already


class Compares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("own", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x), self.b(x)
        if first is second:
            return first * 100
        return first * 10 if first is x or first is self.own else first + second


def twice_the_same() -> Modules:
    kept: list[Tensor] = []

    def keeping(value: Tensor) -> Tensor:
        kept.append(value * 2)
        return kept[-1]

    return {"a": keeping, "b": lambda value: kept[-1]}


def test_one_tensor_at_two_places_is_recorded() -> None:
    assert are_apart(compared(Compares, twice_the_same, mode=torch.no_grad)) == [True]


@pytest.mark.parametrize("is_argument", [False, True])
def test_a_tensor_of_the_model_at_a_place_is_recorded(is_argument: bool) -> None:
    eager, model = make(Compares), make(Compares)
    bended, x = bt.BendedModule(model), INPUTS[0]
    with torch.no_grad():
        bended(x)
        eager.a.register_forward_hook(lambda *given: x if is_argument else eager.own)
        bended.interject(model.a, lambda value: x if is_argument else model.own)
        for _ in range(2):
            assert bits(bended(x)) == bits(eager(x))
    assert are_apart(bended) == [True]


def test_the_patch_of_a_tensor_that_only_the_user_has_is_spliced() -> None:
    saved = torch.full((2, 4), 0.5)
    bended = compared(Gated, {"gates.1": lambda value: saved}, mode=torch.no_grad)
    assert not any(are_apart(bended))
    assert bits(saved) == bits(torch.full((2, 4), 0.5))


# Changes that do more


def test_a_change_that_raises() -> None:
    def raising(value: Tensor) -> Tensor:
        if value.sum() > 0:
            raise ValueError("too much")
        return value * 2

    bended = compared(Gated, {"gates.1": raising, "gates.2": double})
    assert not any(are_apart(bended))


def test_a_change_that_calls_the_model() -> None:
    def nested(call: Any) -> Change:
        depth = 0

        def apply(value: Tensor) -> Tensor:
            nonlocal depth
            if depth == 2:
                return value * 3
            depth += 1
            try:
                return value + call(value * 0.5)
            finally:
                depth -= 1

        return apply

    eager, model = make(Gated), make(Gated)
    bended = bt.BendedModule(model)
    with torch.no_grad():
        for x in INPUTS:
            bended(x)
        by_hand = nested(eager)
        eager.gates[1].register_forward_hook(lambda module, args, output: by_hand(output))
        bended.interject(model.gates[1], nested(bended))
        for x in (*INPUTS, *INPUTS):
            assert bits(bended(x)) == bits(eager(x))
    assert not any(are_apart(bended))


def test_changes_on_several_threads() -> None:
    model, local = make(Gated), threading.local()
    bended, wanted, wrong = bt.BendedModule(model), {}, []
    with torch.no_grad():
        for x in INPUTS:
            bended(x)
        hook = model.gates[1].register_forward_hook(lambda m, a, o: o * local.factor)
        for local.factor in (1, 2, -1):
            wanted[local.factor] = [bits(model(x)) for x in INPUTS]
        hook.remove()
    bended.interject(model.gates[1], lambda value: value * local.factor)

    def work(factor: int) -> None:
        local.factor = factor
        with torch.no_grad():
            for _ in range(4):
                found = [bits(bended(x)) for x in INPUTS]
                wrong.extend([factor] * (found != wanted[factor]))

    threads = [threading.Thread(target=work, args=(factor,)) for factor in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_change_that_reads_what_the_model_changes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.step = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.a(x) * self.step

    eager, model = make(Model), make(Model)
    bended, x = bt.BendedModule(model), INPUTS[0]
    for call in (bended, eager):
        for _ in range(4):
            call(x)
    eager.a.register_forward_hook(lambda m, a, o: o * eager.step)
    bended.interject(model.a, lambda value: value * model.step)
    for _ in range(3):
        assert bits(bended(x)) == bits(eager(x))


def test_a_change_where_a_predicate_asks_for_shapes_is_the_same_in_all_calls() -> None:
    called: list[str] = []

    class Note(bt.Interjection):
        self_contained = True

        def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
            called.append(at.path)

    bended = bt.BendedModule(make(Gated))
    bended(INPUTS[0])
    with bended.interject(lambda node: node.shape is not None, Note(), allow_none=True):
        bended(INPUTS[0])
    with (
        pytest.warns(NeverFiredWarning),
        bended.interject(bt.node_selector.with_shape((2, 4)), Note()),
    ):
        bended(INPUTS[0].repeat(2, 1))
    assert not called


# Memory


@pytest.mark.more
def test_a_sweep_over_places_records_nothing_and_keeps_nothing() -> None:
    bended, x = bt.BendedModule(make(Gated)), INPUTS[0]
    counts = []
    with torch.no_grad():
        bended(x)
        for _ in range(4):
            for gate in bended.model.gates:
                for change in (lambda value: value + 0, lambda value: value * 1):
                    with bended.interject(gate, change):
                        bended(x)
            gc.collect()
            modules = [str(type(thing).__module__) for thing in gc.get_objects()]
            counts.append(sum(name.startswith("bendtrace") for name in modules))
    assert bended.stats.traces == 1
    assert counts[-1] == counts[1]


@pytest.mark.filterwarnings("ignore::bendtrace.errors.TraceLimitWarning")
def test_paths_that_are_gone_are_not_kept_for_their_splices() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = self.relu(x) + 1
            return x

    bended, calls = bt.BendedModule(Model(), max_traces=4), 45
    with torch.no_grad():
        for times in range(1, calls + 1):
            bended(INPUTS[0], times)
            with bended.interject("relu", double):
                bended(INPUTS[0], times)
    assert served(bended) >= calls - 1
    gc.collect()
    recordings = [thing for thing in gc.get_objects() if type(thing) is Recording]
    mine = [one for one in recordings if one.environment.function is bended.model]
    assert 4 <= len(mine) <= 38


def test_no_change_is_kept_alive() -> None:
    class Scale:
        def __call__(self, value: Tensor) -> Tensor:
            return value * 2

    bended, change = bt.BendedModule(make(Gated)), Scale()
    kept = weakref.ref(change)
    bended(INPUTS[0])
    with bended.interject("gates_1", change):
        for x in INPUTS:
            bended(x)
    del change
    gc.collect()
    assert kept() is None


def test_a_value_is_freed_where_a_native_hook_frees_it() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model, alive, most = make(Deep), weakref.WeakSet[Any](), 0

    def noted(value: Tensor) -> Tensor:
        nonlocal most
        made = value * 2
        for tensor in (value, made):
            alive.add(tensor)
        most = max(most, len(alive))
        return made

    bended = bt.BendedModule(model)
    with torch.no_grad():
        bended(INPUTS[0])
        for layer in model.layers:
            bended.interject(layer, noted)
        for _ in range(8):
            most = 0
            bended(INPUTS[0])
    assert most == 2


# Broken on purpose


def test_values_that_are_taken_to_be_nobodys_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "REFERENCES_OF_LOCAL", 1 << 30)
    with pytest.raises(AssertionError):
        compared(around(Keeps), {"holder": double}, mode=torch.no_grad)


@pytest.mark.parametrize("change", [other_dtype, data_exchanged])
def test_kinds_that_are_not_compared_are_noticed(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "tensor_kind", lambda tensor: ())
    with pytest.raises(AssertionError):
        compared(Asks, {"relu": change})


def test_answers_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "begin_again", lambda self: None)
    with pytest.raises(AssertionError):
        test_what_is_inserted_is_not_called_again_when_a_call_begins_again()


def test_a_tensor_that_the_model_has_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "has_met", lambda self, tensor: False)
    with pytest.raises(AssertionError):
        compared(Compares, twice_the_same, mode=torch.no_grad)


def test_modules_that_are_not_reached_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "is_closed", property(lambda tape: False, lambda tape, value: None))
    with pytest.raises(AssertionError):
        test_a_fused_layer_is_taken_apart_for_what_is_inserted_in_it()


class Nested(nn.Module):
    """Counts, and then calls a module whose output is that of another one."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.relu(self.outer(x.float()).float()) + 1


def test_what_was_inserted_at_the_same_value_is_not_called_again() -> None:
    """The model's Python takes over behind the op: it comes to both insertions once more."""

    def made() -> Modules:
        calls = [0, 0]

        def counting(value: Tensor) -> Tensor:
            calls[0] += 1
            return value * calls[0]

        def sometimes(value: Tensor) -> Tensor:
            calls[1] += 1
            return value.double() if calls[1] == 5 else value - 1

        return {"outer.1": counting, "outer": sometimes}

    assert all(are_apart(compared(Nested, made, mode=torch.no_grad)))


@pytest.mark.parametrize("place", ["inner", "outer"])
def test_an_error_is_raised_by_the_insertion_that_raised_it(place: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.phase = ""

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            self.phase = "inner is over"
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.outer(x)) + 1

    def refuse(value: Tensor) -> Tensor:
        if value.abs().max() > 50:
            raise ValueError("too large")
        return value * 2

    found = []
    for is_eager in (True, False):
        model: Any = make(Model)
        inner, outer = model.outer.inner, model.outer
        changes = {inner: double, outer: double, {"inner": inner, "outer": outer}[place]: refuse}
        call = model if is_eager else bt.BendedModule(model)
        with torch.no_grad():
            for _ in range(2):
                outer.phase = ""
                call(torch.ones(2, 4))
            for module, change in changes.items():
                if is_eager:
                    module.register_forward_hook(lambda module, args, out, f=change: f(out))
                else:
                    call.interject(module, change)
            for size in (1.0, 900.0, 1.0):
                outer.phase = ""
                try:
                    result = bits(call(torch.full((2, 4), size)))
                except ValueError as error:
                    result = str(error)
                found.append((result, outer.phase))
    assert found[:3] == found[3:]


# The first call of a model


@pytest.mark.parametrize("kind", [Gated], ids=["Gated"])
def test_a_model_that_was_never_called_is_recorded_once_for_all_places(
    kind: type[nn.Module],
) -> None:
    changes: list[Modules] = [{f"gates.{n}": double} for n in range(4)]
    bended = compared(kind, *changes, inputs=[INPUTS[0]], before=[])
    assert bended.stats.traces - bended.stats.resumes == 1
    assert served(bended) > 0
    assert not list(bended._trees.inserted_runs())


def test_a_model_that_was_never_called_is_kept_as_one_without_insertions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    bended, x, seen = bt.BendedModule(model), INPUTS[0], []
    with bended.interject("0", lambda value: value * 2), bended.interject("1", seen.append):
        changed = bended(x)
    assert (bended.stats.traces, len(seen)) == (1, 1)
    assert bits(bended(x)) == bits(model(x))
    assert (bended.stats.traces, bended.stats.replays) == (1, 1)
    with bended.interject("0", lambda value: value * 2):
        assert bits(bended(x)) == bits(changed)
    assert bended.stats.traces == 1


@pytest.mark.parametrize(
    "apply",
    [
        lambda v: v.double().float().t().contiguous().t(),
        lambda v: torch.cat([v, v])[:2],
        lambda v: v.detach().requires_grad_(),
        lambda v: nn.Parameter(v),
    ],
    ids=["strides", "a view", "a leaf", "a parameter"],
)
def test_what_cannot_be_spliced_into_the_first_call_is_recorded_in_it(apply: Change) -> None:
    calls = []

    def counted(value: Tensor) -> Any:
        calls.append(1)
        return apply(value)

    bended = compared(Gated, {"gates.1": counted}, inputs=[INPUTS[0]], before=[])
    # Both sides call it; as ops of the one run that was recorded with it.
    assert len(calls) == 4
    assert bended.stats.live == 0
    (run,) = bended._trees.inserted_runs()
    assert has_gates(run)


HELD = torch.full((2, 4), 0.25)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", HELD)

    def forward(self, x: Tensor) -> Any:
        h = x.sigmoid()
        return h + 1, h is self.held, h is x


def holds(x: Tensor) -> Any:
    h = x.sigmoid()
    return h + 1, h is HELD, h is x


@pytest.mark.parametrize("calls_plainly", [False, True])
@pytest.mark.parametrize("make", [Holds, lambda: holds], ids=["module", "function"])
def test_an_insertion_that_returns_what_the_model_has_is_noticed_each_time(
    make: Callable[[], Any], calls_plainly: bool
) -> None:
    bended, x, kept = bt.BendedModule(make()), INPUTS[0], torch.ones(2, 4)
    if calls_plainly:
        bended(x)
    for given in (kept, HELD, x, kept, torch.zeros(2, 4), HELD, x):
        with bended.interject("sigmoid", lambda value, given=given: given):
            for _ in range(3):
                assert bits(bended(x)) == bits((given + 1, given is HELD, given is x))
    assert bended(x)[1:] == (False, False)
    assert bended.stats.replays > 0


def test_two_places_of_which_one_cannot_be_spliced_are_called_once() -> None:
    calls: list[str] = []

    def first(value: Tensor) -> Tensor:
        calls.append("first")
        return value + 1

    def second(value: Tensor) -> Tensor:
        calls.append("second")
        return torch.cat([value, value])[:2]

    bended = compared(Gated, {"gates.0": first, "gates.2": second}, inputs=[INPUTS[0]], before=[])
    assert calls == ["first", "second"] * 4
    assert bended.stats.live == 1  # the first, in which one was spliced already


def test_an_error_that_the_model_catches_in_the_first_call_is_raised_and_not_kept() -> None:
    def careful(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        try:
            return torch.relu(x)
        except ZeroDivisionError:
            return -x

    def fails(value: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")

    for known in ([], [-torch.ones(2)]):
        bended = bt.BendedModule(careful)
        for x in known:
            bended(x)
        with bended.interject("relu", fails), pytest.raises(ZeroDivisionError, match="on purpose"):
            bended(torch.ones(2))
        assert bits(bended(torch.ones(2))) == bits(careful(torch.ones(2)))


def test_what_an_insertion_of_the_first_call_changes_is_not_taken_for_the_models() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x) * self.scale
            return self.fc(h) * self.scale

    eager, own = make(Scaled), make(Scaled)
    bended = bt.BendedModule(own)

    def scales(model: nn.Module) -> Change:
        def apply(value: Tensor) -> None:
            model.scale = float(model.scale) + 1.0  # type: ignore[arg-type]

        return apply

    change = scales(eager)
    hook = eager.fc.register_forward_hook(lambda module, args, output: change(output))
    handle = bended.interject("fc", scales(own))
    for x in INPUTS[:4]:
        assert outcome(bended, own, x) == outcome(eager, eager, x)
        assert own.scale == eager.scale
    hook.remove()
    handle.remove()
    for x in INPUTS[:3]:
        assert outcome(bended, own, x) == outcome(eager, eager, x)


def tensors_of_kinds() -> list[Any]:
    """Return tensors that differ from one another in one thing, and what is no tensor."""
    base, leaf = torch.zeros(3, 4), torch.ones(3, 4, requires_grad=True)
    marked = torch.zeros(3, 4)
    marked.note = "own"  # type: ignore[attr-defined]
    imaginary = torch.zeros(3, 4, dtype=torch.complex64).conj().imag
    with torch.inference_mode():
        inferred = torch.zeros(3, 4)
    with torch.no_grad():
        unseen = leaf.view(3, 4)
    return [
        base, torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(4, 3).t(), base.double(), leaf,
        leaf * 2, (leaf * 2).view(3, 4), leaf.view(3, 4), unseen, base.view(3, 4), base.detach(),
        torch.zeros(5, 4)[2:], torch.empty(0).set_(torch.zeros(14).untyped_storage(), 2, (3, 4)),
        marked, nn.Parameter(base), nn.Parameter(base, requires_grad=False), inferred, imaginary,
        imaginary + 0, torch.zeros(3, 4, dtype=torch.complex64),
        torch.zeros(3, 4, dtype=torch.complex64).conj(), torch.zeros(3, 4, device="meta"),
        base.to_sparse(), base.to_sparse_csr(), torch._efficientzerotensor((3, 4)),
        torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)]),
        torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.jagged), 1.0, None,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state)")
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("has_guards", [True, False])
def test_tensors_are_of_the_same_kind_as_another(
    mode: Callable[[], Any], has_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_guards:
        monkeypatch.setattr(gates, "_guards", None)
    with mode():
        tensors, alike = tensors_of_kinds(), 0
        for one in tensors:
            if (kind := tensor_kind(one)) is None:
                continue
            test = KindTest(one, kind)
            for other in tensors:
                assert test.is_alike(other) <= (tensor_kind(other) == kind), (one, other)
                alike += test.is_alike(other)
                assert other is not one or test.is_alike(other)
    assert alike > len(tensors) - 8
