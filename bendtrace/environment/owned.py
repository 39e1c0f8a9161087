"""Telling whether a tensor is one that a model holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bendtrace.tape.captured import Captured


class Owned:
    """Tells whether a tensor is one that the code of a model may compare others to.

    A guard on what an insertion returns: the code sees whether it is a tensor that the model
    holds, and Python reports no such test.

    Args:
        parts: what the model can read.
    """

    __name__ = "owned"

    def __init__(self, parts: Iterable[Captured]) -> None:
        # By their types: a proxy is no object that a weak reference can be made to.
        values: list[Any] = [part.value for part in parts if not part.is_argument]
        self._tensors = [weakref.ref(one) for one in values if issubclass(type(one), Tensor)]
        self._modules = [weakref.ref(one) for one in values if issubclass(type(one), nn.Module)]

    def __call__(self, tensor: Tensor, *others: Tensor) -> bool:
        """Return whether the model holds a tensor, or it is one of others."""
        return (
            any(one is tensor for one in others)
            or any(ref() is tensor for ref in self._tensors)
            or any(
                one is tensor
                for ref in self._modules
                if (module := ref()) is not None
                for held in (module._parameters, module._buffers, vars(module))
                for one in held.values()
            )
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owned)

    def __hash__(self) -> int:
        return hash(Owned)
