"""Splices what is inserted into the code of runs that were recorded without it.

The known code of a model without insertions takes in gates: a gate goes into the code of a
segment, at the place where the node has its value, and nothing is recorded for it. That is so where
what follows is the same whatever the value:

- the gate only receives the output of the node, a tensor, and gives one of the same kind;
- nobody but the caller of the node has that tensor, so that replacing it in the code replaces it
  for the model. For modules, that was counted when the run was recorded.

Where one of these does not hold, runs with the insertion are recorded, and kept apart. A call in
which that turns out begins again (see `gates.again`), or, if something has been done that must not
be done twice, goes on in the model's Python from there.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from bendtrace.engine.guard_kinds import Analysis, is_metadata_read
from bendtrace.engine.program_graph import ProgramGraph
from bendtrace.engine.schedule import Unlinked
from bendtrace.engine.source import Code, Unfit, ValueSplice
from bendtrace.engine.stretches import Exit, RunPiece
from bendtrace.insert.gates import AfterGate, Gate, SplicedGate, raise_caught
from bendtrace.insert.inserter import LiveInserter, place_of_node
from bendtrace.insert.interjection import NodePass
from bendtrace.insert.leaves import LeafShape
from bendtrace.insert.plan import InsertionPlan, Slot, slots_at_node
from bendtrace.insert.resolver import Knowledge
from bendtrace.log.path_views import Candidate, RunNodes
from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import Site
from bendtrace.record.effects import makes_anew, sets_nothing
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recording
from bendtrace.record.script import Script
from bendtrace.record.varying import Lifting
from bendtrace.tape.contexts import Context
from bendtrace.tape.tape import Guard, ModuleCall, OpKind, Ref, Tape, TensorMeta
from bendtrace.watch.functions import OPTIONAL, is_torchs_function
from bendtrace.watch.writes import works_in_place

if TYPE_CHECKING:
    from bendtrace.insert import state_access
else:
    state_access = LazyModule("bendtrace.insert.state_access")


class Splicer:
    """Gives the code of segments with what is inserted at some places, by the plan.

    `exits` gives all exits that calls may take.
    """

    def __init__(
        self, plan: InsertionPlan, knowledge: Knowledge, exits: Callable[[], Iterable[Exit]]
    ) -> None:
        # True if it has turned out that runs with the insertions have to be recorded.
        self.is_apart: bool = not plan.can_be_spliced
        self.calls: int = 0  # how many calls it has served to their end
        self.writes: bool = False  # whether a known run writes to tensors in place
        # Whether a call may have to begin again although it went well so far.
        self.keeps: bool = True
        self._has_unread = False
        self._slots = plan.slots
        self._plan = weakref.ref(plan)
        self._knowledge = knowledge
        self._exits = exits
        self._most = _PRUNED
        self._gates: dict[tuple[str, tuple[Slot, ...]], AfterGate] = {}
        self._splices: dict[int, tuple[Recording, tuple[ValueSplice, ...]]] = {}
        self._codes: dict[Exit, tuple[int, Code]] = {}

    def __call__(self, exit: Exit) -> Code:
        """Return the code of an exit. Raise `Unfit` if there is none."""
        cached = self._codes.get(exit)
        if cached is not None and cached[0] == exit.rewrites:
            return cached[1]
        piece = exit.piece
        try:
            mine = [s for s in self._splices_in(piece) if s.lies_in(exit.number, piece.stop)]
            unfit = next((s for s in mine if not s.is_fit), None)
            if unfit is not None:
                raise Unfit(f"{unfit.path!r} is not a place where known code can be changed")
            code = exit.write_spliced(mine) if mine else exit.code
        except (Unfit, Unlinked) as error:
            self.is_apart = True
            raise Unfit(str(error)) from error
        if len(self._codes) >= self._most:
            alive = set(self._exits())
            self._codes = {exit: code for exit, code in self._codes.items() if exit in alive}
            recordings = {id(exit.piece.recording) for exit in self._codes}
            self._splices = {key: s for key, s in self._splices.items() if key in recordings}
            self._most = max(_PRUNED, 2 * len(self._codes))
        self._codes[exit] = exit.rewrites, code
        return code

    def serves(self, plan: InsertionPlan) -> Self:
        """Note the insertions of the call that comes next, which are not kept alive."""
        self._plan = weakref.ref(plan)
        return self

    def goes_along(self, graph: ProgramGraph) -> None:
        """Note along which paths a call is going to be served."""
        self.writes = self.writes or graph.writes
        self._has_unread = self._has_unread or graph.has_unread
        self.keeps = self._has_unread or self.calls < _FIRST

    def _splices_in(self, piece: RunPiece) -> tuple[ValueSplice, ...]:
        recording = piece.recording
        cached = self._splices.get(id(recording))
        if cached is None:
            nodes = self._knowledge.nodes_of(recording)
            places = _Places(self, nodes, piece)
            if not places.is_open:
                raise Unfit("the run calls code that nothing can be inserted in as one op")
            found = places.find()
            cached = self._splices[id(recording)] = recording, found
        return cached[1]

    def gate(self, path: str, node: Candidate, site: Site | None, scope: ModuleCall | None) -> Any:
        """Return the gate at a node; None if nothing is inserted there."""
        unseen = replace(node, shape=None, dtype=None)  # as a run has it at that time
        slots, plan = slots_at_node(self._slots, "node", unseen), self._plan()
        if not slots:
            return None
        gate = self._gates.get((path, slots))
        if gate is None:
            assert plan is not None
            at = NodePass(
                path, 0, node.module, node.function, node.scope_path, place_of_node(site, scope),
                node.qualified_name,
            )  # fmt: skip
            gate = self._gates[path, slots] = AfterGate(at, slots, LeafShape(Tensor, 0), plan)
            gate.counts = True
        return gate


_PRUNED = 32  # exits with code, before it is asked whether they are still there
_FIRST = 3  # calls in which what is inserted may turn out not to fit


class _Places:
    """Finds where gates go in a recorded run."""

    def __init__(self, splicer: Splicer, nodes: RunNodes, piece: RunPiece) -> None:
        self._splicer = splicer
        self._nodes = nodes
        self._piece = piece
        self._recording: Recording = piece.recording
        self._tape: Tape = piece.recording.tape
        self._analysis: Analysis = piece.analysis
        self._positions = [guard.position for guard in self._tape.guards]
        self.is_open: bool = not self._tape.is_closed  # whether gates reach all modules in it

    def find(self) -> tuple[ValueSplice, ...]:
        """Return the splices in order."""
        found: list[tuple[int, int, float, ValueSplice]] = []
        nodes, ops = self._nodes, self._tape.ops
        for index, path in nodes.of_op.items():
            op = ops[index]
            gate = self._splicer.gate(path, nodes.candidates[path], op.site, op.scope)
            if gate is not None and op.raised is None:
                is_fit = (
                    isinstance(op.meta, TensorMeta)
                    and not op.writes
                    and not works_in_place(op)
                    and op.index not in self._tape.aliases
                    and op.target not in OPTIONAL
                    and is_torchs_function(op.target)
                )
                guards = self._guards_until(index + 1, functools.partial(_is_bound, index))
                splice = self._splice(index, index + 1, guards, op.context, gate, is_fit)
                found.append((index + 1, guards, -math.inf, splice))
        roots = [nodes.events.root, *self._tape.calls]
        for call in dict.fromkeys(roots):
            path = nodes.of_call.get(id(call), "")
            gate = self._splicer.gate(path, nodes.candidates[path], call.site, call.parent)
            if gate is not None:
                is_fit = self._is_output(call)
                index = call.output.index if is_fit else -1
                guards = self._guards_until(call.stop, functools.partial(_is_asked_in, call))
                splice = self._splice(index, call.stop, guards, call.context, gate, is_fit)
                depth, around = 0, call.parent
                while around is not None:
                    depth, around = depth + 1, around.parent
                found.append((call.stop, guards, -depth, splice))
        found.sort(key=lambda item: item[:3])
        for before, after in itertools.pairwise(found):
            earlier, later = before[-1].function, after[-1].function
            assert isinstance(earlier, SplicedGate)
            assert isinstance(later, SplicedGate)
            if before[:2] == after[:2]:
                later.gates = (*earlier.gates, *later.gates)
        return tuple(splice for *_, splice in found)

    def _is_output(self, call: ModuleCall) -> bool:
        """Return whether a call has returned a tensor that it made, and that nobody else has."""
        output = call.output
        return (
            call.is_sole
            and call is not self._nodes.events.root
            and type(output) is Ref
            and output.index >= call.start
            and isinstance(self._tape.ops[output.index].meta, TensorMeta)
        )

    def _splice(
        self,
        index: int,
        position: int,
        guards: int,
        context: Context | None,
        gate: AfterGate,
        is_fit: bool,
    ) -> ValueSplice:
        asked = any(
            guard.index == index and not guard.is_of_result for guard in self._tape.guards[:guards]
        )
        is_fit = (
            is_fit
            and not asked
            and index not in self._outside
            and index not in self._analysis.computable
            and index not in self._piece.growths
            and not is_metadata_read(self._tape.ops[index])
        )
        inserted = SplicedGate(gate, self._splicer, self._is_part, (position, guards))
        return ValueSplice(index, position, guards, context, inserted, gate.at.path, is_fit)

    def _is_part(self, tensor: Tensor) -> bool:
        """Return whether the model may have a tensor, and compare it with others."""
        environment = self._recording.environment
        return environment.compares_identity and environment.ownership_test(tensor)

    def _guards_until(self, position: int, precedes: Callable[[Guard], bool]) -> int:
        """Return how many guards come before the end of a node at a position."""
        guards = self._tape.guards
        number = bisect.bisect_left(self._positions, position)
        while (
            number < len(guards)
            and guards[number].position == position
            and precedes(guards[number])
        ):
            number += 1
        return number

    @functools.cached_property
    def _outside(self) -> set[int]:
        """The ops whose values may have memory from before the run."""
        found: set[int] = set()
        for op in self._tape.ops:
            is_new = op.kind is OpKind.CALL and not sets_nothing(op) and makes_anew(op.target)
            if not op.is_work or not (is_new or found.isdisjoint(op.operands)):
                found.add(op.index)
        return found


def _is_bound(index: int, guard: Guard) -> bool:
    return guard.index == index and guard.is_of_result


def _is_asked_in(call: ModuleCall, guard: Guard) -> bool:
    scope: ModuleCall | None = guard.scope
    while scope is not None and scope is not call:
        scope = scope.parent
    return scope is call


# Runs a model under the tracer with its insertions.


def record_with_insertions(
    knowledge: Knowledge,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: InsertionPlan | None,
    script: Script | None = None,
    reads_states: bool = False,
    lifting: Lifting | None = None,
    splicer: Splicer | None = None,
) -> Recording:
    """Run a model under the tracer, with insertions.

    The script has what need not run again. With `reads_states`, the run reads all states where it
    asks for values. If it is to be kept with those without insertions, the splicer splices these
    in. They are ops of the run if the first of them cannot be spliced.
    """
    inserter = None
    if plan is not None:
        knowledge.name_nodes()  # before the run does so in passing
        inserter = LiveInserter(plan, knowledge.registry, knowledge.model, splicer=splicer)
        reads_states = True  # what is inserted must not be called twice
    recording = record(
        knowledge.model, args, kwargs, signature, script, inserter=inserter,
        reads_states=reads_states, lifting=lifting,
    )  # fmt: skip
    if plan is not None:
        if splicer is not None:
            raise_caught()  # in a run without insertions, nothing has raised it
        plan.ran(recording)
        if looked_at := state_access.read_and_changed(plan, recording):
            if splicer is not None:
                splicer.is_apart = True
            recording.tape.block(
                "an insertion may read what the run changes, or change what it reads: "
                f"{', '.join(sorted(looked_at))}"
            )
    return recording


def has_gates(recording: Recording) -> bool:
    """Return whether something that is inserted is an op of a run."""
    return any(isinstance(op.target, Gate) for op in recording.tape.ops)
