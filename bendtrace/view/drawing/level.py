"""One level of a nested drawing: the content of one box, its ranks, and their order."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Level", "LocalNet", "Net", "Shape", "Vertex", "order", "rank"]


@dataclass(eq=False)
class Shape:
    """A shape to place: a node, or a box that contains shapes.

    Attributes:
        key: its name.
        width: its width; computed for a box.
        height: its height; computed for a box.
        below: free space below it, for the text at its outgoing line.
        label: the width of that text, which is to the right of the line.
        children: its content, in the order of the run; None for a node.
        title: the width of a box's title.
        head: the height of a box's title.
        x: its left edge.
        y: its upper edge.
        title_x: the start of a box's title, from its left edge.
    """

    key: str
    width: float = 0.0
    height: float = 0.0
    below: float = 0.0
    label: float = 0.0
    children: list[Shape] | None = None
    title: float = 0.0
    head: float = 0.0
    x: float = 0.0
    y: float = 0.0
    title_x: float = 0.0


@dataclass(eq=False)
class Net:
    """One value, and its targets: lines that share their way as far as possible.

    Attributes:
        source: the shape at which it starts.
        targets: the shapes at which it ends.
        port: which of the source's values it carries: nets with the same port start together.
        kind: its kind, which the layout ignores.
        joins: a net from outside `frame`: this net runs back up to it instead of to its own
            targets, since both have the same targets.
        frame: the box in which this happens.
    """

    source: Shape
    targets: list[Shape]
    port: str = ""
    kind: str = "data"
    joins: Net | None = None
    frame: Shape | None = None


@dataclass(eq=False)
class LocalNet:
    """The part of a net on one level.

    Attributes:
        net: the whole net.
        source: the child at which it starts; None if it enters through the border.
        targets: the children at which it ends.
        leaves: whether it leaves through the border.
        joins: the net entering here to which it runs back up.
    """

    net: Net
    source: Shape | None
    targets: dict[Shape, None] = field(default_factory=dict)
    leaves: bool = False
    joins: LocalNet | None = None


Role = Literal["shape", "in", "out", "bend", "lane"]


class Vertex:
    """An item with a position in a rank: a shape, a port of the border, or a line running past.

    Attributes:
        role: its kind; a "lane" is a line that runs back up.
        shape: its shape.
        net: the net of the port or the line.
        index: position among the shapes.
        rank: its rank, from 0 at the top.
        order: its position in the rank.
        left: its extent to the left of its middle.
        right: the same to the right.
        x: its middle.
        height: its height, including the space below.
        y: its upper edge.
        ups: links that come from above.
        downs: links that go down.
    """

    y: float
    x: float
    height: float
    right: float
    left: float
    order: int
    rank: int

    __slots__ = ("downs", "height", "index", "left", "net", "order", "rank", "right", "role",
                 "shape", "ups", "x", "y")  # fmt: skip

    def __init__(self, role: Role, shape: Shape | None, net: LocalNet | None, index: int) -> None:
        self.role = role
        self.shape: Shape | None = shape
        self.net: LocalNet | None = net
        self.index: int = index
        self.rank = self.order = 0
        self.left = self.right = self.height = self.x = self.y = 0.0
        self.ups: list[Link] = []
        self.downs: list[Link] = []


class Link:
    """A part of a net between neighbouring ranks.

    Attributes:
        upper: its upper vertex.
        lower: its lower vertex.
        net: the net.
        is_inner: whether it connects two parts of a line.
        upper_at: its start on `upper`, from the middle.
        lower_at: its end on `lower`, from the middle.
        is_straight: whether both ends have the same x.
    """

    lower_at: float
    upper_at: float

    __slots__ = ("is_inner", "is_straight", "lower", "lower_at", "net", "upper", "upper_at")

    def __init__(self, upper: Vertex, lower: Vertex, net: LocalNet) -> None:
        self.upper: Vertex = upper
        self.lower: Vertex = lower
        self.net: LocalNet = net
        self.is_inner: bool = upper.role == "bend" and lower.role == "bend"
        self.upper_at = self.lower_at = 0.0
        self.is_straight: bool = False


class Level:
    """The content of one box.

    Attributes:
        ranks: the vertices of each rank, from left to right.
        nets: the nets of this level.
        vertex: the vertex of each shape.
        ports_in: the port through which a net enters.
        ports_out: the port through which a net leaves.
        forward: for each net, the vertices further down that it leads to.
        lanes: for each net that runs back, its vertices from the top down.
        back: for each net that runs back, the vertices it leads to.
        out_at: the start of each net on its source, from the middle.
        back_at: the end of a net that runs back on a vertex, from the middle.
    """

    def __init__(self, children: list[Shape], nets: list[LocalNet]) -> None:
        self.nets = nets
        self.vertex: dict[Shape, Vertex] = {
            shape: Vertex("shape", shape, None, i) for i, shape in enumerate(children)
        }
        self.ports_in: dict[LocalNet, Vertex] = {
            n: Vertex("in", None, n, -1) for n in nets if n.source is None
        }
        self.ports_out: dict[LocalNet, Vertex] = {
            n: Vertex("out", None, n, len(children)) for n in nets if n.leaves
        }
        self.ranks: list[list[Vertex]] = []
        self.lanes: dict[LocalNet, list[Vertex]] = {}
        self.back: dict[LocalNet, list[Vertex]] = {}
        self.out_at: dict[LocalNet, float] = {}
        self.back_at: dict[tuple[LocalNet, Vertex], float] = {}
        self.forward: dict[LocalNet, list[Vertex]] = {}
        for net in nets:
            self._sort_targets(net)

    def source(self, net: LocalNet) -> Vertex:
        """Return the source of a net."""
        return self.ports_in[net] if net.source is None else self.vertex[net.source]

    def vertices(self) -> Iterator[Vertex]:
        """Yield all vertices that have a rank."""
        for rank in self.ranks:
            yield from rank

    def _sort_targets(self, net: LocalNet) -> None:
        source = self.source(net)
        targets = [self.vertex[shape] for shape in net.targets]
        self.forward[net] = [v for v in targets if v.index > source.index]
        back = [v for v in targets if v.index <= source.index]
        if net.joins is not None:
            back.append(self.ports_in[net.joins])
        if back:
            self.back[net] = back
        if net.leaves:
            self.forward[net].append(self.ports_out[net])

    def fill(self) -> None:
        """Create the ranks, with the lines that run past, once each vertex has its rank."""
        inner = [*self.ports_in.values(), *self.vertex.values(), *self.ports_out.values()]
        depth = 1 + max((v.rank for v in inner), default=0)
        self.ranks = [[] for _ in range(depth)]
        for vertex in inner:
            self.ranks[vertex.rank].append(vertex)
        for net in self.nets:
            source = self.source(net)
            below = [v for v in self.back.get(net, ()) if v.rank > source.rank]
            if below:  # what happened earlier may stand further down: no need to run back
                self.forward[net] += below
                self.back[net] = [v for v in self.back[net] if v not in below]
                if not self.back[net]:
                    del self.back[net]
            self._run_down(net)
        for net, targets in self.back.items():
            lane = self.lanes[net] = []
            top = min(max(v.rank, 1) if v.role == "in" else v.rank for v in targets)
            for rank in range(top, self.source(net).rank + 1):
                lane.append(self._added(Vertex("lane", None, net, -1), rank))
        for rank_ in self.ranks:
            for order, vertex in enumerate(rank_):
                vertex.order = order

    def _run_down(self, net: LocalNet) -> None:
        """Let a net run down: one line, from which others branch off."""
        targets = self.forward[net]
        upper = self.source(net)
        last = max((v.rank for v in targets), default=0)
        for rank in range(upper.rank + 1, last + 1):
            for target in targets:
                if target.rank == rank:
                    self._link(upper, target, net)
            if rank < last:
                bend = self._added(Vertex("bend", None, net, -1), rank)
                self._link(upper, bend, net)
                upper = bend

    def _added(self, vertex: Vertex, rank: int) -> Vertex:
        vertex.rank = rank
        self.ranks[rank].append(vertex)
        return vertex

    @staticmethod
    def _link(upper: Vertex, lower: Vertex, net: LocalNet) -> None:
        link = Link(upper, lower, net)
        upper.downs.append(link)
        lower.ups.append(link)


_MOVES = 4
_ENDS = 8  # shapes without a successor beside each other


def rank(level: Level) -> None:
    """Give each vertex of a level its rank: below all its sources, and near its neighbours.

    Shapes are in the order of the run, in which values run back only along lanes: so a single walk
    in that order finds the ranks, and no search for cycles is needed.
    """
    shapes = list(level.vertex.values())
    into: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    out: dict[Vertex, list[LocalNet]] = {vertex: [] for vertex in shapes}
    for net in level.nets:
        targets = level.forward[net]
        for target in targets:
            if target in into:
                into[target].append(net)
        source = level.source(net)
        if targets and source in out:
            out[source].append(net)
    first = 1 if level.ports_in else 0

    def alone(vertex: Vertex) -> bool:
        """Whether it is a box that nothing leads to or from: such boxes are stacked."""
        is_box = vertex.shape is not None and vertex.shape.children is not None
        return is_box and not into[vertex] and not out[vertex]

    for vertex in shapes:
        vertex.rank = max((level.source(n).rank + 1 for n in into[vertex]), default=first)
        vertex.rank = max(vertex.rank, first)
    _stack([vertex for vertex in shapes if not out[vertex] and not alone(vertex)])
    apart = [vertex for vertex in shapes if alone(vertex)]
    for place, vertex in enumerate(apart):
        vertex.rank += place
    last = max((v.rank for v in shapes), default=first - 1) + 1
    for port in level.ports_out.values():
        port.rank = last
    for _ in range(_MOVES):
        moved = False
        for vertex in reversed(shapes):
            if not out[vertex]:
                continue
            latest = min(t.rank for n in out[vertex] for t in level.forward[n]) - 1
            if latest <= vertex.rank:
                continue
            longer = _longer(level, vertex, into[vertex], latest)
            shares = any(len(level.forward[net]) > 1 for net in into[vertex])
            # With as many lines longer as shorter, lines that are shared already may get longer.
            if longer < len(out[vertex]) or (longer == len(out[vertex]) and shares):
                vertex.rank = latest
                moved = True
        if not moved:
            break


def _stack(ends: list[Vertex]) -> None:
    """Put many shapes that nothing comes after, such as outputs, into several ranks by turns."""
    rows: dict[int, list[Vertex]] = {}
    for vertex in ends:
        rows.setdefault(vertex.rank, []).append(vertex)
    for row in rows.values():
        ranks = -(-len(row) // _ENDS)
        for place, vertex in enumerate(row):
            vertex.rank += place % ranks


def _longer(level: Level, vertex: Vertex, into: list[LocalNet], latest: int) -> int:
    """Return how many lines would get longer if a vertex went down."""
    longer = 0
    for net in into:
        others = max((v.rank for v in level.forward[net] if v is not vertex), default=0)
        # A line that runs past anyway costs nothing.
        longer += others < latest
    return longer


_SWEEPS = 12
_EXCHANGES = 4
_WIDEST = 80  # in wider ranks, exchanging neighbours takes longer than it is worth


def order(level: Level, wanted: Callable[[Vertex], float | None]) -> None:
    """Order the vertices in each rank.

    Args:
        level: the level, with filled ranks.
        wanted: the preferred positions of ports of the border; None if unknown.
    """
    ranks = level.ranks
    for rank in ranks:
        known = [v for v in rank if wanted(v) is not None]
        if len(known) == len(rank) > 0:
            rank.sort(key=lambda v: wanted(v) or 0.0)
    _number(ranks)
    best, fewest = _orders(ranks), _crossings(ranks)
    for sweep in range(_SWEEPS):
        if fewest == 0 and sweep > 1:
            break
        down = sweep % 2 == 0
        for rank in ranks if down else reversed(ranks):
            fixed = rank is ranks[0] and wanted(rank[0]) is not None if rank else True
            if not fixed:
                _sort(rank, ranks, down)
        if sweep > 1:
            _exchange(ranks, wanted)
        crossings = _crossings(ranks)
        if crossings < fewest or sweep == 0:
            best, fewest = _orders(ranks), crossings
    for vertex, place in best:
        vertex.order = place
    for rank in ranks:
        # Lanes stand outside of everything else: nothing tells them where to be.
        rank.sort(key=lambda v: (v.role == "lane", v.order))
    _number(ranks)


def _number(ranks: Sequence[list[Vertex]]) -> None:
    for rank in ranks:
        for place, vertex in enumerate(rank):
            vertex.order = place


def _orders(ranks: Sequence[list[Vertex]]) -> list[tuple[Vertex, int]]:
    return [(vertex, vertex.order) for rank in ranks for vertex in rank]


def _upper(link: Link) -> float:
    return link.upper.order + _fraction(link.upper, link.upper_at)


def _lower(link: Link) -> float:
    return link.lower.order + _fraction(link.lower, link.lower_at)


def _fraction(vertex: Vertex, at: float) -> float:
    """Return where on a vertex a link ends: between -0.5 and 0.5."""
    wide = vertex.left + vertex.right
    return at / wide if wide else 0.0


def _sort(rank: list[Vertex], ranks: Sequence[list[Vertex]], down: bool) -> None:
    keys: dict[Vertex, float] = {}
    for vertex in rank:
        links = vertex.ups if down else vertex.downs
        if links:
            other = ranks[vertex.rank + (-1 if down else 1)]
            at = sum(_upper(link) if down else _lower(link) for link in links) / len(links)
            keys[vertex] = (at + 0.5) / len(other)
        else:
            keys[vertex] = (vertex.order + 0.5) / len(rank)
    rank.sort(key=lambda v: (keys[v], v.order))
    for place, vertex in enumerate(rank):
        vertex.order = place


def _crossings(ranks: Sequence[list[Vertex]]) -> int:
    total = 0
    for rank in ranks[:-1]:
        links = [(_upper(link), _lower(link)) for vertex in rank for link in vertex.downs]
        links.sort()
        seen: list[float] = []
        for _, lower in links:
            total += len(seen) - bisect_right(seen, lower)
            insort(seen, lower)
    return total


def _exchange(ranks: Sequence[list[Vertex]], wanted: Callable[[Vertex], float | None]) -> None:
    """Exchange neighbours as long as that takes crossings away."""
    for _ in range(_EXCHANGES):
        changed = False
        for rank in ranks:
            if not 1 < len(rank) <= _WIDEST or (rank is ranks[0] and wanted(rank[0]) is not None):
                continue
            for place in range(len(rank) - 1):
                left, right = rank[place], rank[place + 1]
                now = _between(left.ups, right.ups, _upper)
                now += _between(left.downs, right.downs, _lower)
                then = _between(right.ups, left.ups, _upper)
                then += _between(right.downs, left.downs, _lower)
                if then < now:
                    rank[place], rank[place + 1] = right, left
                    left.order, right.order = place + 1, place
                    changed = True
        if not changed:
            break


def _between(left: list[Link], right: list[Link], end: Callable[[Link], float]) -> int:
    """Count the crossings of what is tied to two neighbours."""
    if not left or not right:
        return 0
    rights = sorted(end(link) for link in right)
    total = 0
    for link in left:
        at = end(link)
        total += sum(1 for other in rights if other < at)
    return total
