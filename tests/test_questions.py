"""Code that asks for function modes receives the answers of eager, however it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function,
    has_torch_function_unary,
    has_torch_function_variadic,
)
from torch.utils.checkpoint import checkpoint

import bendtrace as bt

ask_otherwise = has_torch_function_unary
X = torch.ones(2)


class Kept:
    ask = staticmethod(has_torch_function)


def nested(x: Tensor) -> int:
    def inner(ask: Any = has_torch_function_variadic) -> Any:
        return [ask(x, x) for _ in range(2)]

    return sum(inner())


ASKING: dict[str, Callable[[Tensor], Any]] = {
    "imported": lambda x: has_torch_function((x,)),
    "imported, one": lambda x: has_torch_function_unary(x),
    "another name": lambda x: ask_otherwise(x),
    "attribute of a class": lambda x: Kept.ask((x,)),
    "default": nested,
    "by module": lambda x: torch.overrides.has_torch_function_unary(x),
    "of C": lambda x: torch._C._has_torch_function((x,)),  # type: ignore[attr-defined]
    "computed name": lambda x: getattr(torch.overrides, "has_torch_" + "function")((x,)),
    "nothing": lambda x: has_torch_function(()),
    "stack": lambda x: len(_get_current_function_mode_stack()),
    "stack, by module": lambda x: len(torch.overrides._get_current_function_mode_stack()),
    "innermost": lambda x: _get_current_function_mode() is not None,
    "length": lambda x: torch._C._len_torch_function_stack(),
    "enabled": lambda x: torch._C._is_torch_function_mode_enabled(),  # type: ignore[attr-defined]
    "in a list": lambda x: sum([has_torch_function_unary(x), has_torch_function_unary(x)]),
}  # fmt: skip


@pytest.mark.parametrize("how", ASKING)
def test_a_model_receives_the_answer_of_eager(how: str) -> None:
    ask = ASKING[how]

    def model(x: Tensor) -> Tensor:
        return (x + 1) * (2 + ask(x)) if x.sum() > 0 else x * (5 + ask(x))

    bended = bt.BendedModule(model)
    for x in (X, -X, X, -X):
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 0 or how in ("computed name",)
    assert torch.equal(bt.trace(model, X, save="all").output, model(X))
    with bended.interject("add", lambda value: value.clone()):
        for x in (X, -X):
            assert torch.equal(bended(x), model(x))


class Passes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ASKING)
def test_modes_around_the_call_and_in_it_are_seen(how: str) -> None:
    ask = ASKING[how]

    def model(x: Tensor) -> list[Any]:
        before = ask(x)
        with torch.device("cpu"), Passes():
            inside = ask(x)
        return [x + 1, before, inside, ask(x)]

    bended = bt.BendedModule(model)
    for _ in range(2):
        assert bended(X)[1:] == model(X)[1:]
    with Passes():
        wanted = model(X)[1:]
        for _ in range(2):
            assert bended(X)[1:] == wanted
    assert bended(X)[1:] == model(X)[1:]
    assert torch._C._len_torch_function_stack() == 0


class Counts(TorchFunctionMode):
    """Keeps the functions that it sees, and changes what one of them gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.zeros else out


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x))
        if y.sum() > 0 or x.shape[0] > 5:
            y = y.relu() * x.size(0)
        with torch.no_grad():
            n = int(y.argmax())
        y[0] = 1
        w = torch.zeros(2, dtype=y.dtype) + y.new_ones(2)
        w += 1
        return y.view(-1)[:2] * w + n + len(y)


def under_a_mode(call: Callable[[], Any]) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    with Counts() as mode:
        out = call()
    return mode.seen, out


def looks(value: Any) -> None:
    return None


@pytest.mark.parametrize("is_known", [False, True])
def test_a_mode_around_the_call_sees_what_it_sees_in_eager(is_known: bool) -> None:
    model, x = Layers(), torch.randn(3, 2)
    seen, out = under_a_mode(lambda: model(x))
    bended = bt.BendedModule(model)
    if is_known:
        bended(x), bended(x)
    call = {"x": x}
    for insert, run in (
        (None, lambda: bended(x)),
        ("linear", lambda: bended(x)),
        (lambda node: True, lambda: bended(x)),
        (None, lambda: bt.trace(model, x, save="all").output),
        (None, lambda: bt.workflows.run_with_cache(bended, call)[0]),
        (None, lambda: bended.get_activations("linear", kwargs=call, return_output=True)[1]),
    ):  # fmt: skip
        for change in (looks, lambda value: value):
            inserted = bended.interject(insert, change) if insert is not None else None
            ours, given = under_a_mode(run)
            if inserted is not None:
                inserted.remove()
            assert ours == seen
            assert torch.equal(given, out)
    assert bended.stats.replays == is_known
    assert any("Counts" in reason for reason in bended.why_live)
    for _ in range(2):
        assert torch.equal(under_a_mode(lambda: bended(x))[1], out)


def test_a_mode_that_was_left_is_forgotten() -> None:
    bended = bt.BendedModule(Layers().eval())
    x = torch.randn(3, 2)
    for _ in range(2):
        with Counts():
            bended(x)
        before = bended.stats.replays
        bended(x)
        bended(x)
        assert bended.stats.replays > before


class Own(Tensor):
    pass


def test_a_subclass_is_one_that_has_a_function() -> None:
    def model(x: Tensor) -> Tensor:
        return x * (2 if has_torch_function_unary(x) else 3)

    bended = bt.BendedModule(model)
    for x in (X, X.as_subclass(Own), X):
        assert torch.equal(bended(x), model(x))


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (
            2 + 10 * has_torch_function_unary(x) + 100 * torch.overrides.has_torch_function((x,))
        )


asks = Asks()


class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.relu(asks(x)) * (2 + len(_get_current_function_mode_stack()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize(
    "inside",
    [
        bt.opaque(lambda x: asks(x.exp().log())),
        lambda x: checkpoint(asks, x, use_reentrant=True),
        lambda x: checkpoint(asks, x, use_reentrant=False),
        Op.apply,
        lambda x: torch.func.vmap(asks)(x),
    ],
    ids=["opaque", "checkpoint", "not reentrant", "function", "vmap"],
)
def test_what_is_one_op_receives_the_answer_of_eager(inside: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    bended = bt.BendedModule(lambda x: inside(x) + asks(x))
    for _ in range(3):
        assert torch.equal(bended(x), inside(x) + asks(x))


def test_an_insertion_receives_the_answer_of_eager() -> None:
    bended = bt.BendedModule(lambda x: (x + 1 if x.sum() > 0 else x - 1).relu())
    for known in (False, True):
        with bended.interject("relu", lambda value: asks(value), allow_none=True):
            for x in (X, -X + 5 * known, X):
                assert torch.equal(bended(x), 2 * (x + 1 if x.sum() > 0 else x - 1).relu())


def test_the_answer_after_something_that_makes_the_call_live() -> None:
    def model(x: Tensor) -> Tensor:
        return asks(x + float((x * 2).numpy().tobytes()[0]))

    bended = bt.BendedModule(model)
    for _ in range(3):
        assert torch.equal(bended(X), model(X))


def test_an_error_of_a_question_leaves_the_modes_as_they_were() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            has_torch_function(3)  # type: ignore[arg-type]
        except TypeError:
            return x * 2 + has_torch_function_unary(x)
        return x

    bended = bt.BendedModule(model)
    for _ in range(2):
        assert torch.equal(bended(X), model(X))
    assert bended.stats.replays == 1


def test_a_function_that_hands_itself_to_the_modes_is_one_op() -> None:
    def model(x: Tensor) -> Tensor:
        return dispatching(x) + 1

    trace = bt.trace(model, X)
    assert [getattr(op.target, "__name__", "") for op in trace.ops][1] == "dispatching"
    assert torch.equal(trace.output, model(X))


def dispatching(x: Tensor) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(dispatching, (x,), x)  # type: ignore[no-any-return]
    return x * 3
