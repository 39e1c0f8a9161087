"""Which attributes of a model what is inserted might look at, going by the names in its code."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.interject.insertion import Function
from bendtrace.interject.interjection import Interjection
from bendtrace.interject.plan import Plan
from bendtrace.recording.reach import names_in
from bendtrace.recording.recorder import Recording

__all__ = ["read_and_changed"]

# With these, code can come by an attribute whose name it does not write out.
_ANY = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec", "globals"}
)


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
    whats = {id(entry.what): entry.what for entry in plan.entries}.values()
    if all(what.self_contained or _is_contained(what) for what in whats):
        return frozenset()
    return frozenset(changed)


def _is_contained(what: Interjection) -> bool:
    return isinstance(what, Function) and _is_plain(what.function, set())


def _is_plain(thing: Any, seen: set[int]) -> bool:
    """Whether something can lead to nothing but tensors, numbers and torch's own functions."""
    if id(thing) in seen:
        return True
    seen.add(id(thing))
    if isinstance(thing, (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype)):
        return True
    if isinstance(thing, types.ModuleType):
        return thing.__name__.split(".")[0] in _KNOWN
    if isinstance(thing, type):
        return thing.__module__.split(".")[0] in _KNOWN
    if isinstance(thing, nn.Module):
        own = all(type(inner).__module__.startswith("torch.nn.") for inner in thing.modules())
        return own and not any(inner._forward_hooks for inner in thing.modules())
    if isinstance(thing, functools.partial):
        return all(_is_plain(t, seen) for t in (thing.func, *thing.args, *thing.keywords.values()))
    if isinstance(thing, (tuple, list)):
        return all(_is_plain(item, seen) for item in thing)
    if isinstance(thing, types.FunctionType):
        if (thing.__module__ or "").split(".")[0] in _KNOWN:
            return True
        names = names_in(thing.__code__)
        if names & _ANY:
            return False
        space = thing.__globals__
        found = [space[name] for name in names if name in space]
        try:
            found += [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # a name that is assigned only later
            return False
        found += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return all(_is_plain(item, seen) for item in found)
    return isinstance(thing, (types.BuiltinFunctionType, torch._ops.OpOverload))


_KNOWN = frozenset({"torch", "math", "builtins", "operator"})
