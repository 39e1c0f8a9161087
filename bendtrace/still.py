"""Running a model, and leaving it and the random generators as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["Still"]


class Still:
    """Puts the random generators and the buffers of a model back, as often as is asked for.

    Also a context manager, at whose end they are as they were at its beginning. Attributes that a
    model's forward assigns in Python are not looked after.

    Args:
        model: what is run.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with Still(model):
        ...     _ = model(torch.rand(3, 2))
        >>> int(model.num_batches_tracked)
        0
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in (model.modules() if isinstance(model, nn.Module) else ())
            for name, buffer in module._buffers.items()
        ]
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def rewind(self) -> None:
        """Put them back."""
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        for module, name, buffer, before in self._buffers:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if buffer is None or before is None or buffer.is_meta or _alike(buffer, before):
                continue
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.rewind()


def _alike(one: Tensor, other: Tensor) -> bool:
    # Not going by versions: torch counts none for the statistics of a batch norm.
    return one.shape == other.shape and bool(
        torch.equal(one, other) or ((one == other) | (one.isnan() & other.isnan())).all()
    )
