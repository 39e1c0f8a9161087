"""Models with other modules in the place of some of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from bendtrace.errors import InputError
from bendtrace.interject.leaves import leaves_in, outside
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.sharing import replaced, shared_copy
from bendtrace.interject.where import near_misses
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate, CandidateGraph, NodeSelector
from bendtrace.paths.naming import identifier

__all__ = ["replace_module", "replace_module_native"]

Model = TypeVar("Model", bound=nn.Module)


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
        for node in _unrun(model):
            if id(node.module) not in called and selector.matches(node):
                meant.add(id(node.module))
    return {name for name, module in model.named_modules() if id(module) in meant}


def _unrun(model: nn.Module) -> Iterator[Candidate]:
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
