"""TorchLens's `debug`: non-finite values, dependencies, costs and the shapes of inputs."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bendtrace._lazy import required, required_pandas
from bendtrace.errors import InputError, LayerKeyError
from bendtrace.history.capture import tensors_in
from bendtrace.preserved_state import PreservedState


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
        zone = tuple(one.label for one in _near(log, entry, "parents") if not one.has_contents)
        scope = "first among saved tensors" if unsaved else "all tensors"
        message = f"{scope.capitalize()} is {kind} at {entry.label}."
        if zone:
            message += f" Unsaved upstream uncertainty zone: {', '.join(zone)}."
        return FindNanResult(
            True, entry, entry.layer_label, entry.func_name, kind, _place(entry),
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
    """Return what the value of an entry was computed from, or what was computed from it."""
    sides = {"ancestors": ["parents"], "descendants": ["children"]}
    ways = sides.get(direction, ["parents", "children"])
    try:
        (start,) = [op_or_label] if hasattr(op_or_label, "parents") else log.selected(op_or_label)
    except (LayerKeyError, ValueError) as error:
        return Lineage(None, direction, [], f"lineage is unavailable: {error}")
    nodes = [
        (op_label(one), depth, _place(one), one.shape, one.dtype)
        for one, depth in {k: v for way in ways for k, v in _near(log, start, way).items()}.items()
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
        missing = [name for name, entry in (("a", one), ("b", other)) if not _is_dense(entry.out)]
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
        reason = "" if _is_dense(value) else "unsaved or no dense floats"
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
    """Return a data frame of what the lines of the source cost, the costliest first."""
    if by not in _COSTS:
        raise InputError(f"by= has to be one of {', '.join(_COSTS)}, not {by!r}")
    sums: dict[str, list[float]] = {}
    missing = 0
    for entry in log.layer_list:
        cost = _COSTS[by](entry)
        if cost is None or entry.kind != "op":
            missing += 1
            continue
        row = sums.setdefault(_place(entry) or "unknown", [0, 0.0])
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


def _near(log: Any, start: Any, way: str) -> dict[Any, int]:
    """Return what is reached from an entry in one direction, with its distance; first itself."""
    found, waiting = {start: 0}, [start]
    for entry in waiting:
        for label in getattr(entry, way):
            if (other := log[label]) not in found:
                found[other] = found[entry] + 1
                waiting.append(other)
    return found


def _place(entry: Any) -> str | None:
    return None if entry.source is None else f"{entry.source.file}:{entry.source.line}"


def _is_dense(value: Any) -> bool:
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
                return self.found(shape, size)
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

    def found(self, shape: Shape, size: int) -> InferInputShapeResult:
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
        self.known = {id(x): x}  # what is computed from the input; held, so that ids stay unique
        self.x, self.dtype, self.limit = x, x.dtype, 2
        self.shapes: list[Shape] = []  # that the first layer allows
        self.is_done = False
        self.is_large = False  # whether what failed was given too much

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        given = list(tensors_in((args, kwargs)))
        ours = [one for one in given if id(one) in self.known]
        if ours and not self.shapes:
            weights = [one for one in given if id(one) not in self.known]
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
            self.known |= {id(one): one for one in tensors_in(made)}
        return made

    def before_rnn(self, module: Any, args: tuple[Any, ...]) -> None:
        """Read the shape from a recurrent module, which checks it before it calls anything."""
        if not self.shapes and args and id(args[0]) in self.known:
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
