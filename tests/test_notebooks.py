"""The notebooks run, cell after cell, and are committed without outputs."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

pytestmark = pytest.mark.all

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert codes
    assert not any(cell["outputs"] for cell in codes)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(codes):
        source = "".join(cell["source"])
        name = f"<{path.stem} cell {number}>"
        # As IPython does, so that source text can be found.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
    plt.close("all")  # the figures of all notebooks would be too many
