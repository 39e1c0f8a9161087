"""Segments with compiled ops: what calls of new combinations are served by."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import bendtrace as bt
from bendtrace.engine import speculation as segments_module
from bendtrace.engine import speculation as speculation_module
from bendtrace.errors import CompileWarning, InputError
from tests.compiled.common import ALWAYS, assert_promise_with
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import Inputs, bits
from tests.shares import some


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def _only_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile no path, and what a segment has at the second call that passes it."""

    def look_at_segments(self: Any, names: Any, program: Any, *_: object) -> None:
        self._look_at_segments(program, speculation_module._NONE)

    monkeypatch.setattr(segments_module, "_PASSES", 1)
    monkeypatch.setattr(segments_module, "_FEWEST", 1)
    monkeypatch.setattr(speculation_module, "_EVERY", 1)
    monkeypatch.setattr(speculation_module.Speculation, "_compile", look_at_segments)


class Layers(nn.Module):
    """Equal layers that each choose."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = h.relu() + x if h[0, 0] > 0 else torch.tanh(h) - x
        return x


def combinations(batch: int = 2) -> Iterator[Inputs]:
    """Yield inputs for which `Layers` goes many ways."""
    for seed in range(64):
        yield (torch.randn(batch, 8, generator=torch.Generator().manual_seed(seed)),), {}


def compiled(model: Any, backend: Any = "eager", **options: Any) -> bt.BendedModule:
    return bt.BendedModule(model, backend=backend, backend_options=ALWAYS | options)


def hits(bended: bt.BendedModule) -> int:
    return sum(row["hits"] for row in bended.compiled.segments)


# Whole programs, with every segment compiled


@pytest.mark.usefixtures("_only_segments")
@pytest.mark.parametrize("case", some(CASES, 20, start=9), ids=lambda case: case.name)
def test_corpus_gives_what_eager_gives(case: Case) -> None:
    calls = [path for path in case.paths.values() for _ in range(3)]
    assert_promise_with("eager", case.make, [*calls, *case.paths.values()])


@pytest.mark.usefixtures("_only_segments")
@pytest.mark.parametrize(
    "case",
    # AOTAutograd puts other operators in the place of `interpolate`, which have other bits.
    some([case for case in CASES if case.name != "interpolate_to_skip"], 40, start=3),
    ids=lambda case: case.name,
)
def test_corpus_gives_what_eager_gives_through_autograd_s_compiler(case: Case) -> None:
    calls = [path for path in case.paths.values() for _ in range(3)]
    assert_promise_with("aot_eager", case.make, [*calls, *case.paths.values()], torch.enable_grad)


@torch.library.custom_op("tests_segments::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Add noise."""
    return x + torch.rand(8)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator of others": noisy,
    "a script": torch.jit.trace(lambda x: x + torch.rand(8), torch.ones(2, 8), check_trace=False),
    "an overload": torch.ops.aten.poisson.default,
}


@pytest.mark.usefixtures("_only_segments")
@pytest.mark.parametrize("case", DRAWING)
def test_what_draws_random_numbers_stays_outside(case: str) -> None:
    def model(x: Tensor) -> Tensor:
        x = x.abs() if x.sum() > 0 else x * 0
        return DRAWING[case](x + 1) * 2 - 1

    bended = compiled(model)
    for number, ((x,), _) in enumerate(combinations()):
        torch.manual_seed(number)
        wanted, state = bits(model(x)), torch.get_rng_state()
        torch.manual_seed(number)
        assert bits(bended(x)) == wanted
        assert torch.equal(torch.get_rng_state(), state)
        if number == 12:
            break
    assert hits(bended) > 2


# What serves a stream of combinations


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.more
def test_combinations_are_served_by_compiled_segments(mode: type) -> None:
    calls = [lambda made=made: made for made in combinations()]
    bended = assert_promise_with("aot_eager", Layers, calls, mode)
    assert bended.stats.traces <= 14
    assert bended.compiled.hits <= 8
    assert hits(bended) > 100


def test_layers_that_are_alike_share_what_is_compiled() -> None:
    bended, model = compiled(Layers(6)), Layers(6)
    bended.load_state_dict(model.state_dict())
    for args, _ in combinations():
        assert bits(bended(*args)) == bits(model(*args))
    texts = {row["functions"] for row in bended.compiled.segments}
    assert len(bended.compiled.segments) <= 8  # and not two for each layer
    assert ("relu", "add", "linear", "__getitem__", "gt") in texts


def test_rounds_of_a_loop_share_what_is_compiled() -> None:
    def halved(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x * 0.5 + x.sin() * 0.01
        return x + 1

    bended = compiled(halved)
    for seed in range(120):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed)) * 4 ** (seed % 5)
        assert bits(bended(x)) == bits(halved(x))
    rows = [row for row in bended.compiled.segments if "sin" in row["functions"]]
    assert len(rows) <= 2
    assert max(row["hits"] for row in rows) > 100


def test_a_path_that_most_calls_take_is_compiled_as_a_whole() -> None:
    bended = compiled(Layers(2))
    for _ in range(40):
        bended(torch.ones(2, 8))
    assert bended.compiled.hits == 38
    assert bended.compiled.segments == []


@pytest.mark.all
def test_other_sizes() -> None:
    model = Layers()
    bended = compiled(model, "aot_eager")
    for batch in (2, 3, 5, 2):
        for args, _ in combinations(batch):
            with torch.no_grad():
                assert bits(bended(*args)) == bits(model(*args))
    assert hits(bended) > 400
    assert all(row["state"] == "used" for row in bended.compiled.segments)


# What is not compiled


@pytest.mark.more
def test_random_numbers_and_state_are_as_in_eager() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            for i in range(3):
                if x[i] > 0:
                    x = nn.functional.dropout(x.sin().cos() * 2, 0.5) + 0.1
                else:
                    x = torch.rand_like(x) + (x.cos().exp() - 1).abs()
            return x

    def given(seed: int) -> Inputs:
        return (torch.randn(3, generator=torch.Generator().manual_seed(seed)),), {}

    calls = [lambda seed=seed: given(seed) for seed in range(120)]
    bended = assert_promise_with("aot_eager", Noisy, calls)
    assert hits(bended) > 100
    assert not any("dropout" in row["functions"] for row in bended.compiled.segments)


@pytest.mark.more
def test_sizes_that_depend_on_values_stay_outside() -> None:
    def picked(x: Tensor) -> Tensor:
        for i in range(4):
            if x[i] > 0:
                rows = x[x > x.mean()]
                x = x * rows.sum() + rows.numel() + (rows.sin() * 2).exp().sum()
            else:
                x = (x.sin() + 1).roll(1) - x.nonzero().shape[0]
        return x

    bended = compiled(picked)
    for seed in range(150):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert bits(bended(x)) == bits(picked(x))
    functions = [name for row in bended.compiled.segments for name in row["functions"]]
    assert "nonzero" not in functions
    assert hits(bended) > 100


@pytest.mark.more
@pytest.mark.parametrize("sign", some([1, -1], 2))
def test_a_tensor_that_is_given_twice(sign: int) -> None:
    """A graph that was made for one tensor, given twice, is not right for two."""

    def model(x: Tensor) -> Tensor:
        for i in range(5):
            y = nn.functional.dropout(x, 0.5, False) if x[i] * sign > 0 else x * 2
            x = (x * 3 - y).sin() + 0.1 if x[i + 1] + y[i + 1] > 0 else (y * 3 - x).cos() - 0.1
        return x

    bended = compiled(model, "aot_eager")
    for seed in range(150):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert bits(bended(x)) == bits(model(x))
    assert hits(bended) > 200


@pytest.mark.all
def test_writes_are_done_once() -> None:
    def model(x: Tensor) -> Tensor:
        x = x + 0
        for i in range(5):
            y = x.sin() * 2 if x[i] > 0 else x.cos() * 3
            if y[i] > 0.5:
                x.add_(y).mul_(0.5)
            x = x + y
        return x

    bended = compiled(model)
    for seed in range(150):
        x = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert bits(bended(x)) == bits(model(x))
    assert hits(bended) > 200
    functions = [name for row in bended.compiled.segments for name in row["functions"]]
    assert "add_" not in functions


@pytest.mark.all
def test_sizes_that_are_used_again_behind_a_question() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(5):
            y = torch.cat((x, x * 2), 1)
            size = y.shape[1] // 2
            y = y.reshape(size, -1).sin()
            x = y.reshape(-1, size)[:2] * size if y[0, 0] > 0 else y.reshape(2, -1)[:, :size].cos()
        return x

    bended = compiled(model)
    for size in 4, 6:
        for seed in range(100):
            x = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
            assert bits(bended(x)) == bits(model(x))
    assert hits(bended) > 200
    rows = bended.compiled.segments
    assert any(row["hits"] for row in rows if {"floordiv", "cat"} <= {*row["functions"]})


def test_a_compiler_that_is_wrong_is_found_out() -> None:
    def wrong(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(tensor + 1 for tensor in graph(*args))

    model = Layers()
    bended = compiled(model, wrong)
    with torch.no_grad():
        for args, _ in combinations():
            assert bits(bended(*args)) == bits(model(*args))
    assert hits(bended) == 0
    rows = [row for row in bended.compiled.segments if row["graphs"]]
    assert {row["state"] for row in rows} == {"not compiled"}
    assert all(row["reason"].startswith("compiled, ") for row in rows)


@pytest.mark.more
def test_a_compiler_that_raises_is_told_of() -> None:
    def failing(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise ValueError("no such chip")

    model = Layers()
    bended = compiled(model, failing)

    def call() -> None:
        for args, _ in combinations():
            assert bits(bended(*args)) == bits(model(*args))

    with pytest.warns(CompileWarning, match="no such chip"):
        call()
    assert "no such chip" in repr(bended.compiled)


def kept_boxes(boxes: Tensor, scores: Tensor, by_number: bool) -> Tensor:
    """The boxes that NMS keeps."""
    order, keep = scores.argsort(descending=True), []
    while order.numel() > 1:
        first, rest = order[:1], order[1:]
        corner = boxes[order[0], :2] if by_number else boxes.index_select(0, first)[:, :2]
        keep.append(first)
        order = rest[(corner - boxes[rest, :2]).abs().sum(-1) > 1.0]
    return torch.cat([*keep, order])


@pytest.mark.parametrize("by_number", [True, False])
def test_a_number_that_a_compiler_would_have_to_know_is_named(by_number: bool) -> None:
    bended = bt.BendedModule(kept_boxes, backend="aot_eager")
    assert repr(bended.compiled).endswith(
        "no segments: they are looked at every 16 calls, where whole paths do not serve the calls"
    )
    with torch.no_grad():
        for number in range(33):
            torch.manual_seed(number % 5)
            args = torch.randn(6, 4), torch.rand(6), by_number
            assert bits(bended(*args)) == bits(kept_boxes(*args))
    report = bended.compiled
    assert not report.without
    assert "specialized integer" not in repr(report)
    refused = [row for row in report.segments if row["state"] == "not compiled"]
    assert bool(refused) is by_number
    for row in refused:
        assert re.fullmatch(
            r"torch\.compile would have to know a number that depends on values \(at "
            r"\S+test_compiled_segments\.py:\d+: `boxes\[order\[0\], :2\]`\); its ops are "
            r"replayed\. They can be compiled .* x\.index_select\(0, i\.reshape\(1\)\) in the "
            r"place of x\[i\]",
            row["reason"],
        )
        assert row["reason"] in repr(report)
        assert "Could not extract specialized integer" in row["raised"]
    line = kept_boxes.__code__.co_firstlineno
    for reason in report.reasons:
        assert "AssertionError" not in reason
        if "index gives" in reason:
            assert int(re.search(r"segments\.py:(\d+): `", reason)[1]) > line  # type: ignore[index]


@pytest.mark.all
def test_what_is_slower_is_left_out() -> None:
    def slow(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            for _ in range(200):
                torch.ones(10).sum()
            return graph(*args)

        return run

    model = Layers()
    bended = compiled(model, slow, drop_slower=True)
    for _ in range(3):
        for args, _kwargs in combinations():
            assert bits(bended(*args)) == bits(model(*args))
    assert {row["state"] for row in bended.compiled.segments} == {"slower"}
    assert len(bended.compiled.segments) <= 6  # and not each part of each again
    program = next(bended._dispatcher._trees.plain.programs())
    assert program.graph is not None
    assert not any("made" in exit.compiled.text for exit in program.graph.exits() if exit.compiled)


@pytest.mark.all
def test_max_segments() -> None:
    model = Layers()
    for most in 0, 2:
        bended = compiled(model, max_segments=most)
        for args, _ in combinations():
            assert bits(bended(*args)) == bits(model(*args))
        assert len(bended.compiled.segments) == most
        assert bended.compiled.without == ("max_segments=0" if most == 0 else "")
    with pytest.raises(InputError, match="max_segments has to be a non-negative int, not -1"):
        compiled(model, max_segments=-1)


# What never sees them


def nearly(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile to what is off by less than a compiler may be."""
    return lambda *args: tuple(t * (1 + 1e-5) if t.is_floating_point() else t for t in graph(*args))


@pytest.mark.more
def test_replays_of_traces_and_insertions_are_the_model_s_own_bits() -> None:
    model = Layers()
    bended = compiled(model, nearly)
    with torch.no_grad():
        for args, _ in combinations():
            torch.testing.assert_close(bended(*args), model(*args), rtol=1e-2, atol=1e-2)
        assert hits(bended) > 100
        wanted, given = model(*args), bended(*args)
        assert bits(given) != bits(wanted)  # it was compiled
        assert bits(bended.trace(*args).replay(*args)) == bits(wanted)
        with bended.interject("relu", lambda value: value):
            assert bits(bended(*args)) == bits(wanted)


@pytest.mark.more
def test_an_error_is_the_model_s() -> None:
    def model(x: Tensor, index: Tensor) -> Tensor:
        for i in range(3):
            y = x.sin() + 1 if x[i] > 0 else x.cos() - 1
            x = x + y[index].sum()
        return x

    bended = compiled(model)
    for seed in range(60):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        assert bits(bended(x, torch.tensor([3]))) == bits(model(x, torch.tensor([3])))
    assert hits(bended) > 60
    for function in model, bended:
        with pytest.raises(IndexError, match="index 9 is out of bounds"):
            function(x, torch.tensor([9]))
    assert bits(bended(x, torch.tensor([1]))) == bits(model(x, torch.tensor([1])))


@pytest.mark.all
def test_threads() -> None:
    model = Layers()
    bended = compiled(model, "aot_eager")
    inputs = [args for args, _ in combinations()]
    wanted = [bits(model(*args)) for args in inputs]
    for args in inputs[:12]:  # so that they record one program, and not one each
        bended(*args)
    wrong: list[int] = []

    def call(start: int) -> None:
        for i in range(len(inputs)):
            at = (start + 7 * i) % len(inputs)
            if bits(bended(*inputs[at])) != wanted[at]:
                wrong.append(at)

    threads = [threading.Thread(target=call, args=(16 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert hits(bended) > 100
