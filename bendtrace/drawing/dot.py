"""Scenes as text in the DOT language, for Graphviz and what else reads it."""

from __future__ import annotations

from bendtrace.drawing.measure import printable
from bendtrace.drawing.nodes import Node, Scene

__all__ = ["dot"]

_SHAPES = {"input": "oval", "output": "oval", "decision": "hexagon", "number": "oval"}


def dot(scene: Scene) -> str:
    """Return a scene in the DOT language: boxes are clusters."""
    lines = ["digraph {", f"  label={_quoted(scene.title)};", "  node [shape=box];"]
    if scene.note:
        lines += [f"  // {printable(line)}" for line in scene.note.splitlines()]
    for child in scene.root.children or ():
        lines += _node(child, "  ")
    for edge in scene.edges:
        style = "" if edge.kind == "data" else ", style=dashed"
        label = f"label={_quoted(edge.text)}{style}"
        lines.append(f"  {edge.source.key} -> {edge.target.key} [{label}];")
    return "\n".join([*lines, "}\n"])


def _node(node: Node, indent: str) -> list[str]:
    title = f"{node.title} \N{MULTIPLICATION SIGN}{node.times}" if node.times else node.title
    if node.children is None:
        label = "\\n".join(_escaped(line) for line in [title, *node.lines])
        shape = f", shape={_SHAPES[node.kind]}" if node.kind in _SHAPES else ""
        return [f'{indent}{node.key} [label="{label}"{shape}];']
    lines = [f"{indent}subgraph cluster_{node.key} {{", f"{indent}  label={_quoted(title)};"]
    for child in node.children:
        lines += _node(child, indent + "  ")
    return [*lines, f"{indent}}}"]


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
