"""Conversion to torch.fx and back: runnable, bitwise equal, guarded, refused where it must be."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import bendtrace as bt
from bendtrace.errors import ConversionError, DivergenceError
from tests.promise import bits

Calls = list[tuple[str, str]]


def calls(nodes: Iterable[fx.Node]) -> Calls:
    """(op, target) of each node."""
    return [(node.op, torch.typename(node.target)) for node in nodes]


def in_fx(module: fx.GraphModule) -> list[tuple[str, Any]]:
    return [(node.op, node.target) for node in module.graph.nodes]


# Models


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return F.log_softmax(self.head(torch.flatten(y, 1)), dim=-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x)
        return self.out(y[:, -1]), state


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out[chosen] = expert(x[chosen])
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x)
        return out, weights


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 2
        y.mul_(3).add_(x)
        y[0] += 1
        return self.act(y)


class Result(NamedTuple):
    mean: Tensor
    parts: list[Tensor]


@dataclass
class Stats:
    total: Tensor
    count: int
    extra: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def as_dict(x: Tensor) -> dict[str, Any]:
    return {"sum": x.sum(), "rows": x.shape[0], "both": (x, [x + 1, None, "text"])}


def as_dataclass(x: Tensor) -> Stats:
    return Stats(x.sum(), x.shape[0], {"max": x.max()})


def as_namedtuple(x: Tensor) -> Result:
    return Result(x.mean(), list(x.split(1)))


def nested_inputs(batch: dict[str, Any], past: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    x = batch["x"] + batch["more"][1]
    for key, value in past:
        x = x + key * value
    return x


class PartlyWithoutGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            frozen = self.fc(x)
        return frozen, self.fc(x) * frozen


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = self.fc(x)
        return x * self.fc.weight.sum()


def looped(x: Tensor, n: int, scale: float) -> Tensor:
    for i in range(n):
        x = x * scale + i
    return x


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


MODELS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[Any, ...]]] = {
    "cnn": (lambda: CNN().eval(), (randn(2, 1, 8, 8),)),
    "cnn in training": (CNN, (randn(2, 1, 8, 8),)),
    "lstm": (Recurrent, (randn(2, 5, 4),)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (randn(2, 5, 8),),
    ),
    "experts": (Experts, (randn(6, 4),)),
    "attention": (Attention, (randn(2, 5, 8),)),
    "in place": (InPlace, (randn(3, 4),)),
    "dict": (lambda: as_dict, (randn(3, 4),)),
    "dataclass": (lambda: as_dataclass, (randn(3, 4),)),
    "named tuple": (lambda: as_namedtuple, (randn(3, 4),)),
    "nested inputs": (
        lambda: nested_inputs,
        ({"x": randn(3), "more": [None, randn(3)]}, ((randn(3), randn(3)), (randn(3), randn(3)))),
    ),
    "no grad": (PartlyWithoutGrad, (randn(2, 4),)),
    "shared": (Shared, (randn(2, 4),)),
    "numbers": (lambda: looped, (randn(2, 4), 3, 0.5)),
}


def twins(make: Callable[[], Callable[..., Any]]) -> list[Any]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made


@pytest.mark.parametrize("fold", [False, True], ids=["ops", "leaf modules"])
@pytest.mark.parametrize("name", MODELS)
def test_the_fx_graph_gives_what_eager_gives(name: str, fold: bool) -> None:
    make, args = MODELS[name]
    eager, model = twins(make)
    trace = bt.trace(model, *copy.deepcopy(args))
    eager(*copy.deepcopy(args))
    module = trace.to_fx(fold=fold)
    module.graph.lint()
    for _ in range(2):
        assert bits(module(*copy.deepcopy(args))) == bits(eager(*copy.deepcopy(args)))


@pytest.mark.parametrize("name", ["cnn", "lstm", "experts", "attention", "no grad", "shared"])
def test_gradients_flow_through_the_fx_graph_to_the_model_s_parameters(name: str) -> None:
    make, args = MODELS[name]
    eager, model = twins(make)
    module = bt.trace(model, *args).to_fx(fold=True)
    eager(*args)  # the trace was a call too
    for called in (module, eager):
        out = called(*args)
        out = out[-1] if isinstance(out, tuple) else out
        out = out[-1] if isinstance(out, tuple) else out
        out.sum().backward()
    given = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert bits(given) == bits({name: p.grad for name, p in eager.named_parameters()})
    assert any(gradient is not None for gradient in given.values())


# The same graph as fx


def traced_by_fx(model: nn.Module) -> list[tuple[str, Any]]:
    return in_fx(fx.symbolic_trace(model))


def test_a_folded_cnn_has_the_nodes_that_fx_gives_it() -> None:
    model = CNN().eval()
    module = bt.trace(model, randn(2, 1, 8, 8)).to_fx(fold=True)
    assert in_fx(module) == traced_by_fx(model)
    assert [target for op, target in in_fx(module) if op == "call_module"] == [
        "features.0", "features.1", "features.2", "features.3", "head",
    ]  # fmt: skip


def test_a_folded_mlp_has_the_nodes_that_fx_gives_it() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()))
    args = (randn(3, 2),)
    theirs = [(op, target) for op, target in traced_by_fx(model) if op != "placeholder"]
    module = bt.trace(model, *args).to_fx(fold=True)
    assert [(op, t) for op, t in in_fx(module) if op != "placeholder"] == theirs


def test_a_module_called_twice_is_two_nodes_without_its_parameters() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.fc(self.fc(x)), x)

    model = Twice()
    assert in_fx(bt.trace(model, randn(2, 4)).to_fx(fold=True)) == traced_by_fx(model)


def test_parameters_that_are_used_outside_of_their_module_stay_nodes() -> None:
    module = bt.trace(Shared(), randn(2, 4)).to_fx(fold=True, guards=False)
    assert [(op, t) for op, t in in_fx(module) if op in ("get_attr", "call_module")] == [
        ("get_attr", "fc.weight"),
        ("call_module", "fc"),
        ("call_module", "fc"),
    ]


def test_which_modules_fold_can_be_chosen() -> None:
    model = CNN().eval()
    trace = bt.trace(model, randn(2, 1, 8, 8))
    module = trace.to_fx(fold=lambda module: isinstance(module, nn.Sequential))
    assert [target for op, target in in_fx(module) if op == "call_module"] == ["features"]
    assert bits(module(randn(2, 1, 8, 8))) == bits(model(randn(2, 1, 8, 8)))


def test_a_folded_module_with_several_results_is_taken_apart() -> None:
    model = Recurrent()
    module = bt.trace(model, randn(2, 5, 4)).to_fx(fold=True)
    assert in_fx(module) == traced_by_fx_with_items(model)


def traced_by_fx_with_items(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        ("placeholder", "x"),
        ("call_module", "lstm"),
        ("call_function", operator.getitem),  # y
        ("call_function", operator.getitem),  # the state
        ("call_function", operator.getitem),  # its first
        ("call_function", operator.getitem),
        ("call_function", operator.getitem),
        ("call_function", operator.getitem),  # y[:, -1]
        ("call_module", "out"),
        ("output", "output"),
    ]


def test_the_module_has_the_model_s_own_parameters_and_modules() -> None:
    model = CNN().eval()
    trace = bt.trace(model, randn(2, 1, 8, 8))
    ops, folded = trace.to_fx(), trace.to_fx(fold=True)
    assert dict(ops.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert ops.get_parameter(name) is parameter
        assert folded.get_parameter(name) is parameter
    assert folded.get_submodule("features.0") is model.features[0]
    assert ops.get_buffer("features.1.running_mean") is model.features[1].running_mean
    assert ops.training is False


def test_tensors_from_elsewhere_become_buffers_of_the_module() -> None:
    bias = torch.ones(3)
    module = bt.trace(lambda x: x + bias, randn(3)).to_fx()
    assert [name for name, _ in module.named_buffers()] == ["_bias"]
    assert torch.equal(module(randn(3)), randn(3) + 1)


def test_nodes_keep_shape_dtype_and_place() -> None:
    module = bt.trace(CNN().eval(), randn(2, 1, 8, 8)).to_fx()
    (conv,) = (node for node in module.graph.nodes if node.name == "conv2d")
    assert conv.meta["shape"] == (2, 4, 6, 6)
    assert conv.meta["dtype"] is torch.float32
    assert conv.meta["site"].startswith(f"{__file__}:")


def test_calls_are_said_as_fx_says_them() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.view(2, -1)
        y[0] = 1
        return y.T @ y[0, :2] + torch.sigmoid(x)[0]

    nodes = list(bt.trace(model, randn(2, 2)).to_fx().graph.nodes)
    assert [(node.op, node.target) for node in nodes[1:-1]] == [
        ("call_method", "view"),
        ("call_function", operator.setitem),
        ("call_function", getattr),
        ("call_function", operator.getitem),
        ("call_method", "matmul"),
        ("call_function", torch.sigmoid),
        ("call_function", operator.getitem),
        ("call_method", "add"),
    ]


def test_the_graph_module_can_be_transformed_with_fx() -> None:
    module = bt.trace(lambda x: torch.relu(x) + 1, randn(3)).to_fx()
    for node in module.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.neg
    module.recompile()
    assert torch.equal(module(randn(3)), -randn(3) + 1)


def test_the_graph_module_can_be_interpreted_and_copied() -> None:
    module = bt.trace(looped, randn(3), 2, 0.5).to_fx()
    wanted = bits(looped(randn(3), 2, 0.5))
    assert bits(fx.Interpreter(module).run(randn(3), 2, 0.5)) == wanted
    assert bits(copy.deepcopy(module)(randn(3), 2, 0.5)) == wanted


# Guards


def test_another_branch_is_a_divergence_that_says_where() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    module = bt.trace(model, torch.ones(2)).to_fx()
    assert torch.equal(module(torch.full((5,), 2.0)), torch.full((5,), 3.0))
    line = model.__code__.co_firstlineno + 1
    with pytest.raises(DivergenceError) as caught:
        module(-torch.ones(2))
    assert str(caught.value) == (
        f"conditional expression `x.sum() > 0` at {__file__}:{line} "
        "was True when traced and is False now"
    )
    sized = bt.trace(lambda x: x * x.shape[0], torch.ones(2)).to_fx()
    assert torch.equal(sized(torch.ones(3)), torch.full((3,), 3.0))
    with pytest.raises(DivergenceError, match=r"the number of items at .* was 1 when traced"):
        sized(torch.ones(2, 2))


@pytest.mark.parametrize("fold", [False, True], ids=["ops", "leaf modules"])
def test_another_size_in_a_loop_is_a_divergence(fold: bool) -> None:
    module = bt.trace(Shared(), randn(2, 4)).to_fx(fold=fold)
    with pytest.raises(DivergenceError, match=r"was 2 when traced and is 3 now"):
        module(randn(3, 4))


def test_another_number_of_rows_walked_is_a_divergence() -> None:
    module = bt.trace(lambda x: sum(list(x)), randn(2, 4)).to_fx()
    with pytest.raises(DivergenceError, match=r"was 2 when traced and is 3 now"):
        module(randn(3, 4))


def test_another_rank_or_dtype_that_was_looked_at_is_a_divergence() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        if y.dim() == 2:
            y = y.sum(0)
        return y.double() if y.dtype == torch.float32 else y

    module = bt.trace(model, randn(2, 4)).to_fx()
    assert torch.equal(module(randn(5, 4)), model(randn(5, 4)))
    with pytest.raises(DivergenceError, match=r"was 2 when traced and is 3 now"):
        module(randn(2, 4, 4))
    with pytest.raises(
        bt.errors.DivergenceError, match=r"torch.float32 when traced and is torch.float64"
    ):
        module(randn(2, 4).double())


def test_another_plain_argument_is_a_divergence() -> None:
    def model(x: Tensor, flip: bool, mode: str | None = None) -> Tensor:
        x = -x if flip else x
        return x + 1 if mode is None else x

    module = bt.trace(model, randn(2), True, None).to_fx()
    assert torch.equal(module(randn(2), True, None), 1 - randn(2))
    with pytest.raises(DivergenceError) as caught:
        module(randn(2), False, None)
    assert str(caught.value) == "argument flip was True when traced and is False now"
    with pytest.raises(
        bt.errors.DivergenceError, match=r"argument mode was None when traced and is 'm'"
    ):
        module(randn(2), True, "m")


def test_another_structure_of_an_argument_is_a_divergence() -> None:
    def model(xs: list[Tensor], options: dict[str, Any]) -> Tensor:
        total = torch.zeros(2)
        for x in xs:
            total = total + x
        return total * options.get("scale", 1)

    one = randn(2)
    module = bt.trace(model, [one, one + 1], {"scale": 2}).to_fx()
    assert torch.equal(module([one, one], {"scale": 2}), one * 4)
    for args, message in [
        (([one], {"scale": 2}), "argument xs has different content than when traced"),
        (((one, one), {"scale": 2}), "argument xs was a list when traced and is a tuple now"),
        (
            ([one, 1], {"scale": 2}),
            "argument xs[1] was a tensor when traced and is not a tensor now",
        ),
        (([one, one], {}), "argument options has different content than when traced"),
        (([one, one], {"scale": 3}), "argument options['scale'] was 2 when traced and is 3 now"),
    ]:
        with pytest.raises(DivergenceError) as caught:
            module(*args)
        assert str(caught.value) == message


def test_a_traced_number_is_guarded_only_where_it_was_consumed() -> None:
    module = bt.trace(looped, randn(2), 3, 0.5).to_fx()
    assert torch.equal(module(randn(2), 3, 0.25), looped(randn(2), 3, 0.25))
    with pytest.raises(DivergenceError, match=r"was 3 when traced and is 4 now"):
        module(randn(2), 4, 0.5)


def test_without_guards_the_traced_path_is_taken() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    module = bt.trace(model, torch.ones(2)).to_fx(guards=False)
    assert all("check" not in node.name for node in module.graph.nodes)
    assert torch.equal(module(-torch.ones(2)), torch.zeros(2))


def test_plain_tensors_need_no_check() -> None:
    module = bt.trace(CNN().eval(), randn(2, 1, 8, 8)).to_fx(fold=True)
    assert all("check" not in node.name for node in module.graph.nodes)


# What fx cannot say


def test_setting_an_attribute_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    trace = bt.trace(Model(), randn(2))
    with pytest.raises(ConversionError) as caught:
        trace.to_fx()
    assert str(caught.value) == "the run sets self.last, which an fx graph cannot express"
    assert isinstance(caught.value, ValueError)


def test_catching_an_exception_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            return x @ x
        except RuntimeError:
            return -x

    trace = bt.trace(model, randn(2, 3))
    with pytest.raises(ConversionError) as caught:
        trace.to_fx()
    line = model.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"the run catches RuntimeError at {__file__}:{line}, which an fx graph cannot express"
    )


@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode]
)
def test_autocast_and_inference_mode_are_refused(mode: Callable[[], Any]) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        with mode():
            z = y @ y
        return y + 1 if z is None else y

    trace = bt.trace(model, randn(2, 2))
    with pytest.raises(ConversionError) as caught:
        trace.to_fx()
    assert str(caught.value) == "the run enters or leaves autocast or inference mode on its way"


def test_a_run_that_cannot_be_repeated_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return x * float(x.numpy().tobytes()[0])

    trace = bt.trace(model, torch.ones(2))
    with pytest.raises(
        bt.errors.ConversionError, match=r"^the run cannot be repeated: numpy at .*test_fx"
    ):
        trace.to_fx()


def test_objects_of_the_model_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: list[int] = []

        def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
            return x + 1, self.cache

    trace = bt.trace(Model(), randn(2))
    with pytest.raises(ConversionError) as caught:
        trace.to_fx()
    assert str(caught.value) == "self.cache is an object of the model, not a value of the graph"


def test_a_graph_of_unknown_origin_is_refused() -> None:
    with pytest.raises(ConversionError) as caught:
        bt.graph.to_fx(bt.graph.Graph())
    assert str(caught.value) == (
        "the graph is neither the mirror of a trace nor one from `from_fx`"
    )


# And back


@pytest.mark.parametrize("name", ["cnn", "lstm", "dict", "nested inputs", "in place"])
@pytest.mark.parametrize("fold", [False, True], ids=["ops", "leaf modules"])
def test_from_fx_keeps_nodes_targets_and_arguments(name: str, fold: bool) -> None:
    make, args = MODELS[name]
    module = bt.trace(make(), *args).to_fx(fold=fold)
    graph = bt.graph.from_fx(module)
    assert list(graph) == [node.name for node in module.graph.nodes]
    for node in module.graph.nodes:
        data = graph.nodes[node.name]
        assert (data["op"], data["target"]) == (node.op, node.target)
        sources = {source for source, target, _ in graph.data_edges() if target == node.name}
        assert sources == {used.name for used in node.all_input_nodes}
    assert len(graph.flow_steps) == 0


def test_from_fx_agrees_with_the_mirror_it_came_from() -> None:
    trace = bt.trace(lambda x: torch.cat([x, x.relu() * 2], 0)[:3], randn(2, 2))
    again = bt.graph.from_fx(trace.to_fx())
    for name, data in trace.graph.nodes(data=True):
        other = again.nodes[name]
        assert (other["op"], other["target"]) == (data["op"], data["target"])
        assert (other["args"], other["kwargs"]) == (data["args"], data["kwargs"])
    assert sorted(again.data_edges()) == sorted(trace.graph.data_edges())


@pytest.mark.parametrize("name", ["cnn", "lstm", "experts", "dict", "dataclass", "numbers"])
def test_a_graph_from_fx_goes_back_to_fx(name: str) -> None:
    make, args = MODELS[name]
    model = make()
    module = bt.trace(model, *args).to_fx(fold=True)
    again = bt.graph.to_fx(bt.graph.from_fx(module))
    again.graph.lint()
    assert in_fx(again) == in_fx(module)
    assert [node.name for node in again.graph.nodes] == [node.name for node in module.graph.nodes]
    assert bits(again(*args)) == bits(module(*args))
    assert str(bt.graph.from_fx(again)) == str(bt.graph.from_fx(module))


def test_a_graph_that_fx_traced_itself_goes_there_and_back() -> None:
    model = CNN().eval()
    theirs = fx.symbolic_trace(model)
    again = bt.graph.to_fx(bt.graph.from_fx(theirs))
    assert in_fx(again) == in_fx(theirs)
    assert bits(again(randn(2, 1, 8, 8))) == bits(model(randn(2, 1, 8, 8)))


def test_a_graph_from_fx_can_be_changed_before_it_goes_back() -> None:
    graph = bt.graph.from_fx(fx.symbolic_trace(nn.Sequential(nn.ReLU())))
    graph.nodes["_0"].update(op="call_function", target=torch.neg)
    assert torch.equal(bt.graph.to_fx(graph)(torch.ones(2)), -torch.ones(2))
    graph.remove_node("_0")
    with pytest.raises(
        bt.errors.ConversionError, match=r"^%_0 is used before it is defined, or does not"
    ):
        bt.graph.to_fx(graph)


def test_what_a_trace_recorded_is_unchanged_by_a_conversion() -> None:
    trace = bt.trace(Experts(), randn(6, 4))
    before = str(trace.graph), trace.code
    with contextlib.suppress(bt.BendtraceError):
        trace.to_fx(fold=True)(randn(5, 4))
    assert (str(trace.graph), trace.code) == before
