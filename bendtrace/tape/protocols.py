"""The interfaces between a recorder and an inserter.

An *inserter* may add its own ops to a run, such as interjections; the recorder offers it a *stage*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from bendtrace.python.sites import Site
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall


class Stage(Protocol):
    """The interface that a recorder offers to an inserter."""

    @property
    def scope(self) -> ModuleCall:
        """The module call that the run is in."""

    def site(self, frame: FrameType) -> Site | None:
        """Return the site of `frame`."""

    def gate(self, function: Callable[..., Any], args: tuple[Any, ...], frame: FrameType) -> Any:
        """Record a call of `function` on the tape as one op, and return its result."""

    @property
    def follows_script(self) -> bool:
        """Return whether the run repeats earlier work (see `record/script.py`)."""

    @property
    def is_in_block(self) -> bool:
        """Return whether the run is in a block that the backward pass runs again."""

    def note_replacement(self, gate: Callable[[Any], Any]) -> None:
        """Note the gate that has let a function replace a result (see `pass_through`)."""

    def pass_through(
        self, function: Callable[[Any], Any], value: Tensor, scope: ModuleCall | None
    ) -> Any:
        """Let a function replace a result of a node, without another op.

        The scope is the call that returned it; None for an op. Return what the function returned;
        None if only an op can tell of it: the function was not called, or has returned a tensor
        that the run has already.
        """

    def guard_ownership(self, tensor: Tensor, frame: FrameType) -> None:
        """Guard that a tensor which a gate has returned is none that the model may compare to."""

    def block(self, reason: str) -> None:
        """Have the recording never be replayed."""

    def expect(self, truth: Any, frame: FrameType) -> bool:
        """Return a truth value from a gate; replays continue only while it is the same."""

    def state(self, tensor: Tensor) -> Captured | None:
        """Return the captured value for a tensor, if it existed before the run."""


class Inserter(Protocol):
    """Is called at each node of a run, and may emit ops before, after and instead of it."""

    pending: list[Sequence[Any]]  # the values that it needs again, once what is running is over
    code: Mapping[str, Any]  # what it has followed like the model's code, by name

    @property
    def sees_inputs(self) -> bool:
        """Return whether it may tell apart how the arguments of the function are passed."""

    def begins(self, stage: Stage) -> None:
        """Called before the run."""

    def starts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called with the arguments of the function; returns those to use."""

    def ends(self, output: Any, frame: FrameType) -> Any:
        """Called with the output of the function; returns the output of the run."""

    def ended(self) -> None:
        """Called after the function has returned or raised."""

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
        """Called before arithmetic on traced scalars is recorded on the tape."""

    def wants_inside(self, scope: ModuleCall) -> bool:
        """Return whether there are insertions inside the call of a module."""

    def inside(self, module: nn.Module, path: str) -> None:
        """Called when a module is called inside a function that is recorded as one op."""

    @property
    def exchanges_state(self) -> bool:
        """Return whether parameters or buffers are exchanged in the run."""

    def recomputed(self, entering: bool) -> None:
        """Called when a block begins or ends that the backward pass runs again, unwatched."""
