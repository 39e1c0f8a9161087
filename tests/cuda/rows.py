"""What is asked for, and what is said about a case."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = [
    "INCOMPARABLE", "NOT_RUN", "OUTCOMES", "RIGHT", "SKIPPED", "WRONG", "Options", "Row",
    "line_of", "without_cuda",
]  # fmt: skip

RIGHT, WRONG, INCOMPARABLE, SKIPPED, NOT_RUN = OUTCOMES = (
    "right", "wrong", "not comparable", "skipped", "not run"
)  # fmt: skip
_LONGEST = 300


@dataclass(frozen=True)
class Options:
    """What to try.

    Attributes:
        device: where, as torch calls it.
        inductor: whether to compile with inductor on the CPU as well.
        only: beginnings of the names of cases; all if empty.
        share: which part of the cases to try, and how many parts there are.
    """

    device: str = "cpu"
    inductor: bool = False
    only: tuple[str, ...] = ()
    share: tuple[int, int] = (0, 1)

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Return the names of the cases that are asked for, in their order."""
        chosen = [name for name in names if not self.only or name.startswith(self.only)]
        number, parts = self.share
        return chosen[number::parts]

    def prepare(self) -> None:
        """Have the device, and its random generator, in use from the beginning."""
        if self.on_cuda:
            torch.cuda.init()
            torch.cuda.set_device(torch.device(self.device).index or 0)

    def synchronize(self) -> None:
        """Wait until the device has done what it was told to do."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Row:
    """What became of a case.

    Attributes:
        case: its name.
        outcome: one of `OUTCOMES`.
        why: what there is to say about it; never empty unless it is right.
        numbers: what was measured, by the header of its column.
    """

    case: str
    outcome: str
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value}" for name, value in self.numbers.items())
        return "  ".join(part for part in (self.outcome, self.case, self.why, numbers) if part)


def line_of(error: object) -> str:
    """Return a message, or an error with its type, in one line that is not too long.

    Example:
        >>> line_of(ValueError("no such file: /opt/lib/site-packages/some/file.py"))
        'ValueError: no such file: some/file.py'
    """
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return re.sub(r"/\S*site-packages/", "", " ".join(text.split()))[:_LONGEST]


def without_cuda(name: str, what: str) -> Row:
    """Return a row that says what is not there on the CPU."""
    return Row(name, SKIPPED, f"needs a GPU: {what}")
