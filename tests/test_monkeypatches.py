"""What stands in for functions of torch is noticed, and recorded as what it is."""

from __future__ import annotations

import functools
import math
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import bendtrace as bt
from bendtrace.watch import monkeypatches as module
from bendtrace.watch.monkeypatches import monkeypatches
from tests.promise import bits

functional = nn.functional
X = torch.linspace(-1, 2, 12).view(3, 4)


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the original, under whose name torch then looks it up."""
    return lambda *args, **kwargs: original(*args, **kwargs) * 2


def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """As `functools.wraps` makes one, with name and module of the original."""
    return functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs).neg())


class Called:
    """An object in the place of a function."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs).exp()


PLACES: dict[str, tuple[Any, str, Callable[[Tensor], Any]]] = {
    "in Python": (functional, "layer_norm", lambda x: functional.layer_norm(x, (4,))),
    "in Python, by a module": (functional, "layer_norm", nn.LayerNorm(4)),
    "in Python, with a branch": (functional, "dropout", lambda x: functional.dropout(x, 0.5)),
    "in C, of torch.nn": (functional, "linear", nn.Linear(4, 4)),
    "in C, of torch._C._nn": (torch._C._nn, "gelu", lambda x: torch._C._nn.gelu(x)),
    "a torch function, but": (torch, "sin", lambda x: torch.sin(x)),
    "one in Python, of torch": (torch.functional, "norm", lambda x: torch.functional.norm(x)),
    "one in linalg": (torch.linalg, "norm", lambda x: torch.linalg.norm(x)),
    "a method in Python": (Tensor, "norm", lambda x: x.norm()),
    "an operator in Python": (Tensor, "__rsub__", lambda x: 1 - x),
    "a method": (Tensor, "view", lambda x: x.view(-1)),
    "an operator": (Tensor, "__add__", lambda x: x + 1),
    "an operator in place": (Tensor, "__iadd__", lambda x: operator.iadd(x.clone(), 1)),
    "a reduction": (Tensor, "sum", lambda x: x.sum(0)),
    "an index": (Tensor, "__getitem__", lambda x: x[1:]),
}


def exchange(patch: pytest.MonkeyPatch, place: str, how: Callable[..., Any]) -> Callable[..., Any]:
    """Put something in the place of a function; return a model that calls it."""
    owner, name, model = PLACES[place]
    made = how(getattr(owner, name))
    if owner is Tensor and isinstance(made, Called):  # an object is no method
        made = lambda *args, called=made: called(*args)  # noqa: E731
    patch.setattr(owner, name, made, raising=False)
    return model


@pytest.mark.parametrize("how", [doubled, wrapped, Called])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_under_a_stand_in_gives_what_eager_gives(
    place: str, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exchange(monkeypatch, place, how)
    bended = bt.BendedModule(model)
    for number in range(3):
        torch.manual_seed(number)
        wanted = model(X + number)
        torch.manual_seed(number)
        assert bits(bended(X + number)) == bits(wanted)
    assert bended.stats == bt.Stats(traces=1, replays=2)


@pytest.mark.parametrize("place", PLACES)
def test_exchanging_is_noticed_and_going_back_as_well(place: str) -> None:
    model = PLACES[place][2]
    bended = bt.BendedModule(model)

    def same() -> None:
        torch.manual_seed(0)
        wanted = model(X)
        torch.manual_seed(0)
        assert bits(bended(X)) == bits(wanted)

    same(), same()
    with pytest.MonkeyPatch.context() as patch:
        exchange(patch, place, doubled)
        same(), same()
        assert bended.stats == bt.Stats(traces=2, replays=2, retraces=1)
        assert "is a different function than when traced" in str(bended.last_mismatch)
    same()
    assert bended.stats == bt.Stats(traces=2, replays=3, retraces=1)
    assert monkeypatches() == ()


def test_writing_by_an_index_under_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tensor.__setitem__
    monkeypatch.setattr(Tensor, "__setitem__", lambda x, at, value: original(x, at, value + 1))

    def model(x: Tensor) -> Tensor:
        y = x.clone()
        y[0] = x[1]
        return y

    wanted, bended = model(X), bt.BendedModule(model)
    assert torch.equal(wanted[0], X[1] + 1)
    for _ in range(2):
        assert torch.equal(bended(X), wanted)


def test_a_property_in_the_place_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tensor.T
    monkeypatch.setattr(Tensor, "T", property(lambda x: original.__get__(x) * 2), raising=False)
    bended = bt.BendedModule(lambda x: x.T + 1)
    for _ in range(2):
        assert torch.equal(bended(X), X.mT * 2 + 1)


def test_a_function_of_torchs_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "relu", functional.silu)
    bended = bt.BendedModule(nn.ReLU())
    for _ in range(2):
        assert torch.equal(bended(X), functional.silu(X))


def test_one_in_the_place_of_two_is_told_by_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    relu, silu = functional.relu, functional.silu
    both = lambda x, inplace=False: relu(x) - silu(x)  # noqa: E731
    monkeypatch.setattr(functional, "relu", both)
    monkeypatch.setattr(functional, "silu", both)
    bended = bt.BendedModule(lambda x: functional.relu(x) * functional.silu(x))
    for _ in range(2):
        assert torch.equal(bended(X), both(X) * both(X))


def test_one_that_cannot_be_told_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sin = Tensor.sin
    both = lambda x: sin(x) + 1  # noqa: E731
    monkeypatch.setattr(Tensor, "sin", both, raising=False)
    monkeypatch.setattr(Tensor, "cos", both, raising=False)
    with pytest.raises(bt.errors.InputError, match=r"replaces torch.Tensor.cos, torch.Tensor.sin"):
        bt.trace(lambda x: x.sin(), X)


def test_a_kind_of_method_that_cannot_be_told_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    method = functools.partialmethod(Called(Tensor.sin))
    monkeypatch.setattr(Tensor, "sin", method, raising=False)
    with pytest.raises(bt.errors.InputError, match="replace it with a plain function"):
        bt.trace(lambda x: x.sin(), X)


EARLY = """
import torch
from torch.nn import functional
norm, view = functional.layer_norm, torch.Tensor.view
functional.layer_norm = lambda *args, **kwargs: norm(*args, **kwargs) * 2
torch.Tensor.view = lambda self, *sizes: view(self, *sizes) * 3
turned = torch.Tensor.T
torch.Tensor.T = property(lambda self: turned.__get__(self) * 2)
import bendtrace as bt
for model in (torch.nn.LayerNorm(4), lambda x: x.view(-1), lambda x: x.T):
    bended, x = bt.BendedModule(model), torch.randn(3, 4)
    for _ in range(4):
        assert torch.equal(bended(x), model(x))
    # What torch's own code comes by is known only once it has run.
    assert (bended.stats.traces, bended.stats.live <= 1) == (1, True), bended.stats
    assert bended.stats.replays >= 2, bended.stats
print("the same")
"""


@pytest.mark.all
def test_what_was_exchanged_before_the_import_is_recorded_as_what_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert done.stdout == "the same\n", done.stderr


@pytest.mark.more
def test_a_stand_in_that_is_put_there_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    original = functional.layer_norm

    def model(x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "layer_norm", doubled(original))
            return functional.layer_norm(x, (4,))

    wanted, bended = model(X), bt.BendedModule(model)
    for _ in range(3):
        assert torch.equal(bended(X), wanted)


def test_a_stand_in_within_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "layer_norm", doubled(functional.layer_norm))
    norm = nn.LayerNorm(4)
    bended = bt.BendedModule(lambda x: bt.opaque(lambda y: norm(y) * y.view(-1)[0])(x))
    for _ in range(2):
        assert torch.equal(bended(X), norm(X) * X[0, 0])


def test_the_inner_function_of_one_op_is_called_by_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    # F.layer_norm is one op; that it calls torch.layer_norm, only its own code knows.
    monkeypatch.setattr(torch, "layer_norm", doubled(torch.layer_norm))
    norm = nn.LayerNorm(4)
    wanted, bended = norm(X), bt.BendedModule(norm)
    for _ in range(3):
        assert torch.equal(bended(X), wanted)


def own(x: Tensor) -> Tensor:
    """A function that can be overridden as those of torch can."""
    if has_torch_function_unary(x):
        return handle_torch_function(own, (x,), x)  # type: ignore[no-any-return]
    return x * 2


def overridable(x: Tensor) -> Tensor:
    if torch._C._len_torch_function_stack() or has_torch_function_unary(x):
        return handle_torch_function(overridable, (x,), x)  # type: ignore[no-any-return]
    return x * 3


def test_a_function_that_asks_for_itself_is_itself() -> None:
    trace = bt.trace(lambda x: overridable(own(x)), X)
    assert "overridable" in [getattr(op.target, "__name__", "") for op in trace.ops]
    assert torch.equal(trace.output, X * 6)
    assert torch.equal(trace.replay(X + 1), (X + 1) * 6)


def test_what_runs_under_a_stand_in_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "view", doubled(Tensor.view), raising=False)
    model = lambda x: x.view(-1) + 1  # noqa: E731
    bended = bt.BendedModule(model, backend="eager")
    for _ in range(5):
        assert torch.equal(bended(X), model(X))
    assert bended.compiled.hits == 0
    assert bended.compiled.reasons == ("something stands in for torch.Tensor.view",)


def test_many_are_told_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    bended = bt.BendedModule(lambda x: x.sin())
    bended(X)
    for name in ("sin", "cos", "tan", "exp", "log"):
        monkeypatch.setattr(torch, name, doubled(getattr(torch, name)))
    before = monkeypatches()
    bended(X)
    assert str(bended.last_mismatch) == (
        "torch.cos, torch.exp, torch.log and 2 more are different functions than when traced"
    )
    assert monkeypatches() is before  # though a trace has written to torch since


def test_a_single_trace_refuses_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = bt.trace(lambda x: torch.sin(x), X)
    monkeypatch.setattr(torch, "sin", torch.cos)
    with pytest.raises(bt.errors.DivergenceError, match=r"torch\.sin is a different function"):
        trace.replay(X)
    monkeypatch.undo()
    assert torch.equal(trace.replay(X), X.sin())


def test_one_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bended = bt.BendedModule(lambda x: x * math.sqrt(4))
    bended(X)
    monkeypatch.delattr(math, "sqrt")
    with pytest.raises(AttributeError, match="sqrt"):
        bended(X)


def test_without_versions_it_is_noticed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_stamp_of", module._content_of)
    monkeypatch.setattr(
        module, "_seen", ([None] * len(module._SPACES), [()] * len(module._SPACES), ())
    )
    assert monkeypatches() == ()
    monkeypatch.setattr(torch, "sin", torch.cos)
    ((name, value, original),) = monkeypatches()
    assert (name, value) == ("torch.sin", torch.cos)
    assert original is not torch.cos


QUIET = """
import torch, bendtrace as bt
from bendtrace.watch.monkeypatches import monkeypatches
seen = []
bended = bt.BendedModule(lambda x: (seen.append(monkeypatches()), x + 1)[1])
bended(torch.ones(1))
import torch._dynamo, torch.export, torch.fx, torch.distributed, torch.ao.quantization
model = torch.nn.Linear(2, 2)
torch.compile(model, backend="eager")(torch.ones(1, 2))
torch.export.export(model, (torch.ones(1, 2),))
torch.fx.symbolic_trace(model)
torch.jit.trace(model, torch.ones(1, 2))
torch.set_default_device("cpu")
torch.manual_seed(0)
bended(torch.ones(1))
assert seen[0] == () and monkeypatches() == (), (seen, monkeypatches())
print("quiet")
"""


@pytest.mark.all
def test_what_torch_does_to_itself_is_no_exchange() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", QUIET], capture_output=True, text=True
    )
    assert done.stdout == "quiet\n", done.stderr
