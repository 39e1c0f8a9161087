"""What was found, as tables and as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cuda.promising import GROUPS
from tests.cuda.rows import INCOMPARABLE, NOT_RUN, OUTCOMES, SKIPPED, WRONG, Row
from tools.benchmarks.table import Table

__all__ = ["SECTIONS", "page_of", "rows_of", "tables_of", "write_page", "wrong_in"]

COMMAND = "python -m tests.cuda"
# By name: the module, its share of the time, the title, and what there is to know.
SECTIONS: dict[str, tuple[str, float, str, str]] = {
    "promise": (
        "tests.cuda.promising", 0.30, "The promise",
        "Each model and its inputs are moved to the device. The model, its trace and its replays "
        "are called in turn. The test compares outputs, errors, arguments, state, and the random "
        "generators of the CPU and of each GPU, bit for bit. If two calls of the model itself "
        "differ, the comparison is repeated with deterministic algorithms.",
    ),
    "programs": (
        "tests.cuda.programs", 0.06, "Features of GPUs",
        "Casts, generators of the device, settings of kernels, streams, memory and CUDA graphs, in "
        "models of their own.",
    ),
    "operators": (
        "tests.cuda.operators", 0.08, "Operators",
        "The operators of torch's own tests, with up to three of torch's sample inputs: as "
        "functions, methods, operators and in place, without and with gradients, with other "
        "values, and in front of a data guard that fails. The numbers are calls of the "
        "`BendedModule`.",
    ),
    "streams": (
        "tests.cuda.streams", 0.10, "Streams",
        "A stream of random inputs leads a model with data-dependent control flow along many new "
        "paths. Each output is compared bit for bit. The ratios are the time of the "
        "`BendedModule`, including its traces, divided by that of the model. CUDA streams are a "
        "separate matter: `torch.cuda.stream` selects the one on which a call runs.",
    ),
    "memory": (
        "tests.cuda.memory", 0.06, "Memory",
        "The peak of one call, minus the memory in use before it. Tensors are counted op by op. "
        "The allocator's peak is `torch.cuda.max_memory_allocated`: the model's, the replay's, and "
        "their ratio. Data guards may keep values alive. Without them, a case is wrong if its peak "
        "is more than 1.1 times the model's.",
    ),
    "compiled": (
        "tests.cuda.compiling", 0.22, "Compiled paths",
        'Outputs are compared with the model\'s: bit for bit for `backend="eager"`, and within '
        "1e-3 relative and 1e-4 absolute otherwise. All outputs of a case are kept until its end, "
        "which would reveal a CUDA graph that overwrites them. A case is wrong if compiled code "
        "served none of its calls. `graphs passed over` counts how often torch.compile did not "
        "use CUDA graphs.",
    ),
    "inserted": (
        "tests.cuda.inserting", 0.10, "Insertions on compiled paths",
        "At 12 nodes of a model, spread evenly, a vector is patched in or added, or outputs are "
        "saved. The model with native hooks, a replay and a compiled call do the same, and are "
        "compared before they are timed in turn. The ratios are the time of the compiled call, "
        "divided by that of the other way.",
    ),
    "waits": (
        "tests.cuda.waiting", 0.08, "Waits",
        "The number of synchronisations per call. On every device, the profiler counts the values "
        "that Python reads (`aten::_local_scalar_dense`) and the sizes that depend on values "
        "(`aten::nonzero`). On a GPU, `waits` is the number of warnings of "
        '`torch.cuda.set_sync_debug_mode("warn")`. A replay must not have more than the model, '
        "and a compiled call reads its guards only once.",
    ),
}  # fmt: skip


def rows_of(report: Mapping[str, Any], section: str) -> list[Row]:
    """Return the rows of a section."""
    return [Row(**row) for row in report["sections"][section]]


def wrong_in(report: Mapping[str, Any]) -> list[Row]:
    """Return all rows that are wrong."""
    found = (row for section in report["sections"] for row in rows_of(report, section))
    return [row for row in found if row.outcome == WRONG]


def tables_of(report: Mapping[str, Any]) -> list[Table]:
    """Return the table of all outcomes, and those of each section."""
    every = [(SECTIONS[name][2], rows_of(report, name)) for name in report["sections"]]
    summary = Table(
        "summary", "All cases by outcome", ["section", "cases", *OUTCOMES],
        [[title, str(len(rows)), *_counts(rows)] for title, rows in every], _command(report),
    )  # fmt: skip
    made = [summary]
    for name in report["sections"]:
        made += _of_section(name, rows_of(report, name), f"{_command(report)} {name}")
    return made


def _command(report: Mapping[str, Any]) -> str:
    return COMMAND if _on_gpu(report) else f"{COMMAND} --device {report['device']}"


def _on_gpu(report: Mapping[str, Any]) -> bool:
    return str(report["device"]).startswith("cuda")


def _counts(rows: Iterable[Row]) -> list[str]:
    counts = Counter(row.outcome for row in rows)
    return [str(counts[outcome]) for outcome in OUTCOMES]


def _of_section(name: str, rows: Sequence[Row], command: str) -> list[Table]:
    title = SECTIONS[name][2]
    made: list[Table] = []
    if name == "operators":
        totals = {
            way: sum(row.numbers.get(way, 0) for row in rows)
            for way in dict.fromkeys(way for row in rows for way in row.numbers)
        }
        counts = [str(len(rows)), *_counts(rows), *map(str, totals.values())]
        made.append(Table(name, title, ["operators", *OUTCOMES, *totals], [counts], command))
    if name == "promise":
        groups = {group: [r for r in rows if r.case.startswith(f"{group}: ")] for group in GROUPS}
        headers = ["models", "cases", *OUTCOMES, "replays"]
        cells = [
            [GROUPS[group], str(len(found)), *_counts(found),
             str(sum(row.numbers.get("replays", 0) for row in found))]
            for group, found in groups.items() if found
        ]  # fmt: skip
        made.append(Table(name, title, headers, cells, command))
    measured = [row for row in rows if row.numbers and name not in ("promise", "operators")]
    # One table for each set of columns: no cell is empty.
    for number, headers in enumerate(dict.fromkeys(tuple(row.numbers) for row in measured)):
        cells = [
            [row.case, row.outcome, *map(str, row.numbers.values())]
            for row in measured if tuple(row.numbers) == headers
        ]  # fmt: skip
        table = f"{name}-{number}" if number else name
        made.append(Table(table, title, ["case", "outcome", *headers], cells, command))
    if said := [[row.case, row.outcome, row.why] for row in rows if row.why]:
        what = f"{title}, reasons"
        made.append(Table(f"{name}-said", what, ["case", "outcome", "why"], said, command))
    return made


def page_of(report: Mapping[str, Any]) -> str:
    """Return the whole page."""
    tables = tables_of(report)
    machine = "; ".join(f"{name}: {value}" for name, value in report["machine"].items())
    parts = [
        "# On a GPU", _status(report),
        "This page and [its data](cuda.json) come from one command. It takes at most "
        f"{report['allowed']:g} minutes, and ends with an error if anything is wrong:",
        f"```console\npip install -e \".[test]\"\n{_command(report)} --page docs/cuda.md\n```",
        "To run a single section, pass its name. Cases for which there was not enough time are "
        "listed as not run. Cases that do not apply to the device are listed as skipped. Cases "
        "where two calls of the model itself differ are listed as not comparable. Each has its "
        "reason.",
        f"{machine}; minutes: {report['minutes']}.",
        *report.get("notes", ()),
        tables[0].markdown(),
    ]  # fmt: skip
    for name in report["sections"]:
        _, _, title, about = SECTIONS[name]
        parts += [f"## {title}", about]
        parts += [t.markdown() for t in tables if t.name == name or t.name.startswith(f"{name}-")]
    return "\n\n".join(parts) + "\n"


def _status(report: Mapping[str, Any]) -> str:
    rows = [row for section in report["sections"] for row in rows_of(report, section)]
    counts = Counter(row.outcome for row in rows)
    left = (
        f"Of {len(rows):,} cases, {counts[WRONG]} {'is' if counts[WRONG] == 1 else 'are'} wrong, "
        f"{counts[INCOMPARABLE]} not comparable, "
        f"{counts[SKIPPED]} skipped and {counts[NOT_RUN]} not run."
    )
    if _on_gpu(report):
        return f"These are the results on {report['machine']['GPU']}. {left}"
    return (
        f"**No GPU has been tried.** This is a run with `--device {report['device']}`. It shows "
        "that the command works, but nothing about a GPU. On a machine with a GPU, omit "
        f"`--device`. {left}"
    )


def write_page(report: Mapping[str, Any], page: Path) -> None:
    """Write the page, and its data next to it."""
    page.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    page.write_text(page_of(report).replace("](cuda.json)", f"]({page.stem}.json)"))
