"""Calls of a model and of its `BendedModule` on torch's own sample inputs, compared in everything.

torch keeps databases of its operators and modules for its own tests. They are private, and their
import sets switches of the whole process, which `untouched_torch` puts back.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

import bendtrace as bt
from tests.promise import bits, footprint, state

Call = Callable[..., Any]
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_COMPRESSED = _BY_ROW + _BY_COLUMN  # deepcopy has no way to copy these


@contextmanager
def untouched_torch() -> Iterator[None]:
    """Undo what importing `torch.testing._internal` (seen in 2.13) changes in torch itself."""
    scripted = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    calls = [kind.__call__ for kind in scripted]
    switch = "__allow_nonbracketed_mutation_flag"
    backends = torch.backends.flags_frozen.__globals__
    allowed = backends[switch]
    with warnings.catch_warnings(action="ignore"):
        try:
            yield
        finally:
            for kind, call in zip(scripted, calls, strict=True):
                kind.__call__ = call
            backends[switch] = allowed


def seed_all(seed: int) -> None:
    """Seed every generator that sample inputs are drawn from."""
    torch.default_generator.manual_seed(seed)  # all there is on a CPU, and a lot quicker
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)


def copied(value: Any) -> Any:
    """Copy the tensors of nested containers as leaves; what shared memory shares it again."""
    memo: dict[int, Any] = {}
    done: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def copy_of(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if id(item) not in done:
            bare = item.detach()
            compressed = item.layout in _COMPRESSED
            twin = bare.clone() if compressed else copy.deepcopy(bare, memo)
            twin.requires_grad_(item.requires_grad)
            done[id(item)] = item, bare, twin
        return done[id(item)][2]

    return tree_map(copy_of, value)


def look(value: Any) -> Any:
    """Return all that can be told about nested tensors, equal only if they are the same.

    To `bits` it adds strides, offsets, version counters, the kind of the gradient, which tensors
    are one object or share memory, and the parts of sparse and nested tensors.
    """
    objects: dict[int, int] = {}
    memory: dict[int, int] = {}
    alive: list[Any] = []  # or an identity could come up a second time

    def of(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        number = objects.setdefault(id(item), len(objects))
        parts = _parts(item)
        alive.extend((item, *parts))
        about = [number, item.requires_grad, item.is_leaf, type(item.grad_fn).__name__, item.layout]
        if parts:
            return [*about, type(item).__name__, tuple(item.shape), [of(part) for part in parts]]
        storage = item.untyped_storage()
        alive.append(storage)
        where = memory.setdefault(storage._cdata, len(memory))
        return [
            *about, item._version, item.stride(), item.storage_offset(), where,
            item.is_conj(), item.is_neg(), item.detach() if type(item) is Tensor else item,
        ]  # fmt: skip

    return bits(tree_map(of, value))


def _parts(tensor: Tensor) -> list[Tensor]:
    bare = tensor.detach()
    if tensor.is_nested:
        return list(bare.unbind())
    if tensor.layout is torch.sparse_coo:
        return [bare._indices(), bare._values()]
    if tensor.layout in _BY_ROW:
        return [bare.crow_indices(), bare.col_indices(), bare.values()]
    if tensor.layout in _BY_COLUMN:
        return [bare.ccol_indices(), bare.row_indices(), bare.values()]
    return []


@dataclass(frozen=True)
class Outcome:
    """What a call did, as values that are equal only if the calls did the same."""

    result: Any
    error: tuple[str, str] | None
    random: Any
    state: Any
    gradients: Any


def outcome(
    call: Call, model: Any, sample: Sample, seed: int, backward: Callable[[Any], Any] | None
) -> Outcome:
    """Call under a seed, with gradients if the outputs that `backward` picks have any."""
    args, kwargs = copied((sample.args, sample.kwargs))
    seed_all(seed)
    result = error = grads = None
    try:
        result = call(*args, **kwargs)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    drawn = [torch.get_rng_state().tolist()]
    if torch.cuda.is_initialized():
        drawn += [state.tolist() for state in torch.cuda.get_rng_state_all()]
    seen = look([result, args, kwargs])
    if backward is not None and error is None:
        grads = _gradients(backward(result), model, args, kwargs)
    bare = isinstance(model, torch.nn.Module) and any(map(is_lazy, model.parameters()))
    return Outcome(seen, error, drawn, "not made yet" if bare else state(model), grads)


def _gradients(result: Any, model: Any, args: Any, kwargs: Any) -> Any:
    ends = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    starts = [t for t in tree_leaves([args, kwargs]) if isinstance(t, Tensor) and t.requires_grad]
    starts += list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    if not ends or not starts:
        return None
    try:
        return look(
            torch.autograd.grad(
                ends, starts, [torch.randn_like(end) for end in ends], allow_unused=True
            )
        )
    except Exception as raised:
        return type(raised).__name__, str(raised)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, which outputs to take gradients of, and whether the first grows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backward: Callable[[Any], Any] = lambda result: result
    broadcasts: bool = False

    def like(self, other: Sample) -> bool:
        """Whether two samples differ in the values of their tensors at most."""
        return _shape_of(self) == _shape_of(other)


def _shape_of(sample: Sample) -> Any:
    def of(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.dtype, item.layout, tuple(item.shape), item.requires_grad
        return id(item) if isinstance(item, torch.nn.Module) else bits(item)

    return repr(tree_map(of, (sample.args, sample.kwargs)))


@dataclass(frozen=True)
class Served:
    """How the calls with one sample and its twin went.

    Attributes:
        again: how the second call with the same sample was served.
        twin: how a call with other values was served.
        alike: whether the twin differs in the values of tensors only.
        wrong: what differs from the model itself.
        why: why the second call was no replay, if it was none.
    """

    again: str
    twin: str
    alike: bool
    wrong: tuple[str, ...]
    why: str | None = None


def serve(
    bended: bt.BendedModule,
    eager: Call,
    sample: Sample,
    twin: Sample,
    *,
    gradients: bool = False,
) -> Served:
    """Call a `BendedModule` twice with a sample and once with its twin, and the model as often.

    Args:
        bended: the model, wrapped.
        eager: the model, or another one like it if it holds state.
        sample: the arguments.
        twin: the same with other values.
        gradients: whether to compare gradients too.
    """
    wrong: list[str] = []
    served: list[str] = []
    why = None
    for seed, given in enumerate((sample, sample, twin)):
        backward = given.backward if gradients else None
        wanted = outcome(eager, eager, given, seed, backward)
        before, tracks, mismatch = replace(bended.stats), footprint(), bended.last_mismatch
        got = outcome(bended, bended.model, given, seed, backward)
        served.append(_how(before, bended.stats))
        wrong += [
            f"call {seed} ({served[-1]}): {field}{_detail(field, got, wanted)}"
            for field in vars(wanted)
            if getattr(got, field) != getattr(wanted, field)
        ]
        if footprint() != tracks:
            wrong.append(f"call {seed}: footprint")
        if seed == 1 and served[-1] == "live":
            why = "; ".join(bended.why_live)
        elif seed == 1 and served[-1] != "replay":
            new = bended.last_mismatch is not mismatch
            why = str(bended.last_mismatch) if new else str(got.error)
    return Served(served[1], served[2], twin.like(sample), tuple(wrong), why)


def _detail(field: str, got: Outcome, wanted: Outcome) -> str:
    return f" {got.error}, not {wanted.error}" if field == "error" else ""


def _how(before: bt.Stats, after: bt.Stats) -> str:
    """Say how a call was served, from what it added to the statistics."""
    for how, name in (
        ("live", "live"), ("resume", "resumes"), ("replay", "replays"), ("trace", "traces"),
    ):  # fmt: skip
        if getattr(after, name) > getattr(before, name):
            return how
    return "raised"
