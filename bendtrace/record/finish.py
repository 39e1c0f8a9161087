"""The end of a run: its changes, its result, and why it might not be repeatable."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.utils import parametrize

from bendtrace.python.computations import accumulate, repeat, row_at
from bendtrace.python.internals import internal
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import full_place_text
from bendtrace.record.effects import assigned_in
from bendtrace.record.encoding import Encoder, make_keys_plain, without_traced
from bendtrace.record.values import RunValues
from bendtrace.tape.captured import Access, CaptureKind, EnvironmentChange
from bendtrace.tape.contexts import current_context, current_settings
from bendtrace.tape.guards import Place, TruthGuard
from bendtrace.tape.structure import Construction, Existing
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, Tape, TensorMeta, map_refs, refs_in
from bendtrace.watch.code_facts import codes_in, names_in
from bendtrace.watch.draws import (
    generator_name,
    generator_state,
    global_generators,
    torchs_generators,
)
from bendtrace.watch.environment import Environment
from bendtrace.watch.executed import OWN_NUMBER, CodeMonitor, forbidden_in, learn
from bendtrace.watch.functions import (
    ADDRESS,
    OpOverload,
    OpOverloadPacket,
    display_name,
    is_torchs_function,
    name_of,
    works_on_containers,
)
from bendtrace.watch.functions import is_gate as may_be_gate
from bendtrace.watch.provenance import is_finished
from bendtrace.watch.rank_sync import JOINT
from bendtrace.watch.reachability import reachable_from
from bendtrace.watch.writes import overlap

if TYPE_CHECKING:
    from bendtrace.record import accumulation, cache_fills, op_names
    from bendtrace.watch import growing
else:
    accumulation = LazyModule("bendtrace.record.accumulation")
    cache_fills = LazyModule("bendtrace.record.cache_fills")
    op_names = LazyModule("bendtrace.record.op_names")
    growing = LazyModule("bendtrace.watch.growing")

T = TypeVar("T")


class Recording:
    """The result of a finished run."""

    def __init__(self, tape: Tape, environment: Environment, root: ModuleCall) -> None:
        self.tape: Tape = tape  # the records
        self.environment: Environment = environment  # the values that the run could read
        self.root: ModuleCall = root  # the outermost scope; its `output` is the encoded output
        self.changes: list[EnvironmentChange] = []  # of its environment, with encoded values
        # True if another run with the same inputs would behave differently, unnoticed by guards:
        # for example because a cache is filled by then.
        self.is_transient: bool = False
        self.draws: bool = False  # whether it drew from torch's generators
        self.writes_outside: bool = False  # whether it wrote to tensors that were there before
        # For outputs that were written to after their op returned them, the op that wrote.
        self.output_reads: dict[int, int] = {}
        self.result: Any = None  # the return value of the model, without traced scalars
        self.error: Exception | None = None  # what the function raised, where that is kept
        self.form: tuple[str, ...] = ()  # how its arguments were passed, where that may be seen
        # Where its numbers stay traced, as they differ between runs (`varying.py`).
        self.places: frozenset[Place] = frozenset()
        self.follows_lists: bool = False  # whether lists of loops are values (`accumulation.py`)
        self.useless: frozenset[Place] = frozenset()  # of these, where that is of no use
        self.guarded: frozenset[Place] = frozenset()  # of these, where they are guarded anyway
        # The labels of lists and dicts in the state whose items it assigns by such numbers.
        self.keyed: frozenset[str] = frozenset()
        self.views: dict[Callable[[Recording], Any], Any] = {}  # what `view` has derived from it

    def view(self, derive: Callable[[Recording], T]) -> T:
        """Return a value derived from the run, computed once; it must not refer to the run."""
        if derive not in self.views:
            self.views[derive] = derive(self)
        found: T = self.views[derive]
        return found

    @property
    def names(self) -> list[str]:
        """The node name of each op."""
        return self.view(_names_of_nodes)

    @property
    def plain_ops(self) -> list[Op]:
        """The ops, with plain numbers and lists where they are given those of `Tape.counters`."""
        return self.view(_plain_ops) if self.tape.counters else self.tape.ops

    def plain(self, value: Any) -> Any:
        """Return recorded values, with plain numbers and lists for those of `Tape.counters`."""
        return map_refs(value, self._plain)

    def _plain(self, ref: Ref) -> Any:
        op = self.tape.ops[ref.index]
        if op.index not in self.tape.counters:
            return ref
        return accumulation.items_given(op, self.tape) if op.target in _LISTS else op.meta


_LISTS = (accumulate, repeat)  # which give lists of loops (`accumulation.py`)


def _plain_ops(recording: Recording) -> list[Op]:
    ops = list(recording.tape.ops)
    for op in ops:
        if op.target not in _LISTS and not recording.tape.counters.isdisjoint(op.operands):
            given = copy.copy(op)
            given.args, given.kwargs = recording.plain((op.args, op.kwargs))
            given.target = operator.getitem if op.target is row_at else op.target
            ops[op.index] = given
    return ops


def _names_of_nodes(recording: Recording) -> list[str]:
    return op_names.node_names(recording.tape)


class Finish:
    """Compares the state after a run with the state before.

    The model's code begins at `start`, for messages.
    """

    def __init__(
        self,
        values: RunValues,
        encoder: Encoder,
        start: str,
        function: Callable[..., Any],
    ) -> None:
        self._function = function
        self.tape: Tape = values.tape
        self.environment = environment = values.environment
        self._writer, self._values = values.writer, values
        self._encoder = encoder
        self._start = start
        self.draws: Draws = Draws([part.value for part in environment.host_generators])
        self._generators = self._torchs_random_states()
        self._seeds_before = self._seeds()
        self._entry = self.modes()
        if parametrize._cache_enabled:
            self.block("the values of parametrizations are cached around the call")

    def recording(
        self, output: Any, code_monitor: CodeMonitor | None = None
    ) -> tuple[Recording, list[EnvironmentChange]]:
        """Record the result and the changes of the run; return the recording and the plain changes.

        The checks stand in this order:

        - Changes are listed before the blockers of the environment are read: listing adds some.
          So does looking at containers, with the codes that the run reached.
        - Code is searched for what no run may call only if nothing blocks the run yet: that reads
          all code of the run, and such a run is live in any case.
        - Changes and output are encoded with one memo, so that an object in both is one object.
        - Arguments of the last op are forgotten before the output is encoded: `writers` then tells
          of the output alone.
        - Caches are looked at after that, since what the output or a change holds outlives the run.
        - The root's end is set after all of that, since encoding may add ops. At the end, a resumed
          run that went astray raises, even if the model caught the error.
        """
        root = self._writer.root
        if self.tape.calls and self.tape.calls[0].module is self._function:
            root = self.tape.calls[0]
        recording = Recording(self.tape, self.environment, root)
        for generator in self.draws.unseen():
            label = self.environment.label_of(generator) or generator_name(generator)
            self.block(f"the run moves {label} past the tracer", *_RANDOM)
        # `torch.seed()` calls `torch.cuda.manual_seed_all`, and then seeds the CPU's by itself.
        seeded = {getattr(op.target, "__name__", "") for op in self.tape.ops}
        cpus, *others = map(operator.ne, self._seeds(), self._seeds_before)
        if (cpus and "manual_seed" not in seeded) or (any(others) and not seeded & _SEEDING):
            self.block("the run seeds torch's random generator unseen")
        if self.modes() != self._entry:
            self.block("the run leaves grad mode, autocast or another setting of torch's changed")
        changes = list(self.environment.changes())
        if code_monitor is not None:
            self.environment.look_at_containers(code_monitor.codes)
        for reason in self.environment.blockers:
            self.tape.block(reason)
        # It may have been created by its first use, and stay the same from then on.
        recording.is_transient = self.environment.leaves_watched_objects
        if code_monitor is not None:
            self._look_at_growing(changes, code_monitor)
            if not self.tape.blockers or recording.is_transient:  # else it is known to be live
                for reason in forbidden_in(code_monitor):
                    self.tape.block(reason)
                asks = any("hash" in code.co_names for code in code_monitor.codes)
                if asks and self.environment.arguments_by_identity():
                    self.block(f"the model asks for a hash, {OWN_NUMBER}", "hash")
            if self.tape.blockers:
                code_monitor.codes.clear()  # such runs are live in any case
            for code in learn(self._function, code_monitor, self.environment.functions):
                recording.is_transient = True
                self.tape.block(
                    f"{code.co_qualname} at "
                    f"{full_place_text(code.co_filename, code.co_firstlineno)} was called in an "
                    "unforeseeable way"
                )
        memo: dict[int, Any] = {}
        for change in changes:
            change.key = self._encoder.key(change.key, f"what is assigned to {change.label}")
            encoded = self._encoder.output(
                change.value, f"what is assigned to {change.label}", memo
            )
            recording.changes.append(
                EnvironmentChange(change.part, change.key, encoded, change.deleted)
            )
        self._writer.writes.begin()
        root.output = self._encoder.output(output, "the output", memo)
        if any(id(given) in memo for given in self._writer.given):
            self.block("what the run returns, or keeps, is given to code that is called as one op")
        for reason in (*self.environment.identity_lookups(), *self.environment.results_in_state()):
            self.block(reason)
        if self.environment.caches:
            cleared = [] if code_monitor is None else code_monitor.cleared
            cache_fills.look_at_caches(recording, self._values, self.block, cleared)
        recording.output_reads = self._writer.writes.writers()
        self._check_opaque_ops(recording.changes)
        self._check_addresses()
        drew = list(map(operator.ne, self._generators, self._torchs_random_states()))
        recording.draws = any(drew)
        recording.writes_outside = self._values.writes_outside()
        self._check_arrays()
        root.stop = len(self.tape.ops)
        self._writer.require_end()
        # The next run does not call what has filled caches.
        recording.is_transient |= bool(self.environment.fills and self.tape.blockers)
        return recording, changes

    def _look_at_growing(self, changes: list[EnvironmentChange], code_monitor: CodeMonitor) -> None:
        """Block if code has read what the run takes for something that it only adds to."""
        for part in self.environment.parts:
            if part.kind is CaptureKind.GROWING and growing.is_read(part, code_monitor.codes):
                name = growing.access_name(part)
                self.block(f"the run adds to {part.label}, and reads it", name)
        lists = [one.part for one in changes if one.key is None]
        if lists:
            unread = (part for part in lists if not growing.is_read(part, code_monitor.codes))
            growing.note_added(self._function, unread)

    def block(self, reason: str, *names: str) -> None:
        """Record why the run must not be replayed, and where the model uses one of the names."""
        named = filter(None, map(self.environment.place_of, names))
        place = next(named, self._start)
        self.tape.block(f"{reason} (see {place})" if place else reason)

    def clean(self, changes: list[EnvironmentChange], *own: Any) -> dict[int, Any]:
        """Make the run's remains in its environment plain; return the plain values."""
        self.environment.put_back()
        memo = self.environment.things()
        # A trace made inside the run can lead here, by way of this run's scalars.
        memo.update({id(thing): thing for thing in (self, self.tape, self.environment, *own)})
        for change in changes:
            change.key = without_traced(change.key)
            if not change.deleted:
                change.store(without_traced(change.value, memo))
            if isinstance(change.part.value, dict):
                make_keys_plain(change.part.value)
        return memo

    def _torchs_random_states(self) -> list[bytes]:
        """The states of the generators that a run can draw from, the default one first."""
        generators = [part.value for part in self.environment.generators if part.value is not None]
        return [*map(generator_state, (*torchs_generators(), *generators))]

    @staticmethod
    def modes() -> Any:
        """Return the modes and settings of torch."""
        return current_context(), torch.get_default_dtype(), current_settings()

    def _seeds(self) -> list[int]:
        """The seeds of the generators that the run knows; reseeding one is not always visible."""
        generators = [part.value for part in self.environment.generators if part.value is not None]
        if torch.cuda.is_initialized():
            generators += torch.cuda.default_generators
        return [torch.initial_seed(), *(generator.initial_seed() for generator in generators)]

    def _check_arrays(self) -> None:
        """Block if arrays may change with tensors that the run writes to.

        Whether they do in this run can show nowhere: the same numbers may have been there.
        """
        parts = self.environment.parts
        arrays = [part for part in parts if part.kind is CaptureKind.ARRAY]
        if not arrays:
            return
        tensors = [part for part in parts if part.kind is CaptureKind.TENSOR]
        values = ([part.value for part in several] for several in (tensors, arrays))
        for one, other in sorted(overlap(*values)):
            tensor, array = tensors[one], arrays[other]
            self.environment.shared_memory.add((tensor, array))
            if self._writer.writes.wrote_to(tensor.value):
                self.block(
                    f"the run writes to a tensor in the memory of {array.label}", array.label
                )

    def _check_addresses(self) -> None:
        """Block if code does more with addresses of tensors than to compare them."""
        addresses = {op.index for op in self.tape.ops if op.target is ADDRESS}
        if not addresses:
            return
        used = [[guard.index] for guard in self.tape.guards if not isinstance(guard, TruthGuard)]
        used += [op.operands for op in self.tape.ops if op.target not in _COMPARING]
        for index in sorted(addresses.intersection(chain.from_iterable(used))):
            op = self.tape.ops[index]
            where = f" at {op.site.place}" if op.site is not None else ""
            self.tape.block(
                f"{name_of(op.target)}{where} passes the content of a tensor to code that cannot "
                "be watched"
            )

    def _check_opaque_ops(self, changes: list[EnvironmentChange]) -> None:
        """Block if code that is called as one op might read the run's changes.

        A replay changes objects only at its end. Other ops read no objects.
        """
        changed: dict[str, str] = {}
        for change in changes:
            if change.part.kind is not CaptureKind.TENSOR:
                changed[str(change.key)] = change.label
                part: Any = change.part
                # An item of what has a name: `self.log`, a global.
                while part is not None and part.kind in _CONTAINERS:
                    changed[str(part.key)] = change.label
                    part = part.parent
        self._check_stores()
        if not changed:
            return
        for op in self.tape.ops:
            of_torch = is_torchs_function(op.target) and _implementation(op.target) is None
            of_torch = of_torch or works_on_containers(op.target)  # whose items are no code's
            if op.kind is OpKind.CALL and not (of_torch or op.target in JOINT):
                read = changed.keys() & self._names_read(op)
                if read:
                    where = f" at {op.site.place}" if op.site is not None else ""
                    what = display_name(op.target)
                    self.tape.block(
                        f"{what}{where} is called as one op, and might read what the run changes: "
                        f"{', '.join(sorted(changed[name] for name in read))}"
                    )

    def _check_stores(self) -> None:
        """Block if code that is called as one op assigns to what the run read before.

        Whether it does so in this run can show nowhere: the same number may have been there.
        """
        calls = [op for op in self.tape.ops if op.kind is OpKind.CALL]
        opaque = {
            id(op.target): op
            for op in calls
            if not (is_torchs_function(op.target) or op.target in JOINT or may_be_gate(op))
            and name_of(op.target) not in _HOOKING  # these run later
        }
        if any(name_of(op.target) in _BACKWARD for op in calls) and any(map(_keeps, self._hooks())):
            self.tape.block("a backward pass of the run calls hooks that may keep something")
        if not opaque:
            return
        attributes: dict[str, str] = {}
        containers: dict[str, str] = {}
        for part in self.environment.parts:
            if part.parent is None or part.kind is CaptureKind.TENSOR:
                continue
            if part.kind in _ITEMIZED:
                containers[str(part.key)] = part.label
            if part.access is not Access.ROOT:
                attributes[str(part.key)] = part.label
        for op in opaque.values():
            names, mutates, read = self._stores_of(op)
            found = {attributes[name] for name in names & attributes.keys()}
            if mutates:
                found |= {containers[name] for name in read & containers.keys()}
            if found:
                where = f" at {op.site.place}" if op.site is not None else ""
                self.tape.block(
                    f"{display_name(op.target)}{where} is called as one op, and may assign to "
                    f"{', '.join(sorted(found))}"
                )

    def _hooks(self) -> Iterator[types.FunctionType]:
        """Yield the code of the hooks on tensors that a backward pass of the run may call."""
        for op in self.tape.ops:
            if op.kind is OpKind.CALL and name_of(op.target) in _HOOKING:
                yield from self._functions_of(op)
        for part in self.environment.parts:
            if part.kind is CaptureKind.TENSOR and part.value is not None:
                for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    for hook in (getattr(part.value, table, None) or {}).values():
                        function = getattr(hook, "__func__", hook)
                        if isinstance(function, types.FunctionType):
                            yield from reachable_from(function).functions

    def _stores_of(self, op: Op) -> tuple[set[str], bool, set[str]]:
        """The attributes and globals that an op assigns to, whether to items, and what it names."""
        stored: set[str] = set()
        read: set[str] = set()
        mutates = False
        owner = getattr(op.target, "__self__", None)
        for function in self._functions_of(op):
            context = _context_of(function, owner)
            for code in codes_in(function.__code__):
                named, items = assigned_in(code, context)
                stored |= named
                mutates = mutates or items
                read.update(code.co_names, code.co_freevars)
        return stored, mutates, read

    def _functions_of(self, op: Op) -> list[types.FunctionType]:
        found: list[types.FunctionType] = []
        for thing in _code_in(op.target, *op.args, *op.kwargs.values()):
            if isinstance(thing, types.CodeType):
                cells = tuple(types.CellType() for _ in thing.co_freevars)
                found.append(types.FunctionType(thing, {}, closure=cells))
            elif isinstance(thing, types.FunctionType):
                found += reachable_from(thing).functions
            elif isinstance(thing, Existing):
                if thing.part.kind is CaptureKind.MODULE:
                    found += reachable_from(type(thing.part.value)).functions
            elif not thing.__module__.startswith("torch."):
                found += reachable_from(thing, _FUNCTION_METHODS).functions
        return found

    def _names_read(self, op: Op) -> frozenset[str]:
        """The names that the code of an opaque op uses, as far as known."""
        names: set[str] = set()
        called = op.target, *op.args, *op.kwargs.values(), _implementation(op.target)
        for thing in _code_in(*called):
            if isinstance(thing, types.CodeType):
                names.update(names_in(thing))
            elif isinstance(thing, types.FunctionType):
                names |= reachable_from(thing).names
            elif isinstance(thing, Existing):
                if thing.part.kind in (CaptureKind.MODULE, CaptureKind.OBJECT):
                    names |= self.environment.names
            else:
                names |= reachable_from(thing, _FUNCTION_METHODS).names
        return frozenset(names)


def _code_in(*things: Any) -> Iterator[Any]:
    """Yield the code, functions and existing objects in things, and classes of bound methods."""
    waiting = [*things]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, (types.CodeType, types.FunctionType)):
            yield thing
        elif isinstance(thing, Construction):
            waiting += thing.args
        elif isinstance(thing, (tuple, list)):
            waiting += thing
        elif isinstance(thing, Existing):
            yield thing
            waiting.append(thing.part.value)
        elif isinstance(thing, types.MethodType):
            waiting.append(thing.__func__)
            if isinstance(thing.__self__, type):
                yield thing.__self__
        elif isinstance(thing, functools._lru_cache_wrapper):
            waiting.append(thing.__wrapped__)


def _implementation(target: Any) -> Any:
    """Return the Python function behind a custom operator; None if there is none."""
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return None
    name = target._name if isinstance(target, OpOverload) else target._qualified_op_name
    definition = _OPDEFS.get(name.partition(".")[0])
    return None if definition is None else definition._init_fn


# The operators that are defined by functions of Python.
_OPDEFS: Mapping[str, Any] = internal(
    "torch._library.custom_ops.OPDEFS", {}, "operators defined in Python", ""
)


_COMPARING = frozenset(
    {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)
_SEEDING = {"manual_seed", "manual_seed_all"}
_RANDOM = ("random", "rand", "randn", "randint", "choice", "shuffle", "uniform", "normal", "sample")
_CONTAINERS = (CaptureKind.LIST, CaptureKind.DICT, CaptureKind.TUPLE, CaptureKind.GROWING)
_ITEMIZED = (
    CaptureKind.LIST, CaptureKind.DICT, CaptureKind.SET, CaptureKind.LARGE, CaptureKind.ARRAY,
    CaptureKind.OPEN_ARRAY, CaptureKind.GROWING,
)  # fmt: skip
_BACKWARD = frozenset({"backward", "grad"})
_HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


def _keeps(function: types.FunctionType) -> bool:
    """Return whether code may put something where other code finds it."""
    if is_finished(function):
        return False
    return any(any(assigned_in(code)) for code in codes_in(function.__code__))


def _context_of(function: types.FunctionType, owner: Any) -> str | None:
    """Return the argument that is the context, of a method of an `autograd.Function`."""
    name = function.__name__
    if name not in _FUNCTION_METHODS or not (
        isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    ):
        return None
    first = isinstance(inspect.getattr_static(owner, name, None), classmethod)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return names[first] if len(names) > first else None


_FUNCTION_METHODS = frozenset({"forward", "setup_context"})  # of an autograd.Function


def failing_op(ops: list[Op]) -> str:
    """Say in which op a run has ended, on which tensors and where; "" if the last one succeeded."""
    if not ops or ops[-1].raised is None:
        return ""
    op = ops[-1]
    metas = [ops[ref.index].meta for ref in refs_in((op.args, op.kwargs))]
    tensors = [
        f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
        for meta in metas
        if isinstance(meta, TensorMeta)
    ]
    module = f" of {op.scope.path}" if op.scope.path else ""
    where = "" if op.site is None else f" at {op.site.place}"
    return f" in {display_name(op.target)}({', '.join(tensors)}){module}{where}"


# The generators of Python and numpy during a run: whether only its ops have moved them.


class Draws:
    """Compares the states of generators with those that the ops of a run have left.

    An op that draws is called by each replay, which draws the same. The generators are those that
    the model holds, or is given.
    """

    def __init__(self, generators: list[Any]) -> None:
        # The run may be the first to import numpy; what it has drawn before its first op is
        # unknown, as numpy's generator begins with a seed of the system's.
        self._generators = [*global_generators(), *generators]
        self._states = [*map(generator_state, self._generators)]
        self._moved: set[int] = set()

    def begin(self) -> None:
        """Note which generators have moved since the last op."""
        now = map(generator_state, self._generators)
        differ = map(operator.ne, now, self._states)
        self._moved.update(n for n, is_moved in enumerate(differ) if is_moved)

    def end(self) -> None:
        """Take the states that an op has left."""
        self._states = [*map(generator_state, self._generators)]

    def unseen(self) -> Iterator[Any]:
        """Yield the generators that something else has moved as well."""
        self.begin()
        yield from (self._generators[number] for number in sorted(self._moved))
        for generator in global_generators():
            if all(one is not generator for one in self._generators):
                yield generator
