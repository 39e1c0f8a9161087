"""The code of one call of a module while it is written: statements, and what names stand for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from bendtrace.graph.names import base_name
from bendtrace.paths.build import Builder
from bendtrace.paths.layout import Line, kept_name, layout
from bendtrace.paths.nodes import TreeNode
from bendtrace.paths.structure import items_of
from bendtrace.recording.structure import existing_in
from bendtrace.recording.tape import Ref, refs_in

__all__ = ["Body"]


class _Local(NamedTuple):
    """What a value is called.

    Attributes:
        name: the variable.
        version: how often that had been assigned when the value was.
        access: what to write after it.
    """

    name: str
    version: int
    access: str = ""


class Body:
    """The body of a function that is written line by line.

    Args:
        builder: builds the tree.

    Attributes:
        arguments: names of the arguments.
        within: the context managers that the next lines run under.
    """

    def __init__(self, builder: Builder) -> None:
        self.arguments: list[str] = []
        self.within = ""
        self._builder = builder
        self._lines: list[Line] = []
        self._names: dict[tuple[int, tuple[Any, ...]], _Local] = {}
        self._versions: dict[str, int] = {}
        self._older: set[str] = set()

    def text(self) -> list[str]:
        """Return the lines."""
        return layout(self._lines, self.arguments, self._older)

    def knows(self, index: int) -> bool:
        """Whether what an op gave has a name."""
        return (index, ()) in self._names

    def name(self, ref: Ref) -> str:
        """Return what a value is called here."""
        index, keys = self._builder.events.origin(ref.index)
        for length in range(len(keys), -1, -1):
            local = self._names.get((index, keys[:length]))
            if local is not None:
                text = local.name
                behind = self._versions.get(text, 0) - local.version
                if behind:  # the name stands for a later pass by now
                    self._older.add(text)
                    text = f"{kept_name(text)}[{-1 - behind}]"
                return text + local.access + "".join(f"[{key!r}]" for key in keys[length:])
        elsewhere = self._builder.paths.get(index)
        return f"<{elsewhere or base_name(self._builder.events.ops[index])}>"

    def used(self, value: Any) -> tuple[str, ...]:
        """Return the variables that something recorded is written with."""
        texts = [self.name(ref) for ref in refs_in(value)]
        texts += [thing.part.label for thing in existing_in(value)]
        found = (re.match(r"\w+", text) for text in texts)
        return tuple(dict.fromkeys(match[0] for match in found if match is not None))

    def assign(self, name: str, text: str, used: tuple[str, ...] = ()) -> None:
        """Add the line that gives a variable its value; none if that is itself."""
        if text == name:
            return
        self._lines.append(Line(f"{name} = {text}", name, used, within=self.within))
        self._versions[name] = self._versions.get(name, 0) + 1

    def statement(self, text: str, used: tuple[str, ...], leaves: bool = False) -> None:
        """Add a line that gives no value a name."""
        self._lines.append(Line(text, "", used, leaves, self.within))

    def call_it(self, index: int, element: tuple[Any, ...], name: str) -> None:
        """Note that a value is now called by a variable."""
        self._names[index, element] = self._local(name)

    def call_argument(self, child: TreeNode) -> None:
        """Note what the values in an argument are called."""
        self._call_parts(child, self._local(child.name))

    def call_results(self, value: Any, name: str) -> None:
        """Note what the values in the output of a call are called, which has a variable."""
        self._call_items(value, self._local(name))

    def _local(self, name: str) -> _Local:
        return _Local(name, self._versions.get(name, 0))

    def _call_parts(self, child: TreeNode, local: _Local) -> None:
        if child.kind in ("tensor", "number"):
            made = child.passes[-1]
            assert made.index is not None
            self._names.setdefault((made.index, made.element), local)
        for inner in child.children.values():
            if inner.passes[-1].parent == len(child.passes) - 1:
                access = f"[{inner.key!r}]"
                if child.type not in ("tuple", "list", "dict") and isinstance(inner.key, str):
                    access = f".{inner.key}" if inner.key.isidentifier() else access
                self._call_parts(inner, local._replace(access=local.access + access))

    def _call_items(self, value: Any, local: _Local) -> None:
        value = self._builder.plain(value)
        if isinstance(value, Ref):
            self._names[self._builder.events.origin(value.index)] = local
            return
        for item in items_of(value, self._builder.events) or ():
            self._call_items(item.value, local._replace(access=local.access + item.access))
