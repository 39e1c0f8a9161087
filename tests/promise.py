"""The promise, as assertions: what eager gives, bit for bit, and nothing left behind."""

from __future__ import annotations

import decimal
import enum
import functools
import os
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

import bendtrace as bt
from bendtrace.errors import ConversionError, DivergenceError
from bendtrace.tape.scalars import TRACED

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def bits(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return something that is equal only for values that are the same bit by bit.

    Tensors also have to agree on dtype, shape, strides and requires_grad, containers and objects
    on their types, and things that are one object in one value on being one in the other.
    """
    seen = {} if seen is None else seen
    kind = type(value)
    assert kind not in TRACED, "a traced scalar got out"
    if kind in (int, bool, str, bytes, type(None)) or isinstance(value, enum.Enum):
        return kind, value
    if kind is float:
        return kind, "nan" if value != value else value.hex()
    if isinstance(value, (type, types.FunctionType, nn.Module, weakref.ref)):
        return kind.__name__
    if isinstance(value, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
        return kind.__name__, str(value)  # torch caches what it looks up of them
    if isinstance(value, np.generic):  # as unchangeable as the numbers above
        return kind.__name__, repr(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Generator):
        return kind.__name__, value.get_state().tolist()
    if isinstance(value, random.Random):
        return kind.__name__, random.Random.getstate(value), _attributes(value, seen)
    if isinstance(value, np.random.Generator):
        return kind.__name__, _numbers(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return kind.__name__, _numbers(value.get_state(legacy=False))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind.__name__, value.dtype.str, value.shape, value.strides, value.tobytes()
    if isinstance(value, deque):
        return kind, value.maxlen, [bits(item, seen) for item in value], _attributes(value, seen)
    if torch.nn.parameter.is_lazy(value):
        return kind.__name__
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return (
            kind.__name__, value.dtype, str(value.device), strides, _content(value),
            value.requires_grad, _attributes(value, seen),
        )  # fmt: skip
    if isinstance(value, (list, tuple)):
        return kind, [bits(item, seen) for item in value], _attributes(value, seen)
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict  # which keeps its order
        items = [(bits(key, seen), bits(item, seen)) for key, item in base.items(value)]
        return kind, items, _attributes(value, seen)
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(bits(item)) for item in value)
    return kind.__name__, _attributes(value, seen) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _numbers(state: Any) -> Any:
    """Return the state of a generator of numpy as something that can be compared."""
    if isinstance(state, dict):
        return [(key, _numbers(item)) for key, item in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _attributes(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, functools.partial):  # asking for its `__dict__` would make one
        own = value.__reduce__()[2][3] or {}
    else:
        own = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                own[name] = getattr(value, name)
    return [(name, bits(item, seen)) for name, item in own.items()]


def _content(tensor: torch.Tensor) -> Any:
    """The bits of a tensor, or of the tensors that it consists of."""
    layout = tensor.layout
    if tensor.is_nested:
        return [_content(part) for part in tensor.unbind()]
    shape = tuple(tensor.shape)
    if layout is torch.sparse_coo:
        return shape, _bytes(tensor._indices()), _bytes(tensor._values()), tensor.is_coalesced()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return shape, [_bytes(part) for part in parts]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        return shape, [_bytes(part) for part in parts]
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return shape  # a wrapper around other tensors holds them as attributes
    if tensor.is_quantized:
        return shape, _bytes(tensor.int_repr()), str(tensor.qscheme())
    return shape, _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> Any:
    flat = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
    )
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def state(model: Any) -> Any:
    """Return the bits of all that a model holds: parameters, buffers, attributes, gradients.

    A function holds what is in its closure.
    """
    if isinstance(model, types.FunctionType):
        return bits([vars(model), [_held(cell) for cell in model.__closure__ or ()]])
    if not isinstance(model, nn.Module):
        return bits(getattr(model, "__dict__", None))
    hidden = {name for name in vars(nn.Module()) if name != "training"}
    attributes = [
        (path, {k: v for k, v in vars(module).items() if k not in hidden})
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # all of its is in the state dict
    ]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return bits([dict(model.state_dict()), attributes, gradients])


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ...


def randn_inputs(*shape: int, seed: int = 0) -> Callable[[], Inputs]:
    """Return a maker of one random tensor, the same one each time."""
    return lambda: ((torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),), {})


def footprint() -> list[Any]:
    """Return what the tracer exchanges while it runs; the same before and after."""
    return [
        nn.Module.__call__, vars(nn.Module)["_compiled_call_impl"],
        vars(torch.autograd.Function)["apply"],
        torch.overrides.has_torch_function, torch.manual_seed, torch.random.manual_seed,
        torch.set_rng_state, torch._C._len_torch_function_stack(), range, len, isinstance,
    ]  # fmt: skip


def seed_everything(seed: int) -> None:
    """Seed the generator of each device that is in use."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack for each call
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def random_states() -> list[Any]:
    """Return the states of the global generators: of torch's devices, of Python and of numpy."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    found = [state.tolist() for state in states]
    return [*found, random.getstate(), _numbers(np.random.get_state(legacy=False))]


def settings() -> list[Any]:
    """Return what torch and Python are set to, which a call may leave as it sets it."""
    return [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(), torch.backends.mkldnn.enabled,
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        os.environ.copy(), sys.getrecursionlimit(), decimal.getcontext().prec,
    ]  # fmt: skip


def outcome(call: Callable[..., Any], inputs: Inputs, seed: int) -> tuple[Any, Any, Any, Any]:
    """Call and return (bits of the result, the error, bits of the arguments, RNG state)."""
    seed_everything(seed)
    args, kwargs = inputs
    result = error = None
    try:
        result = call(*args, **kwargs)
    except Exception as raised:
        error = raised
    return bits(result), error, bits([args, kwargs]), random_states()


def assert_promise(
    make: Callable[[], Callable[..., Any]],
    calls: Iterable[Callable[[], Inputs]],
    *,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    insert: Callable[[bt.BendedModule], object] = lambda bended: None,
    wrap: Callable[[Any], bt.BendedModule] = bt.BendedModule,
    compare_with: Callable[[Any], Callable[..., Any]] = lambda eager: eager,
) -> bt.BendedModule:
    """Call a model and its `BendedModule` in turn and compare everything after each call.

    Args:
        make: builds the model, twice the same under the same seed.
        calls: makes the inputs of each call.
        mode: a context to call in, such as `torch.no_grad`.
        insert: inserts in the `BendedModule` what is to make no difference.
        wrap: makes the `BendedModule`.
        compare_with: what calls the eager model, such as with hooks of torch's own.

    Returns:
        The `BendedModule`, with the statistics of the calls.
    """
    torch.manual_seed(0)
    eager = make()
    call_eager = compare_with(eager)
    torch.manual_seed(0)
    model = make()
    bended = wrap(model)
    insert(bended)
    for seed, inputs in enumerate(calls):
        with mode():
            wanted = outcome(call_eager, inputs(), seed)
            before = footprint()
            given = outcome(bended, inputs(), seed)
            assert footprint() == before, f"call {seed}"
        call = f"call {seed}"
        assert type(given[1]) is type(wanted[1]), f"{call}: {given[1]!r}, not {wanted[1]!r}"
        assert str(given[1]) == str(wanted[1]), call
        assert given[0] == wanted[0], f"{call}: another output"
        assert given[2] == wanted[2], f"{call}: other arguments afterwards"
        assert given[3] == wanted[3], f"{call}: another RNG state afterwards"
        assert state(model) == state(eager), f"{call}: other state afterwards"
    return bended


def assert_graph_agrees(
    trace: bt.Trace, wanted: Any, inputs: Inputs, *, fold: bool, seed: int
) -> None:
    """The mirror has a node for each op, and the fx graph gives what eager gives."""
    assert len(trace.graph) >= len(trace.ops)
    try:
        module = trace.to_fx(fold=fold)
    except ConversionError:
        return  # what cannot be said in fx is refused; test_fx.py has the messages
    module.graph.lint()
    torch.manual_seed(seed)
    try:
        given = module(*trace._signature.bind(*inputs).values())
    except DivergenceError:
        return  # the run changed state, or drew numbers, that decide its path
    assert bits(given) == wanted
