"""What `bt.diff` finds between two runs, and how it tells it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.show.difference import Differences
from bendtrace.show.matching import compare_numbers, compare_tensors, match, pair_keys
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.shares import some

ROOT = Path(__file__).parent.parent
T = torch.tensor


def run(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return bt.trace(model, *args, save="all", **kwargs)


def names(entries: Any) -> list[str]:
    return [entry.label for entry in entries if entry.is_layer]


def types(entries: Any) -> list[str]:
    return [entry.layer_type for entry in entries if entry.is_layer]


def partner(difference: Any, label: str) -> str | None:
    return dict(difference.matched).get(label)


def assert_mirrored(a: Any, b: Any) -> Any:
    """The difference the other way round says the same the other way round."""
    forth, back = bt.diff(a, b), bt.diff(b, a)
    assert types(forth.added) == types(back.removed)
    assert types(forth.removed) == types(back.added)
    assert sorted(forth.matched) == sorted((x, y) for y, x in back.matched)
    assert [c.what for c in forth.changed] == [c.what for c in back.changed]
    assert (forth.first is None) == (back.first is None)
    if forth.first is not None:
        assert forth.first.kind == back.first.kind
    return forth


class Refine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: Any, tolerance: float = 1.0) -> Any:
        if x.shape[0] > 3:
            x = x[:3]
        while x.norm() > tolerance:
            x = x * self.step(x).sigmoid()
            if x.isnan().any():
                break
        return x


class Block(nn.Module):
    def __init__(self, act: Any = nn.ReLU) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        self.act = act()

    def forward(self, x: Any) -> Any:
        return x + self.act(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 2, act: Any = nn.ReLU) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(act) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


X = torch.ones(2, 8)


def test_two_runs_of_the_same_input_are_the_same() -> None:
    model = Refine()
    difference = assert_mirrored(run(model, torch.ones(5, 4)), run(model, torch.ones(5, 4)))
    assert not difference
    assert difference.first is None
    assert difference.first_value is None
    assert repr(difference) == "<Difference of Refine: none>"
    assert str(difference).startswith("Refine: the two runs are the same\n    activations: ")
    unsaved = bt.trace(model, torch.ones(5, 4))
    said = "Refine: the two runs are the same, but no activations were compared\n"
    assert str(bt.diff(unsaved, unsaved)).startswith(said)


def test_a_loop_that_runs_more_often_is_where_the_runs_part() -> None:
    def shrink(x: Any) -> Any:
        while x.norm() > 1:
            x = x / 2
        return x

    a, b = run(shrink, torch.ones(4)), run(shrink, torch.full((4,), 4.0))
    difference = assert_mirrored(a, b)
    first = difference.first
    assert first.kind == "flow"
    assert (first.a.iterations, first.b.iterations) == (1, 3)
    assert first.a.kind == "while"
    assert [change.kind for change in difference.flow].count("iterations") == 1
    assert "side" not in [change.kind for change in difference.flow]
    added = [entry for entry in difference.added if entry.layer_type == "div"]
    assert [entry.pass_number for entry in added] == [2, 3]
    assert "passes 2-3 of div_1" in str(difference)
    assert "`while x.norm() > 1`" in str(difference)
    assert first.source == (__file__, shrink.__code__.co_firstlineno + 1)


def test_a_loop_over_a_size_parts_at_its_header() -> None:
    def fold(x: Any) -> Any:
        total = x.sum()
        for i in range(x.shape[0]):
            total = total + x[i].max()
        return total

    difference = assert_mirrored(run(fold, torch.ones(3, 2)), run(fold, torch.ones(5, 2)))
    first = difference.first
    assert (first.kind, first.a.iterations, first.b.iterations) == ("flow", 3, 5)
    assert {entry.pass_number for entry in difference.added if entry.is_layer} == {4, 5}
    assert not difference.removed


@pytest.mark.parametrize(("few", "many"), [(3, 5), (0, 2)])
def test_a_loop_over_rows_parts_at_the_loop(few: int, many: int) -> None:
    def total(x: Any) -> Any:
        h = torch.zeros(2)
        for row in x:
            h = torch.maximum(h, row)
        return h

    first = assert_mirrored(run(total, torch.ones(few, 2)), run(total, torch.ones(many, 2))).first
    assert (first.kind, first.a.kind) == ("flow", "for")
    assert (first.a.iterations, first.b.iterations) == (few, many)


def test_a_while_that_plain_python_left_early_parts_at_the_loop() -> None:
    def build(most: int) -> Any:
        def grow(x: Any) -> Any:
            count = 0
            while x.sum() < 1000:
                x = x * 2
                count += 1
                if count == most:
                    break
            return x

        return grow

    first = assert_mirrored(run(build(2), torch.ones(2)), run(build(4), torch.ones(2))).first
    assert first.kind == "flow"
    assert first.a.kind == first.b.kind == "while"
    assert (first.a.iterations, first.b.iterations) == (2, 4)


def test_a_number_that_became_a_plain_one_is_named_with_what_followed() -> None:
    def repeat(x: Any) -> Any:
        steps = int(x.max().item())
        for _ in [None] * steps:
            x = x + 1
        return x if steps < 3 else x.relu()

    first = assert_mirrored(run(repeat, T([1.0])), run(repeat, T([2.0]))).first
    assert first.kind == "layers"
    assert re.search(r"; before, `.*` \(test_diff\.py:\d+\): 1\.0 in a, 2\.0 in b", str(first))


def test_a_loop_left_early_parts_at_the_condition_that_left_it() -> None:
    def search(x: Any) -> Any:
        for i in range(x.shape[0]):
            y = x[i] * 2
            if y.sum() > 10:
                break
        return y

    near, far = torch.zeros(6, 2), torch.zeros(6, 2)
    near[1], far[4] = 9.0, 9.0
    difference = assert_mirrored(run(search, near), run(search, far))
    first = difference.first
    assert (first.a.kind, first.a.value, first.b.value) == ("if", True, False)
    assert first.a.iteration == first.b.iteration == (1,)
    assert "iterations" in [change.kind for change in difference.flow]


def test_a_while_left_early_parts_at_the_condition_that_left_it() -> None:
    def search(x: Any, limit: Any) -> Any:
        while x.sum() < 100:
            x = x * 2
            if x.max() > limit:
                break
        return x

    a, b = run(search, torch.ones(2), T(5.0)), run(search, torch.ones(2), T(20.0))
    first = assert_mirrored(a, b).first
    assert (first.a.kind, first.a.value, first.b.value) == ("if", True, False)
    assert first.a.iteration == (2,)


def test_what_ran_under_the_two_sides_of_a_condition_is_not_the_same() -> None:
    def either(x: Any) -> Any:
        h = x.abs()
        if x.sum() > 0:
            h = h + 1
        else:
            h = h + 1
            h = h * 3
        return h - 1

    difference = assert_mirrored(run(either, torch.ones(2)), run(either, -torch.ones(2)))
    assert difference.first.kind == "flow"
    assert difference.first.a.text == "x.sum() > 0"
    assert (difference.first.a.value, difference.first.b.value) == (True, False)
    assert types(difference.removed) == ["add"]
    assert types(difference.added) == ["add", "mul"]
    assert [(change.kind, change.a.kind) for change in difference.flow] == [("side", "if")]


def test_the_first_of_several_partings_is_told() -> None:
    def twice(x: Any) -> Any:
        h = x.abs()
        if x[0] > 0:
            h = h + 1
        if x[1] > 0:
            h = h * 2
        return h

    a, b = run(twice, T([1.0, 1.0])), run(twice, T([-1.0, -1.0]))
    difference = assert_mirrored(a, b)
    assert difference.first.a.text == "x[0] > 0"
    assert [change.step.text for change in difference.flow] == ["x[0] > 0", "x[1] > 0"]


def test_passes_are_told_apart_by_the_iteration_they_ran_in() -> None:
    def clip(x: Any) -> Any:
        total = x.sum()
        for i in range(x.shape[0]):
            if x[i] > 0:
                total = total + x[i]
        return total

    a, b = run(clip, T([0.0, 1.0, 0.0, 1.0])), run(clip, T([1.0, 1.0, 1.0, 0.0]))
    difference = assert_mirrored(a, b)
    adds = [pair for pair in difference.matched if pair[0].startswith("add")]
    # Iterations 1 and 3 have it in a; 0, 1 and 2 in b.
    assert [(x.split(":")[1], y.split(":")[1]) for x, y in adds] == [("1", "2")]
    assert [e.pass_number for e in difference.removed if e.layer_type == "add"] == [2]
    assert [e.pass_number for e in difference.added if e.layer_type == "add"] == [1, 3]


def test_calls_of_a_shared_module_are_told_apart_by_where_they_are_made() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Any, early: bool) -> Any:
            if early:
                x = self.fc(x + 1)
            return self.fc(x * 2)

    model = Shared()
    difference = assert_mirrored(run(model, torch.ones(2), True), run(model, torch.ones(2), False))
    linears = {a: b for a, b in difference.matched if a.startswith("linear")}
    assert [label.split(":")[1] for label in linears] == ["2"]
    assert types(difference.removed) == ["add", "linear"]
    assert [str(change) for change in difference.modules] == ["fc: calls 2 -> 1"]


def test_an_op_put_in_between_is_all_that_is_added() -> None:
    def old() -> Any:
        class Model(nn.Module):
            def forward(self, x: Any) -> Any:
                x = x.relu()
                x = x + 1
                return x.relu()

        return Model()

    def new() -> Any:
        class Model(nn.Module):
            def forward(self, x: Any) -> Any:
                # The same, but for a comment and
                x = x.relu()
                x = x.sigmoid()
                x = x + 1
                return x.relu()

        return Model()

    difference = assert_mirrored(run(old(), -X), run(new(), -X))
    assert types(difference.added) == ["sigmoid"]
    assert not difference.removed
    assert {name for change in difference.changed for name in change.what} == {"value"}
    assert difference.first.kind == "layers"
    assert difference.first.a is None
    assert difference.first.b.layer_type == "sigmoid"
    assert str(difference.first).startswith("after relu_1")


def test_code_that_only_moved_is_the_same() -> None:
    def old() -> Any:
        def model(x: Any) -> Any:
            x = x.relu()
            return x + 1

        return model

    def new() -> Any:
        def model(x: Any) -> Any:
            # A line more, and
            # another one.
            x = x.relu()

            return x + 1

        return model

    assert not assert_mirrored(run(old(), X), run(new(), X))


def test_an_op_that_was_edited_in_place_changed_its_function() -> None:
    difference = assert_mirrored(run(Net(2), X), run(Net(2, nn.GELU), X))
    functions = [change for change in difference.changed if "function" in change.what]
    assert [(c.a.layer_type, c.b.layer_type) for c in functions] == [("relu", "gelu")] * 2
    assert not difference.added
    assert not difference.removed
    assert [str(change) for change in difference.modules] == [
        "layers.0.act: class ReLU -> GELU",
        "layers.1.act: class ReLU -> GELU",
    ]


def test_an_expression_that_was_edited_is_the_same_op_with_other_arguments() -> None:
    def old(x: Any) -> Any:
        y = x.abs()
        y = torch.clamp(y, max=2.0)
        return y.exp()

    def new(x: Any) -> Any:
        y = x.abs()
        y = torch.clamp(y * 1, max=3.0)
        return y.exp()

    difference = assert_mirrored(run(old, X), run(new, X))
    assert types(difference.added) == ["mul"]
    (change,) = (c for c in difference.changed if "arguments" in c.what)
    assert change.a.layer_type == "clamp"
    assert "2.0" in change.aspects["arguments"][0]
    assert "3.0" in change.aspects["arguments"][1]


def test_an_op_computed_from_something_else_was_rewired() -> None:
    def old(x: Any) -> Any:
        a, b = x.sin(), x.cos()
        return (a * b).exp() + a

    def new(x: Any) -> Any:
        a, b = x.sin(), x.cos()
        return (a * b).exp() + b

    difference = assert_mirrored(run(old, X), run(new, X))
    rewired = [change for change in difference.changed if "parents" in change.what]
    assert [change.a.layer_type for change in rewired] == ["add"]
    before, after = rewired[0].aspects["parents"]
    assert [label.split("_")[0] for label in before] == ["exp", "sin"]
    assert [label.split("_")[0] for label in after] == ["exp", "cos"]


def test_a_layer_more_is_told_as_one_module() -> None:
    a, b = Net(2), Net(3)
    b.load_state_dict(a.state_dict(), strict=False)
    difference = assert_mirrored(run(a, X), run(b, X))
    assert types(difference.added) == ["layernorm", "linear", "relu", "add"]
    text = str(difference)
    assert "layers.2 (Block): only in b, with 3 modules inside" in text
    assert "module layers.2 (Block): 4 layers" in text


def test_a_wrapped_model_is_the_same_in_modules_of_other_names() -> None:
    model = Net(2)
    difference = assert_mirrored(run(model, X), run(Wrapped(model), X))
    assert [*difference.added, *difference.removed, *difference.changed, *difference.flow] == []
    assert {change.kind for change in difference.modules} == {"renamed"}
    assert difference.first is None
    text = str(difference)
    assert text.startswith(
        "a: Net, b: Wrapped: the two runs do the same, in modules of other names\n"
    )
    assert "    the model itself: is inner in b, with 9 modules inside" in text


def test_a_renamed_module_is_found_again() -> None:
    class Renamed(Net):
        def __init__(self, model: Net) -> None:
            nn.Module.__init__(self)
            self.blocks = model.layers
            self.out = model.head

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    model = Net(2)
    difference = assert_mirrored(run(model, X), run(Renamed(model), X))
    assert [*difference.added, *difference.removed, *difference.changed] == []
    renamed = {c.before: c.after for c in difference.modules if c.kind == "renamed"}
    assert renamed["layers.1.fc"] == "blocks.1.fc"
    assert renamed["head"] == "out"


def test_layers_left_out_of_a_sequence_do_not_shift_the_rest() -> None:
    def conv(norm: bool) -> list[nn.Module]:
        return [nn.Conv1d(3, 3, 1), *([nn.BatchNorm1d(3)] if norm else []), nn.ReLU()]

    a = nn.Sequential(*conv(True), *conv(True), *conv(True))
    b = nn.Sequential(*conv(False), *conv(False), *conv(False))
    x = torch.ones(2, 3, 5)
    difference = assert_mirrored(run(a.eval(), x), run(b.eval(), x))
    assert types(difference.removed) == ["batchnorm"] * 3
    assert not difference.added


def test_other_inputs_of_the_same_path_differ_in_shape_and_value_only() -> None:
    model = Net(1)
    difference = assert_mirrored(run(model, X), run(model, torch.ones(3, 8)))
    assert not difference.added
    assert {name for change in difference.changed for name in change.what} == {"shape"}
    assert difference.first.kind == "change"
    assert difference.first.a.kind == "input"
    assert difference.first_value is None


def test_other_weights_differ_from_where_they_are_used() -> None:
    a = Net(2)
    b = Net(2)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.layers[1].fc.weight[0, 0] += 1
    difference = assert_mirrored(run(a, X), run(b, X))
    assert difference.first_value.a.layer_type == "linear"
    assert difference.first_value.a.module == "layers.1.fc"
    assert difference.first_value.value.differing == 2
    assert difference.first.kind == "change"
    assert difference.first.a.module in ("layers.1.fc", "layers.1")


def test_parameters_of_another_shape_are_told() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))

    difference = assert_mirrored(run(build(4), X), run(build(6), X))
    first = next(change for change in difference.changed if change.a.layer_type == "linear")
    assert "parameters" in first.what
    assert first.aspects["shape"] == ((2, 4), (2, 6))
    assert [str(change) for change in difference.modules] == [
        "0: parameters 36 -> 54",
        "1: parameters 10 -> 14",
    ]


def test_dtype_is_told_and_values_are_compared_across_dtypes() -> None:
    model = nn.Linear(8, 2).double()
    half = nn.Linear(8, 2)
    half.load_state_dict(model.state_dict())
    difference = assert_mirrored(run(model, X.double()), run(half, X))
    change = next(change for change in difference.changed if change.a.layer_type == "linear")
    assert change.aspects["dtype"] == (torch.float64, torch.float32)
    assert change.value is not None
    assert 0 < change.value.max_abs < 1e-5


def test_a_gradient_function_more_is_told() -> None:
    model = nn.Linear(8, 2)
    with torch.no_grad():
        without = run(model, X)
    change = next(
        change
        for change in bt.diff(run(model, X), without).changed
        if change.a.layer_type == "linear"
    )
    assert change.aspects["grad_fn"] == ("AddmmBackward0", None)


def test_tolerances_let_small_differences_pass() -> None:
    a, b = run(torch.exp, X), run(torch.exp, X + 1e-6)
    assert bt.diff(a, b)
    assert not bt.diff(a, b, rtol=1e-4)
    assert not bt.diff(a, b, atol=1e-3)
    assert "within rtol=0.0001, atol=0" in str(bt.diff(a, b, rtol=1e-4))


def test_values_that_were_not_saved_are_not_compared_and_that_is_said() -> None:
    a, b = bt.trace(torch.exp, X), run(torch.exp, X + 1)
    difference = bt.diff(a, b)
    assert difference.first_value is None
    assert difference.coverage.compared == 0
    assert "not saved in a (save='all' saves them)" in str(difference)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (T([1.0, 2.0]), T([1.0, 2.5]), "max abs 0.5, 1 of 2 differ, first [1]: 2.0 -> 2.5"),
        (T(3.0), T(4.5), "3.0 -> 4.5"),
        (T([0.0, 1.0]), T([-0.0, 1.0]), "in bits only, 1 of 2 differ, first [0]: 0.0 -> -0.0"),
        (
            T([[1.0, torch.nan], [1.0, 2.0]]),
            T([[1.0, 1.0], [1.0, 4.0]]),
            "max abs 2, 2 of 4 differ, 1 nan only in a, first [0, 1]: nan -> 1.0",
        ),
        (T([torch.inf]), T([-torch.inf]), "max abs inf, 1 of 1 differ, first [0]: inf -> -inf"),
        (T([True, False]), T([True, True]), "max abs 1, 1 of 2 differ, first [1]: False -> True"),
        (T([1 + 2j]), T([1 + 3j]), "max abs 1, 1 of 1 differ, first [0]: (1+2j) -> (1+3j)"),
        (
            torch.ones(2, 3).t() * 2,
            torch.ones(3, 2),
            "max abs 1, 6 of 6 differ, first [0, 0]: 2.0 -> 1.0",
        ),
        (
            torch.ones(2).to_sparse(),
            T([1.0, 0.0]).to_sparse(),
            "max abs 1, 1 of 2 differ, first [1]: 1.0 -> 0.0",
        ),
        (
            torch.ones(2, dtype=torch.float8_e4m3fn),
            T([1.0, 2.0], dtype=torch.float8_e4m3fn),
            "max abs 1, 1 of 2 differ, first [1]: 1.0 -> 2.0",
        ),
        (T([1, 2**62]), T([1, -(2**62)]), None),
        (
            T([1.0], dtype=torch.float16),
            T([1.5]),
            "max abs 0.5, 1 of 1 differ, first [0]: 1.0 -> 1.5",
        ),
    ],
)
def test_how_far_two_tensors_are_apart_is_told(a: Any, b: Any, text: str | None) -> None:
    difference = compare_tensors(a, b)
    assert difference is not None
    if text is None:
        assert difference.max_abs == 2.0**63
    else:
        assert str(difference) == text
    json.dumps(difference.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (T([1.0, torch.nan, torch.inf]), T([1.0, torch.nan, torch.inf])),
        (torch.ones(2, 3).t(), torch.ones(3, 2)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (T([1 + 2j]).conj(), T([1 - 2j])),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (T([1.0], dtype=torch.float16), T([1.0])),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
        (T(1.5).expand(4)[::2], T([1.5, 1.5])),
    ],
)
def test_tensors_of_the_same_bits_are_the_same(a: Any, b: Any) -> None:
    assert compare_tensors(a, b) is None


def test_numbers_are_compared_by_their_bits() -> None:
    assert compare_numbers(float("nan"), float("nan")) is None
    assert compare_numbers(2, 2) is None
    assert str(compare_numbers(1, 1.0)) == "1 -> 1.0"
    assert str(compare_numbers(0.0, -0.0)) == "0.0 -> -0.0"
    assert compare_numbers(3, 5).max_abs == 2
    assert str(compare_numbers(10**400, 1.0)).endswith("... -> 1.0")


def test_long_tables_end_with_a_line_that_says_how_to_see_more() -> None:
    difference = bt.diff(run(Net(8), X), run(Net(8), X * 2))
    text = difference.text(limit=3)
    rows = len(difference.changed)
    assert f"    ... {rows - 3} more rows: text(limit=None) shows all" in text.splitlines()
    assert "more row" not in difference.text(limit=None)
    assert len(difference.text(limit=None).splitlines()) > rows


def test_a_difference_is_plain_json() -> None:
    def either(x: Any) -> Any:
        return x / 0 if x.sum() > 0 else x - 1

    difference = bt.diff(run(either, torch.ones(2)), run(either, -torch.ones(2)))
    plain = json.loads(difference.to_json(allow_nan=False))
    assert plain == json.loads(json.dumps(difference.to_dict()))
    assert plain["same"] is False
    assert plain["first"]["a"]["value"] is True
    assert plain["first"]["source"] == [__file__, either.__code__.co_firstlineno + 1]
    assert [label.split("_")[0] for label in plain["added"]] == ["sub"]
    assert plain["flow"][0]["kind"] == "side"


def test_gradients_are_compared_where_both_runs_kept_them() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    traces = [bt.trace(model, X, save="all", save_gradients=True) for _ in range(2)]
    traces[0].output.sum().backward()
    traces[1].output.mul(2).sum().backward()
    difference = assert_mirrored(*traces)
    assert {change.what for change in difference.changed} == {("gradient",)}
    tanh = next(change for change in difference.changed if change.a.layer_type == "tanh")
    assert str(tanh).startswith("gradient max abs ")
    assert difference.first.kind == "change"


def test_guards_of_one_run_only_and_of_another_outcome_are_told() -> None:
    def either(x: Any) -> Any:
        if x.sum() > 0:
            return x + 1
        return x.max() if x.min() > -5 else x

    guards = bt.diff(run(either, torch.ones(2)), run(either, -torch.ones(2))).guards
    told = {(guard.kind, (guard.a or guard.b)["source"]) for guard in guards}
    assert ("expected", "x.sum() > 0") in told
    assert ("added", "x.min() > -5") in told
    assert not bt.diff(run(either, torch.ones(2)), run(either, torch.ones(2))).guards
    outcome = next(str(guard) for guard in guards if guard.kind == "expected")
    assert outcome == "truth of `x.sum() > 0`: True in a, False in b"


def test_a_saved_run_is_compared_as_the_run_itself(tmp_path: Path) -> None:
    a, b = run(Refine(), torch.ones(5, 4)), run(Refine(), torch.full((4, 4), 2.0))
    a.save(tmp_path / "a")
    loaded = bt.load(tmp_path / "a")
    assert not bt.diff(a, loaded)
    assert bt.diff(loaded, b).text(None) == bt.diff(a, b).text(None)


def test_the_picture_shows_both_runs_and_where_they_part(tmp_path: Path) -> None:
    def either(x: Any) -> Any:
        h = x.abs()
        if x.sum() > 0:
            h = h + 1
        else:
            h = h.exp()
            h = h * 3
        return h - 1

    difference = bt.diff(run(either, torch.ones(2)), run(either, -torch.ones(2)))
    picture = difference.draw(tmp_path / "difference.svg")
    text = (tmp_path / "difference.svg").read_text()
    assert text == picture.svg
    titles = {node.title for node in picture.scene.nodes()}
    assert {"add_1_4 in a", "exp_1_4 in b", "mul_1_5 in b", "abs_1_1", "x.sum() > 0"} <= titles
    for words in ("only in a", "only in b", "where they first part", "True in a, False in b"):
        assert words in text
    sides = {edge.text for edge in picture.scene.edges if edge.kind == "control"}
    assert sides == {"True", "False"}
    (outline,) = re.findall(r"<rect[^>]*#0969da[^>]*>", text.rpartition("only in")[0])
    assert 'fill="none"' in outline


class Inner(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.abs() if x.sum() > 0 else x.exp() * 3


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return y + 1 if x.sum() > 0 else y.sqrt().cos()


@pytest.mark.parametrize(("most", "title"), [(9, "inner"), (6, "sum_1_1 … sum_2_4")])
def test_a_picture_frames_the_closed_box_that_holds_where_the_runs_part(
    most: int, title: str
) -> None:
    difference = bt.diff(run(Outer(), torch.ones(2)), run(Outer(), -torch.ones(2)))
    assert "(module inner)" in str(difference.first)  # not the other question of the same text
    picture = difference.draw(max_nodes=most)
    (framed,) = (g for g in re.findall(r"<g.*?</g>", picture.svg, re.S) if "#0969da" in g)
    assert f">{title}<" in framed


def test_the_picture_puts_extra_passes_and_changed_blocks_apart() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            h = torch.zeros(4)
            for i in range(x.shape[0]):
                h = self.cell(x[i] + h).tanh()
            return h

    model = Steps()
    difference = bt.diff(run(model, torch.ones(9, 4)), run(model, torch.ones(5, 4)))
    boxes = difference.draw().scene.boxes()
    assert [box.times for box in boxes if box.kind == "repeat"] == ["5", "4"]

    a = Net(8)
    b = Net(8)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.layers[3].fc.weight += 1
    boxes = bt.diff(run(a, X), run(b, X)).draw().scene.boxes()
    assert [(box.title, box.times) for box in boxes] == [
        ("layers.0 \N{HORIZONTAL ELLIPSIS} layers.2", "3"),
        ("layers.3", ""),
        ("layers.4 \N{HORIZONTAL ELLIPSIS} layers.7", "4"),
    ]


def test_a_picture_of_equal_runs_has_no_colours() -> None:
    picture = bt.diff(run(Net(2), X), run(Net(2), X * 2)).draw(depth=0)
    assert "of another value" in picture.svg
    trace = run(Net(2), X)
    same = bt.diff(trace, trace).draw()
    assert not any(words in same.svg for words in ("only in", "not the same", "another value"))
    assert len(same.scene.nodes()) == len(trace.draw().scene.nodes())


def test_a_picture_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    difference = bt.diff(run(Net(1), X), run(Net(2), X))
    with pytest.raises(InputError, match="is unknown"):
        difference.draw(tmp_path / "difference.txt")
    with pytest.raises(InputError, match="no module 'layer'"):
        difference.draw(tmp_path / "difference.svg", within="layer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", some(CASES, 4, start=1), ids=lambda case: case.name)
def test_paths_of_one_model_part_where_its_flow_does(case: Case) -> None:
    traces = []
    for inputs in [*case.paths.values()][:2]:
        torch.manual_seed(1)
        model = case.make()
        args, kwargs = inputs()
        try:
            traces.append(bt.trace(model, *args, **kwargs))
        except Exception:  # some are made to raise
            continue
    for a in traces:
        assert not bt.diff(a, a)
    for a, b in pairwise(traces):
        forth, back = bt.diff(a, b), bt.diff(b, a)
        assert len(forth.matched) + len(forth.removed) == len(a.entries)
        assert len(forth.matched) + len(forth.added) == len(b.entries)
        assert (forth.first is None) == (back.first is None)
        if forth.first is not None:
            assert forth.first.kind == back.first.kind
        assert json.loads(forth.to_json(allow_nan=False))["same"] is (not forth)
        counts = [bool(x) for x in (forth.added, forth.removed, forth.changed, forth.flow)]
        assert bool(forth) == any([*counts, forth.modules])


@pytest.mark.parametrize("arguments", [(None, 0), (1, None)])
def test_what_is_no_trace_is_refused(arguments: tuple[Any, Any]) -> None:
    trace = bt.trace(torch.exp, X)
    a, b = (trace if argument is None else X for argument in arguments)
    with pytest.raises(
        bt.errors.InputError, match=r"argument is a Tensor, not a trace: diff\(trace\(model"
    ):
        bt.diff(a, b)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    trace = bt.trace(torch.exp, X)
    with pytest.raises(InputError, match="atol= has to be a number of at least 0"):
        bt.diff(trace, trace, atol=tolerance)


def _common(a: str, b: str) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
    return row[-1]


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_alignment_keeps_order_and_pairs_only_equal_keys(a: str, b: str) -> None:
    pairs = pair_keys(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(pairs))
    assert len(pairs) <= _common(a, b)


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_alignment_finds_what_was_left_out(a: list[int], data: Any) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(a), max_size=len(a)))
    b = [key for key, keep in zip(a, kept, strict=True) if keep]
    if len(set(a)) == len(a) or len(a) - len(b) <= 1:
        assert len(pair_keys(a, b)) == len(b)


def test_alignment_of_long_sequences_of_few_keys_finds_what_was_left_out() -> None:
    keys = [0, 1, 2, 3] * 3000
    without = keys[10:4000] + keys[4201:8003] + keys[8010:]
    assert len(pair_keys(keys, ["x", *without, "y"])) > len(without) - 20


def test_weaker_keys_pair_only_what_stands_between_the_same_neighbours() -> None:
    a = [["p", "x", "q"], ["P", "X", "Q"]]
    assert match(a, [["p", "y", "q"], ["P", "X", "Q"]]) == {0: 0, 1: 1, 2: 2}
    assert match(a, [["y", "p", "q"], ["X", "P", "Q"]]) == {0: 1, 2: 2}


# More than two runs


def test_more_runs_are_compared_with_the_first() -> None:
    def shrink(x: Any) -> Any:
        while x.norm() > 1:
            x = x / 2
        return x

    runs = [run(shrink, torch.ones(n)) for n in (4, 4, 9, 1)]
    differences = bt.diff(*runs)
    alone = [bt.diff(runs[0], other) for other in runs[1:]]
    assert isinstance(differences, Differences)
    assert [one.to_dict() for one in differences] == [one.to_dict() for one in alone]
    assert [bool(one) for one in differences] == [False, True, True]
    assert differences
    rows = {row.layer: row for row in differences.layers()}
    assert rows["norm_1_1"].passes == 2
    assert rows["norm_1_1"].runs == (
        "", "value (max abs 1)", "value (max abs 1), without pass 2",
    )  # fmt: skip
    assert rows["gt_1_2"].runs == ("", "value", "value, without pass 2")
    assert rows["div_1_3"].runs == ("", "shape", "missing")
    text = str(differences)
    assert "run 2: the same" in text
    assert "1 iteration in run 1, 2 iterations in run 3; 4 entries only there" in text
    assert "1 iteration in run 1, 0 iterations in run 4" in text
    assert differences.table().to_list()[0] == {
        "layer": "input_1_0", "passes": 1, "module": "", "run_2": "", "run_3": "shape",
        "run_4": "shape",
    }  # fmt: skip
    assert json.loads(json.dumps(differences.to_dict()))["same"] is False
    assert "... 5 more layers: text(limit=None) shows all" in differences.text(limit=1)


def test_runs_that_are_the_same_have_no_layers_that_differ() -> None:
    runs = [run(nn.Linear(2, 2).eval(), torch.ones(1, 2))] * 3
    differences = bt.diff(*runs)
    assert not differences
    assert differences.layers() == []
    assert [row.runs for row in differences.layers(every=True)] == [("", "")] * len(
        {(entry.name, entry.element) for entry in runs[0].entries}
    )
    assert "none" not in str(differences)


def test_names_of_modules_are_shown_as_they_are() -> None:
    model = nn.Sequential()
    model.add_module("run_1", nn.Linear(2, 2))
    runs = [run(model, torch.full((1, 2), size)) for size in (1.0, 2.0, 3.0)]
    text = str(bt.diff(*runs))
    assert " run_1 " in text
    assert text.count("run 2") == 2  # in the summary, and over the column


def test_values_of_more_runs_are_compared_within_tolerances() -> None:
    runs = [run(torch.exp, torch.tensor([value])) for value in (1.0, 1.001, 2.0)]
    assert [bool(one) for one in bt.diff(*runs, atol=0.1)] == [False, True]
    with pytest.raises(InputError, match="the third argument is a int"):
        bt.diff(*runs[:2], 3)  # type: ignore[call-overload]
