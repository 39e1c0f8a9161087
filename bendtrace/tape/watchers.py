"""Who follows a run while it is recorded: its recorder, observers of values, inserters of ops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bendtrace.source.sites import Site
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall, Op

__all__ = [
    "Inserter",
    "Observer",
    "Stage",
    "StopRun",
    "Watcher",
    "current_watcher",
    "note_call",
    "set_around",
    "set_watcher",
    "unwatched",
]


# Who is told what the calling thread reaches: its recorder, while it is recording.


class Watcher(Protocol):
    """What the boundaries report to."""

    def module_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call as a scope."""

    def opaque_call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None = None
    ) -> Any:
        """Run `function(*args, **kwargs)` as one op, called in `frame` if that is given."""

    def printed(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType
    ) -> Any:
        """Print values to the screen, which a replay does anew."""

    def told(self, text: str) -> str:
        """Return a text that somebody looks at after all, and guard the values in it."""

    def read(self, function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Ask something of a tensor that is not its values, and guard the answer."""

    def unseen(self, what: str) -> None:
        """Note that the run reaches something that a replay could not repeat."""

    def recomputed(self, entering: bool) -> None:
        """Note that a block begins or ends that the backward pass runs again."""

    def forgot_casts(self) -> None:
        """Note that autocast forgets the weights that it has cast."""

    def wants_inside(self) -> bool:
        """Whether the module that runs must not be carried out by one fused op."""

    def called_inside(self, module: nn.Module) -> None:
        """Note that a module is called by a function that is recorded as one op."""

    def forget(self, *tensors: torch.Tensor) -> None:
        """Keep nothing that refers to these tensors."""


class _Local(threading.local):
    watcher: Watcher | None = None
    around: Watcher | None = None  # of the function that is carried out as one op


_local = _Local()


def current_watcher() -> Watcher | None:
    """Return the recorder of the calling thread, if it is recording."""
    return _local.watcher


def set_watcher(watcher: Watcher | None) -> Watcher | None:
    """Report what the calling thread does to `watcher` from now on; return the one before."""
    before, _local.watcher = _local.watcher, watcher
    return before


def unwatched(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function without reporting what it calls in turn: it is an op itself."""
    outer, _local.watcher = _local.watcher, None
    try:
        return function(*args, **kwargs)
    finally:
        _local.watcher = outer


def set_around(watcher: Watcher | None) -> Watcher | None:
    """Tell `watcher` of modules that are called while nobody watches; return the one before."""
    before, _local.around = _local.around, watcher
    return before


def note_call(module: nn.Module) -> None:
    """Tell who wants to know that a module is called unwatched."""
    if _local.around is not None:
        _local.around.called_inside(module)


# Who is shown the values of a run while they are there: what keeps activations, for one.


class StopRun(BaseException):
    """Ends a run early; raised by an observer, and by nothing else.

    Not an `Exception`, so that the model's own handlers let it pass.
    """


class Observer(Protocol):
    """Is shown the values of a run. What it does with torch is not recorded."""

    ended: str  # where the run was ended early; "" if it was not
    times: dict[int, int]  # nanoseconds that each op took; filled in by who carries them out

    def given(self, op: Op, tensor: Tensor) -> None:
        """Called for each tensor among the arguments of the run."""

    def state(self, op: Op, tensor: Tensor) -> None:
        """Called for each tensor that was there before the run, when it is first used."""

    def reads(self, position: int, index: int, tensor: Tensor) -> None:
        """Called with a tensor that was written to since op `index` gave it, before it is read.

        By the op at a position of the tape, or by the caller of the run, at its end.
        """

    def heeds(self, function: Any) -> bool:
        """Whether it has to be told each time before a function is called without an `out`."""

    def begins(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Called before an op is carried out, with what the function is given."""

    def gave(self, op: Op, out: Any) -> None:
        """Called with what an op gave."""

    def wrote(self, op: Op, tensor: Tensor) -> None:
        """Called with the tensor that an op has written to, if it gave none."""

    def left(self, call: ModuleCall, output: Any) -> None:
        """Called when a module's call has ended."""

    def escaped(self, value: Any) -> None:
        """Called with what is handed to code that may keep a pointer to its memory."""


# Who may put ops of its own into a run: what interjects, for one.


class Stage(Protocol):
    """What a recorder lets an inserter do."""

    @property
    def scope(self) -> ModuleCall:
        """The module call that the run is in."""

    def site(self, frame: FrameType) -> Site | None:
        """Where `frame` is."""

    def gate(self, function: Callable[..., Any], args: tuple[Any, ...], frame: FrameType) -> Any:
        """Put a call of `function` on the tape as one op, and return what it gives."""

    def expect(self, truth: Any, frame: FrameType) -> bool:
        """Return a truth that a gate has given, and have replays go on only while it holds."""

    def state(self, tensor: Tensor) -> Captured | None:
        """Return the part that a tensor is, if it was there before the run."""


class Inserter(Protocol):
    """Is asked at each node of a run, and may emit ops before, after and instead of it."""

    def begins(self, stage: Stage) -> None:
        """Called before the run."""

    def starts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called with what the function is about to be given; returns what it is given."""

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Called with what the function gave; returns what the run gives."""

    def module(
        self,
        scope: ModuleCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        run: Callable[[ModuleCall, tuple[Any, ...], dict[str, Any]], Any],
    ) -> Any:
        """Run the call of a module."""

    def op(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any], FrameType], Any],
    ) -> Any:
        """Run the call of a function."""

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Called before arithmetic on traced scalars is put on the tape."""

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Whether there is something to insert in what the call of a module consists of."""

    def inside(self, module: nn.Module, path: str) -> None:
        """Called where a module is called inside of a function that is recorded as one op."""

    def recomputed(self, entering: bool) -> None:
        """Called where a block begins or ends that the backward pass runs again, unwatched."""
