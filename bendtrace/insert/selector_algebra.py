"""Selectors as values: their combinations, and selectors that follow the flow of values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from bendtrace.errors import InputError, NoLayerError
from bendtrace.log.path_views import Candidate, CandidateGraph, NodeSelector, Selectable
from bendtrace.python.checks import did_you_mean, is_inside, similar
from bendtrace.watch.functions import OpOverload, OpOverloadPacket


class Selector(NodeSelector):
    """A node selector that can be combined with others.

    `a & b`, `a | b`, `a ^ b` and `~a` select the nodes that are selected by both, by at least one,
    by exactly one, and by none. The other operand of a selector may also be a node path, a regular
    expression that is searched for in node paths, a module, a class of modules, a torch function, a
    predicate of the `Candidate`, or a list of these.

    Your own selectors are subclasses with one method, `matches`. Frozen dataclasses with equal
    fields are equal.

    Example:
        >>> import dataclasses, bendtrace as bt
        >>> @dataclasses.dataclass(frozen=True)
        ... class DeeperThan(bt.node_selector.Selector):
        ...     levels: int
        ...     def matches(self, node):
        ...         return node.path.count(".") >= self.levels
        >>> DeeperThan(2) & "layers_0.mlp.relu"
        DeeperThan(levels=2) & matches_path('layers_0.mlp.relu')
    """

    def __and__(self, other: Selectable) -> Selector:
        return _combine("&", self, other)

    def __rand__(self, other: Selectable) -> Selector:
        return _combine("&", other, self)

    def __or__(self, other: Selectable) -> Selector:
        return _combine("|", self, other)

    def __ror__(self, other: Selectable) -> Selector:
        return _combine("|", other, self)

    def __xor__(self, other: Selectable) -> Selector:
        return _combine("^", self, other)

    def __rxor__(self, other: Selectable) -> Selector:
        return _combine("^", other, self)

    def __invert__(self) -> Selector:
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError(
            f"{self!r} is neither true nor false: selectors are combined with &, | and ~, "
            "not with `and`, `or` and `not`"
        )

    @property
    def fn(self) -> Callable[[tuple[Any, Any]], bool]:
        """The selector as a function of a graph module of torch.fx and a node of its graph."""

        def selects(state: tuple[Any, Any]) -> bool:
            module, nodes = state[0], state[0].graph.nodes
            modules = {n: module.get_submodule(n.target) for n in nodes if n.op == "call_module"}
            found = {
                n.name: Candidate(
                    n.name, n.name, modules.get(n), str(n.target) if n in modules else "",
                    n.target if n.op == "call_function" else None, module, "",
                )
                for n in nodes
            }  # fmt: skip
            edges = [(one.name, n.name) for n in nodes for one in n.all_input_nodes]
            return state[1].name in self.select(CandidateGraph(found, edges))

        return selects

    def nth(self, index: int) -> Selector:
        """Select one of the selected nodes, in the order in which they begin.

        Args:
            index: which one, from 0; negative ones count from the end. An index out of range
                selects no node.
        """
        return Nth(self, index)

    def first(self) -> Selector:
        """Select the first of the selected nodes."""
        return Nth(self, 0)

    def last(self) -> Selector:
        """Select the last of the selected nodes."""
        return Nth(self, -1)

    def slice(
        self, start: int | None = None, stop: int | None = None, step: int | None = None
    ) -> Selector:
        """Select some of the selected nodes, in the order in which they begin.

        Args:
            start: the first of them, from 0; negative ones count from the end.
            stop: the first of them to leave out again.
            step: the distance from one to the next.
        """
        return Slice(self, start, stop, step)


@functools.singledispatch
def as_selector(what: Any) -> NodeSelector:
    """Return the selector for a value.

    Args:
        what: a selector; a node path; a regular expression, for node paths and qualified names; a
            module; a class of modules; a torch function; a predicate of the `Candidate`; a node of
            a tree of paths; or a list of these, for any of them.

    Returns:
        The selector.

    Raises:
        InputError: the value does not convert to a selector.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.node_selector.as_selector(torch.nn.Linear)
        matches_module_class(Linear)
        >>> bt.node_selector.as_selector([torch.relu, "fc.linear"])
        matches_function(relu) | matches_path('fc.linear')
    """
    raise InputError(
        f"{what!r} does not select nodes: pass a selector, a node path, a compiled regular "
        "expression, a module, a class of modules, a torch function, a predicate of the node, "
        "or a list of these"
    )


@as_selector.register
def _(what: NodeSelector) -> NodeSelector:
    return what


@as_selector.register(list)
@as_selector.register(tuple)
def _(what: Any) -> NodeSelector:
    return what[0] if len(what) == 1 else Combined("|", tuple(map(as_selector, what)))


def find_nodes(what: Any, graph: CandidateGraph) -> list[Candidate]:
    """Return the nodes of a run that a selector, or a value for one, selects, in order."""
    paths = as_selector(what).select(graph)
    return [node for node in graph if node.path in paths]


def select_nodes(selector: NodeSelector, graph: CandidateGraph, among: set[str]) -> set[str]:
    """Return which of some nodes of a graph are selected.

    A selector that judges nodes alone is not called for others.
    """
    if selector.looks_ahead:
        return selector.select(graph) & among
    return {path for path in among if selector.matches(graph.nodes[path])}


Sign = Literal["&", "|", "^"]
_STRENGTH: dict[str, int] = {"|": 0, "^": 1, "&": 2, "~": 3}


def _combine(sign: Sign, left: Selectable, right: Selectable) -> Selector:
    parts: list[NodeSelector] = []
    for operand in (left, right):
        part = as_selector(operand)
        parts += part.parts if isinstance(part, Combined) and part.sign == sign else [part]
    return Combined(sign, tuple(parts))


@dataclass(frozen=True, repr=False)
class Combined(Selector):
    """A combination of several selectors."""

    sign: Sign
    parts: tuple[NodeSelector, ...]
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _inherit(self, *self.parts)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if self.sign == "&":
            return all(part.matches(node) for part in self.parts)
        if self.sign == "|":
            return any(part.matches(node) for part in self.parts)
        return sum(part.matches(node) for part in self.parts) % 2 == 1

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        everything = set(graph.nodes)
        if self.sign == "&":
            found = everything
            for part in self.parts:  # a later one is not asked about what an earlier one rules out
                found = select_nodes(part, graph, found)
            return found
        found = set()
        for part in self.parts:
            if self.sign == "|":
                found |= select_nodes(part, graph, everything - found)
            else:
                found ^= select_nodes(part, graph, everything)
        return found

    def __repr__(self) -> str:
        return f" {self.sign} ".join(_text_in_brackets(part, self.sign) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Not(Selector):
    """The nodes that a selector does not select. The model as a whole is not among them."""

    selector: NodeSelector
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _inherit(self, self.selector)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return node.path != "" and not self.selector.matches(node)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        others = set(graph.nodes) - {""}
        return others - select_nodes(self.selector, graph, others)

    def __repr__(self) -> str:
        return f"~{_text_in_brackets(self.selector, '~')}"


class LookaheadSelector(Selector):
    """Selectors that need the graph of a run."""

    looks_ahead = True

    def matches(self, node: Candidate) -> bool:
        """Raise, since the other nodes have to be known.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self!r} cannot be evaluated for one node alone: it needs the graph of a run, "
            "select(graph)"
        )


class _Ordered(LookaheadSelector):
    """Some of the nodes that a selector selects, by their order."""

    selector: NodeSelector

    def _in_order(self, graph: CandidateGraph) -> list[str]:
        found = select_nodes(self.selector, graph, set(graph.nodes))
        return [path for path in graph.nodes if path in found]


@dataclass(frozen=True, repr=False)
class Nth(_Ordered):
    """One of the nodes that a selector selects."""

    selector: NodeSelector
    index: int
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.index) is not int:
            raise InputError(f"nth() takes an int as the index, not {self.index!r}")
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        found = self._in_order(graph)
        return {found[self.index]} if -len(found) <= self.index < len(found) else set()

    def __repr__(self) -> str:
        if self.index in (0, -1):
            return f"{'first' if self.index == 0 else 'last'}({self.selector!r})"
        return f"nth({self.selector!r}, {self.index})"


@dataclass(frozen=True, repr=False)
class Slice(_Ordered):
    """Several of the nodes that a selector selects."""

    selector: NodeSelector
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("start", "stop", "step"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InputError(f"match_slice() takes an int or None as {name}, not {value!r}")
        if self.step == 0:
            raise InputError("match_slice() does not support a step of 0")
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        return set(self._in_order(graph)[self.start : self.stop : self.step])

    def __repr__(self) -> str:
        return f"match_slice({self.selector!r}, {self.start}, {self.stop}, {self.step})"


def _inherit(made: Selector, *parts: NodeSelector) -> None:
    for name in ("looks_ahead", "needs_output"):
        object.__setattr__(made, name, any(getattr(part, name) for part in parts))


def _text_in_brackets(part: NodeSelector, sign: str) -> str:
    """Return a part as text, in brackets if necessary."""
    weaker = isinstance(part, Combined) and _STRENGTH[part.sign] <= _STRENGTH[sign]
    return f"({part!r})" if weaker else repr(part)


def has_following(selector: Selectable, *, within: int | None = 1) -> Selector:
    """Select nodes whose values lead to a certain node.

    Args:
        selector: selects that node: a selector, or any value that converts to one.
        within: the maximum number of steps to it. 1: the node itself uses the value. Each op on the
            way is a step; None for any number.

    Raises:
        InputError: `within` is not a positive integer.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_following("sum"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_following("sum", within=None), trace)
        [<node relu: relu>, <node exp: exp>]
    """
    return ConnectedNodes(as_selector(selector), _checked_distance(within), forward=True)


def has_preceding(selector: Selectable, *, within: int | None = 1) -> Selector:
    """Select nodes that use the values of a certain node, directly or indirectly.

    Args:
        selector: selects that node: a selector, or any value that converts to one.
        within: the maximum number of steps from it. 1: the value is used directly. Each op on the
            way is a step; None for any number.

    Raises:
        InputError: `within` is not a positive integer.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().exp().sum(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu"), trace)
        [<node exp: exp>]
        >>> bt.node_selector.find(bt.node_selector.has_preceding("relu", within=None), trace)
        [<node exp: exp>, <node sum: sum>]
    """
    return ConnectedNodes(as_selector(selector), _checked_distance(within), forward=False)


def between(start: Selectable, end: Selectable) -> Selector:
    """Select nodes that values pass on their way from certain nodes to others.

    The ends themselves, and nodes inside them, are not selected.

    Args:
        start: selects where the values come from: a selector, or any value that converts to one.
        end: selects where they go to.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     h = x.relu()
        ...     return (h.exp() + 1).sum(), h.tanh()
        >>> trace = bt.trace(model, torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.between("relu", "sum"), trace)
        [<node exp: exp>, <node add: add>]
    """
    return BetweenSelector(as_selector(start), as_selector(end))


@dataclass(frozen=True, repr=False)
class ConnectedNodes(LookaheadSelector):
    """Nodes from which, or to which, there is a path."""

    selector: NodeSelector
    within: int | None
    forward: bool
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        ends = select_nodes(self.selector, graph, set(graph.nodes))
        edges = graph.edges.predecessors if self.forward else graph.edges.successors
        return _reachable_nodes(graph, ends, edges, self.within)

    def __repr__(self) -> str:
        made = "has_following" if self.forward else "has_preceding"
        within = "" if self.within == 1 else f", within={self.within}"
        return f"{made}({self.selector!r}{within})"


@dataclass(frozen=True, repr=False)
class BetweenSelector(LookaheadSelector):
    """Nodes on paths from some nodes to others."""

    start: NodeSelector
    end: NodeSelector
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        needs_output = self.start.needs_output or self.end.needs_output
        object.__setattr__(self, "needs_output", needs_output)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        everything = set(graph.nodes)
        starts, ends = (select_nodes(one, graph, everything) for one in (self.start, self.end))
        after = _reachable_nodes(graph, starts, graph.edges.successors)
        before = _reachable_nodes(graph, ends, graph.edges.predecessors)
        return {path for path in after & before if not is_inside(path, starts | ends)}

    def __repr__(self) -> str:
        return f"between({self.start!r}, {self.end!r})"


def _reachable_nodes(
    graph: CandidateGraph,
    ends: set[str],
    edges: Callable[[str], Iterable[str]],
    within: int | None = None,
) -> set[str]:
    """Return the nodes that a path leads to.

    Paths lead from op to op. A path through a module call uses the ops in it: the node of the call
    would connect all its inputs with all its outputs.
    """
    found: set[str] = set()
    edge, steps = ends, 0
    while edge and (within is None or steps < within):
        reached = {path for one in edge for path in edges(one)} - found
        found |= reached
        edge = {path for path in reached if not graph.nodes[path].is_module}
        steps += 1
    return found


def _checked_distance(within: Any) -> int | None:
    if within is not None and (type(within) is not int or within < 1):
        raise InputError(
            f"within= takes a positive number of steps, or None for any number, not {within!r}"
        )
    return within


# Selectors for the layers of torch, called as module, function or method.

# The layers of each family, by their classes in torch.nn.
_MEMBERS: dict[str, str] = {
    "Activations": """
        ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6
        RReLU SELU CELU GELU Sigmoid SiLU Mish Softplus Softshrink Softsign Tanh Tanhshrink
        Threshold GLU Softmin Softmax Softmax2d LogSoftmax AdaptiveLogSoftmaxWithLoss
        GumbelSoftmax
    """,
    "Convolutions": """
        Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Unfold Fold
    """,
    "Pooling": """
        MaxPool1d MaxPool2d MaxPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
        MaxUnpool1d MaxUnpool2d MaxUnpool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d
        LPPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d FractionalMaxPool2d
        FractionalMaxPool3d
    """,
    "Padding": """
        CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d
        ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d
        ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d
    """,
    "Normalization": """
        BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm GroupNorm InstanceNorm1d
        InstanceNorm2d InstanceNorm3d LayerNorm LocalResponseNorm CrossMapLRN2d RMSNorm
        Normalize
    """,
    "Recurrent": "RNNBase RNN LSTM GRU RNNCellBase RNNCell LSTMCell GRUCell",
    "Transformer": """
        Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer
        TransformerDecoderLayer MultiheadAttention ScaledDotProductAttention
    """,
    "Linear": "Identity Linear Bilinear",
    "Dropout": "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout",
    "Sparse": "Embedding EmbeddingBag",
    "Distance": "CosineSimilarity PairwiseDistance",
    "Loss": """
        L1Loss MSELoss CrossEntropyLoss LinearCrossEntropyLoss CTCLoss NLLLoss PoissonNLLLoss
        GaussianNLLLoss KLDivLoss BCELoss BCEWithLogitsLoss MarginRankingLoss HingeEmbeddingLoss
        MultiLabelMarginLoss HuberLoss SmoothL1Loss SoftMarginLoss MultiLabelSoftMarginLoss
        CosineEmbeddingLoss MultiMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss
    """,
    "Vision": """
        PixelShuffle PixelUnshuffle Upsample UpsamplingNearest2d UpsamplingBilinear2d GridSample
        AffineGrid
    """,
    "Shuffle": "ChannelShuffle",
    "Utility": "Flatten Unflatten",
}

# The functions equivalent to a layer, if they do not have the layer's name in snake case.
_FUNCTIONS: dict[str, str] = {
    **{
        f"{kind}Pad{dims}d": "pad"
        for kind in ("Circular", "Constant", "Reflection", "Replication", "Zero")
        for dims in (1, 2, 3)
    },
    **{
        f"{kind}MaxPool{dims}d": f"{name}max_pool{dims}d {name}max_pool{dims}d_with_indices"
        for kind, name in (("", ""), ("Adaptive", "adaptive_"), ("Fractional", "fractional_"))
        for dims in (1, 2, 3)
    },
    **{f"BatchNorm{dims}d": "batch_norm native_batch_norm" for dims in (1, 2, 3)},
    **{f"InstanceNorm{dims}d": "instance_norm" for dims in (1, 2, 3)},
    **{f"Dropout{dims}d": f"dropout{dims}d feature_dropout" for dims in (1, 2, 3)},
    "LeakyReLU": "leaky_relu", "LogSigmoid": "logsigmoid log_sigmoid", "PReLU": "prelu",
    "ReLU": "relu", "ReLU6": "relu6", "RReLU": "rrelu", "Sigmoid": "sigmoid expit", "SiLU": "silu",
    "Softmax2d": "", "AdaptiveLogSoftmaxWithLoss": "", "Unfold": "unfold im2col",
    "Fold": "fold col2im", "SyncBatchNorm": "batch_norm native_batch_norm",
    "GroupNorm": "group_norm native_group_norm", "LayerNorm": "layer_norm native_layer_norm",
    "CrossMapLRN2d": "CrossMapLRN2d", "RNNBase": "", "RNN": "rnn_tanh rnn_relu", "RNNCellBase": "",
    "RNNCell": "rnn_tanh_cell rnn_relu_cell", "Transformer": "", "TransformerEncoder": "",
    "TransformerDecoder": "", "TransformerEncoderLayer": "_transformer_encoder_layer_fwd",
    "TransformerDecoderLayer": "",
    "MultiheadAttention": "multi_head_attention_forward _native_multi_head_attention",
    "Identity": "", "Dropout": "dropout native_dropout", "CrossEntropyLoss": "cross_entropy",
    "LinearCrossEntropyLoss": "linear_cross_entropy", "NLLLoss": "nll_loss nll_loss2d nll_loss_nd",
    "KLDivLoss": "kl_div", "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss", "Upsample": "upsample interpolate",
    "UpsamplingNearest2d": "upsample_nearest", "UpsamplingBilinear2d": "upsample_bilinear",
    "GridSample": "grid_sample grid_sampler", "AffineGrid": "affine_grid affine_grid_generator",
    "ChannelShuffle": "channel_shuffle native_channel_shuffle",
}  # fmt: skip


def _snake_case(name: str) -> str:
    """Return `lp_pool1d` for `LPPool1d`."""
    name = re.sub(r"([A-Za-z0-9])([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


FAMILIES: dict[str, dict[str, str]] = {
    family: {name: _FUNCTIONS.get(name, _snake_case(name)) for name in members.split()}
    for family, members in _MEMBERS.items()
}

# Other classes of torch.nn that become, or are, one of these.
ALIASES: dict[str, str] = {
    **{
        f"Lazy{name}": name
        for name in (
            *(f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3)),
            *(f"{kind}Norm{dims}d" for kind in ("Batch", "Instance") for dims in (1, 2, 3)),
            "Linear",
        )
    },
    "NLLLoss2d": "NLLLoss",
}

# TorchWatcher's names, other than `is_` and the name of the function. A family is in its own group.
GROUPS: dict[str, dict[str, str]] = {
    "Activations": {
        "is_softmax2d": "Softmax2d",
        "is_adaptive_log_softmax_with_loss": "AdaptiveLogSoftmaxWithLoss",
        "is_activation": "",
    },
    "Convolutions": {"is_convolution": ""},
    "Pooling": {"is_pooling": ""},
    "Padding": {"is_padding": ""},
    "Normalization": {"is_normalization": ""},
    "Recurrent": {"is_rnn": "RNN", "is_rnn_cell": "RNNCell", "is_recurrent": ""},
    "Transformer": {
        "is__transformer_": "Transformer",
        "is_transformer_encoder": "TransformerEncoder TransformerEncoderLayer",
        "is_transformer_decoder": "TransformerDecoder TransformerDecoderLayer",
        "is_transformer": "",
    },
    "Linear": {"is_identity": "Identity", "is_linear_not_bilinear": "Linear", "is_linear": ""},
    "Dropout": {
        "is__dropout_": "Dropout",
        "is_alphadropout": "AlphaDropout",
        "is_featurealphadropout": "FeatureAlphaDropout",
        "is_dropout": "",
    },
    "Sparse": {"is_sparse": ""},
    "Distance": {"is_distance": ""},
    "Loss": {"is_loss": ""},
    "Vision": {
        "is_upsampling_nearest": "UpsamplingNearest2d",
        "is_upsampling_bilinear": "UpsamplingBilinear2d",
        "is_vision": "",
    },
    "Shuffle": {"is_shuffle": ""},
    "Utility": {"is_utility": ""},
}

# Methods and operators that share the name of a function and do something else.
NOT_THE_SAME = frozenset({"Tensor.unfold", "aten::unfold"})

# Functions that layers consist of, in addition to the layer's equivalents.
PARTS: dict[str, str] = {
    "Softmax2d": "softmax",
    "AdaptiveLogSoftmaxWithLoss": "log_softmax",
    **{f"Conv{dims}d": "pad" for dims in (1, 2, 3)},
}


@dataclass(frozen=True, repr=False)
class Layers(Selector):
    """Some layers of torch: calls of their modules, functions and methods.

    The inside of a layer is not selected in addition to the layer: the `F.relu` in the code of an
    `nn.ReLU` belongs to that module, whose call is selected. A function that several layers share,
    such as `F.batch_norm`, is selected by each of them.

    Attributes:
        family: the family they are of.
        members: their names.

    Example:
        >>> import torch, bendtrace as bt
        >>> relu = bt.node_selector.Activations.is_relu
        >>> relu.family, relu.members, relu.classes
        ('Activations', ('ReLU',), (<class 'torch.nn.modules.activation.ReLU'>,))
        >>> trace = bt.trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2))
        >>> bt.node_selector.find(relu, trace)
        [<node sub_0: ReLU>]
        >>> bt.node_selector.find(relu, bt.trace(lambda x: x.relu().tanh(), torch.ones(2)))
        [<node relu: relu>]
    """

    family: str
    members: tuple[str, ...]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if node.module is not None:
            return isinstance(node.module, _layer_classes(self.family, self.members))
        if node.function is None:
            return False
        names = functions_named(node.function) & _family_names(self.family, self.members)
        return bool(names) and not isinstance(node.scope, _consisting_of(names))

    @property
    def classes(self) -> tuple[type[nn.Module], ...]:
        """The selected classes of modules; their subclasses are selected, too."""
        return _layer_classes(self.family, self.members)

    @property
    def functions(self) -> frozenset[Callable[..., Any]]:
        """The selected functions and methods; operators of `torch.ops` are selected, too."""
        names = _family_names(self.family, self.members)
        return frozenset(found for found, of in _family_functions().items() if of & names)

    def __repr__(self) -> str:
        if self.members == tuple(FAMILIES[self.family]):
            return self.family
        if len(self.members) == 1:
            return f"{self.family}.{self.members[0]}"
        for name, members in _torchwatcher_groups(self.family).items():
            if members == self.members:
                return f"{self.family}.{name}"
        return " | ".join(f"{self.family}.{member}" for member in self.members)


class Family(Layers):
    """A family of layers: itself a selector for all of them, with the members as attributes.

    Args:
        family: the name of the family: "Activations", "Convolutions", ...

    Raises:
        NoLayerError: the family does not exist.

    Example:
        >>> import bendtrace as bt
        >>> activations = bt.node_selector.Family("Activations")
        >>> activations.ReLU, activations.is_relu, activations
        (Activations.ReLU, Activations.ReLU, Activations)
        >>> bt.node_selector.Family("Normalization").is_batch_norm.members
        ('BatchNorm1d', 'BatchNorm2d', 'BatchNorm3d', 'SyncBatchNorm')
    """

    def __init__(self, family: str) -> None:
        if family not in FAMILIES:
            hint = did_you_mean(
                family, FAMILIES, otherwise=f"; known families: {', '.join(FAMILIES)}"
            )
            raise NoLayerError(f"no family of layers is called {family!r}{hint}")
        super().__init__(family, tuple(FAMILIES[family]))

    def __getattr__(self, name: str) -> Layers:
        if name.startswith("_") or name in ("family", "members"):
            raise AttributeError(name)
        member = ALIASES.get(name, name)
        if member in FAMILIES[self.family]:
            return Layers(self.family, (member,))
        members = _torchwatcher_groups(self.family).get(name)
        if members is None:
            raise NoLayerError(_unknown_layer_text(self.family, name))
        return self if members == self.members else Layers(self.family, members)

    def __dir__(self) -> list[str]:
        lazy = [name for name, member in ALIASES.items() if member in self.members]
        return sorted(
            {*super().__dir__(), *self.members, *lazy, *_torchwatcher_groups(self.family)}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Family, (self.family,)


@functools.cache
def _torchwatcher_groups(family: str) -> dict[str, tuple[str, ...]]:
    """Return the members of a family with a common name in TorchWatcher."""
    groups: dict[str, list[str]] = {}
    for member, functions in FAMILIES[family].items():
        for function in functions.split():
            groups.setdefault(f"is_{function}", []).append(member)
    found = {name: tuple(members) for name, members in groups.items()}
    for name, members in GROUPS[family].items():
        found[name] = tuple(members.split()) or tuple(FAMILIES[family])
    return found


@functools.cache
def _layer_classes(family: str, members: tuple[str, ...]) -> tuple[type[nn.Module], ...]:
    # Some are newer than the oldest supported torch, some have no class.
    return tuple(cls for cls in (getattr(nn, name, None) for name in members) if cls is not None)


@functools.cache
def _family_names(family: str, members: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for member in members for name in FAMILIES[family][member].split())


@functools.cache
def _consisting_of(names: frozenset[str]) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules consist of calls of some functions."""
    return tuple(
        cls
        for family, members in FAMILIES.items()
        for member, functions in members.items()
        if names & {*functions.split(), *PARTS.get(member, "").split()}
        for cls in _layer_classes(family, (member,))
    )


_NOTHING: frozenset[str] = frozenset()


def functions_named(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function, method or operator in the families."""
    if isinstance(function, OpOverload):
        return _operators().get(function.name().partition(".")[0], _NOTHING)
    if isinstance(function, OpOverloadPacket):  # prints as `aten.relu`
        return _operators().get(str(function).replace(".", "::", 1), _NOTHING)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return _all_names() & {owner.__name__}
    try:
        return _family_functions().get(function, _NOTHING)
    except TypeError:  # not hashable, so none of torch's
        return _NOTHING


@functools.cache
def _all_names() -> frozenset[str]:
    return frozenset().union(
        *(_family_names(family, tuple(FAMILIES[family])) for family in FAMILIES)
    )


@functools.cache
def _family_functions() -> dict[Callable[..., Any], frozenset[str]]:
    """Return the functions and methods that the families name."""
    found: dict[Callable[..., Any], frozenset[str]] = {}
    for name in _all_names():
        for function in _spelled(name):
            found[function] = found.get(function, _NOTHING) | {name}
    return found


def _spelled(name: str) -> Iterator[Callable[..., Any]]:
    # F.linear and its like are those of torch._C._nn; torch's layers call the recurrent functions
    # by way of torch._VF, whose members torch has as well.
    places = (nn.functional, torch, torch.Tensor, torch.special, torch._C._nn)
    for place in places:
        for spelling in (name, f"{name}_"):
            if f"{getattr(place, '__name__', '')}.{spelling}" in NOT_THE_SAME:
                continue
            function = getattr(place, spelling, None)
            if callable(function) and not isinstance(function, type):
                yield function


@functools.cache
def _operators() -> dict[str, frozenset[str]]:
    found = {}
    for name in _all_names():
        for spelling in (f"aten::{name}", f"aten::{name}_"):
            if spelling not in NOT_THE_SAME:
                found[spelling] = frozenset({name})
    return found


def _unknown_layer_text(family: str, name: str) -> str:
    others = [other for other, members in FAMILIES.items() if ALIASES.get(name, name) in members]
    others += [other for other in FAMILIES if name in _torchwatcher_groups(other)]
    if others:
        return f"{family} has no {name}; {others[0]} has: {others[0]}.{name}"
    names = [*FAMILIES[family], *_torchwatcher_groups(family)]
    folded = {other.lower(): other for other in reversed(names)}
    near = [folded[one] for one in similar(name.lower(), folded)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(FAMILIES[family])}"
    return f"{family} has no layer {name}; {hint}"
