"""Pictures of runs: what is in them, how it is said, and what is refused."""

from __future__ import annotations

import base64
import itertools
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.show.canvas import cut, width
from bendtrace.show.paint import _BOXES, FAINT, FILLS, INK, color, contrast, figure, ink
from bendtrace.show.picture import draw
from bendtrace.show.scene import Scene, SceneNode, scene
from tests.corpus import CASES

DOCS = Path(__file__).parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fc = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x)) * 0.5


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


class Cell(nn.Module):
    """A loop over the items of its input that carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(1, 4)
        for t in range(x.shape[0]):
            h = self.cell(x[t : t + 1], h)
        return h


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0 and x.shape[0] < 9:
            return torch.relu(self.left(x))
        return self.right(x)


def traced(model: nn.Module, *inputs: torch.Tensor) -> bt.Trace:
    return bt.trace(model, *inputs)


def stack(blocks: int = 6) -> bt.Trace:
    return traced(Stack(blocks).eval(), torch.ones(2, 4))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def titles(shown: Scene) -> list[str]:
    return [node.title for node in shown.nodes()]


# What is drawn


def test_a_picture_shows_ops_with_their_modules_parameters_and_shapes() -> None:
    trace = traced(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.ones(2, 3))
    assert texts(draw(trace).svg) == [
        "Sequential",
        "input_1_0",
        "linear_1_1",
        "0 \N{MIDDLE DOT} Linear",
        "weight 5\N{MULTIPLICATION SIGN}3, bias 5",
        "relu_1_2",
        "1 \N{MIDDLE DOT} ReLU",
        "output_1_3",
        "2\N{MULTIPLICATION SIGN}3",
        "2\N{MULTIPLICATION SIGN}5",
        "2\N{MULTIPLICATION SIGN}5",
    ]


def test_dtypes_other_than_float32_are_told() -> None:
    trace = bt.trace(lambda x: (x > 1, x.sum()), torch.ones(2, 3))
    edges = {edge.text for edge in scene(trace).edges}
    assert edges == {"2×3", "2×3 bool", "scalar"}  # noqa: RUF001


def test_modules_are_boxes_and_those_of_one_op_are_the_op() -> None:
    shown = scene(stack(2))
    assert [(box.title, box.lines) for box in shown.boxes()] == [
        ("h.0", ["Block"]),
        ("h.1", ["Block"]),
    ]
    norm = shown.node_of["layernorm_1_1"]
    assert norm.lines[0] == "norm \N{MIDDLE DOT} LayerNorm"
    assert norm.modules == ["h.0.norm:1"]


def test_blocks_that_are_alike_are_drawn_once() -> None:
    shown = scene(stack(6))
    assert [(box.title, box.times) for box in shown.boxes()] == [("h.0 … h.5", "6")]
    assert titles(shown) == ["input_1_0", "layernorm", "linear", "mul", "add", "linear_7_25",
                             "output_1_26"]  # fmt: skip
    assert "h.0 … h.5 ×6" in texts(draw(stack(6)).svg)  # noqa: RUF001
    again = [edge for edge in shown.edges if edge.kind == "repeat"]
    # What a block gives is where the next one begins: the norm, and the sum that skips it.
    assert sorted((e.source.title, e.target.title) for e in again) == [
        ("add", "add"),
        ("add", "layernorm"),
    ]


def test_fewer_than_three_blocks_are_drawn_in_full() -> None:
    assert all(not box.times for box in scene(stack(2)).boxes())


def test_blocks_of_other_sizes_are_not_put_together() -> None:
    model = nn.Sequential(Block(4), nn.Linear(4, 6), Block(6), nn.Linear(6, 8), Block(8))
    shown = scene(traced(model, torch.ones(1, 4)))
    assert [box.title for box in shown.boxes()] == ["0", "2", "4"]


class Wired(nn.Module):
    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.crossed = crossed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        b = x * 3
        return (a + a) - b if self.crossed else (a + b) - b


def test_blocks_that_are_wired_otherwise_are_not_put_together() -> None:
    alike = nn.Sequential(*(Wired(False) for _ in range(3)))
    mixed = nn.Sequential(Wired(False), Wired(True), Wired(False), Wired(True))
    x = torch.ones(2)
    assert [box.times for box in scene(traced(alike, x)).boxes()] == ["3"]
    assert [box.times for box in scene(traced(mixed, x)).boxes()] == [""] * 4


class Parallel(nn.Module):
    """Alike modules side by side, and blocks in a loop with an op of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.query(x) + self.key(x) + self.value(x)
        for block in self.h:
            x = block(x) * 2
        return x


def test_modules_of_different_names_stay_apart() -> None:
    shown = scene(traced(Parallel(), torch.ones(2, 4)))
    lines = [line for node in shown.nodes() for line in node.lines]
    assert [line.split(" ")[0] for line in lines if line.endswith(" Linear")] == [
        "query",
        "key",
        "value",
        "fc",
    ]
    (frame,) = [box for box in shown.boxes() if box.times]
    assert (frame.kind, frame.times) == ("repeat", "4")
    assert [child.title for child in frame.children or ()] == ["h.0 … h.3", "mul"]


def test_passes_of_a_loop_are_drawn_once() -> None:
    shown = scene(traced(Cell(), torch.ones(7, 3)))
    (frame,) = shown.boxes()
    assert (frame.kind, frame.title, frame.times) == ("repeat", "repeated", "7")
    assert [child.title for child in frame.children or ()] == ["getitem", "grucell"]
    (carried,) = [edge for edge in shown.edges if edge.kind == "repeat"]
    assert carried.source is carried.target is (frame.children or [])[1]
    # The line that runs back meets the one that brings the first state.
    wires = [wire for wire in figure(shown).wires if wire.is_back]
    assert [wire.joins for wire in wires] == [True]


def test_without_collapsing_each_pass_is_drawn() -> None:
    shown = scene(traced(Cell(), torch.ones(4, 3)), collapsed=False)
    assert sum("getitem" in title for title in titles(shown)) == 4
    assert not shown.boxes()


def test_rolled_passes_are_one_node_with_lines_that_run_back() -> None:
    shown = scene(traced(Cell(), torch.ones(4, 3)), rolled=True)
    (node,) = [node for node in shown.nodes() if node.title == "grucell"]
    assert node.times == "4"
    assert len(node.labels) == 4
    assert "grucell ×4" in texts(draw(traced(Cell(), torch.ones(4, 3)), rolled=True).svg)  # noqa: RUF001
    wires = [wire for wire in figure(shown).wires if wire.is_back]
    assert len(wires) == 1
    assert wires[0].points[0][1] > wires[0].points[-1][1]


@pytest.mark.parametrize("most", [8, 50])
def test_a_rolled_picture_has_no_more_nodes_than_another(most: int) -> None:
    class Shared(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.h:  # whose layers are their own; the rest of the loop is shared
                x = block(x).relu()
                if x.max() > 9:
                    x = x / 2
            return self.head(x)

    trace = traced(Shared(6), torch.ones(4))
    plain, rolled = (scene(trace, rolled=rolled, max_nodes=most) for rolled in (False, True))
    assert len(rolled.nodes()) <= len(plain.nodes())
    assert not any(node.kind == "part" for node in rolled.nodes())
    assert represented(rolled) == drawn_labels(trace, rolled)


def test_flow_steps_are_diamonds_with_their_text_and_side() -> None:
    shown = scene(traced(Choice(), torch.ones(2, 4)))
    decisions = [node for node in shown.nodes() if node.kind == "decision"]
    assert [(node.title, node.lines) for node in decisions] == [
        ("x.sum() > 0", ["and → True"]),
        ("x.shape[0] < 9", ["if → True"]),
    ]
    under = {(e.source.title, e.target.title, e.text) for e in shown.edges if e.kind == "control"}
    assert ("x.shape[0] < 9", "linear_1_3", "True") in under
    assert "test_drawing.py:" in decisions[0].tooltip


def test_numbers_are_drawn_where_they_decide() -> None:
    trace = traced(Choice(), torch.ones(2, 4))
    shown = scene(trace)
    numbers = [node for node in shown.nodes() if node.kind == "number"]
    assert any(node.title.endswith("= 2") for node in numbers)
    assert not [n for n in scene(trace, numbers="none").nodes() if n.kind == "number"]
    plain = scene(trace, flow=False)
    assert {node.kind for node in plain.nodes()} == {"input", "op", "output"}


def test_lines_pass_through_numbers_that_are_not_drawn_but_not_through_sizes() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y * x.sum().item()).reshape(x.shape[0], -1)

    edges = scene(bt.trace(scaled, torch.ones(2, 3), torch.ones(4))).edges
    assert {(e.source.title, e.target.title, e.kind) for e in edges} == {
        ("input_1_0", "sum_1_2", "data"),
        ("sum_1_2", "mul_1_3", "number"),
        ("input_2_1", "mul_1_3", "data"),
        ("mul_1_3", "reshape_1_4", "data"),
        ("reshape_1_4", "output_1_5", "data"),
    }


def test_of_a_loop_the_sides_of_its_test_are_counted() -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        while x.sum() > 1:
            x = x / 2
        return x

    shown = scene(bt.trace(halve, torch.ones(16)), rolled=True)
    told = [line for n in shown.nodes() if n.kind == "decision" for line in n.lines]
    assert told == ["while → True ×4, False ×1"]  # noqa: RUF001


def test_only_what_happened_in_one_module_can_be_drawn() -> None:
    trace = stack(3)
    shown = scene(trace, within="h.1")
    assert shown.title == "h.1"
    assert titles(shown)[0] == trace["h.0"].label
    assert [n.kind for n in shown.nodes()] == ["input", "op", "op", "op", "op", "output"]
    assert scene(trace, within="h.1:1").title == "h.1:1"


def test_values_that_all_go_to_one_place_are_one_output() -> None:
    def many(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x[i] * 1 for i in range(5))

    shown = scene(bt.trace(many, torch.ones(5, 2)))
    (output,) = [node for node in shown.nodes() if node.kind == "output"]
    assert (output.title, output.times, len(output.labels)) == ("output", "5", 5)


# What is closed


def test_above_the_cap_boxes_are_closed_and_the_picture_says_how_to_open_them() -> None:
    trace = stack(6)
    full = len(scene(trace, collapsed=False).nodes())
    picture = draw(trace, collapse=False, max_nodes=10)
    assert picture.scene is not None
    assert len(picture.scene.nodes()) <= 10
    note = picture.scene.note
    assert f"of {full} nodes are drawn" in note
    assert f"draw(max_nodes={full})" in note
    assert set(note.splitlines()) <= set(texts(picture.svg))
    assert len(scene(trace, collapsed=False, max_nodes=full).nodes()) == full


def test_boxes_of_a_class_are_closed_together() -> None:
    shown = scene(stack(6), collapsed=False, max_nodes=20)
    assert [node.title for node in shown.nodes() if node.is_folded] == [f"h.{i}" for i in range(6)]
    assert not shown.boxes()


def test_closed_boxes_tell_what_is_in_them() -> None:
    shown = scene(stack(2), depth=0)
    folded = [node for node in shown.nodes() if node.is_folded]
    assert [(node.title, node.lines) for node in folded] == [
        ("h.0", ["Block", "4 ops · 28 parameters"]),
        ("h.1", ["Block", "4 ops · 28 parameters"]),
    ]
    assert shown.note == ""  # it was asked for


def test_a_run_without_modules_is_cut_into_parts() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x * 2 + 1
        return x

    trace = bt.trace(long, torch.ones(2))
    shown = scene(trace, collapsed=False, max_nodes=20)
    assert len(shown.nodes()) <= 22  # the input and the output stay outside
    assert sum(len(node.labels) for node in shown.nodes()) == 202


class Many(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4 + i % 7) for i in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(torch.ones(1, block.fc.in_features) + x.mean())
        return x


@pytest.mark.all
def test_ten_thousand_ops_fit_into_a_small_picture() -> None:
    trace = traced(Many(1700).eval(), torch.ones(1, 4))
    ops = sum(entry.kind == "op" for entry in trace.entries)
    assert ops > 10_000
    picture = draw(trace)
    assert picture.scene is not None
    assert len(picture.scene.nodes()) <= 150
    assert represented(picture.scene) == drawn_labels(trace, picture.scene)
    assert len(picture.svg) < 200_000


# Each value once, in its box, on any model


@st.composite
def models(draw_: st.DrawFn) -> nn.Module:
    """Modules in modules, with skips, loops and modules that are called again."""

    class Inner(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.steps: list[tuple[Any, ...]] = []
            self.inner = nn.ModuleList()
            for _ in range(draw_(st.integers(1, 4))):
                kind = draw_(st.sampled_from(["op", "op", "loop", "call"]))
                if kind == "call" and depth < 3:
                    if not len(self.inner) or draw_(st.booleans()):
                        self.inner.append(Inner(depth + 1))
                    number = draw_(st.integers(0, len(self.inner) - 1))
                    self.steps.append(("call", number, draw_(st.integers(0, 9))))
                elif kind == "loop":
                    self.steps.append(("loop", draw_(st.integers(1, 5)), draw_(st.integers(0, 9))))
                else:
                    ends = draw_(st.integers(0, 9)), draw_(st.integers(0, 9))
                    self.steps.append(("op", *ends))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = [x]
            for kind, one, other in self.steps:
                if kind == "call":
                    values.append(self.inner[one](values[other % len(values)]))
                elif kind == "loop":
                    value = values[other % len(values)]
                    for _ in range(one):
                        value = torch.tanh(value) + x
                    values.append(value)
                else:
                    values.append(values[one % len(values)] - values[other % len(values)])
                    if values[-1].sum() > 0:
                        values.append(values[-1] * 2)
            return values[-1]

    return Inner(0)


def represented(shown: Scene) -> list[str]:
    return sorted(label for node in shown.nodes() for label in node.labels)


def drawn_labels(trace: bt.Trace, shown: Scene) -> list[str]:
    """Return the labels of all values but state and numbers that decide nothing."""
    numbers = {entry.label for entry in trace.entries if entry.kind == "number"}
    kept = [e.label for e in trace.entries if e.kind in ("input", "op", "output")]
    return sorted([*kept, *(numbers & shown.node_of.keys())])


OPTIONS = [
    {},
    {"rolled": True},
    {"rolled": True, "max_nodes": 5},
    {"collapsed": False},
    {"depth": 1},
    {"max_nodes": 5},
    {"collapsed": False, "max_nodes": 3},
]


@pytest.mark.more
@given(models(), st.sampled_from(OPTIONS))
@settings(max_examples=60, deadline=None)
def test_each_value_is_drawn_once_and_in_the_boxes_of_its_modules(
    model: nn.Module, options: dict[str, Any]
) -> None:
    trace = traced(model, torch.ones(2))
    shown = scene(trace, **options)
    assert represented(shown) == drawn_labels(trace, shown)
    shapes = figure(shown).shapes
    entries = {entry.label: entry for entry in trace.entries}

    def walk(node: SceneNode, around: list[SceneNode]) -> None:
        for one, other in itertools.combinations(node.children or (), 2):
            a, b = shapes[one], shapes[other]
            beside = a.x + a.width <= b.x or b.x + b.width <= a.x
            assert beside or a.y + a.height <= b.y or b.y + b.height <= a.y
        for child in node.children or ():
            a, b = shapes[child], shapes[node]
            assert b.x <= a.x
            assert b.y <= a.y
            assert a.x + a.width <= b.x + b.width
            assert a.y + a.height <= b.y + b.height
            walk(child, [*around, node])
        if node.children is None:
            boxes = {call for box in [*around, node] for call in box.modules}
            for label in node.labels if node.kind != "part" else ():
                held = [call for call in entries[label].scopes if call in boxes]
                modules = [box for box in around if box.kind == "module"]
                assert len(held) >= len(modules), label

    walk(shown.root, [])


@pytest.mark.all
def test_models_of_every_kind_can_be_drawn() -> None:
    ways = itertools.cycle(OPTIONS)
    drawn = 0
    for case in CASES:
        args, kwargs = next(iter(case.paths.values()))()
        try:
            trace = bt.trace(case.make(), *args, **kwargs)
        except Exception:  # some raise, on purpose
            continue
        shown = scene(trace, **next(ways))
        assert represented(shown) == drawn_labels(trace, shown), case.name
        figure(shown)
        drawn += 1
    assert drawn > 200


@given(models())
@settings(max_examples=25, deadline=None)
def test_each_data_flow_is_drawn_and_no_other(model: nn.Module) -> None:
    trace = traced(model, torch.ones(2))
    shown = scene(trace, collapsed=False, flow=False, max_nodes=10_000)
    expected = {
        (shown.node_of[parent].key, shown.node_of[entry.label].key)
        for entry in trace.entries
        for parent in entry.parents
        if parent in shown.node_of and entry.label in shown.node_of
    }
    assert {(e.source.key, e.target.key) for e in shown.edges} == expected


@pytest.mark.more
@given(models())
@settings(max_examples=15, deadline=None)
def test_the_same_run_gives_the_same_picture(model: nn.Module) -> None:
    first, second = (draw(traced(model, torch.ones(2))) for _ in range(2))
    assert first.svg == second.svg
    ElementTree.fromstring(first.svg)


# Text


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = {'<&">': 1}
        if x.sum() > limit['<&">']:
            return x * 2
        return x


@pytest.mark.more
def test_text_of_any_kind_is_written_as_it_is() -> None:
    model = nn.Sequential()
    model.add_module("größe <&\"'> \u4e2d\u6587" + "x" * 200, nn.Linear(2, 2))
    model.add_module("odd", Odd())
    picture = draw(traced(model, torch.ones(1, 2)))
    assert picture.to_bytes("png").startswith(b"\x89PNG")
    assert picture.to_bytes("pdf").startswith(b"%PDF")
    svg = picture.svg
    ElementTree.fromstring(svg)
    assert any(text.startswith("größe <&\"'> \u4e2d\u6587") for text in texts(svg))
    assert max(map(len, texts(svg))) <= 60
    hints = [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert any("test_drawing.py:" in hint for hint in hints)


def test_long_text_loses_its_middle() -> None:
    assert (
        cut("encoder.layers.0.attention.out_proj", 20)
        == "encoder.la\N{HORIZONTAL ELLIPSIS}.out_proj"
    )
    assert len(cut("a" * 500, 44)) == 44
    assert cut("tab\tand\nline", 44) == "tab and line"
    assert cut("null\0", 44) == "null\N{REPLACEMENT CHARACTER}"


def test_wide_letters_take_more_room() -> None:
    assert width("\u4e2d\u6587", 10) == 21.0
    assert width("mm", 10) > width("ii", 10)
    assert width("ii", 10, mono=True) == width("mm", 10, mono=True)


@pytest.mark.parametrize("fill", [*FILLS.values(), *_BOXES, "#ffffff"])
@pytest.mark.parametrize("text", [INK, FAINT])
def test_text_can_be_read_on_every_colour(fill: str, text: str) -> None:
    assert contrast(text, fill) >= 4.5


def test_text_can_be_read_on_every_colour_of_an_overlay() -> None:
    for part in range(101):
        fill = color(part / 100)
        assert contrast(ink(fill), fill) >= 4.5


# Overlays


def test_an_overlay_colours_nodes_and_says_what_colours_mean() -> None:
    trace = traced(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.ones(2, 3))
    picture = draw(trace, overlay={"linear_1_1": 10, "1": 2.5})
    assert {"overlay:", "2.5", "10"} <= set(texts(picture.svg))
    assert f'fill="{color(1.0)}"' in picture.svg
    assert f'fill="{color(0.0)}"' in picture.svg
    assert "overlay: 10\n" in picture.svg.replace("&#10;", "\n")


def test_closed_boxes_have_sums_of_what_adds_up_and_the_largest_of_the_rest() -> None:
    trace = stack(6)
    by_size = draw(trace, overlay="memory", depth=0).scene
    assert by_size is not None
    (block,) = [node for node in by_size.nodes() if node.is_folded]
    assert block.value == 6 * 4 * (2 * 4 * 4)
    numbers = iter(range(100))
    given_ = {e.label: float(next(numbers)) for e in trace.entries if e.kind == "op"}
    by_number = draw(trace, overlay=given_, depth=0).scene
    assert by_number is not None
    (block,) = [node for node in by_number.nodes() if node.is_folded]
    assert block.value == 23.0
    by_function = draw(trace, overlay=lambda entry: len(entry.label), depth=0).scene
    assert by_function is not None
    (block,) = [node for node in by_function.nodes() if node.is_folded]
    assert block.value == max(len(label) for label in block.labels)


def test_modules_in_an_overlay_colour_their_boxes() -> None:
    shown = draw(stack(2), overlay={"h.1": 3, "head": 1}).scene
    assert shown is not None
    assert [box.value for box in shown.boxes()] == [None, 3.0]


def test_bytes_and_seconds_have_units() -> None:
    trace = traced(nn.Linear(300, 300), torch.ones(10, 300))
    assert "12 kB" in texts(draw(trace, overlay="memory").svg)


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"linaer_1_1": 1}, "did you mean linear_1_1"),
        ({"linear_1_1": "high"}, "which is not a number"),
        ("speed", 'overlay= has to be "time", "memory", "flops"'),
        (3, "overlay= has to be a name, a mapping or a function, not int"),
        ("time", "the run was not timed, as log_forward_pass does"),
        ({}, "no node of the picture has a number"),
    ],
)
def test_overlays_that_make_no_sense_are_refused(overlay: Any, said: str) -> None:
    trace = traced(nn.Linear(3, 5), torch.ones(2, 3))
    with pytest.raises(InputError, match=re.escape(said)):
        draw(trace, overlay=overlay)


# Saving


def test_the_ending_says_what_is_written(tmp_path: Path) -> None:
    trace = traced(nn.Linear(3, 5), torch.ones(2, 3))
    starts = {
        "svg": b"<svg ",
        "png": b"\x89PNG",
        "pdf": b"%PDF",
        "html": b"<!DOCTYPE html>",
        "dot": b"digraph {",
    }
    for ending, start in starts.items():
        path = tmp_path / f"picture.{ending}"
        draw(trace, path)
        assert path.read_bytes().startswith(start)
    draw(trace, tmp_path / "other", format="svg")
    assert (tmp_path / "other").read_text() == draw(trace).svg
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.more
def test_the_same_picture_gives_the_same_file(tmp_path: Path) -> None:
    trace = stack(3)
    for ending in ("svg", "png", "pdf", "dot"):
        paths = [tmp_path / f"{number}.{ending}" for number in range(2)]
        for path in paths:
            draw(trace, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("name", ["picture.gif", "picture", "picture.svg.gz"])
def test_an_unknown_ending_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    trace = traced(nn.Linear(3, 5), torch.ones(2, 3))
    with pytest.raises(InputError, match=r"has to end in \.svg, \.png, \.pdf, \.html, \.dot"):
        draw(trace, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    trace = traced(nn.Linear(3, 5), torch.ones(2, 3))
    with pytest.raises(InputError, match="there is no folder"):
        draw(trace, tmp_path / "none" / "a.svg")


def test_an_older_file_stays_if_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.svg"
    path.write_text("older")
    picture = draw(traced(nn.Linear(3, 5), torch.ones(2, 3)))

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="full"):
        picture.save(path)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_without_matplotlib_the_package_is_named(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = draw(traced(nn.Linear(3, 5), torch.ones(2, 3)))
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"needs matplotlib: pip install matplotlib$"):
        picture.to_bytes(form)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"within": "h.9"}, "no module 'h.9' was called in this run; did you mean h."),
        ({"max_nodes": 0}, "max_nodes= has to be a positive int, not 0"),
        ({"depth": -1}, "depth= has to be an int of at least 0, not -1"),
        ({"numbers": "some"}, 'numbers= has to be "deciding", "all" or "none"'),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        draw(stack(2), **options)


def test_dot_has_clusters_nodes_and_edges() -> None:
    text = draw(stack(3)).to_bytes("dot").decode()
    assert 'label="h.0 … h.2 ×3";' in text  # noqa: RUF001
    assert re.search(r'n\d+ \[label="input_1_0", shape=oval\];', text)
    assert text.count("->") == len(scene(stack(3)).edges)
    assert text.count("{") == text.count("}")


def test_pictures_show_themselves_in_notebooks() -> None:
    picture = draw(stack(3))
    bundle = picture._repr_mimebundle_()
    assert bundle["image/svg+xml"] == picture.svg
    image = ElementTree.fromstring(bundle["text/html"].replace(">", "/>"))
    kind, data = image.get("src", "").split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data).decode() == picture.svg
    assert image.get("alt", "").startswith("Stack: 7 nodes and 9 edges: input_1_0, ")
    drawn = ElementTree.fromstring(picture.svg)
    words = [drawn.findtext(f"{SVG}title"), drawn.findtext(f"{SVG}desc")]
    assert ": ".join(map(str, words)) == image.get("alt")
    assert drawn.get("role") == "img"
    assert re.fullmatch(r"<Picture of Stack: 7 nodes, 9 edges, \d+×\d+>", bundle["text/plain"])  # noqa: RUF001


# The documents


@pytest.mark.more
@pytest.mark.parametrize(("folder", "suffix"), [("pictures", "svg"), ("texts", "txt")])
def test_what_the_documents_show_is_what_the_script_makes(folder: str, suffix: str) -> None:
    script = runpy.run_path(str(DOCS / "make_pictures.py"))
    made = script[folder](script["traces"]())
    assert {f"{name}.{suffix}" for name in made} == {p.name for p in (DOCS / folder).iterdir()}
    for name, content in made.items():
        path = DOCS / folder / f"{name}.{suffix}"
        assert path.read_text(encoding="utf-8") == content, (
            f"{path.name} is not what it shows any more: run docs/make_pictures.py"
        )
        assert len(content.encode()) < 150_000
        assert str(DOCS.parent) not in content
        if suffix == "svg":
            ElementTree.fromstring(content)
