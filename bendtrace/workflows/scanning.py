"""The shapes of a run, without running it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace._trace import Trace, trace
from bendtrace.calls import Call
from bendtrace.errors import InputError
from bendtrace.interject.structure import assemble, take_apart


def scan(model: Any, inputs: Any) -> Trace:
    """Record a run that computes shapes and dtypes alone, on torch's device "meta".

    It needs no memory for weights or activations, and takes as long as the model's Python. nnsight
    has a function of this name. The model is not changed, and what is inserted is not called.

    Args:
        model: a module, or a `BendedModule` with one.
        inputs: its inputs; see `Call.of`.

    Returns:
        The trace, whose entries have shapes and no values.

    Raises:
        InputError: the model is no module, or it reads a value, as `if x.sum() > 0` does. The
            attribute `bendtrace` of the error is the trace up to there.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU())
        >>> bt.workflows.scan(model, torch.ones(2, 4))["0"].shape
        (2, 9)
    """
    call, module = Call.of(inputs), getattr(model, "_bendtrace_model", model)
    if not isinstance(module, nn.Module):
        raise InputError(f"scan needs a module, whose weights it knows, not {module!r}")
    memo: dict[int, Any] = {}
    for part in module.modules():
        for each in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(each, Tensor):
                shape = torch.empty_like(each, device="meta")
                is_parameter = isinstance(each, nn.Parameter)
                memo[id(each)] = nn.Parameter(shape, each.requires_grad) if is_parameter else shape
    shadow = copy.deepcopy(module, memo)
    structure, parts = take_apart((call.args, dict(call.kwargs)))
    moved = [part.to("meta") if isinstance(part, Tensor) else part for part in parts]
    args, kwargs = assemble(structure, moved)
    try:
        with torch.device("meta"):
            return trace(shadow, *args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        begun = getattr(error, "bendtrace", None)
        if "meta" not in str(error) or begun is None:
            raise
        refusal = InputError(
            f"the model reads a value, and a scan has none ({begun.why_live[-1]}): trace a run"
        )
        refusal.bendtrace = begun  # type: ignore[attr-defined]
        raise refusal from error
