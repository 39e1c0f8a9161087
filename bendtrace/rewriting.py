"""Rewriting: nodes replaced, removed or added between others, and modules replaced.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
>>> _ = bt.rewriting.replace(bended, "sub_0", torch.neg)
>>> bended(torch.tensor([0.0, 1.0]))
tensor([-0.0000, -0.7616])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError
from bendtrace.interject.edges import Between, Edge, Sent
from bendtrace.interject.insertion import Insertion, What, as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.leaves import leaves_in, outside
from bendtrace.interject.passes import PassNumbers
from bendtrace.interject.plan import forms_of
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.sharing import replaced, shared_copy
from bendtrace.interject.splicing import Splice, Spliced
from bendtrace.interject.structure import describe
from bendtrace.interject.where import Where, near_misses
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate, CandidateGraph, NodeSelector
from bendtrace.paths.naming import identifier
from bendtrace.torch_rules.functions import is_torchs_function

__all__ = [
    "between",
    "remove",
    "replace",
    "replace_module",
    "replace_module_native",
    "splice",
]
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
                f"its output, is {what}; its inputs are {_listed(given)}; choose one with keep=",
                at.path,
            )
        return value


def _listed(given: dict[Any, Any]) -> str:
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
    return bended._board.insert(
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
        passes: the passes of each node to apply to; the others stay what they are.
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
    return bended._board.insert(
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
    """Insert something on the edge between two nodes; other users of the first node do not see it.

    Values are tracked by identity: each tensor that `a` has output in this call of the model, and
    that is among the arguments of `b`, unchanged since, is replaced there by what `what` returns
    for it. Ops on the way, such as a view or a sum, are nodes of their own.

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
    sent = Sent()
    edge = Edge(sent, inner)
    board = bended._board
    beginning = board.make(a, sent)
    end = board.make(b, edge, passes=passes, every=every)
    board.add(beginning, end)
    return Between(board, edge, end, beginning)


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
            f"{type(module).__name__} is a part of the model: splice in a module of its own"
        )
    spliced = Spliced(module, keep_error, select)
    return Splice(
        bended._board.insert(where, spliced, passes=passes, every=every, allow_none=allow_none),
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
    where = outside(selector, root, leaves_in(tracer_kwargs))
    names = _meant(root, where, [] if bended is None else _graphs(bended))
    if not names and not allow_none:
        known = [name for name, _ in root.named_modules() if name]
        text = selector if isinstance(selector, str) else getattr(selector, "pattern", "")
        raise InputError(
            f"{describe_where(selector)} selects no module; {near_misses(text, known)}"
            + (_HINT if bended is None else "")
        )
    made = _with_others(shared_copy(root), names, create_replacement)
    return made if bended is None else _bended(made, bended)  # type: ignore[return-value]


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
    return replaced(model, [model.get_submodule(name) for name in names], create)


def _bended(model: nn.Module, like: BendedModule) -> BendedModule:
    return BendedModule(model, max_traces=like._trees.limit)


def _graphs(bended: BendedModule) -> list[CandidateGraph]:
    return [bended._known.run(recording).candidates for recording in bended._trees.plain_runs()]


def _meant(model: nn.Module, selector: NodeSelector, graphs: list[CandidateGraph]) -> set[str]:
    """Return the qualified names of the modules that a selector means."""
    if not graphs and (selector.looks_ahead or selector.needs_output):
        raise InputError(
            f"{selector!r} can only be resolved with a run: pass a BendedModule that was called"
        )
    called: set[int] = set()
    meant: set[int] = set()
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
            meant.add(id(node.module))
    if not selector.looks_ahead and not selector.needs_output:
        for node in unrun_modules(model):
            if id(node.module) not in called and selector.matches(node):
                meant.add(id(node.module))
    return {name for name, module in model.named_modules() if id(module) in meant}


def unrun_modules(model: nn.Module) -> Iterator[Candidate]:
    """Yield the modules of a model as nodes, under paths that their calls are likely to have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        outer, _, last = name.rpartition(".")
        scope = modules[outer] if name else None
        yield Candidate(_path(name, modules), identifier(last), module, name, None, scope, outer)


def _path(name: str, modules: Mapping[str, nn.Module]) -> str:
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
