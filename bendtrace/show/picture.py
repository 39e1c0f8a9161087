"""Picture: the result of `draw`, and its file formats."""

from __future__ import annotations

import base64
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bendtrace.errors import InputError
from bendtrace.python.lazy import required
from bendtrace.show.canvas import (
    Canvas,
    Caption,
    Mark,
    Marks,
    Polygon,
    Rectangle,
    Stroke,
    printable,
    round_corners,
    svg,
)
from bendtrace.show.paint import Overlay, figure, lay_over, paint
from bendtrace.show.scene import Numbers, Scene, SceneNode, scene
from bendtrace.show.viewer import viewer_html

if TYPE_CHECKING:
    from bendtrace.log.run_log import RunLog


_SHAPES = {"input": "oval", "output": "oval", "decision": "hexagon", "number": "oval"}


def dot(scene: Scene) -> str:
    """Return a scene in the DOT language: boxes are clusters."""
    lines = ["digraph {", f"  label={_quote(scene.title)};", "  node [shape=box];"]
    if scene.note:
        lines += [f"  // {printable(line)}" for line in scene.note.splitlines()]
    for child in scene.root.children or ():
        lines += _dot_line(child, "  ")
    for edge in scene.edges:
        style = "" if edge.kind == "data" else ", style=dashed"
        label = f"label={_quote(edge.text)}{style}"
        lines.append(f"  {edge.source.key} -> {edge.target.key} [{label}];")
    return "\n".join([*lines, "}\n"])


def _dot_line(node: SceneNode, indent: str) -> list[str]:
    title = f"{node.title} \N{MULTIPLICATION SIGN}{node.times}" if node.times else node.title
    if node.children is None:
        label = "\\n".join(_escape_quotes(line) for line in [title, *node.lines])
        shape = f", shape={_SHAPES[node.kind]}" if node.kind in _SHAPES else ""
        return [f'{indent}{node.key} [label="{label}"{shape}];']
    lines = [f"{indent}subgraph cluster_{node.key} {{", f"{indent}  label={_quote(title)};"]
    for child in node.children:
        lines += _dot_line(child, indent + "  ")
    return [*lines, f"{indent}}}"]


def _escape_quotes(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def _quote(text: str) -> str:
    return f'"{_escape_quotes(text)}"'


Format = Literal["svg", "png", "pdf", "html", "dot"]


class Picture:
    """A picture: it displays in notebooks, and can be saved as SVG, PNG, PDF, HTML or DOT.

    Attributes:
        canvas: its marks.
        scene: its scene.
    """

    def __init__(self, canvas: Canvas, scene: Scene, html: Callable[[], str] | None = None) -> None:
        self.canvas = canvas
        self.scene = scene
        self._html = html

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        return svg(self.canvas)

    @property
    def alternative(self) -> str:
        """The picture in words, for `alt=` of an image: its title and content."""
        return f"{self.canvas.title}: {self.canvas.description}"

    def to_bytes(self, format: Format) -> bytes:
        """Return the picture as the content of a file.

        Args:
            format: "svg", "png", "pdf", "html" or "dot".

        Raises:
            InputError: the format is unknown, or PNG or PDF is requested without the extra `draw`.
        """
        if format == "svg":
            return self.svg.encode()
        if format == "png" or format == "pdf":
            return rasterize(self.canvas, format)
        if format == "html":
            return (self._html() if self._html is not None else _page(self)).encode()
        if format == "dot":
            return dot(self.scene).encode()
        raise InputError(f"a picture can be written as {_FORMS}, not as {format!r}")

    def saved_to(self, path: str | os.PathLike[str] | None, format: Format | None) -> Picture:
        """Write the picture to a file, if one is given, and return it."""
        if path is not None:
            self.save(path, format)
        return self

    def save(self, path: str | os.PathLike[str], format: Format | None = None) -> None:
        """Write the picture to a file. An older file is replaced only when writing is complete.

        Args:
            path: the file.
            format: "svg", "png", "pdf", "html" or "dot"; by default the ending of the path.

        Raises:
            InputError: as for `to_bytes`, and if the folder does not exist. Nothing is written
                then.
        """
        where = Path(path)
        chosen = format if format is not None else format_of_path(where)
        content = self.to_bytes(chosen)
        _write_file(where, content)

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # Front ends show SVG as an image without a text, whatever its metadata say.
        data = base64.b64encode(self.svg.encode()).decode()
        image = f'<img alt="{escape(self.alternative)}" src="data:image/svg+xml;base64,{data}">'
        return {"text/plain": repr(self), "image/svg+xml": self.svg, "text/html": image}

    def __repr__(self) -> str:
        size = f"{self.canvas.width:.0f}\N{MULTIPLICATION SIGN}{self.canvas.height:.0f}"
        nodes, edges = len(self.scene.nodes()), len(self.scene.edges)
        return f"<Picture of {self.scene.title}: {nodes} nodes, {edges} edges, {size}>"


_FORMS = ", ".join(get_args(Format)[:-1]) + " or " + get_args(Format)[-1]


def format_of_path(path: Path) -> Format:
    """Return the format that the ending of a path selects."""
    ending = path.suffix.lower().removeprefix(".")
    for form in get_args(Format):
        if ending == form:
            return form  # type: ignore[no-any-return]  # one of the literals
    raise InputError(
        f"the format of {str(path)!r} is unknown: its name has to end in "
        + ", ".join(f".{form}" for form in get_args(Format))
    )


def _write_file(path: Path, content: bytes) -> None:
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
        f"<title>{escape(picture.canvas.title)}</title></head>\n"
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
    max_nodes: int = 50,
    within: str | None = None,
    flow: bool = True,
    numbers: Numbers = "deciding",
    overlay: Overlay | None = None,
) -> Picture:
    """Draw a run.

    Modules are boxes, and ops are nodes in the boxes of their module calls, with the shapes of
    values on the lines between them. Flow steps are diamonds with their source text and the side
    that was taken.

    Args:
        history: the log of the run.
        path: where to save the picture; the ending selects the format: .svg, .png, .pdf, .html or
            .dot.
        format: the file format, if the file name's ending does not say.
        rolled: whether to merge the passes of an op into one node, with lines that run back.
            Otherwise each pass is a node.
        collapse: whether to draw only one of at least three similar blocks in a row, and one of the
            passes of a loop.
        depth: the number of nested boxes to draw: with 1, modules that the model calls are opened,
            but not those in them. None for all.
        max_nodes: the maximum number of nodes to draw. Above it boxes are drawn closed, the deepest
            and largest first, and a line in the picture says so.
        within: a module or one of its calls, such as `h.3`, to draw only that.
        flow: whether to draw flow steps.
        numbers: which numbers taken from tensors to draw: those that "deciding" flow steps use,
            "all" or "none".
        overlay: the quantity that colours the nodes: "time", "memory" or "flops", a mapping from
            labels, node paths or modules to numbers, or a function of the entry that returns a
            number. Nodes that represent several values show the sum for "time", "memory" and
            "flops", and otherwise the largest number.

    Returns:
        The picture.

    Raises:
        InputError: an ending, module, key of the overlay or option is unknown. Nothing is written
            then.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
        >>> print(trace.draw().svg.splitlines()[1])
        <title>Linear</title>
    """
    chosen = format
    if path is not None and chosen is None:
        chosen = format_of_path(Path(path))
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


# Pictures as PNG and PDF, drawn by matplotlib with its own fonts.

_POINTS = 0.75  # a pixel of CSS, in points
_LARGEST = 30_000  # pixels that a side of a PNG can have
# Letters of the fonts that come with matplotlib are wider than those the layout reckons with.
_SANS, _MONO = 0.86, 0.98


def rasterize(canvas: Canvas, form: Literal["png", "pdf"], scale: float = 2.0) -> bytes:
    """Return a picture as PNG or PDF."""
    use = f"a picture as {form.upper()}, not as SVG, HTML or DOT,"
    required("matplotlib", use, error=InputError)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure

    scale = min(scale, _LARGEST / max(canvas.width, canvas.height, 1.0))
    figure = Figure(figsize=(canvas.width / 96, canvas.height / 96), dpi=96 * scale)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, canvas.width)
    axes.set_ylim(canvas.height, 0)
    axes.axis("off")
    for order, mark in enumerate(_flat_marks(canvas.marks)):
        _draw(axes, mark, order)
    written = io.BytesIO()
    with warnings.catch_warnings():
        # Letters that its fonts lack are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        if form == "png":
            FigureCanvasAgg(figure).print_png(written, metadata={"Software": None})
        else:
            # Without the time of writing, the same picture gives the same bytes.
            facts = {"Title": canvas.title} | dict.fromkeys(("CreationDate", "Producer", "Creator"))
            FigureCanvasPdf(figure).print_pdf(written, metadata=facts)
    return written.getvalue()


def _flat_marks(marks: Any) -> list[Mark]:
    found: list[Mark] = []
    for mark in marks:
        found += _flat_marks(mark.marks) if isinstance(mark, Marks) else [mark]
    return found


def _draw(axes: Any, mark: Mark, order: int) -> None:
    if isinstance(mark, Caption):
        axes.text(
            mark.x,
            mark.y,
            mark.text,
            parse_math=False,  # a dollar sign would begin a formula
            fontsize=mark.size * _POINTS * (_MONO if mark.mono else _SANS),
            color=mark.fill,
            family="DejaVu Sans Mono" if mark.mono else "DejaVu Sans",
            weight="bold" if mark.bold else "normal",
            ha="center" if mark.centred else "left",
            va="baseline",
            zorder=order,
        )
        return
    if isinstance(mark, Marks):
        return
    from matplotlib.patches import PathPatch

    dash = () if isinstance(mark, Polygon) else mark.dash
    style: Any = (0, tuple(part * _POINTS / mark.thick / 0.75 for part in dash)) if dash else "-"
    axes.add_patch(
        PathPatch(
            _matplotlib_path(mark),
            facecolor="none" if isinstance(mark, Stroke) else mark.fill,
            edgecolor=mark.stroke,
            linewidth=mark.thick * _POINTS if mark.stroke != "none" else 0,
            linestyle=style,
            zorder=order,
            capstyle="butt",
            joinstyle="round",
        )
    )


def _matplotlib_path(mark: Rectangle | Polygon | Stroke) -> Any:
    from matplotlib.path import Path

    if isinstance(mark, Stroke):
        points: list[tuple[float, float]] = [mark.points[0]]
        codes = [Path.MOVETO]
        for start, corner, stop in round_corners(mark.points, mark.radius):
            points += [start, corner, stop]
            codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
        return Path([*points, mark.points[-1]], [*codes, Path.LINETO])
    if isinstance(mark, Polygon):
        return Path([*mark.points, mark.points[0]], closed=True)
    x, y, right, low = mark.x, mark.y, mark.x + mark.width, mark.y + mark.height
    if not mark.radius:
        return Path([(x, y), (right, y), (right, low), (x, low), (x, y)], closed=True)
    middle = x + mark.width / 2
    ring = [(middle, y), (right, y), (right, low), (x, low), (x, y), (middle, y)]
    points, codes = [ring[0]], [Path.MOVETO]
    for start, corner, stop in round_corners(ring, mark.radius):
        points += [start, corner, stop]
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3]
    return Path([*points, ring[0]], [*codes, Path.CLOSEPOLY])
