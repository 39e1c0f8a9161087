"""Calling a compiled graph directly, after torch.compile's guards have accepted a similar call.

Before each call, torch.compile enters its frame evaluation and tests guards on everything that a
function can read, which takes longer than a small graph. The function of a path depends only on
its arguments: the check of the path has already compared everything else. So once torch.compile
has chosen a graph for some arguments, similar arguments go to the graph directly. torch.compile's
own tensor guards decide what is *similar*: equal types, dtypes, devices, dispatch keys,
requires_grad, sizes and strides.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from bendtrace.tape.captured import identical

__all__ = ["Backend", "Result", "Shortcut", "Shortcuts"]

_MOST = 8


class Backend:
    """A backend of torch.compile that records its graphs, and the calls of them.

    Args:
        backend: what compiles.
        may_assume: whether to compile graphs that make assumptions about sizes that depend on
            values.

    Attributes:
        graphs: the number of graphs that it has compiled.
        assumes: whether it has refused a graph because of its assumptions.
    """

    graphs: int

    def __init__(self, backend: Callable[..., Any], may_assume: bool = False) -> None:
        self._backend = backend
        self._may_assume = may_assume
        self._latest = threading.local()
        self.graphs = 0
        self.assumes: bool = False
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
    """A call of a graph.

    Attributes:
        number: the number of the graph, counted from 1.
        graph: the graph.
        args: its arguments.
        made: its results.
    """

    number: int
    graph: Callable[..., Any]
    args: Sequence[Any]
    made: Sequence[Any]


class Result(NamedTuple):
    """The result of a compiled function.

    Attributes:
        truth: whether its guards hold, as a tensor; None if it has none.
        made: its tensors.
        graph: the number of the graph that computed them; 0 if there was nothing to compute.
    """

    truth: Any
    made: Sequence[Any]
    graph: int


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
    """One graph, for similar arguments.

    Attributes:
        graph: the graph.
        number: its number.
        results: the positions among its results of the truth, and of the tensors.
    """

    number: int

    __slots__ = ("_numbers", "_same", "_slots", "_tensors", "check", "graph", "number", "results")

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
        self.results: list[Any] = results
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

    def call(self, given: Sequence[Any]) -> Result:
        """Call the graph; return the result of the function."""
        slots = self._slots
        made = self.graph(*(given if slots is None else [given[slot] for slot in slots]))
        truth, *rest = self.results
        found = None if truth is None else made[truth]
        return Result(found, [made[slot] for slot in rest], self.number)


class Shortcuts:
    """The graphs of one function, by the guards on their arguments.

    Args:
        function: the function that torch.compile returned.
        backend: what it compiles with.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self._function = function
        self._backend = backend
        self._known: tuple[Shortcut, ...] = ()

    def find(self, given: Sequence[Any]) -> Shortcut | None:
        """Return the graph for some arguments, if it has served similar ones.

        No tensor is twice among them where it was not among those.
        """
        for known in self._known:
            if known.fits(given):
                return known
        return None

    def __call__(self, *given: Any) -> Result | None:
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
            return Result(truth, made, 0)
        self._learn(given, result, call)
        return Result(truth, made, call.number)

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
            known = Shortcut(call, slots, results, given)
        except (AttributeError, TypeError, SystemError):
            return
        self._known = (known, *self._known[: _MOST - 1])


def _slot_of(value: Any, values: Sequence[Any]) -> int | None:
    return next((slot for slot, other in enumerate(values) if other is value), None)
