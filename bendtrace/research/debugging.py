"""Finds faults in a model: the first NaN, and gradients that vanish."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from bendtrace._trace import Trace, trace
from bendtrace.errors import InputError, NonFiniteError
from bendtrace.insert.gates import of_this_run
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.log.entries import LayerEntry, Table, in_percent, rounded
from bendtrace.module import BendedModule, required_bended
from bendtrace.python.internals import pytree
from bendtrace.python.sites import place_text
from bendtrace.watch.owners import required_model


class Range(NamedTuple):
    """The values of a tensor, in short.

    Attributes:
        label: the entry of the log, or the name of the parameter, that they are of.
        low: the least finite value; nan where there is none.
        high: the greatest finite value; nan where there is none.
        nans: how many are NaN.
        infinities: how many are infinite.

    Example:
        >>> import torch, bendtrace as bt
        >>> found = bt.workflows.find_nan(torch.log, torch.tensor([1.0, -1.0]))
        >>> found.values.label, found.values.nans, found.values.is_finite
        ('log_1_1', 1, False)
        >>> print(found.operands[0])
        input_1_0: -1 to 1
    """

    label: str
    low: float
    high: float
    nans: int
    infinities: int

    @property
    def is_finite(self) -> bool:
        """True if no value is NaN or infinite."""
        return not (self.nans or self.infinities)

    def __str__(self) -> str:
        finite = "no finite value" if math.isnan(self.low) else f"{self.low:.3g} to {self.high:.3g}"
        text = f"{self.label}: {finite}"
        counts = ((self.nans, "NaN"), (self.infinities, "infinite"))
        return ", ".join([text, *(f"{count} {what}" for count, what in counts if count)])


@dataclass(frozen=True)
class NonFinite:
    """The first value of a run that is NaN or infinite.

    Attributes:
        entry: its entry in the log.
        values: its values.
        operands: the values that the op was given, parameters included.
        cause: "input" for an argument, "state" for an op that was given a parameter or buffer that
            is not finite, "op" for one that made it of finite values, "backward" where the forward
            pass is finite and the gradient is not.
        trace: the run.

    Example:
        >>> import torch, bendtrace as bt
        >>> found = bt.workflows.find_nan(torch.log, torch.tensor([1.0, -1.0]))
        >>> found.cause, found.entry
        ('op', <op log_1_1 (2,)>)
    """

    entry: LayerEntry
    values: Range
    operands: tuple[Range, ...]
    cause: Literal["input", "state", "op", "backward"]
    trace: Trace

    def __str__(self) -> str:
        causes = {
            "input": "an input of the model",
            "state": "computed from a parameter or buffer that is not finite",
            "op": "computed from finite values",
            "backward": "the gradient; the forward pass is finite",
        }
        lines = [f"{self.values} ({causes[self.cause]})"]
        if self.entry.source is not None:
            source = self.entry.source
            lines.append(f"  {source.text}  at {place_text(source.file, source.line)}")
        if self.entry.module:
            lines.append(f"  in module {self.entry.module}")
        lines += [f"  from {operand}" for operand in self.operands]
        return "\n".join(lines)


def find_nan(
    model: Callable[..., Any],
    /,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> NonFinite | None:
    """Run a model and return the first value that is NaN or infinite, with its cause.

    Infinities can be meant: masks are made of them. A tensor counts if it holds a NaN, or if it
    holds an infinity, no operand and no buffer of its op does, and the op is not one that fills
    tensors (`torch.full`, `masked_fill`, `torch.where`).

    The gradients that parameters have are left as they are.

    Args:
        model: a module or function.
        *args: its arguments.
        loss: computes a scalar from the output. If it is given and the forward pass is finite, the
            gradients of the loss are looked at, from the last op to the first.
        **kwargs: its keyword arguments.

    Returns:
        The first such value; None if there is none.

    Raises:
        InputError: the loss is not a scalar with a gradient.
        Exception: whatever the model raises.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return (x - x.max()).log().sum()
        >>> found = bt.workflows.find_nan(model, torch.tensor([1.0, 2.0]))
        >>> found.cause, found.entry.label
        ('op', 'log_1_3')
        >>> print(found)  # doctest: +ELLIPSIS
        log_1_3: no finite value, 1 NaN, 1 infinite (computed from finite values)
          (x - x.max()).log()  at ...
          from sub_1_2: -1 to 0
    """
    states = _states(model)
    parameters = {name for name, tensor in states.items() if isinstance(tensor, nn.Parameter)}
    save = _range_in if loss is None else "all"
    run = trace(model, *args, save=save, save_gradients=loss is not None, **kwargs)
    ranges: dict[str, Range] = {}
    for entry in run.entries:
        kept = entry.tensor_contents
        values = _range_of(kept, entry.label) if isinstance(kept, Tensor) else kept
        if not isinstance(values, Range):
            continue
        ranges[entry.label] = values
        if values.is_finite:
            continue
        if entry.kind == "input":
            return NonFinite(entry, values, (), "input", run)
        used = [_range_of(states[use.name], use.name) for use in entry.state if use.name in states]
        operands = (*(ranges[label] for label in entry.parents if label in ranges), *used)
        of_state = any(one.nans for one in used) or not all(
            one.is_finite for one in used if one.label in parameters
        )
        if not (of_state or values.nans) and (
            entry.function in _MASKS or any(operand.infinities for operand in operands)
        ):
            continue
        return NonFinite(entry, values, operands, "state" if of_state else "op", run)
    if loss is None:
        return None
    given = [leaf for leaf in pytree.tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
    return _first_gradient(run, loss, [*states.values(), *given])


def _first_gradient(
    run: Trace, loss: Callable[[Any], Tensor], leaves: list[Tensor]
) -> NonFinite | None:
    """Go backward, and return the last op whose gradient is not finite."""
    scalar = _scalar(loss, run.output)
    torch.autograd.grad(scalar, [t for t in leaves if t.requires_grad], allow_unused=True)
    for entry in reversed(run.entries):
        gradient = entry.grad_contents
        if gradient is not None:
            values = _range_of(gradient, f"gradient of {entry.label}")
            if not values.is_finite:
                below = [run[label] for label in entry.children]
                after = [
                    _range_of(child.grad_contents, f"gradient of {child.label}")
                    for child in below
                    if child.grad_contents is not None
                ]
                return NonFinite(entry, values, tuple(after), "backward", run)
    return None


def _scalar(loss: Callable[[Any], Any], output: Any) -> Tensor:
    scalar = loss(output)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.requires_grad:
        raise InputError("the loss has to be a tensor of one element that requires a gradient")
    return scalar


def _range_in(entry: LayerEntry) -> Range | None:
    value = entry.tensor_contents
    return _range_of(value, entry.label) if isinstance(value, Tensor) else None


def _range_of(tensor: Tensor, label: str) -> Range:
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or values.layout is not torch.strided or values.is_nested:
        return Range(label, math.nan, math.nan, 0, 0)
    finite = values[values.isfinite()]
    nans = int(values.isnan().sum())
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan,) * 2
    return Range(label, low, high, nans, values.numel() - finite.numel() - nans)


def _states(model: Callable[..., Any]) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return {}
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def raise_on_nan(model: BendedModule, *, gradients: bool = False) -> Insertion:
    """Have calls of a model raise at the first op that returns NaN, until this is removed.

    Around a training loop, the error says in which step and at which op NaN began. Each value is
    looked at, which costs about as much time as an op: find the step this way, and what led to it
    with `find_nan`.

    Args:
        model: the `BendedModule`.
        gradients: whether backward passes raise as well, at the first gradient with NaN.

    Returns:
        A handle, which is also a context manager: `remove()`, `report()`.

    Raises:
        InputError: the model is no `BendedModule`.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: (x - 1).sqrt())
        >>> with bt.workflows.raise_on_nan(bended):
        ...     try:
        ...         for step in range(3):
        ...             _ = bended(torch.tensor([2.0 - step]))
        ...     except bt.errors.NonFiniteError as error:
        ...         print(error.path, error.call)
        sqrt 3
    """
    kind = _GradientWatch if gradients else _NanWatch
    return required_bended(model, "a watch for NaN").interject(lambda node: True, kind())


class _NanWatch(Interjection):
    """Raises at a node whose output holds NaN, and counts the calls of the model."""

    observes = True
    wants_inputs = True
    late = True
    self_contained = True
    label = "raise_on_nan"

    def __init__(self) -> None:
        self.calls = 0

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        values = of_this_run()
        if self not in values:
            values[self] = True
            self.calls += 1
        if getattr(at.function, "__name__", "") not in _UNFILLED and (nans := _nans_in(output)):
            source = "with" if _nans_in([*inputs, inputs.kwargs]) else "without"
            self._refuse(at, f"returned {nans} NaN", f", from inputs {source} NaN")

    def _refuse(self, at: NodePass, what: str, source: str = "") -> NoReturn:
        again = f" (pass {at.number + 1})" if at.number else ""
        name = at.path or "the model"
        text = f"{name}{again} {what} in call {self.calls} of the model{source}"
        raise NonFiniteError(text, at.path, self.calls)


class _GradientWatch(_NanWatch):
    """Raises in backward passes as well. Gradients from several ops may only have NaN as a sum."""

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> None:
        for verb, gradients in (("received", grad_output), ("gave", grad_input)):
            if nans := _nans_in(gradients):
                self._refuse(at, f"{verb} a gradient with {nans} NaN")


def _nans_in(value: Any) -> int:
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(_range_of(tensor, "").nans for tensor in found if not tensor.is_meta)


_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What fills tensors with a given value.
_MASKS = frozenset(
    {
        "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
        "__setitem__", "index_fill", "index_fill_", "tensor", "as_tensor", "scalar_tensor",
    }
)  # fmt: skip


class GradientRow(NamedTuple):
    """The gradient of one parameter.

    Attributes:
        name: its qualified name.
        norm: the 2-norm of its gradient; None if it got none.
        relative: that norm by the norm of the parameter; None if either is missing or zero.
        zeros: what share of the gradient is zero, from 0 to 1.
        verdict: "ok", "no gradient", "zero", "not finite", "vanishing" or "exploding".
    """

    name: str
    norm: float | None
    relative: float | None
    zeros: float
    verdict: str


def gradient_flow(
    model: nn.Module,
    /,
    *args: Any,
    loss: Callable[[Any], Tensor],
    vanishing: float = 1e-7,
    exploding: float = 1e3,
    **kwargs: Any,
) -> Table:
    """Return how large the gradients of a model's parameters are, in the order of the model.

    The parameters keep the gradients that they had before.

    Args:
        model: the model.
        *args: its arguments.
        loss: computes a scalar from the output.
        vanishing: relative norms below this are called vanishing.
        exploding: relative norms above this are called exploding.
        **kwargs: its keyword arguments.

    Returns:
        A table of `name`, `norm`, `relative`, `zeros` and `verdict`.

    Raises:
        InputError: the loss is not a scalar with a gradient.

    Example:
        >>> import torch, bendtrace as bt
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> model[0].bias.requires_grad_(False).shape
        torch.Size([3])
        >>> flow = bt.workflows.gradient_flow(model, torch.ones(4, 2), loss=lambda y: y.sum())
        >>> [(row.name, row.verdict) for row in flow]
        [('0.weight', 'ok'), ('1.weight', 'ok'), ('1.bias', 'ok')]
    """
    required_model(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    scalar = _scalar(loss, model(*args, **kwargs))
    leaves = [parameter for _, parameter in named]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(scalar, leaves, allow_unused=True)
    rows = []
    for (name, parameter), gradient in zip(named, found, strict=True):
        if gradient is None:
            rows.append(GradientRow(name, None, None, 1.0, "no gradient"))
            continue
        norm, size = (
            float(one.detach().to(torch.promote_types(one.dtype, torch.float64)).norm())
            for one in (gradient, parameter)
        )
        relative = norm / size if norm and size else None
        zeros = float((gradient == 0).double().mean()) if gradient.numel() else 1.0
        if not math.isfinite(norm):
            verdict = "not finite"
        elif not norm:
            verdict = "zero"
        elif relative is not None and relative < vanishing:
            verdict = "vanishing"
        elif relative is not None and relative > exploding:
            verdict = "exploding"
        else:
            verdict = "ok"
        rows.append(GradientRow(name, norm, relative, zeros, verdict))
    return Table(rows, {"norm": rounded, "relative": rounded, "zeros": in_percent})
