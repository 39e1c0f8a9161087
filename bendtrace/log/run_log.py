"""RunLog: the log of a run, for printing and looking up values."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, LayerKeyError
from bendtrace.flow import FlowStep, FlowSteps, LogicalFlowStep, LoopFlowStep, ShapeFlowStep
from bendtrace.log.building import RunData
from bendtrace.log.entries import (
    LayerEntry,
    Listing,
    ModuleEntry,
    Table,
    counted,
    data_frame,
    facts_of,
    hash_of,
    shape_text,
    size_text,
    table_of,
)
from bendtrace.log.nodes import TreeNode
from bendtrace.log.path_views import Node, NodePath, OneSelectable, Tree, is_path_only
from bendtrace.log.run import (
    RunNames,
    ambiguity,
    call_around,
    holders_of,
    layers_by_name,
    near_names,
    passes_of,
)
from bendtrace.python.checks import listed, required_choice
from bendtrace.python.lazy import imported, required, tabulate
from bendtrace.python.lazy import networkx as nx
from bendtrace.python.sites import full_place_text, is_installed
from bendtrace.record.op_names import NodeRef

if TYPE_CHECKING:
    import pandas

    from bendtrace.log.mirror import Graph

_MOST = 50  # layers that are printed


class RunLog:
    """The log of one run: every tensor that was computed, and every flow step.

    Entries are looked up by key: the name of a layer (`conv2d_3_7`, `conv2d_3`, `conv2d_3_7:1`), of
    a module that returned it (`features.6`, `features.6:1`), a position (`7`, `-17`), a node path
    (`features_6.conv2d`), a regular expression, a slice or a list of keys; if the model is
    available, also a selector, a module, a class of modules, a torch function or a function of a
    node.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2))
        >>> [entry.label for entry in history]
        ['input_1_0', 'linear_1_1', 'relu_1_2', 'output_1_3']
        >>> history["linear_1"].parents
        ['input_1_0']
        >>> history.tree.sub_1
        sub_1: Graph(3)
        ├─input: Tensor(4, 3)
        ├─relu: Tensor(4, 3)
        └─output: Tensor(4, 3)
    """

    def __init__(
        self,
        log: RunData,
        tree: Tree,
        graph: Graph,
        facts: Facts,
        guards: list[dict[str, Any]] | None = None,
    ) -> None:
        self.__dict__.update(_log=log, _tree=tree, graph=graph, _facts=facts)
        self.tree = tree.root
        self._guard_rows = guards or []
        self._claim(log)

    _log: RunData
    _tree: Tree
    _facts: Facts
    _has_details = True  # whether the printed line of a layer has its shape and its module
    graph: Graph
    """The networkx mirror at op level."""
    tree: Node
    """The tree of node paths: `history.tree.features.sub_6.conv2d`."""

    def _claim(self, log: RunData) -> None:
        """Mark entries as those of this log."""
        for entry in log.entries:
            entry._belong(weakref.ref(self))

    def _parts(self) -> tuple[RunData, Tree, Graph, Facts, list[dict[str, Any]]]:
        """Return the parts from which another log of the same run can be made."""
        return self._log, self._tree, self.graph, self._facts, self.guard_rows()

    @property
    def name(self) -> str:
        """The name of the run: the class of the model, or the name of the function."""
        return self._log.name

    @property
    def entries(self) -> list[LayerEntry]:
        """All values of the run in order: inputs, results of ops, numbers, state, outputs."""
        return self._log.entries

    @property
    def layers(self) -> list[LayerEntry]:
        """The entries that count as layers: the tensors among inputs, results and outputs."""
        return self._lookup.layers

    @property
    def modules(self) -> list[ModuleEntry]:
        """The module calls in the order in which they began, without the call of the model."""
        return self._log.modules

    @property
    def flow_steps(self) -> FlowSteps:
        """Where the model's Python depended on the inputs."""
        return self._log.flow_steps

    @property
    def step_labels(self) -> list[str]:
        """For each flow step, the label of the entry with the value that it used."""
        return self._log.step_labels

    @property
    def flow_table(self) -> str:
        """The flow steps as a table that refers to values by label."""
        return flow_text(self._log)

    @property
    def seed(self) -> int | None:
        """The seed of torch's generator at the start of the run; None if nothing was captured."""
        return self._facts.seed

    @property
    def time(self) -> float | None:
        """The duration of the run in seconds; None if nothing was captured."""
        return self._facts.seconds

    @property
    def why_live(self) -> tuple[str, ...]:
        """The reasons why the run cannot be replayed; empty if it can."""
        return tuple(self._facts.live)

    def guard_rows(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        return self._guard_rows

    # Looking things up

    @overload
    def __getitem__(self, key: int) -> LayerEntry: ...
    @overload
    def __getitem__(self, key: slice | list[Any]) -> Entries: ...
    @overload
    def __getitem__(self, key: Key) -> LayerEntry | Entries: ...
    def __getitem__(self, key: Key | slice | list[Any]) -> LayerEntry | Entries:
        found = self._lookup.find(key)
        for entry in found:
            entry._belong(lambda: self)
        return found

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerEntry]:
        return iter(self.layers)

    def __contains__(self, key: object) -> bool:
        try:
            self._lookup.find(key)
        except KeyError:
            return False
        return True

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._lookup.keys())

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._log, self._tree)

    # Telling

    def _describe(self, entry: LayerEntry) -> str:
        """Return a text that describes an entry in full."""
        return entry_text(entry, self._log, self._lookup)

    def _keys_of(self, entry: LayerEntry) -> list[str]:
        """Return the keys that find exactly this entry.

        Example:
            >>> import torch, bendtrace as bt
            >>> history = bt.trace(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(4, 2))
            >>> history["linear_1"].lookup_keys
            ['-2', '1', '0', '0:1', 'linear_1_1', 'linear_1_1:1']
        """
        return self._lookup.keys_of(entry)

    def to_text(self, layers: int | None = _MOST, *, only: Literal["all", "mine"] = "all") -> str:
        """Return the log as text.

        Args:
            layers: how many layers to list; None for all.
            only: "mine" leaves out the flow steps of installed packages.

        Raises:
            InputError: `only` is neither "all" nor "mine".
        """
        mine = required_choice("only", only, "all", "mine") == "mine"
        facts, details = self._facts, self._has_details
        return log_text(self._log, self._lookup, facts, layers, details=details, mine=mine)

    def rolled_graph(self) -> nx.DiGraph[str]:
        """Return a networkx graph with one node per layer, with all its passes merged.

        Its edges have the attribute `back`: whether they lead from one pass to a later one.

        Example:
            >>> import torch, bendtrace as bt
            >>> def shrink(x):
            ...     while x.norm() > 1:
            ...         x = x / 2
            ...     return x
            >>> graph = bt.trace(shrink, torch.full((4,), 3.0)).rolled_graph()
            >>> [(source, target) for source, target, back in graph.edges(data="back") if back]
            [('div_1_3', 'norm_1_1'), ('div_1_3', 'div_1_3')]
        """
        return rolled_graph(self._entries_without_state())

    def rolled(self, most: int | None = _MOST) -> str:
        """Return a table with one line per layer, with all its passes merged.

        Args:
            most: the maximum number of lines; None for all.

        Example:
            >>> import torch, bendtrace as bt
            >>> def shrink(x):
            ...     while x.norm() > 1:
            ...         x = x / 2
            ...     return x
            >>> print(bt.trace(shrink, torch.full((4,), 3.0)).rolled())
            layer       passes    shapes    module    from
            ----------  --------  --------  --------  ---------------------------------------
            input_1_0   1         (4,)
            norm_1_1    4         ()                  input_1_0, div_1_3 (of the pass before)
            gt_1_2      4         ()                  norm_1_1
            bool_1      4                             gt_1_2
            div_1_3     3         (4,)                input_1_0, div_1_3 (of the pass before)
            output_1_4  1         (4,)                div_1_3
        """
        graph = self.rolled_graph()
        rows = []
        for name, node in graph.nodes(data=True):
            shapes = " ".join(map(str, node["shapes"][:3])) + " ..." * (len(node["shapes"]) > 3)
            sources = [
                source + " (of the pass before)" * graph.edges[source, name]["back"]
                for source in graph.predecessors(name)
            ]
            rows.append((name, node["passes"], shapes, node["module"], ", ".join(sources)))
        heads = ("layer", "passes", "shapes", "module", "from")
        text = tabulate.tabulate(rows[:most], heads, disable_numparse=True)
        rest = len(rows[most:]) if most is not None else 0
        return text + (f"\n... {rest} more (all of them: most=None)" if rest else "")

    def _entries_without_state(self) -> list[LayerEntry]:
        """Return the entries that were computed in this run."""
        return [entry for entry in self.entries if entry.kind != "state"]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the log as a table with a row for each layer.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> import torch, bendtrace as bt
            >>> history = bt.trace(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(4, 2))
            >>> history.to_pandas()["shape"].to_dict()
            {'input_1_0': (4, 2), 'linear_1_1': (4, 3), 'output_1_2': (4, 3)}
        """
        return data_frame(self._lookup.layers)

    def table(self, what: str = "ops") -> Table:
        """Return a table of the run, which prints and has `to_list()`.

        Args:
            what: "ops", with their arguments; "modules", with the ops and bytes in all of their
                calls; "parameters" or "buffers", with the number of ops that use each.

        Raises:
            InputError: there is no such table.

        Example:
            >>> import torch, bendtrace as bt
            >>> layer = torch.nn.Linear(2, 2)
            >>> trace = bt.trace(torch.nn.Sequential(layer, layer), torch.ones(1, 2))
            >>> print(trace.table("parameters"))
            name      shape    nbytes    trainable    ops
            --------  -------  --------  -----------  -----
            0.bias    (2,)     8 B       True         2
            0.weight  (2, 2)   16 B      True         2
        """
        return table_of(self.entries, self.modules, what)

    def write_as(self, form: Form, path: str | os.PathLike[str]) -> None:
        """Write the log for a viewer of others.

        Args:
            form: "chrome", a trace of the ops and modules for chrome://tracing and Perfetto, one
                after the other, as long as they took; "model_explorer", the JSON that Google's
                Model Explorer opens; "tensorboard", a graph for TensorBoard; "parquet", a table of
                the layers.
            path: the file; for "tensorboard" the directory.

        Raises:
            InputError: there is no such form, or a Chrome trace is asked of a run that was not
                measured.
            ImportError: tensorboard, pandas or pyarrow is missing.
            OSError: the file cannot be written.

        Example:
            >>> import json, os, tempfile, torch, bendtrace as bt
            >>> trace = bt.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2), save="none")
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     path = os.path.join(directory, "run.json")
            ...     trace.write_as("chrome", path)
            ...     with open(path) as file:
            ...         [event["name"] for event in json.load(file)["traceEvents"]]
            ['process_name', 'Sequential', '0:1', 'relu_1_1']
        """
        required_choice("form", form, "chrome", "model_explorer", "tensorboard", "parquet")
        entries = self.entries
        if form == "chrome":
            if not any(entry.time is not None for entry in entries):
                raise InputError("this trace did not measure its ops: record it with save='none'")
            events = [*_events(self.name, entries, self.modules)]
            _write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
        elif form == "model_explorer":
            graph = {"id": self.name, "nodes": [_explorer_node(entry) for entry in entries]}
            _write_json(path, {"label": self.name, "graphs": [graph]})
        elif form == "tensorboard":
            _write_graph(path, entries)
        else:
            _write_parquet(path, self.layers)

    @property
    def hash(self) -> str:
        """A hash of the structure of the run, for tests: `assert trace.hash == "..."`.

        It covers the ops with their functions, arguments, shapes, dtypes, modules, operands and
        parameters, and the flow steps with their answers. It does not cover values, times, devices
        and lines, so it is the same on other machines.

        Example:
            >>> import torch, bendtrace as bt
            >>> runs = [bt.trace(torch.nn.ReLU(), torch.rand(size)) for size in (3, 3, 2)]
            >>> [run.hash == runs[0].hash for run in runs]
            [True, True, False]
        """
        return hash_of(self.entries, self.flow_steps)

    def _count_flops(self) -> None:
        """Count floating point operations; a log without its run has only earlier counts."""

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        counts = f"{len(self)} layers, {len(self.flow_steps)} flow steps"
        return f"<{type(self).__name__} of {self.name}: {counts}>"


# Logs for the viewers of others: Chrome traces, Model Explorer, TensorBoard, parquet.

Form = Literal["chrome", "model_explorer", "tensorboard", "parquet"]


def _write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write JSON after encoding all of it, so that an error leaves no half of a file."""
    text = json.dumps(data)
    Path(path).write_text(text, "utf-8")


def _events(
    name: str, entries: Sequence[LayerEntry], modules: Sequence[ModuleEntry]
) -> Iterator[dict[str, Any]]:
    """Yield an event for each op, one after the other, and one for each call of a module."""
    common = {"ph": "X", "pid": 1, "tid": 1}
    now = 0.0
    spans: dict[str, tuple[float, float]] = {}
    events = []
    for entry in entries:
        if entry.kind != "op" or entry.time is None:
            continue
        start, now = now, now + entry.time * 1e6
        about = {k: v for k, v in facts_of(entry, "chrome").items() if v is not None}
        events.append(
            {**common, "name": entry.label, "cat": entry.layer_type, "ts": start,
             "dur": now - start, "args": about}
        )  # fmt: skip
        for scope in entry.scopes:
            spans[scope] = spans.get(scope, (start, now))[0], now
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": name, "cat": "model", "ts": 0.0, "dur": now}
    classes = {module.label: module.class_name for module in modules}
    for scope, (start, end) in sorted(spans.items(), key=lambda item: (item[1][0], -item[1][1])):
        kind = classes.get(scope, "module")
        yield {**common, "name": scope, "cat": kind, "ts": start, "dur": end - start}
    yield from events


def _operand_labels(entry: LayerEntry) -> list[str]:
    return [*entry.parents, *(use.name for use in entry.state if entry.kind != "state")]


def _explorer_node(entry: LayerEntry) -> dict[str, Any]:
    about = facts_of(entry, "model_explorer")
    return {
        "id": entry.label,
        "label": entry.label,
        "namespace": entry.module.replace(".", "/"),
        "attrs": [{"key": key, "value": str(value)} for key, value in about.items() if value],
        "incomingEdges": [
            {"sourceNodeId": label, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, label in enumerate(_operand_labels(entry))
        ],
        "outputsMetadata": [
            {"id": "0", "attrs": [{"key": "shape", "value": shape_text(entry)}]}
        ],
    }  # fmt: skip


def _write_graph(directory: str | os.PathLike[str], entries: Sequence[LayerEntry]) -> None:
    protos = required("tensorboard.compat.proto.graph_pb2", "a graph for TensorBoard")
    writers = imported("torch.utils.tensorboard")
    names = {
        entry.label: "/".join(
            [*filter(None, entry.module.split(".")), entry.label.replace(":", "_")]
        )
        for entry in entries
    }
    graph = protos.GraphDef()
    for entry in entries:
        node = graph.node.add()
        node.name = names[entry.label]
        node.op = entry.layer_type or entry.kind
        node.input.extend(names[label] for label in _operand_labels(entry) if label in names)
        for key, value in facts_of(entry, "tensorboard").items():
            node.attr[key].s = str(value).encode()
    with writers.SummaryWriter(os.fspath(directory)) as writer:
        events = imported("tensorboard.compat.proto.event_pb2")
        writer._get_file_writer().add_event(events.Event(graph_def=graph.SerializeToString()))


def _write_parquet(path: str | os.PathLike[str], layers: Sequence[LayerEntry]) -> None:
    for name in ("pandas", "pyarrow"):
        required(name, "parquet", "pandas pyarrow")

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, default=str) if isinstance(value, (tuple, list)) else str(value)

    frame = data_frame(layers)
    for column in frame.columns:
        if frame[column].dtype == object:
            frame[column] = frame[column].map(plain)
    frame.to_parquet(path)


# A log, and its entries, as text and as tables.

_PER_LINE = 8  # modules
_EDGE = 5  # rows and columns of a tensor
_HIERARCHY = 30  # lines


@dataclasses.dataclass
class Facts:
    """Facts for the head of a log that its entries do not contain."""

    seed: int | None  # of torch's generator at the start of the run; None without a capture
    seconds: float | None  # the duration of the run; None without a capture
    live: Sequence[str]  # why the run cannot be replayed


def log_text(
    log: RunData, lookup: Lookup, facts: Facts, most: int | None, *, details: bool, mine: bool
) -> str:
    """Return a log as text."""
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
    lines += [f"\t\t{row}" for row in _table_rows(shown, details)]
    if len(shown) < len(lookup.layers):
        rest = len(lookup.layers) - len(shown)
        lines.append(f"\t\t... {counted(rest, 'more layer')} {_ALL}")
    return "\n".join(lines)


_ALL = "(all of them: print(log.to_text(None)), where log is this one)"


def flow_text(log: RunData, most: int | None = None, mine: bool = False) -> str:
    """Return the flow steps as a table that refers to entries."""
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


def entry_text(entry: LayerEntry, log: RunData, lookup: Lookup) -> str:
    """Return a text that describes an entry in full."""
    lines = [_entry_heading(entry, lookup)]
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
    lines += _explorer_outputs(entry, log)
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


def _entry_heading(entry: LayerEntry, lookup: Lookup) -> str:
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


def _explorer_outputs(entry: LayerEntry, log: RunData) -> Iterator[str]:
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


def _table_rows(entries: Sequence[LayerEntry], details: bool) -> list[str]:
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


# Looking up entries: by name, module, position or node path.

# What finds one entry or several.
Key: TypeAlias = int | OneSelectable | NodeRef | LayerEntry | ModuleEntry

_NEAR = 6


class Entries(Listing[LayerEntry]):
    """Several entries: a slice of a log, the passes of a layer, or all outputs of a module."""

    def __init__(self, entries: Iterable[LayerEntry], name: str = "") -> None:
        super().__init__(entries)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in LayerEntry.__dataclass_fields__ | _PROPERTIES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        labels = [repr(entry.label) for entry in self]
        raise AttributeError(
            f"{self._name or 'this'} is {counted(len(self), 'entry')}, not one: use {name} of "
            f"one of them ({listed(labels)})"
        )

    def __repr__(self) -> str:
        if not self:
            return "no entries"
        rows = []
        for one in self:
            about: tuple[Any, str, str] = "", repr(one.value), ""
            if one.shape is not None:
                dtype = str(one.dtype).removeprefix("torch.")
                about = tuple(one.shape), dtype, size_text(one.nbytes)
            ordinal = "" if one.ordinal is None else one.ordinal
            rows.append((ordinal, one.label, *about, one.module))
        headers = ("#", "layer", "shape", "dtype or value", "size", "module")
        return tabulate.tabulate(rows, headers, disable_numparse=True, missingval="")


_PROPERTIES = {
    name: None for name, member in vars(LayerEntry).items() if isinstance(member, property)
}


def _one_or_several(entries: list[LayerEntry], name: str = "") -> LayerEntry | Entries:
    return entries[0] if len(entries) == 1 else Entries(entries, name)


class Lookup:
    """All keys of a log.

    Strings are resolved by `Names`, as everywhere else, and ambiguous ones raise. Only the full
    label of an entry always finds that entry, unless it is also the label of a module.
    """

    def __init__(
        self, log: RunData, tree: Tree, select: Callable[[Any], Iterable[str]] | None = None
    ) -> None:
        self._log = log
        self._tree = tree
        self._select = select
        self._names = RunNames(tree, lambda: log)
        self.layers: list[LayerEntry] = [entry for entry in log.entries if entry.is_layer]
        self._places: dict[tuple[int, tuple[Any, ...]], LayerEntry] = {}
        for entry in log.entries:
            if entry.index is not None:
                self._places[entry.index, entry.element] = entry
                self._places.setdefault(tree.origin(entry.index, entry.element), entry)
        self._outputs = {entry.node_path: entry for entry in self.layers if entry.kind == "output"}
        self._found: dict[str, list[LayerEntry]] = {}
        self._labels: dict[str, list[LayerEntry]] = {}
        for entry in log.entries:
            self._labels.setdefault(entry.name, []).append(entry)
            self._labels[f"{entry.name}:{entry.pass_number}"] = [entry]
            if entry.kind == "state":
                self._found[entry.name] = [entry]
        for name, entries in layers_by_name(log.entries).items():
            self._found[name] = entries
            for entry in entries:
                self._found[f"{name}:{entry.pass_number}"] = [entry]
        modules: dict[str, list[LayerEntry]] = {}
        for call in log.modules:
            given = [
                log.boundary_entries.get((call.label, "output", label)) or self._found[label][0]
                for label in call.outputs
                if label in self._found
            ]
            if given and call.name:
                modules[call.label] = given
                modules.setdefault(call.name, []).extend(given)
        self.module_names: list[str] = list(
            dict.fromkeys(call.name for call in log.modules if call.name)
        )
        for name, several in modules.items():
            self._labels.pop(name, None)
            self._found.setdefault(name, list(dict.fromkeys(several)))

    def find(self, key: Any) -> LayerEntry | Entries:
        """Return the entry, or the entries, for a key."""
        if isinstance(key, slice):
            return Entries(self.layers[self._bounds(key)])
        if isinstance(key, list):
            return Entries(dict.fromkeys(entry for one in key for entry in self.find(one)))
        if isinstance(key, LayerEntry):
            key = key.label
        if isinstance(key, ModuleEntry):
            key = key.label if key.passes > 1 else key.name
        if isinstance(key, NodeRef):
            found = [entry for entry in self._log.entries if entry.node == key.name]
            if not found:
                raise LayerKeyError(f"the mirror has no node {key.name!r} with a value", key)
            return _one_or_several(found, key.name)
        if isinstance(key, Node):
            return self._at(key, str(key._path))
        if isinstance(key, int) and not isinstance(key, bool):
            try:
                return self.layers[key]
            except IndexError:
                raise LayerKeyError(
                    f"there is no layer {key}: the {len(self.layers)} layers have positions 0 "
                    f"to {len(self.layers) - 1}, or -{len(self.layers)} to -1",
                    key,
                ) from None
        if not isinstance(key, str):
            return self._select_entries(key)
        entries = None if is_path_only(key) else self._labels.get(key)
        if entries is not None:
            return _one_or_several(entries, key)
        meanings = self._names.meanings(key)
        if len(meanings) > 1:
            message, clear = ambiguity(key, [(self._names, meaning) for meaning in meanings])
            raise LayerKeyError(message, key, clear)
        entries = None if is_path_only(key) else self._found.get(key)
        if entries is not None:
            return _one_or_several(entries, key)
        if not meanings or not key:
            raise self._unknown(key)
        return self._at(Node(self._tree, *meanings[0].places[0]), key)

    def all(self, key: Any) -> list[LayerEntry]:
        """Return the entries for a key, as a list."""
        return list(self.find(key))

    def _select_entries(self, key: Any) -> LayerEntry | Entries:
        """Return the entries of the nodes that a selector selects."""
        found: dict[LayerEntry, None] = {}
        try:
            if isinstance(key, tuple):
                raise InputError("pass several keys as a list")
            paths = list((self._select or self._matched)(key))
        except InputError as error:
            raise LayerKeyError(
                f"layers are looked up by name, module, position or node path, not by {key!r}", key
            ) from error
        for path in paths:
            node = NodePath(path) if path else self._tree.root
            found.update(dict.fromkeys(self.find(node)))
        if not found:
            label = f"the module {type(key).__name__}" if isinstance(key, nn.Module) else repr(key)
            raise LayerKeyError(f"{label} selects no node of this run", key)
        return _one_or_several(list(found))

    def _matched(self, key: Any) -> Iterator[str]:
        if not isinstance(key, re.Pattern):
            raise InputError(
                "a log without its model supports only regular expressions as selectors"
            )
        waiting = [(self._tree.data, "")]
        while waiting:
            node, scope = waiting.pop()
            qualified = f"{scope}.{node.name}" if scope else node.name
            names = (node.path, node.module if node.role == "call" else qualified)
            if node.role in ("op", "call") and any(map(key.search, names)):
                yield node.path
            inner = node.module if node.role == "call" else scope
            waiting += [(child, inner) for child in reversed(node.children.values())]

    def _bounds(self, key: slice) -> slice:
        """Turn names at the ends of a slice into positions; the last one is excluded, as usual."""
        ends: list[Any] = []
        for end in (key.start, key.stop):
            if isinstance(end, str):
                found = self.find(end)
                first = found if isinstance(found, LayerEntry) else found[0]
                if first.ordinal is None:
                    raise LayerKeyError(f"{end} is not a layer, and so has no position", end)
                end = first.ordinal
            ends.append(end)
        return slice(ends[0], ends[1], key.step)

    def _at(self, node: Node, key: str) -> LayerEntry | Entries:
        found = []
        if node._path in self._outputs:
            return self._outputs[node._path]
        for data, made in passes_of(node._data, node._chosen):
            assert made.index is not None
            entry = self._places.get((made.index, made.element))
            if (
                entry is not None
                and self._log.boundary_entries
                and data.role in ("input", "output")
            ):
                call = call_around(self._holders, data, made)
                way = "" if call is None else self._call_labels.get(call, ""), data.role
                entry = self._log.boundary_entries.get((*way, entry.label), entry)
            if entry is not None and entry not in found:
                found.append(entry)
        if not found:
            raise LayerKeyError(f"the node {key} has no value in the log", key)
        return _one_or_several(found, key)

    @cached_property
    def _holders(self) -> dict[int, TreeNode]:
        return holders_of(self._tree.data)

    @cached_property
    def _call_labels(self) -> dict[int, str]:
        """The labels of the module calls, by the numbers of their passes in the tree."""
        graphs = [node for node in self._tree.data.walk() if node.kind == "graph" and node.module]
        numbers = {made.index for node in graphs for made in node.passes}
        ordered = sorted(number for number in numbers if number is not None)
        labels = [call.label for call in self._log.modules]
        return dict(zip(ordered, labels, strict=True)) if len(ordered) == len(labels) else {}

    def _unknown(self, key: str) -> LayerKeyError:
        near = self.near(key)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        return LayerKeyError(
            f"there is no layer, module or node path {key!r}{hint}. Keys are names of layers "
            "(conv2d_3_7, conv2d_3, conv2d_3:2), of modules (features.6, features.6:1), "
            "positions (7, -1) and node paths (features_6.conv2d)",
            key,
            tuple(near),
        )

    def near(self, key: str) -> list[str]:
        """Return the most similar keys."""
        return near_names(key, (name for name in self.keys() if not name.endswith(":1")), _NEAR)

    def keys(self) -> Iterator[str]:
        """Yield every valid name, for completion: layers, modules, node paths."""
        for name in self._found:
            if name in self._labels or len(self._names.meanings(name)) == 1:
                yield name
        for entry in self._log.entries:
            path = entry.node_path
            if path and path not in self._found:
                yield path if len(self._names.meanings(path)) == 1 else f".{path}"

    def keys_of(self, entry: LayerEntry) -> list[str]:
        """Return the keys that find exactly this entry."""
        names = [entry.name] if entry.passes == 1 else []
        names.append(f"{entry.name}:{entry.pass_number}")
        for label in entry.output_of:
            for name in (label.rpartition(":")[0], label):
                if self._found.get(name) == [entry] and len(self._names.meanings(name)) == 1:
                    names.append(name)
        names = sorted(dict.fromkeys(names))
        if entry.ordinal is None:
            return names
        return [str(entry.ordinal - len(self.layers)), str(entry.ordinal), *names]
