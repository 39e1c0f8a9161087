"""The paths known for one set of input guards: a first run, and where others branch off it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias

from bendtrace.errors import InterjectionError
from bendtrace.recording.lifting import Counter, Lifting
from bendtrace.recording.rank_sync import (
    ENDS,
    JointCall,
    joint_call,
    needs_agreement,
)
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis, counts, tested_by
from bendtrace.replay.check import CheckWriter
from bendtrace.replay.codegen import write_run
from bendtrace.replay.global_state import GlobalState
from bendtrace.replay.graph import Graph
from bendtrace.replay.growing import Holes
from bendtrace.replay.guard_code import Check
from bendtrace.replay.joining import may_join
from bendtrace.replay.nodes import Exit, Piece, Trip
from bendtrace.replay.schedule import Schedule, Unlinked, may_be_caught
from bendtrace.replay.source import Code, Departure, Source, counted, define, needed_for, outcome
from bendtrace.replay.splices import Unfit
from bendtrace.replay.stretches import (
    Divergence,
    Finished,
    Path,
    Side,
    Stretch,
)
from bendtrace.tape.captured import Captured
from bendtrace.tape.contexts import AutocastHold
from bendtrace.tape.tape import Guard, Test, raised_by

__all__ = ["Program", "Splicer"]

# Gives the code of an exit with values passed through something; raises `Unfit` if there is none.
Splicer: TypeAlias = Callable[[Exit], Code]

_serials = itertools.count()
# If a run is added to so many segments, counters of loops are lifted from the next call on. (It may
# be one along a known path: where that needs no new ones, it is better left alone.)
_MANY = 7


class Program:
    """All known paths that share one set of input guards.

    Args:
        recording: the first run.
        global_state: the global state that it ran under.
        ignored: parts that need not be as they were, for a recording that is never replayed.
        joins: whether its paths may join (see `graph.py`).
        ties: whether calls may be given tensors that the model holds itself.

    Attributes:
        serial: counts programs in the order in which they were made.
        live: for a run that can only be run live, how often that was done; else None.
        root: the code of the first run, if it can be replayed.
        graph: the states that runs have been in; None where paths do not join, so that resumed
            runs are handed all that was computed.
    """

    def __init__(
        self,
        recording: Recording,
        global_state: GlobalState,
        ignored: frozenset[Captured] = frozenset(),
        joins: bool = True,
        ties: bool = False,
    ) -> None:
        self.recording = recording
        self.global_state = global_state
        self.analysis: Analysis = Analysis(recording.tape)
        writer = CheckWriter(recording, self.analysis, ignored, ties)
        self.check_code: Code = Code(writer.write(), "check")
        self.checks: list[Check] = writer.checks
        self._check = self.check_code.function
        self.ignored = ignored
        self.latest: Any = None  # how the ignored parts were found before the latest live run
        self.same = 0  # for how many in a row
        self.live_only: bool = bool(ignored or recording.tape.blockers)
        self.serial: int = next(_serials)
        self.live: Path | None = Path(recording, 1) if self.live_only else None
        self.graph: Graph | None = None
        self.is_lifted: bool = False  # whether counters of loops are lifted in its runs
        self.lifts_at: int = _MANY  # from so many segments on, they are to be lifted
        self._pieces = 0  # how many there were before the latest run
        self.excluded: frozenset[Counter] = frozenset()  # those that are not
        if self.live_only:
            return
        direct = not (global_state.modes or global_state.monkeypatches)
        if joins and may_join(recording, self.analysis):
            self.graph = Graph(recording, global_state.context, direct, self.analysis)
            self.root: Stretch = Stretch(recording, 1, code=self.graph.beginning.code)
            self.graph.first.owner = self.root
            return
        schedule = Schedule.of_run(recording, self.analysis, global_state.context)
        self.root = Stretch(recording, 1, code=write_run(schedule, direct))

    @property
    def wants_lifting(self) -> bool:
        """Whether the next call is to be recorded with the counters of its loops lifted."""
        return self._pieces >= self.lifts_at and not self.is_lifted

    def lifting(self) -> Lifting | None:
        """Return what lifts counters of loops as in the runs so far; None if nothing does."""
        return Lifting(self.excluded) if self.is_lifted else None

    def follows(self, other: Program, begins: bool) -> None:
        """Take the place of another program.

        Args:
            other: the program.
            begins: whether counters of loops are lifted from now on. The calls that were counted
                before remain so.
        """
        self.is_lifted, self.excluded = begins or other.is_lifted, other.excluded
        if begins and self.graph is not None and other.graph is not None:
            self.graph.retired += [*other.graph.retired, *other.graph.pieces()]

    def failing(self, arguments: tuple[Any, ...]) -> Check | None:
        """Return the first input guard that does not hold, or None if all do.

        Args:
            arguments: the bound arguments in order.
        """
        if (different := self.global_state.difference()) is not None:
            return Check(different)
        try:
            number = self._check(arguments)
        except NameError:  # a fault of the check itself
            raise
        except Exception as error:
            # A key or attribute that the check reads is gone, or a value is of a kind that
            # cannot be compared: in either case not what was recorded.
            return Check(f"the check could not be carried out: {type(error).__name__}: {error}")
        return None if number is None else self.checks[number]

    def admits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether all input guards hold."""
        if not self.global_state.is_current():
            return False
        try:
            return self._check(arguments) is None
        except NameError:  # a fault of the check itself
            raise
        except Exception:  # see `failing`
            return False

    def value_now(self, guard: Guard, arguments: tuple[Any, ...]) -> Any:
        """Compute what an input guard tests, for other arguments."""
        ops = self.recording.tape.ops
        source = Source()
        source.begin("value(A)")
        needed = sorted(needed_for(ops, tested_by(guard, ops)))
        source.take(ops[index].target for index in needed if ops[index].is_given)
        for index in needed:
            define(source, ops[index])
        if counts(guard, ops):
            now = counted(source, ops[guard.index])
        else:
            now = f"bool(v{guard.index})" if guard.test is Test.TRUTH else outcome(guard)
        source.line(f"return {now}")
        return Code(source, "value").function(arguments)

    def run(
        self,
        arguments: tuple[Any, ...],
        first: bool = False,
        compiled: bool = False,
        splicer: Splicer | None = None,
    ) -> Finished | Divergence:
        """Replay, along known paths as far as they go.

        Args:
            arguments: the bound arguments in order.
            first: whether to go no other way than the first run did.
            compiled: whether to use what is compiled of segments.
            splicer: gives code in which values are passed through something; None for plain code.

        Raises:
            Exception: what an op raises where the model has no handler for it: the model
                itself would have raised the same at the same point.
            Unfit: something cannot be spliced in.
        """
        root = self.root
        if self.graph is not None:
            return self._walk(self.graph, arguments, first, compiled, splicer=splicer)
        model = self.recording.environment.function
        if root.casts or needs_agreement(model, self.recording.tape):
            return self.carry_out(root, arguments, {}, AutocastHold())
        # The usual call, which needs nothing of what the others are carried out with.
        values: dict[str, Any] = {}
        try:
            result = root.code.function(arguments, values)
        except Exception as error:
            result = _raised(error, root, root.recording, root.code)
            if result is None:
                raise
        else:
            if type(result) is not Departure:
                root.hits += 1
                return Finished(result, root)
        begun = [result]
        del result  # see `_follow`
        return self._follow(root, arguments, values, AutocastHold(), None, begun)

    def _walk(
        self,
        graph: Graph,
        arguments: tuple[Any, ...],
        first: bool,
        compiled: bool,
        since: Divergence | None = None,
        splicer: Splicer | None = None,
    ) -> Finished | Divergence:
        """Replay from state to state.

        Args:
            graph: the states.
            arguments: the bound arguments in order.
            first: whether to go no other way than the first run did.
            compiled: whether to use what is compiled of segments.
            since: where an earlier walk of the same call ended, at an answer that is known by now.
            splicer: see `run`.
        """
        trips: list[Trip] = []
        exit: Exit | None = graph.beginning
        held, hold = Holes(graph.may_grow and not compiled and since is None), AutocastHold()
        if since is not None:
            assert since.held is not None
            exit, trips, hold = since.exit, since.trips, since.hold
            held += since.held.values()
        assert exit is not None
        piece, entered = exit.piece, exit.number
        code = (exit.compiled if compiled else None) or exit.code
        if splicer is not None:
            code = splicer(exit)
        while True:
            error: Any = None
            values: dict[int, Any] | None
            if piece.casts:
                hold.take()
            try:
                result = code.function(arguments, held)
            except Exception as raised:
                held.put_back()
                if isinstance(raised, Unfit):
                    hold.release()
                    _require_restart(trips, piece, raised)
                    raise
                departure = _raised(raised, piece.owner, piece.recording, code)
                if departure is None:
                    hold.release()
                    _count_raised(trips, piece, entered, raised, code)
                    raise
                number, answer = departure.guard, departure.outcome
                values = _values_in(departure.values)
                error = values.pop(-1 - number)
                del departure
            except BaseException:
                held.put_back()
                hold.release()
                raise
            else:
                if type(result) is not Departure:
                    hold.release()
                    trips.append((piece, entered, None))
                    _count(trips)
                    return Finished(result, piece.owner, trips)
                number, answer = result.guard, result.outcome
                node = None if first else piece.nodes.get(number)
                if node is not None:
                    if answer is True:  # a call less than `after`, for nearly all questions
                        exit = node.yes
                    elif answer is False:
                        exit = node.no
                    else:
                        exit = node.after(answer)
                    found = None
                    if exit is not None and splicer is None:
                        found = exit.written or _written(exit)
                    elif exit is not None and splicer is not None:
                        with suppress(Unfit):
                            found = splicer(exit)
                    if exit is not None and found is not None:
                        if compiled:
                            found = exit.compiled or found
                        if held.grown and not held.may_enter(
                            exit.piece.growths.values(), found.places
                        ):
                            held.put_back()
                        trips.append((piece, entered, number))
                        piece, entered, code = exit.piece, exit.number, found
                        continue
                    if splicer is None:
                        graph.is_broken = graph.is_broken or exit is not None
                if type(answer) is list:  # which the model is given, and may change
                    answer = copy.deepcopy(answer)
                state = piece.recording.tape.states.get(number)
                values = None if state is None else dict(zip(state.holes, held, strict=True))
                held.put_back()
            trips.append((piece, entered, number))
            if error is None and node is not None:
                piece, number = node.piece, node.number
            return Divergence(
                piece.owner, piece.recording, number, answer, {}, hold, True, trips, values, error
            )

    def go_on(
        self,
        divergence: Divergence,
        arguments: tuple[Any, ...],
        splicer: Splicer | None = None,
    ) -> Finished | Divergence:
        """Continue a replay whose other side has become known since it diverged."""
        if divergence.is_anew:
            assert self.graph is not None
            if divergence.held is None:  # nothing was done that cannot be done again
                return self.run(arguments)
            if divergence.exit is None or _written(divergence.exit) is None:
                return divergence
            return self._walk(self.graph, arguments, False, False, divergence, splicer)
        side = divergence.stretch.side(divergence.number, divergence.outcome)
        assert side is not None
        assert side.target is not None
        return self.carry_out(side.target, arguments, divergence.values, divergence.hold)

    def carry_out(
        self,
        stretch: Stretch,
        arguments: tuple[Any, ...],
        values: dict[str, Any],
        hold: AutocastHold,
    ) -> Finished | Divergence:
        """Run some code, and what is known to follow it.

        Args:
            stretch: the code.
            arguments: the bound arguments in order.
            values: what it takes over; it may be emptied.
            hold: on autocast's cache.

        Raises:
            Exception: see `run`.
        """
        model = self.recording.environment.function
        if not needs_agreement(model, self.recording.tape):
            return self._follow(stretch, arguments, values, hold, None)
        with joint_call(model, goes_on=bool(values)) as joint:
            result = self._follow(stretch, arguments, values, hold, joint)
            if joint is not None and isinstance(result, Finished):
                joint.ends(result.output)
            elif joint is not None:
                joint.leaves(result)
            return result

    def _follow(
        self,
        stretch: Stretch,
        arguments: tuple[Any, ...],
        values: dict[str, Any],
        hold: AutocastHold,
        joint: JointCall | None,
        begun: list[Departure] | None = None,
    ) -> Finished | Divergence:
        while True:
            departure: Departure | None
            if joint is not None:
                joint.follows(stretch.recording.tape)
            if begun:  # somebody else has carried out the first stretch
                departure = begun.pop()
            else:
                if stretch.casts:
                    hold.take()
                try:
                    result = stretch.code.function(arguments, values)
                except Exception as error:
                    departure = _raised(error, stretch, stretch.recording, stretch.code)
                    if departure is None:
                        hold.release()
                        raise
                except BaseException:
                    hold.release()
                    raise
                else:
                    if type(result) is not Departure:
                        hold.release()
                        stretch.hits += 1
                        return Finished(result, stretch)
                    departure = result
            number, outcome = departure.guard, departure.outcome
            if type(outcome) is list:  # which the model is given, and may change
                outcome = copy.deepcopy(outcome)
            values.update(departure.values)
            # What is left must be the only one to hold the values: the next stretch forgets
            # them when it needs them no more. (Among them is `values` itself.)
            values.pop("E", None)
            result = departure = None
            side = stretch.side(number, outcome)
            if side is None or side.target is None:
                return Divergence(stretch, stretch.recording, number, outcome, values, hold)
            stretch = side.target

    def stretches(self) -> Iterator[tuple[Stretch, Stretch | None]]:
        """Yield all code with the code that it branches off, parents before children."""
        waiting: list[tuple[Stretch, Stretch | None]] = []
        if not self.live_only:
            waiting.append((self.root, None))
        while waiting:
            stretch, parent = waiting.pop()
            yield stretch, parent
            for side in reversed(_sides(stretch)):
                if side.target is not None:
                    waiting.append((side.target, stretch))

    def taken(self, finished: Finished) -> Stretch | None:
        """Return the end of the run that a replay followed throughout.

        It is None if a replay has gone along parts that no single run combined in this way.
        """
        if self.graph is None or finished.way is None:
            return finished.stretch
        piece = self.graph.run_along(tuple(finished.way))
        return None if piece is None else piece.owner

    def paths(self) -> list[Path]:
        """Return all paths, the first one first, those that can only be run live included."""
        if self.live is not None:
            return [self.live]
        found: list[Path] = []
        for stretch, _ in self.stretches():
            found.append(stretch)
            found += [side.live for side in _sides(stretch) if side.live is not None]
        return found

    def recordings(self) -> list[Recording]:
        """Return all runs that went into the program, the first one first."""
        return list(dict.fromkeys(path.recording for path in self.paths()))

    # What follows changes the tree: under the lock of the `TraceTree`.

    def grow(self, divergence: Divergence, recording: Recording, hits: int = 1) -> bool:
        """Add the path that a resumed run took after `divergence`.

        Args:
            divergence: where it left the known path.
            recording: the run.
            hits: how many calls have taken the path.

        Returns:
            Whether it fits in: if not, the program is to be replaced.
        """
        self.recording.environment.filled_caches.update(recording.environment.filled_caches)
        if divergence.is_anew and not recording.tape.blockers:
            return divergence.number >= 0 and self.join(recording, hits)
        position, parent = divergence.position, divergence.stretch
        side = parent.make_side(divergence.number, divergence.outcome)
        if side.target is not None or (side.live is not None and recording.tape.blockers):
            known = side.target or side.live  # another thread was faster
            assert known is not None
            known.hits += hits
        elif recording.tape.blockers:
            side.live = Path(recording, hits)
        else:
            available = parent.available | {i for i in parent.code.emitted if i < position}
            schedule = Schedule.of_run(
                recording, Analysis(recording.tape), self.global_state.context, position,
                divergence.recording.tape, available,
            )  # fmt: skip
            side.target = Stretch(
                recording, hits, code=write_run(schedule, not self.global_state.modes),
                available=schedule.available, start=position, parent=parent,
            )  # fmt: skip
        return True

    def join(self, recording: Recording, hits: int = 1) -> bool:
        """Add what a run has seen for the first time to the graph.

        Args:
            recording: the run.
            hits: how many calls have taken its path.

        Returns:
            Whether it fits in.
        """
        graph = self.graph
        if graph is None or graph.is_broken:
            return False
        has_begun_anew, known = graph.has_begun_anew, len(graph.pieces())
        pieces = graph.add(recording, hits)
        if pieces is None:
            return False
        if graph.has_begun_anew and not has_begun_anew:
            self.root.sides.clear()
            self.root._by_outcome.clear()
        self._pieces = known
        self.root.code, self.root.recording = graph.beginning.code, graph.first.recording
        for node, piece in pieces:
            guard = recording.tape.guards[piece.after]
            exit = node.after(guard.answer)
            assert exit is not None
            parent: Stretch = node.piece.owner
            piece.owner = Stretch(
                recording, hits, code=exit.code, start=guard.position, parent=parent
            )
            parent.make_side(node.number, exit.answer).target = piece.owner
        return True

    def forget(self, path: Path) -> None:
        """Drop a path that none branches off."""
        if self.graph is not None:
            self.graph.forget(path)
        for stretch, _ in self.stretches():
            for number, sides in list(stretch.sides.items()):
                kept = tuple(side for side in sides if path not in (side.target, side.live))
                if len(kept) < len(sides):
                    stretch.sides[number] = kept
                    stretch._by_outcome.pop(number, None)
                    return


def _sides(stretch: Stretch) -> list[Side]:
    return [side for sides in list(stretch.sides.values()) for side in sides]


def _raised(
    error: Exception, stretch: Stretch, recording: Recording, code: Code
) -> Departure | None:
    """Turn what an op raised into a departure, if the model could go on from there."""
    place = _place_of(error, code)
    if place is None:
        return None
    index, frame = place
    op = recording.tape.ops[index]
    if not may_be_caught(op, recording):
        stretch.failures[index, type(error).__name__] += 1
        if op.site is not None:
            error.add_note(f"raised in a replay of {op.site.place}: {op.site.place.text}")
        return None
    values = {**frame.f_locals, f"v{index}": error.with_traceback(None)}
    return Departure(-1 - index, raised_by(op, error), values)


def _require_restart(trips: list[Trip], piece: Piece, unfit: Unfit) -> None:
    """Raise if a call that cannot go on must not begin again either."""
    has_acted = piece.first_effect < unfit.position
    if has_acted or any(along.has_acted(left) for along, _, left in trips if left is not None):
        raise InterjectionError(
            f"{unfit}, as in earlier calls, after the model has changed something that must not be "
            "changed twice: call it again",
            "",
        ) from unfit


def _values_in(names: dict[str, Any]) -> dict[int, Any]:
    """Return the values of ops among the variables of generated code."""
    return {
        int(name[1:]): value
        for name, value in names.items()
        if name[0] == "v" and name[1:].isdecimal()
    }


def _place_of(error: Exception, code: Code) -> tuple[int, FrameType] | None:
    """Return which op of some code raised an error, and the frame that it was in."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code.function.__code__:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    index = code.op_of_line.get(traceback.tb_lineno)
    return None if index is None else (index, traceback.tb_frame)


def _count_raised(
    trips: list[Trip], piece: Piece, entered: int, error: Exception, code: Code
) -> None:
    """Count a call that an op has ended by raising an error."""
    place = _place_of(error, code)
    if place is not None:
        _count([*trips, (piece, entered, -1 - place[0])])


def _count(trips: list[Trip]) -> None:
    """Count a call by the pieces that it went along."""
    for piece, entered, left in trips:
        times, trip = piece.trips, (entered, left)
        try:
            times[trip] += 1
        except KeyError:
            times[trip] = 1
        piece.owner.hits += 1


def _written(exit: Exit) -> Code | None:
    """Return the code of an exit; None if it needs a value that the state does not hold."""
    try:
        return exit.code
    except Unlinked:
        return None


ENDS.add(Program.carry_out.__code__)
