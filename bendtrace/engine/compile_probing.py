"""The facts that compiling a path needs, found out by one run of it, op by op.

A compiled graph has sizes that depend on values as symbols, and a compiler may come to take a
symbol for what the code makes of it (broadcast with three, it has to be three). A guard must not
be tested with what was taken for granted. So it is tested with the number itself, counted again
in the mask that things were picked with: `Extents` finds that mask.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.guard_kinds import Analysis
from bendtrace.engine.schedule import Schedule
from bendtrace.python.internals import TorchDispatchMode
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Array
from bendtrace.tape.contexts import Context, ContextSwitch, current_context
from bendtrace.tape.structure import Construction, Existing, FixedObject, Instance, Opaque
from bendtrace.tape.tape import Guard, Op, OpKind, Ref, TensorMeta, is_handled
from bendtrace.watch.draws import RandomStates
from bendtrace.watch.functions import (
    ADDRESS,
    FLEETING,
    METADATA,
    RANK_DEPENDS_ON_SIZES,
    RESHAPES_IN_PLACE,
    SETTERS,
    display_name,
    is_foreign,
    is_gate,
    is_torchs_function,
    name_of,
    table_name,
)
from bendtrace.watch.host_io import environ
from bendtrace.watch.writes import storage_of, works_in_place

# Splices: the insertions at a gate, as steps of a compiled path.
#
# A gate calls Python that a compiler cannot see into. A *splice* expresses the same as functions of
# tensors that are applied to some of the gate's values, and as values that an observer wants. A
# path is compiled together with the splices of its gates. The other tensors that the functions need
# are inputs of the graph, and the observed values are outputs.


@dataclass(frozen=True, eq=False)
class SpliceStep:
    """One insertion at a gate."""

    slots: tuple[int, ...]  # the positions of its values among those of the gate
    # Given the value and `tensors`, returns the new one, or None to keep it, followed by `kept`
    # tensors in a tuple if there are any; None for a step that only looks.
    function: Callable[..., Any] | None = None
    tensors: tuple[Tensor, ...] = ()  # the other tensors that the function needs
    kept: int = 0  # the number of tensors that the function returns after the new value
    # Given the same, says why the function cannot be compiled; None if it can be. It is asked once,
    # with the values of a call.
    check: Callable[..., str | None] | None = None


@dataclass(frozen=True, eq=False)
class GateSplice:
    """The insertions at one gate."""

    steps: tuple[SpliceStep, ...]  # the insertions, in the order in which they are called
    exchanged: tuple[int, ...]  # the positions of the values that the gate returns
    in_place: bool | None  # the flag that it returns after them; None if it returns none

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The other tensors that the functions of all steps need."""
        return tuple(tensor for step in self.steps for tensor in step.tensors)

    def gate_result(self, values: Sequence[Any]) -> Any:
        """Return the result of the gate for the final values."""
        given = [values[slot] for slot in self.exchanged]
        if self.in_place is not None:
            return (*given, self.in_place)
        return given[0] if len(given) == 1 else tuple(given)


def apply_step(
    step: SpliceStep, value: Any, tensors: Sequence[Tensor]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the new value of a step, and the tensors that it keeps."""
    assert step.function is not None
    made = step.function(value, *tensors)
    kept: tuple[Tensor, ...] = ()
    if step.kept:
        made, *rest = made
        kept = tuple(rest)
    return (value if made is None else made), kept


def differs(old: Tensor, new: Tensor) -> Tensor:
    """Return whether two tensors differ, as a tensor."""
    if new is old:
        return torch.zeros((), dtype=torch.bool, device=old.device)
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        return torch.ones((), dtype=torch.bool, device=old.device)
    old, new = old.detach(), new.detach()
    if not (old.is_floating_point() or old.is_complex()):
        return (old != new).any()
    return ((old != new) & ((old == old) | (new == new))).any()


_NOTHING: Mapping[int, GateSplice] = {}


class CompileRefusal(Exception):
    """Why a path is not compiled, in a sentence."""


@dataclass(frozen=True)
class ProbeFindings:
    """The facts that are known about a path after a probe."""

    dynamic: frozenset[int]  # ops whose result has a size, or is a number, that may vary by values
    roots: dict[int, Any]  # those where that begins, and what they gave: sizes, or the number
    first: dict[int, int]  # for each op that gave a tensor, the first op that gave the same one
    writes: bool  # whether it writes into tensors that it made itself
    # The numbers of the functions at gates that give the very tensor that they are given, counted
    # in the order of the tape.
    unchanged: frozenset[int] = frozenset()


def probe(
    recording: Recording, arguments: tuple[Any, ...], splices: Mapping[int, GateSplice] = _NOTHING
) -> ProbeFindings | None:
    """Carry out a path and look at what its ops do. Nothing outside of it is changed.

    None of its ops is Python's own or a user's (see `obstacle_to_compiling`), and the input guards
    hold for the arguments. Return None if they lead another way. Raise `CompileRefusal` if an op
    writes to what was there before, or draws random numbers.
    """
    states = RandomStates()
    try:
        return _Probe(recording, arguments, splices).run()
    finally:
        if states.differ():
            states.restore()
            raise CompileRefusal("it draws random numbers")


class _Probe:
    def __init__(
        self, recording: Recording, arguments: tuple[Any, ...], splices: Mapping[int, GateSplice]
    ) -> None:
        self._tape = recording.tape
        self._arguments = arguments
        self._splices = splices
        self._functions = 0  # at gates, so far
        self._unchanged: set[int] = set()
        self._values: dict[int, Any] = {}
        self._dynamic: set[int] = set()
        self._roots: dict[int, Any] = {}
        self._protected: set[int] = set()
        self._names: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._first: dict[int, int] = {}
        self._schedule = Schedule(
            recording, Analysis(self._tape), current_context(), dict(enumerate(self._tape.guards)),
            needed=set(range(len(self._tape.ops))),
        )  # fmt: skip
        self._dying = self._schedule.deaths()

    def run(self) -> ProbeFindings | None:
        for given in self._tape.ops:
            if given.is_given:
                self._take(given)
        for splice in self._splices.values():
            self._protected.update(map(storage_of, splice.tensors))
        switch = ContextSwitch()
        mode = _OperatorWatch(self._protected)
        try:
            for position, guards, op in self._schedule.steps():
                if not all(self._holds(guard) for _, guard in guards):
                    return None
                self._forget(2 * position)
                if op is not None:
                    self._carry_out(op, switch, mode)
                    self._forget(2 * position + 1)
        except CompileRefusal:
            raise
        except Exception:  # the arguments are such that the model raises
            return None
        finally:
            switch.restore()
        return ProbeFindings(
            frozenset(self._dynamic), self._roots, self._first, mode.wrote,
            frozenset(self._unchanged),
        )  # fmt: skip

    def _forget(self, moment: int) -> None:
        for index in self._dying.get(moment, ()):
            del self._values[index]

    def _take(self, op: Op) -> None:
        value = op.target.read(self._arguments)
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or value.layout is not torch.strided:
                raise CompileRefusal(f"{op.target.label} is no plain dense tensor")
            self._protected.add(storage_of(value))
            self._note(op.index, value)
        self._values[op.index] = value

    def _carry_out(self, op: Op, switch: ContextSwitch, mode: _OperatorWatch) -> None:
        if op.kind is OpKind.CALL:
            switch.to(op.context)
        args, kwargs = self._actual(op.args), self._actual(op.kwargs)
        mode.dynamic = False
        splice = self._splices.get(op.index)
        if splice is not None:
            value = self._through(splice, list(args), mode)
        else:
            with mode:
                value = op.target(*args, **kwargs)
        self._values[op.index] = value
        if mode.dynamic:
            self._roots[op.index] = _result_extent(value)
        if mode.dynamic or not self._dynamic.isdisjoint(op.operands):
            self._dynamic.add(op.index)
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN or value.layout is not torch.strided:
                raise CompileRefusal("it computes with tensors that are not plain dense ones")
            self._note(op.index, value)

    def _through(self, splice: GateSplice, values: list[Any], mode: _OperatorWatch) -> Any:
        """Carry out a gate: nothing that is called there may write to what it is given."""
        for step in splice.steps:
            if step.function is None:
                continue
            (slot,) = step.slots
            if step.check is not None:
                with mode:  # it runs what is checked, which may turn out to write
                    reason = step.check(values[slot], step.tensors)
                if reason is not None:
                    raise CompileRefusal(reason)
            storage = storage_of(values[slot])
            added = storage not in self._protected
            self._protected.add(storage)
            with mode:
                made, kept = apply_step(step, values[slot], step.tensors)
            if made is values[slot]:
                self._unchanged.add(self._functions)
            self._functions += 1
            values[slot] = made
            if added:
                self._protected.discard(storage)
            if any(tensor.requires_grad for tensor in kept):
                raise CompileRefusal("gradients may be asked for of what an insertion keeps")
            if type(values[slot]) not in _PLAIN:
                raise CompileRefusal("what is inserted makes something else of a tensor")
        return splice.gate_result(values)

    def _actual(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._values[value.index]
        if isinstance(value, Instance):  # a tuple of some kind: see `obstacle_to_compiling`
            return tuple(map(self._actual, value.items))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._actual, value))
        if isinstance(value, dict):
            return {key: self._actual(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._actual, (value.start, value.stop, value.step)))
        return value

    def _note(self, index: int, value: Tensor) -> None:
        cached = self._names.get(id(value))
        if cached is None or cached[1]() is not value:  # one that is gone had the same id
            cached = self._names[id(value)] = index, weakref.ref(value)
        self._first[index] = cached[0]

    def _holds(self, guard: Guard) -> bool:
        value, *others = (self._values[index] for index in guard.operands)
        return guard.meets(value, others[0] if others else guard.answer)


class _OperatorWatch(TorchDispatchMode):
    """Sees what each op comes down to, by the schemas of torch's own operators."""

    def __init__(self, protected: set[int]) -> None:
        super().__init__()
        self._protected = protected
        self.dynamic = False  # whether the sizes of a result depended on values
        self.wrote = False  # whether anything was written to

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _operator_draws(func, args, kwargs):
            raise CompileRefusal(f"it draws random numbers ({func})")
        for name, tensor in _written_arguments(func, args, kwargs):
            self.wrote = True
            if storage_of(tensor) in self._protected:
                raise CompileRefusal(f"it writes to what was there before the run ({func}, {name})")
        # An index of tensors has that tag for the sake of masks.
        if torch.Tag.dynamic_output_shape in func.tags and (
            func.overloadpacket is not torch.ops.aten.index or _has_mask(args[1])
        ):
            self.dynamic = True
        if torch.Tag.data_dependent_output in func.tags:
            self.dynamic = True
        return func(*args, **kwargs)


def _result_extent(value: Any) -> Any:
    """The sizes of what an op gave, or the numbers themselves."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_result_extent, value))
    return value


def _written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, Tensor):
                yield argument.name, value
    if func.overloadpacket.__name__ in UNTOLD:
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        if named.get("training", named.get("train", True)):
            for name in names:
                if name.startswith("running_") and isinstance(named.get(name), Tensor):
                    yield name, named[name]


def _operator_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator that can draw random numbers does.

    Attention without dropout does not.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, 0.0)
            return bool(given)
    return True


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, Tensor) and index.dtype in masks for index in indices)


_PLAIN = frozenset({Tensor, nn.Parameter})


class Unknown(Exception):
    """A size depends on values in a way that is not followed."""

    def __init__(self, reason: str, op: Op | None = None) -> None:
        super().__init__(reason if op is None else with_place(reason, op))


class Extents:
    """Follows sizes back to the masks that they were counted in."""

    def __init__(self, recording: Recording, findings: ProbeFindings) -> None:
        self._ops = recording.tape.ops
        self._findings = findings
        self.varying: set[int] = set()  # ops whose result has a size, or is a number, that may vary
        for op in self._ops:
            if op.index in findings.roots or self._varies(op):
                self.varying.add(op.index)

    def _varies(self, op: Op) -> bool:
        refs = op.operands
        if _gives_back_its_first(op):
            refs = refs[:1]  # it gives that one back, whatever was added to it
        return any(index in self.varying for index in refs)

    def changes_rank(self) -> Op | None:
        """Return an op that gives fewer dimensions where a size that depends on values is 1.

        A compiler takes it for granted that such a size is not 1.
        """
        for op in self._ops:
            if table_name(op.target) in RANK_DEPENDS_ON_SIZES and self._may_drop(op):
                return op
        return None

    def _may_drop(self, op: Op) -> bool:
        if self.varying.isdisjoint(op.operands):
            return False
        is_squeeze = table_name(op.target).startswith("squeeze")
        if not (is_squeeze and op.args and type(op.args[0]) is Ref):
            return True
        given = op.args[0].index
        dims: Any = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
        if dims is None:
            dims = range(len(self._shape(given)))
        try:
            chosen = [dims] if isinstance(dims, int) else list(dims)
            return any(self.origin(given, dim) is not None for dim in chosen)
        except (Unknown, TypeError):
            return True

    def mask(self, root: int) -> int:
        """Return the op whose nonzero elements a root has picked.

        Raise `Unknown` if it picks in another way.
        """
        op = self._ops[root]
        name = name_of(op.target)
        refs = [value.index for value in op.args if type(value) is Ref]
        if name in ("nonzero", "argwhere") or (name == "where" and len(op.args) == 1):
            return refs[0]
        if (
            name == "masked_select"
            and len(refs) == 2
            and self._shape(refs[0]) == self._shape(refs[1])
        ):
            return refs[1]
        if self._is_masked(op):
            return refs[1]
        raise Unknown(f"how many things {name} gives depends on values", op)

    def origin(self, index: int, dim: int) -> int | None:
        """Return the root that a dimension has its size from; None if it does not depend on values.

        Raise `Unknown` if it is not followed that far.
        """
        if index not in self.varying:
            return None
        op = self._ops[index]
        dim %= max(1, len(self._shape(index)))
        if index in self._findings.roots:
            self.mask(index)
            return index if dim == 0 else None
        name = name_of(op.target)
        given = op.args[0].index if op.args and type(op.args[0]) is Ref else None
        if given is None:
            raise Unknown(f"the size of what {name} gives depends on values", op)
        if op.kind is OpKind.SCALAR:
            return self._of_element(given, dim)
        shape = self._shape(given)
        if name in ("squeeze", "unsqueeze") and len(op.args) == 2 and type(op.args[1]) is int:
            at = op.args[1] % (len(shape) + (name == "unsqueeze"))
            if name == "unsqueeze":
                return None if dim == at else self.origin(given, dim - (dim > at))
            if len(shape) == len(self._shape(index)):
                return self.origin(given, dim)
            if self.origin(given, at) is None:
                return self.origin(given, dim + (dim >= at))
        elif name in ("__getitem__", "getitem", "select"):
            return self._of_index(op, given, dim)
        elif _gives_back_its_first(op):
            return self.origin(given, dim)
        elif name in _ALIKE and not any(type(value) is Ref for value in op.args[1:]):
            return self.origin(given, dim)
        elif name == "linear" and dim < len(shape) - 1:
            return self.origin(given, dim)
        raise Unknown(f"the size of what {name} gives depends on values", op)

    def _of_element(self, whole: int, dim: int) -> int | None:
        """The origin of an element of what an op gave."""
        op = self._ops[whole]
        name = name_of(op.target)
        if whole in self._findings.roots:
            self.mask(whole)
            return whole
        if name == "unbind" and type(op.args[0]) is Ref:
            at = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
            if type(at) is int:
                at %= len(self._shape(op.args[0].index))
                if self.origin(op.args[0].index, at) is None:
                    return self.origin(op.args[0].index, dim + (dim >= at))
        raise Unknown(f"the size of what {name} gives depends on values", op)

    def _of_index(self, op: Op, given: int, dim: int) -> int | None:
        key = op.args[1]
        if type(key) is Ref:  # rows picked by their numbers
            picked = self._shape(key.index)
            if len(picked) == 1 and not self._is_masked(op):
                return self.origin(key.index, 0) if dim == 0 else self.origin(given, dim)
        keys = key.items if isinstance(key, Instance) else key
        keys = keys if isinstance(keys, (tuple, list)) else (keys,)
        if all(k is None or type(k) is int or k == slice(None) for k in keys):
            at = gone = 0
            for k in keys:
                if type(k) is int:
                    if self.origin(given, gone) is not None:
                        break
                    gone += 1
                    continue
                if at == dim:
                    return None if k is None else self.origin(given, gone)
                at, gone = at + 1, gone + (k is not None)
            else:
                return self.origin(given, dim - at + gone)
        raise Unknown("the size of what an index gives depends on values", op)

    def _is_masked(self, op: Op) -> bool:
        if op.target is not Tensor.__getitem__ or type(op.args[1]) is not Ref:
            return False
        meta = self._ops[op.args[1].index].meta
        return isinstance(meta, TensorMeta) and meta.dtype in (torch.bool, torch.uint8)

    def _shape(self, index: int) -> tuple[Any, ...]:
        meta = self._ops[index].meta
        if not isinstance(meta, TensorMeta):
            raise Unknown("the size of what is no tensor depends on values", self._ops[index])
        return meta.shape


def _gives_back_its_first(op: Op) -> bool:
    first = op.args[0] if op.args else None
    return works_in_place(op) and "out" not in op.kwargs and type(first) is Ref


# What gives a tensor of the same sizes as its first argument.
_ALIKE = frozenset(
    {
        "abs", "add", "bool", "clone", "contiguous", "cpu", "cuda", "detach", "div", "double", "eq",
        "float", "ge", "gelu", "gt", "int", "le", "logical_not", "long", "lt", "mul", "ne", "neg",
        "relu", "sigmoid", "silu", "softmax", "sub", "tanh", "to",
    }
)  # fmt: skip


# Which recorded paths can be run speculatively at all, going by their tape.

# Longer paths would be compiled for minutes.
_LONGEST = 4096

_NEVER = RESHAPES_IN_PLACE | {
    "_assert", "_assert_async", "apply_", "backward", "grad", "manual_seed", "map2_", "map_",
    "pin_memory", "record_stream", "register_hook", "register_post_accumulate_grad_hook",
    "retain_grad", "seed", "share_memory_",
}  # fmt: skip
# Those of them that can be written in another way.
_RESHAPING = frozenset(
    {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)
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


def obstacle_to_compiling(
    recording: Recording, global_state: GlobalState, spliced: Container[int] = ()
) -> str | None:
    """Say why a path cannot be run ahead of its guards; None if nothing on its tape forbids it.

    There are splices for the gates in `spliced`.
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
            reason = f"{display_name(op.target)} writes to what was there before the run"
        else:
            reason = why_not_op(op, global_state.context)
        if reason is not None:
            return with_place(reason, op)
    return None


def with_place(reason: str, op: Op) -> str:
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
    """Say why an op cannot be compiled; None if it can."""
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
        if is_gate(op) or not (_reads_tensor_attribute(op.target) or is_torchs_function(op.target)):
            return f"{name} is not torch's, and may do more than it returns"
        if is_foreign(op.target):
            return f"{name} is a custom operator or a script, and may do more than it returns"
        module = str(getattr(op.target, "__module__", ""))
        name = name.partition(".")[0]  # of an operator: without its overload
        if name in _RAISING:
            return f"{name} raises an error for some values, which compiled code might not"
        if name in _RESHAPING:
            return (
                f"{name} changes the sizes or strides of a tensor in place, which compiled code "
                f"cannot do: write x = x.{name[:-1]}(...) in its place. As it is, the segments "
                "around it may be compiled by themselves"
            )
        if name in _NEVER or op.target in SETTERS or module.endswith(".random"):
            return f"{name} has effects besides what it returns"
        if _RANDOM.search(name) and _may_draw(op, name):
            return f"{name} may draw random numbers"
        if isinstance(op.target, type):
            return f"{name} is a constructor, which compilers know no schema of"
        if name in UNTOLD:
            return f"{name} may write to statistics"
        if op.target is ADDRESS or (
            name in _UNANSWERED and (op.target in METADATA or _reads_tensor_attribute(op.target))
        ):
            return f"{name} of a tensor is asked for"
        if op.context._replace(grad=entry.grad) != entry:
            return f"{name} runs in another inference or autocast mode than the call"
    for thing in _objects_in((op.args, op.kwargs)):
        return f"{name} is called with {thing}"
    return None


def _may_draw(op: Op, name: str) -> bool:
    """Return whether an op may draw random numbers, as a path leaves sizes and numbers open."""
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


def _reads_tensor_attribute(target: Any) -> bool:
    """Return whether a function reads an attribute that torch's tensors have."""
    read = getattr(target, "__self__", None)
    return (
        isinstance(target, types.MethodWrapperType)
        and target.__name__ == "__get__"
        and getattr(read, "__objclass__", None) in (torch._C.TensorBase, torch.Tensor)
    )


def _objects_in(value: Any) -> Iterable[Any]:
    """Yield what, in recorded arguments, is neither a tensor nor a plain value."""
    if isinstance(value, Instance) and issubclass(value.cls, tuple):
        yield from _objects_in(value.items)
    elif isinstance(value, Array):
        yield "an array of numpy"
    elif isinstance(value, (Existing, FixedObject, Instance, Construction, Opaque)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _objects_in(item)
    elif isinstance(value, dict):
        yield from _objects_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _objects_in((value.start, value.stop, value.step))
    elif callable(value) and not isinstance(value, (type, Ref)):
        yield value
    elif type(value).__module__ == "numpy":
        yield value
