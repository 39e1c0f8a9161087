"""The two runs that are compared: traced, replayed, compiled, or loaded."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
import torch.overrides
from torch import Tensor, fx, nn

from bendtrace._trace import Trace, run_trace
from bendtrace.calls import Call, own_copy
from bendtrace.errors import ConversionError, InputError
from bendtrace.history.capture import SaveOptions, State
from bendtrace.history.copies import copied
from bendtrace.history.entries import LayerEntry, tensors_of
from bendtrace.history.run_log import RunLog
from bendtrace.history.validate import MISSING, Kept, Validator
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.module import BendedModule
from bendtrace.preserved_state import PreservedState
from bendtrace.tape.tape import Op, OpKind, refs_in

__all__ = ["Side", "Unable", "again_of", "placed", "side_of"]


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


# Running one op of a log again, on values of another run.


class Unable(Exception):
    """An op cannot be run again: why."""


class Again(Protocol):
    """Runs ops of one log again."""

    def inputs(self, entry: LayerEntry) -> list[Any]:
        """Return the values that the op of an entry read, in their order.

        Raises:
            Unable: one of them is not known.
        """

    def producers(self, entry: LayerEntry) -> list[str]:
        """Return, for each of these values, the label of its entry; "" for none."""

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        """Run the op of an entry on other values, and return what the entry would be then.

        Raises:
            Unable: it cannot be run, or raises.
        """

    def state(self, entry: LayerEntry) -> Tensor | None:
        """Return the tensor of a state entry; None if it is not known."""


def again_of(log: RunLog, kept: Kept | None = None) -> Again:
    """Return what runs the ops of a log again.

    Args:
        log: the log. One that was loaded has no ops: they are read from its text.
        kept: the values of the run; None for those that the log itself has kept.
    """
    if isinstance(log, Trace):
        capture = kept if kept is not None else log._capture
        if capture is not None:
            return _Recorded(log, capture)
    return _Written(log)


class _Recorded:
    """The ops of a run that was recorded in this process."""

    def __init__(self, trace: Trace, kept: Kept) -> None:
        self._ops = trace.ops
        places = {(e.index, e.element): e.label for e in trace.entries if e.index is not None}
        self._labels = {index: label for (index, _), label in reversed(places.items())}
        self._validator = Validator(trace.ops, kept, places, 0)
        self._kept = kept

    def inputs(self, entry: LayerEntry) -> list[Any]:
        op = self._op(entry)
        found = []
        for ref in refs_in((op.args, op.kwargs)):
            value = self._validator.value(op, ref)
            if value is MISSING:
                raise Unable(f"it reads %{ref.index}, whose value was not saved")
            found.append(value)
        return found

    def producers(self, entry: LayerEntry) -> list[str]:
        op = self._op(entry)
        return [self._labels.get(ref.index, "") for ref in refs_in((op.args, op.kwargs))]

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        op = self._op(entry)
        reason = self._validator.unable(op)
        if reason is not None:
            raise Unable(reason)
        refs = [ref.index for ref in refs_in((op.args, op.kwargs))]
        if len(refs) != len(values):
            raise Unable("it reads another number of values")
        state = torch.get_rng_state()
        try:
            made = self._validator.carry_out(op, dict(zip(refs, values, strict=True)))
        except Exception as error:
            raise Unable(f"it raises {type(error).__name__}") from error
        finally:
            torch.set_rng_state(state)
        return _element(made, entry)

    def state(self, entry: LayerEntry) -> Tensor | None:
        kept = None if entry.index is None else self._kept.states.get(entry.index)
        return None if kept is None else kept.read()

    def _op(self, entry: LayerEntry) -> Op:
        if entry.index is None:
            raise Unable("it is no op")
        return self._ops[entry.index]


def _element(made: Any, entry: LayerEntry) -> Any:
    try:
        for key in entry.element:
            made = made[key]
    except (TypeError, LookupError, AttributeError) as error:
        raise Unable("it gives something else") from error
    return made.detach() if isinstance(made, Tensor) else made


# Labels of values, as they stand in the arguments of an entry.
_LABEL = re.compile(r"\w[\w.]*(?::\d+)?")
# Where functions of torch's are; the arguments name dtypes and the like.
_MODULES = {"torch": torch}


class _Written:
    """The ops of a log that was loaded: functions and arguments are read from the text."""

    def __init__(self, log: RunLog) -> None:
        self._entries = {entry.label: entry for entry in log.entries}

    def inputs(self, entry: LayerEntry) -> list[Any]:
        return [self._value(label) for label in self.producers(entry)]

    def producers(self, entry: LayerEntry) -> list[str]:
        return [m[0] for m in _LABEL.finditer(entry.arguments) if m[0] in self._entries]

    def _value(self, label: str) -> Any:
        entry = self._entries[label]
        if entry.kind == "number":
            return entry.value
        value = entry.tensor_contents
        if entry.kind == "state" and value is None:
            raise Unable("a log does not hold the weights that it reads")
        if not isinstance(value, Tensor):
            raise Unable(f"{label} was not saved")
        return value

    def run(self, entry: LayerEntry, values: Sequence[Any]) -> Any:
        if entry.inplace:
            raise Unable("it writes to what it is given, which a log does not tell apart")
        function = _function(entry.target)
        names: dict[str, Any] = {}

        def placed(found: re.Match[str]) -> str:
            if found[0] not in self._entries:
                return found[0]
            name = f"value_{len(names)}"
            names[name] = values[len(names)]
            return name

        try:
            text = _LABEL.sub(placed, entry.arguments)
            call = ast.parse(f"call({text[1:-1]})", mode="eval").body
            assert isinstance(call, ast.Call)
            args = [_read(node, names) for node in call.args]
            kwargs = {str(word.arg): _read(word.value, names) for word in call.keywords}
            with torch.no_grad():
                made = function(*args, **kwargs)
        except Unable:
            raise
        except Exception as error:
            raise Unable(f"its text cannot be run: {type(error).__name__}") from error
        return _element(made, entry)

    def state(self, entry: LayerEntry) -> Tensor | None:
        value = entry.tensor_contents
        return value if isinstance(value, Tensor) else None


def _function(target: str) -> Callable[..., Any]:
    first, *rest = target.split(".")
    found: Any = _MODULES.get(first) if rest else getattr(torch.Tensor, first, None)
    for name in rest:
        found = getattr(found, name, None)
    if not callable(found) or found not in _overridable():  # a log is not trusted
        raise Unable(f"{target} is no op of torch's here")
    function: Callable[..., Any] = found
    return function


@cache
def _overridable() -> frozenset[Any]:
    """Return the functions of torch's that compute something with tensors, and no others."""
    found = torch.overrides.get_overridable_functions().values()
    return frozenset(chain.from_iterable(found))


def _read(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an argument that was written as text; nothing is called."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = getattr(_MODULES.get(node.value.id), node.attr, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [_read(item, names) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)
