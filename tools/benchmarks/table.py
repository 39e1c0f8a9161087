"""Cells and tables, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

__all__ = ["Table", "amount", "duration", "ratio"]


@dataclass(frozen=True)
class Table:
    """A table with what is said about it.

    Attributes:
        name: by which the page knows it.
        title: what it shows.
        headers: of the columns.
        rows: their cells.
        command: what measures it again.
        notes: what else has to be known.
    """

    name: str
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    command: str
    notes: str = ""

    def text(self) -> str:
        """Return it as it is printed."""
        body = tabulate(
            self.rows, self.headers, disable_numparse=True,
            maxcolwidths=[None, *[18] * (len(self.headers) - 1)],
            maxheadercolwidths=[None, *[14] * (len(self.headers) - 1)],
        )  # fmt: skip
        return "\n".join(part for part in (self.title, body, self.notes) if part)

    def markdown(self) -> str:
        """Return it as it stands in the page."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        body = tabulate(rows, self.headers, disable_numparse=True, tablefmt="github")
        parts = [f"{self.title}: `{self.command}`", body, self.notes]
        return "\n\n".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Say a time with three digits.

    Example:
        >>> duration(0.00123), duration(12.345), duration(4.2e-6)
        ('1.23 ms', '12.3 s', '4.20 us')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def ratio(cell: dict[str, Any] | None) -> str:
    """Say how a way compares with eager: the median, and the quartiles or the range of runs."""
    if cell is None:
        return "not measured"
    if "reason" in cell:
        return str(cell["reason"])
    found = cell["relative"]
    if runs := cell.get("runs"):
        return f"{found['median']:.2f}x ({runs[0]:.2f}-{runs[-1]:.2f} in {len(runs)} runs)"
    return f"{found['median']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"


def amount(size: float) -> str:
    """Say a number of bytes.

    Example:
        >>> amount(61440), amount(3_000_000)
        ('60.0 KiB', '2.86 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{_digits(size)} {unit}"
        size /= 1024
    return f"{_digits(size)} GiB"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"
