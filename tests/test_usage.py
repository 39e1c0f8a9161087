"""What becomes of a traced bool: code that only tests it gets one, other code the real thing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bendtrace as bt
from bendtrace.python.bytecode import only_tests
from tests.promise import assert_promise, randn_inputs


def _argument(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=x.shape[0] > 3)


def _variable(x: torch.Tensor) -> torch.Tensor:
    keep = x.shape[0] > 3
    x = x + 1 if keep else x - 1
    return x.sum(0, keepdim=keep)


def _conjunction(x: torch.Tensor) -> torch.Tensor:
    causal = x.shape[0] > 3 and x.dim() == 2
    return x.sum(0, keepdim=causal)


def _disjunction_of_values(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=(x.mean() > 0).item() or x.shape[0] < 4)


def _chain(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=2 < x.shape[0] < 5)


def _is_long(x: torch.Tensor) -> bool:
    return x.shape[0] > 3


def _returned(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=_is_long(x))


def _kept_in_a_dict(x: torch.Tensor) -> torch.Tensor:
    options = {"keepdim": x.shape[0] > 3}
    return x.sum(0, **options)


def _in_a_list(x: torch.Tensor) -> torch.Tensor:
    keep = [n > 3 for n in x.shape]
    return x.sum(0, keepdim=keep[0]) if any(keep) else x.sum(1, keepdim=keep.pop())


def _of_a_generator(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=next(n > 3 for n in x.shape))


def _of_a_listed_generator(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=tuple(n > 3 for n in x.shape)[0:1][0])


@pytest.mark.parametrize(
    "function",
    [
        _argument,
        _variable,
        _conjunction,
        _disjunction_of_values,
        _chain,
        _returned,
        _kept_in_a_dict,
        _in_a_list,
        _of_a_generator,
        _of_a_listed_generator,
    ],
)
def test_a_traced_bool_reaches_torch_as_a_real_one(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    calls = [randn_inputs(n, 2, seed=seed) for seed, n in enumerate((3, 5, 3, 5, 4, 2, 4))]
    assert assert_promise(lambda: function, calls).stats.replays >= 2


@pytest.mark.parametrize("name", ["any", "all", "sum", "len"])
def test_a_function_by_the_name_of_a_builtin_may_do_anything(name: str) -> None:
    answers: list[bool] = []

    def flags() -> list[bool]:
        answers.append(only_tests(sys._getframe(1), 1))
        return [True]

    for others in ({}, {name: lambda flags: flags[0]}):
        space: dict[str, Any] = {"flags": flags, **others}
        exec(f"def code(): return {name}(flags())", space)
        space["code"]()
    assert answers == [True, False]


def test_a_bool_that_is_only_tested_is_a_branch_where_it_is_tested() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        long = x.shape[0] > 3 and x.dim() == 2
        if _is_long(x):
            x = x + 1
        return -x if long else x

    trace = bt.trace(branches, torch.ones(4, 2))
    assert [(step.kind, step.text) for step in trace.flow_steps if step.guard is not None] == [
        ("and", "x.shape[0] > 3"),
        ("if", "_is_long(x)"),
    ]
