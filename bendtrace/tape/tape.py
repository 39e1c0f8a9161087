"""The tape: everything one run did, as a flat list of small records, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import InstructionPlace, Site
from bendtrace.tape.captured import PLAIN_TENSORS, identical, is_ndarray
from bendtrace.tape.contexts import Context

if TYPE_CHECKING:
    from bendtrace.python import statements
else:
    statements = LazyModule("bendtrace.python.statements")

# Nothing else is written during a run. The graph, the flow steps, the guards and the replay
# function are all derived from the tape afterwards.


class Ref:
    """A reference in recorded arguments to the value of op number `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index: int = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other.index == self.index

    def __hash__(self) -> int:
        return hash((Ref, self.index))

    def __repr__(self) -> str:
        return f"%{self.index}"


class _Refs(dict[int, Ref]):
    """One `Ref` for each index, made when it is first asked for."""

    def __missing__(self, index: int) -> Ref:
        ref = self[index] = Ref(index)
        return ref


# Each value of each run needs one, and they are all alike.
ref_to: Callable[[int], Ref] = _Refs().__getitem__


class OpKind(Enum):
    """The kind of an entry of the tape."""

    INPUT = "input"  # a tensor or number among the arguments
    STATE = "state"  # a tensor read from a module, a closure or a global
    CALL = "call"  # a torch function, method, property or opaque function
    SCALAR = "scalar"  # Python arithmetic on traced scalars, or an element of a result
    UNKNOWN = "unknown"  # a tensor of unknown origin; the tape has a blocker for it


class TensorMeta(NamedTuple):
    """The kept properties of a tensor that an op returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class NumberMeta(NamedTuple):
    """The kept properties of a tensor that stands for a number of numpy's."""

    tensor: TensorMeta


# The attribute of a tensor that stands for an array of numpy's (see `array_functions.py`). No code
# assigns one of that name.
ARRAY = "array (bendtrace)"


def carries_array(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for an array."""
    return ARRAY in vars(tensor)


def stands_for_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a number of numpy's, which is no array."""
    array = vars(tensor).get(ARRAY)
    return array is not None and not is_ndarray(array)


def has_tensors(meta: Any) -> bool:
    """Return whether the result of an op, described by its metadata, is a tensor or several."""
    if isinstance(meta, TensorMeta):  # which is a tuple itself
        return True
    return isinstance(meta, tuple) and any(isinstance(one, TensorMeta) for one in meta)


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor; the dimensions along which a nested one is ragged are -1."""
    if type(tensor) in PLAIN_TENSORS:
        return _meta_of(tensor)
    with torch._C.DisableTorchFunction():
        if is_lazy(tensor):  # which has no shape yet
            return TensorMeta((), tensor.dtype, tensor.device)
        return _meta_of(tensor)


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    if tensor.is_nested and tensor.layout is torch.strided:
        shape: tuple[int, ...] = (tensor.size(0), *[-1] * (tensor.dim() - 1))
    else:
        shape = tuple(tensor.shape)
    # The work of the named tuple's own constructor, for each op of each run.
    return tuple.__new__(TensorMeta, (shape, tensor.dtype, tensor.device))


@dataclass(slots=True, eq=False, repr=False)
class ModuleCall:
    """One call of an `nn.Module`'s forward during the run: a scope that ops belong to.

    Attributes:
        path: qualified name of the module ("" for the traced module itself).
        module: the module.
        number: how many calls of the same module came before; the pass is `number + 1`.
        called: of a module with several names, the one in the parent's module that the code calls
            it by; "" if its source does not show that.
        parent: the call it happened in.
        args: encoded positional arguments, as `Op.args`.
        kwargs: encoded keyword arguments.
        output: its return value, encoded.
        start: length of the tape when it began.
        stop: length of the tape when it ended.
        site: the site of the call, within the parent.
        training: whether the module was in training mode.
        is_sole: whether nothing but the caller has received the tensor that it returned.
        context: the grad mode and so on when it ended.
    """

    path: str
    module: nn.Module | None
    number: int
    parent: ModuleCall | None
    start: int
    stop: int = 0
    called: str = ""
    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    site: Site | None = None
    training: bool = False
    is_sole: bool = False
    context: Context | None = None

    def __repr__(self) -> str:
        return f"<call {self.number + 1} of {self.path or 'the root'}>"


class Raised(NamedTuple):
    """An error that an op raised, as far as the model can have inspected it.

    Attributes:
        type: its class.
        text: its text; None if the model's handlers do not use the error itself.
    """

    type: type[BaseException]
    text: str | None

    def __str__(self) -> str:
        return self.type.__name__ if self.text is None else f"{self.type.__name__}({self.text!r})"


NOTHING: dict[int, int] = {}
_PLAIN = frozenset({type(None), bool, int, float, str})  # arguments in which there is no value


@dataclass(slots=True, eq=False, repr=False)
class Op:
    """One recorded call: of a torch function, or of Python arithmetic on a traced scalar.

    Attributes:
        index: position on the tape; `Ref(index)` refers to its value.
        kind: see `OpKind`.
        target: the function (for CALL and SCALAR), else the input slot or state location.
        args: positional arguments with tensors and traced scalars replaced by `Ref`.
        kwargs: keyword arguments, likewise.
        scope: the module call it happened in.
        site: its place in the source.
        context: grad, inference and autocast state it ran under.
        meta: a `TensorMeta`, a plain value, or a tuple of these.
        raised: the raised error, for an op whose error the model caught.
        writes: the ops of those tensors among its arguments that it wrote to.
        reads: for arguments that were written to after their op returned them, the op that wrote.
    """

    index: int
    kind: OpKind
    target: Any
    args: Any
    kwargs: dict[str, Any]
    scope: ModuleCall
    site: Site | None
    context: Context
    meta: Any = None
    raised: Raised | None = None
    writes: tuple[int, ...] = ()
    reads: dict[int, int] = field(default_factory=lambda: NOTHING)

    def __repr__(self) -> str:
        return f"%{self.index} = {self.kind.value} {self.target}{self.args}"

    @property
    def operands(self) -> list[int]:
        """The ops of its arguments, in order."""
        if type(self.args) is not tuple:
            return [ref.index for ref in refs_in((self.args, self.kwargs))]
        found: list[int] = []
        for argument in (*self.args, *self.kwargs.values()) if self.kwargs else self.args:
            if type(argument) is Ref:  # as most are: asked of each op of each run, several times
                found.append(argument.index)
            elif type(argument) not in _PLAIN:
                found += [ref.index for ref in refs_in(argument)]
        return found

    @property
    def is_given(self) -> bool:
        """Return whether it represents an argument or state, which existed before the run."""
        return self.kind is OpKind.INPUT or self.kind is OpKind.STATE

    @property
    def is_work(self) -> bool:
        """Return whether it is an operation: a call, or arithmetic."""
        return self.kind is OpKind.CALL or self.kind is OpKind.SCALAR

    @property
    def gives_value(self) -> bool:
        """Return whether code gets a value from it: it is work, but assigns no item."""
        return self.is_work and self.target is not torch.Tensor.__setitem__

    @property
    def is_element(self) -> bool:
        """Return whether it names an element of a result: `getitem(%1, 0)`."""
        return self.kind is OpKind.SCALAR and self.target is getitem

    def does_the_same_as(self, other: Op) -> bool:
        """Return whether both call the same function on the same values."""
        if self.kind is not other.kind or not identical(self.args, other.args):
            return False
        if not identical((*self.kwargs.items(),), (*other.kwargs.items(),)):
            return False
        if self.is_given:
            return bool(self.target.named == other.target.named)
        return bool(self.target == other.target)


class Literals(Protocol):
    """Writes values into generated code."""

    def constant(self, value: Any) -> str:
        """Return an expression for a value."""

    def bound(self, value: Any) -> str:
        """Return a name that is bound to a value."""


class Use(Enum):
    """The way in which Python consumed a value; the text names it in flow steps."""

    RESULT = ""  # the recorder looked at what an op returned
    METADATA = "metadata"  # the recorder looked at a property of a tensor
    TYPE = "type"  # code takes plain numbers only
    BOOL = "bool"
    ITEM = "item"  # as the truth of a comparison of two items of containers
    INT = "int"
    FLOAT = "float"
    COMPLEX = "complex"
    INDEX = "index"
    LEN = "len"
    LENGTH = "length"  # several results were taken apart
    ITER = "iter"  # the same, by code that goes through a tensor
    ROWS = "rows"  # the same, by a loop that can be followed (see `record/rows.py`)
    IN = "in"
    HASH = "hash"
    FORMAT = "format"
    LIST = "tolist"
    NUMPY = "numpy"


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function that does not know traced numbers consumed one; the value is its name."""

    value: str


def use_by(name: str) -> Use | FunctionUse:
    """Return how a function or attribute of this name consumes a number."""
    return _USES.get(name) or FunctionUse(name)


_USES: dict[str, Use] = {use.value: use for use in Use}


@dataclass(slots=True, eq=False)
class Guard:
    """A condition on the value of an op, at the point where Python consumed it.

    Each kind is a subclass (see `guards.py`), and says here what the layers above ask of it.

    Attributes:
        name: the name of its kind, in tables and in fx graphs.
        code: the answer in replays, where `v1` is the value of op 1, and `r1` its error.
        is_two_way: whether the code has no other answers than true and false.
        found: gives the answer for a value.
        subject: what it tests, as part of a sentence; `about` the same before a piece of source.
        asked: how pictures write the question, around a piece of source.
        is_of_result: whether it is asked of the result of an op before the model receives it.
        position: length of the tape when it was added.
        index: the op whose value is tested.
        answer: the recorded answer to its question.
        use: how Python consumed it.
        scope: the module call it happened in.
        site: its place in the source.
        is_inside: whether code inside of an op consumed it, which runs only if the op does.
        other: the op that gives the value it is compared with, if there is one.
    """

    name: ClassVar[str]
    code: ClassVar[str] = "v{index}"
    is_two_way: ClassVar[bool] = False
    found: ClassVar[Callable[[Any], Any]] = staticmethod(lambda value: value)
    subject: ClassVar[str] = "the value"
    about: ClassVar[str] = "value of"
    asked: ClassVar[str] = "{}"
    is_of_result: ClassVar[bool] = False

    position: int
    index: int
    answer: Any
    use: Use | FunctionUse
    scope: ModuleCall
    site: Site | None
    is_inside: bool = False
    other: int | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        """The ops whose values it tests."""
        return (self.index,) if self.other is None else (self.index, self.other)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two guards of a run that are the same test."""
        return self.index, type(self), self.other

    def asks_like(self, other: Guard) -> bool:
        """Return whether both ask the same of a value, whatever the answers."""
        return type(self) is type(other)

    @classmethod
    def meets(cls, value: Any, wanted: Any) -> bool:
        """Return whether a value has the wanted answer, or compares so with another value."""
        return identical(cls.found(value), wanted)

    @classmethod
    def difference(cls, value: Any, wanted: Any) -> str:
        """Say how a value that does not meet a guard differs, after the guard's subject."""
        return f" was {wanted!r} when traced and is {cls.found(value)!r} now"

    @property
    def finding(self) -> str:
        """The code of the answer in a replay."""
        return self.code.format(index=self.index, other=self.other)

    @property
    def outcome(self) -> str:
        """The code of the answer where it is known to differ from the recorded one."""
        return str(not self.answer) if self.is_two_way else self.finding

    def failure(self, literals: Literals) -> str:
        """Return the code of a test that is true if the answer differs from the recorded one."""
        return f"{self.finding} != {literals.constant(self.answer)}"

    def word(self, answer: Any) -> Any:
        """Return the words that people read for an answer."""
        return answer


class CheckpointSettings(NamedTuple):
    """The options of `torch.utils.checkpoint` for a block (see there)."""

    preserves_rng: bool
    determinism_check: str
    debug: bool
    early_stop: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A block that the backward pass does again (see `checkpoints.py`).

    Attributes:
        begin: how many ops and guards come before.
        end: how many ops and guards come before its end.
        settings: those of the checkpoint.
        tensors: the ops that give the tensors among its arguments.
    """

    begin: tuple[int, int]
    end: tuple[int, int]
    settings: CheckpointSettings
    tensors: tuple[int, ...]

    def holds(self, guard: int) -> bool:
        """Return whether a guard, by its number, is asked inside."""
        return self.begin[1] <= guard < self.end[1]


@dataclass(frozen=True, slots=True)
class AfterOp:
    """Where a call has left a run other than at a guard: behind an op, which may have raised.

    Attributes:
        index: the op; -1 where no op has begun.
    """

    index: int


# Where a call has left a run: the number of a guard, or an op.
Stop: TypeAlias = int | AfterOp


class RunState(NamedTuple):
    """The state of a run when it asked for a value (see `states.py`).

    Attributes:
        key: equal for two runs in the same state.
        holes: the ops whose values can still be reached, in the order of the key.
        kept: the objects that the key identifies by id, which have to stay alive.
    """

    key: bytes
    holes: tuple[int, ...]
    kept: tuple[Any, ...]


@dataclass(slots=True)
class Tape:
    """Everything that a run recorded.

    Attributes:
        ops: the records, in order.
        guards: the guards, in order.
        calls: the module calls, in order of their beginning.
        forgets: positions at which autocast cleared its cache of cast weights.
        trainable: the state that required grad, by op.
        blockers: why a replay could be wrong; one line each, empty for nearly all models.
        is_joint: whether ranks communicate in it, and have to agree.
        joint: the places of communicating ops, in the same words on all ranks.
        states: the states at guards, by guard number, if they were read.
        counters: the ops that compute lifted counters and give lists (`record/varying.py`), which
            are no nodes: a run that lifts none has plain numbers and lists there.
        rounds: the ops, of what inputs give, whose numbers are the first of counters of loops.
        aliases: ops that returned a tensor which another op had returned first, with that op.
        outlines: of results that are containers, these with a `TensorMeta` for each tensor; of
            those that stand for arrays or numbers of numpy's, a `TensorMeta` or `NumberMeta`.
        classes: the classes of tensors that ops returned, of others than `Tensor`.
        blocks: the checkpointed blocks, in order.
        is_closed: whether it calls modules, or might have called some, in the middle of an op.
    """

    ops: list[Op] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    forgets: list[int] = field(default_factory=list)
    trainable: set[int] = field(default_factory=set)
    blockers: list[str] = field(default_factory=list)
    is_joint: bool = False
    joint: dict[int, str] = field(default_factory=dict)
    states: dict[int, RunState] = field(default_factory=dict)
    counters: set[int] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)
    aliases: dict[int, int] = field(default_factory=dict)
    outlines: dict[int, Any] = field(default_factory=dict)
    classes: dict[int, type] = field(default_factory=dict)
    blocks: list[Checkpoint] = field(default_factory=list)
    is_closed: bool = False

    def position_of(self, stop: Stop) -> int:
        """Return how many ops come before a place where a call has left the run."""
        return stop.index + 1 if isinstance(stop, AfterOp) else self.guards[stop].position

    def block(self, reason: str) -> None:
        """Record why this run must not be replayed."""
        if reason not in self.blockers:
            self.blockers.append(reason)


class Container:
    """The base of representations for values with structure in recorded arguments."""

    __slots__ = ()

    def inside(self) -> tuple[Any, ...]:
        """Return the recorded values inside."""
        raise NotImplementedError

    def with_inside(self, *inside: Any) -> Any:
        """Return a copy with other recorded values inside."""
        raise NotImplementedError


def argument_leaves(value: Any) -> Iterator[Any]:
    """Yield every `Ref`, constant and `Existing` in recorded arguments."""
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            yield from argument_leaves(item)
    elif kind is dict:
        for item in value.values():
            yield from argument_leaves(item)
    elif kind is slice:
        yield from argument_leaves((value.start, value.stop, value.step))
    elif issubclass(kind, Container):
        yield from argument_leaves(value.inside())
    else:
        yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild recorded arguments with every leaf (see `argument_leaves`) replaced by `change`."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_leaves(item, change) for item in value)
    if kind is dict:
        return {key: map_leaves(item, change) for key, item in value.items()}
    if kind is slice:
        return slice(*map_leaves((value.start, value.stop, value.step), change))
    if issubclass(kind, Container):
        return value.with_inside(*(map_leaves(item, change) for item in value.inside()))
    return change(value)


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield every `Ref` in recorded arguments, containers included."""
    return (leaf for leaf in argument_leaves(value) if type(leaf) is Ref)


def map_refs(value: Any, change: Callable[[Ref], Any]) -> Any:
    """Rebuild recorded arguments with every `Ref` replaced by `change(ref)`."""
    return map_leaves(value, lambda leaf: change(leaf) if type(leaf) is Ref else leaf)


def counts(op: Op) -> bool:
    """Return whether the model did an op, rather than an element or a state being named."""
    return op.is_work and not op.is_element


# How the model handles an error that an op raises.


def is_handled(scope: ModuleCall | None, site: Site | None) -> bool:
    """Return whether the model might continue after an error at a place."""
    return any(statements.is_under_handler(place) for place in _covering_places(scope, site))


def describe_raised(op: Op, error: Exception) -> Raised:
    """Describe an error as far as handlers of the model can distinguish it from others."""
    seen = any(statements.asks_for_error(place) for place in _covering_places(op.scope, op.site))
    return Raised(type(error), str(error) if seen else None)


def _covering_places(scope: ModuleCall | None, site: Site | None) -> Iterator[InstructionPlace]:
    """Yield the places from one up to the model's forward that a handler might cover."""
    while site is not None:
        # Most code has no exception table at all, which allows an early exit.
        if any(code.co_exceptiontable for code, _ in site.chain):
            yield from site.guarded
        site, scope = (scope.site, scope.parent) if scope is not None else (None, None)
