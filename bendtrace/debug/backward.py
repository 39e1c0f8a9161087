"""BackwardPass: the record of one backward pass."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bendtrace._trace import ModelHistory
from bendtrace.errors import InputError, LayerKeyError, NeverFiredWarning
from bendtrace.graph import Graph
from bendtrace.log.building import RunData
from bendtrace.log.capture import GraphMarks, ValueCapture, aligned_copy
from bendtrace.log.entries import LayerEntry, Source, Table, counted, nbytes_of
from bendtrace.log.nodes import TreeNode
from bendtrace.log.path_views import Tree
from bendtrace.log.run import near_names
from bendtrace.log.run_log import Facts
from bendtrace.python.lazy import required_pandas
from bendtrace.tape.tape import TensorMeta

if TYPE_CHECKING:
    import pandas

    from bendtrace._trace import Trace
    from bendtrace.show.picture import Picture

_MOST = 50  # nodes that are printed
_COLUMNS = (
    "order", "type", "where", "forward", "made_in", "pass_number", "passes", "module", "parameter",
    "is_edited", "node_path",
)  # fmt: skip


class NodeRow(NamedTuple):
    """A node of a backward pass, for `BackwardPass.table`."""

    order: int
    node: str
    module: str
    arrives: str
    returns: str
    to: str


class BackwardPass:
    """The record of one backward pass: the nodes that ran, in order, and their gradients.

    Created by `Trace.backward`. Nodes are looked up by their labels (`linear_1_1.AddmmBackward0`)
    and types (`AddmmBackward0`), by the name of a parameter (`0.weight`), by position, and by every
    key that finds values in the trace (`linear_1:2`, modules, node paths, selectors).

    Attributes:
        trace: the run.
        gradients: the gradients that were returned, with `accumulate=False`; otherwise None.
        created_graph: whether the pass can be differentiated.
        nested: how often a node ran in another pass inside this one, as checkpoints with
            `use_reentrant=True` start them. Those passes are not recorded.
        nodes: the nodes that ran, in order.
        all_nodes: the nodes of the whole autograd graph, also those that did not run.
        earlier: the passes whose graph this one went through, the latest first.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(4, 2), save="none")
        >>> record = trace.backward(trace.output.sum())
        >>> record
        <BackwardPass of Sequential: 6 nodes>
        >>> record["relu_1"], [node.label for node in record["linear_1"]]
        (<BackwardNode relu_1_2.ReluBackward0: (4, 3) -> (4, 3)>, ['linear_1_1.AddmmBackward0',
         'linear_1_1.TBackward0'])
        >>> record["0.weight"].order, record[0]
        (5, <BackwardNode SumBackward0: () -> (4, 3)>)
    """

    def __init__(
        self,
        trace: Trace,
        graph: AutogradGraph,
        losses: Sequence[Tensor],
        earlier: tuple[BackwardPass, ...],
        created_graph: bool,
    ) -> None:
        self.trace = trace
        self.gradients: tuple[Tensor, ...] | None = None
        self.created_graph = created_graph
        self.nested = 0
        self.all_nodes: list[BackwardNode] = graph.entries
        self.earlier = earlier
        self._mark = object()
        self._graph = graph
        self._losses = [
            (graph.entries[graph.position[node]].label, place, tuple(loss.shape), loss.dtype,
             loss.device)
            for (node, place), loss in zip(graph.roots, losses, strict=True)
        ]  # fmt: skip
        self.nodes: list[BackwardNode] = []

    def backward(self, tensors: Any, gradients: Any = None, **options: Any) -> BackwardPass:
        """Run and record a backward pass through this one, which has `create_graph=True`.

        Args:
            tensors: losses that depend on its gradients.
            gradients: as for `Trace.backward`.
            **options: as for `Trace.backward`.

        Returns:
            The record. `BackwardNode.made_in` is the node of this pass in which a node was made.

        Raises:
            InputError: as for `Trace.backward`, and if this pass has created no graph.

        Example:
            >>> import torch, bendtrace as bt
            >>> x = torch.tensor([2.0], requires_grad=True)
            >>> trace = bt.trace(lambda x: x.pow(3).sum(), x, save="none")
            >>> first = trace.backward(inputs=x, accumulate=False, create_graph=True)
            >>> second = first.backward(first.gradients[0].sum(), inputs=x, accumulate=False)
            >>> second.gradients
            (tensor([12.]),)
            >>> [node.label for node in second if node.made_in == "pow_1_1.PowBackward0"][:2]
            ['pow_1_1.PowBackward0.MulBackward0', 'pow_1_1.PowBackward0.MulBackward1']
        """
        return self.trace.backward(tensors, gradients, through=self, **options)

    def _settle(self) -> None:
        """Note that the pass has ended, and let go of the autograd graph."""
        self.nodes = _those_that_ran(self.all_nodes)
        self._graph.release()

    # Looking things up

    def __getitem__(self, key: Any) -> BackwardNode | tuple[BackwardNode, ...]:
        """Return the node, or the nodes, for a key.

        Raises:
            LayerKeyError: there are none, or they did not run.
        """
        if isinstance(key, slice):
            return tuple(self.nodes[key])
        if isinstance(key, int) and not isinstance(key, bool):
            try:
                return self.nodes[key]
            except IndexError:
                raise LayerKeyError(f"there is no node {key}: {len(self)} ran", key) from None
        found = [self.all_nodes[number] for number in self._graph.find(key)]
        ran = _those_that_ran(found)
        if not ran:
            raise LayerKeyError(f"{key!r}: the pass did not run {found[0].label}", key)
        return ran[0] if len(ran) == 1 else tuple(ran)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[BackwardNode]:
        return iter(self.nodes)

    def _ipython_key_completions_(self) -> list[str]:
        return [entry.label for entry in self.nodes]

    # Telling

    @cached_property
    def log(self) -> ModelHistory:
        """The pass as a log, whose values are gradients, with all methods of logs.

        Each node has a value for each gradient that it returns, and each leaf has one for the
        gradient that arrives. `bt.diff` compares two passes, `save` and `bt.load` store one.
        """
        return ModelHistory(*build_backward_log(self.trace, self.nodes, self._losses))

    def draw(self, path: Any = None, **options: Any) -> Picture:
        """Draw the pass; takes the options of the pictures of runs.

        Example:
            >>> import torch, bendtrace as bt
            >>> trace = bt.trace(torch.nn.Linear(3, 1), torch.ones(1, 3), save="none")
            >>> trace.backward().draw()  # doctest: +ELLIPSIS
            <Picture of backward pass of Linear: ... nodes, ... edges, ...>
        """
        return self.log.draw(path, **options)

    def table(self) -> Table:
        """Return a table of the nodes, which prints and has `to_list()`."""
        return Table([
            NodeRow(
                entry.order or 0, entry.label, entry.module, shapes_text(entry.given),
                shapes_text(entry.made), ", ".join(to[0] for to in entry.next if to is not None),
            )
            for entry in self.nodes
        ])  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each node, indexed by label.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = {
            entry.label: {
                **{name: getattr(entry, name) for name in _COLUMNS},
                "given": shapes_text(entry.given),
                "made": shapes_text(entry.made),
                "next": [to[0] for to in entry.next if to is not None],
                "saved": entry.gradients_in is not None,
            }
            for entry in self.nodes
        }
        frame = required_pandas().DataFrame.from_dict(rows, orient="index")
        return frame.rename_axis("label")  # type: ignore[no-any-return]

    def __str__(self) -> str:
        rows = self.table()
        head = f"backward pass of {self.trace.name}: {counted(len(self), 'node')}"
        if self.nested:
            head += f" (and {self.nested} runs of nodes in passes inside it, not recorded)"
        rest = len(rows) - _MOST
        more = f"\n... {rest} more (all of them: table())" if rest > 0 else ""
        return f"{head}\n{Table(rows[:_MOST])}{more}"

    def __repr__(self) -> str:
        return f"<BackwardPass of {self.trace.name}: {counted(len(self), 'node')}>"


def _those_that_ran(nodes: Iterable[BackwardNode]) -> list[BackwardNode]:
    """Return the nodes that ran, in order."""
    ran = [node for node in nodes if node.order is not None]
    return sorted(ran, key=lambda node: node.order or 0)


# The log of a backward pass: an entry for each gradient.

Loss = tuple[str, int, tuple[int, ...], torch.dtype, torch.device]


def build_backward_log(
    trace: Trace, nodes: Sequence[BackwardNode], losses: Iterable[Loss]
) -> tuple[RunData, Tree, Graph, Facts]:
    """Return the parts of a log of a backward pass."""
    name = f"backward pass of {trace.name}"
    log = RunData(name)
    arriving: dict[str, list[LayerEntry]] = {}
    for number, (label, _, shape, dtype, device) in enumerate(losses, 1):
        entry = LayerEntry("input", "loss", f"loss_{number}.grad", f"loss_{number}.grad")
        entry.node = entry.name
        _add_tensor_entry(log, entry, TensorMeta(shape, dtype, device), None)
        arriving.setdefault(label, []).append(entry)
    for index, node in enumerate(nodes):
        its = arriving.get(node.label, [])
        if node.where == "leaf":
            made: list[tuple[Any, TensorMeta | None]] = [(None, node.given[0])]
            saved = node.gradients_in
        else:
            made, saved = list(enumerate(node.made)), node.gradients_out
        several = len(made) > 1
        for place, meta in made:
            if meta is None:
                continue
            kept = None if saved is None else saved[place or 0]
            entry = _backward_entry(node, index, place if several else None, its)
            _add_tensor_entry(log, entry, meta, kept)
            to = None if place is None else node.next[place]
            if to is not None:
                arriving.setdefault(to[0], []).append(entry)
    around = {scope for entry in log.entries for scope in entry.scopes}
    log.modules = [
        replace(call, inputs=[], outputs=[], flow=())
        for call in trace.modules
        if call.label in around
    ]
    tree = Tree(TreeNode("", "graph", "Graph", "call"))
    return log, tree, Graph(), Facts(None, None, [])


def _backward_entry(
    node: BackwardNode, index: int, place: int | None, parents: list[LayerEntry]
) -> LayerEntry:
    is_leaf = node.where == "leaf"
    name = node.name if place is None else f"{node.name}[{place}]"
    entry = LayerEntry("output" if is_leaf else "op", node.type, name, name, node.pass_number)
    entry.passes = node.passes
    entry.index, entry.node = index, node.label
    entry.element = () if place is None else (place,)
    if is_leaf:
        entry.index, entry.element = None, (node.parameter,)
    entry.function = entry.target = node.type
    entry.module, entry.scopes, entry.source = node.module, node.scopes, node.source
    if is_leaf and parents:  # it is in the calls around all nodes that it receives gradients from
        levels = zip(*(parent.scopes for parent in parents), strict=False)
        same = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
        entry.scopes = tuple(level[0] for level in same)
    for parent in parents:
        entry.parents.append(parent.label)
        parent.children.append(entry.label)
    return entry


def _add_tensor_entry(
    log: RunData, entry: LayerEntry, meta: TensorMeta, kept: Tensor | None
) -> None:
    entry.shape, entry.dtype, entry.device = meta
    entry.nbytes = nbytes_of(meta)
    entry.saved = kept
    entry.ordinal = len(log.entries)
    log.entries.append(entry)


# Running a backward pass with hooks on its nodes that record it.

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
    wanted = None if inputs is None else _list_of_tensors("inputs", inputs)
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
    word = "none" if save is None else save if isinstance(save, str) else ""
    keys = save if isinstance(save, list) else [] if word in ("none", "all") else [save]
    kept = set(range(len(graph.nodes))) if word == "all" else {
        number for key in keys for number in graph.find(key)
    }  # fmt: skip
    changes = list(_changes(graph, edits or {}))
    record = BackwardPass(trace, graph, losses, earlier, create_graph)
    watch = _PassHooks(graph, record, kept, starts or ())
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


def _list_of_tensors(name: str, given: Tensors) -> list[Tensor]:
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
    losses = _list_of_tensors("tensors", tensors)
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
    starts = _list_of_tensors("gradients", gradients)
    if [start.shape for start in starts] != [loss.shape for loss in losses]:
        raise InputError(
            f"gradients have the shapes {[tuple(start.shape) for start in starts]}, and the "
            f"losses {[tuple(loss.shape) for loss in losses]}"
        )
    return starts


class _Change:
    """An edit at one node."""

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


class _PassHooks:
    """The hooks that record a pass."""

    def __init__(
        self, graph: AutogradGraph, record: BackwardPass, kept: set[int], starts: Sequence[Tensor]
    ) -> None:
        self._graph = graph
        self._record = record
        self._numbers_to_keep = kept
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
        """Return the hook that sees the gradients that arrive at a node."""
        entry = self._graph.entries[number]

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._is_own():
                return
            entry.order = next(self._count)
            entry.given = tuple(map(_meta_of_gradient, gradients))
            if number in self._numbers_to_keep:
                entry.gradients_in = tuple(map(_copy_gradient, gradients))
            self._mark(number, gradients)
            self._began[number] = time.perf_counter()

        return hook

    def after(self, number: int) -> Callable[[Any, Any], None]:
        """Return the hook that sees the gradients that a node returns."""
        entry = self._graph.entries[number]

        def hook(made: tuple[Tensor | None, ...], _: Any) -> None:
            if torch._C._current_graph_task_id() != self._task:
                return
            entry.time = time.perf_counter() - self._began[number]
            entry.made = tuple(map(_meta_of_gradient, made))
            if number in self._numbers_to_keep:
                entry.gradients_out = tuple(map(_copy_gradient, made))
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
                entry.order, entry.given = next(self._count), (_meta_of_gradient(gradient),)
                if number in self._numbers_to_keep:
                    entry.gradients_in, entry.gradients_out = (_copy_gradient(gradient),), ()

    def _is_own(self) -> bool:
        """Return whether this is the pass, not another one that a node of it runs."""
        # The thread does not tell: reentrant checkpoints run their pass in the thread of the outer
        # one or in another. torch has no public name for this id (2.13).
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
        if mark is None or mark not in node.metadata:
            found.add(node)
            waiting += [below for below, _ in node.next_functions]
    return found


def _meta_of_gradient(gradient: Tensor | None) -> TensorMeta | None:
    return None if gradient is None else TensorMeta(
        tuple(gradient.shape), gradient.dtype, gradient.device
    )  # fmt: skip


def _copy_gradient(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    with torch.no_grad():
        return aligned_copy(gradient.detach())


# The autograd graph below some tensors, with the forward op that each node belongs to.

_NEAR = 6
_LEAF = "AccumulateGrad"


class AutogradGraph:
    """The nodes below some tensors, which earlier passes, the latest first, may have made."""

    position: dict[Any, int]  # the position of each in both lists
    nodes: list[Any]  # torch's nodes, in the order in which one thread of the engine runs them

    def __init__(
        self, trace: Trace, capture: ValueCapture, tensors: Sequence[Tensor],
        earlier: Sequence[BackwardPass],
    ) -> None:  # fmt: skip
        self._trace = trace
        self._marks: GraphMarks = capture.marks
        self._earlier = earlier
        self._counts: dict[str, int] = {}
        self._of_op: dict[int, LayerEntry] = {}
        for entry in trace.entries:
            if entry.index is not None:
                self._of_op.setdefault(entry.index, entry)
        self._leaves = self._leaf_names(capture)
        edges = [get_gradient_edge(tensor) for tensor in tensors]
        # For each tensor, its node, and which result of that node it is.
        self.roots: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
        self.nodes = _topological([node for node, _ in self.roots])
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self._numbered: dict[tuple[str, int], int] = {}
        self.entries: list[BackwardNode] = self._described()  # the record of each
        for node, described in zip(self.nodes, self.entries, strict=True):
            described.next = tuple(
                None if below is None else (self.entries[self.position[below]].label, number)
                for below, number in node.next_functions
            )

    def _leaf_names(self, capture: ValueCapture) -> dict[int, tuple[str, str]]:
        """Return the name of each leaf, and its label in the log of the run, by identity."""
        names: dict[int, tuple[str, str]] = {}
        leaves = {index: state.tensor for index, state in capture.states.items()}
        for index, weak in {**leaves, **self._marks.leaves}.items():
            tensor, entry = weak(), self._of_op.get(index)
            if tensor is not None and entry is not None:
                names[id(tensor)] = entry.label, entry.label
        if isinstance(self._trace.function, nn.Module):
            for name, parameter in self._trace.function.named_parameters():
                names[id(parameter)] = name, names.get(id(parameter), ("", ""))[1]
        return names

    def _described(self) -> list[BackwardNode]:
        inside: set[int] = set()  # of the graph of the run
        below: set[int] = set()  # under its arguments
        entries: list[BackwardNode] = []
        for number, node in enumerate(self.nodes):
            mark = self._marks.mark_of(node)
            if mark == "before":
                inside.discard(number)
                below.add(number)
            elif mark == "run":
                inside.add(number)
                below.discard(number)
            entry = self._earlier_record(node)
            if entry is None:
                entry = self._new(node, number in inside, number in below)
            elif entry.where == "run" and not entry.made_in:
                inside.add(number)
            if entry.where != "leaf" and (mark or number in inside):
                self._numbered[mark or "run", node._sequence_nr()] = number
            entries.append(entry)
            for other, _ in node.next_functions:
                if other is not None:
                    to = inside if number in inside else below if number in below else None
                    if to is not None:
                        to.add(self.position[other])
        return entries

    def _earlier_record(self, node: Any) -> BackwardNode | None:
        """Return the record of a node that an earlier pass has visited or made."""
        for earlier in self._earlier:
            found = node.metadata.get(earlier._mark)
            if found is not None:
                what, number = found
                entry = earlier.all_nodes[number]
                plain: BackwardNode = replace(
                    entry, order=None, given=(), made=(), next=(), is_edited=False,
                    gradients_in=None, gradients_out=None,
                )  # fmt: skip
                if what == "made":
                    plain.made_in, plain.type, plain.parameter = entry.label, _short_type(node), ""
                    plain.where = "run" if entry.where == "leaf" else entry.where
                    suffix = "" if entry.passes == 1 else f":{entry.pass_number}"
                    plain.name = self._unique(f"{entry.name}.{_short_type(node)}", suffix)
                return plain
        return None

    def _new(self, node: Any, inside: bool, below: bool) -> BackwardNode:
        kind = _short_type(node)
        if kind == _LEAF:
            name, label = self._leaves.get(id(node.variable), ("", ""))
            return BackwardNode(
                f"{name}.grad" if name else self._unique("leaf.grad"), kind, label,
                where="leaf", parameter=name, module=name.rpartition(".")[0],
            )  # fmt: skip
        op = self._marks.op_of(node._sequence_nr()) if inside else None
        forward = None if op is None else self._of_op.get(op)
        if forward is None:
            where: Any = "run" if inside else "before" if below else "after"
            return BackwardNode(self._unique(kind), kind, op=op, where=where)
        suffix = "" if forward.passes == 1 else f":{forward.pass_number}"
        return BackwardNode(
            self._unique(f"{forward.name}.{kind}", suffix), kind, forward.label, op,
            forward.element, "run", "", forward.node_path, forward.module, forward.scopes,
            forward.source, forward.pass_number, forward.passes,
        )  # fmt: skip

    def _unique(self, name: str, suffix: str = "") -> str:
        """Return a name with a number, if there was one before."""
        count = self._counts[name + suffix] = self._counts.get(name + suffix, 0) + 1
        return name if count == 1 else f"{name}_{count}"

    def release(self) -> None:
        """Let go of torch's nodes, which keep the values saved for the backward pass alive."""
        self.nodes, self.position, self.roots = [], {}, []

    # Looking things up

    def find(self, key: Any) -> list[int]:
        """Return the positions of the nodes for a key."""
        if isinstance(key, BackwardNode):
            key = key.label
        if isinstance(key, str):
            found = [
                n for n, e in enumerate(self.entries)
                if key in (e.label, e.name, e.type) or (key == e.parameter != "")
            ]  # fmt: skip
            if found:
                return found
        found = []
        for value in self.values(key):
            if value.kind != "state":
                found += [n for n, e in enumerate(self.entries) if e.op == value.index]
            place = self.place(value)
            found += [] if place is None else [place[0]]
        if not found:
            raise LayerKeyError(
                f"{key!r} has no node below the given tensors: they do not depend on it, or it "
                "needs no gradient",
                key,
            )
        return sorted(set(found))

    def values(self, key: Any) -> list[LayerEntry]:
        """Return the values of the run for a key; for an output, the value that it was."""
        try:
            found = self._trace[key]
        except LayerKeyError as error:
            names = [entry.label for entry in self.entries]
            near = near_names(key, names, _NEAR) if isinstance(key, str) else []
            hint = f"; similar names of backward nodes: {', '.join(near)}" if near else ""
            raise LayerKeyError(f"{error}{hint}", key, tuple(near)) from None
        values = [found] if isinstance(found, LayerEntry) else list(found)
        sources = [
            self._trace[label] if value.kind == "output" else value
            for value in values
            for label in (value.parents if value.kind == "output" else [""])
        ]
        return [source for source in sources if isinstance(source, LayerEntry)]

    def place(self, value: LayerEntry) -> tuple[int, int] | None:
        """Return the node that a value's gradient arrives at, and as which of its gradients."""
        if value.index is not None:
            node, place = self._marks.places.get((value.index, value.element), (("", 0), 0))
            if node in self._numbered:
                return self._numbered[node], place
        for position, entry in enumerate(self.entries):
            if entry.where == "leaf" and entry.forward == value.label:
                return position, 0
        return None


def _short_type(node: Any) -> str:
    """Return the name of a node's type, without torch's namespace."""
    return str(node.name()).rpartition("::")[2]


def _topological(roots: Sequence[Any]) -> list[Any]:
    """Return all nodes below some, each after the nodes that it receives gradients from.

    Among those that are ready, the engine takes the one that was made last.
    """
    waiting: dict[Any, int] = dict.fromkeys(roots, 0)
    stack = list(waiting)
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None:
                if below not in waiting:
                    waiting[below] = 0
                    stack.append(below)
                waiting[below] += 1
    first = [node for node, count in waiting.items() if not count]
    ready = [(-node._sequence_nr(), at, node) for at, node in enumerate(first)]
    heapq.heapify(ready)
    order, count = [], len(first)
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for below, _ in node.next_functions:
            if below is not None:
                waiting[below] -= 1
                if not waiting[below]:
                    count += 1
                    heapq.heappush(ready, (-below._sequence_nr(), count, below))
    return order


# BackwardNode: one node of torch's autograd graph, and what a backward pass did in it.

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
            know the origin of, "after" for the graph of the loss.
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
