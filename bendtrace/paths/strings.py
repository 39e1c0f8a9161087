"""Paths as strings: `layers[8].mlp.relu:2`, `output|sub_0.sub_1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from keyword import iskeyword

from bendtrace.errors import NodePathError
from bendtrace.paths.nodes import NodePath, TreeNode
from bendtrace.paths.text import Chosen, children_of, describe, passes_in

__all__ = ["NodePath", "dug", "find", "is_path_only", "require_leaf"]


Found = tuple[TreeNode, Chosen]
_SHOWN = 12  # completions that a message names
_BRACKET = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|(-?\w+))\s*\]")
_ITEM = re.compile(r"(\w+)_(\d+)(?=[.|:]|$)(.*)", re.DOTALL)
_PASS = re.compile(r":(\d+)")


def is_path_only(text: str) -> bool:
    """Whether a string can only be a node path: it begins with a dot, or is a `NodePath`."""
    return isinstance(text, NodePath) or text.lstrip().startswith(".")


def find(root: TreeNode, path: str, chosen: Chosen = None) -> Found:
    """Return the node that a path leads to, and its passes if the path names some.

    Args:
        root: where the path begins.
        path: names joined by dots, `|` before what is inside a container, `:2` for a pass.
            Items of lists of modules can be written `layers_8`, `layers.8` or `layers[8]`.
        chosen: the passes of `root` that count.

    Raises:
        NodePathError: there is no such node.
    """
    search = _Search(path)
    spelled = [path, _BRACKET.sub(lambda m: "." + next(filter(None, m.groups()), ""), path)]
    for text in dict.fromkeys(spelled):
        for found in search.matches(root, chosen, text.strip().lstrip("."), 0):
            return found
    raise search.error()


def require_leaf(root: TreeNode, found: Found, path: str) -> None:
    """Refuse what is no single value.

    Raises:
        NodePathError: the node is a graph or a container.
    """
    node, chosen = found
    if node.kind == "graph":
        names = tuple(inner.path for inner, _ in children_of(node, chosen))
        raise NodePathError(
            f"{path or '<root>'!r} is a {describe(node, chosen)}, not a value; "
            f"in it there are {_listed(names)}",
            path,
            names,
        )
    if node.kind == "container":
        digs = tuple(dug(root, inner) for inner in _values_in(node, chosen))
        way = f"dig into it: {_listed(digs)}" if digs else "and there is no value in it"
        raise NodePathError(
            f"{path!r} is a {describe(node, chosen)}, not a single value; {way}", path, digs
        )


def dug(root: TreeNode, node: TreeNode) -> str:
    """Return the path of a node with `|` where it leads into a container.

    Args:
        root: the root of the whole tree.
        node: a node of it.
    """
    names = node.path.split(".")
    inner = root
    for position, name in enumerate(names[:-1], 1):
        inner = inner.children[name]
        if inner.kind == "container":
            return f"{'.'.join(names[:position])}|{'.'.join(names[position:])}"
    return node.path


def _values_in(node: TreeNode, chosen: Chosen) -> Iterator[TreeNode]:
    for inner, passes in children_of(node, chosen):
        if inner.kind == "container":
            yield from _values_in(inner, passes)
        elif inner.kind != "other":
            yield inner


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


class _Search:
    """Looks for a path, and remembers how far it got."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._depth = -1
        self._failure: tuple[TreeNode, Chosen, str, str] | None = None

    def matches(self, node: TreeNode, chosen: Chosen, rest: str, depth: int) -> Iterator[Found]:
        """Yield what the rest of a path can mean below a node, likeliest first."""
        if not rest:
            yield node, chosen
            return
        spellings = _spellings(node)
        reached = False
        for end in [m.start() for m in re.finditer(r"[.|:]", rest)] + [len(rest)]:
            for child in spellings.get(rest[:end], ()):
                passes = passes_in(child, chosen)
                if passes is None or passes:
                    reached = True
                    yield from self._after(child, passes, rest[end:], depth + 1)
        if not reached:  # `features_6` for an item of a module that is itself called
            item_of = _ITEM.match(rest)
            name, item, after = item_of.groups() if item_of is not None else ("", "", "")
            for child in spellings.get(name, ()):
                passes = passes_in(child, chosen)
                if child.kind == "graph" and passes != [] and item in _spellings(child):
                    reached = True
                    yield from self.matches(child, passes, item + after, depth + 1)
        if not reached and depth > self._depth:
            self._depth = depth
            self._failure = node, chosen, re.split(r"[.|:]", rest, maxsplit=1)[0], ""

    def _after(self, node: TreeNode, chosen: Chosen, rest: str, depth: int) -> Iterator[Found]:
        """Go on after the name of a node."""
        named = _PASS.match(rest)
        if named is not None:
            passes = list(range(len(node.passes))) if chosen is None else list(chosen)
            number = int(named[1])
            if not 1 <= number <= len(passes):
                self._fail(
                    node, chosen, depth,
                    f"{node.path!r} has {_counted(len(passes), 'pass', 'passes')}, so there is no "
                    f":{number}",
                )  # fmt: skip
                return
            chosen, rest = [passes[number - 1]], rest[named.end() :]
        if not rest:
            yield node, chosen
        elif rest[0] == "|" and node.kind != "container":
            self._fail(
                node, chosen, depth,
                f"{node.path!r} is a {describe(node, chosen)}: only into tuples, lists, dicts and "
                "the like can one dig with '|'",
            )  # fmt: skip
        elif rest[0] in ".|" and len(rest) > 1:
            yield from self.matches(node, chosen, rest[1:], depth)
        else:
            self._fail(node, chosen, depth, f"{rest!r} after {node.path!r} means nothing")

    def _fail(self, node: TreeNode, chosen: Chosen, depth: int, reason: str) -> None:
        if depth > self._depth:
            self._depth, self._failure = depth, (node, chosen, "", reason)

    def error(self) -> NodePathError:
        """Say where the path went astray."""
        assert self._failure is not None
        node, chosen, wrong, reason = self._failure
        names = [child.name for child, _ in children_of(node, chosen)]
        completions = tuple(map(node.child_path, names))
        if reason:
            return NodePathError(f"no node {self.path!r}: {reason}", self.path, completions)
        where = repr(node.path) if node.path else "the root"
        if not names:
            message = f"{where} is a {describe(node, chosen)} with nothing below it"
            return NodePathError(f"no node {self.path!r}: {message}", self.path)
        close = get_close_matches(wrong, names, n=3, cutoff=0.5)
        near = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        message = f"{where} has no {wrong!r}; {near}it has {_listed(tuple(names))}"
        return NodePathError(f"no node {self.path!r}: {message}", self.path, completions)


def _spellings(node: TreeNode) -> dict[str, list[TreeNode]]:
    """Return what the children of a node can be called, likeliest first.

    A name stands for its child. It can stand for another one besides, whose own name was taken,
    if there is nothing below the child: `output.dense`.
    """
    if node.spellings is None:
        found = {child.name: [child] for child in node.children.values()}
        also: dict[str, TreeNode] = {}
        for child in node.children.values():
            for alias in _aliases(child):
                also.setdefault(alias, child)
        for alias, child in also.items():
            named = found.setdefault(alias, [])
            if child not in named and all(other.kind != "graph" for other in named):
                named.append(child)
        node.spellings = found
    return node.spellings


def _aliases(node: TreeNode) -> Iterator[str]:
    """Yield what else a node can be called in a string, besides its name."""
    if node.label:
        yield node.label
    if node.key is not None:
        yield str(node.key)
        if isinstance(node.key, int):
            yield f"sub_{node.key}"
        elif node.role == "call":
            suffix = node.name.removeprefix(str(node.key).replace(".", "_"))
            if suffix != node.name and suffix:
                yield f"{node.key}{suffix}"
    if node.name.endswith("_") and iskeyword(node.name[:-1]):
        yield node.name[:-1]


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
