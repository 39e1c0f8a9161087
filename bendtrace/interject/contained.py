"""Whether what is inserted can read anything of a model but its arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.environment.code_facts import names_in
from bendtrace.torch_rules.functions import OpOverload
from bendtrace.torch_rules.owners import parts_of

__all__ = ["ANY", "KNOWN", "UNCALLED", "is_contained"]

# With these, code can read an attribute without writing out its name.
ANY = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec", "globals"}
)


def is_contained(function: Any, own: Container[int] | None = None) -> bool:
    """Return whether a function, or a module, can read nothing of the model but its arguments.

    Args:
        function: the function.
        own: identities of the model's own modules; None if unknown.
    """
    return _is_plain(function, _Search(own))


class _Search:
    """What has been scanned already, and the model's own modules."""

    def __init__(self, own: Container[int] | None) -> None:
        self.seen: set[int] = set()
        self.own = own


def _is_plain(thing: Any, search: _Search) -> bool:
    """Return whether an object leads only to tensors, numbers and torch's own functions."""
    if id(thing) in search.seen:
        return True
    search.seen.add(id(thing))
    if isinstance(thing, (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if isinstance(thing, types.ModuleType):
        return thing.__name__.split(".")[0] in KNOWN
    if isinstance(thing, type):
        return thing.__module__.split(".")[0] in KNOWN
    if isinstance(thing, nn.Module):
        return all(_is_plain_module(inner, search) for inner in parts_of(thing))
    if isinstance(thing, types.MethodType):
        return _is_plain(thing.__func__, search) and _is_plain(thing.__self__, search)
    if isinstance(thing, functools.partial):
        return all(
            _is_plain(t, search) for t in (thing.func, *thing.args, *thing.keywords.values())
        )
    if isinstance(thing, (tuple, list)):
        return all(_is_plain(item, search) for item in thing)
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").split(".")[0] in KNOWN:
            return True
        names = names_in(thing.__code__)
        if names & ANY:
            return False
        space = thing.__globals__
        found = [space[name] for name in names if name in space]
        try:
            found += [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # a name that is assigned only later
            return False
        found += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return all(_is_plain(item, search) for item in found)
    return isinstance(thing, (types.BuiltinFunctionType, OpOverload))


def _is_plain_module(module: nn.Module, search: _Search) -> bool:
    """Return the same for a module itself: its methods, and attributes other than its parts."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module).__module__.startswith("torch.nn."):
        return True
    if search.own is None or id(module) in search.own:
        return False
    held = [value for name, value in vars(module).items() if name not in _TABLES]
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") or cls is object:
            continue
        for name, member in vars(cls).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            elif isinstance(member, property):
                held += [member.fget, member.fset]
                continue
            if name not in UNCALLED:
                held.append(member)
    return all(_is_plain(value, search) for value in held)


_TABLES = frozenset(vars(nn.Module()))
# Attributes that are not called by calling a module, and those of every class.
UNCALLED = frozenset(
    {
        "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
        "__static_attributes__", "__weakref__", "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip
KNOWN = frozenset({"torch", "math", "builtins", "operator"})
