"""The two runs that are compared: traced, replayed, compiled, or loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from bendtrace._trace import Trace, run_trace
from bendtrace.bisecting.again import Again, again_of
from bendtrace.calls import Call, own_copy
from bendtrace.errors import ConversionError, InputError
from bendtrace.history.capture import SaveOptions, State
from bendtrace.history.copies import copied
from bendtrace.history.entries import LayerEntry, tensors_of
from bendtrace.history.run_log import RunLog
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.module import BendedModule
from bendtrace.preserved_state import PreservedState
from bendtrace.tape.tape import OpKind

__all__ = ["Side", "placed", "side_of"]


@dataclass
class Side:
    """One of the two runs.

    Attributes:
        log: its log, with all values.
        again: what runs its ops again.
        kind: "traced", "replayed", "compiled" or "loaded".
        output: what the model returned when nobody looked on; None for a log.
    """

    log: RunLog
    again: Again
    kind: str
    output: Any = None


@dataclass
class _Kept:
    """Values of a run that did the same ops as one that was traced."""

    saved: dict[Any, Any] = field(default_factory=dict)
    reread: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    random: dict[int, Tensor] = field(default_factory=dict)
    grad_fns: dict[Any, str] = field(default_factory=dict)


def placed(model: object, other: object, call: Call) -> Call:
    """Return inputs as a model wants them: where its parameters are, and in their dtype.

    The dtype of floating point tensors is changed only where the two models differ in theirs.

    Args:
        model: the model that is to be called.
        other: the one that it is compared with.
        call: the inputs of both.
    """
    mine, theirs = _parameter(model), _parameter(other)
    call = own_copy(call)
    if mine is None:
        return call
    dtype = None if theirs is None or theirs.dtype == mine.dtype else mine.dtype
    shape, parts = take_apart((call.args, dict(call.kwargs)))
    for number, part in enumerate(parts):
        if isinstance(part, Tensor):
            floats = part.is_floating_point()
            parts[number] = part.to(mine.device, dtype if floats and dtype else part.dtype)
    return Call(*assemble(shape, parts))


def _parameter(model: object) -> Tensor | None:
    owner = _bare(model)
    if not isinstance(owner, nn.Module):
        return None
    return next((p for p in owner.parameters() if p.is_floating_point()), None)


def _bare(model: Any) -> Any:
    """Return the model itself: without what compiles it, replays it or fills in arguments."""
    while True:
        if isinstance(model, functools.partial):
            model = model.func
        elif isinstance(model, BendedModule):
            model = model.model
        elif _is_compiled(model):
            model = model._orig_mod
        else:
            return getattr(model, "__self__", model)


def _is_compiled(model: object) -> bool:
    return isinstance(model, nn.Module) and "_orig_mod" in model._modules


def side_of(model: Any, call: Call | None) -> Side:
    """Run one side.

    Args:
        model: a model, a `BendedModule`, what `torch.compile` made of a module, or a log.
        call: the inputs; None for a log.

    Raises:
        InputError: it cannot be run so, or the log holds no values.
    """
    if isinstance(model, RunLog):
        if all(entry.tensor_contents is None for entry in model.layers):
            raise InputError(
                f"the log of {model.name} holds no values to compare: trace with save='all'"
            )
        return Side(model, again_of(model), "traced" if isinstance(model, Trace) else "loaded")
    if call is None:
        raise InputError("a model needs inputs: bisect(a, b, inputs)")
    if hasattr(model, "_torchdynamo_orig_callable") and not _is_compiled(model):
        raise InputError(
            "torch.compile of a function hides how it was compiled: compile a module instead"
        )
    with PreservedState(_bare(model), modes=True):
        if isinstance(model, BendedModule) and not model.insertions:
            return _replayed(model, call)
        if _is_compiled(model):
            return _compiled(model, call)
        log = _traced(model, call)
        return Side(log, again_of(log), "traced", log.output)


def _traced(model: Callable[..., Any], call: Call) -> Trace:
    call = own_copy(call)
    return run_trace(model, call.args, dict(call.kwargs), SaveOptions("all"))


# Replayed


class _Seen(Interjection):
    """Keeps what each node gives."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], Any] = {}

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        self.values[at.path, at.number] = (
            copied(output.detach()) if isinstance(output, Tensor) else output
        )


def _replayed(model: BendedModule, call: Call) -> Side:
    """Replay a model while its nodes are looked at."""
    native = _bare(model)
    with PreservedState(native, modes=True):
        log = _traced(native, call)
    with PreservedState(native, modes=True):
        _called(model, call)
    with PreservedState(native, modes=True):
        output = _called(model, call)
    seen = _Seen()
    with model.interject(lambda candidate: True, seen):
        for _ in range(2):
            seen.values.clear()
            before = model.stats.replays
            with PreservedState(native, modes=True):
                _called(model, call)
    if model.stats.replays == before:
        why = "; ".join(model.why_live) or "it was recorded anew"
        raise InputError(f"the call is not replayed, so there is nothing to compare: {why}")
    kept = _of_same_run(log)
    for entry in log.entries:
        value = seen.values.get((entry.node_path, entry.pass_number - 1))
        if entry.index is not None and isinstance(value, Tensor) and not entry.element:
            kept.saved[entry.index, ()] = value
    return Side(_with_values(log, kept), again_of(log, kept), "replayed", output)


def _called(model: Callable[..., Any], call: Call) -> Any:
    return own_copy(call).to(model)


# Compiled


def _compiled(model: Any, call: Call) -> Side:
    """Compile the traced ops as the model is compiled, and have the graph return every value."""
    native = model._orig_mod
    with PreservedState(native, modes=True):
        log = _traced(native, call)
    with PreservedState(native, modes=True):
        output = _called(model, call)
    try:
        graph = log.to_fx(guards=False)
    except ConversionError as error:
        raise InputError(f"the run cannot be compiled op by op: {error}") from error
    keys = _return_all(log, graph)
    inputs = [log._capture.saved[op.index, ()] if (op.index, ()) in log._capture.saved else op.meta  # type: ignore[union-attr]
              for op in log.ops if op.kind is OpKind.INPUT]  # fmt: skip
    compiled = model.dynamo_ctx(graph)
    with PreservedState(native, modes=True):
        values = compiled(*(copied(v) if isinstance(v, Tensor) else v for v in inputs))
    kept = _of_same_run(log)
    for key, value in zip(keys, values, strict=True):
        kept.saved[key] = value.detach()
    return Side(_with_values(log, kept), again_of(log, kept), "compiled", output)


def _return_all(log: Trace, module: fx.GraphModule) -> list[tuple[int, tuple[Any, ...]]]:
    """Have a graph return copies of all tensors of a log; return which these are."""
    nodes = {node.name: node for node in module.graph.nodes}
    keys, copies = [], []
    for op, name in zip(log.ops, log.names, strict=True):
        node = nodes.get(name)
        if op.kind not in (OpKind.CALL, OpKind.SCALAR) or node is None:
            continue
        for path, _ in tensors_of(op.meta):
            with module.graph.inserting_after(node):
                taken = node
                for key in path:
                    taken = module.graph.call_function(_item, (taken, key))
            with module.graph.inserting_after(taken):
                copies.append(module.graph.call_function(torch.clone, (taken,)))
            keys.append((op.index, path))
    last = next(node for node in module.graph.nodes if node.op == "output")
    last.args = (tuple(copies),)
    for op, name in zip(reversed(log.ops), reversed(log.names), strict=True):
        node = nodes.get(name)  # what was asked for a branch would only break the graph
        if node is not None and op.is_work and not node.users and not op.writes:
            module.graph.erase_node(node)
    module.recompile()
    return keys


def _item(value: Any, key: Any) -> Any:
    return value[key]


# Both


def _of_same_run(log: Trace) -> _Kept:
    capture = log._capture
    assert capture is not None
    given = {key: value for key, value in capture.saved.items() if log.ops[key[0]].is_given}
    # What was read after a write is known for the traced run only.
    return _Kept(given, {}, capture.states, capture.random, capture.grad_fns)


def _with_values(log: Trace, kept: _Kept) -> RunLog:
    """Return a log of the same ops with other values."""
    parts = log._parts()
    names = {entry.label: entry for entry in log.entries}

    def value(entry: LayerEntry) -> Any:
        if entry.index is None:  # an output is what another entry gave
            parents = [names[label] for label in entry.parents if label in names]
            return value(parents[0]) if len(parents) == 1 else None
        return kept.saved.get((entry.index, entry.element))

    def changed() -> Iterator[LayerEntry]:
        for entry in parts[0].entries:
            yield dataclasses.replace(entry, saved=value(entry))

    entries = list(changed())
    return RunLog(dataclasses.replace(parts[0], entries=entries), *parts[1:])
