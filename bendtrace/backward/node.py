"""BackwardNode: one node of torch's autograd graph, and what a backward pass did in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from bendtrace.history.entries import Source
from bendtrace.tape.tape import TensorMeta

__all__ = ["BackwardNode", "Gradients", "shapes_text"]

Gradients = tuple[Tensor | None, ...]
Metas = tuple[TensorMeta | None, ...]


@dataclass(eq=False, repr=False)
class BackwardNode:
    """One node of the autograd graph: a function that turns gradients of results into others.

    Attributes:
        name: its unique name, without the pass: `linear_1_1.AddmmBackward0` for a node that an op
            made, `0.weight.grad` for the node that adds a gradient to `.grad` of a leaf.
        type: name of the autograd node, as torch has it: `AddmmBackward0`, `AccumulateGrad`.
        forward: label of the forward value whose op made it (`linear_1_1:2`), "" if no op of the
            run did. For a leaf the label of the parameter or argument.
        op: position of that op on the tape; None for leaves, and for nodes from outside the run.
        element: which result of that op `forward` is.
        where: "run" for a node that an op of the run made, "leaf" for one that accumulates a
            gradient, "before" for the graph of the arguments and of tensors that the run cannot
            know the origin of, "after" for that of the loss.
        made_in: label of the node of an earlier backward pass in which it was made, with
            `create_graph=True`; "" for a node that the forward run has made.
        node_path: path of the forward op in the tree of the run.
        module: name of the innermost module that the op ran in; "" for the root.
        scopes: the calls of modules around it, outermost first.
        source: the place of the op in the source.
        pass_number: the pass of the forward layer, counted from 1.
        passes: the number of passes of the forward layer.
        parameter: for a leaf, its name, such as `0.weight` or `input_1_0`; otherwise "".
        order: when it ran in the pass, counted from 0; None if it did not.
        given: shape, dtype and device of the gradients that arrived: one for each result of the
            forward op, None for those without.
        made: the same for the gradients that it returned: one for each of `next`.
        next: where each gradient that it returns goes: the label of a node, and for which of that
            node's results it is. None where no gradient is needed.
        is_edited: whether an edit changed the gradients that arrived.
        time: duration in seconds, with hooks of others; None if it did not run.
        gradients_in: the gradients that arrived, after edits and hooks; None if they were not kept.
        gradients_out: the gradients that it returned; None if they were not kept.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(4, 2), save="none")
        >>> node = trace.backward(trace.output.sum())["AddmmBackward0"]
        >>> node
        <BackwardNode linear_1_1.AddmmBackward0: (4, 3) -> (3,), none, (2, 3)>
        >>> node.forward, node.module, node.next[0]
        ('linear_1_1', '0', ('0.bias.grad', 0))
    """

    name: str
    type: str
    forward: str = ""
    op: int | None = None
    element: tuple[object, ...] = ()
    where: Literal["run", "leaf", "before", "after"] = "after"
    made_in: str = ""
    node_path: str = ""
    module: str = ""
    scopes: tuple[str, ...] = ()
    source: Source | None = None
    pass_number: int = 1
    passes: int = 1
    parameter: str = ""
    order: int | None = None
    given: Metas = ()
    made: Metas = ()
    next: tuple[tuple[str, int] | None, ...] = field(default=())
    is_edited: bool = False
    time: float | None = None
    gradients_in: Gradients | None = None
    gradients_out: Gradients | None = None

    @property
    def label(self) -> str:
        """Its name, with the pass of the forward layer if that has several."""
        return self.name if self.passes == 1 else f"{self.name}:{self.pass_number}"

    def __repr__(self) -> str:
        arrived = shapes_text(self.given)
        made = f" -> {shapes_text(self.made)}" if self.made else ""
        return f"<BackwardNode {self.label}: {arrived}{made}>"


def shapes_text(metas: Metas) -> str:
    """Return the shapes of gradients as text."""
    return ", ".join("none" if meta is None else str(tuple(meta.shape)) for meta in metas)
