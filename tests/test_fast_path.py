"""The fast_path writes down what the recorder writes down without it, and is what most ops take."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from bendtrace.log.capture import ValueCapture
from bendtrace.record import fast_path, recorder
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recorder, Recording
from bendtrace.tape.tape import Op
from bendtrace.watch.functions import is_pure
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.hf_models import MODELS
from tests.promise import bits
from tests.shares import some
from tests.torch_settings import default_dtype, deterministic


def _context(op: Op) -> Any:
    """The context of an op, without the settings of ops that no setting influences."""
    try:
        is_influenced = fast_path._function_kind(op.target).value in ("usual", "special")
    except TypeError:
        return op.context
    return op.context if is_influenced else op.context.modes


def told(recording: Recording) -> list[Any]:
    """What a run has left, but for objects that each run makes anew."""
    tape = recording.tape
    lines: list[Any] = [
        (
            str(op), repr(op.kwargs), op.scope.path, op.scope.number, op.site and op.site.chain,
            _context(op), repr(op.meta), op.raised, op.writes, op.reads,
        )
        for op in tape.ops
    ]  # fmt: skip
    lines += [
        (
            g.position,
            g.index,
            type(g),
            (repr(g.answer), g.other),
            g.use,
            g.scope.path,
            g.site and g.site.chain,
        )
        for g in tape.guards
    ]
    lines += [
        (c.path, c.number, c.start, c.stop, repr(c.args), repr(c.kwargs), repr(c.output))
        for c in tape.calls
    ]
    lines += [*tape.forgets, sorted(tape.trainable), repr(recording.root.output)]
    # Addresses differ from run to run. Only the first op that a setting has changed for is told of
    # on the fast_path.
    lines += sorted({re.sub(r"at \S+ the run", "the run", reason) for reason in tape.blockers})
    return [re.sub(r"0x[0-9a-f]+", "0x", repr(line)) for line in lines]


def recorded(
    model: Callable[..., Any], args: Any, kwargs: dict[str, Any], without: bool
) -> tuple[list[Any], Any]:
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(recorder, "hooks_around", lambda: True)
        recording = record(model, args, kwargs, Signature(model))
    return told(recording), bits(recording.result)


def assert_same(
    make: Callable[[], Any], inputs: Callable[[], tuple[Any, dict[str, Any]]],
) -> None:  # fmt: skip
    found = []
    for without in (False, True):
        torch.manual_seed(1)
        try:
            found.append(recorded(make(), *inputs(), without))
        except Exception as error:
            found.append(([type(error), str(error)], None))
    differences = [
        pair for pair in itertools.zip_longest(*(lines for lines, _ in found)) if pair[0] != pair[1]
    ]
    assert not differences, "\n".join(map(str, differences[0]))
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", some(CASES, 4, start=3), ids=lambda case: case.name)
def test_the_corpus_is_written_down_alike(case: Case, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        for inputs in case.paths.values():
            assert_same(case.make, inputs)


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral"])
def test_transformers_are_written_down_alike(name: str) -> None:
    found = [model for model in MODELS if model.name == name]
    if not found:
        pytest.skip(f"there is no {name} among the models to try")
    assert_same(found[0].make, lambda: ((), found[0].inputs()))


@contextmanager
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def anomaly() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "precision": precision,
    "threads": threads,
    "anomaly": anomaly,
    "without mkldnn": without_mkldnn,
    "math attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cached parametrizations": parametrize.cached,
}  # fmt: skip


class Switching(nn.Module):
    """Does the same before, within and after a mode."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(4, 4), mode

    def _some(self, x: Tensor) -> Tensor:
        y = (x + 1.0).relu() - torch.sigmoid(x)
        y = self.layer(y) @ torch.cat([x[:2], x[2:]])
        y = functional.softmax(y, dim=-1)
        return functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]

    def forward(self, x: Tensor) -> Any:
        before = self._some(x)
        with self.mode():
            within = self._some(x).float()
            first = x.add(1)
        after = self._some(x)
        return before, within.clone(), first.clone(), after


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_the_run_switches_is_noted_on_each_op(mode: str, around: str) -> None:
    outer = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with outer[around]():
        assert_same(
            lambda: Switching(MODES[mode]), lambda: ((torch.ones(4, 4),), {}),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("mode", "op"),
    [
        ("precision", Tensor.matmul), ("without mkldnn", Tensor.matmul), ("threads", Tensor.add),
        ("deterministic", Tensor.add), ("anomaly", Tensor.add), ("default dtype", Tensor.add),
        ("math attention", functional.softmax),
    ],
)  # fmt: skip
def test_a_setting_around_a_single_op_is_noted(mode: str, op: Any) -> None:
    def model(x: Tensor) -> Tensor:
        before = op(x, 1 if op is functional.softmax else x)
        with MODES[mode]():
            within = op(x, 1 if op is functional.softmax else x)
        return before + within

    recording = record(model, (torch.ones(2, 2),), {}, Signature(model))
    blocks = any("changed" in reason for reason in recording.tape.blockers)
    assert blocks == (mode in ("precision", "anomaly"))
    ops = [one for one in recording.tape.ops if one.target is op]
    assert blocks or [bool(one.context.settings) for one in ops][:2] == [False, True]


def odd(x: Tensor) -> Any:
    """Ops that are unlike others."""
    view, alias = x[0], x.contiguous()
    view.add_(1)
    grown = torch.add(x, 1, out=torch.empty(0))
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    sizes = x.view(x.shape[0] * 2, -1).reshape((x.size(0), x.size(1)))
    parts = torch.split(x, [1, x.shape[0] - 1])
    mixed = torch.where(x > 0, x, parts[0]) + nested[1].sum()
    with torch.inference_mode():
        frozen = x * 2
    try:
        x.view(3, 5)
    except RuntimeError:
        mixed = mixed - 1
    tagged = x * 1
    tagged.mark = "marked"
    return alias, grown, sizes, mixed, frozen + 1, x.to(x.dtype), tagged, [x.T is x.T, x.max(0)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_unusual_ops_are_written_down_alike(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert_same(lambda: odd, lambda: ((torch.arange(16.0).view(4, 4),), {}))


def test_an_unseen_write_is_noticed_by_what_reads_it_later() -> None:
    def with_statistics(x: Tensor, mean: Tensor, var: Tensor) -> Any:
        before = mean + 1
        y = functional.batch_norm(x, mean, var, training=True)
        return before, y, mean + 1, var * 2

    def inputs() -> Any:
        return (torch.randn(4, 3), torch.zeros(3), torch.ones(3)), {}

    assert_same(lambda: with_statistics, inputs)


def test_an_observer_is_shown_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(ValueCapture):
        def heeds(self, function: Any) -> bool:
            super().heeds(function)
            return True

        def begins(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
            lines.append(("begins", op.index, len(args), list(kwargs)))
            super().begins(op, args, kwargs)

        def gave(self, op: Op, out: Any) -> None:
            lines.append(("gave", op.index, type(out)))
            super().gave(op, out)

        def reads(self, position: int, index: int, tensor: Tensor) -> None:
            lines.append(("reads", position, index))
            super().reads(position, index, tensor)

        def wrote(self, op: Op, tensor: Tensor) -> None:
            lines.append(("wrote", op.index))
            super().wrote(op, tensor)

    def model(x: Tensor) -> Tensor:
        y = x * 2
        y[0] = 5.0
        z = torch.cat([y, y + 1])
        first, *rest = z.split(2)
        return functional.dropout(first + rest[0], 0.5)

    found = []
    for without in (False, True):
        lines: list[Any] = []
        torch.manual_seed(1)
        capture = Shown()
        with monkeypatch.context() as patch:
            if without:
                patch.setattr(recorder, "hooks_around", lambda: True)
            record(model, (torch.ones(4),), {}, Signature(model), observer=capture)
        found.append(
            (lines, {key: bits(value) for key, value in capture.saved.items()}, list(capture.times))
        )
    assert found[0] == found[1]


def test_ops_take_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    general: list[Any] = []
    reported = Recorder._handle_report

    def noting(self: Recorder, func: Any, *rest: Any) -> Any:
        general.append(func)
        return reported(self, func, *rest)

    monkeypatch.setattr(Recorder, "_handle_report", noting)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Softmax(-1))
    with torch.no_grad():
        record(lambda x: (model(x) + x) * 2, (torch.ones(2, 4),), {}, Signature(model))
    assert len(general) <= 1, "only the first op finds another state than before the mode"


class Meddling(torch.Tensor):
    """A subclass whose functions write to what they are given, and call modules."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.add:
            with torch._C.DisableTorchFunctionSubclass():
                torch.add(nn.Identity()(args[0]).mul_(2), 1)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_subclass_may_do_more_than_its_functions_say() -> None:
    def model(x: Tensor) -> Any:
        y = torch.add(x, 1)
        return y, x * 1, torch.cat([x, x])

    def inputs() -> Any:
        return (torch.ones(3).as_subclass(Meddling),), {}

    assert_same(lambda: model, inputs)


def test_what_is_entered_in_the_run_is_not_taken_for_the_models_own() -> None:
    layer = nn.Linear(4, 4)

    def model(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: layer(kept), lambda kept: kept):
            return (x * x).exp()

    assert_same(lambda: model, lambda: ((torch.ones(2, 4, requires_grad=True),), {}))


def test_hooks_for_saved_tensors_and_dispatch_modes_keep_ops_off_the_lane() -> None:
    assert not fast_path.hooks_around()
    with torch.autograd.graph.save_on_cpu():
        assert fast_path.hooks_around()


@pytest.mark.parametrize(
    ("function", "pure"),
    [
        (torch.add, True), (Tensor.add, True), (torch.relu, True), (torch._C._nn.linear, True),
        (Tensor.__getitem__, True), (torch.cat, True), (Tensor.view, True), (torch.matmul, True),
        (Tensor.add_, False), (torch.relu_, False), (torch.batch_norm, False),
        (torch.instance_norm, False), (Tensor.__setitem__, False), (functional.dropout, False),
        (functional.embedding, False), (Tensor.requires_grad_, False), (Tensor.copy_, False),
        (functional.scaled_dot_product_attention, False), (torch.rrelu, False),
        (torch.ops.aten.add.Tensor, False), (len, False), (Tensor.resize_, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_a_function_writes_to_is_told_from_its_schemas(function: Any, pure: bool) -> None:
    assert is_pure(function) is pure


def test_no_function_taken_for_pure_writes_to_what_it_is_given() -> None:
    x = torch.rand(3, 3) + 0.5
    tried = 0
    for owner in (torch, Tensor, torch._C._nn):
        for name in dir(owner):
            function = getattr(owner, name)
            if name.startswith("__") or not callable(function) or not is_pure(function):
                continue
            for args in ((x,), (x, x), (x, 1), (x, 0, 1), (x, x, x)):
                given = [a.clone() if isinstance(a, Tensor) else a for a in args]
                before = [a._version for a in given if isinstance(a, Tensor)]
                try:
                    function(*given)
                except Exception:
                    continue
                tried += 1
                now = [a for a in given if isinstance(a, Tensor)]
                assert [a._version for a in now] == before, name
                assert all(torch.equal(a, x) for a in now), name
    assert tried > 300
