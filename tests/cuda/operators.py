"""The operators of torch's own tests, on the device: compared bit for bit with eager."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import bendtrace as bt
from tests.cuda.promising import Wrap, compared
from tests.cuda.rows import INCOMPARABLE, Options, Row, line_of

__all__ = ["check", "names"]

_TIMES = 4  # that a model is compared with itself


def names(options: Options) -> list[str]:
    """Return the names of the operators that torch has sample inputs of for the device."""
    if importlib.util.find_spec("expecttest") is None:  # torch's own tests import it
        return []
    from tests.sweep.ops import OPS, dtype_of

    found = sorted(name for name in OPS if dtype_of(OPS[name], options.device) is not None)
    return found if options.on_cuda else found[::40]  # tests/test_op_db.py tries all on the CPU


def _stir(number: int, device: str) -> None:
    """Leave other content in memory, which shows what is read before it is written."""
    for size in (64, 1 << 12, 1 << 18):
        torch.full((size,), number % 251, dtype=torch.uint8, device=device)


def check(name: str, options: Options) -> Row:
    """Call an operator in all its forms, also in front of a guard that fails."""
    from tests.sweep import outcome
    from tests.sweep.ops import calls_of, sweep, sweep_guarded

    device = options.device
    try:
        list(calls_of(name, device))
    except Exception as error:
        return Row(name, INCOMPARABLE, f"there are no samples: {line_of(error)}")

    def comparison(wrap: Wrap) -> dict[str, Any]:
        if wrap is not bt.BendedModule:
            for label, call, drawn, gradients in calls_of(name, device):
                for sample in (each for pair in drawn for each in pair):
                    backward = sample.backward if gradients else None
                    found = []
                    for number in range(_TIMES):
                        _stir(number, device)
                        found.append(outcome(call, call, sample, 0, backward))
                    assert all(one == found[0] for one in found), label
            return {}
        found = [served for _, served in sweep(name, device)]
        found += [served for _, *both in sweep_guarded(name, device) for served in both]
        wrong = [said for served in found for said in served.wrong]
        assert not wrong, wrong[0]
        ways = [way for served in found for way in (served.again, served.twin)]
        return {way: ways.count(way) for way in ("replay", "resume", "live", "raised")}

    return compared(name, comparison)
