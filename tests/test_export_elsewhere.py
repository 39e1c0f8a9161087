"""Exported models run where their source is not, on inputs that they were not exported from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.errors import ExportError
from bendtrace.export import targets
from bendtrace.export.distinct import with_distinct_outputs
from bendtrace.export.exporting import difference
from tests.export_elsewhere import TARGETS, outcome
from tests.export_models import MODELS
from tests.shares import some

# What has no form in a target, and what the error says.
REFUSED = {
    ("top-2 experts, gathered", "aoti"): "AOTInductor cannot compile it",
    ("top-2 experts, gathered", "onnx"): "ONNX cannot express it",
}
PAIRS = [(name, target) for name in MODELS for target in TARGETS]


def require(target: str) -> None:
    if target == "onnx":
        for extra in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(extra, reason="needs the extra onnx")
    if target == "aoti" and shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")


@pytest.mark.parametrize(("name", "target"), some(pair for pair in PAIRS if pair not in REFUSED))
def test_a_file_is_equal_to_the_model_on_a_thousand_inputs_never_seen(
    name: str, target: str, tmp_path: Path
) -> None:
    require(target)
    found = outcome(name, target, tmp_path, 1000)
    assert found.wrong == ()
    assert found.equal + found.refused == 1000
    assert found.equal > 990


@pytest.mark.all
@pytest.mark.parametrize(("name", "target"), REFUSED)
def test_what_has_no_form_in_a_target_is_refused(name: str, target: str, tmp_path: Path) -> None:
    require(target)
    with pytest.raises(ExportError, match=REFUSED[name, target]):
        outcome(name, target, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = x - 1, x + 1, x * 2
    while x.norm() > 1:
        if x.sum() > 0:
            x = x * 0.5
            a, b, c = x + 1, x + 1, (x + 1).clone()
        else:
            x = x * 0.25
            a, b, c = x - 1, x + 1, x * 2
    return a, b, c


def test_values_that_subgraphs_return_twice_are_separated() -> None:
    inputs = [torch.ones(3) * scale for scale in (0.1, 3.0, -9.0, 20.0)]
    program = bt.BendedModule(twice).export(*inputs).program
    made = with_distinct_outputs(program)
    for x in inputs:
        assert difference(made.module()(x), twice(x)) is None
    wheres = [
        sum(node.target is torch.ops.aten.where.self for node in module.graph.nodes)
        for one in (program, made)
        for _, module in one.graph_module.named_modules()
    ]
    before, after = wheres[: len(wheres) // 2], wheres[len(wheres) // 2 :]
    assert sum(after) > sum(before)


@pytest.mark.all
def test_a_package_whose_subgraphs_return_a_value_twice(tmp_path: Path) -> None:
    require("aoti")
    inputs = [torch.ones(3) * scale for scale in (0.1, 3.0, -9.0, 20.0)]
    bt.BendedModule(twice).export(*inputs, to=tmp_path / "model.aoti.pt2")


def test_a_package_that_ends_its_process_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(targets, "_IN_ANOTHER_PROCESS", code)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda *_, **__: None)
    path = tmp_path / "model.aoti.pt2"
    with pytest.raises(ExportError, match="ends its process by signal 11: no file"):
        bt.BendedModule(twice).export(torch.ones(3), to=path)
    assert list(tmp_path.iterdir()) == []
