"""TorchLens: `log_forward_pass` and `show_model_graph`, and some names of its second version.

>>> import torch, bendtrace as bt
>>> tl = bt.compat.torchlens
>>> history = tl.log_forward_pass(torch.nn.ReLU(), torch.ones(2))
>>> isinstance(history, tl.ModelHistory), history["relu_1"].tensor_contents
(True, tensor([1., 1.]))
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bendtrace._history import ModelHistory
from bendtrace._trace import Trace, run_trace
from bendtrace.errors import InputError
from bendtrace.history.capture import SaveOptions
from bendtrace.history.depths import depths
from bendtrace.history.entries import LayerEntry

if TYPE_CHECKING:
    from bendtrace.backward import BackwardNode, BackwardPass
    from bendtrace.view.drawing.picture import Picture

__all__ = [
    "ModelHistory",
    "Op",
    "get_model_metadata",
    "log_forward_pass",
    "show_model_graph",
    "trace",
    "validate_forward_pass",
]
__dir__ = __all__.copy


class Op(LayerEntry):
    """An entry of the log that can also be read with some names of TorchLens 2.

    Example:
        >>> import torch, bendtrace as bt
        >>> entry = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))["relu_1"]
        >>> entry.layer_label, entry.func_name, entry.out
        ('relu_1_1', 'relu', tensor([1., 1.]))

    Attributes:
        min_distance_from_input: the length of the shortest way from an input to it. This, and
            the three that follow, is None unless the log was made with `mark_layer_depths=True`,
            and where there is no such way. Numbers that Python computes count as layers.
        max_distance_from_input: that of the longest way.
        min_distance_to_output: the length of the shortest way from it to an output.
        max_distance_to_output: that of the longest way.
    """

    _transform: Callable[[Tensor], Any] | None = None
    min_distance_from_input: int | None = None
    max_distance_from_input: int | None = None
    min_distance_to_output: int | None = None
    max_distance_to_output: int | None = None

    @property
    def layer_label(self) -> str:
        """The name of the layer."""
        return self.label

    @property
    def out(self) -> Any:
        """The output; None if it was not saved."""
        return self.tensor_contents if self.has_contents else None

    @property
    def transformed_out(self) -> Any:
        """What `activation_transform` makes of the output; None without it."""
        out = self.out
        is_there = self._transform is not None and isinstance(out, Tensor)
        return self._transform(out) if is_there else None  # type: ignore[misc]

    @property
    def has_input_ancestor(self) -> bool:
        """Whether a way from an input leads to it; False unless layer depths were marked."""
        return self.min_distance_from_input is not None

    @property
    def has_output_descendant(self) -> bool:
        """Whether a way leads from it to an output; False unless layer depths were marked."""
        return self.min_distance_to_output is not None

    @property
    def grad(self) -> Any:
        """The gradient of the output; None if it was not saved."""
        return self.grad_contents

    @property
    def func_name(self) -> str:
        """The name of the function."""
        return self.layer_type

    @property
    def num_passes(self) -> int:
        """How often the layer was run."""
        return self.passes

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model."""
        return self.kind == "input"

    @property
    def is_output(self) -> bool:
        """Whether it is an output of the model."""
        return self.kind == "output"


class _Log(Trace):
    """A trace that can also be read with some names of TorchLens 2."""

    @property
    def layer_list(self) -> list[Any]:
        """The layers in order."""
        return list(self.layers)

    @property
    def layer_labels(self) -> list[str]:
        """The names of the layers in order."""
        return [entry.label for entry in self.layers]

    @property
    def op_labels(self) -> list[str]:
        """The names of all passes of layers, in order."""
        return [f"{entry.label}:{entry.pass_number}" for entry in self.layers]

    @property
    def input_layers(self) -> list[str]:
        """The names of the inputs."""
        return [entry.label for entry in self.layers if entry.kind == "input"]

    @property
    def output_layers(self) -> list[str]:
        """The names of the outputs."""
        return [entry.label for entry in self.layers if entry.kind == "output"]

    @property
    def saved_ops(self) -> dict[str, Any]:
        """The layers whose outputs were saved, by name."""
        return {entry.label: entry for entry in self.layers if entry.has_contents}

    @property
    def num_tensors(self) -> int:
        """How many tensors the run computed."""
        return len(self.layers)

    @property
    def backward_passes(self) -> list[BackwardPass]:
        """The records of the backward passes that `log_backward` has run."""
        passes: list[BackwardPass] = self.__dict__.setdefault("_passes", [])
        return passes

    @property
    def grad_fns(self) -> list[BackwardNode]:
        """The nodes that ran in the latest of these."""
        return self.backward_passes[-1].nodes if self.backward_passes else []

    def log_backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> Trace:
        """Run and record a backward pass, and return the log."""
        self.backward_passes.append(self.backward(loss, gradient, save="all", **options))
        return self


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
    args = _arguments(model, input_args)
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
    _with_names(trace)
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
    vis_mode: Literal["rolled", "unrolled"] | None = None,
    vis_call_depth: int | None = None,
    vis_save_only: bool = True,
    vis_buffers: Any = None,
    recurrence_detection: bool = True,
) -> Picture:
    """Run a model once and draw the run, without keeping activations.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        vis_opt: whether the passes of a layer are merged ("rolled") or separate ("unrolled").
        vis_outpath: a file to draw into (.svg, .png, .pdf, .html, .dot); None for no file. A name
            without an ending gets ".pdf", as in TorchLens.
        random_seed: seed of the run; see `log_forward_pass`.
        vis_mode: the name of `vis_opt` in TorchLens 2.
        vis_call_depth: how many nested modules to open; None for all.
        vis_save_only: no effect: a picture is shown where it is displayed, never by this function.
        vis_buffers: no effect: pictures have no nodes for buffers.
        recurrence_detection: no effect: passes of a layer are identified by the place in the
            source.

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
    mode, name = (vis_opt, "vis_opt") if vis_mode is None else (vis_mode, "vis_mode")
    if mode not in ("rolled", "unrolled"):
        raise InputError(f"{name} has to be 'rolled' or 'unrolled', not {mode!r}")
    if vis_outpath is not None and not os.path.splitext(vis_outpath)[1]:
        vis_outpath = f"{os.fspath(vis_outpath)}.pdf"
    trace = log_forward_pass(model, input_args, input_kwargs, "none", random_seed=random_seed)
    return trace.draw(vis_outpath, rolled=mode == "rolled", depth=vis_call_depth)


def trace(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    *,
    activation_transform: Callable[[Tensor], Any] | None = None,
    mark_layer_depths: bool = False,
    save_arg_values: bool = False,
    **options: Any,
) -> Trace:
    """Run a model and log everything that it computes: `log_forward_pass`, as TorchLens 2 names it.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        activation_transform: a function of a saved output, for `entry.transformed_out`. It is
            called when that is read.
        mark_layer_depths: whether to count how far each layer is from inputs and outputs, for
            `entry.min_distance_from_input` and the like.
        save_arg_values: no effect: `entry.arguments` is how a function was called, and
            `entry.parents` name the values.
        **options: those of `log_forward_pass`. In `layers_to_save`, a word without a number selects
            every layer and module whose name contains it: `"relu"`. Outputs are always saved.

    Returns:
        The log, which can be read with some names of TorchLens 2 as well.

    Raises:
        InputError: an option is invalid; nothing was run.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))
        >>> log.layer_labels
        ['input_1_0', 'relu_1_1', 'output_1_2']
    """
    options["layers_to_save"] = _selected(options.get("layers_to_save", "all"))
    log = log_forward_pass(model, input_args, input_kwargs, **options)
    if mark_layer_depths:
        entries = [each for each in log._entries_without_state() if isinstance(each, Op)]
        for each, (above, below) in zip(entries, depths(entries), strict=True):
            each.min_distance_from_input, each.max_distance_from_input = above
            each.min_distance_to_output, each.max_distance_to_output = below
    for entry in log.entries:
        if isinstance(entry, Op):
            entry._transform = activation_transform
    return log


def get_model_metadata(
    model: Callable[..., Any], input_args: Any, input_kwargs: Mapping[str, Any] | None = None
) -> Trace:
    """Run a model and log it without keeping activations.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.

    Returns:
        The log.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.get_model_metadata(torch.nn.ReLU(), torch.ones(2))
        >>> log.num_tensors
        3
    """
    return log_forward_pass(model, input_args, input_kwargs, "none")


def validate_forward_pass(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
    random_seed: int | None = None,
    verbose: bool = False,
    validate_metadata: bool = True,
) -> bool:
    """Run a model, compute each op again from the saved values, and compare the results.

    `bendtrace.Trace.validate` does the same for a log, and says what differs.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        random_seed: seed of the run; see `log_forward_pass`.
        verbose: no effect: `print(log.validate())` says what was checked.
        validate_metadata: no effect.

    Returns:
        Whether all results are the same bits.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchlens.validate_forward_pass(torch.nn.Linear(2, 3), torch.ones(4, 2))
        True
    """
    log = log_forward_pass(model, input_args, input_kwargs, random_seed=random_seed)
    return bool(log.validate())


def _arguments(model: Callable[..., Any], given: Any) -> tuple[Any, ...]:
    """Return the positional arguments; a tuple is one argument for a model that takes just one."""
    if isinstance(given, tuple) and len(given) > 1:
        function = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            return (given,)
        except ValueError:  # functions of C without a signature
            pass
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _selected(wanted: Any) -> Any:
    """Return names of layers, with words as patterns, and the outputs."""
    if not isinstance(wanted, (list, tuple)):
        return wanted
    selected = [
        re.compile(f".*{one}.*") if isinstance(one, str) and one.isalpha() else one
        for one in wanted
    ]
    return [*selected, re.compile(r"output_\d+.*")]


def _with_names(trace: Trace) -> None:
    """Let a trace and its entries be read with some names of TorchLens 2."""
    trace.__class__ = _Log
    for entry in trace.entries:
        entry.__class__ = Op
