"""Compiled paths: what is served by them, what is not, and that nobody sees a wrong guess."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import bendtrace as bt
from bendtrace.engine import compiled_path as path_module
from bendtrace.engine import speculation as speculation_module
from bendtrace.engine.compile_attempts import Backend, Shortcuts
from bendtrace.errors import CompileWarning, InputError
from tests.compiled.common import ALWAYS, assert_promise_with, states
from tests.compiled.models import Assigned, Experts, Gated, Layered, MaskedExperts
from tests.promise import bits, footprint, state
from tests.shares import some


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def bended_with(model: Any, backend: Any = "eager", **options: Any) -> bt.BendedModule:
    return bt.BendedModule(model, backend=backend, backend_options=ALWAYS | options)


def up_or_down(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


UP, DOWN = torch.ones(3), -torch.ones(3)


# Which calls are served


@pytest.mark.more
def test_paths_that_join_are_told_apart() -> None:
    """Both end in the same segment; what is compiled is the whole of each."""

    def model(x: Tensor) -> Tensor:
        x = x * 2 if x[0] > 0 else x * 3
        return x + 1 if x[1] > 0 else x - 1

    bended = bended_with(model)
    up, down, mixed = (torch.tensor(signs) for signs in ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0)))
    for x, calls in (up, 30), (down, 30), (mixed, 30), (up, 30):
        for _ in range(calls):
            assert bits(bended(x)) == bits(model(x))
    served = [row["hits"] for row in bended.compiled]
    assert len(served) == 3
    assert min(served) >= 10
    assert bended.compiled.failures <= 3 * 8


def test_a_path_is_compiled_when_it_was_taken_twice_and_serves_from_then_on() -> None:
    bended = bended_with(up_or_down)
    hits = []
    for _ in range(4):
        assert bits(bended(UP)) == bits(UP + 1)
        hits.append(bended.compiled.hits)
    assert hits == [0, 0, 1, 2]
    assert (bended.stats.traces, bended.stats.replays) == (1, 3)


def test_a_call_that_goes_another_way_is_served_otherwise_without_loss() -> None:
    bended = bended_with(up_or_down)
    for _ in range(3):
        bended(UP)
    assert bits(bended(DOWN)) == bits(DOWN - 1)
    assert bended.compiled.failures == 1
    assert (bended.stats.traces, bended.stats.retraces) == (2, 1)
    assert bits(bended(UP)) == bits(UP + 1)


def test_an_error_of_a_wrong_guess_is_not_seen() -> None:
    def picked(x: Tensor, index: Tensor) -> Tensor:
        return x[index] if index.max() < 3 else x

    bended = bended_with(picked)
    for _ in range(3):
        bended(UP, torch.tensor([1]))
    assert bits(bended(UP, torch.tensor([5]))) == bits(UP)
    row = bended.compiled.to_list()[0]
    assert row["failures"] == 1
    assert "out of bounds" in row["reason"]


def test_an_error_of_the_model_is_the_one_that_eager_raises() -> None:
    def picked(x: Tensor, index: Tensor) -> Tensor:
        return x[index] if x.sum() > 0 else x

    bended = bended_with(picked)
    for _ in range(3):
        bended(UP, torch.tensor([1]))
    with pytest.raises(IndexError) as wanted:
        picked(UP, torch.tensor([5]))
    with pytest.raises(IndexError) as given:
        bended(UP, torch.tensor([5]))
    assert str(given.value) == str(wanted.value)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_guess_prints_nothing_and_draws_nothing(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def divided(n: Tensor, by: Tensor) -> Tensor:
        return n % by if by != 0 else n

    bended = bended_with(divided, backend)
    for by in (2, 2, 2, 0):
        before = torch.get_rng_state()
        bended(torch.tensor([7]), torch.tensor([by]))
        assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    assert bended.compiled.failures == 1


def test_what_is_in_the_model_is_not_written_to_by_a_wrong_guess() -> None:
    model = Gated().eval()
    bended = bended_with(model, "aot_eager")
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(3):
            bended(x)
        versions = [p._version for p in model.parameters()]
        before, marks = state(model), footprint()
        for seed in range(6):
            other = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            assert bits(bended(other)) == bits(model(other))
        assert bended.compiled.failures > 0
        assert [p._version for p in model.parameters()] == versions
        assert (state(model), footprint()) == (before, marks)


# Numbers out of tensors


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (float("nan"), 1.0), (0.1, 0.2)])
def test_a_number_that_decides_is_compared_exactly(values: tuple[float, float]) -> None:
    def by_name(x: Tensor) -> Tensor:
        return x + len(str(x.item()))

    first, second = map(torch.tensor, values)
    bended = assert_promise_with(
        "eager", lambda: by_name, [lambda: ((first,), {})] * 5 + [lambda: ((second,), {})]
    )
    # The first call is not kept where a finalizer of something older happened to run in it.
    # A text made of a number is not compared as a tensor.
    assert bended.compiled.hits + len(bended.compiled.reasons) > 0


@pytest.mark.parametrize(("first", "second"), [(3, 4), (0.0, -0.0), (float("nan"), 0.5)])
def test_a_number_used_as_an_index_or_a_key_is_guarded_by_value(first: Any, second: Any) -> None:
    table = {"3": 1.0, "4": 2.0, "0.0": 3.0, "-0.0": 4.0, "nan": 5.0, "0.5": 6.0}

    def looked_up(x: Tensor) -> Tensor:
        return x * table[repr(float(x)) if x.is_floating_point() else repr(int(x))]

    def call(value: Any) -> Callable[[], Any]:
        return lambda: ((torch.tensor(value),), {})

    bended = assert_promise_with("eager", lambda: looked_up, [call(first)] * 4 + [call(second)] * 2)
    assert (bended.compiled.hits, bended.compiled.failures) == (2, 2)


def test_arithmetic_of_numbers_that_decides_is_exact() -> None:
    def large(n: Tensor) -> Tensor:
        return n + 1 if n.item() * n.item() < 100 else n - 1

    # In 64 bits the square of this is negative, in Python it is not.
    big = torch.tensor(3037000500)
    calls = [lambda: ((torch.tensor(5),), {})] * 3 + [lambda: ((big,), {})] * 2
    bended = assert_promise_with("eager", lambda: large, calls)
    assert (bended.compiled.hits, bended.compiled.failures) == (1, 2)


def test_a_number_is_given_out_as_the_number_it_is() -> None:
    def described(x: Tensor) -> tuple[Tensor, float, int]:
        return (x * 2 if x.sum() > 0 else x), x.max().item(), x.shape[0]

    bended = bended_with(described)
    for size in (3, 3, 3, 4, 5):
        x = torch.rand(size)
        assert bits(bended(x)) == bits(described(x))
    assert bended.compiled.hits >= 1
    assert bended.stats.traces == 1


# What comes out


@pytest.mark.more
def test_objects_that_were_there_before_are_given_out_themselves() -> None:
    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.drop = nn.Dropout()

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = x * self.weight
            return {"x": x, "w": self.weight, "y": y, "again": y, "dropped": self.drop(x)}

    model = Handing().eval()
    bended = bended_with(model, "aot_eager")
    for _ in range(4):
        out = bended(UP)
    assert bended.compiled.hits == 2
    assert out["x"] is UP
    assert out["dropped"] is UP
    assert out["w"] is model.weight
    assert out["again"] is out["y"]


def test_objects_are_built_as_the_model_builds_them() -> None:
    @dataclasses.dataclass
    class Result:
        value: Tensor
        parts: list[Tensor]

    def split(x: Tensor) -> Result:
        return Result(x.relu() if x.sum() > 0 else x, list(x.unbind()))

    bended = bended_with(split)
    for _ in range(4):
        out = bended(UP)
    assert bended.compiled.hits == 2
    assert bits(out) == bits(split(UP))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_results_share_memory_as_the_model_s_do(backend: str) -> None:
    def views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return x[1:], y, y[:1]

    bended = bended_with(views, backend)
    for _ in range(4):
        x = torch.ones(3)
        of_x, y, of_y = bended(x)
        x[1], y[0] = 7.0, 8.0
        assert (of_x[0], of_y[0]) == (7.0, 8.0)
    assert bended.compiled.hits == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensors_of_the_run_are_changed_in_place(backend: str) -> None:
    def filled(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[1:] += x[:-1]
        if out.sum() > 0:
            out.mul_(2)
        return out

    bended = assert_promise_with(backend, lambda: filled, [lambda: ((UP.clone(),), {})] * 5)
    assert bended.compiled.hits == 3


def test_a_tensor_that_may_be_the_argument_itself_is_not_written_to_by_a_guess() -> None:
    def changed(x: Tensor, y: Tensor) -> Tensor:
        rows = x.contiguous()
        rows.add_(1)
        return rows if y.sum() > 0 else rows - 1

    square = torch.arange(9.0).reshape(3, 3)

    def across() -> Any:
        return (square.clone().t(), UP), {}

    def along() -> Any:
        return (square.clone(), UP), {}

    def along_and_down() -> Any:
        return (square.clone(), DOWN), {}

    bended = assert_promise_with(
        "aot_eager", lambda: changed, [*[across] * 4, along, along_and_down, along, across]
    )
    assert bended.compiled.hits == 3


# Sizes


def test_other_sizes_are_served_by_the_same_path() -> None:
    bended = bended_with(up_or_down)
    for size in (3, 3, 3, 4, 5, 6, 7, 8, 9, 10):
        x = torch.ones(size)
        assert bits(bended(x)) == bits(x + 1)
    row = bended.compiled.to_list()[0]
    assert bended.stats.traces == 1
    assert row["graphs"] == 2  # the second one for any size
    assert row["hits"] == 7  # all but the trace, and the calls that compiled


def test_a_path_that_branched_off_has_input_guards_of_its_own() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1 if x.shape[0] < 4 else x - 2

    bended = bended_with(model)
    for size in (3, 3, 3, 2, 2, 2, 5, 3, 6, 3):
        for x in (torch.ones(size), *[-torch.ones(size)] * 3):
            assert bits(bended(x)) == bits(model(x))
    assert bended.compiled.to_list()[0]["graphs"] == 2
    assert bended.compiled.hits > 10


def test_a_path_knows_nothing_of_the_sizes_of_other_paths() -> None:
    symbols: list[Any] = []

    def watching(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbols.extend(value for value in inputs if not isinstance(value, Tensor))
        return graph.forward

    for size in (3, 4):
        bended = bended_with(lambda x: x * 2 if x.sum() > 0 else x, watching)
        for _ in range(3):
            bended(torch.ones(size))
        assert bended.compiled.hits == 1
    assert symbols == []


def test_when_torch_compile_compiles_no_more_calls_are_replayed() -> None:
    bended = bended_with(up_or_down, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (3, 3, 3, 4, 5, 4):
            x = torch.ones(size)
            assert bits(bended(x)) == bits(x + 1)
    assert states(bended) == ["not compiled"]
    assert "recompile_limit" in bended.compiled.reasons[0]


@pytest.mark.more
def test_a_size_that_depends_on_values_is_counted_anew() -> None:
    def compared(x: Tensor) -> Tensor:
        rows = (x > 0).nonzero().squeeze(1)
        return x[rows] * 2 if len(rows) > 2 else x

    few, many = torch.tensor([1.0, 1, -1, -1]), torch.tensor([1.0, 1, 1, -1])
    calls = [lambda: ((many,), {})] * 3 + [lambda: ((few,), {}), lambda: ((UP,), {})]
    for backend in ("eager", "aot_eager"):
        bended = assert_promise_with(backend, lambda: compared, calls)
        assert bended.compiled.hits >= 1
        assert bended.compiled.failures == 1


def test_a_size_that_is_used_as_a_number_has_to_be_as_it_was() -> None:
    def padded(x: Tensor) -> Tensor:
        rows = (x > 0).nonzero().squeeze(1)
        return x[rows] + torch.arange(float(len(rows))) if len(rows) else x

    three, two = torch.tensor([1.0, 1, 1, -1]), torch.tensor([1.0, -1, 1, -1])
    # torch.compile asserts the number in its graph, and autograd's compiler loses that.
    for backend in ("eager", "aot_eager"):
        bended = assert_promise_with(
            backend, lambda: padded, [lambda: ((three,), {})] * 4 + [lambda: ((two,), {})] * 2
        )
        assert (bended.compiled.hits, bended.compiled.failures) == (2, 2)


def test_a_size_that_the_code_takes_for_granted_has_to_be_as_it_was() -> None:
    def added(x: Tensor) -> Tensor:
        return x[x > 0] + x[:2]

    two, other = torch.tensor([1.0, -1, 2]), torch.tensor([1.0, -1, -2])
    bended = assert_promise_with(
        "aot_eager", lambda: added, [lambda: ((two,), {})] * 4 + [lambda: ((other,), {})] * 2
    )
    assert (bended.compiled.hits, bended.compiled.failures) == (2, 2)


@pytest.mark.parametrize("model", [Experts, MaskedExperts, Assigned, Layered])
@pytest.mark.parametrize("backend", some(["eager", "aot_eager"], 2))
def test_mixtures_of_experts_are_served_whoever_takes_how_many_rows(
    model: type[nn.Module], backend: str
) -> None:
    def call(seed: int) -> Callable[[], Any]:
        return lambda: ((torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)),), {})

    bended = assert_promise_with(backend, model, map(call, range(8)))
    assert bended.compiled.hits == 6


# The model changes


def test_parameters_may_be_changed_replaced_and_moved() -> None:
    model = Gated(2).eval()
    bended = bended_with(model, "aot_eager")
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(3):
            assert bits(bended(x)) == bits(model(x))
        served = bended.compiled.hits
        model.layers[0].weight.add_(0.25)
        assert bits(bended(x)) == bits(model(x))
        assert bended.compiled.hits + bended.compiled.failures == served + 1
        model.layers[1].weight = nn.Parameter(torch.randn(8, 8))
        assert bits(bended(x)) == bits(model(x))
        model.layers[1].weight.data = torch.randn(8, 8).t()
        assert bits(bended(x)) == bits(model(x))
        model.layers[0].weight.requires_grad_(False)
        assert bits(bended(x)) == bits(model(x))
        model.double()
        assert bits(bended(x.double())) == bits(model(x.double()))
        model.float()
        assert bits(bended(x)) == bits(model(x))


def test_modes_of_the_model_and_of_torch_have_paths_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    bended = bended_with(model)
    for mode in (False, True, False):
        model.train(mode)
        for _ in range(4):
            torch.manual_seed(0)
            wanted = model(UP)
            torch.manual_seed(0)
            assert bits(bended(UP)) == bits(wanted)
    assert states(bended) == ["used", "not compiled"]
    assert "random numbers" in bended.compiled.reasons[0]
    with torch.no_grad():
        assert not bended.eval()(UP).requires_grad


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_calls_in_other_modes_are_served_in_them(backend: str, mode: Any) -> None:
    x = torch.randn(2, 8)
    bended = assert_promise_with(backend, lambda: Gated(2), [lambda: ((x,), {})] * 4, mode)
    assert bended.compiled.hits == 2, bended.compiled


def test_what_is_forgotten_by_the_tree_is_not_kept_alive() -> None:
    bended = bt.BendedModule(
        lambda x, n: x * 2 if n > 3 else x, max_traces=1, backend="eager", backend_options=ALWAYS
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bt.errors.TraceLimitWarning)
        for number in range(8):
            bended(UP, number % 2 * 9)
    gc.collect()
    assert len(bended._dispatcher.speculation._windows) <= 1


@pytest.mark.more
def test_gradients_are_those_of_eager_and_a_wrong_guess_leaves_none() -> None:
    model, twin = Gated(2), Gated(2)
    twin.load_state_dict(model.state_dict())
    bended = bended_with(model, "aot_eager")
    served = 0
    for seed in (0, 0, 0, 0, 1, 2, 3, 0):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        for module, given in ((bended, x), (twin, y)):
            module.zero_grad()
            module(given).square().sum().backward()
        assert bits(x.grad) == bits(y.grad)
        assert bits([p.grad for p in model.parameters()]) == bits(
            [p.grad for p in twin.parameters()]
        )
        served = bended.compiled.hits
    assert served >= 3
    assert bended.compiled.failures > 0


# Who leads


class Heads(nn.Module):
    """Two results, of which one depends on more parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        if x.sum() > 0:
            h = h * 2
        return h, self.head(h), h.view(-1), x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_the_loss_does_not_depend_on_gets_no_gradient(backend: str) -> None:
    eager, model = Heads(), Heads()
    model.load_state_dict(eager.state_dict())
    bended = bended_with(model, backend)
    for number in range(12):
        x = torch.rand(2, 3, requires_grad=bool(number % 2))
        found: list[Any] = []
        for called, owner in ((eager, eager), (bended, model)):
            owner.zero_grad()
            given = x.detach().clone().requires_grad_(x.requires_grad)
            results = called(given)
            chosen = [[0], [1], [2], [0, 1]][number // 2 % 4]
            sum(results[slot].sum() for slot in chosen).backward()
            found.append([given.grad, *(p.grad for p in owner.parameters())])
        assert bits(found[1]) == bits(found[0])
        assert (model.head.weight.grad is None) == (chosen in ([0], [2]))
    assert bended.compiled.hits >= 6


def test_a_path_that_fails_often_is_demoted_and_leads_again_when_it_is_taken_again() -> None:
    bended = bended_with(up_or_down)
    for _ in range(3):
        bended(UP)
    for _ in range(8):
        assert bits(bended(DOWN)) == bits(DOWN - 1)
    # Half of the latest calls have taken the other path by now, which leads in its place.
    assert states(bended) == ["demoted", "used"]
    assert bended.compiled.failures == 8
    hits = bended.compiled.hits
    bended(DOWN)
    assert bended.compiled.hits == hits + 1
    for _ in range(20):
        assert bits(bended(UP)) == bits(UP + 1)
    assert states(bended) == ["used", "demoted"]
    assert bended.compiled.to_list()[0]["hits"] > 1


def test_a_path_that_is_no_faster_than_its_replay_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(speculation_module, "now", lambda arguments: now[0])
    for costs, state_ in ((3.0, "slower"), (1.0, "used")):
        bended = bt.BendedModule(up_or_down, backend="eager")
        for _ in range(2):
            bended(UP)
        path = next(iter(bended._dispatcher.speculation._paths.values()))
        attempt = path.attempt

        def counted(*arguments: Any, attempt: Any = attempt, costs: float = costs) -> Any:
            now[0] += costs
            return attempt(*arguments)

        path.attempt = counted  # type: ignore[method-assign]
        tree = bended._trees.plain
        replay = tree.replay

        def replayed(*args: Any, replay: Any = replay) -> Any:
            now[0] += 2.0
            return replay(*args)

        tree.replay = replayed  # type: ignore[method-assign]
        for _ in range(20):
            assert bits(bended(UP)) == bits(UP + 1)
        assert states(bended) == [state_]
        assert bended.compiled.to_list()[0]["speed"] == 2.0 / costs


def test_no_more_paths_are_compiled_than_wanted() -> None:
    def by_rank(x: Tensor) -> Tensor:
        return x + x.dim()

    bended = bended_with(by_rank, max_paths=1)
    for rank in (1, 2):
        for _ in range(3):
            bended(torch.ones([2] * rank))
    assert states(bended) == ["used"]


# Backends


def off_by_one(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return tuple(
            item + 1 if item.is_floating_point() else item for item in graph.forward(*args)
        )

    return run


def test_a_graph_that_gives_something_else_than_the_replay_is_not_used() -> None:
    bended = bended_with(up_or_down, off_by_one)
    for _ in range(4):
        assert bits(bended(UP)) == bits(UP + 1)
    assert states(bended) == ["not compiled"]
    assert bended.compiled.reasons == ("compiled, results are 1 apart, with values up to 2",)


def turned(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        made = graph.forward(*args)
        return tuple(v.t().contiguous().t() if v.dim() == 2 else v for v in made)

    return run


def test_results_are_laid_out_in_memory_as_the_model_s() -> None:
    bended = bended_with(up_or_down, turned)
    for size in (3, 3, 3, 3, 4, 4, 5, 5):
        x = torch.ones(2, size)
        assert bits(bended(x)) == bits(x + 1)
    assert bended.compiled.hits >= 4


def only(number: int, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a backend of which only one graph, by its number, gives something else."""
    graphs = itertools.count(1)

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if next(graphs) != number:
            return graph.forward
        return lambda *args: tuple(map(change, graph.forward(*args)))

    return backend


def test_results_of_each_graph_are_laid_out_by_themselves() -> None:
    backend = only(1, lambda v: v.t().contiguous().t() if v.dim() == 2 else v)
    bended = bended_with(up_or_down, backend, dynamic=False)
    rows, columns = torch.ones(2, 3), torch.ones(3, 2).t()
    for x in (rows, rows, rows, columns, columns, columns, rows, columns, rows):
        assert bits(bended(x)) == bits(x + 1)
    (row,) = bended.compiled
    assert (row["graphs"], row["hits"]) == (2, 6)


def test_a_graph_made_by_a_wrong_guess_is_compared_before_it_is_used() -> None:
    backend = only(2, lambda v: v + 1 if v.is_floating_point() else v)
    bended = bended_with(up_or_down, backend, dynamic=False)
    for x in (UP, UP, UP, -torch.ones(5), -torch.ones(5), UP, UP, torch.ones(5), torch.ones(5)):
        assert bits(bended(x)) == bits(up_or_down(x))
    assert states(bended) == ["not compiled"]
    assert bended.compiled.reasons == ("compiled, results are 1 apart, with values up to 2",)


def broken(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    raise OSError("no compiler")


def test_a_backend_that_does_not_work_is_warned_of_once() -> None:
    bended = bended_with(up_or_down, broken)
    bended(UP)
    with pytest.warns(CompileWarning, match="the backend broken failed.*no compiler"):
        assert bits(bended(UP)) == bits(UP + 1)
    for _ in range(3):
        assert bits(bended(DOWN)) == bits(DOWN - 1)
    assert bended.compiled.hits == 0


@pytest.mark.all
def test_compiling_leaves_the_checks_of_distributions_on() -> None:
    # In a process of its own: torch.compile switches them off when it is first used.
    script = """
import torch, bendtrace as bt
bended = bt.BendedModule(lambda x: x * 2, backend="eager")
for _ in range(4):
    bended(torch.ones(2))
print(bended.compiled.hits, bended.stats.traces, torch.distributions.Distribution._validate_args)
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.split() == ["2", "1", "True"]


def test_what_makes_no_sense_is_refused_at_the_door() -> None:
    def refused(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(InputError, match=match):
            bt.BendedModule(up_or_down, *args, **kwargs)

    refused("no backend 'inducter'; did you mean 'inductor'", backend="inducter")
    refused("3 is neither", backend=3)
    refused("without a backend", backend_options={"mode": "default"})
    refused("no 'dynamics'.*'dynamic'", backend="eager", backend_options={"dynamics": True})
    refused("no mode 'reduce'.*reduce-overhead", backend="inductor",
            backend_options={"mode": "reduce"})  # fmt: skip
    refused("inductor's", backend="eager", backend_options={"mode": "default"})
    refused("not both", backend="inductor", backend_options={"mode": "default", "options": {}})
    refused("max_paths", backend="eager", backend_options={"max_paths": 0})
    refused("drop_slower", backend="eager", backend_options={"drop_slower": 1})
    refused("dynamic has to be", backend="eager", backend_options={"dynamic": "yes"})
    refused("cuda_graphs is inductor's", backend="eager", backend_options={"cuda_graphs": True})


def test_copies_have_the_backend_and_no_compiled_paths() -> None:
    bended = bended_with(Gated(1).eval(), max_paths=3)
    x = torch.ones(2, 8)
    for _ in range(3):
        bended(x)
    for made in (copy.deepcopy(bended), pickle.loads(pickle.dumps(bended))):
        assert made.compiled.backend == "eager"
        assert made._dispatcher.speculation.settings == bended._dispatcher.speculation.settings
        assert len(made.compiled) == 0
        for _ in range(3):
            assert bits(made(x)) == bits(bended(x))
        assert made.compiled.hits == 1


# Who else looks on


def test_who_watches_each_operation_sees_each_operation() -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **kwargs or {})

    bended = bended_with(up_or_down)
    for _ in range(3):
        bended(UP)
    assert bended.compiled.hits == 1
    with Counting() as mode:
        bended(UP)
    assert mode.seen >= 3
    assert bended.compiled.hits == 1
    kept: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for _ in range(4):
            bended(x * 2)
    assert bended.compiled.hits == 1
    assert torch.vmap(bended_with(torch.sin))(torch.ones(2, 2)).shape == (2, 2)


def kernels(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile as inductor does where no gradients are wanted: to code that sees memory only."""
    return lambda *args: graph.forward(*(value.detach() for value in args))


def test_forward_mode_derivatives_are_those_of_eager() -> None:
    bended = bended_with(up_or_down, kernels)
    for _ in range(3):
        bended(UP)
    assert bended.compiled.hits == 1
    with forward_ad.dual_level():
        for _ in range(2):
            given = bended(forward_ad.make_dual(UP, 3 * UP))
            made = forward_ad.unpack_dual(given)
            assert bits(made.primal) == bits(UP + 1)
            assert made.tangent is not None
            assert bits(made.tangent) == bits(3 * UP)
    assert bended.compiled.hits == 1
    bended(UP)
    assert bended.compiled.hits == 2


def test_threads_are_served_side_by_side() -> None:
    bended = bended_with(up_or_down)
    wrong: list[Any] = []

    def run(seed: int) -> None:
        for number in range(30):
            x = UP * (number + 1) * (1 if (number + seed) % 5 else -1)
            if not torch.equal(bended(x), up_or_down(x)):
                wrong.append(x)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What torch's internals are relied on for


def test_torch_s_own_guards_on_tensors_can_be_asked() -> None:
    bended = bended_with(up_or_down)
    for _ in range(3):
        bended(UP)
    path = next(iter(bended._dispatcher.speculation._paths.values()))
    assert isinstance(path._function, Shortcuts)
    assert len(path._function._shortcuts) == 1
    known = path._function._shortcuts[0]
    assert known.fits((torch.zeros(3),))
    for other in (torch.zeros(4), torch.zeros(6)[::2], torch.zeros(3).double(),
                  torch.zeros(3, requires_grad=True), nn.Parameter(torch.zeros(3))):  # fmt: skip
        assert not known.fits((other,))


def test_a_tensor_that_is_given_twice_has_a_shortcut_of_its_own() -> None:
    backend = Backend(lambda graph, inputs: graph.forward)
    ways = torch.compile(lambda a, b, n: (None, [a + b * n]), backend=backend)
    shortcuts = Shortcuts(ways, backend)
    one, other = torch.ones(3), torch.full((3,), 2.0)
    for given in ((one, one, 3), (one, one, 3), (other, other, 3), (one, other, 3), (one, one, 3)):
        known = shortcuts.find(given)
        result = shortcuts(*given) if known is None else known.call(given)
        assert result is not None
        assert torch.equal(result.made[0], given[0] + given[1] * given[2])
    twice, apart = reversed(shortcuts._shortcuts)
    assert twice.fits((other, other, 3))
    assert not twice.fits((one, other, 3))
    assert not twice.fits((one, one, 4))
    assert apart.fits((other, one, 3))
    assert not apart.fits((one, one, 3))


def test_a_variable_of_the_environment_is_asked_for_before_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(x: Tensor) -> Tensor:
        scaled = x.relu() * float(os.environ.get("BENDTRACE_SCALE", "1"))
        return scaled.sin() if scaled.sum() > 0 else scaled

    bended, x = bended_with(model), torch.ones(4)
    for number, value in enumerate((None, None, None, None, "2", None, "2", "3", None)):
        if value is None:
            monkeypatch.delenv("BENDTRACE_SCALE", raising=False)
        else:
            monkeypatch.setenv("BENDTRACE_SCALE", value)
        assert torch.equal(bended(x), model(x))
        if number == 3:
            assert bended.compiled.hits == 2
    (row,) = bended.compiled
    assert (row["state"], row["hits"], row["failures"]) == ("used", 4, 3)


def test_the_report_says_why_paths_are_not_compiled() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    bended = bended_with(Counting())
    assert repr(bended.compiled).startswith(
        "eager: no path was taken often enough so far\n\nno seg"
    )
    for _ in range(3):
        bended(UP)
    assert bended.calls == 3
    assert "writes to what was there before the run" in bended.compiled.reasons[0]
    assert "not compiled" in repr(bended.compiled)
    assert repr(bt.BendedModule(up_or_down).compiled).startswith("no backend")
    assert path_module.CompileState.USED.value == "used"
