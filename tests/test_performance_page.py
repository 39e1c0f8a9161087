"""The page of measurements has what its data says, and nothing that was written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.benchmarks import page

DOCS = page.DOCS
# What calls take after the first hundred, of native hooks or of the model itself, and how many
# runs are recorded.
CHANGED = {
    "12 gated layers, one node changed": (1.05, 6),
    "12 gated layers, all nodes changed": (1.33, 6),
    "while x.norm() > tol, the second pass changed": (0.93, 1),
    "rows that leave, one node changed": (1.40, 11),
}


def fed(after: float, traces: int) -> dict[str, Any]:
    """What is measured of a stream of 400 calls."""
    seconds = {"eager": [0.4] * 4, "other": [1.0, *[0.4 * after] * 3]}
    return {
        "calls": 400, "size": 100, "seconds": seconds, "traces": traces, "pairs": 25, "live": 0,
    }  # fmt: skip


def test_the_committed_page_shows_its_data() -> None:
    kept = json.loads((DOCS / "performance.json").read_text())
    text = (DOCS / "performance.md").read_text()
    assert page.filled(text, page.tables_of(kept), kept["machines"]) == text
    assert (DOCS / "measured" / "performance.svg").read_text() == page.figure(kept["sections"])


def test_each_table_of_the_page_is_between_marks() -> None:
    text = re.sub(
        r"<!-- table: [\w-]+ -->.*?<!-- end -->", "", (DOCS / "performance.md").read_text(),
        flags=re.DOTALL,
    )  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith("|")] == []


def test_changes_and_peaks_are_written_and_the_rest_stays(tmp_path: Path) -> None:
    for name in ("performance.md", "performance.json"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    peaks = {"OPT": {"native hook": 74 * 1024, "replay": 54.5 * 1024}}
    changes = {name: fed(*figures) for name, figures in CHANGED.items()}
    page.write_docs(
        {
            "machines": {"changes": {"processor": "of a test"}, "peaks": {}},
            "minutes": 1.0,
            "sections": {"changes": changes, "peaks": peaks},
        },
        tmp_path,
    )
    text = (tmp_path / "performance.md").read_text()
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    for name, (after, traces) in CHANGED.items():
        row = next(row for row in rows if row[0] == name)
        assert row[1:] == ["4.00 ms", "2.50x", *[f"{after:.2f}x"] * 2, str(traces), "25", "0"]
    assert ["OPT", "74.0 KiB", "54.5 KiB", "0.74x"] in rows
    assert "- **changes.** processor: of a test" in text
    before = json.loads((DOCS / "performance.json").read_text())["sections"]
    after_it = json.loads((tmp_path / "performance.json").read_text())["sections"]
    assert after_it == {**before, "changes": changes, "peaks": peaks}
