"""Names of the ops on a tape."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

from bendtrace.python.computations import row_at
from bendtrace.tape.tape import Op, OpKind, Tape
from bendtrace.watch.functions import name_of


class NodeRef:
    """A reference in a node's arguments to the value of another node.

    Args:
        name: the name of that node.

    Attributes:
        name: the name of that node.

    Example:
        >>> import torch, bendtrace as bt
        >>> graph = bt.trace(lambda x: x.relu() + 1, torch.ones(2)).graph
        >>> reference, one = graph.nodes["add"]["args"]
        >>> reference, reference.name, reference == bt.graph.NodeRef("relu"), one
        (%relu, 'relu', True, 1)
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeRef) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"%{self.name}"


def base_name(op: Op) -> str:
    """Return the name of an op before it is made unique: `conv1d`, `gt`, `fc_weight`, `x`."""
    if op.kind in (OpKind.INPUT, OpKind.STATE):
        # `past[0]` is past_0, but an attribute called `weight_` keeps its name.
        return _spell(str(op.target).removeprefix("self.").rstrip("'\"]"))
    if op.kind is OpKind.UNKNOWN:
        return "unknown"
    target = operator.getitem if op.target is row_at else op.target
    return base_name_of(getattr(target, "stands_for", None) or target)


def base_name_of(function: Any) -> str:
    """Return the name of a call of a function before it is made unique."""
    name = name_of(function)
    return _spell(name.strip("_") if name.startswith("__") else name)


def _spell(name: str) -> str:
    name = re.sub(r"\W+", "_", name).lstrip("_") or "op"
    return f"_{name}" if name[0].isdigit() else name


def node_names(tape: Tape) -> list[str]:
    """Return a unique name for each op, in the manner of torch.fx: `gt`, `gt_1`, `gt_2`.

    Those of lifted counters come last, so that the others have the names that they always have.
    """
    taken: set[str] = set()
    counts: dict[str, int] = {}
    names = [""] * len(tape.ops)
    counters = sorted(tape.counters)
    for op in itertools.chain(tape.ops, map(tape.ops.__getitem__, counters)):
        if op.index in tape.counters and len(taken) < len(tape.ops) - len(counters):
            continue
        base = name = "counter" if op.index in tape.counters else base_name(op)
        while name in taken:
            counts[base] = counts.get(base, 0) + 1
            name = f"{base}_{counts[base]}"
        taken.add(name)
        names[op.index] = name
    return names


def target_name(target: Any) -> str:
    """Return the target of a node, as text."""
    if target is None or isinstance(target, str):
        return str(target)
    module = getattr(target, "__module__", None) or ""
    name = name_of(target)
    module = {"_operator": "operator", "torch._tensor": "torch.Tensor"}.get(module, module)
    return f"{module}.{name}" if module else name


def map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a node's arguments with every item changed, in tuples, lists, dicts and slices."""
    if isinstance(value, (tuple, list)):
        items = [map_items(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_items(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_items(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)
