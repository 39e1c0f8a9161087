"""Logs for the viewers of others, read back as these read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.log.run_log import Form


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
        return x * x.sum().item()


@pytest.fixture(scope="module")
def run() -> bt.Trace:
    torch.manual_seed(0)
    return bt.trace(Looped(), torch.ones(2, 4), save="none")


def labels(run: bt.Trace, *kinds: str) -> list[str]:
    return [entry.label for entry in run.entries if entry.kind in kinds]


def test_a_chrome_trace_has_the_ops_inside_of_their_modules(run: bt.Trace, tmp_path: Path) -> None:
    run.write_as("chrome", tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "Looped"}
    spans = {event["name"]: event for event in events[1:]}
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in spans.values())
    assert [name for name in spans if name in labels(run, "op")] == labels(run, "op")
    outer, inner = spans["block:1"], spans["linear_1_1:1"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-6
    assert outer["cat"] == "Sequential"
    assert inner["args"]["shape"] == "float32[2, 4]"
    total = spans["Looped"]
    assert total["dur"] == pytest.approx(sum(e.time or 0 for e in run if e.kind == "op") * 1e6)
    with pytest.raises(InputError, match="did not measure"):
        bt.trace(Looped(), torch.ones(2, 4)).write_as("chrome", tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_model_explorer_gets_all_nodes_and_edges(run: bt.Trace, tmp_path: Path) -> None:
    run.write_as("model_explorer", tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    (graph,) = read["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert list(nodes) == [entry.label for entry in run.entries]
    for node in nodes.values():
        assert all(edge["sourceNodeId"] in nodes for edge in node["incomingEdges"])
    linear = nodes["linear_1_1:2"]
    assert linear["namespace"] == "block/0"
    sources = [edge["sourceNodeId"] for edge in linear["incomingEdges"]]
    assert set(sources) == {"relu_1_2:1", "block.0.weight", "block.0.bias"}


def test_model_explorers_own_classes_take_it(run: bt.Trace, tmp_path: Path) -> None:
    builder = pytest.importorskip(
        "model_explorer.graph_builder", reason="needs ai-edge-model-explorer", exc_type=ImportError
    )
    run.write_as("model_explorer", tmp_path / "run.json")
    (graph,) = json.loads((tmp_path / "run.json").read_text())["graphs"]
    for node in graph["nodes"]:
        for edge in node["incomingEdges"]:
            builder.IncomingEdge(**edge)
        for pair in node["attrs"]:
            builder.KeyValue(**pair)
        builder.GraphNode(**node)


def test_tensorboard_reads_the_graph(run: bt.Trace, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra viewers")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.write_as("tensorboard", tmp_path / "board")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    nodes = {node.name: node for node in events.Graph().node}
    assert len(nodes) == len(run.entries)
    linear = nodes["block/0/linear_1_1_2"]
    assert linear.op == "linear"
    assert set(linear.input) <= set(nodes)
    assert linear.attr["shape"].s == b"float32[2, 4]"


def test_parquet_has_a_row_for_each_layer(run: bt.Trace, tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas", reason="needs the extra viewers")
    pytest.importorskip("pyarrow", reason="needs the extra viewers")
    run.write_as("parquet", tmp_path / "run.parquet")
    frame = pandas.read_parquet(tmp_path / "run.parquet")
    assert list(frame.index) == [entry.label for entry in run.layers]
    assert json.loads(frame.loc["linear_1_1:2", "parents"]) == ["relu_1_2:1"]
    assert json.loads(frame.loc["linear_1_1:2", "shape"]) == [2, 4]


def test_a_loaded_log_is_written_as_well(run: bt.Trace, tmp_path: Path) -> None:
    run.save(tmp_path / "log")
    loaded = bt.load(tmp_path / "log")
    for form in ("chrome", "model_explorer"):
        for log, name in ((run, "a"), (loaded, "b")):
            log.write_as(form, tmp_path / name)
        assert json.loads((tmp_path / "a").read_text()) == json.loads((tmp_path / "b").read_text())


def test_what_cannot_be_written(run: bt.Trace, tmp_path: Path) -> None:
    assert len(get_args(Form)) == 4
    with pytest.raises(InputError, match='form= is "chrome" or "model_explorer"'):
        run.write_as("onnx", tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No such file"):
        run.write_as("chrome", tmp_path / "missing" / "run.json")
