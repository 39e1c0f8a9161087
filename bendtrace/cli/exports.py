"""`python -m bendtrace export`: a model written to a file that needs no Python of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from bendtrace._lazy import imported
from bendtrace.cli.inputs import Inputs
from bendtrace.cli.runs import check
from bendtrace.cli.targets import build, find
from bendtrace.errors import InputError
from bendtrace.export.exporting import export
from bendtrace.recording.run import Signature
from bendtrace.torch_rules.draws import seed_all

__all__ = ["EPILOG", "add_options", "exported"]

EPILOG = """\
The model is run with the inputs, in evaluation mode unless --train is given. Its branches and
loops become torch.cond and torch.while_loop. The program is compared with the model for each of
the inputs, before and after it is written. The program has only the sides of branches that some
input took. A call that reaches another side raises an error that names the branch, so give many
inputs: --repeat makes random inputs several times.

files
  model.pt2       for torch.export.load
  model.aoti.pt2  a package compiled by AOTInductor, for torch._inductor.aoti_load_package
  model.onnx      for onnxruntime, by bendtrace.export.OnnxProgram; needs the packages
                  onnx, onnxruntime and onnxscript

exit status
  0 if the file was written, 2 for errors.

example
  python -m bendtrace export model.py:Net --input "x=randn(2, 3)" --repeat 50 --to net.pt2
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="what to export, as module:name or file.py:name")
    add("--input", action="append", default=[], metavar="[NAME=]INPUT", help="one input; repeat")
    add("--call", action="append", default=[], metavar="INPUTS",
        help="all inputs of one more call, separated by `;`; repeat")  # fmt: skip
    add("--repeat", type=int, default=1, metavar="N",
        help="make the inputs of each call N times, each time at random (default: 1)")  # fmt: skip
    add("--to", required=True, metavar="FILE", help="the file: .pt2, .aoti.pt2 or .onnx")
    add("--unseen", choices=("assert", "error"), default="assert",
        help="if no input took a side of a branch: assert makes the program raise an error there,"
        " error makes this command fail (default: assert)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="seed for making the model and the inputs (default: 0)")  # fmt: skip
    add("--train", action="store_true", help="export the model as it is in training mode")


def exported(options: argparse.Namespace) -> str:
    """Carry out the command, and return its report.

    Raises:
        InputError: an option is wrong.
        ExportError: the model cannot be exported.
    """
    if options.repeat < 1:
        raise InputError(f"--repeat takes a positive number, not {options.repeat}")
    given = [Inputs(tuple(options.input))] if options.input else []
    given += map(Inputs.split, options.call)
    if not given:
        raise InputError("no inputs: give them by --input, or --call")
    for inputs in given:  # what is written wrong should show before a large model is made
        inputs.make()
    target: Any = find(options.target)
    seed_all(options.seed)
    model: Callable[..., Any] = build(target, options.target)
    if isinstance(model, nn.Module):
        model.train(options.train)
    calls = [inputs.make() for inputs in given for _ in range(options.repeat)]
    for args, kwargs in calls:
        check(model, args, kwargs, options.target)
    with imported("tqdm").tqdm(
        total=2 * len(calls) + 2, file=sys.stderr, leave=False, disable=None
    ) as bar:

        def tell(step: str) -> None:
            if step == "record" and bar.n >= len(calls):
                bar.reset()  # it begins anew, with what the first attempt has shown
            bar.set_description(step)
            bar.update()

        made = export(model, Signature(model), calls, options.to, options.unseen, tell=tell)
    return str(made)
