"""Outputs of the sides of questions, and of rounds of loops, that AOTInductor would take for one.

Inductor computes equal values once. Where a subgraph returns such a value twice, the C++ that it
writes moves one and the same buffer into two outputs, and reads a null pointer afterwards (torch
2.13: the process crashes; the test of greedy decoding would notice a change).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from bendtrace.torch_rules.functions import OpOverload

_ATEN = torch.ops.aten
_SAME = frozenset({_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default})
_RESHAPED = frozenset({_ATEN.reshape.default, _ATEN.view.default, _ATEN._to_copy.default})


def with_distinct_outputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that does the same, whose subgraphs return no value twice."""
    made = copy.copy(program)
    made._graph_module = copy.deepcopy(program.graph_module)
    for name, module in made.graph_module.named_modules():
        if name and isinstance(module, fx.GraphModule):
            _separate(module)
    return made


def _separate(module: fx.GraphModule) -> None:
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in module.graph.nodes:
        key: Any = node
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            if node.target in _SAME or (node.target in _RESHAPED and _is_as_before(node)):
                numbers[node] = numbers[node.args[0]]
                continue
            given = fx.map_arg((node.args, node.kwargs), lambda one: _Number(numbers[one]))
            key = node.target, repr(given)
        numbers[node] = known.setdefault(key, len(known))
    output = module.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return
    seen: dict[int, fx.Node] = {}
    separate: list[Any] = []
    for result in results:
        if isinstance(result, fx.Node) and isinstance(result.meta.get("val"), torch.Tensor):
            number = numbers[result]
            if number in seen:
                with module.graph.inserting_before(output):
                    result = _again(module.graph, seen[number])
            seen[number] = result
        separate.append(result)
    output.args = (tuple(separate),)
    module.recompile()


class _Number(int):
    """What stands for a node."""

    def __repr__(self) -> str:
        return f"value {int(self)}"


def _is_as_before(node: fx.Node) -> bool:
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.dtype is after.dtype
        and tuple(before.shape) == tuple(after.shape)
    )


def _again(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Return a value once more, in a way that inductor does not see through."""
    same = graph.call_function(_ATEN.eq.Tensor, (value, value))
    made = graph.call_function(_ATEN.where.self, (same, value, value))
    same.meta["val"] = torch.eq(value.meta["val"], value.meta["val"])
    made.meta["val"] = value.meta["val"].clone()
    return made
