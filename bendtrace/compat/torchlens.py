"""TorchLens: the functions of its first releases, and of the README of its second version.

Layers have TorchLens's labels: calls in a row of one function in one module are passes of a layer,
and an insertion changes the value of its node.

Layers are selected by `func`, `in_module`, `module`, `label`, `contains`, `regex` and `where`, with
`&`, `|` and `~`. `when` says where one of the helpers `zero_ablate`, `mean_ablate`, `scale`,
`clamp`, `noise`, `steer`, `project_onto`, `project_off` and `replace_with` changes values. `save`
and `load` store logs, and `options` has `CaptureOptions`. `debug` diagnoses logs: `find_nan`,
`bisect_nan`, `lineage`, `compare`, `dead_neurons`, `hot_path` and `gradient_flow_audit`;
`debug.infer_input_shape` finds an input that a model takes.

>>> import torch, bendtrace as bt
>>> tl = bt.compat.torchlens
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
>>> log = tl.trace(model, torch.ones(1, 2), save=tl.func("relu") | tl.label("linear_1"))
>>> isinstance(log, tl.ModelHistory), log.saved_ops.labels()
(True, ['linear_1_1', 'relu_1_2', 'output_1_3'])
>>> halved = tl.when(tl.func("relu"), tl.scale(0.5))
>>> changed = tl.trace(model, torch.ones(1, 2), intervene=halved)
>>> torch.equal(changed["relu_1"].out, log["relu_1"].out / 2)
True
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import sys
import types
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from bendtrace._trace import ModelHistory, named, positional, run_logged
from bendtrace._trace import load as load_log
from bendtrace.compat import _torchlens_logs
from bendtrace.compat._torchlens_logs import Accessor, Log, Op, TraceLog, with_names
from bendtrace.debug.calls import Call, own_copy
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import InputError
from bendtrace.log.capture import SaveOptions
from bendtrace.log.entries import OPERATORS, LayerEntry, layer_type_of, torchlens_name
from bendtrace.log.path_views import Candidate, NodePath
from bendtrace.module import BendedModule
from bendtrace.show.picture import Picture

__all__ = [
    "Accessor", "Bundle", "CaptureOptions", "ModelHistory", "Op", "Trace", "bundle", "clamp",
    "contains", "debug", "extract", "func", "get_model_metadata", "in_module", "label", "load",
    "log_forward_pass", "mean_ablate", "module", "noise", "options", "pluck", "project_off",
    "project_onto", "regex", "replace_with", "save", "scale", "show_model_graph", "steer",
    "trace", "validate", "validate_forward_pass", "validate_saved_activations", "when", "where",
    "zero_ablate",
]  # fmt: skip
__dir__ = __all__.copy

Trace: TypeAlias = TraceLog
Inputs: TypeAlias = Mapping[str, Any] | None


# Selectors of layers, and helpers that change values.

Helper = Callable[[Tensor], Tensor]
Result = TypeVar("Result")
Given = ParamSpec("Given")


class Listed(Generic[Given, Result]):
    """A small function that the docstring of `bendtrace.compat.torchlens` lists with others."""

    def __init__(self, function: Callable[Given, Result], doc: str = "") -> None:
        self._function = function
        functools.update_wrapper(self, function)
        self.__doc__ = doc or self.__doc__

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Selector:
    """Selects layers of a log; selectors are combined with `&`, `|` and `~`.

    Attributes:
        text: how it is written.
        selects: whether it selects an entry.
        node: whether it selects a node of a run that has not ended; None if only a log tells.
    """

    text: str
    selects: Callable[[Any], bool]
    node: Callable[[Candidate], bool] | None = None

    def __call__(self, entry: LayerEntry) -> bool:
        return self.selects(entry)

    def __and__(self, other: Selector) -> Selector:
        return self._with(other, "&", lambda one, two: lambda it: one(it) and two(it))

    def __or__(self, other: Selector) -> Selector:
        return self._with(other, "|", lambda one, two: lambda it: one(it) or two(it))

    def __invert__(self) -> Selector:
        return Selector(f"~{self.text}", lambda entry: not self(entry))

    def _with(self, other: Selector, sign: str, join: Callable[..., Any]) -> Selector:
        one, two = self.node, other.node
        node = None if one is None or two is None else join(one, two)
        return Selector(f"({self} {sign} {other})", join(self.selects, other.selects), node)

    def __str__(self) -> str:
        return self.text


@Listed
def func(name: str) -> Selector:
    """Select the results of a function."""
    if not isinstance(name, str):
        raise TypeError(f"func() takes a string function name, not {name!r}")
    word = "".join(char for char in name.lower() if char.isalnum())

    def is_of(node: Candidate) -> bool:
        return node.function is not None and torchlens_name(layer_type_of(node.function)) == word

    return Selector(
        f"func({name!r})",
        lambda entry: entry.layer_type == word,
        None if word in OPERATORS else is_of,  # the expression tells operators from functions
    )


@Listed
def in_module(address: str) -> Selector:
    """Select the values computed in a module, also in modules inside of it."""

    def is_inside(path: str) -> bool:
        return path == address or path.startswith(f"{address}.")

    return Selector(
        f"in_module({address!r})",
        lambda entry: entry.kind == "op" and is_inside(entry.module),
        lambda node: node.function is not None and is_inside(node.scope_path),
    )


def _selecting(name: str, selects: Callable[[Any, Any], bool], doc: str) -> Listed[Any, Selector]:
    return Listed(lambda what: Selector(f"{name}({what!r})", lambda one: selects(one, what)), doc)


module = _selecting(
    "module",
    lambda entry, name: any(name in (one, one.rpartition(":")[0]) for one in entry.output_of),
    "Select the outputs of a module, `features.3`, or of one of its calls, `features.3:1`.",
)
label = _selecting(
    "label",
    lambda entry, name: name in (
        entry.label, entry.name, entry.short_name, f"{entry.name}:{entry.pass_number}",
        f"{entry.short_name}:{entry.pass_number}",
    ),
    "Select a layer by its label: `relu_1_2`, `relu_1`, `relu_1:2`.",
)  # fmt: skip
contains = _selecting(
    "contains", lambda entry, text: text in entry.label, "Select by a text in the label."
)
regex = _selecting(
    "regex",
    lambda entry, pattern: re.search(pattern, entry.label) is not None,
    "Select by a regular expression that is found in the label.",
)
where = _selecting(
    "where",
    lambda entry, predicate: bool(predicate(entry)),
    "Select the layers for which a function of the entry is true.",
)


class Change(NamedTuple):
    """A helper, and the layers whose values it replaces.

    Attributes:
        where: selects the layers.
        what: a function of the value.
    """

    where: Any
    what: Callable[..., Any]


when = Listed(Change, "Return a change for `trace(intervene=...)`: where, and by which helper.")
zero_ablate = Listed(lambda: torch.zeros_like, "Replace a value by zeros.")
replace_with = Listed(lambda value: lambda _: value, "Replace a value by another one.")
scale = Listed(lambda factor: lambda value: value * factor, "Multiply a value.")
clamp = Listed(lambda *, min=None, max=None: lambda v: v.clamp(min, max), "Limit a value.")


@Listed
def mean_ablate(source: Any = None) -> Helper:
    """Fill a value with its mean, or with the mean of another tensor."""

    def filled(value: Tensor) -> Tensor:
        mean = (value if source is None else getattr(source, "out", source)).mean()
        return torch.zeros_like(value) + mean.to(value.dtype)

    return filled


@Listed
def noise(std: float, *, seed: int | None = None) -> Helper:
    """Add Gaussian noise to a value; with a seed, the same one, which draws nothing else."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def noisy(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return value + drawn.to(value.device) * std

    return noisy


@Listed
def steer(direction: Tensor, magnitude: float = 1.0, *, feature_axis: int | None = None) -> Helper:
    """Add a direction to a value; a vector lies along `feature_axis`."""
    return lambda value: value + _fit_direction(direction, value, feature_axis) * magnitude


@Listed
def project_onto(direction: Tensor, *, feature_axis: int | None = None) -> Helper:
    """Keep only the part of a value along a direction."""

    def projected(value: Tensor) -> Tensor:
        along = _fit_direction(direction, value, feature_axis)
        dims = tuple(range(value.dim())) if feature_axis is None else feature_axis
        share = (value * along).sum(dims, keepdim=True) / (along * along).sum(dims, keepdim=True)
        return along * share

    return projected


@Listed
def project_off(direction: Tensor, *, feature_axis: int | None = None) -> Helper:
    """Remove the part of a value along a direction."""
    onto = project_onto(direction, feature_axis=feature_axis)
    return lambda value: value - onto(value)


def _fit_direction(direction: Tensor, value: Tensor, axis: int | None) -> Tensor:
    direction = direction.to(value.device, value.dtype)
    if axis is not None and direction.dim() == 1 and value.dim() > 1:
        shape = [1] * value.dim()
        shape[axis] = len(direction)
        return direction.view(shape)
    if axis is None and direction.dim() != value.dim():
        raise InputError(
            f"a direction of shape {tuple(direction.shape)} needs feature_axis= to be used on a "
            f"value of shape {tuple(value.shape)}"
        )
    return direction


# Logs


def log_forward_pass(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Inputs = None,
    layers_to_save: Any = "all",
    **options: Any,
) -> Log:
    """Run a model and log everything that it computes.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        layers_to_save: "all", "none", or names of layers or modules, positions, or parts of names,
            which select every layer and module that contains them.
        **options: `output_device`, `detach_saved_tensors` and `random_seed`, as for `trace`;
            `mark_input_output_distances`, `save_function_args` and `save_gradients`, which are
            `mark_layer_depths`, `save_arg_values` and `save_grads` there. `activation_postfunc` is
            a function of each saved value, whose result is kept instead. `vis_opt` "rolled" (the
            passes of a layer in one) or "unrolled" draws the run, with `vis_nesting_depth` nested
            modules, to the file `vis_outpath` with the ending `vis_fileformat`, and in a window or
            the notebook unless `vis_save_only`. `vis_buffer_layers` and `vis_direction` have no
            effect; `keep_unsaved_layers=False` and the `vis_..._overrides` are refused.

    Returns:
        The log.

    Raises:
        InputError: an option is invalid; nothing was run.
        LayerKeyError: a requested name does not exist. The run has taken place by then.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = tl.log_forward_pass(model, torch.ones(4, 2), layers_to_save=["relu"])
        >>> [entry.layer_label for entry in history if entry.has_saved_activations]
        ['relu_1_2', 'output_1_3']
    """
    vis = _VIS | {name: options.pop(name) for name in _VIS if name in options}
    if not options.pop("keep_unsaved_layers", True) or any(vis[name] for name in _OVERRIDES):
        raise InputError(
            "keep_unsaved_layers=False and the overrides of Graphviz's attributes are not supported"
        )
    if vis["vis_opt"] not in ("none", "rolled", "unrolled"):
        raise InputError(
            f"vis_opt has to be 'none', 'rolled' or 'unrolled', not {vis['vis_opt']!r}"
        )
    change = options.pop("activation_postfunc", None)
    given = {_FIRST_RELEASES.get(name, name): value for name, value in options.items()}
    log = trace(model, input_args, input_kwargs, layers_to_save, **given)
    for entry in cast("list[Any]", log.entries):
        entry._is_old = True
        if change is not None and entry.kind != "state" and isinstance(entry.saved, Tensor):
            entry.saved = change(entry.saved)
    if vis["vis_opt"] != "none":
        depth = vis["vis_nesting_depth"] if vis["vis_nesting_depth"] < 1000 else None
        path = f"{os.fspath(vis['vis_outpath'])}.{vis['vis_fileformat']}"
        log.picture = log.draw(path, rolled=vis["vis_opt"] == "rolled", depth=depth)
        if not vis["vis_save_only"]:
            _show_picture(log.picture, path)
    return log


_FIRST_RELEASES = {
    "mark_input_output_distances": "mark_layer_depths", "save_function_args": "save_arg_values",
    "save_gradients": "save_grads",
}  # fmt: skip
_KINDS = ("graph", "node", "nested_node", "edge", "gradient_edge", "module")
_OVERRIDES = [f"vis_{kind}_overrides" for kind in _KINDS]
_VIS: dict[str, Any] = dict.fromkeys(_OVERRIDES) | {
    "vis_opt": "none", "vis_nesting_depth": 1000, "vis_outpath": "modelgraph",
    "vis_save_only": False, "vis_fileformat": "pdf", "vis_buffer_layers": False,
    "vis_direction": "bottomup",
}  # fmt: skip


def _show_picture(picture: Picture, path: str) -> None:
    """Show a picture in the notebook, or in a window if there is a screen."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        sys.modules["IPython"].display.display(picture)
    elif sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(Path(path).absolute().as_uri())


class CaptureOptions(dict[str, Any]):
    """Options of `trace` in one object.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> more = tl.CaptureOptions(save_grads=True)
        >>> log = tl.trace(torch.nn.Linear(2, 3), torch.ones(1, 2), capture=more)
        >>> log.log_backward(log["output_1"].out.sum())["linear_1"].grad
        tensor([[1., 1., 1.]])
    """


options = types.SimpleNamespace(CaptureOptions=CaptureOptions)
debug = types.SimpleNamespace(
    find_nan=lambda model, *inputs, **options: trace(model, *inputs, **options).find_nan(),
    bisect_nan=_torchlens_logs.find_nan, lineage=_torchlens_logs.lineage,
    compare=_torchlens_logs.compare, dead_neurons=_torchlens_logs.dead_neurons,
    hot_path=_torchlens_logs.hot_path, gradient_flow_audit=_torchlens_logs.gradient_flow_audit,
    infer_input_shape=_torchlens_logs.infer_input_shape,
    InferInputShapeResult=_torchlens_logs.InferInputShapeResult,
)  # fmt: skip


def trace(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Inputs = None,
    layers_to_save: Any = "all",
    *,
    save: Any = None,
    halt: Any = None,
    intervene: Any = None,
    hooks: Mapping[Any, Callable[..., Any]] | None = None,
    capture: Mapping[str, Any] | None = None,
    save_grads: Any = False,
    activation_transform: Callable[[Tensor], Any] | None = None,
    mark_layer_depths: bool = False,
    save_arg_values: bool = False,
    detach_saved_tensors: bool = False,
    output_device: torch.device | str = "same",
    random_seed: int | None = None,
    intervention_ready: bool = False,
    name: str = "",
) -> Log:
    """Run a model and log everything that it computes, as TorchLens 2 does.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        layers_to_save: as for `log_forward_pass`. Outputs are always saved.
        save: a selector, such as `func("relu")`, in place of `layers_to_save`.
        halt: a selector or name of the layer after which the run ends.
        intervene: what `when` returns, or a list of it.
        hooks: helpers by selector, which is the same.
        capture: more options.
        save_grads: whether to keep gradients in the backward pass; also a selector.
        activation_transform: a function of a saved output, for `entry.transformed_out`. It is
            called when that is read.
        mark_layer_depths: whether to count how far each layer is from inputs and outputs, for
            `entry.min_distance_from_input` and the like.
        save_arg_values: whether entries have `creation_args` and `creation_kwargs`.
        detach_saved_tensors: whether saved values leave the autograd graph.
        output_device: the device to keep activations on; "same" leaves them where they are.
        random_seed: see `log_forward_pass`.
        intervention_ready: no effect: every log can be forked.
        name: no effect.

    Returns:
        The log.

    Raises:
        InputError: an option is invalid; nothing was run.
        LayerKeyError: a requested name does not exist. The run has taken place by then.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))
        >>> log.layer_labels
        ['input_1', 'relu_1_1', 'output_1']
        >>> log.fork().do("relu_1", bt.compat.torchlens.scale(3)).layer_list[-1].out
        tensor([3., 3.])
    """
    others = ("model", "input_args", "capture", "intervention_ready", "name")
    given = {name: value for name, value in locals().items() if name not in (*others, "others")}
    if capture:
        return trace(model, input_args, **(given | dict(capture)))
    args, kwargs = positional(model, input_args), named(input_kwargs)
    wanted = layers_to_save if save is None else save
    if isinstance(wanted, str):
        wanted = wanted.lower() if wanted.lower() in ("all", "none") else [wanted]
    saves_none = wanted in (None, "none", [])
    settings = SaveOptions(
        "none" if saves_none else "all", bool(save_grads) and not saves_none, halt,
        None if output_device == "same" else output_device, None,
        not detach_saved_tensors and not torch.is_inference_mode_enabled(), None, True,
    )  # fmt: skip
    changes = [intervene] if isinstance(intervene, Change) else list(intervene or ())
    changes += (hooks or {}).items()
    subject = _model_with(model, args, kwargs, changes, random_seed) if changes else model
    run = run_logged(subject, args, kwargs, settings, random_seed)
    log = with_names(run, activation_transform, mark_layer_depths, save_arg_values)
    if not saves_none and wanted != "all":
        _keep(log, wanted, save_grads)
    elif save_grads not in (True, False, None, "all"):
        _keep(log, lambda entry: True, save_grads)
    log._call = trace, model, input_args, given
    return log


def _keep(log: Any, wanted: Any, gradients: Any) -> None:
    """Keep only the values of a finished run that are selected, and its outputs."""

    def keys_of(entries: list[Any]) -> set[Any]:
        sources = (log._lookup.all(one.parents) if one.index is None else [one] for one in entries)
        keys = ((one.index, one.element) for several in sources for one in several)
        return {log._log.changed.get(key, key) for key in keys}

    outputs = [entry for entry in log.layer_list if entry.kind == "output"]
    kept, capture = keys_of([*log.selected(wanted), *outputs]), log._capture
    for entry in log.entries:
        key = entry.index, entry.element
        if entry.kind != "output" and log._log.changed.get(key, key) not in kept:
            entry.saved = None
    capture.saved = {key: value for key, value in capture.saved.items() if key in kept}
    if capture.gradients is not None:
        chosen = wanted if gradients in (True, "all") else gradients
        capture.gradients.wanted = keys_of(log.selected(chosen))


def _model_with(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changes: list[Any], seed: int | None
) -> BendedModule:
    """Return a model in which changes are inserted; labels are those of a run without them."""
    bended, clean = BendedModule(model), None
    for place, what in changes:
        helper = what
        if "hook" in getattr(getattr(what, "__code__", None), "co_varnames", ()):
            helper = functools.partial(_with_hook, what)
        if isinstance(place, Selector) and place.node is not None:
            bended.interject(place.node, helper)
            continue
        if clean is None:
            with PreservedState(model):
                call = own_copy(Call(args, kwargs))
                settings = SaveOptions("none", torchlens=True)
                clean = with_names(run_logged(model, call.args, dict(call.kwargs), settings, seed))
        for path, chosen in _by_path(clean.selected(place)).items():
            every = _by_path(clean.layer_list)[path]
            passes = None if len(chosen) == len(every) else [every.index(one) for one in chosen]
            bended.interject(NodePath(path), helper, passes=passes)
    return bended


def _with_hook(what: Callable[..., Any], value: Any) -> Any:
    return what(value, hook=None)


def _by_path(entries: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for entry in entries:
        if entry.kind == "op":
            found.setdefault(entry.node_path, []).append(entry)
    return found


def show_model_graph(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Inputs = None,
    vis_opt: Literal["rolled", "unrolled"] = "unrolled",
    *,
    vis_outpath: str | os.PathLike[str] = "modelgraph",
    vis_save_only: bool = False,
    vis_fileformat: str = "pdf",
    random_seed: int | None = None,
    vis_mode: Literal["rolled", "unrolled"] | None = None,
    vis_call_depth: int | None = None,
    vis_buffers: Any = None,
    recurrence_detection: bool = True,
) -> Picture:
    """Run a model once and draw the run, without keeping activations.

    Args:
        model: what to run. It is not changed.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.
        vis_opt: whether the passes of a layer are merged ("rolled") or separate ("unrolled").
        vis_outpath: the file to draw to; `vis_fileformat` is appended, unless it ends with it.
        vis_save_only: whether only to write the file.
        vis_fileformat: see `log_forward_pass`.
        random_seed: seed of the run; see `log_forward_pass`.
        vis_mode: the name of `vis_opt` in TorchLens 2.
        vis_call_depth: how many nested modules to open; None for all.
        vis_buffers: no effect: pictures have no nodes for buffers.
        recurrence_detection: no effect.

    Returns:
        The picture, which notebooks show.

    Raises:
        InputError: an option is invalid; nothing was run.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     picture = tl.show_model_graph(
        ...         torch.nn.ReLU(), torch.ones(2), vis_outpath=f"{folder}/run", vis_save_only=True
        ...     )
        >>> picture.svg.startswith("<svg")
        True
    """
    mode, name = (vis_opt, "vis_opt") if vis_mode is None else (vis_mode, "vis_mode")
    if mode not in ("rolled", "unrolled"):
        raise InputError(f"{name} has to be 'rolled' or 'unrolled', not {mode!r}")
    path = os.fspath(vis_outpath)
    log = log_forward_pass(
        model, input_args, input_kwargs, "none", vis_opt=mode, vis_save_only=vis_save_only,
        vis_outpath=path.removesuffix(f".{vis_fileformat}"), vis_fileformat=vis_fileformat,
        vis_nesting_depth=1000 if vis_call_depth is None else vis_call_depth,
        random_seed=random_seed,
    )  # fmt: skip
    assert log.picture is not None
    return log.picture


def get_model_metadata(
    model: Callable[..., Any], input_args: Any, input_kwargs: Inputs = None
) -> Log:
    """Run a model and log it without keeping activations.

    Args:
        model: what to run.
        input_args: its positional argument, or a list or tuple of them.
        input_kwargs: its keyword arguments.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.get_model_metadata(torch.nn.ReLU(), torch.ones(2))
        >>> log.num_tensors
        3
    """
    return trace(model, input_args, input_kwargs, "none")


def validate_forward_pass(
    model: Callable[..., Any],
    input_args: Any,
    input_kwargs: Inputs = None,
    random_seed: int | None = None,
    verbose: bool = False,
    validate_metadata: bool = True,
    scope: Literal["forward"] = "forward",
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
        scope: has to be "forward".

    Returns:
        Whether all results are the same bits.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchlens.validate_forward_pass(torch.nn.Linear(2, 3), torch.ones(4, 2))
        True
    """
    log = trace(model, input_args, input_kwargs, detach_saved_tensors=True, random_seed=random_seed)
    return log.validate_saved_activations()


validate = validate_saved_activations = validate_forward_pass


def pluck(model: Callable[..., Any], x: Any, layer: str) -> Tensor:
    """Return the output of one layer.

    Args:
        model: what to run.
        x: its positional argument, or a list or tuple of them.
        layer: a key that selects one layer.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchlens.pluck(torch.nn.ReLU(), torch.ones(2), "relu_1_1")
        tensor([1., 1.])
    """
    return extract(model, x, [layer]).popitem()[1]


def extract(
    model: Callable[..., Any], x: Any, layers: Mapping[str, str] | Sequence[str]
) -> dict[str, Tensor]:
    """Return the outputs of several layers, by their keys or the names that a mapping gives them.

    Args:
        model: what to run.
        x: its positional argument, or a list or tuple of them.
        layers: keys, each of one layer; or keys by name.

    Raises:
        InputError: a key selects several layers.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.compat.torchlens.extract(torch.nn.ReLU(), torch.ones(1), {"act": "relu"})
        {'act': tensor([1.])}
    """
    named = layers if isinstance(layers, Mapping) else {one: one for one in layers}
    log, found = trace(model, x, layers_to_save=list(named.values())), {}
    for name, key in named.items():
        entries = log.selected(key)
        if len(entries) != 1:
            several = ", ".join(entry.label for entry in entries)
            raise InputError(f"{key!r} selects several layers: {several}")
        found[name] = entries[0].out
    return found


@Listed
def save(log: ModelHistory, path: str | os.PathLike[str]) -> None:
    """Write a log to a directory."""
    log.save(path)


@Listed
def load(path: str | os.PathLike[str]) -> Log:
    """Read a log that `save` has written."""
    return with_names(load_log(path))


class Bundle:
    """Several logs, to compare the values of a layer in them.

    Args:
        members: the logs, by name.
        baseline: the name of the one that the others are compared with.

    Attributes:
        members: the logs by name.
        baseline_name: the name of the baseline; the first log by default.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> clean = tl.trace(torch.nn.ReLU(), torch.ones(2))
        >>> changed = clean.fork().do("relu_1", tl.zero_ablate())
        >>> tl.bundle({"clean": clean, "changed": changed}).compare_at("relu_1")
        tensor([[0., 1.],
                [1., 0.]])
    """

    def __init__(self, members: Mapping[str, Log], baseline: str | None = None) -> None:
        self.members: dict[str, Log] = dict(members)
        self.baseline_name: str = next(iter(self.members)) if baseline is None else baseline
        if self.baseline_name not in self.members:
            raise InputError(f"{baseline!r} is not one of {', '.join(self.members)}")

    def __getitem__(self, name: str) -> Log:
        return self.members[name]

    @property
    def names(self) -> list[str]:
        """The names of the logs."""
        return list(self.members)

    def add(self, logs: Log | Sequence[Log], names: str | Sequence[str]) -> Bundle:
        """Add one log or several."""
        several = [(logs, names)] if isinstance(logs, Log) else zip(logs, names, strict=True)
        for log, name in several:
            if name in self.members:
                raise InputError(f"there is a log {name!r} already")
            self.members[str(name)] = log
        return self

    def remove(self, logs: Log | str | Sequence[Log | str]) -> Log | list[Log]:
        """Remove one log or several, also by name, and return them."""
        given = list(logs) if isinstance(logs, (list, tuple)) else [logs]
        named = {k: log for k, log in self.members.items() if any(one in (k, log) for one in given)}
        if self.baseline_name in named or len(named) < len(given):
            raise InputError(f"logs other than {self.baseline_name!r} are removed, not {logs!r}")
        self.members = {k: log for k, log in self.members.items() if k not in named}
        removed = list(named.values())
        return removed if isinstance(logs, (list, tuple)) else removed[0]

    def apply(self, function: Callable[[Log], Any]) -> dict[str, Any]:
        """Call a function with each log."""
        return {name: function(log) for name, log in self.members.items()}

    def compare_at(self, where: Any) -> Tensor:
        """Return the cosine distances of the values of one layer in each two logs."""
        values = []
        for name, log in self.members.items():
            (found,) = log.selected(where)
            if found.out is None:
                raise InputError(f"{name!r} has not saved {found.label}")
            values.append(found.out.detach())
        return torch.stack(
            [torch.stack([_relative_distance(a, b) for b in values]) for a in values]
        )

    def most_changed(self, baseline: str | None = None, top_k: int = 10) -> list[tuple[str, float]]:
        """Return the layers that differ most from those of one log, and how much on average."""
        first = self.members[baseline or self.baseline_name]
        others = [log.saved_ops for log in self.members.values() if log is not first]
        found = [
            (
                one.label,
                statistics.fmean(_relative_distance(one.out, ops[one.label].out) for ops in others),
            )
            for one in first.saved_ops
            if all(one.label in ops for ops in others)
        ]
        return sorted(found, key=lambda row: -row[1])[:top_k]


bundle = Bundle


def _relative_distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine distance of two values; of numbers, the relative difference."""
    one, other = one.detach().flatten().float(), other.detach().flatten().float()
    if one.numel() == 1:
        return torch.div((one - other).abs(), one.abs().clamp(min=1e-12))[0]
    norm = one.norm() * other.norm()
    if norm < 1e-12:
        return torch.tensor(0.0 if torch.equal(one, other) else 1.0)
    return torch.sub(1, torch.dot(one, other) / norm).clamp(min=0)
