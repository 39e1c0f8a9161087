"""The operators of torch's own tests, with their sample inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import bendtrace as bt
from tests.sweep import Sample, Served, seed_all, serve, untouched_torch

with untouched_torch():
    from torch.testing._internal import common_methods_invocations as database

# Ops that draw are wrapped to run under a seed of their own and to put the generator back, which
# would hide what they draw.
exec(
    compile(
        "def wrapper_set_seed(op, *args, **kwargs): return op(*args, **kwargs)",
        database.__file__,  # as code of torch's own
        "exec",
    ),
    vars(database),
)

OPS = {op.full_name: op for op in database.op_db}
SAMPLES = 3

# They read, or give, memory as it was found; torch can fill it before.
UNFILLED = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "linalg.lstsq", "linalg.lstsq.grad_oriented",
    }
)  # fmt: skip


def dtype_of(op: Any, device: str = "cpu") -> torch.dtype | None:
    """Return float32, or else the first dtype that the op takes on a device."""
    dtypes = op.supported_dtypes(torch.device(device).type)
    if torch.float32 in dtypes:
        return torch.float32
    return min(dtypes, key=str, default=None)


def samples(
    op: Any, seed: int, *, requires_grad: bool, limit: int = SAMPLES, device: str = "cpu"
) -> list[Sample]:
    """Draw the first, the last and others from between of the op's sample inputs."""
    seed_all(seed)
    # `op.sample_inputs` would seed before each of them, so that they came out the same each time.
    drawn = list(op.sample_inputs_func(op, device, dtype_of(op, device), requires_grad))
    step = (len(drawn) - 1) / (limit - 1)
    return [
        Sample((one.input, *one.args), one.kwargs, one.output_process_fn_grad, one.broadcasts_input)
        for one in (drawn[n] for n in sorted({round(n * step) for n in range(limit)}))
    ]


def forms(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the ways to call an op: as a function, as a method, in place, and as operators."""
    found: list[Any] = []
    for name, variant in (
        ("function", op.get_op()),
        ("method", op.get_method()),
        ("in place", op.get_inplace()),
        ("operator", op.get_operator()),
        ("operator in place", op.get_inplace_operator()),
    ):
        if variant is not None and variant not in found:
            found.append(variant)
            yield name, variant


def calling(variant: Callable[..., Any], *, clone: bool = False) -> Callable[..., Any]:
    """Return a plain function that calls an op, with `clone` on a copy of its first argument."""
    if clone:
        return lambda first, /, *args, **kwargs: variant(first.clone(), *args, **kwargs)
    return lambda first, /, *args, **kwargs: variant(first, *args, **kwargs)


@contextmanager
def filled_memory(wanted: bool = True) -> Iterator[None]:
    """Have torch fill new memory, which it does where algorithms shall be deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls, and then goes one way or the other as `gate` has it."""

    def model(*args: Any, gate: torch.Tensor, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if gate > 0:
            return result, gate + 1
        return result, torch.rand(2)

    return model


def sweep(name: str, device: str = "cpu") -> Iterator[tuple[str, Served]]:
    """Call an op in all its forms, without and with gradients, on all its samples."""
    for label, call, drawn, gradients in calls_of(name, device):
        bended = bt.BendedModule(call)
        for number, (sample, twin) in enumerate(drawn):
            served = serve(bended, call, sample, twin, gradients=gradients)
            yield f"{label}, sample {number}", served


def sweep_guarded(name: str, device: str = "cpu") -> Iterator[tuple[str, Served, Served]]:
    """Call an op in front of a guard that fails, and then on both sides of it."""
    for label, call, drawn, gradients in calls_of(name, device):
        model = guarded(call)
        bended = bt.BendedModule(model)
        for number, (sample, _) in enumerate(drawn[-1:]):
            one, other = (
                replace(
                    sample,
                    kwargs={**sample.kwargs, "gate": torch.tensor(gate)},
                    backward=lambda result, pick=sample.backward: pick(result[0]),
                )
                for gate in (1.0, -1.0)
            )
            resumed = serve(bended, model, one, other, gradients=gradients)
            known = serve(bended, model, other, one, gradients=gradients)
            yield f"{label}, sample {number}", resumed, known


def calls_of(
    name: str, device: str = "cpu"
) -> Iterator[tuple[str, Callable[..., Any], list[tuple[Sample, Sample]], bool]]:
    """Yield forms of an op, samples with their twins, and whether these require gradients."""
    op = OPS[name]
    kind = torch.device(device).type
    with_gradients = dtype_of(op, device) in op.supported_backward_dtypes(kind)
    for gradients in (False, True)[: 1 + with_gradients]:
        drawn, others = (
            samples(op, seed, requires_grad=gradients, device=device) for seed in (0, 1)
        )
        for form, variant in forms(op):
            in_place = "in place" in form
            call = calling(variant, clone=gradients and in_place)
            pairs = [
                (sample, twin)
                # The numbers drawn decide, in a few cases, how many samples there are.
                for sample, twin in zip(drawn, others, strict=False)
                if not (in_place and sample.broadcasts)
                and not ("operator" in form and sample.kwargs)
            ]
            with filled_memory(name in UNFILLED):
                yield form + ", gradients" * gradients, call, pairs, gradients
