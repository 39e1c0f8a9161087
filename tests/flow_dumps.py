"""What a Python says of the control flow of the corpus: `python -m tests.flow_dumps FILE`.

The flow steps are read off the instructions and the source, and each Python compiles to other
instructions. They must say the same everywhere, so `tests/test_flow_dumps.py` compares.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import bendtrace as bt
from tests.corpus import CASES
from tests.corpus._case import Case

_OF_THE_CORPUS = str(Path(__file__).parent / "corpus")


def dump(case: Case) -> dict[str, list[list[Any]]]:
    """Return the flow steps of each path of a model: kind, text, value, line and iteration."""
    found = {}
    for number, (name, inputs) in enumerate(case.paths.items()):
        torch.manual_seed(number)
        model = case.make()
        args, kwargs = inputs()
        try:
            trace = bt.trace(model, *args, **kwargs)
        except Exception as error:
            found[name] = [[type(error).__name__]]
            continue
        found[name] = [
            [
                step.kind,
                step.text,
                step.iterations if isinstance(step, bt.flow.LoopFlowStep) else _plain(step.value),
                step.line if step.file.startswith(_OF_THE_CORPUS) else 0,
                list(step.iteration),
            ]
            for step in trace.flow_steps
        ]
    return found


def _plain(value: Any) -> Any:
    # Floats depend on the processor.
    return value if type(value) in (bool, int, str) else type(value).__name__


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    text = json.dumps({case.name: dump(case) for case in CASES})
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
