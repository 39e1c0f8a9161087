"""Trees of nodes as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import NamedTuple

from bendtrace._places import place_text
from bendtrace.paths.nodes import Pass, Step, TreeNode

__all__ = ["LIMIT", "Chosen", "Text", "children_of", "describe", "draw", "passes_in"]

TIMES = "\N{MULTIPLICATION SIGN}"
LIMIT = 200  # lines of a tree that are printed without being asked


class Text(str):
    """Text that is displayed as it is, even where Python would display a quoted form."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]


Chosen = Sequence[int] | None


def describe(node: TreeNode, chosen: Chosen = None) -> str:
    """Return a short description of a node: `Graph(5)`, `Tensor(3, 2)`, `tuple(2)`, `float`.

    Args:
        node: the node.
        chosen: the passes to describe; None for all.
    """
    passes = node.passes if chosen is None else [node.passes[i] for i in chosen]
    text = node.type
    if node.kind in ("graph", "container"):
        text = f"{text}({sum(1 for _ in children_of(node, chosen))})"
    elif node.kind == "tensor":
        text = f"{text}{_shapes(passes)}"
    return f"{text} {TIMES}{len(passes)}" if len(passes) > 1 else text


def children_of(node: TreeNode, chosen: Chosen) -> Iterator[tuple[TreeNode, Chosen]]:
    """Yield the children that occurred in some passes of a node, with their own passes then."""
    for child in node.children.values():
        passes = passes_in(child, chosen)
        if passes is None or passes:
            yield child, passes


def passes_in(child: TreeNode, chosen: Chosen) -> Chosen:
    """Return the passes of a child that were in some passes of its parent; None for all."""
    if chosen is None:
        return None
    within = set(chosen)
    return [i for i, made in enumerate(child.passes) if made.parent in within]


def draw(
    node: TreeNode, title: str, chosen: Chosen = None, *, flow: bool = False,
    depth: int | None = None, limit: int | None = LIMIT,
) -> str:  # fmt: skip
    """Return a node and all nodes below as text.

    Args:
        node: the node.
        title: its name in the text.
        chosen: its passes to show; None for all.
        flow: whether to show flow steps.
        depth: the number of levels below the node to show; None for all.
        limit: the maximum number of lines; None for no limit. Above it, graphs that are like the
            one before them are reduced to one line, and then the deepest levels are left out.
    """
    picture = _Picture(flow, folds=False)
    sizes = picture.level_sizes(node, chosen)[:depth]
    total = 1 + sum(sizes)
    shown = depth
    if limit is not None and total > limit:
        picture = _Picture(flow, folds=True)
        shown, lines = 0, 1
        for size in picture.level_sizes(node, chosen)[:depth]:
            if shown and lines + size > limit:
                break
            shown, lines = shown + 1, lines + size
    drawn = [f"{title}: {describe(node, chosen)}", *picture.lines(node, chosen, "", shown)]
    if limit is not None and total > limit:
        drawn = drawn[:limit]
        left = total - len(drawn)
        drawn.append(f"... {left} lines left out: look at a part, or use ._show(limit=None)")
    return "\n".join(drawn)


class _Row(NamedTuple):
    """A line right below a node.

    Attributes:
        text: what it says.
        node: the child that it shows; None for a flow step, or several children at once.
        chosen: the passes of the child.
    """

    text: str
    node: TreeNode | None = None
    chosen: Chosen = None


class _Picture:
    """How a tree is drawn.

    Args:
        flow: whether flow steps are shown.
        folds: whether graphs that are like the one before are shown in one line.
    """

    def __init__(self, flow: bool, folds: bool) -> None:
        self._flow = flow
        self._folds = folds
        self._forms: dict[tuple[object, ...], int] = {}

    def level_sizes(self, node: TreeNode, chosen: Chosen) -> list[int]:
        """Return how many lines there are on each level below a node."""
        sizes: list[int] = []
        level: list[tuple[TreeNode, Chosen]] = [(node, chosen)]
        while level:
            rows = [row for inner, passes in level for row in self._rows(inner, passes)]
            if rows:
                sizes.append(len(rows))
            level = [(row.node, row.chosen) for row in rows if row.node is not None]
        return sizes

    def lines(
        self, node: TreeNode, chosen: Chosen, indent: str, depth: int | None
    ) -> Iterator[str]:
        if depth == 0:
            return
        rows = self._rows(node, chosen)
        for position, row in enumerate(rows, 1):
            last = position == len(rows)
            yield f"{indent}{'└─' if last else '├─'}{row.text}"
            if row.node is not None:
                below = f"{indent}{'  ' if last else '│ '}"
                left = None if depth is None else depth - 1
                yield from self.lines(row.node, row.chosen, below, left)

    def _rows(self, node: TreeNode, chosen: Chosen) -> list[_Row]:
        children = list(children_of(node, chosen))
        steps = node.steps if self._flow else ()
        names = {child.name for child, _ in children}
        rows = _step_rows([step for step in steps if step.after not in names], chosen)
        like: list[tuple[TreeNode, Chosen]] = []

        def tell_alike() -> None:
            if len(like) > 1:
                others = [like[1][0].name, like[-1][0].name][: len(like) - 1]
                shown = (", ..., " if len(like) > 3 else ", ").join(others)
                each = " each" if len(like) > 2 else ""
                text = f"{shown}: {describe(*like[0])}{each}, as {like[0][0].name}"
                rows.append(_Row(text))
            like.clear()

        for child, passes in children:
            after = _step_rows([step for step in steps if step.after == child.name], chosen)
            folds = self._folds and child.kind == "graph" and not after
            if folds and like and self._form(child, passes) == self._form(*like[0]):
                like.append((child, passes))
                continue
            tell_alike()
            rows.append(_child_row(child, passes))
            rows += after
            if folds:
                like.append((child, passes))
        tell_alike()
        return rows

    def _form(self, node: TreeNode, chosen: Chosen) -> int:
        """Return a number that is the same for nodes that look the same."""
        below = tuple((c.name, self._form(c, passes)) for c, passes in children_of(node, chosen))
        return self._forms.setdefault((describe(node, chosen), below), len(self._forms))


def _child_row(child: TreeNode, chosen: Chosen) -> _Row:
    return _Row(f"{child.name}: {describe(child, chosen)}", child, chosen)


def _step_rows(steps: Sequence[Step], chosen: Chosen) -> list[_Row]:
    texts = (step_text(step, chosen) for step in steps)
    return [_Row(text) for text in texts if text]


def step_text(step: Step, chosen: Chosen = None) -> str:
    """Return a flow step as one line: `if x.sum() > 3: True  (model.py:41)`.

    Args:
        step: the step.
        chosen: the passes of the graph to describe; None for all. "" if it is in none of them.
    """
    counts: dict[str, int] = {}
    for made, text, count in step.outcomes:
        if chosen is None or made in chosen:
            counts[text] = counts.get(text, 0) + count
    if not counts:
        return ""
    once = list(counts.values()) == [1]
    outcomes = ", ".join(
        text if once else f"{text} {TIMES}{count}" for text, count in counts.items()
    )
    source = shorten(step.text, 60, placeholder=" ...")
    return f"{step.kind} {source}: {outcomes}  ({place_text(step.file, step.line)})"


def _shapes(passes: Sequence[Pass]) -> str:
    """The shape of a tensor; of several, how far each dimension reaches."""
    shapes = list(dict.fromkeys(made.shape for made in passes if made.shape is not None))
    if len({len(shape) for shape in shapes}) > 1:
        return "(...)"
    sizes = []
    for dimension in zip(*shapes, strict=True):
        low, high = min(dimension), max(dimension)
        sizes.append(str(low) if low == high else f"{low}..{high}")
    return f"({', '.join(sizes)})"
