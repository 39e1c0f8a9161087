"""Rewriting: nodes replaced, removed or added between others, and modules replaced.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> _ = bt.rewriting.replace(bended, "sub_0", torch.neg)
>>> bended(torch.tensor([0.0, 1.0]))
tensor([-0.0000, -0.7616])
"""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError, NeverFiredWarning
from bendtrace.insert.gates import of_this_run
from bendtrace.insert.insertion import Insertion, Report, What, as_interjection
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, PassNumbers
from bendtrace.insert.leaves import assemble, describe, take_apart, write_count
from bendtrace.insert.plan import forms_of
from bendtrace.insert.registry import InsertionRegistry
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.selector_naming import leaf_modules_in, outside
from bendtrace.insert.where import Where, near_misses
from bendtrace.log.nodes import identifier
from bendtrace.log.path_views import Candidate, CandidateGraph, NodeSelector
from bendtrace.module import BendedModule
from bendtrace.watch.functions import is_torchs_function
from bendtrace.watch.owners import module_tree

__all__ = ["between", "remove", "replace", "replace_module", "replace_module_native", "splice"]
__dir__ = __all__.copy


Model = TypeVar("Model", bound=nn.Module)


class Replacement(Interjection):
    """Calls another function instead of a node."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.self_contained: bool = is_torchs_function(function)

    @property
    def label(self) -> str:
        """The name of the function."""
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function."""
        return self._function(*inputs, **inputs.kwargs)


class Removal(Interjection):
    """Passes one of a node's inputs through."""

    label = "removed"

    def __init__(self, keep: int | str | Callable[[Inputs], Any]) -> None:
        self._keep = keep
        self.self_contained: bool = not callable(keep)

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Return the input."""
        keep = self._keep
        if callable(keep):
            return keep(inputs)
        given = dict(enumerate(inputs)) | inputs.kwargs
        if keep == 0 and not inputs and given:  # the first, though given by name
            keep = next(iter(given))
        value = given.get(keep)
        if not isinstance(value, Tensor):
            what = describe(value) if keep in given else "not there"
            raise InterjectionError(
                f"{at.path or '<root>'} cannot be removed: input {keep!r}, which would replace "
                f"its output, is {what}; its inputs are {_arguments_text(given)}; choose one with "
                "keep=",
                at.path,
            )
        return value


def _arguments_text(given: dict[Any, Any]) -> str:
    return ", ".join(f"{key!r}: {describe(value)}" for key, value in given.items()) or "none"


def replace(
    bended: BendedModule,
    where: Where,
    function: Callable[..., Any],
    *,
    passes: PassNumbers = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Call another function wherever a run reaches a node.

    Args:
        bended: a `BendedModule`.
        where: the nodes: calls of functions, methods or modules; see `BendedModule.interject`.
        function: called with the node's arguments; also a module, whose parameters can be trained.
            Its return value is the output of the node.
        passes: the passes of each node to replace; the others keep the original.
        every: apply only in every n-th pass.
        allow_none: whether to accept that no node is selected.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no node is selected.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> with bt.rewriting.replace(bended, "relu", torch.abs):
        ...     bended(torch.tensor([-2.0]))
        tensor([3.])
    """
    if isinstance(function, Interjection) or isinstance(function, type) or not callable(function):
        raise InputError(
            f"replace() takes a function of the node's arguments, or a module, not {function!r}"
        )
    return bended._insertion_registry.insert(
        where, Replacement(function), passes=passes, every=every, allow_none=allow_none
    )


def remove(
    bended: BendedModule,
    where: Where,
    *,
    keep: int | str | Callable[[Inputs], Any] = 0,
    passes: PassNumbers = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Remove nodes: one of their inputs becomes their output.

    Args:
        bended: a `BendedModule`.
        where: the nodes, as for `replace`.
        keep: the input: its position, its name if it is a keyword argument, or a function of the
            `Inputs`. By default the first one: `x` in `x.view(2, 3)`, and in `self.dropout(x)`.
        passes: the passes of each node to apply to; the others stay as they are.
        every: apply only in every n-th pass.
        allow_none: whether to accept that no node is selected.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no node is selected.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() + x * 2)
        >>> with bt.rewriting.remove(bended, "relu"), bt.rewriting.remove(bended, "add", keep=1):
        ...     bended(torch.tensor([-2.0]))
        tensor([-4.])
    """
    if isinstance(keep, bool) or not (isinstance(keep, (int, str)) or callable(keep)):
        raise InputError(
            f"keep= has to be a position, a name or a function of the inputs, not {keep!r}"
        )
    return bended._insertion_registry.insert(
        where, Removal(keep), passes=passes, every=every, allow_none=allow_none
    )


def between(
    bended: BendedModule,
    a: Where,
    b: Where,
    what: What,
    *,
    passes: PassNumbers = None,
    every: int | None = None,
) -> Between:
    """Insert something between two nodes; other users of the first node do not see it.

    Values are tracked by identity: each tensor that `a` has output in this call of the model, and
    that is among the arguments of `b`, unchanged since, is replaced there by what `what` returns
    for it. Ops on the way, such as a view or a sum, are separate nodes.

    Args:
        bended: a `BendedModule`.
        a: the node, input, parameter or part of an output at which the edge begins.
        b: the node at which it ends: the call of a function, method or module.
        what: a function of the value, a module, or an interjection that works after a node.
        passes: in which passes of `b`.
        every: apply only in every n-th pass.

    Returns:
        A handle, which is also a context manager: `remove()`, `report()`, `applied`.

    Raises:
        InputError: an argument is invalid.
        NodePathError: one of the nodes does not exist.

    Example:
        >>> import torch, bendtrace as bt
        >>> def twice_used(x):
        ...     h = x.relu()
        ...     return h * 10 + h
        >>> bended = bt.BendedModule(twice_used)
        >>> with bt.rewriting.between(bended, "relu", "mul", torch.zeros_like):
        ...     bended(torch.ones(2))
        tensor([1., 1.])
    """
    inner = as_interjection(what)
    if forms_of(inner) & {"before", "instead", "backward", "inputs"}:
        raise InputError(
            f"{inner.label} works around a node, but between two nodes there is only a value: "
            "pass a function of it, or an interjection that overrides only after()"
        )
    sent = OutputTracker()
    edge = EdgeInterjection(sent, inner)
    registry = bended._insertion_registry
    beginning = registry.make(a, sent)
    end = registry.make(b, edge, passes=passes, every=every)
    registry.add(beginning, end)
    return Between(registry, edge, end, beginning)


def splice(
    bended: BendedModule,
    where: Where,
    module: Callable[..., Any],
    *,
    keep_error: bool = False,
    select: int | str | Callable[[Any], Any] | None = None,
    passes: PassNumbers = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Splice:
    """Pass the outputs of nodes through a module, such as a sparse autoencoder.

    The module is trained like any other. Its parameters are its own, not the model's.

    Args:
        bended: a `BendedModule`.
        where: the nodes, inputs or parts of outputs; see `BendedModule.interject`.
        module: called with the value.
        keep_error: False: the output of the module replaces the value. True: the value stays as it
            is, bit for bit, and gradients flow both to the module's output and through the module
            to the value, as those of `made + (value - made).detach()`.
        select: the part of the module's output that is the value, if not all of it: an index, a
            key, the name of an attribute, or a function of the output.
        passes: the passes of each node to apply to.
        every: apply only in every n-th pass.
        allow_none: whether to accept that no node is selected.

    Returns:
        A handle, which is also a context manager: `error` is the last error term, `result` the last
        full output of the module.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no node is selected.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() + 1)
        >>> with bt.rewriting.splice(bended, "relu", torch.round) as handle:
        ...     bended(torch.tensor([0.75])), handle.error
        (tensor([2.]), tensor([-0.2500]))
        >>> with bt.rewriting.splice(bended, "relu", torch.round, keep_error=True):
        ...     bended(torch.tensor([0.75]))
        tensor([1.7500])
    """
    if isinstance(module, (Interjection, type)) or not callable(module):
        raise InputError(f"splice() takes a module, or a function of the value, not {module!r}")
    if isinstance(module, nn.Module) and any(module is part for part in bended.modules()):
        raise InputError(
            f"{type(module).__name__} is a part of the model: splice in another module"
        )
    spliced = SplicedModule(module, keep_error, select)
    return Splice(
        bended._insertion_registry.insert(
            where, spliced, passes=passes, every=every, allow_none=allow_none
        ),
        spliced,
    )


# Modules exchanged


def replace_module(
    model: Model,
    selector: Where,
    create_replacement: Callable[[nn.Module], nn.Module],
    tracer_kwargs: Mapping[str, Any] | None = None,
    *,
    allow_none: bool = False,
) -> Model:
    """Return a model in which the modules that a selector selects are replaced.

    The model itself stays as it is. The result is a copy of its structure, of the same class, that
    shares the remaining parameters and buffers. A module with several names or several calls is
    replaced in all of them. Functions are not modules: see `replace`.

    Args:
        model: a module. Without a run, selectors can use modules and their names. In a
            `BendedModule` that was called they can also use what the runs have shown: paths, lines,
            branches, shapes, flow. Modules that no run reached are then considered as well.
        selector: a selector, a class of modules, a module, a regular expression for names, a
            predicate of the `Candidate`, or a list.
        create_replacement: called with each selected module of the copy, inner ones first; returns
            the replacement, which may contain the module. Replacements get the training mode of the
            modules they replace.
        tracer_kwargs: `{"leaf_modules": [...]}`: modules inside these are not replaced.
        allow_none: whether to accept that no module is selected.

    Returns:
        A module; for a `BendedModule` a new one around it, without insertions.

    Raises:
        InputError: no module is selected, or an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> smooth = bt.rewriting.replace_module(model, torch.nn.ReLU, lambda relu: torch.nn.GELU())
        >>> smooth
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): GELU(approximate='none')
        )
        >>> smooth[0].weight is model[0].weight, model[1]
        (True, ReLU())
    """
    bended = model if isinstance(model, BendedModule) else None
    root: Any = model if bended is None else bended.model
    if not isinstance(root, nn.Module):
        raise InputError(f"only a module has modules to replace, not {root!r}")
    where = outside(selector, root, leaf_modules_in(tracer_kwargs))
    names = _select_names(root, where, [] if bended is None else _graphs(bended))
    if not names and not allow_none:
        paths = [name for name, _ in root.named_modules() if name]
        text = selector if isinstance(selector, str) else getattr(selector, "pattern", "")
        raise InputError(
            f"{describe_where(selector)} selects no module; {near_misses(text, paths)}"
            + (_HINT if bended is None else "")
        )
    made = _with_others(shared_copy(root), names, create_replacement)
    return made if bended is None else _bended_like(made, bended)  # type: ignore[return-value]


def replace_module_native(
    model: nn.Module,
    target_class: type[nn.Module] | tuple[type[nn.Module], ...],
    create_replacement: Callable[[nn.Module], nn.Module],
    clone: bool = True,
    *,
    allow_none: bool = False,
) -> nn.Module:
    """Return a model in which all modules of a class, or of a subclass, are replaced.

    Args:
        model: a module.
        target_class: the class, or several.
        create_replacement: as for `replace_module`.
        clone: whether to leave the model as it is. If so, the result is a copy of its structure
            that shares the remaining parameters and buffers; if not, it is the model itself.
        allow_none: whether to accept that there are no such modules.

    Raises:
        InputError: there are no such modules, or the model itself is one and cannot be replaced in
            place.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> smooth = bt.rewriting.replace_module_native(
        ...     model, torch.nn.ReLU, lambda relu: torch.nn.GELU()
        ... )
        >>> smooth[1], model[1], smooth[0].weight is model[0].weight
        (GELU(approximate='none'), ReLU(), True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"only a module has modules to replace, not {model!r}")
    classes = target_class if isinstance(target_class, tuple) else (target_class,)
    if not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        raise InputError(f"target_class has to be a class of modules, not {target_class!r}")
    names = {name for name, module in model.named_modules() if isinstance(module, classes)}
    shown = ", ".join(cls.__name__ for cls in classes)
    if not names and not allow_none:
        raise InputError(f"the model has no {shown}")
    if "" in names and not clone:
        raise InputError(
            f"the model itself is a {shown}, and cannot be replaced in place: do not pass "
            "clone=False"
        )
    return _with_others(shared_copy(model) if clone else model, names, create_replacement)


_HINT = (
    "; without a run, paths, lines, branches and shapes are unknown: for selectors that use "
    "them, pass a BendedModule that was called"
)


def _with_others(
    model: nn.Module, names: set[str], create: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    if not callable(create):
        raise InputError(f"create_replacement has to be a function of a module, not {create!r}")
    return replace_modules(model, [model.get_submodule(name) for name in names], create)


def _bended_like(model: nn.Module, like: BendedModule) -> BendedModule:
    return BendedModule(model, max_traces=like._trees.limit)


def _graphs(bended: BendedModule) -> list[CandidateGraph]:
    return [bended._knowledge.run(recording).candidates for recording in bended._trees.plain_runs()]


def _select_names(
    model: nn.Module, selector: NodeSelector, graphs: list[CandidateGraph]
) -> set[str]:
    """Return the qualified names of the modules that a selector means."""
    if not graphs and (selector.looks_ahead or selector.needs_output):
        raise InputError(
            f"{selector!r} can only be resolved with a run: pass a BendedModule that was called"
        )
    called: set[int] = set()
    modules: set[int] = set()
    for graph in graphs:
        chosen = selector.select(graph)
        for node in graph:
            called.add(id(node.module))
            if node.path not in chosen:
                continue
            if node.module is None:
                raise InputError(
                    f"{selector!r} selects {node.path!r}, which is the call of a function: "
                    "choose modules with & is_module, or replace the call with replace()"
                )
            modules.add(id(node.module))
    if not selector.looks_ahead and not selector.needs_output:
        for node in unrun_modules(model):
            if id(node.module) not in called and selector.matches(node):
                modules.add(id(node.module))
    return {name for name, module in model.named_modules() if id(module) in modules}


def unrun_modules(model: nn.Module) -> Iterator[Candidate]:
    """Yield the modules of a model as nodes, under paths that their calls are likely to have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        outer, _, last = name.rpartition(".")
        scope = modules[outer] if name else None
        yield Candidate(
            _module_call_path(name, modules), identifier(last), module, name, None, scope, outer
        )


def _module_call_path(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path that a call of a module has if its parents call one another."""
    segments: list[str] = []
    relative = prefix = ""
    for part in filter(None, name.split(".")):
        prefix = f"{prefix}.{part}" if prefix else part
        relative = f"{relative}.{part}" if relative else part
        if not isinstance(modules[prefix], (nn.ModuleList, nn.ModuleDict)):  # which nobody calls
            segments.append(identifier(relative))
            relative = ""
    return ".".join([*segments, *([identifier(relative)] if relative else [])])


# Insertions on the edge from one node to another.

# A weak reference to a tensor, and how often it was written to.
_Known = tuple["weakref.ref[Tensor]", int]


# A tensor that an edge has made, and the original.
_TensorPair = tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]
_NOTHING: _TensorPair = (lambda: None, lambda: None)


class OutputTracker(Interjection):
    """Records which tensors a node outputs, after all other insertions there."""

    observes = True
    late = True
    self_contained = True

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Record the tensors."""
        outputs = self._outputs()
        for tensor in _tensors_within(output):
            outputs[id(tensor)] = weakref.ref(tensor), write_count(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Return whether the node has output this tensor in this call, unchanged since."""
        output = self._outputs().get(id(tensor))
        return output is not None and output[0]() is tensor and output[1] == write_count(tensor)

    def _outputs(self) -> dict[int, _Known]:
        outputs: dict[int, _Known] = of_this_run().setdefault(self, {})
        return outputs


class EdgeInterjection(Interjection):
    """Replaces those inputs of a node that come from another node."""

    late = True

    def __init__(self, sent: OutputTracker, what: Interjection) -> None:
        self.applied: int = 0  # the number of values passed to `what`
        self.self_contained: bool = what.self_contained
        self._sent = sent
        self._what = what

    @property
    def label(self) -> str:
        """The label of `what`."""
        return self._what.label

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Replace the inputs that come from the node."""
        shape, found = take_apart((tuple(inputs), inputs.kwargs))
        # The tensors made by other edges to this node in this pass, with their originals.
        former: dict[int, _TensorPair] = of_this_run().setdefault(
            (EdgeInterjection, at.path, at.number), {}
        )
        made: dict[int, Any] = {}
        for number, value in enumerate(found):
            if not isinstance(value, Tensor):
                continue
            new, original = former.get(id(value), _NOTHING)
            sent = original() if new() is value else value
            if sent is None or not self._sent.has(sent):
                continue
            if id(value) not in made:
                self.applied += 1
                result = self._what.after(at, Inputs(()), value)
                made[id(value)] = value if result is None else result
                if isinstance(result, Tensor):
                    former[id(result)] = weakref.ref(result), weakref.ref(sent)
            found[number] = made[id(value)]
        return Inputs(*assemble(shape, found)) if made else None

    def warn_if_never_applied(self, stacklevel: int, end: Insertion, beginning: Insertion) -> None:
        """Warn if a run reached both nodes, but no value went from one to the other."""
        if not self.applied and end.report().fired and beginning.report().fired:
            warnings.warn(
                NeverFiredWarning(
                    f"{self.label} was never applied: no output of "
                    f"{describe_where(beginning.where)} reached {describe_where(end.where)} "
                    "unchanged"
                ),
                stacklevel=stacklevel + 1,
            )


def _tensors_within(value: Any) -> Iterator[Tensor]:
    for found in take_apart(value)[1]:
        if isinstance(found, Tensor):
            yield found


class Between:
    """An insertion on an edge, until it is removed. Also a context manager."""

    def __init__(
        self,
        registry: InsertionRegistry,
        edge: EdgeInterjection,
        end: Insertion,
        beginning: Insertion,
    ) -> None:
        self._insertion_registry = registry
        self._edge = edge
        # Its insertions in the model, at the end of the edge and at its beginning.
        self.insertions: tuple[Insertion, Insertion] = end, beginning

    @property
    def active(self) -> bool:
        """True if it is active."""
        return self.insertions[0].active

    @property
    def applied(self) -> int:
        """The number of values to which it was applied so far."""
        return self._edge.applied

    def remove(self) -> None:
        """Remove it. Further calls have no effect."""
        self._insertion_registry.remove(*self.insertions)

    def report(self) -> Report:
        """Return how often a run reached the node at the end, and whether a value was changed."""
        return self.insertions[0].report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for insertion in self.insertions:
                    insertion.warn_if_never_fired(3)
                self._edge.warn_if_never_applied(3, *self.insertions)
        finally:
            self.remove()

    def __repr__(self) -> str:
        end, beginning = self.insertions
        state = "" if self.active else ", removed"
        return (
            f"<{end.what.label} between {describe_where(beginning.where)} and "
            f"{describe_where(end.where)}{state}>"
        )


# Modules that values are passed through.


def _picker(select: int | str | Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if select is None or callable(select):
        return select
    if not isinstance(select, str):
        return operator.itemgetter(select)
    attribute = operator.attrgetter(select)
    return lambda result: result[select] if isinstance(result, dict) else attribute(result)


class SplicedModule(Interjection):
    """Passes a value through a module."""

    def __init__(
        self,
        module: Callable[..., Any],
        keep_error: bool,
        select: int | str | Callable[[Any], Any] | None,
    ) -> None:
        self.module = module
        self.result: Any = None
        self.error: Tensor | None = None
        self._keep_error = keep_error
        self._pick = _picker(select)

    @property
    def label(self) -> str:
        """The class of the module."""
        return str(getattr(self.module, "__name__", type(self.module).__name__))

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Pass the value through the module."""
        result = self.module(output)
        made = self._selected(result, at)
        self.result, self.error = result, None
        if not isinstance(output, Tensor):
            if self._keep_error:
                raise self._refusal(at, f"the value is {describe(output)}, and has no error term")
            return made
        if not isinstance(made, Tensor):
            raise InterjectionError(
                f"{self.label} at {at.path or '<root>'} returned {describe(made)}: choose the "
                "part that replaces the value with select=",
                at.path,
            )
        if made.shape == output.shape:
            if torch.bool not in (made.dtype, output.dtype):  # which cannot be subtracted
                self.error = (output - made).detach()
        elif self._keep_error:
            shapes = f"{tuple(output.shape)} became {tuple(made.shape)}"
            raise self._refusal(at, f"the value of shape {shapes}")
        return _GradientSubstitution.apply(made, output.detach()) if self._keep_error else made

    def _selected(self, result: Any, at: NodePass) -> Any:
        if self._pick is None:
            return result
        try:
            return self._pick(result)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise InterjectionError(
                f"{self.label} at {at.path or '<root>'} returned {describe(result)}, in which "
                f"select= finds nothing ({type(error).__name__}: {error})",
                at.path,
            ) from error

    def _refusal(self, at: NodePass, why: str) -> InterjectionError:
        return InterjectionError(
            f"{self.label} at {at.path or '<root>'}: keep_error= needs the error term, and {why}",
            at.path,
        )


class _GradientSubstitution(torch.autograd.Function):
    """Continues with a value, and passes the gradient to the module's result for it.

    The same as `made + (value - made).detach()`, but without the rounding.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Splice:
    """A module that is spliced in, until it is removed. Also a context manager."""

    def __init__(self, insertion: Insertion, spliced: SplicedModule) -> None:
        self.insertion = insertion  # its insertion in the model
        self._spliced = spliced

    @property
    def module(self) -> Any:
        """The module."""
        return self._spliced.module

    @property
    def error(self) -> Tensor | None:
        """The value minus the reconstruction, of the last pass; None if shapes or dtypes differ."""
        return self._spliced.error

    @property
    def result(self) -> Any:
        """The full output of the module in the last pass, with its autograd graph.

        Use it for a loss, such as one on the features of a sparse autoencoder.
        """
        return self._spliced.result

    @property
    def active(self) -> bool:
        """True if it is active."""
        return self.insertion.active

    def remove(self) -> None:
        """Remove it, and forget its results. Further calls have no effect."""
        self.insertion.remove()
        self._spliced.result = self._spliced.error = None

    def report(self) -> Report:
        """Return at which nodes and passes it was called, and whether it changed anything."""
        return self.insertion.report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.insertion.warn_if_never_fired(3)
        finally:
            self.insertion.remove()

    def __repr__(self) -> str:
        state = "" if self.active else ", removed"
        where = describe_where(self.insertion.where)
        return f"<{self._spliced.label} spliced in at {where}{state}>"


# A copy of a model's structure that shares its parameters and buffers, with replaced modules.

Create = Callable[[nn.Module], Any]


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model without its parameters and buffers, which the copy shares.

    Training one trains the other. Replaced modules and new attributes affect the copy alone.
    """
    memo: dict[int, Any] = {}
    for module in module_tree(model):
        for table in (module._parameters, module._buffers):
            memo.update((id(tensor), tensor) for tensor in table.values() if tensor is not None)
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # which copy.deepcopy refuses
                memo[id(value)] = value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied ({type(error).__name__}: {error}); with clone=False the "
            "native functions work on the model itself"
        ) from error


def replace_modules(model: nn.Module, targets: Collection[nn.Module], create: Create) -> nn.Module:
    """Replace some modules of a model, in all references to them.

    Inner modules come first: the function for an outer module sees its new parts. New modules get
    the training mode of the modules they replace.
    """
    wanted = {id(module) for module in targets}
    parts = {id(module): module for module in _inside_out(model, set())}
    new: dict[int, nn.Module] = {}
    for module in parts.values():
        if id(module) not in wanted:
            continue
        _exchange_modules((part for part in module_tree(module) if id(part) in parts), new)
        made = create(module)
        if not isinstance(made, nn.Module):
            raise InputError(
                f"the replacement of a {type(module).__name__} has to be a module, but "
                f"create_replacement returned {made!r}"
            )
        for part in module_tree(made):
            if id(part) not in parts:
                part.training = module.training
        new[id(module)] = made
    _exchange_modules(parts.values(), new)
    return new.get(id(model), model)


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and its submodules, inner ones first."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module._modules.values():
        if child is not None:
            yield from _inside_out(child, seen)
    yield module


def _exchange_modules(modules: Iterable[nn.Module], new: Mapping[int, nn.Module]) -> None:
    """Replace references to modules: submodules, and modules in plain attributes."""
    for module in list(modules) if new else ():
        seen: set[int] = set()
        for name, value in list(vars(module).items()):
            other = _exchanged(value, new, seen)
            if other is not value:
                vars(module)[name] = other


def _exchanged(value: Any, new: Mapping[int, nn.Module], seen: set[int]) -> Any:
    if isinstance(value, nn.Module):
        return new.get(id(value), value)
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in list(value.items()):
            other = _exchanged(item, new, seen)
            if other is not item:
                value[key] = other
        return value
    items = [_exchanged(item, new, seen) for item in value]
    if all(other is item for other, item in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        value[:] = items
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
