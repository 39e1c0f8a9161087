"""Each program after calls that ended in the middle: an argument raises when it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import bendtrace as bt
from tests.registry.comparing import compare, each
from tests.registry.program import Program


class Raising(Tensor):
    """A tensor that raises when an op of torch receives it for the second time."""

    uses: float = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__":  # a replay asks for sizes before it begins
            cls.uses += 1
            if cls.uses > 1:
                raise ArithmeticError("used twice")
        return super().__torch_function__(func, types, args, kwargs or {})


def interrupted(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes each call twice, first with arguments that raise."""

    def raising(value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and not value.requires_grad:
            return value.clone().as_subclass(Raising)
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        first = tree_map(raising, (args, kwargs))
        Raising.uses = 0
        try:
            called(*first[0], **first[1])
        except ArithmeticError:
            pass
        finally:
            Raising.uses = -math.inf  # a model may keep one of them
        return called(*args, **kwargs)

    return call


@each("corpus", "single", share=6)
def test_the_next_call_gives_what_eager_gives(program: Program) -> None:
    compare(
        program, "after an exception", lambda model: interrupted(bt.BendedModule(model)),
        interrupted,
    )  # fmt: skip
