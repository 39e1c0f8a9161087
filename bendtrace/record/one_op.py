"""The things that a function called as one op is given, and may change."""

from __future__ import annotations

import dis
import os
import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bendtrace.python.bytecode import single_steps
from bendtrace.python.sites import TORCH
from bendtrace.tape.captured import PLAIN_TYPES, attributes_of, identical, is_array, module_name_of
from bendtrace.tape.structure import can_build, referents
from bendtrace.watch.code_facts import codes_in
from bendtrace.watch.draws import is_host_generator
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import is_torchs_function
from bendtrace.watch.reachability import reachable_from


class ReachableContainers:
    """The containers that a function can reach through its arguments and its closure.

    Args:
        function: the function, which is called as one op.
        args: its arguments.
        kwargs: its keyword arguments.
        environment: what the run could read at its start.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        environment: Environment,
    ) -> None:
        self._functions: list[Any] = []
        self._before: list[tuple[Any, list[Any]]] = []
        self._is_complete = True
        if is_torchs_function(function) and not any(map(callable, (*args, *kwargs.values()))):
            return
        found: dict[int, Any] = {}
        waiting: list[Any] = [function, *args, *kwargs.values()]
        while waiting and len(found) < _MOST:
            thing = waiting.pop()
            kind = type(thing)
            if kind in PLAIN_TYPES or id(thing) in found:
                continue
            if isinstance(thing, (torch.Tensor, nn.Module, types.ModuleType)):
                continue
            if is_host_generator(thing):
                continue
            if module_name_of(kind).startswith(
                "bendtrace."
            ):  # a traced number leads to the recorder
                continue
            found[id(thing)] = thing
            if isinstance(thing, (types.FunctionType, types.MethodType, partial, type)):
                self._functions.append(thing)
                waiting += _objects_in_code(thing, environment)
            else:
                waiting += _items_within(thing)
        self._is_complete = not waiting
        self._before = [
            (thing, [*_items_within(thing)]) for thing in found.values() if _is_mutable(thing)
        ]

    @property
    def containers(self) -> list[Any]:
        """Those that may change."""
        return [thing for thing, _ in self._before]

    def may_have_changed(self) -> bool:
        """Return whether a container has changed, or may change another time."""
        if not self._is_complete:
            return True  # more than is looked through
        if not self._before:
            return False
        if any(_items_differ(before, [*_items_within(thing)]) for thing, before in self._before):
            return True
        return any(map(_mutates, self._functions))


def _objects_in_code(thing: Any, environment: Environment) -> Iterator[Any]:
    """Yield what code holds, but for what a function from before the run keeps to itself."""
    is_older = (
        isinstance(thing, types.FunctionType) and thing.__code__ not in environment.nested_codes
    )
    for referent in referents(thing):
        if not (is_older and _is_mutable(referent) and environment.find(referent) is None):
            yield referent


def _is_mutable(thing: Any) -> bool:
    return not isinstance(
        thing, (tuple, frozenset, types.FunctionType, types.MethodType, partial, type)
    ) and (isinstance(thing, _MUTABLE) or is_array(thing) or can_build(type(thing)))


def _items_within(thing: Any) -> Iterator[Any]:
    if is_array(thing):
        yield thing.tobytes()
    elif isinstance(thing, dict):
        for key, value in dict.items(thing):
            yield from (key, value)
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from thing
    elif isinstance(thing, bytearray):
        yield bytes(thing)
    if can_build(type(thing)):
        for name, value in attributes_of(thing).items():
            yield from (str(name), value)


def _items_differ(before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return True
    return any(
        a is not b and not (type(a) in (bytes, str) and identical(a, b))
        for a, b in zip(before, now, strict=True)
    )


def _mutates(function: Any) -> bool:
    """Return whether code may change a container: by item assignment or calls that change lists."""
    if isinstance(function, (types.MethodType, partial)):
        return False  # the function in it is among the others
    if isinstance(function, type) and not issubclass(function, torch.autograd.Function):
        return False
    if str(function.__module__).startswith("torch."):
        return False  # torch's own functions change no container
    entries = frozenset({"forward", "setup_context", "backward", "vjp", "jvp"})
    reach = (
        reachable_from(function, entries)
        if isinstance(function, type)
        else reachable_from(function)
    )
    return any(
        assigned_in(code)[1]
        for one in reach.functions
        if not one.__code__.co_filename.startswith((TORCH, _HERE))
        for code in codes_in(one.__code__)
    )


def assigned_in(code: types.CodeType, context: str | None = None) -> tuple[frozenset[str], bool]:
    """Return the attributes and globals that code assigns to, and whether it changes containers.

    Args:
        code: the code.
        context: the argument that is the context of an `autograd.Function`: what is kept there is
            no attribute of anything else.
    """
    stored: set[str] = set()
    before: Any = None
    for step in single_steps(code):
        if step.name in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            step.name == "STORE_DEREF" and step.value in code.co_freevars
        ):
            stored.add(step.value)
        elif step.name in ("STORE_ATTR", "DELETE_ATTR"):
            if context is None or (before.name, before.value) != ("LOAD_FAST", context):
                stored.add(step.value)
        before = step
    changes = not _CHANGING.isdisjoint(code.co_names) or not _ASSIGNING.isdisjoint(
        code.co_code[::2]
    )
    return frozenset(stored), changes


_HERE = str(Path(__file__).parents[1]) + os.sep
_MOST = 1000
_ASSIGNING = frozenset(dis.opmap[name] for name in ("STORE_SUBSCR", "DELETE_SUBSCR"))
_CHANGING = frozenset(
    {
        "append", "appendleft", "extend", "insert", "pop", "popitem", "clear", "update",
        "setdefault", "discard", "remove", "add", "sort", "reverse", "rotate", "extendleft",
        "move_to_end", "subtract", "setattr", "delattr", "__setitem__", "__delitem__", "fill",
        "intersection_update", "difference_update", "symmetric_difference_update",
    }
)  # fmt: skip
_MUTABLE = (list, dict, set, bytearray, deque)
