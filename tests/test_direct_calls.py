"""Calls in place of Python functions of torch's: the same bits, gradients, errors and draws."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.engine.direct_calls import (
    ENTRIES,
    FunctionEquivalent,
    cheapest,
    plain_values,
)
from bendtrace.engine.source import TorchSetting
from bendtrace.record.recorded_call import Signature, record
from bendtrace.tape.contexts import Context
from bendtrace.tape.tape import (
    ModuleCall,
    Op,
    OpKind,
    Ref,
)
from tests.promise import bits

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def _tensors() -> list[Tensor]:
    return [
        _numbers(2, 3, 4), _numbers(4), _numbers(2, 4).double(), _numbers(3, 4).bfloat16(),
        _numbers(4, 2).t(), _numbers(0, 4), torch.tensor(1.5),
        torch.tensor([float("nan"), float("inf"), -0.0, 0.0]),
        torch.arange(4), torch.tensor([True, False, True, True]),
    ]  # fmt: skip


def _calls(*choices: dict[str, Any]) -> list[Arguments]:
    return [((tensor,), choice) for tensor in _tensors() for choice in (choices or ({},))]


def _normalized() -> list[Arguments]:
    sizes = itertools.product(([4], (4,), [3, 4], [5], torch.Size([4])), (1e-5, 0.1))
    named = [{"normalized_shape": shape, "eps": eps} for shape, eps in sizes]
    weights = [{"weight": _numbers(4), "bias": bias} for bias in (None, _numbers(4))]
    found = _calls(*named, *({"normalized_shape": [4], **weight} for weight in weights))
    return [*found, ((_numbers(2, 4), [4], _numbers(4), None, 1e-3), {})]


def _batch_normalized() -> list[Arguments]:
    state = {"running_mean": _numbers(3), "running_var": _numbers(3).abs()}
    affine = {"weight": _numbers(3), "bias": _numbers(3)}
    found: list[Arguments] = []
    for shape in ((2, 3), (2, 3, 4), (1, 3, 2, 2), (2, 4), (3,)):
        for options in ({}, affine, {"eps": -1.0}, {"momentum": 0.5}, {"training": True}):
            given = {name: tensor.clone() for name, tensor in state.items()}
            found.append(((_numbers(*shape),), {**given, **options}))
    return [*found, ((_numbers(2, 3), None, None), {})]


def _embedded() -> list[Arguments]:
    tables = _numbers(5, 3), _numbers(5, 3).double(), _numbers(5)
    indices = torch.tensor([[0, 1], [4, 2]]), torch.tensor(3), torch.tensor([5]), torch.ones(2)
    options: tuple[dict[str, Any], ...] = (
        {}, {"padding_idx": 0}, {"padding_idx": 2}, {"padding_idx": -1}, {"padding_idx": 9},
        {"scale_grad_by_freq": True}, {"max_norm": 1.0},
    )  # fmt: skip
    return [
        ((index, table.clone()), option)
        for index in indices for table in tables for option in options
    ]  # fmt: skip


def _inplace(*choices: dict[str, Any]) -> list[Arguments]:
    both: list[dict[str, Any]] = [
        {**choice, "inplace": inplace} for choice in (choices or ({},)) for inplace in (False, True)
    ]
    return _calls(*both)


CASES: dict[str, Callable[[], list[Arguments]]] = {
    "layer_norm": _normalized,
    "rms_norm": lambda: [
        (args, {name: value for name, value in kwargs.items() if name != "bias"})
        for args, kwargs in _normalized()[:-1]
    ],
    "batch_norm": _batch_normalized,
    "dropout": lambda: _inplace(
        *({"p": p, "training": on} for p in (0.0, 0.3, 1, 2.0, -0.1) for on in (False, True))
    ),
    "embedding": _embedded,
    "softmax": lambda: _calls(
        {"dim": -1}, {"dim": 0}, {"dim": 5}, {"dim": 0, "dtype": torch.float64}
    ),
    "log_softmax": lambda: _calls({"dim": -1}, {"dim": 0}, {"dim": 0, "dtype": torch.float64}),
    "leaky_relu": lambda: _inplace({}, {"negative_slope": 0.5}),
    "elu": lambda: _inplace({}, {"alpha": 0.5}),
    "hardtanh": lambda: _inplace({}, {"min_val": -2.0, "max_val": 0.5}, {"min_val": 3.0}),
    "split": lambda: [
        ((tensor, size, *dim), {})
        for tensor in _tensors()
        for size in (1, 3, 0, -1, [1, 3], (2, 2), [1, 1], True, 1.5, torch.tensor(2))
        for dim in ((), (0,), (-1,), (4,))
    ],
    "pad": lambda: [
        ((tensor, list(pad)), options)
        for tensor in _tensors()
        for pad in ((1, 2), (0, 0), (-1, 1), (1, 1, 2, 0), (1,))
        for options in (
            {},
            {"value": 2.5},
            {"mode": "reflect"},
            {"mode": "circular"},
            {"mode": "replicate"},
            {"mode": "none such"},
        )
    ],
    "sigmoid": _calls,
    "tanh": _calls,
}


def _op(function: Any, args: Any, kwargs: Any) -> tuple[Op, list[Tensor]]:
    """Return a record of a call, and the tensors that it was given."""
    tensors: list[Tensor] = []

    def encoded(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Ref(len(tensors) - 1)
        return value

    args = tuple(map(encoded, args))
    kwargs = {name: encoded(value) for name, value in kwargs.items()}
    scope = ModuleCall("", None, 0, None, 0)
    return Op(9, OpKind.CALL, function, args, kwargs, scope, None, Context(True, False)), tensors


def _outcome(call: Callable[..., Any], tensors: list[Tensor]) -> Any:
    """Everything that can be told of a call: bits, identity, gradients, error, draws."""
    torch.default_generator.manual_seed(3)
    leaves = [
        t.detach().clone().requires_grad_(t.is_floating_point() and bool(t.numel()))
        for t in tensors
    ]
    given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]
    try:
        result = call(given)
    except Exception as error:
        return type(error), str(error), torch.get_rng_state().tolist()
    results = result if isinstance(result, (tuple, list)) else [result]
    loss: Any = sum(r.sum() * (n + 1) for n, r in enumerate(results) if r.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return (
        type(result), bits([t.detach() for t in results]), [r.requires_grad for r in results],
        [[r is g for g in given] for r in results], [type(r.grad_fn) for r in results],
        bits([leaf.grad for leaf in leaves]), bits([g.detach() for g in given]),
        torch.get_rng_state().tolist(),
    )  # fmt: skip


def _made(value: Any, given: list[Tensor]) -> Any:
    if type(value) is Ref:
        return given[value.index]
    return value.function() if type(value) is TorchSetting else value


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda e: e.function.__qualname__)
@pytest.mark.filterwarnings("ignore")
def test_a_call_in_place_of_another_does_the_same(entry: FunctionEquivalent):
    made = CASES.get(entry.function.__name__, _inplace)()
    resolved = 0
    for args, kwargs in made:
        op, tensors = _op(entry.function, args, kwargs)
        call = entry.call(op)
        if call is None:
            continue
        resolved += 1

        def original(given: list[Tensor], op: Op = op) -> Any:
            named = {name: _made(value, given) for name, value in op.kwargs.items()}
            return op.target(*(_made(value, given) for value in op.args), **named)

        def other(given: list[Tensor], call: Any = call) -> Any:
            named = {name: _made(value, given) for name, value in call.kwargs.items()}
            return call.target(*(_made(value, given) for value in call.args), **named)

        def given_back(given: list[Tensor], call: Any = call) -> Any:
            return given[call.gives_back.index]

        wanted = _outcome(original, tensors)
        assert _outcome(other, tensors) == wanted, (args, kwargs)
        if call.gives_back is not None:
            assert _outcome(given_back, tensors) == wanted, (args, kwargs)
    assert resolved >= len(made) / 4


def test_all_functions_of_this_torch_are_as_they_were_when_this_was_written():
    names = {entry.function.__qualname__ for entry in ENTRIES.values()}
    assert names == {
        "layer_norm", "rms_norm", "batch_norm", "dropout", "embedding", "softmax", "log_softmax",
        "relu", "selu", "silu", "mish", "hardswish", "hardsigmoid", "relu6", "leaky_relu", "elu",
        "hardtanh", "sigmoid", "tanh", "Tensor.split", "split", "pad",
    }  # fmt: skip


def test_a_function_whose_code_does_something_else_is_called_itself(monkeypatch):
    def changed(input: Tensor, inplace: bool = False) -> Tensor:
        return torch.relu(input).clamp(max=6)

    monkeypatch.setattr(functional, "relu", changed)
    from bendtrace.engine import direct_calls as module

    assert changed not in module._all_equivalents()
    assert functional.silu in module._all_equivalents()


def _directly_called(model: Callable[..., Any], *inputs: Any) -> set[str]:
    """The functions of torch's that a replay calls by what they come down to."""
    tape = record(model, inputs, {}, Signature(model)).tape
    plain = plain_values(tape)
    return {op.target.__name__ for op in tape.ops if cheapest(op, plain) is not None}


class Tagged(Tensor):
    """A subclass that writes down what it is asked for."""

    seen: list[str] = []  # noqa: RUF012 - of the class, as torch hands over no object

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def _normal_and_soft(x: Tensor) -> Tensor:
    return functional.dropout(functional.layer_norm(x, [4]).softmax(-1), 0.5, False)


def test_calls_on_plain_tensors_are_made_directly_and_those_on_subclasses_are_not():
    x = torch.randn(2, 4)
    assert _directly_called(_normal_and_soft, x) == {"layer_norm", "dropout"}
    assert _directly_called(_normal_and_soft, nn.Parameter(x)) == {"layer_norm", "dropout"}
    assert _directly_called(_normal_and_soft, x.as_subclass(Tagged)) == set()


def test_slices_views_sizes_and_arithmetic_keep_tensors_plain():
    weight = torch.randn(4)

    def model(x: Tensor) -> Tensor:
        y = (1 - x[:, None, ..., :2].transpose(0, -1).reshape(x.shape[0], -1) / 2) @ torch.ones(
            2, 4
        )
        y[0] = 3
        first, _ = torch.cat([y, y]).mul_(2).split(y.size(0))
        return functional.layer_norm(first.to(torch.float32) * weight, (4,), weight)

    assert _directly_called(model, torch.randn(3, 4)) == {"layer_norm"}


def test_what_comes_out_of_a_function_of_the_models_is_not_known():
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 2).as_subclass(Tagged)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    def model(x: Tensor) -> Tensor:
        return functional.relu(Doubles.apply(x)) + functional.relu(x)

    x = torch.randn(2)
    tape = record(model, (x,), {}, Signature(model)).tape
    plain = plain_values(tape)
    relus = [op for op in tape.ops if op.target is functional.relu]
    assert [cheapest(op, plain) is not None for op in relus] == [False, True]


def test_a_subclass_sees_a_replay_call_what_the_model_calls():
    bended = bt.BendedModule(_normal_and_soft)
    x = torch.randn(2, 4).as_subclass(Tagged)
    seen = []
    for call in (_normal_and_soft, bended, bended):
        Tagged.seen = []
        call(x)
        seen.append([name for name in Tagged.seen if name in ("layer_norm", "dropout")])
    assert seen[2] == seen[0]


def test_a_function_mode_sees_what_the_model_calls():
    class Lists(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    bended = bt.BendedModule(_normal_and_soft)
    x = torch.randn(2, 4)
    with Lists() as mode:
        bended(x)
        mode.seen.clear()
        _normal_and_soft(x)
        wanted = list(mode.seen)
        mode.seen.clear()
        bended(x)
        assert mode.seen == wanted
    assert bended.stats.live == 2


@pytest.mark.parametrize("inference", [False, True])
def test_a_dispatch_mode_sees_a_replay_call_what_the_model_calls(inference: bool):
    class Lists(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    bended = bt.BendedModule(_normal_and_soft)
    with torch.inference_mode(inference):
        x = torch.randn(2, 4)
        for _ in range(2):
            bended(x)
        with Lists() as wanted:
            _normal_and_soft(x)
        with Lists() as mode:
            bended(x)
    assert mode.seen == wanted.seen
    assert bended.stats.replays == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_dropout_that_gives_back_what_it_was_given_does_not_do_so_for_nested_tensors():
    def model(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, False)

    bended = bt.BendedModule(model)
    x = torch.ones(2, 3)
    for _ in range(2):
        assert bended(x) is x
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert nested.dim() == x.dim()
    for _ in range(3):
        assert (bended(nested) is nested) == (model(nested) is nested)


def test_the_models_own_handlers_meet_what_the_function_itself_raises():
    def model(x: Tensor) -> Tensor:
        try:
            return functional.layer_norm(x, [4])
        except RuntimeError as error:
            return x * len(str(error))

    bended = bt.BendedModule(model)
    for size in (4, 5, 4, 5, 6):
        x = torch.randn(2, size)
        assert bits(bended(x)) == bits(model(x))


def test_errors_of_a_replay_are_those_of_the_model():
    table = torch.randn(4, 3)

    def model(index: Tensor) -> Tensor:
        return functional.embedding(index, table)

    bended = bt.BendedModule(model)
    for _ in range(2):
        bended(torch.tensor([1, 2]))
    with pytest.raises(IndexError) as wanted:
        model(torch.tensor([9]))
    with pytest.raises(IndexError) as given:
        bended(torch.tensor([9]))
    assert str(given.value) == str(wanted.value)


def test_a_setting_that_the_function_asks_for_is_asked_for_in_each_replay():
    entry = ENTRIES[functional.layer_norm]
    op, _ = _op(functional.layer_norm, (torch.ones(2, 4), [4]), {})
    call = entry.call(op)
    assert call is not None
    asked = next(value for value in call.args if type(value) is TorchSetting)
    before = torch.backends.cudnn.enabled
    try:
        for enabled in (False, True):
            torch.backends.cudnn.enabled = enabled
            assert asked.function() is torch.backends.cudnn.enabled is enabled
    finally:
        torch.backends.cudnn.enabled = before


def test_each_entry_is_a_function_written_in_python():
    for function, entry in ENTRIES.items():
        assert isinstance(function, types.FunctionType)
        assert entry.names >= set(function.__code__.co_names)
        assert not inspect.signature(function).parameters.keys() & {"args", "kwargs"}
