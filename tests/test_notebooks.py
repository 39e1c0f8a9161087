"""The notebooks run, cell after cell, and are committed without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.documents import ROOT, needs, run_forked
from tests.environments import modules_of, modules_outside

pytestmark = pytest.mark.all

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# As IPython does, so that source text can be found.
RUN = """
import json, linecache, sys
namespace = {"__name__": "__main__"}
for number, source in enumerate(json.load(open("cells.json"))):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert codes
    assert not any(cell["outputs"] for cell in codes)
    named = needs("".join(cells[0]["source"]))
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in codes]))
    (tmp_path / "notebook.py").write_text(RUN)
    hidden = modules_outside(["ipython", *named])  # whoever opens a notebook has IPython
    status = run_forked(tmp_path, "notebook.py", hidden=hidden)
    assert status == 0, (tmp_path / "stderr").read_text("utf-8")
    imported = set((tmp_path / "modules").read_text("utf-8").split())
    assert [name for name in named if not modules_of(name) & imported] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_is_described_in_words(path: Path) -> None:
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        has_figure = re.search(r"plt\.subplots\(|^show\(", source, re.MULTILINE) is not None
        assert has_figure == ("alt" in cell["metadata"]), source
