"""A compiled function: its state, and whether its results equal those of a replay.

Paths and bodies go through the same steps: they are compiled, compared once with the replay, and
timed against it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from bendtrace.engine.compile_probing import with_place
from bendtrace.engine.compile_settings import CompileSettings
from bendtrace.tape.captured import PLAIN_TYPES, attributes_of, identical
from bendtrace.tape.tape import Op
from bendtrace.watch.writes import storage_of

_LONGEST = 500  # letters of a reason
_WARM = 2  # calls before times are taken
_TIMED = 6  # calls of either kind whose times are taken


class CompileState(Enum):
    """The state of a compiled function."""

    MEASURED = "being measured"
    USED = "used"
    DEMOTED = "demoted"
    SLOWER = "slower"
    REFUSED = "not compiled"


class CompiledFunction:
    """A function of tensors, compiled by torch.compile."""

    def __init__(self, settings: CompileSettings) -> None:
        self.settings = settings
        self.state = CompileState.MEASURED if settings.drop_slower else CompileState.USED
        self.reason: str = ""  # why it is not used, or its latest error
        self.raised: str = ""  # the text of that error, as torch raised it
        self.seconds: float = 0.0  # spent compiling all of its graphs
        # The numbers of calls that it served, and that it was tried on without success.
        self.hits = self.failures = 0
        self.served: list[float] = []  # durations in seconds of some calls that it served
        self.replayed: list[float] = []  # of some that were replayed instead
        self.is_unusable: bool = False  # whether the backend itself failed
        self._backend: Backend | None = None
        self._function: Shortcuts | None = None
        # For each graph that has been compared with a replay, the right order of dimensions for
        # those results that it lays out in memory in another one.
        self._confirmed: dict[int, dict[int, tuple[int, ...]]] = {}
        self._missing: dict[int, ZeroGradientHook] = {}

    @property
    def graphs(self) -> int:
        """The number of compiled graphs."""
        return 0 if self._backend is None else self._backend.graphs

    @property
    def is_used(self) -> bool:
        """Return whether calls are tried on it."""
        return self.state in (CompileState.MEASURED, CompileState.USED)

    @property
    def speed(self) -> float | None:
        """The factor by which it is faster than a replay; None if that is not known."""
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
        if self.state is CompileState.MEASURED and len(self.replayed) >= _TIMED:
            faster = min(self.served) < min(self.replayed)
            self.state = CompileState.USED if faster else CompileState.SLOWER

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

    def call(self, given: Sequence[Any], found: Shortcut | None) -> CompiledResult | None:
        """Call it; return None if its guards cannot hold."""
        assert self._function is not None
        grad = torch.is_grad_enabled()
        static = [] if found is not None else [v for v in given if not is_marked_static(v)]
        try:
            result = self._function(*given) if found is None else found.call(given)
        finally:
            for value in static:
                value.__dict__.pop(_STATIC, None)
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

    def in_order(self, result: CompiledResult) -> Sequence[Tensor]:
        """Return results laid out in memory as a replay lays them out."""
        made, orders = result.made, self._confirmed.get(result.graph)
        if not orders:
            return made
        return [
            tensor if slot not in orders else _laid_out(tensor, orders[slot])
            for slot, tensor in enumerate(made)
        ]

    def compare(
        self, ours: Any, theirs: Any, result: CompiledResult, inputs: Iterable[Tensor]
    ) -> bool:
        """Use a newly compiled graph from now on, if its results equal those of a replay.

        `ours` is the output that was made of the results of the graph, `theirs` the output of the
        replay. The `inputs` existed before the call.
        """
        inputs = list(inputs)
        compared = _Comparison(inputs.copy())
        different, orders = compared.between(ours, theirs), compared.laid_out
        slots = {id(tensor): slot for slot, tensor in enumerate(result.made)}
        if different is None and not orders.keys() <= slots.keys():
            different = "a result is laid out in memory in another way"
        if different is None:
            pairs = [(slots[id(a)], a, b) for a, b in compared.differentiable if id(a) in slots]
            found = missing(pairs, inputs)
            if isinstance(found, ZeroGradientHook):
                self._missing[result.graph] = found
            else:
                different = found
        if different is not None:
            self.state, self.reason = CompileState.REFUSED, f"compiled, {different}"
            return False
        # Inductor lays out some results in an order that it likes better.
        moved = {slots[key]: order for key, order in orders.items()}
        self._confirmed[result.graph] = self._confirmed.get(result.graph, {}) | moved
        return True

    def note(self, error: Exception) -> None:
        """Note an error, and give up if the next call would raise it again."""
        failed = AttemptFailure(error)
        self.reason = failed.reason
        if failed.line and (op := self.op_at(failed.line)) is not None:
            self.reason = with_place(self.reason, op)
        if failed.advice:
            self.reason += f"; {failed.advice}"
        self.raised = str(error)
        self.is_unusable = failed.is_of_backend
        if failed.is_final:
            self.state = CompileState.REFUSED

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


class AttemptFailure:
    """An error of compiled code, or of its compiler."""

    def __init__(self, error: Exception) -> None:
        kind = type(error)
        inner = getattr(error, "inner_exception", None) or error
        lines = str(inner).strip().splitlines()
        why = [line.rpartition(": got ")[2].strip() for line in lines if "Explanation:" in line]
        message = "; ".join([*lines[:1], *why[:1]])[:_LONGEST]
        self.reason: str = f"{type(inner).__name__}: {message}"  # its message, in one line
        self.advice: str = ""  # what to do about it; "" if that is unknown
        if "data-dependent expression" in message:
            self.reason = "torch.compile would have to know a number that depends on values"
            self.advice = _ADVICE
        elif message.startswith("Runtime assertion failed"):
            self.reason = "sizes that depend on values differ in a way that torch.compile rules out"
        elif why and "fake tensor" in lines[0]:
            self.reason = f"torch.compile has no rule for one of its ops, and raises {why[0]}"
            self.advice = "its ops are replayed, and the segments around that one compiled"
        found = _LINE.findall(f"{error}\n{inner}")
        # The line of the compiled source that it is about; 0 if that is unknown.
        self.line: int = int(found[-1]) if found else 0
        # True if the compiler raised it, and would raise it again.
        self.is_final: bool = kind.__module__.startswith(_COMPILERS)
        # A size that depends on values is the model's doing, wherever it is found in the way.
        is_of_model = type(inner).__module__.startswith("torch.fx.experimental")
        # True if the backend itself failed.
        self.is_of_backend: bool = (
            kind.__name__ in _OF_BACKENDS and self.is_final and not is_of_model
        )
        if self.is_final and kind.__name__ == "FailOnRecompileLimitHit":
            self.reason = (
                "torch.compile compiles a function for so many sets of sizes only "
                "(torch._dynamo.config.recompile_limit), and these were more"
            )


class QuietCompilation:
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


def is_marked_static(value: Any) -> bool:
    """Return whether a value has torch.compile's mark of parameters, or can have no mark."""
    return not isinstance(value, Tensor) or _STATIC in value.__dict__


def now(arguments: Iterable[Any]) -> float:
    """Return the time; if arguments are on a GPU, wait for the GPU first."""
    if any(isinstance(value, Tensor) and value.is_cuda for value in arguments):
        torch.cuda.synchronize()
    return time.perf_counter()


# Set on results and on parameters, which a model may return; seen in torch 2.13 to 2.15. The tests
# of compiled programs compare what is on tensors, and would notice another name. Torch reads the
# second one only while it compiles, and users set it with `mark_static_address`.
_MARK = "_dynamo_propagated_dynamic_indices"
_STATIC = "_dynamo_static_input_type"
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


def _is_dense_layout(tensor: Tensor) -> bool:
    return tensor.permute(_order_of(tensor)).is_contiguous()


class _Comparison:
    """Compares an output with the output of a replay."""

    def __init__(self, inputs: list[Tensor]) -> None:
        # For tensors that only differ in their memory layout, by identity, the right order of
        # dimensions.
        self.laid_out: dict[int, tuple[int, ...]] = {}
        self.differentiable: list[tuple[Tensor, Tensor]] = []  # tensors that require gradients
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given to another
        self._ours: list[Tensor] = inputs
        self._theirs: list[Tensor] = list(inputs)

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
            if not (_is_dense_layout(ours) and _is_dense_layout(theirs)):
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
    if not ours.numel() or ours.is_meta:
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


# Gradients that are not there, which compiled code would give as zeros.
#
# For a compiled graph, autograd has one node. If gradients come for some of its results only, the
# others count as zeros, and inputs that only those depend on get zeros as well. The model leaves
# these inputs without gradients, and an optimizer leaves them alone.

# A node of an autograd graph, and which of its results.
_Edge = tuple[Any, int]


class ZeroGradientHook(NamedTuple):
    """A hook that takes zeros away from the gradients of one graph, and its place."""

    slot: int  # a result that leads to the node of the graph
    steps: tuple[int, ...]  # the way there
    hook: Callable[..., Any]  # is registered with the node

    def register(self, made: Sequence[Tensor]) -> None:
        """Take zeros away from the gradients of some results."""
        node: Any = made[self.slot].grad_fn
        for step in self.steps:
            node = node.next_functions[step][0]
        node.register_hook(self.hook)


def missing(
    pairs: Iterable[tuple[int, Tensor, Tensor]], roots: Iterable[Tensor]
) -> ZeroGradientHook | str | None:
    """Return what takes zeros away; None if there are none, or why that is impossible.

    The pairs are results that require gradients: their slots, what a graph returned, and the same
    of a replay. The roots are the tensors that existed before the call.
    """
    pairs = list(pairs)
    if len(pairs) < 2:
        return None
    edges = [_edge(tensor) for tensor in roots if tensor.requires_grad]
    theirs = [_reachable_edges(_edge(tensor), edges) for _, _, tensor in pairs]
    anywhere = set().union(*theirs)
    if all(found == anywhere for found in theirs):
        return None
    ours = [_reachable_edges(_edge(tensor), edges) & anywhere for _, tensor, _ in pairs]
    if ours == theirs:
        return None
    nodes: list[Any] = []
    ways: list[tuple[tuple[int, ...], int] | None] = []
    for _, tensor, _ in pairs:
        found = _to_graph(_edge(tensor))
        ways.append(None if found is None else (found[0], found[1][1]))
        if found is not None and found[1][0] not in nodes:
            nodes.append(found[1][0])
    if len(nodes) != 1 or None in ways:
        return "inputs would get gradients of zero, and not none"
    numbers = {edge: number for number, edge in enumerate(edges)}
    inputs = [numbers.get(edge) for edge in nodes[0].next_functions]
    needed: dict[int, set[int]] = {}
    for way, reached in zip(ways, theirs, strict=True):
        assert way is not None
        needed.setdefault(way[1], set()).update(
            slot for slot, number in enumerate(inputs) if number in reached
        )
    assert ways[0] is not None
    return ZeroGradientHook(pairs[0][0], ways[0][0], _hook(needed))


def _hook(needed: dict[int, set[int]]) -> Callable[..., Any]:
    def without_zeros(gradients: Sequence[Any], given: Sequence[Any]) -> Any:
        if not any(given[number] is None for number in needed):
            return None
        nonzero: set[int] = set()
        for number, slots in needed.items():
            if given[number] is not None:
                nonzero |= slots
        return tuple(
            gradient if slot in nonzero else None for slot, gradient in enumerate(gradients)
        )

    return without_zeros


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _reachable_edges(begin: _Edge, edges: Sequence[_Edge]) -> set[int]:
    """Return the numbers of the edges that gradients reach from one."""
    numbers: dict[_Edge, set[int]] = {}
    for number, edge in enumerate(edges):  # one tensor may be there more than once
        numbers.setdefault(edge, set()).add(number)
    found: set[int] = set()
    seen: set[_Edge] = set()
    waiting = [begin]
    while waiting:
        edge = waiting.pop()
        if edge in numbers:
            found |= numbers[edge]
        elif edge not in seen and edge[0] is not None:
            seen.add(edge)
            waiting += edge[0].next_functions
    return found


def _to_graph(edge: _Edge) -> tuple[tuple[int, ...], _Edge] | None:
    """Return the way to the node of a compiled graph, and which of its results comes there."""
    steps: list[int] = []
    while edge[0] is not None:
        if type(edge[0]).__name__ == "CompiledFunctionBackward":
            return tuple(steps), edge
        if len(edge[0].next_functions) != 1:
            return None
        steps.append(0)
        edge = edge[0].next_functions[0]
    return None


# Calling a compiled graph directly, after torch.compile's guards have accepted a similar call.
#
# Before each call, torch.compile enters its frame evaluation and tests guards on everything that
# a function can read, which takes longer than a small graph. The function of a path depends only
# on its arguments: the check of the path has already compared everything else. So once
# torch.compile has chosen a graph for some arguments, similar arguments go to the graph directly.
# torch.compile's own tensor guards decide what is *similar*: equal types, dtypes, devices,
# dispatch keys, requires_grad, sizes and strides.

_MOST = 8


class Backend:
    """A backend of torch.compile that records its graphs, and the calls of them.

    `may_assume` lets it compile graphs that make assumptions about sizes that depend on values.
    """

    graphs: int  # the number of graphs that it has compiled

    def __init__(self, backend: Callable[..., Any], may_assume: bool = False) -> None:
        self._backend = backend
        self._may_assume = may_assume
        self._latest = threading.local()
        self.graphs = 0
        self.assumes: bool = False  # whether it has refused a graph because of its assumptions
        # torch.compile asks inductor for it.
        config = getattr(backend, "get_compiler_config", None)
        if config is not None:
            self.get_compiler_config = config

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        """Compile a graph."""
        if not self._may_assume and _assumes(graph):
            self.assumes = True
            compiled: Callable[..., Any] = graph.forward
        else:
            compiled = self._backend(graph, inputs, **options)
        self.graphs += 1
        compiled = _quiet(compiled)
        latest = self._latest

        number = self.graphs

        def run(*args: Any) -> Any:
            results = compiled(*args)
            latest.call = _GraphCall(number, compiled, args, results)
            return results

        return run

    def take(self) -> _GraphCall | None:
        """Return the last call of a graph in this thread, and forget it."""
        call: _GraphCall | None = self._latest.__dict__.pop("call", None)
        return call


class _GraphCall(NamedTuple):
    """A call of a graph."""

    number: int  # the number of the graph, counted from 1
    graph: Callable[..., Any]
    args: Sequence[Any]
    made: Sequence[Any]  # its results


class CompiledResult(NamedTuple):
    """The result of a compiled function."""

    truth: Any  # whether its guards hold, as a tensor; None if it has none
    made: Sequence[Any]  # its tensors
    graph: int  # the number of the graph that computed them; 0 if there was nothing to compute


def _quiet(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, but does not print the errors that it raises.

    A graph module does, when it is called itself, as it is by the method of one that has not
    written its code so far.
    """
    module = getattr(compiled, "__self__", compiled)
    if isinstance(module, fx.GraphModule) and compiled in (module, module.forward):
        write: Any = getattr(module, "real_recompile", None)
        if write is not None:
            write()
        forward: Callable[..., Any] = module.forward
        return forward
    return compiled


def _assumes(graph: Any) -> bool:
    """Return whether a graph makes assumptions about sizes that depend on values.

    torch.compile means to assert that in the graph, but an assertion is lost where what it says
    has been put to use: seen in torch 2.13, with a size that was found to be a certain number.
    tests/test_compiled.py would notice if they were noted elsewhere.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        mode = getattr(value, "fake_mode", None)
        environment = getattr(mode, "shape_env", None)
        if environment is not None:
            return any(environment.deferred_runtime_asserts.values())
    return False


class Shortcut:
    """One graph, for similar arguments."""

    number: int
    # The positions among the tensors of those that nobody else has; None if that is not known. For
    # similar arguments, they are the same in each call.
    alone: frozenset[int] | None

    __slots__ = (
        "_numbers", "_same", "_slots", "_tensors", "alone", "check", "graph", "number", "results",
    )  # fmt: skip

    def __init__(
        self, call: _GraphCall, slots: list[Any], results: list[Any], given: Sequence[Any]
    ) -> None:
        # A vector that is inserted at several nodes is given as often, which guards refuse.
        first = {id(value): slot for slot, value in reversed([*enumerate(given)])}
        pairs = [(slot, first[id(v)]) for slot, v in enumerate(given) if isinstance(v, Tensor)]
        self._tensors = [slot for slot, other in pairs if slot == other]
        self._same = [(slot, other) for slot, other in pairs if slot != other]
        tensors = [given[i] for i in self._tensors]
        self.number, self.graph = call.number, call.graph
        self.results: list[Any] = results  # positions among its results of truth and tensors
        self.alone = None
        # Mostly the arguments of the function are those of the graph.
        self._slots = None if slots == list(range(len(given))) else slots
        sizes, strides = [list(t.size()) for t in tensors], [list(t.stride()) for t in tensors]
        # What torch.compile's guards are made of, but for the stretch from Python: seen in torch
        # 2.13 and 2.14. Where it is missing there are no shortcuts; tests/test_compiled.py notices.
        guards: Any = torch._C._dynamo.guards
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.check: Callable[..., bool] = made.check
        self._numbers = [(i, v) for i, v in enumerate(given) if not isinstance(v, Tensor)]

    def fits(self, given: Sequence[Any]) -> bool:
        """Return whether arguments are similar to those that it was made for."""
        if not all(identical(given[slot], value) for slot, value in self._numbers):
            return False
        if not all(given[slot] is given[first] for slot, first in self._same):
            return False
        if len(self._tensors) < len(given):
            given = [given[slot] for slot in self._tensors]
        return self.check(*given)

    def call(self, given: Sequence[Any]) -> CompiledResult:
        """Call the graph; return the result of the function."""
        slots = self._slots
        made = self.graph(*(given if slots is None else [given[slot] for slot in slots]))
        truth, *rest = self.results
        found = None if truth is None else made[truth]
        return CompiledResult(found, [made[slot] for slot in rest], self.number)


class Shortcuts:
    """The graphs of one function, by the guards on their arguments."""

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self._function = function
        self._backend = backend
        self._shortcuts: tuple[Shortcut, ...] = ()

    def find(self, given: Sequence[Any]) -> Shortcut | None:
        """Return the graph for some arguments, if it has served similar ones.

        No tensor is twice among them where it was not among those.
        """
        for shortcut in self._shortcuts:
            if shortcut.fits(given):
                return shortcut
        return None

    def __call__(self, *given: Any) -> CompiledResult | None:
        """Have torch.compile choose a graph and call it; return None if its guards cannot hold."""
        self._backend.take()
        result: tuple[Any, Sequence[Any]] | None
        with warnings.catch_warnings():
            # torch.compile asks all that it is given for gradients, where a model would not.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
            result = self._function(*given)
        call = self._backend.take()
        if result is None:
            return None
        truth, made = result
        if call is None:
            return CompiledResult(truth, made, 0)
        self._learn(given, result, call)
        return CompiledResult(truth, made, call.number)

    def _learn(
        self, given: Sequence[Any], result: tuple[Any, Sequence[Any]], call: _GraphCall
    ) -> None:
        """Use the shortcut from now on, if all arguments and results can be matched."""
        slots = [_slot_of(arg, given) for arg in call.args]
        results = [_slot_of(value, call.made) for value in result[1]]
        if result[0] is not None:
            results.insert(0, _slot_of(result[0], call.made))
        if None in slots or None in results:
            return
        results = results if result[0] is not None else [None, *results]
        try:
            shortcut = Shortcut(call, slots, results, given)
        except (AttributeError, TypeError, SystemError):
            return
        self._shortcuts = (shortcut, *self._shortcuts[: _MOST - 1])


def _slot_of(value: Any, values: Sequence[Any]) -> int | None:
    return next((slot for slot, other in enumerate(values) if other is value), None)
