"""Reading a log from disk, without the model that it is of."""

from __future__ import annotations

import os
from typing import Any

import torch

from bendtrace.errors import BendtraceError, InputError, LoadError
from bendtrace.graph.export import GRAPH_CODEC, flow_steps_of, from_node_link
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry
from bendtrace.history.run_log import RunLog
from bendtrace.paths.view import Tree
from bendtrace.storage.directory import Opened, open_manifest
from bendtrace.storage.handles import NotSaved, open_files
from bendtrace.storage.records import FACTS, LAYERS, MODULES
from bendtrace.storage.values import read_values

__all__ = ["load"]


def load(directory: str | os.PathLike[str], *, device: torch.device | str | None = None) -> RunLog:
    """Read a log that was saved. The model is not needed, and no code of its is run.

    Activations and gradients stay on disk: each `entry.tensor_contents` reads one anew. What
    could not be stored is None, and `entry.unsaved` says why.

    Args:
        directory: where it was saved to.
        device: where tensors are read to; None for the CPU, wherever they were.

    Raises:
        LoadError: if there is no save, or it is damaged, unfinished, of another program, or of a
            newer version of the format. A damaged activation is noticed when it is read.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> from bendtrace.storage import load, save
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(history, directory)
        ...     loaded = load(directory)
        >>> str(loaded) == str(history)
        True
    """
    try:
        to = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{device!r} is no device: {error}") from None
    directory = os.path.abspath(os.fspath(directory))
    while True:
        opened = open_manifest(directory)
        try:
            return _load(opened, to)
        except LoadError:
            # Another save may have taken its place, and deleted it, while it was being read.
            if open_manifest(directory).manifest == opened.manifest:
                raise


def _load(opened: Opened, device: torch.device | None) -> RunLog:
    decode = GRAPH_CODEC.decode
    contents, flow, graph, tree, tensors = (
        opened.read_json(f"{name}.json") for name in ("log", "flow", "graph", "tree", "tensors")
    )
    files = open_files(opened.folder, opened.headers)
    try:
        log = Log(
            decode(contents["name"]),
            LAYERS.read_all(contents["entries"]),
            MODULES.read_all(contents["modules"]),
            flow_steps_of(flow["steps"], GRAPH_CODEC),
            decode(flow["labels"]),
            contents["parameters"],
            contents["parameter_bytes"],
        )
        entries: dict[str, LayerEntry] = {}
        for entry in log.entries:
            entries[entry.label] = entry
            if entry.index is not None:
                log.places.setdefault((entry.index, entry.element), entry)
        for label, value in read_values(tensors["activations"], files, device).items():
            if isinstance(value, NotSaved):
                entries[label].unsaved = value.reason
            else:
                entries[label].saved = value
        for label, value in read_values(tensors["gradients"], files, device).items():
            entries[label].gradient = value
        facts = FACTS.read(contents["facts"])
        rows = decode(flow["guards"])
        return RunLog(log, _nested(decode(tree)), from_node_link(graph), facts, rows)
    except (BendtraceError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, LoadError):
            raise
        # The checksums are right: it is as it was written, but not by this format's rules.
        raise LoadError(opened.folder, f"what it says makes no sense: {error}") from error


def _nested(flat: dict[str, Any]) -> Tree:
    rows: list[dict[str, Any]] = []
    for holder, row in flat["root"]:
        if holder is not None:
            rows[holder].setdefault("children", []).append(row)
        rows.append(row)
    return Tree.from_dict(flat | {"root": rows[0]})
