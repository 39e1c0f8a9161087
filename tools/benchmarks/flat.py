"""The flat list of calls that one would write by hand, to measure replays against.

No guards, no checks, nothing that is asked of the arguments or of torch's state: only the calls
that lead to the output, in their order, with the operators, methods and functions of the model,
and parameters and constants bound once.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

from torch import Tensor

from bendtrace.engine.guard_kinds import is_metadata_read
from bendtrace.engine.source import Code, GeneratedSource
from bendtrace.record.finish import Recording
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.tape.structure import Construction, Existing, Instance
from bendtrace.tape.tape import (
    Op,
    OpKind,
    Ref,
    refs_in,
)
from bendtrace.watch.functions import name_of

__all__ = ["flat_of"]

_OPERATORS = {
    **dict.fromkeys(("add", "__add__"), "{} + {}"), "__radd__": "{1} + {0}",
    **dict.fromkeys(("sub", "__sub__"), "{} - {}"), "__rsub__": "{1} - {0}",
    **dict.fromkeys(("mul", "__mul__"), "{} * {}"), "__rmul__": "{1} * {0}",
    **dict.fromkeys(("truediv", "__truediv__"), "{} / {}"), "__rtruediv__": "{1} / {0}",
    **dict.fromkeys(("floordiv", "__floordiv__"), "{} // {}"),
    **dict.fromkeys(("mod", "__mod__"), "{} % {}"),
    **dict.fromkeys(("matmul", "__matmul__"), "{} @ {}"),
    **dict.fromkeys(("eq", "__eq__"), "{} == {}"), **dict.fromkeys(("ne", "__ne__"), "{} != {}"),
    **dict.fromkeys(("lt", "__lt__"), "{} < {}"), **dict.fromkeys(("le", "__le__"), "{} <= {}"),
    **dict.fromkeys(("gt", "__gt__"), "{} > {}"), **dict.fromkeys(("ge", "__ge__"), "{} >= {}"),
    **dict.fromkeys(("and_", "__and__"), "{} & {}"), **dict.fromkeys(("or_", "__or__"), "{} | {}"),
    **dict.fromkeys(("getitem", "__getitem__"), "{}[{}]"),
    "neg": "-{}", "__neg__": "-{}", "__invert__": "~{}",
}  # fmt: skip


def flat_of(recording: Recording) -> Callable[..., Any]:
    """Return a function that makes the calls of a run, and is called as the model was.

    Args:
        recording: the run. Its sizes are computed as the model does; its branches are taken as
            they were, whatever the arguments.

    Raises:
        ValueError: for a run that no flat list of calls stands for: it changed its
            environment, caught errors, or went from one grad or autocast mode to another.

    Example:
        >>> import torch
        >>> from bendtrace.record.recorded_call import Signature, record
        >>> def model(x, scale):
        ...     return (x * scale).relu() if x.shape[0] > 1 else x
        >>> inputs = torch.ones(2), torch.full((2,), 3.0)
        >>> flat = flat_of(record(model, inputs, {}, Signature(model)))
        >>> flat(*inputs)
        tensor([3., 3.])
        >>> print(flat.source, end="")
        def flat(x, scale):
            r5 = x * scale
            r5 = r5.relu()
            return r5
    """
    return _Flat(recording).function()


class _Flat:
    def __init__(self, recording: Recording) -> None:
        tape = recording.tape
        if recording.changes or tape.blockers:
            raise ValueError("the run changed something, or cannot be repeated")
        if any(op.raised is not None for op in tape.ops):
            raise ValueError("the run caught an error")
        if len({op.context for op in tape.ops if op.kind is OpKind.CALL}) > 1:
            raise ValueError("the run went from one mode to another")
        self._recording = recording
        self._source = GeneratedSource()
        self._names: dict[int, str] = {}  # of the variable that an op's value is in
        self._built: dict[int, str] = {}  # objects of the output
        self._free: list[int] = []  # variables whose values nothing needs any more

    def function(self) -> Callable[..., Any]:
        source, ops = self._source, self._recording.tape.ops
        roots = [part for part in self._recording.environment.parts if part.access is Access.ROOT]
        source.line(f"def flat({', '.join(map(_parameter, roots))}):")
        source.indent = 1
        needed = self._needed()
        last = {r.index: op.index for op in ops if op.index in needed for r in _read(op)}
        last |= {ref.index: len(ops) for ref in refs_in(self._recording.root.output)}
        for op in ops:
            if op.index not in needed:
                continue
            if op.kind in (OpKind.INPUT, OpKind.STATE):
                self._names[op.index] = self._reach(op.target)
                continue
            text = self._call(op)
            for index in {ref.index for ref in _read(op)}:
                if last[index] == op.index and ops[index].kind not in (OpKind.INPUT, OpKind.STATE):
                    heapq.heappush(self._free, int(self._names[index][1:]))
            if "\n" in text:
                source.line(text.strip())
                continue
            variable = heapq.heappop(self._free) if self._free else op.index
            self._names[op.index] = f"r{variable}"
            source.line(f"r{variable} = {text}")
            if op.index not in last:
                heapq.heappush(self._free, variable)
        source.line(f"return {self._value(self._recording.root.output)}")
        code = Code(source, "flat")
        flat: Any = code.function
        flat.source = code.text
        return code.function

    def _needed(self) -> set[int]:
        """All calls, and the arithmetic and the sizes that these or the output come from."""
        ops = self._recording.tape.ops
        waiting = [ref.index for ref in refs_in(self._recording.root.output)]
        waiting += [op.index for op in ops if op.kind is OpKind.CALL and op.writes]
        waiting += [op.index for op in ops if op.kind is OpKind.CALL and not is_metadata_read(op)]
        needed: set[int] = set()
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += [ref.index for ref in _read(ops[index])]
        return needed

    def _reach(self, part: Captured) -> str:
        part = part.value if part.kind is CaptureKind.ALIAS else part
        if not part.is_argument:
            return self._source.bound(part.read(()))
        if part.access is Access.ROOT:
            return _parameter(part)
        assert part.parent is not None
        parent = self._reach(part.parent)
        if part.access is Access.ITEM:
            return f"{parent}[{self._source.constant(part.key)}]"
        return f"{parent}.{part.key}"

    def _value(self, value: Any) -> str:
        """Write recorded arguments with the variables that values are in by now."""
        kind = type(value)
        if kind is Ref:
            return self._names[value.index]
        if kind is tuple:
            return "(" + "".join(f"{self._value(item)}, " for item in value) + ")"
        if kind is list:
            return "[" + ", ".join(map(self._value, value)) + "]"
        if kind is dict:
            pairs = (f"{self._source.constant(k)}: {self._value(v)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        if kind is slice and any(refs_in(value)):
            bounds = map(self._value, (value.start, value.stop, value.step))
            return f"slice({', '.join(bounds)})"
        if kind is Existing:
            return self._reach(value.part)
        if kind is Instance:
            if id(value) not in self._built:
                cls, items = self._source.constant(value.cls), self._value(value.items)
                text = f"build({cls}, {items}, {self._value(value.attributes)})"
                self._built[id(value)] = name = f"o{len(self._built)}"
                self._source.line(f"{name} = {text}")
            return self._built[id(value)]
        if kind is Construction:
            args = ", ".join(map(self._value, value.args))
            return f"{self._source.constant(value.maker)}({args})"
        return self._source.value(value)

    def _call(self, op: Op) -> str:
        name, given = name_of(op.target), [self._value(value) for value in op.args]
        owner = getattr(op.target, "__objclass__", None) or getattr(op.target, "__self__", None)
        of_tensor = getattr(Tensor, name, None) is op.target
        if name in _OPERATORS and not op.kwargs and len(given) == _OPERATORS[name].count("{"):
            if of_tensor or getattr(operator, name, None) is op.target:
                return _OPERATORS[name].format(*given)
        if op.target is Tensor.__setitem__:
            return f"\n{given[0]}[{given[1]}] = {given[2]}"
        given += [f"{key}={self._value(value)}" for key, value in op.kwargs.items()]
        if given and getattr(op.target, "__name__", "") == "__get__" and owner is not None:
            return f"{given[0]}.{name}"
        if of_tensor and op.args and name.isidentifier() and type(op.args[0]) is Ref:
            return f"{given[0]}.{name}({', '.join(given[1:])})"
        return f"{self._source.constant(op.target)}({', '.join(given)})"


def _read(op: Op) -> list[Ref]:
    return list(refs_in((op.args, op.kwargs)))


def _parameter(part: Captured) -> str:
    name = part.label
    return name if name.isidentifier() and not iskeyword(name) else f"a{part.key}"
