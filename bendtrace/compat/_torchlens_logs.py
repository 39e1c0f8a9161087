"""Logs and entries with the fields of TorchLens."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bendtrace._trace import LoadedHistory, ModelHistory, Trace
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.errors import InputError, LayerKeyError
from bendtrace.log.capture import tensors_in
from bendtrace.log.entries import LayerEntry, ModuleEntry, depths, size_text
from bendtrace.log.run_log import Entries
from bendtrace.python.compare import same_bits
from bendtrace.python.lazy import required, required_pandas
from bendtrace.tape.tape import OpKind, map_refs

if TYPE_CHECKING:
    from bendtrace.debug.backward import BackwardPass
    from bendtrace.show.picture import Picture

# TorchLens's `debug`: non-finite values, dependencies, costs and the shapes of inputs.


class FindNanResult(NamedTuple):
    """The first value of a log that is not finite.

    Attributes:
        found: whether there is one.
        op: its entry.
        label: the label of the entry.
        func_name: its function.
        kind: "nan", "inf", "nan+inf", or "none".
        source_line: the file and the line of the call.
        module_address: the module that it is in.
        scope: which values were looked at.
        uncertainty_zone: the labels of what it was computed from and was not saved.
        message: all of that in words.
    """

    found: bool
    op: Any = None
    label: str | None = None
    func_name: str | None = None
    kind: str = "none"
    source_line: str | None = None
    module_address: str | None = None
    scope: str = "saved activations"
    uncertainty_zone: tuple[str, ...] = ()
    message: str = "No NaN/Inf found in saved activations."


class Lineage(NamedTuple):
    """The entries that an entry was computed from, or that were computed from it.

    Attributes:
        start_label: the label of the entry; None if there is none.
        direction: "ancestors", "descendants" or "both".
        nodes: label, distance, source, shape and dtype of each.
        message: how many there are, or why there are none.
    """

    start_label: str | None
    direction: str
    nodes: list[tuple[str, int, str | None, tuple[int, ...] | None, Any]]
    message: str


def find_nan(log: Any) -> FindNanResult:
    """Return the first saved value that holds a NaN or an infinity."""
    unsaved = [entry for entry in log.layer_list if entry.kind == "op" and not entry.has_contents]
    for entry in log.layer_list:
        value = entry.out
        if not isinstance(value, Tensor) or bool(value.isfinite().all()):
            continue
        nan, infinite = bool(value.isnan().any()), bool(value.isinf().any())
        kind = "nan" * nan + "+" * (nan and infinite) + "inf" * infinite
        zone = tuple(
            one.label for one in _entries_near(log, entry, "parents") if not one.has_contents
        )
        scope = "first among saved tensors" if unsaved else "all tensors"
        message = f"{scope.capitalize()} is {kind} at {entry.label}."
        if zone:
            message += f" Unsaved upstream uncertainty zone: {', '.join(zone)}."
        return FindNanResult(
            True, entry, entry.layer_label, entry.func_name, kind, _file_and_line(entry),
            entry.module, scope, zone, message,
        )  # fmt: skip
    if not unsaved:
        return FindNanResult(False)
    text = (
        "No NaN/Inf found in saved activations; no saved activation for the suspect region may be "
        "available. Re-trace with save=tl.func(...) for the suspect op, or without save."
    )
    return FindNanResult(False, message=text)


def lineage(
    log: Any,
    op_or_label: Any,
    *,
    direction: Literal["ancestors", "descendants", "both"] = "ancestors",
    max_depth: int | None = None,
) -> Lineage:
    """Return the entries that an entry was computed from, or that were computed from it."""
    sides = {"ancestors": ["parents"], "descendants": ["children"]}
    ways = sides.get(direction, ["parents", "children"])
    try:
        (start,) = [op_or_label] if hasattr(op_or_label, "parents") else log.selected(op_or_label)
    except (LayerKeyError, ValueError) as error:
        return Lineage(None, direction, [], f"lineage is unavailable: {error}")
    nodes = [
        (op_label(one), depth, _file_and_line(one), one.shape, one.dtype)
        for one, depth in {
            k: v for way in ways for k, v in _entries_near(log, start, way).items()
        }.items()
        if max_depth is None or depth <= max_depth
    ]
    return Lineage(op_label(start), direction, nodes, f"{len(nodes)} node(s)")


def compare(a: Any, b: Any, *, rtol: float = 1e-5, atol: float = 1e-8) -> Any:
    """Return a data frame of how far the saved values of two logs differ, by label."""
    ours, theirs = ({op_label(entry): entry for entry in log.layer_list} for log in (a, b))
    rows, counts = [], dict.fromkeys(_COUNTS, 0)
    for label in dict.fromkeys([*ours, *theirs]):
        row: dict[str, Any] = {"op": label, **dict.fromkeys(_COMPARED), "reason": ""}
        rows.append(row)
        if label not in ours or label not in theirs:
            row["status"] = "only-a" if label in ours else "only-b"
            counts[row["status"].replace("-", "_")] += 1
            continue
        one, other = ours[label], theirs[label]
        row["status"] = "present-in-both"
        row["shape_match"], row["dtype_match"] = one.shape == other.shape, one.dtype == other.dtype
        missing = [name for name, entry in (("a", one), ("b", other)) if not _is_strided(entry.out)]
        if missing:
            row["reason"] = f"unsaved or no dense floats: {', '.join(missing)}"
            counts["activation_unavailable"] += 1
        elif not row["shape_match"] or not row["dtype_match"]:
            row["reason"] = "shape-or-dtype-mismatch"
            counts["shape_mismatch"] += 1
        else:
            off = (one.out.detach() - other.out.detach().to(one.out.device)).abs().double()
            near = torch.allclose(one.out, other.out, rtol=rtol, atol=atol, equal_nan=True)
            sizes = (float(off.max()), float(off.mean())) if off.numel() else (0.0, 0.0)
            row["max_abs"], row["mean_abs"], row["allclose"] = (*sizes, near)
            counts["matched" if near else "value_diverged"] += 1
    return _frame(rows, ["op", *_COMPARED, "reason"], counts | {"rtol": rtol, "atol": atol})


_COUNTS = ("matched", "shape_mismatch", "only_a", "only_b", "value_diverged",
           "activation_unavailable")  # fmt: skip
_COMPARED = ("status", "shape_match", "dtype_match", "max_abs", "mean_abs", "allclose")


def dead_neurons(log: Any, *, dim: int = 1, threshold: float = 0.0) -> Any:
    """Return a data frame of the units of each saved value that are never above a threshold."""
    columns = ["op", "total_units", "dead_count", "dead_frac", "sample_dead_idx", "reason"]
    rows: list[list[Any]] = []
    for entry in log.layer_list:
        value = entry.out
        reason = "" if _is_strided(value) else "unsaved or no dense floats"
        if not reason and not -value.dim() <= dim < value.dim():
            reason = "invalid-dim"
        if reason:
            rows.append([op_label(entry), None, None, None, [], reason])
            continue
        units = value.detach().movedim(dim, 0).flatten(1)
        is_dead = (units.amax(1) <= threshold) | (units.var(1, unbiased=False) == 0)
        dead = is_dead.nonzero().flatten().tolist()
        share = len(dead) / len(units) if len(units) else 0.0
        rows.append([op_label(entry), len(units), len(dead), share, dead[:10], ""])
    note = "zero variance in a single trace is an insufficient sample"
    skipped = sum(bool(row[-1]) for row in rows)
    about = {"skipped": skipped, "threshold": threshold, "dim": dim, "note": note}
    return _frame(rows, columns, about)


def hot_path(log: Any, by: Literal["flops", "memory", "duration"] = "flops") -> Any:
    """Return a data frame of the costs of source lines, the costliest first."""
    if by not in _COSTS:
        raise InputError(f"by= has to be one of {', '.join(_COSTS)}, not {by!r}")
    sums: dict[str, list[float]] = {}
    missing = 0
    for entry in log.layer_list:
        cost = _COSTS[by](entry)
        if cost is None or entry.kind != "op":
            missing += 1
            continue
        row = sums.setdefault(_file_and_line(entry) or "unknown", [0, 0.0])
        row[0] += 1
        row[1] += cost
    whole = sum(cost for _, cost in sums.values()) or 1
    costs = sorted(sums.items(), key=lambda row: -row[1][1])
    rows = [[place, count, cost, 100 * cost / whole] for place, (count, cost) in costs]
    columns = ["source_file:line", "op_count", "total_cost", "pct_total"]
    return _frame(rows, columns, {"metric": by, "excluded_missing_metric_count": missing})


_COSTS: dict[str, Callable[[Any], float | None]] = {
    "flops": lambda entry: entry.flops, "memory": lambda entry: entry.nbytes,
    "duration": lambda entry: entry.time,
}  # fmt: skip


def gradient_flow_audit(
    log: Any,
    *,
    bwd: int | None = None,
    vanishing_threshold: float = 1e-7,
    exploding_threshold: float = 1e4,
) -> Any:
    """Return a data frame of how large the gradients of the values are, the worst first."""
    columns = ["op", "grad_norm", "vanishing", "exploding", "dead", "severity", "reason"]
    passes = len(log.backward_passes)
    if not passes or not log.saved_grad_ops or (passes > 1 and bwd is None):
        text = "no saved gradients; re-trace backward_ready=True + trace.log_backward(loss)"
        text = "bwd is required for several backward passes" if passes > 1 else text
        return _frame([], columns, {"message": text, "vanishing": 0, "exploding": 0, "dead": 0})
    rows: list[dict[str, Any]] = []
    for entry in log.saved_grad_ops:
        kept = [one.grad for one in entry.grads if one.backward_pass_index == (bwd or 1)]
        row: dict[str, Any] = dict.fromkeys(columns[:6], False) | {
            "op": op_label(entry),
            "reason": "",
        }
        if not kept or kept[0] is None:
            rows.append(row | {"grad_norm": None, "severity": 0, "reason": "no gradient"})
            continue
        norm = float(torch.linalg.vector_norm(kept[0].detach()))
        row |= {"grad_norm": norm, "vanishing": 0 < norm < vanishing_threshold, "dead": norm == 0}
        row["exploding"] = not norm <= exploding_threshold
        rows.append(row | {"severity": 3 * row["exploding"] + 2 * row["dead"] + row["vanishing"]})
    rows.sort(key=lambda row: -row["severity"])
    about = {name: sum(row[name] for row in rows) for name in ("vanishing", "exploding", "dead")}
    about["unavailable"] = sum(row["grad_norm"] is None for row in rows)
    thresholds = {"vanishing_threshold": vanishing_threshold}
    thresholds["exploding_threshold"] = exploding_threshold
    return _frame(rows, columns, {**about, "bwd": bwd or 1, **thresholds})


def show(value: Any, title: str, method: str) -> Any:
    """Draw a tensor with matplotlib, and return the figure."""
    if not isinstance(value, Tensor):
        raise InputError(f"{title} was not saved as a tensor")
    if method not in ("auto", "heatmap", "channels", "rgb", "hist"):
        raise InputError(f"method= is auto, heatmap, channels, rgb or hist, not {method!r}")
    values = value.detach().cpu().double()
    sides = values.shape[-2:]
    if method == "auto":
        method = "hist" if values.dim() < 2 else "heatmap"
    if method != "hist" and (values.dim() < 2 or (method == "rgb" and values.shape[-3:-2] != (3,))):
        raise InputError(f"{title} of shape {tuple(values.shape)} cannot be drawn as {method}")
    planes = values.reshape(-1, *sides) if values.dim() > 1 else values
    figure = required("matplotlib.figure", "a picture of a value").Figure()
    if method == "hist":
        figure.subplots().hist(values.flatten().numpy(), bins=50)
    elif method == "rgb":
        low, high = planes[:3].min(), planes[:3].max()
        shown = (planes[:3] - low) / (high - low).clamp(min=1e-12)
        figure.subplots().imshow(shown.permute(1, 2, 0).numpy())
    else:
        pictures = planes if method == "channels" else planes.mean(0, keepdim=True)
        axes = figure.subplots(1, len(pictures), squeeze=False)[0]
        for axis, plane in zip(axes, pictures, strict=True):
            axis.imshow(plane.numpy())
    figure.suptitle(title)
    return figure


def op_label(entry: Any) -> str:
    """Return the label of an entry with its pass, as TorchLens 2 writes it."""
    name = entry.name if entry.kind == "op" else entry.short_name
    return f"{name}:{entry.pass_number}"


def _entries_near(log: Any, start: Any, way: str) -> dict[Any, int]:
    """Return the entries on one side of an entry with their distances, itself first."""
    found, waiting = {start: 0}, [start]
    for entry in waiting:
        for label in getattr(entry, way):
            if (other := log[label]) not in found:
                found[other] = found[entry] + 1
                waiting.append(other)
    return found


def _file_and_line(entry: Any) -> str | None:
    return None if entry.source is None else f"{entry.source.file}:{entry.source.line}"


def _is_strided(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return is_plain and value.is_floating_point()


def _frame(rows: Iterable[Any], columns: list[str], about: dict[str, Any]) -> Any:
    made = required_pandas().DataFrame(list(rows), columns=columns)
    made.attrs.update(about)
    return made


# TorchLens's `debug.infer_input_shape`: inputs that a model takes, found by running it.

Shape: TypeAlias = tuple[int | None, ...]  # None for sizes that have to be found

# The sizes to try in turn, by how many have to be found: all of them are the same.
_SIZES = {0: (1,), 1: (16, 128, 1024, 8192), 2: (32, 224, 1024), 3: (16, 64, 128)}
# The words of torch's errors that ask for a dtype, in torch 2.13.
_WORDS = {torch.bool: r"bool(ean)? (mask|tensor)", torch.long: r"\bLong|as indices|index tensor"}


class InferInputShapeResult(NamedTuple):
    """An input that a model takes.

    Attributes:
        found: whether the model ran with one.
        shape: its shape.
        dtype: its dtype.
        example_input: the input itself.
        flexible_dims: the dimensions that the model takes in twice the size, too.
        strategy: "static" if the first layer has all sizes, "adaptive_default" if they are usual
            sizes and others work as well, and "exact" if they are not known to.
        value_range: how its values were drawn: ("randn", mean, standard deviation), or
            ("randint", smallest, largest + 1).
        reason: "non_shape_blocker" if the model cannot run with one tensor,
            "exact_size_unreachable" if a size is too small and the next one too large,
            "no_size_found" for other models that did not run, and "" otherwise.
        message: the result in words.
        attempts: the shapes that were tried, each with "ok" or the error of the model.
    """

    found: bool
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    example_input: Tensor | None = None
    flexible_dims: tuple[int, ...] = ()
    strategy: str = ""
    value_range: tuple[str, float, float] | None = None
    reason: str = ""
    message: str = ""
    attempts: tuple[tuple[tuple[int, ...], str], ...] = ()


def infer_input_shape(
    model: nn.Module, *, channels: int | None = None, input_dtype: torch.dtype | None = None
) -> InferInputShapeResult:
    """Find an input that a model takes, by running it in evaluation mode.

    The first layer that the input reaches tells its rank, channels and dtype. Other sizes are
    searched for: an operation that fails tells whether they are too large. The model and the
    random generators are left as they were.

    Args:
        model: the model, of one tensor.
        channels: the channels to try if no layer tells them; 3 by default.
        input_dtype: the dtype to try first.

    Raises:
        InputError: the model is not a module, or its state cannot be restored.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 75 * 75, 2)
        ... )
        >>> tl.debug.infer_input_shape(model).shape
        (1, 3, 77, 77)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model has to be a torch.nn.Module, not {type(model).__name__}")
    try:
        inspect.signature(model.forward).bind(torch.empty(0))
    except TypeError as error:
        text = f"The model takes more than one tensor, or other arguments: {error}"
        return InferInputShapeResult(False, reason="non_shape_blocker", message=text)
    with PreservedState(model) as state, torch.no_grad():
        return _Search(model, state, input_dtype or torch.float32).result(channels or 3)


class _Search:
    """Runs a model with inputs of several shapes."""

    def __init__(self, model: nn.Module, state: PreservedState, dtype: torch.dtype) -> None:
        self.model, self.state, self.dtype, self.limit = model, state, dtype, 2
        self.attempts: list[tuple[tuple[int, ...], str]] = []
        self.device = next((one.device for one in model.parameters()), torch.device("cpu"))

    def result(self, channels: int) -> InferInputShapeResult:
        """Find the shapes that the first layer allows, then the sizes that it leaves open."""
        is_between, shapes, errors = False, self.first_shapes(channels), []
        for shape in shapes:
            size, is_excluded = self.size(shape)
            errors.append(self.attempts[-1][1])
            is_between |= is_excluded
            if size is not None:
                return self.describe_input(shape, size)
        reason = "exact_size_unreachable" if is_between else "no_size_found"
        text = "One size is too small and the next too large: the aspect ratio may not be square."
        error = f"The model ran with no input: {(errors or [self.attempts[-1][1]])[0]}"
        return InferInputShapeResult(
            False, reason=reason if shapes else "non_shape_blocker",
            message=text if is_between else error, attempts=tuple(self.attempts),
        )  # fmt: skip

    def first_shapes(self, channels: int) -> list[Shape]:
        """Run the model with inputs of all ranks until a layer tells its shapes and dtype."""
        for shape in (*_with_sides(channels), (1, None), (1, None, None), (None,)):
            size = _SIZES[shape.count(None)][0]
            run = self.run(shape, size)
            for dtype, words in _WORDS.items():
                if dtype is not self.dtype and re.search(words, self.attempts[-1][1]):
                    self.dtype = dtype
                    run = self.run(shape, size)
            if run.shapes or run.is_done:
                self.dtype, self.limit = run.dtype, run.limit
                return run.shapes or [shape]
        return []

    def size(self, shape: Shape) -> tuple[int | None, bool]:
        """Return a size that works, or None, and whether each is too small or too large.

        A usual size comes first, then the largest of one open size, and the smallest of several.
        """
        usual = _SIZES[shape.count(None)]
        low, high, best, size = 0, math.inf, None, usual[0]
        while True:
            run = self.run(shape, size)
            if run.is_done and size in usual:
                return size, False
            best = size if run.is_done else best
            if shape.count(None) > 1 if run.is_done else run.is_large:
                high = size
            else:
                low = size
            larger = [one for one in usual if low < one < high]
            if high - low <= 1 or (high == math.inf and not larger):
                return best, best is None and high < math.inf
            size = larger[0] if larger else int(low + high) // 2

    def describe_input(self, shape: Shape, size: int) -> InferInputShapeResult:
        """Run the model with twice the size, and describe the input."""
        x, gaps = self.input(shape, size), tuple(i for i, one in enumerate(shape) if one is None)
        is_flexible = bool(gaps) and self.run(shape, 2 * size).is_done
        strategy = "adaptive_default" if is_flexible else "exact" if gaps else "static"
        is_real = x.is_floating_point() or x.is_complex()
        return InferInputShapeResult(
            True, tuple(x.shape), x.dtype, x, gaps if is_flexible else (), strategy,
            ("randn", 0.0, 1.0) if is_real else ("randint", 0.0, float(self.limit)),
            "", f"The model takes {tuple(x.shape)} of {x.dtype}.", tuple(self.attempts),
        )  # fmt: skip

    def input(self, shape: Shape, size: int) -> Tensor:
        sizes = [size if one is None else one for one in shape]
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(sizes, dtype=self.dtype, device=self.device)
        return torch.randint(self.limit, sizes, device=self.device).to(self.dtype)

    def run(self, shape: Shape, size: int) -> _Run:
        """Run the model once, and restore it."""
        x = self.input(shape, size)
        run, outcome = _Run(x), "ok"
        self.model.eval()
        try:
            with contextlib.ExitStack() as stack:
                for module in self.model.modules():
                    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                        handle = module.register_forward_pre_hook(run.before_rnn)
                        stack.callback(handle.remove)
                stack.enter_context(run)
                self.model(x)
            run.is_done = True
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        self.attempts.append((tuple(x.shape), outcome))
        self.state.rewind()
        return run


class _Run(TorchFunctionMode):
    """Follows an input to the first layer, and to the operation that fails."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.computed = {id(x): x}  # what is computed from the input; held, so that ids stay unique
        self.x, self.dtype, self.limit = x, x.dtype, 2
        self.shapes: list[Shape] = []  # that the first layer allows
        self.is_done = False
        self.is_large = False  # whether what failed was given too much

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        given = list(tensors_in((args, kwargs)))
        ours = [one for one in given if id(one) in self.computed]
        if ours and not self.shapes:
            weights = [one for one in given if id(one) not in self.computed]
            self.shapes = list(_shapes_for(name, args, kwargs, weights))
            if "embedding" in name and self.shapes:
                self.limit = len(weights[0])
                is_integer = self.x.dtype in (torch.int32, torch.int64)
                self.dtype = self.x.dtype if is_integer else torch.long
            elif self.shapes and weights and ours[0].dtype == self.x.dtype:
                self.dtype = weights[0].dtype
        try:
            made = function(*args, **kwargs)
        except Exception:
            if ours:
                self.is_large = _is_large(name, args, given, ours)
            raise
        if ours:
            self.computed |= {id(one): one for one in tensors_in(made)}
        return made

    def before_rnn(self, module: Any, args: tuple[Any, ...]) -> None:
        """Read the shape from a recurrent module, which checks it before it calls anything."""
        if not self.shapes and args and id(args[0]) in self.computed:
            n, self.dtype = module.input_size, next(module.parameters()).dtype
            is_first = getattr(module, "batch_first", None)
            self.shapes = [(1, None, n) if is_first else (None, 1, n)]
            if is_first is None:  # a cell
                self.shapes = [(1, n)]


def _shapes_for(name: str, args: Any, kwargs: Any, weights: list[Tensor]) -> Iterator[Shape]:
    """Yield the shapes of inputs of a layer, the likeliest first."""
    first = weights[0].shape if weights else ()
    if name.startswith("conv") and len(first) > 2:
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        channels = first[0] if "transpose" in name else first[1] * groups
        gaps = (None,) * (len(first) - 2)
        yield from ((1, channels, *gaps), (1, *gaps, channels))
    elif name in ("linear", "matmul") and first:
        n = first[-1 if name == "linear" else max(-2, -len(first))]
        yield from ((1, n), (1, None, n), (1, None, None, n))
    elif name in ("layer_norm", "rms_norm"):
        sizes = tuple(kwargs["normalized_shape"] if len(args) < 2 else args[1])
        yield from ((1, *sizes), (1, None, *sizes))
    elif name in ("batch_norm", "group_norm", "instance_norm") and first:
        yield from (*_with_sides(first[0]), (1, first[0]))
    elif name in ("embedding", "embedding_bag") and first:
        yield from ((1, None), (None,))
    elif name == "multi_head_attention_forward":
        n = kwargs.get("embed_dim_to_check", *args[3:4])
        yield from ((1, None, n), (None, 1, n))


def _with_sides(channels: int) -> list[Shape]:
    return [(1, channels, *[None] * count) for count in (2, 1, 3)]


def _is_large(name: str, args: Any, given: list[Tensor], ours: list[Tensor]) -> bool:
    """Say whether a call failed since its operand is too large, as far as its sizes tell."""
    pairs: list[tuple[int, int]] = []
    if name in ("view", "reshape"):
        sizes = args[1] if isinstance(args[-1], (tuple, list)) else args[1:]
        if sizes and all(isinstance(one, int) and one >= 0 for one in sizes):
            pairs = [(args[0].numel(), math.prod(sizes))]
    elif name in ("linear", "matmul") and len(given) > 1:
        rows = -1 if name == "linear" else max(-2, -given[1].dim())
        pairs = [(given[0].shape[-1], given[1].shape[rows])]
    elif len(given) == 2 and len(ours) == 1:
        have, need = ours[0].shape, given[given[0] is ours[0]].shape
        both = zip(reversed(have), reversed(need), strict=False)
        pairs = [(a, b) for a, b in both if 1 not in (a, b)]
    return next((a > b for a, b in pairs if a != b), False)


class Gradient(NamedTuple):
    """The gradient of a value in one backward pass.

    Attributes:
        ordinal: its number among the gradients of the value, counted from 1.
        backward_pass_index: the number of the backward pass, counted from 1.
        owner: the entry of the value.
        grad: the gradient; None if it was not kept.
    """

    ordinal: int
    backward_pass_index: int
    owner: Op
    grad: Tensor | None

    @property
    def memory(self) -> int:
        """Its size in bytes."""
        return 0 if self.grad is None else _nbytes(self.grad)


class Gradients(list[Gradient]):
    """The gradients of a value, in the order of the backward passes."""

    def for_pass(self, number: int) -> Gradient:
        """Return the gradient of one backward pass, counted from 1."""
        for one in self:
            if one.backward_pass_index == number:
                return one
        raise LayerKeyError(f"backward pass {number} has no gradient here", number)


class Op(LayerEntry):
    """An entry of a log that has the fields of TorchLens as well, of all its versions.

    Example:
        >>> import torch, bendtrace as bt
        >>> entry = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))["relu_1"]
        >>> entry.layer_label, entry.func_applied_name, entry.out, entry.tensor_fsize_nice
        ('relu_1_1', 'relu', tensor([1., 1.]), '8 B')

    Attributes:
        min_distance_from_input: the length of the shortest way from an input to it. This, and
            the others like it, is None unless the log was made with `mark_layer_depths=True`,
            and where there is no such way. Numbers that Python computes count as layers.
        max_distance_from_input: the length of the longest way.
        min_distance_to_output: the length of the shortest way from it to an output.
        max_distance_to_output: the length of the longest way.
    """

    _transform: Callable[[Tensor], Any] | None = None
    _saves_arguments = False
    _is_old = False  # whether labels are those of the first releases
    min_distance_from_input: int | None = None
    max_distance_from_input: int | None = None
    min_distance_to_output: int | None = None
    max_distance_to_output: int | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def transformed_out(self) -> Any:
        """The result of `activation_transform` for the output; None without it."""
        applies = self._transform is not None and isinstance(self.out, Tensor)
        return self._transform(self.out) if applies else None  # type: ignore[misc]

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """The function; None for inputs and outputs, and in logs that were loaded."""
        log = self._about()
        is_call = isinstance(log, Trace) and self.function and self.index is not None
        return cast("Trace", log).ops[self.index or 0].target if is_call else None

    @property
    def grads(self) -> Gradients:
        """The gradients of the passes that `log_backward` has run."""
        found, log = Gradients(), cast("Any", self._about())
        passes = () if log is None else log.backward_passes
        source = log[self.parents[0]] if passes and self.kind == "output" and self.parents else self
        for number, record in enumerate(passes, 1):
            at = record._graph.place(source)
            node = None if at is None else record.all_nodes[at[0]]
            if at is not None and node is not None and node.order is not None:
                kept = (node.gradients_in or {at[1]: None})[at[1]]
                found.append(Gradient(len(found) + 1, number, self, kept))
        return found

    def grad_for(self, bwd: int) -> Tensor | None:
        """Return the gradient of one backward pass, counted from 1."""
        return self.grads.for_pass(bwd).grad

    @property
    def grad(self) -> Tensor | None:
        """The gradient; None without one.

        Raises:
            InputError: several backward passes were logged.
        """
        if len(self.grads) > 1:
            raise InputError("there are several gradients: use op.grads[...] / op.grad_for(bwd=k)")
        return self.grad_contents

    def show(self, method: str = "auto") -> Any:
        """Draw the saved value: as "heatmap", by "channels", in colours ("rgb") or as "hist"."""
        return show(self.out, self.label, method)

    def _is_replaced(self) -> bool | None:
        log = self._about()
        if not isinstance(log, Trace):  # a file does not say
            return None
        return self.kind == "op" and (self.index, self.element) in log._log.changed

    def _arguments(self, part: int) -> Any:
        log = self._about()
        if not (self._saves_arguments and isinstance(log, Trace)) or self.index is None:
            return None
        op = log._recording.plain_ops[self.index]
        values = {each.index: each.tensor_contents for each in log.layers if not each.element}
        states = log._capture.states if log._capture is not None else {}

        def value_of(ref: Any) -> Any:
            if log.ops[ref.index].kind is OpKind.STATE and ref.index in states:
                return states[ref.index].read()
            return values.get(ref.index)

        return map_refs((op.args, op.kwargs), value_of)[part]

    def _labels_of(self, others: Iterable[str], near: Callable[[LayerEntry], list[str]]) -> Any:
        log = self._about()
        found = [
            label for one in others for entry in cast("Any", log)[one] for label in near(entry)
        ]
        return [label for label in dict.fromkeys(found) if label != self.label]


def _params(entry: Op) -> list[Any]:
    return [used for used in entry.state if used.is_parameter]


def _short_label(entry: Op) -> str:
    return entry.short_name if entry.passes == 1 else f"{entry.short_name}:{entry.pass_number}"


def _passes(entry: Op) -> list[str]:
    names = [f"{entry.name}:{n + 1}" for n in range(entry.passes)]
    return names if entry.passes > 1 else [entry.label]


def _of_gradient(read: Callable[[Tensor], Any]) -> Callable[[Op], Any]:
    return lambda entry: None if entry.grad_contents is None else read(entry.grad_contents)


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


_SAME = """
    layer_label_no_pass=name layer_label_no_pass_short=short_name pass_num=pass_number
    pass_index=pass_number layer_passes_total=passes num_passes=passes operation_num=ordinal
    has_saved_activations=has_contents has_saved_activation=has_contents out=tensor_contents
    tensor_shape=shape tensor_dtype=dtype tensor_fsize=nbytes
    func_name=layer_type func_time_elapsed=time function_is_inplace=inplace
    function_args_saved=_saves_arguments gradfunc=grad_fn parent_layers=parents
    child_layers=children min_distance_from_output=min_distance_to_output
    max_distance_from_output=max_distance_to_output saved_args=creation_args
    saved_kwargs=creation_kwargs
"""  # names of TorchLens, and what they are here
_FIELDS: dict[str, Callable[[Op], Any]] = {
    # names
    "layer_label": lambda entry: entry.label if entry._is_old else _new_name(entry),
    "layer_label_short": _short_label,
    "layer_label_w_pass": lambda entry: f"{entry.name}:{entry.pass_number}",
    "layer_label_w_pass_short": lambda entry: f"{entry.short_name}:{entry.pass_number}",
    "layer_type_num": lambda entry: int(entry.short_name.rpartition("_")[2]),
    "layer_total_num": lambda entry: int(entry.name.rpartition("_")[2]),
    "same_layer_operations": _passes,
    # values
    "tensor_fsize_nice": lambda entry: size_text(entry.nbytes),
    "has_saved_grad": lambda entry: entry.grad_contents is not None,
    "grad_shape": _of_gradient(lambda gradient: tuple(gradient.shape)),
    "grad_dtype": _of_gradient(lambda gradient: gradient.dtype),
    "grad_fsize": _of_gradient(_nbytes),
    "grad_fsize_nice": _of_gradient(lambda gradient: size_text(_nbytes(gradient))),
    # functions
    "creation_args": lambda entry: entry._arguments(0),  # None unless they were saved
    "creation_kwargs": lambda entry: entry._arguments(1),
    "func_applied_name": lambda entry: entry.function or "none",
    "has_out_variations": lambda entry: False,  # what is written later is a layer by itself
    "is_part_of_iterable_output": lambda entry: bool(entry.element),
    "iterable_output_index": lambda entry: entry.element[0] if entry.element else None,
    "code_context": lambda entry: [] if entry.source is None else [entry.source],
    # parameters
    "computed_with_params": lambda entry: bool(_params(entry)),
    "parent_params": _params,
    "parent_param_shapes": lambda entry: [used.shape for used in _params(entry)],
    "num_param_tensors": lambda entry: len(_params(entry)),
    "num_params_total": lambda entry: sum(used.numel for used in _params(entry)),
    "parent_params_fsize": lambda entry: sum(used.nbytes for used in _params(entry)),
    "parent_params_fsize_nice": lambda entry: size_text(sum(u.nbytes for u in _params(entry))),
    # the graph
    "has_parents": lambda entry: bool(entry.parents),
    "has_children": lambda entry: bool(entry.children),
    "sibling_layers": lambda entry: entry._labels_of(entry.parents, lambda one: one.children),
    "has_siblings": lambda entry: bool(entry.sibling_layers),
    "spouse_layers": lambda entry: entry._labels_of(entry.children, lambda one: one.parents),
    "has_spouses": lambda entry: bool(entry.spouse_layers),
    "is_input_layer": lambda entry: entry.kind == "input",
    "is_input": lambda entry: entry.kind == "input",
    "is_output_layer": lambda entry: entry.kind == "output",
    "is_output": lambda entry: entry.kind == "output",
    "is_output_parent": lambda entry: any(one.startswith("output_") for one in entry.children),
    "has_input_ancestor": lambda entry: entry.min_distance_from_input is not None,
    "has_output_descendant": lambda entry: entry.min_distance_to_output is not None,
    "is_output_ancestor": lambda entry: entry.min_distance_to_output is not None,
    "initialized_inside_model": lambda entry: entry.kind == "op" and not entry.parents,
    # modules
    "is_computed_inside_submodule": lambda entry: bool(entry.scopes),
    "containing_module_origin": lambda entry: entry.scopes[-1] if entry.scopes else None,
    "containing_modules_origin_nested": lambda entry: list(entry.scopes),
    "module_nesting_depth": lambda entry: len(entry.scopes),
    "modules_exited": lambda entry: [label.rpartition(":")[0] for label in entry.output_of],
    "module_passes_exited": lambda entry: list(entry.output_of),
    "is_submodule_output": lambda entry: bool(entry.output_of),
    "modules": lambda entry: list(entry.scopes),
    # changes
    "intervention_replaced": lambda entry: entry._is_replaced(),
}
_FIELDS |= {name: attrgetter(same) for name, same in (one.split("=") for one in _SAME.split())}
for _name, _read in _FIELDS.items():
    setattr(Op, _name, property(_read))


class Module(ModuleEntry):
    """One call of a module.

    Attributes:
        ops: the labels of the values computed in it.
    """

    ops: Sequence[str] = ()


class LoggedLayer(Entries):
    """All passes of a layer, with the fields that are the same in all of them."""

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS and self._items:
            first, *others = (getattr(entry, name) for entry in self)
            if all(same_bits(first, other) for other in others):
                return first
        return super().__getattr__(name)


class Accessor(list[Any]):
    """The layers or modules of a log in order, also found by name.

    Args:
        items: the items.
        find: finds an item by its name; None for a search among the items.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))
        >>> log.layers["relu_1"], log.layers.labels()
        (<op relu_1_1 (2,)>, ['input_1_0', 'relu_1_1', 'output_1_2'])
    """

    def __init__(self, items: Iterable[Any], find: Callable[[Any], Any] | None = None) -> None:
        super().__init__(items)
        self._find = find

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if self._find is not None:
            return self._find(key)
        found = [one for one in self if key in (one.name, getattr(one, "label", ""))]
        if not found:
            raise LayerKeyError(f"there is no {key!r} here", key)
        return found[0]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or any(
            key in (one.name, getattr(one, "label", "")) for one in self
        )

    def first(self) -> Any:
        """Return the first item."""
        return self[0]

    def labels(self) -> list[str]:
        """Return the labels of the items."""
        return [one.label for one in self]

    keys = labels

    def values(self) -> list[Any]:
        """Return the items."""
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        """Return the items with their labels."""
        return [(one.label, one) for one in self]

    def to_pandas(self) -> Any:
        """Return the public fields of the items as a `pandas.DataFrame`."""
        rows = [getattr(one, "_asdict", lambda one=one: vars(one))() for one in self]
        return required_pandas().DataFrame(
            [{k: v for k, v in row.items() if k[0] != "_"} for row in rows]
        )


class Log(ModelHistory):
    """A log that has the fields and methods of TorchLens as well, and prints as its logs do."""

    _call: Any = None
    _changes: tuple[Any, ...] = ()
    _has_details = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        if key == "self":
            return self.modules[key]
        found = super().__getitem__(key)
        if type(found) is Entries:
            found.__class__ = LoggedLayer
        return found

    @property
    def layers(self) -> Accessor:
        """The layers in order; also by name."""
        return Accessor(super().layers, self.__getitem__)

    @property
    def modules(self) -> Accessor:
        """The calls of modules in order; also by name, "self" for the call of the model."""
        made = [Module(**vars(call)) for call in super().modules]
        root = Module("self", 1, 1, self._log.name, "", 0, False)
        for call in (*made, root):
            call.ops = [
                op_label(entry) if call is not root else _new_name(entry)
                for entry in self.layer_list
                if call is root or call.label in entry.scopes
            ]
        return Accessor(made, lambda key: root if key == "self" else Accessor(made)[key])

    @property
    def params(self) -> Accessor:
        """The parameters that were used; also by name."""
        used = {one.name: one for entry in self.entries for one in entry.state if one.is_parameter}
        return Accessor(used.values())

    @property
    def layer_list(self) -> list[Any]:
        """The layers in order."""
        return list(super().layers)

    @property
    def backward_passes(self) -> list[BackwardPass]:
        """The records of the backward passes that `log_backward` has run."""
        passes: list[BackwardPass] = self.__dict__.setdefault("_passes", [])
        return passes

    def cleanup(self) -> None:
        """Drop all saved values."""
        for entry in self.entries:
            entry.saved = None
        self.__dict__.pop("_passes", None)

    def log_backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> Log:
        """Run and record a backward pass, and return the log."""
        run = cast("Trace", self)
        self.backward_passes.append(run.backward(loss, gradient, save="all", **options))
        return self

    def draw_backward(self, vis_outpath: Any = None, **_: Any) -> Picture:
        """Draw the latest backward pass."""
        return self.backward_passes[-1].draw(vis_outpath)

    def summary(self) -> str:
        """Return the log as text."""
        return self.to_text()

    def find_sites(self, where: Any) -> Accessor:
        """Return the layers that a selector or a key finds."""
        return Accessor(self.selected(where))

    def resolve_sites(self, where: Any, *, max_fanout: int = 8) -> Accessor:
        """Return the layers that a selector or a key finds, of which there are not too many."""
        found = self.find_sites(where)
        if len(found) > max_fanout:
            raise InputError(f"{len(found)} layers are selected, and max_fanout is {max_fanout}")
        return found

    def selected(self, where: Any) -> list[Any]:
        """Return the layers that a selector, a key, or a part of names finds."""
        if callable(where) and not isinstance(where, (type, torch.nn.Module)):
            return [entry for entry in super().layers if where(entry)]
        if isinstance(where, (list, tuple, set)):
            return list(dict.fromkeys(one for each in where for one in self.selected(each)))
        try:
            return list(self._lookup.all(where))
        except LayerKeyError:
            keys = (key for key in self._lookup.keys() if isinstance(where, str) and where in key)
            found = [entry for key in keys for entry in self._lookup.all(key) if entry.is_layer]
            if not found:
                raise
            return list(dict.fromkeys(found))

    def first_nonfinite(self) -> str:
        """Return in words which saved value is the first that is not finite."""
        found = self.find_nan()
        if not found.found:
            return found.message
        return (
            f"First non-finite value: {found.label} is {found.kind}, shape={found.op.shape} "
            f"dtype={found.op.dtype} parents={found.op.parents} source={found.source_line}"
        )

    find_nan = find_nan

    def render_graph(self, vis_opt: str = "unrolled", vis_outpath: Any = None) -> Picture:
        """Draw the run, as `draw` does."""
        return self.draw(vis_outpath, rolled=vis_opt == "rolled")

    def validate_saved_activations(self, *_: Any, **__: Any) -> bool:
        """Compute each op again from the saved values, and say whether all bits are the same."""
        return bool(cast("Trace", self).validate())

    # Changed runs

    def fork(self, name: str = "") -> Log:
        """Return a log of the same run, for changes; it is this one until it is run again."""
        if self._call is None:
            raise InputError("a log is forked only if it comes from trace(model, inputs)")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def attach_hooks(self, where: Any, *what: Any, **_: Any) -> Log:
        """Let the next run replace the selected values, by helpers or functions of the value."""
        self._changes = (*self._changes, *((where, each) for each in what))
        return self

    def set(self, where: Any, value: Any, **_: Any) -> Log:
        """Let the next run replace the selected values by another value."""
        return self.attach_hooks(where, lambda _: value)

    def do(self, where: Any, what: Any, **_: Any) -> Log:
        """Replace the selected values, and run the model again."""
        return self.attach_hooks(where, what).replay()

    def replay(self) -> Log:
        """Run the model again on the same inputs with the changes; this log is then of that run."""
        return self.rerun(*self._call[1:3])

    def rerun(self, model: Any, inputs: Any, **_: Any) -> Log:
        """Run a model with the changes; this log then describes the run."""
        again, _, _, options = self._call
        options = dict(options, intervene=[*(options.get("intervene") or ()), *self._changes])
        changes, made = self._changes, again(model, inputs, **options)
        self.__dict__.clear()
        self.__dict__.update(made.__dict__)
        self._claim(self._log)
        self._changes = changes
        self._call = (again, model, inputs, dict(self._call[3], intervene=None))
        return self

    run = rerun


_OF_LOGS: dict[str, Callable[[Any], Any]] = {
    "total_backward_memory": lambda log: log.total_gradient_memory,
    "save_arg_values": lambda log: any(entry._saves_arguments for entry in log.layer_list),
    "layer_labels": lambda log: list(dict.fromkeys(map(_new_name, log.layer_list))),
    "op_labels": lambda log: [op_label(entry) for entry in log.layer_list],
    "input_layers": lambda log: [entry.label for entry in log.layer_list if entry.kind == "input"],
    "output_layers": lambda log: [
        entry.label for entry in log.layer_list if entry.kind == "output"
    ],
    "saved_ops": lambda log: Accessor(one for one in log.layer_list if one.has_contents),
    "save_grads": lambda log: log._call[3]["save_grads"],
    "total_gradient_memory": lambda log: sum(
        one.memory for entry in log.layer_list for one in entry.grads
    ),
    "saved_module_calls": lambda log: Accessor(
        one for one in log.modules if any(log[label].has_contents for label in one.outputs)
    ),
    "num_saved_module_calls": lambda log: len(log.saved_module_calls),
    "has_gradients": lambda log: bool(log.saved_grad_ops),
    "num_tensors": lambda log: len(log.layer_list),
    "num_ops": lambda log: sum(entry.kind == "op" for entry in log.layer_list),
    "num_params": lambda log: sum(one.numel for one in log.params),
    "total_flops": lambda log: sum(entry.flops or 0 for entry in log.layer_list),
    "grad_fns": lambda log: log.backward_passes[-1].nodes if log.backward_passes else [],
    "saved_grad_ops": lambda log: Accessor(
        one for one in log.layer_list if one.grad_contents is not None
    ),
}
for _name, _read in _OF_LOGS.items():
    setattr(Log, _name, property(_read))


class TraceLog(Log, Trace):
    """A trace with the fields of TorchLens.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> isinstance(tl.trace(torch.nn.ReLU(), torch.ones(1)), tl.Trace)
        True
    """


class LoadedLog(Log, LoadedHistory):
    """A loaded log with the fields of TorchLens."""


def _new_name(entry: LayerEntry) -> str:
    return entry.name if entry.kind == "op" else entry.short_name


def with_names(
    log: ModelHistory,
    transform: Callable[[Tensor], Any] | None = None,
    distances: bool = False,
    arguments: bool = False,
) -> Log:
    """Let a log, traced or loaded, and its entries be read with the names of TorchLens.

    Entries can have a `transform` for `transformed_out`, distances from inputs and outputs, and the
    arguments of their functions.
    """
    log.__class__ = TraceLog if isinstance(log, Trace) else LoadedLog
    for entry in log.entries:
        entry.__class__ = Op
        entry.__dict__.update(_transform=transform, _saves_arguments=arguments)
    if distances:
        entries = [each for each in log._entries_without_state() if isinstance(each, Op)]
        for each, (above, below) in zip(entries, depths(entries), strict=True):
            each.min_distance_from_input, each.max_distance_from_input = above
            each.min_distance_to_output, each.max_distance_to_output = below
    return cast("Log", log)
