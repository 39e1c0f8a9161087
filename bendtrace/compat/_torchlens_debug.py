"""TorchLens's `debug`: non-finite values, dependencies, differences and costs of finished runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bendtrace._lazy import required, required_pandas
from bendtrace.errors import InputError, LayerKeyError


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
