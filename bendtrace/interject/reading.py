"""Which attributes of a model what is inserted might look at, going by the names in its code."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import torch
from torch import nn

from bendtrace.interject.insertion import Function
from bendtrace.interject.interjection import Interjection
from bendtrace.interject.plan import Plan
from bendtrace.recording.reach import reach_of
from bendtrace.recording.recorder import Recording

__all__ = ["read_and_changed"]

_METHODS = frozenset({"before", "instead", "after", "backward"})
# With these, code can come by an attribute whose name it does not write out.
_ANY = frozenset(
    {
        "getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "state_dict", "buffers",
        "named_buffers", "get_buffer", "eval", "exec", "children", "modules", "named_modules",
    }
)  # fmt: skip


def read_and_changed(plan: Plan, recording: Recording) -> frozenset[str]:
    """Return the names of attributes that a run changes and what is inserted might look at.

    A replay changes attributes at its end, the model's own Python when it comes to it.
    """
    changed: set[str] = set()
    for change in recording.changes:
        changed.update(re.findall(r"\w+", f"{change.part.label}.{change.key}"))
    changed -= {"self", "None"}
    if not changed:
        return frozenset()
    found: set[str] = set()
    for what in {id(entry.what): entry.what for entry in plan.entries}.values():
        if not what.self_contained:
            names = _names(what)
            found |= changed if names & _ANY else changed & names
    return frozenset(found)


def _names(what: Interjection) -> frozenset[str]:
    if isinstance(what, Function):
        return _names_of(what.function)
    return reach_of(type(what), _METHODS).names


def _names_of(thing: Any) -> frozenset[str]:
    if isinstance(thing, nn.Module):
        classes = {type(module) for module in thing.modules()}
        return frozenset().union(*(reach_of(cls).names for cls in classes))
    if isinstance(thing, functools.partial):
        return _names_of(thing.func)
    if isinstance(thing, types.MethodType):
        return _names_of(thing.__func__)
    if isinstance(thing, types.FunctionType):
        return reach_of(thing).names
    if isinstance(thing, (types.BuiltinFunctionType, torch._ops.OpOverload)):
        return frozenset()
    return reach_of(type(thing), frozenset({"__call__"})).names
