"""ModelHistory: the log of a run with all that can be done with it."""

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
    from bendtrace.view.viewer import viewer_html
else:
    storage = LazyModule("bendtrace.storage")
    draw = LazyMethod("bendtrace.view.drawing.picture", "draw")
    save = LazyMethod("bendtrace.storage", "save")
    viewer_html = LazyMethod("bendtrace.view.viewer", "viewer_html")

__all__ = ["ModelHistory", "load"]


class ModelHistory(RunLog):
    """The log of one run: to print, look up, draw, view, compare and save.

    A `Trace` is one with the run still at hand; `bendtrace.load` reads one without its model.

    Attributes:
        picture: the picture that `log_forward_pass(vis_opt=...)` was asked for.

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

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        parts = [f"<pre>{escape(str(self))}</pre>"]
        if self.layers:
            parts.append(self.draw().svg if self.picture is None else self.picture.svg)
        return {"text/plain": str(self), "text/html": "\n".join(parts)}


def load(
    directory: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> ModelHistory:
    """Read what `ModelHistory.save` wrote. The model is not needed, and no code of its is run.

    Activations and gradients stay on disk: each `entry.tensor_contents` reads one anew. What could
    not be stored is None, and `entry.unsaved` says why.

    Args:
        directory: where it was saved to.
        device: where tensors are read to; None for the CPU, wherever they were.

    Returns:
        The log, a `ModelHistory`.

    Raises:
        LoadError: there is no save, or it is damaged, unfinished, of another program, or of a
            newer version of the format. A damaged activation is noticed when it is read.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> history = bt.log_forward_pass(torch.nn.ReLU(), torch.tensor([-1.0, 1.0]))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history.save(directory)
        ...     loaded = bt.load(directory)
        >>> str(loaded) == str(history)
        True
    """
    log = storage.load(directory, device=device)
    return ModelHistory(*log.parts())
