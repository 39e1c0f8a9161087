"""Interjections that are modules, in TorchWatcher's vocabulary: `process`, `process_backward`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bendtrace.interject.interjection import Inputs, Interjection, NodePass

__all__ = [
    "ForwardInterjection",
    "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection",
]

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
    """Sees what a node gives, and may exchange it. Subclasses override `process`.

    One object can be inserted at many nodes, whose paths tell them apart. It is an `nn.Module`, and
    can have parameters, which are trained like any others and are no part of the model's state.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Doubled(bt.interjections.ForwardInterjection):
        ...     def process(self, name, module, inputs):
        ...         return inputs * 2
        >>> bended = bt.BendedModule(lambda x: x.relu() + 1)
        >>> handle = bended.interject("relu", Doubled())
        >>> bended(torch.ones(2))
        tensor([3., 3.])
    """

    @abstractmethod
    def process(self, name: str, module: nn.Module | None, inputs: Any) -> Any:
        """Called with what a node gave.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            inputs: what the node gave, as it is: a tensor, a tuple, a dict.

        Returns:
            What goes on in its place, of the same structure; None to keep it.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        self._meet(at)
        return self.process(at.path, at.module, output)


class WrappedForwardInterjection(_Module):
    """Sees what a node is given and what it gives, and may exchange the latter.

    Subclasses override `process`.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Residual(bt.interjections.WrappedForwardInterjection):
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
        """Called with what a node was given, and what it gave.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            inputs: the arguments that have a tensor in them, positional ones first. One by itself
                is given as it is, several as a tuple. A node that changes its input in place has
                done so.
            outputs: what the node gave, as it is.

        Returns:
            What goes on in the place of `outputs`, of the same structure; None to keep them.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call `process`."""
        self._meet(at)
        return self.process(at.path, at.module, _unpacked(_with_tensors(inputs)), output)


class WrappedForwardBackwardInterjection(_Module):
    """Sees the gradients that go through a node, and may exchange those of its inputs.

    Subclasses override `process_backward`, and `process` if they want what
    `WrappedForwardInterjection` sees as well.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Halved(bt.interjections.WrappedForwardBackwardInterjection):
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
            cls.wants_inputs = cls._overrides("after")

    @classmethod
    def _overrides(cls, name: str) -> bool:
        if name == "after" and cls.after is WrappedForwardBackwardInterjection.after:
            return cls.process is not WrappedForwardBackwardInterjection.process
        return super()._overrides(name)

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        """Called in the forward pass, as `WrappedForwardInterjection.process` is."""

    @abstractmethod
    def process_backward(
        self,
        name: str,
        module: nn.Module | None,
        grad_input: Tensor | tuple[Tensor | None, ...] | None,
        grad_output: Tensor | tuple[Tensor | None, ...] | None,
    ) -> Any:
        """Called in the backward pass with the gradients through this call of the node alone.

        What else becomes of a tensor does not count: where `x` is used twice, each use has a
        `grad_input` of its own.

        Args:
            name: path of the node.
            module: the module called; None for functions and methods.
            grad_input: gradients of the tensors that the node was given, in the order of the
                arguments, None where none arrives. That of one tensor is given as it is, those of
                several as a tuple.
            grad_output: gradients of the tensors that the node gave, likewise.

        Returns:
            What takes the place of `grad_input`, of the same shapes; None to keep it.
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
