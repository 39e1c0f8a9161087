"""Direct calls: the cheapest function equivalent to a torch function, given its arguments.

`torch.nn.functional.layer_norm` and similar functions are Python: they check whether a tensor
overrides torch functions, look at options, and call one function of torch's C++. If the recorded
call has decided all that, a replay calls the C++ function directly. It does so only for tensors
whose exact class is known, since subclasses can distinguish the two calls, and never where the
model might catch the errors of the call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from bendtrace.engine.source import IN_PYTHON, EquivalentCall, TorchSetting
from bendtrace.python.internals import internal
from bendtrace.python.lazy import LazyModule
from bendtrace.tape.captured import PLAIN_TYPES, Captured, CaptureKind
from bendtrace.tape.contexts import cudnn
from bendtrace.tape.structure import Existing
from bendtrace.tape.tape import Op, OpKind, Ref, Tape, refs_in
from bendtrace.watch.functions import METADATA, SHAPES, name_of

if TYPE_CHECKING:
    from bendtrace.engine.schedule import Schedule
    from bendtrace.record import array_functions
else:
    array_functions = LazyModule("bendtrace.record.array_functions")

_Given = dict[str, Any]


@dataclass(frozen=True)
class FunctionEquivalent:
    """The equivalent of a function."""

    function: types.FunctionType
    # Given the recorded arguments by name, returns the call; None if they do not determine it.
    resolve: Callable[[_Given], EquivalentCall | None]
    names: frozenset[str]  # the names that its code uses, to detect changed code

    def call(self, op: Op) -> EquivalentCall | None:
        """Return the equivalent of a recorded call, if it is certain."""
        code = self.function.__code__
        names = code.co_varnames[: code.co_argcount]
        if len(op.args) > len(names) or not op.kwargs.keys() <= set(names[len(op.args) :]):
            return None
        defaults = self.function.__defaults__ or ()
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        given.update(zip(names, op.args, strict=False))
        given.update(op.kwargs)
        if len(given) < len(names):
            return None
        return self.resolve({name: given[name] for name in names})


# Seen in torch 2.13 to 2.15; an entry whose function uses other names than these is left out, and
# test_direct_calls.py notices which.
_ASKING = frozenset(
    {
        "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic",
        "handle_torch_function", "torch", "_C", "_nn", "_VF",
    }
)  # fmt: skip
_cudnn_enabled = TorchSetting(cudnn)  # what torch.backends.cudnn.enabled asks for


def _layer_norm(given: _Given) -> EquivalentCall:
    args = (given["input"], given["normalized_shape"], given["weight"], given["bias"])
    return EquivalentCall(torch.layer_norm, (*args, given["eps"], _cudnn_enabled))


def _rms_normalized(given: _Given) -> EquivalentCall:
    args = given["input"], given["normalized_shape"], given["weight"], given["eps"]
    return EquivalentCall(torch.rms_norm, args)


def _batch_normalized(given: _Given) -> EquivalentCall | None:
    if given["training"] is not False or type(given["eps"]) is not float or given["eps"] < 0.0:
        return None  # sizes are looked at, or an error is raised
    names = (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
    )  # fmt: skip
    return EquivalentCall(torch.batch_norm, (*map(given.__getitem__, names), _cudnn_enabled))


def _dropout(given: _Given) -> EquivalentCall | None:
    p, training, inplace = given["p"], given["training"], given["inplace"]
    if type(p) not in (int, float) or not 0 <= p <= 1:
        return None
    if type(training) is not bool or type(inplace) is not bool:
        return None
    function = torch.dropout_ if inplace else torch.dropout
    return EquivalentCall(
        function,
        (given["input"], p, training),
        gives_back=given["input"] if not training and type(given["input"]) is Ref else None,
    )


def _embedding(given: _Given) -> EquivalentCall | None:
    padding = given["padding_idx"]
    if given["max_norm"] is not None or not (padding is None or (_is_int(padding) and not padding)):
        return None  # weights are changed, or their number is looked at
    padding = -1 if padding is None else padding
    args = given["weight"], given["input"], padding, given["scale_grad_by_freq"], given["sparse"]
    return EquivalentCall(torch.embedding, args)


def _along(method: Any) -> Callable[[_Given], EquivalentCall | None]:
    def resolve(given: _Given) -> EquivalentCall | None:
        if given["dim"] is None:
            return None  # there is a warning
        dtype = given["dtype"]
        return EquivalentCall(
            method, (given["input"], given["dim"]), {} if dtype is None else {"dtype": dtype}
        )

    return resolve


def _activation(
    function: Any, in_place: Any, *names: str
) -> Callable[[_Given], EquivalentCall | None]:
    def resolve(given: _Given) -> EquivalentCall | None:
        if type(given["inplace"]) is not bool:
            return None
        chosen = in_place if given["inplace"] else function
        return EquivalentCall(chosen, (given["input"], *map(given.__getitem__, names)))

    return resolve


def _clamp(given: _Given) -> EquivalentCall | None:
    low, high = given["min_val"], given["max_val"]
    if type(low) not in (int, float) or type(high) not in (int, float) or not low <= high:
        return None
    return _activation(_nn.hardtanh, _nn.hardtanh_, "min_val", "max_val")(given)


def _as_split(given: _Given) -> EquivalentCall | None:
    tensor, size, dim = given.values()
    if _is_int(size):
        return EquivalentCall(_functions.split, (tensor, size, dim))
    if type(size) in (list, tuple) and all(map(_is_int, size)):
        return EquivalentCall(_functions.split_with_sizes, (tensor, size, dim))
    return None


def _pad(given: _Given) -> EquivalentCall | None:
    mode = given["mode"]
    if type(mode) is not str or mode == "replicate":
        return None  # settings are looked at
    return EquivalentCall(_nn.pad, (given["input"], given["pad"], mode, given["value"]))


def _is_int(value: Any) -> bool:
    return type(value) is int


_nn: Any = internal("torch._C._nn", functional)
_functions: Any = internal("torch._C._VariableFunctions", torch)


def _all_equivalents() -> dict[Any, FunctionEquivalent]:
    found: dict[Any, FunctionEquivalent] = {}

    def enter(
        function: Any,
        resolve: Callable[[_Given], EquivalentCall | None],
        *names: str,
        own: bool = True,
    ) -> None:
        if not isinstance(function, types.FunctionType):
            return
        known_names = _ASKING | set(names) | ({function.__name__} if own else set())
        if known_names.issuperset(function.__code__.co_names):
            found[function] = FunctionEquivalent(function, resolve, known_names)

    cudnn = "backends", "cudnn", "enabled"
    enter(functional.layer_norm, _layer_norm, *cudnn)
    enter(getattr(functional, "rms_norm", None), _rms_normalized)
    enter(
        functional.batch_norm, _batch_normalized, "_verify_batch_size", "size", "ValueError", *cudnn
    )
    enter(functional.dropout, _dropout, "ValueError", "dropout_")
    enter(
        functional.embedding, _embedding, "size", "AssertionError", "contiguous",
        "_no_grad_embedding_renorm_",
    )  # fmt: skip
    softmaxes = (
        (functional.softmax, Tensor.softmax), (functional.log_softmax, Tensor.log_softmax),
    )  # fmt: skip
    for function, method in softmaxes:
        enter(function, _along(method), "_get_softmax_dim", "dim")
    enter(functional.relu, _activation(torch.relu, torch.relu_), "relu_")
    enter(functional.selu, _activation(torch.selu, torch.selu_), "selu_")
    for name in ("silu", "mish", "hardswish", "hardsigmoid", "relu6"):
        call, in_place = getattr(_nn, name, None), getattr(_nn, f"{name}_", None)
        if call is not None and in_place is not None:
            enter(getattr(functional, name), _activation(call, in_place), f"{name}_")
    leaky = _activation(_nn.leaky_relu, _nn.leaky_relu_, "negative_slope")
    enter(functional.leaky_relu, leaky, "leaky_relu_")
    enter(functional.elu, _activation(_nn.elu, _nn.elu_, "alpha"), "elu_")
    enter(functional.hardtanh, _clamp, "ValueError", "hardtanh_")
    enter(functional.sigmoid, lambda given: EquivalentCall(Tensor.sigmoid, (given["input"],)))
    enter(functional.tanh, lambda given: EquivalentCall(Tensor.tanh, (given["input"],)))
    enter(
        Tensor.split, _as_split, "Tensor", "isinstance", "int", "ValueError", "SymInt",
        "split_with_sizes",
    )  # fmt: skip
    enter(torch.functional.split, _as_split)
    enter(
        functional.pad, _pad, "nn", "functional", "jit", "is_scripting", "is_cuda", "is_xpu",
        "are_deterministic_algorithms_enabled", "compiler", "is_compiling", "_dynamo",
        "decorators", "nonstrict_trace", "_decomp", "decompositions", "_replication_pad",
        "importlib", "import_module",
    )  # fmt: skip
    return found


ENTRIES: dict[Any, FunctionEquivalent] = _all_equivalents()
"""The known functions, by function."""


def cheapest(op: Op, plain: frozenset[int] | set[int]) -> EquivalentCall | None:
    """Return a cheaper call that a replay makes instead of a recorded one, if there is one."""
    entry = ENTRIES.get(op.target) if op.kind is OpKind.CALL and op.raised is None else None
    if entry is None or not _is_plain_argument((*op.args, *op.kwargs.values()), plain):
        return None
    return entry.call(op)


def plain_values(tape: Tape) -> set[int]:
    """Return the ops whose values are certainly not tensors of a subclass, whatever the inputs are.

    This follows from classes that are checked before the run: those of arguments and state.
    """
    plain: set[int] = set()
    for op in tape.ops:
        if op.is_given:
            is_plain = isinstance(op.target, Captured) and _is_plain_part(op.target)
        else:
            is_plain = op.kind is OpKind.SCALAR or (
                op.kind is OpKind.CALL and _gives_plain_tensors(op.target)
            )
            is_plain = is_plain and _is_plain_argument((*op.args, *op.kwargs.values()), plain)
        if is_plain:
            plain.add(op.index)
    return plain


def _is_plain_argument(value: Any, plain: frozenset[int] | set[int]) -> bool:
    kind = type(value)
    if kind is Ref:
        return value.index in plain
    if kind is tuple or kind is list:
        return all(_is_plain_argument(item, plain) for item in value)
    if kind is slice:
        return all(
            _is_plain_argument(item, plain) for item in (value.start, value.stop, value.step)
        )
    return kind in PLAIN_TYPES or kind is torch.Size


def _is_plain_part(part: Captured) -> bool:
    if part.kind is CaptureKind.TENSOR:
        return part.type in (Tensor, torch.nn.Parameter)
    return part.kind in (CaptureKind.NUMBER, CaptureKind.PLAIN)


def _gives_plain_tensors(function: Any) -> bool:
    """Return whether a function gives tensors of no subclass if it is given none."""
    name = name_of(function)
    if function in SHAPES or function in METADATA:
        return True
    if "subclass" in name or "nested" in name or "wrapper" in name:
        return False
    if isinstance(function, types.MethodWrapperType):
        return name in _VIEWS
    if isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return function.__objclass__ is torch._C.TensorBase
    if isinstance(function, types.BuiltinFunctionType):
        return any(getattr(owner, name, None) is function for owner in (_functions, _nn))
    module = getattr(function, "__module__", None)
    return isinstance(function, types.FunctionType) and module in IN_PYTHON


_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


# Functions of arrays, where no tensor has to stand for their results.


def calls_on_arrays(schedule: Schedule, kept_until: int) -> dict[int, EquivalentCall]:
    """Return the calls of a schedule for whose results no tensors need stand.

    Only other functions of arrays receive these, and nothing is handed on while they are there:
    values are until a position. Where all that a function receives are numbers and arrays, it is
    called itself.
    """
    if schedule.blocks:
        return {}
    tape = schedule.tape
    ops = [op for op in map(schedule.op_at, range(schedule.start, schedule.end)) if op is not None]
    written = {op.index for op in ops if _writes_to_array(op)}
    functions = {
        op.index
        for op in ops
        if (type(op.target) is array_functions.ArrayFunction and not op.target.is_written)
        or op.target is array_functions.content_of
    }
    guards = [guard for listed in schedule.guards.values() for _, guard in listed]
    used = {index for guard in guards for index in guard.operands}
    used.update(index for holes in schedule.holes_at.values() for index in holes)
    used.update(ref.index for ref in refs_in(schedule.outputs))
    used.update(i for op in ops if op.index not in functions | written for i in op.operands)
    used.update(i for op in ops if op.target is array_functions.content_of for i in op.operands)
    used.update(splice.index for listed in schedule.splices.values() for splice in listed)
    last_use = {index: op.index for op in ops for index in op.operands}
    arrays = {
        index
        for index in functions - used - schedule.catchable
        if index > kept_until
        and not schedule.is_late(tape.ops[index])
        # Python may take over at a splice, from all values that are needed behind it.
        and not any(index < position <= last_use.get(index, -1) for position in schedule.splices)
    }

    def call(op: Op) -> EquivalentCall:
        target = _on_arrays(op.target)
        if op.target is not array_functions.content_of and op.target.is_plain:
            given = (*op.args, *op.kwargs.values())
            if all(_is_opened(value, tape.ops, arrays) for value in given):
                target = op.target.function
        return EquivalentCall(target, op.args, op.kwargs)

    found = {index: call(tape.ops[index]) for index in arrays}
    for index in written - used - schedule.catchable:
        direct = call(tape.ops[index])
        if direct.target is tape.ops[index].target.function and index > kept_until:
            found[index] = direct
    return found


def _writes_to_array(op: Op) -> bool:
    """Return whether a function writes to an array of the model's, and nobody needs its result."""
    if type(op.target) is not array_functions.ArrayFunction or not op.target.is_written:
        return False
    return _is_array(op.kwargs["out"] if "out" in op.kwargs else op.args[0])


def _is_array(value: Any) -> bool:
    """Return whether a recorded argument is an array of numpy's own class that the model has."""
    return type(value) is Existing and value.part.type is sys.modules["numpy"].ndarray


def _is_opened(value: Any, ops: Sequence[Op], arrays: Collection[int]) -> bool:
    """Return whether a recorded argument is a number or an array in a replay, and no tensor."""
    kind = type(value)
    if kind is Ref:
        op = ops[value.index]
        if value.index in arrays:
            return op.target is array_functions.content_of or op.target.is_plain
        return type(op.meta) in _NUMBERS and (op.kind is not OpKind.CALL or op.target is _item)
    if kind is slice:
        return all(_is_opened(one, ops, arrays) for one in (value.start, value.stop, value.step))
    if kind is tuple:
        return all(_is_opened(one, ops, arrays) for one in value)
    return kind in PLAIN_TYPES or _is_array(value)


_NUMBERS = (bool, int, float)
_item = Tensor.item


def _on_arrays(function: Any) -> Any:
    return Tensor.numpy if function is array_functions.content_of else function.on_arrays
