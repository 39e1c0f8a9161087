"""BendedModule: served by replays, shares the model's state, says what it does and why."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel as kernel
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.errors import InputError, NondeterminismError
from bendtrace.rewriting import replace_modules
from tests.promise import assert_promise, bits, randn_inputs


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.norm(self.fc(x))) * self.scale
        if x.sum() > 0:
            x = x.relu()
        if bias is not None:
            x = x + bias
        return x


counts: Counter[str] = Counter()


class _Counted(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, by op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, 1.0, -1.0] for value in values])


def test_counts_how_calls_were_served() -> None:
    bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
    plus, minus = torch.ones(2), -torch.ones(2)
    bended(plus)
    assert bended.stats == bt.Stats(traces=1)
    bended(plus)
    assert bended.stats == bt.Stats(traces=1, replays=1)
    bended(minus)
    assert bended.stats == bt.Stats(traces=2, replays=1, retraces=1, resumes=1)
    bended(minus), bended(plus), bended(minus)
    assert bended.stats == bt.Stats(traces=2, replays=4, retraces=1, resumes=1)
    bended(torch.ones(2, dtype=torch.float64))
    assert bended.stats == bt.Stats(traces=3, replays=4, retraces=2, resumes=1)


def test_positional_and_keyword_arguments_are_the_same_call() -> None:
    bended = bt.BendedModule(Gate().eval())
    x, b = rows(1, 2), torch.ones(3)
    outputs = [bended(x, b), bended(x, bias=b), bended(x=x, bias=b), bended(bias=b, x=x)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert bended.stats.traces == 1
    assert bended.stats.replays == 3


def test_says_which_step_diverged_with_the_recorded_and_the_new_value() -> None:
    bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 3 else x)
    bended(torch.ones(2))
    bended(torch.ones(9))
    mismatch = bended.last_mismatch
    assert isinstance(mismatch.step, bt.flow.LogicalFlowStep)
    assert mismatch.step.text == "x.sum() > 3"
    assert (mismatch.recorded, mismatch.new) == (False, True)
    line = mismatch.step.line
    assert str(mismatch) == (
        f"conditional expression `x.sum() > 3` at {__file__}:{line} was False when traced and "
        "is True now"
    )


def test_explain_tells_from_the_inputs_alone_and_runs_nothing() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 2 else x

    bended = bt.BendedModule(Model())
    assert str(bended.explain(torch.ones(3))) == "nothing has been traced for these arguments yet"
    bended(torch.ones(3))
    stats = dataclasses.replace(bended.stats)
    five, one = torch.ones(5), torch.ones(1)
    counts.clear()
    with _Counted():
        explanation, refused = bended.explain(five), bended.explain(one)
    assert not counts
    assert len(explanation.serving) == 1
    assert explanation.nearest is None
    assert refused.serving == ()
    assert refused.nearest.step.text == "x.shape[0] > 2"
    assert (refused.nearest.recorded, refused.nearest.new) == (True, False)
    other = bended.explain(torch.ones(3, dtype=torch.float64))
    assert "x is not of dtype torch.float32" in str(other)
    assert str(other).startswith("would be traced again: ")
    assert bended.stats == stats


def test_state_is_the_model_s_own() -> None:
    model = Gate()
    bended = bt.BendedModule(model)
    assert [n for n, _ in bended.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(bended.parameters(), model.parameters(), strict=True))
    assert list(bended.state_dict()) == list(model.state_dict())
    assert bended.fc is model.fc
    bended.eval()
    assert not model.training
    assert not model.drop.training
    assert not bended.training
    bended.train()
    assert model.norm.training
    bended.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    bended.double()
    assert model.fc.weight.dtype == torch.float64
    assert model.norm.running_mean.dtype == torch.float64
    bended.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not model.fc.weight.any()
    bended.scale = 5.0
    assert model.scale == 5.0
    bended.fc = nn.Linear(3, 3)
    assert model.fc is bended.fc


def test_changes_of_the_model_between_calls_are_followed() -> None:
    torch.manual_seed(0)
    eager, model = Gate().eval(), Gate().eval()
    model.load_state_dict(eager.state_dict())
    bended = bt.BendedModule(model)
    x = rows(1, 2, 3)
    changes: list[Any] = [
        lambda m: None,
        lambda m: m.train(),
        lambda m: m.eval(),
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "scale", 3),
        lambda m: setattr(m.drop, "p", 0.25),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.fc, "weight", nn.Parameter(torch.eye(3))),
        lambda m: setattr(m.fc, "bias", None),
        lambda m: setattr(m, "fc", nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()).eval()),
        lambda m: m.requires_grad_(False),
        lambda m: setattr(m, "norm", nn.Identity()),
        lambda m: m.register_forward_hook(lambda module, args, output: output * 7),
        lambda m: m._forward_hooks.clear(),
    ]
    for change in changes:
        torch.manual_seed(3)
        change(eager)
        torch.manual_seed(3)
        change(bended.model)
        for _ in range(2):
            torch.manual_seed(1)
            wanted = eager(x)
            torch.manual_seed(1)
            assert bits(bended(x)) == bits(wanted)


def test_a_resumed_run_does_nothing_twice() -> None:
    torch.manual_seed(0)
    eager, model = Gate(), Gate()
    model.load_state_dict(eager.state_dict())
    bended = bt.BendedModule(model)
    seeds = {True: [], False: []}
    for seed in range(40):  # find seeds for both sides of the branch
        torch.manual_seed(seed)
        side = bool((eager.drop(eager.norm(eager.fc(rows(1, 2, 4)))) * 2).sum() > 0)
        seeds[side].append(seed)
    model.load_state_dict(eager.state_dict())
    order = [seeds[True][0], seeds[False][0], seeds[True][1], seeds[False][1]]
    for seed in order:
        for called in (eager, bended):
            torch.manual_seed(seed)
            counts.clear()
            with _Counted():
                called(rows(1, 2, 4)).sum().backward()
            drawn, ops = torch.get_rng_state(), dict(counts)
            if called is eager:
                wanted = drawn, ops
        assert torch.equal(drawn, wanted[0])
        assert ops == wanted[1]
        assert bits(dict(model.state_dict())) == bits(dict(eager.state_dict()))
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    assert bended.stats.resumes == 1
    assert bended.stats.replays == 2


def test_training_through_replays_is_bitwise_that_of_eager() -> None:
    torch.manual_seed(0)
    eager, model = Gate(), Gate()
    model.load_state_dict(eager.state_dict())
    bended = bt.BendedModule(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (eager, bended)]
    for step in range(12):
        for called, optimizer in zip((eager, bended), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            called(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        assert bits(dict(model.state_dict())) == bits(dict(eager.state_dict()))
    assert bended.stats.replays >= 9


def test_an_error_of_the_model_is_raised_as_it_is_and_forgotten() -> None:
    class Checks(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if x.sum() < 0:
                raise ValueError("negative")
            return x @ y

    x = torch.ones(2, 2)
    calls = [
        lambda: ((x, x), {}), lambda: ((-x, x), {}), lambda: ((x, x), {}),
        lambda: ((x, torch.ones(3, 3)), {}), lambda: ((-x, x), {}), lambda: ((x, x), {}),
    ]  # fmt: skip
    bended = assert_promise(Checks, calls)
    assert bended.stats.replays >= 2


def test_a_path_known_from_another_trace_is_not_traced_again() -> None:
    def model(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x + 1 if x.sum() > 0 else x - 1
        return y * 2 if n > 3 else y

    bended = bt.BendedModule(model)
    plus, minus = torch.ones(2), -torch.ones(2)
    for x, n in [(plus, 5), (minus, 1), (plus, 5), (minus, 1), (plus, 5)]:
        assert torch.equal(bended(x, n), model(x, n))
    assert bended.stats.traces == 2
    assert bended.stats.replays == 3


def test_a_counter_is_noticed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    bended = assert_promise(Counts, [randn_inputs(2)] * 12)
    assert bended.stats.traces == 3
    assert bended.stats.live == 0


def test_a_text_that_changes_with_each_call_is_noticed_and_the_model_runs_live() -> None:
    class Lengthens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += "a"
            return x * len(self.calls)

    bended = assert_promise(Lengthens, [randn_inputs(2)] * 12)
    assert bended.stats.live >= 6
    assert bended.stats.traces <= 6
    (reason,) = bended.why_live
    line = Lengthens.forward.__code__.co_firstlineno + 1
    assert reason == f"self.calls changes on every call (see {__file__}:{line})"


def test_needs_something_to_call() -> None:
    with pytest.raises(InputError, match="a model has to be callable; 3 is not"):
        bt.BendedModule(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing has been traced yet"):
        bt.BendedModule(nn.Linear(1, 1)).latest_trace  # noqa: B018


def test_prints_the_model_and_how_it_was_served() -> None:
    bended = bt.BendedModule(nn.ReLU())
    bended(torch.ones(1))
    assert repr(bended) == (
        "BendedModule(ReLU())\n  calls: traces=1, replays=0, retraces=0, resumes=0, live=0\n"
        "  inserted: nothing"
    )
    bended.interject("relu", torch.zeros_like)
    assert repr(bended).endswith("\n  inserted: <insertion of zeros_like at 'relu', active>")


def test_trace_returns_the_trace_and_the_output() -> None:
    bended = bt.BendedModule(Gate().eval())
    x = rows(1, 2)
    trace = bended.trace(x)
    assert isinstance(trace, bt.Trace)
    again, output = bended.trace(x=x, _return_out=True)
    assert torch.equal(output, bended.model(x))
    assert torch.equal(again.output, output)
    assert bended.latest_trace.graph is not None
    assert list(bended.latest_trace.graph) == list(again.graph)
    assert torch.equal(bended(x), output)
    assert bended.stats.replays == 1


def test_keeps_no_output_of_the_model_alive() -> None:
    bended = bt.BendedModule(lambda x: x * 2 if x.sum() > 0 else x * 3)
    for sign in (1.0, -1.0, 1.0):
        output = bended(torch.full((3,), sign))
        kept = weakref.ref(output)
        del output
        assert kept() is None
    assert bended.trace(torch.ones(3)).output is not None


def test_forward_has_the_signature_of_the_model() -> None:
    model = Gate()
    bended = bt.BendedModule(model)
    assert inspect.signature(bended.forward) == inspect.signature(model.forward)
    assert inspect.signature(copy.deepcopy(bended).forward) == inspect.signature(model.forward)
    assert bended.forward.__self__ is bended
    assert bended.forward.__func__ is bt.BendedModule.forward
    function = bt.BendedModule(lambda x, *, scale=2.0: x * scale)
    assert str(inspect.signature(function.forward)) == "(x, *, scale=2.0)"
    x = torch.ones(3)
    assert torch.equal(function.forward(x, scale=3.0), function(x, scale=3.0))
    assert function.stats.replays == 1


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 2), nn.Linear(2, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() if x.sum() > 0 else self.inner(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.outer(z)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def test_another_method_is_traced_by_its_name() -> None:
    model, x = Coder(), torch.ones(3, 4)
    bended = bt.BendedModule(model)
    trace, out = bended.trace(fn="encode", x=x, _return_out=True)
    assert torch.equal(out, model.encode(x))
    assert [step.text for step in trace.flow_steps] == ["x.sum() > 0"]
    assert torch.equal(trace.replay(x * 2), model.encode(x * 2))
    assert bended.stats == bt.Stats()
    for wrong in ("nothing", "inner.weight", 3):
        with pytest.raises(InputError, match=r"fn= is the name of a method of the model; Coder"):
            bended.trace(x, fn=wrong)
    takes_fn = bt.BendedModule(lambda x, fn: fn(x))
    assert torch.equal(takes_fn.trace(x, fn=torch.neg, _return_out=True)[1], -x)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", ["inner", "inner.linear", nn.Linear, lambda n: n.name == "inner"])
def test_what_is_inserted_takes_part_in_another_method(where: Any, warm: bool) -> None:
    model, x = Coder(), torch.ones(3, 4)
    bended = bt.BendedModule(model)
    bended(x)
    if warm:
        bended.trace(x, fn="encode")
    with bended.interject(where, lambda value: value * 0):
        assert not bended.trace(x, fn="encode", _return_out=True)[1].any()
        assert not bended.encode(x).any()
    assert torch.equal(bended.trace(x, fn="encode", _return_out=True)[1], model.encode(x))
    with bended.bend(lambda weight: weight * 0, "inner.weight"):
        out = bended.trace(x, fn="encode", _return_out=True)[1]
        assert torch.equal(out, bended.encode(x))
        assert torch.equal(out, model.inner.bias.relu().expand(3, 2))


def test_methods_by_name_as_in_torchbend() -> None:
    model, x = Coder(), torch.ones(3, 4)
    tb = bt.compat.torchbend
    bended = tb.BendedModule(model)
    graph, (z,) = bended.trace("encode", x=x, _return_out=True)
    assert torch.equal(z, model.encode(x))
    bended.trace("decode", z)
    bended.trace(x)
    assert str(graph) == str(bended.graph("encode"))
    assert next(iter(bended.graph("decode").nodes)).name == "z"
    assert next(iter(bended.graph().nodes)).name == "x"
    with pytest.raises(InputError, match=r"'other' was not traced"):
        bended.graph("other")
    assert bended.trace(fn="decode", z=z) is not None


# What a module may see of a call, and what modules around it and torch itself ask for


def _tenfold(forward: Any) -> Any:
    """Multiply for each argument that is passed by name, in their order."""

    @functools.wraps(forward)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = forward(self, *args, **kwargs)
        for number, name in enumerate(kwargs):
            result = result * (2 if name == "x" else 3) + number
        return result

    return inner


class _Wrapped(nn.Module):
    @_tenfold
    def forward(self, x: Tensor, flag: int = 1) -> Tensor:
        return x * flag


class _Plain(nn.Module):
    def forward(self, x: Tensor, flag: int = 1) -> Tensor:
        return x * flag


class _OwnCall(_Plain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * (1 + len(kwargs))


def _replaced() -> nn.Module:
    model = _Plain()
    former = model.forward
    model.forward = lambda *args, **kwargs: former(*args, **kwargs) + len(kwargs)  # type: ignore[method-assign]
    return model


FORMS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda model, x: model(x, 2),
    lambda model, x: model(x, flag=2),
    lambda model, x: model(x=x, flag=2),
    lambda model, x: model(flag=2, x=x),
]


@pytest.mark.parametrize("make", [_Wrapped, _OwnCall, _replaced])
def test_a_wrapper_may_see_which_arguments_are_passed_by_name(make: Callable[[], Any]) -> None:
    model, x = make(), torch.ones(2)
    bended = bt.BendedModule(model)
    for form in FORMS * 2:
        assert torch.equal(form(bended, x), form(model, x))
    assert bended.stats.replays >= len(FORMS)
    trace = bt.trace(model, x, 2)
    assert torch.equal(trace.replay(x * 3, 2), model(x * 3, 2))
    if make is not _replaced:  # whose parameters have no names
        with pytest.raises(bt.errors.DivergenceError, match="tell apart"):
            trace.replay(x, flag=2)


def test_a_forward_that_is_replaced_later_may_see_it_too() -> None:
    model, x = _Plain(), torch.ones(2)
    bended = bt.BendedModule(model)
    for form in FORMS:
        assert torch.equal(form(bended, x), form(model, x))
    assert bended.stats.traces == 1
    former = model.forward
    model.forward = lambda *args, **kwargs: former(*args, **kwargs) + len(kwargs)  # type: ignore[method-assign]
    for form in FORMS * 2:
        assert torch.equal(form(bended, x), form(model, x))


class _Stored(nn.Module):
    """Does more when a state dict is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.seen: list[str] = []
        self.register_load_state_dict_pre_hook(lambda *_: self.seen.append("before"))
        self.register_load_state_dict_post_hook(lambda *_: self.seen.append("after"))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("within")
        super()._load_from_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        return {"a": 3}

    def set_extra_state(self, state: Any) -> None:
        self.seen.append(f"extra {state}")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_module_around_it_loads_a_state_dict_as_into_the_model() -> None:
    plain, model = _Stored(), _Stored()
    outer = nn.Sequential(bt.BendedModule(model))
    stored = nn.Sequential(plain).state_dict()
    assert list(outer.state_dict()) == list(stored)
    nn.Sequential(plain).load_state_dict(stored)
    outer.load_state_dict(stored)
    assert model.seen == plain.seen
    assert model.seen[-1] == "after"
    norm = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    del norm["0.num_batches_tracked"]
    norm._metadata["0"]["version"] = 1  # which a batch norm knows how to read
    nn.Sequential(bt.BendedModule(nn.BatchNorm1d(2))).load_state_dict(norm)


def test_hooks_on_state_dicts_are_those_of_the_model() -> None:
    model, seen = nn.Linear(2, 2), []
    bended = bt.BendedModule(model)
    bended.register_state_dict_pre_hook(lambda *_: seen.append(1))
    bended.register_state_dict_post_hook(lambda *_: seen.append(2))
    bended.register_load_state_dict_pre_hook(lambda *_: seen.append(3))
    bended.register_load_state_dict_post_hook(lambda *_: seen.append(4))
    bended.load_state_dict(bended.state_dict())
    assert seen == [1, 2, 3, 4]
    del bended
    model.load_state_dict(model.state_dict())
    assert seen == [1, 2, 3, 4] * 2


class _Frozen(nn.Dropout):
    def train(self, mode: bool = True) -> _Frozen:
        return super().train(False)


def test_the_mode_is_that_of_the_model_at_any_time() -> None:
    class Around(nn.Module):
        def __init__(self, part: Any) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) * (2 if self.part.training else 3)

    model, x = nn.Tanh(), torch.ones(2)
    bended = bt.BendedModule(model)
    outer = bt.BendedModule(Around(bended))
    changes: list[Callable[[], Any]] = [
        model.eval, model.train, bended.eval, outer.train,
        lambda: setattr(model, "training", False), lambda: setattr(bended, "training", True),
    ]  # fmt: skip
    for change in changes:
        change()
        assert bended.training is model.training
        for _ in range(2):
            assert torch.equal(outer(x), model(x) * (2 if model.training else 3))
    assert bt.BendedModule(_Frozen()).train().training is False
    bound = bt.BendedModule(model.forward)
    model.eval()
    assert bound.training is False


def test_torch_traces_one_that_was_never_called() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    bended = bt.BendedModule(model)
    assert "latest_trace" not in dir(bended)
    assert torch.equal(torch.jit.trace(bended, x)(x * 2), model(x * 2))
    bended(x)
    assert "latest_trace" in dir(bended)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by linearize itself
def test_make_fx_and_linearize_see_what_is_inserted() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).requires_grad_(False), torch.randn(2, 3)
    bended = bt.BendedModule(model)
    bended(x)
    with bended.interject("sub_1", lambda value: value * 2):
        for _ in range(2):
            assert torch.equal(make_fx(bended)(x)(x * 3), model(x * 3) * 2)
            tangent = torch.func.linearize(bended, x)[1](x)
            assert torch.equal(tangent, torch.func.linearize(lambda x: model(x) * 2, x)[1](x))
            bended(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.scale = nn.Linear(3, 3), nn.Dropout(0.5), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x)) * self.scale
        return y + 1 if y.sum() > 0 else y


class Wrapper:
    """What wraps a model and says that it is one, as some training libraries do."""

    factor = 1

    def __init__(self, model: nn.Module) -> None:
        self.__dict__["model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    @property
    def __class__(self) -> Any:
        return self.model.__class__

    def __call__(self, x: Tensor) -> Any:
        return self.model(x) * self.factor


def test_a_wrapper_that_says_it_is_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Wrapper(Inner())
    bended = bt.BendedModule(model)
    assert isinstance(model, nn.Module)
    assert list(bended.state_dict()) == ["linear.weight", "linear.bias"]

    def scaled() -> None:
        model.scale = 3.0

    changes: list[Callable[[], object]] = [
        lambda: None, scaled, model.eval, lambda: bended.train(), lambda: model.linear.zero_grad(),
        lambda: setattr(model.model, "linear", nn.Linear(3, 3)),
        lambda: monkeypatch.setattr(Wrapper, "factor", 2),
    ]  # fmt: skip
    for change in changes:
        change()
        for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3)):
            torch.manual_seed(0)
            wanted, state = model(x), torch.get_rng_state()
            torch.manual_seed(0)
            assert torch.equal(bended(x), wanted)
            assert torch.equal(torch.get_rng_state(), state)
    assert bended.stats.replays > 0
    assert bended.stats.live == 0


@functools.lru_cache
def drawn_steps(count: int) -> Tensor:
    return torch.rand(count)


def test_a_call_that_fills_a_cache_by_more_than_computing_is_live_and_says_so_also_later() -> None:
    drawn_steps.cache_clear()
    bended, x = bt.BendedModule(lambda x: x + drawn_steps(len(x))), torch.ones(3)
    for _ in range(3):
        assert torch.equal(bended(x), x + drawn_steps(3))
        (reason,) = bended.why_live
        assert "drawn_steps" in reason
    assert (bended.stats.live, bended.stats.replays) == (1, 1)


class Equal(nn.Module):
    """Is equal to all of its class, although each is scaled by another number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), scale

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return 7

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale if x.sum() > 0 else x - self.scale


class Incomparable(Equal):
    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = Equal.__hash__


class Unhashable(Equal):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return torch.ones(2) == 1


class Shadowing(Equal):
    """Has attributes under the names of methods of modules."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.modules: Any = [self.linear]
        self.named_modules: Any = {"linear": self.linear}
        self.parameters: Any = 3
        self.named_parameters: Any = None
        self.buffers: Any = None
        self.named_buffers: Any = None


class Several(nn.Module):
    def __init__(self, *scales: float) -> None:
        super().__init__()
        kinds = (Equal, Equal, Incomparable, Unhashable, Shadowing)
        self.parts = nn.ModuleList(map(lambda kind, scale: kind(scale), kinds, scales))

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("kind", [Equal, Incomparable, Unhashable, Shadowing])
def test_models_are_compared_by_identity_alone(kind: type[Equal]) -> None:
    models: list[nn.Module] = [kind(1), kind(2), kind(3), Several(1, 2, 3, 4, 5)]
    bendeds = [bt.BendedModule(model) for model in models]
    for x in (torch.ones(2), -torch.ones(2)) * 2:
        for model, bended in zip(models, bendeds, strict=True):
            assert torch.equal(bended(x), model(x))
    assert [(bended.stats.replays, bended.stats.live) for bended in bendeds] == [(2, 0)] * 4
    for scale, (model, bended) in enumerate(zip(models[:3], bendeds, strict=False), 1):
        with bended.interject("linear", lambda value: value * 0 + 1):
            assert bended(torch.ones(2)).tolist() == [scale] * 2
        assert "linear" in str(bt.trace(model, torch.ones(2)))


def test_a_part_may_have_the_whole_as_a_part() -> None:
    whole, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential()), torch.ones(2)
    whole[0].whole = whole
    bended = bt.BendedModule(whole)
    for _ in range(2):
        assert torch.equal(bended(x), whole(x))
    assert bended.stats.replays == 1
    with bended.interject("0", lambda value: value * 0 + 1):
        assert bended(x).tolist() == [1, 1]


def test_an_empty_container_is_replaced_like_any_part() -> None:
    empty = nn.Sequential()
    model = nn.Sequential(nn.Linear(2, 2), empty)
    made = replace_modules(model, [empty], lambda module: nn.ReLU())
    assert isinstance(made[1], nn.ReLU)


def test_a_copy_of_a_bended_module_is_on_its_own() -> None:
    bended = bt.BendedModule(nn.BatchNorm1d(2).eval())
    x = torch.ones(3, 2)
    bended(x)
    twin = copy.deepcopy(bended)
    twin.model.running_mean.fill_(7.0)
    assert torch.equal(twin(x), twin.model(x))
    assert not torch.equal(twin(x), bended(x))
    again = pickle.loads(pickle.dumps(bended))
    assert torch.equal(again(x), bended(x))


def test_a_resumed_run_that_goes_another_way_is_an_error_also_if_the_model_catches_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        way = 2 if torch.jit.onednn_fusion_enabled() else 1  # a setting that is not guarded
        try:
            y = x + 1 if way == 1 else x * 5
        except Exception:
            y = x
        return y * 2 if y.sum() > 0 else y

    bended = bt.BendedModule(model)
    bended(torch.ones(2))
    bended(torch.ones(2))  # a replay: asks nobody
    torch.jit.enable_onednn_fusion(True)
    try:
        with pytest.raises(NondeterminismError, match="with all guards equal"):
            bended(-3 * torch.ones(2))
    finally:
        torch.jit.enable_onednn_fusion(False)


class _Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2

    def runs(self, x: Tensor) -> Tensor:
        return self(x)

    def eval(self) -> _Doubles:
        self.evaluated = True
        return super().eval()


def test_a_model_with_a_call_and_an_eval_of_its_own() -> None:
    model = _Doubles()
    bended = bt.BendedModule(model)
    for _ in range(3):
        assert bended(torch.ones(1)).item() == bended.runs(torch.ones(1)).item() == 4
    assert bended.eval() is bended
    assert model.evaluated
    assert not bended.training


def test_a_wrapped_container_is_one() -> None:
    bended = bt.BendedModule(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert len(bended) == 2
    assert [type(layer) for layer in bended] == [nn.ReLU, nn.Tanh]
    assert isinstance(bended[1], nn.Tanh)
    assert bended[0] in bended
    assert bt.BendedModule(lambda x: x)


def test_settings_that_are_switched_for_one_op() -> None:
    def switches(x: Tensor) -> Tensor:
        with kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    bended = assert_promise(lambda: switches, [lambda: ((torch.ones(1, 2, 3, 4),), {})] * 3)
    assert bended.stats.live == 0


def test_its_own_compile_leaves_the_model_alone() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3)
    expected, bended = model(x), bt.BendedModule(model)
    bended.compile(backend="eager")
    assert model._compiled_call_impl is None
    for one in (bended, bt.BendedModule(model), copy.deepcopy(bended)):  # without recursion
        assert torch.equal(one(x), expected)
