"""What treescope shows of runs, entries and models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.documents import run_forked

treescope = pytest.importorskip("treescope", reason="needs the package treescope")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))[..., :4]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.odd = Block(), nn.LayerNorm((4,))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
        return self.odd(x) * x.shape[0]


def shown(value: object) -> str:
    return str(treescope.render_to_text(value))


def test_a_run_is_nested_by_the_calls_of_modules(tmp_path: Path) -> None:
    trace = bt.trace(Net(), torch.ones(1, 4), save="all")
    text = shown(trace)
    lines = text.splitlines()
    assert lines[0].startswith("<Trace of Net: ")
    calls = [line.split("(")[0] for line in lines if re.match(r" +[\w.:]+: [A-Z]\w+\(", line)]
    assert calls == [
        "  block:1: Block", "    block.up:1: Linear", "  block:2: Block", "    block.up:2: Linear",
        "  odd: LayerNorm",
    ]  # fmt: skip
    for entry in trace.entries:
        if entry.kind != "state":
            assert any(f"{entry.label}: " in line for line in lines), entry
    trace.save(tmp_path / "saved")
    loaded = shown(bt.load(tmp_path / "saved"))
    assert [line.split("(")[0] for line in loaded.splitlines()[1:]] == [
        line.split("(")[0] for line in lines[1:]
    ]


def test_an_entry_says_what_is_not_as_usual() -> None:
    trace = bt.trace(Net(), torch.ones(1, 4), save="all", save_gradients=True)
    trace.output.sum().backward()
    text = shown(trace["relu_1:1"])
    assert text.startswith(f"<op {trace['relu_1:1'].label} (1, 8)(\n  kind='op',\n")
    assert "function='relu'" in text
    assert "  tensor_contents=float32[1, 8] from " in text
    assert "  grad_contents=float32[1, 8] from " in text
    assert "inplace" not in text
    assert "tensor_contents" not in shown(bt.trace(Net(), torch.ones(1, 4))["relu_1:1"])


def test_a_model_is_its_modules_and_what_was_done_with_it() -> None:
    bended = bt.BendedModule(Net())
    bended(torch.ones(1, 4))
    with bended.interject("block", print):
        text = shown(bended)
    assert "    block: Block(\n      up: Linear(in_features=4, out_features=8, bias=True)" in text
    assert f"  stats={bended.stats},\n" in text
    assert "insertions=[<" in text.replace("\n    ", "")
    assert "model=<built-in" in shown(bt.BendedModule(torch.relu))


def test_values_are_told_as_ranges_and_html_can_be_made() -> None:
    assert "treescope" in treescope.render_to_html(bt.trace(torch.exp, torch.ones(2)))
    assert "from 1 to 1, mean 1" in shown(bt.trace(torch.neg, -torch.ones(2), save="all"))


@pytest.mark.more
def test_treescope_is_never_imported_by_itself(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(
        "import sys, torch, bendtrace as bt\n"
        "trace = bt.trace(torch.exp, torch.ones(2))\n"
        "print(trace, trace['exp_1'], bt.BendedModule(torch.exp))\n"
        "assert 'treescope' not in sys.modules\n"
    )
    assert run_forked(tmp_path, "page.py") == 0
