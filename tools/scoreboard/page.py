"""The page, its data and its figure, written from results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from tools.benchmarks.table import Table
from tools.scoreboard.case import KINDS
from tools.scoreboard.suites import SUITES, Suite
from tools.scoreboard.ways import OURS, ways

__all__ = ["OUTCOMES", "Report", "figure", "summary", "write_page"]

# What can become of a case, and its colour.
OUTCOMES = {
    "right": "#3f7d20", "refused": "#c9c9c9", "wrong": "#c62828", "crashed": "#6a1b9a",
    "hung": "#edae49",
}  # fmt: skip
_COMMAND = "python -m tools.scoreboard"
_HEADS = (
    "", "programs", "right", "refused", "silently wrong", "crashed", "hung",
    "right on the traced input", "on other inputs", "after a change",
)  # fmt: skip
# Suites whose programs were chosen for what one of the ways is good or bad at.
_CHOSEN = ("issues", "corpus", "random")
_SIGNS = {"right": "right", "wrong": "**wrong**", "refused": "refused", "crashed": "crashed",
          "hung": "hung"}  # fmt: skip


@dataclass
class Report:
    """What was found.

    Attributes:
        about: what was run, where and when.
        counts: how many cases have each outcome, by suite and way.
        calls: how many calls were right and how many there were, by suite, way and kind of call.
        issues: the outcome of each issue, by way.
        faults: our cases that are not right, and why.
        invalid: cases that eager itself does not run, by suite.
        live: cases of ours in which a call ran the model itself, by suite.
        live_calls: how many calls of ours ran the model itself, by suite.
        why_live: how many of them have each reason, the most frequent first.
    """

    about: dict[str, Any]
    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    calls: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict)
    issues: dict[str, dict[str, str]] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    invalid: dict[str, int] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    live_calls: dict[str, int] = field(default_factory=dict)
    why_live: dict[str, int] = field(default_factory=dict)

    def totals(self, without: Collection[str] = ()) -> dict[str, Counter[str]]:
        """Return how many cases have each outcome, by way.

        Args:
            without: suites to leave out.
        """
        found: dict[str, Counter[str]] = {}
        for suite, of_suite in self.counts.items():
            for way, counts in of_suite.items() if suite not in without else ():
                found.setdefault(way, Counter()).update(counts)
        return found

    def calls_of(self, way: str, kind: str, without: Collection[str] = ()) -> tuple[int, int]:
        """Return how many calls of a kind a way got right, and how many there were."""
        found = [c[way][kind] for suite, c in self.calls.items()
                 if suite not in without and way in c]  # fmt: skip
        return sum(right for right, _ in found), sum(calls for _, calls in found)

    def main_table(self, name: str, title: str, without: Collection[str] = ()) -> Table:
        """Return a table with a row for each way."""
        rows = []
        for way, counts in self.totals(without).items():
            cells = [str(counts[outcome]) for outcome in OUTCOMES]
            shares = [_share(*self.calls_of(way, kind, without)) for kind in KINDS]
            rows.append([way, str(sum(counts.values())), *cells, *shares])
        return Table(name, title, _HEADS, rows, _COMMAND)

    def suite_tables(self) -> list[tuple[Suite, Table]]:
        """Return a table for each suite."""
        found = []
        for suite in SUITES:
            if suite.name in self.counts:
                rows = [
                    [way, str(sum(counts.values())), *(str(counts.get(o, 0)) for o in OUTCOMES)]
                    for way, counts in self.counts[suite.name].items()
                ]
                command = f"{_COMMAND} --suite {suite.name}"
                found.append((suite, Table(suite.name, suite.name, _HEADS[:7], rows, command)))
        return found

    def live_table(self) -> Table:
        """Return how many programs bendtrace does not replay, by suite."""
        rows = []
        for suite, of_suite in self.counts.items():
            if number := sum(of_suite.get(OURS, {}).values()):
                calls = sum(count for _, count in self.calls[suite][OURS].values())
                live = self.live_calls.get(suite, 0)
                share = f"{live / max(1, calls):.1%}"
                rows.append(
                    [suite, str(number), str(self.live.get(suite, 0)), str(calls), str(live), share]
                )
        heads = ("suite", "programs", "with live calls", "calls", "live", "share")
        return Table("live", "Live", heads, rows, _COMMAND)

    def issue_table(self) -> Table:
        """Return the table of the issues of others."""
        from tests.registry.issues import ISSUES

        shown = list(self.totals())
        rows = []
        for issue in ISSUES:
            if issue.name in self.issues:
                outcomes = self.issues[issue.name]
                told = f"{issue.about} (in generated kernels)" if issue.inductor else issue.about
                cells = [_SIGNS.get(outcomes.get(way, ""), "") for way in shown]
                rows.append([f"[{issue.name}]({issue.url})", told, *cells])
        return Table("each", "Each issue", ["issue", "what was wrong there", *shown], rows,
                     f"{_COMMAND} --suite issues")  # fmt: skip

    def text(self) -> str:
        """Return what is printed."""
        if not self.counts:
            return "nothing was run"
        told = [self.main_table("all", "All programs").text()]
        told.append(self.live_table().text())
        told += [f"{count} live: {why}" for why, count in [*self.why_live.items()][:12]]
        told += [f"{f['suite']} {f['case']}: {f['outcome']}: {f['why']}" for f in self.faults]
        if self.about["not run"]:
            told.append(f"{self.about['not run']} were not run: the same command goes on with them")
        return "\n".join(told)


def summary(results: Sequence[dict[str, Any]], about: dict[str, Any]) -> Report:
    """Count results.

    Args:
        results: what became of each case with each way.
        about: what was run, where and when.
    """
    report = Report(about)
    bad = {(r["suite"], r["case"]) for r in results if r["outcome"] == "invalid"}
    reasons: Counter[str] = Counter()
    report.invalid = dict(Counter(suite for suite, _ in bad))
    for result in results:
        if (result["suite"], result["case"]) in bad:
            continue
        suite, way, outcome = result["suite"], result["way"], result["outcome"]
        counts = report.counts.setdefault(suite, {}).setdefault(way, {})
        counts[outcome] = counts.get(outcome, 0) + 1
        calls = report.calls.setdefault(suite, {}).setdefault(way, {k: [0, 0] for k in KINDS})
        for kind in KINDS:
            calls[kind][0] += result["right"].get(kind, 0)
            calls[kind][1] += result["calls"].get(kind, 0)
        if suite == "issues":
            report.issues.setdefault(result["case"], {})[way] = outcome
        if way == OURS and outcome != "right":
            named = {key: str(result[key]) for key in ("suite", "case", "outcome", "why")}
            report.faults.append(named)
        if way == OURS and result.get("live"):
            report.live[suite] = report.live.get(suite, 0) + 1
            report.live_calls[suite] = report.live_calls.get(suite, 0) + result["live"]
            reasons[_group(result["why_live"])] += 1
    report.why_live = dict(reasons.most_common())
    return report


def _group(reason: str) -> str:
    """Return a reason without the places and names that differ from program to program."""
    reason = re.sub(r"(?: \(see [^)]*\)| \(in [^)]*\)| at \S+:\d+)", "", reason)
    return re.sub(r"\bself(?:[.\[][\w.\[\]']+)", "self...", reason)


def write_page(report: Report, page: Path) -> None:
    """Write the page, its data beside it, and its figure in `measured`."""
    picture = page.parent / "measured" / f"{page.stem}.svg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(figure(report))
    data = page.with_suffix(".json")
    data.write_text(json.dumps(vars(report), indent=1) + "\n")
    page.write_text(_page(report, picture.relative_to(page.parent).as_posix(), data.name))


def _page(report: Report, picture: str, data: str) -> str:
    about = dict(report.about)
    left_out, not_run = about.pop("left out"), about.pop("not run")
    note = about.pop("note", None)
    ours = report.totals().get(OURS, Counter())
    number = sum(ours.values())
    parts = [
        "# Scoreboard",
        "The same programs run in eager, with bendtrace, and with others: which of them are right, "
        f"which refuse, and which are silently wrong? Of {number} programs bendtrace is right on "
        f"{ours['right']}, refuses {ours['refused']}, and is silently wrong on {ours['wrong']}. "
        f"{ours['crashed'] + ours['hung']} crash or hang.",
        f"This page, [its data]({data}) and its figure are written by one command:",
        '```console\npip install -e ".[test]" torchlens\n'
        f"{_COMMAND} --quick --paritybench PATH --page docs/scoreboard.md\n```",
        "`--quick` takes some programs of each suite, spread evenly, and at most five minutes. "
        "Without it all programs run, which takes hours; a run that is ended goes on where it was. "
        "Each program runs in a process that may crash or hang.",
        "; ".join(f"{name}: {value}" for name, value in about.items()) + ".",
    ]
    if note:
        parts.append(note)
    if left_out:
        told = "; ".join(f"{name} ({why})" for name, why in left_out.items())
        parts.append(f"Left out: {told}.")
    if not_run:
        parts.append(f"The time was not enough for {not_run} runs.")
    if report.invalid:
        told = ", ".join(f"{count} of {suite}" for suite, count in report.invalid.items())
        parts.append(f"Not counted, since eager itself does not run them here: {told}.")
    parts += [
        f"![What became of the programs, by way]({picture})",
        report.main_table("all", "All programs").markdown(),
        _CHOICE,
        report.main_table("others", "Without these three suites", _CHOSEN).markdown(),
    ]
    parts += ["## How it is counted", _COUNTED, _ways_told(str(about.get("backend")))]
    parts.append("## By suite")
    for suite, table in report.suite_tables():
        parts += [suite.about, table.markdown()]
    if report.faults:
        parts += ["## Where bendtrace is not right", "\n".join(
            f"- {fault['suite']}, `{fault['case']}`: {fault['outcome']}: {_code(fault['why'])}"
            for fault in report.faults)]  # fmt: skip
    if report.live:
        parts += ["## Where bendtrace runs the model itself", report.live_table().markdown(), _LIVE]
        told = [f"- {count}: {_code(why)}" for why, count in [*report.why_live.items()][:12]]
        parts.append("\n".join(told))
    if report.issues:
        parts += ["## Issues of others", _ISSUES, report.issue_table().markdown()]
    return "\n\n".join(parts) + "\n"


_COUNTED = """\
A program makes several calls: the first one, which is the one that is captured, calls with other
inputs, and calls before which something has changed: a parameter, a mode, a global, an attribute,
a dtype. What eager returns, raises and writes is computed at the same time, and is the truth. A
program is **right** if all its calls are. It is **silently wrong** if a call returns, or writes,
something else than in eager, and says nothing. It is **refused** if a call raises an error that
eager does not raise; later calls are not made then, and do not count as right.

bendtrace has to agree with eager bit for bit, in strides, types and object identities as well.
The others have to agree in dtype, in shape, and in values up to rounding (`rtol=1e-3`), and an
error counts as right wherever eager raises any."""

_CHOICE = """\
The numbers above say nothing about how often a library is wrong. The programs of the issues were
chosen because another library was silently wrong on them; the corpus and the random programs were
written to test bendtrace. The others were written elsewhere, and for other purposes."""

_LIVE = """\
A call that no replay can stand for runs the model's own Python, and `why_live` says why. Such a
call is right, and takes as long as in eager. The reasons, the most frequent first:"""

_ISSUES = """\
Each program was written for this page from what an issue describes; none was copied. Many of the
issues have been closed since: the table says what happens with the versions above."""


def _ways_told(backend: str) -> str:
    lines = [f"- **{way.name}**: {way.note}" for way in ways(backend)]
    told = "What each way is:"
    more = (
        "A graph of torch.export, torch.fx or make_fx is not meant to follow what changes around "
        "it, and their documentation says so: the column on changes counts what a user who does "
        "not know that would not notice. With `--backend inductor` torch.compile also generates "
        "kernels, which takes many times as long. TorchLens records each call anew."
    )
    return "\n".join([told, "", *lines, "", more])


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def _share(right: int, calls: int) -> str:
    return f"{right} of {calls}" if calls else ""


# The figure

_WIDTH, _LEFT, _ROW = 860, 190, 30


def figure(report: Report) -> str:
    """Return the outcomes as bars, a row for each way, as SVG."""
    totals = report.totals()
    height = 46 + _ROW * len(totals) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    x = float(_LEFT)
    for outcome, colour in OUTCOMES.items():
        said = "silently wrong" if outcome == "wrong" else outcome
        parts.append(f'<rect x="{x:.0f}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="24">{said}</text>')
        x += 40 + 7 * len(said)
    for number, (way, counts) in enumerate(totals.items()):
        top = 40 + _ROW * number
        parts.append(
            f'<text x="{_LEFT - 10}" y="{top + 17}" text-anchor="end">{escape(way)}</text>'
        )
        x, whole = float(_LEFT), max(1, sum(counts.values()))
        for outcome, colour in OUTCOMES.items():
            width = (_WIDTH - _LEFT - 20) * counts[outcome] / whole
            if not width:
                continue
            title = escape(f"{way}: {counts[outcome]} {outcome}")
            parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" '
                         f'fill="{colour}"><title>{title}</title></rect>')  # fmt: skip
            if width > 24:
                ink = "#222" if outcome == "refused" else "white"
                parts.append(f'<text x="{x + width / 2:.1f}" y="{top + 15}" text-anchor="middle" '
                             f'fill="{ink}">{counts[outcome]}</text>')  # fmt: skip
            x += width
    return "\n".join([*parts, "</svg>", ""])
