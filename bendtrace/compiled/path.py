"""A recorded path as a compiled function, with its checks, comparisons and output."""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bendtrace.compiled.attempts import CompiledFunction, Quiet, State
from bendtrace.compiled.eligible import why_not
from bendtrace.compiled.probing import Refusal, Unknown, probe
from bendtrace.compiled.settings import Settings, dynamo
from bendtrace.compiled.shortcuts import Result
from bendtrace.compiled.splices import Spliced
from bendtrace.compiled.straight import Straight
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.codegen import write_run
from bendtrace.replay.program import Program
from bendtrace.replay.schedule import Schedule
from bendtrace.replay.source import Code, Source
from bendtrace.replay.stretches import Stretch
from bendtrace.tape.tape import TensorMeta, Test, refs_in
from bendtrace.torch_rules.functions import name_of
from bendtrace.torch_rules.host_io import environ

__all__ = ["FAILED", "CompiledPath", "Served", "Unchecked"]

# The path that a call took, and the key of its splices.
Taken = tuple[Stretch | None, Hashable]

_WINDOW = 16
_MOST_SIZES = 4096  # sets of sizes that are kept in mind
_PROBES = 4  # that are made for a set of sizes


class _Failed:
    """The result of a speculation that failed."""


FAILED = _Failed()


@dataclass(slots=True, eq=False)
class Unchecked:
    """The result of a graph compiled during this call, which a replay has to confirm.

    Attributes:
        output: the output.
        result: what the graph returned.
        known: the tensors that existed before the call.
        kept: the observed values, and the same values computed without a compiler.
    """

    output: Any
    result: Result
    known: list[Tensor]
    kept: tuple[Any, Any] = ((), ())


@dataclass(slots=True, eq=False)
class Served:
    """A call that a path with splices has served.

    Attributes:
        output: the output.
        kept: the observed values at gates.
        changed: for each function at a gate, whether it changed its value; None without functions.
    """

    output: Any
    kept: Sequence[Tensor]
    changed: Tensor | None


class CompiledPath(CompiledFunction):
    """One path, compiled.

    Args:
        home: the program that the path belongs to.
        stretch: the last stretch of its code.
        settings: how to compile.
        spliced: the insertions at its gates; None without gates.

    Attributes:
        home: as given.
        stretch: as given.
        key: the key of the splices; other splices with this key can use the path, too.
        unchanged: the numbers of their functions that return their argument itself.
        recent: for the latest calls that it was tried on, whether it served them.
        window: the paths of the latest calls with the same input guards.
    """

    failures: int
    is_unusable: bool

    def __init__(
        self,
        home: Program,
        stretch: Stretch,
        settings: Settings,
        spliced: Spliced | None = None,
    ) -> None:
        super().__init__(settings)
        self.home = home
        self.stretch = stretch
        self.key: Hashable = None if spliced is None else spliced.key
        self.unchanged: frozenset[int] = frozenset()
        self.state = State.REFUSED
        self.recent: deque[bool] = deque(maxlen=_WINDOW)
        self.window: deque[Taken] = deque(maxlen=_WINDOW)
        self._admitting = home
        self._entry = home.global_state.context
        self._sizes: dict[Any, bool] = {}
        self._unlike: Counter[Any] = Counter()

    @property
    def recording(self) -> Recording:
        """The run that it repeats."""
        return self.stretch.recording

    # Making it

    def make(self, arguments: tuple[Any, ...], output: Any, spliced: Spliced | None = None) -> None:
        """Write, compile and confirm the function after a replay of the call.

        Args:
            arguments: the bound arguments of the call.
            output: the output of the replay.
            spliced: the insertions at its gates.
        """
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings(), Quiet():
                warnings.simplefilter("ignore")  # what compilers have to say, and ops once more
                self._make(arguments, output, spliced)
        except Refusal as refusal:
            self.reason = str(refusal)
        self.seconds: float = time.perf_counter() - begun
        self.settings.warn()

    def _make(self, arguments: tuple[Any, ...], output: Any, spliced: Spliced | None) -> None:
        recording, global_state = self.recording, self.home.global_state
        splices = {} if spliced is None else spliced.splices
        reason = why_not(recording, global_state, splices)
        if reason is not None:
            raise Refusal(reason)
        findings = probe(recording, arguments, splices)
        if findings is None:
            raise Refusal("its guards came out otherwise when it was looked at op by op")
        self._findings, self.unchanged = findings, findings.unchanged
        if self.stretch is not self.home.root:
            # Of a path that branched off, the program's check does not know all guards.
            self._admitting = Program(recording, global_state)
        try:
            self._compile(arguments, output, spliced, exactly=False)
        except Unknown as unknown:
            try:
                self._compile(arguments, output, spliced, exactly=True)
            except Unknown:
                raise Refusal(f"{unknown}; its segments may be compiled by themselves") from None

    def _compile(
        self, arguments: tuple[Any, ...], output: Any, spliced: Spliced | None, exactly: bool
    ) -> None:
        """Compile, or raise `Unknown` if not even the sizes that are picked by values can vary."""
        recording, findings = self.recording, self._findings
        ops = recording.tape.ops
        leaves = _leaves(recording)
        roots = {leaf: findings.first.get(leaf, leaf) for leaf in leaves}
        made = [i for i in dict.fromkeys(roots.values()) if not ops[i].is_given]
        given = [i for i in dict.fromkeys(roots.values()) if ops[i].is_given]
        analysis = Analysis(recording.tape)
        splices = None if spliced is None else spliced.splices
        straight = Straight(recording, analysis, findings, self._entry, made, exactly, splices)
        self._plain, self._leaves, self._kept = straight.function, len(made), straight.kept
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
                with _capturing(self._is_dynamic), self.settings.keeping(self._said()):
                    first = self.attempt(arguments, spliced, raises=True)
                break
            except Refusal:
                if compiler is compilers[-1]:
                    raise
        if backend.assumes:
            raise Unknown("what it does with a size that depends on values is right for some only")
        if isinstance(first, _Failed):
            raise Refusal("its guards came out otherwise when it was compiled")
        if not isinstance(first, Unchecked):
            raise Refusal("torch.compile did not compile it")
        self.confirm(first, output)
        self.recent.clear()
        self.failures = 0

    def _said(self) -> str:
        """Return the source, with the metadata of its inputs."""
        metas = [op.meta for op in self.recording.tape.ops if op.is_given]
        return f"{self.text}{metas}"

    def _depends_on_identity(self, leaves: Iterable[int]) -> bool:
        """Return whether identity or shared memory of the tensors matters.

        This depends on sizes and strides as well, so there is one probe for each set of them.
        """
        guards = self.recording.tape.guards
        compared = {guard.index for guard in guards if guard.test is Test.SAME}
        told_apart = {guard.index for guard in guards if guard.test is Test.OTHER}
        findings = self._findings
        matters = told_apart | (compared if findings.writes else compared & set(leaves))
        for index in matters & findings.dynamic:
            if name_of(self.recording.tape.ops[index].target) not in _BY_TYPE:
                raise Refusal("whether a tensor is copied depends on a size that depends on values")
        return bool(matters)

    def confirm(self, unchecked: Unchecked, output: Any) -> None:
        """Use a newly compiled graph, if its output equals that of the replay."""
        is_first = self.state is State.REFUSED
        is_same = self.compare(unchecked.output, output, unchecked.result, unchecked.known)
        for ours, theirs in zip(*unchecked.kept, strict=True):  # which are copied, each by itself
            is_same = is_same and self.compare(ours, theirs, unchecked.result, [])
        if is_same and is_first:
            self.reason, self.is_unusable = "", False
            self.state = State.MEASURED if self.settings.drop_slower else State.USED

    # Using it

    def admits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether all input guards hold."""
        return self._admitting.admits(arguments)

    def attempt(
        self, arguments: tuple[Any, ...], spliced: Spliced | None = None, raises: bool = False
    ) -> Any:
        """Run it, for arguments for which the input guards hold.

        Args:
            arguments: the bound arguments.
            spliced: the insertions at its gates.
            raises: whether an error is raised as a `Refusal`.

        Returns:
            The output, for a path with splices in a `Served`; an `Unchecked` one if a graph was
            compiled in between; or `FAILED`.
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
                    raise Refusal(self.reason)
                return self._missed()
        try:
            result = self.call(given, found)
            if result is None or not (result.truth is None or result.truth.item()):
                return self._missed()
        except Exception as error:
            self.note(error)
            if raises:
                raise Refusal(self.reason) from None
            return self._missed()
        made = self.in_order(result)
        values: Sequence[Any] = made if spliced is None else made[: self._leaves]
        if self._slots is not None:
            both = (*made, *gathered)
            values = [both[slot] for slot in self._slots]
        output = self._finish(arguments, dict(zip(self._names, values, strict=True)))
        if self._backend is not None and self._backend.assumes:
            self.state: State = State.REFUSED
            self.reason: str = (
                "for other sizes, what is picked by values would have to be checked anew"
            )
            return self._missed()
        if result.graph not in self._confirmed:
            known = [item for item in (*gathered, *given) if isinstance(item, Tensor)]
            known = list({id(item): item for item in known}.values())
            return Unchecked(output, result, known, self._both_kept(given, made))
        self.hits += 1
        self.recent.append(True)
        if spliced is None:
            return output
        end = self._leaves + self._kept
        return Served(output, made[self._leaves : end], made[end] if len(made) > end else None)

    def _both_kept(self, given: Sequence[Any], made: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the observed values, and the same values computed without a compiler."""
        if len(made) == self._leaves:
            return (), ()
        result = self._plain(*given)
        if result is None:
            raise Refusal("its guards came out otherwise when it was run without a compiler")
        return list(made[self._leaves :]), list(result[1][self._leaves :])

    def _missed(self) -> _Failed:
        self.failures += 1
        self.recent.append(False)
        return FAILED

    def _knows_sizes(
        self, gathered: tuple[Any, ...], arguments: tuple[Any, ...], spliced: Spliced | None
    ) -> bool:
        sizes = self._sizes_of(gathered)
        known = self._sizes.get(sizes)
        if known is None:
            try:
                splices = {} if spliced is None else spliced.splices
                findings = probe(self.recording, arguments, splices)
            except Refusal:
                findings = None
            known = findings is not None and findings.first == self._findings.first
            picked = {} if findings is None else findings.roots
            if known and any(picked.get(root) != was for root, was in self._picked.items()):
                # It says nothing about calls that pick as much as was recorded.
                self._unlike[sizes] += 1
                if self._unlike[sizes] < _PROBES:
                    return False
                known = False
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
                self._unlike.clear()
            self._sizes[sizes] = known
        return known

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


def _leaves(recording: Recording) -> list[int]:
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
    source = Source()
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
