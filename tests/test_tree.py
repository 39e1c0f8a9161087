"""The trace tree: what it prints, what it counts, what it forgets, and what was never seen."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
import threading
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import bendtrace as bt
from bendtrace.engine.program import Program
from bendtrace.errors import InputError, TraceLimitWarning
from tests.pictures import apart
from tests.promise import bits
from tests.tree_models import EarlyExit, Refine, covers, halve, sorts


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def called(model: Callable[..., Any], *calls: Any, **options: Any) -> bt.BendedModule:
    """Call with each of some arguments; errors of the model end only the call."""
    torch.manual_seed(0)
    bended = bt.BendedModule(model, **options)
    for call in calls:
        try:
            bended(*(call if isinstance(call, tuple) else (call,)))
        except (AssertionError, RuntimeError, ValueError):
            continue
    return bended


def branches_of(bended: bt.BendedModule) -> dict[str, dict[str, Any]]:
    """All branches of a tree by their text."""
    found: dict[str, dict[str, Any]] = {}

    def visit(flow: list[dict[str, Any]]) -> None:
        for item in flow:
            if "text" in item and "outcomes" in item:
                found[item["text"]] = item
            for taken in item.get("outcomes", ()):
                visit(taken["flow"])

    for program in bended.tree.to_dict()["programs"]:
        visit(program["flow"])
    return found


def hits(branch: dict[str, Any]) -> dict[Any, int]:
    return {taken["value"]: taken["hits"] for taken in branch["outcomes"]}


def test_prints_as_a_program() -> None:
    bended = called(
        Refine(), torch.ones(5, 4), torch.ones(6, 4), torch.zeros(2, 4), torch.zeros(1, 4)
    )
    first = Refine.forward.__code__.co_firstlineno
    at = [f"tree_models.py:{first + offset}" for offset in (1, 3, 5, 7)]
    assert str(bended.tree).splitlines() == [
        "Refine: 2 programs, 2 traces; replays 2, retraces 1",
        "",
        "program 1: x: float32[5, 4]",
        "  where x.shape[0] > 3 is True",
        "  1 trace, 2 runs",
        f"    if x.shape[0] > 3:           always, for these inputs       {at[0]}",
        f"    while x.norm() > tolerance:  2 iterations, entered 2 times  {at[1]}",
        f"        if x.isnan().any():      never (4x)                     {at[2]}",
        f"    return x                     2 runs                         {at[3]}",
        "",
        "program 2: x: float32[2, 4]",
        "  where x.shape[0] > 3 is False",
        "  1 trace, 2 runs",
        f"    if x.shape[0] > 3:           never, for these inputs        {at[0]}",
        f"    while x.norm() > tolerance:  0 iterations, entered 2 times  {at[1]}",
        f"    return x                     2 runs                         {at[3]}",
    ]
    assert repr(bended.tree) == str(bended.tree)


def test_nests_branches_as_the_source_does_and_says_where_runs_end() -> None:
    bended = called(
        sorts, (numbers(0.0, 0.0), 1), (numbers(1.0, 2.0), 1), (numbers(3.0, 4.0), 1),
        (numbers(1.0, 2.0), 5),
    )  # fmt: skip
    lines = [re.sub(r"(?<=\S)  +", " # ", line) for line in str(bended.tree).splitlines()]
    lines = [line.partition(" # tree_models.py")[0] for line in lines]
    assert lines[2:] == [
        "program 1: x: float32[2], n: 1",
        "  3 traces, 3 runs",
        "    if not x.any(): # 1 of 4",
        "        return x # 1 run",
        "    n > 3 and ... # 1 of 3",
        "        if ... and x.sum() > 0: # always (1x)",
        "    elif x.min() < -5: # never (2x)",
        "    assert y.sum() != 7 # 2 of 3",
        "    else ... # 1 of 3",
        "        raise AssertionError # 1 run",
        "    int(y.max()) # 2 (1x), 10 (1x)",
        "    return y * int(y.max()) # 2 runs",
    ]


def test_rolls_up_loops_modules_and_recursion() -> None:
    def recursive(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 1:
            return x
        return recursive(x / 2) + 1

    steps = called(halve, *(numbers(2.0**k) for k in range(30)))
    assert len(str(steps.tree).splitlines()) == 6
    assert f"{sum(range(30))} iterations in all, entered 30 times" in str(steps.tree)
    layers = called(EarlyExit().eval(), *(torch.randn(2, 4) * s for s in (1, 0.1, 5, 20, 0.3, 9)))
    assert len(str(layers.tree).splitlines()) < 10
    assert len(branches_of(layers)["... if x.mean() > 0 else ..."]["modules"]) > 3
    deep = called(recursive, numbers(0.1), numbers(1.0), numbers(100.0), numbers(1e6))
    assert len(str(deep.tree).splitlines()) < 10
    assert sum(sum(hits(branch).values()) for branch in branches_of(deep).values()) > 20


def test_a_loop_over_several_things_is_entered_once() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for row, other in zip(x, x.flip(0)):  # noqa: B905
            total = total + row @ other
        return total

    branches = branches_of(called(model, torch.ones(3, 2), torch.ones(3, 2)))
    assert branches["for row, other in zip(x, x.flip(0))"]["iterations"] == {
        "entered": 2, "total": 6, "least": 3, "most": 3
    }  # fmt: skip


def test_counts_each_side_over_all_calls() -> None:
    bended = called(sorts, *[(numbers(1.0, 2.0), 5)] * 3, *[(numbers(-1.0, -2.0), 5)] * 2)
    branches = branches_of(bended)
    assert hits(branches["if ... and x.sum() > 0"]) == {True: 3, False: 2}
    assert hits(branches["if not x.any()"]) == {False: 5}
    assert branches["if not x.any()"]["never"] == [True]
    assert hits(branches["int(y.max())"]) == {10: 3, -1: 2}
    assert branches["n > 3 and ..."]["when"] == ["input"]
    assert branches["if not x.any()"]["when"] == ["data"]
    assert [program.runs for program in bended.tree.programs] == [5]


def test_counts_what_is_gone_along_a_path_of_another_program() -> None:
    def model(x: torch.Tensor, n: int) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2 if n > 3 else x
        return -x

    plus, minus = numbers(1.0), numbers(-1.0)
    bended = called(model, (plus, 5), (minus, 1), (plus, 5), (minus, 5), (plus, 5))
    assert bended.stats == bt.Stats(traces=2, replays=3, retraces=1)
    first, second = bended.tree.programs
    assert (first.runs, second.runs) == (1, 4)
    assert [hits(branch.to_dict()) for branch in second.flow.branches.values()] == [
        {True: 2, False: 2}
    ]


def test_says_what_runs_live_and_from_where_on() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return torch.tensor([*x.numpy().flat]) * 2
        return x

    bended = called(model, *map(numbers, (-1.0, 1.0, 1.0, -1.0, 1.0)))
    lines = [" ".join(line.split()) for line in str(bended.tree).splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("if x.sum() > 0: 3 of 5"))
    assert lines[at + 1].startswith("live only 3 runs numpy at ")
    assert lines[at + 2].startswith("return x 2 runs")
    assert bended.stats.live == 3
    assert any("numpy" in reason for reason in bended.why_live)


class Smooth(nn.Module):
    """Hands values to numpy on one side of a branch, and draws random numbers on both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.dropout(x)
        if x.sum() > 0:
            x = torch.tensor([*x.numpy().flat]) * 2
        return self.dropout(x) + self.calls


@pytest.mark.parametrize("signs", ["+----+-+", "+" * 3 + "-" * 4 + "+-", "-+-+--", "+" * 9])
def test_calls_that_can_be_replayed_are_whatever_ran_live_before(signs: str) -> None:
    pytest.importorskip("numpy", reason="needs the test extra")
    eager, bended = Smooth(), bt.BendedModule(Smooth())
    clean = 0
    for number, sign in enumerate(signs):
        x = torch.full((8,), 3.0 if sign == "+" else -3.0)
        torch.manual_seed(number)
        wanted = bits((eager(x), torch.get_rng_state(), eager.calls))
        torch.manual_seed(number)
        before = bended.stats.replays
        assert bits((bended(x), torch.get_rng_state(), bended.model.calls)) == wanted
        clean += bended.stats.replays > before
    assert bended.stats.live >= signs.count("+")
    # Of those after the first, at most so many pass until the next one is looked at again.
    assert clean >= signs.count("-") // 2
    assert bended.stats.traces <= 2
    assert any("numpy" in reason for reason in bended.why_live) == ("+" in signs)


def test_the_run_that_was_live_stays_in_the_tree_beside_the_one_that_is_not() -> None:
    pytest.importorskip("numpy", reason="needs the test extra")
    bended = called(Smooth().eval(), *(torch.full((2,), value) for value in (3.0, -3.0, -3.0, 3.0)))
    assert bended.stats == bt.Stats(traces=2, replays=1, retraces=2, resumes=1, live=2)
    (branch,) = branches_of(bended).values()
    assert hits(branch) == {True: 2, False: 2}
    assert not bended.coverage()


def test_only_where_values_decide_is_a_live_run_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numpy", reason="needs the test extra")
    looked: list[Any] = []
    record = bt.engine.dispatcher.record

    def noted(*args: Any, **kwargs: Any) -> Any:
        looked.append(args)
        return record(*args, **kwargs)

    monkeypatch.setattr(bt.engine.dispatcher, "record", noted)
    called(lambda x: torch.tensor([*x.numpy().flat]) * 2, *[torch.ones(2)] * 9)
    assert len(looked) == 1
    looked.clear()
    called(Smooth().eval(), *[torch.ones(2)] * 9)
    assert len(looked) == 4  # the first call, the second, the fourth, the eighth


def test_notes_errors_of_the_model_where_they_were_raised() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x @ y

    one, two = torch.ones(2, 2), torch.full((2, 2), 2.0)
    bended = called(model, (one, two), (-one, two), (-one, two), (one, torch.ones(3, 3)))
    lines = [" ".join(line.split()) for line in str(bended.tree).splitlines()]
    first = model.__code__.co_firstlineno
    assert f"raise ValueError 2 runs test_tree.py:{first + 2}" in lines
    assert f"raise RuntimeError 1 run test_tree.py:{first + 3}" in lines
    assert hits(branches_of(bended)["if x.sum() < 0"]) == {True: 2, False: 2}
    fresh = called(model, (-one, two))
    assert f"ValueError at test_tree.py:{first + 2}: 1 run" in str(fresh.tree)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.train(), "self.training is True (and 37 more like it)"),
        (lambda model: setattr(model.layers[3].fc, "in_features", 5), "in_features is 5"),
    ],
)
def test_says_what_selects_a_program(change: Callable[[nn.Module], Any], told: str) -> None:
    class Model(EarlyExit):
        def forward(self, x: torch.Tensor, threshold: float = 0.5) -> torch.Tensor:
            return self.layers[3](x)[0] if self.training else self.layers[3](x)[1]

    bended = called(Model().eval(), torch.ones(2, 4))
    change(bended.model)
    bended(torch.ones(2, 4))
    assert told in " ".join(bended.tree.programs[1].selected_by)


def test_says_which_inputs_and_modes_select_a_program() -> None:
    bended = called(lambda x, **k: x * 2, torch.ones(2), torch.ones(2, 2), torch.ones(2).double())
    with torch.no_grad():
        bended(torch.ones(2))
    bended(torch.ones(2), scale=3)
    told = [program.selected_by for program in bended.tree.programs]
    assert "x has 2 dimensions" in told[1]
    assert "x is float64" in told[2]
    assert "grad mode is off" in told[3]
    assert "the arguments given are x, scale" in told[4]


MODELS: dict[str, Callable[[], bt.BendedModule]] = {
    "refine": lambda: called(Refine(), torch.ones(5, 4), torch.zeros(2, 4)),
    "sorts": lambda: called(
        sorts, numbers(0.0), *((numbers(*v), 5) for v in [(1.0, 2.0), (3.0, 4.0), (-9.0, 1.0)])
    ),
    "halve": lambda: called(halve, *(numbers(2.0**k) for k in range(4))),
    "nothing": lambda: bt.BendedModule(halve),
}


@pytest.mark.parametrize("name", MODELS)
def test_is_a_graph_and_json(name: str, tmp_path: Any) -> None:
    tree = MODELS[name]().tree
    graph = tree.to_networkx()
    ends = [n for n, data in graph.nodes(data=True) if data["kind"] in ("return", "raise", "live")]
    for program in tree.programs:
        start = f"program {program.number}"
        leaving = [data["hits"] for _, _, data in graph.out_edges(start, data=True)]
        reached = [end for end in ends if end.startswith(f"{program.number}.")]
        raised = [end for end in reached if graph.nodes[end]["kind"] == "raise"]
        assert sum(leaving) == program.runs + sum(graph.nodes[end]["hits"] for end in raised)
        assert all(nx.has_path(graph, start, end) for end in reached)
        assert sum(graph.nodes[end]["hits"] for end in reached) == sum(leaving)
    nx.write_graphml(graph, tmp_path / "tree.graphml")
    assert json.loads(tree.to_json()) == json.loads(json.dumps(tree.to_dict()))
    assert len(tree.to_dict()["programs"]) == len(tree)


@pytest.mark.parametrize("name", MODELS)
def test_is_drawn_with_no_text_over_another(name: str) -> None:
    tree = MODELS[name]().tree
    picture = tree.draw()
    texts = apart(picture.canvas)
    root = ElementTree.fromstring(tree.to_svg())
    written = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert written == texts
    assert len(picture.scene.nodes()) == len(tree.to_networkx())


def test_what_is_drawn_is_escaped() -> None:
    def model(x: torch.Tensor, flag: str) -> torch.Tensor:
        return x if x.sum() < 3 and flag != "<&>" else x + 1

    bended = called(model, (numbers(1.0), '<b>"\x00&'), (numbers(5.0), "]]>"))
    ElementTree.fromstring(bended.tree.to_svg())
    assert "&lt;b&gt;" in bended.tree.to_svg()
    bundle = bended.tree._repr_mimebundle_()
    assert bundle["image/svg+xml"] == bended.tree._repr_svg_()
    assert "x.sum() &lt; 3" in bundle["text/html"]
    assert bundle["text/plain"] == str(bended.tree)


def test_is_a_picture_of_its_moment() -> None:
    bended = called(halve, numbers(0.5))
    before = bended.tree
    text = str(before)
    bended(numbers(8.0))
    assert str(before) == text
    assert str(bended.tree) != text


def test_code_without_source_prints_too() -> None:
    space: dict[str, Any] = {}
    exec("def model(x):\n  while x.sum() > 1:\n    x = x / 2\n  return x", space)
    bended = called(space["model"], numbers(1.0), numbers(4.0))
    assert "(source not found)" in str(bended.tree)
    assert "2 runs" in str(bended.tree)
    assert len(bended.coverage()) == 0
    ElementTree.fromstring(bended.tree.to_svg())


# Coverage


def seen(bended: bt.BendedModule) -> dict[str, tuple[str, int, int | None]]:
    return {branch.text: (branch.kind, branch.true, branch.false) for branch in bended.coverage()}


class Experts(nn.Module):
    """Asks in each iteration whether anything goes to an expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            if (x > number).any():
                x = x + 0.0
        return x


def test_counts_each_iteration_of_a_loop_over_things() -> None:
    bended = called(Experts(), *(numbers(v) for v in (0.5, 1.5, 2.0, 0.5, 0.5, -1.0)))
    assert "iteration 0: 5 of 6, 1: 2 of 6" in str(bended.tree)
    (branch,) = branches_of(bended).values()
    assert [(turn["iteration"], turn["true"]) for turn in branch["turns"]] == [([0], 5), ([1], 2)]
    assert not bended.coverage().uneven


def test_counts_each_module_that_runs_the_same_code() -> None:
    class Block(nn.Module):
        def __init__(self, least: float) -> None:
            super().__init__()
            self.register_buffer("least", torch.tensor(least))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.0 if x.sum() > self.least else x

    bended = called(nn.Sequential(Block(0.0), Block(1.0)), numbers(0.5), numbers(2.0))
    assert "0: 2 of 2, 1: 1 of 2" in str(bended.tree)
    coverage = bended.coverage()
    assert not coverage
    assert coverage.uneven[0].seen == "True in 0: 2 of 2, 1: 1 of 2"
    assert "one side only in some iterations or modules" in str(coverage)


def two_limits(x: torch.Tensor) -> torch.Tensor:
    steps = 0
    while x.norm() > 1 and steps < 5:
        x, steps = x / 2, steps + 1
    return x


def test_counts_how_often_a_while_of_several_parts_is_entered_in_which_paths_join() -> None:
    bended = called(two_limits, *(torch.ones(2) * size for size in (0.1, 4, 30, 3, 3, 0.2)))
    assert bended.stats.replays > 0
    assert "while x.norm() > 1 and steps < 5:  entered 6 times" in str(bended.tree)
    (loop,) = (b for b in branches_of(bended).values() if "iterations" in b)
    assert loop["iterations"] == {"entered": 6}


def test_does_not_tell_iterations_of_a_while_apart_in_which_paths_join() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 10:
            x = x * 2 if x.sum() > 3 else x + 1
        return x

    bended = called(model, numbers(1.0), numbers(4.0))
    assert "iteration 0" not in str(bended.tree)


def test_lists_the_branches_that_were_seen_on_one_side_only() -> None:
    found = seen(called(covers, *[numbers(2.0, 3.0)] * 3))
    assert found == {
        "flag": ("if", 0, None),
        "x.sum() > 100": ("if", 0, 3),
        "x.max() > 1000": ("if", 0, 0),
        "x.sum() > 10 and n < 5": ("while", 0, 3),
        "x.sum() > 10": ("and", 0, 3),
        "x.min() > 0": ("conditional expression", 3, 0),
        "v > 1": ("comprehension filter", 6, 0),
        "known": ("for-else", 3, None),
        "item == 3": ("if", 0, None),
        "y.sum() != 7": ("assert", 3, 0),
        "flag or y.sum() > 50": ("if", 0, 3),
    }


def test_branches_seen_on_both_sides_are_not_listed() -> None:
    bended = called(
        covers, numbers(2.0, 3.0), numbers(200.0, 3.0), numbers(2000.0, 1.0), numbers(-1.0, 0.25),
        (numbers(2.0, 3.0), True), numbers(1.0, 3.5),
    )  # fmt: skip
    found = seen(bended)
    assert not {"x.sum() > 100", "x.max() > 1000", "x.sum() > 10 and n < 5", "x.min() > 0",
                "v > 1", "y.sum() != 7", "flag or y.sum() > 50"} & set(found)  # fmt: skip
    assert found["flag"] == ("if", 1, None)
    assert bended.coverage().total == len(found) + 8


def test_says_which_branches_no_guard_watches() -> None:
    coverage = called(covers, numbers(2.0, 3.0), (numbers(2.0, 3.0), True)).coverage()
    by_text = {branch.text: branch for branch in coverage}
    assert not by_text["flag"].watched
    assert by_text["flag"].missing == (False,)
    assert by_text["flag"].seen == "True seen, False leaves no trace"
    assert by_text["item == 3"].seen == "nothing recorded under it"
    assert by_text["x.sum() > 100"].watched
    assert by_text["x.sum() > 100"].seen == "False 2x, never True"
    first = covers.__code__.co_firstlineno
    assert by_text["x.sum() > 100"].line == first + 5
    assert str(by_text["x.sum() > 100"]) == (
        f"if `x.sum() > 100` at tree_models.py:{first + 5}: False 2x, never True"
    )


def test_coverage_is_a_list_that_prints_as_tables() -> None:
    coverage = called(covers, numbers(2.0, 3.0)).coverage()
    assert [branch.line for branch in coverage] == sorted(branch.line for branch in coverage)
    assert json.loads(json.dumps(coverage.to_list()))[0]["missing"] == [True, False]
    assert len(coverage[:2]) == 2
    lines = str(coverage).splitlines()
    assert (
        lines[0]
        == f"branches seen on both sides: {coverage.total - len(coverage)} of {coverage.total}"
    )
    assert lines[2] == "decided by the inputs:"
    assert any("never True" in line for line in lines)
    assert repr(coverage) == str(coverage)


def test_coverage_looks_into_what_the_model_calls_but_not_into_torch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.exits = nn.TransformerEncoderLayer(4, 2, 8), EarlyExit()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.exits(self.block(x), 0.0)

    coverage = called(Model(), torch.ones(2, 4)).coverage()
    assert [(branch.function, branch.text) for branch in coverage] == [
        ("forward", "x.mean() > 0"), ("forward", "logits.softmax(-1).max() > threshold")
    ]  # fmt: skip


# The limit


def test_forgets_the_least_used_paths_and_traces_them_again() -> None:
    bended = bt.BendedModule(halve, max_traces=4)
    often, seldom = [numbers(2.0**k) for k in range(3)], [numbers(2.0**k) for k in range(3, 9)]
    calls = [x for one in seldom for x in [*often * 4, one]]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for x in calls:
            assert bits(bended(x)) == bits(halve(x))
    assert len(given) == 1
    assert len(bended.traces) == 4
    assert bended.stats.traces == len(often) + len(seldom)  # the often used ones only once
    assert "5 more forgotten" in str(bended.tree)


def test_a_path_that_is_not_used_any_more_goes_in_the_end() -> None:
    bended = bt.BendedModule(lambda x: x * 2, max_traces=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bt.errors.TraceLimitWarning)
        for rank in [1] * 50 + [2, 3] * 20:
            bended(torch.ones((1,) * rank))
    assert bended.stats.traces < 15  # and not 41
    assert sorted(program.inputs for program in bended.tree.programs) == [
        "x: float32[1, 1, 1]", "x: float32[1, 1]"
    ]  # fmt: skip


def test_whole_programs_are_forgotten_too() -> None:
    bended = bt.BendedModule(lambda x: x * 2, max_traces=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bt.errors.TraceLimitWarning)
        for rank in (1, 2, 3, 4, 1, 1, 4):
            x = torch.ones((2,) * rank)
            assert torch.equal(bended(x), x * 2)
    assert len(bended.traces) == 2
    assert bended.stats.traces == 5


def test_the_warning_names_what_the_paths_differ_by() -> None:
    line = halve.__code__.co_firstlineno + 2
    with pytest.warns(TraceLimitWarning) as given:
        called(halve, *(numbers(2.0**k) for k in range(6)), max_traces=5)
    assert given[0].filename == __file__
    assert str(given[0].message) == (
        "the model has taken more than 5 paths: from now on the least used are forgotten, and "
        "traced again when they come up. What most of them differ by is `while x.sum() > 1` at "
        f"{halve.__code__.co_filename}:{line} (5 of 6 paths). If that differs on nearly every "
        "call, keep it in tensors (torch.where, masking) or call the model itself; if there are "
        "just more paths than that, raise BendedModule's max_traces"
    )
    with pytest.warns(TraceLimitWarning, match="is the number of dimensions of `x` "):
        called(lambda x: x * 2, *(torch.ones((1,) * k) for k in range(4)), max_traces=3)


@pytest.mark.parametrize("limit", [0, -1, 2.5, True, "all"])
def test_the_limit_is_a_positive_number(limit: Any) -> None:
    with pytest.raises(InputError, match="max_traces has to be a positive int or None"):
        bt.BendedModule(halve, max_traces=limit)


@pytest.mark.more
def test_without_a_limit_all_paths_are_kept() -> None:
    def listed(x: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        while x.sum() > 1:
            x = x / 2
            parts.append(x)
        return parts

    bended = called(listed, *(numbers(2.0**k) for k in range(70)), max_traces=None)
    assert len(bended.traces) == 70


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_starts_without_paths_but_with_the_limit(copied: Callable[[Any], Any]) -> None:
    bended = called(Refine(), torch.ones(5, 4), max_traces=3)
    other = copied(bended)
    assert other.stats == bt.Stats()
    assert other.traces == ()
    assert str(other.tree) == "Refine: 0 programs, 0 traces"
    assert torch.equal(other(torch.ones(5, 4)), bended(torch.ones(5, 4)))
    for more in range(1, 3):
        other(torch.ones((1,) * more + (5, 4)))
    with pytest.warns(TraceLimitWarning):
        other(torch.ones(1, 1, 1, 5, 4))


@pytest.mark.more
def test_threads_that_take_and_forget_paths_at_once_get_what_eager_gives() -> None:
    wrong: list[Any] = []

    def work(bended: bt.BendedModule, offset: int) -> None:
        for turn in range(40):
            x = numbers(2.0 ** ((turn * 7 + offset) % 8))
            if bits(bended(x)) != bits(halve(x)):
                wrong.append(x)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # another thread's turn after nearly every call
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bt.errors.TraceLimitWarning)
            for _ in range(10):
                bended = bt.BendedModule(halve, max_traces=3)
                threads = [threading.Thread(target=work, args=(bended, k)) for k in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert len(bended.traces) <= 3
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_threads_lose_no_count() -> None:
    bended = called(halve, numbers(4.0), numbers(0.5))

    def work() -> None:
        for _ in range(300):
            bended(numbers(4.0)), bended(numbers(0.5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [program.runs for program in bended.tree.programs] == [2 + 3 * 600]


def test_what_served_of_late_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Modes(nn.Module):
        mode = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 and self.mode in "ace" else x - 1

    asked: list[Program] = []
    admits_truly = Program.admits

    def admits(program: Program, arguments: tuple[Any, ...]) -> bool:
        asked.append(program)
        return admits_truly(program, arguments)

    model = Modes()
    bended, x = bt.BendedModule(model), numbers(1.0)
    for mode in "abcdefab":
        model.mode = mode
        assert bits(bended(x)) == bits(model(x))
    traces = bended.stats.traces
    monkeypatch.setattr(Program, "admits", admits)
    for mode in "ab" * 5:
        model.mode = mode
        assert bits(bended(x)) == bits(model(x))
    assert bended.stats.traces == traces
    assert len(asked) == 20
