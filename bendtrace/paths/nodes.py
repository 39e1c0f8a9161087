"""The nodes of a tree of paths: plain data that can be stored and read without the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

__all__ = ["Kind", "NodePath", "Pass", "Place", "Role", "Step", "TreeNode", "Variant", "plain_keys"]

Kind = Literal["graph", "container", "tensor", "number", "other"]
Role = Literal["call", "input", "state", "op", "output"]


class NodePath(str):
    """The path of a node, as the library hands it out: it never names anything but that node."""

    __slots__ = ()


# So that `torch.load` reads what is saved by paths, such as activations.
torch.serialization.add_safe_globals([NodePath])


@dataclass(slots=True)
class Pass:
    """One execution of a node.

    Attributes:
        parent: in which pass of the parent it was, counted from 0.
        index: for values, the op on the tape that gave it; for calls of modules, the number of
            the call; None for what is not on the tape.
        element: for a result with several tensors, the keys that lead to this one.
        shape: the shape of a tensor.
    """

    parent: int
    index: int | None = None
    element: tuple[Any, ...] = ()
    shape: tuple[int, ...] | None = None


class Place(NamedTuple):
    """A line of the source.

    Attributes:
        file: path of the source file.
        line: its line, counted from 1.
        function: name of the function that it is in.
        text: the line itself, without its indentation; "" where it cannot be read.
    """

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        where = f'File "{self.file}", line {self.line}, in {self.function}'
        return f"{where}\n    {self.text}" if self.text else where


class Step(NamedTuple):
    """A flow step, or several at one place of a graph.

    Attributes:
        number: position of the first of them among the flow steps of the trace.
        after: name of the child that was computed last before it; "" for none.
        kind: "if", "while", "for", ...
        text: source of the expression that decided.
        outcomes: in which pass of the graph it came to what, and how often: `(0, "True", 3)`.
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
    """The code of a graph, in those of its passes that ran the same.

    Attributes:
        text: the code.
        passes: which passes, counted from 0.
    """

    text: str
    passes: tuple[int, ...]


def plain_keys(keys: tuple[Any, ...]) -> list[Any]:
    """Return keys that lead into a result as JSON can hold them."""
    return [key if type(key) in (str, int, bool, float) else repr(key) for key in keys]


@dataclass(eq=False)
class TreeNode:
    """One node: a call of a module, a value, or a container of values.

    Attributes:
        name: what the parent knows it by; an identifier.
        kind: "graph" for calls of modules, "container" for tuples, dicts and the like, "tensor",
            "number", or "other" for what cannot hold values of the run.
        type: name of its type: "Graph", "Tensor", "tuple", "float".
        role: how it belongs to the graph around it.
        key: for parts of containers the index, key or attribute name; for calls the name of the
            module as the module around it knows it (`layers.8`).
        label: what it would be called by itself, before names were made unique; "" if `name`.
        module: for graphs, the qualified name of the module.
        class_name: for graphs, the class of the module.
        children: the nodes below, in the order in which they first came up.
        passes: its executions.
        places: where it happened, from the code of the graph around it inwards.
        code: for graphs, what they ran.
        steps: for graphs, the flow steps in them.
        path: dotted path from the root; "" for the root.
        spellings: what strings can call the children, once somebody has asked.
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
        """Yield the node and all below, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))

    def child_path(self, name: str) -> NodePath:
        """Return the path of a child."""
        return NodePath(f"{self.path}.{name}" if self.path else name)

    def to_dict(self) -> dict[str, Any]:
        """Return the node and all below as plain values, ready for JSON."""
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
            KeyError: if something is missing; also TypeError or ValueError.
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
