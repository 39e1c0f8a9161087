"""Tables of a run, and the hash of its structure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError


class Shared(nn.Module):
    """One layer that is called in a loop, a buffer, and a branch."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        if x.sum() > 0:
            x = x * self.scale
        return self.norm(x)  # type: ignore[no-any-return]


def made() -> Shared:
    torch.manual_seed(0)
    return Shared().eval()


X = torch.ones(2, 3)


def test_the_tables_of_a_run() -> None:
    run = bt.trace(made(), X)
    parameters = {row.name: row.ops for row in run.table("parameters")}
    assert parameters == {"layer.weight": 3, "layer.bias": 3, "norm.weight": 1, "norm.bias": 1}
    assert {row.name for row in run.table("buffers")} == {"norm.running_mean", "norm.running_var"}
    modules = {row.name: row for row in run.table("modules")}
    assert (modules["layer"].calls, modules["layer"].ops, modules["layer"].nbytes) == (3, 3, 72)
    assert modules["norm"].class_name == "BatchNorm1d"
    ops = run.table("ops")
    assert [row.label for row in ops] == [
        entry.label for entry in run.entries if entry.kind == "op"
    ]
    assert "layer.weight" in ops[0].arguments
    assert ops.to_list()[0]["shape"] == (2, 3)
    assert str(run.table("modules")).splitlines()[0].split()[:3] == ["name", "class_name", "calls"]
    assert "<td>BatchNorm1d" in run.table("modules")._repr_html_()
    with pytest.raises(InputError, match='what= is "ops" or "modules" or "parameters"'):
        run.table("layers")


def test_the_hash_is_that_of_the_structure(tmp_path: Path) -> None:
    run = bt.trace(made(), X)
    assert run.hash == bt.trace(made(), X + 1e-3).hash  # other values
    run.save(tmp_path / "log")
    assert bt.load(tmp_path / "log").hash == run.hash
    bended = bt.BendedModule(made())
    assert bended.trace(X).hash == run.hash


@pytest.mark.parametrize("change", ["shape", "dtype", "constant", "branch", "loop", "module"])
def test_the_hash_differs_where_the_structure_does(change: str) -> None:
    model, x = made(), X
    before = bt.trace(model, x).hash
    if change == "shape":
        x = torch.ones(5, 3)
    elif change == "dtype":
        model, x = model.double(), x.double()
    elif change == "constant":
        model.scale = 3.0
    elif change == "branch":
        asked = [step.value for step in bt.trace(model, x).flow_steps if step.kind == "if"]
        with torch.no_grad():
            model.layer.bias.fill_(-100 if asked[0] else 100)
            model.layer.weight.fill_(0)
    elif change == "loop":
        model.layer = nn.Sequential(model.layer)  # type: ignore[assignment]
    else:
        model.norm = nn.LayerNorm(3)  # type: ignore[assignment]
    assert bt.trace(model, x).hash != before
