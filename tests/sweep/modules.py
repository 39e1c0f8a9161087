"""The modules of torch's own tests, with what they are made from and called with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import bendtrace as bt
from tests.sweep import Sample, Served, copied, seed_all, serve, untouched_torch

with untouched_torch():
    from torch.testing._internal.common_modules import module_db

MODULES = {info.name: info for info in module_db}

# They are given random samples in double precision, and then take no other input.
_DOUBLE = ("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d")


def _inputs(info: Any, seed: int, *, training: bool) -> list[Any]:
    seed_all(seed)
    dtype = torch.float64 if info.name in _DOUBLE else torch.float32
    return [
        given
        for given in info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=training, training=training
        )
        if given.forward_input is not None
    ]


def _made(info: Any, given: Any, *, training: bool) -> nn.Module:
    seed_all(0)
    args, kwargs = copied((given.constructor_input.args, given.constructor_input.kwargs))
    module: nn.Module = info.module_cls(*args, **kwargs)
    return module.train(training)


def sweep(name: str, *, training: bool, limit: int | None = None) -> Iterator[tuple[str, Served]]:
    """Call a module in all the ways it is tested, or some of them spread evenly."""
    info = MODULES[name]
    drawn = _inputs(info, 0, training=training)
    others = _inputs(info, 1, training=training)
    step = (len(drawn) - 1) / ((limit or len(drawn)) - 1 or 1)
    for number in sorted({round(n * step) for n in range(min(limit or len(drawn), len(drawn)))}):
        given, other = drawn[number], others[number]
        sample, twin = (
            Sample(tuple(one.forward_input.args), dict(one.forward_input.kwargs))
            for one in (given, other)
        )
        eager = _made(info, given, training=training)
        bended = bt.BendedModule(_made(info, given, training=training))
        label = f"{number} {given.desc}"
        yield label, serve(bended, eager, sample, twin, gradients=training)
