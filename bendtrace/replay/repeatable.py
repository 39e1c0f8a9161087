"""Whether a run can be given up at any question, and the model be run from its start instead."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from bendtrace.recording.rank_sync import is_one_of_several
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import is_read
from bendtrace.replay.pure import computes_only, overloads
from bendtrace.tape.tape import (
    Op,
    OpKind,
    Tape,
    is_handled,
    refs_in,
)
from bendtrace.torch_rules.functions import (
    RESHAPES_IN_PLACE,
    SETTERS,
    ScriptMethod,
    ScriptModule,
    is_torchs_function,
    known_as,
)
from bendtrace.torch_rules.host_io import environ
from bendtrace.torch_rules.writes import works_in_place

__all__ = ["makes_anew", "may_draw", "may_run_again", "may_write_to", "outside_in"]


def may_run_again(recording: Recording) -> bool:
    """Whether a run can be given up at any question, and the model be run instead.

    That is so where it has changed nothing by then: replays change objects at their end, and
    random numbers can be drawn again.
    """
    tape = recording.tape
    if recording.writes_outside or tape.is_joint or tape.forgets or tape.blockers:
        return False
    if recording.environment.generators or is_one_of_several():
        return False
    if any(op.raised is not None or op.context.autocast or is_handled(op) for op in tape.ops):
        return False
    calls = [op for op in tape.ops if op.kind is OpKind.CALL]
    called = {id(op.target): op.target for op in calls}
    others = {key for key, function in called.items() if not _is_repeatable(function)}
    return all(
        _sets_nothing(op) or (computes_only(op) and not _acts(op.target))
        for op in calls
        if id(op.target) in others
    ) and not _may_write_outside(tape)


def may_draw(recording: Recording) -> bool:
    """Whether a replay of a run may draw random numbers, as far as functions tell."""
    ops = recording.tape.ops
    return recording.draws or any(
        op.kind is OpKind.CALL and not is_read(op) and _draws(op.target) and not _is_idle(op)
        for op in ops
    )


def _is_idle(op: Op) -> bool:
    """Whether a dropout is switched off, whatever the call."""
    position, name, off = _SWITCHES.get(known_as(op.target), (0, "", None))
    given = op.kwargs.get(name, op.args[position] if len(op.args) > position else off)
    return name != "" and type(given) in (bool, float, int) and not given


def _is_repeatable(function: Any) -> bool:
    """Whether all calls of a function of torch may be done again."""
    if _is_getter(function):
        return True
    if isinstance(function, (ScriptModule, ScriptMethod)):
        return False  # it can write to buffers that no op is given
    return (is_torchs_function(function) or function is environ) and not _acts(function)


def _acts(function: Any) -> bool:
    """Whether a function does more than give a value, going by its name."""
    name = known_as(function)
    return function in SETTERS or name in RESHAPES_IN_PLACE or name in _ACTS_OUTSIDE


def _may_write_outside(tape: Tape) -> bool:
    """Whether a replay may write to an argument, or to state, under whatever name."""
    return may_write_to(tape, {op.index for op in tape.ops if not op.is_work})


def outside_in(recording: Recording) -> frozenset[int]:
    """Return the ops whose values may have the memory of an argument, or of state."""
    names = {op.index for op in recording.tape.ops if not op.is_work}
    for op in recording.tape.ops:
        if not op.is_work or names.isdisjoint(op.operands):
            continue
        if op.kind is not OpKind.CALL or _sets_nothing(op) or not makes_anew(op.target):
            names.add(op.index)
    return frozenset(names)


def may_write_to(tape: Tape, values: set[int]) -> bool:
    """Whether a replay may write to the memory of some values, under whatever name.

    Args:
        tape: what is replayed.
        values: the ops that give them.
    """
    names = set(values)
    for op in tape.ops:
        if op.kind is OpKind.CALL and not _sets_nothing(op):
            written = set(op.writes)
            if works_in_place(op) or known_as(op.target) == "__setitem__":
                written.update(ref.index for ref in refs_in((op.args[:1], op.kwargs.get("out"))))
            if not names.isdisjoint(written):
                return True
            if makes_anew(op.target):
                continue
        if op.is_work and not names.isdisjoint(op.operands):
            names.add(op.index)
    return False


def _sets_nothing(op: Op) -> bool:
    """Whether an op is `x.data = x`, as `Module.to` does where nothing is to be converted."""
    return bool(op.target == _SET_DATA and op.args[0] == op.args[1])


def _is_getter(function: Any) -> bool:
    """Whether a function gets an attribute of a tensor."""
    is_wrapper = isinstance(function, types.MethodWrapperType) and function.__name__ == "__get__"
    return is_wrapper and isinstance(function.__self__, types.GetSetDescriptorType)


@functools.cache
def _draws(function: Any) -> bool:
    """Whether a function may draw random numbers; what is not known may."""
    name = known_as(function)
    is_operator = name.startswith("__") and name.endswith("__")
    if _is_getter(function) or is_operator or name in _OF_PYTHON or function is environ:
        return False
    found = overloads(name)
    return (
        not found
        or name in _COMPOSED
        or any(torch.Tag.nondeterministic_seeded in one.tags for one in found)
    )


@functools.cache
def makes_anew(function: Any) -> bool:
    """Whether what a function gives has memory of its own for sure."""
    name = known_as(function)
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
}
_ACTS_OUTSIDE = frozenset(
    {
        "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad",
        "share_memory_", "print", "pin_memory",
    }
)  # fmt: skip
# Python in front of operators that draw nothing by themselves.
_COMPOSED = frozenset({"fractional_max_pool2d", "fractional_max_pool3d"})
_OF_PYTHON = frozenset(
    {
        "item", "tolist", "bool", "float", "int", "double", "half", "long", "size", "dim",
        "numel", "shape", "type", "tensor", "as_tensor", "cpu", "cuda", "is_floating_point",
        "is_complex", "is_contiguous", "apply_along_dim", "stack", "cat", "zeros", "ones", "full",
        "empty", "arange", "element_size",
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
