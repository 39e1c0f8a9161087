"""Rewriting: nodes replaced, removed or added between others, and modules exchanged.

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
from bendtrace.interject.insertion import Insertion, as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.leaves import leaves_in, outside
from bendtrace.interject.plan import forms_of
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.sharing import replaced, shared_copy
from bendtrace.interject.splicing import Splice, Spliced
from bendtrace.interject.structure import describe
from bendtrace.interject.where import near_misses
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

Model = TypeVar("Model", bound=nn.Module)


class Replacement(Interjection):
    """Calls another function in the place of a node."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.self_contained = is_torchs_function(function)

    @property
    def label(self) -> str:
        """The name of the function."""
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call the function."""
        return self._function(*inputs, **inputs.kwargs)


class Removal(Interjection):
    """Gives one of a node's inputs through."""

    label = "removed"

    def __init__(self, keep: int | str | Callable[[Inputs], Any]) -> None:
        self._keep = keep
        self.self_contained = not callable(keep)

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Give the input through."""
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
                f"{at.path or '<root>'} cannot be removed: input {keep!r}, which would be given "
                f"through, is {what}; its inputs are {_listed(given)}; say with keep= which it is",
                at.path,
            )
        return value


def _listed(given: dict[Any, Any]) -> str:
    return ", ".join(f"{key!r}: {describe(value)}" for key, value in given.items()) or "none"


def replace(
    bended: BendedModule,
    where: Any,
    function: Callable[..., Any],
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Have another function called wherever a node comes up.

    Args:
        bended: a `BendedModule`.
        where: at which nodes: calls of functions, methods or modules; see `BendedModule.interject`.
        function: called with the node's arguments, also a module: its parameters can be trained.
            What it returns is what the node gives.
        passes: in which passes of each node; the others stay what they are.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

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
    where: Any,
    *,
    keep: int | str | Callable[[Inputs], Any] = 0,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Insertion:
    """Take nodes out: one of their inputs goes on in their place.

    Args:
        bended: a `BendedModule`.
        where: at which nodes, as for `replace`.
        keep: which input: its position, its name if it is given by name, or a function of the
            `Inputs`. As it stands, the first: `x` of `x.view(2, 3)`, and of `self.dropout(x)`.
        passes: in which passes of each node; the others stay what they are.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The handle: `remove()` puts the node back.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() + x * 2)
        >>> with bt.rewriting.remove(bended, "relu"), bt.rewriting.remove(bended, "add", keep=1):
        ...     bended(torch.tensor([-2.0]))
        tensor([-4.])
    """
    if isinstance(keep, bool) or not (isinstance(keep, (int, str)) or callable(keep)):
        raise InputError(f"keep= is a position, a name or a function of the inputs, not {keep!r}")
    return bended._board.insert(
        where, Removal(keep), passes=passes, every=every, allow_none=allow_none
    )


def between(
    bended: BendedModule,
    a: Any,
    b: Any,
    what: Any,
    *,
    passes: Any = None,
    every: int | None = None,
) -> Between:
    """Insert something on the edge between two nodes: other users of the first see nothing of it.

    Values are told by what they are: each tensor that `a` has given in this call of the model and
    that is among the arguments of `b`, unchanged since, is exchanged there for what `what` makes
    of it. What the edge leads through - a view, a sum - is a node of its own.

    Args:
        bended: a `BendedModule`.
        a: the node, input, parameter or part of an output that the edge begins at.
        b: the node that it leads to: the call of a function, method or module.
        what: a function of the value, a module, or an interjection that works after a node.
        passes: in which passes of `b`.
        every: in every how manieth pass.

    Returns:
        A handle, which is also a context manager: `remove()`, `report()`, `applied`.

    Raises:
        InputError: something given makes no sense.
        NodePathError: there is no such node.

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
            f"{inner.label} works around a node, and between two nodes there is only a value: give "
            "a function of it, or an interjection that overrides nothing but after()"
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
    where: Any,
    module: Callable[..., Any],
    *,
    keep_error: bool = False,
    select: int | str | Callable[[Any], Any] | None = None,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> Splice:
    """Pass what nodes give through a module, such as a sparse autoencoder.

    The module is trained like any other: its parameters are its own, not the model's.

    Args:
        bended: a `BendedModule`.
        where: at which nodes, inputs or parts of outputs; see `BendedModule.interject`.
        module: called with the value.
        keep_error: False: what the module makes of the value goes on. True: the value goes on as
            it is, bit by bit, and gradients go to what the module made of it, and by way of the
            module on to the value: that of `made + (value - made).detach()`.
        select: which part of what the module gives is the value, if that is not all of it: an
            index, a key, the name of an attribute, or a function of it.
        passes: in which passes of each node.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        A handle, which is also a context manager: `error` is the last error term, `result` all
        that the module gave last.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

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
        raise InputError(f"{type(module).__name__} is a part of the model: splice in another one")
    spliced = Spliced(module, keep_error, select)
    return Splice(
        bended._board.insert(where, spliced, passes=passes, every=every, allow_none=allow_none),
        spliced,
    )


# Modules exchanged


def replace_module(
    model: Model,
    selector: Any,
    create_replacement: Callable[[nn.Module], nn.Module],
    tracer_kwargs: Mapping[str, Any] | None = None,
    *,
    allow_none: bool = False,
) -> Model:
    """Return a model in which the modules that a selector means are others.

    The model itself stays as it is. What is returned is a copy of its structure, of the same
    class, that shares the parameters and buffers of all that stays. A module with several names, or
    several calls, is replaced in all of them. Functions are no modules: see `replace`.

    Args:
        model: a module. Without a run, selectors can go by modules and their names; in a
            `BendedModule` that was called also by what the runs have shown: paths, lines,
            branches, shapes, flow. Modules that no run came by are then asked about as well.
        selector: a selector, a class of modules, a module, a regular expression for names, a
            predicate of the `Candidate`, or a list.
        create_replacement: called with each module of the copy that is meant, inner ones first;
            returns what takes its place, which may contain it. New modules are put in the training
            mode of the old one.
        tracer_kwargs: `{"leaf_modules": [...]}`: what is inside these is not meant.
        allow_none: whether it is right that no module is meant.

    Returns:
        A module; if a `BendedModule` was given, a new one around it, in which nothing is inserted.

    Raises:
        InputError: no module is meant, or something given makes no sense.

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
        raise InputError(f"only a module has modules to replace; {root!r} is none")
    where = outside(selector, root, leaves_in(tracer_kwargs))
    names = _meant(root, where, [] if bended is None else _graphs(bended))
    if not names and not allow_none:
        known = [name for name, _ in root.named_modules() if name]
        text = selector if isinstance(selector, str) else getattr(selector, "pattern", "")
        raise InputError(
            f"{describe_where(selector)} means no module; {near_misses(text, known)}"
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
    """Return a model in which all modules of a class, or of a subclass, are others.

    Args:
        model: a module.
        target_class: the class, or several.
        create_replacement: as for `replace_module`.
        clone: whether the model stays as it is. If so, what is returned is a copy of its structure
            that shares the parameters and buffers of all that stays; if not, it is the model.
        allow_none: whether it is right that there are no such modules.

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
        raise InputError(f"only a module has modules to replace; {model!r} is none")
    classes = target_class if isinstance(target_class, tuple) else (target_class,)
    if not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        raise InputError(f"a class of modules has to be given, not {target_class!r}")
    names = {name for name, module in model.named_modules() if isinstance(module, classes)}
    shown = ", ".join(cls.__name__ for cls in classes)
    if not names and not allow_none:
        raise InputError(f"the model has no {shown}")
    if "" in names and not clone:
        raise InputError(
            f"the model itself is a {shown}, and cannot be replaced in place: leave clone as it is"
        )
    return _with_others(shared_copy(model) if clone else model, names, create_replacement)


_HINT = (
    "; without a run, paths, lines, branches and shapes are not known: for selectors that go by "
    "them, give a BendedModule that was called"
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
            f"{selector!r} can only be told from a run: give a BendedModule that was called"
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
                    f"{selector!r} means {node.path!r}, which is the call of a function: choose "
                    "modules with & is_module, or exchange the call with replace()"
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
