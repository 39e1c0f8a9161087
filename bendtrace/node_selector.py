"""Node selectors: values that say which nodes to select.

The families of torch's layers are selectors. Their members are attributes of them, and selectors
too: `Activations`, `Convolutions`, `Distance`, `Dropout`, `Linear`, `Loss`, `Normalization`,
`Padding`, `Pooling`, `Recurrent`, `Shuffle`, `Sparse`, `Transformer`, `Utility` and `Vision`.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: torch.nn.functional.dropout(x.relu()).tanh(), torch.ones(2))
>>> bt.node_selector.find(bt.node_selector.Activations, trace)
[<node relu: relu>, <node tanh: tanh>]
>>> bt.node_selector.find(bt.node_selector.Activations.ReLU | bt.node_selector.Dropout, trace)
[<node relu: relu>, <node dropout: dropout>]

Others are `is_module` (calls of modules), `has_parameters` (calls of modules that have parameters
themselves, and of functions that receive one) and `is_parametrized`, also spelled
`is_parametrised` (calls of modules with parametrizations).

>>> trace = bt.trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
>>> bt.node_selector.find(bt.node_selector.is_module, trace)
[<node sub_0: Linear>, <node sub_1: ReLU>]
>>> bt.node_selector.find(bt.node_selector.is_module & ~bt.node_selector.has_parameters, trace)
[<node sub_1: ReLU>]
>>> bt.node_selector.is_parametrized
is_parametrized

TorchWatcher's names for families are aliases: `is_act`, `is_activ` and `is_activation` for
`Activations`; `is_conv`, `is_convolution` and `is_convolutional` for `Convolutions`; `is_dist` and
`is_distance` for `Distance`; `is_drop` and `is_dropout` for `Dropout`; `is_embed`, `is_embedding`
and `is_sparse` for `Sparse`; `is_lin` and `is_linear` for `Linear`; `is_loss` for `Loss`;
`is_norm`, `is_normalisation` and `is_normalization` for `Normalization`; `is_pad` and `is_padding`
for `Padding`; `is_pool` and `is_pooling` for `Pooling`; `is_recurrent` for `Recurrent`;
`is_shuffle` for `Shuffle`; `is_transformer` for `Transformer`; `is_util` and `is_utility` for
`Utility`; `is_vis`, `is_vision` and `is_visual` for `Vision`.

>>> bt.node_selector.is_conv
Convolutions
>>> bt.node_selector.is_activation.is_relu & ~bt.node_selector.in_loop()
Activations.ReLU & ~in_loop()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bendtrace.insert.selector_algebra import (
    Family,
    Layers,
    Nth,
    Selector,
    Slice,
    as_selector,
    between,
    has_following,
    has_preceding,
)
from bendtrace.insert.selector_naming import (
    has_parameters,
    is_module,
    is_parametrized,
    matches_function,
    matches_module,
    matches_module_class,
    matches_module_lambda,
    matches_name,
    matches_path,
    matches_qualified_name,
    node_lambda,
    source_text,
    with_dtype,
    with_shape,
)
from bendtrace.insert.selector_source import at_line, in_loop, under_branch
from bendtrace.log.path_views import Candidate, CandidateGraph, NodeSelector, Selectable

if TYPE_CHECKING:
    from bendtrace._trace import Trace

__all__ = [
    "Activations",
    "Candidate",
    "CandidateGraph",
    "Convolutions",
    "Distance",
    "Dropout",
    "Family",
    "Layers",
    "Linear",
    "Loss",
    "NodeSelector",
    "Normalization",
    "Padding",
    "Pooling",
    "Recurrent",
    "Selector",
    "Shuffle",
    "Sparse",
    "Transformer",
    "Utility",
    "Vision",
    "as_selector",
    "at_line",
    "between",
    "find",
    "first",
    "has_following",
    "has_parameters",
    "has_preceding",
    "in_loop",
    "is_act",
    "is_activ",
    "is_activation",
    "is_conv",
    "is_convolution",
    "is_convolutional",
    "is_dist",
    "is_distance",
    "is_drop",
    "is_dropout",
    "is_embed",
    "is_embedding",
    "is_lin",
    "is_linear",
    "is_loss",
    "is_module",
    "is_norm",
    "is_normalisation",
    "is_normalization",
    "is_pad",
    "is_padding",
    "is_parametrised",
    "is_parametrized",
    "is_pool",
    "is_pooling",
    "is_recurrent",
    "is_shuffle",
    "is_sparse",
    "is_transformer",
    "is_util",
    "is_utility",
    "is_vis",
    "is_vision",
    "is_visual",
    "last",
    "match_slice",
    "matches_function",
    "matches_module",
    "matches_module_class",
    "matches_module_lambda",
    "matches_name",
    "matches_path",
    "matches_qualified_name",
    "node_lambda",
    "nth",
    "select_all",
    "source_text",
    "under_branch",
    "with_dtype",
    "with_shape",
]
__dir__ = __all__.copy

Activations: Family = Family("Activations")
Convolutions: Family = Family("Convolutions")
Distance: Family = Family("Distance")
Dropout: Family = Family("Dropout")
Linear: Family = Family("Linear")
Loss: Family = Family("Loss")
Normalization: Family = Family("Normalization")
Padding: Family = Family("Padding")
Pooling: Family = Family("Pooling")
Recurrent: Family = Family("Recurrent")
Shuffle: Family = Family("Shuffle")
Sparse: Family = Family("Sparse")
Transformer: Family = Family("Transformer")
Utility: Family = Family("Utility")
Vision: Family = Family("Vision")

# The names that TorchWatcher has for them.
is_act: Family = Activations
is_activ: Family = Activations
is_activation: Family = Activations
is_conv: Family = Convolutions
is_convolution: Family = Convolutions
is_convolutional: Family = Convolutions
is_dist: Family = Distance
is_distance: Family = Distance
is_drop: Family = Dropout
is_dropout: Family = Dropout
is_embed: Family = Sparse
is_embedding: Family = Sparse
is_sparse: Family = Sparse
is_lin: Family = Linear
is_linear: Family = Linear
is_loss: Family = Loss
is_norm: Family = Normalization
is_normalisation: Family = Normalization
is_normalization: Family = Normalization
is_pad: Family = Padding
is_padding: Family = Padding
is_parametrised = is_parametrized
is_pool: Family = Pooling
is_pooling: Family = Pooling
is_recurrent: Family = Recurrent
is_shuffle: Family = Shuffle
is_transformer: Family = Transformer
is_util: Family = Utility
is_utility: Family = Utility
is_vis: Family = Vision
is_vision: Family = Vision
is_visual: Family = Vision


def nth(selector: Selectable, index: int) -> Selector:
    """Select one of the nodes that a selector selects, in the order in which they begin.

    Args:
        selector: a selector, or any value that converts to one.
        index: which one, from 0; negative ones count from the end. An index out of range selects no
            node.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().tanh().sigmoid(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.nth(bt.node_selector.Activations, 1), trace)
        [<node tanh: tanh>]
    """
    return Nth(as_selector(selector), index)


def first(selector: Selectable) -> Selector:
    """Select the first of the nodes that a selector selects.

    Args:
        selector: a selector, or any value that converts to one.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.exp().relu().tanh(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.first(bt.node_selector.Activations), trace)
        [<node relu: relu>]
    """
    return nth(selector, 0)


def last(selector: Selectable) -> Selector:
    """Select the last of the nodes that a selector selects.

    Args:
        selector: a selector, or any value that converts to one.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().tanh().exp(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.last(bt.node_selector.Activations), trace)
        [<node tanh: tanh>]
    """
    return nth(selector, -1)


def match_slice(
    selector: Selectable,
    start: slice | int | None = None,
    stop: int | None = None,
    step: int | None = None,
) -> Selector:
    """Select some of the nodes that a selector selects, in the order in which they begin.

    Args:
        selector: a selector, or any value that converts to one.
        start: the first of them, from 0; negative ones count from the end. Or a `slice`.
        stop: the first of them to leave out again.
        step: the distance from one to the next.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().tanh().sigmoid(), torch.ones(2))
        >>> later = bt.node_selector.match_slice(bt.node_selector.Activations, 1)
        >>> bt.node_selector.find(later, trace)
        [<node tanh: tanh>, <node sigmoid: sigmoid>]
        >>> later == bt.node_selector.match_slice(bt.node_selector.Activations, slice(1, None))
        True
    """
    part = start if isinstance(start, slice) else slice(start, stop, step)
    return Slice(as_selector(selector), part.start, part.stop, part.step)


def select_all(selector: Selectable) -> NodeSelector:
    """Select all the nodes that a selector selects.

    Args:
        selector: a selector, or any value that converts to one.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu().exp().relu())
        >>> every = bt.node_selector.select_all(bt.node_selector.Activations)
        >>> with bended.interject(every, lambda value: value + 1) as handle:
        ...     _ = bended(torch.ones(2))
        >>> handle.report().paths
        ('relu', 'relu_1')
    """
    return as_selector(selector)


def find(selector: Selectable, trace: Trace) -> list[Candidate]:
    """Return the nodes of a recorded run that a selector selects, in the order in which they began.

    Args:
        selector: a selector, or any value that converts to one.
        trace: the run.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: (x.relu() + 1).relu(), torch.ones(2))
        >>> activations = bt.node_selector.Activations
        >>> bt.node_selector.find(activations, trace)
        [<node relu: relu>, <node relu_1: relu>]
        >>> bt.node_selector.find(bt.node_selector.has_following(activations), trace)
        [<node add: add>]
    """
    nodes = trace._run.candidates
    paths = as_selector(selector).select(nodes)
    return [node for node in nodes if node.path in paths]
