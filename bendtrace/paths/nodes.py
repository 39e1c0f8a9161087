"""The nodes of a tree of paths: plain data that can be read without the model, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, Literal, NamedTuple

import torch

from bendtrace._places import path_text, place_text

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


# The nodes of a tree of paths: plain data that can be stored and read without the model.

Kind = Literal["graph", "container", "tensor", "number", "other"]
Role = Literal["call", "input", "state", "op", "output"]


class NodePath(str):
    """The path of a node, created by the library: it always names exactly that node."""

    __slots__ = ()


# So that `torch.load` reads what is saved by paths, such as activations.
torch.serialization.add_safe_globals([NodePath])


@dataclass(slots=True)
class Pass:
    """One execution of a node.

    Attributes:
        parent: the pass of the parent that it was in, counted from 0.
        index: for values, the op on the tape that returned it; for module calls, the number of the
            call; None for nodes that are not on the tape.
        element: for an op with several result tensors, the keys that lead to this one.
        shape: the shape of the tensor.
    """

    parent: int
    index: int | None = None
    element: tuple[Any, ...] = ()
    shape: tuple[int, ...] | None = None


class Place(NamedTuple):
    """A line of source code.

    Attributes:
        file: path of the source file.
        line: its line, counted from 1.
        function: name of the function that it is in.
        text: the line itself, without indentation; "" if it cannot be read.
    """

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        path = path_text(self.file)
        file = f'File "{path}"' if path == self.file else path
        where = f"{file}, line {self.line}, in {self.function}"
        return f"{where}\n    {self.text}" if self.text else where


class Step(NamedTuple):
    """A flow step, or several at one place of a graph.

    Attributes:
        number: position of the first of them among the flow steps of the trace.
        after: name of the last child computed before it; "" for none.
        kind: "if", "while", "for", ...
        text: source of the deciding expression.
        outcomes: the pass of the graph, the outcome, and how often it occurred: `(0, "True", 3)`.
        file: path of the source file.
        line: its line, counted from 1.
    """

    number: int
    after: str
    kind: str
    text: str
    outcomes: tuple[tuple[int, str, int], ...]
    file: str
    line: int


class Variant(NamedTuple):
    """The code of a graph, for the passes that ran the same code.

    Attributes:
        text: the code.
        passes: these passes, counted from 0.
    """

    text: str
    passes: tuple[int, ...]


def plain_keys(keys: tuple[Any, ...]) -> list[Any]:
    """Return keys into a result in a form that JSON can hold."""
    return [key if type(key) in (str, int, bool, float) else repr(key) for key in keys]


@dataclass(eq=False)
class TreeNode:
    """One node: a call of a module, a value, or a container of values.

    Attributes:
        name: its name in the parent; an identifier.
        kind: "graph" for module calls, "container" for tuples, dicts and the like, "tensor",
            "number", or "other" for objects that cannot contain values of the run.
        type: name of its type: "Graph", "Tensor", "tuple", "float".
        role: its relation to the enclosing graph.
        key: for parts of containers the index, key or attribute name; for calls the name of the
            module in the enclosing module (`layers.8`).
        label: its preferred name, before names were made unique; "" if equal to `name`.
        module: for graphs, the qualified name of the module.
        class_name: for graphs, the class of the module.
        children: the nodes below, in the order in which they first occurred.
        passes: its executions.
        places: its places in the source, starting in the code of the enclosing graph.
        code: for graphs, the code that ran.
        steps: for graphs, their flow steps.
        path: dotted path from the root; "" for the root.
        spellings: the names of children that strings can use, cached on first use.
    """

    name: str
    kind: Kind
    type: str
    role: Role
    key: str | int | None = None
    label: str = ""
    module: str = ""
    class_name: str = ""
    children: dict[str, TreeNode] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    places: tuple[Place, ...] = ()
    code: list[Variant] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    path: str = NodePath()
    spellings: dict[str, list[TreeNode]] | None = None

    def walk(self) -> Iterator[TreeNode]:
        """Yield the node and all nodes below, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))

    def child_path(self, name: str) -> NodePath:
        """Return the path of a child."""
        return NodePath(f"{self.path}.{name}" if self.path else name)

    def to_dict(self) -> dict[str, Any]:
        """Return the node and all nodes below as plain values, ready for JSON."""
        row: dict[str, Any] = {"name": self.name, "kind": self.kind, "type": self.type}
        row["role"] = self.role
        for name in ("key", "label", "module", "class_name"):
            if getattr(self, name) not in ("", None):
                row[name] = getattr(self, name)
        row["passes"] = [
            [p.parent, p.index, plain_keys(p.element), None if p.shape is None else list(p.shape)]
            for p in self.passes
        ]
        for name in ("places", "code", "steps"):
            if getattr(self, name):
                row[name] = [list(item) for item in getattr(self, name)]
        if self.children:
            row["children"] = [child.to_dict() for child in self.children.values()]
        return row

    @classmethod
    def from_dict(cls, row: dict[str, Any], path: str = "") -> TreeNode:
        """Read what `to_dict` wrote.

        Raises:
            KeyError: a field is missing; also TypeError or ValueError.
        """
        node = cls(
            name=row["name"], kind=row["kind"], type=row["type"], role=row["role"],
            key=row.get("key"), label=row.get("label", ""), module=row.get("module", ""),
            class_name=row.get("class_name", ""), path=path,
        )  # fmt: skip
        for parent, index, element, shape in row["passes"]:
            sizes = None if shape is None else tuple(shape)
            node.passes.append(Pass(parent, index, tuple(element), sizes))
        node.places = tuple(Place(*place) for place in row.get("places", ()))
        node.code = [Variant(text, tuple(passes)) for text, passes in row.get("code", ())]
        for number, after, kind, text, outcomes, file, line in row.get("steps", ()):
            counted = tuple((at, outcome, count) for at, outcome, count in outcomes)
            node.steps.append(Step(number, after, kind, text, counted, file, line))
        for item in row.get("children", ()):
            child = cls.from_dict(item, node.child_path(item["name"]))
            node.children[child.name] = child
        return node
