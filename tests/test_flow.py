"""Flow steps: what kind, with which value, where in the source, in which iteration."""

# The models are written to have certain constructs, not to be idiomatic.
# ruff: noqa: B007, E701, F841, RUF059

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError

ONES = torch.ones(3, 2)


def steps_of(function: Callable[..., Any], *args: Any) -> bt.flow.FlowSteps:
    return bt.trace(function, *args).flow_steps


def branches(function: Callable[..., Any], *args: Any) -> list[tuple[str, Any, str]]:
    """(kind, value, text) of each branch."""
    steps = steps_of(function, *args).of(bt.flow.LogicalFlowStep)
    return [(step.kind, step.value, step.text) for step in steps]


def loops(function: Callable[..., Any], *args: Any) -> list[tuple[str, str, int | None, int]]:
    """(kind, text, bound, iterations) of each loop."""
    steps = steps_of(function, *args).of(bt.flow.LoopFlowStep)
    return [
        (s.kind, s.text, s.bound, s.iterations) for s in steps if type(s) is bt.flow.LoopFlowStep
    ]


def escapes(function: Callable[..., Any], *args: Any) -> list[tuple[str, Any, str]]:
    """(kind, value, text) of each index and escape."""
    steps = steps_of(function, *args).of(bt.flow.IndexFlowStep, bt.flow.EscapeFlowStep)
    return [(step.kind, step.value, step.text) for step in steps]


def written(folder: Path, source: str) -> Any:
    """Write the source to a file and return the `model` that it defines."""
    file = folder / "net.py"
    file.write_text(source)
    namespace: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), namespace)
    return namespace["model"]


# Reads of sizes


def test_a_read_of_a_size_is_a_step_only_if_the_size_is_used() -> None:
    def read(x: Tensor) -> Tensor:
        _ = x.shape
        rows, columns = x.shape
        return x * rows + x.size(1) + x.shape[-1] + x.numel() + x.size()[0]

    steps = steps_of(read, ONES)
    assert [(type(s), s.kind, s.value, s.text, s.guard) for s in steps] == [
        (bt.flow.ShapeFlowStep, "shape", 3, "x.shape", None),
        (bt.flow.ShapeFlowStep, "shape", 2, "x.size(1)", None),
        (bt.flow.ShapeFlowStep, "shape", 2, "x.shape[-1]", None),
        (bt.flow.ShapeFlowStep, "shape", 6, "x.numel()", None),
        (bt.flow.ShapeFlowStep, "shape", 3, "x.size()[0]", None),
    ]


def test_a_size_read_once_and_used_twice_is_one_step() -> None:
    def read(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x * n + n

    assert len(steps_of(read, ONES)) == 1


# Branches


def test_an_if_has_the_value_and_text_of_its_condition() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x

    assert branches(model, ONES) == [("if", True, "x.sum() > 0")]
    assert branches(model, -ONES) == [("if", False, "x.sum() > 0")]


def test_an_if_over_several_lines_has_its_text_in_one() -> None:
    def model(x: Tensor) -> Tensor:
        if (
            x.sum()
            > 0
        ):  # fmt: skip
            return x
        return -x

    (step,) = steps_of(model, ONES)
    first = model.__code__.co_firstlineno
    assert step.text == "x.sum() > 0"
    assert (step.place.span.line, step.place.span.end_line) == (first + 2, first + 3)


def test_an_elif_is_an_if_of_its_own() -> None:
    def model(x: Tensor) -> Tensor:
        total = x.sum()
        if total > 10:
            return x
        elif total > 0:
            return x + 1
        else:
            return -x

    assert branches(model, ONES) == [("if", False, "total > 10"), ("if", True, "total > 0")]
    assert branches(model, ONES * 9) == [("if", True, "total > 10")]
    assert branches(model, -ONES) == [("if", False, "total > 10"), ("if", False, "total > 0")]


def test_a_tensor_itself_can_be_the_condition() -> None:
    def model(x: Tensor, flag: Tensor) -> Tensor:
        if flag:
            x = x + 1
        if not flag:
            x = x + 2
        return x

    (first, second) = steps_of(model, ONES, torch.tensor(True))
    assert (first.kind, first.value, first.text) == ("if", True, "flag")
    assert (second.kind, second.value, second.text) == ("if", True, "flag")
    assert first.place.span[1] == 11  # of the name alone, not of the statement
    assert second.place.span[1] == 15


def test_an_if_on_one_line_has_the_place_of_its_condition() -> None:
    def model(x: Tensor) -> Tensor:
        for row in x:
            if row.sum() > 1: break  # fmt: skip
        return row

    (step,) = steps_of(model, ONES).of(bt.flow.LogicalFlowStep)
    assert (step.kind, step.value, step.text) == ("if", True, "row.sum() > 1")
    assert step.place.span == (model.__code__.co_firstlineno + 2, 15, step.line, 28)


def test_a_while_is_a_loop_and_a_branch_for_each_test() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() < 20:
            x = x * 2
        return x

    loop, *tests = steps_of(model, ONES)
    assert isinstance(loop, bt.flow.LoopFlowStep)
    assert (loop.kind, loop.text, loop.bound, loop.iterations) == ("while", "x.sum() < 20", None, 2)
    assert (loop.guard, loop.iteration) == (None, ())
    assert [(s.kind, s.value, s.text) for s in tests] == [
        ("while", True, "x.sum() < 20"),
        ("while", True, "x.sum() < 20"),
        ("while", False, "x.sum() < 20"),
    ]
    assert [step.iteration for step in tests] == [(0,), (1,), (2,)]
    assert [step.guard for step in tests] == [0, 1, 2]


def test_a_while_that_is_never_begun_has_no_iterations() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() < 0:
            x = x * 2
        return x

    assert loops(model, ONES) == [("while", "x.sum() < 0", None, 0)]
    assert branches(model, ONES) == [("while", False, "x.sum() < 0")]


def test_a_while_not_has_the_values_of_what_is_negated() -> None:
    def model(x: Tensor) -> Tensor:
        while not x.sum() > 20:
            x = x * 2
        return x

    assert loops(model, ONES) == [("while", "not x.sum() > 20", None, 2)]
    assert branches(model, ONES) == [
        ("while", False, "x.sum() > 20"),
        ("while", False, "x.sum() > 20"),
        ("while", True, "x.sum() > 20"),
    ]


def test_an_assignment_in_place_is_in_the_loop_too() -> None:
    def model(x: Tensor) -> Tensor:
        x = x.clone()
        n = x.sum().item()
        while n:
            n //= 2
        while x.max() > 3:
            x /= 2
        return x

    assert loops(model, ONES * 8) == [("while", "n", None, 6), ("while", "x.max() > 3", None, 2)]


def test_a_while_with_two_operands_counts_what_was_begun() -> None:
    def both(x: Tensor) -> Tensor:
        while x.sum() < 100 and x.max() < 4:
            x = x * 2
        return x

    def either(x: Tensor) -> Tensor:
        while x.sum() < 20 or x.max() < 8:
            x = x * 2
        return x

    assert loops(both, ONES) == [("while", "x.sum() < 100 and x.max() < 4", None, 2)]
    assert branches(both, ONES) == [
        ("and", True, "x.sum() < 100"),
        ("while", True, "x.max() < 4"),
        ("and", True, "x.sum() < 100"),
        ("while", True, "x.max() < 4"),
        ("and", True, "x.sum() < 100"),
        ("while", False, "x.max() < 4"),
    ]
    assert loops(either, ONES) == [("while", "x.sum() < 20 or x.max() < 8", None, 3)]
    tests = steps_of(either, ONES).of(bt.flow.LogicalFlowStep)
    assert [(s.kind, s.value, s.iteration) for s in tests] == [
        ("or", True, (0,)),
        ("or", True, (1,)),
        ("or", False, (2,)),
        ("while", True, (2,)),
        ("or", False, (3,)),
        ("while", False, (3,)),
    ]


def test_a_while_with_a_chained_comparison_is_entered_once() -> None:
    def model(x: Tensor) -> Tensor:
        while not 30 < x.sum() < 1000 and x.max() > 0:
            x = x * 2
        while 20 < x.sum() < 100:
            x = x * 2
        return x

    assert loops(model, ONES) == [
        ("while", "not 30 < x.sum() < 1000 and x.max() > 0", None, 3),
        ("while", "20 < x.sum() < 100", None, 2),
    ]


def test_a_while_over_any_counts_what_was_begun() -> None:
    def model(x: Tensor) -> Tensor:
        while any(row.sum() < 10 for row in x):
            x = x * 2
        return x

    def other(x: Tensor) -> Tensor:
        while all([row.sum() < 10 for row in x]):
            x = x * 2
        return x

    whiles = [step for step in loops(model, ONES) if step[0] == "while"]
    assert whiles == [("while", "any(row.sum() < 10 for row in x)", None, 3)]
    whiles = [step for step in loops(other, ONES) if step[0] == "while"]
    assert whiles == [("while", "all([row.sum() < 10 for row in x])", None, 3)]


def test_a_while_true_with_a_break_has_a_branch_for_each_round() -> None:
    def model(x: Tensor) -> Tensor:
        while True:
            x = x * 2
            if x.sum() > 20:
                break
        return x

    steps = steps_of(model, ONES)
    assert [(s.kind, s.value, s.iteration) for s in steps] == [
        ("if", False, (0,)),
        ("if", True, (1,)),
    ]


def test_a_conditional_expression_says_so() -> None:
    def model(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    assert branches(model, ONES) == [("conditional expression", True, "x.sum() > 0")]


def test_operands_that_others_follow_are_and_or_or() -> None:
    def model(x: Tensor) -> Tensor:
        a, b = x.sum() > 0, x.max() > 5
        if a and b:
            x = x + 1
        if a or b:
            x = x + 2
        if b or a:
            x = x + 3
        both = a and b
        return x

    assert branches(model, ONES) == [
        ("and", True, "a"),
        ("if", False, "b"),
        ("or", True, "a"),
        ("or", False, "b"),
        ("if", True, "a"),
        ("and", True, "a"),  # what `both` is depends on a alone
    ]


def test_the_operands_of_nested_conditions_are_told_apart() -> None:
    def model(x: Tensor) -> Tensor:
        a, b, c = x.sum() > 0, x.max() > 5, x.min() > 0
        return x + 1 if (a and b) or not c else x

    assert branches(model, ONES) == [
        ("and", True, "a"),
        ("or", False, "b"),
        ("conditional expression", True, "c"),
    ]


def test_a_not_is_the_condition_that_it_stands_in_or_else_itself() -> None:
    def model(x: Tensor) -> Tensor:
        a, b = x.sum() > 0, x.max() > 5
        if not a:
            x = x + 1
        x = x + 2 if not (a and not b) else x
        inverse = not a
        return x

    assert branches(model, ONES) == [
        ("if", True, "a"),
        ("and", True, "a"),
        ("conditional expression", False, "b"),
        ("not", True, "a"),
    ]


def test_a_chained_comparison_has_a_step_for_each_comparison() -> None:
    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        if 0 < n < 3:
            return x + 1
        return x

    steps = steps_of(model, ONES).of(bt.flow.LogicalFlowStep)
    assert [(s.name, s.kind, s.value, s.text) for s in steps] == [
        ("gt", "if", True, "0 < n < 3"),
        ("lt", "if", False, "0 < n < 3"),
    ]


ASSERTS = """\
def model(x):
    assert x.shape[0] == 3, "three rows"
    assert (x > 0).all()
    assert not (x < 0).any()
    assert x.max() > 5 or x.min() > 0
    return x
"""


def test_an_assert_has_a_class_of_its_own(tmp_path: Path) -> None:
    steps = steps_of(written(tmp_path, ASSERTS), ONES).of(bt.flow.LogicalFlowStep)
    assert [(type(s).__name__, s.kind, s.value, s.text) for s in steps] == [
        ("AssertFlowStep", "assert", True, "x.shape[0] == 3"),
        ("AssertFlowStep", "assert", True, "(x > 0).all()"),
        ("AssertFlowStep", "assert", False, "(x < 0).any()"),
        ("LogicalFlowStep", "or", False, "x.max() > 5"),
        ("AssertFlowStep", "assert", True, "x.min() > 0"),
    ]
    assert len(steps.of(bt.flow.AssertFlowStep)) == 4


def test_an_assert_that_pytest_has_rewritten_is_one_still() -> None:
    def model(x: Tensor) -> Tensor:
        assert x.sum() > 0
        return x

    (step,) = steps_of(model, ONES)
    assert isinstance(step, bt.flow.AssertFlowStep)
    assert (step.value, step.text) == (True, "x.sum() > 0")


def test_a_filter_has_a_step_for_each_item() -> None:
    def model(x: Tensor) -> Tensor:
        return sum([row for row in x if row.sum() > 1 if row.max() < 3])

    steps = steps_of(model, torch.tensor([[0.0, 0.0], [1.0, 1.0], [4.0, 4.0]]))
    assert [(s.kind, s.value, s.text, s.iteration) for s in steps] == [
        ("comprehension", 3, "x", ()),
        ("comprehension filter", False, "row.sum() > 1", (0,)),
        ("comprehension filter", True, "row.sum() > 1", (1,)),
        ("comprehension filter", True, "row.max() < 3", (1,)),
        ("comprehension filter", True, "row.sum() > 1", (2,)),
        ("comprehension filter", False, "row.max() < 3", (2,)),
    ]


def test_a_match_has_a_step_for_each_case_tried() -> None:
    def model(x: Tensor) -> Tensor:
        match x.shape[0]:
            case 1:
                return x
            case n if n > 5:
                return x * 5
            case 3 | 4:
                return x * 2
            case _:
                return x * 3

    assert branches(model, torch.ones(1)) == [("match", True, "case 1")]
    assert branches(model, torch.ones(7)) == [("match", False, "case 1"), ("match", True, "n > 5")]
    assert branches(model, torch.ones(4)) == [
        ("match", False, "case 1"),
        ("match", False, "n > 5"),
        ("match", False, "case 3"),
        ("match", True, "case 4"),
    ]


def test_a_match_on_a_whole_shape_compares_its_parts() -> None:
    def model(x: Tensor) -> Tensor:
        match x.shape:
            case (2, _):
                return x
            case (3, columns):
                return x * columns
        return -x

    assert branches(model, ONES) == [("match", False, "case 2"), ("match", True, "case 3")]


def test_any_and_all_have_a_step_for_each_thing_they_looked_at() -> None:
    def model(x: Tensor) -> Tensor:
        if any(row.sum() > 3 for row in x):
            x = x + 1
        if all([row.sum() > 3 for row in x]):
            x = x + 2
        return x

    x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    assert branches(model, x) == [
        ("any", False, "any(row.sum() > 3 for row in x)"),
        ("any", True, "any(row.sum() > 3 for row in x)"),
        ("all", True, "all([row.sum() > 3 for row in x])"),
        ("all", True, "all([row.sum() > 3 for row in x])"),
        ("all", False, "all([row.sum() > 3 for row in x])"),
    ]


def compared(model: Callable[..., Any], *args: Any) -> list[tuple[Any, str]]:
    steps = bt.trace(model, *args).flow_steps.of(bt.flow.EscapeFlowStep)
    return [(step.value, step.text) for step in steps if step.kind == "compare"]


def test_comparing_containers_item_by_item_is_no_branch() -> None:
    def contained(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] not in (1, 3, 5) else x

    def unequal(x: Tensor) -> Tensor:
        if (x.shape[0], 2) != (3, 2):
            return x + 1
        return x

    assert branches(contained, ONES) == branches(unequal, ONES) == []
    text = "x.shape[0] not in (1, 3, 5)"
    assert compared(contained, ONES) == [(False, text), (True, text)]
    assert compared(unequal, ONES) == [(True, "(x.shape[0], 2) != (3, 2)")]
    assert all(entry.flow == () for entry in bt.trace(unequal, ONES[:2]).entries)


def test_the_tree_tells_the_return_that_was_taken_after_a_comparison_of_containers() -> None:
    def model(x: Tensor, k: Tensor) -> Tensor:
        if x.shape != k.shape:
            return x + 1
        return x + k

    bended = bt.BendedModule(model)
    bended(ONES, ONES)
    bended(ONES, ONES[0])
    ends = [line.split()[:4] for line in str(bended.tree).splitlines() if "return" in line]
    assert ends == [["return", "x", "+", "k"], ["return", "x", "+", "1"]]


def test_a_walrus_is_part_of_the_condition() -> None:
    def model(x: Tensor) -> Tensor:
        if (n := x.shape[0]) > 2:
            x = x * n
        if total := x.sum() > 100:
            x = x + total
        return x

    assert branches(model, ONES) == [
        ("if", True, "(n := x.shape[0]) > 2"),
        ("if", False, "total := x.sum() > 100"),
    ]


def test_a_truth_value_taken_by_bool_belongs_to_the_condition_around() -> None:
    def model(x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            x = x + 1
        flag = bool(x.sum() > 0)
        return x

    assert branches(model, ONES) == [
        ("if", True, "bool(x.sum() > 0)"),
        ("bool", True, "bool(x.sum() > 0)"),
    ]


# Loops


def test_a_loop_over_a_range_has_its_bound_and_iterations() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            x = x + i
        return x

    shape, loop = steps_of(model, ONES)
    assert (shape.kind, shape.value) == ("shape", 3)
    assert isinstance(loop, bt.flow.LoopFlowStep)
    assert (loop.kind, loop.value, loop.text) == ("for", 3, "range(x.shape[0])")
    assert (loop.bound, loop.iterations) == (3, 3)
    assert repr(loop).endswith(", iterations=3)")


def test_ranges_with_start_and_step_provide_for_fewer_iterations() -> None:
    def model(x: Tensor, n: int) -> Tensor:
        for i in range(1, n):
            x = x + i
        for i in range(0, n, 2):
            x = x + i
        for i in range(n, 0, -1):
            x = x + i
        for i in range(n):
            pass
        return x

    assert loops(model, ONES, 5) == [
        ("for", "range(1, n)", 4, 4),
        ("for", "range(0, n, 2)", 3, 3),
        ("for", "range(n, 0, -1)", 5, 5),
        ("for", "range(n)", 5, 5),
    ]
    assert [(loop[2], loop[3]) for loop in loops(model, ONES, 0)] == [(0, 0)] * 4


def test_each_traced_bound_of_a_range_is_a_step_of_one_loop() -> None:
    def model(x: Tensor, n: int) -> Tensor:
        for i in range(x.shape[0], n):
            x = x * 2
        for i in range(0, n, x.shape[1]):
            x = x * 2
        return x

    steps = steps_of(model, ONES, 6).of(bt.flow.LoopFlowStep)
    assert [(s.text, s.value, s.bound, s.iterations) for s in steps] == [
        ("range(x.shape[0], n)", 3, 3, 3),
        ("range(x.shape[0], n)", 6, 3, 3),
        ("range(0, n, x.shape[1])", 6, 3, 3),
        ("range(0, n, x.shape[1])", 2, 3, 3),
    ]


def test_a_bound_that_is_partly_untraced_is_not_known() -> None:
    layers = [1, 1]

    def model(x: Tensor) -> Tensor:
        for i in range(len(layers), x.shape[0]):
            x = x + i
        return x

    assert loops(model, torch.ones(5)) == [("for", "range(len(layers), x.shape[0])", None, 3)]


def test_a_loop_over_a_tensor_has_its_length() -> None:
    def model(x: Tensor) -> Tensor:
        total = 0
        for row in x:
            total = total + row
        for part in x.split(2):
            total = total + part.sum()
        return total

    assert loops(model, ONES) == [("for", "x", 3, 3), ("for", "x.split(2)", 2, 2)]


def test_a_loop_over_the_length_of_a_tensor_is_a_loop() -> None:
    def model(x: Tensor) -> Tensor:
        total = 0
        for i in range(len(x)):
            total = total + x[i]
        for i in range(1, int(x.sum())):
            total = total + i
        return total

    assert loops(model, ONES) == [
        ("for", "range(len(x))", 3, 3),
        ("for", "range(1, int(x.sum()))", 5, 5),
    ]
    assert escapes(model, ONES) == []


def test_loops_over_zip_enumerate_reversed_and_list() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for a, b in zip(x, y, strict=False):
            total = total + a.sum() * b.sum()
        for i, a in enumerate(x):
            total = total + a.sum() * i
        for a in reversed(x):
            total = total + a.sum()
        for i, (a, b) in enumerate(zip(y, x)):  # noqa: B905
            total = total + a.sum()
        for a in list(x):
            total = total + a.sum()
        for a, name in zip(x, ("a", "b")):  # noqa: B905
            total = total + a.sum()
        for i, a in zip(range(y.shape[0]), x):  # noqa: B905
            total = total + a.sum()
        return total

    assert loops(model, ONES, torch.ones(2)) == [
        ("for", "zip(x, y, strict=False)", 2, 2),
        ("for", "zip(x, y, strict=False)", 2, 2),
        ("for", "enumerate(x)", 3, 3),
        ("for", "reversed(x)", 3, 3),
        ("for", "enumerate(zip(y, x))", 2, 2),
        ("for", "enumerate(zip(y, x))", 2, 2),
        ("for", "list(x)", 3, 3),
        ("for", 'zip(x, ("a", "b"))', None, 2),
        ("for", "zip(range(y.shape[0]), x)", 2, 2),
        ("for", "zip(range(y.shape[0]), x)", 2, 2),
    ]


def test_comprehensions_and_generators_are_loops() -> None:
    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        a = [x[i] for i in range(n)]
        b = sum(x[i] for i in range(n))
        c = {i: row for i, row in enumerate(x)}
        d = [item for row in x for item in row]
        return b

    assert loops(model, torch.ones(2, 3)) == [
        ("comprehension", "range(n)", 2, 2),
        ("comprehension", "range(n)", 2, 2),
        ("comprehension", "enumerate(x)", 2, 2),
        ("comprehension", "x", 2, 2),
        ("comprehension", "row", 3, 3),
        ("comprehension", "row", 3, 3),
    ]


def test_a_generator_that_is_not_asked_for_all_ends_early() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if any(row.sum() > 1 for row in x) else x

    assert loops(model, ONES) == [("comprehension", "x", 3, 1)]
    assert loops(model, ONES * 0) == [("comprehension", "x", 3, 3)]


def test_a_break_leaves_a_loop_with_fewer_iterations_than_its_bound() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            if x[i].sum() > 3.5:
                break
            x = x + 1
        return x

    assert loops(model, ONES) == [("for", "range(x.shape[0])", 3, 2)]
    assert branches(model, ONES) == [
        ("if", False, "x[i].sum() > 3.5"),
        ("if", True, "x[i].sum() > 3.5"),
    ]


def test_a_return_leaves_a_loop_early_too() -> None:
    def model(x: Tensor) -> Tensor:
        for row in x:
            if row.sum() > 1:
                return row
        return x

    assert loops(model, ONES) == [("for", "x", 3, 1)]


def test_a_continue_does_not_leave_the_loop() -> None:
    def model(x: Tensor) -> Tensor:
        total = torch.zeros(2)
        for row in x:
            if row.sum() > 1:
                continue
            total = total + row
        return total

    steps = steps_of(model, ONES)
    assert [(s.kind, s.iteration) for s in steps] == [
        ("for", ()),
        ("if", (0,)),
        ("if", (1,)),
        ("if", (2,)),
    ]
    assert loops(model, ONES) == [("for", "x", 3, 3)]


def test_the_else_of_a_loop_is_no_part_of_it() -> None:
    def model(x: Tensor) -> Tensor:
        for row in x:
            if row.sum() > 100:
                break
        else:
            if x.max() > 0:
                x = x + 1
        return x

    assert [s.iteration for s in steps_of(model, ONES)] == [(), (0,), (1,), (2,), ()]


def test_nested_loops_with_traced_bounds_have_an_iteration_each() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                if x[i, j] > 0:
                    x = x + 1
        return x

    steps = steps_of(model, torch.ones(2, 2))
    assert [(s.kind, s.iteration) for s in steps] == [
        ("shape", ()),
        ("for", ()),
        ("shape", (0,)),
        ("for", (0,)),
        ("if", (0, 0)),
        ("if", (0, 1)),
        ("shape", (1,)),
        ("for", (1,)),
        ("if", (1, 0)),
        ("if", (1, 1)),
    ]
    assert [(s.text, s.iterations) for s in steps if isinstance(s, bt.flow.LoopFlowStep)] == [
        ("range(x.shape[0])", 2),
        ("range(x.shape[1])", 2),
        ("range(x.shape[1])", 2),
    ]


def test_a_size_read_before_a_loop_does_not_disturb_its_count() -> None:
    def model(x: Tensor) -> Tensor:
        n = x.shape[1]
        for row in x:
            x = x * n
            if row.sum() > n:
                x = x + 1
        return x

    tests = steps_of(model, ONES).of(bt.flow.LogicalFlowStep)
    assert [step.iteration for step in tests] == [(0,), (1,), (2,)]


def test_a_while_inside_a_for_starts_anew_each_time() -> None:
    def model(x: Tensor) -> Tensor:
        for limit in (3, 4, 10):
            while x.sum() < limit:
                x = x + 1
        return x

    steps = steps_of(model, torch.zeros(2))
    found = [(type(s).__name__[:5], s.value, s.iteration) for s in steps]
    assert found == [
        ("LoopF", True, (0,)), ("Logic", True, (0, 0)), ("Logic", True, (0, 1)),
        ("Logic", False, (0, 2)),
        ("LoopF", False, (1,)), ("Logic", False, (1, 0)),
        ("LoopF", True, (2,)), ("Logic", True, (2, 0)), ("Logic", True, (2, 1)),
        ("Logic", True, (2, 2)), ("Logic", False, (2, 3)),
    ]  # fmt: skip
    whole = [s.iterations for s in steps if isinstance(s, bt.flow.LoopFlowStep)]
    assert whole == [2, 0, 3]


def test_a_break_out_of_an_inner_loop_goes_on_with_the_outer_one() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(2):
            for j in range(3):
                if x[i, j] > 0:
                    x = x + 1
                    break
        return x

    x = torch.tensor([[0.0, 1.0, 0.0], [-9.0, -9.0, -9.0]])
    assert [s.iteration for s in steps_of(model, x)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_loop_of_literal_length_ends_after_that_many_iterations() -> None:
    def model(x: Tensor) -> Tensor:
        for i in range(2):
            for j in range(2):
                if x[i, j] > 0:
                    x = x + 1
        return x

    assert [s.iteration for s in steps_of(model, ONES)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_comprehension_inside_a_loop_is_in_its_iterations() -> None:
    def model(x: Tensor) -> Tensor:
        for row in x:
            kept = [item for item in row if item > 0]
            x = x + len(kept)
        return x

    steps = steps_of(model, torch.ones(2, 2))
    assert [(s.kind, s.iteration) for s in steps] == [
        ("for", ()),
        ("comprehension", (0,)),
        ("comprehension filter", (0, 0)),
        ("comprehension filter", (0, 1)),
        ("comprehension", (1,)),
        ("comprehension filter", (1, 0)),
        ("comprehension filter", (1, 1)),
    ]


def test_a_module_with_many_ops_called_in_a_loop_counts_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.norm(x)
                if x.sum() > 100:
                    break
            return x

    tests = steps_of(Normed(), torch.randn(4, 2)).of(bt.flow.LogicalFlowStep)
    assert [step.iteration for step in tests] == [(0,), (1,), (2,)]


# Values that go elsewhere


def test_a_traced_integer_or_tensor_that_picks_an_item_is_an_index() -> None:
    layers = [torch.relu, torch.sigmoid, torch.tanh]

    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        y = layers[n - 1](x)
        for layer in layers[:n]:
            y = layer(y)
        return layers[x.argmax()](y)

    steps = steps_of(model, torch.ones(2)).of(bt.flow.IndexFlowStep)
    assert [(s.kind, s.value, s.text) for s in steps] == [
        ("index", 1, "layers[n - 1]"),
        ("index", 2, "layers[:n]"),
        ("index", 0, "layers[x.argmax()]"),
    ]


def test_indexing_a_tensor_by_a_traced_integer_is_no_step() -> None:
    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x[n - 1] + x[: n - 1].sum(0)

    assert [s.kind for s in steps_of(model, ONES)] == ["shape"]


def test_values_that_become_plain_escape() -> None:
    prices = {3: 1.5}

    def model(x: Tensor) -> Tensor:
        n = x.shape[0]
        y = x * int(n) * float(n)
        label = f"{n}"
        root = math.sqrt(n)
        zeros = [0] * n
        text = str(n) + "x" * n
        whole = int(x.sum())
        part = float(x.max())
        later = range(n)
        bits = n.bit_length()
        return y * root * prices[n] * len(label + text)

    steps = steps_of(model, ONES)
    found = [(s.kind, s.value, s.text) for s in steps.of(bt.flow.EscapeFlowStep)]
    assert found == [
        ("int", 3, "int(n)"),
        ("float", 3, "float(n)"),
        ("format", 3, 'f"{n}"'),
        ("float", 3, "math.sqrt(n)"),
        ("index", 3, "[0] * n"),
        ("format", 3, "str(n)"),
        ("index", 3, '"x" * n'),
        ("int", 6, "int(x.sum())"),
        ("float", 1.0, "float(x.max())"),
        ("range", 3, "range(n)"),
        ("bit_length", 3, "n.bit_length"),
        ("hash", 3, "prices[n]"),
    ]
    (key,) = steps.of(bt.flow.LogicalFlowStep)
    assert (key.name, key.kind, key.value, key.text) == ("eq", "key", True, "prices[n]")


def test_a_value_handed_to_numpy_escapes() -> None:
    def model(x: Tensor) -> Tensor:
        return x * float(np.sqrt(x.shape[0]))

    kinds = {s.kind for s in steps_of(model, ONES).of(bt.flow.EscapeFlowStep)}
    assert "numpy" in kinds


def test_a_length_that_is_used_as_a_number_escapes() -> None:
    def model(x: Tensor) -> Tensor:
        return x * len(x)

    assert escapes(model, ONES) == [("len", 3, "len(x)")]


def test_reads_of_metadata_are_guards_but_no_steps() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if x.dtype == torch.float32 and x.dim() == 2 else x

    trace = bt.trace(model, ONES)
    assert len(trace.flow_steps) == 0
    assert [guard.use.value for guard in (trace.guards[0], trace.guards[1])] == ["metadata"] * 2


# Where


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # in Gate
            return x * 2
        return x


def clipped(x: Tensor) -> Tensor:
    if x.shape[0] > 2:  # in clipped
        return x.clamp(-1, 1)
    return x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(), Gate()])
        self.stack = nn.Sequential(nn.ReLU(), Gate())
        self.act = lambda x: x if x.max() > 0 else -x  # in lambda

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x)
        x = clipped(self.act(self.stack(x)))
        return self.countdown(x, x.shape[0])

    def countdown(self, x: Tensor, n: int) -> Tensor:
        if n == 0:  # in countdown
            return x
        return self.countdown(x + 1, n - 1)


def line_of(marker: str) -> int:
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(marker))


def test_steps_know_their_function_line_and_module() -> None:
    tests = steps_of(Gated(), ONES).of(bt.flow.LogicalFlowStep)
    gate, called, countdown = (line_of(f"# in {n}") for n in ("Gate", "clipped", "countdown"))
    assert [(s.module_path, s.place.function, s.line) for s in tests] == [
        ("gates.0", "forward", gate),
        ("gates.1", "forward", gate),
        ("stack.1", "forward", gate),
        ("", "<lambda>", line_of("# in lambda")),
        ("", "clipped", called),
        *[("", "countdown", countdown)] * 4,
    ]
    assert [step.value for step in tests[-4:]] == [False, False, False, True]
    assert {step.file for step in tests} == {__file__}


def test_steps_and_nodes_inside_of_attention_are_where_the_model_calls_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    trace = bt.trace(Model(), torch.ones(3, 1, 4))
    line = Model.forward.__code__.co_firstlineno + 1
    assert len(trace.flow_steps) > 3
    assert {(s.file, s.line, s.module_path) for s in trace.flow_steps} == {(__file__, line, "")}
    sites = {data.get("site") for _, data in trace.graph.nodes(data=True)} - {None}
    assert sites == {f"{__file__}:{line}"}


def test_steps_know_their_exact_span() -> None:
    step = steps_of(Gate(), ONES)[0]
    line = line_of("# in Gate")
    assert step.place.span == (line, 11, line, 22)
    with open(__file__) as file:
        source = file.read().splitlines()[line - 1]
    assert source[11:22] == step.text == "x.sum() > 0"


def test_columns_count_bytes_and_texts_come_out_right_behind_other_letters() -> None:
    def model(größe: Tensor) -> Tensor:
        if "äöü" and größe.sum() > 0:
            return größe
        return -größe

    assert branches(model, ONES) == [("if", True, "größe.sum() > 0")]


def test_the_name_of_a_step_is_the_node_whose_value_was_consumed() -> None:
    def model(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x + 1
        if x.sum() > 3:
            x = x * 2
        return x

    trace = bt.trace(model, ONES)
    for step in trace.flow_steps:
        assert trace.graph.nodes[step.name]["value"] == step.value
    assert [step.name for step in trace.flow_steps] == ["getitem", "gt", "bool"]
    assert trace.graph.nodes["bool"]["args"] == (bt.graph.NodeRef("gt_1"),)


def test_the_guard_of_a_step_is_a_number_in_the_table_of_guards() -> None:
    trace = bt.trace(Gated(), ONES)
    for step in trace.flow_steps:
        if step.guard is not None:
            guard = trace.guards[step.guard]
            assert trace.names[guard.index] == step.name
            assert guard.answer == step.value


def test_steps_of_code_without_a_file_still_have_a_line() -> None:
    namespace: dict[str, Any] = {}
    exec("def model(x):\n    if x.sum() > 0:\n        return x\n    return -x\n", namespace)
    (step,) = steps_of(namespace["model"], ONES)
    assert (step.kind, step.value, step.text, step.file, step.line) == (
        "bool", True, "", "<string>", 2,
    )  # fmt: skip


# Printing


STOPS = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])


def small(x: Tensor) -> Tensor:
    for row in x:
        if row.sum() > 3:
            break
        x = x * x.shape[1]
    return x if x.max() > 0 and x.min() < 100000000 else -x


COUNTED = """\
def model(x, n):
    for _ in range(n):
        x = x + x.shape[0]
    return x if x.sum() > 0 else -x
"""


def test_the_exact_table_of_a_small_model(tmp_path: Path) -> None:
    assert (
        steps_of(written(tmp_path, COUNTED), torch.ones(2), 2).table()
        == """\
node       kind                    value         source       at        module    iteration
---------  ----------------------  ------------  -----------  --------  --------  -----------
n          for                     2 iterations  range(n)     net.py:2
getitem    shape                   2             x.shape[0]   net.py:3            0
getitem_1  shape                   2             x.shape[0]   net.py:3            1
bool       conditional expression  True          x.sum() > 0  net.py:4"""
    )


def test_a_printed_table_leaves_out_reads_of_sizes_and_says_so(tmp_path: Path) -> None:
    steps = steps_of(written(tmp_path, COUNTED), torch.ones(2), 2)
    *lines, last = str(steps).splitlines()
    assert "\n".join(lines) == steps.table(shapes=False)
    assert [line.split()[1] for line in lines[2:]] == ["for", "conditional"]
    assert last == "2 reads of sizes are not listed: flow_steps.table() has all"
    assert str(steps_of(lambda x: x.view(x.shape[0]), torch.ones(2))).startswith(
        "1 read of sizes is not"
    )
    assert "getitem" not in steps._repr_mimebundle_()["text/html"]


def test_a_table_of_the_users_own_code_leaves_out_installed_packages(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    inner = written(package, "def model(x):\n    return -x if x.sum() > 9 else x\n")

    def outer(x: Tensor) -> Tensor:
        return inner(x) if x.sum() > 0 else x

    bended = bt.BendedModule(outer)
    bended(ONES)
    steps = bended.traces[0].flow_steps
    assert [step.text for step in steps] == ["x.sum() > 0", "x.sum() > 9"]
    assert "> 9" not in steps.table(only="mine")
    assert "> 0" in steps.table(only="mine")
    # Branches are sorted by their files, and which comes first depends on where the tests lie.
    assert {branch.text for branch in bended.coverage()} == {"x.sum() > 9", "x.sum() > 0"}
    assert [branch.text for branch in bended.coverage(only="mine")] == ["x.sum() > 0"]
    assert bended.coverage(only="mine").total == 1
    for printed in (bended.tree, bended.traces[0]):
        mine = printed.to_text(only="mine")
        assert "x.sum() > 9" in printed.to_text()
        assert "x.sum() > 9" not in mine
        assert "x.sum() > 0" in mine
    for refuses in (bended.coverage, bended.tree.to_text, bended.traces[0].to_text):
        with pytest.raises(InputError, match="not 'own'"):
            refuses(only="own")


def test_long_source_is_shortened_in_the_table_only() -> None:
    def model(x: Tensor) -> Tensor:
        return x if x.sum() + x.sum() + x.sum() + x.sum() + x.sum() + x.sum() + x.sum() > 0 else -x

    steps = steps_of(model, ONES)
    assert steps[0].text == " + ".join(["x.sum()"] * 7) + " > 0"
    assert "x.sum() + x.sum() + x.sum() + x.sum() + x.sum() + ..." in str(steps)


def test_no_steps_say_so() -> None:
    steps = steps_of(lambda x: x + 1, ONES)
    assert str(steps) == "no flow steps"
    assert repr(steps) == "[]"
    assert list(steps) == []


def test_a_step_is_printed_with_name_value_and_place() -> None:
    (step,) = steps_of(Gate(), ONES)
    where = f"{__file__}:forward.{line_of('# in Gate')}"
    assert repr(step) == f"LogicalFlowStep(name=bool, value=True, file={where})"
    assert repr(steps_of(Gate(), ONES)) == f"[{step!r}]"


def test_steps_survive_json() -> None:
    steps = steps_of(small, STOPS)
    again = json.loads(json.dumps(steps.to_list()))
    assert again == steps.to_list()
    first = small.__code__.co_firstlineno
    assert again[0] == {
        "step": "LoopFlowStep",
        "name": "unbind",
        "kind": "for",
        "value": 3,
        "file": __file__,
        "line": first + 1,
        "column": 15,
        "end_line": first + 1,
        "end_column": 16,
        "function": "small",
        "text": "x",
        "module_path": "",
        "guard": 1,
        "iteration": [],
        "bound": 3,
        "iterations": 2,
    }
    assert again[1]["step"] == "LogicalFlowStep"
    assert again[1]["iteration"] == [0]
    assert os.path.basename(again[1]["file"]) == "test_flow.py"


def test_values_that_json_has_no_word_for_are_written_as_text() -> None:
    def model(x: Tensor) -> complex:
        return complex(x.sum())

    (step,) = steps_of(model, torch.ones(2, dtype=torch.complex64))
    assert step.value == 2 + 0j
    assert step.to_dict()["value"] == "(2+0j)"


# As a list


def test_steps_are_a_list_that_can_be_sliced_and_filtered() -> None:
    steps = steps_of(small, STOPS)
    assert len(steps) == 6
    assert isinstance(steps[0], bt.flow.LoopFlowStep)
    assert isinstance(steps[1:3], bt.flow.FlowSteps)
    assert list(steps[1:3]) == [steps[1], steps[2]]
    assert steps[-1].kind == "conditional expression"
    assert [s.kind for s in steps.of(bt.flow.ShapeFlowStep)] == ["shape"]
    assert len(steps.of(bt.flow.ShapeFlowStep, bt.flow.LoopFlowStep)) == 2
    assert len(steps.of()) == 0
    assert len(steps.of(bt.flow.FlowStep)) == 6
    assert steps[2] in steps
    with pytest.raises(IndexError):
        steps[6]


# Against what Python counts

BODIES = ("x = x + 1", "x = x * 1", "break", "continue")
HEADERS = (
    "for _ in x:", "for _ in range(n):", "for _ in range(1, n):", "for _ in range(x.shape[0]):",
    "for _ in range(2):", "for _, _ in zip(x, x):", "while x.sum() < limit:",
)  # fmt: skip


def program(seed: int) -> str:
    """A function of nested loops that notes the iteration before each of its tests."""
    draw = random.Random(seed)
    lines = ["def model(x, n, notes):"]

    def block(indent: str, counters: tuple[str, ...]) -> None:
        for _ in range(draw.randint(1, 2)):
            if draw.random() < 0.5 or len(counters) == 3:
                lines.append(f"{indent}notes.append(({''.join(c + ',' for c in counters)}))")
                lines.append(f"{indent}if x.sum() > {draw.choice((-100, 0, 2, 5, 9, 30, 1e9))}:")
                lines.append(f"{indent}    {draw.choice(BODIES if counters else BODIES[:2])}")
                continue
            counter, header = f"c{len(lines)}", draw.choice(HEADERS)
            lines.append(f"{indent}{counter} = -1; limit = x.sum() + {draw.randint(0, 3)}")
            lines.append(f"{indent}{header.replace('limit', f'l{counter}')}")
            lines[-2] = lines[-2].replace("limit", f"l{counter}")
            lines.append(f"{indent}    {counter} += 1")
            lines.append(f"{indent}    x = x + 1")
            notes = "".join(c + "," for c in (*counters, counter))
            lines.append(f"{indent}    notes.append(({notes}))")
            lines.append(f"{indent}    if x.sum() > 1e6: pass")
            block(indent + "    ", (*counters, counter))

    block("    ", ())
    return "\n".join([*lines, "    return x"]) + "\n"


@pytest.mark.parametrize("seed", range(40))
def test_iterations_are_those_that_python_counts(tmp_path: Path, seed: int) -> None:
    model = written(tmp_path, program(seed))
    notes: list[tuple[int, ...]] = []
    steps = steps_of(lambda x, n: model(x, n, notes), torch.zeros(2, 1), 3)
    assert [step.iteration for step in steps if step.kind == "if"] == notes
