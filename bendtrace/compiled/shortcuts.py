"""Calling a compiled graph directly, once torch.compile's own guards have let such a call by.

What torch.compile does before each call - entering its frame evaluation, testing guards on all
that a function can read - takes longer than a small graph. Of all that, a path's function can
depend on its arguments alone: the rest is what the path's own check has compared already. So a
graph that torch.compile has once chosen for some arguments is called for others like them, where
*like* is decided by the very guards on tensors that torch.compile uses: types, dtypes, devices,
dispatch keys, requires_grad, sizes and strides, all of them exactly.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bendtrace.tape.captured import identical

__all__ = ["Backend", "Shortcuts"]

_MOST = 8


class Backend:
    """A backend of torch.compile that takes note of what it makes, and of what is called.

    Args:
        backend: what compiles.
        may_assume: whether graphs may take something for granted about sizes that depend on
            values; otherwise those that do are not compiled.

    Attributes:
        graphs: how many graphs it has compiled.
        assumes: whether one was not compiled for that reason.
    """

    def __init__(self, backend: Callable[..., Any], may_assume: bool = False) -> None:
        self._backend = backend
        self._may_assume = may_assume
        self._latest = threading.local()
        self.graphs = 0
        self.assumes = False
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

        def run(*args: Any) -> Any:
            results = compiled(*args)
            latest.call = compiled, args, results
            return results

        return run

    def take(self) -> tuple[Callable[..., Any], Sequence[Any], Sequence[Any]] | None:
        """Return the graph that this thread has called last, its arguments and its results."""
        call: tuple[Callable[..., Any], Sequence[Any], Sequence[Any]] | None
        call = self._latest.__dict__.pop("call", None)
        return call


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
    """Whether a graph is right only if sizes that depend on values are such and such.

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


class _Shortcut:
    """One graph, for arguments that are all alike.

    Attributes:
        graph: the graph.
    """

    __slots__ = ("_numbers", "_slots", "_tensors", "check", "graph", "results")

    def __init__(
        self, graph: Callable[..., Any], slots: list[Any], results: list[Any], given: Sequence[Any]
    ) -> None:
        tensors = [value for value in given if isinstance(value, Tensor)]
        self.graph = graph
        self.results = results
        # Mostly the arguments of the function are those of the graph.
        self._slots = None if slots == list(range(len(given))) else slots
        sizes, strides = [list(t.size()) for t in tensors], [list(t.stride()) for t in tensors]
        # What torch.compile's guards are made of, but for the stretch from Python: seen in torch
        # 2.13 and 2.14. Where it is missing there are no shortcuts; tests/test_compiled.py notices.
        guards: Any = torch._C._dynamo.guards
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.check: Callable[..., bool] = made.check
        self._tensors = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
        self._numbers = [(i, v) for i, v in enumerate(given) if not isinstance(v, Tensor)]

    def fits(self, given: Sequence[Any]) -> bool:
        """Whether arguments are like those that it was made for."""
        if self._numbers:
            if not all(identical(given[slot], value) for slot, value in self._numbers):
                return False
            given = [given[slot] for slot in self._tensors]
        return self.check(*given)

    def call(self, given: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Call the graph; return what the function would."""
        slots = self._slots
        made = self.graph(*(given if slots is None else [given[slot] for slot in slots]))
        truth, *rest = self.results
        return (None if truth is None else made[truth]), [made[slot] for slot in rest]


class Shortcuts:
    """The graphs of one function, by what their arguments have to be like.

    Args:
        function: the function, as torch.compile gave it back.
        backend: what it compiles with.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self._function = function
        self._backend = backend
        self._known: tuple[_Shortcut, ...] = ()

    def __call__(self, *given: Any) -> tuple[Any, Sequence[Any]] | None:
        """Call the function: return the truth of its guards, and its tensors."""
        for known in self._known:
            if known.fits(given):
                return known.call(given)
        self._backend.take()
        result: tuple[Any, Sequence[Any]] | None
        with warnings.catch_warnings():
            # torch.compile asks all that it is given for gradients, where a model would not.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
            result = self._function(*given)
        call = self._backend.take()
        if result is not None and call is not None:
            self._learn(given, result, *call)
        return result

    def _learn(
        self,
        given: Sequence[Any],
        result: tuple[Any, Sequence[Any]],
        graph: Callable[..., Any],
        args: Sequence[Any],
        made: Sequence[Any],
    ) -> None:
        """Take a shortcut from now on, if it can be told what goes where."""
        slots = [_slot_of(arg, given) for arg in args]
        results = [_slot_of(value, made) for value in result[1]]
        if result[0] is not None:
            results.insert(0, _slot_of(result[0], made))
        if None in slots or None in results:
            return
        results = results if result[0] is not None else [None, *results]
        try:
            known = _Shortcut(graph, slots, results, given)
        except (AttributeError, TypeError, SystemError):
            return
        self._known = (known, *self._known[: _MOST - 1])


def _slot_of(value: Any, values: Sequence[Any]) -> int | None:
    return next((slot for slot, other in enumerate(values) if other is value), None)
