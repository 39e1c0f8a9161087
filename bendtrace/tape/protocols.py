"""The interfaces between a recorder and those who follow a run: watcher, observer, inserter.

A *watcher* receives what the calling thread reaches: its recorder, while it is recording. An
*observer* sees the values of a run while they exist: it keeps activations, for example. An
*inserter* may add its own ops to a run, such as interjections; the recorder offers it a *stage*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bendtrace.python.sites import Site
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall, Op


class Watcher(Protocol):
    """The interface that intercepts report to."""

    def module_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call as a scope."""

    def opaque_call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None = None
    ) -> Any:
        """Run `function(*args, **kwargs)` as one op, called in `frame` if given."""

    def draw(self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType) -> Any:
        """Draw random numbers of Python or numpy as one op, for code in `frame`."""

    def follow_classes(self, frame: FrameType) -> None:
        """Record calls of the classes of old that code has taken under other names."""

    def holds(self, thing: Any) -> bool:
        """Return whether the model holds an object, or is given it."""

    def printed(
        self, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType
    ) -> Any:
        """Print values to the screen, which each replay repeats."""

    def guard_text(self, text: str) -> str:
        """Return a text that is used after all, and guard the values in it."""

    def read(self, function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Query a fact of a tensor other than its values, and guard the answer."""

    def identified(self, tensor: torch.Tensor) -> None:
        """Record that code tells a tensor by its identity."""

    def unseen(self, what: str) -> None:
        """Record that the run does something that a replay could not repeat."""

    def recomputed(self, entering: bool) -> None:
        """Record that a block begins or ends that the backward pass runs again."""

    def checkpointed(self, function: Callable[..., Any], *settings: Any, **kwargs: Any) -> Any:
        """Return a generator that follows a block that the backward pass runs again, or None."""

    def forgot_casts(self) -> None:
        """Record that autocast clears its cache of cast weights."""

    def called_inside(self, module: nn.Module) -> None:
        """Record that a module is called by a function that is recorded as one op."""

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is noted of the code that runs: it is the tracer's."""

    def forget(self, *tensors: torch.Tensor) -> None:
        """Keep nothing that refers to these tensors."""


class Observer(Protocol):
    """Sees the values of a run. Its own torch operations are not recorded."""

    ended: str  # where the run was ended early; "" if it was not
    times: dict[int, int]  # nanoseconds that each op took; filled in by who carries them out

    def argument(self, op: Op, tensor: Tensor) -> None:
        """Called for each tensor among the arguments of the run."""

    def state(self, op: Op, tensor: Tensor) -> None:
        """Called at the first use of each tensor that existed before the run."""

    def reads(self, position: int, index: int, tensor: Tensor) -> None:
        """Called before a tensor is read that was written to after op `index` returned it.

        The reader is the op at a position of the tape, or the caller of the run, at its end.
        """

    def heeds(self, function: Any) -> bool:
        """Return whether it has to be notified before each call of a function without `out`."""

    def begins(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Called before an op runs, with the arguments of the function."""

    def gave(self, op: Op, out: Any) -> None:
        """Called with the result of an op."""

    def wrote(self, op: Op, tensor: Tensor) -> None:
        """Called with the tensor that an op has written to, if it returned none."""

    def module_starts(
        self, call: ModuleCall, given: Any, rewritten: Callable[[Tensor], int | None]
    ) -> None:
        """Called before a module's call begins.

        Args:
            call: the call.
            given: its arguments.
            rewritten: returns the op of a tensor that was written to since the op returned it.
        """

    def module_ends(
        self, call: ModuleCall, output: Any, rewritten: Callable[[Tensor], int | None]
    ) -> None:
        """Called when a module's call has ended; see `module_starts`."""

    def escaped(self, value: Any) -> None:
        """Called with a value that is passed to code that may keep a pointer to its memory."""


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

        Args:
            function: the function.
            value: the result.
            scope: the call that returned it; None for an op.

        Returns:
            What the function returned; None if only an op can tell of it: the function was not
            called, or has returned a tensor that the run has already.
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
