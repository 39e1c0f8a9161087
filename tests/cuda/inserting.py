"""Insertions on compiled paths, beside native hooks on the model and beside replays."""

from __future__ import annotations

from typing import Any

import torch

from tests.cuda.rows import RIGHT, SKIPPED, Options, Row, without_cuda
from tools.benchmarks.compiled import KINDS, NODES, compared_with_insertions
from tools.benchmarks.models import CASES, case_of

__all__ = ["check", "names"]

_MODELS = ("20 gated layers", "tiny transformer", "GPT-2 small", "ResNet-18")
_GRAPHS = ", CUDA graphs"
_ROUNDS, _SECONDS = 30, 1.0


def names(options: Options) -> list[str]:
    """Return the names of the cases."""
    known = {case.name for case in CASES}
    cases = [f"{kind}, {name}" for name in _MODELS if name in known for kind in KINDS]
    return [name + graphs for graphs in ("", _GRAPHS) for name in cases]


def check(name: str, options: Options) -> Row:
    """Time a model with insertions at several nodes; all ways are compared first."""
    kind, _, title = name.removesuffix(_GRAPHS).partition(", ")
    graphs = name.endswith(_GRAPHS)
    if graphs and not options.on_cuda:
        return without_cuda(name, "CUDA graphs are its own")
    if not (options.on_cuda or options.inductor):
        return Row(name, SKIPPED, "on the CPU only with --inductor: it compiles for minutes")
    torch._dynamo.reset()
    found = compared_with_insertions(
        case_of(title), kind, _ROUNDS, _SECONDS, "inductor", options.device, cuda_graphs=graphs
    )
    if "reason" in found:
        return Row(name, SKIPPED, f"not compiled: {found['reason']}")
    numbers: dict[str, Any] = {"nodes": NODES, "microseconds": f"{found['median'] * 1e6:.0f}"}
    for way in ("native hooks", "replay", "compiled, nothing inserted"):
        numbers[f"of {way}"] = f"{found[f'of {way}']:.2f}x"
    return Row(name, RIGHT, numbers=numbers)
