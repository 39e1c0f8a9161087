"""Writing what was measured into the page: tables between markers, the JSON, and the figure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.benchmarks.budgets import table_of_budgets
from tools.benchmarks.figure import figure
from tools.benchmarks.sections import SECTIONS
from tools.benchmarks.table import Table

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


Machines = Mapping[str, Mapping[str, Any]]


def machines_text(machines: Machines) -> str:
    """Return on which machine each section was measured, or a part of one (`calls: guards`)."""
    groups: dict[str, list[str]] = {}
    for label, machine in machines.items():
        told = "; ".join(f"{name}: {value}" for name, value in machine.items())
        groups.setdefault(told, []).append(label)
    return "\n".join(f"- **{', '.join(labels)}.** {told}" for told, labels in groups.items())


def filled(text: str, tables: Sequence[Table], machines: Machines) -> str:
    """Return the page with the tables between its markers.

    `<!-- table: name -->` up to `<!-- end -->` holds a table, `calls` those of all numbers of
    threads, and `machines` what measured which section. Where there is no such table it is left
    as it was.
    """
    made: dict[str, list[str]] = {}
    for table in tables:
        group = table.name.rpartition("-")[0] if table.name.startswith("calls-") else table.name
        made.setdefault(group, []).append(table.markdown())
    made["machines"] = [machines_text(machines)]

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
        before = json.loads(data.read_text())
        machines = report["machines"] | {
            label: machine
            for label, machine in before["machines"].items()
            if label.partition(":")[0] not in report["sections"]
        }
        order = [section.name for section in SECTIONS]
        labels = sorted(machines, key=lambda label: order.index(label.partition(":")[0]))
        report = {
            **report,
            "machines": {label: machines[label] for label in labels},
            "sections": before["sections"] | report["sections"],
        }
    page.write_text(filled(page.read_text(), tables_of(report), report["machines"]))
    data.write_text(json.dumps(report, indent=1) + "\n")
    (docs / "measured").mkdir(exist_ok=True)
    (docs / "measured" / "performance.svg").write_text(figure(report["sections"]))
