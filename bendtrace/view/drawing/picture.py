"""Picture: what `draw` returns, and the forms that it is written in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bendtrace.errors import InputError
from bendtrace.view.drawing.canvas import Canvas, printable, svg
from bendtrace.view.drawing.items import Numbers
from bendtrace.view.drawing.overlay import Overlay, lay_over
from bendtrace.view.drawing.paint import figure, paint
from bendtrace.view.drawing.raster import rasterize
from bendtrace.view.drawing.scene import Node, Scene, scene
from bendtrace.view.viewer import viewer_html

if TYPE_CHECKING:
    from bendtrace.history.run_log import RunLog

__all__ = ["Format", "Picture", "dot", "draw"]


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


Format = Literal["svg", "png", "pdf", "html", "dot"]


class Picture:
    """A picture: shows itself in notebooks, and is saved as SVG, PNG, PDF, HTML or DOT.

    Attributes:
        canvas: the marks it is made of.
        scene: what it shows.
    """

    def __init__(
        self,
        canvas: Canvas,
        scene: Scene,
        html: Callable[[], str] | None = None,
    ) -> None:
        self.canvas = canvas
        self.scene = scene
        self._html = html

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        return svg(self.canvas)

    def to_bytes(self, format: Format) -> bytes:
        """Return the picture as the content of a file.

        Args:
            format: "svg", "png", "pdf", "html" or "dot".

        Raises:
            InputError: for another form, and for PNG and PDF without the extra `draw`.
        """
        if format == "svg":
            return self.svg.encode()
        if format == "png" or format == "pdf":
            return rasterize(self.canvas, format)
        if format == "html":
            return (self._html() if self._html is not None else _page(self)).encode()
        if format == "dot":
            return dot(self.scene).encode()
        raise InputError(f"a picture is written as {_FORMS}, not as {format!r}")

    def saved_to(self, path: str | os.PathLike[str] | None, format: Format | None) -> Picture:
        """Write the picture to a file, if there is one, and return it."""
        if path is not None:
            self.save(path, format)
        return self

    def save(self, path: str | os.PathLike[str], format: Format | None = None) -> None:
        """Write the picture to a file. An older file stays as it is until all is written.

        Args:
            path: where to.
            format: "svg", "png", "pdf", "html" or "dot"; by default what the path ends in.

        Raises:
            InputError: as for `to_bytes`, and if the folder does not exist. Nothing is written
                then.
        """
        where = Path(path)
        chosen = format if format is not None else form_of(where)
        content = self.to_bytes(chosen)
        _write(where, content)

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "image/svg+xml": self.svg}

    def __repr__(self) -> str:
        size = f"{self.canvas.width:.0f}\N{MULTIPLICATION SIGN}{self.canvas.height:.0f}"
        nodes, edges = len(self.scene.nodes()), len(self.scene.edges)
        return f"<Picture of {self.scene.title}: {nodes} nodes, {edges} edges, {size}>"


_FORMS = ", ".join(get_args(Format)[:-1]) + " or " + get_args(Format)[-1]


def form_of(path: Path) -> Format:
    """Return the form that a path asks for by its ending.

    Raises:
        InputError: if it asks for none that there is.
    """
    ending = path.suffix.lower().removeprefix(".")
    for form in get_args(Format):
        if ending == form:
            return form  # type: ignore[no-any-return]  # one of the literals
    raise InputError(
        f"cannot tell from {str(path)!r} what to write: its name has to end in "
        + ", ".join(f".{form}" for form in get_args(Format))
    )


def _write(path: Path, content: bytes) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _page(picture: Picture) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>bendtrace</title></head>\n"
        f'<body style="margin:0">{picture.svg}</body></html>\n'
    )


def draw(
    history: RunLog,
    path: str | os.PathLike[str] | None = None,
    *,
    format: Format | None = None,
    rolled: bool = False,
    collapse: bool = True,
    depth: int | None = None,
    max_nodes: int = 150,
    within: str | None = None,
    flow: bool = True,
    numbers: Numbers = "deciding",
    overlay: Overlay | None = None,
) -> Picture:
    """Draw a run.

    Modules are boxes, ops are nodes in the boxes of the calls that they ran in, with the shapes of
    values on the lines between. Flow steps are diamonds with their source text and the side that
    was taken.

    Args:
        history: the log of the run.
        path: where to save the picture; the ending says as what: .svg, .png, .pdf, .html or .dot.
        format: the file format, if the file name's ending does not say.
        rolled: whether the passes of an op are one node, with lines that run back. Otherwise
            each is its own.
        collapse: whether, of at least three blocks that are alike in a row, and of passes of
            loops, one is drawn for all.
        depth: how many boxes deep to draw: with 1, modules that the model calls are opened, but
            not those in them. None for all.
        max_nodes: how many nodes to draw at most. Above that boxes are drawn closed, the deepest
            and largest first, and a line in the picture says so.
        within: a module or one of its calls, such as `h.3`: only that is drawn.
        flow: whether flow steps are drawn.
        numbers: which numbers out of tensors are drawn: those that "deciding" flow steps come
            from, "all" or "none".
        overlay: what colours the nodes: "time", "memory" or "flops", a mapping from labels, node
            paths or modules to numbers, or a function of the entry that gives one. Nodes that stand
            for several values show the sum of "time", "memory" and "flops", and otherwise the
            largest number.

    Returns:
        The picture.

    Raises:
        InputError: for unknown endings, modules, keys of the overlay or options. Nothing is written
            then.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
        >>> print(trace.draw().svg.splitlines()[1])
        <title>Linear</title>
    """
    chosen = format
    if path is not None and chosen is None:
        chosen = form_of(Path(path))
    drawn = scene(
        history,
        rolled=rolled,
        collapsed=collapse,
        depth=depth,
        max_nodes=max_nodes,
        within=within,
        flow=flow,
        numbers=numbers,
    )
    scale = lay_over(drawn, overlay, history) if overlay is not None else None
    picture = Picture(paint(figure(drawn), scale), drawn, lambda: viewer_html(history))
    return picture.saved_to(path, chosen)
