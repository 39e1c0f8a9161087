"""Calls with insertions on compiled paths: the same bits, reports and kept values as replays."""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import BendError, NeverFiredWarning
from bendtrace.insert import patch_kinds as builtin
from bendtrace.insert.interjection import depends_on, takes
from tests.compiled.common import ALWAYS
from tests.promise import bits
from tests.shares import some


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Blocks(nn.Module):
    """Three layers, a decision, and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh())
        x = x.relu() if x.sum() > -1000 else x * 0.5
        first, second = self.pair(x)
        return self.c(first) + second


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1


class Sae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.bias = nn.Linear(4, 8), nn.Linear(8, 4), 0.25

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.into(x) - self.bias)

    def decode(self, latents: Tensor) -> Tensor:
        return self.out(latents)


class Both:
    """A model with a backend, and one that replays: what is inserted in both gives the same.

    Args:
        model: the model.
        backend: the backend.
    """

    def __init__(self, model: Any = None, backend: str = "aot_eager", **options: Any) -> None:
        model = Blocks() if model is None else model
        self.compiled = bt.BendedModule(model, backend=backend, backend_options=ALWAYS | options)
        self.replayed = bt.BendedModule(model)
        for bended in (self.compiled, self.replayed):
            bended(torch.zeros(2, 4))

    def check(self, insert: Callable[[bt.BendedModule, int], Any], calls: int = 5) -> None:
        """Insert, call and take away several times; compare outputs and reports."""
        for number in range(calls):
            x = torch.randn(2, 4)
            found = []
            for bended in (self.compiled, self.replayed):
                torch.manual_seed(number)
                with insert(bended, number) as handle:
                    output = bended(x)
                    report = handle.report() if hasattr(handle, "report") else None
                found.append((bits(output), re.sub("0x\\w+", "", str(report))))
            assert found[0] == found[1], number

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.compiled.compiled.to_list()

    def one_graph(self) -> dict[str, Any]:
        """Return what became of the only path that was looked at, which has to be in use."""
        (row,) = self.rows
        assert (row["state"], row["graphs"], row["reason"]) == ("used", 1, "")
        assert row["hits"] >= 3
        return row


VECTOR, MASK, WEIGHTS = torch.randn(4), torch.tensor([1.0, 0, 1, 0]), torch.randn(4, 4)
MODULE, AUTOENCODER = nn.Sequential(nn.Linear(4, 4), nn.GELU()), Sae()


def drawn(number: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(number))


def patched(**patches: Any) -> Callable[[bt.BendedModule, int], Any]:
    return lambda bended, number: bended.patch(
        {name.replace("__", "."): make(number) for name, make in patches.items()}
    )


class Pure(bt.Interjection):
    pure = True

    def __init__(self, vector: Tensor) -> None:
        self.vector, self.factor = vector, 2.0

    def after(self, at: Any, inputs: Any, output: Any) -> Any:
        return output * self.factor + self.vector


def tuned(number: int) -> bt.bends.BendingParameter:
    return bt.bends.BendingParameter("amount", 0.1 + 0.2 * number)


def edited(bended: bt.BendedModule, number: int) -> Any:
    spliced = bt.workflows.splice_autoencoder(bended, "b", AUTOENCODER, error_term=True)
    spliced.set([1, 2], 0.5 * number)
    spliced.edit(lambda latents: latents * MASK.repeat(2))
    return spliced


SWEPT: dict[str, Callable[[bt.BendedModule, int], Any]] = {
    "zero": patched(b__output=lambda n: bt.patches.ZeroPatch(slice=(slice(None), 1))),
    "add a tensor": patched(b__output=lambda n: bt.patches.AddPatch(drawn(n))),
    "add a number": patched(b__output=lambda n: bt.patches.AddPatch(0.3 * n)),
    "add to an input": patched(b__input=lambda n: bt.patches.AddPatch(drawn(n))),
    "add to a weight": patched(b__weight=lambda n: bt.patches.AddPatch(drawn(n))),
    "add to a part": patched(**{"pair__output|sub_0": lambda n: bt.patches.AddPatch(0.5 * n)}),
    "add to an element": patched(
        b__output=lambda n: bt.patches.AddPatch(0.1 + 0.3 * n, slice=(0, 1))
    ),
    "replace": patched(b__output=lambda n: bt.patches.ReplacePatch(drawn(n), slice=0)),
    "replace by a number": patched(b__output=lambda n: bt.patches.ReplacePatch(0.1 * n, slice=0)),
    "several": lambda bended, n: bended.patch(
        {
            "a.output": [bt.patches.AddPatch(drawn(n)), bt.patches.ZeroPatch(slice=0)],
            "c.output": bt.patches.AddPatch(0.5 * n),
        }
    ),
    "steer": lambda bended, n: bt.workflows.steer(bended, drawn(n), "b", scale=0.5 * n),
    "steer, normalised": lambda bended, n: bt.workflows.steer(
        bended, drawn(n), "b", scale=torch.tensor(2.0), normalise="value"
    ),
    "ablate": lambda bended, n: bt.workflows.ablate(bended, "b", channels=[1, 2], axis=-1),
    "ablate a head": lambda bended, n: bt.workflows.ablate(
        bended, "b", "mean", heads=4, head=1, head_axis=-1
    ),
    "ablate by a number": lambda bended, n: bt.workflows.ablate(bended, "b", 0.1 * n),
    "ablate by a tensor": lambda bended, n: bt.workflows.ablate(bended, "b", drawn(n)),
    "ablate by a function": lambda bended, n: bt.workflows.ablate(bended, "b", lambda v: v.flip(0)),
    "splice": lambda bended, n: bt.workflows.splice_autoencoder(bended, "b", AUTOENCODER),
    "splice and edit": edited,
    "scale": lambda bended, n: bended.bend(bt.bends.Scale(tuned(n)), "b$", "a.weight"),
    "bias": lambda bended, n: bended.bend(bt.bends.Bias(drawn(n)), "b$"),
    "affine": lambda bended, n: bended.bend(bt.bends.Affine(0.1 * n, 2.0), "b$"),
    "chain": lambda bended, n: bended.bend(bt.bends.Scale(0.5 * n) >> bt.bends.Bias(1.0), "b$"),
    "chain of a function that leaves no dimensions": lambda bended, n: bended.interject(
        "pair.output|sub_1",
        bt.bends.Lambda(torch.sum) >> bt.bends.Scale(0.1 + 0.3 * n) >> bt.bends.Bias(0.7),
    ),
    "mask": lambda bended, n: bended.bend(MASKS[bended], "b$"),
    "ordered mask": lambda bended, n: bended.bend(ORDERED[bended], "b$"),
    "permute": lambda bended, n: bended.bend(PERMUTED[bended], "b$"),
    "interpolate": lambda bended, n: bended.bend(
        bt.bends.InterpolateActivation(drawn(n).reshape(2, 2)), "b$"
    ),
    "bend by a function": lambda bended, n: bended.bend(lambda v: v * VECTOR, "b$"),
    "function": lambda bended, n: bended.interject("b", with_default(drawn(n))),
    "closure": lambda bended, n: (lambda vector: bended.interject("b", lambda v: v + vector))(
        drawn(n)
    ),
    "function of functions": lambda bended, n: bended.interject("b", scaled_by(drawn(n))),
    "function that keeps it": lambda bended, n: bended.interject("b", lambda v: v),
    "module": lambda bended, n: bended.interject("b", MODULE),
    "pure": lambda bended, n: bended.interject("b", Pure(drawn(n))),
}


class _Made(dict[Any, Any]):
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __missing__(self, key: Any) -> Any:
        made = self[key] = self._make()
        return made


MASKS = _Made(lambda: bt.bends.Mask(0.5, seed=1, dim=-1))
ORDERED = _Made(lambda: bt.bends.OrderedMask(0.5, seed=1))
PERMUTED = _Made(lambda: bt.bends.Permute(-1, seed=1))


def times(value: Tensor, factor: Tensor) -> Tensor:
    made = value.clone()
    made[0] = 0
    return made * factor


def with_default(vector: Tensor) -> Callable[[Tensor], Tensor]:
    def scaled(value: Tensor, by: Tensor = vector, *, plus: float = 0.5) -> Tensor:
        return value * by + plus

    return scaled


def scaled_by(vector: Tensor) -> Callable[[Tensor], Tensor]:
    def inner(value: Tensor) -> Tensor:
        return times(value, vector) + VECTOR

    return lambda value: inner(value).clamp(-1, 1)


@pytest.mark.parametrize("case", some(SWEPT, 3))
@pytest.mark.more
def test_a_sweep_is_compiled_once_and_gives_the_bits_and_reports_of_replays(case: str) -> None:
    both = Both()
    with torch.no_grad():
        both.check(SWEPT[case])
    both.one_graph()


# What is kept


def test_activations_are_outputs_of_the_graph() -> None:
    both = Both()
    with torch.no_grad():
        for number in range(5):
            x = torch.randn(2, 4)
            found = [
                bended.get_activations("a.output", "pair", "b.input", "output", args=(x,))
                for bended in (both.compiled, both.replayed)
            ]
            assert list(found[0]) == list(found[1]), number
            assert bits(list(found[0].values())) == bits(list(found[1].values()))
    both.one_graph()


def test_analysers_captures_and_probes_see_what_they_see_in_replays() -> None:
    both = Both()
    kept: list[list[Any]] = []
    batches = [torch.randn(2, 4) for _ in range(5)]
    for bended in (both.compiled, both.replayed):
        mean, record, capture = (
            bt.analysis.RunningMean(),
            bt.patches.RecordPatch(),
            bt.bends.Capture(),
        )
        probe, capture = bt.patches.ProbePatch(), bt.bends.Capture()
        patches = {"a.output": [record, bt.patches.AddPatch(1.0), probe]}
        with (
            torch.no_grad(), bended.interject(["a", "b", "pair"], mean), bended.patch(patches),
            bended.bend(capture, "c$"), capture.capture(),
        ):  # fmt: skip
            for batch in batches:
                bended(batch)
        kept.append([mean.to_dict(), record.activations, probe.activation, capture.captures])
    assert bits(kept[0]) == bits(kept[1])
    both.one_graph()


@pytest.mark.more
def test_a_cache_and_a_harvest_are_those_of_replays(tmp_path: Any) -> None:
    both = Both()
    rows = []
    for name, bended in (("compiled", both.compiled), ("replayed", both.replayed)):
        torch.manual_seed(1)
        with torch.no_grad():
            for _ in range(4):
                _, cache = bt.workflows.run_with_cache(bended, torch.randn(2, 4))
        harvest = bt.harvest(
            bended, [torch.randn(2, 4) for _ in range(6)], out=tmp_path / name, where=["a", "b"]
        )
        rows.append([dict(cache), harvest["a"][:], harvest["b"][:]])
    assert bits(rows[0]) == bits(rows[1])
    assert [row["state"] for row in both.rows] == ["used", "used"]
    assert min(row["hits"] for row in both.rows) >= 2


def test_values_are_kept_as_they_are_before_the_model_writes_to_them() -> None:
    def model(x: Tensor) -> Tensor:
        made = x * 2
        return made.add_(1).exp()

    both = Both(model)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4)
            for bended in (both.compiled, both.replayed):
                found = bended.get_activations("mul", args=(x,))
                assert bits(found["mul"]) == bits(x * 2)
    both.one_graph()


def test_nodes_that_give_the_same_tensor_are_kept_each_by_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Flatten(0, 0)).eval()
    both = Both(model)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4)
            found = [
                bended.get_activations("sub_0", "sub_1", "sub_2", args=(x,))
                for bended in (both.compiled, both.replayed)
            ]
            assert bits(list(found[0].values())) == bits(list(found[1].values()))
    both.one_graph()


@pytest.mark.more
def test_edited_latents_are_kept_after_a_compiled_call() -> None:
    both = Both()
    with torch.no_grad():
        for number in range(5):
            x, seen = torch.randn(2, 4), []
            for bended in (both.compiled, both.replayed):
                with edited(bended, number) as spliced:
                    bended(x)
                    seen.append((spliced.latents, spliced.errors))
            assert bits(seen[0]) == bits(seen[1])
    both.one_graph()


# Handles


def test_what_changes_nothing_is_reported_so() -> None:
    both = Both()
    with torch.no_grad():
        for bended in (both.compiled, both.replayed):
            with bended.interject("b", bt.patches.AddPatch(0.0)) as handle:
                for _ in range(5):
                    bended(torch.ones(2, 4))
                assert not handle.report().changed
    assert both.one_graph()["hits"] == 3


def test_each_call_is_counted_and_what_never_fires_is_warned_of() -> None:
    def model(x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x.abs()

    bended = bt.BendedModule(model, backend="aot_eager", backend_options=ALWAYS)
    up, down = torch.ones(2), -torch.ones(2)
    bended(up), bended(down)
    with bended.interject("relu", lambda v: v * 2) as handle:
        for _ in range(6):
            assert bits(bended(up)) == bits(up * 2)
    assert handle.report().fired == 6
    assert handle.report().rows[0].changed == 6
    handle = bended.interject("relu", lambda v: v * 2)
    for _ in range(4):
        bended(down)
    with pytest.warns(NeverFiredWarning):
        handle.warn_if_never_fired()
    handle.remove()
    assert bended.compiled.hits == 4 + 2


@pytest.mark.more
def test_what_stays_inserted_is_asked_again_when_an_attribute_changes() -> None:
    asked = []

    class Counting(bt.patches.AddPatch):
        @depends_on("value", "slice")
        def effect(self, at: Any, like: Any) -> Any:
            asked.append(at.path)
            return super().effect(at, like)

    both = Both()
    patches = [Counting(VECTOR.clone()) for _ in range(2)]
    for bended, patch in zip((both.compiled, both.replayed), patches, strict=True):
        bended.interject("b", patch)

    def check(hits: int) -> None:
        before = both.compiled.compiled.hits
        for _ in range(4):
            x = torch.randn(2, 4)
            assert bits(both.compiled(x)) == bits(both.replayed(x))
        assert both.compiled.compiled.hits - before == hits

    check(hits=2)
    known = len(asked)
    check(hits=4)
    assert len(asked) == known  # nothing has changed
    for patch in patches:
        patch.value = VECTOR * 2
    check(hits=4)
    assert len(asked) == known + 1
    for patch in patches:
        patch.value.mul_(3)  # the tensor is an input of the graph
    check(hits=4)
    for patch in patches:
        patch.value = 0.5
        patch.slice = (slice(None), [0, 2])  # a list can change without anybody noticing
    check(hits=2)
    known = len(asked)
    for patch in patches:
        patch.slice[1][0] = 3
    check(hits=2)
    assert len(asked) > known


@pytest.mark.more
def test_a_graph_that_leaves_out_what_is_known_to_change_is_made_again_for_others() -> None:
    """Whether each changes its value is computed if that is not known from the calls before."""
    both = Both()
    for value in (1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0):
        handles = [
            bended.interject("a", bt.patches.AddPatch(VECTOR * value))
            for bended in (both.compiled, both.replayed)
        ]
        for _ in range(4 if value == 1.0 else 1):
            x = torch.randn(2, 4)
            assert bits(both.compiled(x)) == bits(both.replayed(x))
        ours, theirs = (handle.report() for handle in handles)
        assert str(ours) == str(theirs)
        assert ours.changed == (value != 0.0)
        for handle in handles:
            handle.remove()
    assert both.one_graph()["hits"] >= 3


def test_calls_that_are_counted_later_are_counted_once() -> None:
    both = Both()
    handles = [
        [bended.interject(name, bt.patches.AddPatch(VECTOR)) for name in ("a", "b")]
        for bended in (both.compiled, both.replayed)
    ]
    for number in range(12):
        x = torch.randn(2, 4)
        assert bits(both.compiled(x)) == bits(both.replayed(x))
        if number in (5, 9, 10):  # of one of two, whose calls are counted together
            assert str(handles[0][0].report()) == str(handles[1][0].report())
        if number in (7, 10):
            for first, _ in handles:
                first.clear_report()
    assert both.one_graph()["hits"] >= 8  # all but those after a reset
    for ours, theirs in zip(*handles, strict=True):
        assert str(ours.report()) == str(theirs.report())
        assert str(ours.report()) == str(theirs.report())


@pytest.mark.more
def test_taking_away_and_inserting_again_compiles_nothing_again() -> None:
    both = Both()
    add = lambda n: bt.patches.AddPatch(drawn(n))  # noqa: E731
    with torch.no_grad():
        for _ in range(4):
            both.check(patched(a__output=add), 2)
            both.check(patched(b__output=add), 2)
            x = torch.randn(2, 4)
            assert bits(both.compiled(x)) == bits(both.replayed(x))
    assert [(row["state"], row["graphs"]) for row in both.rows] == [("used", 1)] * 3


def test_an_effect_that_flips_a_question_goes_the_other_way() -> None:
    def model(x: Tensor) -> Tensor:
        x = x + 0
        return x.relu() if x.sum() > 0 else x.abs()

    both = Both(model)
    for sign in (1.0, 1, 1, 1, -1, 1, -1):
        for bended in (both.compiled, both.replayed):
            with bended.interject("add", bt.patches.AddPatch(5.0 * sign)) as handle:
                seen = bended(torch.ones(2, 4))
                assert handle.report().fired == 1
        assert bits(seen) == bits(torch.full((2, 4), 6.0 if sign > 0 else 4.0))
    assert both.compiled.compiled.failures == 2


# Inputs of the graph


@pytest.mark.more
def test_the_same_tensor_at_two_places_is_not_taken_for_others() -> None:
    """A graph compiled for one tensor in two places has one input for both."""
    both = Both()
    shared = torch.randn(4)
    with torch.no_grad():
        for _ in range(4):
            both.check(lambda bended, n: bended.patch(
                {"a.output": bt.patches.AddPatch(shared), "b.output": bt.patches.AddPatch(shared)}
            ), 1)  # fmt: skip
        both.check(patched(a__output=lambda n: bt.patches.AddPatch(drawn(n)),
                           b__output=lambda n: bt.patches.AddPatch(drawn(n + 9))))  # fmt: skip
    assert [row["state"] for row in both.rows] == ["used", "used"]


def test_a_parameter_of_the_model_may_be_inserted() -> None:
    both = Both()
    bias = both.compiled.model.a.bias
    with torch.no_grad():
        both.check(patched(b__output=lambda n: bt.patches.AddPatch(bias)))
    assert "one of the model's own" in both.rows[0]["reason"]


OFFSET = 1.0


def test_what_a_function_reads_is_looked_at_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both()
    factor = 0.5

    def scaled(value: Tensor) -> Tensor:
        return value * factor - OFFSET

    with torch.no_grad():
        for factor, offset in (0.5, 1.0), (0.5, 2.0), (-0.0, 2.0), (0.0, 2.0):  # noqa: B007
            monkeypatch.setitem(globals(), "OFFSET", offset)
            both.check(lambda bended, n: bended.interject("b", scaled), 4)
    assert [row["hits"] for row in both.rows] == [2, 2, 2, 2]


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_numbers_are_computed_with_as_numbers_whatever_the_dtype(dtype: torch.dtype) -> None:
    def model(x: Tensor) -> Tensor:
        return (x.clone() + x.sum().clone()).abs()

    both = Both(model)
    for bended in (both.compiled, both.replayed):
        bended(torch.ones(2, 4, dtype=dtype))
    number = 3 if dtype is torch.int64 else 1.0078125001
    for _ in range(5):
        x = torch.randn(2, 4).mul(100).to(dtype)
        found = []
        for bended in (both.compiled, both.replayed):
            with bended.patch(
                {
                    ".clone": bt.patches.AddPatch(number),
                    ".clone_1": bt.patches.AddPatch(number),
                    "abs": [bt.patches.AddPatch(number), bt.patches.ReplacePatch(number, slice=0)],
                }
            ):
                found.append(bits(bended(x)))
        assert found[0] == found[1]
    both.one_graph()


# Training


def test_gradients_reach_what_is_inserted_and_the_model() -> None:
    both = Both()
    vectors = [torch.randn(4, requires_grad=True) for _ in range(2)]
    for _ in range(4):
        found = []
        x = torch.randn(2, 4)
        for bended, vector in zip((both.compiled, both.replayed), vectors, strict=True):
            vector.data = torch.ones(4)
            with bended.patch({"b.output": bt.patches.AddPatch(vector)}):
                output = bended(x)
                seen = bended.get_activations("a", args=(x,))["a"]
                assert not seen.requires_grad
            given = torch.autograd.grad(output.pow(2).sum(), [vector, *bended.model.parameters()])
            found.append(bits([output, *given]))
        assert found[0] == found[1]
    assert [row["state"] for row in both.rows] == ["used", "used"]


def test_gradients_at_nodes_are_those_of_replays() -> None:
    """A graph gives none for what it hands out: such calls are not compiled."""
    both = Both()
    for _ in range(4):
        found = []
        x = torch.randn(2, 4)
        for bended in (both.compiled, both.replayed):
            kept, output = bended.get_activations("a", args=(x,), detach=False, return_output=True)
            found.append(bits(torch.autograd.grad(output.sum(), kept["a"])))
        assert found[0] == found[1]
    assert "without being called while the model runs" in both.rows[0]["reason"]


# What is not compiled


class Told(bt.Interjection):
    def after(self, at: Any, inputs: Any, output: Any) -> Any:
        return output * 2

    def backward(self, at: Any, grad_input: Any, grad_output: Any) -> Any:
        return grad_input


class Counting(bt.patches.AddPatch):
    """What is known of a class need not hold for what is made of it."""

    seen = 0

    def op(self, original_output: Any) -> Any:
        self.seen += 1
        return original_output * self.seen


SEEN: list[Any] = []
REFUSED: dict[str, tuple[Callable[[bt.BendedModule], Any], str]] = {
    "a list": (lambda bended: bended.interject("b", lambda v: SEEN.append(v)), "reads a list"),
    "printing": (lambda bended: bended.interject("b", lambda v: print(end="")), "uses print"),
    "in place": (lambda bended: bended.interject("b", lambda v: v.mul_(2)), "it writes to"),
    "random": (lambda bended: bended.interject("b", lambda v: v + torch.randn(4)), "random"),
    "the pass": (lambda bended: bended.interject("b", lambda v, at: v * 2), "the pass as well"),
    "gradients": (lambda bended: bended.interject("b", Told()), "receives gradients"),
    "a class of the user's": (
        lambda bended: bended.patch({"b.output": Counting(1.0)}), "mark its class with pure = True"
    ),
    "asked passes": (
        lambda bended: bended.interject("b", torch.tanh, passes=lambda n: n == 0), "which passes"
    ),
    "a question": (
        lambda bended: bended.interject("b", lambda v: v * 2 if v.sum() > 0 else v), "branching",
    ),
    "a global that is assigned": (lambda bended: bended.interject("b", assigns), "it assigns"),
    "noise": (lambda bended: bended.bend(bt.bends.Normal(seed=1), "b$"), "may do more than"),
    "an attribute": (lambda bended: bended.interject("b", lambda v: v + LOOSE.x), "reads a Loose"),
}  # fmt: skip


def assigns(value: Tensor) -> Tensor:
    global SEEN
    SEEN = [value]
    return value * 2


class Loose:
    x = 1.0


LOOSE = Loose()


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_do_more_than_compute_is_called_and_the_reason_is_told(case: str) -> None:
    insert, reason = REFUSED[case]
    both = Both()
    both.check(lambda bended, n: insert(bended), 3)
    (row,) = both.rows
    assert (row["state"], row["hits"]) == ("not compiled", 0)
    assert reason in row["reason"]
    assert both.compiled.compiled.reasons == (row["reason"],)


def test_an_error_of_what_is_inserted_is_the_one_of_a_replay() -> None:
    share = bt.bends.BendingParameter("share", 0.5)
    both = Both()
    with both.compiled.bend(bt.bends.OrderedMask(share, seed=2), "b$"):
        for _ in range(5):
            both.compiled(torch.randn(2, 4))
        share.value = 2.0
        with pytest.raises(BendError, match=r"at 'b' has to be a share from 0 to 1, not 2\.0"):
            both.compiled(torch.randn(2, 4))
    both.one_graph()


def test_an_error_of_an_observer_is_raised_and_the_handle_knows() -> None:
    class Failing(bt.Interjection):
        observes = deferrable = True
        fails = False

        def after(self, at: Any, inputs: Any, output: Any) -> None:
            if self.fails:
                raise ValueError("seen enough")

    both = Both()
    failing = Failing()
    with both.compiled.interject("b", failing) as handle:
        for _ in range(4):
            both.compiled(torch.ones(2, 4))
        failing.fails = True
        handle.clear_report()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ValueError, match="seen enough"):
                both.compiled(torch.ones(2, 4))
            handle.warn_if_never_fired()
    assert both.one_graph()["hits"] >= 2


# Inductor


@pytest.mark.all
@pytest.mark.parametrize("case", ["several", "steer", "splice and edit"])
def test_inductor_gives_what_replays_give_within_its_tolerance(case: str) -> None:
    torch.manual_seed(0)
    model = Blocks()
    compiled = bt.BendedModule(model, backend="inductor", backend_options=ALWAYS)
    replayed = bt.BendedModule(model)
    with torch.no_grad():
        for number in range(5):
            x, found = torch.randn(2, 4), []
            for bended in (compiled, replayed):
                bended(x)
                with SWEPT[case](bended, number) as handle:
                    kept, output = bended.get_activations("a.output", args=(x,), return_output=True)
                said = str(handle.report()) if hasattr(handle, "report") else ""
                found.append((output, kept["a.output"], said))
            torch.testing.assert_close(found[0][:2], found[1][:2])
            assert found[0][2] == found[1][2]
    row = compiled.compiled.to_list()[-1]
    assert (row["state"], row["graphs"]) == ("used", 1)
    assert row["hits"] >= 2


# State of compiled insertions that changes between calls


def steer(value: Tensor) -> Tensor:
    return value * steer.scale  # type: ignore[attr-defined]


class Config:
    def __init__(self, k: float) -> None:
        self.k = k


class Nested(bt.Interjection):
    pure = True

    def __init__(self) -> None:
        self.config = Config(2.0)

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> Any:
        return output * self.config.k


FACTOR = [2.0]


class ReadsAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * FACTOR[0]


class OfItsClass(nn.Module):
    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _by_attribute() -> tuple[Any, Callable[[], None]]:
    steer.scale = 2.0  # type: ignore[attr-defined]
    return steer, lambda: setattr(steer, "scale", 3.0)


def _by_config() -> tuple[Any, Callable[[], None]]:
    inserted = Nested()
    return inserted, lambda: setattr(inserted.config, "k", 3.0)


def _by_global() -> tuple[Any, Callable[[], None]]:
    FACTOR[0] = 2.0
    return ReadsAGlobal(), lambda: FACTOR.__setitem__(0, 3.0)


def _by_class() -> tuple[Any, Callable[[], None]]:
    OfItsClass.scale = 2.0
    return OfItsClass(), lambda: setattr(OfItsClass, "scale", 3.0)


@pytest.mark.parametrize("make", [_by_attribute, _by_config, _by_global, _by_class])
def test_state_of_an_insertion_that_changes_is_seen(
    make: Callable[[], tuple[Any, Callable[[], None]]],
) -> None:
    inserted, change = make()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    bended = bt.BendedModule(model, backend="aot_eager", backend_options=ALWAYS)
    bended.interject("1", inserted)
    with torch.no_grad():
        for step in range(7):
            if step == 4:
                change()
            x = torch.randn(3, 4)
            factor = 2.0 if step < 4 else 3.0
            assert bits(bended(x)) == bits(model[2](torch.relu(model[0](x)) * factor)), step


def test_looking_at_a_function_does_not_run_it_on_the_users_tensors() -> None:
    total, norm = torch.zeros(()), nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    bended = bt.BendedModule(model, backend="aot_eager", backend_options=ALWAYS)

    def watch(value: Tensor) -> None:
        total.add_(1)

    bended.interject("1", watch)
    bended.interject("0", norm)
    with torch.no_grad():
        for step in range(6):
            bended(torch.randn(3, 4))
            assert (total, norm.num_batches_tracked) == (step + 1, step + 1)


def test_a_function_that_writes_to_its_argument_for_some_sizes_is_not_compiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    bended = bt.BendedModule(model, backend="aot_eager", backend_options=ALWAYS)

    def doubles(value: Tensor) -> Tensor:
        return value.mul_(2) if value.shape[0] > 3 else value

    bended.interject("input", doubles)
    with torch.no_grad():
        for size in (3, 3, 3, 3, 5, 5, 3):
            x = torch.randn(size, 4)
            y = x.clone()
            assert bits(bended(x)) == bits(model(doubles(y)))
            assert bits(x) == bits(y)


def test_a_probe_that_no_longer_detaches() -> None:
    probe = bt.patches.ProbePatch()
    bended = bt.BendedModule(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager", backend_options=ALWAYS
    )
    with bended.patch({"1": probe}):
        for step in range(8):
            if step == 5:
                probe.detach = False
            bended(torch.randn(3, 4))
            assert probe.activation.requires_grad is (step >= 5), step


# What insertions read is compared in each call, by facts


def _scaled(value: Tensor, factor: float = 2.0, *, bias: float = 0.5) -> Tensor:
    return value * factor + bias


def _halved(value: Tensor, factor: float = 2.0, *, bias: float = 0.5) -> Tensor:
    return value * 0.5


def _in_closure() -> tuple[Any, Callable[[], None]]:
    factor = 2.0

    def inserted(value: Tensor) -> Tensor:
        return value * factor

    def change() -> None:
        nonlocal factor
        factor = 3.0

    return inserted, change


def _tensor_in_closure() -> tuple[Any, Callable[[], None]]:
    factor = VECTOR

    def inserted(value: Tensor) -> Tensor:
        return value * factor

    def change() -> None:
        nonlocal factor
        factor = VECTOR + 1

    return inserted, change


def _copy_of_scaled() -> Any:
    made = types.FunctionType(_scaled.__code__, globals(), "scaled", (2.0,))
    made.__kwdefaults__ = {"bias": 0.5}
    return made


def _of_function(name: str, value: Any) -> Callable[[], tuple[Any, Callable[[], None]]]:
    def make() -> tuple[Any, Callable[[], None]]:
        inserted = _copy_of_scaled()
        return inserted, lambda: setattr(inserted, name, value)

    return make


def _in_namespace(name: str, value: Any) -> tuple[Any, Callable[[], None]]:
    space: dict[str, Any] = {"GAIN": 2.0}
    exec("def inserted(value): return value * max(1, GAIN)", space)
    return space["inserted"], lambda: space.__setitem__(name, value)


def _keyword_default() -> tuple[Any, Callable[[], None]]:
    inserted = _copy_of_scaled()
    return inserted, lambda: inserted.__kwdefaults__.update(bias=1.5)


def _by_keyword() -> tuple[Any, Callable[[], None]]:
    inserted = functools.partial(torch.add, other=VECTOR, alpha=2)
    return inserted, lambda: inserted.keywords.update(alpha=3)


def _bend(made: Any, name: str, value: Any) -> tuple[Any, Callable[[], None]]:
    return made, lambda: setattr(made, name, value)


def _parameter() -> tuple[Any, Callable[[], None]]:
    amount = bt.bends.BendingParameter("amount", 0.5)
    return bt.bends.Scale(2 * amount + 1), lambda: setattr(amount, "value", 0.75)


def _in_a_chain() -> tuple[Any, Callable[[], None]]:
    chain = bt.bends.Scale(2.0) >> bt.bends.Bias(0.5)
    return chain, lambda: setattr(chain.callbacks[1], "bias", 1.5)


def _drawn_anew() -> tuple[Any, Callable[[], None]]:
    mask = bt.bends.Mask(0.5, dim=-1, seed=1)

    def change() -> None:
        mask.seed = 2
        mask.reset()

    return mask, change


def _module(change: Callable[[Any], Any]) -> Callable[[], tuple[Any, Callable[[], None]]]:
    def make() -> tuple[Any, Callable[[], None]]:
        inserted = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        return inserted, lambda: change(inserted)

    return make


class OfPure(bt.Interjection):
    pure = True
    gain = 1.0

    def __init__(self) -> None:
        self.factors = [2.0, 1.0]

    def after(self, at: Any, inputs: Any, output: Any) -> Any:
        return output * self.factors[0] * self.gain


def _pure(change: Callable[[Any], Any]) -> Callable[[], tuple[Any, Callable[[], None]]]:
    def make() -> tuple[Any, Callable[[], None]]:
        cls = type("Derived", (OfPure,), {"gain": 1.0, "pure": True})
        inserted = cls()
        return inserted, lambda: change(inserted)

    return make


def _weight(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 4))


CHANGES: dict[str, Callable[[], tuple[Any, Callable[[], None]]]] = {
    "a number": lambda: _bend(bt.bends.Scale(2.0), "scale", 3.0),
    "a number of two": lambda: _bend(bt.bends.Affine(0.5, 2.0), "bias", 1.5),
    "weights": lambda: _bend(
        bt.bends.InterpolateActivation(torch.eye(2), softmax=False), "softmax", True
    ),
    "a function in a bend": lambda: _bend(bt.bends.Lambda(_scaled), "fn", _halved),
    "a parameter in an expression": _parameter,
    "in a chain": _in_a_chain,
    "a chain": lambda: _bend(
        bt.bends.Scale(2.0) >> bt.bends.Bias(0.5), "callbacks", (bt.bends.Scale(0.5),)
    ),
    "numbers drawn": _drawn_anew,
    "a closure": _in_closure,
    "a tensor in a closure": _tensor_in_closure,
    "code": _of_function("__code__", _halved.__code__),
    "defaults": _of_function("__defaults__", (3.0,)),
    "keyword defaults": _of_function("__kwdefaults__", {"bias": 1.5}),
    "a keyword default": _keyword_default,
    "a keyword of a partial": _by_keyword,
    "a global": lambda: _in_namespace("GAIN", 3.0),
    "a name of Python's": lambda: _in_namespace("max", min),
    "a weight": _module(_weight),
    "a part": _module(lambda module: module.__setitem__(1, nn.Tanh())),
    "the order of parts": _module(
        lambda module: module._modules.__setitem__("0", module._modules.pop("0"))
    ),
    "a hook": _module(lambda module: module[0].register_forward_hook(lambda m, i, out: out * 2)),
    "an attribute of a part": _module(lambda module: setattr(module[1], "approximate", "tanh")),
    "a list": _pure(lambda made: made.factors.__setitem__(0, 3.0)),
    "a class": _pure(lambda made: setattr(type(made), "gain", 3.0)),
    "a method": _pure(lambda made: setattr(type(made), "after", lambda *given: given[-1] * 3)),
    "all attributes": _pure(lambda made: setattr(made, "__dict__", {"factors": [3.0]})),
    "another class": _pure(
        lambda made: setattr(made, "__class__", type("Other", (OfPure,), {"gain": 3.0, "pure": 1}))
    ),
}


@pytest.mark.parametrize("case", some(list(CHANGES), 10))
def test_what_an_insertion_reads_is_compared_in_each_call(case: str) -> None:
    inserted, change = CHANGES[case]()
    both = Both()
    same = torch.randn(2, 4)
    with torch.no_grad():
        for bended in (both.compiled, both.replayed):
            bended.interject("b", inserted)
        for _ in range(6):
            x = torch.randn(2, 4)
            assert bits(both.compiled(x)) == bits(both.replayed(x))
        hits, before = both.compiled.compiled.hits, bits(both.compiled(same))
        assert hits >= 4
        change()
        assert bits(both.compiled(same)) == bits(both.replayed(same)) != before
        for _ in range(4):
            x = torch.randn(2, 4)
            assert bits(both.compiled(x)) == bits(both.replayed(x))


def test_a_number_that_became_a_tensor_is_used_in_all_modes() -> None:
    both = Both()
    for bended in (both.compiled, both.replayed):
        bended.interject("b", bt.bends.Scale(0.25))
    for number in range(16):
        x = torch.randn(2, 4)
        with torch.inference_mode(number % 2 == 0):
            outputs = [bended(x) for bended in (both.compiled, both.replayed)]
        assert bits(outputs[0]) == bits(outputs[1])
        assert outputs[0].requires_grad is outputs[1].requires_grad is bool(number % 2)
    assert [(row["state"], row["graphs"]) for row in both.rows] == [("used", 1)] * 2
    assert min(row["hits"] for row in both.rows) >= 5


# Values that are handed out without copying them


class Sharing(nn.Module):
    """Nodes whose values share memory: with the input, with each other, with the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.same, self.drop = nn.Linear(4, 4), nn.Identity(), nn.Dropout()
        self.flat, self.last = nn.Flatten(0), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(8.0).reshape(2, 4))
        self.constant = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.same(x))
        made = self.a(x)
        left, right = made.chunk(2, -1)
        flat = self.flat(made.relu())
        ones = self.constant(torch.zeros_like(made) + self.same(self.table))
        return self.last(torch.cat([left.exp(), right], -1) + ones) + flat.sum()


# With "same", the graph returns what it received, and torch.compile's guards are asked each time.
KEPT = {
    "computed": ("a", "exp", "last"),
    "shared": ("a", "a", "chunk", "relu", "flat", "constant", "last"),
    "received": ("same", "drop", "a", "chunk"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", *some(["inductor"])])
def test_a_kept_value_shares_memory_with_nothing(
    grad: bool, case: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(builtin, "takes", lambda value: taken.append(takes(value)) or taken[-1])
    both = Both(Sharing().eval(), backend=backend)
    records: list[list[Any]] = []
    with torch.set_grad_enabled(grad):
        for bended in (both.compiled, both.replayed):
            kept: list[Any] = []
            records.append(kept)
            for where in KEPT[case]:
                bended.interject(where, bt.patches.RecordPatch(activations=kept))
        for _ in range(6):
            x = torch.randn(2, 4)
            outputs = []
            for bended, kept in zip((both.compiled, both.replayed), records, strict=True):
                kept.clear()
                outputs.append(bended(x))
            torch.testing.assert_close(outputs[0], outputs[1])
            torch.testing.assert_close(records[0], records[1])
            pieces = flattened(records[0])
            everything = [*pieces, outputs[0].detach(), x, both.compiled.model.table]
            for piece in pieces:
                before = [one.clone() for one in everything]
                with torch.no_grad():
                    piece.fill_(7)
                    for one, was in zip(everything, before, strict=True):
                        assert one is piece or bits(one) == bits(was)
                    piece.copy_(before[[id(one) for one in everything].index(id(piece))])
            if grad:
                found = []
                for output in outputs:
                    both.compiled.model.zero_grad()
                    output.sum().backward()
                    found.append(bits([p.grad for p in both.compiled.model.parameters()]))
                assert backend == "inductor" or found[0] == found[1]
    assert both.compiled.compiled.hits >= 3
    # A backward pass may need what was computed.
    assert any(taken) is (not grad and case != "received")


def flattened(kept: list[Any]) -> list[Tensor]:
    return [one for value in kept for one in (value if isinstance(value, tuple) else (value,))]
