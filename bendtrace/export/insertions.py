"""Records insertions like code of the model, so that they become part of an exported program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bendtrace.errors import ExportError
from bendtrace.export.conditions import separate_copies_of
from bendtrace.export.machine import cite
from bendtrace.export.ops import refusal_of
from bendtrace.insert.gates import Gate, applying
from bendtrace.insert.inserter import LiveInserter, NodeSlots
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.plan import InsertionPlan, LocatedInsertion
from bendtrace.insert.registry import InsertionRegistry
from bendtrace.insert.resolver import Knowledge, describe_where
from bendtrace.insert.splicer import record_with_insertions
from bendtrace.python.internals import pytree
from bendtrace.python.sites import definition
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recorder, Recording
from bendtrace.record.varying import Lifting
from bendtrace.tape.captured import Captured
from bendtrace.tape.tape import ModuleCall
from bendtrace.watch.code_facts import names_in
from bendtrace.watch.provenance import is_users_class

if TYPE_CHECKING:
    from bendtrace.insert.inserter import Stage


class Insertions:
    """The insertions of a model, for runs that record their work like the model's own code."""

    def __init__(self, registry: InsertionRegistry, knowledge: Knowledge) -> None:
        self._insertion_registry, self._knowledge = registry, knowledge
        self._names: dict[str, Any] = {}
        for insertion in registry.insertions:
            what = insertion.what
            name = f"{what.label.partition('(')[0].rstrip()} at {describe_where(insertion.where)}"
            if what.observes or not what._forms() & {"before", "instead", "after"}:
                raise ExportError(
                    f"{name} only looks at what passes, and a program has no Python to show it to: "
                    "remove it, and return the value from the model"
                )
            count = sum(other.partition(" #")[0] == name for other in self._names)
            self._names[f"{name} #{count + 1}" if count else name] = what
        self._sizes: set[str] = set()
        self._parts: dict[int, tuple[str, Captured]] = {}
        self._reached: set[int] = set()

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature,
        lifting: Lifting | None,
    ) -> Recording:  # fmt: skip
        """Record a run of the model with them."""
        plan = self._insertion_registry.plan(args, kwargs)
        assert plan is not None
        sizes = str([getattr(leaf, "shape", None) for leaf in pytree.tree_leaves((args, kwargs))])
        if sizes not in self._sizes:  # bends draw their numbers in the first run
            self._sizes.add(sizes)
            own_args, own_kwargs = separate_copies_of((args, kwargs))
            with applying(plan):
                record_with_insertions(self._knowledge, signature, own_args, own_kwargs, plan)
        code = {name: what._code for name, what in self._names.items()}
        inserter = _Follower(plan, self._knowledge, code)
        with applying(inserter.plan):
            recording = record(
                self._knowledge.model, args, kwargs, signature, inserter=inserter,
                reads_states=True, lifting=lifting,
            )  # fmt: skip
        inserter.settle(recording)
        for span in inserter.spans:
            self._require_tensors(recording, span)
        for change in recording.changes:
            self._refuse_change(change.label)
        return recording

    def _require_tensors(self, recording: Recording, span: _Span) -> None:
        """Note the tensors of an interjection; raise if it has done more than compute tensors."""
        name, tape = self._name_of(span.what), recording.tape
        self._reached.add(id(span.what))
        own = next(name for name, one in self._names.items() if one is span.what)
        for reason in tape.blockers[span.blockers]:
            raise ExportError(f"{name} can only run live: {reason}")
        for op in tape.ops[span.ops]:
            if refusal := refusal_of(op):
                raise ExportError(f"in {name}, {refusal}", cite(op))
            for index in op.operands:
                part = tape.ops[index].target if tape.ops[index].is_given else None
                if isinstance(part, Captured) and not part.is_argument:
                    self._parts.setdefault(id(part.read(())), (own, part))

    def _refuse_change(self, label: str) -> None:
        """Raise if one of them sets the object with a label."""
        variable = re.split(r"[.\[]", label)[0]
        for name, what in self._names.items():
            code = getattr(what._code, "__code__", None)
            if label.startswith(name) or (code is not None and variable in names_in(code)):
                raise ExportError(
                    f"{self._name_of(what)} sets {label.removeprefix(f'{name}.')}, but a program "
                    "has no Python: insert a function that only computes tensors"
                )

    def _name_of(self, what: Interjection) -> str:
        """Return the name of an interjection, with its line if it is the user's."""
        name = next(name for name, one in self._names.items() if one is what)
        own = itertools.takewhile(is_users_class, type(what).__mro__)
        methods = (one for cls in own for one in vars(cls).values() if callable(one))
        place = next(filter(None, map(definition, (what._code, *methods))), "")
        return f"{name} ({place})" if place else name

    def tensors(self, taken: Mapping[int, str], arguments: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that they brought into the runs so far, by names of their own."""
        names: dict[str, Tensor] = {}
        for owner, part in self._parts.values():
            tensor = part.read(())
            if id(tensor) not in taken:
                label = part.label if part.label.startswith(owner) else f"{owner} {part.label}"
                name = re.sub(r"[\W_]+", "_", label).strip("_").lower()
                while name in names or name in taken.values() or name in arguments:
                    name += "_"
                names[name] = tensor
        return names

    @property
    def notes(self) -> list[str]:
        """The lines of reports about them."""
        missed = [name for name, what in self._names.items() if id(what) not in self._reached]
        return [
            f"no input reached {name}: the program does not contain it"
            if name in missed
            else f"contains {name}"
            for name in self._names
        ]


class _Follower(LiveInserter):
    """Adds insertions to a run, without gates, so that their work is recorded."""

    recorder: Recorder  # the recorder of the run

    def __init__(self, plan: InsertionPlan, knowledge: Knowledge, code: Mapping[str, Any]) -> None:
        knowledge.name_nodes()
        self._count = itertools.count()
        self.spans: list[_Span] = []  # the ops that each call of an interjection added to the tape
        own = InsertionPlan(list(map(self._as_marked, plan.entries)), plan.totals, plan.lookup)
        super().__init__(own, knowledge.registry, knowledge.model)
        self.code = code
        self._is_inside = False
        self._replaced: Any = None

    def begins(self, stage: Stage) -> None:
        """Prepare for a run."""
        assert isinstance(stage, Recorder)
        self.recorder = stage
        super().begins(stage)

    def put(self, gate: Gate, values: Any, frame: FrameType) -> Any:
        """Call the insertions of a gate like code of the model."""
        self.require_once(gate.at.path)
        gate.is_followed = self._is_inside = True
        self._replaced = gate.at.module
        try:
            return self.recorder.follow(gate, tuple(values))
        finally:
            self._is_inside = False

    def op(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType,
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run the call of a function; those of what is inserted are no nodes."""
        if self._is_inside:
            return run(function, args, kwargs, frame)
        return super().op(function, args, kwargs, frame, run)

    def module(
        self, scope: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType,
        run: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """Run the call of a module."""
        if self._is_inside:
            if scope.module is not None and scope.module is not self._replaced:
                self.inside(scope.module, self.qualified(scope))
            return run(scope, args, kwargs)
        return super().module(scope, args, kwargs, frame, run)

    def scalar(self, function: Any, frame: FrameType) -> None:
        """Name arithmetic."""
        if not self._is_inside:
            super().scalar(function, frame)

    def _meet(self, spot: NodeSlots, entries: list[LocatedInsertion]) -> None:
        super()._meet(spot, list(map(self._as_marked, entries)))

    def _as_marked(self, entry: LocatedInsertion) -> LocatedInsertion:
        marked = LocatedInsertion(entry.insertion, entry.what, entry.place)
        marked.what = _Marked(entry.what, next(self._count), self)  # type: ignore[assignment]
        return marked


class _Span(NamedTuple):
    """A call of an interjection, and the ops that it has added to the tape."""

    what: Interjection  # the interjection
    ops: slice  # the numbers of its ops
    blockers: slice  # the numbers of its reasons for which the run is live


class _Marked:
    """An interjection that states know during its calls, with its arguments."""

    def __init__(self, what: Interjection, number: int, inserter: _Follower) -> None:
        self._what, self._number, self._inserter = what, number, inserter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._what, name)

    def _called(self, form: str, at: NodePass, inputs: Inputs, *more: Any) -> Any:
        pending, tape = self._inserter.pending, self._inserter.recorder.tape
        ops, blockers = len(tape.ops), len(tape.blockers)
        values = (v for v in more if not callable(v) or isinstance(v, Tensor))
        pending.append([self._number, form, at.path, *inputs, *inputs.kwargs.values(), *values])
        try:
            given = getattr(self._what, form)
            return given(at, *more, inputs) if form == "instead" else given(at, inputs, *more)
        finally:
            pending.pop()
            made = slice(ops, len(tape.ops)), slice(blockers, len(tape.blockers))
            self._inserter.spans.append(_Span(self._what, *made))

    def before(self, at: NodePass, inputs: Inputs) -> Any:
        """Call it before the node."""
        return self._called("before", at, inputs)

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Call it instead of the node."""
        return self._called("instead", at, inputs, call)

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Call it after the node."""
        return self._called("after", at, inputs, output)
