"""A run of a copy of the model without insertions: what selectors that look ahead go by."""

from __future__ import annotations

import copy
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.history.names import Names
from bendtrace.interject.inserter import LiveInserter
from bendtrace.interject.plan import Plan
from bendtrace.interject.structure import take_apart
from bendtrace.paths.candidates import CandidateGraph
from bendtrace.paths.naming import Registry
from bendtrace.paths.view import Tree
from bendtrace.recording.agreement import alone
from bendtrace.recording.run import Signature, record
from bendtrace.recording.surroundings import Surroundings
from bendtrace.run import Run

__all__ = ["Rehearsal", "rehearse"]


class Rehearsal(NamedTuple):
    """What a run without insertions has shown.

    Attributes:
        graph: its nodes.
        tree: its tree.
        names: what strings name in it.
        totals: how many passes each node has.
    """

    graph: CandidateGraph
    tree: Tree
    names: Names
    totals: dict[str, int]


def rehearse(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], registry: Registry
) -> Rehearsal:
    """Run a copy of a model on copies of some inputs, and put the random generators back.

    Raises:
        InputError: the model or the inputs cannot be copied, or ranks act together in the run.
        Exception: whatever the model raises, as it is.
    """
    memo: dict[int, Any] = {}
    for tensor in take_apart((args, kwargs))[1]:
        if isinstance(tensor, Tensor) and not tensor.is_leaf:  # which copy.deepcopy refuses
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        twin, args, kwargs = copy.deepcopy((model, args, kwargs), memo)
    except Exception as error:
        raise InputError(
            "where these insertions are is decided by a run of a copy of the model without them, "
            f"and the model or its inputs cannot be copied ({type(error).__name__}: {error}); give "
            "node paths, modules or selectors that do not look ahead"
        ) from error
    inserter = LiveInserter(Plan(()), registry, twin)
    with (
        alone("a run of a copy of the model, to find where something is inserted,"),
        _random_state_kept(),
        _shared_state_kept(model, twin),
        _Unsaved(_same, _same),
    ):
        recording = record(twin, args, kwargs, Signature(twin), inserter=inserter)
    recording.result = None
    run = Run(recording, twin, registry)
    if isinstance(model, nn.Module) and isinstance(twin, nn.Module):
        own = dict(zip(map(id, twin.modules()), model.modules(), strict=True))
        for node in run.candidates:
            node.module = own.get(id(node.module), node.module)
            node.scope = own.get(id(node.scope), node.scope)
    return Rehearsal(run.candidates, run.tree, run.naming, inserter.passes)


# Whoever watches what autograd saves, such as a checkpoint around, is not to see the rehearsal.
_Unsaved = torch.autograd.graph.saved_tensors_hooks


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _random_state_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


@contextmanager
def _shared_state_kept(model: Callable[..., Any], twin: Callable[..., Any]) -> Iterator[None]:
    """Put back what a copy has in common with the model: what functions close over, globals."""
    own = {id(value) for value in _reached(model)}
    shared = {id(value): value for value in _reached(twin) if id(value) in own}
    tensors = [
        (value, value.detach().clone())
        for value in shared.values()
        if isinstance(value, Tensor) and not value.is_inference()
    ]
    containers = [
        (value, copy.copy(value)) for value in shared.values() if type(value) in _CONTAINERS
    ]
    objects = [
        (vars(value), dict(vars(value)))
        for value in shared.values()
        if not isinstance(value, (Tensor, type)) and type(getattr(value, "__dict__", None)) is dict
    ]
    try:
        yield
    finally:
        for tensor, before in tensors:
            # Not going by versions: torch counts none for the statistics of a batch norm.
            if not torch.equal(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        for held, kept in (*containers, *objects):
            _restore(held, kept)


_CONTAINERS = (dict, list, set)


def _reached(model: Callable[..., Any]) -> list[Any]:
    """Return everything that a run of a model can read and change."""
    surroundings = Surroundings(model, {})
    found = [part.value for part in surroundings.parts]
    surroundings.release()
    return found


def _restore(container: Any, before: Any) -> None:
    """Give a container the content that it had, unless it has it still."""
    if isinstance(container, list):
        if len(container) != len(before) or any(map(operator.is_not, container, before)):
            container[:] = before
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container |= before
    elif list(container) != list(before) or any(
        map(operator.is_not, container.values(), before.values())
    ):
        container.clear()
        container.update(before)
