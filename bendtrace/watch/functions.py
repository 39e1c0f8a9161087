"""Torch functions that need more than recording, and their other effects."""

from __future__ import annotations

import dis
import functools
import keyword
import sys
import types
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bendtrace.python.bytecode import branches, global_uses
from bendtrace.python.internals import Never, internal
from bendtrace.tape.tape import Op, Use, refs_in
from bendtrace.tape.watchers import current_watcher
from bendtrace.watch.transforms import REGISTERS, as_one_op

# Constructors of tensors that bypass the function mode: legacy ones, parameters, numpy's memory.
#
# `Variable(x)`, `torch.Tensor([1])`, `torch.LongTensor([1])`, `nn.Parameter(x)` and
# `torch.from_numpy(array)` bypass the mode. Each is recorded as an op of the class, or function,
# itself.

# What an attribute is exchanged for that is not there while a run is recorded.
GONE: Any = object()

_variable: Any = internal("torch.autograd.Variable", Never)
_base_new: Any = torch.Tensor.__new__


def entries_of_constructors() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if _variable is not Never:
        yield type(_variable), "__call__", _constructor_of(_variable, type.__call__)
    yield torch.Tensor, "__new__", _New()
    yield nn.Parameter, "__new__", staticmethod(_constructor_of(nn.Parameter, nn.Parameter.__new__))
    yield torch, "from_numpy", _takes_array
    # The classes of old are C's, and cannot be changed. They are taken out of their modules, which
    # are asked for what they do not have by way of `__getattr__`.
    for owner in (torch, torch.cuda):
        classes = {
            name: value
            for name, value in vars(owner).items()
            if type(value) is LEGACY and name.endswith("Tensor")
        }
        for name in classes:
            yield owner, name, GONE
        yield owner, "__getattr__", _attribute_of(owner, classes)


# Of the classes of old, such as `torch.FloatTensor`.
LEGACY: Any = type(internal("torch.FloatTensor", None))


def _constructor_of(made: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes objects of a class, and of the classes that inherit it: these as usual."""

    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher() if cls is made else None
        if watcher is None:
            return make(cls, *args, **kwargs)
        return watcher.opaque_call(cls, args, kwargs, sys._getframe(1))

    return call


class _New:
    """Stands in for `torch.Tensor.__new__` where the class is called.

    Taken as an attribute, it is itself: torch._dynamo does so when it is imported, which
    may be during a run.
    """

    def __get__(self, tensor: Any, owner: Any) -> Any:
        if current_watcher() is None or _is_at_instruction(sys._getframe(1), _ATTRIBUTES):
            return _base_new
        return _makes_tensor


_makes_tensor = _constructor_of(torch.Tensor, _base_new)
_from_numpy = torch.from_numpy
_takes_array = as_one_op(_from_numpy)


def _attribute_of(owner: ModuleType, classes: dict[str, Any]) -> Callable[[str], Any]:
    """Return what gives a module's classes of old: where they are called, as one op."""
    before = vars(owner).get("__getattr__")

    def attribute(name: str) -> Any:
        cls, watcher = classes.get(name), current_watcher()
        if cls is not None and watcher is not None:
            frame = sys._getframe(1)
            if _is_called(frame):
                return ClassCall(cls)
            watcher.contents.follow_classes(frame)
        if cls is not None:
            return cls
        if before is not None:
            return before(name)
        raise AttributeError(f"module {owner.__name__!r} has no attribute {name!r}")

    return attribute


class ClassCall:
    """A class of old, in the instruction that calls it."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class, as one op."""
        watcher = current_watcher()
        if watcher is None:
            return self._cls(*args, **kwargs)
        return watcher.opaque_call(self._cls, args, kwargs, sys._getframe(1))


_METHOD, _ATTRIBUTE = dis.opmap.get("LOAD_METHOD"), dis.opmap["LOAD_ATTR"]
_ATTRIBUTES = (_METHOD, _ATTRIBUTE)


def _is_at_instruction(frame: FrameType, instructions: tuple[int | None, ...]) -> bool:
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in instructions


def _is_called(frame: FrameType) -> bool:
    """Return whether code takes an attribute for nothing but calling it."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if at < 0 or code[at] not in _ATTRIBUTES:
        return False
    # For methods there is an instruction until Python 3.11, and then a bit in that of attributes.
    if code[at] == _METHOD or (sys.version_info >= (3, 12) and code[at + 1] & 1):
        return True
    # Of a name that the module imports, attributes are taken as of any value. What is going to be
    # called has a null after it since Python 3.13, and until then one before it.
    after, before = _next(code, at + 2, 2), _next(code, at - 2, -2)
    if sys.version_info >= (3, 13):
        return _opcode_name(code, after) == "PUSH_NULL"
    following = _opcode_name(code, after)
    if _opcode_name(code, before) != "LOAD_GLOBAL" or not code[before + 1] & 1:
        return False
    if following.startswith("BUILD_"):
        return not code[after + 1]
    return following in _FIRST or (
        following.startswith("LOAD_") and following not in ("LOAD_ATTR", "LOAD_METHOD")
    )


# What the arguments of a call, or the call of something without any, can begin with.
_FIRST = ("CALL", "KW_NAMES", "PRECALL", "PUSH_NULL")


def _next(code: bytes, at: int, step: int) -> int:
    while 0 <= at < len(code) and code[at] == _CACHE:
        at += step
    return at


def _opcode_name(code: bytes, at: int) -> str:
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


_CACHE = dis.opmap.get("CACHE")


# The classes of operators, of their overloads, of either, and of scripts.
OpOverloadPacket: Any = type(torch.ops.aten.add)
OpOverload: Any = type(torch.ops.aten.add.Tensor)
OPERATORS: Any = (internal("torch._ops.OperatorBase", OpOverload), OpOverloadPacket)
ScriptFunction: Any = internal("torch.jit.ScriptFunction", Never)
ScriptModule: Any = internal("torch.jit.ScriptModule", Never)
ScriptMethod: Any = internal("torch._C.ScriptMethod", Never)


# Which torch functions need more than being recorded, and why.


def _getters(*names: str) -> dict[Any, str]:
    found = {}
    for name in names:
        attribute = getattr(Tensor, name, None)
        if attribute is not None:
            found[getattr(attribute, "__get__", attribute)] = name
    return found


def _methods(*names: str) -> dict[Any, str]:
    return {getattr(Tensor, name): name for name in names if hasattr(Tensor, name)}


# Sizes: what they return becomes traced scalars, and nothing is guarded until they are used.
SHAPES: dict[Any, str] = {
    **_getters("shape"),
    **_methods("size", "stride", "numel", "nelement", "storage_offset"),
    torch.numel: "numel",
}

# Facts about a tensor that are not its values. Their answers are plain and guarded immediately.
METADATA: dict[Any, str] = {
    **_getters(
        "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_cpu",
        "is_mps", "is_xpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested",
        "is_mkldnn", "itemsize", "names", "retains_grad", "output_nr", "nbytes", "is_vulkan",
        "is_xla", "is_ipu", "is_mtia", "is_maia", "_version",
    ),
    **_methods(
        "dim", "ndimension", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
        "is_inference", "is_conj", "is_neg", "element_size", "get_device", "is_pinned",
        "is_shared", "has_names", "is_same_size", "is_set_to", "dense_dim", "sparse_dim",
        "is_coalesced",
    ),
    torch.is_floating_point: "is_floating_point",
    torch.is_complex: "is_complex",
    torch.is_signed: "is_signed",
    torch.is_conj: "is_conj",
    torch.is_inference: "is_inference",
    torch.is_same_size: "is_same_size",
    torch.result_type: "result_type",
}  # fmt: skip

# Of these, what follows from the same facts about the tensors that an op got.
INHERITED = frozenset(
    {
        "dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta",
        "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "itemsize",
        "is_floating_point", "is_complex", "is_signed", "element_size", "get_device",
        "result_type", "is_vulkan", "is_xla", "is_ipu", "is_mtia", "is_maia",
    }
)  # fmt: skip
# Of these, what an op can change about a tensor it was given.
FLEETING = frozenset({"requires_grad", "is_leaf", "_version", "retains_grad", "output_nr"})
RANKS = frozenset({"ndim", "dim", "ndimension"})

# Python asks for a value and insists on a plain one: how it uses it.
VALUES: dict[Any, Use] = {
    Tensor.__bool__: Use.BOOL,
    Tensor.__len__: Use.LEN,
    Tensor.__int__: Use.INT,
    Tensor.__index__: Use.INDEX,
    Tensor.__float__: Use.FLOAT,
    Tensor.__complex__: Use.COMPLEX,
    Tensor.__contains__: Use.IN,
    Tensor.__repr__: Use.FORMAT,
    Tensor.__format__: Use.FORMAT,
}
if "__str__" in vars(Tensor):
    VALUES[Tensor.__str__] = Use.FORMAT

# The content goes where neither the mode nor a guard can follow it.
ESCAPES: dict[Any, str] = {
    **_methods(
        "numpy", "__array__", "storage", "untyped_storage", "__dlpack__", "share_memory_",
        "__reduce_ex__", "_typed_storage",
    ),
    **_getters("__cuda_array_interface__", "grad_fn"),
}  # fmt: skip
GRAD_FN: Any = next(function for function, name in ESCAPES.items() if name == "grad_fn")

# Gives a number that tells tensors apart. Code that does more with it may read or write what is
# there: such a run is live (see `Finish`).
ADDRESS = Tensor.data_ptr

# What they give may be in the memory of what they are given, which torch knows nothing of.
SHARING: frozenset[Any] = frozenset(
    {torch.from_numpy, torch.as_tensor, torch.asarray, torch.frombuffer}
)

# What makes a tensor of an array, with what is recorded for it.
MAKES_FROM_ARRAYS: dict[Any, Any] = {
    **{function: function for function in (torch.from_numpy, torch.as_tensor, torch.asarray)},
    _takes_array: _from_numpy,
    torch.tensor: torch.tensor,
}

# Assignments to these attributes of a tensor.
SETTERS = frozenset(
    getattr(attribute, "__set__")  # noqa: B009 - a slot of the descriptor, not a known attribute
    for attribute in map(
        lambda name: getattr(Tensor, name, None), ("data", "requires_grad", "grad")
    )
)

# Carried out but not recorded: each op knows the context that it ran under.
CONTEXT = frozenset(
    {
        internal("torch._C._set_grad_enabled", None, "grad modes", ""),
        Tensor.__dir__, torch.device,
        # What torch.profiler.record_function comes down to: names for stretches of time.
        *(
            entry
            for name in ("_record_function_enter_new", "_record_function_exit")
            for packet in (getattr(torch.ops.profiler, name, None),)
            if packet is not None
            for entry in (packet, *(getattr(packet, kind) for kind in packet.overloads()))
        ),
    }
)  # fmt: skip

# Ops after which the number of dimensions can depend on sizes.
RANK_DEPENDS_ON_SIZES = frozenset(
    {
        "squeeze", "squeeze_", "squeeze_copy", "apply", "solve", "solve_ex", "lstsq",
        "linalg_lstsq", "cov", "corrcoef", "histogramdd", "_chunk_cat",
    }
)  # fmt: skip

# And those of which it also depends on numbers that they are given.
RANK_DEPENDS_ON_NUMBERS = frozenset({"flatten", "tensordot"})

# Ops that change the shape, or the memory, of the tensor that they are called on.
RESHAPES_IN_PLACE = frozenset(
    {
        "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "set_",
        "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_", "data",
        "sparse_resize_",
    }
)  # fmt: skip

# The operators that give back what they were given, changed.
IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift", "matmul", "div",
    )
)  # fmt: skip

# Names of functions that give memory as they find it: no two runs agree on its content.
UNINITIALIZED = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
        "new_empty_strided",
    }
)  # fmt: skip


# Compositions of torch's that one wants to look and cut inside of.
DESCEND: frozenset[Callable[..., Any]] = frozenset({functional.multi_head_attention_forward})

_BASE: Any = internal("torch._C.TensorBase", Tensor.__base__)

# What is there or None, by what has become of the tensor that is asked.
OPTIONAL: frozenset[Any] = frozenset(
    getattr(vars(_BASE)[name], "__get__")  # noqa: B009
    for name in ("grad", "_grad", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")
    if name in vars(_BASE)
)

# These work on a tensor's place in the graph of autograd: an alias in its place has another one.
OF_AUTOGRAD: frozenset[Any] = frozenset(
    {
        *OPTIONAL, *SETTERS, torch.autograd.grad, torch.autograd.backward,
        *_methods(
            "backward", "detach_", "register_hook", "register_post_accumulate_grad_hook",
            "requires_grad_", "retain_grad",
        ),
    }
)  # fmt: skip

# What gives back the tensor that it is given where nothing has to be done.
GIVES_BACK: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner in (Tensor, torch, functional)
    for name in (
        "contiguous", "to", "type", "type_as", "cpu", "cuda", "xpu", "float", "double", "half",
        "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble", "chalf",
        "as_tensor", "asarray", "atleast_1d", "atleast_2d", "atleast_3d", "flatten", "conj",
        "conj_physical", "resolve_conj", "resolve_neg", "positive", "sum_to_size",
        "cartesian_prod", "pin_memory", "to_dense", "coalesce", "dropout",
        "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout",
    )
    if callable(getattr(owner, name, None))
)  # fmt: skip

# What calls a function of Python for each number.
CALLS_PYTHON: frozenset[Any] = frozenset(_methods("apply_", "map_", "map2_"))

# All that is not simply recorded as a call.
SPECIAL: frozenset[Any] = frozenset(
    {
        *CONTEXT, *METADATA, *VALUES, *DESCEND, *ESCAPES, *SHARING, *REGISTERS, *CALLS_PYTHON,
        Tensor.tolist,
    }
)  # fmt: skip

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_entered: dict[Callable[..., Any], Callable[..., Any]] = {}


def inner_twin(function: Any) -> Callable[..., Any]:
    """Return a twin of one of torch's Python functions whose inner calls reach the mode.

    The original first passes itself to the mode. The twin runs the same code with that check
    answered by no.
    """
    twin = _entered.get(function)
    if twin is None:
        namespace = dict(function.__globals__)
        namespace.update(dict.fromkeys(_QUESTIONS, lambda *_: False))
        twin = types.FunctionType(
            function.__code__, namespace, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        twin.__kwdefaults__ = function.__kwdefaults__
        _entered[function] = twin
    return twin


def is_torchs_function(function: object) -> bool:
    """Return whether a function is torch's own: then input metadata determines output metadata."""
    module = getattr(function, "__module__", None)
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    if isinstance(owner, type) and not owner.__module__.startswith("torch"):
        return False
    if getattr(function, "__name__", "") in ("apply", *_TRANSFORMS):
        return False
    if isinstance(module, str):
        return module.split(".")[0] in ("torch", "builtins", "_VariableFunctions")
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return False  # made in a namespace without a name
    return owner is not None or module is None or isinstance(function, type(Tensor.add))


def tells_sizes_from_tuples(function: Any) -> bool:
    """Return whether a function may go by whether an argument is a `torch.Size` or a tuple.

    `torch.FloatTensor(x.size())` and `x.new(x.size())` make tensors of that size, but others of
    the numbers in a tuple. Other functions of torch take both for the same.
    """
    by_size = type(function) is LEGACY or function is torch.Tensor or function is Tensor.new
    return by_size or not is_torchs_function(function)


def works_on_arrays(function: Any) -> bool:
    """Return whether a function is given, or gives, tensors that stand for arrays of numpy's."""
    return getattr(function, "works_on_arrays", False) is True


def works_on_containers(function: Any) -> bool:
    """Return whether a function is an operation on a container that not every call follows."""
    return getattr(function, "works_on_containers", False) is True


def may_vary(function: Any) -> bool:
    """Return whether a function may return values of several types: None, or a tensor.

    torch's functions do not, nor do operators and scripts, which have schemas.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return not owner.__module__.startswith("torch.") and _has_branches(owner.forward, set())
    if getattr(function, "gives_nothing", False):
        return False
    if works_on_arrays(function):
        inner = getattr(function, "function", None)
        is_choosing = any(inner is one for one in CHOOSING)
        return is_choosing or not function.__module__.startswith(_STEADY_PACKAGES)
    if getattr(function, "is_gate", False):
        return getattr(function, "role", "") == "instead"  # others give what they are given
    if isinstance(function, _DECLARED):
        return is_loose(function)
    return not is_torchs_function(function) and name_of(function) not in _TRANSFORMS


# Of these, the class of a result of a function of arrays follows from what the function is given.
_STEADY_PACKAGES = ("numpy", "torch", "_operator", "operator", "builtins", "bendtrace")
# But for these, which may return a number of Python that they are given, or one of numpy's.
CHOOSING = (max, min, sum, sorted)


def _has_branches(function: Any, seen: set[Any]) -> bool:
    """Return whether a function branches, or another one that it calls by a global name."""
    if not isinstance(function, types.FunctionType):
        return True
    seen.add(function)
    names = {name for how, name in global_uses(function.__code__) if how == "LOAD_GLOBAL"}
    named = map(function.__globals__.get, names)
    return branches(function.__code__) or any(
        _has_branches(other, seen)
        for other in named
        if isinstance(other, types.FunctionType)
        and other not in seen
        and not other.__module__.startswith("torch.")
    )


def is_foreign(function: Any) -> bool:
    """Return whether a function is a script, or an operator that somebody else has registered.

    Its result may depend on more than its inputs' metadata: values may decide on the dtype.
    """
    if isinstance(function, OpOverload):
        return function.namespace not in _OWN
    if isinstance(function, OpOverloadPacket):
        return function._qualified_op_name.partition("::")[0] not in _OWN
    return isinstance(function, _SCRIPTS)


@functools.lru_cache(maxsize=1024)
def is_loose(function: Any) -> bool:
    """Return whether a result of a script or operator depends on more than its schema tells.

    That is so for what may be None, and for texts.
    """
    if isinstance(function, ScriptModule):
        function = getattr(function, "forward", None)
    if isinstance(function, OpOverloadPacket):
        schemas = [getattr(function, name)._schema for name in function.overloads()]
    else:
        found = getattr(function, "schema", None) or getattr(function, "_schema", None)
        schemas = [found] if isinstance(found, torch._C.FunctionSchema) else []
    return any(
        not _is_fixed_by_schema(returned.type) for schema in schemas for returned in schema.returns
    )


def _is_fixed_by_schema(type_: Any) -> bool:
    kind = type_.kind()
    if kind == "TupleType":
        return all(map(_is_fixed_by_schema, type_.elements()))
    return kind in _FIXED_BY_SCHEMA or (
        kind == "ListType" and type_.getElementType().kind() in _FIXED_BY_SCHEMA
    )


_FIXED_BY_SCHEMA = frozenset(
    {"TensorType", "IntType", "FloatType", "BoolType", "ComplexType", "NoneType"}
)
_SCRIPTS = (ScriptFunction, ScriptModule, ScriptMethod)
_OWN = frozenset({"aten", "prims", "prim"})  # of torch itself
_DECLARED = (
    types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType,
    OpOverload, OpOverloadPacket, *_SCRIPTS,
)  # fmt: skip


def is_inserted(op: Op) -> bool:
    """Return whether an op calls an insertion."""
    return getattr(op.target, "is_gate", False) is True


def is_gate(op: Op) -> bool:
    """Return whether an op is an addition, neither the model's own nor a replacement for one."""
    return is_inserted(op) and getattr(op.target, "stands_for", None) is None


def calls_node(op: Op) -> bool:
    """Return whether an op calls an insertion instead of a node, which may call the node."""
    return getattr(op.target, "calls_node", False) is True


def is_named_in_place(name: str) -> bool:
    """Return whether a function with such a name returns its argument, changed."""
    if keyword.iskeyword(name[:-1]):  # `operator.and_` is no `and` in place
        return False
    return name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


_TRANSFORMS = (
    "vmap_impl", "grad_impl", "grad_and_value_impl", "_jvp_with_argnums", "vjp", "jacrev",
    "linearize", "linear_map",
)  # fmt: skip


def name_of(function: Any) -> str:
    """Return the name of a torch function: for a property's getter, the property's."""
    if isinstance(function, types.MethodWrapperType):
        owner = getattr(function, "__self__", None)
        name = getattr(owner, "__name__", None)
        if isinstance(name, str) and function.__name__ in ("__get__", "__set__", "__delete__"):
            return name
    name = getattr(function, "__name__", None) or type(function).__name__
    if name == "apply" and isinstance(getattr(function, "__self__", None), type):
        return str(function.__self__.__name__)
    return str(name)


def table_name(function: Any) -> str:
    """Return the name of a function in torch's tables: for an overload, the operator's name.

    The operator of another library can be called like one of torch's, and has its library there.
    """
    if isinstance(function, OpOverload):
        return str(function._schema.name).removeprefix("aten::")
    if isinstance(function, OpOverloadPacket):
        return str(function._qualified_op_name).removeprefix("aten::")
    return name_of(function)


def reads_metadata(function: Any) -> bool:
    """Return whether a function only looks at a tensor's metadata."""
    return function in SHAPES or function in METADATA or function is Tensor.__len__


def may_lack_dimension(op: Op) -> bool:
    """Return whether an op looks at a dimension of a tensor, which the tensor may not have."""
    return op.target is Tensor.__len__ or (
        op.target in _BY_DIMENSION and bool(op.args[1:] or op.kwargs)
    )


def is_sized_by_values(op: Op, ops: list[Op]) -> bool:
    """Return whether the size of the result depends on the values of tensors."""
    name = name_of(op.target)
    if name == "where":
        return len(op.args) + len(op.kwargs) == 1
    if name == "__getitem__":
        keys = [ops[ref.index].meta for ref in refs_in(op.args[1:])]
        return any(getattr(key, "dtype", None) in (torch.bool, torch.uint8) for key in keys)
    return name in _SIZED_BY_VALUES


_SIZED_BY_VALUES = frozenset(
    {
        "argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "tensor_split",
        "unique", "unique_consecutive", "vander",
    }
)  # fmt: skip
_BY_DIMENSION: frozenset[Any] = frozenset({Tensor.size, Tensor.stride})


@functools.cache
def overloads(name: str) -> tuple[Any, ...]:
    """Return the operators of torch that a function of that name comes down to."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return ()
    found = [getattr(packet, each) for each in packet.overloads()]
    exists = torch._C._dispatch_has_kernel  # those for lists and numbers are not torch's own
    return tuple(one for one in found if "out" not in one._overloadname and exists(one.name()))


def display_name(function: Any) -> str:
    """Return the name of a function in messages: its name, or the description of an insertion."""
    return getattr(function, "described", None) or name_of(function)


# What a function of torch's may do besides giving a value, as far as its schema tells.


_NAMESPACES = frozenset({"torch", "torch._C._nn", "torch._C._VariableFunctions"})

# Operators whose descriptors have other names than the function that they come down to.
_OPERATORS = frozenset({_BASE.__getitem__})

# Those that write to an argument without their schemas saying so, or choose what to do by many
# settings of torch's.
_EXCEPTED = ("batch_norm", "instance_norm", "rrelu", "attention")


def is_pure(function: Any) -> bool:
    """Return whether a function neither writes to its arguments nor calls Python.

    This is decided by the schemas of the operator with that name: none of its overloads, except
    those with an `out`, may declare a write. It says nothing about random functions.
    """
    kind = type(function)
    if kind is types.MethodDescriptorType or kind is types.WrapperDescriptorType:
        if function.__objclass__ is not _BASE:
            return False
    elif kind is types.BuiltinFunctionType:
        owner = getattr(function, "__self__", None)
        if getattr(function, "__module__", None) not in _NAMESPACES and not (
            isinstance(owner, type) and owner.__module__.startswith("torch")
        ):
            return False
    else:
        return False
    if function in _OPERATORS:
        return True
    if any(name in function.__name__ for name in _EXCEPTED):
        return False
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
    return bool(schemas) and not any(map(_schema_writes, schemas))


def _schema_writes(schema: Any) -> bool:
    arguments = [a for a in schema.arguments if not a.is_out]
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


def is_simple(function: Any) -> bool:
    """Return whether a function works element by element, or on sizes only."""
    return function.__name__ in _SIMPLE


_SIMPLE = frozenset(
    {
        "abs", "add", "clamp", "contiguous", "cos", "div", "eq", "exp", "expand", "flatten", "ge",
        "gt", "le", "log", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum",
        "mul", "ne", "neg", "permute", "pow", "reciprocal", "relu", "reshape", "rsqrt", "rsub",
        "sigmoid", "sin", "sqrt", "square", "squeeze", "sub", "t", "tanh", "transpose",
        "true_divide", "unsqueeze", "view", "view_as", "where",
    }
)  # fmt: skip
