"""The command line, `python -m bendtrace`.

InputTexts are written as small expressions, `x=randn(2, 3)`, or are in files; no code in them runs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import json
import keyword
import math
import operator
import os
import pickle
import pkgutil
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from textwrap import dedent, indent, shorten, wrap
from types import ModuleType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx, nn

import bendtrace
from bendtrace._trace import Trace, trace
from bendtrace.engine.dispatcher import Stats
from bendtrace.engine.explain import Mismatch
from bendtrace.errors import BendtraceError, InputError
from bendtrace.export.exporting import export_calls
from bendtrace.flow import FlowStep, FlowSteps, LoopFlowStep
from bendtrace.log.entries import counted, number_text, size_text
from bendtrace.module import BendedModule
from bendtrace.python.checks import did_you_mean
from bendtrace.python.compare import same_bits
from bendtrace.python.internals import pytree
from bendtrace.python.lazy import imported, required, tabulate
from bendtrace.python.sites import place_text
from bendtrace.record.recorded_call import Signature
from bendtrace.research.costs import cost
from bendtrace.show.example import AdaptiveBlock
from bendtrace.watch.draws import seed_all

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"


def is_tensor_file(text: str) -> bool:
    """Return whether a text is the name of a file that `load_tensors` accepts."""
    return text.endswith((*_TORCH_FILES, _SAFETENSORS))


def load_tensors(path: str) -> Any:
    """Read a file of tensors onto the CPU."""
    path = os.path.expanduser(path)
    if not is_tensor_file(path):
        kinds = ", ".join((*_TORCH_FILES, _SAFETENSORS))
        raise InputError(f"cannot load {path!r}: its name has to end in one of {kinds}")
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path!r}{_hint(path)}")
    return _load_safetensors(path) if path.endswith(_SAFETENSORS) else _load_torch(path)


def _hint(path: str) -> str:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder or "."):
        return f": there is no folder {folder!r}"
    files = [os.path.join(folder, n) for n in os.listdir(folder or ".") if is_tensor_file(n)]
    return did_you_mean(path, files, quotes=False)


def _load_torch(path: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # about other versions of pickle
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path!r} was not loaded: it contains other objects than tensors and plain "
            "values, or is damaged, and loading it could run code; save only the tensors, "
            "with torch.save"
        ) from None
    except Exception as error:
        reason = shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise InputError(f"cannot load {path!r}, it may be damaged: {reason}") from None


def _load_safetensors(path: str) -> dict[str, torch.Tensor]:
    safetensors = required("safetensors", f"reading {path!r}", error=InputError)
    try:
        tensors: dict[str, torch.Tensor] = imported("safetensors.torch").load_file(path)
    except safetensors.SafetensorError as error:
        raise InputError(f"cannot load {path!r}, it may be damaged: {error}") from None
    return tensors


@dataclass(frozen=True)
class Maker:
    """A function that an expression may call."""

    function: Callable[..., Any]
    # Names of its parameters; the first may cover all positional ones (`*size`).
    names: tuple[str, ...]

    def allows(self, name: str) -> bool:
        """Return whether the function has a parameter with this name."""
        return name in (*(n.lstrip("*") for n in self.names), "dtype", "requires_grad")


MAKERS = {
    "arange": Maker(torch.arange, ("start", "end", "step")),
    "eye": Maker(torch.eye, ("n", "m")),
    "full": Maker(torch.full, ("size", "fill_value")),
    "linspace": Maker(torch.linspace, ("start", "end", "steps")),
    "ones": Maker(torch.ones, ("*size",)),
    "rand": Maker(torch.rand, ("*size",)),
    "randint": Maker(torch.randint, ("low", "high", "size")),
    "randn": Maker(torch.randn, ("*size",)),
    "tensor": Maker(torch.tensor, ("data",)),
    "zeros": Maker(torch.zeros, ("*size",)),
}

DTYPES = {name: v for name, v in sorted(vars(torch).items()) if isinstance(v, torch.dtype)}

_CONSTANTS = {"inf": math.inf, "nan": math.nan}

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

_KNOWN = f"known names: {', '.join(MAKERS)}, load, inf, nan and torch's dtypes"


@dataclass(frozen=True)
class InputTexts:
    """The arguments of one call, as written."""

    # An expression, or a file of tensors, for each argument; positional unless it starts with
    # `name=`.
    texts: tuple[str, ...]

    @classmethod
    def split(cls, text: str) -> InputTexts:
        """Split the arguments of one call, written as `x=randn(2, 3); n=3`.

        Example:
            >>> InputTexts.split("x=randn(2); mode='a;b'").texts
            ('x=randn(2)', "mode='a;b'")
        """
        parts = re.findall(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^;])+""", text)
        return cls(tuple(part.strip() for part in parts if part.strip()))

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return new positional and keyword arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for text in self.texts:
            for name, value in _argument_values(text):
                if name is None:
                    args.append(value)
                elif name in kwargs:
                    raise InputError(f"two inputs are called {name!r}")
                else:
                    kwargs[name] = value
        return tuple(args), kwargs

    def __str__(self) -> str:
        return "; ".join(self.texts)


def _argument_values(text: str) -> Iterator[tuple[str | None, Any]]:
    """Yield (name or None, value) of the arguments that one text stands for."""
    named = re.match(r"\s*([^\W\d]\w*)\s*=(?!=)\s*(.*)", text, re.DOTALL)
    if named is not None and not keyword.iskeyword(named[1]):
        content = named[2].strip()
        yield (
            named[1],
            load_tensors(content) if is_tensor_file(content) else read_expression(content),
        )
        return
    text = text.strip()
    if not text:
        raise InputError("an input is empty")
    if not is_tensor_file(text):
        yield None, read_expression(text)
        return
    content = load_tensors(text)
    if isinstance(content, Tensor):
        yield None, content
    elif isinstance(content, dict) and all(isinstance(key, str) for key in content):
        yield from content.items()
    else:
        raise InputError(
            f"{text!r} contains a {type(content).__name__}; as the inputs it has to contain a "
            f"tensor or a dict with names as keys. For one input, name it: `x={text}`"
        )


def read_expression(text: str) -> Any:
    """Return the value of an expression made of literals, arithmetic and known functions.

    Example:
        >>> read_expression("full((2, 2), 1.5, dtype=float64)")
        tensor([[1.5000, 1.5000],
                [1.5000, 1.5000]], dtype=torch.float64)
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of the parser, on strings like "\d"
            tree = ast.parse(text.strip(), mode="eval")
        return _Reader(text.strip()).value(tree.body)
    except SyntaxError as error:
        raise InputError(f"`{text}` is not an expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise InputError(f"`{text[:40]}...` is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"`{text}` is not an expression: {error}") from None


class _Reader:
    """Returns the value of each kind of node, and refuses all kinds that are not listed here."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Tuple(elts=items):
                return tuple(map(self.value, items))
            case ast.List(elts=items):
                return list(map(self.value, items))
            case ast.Dict(keys=keys, values=values):
                return self._dict(node, keys, values)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return self._computed(node, op, operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._computed(node, op, left, right)
            case ast.Subscript(value=ast.Call() | ast.Subscript() as holder, slice=key):
                return self._item(node, holder, key)
            case ast.Call(func=function):
                return self._called(node, self._name(function))
            case ast.Name() | ast.Attribute():
                return self._named(node)
        raise self._refused(node)

    def _dict(self, node: ast.Dict, keys: Sequence[ast.expr | None], values: list[ast.expr]) -> Any:
        made = {}
        for key, value in zip(keys, values, strict=True):
            if not isinstance(key, ast.Constant):
                raise self._refused(node if key is None else key)
            made[self.value(key)] = self.value(value)
        return made

    def _computed(self, node: ast.expr, op: ast.AST, *operands: ast.expr) -> Any:
        values = [self.value(operand) for operand in operands]
        for operand, value in zip(operands, values, strict=True):
            if not isinstance(value, (int, float, Tensor)):
                raise InputError(f"{self._where(operand)} is not a number or a tensor")
        return self._create(node, lambda: _OPERATORS[type(op)](*values))

    def _item(self, node: ast.expr, holder: ast.expr, key: ast.expr) -> Any:
        inner = holder
        while isinstance(inner, ast.Subscript):
            inner = inner.value
        if not isinstance(inner, ast.Call) or self._name(inner.func) != "load":
            raise self._refused(node)
        content, wanted = self.value(holder), self.value(key)
        try:
            return content[wanted]
        except (LookupError, TypeError):
            keys = f"; it has {', '.join(map(repr, content))}" if isinstance(content, dict) else ""
            raise InputError(f"`{self._piece(holder)}` has no item {wanted!r}{keys}") from None

    def _called(self, node: ast.Call, name: str) -> Any:
        if name == "load":
            match node:
                case ast.Call(args=[ast.Constant(value=str() as path)], keywords=[]):
                    return load_tensors(path)
            raise InputError(f'`{self._piece(node)}`: write load("file.pt")')
        if name not in MAKERS:
            raise self._unknown(node.func)
        maker = MAKERS[name]
        form = f"{name}({', '.join(maker.names)}, dtype=..., requires_grad=...)"
        args = [self._plain(argument) for argument in node.args]
        kwargs = {}
        for argument in node.keywords:
            if argument.arg is None or not maker.allows(argument.arg):
                raise InputError(f"{self._where(argument)}: write {form}")
            kwargs[argument.arg] = self._plain(argument.value)
        return self._create(node, lambda: maker.function(*args, **kwargs), form)

    def _plain(self, node: ast.expr) -> Any:
        """Return the value of an argument: numbers, dtypes and lists of them."""
        value = self.value(node)
        todo = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, (list, tuple)):
                todo += item
            elif not isinstance(item, (int, float, torch.dtype)):
                raise InputError(
                    f"{self._where(node)}: only numbers and lists of numbers are allowed"
                )
        return value

    def _create(self, node: ast.expr, make: Callable[[], Any], form: str = "") -> Any:
        try:
            return make()
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if isinstance(error, TypeError) and form:
                reason = f"write {form}"
            raise InputError(f"cannot make `{self._piece(node)}`: {reason}") from None

    def _named(self, node: ast.expr) -> Any:
        name = self._name(node)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in DTYPES:
            return DTYPES[name]
        raise self._unknown(node)

    def _name(self, node: ast.expr) -> str:
        """Return a name; one of torch's may say so (`torch.randn`)."""
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
        raise self._refused(node)

    def _unknown(self, node: ast.expr) -> InputError:
        names = [*MAKERS, "load", *_CONSTANTS, *DTYPES]
        hint = did_you_mean(self._name(node), names, otherwise=";", quotes=False)[1:]
        return InputError(f"{self._where(node)} is not known:{hint} {_KNOWN}")

    def _refused(self, node: ast.expr) -> InputError:
        return InputError(
            f"{self._where(node)} is not allowed: inputs are made of literals, lists, tuples,"
            f" dicts, + - * / and calls; {_KNOWN}"
        )

    def _where(self, node: ast.AST) -> str:
        piece = self._piece(node)
        return f"`{piece}`" if piece == self.text else f"`{piece}` in `{self.text}`"

    def _piece(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or self.text


# Finds the model to trace from `package.module:name` or `path/to/file.py:name`.

_FORM = "write a target as package.module:name or path/to/file.py:name"


def find_object(text: str) -> Any:
    """Import the object that a target names."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise InputError(f"{text!r} does not name a target: {_FORM}")
    is_file = place.endswith(".py") or os.sep in place
    module = _import_file(place) if is_file else _import_module(place)
    found: Any = module
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not hasattr(found, part):
            owner = f"{place}:{'.'.join(parts[:depth])}" if depth else place
            every, own = _callables(found), _callables(found, own=True)
            raise InputError(f"{owner} has no {part!r}{_near_text(part, every, own)}")
        found = getattr(found, part)
    return found


def build(target: Any, text: str) -> Callable[..., Any]:
    """Create the model for a target.

    A subclass of nn.Module is instantiated. A function without parameters, or whose return
    annotation is an nn.Module, is called. A function whose parameters all have defaults is called
    to see whether it returns an nn.Module: if not, or if it raises, the function itself is the
    model. Any other callable is the model itself, too.
    """
    if isinstance(target, nn.Module):
        return target
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise InputError(f"{text} is a class, but not an nn.Module")
        return cast(nn.Module, _make(target, text))
    if not callable(target):
        raise InputError(f"{text} is of type {type(target).__name__} and cannot be called")
    if not _is_factory(target):
        made = _default_module(target)
        return cast(Callable[..., Any], target if made is None else made)
    made = _make(target, text)
    if not callable(made):
        kind = type(made).__name__
        raise InputError(f"{text} takes no inputs, so it has to return a model; it returned {kind}")
    return cast(Callable[..., Any], made)


def _default_module(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module that a function returns when it is left to its defaults, if any."""
    parameters = _signature_parameters(function)
    if not inspect.isfunction(function) or any(p.default is p.empty for p in parameters):
        return None
    try:
        made = function()
    except Exception:  # it needs inputs after all; if it is a factory, tracing it raises again
        return None
    return made if isinstance(made, nn.Module) else None


def _make(factory: Callable[..., Any], text: str) -> Any:
    parameters = _signature_parameters(factory)
    needed = [p.name for p in parameters if p.default is p.empty and "VAR_" not in p.kind.name]
    if needed:
        raise InputError(
            f"{text} cannot be called without arguments, it needs {', '.join(needed)}: name a "
            "function without parameters that returns the model"
        )
    with during(f"making {text}"):
        return factory()


def _signature_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    signature = _signature(function)
    return [] if signature is None else list(signature.parameters.values())


def _signature(function: Callable[..., Any], **options: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function, **options)
    except Exception:  # builtins, and names that are only there for the type checker
        return None


def _is_factory(function: Callable[..., Any]) -> bool:
    signature = _signature(function) if inspect.isroutine(function) else None
    if signature is None or not signature.parameters:
        return signature is not None
    if isinstance(signature.return_annotation, str):
        signature = _signature(function, eval_str=True)
    returned = None if signature is None else signature.return_annotation
    return isinstance(returned, type) and issubclass(returned, nn.Module)


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InputError(f"{name!r} is not a valid module name: {_FORM}")
    module: ModuleType | None = None
    for depth, part in enumerate(parts, 1):
        path = ".".join(parts[:depth])
        if not _exists(path, module):
            within = None if module is None else getattr(module, "__path__", ())
            names = [found.name for found in pkgutil.iter_modules(within)]
            where = "" if module is None else f" in {module.__name__}"
            hint = _near_text(part, names)
            if module is not None and hasattr(module, part):
                hint = f"; did you mean {module.__name__}:{'.'.join(parts[depth - 1 :])}?"
            raise InputError(f"there is no module {part!r}{where}{hint}")
        with during(f"importing {path}"):
            module = importlib.import_module(path)
    assert module is not None
    return module


def _exists(path: str, parent: ModuleType | None) -> bool:
    if path in sys.modules:
        return True
    if parent is not None and not hasattr(parent, "__path__"):
        return False  # a module that holds no modules
    return find_spec(path) is not None


def _import_file(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        siblings = path.parent.glob("*.py") if path.parent.is_dir() else ()
        raise InputError(
            f"there is no file {name!r}{_near_text(path.name, [p.name for p in siblings])}"
        )
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():  # part of a package: its relative imports must work
        parts.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    if len(parts) > 1:
        return _import_module(".".join(parts))
    # Under a name of its own, so that a file called random.py takes nothing's place.
    spec = spec_from_file_location(f"{path.stem}_target", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module
    with during(f"importing {name}"):
        spec.loader.exec_module(module)
    return module


def _callables(holder: Any, *, own: bool = False) -> list[str]:
    """Return the names of callables in a module or class; if `own`, without imported ones."""
    return [
        name
        for name, value in getattr(holder, "__dict__", {}).items()
        if callable(value) and not name.startswith("_")
        if not own or getattr(value, "__module__", None) == getattr(holder, "__name__", "")
    ]


def _near_text(name: str, names: Iterable[str], own: Sequence[str] = ()) -> str:
    names = list(names)
    folded = [other for other in names if other.lower() == name.lower()]
    otherwise = f"; it has {', '.join(own)}" if 0 < len(own) <= 12 else ""
    if folded:
        otherwise = f"; did you mean {' or '.join(folded)}?"
    return did_you_mean(name, names, cutoff=0.7, otherwise=otherwise, quotes=False)


# Errors raised by the user's own code, and the user's part of their tracebacks.

# The files of bendtrace and of imports; those of the example count as the user's.
_MACHINERY = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(importlib.__file__) + os.sep,
    "<frozen importlib",
    "<frozen runpy",
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class UsersError(Exception):
    """Wraps an error that the user's code raised."""

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"{what} raised {one_line(error)}")
        self.error = error

    def traceback(self) -> str:
        """Return the traceback from the user's first frame on; "" if no frame is the user's."""
        report = traceback.TracebackException.from_exception(self.error)
        found = _keep_theirs(report)
        return "".join(report.format()) if found or isinstance(self.error, SyntaxError) else ""


@contextmanager
def during(what: str) -> Iterator[None]:
    """Mark errors raised in this context as coming from the user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UsersError(what, error) from None


def one_line(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    name = type(error).__name__
    message = shorten(str(error), 300, placeholder=" ...")
    return f"{name}: {message}" if message else name


_EXAMPLE = AdaptiveBlock.forward.__code__.co_filename


def _keep_theirs(report: traceback.TracebackException) -> bool:
    """Drop the frames that led to the user's code; return whether there is any of it."""
    frames = [
        frame
        for frame in report.stack
        if frame.filename == _EXAMPLE or not frame.filename.startswith(_MACHINERY)
    ]
    while frames and frames[0].filename.startswith(_TORCH):
        del frames[0]
    report.stack = traceback.StackSummary.from_list(frames)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _keep_theirs(other)
    return bool(frames)


# Traces a model, calls it again, and compares each call with the model itself.


def check(model: Callable[..., Any], args: Any, kwargs: Any, target: str) -> None:
    """Raise if a call does not fit the signature."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # builtins
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise InputError(f"{target} takes ({takes}): {error}") from None


def describe_arguments(model: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, str]:
    """Return a description of each argument, by name."""
    bound = Signature(model).bind(args, kwargs)
    return {name: _short_text(value) for name, value in bound.items()}


def _short_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value:
        inner = ", ".join(map(_short_text, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_short_text(item)}" for key, item in value.items()) + "}"
    return shorten(repr(value), 40, placeholder="...")


@dataclass(frozen=True)
class ComparedCall:
    """One call of a model, through its `BendedModule` and directly."""

    given: str  # the inputs, as written
    inputs: dict[str, str]  # descriptions of their values, by argument
    how: str  # "trace" for the first; then "replay", "retrace", "resume" or "live"
    mismatch: str | None  # why it was not a replay, if a guard failed
    # True if outputs, changes of inputs, parameters and buffers, and the state of torch's random
    # numbers are the same, bit for bit.
    equal: bool


@dataclass(frozen=True)
class CommandRun:
    """The results for a model."""

    target: str  # the traced object, as written
    fx_error: str | None  # the error of torch.fx; None if there is none
    trace: Trace  # the first call
    calls: tuple[ComparedCall, ...]  # all calls, including the first
    stats: Stats  # how they were served
    why_live: tuple[str, ...]  # why some calls can never be replays

    @property
    def equal(self) -> bool:
        """True if every call returned the model's own outputs, bit for bit."""
        return all(call.equal for call in self.calls)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, ready for JSON."""
        return {
            "target": self.target,
            "fx_error": self.fx_error,
            "trace": self.trace.to_dict(),
            "calls": [vars(call) for call in self.calls],
            "stats": vars(self.stats),
            "why_live": list(self.why_live),
        }


def run(
    target: str,
    model: Callable[..., Any],
    calls: Sequence[InputTexts],
    *,
    seed: int = 0,
    grad: bool = False,
) -> CommandRun:
    """Trace a model on the first inputs, call it on the others, and compare."""
    session = _Session(target, model, seed)
    with torch.set_grad_enabled(grad):
        done = tuple(session.call(number, inputs) for number, inputs in enumerate(calls))
    assert session.trace is not None
    stats, why_live = replace(session.bended.stats), session.bended.why_live
    return CommandRun(target, session.rival.error, session.trace, done, stats, why_live)


class _Session:
    """A model that is called through bendtrace, and beside it as it is, and through torch.fx."""

    def __init__(self, target: str, model: Callable[..., Any], seed: int) -> None:
        self.target = target
        self.seed = seed
        self.eager = self._copied(model)
        self.rival = _Rival(self._copied(model))
        self.bended = BendedModule(model)
        self.trace: Trace | None = None

    def _copied(self, model: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise InputError(
                f"{self.target} cannot be copied, so there is nothing to compare with: "
                f"{one_line(error)}"
            ) from None

    def call(self, number: int, inputs: InputTexts) -> ComparedCall:
        seed = self.seed + number
        args, kwargs = _make_inputs(inputs, seed)
        check(self.eager, args, kwargs, self.target)
        described = describe_arguments(self.eager, args, kwargs)
        shown = ", ".join(f"{name}: {text}" for name, text in described.items())
        with during(f"{self.target}, called with {shown or 'no inputs'},"):
            output = self.eager(*args, **kwargs)
        wanted = _after(self.eager, output, args, kwargs)
        self.rival.check(number, *_make_inputs(inputs, seed), output)
        before, old = replace(self.bended.stats), self.bended.last_mismatch
        args, kwargs = _make_inputs(inputs, seed)
        output = self._bended(args, kwargs)
        given = _after(self.bended.model, output, args, kwargs)
        how, new = _how(before, self.bended.stats), self.bended.last_mismatch
        reason = _reason(how, None if new is old else new)
        return ComparedCall(str(inputs), described, how, reason, same_bits(given, wanted))

    def _bended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self.trace is not None:
                return self.bended(*args, **kwargs)
            self.trace, output = self.bended.trace(*args, _return_out=True, **kwargs)
            return output
        except BendtraceError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = place_text(last.filename, last.lineno)
            raise BendtraceError(
                f"{self.target} runs, but not under bendtrace, which is a bug in bendtrace: "
                f"{one_line(error)} ({where})"
            ) from error


class _Rival:
    """The result of torch.fx for a model."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.error: str | None = None
        try:
            with _silence():
                self.module = fx.symbolic_trace(model)
        except Exception as error:
            self.error = one_line(error)

    def check(self, number: int, args: Any, kwargs: Any, wanted: Any) -> None:
        if self.error is not None:
            return
        try:
            with _silence():
                given = self.module(*args, **kwargs)
        except Exception as error:
            self.error = f"no error when tracing; in call {number + 1} {one_line(error)}"
            return
        # What holds the tensors may be of another type; that is not the point here.
        if not same_bits(pytree.tree_leaves(given), pytree.tree_leaves(wanted)):
            self.error = f"no error, but a wrong result in call {number + 1}"


@contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()):
        yield


def _reason(how: str, mismatch: Mismatch | None) -> str | None:
    if how in ("trace", "replay"):
        return None
    if mismatch is None:
        return "other arguments than before" if how == "retrace" else None
    reason = str(mismatch)
    if mismatch.step is None:
        return reason
    return reason.replace(mismatch.step.file, os.path.basename(mismatch.step.file))


def _how(before: Stats, after: Stats) -> str:
    if before.traces == 0:
        return "trace"
    for how, name in (("live", "live"), ("resume", "resumes"), ("retrace", "retraces")):
        if getattr(after, name) > getattr(before, name):
            return how
    return "replay"


def _make_inputs(inputs: InputTexts, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seed_all(seed)
    made = inputs.make()
    seed_all(seed)  # what the model draws should not depend on how inputs were made
    return made


def _after(model: Callable[..., Any], output: Any, args: Any, kwargs: Any) -> Any:
    """Return everything that a call could have changed."""
    state: list[Any] = []
    if isinstance(model, nn.Module):
        state = [list(model.named_parameters()), list(model.named_buffers())]
    return [output, args, kwargs, state, torch.get_rng_state()]


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
    """Run the command line; return the exit status that `trace --help` explains."""
    options = _parser().parse_args(_join_options(sys.argv[1:] if argv is None else argv))
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


def _join_options(argv: Sequence[str]) -> list[str]:
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
    calls = [InputTexts((text,)) for text in _EXAMPLE_CALLS]
    done = run("AdaptiveBlock", AdaptiveBlock(), calls, seed=2)
    return as_text(done, source=True), done.equal


def _model(options: argparse.Namespace) -> Callable[..., Any]:
    target: Any = find_object(options.target)
    seed_all(options.seed)
    return build(target, options.target)


def _trace_text(options: argparse.Namespace) -> tuple[str, bool]:
    first = InputTexts(tuple(options.input))
    calls = [first, first, *map(InputTexts.split, options.call)]
    for inputs in calls:  # what is written wrong should show before a large model is made
        inputs.make()
    model = _model(options)
    if options.training is not None and isinstance(model, nn.Module):
        model.train(options.training)
    done = run(options.target, model, calls, seed=options.seed, grad=options.grad)
    return as_json(done) if options.json else as_text(done, full=options.full), done.equal


def _explore_text(options: argparse.Namespace) -> str:
    if not options.domain:
        raise InputError('no input may differ: name one, as in --domain "x=(-1.0, 1.0)"')
    args, kwargs = InputTexts(tuple(options.input)).make()
    domain = {}
    for text in options.domain:
        name, equals, bounds = text.partition("=")
        given = read_expression(bounds) if equals else None
        if not isinstance(given, tuple) or len(given) != 2:
            raise InputError(f"--domain is NAME=(LEAST, GREATEST), not {text!r}")
        domain[name.strip()] = given
    model = _model(options)
    found = BendedModule(model).explore(
        (args, kwargs), domain, seconds=options.seconds, seed=options.seed
    )
    return str(found)


def _print_cost(options: argparse.Namespace) -> str:
    args, kwargs = InputTexts(tuple(options.input)).make()
    model = _model(options)
    with torch.no_grad():
        run = trace(model, *args, save="none", **kwargs)
    costs = cost(run, by=options.by)
    text = f"{costs}\n\n{size_text(costs.peak)} of values at most"
    if costs.at is not None:
        listed = ", ".join(
            f"{entry.label} ({size_text(entry.nbytes)})" for entry in costs.alive[:5]
        )
        text += f", at {costs.at.label}: {listed}"
    return text


_COMMANDS: dict[str | None, Callable[[argparse.Namespace], tuple[str, bool]]] = {
    None: _example,
    "trace": _trace_text,
    "explore": lambda options: (_explore_text(options), True),
    "cost": lambda options: (_print_cost(options), True),
    "export": lambda options: (_export_text(options), True),
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

    def command(name: str, brief: str, description: str, seeded: str, epilog: str = "") -> Any:
        """Add a command that makes a model and its inputs; return what adds options to it."""
        made = commands.add_parser(
            name, help=brief, description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        add = made.add_argument
        add("target", metavar="TARGET", help="the model, as module:name or file.py:name")
        add("--input", action="append", default=[], metavar="[NAME=]INPUT",
            help="one input; repeat")  # fmt: skip
        add("--seed", type=int, default=0, metavar="N", help=f"for {seeded} (default: 0)")
        return made

    def add_calls(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--call", action="append", default=[], metavar="INPUTS",
            help="all inputs of one more call, separated by `;`; repeat",
        )  # fmt: skip

    tracing = command(
        "trace", "trace a model of your own; see trace --help",
        "Trace a model, call it again along the trace, and compare with eager.",
        "making the model and the first inputs; each call takes the next one", _EPILOG,
    )  # fmt: skip
    add_calls(tracing)
    mode = tracing.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="training", action="store_const", const=True,
                      help="put the model in training mode (default: as it was made)")  # fmt: skip
    mode.add_argument("--eval", dest="training", action="store_const", const=False,
                      help="put the model in evaluation mode")  # fmt: skip
    add = tracing.add_argument
    add("--grad", action="store_true", help="let autograd record (default: torch.no_grad())")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--full", action="store_true", help="print the graph, and every line of a long flow table")
    add = command(
        "explore", "search for inputs that take branches which the given one does not",
        "Search for inputs that take branches which the given input does not take.",
        "making the model, and for the search",
        "example\n  python -m bendtrace explore model.py:Net "
        '--input "x=randn(2, 3)" --domain "x=(-1.0, 1.0)"',
    ).add_argument  # fmt: skip
    add("--domain", action="append", default=[], metavar="NAME=(LEAST, GREATEST)",
        help="an input that may differ, and its range; repeat")  # fmt: skip
    add("--seconds", type=float, default=10.0, metavar="N", help="how long to search (default: 10)")
    add = command(
        "cost", "list what takes the time and the memory of a call",
        "Run a model once without gradients, and list its costs, the most time first.",
        "making the model and the inputs",
    ).add_argument  # fmt: skip
    add("--by", choices=("op", "module", "line"), default="module", help="(default: module)")
    exporting = command(
        "export",
        "write a model of your own to a file that runs without Python (torch.export, ONNX)",
        "Write a model, with its branches and loops, to a file without Python.",
        "making the model and the inputs", _EXPORT_EPILOG,
    )  # fmt: skip
    add_calls(exporting)
    add = exporting.add_argument
    add("--repeat", type=int, default=1, metavar="N",
        help="make the inputs of each call N times, each time at random (default: 1)")  # fmt: skip
    add("--to", required=True, metavar="FILE", help="the file: .pt2, .aoti.pt2 or .onnx")
    add("--unseen", choices=("assert", "error"), default="assert",
        help="if no input took a side of a branch: assert makes the program raise an error there,"
        " error makes this command fail (default: assert)")  # fmt: skip
    add("--train", action="store_true", help="export the model as it is in training mode")
    return parser


# `python -m bendtrace export`: a model written to a file that needs no Python of it.

_EXPORT_EPILOG = """\
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


def _export_text(options: argparse.Namespace) -> str:
    if options.repeat < 1:
        raise InputError(f"--repeat takes a positive number, not {options.repeat}")
    given = [InputTexts(tuple(options.input))] if options.input else []
    given += map(InputTexts.split, options.call)
    if not given:
        raise InputError("no inputs: give them by --input, or --call")
    for inputs in given:  # what is written wrong should show before a large model is made
        inputs.make()
    model = _model(options)
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
                bar.reset()  # it begins again, with what the first attempt has shown
            bar.set_description(step)
            bar.update()

        made = export_calls(model, Signature(model), calls, options.to, options.unseen, tell=tell)
    return str(made)


# The output of the command line.

_INDENT = "  "
_LINES = 40  # of a section, unless all are asked for
_NARROWEST = 40


def as_json(run: CommandRun) -> str:
    """Return a run as one JSON object. Numbers that JSON cannot represent become strings."""
    return json.dumps(_finite(run.to_dict()), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def as_text(run: CommandRun, *, source: bool = False, full: bool = False, width: int = 0) -> str:
    """Return a run as text for a terminal."""
    width = max(width or shutil.get_terminal_size((100, 24)).columns, _NARROWEST) - len(_INDENT)
    trace, steps = run.trace, run.trace.flow_steps
    flow = ["no branch, loop or index depends on the inputs"]
    if steps:
        flow = _steps(steps, width)
        if len(flow) > _LINES and not full:
            flow[_LINES:] = [f"... and {len(flow) - _LINES} more: --full shows them"]
    same = sum(call.equal for call in run.calls)
    verdict = f"{same} of {counted(len(run.calls), 'call')} equal to eager, bit for bit"
    sections = {
        "Result": [*_wrap_text(verdict, width), *_wrap_text(repr(run.stats), width)],
        f"Flow: {counted(len(steps), 'step')}": flow,
        "Calls": list(_calls(run, width)),
        "torch.fx": _wrap_text(
            run.fx_error or "also traces it, and is right on these inputs", width
        ),
    }
    graph = f"Graph: {counted(len(trace.graph), 'node')}"
    if full:
        sections[graph] = list(_print_graph(trace, width))
    elif not source:
        sections[graph] = ["--full prints them"]
    if source:
        sections = {"Model": _source_of(trace.function), **sections}
    texts = [f"{head}\n{indent(chr(10).join(body), _INDENT)}" for head, body in sections.items()]
    inputs = ", ".join(f"{name}: {text}" for name, text in run.calls[0].inputs.items())
    return "\n\n".join([f"{run.target}, traced on {inputs or 'no inputs'}", *texts])


def _source_of(function: Any) -> list[str]:
    called = type(function).forward if isinstance(function, nn.Module) else function
    return dedent(inspect.getsource(called)).rstrip().splitlines()


def _print_graph(trace: Trace, width: int) -> Iterator[str]:
    for line in (line.strip() for line in str(trace.graph).splitlines()[1:]):
        shorter = line.replace(", kwargs = {})", ")")
        head, args, rest = shorter.partition("(args = ")
        if len(shorter) <= width or not args:
            yield from _wrap_text(shorter, width)
        else:
            yield from [*_wrap_text(head + "(", width), *_indent_wrapped(args[1:] + rest, width)]


def _steps(steps: FlowSteps, width: int) -> list[str]:
    rows = [
        (place_text(step.file, step.line), step.kind, step.text, _step_value(step),
         ".".join(map(str, step.iteration)), step.name)
        for step in steps
    ]  # fmt: skip
    headers = ("at", "kind", "source", "value", "iteration", "node")
    return _fitting_table(rows, headers, width, flexible=2, least=4)


def _step_value(step: FlowStep) -> str:
    if not isinstance(step, LoopFlowStep):
        return shorten(number_text(step.value), 20, placeholder="...")
    if step.iterations is None:
        return "unknown"
    bound = f" of {step.bound}" if step.bound is not None else ""
    return f"{counted(step.iterations, 'time')}{bound}"


def _calls(run: CommandRun, width: int) -> Iterator[str]:
    rows = [
        (
            str(number),
            call.given,
            ", ".join(call.inputs.values()),
            call.how,
            "equal" if call.equal else "DIFFERENT",
        )
        for number, call in enumerate(run.calls, 1)
    ]
    headers = ("", "inputs", "that is", "how", "to eager")
    lines = _fitting_table(rows, headers, width, flexible=1, least=5)
    yield from lines[: len(lines) - len(rows)]
    for line, call in zip(lines[len(lines) - len(rows) :], run.calls, strict=True):
        yield line
        reason = call.mismatch
        if reason is None and call.how == "live" and run.why_live:
            reason = run.why_live[0]
        if reason is not None:
            yield from _indent_wrapped(reason, width)


def _fitting_table(
    rows: Sequence[tuple[str, ...]],
    headers: tuple[str, ...],
    width: int,
    *,
    flexible: int,
    least: int,
) -> list[str]:
    """Return a table that fits into a width.

    Its flexible column is cut short, and may fill what the others leave; those after the `least`
    first columns go if it needs room.
    """
    # tabulate keeps two columns between columns, and makes each two wider than its header.
    columns = zip(headers, zip(*rows, strict=True), strict=True)
    widths = [max(len(head) + 2, *map(len, cells)) + 2 for head, cells in columns]
    while len(widths) > least and sum(widths) > width + 2:
        widths.pop()
    room = max(width - sum(widths) + widths[flexible], 12)
    shown = [
        tuple(_fit(cell, room) if i == flexible else cell for i, cell in enumerate(row))
        for row in (row[: len(widths)] for row in rows)
    ]
    return tabulate.tabulate(shown, headers[: len(widths)], disable_numparse=True).splitlines()


def _fit(text: str, room: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= room else text[: room - 3] + "..."


def _wrap_text(text: str, width: int) -> list[str]:
    return wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _indent_wrapped(text: str, width: int) -> list[str]:
    return [" " * 4 + line for line in _wrap_text(text, width - 4)]
