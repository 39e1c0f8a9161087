"""Interjections: what they see and change is what it would be in a model cut into by hand.

Comparisons are bit by bit: outputs, gradients of inputs and parameters, buffers, random numbers;
live, replayed, and once the interjection is removed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import re
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace import Inputs, Interjection, NodePass, node_selector
from bendtrace.compat.torchwatcher import (
    ForwardInterjection,
    WrappedForwardBackwardInterjection,
    WrappedForwardInterjection,
    interject_by_match,
    interject_by_module_class,
    interject_by_module_class_native,
    interject_by_name,
)
from bendtrace.errors import DivergenceError, InputError, InterjectionError, NodePathError
from tests.cut import Block, Cut, Cuts, Experts, Refine, assert_as_by_hand, batches, run
from tests.promise import bits, state


class After(ForwardInterjection):
    """Does something to what a node gives."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def process(self, name: str, module: nn.Module | None, inputs: Any) -> Any:
        return self.function(inputs)


class Around(WrappedForwardInterjection):
    """Does something to what a node gives, going by what it is given."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> Any:
        return self.function(inputs, outputs)


class Gradients(WrappedForwardBackwardInterjection):
    """Does something to the gradients of what a node is given."""

    def __init__(self, function: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.function = function
        self.seen: list[tuple[str, Any, Any]] = []

    def process_backward(
        self, name: str, module: nn.Module | None, grad_input: Any, grad_output: Any
    ) -> Any:
        self.seen.append((name, grad_input, grad_output))
        if self.function is None:
            return None
        if isinstance(grad_input, tuple):
            return tuple(None if grad is None else self.function(grad) for grad in grad_input)
        return None if grad_input is None else self.function(grad_input)


class Seeing(WrappedForwardBackwardInterjection):
    """Notes everything, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_seen: list[tuple[str, Any, Any, Any]] = []
        self.backward_seen: list[tuple[str, Any, Any, Any]] = []

    def process(self, name: str, module: nn.Module | None, inputs: Any, outputs: Any) -> None:
        self.forward_seen.append((name, module, inputs, outputs))

    def process_backward(
        self, name: str, module: nn.Module | None, grad_input: Any, grad_output: Any
    ) -> None:
        self.backward_seen.append((name, module, grad_input, grad_output))


def after(edit: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda function, *args, **kwargs: edit(function(*args, **kwargs))


def with_gradients(edit: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Cut so that the gradients of a function's arguments, in this use, are changed."""

    def cut(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*(_hooked(arg, edit) for arg in args), **kwargs)

    return cut


def _hooked(value: Any, edit: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    own = value.view_as(value)
    own.register_hook(edit)
    return own


def double(value: Tensor) -> Tensor:
    return value * 2


# As by hand

CASES: dict[str, tuple[str, Callable[[], Any], Callable[..., Any]]] = {
    "a function": ("softmax", lambda: After(double), after(double)),
    "a function of two tensors": ("mul", lambda: After(double), after(double)),
    "a method": ("relu", lambda: After(double), after(double)),
    "a module": ("up", lambda: After(double), after(double)),
    "a module that writes state": ("norm", lambda: After(double), after(double)),
    "a module that draws numbers": (
        "drop", lambda: After(lambda v: v + torch.rand_like(v)),
        after(lambda v: v + torch.rand_like(v)),
    ),
    "with the input": (
        "softmax", lambda: Around(lambda i, o: i + o),
        lambda function, x, dim: x + function(x, dim=dim),
    ),
    "with two inputs": (
        "mul", lambda: Around(lambda i, o: i[0] + o * i[1]),
        lambda function, x, y: x + function(x, y) * y,
    ),
    "with a module's input": (
        "norm", lambda: Around(lambda i, o: i + o), lambda function, x: x + function(x)
    ),
    "gradients of a function": ("softmax", lambda: Gradients(double), with_gradients(double)),
    "gradients of two inputs": ("mul", lambda: Gradients(double), with_gradients(double)),
    "gradients of a method": ("relu", lambda: Gradients(torch.sin), with_gradients(torch.sin)),
    "gradients of a module": ("norm", lambda: Gradients(double), with_gradients(double)),
    "gradients of the root's last op": ("add", lambda: Gradients(double), with_gradients(double)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_runs_as_if_cut_by_hand(name: str) -> None:
    where, what, cut = CASES[name]
    assert_as_by_hand(
        Block, lambda bended: bended.interject(where, what()), {where: cut},
        [*batches(3, 4), *batches(5, 4, seeds=(3,))],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["a function", "with two inputs", "a module that writes state"])
@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_also_without_gradients_and_under_autocast(name: str, mode: Any) -> None:
    where, what, cut = CASES[name]
    assert_as_by_hand(
        Block, lambda bended: bended.interject(where, what()), {where: cut}, batches(3, 4),
        mode=mode,
    )  # fmt: skip


ROUTED: dict[str, tuple[str, Callable[[], Any], Cuts]] = {
    "one that changes the path": (
        "softmax", lambda: After(lambda v: v.flip(-1)), {"softmax": after(lambda v: v.flip(-1))},
    ),
    "one that does not": ("gelu", lambda: After(double), {"gelu": after(double)}),
    "one expert": ("experts_1", lambda: After(double), {"expert 1": after(double)}),
    "gradients in a loop": ("gelu", lambda: Gradients(double), {"gelu": with_gradients(double)}),
    "what leads to one expert only": (
        "softmax", lambda: Around(lambda i, o: i * 0 + torch.eye(3)[2]),
        {"softmax": lambda function, x, dim: x * 0 + torch.eye(3)[2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTED)
def test_experts_run_as_if_cut_by_hand(name: str) -> None:
    where, what, cuts = ROUTED[name]
    calls = batches(6, 4, seeds=(0, 1, 2, 3))
    assert_as_by_hand(Experts, lambda bended: bended.interject(where, what()), cuts, calls)


LOOPED: dict[str, tuple[str, Callable[[], Any], Cuts]] = {
    "more steps": ("tanh", lambda: After(lambda v: v * 1.5), {"tanh": after(lambda v: v * 1.5)}),
    "fewer steps": ("tanh", lambda: After(lambda v: v / 3), {"tanh": after(lambda v: v / 3)}),
    "the other exit": ("mul", lambda: After(lambda v: v - 9), {"mul": after(lambda v: v - 9)}),
    "gradients": ("tanh", lambda: Gradients(double), {"tanh": with_gradients(double)}),
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_runs_as_if_cut_by_hand(name: str) -> None:
    where, what, cuts = LOOPED[name]
    calls = batches(2, 4, scale=4.0)
    assert_as_by_hand(Refine, lambda bended: bended.interject(where, what()), cuts, calls)


@pytest.mark.more
def test_one_that_keeps_everything_changes_nothing() -> None:
    for make, shape in ((Block, (3, 4)), (Experts, (6, 4)), (Refine, (2, 4))):
        seen = Seeing()
        assert_as_by_hand(
            make, lambda bended, seen=seen: bended.interject(lambda node: True, seen), {},
            batches(*shape, scale=3.0), changes=False,
        )  # fmt: skip
        assert seen.forward_seen
        assert seen.backward_seen


# What they are told


def linear_relu() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def test_each_node_is_told_apart_by_its_path_and_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(F.relu(x)))

    model, seen, x = Model(), Seeing(), torch.ones(2, 3)
    bended = bt.BendedModule(model)
    bended.interject([re.compile("relu"), "fc", ""], seen)
    for _ in range(2):
        seen.forward_seen.clear()
        out = bended(x)
        told = [(name, module) for name, module, _, _ in seen.forward_seen]
        assert told == [("relu", None), ("fc", model.fc), ("relu_1", None), ("", model)]
        inputs = {name: inputs for name, _, inputs, _ in seen.forward_seen}
        outputs = {name: outputs for name, _, _, outputs in seen.forward_seen}
        assert torch.equal(inputs["fc"], outputs["relu"])
        assert torch.equal(outputs[""], out)


def test_inputs_are_the_arguments_with_tensors_in_them() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, flag: bool, *, pair: Any, scale: float = 1.0) -> Tensor:
            return x * pair[0] + pair[1] if flag else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x, True, pair=(x, x + 1), scale=2.0)
            y = self.act(input=y)
            y = torch.cat([y, x], -1)
            return F.softmax(y, -1)

    seen, x = Seeing(), torch.ones(2, 3)
    bended = bt.BendedModule(Model())
    bended.interject(["inner", "act", "cat", "softmax"], seen)
    for _ in range(2):
        seen.forward_seen.clear()
        bended(x)
        inner, act, cat, softmax = (inputs for _, _, inputs, _ in seen.forward_seen)
        assert bits(inner) == bits((x, (x, x + 1)))
        assert bits(act) == bits(x * x + x + 1)
        assert bits(cat) == bits([x * x + x + 1, x])
        assert softmax.shape == (2, 6)


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    value: Tensor
    name: str = "result"


GIVEN: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y, (y + 1, None)),
    "list": lambda y: [y, 2, [y + 1]],
    "dict": lambda y: {"a": y, "b": {"c": y + 1}},
    "ordered dict": lambda y: OrderedDict(a=y, b=(y + 1, "text")),
    "named tuple": lambda y: Pair(y, y + 1),
    "dataclass": lambda y: Result(y),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_outputs_are_told_as_they_are_and_keep_their_structure(kind: str) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return GIVEN[kind](x * 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    x = torch.ones(2, requires_grad=True)
    seen, bended = Seeing(), bt.BendedModule(Model())
    bended.interject("inner", seen)
    for _ in range(3):
        assert bits(bended(x)) == bits(GIVEN[kind](x * 2))
        assert bits(seen.forward_seen[-1][3]) == bits(GIVEN[kind](x * 2))
    bended = bt.BendedModule(Model())
    bended.interject("inner", After(lambda value: GIVEN[kind](torch.zeros(3))))
    for _ in range(3):
        assert bits(bended(x)) == bits(GIVEN[kind](torch.zeros(3)))


def test_the_module_is_asked_for_once_per_node_before_anything_else() -> None:
    class Probe(ForwardInterjection):
        def __init__(self) -> None:
            super().__init__()
            self.probes = nn.ModuleDict()
            self.log: list[tuple[str, Any]] = []

        def register(self, name: str, module: nn.Module | None) -> None:
            self.log.append((name, module))
            self.probes[name.replace(".", "_")] = nn.Linear(3, 1)

        def process(self, name: str, module: nn.Module | None, inputs: Tensor) -> None:
            assert name.replace(".", "_") in self.probes

    model, probe = linear_relu(), Probe()
    bended = interject_by_module_class(model, nn.Linear, probe)
    for _ in range(3):
        bended(torch.ones(2, 3))
    assert probe.log == [("0", model[0]), ("2", model[2])]
    assert len(list(probe.parameters())) == 4


def test_a_subclass_need_not_call_the_constructor_of_its_base() -> None:
    class Noting(WrappedForwardInterjection):
        def __init__(self) -> None:
            self.names: list[str] = []

        def process(self, name: str, module: Any, inputs: Any, outputs: Any) -> None:
            self.names.append(name)

    noting = Noting()
    bended = interject_by_name(linear_relu(), "1", noting)
    bended(torch.ones(2, 3))
    assert noting.names == ["1"]


@pytest.mark.parametrize(
    "cls", [ForwardInterjection, WrappedForwardInterjection, WrappedForwardBackwardInterjection]
)
def test_the_method_that_it_is_about_has_to_be_there(cls: type[Any]) -> None:
    class Empty(cls):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="process"):
        Empty()


# Gradients through one op alone


def test_the_gradient_is_that_of_one_use_of_a_tensor() -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        return torch.exp(h) + torch.sin(h) * h

    seen = Seeing()
    bended = bt.BendedModule(model)
    bended.interject(["exp", "sin"], seen)
    for _ in range(3):
        seen.backward_seen.clear()
        x = torch.randn(3, requires_grad=True)
        bended(x).sum().backward()
        told = {name: (into, out) for name, _, into, out in seen.backward_seen}
        h = (x * 2).detach()
        assert torch.equal(told["exp"][0], h.exp())
        assert torch.equal(told["exp"][1], torch.ones(3))
        assert torch.equal(told["sin"][0], h * h.cos())
        assert torch.equal(told["sin"][1], h)


def test_one_tensor_given_twice_has_two_gradients() -> None:
    gradients = Gradients()
    bended = bt.BendedModule(lambda x, y: torch.addcmul(x, x, y).exp())
    bended.interject("addcmul", gradients)
    for _ in range(2):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3)
        out = bended(x, y)
        out.sum().backward()
        name, into, outof = gradients.seen[-1]
        assert name == "addcmul"
        assert torch.equal(into[0], outof)
        assert torch.equal(into[1], outof * y)
        assert into[2] is None
        assert torch.equal(outof, out.detach())


def test_gradients_are_those_of_native_hooks_where_there_are_such() -> None:
    model, native = linear_relu(), linear_relu()
    told: list[Any] = []
    for name, module in native.named_modules():
        module.register_full_backward_hook(
            lambda _, into, out, name=name: told.append((name, into, out))
        )
    seen = Seeing()
    bended = interject_by_match(model, lambda node: node.module is not None, seen)
    for _ in range(2):
        told.clear(), seen.backward_seen.clear()
        for call in (native, bended):
            call(torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()).sum().backward()
        wanted = [(name, *into, *out) for name, into, out in told]
        given = [(name, into, out) for name, _, into, out in seen.backward_seen]
        assert bits(sorted(given, key=str)) == bits(sorted(wanted, key=str))


def test_a_module_without_inputs_that_need_gradients_is_told_of_those_of_its_output() -> None:
    gradients = Gradients()
    bended = interject_by_name(linear_relu(), "0", gradients)
    for _ in range(2):
        gradients.seen.clear()
        bended(torch.ones(2, 3)).sum().backward()
        ((name, into, out),) = gradients.seen
        assert (name, into) == ("0", None)
        assert out.shape == (2, 3)


def test_without_a_backward_pass_nothing_is_told() -> None:
    gradients = Gradients()
    bended = interject_by_name(linear_relu(), "1", gradients)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            bended(torch.ones(2, 3))
    assert gradients.seen == []


def test_parts_of_an_output_that_no_gradient_reaches_have_none() -> None:
    def model(x: Tensor) -> Tensor:
        a, _ = torch.split(x * 1, 2)
        values, places = torch.topk(a, 1)
        return values.sum() + places.sum()

    seen = Seeing()
    bended = bt.BendedModule(model)
    bended.interject(["split", "topk"], seen)
    for _ in range(2):
        seen.backward_seen.clear()
        bended(torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)).backward()
        topk, split = seen.backward_seen
        assert topk[2].tolist() == [0, 1]
        assert [None if part is None else part.tolist() for part in topk[3]] == [[1], None]
        assert split[2].tolist() == [0, 1, 0, 0]
        assert [None if part is None else part.tolist() for part in split[3]] == [[0, 1], None]


def test_a_graph_can_be_gone_through_twice() -> None:
    gradients = Gradients(double)
    bended = bt.BendedModule(lambda x: torch.sin(x) * x)
    bended.interject("sin", gradients)
    for _ in range(2):
        gradients.seen.clear()
        x = torch.randn(3, requires_grad=True)
        out = bended(x).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)
        second = torch.autograd.grad(out, x)
        assert bits(first) == bits(second)
        assert len(gradients.seen) == 2
        assert bits(gradients.seen[0]) == bits(gradients.seen[1])
        assert torch.equal(first[0], 2 * x.cos() * x + x.sin())


@pytest.mark.parametrize("edit", [None, double])
def test_gradients_of_gradients_are_those_of_a_native_hook(edit: Any) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.sin(x) * x

    def by_hand(x: Tensor) -> Tensor:
        return with_gradients(edit or (lambda grad: grad))(torch.sin, x) * x

    bended = bt.BendedModule(model)
    bended.interject("sin", Gradients(edit))
    for _ in range(2):
        given = []
        for call in (bended, by_hand):
            x = torch.linspace(-1, 1, 3).requires_grad_()
            (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            given.append(bits([grad.detach(), *torch.autograd.grad(grad.sin().sum(), x)]))
        assert given[0] == given[1]


def test_several_forwards_before_one_backward() -> None:
    gradients = Gradients()
    bended = bt.BendedModule(lambda x: torch.sin(x).exp())
    bended.interject("sin", gradients)
    inputs = [torch.full((2,), float(i), requires_grad=True) for i in range(4)]
    outs = [bended(x) for x in inputs]
    for i in (2, 0, 3, 1):
        outs[i].sum().backward()
    for i, (_, into, out) in zip((2, 0, 3, 1), gradients.seen, strict=True):
        assert torch.equal(out, outs[i].detach())
        assert torch.equal(into, inputs[i].grad)  # type: ignore[arg-type]


def test_gradients_of_another_kind_are_refused() -> None:
    bad: list[tuple[Any, str]] = [
        (
            lambda grads: torch.ones(5),
            r"has to return shape \(3,\) for input 0, but it returned shape",
        ),
        (lambda grads: (grads, grads), "has to return 1 gradients, one for each input"),
        (
            lambda grads: "text",
            "has to return 1 gradients, one for each input, but it returned 'text'",
        ),
        (lambda grads: (grads, grads), "one for each input, but it returned a tuple of 2"),
    ]
    for function, message in bad:

        class Wrong(WrappedForwardBackwardInterjection):
            def process_backward(self, name: Any, module: Any, into: Any, out: Any) -> Any:
                return function(into)  # noqa: B023

        bended = bt.BendedModule(lambda x: torch.sin(x).sum())
        bended.interject("sin", Wrong())
        for _ in range(2):
            out = bended(torch.ones(3, requires_grad=True))
            with pytest.raises(InterjectionError, match=message):
                out.backward()


# Things that are hard to come by


@pytest.mark.more
def test_the_inside_of_attention_can_be_reached() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    plain = attention(x, x, x)
    bended = bt.BendedModule(attention)
    uniform = After(lambda weights: torch.full_like(weights, 1 / 3))
    with bended.interject("softmax", uniform):
        for _ in range(2):
            out, weights = bended(x, x, x)
            assert torch.equal(weights, torch.full((2, 3, 3), 1 / 3))
            assert torch.allclose(out, out[:, :1].expand(2, 3, 4))
    assert bits(bended(x, x, x)) == bits(plain)


@pytest.mark.more
def test_the_softmax_of_an_encoder_layer_is_reached_in_training_and_out_of_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    for train in (True, False):
        layer.train(train)
        wanted = layer(x)
        seen = Seeing()
        bended = bt.BendedModule(layer)
        with bended.interject(node_selector.Transformer | node_selector.Normalization, seen):
            for _ in range(2):
                assert bits(bended(x)) == bits(wanted)
        assert {name for name, *_ in seen.forward_seen} >= {"self_attn", "norm1", "norm2"}


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_give_tuples(cls: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = cls(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0].sum(0)

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(5, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    seen, bended = Seeing(), bt.BendedModule(model)
    handle = bended.interject("rnn", seen)
    for _ in range(2):
        assert bits(bended(x)) == bits(model(x))
        assert bits(torch.autograd.grad(bended(x).sum(), x)[0]) == bits(wanted)
        name, module, into, out = seen.backward_seen[-1]
        assert (name, module) == ("rnn", model.rnn)
        assert torch.equal(into, wanted)
        assert torch.equal(out[0], torch.ones(5, 4))
        assert out[1] is None
    handle.remove()
    bended.interject("rnn", After(lambda value: (value[0] * 0, value[1])))
    for _ in range(2):
        assert torch.equal(bended(x), torch.zeros(4))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second


def test_an_autograd_function_is_a_node_like_any_other() -> None:
    def model(x: Tensor) -> Tensor:
        product, total = Product.apply(x, x * 3)
        return (product * total).sum()

    seen = Seeing()
    bended = bt.BendedModule(model)
    bended.interject("Product", seen)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        bended(x).backward()
        _, _, into, out = seen.backward_seen[-1]
        y, product, total = x * 3, x * x * 3, x + x * 3
        assert bits(out) == bits((total.detach(), product.detach()))
        assert bits(into) == bits(((total * y + product).detach(), (total * x + product).detach()))
        wanted = torch.tensor([1.0, 2.0], requires_grad=True)
        model(wanted).backward()
        assert torch.equal(x.grad, wanted.grad)  # type: ignore[arg-type]


def test_recursion_has_a_node_for_each_level() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            h = torch.relu(self.fc(x))
            if depth == 0:
                return h
            return self.forward(h, depth - 1) + self(h, depth - 1)

    torch.manual_seed(0)
    model, x = Model(), torch.ones(1, 2)

    def by_hand(x: Tensor, depth: int = 2) -> Tensor:
        h = torch.relu(model.fc(x)) + 1
        return h if depth == 0 else by_hand(h, depth - 1) + by_hand(h, depth - 1)

    bended = bt.BendedModule(model)
    handle = bended.interject(node_selector.Activations.ReLU, lambda value: value + 1)
    for _ in range(2):
        assert bits(bended(x)) == bits(by_hand(x))
    assert handle.report().fired == 2 * 7
    assert len(handle.report().paths) == 7


def test_passes_of_a_loop_are_counted_in_each_call_anew() -> None:
    numbers: list[int] = []

    class Numbers(Interjection):
        def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
            numbers.append(at.number)

    def model(x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = x.sin()
        return x

    bended = bt.BendedModule(model)
    bended.interject("sin", Numbers())
    for _ in range(2):
        bended(torch.ones(2), 3)
        bended(torch.ones(2), 2)
    assert numbers == [0, 1, 2, 0, 1] * 2


@pytest.mark.each
@pytest.mark.parametrize(
    ("passes", "every", "wanted"),
    [
        ([0, -1], None, [0, 4]),
        (None, 2, [0, 2, 4]),
        (lambda n: n > 2, None, [3, 4]),
        (1, None, [1]),
    ],
)
def test_passes_can_be_chosen(passes: Any, every: Any, wanted: list[int]) -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.sin()
        return x

    def by_hand(x: Tensor) -> Tensor:
        for number in range(5):
            x = x.sin() + (number in wanted)
        return x

    x = torch.ones(3)
    bended = bt.BendedModule(model)
    bended(x)
    bended.interject("sin", After(lambda value: value + 1), passes=passes, every=every)
    for _ in range(3):
        assert torch.equal(bended(x), by_hand(x))
    (row,) = bended.insertions[0].report().rows
    assert sorted(row.passes) == wanted


# In-place functions and views


def written(x: Tensor) -> Tensor:
    h = x * 2
    g = h.view(-1)
    g[:2].mul_(3)
    h += 1
    F.relu(h, inplace=True)
    return h * 3


@pytest.mark.parametrize("name", ["mul_", "relu", "add_", "mul", ".mul_1", "getitem"])
def test_what_is_written_in_place_can_be_seen(name: str) -> None:
    seen: list[Tensor] = []
    bended = bt.BendedModule(written)
    bended.interject(name, Around(lambda inputs, output: seen.append(output.clone())))
    x = torch.linspace(-2, 2, 4).view(2, 2)
    h = x * 2
    g = torch.cat([h.view(-1)[:2] * 3, h.view(-1)[2:]]).view(2, 2)
    wanted = {
        "mul": h, "getitem": h.view(-1)[:2], "mul_": g.view(-1)[:2], "add_": g + 1,
        "relu": (g + 1).relu(), ".mul_1": (g + 1).relu() * 3,
    }  # fmt: skip
    for _ in range(2):
        assert run(bended, written, x, 0) == run(written, written, x, 0)
        assert torch.equal(seen.pop(), wanted[name])
        assert seen == []


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("relu", lambda x: ((x * 2) + 1).relu() * 2 * 3),
        ("add_", lambda x: (((x * 2) + 1) * 2).relu() * 3),
    ],
)
def test_what_is_written_in_place_can_be_changed(name: str, by_hand: Any) -> None:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        h.add_(1)
        F.relu(h, inplace=True)
        return h * 3

    bended = bt.BendedModule(model)
    bended.interject(name, double)
    for x in batches(3):
        for _ in range(2):
            assert run(bended, model, x, 0) == run(by_hand, model, x, 0)


def test_what_is_handed_to_an_in_place_function_can_be_changed() -> None:
    class Less(Interjection):
        def before(self, at: NodePass, inputs: Inputs) -> Inputs:
            return Inputs((inputs[0] - 1, *inputs[1:]), inputs.kwargs)

    def model(x: Tensor) -> Tensor:
        h = x * 2
        h.relu_()
        return h + h.sum()

    def by_hand(x: Tensor) -> Tensor:
        h = (x * 2 - 1).relu()
        return h + h.sum()

    bended = bt.BendedModule(model)
    bended.interject("relu_", Less())
    for x in batches(3):
        for _ in range(2):
            assert run(bended, model, x, 0) == run(by_hand, model, x, 0)


def test_gradients_through_in_place_functions_are_their_own() -> None:
    gradients = Gradients(double)

    def model(x: Tensor) -> Tensor:
        h = x * 2
        h[:2].mul_(5)
        h.relu_()
        return h * h

    def by_hand(x: Tensor) -> Tensor:
        h = x * 2
        h[:2] = with_gradients(double)(torch.mul, h[:2].clone(), 5)
        h = with_gradients(double)(torch.relu, h)
        return h * h

    bended = bt.BendedModule(model)
    bended.interject(["mul_", "relu_"], gradients)
    for x in batches(4):
        for _ in range(2):
            gradients.seen.clear()
            assert run(bended, model, x, 0) == run(by_hand, model, x, 0)
            assert [name for name, _, _ in gradients.seen] == ["relu_", "mul_"]


# What goes wrong


def test_an_exception_comes_out_as_it_is_and_leaves_nothing_behind() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(x))

    raises = True

    def fails(value: Tensor) -> Tensor:
        if raises:
            raise KeyError("on purpose")
        return value + 1

    torch.manual_seed(0)
    model, hand, x = Model(), Model(), torch.randn(4, 3)
    bended = bt.BendedModule(model)
    handle = bended.interject("relu", fails)
    for raises in (True, False, True, False, False, True):
        wanted = hand(x) + 1
        if raises:
            with pytest.raises(KeyError, match="on purpose"):
                bended(x)
        else:
            assert bits(bended(x)) == bits(wanted)
        assert state(model) == state(hand)
    handle.remove()
    assert bits(bended(x)) == bits(hand(x))


def test_an_exception_in_the_backward_pass_comes_out_as_it_is() -> None:
    def fails(grad: Tensor) -> Tensor:
        raise KeyError("on purpose")

    gradients = Gradients(fails)
    bended = bt.BendedModule(lambda x: x.sin())
    bended.interject("sin", gradients)
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            bended(torch.ones(2, requires_grad=True)).sum().backward()
    gradients.function = double
    x = torch.ones(2, requires_grad=True)
    bended(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * 2)  # type: ignore[arg-type]


def test_a_handler_of_the_model_does_not_hide_what_an_interjection_raised() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            return torch.relu(x)
        except ValueError:
            return x * 0

    def fails(value: Tensor) -> Tensor:
        raise ValueError("on purpose")

    bended = bt.BendedModule(model)
    handle = bended.interject("relu", fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            bended(torch.ones(2))
    handle.remove()
    assert torch.equal(bended(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "text",
            "After at sub_1 returned a value that cannot replace the node's value: expected a",
        ),
        (3.0, "expected a tensor, got 3.0"),
        ((torch.ones(2, 3),), "expected a tensor, got a tuple of 1"),
    ],
)
def test_what_is_not_of_the_same_kind_is_refused(value: Any, message: str) -> None:
    bended = interject_by_name(linear_relu(), "1", After(lambda _: value))
    for _ in range(2):
        with pytest.raises(InterjectionError, match=message):
            bended(torch.ones(2, 3))


def test_a_change_of_shape_is_part_of_the_trace() -> None:
    def model(x: Tensor) -> Tensor:
        h = torch.relu(x)
        return h.sum(0) * h.shape[0] if h.shape[0] > 2 else h

    def by_hand(x: Tensor) -> Tensor:
        h = torch.relu(x)[:2]
        return h.sum(0) * h.shape[0] if h.shape[0] > 2 else h

    bended = interject_by_name(model, "relu", After(lambda value: value[:2]))
    for _ in range(2):
        for rows in (1, 2, 4):
            assert bits(bended(torch.ones(rows, 3))) == bits(by_hand(torch.ones(rows, 3)))


# State


def test_what_the_run_assigns_can_be_read_by_an_interjection() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x * 2
            return torch.relu(x)

    model = Model()
    bended = bt.BendedModule(model)
    bended.interject("relu", lambda value: value + model.seen)
    for call in range(1, 6):
        x = torch.full((2,), float(call))
        assert torch.equal(bended(x), x * 3)


class Assigns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x * 2
        return torch.relu(x)


class Calls(nn.Module):
    """A module that holds a function, and another module in a list."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = [{"function": function}]

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[0]["function"](x)


class Reads(nn.Module):
    def __init__(self, model: Assigns) -> None:
        super().__init__()
        self.held = [model]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.held[0].seen


READ: dict[str, Callable[[bt.BendedModule, Assigns], Any]] = {
    "a function": lambda b, m: b.interject("relu", lambda v: v + m.seen),
    "by its name": lambda b, m: b.interject("relu", lambda v: v + getattr(m, "se" + "en")),
    "a function of two": lambda b, m: b.interject("relu", lambda v, at: v + m.seen),
    "a partial": lambda b, m: b.interject(
        "relu", functools.partial(lambda model, v: v + model.seen, m)
    ),
    "a module": lambda b, m: b.interject("relu", Reads(m)),
    "a method": lambda b, m: b.interject("relu", Reads(m).forward),
    "a module with a function": lambda b, m: b.interject("relu", Calls(lambda v: v + m.seen)),
    "a module with a module": lambda b, m: b.interject("relu", Calls(Reads(m))),
    "an interjection with a function": lambda b, m: b.interject(
        "relu", After(lambda v: v + m.seen)
    ),
    "an interjection with a module": lambda b, m: b.interject("relu", After(Reads(m))),
    "replace": lambda b, m: bt.rewriting.replace(b, "relu", lambda v: v.relu() + m.seen),
    "remove": lambda b, m: bt.rewriting.remove(b, "relu", keep=lambda inputs: inputs[0] + m.seen),
    "between": lambda b, m: bt.rewriting.between(b, "x", "relu", lambda v: v + m.seen),
    "splice": lambda b, m: bt.rewriting.splice(b, "relu", lambda v: v + m.seen),
    "splice a module": lambda b, m: bt.rewriting.splice(b, "relu", Calls(Reads(m))),
    "select": lambda b, m: bt.rewriting.splice(
        b, "relu", nn.Identity(), select=lambda v: v + m.seen
    ),
}


@pytest.mark.parametrize("how", READ)
def test_what_the_run_assigns_can_be_read_however_it_is_reached(how: str) -> None:
    model = Assigns()
    bended = bt.BendedModule(model)
    READ[how](bended, model)
    for call in range(1, 6):
        x = torch.full((2,), float(call))
        assert torch.equal(bended(x), x * 3)


def test_a_counter_of_the_model_can_be_read_by_an_interjection() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.relu(x)

    model = Model()
    bended = bt.BendedModule(model)
    bended.interject("relu", lambda value: value + model.calls)
    for call in range(1, 6):
        assert torch.equal(bended(torch.ones(2)), torch.full((2,), 1.0 + call))


def test_what_an_interjection_assigns_can_be_read_by_the_run() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0
            self.register_buffer("shift", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * self.scale + self.shift + self.weight

    model = Model()
    bended = bt.BendedModule(model)
    count = 0

    def assign(value: Tensor) -> None:
        nonlocal count
        count += 1
        model.scale = float(count)
        model.shift = torch.full((1,), 10.0 * count)
        model.weight.data = torch.full((1,), 100.0 * count)

    bended.interject("relu", assign)
    for call in range(1, 6):
        assert bended(torch.ones(1)).item() == 111 * call


def test_parameters_of_an_interjection_belong_to_the_watched_model() -> None:
    class Adapter(ForwardInterjection):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(3, 3)

        def process(self, name: str, module: nn.Module | None, inputs: Tensor) -> Tensor:
            return inputs + self.down(inputs)

    torch.manual_seed(0)
    adapter, model = Adapter(), linear_relu()
    hand, plain = copy.deepcopy(adapter), copy.deepcopy(model)
    bended = interject_by_name(model, "1", adapter)
    keys = list(model.state_dict())
    ours = torch.optim.SGD(bended.parameters(), 0.1)
    theirs = torch.optim.SGD([*plain.parameters(), *hand.parameters()], 0.1)
    for x in batches(4, 3, seeds=range(6)):
        h = plain[1](plain[0](x))
        wanted, given = plain[2](h + hand.down(h)), bended(x)
        assert bits(given) == bits(wanted)
        for optimizer, out in ((ours, given), (theirs, wanted)):
            optimizer.zero_grad()
            out.pow(2).sum().backward()
            optimizer.step()
    assert bits(dict(adapter.state_dict())) == bits(dict(hand.state_dict()))
    saved = bended.state_dict()
    assert list(saved) == [*keys, "Adapter0.down.weight", "Adapter0.down.bias"]
    assert list(model.state_dict()) == keys
    assert bended.stats.replays == 5
    saved = {key: torch.ones_like(value) for key, value in saved.items()}
    bended.load_state_dict(saved)
    assert all(bool((value == 1).all()) for value in adapter.state_dict().values())
    bended.to(torch.float64).eval()
    assert adapter.down.weight.dtype == model[0].weight.dtype == torch.float64
    assert not adapter.training
    assert not adapter.down.training
    assert adapter in set(bended.modules())
    assert interject_by_name(model.eval(), "1", Adapter()).insertions[0].what.what.training is False


def test_an_interjection_is_copied_and_saved_like_a_module() -> None:
    class Shift(ForwardInterjection):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(1))

        def process(self, name: str, module: nn.Module | None, inputs: Tensor) -> Tensor:
            return inputs + self.by

    shift = Shift()
    other = copy.deepcopy(shift)
    other.by.data += 1
    assert shift.by.item() == 1
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    shift.load_state_dict(torch.load(file))
    assert shift.by.item() == 2


def test_threads_do_not_see_one_another() -> None:
    model = linear_relu()
    bended = bt.BendedModule(model)
    bended.interject("sub_1", After(lambda value: value + 1))
    bended.interject("sub_1", Gradients(double))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for x in batches(2, 3, seeds=range(seed, seed + 20)):
            given, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
            out = bended(given)
            hand = model[2](with_gradients(double)(torch.relu, model[0](wanted)) + 1)
            grads = [torch.autograd.grad(o.sum(), i) for o, i in ((out, given), (hand, wanted))]
            if bits([out, grads[0]]) != bits([hand, grads[1]]):
                wrong.append((seed, x))

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_interjection_may_call_models_with_interjections() -> None:
    other = bt.BendedModule(lambda v: torch.sin(v) * 2)
    other.interject("sin", lambda value: value + 1)
    bended = bt.BendedModule(lambda x: torch.sin(x) + 1)
    depth = 0

    def again(value: Tensor) -> Tensor:
        nonlocal depth
        if depth == 2:
            return other(value)
        depth += 1
        try:
            return bended(value)
        finally:
            depth -= 1

    bended.interject("sin", again)
    x = torch.linspace(0, 1, 3)
    wanted = (x.sin().sin().sin().sin() + 1) * 2 + 3
    for _ in range(3):
        assert torch.equal(bended(x), wanted)


def test_a_model_with_interjections_can_be_a_part_of_another() -> None:
    inner = interject_by_name(linear_relu(), "1", After(double))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

    model, x = Model(), torch.ones(2, 3)
    m: Any = inner.model
    wanted = torch.tanh(m[2](m[1](m[0](x)) * 2))
    outer = bt.BendedModule(model)
    for call in (outer, outer, model):
        assert bits(call(x)) == bits(wanted)
    outer.interject("tanh", After(double))
    for _ in range(2):
        assert bits(outer(x)) == bits(wanted * 2)


def test_a_module_of_the_model_can_be_inserted_itself() -> None:
    model, x = linear_relu(), torch.ones(2, 3)
    bended = bt.BendedModule(model)
    with bended.interject("sub_0", model[0]) as handle:
        for _ in range(2):
            assert bits(bended(x)) == bits(model[2](model[1](model[0](model[0](x)))))
    assert handle.report().fired == 2


# By match, class, module and name


class Mixed(nn.Module):
    """Activations as modules, functions and methods, at the root and nested."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.last = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.block(self.act(x)))
        return F.relu(self.last(h).relu())


RELUS = ["act", "block.sub_1", "relu", "last.sub_1", "relu_1", "relu_2"]


def paths_of(bended: bt.BendedModule) -> list[str]:
    bended(torch.ones(2, 3))
    return list(bended.insertions[-1].report().paths)


def test_a_selector_means_modules_functions_and_methods() -> None:
    model = Mixed()
    before = state(model)
    bended = interject_by_match(model, node_selector.Activations.is_relu, After(lambda _: None))
    assert isinstance(bended, bt.BendedModule)
    assert bended.model is model
    assert paths_of(bended) == RELUS
    assert state(model) == before


def test_leaf_modules_are_not_looked_into() -> None:
    model = Mixed()
    leaves: dict[str, Any] = {
        "class": nn.Sequential, "module": model.last, "name": "last",
    }  # fmt: skip
    wanted = {
        "class": ["act", "relu", "relu_1", "relu_2"],
        "module": ["act", "block.sub_1", "relu", "relu_1", "relu_2"],
        "name": ["act", "block.sub_1", "relu", "relu_1", "relu_2"],
    }
    for kind, leaf in leaves.items():
        options = {"leaf_modules": [leaf]}
        bended = interject_by_match(
            model, node_selector.Activations.is_relu, After(lambda _: None), tracer_kwargs=options
        )
        assert paths_of(bended) == wanted[kind]
        assert options == {"leaf_modules": [leaf]}
    bended = interject_by_match(
        model, node_selector.is_module, After(lambda _: None),
        tracer_kwargs={"leaf_modules": [nn.Sequential]},
    )  # fmt: skip
    assert paths_of(bended) == ["act", "block", "last"]


def test_what_is_counted_is_counted_outside_leaf_modules() -> None:
    selector = node_selector.nth(node_selector.Activations.is_relu, 1)
    for options, path in [({"leaf_modules": [nn.Sequential]}, "relu"), (None, "block.sub_1")]:
        bended = bt.BendedModule(Mixed())
        bended(torch.ones(2, 3))
        interject_by_match(bended, selector, After(lambda _: None), tracer_kwargs=options)
        assert paths_of(bended) == [path]


def test_options_that_no_tracer_has_are_refused() -> None:
    with pytest.raises(InputError, match="unknown options 'leaf_module'; only 'leaf_modules'"):
        interject_by_match(
            Mixed(), nn.ReLU, After(double), tracer_kwargs={"leaf_module": [nn.Linear]}
        )
    with pytest.raises(
        bt.errors.InputError, match="leaf_modules have to be classes of modules, modules or"
    ):
        interject_by_match(Mixed(), nn.ReLU, After(double), tracer_kwargs={"leaf_modules": [3]})
    interject_by_name(Mixed(), "act", After(double), tracer_kwargs={"autowrap_modules": ()})


def test_a_class_means_its_modules_and_no_functions() -> None:
    modules = ["act", "block.sub_1", "last.sub_1"]
    bended = interject_by_module_class(Mixed(), nn.ReLU, After(lambda _: None))
    assert paths_of(bended) == modules
    bended = interject_by_module_class(Mixed(), (nn.ReLU, nn.Sequential), After(lambda _: None))
    assert paths_of(bended) == ["act", "block.sub_1", "block", "last.sub_1", "last"]
    with pytest.raises(InputError, match=r"subclasses of nn\.Module"):
        interject_by_module_class(Mixed(), F.relu, After(double))  # type: ignore[arg-type]


def test_a_module_means_all_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    model, x = Twice(), torch.ones(2, 3)
    bended = bt.BendedModule(model)
    bended.interject(model.fc, After(double))
    for _ in range(2):
        assert bits(bended(x)) == bits(model.fc(model.fc(x) * 2) * 2)
    assert paths_of(bended) == ["fc", "fc_1"]
    with pytest.raises(InputError, match="not a submodule of the model: pass"):
        bended.interject(nn.Linear(3, 3), After(double))


def test_only_the_names_of_torchwatcher_are_names() -> None:
    x = torch.ones(2, 3)
    for name in ("block.1", "act", "relu_1"):
        paths_of(interject_by_name(Mixed(), name, After(lambda _: None)))
    known = bt.BendedModule(Mixed())
    linear = known.trace(x)[2]
    assert linear.short_name == "linear_1"
    for name in (
        "block.sub_1", ".relu_1", "block.2.linear", "block", "linear_1", linear.label, "relu:2",
        "relu_0", "block_1",
    ):  # fmt: skip
        with pytest.raises(NodePathError):
            interject_by_name(Mixed(), name, After(double))(x)
        with pytest.raises(NodePathError):
            interject_by_name(known, name, After(double))


class Rounds(nn.Module):
    """Two loops, of which one has two calls of a kind, and modules that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.act, self.fc_1 = nn.Sigmoid(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + 0.25
            x = F.relu(x - 0.125)
        for _ in range(2):
            x = self.act(x).relu()
        return self.fc_1(x)


def test_what_repeats_is_numbered_in_the_order_of_a_call() -> None:
    seen: dict[str, Tensor] = {}

    class Keep(WrappedForwardBackwardInterjection):
        def process(self, name: str, module: Any, inputs: Any, outputs: Any) -> None:
            seen[name] = outputs.detach()

        def process_backward(self, name: str, module: Any, into: Any, outof: Any) -> None:
            backward.append(name)

    model, x = Rounds(), torch.ones(1, 2, requires_grad=True)
    backward: list[str] = []
    every = interject_by_match(model, node_selector.Activations, Keep())
    names = ["relu", "relu_1", "relu_2", "relu_3", "act", "relu_4", "act_1", "relu_5", "fc_1"]
    for _ in range(2):
        seen.clear(), backward.clear()
        every(x).sum().backward()
        assert list(seen) == names
        assert backward == names[::-1]
    whole = dict(seen)
    for name in names[:-1]:
        for _ in range(2):
            one = interject_by_name(model, name, Keep())
            seen.clear(), backward.clear()
            one(x).sum().backward()
            assert list(seen) == backward == [name]
            assert torch.equal(seen[name], whole[name])
    changed = interject_by_name(model, ["act_1"], torch.zeros_like)
    assert torch.equal(changed(x), torch.zeros(1, 2).relu().tanh())
    with pytest.raises(InputError, match="'fc_1' is ambiguous: torchvision takes the number off"):
        interject_by_name(model, "fc_1", Keep())
    seen.clear()
    interject_by_name(model, "fc", Keep())(x)
    assert torch.equal(seen["fc"], whole["fc_1"])
    with pytest.raises(NodePathError, match="'relu' is not called so often"):
        interject_by_name(every, "relu_6", Keep())

    class Instead(Interjection):
        def instead(self, at: NodePass, call: Any, inputs: Inputs) -> Any:
            return inputs[0]

    with pytest.raises(InputError, match="works before a node"):
        interject_by_name(model, "act", Instead())


def test_a_name_that_is_none_is_refused_with_near_misses() -> None:
    bended = interject_by_name(Mixed(), "block.11", After(double))
    with pytest.raises(NodePathError, match="sub_1"):
        bended(torch.ones(2, 3))
    known = bt.BendedModule(Mixed())
    known(torch.ones(2, 3))
    with pytest.raises(NodePathError, match="no node 'relu_11': 'relu' is not called so often"):
        interject_by_name(known, "relu_11", After(double))
    assert known.insertions == ()


def test_in_a_bended_module_it_is_inserted_besides_what_is_there() -> None:
    bended = interject_by_module_class(Mixed(), nn.ReLU, After(lambda _: None))
    same = interject_by_match(bended, node_selector.Linear, After(lambda _: None))
    assert same is bended
    bended(torch.ones(2, 3))
    assert [insertion.report().fired for insertion in bended.insertions] == [3, 3]


def test_a_function_is_a_model_too() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x) + 1

    bended = interject_by_match(model, node_selector.Activations, After(double))
    for _ in range(2):
        assert torch.equal(bended(torch.ones(2)), torch.full((2,), 3.0))


# Natively


def test_native_interjections_work_on_a_copy_that_shares_parameters() -> None:
    model, seen = linear_relu(), Seeing()
    watched = interject_by_module_class_native(model, nn.Linear, seen)
    assert type(watched) is nn.Sequential
    assert all(a is b for a, b in zip(watched.parameters(), model.parameters(), strict=True))
    assert not model[0]._forward_hooks
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert run(watched, watched, x, 0) == run(model, model, x, 0)
    assert [name for name, *_ in seen.forward_seen] == ["0", "2"]
    assert [name for name, *_ in seen.backward_seen] == ["2", "0"]
    assert seen.forward_seen[0][1] is watched[0]


def test_native_interjections_agree_with_traced_ones() -> None:
    def twice() -> Any:
        torch.manual_seed(0)
        act = nn.ReLU(inplace=True)
        return nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)

    cases: list[Callable[[], Any]] = [
        lambda: After(double), lambda: Around(lambda i, o: i + o), lambda: Gradients(double),
    ]  # fmt: skip
    for cls in (nn.Linear, nn.ReLU):
        for case in cases:
            native = interject_by_module_class_native(twice(), cls, case())
            traced = interject_by_module_class(twice(), cls, case())
            for x in batches(2, 3):
                wanted = run(native, native, x, 0)
                for _ in range(2):
                    assert run(traced, traced, x, 0) == wanted


def test_native_interjections_in_place_and_what_they_refuse() -> None:
    model = linear_relu()
    assert interject_by_module_class_native(model, nn.ReLU, After(double), clone=False) is model
    x = torch.ones(2, 3)
    assert bits(model(x)) == bits(model[2](F.relu(model[0](x)) * 2))
    with pytest.raises(InputError, match="the model has no Conv2d"):
        interject_by_module_class_native(model, nn.Conv2d, After(double))

    class Instead(Interjection):
        def instead(self, at: NodePass, call: Any, inputs: Inputs) -> Any:
            return inputs[0]

    with pytest.raises(InputError, match="replaces a node, which hooks cannot do"):
        interject_by_module_class_native(model, nn.ReLU, Instead())  # type: ignore[arg-type]
    wrong = interject_by_module_class_native(linear_relu(), nn.ReLU, After(lambda _: "text"))
    with pytest.raises(InterjectionError, match="After at 1 returned a value that cannot replace"):
        wrong(x)


def test_a_module_that_raised_does_not_confuse_native_interjections() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 0:
                raise ValueError("on purpose")
            return x.sin()

    seen = Seeing()
    model = interject_by_module_class_native(nn.Sequential(Fails()), Fails, seen)
    for value in (1.0, -1.0, 2.0):
        x = torch.full((2,), value, requires_grad=True)
        if value < 0:
            with pytest.raises(ValueError, match="on purpose"):
                model(x)
            continue
        model(x).sum().backward()
        assert torch.equal(seen.forward_seen[-1][2], x.detach())
        assert torch.equal(seen.backward_seen[-1][2], x.detach().cos())
    assert len(seen.forward_seen) == len(seen.backward_seen) == 2


def test_a_hook_of_the_user_that_raises_does_not_confuse_native_interjections() -> None:
    model, raises = nn.Sequential(nn.ReLU()), False

    def hook(module: nn.Module, args: Any) -> None:
        if raises:
            raise ValueError("on purpose")

    model[0].register_forward_pre_hook(hook)
    seen = Seeing()
    watched = interject_by_module_class_native(model, nn.ReLU, seen)
    for raises in (False, True, False):
        x = torch.ones(2, requires_grad=True)
        if raises:
            with pytest.raises(ValueError, match="on purpose"):
                watched(x)
        else:
            watched(x).sum().backward()
    assert len(seen.forward_seen) == len(seen.backward_seen) == 2


def test_native_passes_are_counted_and_paired_whatever_is_raised() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            if depth == 2:
                raise ValueError("on purpose")
            try:
                return self(x, depth + 1) * 2
            except ValueError:
                return x.sin()

    class Numbers(Interjection):
        def __init__(self) -> None:
            self.before_seen: list[int] = []
            self.after_seen: list[int] = []

        def before(self, at: NodePass, inputs: Inputs) -> None:
            self.before_seen.append(at.number)

        def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
            self.after_seen.append(at.number)

    numbers = Numbers()
    model = interject_by_module_class_native(nn.Sequential(Again(), Again()), Again, numbers)  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.ones(2))
    assert numbers.before_seen == [0, 1, 2, 0, 1, 2] * 2
    assert numbers.after_seen == [1, 0, 1, 0] * 2


def test_a_native_interjection_sees_to_it_that_in_place_modules_write_in_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            self.act(h)
            return h

    gradients = Gradients(double)
    watched = interject_by_module_class_native(Model(), nn.ReLU, gradients)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    out = watched(x)
    out.sum().backward()
    assert out.tolist() == [0, 4]
    assert x.grad is not None
    assert x.grad.tolist() == [0, 4]
    assert [into.tolist() for _, into, _ in gradients.seen] == [[0, 1]]


def test_a_model_with_native_interjections_can_be_copied() -> None:
    watched = interject_by_module_class_native(linear_relu(), nn.ReLU, Gradients(double))
    x = torch.linspace(-1, 1, 6).view(2, 3)
    wanted = run(watched, watched, x, 0)
    twin = copy.deepcopy(watched)
    assert run(twin, twin, x, 0) == wanted
    assert twin[0].weight is not watched[0].weight  # type: ignore[index]
    hook, *_ = watched[1]._forward_hooks.values()  # type: ignore[index]
    assert len(hook.station.entries[0].what.seen) == 1


def test_a_model_with_native_interjections_can_be_traced() -> None:
    seen = Seeing()
    watched = interject_by_module_class_native(linear_relu(), nn.Linear, seen)
    bended = bt.BendedModule(watched)
    for x in batches(2, 3):
        assert bits(bended(x)) == bits(watched(x))
    assert len(seen.forward_seen) == 2 * 2 * 3


def test_all_this_holds_for_cuts_themselves() -> None:
    """The models that the comparisons are made with are what they seem to be."""
    for make, shape in ((Block, (3, 4)), (Experts, (6, 4)), (Refine, (2, 4))):
        model: Cut = make()
        assert model.cuts == {}
        assert bits(model(torch.ones(shape))) is not None


class InPlaceOf(Interjection):
    """Gives something else in the place of a node, or nothing, from time to time."""

    def __init__(self, *gives: Any) -> None:
        self.gives = list(gives)

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        kind = self.gives.pop(0)
        return call(*inputs) if kind is Tensor else kind


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return x - 1 if y is None else x * 5 if not isinstance(y, Tensor) else y + x


@pytest.mark.parametrize("where", ["part", "part.relu"])
@pytest.mark.parametrize(
    ("first", "then"),
    [(first, then) for first in (Tensor, None, 2.0, "a") for then in (Tensor, None, 2.0, "a")],
)
def test_what_takes_a_node_s_place_may_be_of_another_type_the_next_time(
    where: str, first: Any, then: Any
) -> None:
    x = torch.linspace(-1, 2, 4)
    wanted = {Tensor: x.relu() + x, None: x - 1, 2.0: x * 5, "a": x * 5}
    bended = bt.BendedModule(Optional())
    bended.interject(where, InPlaceOf(first, first, then, then, first))
    for kind in (first, first, then, then, first):
        assert torch.equal(bended(x), wanted[kind])
    assert bended.stats.live == 0
    assert bended.stats.resumes == (first is not then)


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        (lambda module, inputs, output: output, "needs module, inputs, output"),
        (lambda value, *, hook: value, "needs value, hook="),
    ],
)
def test_a_function_that_cannot_be_called_with_a_value_is_refused_at_once(
    function: Any, needed: str
) -> None:
    bended = bt.BendedModule(linear_relu())
    with pytest.raises(InputError, match=needed):
        bended.interject("0", function)
    assert bended.insertions == ()


def test_a_pass_prints_the_class_of_its_module_and_not_the_module() -> None:
    seen: list[str] = []
    bended = bt.BendedModule(linear_relu())
    with bended.interject(["0", F.relu], lambda value, at: seen.append(repr(at))):
        bended(torch.ones(2, 3))
    assert seen == [
        "NodePass(path='sub_0', number=0, module=Linear)",
        "NodePass(path='sub_1.relu', number=0, function=relu)",
    ]


def test_a_wrong_value_for_a_tuple_says_how_to_name_a_part_of_it() -> None:
    model, x = nn.LSTM(3, 4), torch.ones(5, 1, 3)
    bended = bt.BendedModule(model)
    with (
        bended.interject("lstm", lambda value: value[0]),
        pytest.raises(InterjectionError, match=r"name the part: 'lstm\|sub_0'"),
    ):
        bended(x)
    with bended.interject("lstm|sub_0", torch.zeros_like):
        assert not bended(x)[0].any()
    split = bt.BendedModule(nn.Sequential(model))
    with (
        split.interject("0", lambda value: value[0]),
        pytest.raises(InterjectionError, match=r"name the part: 'sub_0.output\|sub_0'"),
    ):
        split(x)
    with split.interject("sub_0.output|sub_0", torch.zeros_like):
        assert not split(x)[0].any()


class InPlaceParts(nn.Module):
    """A module, a block, a function and a method that write to what they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) + 1

    def __init__(self) -> None:
        super().__init__()
        self.act, self.block = nn.ReLU(inplace=True), self.Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.act(x * 2) - 1)
        return F.relu(x - 2, inplace=True).sub(1).clamp_(0)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("where", ["act", "block", "relu", "clamp_"])
def test_inputs_of_a_node_that_writes_to_them_are_those_from_before(
    where: str, replaces: bool
) -> None:
    x = torch.tensor([-1.0, 0.5, 2.0])
    act = (x * 2).relu()
    block = (act - 1).relu() + 1
    relu = (block - 2).relu()
    given = {"act": x * 2, "block": act - 1, "relu": block - 2, "clamp_": relu - 1}[where]
    plain = InPlaceParts()(x.clone())
    seen: list[Tensor] = []

    def keep(inputs: Tensor, output: Tensor) -> Tensor | None:
        seen.append(inputs)
        return output + 0 * inputs if replaces else None

    bended = bt.BendedModule(InPlaceParts())
    bended.interject(where, Around(keep))
    for _ in range(3):
        assert torch.equal(bended(x), plain)
    assert bended.stats.replays == 2
    assert all(torch.equal(inputs, given) for inputs in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("kind", [nn.ReLU, InPlaceParts.Block])
def test_inputs_shown_by_hooks_are_those_from_before(kind: type[nn.Module]) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    watched = interject_by_module_class_native(
        InPlaceParts(), kind, Around(lambda inputs, output: seen.append((inputs, output)))
    )
    x = torch.tensor([-1.0, 0.5, 2.0])
    assert torch.equal(watched(x), InPlaceParts()(x))
    assert seen[-1][0].tolist() == [-1.0, 0.0, 3.0]


@bt.opaque
def _scaled_by(x: Tensor, number: int, function: Any) -> Tensor:
    return function(x * number)


@bt.opaque
def _filled(x: Tensor, held: list[float]) -> Tensor:
    held.append(float(x.sum()))
    return x * 1


class Itself(Interjection):
    self_contained = True

    def instead(self, at: NodePass, call: Any, inputs: Inputs) -> Any:
        return call(*inputs, **inputs.kwargs)


def test_what_stands_for_a_function_is_replayed_unless_that_may_fill_its_arguments() -> None:
    def fills(x: Tensor) -> tuple[Tensor, list[float]]:
        held: list[float] = []
        return _filled(x, held), held

    numbered = bt.BendedModule(lambda x: _scaled_by(x, x.shape[0], _double))
    filled = bt.BendedModule(fills)
    for bended in (numbered, filled):
        bended.interject(lambda node: node.function is not None, Itself())
    for size in (2, 3, 2):
        x = torch.ones(size)
        assert torch.equal(numbered(x), x * size * 2)
        assert filled(x)[1] == [float(size)]
    assert numbered.stats.replays == 2
    assert filled.stats.live == 3
    assert "may fill its arguments" in str(filled.why_live)


def _double(x: Tensor) -> Tensor:
    return x * 2


def test_it_sees_which_arguments_are_passed_by_name() -> None:
    class Shape(Interjection):
        self_contained = True

        def before(self, at: NodePass, inputs: Inputs) -> None:
            seen.append((len(inputs), *inputs.kwargs))

    def model(x: Tensor, scale: int = 2) -> Tensor:
        return x * scale if x.sum() > 0 else x

    seen: list[Any] = []
    bended = bt.BendedModule(model)
    bended.interject("", Shape())
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(bended(x, 2), x * 2)
        assert torch.equal(bended(x, scale=2), x * 2)
        assert torch.equal(bended(x=x), x * 2)
    assert seen == [(2,), (1, "scale"), (0, "x")] * 3
    assert bended.stats.traces == 3
    trace = bended.trace(x, 2)
    assert torch.equal(trace.replay(x, 2), x * 2)
    with pytest.raises(DivergenceError, match="by position"):
        trace.replay(x, scale=2)


class HalfInputs(bt.Interjection):
    """Halves the inputs of a node, and returns a new tensor for its output."""

    wants_inputs = True
    self_contained = True

    def before(self, at: bt.NodePass, inputs: bt.Inputs) -> bt.Inputs:
        return bt.Inputs(tuple(value * 0.5 for value in inputs), inputs.kwargs)

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Tensor) -> Tensor:
        return output * 1.0


class ComparesIdentity(nn.Module):
    """Compares tensors by identity, while a tensor is alive that only some calls make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        aside = self.aside(x) if x.sum() > 0 else None  # noqa: F841 - it is alive
        y = y.relu() if y.sum() > 0 else y
        y = self.last(y)
        y = y * 3 if y is x else y
        return y + 1 if y.mean() > 0 else y


def test_paths_join_whatever_tensors_are_alive_where_identity_is_tested() -> None:
    torch.manual_seed(0)
    model = ComparesIdentity()
    bended = bt.BendedModule(copy.deepcopy(model))
    for name in ("first", "aside", "last"):
        bended.interject(name, HalfInputs())
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    for x in torch.randn(60, 2, 4):
        assert torch.equal(bended(x), model(x))
    assert bended.stats.live == 0
