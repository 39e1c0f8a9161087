"""One level of a nested drawing: what stands in one box, in ranks, with what runs between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Level", "LocalNet", "Net", "Shape", "Vertex"]


@dataclass(eq=False)
class Shape:
    """Something to be placed: a node, or a box with shapes in it.

    Attributes:
        key: what it is called.
        width: how wide it is; of a box, that is found.
        height: how high it is; of a box, that is found.
        below: room kept free below it, for what is written at the line that leaves it.
        label: how wide that text is; it stands to the right of the line.
        children: what is in it, in the order of the run; None if it is no box.
        title: of a box, how wide its title is.
        head: of a box, how high its title is.
        x: its left edge.
        y: its upper edge.
        title_x: of a box, where its title starts, from its left edge.
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
    """One value, and where it goes: lines that share their way as far as they can.

    Attributes:
        source: the shape it comes from.
        targets: the shapes it goes to.
        port: which of its values the source gives there: nets with the same start together.
        kind: what it stands for; the layout does not mind.
        joins: a net that comes from outside of `frame`, to which this one runs back up, instead
            of to its targets, because it goes where that one goes.
        frame: the box in which it does so.
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
        net: of which it is a part.
        source: child it comes from; None if it comes in through the border.
        targets: children it goes to.
        leaves: whether it goes out through the border.
        joins: the net coming in here to which it runs back up.
    """

    net: Net
    source: Shape | None
    targets: dict[Shape, None] = field(default_factory=dict)
    leaves: bool = False
    joins: LocalNet | None = None


Role = Literal["shape", "in", "out", "bend", "lane"]


class Vertex:
    """Something with a place in a rank: a shape, a port of the border, or a line running past.

    Attributes:
        role: which of these; a "lane" is a line that runs back up.
        shape: the shape it stands for.
        net: the net that the port or the line belongs to.
        index: position among the shapes.
        rank: its rank, from 0 at the top.
        order: its position in the rank.
        left: how far it reaches to the left of its middle.
        right: the same to the right.
        x: where its middle is.
        height: how high it is, with the room below.
        y: where its upper edge is.
        ups: links that come from above.
        downs: links that go down.
    """

    __slots__ = ("downs", "height", "index", "left", "net", "order", "rank", "right", "role",
                 "shape", "ups", "x", "y")  # fmt: skip

    def __init__(self, role: Role, shape: Shape | None, net: LocalNet | None, index: int) -> None:
        self.role = role
        self.shape = shape
        self.net = net
        self.index = index
        self.rank = self.order = 0
        self.left = self.right = self.height = self.x = self.y = 0.0
        self.ups: list[Link] = []
        self.downs: list[Link] = []


class Link:
    """A piece of a net between neighbouring ranks.

    Attributes:
        upper: where it comes from.
        lower: where it goes to.
        net: the net.
        is_inner: whether it goes on from one piece of a line to the next.
        upper_at: where on `upper` it starts, from its middle.
        lower_at: where on `lower` it ends, from its middle.
        is_straight: whether both ends are kept at the same x.
    """

    __slots__ = ("is_inner", "is_straight", "lower", "lower_at", "net", "upper", "upper_at")

    def __init__(self, upper: Vertex, lower: Vertex, net: LocalNet) -> None:
        self.upper = upper
        self.lower = lower
        self.net = net
        self.is_inner = upper.role == "bend" and lower.role == "bend"
        self.upper_at = self.lower_at = 0.0
        self.is_straight = False


class Level:
    """What stands in one box.

    Attributes:
        ranks: the vertices of each rank, from left to right.
        nets: the nets of this level.
        vertex: the vertex of each shape.
        ports_in: the port through which a net comes in.
        ports_out: the port through which a net leaves.
        lanes: for each net that runs back, its vertices from the top down.
        back: for each net that runs back, the vertices it leads to.
        out_at: where on its source each net starts, from the middle.
        back_at: where on a vertex a net that runs back ends, from its middle.
    """

    def __init__(self, children: list[Shape], nets: list[LocalNet]) -> None:
        self.nets = nets
        self.vertex = {shape: Vertex("shape", shape, None, i) for i, shape in enumerate(children)}
        self.ports_in = {n: Vertex("in", None, n, -1) for n in nets if n.source is None}
        self.ports_out = {n: Vertex("out", None, n, len(children)) for n in nets if n.leaves}
        self.ranks: list[list[Vertex]] = []
        self.lanes: dict[LocalNet, list[Vertex]] = {}
        self.back: dict[LocalNet, list[Vertex]] = {}
        self.out_at: dict[LocalNet, float] = {}
        self.back_at: dict[tuple[LocalNet, Vertex], float] = {}
        self._forward: dict[LocalNet, list[Vertex]] = {}
        for net in nets:
            self._sort_targets(net)

    def source(self, net: LocalNet) -> Vertex:
        """Return where a net comes from."""
        return self.ports_in[net] if net.source is None else self.vertex[net.source]

    def forward(self, net: LocalNet) -> list[Vertex]:
        """Return where a net leads to further down."""
        return self._forward[net]

    def vertices(self) -> Iterator[Vertex]:
        """Yield all vertices that have a rank."""
        for rank in self.ranks:
            yield from rank

    def _sort_targets(self, net: LocalNet) -> None:
        source = self.source(net)
        targets = [self.vertex[shape] for shape in net.targets]
        self._forward[net] = [v for v in targets if v.index > source.index]
        back = [v for v in targets if v.index <= source.index]
        if net.joins is not None:
            back.append(self.ports_in[net.joins])
        if back:
            self.back[net] = back
        if net.leaves:
            self._forward[net].append(self.ports_out[net])

    def fill(self) -> None:
        """Make the ranks, with the lines that run past, once each vertex has its rank."""
        inner = [*self.ports_in.values(), *self.vertex.values(), *self.ports_out.values()]
        depth = 1 + max((v.rank for v in inner), default=0)
        self.ranks = [[] for _ in range(depth)]
        for vertex in inner:
            self.ranks[vertex.rank].append(vertex)
        for net in self.nets:
            source = self.source(net)
            below = [v for v in self.back.get(net, ()) if v.rank > source.rank]
            if below:  # what happened earlier may stand further down: no need to run back
                self._forward[net] += below
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
        targets = self._forward[net]
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
