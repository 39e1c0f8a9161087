"""Layout of nested drawings: what may never happen, whatever the graph."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bendtrace.show.layout import Crossing, Net, Tile, Wire, heights, place


@st.composite
def drawings(draw: st.DrawFn) -> tuple[Tile, list[Net]]:
    """Boxes in boxes, with nets that run down, up, across borders and back to where they began."""
    leaves: list[Tile] = []

    def box(depth: int) -> Tile:
        children = []
        for _ in range(draw(st.integers(1, 4))):
            if depth < 3 and draw(st.booleans()):
                children.append(box(depth + 1))
            else:
                wide, high = draw(st.integers(10, 120)), draw(st.integers(10, 60))
                label = draw(st.sampled_from([0.0, 30.0, 90.0]))
                leaf = Tile(f"leaf {len(leaves)}", wide, high, 11.0 if label else 0.0, label)
                leaves.append(leaf)
                children.append(leaf)
        title = draw(st.integers(0, 200))
        return Tile(f"box {depth}", children=children, title=title, head=20.0 if depth else 0.0)

    root = box(0)
    nets = []
    for _ in range(draw(st.integers(0, 12))):
        source = draw(st.sampled_from(leaves))
        targets = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=4, unique=True))
        nets.append(Net(source, targets, port=draw(st.sampled_from("ab"))))
    return root, nets


def parts(shape: Tile) -> list[Tile]:
    return [shape, *(inner for child in shape.children or () for inner in parts(child))]


def overlap(a: Tile, b: Tile) -> bool:
    return (
        a.x < b.x + b.width
        and b.x < a.x + a.width
        and a.y < b.y + b.height
        and b.y < a.y + a.height
    )


def inside(inner: Tile, outer: Tile) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def reached(start: tuple[float, float], wires: list[Wire]) -> set[tuple[float, float]]:
    """Return the ends of all lines that hang together with a point."""
    found, todo = {start}, list(wires)
    changed = True
    while changed:
        changed = False
        for wire in list(todo):
            if any(on(point, wire) or wire.points[0] == point for point in found) or any(
                on(wire.points[0], other) for other in wires if other not in todo
            ):
                found |= {wire.points[0], wire.points[-1]}
                todo.remove(wire)
                changed = True
    return found


def on(point: tuple[float, float], wire: Wire) -> bool:
    x, y = point
    for (ax, ay), (bx, by) in itertools.pairwise(wire.points):
        if min(ax, bx) <= x <= max(ax, bx) and min(ay, by) <= y <= max(ay, by):
            return True
    return False


@pytest.mark.more
@given(drawings())
@settings(max_examples=150, deadline=None)
def test_boxes_lie_in_their_boxes_and_do_not_overlap(drawing: tuple[Tile, list[Net]]) -> None:
    root, nets = drawing
    place(root, nets)
    for box in parts(root):
        for child in box.children or ():
            assert inside(child, box)
        for one, other in itertools.combinations(box.children or (), 2):
            assert not overlap(one, other)


@pytest.mark.all
@given(drawings())
@settings(max_examples=150, deadline=None)
def test_lines_lead_from_each_source_to_each_target(drawing: tuple[Tile, list[Net]]) -> None:
    root, nets = drawing
    wires = place(root, nets)
    for net in nets:
        its = [wire for wire in wires if wire.net is net]
        low = net.source.y + net.source.height
        starts = [wire.points[0] for wire in its if wire.points[0][1] == low]
        starts = [p for p in starts if net.source.x <= p[0] <= net.source.x + net.source.width]
        assert starts
        ends = reached(starts[0], its)
        for target in net.targets:
            assert any(
                y == target.y and target.x <= x <= target.x + target.width for x, y in ends
            ), target.key


@pytest.mark.all
@given(drawings())
@settings(max_examples=150, deadline=None)
def test_lines_run_straight_across_or_down_and_through_no_shape(
    drawing: tuple[Tile, list[Net]],
) -> None:
    root, nets = drawing
    wires = place(root, nets)
    leaves = [shape for shape in parts(root) if shape.children is None]
    for wire in wires:
        for (ax, ay), (bx, by) in itertools.pairwise(wire.points):
            assert ax == bx or ay == by
            for leaf in leaves:
                left, right = leaf.x + 0.5, leaf.x + leaf.width - 0.5
                top, low = leaf.y + 0.5, leaf.y + leaf.height - 0.5
                across = min(ax, bx) < right and max(ax, bx) > left
                down = min(ay, by) < low and max(ay, by) > top
                assert not (across and down), (wire.points, leaf.key)


@pytest.mark.all
@given(drawings())
@settings(max_examples=150, deadline=None)
def test_lines_of_different_values_do_not_lie_upon_each_other(
    drawing: tuple[Tile, list[Net]],
) -> None:
    root, nets = drawing
    across: list[tuple[float, float, float, Net]] = []
    for wire in place(root, nets):
        for (ax, ay), (bx, by) in itertools.pairwise(wire.points):
            if ay == by:
                across.append((ay, min(ax, bx), max(ax, bx), wire.net))
    for (y, left, right, net), (low, start, stop, other) in itertools.combinations(across, 2):
        if net is not other and y == low:
            assert right <= start or stop <= left


@pytest.mark.all
@given(drawings())
@settings(max_examples=100, deadline=None)
def test_no_line_runs_through_the_title_of_a_box(drawing: tuple[Tile, list[Net]]) -> None:
    root, nets = drawing
    wires = place(root, nets)
    for box in parts(root):
        if box is root or box.children is None:
            continue
        left, right = box.x + box.title_x, box.x + box.title_x + box.title
        assert right <= box.x + box.width
        for wire in wires:
            for (ax, ay), (bx, by) in itertools.pairwise(wire.points):
                across = min(ax, bx) < right and max(ax, bx) > left
                down = min(ay, by) < box.y + 15 and max(ay, by) > box.y + 4
                assert not (across and down)


def test_a_skip_leaves_the_main_way_straight() -> None:
    names = ["x", "norm", "linear", "add"]
    shapes = {name: Tile(name, 60, 20) for name in names}
    root = Tile("root", children=list(shapes.values()))
    nets = [
        Net(shapes["x"], [shapes["norm"], shapes["add"]]),
        Net(shapes["norm"], [shapes["linear"]]),
        Net(shapes["linear"], [shapes["add"]]),
    ]
    wires = place(root, nets)
    assert len({shape.x for shape in shapes.values()}) == 1
    skip = [wire for wire in wires if wire.net is nets[0] and wire.target is shapes["add"]]
    assert len(skip) == 1
    # Out, down beside everything, and in again: four corners.
    assert len(skip[0].points) == 6
    assert max(x for x, _ in skip[0].points) > shapes["x"].x + 60


def test_lines_that_run_across_one_after_the_other_share_a_height() -> None:
    runs = [Crossing([0.0], [40.0]), Crossing([100.0], [140.0])]
    assert heights(runs) == 1
    assert [run.track for run in runs] == [0, 0]


def test_lines_to_the_right_are_stacked_without_crossings() -> None:
    runs = [Crossing([0.0], [100.0]), Crossing([50.0], [150.0])]
    assert heights(runs) == 2
    assert [run.track for run in runs] == [1, 0]


def test_a_line_that_ends_where_another_begins_runs_above_it() -> None:
    above, below = Crossing([100.0], [50.0]), Crossing([50.0], [0.0])
    heights([below, above])
    # The second leaves the upper rank where the first meets the lower one.
    assert below.track < above.track


def test_many_ends_stand_in_several_rows() -> None:
    source = Tile("source", 60, 20)
    ends = [Tile(str(i), 60, 20) for i in range(20)]
    root = Tile("root", children=[source, *ends])
    place(root, [Net(source, [end]) for end in ends])
    assert sorted(Counter(end.y for end in ends).values()) == [6, 7, 7]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_loop_runs_back_beside_what_it_repeats(count: int) -> None:
    shapes = [Tile(str(i), 50, 20) for i in range(count)]
    root = Tile("root", children=shapes)
    nets = [Net(a, [b]) for a, b in itertools.pairwise(shapes)]
    back = Net(shapes[-1], [shapes[0]])
    wires = [wire for wire in place(root, [*nets, back]) if wire.net is back]
    assert [wire.is_back for wire in wires] == [True]
    xs, ys = zip(*wires[0].points, strict=True)
    assert ys[0] == shapes[-1].y + 20
    assert ys[-1] == shapes[0].y
    assert max(xs) > max(shape.x + shape.width for shape in shapes)
