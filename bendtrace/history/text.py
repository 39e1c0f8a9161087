"""A log, and its entries, as text and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace._lazy import networkx as nx
from bendtrace._lazy import tabulate
from bendtrace._places import full_place_text, is_installed
from bendtrace.flow import FlowStep, FlowSteps, LogicalFlowStep, LoopFlowStep, ShapeFlowStep
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.lookup import Lookup
from bendtrace.history.sizes import counted, size_text

__all__ = [
    "Facts",
    "entry_text",
    "flow_text",
    "log_text",
    "rolled_graph",
    "rolled_table",
]


_PER_LINE = 8  # modules
_EDGE = 5  # rows and columns of a tensor
_HIERARCHY = 30  # lines


@dataclasses.dataclass
class Facts:
    """Facts for the head of a log that its entries do not contain.

    Attributes:
        seed: the seed of torch's generator at the start of the run; None if nothing was captured.
        seconds: the duration of the run; None if nothing was captured.
        saved: the entries whose value was kept.
        live: why the run cannot be replayed.
    """

    seed: int | None
    seconds: float | None
    live: Sequence[str]


def log_text(
    log: Log, lookup: Lookup, facts: Facts, most: int | None, *, details: bool, mine: bool
) -> str:
    """Return a log as text.

    Args:
        log: the log.
        lookup: its keys.
        facts: further facts.
        most: the maximum number of layers, and twice the maximum number of flow steps; None for
            all.
        details: whether the line of each layer has its shape and its module.
        mine: whether to leave out the flow steps of installed packages.
    """
    saved = [entry for entry in lookup.layers if entry.has_contents]
    # An op with several result tensors has several entries, but its parameters count once.
    uses = len({
        (entry.index, use.name) for entry in log.entries for use in entry.state
        if use.is_parameter and entry.index is not None
    })  # fmt: skip
    lines = [
        f"Log of {log.name}{'' if 'backward pass of' in log.name else ' forward pass'}:",
        f"\tModel structure: {_structure(lookup.layers)}; "
        f"{counted(len(lookup.module_names), 'total module')}.",
        f"\t{counted(len(lookup.layers), 'tensor')} ({_total(lookup.layers)}) computed in forward "
        f"pass; {counted(len(saved), 'tensor')} ({_total(saved)}) saved.",
        f"\t{counted(uses, 'parameter operation')} ({log.parameters} params total; "
        f"{size_text(log.parameter_bytes)}).",
    ]
    if log.flow_steps:
        lines.append(f"\tControl flow: {_flow_summary(log.flow_steps)}.")
    if facts.seed is not None:
        lines.append(f"\tRandom seed: {facts.seed}")
    if facts.seconds is not None:
        lines.append(f"\tTime elapsed: {facts.seconds:.3f}s")
    lines += [f"\tCannot be replayed: {reason}" for reason in facts.live]
    if lookup.module_names:
        hierarchy = list(_hierarchy(log.modules))
        lines.append("\tModule Hierarchy:")
        cut = len(hierarchy) if most is None else _HIERARCHY
        lines += [f"\t\t{line}" for line in hierarchy[:cut]]
        if len(hierarchy) > cut:
            lines.append(f"\t\t... {counted(len(hierarchy) - cut, 'more line')} {_ALL}")
    if log.flow_steps:
        lines.append("\tFlow steps:")
        text = flow_text(log, most and most // 2, mine)
        lines += [f"\t\t{line}" for line in text.splitlines()]
    lines.append("\tLayers:")
    shown = lookup.layers if most is None else lookup.layers[:most]
    lines += [f"\t\t{row}" for row in _rows(shown, details)]
    if len(shown) < len(lookup.layers):
        rest = len(lookup.layers) - len(shown)
        lines.append(f"\t\t... {counted(rest, 'more layer')} {_ALL}")
    return "\n".join(lines)


_ALL = "(all of them: print(log.to_text(None)), where log is this one)"


def flow_text(log: Log, most: int | None = None, mine: bool = False) -> str:
    """Return the flow steps as a table that refers to entries.

    Args:
        log: the log.
        most: the maximum number of steps, without reads of sizes; None for all, with these.
        mine: whether to leave out the steps of installed packages.
    """
    steps = [
        dataclasses.replace(step, name=label or step.name)
        for step, label in zip(log.flow_steps, log.step_labels, strict=True)
        if not (mine and is_installed(step.file))
    ]
    decisions = [step for step in steps if not isinstance(step, ShapeFlowStep)]
    shown = steps if most is None else decisions[:most]
    text = FlowSteps(shown).table() if shown else ""
    if len(shown) < len(steps):
        hidden = [(len(decisions) - len(shown), "more step")]
        hidden.append((len(steps) - len(decisions), "size read"))
        counts = " and ".join(counted(number, noun) for number, noun in hidden if number)
        text += f"\n... {counts} {_ALL}"
    return text.removeprefix("\n")


def entry_text(entry: LayerEntry, log: Log, lookup: Lookup) -> str:
    """Return a text that describes an entry in full."""
    lines = [_head(entry, lookup)]
    if entry.layer_type == "unknown":
        lines.append("A tensor of unknown origin: no recorded op returned it")
    if entry.kind == "number":
        lines.append(f"\tValue: {entry.value!r}")
    elif entry.shape is not None:
        what = "State" if entry.kind == "state" else "Output"
        lines.append(
            f"\t{what} tensor: shape={tuple(entry.shape)}, dtype={entry.dtype}, "
            f"size={size_text(entry.nbytes)}"
        )
    lines += _contents(entry)
    parameters = [use for use in entry.state if use.is_parameter]
    buffers = [use.name for use in entry.state if not use.is_parameter]
    if parameters:
        shapes = ", ".join(str(tuple(use.shape)) for use in parameters)
        total = sum(use.numel for use in parameters)
        size = size_text(sum(use.nbytes for use in parameters))
        lines.append(
            f"\tParams: Computed from params with shape {shapes}; {total} params total ({size})"
        )
    elif entry.kind == "op":
        lines.append("\tParams: none used")
    if buffers:
        lines.append(f"\tOther state: {', '.join(buffers)}")
    lines.append(f"\tParent Layers: {', '.join(entry.parents) or 'none'}")
    lines.append(f"\tChild Layers: {', '.join(entry.children) or 'none'}")
    if entry.function:
        gradient = f" (gradfunc={entry.grad_fn}) " if entry.grad_fn else ""
        lines.append(f"\tFunction: {entry.function}{gradient}")
    if entry.kind in ("op", "number"):
        lines.append(f"\tComputed inside module: {entry.module or 'the model itself'}")
    if entry.time is not None:
        lines.append(f"\tTime elapsed:  {entry.time:.3E}s")
    if entry.flop_count:
        lines.append(f"\tFLOPs: {entry.flop_count} ({entry.macs} MACs)")
    lines += _outputs(entry, log)
    lines.append(f"\tLookup keys: {', '.join(lookup.keys_of(entry))}")
    if entry.node_path:
        lines.append(f"\tNode path: {entry.node_path}")
    if entry.source is not None:
        lines.append(f"\tSource: {entry.source}: {entry.source.statement}")
    lines += [f"\tRan under: {step_text(log.flow_steps[number])}" for number in entry.flow]
    return "\n".join(lines)


def step_text(step: FlowStep) -> str:
    """Return a flow step as text: ``if `x.sum() > 0` was True (model.py:3)``."""
    value = f"was {step.value!r}"
    if isinstance(step, LoopFlowStep):
        value = f"ran {step.how_often}"
    iteration = f", iteration {'.'.join(map(str, step.iteration))}" if step.iteration else ""
    return f"{step.kind} `{step.text}` {value}{iteration} ({full_place_text(step.file, step.line)})"


def _head(entry: LayerEntry, lookup: Lookup) -> str:
    noun = {"number": "Number", "state": "State"}.get(entry.kind, "Layer")
    head = f"{noun} {entry.name}"
    if entry.passes > 1:
        head += f", pass {entry.pass_number}/{entry.passes}"
    if entry.ordinal is not None:
        head += f", operation {entry.ordinal + 1}/{len(lookup.layers)}"
    return f"{head}:"


def _contents(entry: LayerEntry) -> Iterator[str]:
    if entry.unsaved:
        yield f"\t\t(the value was not stored: {entry.unsaved})"
    value = entry.tensor_contents
    if value is None:
        if entry.kind in ("input", "op", "output") and not entry.unsaved:
            yield "\t\t(not saved)"
    elif not isinstance(value, Tensor):
        yield f"\t\tsaved: {value!r}"
    else:
        corner, is_cut = _corner(value)
        yield f"\t\t{corner}{'...' if is_cut else ''}"


def _corner(tensor: Tensor) -> tuple[Any, bool]:
    """Return the beginning of the last two dimensions, and whether anything is left out."""
    whole = tensor.detach()
    if whole.is_nested:
        return whole, False
    corner = whole
    while corner.dim() > 2 and corner.layout == torch.strided and all(corner.shape):
        corner = corner[0]
    if corner.layout == torch.strided:
        for dim in range(corner.dim()):
            corner = corner.narrow(dim, 0, min(_EDGE, corner.shape[dim]))
    return corner, corner.numel() < whole.numel()


def _outputs(entry: LayerEntry, log: Log) -> Iterator[str]:
    if not entry.output_of:
        return
    passes = {call.label: call for call in log.modules}
    parents = {call.parent for call in log.modules}

    def name(label: str) -> str:
        return passes[label].name if passes[label].passes == 1 else label

    yield f"\tOutput of modules: {', '.join(map(name, entry.output_of))}"
    bottom = [label for label in entry.output_of if label not in parents]
    if bottom:
        yield f"\tOutput of bottom-level module: {name(bottom[0])}"


def _structure(layers: Sequence[LayerEntry]) -> str:
    passes = max((entry.passes for entry in layers), default=1)
    recurrence = "purely feedforward" if passes == 1 else f"recurrent (at most {passes} passes)"
    ordinals = {entry.label for entry in layers}
    branches = any(sum(child in ordinals for child in entry.children) > 1 for entry in layers)
    return f"{recurrence}, {'with' if branches else 'without'} branching"


def _flow_summary(steps: FlowSteps) -> str:
    branches = len(steps.of(LogicalFlowStep))
    loops = len(steps.of(LoopFlowStep))
    others = len(steps) - branches - loops
    parts = [(branches, "branch"), (loops, "loop"), (others, "other read")]
    return ", ".join(counted(number, noun) for number, noun in parts if number)


def _rows(entries: Sequence[LayerEntry], details: bool) -> list[str]:
    rows = []
    for entry in entries:
        passes = f"({entry.pass_number}/{entry.passes} passes)" if entry.passes > 1 else ""
        shape = "" if entry.shape is None else str(tuple(entry.shape))
        rows.append((f"{entry.ordinal}: {entry.label} {passes}", shape, entry.module))
    if not details:
        return [head for head, _, _ in rows]
    first, second = (max((len(row[i].rstrip()) for row in rows), default=0) for i in (0, 1))
    return [
        f"{head.rstrip():{first}}  {shape:{second}}  {module}".rstrip()
        for head, shape, module in rows
    ]


def _total(entries: Sequence[LayerEntry]) -> str:
    return size_text(sum(entry.nbytes for entry in entries))


def _hierarchy(calls: Sequence[ModuleEntry]) -> Iterator[str]:
    """Yield the lines of the modules that were called, each within the one that called it."""
    names = {call.label: call.name for call in calls} | {"": ""}
    below: dict[str, list[str]] = {}
    placed: set[str] = set()
    for call in calls:
        if call.name not in placed:
            placed.add(call.name)
            below.setdefault(names.get(call.parent, ""), []).append(call.name)
    yield from _level("", below, "")


def _level(name: str, below: dict[str, list[str]], indent: str) -> Iterator[str]:
    leaves: list[str] = []
    for child in [*below.get(name, ()), None]:
        if child is not None and child not in below and name:
            leaves.append(child)
            continue
        for start in range(0, len(leaves), _PER_LINE):
            more = ", " if start + _PER_LINE < len(leaves) else ""
            yield f"{indent}{', '.join(leaves[start : start + _PER_LINE])}{more}"
        leaves = []
        if child is None:
            return
        if child not in below:
            yield f"{indent}{child}"
            continue
        yield f"{indent}{child}:"
        yield from _level(child, below, f"{indent}    ")


def rolled_graph(entries: Sequence[LayerEntry]) -> nx.DiGraph[str]:
    """Return a graph with one node per layer, with all its passes merged.

    Nodes have `kind`, `layer_type`, `module`, `passes`, `shapes` (without repetitions, in order)
    and `labels`. Edges have `count`, the number of pairs of passes, and `back`: whether a value
    goes from one pass to a later pass of an earlier layer, which closes a loop.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    by_label = {entry.label: entry for entry in entries}
    order: dict[str, int] = {}
    for entry in entries:
        order.setdefault(entry.name, len(order))
        if entry.name not in graph:
            graph.add_node(
                entry.name, kind=entry.kind, layer_type=entry.layer_type, module=entry.module,
                passes=entry.passes, shapes=[], labels=[],
            )  # fmt: skip
        node: dict[str, Any] = graph.nodes[entry.name]
        node["labels"].append(entry.label)
        if entry.shape is not None and entry.shape not in node["shapes"]:
            node["shapes"].append(entry.shape)
    for entry in entries:
        for parent in entry.parents:
            giver = by_label[parent]
            source = giver.name
            if graph.has_edge(source, entry.name):
                graph.edges[source, entry.name]["count"] += 1
                continue
            in_step = giver.passes == entry.passes
            back = order[source] >= order[entry.name] or (
                in_step and giver.pass_number < entry.pass_number
            )
            graph.add_edge(source, entry.name, count=1, back=back)
    return graph


def rolled_table(entries: Sequence[LayerEntry], most: int | None) -> str:
    """Return a table with one line per layer, with all its passes merged."""
    graph = rolled_graph(entries)
    rows = []
    for name, node in graph.nodes(data=True):
        shapes = " ".join(map(str, node["shapes"][:3])) + " ..." * (len(node["shapes"]) > 3)
        sources = [
            source + " (of the pass before)" * graph.edges[source, name]["back"]
            for source in graph.predecessors(name)
        ]
        rows.append((name, node["passes"], shapes, node["module"], ", ".join(sources)))
    shown = rows if most is None else rows[:most]
    text = tabulate.tabulate(
        shown, ("layer", "passes", "shapes", "module", "from"), disable_numparse=True
    )
    rest = len(rows) - len(shown)
    return text + (f"\n... {rest} more (all of them: most=None)" if rest else "")
