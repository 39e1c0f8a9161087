"""The nodes of a tree of paths: plain data that can be stored and read without the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from bendtrace._places import path_text

__all__ = ["Kind", "NodePath", "Pass", "Place", "Role", "Step", "TreeNode", "Variant", "plain_keys"]

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
