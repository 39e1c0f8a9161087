"""TorchWatcher's analysers, the statistics that they accumulate, and their evaluation."""

from __future__ import annotations

import copy
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace.errors import InputError
from bendtrace.insert.gates import of_this_run
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import all_tensors_in
from bendtrace.insert.selector_algebra import Selector
from bendtrace.log.nodes import identifier
from bendtrace.log.path_views import Candidate
from bendtrace.python.internals import pytree
from bendtrace.research import streaming

__all__ = [
    "Analyser", "AnalyserEvaluation", "AnalyserList", "AnalyserState", "Covariance",
    "CovarianceSpectrumStatisticsAnalyser", "CrossIoU", "DeadReLU", "FeatureStatistics",
    "GradientAccumulationAnalyser", "History", "IoU", "LayerWeightRankAnalyser", "LinearProbe",
    "Mean", "NameAnalyser", "NoGradException", "PerClassAnalyser", "PerClassVersusAnalyser",
    "RankAnalyser", "TargetException", "Variance",
]  # fmt: skip


# TorchWatcher's interjections, and single executions of nodes by name.

_lock = threading.Lock()


class ModuleInterjection(Interjection, nn.Module, ABC):
    """An interjection that can have parameters, buffers and submodules.

    They belong to the watched model, which the `interject_by_...` functions return: its parameters,
    its state dict, its training mode and its device include them.
    """

    # Of the class, since subclasses need not call a constructor if they hold no tensors.
    _nodes: frozenset[str] = frozenset()

    def register(self, name: str, module: nn.Module | None) -> None:
        """Called once for each node, before `process` or `process_backward` first is.

        Override it to get something ready for each node: a probe, a list, a counter.
        """

    def _name_of(self, at: NodePass) -> str:
        """Return the name of an execution, with its number among those of one kind in the call."""
        if not at.qualified_name:
            return at.path
        names, counts = self._of_call()
        key = at.path, at.number
        if key not in names:
            stem, number = split_name(at)
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


class ForwardInterjection(ModuleInterjection):
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
        """Called with the output of a node; may return its replacement, with the same structure.

        `module` is the module called; None for functions and methods.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        return self.process(self._meet(at), at.module, output)


class WrappedForwardInterjection(ModuleInterjection):
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
        """Called with the inputs and the output of a node; may return a replacement of the output.

        The inputs are the arguments that contain a tensor, positional ones first, with the values
        from before the node. A single one is passed as it is, several as a tuple.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        given = tuple(filter(all_tensors_in, (*inputs, *inputs.kwargs.values())))
        return self.process(self._meet(at), at.module, _unpack(given), output)


class WrappedForwardBackwardInterjection(WrappedForwardInterjection):
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "wants_inputs" not in vars(cls):  # what nobody looks at is not asked for
            cls.wants_inputs = cls.process is not WrappedForwardBackwardInterjection.process

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        """Called in the forward pass, like `WrappedForwardInterjection.process`."""

    @abstractmethod
    def process_backward(
        self, name: str, module: nn.Module | None, grad_input: Any, grad_output: Any
    ) -> Any:
        """Called in the backward pass with the gradients through this call of the node alone.

        They are those of the node's input tensors and output tensors, in order; None for a tensor
        without a gradient. A single one is passed as it is, several as a tuple. It may return a
        replacement of `grad_input`. If `x` is used twice, each use has a separate `grad_input`.
        """

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> Any:
        """Call `process_backward`."""
        return self.process_backward(
            self._meet(at), at.module, _unpack(grad_input), _unpack(grad_output)
        )

    def _backward_of_call(self) -> Callable[..., Any]:
        names, _ = self._of_call()

        def backward(at: NodePass, *gradients: Any) -> Any:
            name = names.get((at.path, at.number), at.path)
            return self.backward(replace(at, path=name, qualified_name=""), *gradients)

        return backward


def _unpack(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# Single executions of nodes by name, as torchvision numbers the nodes of torch.fx's graphs: what is
# repeated in the code of one module has a number. `relu_1` is the second relu there, in another
# place of the source or in the second round of a loop.


def split_number(name: str) -> tuple[str, int]:
    """Return a name without its number, and the number."""
    found = re.fullmatch(r"(.+)_(\d+)", name, re.DOTALL)
    return (name, 0) if found is None else (found[1], int(found[2]))


def split_name(at: NodePass) -> tuple[str, int]:
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


class Named(Interjection):
    """Has an analyser keep its results by TorchWatcher's names of nodes, such as `features.1`."""

    def __init__(self, what: Interjection) -> None:
        self.what: Interjection = what
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
        """Call the interjection."""
        if self._calls(at) and "after" in self.what._forms():
            return self.what.after(self._at(at), inputs, output)
        return None

    def _calls(self, at: NodePass) -> bool:
        return True

    def _backward_of_call(self) -> Callable[..., Any]:
        backward, is_one = self.what._backward_of_call(), self._of_this_call()
        return lambda at, *gradients: backward(self._at(at), *gradients) if is_one(at) else None

    def _of_this_call(self) -> Callable[[NodePass], bool]:
        return lambda at: True

    def backward(self, at: NodePass, grad_input: Any, grad_output: Any) -> Any:
        """Call the interjection."""
        return self._backward_of_call()(at, grad_input, grad_output)

    def _at(self, at: NodePass) -> NodePass:
        names: Any = self
        return replace(at, path=ModuleInterjection._name_of(names, at), number=0, qualified_name="")

    _of_call: ClassVar[Any] = ModuleInterjection._of_call


class Execution(Named):
    """Has an interjection called in the `number`-th execution of nodes, from 0, under a name."""

    def __init__(self, what: Interjection, name: str, number: int) -> None:
        super().__init__(what)
        self.name: str = name
        self.number: int = number

    def _calls(self, at: NodePass) -> bool:
        calls = self._executions()
        calls.append((at.path, at.number))
        return len(calls) == self.number + 1

    def _of_this_call(self) -> Callable[[NodePass], bool]:
        calls, number = self._executions(), self.number
        return lambda at: calls[number : number + 1] == [(at.path, at.number)]

    def _executions(self) -> list[tuple[str, int]]:
        return cast("list[tuple[str, int]]", of_this_run().setdefault(id(self), []))

    def _at(self, at: NodePass) -> NodePass:
        return replace(at, path=self.name, number=0, qualified_name="")


T = TypeVar("T")
_CALL: ContextVar[dict[Any, Any] | None] = ContextVar("call", default=None)


class TargetException(InputError):
    """The targets of a call were not set."""


class NoGradException(InputError):
    """There are no gradients: the analyser has no `gradient=True`, or no backward pass ran."""


class AnalyserState:
    """One execution of a node: `name`, `module`, `inputs`, `outputs`, `targets`, gradients."""

    def __init__(self, **values: Any) -> None:
        self.extras: dict[str, Any] = {}
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name == "targets":
            raise TargetException("set the targets first: analyser.targets = labels")
        if name.endswith("_gradients"):
            raise NoGradException("analysers have gradients if they are made with gradient=True")
        raise AttributeError(name)


class Analyser(WrappedForwardBackwardInterjection, Generic[T]):
    """Accumulates statistics of each node that it is inserted at.

    Subclasses override `process_batch_state(name, state, working_results)`, which returns the new
    working results of a node; the first ones are None. `state` has the `inputs` and `outputs` of
    one execution, its `targets`, and `input_gradients` and `output_gradients`. They may override
    `finalise_result(name, result)`, which makes what `to_dict` returns of the working results.
    With gradients, inputs and outputs are detached.

    Args:
        gradient: whether it waits for the gradients of each execution.

    Attributes:
        enabled: whether it accumulates anything.
        working_results: the accumulated values, by the name of the node.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> class Largest(tw.Analyser):
        ...     def process_batch_state(self, name, state, working_results):
        ...         return max(float(state.outputs.max()), working_results or 0.0)
        >>> largest = Largest()
        >>> watched = tw.interject_by_match(torch.nn.Sequential(torch.nn.ReLU()), "0", largest)
        >>> _ = watched(torch.ones(2)), watched(torch.zeros(2))
        >>> largest.to_dict()
        {'0': 1.0}
    """

    observes = True

    def __init__(self, gradient: bool = False) -> None:
        super().__init__()
        self.gradient: bool = gradient
        self.enabled: bool = True
        self.known_targets: dict[str, Any] = {}  # those of the next calls, if they are set
        self.reset()

    def reset(self) -> None:
        """Forget the results."""
        self.working_results: dict[str, Any] = {}

    @property
    def targets(self) -> Any:
        """The targets of the next calls."""
        return AnalyserState(**self.known_targets).targets

    @targets.setter
    def targets(self, targets: Any) -> None:
        self.known_targets = {"targets": targets}

    def _forms(self) -> frozenset[str]:
        return super()._forms() - (frozenset() if self.gradient else {"backward"})

    def process(self, *execution: Any) -> None:
        """Call `log_forward`."""
        self.log_forward(*execution)

    def process_backward(self, *execution: Any) -> None:
        """Call `log_backward`."""
        self.log_backward(*execution)

    def _backward_of_call(self) -> Callable[..., Any]:
        backward, call = super()._backward_of_call(), of_this_run()

        def of_call(at: NodePass, *gradients: Any) -> None:
            token = _CALL.set(call)
            try:
                backward(at, *gradients)
            finally:
                _CALL.reset(token)

        return of_call

    def _waiting(self) -> dict[str, Any]:
        """Return the values that wait for the gradients of this call, by the name of the node."""
        call = _CALL.get()
        store = of_this_run() if call is None else call
        return store.setdefault((id(self), "waiting"), {})  # type: ignore[no-any-return]

    def log_forward(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> None:
        """Take in an execution of a node."""
        if self.gradient:  # what waits belongs to the graph of autograd, and may not hold it
            inputs, outputs = pytree.tree_map_only(Tensor, Tensor.detach, (inputs, outputs))
        state = AnalyserState(name=name, module=module, inputs=inputs, outputs=outputs)
        vars(state).update(self.known_targets)
        if self.gradient:
            self._waiting()[name] = state
        else:
            self.finalize_state(state)

    def log_backward(self, name: str, module: Any, grad_input: Any, grad_output: Any) -> None:
        """Take in the gradients of an execution."""
        state = self._waiting()[name]
        state.input_gradients, state.output_gradients = grad_input, grad_output
        self.finalize_state(state)

    def finalize_state(self, state: AnalyserState) -> None:
        """Accumulate an execution."""
        if self.enabled:
            working = self.working_results.get(state.name)
            self.working_results[state.name] = self.process_batch_state(state.name, state, working)

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        """Return the working results of a node with one more execution."""
        raise InputError(f"{type(self).__name__} has no process_batch_state(name, state, results)")

    def finalise_result(self, name: str, result: Any) -> Any:
        """Return the result of a node."""
        return result

    def to_dict(self) -> dict[Any, Any]:
        """Return the results by the name of the node."""
        return {name: self.finalise_result(name, v) for name, v in self.working_results.items()}


class AnalyserList(Analyser[Any]):
    """Several analysers in one, whose results are by class and node: `DeadReLU.features.1`."""

    def __init__(self, *analysers: Analyser[Any]) -> None:
        super().__init__(any(one.gradient for one in analysers))
        self.analysers: Any = nn.ModuleList(analysers)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for one in self._modules.get("analysers") or () if name in ("enabled", "targets") else ():  # type: ignore[union-attr]
            setattr(one, name, value)

    def log_forward(self, *execution: Any) -> None:
        for one in self.analysers:
            one.log_forward(*execution)

    def log_backward(self, *execution: Any) -> None:
        for one in self.analysers:
            if one.gradient:
                one.log_backward(*execution)

    def to_dict(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for one in self.analysers:
            inner = type(getattr(one, "analyser", one)).__name__
            kind = f"PerClass{inner}" if isinstance(one, PerClassAnalyser) else inner
            found |= {f"{kind}.{name}": value for name, value in one.to_dict().items()}
        return found

    def reset(self) -> None:
        super().reset()
        for one in self._modules.get("analysers") or ():  # type: ignore[union-attr]
            one.reset()


class PerClassAnalyser(Analyser[Any]):
    """A copy of an analyser for each class, which gets the rows of this class; by class."""

    versus = False

    def __init__(self, analyser: Analyser[Any]) -> None:
        super().__init__(analyser.gradient)
        self.analyser: Analyser[Any] = analyser

    def reset(self) -> None:
        super().reset()
        self.analysers: dict[Any, Analyser[Any]] = {}

    def log_forward(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> None:
        targets, parts = self.targets, {}
        for number in targets.unique().tolist():
            parts[number] = targets == number
            if self.versus:
                parts[f"~{number}"] = targets != number
        self._waiting()[name] = parts
        for key, rows in parts.items() if self.enabled else ():
            one = self.analysers.setdefault(key, copy.deepcopy(self.analyser))
            one.targets = targets[rows]
            one.log_forward(name, module, _chosen_rows(inputs, rows), _chosen_rows(outputs, rows))

    def log_backward(self, name: str, module: Any, grad_input: Any, grad_output: Any) -> None:
        for key, rows in self._waiting()[name].items() if self.enabled else ():
            given = _chosen_rows(grad_input, rows), _chosen_rows(grad_output, rows)
            self.analysers[key].log_backward(name, module, *given)

    def to_dict(self) -> dict[Any, Any]:
        return {key: one.to_dict() for key, one in self.analysers.items()}


class PerClassVersusAnalyser(PerClassAnalyser):
    """The same, and for each class `1` a copy `"~1"` for all other rows."""

    versus = True


def _chosen_rows(values: Any, chosen: Tensor) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one[chosen], values)


class NameAnalyser(Analyser[str]):
    """Has the names of the nodes."""

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> str:
        return name


class DeadReLU(Analyser[Tensor]):
    """Counts the units that were never active: `dead_count`, `numel`, and a `sum` of batches."""

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        active = (state.outputs.detach().sum(0) > 0).float()
        return active if working_results is None else working_results + active

    def finalise_result(self, name: str, result: Tensor) -> dict[str, Any]:
        total = result.sum()
        return {"dead_count": result.numel() - total, "numel": result.numel(), "sum": total}


# Running statistics.


class Variance:
    """Mean and variance of all rows of the tensors that `add` is given."""

    _kind: Callable[[], Any] = streaming.Moments

    def __init__(self) -> None:
        self._found = type(self)._kind()

    def add(self, a: Tensor) -> None:
        self._found.update(a)

    def size(self) -> int:
        return int(self._found.count)

    def mean(self) -> Any:
        return self._found.mean

    def variance(self, unbiased: bool = True) -> Any:
        return self._found.variance(int(unbiased))

    def stdev(self, unbiased: bool = True) -> Any:
        return self.variance(unbiased).sqrt()


Mean = Variance


class Covariance(Variance):
    """The covariance of the units of all rows, (units, units)."""

    _kind = streaming.Covariance

    def covariance(self, unbiased: bool = True) -> Any:
        return self._found.comoment / (self.size() - unbiased)

    def variance(self, unbiased: bool = True) -> Any:
        return self.covariance(unbiased).diagonal()

    def correlation(self, unbiased: bool = True) -> Any:
        away = self.stdev(unbiased)
        return self.covariance(unbiased) / away[:, None] / away


class CrossIoU:
    """The IoU of the units of two series of binary rows, of shape (units of a, units of b)."""

    def __init__(self) -> None:
        self._sums: list[Any] = [0.0, 0.0, 0.0]
        self.count: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        if a.dim() != 2 or b.dim() != 2 or len(a) != len(b):
            raise InputError(f"as many rows of both are needed, not {a.shape} and {b.shape}")
        a, b = a.detach().float(), b.detach().float()
        more = a.T @ b, a.sum(0)[:, None], b.sum(0)
        self._sums = [old + new for old, new in zip(self._sums, more, strict=True)]
        self.count += len(a)

    def size(self) -> int:
        return self.count

    def intersection(self) -> Any:
        return self._sums[0]

    def union(self) -> Any:
        return self._sums[1] + self._sums[2] - self._sums[0]

    def iou(self) -> Any:
        return self.intersection() / (self.union() + 1e-20)


class IoU(CrossIoU):
    """The IoU of each two units of binary rows, of shape (units, units)."""

    def add(self, a: Tensor, b: Tensor | None = None) -> None:
        super().add(a, a if b is None else b)


class History:
    """All rows."""

    def __init__(self, data: Tensor | None = None) -> None:
        self._rows: list[Tensor] = [] if data is None else [data]

    def add(self, d: Tensor) -> None:
        self._rows.append(d)

    def history(self) -> Tensor | None:
        self._rows = [torch.cat(self._rows)] if self._rows else []
        return self._rows[0] if self._rows else None


class FeatureStatistics(Analyser[tuple[Variance, ...]]):
    """Mean and variance of each unit, of each channel's mean, and of the share of active units."""

    names = ("channel_sparsity", "channel_activations", "feature_activations")

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        found = working_results or tuple(Variance() for _ in self.names)
        units = state.outputs.detach()
        flat = units.reshape(len(units), 1, -1)
        active = flat.count_nonzero(-1) / flat.shape[-1]
        for one, rows in zip(found, (active, flat.mean(-1), units), strict=True):
            one.add(rows)
        return found

    def finalise_result(self, name: str, result: Any) -> dict[str, Tensor]:
        every = list(zip(self.names, result, strict=True))
        means = {f"{what}_mean": one.mean() for what, one in every}
        return means | {f"{what}_var": one.variance() for what, one in every}


class GradientAccumulationAnalyser(Analyser[Variance]):
    """Mean and variance of the gradients of each channel of images: `mean` and `var`."""

    def __init__(self) -> None:
        super().__init__(gradient=True)

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        found = working_results or Variance()
        found.add(state.output_gradients.mean((-2, -1)))
        return found

    def finalise_result(self, name: str, result: Variance) -> dict[str, Tensor]:
        return {"var": result.variance(), "mean": result.mean()}


class RankAnalyser(Analyser[Covariance]):
    """The rank of the covariance of units, of at most `n` of them, which are drawn once.

    `mode` has no effect, as in TorchWatcher.
    """

    def __init__(self, mode: str = "aTa", n: int = 8000, threshold: float = 1e-3) -> None:
        super().__init__()
        self.mode: str = mode
        self.n: int = n
        self.threshold: float = threshold
        self.indices: dict[str, Tensor] = {}
        self.features_dim: dict[str, int] = {}

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        rows = state.outputs.detach().flatten(1)
        if name not in self.indices:
            generator = torch.Generator().manual_seed(0)  # the model's own numbers stay
            self.features_dim[name] = rows.shape[1]
            self.indices[name] = torch.randperm(rows.shape[1], generator=generator)[: self.n]
        found = working_results or Covariance()
        found.add(rows[:, self.indices[name].to(rows.device)])
        return found

    def finalise_result(self, name: str, result: Any) -> Any:
        matrix, units = result.covariance(), self.features_dim[name]
        rank = torch.linalg.matrix_rank(matrix, hermitian=True, rtol=self.threshold).item()
        share = rank / min(units, self.n)
        return {"features_rank": rank, "features_dim": units, "normalized_features_rank": share}


class CovarianceSpectrumStatisticsAnalyser(RankAnalyser):
    """The spectrum of the covariance of units: its `mean` and `max`, ranks, and `taps` of it."""

    def __init__(self, n: int = 8000, threshold: float = 1e-3, taps: int = 10) -> None:
        super().__init__("aTa", n, threshold)
        self.taps: int = taps

    def finalise_result(self, name: str, result: Any) -> Any:
        found = torch.linalg.svdvals(result.covariance())
        ranks = super().finalise_result(name, result)
        last = int((found > found.max() * self.threshold).sum()) - 1
        at = {"features_rank_val": last, "half_rank_val": last // 2, "quarter_rank_val": last // 4}
        at |= {f"normalised_spectrum_{i}": i * len(found) // self.taps for i in range(self.taps)}
        values = {key: found[number].item() for key, number in at.items()}
        return {"mean": found.mean().item(), "max": found[0].item()} | ranks | values


class LayerWeightRankAnalyser(RankAnalyser):
    """The rank of the weight of each module."""

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        weight = getattr(state.module, "weight", None)
        if working_results is not None or weight is None:
            return working_results
        return torch.linalg.matrix_rank(weight.detach().flatten(1), rtol=self.threshold).item()

    def finalise_result(self, name: str, result: Any) -> Any:
        return result


# Probes, and evaluation in a loop of training.


class LinearProbe(Analyser[Any]):
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
        probes: the probes, by the name of the node with "_probe" after it: "1_probe".
        optimisers: their optimizers, by the name of the node.

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
        >>> _ = probe.eval(), watched(torch.ones(4, 2))
        >>> sorted(probe.to_dict()["1"])
        ['acc', 'loss']
    """

    def __init__(
        self,
        num_classes: int,
        partial_optim: Callable[[Any], Optimizer] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.num_classes: int = num_classes
        self.partial_optim: Callable[[Any], Optimizer] = partial_optim or torch.optim.Adam
        self.criterion: Callable[[Tensor, Tensor], Tensor] | None = criterion
        self.probes: Any = nn.ModuleDict()
        self.optimisers: dict[str, Optimizer] = {}

    def process_batch_state(self, name: str, state: AnalyserState, working_results: Any) -> Any:
        if not isinstance(state.outputs, Tensor) or state.outputs.dim() == 0:
            raise InputError(f"a linear probe at {name!r} needs a batch, not {type(state.outputs)}")
        key = f"{name.replace('.', '_')}_probe"
        with torch.inference_mode(False), torch.enable_grad():
            rows = state.outputs.detach().flatten(1).clone()
            if key not in self.probes:
                self.probes[key] = nn.Linear(rows.shape[1], self.num_classes).to(rows)
                self.optimisers[name] = self.partial_optim(self.probes[key].parameters())
            predicted = self.probes[key](rows)
        if self.training:
            return predicted
        predicted, targets, count = predicted.detach(), state.targets, len(predicted)
        loss = float("nan") if self.criterion is None else float(self.criterion(predicted, targets))
        is_binary = targets.is_floating_point()
        right = (predicted > 0) == (targets > 0.5) if is_binary else predicted.argmax(1) == targets
        sums = working_results if isinstance(working_results, list) else [0.0, 0.0, 0.0]
        more = right.float().mean().item() * count, loss * count, count
        return [old + new for old, new in zip(sums, more, strict=True)]

    def finalise_result(self, name: str, result: Any) -> Any:
        if isinstance(result, Tensor):
            return result.detach()
        right, loss, count = result
        return {"acc": right / count, "loss": loss / count}

    def train_step(self) -> None:
        """Make a step with each probe that the last call of the model reached.

        Raises:
            InputError: there is no criterion, or there are no targets.
        """
        if self.criterion is None:
            raise InputError("train_step needs a criterion")
        targets = self.targets
        with torch.inference_mode(False), torch.enable_grad():
            for name, predicted in self.working_results.items():
                self.optimisers[name].zero_grad()
                self.criterion(predicted, targets).backward(retain_graph=True)
                self.optimisers[name].step()
        self.working_results = {k: found.detach() for k, found in self.working_results.items()}


class AnalyserEvaluation:
    """Evaluates an analyser over a loader, on a model that is being trained.

    Args:
        analyser: the analyser, which is inserted in the model.
        loader: yields batches.
        prepare_inputs: a function of a batch and the device, which returns the inputs of the model;
            by default the first item of the batch.
        compute_gradients: whether calls compute gradients, for a `backward`.
        backward: a function of the outputs and the batch; it may return a loss.
        records: a list to add the records to.

    Raises:
        InputError: there is a `backward` without `compute_gradients`.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> names = tw.NameAnalyser()
        >>> watched = tw.interject_by_match(torch.nn.Sequential(torch.nn.Linear(1, 1)), "0", names)
        >>> evaluation = tw.AnalyserEvaluation(names, [torch.ones(2, 1)])
        >>> evaluation.record({"model": watched}, event="batch", global_step=3)["result"]
        {'0': '0'}
    """

    def __init__(
        self,
        analyser: Any,
        loader: Iterable[Any],
        *,
        prepare_inputs: Callable[[Any, torch.device], Any] | None = None,
        compute_gradients: bool = False,
        backward: Callable[[Any, Any], Any] | None = None,
        records: list[dict[str, Any]] | None = None,
    ) -> None:
        if backward is not None and not compute_gradients:
            raise InputError("a backward needs compute_gradients=True")
        self.analyser: Any = analyser
        self.loader: Iterable[Any] = loader
        self.prepare_inputs: Callable[[Any, torch.device], Any] = prepare_inputs or _first_input
        self.compute_gradients: bool = compute_gradients
        self.backward: Callable[[Any, Any], Any] | None = backward
        self.records: list[dict[str, Any]] = [] if records is None else records

    def record(
        self, state: dict[Any, Any], *, event: str, global_step: int | None = None
    ) -> dict[str, Any]:
        """Evaluate the analyser, and leave the model, its mode and its gradients as they were.

        Args:
            state: the state of a Torchbearer trial, or `{"model": model}`.
            event: "start", "batch" or "end".
            global_step: how many steps of training there were.
        """
        model, analyser = state["model"], self.analyser
        mode, was_enabled = model.training, analyser.enabled
        gradients = [(one, one.grad) for one in model.parameters()]
        device = next((one.device for one, _ in gradients), torch.device("cpu"))
        analyser.reset()
        analyser.enabled = True
        model.eval()
        try:
            for batch in self.loader:
                for one, _ in gradients if self.compute_gradients else ():
                    one.grad = None
                with torch.set_grad_enabled(self.compute_gradients):
                    inputs = self.prepare_inputs(batch, device)
                    args = inputs if isinstance(inputs, tuple) else (inputs,)
                    outputs = model(**inputs) if isinstance(inputs, dict) else model(*args)
                    loss = None if self.backward is None else self.backward(outputs, batch)
                    if isinstance(loss, Tensor):
                        loss.backward()
            result = analyser.to_dict()
        finally:
            for one, gradient in gradients:
                one.grad = gradient
            analyser.enabled = was_enabled
            model.train(mode)
        epoch = 0 if event == "start" else state.get("epoch", 0) + 1
        number = {"start": 0, "end": None}.get(event, state.get("t", 0) + 1)
        made = {"event": event, "epoch": epoch, "batch": number, "global_step": global_step}
        self.records.append(made | {"result": result})
        return self.records[-1]


def _first_input(batch: Any, device: torch.device) -> Any:
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    return pytree.tree_map_only(Tensor, lambda one: one.to(device), inputs)
