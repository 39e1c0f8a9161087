"""The state of a run when it asks for a value: the position of its Python, and everything it holds.

Two runs that ask the same question in the same state continue in the same way, except for the
numbers inside tensors. The key of a state covers everything that can influence what Python does
next: the frames from the model's entry to the question with their variables and value stacks, all
mutable objects reachable from these, by content and identity, the changes made by the run so far,
and the settings of torch. Tensors and traced scalars are *holes*: numbered in the order in which
they are met, with the properties that replays assume, but without their numbers.

If something cannot be read, a state equals only the state reached by the same path.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import gc
import hashlib
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bendtrace.python import stacks
from bendtrace.python.bytecode import read_later
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import MACHINERY, PACKAGE
from bendtrace.record.effects import Effects
from bendtrace.record.encoding import ListOperand, scalars_in
from bendtrace.record.values import LOOKS, MARK, RunValues
from bendtrace.tape.captured import (
    PLAIN_TYPES,
    AttributeKey,
    attributes_of,
    bits_of,
    is_array,
    is_leaf,
    requires_grad,
)
from bendtrace.tape.contexts import current_context, current_settings, dispatch_modes
from bendtrace.tape.guards import IdentityGuard
from bendtrace.tape.scalars import RETIRED, TRACED, plain
from bendtrace.tape.structure import FUNCTION_METADATA, can_build, is_heap_type, read_partial
from bendtrace.tape.tape import Guard, OpKind, Ref, RunState, carries_array, map_refs
from bendtrace.watch.environment import Environment
from bendtrace.watch.functions import (
    OPERATORS,
    is_torchs_function,
    name_of,
    works_on_containers,
)
from bendtrace.watch.intercepts import FOLLOWING
from bendtrace.watch.kinds import is_constant
from bendtrace.watch.writes import storage_of

if TYPE_CHECKING:
    from bendtrace.insert.inserter import Inserter
    from bendtrace.record import array_functions
else:
    array_functions = LazyModule("bendtrace.record.array_functions")


class OperandProxy:
    """Replaces a function or an operand for one instruction, recorded in a way of `arrays.py`."""

    __slots__ = ("arrays", "operand", "way")

    def __init__(self, arrays: Any, operand: Any, way: str) -> None:
        self.arrays = arrays
        self.operand: Any = operand
        self.way: str = way


class StateReader:
    """Reads the states of one run, whose model was called by the outermost code.

    With `reads_all`, it reads all of them, including those that take long to read.
    """

    def __init__(
        self,
        values: RunValues,
        outermost: CodeType,
        reads_all: bool,
        inserter: Inserter | None,
    ) -> None:
        self._writer = writer = values.writer
        self._values = values
        self._environment = values.environment
        self._outermost = outermost
        self._reads_all = reads_all
        self._inserter = inserter
        self.effects: Effects = Effects(writer.tape)
        self._modes = dispatch_modes()  # those of the caller of the model
        self._left = _MOST_AT_FIRST
        self._follower = None if writer.script is None else writer.script.follower
        self.unread: list[str] = []  # the reasons why states could not be read
        # The turn, and the length of the tape, in which the tracer has begun to do an instruction
        # in the place of the interpreter (see `arrays.py`); None if it does none.
        self.instruction: tuple[int, int] | None = None
        self._before: RunState | None = None
        self._answer: tuple[str, str] = "", ""  # of the question before
        self._position = 0  # the length of the tape there
        self._turn = -1

    def read(self, guard: Guard, turn: int, compared: frozenset[int]) -> RunState | None:
        """Return the state in which the value of an op is asked for; None if it is not read.

        The guard, with its answer, is part of the path to the next state. The turn counts the
        requests of code to the tracer: answers to earlier requests in the same turn are held only
        by the tracer. `compared` has the identities of the values compared last.
        """
        if not self._reads_all and self.effects.have_begun():
            self._reads_all = True  # from here on, the run cannot be done again from its start
        if not self._reads_all:
            self._left = self._left - 1 if self._is_near() else 0
            if self._left < 1:
                return None
        answer, is_identity = guard.answer, isinstance(guard, IdentityGuard)
        tape, follower = self._writer.tape, self._follower
        if follower is not None and (known := follower.state(tape)) is not None:
            follower.passes(tape, known)
            self.go_on_from(known, answer, turn)
            return known
        with torch._C.DisableTorchFunction():
            reader = _StateWalk(self._values, self._environment)
            try:
                key = _state_digest(
                    "identity" if is_identity else guard.name,
                    _global_state(self._modes),
                    reader.frames(self._outermost, compared),
                    reader.changes(),
                    reader.values_of(self._pending()),
                    reader.question_value(guard.index),
                    None if guard.other is None else reader.value_of(guard.other),
                    reader.facts(),
                    tuple(map(reader.value_of, self._ops_of_instruction())),
                    self._same_turn(turn),
                )
            except (_Unreadable, RuntimeError) as error:  # torch raises for queries of some views
                self.unread.append(str(error))
                state = self._after(guard)
            else:
                state = RunState(key, tuple(reader.holes), tuple(reader.kept))
        if follower is not None:
            follower.passes(tape, state)
        before = self._before
        if before is not None and (state.key, state.holes) == (before.key, before.holes):
            return before  # the same question again
        self.go_on_from(state, answer, turn)
        return state

    def go_on_from(self, state: RunState, answer: Any, turn: int) -> None:
        """Take a state as read, with the answer to its question."""
        self._before, self._answer = state, (type(answer).__name__, str(answer))
        self._position, self._turn = len(self._writer.tape.ops), turn

    def _pending(self) -> list[Sequence[Any]]:
        """Return the values that are needed again by what is inserted."""
        return [] if self._inserter is None else [some for some in self._inserter.pending if some]

    def _same_turn(self, turn: int) -> Any:
        """Return the earlier questions in the same turn, with their answers."""
        first = turn if self.instruction is None else self.instruction[0]
        if self._turn < first or self._before is None:
            return None
        return self._before.key, self._answer

    def _is_near(self) -> bool:
        """Return whether few frames lie between the model's entry and the question."""
        frame: FrameType | None = sys._getframe(1)
        near = _NEAR
        while frame is not None and frame.f_code is not self._outermost:
            near -= not frame.f_code.co_filename.startswith(PACKAGE)
            if not near:
                return False
            frame = frame.f_back
        return True

    def _after(self, guard: Guard) -> RunState:
        """Return a state that is identified only by the path that led to it."""
        before, made = self._before, self._value_ops_from(self._position)
        if before is None:
            return RunState(_state_digest("start", guard.name), made, ())
        key = _state_digest("after", before.key, self._answer, guard.name)
        return RunState(key, before.holes + made, before.kept)

    def _ops_of_instruction(self) -> tuple[int, ...]:
        """Return the ops of an instruction so far, whose values only the tracer holds."""
        return () if self.instruction is None else self._value_ops_from(self.instruction[1])

    def _value_ops_from(self, position: int) -> tuple[int, ...]:
        return tuple(op.index for op in self._writer.tape.ops[position:] if op.gives_value)


# Without `reads_all`, a run reads at most so many states, and only those with fewer frames below
# the model's entry.
_MOST_AT_FIRST, _NEAR = 128, 12


def _state_digest(*key: Any) -> bytes:
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=20).digest()


class _Unreadable(Exception):
    """Something cannot be read."""


def _global_state(modes: int) -> tuple[Any, ...]:
    if sys.exc_info()[0] is not None:
        raise _Unreadable("an exception is being handled")
    return (
        current_context(), current_settings(), torch.get_default_dtype(),
        dispatch_modes() - modes, torch.is_anomaly_enabled(),
    )  # fmt: skip


class _StateWalk:
    """Reads one state."""

    def __init__(self, values: RunValues, environment: Environment) -> None:
        self._values = values
        self._ops = values.tape.ops
        self._environment = environment
        self.holes: dict[int, int] = {}
        self.kept: list[Any] = []
        self._alive: list[Any] = []  # so that no id is reused by a later object
        self._seen: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._running: dict[int, int] = {}  # frames

    def frames(self, outermost: CodeType, compared: frozenset[int]) -> tuple[Any, ...]:
        """Read the frames from the one that asks to the model's entry."""
        places = stacks.frame_layout()
        if places is None:
            raise _Unreadable("the frames of this Python cannot be read")
        chain: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        try:
            while frame is not None and frame.f_code is not outermost:
                self._running[id(frame)] = len(chain)
                chain.append(frame)
                frame = frame.f_back
            if frame is None:
                raise _Unreadable("the model was not called from here")
            return tuple(self._read_chain(chain, places, compared))
        finally:
            chain.clear()  # a frame that is held by itself would keep all values alive

    def _read_chain(
        self, chain: list[FrameType], places: stacks.FrameLayout, compared: frozenset[int]
    ) -> Iterator[Any]:
        callee, is_asking = None, True
        for frame in chain:
            if frame.f_code in FOLLOWING:
                raise _Unreadable("an autograd function is followed")
            if not frame.f_code.co_filename.startswith(MACHINERY):
                given = compared if is_asking else frozenset()
                stack = stacks.read_frame(frame, callee, places, given)
                if stack is None:
                    raise _Unreadable(f"{frame.f_code.co_qualname} cannot be read")
                if stack.operands is not None and may_hide(stack, callee, is_asking):
                    raise _Unreadable(
                        f"{stack.name} in {stack.code.co_qualname} may be in the middle of an "
                        "operation"
                    )
                yield self._frame(stack)
                is_asking = False
            callee = frame

    def _frame(self, stack: stacks.Stack) -> tuple[Any, ...]:
        alive = read_later(stack.code, stack.offset)
        lists = self._values.accumulation
        private = () if lists is None else lists.slots(stack.code)
        slots = tuple(  # first: what is a list of a loop here is one on the stack as well
            (self._list(value, stack.code, slot) if slot in private else self.value(value))
            if alive >> slot & 1 or not self._is_idle(value)
            else "unread"
            for slot, value in enumerate(stack.slots)
        )
        if lists is not None and stack.below and lists.is_comprehension(stack.code):
            slots += (self._list(stack.below[0], stack.code, None),)
        operands = None if stack.operands is None else tuple(map(self.value, stack.operands))
        below = tuple(map(self.value, stack.below))
        return self._by_identity(stack.code), stack.offset, slots, below, operands

    def _is_idle(self, value: Any) -> bool:
        """Return whether a value that is not read again cannot matter: it has no finalizer."""
        kind = type(value)
        return (
            value is stacks.EMPTY or kind in PLAIN_TYPES or kind in TRACED or kind in RETIRED
            or (kind in (Tensor, nn.Parameter) and not vars(value))
            or (isinstance(value, nn.Module) and self._environment.find(value) is not None)
        )  # fmt: skip

    # Values

    def value(self, value: Any) -> Any:
        """Return the representation of a value in the key."""
        kind = type(value)
        if kind is str and MARK in value:
            recorder: Any = self._values.origin
            parts = recorder.texts.parts(value)
            return "text", *(p if isinstance(p, str) else self.value_of(p[0]) for p in parts)
        if kind in PLAIN_TYPES:
            return _plain_key(value, kind)
        if value is stacks.EMPTY:
            return ("empty",)  # different from the text "empty"
        if kind is stacks.InterpreterNumber:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind in TRACED:
            return self._scalar(value)
        if kind in RETIRED:
            return _plain_key(value._value, type(value._value))
        if (stands := self._values.tensor_of_array(value)) is not None:
            return "array", self._by_identity(kind), self._tensor(stands)
        if issubclass(kind, OperandProxy):
            return kind.__name__, self.value(value.operand)
        if (part := self._environment.find(value)) is not None:
            return part.named
        known = self._seen.get(id(value))
        if known is not None:
            return "again", known
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        read = _READERS.get(kind)
        if read is not None:
            return kind.__name__, read(self, value)
        return self._other(value, kind)

    def values_of(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return the representation of some values."""
        return tuple(map(self.value, values))

    def _other(self, value: Any, kind: type) -> Any:
        if isinstance(value, _LASTING) or kind in _FIXED:
            return self._by_identity(value)
        if is_constant(value, kind):
            return self._by_identity(kind), str(value)
        if is_array(value) and not value.dtype.hasobject and not hasattr(value, "__dict__"):
            return self._array(value)
        if isinstance(value, TorchFunctionMode) and kind.__module__.startswith("bendtrace."):
            return "recorder"
        if kind is ListOperand:  # of numbers, or views of one memory, which loops go through
            known, views = self._memories, [one for one in value.numbers if isinstance(one, Tensor)]
            memory = [known.setdefault(storage_of(one), len(known)) for one in views[:1]]
            return self.value_of(value.ref.index), self._facts_of_items(value.numbers), memory
        if kind.__module__.startswith("bendtrace.") and hasattr(kind, "state_parts"):
            return kind.__name__, self.values_of(value.state_parts())
        if kind.__module__.startswith("bendtrace.") or not can_build(kind):
            raise _Unreadable(f"a {kind.__qualname__} cannot be read")
        items: Any = ()
        if isinstance(value, dict):
            ordered: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            items = self._read_keys(ordered.keys(value)), self.values_of(ordered.values(value))
        elif isinstance(value, (tuple, list)):
            base: Any = tuple if isinstance(value, tuple) else list
            items = self.values_of(base.__iter__(value))
        elif isinstance(value, (set, frozenset)):
            items = self._read_keys(value)
        own = attributes_of(value)
        found = tuple((key.name, self.value(item)) for key, item in own.items())
        return self._by_identity(kind), items, found

    def _array(self, array: Any) -> Any:
        base, place = array.base, 0
        if base is not None:
            if not is_array(base):
                raise _Unreadable("an array shares memory that is not numpy's")
            place = array_functions.address(array) - array_functions.address(base)
        dtype = array.dtype
        kind = self._by_identity(dtype) if dtype.names or dtype.metadata else str(dtype)
        content = kind, array.shape, array.strides, array.flags.writeable, array.tobytes()
        return "array", content, place, self.value(base)

    def _by_identity(self, value: Any) -> int:
        self.kept.append(value)
        return id(value)

    def _tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        known = self._values.source_of(tensor)
        part = self._environment.find(tensor)
        if known is not None:
            what = self.value_of(known) if isinstance(known, int) else self._element(*known)
        elif part is not None:
            what = part.named
        else:
            raise _Unreadable("a tensor has no known op")
        memory = storage_of(tensor)
        if memory:
            memory = 1 + self._memories.setdefault(memory, len(self._memories))
        own = {} if carries_array(tensor) else vars(tensor)
        return (
            what, None if part is None else part.named, self._facts(tensor), memory,
            tuple((name, self.value(item)) for name, item in own.items()) if own else (),
        )  # fmt: skip

    def _facts(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the facts about a tensor that replays rely on."""
        return (
            self._by_identity(type(tensor)), tensor.dtype, tensor.dim(), tensor.device,
            tensor.layout, requires_grad(tensor), is_leaf(tensor), tensor.is_inference(),
        )  # fmt: skip

    def _scalar(self, scalar: Any) -> Any:
        if scalar._origin is not self._values.origin:
            return _plain_key(scalar._value, type(scalar._value))
        source = scalar._source
        if type(source) is Ref:
            what = self.value_of(source.index)
        else:
            what = self._element(source[0].index, source[1])
        return type(scalar).__name__, what

    def _element(self, parent: int, path: Any) -> Any:
        what = self.value_of(parent)
        for key in path:
            what = ("element", what, key)
        return what

    def value_of(self, index: int) -> Any:
        """Return the representation of the value of an op."""
        op = self._ops[index]
        if op.kind is OpKind.INPUT or op.kind is OpKind.STATE:
            return op.target.named
        if op.is_element and len(op.args) == 2:
            return "element", self.value_of(op.args[0].index), op.args[1]
        if op.kind is OpKind.CALL or op.kind is OpKind.SCALAR:
            number = self.holes.setdefault(index, len(self.holes))
            return "hole", number
        raise _Unreadable("a tensor of unknown origin")

    def question_value(self, index: int) -> Any:
        """Return the representation of the value that is asked for."""
        op = self._ops[index]
        if works_on_containers(op.target):  # a container in another one is found by its key again
            for operand in op.operands:
                self.value_of(operand)
        if index in self.holes:
            return self.value_of(index)
        if op.kind is OpKind.SCALAR and op.target in LOOKS:
            self.value_of(op.args[0].index)  # which the code gets next
        what = self._describe(index, _DEEPEST, {})
        self.value_of(index)
        return what

    def facts(self) -> tuple[Any, ...]:
        """Return the representation of the metadata read from tensors since the latest question."""
        return tuple(
            (self.value_of(index), name_of(function), str(value))
            for (index, function), value in self._values.facts.items()
            if self._can_be_asked_again(index)
        )

    def _can_be_asked_again(self, index: int) -> bool:
        """Return whether Python may ask for a value again."""
        op = self._ops[index]
        if op.is_element:
            return self._can_be_asked_again(op.args[0].index)
        return op.is_given or index in self.holes

    def _describe(self, index: int, depth: int, known: dict[tuple[int, int], Any]) -> Any:
        """Describe a value that only the question holds: how it was computed.

        What is known already is described in as few bytes: a value may be used many times.
        """
        op = self._ops[index]
        if index in self.holes or op.kind in (OpKind.INPUT, OpKind.STATE):
            return self.value_of(index)
        if depth == 0:
            raise _Unreadable("the value was computed in too many steps")
        if (found := known.get((index, depth))) is None:
            given = map_refs(
                (op.args, op.kwargs), lambda ref: self._describe(ref.index, depth - 1, known)
            )
            found = known[index, depth] = name_of(op.target), _state_digest(given)
        return found

    def changes(self) -> tuple[Any, ...]:
        """Read the changes made by the run so far."""
        changes = self._environment.changes_so_far()
        if changes is None:
            raise _Unreadable("the run has changed something that cannot be followed")
        return tuple(
            (
                change.part.named, self._key(change.key), change.deleted,
                self.value(change.value),
            )
            for change in changes
        )  # fmt: skip

    def _key(self, key: Any) -> Any:
        """Return the representation of a change's key."""
        if isinstance(key, AttributeKey):
            return "attribute", str(key), key.name, key.access.name
        return self.value(key)

    # Kinds of values

    def _function(self, function: types.FunctionType) -> Any:
        cells = function.__closure__
        if function.__code__.co_filename.startswith(PACKAGE):
            return self._by_identity(function.__code__)  # it replaces a function of torch
        if cells is None and "<" not in function.__qualname__:
            return self._by_identity(function)
        return (
            self._by_identity(function.__code__), self._by_identity(function.__globals__),
            self.values_of(cells or ()),
            self.value(function.__defaults__), self.value(function.__kwdefaults__),
            self.value(vars(function)),
            self.values_of(getattr(function, name) for name in FUNCTION_METADATA),
        )  # fmt: skip

    def _cell(self, cell: types.CellType) -> Any:
        try:
            return self.value(cell.cell_contents)
        except ValueError:
            return ("empty",)  # different from the text "empty"

    def _generator(self, generator: types.GeneratorType[Any, Any, Any]) -> Any:
        frame = generator.gi_frame
        if frame is None:
            return "finished"
        if generator.gi_running:
            if id(frame) not in self._running:
                raise _Unreadable("a generator runs elsewhere")
            return "running", self._running[id(frame)]
        places = stacks.frame_layout()
        stack = None if places is None else stacks.suspended_stack(frame, places)
        if stack is None:
            raise _Unreadable("a generator cannot be read")
        return self._frame(stack)

    def _read_by_reduce(self, iterator: Any) -> Any:
        reduced = iterator.__reduce__()
        self._alive.append(reduced)
        # Of a dict or set, that tells only what is left to come, not which one it is.
        walked = (part for part in gc.get_referents(iterator) if isinstance(part, (dict, set)))
        return self.values_of(reduced), self.values_of(walked)

    def _mapping(self, mapping: dict[Any, Any]) -> Any:
        return self._read_keys(mapping), self.values_of(mapping.values())

    def _read_keys(self, keys: Iterable[Any]) -> Any:
        """Read keys or members; C compares their hashes, which were guarded, unseen."""
        return tuple((self.value(key), str([*map(plain, scalars_in(key))])) for key in keys)

    def _list(self, items: Any, code: CodeType, slot: int | None) -> Any:
        """Return the representation of a list that a loop appends to."""
        lists: Any = self._values.accumulation
        if (parts := lists.parts(items, code, slot)) is None:
            return self.value(items)
        self._seen[id(items)] = len(self._seen)
        self._alive.append(items)
        index, first, others = parts
        return "list", self.value_of(index), self._facts_of_items(first), self.values_of(others)

    def _facts_of_items(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(map(self._facts_of_item, items)))

    def _facts_of_item(self, item: Any) -> Any:
        if type(item) is list:
            return self._facts_of_items(item)
        return self._facts(item) if isinstance(item, Tensor) else type(item).__name__

    def _token(self, token: contextvars.Token[Any]) -> Any:
        return self._by_identity(token.var), self.value(token.old_value)

    def _builtin(self, function: Any) -> Any:
        owner = function.__self__
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return self._by_identity(function)
        return function.__name__, self.value(owner)


def _plain_key(value: Any, kind: type) -> Any:
    """Return a plain value in a form that is equal only to the same value."""
    if kind is float:
        return bits_of(value), 0.0
    if kind is complex:
        return bits_of(value.real), bits_of(value.imag)
    return value


_DEEPEST = 16
_RECORD = "bendtrace.record."
_LASTING = (type, enum.Enum, *OPERATORS)
_FIXED = frozenset(
    {
        types.ModuleType, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType,
        types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType,
        type(torch.default_generator), type(contextvars.Token.MISSING),
    }
)  # fmt: skip
_ITERATORS: tuple[Any, ...] = (
    iter([]), iter(()), iter(range(1)), iter({}), iter({}.values()), iter({}.items()), iter(""),
    iter(set()), reversed([]), zip(), enumerate(()), map(len, ()),
)  # fmt: skip
_READERS: dict[type, Any] = {
    tuple: _StateWalk.values_of,
    list: _StateWalk.values_of,
    torch.Size: _StateWalk.values_of,
    set: _StateWalk._read_keys,
    frozenset: _StateWalk._read_keys,
    dict: _StateWalk._mapping,
    slice: lambda walk, one: walk.values_of((one.start, one.stop, one.step)),
    deque: lambda walk, one: (one.maxlen, walk.values_of(one)),
    types.FunctionType: _StateWalk._function,
    types.MethodType: lambda walk, one: walk.values_of((one.__func__, one.__self__)),
    types.BuiltinFunctionType: _StateWalk._builtin,
    types.CellType: _StateWalk._cell,
    types.GeneratorType: _StateWalk._generator,
    functools.partial: lambda walk, one: walk.values_of(read_partial(one)),
    contextvars.Token: _StateWalk._token,
    **{type(iterator): _StateWalk._read_by_reduce for iterator in _ITERATORS},
}


# C code that is in progress while a question is asked, and what it may hold out of sight.
#
# The frames show what Python holds, but not the variables of the C code that an instruction has
# called: how far `sum` has come in a list, for example. A state can be read only if there are no
# such variables, or they do not matter for what follows.


def may_hide(stack: stacks.Stack, callee: FrameType | None, is_asking: bool) -> bool:
    """Return whether C, called by an instruction, may hold something that cannot be read.

    The stack is of the frame at the instruction, with its operands; the callee was called from
    there, None for the innermost frame. With `is_asking`, this instruction itself asks the
    question.
    """
    operands = [value for value in stack.operands or () if value is not stacks.EMPTY]
    name = stack.name
    asks_here = is_asking or name not in _CALLS or _is_single_call(operands)
    if asks_here and _are_repeated(operands):
        hides = True  # it is not known which of them asks
    elif name in _CALLS:
        hides = not operands or _call_hides(operands[0], operands[1:], callee)
        hides = hides or (is_asking and _numbers_in(operands) > 1)
        # Python may still be making a tuple of what `f(*x)` is given.
        hides = hides or (name == "CALL_FUNCTION_EX" and type(operands[1]) not in (tuple, list))
    elif name in _TEXTS:
        hides = not all(map(_shows_itself, operands))
    elif name in _TRANSPARENT or name.startswith("POP_JUMP"):
        hides = False
    elif name in _ON_VALUES:
        hides = not all(map(_is_single, operands)) or _numbers_in(operands) > 2
        hides = hides and not _repeats(operands)
    elif name in _ON_ITEMS:
        container = operands[1] if name == "STORE_SUBSCR" and len(operands) > 1 else operands[0]
        hides = isinstance(container, (dict, set)) or _numbers_in(operands, objects=True) > 1
    elif name == "FOR_ITER":
        iterator = stack.below[-1] if stack.below else None
        hides = type(iterator) is not types.GeneratorType and not _is_of_python(iterator)
    elif name in ("UNPACK_SEQUENCE", "GET_ITER"):
        hides = not operands or not isinstance(operands[0], Tensor)
    else:
        hides = True
    return hides


def _call_hides(called: Any, given: list[Any], callee: FrameType | None) -> bool:
    kind = type(called)
    if kind is functools.partial:
        given = [*called.args, *called.keywords.values(), *given]
        return _call_hides(called.func, given, callee)
    if kind is types.MethodType:
        return _call_hides(called.__func__, [called.__self__, *given], callee)
    if kind is types.FunctionType:
        return False
    if isinstance(called, type):
        if called in _SINGLE:
            return _keeps_parts(called, given)
        return callee is None or callee.f_code.co_name != "__init__" or not _is_class(called)
    # C code of torch may ask an object among its arguments for its number, more than once.
    is_reported = callee is None or callee.f_code.co_name == "__torch_function__"
    if kind in _METHODS:
        return not (is_torchs_function(called) and is_reported)
    if is_torchs_function(called) and kind is not types.BuiltinFunctionType:
        return False
    if kind is types.BuiltinFunctionType:
        if called in _SINGLE:
            return _keeps_parts(called, given)
        module = called.__module__ or ""
        owner = called.__self__
        is_torchs = (
            module.split(".")[0] in ("torch", "_VariableFunctions")
            or isinstance(owner, Tensor)
            or getattr(owner, "__module__", "") in ("torch", "torch._C")
        )
        return not (is_torchs and is_reported)
    found = next((vars(cls)["__call__"] for cls in kind.__mro__ if "__call__" in vars(cls)), None)
    return not isinstance(found, types.FunctionType)


def _repeats(operands: list[Any]) -> bool:
    """Return whether `[y] * n` asks for its traced scalar, or the sum of such lists for those."""
    kinds = [*map(type, operands)]
    is_ours = any(kind in TRACED or kind.__module__.startswith(_RECORD) for kind in kinds)
    return len(kinds) == 2 and is_ours and any(issubclass(kind, list) for kind in kinds)


def _keeps_parts(called: Any, given: list[Any]) -> bool:
    """Return whether a C function that asks one question for each thing has several things."""
    if called in _SHOWING:
        return len(given) > 1 + (called is format) or not all(map(_shows_itself, given))
    if called is range:
        return _numbers_in(given, objects=True) > 1
    return any(map(_joins_iterators, given))


def _joins_iterators(value: Any) -> bool:
    """Return whether an iterator keeps what one has given, while it asks another."""
    kind = type(value)
    if kind not in (zip, map, enumerate, filter):
        return False
    iterators = value.__reduce__()[1][kind in (map, filter) :]
    walked = iterators[:1] if kind is enumerate else iterators
    return len(walked) > 1 or any(map(_joins_iterators, walked))


def _shows_itself(value: Any) -> bool:
    """Return whether making a text of a value runs no C code that makes texts of other values."""
    kind = type(value)
    if kind is str or kind in _NUMBERS or kind in TRACED or kind in RETIRED:
        return True
    if isinstance(value, Tensor):
        return True
    ways = (getattr(kind, name) for name in ("__repr__", "__str__", "__format__"))
    return all(isinstance(way, types.FunctionType) or way in _OF_OBJECT for way in ways)


def _numbers_in(values: Iterable[Any], objects: bool = False) -> int:
    """Count the traced scalars among arguments; `objects` of Python may stand for numbers, too."""
    count = 0
    for value in values:
        if type(value) in TRACED or (objects and _is_of_python(value)):
            count += 1
        elif isinstance(value, slice):
            count += _numbers_in((value.start, value.stop, value.step), objects)
        elif isinstance(value, (tuple, list)):
            count += _numbers_in(value, objects)
    return count


def _is_single_call(operands: list[Any]) -> bool:
    called = operands[0] if operands else None
    return isinstance(called, (type, types.BuiltinFunctionType)) and called in _SINGLE


def _are_repeated(values: Iterable[Any]) -> bool:
    """Return whether something that can ask is passed to a call more than once."""
    found: list[int] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor) or _is_of_python(value):
            found.append(id(value))
        elif isinstance(value, slice):
            waiting += value.start, value.stop, value.step
        elif type(value) in (tuple, list):
            waiting += value
    return len(set(found)) < len(found)


def _is_of_python(value: Any) -> bool:
    """Return whether an object has a class defined in Python, and is no container."""
    kind = type(value)
    is_class = _TRACED_ARE_CLASSES if kind in TRACED else _is_class(kind)
    return is_class and not isinstance(value, _CONTAINERS)


def _is_class(kind: type) -> bool:
    return is_heap_type(kind) and can_build(kind)


# Asked for each number of a long list, at each question of `sorted`.
_TRACED_ARE_CLASSES = any(map(_is_class, TRACED))


def _is_single(value: Any) -> bool:
    """Return whether an operator on a value asks at most one question at a time."""
    kind = type(value)
    return (
        kind in TRACED or kind in RETIRED or isinstance(value, Tensor)
        or issubclass(kind, OperandProxy) or kind in _NUMBERS or _is_of_python(value)
    )  # fmt: skip


_NUMBERS = frozenset({int, float, bool, complex, type(None)})
_CONTAINERS = (tuple, list, dict, set, frozenset, str, bytes)
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
# C functions that ask one question, and keep nothing that they need after it.
_SINGLE: frozenset[Any] = frozenset(
    {
        any, all, next, iter, len, isinstance, issubclass, hasattr, getattr, setattr, abs, bool,
        int, float, range, super, callable, id, repr, str, format, print,
    }
)  # fmt: skip
_SHOWING: frozenset[Any] = frozenset({repr, str, format, print})
_METHODS = frozenset({types.MethodDescriptorType, types.WrapperDescriptorType})
_OF_OBJECT = (object.__repr__, object.__str__, object.__format__)
# Instructions during which C holds nothing that is needed afterwards.
_TRANSPARENT = frozenset(
    {
        "TO_BOOL", "UNARY_NOT", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "LOAD_ATTR",
        "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "BEFORE_WITH",
        "LOAD_SPECIAL", "SEND", "UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT",
    }
)  # fmt: skip
_TEXTS = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE"})
_ON_VALUES = frozenset({"BINARY_OP", "COMPARE_OP", "IS_OP"})
_ON_ITEMS = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "BINARY_SLICE"})
