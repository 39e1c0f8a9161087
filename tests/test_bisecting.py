"""Which op makes two runs differ."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.tape.watchers import current_watcher
from tests.shares import some
from tests.tree_models import EarlyExit, Refine
from tools.benchmarks.models import CASES, case_of, inputs_of

# Faults that are planted


class Fault(TorchDispatchMode):
    """Spoils one element of what the n-th kernel of a run gives.

    Attributes:
        count: how many kernels have given floats so far.
        hit: the op of the tape that this kernel belongs to; None if there is none.
    """

    def __init__(self, number: int, size: float, seed: int) -> None:
        super().__init__()
        self.number = number
        self.size = size
        self.count = 0
        self.hit: int | None = None
        self._is_near = False
        self._chance = random.Random(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        watcher: Any = current_watcher()
        if watcher is not None:  # not within an op: what an op gave is kept just after it
            if self._is_near:
                self.hit, self._is_near = len(watcher.tape.ops) - 1, False
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        given = isinstance(first, Tensor) and first.is_floating_point() and first.numel()
        if given and all(value.alias_info is None for value in func._schema.returns):
            if self.count == self.number:
                spoil(first, self.size, self._chance)
                self._is_near = True
            self.count += 1
        return out


def spoil(out: Tensor, size: float, chance: random.Random) -> None:
    """Change one element: by one unit in the last place if `size` is 0, else by that much of it."""
    with torch.no_grad():
        flat = out.detach().reshape(-1)
        place = chance.randrange(flat.numel())
        value = flat[place]
        other = torch.nextafter(value, torch.full_like(value, torch.inf))
        if size:
            other = value * (1 + size) if value != 0 else torch.full_like(value, size)
        out.detach()[tuple(torch.unravel_index(torch.tensor(place), out.shape))] = other


class Faulty(nn.Module):
    """A model one of whose kernels is wrong."""

    def __init__(self, model: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.inner = model
        self.fault = fault

    def forward(self, *args: Any) -> Any:
        with self.fault:
            return self.inner(*args)


def kernels_of(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    """Return how many kernels a fault can be planted in."""
    fault = Fault(-1, 0.0, 0)
    with fault:
        model(*args)
    return fault.count


def named_exactly(
    model: nn.Module, args: tuple[Tensor, ...], number: int, seed: int
) -> bool | None:
    """Whether the first culprit is the op that a fault was planted in; None if it has no effect."""
    size = (0.0, 1e-6, 1e-4, 1e-3)[seed % 4]
    fault = Fault(number, size, seed)
    # By a run of its own: a search leaves a model, and so the fault, as it was.
    bt.trace(Faulty(model, fault), *args, save="all")
    sound, faulty = Faulty(model, Fault(-1, 0.0, 0)), Faulty(model, Fault(number, size, seed))
    found = bt.bisect(sound, faulty, args)
    if not found:
        return None  # it was lost within its op
    return found.first is not None and found.first.b is not None and (
        (found.first.kind, found.first.b.index) == ("op", fault.hit)
    )  # fmt: skip


NAMES = [*(case.name for case in CASES if case.name != "GPT-2 small"), "early exit"]


def _model(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name == "early exit":
        torch.manual_seed(0)
        return EarlyExit().eval(), (torch.randn(2, 4),)
    case = case_of(name)
    return case.model(), inputs_of(case)


@pytest.mark.parametrize(("name", "faults"), [*some([(name, 10) for name in NAMES]), ("solver", 3)])
@pytest.mark.more
def test_a_planted_fault_is_named_exactly(name: str, faults: int) -> None:
    if name == "tiny BERT":
        pytest.importorskip("transformers")
    model, args = _model(name)
    with torch.no_grad():
        kernels = kernels_of(model, args)
        chance = random.Random(name)
        named = [named_exactly(model, args, chance.randrange(kernels), n) for n in range(faults)]
    assert named.count(False) == 0
    assert named.count(True) >= 0.9 * faults


# The forms


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)).relu()
        while h.norm() > 1:
            h = h * 0.5
        return cast(Tensor, self.b(h))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def first_of(found: bt.Bisection) -> bt.LayerEntry:
    assert found.first is not None
    return found.first.entry


def test_a_model_is_the_same_as_its_copy(net: Net) -> None:
    found = bt.bisect(net, copy.deepcopy(net), X)
    assert not found
    assert found.first is None
    assert str(found) == "Net: the two runs are the same, bit for bit"


def test_what_passes_a_difference_on_is_no_cause(net: Net) -> None:
    other = copy.deepcopy(net)
    other.norm.eps = 1e-3
    found = bt.bisect(net, other, X)
    assert [culprit.entry.label for culprit in found.culprits] == ["layernorm_1_2"]
    assert "relu_1_3" in found.passing
    assert "linear_2_7" in found.passing
    assert not found.unknown
    assert "eps=1e-05 in a, eps=0.001 in b" in str(found)
    assert "test_bisecting.py" in str(found)
    assert "h = self.norm(self.a(x)).relu()" in str(found)


def test_a_weight_is_named(net: Net) -> None:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.b.weight[0, 0] += 1e-4
    found = bt.bisect(net, other, X)
    assert [(c.kind, c.entry.label) for c in found.culprits] == [("state", "b.weight")]
    assert found.passing == ["linear_2_7"]


class Tanh(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x)).relu().tanh()
        while h.norm() > 1:
            h = h * 0.5
        return cast(Tensor, self.b(h))


def test_an_op_that_only_one_version_has_is_named_and_the_path_told(net: Net) -> None:
    other = Tanh()
    other.load_state_dict(net.state_dict())
    for found, side in ((bt.bisect(net, other, X), "b"), (bt.bisect(other, net, X), "a")):
        assert [(c.kind, c.entry.function) for c in found.culprits] == [("path", "tanh")]
        assert f"(only in {side})" in str(found)
        assert found.path is not None
        assert "while h.norm() > 1" in str(found.path)


class Residual(nn.Module):
    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        one = x.sin()
        two = one.exp()
        return (two + (one if self.early else x)).cos()


def test_an_op_that_reads_another_value_is_named() -> None:
    found = bt.bisect(Residual(True), Residual(False), X)
    assert found.first is not None
    assert found.first.entry.function in ("add", "__add__")
    assert found.first.why == "it reads sin_1_1 in a, input_1_0 in b"
    assert [label.partition("_")[0] for label in found.passing] == ["cos"]


def test_a_number_out_of_a_weight_is_no_input() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.item()

    found = bt.bisect(Scaled(2.0), Scaled(2.5), X)
    assert [(c.kind, c.entry.label) for c in found.culprits] == [("state", "scale")]


class Turned(nn.Module):
    def __init__(self, bias: float) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.bias
        return y.sin() * 2 if y.sum() > 0 else y.cos() * 3


def test_ops_of_another_branch_are_no_causes() -> None:
    found = bt.bisect(Turned(0.5), Turned(-0.5), torch.zeros(2))
    assert [c.entry.source.text for c in found.culprits if c.entry.source] == ["x + self.bias"]
    assert found.path is not None


def test_dtypes_are_compared_within_the_rounding_of_the_coarser(net: Net) -> None:
    double = bt.bisect(net, copy.deepcopy(net).double(), X)
    assert not double
    assert (double.rtol, double.atol) == (1.3e-6, 1e-5)
    exact = bt.bisect(net, copy.deepcopy(net).double(), X, rtol=0, atol=0)
    assert first_of(exact).label == "linear_1_1"

    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.b(self.norm(self.a(x)).relu() + 0.01))

    class Right(Net):
        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.b(self.norm(self.a(x)).relu() + 0.0))

    models = Right(), Wrong().double()
    for model in models:
        model.load_state_dict(net.state_dict())
    assert first_of(bt.bisect(*models, X)).function == "add"


def test_a_replay_is_compared_with_the_model(net: Net) -> None:
    assert not bt.bisect(net, bt.BendedModule(net), X)
    calls: list[int] = []

    @bt.opaque
    def drifting(x: Tensor) -> Tensor:
        calls.append(1)
        return x * (1 + 2**-20 * len(calls))

    def model(x: Tensor) -> Tensor:
        return drifting(x.sin()).cos() + 1

    found = bt.bisect(model, bt.BendedModule(model), X)
    assert first_of(found).function == "drifting"


def test_a_call_that_runs_live_has_no_replay_to_compare() -> None:
    def model(x: Tensor) -> Tensor:
        with Fault(-1, 0.0, 0):
            return x.relu()

    with pytest.raises(InputError, match=r"not replayed.*dispatch mode"):
        bt.bisect(model, bt.BendedModule(model), X)


def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Compile relu a little wrong."""
    for node in list(module.graph.nodes):
        if node.op != "placeholder" and "relu" in str(node.target):
            with module.graph.inserting_after(node):
                wrong = module.graph.call_function(torch.mul, (node, 1 + 2**-20))
            node.replace_all_uses_with(wrong)
            wrong.args = (node, 1 + 2**-20)
    module.recompile()
    return module.forward


@pytest.mark.more
def test_a_compiled_module_is_compared_op_by_op(net: Net) -> None:
    with torch.no_grad():
        assert not bt.bisect(net, torch.compile(net, backend="eager"), X)
        found = bt.bisect(net, torch.compile(net, backend=backend), X)
    assert first_of(found).function == "relu"
    assert all(culprit.entry.function == "relu" for culprit in found.culprits)


def test_an_insertion_is_named(net: Net) -> None:
    bended = bt.BendedModule(copy.deepcopy(net))
    bended.interject("a", lambda value: value * 1.01)
    found = bt.bisect(net, bended, X)
    assert found.first is not None
    assert found.first.a is None
    assert "function" in first_of(found).function


def test_random_numbers_are_the_same_on_both_sides_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), X.clone()
    assert not bt.bisect(model, copy.deepcopy(model), X)
    assert not bt.bisect(model, model, X)
    assert all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
    assert torch.equal(before[1], torch.get_rng_state())
    assert torch.equal(before[2], X)


# Saved logs


def saved(model: nn.Module, directory: Path) -> bt.ModelHistory:
    bt.trace(model, X, save="all").save(directory)
    return bt.load(directory)


def test_saved_logs_are_compared_without_their_models(net: Net, tmp_path: Path) -> None:
    other = copy.deepcopy(net)
    other.norm.eps = 1e-3
    logs = saved(net, tmp_path / "a"), saved(other, tmp_path / "b")
    found = bt.bisect(*logs)
    assert [c.entry.label for c in found.culprits] == ["layernorm_1_2"]
    assert {"relu_1_3", "norm_1_4:1"} <= set(found.passing)
    assert list(found.unknown) == ["linear_2_7"]  # its weights are in no log
    assert not bt.bisect(logs[0], logs[0])
    assert first_of(bt.bisect(logs[0], other, X)).label == "layernorm_1_2"


def test_a_fault_of_another_torch_is_named_from_its_log(net: Net, tmp_path: Path) -> None:
    with torch.no_grad():
        wrong = Faulty(net, Fault(2, 1e-4, 0))
        logs = saved(Faulty(net, Fault(-1, 0.0, 0)), tmp_path / "a"), saved(wrong, tmp_path / "b")
    found = bt.bisect(*logs)
    assert [c.entry.function for c in found.culprits][:1] == ["relu"]
    assert all(label not in found.passing for label in ("linear_1_1", "layernorm_1_2"))


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.os.system", "torch.load", "nothing"])
def test_a_log_cannot_name_a_function_that_is_no_op(net: Net, tmp_path: Path, target: str) -> None:
    from bendtrace.debug.bisect import Unable, op_runner_of

    log = saved(net, tmp_path / "a")
    entry = log["relu_1"]
    assert isinstance(entry, bt.LayerEntry)
    again = op_runner_of(log)
    assert torch.equal(again.run(entry, again.inputs(entry)), entry.tensor_contents)
    entry.target = target
    with pytest.raises(Unable, match="is not an op of torch"):
        again.run(entry, again.inputs(entry))


# What it says


def test_a_bisection_is_plain_values_as_json(net: Net) -> None:
    other = copy.deepcopy(net)
    other.norm.eps = 1e-3
    told = json.loads(bt.bisect(net, other, X).to_json())
    assert told["culprits"][0]["a"] == "layernorm_1_2"
    assert told["culprits"][0]["source"][2] == "self.norm(self.a(x))"
    assert told["same"] is False
    assert "relu_1_3" in told["passing"]


def test_mistakes_are_refused_before_anything_runs(net: Net, tmp_path: Path) -> None:
    log = bt.trace(net, X, save="all")
    for wrong, message in (
        (lambda: bt.bisect(net, net), "needs inputs"),
        (lambda: bt.bisect(log, log, X), "leave the inputs out"),
        (lambda: bt.bisect(3, net, X), "has to be callable; 3 is not"),  # type: ignore[arg-type]
        (lambda: bt.bisect(net, net, X, rtol=-1), "rtol= has to be a number of at least 0"),
        (lambda: bt.bisect(bt.trace(net, X), log), "holds no values"),
        (lambda: bt.bisect(net, torch.compile(lambda x: x), X), "compile a module"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


def test_refine_and_a_changed_tolerance_part_at_the_loop() -> None:
    torch.manual_seed(0)
    model = Refine()
    found = bt.bisect(lambda x: model(x), lambda x: model(x, 0.5), torch.ones(2, 4))
    assert found
    assert found.path is not None


# Ports


class Original(nn.Module):
    """A block as libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded = nn.Embedding(10, 8)
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        h = self.norm(x)
        q, k, v = (
            part(h).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        x = x + self.o(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return cast(Tensor, x + self.down(nn.functional.silu(self.up(self.other(x)))))


class Port(nn.Module):
    """The same, written by hand, with a fault."""

    def __init__(self, model: Original, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(model.embedded.weight.detach().clone())
        joint = [part.weight.detach() for part in (model.q, model.k, model.v)]
        self.qkv = nn.Parameter(torch.cat(joint))
        self.out = nn.Parameter(model.o.weight.detach().clone())
        self.up = nn.Parameter(model.up.weight.detach().clone())
        self.down = nn.Parameter(model.down.weight.detach().clone())
        if fault == "weight":
            self.down.data[0, 0] += 1

    def normed(self, x: Tensor, eps: float = 1e-5) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        if self.fault == "embedding":
            x = x + x.sin()
        parts = (self.normed(x) @ self.qkv.t()).split(8, -1)
        q, k, v = (part.view(*part.shape[:2], 2, 4).transpose(1, 2) for part in parts)
        scores = q @ k.mT * (0.4 if self.fault == "scale" else 0.5)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + mixed @ self.out.t()
        gate = self.normed(x, 0.1 if self.fault == "eps" else 1e-5) @ self.up.t()
        return x + gate * gate.sigmoid() @ self.down.t()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("embedding", "x.sin()"), ("scale", "q @ k.mT * (0.4"), ("eps", "centred"),
        ("weight", "down"), ("none", ""),
    ],
)  # fmt: skip
def test_a_port_is_compared_by_its_values(fault: str, text: str) -> None:
    torch.manual_seed(0)
    model = Original().eval()
    port, ids = Port(model, fault), torch.randint(0, 10, (2, 5))
    with torch.no_grad():
        found = bt.bisect(model, port, ids, rtol=1e-4, atol=1e-5)
    assert found.by_content
    assert bool(found) == (fault != "none")
    if fault == "none":
        assert str(found).endswith("they are written otherwise")
        return
    culprit = first_of_b(found)
    # Of what is one op in the other run, the first of the ops that do the same.
    shown = culprit.label if culprit.source is None else culprit.source.statement
    assert text in shown
    assert (culprit.kind == "state") == (fault == "weight")
    assert json.loads(found.to_json())["culprits"][0]["b"] == culprit.label


def test_a_port_that_differs_without_a_cause_is_not_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bendtrace.debug.bisect.partings", lambda *_: (None, None))
    torch.manual_seed(0)
    model = Original().eval()
    with torch.no_grad():
        found = bt.bisect(model, Port(model, "scale"), torch.tensor([[1, 2]]), rtol=1e-4, atol=1e-5)
    assert found
    assert found.first is None
    assert "no op is the cause by itself" in str(found)


def first_of_b(found: bt.Bisection) -> bt.LayerEntry:
    assert found.first is not None
    assert found.first.b is not None
    return found.first.b


@pytest.mark.parametrize(("factor", "label"), [(1.0, None), (1.001, "mul_1_2")])
def test_ops_that_give_the_same_are_aligned(factor: float, label: str | None) -> None:
    table, ids = torch.randn(5, 3), torch.tensor([[0, 2], [4, 1]])

    def old(ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, table).relu().sum(-1).exp().log().tanh()

    def new(ids: Tensor) -> Tensor:
        rows = table[ids] if factor == 1 else table[ids] * factor
        return rows.relu().sum(-1).exp().log().tanh()

    found = bt.bisect(old, new, ids)
    assert not found.by_content
    assert [c.b and c.b.label for c in found.culprits] == ([] if label is None else [label])
