"""The path of a call in words: conditions as source text, and their outcomes."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bendtrace._places import file_text
from bendtrace.flow import (
    EscapeFlowStep,
    FlowStep,
    IndexFlowStep,
    LogicalFlowStep,
    LoopFlowStep,
    steps_of,
)
from bendtrace.recording.recorder import Recording
from bendtrace.tape.tape import OpKind, TensorMeta

__all__ = ["Condition", "Path", "PathNames"]

_MOST_KNOWN = 256  # recordings whose path is remembered; runs that are live have one each
_SHOWN = 8
_TEXTS = frozenset({"format", "repr", "str"})


@dataclass(frozen=True)
class Condition:
    """A place where values decided what the model's Python did next, and the outcome.

    Attributes:
        kind: the construct: "if", "while", "for", "index", ...
        text: source of the deciding expression.
        outcome: True or False for a branch; the number of iterations for a loop as a whole; the
            number for an index, or for a value that became a plain int.
        file: name of the source file, without directories.
        line: line in it, counted from 1.
        module: qualified name of the module whose forward was running.
        iteration: the iteration of each loop around it, counted from 0, outermost first.
        is_loop: whether it is a loop as a whole.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def halved(x):
        ...     return x / 2 if x.norm() > 1 else x
        >>> data = [torch.tensor([4.0]), torch.tensor([0.5])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(halved, data, where=(), out=directory, progress=False)
        ...     [(c.text, c.outcome) for path in found.paths for c in path.conditions]
        [('x.norm() > 1', True), ('x.norm() > 1', False)]
    """

    kind: str
    text: str
    outcome: bool | int
    file: str
    line: int
    module: str = ""
    iteration: tuple[int, ...] = ()
    is_loop: bool = False

    def row(self) -> list[Any]:
        """Return it as plain values, ready for JSON."""
        return list(vars(self).values())

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Condition:
        """Return the condition of a `row`."""
        kind, text, outcome, file, line, module, iteration, is_loop = row
        return cls(kind, text, outcome, file, line, module, tuple(iteration), is_loop)

    def __str__(self) -> str:
        if self.is_loop:
            many = "iteration" if self.outcome == 1 else "iterations"
            return f"{self.kind} {self.text}: {self.outcome} {many}"
        at = f" [{', '.join(str(number + 1) for number in self.iteration)}]" * bool(self.iteration)
        return f"{self.text}{at}: {self.outcome}"


@dataclass(frozen=True)
class Path:
    """A path through the model.

    Two batches are on the same path if all conditions have the same outcomes, and the same
    operations ran in the same order.

    Attributes:
        name: 12 hexadecimal digits, the same in each process and harvest of the same source.
        conditions: the conditions on the path, in order.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> def halved(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> data = [torch.tensor([4.0]), torch.tensor([0.5])]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = bt.harvest(halved, data, where=(), out=directory, progress=False)
        ...     [(str(path), found.counts[path.name]) for path in found.paths]
        [('while x.norm() > 1: 2 iterations', 1), ('while x.norm() > 1: 0 iterations', 1)]
    """

    name: str
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return _told(self.conditions)

    def told_apart(self, others: Iterable[Path]) -> str:
        """Return the conditions whose outcomes differ among some other paths.

        Args:
            others: the other paths; they may include this one.
        """
        known = [set(path.conditions) for path in others]
        if not known:
            return str(self)
        own = [c for c in self.conditions if not all(c in other for other in known)]
        return _told(own)


def _told(conditions: Sequence[Condition]) -> str:
    if not conditions:
        return "no condition"
    # The number of iterations stands for the tests of a loop.
    loops = {(c.file, c.line, c.text) for c in conditions if c.is_loop}
    rest = [c for c in conditions if c.is_loop or (c.file, c.line, c.text) not in loops]
    shown = "; ".join(map(str, rest[:_SHOWN]))
    more = len(rest) - _SHOWN
    return shown if more <= 0 else f"{shown}; and {more} more"


class PathNames:
    """Finds the paths of runs, and caches the latest."""

    def __init__(self) -> None:
        # By identity, with the run itself so that no identity is used twice.
        self._known: OrderedDict[int, tuple[Recording, Path]] = OrderedDict()
        self._joined: OrderedDict[tuple[str, ...], Path] = OrderedDict()

    def of(self, runs: Sequence[Recording]) -> Path:
        """Return the path of the consecutive runs of one batch."""
        if len(runs) == 1:
            known = self._known.get(id(runs[0]))
            return self._path(runs[0]) if known is None else known[1]
        paths = [self._path(run) for run in runs]
        key = tuple(path.name for path in paths)
        found = self._joined.get(key)
        if found is None:
            conditions = tuple(c for path in paths for c in path.conditions)
            found = self._joined[key] = Path(_digest([list(key)]), conditions)
            if len(self._joined) > _MOST_KNOWN:
                self._joined.popitem(last=False)
        return found

    def _path(self, run: Recording) -> Path:
        known = self._known.get(id(run))
        if known is None:
            known = self._known[id(run)] = run, _path_of(run)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return known[1]


def _path_of(run: Recording) -> Path:
    conditions = tuple(c for step in steps_of(run) if (c := _condition(step)) is not None)
    # Branches on other objects (an argument that is None) show in the ops that ran.
    carried_out = [
        [op.scope.path, getattr(op.target, "__name__", str(op.target))]
        for op in run.tape.ops
        if op.kind is OpKind.CALL
        and isinstance(op.meta, TensorMeta)
        and not getattr(op.target, "is_gate", False)
    ]
    return Path(_digest([[c.row() for c in conditions], carried_out]), conditions)


def _condition(step: FlowStep) -> Condition | None:
    outcome: Any = step.value
    is_loop = isinstance(step, LoopFlowStep)
    if isinstance(step, LoopFlowStep):
        outcome = step.iterations
    elif isinstance(step, LogicalFlowStep):
        outcome = outcome if type(outcome) in (bool, int) else bool(outcome)
    elif isinstance(step, IndexFlowStep):
        pass
    elif not isinstance(step, EscapeFlowStep) or step.kind in _TEXTS:
        return None
    if type(outcome) not in (bool, int):
        return None
    return Condition(
        step.kind, " ".join(step.text.split()), outcome, file_text(step.file), step.line,
        step.module_path, step.iteration, is_loop,
    )  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
