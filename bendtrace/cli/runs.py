"""Traces a model, calls it again, and compares each call with the model itself."""

from __future__ import annotations

import copy
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from textwrap import shorten
from typing import Any

import torch
from torch import fx, nn

from bendtrace._compare import same_bits
from bendtrace._places import place_text
from bendtrace._trace import Trace
from bendtrace._tracebacks import during, one_line
from bendtrace.cli.inputs import Inputs
from bendtrace.errors import BendtraceError, InputError
from bendtrace.module import BendedModule
from bendtrace.recording.run import Signature
from bendtrace.replay.explain import Mismatch
from bendtrace.source.internals import pytree
from bendtrace.stats import Stats
from bendtrace.torch_rules.draws import seed_all

__all__ = ["Call", "CommandRun", "check", "describe", "run"]


def check(model: Callable[..., Any], args: Any, kwargs: Any, target: str) -> None:
    """Raise if a call does not fit the signature.

    Args:
        model: the function or module to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        target: the name of the model, for messages.

    Raises:
        InputError: there are too many, too few or unknown arguments.
    """
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # builtins
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise InputError(f"{target} takes ({takes}): {error}") from None


def describe(model: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, str]:
    """Return a description of each argument, by name."""
    bound = Signature(model).bind(args, kwargs)
    return {name: _described(value) for name, value in bound.items()}


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        inner = ", ".join(map(_described, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_described(item)}" for key, item in value.items()) + "}"
    return shorten(repr(value), 40, placeholder="...")


@dataclass(frozen=True)
class Call:
    """One call of a model, through its `BendedModule` and directly.

    Attributes:
        given: the inputs, as written.
        inputs: descriptions of their values, by argument.
        how: "trace" for the first; then "replay", "retrace", "resume" or "live".
        mismatch: why it was not a replay, if a guard failed.
        equal: whether outputs, changes of inputs, parameters and buffers, and the state of torch's
            random numbers are the same, bit for bit.
    """

    given: str
    inputs: dict[str, str]
    how: str
    mismatch: str | None
    equal: bool


@dataclass(frozen=True)
class CommandRun:
    """The results for a model.

    Attributes:
        target: what was traced, as written.
        fx_error: what goes wrong with torch.fx; None if nothing does.
        trace: the first call.
        calls: all calls, including the first.
        stats: how they were served.
        why_live: why some calls can never be replays.
    """

    target: str
    fx_error: str | None
    trace: Trace
    calls: tuple[Call, ...]
    stats: Stats
    why_live: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every call returned the model's own outputs, bit for bit."""
        return all(call.equal for call in self.calls)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        return {
            "target": self.target,
            "fx_error": self.fx_error,
            "trace": self.trace.to_dict(),
            "calls": [vars(call) for call in self.calls],
            "stats": vars(self.stats),
            "why_live": list(self.why_live),
        }


def run(
    target: str,
    model: Callable[..., Any],
    calls: Sequence[Inputs],
    *,
    seed: int = 0,
    grad: bool = False,
) -> CommandRun:
    """Trace a model on the first inputs, call it on the others, and compare.

    Args:
        target: the name of the model.
        model: the model.
        calls: the inputs. Number `k` is created, and the model run on it, with the seed `seed + k`.
        seed: seed of the first call.
        grad: whether autograd records.

    Raises:
        UsersError: the model raised.
        BendtraceError: the model runs, but another step fails.
    """
    session = _Session(target, model, seed)
    with torch.set_grad_enabled(grad):
        done = tuple(session.call(number, inputs) for number, inputs in enumerate(calls))
    assert session.trace is not None
    stats, why_live = replace(session.bended.stats), session.bended.why_live
    return CommandRun(target, session.rival.error, session.trace, done, stats, why_live)


class _Session:
    """A model that is called through bendtrace, and beside it as it is, and through torch.fx."""

    def __init__(self, target: str, model: Callable[..., Any], seed: int) -> None:
        self.target = target
        self.seed = seed
        self.eager = self._copied(model)
        self.rival = _Rival(self._copied(model))
        self.bended = BendedModule(model)
        self.trace: Trace | None = None

    def _copied(self, model: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise InputError(
                f"{self.target} cannot be copied, so there is nothing to compare with: "
                f"{one_line(error)}"
            ) from None

    def call(self, number: int, inputs: Inputs) -> Call:
        seed = self.seed + number
        args, kwargs = _made(inputs, seed)
        check(self.eager, args, kwargs, self.target)
        described = describe(self.eager, args, kwargs)
        shown = ", ".join(f"{name}: {text}" for name, text in described.items())
        with during(f"{self.target}, called with {shown or 'no inputs'},"):
            output = self.eager(*args, **kwargs)
        wanted = _after(self.eager, output, args, kwargs)
        self.rival.check(number, *_made(inputs, seed), output)
        before, old = replace(self.bended.stats), self.bended.last_mismatch
        args, kwargs = _made(inputs, seed)
        output = self._bended(args, kwargs)
        given = _after(self.bended.model, output, args, kwargs)
        how, new = _how(before, self.bended.stats), self.bended.last_mismatch
        reason = _reason(how, None if new is old else new)
        return Call(str(inputs), described, how, reason, same_bits(given, wanted))

    def _bended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self.trace is not None:
                return self.bended(*args, **kwargs)
            self.trace, output = self.bended.trace(*args, _return_out=True, **kwargs)
            return output
        except BendtraceError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = place_text(last.filename, last.lineno)
            raise BendtraceError(
                f"{self.target} runs, but not under bendtrace, which is a bug in bendtrace: "
                f"{one_line(error)} ({where})"
            ) from error


class _Rival:
    """What torch.fx makes of a model.

    Attributes:
        error: what is wrong with it, if anything; it may show only when it is called.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.error: str | None = None
        try:
            with _silence():
                self.module = fx.symbolic_trace(model)
        except Exception as error:
            self.error = one_line(error)

    def check(self, number: int, args: Any, kwargs: Any, wanted: Any) -> None:
        if self.error is not None:
            return
        try:
            with _silence():
                given = self.module(*args, **kwargs)
        except Exception as error:
            self.error = f"no error when tracing; in call {number + 1} {one_line(error)}"
            return
        # What holds the tensors may be of another type; that is not the point here.
        if not same_bits(pytree.tree_leaves(given), pytree.tree_leaves(wanted)):
            self.error = f"no error, but a wrong result in call {number + 1}"


@contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()):
        yield


def _reason(how: str, mismatch: Mismatch | None) -> str | None:
    if how in ("trace", "replay"):
        return None
    if mismatch is None:
        return "other arguments than before" if how == "retrace" else None
    reason = str(mismatch)
    if mismatch.step is None:
        return reason
    return reason.replace(mismatch.step.file, os.path.basename(mismatch.step.file))


def _how(before: Stats, after: Stats) -> str:
    if before.traces == 0:
        return "trace"
    for how, name in (("live", "live"), ("resume", "resumes"), ("retrace", "retraces")):
        if getattr(after, name) > getattr(before, name):
            return how
    return "replay"


def _made(inputs: Inputs, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seed_all(seed)
    made = inputs.make()
    seed_all(seed)  # what the model draws should not depend on how inputs were made
    return made


def _after(model: Callable[..., Any], output: Any, args: Any, kwargs: Any) -> Any:
    """Return all that a call could have left its mark on."""
    state: list[Any] = []
    if isinstance(model, nn.Module):
        state = [list(model.named_parameters()), list(model.named_buffers())]
    return [output, args, kwargs, state, torch.get_rng_state()]
