"""Running one op of a log again, on values of another run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
import torch.overrides
from torch import Tensor

from bendtrace._trace import Trace
from bendtrace.history.entries import LayerEntry
from bendtrace.history.run_log import RunLog
from bendtrace.history.validate import MISSING, Kept, Validator
from bendtrace.tape.tape import Op, refs_in

__all__ = ["Again", "Unable", "again_of"]


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
