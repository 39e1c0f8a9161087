"""What bendtrace does on a GPU: `python -m tests.cuda`.

Without sections, all are run: promise, programs, operators, streams, memory, compiled, inserted,
waits. It ends with an error if anything is wrong. Without a GPU, `--device cpu` runs what needs
none. Where there are many cores, several processes may do a part each (`--share 0/8 --json FILE`),
and what they write is shown together (`--from-json FILES --page docs/cuda.md`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import bendtrace
from tests.cuda.page import SECTIONS, tables_of, write_page, wrong_in
from tests.cuda.rows import RIGHT, Options, Row
from tests.cuda.supervising import run_section
from tools.benchmarks.machine import processor
from tools.benchmarks.starting import version_of

__all__ = ["joined", "main", "tried"]

_NO_GPU = "torch sees no CUDA device here; to run without one, pass --device cpu"
_AT_THE_END = 20.0  # seconds for ending a process that hangs, and for writing


def tried(
    names: Sequence[str],
    options: Options,
    minutes: float,
    *,
    here: bool = False,
    keep: Callable[[dict[str, Any]], object] = len,
) -> dict[str, Any]:
    """Run sections, and return a report: plain data, which all tables are made of.

    Args:
        names: of the sections.
        options: what to try in them.
        minutes: how long all may take. A section has its share of what is left.
        here: whether to stay in this process.
        keep: is called with the report after each section.
    """
    begun = time.monotonic()
    end = begun + max(minutes * 60 - _AT_THE_END, 0.0)
    report: dict[str, Any] = {
        "device": options.device, "machine": _machine(options), "allowed": minutes,
        "minutes": 0.0, "sections": {},
    }  # fmt: skip
    shares = {name: SECTIONS[name][1] for name in SECTIONS if name in names}
    for name in list(shares):
        now = time.monotonic()
        until = now + max(end - now, 0.0) * shares[name] / sum(shares.values())
        del shares[name]
        rows = run_section(SECTIONS[name][0], options, until, _telling(name, begun), here=here)
        report["sections"][name] = [row.json() for row in rows]
        report["minutes"] = round((time.monotonic() - begun) / 60, 1)
        keep(report)
    return report


def _machine(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.on_cuda:
        device = torch.cuda.get_device_properties(options.device)
        found |= {
            "GPU": f"{device.name}, {device.total_memory / 2**30:.0f} GiB",
            "capability": f"{device.major}.{device.minor}", "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(), "triton": version_of("triton"),
        }  # fmt: skip
    else:
        found |= {"GPU": "none"}
    return found | {
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "Python": platform.python_version(), "torch": torch.__version__,
        "bendtrace": bendtrace.__version__, "transformers": version_of("transformers"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def _telling(section: str, begun: float) -> Callable[[Row], None]:
    def tell(row: Row) -> None:
        if row.outcome != RIGHT or section != "promise":
            took = time.monotonic() - begun
            print(f"{took:5.0f} s: {section}: {row}", file=sys.stderr, flush=True)

    return tell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write what was asked for; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--device", help="cuda if left out, or such as cuda:1 or cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="how long all may take")
    parser.add_argument("--cases", nargs="+", default=[], help="beginnings of names")
    parser.add_argument("--inductor", action="store_true", help="on the CPU as well")
    parser.add_argument("--here", action="store_true", help="in this process, without others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write it as Markdown, and JSON")
    parser.add_argument("--share", default="0/1", help="of the cases: 0/4 is the first of four")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="show what was found before"
    )
    given = parser.parse_args(arguments)
    for name in given.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}: there are {', '.join(SECTIONS)}")
    if given.from_json is not None:
        report = joined([json.loads(file.read_text()) for file in given.from_json])
    else:
        device = _device(given.device, parser)
        share = _share(given.share, parser)
        options = Options(device, given.inductor, tuple(given.cases), share)

        def keep(report: dict[str, Any]) -> None:
            if given.json is not None:
                given.json.write_text(json.dumps(report, indent=1) + "\n")

        report = tried(
            given.sections or list(SECTIONS), options, given.minutes, here=given.here, keep=keep
        )
    for table in tables_of(report):
        print(table.text(), end="\n\n")
    if given.page is not None:
        write_page(report, given.page)
    wrong = wrong_in(report)
    for row in wrong:
        print(f"wrong: {row.case}: {row.why}")
    print(f"{len(wrong)} wrong, in {report['minutes']} minutes on {report['device']}")
    return 1 if wrong else 0


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one report of several, which were made beside each other or in turn."""
    first, *others = reports
    report = {**first, "sections": {}}
    for section in SECTIONS:
        found = [one["sections"][section] for one in reports if section in one["sections"]]
        if found:
            report["sections"][section] = [row for rows in found for row in rows]
    for name in ("minutes", "allowed"):
        report[name] = round(first[name] + sum(other[name] for other in others), 1)
    return report


def _share(text: str, parser: argparse.ArgumentParser) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and int(number) < int(parts)):
        parser.error(f"--share takes two numbers, as 0/4 for the first of four; not {text!r}")
    return int(number), int(parts)


def _device(name: str | None, parser: argparse.ArgumentParser) -> str:
    """Return the device to run on, or end with a sentence that says why there is none."""
    chosen = name or "cuda"
    try:
        device = torch.device(chosen)
    except RuntimeError:
        parser.error(f"{chosen!r} is not a device: pass --device cuda or --device cpu")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"there is nothing for {chosen!r} here: pass --device cuda or --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(_NO_GPU)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"torch sees {torch.cuda.device_count()} CUDA devices here, and no {chosen}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
