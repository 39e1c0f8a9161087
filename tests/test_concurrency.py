"""Threads, interruptions, runs inside runs, copies, and what is freed."""

from __future__ import annotations

import _thread
import asyncio
import copy
import gc
import io
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import assert_promise, bits, footprint, state

ROUNDS = 30
PACKAGE = str(Path(bt.__file__).parent)


class Branching(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for i in range(x.shape[0]):
            if x[i].sum() > 0:
                y = self.second(y) * (i + 1)
        return y.tanh()


def signs(*each: int) -> Tensor:
    return torch.tensor(each)[:, None] * torch.ones(1, 3)


INPUTS = [signs(*each) for each in [(1, 1), (-1, 1), (1, -1), (-1, -1), (1,), (-1, 1, -1)]]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let interrupts come, also where a shell started the tests with SIGINT ignored (`&`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def _often() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads of their own, begun at once; return what they give."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# Threads


@pytest.mark.more
@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("shared", [False, True], ids=["different modules", "the same module"])
def test_two_threads_trace_and_call_at_once(shared: bool) -> None:
    before = footprint()
    for number in range(ROUNDS):
        torch.manual_seed(number)
        models = [Branching(), Branching()]
        bended = [bt.BendedModule(models[0]), bt.BendedModule(models[not shared])]
        if shared:
            bended[1] = bended[0]
        with torch.no_grad():
            wanted = [[bits(one.model(x)) for x in INPUTS * 2] for one in bended]
            together_grad = [list(INPUTS * 2), list(INPUTS * 2)[:: -1 if number % 2 else 1]]

        def calls(which: int, inputs: Any = together_grad, bended: Any = bended) -> Any:
            with torch.no_grad():
                return [bits(bended[which](x)) for x in inputs[which]]

        given = together(lambda: calls(0), lambda: calls(1))
        assert given[0] == wanted[0]
        assert given[1] == wanted[1][:: -1 if number % 2 else 1]
        assert footprint() == before
    for one in bended:
        assert one.stats.live == 0
        replays = one.stats.replays
        with torch.no_grad():
            assert [bits(one(x)) for x in INPUTS] == [bits(one.model(x)) for x in INPUTS]
        assert one.stats.replays == replays + len(INPUTS)


@pytest.mark.usefixtures("_often")
def test_two_threads_train_two_models_at_once() -> None:
    def train(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in INPUTS * 2:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(list(model.parameters()))

    for number in range(3):
        torch.manual_seed(number)
        models = [Branching(), Branching()]
        wanted = [train(copy.deepcopy(model)) for model in models]
        first, second = map(bt.BendedModule, models)
        assert together(lambda: train(first), lambda: train(second)) == wanted  # noqa: B023
        assert first.stats.replays >= len(INPUTS)
        assert second.stats.replays >= len(INPUTS)


class _Meeting(nn.Module):
    """Meets the other thread in the middle of its forward."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self._meet = barrier.wait

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self._meet()
        y = y * x.shape[0]
        self._meet()
        return y if y.sum() > 0 else -y


def test_runs_of_two_threads_that_overlap_are_kept_apart() -> None:
    barrier = threading.Barrier(2)
    models = [_Meeting(barrier), _Meeting(barrier)]
    before = footprint()
    bended = [bt.BendedModule(model) for model in models]
    first, second = together(*(lambda one=one: one.trace(INPUTS[0]) for one in bended))
    assert footprint() == before
    assert [str(op.target) for op in first.ops] == [str(op.target) for op in second.ops]
    for x in (INPUTS[0], INPUTS[0] * 2):
        for model in models:  # a replay would not wait for the other
            model._meet = threading.Barrier(1).wait
        given = together(*(lambda one=one, x=x: one(x) for one in bended))
        for one, result in zip(bended, given, strict=True):
            wanted = one.model.fc(x) * x.shape[0]
            assert torch.equal(result, wanted if wanted.sum() > 0 else -wanted)


def test_what_another_thread_does_meanwhile_is_not_recorded() -> None:
    barrier = threading.Barrier(2)
    traced, other = _Meeting(barrier), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    wanted = bits(other(INPUTS[0]))

    def eager() -> Any:
        barrier.wait()
        torch.manual_seed(0)
        results = [bits(other(INPUTS[0])) for _ in range(5)]
        barrier.wait()
        return results

    trace, results = together(lambda: bt.trace(traced, INPUTS[0]), eager)
    assert results == [wanted] * 5
    assert not any("relu" in str(op.target) or "seed" in str(op.target) for op in trace.ops)


@pytest.mark.usefixtures("_often")
def test_modes_of_one_thread_are_not_those_of_the_other() -> None:
    bended = bt.BendedModule(Branching())

    def calls(grad: bool) -> Any:
        with torch.set_grad_enabled(grad):
            return [[bits(bended(x)) for x in INPUTS] for _ in range(4)]

    wanted = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            wanted.append([bits(bended.model(x)) for x in INPUTS])
    without, with_grad = together(lambda: calls(False), lambda: calls(True))
    assert without == [wanted[0]] * 4
    assert with_grad == [wanted[1]] * 4


@pytest.mark.usefixtures("_often")
def test_a_model_used_by_one_thread_while_a_method_of_it_is_called_by_another() -> None:
    class Model(Branching):
        def repeated(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = self(x)
            return x

    model = Model()
    bended = bt.BendedModule(model)
    with torch.no_grad():
        wanted = bits(model.repeated(INPUTS[0])), bits(model(INPUTS[1]))

        def calls(call: Callable[[], Tensor]) -> Any:
            with torch.no_grad():
                return [bits(call()) for _ in range(ROUNDS)]

        given = together(
            lambda: calls(lambda: bended.repeated(INPUTS[0])),
            lambda: calls(lambda: model(INPUTS[1])),
        )
    assert given == [[wanted[0]] * ROUNDS, [wanted[1]] * ROUNDS]
    assert "_compiled_call_impl" not in vars(model)


# Methods of a model, in several threads, and those that run in steps


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 3), nn.ReLU()
        self.meet: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))

    def twice(self, x: Tensor) -> Tensor:
        y = self(x)
        self.meet()
        return self(y)

    def through(self, other: Any, x: Tensor) -> Tensor:
        return other.twice(x) + self(x)

    def in_a_thread(self, x: Tensor) -> Tensor:
        return together(lambda: self(x))[0]

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            try:
                x = self(x)
                sent = yield x
                x = x if sent is None else x + sent
            except ValueError:
                x = self(x) - 1

    async def awaited(self, x: Tensor) -> Tensor:
        x = self(x)
        await asyncio.sleep(0)
        return self(x)

    async def streamed(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self(x)
            await asyncio.sleep(0)
            yield x


def with_methods() -> tuple[Methods, Methods, bt.BendedModule, Tensor]:
    """A model, the same with a hook, a bended one with the same inserted, and an input."""
    model = Methods()
    hooked = copy.deepcopy(model)
    hooked.act.register_forward_hook(lambda module, inputs, output: output * 2)
    bended = bt.BendedModule(model)
    x = torch.randn(2, 3)
    bended(x)
    bended.interject("act", lambda value: value * 2)
    return copy.deepcopy(model), hooked, bended, x


def test_what_is_inserted_is_not_called_for_other_threads_while_a_method_runs() -> None:
    plain, hooked, bended, x = with_methods()
    other = bt.BendedModule(bended.model)
    before, after = threading.Barrier(2), threading.Barrier(2)

    def meets() -> None:
        if threading.current_thread() is first:
            before.wait()
            after.wait()

    bended.model.meet = meets
    results: list[Tensor] = []
    first = threading.Thread(target=lambda: results.append(bended.twice(x)))
    first.start()
    before.wait()
    try:
        assert bits(bended.model(x)) == bits(plain(x))
        assert bits(other.twice(x)) == bits(plain.twice(x))
        assert bits(together(lambda: bended.model(x))[0]) == bits(plain(x))
    finally:
        after.wait()
        first.join()
    assert bits(results[0]) == bits(hooked.twice(x))
    assert "_compiled_call_impl" not in vars(bended.model)
    assert threading.Thread.__init__.__qualname__ == "Thread.__init__"


def test_methods_of_two_bended_modules_of_one_model_inside_each_other() -> None:
    plain, hooked, bended, x = with_methods()
    other = bt.BendedModule(bended.model)
    assert bits(bended.through(other, x)) == bits(hooked.through(plain, x))
    assert bits(other.through(bended, x)) == bits(plain.through(hooked, x))


def test_a_thread_that_a_method_starts_calls_what_the_method_calls() -> None:
    _, hooked, bended, x = with_methods()
    assert bits(bended.in_a_thread(x)) == bits(hooked.in_a_thread(x))


def test_methods_that_run_in_steps_call_what_is_inserted() -> None:
    _, hooked, bended, x = with_methods()
    given = []
    for model in (bended, hooked):
        steps = model.stream(x)
        found = [next(steps), steps.send(torch.ones(3)), steps.throw(ValueError())]
        given.append([bits(value) for value in (*found, *steps)])
        steps = model.stream(x)
        next(steps)
        steps.close()
        assert next(steps, None) is None
        given[-1].append(bits(asyncio.run(model.awaited(x))))

        async def all_of(model: Any = model) -> list[Any]:
            return [bits(value) async for value in model.streamed(x)]

        given[-1] += asyncio.run(all_of())
    assert given[0] == given[1]
    assert "_compiled_call_impl" not in vars(bended.model)


# Errors and interruptions


class Failing(nn.Module):
    """Fails in the middle, in a submodule, while `fails` says so."""

    class _Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails: type[BaseException] | None = None
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            n = x.shape[0] * 2
            if self.fails is not None:
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    _strike(self.fails)
            return y * n

    def __init__(self) -> None:
        super().__init__()
        self.inner = self._Inner()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y + 1 if x.sum() > 0 else y - 1


class _Interrupted(BaseException):
    """Not an `Exception`."""


class _Signal(BaseException):
    """Stands for an interrupt that comes as a signal."""


class _Interrupt(BaseException):
    """Stands for an interrupt from `_thread.interrupt_main`."""


def _strike(kind: type[BaseException]) -> None:
    if kind is _Signal:
        signal.raise_signal(signal.SIGINT)
    elif kind is _Interrupt:
        _thread.interrupt_main()
    else:
        raise kind("in the middle")
    for _ in range(1000):
        pass
    raise AssertionError("the interrupt did not come")


RAISED = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, _Interrupted, _Signal,
          _Interrupt]  # fmt: skip


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("known", [False, True], ids=["first call", "after some calls"])
def test_a_model_that_raises_halfway_works_afterwards(
    kind: type[BaseException], known: bool
) -> None:
    seen = KeyboardInterrupt if kind in (_Signal, _Interrupt) else kind
    model = Failing()
    bended = bt.BendedModule(model)
    before = footprint()
    if known:
        for x in INPUTS[:2]:
            bended(x)
    for _ in range(2):
        model.inner.fails = kind
        for call in (bended, bended.trace, lambda x: bt.trace(model, x)):
            with pytest.raises(seen):
                call(INPUTS[3])
            assert footprint() == before
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
        model.inner.fails = None
        for x in INPUTS * 2:
            assert bits(bended(x)) == bits(model(x))
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2 * len(INPUTS)


def test_an_interrupt_in_a_resumed_run() -> None:
    strikes = []

    def model(x: Tensor) -> Tensor:
        y = x * 2
        if x.sum() < 0:
            y = y - 1
            if strikes:
                _strike(strikes[0])
        return y + 1

    wanted = [bits(model(x)) for x in INPUTS]
    bended = bt.BendedModule(model)
    before = footprint()
    for kind in (KeyboardInterrupt, _Signal):
        bended(INPUTS[0])
        strikes.append(kind)
        with pytest.raises(KeyboardInterrupt):
            bended(INPUTS[3])
        strikes.clear()
        assert footprint() == before
        assert [bits(bended(x)) for x in INPUTS] == wanted


class _Interruption:
    """A profile function that interrupts at one of the calls of the library's own functions."""

    def __init__(self, moment: int, files: str = PACKAGE) -> None:
        self.left, self.files = moment, files
        self.place = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or self.place or not code.co_filename.startswith(self.files):
            return
        if code.co_name in _TIDYING:
            return
        self.left -= 1
        if self.left == 0:
            self.place = f"{code.co_filename}:{code.co_qualname}"
            raise KeyboardInterrupt(self.place)


# Where the library tidies up: an interrupt there is like one inside any `finally` of Python.
_TIDYING = frozenset(
    {
        "<genexpr>",
        "_leave",
        "_leave_call",
        "_restore_name",
        "_uninstall",
        "reporting_to",
        "redirect_calls",
        "retire",
        "_clean",
        "__exit__",
        "__del__",
        "restore",
    }
)


def _interrupted_everywhere(
    first: list[Tensor], then: list[Tensor], stride: int, files: str = PACKAGE
) -> int:
    """Interrupt the last of some calls at every moment; return how many moments there were."""
    torch.manual_seed(0)
    model = Branching()
    wanted = [bits(model(x)) for x in then]
    before, moment = footprint(), 1
    gc.disable()  # a finalizer would swallow the interrupt
    try:
        while True:
            bended = bt.BendedModule(model)
            for x in first[:-1]:
                bended(x)
            interruption = _Interruption(moment, files)
            sys.setprofile(interruption)
            raised = False
            try:
                bended(first[-1])
            except KeyboardInterrupt:
                raised = True
            finally:
                sys.setprofile(None)
            if not interruption.place:
                return moment
            assert raised, f"swallowed at {interruption.place}"
            assert footprint() == before, interruption.place
            assert [bits(bended(x)) for x in then] == wanted, interruption.place
            replays = bended.stats.replays
            assert [bits(bended(x)) for x in then] == wanted, interruption.place
            assert bended.stats.replays == replays + len(then), interruption.place
            assert torch.is_grad_enabled(), interruption.place
            moment += stride
    finally:
        gc.enable()


@pytest.mark.more
@pytest.mark.parametrize(
    "first", [INPUTS[:1], [*INPUTS[:1], INPUTS[1]], [INPUTS[0]] * 2],
    ids=["trace", "resume", "replay"],
)  # fmt: skip
def test_an_interrupt_at_any_moment_leaves_a_module_that_works(first: list[Tensor]) -> None:
    stride = 1 if first[0] is first[-1] and len(first) > 1 else 23
    assert _interrupted_everywhere(first, INPUTS[:2], stride) > (10 if stride == 1 else 500)


@pytest.mark.parametrize("first", [INPUTS[:1], INPUTS[:2]], ids=["trace", "resume"])
def test_an_interrupt_while_the_tracer_steps_in_or_out(first: list[Tensor]) -> None:
    files = str(Path(PACKAGE, "watch", "intercepts"))
    assert _interrupted_everywhere(first, INPUTS[:2], 1, files) > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", [INPUTS[:1], INPUTS[:2]], ids=["trace", "resume"])
def test_an_interrupt_at_every_moment_leaves_a_module_that_works(first: list[Tensor]) -> None:
    assert _interrupted_everywhere(first, INPUTS[:3], 1) > 100


# Runs inside runs


class _Outer(nn.Module):
    def __init__(self, bend: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner, self.norm = bend(Branching()), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(x))
        return y * 2 if y.sum() > 0 else self.inner(y)


def _made(*batches: Tensor) -> list[Any]:
    return [lambda x=x: ((x.clone(),), {}) for x in batches]


WIDE = [x for x in INPUTS if x.shape[0] > 1]


def test_a_bended_module_inside_a_bended_module() -> None:
    torch.manual_seed(0)
    eager = _Outer(lambda model: model)
    torch.manual_seed(0)
    outer = bt.BendedModule(_Outer(bt.BendedModule))
    for x in WIDE * 3:
        assert bits(outer(x)) == bits(eager(x))
    assert bits(outer.state_dict()) == bits(eager.state_dict())
    assert outer.stats.replays >= len(WIDE)
    assert outer.stats.live == 0
    inner = outer.model.inner
    assert bits(inner(WIDE[0])) == bits(eager.inner(WIDE[0]))  # and on its own


def test_a_bended_module_of_a_bended_module() -> None:
    model = Branching()
    twice = bt.BendedModule(bt.BendedModule(model))
    for x in INPUTS * 2:
        assert bits(twice(x)) == bits(model(x))
    assert twice.stats.replays >= len(INPUTS)
    assert list(twice.state_dict()) == list(model.state_dict())


@pytest.mark.more
def test_a_model_that_traces_in_its_forward() -> None:
    class Traces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            trace = bt.trace(self.fc, x)
            return trace.output * len(trace.ops) if x.sum() > 0 else self.fc(x)

    bended = assert_promise(Traces, _made(*INPUTS, *INPUTS))
    assert bended.stats.replays + bended.stats.live >= len(INPUTS)


def test_a_model_that_makes_a_bended_module_in_its_forward() -> None:
    class Bends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            inner = bt.BendedModule(self.fc)
            return inner(x) + inner(x)

    bended = assert_promise(Bends, _made(*INPUTS, *INPUTS))
    assert bended.stats.replays + bended.stats.live >= len(INPUTS)


def test_a_model_that_calls_itself_through_its_bended_module() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.again: list[Any] = [self]

        def forward(self, x: Tensor, depth: int) -> Tensor:
            y = self.fc(x).tanh()
            return y if depth == 0 else self.again[0](y, depth - 1)

    eager = Recursive()
    model = copy.deepcopy(eager)
    bended = bt.BendedModule(model)
    model.again[0] = bended
    for depth in (2, 0, 1, 2, 0, 1, 2):
        assert bits(bended(INPUTS[0], depth)) == bits(eager(INPUTS[0], depth))
    assert bended.stats.replays + bended.stats.live >= 3


@pytest.mark.more
def test_an_inner_module_that_raises_halfway_leaves_both_working() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bt.BendedModule(Failing())

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x) * 2
            except ValueError:
                return x - 1

    outer = bt.BendedModule(Outer())
    failing = outer.model.inner.model
    before = footprint()
    for kind in (None, ValueError, None, KeyboardInterrupt, ValueError, None):
        failing.inner.fails = kind
        for x in INPUTS[:4]:
            if kind is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    outer(x)
            else:
                assert bits(outer(x)) == bits(outer.model(x))
            assert footprint() == before


# Copies


def _saved(bended: bt.BendedModule) -> bt.BendedModule:
    file = io.BytesIO()
    torch.save(bended, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[bt.BendedModule], bt.BendedModule]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda bended: pickle.loads(pickle.dumps(bended)),
    "torch.save": _saved,
    "in a container": lambda bended: copy.deepcopy(nn.ModuleList([bended]))[0],
    "pickled in a model": lambda bended: pickle.loads(pickle.dumps(nn.Sequential(bended)))[0],
    "twice": lambda bended: copy.deepcopy(copy.deepcopy(bended)),
}


class Kept(Branching):
    """With everything that a copy has to take along."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.last = torch.zeros(2, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        self.last = x.detach() * 2
        return self.drop(self.norm(super().forward(x)))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("called", [0, 1, 6], ids=["fresh", "called once", "called often"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_copy_gives_the_same_and_is_on_its_own(how: str, called: int, training: bool) -> None:
    bended = bt.BendedModule(Kept()).train(training)
    for x in WIDE[:called] * 2:
        bended(x)
    twin = COPIES[how](bended)
    assert type(twin) is bt.BendedModule
    assert type(twin.model) is Kept
    assert twin.training is twin.model.training is training
    assert state(twin.model) == state(bended.model)
    eager = copy.deepcopy(bended.model)
    for seed, x in enumerate(WIDE * 2):
        results = []
        for model in (eager, twin):
            torch.manual_seed(seed)
            results.append(bits(model(x)))
        assert results[0] == results[1]
    assert state(twin.model) == state(eager)
    assert twin.stats.replays >= len(WIDE)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(bool(p.any()) for p in eager.first.parameters())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in bended.parameters()}
    torch.manual_seed(0)
    wanted = bits(copy.deepcopy(bended.model)(WIDE[0]))
    torch.manual_seed(0)
    assert bits(bended(WIDE[0])) == wanted


def test_a_shallow_copy_shares_the_model() -> None:
    bended = bt.BendedModule(Branching())
    bended(INPUTS[0])
    twin = copy.copy(bended)
    assert twin.model is bended.model
    with torch.no_grad():
        bended.model.first.weight.zero_()
    assert bits(twin(INPUTS[0])) == bits(bended(INPUTS[0])) == bits(bended.model(INPUTS[0]))


def test_copies_keep_what_is_shared_with_other_modules_shared() -> None:
    model = Branching()
    both = nn.ModuleList([bt.BendedModule(model), model])
    for twin in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert twin[0].model is twin[1]
        assert bits(twin[0](INPUTS[0])) == bits(twin[1](INPUTS[0])) == bits(model(INPUTS[0]))


def test_hooks_on_the_bended_module_itself_fire_once_a_call() -> None:
    bended = bt.BendedModule(Branching())
    fired: list[str] = []
    handles = [
        bended.register_forward_pre_hook(lambda *_: fired.append("before")),
        bended.register_forward_hook(lambda *_: fired.append("after")),
        bended.register_full_backward_hook(lambda *_: fired.append("backward")),
    ]
    for _ in range(3):
        bended(INPUTS[0].clone().requires_grad_()).sum().backward()
    assert fired == ["before", "after", "backward"] * 3
    for handle in handles:
        handle.remove()
    bended(INPUTS[0])
    assert len(fired) == 9


def _doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_hooks_on_the_bended_module_itself(how: str) -> None:
    bended = bt.BendedModule(Branching())
    handle = bended.register_forward_hook(_doubled)
    twin = COPIES[how](bended)
    assert bits(twin(INPUTS[0])) == bits(bended(INPUTS[0])) == bits(bended.model(INPUTS[0]) * 2)
    handle.remove()
    assert bits(twin(INPUTS[0])) == bits(bended.model(INPUTS[0]) * 2)


@pytest.mark.parametrize("of_model", [True, False])
def test_a_copy_of_a_model_that_holds_its_bended_module(of_model: bool) -> None:
    bended = bt.BendedModule(Branching())
    bended.model.holds = [bended]
    twin = copy.deepcopy(bended.model).holds[0] if of_model else copy.deepcopy(bended)
    assert twin is not bended
    assert twin.model.holds[0] is twin
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in bended.parameters()}
    assert bits(twin(INPUTS[0])) == bits(bended(INPUTS[0]))


# What is freed


def test_the_model_is_freed_with_its_bended_module() -> None:
    model = Branching()
    bended = bt.BendedModule(model)
    for x in INPUTS * 2:
        bended(x)
    references = [weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(bended)]
    del model, bended
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_inputs_and_outputs_of_a_call_are_not_kept() -> None:
    model = Kept()
    bended = bt.BendedModule(model)
    alive: list[weakref.ref[Tensor]] = []
    for x in [*WIDE, *WIDE]:
        given = x.clone().requires_grad_()
        out = bended(given)
        alive += [weakref.ref(given), weakref.ref(out)]
        del given, out
        model.last = torch.zeros(2, 3)  # which the model keeps itself
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_what_a_run_computed_is_freed_also_after_an_error() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = x * 2
            alive.append(weakref.ref(z))
            z = z + 1 if x.sum() > 0 else z - 1
            return z + y

    alive: list[weakref.ref[Tensor]] = []
    bended = bt.BendedModule(Model())
    for sign in (1, -1, 1, -1):
        for n in (3, 2):
            given = torch.full((2, 3), float(sign)), torch.ones(n)
            alive.append(weakref.ref(given[0]))
            if n == 3:
                bended(*given)
            else:
                with pytest.raises(RuntimeError):
                    bended(*given)
            del given
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_parameter_that_was_replaced_is_freed() -> None:
    model = Branching()
    bended = bt.BendedModule(model)
    for x in INPUTS:
        bended(x)
    old = weakref.ref(model.first.weight)
    model.first.weight = nn.Parameter(torch.eye(3))
    gc.collect()
    assert old() is None
    assert bits(bended(INPUTS[0])) == bits(model(INPUTS[0]))
