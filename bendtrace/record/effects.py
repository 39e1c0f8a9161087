"""Effects: ops of a run that could not be done a second time without anybody noticing."""

from __future__ import annotations

import functools
import gc
import operator
import types
from typing import Any

import torch

from bendtrace.python.computations import in_order, items_at, list_of, with_changes
from bendtrace.python.sites import TORCH
from bendtrace.tape.tape import Op, OpKind, Tape, refs_in
from bendtrace.watch.code_facts import codes_in
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
from bendtrace.watch.writes import works_in_place

# Arithmetic that cannot raise on the numbers it was recorded for.
HARMLESS = frozenset(
    {
        operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.pos,
        abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        str, repr, format, max, min, in_order, items_at, list_of, with_changes,
    }
)  # fmt: skip


class Effects:
    """Follows a tape, and finds the first op that must not be carried out twice.

    Such an op writes to memory that was there before the run, draws random numbers, prints, or
    calls code that is not torch's.

    Args:
        tape: the tape, which may grow.

    Attributes:
        first: the op; None as long as there is none.
    """

    def __init__(self, tape: Tape) -> None:
        self.first: int | None = None
        self._ops = tape.ops
        self._seen = 0
        self._outside: set[int] = set()  # ops whose values may have memory from before the run

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
            written = set(op.writes)
            if works_in_place(op) or table_name(op.target) == "__setitem__":
                written.update(ref.index for ref in refs_in((op.args[:1], op.kwargs.get("out"))))
            if not self._outside.isdisjoint(written):
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
    """Return whether the result of a function has memory of its own for sure."""
    name = table_name(function)
    if name in _ANEW:
        return True
    if name in _UNSAFE:
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
_UNSAFE = frozenset({"unsafe_split", "unsafe_split_with_sizes", "_unsafe_view", "lift"})
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
        "empty", "arange", "element_size", "_parse_to",
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
