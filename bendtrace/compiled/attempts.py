"""A compiled function: its state, and whether its results equal those of a replay.

Paths and bodies go through the same steps: they are compiled, compared once with the replay, and
timed against it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from bendtrace.compiled.eligible import located
from bendtrace.compiled.gradients import Missing, missing
from bendtrace.compiled.settings import Settings
from bendtrace.compiled.shortcuts import Backend, Result, Shortcut, Shortcuts
from bendtrace.tape.captured import PLAIN_TYPES, attributes_of, identical
from bendtrace.tape.tape import Op
from bendtrace.torch_rules.writes import storage_of

__all__ = ["CompiledFunction", "Failed", "Quiet", "State", "now", "unmark"]

_LONGEST = 500  # letters of a reason
_WARM = 2  # calls before times are taken
_TIMED = 6  # calls of either kind whose times are taken


class State(Enum):
    """The state of a compiled function."""

    MEASURED = "being measured"
    USED = "used"
    DEMOTED = "demoted"
    SLOWER = "slower"
    REFUSED = "not compiled"


class CompiledFunction:
    """A function of tensors, compiled by torch.compile.

    Args:
        settings: how to compile.

    Attributes:
        settings: as given.
        state: its state.
        reason: why it is not used, or its latest error.
        raised: the text of that error, as torch raised it.
        seconds: the time spent compiling all of its graphs.
        hits: the number of calls that it served.
        failures: the number of calls that it was tried on without success.
        served: durations in seconds of some calls that it served.
        replayed: durations in seconds of some calls that were replayed instead.
        is_unusable: whether the backend itself failed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = State.MEASURED if settings.drop_slower else State.USED
        self.reason: str = ""
        self.raised: str = ""
        self.seconds: float = 0.0
        self.hits = self.failures = 0
        self.served: list[float] = []
        self.replayed: list[float] = []
        self.is_unusable: bool = False
        self._backend: Backend | None = None
        self._function: Shortcuts | None = None
        # For each graph that has been compared with a replay, the right order of dimensions for
        # those results that it lays out in memory in another one.
        self._confirmed: dict[int, dict[int, tuple[int, ...]]] = {}
        self._missing: dict[int, Missing] = {}

    @property
    def graphs(self) -> int:
        """The number of compiled graphs."""
        return 0 if self._backend is None else self._backend.graphs

    @property
    def is_used(self) -> bool:
        """Whether calls are tried on it."""
        return self.state in (State.MEASURED, State.USED)

    @property
    def speed(self) -> float | None:
        """How many times faster it is than a replay; None if that is not known."""
        if not self.served or not self.replayed:
            return None
        return min(self.replayed) / min(self.served)

    def was_served(self, seconds: float) -> None:
        """Record the duration of a call that it served."""
        if self.hits > _WARM:
            self.served.append(seconds)

    def was_replayed(self, seconds: float) -> None:
        """Record the duration of a replay; with enough durations of both, use the faster one."""
        self.replayed.append(seconds)
        if self.state is State.MEASURED and len(self.replayed) >= _TIMED:
            faster = min(self.served) < min(self.replayed)
            self.state = State.USED if faster else State.SLOWER

    def compile(
        self, function: Callable[..., Any], compiler: Callable[..., Any], may_assume: bool = False
    ) -> Backend:
        """Have a function compiled at its first call; return what compiles it."""
        self._backend = Backend(compiler, may_assume)
        checks = torch.distributions.Distribution._validate_args
        try:
            compiled = torch.compile(
                function, fullgraph=True, dynamic=self.settings.dynamic, backend=self._backend
            )
        finally:  # torch.compile switches these checks off for the whole process
            torch.distributions.Distribution.set_default_validate_args(checks)
        self._function = Shortcuts(compiled, self._backend)
        return self._backend

    def find(self, given: Sequence[Any]) -> Shortcut | None:
        """Return the graph for some arguments (see `Shortcuts.find`)."""
        assert self._function is not None
        return self._function.find(given)

    def call(self, given: Sequence[Any], found: Shortcut | None) -> Result | None:
        """Call it; return None if its guards cannot hold.

        Args:
            given: its arguments.
            found: the graph for them, if there is one.
        """
        assert self._function is not None
        grad = torch.is_grad_enabled()
        try:
            result = self._function(*given) if found is None else found.call(given)
        finally:
            if torch.is_grad_enabled() != grad:
                torch._C._set_grad_enabled(grad)
            if grad:  # what is kept for the backward pass is marked too
                unmark(given)
        if result is None:
            return None
        unmark(result.made)
        if self.settings.cuda_graphs:  # whose memory the next call writes to
            result = result._replace(made=[tensor.clone() for tensor in result.made])
        if self._missing and (lost := self._missing.get(result.graph)) is not None:
            lost.register(result.made)
        return result

    def in_order(self, result: Result) -> Sequence[Tensor]:
        """Return results laid out in memory as a replay lays them out."""
        made, orders = result.made, self._confirmed.get(result.graph)
        if not orders:
            return made
        return [
            tensor if slot not in orders else _laid_out(tensor, orders[slot])
            for slot, tensor in enumerate(made)
        ]

    def compare(self, ours: Any, theirs: Any, result: Result, known: Iterable[Tensor]) -> bool:
        """Use a newly compiled graph from now on, if its results equal those of a replay.

        Args:
            ours: the output that was made of the results of the graph.
            theirs: the output of the replay.
            result: what the graph returned.
            known: the tensors that existed before the call.
        """
        known = list(known)
        compared = _Comparison(known.copy())
        different, orders = compared.between(ours, theirs), compared.laid_out
        slots = {id(tensor): slot for slot, tensor in enumerate(result.made)}
        if different is None and not orders.keys() <= slots.keys():
            different = "a result is laid out in memory in another way"
        if different is None:
            pairs = [(slots[id(a)], a, b) for a, b in compared.differentiable if id(a) in slots]
            found = missing(pairs, known)
            if isinstance(found, Missing):
                self._missing[result.graph] = found
            else:
                different = found
        if different is not None:
            self.state, self.reason = State.REFUSED, f"compiled, {different}"
            return False
        # Inductor lays out some results in an order that it likes better.
        moved = {slots[key]: order for key, order in orders.items()}
        self._confirmed[result.graph] = self._confirmed.get(result.graph, {}) | moved
        return True

    def note(self, error: Exception) -> None:
        """Note an error, and give up if the next call would raise it again."""
        failed = Failed(error)
        self.reason = failed.reason
        if failed.line and (op := self.op_at(failed.line)) is not None:
            self.reason = located(self.reason, op)
        if failed.advice:
            self.reason += f"; {failed.advice}"
        self.raised = str(error)
        self.is_unusable = failed.is_of_backend
        if failed.is_final:
            self.state = State.REFUSED

    def op_at(self, line: int) -> Op | None:
        """Return the op of the model in a line of the source that is compiled."""

    def row(self) -> dict[str, Any]:
        """Return its state and its numbers as plain values."""
        return {
            "state": self.state.value,
            "reason": self.reason,
            "raised": self.raised,
            "warm_up": self.seconds,
            "graphs": self.graphs,
            "hits": self.hits,
            "speed": self.speed,
        }


class Failed:
    """An error of compiled code, or of its compiler.

    Attributes:
        reason: its message, in one line.
        line: the line of the compiled source that it is about; 0 if that is unknown.
        advice: what to do about it; "" if that is unknown.
        is_final: whether the compiler raised it, and would raise it again.
        is_of_backend: whether the backend itself failed.
    """

    def __init__(self, error: Exception) -> None:
        kind = type(error)
        inner = getattr(error, "inner_exception", None) or error
        lines = str(inner).strip().splitlines()
        why = [line.rpartition(": got ")[2].strip() for line in lines if "Explanation:" in line]
        said = "; ".join([*lines[:1], *why[:1]])[:_LONGEST]
        self.reason: str = f"{type(inner).__name__}: {said}"
        self.advice: str = ""
        if "data-dependent expression" in said:
            self.reason = "torch.compile would have to know a number that depends on values"
            self.advice = _ADVICE
        elif said.startswith("Runtime assertion failed"):
            self.reason = "sizes that depend on values differ in a way that torch.compile rules out"
        found = _LINE.findall(f"{error}\n{inner}")
        self.line: int = int(found[-1]) if found else 0
        self.is_final: bool = kind.__module__.startswith(_COMPILERS)
        # A size that depends on values is the model's doing, wherever it is found in the way.
        is_of_model = type(inner).__module__.startswith("torch.fx.experimental")
        self.is_of_backend: bool = (
            kind.__name__ in _OF_BACKENDS and self.is_final and not is_of_model
        )
        if self.is_final and kind.__name__ == "FailOnRecompileLimitHit":
            self.reason = (
                "torch.compile compiles a function for so many sets of sizes only "
                "(torch._dynamo.config.recompile_limit), and these were more"
            )


class Quiet:
    """Within it, torch does not log why it could not compile something: the report says it.

    Unless somebody wants to see torch's logs.
    """

    def __init__(self) -> None:
        names = () if "TORCH_LOGS" in os.environ else _LOGGERS
        self._loggers = [logging.getLogger(name) for name in names]

    def __enter__(self) -> None:
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)


def unmark(values: Iterable[Any]) -> None:
    """Remove the marks for dynamic sizes that torch.compile leaves on tensors."""
    for value in values:
        if isinstance(value, Tensor) and value.__dict__:
            value.__dict__.pop(_MARK, None)


def now(arguments: Iterable[Any]) -> float:
    """Return the time; if arguments are on a GPU, wait for the GPU first."""
    if any(isinstance(value, Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    return time.perf_counter()


# Set on results, seen in torch 2.13 to 2.15; test_compiled_corpus.py would notice another name.
_MARK = "_dynamo_propagated_dynamic_indices"
_LINE = re.compile(r'File "<bendtrace [^>]*>", line (\d+)')
_ADVICE = (
    "its ops are replayed. They can be compiled if the number stays in a tensor, for instance "
    "x.index_select(0, i.reshape(1)) in the place of x[i]"
)
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
_LOGGERS = (
    "torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
_OF_BACKENDS = ("BackendCompilerFailed", "InductorError", "InvalidCxxCompiler")


# How far values may be apart, relative to the largest one: far more than reordered sums cost,
# far less than a wrong graph does.
_ALLOWED = {
    torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3,
    torch.float16: 5e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor in the order in which they lie in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a tensor, or a copy, whose dimensions lie in memory in a certain order."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.permute(_order_of(tensor)).is_contiguous()


class _Comparison:
    """Compares an output with that of a replay.

    Args:
        known: the arguments and the state.

    Attributes:
        laid_out: for tensors that only differ in their memory layout, by identity, the right order
            of dimensions.
        differentiable: the pairs of tensors that require gradients.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.laid_out: dict[int, tuple[int, ...]] = {}
        self.differentiable: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given to another
        self._ours: list[Tensor] = known
        self._theirs: list[Tensor] = list(known)

    def between(self, ours: Any, theirs: Any) -> str | None:
        if type(ours) is not type(theirs):
            return f"it gives a {type(ours).__name__}, and not a {type(theirs).__name__}"
        if isinstance(ours, Tensor):
            return self._between_tensors(ours, theirs)
        if type(ours) in PLAIN_TYPES:
            same = identical(ours, theirs) or (
                type(ours) is float and abs(ours - theirs) <= 1e-3 * max(1.0, abs(theirs))
            )
            return None if same else f"it gives {ours!r}, and not {theirs!r}"
        if id(ours) in self._seen:
            return None if self._seen[id(ours)] == id(theirs) else "it gives other objects"
        self._seen[id(ours)] = id(theirs)
        self._kept += (ours, theirs)
        if isinstance(ours, (list, tuple)):
            pairs = list(zip(ours, theirs, strict=False))
            if len(ours) != len(theirs):
                return f"it gives {len(ours)} things, and not {len(theirs)}"
        elif isinstance(ours, dict):
            if tuple(ours) != tuple(theirs):
                return "it gives other keys"
            pairs = [(ours[key], theirs[key]) for key in ours]
        else:
            pairs = []
        if not isinstance(ours, torch.nn.Module):
            mine, others = attributes_of(ours), attributes_of(theirs)
            if mine.keys() != others.keys():
                return "it gives an object with other attributes"
            pairs += [(mine[key], others[key]) for key in mine]
        return next(filter(None, (self.between(*pair) for pair in pairs)), None)

    def _between_tensors(self, ours: Tensor, theirs: Tensor) -> str | None:
        if ours is theirs:
            return None
        for name in ("dtype", "device", "shape", "requires_grad", "layout"):
            mine, others = getattr(ours, name), getattr(theirs, name)
            if mine != others:
                return f"{name} of a result is {mine}, and not {others}"
        if ours.is_inference() != theirs.is_inference() or ours.is_leaf != theirs.is_leaf:
            return "a result is another kind of node of the autograd graph"
        if ours.stride() != theirs.stride() and ours.numel() > 1:
            if not (_is_dense(ours) and _is_dense(theirs)):
                return f"a result has strides {ours.stride()}, and not {theirs.stride()}"
            self.laid_out[id(ours)] = _order_of(theirs)
        if vars(ours).keys() != vars(theirs).keys():
            return f"a result has attributes {sorted(vars(ours))}, and not {sorted(vars(theirs))}"
        if _relations(ours, self._ours) != _relations(theirs, self._theirs):
            return "its results share memory in another way"
        self._ours.append(ours)
        self._theirs.append(theirs)
        if ours.requires_grad:
            self.differentiable.append((ours, theirs))
        with torch.no_grad():
            return _between_values(ours.detach(), theirs.detach())


def _relations(tensor: Tensor, others: list[Tensor]) -> list[tuple[bool, bool]]:
    """Return how a tensor relates to others: whether it is one of them, or shares their memory."""
    storage = storage_of(tensor)
    return [
        (other is tensor, bool(tensor.numel()) and storage != 0 and storage_of(other) == storage)
        for other in others
    ]


def _between_values(ours: Tensor, theirs: Tensor) -> str | None:
    allowed = _ALLOWED.get(ours.dtype)
    if not ours.numel():
        return None
    if allowed is None:
        return None if torch.equal(ours, theirs) else f"results of {ours.dtype} are not equal"
    finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(ours.isnan(), theirs.isnan()):
        return "other results are finite"
    if not finite.any():
        return None
    far = torch.float64 if not ours.is_complex() else torch.complex128
    wanted = theirs[finite].to(far)
    apart = float((ours[finite].to(far) - wanted).abs().max())
    scale = max(1.0, float(wanted.abs().max()))
    if apart <= allowed * scale:
        return None
    return f"results are {apart:.3g} apart, with values up to {scale:.3g}"
