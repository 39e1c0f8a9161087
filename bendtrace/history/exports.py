"""Logs for the viewers of others: Chrome traces, Model Explorer, TensorBoard, parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bendtrace._checks import required_choice
from bendtrace._lazy import imported, required
from bendtrace.errors import InputError
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.tables import data_frame, facts_of, shape_text

__all__ = ["Form", "write_as"]

Form = Literal["chrome", "model_explorer", "tensorboard", "parquet"]


def write_as(
    form: Form,
    path: str | os.PathLike[str],
    name: str,
    entries: Sequence[LayerEntry],
    modules: Sequence[ModuleEntry],
) -> None:
    """Write a log for another viewer; see `RunLog.write_as`."""
    required_choice("form", form, "chrome", "model_explorer", "tensorboard", "parquet")
    if form == "chrome":
        if not any(entry.time is not None for entry in entries):
            raise InputError("this trace did not measure its ops: record it with save='none'")
        _write(path, {"traceEvents": [*_events(name, entries, modules)], "displayTimeUnit": "ms"})
    elif form == "model_explorer":
        graph = {"id": name, "nodes": [_node(entry) for entry in entries]}
        _write(path, {"label": name, "graphs": [graph]})
    elif form == "tensorboard":
        _write_graph(Path(path), entries)
    else:
        _write_parquet(path, entries)


def _write(path: str | os.PathLike[str], data: Any) -> None:
    """Write JSON at once, so that no half of it is left where something fails."""
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


def _operands(entry: LayerEntry) -> list[str]:
    return [*entry.parents, *(use.name for use in entry.state if entry.kind != "state")]


def _node(entry: LayerEntry) -> dict[str, Any]:
    about = facts_of(entry, "model_explorer")
    return {
        "id": entry.label,
        "label": entry.label,
        "namespace": entry.module.replace(".", "/"),
        "attrs": [{"key": key, "value": str(value)} for key, value in about.items() if value],
        "incomingEdges": [
            {"sourceNodeId": label, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, label in enumerate(_operands(entry))
        ],
        "outputsMetadata": [
            {"id": "0", "attrs": [{"key": "shape", "value": shape_text(entry)}]}
        ],
    }  # fmt: skip


def _write_graph(directory: Path, entries: Sequence[LayerEntry]) -> None:
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
        node.input.extend(names[label] for label in _operands(entry) if label in names)
        for key, value in facts_of(entry, "tensorboard").items():
            node.attr[key].s = str(value).encode()
    with writers.SummaryWriter(str(directory)) as writer:
        events = imported("tensorboard.compat.proto.event_pb2")
        writer._get_file_writer().add_event(events.Event(graph_def=graph.SerializeToString()))


def _write_parquet(path: str | os.PathLike[str], entries: Sequence[LayerEntry]) -> None:
    for name in ("pandas", "pyarrow"):
        required(name, "parquet", "pandas pyarrow")
    frame = data_frame([entry for entry in entries if entry.is_layer])
    for column in frame.columns:
        if frame[column].dtype == object:
            frame[column] = frame[column].map(_plain)
    frame.to_parquet(path)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return json.dumps(value, default=str)
    return str(value)
