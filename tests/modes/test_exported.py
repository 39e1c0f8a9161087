"""Each program exported from each of its calls: the same bits, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

import bendtrace as bt
from bendtrace.debug.calls import Call
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def plain(value: Any) -> Any:
    """Return an output as programs return it: without classes of containers, numbers as such."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.ndim == 0 else value.detach()


def exported(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tree_map(copied, (args, kwargs))
        with torch.no_grad():
            program = bt.BendedModule(model).export(Call(*given))
            return plain(program(*args, **kwargs))

    return call


def copied(value: Any) -> Any:
    return copy.deepcopy(value.detach() if type(value) is torch.Tensor else value)


def without_gradients(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return plain(model(*args, **kwargs))

    return call


# Texts of torch's that say neither which line of the model it is, nor what to do.
RAW = r"^(?!torch\.export refuses it|with input \d+, the program raises (invalid|name ))"


@each(share=60, start=7)
def test_what_is_exported_gives_what_eager_gives(program: Program) -> None:
    compare(program, "exported", exported, without_gradients, refusal=RAW, strict="none")
