"""The table in the README that sets this beside others: each cell is what happens.

Cells with numbers are those of docs/performance.json, which `python -m tools.benchmarks` writes.
torchlens and nnsight are in the `bench` extra; without it their columns are not tried.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.documents import ROOT

PLAIN = "-"  # not what it is for


class Refine(nn.Module):
    """The model of the README, with an attribute that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: Tensor, tolerance: float = 1.0) -> Tensor:
        if x.shape[0] > 3:
            x = x[:3]
        while x.norm() > tolerance:
            x = x * self.step(x).sigmoid()
        return x


class Scaled(nn.Module):
    """What all of them can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


X = torch.ones(5, 4)


def made(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()


def trace_of(model: nn.Module, **options: Any) -> Any:
    torchlens = pytest.importorskip("torchlens", reason="needs the bench extra")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that numbers escape from its graph
        return torchlens.trace(model, [X], **options)


def nnsight_of(model: nn.Module) -> Any:
    return pytest.importorskip("nnsight", reason="needs the bench extra").NNsight(model)


# A `while` on values


def bendtrace_traces() -> str:
    trace = bt.trace(made(Refine), X)
    assert next(s.iterations for s in trace.flow_steps.of(bt.flow.LoopFlowStep)) == 2
    return "traced"


def hooks_run() -> str:
    model, seen = made(Refine), []
    model.step.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(X)
    assert len(seen) == 2
    return "run"


def torchlens_logs() -> str:
    log = trace_of(made(Refine))
    assert torch.equal(log.layers[-1].out, made(Refine)(X))
    return "logged"


def nnsight_runs() -> str:
    wrapped = nnsight_of(made(Refine))
    with wrapped.trace(X):
        output = wrapped.output.save()
    assert torch.equal(output, made(Refine)(X))
    return "run"


def fx_refuses() -> str:
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(made(Refine))
    return "refused"


def export_refuses() -> str:
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(made(Refine), (X,))
    return "refused"


def compile_breaks() -> str:
    torch._dynamo.reset()
    with torch.no_grad():
        explained = torch._dynamo.explain(made(Refine))(X)
    # With torch 2.15 and Python 3.14 nothing of it is compiled.
    assert explained.break_reasons or not explained.graphs
    return "in pieces"


# What an op gives that is no module, and a change of it that makes the model stop sooner


def zeroed_by_bendtrace() -> str:
    bended = bt.BendedModule(made(Refine))
    with bended.interject("sigmoid", torch.zeros_like):
        trace = bended.trace(X)
    assert next(s.iterations for s in trace.flow_steps.of(bt.flow.LoopFlowStep)) == 1
    assert not trace.output.any()
    return "followed"


def hooks_see_modules() -> str:
    assert "sigmoid" not in dict(made(Refine).named_modules())
    return "modules only"


def zeroed_by_torchlens() -> str:
    torchlens = pytest.importorskip("torchlens", reason="needs the bench extra")
    hooks = {torchlens.func("sigmoid"): lambda value, *, hook: value * 0}
    log = trace_of(made(Refine), capture=torchlens.options.CaptureOptions(hooks=hooks))
    assert not log.layers[-1].out.any()
    assert len(log.layers) < len(trace_of(made(Refine)).layers)
    return "followed"


def zeroed_by_nnsight() -> str:
    wrapped = nnsight_of(made(Refine))
    with wrapped.trace(X):
        wrapped.source.sigmoid_0.output[:] = 0
        output = wrapped.output.save()
    assert not output.any()
    return "followed"


# An attribute that is another one afterwards


def noticed(call: Callable[[Tensor], Tensor], model: Scaled) -> str:
    assert torch.equal(call(X), model(X))
    model.factor = 3.0
    return "noticed" if torch.equal(call(X), model(X)) else "**not noticed**"


def by_bendtrace() -> str:
    model = made(Scaled)
    return noticed(bt.BendedModule(model), model)


def by_hooks() -> str:
    model = made(Scaled)
    model.register_forward_hook(lambda module, inputs, output: None)
    return noticed(model, model)


def by_torchlens() -> str:
    model = made(Scaled)
    return noticed(lambda x: trace_of(model).layers[-1].out, model)


def by_nnsight() -> str:
    model = made(Scaled)
    wrapped = nnsight_of(model)

    def call(x: Tensor) -> Tensor:
        with wrapped.trace(x):
            output = wrapped.output.save()
        return output

    return noticed(call, model)


def by_fx() -> str:
    model = made(Scaled)
    return noticed(torch.fx.symbolic_trace(model), model)


def by_export() -> str:
    model = made(Scaled)
    return noticed(torch.export.export(model, (X,)).module(), model)


def by_compile() -> str:
    torch._dynamo.reset()
    model = made(Scaled)
    return noticed(torch.compile(model, backend="eager"), model)


# Without the model's Python


def without_python() -> str:
    file = io.BytesIO()
    torch.export.save(torch.export.export(made(Scaled), (X,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert torch.equal(loaded(X), made(Scaled)(X))
    assert not any(isinstance(module, Scaled) for module in loaded.modules())
    return "yes"


def by_bendtrace_without_python() -> str:
    """Run the model of the README, with its loop, in a process that has no source of it."""
    inputs = [(X * factor,) for factor in (0.1, 3.0, 50.0)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("model.pt2", "inputs.pt", "outputs.pt")]
        bt.BendedModule(made(Refine)).export(X, X * 9, X / 99, to=paths[0])
        torch.save(inputs, paths[1])
        runner = str(ROOT / "tests" / "export_runner.py")
        subprocess.run([sys.executable, "-I", runner, "pt2", *paths], check=True, cwd=folder)
        for args, (given,) in zip(inputs, torch.load(paths[2]), strict=True):
            assert torch.equal(given, made(Refine)(*args))
    return "yes"


# Measured

DATA = json.loads((ROOT / "docs" / "performance.json").read_text())["sections"]


def relative(model: str, way: str) -> Callable[[], str]:
    return lambda: f"{DATA['calls']['1'][model][way]['relative']['median']:.2f}x"


def relative_of_evening() -> str:
    """Return the range of the runs that the page of measurements names."""
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    told = re.search(r"Four runs of one evening gave (.*) for `bended` of the 20 gated", page)
    assert told is not None
    found = re.findall(r"([\d.]+)x", told[1])
    assert relative(GATED, "bended")() == f"{found[0]}x"
    return f"{min(found)}-{max(found)}x"


def cold(way: str) -> Callable[[], str]:
    return lambda: f"{DATA['starting']['cold'][way]['median']:.2g} s"


def logged(model: str, way: str) -> Callable[[], str]:
    return lambda: f"{DATA['tracing']['times'][model][way]['relative']['median']:.1f}x"


def refused(model: str, way: str) -> Callable[[], str]:
    def said() -> str:
        assert "refuses" in DATA["calls"]["1"][model][way]["reason"]
        return "refused"

    return said


GATED, IMAGES = "20 gated layers", "ResNet-18"
COLUMNS = (
    "bendtrace", "native hooks", "torchlens", "nnsight", "torch.fx", "torch.export",
    "torch.compile",
)  # fmt: skip
ROWS: dict[str, tuple[Callable[[], str] | None, ...]] = {
    "a `while` on values": (
        bendtrace_traces, hooks_run, torchlens_logs, nnsight_runs, fx_refuses, export_refuses,
        compile_breaks,
    ),
    "changing the output of a function, and so the path taken": (
        zeroed_by_bendtrace, hooks_see_modules, zeroed_by_torchlens, zeroed_by_nnsight, None,
        None, None,
    ),
    "an attribute of the model that is changed afterwards": (
        by_bendtrace, by_hooks, by_torchlens, by_nnsight, by_fx, by_export, by_compile,
    ),
    "running where the model's Python is not": (
        by_bendtrace_without_python, None, None, None, None, without_python, None,
    ),
    "a call, 20 gated layers": (
        relative_of_evening, relative(GATED, "native hooks"), None,
        relative(GATED, "nnsight"), refused(GATED, "torch.fx"), refused(GATED, "torch.export"),
        relative(GATED, "torch.compile"),
    ),
    "the same, compiled": (
        relative(GATED, "bended, inductor"), None, None, None, None, None,
        relative(GATED, "torch.compile"),
    ),
    "a call, ResNet-18, compiled where it can be": (
        relative(IMAGES, "bended, inductor"), relative(IMAGES, "native hooks"), None,
        relative(IMAGES, "nnsight"), relative(IMAGES, "torch.fx"),
        relative(IMAGES, "torch.export"), relative(IMAGES, "torch.compile"),
    ),
    "all values of a call logged, tiny transformer": (
        logged("tiny transformer", "trace, all saved"), None,
        logged("tiny transformer", "torchlens"), None, None, None, None,
    ),
    "from the import to a first output, tiny transformer": (
        cold("bended"), None, cold("torchlens"), cold("nnsight"), cold("torch.fx"),
        cold("torch.export"), cold("torch.compile"),
    ),
}  # fmt: skip
CELLS = [
    (row, column, check)
    for row, checks in ROWS.items()
    for column, check in zip(COLUMNS, checks, strict=True)
]


def table() -> dict[str, list[str]]:
    """Return the cells of the README's table, by row."""
    readme = (ROOT / "README.md").read_text("utf-8")
    text = readme.split("## Compared with other tools")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {first: rest for first, *rest in cells if not set(first) == {"-"}}


@pytest.mark.parametrize(
    ("row", "column", "check"), CELLS, ids=[f"{column}: {row}" for row, column, _ in CELLS]
)
def test_a_cell_says_what_happens(row: str, column: str, check: Callable[[], str] | None) -> None:
    said = table()[row][COLUMNS.index(column)]
    if column == "torchlens" and check is not None:  # it wraps torch's functions for good
        pytest.importorskip("torchlens", reason="needs the bench extra")
        place = COLUMNS.index(column)
        code = f"from tests.test_compared import ROWS; print(ROWS[{row!r}][{place}]())"
        told = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert said == told.stdout.strip()
    else:
        assert said == (PLAIN if check is None else check())


def test_the_table_has_these_rows_and_columns() -> None:
    rows = table()
    assert list(rows) == ["", *ROWS]
    assert rows[""] == list(COLUMNS)
