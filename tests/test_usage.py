"""What becomes of a traced bool: code that only tests it gets one, other code the real thing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import bendtrace as bt
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
    ],
)
def test_a_traced_bool_reaches_torch_as_a_real_one(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    calls = [randn_inputs(n, 2, seed=seed) for seed, n in enumerate((3, 5, 3, 5, 4, 2, 4))]
    assert assert_promise(lambda: function, calls).stats.replays >= 2


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
