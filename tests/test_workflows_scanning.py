"""The shapes of a run, without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.workflows import scan
from tests.lens_models import Transformer, made
from tests.promise import bits, state


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), torch.ones(3)  # the second is no buffer
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Tensor, gate: bool = False) -> Tensor:
        y = self.fc(x) * self.scale + self.steps
        if gate and y.sum() > 0:
            y = y * 2
        return y


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(made(Transformer), torch.tensor([[1, 2, 3]])), (Gated(), {"x": torch.ones(2, 4)})],
)
def test_a_scan_has_the_shapes_of_a_run_and_no_values(model: nn.Module, inputs: Any) -> None:
    before = bits(dict(model.state_dict())), state(model)
    found, real = scan(bt.BendedModule(model), inputs), bt.workflows.Call.of(inputs)
    run = bt.trace(model, *real.args, **real.kwargs)
    assert [(e.label, e.shape, e.dtype) for e in found.layers] == [
        (e.label, e.shape, e.dtype) for e in run.layers
    ]
    assert found.output.is_meta
    assert (bits(dict(model.state_dict())), state(model)) == before


def test_a_scan_says_where_a_value_is_needed() -> None:
    with pytest.raises(InputError, match=r"reads a value, and a scan has none \(.*scanning.py:2"):
        scan(Gated(), bt.workflows.Call((torch.ones(2, 4),), {"gate": True}))
    with pytest.raises(InputError, match="scan needs a module"):
        scan(torch.relu, torch.ones(2))
    with pytest.raises(RuntimeError, match="reduction dim"):  # as it says for the device
        scan(Gated(), torch.ones(2, 5))
