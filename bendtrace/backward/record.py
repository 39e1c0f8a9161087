"""BackwardPass: the record of one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bendtrace._history import ModelHistory
from bendtrace._lazy import required_pandas
from bendtrace.backward.graph import AutogradGraph, Earlier
from bendtrace.backward.log import build_log
from bendtrace.backward.node import BackwardNode, shapes_text
from bendtrace.errors import LayerKeyError
from bendtrace.history.sizes import counted
from bendtrace.history.tables import Table

if TYPE_CHECKING:
    import pandas

    from bendtrace._trace import Trace
    from bendtrace.view.drawing.picture import Picture

__all__ = ["BackwardPass"]

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
    """The record of one backward pass: the nodes that ran, in order, and what flowed where.

    Created by `Trace.backward`. Nodes are looked up by their labels (`linear_1_1.AddmmBackward0`)
    and types (`AddmmBackward0`), by the name of a parameter (`0.weight`), by position, and by every
    key that finds values in the trace (`linear_1:2`, modules, node paths, selectors).

    Attributes:
        trace: the run.
        gradients: the gradients that were returned, with `accumulate=False`; otherwise None.
        created_graph: whether the pass can be differentiated.
        nested: how often a node ran in another pass inside this one, as checkpoints with
            `use_reentrant=True` start them. What happens there is not recorded.
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
        earlier: tuple[Any, ...],
        created_graph: bool,
    ) -> None:
        self.trace = trace
        self.gradients: tuple[Tensor, ...] | None = None
        self.created_graph = created_graph
        self.nested = 0
        self.all_nodes: list[BackwardNode] = graph.entries
        self.earlier: tuple[Earlier, ...] = earlier
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
        ran = [entry for entry in self.all_nodes if entry.order is not None]
        self.nodes = sorted(ran, key=lambda entry: entry.order or 0)
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
        ran = [entry for entry in found if entry.order is not None]
        if not ran:
            raise LayerKeyError(f"{key!r}: the pass did not run {found[0].label}", key)
        ran.sort(key=lambda entry: entry.order or 0)
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
        """The pass as a log, whose values are gradients: what logs can do, it can do.

        Each node has a value for each gradient that it returns, and each leaf has one for the
        gradient that arrives. `bt.diff` compares two passes, `save` and `bt.load` store one.
        """
        return ModelHistory(*build_log(self.trace, self.nodes, self._losses))

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
