"""The log of a run: what its entries hold, how they are found, and how it prints."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import LayerKeyError
from bendtrace.log.run_log import Entries
from tests.corpus import CASES
from tests.shares import some


class Refine(nn.Module):
    """A branch, a loop of which nobody knows the length, a shared module, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, limit: float = 1.0) -> tuple[Tensor, Tensor]:
        if x.shape[0] > 2:
            x = x[:2]
        while x.norm() > limit:
            x = x * self.step(x).sigmoid()
        kept = self.norm(x).clone()
        kept[0] = 7.0
        kept[:, 1].mul_(2)
        return kept + 1, x.sum().item() * x


def refined(**options: Any) -> bt.Trace:
    return bt.log_forward_pass(Refine().eval(), torch.ones(3, 4), **options)


def labels(entries: Any) -> list[str]:
    return [entry.label for entry in entries]


# What entries hold


def test_ops_at_one_place_of_a_loop_are_passes_of_one_layer() -> None:
    log = refined()
    passes = log["linear_1"]
    assert isinstance(passes, Entries)
    assert labels(passes) == [f"linear_1_4:{number + 1}" for number in range(len(passes))]
    assert len(passes) > 1
    assert {entry.passes for entry in passes} == {len(passes)}
    # The test of a `while` is written twice by the compiler, and still is one place.
    assert labels(log["norm_1_2"]) == [f"norm_1_2:{n + 1}" for n in range(len(passes) + 1)]


def test_positions_count_from_both_ends_and_only_layers() -> None:
    log = refined()
    assert [entry.ordinal for entry in log] == list(range(len(log)))
    for position in range(len(log)):
        assert log[position] is log[position - len(log)]
    assert [entry.label for entry in log.entries if not entry.is_layer][:2] == [
        "size_1",
        "boolgt_1",
    ]
    assert log[0].label == "input_1_0"
    assert log[-1].label == log["output_2"].label


def test_parents_and_children_are_each_other_s() -> None:
    log = refined()
    edges = {(parent, entry.label) for entry in log.entries for parent in entry.parents}
    assert edges == {(entry.label, child) for entry in log.entries for child in entry.children}
    assert ("input_1_0", "size_1") in edges
    assert ("size_1", "boolgt_1") in edges
    (item,) = (entry for entry in log.entries if entry.layer_type == "item")
    assert any(item.label in entry.parents for entry in log.layers)


def test_who_reads_what_was_written_descends_from_who_wrote() -> None:
    log = refined()
    kept = log["add_1"]
    doubled = log["mul_2"]
    assert kept.parents == [doubled.label, log["setitem_1"].label]
    assert doubled.inplace
    assert log["setitem_1"].parents == [log["clone_1"].label]
    assert torch.equal(log["setitem_1"].tensor_contents[0], torch.full((4,), 7.0))
    assert not torch.equal(log["clone_1"].tensor_contents[0], torch.full((4,), 7.0))
    graph = log.graph
    memory = {(a, b) for a, b, kind in graph.edges(data="kind") if kind == "memory"}
    assert {(graph.nodes[a]["text"], graph.nodes[b]["text"]) for a, b in memory} == {
        ("kept[0]", "kept[:, 1]"),
        ("kept[:, 1].mul_(2)", "kept + 1"),
    }


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_descend_from_all_who_wrote_into_them(mode: Callable[[], Any]) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        view = y[0]
        view.add_(1)
        y[1] = 5
        return y, view

    with mode():
        log = bt.log_forward_pass(model, torch.ones(3, 3))
        assert log["output_1"].parents == ["setitem_1_4"]
        assert log["output_2"].parents == ["setitem_1_4", "add_1_3"]
        assert log["setitem_1"].parents == ["add_1_3", "mul_1_1"]
        for entry, value in zip(log[-2:], log.output, strict=True):
            assert torch.equal(entry.tensor_contents, value)
        assert log.validate()


def test_a_resumed_run_knows_what_its_prefix_wrote() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        view = y[0]
        view += 1
        if x.sum() > 0:
            return y + 3
        return y - 3 + view

    bended = bt.BendedModule(model)
    bended(torch.ones(2, 2))
    bended(-torch.ones(2, 2))
    assert bended.stats.resumes == 1
    edges = bended.latest_trace.graph.edges(data="kind")
    whole = bt.trace(model, -torch.ones(2, 2)).graph.edges(data="kind")
    assert sorted(edges) == sorted(whole)
    assert [(a, b) for a, b, kind in edges if kind == "memory"] == [("add_", "sub")]


def test_entries_say_under_which_steps_they_ran() -> None:
    log = refined()
    under = {entry.label: [log.flow_steps[n] for n in entry.flow] for entry in log.entries}
    assert [step.text for step in under["getitem_1_1"]] == ["x.shape[0] > 2"]
    second = under["linear_1_4:2"]
    assert [(step.text, step.value, step.iteration) for step in second] == [
        ("x.norm() > limit", True, (1,))
    ]
    assert under[log["clone_1"].label] == []
    calls = {call.label: call.flow for call in log.modules}
    assert calls["step:2"] == log["linear_1:2"].flow


def test_a_thousand_iterations_do_not_pile_up_the_steps_they_ran_under() -> None:
    def model(x: Tensor) -> Tensor:
        while x.sum() < 300:
            x = x + 1
        return x

    log = bt.trace(model, torch.zeros(1))
    assert {len(entry.flow) for entry in log["add_1"]} == {1}


def test_a_log_is_of_the_run_and_not_of_what_became_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    log = bt.trace(model, torch.ones(1, 2))
    model.train().requires_grad_(False)
    assert [call.training for call in log.modules] == [False, False]
    assert [use.trainable for use in log["linear_1"].state] == [True, True]


def test_parameters_are_told_from_buffers_and_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x) + self.shift)

    log = bt.log_forward_pass(Twice(), torch.ones(1, 2))
    assert [(use.name, use.is_parameter) for use in log["add_1"].state] == [("shift", False)]
    assert "\tOther state: shift\n" in str(log["add_1"])
    assert "\t4 parameter operations (6 params total; 24 B).\n" in str(log)


# Finding


@pytest.mark.parametrize("case", some(CASES, 4, start=2), ids=lambda case: case.name)
def test_every_key_that_is_offered_finds_something(case: Any) -> None:
    args, kwargs = next(iter(case.paths.values()))()
    log = bt.trace(case.make(), *args, **kwargs)
    for key in log._ipython_key_completions_():
        found = log[key]
        assert key in log
        assert isinstance(found, (bt.LayerEntry, Entries)), key
    for entry in log.entries:
        assert log[entry.label] is entry
        if entry.node_path:
            found = log[log.tree[entry.node_path]]
            several = [found] if isinstance(found, bt.LayerEntry) else list(found)
            assert entry in several or entry.kind == "state"


def test_a_layer_is_found_by_all_its_names() -> None:
    log = refined()
    entry = log["linear_1_4:2"]
    assert log["linear_1:2"] is log["step:2"] is log["step.linear:2"] is entry
    assert log[entry.ordinal] is log[entry] is log[log.tree.step.linear][1] is entry
    assert list(log["step"]) == list(log["linear_1"])
    assert entry.lookup_keys[2:] == ["linear_1_4:2", "step:2"]
    assert all(log[int(key)] is entry for key in entry.lookup_keys[:2])


def test_a_name_of_a_layer_and_of_another_module_finds_neither() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_1, self.linear_2 = nn.Linear(2, 3), nn.Linear(3, 2)
            self.relu_1 = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu_1(self.linear_1(self.linear_2(x)))

    log = bt.trace(Crossed(), torch.ones(1, 3))
    message = (
        r"'linear_1' is ambiguous: it matches the module linear_1 \('.linear_1'\) and the layer "
        r"linear_1_1 of the log \('linear_2.linear'\). Write '.linear_1' or 'linear_2.linear'"
    )
    with pytest.raises(LayerKeyError, match=message) as caught:
        log["linear_1"]
    assert caught.value.near == (".linear_1", "linear_2.linear")
    assert log[".linear_1"] is log["linear_2_2"]
    assert "linear_1" not in log._ipython_key_completions_()
    assert log["linear_1_1"] is log[log.tree.linear_2] is log["linear_2.linear"]
    assert log["relu_1"] is log["relu_1_3"]


def test_slices_go_by_position_or_by_name() -> None:
    log = refined()
    assert labels(log[1:3]) == ["getitem_1_1", "norm_1_2:1"]
    assert labels(log["getitem_1_1":"sigmoid_1"]) == labels(log[1 : log["sigmoid_1:1"].ordinal])
    assert labels(log[::-1]) == labels(log)[::-1]
    with pytest.raises(LayerKeyError, match="item_1 is not a layer, and so has no position"):
        log["item_1":]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("liner_1", "there is no layer, module or node path 'liner_1'; similar names: linear_1"),
        ("", "there is no layer, module or node path ''"),
        (99, r"there is no layer 99: the \d+ layers have positions 0 to \d+, or -\d+ to -1"),
        (True, "layers are looked up by name, module, position or node path, not by True"),
        (2.5, "not by 2.5"),
        ("getitem_1:2", r"'getitem_1:2' is ambiguous: .* Write '.getitem_1' or 'getitem'"),
        ("getitem_1_1:2", "there is no layer, module or node path 'getitem_1_1:2'"),
        ("step.linr", "similar names: step.linear"),
    ],
)
def test_what_is_not_there_is_a_key_error_that_helps(key: Any, message: str) -> None:
    log = refined()
    with pytest.raises(KeyError, match=message) as caught:
        log[key]
    assert isinstance(caught.value, bt.errors.LayerKeyError)
    assert caught.value.key == key
    assert key not in log


def test_several_entries_print_as_a_table_and_say_that_they_are_several() -> None:
    log = refined()
    passes = log["linear_1"]
    assert str(passes).splitlines()[:3] == [
        "#    layer         shape    dtype or value    size    module",
        "---  ------------  -------  ----------------  ------  --------",
        "4    linear_1_4:1  (2, 4)   float32           32 B    step",
    ]
    with pytest.raises(AttributeError, match=r"linear_1 is \d+ entries, not one: use"):
        passes.tensor_contents  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        passes.colour  # noqa: B018


# Printing


def test_the_head_of_a_log_says_what_kind_of_run_it_was() -> None:
    head = str(refined(random_seed=3)).splitlines()
    assert head[0] == "Log of Refine forward pass:"
    assert head[1].startswith("\tModel structure: recurrent (at most ")
    assert head[1].endswith(" passes), with branching; 2 total modules.")
    assert head[4].startswith("\tControl flow: ")
    assert "2 loops" not in head[4]
    assert head[5] == "\tRandom seed: 3"
    assert head[6].startswith("\tTime elapsed: ")


def test_a_long_log_is_cut_with_a_line_that_says_how_to_see_more() -> None:
    model = nn.Sequential(*[nn.ReLU() for _ in range(60)])
    log = bt.trace(model, torch.ones(2))
    text = str(log)
    assert text.endswith(
        "\t\t49: relu_49_49  (2,)  48\n"
        "\t\t... 12 more layers (all of them: print(log.to_text(None)), where log is this one)"
    )
    assert "61: output_1_61" not in text
    assert "61: output_1_61" in log.to_text(None)
    assert "more" not in log.to_text(None)


def test_modules_that_hold_others_are_indented_in_the_hierarchy() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Tanh())
    lines = str(bt.trace(model, torch.ones(1))).splitlines()
    start = lines.index("\tModule Hierarchy:")
    assert lines[start + 1 : start + 4] == ["\t\t0:", "\t\t    0.0, 0.1", "\t\t1"]


def test_an_entry_prints_all_that_is_known_of_it() -> None:
    log = refined()
    text = str(log["linear_1:2"])
    for line in (
        f"Layer linear_1_4, pass 2/{log['linear_1:2'].passes}, operation ",
        "\tOutput tensor: shape=(2, 4), dtype=torch.float32, size=32 B\n\t\ttensor([[",
        "\tParams: Computed from params with shape (4,), (4, 4); 20 params total (80 B)\n",
        "\tFunction: linear (gradfunc=AddmmBackward0) \n",
        "\tComputed inside module: step\n",
        "\tOutput of modules: step:2\n\tOutput of bottom-level module: step:2\n",
        "\tNode path: step.linear:2\n",
        "test_history.py:",
        "\tRan under: while `x.norm() > limit` was True, iteration 1 (",
    ):
        assert line in text
    number = str(log["item_1"])
    assert number.startswith("Number item_1:\n\tValue: ")
    assert repr(log["item_1"]).startswith("<number item_1 = ")


def test_numbers_print_where_steps_consumed_them() -> None:
    table = refined().flow_table.splitlines()
    assert table[2].split()[:3] == ["size_1", "shape", "3"]
    assert table[3].split()[:3] == ["boolgt_1", "if", "True"]


def test_rolled_up_each_layer_has_one_line_and_one_node() -> None:
    log = refined()
    rows = log.rolled().splitlines()
    (row,) = (row for row in rows if row.startswith("linear_1_4 "))
    assert row.split()[1] == str(log["linear_1:1"].passes)
    assert "(of the pass before)" in "\n".join(rows)
    assert log.rolled(3).endswith("more (all of them: most=None)")
    graph = log.rolled_graph()
    assert graph.nodes["linear_1_4"]["labels"] == labels(log["linear_1"])
    assert not nx.is_directed_acyclic_graph(graph)
    forward = nx.DiGraph([edge[:2] for edge in graph.edges(data="back") if not edge[2]])
    assert nx.is_directed_acyclic_graph(forward)


def test_notebooks_get_the_log_with_a_picture_and_everything_else_plain_text() -> None:
    log = refined()
    bundle = log._repr_mimebundle_()
    assert bundle["text/plain"] == str(log)
    assert bundle["text/html"].startswith("<pre>Log of Refine")
    assert "<svg" in bundle["text/html"]
    assert "x.shape[0] &gt; 2" in log.flow_steps._repr_mimebundle_()["text/html"]


def test_a_data_frame_has_a_row_for_each_layer() -> None:
    log = refined()
    frame = log.to_pandas()
    assert list(frame.index) == labels(log)
    assert frame.loc["linear_1_4:1", "flops"] == 2 * 2 * 4 * 4
    assert frame["parameters"].sum() == 20 * log["linear_1:1"].passes + 8


def test_a_log_without_layers_prints_and_makes_an_empty_table() -> None:
    log = bt.log_forward_pass(lambda n: n + 1, 3)
    assert "\t0 tensors (0 B) computed in forward pass; 0 tensors (0 B) saved.\n" in str(log)
    assert len(log.to_pandas()) == 0
    assert log.validate()


def test_a_bended_module_is_logged_as_its_model() -> None:
    model = Refine().eval()
    log = bt.log_forward_pass(bt.BendedModule(model), torch.ones(3, 4))
    assert log.to_text(None).splitlines()[:4] == refined().to_text(None).splitlines()[:4]
    with pytest.raises(
        bt.errors.InputError, match=r"keeps no activations \(save=\): use bendtrace.trace"
    ):
        bt.BendedModule(model).trace(torch.ones(3, 4), save="all")


# Lifetime


def _freed(make: Callable[[], bt.Trace], use: Callable[[bt.Trace], Any]) -> bool:
    gc.disable()
    try:
        log = make()
        kept = use(log)
        alive = weakref.ref(log)
        del log, kept
        return alive() is None
    finally:
        gc.enable()


def test_a_log_that_nobody_holds_takes_its_activations_with_it_at_once() -> None:
    assert _freed(refined, lambda log: [str(log), len(log), [entry.label for entry in log]])


def test_an_entry_that_was_looked_up_keeps_the_log_that_it_is_in() -> None:
    entry = refined()["linear_1:1"]
    gc.collect()
    assert "Lookup keys: " in str(entry)
    assert entry.flops == 64
    assert entry.macs == 32
