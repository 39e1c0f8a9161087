"""Generated Python: lines, the names bound in them, and how an op is written.

Names that come from a model never reach the generated source: values are `v<op>`, parts
`p<part>`, and everything else - functions, constants, keys - is bound by a generated name.
"""

from __future__ import annotations

import builtins
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bendtrace.engine.guard_kinds import asks_for_slices
from bendtrace.python.computations import item_of
from bendtrace.python.lazy import LazyModule
from bendtrace.tape.captured import (
    UNSET,
    Access,
    Array,
    Captured,
    CaptureKind,
    identical,
    stored_item,
)
from bendtrace.tape.contexts import Context, ContextSwitch, forget_casts
from bendtrace.tape.guards import type_name_of
from bendtrace.tape.structure import Construction, Existing, FixedObject, Instance, build_instance
from bendtrace.tape.tape import Guard, Op, OpKind, Ref, Stop
from bendtrace.watch.monkeypatches import monkeypatches

if TYPE_CHECKING:
    from bendtrace.engine import cache_growth
else:
    cache_growth = LazyModule("bendtrace.engine.cache_growth")

INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.lshift: "<<", operator.rshift: ">>",
    operator.and_: "&", operator.or_: "|", operator.xor: "^", operator.eq: "==",
    operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_LITERALS = frozenset({type(None), bool, int, str, type(...)})
_GETTERS = {
    getattr(Tensor, name).__get__: name
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "T", "mT", "data")
}
_NEW = frozenset({object.__new__, dict.__new__})  # which make objects without anything in them


def may_be_direct(op: Op) -> bool:
    """Return whether an op calls Python of torch's, which may have an equivalent in C++."""
    target = op.target
    return type(target) is FunctionType and target.__module__ in IN_PYTHON


IN_PYTHON = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor"})


@dataclass(slots=True, eq=False)
class Departure:
    """The early end of a run, because a guard does not hold or an op raised."""

    stop: Stop  # the guard, on the tape of the run's recording, or the op that raised
    outcome: Any  # what the test gave instead of what was recorded
    values: dict[str, Any]  # the names and values of the run so far


class Code:
    """A generated function."""

    @cached_property
    def places(self) -> frozenset[Any]:
        """Where it reads tensors."""
        return cache_growth.tensor_places(self.taken)

    def __init__(self, source: GeneratedSource, name: str) -> None:
        self.text: str = "\n".join(source.lines) + "\n"
        source.names["__op_of_line__"] = source.op_of_line
        code = compile(self.text, f"<bendtrace {name}>", "exec")
        exec(code, source.names)
        self.function: Callable[..., Any] = source.names[name]
        self.op_of_line: dict[int, int] = source.op_of_line  # the op of each line of the text
        self.emitted: set[int] = source.emitted  # how many lines stand before each op that has one
        self.taken: list[Captured] = source.taken  # the parts that it takes out of their containers


class EquivalentCall(NamedTuple):
    """A call that is equivalent to another one."""

    target: Any
    # Its arguments, as in `Op.args`; a function among them is called to compute its argument.
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})  # its keyword arguments
    # The argument that the call returns unchanged, unless it is a nested tensor or a dispatch mode
    # wants to see the call; None if the call computes something.
    gives_back: Ref | None = None


class TorchSetting(NamedTuple):
    """An argument that the function asks torch for."""

    function: Callable[[], Any]


class GeneratedSource:
    """Lines of generated Python and the names bound in them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "__builtins__": builtins, "build": build_instance, "Departure": Departure,
            "identical": identical, "kind_of": type_name_of, "Switch": ContextSwitch,
            "forget_casts": forget_casts,
        }  # fmt: skip
        self.op_of_line: dict[int, int] = {}
        self.emitted: set[int] = set()
        self.taken: list[Captured] = []
        self.indent: int = 0
        self.shared: frozenset[int] = frozenset()  # containers that are used twice
        self._taken: set[int] = set()  # parts that have their names
        self._constants: dict[int, str] = {}
        self._built: dict[int, str] = {}

    def begin(self, head: str) -> None:
        """Begin a function, in which no part has its name yet."""
        self._taken.clear()
        self.indent = 0
        self.line(f"def {head}:")
        self.indent = 1

    def take(self, parts: Iterable[Captured]) -> None:
        """Add the lines that give parts their names, after what they are reached from."""
        wanted: dict[int, Captured] = {}
        waiting = list(parts)
        while waiting:
            part = waiting.pop()
            part = part.value if part.kind is CaptureKind.ALIAS else part
            if part.index not in self._taken:
                self._taken.add(part.index)
                wanted[part.index] = part
                waiting += () if part.parent is None else (part.parent,)
        for _, part in sorted(wanted.items()):
            self.taken.append(part)
            name = self.part(part)
            if part.access is not Access.FIXED:
                self.line(f"{name} = {self.reach(part)}")

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

    def part(self, part: Captured) -> str:
        """Return the name of a part (which a line has to define unless it is fixed)."""
        if part.kind is CaptureKind.ALIAS:
            return self.part(part.value)
        name = f"p{part.index}"
        if part.access is Access.FIXED:
            self.names[name] = part.value
        return name

    def reach(self, part: Captured) -> str:
        """Return an expression that takes a part from its parent."""
        if part.access is Access.ROOT:
            return f"A[{part.key}]"
        assert part.parent is not None
        parent = self.part(part.parent)
        if part.access is Access.ITEM:
            kind = part.parent.type
            if issubclass(kind, dict) and (
                kind.__getitem__ is not dict.__getitem__ or hasattr(kind, "__missing__")
            ):
                return f"{self.bound(stored_item)}({parent}, {self.constant(part.key)})"
            return f"{parent}[{self.constant(part.key)}]"
        if part.access is Access.DICT:
            return f"{parent}.__dict__[{part.key.name!r}]"
        if part.access is Access.CELL:
            return f"{parent}.cell_contents"
        if part.access is Access.CONTEXT:
            return f"{parent}.get({self.bound(UNSET)})"
        return f"getattr({parent}, {part.key.name!r})"

    def name(self, index: int) -> str:
        """Return the name of the value of an op."""
        return f"v{index}"

    def value(self, value: Any) -> str:
        """Return an expression for recorded arguments."""
        kind = type(value)
        if kind is Ref:
            return self.name(value.index)
        if kind is tuple or kind is list or kind is dict:
            return self._container(value)
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            if not _LITERALS.issuperset(map(type, bounds)):
                return f"slice({', '.join(map(self.value, bounds))})"
        if kind is Existing:
            return self.part(value.part)
        if kind is Instance:
            return self._instance(value)
        if kind is Construction:
            return self._construction(value)
        if kind is FixedObject:
            return self.bound(value.value)
        if kind is Array:
            return self._array(value)
        if kind is TorchSetting:
            return f"{self.bound(value.function)}()"
        return self.constant(value)

    def _container(self, value: Any) -> str:
        name = self._built.get(id(value))
        if name is not None:
            return name
        if type(value) is tuple:
            text = "(" + "".join(self.value(item) + "," for item in value) + ")"
        elif type(value) is list:
            text = "[" + ", ".join(map(self.value, value)) + "]"
        else:
            items = (f"{self.constant(k)}: {self.value(v)}" for k, v in value.items())
            text = "{" + ", ".join(items) + "}"
        if id(value) not in self.shared:
            return text
        name = self._built[id(value)] = f"o{len(self._built)}"
        self.line(f"{name} = {text}")
        return name

    def _array(self, array: Array) -> str:
        name = self._built.get(id(array))
        if name is None:
            name = self._built[id(array)] = f"o{len(self._built)}"
            self.line(f"{name} = {self.bound(array.value)}.copy('K')")
            if not array.is_writeable:
                self.line(f"{name}.flags.writeable = False")
        return name

    def _construction(self, made: Construction) -> str:
        name = self._built.get(id(made))
        if name is None:
            args = ", ".join(map(self.value, made.args))
            name = self._built[id(made)] = f"o{len(self._built)}"
            self.line(f"{name} = {self.constant(made.maker)}({args})")
        return name

    def _instance(self, instance: Instance) -> str:
        name = self._built.get(id(instance))
        if name is not None:
            return name
        new, cls = instance.cls.__new__, self.constant(instance.cls)
        if new not in _NEW:
            given = f"{self.value(instance.items)}, {self.value(instance.attributes)}"
            name = self._built[id(instance)] = f"o{len(self._built)}"
            self.line(f"{name} = build({cls}, {given})")
            return name
        # What `build_instance` does, step by step.
        base: Any = OrderedDict if issubclass(instance.cls, OrderedDict) else dict
        items = [(self.constant(k), self.value(v)) for k, v in (instance.items or {}).items()]
        attributes = [(key, self.value(value)) for key, value in instance.attributes.items()]
        name = self._built[id(instance)] = f"o{len(self._built)}"
        self.line(f"{name} = {self.constant(new)}({cls})")
        for key, value in items:
            self.line(f"{self.constant(base.__setitem__)}({name}, {key}, {value})")
        own = [(key.name, value) for key, value in attributes if key.access is Access.DICT]
        if own:
            self.line(f"own = {name}.__dict__")
        for key, value in own:
            self.line(f"own[{key!r}] = {value}")
        for key, value in attributes:
            if key.access is not Access.DICT:
                self.line(f"object.__setattr__({name}, {key.name!r}, {value})")
        return name

    def call(self, op: Op) -> str:
        """Return an expression (or, for an item assignment, a statement) that does an op."""
        args, target = op.args, op.target
        if op.kind is OpKind.SCALAR and target in INFIX:
            return f"({self.value(args[0])} {INFIX[target]} {self.value(args[1])})"
        if op.kind is OpKind.CALL and monkeypatches():  # what follows would be looked up by name
            return self._called(target, args, op.kwargs)
        is_item = target is operator.getitem or target is item_of
        if is_item or (target is Tensor.__getitem__ and not op.kwargs):
            return f"{self.value(args[0])}[{self.value(args[1])}]"
        if target is Tensor.__setitem__ and type(args[0]) is Ref:
            return f"{self.value(args[0])}[{self.value(args[1])}] = {self.value(args[2])}"
        if target in _GETTERS and type(args[0]) is Ref:
            return f"{self.value(args[0])}.{_GETTERS[target]}"
        return self._called(target, args, op.kwargs)

    def direct(self, call: EquivalentCall) -> str:
        """Return an expression that makes a call in place of a recorded one.

        `watched` has to be defined where it says what is given back.
        """
        text = self._called(call.target, call.args, call.kwargs)
        if call.gives_back is None:
            return text
        name = self.value(call.gives_back)
        return f"{text} if watched or {name}.is_nested else {name}"

    def _called(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        given = [self.value(value) for value in args]
        if all(name.isidentifier() and not iskeyword(name) for name in kwargs):
            given += [f"{name}={self.value(value)}" for name, value in kwargs.items()]
        else:
            given.append(f"**{self.value(kwargs)}")
        return f"{self.constant(target)}({', '.join(given)})"


def dependencies_of(
    ops: list[Op],
    roots: Iterable[int],
    available: Collection[int] = (),
    same: Mapping[int, int] = MappingProxyType({}),
) -> set[int]:
    """Return the ops that the values of the roots depend on, these included.

    The values of `available` are there, whatever they depend on; `same` are ops whose values are
    those of others.
    """
    needed: set[int] = set()
    waiting = list(roots)
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            if index not in available:
                waiting += [same[index]] if index in same else ops[index].operands
    return needed


def define(source: GeneratedSource, op: Op) -> None:
    """Add the line that gives an op its value."""
    if op.is_given:
        source.line(f"v{op.index} = {source.part(op.target)}", op.index)
    else:
        source.line(f"v{op.index} = {source.call(op)}", op.index)


def gives_nothing(op: Op) -> bool:
    """Return whether an op is written as a statement, without a value."""
    return op.target is Tensor.__setitem__ and type(op.args[0]) is Ref


def fails(source: GeneratedSource, guard: Guard, ops: list[Op]) -> str:
    """Return an expression that is true if a guard, tested before the run, does not hold."""
    if asks_for_slices(guard, ops):
        return f"{slice_count(source, ops[guard.index])} != {guard.answer}"
    return guard.failure(source)


def slice_count(source: GeneratedSource, op: Op) -> str:
    """Return an expression for how many slices an op takes a tensor apart into."""
    tensor, *dim = op.args
    dim = dim or [op.kwargs.get("dim", 0)]
    return f"{source.value(tensor)}.size({source.value(dim[0])})"


# Splices: where a value of known code is passed through something that is inserted there.


@dataclass(frozen=True, eq=False)
class ValueSplice:
    """A function that a value is passed through.

    The result of the function takes the place of the value in all later code.
    """

    index: int  # the op that gave the value
    position: int  # how many ops come before
    guards: int  # how many guards come before
    context: Context | None  # grad mode and so on that the function runs under, if known
    function: Callable[[Any], Any]
    path: str  # the path of the node
    is_fit: bool  # whether code can be changed there

    def lies_in(self, after: int, stop: int | None) -> bool:
        """Return whether it belongs to the code between two guards (see `Schedule.of_segment`)."""
        return after < self.guards and (stop is None or self.guards <= stop)


class Unfit(Exception):
    """Something cannot be spliced in: a run with it has to be recorded."""


class Interrupted(Exception):
    """A call cannot go on behind a splice, so that the model's Python takes over there.

    So many ops and guards of the run come before the place. `unfit` is raised instead by a call
    that can begin again. `hand_on` is called before Python takes over.
    """

    def __init__(
        self,
        position: int,
        guards: int,
        unfit: Unfit | None = None,
        hand_on: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("the call goes on in Python")
        self.position: int = position
        self.guards: int = guards
        self.unfit: Unfit | None = unfit
        self.hand_on: Callable[[], None] = hand_on
