"""Each program exported from each of its calls: the same bits, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

import bendtrace as bt
from bendtrace.calls import Call
from tests.registry.comparing import compare, each
from tests.registry.program import Program


def number_of(value: Any) -> Any:
    """Return the number that a tensor without dimensions is, as which programs return numbers."""
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def exported(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = copy.deepcopy((args, kwargs))
        with torch.no_grad():
            program = bt.BendedModule(copy.deepcopy(model)).export(Call(*given))
            return tree_map(number_of, program(*args, **kwargs))

    return call


def without_gradients(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return tree_map(number_of, model(*args, **kwargs))

    return call


@each("corpus", share=60, start=7)
def test_what_is_exported_gives_what_eager_gives(program: Program) -> None:
    compare(program, "exported", exported, without_gradients, refusal="", strict="none")
