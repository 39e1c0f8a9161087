"""Exported models run where their source is not, on inputs that they were not exported from."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.errors import ExportError, InputError
from bendtrace.export import targets
from bendtrace.export.exporting import difference
from bendtrace.export.targets import with_distinct_outputs
from tests.export_elsewhere import TARGETS, outcome
from tests.export_models import MODELS
from tests.shares import some

# Each case takes seconds: the README's command leaves them out.
pytestmark = pytest.mark.more

# What has no form in a target, and what the error says.
# Beams of one score, of which a sum that is rounded otherwise picks others: value 0.
TIED = {("beam search", "aoti"), ("beam search", "onnx")}
PAIRS = [(name, target) for name in MODELS for target in TARGETS]


def require(target: str) -> None:
    if target == "onnx":
        for extra in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(extra, reason="needs the extra onnx")
    if target == "aoti" and shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")


@pytest.mark.parametrize(("name", "target"), some(PAIRS))
def test_a_file_is_equal_to_the_model_on_a_thousand_inputs_never_seen(
    name: str, target: str, tmp_path: Path
) -> None:
    require(target)
    found = outcome(MODELS[name], target, tmp_path, 1000)
    tied = [one for one in found.wrong if (name, target) in TIED and ": value 0 is off" in one]
    assert found.wrong == tuple(tied)
    assert found.equal + found.refused + len(tied) == 1000
    assert found.equal > (850 if tied else 990)


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


@pytest.mark.more
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


# Conditions on inputs, which each target checks


def for_even(x: Tensor) -> Tensor:
    return (x * 2 if x.size(0) % 2 == 0 else x) * (1 if x.sum() > 0 else 2)


def for_rows(x: Tensor) -> Tensor:
    for row in range(x.shape[0]):
        x = x + x[row] * 0.1
    return x.softmax(0) if x.sum() > 0 else x * 2


def for_many(x: Tensor) -> Tensor:
    return x * 2 if x.flatten().shape[0] > 3 else x


def for_pairs(x: Tensor, y: Tensor) -> Tensor:
    return x + y if x.sum() > 0 else x - y


def for_equal(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + y.sum() if x.shape[0] == y.shape[0] else x.sum() * y.sum()


def for_one(x: Tensor, y: Tensor) -> Tensor:
    return x * 100 if x is y else x + y


def for_flag(x: Tensor, flag: bool) -> Tensor:
    return x * 2 if flag and x.sum() > 0 else x


def for_none(x: Tensor, y: Tensor | None) -> Tensor:
    return x * (2 if x.sum() > 0 else 3) if y is None else x + y


def for_text(x: Tensor, mode: str) -> Tensor:
    return x.relu() if mode == "relu" and x.sum() > 0 else x * 2


def for_integers(x: Tensor) -> Tensor:
    count = x.max().to(torch.int64).item()
    return x + (24 // count + 7 % count if count > 3 else count)


def for_layout(x: Tensor) -> Tensor:
    return x * x.stride(1) * (1 if x.is_contiguous() else 2)


def for_marks(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) * (2 if x.is_conj() else 1)


class Marked(Tensor):
    pass


def with_attribute(x: Tensor) -> Tensor:
    x = x.clone()
    x.scale = 2  # type: ignore[attr-defined]
    return x


X = torch.linspace(0.1, 2, 24).reshape(6, 4)
Y = X + 1
Z = torch.ones(2, 3, dtype=torch.complex64)
CONDITIONS: dict[str, tuple[Any, Any, Any, list[Any]]] = {
    # a model, the inputs that it is exported from, some that it takes, and some that it refuses
    "an even size": (for_even, [(X,), (-X,)], [(X[:4],)], [(X[:5],), (X[:0],)]),
    "a fixed size": (for_rows, [(X,), (-X,)], [(X * 2,)], [(X[:5],), (X[:0],)]),
    "a product of sizes": (for_many, [(X,)], [(X[:1],)], [(X[:1, :1].clone(),)]),
    "equal sizes": (for_pairs, [(X, Y), (-X, Y)], [(X[:3], Y[:3])], [(X, Y[:5])]),
    "a dtype": (for_even, [(X,), (-X,)], [(X,)], [(X.double(),)]),
    "a rank": (for_even, [(X,), (-X,)], [(X,)], [(X[0],)]),
    "sizes that are compared": (for_equal, [(X, Y)], [(X[:3], Y[:3])], [(X, Y[:5])]),
    "one object": (for_one, [(X, X)], [(Y, Y)], [(X, Y), (X, X.clone())]),
    "two objects": (for_one, [(X, Y)], [(Y, X)], [(X, X)]),
    "a side never seen": (for_even, [(X,)], [(Y,)], [(-X,)]),
    "integers": (for_integers, [(X * 2,), (X,)], [(Y * 2,)], [(X * 1e10,)]),
    "None": (for_none, [(X, None), (-X, None)], [(Y, None)], [(X, Y)]),
    "a number": (for_flag, [(X, True)], [(Y, True)], [(X, False), (X, 1)]),
    "a text": (for_text, [(X, "relu")], [(Y, "relu")], [(X, "none")]),
    "a layout": (for_layout, [(X,)], [(X[:3],)], [(X.t().contiguous().t(),), (X[1:],)]),
    "a mark": (for_marks, [(Z,)], [(Z * 2,)], [(Z.conj(),)]),
    "a class": (for_even, [(X,), (-X,)], [(Y,)], [(Y.as_subclass(Marked),), (with_attribute(X),)]),
}
# What other targets refuse to be exported from, or receive no inputs with.
ONLY = {"a number": "pt2 onnx", "a text": "pt2 onnx", "a layout": "pt2", "a mark": "pt2"}
ONLY["a class"] = "pt2"
CHECKED = [
    (name, target)
    for name, target in itertools.product(CONDITIONS, TARGETS)
    if target in ONLY.get(name, target)
]


def loaded(path: Path) -> Any:
    if path.name.endswith(".onnx"):
        return bt.export.OnnxProgram(path)
    if path.name.endswith(".aoti.pt2"):
        return torch._inductor.aoti_load_package(path)
    return torch.export.load(path).module()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    ("name", "target"),
    some(CHECKED, chosen=[("an even size", "onnx"), ("sizes that are compared", "onnx")]),
)
def test_each_target_refuses_inputs_that_break_a_condition(
    name: str, target: str, tmp_path: Path
) -> None:
    require(target)
    model, calls, good, bad = CONDITIONS[name]
    path = tmp_path / f"model{TARGETS[target]}"
    bt.BendedModule(model).export(*calls, to=path)
    program = loaded(path)
    for args in good:
        assert difference(program(*args), [model(*args)], 1e-5) is None
    # Some of the words are those of torch, and of onnxruntime.
    words = "requires|Guard failed|mismatch|nvalid|expected|argument|Attempting|always|too large"
    for args in bad:
        with pytest.raises(Exception, match=words):
            program(*args)


@pytest.mark.all
@pytest.mark.parametrize("x", [Y.t().contiguous().t(), torch.ones(6, 8)[:, :4], X[:0]])
def test_a_package_does_not_read_memory_that_lies_otherwise(x: Tensor, tmp_path: Path) -> None:
    require("aoti")
    bt.BendedModule(for_rows).export(X, to=tmp_path / "model.aoti.pt2")
    with pytest.raises(RuntimeError, match="the package requires"):
        loaded(tmp_path / "model.aoti.pt2")(x)


@pytest.mark.more
def test_conditions_that_a_file_cannot_check_are_refused(tmp_path: Path) -> None:
    for model, args, ending, words in (
        (for_flag, (X, True), "aoti.pt2", "takes tensors only, and would ignore another value"),
        (for_text, (X, "relu"), "aoti.pt2", "takes tensors only, and would ignore another value"),
        (for_layout, (X,), "onnx", "which only a .pt2 file can check"),
        (for_layout, (X,), "aoti.pt2", "which only a .pt2 file can check"),
        (for_marks, (Z,), "onnx", "which only a .pt2 file can check"),
        (for_marks, (Z,), "aoti.pt2", "which only a .pt2 file can check"),
    ):
        require(ending.removesuffix(".pt2"))
        with pytest.raises(ExportError, match=words):
            bt.BendedModule(model).export(args, to=tmp_path / f"model.{ending}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_an_onnx_file_tells_any_runtime_of_sizes_that_have_to_be_equal(tmp_path: Path) -> None:
    require("onnx")
    path = tmp_path / "model.onnx"
    bt.BendedModule(for_equal).export((X, Y), (X[:3], Y[:3]), to=path)
    session = bt.export.OnnxProgram(path).session
    names = [one.name for one in session.get_inputs()]
    for rows, columns in ((4, 4), (3, 3), (4, 3), (3, 4)):
        values = X[:rows].numpy(), Y[:columns].numpy()
        *_, unseen = session.run(None, dict(zip(names, values, strict=True)))
        assert bool(unseen) == (rows != columns)


@pytest.mark.more
def test_an_onnx_program_is_called_as_the_model(tmp_path: Path) -> None:
    require("onnx")

    def model(x: Tensor, *, low: Tensor, high: Tensor) -> Tensor:
        return x.clamp(low, high)

    low, high = torch.tensor(0.5), torch.tensor(1.0)
    path = tmp_path / "model.onnx"
    bt.BendedModule(model).export(((X,), {"low": low, "high": high}), to=path)
    program = bt.export.OnnxProgram(path)
    assert torch.equal(program(X, low=low, high=high)[0], model(X, low=low, high=high))
    with pytest.raises(InputError, match="the model takes arguments at"):
        program(X, high=high, low=low)
    with pytest.raises(InputError, match="the model takes arguments at"):
        program(X, low, high)


@pytest.mark.more
def test_what_onnxruntime_cannot_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    require("onnx")
    model = torch.nn.Linear(3, 3).bfloat16()
    words = r"onnxruntime cannot run it: convert the model with to\(torch.float32\)"
    with pytest.raises(ExportError, match=words):
        bt.BendedModule(model).export(torch.ones(2, 3).bfloat16(), to=tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_rounded_sizes_and_vectors_go_to_onnx(tmp_path: Path) -> None:
    require("onnx")

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        total = x[:, 0]
        if rows > 1 and total.sum() > 0:  # onnxruntime computes x.T @ v wrongly
            total = x.relu().T @ total
        return x * -(-rows // 2) + (2 - rows) // columns, total

    file = tmp_path / "model.onnx"
    bt.BendedModule(model).export(torch.rand(4, 3), to=file)
    program = bt.export.OnnxProgram(file)
    for x in (torch.rand(5, 3), torch.rand(6, 4), torch.rand(7, 3)):
        assert difference(program(x), model(x), 1e-5) is None


@pytest.mark.more
def test_sizes_in_a_branch_go_to_onnx(tmp_path: Path) -> None:
    """A condition with a maximum in it, and a size that a weight before the branch fixes."""
    require("onnx")

    def split(x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, 2, d // 2).transpose(1, 2).reshape(b, t, d) if x.sum() > 0 else x

    def fixed(x: Tensor) -> Tensor:
        b, t, d = x.shape
        x = x @ torch.eye(8)
        return x.reshape(b * t, d).view(b, t, d) if x.sum() > 0 else x

    x = torch.rand(2, 5, 8)
    for number, model in enumerate((split, fixed)):
        file = tmp_path / f"{number}.onnx"
        bt.BendedModule(model).export(x, -x, to=file)
        other = torch.rand(3, 4, 8)
        torch.testing.assert_close(bt.export.OnnxProgram(file)(other)[0], model(other))
