"""torchbend: `BendedModule` with its `trace` and `graph()`, and all bending callbacks by name.

>>> import torch, bendtrace as bt
>>> tb = bt.compat.torchbend
>>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> graph, out = bended.trace(torch.tensor([-1.0, 0.0]), _return_out=True)
>>> print(out[0], [node.name for node in bended.graph().nodes])
tensor([0., 0.]) ['input_1', '_0', '_1', 'output']
>>> _ = bended.bend(tb.Bias(1.0), "1$")
>>> bended(torch.zeros(2))
tensor([1., 1.])
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx import Graph

from bendtrace import bends
from bendtrace import module as core
from bendtrace._trace import Trace
from bendtrace.bends import Bend
from bendtrace.compat import _torchbend_callbacks
from bendtrace.compat._torchbend_callbacks import *  # noqa: F403
from bendtrace.compat._torchbend_callbacks import (
    BendingConfig,
    Lambda,
    flat_callbacks,
    further_arguments,
    name_by,
    running,
)
from bendtrace.errors import BendShapeError, InputError, NeverFiredWarning, NodePathError
from bendtrace.export.exporting import Exported
from bendtrace.flow import LogicalFlowStep
from bendtrace.insert.bend_catalogue import (
    Activation,
    BendHandle,
    BendSpec,
    CallbackInsertions,
    Catalogue,
    NamedActivations,
    Restoring,
    activation_table,
    compile_pattern,
)
from bendtrace.insert.bending import ORIGINAL, Bending, capturing, written
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.resolver import Knowledge, flat
from bendtrace.insert.where import Where, near_misses
from bendtrace.log.fx import check_guard
from bendtrace.log.nodes import Text
from bendtrace.log.path_views import Node, NodePath
from bendtrace.python.checks import free_name
from bendtrace.python.internals import pytree
from bendtrace.tape.structure import Instance
from bendtrace.watch.owners import module_of

__all__ = [
    "Bend", "BendShapeError", "BendedModule", "BendedWrapper", "Bending", "BendingError",
    "compare_outs",
]  # fmt: skip
__dir__ = __all__.copy
__all__ += _torchbend_callbacks.__all__
__all__.sort()

_OPTIONS = {"allow_none", "args", "bended", "detach", "kwargs", "passes", "return_output"}


def compare_outs(
    out1: Any, out2: Any, allow_subclasses: bool = False, allow_almost_equal: bool = False
) -> bool:
    """Return whether two outputs are alike, as `torch.allclose` says of their tensors.

    Args:
        out1: one output: tensors, distributions, numbers, and lists, tuples and dicts of these.
        out2: the other one.
        allow_subclasses: whether the type of `out1` may be a subclass of the type of `out2`.
        allow_almost_equal: whether they may differ by 1e-5.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchbend.compare_outs([torch.ones(2)], [torch.ones(2)])
        True
    """
    options = allow_subclasses, allow_almost_equal
    kind = dict if isinstance(out2, dict) else type(out2)
    is_alike = isinstance(out1, kind) if kind is dict or allow_subclasses else type(out1) is kind
    if not is_alike:
        return False
    if isinstance(out1, Distribution):
        names = out1.arg_constraints
        return all(compare_outs(getattr(out1, n), getattr(out2, n), *options) for n in names)
    if isinstance(out1, (list, tuple, dict)):
        if len(out1) != len(out2) or (isinstance(out1, dict) and out1.keys() != out2.keys()):
            return False
        pairs = (
            [(v, out2[k]) for k, v in out1.items()]
            if isinstance(out1, dict)
            else zip(out1, out2, strict=True)
        )
        return all(compare_outs(one, other, *options) for one, other in pairs)
    if isinstance(out1, Tensor):
        near_by = 1e-5 if allow_almost_equal else 1e-8
        return out1.shape == out2.shape and torch.allclose(out1, out2, atol=near_by)
    return bool(out1 == out2 or (allow_almost_equal and abs(out1 - out2) <= 1e-5))


# The methods of one model, called along paths of their own.

DEFAULT = "_default"
_OF_OTHERS = (
    "something besides bends is inserted in the model, which takes part in calls of the model, "
    "and not of {!r}: remove it, or wrap that method by itself"
)


class BendedModule(core.BendedModule):
    """A `bendtrace.BendedModule` with torchbend's conventions.

    Calls with other inputs are right, while torchbend's graph follows one example. Methods that
    were traced or bent, and those that the class lists in `__bended_methods__`, are called along
    their own recorded paths. They share the weights and the bends of weights; activations are
    bent in each method by itself. A pattern bends all activations and weights whose names it
    matches from the start.

    Args:
        model: a module, a function, or an object that holds modules and has methods.
        _wrapped_methods: further methods to bend.
        **options: those of `bendtrace.BendedModule`.

    Attributes:
        version: the version of the weights in use; "_default" for the model's own.
        config: the name of the bends in use; "_default" for those without one.

    Raises:
        InputError: `model` can neither be called nor holds modules, or an option is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Coder:
        ...     def __init__(self):
        ...         self.inner = torch.nn.Identity()
        ...     def encode(self, x):
        ...         return self.inner(x) * x.shape[0]
        >>> tb = bt.compat.torchbend
        >>> bended = tb.BendedModule(Coder())
        >>> graph, out = bended.trace("encode", x=torch.ones(3), _return_out=True)
        >>> out
        (tensor([3., 3., 3.]),)
        >>> _ = bended.bend(tb.Bias(1.0), "inner", fn="encode")
        >>> bended.encode(torch.ones(2))
        tensor([4., 4.])
    """

    _untraced = core.BendedModule._untraced | {
        "_parts", "_state", "_holder", "_latest", "_inputs"
    }  # fmt: skip
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
        attributes["_inputs"] = {}  # of the latest traces, by method
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
        """Return whether calls of a method have their own paths."""
        owner, bent = self.module, bool(self._bending.callbacks or self._bending.versions.needed)
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
        """Return whether another method was traced, or activations of it are bent."""
        part = self._parts.get(fn)
        return part is not None and (
            self.is_traced(fn) or any(s.spec.activations for s in part.bending._sources)
        )

    def _part(self, fn: str, *, align: bool = True) -> core.BendedModule:
        """Return the model that calls a method, with the bends of the weights."""
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
        current = [(s.spec, s.without) for s in sources if not s.spec.activations]
        wanted = [(s.spec, s.without) for s in own._sources if not s.spec.activations]
        if current != wanted:
            made = [CallbackInsertions(spec, True) for spec, _ in wanted]
            for source, (_, without) in zip(made, wanted, strict=True):
                source.without = without
            others = [source for source in sources if source.spec.activations]
            sources.set((*made, *others))
        sources.change_version()

    def _all(self) -> dict[str, Bending]:
        """Return the bends of each method."""
        return {"forward": self._bending} | {fn: p.bending for fn, p in self._parts.items()}

    def is_traced(self, fn: str = "forward") -> bool:
        """Return whether a method was traced."""
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
        self._latest[fn], self._inputs[fn] = trace, (args, kwargs)
        if not _return_out:
            return _folded_graph(trace)
        return _folded_graph(trace), trace.output if type(trace.output) is tuple else (
            trace.output,
        )

    def graph(self, fn: str = "forward") -> Graph:  # type: ignore[override]
        """Return the graph of a method's latest trace, one of torch.fx, with its `flow_steps`.

        Args:
            fn: the name of the method.

        Raises:
            InputError: the method was not traced.
        """
        return _folded_graph(self._trace_of(fn))

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

    def script(
        self,
        *inputs: Any,
        fn: str | None = None,
        script: bool = True,
        export_for_nn: bool = False,
        **options: Any,
    ) -> Scripted:
        """Return the traced methods as programs without Python, in place of TorchScript.

        Args:
            *inputs: see `bendtrace.BendedModule.export`; none for those of the latest traces.
            fn: the name of a method, to return only this one.
            script: no effect.
            export_for_nn: has to be False: nn~ loads TorchScript only.
            **options: those of `bendtrace.BendedModule.export`.

        Raises:
            ExportError: something has no form without Python.
            InputError: the method was not traced, or something is inserted that no program can
                call.
        """
        if export_for_nn:
            raise InputError("nn~ loads TorchScript only, and a program of torch.export is none")
        names = sorted(self._inputs, key=lambda name: name != "forward")
        if fn is not None:
            names = [fn] * bool(self._traced(fn))
        given = {name: inputs or (self._inputs[name],) for name in names}
        outputs = {name: self._trace_of(name)._recording.root.output for name in names}
        bended = copy.deepcopy(self) if self.controllables else self
        return Scripted(bended, given, outputs, options)

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
        for callback in self.bending_callbacks:
            name_by(callback, self)

    # Names

    def _names(self, fn: str) -> Names:
        return Names(self._part(fn, align=False)._knowledge)

    def name_of_activation(self, path: str, fn: str = "forward") -> str:
        """Return the name of an activation by its node path."""
        return self._names(fn).at(path)[0]

    def weight_shape(self, name: str) -> torch.Size:
        """Return the shape of a weight."""
        return self.state_dict()[name].shape  # type: ignore[no-any-return]

    def activations(
        self, fn: str = "forward", op: Any = None, flt: Any = None, exclude: Any = None
    ) -> dict[str, Activation]:
        """Return the activations of a method by name, with their `op`, `shape` and `dtype`."""
        kept = {found.name for found in self._traced(fn).bending.activations(flt, exclude)}
        return {
            name: found
            for name, found in self._names(fn).by_name.items()
            if found.name.partition(":")[0] in kept and (op is None or found.op in set(flat([op])))
        }

    def activation_names(  # type: ignore[override]
        self, fn: str = "forward", flt: Any = None, exclude: Any = None, _with_bended: bool = True
    ) -> list[str]:
        """Return the names of the activations of a method; `conv_bended` is one after its bends."""
        names = list(self.activations(fn, flt=flt, exclude=exclude))
        bent = self.bended_activations(fn) if _with_bended else {}
        return names + [f"{name}_bended" for name in names if name in bent]

    def activation_shape(self, name: str, fn: str = "forward") -> torch.Size | None:
        """Return the shape of an activation."""
        found = self.activations(fn)
        plain = name if name in found else name.removesuffix("_bended")
        if plain not in found:
            raise InputError(f"{fn} has no activation {name!r}; {near_misses(name, found)}")
        return found[plain].shape

    def print_activations(  # type: ignore[override]
        self, fn: str = "forward", flt: Any = None, exclude: Any = None, out: Any = None
    ) -> Text:
        """Print a table of the activations of a method, and return it."""
        found = self.activations(fn, flt=flt, exclude=exclude)
        return written(activation_table(a._replace(name=k) for k, a in found.items()), out)

    def resolve_parameters(self, *patterns: Any) -> list[str]:
        """Return the names of the parameters that patterns match from the start."""
        expressions = [compile_pattern(p) for p in patterns if isinstance(p, (str, re.Pattern))]
        return [n for n in self.weight_names if any(one.match(n) for one in expressions)]

    def resolve_activations(self, *patterns: Any, fn: str = "forward") -> list[str]:
        """Return the names of the known activations that patterns match from the start."""
        names, found = self._names(fn), dict[str, None]()
        for pattern in patterns:
            named, pattern = split(pattern)
            if named in (None, fn) and isinstance(pattern, (str, re.Pattern)):
                found.update((names.by_path[a.name], None) for _, a in names.matching(pattern))
        return list(found)

    def bendable_keys(
        self, *patterns: Any, fn: str = "forward", return_weights: bool = True,
        return_activations: bool = True,
    ) -> list[str]:  # fmt: skip
        """Return the names of the weights, and activations of a method, that patterns match."""
        weights = self.resolve_parameters(*patterns) if return_weights else []
        acts = self.resolve_activations(*patterns, fn=fn) if return_activations else []
        return weights + acts

    def _keys_of(self, bend: BendSpec, fn: str | None = None) -> list[str]:
        """Return the names of all values that a bend of a configuration bends."""
        found = [] if bend.weights is False else self.resolve_parameters(*bend.where)
        for name in ([fn] if fn else self._methods()) if bend.activations else []:
            found += [f"{name}:{a}" for a in self.resolve_activations(*bend.where, fn=name)]
        return found

    # Bending

    def bend(
        self,
        callback: Any,
        *where: Where,
        fn: str | Sequence[str] | None = None,
        verbose: bool = False,
        bend_param: bool = True,
        bend_graph: bool = True,
        allow_none: bool = False,
        weights: bool | None = None,
        activations: bool = True,
    ) -> Bent:
        """Bend activations and weights from now on.

        It takes what `bendtrace.BendedModule.bend` takes. Patterns match the names of weights
        (unless `bend_param` is False) and activations (unless `bend_graph` is) from the start, and
        `encode:conv` those of activations of one method. `fn` names the methods in which
        activations are bent: without it, all that were traced or bent, and `forward`. Weights are
        bent in every method. `verbose` prints what is bent.

        Raises:
            InputError: nothing has such a name, or an argument is invalid.
        """
        if isinstance(callback, bends.BendingConfig) and not where:
            specs = list(callback)
        else:
            if callable(callback) and not isinstance(callback, (bends.Bend, type)):
                callback = Lambda(callback)
            if not isinstance(callback, bends.Bend) or not where:
                self._bending.bend(callback, *where)  # which raises
            by_name = None if bend_param and weights is not False else False
            by_path = bend_graph and activations
            specs = [BendSpec(callback, tuple(flat(where)), by_name, by_path)]
        fns = self._methods() if fn is None else list(flat([fn]))
        plans = [(spec, *self._placed(spec, fns, allow_none)) for spec in specs]
        if len(self._bending.versions.mixture) > 1 and any(patterns for _, patterns, _ in plans):
            raise InputError("a mixture of versions is in use: set a version to bend its weights")
        controllables = self.controllables
        for parameter in (p for spec in specs for p in spec.callback.parameters):
            if controllables.setdefault(parameter.name, parameter) is not parameter:
                raise InputError(f"another parameter already has the name {parameter.name!r}")
        handles: list[BendHandle] = []
        try:
            for spec, patterns, places in plans:
                name_by(spec.callback, self)
                one = spec.callback
                if patterns:
                    made = self._bending.bend(one, *patterns, weights=True, activations=False)
                    handles.append(made)
                for name, items in places.items():
                    bending = self._part(name).bending
                    several = [item for item in items if not isinstance(item, Node)]
                    for part in (several, *([i] for i in items if isinstance(i, Node))):
                        if part:  # a node that is one pass is inserted by itself
                            made = bending.bend(one, *part, weights=False, allow_none=allow_none)
                            handles.append(made)
        except Exception:
            for handle in handles:
                handle.remove()
            raise
        if verbose:
            for key in (key for spec, *_ in plans for key in self._keys_of(spec)):
                print(f"bending {key}")
        return Bent(handles)

    def _placed(
        self, spec: BendSpec, fns: list[str], allow_none: bool
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """Return the patterns that select weights, and the bends of each method."""
        weights: list[Any] = []
        places: dict[str, list[Any]] = {}
        by_weight = spec.weights is not False and getattr(spec.callback, "weight_compatible", True)
        for given in spec.where:
            named, item = split(given)
            methods = fns if named is None else [named]
            if not isinstance(item, (str, re.Pattern)):
                for fn in methods:
                    places.setdefault(fn, []).append(item)
                continue
            found = bool(by_weight and named is None and self.resolve_parameters(item))
            weights += [item] if found else []
            for fn in methods if spec.activations else ():
                patterns = self._names(fn).patterns(item) or ([item] if allow_none else [])
                found = found or bool(patterns)
                places.setdefault(fn, []).extend(patterns)
            if not found and not allow_none:
                self._raise_unknown(item, methods, by_weight, spec.activations)
        return weights, {fn: items for fn, items in places.items() if items}

    def _raise_unknown(self, item: Any, methods: list[str], weights: bool, acts: bool) -> None:
        names = list(self.weight_names) if weights else []
        for fn in methods if acts else ():
            names += [a.name for a in self._names(fn).every if a.level != "inside"]
        text = item if isinstance(item, str) else item.pattern
        untraced = [fn for fn in methods if not self.is_traced(fn)]
        hint = f" (not traced yet: {', '.join(untraced)})" if untraced else ""
        hint = hint if methods else " (no method was traced yet)"
        raise InputError(
            f"nothing that can be bent matches {text!r}; {near_misses(text, names)}{hint} "
            "(allow_none=True waits for a match in later runs)"
        )

    def reset(self, *what: Any, version: str | None = None) -> None:
        """Stop bending.

        Args:
            *what: callbacks, and names or patterns of bent values; without any, everything, and
                the named configurations are forgotten.
            version: a version of the weights to go to.

        Raises:
            InputError: nothing that is bent matches.
        """
        if not what:
            self.reset_bending()
            self._state.update(configs={}, config=DEFAULT)
        for named, item in map(split, what):
            errors = []
            every = self._all() if named is None else {named: self._part(named).bending}
            for fn, bending in every.items():
                try:
                    for one in self._names(fn).keys(item, bending.bended_keys()):
                        bending.reset(one)
                except InputError as error:
                    errors.append(error)
            if len(errors) == len(every):
                raise errors[0]
        if version is not None:
            self.version = version

    def reset_bending(self) -> None:
        """Stop bending; named configurations stay."""
        for bending in self._all().values():
            bending.reset()

    @property
    def controllables(self) -> dict[str, bends.BendingParameter]:
        """The parameters of all callbacks, by name."""
        every = (p for callback in self.bending_callbacks for p in callback.parameters)
        return {parameter.name: parameter for parameter in every}

    def update(self, name: str | None = None, value: Any = None) -> None:
        """Set a parameter of the callbacks, or match the patterns again."""
        controllables = self.controllables
        if name is None:
            for bending in self._all().values():
                bending.update()
        elif name not in controllables or value is None:
            self._bending.update(name, value)  # which raises, or knows it
        else:
            controllables[name].value = value

    @property
    def bending_callbacks(self) -> list[bends.Bend]:
        """The callbacks, each once."""
        return list(dict.fromkeys(c for b in self._all().values() for c in b.callbacks))

    def _bent(self, bending: Bending, activations: bool) -> Iterator[tuple[str, bends.Bend]]:
        for source in bending._sources:
            if source.spec.activations is activations:
                for key in bending._keys(source):
                    yield key, source.spec.callback

    @property
    def bended_params(self) -> dict[str, list[bends.Bend]]:
        """The callbacks of each bent weight."""
        return _by_name(self._bent(self._bending, False))

    def bended_activations(self, fn: str = "forward") -> dict[str, list[bends.Bend]]:
        """Return the callbacks of each bent activation of a method."""
        if fn not in self._all():
            return {}
        names = self._names(fn)
        bent = self._bent(self._part(fn, align=False).bending, True)
        return _by_name((name, callback) for key, callback in bent for name in names.at(key))

    def bend_graph(self, fn: str = "forward") -> Graph:
        """Return the graph of a method, with a node `conv_bended` after each bent activation."""
        graph, names = self.graph(fn), self._names(fn)
        graph.owning_module = None  # which does not have the callbacks
        by_name = {node.name: node for node in graph.nodes}
        for name in self.bended_activations(fn):
            activation = names.by_name.get(name)
            other = next((k for k, found in names.aliases.items() if found is activation), name)
            node = by_name.get(name) or by_name.get(other)
            if node is None:
                raise InputError(f"the graph of {fn} has no node for {name!r}")
            with graph.inserting_after(node):
                given: dict[str, Any] = {"name": f"{fn}:{name}"}
                bent = graph.create_node("call_module", f"{name}_callback", (), given)
            bent.name = f"{name}_bended"
            node.replace_all_uses_with(bent)
            bent.args = (node,)
        return graph

    def bended_keys(self, fn: str = "forward") -> list[str]:
        """Return the names of the bent weights, and of the bent activations of a method."""
        return [*self.bended_params, *self.bended_activations(fn)]

    @contextmanager
    def capture(self, *callbacks: bends.Capture) -> Iterator[None]:
        """Make capturing callbacks keep the values they see, within a `with` statement."""
        every = [c for one in self.bending_callbacks for c in flat_callbacks(one)]
        with capturing(callbacks, [c for c in every if isinstance(c, bends.Capture)]):
            yield

    # Configurations

    @property
    def config(self) -> str:
        """The name of the bends in use; "_default" for those without one."""
        return str(self._state["config"])

    @config.setter
    def config(self, name: str | None) -> None:
        self.set_config(DEFAULT if name is None else name)

    def bending_config(self, name: str | None = None) -> BendingConfig:
        """Return the active bends, or those saved under a name, as a bound configuration."""
        configs = self._state["configs"]
        if name is None or name == self.config:
            return BendingConfig(*self._bends(), module=self)
        if name not in configs:
            raise InputError(f"there is no configuration {name!r}; {near_misses(name, configs)}")
        return BendingConfig(*configs[name], module=self)

    def _bends(self) -> BendingConfig:
        made = BendingConfig()
        for fn, bending in self._all().items():
            for spec in (source.spec for source in bending._sources):
                if spec.activations:
                    where = [
                        f"{fn}:{w}" if isinstance(w, str) else MethodValue(fn, w)
                        for w in spec.where
                    ]
                    made.append(replace(spec, where=tuple(where)))
                elif fn == "forward":
                    made.append(spec)
        return made

    def save_config_as(self, name: str, force: bool = False) -> None:
        """Save the active bends under a name."""
        if name in self._state["configs"] and not force:
            raise InputError(f"there is a configuration {name!r} already; force=True replaces it")
        self._state["configs"][name] = self._bends()

    def set_config(self, name: str) -> Restoring:
        """Bend by a named configuration, and by nothing else; a context manager that goes back."""
        before, left = self.config, self._bends()
        configs = {DEFAULT: BendingConfig(), **self._state["configs"], before: left}
        if name not in configs:
            raise InputError(f"there is no configuration {name!r}; {near_misses(name, configs)}")
        self.reset_bending()
        try:
            self.bend(configs[name], allow_none=True)
        except Exception:
            self.reset_bending()
            self.bend(left, allow_none=True)
            raise
        self._state.update(configs=configs, config=name)
        return Restoring(lambda: self.set_config(before))

    # Versions of the weights

    @property
    def version(self) -> str:
        """The version of the weights in use; "_default" for the model's own."""
        return str(self._bending.versions).replace(ORIGINAL, DEFAULT)

    @version.setter
    def version(self, name: str | None) -> None:
        self.set_version(name)

    def set_version(self, name: str | None = None) -> Restoring:
        """Use a version of the weights, with its bends; a context manager that goes back."""
        return self._choose({_version(name): 1.0})

    def interpolate(self, *default: float, **weights: float) -> Restoring:
        """Use a mixture of versions: the share of the model's own, and of others by name.

        Raises:
            InputError: weights of these versions are bent, or there is no such version.
        """
        if len(default) > 1:
            raise InputError("interpolate() takes one positional argument: the model's own share")
        own = {ORIGINAL: default[0]} if default else {}
        return self._choose(own | {_version(name): share for name, share in weights.items()})

    def _choose(self, mixture: dict[str, Any]) -> Restoring:
        bending, bent = self._bending, self._state["bent"]
        sources, versions = bending._sources, bending.versions
        names = [DEFAULT, *versions.names[1:]]
        if unknown := [name for name in mixture if name not in versions]:
            raise InputError(
                f"there is no version {unknown[0]!r}; {near_misses(unknown[0], names)}"
            )
        chosen, before = versions.checked(mixture), versions.mixture
        if len(chosen) > 1 and (self.bended_params or any(bent.get(name) for name in chosen)):
            raise InputError("weights are bent: write(name) saves them as a version to mix")
        if len(before) == 1 and chosen.keys() != before.keys():
            bent[next(iter(before))] = [s for s in sources if not s.spec.activations]
        weights = bent.pop(next(iter(chosen)), []) if len(chosen) == 1 else []
        if chosen.keys() == before.keys():
            weights = [s for s in sources if not s.spec.activations]
        versions.mixture = chosen
        sources.set((*weights, *(s for s in sources if s.spec.activations)))
        return Restoring(lambda: self._choose(before))

    def write(self, version: str | None = None, force: bool = False, clear: bool = True) -> None:
        """Save the weights as they are bent now as a version, and use it."""
        if version is None:
            version, force = self.version, True
        if version == DEFAULT:
            raise InputError("the model's own weights are never written to: name a version")
        self._bending.add_version(version, force=force)
        if clear:
            self.reset()
        self.version = version

    def create_version(self, name: str, weights: Any, strict: bool = True) -> list[str]:
        """Save a model's state dict as a version; return the names of foreign keys."""
        if not isinstance(weights, Mapping):
            owner = module_of(weights)
            if owner is None:
                raise InputError(f"weights are a state dict or a model, not {weights!r}")
            weights = owner.state_dict()
        originals = self.state_dict(DEFAULT)
        foreign = [key for key in weights if key not in originals]
        if strict and originals.keys() != weights.keys():
            names = [*foreign, *(key for key in originals if key not in weights)]
            raise InputError(f"version {name!r} differs in {names[:5]}: strict=False accepts that")
        used = self.bended_state_dict() | {k: v for k, v in weights.items() if k in originals}
        self._bending.add_version(name, used, strict=strict, force=True)
        return foreign

    def state_dict(self, *args: Any, version: str | None = None, **kwargs: Any) -> Any:
        """Return the state dict of a version; None for the one in use, without its bends."""
        if args and isinstance(args[0], str):
            version, args = args[0], args[1:]
        own = super().state_dict(*args, **kwargs)
        if args or kwargs:  # torch asks for the model's own
            return own
        versions = self._bending.versions
        if version is None and len(versions.mixture) > 1:
            return own
        name = next(iter(versions.mixture)) if version is None else _version(version)
        return type(own)(own | versions.weights(name)) if name != ORIGINAL else own

    def bended_state_dict(self, version: str | None = None) -> dict[str, Tensor]:
        """Return the weights as a call uses them: of a version, and bent."""
        with Restoring(lambda: None) if version is None else self.set_version(version):
            kept = {key: value.detach().clone() for key, value in self.state_dict().items()}
            return kept | self._bending.bended_state_dict()

    # Activations

    def get_activations(
        self,
        *names: Where,
        fn: str = "forward",
        _return_graph: bool = False,
        _save_as_method: str | None = None,
        _filter_bended: bool = False,
        **inputs: Any,
    ) -> Any:
        """Call a method, and return some of its activations, by name.

        Args:
            *names: patterns. `conv` matches the activation before its bends, and `conv_bended`
                after them.
            fn: the method, which was traced; `_save_as_method` is a name to call this by again.
            **inputs: keyword arguments of the method. With an option of
                `bendtrace.BendedModule.get_activations` among them, it does what that does.

        Raises:
            InputError: the method was not traced, or has no such activation.
        """
        patterns = [name for name in names if isinstance(name, str)]
        if inputs.keys() & _OPTIONS or len(patterns) < len(names):
            return super().get_activations(*names, **inputs)
        part, catalogue = self._traced(fn), self._names(fn)
        wanted: dict[str, str] = {}  # paths by name
        after: dict[str, str] = {}
        bent = {} if _filter_bended else self.bended_activations(fn)
        for name in patterns:
            found = dict(catalogue.matching(name))
            wanted |= {key: activation.name for key, activation in found.items()}
            over = [k for k in bent if re.match(name, f"{k}_bended") and k in catalogue.by_name]
            after |= {f"{key}_bended": catalogue.by_name[key].name for key in over}
            if not found and not over:
                raise InputError(
                    f"{fn} has no activation {name!r}; {near_misses(name, catalogue.by_name)}"
                )
        seen, paths = _ValueRecorder(), list(map(NodePath, dict.fromkeys(wanted.values())))
        with running(fn), ExitStack() as stack:
            for path in after.values():
                stack.enter_context(part.interject(NodePath(path), seen))
            every = paths or list(map(NodePath, after.values()))
            values = core.BendedModule.get_activations(part, *every, kwargs=inputs, bended=False)
        outs: dict[str, Any] = {}
        for key, path in wanted.items():
            outs |= {
                key + at.removeprefix(path): value
                for at, value in values.items()
                if at == path or re.fullmatch(rf"{re.escape(path)}:\d+", at)
            }
        for key, path in after.items():
            passes = seen.kept.get(path, [])
            several = len(passes) > 1
            outs |= {f"{key}:{n}" if several else key: v for n, v in enumerate(passes, 1)}
        self._save(_save_as_method, "get_activations", names, fn)
        return (outs, self.graph(fn)) if _return_graph else outs

    def from_activations(
        self,
        *names: Any,
        callbacks: Sequence[bends.Bend] | None = None,
        fn: str = "forward",
        _return_graph: bool = False,
        _save_as_method: str | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the rest of a method from given activations, and return its output.

        Args:
            *names: the activations, whose values are among the inputs. Their bends apply to these
                values. Or what `bendtrace.BendedModule.from_activations` takes, first a dict.
            callbacks: the callbacks that bend the activations, instead of names.
            fn: the method, which was traced.
            **inputs: the values by name; keyword arguments of the method, as far as the rest needs
                them; and further arguments of the callbacks, by name. Of several activations,
                `conv_weights` is the argument `weights` at `conv`. Of several callbacks with the
                same argument, a list has one value each.

        Raises:
            InputError: the method was not traced, has no such activation, or an input is missing or
                unknown.
        """
        part, catalogue = self._traced(fn), self._names(fn)
        if names and isinstance(names[0], Mapping):
            with running(fn):
                return core.BendedModule.from_activations(part, *names, **inputs)
        bent = self.bended_activations(fn)
        if not names:
            names = tuple(n for n, over in bent.items() if any(c in over for c in callbacks or ()))
        places = (
            catalogue.aliases | {a.name: a for a in catalogue.by_name.values()} | catalogue.by_name
        )
        for name in names:
            if name not in places or name not in inputs:
                what = "has no activation" if name not in places else "is given no value for"
                raise InputError(
                    f"{fn} {what} {name!r}; {near_misses(str(name), catalogue.by_name)}"
                )
        values = {NodePath(places[name].name): inputs.pop(name) for name in names}
        given: dict[tuple[int, str], dict[str, Any]] = {}
        used = set[str]()
        for name in names:
            path, counts = places[name].name, dict[str, int]()
            over = [c for one in bent.get(catalogue.by_path[path], ()) for c in flat_callbacks(one)]
            wanted = [(c, a) for c in over for a in further_arguments(c)]
            for callback, argument in wanted:
                key = f"{name}_{argument}" if f"{name}_{argument}" in inputs else argument
                number = counts[argument] = counts.get(argument, -1) + 1
                if key in inputs:
                    shared = sum(a == argument for _, a in wanted) > 1
                    value = inputs[key][number] if shared else inputs[key]
                    given.setdefault((id(callback), path), {})[argument] = value
                    used.add(key)
        method = part._signature.parameters
        foreign = (
            inputs.keys() - used - method - catalogue.by_name.keys() - catalogue.aliases.keys()
        )
        foreign = {n for n in foreign if n.removesuffix("_bended") not in catalogue.by_name}
        if foreign:
            raise InputError(f"neither {fn} nor a callback takes {sorted(foreign)[0]!r}")
        rest = {key: value for key, value in inputs.items() if key in method}
        with running(fn, given):
            output = core.BendedModule.from_activations(part, values, _bended=False, **rest)
        self._save(_save_as_method, "from_activations", names, fn)
        return (output, self.graph(fn)) if _return_graph else output

    def _save(self, name: str | None, call: str, names: tuple[Any, ...], fn: str) -> None:
        if name is None:
            return
        if not name.isidentifier() or hasattr(type(self), name) or hasattr(self.module, name):
            raise InputError(f"a method cannot be saved as {name!r}, which is taken or no name")
        self._state["saved"][name] = call, names, fn


class _ValueRecorder(Interjection):
    """Keeps the values of nodes after all earlier insertions."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep a value."""
        with torch.inference_mode(False), torch.no_grad():
            kept = pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), output)
        for path in (at.path, f"{at.path}:{at.number + 1}"):
            self.kept.setdefault(path, []).append(kept)


BendedWrapper = BendedModule
compare_state_dict_tensors = compare_outs
bending: types.ModuleType = sys.modules[__name__]  # where torchbend has its callbacks
BendingError = InputError


class Scripted:
    """Methods as programs without Python, called by their names; a call of it is one of `forward`.

    `set_mask(0.5)` sets the parameter `mask`, for which new programs are made, and `get_mask()`
    returns it.
    """

    def __init__(
        self, bended: Any, inputs: dict[str, Any], outputs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self._bended, self._inputs, self._options = bended, inputs, options
        self._programs: dict[str, Exported] = {}
        self._outputs = {fn: outputs[fn] for fn in inputs}
        for fn in inputs:
            self._program(fn)

    def _program(self, fn: str) -> Exported:
        if fn not in self._programs:
            self._programs[fn] = self._export(fn)
        return self._programs[fn]

    def _export(self, fn: str, **options: Any) -> Exported:
        part = self._bended._part(fn) if fn in self._inputs else self._bended._traced(fn)
        return part.export(*self._inputs[fn], **self._options, **options)  # type: ignore[no-any-return]

    @property
    def exported(self) -> Exported:
        """The program of `forward`, or of the first method that was traced."""
        return self._program(next(iter(self._inputs), "forward"))

    def __getattr__(self, name: str) -> Any:
        if name[:1] != "_" and name in self._inputs:
            return functools.partial(self._call, name)
        kind, _, parameter = name.partition("_")
        if name[:1] == "_" or kind not in ("get", "set"):
            raise AttributeError(f"there is no {name!r}; methods are {', '.join(self._inputs)}")
        if kind == "get":
            return self._bended.controllables[parameter].get_python_value
        return functools.partial(self._set_bending_control, parameter)

    def _set_bending_control(self, name: str, value: Any) -> None:
        self._bended.update(name, value)
        self._programs.clear()

    def _call(self, fn: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the program of a method; arguments that the trace named are passed by name."""
        program, (first, *_) = self._program(fn), self._inputs[fn]
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict):
            method = getattr(self._bended.module, fn)
            given = inspect.signature(method).bind(*args, **kwargs).arguments
            kwargs = {name: given.pop(name) for name in first[1] if name in given}
            args = tuple(given.values())
        return _rebuilt(program(*args, **kwargs), self._outputs[fn], program.notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.exported  # noqa: B018  # raises if no method was traced
        return self._call(next(iter(self._inputs)), *args, **kwargs)

    def save(self, path: str | os.PathLike[str], fn: str | None = None) -> None:
        """Write the program of a method: to `.pt2`, `.aoti.pt2` or `.onnx`."""
        self._export(
            fn or next(k for k, v in self._programs.items() if v is self.exported), to=path
        )

    def __repr__(self) -> str:
        return repr(self.exported)


def _rebuilt(given: Any, example: Any, notes: Sequence[str]) -> Any:
    """Return an output of a program with the distributions of a method's recorded output."""
    if isinstance(example, Instance):
        if issubclass(example.cls, Distribution):
            name = example.cls.__name__
            if f"in place of a {name} it returns a dict" not in notes:
                raise InputError(f"the method returned a {name} when it was traced, and no program")
            return example.cls(**given, validate_args=False)
        example = example.items
    if isinstance(given, dict):
        return {key: _rebuilt(item, example[key], notes) for key, item in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_rebuilt(*pair, notes) for pair in zip(given, example, strict=True))
    return given


class _NoForward:
    """Stands for the `forward` of an object that has none."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        vars(self).update({k: v for k, v in vars(holder).items() if isinstance(v, nn.Module)})

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        kind = type(self.holder).__name__
        raise InputError(f"{kind} has no forward: call a method of it, as in bended.encode(x)")


def _folded_graph(trace: Trace) -> Graph:
    made: Graph = trace.to_fx(fold=True).graph
    for node in reversed(list(made.nodes)):
        if node.target is check_guard:  # a graph of torchbend is that of one path
            made.erase_node(node)
    made.flow_steps = list(trace.flow_steps.of(LogicalFlowStep))  # type: ignore[attr-defined]
    return made


class Bent(BendHandle):
    """A bend that is active until removed; as a context manager, it is removed at the end."""

    def __init__(self, handles: Sequence[BendHandle]) -> None:
        removers = {id(source): one._remove for one in handles for source in one._sources}
        sources = [source for one in handles for source in one._sources]
        super().__init__(sources, lambda source: removers[id(source)](source))

    def __exit__(self, kind: Any, *_: object) -> None:
        # A weight is bent in each method that reads it, which no single report knows of.
        of_weights = any(not source.spec.activations for source in self._sources)
        report = self.report()
        self.remove()
        if kind is None and not of_weights and not report.rows:
            text = f"{report.label} at {report.where} was never called"
            warnings.warn(NeverFiredWarning(text), stacklevel=2)


def _by_name(pairs: Iterable[tuple[str, bends.Bend]]) -> dict[str, list[bends.Bend]]:
    found: dict[str, list[bends.Bend]] = {}
    for key, callback in pairs:
        found.setdefault(key, []).append(callback)
    return found


def _version(name: str | None) -> str:
    return ORIGINAL if name in (None, DEFAULT) else str(name)


# The names that torchbend gives activations, and patterns for them.


@dataclass(frozen=True)
class MethodValue:
    """A named value in one method of a model."""

    fn: str  # the name of the method
    what: Any  # a pattern or another location


def split(item: Any) -> tuple[str | None, Any]:
    """Return the method that a location names, `"encode:conv"`, and the location in it."""
    if isinstance(item, MethodValue):
        return item.fn, item.what
    if isinstance(item, str) and (named := re.fullmatch(r"([A-Za-z_]\w*):(.+)", item, re.S)):
        return named[1], named[2]
    return None, item


class Names:
    """The activations of one method by name.

    A name is the qualified name with underscores, `blocks_0_relu`. A function in a module is also
    known by the name that torch.fx gives it, `relu`. Code that the latest trace repeated is several
    activations, numbered as in a graph of torch.fx: `relu` is the first round of a loop.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        # The activations, and the modules that may return some.
        self.every = Catalogue(knowledge).activations()
        self.by_name: dict[str, Activation] = {}  # those that a run has reached, by name
        self.aliases: dict[str, Activation] = {}  # the other names of some
        whole = {a.name: a for a in self.every if a.level == "whole" and a.shape is not None}
        self._passes = self._repeated(whole)
        for found in whole.values():
            for name, one in self._passes.get(found.name, ()):
                self.by_name[name] = one
            if found.name not in self._passes:
                wish = found.names[-1].replace(".", "_")
                self.by_name[free_name(wish, self.by_name)] = found
                if found.op.startswith("call_") and found.op != "call_module":
                    self.aliases[free_name(_base(found), self.aliases)] = found
        # Their names by node path.
        self.by_path = {found.name: name for name, found in self.by_name.items()}

    def _repeated(self, whole: dict[str, Activation]) -> dict[str, list[tuple[str, Activation]]]:
        """Return the names of repeated calls of one kind in the latest run."""
        recordings = self._knowledge.recordings()
        runs = self._knowledge.run(recordings[0]).nodes.executions if recordings else []
        order = [path for path in runs if path in whole]
        counts = Counter(order)
        kinds = {_base(whole[path]) for path, count in counts.items() if count > 1}
        found: dict[str, list[tuple[str, Activation]]] = {}
        taken = dict.fromkeys(a.name for a in whole.values() if a.op == "placeholder")
        for path in order:
            activation = whole[path]
            if (base := _base(activation)) in kinds:
                name, several = free_name(base, taken), found.setdefault(path, [])
                taken[name] = None
                of_pass = f"{path}:{len(several) + 1}" if counts[path] > 1 else path
                several.append((name, activation._replace(name=of_pass, names=(name,))))
        return found

    def at(self, path: str) -> list[str]:
        """Return the names of all passes of a node."""
        path = path.strip("'")  # as a node is described
        names = [name for name, _ in self._passes.get(path, ())]
        return names or [self.by_path.get(path, path)]

    def keys(self, item: Any, bent: list[str]) -> list[Any]:
        """Return the arguments of `reset` for a name or pattern of rounds, or the item itself."""
        found = []
        for key in bent if isinstance(item, (str, re.Pattern)) else ():
            names = self.at(key) if key.strip("'").partition(":")[0] in self._passes else []
            hits = [name for name in names if name == item or compile_pattern(item).fullmatch(name)]
            if hits and len(hits) < len(names):
                raise InputError(f"{', '.join(names)} are bent together: reset all of them")
            found += [key] if hits else []
        return found or [item]

    def matching(self, pattern: str | re.Pattern[str]) -> Iterator[tuple[str, Activation]]:
        """Yield by name the values whose names begin with a match of a pattern, as in torchbend."""
        expression = compile_pattern(pattern)
        done = set()
        for name, found in (*self.by_name.items(), *self.aliases.items()):
            names = (name,) if self.aliases.get(name) is found else (name, *found.names)
            if found.name not in done and any(map(expression.match, names)):
                done.add(found.name)
                yield (name if name == pattern else self.by_path[found.name]), found

    def patterns(self, pattern: str | re.Pattern[str]) -> list[Any]:
        """Return patterns for a `bendtrace.BendedModule` with the meaning of a pattern here."""
        expression = compile_pattern(pattern)
        selector = NamedActivations((expression,), frozenset())
        means = [found for found in self.every if selector.means(found.level, found.names)]
        direct = {found.name for found in means}
        matched = {found.name for _, found in self.matching(pattern)}
        of_site = {p: {one.name for _, one in several} for p, several in self._passes.items()}
        whole = {path for path, passes in of_site.items() if passes <= matched}
        some = [path for path, passes in of_site.items() if path not in whole and passes & matched]
        if not some and direct & of_site.keys() == whole:
            others = sorted(matched.difference(direct, *of_site.values()))
            return ([pattern] if means else []) + [f"{re.escape(path)}$" for path in others]
        # Names of rounds are no names of the model, which may have others of the same spelling.
        paths = matched.difference(*(of_site[path] for path in whole)) | whole
        paths |= direct - of_site.keys()
        return [self._node(path) for path in sorted(paths)]

    def _node(self, path: str) -> Node:
        for tree in self._knowledge.trees():
            with suppress(NodePathError):
                return tree.resolve(NodePath(path), leaf=False)
        raise InputError(f"no known run has reached {path!r}: trace the method first")


def _base(found: Activation) -> str:
    """Return the name that torch.fx gives to the first activation of a kind."""
    if found.op == "call_module":
        return found.names[-1].replace(".", "_")
    return re.sub(r"_\d+$", "", found.name.rpartition(".")[2])
