"""Which recorded paths can be run speculatively at all, going by their tape."""

from __future__ import annotations

import re
import types
from collections.abc import Container, Iterable
from textwrap import shorten
from typing import Any

import torch

from bendtrace.recording.recorder import Recording
from bendtrace.replay.global_state import GlobalState
from bendtrace.tape.contexts import Context
from bendtrace.tape.structure import (
    Existing,
    Fixed,
    Instance,
    Made,
    Opaque,
)
from bendtrace.tape.tape import Op, OpKind, Ref, is_handled
from bendtrace.torch_rules.functions import (
    FLEETING,
    METADATA,
    RESHAPES_IN_PLACE,
    SETTERS,
    is_foreign,
    is_gate,
    is_torchs_function,
    name_of,
    said_of,
)
from bendtrace.torch_rules.host_io import environ

__all__ = ["UNTOLD", "located", "why_not", "why_not_op", "why_not_under"]

# Longer paths would be compiled for minutes.
_LONGEST = 4096

_NEVER = RESHAPES_IN_PLACE | {
    "_assert", "_assert_async", "apply_", "backward", "grad", "manual_seed", "map2_", "map_",
    "pin_memory", "record_stream", "register_hook", "register_post_accumulate_grad_hook",
    "retain_grad", "seed", "share_memory_",
}  # fmt: skip
# Inductor, or what torch.compile traces, leaves out the tests of values that these make.
_RAISING = frozenset({"binary_cross_entropy", "istft"})
_RANDOM = re.compile(
    "rand|dropout|normal_|^normal|bernoulli|multinomial|poisson$|uniform|exponential|geometric_|cauchy|"
    "rrelu|binomial|gumbel|dirichlet|_gamma|log_normal|^lstm|^gru|^rnn_|attention|fractional"
)
_RECURRENT = re.compile("^(lstm|gru|rnn_)")
# Kernels of batch norm whose schemas do not say that they write to the statistics.
UNTOLD = frozenset(
    {
        "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
        "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
    }
)  # fmt: skip
# What a tensor is asked for that a compiler would answer for its own stand-in.
_UNANSWERED = (FLEETING - {"requires_grad"}) | {"names", "_base", "_grad", "is_inference"}


def why_not(
    recording: Recording, global_state: GlobalState, spliced: Container[int] = ()
) -> str | None:
    """Say why a path cannot be run ahead of its guards; None if nothing on its tape forbids it.

    Args:
        recording: the path.
        global_state: the global state that it ran under.
        spliced: the gates for which there are splices.
    """
    tape = recording.tape
    if tape.blockers:
        return f"it can only be run live: {tape.blockers[0]}"
    if recording.changes:
        return f"it sets {recording.changes[0].label}"
    if recording.is_transient:
        return "it fills a cache"
    if tape.is_joint:
        return "ranks act together in it"
    if tape.blocks:
        return "it has checkpointed blocks, which the backward pass does again op by op"
    if (reason := why_not_under(global_state)) is not None:
        return reason
    if len(tape.ops) > _LONGEST:
        return f"it has more than {_LONGEST} ops"
    for op in tape.ops:
        if op.index in spliced:
            if op.context._replace(grad=global_state.context.grad) != global_state.context:
                return f"{op.target.described} runs in another inference or autocast mode"
            continue
        if op.target is environ:  # which is asked before the graph is called
            continue
        if any(tape.ops[written].is_given for written in op.writes):
            reason = f"{said_of(op.target)} writes to what was there before the run"
        else:
            reason = why_not_op(op, global_state.context)
        if reason is not None:
            return located(reason, op)
    return None


def located(reason: str, op: Op) -> str:
    """Return a reason with the place in the model that an op has."""
    if op.site is None:
        return reason
    text = shorten(op.site.place.text, 60, placeholder=" ...")
    return f"{reason} (at {op.site.place}: `{text}`)"


def why_not_under(global_state: GlobalState) -> str | None:
    """Say why nothing can be compiled that ran under some global state; None if it can."""
    if global_state.modes:
        return "it runs under a function mode"
    if global_state.monkeypatches:  # a compiler knows the functions of torch by their names
        return f"something stands in for {global_state.monkeypatches[0].name}"
    if global_state.hooked:
        return "hooks are registered for all modules"
    return None


def why_not_op(op: Op, entry: Context) -> str | None:
    """Say why an op cannot be compiled; None if it can.

    Args:
        op: the op.
        entry: grad mode and so on of the function that it is compiled in.
    """
    if op.is_given:
        return None
    if op.kind is OpKind.UNKNOWN:
        return "a tensor came from nowhere"
    name = name_of(op.target)
    if op.raised is not None:
        return f"{name} raised, and the model went on"
    if is_handled(op.scope, op.site):
        return f"the model has a handler for what {name} may raise"
    if op.kind is OpKind.CALL:
        if is_gate(op) or not (_is_getter(op.target) or is_torchs_function(op.target)):
            return f"{name} is not torch's, and may do more than it returns"
        if is_foreign(op.target):
            return f"{name} is a custom operator or a script, and may do more than it returns"
        module = str(getattr(op.target, "__module__", ""))
        name = name.partition(".")[0]  # of an operator: without its overload
        if name in _RAISING:
            return f"{name} raises an error for some values, which compiled code might not"
        if name in _NEVER or op.target in SETTERS or module.endswith(".random"):
            return f"{name} has effects besides what it returns"
        if _RANDOM.search(name) and _may_draw(op, name):
            return f"{name} may draw random numbers"
        if isinstance(op.target, type):
            return f"{name} is a constructor, which compilers know no schema of"
        if name in UNTOLD:
            return f"{name} may write to statistics"
        if name in _UNANSWERED and (op.target in METADATA or _is_getter(op.target)):
            return f"{name} of a tensor is asked for"
        if op.context._replace(grad=entry.grad) != entry:
            return f"{name} runs in another inference or autocast mode than the call"
    for held in _held((op.args, op.kwargs)):
        return f"{name} is called with {held}"
    return None


def _may_draw(op: Op, name: str) -> bool:
    """Whether an op draws random numbers, for some sizes and numbers that a path leaves open."""
    flags: tuple[str, ...]
    if "dropout" in name:
        position, flags, chance = 2, ("training", "train"), (1, "p")
    elif _RECURRENT.search(name):
        # A packed sequence comes with the lengths of its steps, before the state and the weights.
        is_packed = len(op.args) > 3 and isinstance(op.args[3], (list, tuple))
        position, flags, chance = 6 + is_packed, ("train",), (5 + is_packed, "dropout")
    elif "attention" in name:
        position, flags, chance = len(op.args), (), (4, "dropout_p")
    else:
        return True
    on = next((op.kwargs[flag] for flag in flags if flag in op.kwargs), True)
    if position < len(op.args):
        on = op.args[position]
    default = 0.0 if "attention" in name else 0.5
    likely = op.kwargs.get(chance[1], default)
    if chance[0] < len(op.args):
        likely = op.args[chance[0]]
    never = type(likely) in (int, float) and likely == 0
    return not (on is False or never)


def _is_getter(target: Any) -> bool:
    """Whether a function reads an attribute that torch's tensors have."""
    read = getattr(target, "__self__", None)
    return (
        isinstance(target, types.MethodWrapperType)
        and target.__name__ == "__get__"
        and getattr(read, "__objclass__", None) in (torch._C.TensorBase, torch.Tensor)
    )


def _held(value: Any) -> Iterable[Any]:
    """Yield what, in recorded arguments, is neither a tensor nor a plain value."""
    if isinstance(value, Instance) and issubclass(value.cls, tuple):
        yield from _held(value.items)
    elif isinstance(value, (Existing, Fixed, Instance, Made, Opaque)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _held(item)
    elif isinstance(value, dict):
        yield from _held(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _held((value.start, value.stop, value.step))
    elif callable(value) and not isinstance(value, (type, Ref)):
        yield value
    elif type(value).__module__ == "numpy":
        yield value
