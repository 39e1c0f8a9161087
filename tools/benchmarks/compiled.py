"""Calls with insertions on compiled paths, beside those without, native hooks and replays.

At twelve nodes of a model, spread evenly, something is inserted: vectors are patched in, a vector
is added by a patch or by a function, or outputs are kept: by the library, or by observers of a
user, which copy them. All ways do the same, and are checked before they are timed, in turn, round
by round, by the time of the process.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bendtrace as bt
from tools.benchmarks.models import Case, inputs_of
from tools.benchmarks.timing import interleaved

__all__ = ["KINDS", "NODES", "compared_with_insertions"]

NODES = 12
KINDS = ("patches", "steering", "functions", "saves", "observers")
_WARM = 6  # calls until a path is compiled, and again for each insertion


def compared_with_insertions(
    case: Case,
    kind: str,
    rounds: int,
    seconds: float,
    backend: str,
    device: str = "cpu",
    *,
    cuda_graphs: bool = False,
) -> dict[str, Any]:
    """Time calls with insertions of one kind, and return ratios of medians.

    Args:
        case: the model.
        kind: one of `KINDS`.
        rounds: how many rounds there are.
        seconds: that a way may take in all, about.
        backend: what compiles.
        device: where; on a GPU, the time is that until it has done all.
        cuda_graphs: whether kernels are launched as CUDA graphs.
    """
    model, args = case.make().eval().to(device), tuple(x.to(device) for x in inputs_of(case))
    with torch.no_grad():
        names, vectors = _chosen(model, args)
        options = {"drop_slower": False} | ({"cuda_graphs": True} if cuda_graphs else {})
        plain, with_them = (
            bt.BendedModule(model, backend=backend, backend_options=options) for _ in range(2)
        )
        replayed = bt.BendedModule(model)
        kept: dict[str, list[Any]] = {}
        ways: dict[str, Callable[[], Any]] = {
            "native hooks": _hooked(model, args, kind, names, vectors, kept),
            "replay": _bended(replayed, args, kind, names, vectors, kept, "replay"),
            "compiled": _bended(with_them, args, kind, names, vectors, kept, "compiled"),
            "compiled, nothing inserted": lambda: plain(*args),
        }
        for call in ways.values():
            for _ in range(_WARM):
                call()
        rows = with_them.compiled.to_list()
        if not any(row["hits"] for row in rows):
            return {"reason": rows[-1]["reason"] if rows else "no path was taken often enough"}
        wanted, seen = ways["native hooks"](), ways["compiled"]()
        torch.testing.assert_close(seen, wanted, rtol=1e-3, atol=1e-3)
        found = (kept.get(way, []) for way in ("compiled", "native hooks"))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        clock = time.process_time
        if torch.device(device).type == "cuda":
            clock = time.perf_counter
            ways = {name: _until_done(call) for name, call in ways.items()}
        times = interleaved(ways, rounds, seconds=seconds, clock=clock)
    ours = times["compiled"]
    return {
        "median": ours.median,
        **{f"of {name}": ours.relative_to(other).median for name, other in times.items()},
    }


def _until_done(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def _chosen(model: nn.Module, args: tuple[Any, ...]) -> tuple[list[str], list[Tensor]]:
    """Choose modules that give a tensor of their own, and vectors for them."""
    found: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1:
                found.setdefault(name, output)

        return hook

    handles = [
        module.register_forward_hook(look(name))
        for name, module in model.named_modules()
        if name and not any(True for _ in module.children())
        and not getattr(module, "inplace", False)
    ]  # fmt: skip
    model(*args)
    for handle in handles:
        handle.remove()
    names = list(found)
    if len(names) > NODES:
        names = [names[number * len(names) // NODES] for number in range(NODES)]
    generator = torch.Generator().manual_seed(0)
    sizes = [found[name].shape[-1] for name in names]
    vectors = [torch.randn(size, generator=generator) * 0.01 for size in sizes]
    return names, [vector.to(found[names[0]].device) for vector in vectors]


def _hooked(
    model: nn.Module,
    args: tuple[Any, ...],
    kind: str,
    names: list[str],
    vectors: list[Tensor],
    kept: dict[str, list[Any]],
) -> Callable[[], Any]:
    hooked = copy.deepcopy(model)
    for name, vector in zip(names, vectors, strict=True):

        def hook(module: nn.Module, inputs: Any, output: Tensor, vector: Tensor = vector) -> Any:
            if kind in ("saves", "observers"):
                kept.setdefault("native hooks", []).append(output.detach().clone())
                return None
            if kind in ("steering", "functions"):
                return output + 0.5 * vector
            made = output.clone()
            made[0] = vector
            return made

        hooked.get_submodule(name).register_forward_hook(hook)
    return _anew(hooked, args, kept, "native hooks")


def _bended(
    bended: bt.BendedModule,
    args: tuple[Any, ...],
    kind: str,
    names: list[str],
    vectors: list[Tensor],
    kept: dict[str, list[Any]],
    way: str,
) -> Callable[[], Any]:
    for name, vector in zip(names, vectors, strict=True):
        module = bended.model.get_submodule(name)
        if kind == "saves":
            bended.interject(module, bt.patches.RecordPatch(activations=kept.setdefault(way, [])))
        elif kind == "observers":
            bended.interject(module, _Keeping(kept, way))
        elif kind == "functions":
            bended.interject(module, _steering(vector))
        elif kind == "steering":
            bended.interject(module, bt.patches.AddPatch(0.5 * vector))
        else:
            bended.interject(module, bt.patches.ReplacePatch(vector, slice=0))
    return _anew(bended, args, kept, way)


def _anew(
    model: Callable[..., Any], args: tuple[Any, ...], kept: dict[str, list[Any]], way: str
) -> Callable[[], Any]:
    """Return a call of a model that forgets what the call before has kept."""

    def call() -> Any:
        kept.setdefault(way, []).clear()
        return model(*args)

    return call


def _steering(vector: Tensor) -> Callable[[Tensor], Tensor]:
    def steer(output: Tensor) -> Tensor:
        return output + 0.5 * vector

    return steer


class _Keeping(bt.Interjection):
    observes = self_contained = deferrable = True

    def __init__(self, kept: dict[str, list[Any]], way: str) -> None:
        self._kept, self._way = kept, way

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        self._kept.setdefault(self._way, []).append(output.detach().clone())
