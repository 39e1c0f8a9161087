"""Code that runs inside one op: what it changes, and what it returns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import bendtrace as bt
from tests.registry.calls import BOTH, BOTH_BACK, SOME, Call, args, case, in_turn, x

# Code inside one op


class AppendsSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Any) -> Any:
        log.append(x.sum().item())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2, None


@case(*BOTH)
def a_list_that_one_op_fills(x: torch.Tensor) -> Any:
    log: list[float] = []
    y = AppendsSum.apply(x, log)
    return y * log[0], log


@bt.opaque
def flag(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.is_large = bool(x.sum() > 0)
    return x * 1


@case(*BOTH)
class AModelThatOneOpCallsItsContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_large = False

    def forward(self, x: torch.Tensor) -> Any:
        y = flag(self, x)
        return y * 5 if self.is_large else y


class Slotted:
    __slots__ = ("value",)


@bt.opaque
def fill_slot(x: torch.Tensor, held: Slotted) -> torch.Tensor:
    held.value = x.sum().item()
    return x * 1


@case(*BOTH)
def slots_that_one_op_fills(x: torch.Tensor) -> Any:
    held = Slotted()
    held.value = 0.0
    return fill_slot(x, held) * held.value


@bt.opaque
def fill_last(x: torch.Tensor, *held: list[float]) -> torch.Tensor:
    held[0][0] = x.sum().item()
    return x * 1


@case(*BOTH)
def more_lists_than_are_looked_through(x: torch.Tensor) -> Any:
    held = [[0.0] for _ in range(1200)]
    return fill_last(x, *held) * held[0][0]


@bt.opaque
def sort_it(x: torch.Tensor, held: list[int]) -> torch.Tensor:
    if x.sum() > 0:
        held.sort()
    return x * 1


@case(*BOTH)
def a_list_that_one_op_sorts_sometimes(x: torch.Tensor) -> Any:
    held = [2, 1]
    return sort_it(x, held) * held[0]


@bt.opaque
def note(x: torch.Tensor, held: Any) -> torch.Tensor:
    held["sum"] = x.sum().item()
    return x * 1


@case(*BOTH)
class ADictThatOneOpFills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"sum": 0.0}

    def forward(self, x: torch.Tensor) -> Any:
        return note(x, self.held) * self.held["sum"]


@case(*BOTH)
class AnAttributeThatOneOpSets(nn.Module):
    sum = 0.0

    @bt.opaque
    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.sum = x.sum().item()
        return x * 1

    def forward(self, x: torch.Tensor) -> Any:
        return self.note(x) + 1


@case(*BOTH_BACK)
class AFlagThatACheckpointSets(nn.Module):
    flag = False

    def block(self, h: torch.Tensor) -> torch.Tensor:
        self.flag = bool(h.sum() > 0)
        return h * 2

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return y * 5 if self.flag else y


@case(*SOME, x(1, 1), x(1, 1))
def a_dict_that_a_transform_fills(x: torch.Tensor) -> Any:
    seen = {}

    def loss(v: torch.Tensor) -> torch.Tensor:
        seen["n"] = v.shape[0]
        return (v * v).sum()

    return torch.func.grad(loss)(x) * seen["n"]


# Results of one op whose inside varies


@torch.jit.script
def script_maybe(x):
    # type: (Tensor) -> Optional[Tensor]
    if bool(x.sum() > 0):
        return None
    return x * 2


@case(*BOTH, *BOTH_BACK)
def a_script_that_returns_none(x: torch.Tensor) -> Any:
    y = script_maybe(x)
    return x * 2 if y is None else x * 3


@torch.jit.script
def script_text(x):
    # type: (Tensor) -> Dict[str, str]
    return {"k": "a" if bool(x.sum() > 0) else "b"}


@case(*BOTH)
def a_script_that_returns_a_text(x: torch.Tensor) -> Any:
    return x * ord(script_text(x)["k"])


@torch.jit.script
def script_pair(x):
    # type: (Tensor) -> Tuple[Tensor, Optional[Tensor]]
    if bool(x.sum() > 0):
        return x, None
    return x, x * 2


@case(*BOTH)
def a_script_that_returns_none_in_a_tuple(x: torch.Tensor) -> Any:
    return x * 2 if script_pair(x)[1] is None else x * 3


def nothing_or_double(x: torch.Tensor) -> Any:
    return None if x.sum() > 0 else x * 2


class Maybe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return nothing_or_double(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


@case(*BOTH_BACK)
def a_function_that_returns_none(x: torch.Tensor) -> Any:
    y = Maybe.apply(x)
    return x * 2 if y is None else x * 3


LIBRARY = torch.library.Library("audited", "FRAGMENT")
LIBRARY.define("maybe(Tensor x) -> Tensor?")
LIBRARY.impl("maybe", nothing_or_double, "CompositeImplicitAutograd")


@case(*BOTH_BACK)
def an_operator_that_returns_none(x: torch.Tensor) -> Any:
    y = torch.ops.audited.maybe(x)
    return x * 2 if y is None else x * 3


def varied(up: Callable[[Any], Any], down: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An op of its own that gives one or the other, in a dict."""
    return bt.opaque(lambda x: {"found": up(x) if x.sum() > 0 else down(x)})


some_text = varied(lambda x: "p", lambda x: "n")
some_list = varied(lambda x: [x, x], lambda x: [x])
some_tensor = varied(lambda x: x, lambda x: None)
some_number = varied(lambda x: 3, lambda x: 2.5)


@case(*BOTH)
def a_text_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * ord(some_text(x)["found"])


@case(*BOTH)
def a_list_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * len(some_list(x)["found"])


@case(*BOTH)
def none_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    return x * 2 if some_tensor(x)["found"] is None else x * 3


@case(*BOTH)
def a_number_in_a_dict_of_one_op(x: torch.Tensor) -> Any:
    found = some_number(x)["found"]
    return x * 2 if isinstance(found, int) else x * found


# Hooks and backward in forward


def gradients(model: Any, out: Any) -> Any:
    out[0].backward()
    return out


@case(*SOME, look=gradients)
class AListThatAHookFills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        grads: list[Any] = []
        h = self.weight * x
        h.register_hook(lambda grad: grads.append(grad))
        return (h**2).sum(), grads


@case(*BOTH)
def a_hook_in_a_backward_in_forward(x: torch.Tensor) -> Any:
    seen: list[float] = []
    h = x.clone().requires_grad_()
    y = h * h
    y.register_hook(lambda grad: seen.append(float(grad.sum() * x.sum())))
    y.sum().backward()
    return x * seen[0]


@case(*[x(1, 2, 3)] * 3, x(2, 4, 6))
class AHookOfAParameterInABackwardInForward(nn.Module):
    last = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.register_hook(self.keep)

    def keep(self, grad: torch.Tensor) -> None:
        self.last = float(grad.sum())

    def forward(self, x: torch.Tensor) -> Any:
        self.weight.grad = None
        (self.weight * x).sum().backward()
        return self.last


# Kernels that write to what they are given, which torch does not count


_aten = torch.ops.aten
_ON = torch.tensor([1])
UNCOUNTED: dict[str, Callable[..., torch.Tensor]] = {
    "an overload of batch norm": lambda x, m, v: _aten.native_batch_norm.default(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "batch norm as exported": lambda x, m, v: _aten._native_batch_norm_legit(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "batch norm that always updates": lambda x, m, v: _aten._batch_norm_with_update(
        x, None, None, m, v, 0.1, 1e-5
    )[0],
    "statistics of several devices": lambda x, m, v: (
        x * torch.batch_norm_update_stats(x, m, v, 0.1)[0]
    ),
    "observers of quantization": lambda x, m, v: torch.fused_moving_avg_obs_fake_quant(
        x, _ON, _ON, m[:1], v[:1], torch.ones(1), torch.zeros(1, dtype=torch.int32), 0.1, 0, 255, 0
    ),
    "noise of rrelu": lambda x, m, v: _aten.rrelu_with_noise(
        x, m.expand(4, 3).contiguous(), 0.1, 0.3, True
    ),
}


def uncounted(name: str, call: Callable[..., torch.Tensor]) -> None:
    """Add a program that goes on after one of these kernels, in two ways."""

    def program(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> Any:
        y = call(x, m, v)
        return (y, m * 2) if gate > 0 else (y, v + m)

    def call_with(sign: float) -> Call:
        drawn = torch.randn(4, 3)
        return args(lambda: (drawn.clone(), torch.zeros(3), torch.ones(3), torch.tensor(sign)))

    calls = map(call_with, (1.0, 1.0, -1.0, -1.0, 1.0))
    modes = (torch.no_grad, torch.inference_mode)
    case(*calls, around=modes, served=in_turn("resumes", 1), name=name)(program)


for _name, _call in UNCOUNTED.items():
    uncounted(_name, _call)


# Results whose rank and dtype do not follow from the inputs of an operator


_library = torch.library.Library("audited", "DEF")
for _schema, _function in {
    "dtype_by_values(Tensor x) -> Tensor": lambda x: x * 2 if float(x.sum()) > 0 else x.double(),
    "rank_by_values(Tensor x) -> Tensor": lambda x: x * 2 if float(x.sum()) > 0 else x.sum(),
    "relu(Tensor x) -> Tensor": lambda x: x + torch.rand_like(x),
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
_audited = torch.ops.audited


def rank_in_a_script(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x.sum()


def dtype_in_a_script(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x.double()


_scripted: Any = torch.jit.script
ranked, typed = _scripted(rank_in_a_script), _scripted(dtype_in_a_script)

BY_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an overload of squeeze": lambda x: _aten.squeeze.default(x[None, x > 0]).ndim,
    "another overload of squeeze": lambda x: len(_aten.squeeze.dim(x[None, x > 0], 1).shape),
    "an overload of corrcoef": lambda x: _aten.corrcoef.default(x[x > 0][:, None]).ndim,
    "the dtype of an operator": lambda x: _audited.dtype_by_values(x).dtype is torch.float64,
    "the dtype of an overload": lambda x: _audited.dtype_by_values.default(x).element_size() > 4,
    "the rank of an operator": lambda x: _audited.rank_by_values(x).ndim,
    "the dtype of a script": lambda x: (typed(x) * 2).dtype is torch.float64,
    "the rank of a script": lambda x: ranked(x).dim(),
}


def by_values(name: str, asked: Callable[[torch.Tensor], Any]) -> None:
    """Add a program that asks for what a value decides."""

    def program(x: torch.Tensor) -> Any:
        found = asked(x)
        return (x * 2, found) if found == 1 else (x * 3, found)

    values = [(3, 1, 1), (2, 1, 3), (3, -1, -1), (-3, 1, -1), (-3, -1, 1), (1, 1, 1), (4, -1, 1)]
    case(*[x(*some) for some in values], served=in_turn("live", 0), name=name)(program)


for _name, _asked in BY_VALUES.items():
    by_values(_name, _asked)


# What scripted and traced modules hold


class CountsInBuffer(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x * self.seen


class BranchesAfter(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        return (found, x * 2) if x.sum() > 0 else (found, x - 1)


_torch_jit: Any = torch.jit
HELD_BY_JIT: dict[str, Callable[[], Any]] = {
    "traced": lambda: _torch_jit.trace(CountsInBuffer(), torch.ones(3, 2), check_trace=False),
    "scripted": lambda: _torch_jit.script(nn.BatchNorm1d(2)),
    "frozen": lambda: _torch_jit.freeze(_torch_jit.script(nn.Linear(2, 2).eval())),
}


def held_by_jit(name: str, make: Callable[[], Any]) -> None:
    """Add a program that goes on after such a module, in two ways."""

    def branches_after() -> nn.Module:
        return BranchesAfter(make())

    calls = [
        args(lambda sign=sign: (torch.arange(6.0).reshape(3, 2) * sign,))
        for sign in (1.0, 1.0, -1.0, -1.0, 1.0)
    ]
    modes = (torch.no_grad, torch.inference_mode, contextlib.nullcontext)
    case(*calls, around=modes, served=in_turn("resumes", 1), name=name)(branches_after)


for _name, _make in HELD_BY_JIT.items():
    held_by_jit(_name, _make)


# Classes, and arguments, that C code has in hand


SIZES = [args(lambda size=size: (torch.ones(size, 2) * size,)) for size in (2, 2, 3, 3, 2)]


@case(*SIZES)
class Kept(nn.Module):
    """Keeps a class of tensors that C code makes, as losses of GANs do."""

    def __init__(self, kind: Any = torch.FloatTensor) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kind(x.size()).fill_(2.0)


@case(*SIZES)
def kept_in_a_variable(x: torch.Tensor) -> torch.Tensor:
    size = x.size()
    kind = torch.FloatTensor if x.dtype is torch.float32 else torch.DoubleTensor
    return x + kind(size).fill_(3.0)


# What these are unpacked from was, once, a pointer to freed memory on the stack.


def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = a * 2 if a.sum() > 0 else b * 3
    return y + 1 if b.sum() > 0 else y


UNPACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a list": lambda x: mixed(*[x + 1, x - 1]),
    "a generator": lambda x: mixed(*(x * k for k in (1, 2))),
    "what torch returns": lambda x: mixed(*torch.max(x.view(2, 2), 0)),
    "what torch returns, in C": lambda x: sum(mixed(a, b) for a, b in zip(*x.topk(3))),  # noqa: B905
}

for _name, _unpacked in UNPACKED.items():
    case(*[x(*s) for s in itertools.permutations((3, -1, 2, -5), 4)][::2], name=_name)(_unpacked)


class Scale(torch.autograd.Function):
    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


@case(*SOME, served=in_turn("live", 0))
class WhatAFunctionKeepsInItsContext(nn.Module):
    """It has the name of an attribute of the model, and is none."""

    scale = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(x, self.scale)
