"""Effects of ops: whether they could be done again unnoticed, and what they may have changed."""

from __future__ import annotations

import dis
import functools
import gc
import operator
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
from bendtrace.python.computations import NEVER_RAISING
from bendtrace.python.sites import TORCH
from bendtrace.tape.captured import PLAIN_TYPES, attributes_of, identical, is_array, module_name_of
from bendtrace.tape.structure import can_build, referents
from bendtrace.tape.tape import Op, OpKind, Tape, refs_in
from bendtrace.watch.code_facts import codes_in
from bendtrace.watch.draws import is_host_generator
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import (
    METADATA,
    RESHAPES_IN_PLACE,
    SETTERS,
    SHAPES,
    ScriptMethod,
    ScriptModule,
    is_torchs_function,
    overloads,
    table_name,
)
from bendtrace.watch.host_io import environ
from bendtrace.watch.reachability import reachable_from
from bendtrace.watch.writes import works_in_place

# Arithmetic that cannot raise on the numbers it was recorded for.
HARMLESS = frozenset(
    {
        operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.pos,
        abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        str, repr, format, max, min, len, *NEVER_RAISING,
    }
)  # fmt: skip


class Effects:
    """Follows a tape, and finds the first op that must not be carried out twice.

    Such an op writes to memory that was there before the run, draws random numbers, prints, or
    calls code that is not torch's. Ops count from `begin` on; memory from before it was there
    before. The tape may grow.
    """

    def __init__(self, tape: Tape, begin: int = 0) -> None:
        self.first: int | None = None  # the op; None as long as there is none
        self._ops = tape.ops
        self._seen = begin
        self._outside: set[int] = {*range(begin)}  # whose values may have memory from before

    def have_begun(self) -> bool:
        """Return whether there is one on the tape by now."""
        while self.first is None and self._seen < len(self._ops):
            op = self._ops[self._seen]
            self._seen += 1
            if self._is_effect(op):
                self.first = op.index
        return self.first is not None

    def _is_effect(self, op: Op) -> bool:
        if not op.is_work:
            self._outside.add(op.index)
            return False
        if op.kind is OpKind.CALL and not sets_nothing(op):
            if not _only_computes(op.target) or (_may_draw_numbers(op.target) and not _is_idle(op)):
                return True
            if not self._outside.isdisjoint(written_by(op)):
                return True
            if makes_anew(op.target):
                return False
        if not self._outside.isdisjoint(op.operands):
            self._outside.add(op.index)
        return False


def _only_computes(function: Any) -> bool:
    """Return whether a function is torch's own, and only gives a value."""
    if _is_getter(function) or function in SHAPES or function in METADATA:
        return True
    if isinstance(function, (ScriptModule, ScriptMethod)):
        return False  # it can write to buffers that no op is given
    if not (is_torchs_function(function) or function is environ):
        return False
    name = table_name(function)
    return not (function in SETTERS or name in RESHAPES_IN_PLACE or name in _ACTS_OUTSIDE)


def _is_idle(op: Op) -> bool:
    """Return whether a dropout is switched off, whatever the call."""
    position, name, off = _SWITCHES.get(table_name(op.target), (0, "", None))
    given = op.kwargs.get(name, op.args[position] if len(op.args) > position else off)
    return name != "" and type(given) in (bool, float, int) and not given


def written_by(op: Op) -> set[int]:
    """Return the ops whose values an op writes to, or may write to."""
    written = set(op.writes)
    if works_in_place(op) or table_name(op.target) == "__setitem__":
        written.update(ref.index for ref in refs_in((op.args[:1], op.kwargs.get("out"))))
    return written


def sets_nothing(op: Op) -> bool:
    """Return whether an op is `x.data = x`, as in a `Module.to` that has nothing to convert."""
    return bool(op.target == _SET_DATA and op.args[0] == op.args[1])


def _is_getter(function: Any) -> bool:
    """Return whether a function gets an attribute of a tensor."""
    is_wrapper = isinstance(function, types.MethodWrapperType) and function.__name__ == "__get__"
    return is_wrapper and isinstance(function.__self__, types.GetSetDescriptorType)


@functools.cache
def _may_draw_numbers(function: Any) -> bool:
    """Return whether a function may draw random numbers; an unknown function may."""
    if function in SHAPES or function in METADATA:
        return False
    name = table_name(function)
    is_operator = name.startswith("__") and name.endswith("__")
    if _is_getter(function) or is_operator or name in _OF_PYTHON or function is environ:
        return False
    if isinstance(function, types.FunctionType) and not overloads(name):
        is_torchs = function.__code__.co_filename.startswith(TORCH)
        return not is_torchs or _names_drawing(function, set())
    return not overloads(name) or _is_drawing(name)


def _is_drawing(name: str) -> bool:
    """Return whether an operator of that name may draw random numbers."""
    return name in _COMPOSED or any(
        torch.Tag.nondeterministic_seeded in one.tags for one in overloads(name)
    )


def _names_drawing(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
    """Return whether Python of torch names something that may draw random numbers.

    The functions that it calls count as well.
    """
    seen.add(function.__code__)
    names = {name for code in codes_in(function.__code__) for name in code.co_names}
    if any(name in _GENERATORS or _is_drawing(name) for name in names):
        return True
    called = [function.__globals__.get(name) for name in names]
    # Not `cell_contents`, which raises for a cell that is still empty (CPython 3.11 to 3.13).
    called += [thing for cell in function.__closure__ or () for thing in gc.get_referents(cell)]
    return any(
        _names_drawing(inner, seen)
        for inner in called
        if isinstance(inner, types.FunctionType)
        and inner.__code__ not in seen
        and inner.__module__ != "torch.overrides"
        and inner.__code__.co_filename.startswith(TORCH)
    )


@functools.cache
def makes_anew(function: Any) -> bool:
    """Return whether the result of a function certainly has its own memory."""
    name = table_name(function)
    if name in _ANEW:
        return True
    if name in _UNNEVER_RAISING:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = overloads(name)
    return (
        bool(found)
        and not any(given.alias_info is not None for one in found for given in one._schema.returns)
        and not any(has_kernel(one.name(), "CompositeImplicitAutograd") for one in found)
    )


_SET_DATA = getattr(torch.Tensor.data, "__set__")  # noqa: B009 - a slot of the descriptor
# Whose results are views although their schemas do not say so.
_UNNEVER_RAISING = frozenset({"unsafe_split", "unsafe_split_with_sizes", "_unsafe_view", "lift"})
# The argument that switches drawing off: its position, its name, and its default.
_SWITCHES: dict[str, tuple[int, str, Any]] = {
    "dropout": (2, "training", True),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
    "multi_head_attention_forward": (13, "training", True),
}
_ACTS_OUTSIDE = frozenset(
    {
        "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad",
        "share_memory_", "print", "pin_memory",
    }
)  # fmt: skip
# What leads to random numbers by other names than those of operators.
_GENERATORS = frozenset({"Generator", "random", "manual_seed", "fork_rng", "get_rng_state"})
# Python in front of operators that draw nothing by themselves.
_COMPOSED = frozenset({"fractional_max_pool2d", "fractional_max_pool3d"})
_OF_PYTHON = frozenset(
    {
        "item", "tolist", "bool", "float", "int", "double", "half", "long", "size", "dim",
        "numel", "shape", "type", "tensor", "as_tensor", "cpu", "cuda", "is_floating_point",
        "is_complex", "is_contiguous", "apply_along_dim", "stack", "cat", "zeros", "ones", "full",
        "empty", "arange", "element_size", "_parse_to", "data_ptr",
    }
)  # fmt: skip
# Whose operators are compositions, and yet never give back what they are given.
_ANEW = frozenset(
    {
        "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "batch_norm", "layer_norm", "group_norm", "instance_norm", "matmul",
        "zeros", "ones", "empty", "full", "arange", "tensor", "zeros_like", "ones_like",
        "empty_like", "full_like", "clone", "new_zeros", "new_ones", "new_empty", "new_full",
    }
)  # fmt: skip


# The things that a function called as one op is given, and may change


class ReachableContainers:
    """The containers that a function, called as one op, can reach by arguments and its closure."""

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: Environment
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

    What is kept in `context`, the argument that is the context of an `autograd.Function`, is no
    attribute of anything else.
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
