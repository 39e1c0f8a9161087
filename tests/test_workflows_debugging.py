"""Finding NaN and infinities, gradients that vanish, work for nothing, and what takes time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.workflows import dead_ends, find_nan, gradient_flow, hot_path, recomputation
from tests.promise import bits, state


class Deep(nn.Module):
    """Layers in a loop, of which one makes what is planted."""

    def __init__(self, bad: int, plant: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.bad, self.plant = bad, plant

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            if number == self.bad:
                x = x + self.plant / (x - x).sum()
            x = x.clone()
        return x.sum()


@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("plant", [0.0, 1.0])
@pytest.mark.parametrize("wrap", [False, True])
def test_the_op_that_made_it_is_found(bad: int, plant: float, wrap: bool) -> None:
    model = Deep(bad, plant)
    before = bits(state(model))
    found = find_nan(bt.BendedModule(model) if wrap else model, torch.ones(2, 4))
    assert found is not None
    assert found.cause == "op"
    assert found.entry.layer_type == "rdiv"
    assert (found.values.nans, found.values.infinities) == ((1, 0) if plant == 0 else (0, 1))
    (operand,) = found.operands
    assert (operand.low, operand.high) == (0.0, 0.0)
    assert "self.plant / (x - x).sum()" in str(found)
    assert bits(state(model)) == before


def test_a_finite_run_has_none() -> None:
    assert find_nan(Deep(-1, 0.0), torch.ones(2, 4)) is None
    assert find_nan(lambda x: x + 1, torch.ones(2, dtype=torch.long)) is None
    assert find_nan(lambda x: x * 1j, torch.ones(2)) is None


def test_infinities_of_masks_are_meant() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.mT + self.mask
            scores = scores.masked_fill(scores == 0, -torch.inf)
            return scores.softmax(-1) @ x

    model = Masked()
    assert find_nan(model, torch.rand(3, 2)) is None
    model.mask.fill_(-torch.inf)  # nothing is left to attend to
    found = find_nan(model, torch.rand(3, 2))
    assert found is not None
    assert found.entry.layer_type == "softmax"
    assert found.operands[0].infinities == 9


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_comes_from_outside_is_told_apart(value: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = find_nan(model, torch.tensor([[1.0, value]]))
    assert found is not None
    assert (found.cause, found.entry.kind) == ("input", "input")
    with torch.no_grad():
        model[1].weight[0, 0] = value
    found = find_nan(model, torch.ones(1, 2))
    assert found is not None
    assert (found.cause, found.entry.module) == ("state", "1")
    assert "1.weight" in str(found)


def test_a_gradient_of_a_finite_run() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return (h - h).sqrt() + 1

    found = find_nan(Rooted(), torch.ones(1, 2), loss=torch.sum)
    assert found is not None
    assert (found.cause, found.entry.layer_type) == ("backward", "sub")
    assert found.operands[0].label.startswith("gradient of sqrt")
    assert found.operands[0].is_finite
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    with pytest.raises(InputError, match="one element that requires a gradient"):
        find_nan(Rooted(), torch.ones(1, 2), loss=lambda out: out)


def rooted(x: Tensor) -> Tensor:
    for _ in range(2):
        x = (x - 1).sqrt()
    return torch.empty_like(x).copy_(x)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_watch_raises_where_nan_begins_and_says_in_which_call(gradients: bool) -> None:
    bended = bt.BendedModule(rooted)
    with bt.workflows.raise_on_nan(bended, gradients=gradients):
        for _ in range(3):
            assert bits(bended(torch.full((2,), 9.0))) == bits(rooted(torch.full((2,), 9.0)))
        said = r"sqrt \(pass 2\) returned 1 NaN in call 4 of the model, from inputs without NaN"
        with pytest.raises(bt.errors.NonFiniteError, match=said) as info:
            bended(torch.tensor([9.0, 1.5]))
        assert (info.value.path, info.value.call) == ("sqrt", 4)
        with pytest.raises(FloatingPointError, match=r"^sub returned .* from inputs with NaN"):
            bended(torch.tensor([torch.nan]))
    assert not bended.insertions
    assert bended(torch.tensor([0.5])).isnan()


def test_a_watch_of_gradients_raises_where_they_become_nan() -> None:
    bended, x = bt.BendedModule(lambda x: (x.abs() * 0).sqrt()), torch.ones(2, requires_grad=True)
    with bt.workflows.raise_on_nan(bended):
        bended(x).sum().backward()
    with bt.workflows.raise_on_nan(bended, gradients=True):
        bended(x)
        loss = bended(x).sum()
        with pytest.raises(FloatingPointError, match="mul gave a gradient with 2 NaN in call 2"):
            loss.backward()
    with pytest.raises(InputError, match="a watch for NaN stays in the model"):
        bt.workflows.raise_on_nan(torch.relu)  # type: ignore[arg-type]


def test_gradients_by_parameter() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead, self.unused = (nn.Linear(2, 2, bias=False) for _ in range(3))
            self.tiny = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.dead(x).clamp(5, 5) + self.tiny * 1e-9

    model = Branches()
    flow = gradient_flow(model, torch.ones(1, 2), loss=torch.sum)
    assert {row.name: row.verdict for row in flow} == {
        "tiny": "vanishing", "used.weight": "ok", "dead.weight": "zero",
        "unused.weight": "no gradient",
    }  # fmt: skip
    used = next(row for row in flow if row.name == "used.weight")
    assert used.norm == pytest.approx(2.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "vanishing" in str(flow)
    assert "<td>no gradient</td>" in flow._repr_html_().replace("  ", "")


def test_gradients_of_complex_parameters_have_both_parts() -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3 + 4j, 1j]))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).abs().sum()

    model, x = Phases(), torch.tensor([1.0, 2.0])
    (row,) = gradient_flow(model, x, loss=lambda out: out)
    (gradient,) = torch.autograd.grad(model(x), [model.weight])
    assert row.norm == pytest.approx(gradient.norm().item())
    assert row.relative == pytest.approx((gradient.norm() / model.weight.norm()).item())


def test_dead_ends_are_what_nothing_depends_on() -> None:
    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            unused = x.exp()
            unused = unused * 2
            asked = x.sin().sum()
            self.last = x.cos()
            y = torch.zeros_like(x)
            y.add_(x.tan())
            return self.norm(x) if asked > 100 else y

    dead = dead_ends(bt.trace(Busy(), torch.ones(3, 2)))
    assert [row.label.rpartition("_")[0] for row in dead] == ["exp_1", "mul_1"]
    assert str(dead_ends(bt.trace(lambda x: x + 1, torch.ones(2)))) == "none"


def test_the_hot_path_is_the_chain_that_takes_most() -> None:
    def model(x: Tensor) -> Tensor:
        small = x[:1].exp() + 1
        large = x.exp()
        return large.sum() + small

    run = bt.trace(model, torch.ones(1000), save="none")
    labels = [row.label.rpartition("_")[0] for row in hot_path(run, "memory")]
    assert labels == ["input_1", "exp_2", "sum_1", "add_2", "output_1"]
    path = hot_path(run)
    assert path[0].label.startswith("input_1")
    assert sum(row.time for row in path) <= sum(entry.time or 0 for entry in run)
    with pytest.raises(InputError, match="save='none'"):
        hot_path(bt.trace(model, torch.ones(3)))
    with pytest.raises(InputError, match='by= is "time" or "memory"'):
        hot_path(run, "flops")  # type: ignore[arg-type]


def test_recomputation_counts_what_a_module_keeps_to_itself() -> None:
    block = nn.Sequential(nn.Linear(8, 800), nn.ReLU(), nn.Linear(800, 8))
    run = bt.trace(nn.Sequential(block, nn.Linear(8, 8)), torch.ones(4, 8), save="none")
    (row,) = recomputation(run)
    assert (row.module, row.nbytes) == ("0:1", 2 * 4 * 800 * 4)
    assert row.bytes_per_second == pytest.approx(row.nbytes / row.time)
    with pytest.raises(InputError, match="did not measure"):
        recomputation(bt.trace(block, torch.ones(4, 8)))


def test_costs_are_those_of_ops_modules_and_lines() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 400), nn.Linear(400, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.b(self.a(x).view(-1, 400).relu())
            return x.split(4, dim=-1)[0].sum()

    run = bt.trace(Wide(), torch.ones(50, 8), save="none")
    backward = run.backward(run.output)
    entries = [entry for entry in run.entries if entry.kind == "op"]
    whole = sum(entry.time for entry in entries if entry.time is not None)
    for by in ("op", "module", "line"):
        for costs in (bt.workflows.cost(run, by=by), bt.workflows.cost(backward, by=by)):
            assert [row.share for row in costs] == sorted((r.share for r in costs), reverse=True)
            if by != "module":
                assert sum(row.share for row in costs) == pytest.approx(1)
                assert sum(row.time for row in costs) == pytest.approx(whole)
                assert sum(row.nbytes for row in costs) == sum(entry.nbytes for entry in entries)
    rows = {row.name: row for row in bt.workflows.cost(backward)}
    assert (rows["linear_1_1"].ops, rows["linear_1_1"].nbytes) == (3, 3 * 50 * 400 * 4)
    assert sum(row.backward for row in rows.values()) == pytest.approx(
        sum(node.time or 0 for node in backward.nodes)
    )
    assert "outside" in rows  # where gradients are added up
    modules = {row.name: row for row in bt.workflows.cost(backward, by="module")}
    assert modules["a"].ops == 3
    assert modules["a"].backward > 0
    table = {row.name: row for row in run.table("modules")}
    assert table["a"].time == pytest.approx(modules["a"].time)
    assert "ms" in str(run.table("modules"))
    plain = bt.trace(Wide(), torch.ones(50, 8))
    assert {row.time for row in plain.table("modules")} == {None}
    with pytest.raises(InputError, match="did not measure its ops"):
        bt.workflows.cost(plain)


def test_the_peak_has_what_is_held_at_one_moment_and_each_memory_once() -> None:
    def model(x: Tensor) -> Tensor:
        big = x.repeat(100)
        part = big[:10].view(2, 5)
        small = big.sum()
        other = torch.zeros(1000)
        return part.add_(1).sum() + small + other.sum()

    costs = bt.workflows.cost(bt.trace(model, torch.ones(10), save="none"))
    assert [entry.layer_type for entry in costs.alive] == ["repeat", "zeros", "input", "sum", "sum"]
    assert costs.peak == 4000 + 4000 + 40 + 4 + 4
    assert costs.at is not None
    assert costs.at.label == "sum_2_7"  # the last to read the memory of `big`, through a view
