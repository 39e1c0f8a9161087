"""The log of a backward pass: an entry for each gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bendtrace.backward.node import BackwardNode
from bendtrace.graph import Graph
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry, nbytes_of
from bendtrace.history.text import Facts
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.view import Tree
from bendtrace.tape.tape import TensorMeta

if TYPE_CHECKING:
    from bendtrace._trace import Trace

__all__ = ["Loss", "build_log"]

Loss = tuple[str, int, tuple[int, ...], torch.dtype, torch.device]


def build_log(
    trace: Trace, nodes: Sequence[BackwardNode], losses: Iterable[Loss]
) -> tuple[Log, Tree, Graph, Facts]:
    """Return the parts of a log of a backward pass.

    Args:
        trace: the run.
        nodes: the nodes that ran, in order.
        losses: for each loss the node that it comes from, which result of that node it is, and its
            shape, dtype and device.
    """
    name = f"backward pass of {trace.name}"
    log = Log(name)
    arriving: dict[str, list[LayerEntry]] = {}
    for number, (label, _, shape, dtype, device) in enumerate(losses, 1):
        entry = LayerEntry("input", "loss", f"loss_{number}.grad", f"loss_{number}.grad")
        entry.node = entry.name
        _add(log, entry, TensorMeta(shape, dtype, device), None)
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
            entry = _entry(node, index, place if several else None, its)
            _add(log, entry, meta, kept)
            to = None if place is None else node.next[place]
            if to is not None:
                arriving.setdefault(to[0], []).append(entry)
    _place_leaves(log)
    around = {scope for entry in log.entries for scope in entry.scopes}
    log.modules = [
        replace(call, inputs=[], outputs=[], flow=())
        for call in trace.modules
        if call.label in around
    ]
    tree = Tree(TreeNode("", "graph", "Graph", "call"))
    return log, tree, Graph(), Facts(None, None, [])


def _entry(
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
    for parent in parents:
        entry.parents.append(parent.label)
        parent.children.append(entry.label)
    return entry


def _add(log: Log, entry: LayerEntry, meta: TensorMeta, kept: Tensor | None) -> None:
    entry.shape, entry.dtype, entry.device = meta
    entry.nbytes = nbytes_of(meta)
    entry.saved = kept
    entry.ordinal = len(log.entries)
    log.entries.append(entry)


def _place_leaves(log: Log) -> None:
    """Put each leaf into the module calls around all nodes that it receives gradients from."""
    by_label = {entry.label: entry for entry in log.entries}
    for entry in log.entries:
        if entry.kind != "output" or not entry.parents:
            continue
        scopes = [by_label[parent].scopes for parent in entry.parents]
        common = 0
        while all(len(its) > common and its[common] == scopes[0][common] for its in scopes):
            common += 1
        entry.scopes = scopes[0][:common]
