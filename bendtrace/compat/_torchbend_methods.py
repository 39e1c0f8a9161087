"""The methods of one model, called along paths of their own."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.fx import Graph

from bendtrace import module as core
from bendtrace._trace import Trace
from bendtrace.compat._torchbend_callbacks import running
from bendtrace.errors import InputError
from bendtrace.flow import LogicalFlowStep
from bendtrace.graph.fx import check_guard
from bendtrace.interject.bends.bending import Bending
from bendtrace.interject.bends.catalogue import Source
from bendtrace.torch_rules.owners import module_of

DEFAULT = "_default"
_OF_OTHERS = (
    "something besides bends is inserted in the model, which takes part in calls of the model, "
    "and not of {!r}: remove it, or wrap that method by itself"
)


class ModuleWithMethods(core.BendedModule):
    """A `bendtrace.BendedModule` of which other methods are recorded and bent, too."""

    _untraced = core.BendedModule._untraced | {"_parts", "_state", "_holder", "_latest"}
    _own = core.BendedModule._own | {"version", "config"}

    def __init__(self, model: Any, _wrapped_methods: Iterable[str] = (), **options: Any) -> None:
        holder = None
        if not callable(model) and module_of(model) is not None:
            holder = model
            model = model.forward if hasattr(model, "forward") else _NoForward(model)
        super().__init__(model, **options)
        self._begin(holder, tuple(_wrapped_methods))

    def _begin(self, holder: Any, wrapped: tuple[str, ...]) -> None:
        attributes = self.__dict__
        attributes["_holder"] = holder
        attributes["_latest"] = {}  # traces of other methods
        attributes["_parts"] = {}  # what the other methods are called through, by name
        attributes["_state"] = {
            "wrapped": wrapped, "configs": {}, "config": DEFAULT, "saved": {}, "bent": {},
        }  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        holder = self.__dict__.get("_holder")
        if holder is None or name in self._own or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(holder, name, value)

    @property
    def module(self) -> Any:
        """The model, or the object that holds the modules."""
        return self._model if self._holder is None else self._holder

    wrapped_module = module

    # Methods

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("_state")
        if state is None or name.startswith("__"):
            return super().__getattr__(name)
        if name in state["saved"]:
            saved, names, fn = state["saved"][name]
            return functools.partial(getattr(self, saved), *names, fn=fn)
        holder = self._holder
        found = super().__getattr__(name) if holder is None else getattr(holder, name)
        method = getattr(self.module, name, None)
        if not isinstance(method, types.MethodType) or method.__self__ is not self.module:
            return found

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._has_part(name):
                return found(*args, **kwargs)
            part = self._part(name)
            with running(name):
                return part(*args, **kwargs)

        return call

    def _has_part(self, fn: str) -> bool:
        """Whether calls of a method go along paths of their own."""
        owner, bent = self.module, bool(self._bending.callbacks or self._is_versioned())
        if self._has_others():
            if self._is_used(fn) and (bent or self._parts[fn].bending.callbacks):
                raise InputError(_OF_OTHERS.format(fn))
            if self._holder is not None:
                raise InputError(_OF_OTHERS.format(fn))
            return False
        listed = (*self._state["wrapped"], *getattr(type(owner), "__bended_methods__", ()))
        if self._is_used(fn) or fn in listed or (self._holder is not None and bent):
            return True
        # A method that runs as it is gets the bends of what it calls, not of what it reads.
        bending = self._bending
        keys = [k for s in bending._sources if not s.spec.activations for k in bending._keys(s)]
        read = [key for key in (*keys, *bending.versions.needed) if "." not in key]
        if read and any(source.spec.activations for source in bending._sources):
            raise InputError(
                f"{read[0]!r} is bent, and {fn!r} may read it itself: call bended.trace({fn!r}, "
                "...) first, so that it is bent there, or call the method of bended.module"
            )
        return bool(read)

    def _has_others(self) -> bool:
        sources = self._bending._sources
        ours = {id(made) for source in sources for made in source.insertions}
        ours.add(id(sources._version))
        return any(id(made) not in ours for made in self.insertions)

    def _methods(self) -> list[str]:
        """Return the methods that bends apply to."""
        own = [] if type(self._model) is _NoForward else ["forward"]
        return own + [fn for fn in self._parts if self._is_used(fn)]

    def _is_used(self, fn: str) -> bool:
        """Whether another method was traced, or activations of it are bent."""
        part = self._parts.get(fn)
        return part is not None and (
            self.is_traced(fn) or any(s.spec.activations for s in part.bending._sources)
        )

    def _is_versioned(self) -> bool:
        return bool(self._bending.versions.needed)

    def _part(self, fn: str, *, align: bool = True) -> core.BendedModule:
        """Return what a method is called through, with the bends of the weights."""
        if fn == "forward":
            return self
        part: core.BendedModule | None = self._parts.get(fn)
        if part is None:
            method = getattr(self.module, fn, None)
            if not callable(method):
                kind = type(self.module).__name__
                raise InputError(f"fn= is the name of a method of the model; {kind} has no {fn!r}")
            speculation = self._dispatcher.speculation
            options = {} if speculation is None else speculation.settings.arguments
            part = core.BendedModule(method, max_traces=self._trees.limit, **options)
            self._parts[fn] = part
        if align:
            self._align(part.bending)
        return part

    def _align(self, part: Bending) -> None:
        """Give a method the bends of the weights, and their version."""
        own, sources = self._bending, part._sources
        if part.versions._weights is not own.versions._weights:
            part.versions._weights = own.versions._weights
        if part.versions.mixture != own.versions.mixture:
            part.versions.mixture = dict(own.versions.mixture)
        there = [(s.spec, s.without) for s in sources if not s.spec.activations]
        wanted = [(s.spec, s.without) for s in own._sources if not s.spec.activations]
        if there != wanted:
            made = [Source(spec, True) for spec, _ in wanted]
            for source, (_, without) in zip(made, wanted, strict=True):
                source.without = without
            others = [source for source in sources if source.spec.activations]
            sources.set((*made, *others))
        sources.change_version()

    def _all(self) -> dict[str, Bending]:
        """Return the bends of each method."""
        return {"forward": self._bending} | {fn: p.bending for fn, p in self._parts.items()}

    def is_traced(self, fn: str = "forward") -> bool:
        """Whether a method was traced."""
        part = self if fn == "forward" else self._parts.get(fn)
        return part is not None and part._dispatcher.latest is not None

    def _traced(self, fn: str) -> core.BendedModule:
        if not self.is_traced(fn):
            raise InputError(f"{fn!r} was not traced: call bended.trace({fn!r}, ...) first")
        return self._part(fn)

    def trace(
        self, *args: Any, _return_out: bool = False, fn: str | None = None, **kwargs: Any
    ) -> Any:
        """Run the model, or another method of it, under the tracer.

        Before the positional arguments of the method stands its name, if it is not `forward`, and
        if the model does not take text; `fn=` and `func=` name it, too.

        Returns:
            The graph of the run, whose `flow_steps` are a list of the taken branches. With
            `_return_out`, a pair of that and a tuple of the outputs, with one item if the model
            returns one value.
        """
        if fn is not None and "fn" in self._signature.parameters:
            kwargs["fn"], fn = fn, None
        named = kwargs.get("func")
        if fn is None and isinstance(named, str) and "func" not in self._signature.parameters:
            fn = kwargs.pop("func")
        if fn is None and args and isinstance(args[0], str) and hasattr(self.module, args[0]):
            fn, args = args[0], args[1:]
        fn = fn or "forward"
        if fn == "forward":
            trace = super().trace(*args, **kwargs)
        elif self._has_others() and not self._has_part(fn):
            trace = super().trace(*args, fn=fn, **kwargs)
        else:
            part = self._part(fn)
            with running(fn):
                trace = part.trace(*args, **kwargs)
        self._latest[fn] = trace
        if not _return_out:
            return _graph(trace)
        return _graph(trace), trace.output if type(trace.output) is tuple else (trace.output,)

    def graph(self, fn: str = "forward") -> Graph:  # type: ignore[override]
        """Return the graph of a method's latest trace, one of torch.fx, with its `flow_steps`.

        Args:
            fn: the name of the method.

        Raises:
            InputError: the method was not traced.
        """
        return _graph(self._trace_of(fn))

    def graph_module(self, fn: str = "forward") -> Any:
        """Return the latest trace of a method as a module of torch.fx; nothing is bent in it."""
        return self._trace_of(fn).to_fx(fold=True)

    def _trace_of(self, fn: str) -> Trace:
        if fn == "forward":
            return self.latest_trace
        if fn not in self._latest:
            raise InputError(f"{fn!r} was not traced: call bended.trace({fn!r}, ...) first")
        found: Trace = self._latest[fn]
        return found

    def script(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: nothing here becomes TorchScript."""
        raise InputError(
            "a BendedModule cannot become TorchScript. For a program that runs without Python, "
            "with all branches, but without bends, use "
            "bendtrace.BendedModule(model).export(*inputs, to='model.pt2')"
        )

    def __repr__(self) -> str:
        return super().__repr__() if self._holder is None else f"BendedModule({self._holder!r})"

    # Copies

    def _carried(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        carried = super()._carried(memo)
        state = self._state if memo is None else copy.deepcopy(self._state, memo)
        parts = {fn: part._carried(memo) for fn, part in self._parts.items()}
        return carried | {"torchbend": (self._holder is not None, state, parts)}

    def _take_over(self, carried: dict[str, Any]) -> None:
        is_object, state, parts = carried["torchbend"]
        model: Any = self._model
        self._begin(getattr(model, "holder", None) or model.__self__ if is_object else None, ())
        self.__dict__["_state"] = state
        super()._take_over(carried)
        for fn, kept in parts.items():
            self._part(fn, align=False)._take_over(kept)


class _NoForward:
    """Stands for the `forward` of an object that has none."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        vars(self).update({k: v for k, v in vars(holder).items() if isinstance(v, nn.Module)})

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        kind = type(self.holder).__name__
        raise InputError(f"{kind} has no forward: call a method of it, as in bended.encode(x)")


def _graph(trace: Trace) -> Graph:
    made: Graph = trace.to_fx(fold=True).graph
    for node in reversed(list(made.nodes)):
        if node.target is check_guard:  # a graph of torchbend is that of one path
            made.erase_node(node)
    made.flow_steps = list(trace.flow_steps.of(LogicalFlowStep))  # type: ignore[attr-defined]
    return made
