"""Exported models run where their source is not, on inputs that they were not exported from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bendtrace.errors import ExportError
from tests.export_elsewhere import TARGETS, outcome
from tests.export_models import MODELS
from tests.shares import some

# What has no form in a target, and what the error says.
REFUSED = {
    ("top-2 experts, gathered", "aoti"): "AOTInductor cannot compile it",
    ("top-2 experts, gathered", "onnx"): "ONNX cannot express it",
}
PAIRS = [(name, target) for name in MODELS for target in TARGETS]
CHEAP = [("solver", "pt2"), ("solver", "aoti"), ("solver", "onnx"), ("top-1 experts", "pt2")]


def require(target: str) -> None:
    if target == "onnx":
        for extra in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(extra, reason="needs the extra onnx")
    if target == "aoti" and shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")


@pytest.mark.parametrize(
    ("name", "target"), some([pair for pair in PAIRS if pair not in REFUSED], chosen=CHEAP)
)
def test_a_file_is_equal_to_the_model_on_a_thousand_inputs_never_seen(
    name: str, target: str, tmp_path: Path
) -> None:
    require(target)
    found = outcome(name, target, tmp_path, 1000)
    assert found.wrong == ()
    assert found.equal + found.refused == 1000
    assert found.equal > 900


@pytest.mark.parametrize(("name", "target"), some(list(REFUSED)))
def test_what_has_no_form_in_a_target_is_refused(name: str, target: str, tmp_path: Path) -> None:
    require(target)
    with pytest.raises(ExportError, match=REFUSED[name, target]):
        outcome(name, target, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
