"""Callbacks that keep the values they see, and use them later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import BendError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.bends.interpolation import checked_weights, mixed
from bendtrace.interject.bends.parameter import Expression, value_of
from bendtrace.interject.interjection import NodePass

__all__ = ["Capture", "InterpolationFromCapture"]


class Capture(Bend):
    """Keeps the outputs of nodes while it is capturing, and never changes them.

    Attributes:
        captured: for each node path, snapshots of its outputs, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> seen = bt.bends.Capture()
        >>> with seen.capture():
        ...     _ = seen(torch.ones(1, 2), "layer"), seen(torch.zeros(1, 2), "layer")
        >>> seen.captures["layer"]
        tensor([[1., 1.],
                [0., 0.]])
    """

    observes = True
    self_contained = True
    deferrable = True

    def __init__(self) -> None:
        self.captured: dict[str, list[Tensor]] = {}
        self._capturing = False

    @property
    def is_capturing(self) -> bool:
        """Whether it is capturing."""
        return self._capturing

    def capture(self) -> AbstractContextManager[Capture]:
        """Start capturing, until `stop` or the end of a `with` statement."""
        self._capturing = True
        return self._until_stopped()

    @contextmanager
    def _until_stopped(self) -> Iterator[Capture]:
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop capturing. Captured values stay."""
        self._capturing = False

    def reset(self) -> None:
        """Forget the captured values."""
        self.captured = {}

    @property
    def captures(self) -> dict[str, Tensor]:
        """For each node path, the values captured there, concatenated along the first dimension.

        Raises:
            BendError: the outputs of a node cannot be concatenated; `captured` has them one by one.
        """
        return {path: _joined(kept, path) for path, kept in self.captured.items()}

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor itself."""
        if self._capturing:
            # Tensors made in inference mode could never be part of a backward pass.
            with torch.inference_mode(False), torch.no_grad():
                self.captured.setdefault(at.path, []).append(tensor.detach().clone())
        return tensor


class InterpolationFromCapture(Capture):
    """Replaces the output of a node by mixtures of the values captured there.

    While it captures, it changes nothing.

    Args:
        weights: a tensor, or a parameter that holds one: a weight for each captured example, or one
            row of weights per mixture. None uses the output of the node as the weights, so that
            they can be passed in as an activation.
        softmax: whether to take the softmax of each row of weights.

    Raises:
        InputError: the weights are neither a tensor nor a parameter.

    Example:
        >>> import torch, bendtrace as bt
        >>> mix = bt.bends.InterpolationFromCapture(torch.tensor([0.5, 0.5]), softmax=False)
        >>> with mix.capture():
        ...     _ = mix(torch.tensor([[2.0], [4.0]]))
        >>> mix(torch.tensor([[9.0]]))
        tensor([[3.]])
    """

    observes = False

    def __init__(self, weights: Tensor | Expression | None = None, softmax: bool = True) -> None:
        super().__init__()
        self.weights: Any = checked_weights(weights)
        self.softmax = softmax

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return a mixture of the captured tensors."""
        if self._capturing:
            return super().bend(tensor, at)
        kept = self.captured.get(at.path)
        if kept is None:
            raise BendError(
                f"{self!r} has captured nothing at {at.path!r}: first run the model within "
                "`with callback.capture():`",
                at.path,
            )
        examples = _joined(kept, at.path).to(tensor)
        weights = tensor if self.weights is None else value_of(self.weights)
        return mixed(examples, weights, self.softmax, self, at)


def _joined(kept: list[Tensor], path: str) -> Tensor:
    shapes = sorted({tuple(tensor.shape[1:]) for tensor in kept})
    if len(shapes) > 1:
        raise BendError(
            f"the values captured at {path!r} cannot be concatenated along the first "
            f"dimension: the other sizes are {' and '.join(map(str, shapes))}",
            path,
        )
    return torch.cat([tensor if tensor.dim() else tensor.reshape(1) for tensor in kept])
