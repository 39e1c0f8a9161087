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

import re
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace import node_selector
from bendtrace.analysis.analyser import Analyser
from bendtrace.analysis.streaming import CrossCovariance
from bendtrace.errors import InputError, NodePathError
from bendtrace.interject.gates import of_this_run
from bendtrace.interject.insertion import as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.native import Attached, Counts
from bendtrace.interject.plan import forms_of
from bendtrace.interject.selectors.algebra import Selector
from bendtrace.interject.selectors.naming import (
    leaf_names,
    leaves_in,
    matches_module_class,
    outside,
)
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.nodes import identifier
from bendtrace.rewriting import replace_module, replace_module_native, shared_copy
from bendtrace.torch_rules.owners import is_leaf_module, modules_in

__all__ = [
    "CrossCovariance",
    "ForwardInterjection",
    "LinearProbe",
    "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection",
    "interject_by_match",
    "interject_by_module_class",
    "interject_by_module_class_native",
    "interject_by_name",
    "node_selector",
    "replace_module",
    "replace_module_native",
]
__dir__ = __all__.copy


interjection: types.ModuleType = sys.modules[__name__]
_lock = threading.Lock()


class _Module(Interjection, nn.Module, ABC):
    """An interjection that can have parameters, buffers and submodules.

    They belong to the watched model, which the `interject_by_...` functions return: its parameters,
    its state dict, its training mode and its device include them.
    """

    # Of the class, since subclasses need not call a constructor if they hold no tensors.
    _nodes: frozenset[str] = frozenset()

    def register(self, name: str, module: nn.Module | None) -> None:
        """Called once for each node, before `process` or `process_backward` first is.

        Override it to get something ready for each node: a probe, a list, a counter.

        Args:
            name: name of the node.
            module: the module called; None for functions and methods.
        """

    def _name_of(self, at: NodePass) -> str:
        """Return the name of an execution, with its number among those of one kind in the call."""
        if not at.qualified_name:
            return at.path
        names, counts = self._of_call()
        key = at.path, at.number
        if key not in names:
            stem, number = numbered_name(at)
            number = max(counts.get(stem, 0), 0 if at.number else number)
            counts[stem] = number + 1
            names[key] = f"{stem}_{number}" if number else stem
        return names[key]

    def _of_call(self) -> tuple[dict[tuple[str, int], str], dict[str, int]]:
        return of_this_run().setdefault(id(self), ({}, {}))  # type: ignore[no-any-return]

    def _meet(self, at: NodePass) -> str:
        """Return the name of an execution, after it was registered."""
        name = self._name_of(at)
        if name not in self._nodes:
            with _lock:
                is_new = name not in self._nodes
                self._nodes = self._nodes | {name}
            if is_new:
                self.register(name, at.module)
        return name


class ForwardInterjection(_Module):
    """Sees the output of a node, and may replace it. Subclasses override `process`.

    One object can be inserted at many nodes, which it distinguishes by name: `features.1` for a
    module, `layer1.0.add` for a function called in one, and with a number for what is repeated
    there, `layer1.0.relu_1`. It is an `nn.Module`, and can have parameters.

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
            name: name of the node.
            module: the module called; None for functions and methods.
            inputs: the output of the node, unchanged: a tensor, a tuple, a dict.

        Returns:
            The replacement, with the same structure; None to keep the output.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        return self.process(self._meet(at), at.module, output)


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
            name: name of the node.
            module: the module called; None for functions and methods.
            inputs: the arguments that contain a tensor, positional ones first. A single one is
                passed as it is, several as a tuple. They are the values from before the node.
            outputs: the output of the node, unchanged.

        Returns:
            The replacement of `outputs`, with the same structure; None to keep them.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        name = self._meet(at)
        return self.process(name, at.module, _unpacked(_with_tensors(inputs)), output)


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
            cls.wants_inputs = cls.process is not WrappedForwardBackwardInterjection.process

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
            name: name of the node.
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
        name = self._meet(at)
        return self.process(name, at.module, _unpacked(_with_tensors(inputs)), output)

    def backward(
        self,
        at: NodePass,
        grad_input: tuple[Any, ...],
        grad_output: tuple[Any, ...],
    ) -> Any:
        """Call `process_backward`."""
        return self.process_backward(
            self._meet(at), at.module, _unpacked(grad_input), _unpacked(grad_output)
        )

    def _backward_of_call(self) -> Callable[..., Any]:
        names, _ = self._of_call()

        def backward(at: NodePass, *gradients: Any) -> Any:
            name = names.get((at.path, at.number), at.path)
            return self.backward(replace(at, path=name, qualified_name=""), *gradients)

        return backward


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
    bended = _bended(model, interjection)
    where = outside(selector, bended.model, leaves_in(tracer_kwargs))
    is_analyser = isinstance(interjection, Analyser)
    bended.interject(where, _Named(interjection) if is_analyser else interjection)
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
    model: Callable[..., Any],
    name: Any,
    interjection: Interjection,
    tracer_kwargs: Options = None,
) -> BendedModule:
    """Insert something at a node that is given by name, as torchvision names nodes.

    The name of a module that is not looked into is its qualified name (`layer1.0.conv1`). That of a
    function has the qualified name of the module around it (`layer1.0.add`). What is called again
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
    bended = _bended(model, interjection)
    what = as_interjection(interjection)
    if "before" in forms_of(what) or "instead" in forms_of(what):
        raise InputError(f"{what.label} works before a node: insert it with BendedModule.interject")
    modules = modules_in(bended.model)
    inner = (module for path, module in modules.items() if path)
    leaves = leaf_names(bended.model, [*leaves_in(tracer_kwargs), *filter(_is_leaf, inner)])
    for one in (name,) if isinstance(name, str) else name:
        stem, number = split_number(one)
        if stem != one and one in modules:
            raise InputError(
                f"{one!r} is ambiguous: torchvision takes the number off the names of modules and "
                f"numbers them in the order of the calls, as {stem!r}, '{stem}_1', ...: pass "
                "the module to BendedModule.interject"
            )
        where = outside(Repeated(stem, leaves), bended.model, leaves)
        known = {node.path for node in bended._known.candidates() or () if where.matches(node)}
        runs = bended._known.recordings()
        most = [sum(bended._known.count_passes(path, run) for path in known) for run in runs]
        if one.endswith("_0") or (runs and max(most) <= number):
            raise NodePathError(f"no node {one!r}: {stem!r} is not called so often", one)
        bended.interject(where, Execution(what, one, number))
    return bended


def _is_leaf(module: nn.Module) -> bool:
    """Whether torch.fx does not look into a module; lists of modules are never called."""
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
        Attached(module, what, name, counts).install()
    return model


def _bended(model: Callable[..., Any], interjection: Any) -> BendedModule:
    bended = model if isinstance(model, BendedModule) else WatchedModule(model)
    if is_made(interjection) and isinstance(bended, WatchedModule):
        interjection.train(bended.training)
    return bended


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


# TorchWatcher's probes, and the models that interjections are in.


class LinearProbe(Interjection, nn.Module):
    """TorchWatcher's linear probes: one layer for each node, trained with any criterion.

    In contrast to `bendtrace.analysis.LinearProbe`, targets and losses are not checked: whatever
    the criterion takes for the outputs of the probes is accepted, such as targets of
    `nn.BCEWithLogitsLoss`. In training mode the outputs of the last call are kept for
    `train_step`; in evaluation mode scores are accumulated.

    Args:
        num_classes: outputs of each probe.
        partial_optim: a function from the parameters of a probe to its optimizer.
        criterion: the loss, a function of the outputs and the targets; None for none.

    Attributes:
        probes: the probes, by the name of the node with "_probe" after it. An item of a
            `nn.Sequential` is named by its number: "1_probe".
        optimisers: their optimizers, by the name of the node.
        targets: the targets of the next call.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> probe = tw.LinearProbe(1, torch.optim.Adam, torch.nn.BCEWithLogitsLoss())
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> watched = tw.interject_by_match(model, bt.node_selector.Activations.is_relu, probe)
        >>> probe.targets = torch.ones(4, 1)
        >>> _ = watched(torch.ones(4, 2))
        >>> probe.train_step()
        >>> list(probe.probes), probe.to_dict()["1"].shape
        (['1_probe'], torch.Size([4, 1]))
        >>> _ = probe.eval()
        >>> _ = watched(torch.ones(4, 2))
        >>> sorted(probe.to_dict()["1"])
        ['acc', 'loss']
    """

    observes = True

    def __init__(
        self,
        num_classes: int,
        partial_optim: Callable[[Any], Optimizer] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_classes = num_classes
        self.partial_optim = partial_optim or torch.optim.Adam
        self.criterion = criterion
        self.probes = nn.ModuleDict()
        self.optimisers: dict[str, Optimizer] = {}
        self.targets: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}
        self._scores: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """The name of the kind of analyser."""
        return "LinearProbe"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep the outputs of the probe of a node, or score them."""
        if not isinstance(output, Tensor) or output.dim() == 0:
            raise InputError(f"a linear probe at {at.path!r} needs a batch, not {type(output)}")
        name = re.sub(r"(^|\.)sub_(\d+)(?=\.|$)", r"\1\2", at.path)
        features = output.detach().flatten(1)
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            key = f"{name.replace('.', '_')}_probe"
            if key not in self.probes:
                made = nn.Linear(features.shape[1], self.num_classes)
                self.probes[key] = made.to(features.device, features.dtype)
                self.optimisers[name] = self.partial_optim(self.probes[key].parameters())
            predicted = self.probes[key](features.clone())
            if self.training:
                self._outputs[name] = predicted
            else:
                self._score(name, predicted.detach())

    def _score(self, name: str, predicted: Tensor) -> None:
        targets = self._given()
        loss = float("nan") if self.criterion is None else float(self.criterion(predicted, targets))
        if targets.is_floating_point():
            right = (predicted > 0) == (targets > 0.5)
        else:
            right = predicted.argmax(1) == targets
        sums = self._scores.setdefault(name, [0.0, 0.0, 0.0])
        count = len(predicted)
        for place, amount in enumerate((right.float().mean().item() * count, loss * count, count)):
            sums[place] += amount

    def _given(self) -> Tensor:
        if self.targets is None:
            raise InputError("set the targets first: probe.targets = labels")
        return self.targets

    def train_step(self) -> None:
        """Make a step with each probe that the last call of the model reached.

        Raises:
            InputError: there is no criterion, or there are no targets.
        """
        if self.criterion is None:
            raise InputError("train_step needs a criterion")
        targets = self._given()
        with torch.inference_mode(False), torch.enable_grad():
            for name, predicted in self._outputs.items():
                optimiser = self.optimisers[name]
                optimiser.zero_grad()
                self.criterion(predicted, targets).backward(retain_graph=True)
                optimiser.step()
        self._outputs = {name: predicted.detach() for name, predicted in self._outputs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs of the last call (in training) or the scores, by node."""
        if self.training:
            return {name: predicted.detach() for name, predicted in self._outputs.items()}
        return {
            name: {"acc": right / count, "loss": loss / count}
            for name, (right, loss, count) in self._scores.items()
        }

    def reset(self) -> None:
        """Forget the outputs and the scores, but not the probes."""
        self._outputs.clear()
        self._scores.clear()


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
    """Whether it is a module whose constructor was called."""
    return isinstance(interjection, nn.Module) and "_modules" in vars(interjection)


# Single executions of nodes by name, as torchvision numbers the nodes of torch.fx's graphs.
#
# What is repeated in the code of one module has a number: `relu_1` is the second relu there, in
# another place of the source or in the second round of a loop.


def split_number(name: str) -> tuple[str, int]:
    """Return a name without its number, and the number."""
    found = re.fullmatch(r"(.+)_(\d+)", name, re.DOTALL)
    return (name, 0) if found is None else (found[1], int(found[2]))


def numbered_name(at: NodePass) -> tuple[str, int]:
    """Return the name of a node without its number among those of one kind, and the number."""
    name = at.qualified_name
    if at.module is None:
        return split_number(name)
    base = identifier(name.removeprefix(f"{at.scope}.") if at.scope else name)
    return name, split_number(f"x{at.path.rpartition('.')[2].removeprefix(base)}")[1]


@dataclass(frozen=True, repr=False)
class Repeated(Selector):
    """The nodes whose names differ from some name by a number at most."""

    stem: str
    leaves: frozenset[str]  # the modules that are nodes

    def matches(self, node: Candidate) -> bool:
        """Return whether a node is one of them."""
        if node.is_module:
            return (
                node.module_path in self.leaves and split_number(node.module_path)[0] == self.stem
            )
        return f"{node.scope_path}.{node.base}".removeprefix(".") == self.stem

    def __repr__(self) -> str:
        return repr(self.stem)


class Execution(Interjection):
    """Has an interjection called in one of several executions of nodes, under a name.

    Args:
        what: the interjection.
        name: the name.
        number: how many executions come before it in a call of the model.
    """

    def __init__(self, what: Interjection, name: str, number: int) -> None:
        self.what: Interjection = what
        self.name: str = name
        self.number: int = number
        self.observes: bool = what.observes
        self.wants_inputs: bool = what.wants_inputs
        self.late: bool = what.late
        self.needs_paths: bool = what.needs_paths

    @property
    def label(self) -> str:
        """The label of the interjection."""
        return self.what.label

    def _forms(self) -> frozenset[str]:
        return self.what._forms() | {"after"}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the interjection, if it is the execution."""
        calls: list[tuple[str, int]] = of_this_run().setdefault(id(self), [])
        calls.append((at.path, at.number))
        if len(calls) != self.number + 1 or "after" not in self.what._forms():
            return None
        return self.what.after(self._at(at), inputs, output)

    def _backward_of_call(self) -> Callable[..., Any]:
        calls: list[tuple[str, int]] = of_this_run().setdefault(id(self), [])
        backward = self.what._backward_of_call()

        def of_one(at: NodePass, grad_input: Any, grad_output: Any) -> Any:
            is_one = calls[self.number : self.number + 1] == [(at.path, at.number)]
            return backward(self._at(at), grad_input, grad_output) if is_one else None

        return of_one

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> Any:
        """Call the interjection."""
        return self._backward_of_call()(at, grad_input, grad_output)

    def _at(self, at: NodePass) -> NodePass:
        return replace(at, path=self.name, number=0, qualified_name="")


class _Named(Execution):
    """Has an analyser keep its results by TorchWatcher's names of nodes, such as `features.1`."""

    def __init__(self, what: Interjection) -> None:
        super().__init__(what, "", 0)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call the analyser."""
        return self.what.after(self._at(at), inputs, output)

    def _backward_of_call(self) -> Callable[..., Any]:
        backward = self.what._backward_of_call()
        return lambda at, *gradients: backward(self._at(at), *gradients)

    def _at(self, at: NodePass) -> NodePass:
        name = _Module._name_of(cast("Any", self), at)
        return replace(at, path=name, number=0, qualified_name="")

    def _of_call(self) -> tuple[dict[tuple[str, int], str], dict[str, int]]:
        return _Module._of_call(cast("Any", self))
