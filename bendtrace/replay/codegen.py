"""Writing the Python of a replay: a check of the input guards, and straight-line runs.

Names that come from a model never reach the generated source: values are `v<op>`, parts
`p<part>`, and everything else - functions, constants, keys - is bound by a generated name.
"""

from __future__ import annotations

import builtins
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor

from bendtrace.recording.contexts import Context, ContextSwitch
from bendtrace.recording.functions import FLEETING, name_of
from bendtrace.recording.objects import build
from bendtrace.recording.recorder import Recording
from bendtrace.recording.sites import Site
from bendtrace.recording.statements import is_under_handler
from bendtrace.recording.structure import Existing, Instance
from bendtrace.recording.surroundings import (
    Access,
    Array,
    AttributeKey,
    Change,
    Part,
    PartKind,
    exact_items,
    exact_members,
    identical,
)
from bendtrace.recording.tape import (
    Guard,
    ModuleCall,
    Op,
    OpKind,
    Ref,
    Tape,
    Test,
    refs_in,
)
from bendtrace.replay.analysis import Analysis, GuardKind, counts, is_read

__all__ = [
    "Check",
    "CheckWriter",
    "Code",
    "Departure",
    "Source",
    "define",
    "gives_nothing",
    "may_be_caught",
    "needed_for",
    "write_run",
]

_INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.lshift: "<<", operator.rshift: ">>",
    operator.and_: "&", operator.or_: "|", operator.xor: "^", operator.eq: "==",
    operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_LITERALS = frozenset({type(None), bool, int, str, type(...)})
# Arithmetic that cannot raise on the numbers it was recorded for, so that it can be left out.
_HARMLESS = frozenset(
    {
        operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.pos,
        abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    }
)  # fmt: skip
_GETTERS = {
    getattr(Tensor, name).__get__: name
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "T", "mT", "data")
}


class Departure:
    """How a run ends that does not reach its end: a guard does not hold.

    Attributes:
        guard: number of the guard on the tape of the run's recording.
        outcome: what the test gave instead of what was recorded.
        values: the names and values of the run so far.
    """

    __slots__ = ("guard", "outcome", "values")

    def __init__(self, guard: int, outcome: Any, values: dict[str, Any]) -> None:
        self.guard = guard
        self.outcome = outcome
        self.values = values


class Code:
    """A generated function.

    Attributes:
        source: its text.
        function: the function.
        op_of_line: for each line of the text, the op that it carries out.
        emitted: how many lines stand before each op that has one.
    """

    def __init__(self, source: Source, name: str) -> None:
        self.text = "\n".join(source.lines) + "\n"
        code = compile(self.text, f"<bendtrace {name}>", "exec")
        exec(code, source.names)
        self.function: Callable[..., Any] = source.names[name]
        self.op_of_line = source.op_of_line
        self.emitted = source.emitted


class Source:
    """Lines of generated Python and the names bound in them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "__builtins__": builtins, "build": build, "Departure": Departure,
            "identical": identical, "Switch": ContextSwitch,
        }  # fmt: skip
        self.op_of_line: dict[int, int] = {}
        self.emitted: set[int] = set()
        self.indent = 0
        self.shared: frozenset[int] = frozenset()  # lists and dicts that are used twice
        self._constants: dict[int, str] = {}
        self._built: dict[int, str] = {}

    def line(self, text: str, op: int | None = None) -> None:
        """Add a line, carrying out `op`."""
        self.lines.append("    " * self.indent + text)
        if op is not None:
            self.op_of_line[len(self.lines)] = op

    def constant(self, value: Any) -> str:
        """Return an expression for a value that does not change."""
        return repr(value) if type(value) in _LITERALS else self.bound(value)

    def bound(self, value: Any) -> str:
        """Return a name that is bound to the value itself."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
            self.names[name] = value
        return name

    def part(self, part: Part) -> str:
        """Return the name of a part (which a line has to define unless it is fixed)."""
        if part.kind is PartKind.ALIAS:
            return self.part(part.value)
        name = f"p{part.index}"
        if part.access is Access.FIXED:
            self.names[name] = part.value
        return name

    def reach(self, part: Part) -> str:
        """Return an expression that takes a part from its parent."""
        if part.access is Access.ROOT:
            return f"A[{part.key}]"
        assert part.parent is not None
        parent = self.part(part.parent)
        if part.access is Access.ITEM:
            kind = part.parent.type
            if issubclass(kind, dict) and kind.__getitem__ is not dict.__getitem__:
                return f"dict.__getitem__({parent}, {self.constant(part.key)})"
            return f"{parent}[{self.constant(part.key)}]"
        if part.access is Access.DICT:
            return f"{parent}.__dict__[{str(part.key)!r}]"
        if part.access is Access.CELL:
            return f"{parent}.cell_contents"
        return f"getattr({parent}, {str(part.key)!r})"

    def value(self, value: Any) -> str:
        """Return an expression for recorded arguments."""
        kind = type(value)
        if kind is Ref:
            return f"v{value.index}"
        if kind is tuple:
            return "(" + "".join(self.value(item) + "," for item in value) + ")"
        if kind is list or kind is dict:
            return self._container(value)
        if kind is slice and any(refs_in(value)):
            parts = ", ".join(map(self.value, (value.start, value.stop, value.step)))
            return f"slice({parts})"
        if kind is Existing:
            return self.part(value.part)
        if kind is Instance:
            return self._instance(value)
        if kind is Array:
            return f"{self.bound(value.value)}.copy()"
        return self.constant(value)

    def _container(self, value: Any) -> str:
        name = self._built.get(id(value))
        if name is not None:
            return name
        if type(value) is list:
            text = "[" + ", ".join(map(self.value, value)) + "]"
        else:
            items = (f"{self.constant(k)}: {self.value(v)}" for k, v in value.items())
            text = "{" + ", ".join(items) + "}"
        if id(value) not in self.shared:
            return text
        name = self._built[id(value)] = f"o{len(self._built)}"
        self.line(f"{name} = {text}")
        return name

    def _instance(self, instance: Instance) -> str:
        name = self._built.get(id(instance))
        if name is None:
            items, attributes = self.value(instance.items), self.value(instance.attributes)
            name = self._built[id(instance)] = f"o{len(self._built)}"
            self.line(f"{name} = build({self.constant(instance.cls)}, {items}, {attributes})")
        return name

    def call(self, op: Op) -> str:
        """Return an expression (or, for an item assignment, a statement) that does an op."""
        args, target = op.args, op.target
        if op.kind is OpKind.SCALAR and target in _INFIX:
            return f"({self.value(args[0])} {_INFIX[target]} {self.value(args[1])})"
        if target is operator.getitem or (target is Tensor.__getitem__ and not op.kwargs):
            return f"{self.value(args[0])}[{self.value(args[1])}]"
        if target is Tensor.__setitem__ and type(args[0]) is Ref:
            return f"{self.value(args[0])}[{self.value(args[1])}] = {self.value(args[2])}"
        if target in _GETTERS and type(args[0]) is Ref:
            return f"{self.value(args[0])}.{_GETTERS[target]}"
        given = [self.value(value) for value in args]
        if all(name.isidentifier() and not iskeyword(name) for name in op.kwargs):
            given += [f"{name}={self.value(value)}" for name, value in op.kwargs.items()]
        else:
            given.append(f"**{self.value(op.kwargs)}")
        return f"{self.constant(target)}({', '.join(given)})"


# The check of the input guards


@dataclass(frozen=True)
class Check:
    """One thing that is checked before a run.

    Attributes:
        text: what is wrong if it fails.
        part: what it is about; None for checks about several.
        guard: number of the guard on the tape, for a condition that a flow step put.
    """

    text: str
    part: Part | None = None
    guard: int | None = None


class CheckWriter:
    """Writes `check(A)`: None if all input guards hold, else the number of one that fails.

    Args:
        recording: the run that the guards come from.
        analysis: its guards, sorted.
        ignored: parts that are not checked, because the run is going to be live anyway.

    Attributes:
        checks: what each number stands for.
    """

    def __init__(
        self, recording: Recording, analysis: Analysis, ignored: frozenset[Part] = frozenset()
    ) -> None:
        self.checks: list[Check] = []
        self._recording = recording
        self._analysis = analysis
        self._ignored = ignored

    def write(self) -> Source:
        """Return the source of `check` and of `compare`, which it calls when in doubt."""
        surroundings = self._recording.surroundings
        simple = [part for part in surroundings.parts if self._is_simple(part)]
        mappings = [
            part
            for part in surroundings.parts
            if part.access is Access.FIXED
            and part.kind is PartKind.DICT
            and part not in self._ignored
        ]
        source = Source()
        self._write_measurement(source, mappings)
        self._write_comparison(source, simple)
        source.line("def check(A):")
        source.indent = 1
        source.line("if list(map(len, mappings)) != lengths:")
        source.line("    number = measure()")
        source.line("    if number is not None: return number")
        source.line("if not all(map(is_, chain(map(call, getters, holders)), expected)):")
        source.line("    number = compare()")
        source.line("    if number is not None: return number")
        skipped = {id(part) for part in simple} | {id(part) for part in mappings}
        for part in surroundings.parts:
            if id(part) not in skipped and part not in self._ignored:
                self._write_part(source, part)
        distinct = [p for p in surroundings.parts if p.is_argument and p.kind in _DISTINCT]
        if len(distinct) > 1:
            same = ", ".join(f"id({source.part(part)})" for part in distinct)
            number = self._note("two arguments are now one and the same object")
            source.line(f"if len({{{same}}}) != {len(distinct)}: return {number}")
        if surroundings.hook_dicts:
            source.names["hooks"] = surroundings.hook_dicts
            if any(surroundings.hook_dicts):  # live until they are removed
                gone = self._note("the modules have no hooks any more")
                source.line(f"if not any(hooks): return {gone}")
            else:
                source.line(f"if any(hooks): return {self._note('a module has hooks')}")
        self._write_conditions(source)
        source.line("return None")
        return source

    def _note(self, text: str, part: Part | None = None, guard: int | None = None) -> int:
        self.checks.append(Check(text, part, guard))
        return len(self.checks) - 1

    # A model has hundreds of plain attributes that hardly ever change. In the usual case each
    # is the very object that it was, which the interpreter finds out without bytecode.

    def _is_simple(self, part: Part) -> bool:
        holder = part.parent
        return (
            holder is not None
            and holder.access is Access.FIXED
            and holder.kind in (PartKind.DICT, PartKind.IDENTITY)
            and part.access is Access.ITEM
            and part.kind in (PartKind.PLAIN, PartKind.MODULE, PartKind.IDENTITY)
            and part not in self._ignored
        )

    def _write_measurement(self, source: Source, mappings: list[Part]) -> None:
        source.line("def measure():")
        source.indent = 1
        for part in mappings:
            self._write_part(source, part)
        source.line("return None")
        source.indent = 0
        source.names.update(
            mappings=[part.value for part in mappings], lengths=[part.size for part in mappings]
        )

    def _write_comparison(self, source: Source, simple: list[Part]) -> None:
        held: dict[int, list[Part]] = {}
        for part in simple:
            assert part.parent is not None
            held.setdefault(part.parent.index, []).append(part)
        getters, holders, expected = [], [], []
        source.line("def compare():")
        source.indent = 1
        for parts in held.values():
            # A getter of a single key would not return a tuple.
            chosen = parts if len(parts) > 1 else parts * 2
            getters.append(operator.itemgetter(*(part.key for part in chosen)))
            assert parts[0].parent is not None
            holders.append(parts[0].parent.value)
            expected += [part.value for part in chosen]
            for part in parts:
                self._write_part(source, part)
        source.line("return None")
        source.indent = 0
        source.names.update(
            getters=getters, holders=holders, expected=expected, is_=operator.is_,
            chain=chain.from_iterable, call=_call,
        )  # fmt: skip

    def _write_part(self, source: Source, part: Part) -> None:
        name, kind, label = source.part(part), part.kind, part.label

        def fail_if(condition: str, text: str) -> None:
            source.line(f"if {condition}: return {self._note(text, part)}")

        if part.access is Access.FIXED:
            if kind is PartKind.DICT:
                fail_if(f"len({name}) != {part.size}", f"{label} has gained or lost attributes")
                return
            if kind in _SAME_FOR_EVER:
                return
        elif kind is not PartKind.ALIAS:
            source.line(f"{name} = {source.reach(part)}")
        if kind is PartKind.PLAIN:
            wrong = f"{label} is not {part.value!r}"
            if part.value is None or type(part.value) is bool:
                fail_if(f"{name} is not {part.value}", wrong)
            else:
                constant = source.bound(part.value)
                fail_if(f"{name} is not {constant} and not identical({name}, {constant})", wrong)
        elif kind is PartKind.ALIAS:
            first = part.value
            if first.kind in (PartKind.MODULE, PartKind.IDENTITY):
                name = source.constant(first.value)
            wrong = f"{label} is not the same as {first.label}"
            fail_if(f"{source.reach(part)} is not {name}", wrong)
        elif kind in (PartKind.MODULE, PartKind.IDENTITY):
            fail_if(f"{name} is not {source.constant(part.value)}", f"{label} was replaced")
        else:
            exact = source.constant(part.type)
            fail_if(f"type({name}) is not {exact}", f"{label} is not a {part.type.__name__}")
        if kind is PartKind.TENSOR:
            _check_tensor(source, part, self._analysis, fail_if)
        elif kind in (PartKind.LIST, PartKind.TUPLE):
            fail_if(f"len({name}) != {part.size}", f"{label} does not have {part.size} items")
        elif kind is PartKind.DICT:
            keys = tuple(key for key in part.size if not isinstance(key, AttributeKey))
            fail_if(f"tuple({name}) != {source.constant(keys)}", f"{label} has other keys")
        elif kind is PartKind.OBJECT:
            held = sum(1 for key in part.size if key.access is Access.DICT)
            if held:
                fail_if(f"len({name}.__dict__) != {held}", f"{label} has gained or lost attributes")
        elif kind in _WHOLE:
            reader = source.constant(_WHOLE[kind])
            fail_if(
                f"{source.constant(part.size)} != {reader}({name})", f"{label} has other content"
            )

    def _write_conditions(self, source: Source) -> None:
        ops = self._recording.tape.ops
        guards = [
            (number, guard)
            for number, guard in enumerate(self._recording.tape.guards)
            if self._analysis.kinds[number] is GuardKind.INPUT
        ]
        needed = needed_for(ops, (guard.index for _, guard in guards if not counts(guard, ops)))
        for _, guard in guards:
            if counts(guard, ops):
                needed |= needed_for(ops, (ref.index for ref in refs_in(ops[guard.index].args)))
        # In the tape's order: a condition may protect the arithmetic of a later one.
        events: list[tuple[int, int, Any]] = [(index, -1, ops[index]) for index in needed]
        events += [(guard.position - 1, number, guard) for number, guard in guards]
        tested: set[tuple[Any, ...]] = set()
        for _, number, event in sorted(events, key=lambda item: item[:2]):
            if number < 0:
                define(source, event)
            elif _key(event) not in tested:
                tested.add(_key(event))
                failed = self._note("", guard=number)
                source.line(f"if {_fails(source, event, ops)}: return {failed}", event.index)


_WHOLE = {PartKind.SET: exact_members, PartKind.LARGE: exact_items, PartKind.ARRAY: Array}


def _call(getter: Callable[[Any], Any], holder: Any) -> Any:
    return getter(holder)


_call = getattr(operator, "call", _call)  # since Python 3.11
_DISTINCT = (PartKind.TENSOR, PartKind.LIST, PartKind.DICT, PartKind.OBJECT)
_SAME_FOR_EVER = frozenset({PartKind.MODULE, PartKind.IDENTITY, PartKind.ALIAS, PartKind.TUPLE})


def _check_tensor(
    source: Source, part: Part, analysis: Analysis, fail_if: Callable[[str, str], None]
) -> None:
    name, facts, label = source.part(part), part.size, part.label
    if part.is_argument or part in analysis.typed_state:
        fail_if(
            f"{name}.dtype is not {source.constant(facts.dtype)}",
            f"{label} is not of dtype {facts.dtype}",
        )
        fail_if(
            f"{name}.device != {source.constant(facts.device)}",
            f"{label} is not on device {facts.device}",
        )
        fail_if(
            f"{name}.layout is not {source.constant(facts.layout)}",
            f"{label} is not {facts.layout}",
        )
    if part.is_argument or part in analysis.ranked_state:
        fail_if(f"{name}.dim() != {facts.rank}", f"{label} does not have {facts.rank} dimensions")
    if part.is_argument:
        held = f"len({name}.__dict__) != {facts.attributes}"
        fail_if(held if facts.attributes else f"{name}.__dict__", f"{label} has other attributes")
        fail_if(
            f"{name}.requires_grad is not {facts.requires_grad}",
            f"{label} {'does not require' if facts.requires_grad else 'requires'} grad",
        )


# Runs


def write_run(
    recording: Recording,
    analysis: Analysis,
    entry: Context,
    start: int = 0,
    before: Tape | None = None,
    available: frozenset[int] = frozenset(),
) -> Source:
    """Write `run(A, E)`: the ops from `start` on, with the data guards in between.

    Args:
        recording: the run to repeat.
        analysis: its guards, sorted.
        entry: grad mode and so on when the run begins.
        start: the first op to carry out; those before were, by another run, whose values
            come in `E`.
        before: the tape of that other run, which tested the guards that it has.
        available: ops before `start` whose values are in `E`.
    """
    return _RunWriter(recording, analysis, entry, start, before, available).write()


class _RunWriter:
    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        entry: Context,
        start: int,
        before: Tape | None,
        available: frozenset[int],
    ) -> None:
        self.recording = recording
        self.tape = recording.tape
        self.analysis = analysis
        self.entry = entry
        self.start = start
        self.available = available
        self.source = Source()
        # On the first path only what has to be tested in the run; further along a path that
        # branched off, the check before the run knew nothing of the guards.
        self.guards: dict[int, list[tuple[int, Guard]]] = {}
        tested: set[tuple[Any, ...]] = set()
        passed = before.guards if before is not None else ()
        known = {_key(guard) for guard in passed if guard.position < start}
        for number, guard in enumerate(self.tape.guards):
            if guard.position < start and _key(guard) in known:
                continue  # the other run tested it on its way
            in_run = start > 0 or analysis.kinds[number] is GuardKind.DATA
            if in_run and _key(guard) not in tested:
                tested.add(_key(guard))
                # An op before `start` is tested first thing; a later one where it happened.
                position = max(guard.position, start)
                self.guards.setdefault(position, []).append((number, guard))
        self.outputs = (recording.root.output, [change.value for change in recording.changes])

    def write(self) -> Source:
        source = self.source
        source.line("def run(A, E):")
        source.indent = 1
        needed = self._needed()
        last_use, last_guard = self._last_uses(needed), self._last_divergence()
        self._define_parts(needed)
        self._define_available(needed)
        switches = any(
            op.context != self.entry for op in self.tape.ops[self.start :] if op.kind is OpKind.CALL
        )
        if switches:
            source.line("switch = Switch()")
            source.line("try:")
            source.indent = 2
        current = self.entry
        kept: list[int] = []
        for position in range(self.start, len(self.tape.ops) + 1):
            for number, guard in self.guards.get(position, ()):
                self._depart_unless(number, guard)
            if position == last_guard:
                if self.available:
                    source.line("E.clear()")
                dead = [i for i in kept if last_use.get(i, -1) < position]
                if dead:
                    source.line("del " + ", ".join(f"v{i}" for i in dead))
                kept = [i for i in kept if last_use.get(i, -1) >= position]
            if position == len(self.tape.ops):
                break
            op = self.tape.ops[position]
            if position not in needed or op.kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if op.kind is OpKind.CALL and op.context != current:
                source.line(f"switch.to({source.constant(op.context)})")
                current = op.context
            self._carry_out(op)
            source.emitted.add(position)
            if position >= last_guard:
                self._free(op, position, last_use, kept)
            elif not _is_scalar(op) and op.raised is None and not gives_nothing(op):
                kept.append(position)
        self._finish()
        if switches:
            source.indent = 1
            source.line("finally:")
            source.line("    switch.restore()")
        return source

    def _needed(self) -> set[int]:
        """Ops to carry out, and the inputs and state among them."""
        roots: set[int] = {ref.index for ref in refs_in(self.outputs)}
        for listed in self.guards.values():
            for _, guard in listed:
                roots.add(guard.index)
                if guard.test in (Test.SAME, Test.OTHER):
                    roots.add(guard.expected)
        for op in self.tape.ops[self.start :]:
            if not self._droppable(op):
                roots.add(op.index)
        needed: set[int] = set()
        waiting = list(roots)
        while waiting:
            index = waiting.pop()
            if index in needed:
                continue
            needed.add(index)
            if index not in self.available:
                op = self.tape.ops[index]
                waiting += [ref.index for ref in refs_in((op.args, op.kwargs))]
        return needed

    def _last_divergence(self) -> int:
        """The last position at which the run can depart; until there, all values are kept."""
        caught = (
            op.index
            for op in self.tape.ops[self.start :]
            if may_be_caught(op, self.recording) and op.kind in (OpKind.CALL, OpKind.SCALAR)
        )
        return max(max(self.guards, default=-1), max(caught, default=-1))

    def _droppable(self, op: Op) -> bool:
        """Whether an op that nothing needs can be left out without anybody noticing."""
        if op.kind in (OpKind.INPUT, OpKind.STATE):
            return True
        if op.raised is not None or not self.analysis.fixed_metadata:
            return False
        if op.kind is OpKind.CALL and name_of(op.target) in FLEETING:
            return False
        return is_read(op) or (op.kind is OpKind.SCALAR and op.target in _HARMLESS)

    def _last_uses(self, needed: set[int]) -> dict[int, int]:
        last: dict[int, int] = {}
        for index in sorted(needed):
            op = self.tape.ops[index]
            for ref in refs_in((op.args, op.kwargs)):
                last[ref.index] = max(index, last.get(ref.index, -1))
        for position, listed in self.guards.items():
            for _, guard in listed:
                used = [guard.index]
                if guard.test in (Test.SAME, Test.OTHER):
                    used.append(guard.expected)
                for index in used:
                    last[index] = max(position, last.get(index, -1))
        for ref in refs_in(self.outputs):
            last[ref.index] = len(self.tape.ops) + 1
        return last

    def _free(self, op: Op, position: int, last_use: dict[int, int], kept: list[int]) -> None:
        """Forget what nothing uses any more, as the model's own variables would."""
        used = {ref.index for ref in refs_in((op.args, op.kwargs))} | {op.index}
        dead = [
            index
            for index in sorted(used)
            if last_use.get(index, -1) <= position
            and not _is_scalar(self.tape.ops[index])
            and (index >= self.start or index in kept)
            and self.tape.ops[index].kind is OpKind.CALL
            and self.tape.ops[index].raised is None
            and not gives_nothing(self.tape.ops[index])
        ]
        if dead:
            self.source.line("del " + ", ".join(f"v{index}" for index in dead))

    def _define_parts(self, needed: set[int]) -> None:
        """Take the arguments and state that are used out of their containers."""
        wanted: set[int] = set()
        waiting = [self.tape.ops[i].target for i in needed if self._is_part(i)]
        waiting += [e.part for e in _existing_in(self.outputs)]
        for index in needed - self.available:
            op = self.tape.ops[index]
            waiting += [e.part for e in _existing_in((op.args, op.kwargs))]
        waiting += [change.part for change in self.recording.changes]
        while waiting:
            part = waiting.pop()
            part = part.value if part.kind is PartKind.ALIAS else part
            if part.index not in wanted:
                wanted.add(part.index)
                if part.parent is not None:
                    waiting.append(part.parent)
        for part in self.recording.surroundings.parts:
            if part.index in wanted:
                name = self.source.part(part)
                if part.access is not Access.FIXED:
                    self.source.line(f"{name} = {self.source.reach(part)}")
        for index in sorted(needed):
            if self._is_part(index):
                self.source.line(f"v{index} = {self.source.part(self.tape.ops[index].target)}")
                self.source.emitted.add(index)

    def _is_part(self, index: int) -> bool:
        op = self.tape.ops[index]
        return index not in self.available and op.kind in (OpKind.INPUT, OpKind.STATE)

    def _define_available(self, needed: set[int]) -> None:
        """Take over values, and compute the numbers that the other run had left out."""
        for index in sorted(needed):
            if index >= self.start:
                break
            op = self.tape.ops[index]
            if index in self.available:
                self.source.line(f"v{index} = E['v{index}']")
            elif op.kind not in (OpKind.INPUT, OpKind.STATE):
                define(self.source, op)
                self.source.emitted.add(index)

    def _carry_out(self, op: Op) -> None:
        source = self.source
        call = source.call(op)
        statement = call if gives_nothing(op) else f"v{op.index} = {call}"
        if op.raised is None:
            source.line(statement, op.index)
            return
        # The model caught this. If it does not happen again, the path is another.
        number = -1 - op.index
        source.line(f"try: {statement}", op.index)
        source.line(f"except {source.constant(op.raised)}: pass")
        source.line(f"else: return Departure({number}, None, locals())")

    def _depart_unless(self, number: int, guard: Guard) -> None:
        source = self.source
        outcome = _outcome(guard)
        source.line(
            f"if {_fails(source, guard)}: return Departure({number}, {outcome}, locals())",
            guard.index,
        )

    def _finish(self) -> None:
        source = self.source
        source.shared = _shared_in(self.outputs)
        values = [source.value(change.value) for change in self.recording.changes]
        for change, value in zip(self.recording.changes, values, strict=True):
            source.line(_store(source, change, value))
        output = source.value(self.recording.root.output)
        source.line(f"return {output}")


def _shared_in(value: Any) -> frozenset[int]:
    """Find the lists and dicts that are in a value more than once."""
    counts: Counter[int] = Counter()

    def count(item: Any) -> None:
        if isinstance(item, (list, dict)):
            counts[id(item)] += 1
        if isinstance(item, Instance):
            count(item.items)
            count(item.attributes)
        elif isinstance(item, dict):
            for inner in item.values():
                count(inner)
        elif isinstance(item, (tuple, list)):
            for inner in item:
                count(inner)

    count(value)
    return frozenset(key for key, times in counts.items() if times > 1)


def _store(source: Source, change: Change, value: str) -> str:
    holder = source.part(change.part)
    if isinstance(change.key, AttributeKey):
        place = f"{holder}.__dict__[{str(change.key)!r}]"
        if change.key.access is Access.ATTRIBUTE:
            if change.deleted:
                return f"delattr({holder}, {str(change.key)!r})"
            return f"object.__setattr__({holder}, {str(change.key)!r}, {value})"
    elif change.key is None:
        place = f"{holder}[:]"
    else:
        place = f"{holder}[{source.constant(change.key)}]"
    return f"del {place}" if change.deleted else f"{place} = {value}"


def _existing_in(value: Any) -> Iterable[Existing]:
    if isinstance(value, Existing):
        yield value
    elif isinstance(value, Instance):
        yield from _existing_in((value.items, value.attributes))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _existing_in(item)
    elif isinstance(value, dict):
        yield from _existing_in(tuple(value.values()))


def needed_for(ops: list[Op], roots: Iterable[int]) -> set[int]:
    """Return the ops that the values of some depend on, these included."""
    needed: set[int] = set()
    waiting = list(roots)
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += [ref.index for ref in refs_in((ops[index].args, ops[index].kwargs))]
    return needed


def define(source: Source, op: Op) -> None:
    """Add the line that gives an op its value."""
    if op.kind in (OpKind.INPUT, OpKind.STATE):
        source.line(f"v{op.index} = {source.part(op.target)}", op.index)
    else:
        source.line(f"v{op.index} = {source.call(op)}", op.index)


def may_be_caught(op: Op, recording: Recording) -> bool:
    """Whether the model goes on, or leaves traces, when an op raises.

    That is so under a handler, and where it changes things outside: a replay changes them at
    its end, the model's own Python before the error.
    """
    if op.kind is OpKind.SCALAR:
        if op.target in _HARMLESS:
            return False
    elif op.kind is not OpKind.CALL:
        return False
    if op.raised is not None or recording.changes:
        return True
    site: Site | None = op.site
    scope: ModuleCall | None = op.scope
    while site is not None:
        # Most code has no exception table at all, which saves looking any further.
        if any(code.co_exceptiontable for code, _ in site.chain) and any(
            map(is_under_handler, site.guarded)
        ):
            return True
        site, scope = (scope.site, scope.parent) if scope is not None else (None, None)
    return False


def _key(guard: Guard) -> tuple[Any, ...]:
    """What makes two guards the same test."""
    other = guard.expected if guard.test in (Test.SAME, Test.OTHER) else None
    return guard.index, guard.test, other


def _is_scalar(op: Op) -> bool:
    return type(op.meta) in (int, float, bool, torch.dtype, torch.device) or is_read(op)


def gives_nothing(op: Op) -> bool:
    """Whether an op is written as a statement, without a value."""
    return op.target is Tensor.__setitem__ and type(op.args[0]) is Ref


def _fails(source: Source, guard: Guard, ops: list[Op] | None = None) -> str:
    if ops is not None and counts(guard, ops):
        tensor, *dim = ops[guard.index].args
        dim = dim or [ops[guard.index].kwargs.get("dim", 0)]
        return f"{source.value(tensor)}.size({source.value(dim[0])}) != {guard.expected}"
    name = f"v{guard.index}"
    if guard.test is Test.TRUTH:
        return f"not {name}" if guard.expected else name
    if guard.test is Test.LENGTH:
        return f"len({name}) != {guard.expected}"
    if guard.test is Test.SAME:
        return f"{name} is not v{guard.expected}"
    if guard.test is Test.OTHER:
        return f"{name} is v{guard.expected}"
    expected = source.constant(guard.expected)
    if type(guard.expected) in (bool, type(None), torch.dtype, torch.layout):
        return f"{name} is not {expected}"
    if type(guard.expected) is int:
        return f"{name} != {expected} or type({name}) is not int"
    return f"not identical({name}, {expected})"


def _outcome(guard: Guard) -> str:
    name = f"v{guard.index}"
    if guard.test is Test.TRUTH:
        return str(not guard.expected)
    if guard.test is Test.LENGTH:
        return f"len({name})"
    return "None" if guard.test in (Test.SAME, Test.OTHER) else name
