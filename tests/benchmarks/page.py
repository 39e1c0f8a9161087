"""Writing what was measured into the page: tables between markers, the JSON, and the figure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.budgets import table_of_budgets
from tests.benchmarks.figure import figure
from tests.benchmarks.sections import SECTIONS
from tests.benchmarks.table import Table

__all__ = ["DOCS", "filled", "tables_of", "write_docs"]

DOCS = Path(__file__).parent.parent.parent / "docs"
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables_of(report: Mapping[str, Any]) -> list[Table]:
    """Return all tables of a report, the budgets first."""
    measured = report["sections"]
    tables = [table_of_budgets(measured)]
    for section in SECTIONS:
        if section.name in measured:
            tables += section.tables(measured[section.name])
    return tables


def filled(text: str, tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return the page with the tables between its markers.

    `<!-- table: name -->` up to `<!-- end -->` holds a table, `calls` those of all numbers of
    threads, and `machine` what the machine is. Where there is no such table it is left as it was.
    """
    made: dict[str, list[str]] = {}
    for table in tables:
        group = table.name.rpartition("-")[0] if table.name.startswith("calls-") else table.name
        made.setdefault(group, []).append(table.markdown())
    made["machine"] = ["; ".join(f"{name}: {value}" for name, value in machine.items()) + "."]

    def exchanged(found: re.Match[str]) -> str:
        begun, name, end = found.groups()
        if name not in made:
            return found.group()
        return begun + "\n" + "\n\n".join(made[name]) + "\n\n" + end

    return _MARKED.sub(exchanged, text)


def write_docs(report: Mapping[str, Any], docs: Path = DOCS) -> None:
    """Write the page's tables, its JSON and its figure; sections not measured stay as they were."""
    page, data = docs / "performance.md", docs / "performance.json"
    if data.exists():
        before = json.loads(data.read_text())["sections"]
        report = {**report, "sections": before | report["sections"]}
    page.write_text(filled(page.read_text(), tables_of(report), report["machine"]))
    data.write_text(json.dumps(report, indent=1) + "\n")
    (docs / "measured").mkdir(exist_ok=True)
    (docs / "measured" / "performance.svg").write_text(figure(report["sections"]))
