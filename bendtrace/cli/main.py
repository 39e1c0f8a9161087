"""The command line, `python -m bendtrace`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any, NoReturn

import torch
from torch import nn

import bendtrace
from bendtrace._places import place_text
from bendtrace._trace import trace
from bendtrace._tracebacks import UsersError, one_line
from bendtrace.cli.example import AdaptiveBlock
from bendtrace.cli.exports import EPILOG, add_options, exported
from bendtrace.cli.inputs import Inputs, read
from bendtrace.cli.report import as_json, as_text
from bendtrace.cli.runs import run
from bendtrace.cli.targets import build, find
from bendtrace.errors import BendtraceError, InputError
from bendtrace.history.sizes import size_text
from bendtrace.module import BendedModule
from bendtrace.torch_rules.draws import seed_all
from bendtrace.workflows.costs import cost

__all__ = ["main"]


_EXAMPLE_CALLS = (
    "randn(2, 6)",
    "randn(5, 7)",
    "randn(2, 6) * 4",
    "randn(3, 7) * 4",
    "randn(2, 8)",
    "randn(4, 8)",
)

_EPILOG = """\
targets
  package.module:name or path/to/file.py:name, where name is
    a subclass of nn.Module           it is called without arguments
    a function that can be called     it is called
      without arguments, and returns
      a Module
    anything else that is callable    it is the model

inputs
  x=EXPRESSION, or EXPRESSION for a positional one. Expressions are read, never run:
    numbers, strings, True, None, lists, tuples, dicts, + - * /
    randn(2, 3)  rand  zeros  ones  full((2, 3), 0.5)  arange(5)  linspace(0, 1, 5)  eye(3)
    randint(0, 9, (2, 3))  tensor([[1, 2]], dtype=int64)  randn(3, requires_grad=True)
    load("batch.pt")["x"]  load("batch.safetensors")["x"]
  FILE.pt or FILE.safetensors alone: a dict holds keyword inputs, a tensor is a positional one.

what is done
  The model is traced on the inputs, called on them again, and then on those of each --call.
  Each call is compared bit by bit with a copy of the model that is not traced: outputs, what
  becomes of inputs, parameters and buffers, and the state of torch's random numbers.
  What the model prints goes to stderr.

exit status
  0 if all calls are equal, 1 if one is not, 2 for errors.

examples
  python -m bendtrace trace torch.nn:GELU --input "randn(2, 3)"
  python -m bendtrace trace model.py:Net --input "x=randn(2, 3)" --call "x=randn(5, 3); n=2"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None uses those of the process.

    Returns:
        The exit status: 0 if all outputs were equal to eager's, 1 if not, 2 for an error.
    """
    options = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        with redirect_stdout(sys.stderr):  # of the user's code
            text, equal = _COMMANDS[options.command](options)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except UsersError as error:
        sys.stderr.write(error.traceback())
        return _fail(str(error))
    except BendtraceError as error:
        return _fail(str(error))
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = place_text(last.filename, last.lineno)
        return _fail(f"a bug in bendtrace, at {where}: {one_line(error)}")
    return 0 if equal else 1


def _joined(argv: Sequence[str]) -> list[str]:
    """Join options and expressions, which argparse takes for options if they begin with `-`."""
    joined: list[str] = []
    for text in argv:
        if joined and joined[-1] in ("--input", "--call") and not text.startswith("--"):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    return joined


def _fail(message: str) -> int:
    print(f"bendtrace: error: {message}", file=sys.stderr)
    return 2


def _example(_: argparse.Namespace) -> tuple[str, bool]:
    seed_all(1)
    calls = [Inputs((text,)) for text in _EXAMPLE_CALLS]
    done = run("AdaptiveBlock", AdaptiveBlock(), calls, seed=2)
    return as_text(done, source=True), done.equal


def _traced(options: argparse.Namespace) -> tuple[str, bool]:
    first = Inputs(tuple(options.input))
    calls = [first, first, *map(Inputs.split, options.call)]
    for inputs in calls:  # what is written wrong should show before a large model is made
        inputs.make()
    target: Any = find(options.target)
    seed_all(options.seed)
    model: Callable[..., Any] = build(target, options.target)
    if options.training is not None and isinstance(model, nn.Module):
        model.train(options.training)
    done = run(options.target, model, calls, seed=options.seed, grad=options.grad)
    return as_json(done) if options.json else as_text(done, full=options.full), done.equal


def _explored(options: argparse.Namespace) -> str:
    if not options.domain:
        raise InputError('no input may differ: name one, as in --domain "x=(-1.0, 1.0)"')
    args, kwargs = Inputs(tuple(options.input)).make()
    domain = {}
    for text in options.domain:
        name, equals, bounds = text.partition("=")
        given = read(bounds) if equals else None
        if not isinstance(given, tuple) or len(given) != 2:
            raise InputError(f"--domain is NAME=(LEAST, GREATEST), not {text!r}")
        domain[name.strip()] = given
    seed_all(options.seed)
    model: Callable[..., Any] = build(find(options.target), options.target)
    found = BendedModule(model).explore(
        (args, kwargs), domain, seconds=options.seconds, seed=options.seed
    )
    return str(found)


def _cost(options: argparse.Namespace) -> str:
    args, kwargs = Inputs(tuple(options.input)).make()
    seed_all(options.seed)
    model: Callable[..., Any] = build(find(options.target), options.target)
    with torch.no_grad():
        run = trace(model, *args, save="none", **kwargs)
    costs = cost(run, by=options.by)
    text = f"{costs}\n\n{size_text(costs.peak)} of values at most"
    if costs.at is not None:
        held = ", ".join(f"{entry.label} ({size_text(entry.nbytes)})" for entry in costs.alive[:5])
        text += f", at {costs.at.label}: {held}"
    return text


_COMMANDS: dict[str | None, Callable[[argparse.Namespace], tuple[str, bool]]] = {
    None: _example,
    "trace": _traced,
    "explore": lambda options: (_explored(options), True),
    "cost": lambda options: (_cost(options), True),
    "export": lambda options: (exported(options), True),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(_fail(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bendtrace",
        description="Trace a PyTorch model on real inputs, replay it, and compare with eager."
        " Without a command: show it on a small model.",
    )
    parser.add_argument("--version", action="version", version=f"bendtrace {bendtrace.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    tracing = commands.add_parser(
        "trace",
        help="trace a model of your own; see trace --help",
        description="Trace a model, call it again along the trace, and compare with eager.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = tracing.add_argument
    add("target", metavar="TARGET", help="what to trace, as module:name or file.py:name")
    add("--input", action="append", default=[], metavar="[NAME=]INPUT", help="one input; repeat")
    add("--call", action="append", default=[], metavar="INPUTS",
        help="all inputs of one more call, separated by `;`; repeat")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N",
        help="seed for making the model and the first inputs; each call takes the next one"
        " (default: 0)")  # fmt: skip
    mode = tracing.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="training", action="store_const", const=True,
                      help="put the model in training mode (default: as it was made)")  # fmt: skip
    mode.add_argument("--eval", dest="training", action="store_const", const=False,
                      help="put the model in evaluation mode")  # fmt: skip
    add("--grad", action="store_true", help="let autograd record (default: torch.no_grad())")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--full", action="store_true", help="print the graph, and every line of a long flow table")
    explore = commands.add_parser(
        "explore",
        help="search for inputs that take branches which the given one does not",
        description="Search for inputs that take branches which the given input does not take.",
        epilog="example\n  python -m bendtrace explore model.py:Net "
        '--input "x=randn(2, 3)" --domain "x=(-1.0, 1.0)"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = explore.add_argument
    add("target", metavar="TARGET", help="the model, as module:name or file.py:name")
    add("--input", action="append", default=[], metavar="[NAME=]INPUT",
        help="one input at which the search begins, as for trace; repeat")  # fmt: skip
    add("--domain", action="append", default=[], metavar="NAME=(LEAST, GREATEST)",
        help="an input that may differ, and its range; repeat")  # fmt: skip
    add("--seconds", type=float, default=10.0, metavar="N", help="how long to search (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="for making the model, and for the search")
    costs = commands.add_parser(
        "cost",
        help="list what takes the time and the memory of a call",
        description="Run a model once without gradients, and list its costs, the most time first.",
    )
    add = costs.add_argument
    add("target", metavar="TARGET", help="the model, as module:name or file.py:name")
    add("--input", action="append", default=[], metavar="[NAME=]INPUT", help="one input; repeat")
    add("--by", choices=("op", "module", "line"), default="module", help="(default: module)")
    add("--seed", type=int, default=0, metavar="N", help="for making the model and the inputs")
    export = commands.add_parser(
        "export",
        help="write a model of your own to a file that runs without Python (torch.export, ONNX)",
        description="Write a model, with its branches and loops, to a file without Python.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(export)
    return parser
