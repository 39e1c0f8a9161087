"""TorchLens: `log_forward_pass` and `show_model_graph`.

>>> import torch, bendtrace as bt
>>> tl = bt.compat.torchlens
>>> history = tl.log_forward_pass(torch.nn.ReLU(), torch.ones(2))
>>> isinstance(history, tl.ModelHistory), history["relu_1"].tensor_contents
(True, tensor([1., 1.]))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from bendtrace._history import ModelHistory
from bendtrace._trace import Trace, run_trace
from bendtrace.errors import InputError
from bendtrace.history.capture import SaveOptions

if TYPE_CHECKING:
    from bendtrace.view.drawing.picture import Picture

__all__ = ["ModelHistory", "log_forward_pass", "show_model_graph"]


def log_forward_pass(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    layers_to_save: Any = "all",
    vis_opt: Literal["none", "rolled", "unrolled"] = "none",
    *,
    vis_outpath: str | os.PathLike[str] | None = None,
    save_gradients: bool = False,
    save_device: torch.device | str | None = None,
    save_dtype: torch.dtype | None = None,
    save_to: str | os.PathLike[str] | None = None,
    keep_graph: bool = False,
    stop_after: Any = None,
    random_seed: int | None = None,
) -> Trace:
    """Run a model and log everything that it computes.

    The same as `bendtrace.trace(model, *input_args, save=..., **input_kwargs)` with the names of
    TorchLens, whose options cannot be confused with arguments of the model.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        layers_to_save: "all", "none", or names of layers or modules, positions, modules or
            functions; see `bendtrace.trace`.
        vis_opt: whether to draw the run, with the passes of a layer merged ("rolled") or separate
            ("unrolled"). The picture is `ModelHistory.picture`, which notebooks show.
        vis_outpath: a file to draw into (.svg, .png, .pdf, .html, .dot); None for no file.
        save_gradients: whether to keep gradients in the backward pass, too.
        save_device: device to keep activations on; None leaves them where they are.
        save_dtype: floating point dtype to keep them in; None for their own.
        save_to: a directory to stream them to; None to keep them in memory.
        keep_graph: whether they stay part of the autograd graph.
        stop_after: a layer, module or position after which the run ends.
        random_seed: seed of the run; torch's generators are restored afterwards. None runs like an
            untraced call.

    Returns:
        The log, a `ModelHistory`.

    Raises:
        InputError: an option is invalid; nothing was run.
        LayerKeyError: a requested name does not exist. The run has taken place by then.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2), layers_to_save=["relu_1"])
        >>> [entry.label for entry in history if entry.has_contents]
        ['relu_1_2', 'output_1_3']
    """
    if vis_opt not in ("none", "rolled", "unrolled"):
        raise InputError(f"vis_opt has to be 'none', 'rolled' or 'unrolled', not {vis_opt!r}")
    if vis_outpath is not None and vis_opt == "none":
        raise InputError("vis_outpath needs vis_opt='rolled' or 'unrolled'")
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise InputError(
            "input_kwargs has to be a dict of the model's keyword arguments, not a "
            f"{type(input_kwargs).__name__}: layers_to_save comes after it"
        )
    args = tuple(input_args) if isinstance(input_args, (list, tuple)) else (input_args,)
    options = SaveOptions(
        layers_to_save, save_gradients, stop_after, save_device, save_dtype, keep_graph, save_to
    )
    kwargs = dict(input_kwargs or {})
    if random_seed is None:
        trace = run_trace(model, args, kwargs, options)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(random_seed)
            trace = run_trace(model, args, kwargs, options)
    if vis_opt != "none":
        trace.picture = trace.draw(vis_outpath, rolled=vis_opt == "rolled")
    return trace


def show_model_graph(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    vis_opt: Literal["rolled", "unrolled"] = "unrolled",
    *,
    vis_outpath: str | os.PathLike[str] | None = None,
    random_seed: int | None = None,
) -> Picture:
    """Run a model once and draw the run, without keeping activations.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        vis_opt: whether the passes of a layer are merged ("rolled") or separate ("unrolled").
        vis_outpath: a file to draw into (.svg, .png, .pdf, .html, .dot); None for no file.
        random_seed: seed of the run; see `log_forward_pass`.

    Returns:
        The picture, which notebooks show.

    Raises:
        InputError: an option is invalid; nothing was run.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> picture = bt.show_model_graph(torch.nn.Linear(2, 3), torch.ones(4, 2))
        >>> picture.svg.startswith("<svg")
        True
    """
    if vis_opt not in ("rolled", "unrolled"):
        raise InputError(f"vis_opt has to be 'rolled' or 'unrolled', not {vis_opt!r}")
    trace = log_forward_pass(
        model, input_args, input_kwargs, "none", vis_opt,
        vis_outpath=vis_outpath, random_seed=random_seed,
    )  # fmt: skip
    assert trace.picture is not None
    return trace.picture
