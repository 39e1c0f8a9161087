"""Inputs written as small expressions, `x=randn(2, 3)`, or in files; no code in them runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import keyword
import math
import operator
import os
import pickle
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from bendtrace._checks import did_you_mean
from bendtrace._lazy import imported, required
from bendtrace.errors import InputError

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"


def is_tensor_file(text: str) -> bool:
    """Return whether a text is the name of a file that `load` accepts."""
    return text.endswith((*_TORCH_FILES, _SAFETENSORS))


def load(path: str) -> Any:
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
    """A function that an expression may call.

    Attributes:
        function: the function.
        names: names of its parameters; the first may cover all positional ones (`*size`).
    """

    function: Callable[..., Any]
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
class Inputs:
    """The arguments of one call, as written.

    Attributes:
        texts: an expression, or a file of tensors, for each argument; positional unless it starts
            with `name=`.
    """

    texts: tuple[str, ...]

    @classmethod
    def split(cls, text: str) -> Inputs:
        """Split the arguments of one call, written as `x=randn(2, 3); n=3`.

        Example:
            >>> Inputs.split("x=randn(2); mode='a;b'").texts
            ('x=randn(2)', "mode='a;b'")
        """
        parts = re.findall(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^;])+""", text)
        return cls(tuple(part.strip() for part in parts if part.strip()))

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return new positional and keyword arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for text in self.texts:
            for name, value in _arguments(text):
                if name is None:
                    args.append(value)
                elif name in kwargs:
                    raise InputError(f"two inputs are called {name!r}")
                else:
                    kwargs[name] = value
        return tuple(args), kwargs

    def __str__(self) -> str:
        return "; ".join(self.texts)


def _arguments(text: str) -> Iterator[tuple[str | None, Any]]:
    """Yield (name or None, value) of the arguments that one text stands for."""
    named = re.match(r"\s*([^\W\d]\w*)\s*=(?!=)\s*(.*)", text, re.DOTALL)
    if named is not None and not keyword.iskeyword(named[1]):
        content = named[2].strip()
        yield named[1], load(content) if is_tensor_file(content) else read(content)
        return
    text = text.strip()
    if not text:
        raise InputError("an input is empty")
    if not is_tensor_file(text):
        yield None, read(text)
        return
    content = load(text)
    if isinstance(content, Tensor):
        yield None, content
    elif isinstance(content, dict) and all(isinstance(key, str) for key in content):
        yield from content.items()
    else:
        raise InputError(
            f"{text!r} contains a {type(content).__name__}; as the inputs it has to contain a "
            f"tensor or a dict with names as keys. For one input, name it: `x={text}`"
        )


def read(text: str) -> Any:
    """Return the value of an expression made of literals, arithmetic and known functions.

    Example:
        >>> read("full((2, 2), 1.5, dtype=float64)")
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
        return self._tried(node, lambda: _OPERATORS[type(op)](*values))

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
                    return load(path)
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
        return self._tried(node, lambda: maker.function(*args, **kwargs), form)

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

    def _tried(self, node: ast.expr, make: Callable[[], Any], form: str = "") -> Any:
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
        known = [*MAKERS, "load", *_CONSTANTS, *DTYPES]
        hint = did_you_mean(self._name(node), known, otherwise=";", quotes=False)[1:]
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


def find(text: str) -> Any:
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
            raise InputError(f"{owner} has no {part!r}{_near(part, every, own)}")
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
    parameters = _parameters(function)
    if not inspect.isfunction(function) or any(p.default is p.empty for p in parameters):
        return None
    try:
        made = function()
    except Exception:  # it needs inputs after all; if it is a factory, tracing it raises again
        return None
    return made if isinstance(made, nn.Module) else None


def _make(factory: Callable[..., Any], text: str) -> Any:
    needed = [p.name for p in _parameters(factory) if p.default is p.empty and p.kind in _NEEDED]
    if needed:
        raise InputError(
            f"{text} cannot be called without arguments, it needs {', '.join(needed)}: name a "
            "function without parameters that returns the model"
        )
    with during(f"making {text}"):
        return factory()


_NEEDED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
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
            known = [found.name for found in pkgutil.iter_modules(within)]
            where = "" if module is None else f" in {module.__name__}"
            hint = _near(part, known)
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
        raise InputError(f"there is no file {name!r}{_near(path.name, [p.name for p in siblings])}")
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


def _near(name: str, known: Iterable[str], own: Sequence[str] = ()) -> str:
    known = list(known)
    folded = [other for other in known if other.lower() == name.lower()]
    otherwise = f"; it has {', '.join(own)}" if 0 < len(own) <= 12 else ""
    if folded:
        otherwise = f"; did you mean {' or '.join(folded)}?"
    return did_you_mean(name, known, cutoff=0.7, otherwise=otherwise, quotes=False)


# Errors raised by the user's own code, and the user's part of their tracebacks.

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class UsersError(Exception):
    """Wraps an error that the user's code raised."""

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"{what} raised {one_line(error)}")
        self.error = error

    def traceback(self) -> str:
        """Return the traceback from the user's first frame on; "" if no frame is the user's."""
        told = traceback.TracebackException.from_exception(self.error)
        found = _keep_theirs(told)
        return "".join(told.format()) if found or isinstance(self.error, SyntaxError) else ""


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


_EXAMPLE = os.path.join("cli", "example.py")


def _keep_theirs(told: traceback.TracebackException) -> bool:
    """Drop the frames that led to the user's code; return whether there is any of it."""
    frames = [frame for frame in told.stack if not _is_machinery(frame.filename)]
    while frames and frames[0].filename.startswith(_TORCH):
        del frames[0]
    told.stack = traceback.StackSummary.from_list(frames)
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _keep_theirs(other)
    return bool(frames)


def _is_machinery(filename: str) -> bool:
    if filename.endswith(_EXAMPLE):
        return False
    return filename.startswith((_OWN, _IMPORTLIB, "<frozen importlib", "<frozen runpy"))
