"""All benchmarks: `python -m tools.benchmarks`.

Without sections, all are measured: calls, tracing, inserting, leaving, streams, changes, peaks,
starting, growth, compiled, export. Whoever names streams gets changes, too.
Each way is checked before it is timed; what a way cannot do stands in its cell. `--write-docs` puts
what was found into docs/performance.md, together with its JSON and its figure. Of several reports
given to `--from-json`, each ratio is that of the run in the middle, beside the range of all runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bendtrace
from tools.benchmarks.changes import CHANGES
from tools.benchmarks.figure import figure
from tools.benchmarks.machine import processor
from tools.benchmarks.models import CASES, case_of
from tools.benchmarks.page import tables_of, write_docs
from tools.benchmarks.sections import SECTIONS, Options
from tools.benchmarks.starting import version_of
from tools.benchmarks.streams import STREAMS

__all__ = ["main", "measured", "middle"]


def measured(
    names: Sequence[str], options: Options, keep: Callable[[dict[str, Any]], object] = len
) -> dict[str, Any]:
    """Measure sections, and return a report: plain data, which all tables are made of.

    Args:
        names: of the sections.
        options: what to measure in them.
        keep: is called with the report after each section, should a later one fail.
    """
    begun = time.perf_counter()
    report: dict[str, Any] = {"machines": {}, "minutes": 0.0, "sections": {}}
    for section in SECTIONS:
        if section.name in names:
            report["sections"][section.name] = section.measure(options)
            report["machines"][section.name] = _machine(options)
            report["minutes"] = round((time.perf_counter() - begun) / 60, 1)
            keep(report)
    return report


def middle(runs: Sequence[Any]) -> Any:
    """Return a report that has, of several reports of the same sections, the ratios in the middle.

    Each has `runs`, the medians of all runs in order; everything else is from the first report.
    """
    first = runs[0]
    if len(runs) == 1 or not isinstance(first, (dict, list)):
        return first
    if isinstance(first, list):
        return [middle(each) for each in zip(*runs, strict=True)]
    if all("relative" in run for run in runs):
        ordered = sorted(runs, key=lambda run: run["relative"]["median"])
        medians = [run["relative"]["median"] for run in ordered]
        return {**ordered[(len(runs) - 1) // 2], "runs": medians}
    return {key: middle([run[key] for run in runs if key in run]) for key in first}


def _machine(options: Options) -> dict[str, Any]:
    peers = [f"{name} {version_of(name)}" for name in ("torchlens", "nnsight", "transformers")]
    return {
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "Python": platform.python_version(), "torch": torch.__version__,
        "bendtrace": bendtrace.__version__, "peers": ", ".join(peers),
        "rounds": options.rounds, "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each way and model, about")
    parser.add_argument("--threads", default="both", help="1, all, both, or a number")
    parser.add_argument("--models", nargs="+", help="beginnings of names; all if left out")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="the smallest models, hardly measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw it, as SVG")
    parser.add_argument("--write-docs", action="store_true", help="write it into docs/")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="show what was found before"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.sections if name not in names]
    if unknown:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(names)}")
    if given.from_json is not None:
        report = middle([json.loads(file.read_text()) for file in given.from_json])
    else:
        try:
            options = _options(given)
        except ValueError as error:
            parser.error(str(error))
        chosen = [*given.sections, "changes"] if "streams" in given.sections else given.sections
        report = measured(chosen or names, options, functools.partial(_keep, given.json))
    for table in tables_of(report):
        print(table.text(), end="\n\n")
    print(f"measured in {report['minutes']} minutes")
    if given.figure is not None:
        given.figure.write_text(figure(report["sections"]))
    if given.write_docs:
        write_docs(report)


def _keep(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


def _options(given: argparse.Namespace) -> Options:
    every = os.cpu_count() or 1
    threads = {"1": (1,), "all": (every,), "both": (1, every)}.get(given.threads)
    if threads is None:
        threads = (int(given.threads),)
    options = Options(
        rounds=given.rounds, seconds=given.seconds, threads=threads, peers=given.peers,
        quick=given.quick, tell=_telling(),
    )  # fmt: skip
    if given.quick:
        small = tuple(case.name for case in CASES if case.quick)
        streams = tuple(stream.name for stream in STREAMS if stream.quick)
        changes = tuple(change.name for change in CHANGES if change.quick)
        options = replace(
            options, rounds=1, seconds=0.1, threads=(1,), models=small, streams=streams,
            changes=changes, here=True,
        )  # fmt: skip
    if given.models:
        models, streams, changes = _chosen(given.models)
        options = replace(options, models=models, streams=streams, changes=changes)
    return options


def _chosen(beginnings: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the models, of those that are fed streams, and of changes, that begin so.

    Raises:
        ValueError: nothing begins with one of them.
    """
    models: list[str] = []
    streams: list[str] = []
    changes: list[str] = []
    for beginning in beginnings:
        fed = [stream.name for stream in STREAMS if stream.name.startswith(beginning)]
        changed = [change.name for change in CHANGES if change.name.startswith(beginning)]
        streams += fed
        changes += changed
        if not (fed or changed) or any(case.name.startswith(beginning) for case in CASES):
            models.append(case_of(beginning).name)
    return tuple(tuple(dict.fromkeys(names)) for names in (models, streams, changes))


def _telling() -> Callable[[str], None]:
    begun = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - begun:5.0f} s: {text}", file=sys.stderr, flush=True)

    return tell


if __name__ == "__main__":
    main()
