"""A recorded path as a compiled function, with its checks, comparisons and output."""

from __future__ import annotations

import itertools
import math
import operator
import time
import types
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.engine.codegen import write_run
from bendtrace.engine.compile_attempts import (
    CompiledFunction,
    CompiledResult,
    CompileState,
    QuietCompilation,
)
from bendtrace.engine.compile_probing import (
    CompileRefusal,
    Extents,
    GateSplice,
    ProbeFindings,
    Unknown,
    differs,
    obstacle_to_compiling,
    probe,
    with_place,
)
from bendtrace.engine.compile_settings import CompileSettings, dynamo
from bendtrace.engine.guard_kinds import Analysis, GuardKind, NumberOrigin, number_origin
from bendtrace.engine.program import Program
from bendtrace.engine.schedule import Schedule
from bendtrace.engine.source import INFIX, Code, GeneratedSource, dependencies_of
from bendtrace.engine.stretches import Stretch
from bendtrace.record.recorder import Recording
from bendtrace.tape.contexts import Context
from bendtrace.tape.guards import (
    IdentityGuard,
    LengthGuard,
    OtherGuard,
    SameGuard,
    TruthGuard,
    ValueGuard,
)
from bendtrace.tape.structure import Instance
from bendtrace.tape.tape import Guard, Op, OpKind, Ref, TensorMeta, Use, has_tensors, refs_in
from bendtrace.watch.functions import display_name, name_of
from bendtrace.watch.host_io import environ
from bendtrace.watch.writes import storage_of

if TYPE_CHECKING:
    from bendtrace.insert.compiling import SplicedTurns

# The path that a call took, and the key of its splices.
PathKey = tuple[Stretch | None, Hashable]

_WINDOW = 16
_STEADY = 2  # calls in which an insertion has changed its value, and is taken to go on so
_MOST_SIZES = 4096  # sets of sizes that are kept in mind
_PROBES = 4  # that are made for a set of sizes


class _SpeculationFailure:
    """The result of a speculation that failed."""


FAILED = _SpeculationFailure()


@dataclass(slots=True, eq=False)
class UncheckedResult:
    """The result of a graph compiled during this call, which a replay has to confirm."""

    output: Any
    result: CompiledResult  # what the graph returned
    inputs: list[Tensor]  # the tensors that existed before the call
    kept: tuple[Any, Any] = ((), ())  # observed values, and the same computed without a compiler


@dataclass(slots=True, eq=False)
class SplicedCall:
    """A call that a path with splices has served."""

    output: Any
    kept: Sequence[Tensor]  # the observed values at gates
    changed: Tensor | None  # for each function at a gate, whether it changed its value
    alone: Sequence[Tensor]  # those of the observed values that nobody else has, nor their memory


class CompiledPath(CompiledFunction):
    """One path, compiled.

    Its last stretch is given. The insertions at its gates are None without gates.
    """

    failures: int
    is_unusable: bool

    def __init__(
        self,
        home: Program,
        stretch: Stretch,
        settings: CompileSettings,
        spliced: SplicedTurns | None = None,
    ) -> None:
        super().__init__(settings)
        self.home = home
        self.stretch = stretch
        # The key of the splices; other splices with this key can use the path, too.
        self.key: Hashable = None if spliced is None else spliced.key
        self.unchanged: frozenset[int] = frozenset()  # functions that return their argument itself
        # Those of which the graph does not say whether they change their value, as they did in the
        # calls before.
        self.silent: frozenset[int] = frozenset()
        self.lacking: int = 0  # how many insertions could not use it, as they have to know that
        self.lacked_by: SplicedTurns | None = None  # the latest of these
        self.state = CompileState.REFUSED
        # For the latest calls that it was tried on, whether it served them.
        self.recent: deque[bool] = deque(maxlen=_WINDOW)
        self.window: deque[PathKey] = deque(maxlen=_WINDOW)  # of the latest calls with these guards
        self._admitting = home
        self._entry = home.global_state.context
        self._sizes: dict[Any, bool] = {}
        self._unlike: Counter[Any] = Counter()

    @property
    def recording(self) -> Recording:
        """The run that it repeats."""
        return self.stretch.recording

    # Making it

    def make(
        self,
        arguments: tuple[Any, ...],
        output: Any,
        spliced: SplicedTurns | None = None,
        may_be_silent: bool = True,
    ) -> None:
        """Write, compile and confirm the function after a replay of the call, with its output.

        With `may_be_silent`, the graph may leave out whether insertions change their values.
        """
        if spliced is not None and may_be_silent:
            self.silent = spliced.changing(_STEADY)
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings(), QuietCompilation():
                warnings.simplefilter("ignore")  # what compilers have to say, and ops once more
                self._make(arguments, output, spliced)
        except CompileRefusal as refusal:
            self.reason = str(refusal)
        self.seconds: float = time.perf_counter() - begun
        self.settings.warn()

    def _make(self, arguments: tuple[Any, ...], output: Any, spliced: SplicedTurns | None) -> None:
        recording, global_state = self.recording, self.home.global_state
        splices = {} if spliced is None else spliced.splices
        reason = obstacle_to_compiling(recording, global_state, splices)
        if reason is not None:
            raise CompileRefusal(reason)
        findings = probe(recording, arguments, splices)
        if findings is None:
            raise CompileRefusal("its guards came out otherwise when it was looked at op by op")
        self._findings, self.unchanged = findings, findings.unchanged
        if (op := Extents(recording, findings).changes_rank()) is not None:
            reason = f"how many dimensions {name_of(op.target)} gives depends on values"
            raise CompileRefusal(with_place(reason, op))
        if self.stretch is not self.home.root:
            # Of a path that branched off, the program's check does not know all guards.
            self._admitting = Program(recording, global_state)
        try:
            self._compile(arguments, output, spliced, exactly=False)
        except Unknown as unknown:
            try:
                self._compile(arguments, output, spliced, exactly=True)
            except Unknown:
                raise CompileRefusal(
                    f"{unknown}; its segments may be compiled by themselves"
                ) from None

    def _compile(
        self, arguments: tuple[Any, ...], output: Any, spliced: SplicedTurns | None, exactly: bool
    ) -> None:
        """Compile, or raise `Unknown` if not even the sizes that are picked by values can vary."""
        recording, findings = self.recording, self._findings
        ops = recording.tape.ops
        leaves = _output_ops(recording)
        roots = {leaf: findings.first.get(leaf, leaf) for leaf in leaves}
        made = [i for i in dict.fromkeys(roots.values()) if not ops[i].is_given]
        given = [i for i in dict.fromkeys(roots.values()) if ops[i].is_given]
        analysis = Analysis(recording.tape)
        splices = None if spliced is None else spliced.splices
        straight = StraightFunction(
            recording, analysis, findings, self._entry, made, exactly, splices, self.silent
        )
        self._plain, self._leaves, self._kept = straight.function, len(made), straight.kept
        self._computed = [len(made) + slot for slot in straight.computed]
        gathered = straight.inputs + [i for i in given if i not in straight.inputs]
        self._count = len(straight.inputs)
        self._gather = _gatherer(recording, gathered)
        slots = {index: slot for slot, index in enumerate(made)}
        slots |= {index: -1 - slot for slot, index in enumerate(reversed(gathered))}
        self._names = tuple(f"v{leaf}" for leaf in roots)
        slots_of_leaves = [slots[root] for root in roots.values()]
        # Mostly each is a result of its own, in that order.
        self._slots = None if slots_of_leaves == list(range(len(made))) else slots_of_leaves
        past = len(ops) + 1  # where all ops have been carried out, and all guards tested
        finish = Schedule(recording, analysis, self._entry, {}, start=past, available=leaves)
        self._finish = write_run(finish).function
        self._picked = straight.picked
        self._variables = [(op.args[0], op.meta) for op in ops if op.target is environ]
        self._needs_sizes = exactly or findings.writes or self._depends_on_identity(leaves)
        self._resizable = [
            slot for slot, i in enumerate(gathered) if isinstance(ops[i].meta, TensorMeta)
        ]
        self._is_dynamic = straight.is_dynamic
        self.text: str = straight.text
        devices = {op.meta.device.type for op in ops if isinstance(op.meta, TensorMeta)}
        compilers = self.settings.compilers(devices <= {"cpu"})
        for compiler in compilers:
            backend = self.compile(straight.function, compiler, may_assume=exactly)
            gathered_now = self._gather(arguments)
            self._sizes = {self._sizes_of(gathered_now): True} if self._needs_sizes else {}
            try:
                with _capturing(self._is_dynamic), self.settings.keeping(self._cache_key()):
                    first = self.attempt(arguments, spliced, raises=True)
                break
            except CompileRefusal:
                if compiler is compilers[-1]:
                    raise
        if backend.assumes:
            raise Unknown("what it does with a size that depends on values is right for some only")
        if isinstance(first, _SpeculationFailure):
            raise CompileRefusal("its guards came out otherwise when it was compiled")
        if not isinstance(first, UncheckedResult):
            raise CompileRefusal("torch.compile did not compile it")
        self.confirm(first, output)
        self.recent.clear()
        self.failures = 0

    def _cache_key(self) -> str:
        """Return the source, with the metadata of its inputs."""
        metas = [op.meta for op in self.recording.tape.ops if op.is_given]
        return f"{self.text}{metas}"

    def _depends_on_identity(self, leaves: Iterable[int]) -> bool:
        """Return whether identity or shared memory of the tensors matters.

        This depends on sizes and strides as well, so there is one probe for each set of them.
        """
        guards = self.recording.tape.guards
        compared = {guard.index for guard in guards if isinstance(guard, SameGuard)}
        distinct = {guard.index for guard in guards if isinstance(guard, OtherGuard)}
        findings = self._findings
        matters = distinct | (compared if findings.writes else compared & set(leaves))
        for index in matters & findings.dynamic:
            if name_of(self.recording.tape.ops[index].target) not in _BY_TYPE:
                raise CompileRefusal(
                    "whether a tensor is copied depends on a size that depends on values"
                )
        return bool(matters)

    def confirm(self, unchecked: UncheckedResult, output: Any) -> None:
        """Use a newly compiled graph, if its output equals the output of the replay."""
        is_first = self.state is CompileState.REFUSED
        is_same = self.compare(unchecked.output, output, unchecked.result, unchecked.inputs)
        for ours, theirs in zip(*unchecked.kept, strict=True):  # which are copied, each by itself
            is_same = is_same and self.compare(ours, theirs, unchecked.result, [])
        if is_same and is_first:
            self.reason, self.is_unusable = "", False
            self.state = CompileState.MEASURED if self.settings.drop_slower else CompileState.USED

    # Using it

    def admits(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether all input guards hold."""
        return self._admitting.admits(arguments)

    def attempt(
        self, arguments: tuple[Any, ...], spliced: SplicedTurns | None = None, raises: bool = False
    ) -> Any:
        """Run it, for arguments for which the input guards hold.

        Return the output, for a path with splices in a `SplicedCall`; an `UncheckedResult` if a
        graph was compiled in between; or `FAILED`. With `raises`, an error is raised as a
        `CompileRefusal`.
        """
        if any(environ(name) != value for name, value in self._variables):
            return self._missed()
        gathered = self._gather(arguments)
        if self._needs_sizes and not self._knows_sizes(gathered, arguments, spliced):
            return self._missed()
        given = gathered[: self._count] if len(gathered) > self._count else gathered
        models = given
        if spliced is not None:
            given = (*given, *spliced.tensors)
        found = self.find(given)
        if found is None and spliced is not None:
            if not spliced.identities.isdisjoint(map(id, models)):
                self.reason = "a tensor of what is inserted is one of the model's own, or an input"
                if raises:
                    raise CompileRefusal(self.reason)
                return self._missed()
        try:
            result = self.call(given, found)
            if result is None or not (result.truth is None or result.truth.item()):
                return self._missed()
        except Exception as error:
            self.note(error)
            if raises:
                raise CompileRefusal(self.reason) from None
            return self._missed()
        made = self.in_order(result)
        values: Sequence[Any] = made if spliced is None else made[: self._leaves]
        if self._slots is not None:
            both = (*made, *gathered)
            values = [both[slot] for slot in self._slots]
        output = self._finish(arguments, dict(zip(self._names, values, strict=True)))
        if self._backend is not None and self._backend.assumes:
            self.state: CompileState = CompileState.REFUSED
            self.reason: str = (
                "for other sizes, what is picked by values would have to be checked anew"
            )
            return self._missed()
        if result.graph not in self._confirmed:
            inputs = [item for item in (*gathered, *given) if isinstance(item, Tensor)]
            inputs = list({id(item): item for item in inputs}.values())
            return UncheckedResult(output, result, inputs, self._observed_values(given, made))
        self.hits += 1
        self.recent.append(True)
        if spliced is None:
            return output
        end = self._leaves + self._kept
        alone: Sequence[Tensor] = ()
        if found is not None and self._kept:
            if found.alone is None:
                found.alone = self._find_alone(made, (*gathered, *given))
            alone = [made[slot] for slot in found.alone]
        changed = made[end] if len(made) > end else None
        return SplicedCall(output, made[self._leaves : end], changed, alone)

    def _find_alone(self, made: Sequence[Tensor], given: Sequence[Any]) -> frozenset[int]:
        """Return the positions of observed values whose memory nobody else has."""
        # A backward pass may need what was computed, and a constant of the graph is always there.
        if any(tensor.requires_grad for tensor in made) or self._findings.dynamic:
            return frozenset()
        inputs = [tensor for tensor in given if isinstance(tensor, Tensor)]
        users = Counter(map(storage_of, {id(one): one for one in (*made, *inputs)}.values()))
        return frozenset(
            slot
            for slot in self._computed
            if sum(made[slot] is one for one in made) == 1
            and storage_of(made[slot])
            and users[storage_of(made[slot])] == 1
            and made[slot].untyped_storage().nbytes() == made[slot].nbytes
            and not (made[slot].is_inference() or made[slot].is_conj() or made[slot].is_neg())
        )

    def _observed_values(self, given: Sequence[Any], made: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the observed values, and the same values computed without a compiler."""
        if len(made) == self._leaves:
            return (), ()
        result = self._plain(*given)
        if result is None:
            raise CompileRefusal("its guards came out otherwise when it was run without a compiler")
        return list(made[self._leaves :]), list(result[1][self._leaves :])

    def _missed(self) -> _SpeculationFailure:
        self.failures += 1
        self.recent.append(False)
        return FAILED

    def _knows_sizes(
        self, gathered: tuple[Any, ...], arguments: tuple[Any, ...], spliced: SplicedTurns | None
    ) -> bool:
        sizes = self._sizes_of(gathered)
        verdict = self._sizes.get(sizes)
        if verdict is None:
            try:
                splices = {} if spliced is None else spliced.splices
                findings = probe(self.recording, arguments, splices)
            except CompileRefusal:
                findings = None
            verdict = findings is not None and findings.first == self._findings.first
            picked = {} if findings is None else findings.roots
            if verdict and any(picked.get(root) != was for root, was in self._picked.items()):
                # It says nothing about calls that pick as much as was recorded.
                self._unlike[sizes] += 1
                if self._unlike[sizes] < _PROBES:
                    return False
                verdict = False
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
                self._unlike.clear()
            self._sizes[sizes] = verdict
        return verdict

    def _sizes_of(self, gathered: tuple[Any, ...]) -> Any:
        tensors = [gathered[slot] for slot in self._resizable]
        # Those of a parameter only change together with what torch.compile itself checks.
        return tuple((t.shape, t.stride()) for t in tensors if type(t) is not nn.Parameter)


def _capturing(wanted: bool) -> AbstractContextManager[Any]:
    """Return a context in which torch.compile takes ops that give sizes which depend on values."""
    if not wanted:
        return nullcontext()
    patch: AbstractContextManager[Any] = dynamo().config.patch(dict.fromkeys(_CAPTURES, True))
    return patch


def _output_ops(recording: Recording) -> list[int]:
    """Return the ops whose tensors the output consists of, or is read from."""
    ops = recording.tape.ops
    found: dict[int, None] = {}
    waiting = [ref.index for ref in refs_in(recording.root.output)]
    while waiting:
        op = ops[waiting.pop(0)]
        if isinstance(op.meta, TensorMeta):
            found[op.index] = None
        else:
            waiting += op.operands
    return list(found)


def _gatherer(recording: Recording, indices: Iterable[int]) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the arguments that returns the current inputs and state."""
    targets = [recording.tape.ops[index].target for index in indices]
    source = GeneratedSource()
    source.begin("gather(A)")
    source.take(targets)
    source.line("return (" + "".join(f"{source.part(target)}, " for target in targets) + ")")
    return Code(source, "gather").function


# What gives its tensor back, or a copy, going by types and arguments alone.
_BY_TYPE = frozenset(
    {
        "alpha_dropout", "bfloat16", "bool", "cpu", "cuda", "double", "dropout", "dropout_",
        "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float",
        "half", "int", "long", "to", "type", "type_as",
    }
)  # fmt: skip
_CAPTURES = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


# Writing a path as one straight function of tensors that torch.compile can compile whole.
#
# The function returns one boolean tensor that says whether all data guards of the path hold, and
# the tensors that the output consists of. It never branches on a data guard. Only types and
# sizes, which are known during compilation, are tested immediately; if they differ from the
# recorded ones, the function returns None.

# Integers up to here are exact as a float64 too, and so are sums and products of those below
# the square root as an int64.
_EXACT = 1 << 53
_SMALL = 1 << 31


# Ops as the source that torch.compile is given: methods and operators, called by their names.


class Expressions(GeneratedSource):
    """Writes ops so that torch.compile knows them: as methods, operators and literals."""

    def __init__(self) -> None:
        super().__init__()
        self.names.update(torch=torch, math=math, operator=operator)

    def call(self, op: Op) -> str:
        """Return an expression, or a statement for an item assignment, that does an op."""
        args, target = op.args, op.target
        if op.target is Tensor.__setitem__:
            return f"{self.value(args[0])}[{self.value(args[1])}] = {self.value(args[2])}"
        if target in (operator.getitem, Tensor.__getitem__):
            return f"{self.value(args[0])}[{self.value(args[1])}]"
        if op.kind is OpKind.SCALAR and target in INFIX:
            return f"({self.value(args[0])} {INFIX[target]} {self.value(args[1])})"
        name = name_of(target)
        if isinstance(target, types.MethodWrapperType):
            return f"{self.value(args[0])}.{name}"
        given = [self.value(value) for value in args]
        named = [f"{key}={self.value(value)}" for key, value in op.kwargs.items()]
        if _is_tensor_method(target) and given:
            if name in _REFLECTED:
                return f"({given[1]} {_REFLECTED[name]} {given[0]})"
            return f"{given[0]}.{name}({', '.join(given[1:] + named)})"
        return f"{self.constant(target)}({', '.join(given + named)})"

    def constant(self, value: Any) -> str:
        """Return an expression for a value that does not change."""
        kind = type(value)
        if kind is bytes:
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if kind is complex:
            return f"complex({self.constant(value.real)}, {self.constant(value.imag)})"
        if kind is slice:
            parts = value.start, value.stop, value.step
            return f"slice({', '.join(map(self.constant, parts))})"
        if kind in (torch.dtype, torch.memory_format, torch.layout):
            return str(value)
        if kind is torch.device:
            return f"torch.device({str(value)!r})"
        return super().constant(value)

    def _instance(self, instance: Instance) -> str:
        # Of a tuple of some kind: see `obstacle_to_compiling`.
        return self.value(tuple(instance.items))


def _is_tensor_method(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    return getattr(Tensor, name, None) is target


# Operators with the tensor on their right.
_REFLECTED = {
    "__radd__": "+", "__rsub__": "-", "__rmul__": "*", "__rdiv__": "/", "__rtruediv__": "/",
    "__rfloordiv__": "//", "__rmod__": "%", "__rpow__": "**", "__rmatmul__": "@",
    "__rand__": "&", "__ror__": "|", "__rxor__": "^", "__rlshift__": "<<", "__rrshift__": ">>",
}  # fmt: skip


def wide_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to compute in for values of a dtype to stay exact; None if unknown."""
    if dtype is torch.bool:
        return dtype
    if dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return torch.float64
    exact = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    return torch.int64 if dtype in exact else None


class StraightFunction(Expressions):
    """The function of a path.

    The `entry` context is the one at its start; the output consists of the tensors of the ops in
    `leaves`. With `exactly`, all value-dependent sizes must equal the recorded ones.

    Raises:
        Refusal: something cannot be tested with a tensor.
        Unknown: a value-dependent size cannot be tested, unless it must equal the recorded one.
    """

    def __init__(
        self,
        recording: Recording,
        analysis: Analysis,
        findings: ProbeFindings,
        entry: Context,
        leaves: Iterable[int],
        exactly: bool = False,
        splices: Mapping[int, GateSplice] | None = None,
        silent: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._splices = splices or {}
        self._silent, self._functions = silent, itertools.count()
        self._kept: list[str] = []
        self.computed: list[int] = []  # those of tensors that are computed from the call's
        self._from_call: set[int] = set()  # ops that compute with tensors of the call
        self._changed: list[str] = []
        self._given = 0  # tensors of splices so far
        self._exactly = exactly
        self._extents = Extents(recording, findings)
        self._tape = recording.tape
        self._analysis = analysis
        self._findings = findings
        self._entry = entry
        self._leaves = tuple(leaves)
        self._kinds: dict[int, NumberOrigin] = {}
        self._lifted: dict[int, str] = {}
        self._conditions: list[str] = []
        self._counts: dict[int, str] = {}
        self.picked: dict[int, Any] = {}  # the value-dependent sizes that it tests, by op
        self.tested: list[int] = []  # the numbers of the guards that it tests with a tensor
        self.is_dynamic: bool = bool(findings.dynamic)  # with sizes that depend on values
        for op in self._tape.ops:
            self._sort(op)
            if has_tensors(op.meta) and (op.kind is OpKind.INPUT or self._computes_from_call(op)):
                self._from_call.add(op.index)
        guards: dict[int, Guard] = {}
        tested: set[Any] = set()
        for number, guard in self._data_guards():
            if guard.key not in tested:
                tested.add(guard.key)
                guards[number] = guard
        needed = self._find_needed()
        self._schedule = Schedule(recording, analysis, entry, guards, needed=needed)
        # The ops of its arguments, in order: inputs and state.
        self.inputs: list[int] = [
            op.index for op in self._tape.ops if op.is_given and op.index in needed
        ]
        self._write()
        self.text: str = "\n".join(self.lines) + "\n"  # the source of the function
        # The number of observed tensors that it returns after the leaves; if gates have functions,
        # a tensor follows that says which of them changed their values.
        self.kept: int = len(self._kept)
        # By file and name torch.compile remembers which sizes of a function were seen to change.
        exec(compile(self.text, f"<bendtrace straight {next(_serials)}>", "exec"), self.names)
        self.function: Callable[..., Any] = self.names["straight"]

    def _computes_from_call(self, op: Op) -> bool:
        """Return whether no compiler can know the result of an op before the call."""
        name = "" if op.kind is not OpKind.CALL else name_of(op.target)
        is_filled = name.endswith("_like") or name.startswith("new_")  # going by sizes alone
        return not (is_filled or self._from_call.isdisjoint(op.operands))

    # What is a number, and which

    def _sort(self, op: Op) -> None:
        """Record where the number that an op returns comes from, if it returns one."""
        origin = number_origin(op, self._kinds, not self._extents.varying.isdisjoint(op.operands))
        is_of_gate = op.kind is OpKind.SCALAR and type(op.meta) is bool
        if op.target is environ or (is_of_gate and op.operands[0] in self._splices):
            origin = NumberOrigin.STATIC  # a text, or whether containers were changed themselves
        if origin is not None:
            self._kinds[op.index] = origin

    def _find_needed(self) -> set[int]:
        """Find the ops that the function runs, and the inputs and state among them."""
        waiting = list(self._leaves)
        for op in self._tape.ops:
            if op.is_work and op.index not in self._kinds:
                waiting.append(op.index)
        for _, guard in self._data_guards():
            waiting += self._roots(guard.index)
        return dependencies_of(self._tape.ops, waiting)

    def _roots(self, index: int) -> Iterable[int]:
        """Return the origins of a tested value, as tensors or during compilation."""
        kind, op = self._kinds.get(index), self._tape.ops[index]
        if kind is not NumberOrigin.VALUE and not (
            kind is NumberOrigin.SIZE and type(op.meta) is bool
        ):
            return (index,)
        refs = op.operands
        if op.kind is OpKind.CALL:
            return refs
        return [root for ref in refs for root in self._roots(ref)]

    def _data_guards(self) -> Iterable[tuple[int, Guard]]:
        for number, guard in enumerate(self._tape.guards):
            if self._analysis.kinds[number] is GuardKind.DATA:
                is_variable = self._tape.ops[guard.index].target is environ
                if not (isinstance(guard, IdentityGuard) or is_variable):  # see `CompiledPath`
                    yield number, guard

    # Writing

    def _write(self) -> None:
        count = sum(len(splice.tensors) for splice in self._splices.values())
        names = [*(f"v{index}" for index in self.inputs), *(f"p{slot}" for slot in range(count))]
        self.begin(f"straight({', '.join(names)})")
        grad = self._entry.grad
        for _, guards, op in self._schedule.steps():
            for number, guard in guards:
                self._test(number, guard)
            if op is None:
                continue
            if op.kind is OpKind.CALL and op.context.grad != grad:
                grad = op.context.grad
                self.line(f"torch._C._set_grad_enabled({grad})")
            self._carry_out(op)
        if grad != self._entry.grad:
            self.line(f"torch._C._set_grad_enabled({self._entry.grad})")
        if self._exactly:
            self._test_roots()
        given = [*(f"v{index}" for index in self._leaves), *self._kept]
        if self._changed:
            given.append(self._new(f"torch.stack([{', '.join(self._changed)}])"))
        self.line(f"return {self._conjunction()}, ({''.join(f'{name}, ' for name in given)})")

    def _conjunction(self) -> str:
        if not self._conditions:
            return "None"
        if len(self._conditions) == 1:
            return self._conditions[0]
        return f"torch.stack([{', '.join(self._conditions)}]).all()"

    def _carry_out(self, op: Op) -> None:
        if op.index in self._splices:
            self._through(op, self._splices[op.index])
            return
        if (
            self._kinds.get(op.index) is not None
            and self._kinds[op.index] is not NumberOrigin.STATIC
        ):
            self.is_dynamic = True
        if op.index in self._extents.varying and op.target in (Tensor.unbind, torch.unbind):
            # How many there are has to be known before they are taken apart.
            for _, guard in self._schedule.guards.get(op.index + 1, ()):
                if guard.index == op.index and isinstance(guard, LengthGuard):
                    tensor, dim = (*op.args, op.kwargs.get("dim", 0))[:2]
                    if not self._exactly:
                        raise Unknown("what depends on values is taken apart", op)
                    size = f"{self.value(tensor)}.size({self.value(dim)})"
                    self.line(f"torch._check({size} == {guard.answer})")
        call = self.call(op)
        is_statement = op.target is Tensor.__setitem__
        self.line(call if is_statement else f"v{op.index} = {call}")

    def _through(self, op: Op, splice: GateSplice) -> None:
        """Write the insertions at a gate."""
        values = [self.value(value) for value in op.args]
        for step in splice.steps:
            if step.function is None:
                for slot in step.slots:
                    if op.args[slot].index in self._from_call:
                        self.computed.append(len(self._kept))
                    self._kept.append(self._to_keep(values[slot], op))
                continue
            (slot,) = step.slots
            before = values[slot]
            tensors = [f"p{self._given + number}" for number in range(len(step.tensors))]
            self._given += len(tensors)
            made = self._new(f"{self.constant(step.function)}({', '.join([before, *tensors])})")
            if step.kept:
                self._kept += [self._new(f"{made}[{1 + n}]") for n in range(step.kept)]
                made = f"{made}[0]"
            values[slot] = self._new(f"{before} if {made} is None else {made}")
            if next(self._functions) not in self._silent:
                flag = self._new(f"{self.constant(differs)}({before}, {values[slot]})")
                self._changed.append(flag)
        result = splice.gate_result(values)
        items = (
            [item if type(item) is str else repr(item) for item in result]
            if type(result) is tuple
            else None
        )
        given = result if items is None else f"({''.join(f'{item}, ' for item in items)})"
        self.line(f"v{op.index} = {given}")

    def _to_keep(self, value: str, op: Op) -> str:
        """Return the name of a value as it is now, without a graph of autograd."""
        if op.context.grad:
            value = self._new(f"{value}.detach()")
        return self._new(f"{value}.clone()") if self._findings.writes else value

    # Guards

    def _test(self, number: int, guard: Guard) -> None:
        kind = self._kinds.get(guard.index)
        if isinstance(guard, LengthGuard):
            self._test_length(guard)
        elif kind is None or type(guard) not in (TruthGuard, ValueGuard):
            raise CompileRefusal(f"a guard is on what {display_name(self._op(guard).target)} gives")
        elif kind is NumberOrigin.STATIC:
            self._test_static(guard)
        elif kind is NumberOrigin.SIZE and self._exactly:
            if isinstance(guard, ValueGuard) and type(guard.answer) is int:
                # What follows was recorded with the number in place of the size.
                self.line(f"torch._check(v{guard.index} == {guard.answer})")
        elif kind is NumberOrigin.SIZE and isinstance(guard, ValueGuard):
            raise Unknown("a size that depends on values is used as a number", self._op(guard))
        else:
            self.tested.append(number)
            self._conditions.append(self._condition(guard))

    def _op(self, guard: Guard) -> Op:
        return self._tape.ops[guard.index]

    def _test_length(self, guard: Guard) -> None:
        op = self._op(guard)
        if self._kinds.get(guard.index) is NumberOrigin.VALUE:  # of a list of numbers
            size = f"{self.value(op.args[0])}.size(0)"
            if op.target is not Tensor.tolist:
                raise CompileRefusal("a guard is on the length of a list out of a tensor")
            if op.operands[0] in self._extents.varying:
                if not self._exactly:
                    raise Unknown("a list of numbers is as long as values say")
            else:
                self.line(f"if {size} != {guard.answer}: return None")
        else:
            self.line(f"if len(v{guard.index}) != {guard.answer}: return None")

    def _test_static(self, guard: Guard) -> None:
        name, expected = f"v{guard.index}", guard.answer
        if isinstance(guard, TruthGuard):
            self.line(f"if {'not ' * expected}{name}: return None")
        elif type(expected) in (int, bool, str, type(None), *_TORCHS):
            self.line(f"if {name} != {self.constant(expected)}: return None")
        else:
            raise CompileRefusal(f"a guard is on the value {expected!r}")

    def _condition(self, guard: Guard) -> str:
        """Return the name of a boolean tensor that says whether a guard holds."""
        value, expected = self._lift(Ref(guard.index)), guard.answer
        if isinstance(guard, TruthGuard):
            if self._type(guard.index) is not bool:
                value = f"({value} != 0)"
            return self._new(value if expected else f"{value}.logical_not()")
        if type(expected) is bool:
            return self._new(value if expected else f"{value}.logical_not()")
        if type(expected) is float and math.isnan(expected):
            return self._new(f"{value}.isnan()")
        if type(expected) is float and expected == 0:
            sign = f"{value}.signbit()"
            negative = math.copysign(1.0, expected) < 0
            sign = sign if negative else f"{sign}.logical_not()"
            return self._new(f"({value} == 0).logical_and({sign})")
        if type(expected) in (int, float):
            if type(expected) is int and abs(expected) >= 1 << 63:
                raise CompileRefusal(f"a guard is on the value {expected}")
            return self._new(f"({value} == {self.constant(expected)})")
        if type(expected) is list and self._op(guard).target is Tensor.tolist:
            return self._listed(self._op(guard), expected)
        raise CompileRefusal(f"a guard is on the value {expected!r}")

    def _listed(self, op: Op, expected: list[Any]) -> str:
        """Compare a tensor with the recorded list of numbers."""
        ref = op.args[0]
        meta = self._tape.ops[ref.index].meta
        if meta.dtype.is_floating_point or meta.dtype.is_complex or meta.device.type != "cpu":
            raise CompileRefusal("a guard is on a long list of numbers")
        if ref.index in self._extents.varying:
            raise CompileRefusal("a guard is on a list of numbers whose length depends on values")
        self.line(f"if tuple(v{ref.index}.shape) != {tuple(meta.shape)}: return None")
        content = f"torch.tensor({expected!r}, dtype={meta.dtype})"
        return self._new(f"(v{ref.index} == {content}).all()")

    # Numbers as tensors

    def _type(self, index: int) -> type:
        op = self._tape.ops[index]
        return bool if op.target is Tensor.__bool__ else type(op.meta)

    def _new(self, expression: str) -> str:
        name = f"t{len(self.lines)}"
        self.line(f"{name} = {expression}")
        return name

    def _lift(self, value: Any) -> str:
        """Return an expression for a number as a tensor without dimensions, exact."""
        if type(value) is not Ref:
            if type(value) is int and abs(value) >= _EXACT:
                raise CompileRefusal(f"it computes with {value} and a number out of a tensor")
            if type(value) not in (bool, int, float):
                raise CompileRefusal(f"it compares a number out of a tensor with {value!r}")
            return self.constant(value)
        if value.index not in self._lifted:
            self._lifted[value.index] = self._new(self._lifting(self._tape.ops[value.index]))
        return self._lifted[value.index]

    def _lifting(self, op: Op) -> str:
        kind = self._kinds.get(op.index)
        if kind is NumberOrigin.STATIC:
            return f"v{op.index}"
        if kind is NumberOrigin.SIZE:
            if type(op.meta) is not int:
                return self._arithmetic(op)
            return self._counted(op)
        if op.kind is OpKind.CALL:
            return self._out_of(op)
        if op.target is operator.getitem:
            return self._element(op)
        return self._arithmetic(op)

    def _counted(self, op: Op) -> str:
        """A size that depends on values, counted in the mask that it comes from."""
        dims: Iterable[int]
        read = op
        if op.is_element:
            read = self._tape.ops[op.args[0].index]
        tensor = read.args[0].index
        rank = len(self._tape.ops[tensor].meta.shape)
        name = name_of(read.target)
        if read is not op and name in ("shape", "size") and type(op.args[1]) is int:
            dims = (op.args[1],)
        elif read is op and name == "__len__":
            dims = (0,)
        elif read is op and name == "size" and type(read.args[-1]) is int:
            dims = (read.args[-1],)
        elif read is op and name in ("numel", "nelement"):
            dims = range(rank)
        else:
            raise Unknown(f"{name} of what depends on values is asked for", op)
        factors: list[str] = []
        for dim in dims:
            root = self._extents.origin(tensor, dim)
            factors.append(f"v{tensor}.size({dim})" if root is None else self._count(root))
        return " * ".join(sorted(factors, key=lambda factor: factor.startswith("v"))) or "1"

    def _count(self, root: int) -> str:
        mask = self._extents.mask(root)
        if mask not in self._counts:
            self._counts[mask] = self._new(f"torch.count_nonzero(v{mask})")
        return self._counts[mask]

    def _test_roots(self) -> None:
        """Test that all value-dependent sizes equal the recorded ones."""
        for root, extent in self._findings.roots.items():
            op = self._tape.ops[root]
            if self._kinds.get(root) is not NumberOrigin.VALUE:
                self.picked[root] = extent
                while type(extent[0]) is tuple:  # of several, which are as long as each other
                    extent = extent[0]
                self._conditions.append(self._new(f"({self._count(root)} == {extent[0]})"))
            elif root in self._schedule.needed:
                self.picked[root] = extent
                wanted = ValueGuard(root, root, op.meta, Use.RESULT, op.scope, op.site)
                self._conditions.append(self._condition(wanted))

    def _out_of(self, op: Op) -> str:
        """A tensor of one element, as the number that Python receives for it."""
        if op.target in _COMPARED:
            return self._compared(op)
        if len(op.args) != 1 or type(op.args[0]) is not Ref:
            raise CompileRefusal(f"{display_name(op.target)} takes more than a tensor")
        name = f"v{op.args[0].index}"
        dtype = self._tape.ops[op.args[0].index].meta.dtype
        if op.target is Tensor.__bool__:
            return f"{name if dtype is torch.bool else f'({name} != 0)'}.reshape(())"
        wide = wide_dtype(dtype)
        wanted = {int: torch.int64, float: torch.float64, bool: torch.bool}.get(type(op.meta))
        if op.target not in _NUMBERS or wide is None or wide is not wanted:
            raise CompileRefusal(f"{display_name(op.target)} of a tensor of {dtype} is asked for")
        return f"{name}.reshape(()).to({wide})"

    def _compared(self, op: Op) -> str:
        """Return the expression of a tensor that says whether two tensors are equal."""
        named = [f"{key}={self.value(value)}" for key, value in op.kwargs.items()]
        given = [*map(self.value, op.args), *named]
        if name_of(op.target) == "allclose":
            return f"torch.isclose({', '.join(given)}).all()"
        if op.target is Tensor.__contains__:
            ops = (self._tape.ops[arg.index] for arg in op.args if type(arg) is Ref)
            if not all(has_tensors(one.meta) for one in ops):
                raise CompileRefusal("a number out of a tensor is looked for in another one")
            return f"({given[1]} == {given[0]}).any()"
        metas = [self._tape.ops[index].meta for index in op.operands]
        dynamic = not self._extents.varying.isdisjoint(op.operands)
        if len(given) != 2 or metas[0].shape != metas[1].shape or dynamic:
            raise CompileRefusal("tensors of other sizes are compared")
        self.line(f"if {given[0]}.shape != {given[1]}.shape: return None")
        return f"({given[0]} == {given[1]}).all()"

    def _element(self, op: Op) -> str:
        """An element of what `tolist` gave."""
        keys: list[str] = []
        while op.target is operator.getitem:
            keys.insert(0, self.value(op.args[1]))
            op = self._tape.ops[op.args[0].index]
        if op.target is not Tensor.tolist:
            raise CompileRefusal(f"an element of what {display_name(op.target)} gives is tested")
        ref = op.args[0]
        wide = wide_dtype(self._tape.ops[ref.index].meta.dtype)
        if wide is None:
            raise CompileRefusal("a list of numbers of an unusual dtype is tested")
        return f"v{ref.index}[{', '.join(keys)}].to({wide})"

    def _arithmetic(self, op: Op) -> str:
        name = INFIX.get(op.target)
        types_ = [self._type(a.index) if type(a) is Ref else type(a) for a in op.args]
        if op.target in _COMPARISONS:
            if {int, float} <= set(types_):  # torch compares the two as float64
                self._bound(op, types_)
            left, right = map(self._lift, op.args)
            return f"({left} {name} {right})"
        if op.target in _UNARY and types_ in ([int], [float]):
            self._bound(op, types_)
            return f"{_UNARY[op.target]}({self._lift(op.args[0])})"
        if op.target in (operator.add, operator.sub, operator.mul):
            if types_ == [float, float]:
                left, right = map(self._lift, op.args)
                return f"({left} {name} {right})"
            if types_ == [int, int]:
                self._bound(op, types_)
                left, right = map(self._lift, op.args)
                return f"({left} {name} {right})"
        if op.target is operator.truediv and types_ == [float, float]:
            left, right = map(self._lift, op.args)
            if type(op.args[1]) is Ref:
                self._conditions.append(self._new(f"({right} != 0)"))
            return f"({left} / {right})"
        if op.target in (operator.and_, operator.or_, operator.xor) and types_ == [bool, bool]:
            left, right = map(self._lift, op.args)
            return f"({left} {name} {right})"
        raise CompileRefusal(
            f"{display_name(op.target)} of numbers out of tensors decides where it goes"
        )

    def _bound(self, op: Op, types_: list[type]) -> None:
        """Make sure that integers are small enough to be neither rounded nor to overflow."""
        for argument, kind in zip(op.args, types_, strict=True):
            if kind is int and type(argument) is Ref:
                if self._kinds.get(argument.index) is NumberOrigin.STATIC:
                    continue
                number = self._lift(argument)  # (not by `abs`, which the smallest has none of)
                within = f"({number} < {_SMALL}).logical_and({number} > -{_SMALL})"
                self._conditions.append(self._new(within))


_serials = itertools.count()
_TORCHS = (torch.dtype, torch.device, torch.layout)
_COMPARED = frozenset(
    {torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, Tensor.__contains__}
)
_NUMBERS = frozenset({Tensor.item, Tensor.__int__, Tensor.__index__, Tensor.__float__})
_COMPARISONS = frozenset(
    {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)
_UNARY = {operator.neg: "-", operator.pos: "+", abs: "abs", operator.abs: "abs"}
