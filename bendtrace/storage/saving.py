"""Writing a log to disk."""

from __future__ import annotations

import os
from typing import Any

import torch

import bendtrace
from bendtrace.graph.export import GRAPH_CODEC, flow_rows, to_node_link
from bendtrace.history.run_log import RunLog
from bendtrace.paths.view import Tree
from bendtrace.storage.directory import draft_in
from bendtrace.storage.records import FACTS, LAYERS, MODULES
from bendtrace.storage.values import write_values

__all__ = ["save"]


def save(history: RunLog, directory: str | os.PathLike[str]) -> None:
    """Write a log to disk: all of it, with the activations and gradients that it holds.

    Args:
        history: a log, or a trace.
        directory: where to. It is made if there is none. A save that is there is replaced in one
            step, when the new one is complete: whatever happens before, it stays as it was.

    Raises:
        SaveError: if the directory holds something that is no save, another save to it is going
            on, or it cannot be written to.
        LoadError: if the log was loaded, and an activation of it cannot be read any more.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.save(directory)
        ...     bt.load(directory)["relu_1"].tensor_contents
        tensor([0., 1.])
    """
    encode = GRAPH_CODEC.encode
    history.count_flops()  # without the run, nobody can
    log, entries = history._log, history.entries
    about = {"bendtrace": bendtrace.__version__, "torch": str(torch.__version__)}
    with draft_in(os.path.abspath(os.fspath(directory)), about) as draft:
        content = {
            "name": encode(log.name),
            "parameters": log.parameters,
            "parameter_bytes": log.parameter_bytes,
            "facts": FACTS.write(history._facts),
            "entries": list(map(LAYERS.write, entries)),
            "modules": list(map(MODULES.write, history.modules)),
        }
        draft.write_json("log.json", content)
        flow = {
            "steps": flow_rows(history.flow_steps, GRAPH_CODEC),
            "labels": encode(list(history.step_labels)),
            "guards": encode(history.guard_rows()),
        }
        draft.write_json("flow.json", flow)
        draft.write_json("graph.json", to_node_link(history.graph))
        draft.write_json("tree.json", encode(_flat(history._tree)))
        activations = {e.label: e.saved for e in entries if e.saved is not None}
        gradients = {e.label: e.gradient for e in entries if e.gradient is not None}
        values = {
            "activations": write_values(draft, "activations", activations),
            "gradients": write_values(draft, "gradients", gradients),
        }
        draft.write_json("tensors.json", values)


def _flat(tree: Tree) -> dict[str, Any]:
    """Return a tree with its nodes as a list, each with the number of the node it belongs to.

    A model that calls itself can have a tree deeper than JSON can be nested.
    """
    nested = tree.to_dict()
    rows: list[list[Any]] = []
    waiting: list[tuple[int | None, dict[str, Any]]] = [(None, nested["root"])]
    while waiting:
        holder, row = waiting.pop()
        waiting.extend((len(rows), child) for child in reversed(row.pop("children", ())))
        rows.append([holder, row])
    return nested | {"root": rows}
