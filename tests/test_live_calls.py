"""Calls that have to run live: what they cost is a look from time to time, and nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.engine.tree import TraceTree
from bendtrace.record.recorder import Recorder

SETTINGS = {"factor": 2.0, "live": True}


class Part(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.fc, self.shared = nn.Linear(4, 4), shared

    def helper(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.relu(self.helper(x)) * scale + self.shared(x)
        return x, {"twice": x * 2}


class Net(nn.Module):
    """Calls a module from several places, and several times from one; live by what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.parts = nn.ModuleList(Part(self.shared) for _ in range(2))
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(inplace=True))
        self.drop = nn.Dropout(0.3)
        self.steps = 0
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * globals()["SETTINGS"]["factor"]
        for part in self.parts:
            x, more = part(x, scale=0.5)
            x = x + more["twice"]
        while x.norm() > 3:
            x = self.seq(x) * 0.7
        if x.sum() > 0:
            first: Any = self.parts[0]
            x = first.fc(x)
        return self.drop(self.seq[0](x) + self.shared(x))  # type: ignore[no-any-return]


def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets longer by each run that is recorded."""
    bt.trace(torch.relu, torch.ones(1))  # the first one of a process looks at more
    found: list[int] = []
    run = Recorder.run

    def noted(self: Recorder, *given: Any) -> Any:
        found.append(1)
        return run(self, *given)

    monkeypatch.setattr(Recorder, "run", noted)
    return found


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.step, self.counts = nn.Linear(3, 3), "", True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.step += "a"
        return self.fc(x) * len(self.step)  # type: ignore[no-any-return]


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        self.losses.append(x.mean().item())
        most = 0.0
        for loss in self.losses:
            most = max(most, loss)
        return x * most


class Reading(nn.Module):
    """Passes content to numpy where it shall, or for some inputs only."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.fc, self.asks, self.reads = nn.Linear(3, 3), asks, True

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if (x.sum() > 0) if self.asks else self.reads:
            return x * float(max(x.detach().numpy().flat))
        return x


def twins(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().eval())
    return models[0], models[1]


@pytest.mark.more
@pytest.mark.parametrize(
    ("make", "most"), [(Counting, 5), (Collecting, 15), (lambda: Reading(False), 1), (Net, 9)]
)
@pytest.mark.parametrize("inserted", [False, True])
def test_live_calls_are_recorded_rarely_and_do_what_the_model_does(
    make: Callable[[], nn.Module], most: int, inserted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = twins(make)
    bended = bt.BendedModule(own)
    calls: list[int] = []
    if inserted:
        linear = next(m for m in model.modules() if type(m) is nn.Linear)
        linear.register_forward_hook(lambda module, inputs, output: output * 1.1)
        where = next(m for m in own.modules() if type(m) is nn.Linear)
        bended.interject(where, lambda value: (calls.append(1), value * 1.1)[1])
    found, looked = recordings(monkeypatch), []
    find = TraceTree.find
    monkeypatch.setattr(TraceTree, "find", lambda *given: (looked.append(1), find(*given))[1])
    for number in range(300):
        x = torch.randn(2, 4 if make is Net else 3)
        torch.manual_seed(number)
        wanted = model(x)
        torch.manual_seed(number)
        assert torch.equal(bended(x), wanted)
        assert getattr(own, "losses", None) == getattr(model, "losses", None)
        assert getattr(own, "step", None) == getattr(model, "step", None)
    assert len(found) <= most + 4 * inserted
    assert len(looked) <= 85 + most
    assert bended.stats.live >= 300 - 2 * most
    assert bended.stats.live + bended.stats.replays + bended.stats.traces >= 300
    assert bended.why_live
    assert bool(calls) == inserted


@pytest.mark.parametrize("inserted", [False, True])
def test_calls_are_replayed_again_once_the_reason_is_gone(inserted: bool) -> None:
    for make, stop in (
        (lambda: Reading(False), lambda m: setattr(m, "reads", False)),
        (Counting, lambda m: setattr(m, "counts", False)),
    ):
        model, own = twins(make)  # type: ignore[arg-type]
        bended = bt.BendedModule(own)
        if inserted:
            model.fc.register_forward_hook(lambda module, inputs, output: output * 1.1)
            bended.interject("fc" if make is Counting else own.fc, lambda value: value * 1.1)
        for _ in range(200):
            x = torch.randn(2, 3)
            assert torch.equal(bended(x), model(x))
        assert not bended.stats.replays
        stop(model)
        stop(own)
        for _ in range(250):
            x = torch.randn(2, 3)
            assert torch.equal(bended(x), model(x))
        replays = bended.stats.replays
        for _ in range(10):
            x = torch.randn(2, 3)
            assert torch.equal(bended(x), model(x))
        assert bended.stats.replays == replays + 10


def test_a_side_that_runs_live_is_neither_recorded_each_time_nor_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            if x[0] > 5:
                return x * float(max(x.numpy().flat))
            return x * 2
        return x - 1

    bended = bt.BendedModule(model)
    bended(-torch.ones(2))
    found = recordings(monkeypatch)
    for _ in range(200):
        x = torch.tensor([6.0, 1.0]) + torch.rand(2)
        assert torch.equal(bended(x), model(x))
    assert len(found) <= 8
    for _ in range(1600):
        x = torch.tensor([1.0, 1.0]) + torch.rand(2)
        assert torch.equal(bended(x), model(x))
    replays = bended.stats.replays
    x = torch.rand(2)
    assert torch.equal(bended(x), model(x))
    assert bended.stats.replays == replays + 1


# What is inserted, called beside the model or in a recorded run


class Before(bt.Interjection):
    def before(self, at: bt.NodePass, inputs: bt.Inputs) -> bt.Inputs:
        return bt.Inputs((inputs[0] * 1.1, *inputs[1:]), inputs.kwargs)


class Told(bt.Interjection):
    wants_inputs = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        self.seen.append((at.path, at.number, at.module, at.scope, at.place))
        return None if not isinstance(output, Tensor) else output + inputs[0].sum() * 0.01


class Backward(bt.Interjection):
    def backward(self, at: bt.NodePass, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad * 0.5 for grad in grad_input)


class Instead(bt.Interjection):
    def instead(self, at: bt.NodePass, node: Any, inputs: bt.Inputs) -> Any:
        return node(*inputs, **inputs.kwargs)


WHERES: dict[str, Callable[[Any], Any]] = {
    "root": lambda net: net, "part": lambda net: net.parts[1], "fc": lambda net: net.parts[0].fc,
    "shared": lambda net: net.shared, "inplace": lambda net: net.seq[2],
    "class": lambda net: nn.Linear, "path": lambda net: "parts_0.fc",
    "pass": lambda net: "seq:1", "input": lambda net: "parts_0.fc.input",
    "function": lambda net: torch.relu, "functions": lambda net: [torch.relu, Tensor.norm, F.relu],
    "method": lambda net: "parts_1.mul_1", "in_torch": lambda net: "parts_0.shared.linear",
    "operator": lambda net: Tensor.add, "changing": lambda net: "seq.sub_2.relu",
    "layers": lambda net: bt.node_selector.Activations,
    "both": lambda net: [net.shared, torch.relu, ".mul_1"],
    "pass_of_function": lambda net: ".mul_1:1",
}  # fmt: skip
WHATS: dict[str, Callable[[], Any]] = {
    "after": lambda: lambda value: value * 1.1 if isinstance(value, Tensor) else None,
    "before": Before, "told": Told, "backward": Backward, "instead": Instead,
}  # fmt: skip


def outcome(where: str, what: str, is_live: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what calls with an insertion give, and what is reported of it."""
    torch.manual_seed(0)
    net = Net()
    bended = bt.BendedModule(net)
    if not is_live:
        monkeypatch.setattr(bended._dispatcher, "_runner_of", lambda plan: None)
    inserted = WHATS[what]()
    found: list[Any] = []
    for number in range(24):
        if number == 2:
            handle = bended.interject(WHERES[where](net), inserted)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number), requires_grad=True)
        torch.manual_seed(number)
        net.zero_grad()
        try:
            y = bended(x)
            y.sum().backward()
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            grads = [parameter.grad for parameter in net.parameters()]
            found.append([t if t is None else t.tolist() for t in (y, x.grad, *grads)])
    runner = bended._dispatcher._latest_runner
    assert not is_live or isinstance(found[-1], tuple) or (runner and runner[1])
    parts = {id(part): name for name, part in net.named_modules()}
    parts[id(None)] = ""  # of functions
    seen = [
        (path, number, parts[id(part)], *rest)
        for path, number, part, *rest in getattr(inserted, "seen", ())
    ]
    return found, seen, handle.report().to_dict()


MORE = {"functions", "method", "in_torch", "operator", "changing", "layers", "pass_of_function"}


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(
    "where", [pytest.param(w, marks=pytest.mark.more) if w in MORE else w for w in WHERES]
)
def test_what_is_inserted_is_called_as_in_a_recorded_run(
    where: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "input" and what != "after":
        pytest.skip("an input is given to `after` only")
    assert outcome(where, what, True, monkeypatch) == outcome(where, what, False, monkeypatch)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@torch.no_grad()
def without_gradients(x: Tensor) -> Tensor:
    return torch.relu(x)


def catching(x: Tensor) -> Tensor:
    for other in (torch.ones(77), x):
        with contextlib.suppress(RuntimeError):
            x = torch.add(x, other)
    return torch.relu(x)


def one_of_two(x: Tensor) -> Tensor:
    function = torch.relu if x.sum() > 0 else F.relu
    return function(x)


def attending(x: Tensor) -> Tensor:
    y, weight = x[:, None], torch.ones(12, 4)
    none = (None, None, None, False, 0.0)
    return F.multi_head_attention_forward(y, y, y, 4, 2, weight, *none, weight[:4], None)[0][:, 0]


# What is a node in these, and what is inside of one op, a mode has to see as a recorder does.
BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda x: torch.relu(torch.relu(x) - 1), "map": lambda x: sum(map(torch.relu, x)) + x,
    "opaque": bt.opaque(lambda x: torch.relu(x)), "autograd": Straight.apply,
    "vmap": lambda x: torch.vmap(torch.relu)(x), "without_gradients": without_gradients,
    "compiled": torch.compile(lambda x: torch.relu(x) * 2, backend="eager"),
    "catching": catching, "one_of_two": one_of_two, "attending": attending,
    "cond": lambda x: torch.cond(x.detach().sum() > 0, torch.relu, torch.neg, (x.detach(),)),
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty_like(x)),
}  # fmt: skip


class Counted(nn.Module):
    """Runs live: it writes to a `bytearray`."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body, self.count = nn.Linear(4, 4), body, bytearray(1)

    def forward(self, x: Tensor, further: bool) -> Tensor:
        self.count[0] = (self.count[0] + 1) % 256
        x = torch.relu(self.fc(x))
        if further:
            x = self.body(x)
        return torch.relu(x) * float(self.count[0])


@pytest.mark.more
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_functions_are_met_as_in_a_recorded_run(
    name: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_live in (True, False):
        torch.manual_seed(0)
        bended = bt.BendedModule(Counted(BODIES[name]))
        for _ in range(3):
            bended(torch.randn(3, 4), is_known)
        if not is_live:
            monkeypatch.setattr(bended._dispatcher, "_runner_of", lambda plan: None)
        shapes: list[Any] = []
        for function in (torch.relu, F.relu, torch.add, F.linear):
            bended.interject(
                function, lambda v, shapes=shapes: (shapes.append(v.shape), v * 1.5)[1],
                allow_none=True,
            )  # fmt: skip
        outputs = [bended(torch.randn(3, 4), is_known).tolist() for _ in range(30)]
        outputs += [bended(torch.randn(3, 4), True).tolist() for _ in range(5)]
        found.append((outputs, shapes))
    assert found[0] == found[1]
    assert found[0][1]


def test_a_function_that_somebody_has_replaced_is_called_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    relu = F.relu

    def replaced(x: Tensor, inplace: bool = False) -> Tensor:
        calls.append(1)
        return relu(x, inplace)

    monkeypatch.setattr(F, "relu", replaced)
    model, own = (Counted(lambda x: F.relu(x - 1)) for _ in range(2))
    own.load_state_dict(model.state_dict())
    bended = bt.BendedModule(own)
    bended(torch.ones(3, 4), True)
    bended.interject(torch.relu, lambda value: value * 1.0)
    model(torch.ones(3, 4), True)
    for number in range(30):
        x = torch.randn(3, 4)
        assert torch.equal(bended(x, True), model(x, True))
        assert len(calls) == 2 * number + 4
    assert bended._dispatcher._latest_runner[1] is not None


def test_modules_called_by_what_is_inserted_are_no_nodes() -> None:
    model, own = twins(lambda: Reading(False))
    bended = bt.BendedModule(own)
    handle = bended.interject(own.fc, lambda value: own.fc(value))
    x = torch.randn(2, 3)
    for _ in range(5):
        y = model.fc(model.fc(x))
        assert torch.equal(bended(x), y * y.max())
    assert handle.report().fired == 5


def test_nothing_stays_on_the_modules_when_a_call_raises() -> None:
    model, own = twins(lambda: Reading(False))
    bended = bt.BendedModule(own)
    x = torch.randn(2, 3)
    bended(x)

    def fails(value: Tensor) -> Tensor:
        raise ValueError("no")

    with bended.interject(own.fc, fails):
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                bended(x)
    assert vars(own.fc).keys() == vars(model.fc).keys()
    assert torch.equal(bended(x), model(x))


@pytest.mark.more
def test_insertions_without_a_repeating_path_reach_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.table = nn.Linear(3, 3), {"": 1.0}

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.table.get(f"{x.sum().item():.6f}", 2.0)  # type: ignore[no-any-return]

    model, own = twins(Asking)
    model.fc.register_forward_hook(lambda module, inputs, output: output * 1.1)
    bended = bt.BendedModule(own, max_traces=None)
    bended.interject(own.fc, lambda value: value * 1.1)
    found = recordings(monkeypatch)
    for _ in range(200):
        x = torch.randn(2, 3)
        assert torch.equal(bended(x), model(x))
    assert len(found) <= 110
    assert bended.stats.live >= 90
    assert bended.why_live[-1].startswith("the paths of the model do not repeat")
