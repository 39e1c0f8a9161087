"""Insertions as functions of a model, in TorchWatcher's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bendtrace.interject.interjection import Interjection
from bendtrace.interject.leaves import leaves_in, outside
from bendtrace.interject.native import interject_natively
from bendtrace.interject.selectors.naming import matches_module, matches_module_class
from bendtrace.module import BendedModule

__all__ = [
    "interject_by_match",
    "interject_by_module",
    "interject_by_module_class",
    "interject_by_module_class_native",
    "interject_by_name",
]

Options = Mapping[str, Any] | None


def interject_by_match(
    model: Callable[..., Any],
    selector: Any,
    interjection: Interjection,
    tracer_kwargs: Options = None,
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> BendedModule:
    """Insert something at all nodes that a selector means.

    Args:
        model: a model, which stays as it is, or a `BendedModule`, in which it is inserted besides
            what is there.
        selector: a selector, a regular expression, a predicate of the `Candidate`, or a list.
        interjection: what is inserted; also a function of the value.
        tracer_kwargs: `{"leaf_modules": [...]}`: classes of modules, modules or qualified names
            that are not looked into. Their calls are nodes, what is in them is not meant.
        passes: in which passes of each node, as for `BendedModule.interject`.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant; without a run so far, the first call says so.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> relu = bt.node_selector.Activations.is_relu
        >>> watched = bt.interjections.interject_by_match(model, relu, lambda value: value * 0)
        >>> watched(torch.ones(2)), model(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([0.7311, 0.7311]))
    """
    bended = _bended(model)
    where = outside(selector, bended.model, leaves_in(tracer_kwargs))
    bended.interject(where, interjection, passes=passes, every=every, allow_none=allow_none)
    return bended


def interject_by_module_class(
    model: Callable[..., Any],
    target_module_class: type[nn.Module] | tuple[type[nn.Module], ...],
    interjection: Interjection,
    tracer_kwargs: Options = None,
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> BendedModule:
    """Insert something at all calls of modules of a class, those of subclasses included.

    Functions that do the same are not meant: `F.relu` is no `nn.ReLU`. A selector means both.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        target_module_class: the class, or several.
        interjection: what is inserted; also a function of the value.
        tracer_kwargs: as for `interject_by_match`.
        passes: in which passes of each node, as for `BendedModule.interject`.
        every: in every how manieth pass.
        allow_none: whether it is right that no node is meant.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no node is meant.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> watched = bt.interjections.interject_by_module_class(
        ...     model, torch.nn.ReLU, torch.zeros_like
        ... )
        >>> watched(torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    given = target_module_class
    classes = given if isinstance(given, tuple) else (given,)
    return interject_by_match(
        model, matches_module_class(*classes), interjection, tracer_kwargs,
        passes=passes, every=every, allow_none=allow_none,
    )  # fmt: skip


def interject_by_module(
    model: Callable[..., Any],
    module: nn.Module,
    interjection: Interjection,
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> BendedModule:
    """Insert something at all calls of one module, wherever they are.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        module: the module, one of the model's.
        interjection: what is inserted; also a function of the value.
        passes: in which passes of each node, as for `BendedModule.interject`.
        every: in every how manieth pass.
        allow_none: whether it is right that the module is not called.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: something given makes no sense.
        NodePathError: no run so far has called the module.

    Example:
        >>> import torch, bendtrace as bt
        >>> shared = torch.nn.ReLU()
        >>> model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared)
        >>> watched = bt.interjections.interject_by_module(model, shared, lambda value: value + 1)
        >>> _ = watched(torch.ones(2))
        >>> watched.insertions[-1].report()
        function at the module ReLU: called 2 times at 1 node
          sub_0: 2 times in passes 0 to 1, changed the value 2 times
    """
    bended = _bended(model)
    where = module if isinstance(module, nn.Module) else matches_module(module)
    bended.interject(where, interjection, passes=passes, every=every, allow_none=allow_none)
    return bended


def interject_by_name(
    model: Callable[..., Any],
    name: Any,
    interjection: Interjection,
    tracer_kwargs: Options = None,
    *,
    passes: Any = None,
    every: int | None = None,
    allow_none: bool = False,
) -> BendedModule:
    """Insert something at nodes that are given by name.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        name: a node path (`layers_0.mlp.relu`), a qualified name (`layers.0.mlp`), the name of a
            layer of the log, or several of these.
        interjection: what is inserted; also a function of the value.
        tracer_kwargs: taken for TorchWatcher's sake. What is named is meant wherever it is.
        passes: in which passes of each node, as for `BendedModule.interject`.
        every: in every how manieth pass.
        allow_none: whether it is right that there is no such node.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: something given makes no sense.
        NodePathError: there is no such node; without a run so far, the first call says so.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> names = ["0", "sub_1.sigmoid"]
        >>> watched = bt.interjections.interject_by_name(model, names, torch.zeros_like)
        >>> watched(torch.ones(2))
        tensor([0., 0.])
        >>> watched.insertions[-1].report().paths
        ('sub_0', 'sub_1.sigmoid')
    """
    leaves_in(tracer_kwargs)  # refuses what no tracer takes
    bended = _bended(model)
    bended.interject(name, interjection, passes=passes, every=every, allow_none=allow_none)
    return bended


def interject_by_module_class_native(
    model: nn.Module,
    target_module_class: type[nn.Module],
    interjection: Interjection,
    clone: bool = True,
    *,
    allow_none: bool = False,
) -> nn.Module:
    """Insert something at the calls of modules of a class by hooks, without any tracing.

    `name` is the qualified name of the module.

    Args:
        model: the model.
        target_module_class: the class.
        interjection: what is inserted; also a function of the value. It cannot be one that works
            instead of the node.
        clone: whether the model stays as it is. What is returned shares its parameters and buffers.
        allow_none: whether it is right that there are no such modules.

    Returns:
        The model with the hooks: a module of the same class.

    Raises:
        InputError: something given makes no sense, or there are no such modules.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> hooked = bt.interjections.interject_by_module_class_native(
        ...     model, torch.nn.ReLU, torch.zeros_like
        ... )
        >>> hooked(torch.ones(2)), model(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([0.7311, 0.7311]))
    """
    return interject_natively(model, target_module_class, interjection, clone, allow_none)


def _bended(model: Callable[..., Any]) -> BendedModule:
    return model if isinstance(model, BendedModule) else BendedModule(model)
