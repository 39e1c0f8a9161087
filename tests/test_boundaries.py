"""What the function mode does not see, and that nothing of the tracer stays behind."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import manual_seed as seed_all
from torch.overrides import BaseTorchFunctionMode

import bendtrace as bt
from bendtrace.errors import NotReplayableError
from bendtrace.tape.watchers import current_watcher
from tests.promise import assert_promise, bits, footprint, randn_inputs


def test_nothing_is_left_behind_after_a_run_and_after_one_that_raises() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert footprint() != before
            if x.sum() > 0:
                raise KeyError("mine")
            return x

    model, before = Fails(), footprint()
    attributes = set(vars(model))
    bt.trace(model, -torch.ones(2))
    assert footprint() == before
    with pytest.raises(KeyError, match="mine"):
        bt.trace(model, torch.ones(2))
    assert footprint() == before
    assert current_watcher() is None
    assert set(vars(model)) == attributes
    assert not torch._C._len_torch_function_stack()


def test_a_keyboard_interrupt_in_the_middle_leaves_nothing_behind() -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        raise KeyboardInterrupt if y.sum() > 0 else ValueError

    before = footprint()
    with pytest.raises(KeyboardInterrupt):
        bt.trace(interrupted, torch.ones(2))
    assert footprint() == before


def test_the_fast_path_of_fused_layers_is_taken_as_in_eager() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        trace = bt.trace(layer, torch.randn(2, 5, 8))
    assert "_transformer_encoder_layer_fwd" in {
        getattr(op.target, "__name__", "") for op in trace.ops
    }

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    bended = assert_promise(
        make, [randn_inputs(2, 5, 8), randn_inputs(3, 4, 8)], mode=torch.no_grad
    )
    assert bended.stats.replays == 1


_HANDS_ON = BaseTorchFunctionMode()


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), lambda: _HANDS_ON])
def test_under_a_mode_of_the_caller_the_fused_layers_are_left_as_in_eager(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)

    calls = [randn_inputs(2, 5, 8)] * 3
    stats = assert_promise(make, calls, mode=mode).stats
    assert (stats.replays == 2) is (stats.live == 0)
    with mode():
        trace = bt.trace(make(), torch.randn(2, 5, 8))
    assert "_transformer_encoder_layer_fwd" not in {
        getattr(op.target, "__name__", "") for op in trace.ops
    }


def test_attention_is_entered_so_that_its_weights_are_nodes() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    trace = bt.trace(lambda x: attention(x, x, x)[0], x)
    assert {"softmax", "bmm"} <= {getattr(op.target, "__name__", "") for op in trace.ops}
    assert torch.equal(trace.replay(x), attention(x, x, x)[0])


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def test_an_autograd_function_is_one_op_and_keeps_its_backward() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x, 100.0).sum()

    trace = bt.trace(model, torch.ones(3, requires_grad=True))
    assert [op.target.__name__ for op in trace.ops if op.kind.value == "call"] == ["apply", "sum"]
    x = torch.ones(3, requires_grad=True)
    trace.replay(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 100.0))


def test_seeding_inside_the_model_is_repeated() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(x.shape[0])
        return x + torch.rand(3)

    bended = assert_promise(lambda: model, [randn_inputs(3)] * 3)
    assert bended.stats.replays == 2


def test_values_that_leave_by_numpy_make_the_model_run_live() -> None:
    pytest.importorskip("numpy", reason="needs the test extra")

    def model(x: torch.Tensor) -> torch.Tensor:
        return x + x.numpy().tobytes()[0]

    bended = assert_promise(lambda: model, [randn_inputs(3)] * 3)
    assert bended.stats.live == 3
    assert "numpy" in bended.why_live[0]
    assert "test_boundaries.py" in bended.why_live[0]


def test_a_tensor_of_unknown_origin_is_named_and_never_baked_in() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + next(map(floats, [[float(len(calls))]]))

    calls: list[int] = []
    floats = torch.FloatTensor
    bended = bt.BendedModule(model)
    for _ in range(3):
        calls.append(1)
        assert torch.equal(bended(torch.zeros(1)), torch.tensor([float(len(calls))]))
    assert bended.stats.live >= 1
    with pytest.raises(NotReplayableError, match="unknown origin"):
        bt.trace(model, torch.zeros(1)).replay(torch.zeros(1))


def test_python_s_random_numbers_are_drawn_again() -> None:
    import random

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    bended = bt.BendedModule(model)
    random.seed(1)
    wanted = [random.random() for _ in range(3)]
    random.seed(1)
    assert [bended(torch.ones(1, dtype=torch.float64)).item() for _ in range(3)] == wanted
    assert bended.stats.replays == 2


def test_other_threads_are_not_recorded() -> None:
    inside = threading.Event()
    done = threading.Event()
    linear = nn.Linear(2, 2)

    def other() -> None:
        inside.wait(10)
        linear(torch.ones(2))
        done.set()

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        inside.set()
        done.wait(10)
        return y * 2

    thread = threading.Thread(target=other)
    thread.start()
    trace = bt.trace(model, torch.ones(2))
    thread.join()
    assert [op.target.__name__ for op in trace.ops if op.kind.value == "call"] == ["add", "mul"]
    assert trace.module_calls == []


@pytest.mark.all
def test_importing_dynamo_during_a_run_leaves_its_own_patches_in_place() -> None:
    code = """
import torch, bendtrace as bt
def model(x):
    import torch._dynamo
    return x + 1
bt.trace(model, torch.ones(2))
torch.manual_seed(3)
a = torch.rand(1)
torch.manual_seed(3)
assert torch.equal(a, torch.rand(1))
from torch._dynamo import utils
assert utils.unpatched_nn_module_call is torch.nn.Module.__call__
assert 'bendtrace' not in repr([torch.manual_seed.__wrapped__.__module__])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bended_module_inside_another_is_seen_whole() -> None:
    inner = bt.BendedModule(nn.Linear(3, 3))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > 0 else x

    outer = Outer()
    bended = bt.BendedModule(outer)
    for value in (1.0, -1.0, 1.0, -1.0):
        x = torch.full((2, 3), value)
        assert bits(bended(x)) == bits(outer(x))
    assert bended.stats.replays == 2


@pytest.mark.parametrize(
    "results",
    [
        lambda x: [(x, "a"), (x, "a"), (x, "b")],
        lambda x: [(x, x), (x, x), [x, x]],
        lambda x: [(x, None), (x, None), (x, x)],
        lambda x: [(x, (1, "a")), (x, (1, "a")), (x, (1, "b"))],
        lambda x: [(x, {"a": x}), (x, {"a": x + 1})],
    ],
    ids=["text", "kind", "none", "nested", "dict"],
)
def test_what_an_opaque_function_gives_besides_tensors_is_guarded(
    results: Callable[[Tensor], list[Any]],
) -> None:
    calls = 0

    @bt.opaque
    def given(x: Tensor) -> Any:
        return results(x)[calls]

    bended = bt.BendedModule(lambda x: given(x.relu()))
    x = torch.randn(3)
    for wanted in results(x.relu()):
        assert bits(bended(x)) == bits(wanted)
        calls += 1


def test_an_opaque_function_of_a_namespace_without_a_name_is_guarded_like_others() -> None:
    scope: dict[str, Any] = {}
    exec("def f(x): return (x, 'up' if x.sum() > 0 else 'down')", scope)
    assert scope["f"].__module__ is None
    function = bt.opaque(scope["f"])

    def model(x: Tensor) -> Tensor:
        value, which = function(x)
        return value * (2 if which == "up" else 3)

    calls = [lambda sign=sign: ((torch.full((2,), sign),), {}) for sign in (1.0, 1.0, -1.0, 1.0)]
    assert_promise(lambda: model, calls)


# Programs at the limits of what is followed and watched


def test_a_seed_that_forward_sets_under_another_name() -> None:
    """It is the seed from before: neither the seed nor the numbers show it in the first call."""

    def model(x: torch.Tensor) -> torch.Tensor:
        seed_all(7)
        return x + torch.rand(x.shape)

    bended, value = bt.BendedModule(model), torch.ones(3)
    for number in range(4):
        drawn = []
        for call in (model, bended):
            torch.manual_seed(7)
            torch.rand(number)
            drawn.append((call(value).tolist(), torch.rand(2).tolist()))
        assert drawn[0] == drawn[1], number


def test_what_is_undetectable_is_so_under_a_computed_name() -> None:
    def seed(x: torch.Tensor) -> torch.Tensor:
        return x * (getattr(torch, "".join(["initial_", "seed"]))() % 7)

    def address(x: torch.Tensor) -> torch.Tensor:
        return x * (getattr(torch._C, "_data_" + "address")(x) % 7)

    for model in (seed, address):
        bended = bt.BendedModule(model)
        for number in range(4):
            torch.manual_seed(number)
            value = torch.ones(3 + number)
            assert torch.equal(bended(value), model(value))


def down(x: torch.Tensor, count: int) -> torch.Tensor:
    if count:
        return down(x, count - 1)
    return x * 2 if x.sum() > 0 else x * 3


@pytest.fixture
def an_alarm() -> Iterator[None]:
    """Raise where the test has not come to an end after two minutes."""
    if not hasattr(signal, "SIGALRM"):
        pytest.skip("there are no alarms on this system")

    def ring(*_: object) -> None:
        pytest.fail("it does not come to an end", pytrace=False)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("an_alarm")
@pytest.mark.filterwarnings("ignore::bendtrace.errors.TraceLimitWarning")
def test_deep_calls_with_one_trace_come_to_an_end() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = down(x, 15)
        z = down(y - 1, 3)
        w = down(z + x.mean(), 20)
        return w if w.min() > 0 else w + 1

    bended = bt.BendedModule(model, max_traces=1)
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        x = torch.randn(2, 3, generator=generator) * 10 ** (number % 4)
        x = x.double() if number % 5 == 4 else x
        assert bits(bended(x)) == bits(model(x))


class Box:
    def __init__(self, held: float) -> None:
        self.held = held


MANY = types.MappingProxyType({n: Box(float(n)) for n in range(-1, 10_000)})


def scaled_by_last(x: torch.Tensor, held: Any = MANY) -> torch.Tensor:
    return x * held[-1].held


@pytest.mark.parametrize(
    "given", [(), (functools.partial(scaled_by_last, held=MANY),)], ids=["global", "argument"]
)
def test_more_objects_than_can_be_watched_make_a_model_run_live(given: Any) -> None:
    def model(x: torch.Tensor, function: Callable[..., Any] = scaled_by_last) -> torch.Tensor:
        return function(x)

    bended, x = bt.BendedModule(model), torch.ones(2)
    for number in range(4):
        MANY[-1].held = float(number)
        assert bits(bended(x, *given)) == bits(model(x, *given))
    assert bended.stats.replays == 0
    assert "more than 10000 objects" in bended.why_live[0]


def test_generators_of_gpus_matter_once_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if len(torch.cuda.default_generators) > 0 else x * 2

    monkeypatch.setattr(torch.cuda, "default_generators", ())
    bended, x = bt.BendedModule(model), torch.ones(2)
    for _ in range(3):
        assert bits(bended(x)) == bits(model(x))
    assert (bended.stats.replays, bended.stats.live) == (2, 0), bended.why_live
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    assert bits(bended(x)) == bits(model(x))
    assert "default_generators" in bended.why_live[0]


LIBRARY = types.ModuleType("library")
vars(LIBRARY).update({f"box{n}": Box(2.0) for n in range(10_000)})


class Picks(nn.Module):
    """Looks a part of its own up by a computed name, beside a module of Python with many names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.number = nn.Linear(2, 2), nn.Linear(2, 2), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, f"fc{self.number}")(x) * LIBRARY.box1.held  # type: ignore[no-any-return]


def test_names_computed_for_self_are_no_names_of_python_modules() -> None:
    model, x = Picks(), torch.ones(2)
    bended = bt.BendedModule(model)
    for number, held in ((1, 2.0), (2, 2.0), (2, 3.0)):
        model.number, LIBRARY.box1.held = number, held
        for _ in range(2):
            assert bits(bended(x)) == bits(model(x))
    assert (bended.stats.replays, bended.stats.live) == (3, 0), bended.why_live


class Hooked(nn.Module):
    def __init__(self, fired: list[str]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Identity()
        self.register_buffer("held", torch.ones(2))
        self.a.register_full_backward_hook(lambda *_: fired.append("a"))
        self.b.register_backward_hook(lambda *_: fired.append("b"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.held) + self.a(self.b(x))


@pytest.mark.filterwarnings("ignore:Using a non-full backward", "ignore:Full backward hook")
def test_backward_hooks_are_no_reason_to_run_live_without_gradients() -> None:
    ours: list[str] = []
    theirs: list[str] = []
    model, same = Hooked(ours), Hooked(theirs)
    same.load_state_dict(model.state_dict())
    bended = bt.BendedModule(model)

    def compare(make: Callable[[], torch.Tensor], *, grad: bool = False) -> bool:
        """Call both, go backward where there is a way; return whether the call was a replay."""
        found, replays = [], bended.stats.replays
        for called in (bended, same):
            x = make()
            with torch.set_grad_enabled(grad):
                out = called(x)
            for end in (out, x, same.held if called is same else model.held):
                if end.grad_fn is not None:
                    end.sum().backward(retain_graph=True)
            found.append(bits(out))
        assert found[0] == found[1]
        assert ours == theirs
        return bended.stats.replays > replays

    plain = functools.partial(torch.ones, 2)
    assert [compare(plain) for _ in range(3)] == [False, True, True]
    assert not any(compare(plain, grad=True) for _ in range(3))
    assert ours
    assert compare(plain)
    fired = len(ours)
    assert not any(compare(lambda: torch.ones(2, requires_grad=True) * 2) for _ in range(3))
    assert len(ours) > fired
    for one in (model, same):
        one.held = torch.ones(2, requires_grad=True) * 3
    fired = len(ours)
    assert not any(compare(plain) for _ in range(3))
    assert len(ours) > fired
