"""TorchWatcher: interjections that are modules, and functions that insert them in a model.

A script for torchwatcher imports the same names from here; `interjection` is this module itself,
and `node_selector` is `bendtrace.node_selector`. TorchWatcher's other analysers and statistics
are here by their names, such as `DeadReLU`, `RankAnalyser`, `AnalyserList`, `IoU` and `History`.

>>> import torch, bendtrace as bt
>>> class Tell(bt.compat.torchwatcher.ForwardInterjection):
...     def process(self, name, module, inputs):
...         print(name, tuple(inputs.shape))
>>> watched = bt.compat.torchwatcher.interject_by_match(torch.nn.ReLU(), "relu", Tell())
>>> _ = watched(torch.ones(2, 3))
relu (2, 3)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from torch import nn
from torch.fx import symbolic_trace as symbolic_trace

from bendtrace import node_selector
from bendtrace.compat._torchwatcher_analysis import *  # noqa: F403
from bendtrace.compat._torchwatcher_analysis import (
    Execution,
    ForwardInterjection,
    Named,
    Repeated,
    WrappedForwardBackwardInterjection,
    WrappedForwardInterjection,
    split_number,
)
from bendtrace.errors import InputError, NodePathError
from bendtrace.insert.insertion import as_interjection
from bendtrace.insert.interjection import Interjection
from bendtrace.insert.native import AttachedInterjection, Counts
from bendtrace.insert.plan import forms_of
from bendtrace.insert.selector_naming import (
    leaf_modules_in,
    leaf_names,
    matches_module_class,
    outside,
)
from bendtrace.module import BendedModule
from bendtrace.research import analyser
from bendtrace.research.streaming import CrossCovariance
from bendtrace.rewriting import replace_module, replace_module_native, shared_copy
from bendtrace.watch.owners import is_leaf_module, modules_in

__all__ = [
    "CrossCovariance", "ForwardInterjection", "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection", "interject_by_match", "interject_by_module_class",
    "interject_by_module_class_native", "interject_by_name", "node_selector", "replace_module",
    "replace_module_native",
]  # fmt: skip
__dir__ = __all__.copy
__all__ += ["Analyser", "AnalyserEvaluation", "LinearProbe"]  # noqa: F405
__all__.sort()

interjection: types.ModuleType = sys.modules[__name__]


Options = Mapping[str, Any] | None


def interject_by_match(
    model: Callable[..., Any],
    selector: Any,
    interjection: Interjection,
    tracer_kwargs: Options = None,
) -> BendedModule:
    """Insert something at all nodes that a selector selects.

    Args:
        model: a model, which is not changed, or a `BendedModule`, which keeps its other insertions.
        selector: a selector, a predicate of the `Candidate`, or a list of these; a string is a name
            for `interject_by_name`.
        interjection: what to insert; also a function of the value.
        tracer_kwargs: `{"leaf_modules": [...]}`: classes of modules, modules or qualified names.
            Their calls are nodes, but the nodes inside them are not selected.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no node is selected; if there was no run yet, the first call raises it.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> relu = bt.node_selector.Activations.is_relu
        >>> watched = tw.interject_by_match(model, relu, lambda value: value * 0)
        >>> watched(torch.ones(2)), model(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([0.7311, 0.7311]))
    """
    if isinstance(selector, str):
        return interject_by_name(model, selector, interjection, tracer_kwargs)
    bended = _bend_model(model, interjection)
    where = outside(selector, bended.model, leaf_modules_in(tracer_kwargs))
    is_analyser = isinstance(interjection, analyser.Analyser)
    bended.interject(where, Named(interjection) if is_analyser else interjection)
    return bended


def interject_by_module_class(
    model: Callable[..., Any],
    target_module_class: type[nn.Module] | tuple[type[nn.Module], ...],
    interjection: Interjection,
    tracer_kwargs: Options = None,
) -> BendedModule:
    """Insert something at all calls of modules of a class, including subclasses.

    Functions that do the same are not selected: `F.relu` is not an `nn.ReLU`. A selector selects
    both.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        target_module_class: the class, or several.
        interjection: what to insert; also a function of the value.
        tracer_kwargs: as for `interject_by_match`.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no node is selected.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> watched = tw.interject_by_module_class(
        ...     model, torch.nn.ReLU, torch.zeros_like
        ... )
        >>> watched(torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    given = target_module_class
    classes = given if isinstance(given, tuple) else (given,)
    return interject_by_match(model, matches_module_class(*classes), interjection, tracer_kwargs)


def interject_by_name(
    model: Callable[..., Any], name: Any, interjection: Interjection, tracer_kwargs: Options = None
) -> BendedModule:
    """Insert something at a node that is given by name, as torchvision names nodes.

    A module that is not looked into has its qualified name (`layer1.0.conv1`). The name of a
    function has the qualified name of the module around it (`layer1.0.add`). A repeated name
    there has a number: `relu_1` is the second relu, whether it is in another place of the code or
    in the second round of a loop.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        name: the name, or several.
        interjection: what to insert; also a function of the value.
        tracer_kwargs: as for `interject_by_match`.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: an argument is invalid, or a name means something else to torchvision.
        NodePathError: the node does not exist; if there was no run yet, the first call raises it.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         for _ in range(2):
        ...             x = torch.relu(x) + 1
        ...         return x
        >>> watched = tw.interject_by_name(Twice(), "relu_1", torch.zeros_like)
        >>> watched(torch.ones(2))
        tensor([1., 1.])
    """
    bended = _bend_model(model, interjection)
    what = as_interjection(interjection)
    if "before" in forms_of(what) or "instead" in forms_of(what):
        raise InputError(f"{what.label} works before a node: insert it with BendedModule.interject")
    modules = modules_in(bended.model)
    inner = (module for path, module in modules.items() if path)
    leaves = leaf_names(bended.model, [*leaf_modules_in(tracer_kwargs), *filter(_is_leaf, inner)])
    for one in (name,) if isinstance(name, str) else name:
        stem, number = split_number(one)
        if stem != one and one in modules:
            raise InputError(
                f"{one!r} is ambiguous: torchvision takes the number off the names of modules and "
                f"numbers them in the order of the calls, as {stem!r}, '{stem}_1', ...: pass "
                "the module to BendedModule.interject"
            )
        where = outside(Repeated(stem, leaves), bended.model, leaves)
        paths = {node.path for node in bended._knowledge.candidates() or () if where.matches(node)}
        runs = bended._knowledge.recordings()
        most = [sum(bended._knowledge.count_passes(path, run) for path in paths) for run in runs]
        if one.endswith("_0") or (runs and max(most) <= number):
            raise NodePathError(f"no node {one!r}: {stem!r} is not called so often", one)
        bended.interject(where, Execution(what, one, number))
    return bended


def _is_leaf(module: nn.Module) -> bool:
    """Return whether torch.fx does not look into a module; lists of modules are never called."""
    return is_leaf_module(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def interject_by_module_class_native(
    model: nn.Module,
    target_module_class: type[nn.Module],
    interjection: Interjection,
    clone: bool = True,
) -> nn.Module:
    """Insert something at the calls of modules of a class with hooks, without tracing.

    `name` is the qualified name of the module. A tensor that a module receives in several positions
    is one tensor, and its gradient is the sum over all of them.

    Args:
        model: the model.
        target_module_class: the class.
        interjection: what to insert; also a function of the value. It cannot be one that replaces
            the node.
        clone: whether to leave the model as it is. The result shares its parameters and buffers.

    Returns:
        The model with the hooks: a module of the same class.

    Raises:
        InputError: an argument is invalid, or there are no such modules.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> hooked = tw.interject_by_module_class_native(
        ...     model, torch.nn.ReLU, torch.zeros_like
        ... )
        >>> hooked(torch.ones(2)), model(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([0.7311, 0.7311]))
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"hooks can only be used with modules, not with {model!r}")
    if not (isinstance(target_module_class, type) and issubclass(target_module_class, nn.Module)):
        raise InputError(
            f"target_module_class has to be a class of modules, not {target_module_class!r}"
        )
    what = as_interjection(interjection)
    if "instead" in forms_of(what):
        raise InputError(
            f"{what.label} replaces a node, which hooks cannot do: insert it with "
            "BendedModule.interject, or use replace_module_native"
        )
    model = shared_copy(model) if clone else model
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, target_module_class)
    }
    if not targets:
        raise InputError(f"the model has no {target_module_class.__name__}")
    counts = Counts()
    model.register_forward_pre_hook(counts.begin)
    for name, module in targets.items():
        AttachedInterjection(module, what, name, counts).install()
    return model


def _bend_model(model: Callable[..., Any], interjection: Any) -> BendedModule:
    bended = model if isinstance(model, BendedModule) else WatchedModule(model)
    if is_made(interjection) and isinstance(bended, WatchedModule):
        interjection.train(bended.training)
    return bended


class WatchedModule(BendedModule):
    """A model to which the interjections in it belong."""

    def _interjections(self) -> dict[str, nn.Module]:
        found = (getattr(one.what, "what", one.what) for one in self.insertions)
        modules: dict[int, Any] = {id(one): one for one in found if is_made(one)}
        return {f"{type(one).__name__}{n}": one for n, one in enumerate(modules.values())}

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the model and of the interjections."""
        for module in self._interjections().values():
            module.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        for module in self._interjections().values():
            module._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model, and the interjections."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for name, module in self._interjections().items():
            yield from module.named_modules(memo, f"{prefix}.{name}".strip("."), remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, with those of the interjections."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, module in self._interjections().items():
            found.update(module.state_dict(prefix=f"{prefix}{name}."))
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict that this model has returned."""
        own = dict(state_dict)
        for name, module in self._interjections().items():
            keys = [key for key in own if key.startswith(f"{name}.")]
            mine = {key.removeprefix(f"{name}."): own.pop(key) for key in keys}
            module.load_state_dict(mine, *args, **kwargs)
        return super().load_state_dict(own, *args, **kwargs)


def is_made(interjection: Any) -> bool:
    """Return whether it is a module whose constructor was called."""
    return isinstance(interjection, nn.Module) and "_modules" in vars(interjection)
