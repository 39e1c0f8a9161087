"""Rewriting: models with other modules, other ops, fewer ops, ops on an edge, spliced modules.

What is rewritten is compared bit by bit with a model that was cut by hand: outputs, gradients,
buffers and random numbers; live, replayed, and once it is taken back.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace import Interjection, node_selector
from bendtrace.errors import InputError, InterjectionError, NeverFiredWarning, NodePathError
from bendtrace.rewriting import (
    between,
    remove,
    replace,
    replace_module,
    replace_module_native,
    splice,
)
from tests.cut import Block, Cut, Cuts, Experts, Refine, assert_as_by_hand, batches, run
from tests.promise import bits, state

Insert = Callable[[bt.BendedModule], Any]


def other(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cut so that another function is called."""
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def through(position: int = 0) -> Callable[..., Any]:
    """Cut so that an input is given through."""
    return lambda _, *args, **kwargs: args[position]


class Linear(nn.Module):
    """A module with parameters that are always the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, size * size).view(size, size))

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        return x @ self.weight


# Replacing and removing ops

STATIC: dict[str, tuple[Insert, Cuts]] = {
    "another function": (
        lambda b: replace(b, "softmax", torch.log_softmax), {"softmax": other(torch.log_softmax)},
    ),
    "another method": (
        lambda b: replace(b, "relu", Tensor.sigmoid), {"relu": other(Tensor.sigmoid)},
    ),
    "a function of two": (
        lambda b: replace(b, "mul", torch.maximum), {"mul": other(torch.maximum)},
    ),
    "one's own function": (
        lambda b: replace(b, "mul", lambda x, y: x.sin() * y.cos() + torch.rand_like(x)),
        {"mul": other(lambda x, y: x.sin() * y.cos() + torch.rand_like(x))},
    ),
    "a module for a function": (
        lambda b: replace(b, "softmax", Linear(6)), {"softmax": other(Linear(6))},
    ),
    "a module for a module": (lambda b: replace(b, "norm", Linear(6)), {"norm": other(Linear(6))}),
    "a function for a module": (
        lambda b: replace(b, "drop", torch.sin), {"drop": other(torch.sin)},
    ),
    "no function": (lambda b: remove(b, "softmax"), {"softmax": through()}),
    "no method": (lambda b: remove(b, "relu"), {"relu": through()}),
    "no module": (lambda b: remove(b, "norm"), {"norm": through()}),
    "no residual": (lambda b: remove(b, "add", keep=1), {"add": through(1)}),
    "by what it is given": (
        lambda b: remove(b, "mul", keep=lambda inputs: inputs[0] + inputs[1]),
        {"mul": other(lambda x, y: x + y)},
    ),
    "by a selector": (
        lambda b: remove(b, node_selector.Dropout), {"drop": through()},
    ),
    "all of a kind": (
        lambda b: replace(b, node_selector.Activations.ReLU, F.silu), {"relu": other(F.silu)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_ops_of_a_static_model_are_replaced_as_if_by_hand(name: str) -> None:
    insert, cuts = STATIC[name]
    calls = [*batches(3, 4), *batches(5, 4, seeds=(3,))]
    assert_as_by_hand(Block, insert, cuts, calls)


DYNAMIC: dict[str, tuple[type[Cut], Insert, Cuts]] = {
    "experts: another path": (
        Experts, lambda b: replace(b, "softmax", F.softmin), {"softmax": other(F.softmin)},
    ),
    "experts: in each": (Experts, lambda b: replace(b, "gelu", F.relu), {"gelu": other(F.relu)}),
    "experts: one of them": (
        Experts, lambda b: replace(b, "experts_1", Linear(4)), {"expert 1": other(Linear(4))},
    ),
    "experts: none of it": (Experts, lambda b: remove(b, "gelu"), {"gelu": through()}),
    "experts: without one": (Experts, lambda b: remove(b, "experts_0"), {"expert 0": through()}),
    "loop: other steps": (
        Refine, lambda b: replace(b, "tanh", torch.sigmoid), {"tanh": other(torch.sigmoid)},
    ),
    "loop: no tanh": (Refine, lambda b: remove(b, "tanh"), {"tanh": through()}),
    "loop: the other exit": (
        Refine, lambda b: replace(b, "mul", lambda x, by: x * by - 9),
        {"mul": other(lambda x, by: x * by - 9)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_ops_of_a_dynamic_model_are_replaced_as_if_by_hand(name: str) -> None:
    make, insert, cuts = DYNAMIC[name]
    calls = batches(6, 4, seeds=(0, 1, 2, 3), scale=3.0)
    assert_as_by_hand(make, insert, cuts, calls)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("name", ["another function", "a module for a module", "no function"])
def test_also_without_gradients_and_under_autocast(name: str, mode: Any) -> None:
    insert, cuts = STATIC[name]
    assert_as_by_hand(Block, insert, cuts, batches(3, 4), mode=mode)


def five(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x.sin()
    return x


def test_some_passes_are_replaced_and_the_others_stay() -> None:
    def by_hand(x: Tensor) -> Tensor:
        for number in range(5):
            x = x.cos() if number in (0, 4) else x if number == 2 else x.sin()
        return x

    bended = bt.BendedModule(five)
    run(bended, five, batches(3)[0], 0)  # which pass is the last is known from a run
    first, second = (
        replace(bended, "sin", torch.cos, passes=[0, -1]),
        remove(bended, "sin", passes=2),
    )
    for x in batches(3):
        for _ in range(2):
            assert run(bended, five, x, 0) == run(by_hand, five, x, 0)
    first.remove(), second.remove()
    assert run(bended, five, x, 0) == run(five, five, x, 0)


def test_the_later_of_two_replacements_is_outside() -> None:
    class Twice(Interjection):
        def instead(self, at: Any, call: Any, inputs: Any) -> Any:
            return call(*inputs, **inputs.kwargs) * 2

    bended = bt.BendedModule(lambda x: x.sin())
    x = torch.linspace(0, 1, 3)
    replace(bended, "sin", torch.cos)
    bended.interject("sin", Twice())
    for _ in range(2):
        assert torch.equal(bended(x), x.cos() * 2)
    replace(bended, "sin", torch.exp)
    for _ in range(2):
        assert torch.equal(bended(x), x.exp())


def test_what_takes_a_modules_place_may_give_containers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Any:
            out, (hidden, cell) = self.rnn(x)
            return {"out": out, "last": hidden + cell}

    def fake(x: Tensor) -> Any:
        return x.sum(-1, keepdim=True), (x[-1:], x[:1] * 2)

    model, x = Model(), torch.randn(5, 3)
    bended = bt.BendedModule(model)
    with replace(bended, "rnn", fake):
        for _ in range(3):
            out = bended(x)
            assert torch.equal(out["out"], x.sum(-1, keepdim=True))
            assert torch.equal(out["last"], x[-1:] + x[:1] * 2)
    assert bits(bended(x)) == bits(model(x))


FICKLE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "a container": (lambda x: x, lambda x: (x, x)),
    "a longer one": (lambda x: (x, x), lambda x: (x, x, x)),
    "another kind": (lambda x: (x, x), lambda x: [x, x]),
    "other keys": (lambda x: {"a": x}, lambda x: {"b": x}),
    "nothing": (lambda x: x, lambda x: None),
    "a number": (lambda x: 2, lambda x: 3.0),
    "a number in a tuple": (lambda x: (x, 2), lambda x: (x, 3)),
    "a text": (lambda x: "one", lambda x: "two"),
    "a text in a tuple": (lambda x: (x, "one"), lambda x: (x, "two")),
    "None in a list": (lambda x: [x, None], lambda x: [x, x]),
}


@pytest.mark.parametrize("kind", FICKLE)
def test_a_replacement_may_change_its_mind_about_the_structure(kind: str) -> None:
    count = 0

    def fickle(x: Tensor) -> Any:
        nonlocal count
        count += 1
        return FICKLE[kind][count > 2](x)

    bended = bt.BendedModule(lambda x: x.relu())
    replace(bended, "relu", fickle)
    x = torch.ones(2)
    for call in range(5):
        assert bits(bended(x)) == bits(FICKLE[kind][call > 1](x))


def test_a_replacement_with_another_shape_takes_the_other_branch() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.relu()
        return h.sum() if h.shape[0] > 2 else h * 2

    bended = bt.BendedModule(model)
    x = torch.ones(4)
    assert torch.equal(bended(x), torch.tensor(4.0))
    with replace(bended, "relu", lambda value: value[:2]):
        for _ in range(2):
            assert torch.equal(bended(x), torch.full((2,), 2.0))
    assert torch.equal(bended(x), torch.tensor(4.0))


def test_an_input_that_is_no_tensor_is_not_given_through() -> None:
    bended = bt.BendedModule(lambda x: torch.cat([x, x]))
    with remove(bended, "cat"):
        for _ in range(2):
            with pytest.raises(InterjectionError, match="0: a list of 2; choose one with keep="):
                bended(torch.ones(2))
    with remove(bended, "cat", keep=lambda inputs: inputs[0][1]):
        for _ in range(2):
            assert torch.equal(bended(torch.ones(2)), torch.ones(2))
    with remove(bended, "cat", keep="dim"), pytest.raises(InterjectionError, match="is not there"):
        bended(torch.ones(2))


def test_an_input_that_is_given_by_name_is_given_through() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(condition=x > 0, input=self.act(input=x), other=x * 2)

    bended, x = bt.BendedModule(Model()), torch.tensor([-1.0, 2.0])
    with remove(bended, "act"), remove(bended, "where", keep="input"):
        for _ in range(2):
            assert torch.equal(bended(x), x)


def test_what_is_written_after_a_removal_is_written_to_the_input() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        g = h.relu()
        g.add_(1)
        return h + g

    def by_hand(x: Tensor) -> Tensor:
        h = x * 2
        h.add_(1)
        return h + h

    bended = bt.BendedModule(model)
    remove(bended, "relu")
    for x in batches(3):
        for _ in range(2):
            assert run(bended, model, x, 0) == run(by_hand, model, x, 0)


def test_in_place_functions_can_be_replaced_and_removed() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        h.mul_(3)
        h.relu_()
        return h

    bended = bt.BendedModule(model)
    x = torch.tensor([-1.0, 2.0])
    with remove(bended, "mul_"), replace(bended, "relu_", torch.neg_):
        for _ in range(2):
            assert torch.equal(bended(x), -2 * x)
    for _ in range(2):
        assert torch.equal(bended(x), model(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: replace(b, "relu", 3), "takes a function of the node's arguments"),
        (lambda b: replace(b, "relu", nn.GELU), "takes a function of the node's arguments"),
        (lambda b: remove(b, "relu", keep=1.5), "keep= has to be a position, a name or a function"),
        (
            lambda b: remove(b, "relu", keep=True),
            "keep= has to be a position, a name or a function",
        ),
        (lambda b: between(b, "relu", "mul", 3), "only an interjection, a function"),
        (lambda b: splice(b, "relu", 3), "takes a module, or a function of the value"),
        (lambda b: splice(b, "relu", nn.GELU), "takes a module, or a function of the value"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(call: Any, message: str) -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    with pytest.raises(InputError, match=message):
        call(bended)
    assert bended.insertions == ()


def test_nodes_that_are_not_there_are_named_with_near_misses() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    bended(torch.ones(2))
    for call in (
        lambda: replace(bended, "rellu", torch.sin), lambda: remove(bended, "rellu"),
        lambda: splice(bended, "rellu", torch.sin),
        lambda: between(bended, "rellu", "mul", torch.sin),
        lambda: between(bended, "mul", "rellu", torch.sin),
    ):  # fmt: skip
        with pytest.raises(NodePathError, match="relu"):
            call()
    assert bended.insertions == ()


# On an edge


def on_edge(edit: Callable[[Tensor], Tensor], position: int = 0) -> Callable[..., Any]:
    def cut(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        given[position] = edit(given[position])
        return function(*given, **kwargs)

    return cut


EDGES: dict[str, tuple[type[Cut], Insert, Cuts]] = {
    "between functions": (
        Block, lambda b: between(b, "softmax", "mul", torch.sin), {"mul": on_edge(torch.sin)},
    ),
    "the second input": (
        Block, lambda b: between(b, "drop", "mul", torch.sin), {"mul": on_edge(torch.sin, 1)},
    ),
    "from a module to a function": (
        Block, lambda b: between(b, "drop", "softmax", torch.sin),
        {"softmax": on_edge(torch.sin)},
    ),
    "from a function to a module": (
        Block, lambda b: between(b, "softplus", "norm", torch.sin), {"norm": on_edge(torch.sin)},
    ),
    "from the input": (
        Block, lambda b: between(b, "x", "add", torch.sin), {"add": on_edge(torch.sin)},
    ),
    "a module on it": (
        Block, lambda b: between(b, "softmax", "mul", Linear(6)), {"mul": on_edge(Linear(6))},
    ),
    "experts": (
        Experts, lambda b: between(b, re_gelu(), "gelu", torch.sin), {"gelu": on_edge(torch.sin)},
    ),
    "experts: the way that is taken": (
        Experts, lambda b: between(b, "index_add", "add", torch.sin), {"add": on_edge(torch.sin)},
    ),
    "loop": (Refine, lambda b: between(b, "tanh", "mul", torch.exp), {"mul": on_edge(torch.exp)}),
}  # fmt: skip


def re_gelu() -> list[str]:
    return ["experts_0", "experts_1", "experts_2"]


@pytest.mark.parametrize("name", EDGES)
def test_an_edge_is_cut_as_if_by_hand(name: str) -> None:
    make, insert, cuts = EDGES[name]
    calls = batches(6, 4, seeds=(0, 1, 2, 3), scale=3.0)
    assert_as_by_hand(make, insert, cuts, calls)


def test_other_users_of_a_value_see_nothing_of_it() -> None:
    def model(x: Tensor) -> Any:
        h = x.relu()
        return h * 10, h + 1, torch.add(h, h)

    x = torch.tensor([1.0, 2.0])
    wanted: dict[str, Any] = {
        "mul": (-h_(x) * 10, h_(x) + 1, h_(x) * 2),
        "add": (h_(x) * 10, -h_(x) + 1, h_(x) * 2),
        ".add_1": (h_(x) * 10, h_(x) + 1, -h_(x) * 2),
    }
    for end, value in wanted.items():
        bended = bt.BendedModule(model)
        with between(bended, "relu", end, torch.neg) as handle:
            for _ in range(3):
                assert bits(bended(x)) == bits(value)
        assert handle.applied == 3
        assert bits(bended(x)) == bits(model(x))


def h_(x: Tensor) -> Tensor:
    return x.relu()


def test_only_inputs_that_come_from_the_node_are_exchanged() -> None:
    def model(x: Tensor) -> Tensor:
        a, b = x.relu(), x.sin()
        return torch.cat([a, b, a[:1]]) + torch.stack((b, a)).sum()

    x = torch.tensor([1.0, 2.0])
    bended = bt.BendedModule(model)
    with between(bended, "relu", "cat", torch.zeros_like):
        wanted = torch.cat([x * 0, x.sin(), x[:1]]) + torch.stack((x.sin(), x)).sum()
        for _ in range(2):
            assert torch.equal(bended(x), wanted)
    with between(bended, "sin", "stack", torch.zeros_like):
        wanted = torch.cat([x, x.sin(), x[:1]]) + x.sum()
        for _ in range(2):
            assert torch.equal(bended(x), wanted)


def test_a_value_of_another_call_is_not_taken_for_one_of_this() -> None:
    def model(x: Tensor, again: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.relu()
        return again * 2

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    bended(x, x), bended(-x, x)
    handle = between(bended, "relu", "mul", torch.zeros_like)
    for _ in range(2):
        kept = bended(x, x)
        assert torch.equal(bended(-x, kept), kept * 2)
    assert handle.applied == 0


def test_what_was_written_to_on_the_way_comes_from_elsewhere() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.relu()
        h.add_(1)
        return h * 2

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    handle = between(bended, "relu", "mul", torch.zeros_like)
    for _ in range(2):
        assert torch.equal(bended(x), model(x))
    with pytest.warns(NeverFiredWarning, match="no output of 'relu' reached 'mul' unchanged"):
        handle.__exit__(None, None, None)
    with between(bended, "add_", "mul", torch.zeros_like):
        for _ in range(2):
            assert torch.equal(bended(x), x * 0)


def test_whatever_else_is_inserted_the_edge_is_found() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.relu()
        return h * 10 + h

    bended = bt.BendedModule(model)
    x = torch.ones(2)
    bended.interject("relu", lambda value: value + 1)
    handle = between(bended, "relu", "mul", lambda value: value + 100)
    bended.interject("relu", lambda value: value * 3)

    class Less(Interjection):
        def before(self, at: Any, inputs: Any) -> Any:
            return bt.Inputs((inputs[0] - 50, *inputs[1:]), inputs.kwargs)

    bended.interject("mul", Less())
    for _ in range(2):
        h = (x + 1) * 3
        assert torch.equal(bended(x), (h + 100 - 50) * 10 + h)
    assert handle.applied == 2
    with between(bended, "relu", "mul", lambda value: value + 1000):
        for _ in range(2):
            assert torch.equal(bended(x), (h + 1100 - 50) * 10 + h)


def test_values_in_containers_go_along_edges_too() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x.sin(), "b": (x.cos(), 3)}

    class Takes(nn.Module):
        def forward(self, *, pair: Any, x: Tensor) -> Tensor:
            return pair["a"] * pair["b"][0] + x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.takes = Two(), Takes()

        def forward(self, x: Tensor) -> Any:
            pair = self.two(x)
            return self.takes(pair=pair, x=x), pair["a"]

    x = torch.linspace(0, 1, 3)
    bended = bt.BendedModule(Model())
    with between(bended, "two", "takes", lambda value: value + 1) as handle:
        for _ in range(2):
            assert bits(bended(x)) == bits(((x.sin() + 1) * (x.cos() + 1) + x, x.sin()))
    assert handle.applied == 4
    with between(bended, "two.output|b|sub_0", "takes", lambda value: value + 1):
        for _ in range(2):
            assert bits(bended(x)) == bits((x.sin() * (x.cos() + 1) + x, x.sin()))


def test_an_edge_in_some_passes() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            h = x.sin()
            x = h * 2 + h
        return x

    def by_hand(x: Tensor) -> Tensor:
        for number in range(3):
            h = x.sin()
            x = (h * 0 if number == 1 else h * 2) + h
        return x

    bended = bt.BendedModule(model)
    between(bended, "sin", "mul", torch.zeros_like, passes=1)
    for x in batches(3):
        for _ in range(2):
            assert run(bended, model, x, 0) == run(by_hand, model, x, 0)


def test_an_edge_in_several_threads() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.relu()
        return h * 10 + h

    bended = bt.BendedModule(model)
    between(bended, "relu", "mul", torch.neg)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for x in batches(3, seeds=range(seed, seed + 30)):
            if not torch.equal(bended(x), -x.relu() * 10 + x.relu()):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_goes_on_an_edge_is_a_function_of_the_value() -> None:
    class Instead(Interjection):
        def instead(self, at: Any, call: Any, inputs: Any) -> Any:
            return inputs[0]

    class After(bt.compat.torchwatcher.ForwardInterjection):
        def process(self, name: str, module: Any, inputs: Any) -> Any:
            assert name == "mul"
            return inputs + 1

    bended = bt.BendedModule(lambda x: x.relu() * 2)
    with pytest.raises(InputError, match="works around a node, but between two nodes"):
        between(bended, "relu", "mul", Instead())
    with between(bended, "relu", "mul", After()):
        for _ in range(2):
            assert torch.equal(bended(torch.ones(2)), torch.full((2,), 4.0))
    with between(bended, "relu", "mul", lambda value: "text"):
        with pytest.raises(InterjectionError, match="expected a tensor, got 'text'"):
            bended(torch.ones(2))


def test_an_edge_says_what_it_is_and_leaves_with_its_handle() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    handle = between(bended, "relu", "mul", torch.neg)
    assert repr(handle) == "<neg between 'relu' and 'mul'>"
    assert handle.active
    bended(torch.ones(2))
    assert handle.report().fired == 1
    handle.remove(), handle.remove()
    assert not handle.active
    assert repr(handle) == "<neg between 'relu' and 'mul', removed>"
    assert bended.insertions == ()


# Spliced in


class Sparse(nn.Module):
    """A sparse autoencoder."""

    def __init__(self, size: int, as_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encode, self.decode = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.as_tuple = as_tuple

    def forward(self, x: Tensor) -> Any:
        features = F.relu(self.encode(x))
        made = self.decode(features)
        return (made, features) if self.as_tuple else made


def kept(module: nn.Module) -> Callable[..., Any]:
    """Cut so that gradients go by way of a module, and values stay."""

    def cut(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        made = module(value)
        out = made + (value - made).detach()
        torch.testing.assert_close(out, value)
        # Without the rounding of the line above.
        return _Exact.apply(made, value.detach())

    return cut


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def passed(module: nn.Module) -> Callable[..., Any]:
    return lambda function, *args, **kwargs: module(function(*args, **kwargs))


SPLICED: dict[str, tuple[type[Cut], str, Insert, Callable[[nn.Module], Any]]] = {
    "static": (Block, "softmax", lambda b: splice(b, "softmax", Sparse(6)), passed),
    "after a module": (Block, "down", lambda b: splice(b, "down", Sparse(4)), passed),
    "experts": (Experts, "gelu", lambda b: splice(b, "gelu", Sparse(4)), passed),
    "loop": (Refine, "tanh", lambda b: splice(b, "tanh", Sparse(4)), passed),
    "static, kept": (
        Block, "softmax", lambda b: splice(b, "softmax", Sparse(6), keep_error=True), kept,
    ),
    "experts, kept": (
        Experts, "gelu", lambda b: splice(b, "gelu", Sparse(4), keep_error=True), kept,
    ),
    "loop, kept": (
        Refine, "tanh", lambda b: splice(b, "tanh", Sparse(4), keep_error=True), kept,
    ),
    "a part of what it gives": (
        Block, "mul", lambda b: splice(b, "mul", Sparse(6, as_tuple=True), select=0), passed,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLICED)
def test_a_module_is_spliced_in_as_if_by_hand(name: str) -> None:
    make, where, insert, cut = SPLICED[name]
    size = 6 if make is Block and where != "down" else 4
    calls = batches(6, 4, scale=3.0)
    with torch.random.fork_rng():
        cuts = {where: cut(Sparse(size))}
    assert_as_by_hand(make, _seedless(insert), cuts, calls)


def _seedless(insert: Insert) -> Insert:
    def call(bended: bt.BendedModule) -> Any:
        with torch.random.fork_rng():
            return insert(bended)

    return call


@pytest.mark.parametrize("keep_error", [False, True])
def test_a_spliced_module_is_trained_as_it_would_be_by_hand(keep_error: bool) -> None:
    torch.manual_seed(0)
    model, sparse = Block().eval(), Sparse(6, as_tuple=True)
    hand, plain = copy.deepcopy(sparse), copy.deepcopy(model)
    results: list[Any] = []

    def cut(function: Any, *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        results.append((value, *hand(value)))
        made = results[-1][1]
        return _Exact.apply(made, value.detach()) if keep_error else made

    plain.cuts = {"relu": cut}
    bended = bt.BendedModule(model)
    ours = torch.optim.SGD(sparse.parameters(), 0.1)
    theirs = torch.optim.SGD(hand.parameters(), 0.1)
    with splice(bended, "relu", sparse, keep_error=keep_error, select=0) as handle:
        for x in batches(5, 4, seeds=range(6)):
            given, wanted = bended(x), plain(x)
            assert bits(given) == bits(wanted)
            value, made, features = results.pop()
            assert handle.error is not None
            assert bits(handle.error) == bits((value - made).detach())
            assert bits(handle.result) == bits((made, features))
            for optimizer, out, found in (
                (ours, given, handle.result[1]),
                (theirs, wanted, features),
            ):
                optimizer.zero_grad()
                (out.pow(2).sum() + found.abs().sum()).backward()
                optimizer.step()
            assert bits(dict(sparse.state_dict())) == bits(dict(hand.state_dict()))
            assert state(model) is not None
        assert handle.module is sparse
        assert handle.report().fired == 6
    assert bended.stats.replays == 5
    assert list(model.state_dict()) == list(Block().state_dict())


def test_a_kept_value_is_kept_bit_by_bit() -> None:
    bended = bt.BendedModule(lambda x: x.sin())
    values = torch.tensor([0.1, -0.0, float("inf"), float("nan"), 1e-40, 3e38])
    plain = bended(values)
    with splice(bended, "sin", lambda value: value * 1e20 + 1, keep_error=True):
        for _ in range(2):
            assert bits(bended(values)) == bits(plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("keep_error", [False, True])
def test_a_splice_works_without_gradients(mode: Any, keep_error: bool) -> None:
    bended, sparse, x = bt.BendedModule(lambda x: x.sin() * 2), Sparse(3), torch.randn(2, 3)
    with mode(), splice(bended, "sin", sparse, keep_error=keep_error) as handle:
        for _ in range(2):
            assert torch.equal(bended(x), (x.sin() if keep_error else sparse(x.sin())) * 2)
            assert handle.error is not None
            assert torch.equal(handle.error, x.sin() - sparse(x.sin()))


def test_masks_and_numbers_can_be_spliced() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0) * x.argmax()

    bended, x = bt.BendedModule(model), torch.tensor([-1.0, 2.0, 3.0])
    with (
        splice(bended, "gt", torch.logical_not) as mask,
        splice(bended, "argmax", torch.neg) as best,
    ):
        for _ in range(2):
            assert torch.equal(bended(x), torch.where(x <= 0, x, 0) * -2)
        assert mask.error is None
        assert best.error is not None
        assert best.error.item() == 4
    with splice(bended, "gt", torch.logical_not, keep_error=True):
        assert torch.equal(bended(x), model(x))


SELECTED: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "an index": (lambda x: (x + 1, "text"), 0),
    "the last": (lambda x: ("text", x + 1), -1),
    "a key": (lambda x: {"made": x + 1}, "made"),
    "an attribute": (lambda x: torch.return_types.max((x + 1, x.long())), "values"),
    "a function": (lambda x: [x, [x + 1]], lambda result: result[1][0]),
}


@pytest.mark.parametrize("name", SELECTED)
def test_the_part_that_goes_on_can_be_said(name: str) -> None:
    module, select = SELECTED[name]
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    with splice(bended, "relu", module, select=select):
        for _ in range(2):
            assert torch.equal(bended(torch.ones(2)), torch.full((2,), 4.0))


def test_a_part_that_is_not_there_is_named() -> None:
    bended = bt.BendedModule(lambda x: x.relu() * 2)
    wrong = [
        (
            lambda x: (x, x),
            None,
            "returned a tuple of 2: choose the part that replaces the value with select=",
        ),
        (lambda x: (x, x), 2, r"in which select= finds nothing \(IndexError"),
        (lambda x: (x, x), "made", r"in which select= finds nothing \(AttributeError"),
        (lambda x: {"made": x}, "lost", r"in which select= finds nothing \(KeyError"),
    ]
    for module, select, message in wrong:
        with splice(bended, "relu", module, select=select):
            for _ in range(2):
                with pytest.raises(InterjectionError, match=message):
                    bended(torch.ones(2))
    with splice(bended, "relu", lambda x: x[:1], keep_error=True):
        with pytest.raises(InterjectionError, match=r"shape \(2,\) became \(1,\)"):
            bended(torch.ones(2))
    with splice(bended, "relu", lambda x: x[:1]) as handle:
        for _ in range(2):
            assert torch.equal(bended(torch.ones(2)), torch.full((1,), 2.0))
            assert handle.error is None


def test_a_part_of_an_output_can_be_spliced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)

    model, sparse, x = Model(), Sparse(4), torch.randn(5, 3)
    bended = bt.BendedModule(model)
    out, hidden = model(x)
    with splice(bended, "rnn.output|sub_0", sparse) as handle:
        for _ in range(2):
            assert bits(bended(x)) == bits((sparse(out), hidden))
        assert handle.error is not None
        assert torch.equal(handle.error, (out - sparse(out)).detach())


def test_a_splice_says_what_it_is_and_leaves_with_its_handle() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU()))
    handle = splice(bended, "sub_0", nn.Sigmoid())
    assert repr(handle) == "<Sigmoid spliced in at 'sub_0'>"
    bended(torch.ones(2))
    assert handle.result is not None
    handle.remove(), handle.remove()
    assert (handle.active, handle.error, handle.result) == (False, None, None)
    assert repr(handle) == "<Sigmoid spliced in at 'sub_0', removed>"
    assert isinstance(bended.model, nn.Module)
    with pytest.raises(InputError, match="ReLU is a part of the model"):
        splice(bended, "sub_0", bended.model[0])  # type: ignore[index]


def test_the_error_is_there_after_the_context_has_ended() -> None:
    bended = bt.BendedModule(lambda x: x.relu())
    with splice(bended, "relu", torch.round) as handle:
        bended(torch.tensor([0.75]))
    assert not handle.active
    assert handle.error is not None
    assert handle.error.item() == -0.25


# Modules


class Nested(nn.Module):
    """Modules in containers, under several names, called several times, held in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.act = nn.ReLU()
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2))
        self.alias = self.first
        self.held = [self.first, {"act": (self.act, 1)}]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.held[0](self.held[1]["act"][0](x)) + self.alias(x)  # type: ignore[operator,index]


class Doubled(nn.Module):
    """Does what another module does, twice as much."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)) * 2


def tensors_of(model: nn.Module) -> dict[str, int]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: id(tensor) for name, tensor in tensors}


def test_what_stays_is_shared_and_the_model_is_not_touched() -> None:
    model = Nested()
    before, shown = state(model), repr(model)
    made = replace_module(model, nn.ReLU, lambda relu: nn.GELU())
    assert type(made) is Nested
    assert made is not model
    assert tensors_of(made) == tensors_of(model)
    assert (state(model), repr(model)) == (before, shown)
    assert [name for name, m in made.named_modules() if isinstance(m, nn.GELU)] == [
        "act", "blocks.0.1", "blocks.1.1",
    ]  # fmt: skip
    assert not any(isinstance(module, nn.ReLU) for module in made.modules())
    made.norm.momentum = 0.5
    made.extra = nn.Linear(1, 1)
    assert (state(model), repr(model)) == (before, shown)


def test_a_module_is_replaced_wherever_it_is() -> None:
    torch.manual_seed(0)
    model, new = Nested(), nn.Linear(3, 3)
    made = replace_module(model, "first", lambda linear: new)
    assert made.first is made.alias is made.held[0] is new
    hand = copy.deepcopy(model)
    hand.first = hand.alias = hand.held[0] = copy.deepcopy(new)
    for x in batches(4, 3):
        assert run(made, made, x, 0) == run(hand, hand, x, 0)


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        (nn.Linear, {"first", "blocks.0.0", "blocks.1.0"}),
        (node_selector.Linear, {"first", "blocks.0.0", "blocks.1.0"}),
        (node_selector.Activations & ~node_selector.matches_name("act"),
         {"blocks.0.1", "blocks.1.1"}),
        ("blocks.0", {"blocks.0"}),
        (["act", "norm"], {"act", "norm"}),
        (node_selector.matches_module_lambda(lambda m: hasattr(m, "momentum")), {"norm"}),
        (lambda node: node.qualified_name.endswith(".1"), {"blocks.1", "blocks.0.1", "blocks.1.1"}),
        (node_selector.is_module & node_selector.has_parameters,
         {"first", "norm", "blocks.0.0", "blocks.1.0"}),
    ],
)  # fmt: skip
def test_what_is_replaced_can_be_said_in_many_ways(selector: Any, names: set[str]) -> None:
    seen: list[nn.Module] = []
    model = Nested()
    made = replace_module(model, selector, lambda m: seen.append(m) or Doubled(m))  # type: ignore[func-returns-value]
    doubled = {name for name, m in made.named_modules() if isinstance(m, Doubled)}
    assert {name.replace(".inner", "") for name in doubled} == names
    assert len(seen) == len(names)
    assert not {id(module) for module in model.modules()} & {id(module) for module in seen}


def test_outer_modules_are_given_with_their_new_parts() -> None:
    model = Nested()
    made = replace_module(model, (nn.Linear, nn.Sequential), Doubled)
    block = made.blocks[0]
    assert isinstance(block, Doubled)
    assert isinstance(block.inner, nn.Sequential)
    assert isinstance(block.inner[0], Doubled)
    assert block.inner[0].inner.weight is model.blocks[0][0].weight  # type: ignore[index]


def test_leaf_modules_are_not_looked_into() -> None:
    made = replace_module(
        Nested(), nn.ReLU, lambda relu: nn.GELU(), tracer_kwargs={"leaf_modules": [nn.Sequential]}
    )
    assert [name for name, m in made.named_modules() if isinstance(m, nn.GELU)] == ["act"]


@pytest.mark.parametrize("training", [True, False])
def test_new_modules_are_in_the_mode_of_the_old_ones(training: bool) -> None:
    model = Nested().train(training)
    model.norm.train(not training)
    made = replace_module(model, (nn.ReLU, nn.BatchNorm1d), Doubled)
    assert isinstance(made.act, Doubled)
    assert made.act.drop.training is training
    assert isinstance(made.norm, Doubled)
    assert made.norm.drop.training is (not training)
    assert made.norm.inner.training is (not training)


def test_the_model_itself_can_be_meant() -> None:
    model = nn.Linear(3, 3)
    made = replace_module(model, nn.Linear, Doubled)
    assert isinstance(made, Doubled)
    assert made.inner is not model
    assert made.inner.weight is model.weight  # type: ignore[union-attr]


class Routed(nn.Module):
    """Modules that only some inputs come by."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.argmax())
        x = self.experts[chosen](x)
        while x.norm() > 1:
            x = F.relu(x * 0.5)
        return x


def test_a_dynamic_model_is_replaced_in_whole() -> None:
    torch.manual_seed(0)
    model = Routed()
    made = replace_module(model, nn.ReLU, lambda relu: nn.Softplus())
    bended = bt.BendedModule(made)
    for x in batches(3, seeds=range(6), scale=3.0):
        h: Any = model.experts[int(x.argmax())]
        wanted = F.softplus(h[0](x))
        while wanted.norm() > 1:
            wanted = F.relu(wanted * 0.5)
        for _ in range(2):
            assert bits(bended(x)) == bits(wanted)
        assert bits(made(x)) == bits(wanted)


def test_a_bended_module_gives_a_new_one_and_knows_its_runs() -> None:
    torch.manual_seed(0)
    bended = bt.BendedModule(Routed(), max_traces=5)
    bended(torch.tensor([0.0, 9.0, 0.0]))
    handle = bended.interject("experts_1", lambda value: value * 0)
    made = replace_module(bended, node_selector.last(nn.ReLU & node_selector.is_module), Doubled)
    handle.remove()
    assert isinstance(made, bt.BendedModule)
    assert made.insertions == ()
    assert made._trees.limit == 5
    names = [n for n, m in made.named_modules() if isinstance(m, Doubled)]
    assert names == ["experts.1.1"]
    by_path = replace_module(bended, node_selector.matches_path("experts_1.sub_1"), Doubled)
    assert isinstance(by_path.experts[1][1], Doubled)  # type: ignore[index]
    everywhere = replace_module(bended, nn.Linear, Doubled)
    names = [n for n, m in everywhere.named_modules() if isinstance(m, Doubled)]
    assert names == ["experts.0.0", "experts.1.0", "experts.2.0"]
    by_pattern = replace_module(bended, re.compile(r"^experts_\d\.sub_1$"), Doubled)
    names = [n for n, m in by_pattern.named_modules() if isinstance(m, Doubled)]
    assert names == ["experts.0.1", "experts.1.1", "experts.2.1"]
    with pytest.raises(InputError, match=r"'relu', which is the call of a function"):
        replace_module(bended, node_selector.Activations, Doubled)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: replace_module(m, nn.Conv2d, Doubled), "Conv2d selects no module; there are"),
        (lambda m: replace_module(m, "firts", Doubled), "did you mean 'first'"),
        (
            lambda m: replace_module(m, node_selector.first(nn.ReLU), Doubled),
            "only be resolved with a",
        ),
        (
            lambda m: replace_module(m, node_selector.with_shape(3), Doubled),
            "only be resolved with a",
        ),
        (
            lambda m: replace_module(m, nn.ReLU, lambda relu: F.gelu),
            "has to be a module, but create_replacement",
        ),
        (lambda m: replace_module(m, nn.ReLU, 3), "create_replacement has to be a function"),
        (lambda m: replace_module(lambda x: x, nn.ReLU, Doubled), "only a module has modules"),
        (lambda m: replace_module_native(m, nn.Conv2d, Doubled), "the model has no Conv2d"),
        (lambda m: replace_module_native(m, F.relu, Doubled), "a class of modules"),
        (lambda m: replace_module_native(m, Nested, Doubled, clone=False), "cannot be replaced in"),
    ],
)
def test_replacements_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    model = Nested()
    before = repr(model)
    with pytest.raises(InputError, match=message):
        call(model)
    assert repr(model) == before


def test_a_module_that_runs_have_called_goes_by_the_paths_of_its_calls() -> None:
    class Crossed(nn.Module):
        """The two are called by one another's parents, so that paths and names differ."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.outer = Calls()

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(x, self.fc)

    class Calls(nn.Module):
        def forward(self, x: Tensor, module: nn.Module) -> Tensor:
            return module(x)

    bended = bt.BendedModule(Crossed())
    bended(torch.ones(2, 3))
    (node,) = node_selector.find(nn.Linear, bended.traces[0])
    path = node.path
    assert path.startswith("outer.")
    made = replace_module(bended, node_selector.matches_path(path), Doubled)
    assert isinstance(made.fc, Doubled)
    with pytest.raises(InputError, match="selects no module"):
        replace_module(bended, node_selector.matches_path("fc"), Doubled)


def test_nothing_to_replace_can_be_right() -> None:
    model = Nested()
    assert repr(replace_module(model, nn.Conv2d, Doubled, allow_none=True)) == repr(model)
    assert repr(replace_module_native(model, nn.Conv2d, Doubled, allow_none=True)) == repr(model)


def test_natively_all_modules_of_a_class_are_replaced() -> None:
    torch.manual_seed(0)
    model = Nested()
    before, shown = state(model), repr(model)
    made = replace_module_native(model, nn.ReLU, lambda relu: nn.GELU())
    assert (state(model), repr(model)) == (before, shown)
    assert repr(made) == repr(replace_module(model, nn.ReLU, lambda relu: nn.GELU()))
    assert tensors_of(made) == tensors_of(model)
    kinds = replace_module_native(model, (nn.ReLU, nn.Linear), Doubled)
    assert sum(isinstance(module, Doubled) for module in kinds.modules()) == 6
    assert replace_module_native(model, nn.ReLU, lambda relu: nn.GELU(), clone=False) is model
    assert repr(model) == repr(made)


def test_training_the_new_model_trains_what_is_shared() -> None:
    torch.manual_seed(0)
    model = Nested()
    made = replace_module(model, nn.ReLU, lambda relu: nn.GELU())
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    old = model.first.weight.detach().clone()
    made(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, old)
    assert int(model.norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_what_cannot_be_copied_is_said() -> None:
    model = Nested()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"cannot be copied .* with clone=False"):
        replace_module(model, nn.ReLU, Doubled)
    assert replace_module_native(model, nn.ReLU, Doubled, clone=False) is model


def test_the_users_hooks_stay() -> None:
    model, seen = Nested(), []  # type: ignore[var-annotated]
    model.first.register_forward_hook(lambda *args: seen.append(1))
    made = replace_module(model, nn.ReLU, lambda relu: nn.GELU())
    made(torch.randn(4, 3))
    assert len(seen) == 3
