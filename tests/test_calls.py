"""The inputs of one call are a tuple and a dict, or refused where they are handed over."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.insert import activations, resume_point

Call = bt.workflows.Call
Pair = namedtuple("Pair", "a b")
X = torch.ones(1, 3)
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def bended() -> Any:
    made = bt.BendedModule(model)
    made(X)
    return made


DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "Call": Call,
    "get_activations": lambda args, kwargs: bended().get_activations(
        "sub_0", args=args, kwargs=kwargs
    ),
    "the function": lambda args, kwargs: activations.get_activations(
        bended(), "sub_0", args, kwargs
    ),
    "from_activations": lambda args, kwargs: resume_point.from_activations(
        bended(), {"sub_0": X}, args, kwargs
    ),
}  # fmt: skip
ARGS = [X, X[0], "text", b"bytes", {"x": X}, 3, X.shape, Pair(X, X), iter([X]), {X}]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("args", ARGS, ids=lambda args: type(args).__name__)
def test_what_is_no_tuple_is_refused(door: str, args: Any) -> None:
    with pytest.raises(bt.errors.InputError, match=rf"not a {type(args).__name__}; for a single"):
        DOORS[door](args, {})


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kwargs", [X, [X], "text", {1: X}], ids=str)
def test_what_is_no_dict_of_names_is_refused(door: str, kwargs: Any) -> None:
    with pytest.raises(bt.errors.InputError, match="keyword arguments"):
        DOORS[door]((X,), kwargs)


def test_tuples_and_lists_are_taken() -> None:
    for call in (Call((X,)), Call([X]), Call((), {"input": X}), Call.of(X), Call.of([X])):
        assert torch.equal(call.to(model), model(X))
        assert torch.equal(bt.workflows.run_with_cache(model, call)[0], model(X))
    assert Call() == Call((), {})
    assert Call.of(Pair(X, X)).args == (Pair(X, X),)


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y if y.sum() > 5 else x - y


PAIR = ((X,), {"y": X})


@pytest.mark.parametrize("inputs", [PAIR, [X, X], (X, X), {"x": X, "y": X}, Call(*PAIR)])
def test_inputs_are_read_alike_where_they_are_called_explored_and_exported(inputs: Any) -> None:
    assert Call.of(inputs).to(added).equal(added(X, X))
    bended = bt.BendedModule(added)
    found = bended.explore([inputs], {"y": (0.0, 10.0)}, tries=1)
    assert (found.runs, len(found.not_found)) == (1, 1)
    assert Call.of(inputs).to(bended.export(inputs)).equal(added(X, X))


def test_a_pair_is_one_argument_where_a_call_says_so() -> None:
    assert Call((PAIR,)).args == (PAIR,)
    assert Call.of(((X,), {1: X})).args == ((X,), {1: X})
    assert Call.of([(X,), {"y": X}]).args == ((X,), {"y": X})
