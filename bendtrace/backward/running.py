"""Running a backward pass with hooks on its nodes that record it."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from bendtrace.backward.graph import AutogradGraph
from bendtrace.backward.node import BackwardNode
from bendtrace.backward.record import BackwardPass
from bendtrace.errors import InputError, LayerKeyError, NeverFiredWarning
from bendtrace.history.copies import copied
from bendtrace.tape.tape import TensorMeta

if TYPE_CHECKING:
    from bendtrace._trace import Trace

__all__ = ["backward"]

Tensors = Tensor | Iterable[Tensor]
Edits = Mapping[Any, Callable[..., Any] | Tensor]


def backward(
    trace: Trace,
    tensors: Tensors | None = None,
    gradients: Tensors | None = None,
    *,
    save: Any = None,
    edits: Edits | None = None,
    inputs: Tensors | None = None,
    accumulate: bool = True,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    through: BackwardPass | None = None,
) -> BackwardPass:
    """Run a backward pass through the run, and record it.

    The pass is torch's own, and computes the same bits. It is recorded by hooks on the nodes of the
    autograd graph, which are removed afterwards, also if the pass raises.

    Args:
        trace: the run. It has to be traced with `save="none"`, or more: a trace without `save`
            does not note which op made which node.
        tensors: the losses; None for the output of the run, if that is one tensor.
        gradients: the gradient of each loss; may be left out for losses with one element.
        save: which gradients to keep: "all", "none", or keys of nodes as in `BackwardPass[...]`.
            Shapes and dtypes are always kept.
        edits: what to do with gradients on their way. A key of a value of the run
            (`"linear_1:2"`, a module, a parameter, a selector) takes a function of the gradient of
            this value, as `Tensor.register_hook`, or a tensor in its place. A label of a backward
            node takes a function of the tuple of gradients that arrive, as `Node.register_prehook`.
            None as the result leaves them.
        inputs: the tensors to compute gradients for; None for all leaves.
        accumulate: whether to add the gradients to `.grad`, as `torch.autograd.backward` does.
            Otherwise they are `BackwardPass.gradients`, as from `torch.autograd.grad`, which needs
            `inputs`.
        retain_graph: whether to keep the graph for another pass; None for the value of
            `create_graph`.
        create_graph: whether the pass can be differentiated in turn.
        through: an earlier pass with `create_graph=True` whose gradients the losses depend on, as
            for `BackwardPass.backward`: the nodes know in which node of it they were made.

    Returns:
        The record. If the pass raises, the error has the record up to there as its attribute
        `bendtrace`.

    Raises:
        InputError: an argument makes no sense, the losses do not depend on the run, or `through`
            has created no graph. Nothing has run by then.
        LayerKeyError: a key of `save` or `edits` has no node in the graph. Nothing has run.
        Exception: whatever torch or an edit raises, as it is.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(4, 2), save="none")
        >>> record = trace.backward(trace.output.square().mean(), save="all")
        >>> [node.label for node in record][:3]
        ['MeanBackward0', 'PowBackward0', 'relu_1_2.ReluBackward0']
        >>> record["0.weight"].gradients_in[0].equal(model[0].weight.grad)
        True
    """
    capture = trace._capture
    if capture is None:
        raise InputError(
            "the run did not note which op made which gradient function: trace it with "
            'save="none", or with what is to be saved'
        )
    if through is not None and not through.created_graph:
        raise InputError("that pass has created no graph: run it with create_graph=True")
    earlier = () if through is None else (through, *through.earlier)
    losses = _losses(trace, tensors)
    starts = _starts(losses, gradients)
    wanted = None if inputs is None else _listed("inputs", inputs)
    if not accumulate and not wanted:
        raise InputError("accumulate=False returns the gradients of inputs=, which is missing")
    for tensor in wanted or ():
        if not tensor.requires_grad:
            raise InputError(f"an input of shape {tuple(tensor.shape)} requires no grad")
    graph = AutogradGraph(trace, capture, losses, earlier)
    if not any(entry.where == "run" or entry.made_in for entry in graph.entries):
        raise InputError(
            f"the loss does not depend on this run of {trace.name}: none of its "
            f"{len(graph.nodes)} gradient functions was made in it"
        )
    kept = _kept(graph, save)
    changes = list(_changes(graph, edits or {}))
    record = BackwardPass(trace, graph, losses, earlier, create_graph)
    watch = _Watch(graph, record, kept, starts or ())
    options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
    try:
        with contextlib.ExitStack() as hooks:
            for change in changes:
                hooks.enter_context(change.register())
            for number, node in enumerate(graph.nodes):
                hooks.enter_context(node.register_prehook(watch.before(number)))
                hooks.enter_context(node.register_hook(watch.after(number)))
            if accumulate:
                torch.autograd.backward(losses, starts, inputs=wanted, **options)
            else:
                assert wanted is not None
                record.gradients = torch.autograd.grad(losses, wanted, starts, **options)
                watch.returned(wanted, record.gradients)
    except Exception as error:
        with contextlib.suppress(AttributeError):  # a class of errors with slots
            error.bendtrace = record  # type: ignore[attr-defined]
        raise
    finally:
        record._settle()
    for change in changes:
        if change.entry.order is None:
            warnings.warn(
                f"the edit at {change.key!r} was never called: the pass did not run "
                f"{change.entry.label}",
                NeverFiredWarning,
                stacklevel=2,
            )
    return record


# At the door


def _listed(name: str, given: Tensors) -> list[Tensor]:
    values = [given] if isinstance(given, Tensor) else given
    listed = list(values) if isinstance(values, Iterable) else [values]
    for value in listed:
        if not isinstance(value, Tensor):
            raise InputError(f"{name} has to be a tensor or several, not {type(value).__name__}")
    return listed


def _losses(trace: Trace, tensors: Tensors | None) -> list[Tensor]:
    if tensors is None:
        if not isinstance(trace.output, Tensor):
            raise InputError(
                f"the output of the run is a {type(trace.output).__name__}, not a tensor: pass the "
                "loss, trace.backward(loss)"
            )
        tensors = trace.output
    losses = _listed("tensors", tensors)
    if not losses:
        raise InputError("there is no loss to go backward from")
    for loss in losses:
        if not loss.requires_grad:
            raise InputError(
                f"a loss of shape {tuple(loss.shape)} requires no grad: it was computed from "
                "values that require none, or under torch.no_grad()"
            )
    return losses


def _starts(losses: list[Tensor], gradients: Tensors | None) -> list[Tensor] | None:
    if gradients is None:
        for loss in losses:
            if loss.numel() != 1:
                raise InputError(
                    f"a loss of shape {tuple(loss.shape)} has no single gradient: pass gradients=, "
                    "or a loss with one element"
                )
        return None  # torch begins with ones
    starts = _listed("gradients", gradients)
    if [start.shape for start in starts] != [loss.shape for loss in losses]:
        raise InputError(
            f"gradients have the shapes {[tuple(start.shape) for start in starts]}, and the "
            f"losses {[tuple(loss.shape) for loss in losses]}"
        )
    return starts


def _kept(graph: AutogradGraph, save: Any) -> set[int]:
    if save is None or (isinstance(save, str) and save == "none"):
        return set()
    if isinstance(save, str) and save == "all":
        return set(range(len(graph.nodes)))
    keys = save if isinstance(save, list) else [save]
    return {number for key in keys for number in graph.find(key)}


class _Change:
    """An edit at one node.

    Args:
        key: the key that it was given for.
        node: the node.
        entry: its record.
        place: which of the arriving gradients it edits; None for all of them.
        what: the function, or the tensor to put there.
    """

    def __init__(
        self, key: Any, node: Any, entry: BackwardNode, place: int | None, what: Any
    ) -> None:
        self.key = key
        self.entry = entry
        self._node = node
        self._place = place
        self._function = what if callable(what) else lambda _: what

    def register(self) -> Any:
        """Register the hook, and return its handle."""
        if self.entry.where == "leaf":
            return self._node.variable.register_hook(self._one)
        return self._node.register_prehook(self._all)

    def _one(self, gradient: Tensor) -> Any:
        new = self._function(gradient if self._place is not None else (gradient,))
        self.entry.is_edited |= new is not None
        return new[0] if isinstance(new, (tuple, list)) else new

    def _all(self, gradients: tuple[Any, ...]) -> Any:
        if self._place is None:
            new = self._function(gradients)
            self.entry.is_edited |= new is not None
            return new
        gradient = gradients[self._place]
        new = None if gradient is None else self._function(gradient)
        if new is None:
            return None
        self.entry.is_edited = True
        return (*gradients[: self._place], new, *gradients[self._place + 1 :])


def _changes(graph: AutogradGraph, edits: Edits) -> Iterator[_Change]:
    if not isinstance(edits, Mapping):
        raise InputError(f"edits has to be a dict of keys and functions, not {edits!r}")
    own = {entry.label for entry in graph.entries}
    for key, what in edits.items():
        if not callable(what) and not isinstance(what, Tensor):
            raise InputError(
                f"the edit at {key!r} has to be a function or a tensor, not {type(what).__name__}"
            )
        label = key.label if isinstance(key, BackwardNode) else key
        places: list[tuple[int, int | None]]
        if isinstance(label, str) and label in own:
            places = [(number, None) for number in graph.find(label)]
        else:
            found = [graph.place(value) for value in graph.values(key)]
            places = [place for place in dict.fromkeys(found) if place is not None]
        if not places:
            raise LayerKeyError(
                f"no gradient of {key!r} is computed from the given tensors: they do not depend "
                "on it, or it needs no gradient",
                key,
            )
        for number, place in places:
            yield _Change(key, graph.nodes[number], graph.entries[number], place, what)


# During the pass


class _Watch:
    """The hooks that record a pass."""

    def __init__(
        self, graph: AutogradGraph, record: BackwardPass, kept: set[int], starts: Sequence[Tensor]
    ) -> None:
        self._graph = graph
        self._record = record
        self._kept = kept
        self._count = itertools.count()
        self._task: int | None = None
        self._began: dict[int, float] = {}
        # The nodes that the pass has not made.
        self._others = set(graph.nodes)
        if record.created_graph:
            for number, node in enumerate(graph.nodes):
                node.metadata[record._mark] = ("visited", number)
            for start in starts:
                self._others |= _above(start.grad_fn, self._others)

    def before(self, number: int) -> Callable[[Any], None]:
        """Return the hook that sees what arrives at a node."""
        entry = self._graph.entries[number]

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._is_own():
                return
            entry.order = next(self._count)
            entry.given = tuple(map(_meta, gradients))
            if number in self._kept:
                entry.gradients_in = tuple(map(_copy, gradients))
            self._mark(number, gradients)
            self._began[number] = time.perf_counter()

        return hook

    def after(self, number: int) -> Callable[[Any, Any], None]:
        """Return the hook that sees what a node returns."""
        entry = self._graph.entries[number]

        def hook(made: tuple[Tensor | None, ...], _: Any) -> None:
            if torch._C._current_graph_task_id() != self._task:
                return
            entry.time = time.perf_counter() - self._began[number]
            entry.made = tuple(map(_meta, made))
            if number in self._kept:
                entry.gradients_out = tuple(map(_copy, made))
            self._mark(number, made)

        return hook

    def returned(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Record the gradients that were returned, instead of added to `.grad`."""
        for tensor, gradient in zip(inputs, gradients, strict=True):
            number = self._graph.position.get(get_gradient_edge(tensor).node)
            if number is None:
                continue
            self._mark(number, (gradient,))
            if tensor.is_leaf:
                entry = self._graph.entries[number]
                entry.order, entry.given = next(self._count), (_meta(gradient),)
                if number in self._kept:
                    entry.gradients_in, entry.gradients_out = (_copy(gradient),), ()

    def _is_own(self) -> bool:
        """Return whether this is the pass, not another one that a node of it runs."""
        task = torch._C._current_graph_task_id()
        if self._task is None:
            self._task = task
        self._record.nested += task != self._task
        return task == self._task

    def _mark(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Mark the nodes that were made since, with the number of the node that runs."""
        if not self._record.created_graph:
            return
        mark = self._record._mark
        for gradient in gradients:
            if gradient is not None:
                for node in _above(gradient.grad_fn, self._others, mark):
                    node.metadata[mark] = ("made", number)


def _above(node: Any, others: set[Any], mark: object = None) -> set[Any]:
    """Return a node and those below it, down to others, marked ones and leaves."""
    found: set[Any] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in others or node in found or hasattr(node, "variable"):
            continue
        if mark is not None and mark in node.metadata:
            continue
        found.add(node)
        waiting += [below for below, _ in node.next_functions]
    return found


def _meta(gradient: Tensor | None) -> TensorMeta | None:
    return None if gradient is None else TensorMeta(
        tuple(gradient.shape), gradient.dtype, gradient.device
    )  # fmt: skip


def _copy(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    with torch.no_grad():
        return copied(gradient.detach())
