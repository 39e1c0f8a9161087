"""Running a model in the middle of something else, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bendtrace.still import Still

__all__ = ["untouched"]


@contextmanager
def untouched(model: Callable[..., Any], loader: Any = None) -> Iterator[None]:
    """Put back at the end what running a model over a loader may change.

    The training mode of each module; the buffers, and what is in them; the states of the random
    generators of Python, NumPy and torch, and of those that a data loader and its samplers have of
    their own. Attributes that the model's forward assigns in Python are not looked after.

    Args:
        model: what is run.
        loader: what it is run over.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with untouched(model):
        ...     _ = model.train()(torch.rand(3, 2))
        >>> int(model.num_batches_tracked)
        0
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [(module, module.training) for module in modules]
    generators = [(generator, generator.get_state()) for generator in _generators(loader)]
    with Still(model):
        try:
            yield
        finally:
            for generator, state in generators:
                generator.set_state(state)
            for module, mode in modes:
                module.training = mode


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators that a loader draws from, apart from the global ones."""
    holders = [loader]
    for name in ("sampler", "batch_sampler"):
        holder = getattr(loader, name, None)
        holders += [holder, getattr(holder, "sampler", None)]
    found = {id(made): made for made in (getattr(holder, "generator", None) for holder in holders)}
    return [made for made in found.values() if isinstance(made, torch.Generator)]
