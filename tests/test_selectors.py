"""Node selectors: what each of them means in recorded runs of small models, and as a value."""

from __future__ import annotations

import copy
import linecache
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import bendtrace as bt
from bendtrace import node_selector as ns
from bendtrace.errors import BendtraceError, InputError
from bendtrace.insert.selector_algebra import ALIASES, FAMILIES, PARTS
from bendtrace.insert.selector_source import branches_around
from bendtrace.log.path_views import Candidate, CandidateGraph, NodeSelector
from bendtrace.log.run import Run
from bendtrace.python.sites import InstructionPlace, Span
from tests.shares import some
from tests.sweep.modules import MODULES

ROOT = Path(__file__).parent.parent


def found(selector: Any, function: Callable[..., Any], *args: Any) -> list[str]:
    trace = bt.trace(function, *args)
    return [node.path for node in ns.find(selector, trace)]


def called(
    function: Any = None, *, module: nn.Module | None = None, scope: Any = None
) -> Candidate:
    return Candidate("some.node", "node", module, "", function, scope, "")


# Families


HOLDERS = {
    "Module": "the base of all modules",
    "Container": "an old name of it",
    "Sequential": "holds modules and calls them",
    "ModuleList": "holds modules and is not called",
    "ModuleDict": "holds modules and is not called",
    "ParameterList": "holds parameters and is not called",
    "ParameterDict": "holds parameters and is not called",
    "DataParallel": "calls copies of a module on other devices",
}
# What torch.nn.functional has and is no layer.
OTHER_FUNCTIONS = {
    "conv_tbc": "has no heading in the documentation",
    "grouped_mm": "a product of matrices",
    "scaled_addmm": "a product of matrices",  # since torch 2.15
    "scaled_addmm_": "a product of matrices",
    "scaled_grouped_mm": "a product of matrices",
    "scaled_mm": "a product of matrices",
    "one_hot": "makes a code of numbers, and has no parameters",
    "pdist": "distances of all pairs, as torch.cdist",
    "assert_int_or_pair": "a helper",
    "boolean_dispatch": "a helper",
    "handle_torch_function": "a helper",
    "has_torch_function": "a helper",
    "has_torch_function_unary": "a helper",
    "has_torch_function_variadic": "a helper",
}
SINCE_2_9 = {"LinearCrossEntropyLoss"}
ONLY_FUNCTIONS = {
    "GumbelSoftmax", "Normalize", "ScaledDotProductAttention", "GridSample", "AffineGrid",
}  # fmt: skip
FAMILY = {name: getattr(ns, name) for name in FAMILIES}
MEMBERS = [(family, member) for family, members in FAMILIES.items() for member in members]


def test_each_class_of_torch_nn_is_in_one_family_or_holds_other_modules() -> None:
    classes = {
        name
        for name, cls in vars(nn).items()
        if isinstance(cls, type) and issubclass(cls, nn.Module)
    }
    members = [member for _, member in MEMBERS]
    assert len(set(members)) == len(members)
    assert classes - set(members) - set(ALIASES) == set(HOLDERS)
    assert {name for name in members if not hasattr(nn, name)} - SINCE_2_9 == ONLY_FUNCTIONS
    assert set(ALIASES.values()) <= set(members)
    assert set(PARTS) <= set(members)


def test_each_function_of_torch_nn_functional_is_in_one_family_or_is_no_layer() -> None:
    names = {
        name
        for name, function in vars(F).items()
        if not name.startswith("_") and callable(function) and not isinstance(function, type)
        and getattr(function, "__module__", "").startswith("torch")
    }  # fmt: skip
    families = {name: [f for f, s in FAMILY.items() if s.matches(called(getattr(F, name)))]
                for name in names}  # fmt: skip
    assert {name for name, of in families.items() if not of} <= set(OTHER_FUNCTIONS)
    assert [name for name, of in families.items() if len(of) > 1] == []


def spellings(family: str, member: str) -> dict[str, Any]:
    """The functions, methods and operators that do what a layer does, by where they are."""
    spelled = {}
    for name in FAMILIES[family][member].split():
        for prefix, place in (
            ("F.", F), ("torch.", torch), ("Tensor.", Tensor), ("aten.", torch.ops.aten),
        ):  # fmt: skip
            for spelling in (name, f"{name}_"):
                if hasattr(place, spelling) and f"{prefix}{spelling}" not in UNLIKE:
                    spelled[f"{prefix}{spelling}"] = getattr(place, spelling)
    return spelled


UNLIKE = {"Tensor.unfold", "aten.unfold"}
NO_FUNCTION = {
    "Softmax2d", "AdaptiveLogSoftmaxWithLoss", "RNNBase", "RNNCellBase", "Transformer",
    "TransformerEncoder", "TransformerDecoder", "TransformerDecoderLayer", "Identity",
    "CrossMapLRN2d",
}  # fmt: skip


@pytest.mark.parametrize(("family", "member"), MEMBERS)
def test_a_member_means_the_class_the_functions_the_methods_and_the_operators(
    family: str, member: str
) -> None:
    selector = getattr(FAMILY[family], member)
    cls = getattr(nn, member, None)
    if cls is not None:
        module = cls.__new__(cls)
        assert selector.matches(called(module=module))
        assert FAMILY[family].matches(called(module=module))
    spelled = spellings(family, member)
    assert bool(spelled) is (member not in NO_FUNCTION) or member in SINCE_2_9
    for where, function in spelled.items():
        assert selector.matches(called(function)), where
        assert FAMILY[family].matches(called(function)), where
        others = [other for other in FAMILIES if other != family]
        assert not any(FAMILY[other].matches(called(function)) for other in others), where
        if where.startswith("aten."):
            overload = getattr(function, function.overloads()[0])
            assert selector.matches(called(overload)), where
    assert not selector.matches(called(torch.add))
    assert not selector.matches(called(module=nn.Module()))


def test_the_seed_s_example_is_meant_however_it_is_spelled() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.inplace = nn.ReLU(), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(x) + F.relu(x) + torch.relu(x) + x.relu() + F.relu(x, inplace=True)
            x = x + torch.ops.aten.relu(x) + torch.ops.aten.relu.default(x) + F.gelu(x)
            x = F.relu_(x.clone()) + torch.relu_(x.clone()) + x.clone().relu_()
            return self.inplace(x).tanh()

    relus = found(ns.Activations.is_relu, Model(), torch.ones(3))
    assert relus == [
        "act", "relu", "relu_1", "relu_2", "relu_3", "relu_4", "relu_default", "relu_",
        "relu__1", "relu__2", "inplace",
    ]  # fmt: skip
    assert found(ns.Activations, Model(), torch.ones(3)) == [
        *relus[:7], "gelu", *relus[7:], "tanh",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", some(sorted(set(MODULES) - {f"nn.{name}" for name in ALIASES}), 3))
def test_a_layer_that_runs_is_meant_once_and_by_its_functional_when_that_is_called(
    name: str, training: bool
) -> None:
    info = MODULES[name]
    member = info.module_cls.__name__
    family = next(family for family, members in FAMILIES.items() if member in members)
    selector = getattr(FAMILY[family], member)
    torch.manual_seed(0)
    given = [
        given
        for given in info.module_inputs_func(
            info, device="cpu", dtype=torch.float64 if "Fractional" in name else torch.float32,
            requires_grad=False, training=training,
        )
        if given.forward_input is not None
    ]  # fmt: skip
    for one in {id(one): one for one in (given[0], given[-1])}.values():
        made, handed = one.constructor_input, one.forward_input
        layer = info.module_cls(*made.args, **made.kwargs).train(training)
        trace = bt.trace(Around(layer), *handed.args, **handed.kwargs)
        graph = Run(trace._recording, trace.function).candidates
        assert selector.select(graph) == {"layer"}
        free = [replace(node, scope=None) for node in graph if not node.is_module]
        known = any(selector.matches(node) for node in free)
        assert known is (member not in NO_FUNCTION | COMPOSED)
        if member not in NO_FUNCTION | COMPOSED:  # the family has nothing else in the layer
            assert FAMILY[family].select(graph) == {"layer"}


# Layers whose functional is not what they call: they call others, or what it consists of.
COMPOSED = {"ReLU6", "MultiheadAttention", "TransformerEncoderLayer"}


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


@pytest.mark.more
def test_what_a_layer_consists_of_is_not_meant_beside_it_but_what_it_calls_is() -> None:
    padded = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    image = torch.ones(1, 1, 4, 4)
    assert found(ns.Padding | ns.Convolutions, Around(padded), image) == ["layer"]
    assert found(ns.Activations, Around(nn.Softmax2d()), image) == ["layer"]
    assert found(ns.Normalization.BatchNorm1d, Around(nn.BatchNorm2d(1)), image) == []
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    x = torch.ones(3, 1, 4)
    assert found(ns.Activations, Around(encoder), x) == ["layer.relu"]
    attention = nn.MultiheadAttention(4, 2)
    assert found(ns.Activations, Around(attention), x, x, x) == ["layer.softmax"]
    assert found(ns.Transformer, Around(attention), x, x, x) == ["layer"]
    assert found(ns.matches_function(F.relu), Around(nn.ReLU()), x) == ["layer.relu"]


def test_a_model_that_is_itself_a_layer_is_meant_as_a_whole() -> None:
    assert found(ns.Activations, nn.ReLU(), torch.ones(2)) == [""]


def test_subclasses_of_a_layer_are_meant_and_what_they_call_is_their_own() -> None:
    class Low(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.linear(x, self.weight) + F.linear(x, self.weight, self.bias))

    model = Around(Low(2, 2))
    assert found(ns.Linear, model, torch.ones(1, 2)) == ["layer"]
    assert found(ns.Activations, model, torch.ones(1, 2)) == ["layer.relu"]
    assert found(ns.Activations.Hardtanh, Around(nn.ReLU6()), torch.ones(2)) == ["layer"]
    assert found(ns.Activations.ReLU6, Around(nn.Hardtanh()), torch.ones(2)) == []


def test_the_functions_that_recurrent_layers_call_are_meant_by_them() -> None:
    lstm = nn.LSTM(2, 2)

    def model(x: Tensor) -> Any:
        zeros = x.new_zeros(1, 1, 2)
        return torch.lstm(x, (zeros, zeros), lstm._flat_weights, True, 1, 0.0, False, False, False)

    assert found(ns.Recurrent, model, torch.ones(3, 1, 2)) == ["lstm"]
    assert found(ns.Recurrent.GRU, model, torch.ones(3, 1, 2)) == []


def test_methods_of_other_things_by_the_same_name_are_not_meant() -> None:
    image = torch.ones(1, 1, 4, 4)
    assert found(ns.Convolutions, lambda x: x.unfold(2, 2, 2), image) == []
    assert found(ns.Convolutions.is_unfold, lambda x: F.unfold(x, 2), image) == ["unfold"]


def test_lazy_layers_are_the_layers_that_they_become() -> None:
    assert ns.Convolutions.LazyConv2d == ns.Convolutions.Conv2d
    model = nn.Sequential(nn.LazyLinear(2))
    model(torch.ones(1, 3))
    assert found(ns.Linear.LazyLinear, model, torch.ones(1, 3)) == ["sub_0"]


def test_a_function_that_is_unlike_torch_s_is_in_no_family() -> None:
    @dataclass
    class Unhashable:
        factor: float

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    assert not ns.Activations.matches(called(Unhashable(2.0)))
    assert not ns.Activations.matches(called(torch.ops.aten.add.Tensor))


@pytest.mark.parametrize(
    "name",
    [
        "Activations.is_relu", "Activations.is_leaky_relu", "Activations.is_logsigmoid",
        "Activations.is_adaptive_log_softmax_with_loss", "Activations.is_activation",
        "Convolutions.is_conv_transpose2d", "Convolutions.is_convolution", "Pooling.is_max_pool2d",
        "Pooling.is_fractional_max_pool3d", "Pooling.is_pooling", "Padding.is_pad",
        "Padding.is_padding", "Normalization.is_batch_norm", "Normalization.is_local_response_norm",
        "Recurrent.is_rnn", "Recurrent.is_lstm_cell", "Recurrent.is_recurrent",
        "Transformer.is__transformer_", "Transformer.is_transformer_encoder",
        "Transformer.is_transformer", "Linear.is_linear_not_bilinear", "Linear.is_identity",
        "Linear.is_linear", "Dropout.is__dropout_", "Dropout.is_featurealphadropout",
        "Dropout.is_dropout", "Sparse.is_embedding_bag", "Distance.is_cosine_similarity",
        "Loss.is_cross_entropy", "Loss.is_triplet_margin_with_distance_loss", "Loss.is_loss",
        "Vision.is_upsampling_nearest", "Vision.is_pixel_shuffle", "Shuffle.is_channel_shuffle",
        "Utility.is_flatten", "Utility.is_utility",
    ],
)  # fmt: skip
def test_torchwatcher_s_names_of_layers_are_there(name: str) -> None:
    family, _, group = name.partition(".")
    selector = getattr(FAMILY[family], group)
    assert set(selector.members) <= set(FAMILIES[family])
    assert selector.members
    assert group in dir(FAMILY[family])


def test_groups_mean_what_torchwatcher_s_mean() -> None:
    assert ns.Activations.is_relu == ns.Activations.ReLU
    assert ns.Activations.is_activation is ns.Activations
    assert ns.Normalization.is_batch_norm.classes == (
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    )  # fmt: skip
    assert ns.Linear.is_linear.members == ("Identity", "Linear", "Bilinear")
    assert ns.Recurrent.is_lstm.members == ("LSTM",)
    assert ns.is_conv is ns.is_convolution is ns.is_convolutional is ns.Convolutions
    assert ns.is_embed is ns.Sparse
    assert F.relu in ns.Activations.ReLU.functions
    assert Tensor.relu_ in ns.Activations.ReLU.functions


def test_families_complete_their_members() -> None:
    assert {"ReLU", "is_relu", "is_activation", "matches", "nth"} <= set(dir(ns.Activations))
    assert "LazyConv2d" in dir(ns.Convolutions)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("Activations", "Relu",
         "Activations has no layer Relu; did you mean ReLU or RReLU or ReLU6?"),
        ("Activations", "Conv2d",
         "Activations has no Conv2d; Convolutions has: Convolutions.Conv2d"),
        ("Shuffle", "is_pixel_shuffle",
         "Shuffle has no is_pixel_shuffle; Vision has: Vision.is_pixel_shuffle"),
        ("Utility", "XYZ", "Utility has no layer XYZ; it has Flatten, Unflatten"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_there_is_an_error_with_near_misses(
    family: str, name: str, message: str
) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(FAMILY[family], name)
    assert str(raised.value) == message
    assert isinstance(raised.value, BendtraceError)


# Values


SELECTORS = [
    "Activations",
    "Activations.ReLU",
    "Normalization.is_batch_norm",
    "Activations.ReLU & is_module",
    "Activations.ReLU | Activations.GELU & ~is_module",
    "(Activations.ReLU | Activations.GELU) & ~(is_module & in_loop())",
    "Activations.ReLU ^ is_module ^ has_parameters",
    "(Activations.ReLU ^ is_module) & is_parametrized",
    "nth(Activations, 2)",
    "first(Activations)",
    "last(Activations | is_module)",
    "match_slice(Activations, 1, None, 2)",
    "has_following(Activations.ReLU)",
    "has_preceding(Convolutions, within=3)",
    "has_following(Convolutions, within=None)",
    "between(matches_path('embed'), matches_path('head'))",
    "matches_name('relu_1')",
    "matches_path(re.compile('^layers_0'))",
    "matches_qualified_name('layers.0.mlp')",
    "source_text('self.conv1(x)')",
    "matches_function('relu', 'gelu')",
    "under_branch()",
    "under_branch('x.norm() > 3', side=True)",
    "under_branch(41, file='model.py', side=False)",
    "in_loop(re.compile('range'))",
    "in_loop()",
    "at_line(41, file='model.py')",
    "at_line(41)",
    "with_shape(None, 64)",
    "with_shape(..., 3)",
    "with_shape()",
    "with_dtype(torch.float32)",
    "select_all(is_module)",
]


@pytest.mark.parametrize("text", SELECTORS)
def test_selectors_made_alike_are_equal_and_print_as_what_makes_them(text: str) -> None:
    names = {**vars(ns), "re": re, "torch": torch}
    one, other = eval(text, dict(names)), eval(text, dict(names))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == text.replace("select_all(is_module)", "is_module")
    assert eval(repr(one), dict(names)) == one
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one
        assert twin.looks_ahead == one.looks_ahead


def test_no_two_of_them_are_equal() -> None:
    made = [eval(text, {**vars(ns), "re": re, "torch": torch}) for text in SELECTORS]
    made = [*made, ns.is_parametrized, ns.has_parameters]
    assert len(set(made)) == len(made) == len({repr(selector) for selector in made})


def test_predicates_modules_and_functions_are_equal_by_identity() -> None:
    linear = nn.Linear(2, 2)

    def wide(node: Any) -> bool:
        return False

    assert ns.node_lambda(wide) == ns.node_lambda(wide) != ns.matches_module_lambda(wide)
    assert ns.matches_module(linear) == ns.matches_module(linear)
    assert ns.matches_module(linear) != ns.matches_module(nn.Linear(2, 2))
    assert ns.matches_function(F.relu) != ns.matches_function(torch.relu)
    assert ns.matches_module_class(nn.Linear) != ns.matches_module_class(nn.ReLU)
    assert repr(ns.matches_module(linear) | ns.node_lambda(wide)) == (
        "matches_module(<Linear>) | node_lambda(wide)"
    )
    assert repr(ns.matches_module_class(nn.Linear, nn.ReLU)) == "matches_module_class(Linear, ReLU)"
    assert repr(ns.with_shape(lambda shape: True)) == "with_shape(<lambda>)"
    assert repr(ns.matches_function(F.relu)) == "matches_function(relu)"


def test_combinations_know_what_has_to_be_known() -> None:
    shape, ahead, plain = ns.with_shape(2), ns.first(ns.is_module), ns.is_module
    kinds = {True: [], False: []}
    for made in (plain & plain, ~plain, plain | shape, ns.in_loop(), ns.Activations):
        kinds[made.looks_ahead].append(made)
    assert not kinds[True]
    for made in (
        ahead & plain, plain | ahead, ~ahead, ahead ^ plain, ns.nth(plain, 1), plain.last(),
        plain.slice(1), ns.has_following(plain), ns.has_preceding(plain), ns.between(plain, plain),
    ):  # fmt: skip
        assert made.looks_ahead, made
    needing = [
        shape, ns.with_dtype(torch.float32), shape & plain, ~shape, shape.first(), shape.slice(1),
        ns.has_following(shape), ns.between(plain, shape), ahead | shape,
    ]  # fmt: skip
    assert all(made.needs_output for made in needing)
    assert not any(made.needs_output for made in (plain, ahead, ~ahead, ns.between(plain, ahead)))


def test_the_truth_of_a_selector_is_refused() -> None:
    with pytest.raises(InputError, match=r"is_module is neither true nor false: .* with &, "):
        _ = ns.is_module and ns.Activations
    with pytest.raises(InputError, match="neither true nor false"):
        _ = not ns.is_module


# Algebra


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) + x
        return self.head(F.gelu(x)).relu()


X = torch.ones(1, 4)


@pytest.fixture(scope="module")
def graph() -> CandidateGraph:
    model = Nested()
    return Run(bt.trace(model, X)._recording, model).candidates


EVERYTHING = [
    "", "block", "block.sub_0", "block.sub_0.linear", "block.sub_1", "block.sub_1.relu",
    "block.sub_2", "block.sub_2.linear", "block.sub_3", "block.sub_3.tanh", "add", "gelu", "head",
    "head.linear", "relu",
]  # fmt: skip


def in_order(selector: NodeSelector, graph: CandidateGraph) -> list[str]:
    meant = selector.select(graph)
    return [path for path in graph.nodes if path in meant]


def test_the_operators_mean_what_sets_do(graph: CandidateGraph) -> None:
    assert list(graph.nodes) == EVERYTHING
    act, mod = ns.Activations, ns.is_module
    assert in_order(act, graph) == ["block.sub_1", "block.sub_3", "gelu", "relu"]
    assert in_order(act & mod, graph) == ["block.sub_1", "block.sub_3"]
    assert in_order(act & ~mod, graph) == ["gelu", "relu"]
    assert in_order(act | ns.Linear, graph) == [
        "block.sub_0", "block.sub_1", "block.sub_2", "block.sub_3", "gelu", "head", "relu",
    ]  # fmt: skip
    assert in_order(act ^ mod, graph) == [
        "block", "block.sub_0", "block.sub_2", "gelu", "head", "relu",
    ]  # fmt: skip
    assert in_order(act ^ act ^ act, graph) == in_order(act, graph)
    assert in_order(mod & act & ~ns.Activations.ReLU, graph) == ["block.sub_3"]


def test_combinations_that_look_ahead_mean_the_same_as_those_that_do_not(
    graph: CandidateGraph,
) -> None:
    act, mod = ns.Activations, ns.is_module

    def slow(selector: ns.Selector) -> ns.Selector:
        return selector.slice()  # all of them, but by the whole graph

    for one, other in (
        (act & mod, slow(act) & mod), (act | mod, act | slow(mod)), (act ^ mod, slow(act) ^ mod),
        (~act, ~slow(act)), (act & ~mod, slow(act) & ~slow(mod)),
    ):  # fmt: skip
        assert other.looks_ahead
        assert one.select(graph) == other.select(graph)
        assert {n.path for n in graph if one.matches(n)} == other.select(graph)


def test_broad_selectors_do_not_mean_the_model_as_a_whole(graph: CandidateGraph) -> None:
    for broad in (
        ns.is_module, ~ns.Activations, ~ns.first(ns.is_module), ns.has_parameters,
        ns.with_shape(...), ns.with_dtype(torch.float32),
    ):  # fmt: skip
        assert "" not in broad.select(graph), broad
    for named in (ns.matches_path(""), ns.matches_module_class(Nested),
                  ns.matches_module(graph.nodes[""].module)):  # fmt: skip
        assert named.select(graph) == {""}


def test_other_things_can_stand_beside_a_selector(graph: CandidateGraph) -> None:
    act, model = ns.Activations, graph.nodes[""].module
    assert isinstance(model, Nested)
    assert in_order(act & (lambda node: node.scope is model), graph) == ["gelu", "relu"]
    assert in_order((lambda node: node.scope is model) & act, graph) == ["gelu", "relu"]
    assert in_order(act & "gelu", graph) == ["gelu"]
    assert in_order("gelu" & act, graph) == ["gelu"]
    assert in_order(act & re.compile("^block"), graph) == ["block.sub_1", "block.sub_3"]
    assert in_order(re.compile(r"\.3$") & act, graph) == ["block.sub_3"]  # by qualified name
    assert in_order(act | nn.Linear, graph) == in_order(act | ns.Linear, graph)
    assert in_order(nn.Linear | act, graph) == in_order(act | ns.Linear, graph)
    assert in_order(act | model.head, graph)[-2:] == ["head", "relu"]
    assert in_order(act ^ F.linear, graph) == in_order(act ^ ns.matches_function(F.linear), graph)
    assert in_order(act & ["gelu", nn.ReLU], graph) == ["block.sub_1", "gelu"]
    assert in_order(ns.first([nn.Tanh, "gelu"]), graph) == ["block.sub_3"]
    assert in_order(ns.has_following(nn.Tanh), graph) == ["block.sub_2", "block.sub_2.linear"]


def test_a_node_of_the_tree_can_stand_beside_a_selector_if_it_is_one_as_a_whole() -> None:
    trace = bt.trace(lambda x: x.chunk(2)[0].relu(), torch.ones(4))
    tree = trace.tree
    assert ns.Activations & tree.relu == ns.Activations & "relu"
    assert [node.path for node in ns.find(ns.has_following(tree.relu), trace)] == ["chunk"]
    for wrong in (tree.x, tree.output, tree.chunk.sub_0):
        with pytest.raises(InputError, match=r"cannot be selected|is not the path of a whole node"):
            _ = ns.Activations & wrong


@pytest.mark.parametrize("other", [None, 3, 2.5, int, {"gelu"}])
def test_what_says_not_which_nodes_are_meant_is_refused(other: Any) -> None:
    with pytest.raises(InputError, match=r"does not select nodes|subclasses of nn.Module"):
        _ = ns.Activations & other


@pytest.mark.parametrize("path", ["output|sub_0", "relu:2", "layers[3].mlp", "layers.3.mlp"])
def test_text_that_is_no_path_of_a_whole_node_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"paths that the tree prints, such as `layers_0.mlp`"):
        _ = ns.Activations & path


def test_what_is_ruled_out_is_not_asked_about(graph: CandidateGraph) -> None:
    def wide(node: Candidate) -> bool:
        assert node.module is not None
        return node.module.out_features > 2

    both = ns.matches_module_class(nn.Linear) & wide
    assert in_order(both, graph) == ["block.sub_0", "block.sub_2"]
    assert in_order(ns.match_slice(nn.Linear, 0) & wide, graph) == ["block.sub_0", "block.sub_2"]


def test_selectors_of_one_s_own_take_part(graph: CandidateGraph) -> None:
    @dataclass(frozen=True)
    class Deep(ns.Selector):
        levels: int

        def matches(self, node: Candidate) -> bool:
            return node.path.count(".") >= self.levels

    class Bare(NodeSelector):
        def matches(self, node: Candidate) -> bool:
            return node.path == "gelu"

    assert Deep(2) == Deep(2)
    assert in_order(Deep(2) & ns.matches_name("tanh"), graph) == ["block.sub_3.tanh"]
    assert in_order(Bare() | ns.Activations.Tanh, graph) == ["block.sub_3", "gelu"]
    assert in_order(~ns.as_selector(Deep(1)) & ns.Activations, graph) == ["gelu", "relu"]


# Order


def test_nth_first_and_last_go_by_the_order_in_which_nodes_begin(graph: CandidateGraph) -> None:
    act = ns.Activations
    assert in_order(ns.nth(act, 1), graph) == ["block.sub_3"]
    assert in_order(ns.nth(act, -2), graph) == ["gelu"]
    assert in_order(ns.first(act), graph) == ["block.sub_1"]
    assert in_order(ns.last(act), graph) == ["relu"]
    assert in_order(ns.nth(act, 4), graph) == in_order(ns.nth(act, -5), graph) == []
    assert in_order(ns.first(ns.is_module), graph) == ["block"]
    assert in_order(act.first() | act.last(), graph) == ["block.sub_1", "relu"]
    assert act.nth(1) == ns.nth(act, 1)
    assert act.first() == ns.first(act) == ns.nth(act, 0)


def test_slices_mean_several(graph: CandidateGraph) -> None:
    act = ns.Activations
    assert in_order(ns.match_slice(act, 1, 4, 2), graph) == ["block.sub_3", "relu"]
    assert in_order(ns.match_slice(act, slice(None, 2)), graph) == ["block.sub_1", "block.sub_3"]
    assert in_order(act.slice(-1), graph) == ["relu"]
    assert in_order(ns.match_slice(act), graph) == in_order(act, graph)
    assert in_order(ns.match_slice(act, None, None, -2), graph) == ["block.sub_3", "relu"]
    assert act.slice(1, 2) == ns.match_slice(act, 1, 2) == ns.match_slice(act, slice(1, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ns.nth(ns.is_module, 1.5),
        lambda: ns.nth(ns.is_module, True),
        lambda: ns.match_slice(ns.is_module, "a"),
        lambda: ns.match_slice(ns.is_module, 0, 1, 0),
        lambda: ns.has_following(ns.is_module, within=0),
        lambda: ns.has_preceding(ns.is_module, within=1.0),
        lambda: ns.matches_module_class(torch.relu),
        lambda: ns.matches_module_class(),
        lambda: ns.matches_module(nn.Linear),
        lambda: ns.matches_function(3),
        lambda: ns.matches_function(),
        lambda: ns.node_lambda("relu"),
        lambda: ns.matches_module_lambda(None),
        lambda: ns.matches_name(3),
        lambda: ns.matches_path(re.compile(b"x")),
        lambda: ns.under_branch(2.5),
        lambda: ns.under_branch(side="if"),
        lambda: ns.under_branch(0),
        lambda: ns.in_loop(-1),
        lambda: ns.in_loop("range(3)", file=3),
        lambda: ns.at_line("model.py"),
        lambda: ns.at_line(None),
        lambda: ns.with_shape(2.0),
        lambda: ns.with_shape(-1),
        lambda: ns.with_shape(..., ...),
        lambda: ns.with_shape(True),
        lambda: ns.with_dtype(),
        lambda: ns.with_dtype("float32"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wrong: Callable[[], Any]) -> None:
    with pytest.raises(InputError):
        wrong()


def test_a_node_alone_cannot_tell_what_needs_the_whole_graph(graph: CandidateGraph) -> None:
    for ahead in (ns.first(ns.is_module), ns.has_following("gelu"), ns.between("add", "relu"),
                  ns.is_module.slice(1) & ns.is_module):  # fmt: skip
        with pytest.raises(InputError, match="cannot be evaluated for one node alone"):
            ahead.matches(graph.nodes["gelu"])


# Ways of values


def test_following_goes_along_edges_and_not_along_the_order(graph: CandidateGraph) -> None:
    relu = ns.Activations.ReLU & ns.is_module
    assert in_order(ns.has_following(relu), graph) == ["block.sub_0", "block.sub_0.linear"]
    assert in_order(ns.has_preceding(relu), graph) == ["block.sub_2", "block.sub_2.linear"]
    assert in_order(ns.Linear & ns.has_following(ns.Activations), graph) == [
        "block.sub_0", "block.sub_2", "head",
    ]  # fmt: skip

    def two_ways(x: Tensor) -> Tensor:
        a = x.sin()
        b = x.cos()  # follows in the order, but not by its values
        return a.relu() + b.tanh()

    assert found(ns.has_following(ns.Activations.ReLU), two_ways, X) == ["sin"]
    assert found(ns.has_following(ns.Activations.Tanh, within=None), two_ways, X) == ["cos"]
    assert found(ns.has_preceding("cos", within=None), two_ways, X) == ["tanh", "add"]


def test_within_counts_the_ops_on_the_way(graph: CandidateGraph) -> None:
    ops = ~ns.is_module
    for within, expected in (
        (1, ["head.linear"]), (2, ["gelu", "head.linear"]), (3, ["add", "gelu", "head.linear"]),
        (None, ["block.sub_0.linear", "block.sub_1.relu", "block.sub_2.linear",
                "block.sub_3.tanh", "add", "gelu", "head.linear"]),
    ):  # fmt: skip
        assert in_order(ns.has_following("relu", within=within) & ops, graph) == expected
    assert in_order(ns.has_preceding("add", within=2), graph) == ["gelu", "head", "head.linear"]
    # To those outside, a call of a module is as near as what it begins or ends with.
    assert in_order(ns.has_following("add"), graph) == ["block", "block.sub_3", "block.sub_3.tanh"]
    assert in_order(ns.has_preceding("block"), graph) == ["add"]


class Apart(nn.Module):
    """Two values that have nothing to do with each other go through one module."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.pair(x.sin(), x.cos())
        return a.exp() + b.log()


class Pair(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.relu(), b.tanh()


def test_no_way_leads_through_a_module_that_its_values_do_not_take() -> None:
    following = ns.has_following("exp", within=None)
    assert found(following, Apart(), X) == ["sin", "pair", "pair.relu"]
    assert found(ns.has_preceding("cos", within=None), Apart(), X) == [
        "pair", "pair.tanh", "log", "add",
    ]  # fmt: skip
    assert found(ns.between("sin", "log"), Apart(), X) == ["pair"]
    assert found(ns.between("sin", "log") & ~ns.is_module, Apart(), X) == []


def test_a_node_in_a_loop_follows_itself() -> None:
    def loop(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.relu() * 2
        return x.tanh()

    assert found(ns.has_following("relu"), loop, X) == ["mul"]
    assert found(ns.has_following("relu", within=2), loop, X) == ["relu", "mul"]
    assert found(ns.has_preceding("tanh", within=None), loop, X) == []


def test_between_means_what_values_pass_on_their_way(graph: CandidateGraph) -> None:
    assert in_order(ns.between("block.sub_0", "gelu"), graph) == [
        "block.sub_1", "block.sub_1.relu", "block.sub_2", "block.sub_2.linear", "block.sub_3",
        "block.sub_3.tanh", "add",
    ]  # fmt: skip
    assert in_order(ns.between("block", "relu") & ns.is_module, graph) == ["head"]
    assert in_order(ns.between("relu", "block"), graph) == []
    assert in_order(ns.between(ns.Linear, ns.Linear), graph) == [
        "block.sub_1", "block.sub_1.relu", "block.sub_3", "block.sub_3.tanh", "add", "gelu",
    ]  # fmt: skip


# Names


def test_nodes_are_found_by_name_path_and_qualified_name(graph: CandidateGraph) -> None:
    assert in_order(ns.matches_name("relu"), graph) == ["block.sub_1.relu", "relu"]
    assert in_order(ns.matches_path("relu"), graph) == ["relu"]
    assert in_order(ns.matches_path(re.compile("relu$")), graph) == ["block.sub_1.relu", "relu"]
    assert in_order(ns.matches_name(re.compile("^block")), graph) == ["block"]
    assert in_order(ns.matches_qualified_name("block.1"), graph) == ["block.sub_1"]
    assert in_order(ns.matches_qualified_name("block.1.relu"), graph) == ["block.sub_1.relu"]
    assert in_order(ns.source_text("self.block(x) + x"), graph) == ["add"]
    assert in_order(ns.source_text(re.compile(r"^self\.")), graph) == [
        "block", "add", "head", "relu",
    ]  # fmt: skip


def test_nodes_are_found_by_what_is_called(graph: CandidateGraph) -> None:
    model = graph.nodes[""].module
    assert isinstance(model, Nested)
    assert in_order(ns.matches_module_class(nn.Linear), graph) == [
        "block.sub_0", "block.sub_2", "head",
    ]  # fmt: skip
    assert in_order(ns.matches_module_class(nn.Tanh, Nested), graph) == ["", "block.sub_3"]
    assert in_order(ns.matches_module(model.head, model.block[1]), graph) == ["block.sub_1", "head"]
    assert in_order(ns.matches_module_lambda(lambda m: getattr(m, "out_features", 0) == 2), graph) \
        == ["head"]  # fmt: skip
    assert in_order(ns.matches_function(F.relu), graph) == ["block.sub_1.relu"]
    assert in_order(ns.matches_function(Tensor.relu, F.gelu), graph) == ["gelu", "relu"]
    assert in_order(ns.matches_function("relu"), graph) == ["block.sub_1.relu", "relu"]
    assert in_order(ns.node_lambda(lambda node: node.base == "add"), graph) == ["add"]


def test_parameters_and_parametrizations(graph: CandidateGraph) -> None:
    assert in_order(ns.has_parameters, graph) == [
        "block.sub_0", "block.sub_0.linear", "block.sub_2", "block.sub_2.linear", "head",
        "head.linear",
    ]  # fmt: skip
    assert ns.is_parametrised is ns.is_parametrized
    assert in_order(ns.is_parametrized, graph) == []
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    parametrizations.weight_norm(model[0])
    assert found(ns.is_parametrized, model, X) == ["sub_0"]
    assert "sub_0" in found(ns.has_parameters, model, X)
    assert found(ns.Linear.Linear, model, X) == ["sub_0"]


# Shapes and dtypes


def test_nodes_are_found_by_what_they_give(graph: CandidateGraph) -> None:
    assert in_order(ns.with_shape(1, 2), graph) == ["head", "head.linear", "relu"]
    assert in_order(ns.with_shape((1, 2)), graph) == in_order(ns.with_shape(..., 2), graph)
    assert in_order(ns.with_shape(None, 2), graph) == in_order(ns.with_shape(..., 1, 2), graph)
    assert in_order(ns.with_shape(lambda shape: shape[-1] == 2), graph) == [
        "head",
        "head.linear",
        "relu",
    ]
    assert in_order(ns.with_shape(..., 1, None, 2), graph) == []
    assert in_order(ns.with_shape(2), graph) == in_order(ns.with_shape(), graph) == []
    assert in_order(ns.with_dtype(torch.float64), graph) == []
    assert in_order(ns.with_dtype(lambda d: d.is_floating_point), graph) == EVERYTHING[1:]

    def mixed(x: Tensor) -> Any:
        parts = (x.sum() > 0, x.argmax().item(), x.split(1, dim=1))
        return parts[0], parts[1] + 1, parts[2]

    assert found(ns.with_dtype(torch.bool, torch.int64), mixed, X) == ["gt", "argmax"]
    assert found(ns.with_shape(1, 1), mixed, X) == ["split"]
    assert found(ns.with_shape(), mixed, X) == ["sum", "gt", "argmax"]


# Source


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 3:
            x = self.left(x)
        elif x.mean() > -100:
            x = self.right(x.neg())
        else:
            x = x.exp()
        x = x.tanh() if x.norm() < 1e9 else x.relu()
        while x.abs().max() > 0.01:
            x = x * 0.01
        for scale in (1.0, 2.0):
            x = self.scaled(x, scale)
        many = [row.cos() for row in x.unbind() if row.min() > -9]
        if x.sum() < -1e9:
            return x.sinh()
        return sum(many).sigmoid()

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        return x.mul(scale) if scale > 1 else x.div(2)


ONE, NONE = torch.ones(2, 4), -torch.ones(2, 4)


def ops(paths: list[str]) -> list[str]:
    return [path for path in paths if path.partition(".")[0] in KNOWN]


KNOWN = {
    "left", "right", "neg", "exp", "tanh", "relu", "mul", "mul_1", "div", "cos", "sinh",
    "sigmoid", "unbind", "abs",
}  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "x", "expected"),
    [
        (ns.under_branch("x.sum() > 3"), ONE, ["left"]),
        (ns.under_branch("x.sum()>3"), ONE, ["left"]),
        (ns.under_branch("x.sum() > 3", side=True), ONE, ["left"]),
        (ns.under_branch("x.sum() > 3", side=False), ONE, []),
        (ns.under_branch("x.sum() > 3", side=True), NONE, []),
        (ns.under_branch("x.sum() > 3", side=False), NONE, ["right", "neg"]),
        (ns.under_branch("x.mean() > -100", side=True), NONE, ["right", "neg"]),
        (ns.under_branch(re.compile(r"norm\(\)"), side=True), ONE, ["tanh"]),
        (ns.under_branch("x.norm() < 1e9", side=False), ONE, []),
        (ns.under_branch("x.abs().max() > 0.01"), ONE, ["mul"]),
        (ns.under_branch("scale > 1"), ONE, ["mul_1", "div"]),
        (ns.under_branch("scale > 1", side=False), ONE, ["div"]),
        (ns.under_branch("row.min() > -9"), ONE, ["cos"]),
        (ns.under_branch("x.sum() < -1e9"), ONE, ["sigmoid"]),
        (ns.under_branch("x.sum() < -1e9", side=False), ONE, ["sigmoid"]),
        (ns.under_branch("nothing"), ONE, []),
        (ns.in_loop(), ONE, ["abs", "mul", "mul_1", "div", "cos"]),
        (ns.in_loop("x.abs().max() > 0.01"), ONE, ["abs", "mul"]),
        (ns.in_loop("(1.0, 2.0)"), ONE, ["mul_1", "div"]),
        (ns.in_loop(re.compile("unbind")), ONE, ["cos"]),
        (ns.in_loop("range(3)"), ONE, []),
        (ns.Activations & ~ns.under_branch(side=True), ONE, ["sigmoid"]),
    ],
)
def test_nodes_are_found_by_branches_and_loops(
    selector: NodeSelector, x: Tensor, expected: list[str]
) -> None:
    paths = found(selector, Flow(), x)
    # Of what happens in another module only the call is meant.
    assert not any("." in path for path in paths)
    assert sorted(ops(paths)) == sorted(expected)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_branches_loops_and_nodes_are_found_by_line() -> None:
    branch, loop = line_of("if x.sum() > 3:"), line_of("for scale in (1.0, 2.0):")
    here = Path(__file__).name
    for selector, expected in (
        (ns.under_branch(branch), ["left"]),
        (ns.under_branch(f"{here}:{branch}"), ["left"]),
        (ns.under_branch(branch, file=f"tests/{here}"), ["left"]),
        (ns.under_branch(branch, file="other.py"), []),
        (ns.under_branch(branch, file="ectors.py"), []),
        (ns.in_loop(loop), ["mul_1", "div"]),
        (ns.in_loop(f"{here}:{loop}"), ["mul_1", "div"]),
        (ns.at_line(loop + 1), ["mul_1", "div"]),
        (ns.at_line(f"{here}:{line_of('x = self.left(x)')}"), ["left"]),
        (ns.at_line(line_of("x = self.left(x)"), "other.py"), []),
        (ns.at_line(line_of("x.mul(scale) if scale")), ["mul_1", "div"]),
    ):  # fmt: skip
        assert sorted(ops(found(selector, Flow(), ONE))) == sorted(expected), selector


def test_each_link_of_a_chain_of_methods_is_on_its_own_line() -> None:
    def chain(x: Tensor) -> Tensor:
        return (
            x.sin()  # the first link
            .relu()
            .tanh()
        )

    line = line_of("# the first link")
    assert found(ns.at_line(line), chain, X) == ["sin"]
    assert found(ns.at_line(line + 1), chain, X) == ["relu"]
    assert found(ns.at_line(line + 2), chain, X) == ["tanh"]


def test_calls_lead_the_way_through_functions_and_lambdas() -> None:
    def twice(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(function(x))

    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = twice(lambda y: y.sin(), x)
        return twice(torch.cos, x)

    assert found(ns.under_branch("x.sum() > 0"), model, X) == ["sin", "sin_1"]
    assert found(ns.source_text("function(function(x))"), model, X) == ["cos_1"]


def test_a_method_on_a_line_of_its_own_is_under_what_is_around_the_chain() -> None:
    def model(x: Tensor) -> Tensor:
        return (
            x.sin()
            .relu()
            .tanh() if x.sum() > 0 else x
        )  # fmt: skip

    assert found(ns.under_branch("x.sum() > 0"), model, X) == ["sin", "relu", "tanh"]


@pytest.fixture
def branches(tmp_path: Path) -> Callable[[str, str], list[tuple[str, bool]]]:
    def find(source: str, stretch: str) -> list[tuple[str, bool]]:
        file = str(tmp_path / f"source_{abs(hash(source))}.py")
        Path(file).write_text(source)
        linecache.checkcache(file)
        before = source[: source.index(stretch)]
        line, column = before.count("\n") + 1, len(before.rpartition("\n")[2])
        place = InstructionPlace(file, "f", Span(line, column, line, column + len(stretch)), 0)
        return [(branch.text, branch.side) for branch in branches_around(place)]

    return find


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a: here()", [("a", True)]),
        ("if here(): pass", []),
        ("if a: pass\nelse: here()", [("a", False)]),
        ("if a: pass\nelif b: here()", [("b", True), ("a", False)]),
        ("if a: pass\nelif here(): pass", [("a", False)]),
        ("while a: here()", [("a", True)]),
        ("while a: pass\nelse: here()", [("a", False)]),
        ("while here(): pass", []),
        ("x = here() if a else 0", [("a", True)]),
        ("x = 0 if a else f(here())", [("a", False)]),
        ("x = 0 if here() else 1", []),
        ("x = a and here()", [("a", True)]),
        ("x = a or b or here()", [("a", False), ("b", False)]),
        ("x = [here() for i in n if a]", [("a", True)]),
        ("x = [0 for i in n if a if here()]", [("a", True)]),
        ("x = [0 for i in here() if a]", []),
        ("x = {0: 1 for i in n if a for j in here() if b}", [("a", True)]),
        ("def f():\n  if a: return\n  here()", [("a", False)]),
        ("def f():\n  if a: return\n  elif b: return\n  here()", [("a", False), ("b", False)]),
        ("def f():\n  if a: pass\n  else: return\n  here()", [("a", True)]),
        ("def f():\n  if a: pass\n  here()", []),
        ("def f():\n  if a:\n    if b: return\n  here()", []),
        ("for i in n:\n  if a: continue\n  here()", [("a", False)]),
        ("for i in n:\n  if a: break\nhere()", []),
        ("if a:\n  def f(): here()", []),
        ("if a:\n  f = lambda: here()", []),
        ("if a:\n  with b: here()", [("a", True)]),
        ("if a:\n  y += here()", [("a", True)]),
        ("match v:\n  case 1: pass\n  case 2: here()", [("case 1", False), ("case 2", True)]),
        ("match v:\n  case 1 if a: here()", [("case 1 if a", True)]),
        ("try:\n  if a: raise E\n  here()\nfinally: pass", [("a", False)]),
    ],
)
def test_what_a_place_is_under(
    source: str, expected: list[tuple[str, bool]], branches: Callable[[str, str], Any]
) -> None:
    assert sorted(branches(source, "here()")) == sorted(expected)


def test_code_without_a_source_is_in_no_branch_and_on_its_line() -> None:
    names: dict[str, Any] = {}
    exec("def model(x):\n  if x.sum() > 0:\n    return x.sin()\n  return x", names)
    assert found(ns.under_branch() | ns.in_loop(), names["model"], X) == []
    assert found(ns.at_line(3), names["model"], X) == ["sin"]


# Runs


LIVE = [
    ns.Activations, ns.is_module, ~ns.is_module, ns.has_parameters, ns.in_loop(),
    ns.under_branch(), ns.under_branch("x.sum() > 3"), ns.at_line(line_of("x = self.left(x)")),
    ns.with_shape(..., 4), ns.with_dtype(torch.float32) & ns.in_loop(), ns.Linear.first(),
    ns.last(ns.Activations), ns.has_following(ns.Activations), ns.matches_function("sum"),
    ns.has_following(ns.Activations, within=None) & ns.is_module, ns.matches_name("relu"),
    ns.between(ns.first(nn.Linear), ns.last(ns.Activations)), ns.source_text(re.compile("x[.]")),
]  # fmt: skip


@pytest.mark.parametrize("selector", LIVE, ids=map(repr, LIVE))
@pytest.mark.parametrize(
    ("model", "x"), [(Nested(), X), (Flow(), ONE), (Flow(), NONE), (Apart(), X)]
)
def test_what_is_inserted_fires_at_the_nodes_that_are_found_also_when_replayed(
    selector: NodeSelector, model: nn.Module, x: Tensor
) -> None:
    expected = found(selector, model, x)
    bended, fired = bt.BendedModule(model), list[str]()

    def note(value: Any, at: Any) -> None:
        fired.append(at.path)

    eager = model(x)
    if selector.looks_ahead:
        bended(x)
    with bended.interject(selector, note, allow_none=True):
        for _ in range(3):
            fired.clear()
            assert torch.equal(bended(x), eager)
            assert set(fired) == set(expected)


def test_modules_of_the_model_are_known_in_the_run_that_looks_ahead() -> None:
    model, fired = Nested(), list[str]()
    bended = bt.BendedModule(model)
    bended(X)
    with bended.interject(ns.has_preceding(model.block), lambda value, at: fired.append(at.path)):
        bended(X)
    assert fired == ["add"]


# The module and its page


def test_the_module_gives_its_names_in_order() -> None:
    assert ns.__all__ == sorted(ns.__all__, key=str)
    assert all(hasattr(ns, name) for name in ns.__all__)


def test_a_function_of_a_namespace_without_a_name_is_no_function_of_torch_s() -> None:
    scope: dict[str, Any] = {}
    exec("predicate = lambda node: node.shape == (2,)", scope)
    assert scope["predicate"].__module__ is None
    trace = bt.trace(lambda x: x.relu() + 1, torch.ones(2))
    found = bt.node_selector.find(scope["predicate"], trace)
    assert [node.path for node in found] == ["", "relu", "add"]
