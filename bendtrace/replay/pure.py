"""Whether an `autograd.Function` can be carried out a second time without anybody noticing.

It is one op on the tape, and what its forward does besides is Python that no tracer sees. So its
instructions are read: it may do nothing but compute with what it is given, with torch's operators
and with functions of which the same can be said, and keep what it likes in its own context.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import types
from typing import Any

import torch

from bendtrace.source.bytecode import Step, single_steps
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.tape.tape import Op, Ref
from bendtrace.torch_rules.functions import OpOverloadPacket
from bendtrace.torch_rules.intercepts import is_function_apply
from bendtrace.torch_rules.monkeypatches import monkeypatches

__all__ = ["computes_only", "overloads"]

_DEEPEST = 4
_NO_SETUP = torch.autograd.Function.setup_context


def computes_only(op: Op) -> bool:
    """Whether an op is an `autograd.Function` that only computes, and is given plain values."""
    target = op.target
    cls = getattr(target, "__self__", None)
    if not is_function_apply(target) or not isinstance(cls, type):
        return False
    if monkeypatches():  # torch's functions may be others' by now
        return False
    given = (*op.args, *op.kwargs.values())
    if not all(type(value) is Ref or type(value) in PLAIN_TYPES for value in given):
        return False
    forward: Any = inspect.getattr_static(cls, "forward")
    prepare: Any = inspect.getattr_static(cls, "setup_context")
    forward, prepare = (getattr(each, "__func__", each) for each in (forward, prepare))
    if prepare is _NO_SETUP:
        return _only_computes(forward, _DEEPEST, True)
    return _only_computes(forward, _DEEPEST) and _only_computes(prepare, _DEEPEST, True)


def _only_computes(function: Any, depth: int, has_context: bool = False) -> bool:
    if type(function) is not types.FunctionType or not depth:
        return False
    code, space = function.__code__, function.__globals__
    if code.co_freevars or code.co_cellvars or code.co_flags & _SUSPENDS:
        return False
    context = code.co_varnames[0] if has_context and code.co_argcount else None
    before: Step | None = None
    for step in single_steps(code):
        if step.name == "STORE_ATTR":
            if before is None or (before.name, before.value) != ("LOAD_FAST", context):
                return False
        elif step.name == "STORE_FAST" and step.value == context:
            return False
        elif step.name == "LOAD_GLOBAL":
            found = space.get(step.value, getattr(builtins, step.value, None))
            is_known = any(found is each for each in _HARMLESS)
            if not is_known and not _only_computes(found, depth - 1):
                return False
        elif step.name in ("LOAD_ATTR", "LOAD_METHOD"):
            if not (step.value in _OF_CONTEXT or _is_operator(step.value)):
                return False
        elif step.name == "BINARY_OP":
            if "=" in step.shown:
                return False
        elif step.name not in _PLAIN and "JUMP" not in step.name:
            return False
        before = step
    return True


def _is_operator(name: str) -> bool:
    """Whether an attribute, of a tensor or of torch, is an operator that writes to nothing."""
    if name.endswith("_") or name in _WRITES:
        return False
    return (
        name in _METADATA
        or type(getattr(torch, name, None)) is torch.dtype
        or (bool(overloads(name)))
    )


@functools.cache
def overloads(name: str) -> tuple[Any, ...]:
    """Return the operators of torch that a function of that name comes down to."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return ()
    found = [getattr(packet, each) for each in packet.overloads()]
    exists = torch._C._dispatch_has_kernel  # those for lists and numbers are not torch's own
    return tuple(one for one in found if "out" not in one._overloadname and exists(one.name()))


_SUSPENDS = 0x20 | 0x80 | 0x200  # generators and coroutines
_HARMLESS: tuple[Any, ...] = (torch, math, len, float, int, bool, abs, min, max, range, tuple)
_OF_CONTEXT = frozenset({"save_for_backward", "needs_input_grad", "mark_non_differentiable"})
_METADATA = frozenset({"shape", "dtype", "device", "ndim", "T", "mT", "size", "dim", "numel", "pi"})
_WRITES = frozenset(
    {"resize", "resize_as", "set", "copy", "fill", "zero", "data", "backward", "grad", "out"}
)
_PLAIN = frozenset(
    {
        "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_VALUE", "RETURN_CONST",
        "UNARY_NEGATIVE", "UNARY_NOT", "COMPARE_OP", "IS_OP", "BUILD_TUPLE", "BINARY_SUBSCR",
        "BUILD_SLICE", "BINARY_SLICE", "UNPACK_SEQUENCE", "CALL", "CALL_KW", "KW_NAMES",
        "PUSH_NULL", "POP_TOP", "COPY", "SWAP", "TO_BOOL",
    }
)  # fmt: skip
