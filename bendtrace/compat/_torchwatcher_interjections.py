"""TorchWatcher's interjections, and single executions of nodes by name."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from bendtrace.interject.gates import of_this_run
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.selectors.algebra import Selector
from bendtrace.paths.candidates import Candidate
from bendtrace.paths.nodes import identifier

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
        given = tuple(filter(_has_tensor, (*inputs, *inputs.kwargs.values())))
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


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor)


def _unpack(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# Single executions of nodes by name, as torchvision numbers the nodes of torch.fx's graphs: what is
# repeated in the code of one module has a number. `relu_1` is the second relu there, in another
# place of the source or in the second round of a loop.


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
    """Has an interjection called in one of several executions of nodes, under a name.

    Args:
        what: the interjection.
        name: the name.
        number: how many executions come before it in a call of the model.
    """

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
