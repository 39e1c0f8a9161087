"""What can go wrong, as exceptions that carry what was known when it did."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bendtrace.flow import FlowStep

__all__ = [
    "BendError",
    "BendShapeError",
    "BendtraceError",
    "CompileWarning",
    "ConversionError",
    "DivergenceError",
    "HarvestError",
    "HookNameError",
    "InputError",
    "InterjectionError",
    "LayerKeyError",
    "LoadError",
    "NeverFiredWarning",
    "NoLayerError",
    "NodePathError",
    "NondeterminismError",
    "NotReplayableError",
    "PatchError",
    "RankDivergenceError",
    "SaveError",
    "SiteError",
    "TraceLimitWarning",
]


class BendtraceError(Exception):
    """Base of every error that bendtrace raises on purpose."""


class InputError(BendtraceError, ValueError):
    """Something handed to bendtrace is not what it can work with."""


class DivergenceError(BendtraceError, RuntimeError):
    """Inputs do not satisfy a guard of the one trace that was asked to serve them.

    Attributes:
        reason: what failed, in one line, with the recorded and the new value.
        step: the flow step whose guard failed, or None for guards on inputs and state.
    """

    def __init__(self, reason: str, step: FlowStep | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.step = step


class NotReplayableError(BendtraceError, RuntimeError):
    """A trace depends on something that no guard can watch, so only the real Python is right.

    Attributes:
        reasons: one line for each such thing, naming where it is in the source.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("this trace cannot be replayed: " + "; ".join(self.reasons))


class NondeterminismError(BendtraceError, RuntimeError):
    """Resuming a run, the model did other things than it did before with all guards equal.

    It depends on something bendtrace could not see (a clock, a file, a global that changes).
    Operations of the run may already have been carried out, so it cannot simply start anew.
    """


class RankDivergenceError(BendtraceError, RuntimeError):
    """Ranks of a process group were about to do different things where they have to act together.

    Every rank of the group raises it, in place of the collective that each of them came to.

    Attributes:
        group: the name of the process group.
        ranks: for each rank what it was about to do, and the branches by which it came there.
    """

    def __init__(self, group: str, told: Mapping[int, str]) -> None:
        self.group = group
        self.ranks = dict(sorted(told.items()))
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in self.ranks.items())
        super().__init__(f"the ranks of process group {group} do not agree:{lines}")

    def __reduce__(self) -> Any:
        return type(self), (self.group, self.ranks)


class ConversionError(BendtraceError, ValueError):
    """A graph holds something that the other form of graph cannot express."""


class NodePathError(BendtraceError, KeyError):
    """A node path names no node, or none that can be used there.

    Attributes:
        path: the path as given.
        completions: paths that exist where the given one went astray.
    """

    def __init__(self, message: str, path: str, completions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.completions = completions

    def __str__(self) -> str:  # KeyError would show it quoted
        return str(self.args[0])


class LayerKeyError(BendtraceError, KeyError):
    """A log has nothing under a key.

    Attributes:
        key: what was asked for.
        near: keys that look like it.
    """

    def __init__(self, message: str, key: object, near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.near = near

    def __str__(self) -> str:  # KeyError would show it quoted
        return str(self.args[0])


class HookNameError(BendtraceError, KeyError):
    """A hook manager has nothing of a name.

    Attributes:
        name: what was asked for.
        near: names that look like it.
    """

    def __init__(self, message: str, name: object, near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.near = near

    def __str__(self) -> str:  # KeyError would show it quoted
        return str(self.args[0])


class NoLayerError(InputError, AttributeError):
    """A family has no layer of that name."""


class InterjectionError(BendtraceError, TypeError):
    """What an interjection gave cannot take the place of the node's value.

    Attributes:
        path: the node.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class PatchError(InputError):
    """A patch does not fit the value at its node, or does with it what it must not.

    Attributes:
        path: path of the node; "" where a patch was called by itself.
        expected: what would have fitted: `Tensor(2, 3)`.
        got: what was there.
    """

    def __init__(self, message: str, *, path: str = "", expected: str = "", got: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class BendError(InputError):
    """A callback cannot bend what it is given.

    Attributes:
        path: node path of what was to be bent; "" if it has none.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BendShapeError(BendError):
    """A callback that has drawn its numbers for one shape met another.

    Attributes:
        old: the shape, or the sizes along the callback's `dim`, that it has numbers for.
        new: what it met.
        candidates: values of `dim` under which its numbers would fit both.
    """

    def __init__(
        self,
        message: str,
        path: str,
        old: tuple[int, ...],
        new: tuple[int, ...],
        candidates: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, path)
        self.old = old
        self.new = new
        self.candidates = candidates


class SiteError(InputError):
    """A value at a site cannot be exchanged as it was asked for.

    Attributes:
        site: the name of the site.
    """

    def __init__(self, message: str, site: str) -> None:
        super().__init__(message)
        self.site = site


class HarvestError(BendtraceError, RuntimeError):
    """A batch could not be harvested. What was done before is safe, and is gone on from.

    The error that the model, or a function that was given, has raised is its `__cause__`.

    Attributes:
        batch: number of the batch, counted from 0.
        ids: its samples; empty where the ids themselves could not be told.
    """

    def __init__(self, message: str, batch: int, ids: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.batch = batch
        self.ids = ids


class SaveError(BendtraceError, OSError):
    """Nothing was saved: the directory is not ours to write to, in use, or could not be written.

    What was saved there before is as it was.

    Attributes:
        path: the directory or file.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        super().__init__(f"cannot save to {self.path!r}: {reason}")


class LoadError(BendtraceError, ValueError):
    """A directory or file holds no save, or one that is damaged, unfinished or too new.

    Attributes:
        path: the directory or file.
        is_newer: whether it was written in a version of the format that is not known here.
    """

    def __init__(
        self, path: str | os.PathLike[str], reason: str, *, is_newer: bool = False
    ) -> None:
        self.path = os.fspath(path)
        self.is_newer = is_newer
        super().__init__(f"cannot load {self.path!r}: {reason}")


class CompileWarning(UserWarning):
    """The backend of a `BendedModule` does not work here.

    Nothing is wrong, but calls are replayed as they would be without a backend.
    """


class NeverFiredWarning(UserWarning):
    """The context of an insertion has ended, and no run came by a node that it is for."""


class TraceLimitWarning(UserWarning):
    """A model has taken more paths than its `BendedModule` keeps.

    Nothing is wrong, but calls that are traced again and again are slower than the model itself.
    The message names what makes it diverge so often.
    """
