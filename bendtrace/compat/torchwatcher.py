"""TorchWatcher: interjections that are modules, and functions that insert them in a model.

A script for torchwatcher imports the same names from here; `interjection` is this module itself,
and `node_selector` is `bendtrace.node_selector`.

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
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bendtrace import node_selector
from bendtrace.compat._watched import CrossCovariance, LinearProbe
from bendtrace.errors import InputError
from bendtrace.interject.insertion import as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.leaves import leaves_in, outside
from bendtrace.interject.native import Attached, Counts
from bendtrace.interject.plan import forms_of
from bendtrace.interject.selectors.naming import matches_module, matches_module_class
from bendtrace.interject.sharing import shared_copy
from bendtrace.module import BendedModule
from bendtrace.rewriting import replace_module, replace_module_native

__all__ = [
    "CrossCovariance",
    "ForwardInterjection",
    "LinearProbe",
    "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection",
    "interject_by_match",
    "interject_by_module",
    "interject_by_module_class",
    "interject_by_module_class_native",
    "interject_by_name",
    "node_selector",
    "replace_module",
    "replace_module_native",
]

interjection: types.ModuleType = sys.modules[__name__]
_lock = threading.Lock()


class _Module(Interjection, nn.Module, ABC):
    """An interjection that can have parameters, buffers and submodules of its own.

    They are its own: the model's state dict, parameters, training mode and device do not include
    them. Hand `interjection.parameters()` to an optimizer, call `interjection.to(...)`.
    """

    # Of the class, since subclasses need not call a constructor if they hold no tensors.
    _nodes: frozenset[str] = frozenset()

    def register(self, name: str, module: nn.Module | None) -> None:
        """Called once for each node, before `process` or `process_backward` first is.

        Override it to get something ready for each node: a probe, a list, a counter.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
        """

    def _meet(self, at: NodePass) -> None:
        if at.path in self._nodes:
            return
        with _lock:
            is_new = at.path not in self._nodes
            self._nodes = self._nodes | {at.path}
        if is_new:
            self.register(at.path, at.module)


class ForwardInterjection(_Module):
    """Sees the output of a node, and may replace it. Subclasses override `process`.

    One object can be inserted at many nodes, which it distinguishes by path. It is an `nn.Module`,
    and can have parameters, which are trained like any others and are not part of the model's
    state.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Doubled(bt.compat.torchwatcher.ForwardInterjection):
        ...     def process(self, name, module, inputs):
        ...         return inputs * 2
        >>> bended = bt.BendedModule(lambda x: x.relu() + 1)
        >>> handle = bended.interject("relu", Doubled())
        >>> bended(torch.ones(2))
        tensor([3., 3.])
    """

    @abstractmethod
    def process(self, name: str, module: nn.Module | None, inputs: Any) -> Any:
        """Called with the output of a node.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            inputs: the output of the node, unchanged: a tensor, a tuple, a dict.

        Returns:
            The replacement, with the same structure; None to keep the output.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        self._meet(at)
        return self.process(at.path, at.module, output)


class WrappedForwardInterjection(_Module):
    """Sees the inputs and the output of a node, and may replace the output.

    Subclasses override `process`.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Residual(bt.compat.torchwatcher.WrappedForwardInterjection):
        ...     def process(self, name, module, inputs, outputs):
        ...         return inputs + outputs
        >>> bended = bt.BendedModule(lambda x: x.relu())
        >>> handle = bended.interject("relu", Residual())
        >>> bended(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  4.])
    """

    wants_inputs = True

    @abstractmethod
    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        """Called with the inputs and the output of a node.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            inputs: the arguments that contain a tensor, positional ones first. A single one is
                passed as it is, several as a tuple. They are the values from before the node.
            outputs: the output of the node, unchanged.

        Returns:
            The replacement of `outputs`, with the same structure; None to keep them.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        self._meet(at)
        return self.process(at.path, at.module, _unpacked(_with_tensors(inputs)), output)


class WrappedForwardBackwardInterjection(_Module):
    """Sees the gradients that pass through a node, and may replace those of its inputs.

    Subclasses override `process_backward`, and `process` to see also what
    `WrappedForwardInterjection` sees.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Halved(bt.compat.torchwatcher.WrappedForwardBackwardInterjection):
        ...     def process_backward(self, name, module, grad_input, grad_output):
        ...         return grad_input / 2
        >>> bended = bt.BendedModule(lambda x: x.relu() + x)
        >>> handle = bended.interject("relu", Halved())
        >>> x = torch.ones(2, requires_grad=True)
        >>> bended(x).sum().backward()
        >>> x.grad
        tensor([1.5000, 1.5000])
    """

    wants_inputs: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "wants_inputs" not in vars(cls):  # what nobody looks at is not asked for
            cls.wants_inputs = cls._overrides("after")

    @classmethod
    def _overrides(cls, name: str) -> bool:
        if name == "after" and cls.after is WrappedForwardBackwardInterjection.after:
            return cls.process is not WrappedForwardBackwardInterjection.process
        return super()._overrides(name)

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        """Called in the forward pass, like `WrappedForwardInterjection.process`."""

    @abstractmethod
    def process_backward(
        self,
        name: str,
        module: nn.Module | None,
        grad_input: Tensor | tuple[Tensor | None, ...] | None,
        grad_output: Tensor | tuple[Tensor | None, ...] | None,
    ) -> Any:
        """Called in the backward pass with the gradients through this call of the node alone.

        Other uses of a tensor do not count: if `x` is used twice, each use has a separate
        `grad_input`.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            grad_input: gradients of the node's input tensors, in the order of the arguments, None
                for a tensor without a gradient. A single one is passed as it is, several as a
                tuple.
            grad_output: gradients of the node's output tensors, in the same form.

        Returns:
            The replacement of `grad_input`, with the same shapes; None to keep it.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        self._meet(at)
        return self.process(at.path, at.module, _unpacked(_with_tensors(inputs)), output)

    def backward(
        self,
        at: NodePass,
        grad_input: tuple[Any, ...],
        grad_output: tuple[Any, ...],
    ) -> Any:
        """Call `process_backward`."""
        self._meet(at)
        return self.process_backward(
            at.path, at.module, _unpacked(grad_input), _unpacked(grad_output)
        )


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
    """Insert something at all nodes that a selector selects.

    Args:
        model: a model, which is not changed, or a `BendedModule`, which keeps its other insertions.
        selector: a selector, a regular expression, a predicate of the `Candidate`, or a list.
        interjection: what to insert; also a function of the value.
        tracer_kwargs: `{"leaf_modules": [...]}`: classes of modules, modules or qualified names.
            Their calls are nodes, but the nodes inside them are not selected.
        passes: the passes of each node to apply to, as for `BendedModule.interject`.
        every: apply only in every n-th pass.
        allow_none: whether to accept that no node is selected.

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
    """Insert something at all calls of modules of a class, including subclasses.

    Functions that do the same are not selected: `F.relu` is not an `nn.ReLU`. A selector selects
    both.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        target_module_class: the class, or several.
        interjection: what to insert; also a function of the value.
        tracer_kwargs: as for `interject_by_match`.
        passes: the passes of each node to apply to, as for `BendedModule.interject`.
        every: apply only in every n-th pass.
        allow_none: whether to accept that no node is selected.

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
    """Insert something at all calls of one module, wherever they occur.

    Args:
        model: a model, or a `BendedModule`, as for `interject_by_match`.
        module: the module, a submodule of the model.
        interjection: what to insert; also a function of the value.
        passes: the passes of each node to apply to, as for `BendedModule.interject`.
        every: apply only in every n-th pass.
        allow_none: whether to accept that the module is not called.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: an argument is invalid.
        NodePathError: no run so far has called the module.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> shared = torch.nn.ReLU()
        >>> model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared)
        >>> watched = tw.interject_by_module(model, shared, lambda value: value + 1)
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
        interjection: what to insert; also a function of the value.
        tracer_kwargs: accepted for compatibility with TorchWatcher. Names select nodes inside leaf
            modules, too.
        passes: the passes of each node to apply to, as for `BendedModule.interject`.
        every: apply only in every n-th pass.
        allow_none: whether to accept that the node does not exist.

    Returns:
        The `BendedModule`; `.insertions[-1]` is the handle.

    Raises:
        InputError: an argument is invalid.
        NodePathError: the node does not exist; if there was no run yet, the first call raises it.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        >>> names = ["0", "sub_1.sigmoid"]
        >>> watched = tw.interject_by_name(model, names, torch.zeros_like)
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
    """Insert something at the calls of modules of a class with hooks, without tracing.

    `name` is the qualified name of the module. A tensor that a module receives in several positions
    is one tensor, and its gradient is the sum over all of them.

    Args:
        model: the model.
        target_module_class: the class.
        interjection: what to insert; also a function of the value. It cannot be one that replaces
            the node.
        clone: whether to leave the model as it is. The result shares its parameters and buffers.
        allow_none: whether to accept that there are no such modules.

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
    if not targets and not allow_none:
        raise InputError(f"the model has no {target_module_class.__name__}")
    counts = Counts()
    model.register_forward_pre_hook(counts.begin)
    for name, module in targets.items():
        Attached(module, what, name, counts).install()
    return model


def _bended(model: Callable[..., Any]) -> BendedModule:
    return model if isinstance(model, BendedModule) else BendedModule(model)


def _with_tensors(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(filter(_has_tensor, (*inputs, *inputs.kwargs.values())))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor)


def _unpacked(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
