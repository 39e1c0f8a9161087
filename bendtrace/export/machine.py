"""A state machine of recorded runs: their questions, and the ops after each answer.

Runs that ask the same question in the same state continue alike (see `record/states.py`), so
this module merges the paths of all runs: branches join, and loops close. `View` finds the structure
of the result: where the sides of a question meet again, and which questions a loop repeats.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType
from typing import Any, TypeAlias

import networkx as nx
import torch
from torch import Tensor
from torch.distributions import Distribution

from bendtrace.engine.guard_kinds import Analysis, GuardKind, NumberOrigin, number_origin
from bendtrace.errors import ExportError
from bendtrace.record.iterations import user_code
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import identical
from bendtrace.tape.guards import (
    ClassGuard,
    ErrorGuard,
    LengthGuard,
    OtherGuard,
    Place,
    SameGuard,
    TruthGuard,
    ValueGuard,
    number_place,
)
from bendtrace.tape.tape import (
    Container,
    Guard,
    Op,
    OpKind,
    Tape,
    Use,
    has_tensors,
    refs_in,
)
from bendtrace.watch.functions import (
    METADATA,
    RANK_DEPENDS_ON_SIZES,
    is_sized_by_values,
    name_of,
    table_name,
)

# The values in generated code: tensors, numbers as tensors, and values known during tracing.
#
# `torch.cond` and `torch.while_loop` pass on tensors and sizes only. So a number that comes out of
# a tensor stays a tensor without dimensions, of dtype int64, float64 or bool, as Python computes.

DTYPES: dict[type, torch.dtype] = {
    int: torch.int64, float: torch.float64, bool: torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """A tensor."""

    name: str  # its variable
    memory: frozenset[int]  # numbers; tensors that may share memory have a number in common
    is_torn: bool = False  # whether it shared memory when it was made, and no longer does


@dataclass(frozen=True)
class Numeral:
    """A number out of a tensor, as a tensor without dimensions."""

    name: str  # its variable
    type: type  # the type that Python would have


@dataclass(frozen=True)
class Static:
    """A size, or a number computed from sizes: known while the code is traced."""

    text: str  # an expression
    type: type  # its type in Python
    # True if it depends on values after all, such as the number of selected elements.
    varies: bool = False


@dataclass(frozen=True)
class Constant:
    """A value that is the same in all runs."""

    value: Any


@dataclass(frozen=True)
class Outdated:
    """A copy of a part of a tensor that was written to since, where the model has a view."""


@dataclass(frozen=True)
class Several(Container):
    """A tuple, a list or a dict of values."""

    items: tuple[Value, ...]  # the values
    keys: tuple[Any, ...] = ()  # for a dict, its keys
    # Its type, or the class of the distribution that a dict of its parameters stands for.
    kind: type = tuple

    def inside(self) -> tuple[Value, ...]:
        """Return the values."""
        return self.items

    def with_inside(self, *inside: Value) -> Several:
        """Return the same with other values."""
        return replace(self, items=inside)


Value: TypeAlias = "Tensors | Numeral | Static | Constant | Outdated | Several"


def parameters_in(kind: type, attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Return those attributes of a distribution that it can be made from; none of other classes."""
    names: Any = kind.arg_constraints if issubclass(kind, Distribution) else None
    if not isinstance(names, dict):  # some classes have a property
        return {}
    if inspect.signature(kind).parameters.keys() - names - {"validate_args"}:
        return {}
    return {name: attributes[name] for name in names if name in attributes}


# The origins of the numbers of a run: sizes of inputs, and sizes and numbers from values.


class NumberOrigins:
    """Sorts the numbers of a tape."""

    def __init__(self, tape: Tape) -> None:
        # The ops that return a number, or several, with their origins.
        self.kinds: dict[int, NumberOrigin] = {}
        self.varying: set[int] = set()  # the ops that return tensors whose sizes depend on values
        self._ops = tape.ops
        for op in tape.ops:
            self._sort(op)

    def has_varying_length(self, index: int) -> bool:
        """Return whether the number of results of an op depends on values."""
        op = self._ops[index]
        if index in self.kinds:  # `tolist`, shapes
            return any(operand in self.varying for operand in op.operands) and (
                op.target is Tensor.tolist or op.target is Tensor.__len__
            )
        return name_of(op.target) in _TAKING_APART and index in self.varying

    def _sort(self, op: Op) -> None:
        varies = not self.varying.isdisjoint(op.operands)
        origin = number_origin(op, self.kinds, varies)
        if origin is not None:
            self.kinds[op.index] = origin
        elif op.kind is OpKind.SCALAR and not gives_tensors(op):
            return
        elif op.is_work and (varies or _is_sized_by_values(op, self._ops, self.kinds)):
            self.varying.add(op.index)


def gives_tensors(op: Op) -> bool:
    """Return whether an op returns a tensor, or several."""
    if op.kind is OpKind.SCALAR and op.target is not operator.getitem:
        return False
    return has_tensors(op.meta)


def gives_rows(op: Op) -> bool:
    """Return whether an op gives the rows of a tensor one by one, as a `for` over it does."""
    dims = (*op.args[1:], *op.kwargs.values())
    return name_of(op.target) == "unbind" and dims in ((), (0,))


def _is_sized_by_values(op: Op, ops: list[Op], kinds: dict[int, NumberOrigin]) -> bool:
    """Return whether the size of the result depends on the values of tensors, or on numbers."""
    if is_sized_by_values(op, ops):
        return True
    name, numbers = name_of(op.target), op.operands
    if name == "__getitem__":
        keys = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
        numbers = [ref.index for key in keys if isinstance(key, slice) for ref in refs_in(key)]
    elif name not in _SIZED_BY_NUMBERS:
        return False
    fixed = NumberOrigin.STATIC
    return any(kinds.get(index, fixed) is not fixed for index in numbers)


_TAKING_APART = frozenset({"unbind", "split", "chunk", "tensor_split", "split_with_sizes"})
_SIZED_BY_NUMBERS = frozenset(
    {
        "arange", "zeros", "ones", "full", "empty", "rand", "randn", "eye", "linspace", "narrow",
        "expand", "repeat", "view", "reshape", "new_zeros", "new_ones", "new_full", "new_empty",
        "pad", "tile", "unfold",
    }
)  # fmt: skip


class _EndOfRuns:
    """The state in which all runs end."""

    def __repr__(self) -> str:
        return "END"


END = _EndOfRuns()


@dataclass(eq=False)
class AnalysedRun:
    """A recorded run, with its analysis."""

    recording: Recording  # the run
    analysis: Analysis = field(init=False)  # its guards, sorted
    numbers: NumberOrigins = field(init=False)  # the origins of its numbers

    def __post_init__(self) -> None:
        self.analysis = Analysis(self.recording.tape)
        self.numbers = NumberOrigins(self.recording.tape)

    def questions(self) -> Iterator[int]:
        """Yield the guards whose answers depend on values."""
        tape = self.recording.tape
        before: Any = None
        for number, guard in enumerate(tape.guards):
            if not self.is_question(number):
                continue
            state = tape.states.get(number)
            if state is None:
                raise ExportError(f"the state at {cite(guard)} was not read", cite(guard))
            this = state.key, state.holes, guard.key
            if this != before:
                yield number
            before = this

    def is_question(self, number: int) -> bool:
        """Return whether the answer of a guard depends on values."""
        guard = self.recording.tape.guards[number]
        if self.analysis.kinds[number] is not GuardKind.DATA or is_fixed(guard):
            return False
        if isinstance(guard, LengthGuard):
            return self.numbers.has_varying_length(guard.index)
        return self.numbers.kinds.get(guard.index) in (NumberOrigin.VALUE, NumberOrigin.SIZE)

    def rank_sources(self, guard: Guard) -> list[Op]:
        """Return the ops that decide by sizes how many dimensions a guard finds, as `squeeze` does.

        torch.export takes it for granted that open sizes are not 1.
        """
        ops, found, seen = self.recording.tape.ops, [], set[int]()
        op = ops[guard.index]
        is_asked = op.kind is OpKind.CALL and op.target in METADATA
        waiting = [*op.operands] if is_asked else []
        while waiting:
            index = waiting.pop()
            if index in seen or self.analysis.steady_rank[index]:
                continue
            seen.add(index)
            op = ops[index]
            waiting += op.operands
            if table_name(op.target) not in RANK_DEPENDS_ON_SIZES:
                continue
            varies = not self.numbers.varying.isdisjoint(op.operands)
            is_squeeze = table_name(op.target).startswith("squeeze") and bool(op.args)
            if varies or not is_squeeze or list(refs_in([op.args[1:], op.kwargs])):
                raise ExportError(
                    f"how many dimensions {name_of(op.target)} gives depends on "
                    f"{'values' if varies else 'sizes'}, and {cite(guard)} asks for it: reshape "
                    "the tensor, or leave the question out",
                    cite(guard),
                )
            found.append(op)
        return found


@dataclass(eq=False)
class Way:
    """The ops from one answer to the next question."""

    answer: Any
    run: AnalysedRun  # a run that took this way
    after: int  # the guard of that run that was answered; -1 for its start
    stop: int | None  # the next guard; None for the end
    target: Node  # the state at its end


@dataclass(eq=False)
class Question:
    """A state in which a run asks a question."""

    run: AnalysedRun  # a run that reached it
    number: int  # the guard of that run
    ways: list[Way] = field(default_factory=list)  # the known answers, with the ways after them
    # All runs that reached it, with their guards.
    passes: list[tuple[AnalysedRun, int]] = field(default_factory=list)

    @property
    def guard(self) -> Guard:
        """The guard."""
        return self.run.recording.tape.guards[self.number]

    @property
    def place(self) -> str:
        """The question, and where it is asked."""
        return cite(self.guard)

    @property
    def is_on_size(self) -> bool:
        """Return whether it asks for a size that values decide."""
        is_length = isinstance(self.guard, LengthGuard)
        return is_length or self.run.numbers.kinds.get(self.guard.index) is NumberOrigin.SIZE

    @property
    def is_complete(self) -> bool:
        """Return whether all possible answers are known."""
        return len(self.ways) == 2 and all(type(way.answer) is bool for way in self.ways)

    def rounds(self, hole: int) -> Iterator[tuple[AnalysedRun, Op, Op]]:
        """Yield each run with a value that the state holds, and with the next one at this place."""
        for (run, number), (after, other) in itertools.pairwise(self.passes):
            if run is after:
                tape = run.recording.tape
                indices = (tape.states[each].holes[hole] for each in (number, other))
                one, next_one = (tape.ops[index] for index in indices)
                yield run, one, next_one

    def differs(self, hole: int) -> bool:
        """Return whether a number that the state holds differs between rounds of a loop."""
        return any(one.meta != other.meta for _, one, other in self.rounds(hole))

    def shrinks(self, hole: int) -> tuple[int, ...] | None:
        """Return the dimensions that rounds of a loop make smaller; None for a tensor that stays.

        Those whose size values decide may be missing.
        """
        is_decided, smaller = False, set()
        for run, one, other in self.rounds(hole):
            is_decided = is_decided or other.index in run.numbers.varying
            sizes = map(shape_of, (one.meta, other.meta))
            for dim, (size, after) in enumerate(zip(*sizes, strict=False)):
                if size < after and not is_decided:
                    return None
                if size > after:
                    smaller.add(dim)
        return tuple(smaller) if smaller or is_decided else None

    def __repr__(self) -> str:
        return f"<Question {self.place}>"


Node: TypeAlias = "Question | _EndOfRuns"


def shape_of(meta: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, of one whose rows were taken one by one, or of a size."""
    if type(meta) is tuple:
        return len(meta), *(meta[0].shape if meta else ())
    return tuple(getattr(meta, "shape", (meta,)))


def cite(record: Any) -> str:
    """Return the source text of a guard or an op, with its place."""
    if record.site is None:
        return "a place that is not known"
    place, _, _ = user_code(record.scope, record.site)
    return f"`{place.text}` at {place}"


def is_fixed(guard: Guard) -> bool:
    """Return whether the ops of an exported program decide the answer of a guard."""
    kind = type(guard)
    if kind in (ClassGuard, ErrorGuard, SameGuard, OtherGuard):
        return True
    if kind in (TruthGuard, ValueGuard, LengthGuard):
        return False
    raise ExportError(f"an exported program cannot test {guard.subject}", cite(guard))


class Machine:
    """The states of some runs, all of one set of input guards."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        self.runs: list[AnalysedRun] = [AnalysedRun(recording) for recording in recordings]
        self.begin: Way  # the way to the first question
        self._by_key: dict[Any, Question] = {}
        for number, run in enumerate(self.runs):
            self._follow(run, number == 0)

    @property
    def questions(self) -> list[Question]:
        """The states, in the order in which the runs reached them."""
        return list(self._by_key.values())

    def _follow(self, run: AnalysedRun, is_first: bool) -> None:
        tape = run.recording.tape
        numbers = list(run.questions())
        nodes: list[Node] = []
        for number in numbers:
            key = tape.states[number].key
            cached = self._by_key.get(key)
            if cached is None:
                cached = self._by_key[key] = Question(run, number)
            cached.passes.append((run, number))
            nodes.append(cached)
        nodes.append(END)
        stops: list[int | None] = [*numbers, None]
        if is_first:
            self.begin = Way(None, run, -1, stops[0], nodes[0])
        elif self.begin.target is not nodes[0]:
            raise ExportError("runs begin differently", "the beginning")
        for place, number in enumerate(numbers):
            question, answer = nodes[place], tape.guards[number].answer
            assert isinstance(question, Question)
            if not any(identical(way.answer, answer) for way in question.ways):
                way = Way(answer, run, number, stops[place + 1], nodes[place + 1])
                question.ways.append(way)

    def first_varying(self) -> Op | None:
        """Return the first op whose result has a size that depends on values."""
        found = ((run.recording.tape.ops, run.numbers.varying) for run in self.runs)
        return next((ops[min(varying)] for ops, varying in found if varying), None)

    def first_longer(self) -> Op | None:
        """Return the first op whose result is larger in a later round of a loop."""
        for question in self._by_key.values():
            count = len(question.run.recording.tape.states[question.number].holes)
            for _, one, other in itertools.chain(*map(question.rounds, range(count))):
                sizes = (shape_of(op.meta) for op in (one, other) if isinstance(op.meta, tuple))
                if any(before < after for before, after in zip(*sizes, strict=False)):
                    return other
        return None

    @cached_property
    def view(self) -> View:
        """The view of the whole machine."""
        edges = {q: {way: way.target for way in q.ways} for q in self._by_key.values()}
        return View(edges, self.begin.target, END)


@dataclass(eq=False)
class QuestionLoop:
    """Questions that are asked repeatedly."""

    header: Question  # the question at which it begins
    body: frozenset[Question]  # all questions in it
    again: frozenset[Way]  # the ways back to the header
    leaving: frozenset[Way]  # the ways out


class View:
    """A part of the machine, from a state to the one where all ways end; or a round of a loop."""

    loop: QuestionLoop | None
    sink: Any
    entry: Any

    def __init__(
        self,
        edges: dict[Question, dict[Way, Any]],
        entry: Any,
        sink: Any,
        loop: QuestionLoop | None = None,
    ) -> None:
        self.entry, self.sink, self.loop = entry, sink, loop
        flow: nx.DiGraph[Any] = nx.DiGraph()
        flow.add_nodes_from((entry, sink))
        for question, ways in edges.items():
            flow.add_edges_from((question, target) for target in ways.values())
        alive = (nx.ancestors(flow, sink) | {sink}) & (nx.descendants(flow, entry) | {entry})
        self.edges: dict[Question, dict[Way, Any]] = {
            question: {way: target for way, target in ways.items() if target in alive}
            for question, ways in edges.items()
            if question in alive
        }
        self._flow = flow.subgraph(alive)

    def ways(self, question: Question) -> list[Way]:
        """Return the ways from a question."""
        return list(self.edges[question])

    def join(self, question: Question) -> Any:
        """Return the state at which all ways from a question meet again."""
        return self._joins[question]

    @cached_property
    def _joins(self) -> dict[Any, Any]:
        return dict(nx.immediate_dominators(self._flow.reverse(copy=True), self.sink))

    @cached_property
    def loops(self) -> dict[Question, QuestionLoop]:
        """The loops, by their headers."""
        dominators = dict(nx.immediate_dominators(self._flow, self.entry))

        def dominates(one: Any, other: Any) -> bool:
            while other is not one:
                above = dominators.get(other)
                if above is None or above is other:
                    return False
                other = above
            return True

        back: dict[Question, list[tuple[Question, Way]]] = {}
        rest: nx.DiGraph[Any] = nx.DiGraph(self._flow)
        for question, ways in self.edges.items():
            for way, target in ways.items():
                if isinstance(target, Question) and dominates(target, question):
                    back.setdefault(target, []).append((question, way))
                    if rest.has_edge(question, target):
                        rest.remove_edge(question, target)
        if not nx.is_directed_acyclic_graph(rest):
            cycle = next(node for node, _ in nx.find_cycle(rest) if isinstance(node, Question))
            raise ExportError("a loop is entered in its middle", cycle.place)
        return {header: self._loop(header, pairs) for header, pairs in back.items()}

    def _loop(self, header: Question, back: list[tuple[Question, Way]]) -> QuestionLoop:
        body, waiting = {header}, [question for question, _ in back]
        while waiting:
            question = waiting.pop()
            if question not in body:
                body.add(question)
                waiting += self._flow.predecessors(question)
        leaving = frozenset(
            way
            for question in body
            for way, target in self.edges[question].items()
            if target not in body
        )
        return QuestionLoop(header, frozenset(body), frozenset(way for _, way in back), leaving)

    def one_round(self, loop: QuestionLoop, keep: Callable[[Way], bool]) -> View:
        """Return one iteration of a loop, with some ways; going back or leaving is its sink."""
        sink = object()
        ends = loop.again | loop.leaving
        edges = {
            question: {
                way: sink if way in ends else target
                for way, target in self.edges[question].items()
                if keep(way)
            }
            for question in loop.body
        }
        return View(edges, loop.header, sink, loop)

    def without(self, loop: QuestionLoop) -> View:
        """Return the same without the ways back to the header of a loop."""
        edges = {
            question: {way: target for way, target in ways.items() if way not in loop.again}
            for question, ways in self.edges.items()
        }
        return View(edges, self.entry, self.sink, self.loop)


def lengths_in(recordings: Iterable[Recording]) -> frozenset[Place]:
    """Return where Python asks for the length of a tensor that values decide.

    Python's `len` gives a plain number, so that each length would be a different answer. Recorded
    again with these places, runs ask what the model asks of the length.
    """
    places: set[Place] = set()
    codes: set[CodeType] = set()
    for recording in recordings:
        kinds = NumberOrigins(recording.tape).kinds
        for guard in recording.tape.guards:
            place = number_place(guard) if guard.use is Use.LEN else None
            if place is not None:
                places.add(place)
                if kinds.get(guard.index) is NumberOrigin.SIZE:
                    codes.add(place[0])
    # A loop asks at two places of its code: before it begins, and after each round.
    return frozenset(place for place in places if place[0] in codes)


_WRITES = (
    "the model writes to an argument, or to its state: pass the value as an input, and return the "
    "new value"
)


_UPDATES = "a normalisation updates its running statistics: call eval()"
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")


def refuse(recording: Recording) -> None:
    """Refuse runs that no function of tensors can repeat."""
    tape = recording.tape
    if tape.blockers:
        raise ExportError(f"the model can only run live: {tape.blockers[0]}", "")
    if tape.is_joint:
        raise ExportError("the model communicates with other ranks", "")
    for op in tape.ops:
        if op.raised is not None:
            raise ExportError(
                f"{name_of(op.target)} raises an error that the model handles: test for the case "
                "before, instead of catching the error",
                cite(op),
            )
        for written in (tape.ops[index] for index in op.writes):
            if written.is_given:
                is_norm = str(getattr(written.target, "label", "")).endswith(_STATISTICS)
                raise ExportError(_UPDATES if is_norm else _WRITES, cite(op))
    if recording.writes_outside:
        raise ExportError(_WRITES, "")
    if recording.changes:
        label = recording.changes[0].label
        if place := recording.environment.place_of(label):
            label = f"{label} at {place}"
        raise ExportError(
            f"the model sets {label}, but an exported program has no attributes: pass the value as "
            "an input, and return the new value",
            "",
        )
    if recording.is_transient:
        raise ExportError("the model fills a cache: call it once before", "")
