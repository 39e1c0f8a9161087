"""ModelHistory: the log of a run, and the operations on it."""

from __future__ import annotations

import os
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from bendtrace._lazy import LazyMethod, LazyModule
from bendtrace.history.run_log import RunLog

if TYPE_CHECKING:
    from bendtrace import storage
    from bendtrace.storage import save
    from bendtrace.view.drawing.picture import Picture, draw
    from bendtrace.view.folded import log as folded
    from bendtrace.view.viewer import viewer_html
else:
    storage = LazyModule("bendtrace.storage")
    draw = LazyMethod("bendtrace.view.drawing.picture", "draw")
    folded = LazyMethod("bendtrace.view.folded", "log")
    save = LazyMethod("bendtrace.storage", "save")
    viewer_html = LazyMethod("bendtrace.view.viewer", "viewer_html")


class ModelHistory(RunLog):
    """The log of one run: print, look up, draw, view, compare and save it.

    A `Trace` is a log that still has its run; `bendtrace.load` reads a log without the model.

    Attributes:
        picture: the picture that `log_forward_pass(vis_opt=...)` drew.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2))
        >>> history.draw().svg[:4]
        '<svg'
    """

    picture: Picture | None = None

    draw = draw
    save = save
    to_html = viewer_html
    __treescope_repr__ = folded

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        parts = [f"<pre>{escape(str(self))}</pre>"]
        if self.layers:
            parts.append(self.draw().svg if self.picture is None else self.picture.svg)
        return {"text/plain": str(self), "text/html": "\n".join(parts)}


class LoadedHistory(ModelHistory):
    """A log that was read from a file, which says so where someone asks for the run."""

    # Not in `ModelHistory`: IPython completes nothing of an object that may compute its attributes.
    if not TYPE_CHECKING:  # a checker would accept any name

        def __getattr__(self, name: str) -> Any:
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_TRACES:
                said += ": a loaded log has no model to run. Trace the model again"
            raise AttributeError(said, name=name, obj=self)


_OF_TRACES = frozenset(
    {"function", "graph", "guards", "output", "replay", "to_fx", "to_json", "validate", "why_live"}
)


def load(
    directory: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> ModelHistory:
    """Read what `ModelHistory.save` wrote, without the model and without running any of its code.

    Activations and gradients stay on disk: each access to `entry.tensor_contents` reads the value
    anew. It is None for values that could not be stored, and `entry.unsaved` says why.

    Args:
        directory: the directory that was saved to.
        device: the device to read tensors to; None for the CPU, wherever they were.

    Returns:
        The log, a `ModelHistory`.

    Raises:
        LoadError: there is no save, or it is damaged, unfinished, from another program, or in a
            newer version of the format. A damaged activation is noticed only when it is read.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> history = bt.trace(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]), save="all")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.save(directory)
        ...     loaded = bt.load(directory)
        >>> str(loaded) == str(history)
        True
    """
    log = storage.load(directory, device=device)
    return LoadedHistory(*log._parts())
