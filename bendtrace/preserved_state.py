"""Preserved state: running a model, and restoring it and the random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bendtrace.torch_rules.owners import parts_of

__all__ = ["PreservedState"]


class PreservedState:
    """Restores the random generators and the buffers of a model, as often as it is asked to.

    Also a context manager, which restores them at its end. Attributes that a model's forward
    assigns in Python are not restored.

    Args:
        model: the model that is run.
        modes: whether to restore the training mode of each module as well.
        loader: a data loader that is run through; its random generators, and those of its
            samplers, are restored as well.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with PreservedState(model):
        ...     _ = model(torch.rand(3, 2))
        >>> int(model.num_batches_tracked)
        0
    """

    def __init__(
        self, model: Callable[..., Any], *, modes: bool = False, loader: Any = None
    ) -> None:
        modules = parts_of(model) if isinstance(model, nn.Module) else []
        self._modes = [(module, module.training) for module in modules] if modes else []
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        self._generators = [(made, made.get_state()) for made in _generators(loader)]
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def rewind(self) -> None:
        """Restore them."""
        for generator, state in self._generators:
            generator.set_state(state)
        for module, mode in self._modes:
            module.training = mode
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

    def __exit__(self, *error: object) -> None:
        self.rewind()


def _alike(one: Tensor, other: Tensor) -> bool:
    # Not going by versions: torch counts none for the statistics of a batch norm.
    return one.shape == other.shape and bool(
        torch.equal(one, other) or ((one == other) | (one.isnan() & other.isnan())).all()
    )


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators that a loader draws from, apart from the global ones."""
    holders = [loader]
    for name in ("sampler", "batch_sampler"):
        holder = getattr(loader, name, None)
        holders += [holder, getattr(holder, "sampler", None)]
    found = {id(made): made for made in (getattr(holder, "generator", None) for holder in holders)}
    return [made for made in found.values() if isinstance(made, torch.Generator)]
