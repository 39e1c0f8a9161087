"""Trace: one recorded run of a model, and how to look at it and repeat it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from tabulate import tabulate
from torch import fx, nn

from bendtrace.errors import DivergenceError, NotReplayableError
from bendtrace.flow import FlowSteps, flow_steps
from bendtrace.graph.fx import to_fx
from bendtrace.graph.mirror import Graph, mirror
from bendtrace.graph.names import node_names
from bendtrace.recording.iterations import user_code
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature, record
from bendtrace.recording.tape import Guard, ModuleCall, Op
from bendtrace.replay.ambience import Ambience
from bendtrace.replay.analysis import GuardKind
from bendtrace.replay.explain import explain_check, explain_divergence
from bendtrace.replay.program import Divergence, Program

__all__ = ["Trace", "trace"]


def trace(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a module, bound method or function on real inputs and record what happens.

    Args:
        function: what to run. It is not changed, and runs as it would without the tracer.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        The record of the run. `Trace.output` is what `function` returned.

    Raises:
        Exception: whatever `function` raises, as it is.

    Example:
        >>> import torch, bendtrace as bt
        >>> def scaled(x):
        ...     return x / x.norm() if x.norm() > 1 else x
        >>> trace = bt.trace(scaled, torch.full((4,), 2.0))
        >>> trace.flow_steps[0].value
        True
        >>> trace.replay(torch.full((9,), 3.0)).shape
        torch.Size([9])
    """
    ambience = Ambience.current()
    signature = Signature(function)
    return Trace(record(function, args, kwargs, signature), ambience, signature, function)


class Trace:
    """The record of one run: ops, flow steps, guards and module calls.

    Not made by hand: `bendtrace.trace` and `BendedModule.trace` return one.

    Attributes:
        recording: what the recorder left.
        function: what was run.
        output: what it returned; None for a trace that a `BendedModule` made when called.
    """

    def __init__(
        self,
        recording: Recording,
        ambience: Ambience,
        signature: Signature,
        function: Callable[..., Any],
        program: Program | None = None,
    ) -> None:
        self.recording = recording
        self.function = function
        self.output = recording.result
        self._ambience = ambience
        self._signature = signature
        if program is not None:
            self.__dict__["program"] = program

    @property
    def ops(self) -> list[Op]:
        """The recorded calls, in order."""
        return self.recording.tape.ops

    @property
    def module_calls(self) -> list[ModuleCall]:
        """The calls of modules, in the order in which they began."""
        return self.recording.tape.calls

    @cached_property
    def names(self) -> list[str]:
        """The name of each op's node."""
        return node_names(self.ops)

    @cached_property
    def flow_steps(self) -> FlowSteps:
        """Where the model's Python depended on the inputs."""
        return flow_steps(self.recording.tape, self.names)

    @cached_property
    def graph(self) -> Graph:
        """The networkx mirror, at op level."""
        return mirror(self.recording, self.names, self.flow_steps, self.function)

    @cached_property
    def program(self) -> Program:
        """The generated replay."""
        return Program(self.recording, self._ambience)

    @property
    def guards(self) -> GuardTable:
        """The conditions under which a replay is right, besides those on structure."""
        return GuardTable(self)

    @property
    def why_live(self) -> tuple[str, ...]:
        """Why the run must not be replayed; empty if it can be."""
        return tuple(self.recording.tape.blockers)

    @property
    def code(self) -> str:
        """The generated Python of the replay.

        Raises:
            NotReplayableError: if there is none, because of what `why_live` says.
        """
        self._require_replayable()
        return self.program.root.code.text

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Repeat the run on other inputs.

        Args:
            *args: positional arguments, as the function takes them.
            **kwargs: keyword arguments.

        Returns:
            What the function would return.

        Raises:
            DivergenceError: the inputs lead down another path. Nothing was run if a guard on
                the inputs says so; if it is a guard on values, the ops before it have been
                carried out. `BendedModule` takes it from there.
            NotReplayableError: the run depends on something that no guard can watch.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
            >>> trace.replay(torch.tensor([3.0, 4.0]))
            tensor([4., 5.])
        """
        self._require_replayable()
        bound = self._signature.bind(args, kwargs)
        expected = tuple(part.label for part in self._arguments())
        if tuple(bound) != expected:
            raise DivergenceError(f"called with arguments {tuple(bound)}, traced with {expected}")
        values = tuple(bound.values())
        failed = self.program.failing(values)
        if failed is not None:
            mismatch = explain_check(failed, self.program, values, self.flow_steps)
            raise DivergenceError(mismatch.reason, mismatch.step)
        result = self.program.run(values)
        if isinstance(result, Divergence):
            result.hold.release()
            mismatch = explain_divergence(result, self.flow_steps)
            raise DivergenceError(mismatch.reason, mismatch.step)
        return result.output

    def to_fx(
        self, *, fold: bool | Callable[[nn.Module], bool] = False, guards: bool = True
    ) -> fx.GraphModule:
        """Convert to a runnable `torch.fx.GraphModule` (see `bendtrace.to_fx`)."""
        return to_fx(self.graph, fold=fold, guards=guards)

    def to_json(self, **options: Any) -> str:
        """Return ops, flow steps and guards as JSON.

        Args:
            **options: passed on to `json.dumps`.
        """
        return json.dumps(self.to_dict(), **options)

    def to_dict(self) -> dict[str, Any]:
        """Return ops, flow steps and guards as plain values."""
        return {
            "function": _name(self.function),
            "nodes": self.graph.to_list(),
            "flow_steps": self.flow_steps.to_list(),
            "guards": self.guards.to_list(),
            "why_live": list(self.why_live),
        }

    def _arguments(self) -> list[Any]:
        parts = self.recording.surroundings.parts
        return [part for part in parts if part.is_argument and part.parent is None]

    def _require_replayable(self) -> None:
        if self.why_live:
            raise NotReplayableError(self.why_live)

    def __repr__(self) -> str:
        counts = f"{_counted(len(self.ops), 'op')}, {_counted(len(self.flow_steps), 'flow step')}"
        live = "" if not self.why_live else ", live only"
        return f"<Trace of {_name(self.function)}: {counts}{live}>"

    def __str__(self) -> str:
        sections = [repr(self)[1:-1], str(self.graph)]
        if self.flow_steps:
            sections.append(str(self.flow_steps))
        sections += [f"cannot be replayed: {reason}" for reason in self.why_live]
        return "\n\n".join(sections)


class GuardTable:
    """The guards of a trace as a table."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        kinds = trace.program.analysis.kinds
        self._rows = list(zip(trace.recording.tape.guards, kinds, strict=True))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Guard:
        return self._rows[number][0]

    def kind(self, number: int) -> GuardKind:
        """Return when a guard is tested."""
        return self._rows[number][1]

    def to_list(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        rows = []
        for number, (guard, kind) in enumerate(self._rows):
            place = ""
            text = ""
            if guard.site is not None:
                found, _, _ = user_code(guard.scope, guard.site)
                place, text = str(found), found.text
            rows.append(
                {
                    "number": number,
                    "when": kind.value,
                    "node": self._trace.names[guard.index],
                    "test": guard.test.value,
                    "expected": repr(guard.expected),
                    "source": text,
                    "at": place,
                }
            )
        return rows

    def __repr__(self) -> str:
        rows = [list(row.values()) for row in self.to_list()]
        headers = ["#", "when", "node", "test", "expected", "source", "at"]
        return tabulate(rows, headers, disable_numparse=True)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return f"partial({_name(function.func)})"
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]
