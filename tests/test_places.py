"""Places in source files as text: of files, and of the cells of notebooks."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython
import pytest
import torch
from IPython.core.compilerop import CachingCompiler
from torch import nn

import bendtrace as bt
from bendtrace.python import sites as _places
from bendtrace.python.sites import is_file, place_text, read_place
from bendtrace.show.viewer import viewer_data

FILE = "/tmp/ipykernel_7/230483096.py"
SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        if x.sum() > 0:
            x = self.linear(x)
        for _ in range(int(x.shape[0])):
            x = x.relu()
        if x.mean() > 100:
            x = x.exp()
        return x
"""


class Kernel(CachingCompiler):
    """Compiles cells as IPython's kernel does, under the name of a file that there is not."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return FILE


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    compiler = Kernel()
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setattr(_places, "_loaded", {})
    yield compiler
    linecache.cache.pop(FILE, None)


def run_cell(kernel: Kernel, number: int = 3) -> nn.Module:
    """Run a cell that defines a model, and return one."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, kernel.cache(SOURCE, number), "exec"), namespace)
    model: nn.Module = namespace["Net"]()
    return model


def test_every_form_names_the_cell(kernel: Kernel) -> None:
    model = run_cell(kernel)
    bended = bt.BendedModule(model)
    bended(torch.ones(2, 3))
    trace = bt.trace(model, torch.ones(2, 3), save="all")
    bended(-torch.ones(2, 3))
    relu = trace["relu_1:1"]
    assert str(relu.source) == "Cell In[3]:13"
    with pytest.raises(bt.BendtraceError) as caught:
        bended.interject("exp", lambda value: value)
    forms = {
        "log": str(trace),
        "layer": str(relu),
        "table of steps": trace.flow_steps.table(),
        "step": repr(trace.flow_steps[0]),
        "guards": str(trace.guards),
        "code of a node": str(trace.tree["relu"]._code),
        "tree": str(trace.tree._show(flow=True)),
        "picture": trace.draw().svg,
        "viewer": trace.to_html(),
        "coverage": str(bended.coverage()),
        "mismatch": str(bended.last_mismatch),
        "stepped run": str(bended.step(torch.ones(2, 3))),
        "diff": str(bt.diff(trace, bt.trace(model, -torch.ones(2, 3)))),
        "error": str(caught.value),
    }
    assert not [form for form, text in forms.items() if "230483096" in text]
    assert not [form for form, text in forms.items() if "Cell In[3]" not in text]
    # The viewer still has the lines around a place.
    (file,) = viewer_data(trace)["files"]
    assert file["path"] == "Cell In[3]"
    assert file["lines"][13] == "            x = x.relu()"


def test_a_cell_that_ran_again_has_its_latest_number(kernel: Kernel) -> None:
    trace = bt.trace(run_cell(kernel), torch.ones(2, 3))
    run_cell(kernel, 9)
    assert str(trace["relu_1:1"].source) == "Cell In[9]:13"


def test_cells_are_named_in_selectors_and_stepped_runs(kernel: Kernel) -> None:
    model = run_cell(kernel)
    trace = bt.trace(model, torch.ones(2, 3))
    for written in ("Cell In[3]:13", "In[3]:13"):
        (node,) = bt.node_selector.find(bt.node_selector.at_line(written), trace)
        assert node.path == "relu"
        run = bt.BendedModule(model).step(torch.ones(2, 3))
        assert run.goto(written).position == run.goto(line=13).position == run.goto("relu").position
    assert not bt.node_selector.find(bt.node_selector.at_line("In[4]:13"), trace)


def test_a_saved_run_names_its_cells_where_the_notebook_is_gone(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bt.trace(run_cell(kernel), torch.ones(2, 3)).save(tmp_path / "run")
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert place_text(FILE, 13) == "230483096.py:13"
    loaded = bt.load(tmp_path / "run")
    assert str(loaded["relu_1:1"].source) == "Cell In[3]:13"
    assert str(loaded.tree["relu"]._code).startswith("Cell In[3], line 13, in forward")
    assert "Cell In[3]:10" in loaded.flow_steps.table()


@pytest.mark.parametrize(
    "shell",
    [None, SimpleNamespace(), SimpleNamespace(compile=compile)],
    ids=["none", "without a compiler", "with another compiler"],
)
def test_files_keep_their_names_elsewhere(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert place_text("/home/me/model.py", 12) == "model.py:12"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model.py:41", ("model.py", 41)),
        ("/home/me/model.py:41", ("/home/me/model.py", 41)),
        ("Cell In[3]:7", ("Cell In[3]", 7)),
        ("In[3]:7", ("Cell In[3]", 7)),
        ("<stdin>:2", ("<stdin>", 2)),
        ("x.sum() > 0", None),
        ("relu:2", None),
        (".py:2", None),
    ],
)
def test_a_place_is_read_from_text(text: str, place: tuple[str, int] | None) -> None:
    assert read_place(text) == place


@pytest.mark.parametrize(
    ("asked", "same"),
    [("model.py", True), ("me/model.py", True), ("odel.py", False), ("other/model.py", False)],
)
def test_a_file_is_named_by_the_end_of_its_path(asked: str, same: bool) -> None:
    assert is_file("/home/me/model.py", asked) is same
