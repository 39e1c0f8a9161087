"""Who may put ops of its own into a run: what interjects, for one."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from bendtrace.recording.parts import Part
from bendtrace.recording.sites import Site
from bendtrace.recording.tape import ModuleCall

__all__ = ["Inserter", "Stage"]


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

    def state(self, tensor: Tensor) -> Part | None:
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
