"""What the sweep over all models found, each in its smallest form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import assert_promise, randn_inputs


def with_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that asks for the signature once, as `select_hidden_states` of transformers."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        kwargs["scale"] = arguments.arguments["scale"] + 1
        return function(self, *args, **kwargs)

    return wrapper


class Bound(nn.Module):
    @with_defaults
    def forward(self, x: Tensor, scale: int = 2) -> Tensor:
        return torch.tanh(x) * scale


def test_a_signature_in_a_closure_is_replayed() -> None:
    calls = [randn_inputs(2, 3, seed=seed) for seed in range(3)]
    bended = assert_promise(Bound, calls)
    assert bended.why_live == ()
    assert bended.stats.replays == 2


SHARED = [1.0]
SIGNATURE = inspect.Signature(
    [inspect.Parameter("shifts", inspect.Parameter.KEYWORD_ONLY, default=SHARED)]
)


def bound() -> Callable[[Tensor], Tensor]:
    signature = SIGNATURE

    def shifted(x: Tensor) -> Tensor:
        arguments = signature.bind()
        arguments.apply_defaults()
        return x * 3 + sum(arguments.arguments["shifts"])

    return shifted


def test_what_the_defaults_of_a_signature_hold_is_watched() -> None:
    model, x = bound(), torch.ones(2)
    bended = bt.BendedModule(model)
    try:
        for values in ([1.0], [1.0], [5.0], [5.0, 2.0], [1.0]):
            SHARED[:] = values
            assert torch.equal(bended(x), model(x))
            assert torch.equal(model(x), 3 + torch.full((2,), sum(values)))
    finally:
        SHARED[:] = [1.0]


def both(*functions: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As the masks of transformers are put together."""

    def inner(i: Tensor, j: Tensor) -> Tensor:
        result = i.new_ones((), dtype=torch.bool)
        for function in functions:
            result = result & function(i, j)
        return result

    return inner


class Masked(nn.Module):
    """A function that was mapped is given to be mapped once more."""

    def forward(self, x: Tensor) -> Tensor:
        padding = x.sum(-1) > 0
        allowed = both(lambda i, j: i >= j, lambda i, j: padding[j])
        places = torch.arange(x.shape[0])
        mask = torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(places, places)
        return mask @ x.relu() if x.dtype is torch.bool else mask.float() @ x


def test_a_function_mapped_twice_is_replayed() -> None:
    calls = [randn_inputs(size, 3, seed=seed) for seed, size in enumerate((4, 4, 6, 4))]
    bended = assert_promise(Masked, calls)
    assert bended.why_live == ()
    assert bended.stats.replays >= 2
    assert bended.stats.live == 0


class Wrapping(nn.Module):
    """Gives out a function that `functools.wraps` has marked."""

    def forward(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        shift = x.mean()

        def moved(y: Tensor) -> Tensor:
            return y + shift

        @functools.wraps(moved)
        def twice(y: Tensor) -> Tensor:
            return moved(moved(y))

        return twice


def test_a_wrapped_function_that_is_given_out_is_made_anew() -> None:
    bended = bt.BendedModule(Wrapping())
    for number in range(3):
        given = bended(torch.full((2,), float(number)))
        assert torch.equal(given(torch.zeros(1)), torch.tensor([2.0 * number]))
        assert torch.equal(given.__wrapped__(torch.zeros(1)), torch.tensor([1.0 * number]))
    assert bended.stats.replays == 2
