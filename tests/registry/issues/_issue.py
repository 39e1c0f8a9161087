"""What an issue is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.registry.program import Program, add
from tools.scoreboard.case import Drive

__all__ = ["REGISTRY", "Issue", "issue"]


@dataclass(frozen=True)
class Issue:
    """A program after an issue.

    Attributes:
        repository: whose tracker it is in.
        number: its number there.
        about: what went wrong, in our words.
        drive: the program, which is ours.
        inductor: whether only generated kernels were wrong.
    """

    repository: str
    number: int
    about: str
    drive: Drive
    inductor: bool = False

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"{self.repository}#{self.number}"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


REGISTRY: dict[str, Issue] = {}


def issue(
    number: int, about: str, repository: str = "pytorch/pytorch", *, inductor: bool = False
) -> Callable[[Drive], Drive]:
    """Register a program."""

    def adding(drive: Drive) -> Drive:
        made = Issue(repository, number, about, drive, inductor)
        if made.name in REGISTRY:
            raise ValueError(f"{made.name} is there twice")
        REGISTRY[made.name] = made
        if not inductor:
            add(Program(f"issues.{made.name}", drive, frozenset({"issue"})))
        return drive

    return adding
