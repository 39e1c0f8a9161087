"""What it takes to find that a known program fits, by the number of modules of a model.

The layers are all alike, so that nothing but their number differs. Beside it is what torch.compile
asks before it calls what it has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.record.recorded_call import Signature, record
from tools.benchmarks.timing import interleaved
from tools.benchmarks.ways import reason_of

__all__ = ["LAYERS", "Layers", "guarded"]

LAYERS = (6, 50, 100)  # of four modules each
_WIDTH = 8


class _Layer(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.into, self.out = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.into(self.norm(x))))


class Layers(nn.Module):
    """Layers that are all alike, one after the other."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def guarded(layers: int, rounds: int, seconds: float, compiles: bool = True) -> dict[str, Any]:
    """Measure what is asked before a replay, and before a call of compiled code.

    Args:
        layers: how many layers the model has.
        rounds: of the comparison.
        seconds: that each may take, about.
        compiles: whether torch.compile is measured.

    Returns:
        The number of `modules`, what `check` takes, and `torch.compile`, which is a text where it
        could not be measured.
    """
    model, x = Layers(layers).eval(), torch.randn(2, _WIDTH)
    ways: dict[str, Callable[[], object]] = {}
    found: dict[str, Any] = {"modules": sum(1 for _ in model.modules())}
    with torch.no_grad():
        if compiles:  # first: it sets an attribute of the model
            try:
                ways["torch.compile"] = _asked_by_compile(model, x)
            except Exception as error:  # nobody's interface
                found["torch.compile"] = reason_of(error)
        program = Program(record(model, (x,), {}, Signature(model)), GlobalState.current())
        ways["check"] = lambda: program.admits((x,))
        times = interleaved(ways, rounds, seconds=seconds)
        assert all(asks() for asks in ways.values())
    return found | {way: one.json() for way, one in times.items()}


def _asked_by_compile(model: nn.Module, x: Tensor) -> Callable[[], bool]:
    """Return what evaluates all guards of a compiled model."""
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(x)
    code = type(model).forward.__code__
    # Seen in torch 2.13; a row without a number would tell of a change.
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    asks, given = entry.guard_manager.check, {"self": model, "x": x}
    return lambda: bool(asks(given))
