"""Finds the model to trace from `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from bendtrace._tracebacks import during
from bendtrace.errors import InputError

__all__ = ["build", "find"]

_FORM = "write a target as package.module:name or path/to/file.py:name"


def find(text: str) -> Any:
    """Import what a target names.

    Args:
        text: module or file, a colon, and a name inside (dots lead into classes).

    Raises:
        InputError: the target does not exist.
        UsersError: importing it raised.
    """
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

    Args:
        target: what `find` returned.
        text: the target as written, for messages.

    Raises:
        InputError: no model can be made from it.
        UsersError: creating it raised.
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
        made = _made_by_defaults(target)
        return cast(Callable[..., Any], target if made is None else made)
    made = _make(target, text)
    if not callable(made):
        kind = type(made).__name__
        raise InputError(f"{text} takes no inputs, so it has to return a model; it returned {kind}")
    return cast(Callable[..., Any], made)


def _made_by_defaults(function: Callable[..., Any]) -> nn.Module | None:
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
    """Return what can be called in a module or class; if `own`, without what it imported."""
    return [
        name
        for name, value in getattr(holder, "__dict__", {}).items()
        if callable(value) and not name.startswith("_")
        if not own or getattr(value, "__module__", None) == getattr(holder, "__name__", "")
    ]


def _near(name: str, known: Iterable[str], own: Sequence[str] = ()) -> str:
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.7)
    near = near or [other for other in known if other.lower() == name.lower()]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; it has {', '.join(own)}" if 0 < len(own) <= 12 else ""
