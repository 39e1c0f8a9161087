"""The paths known for one set of input guards, and how a call is led along them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from bendtrace.engine.check import Check, CheckWriter
from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.guard_kinds import Analysis, asks_for_slices, tested_ops
from bendtrace.engine.program_graph import ProgramGraph
from bendtrace.engine.schedule import Unlinked
from bendtrace.engine.source import (
    Code,
    Departure,
    GeneratedSource,
    Interrupted,
    Unfit,
    define,
    dependencies_of,
    slice_count,
)
from bendtrace.engine.stretches import (
    Divergence,
    Exit,
    FinishedReplay,
    GuardSide,
    Holes,
    RecordedPath,
    Stretch,
    Trip,
)
from bendtrace.python.lazy import LazyModule
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import Captured
from bendtrace.tape.contexts import Hold
from bendtrace.tape.guards import Place
from bendtrace.tape.tape import AfterOp, Guard, Stop, describe_raised
from bendtrace.watch.rank_sync import ENDS, joint_call, needs_agreement

if TYPE_CHECKING:
    from bendtrace.engine import comparison
    from bendtrace.record import varying
    from bendtrace.watch import collectives
else:
    varying = LazyModule("bendtrace.record.varying")
    comparison = LazyModule("bendtrace.engine.comparison")

# Gives the code of an exit with values passed through something; raises `Unfit` if there is none.
ExitWriter: TypeAlias = Callable[[Exit], Code]

_serials = itertools.count()
# If a run is added to so many segments, counters of loops are lifted from the next call on. (It may
# be one along a known path: where that needs no new ones, it is better left alone.)
_MANY = 7


class Program:
    """All known paths that share one set of input guards.

    Parts in `ignored` need not be as they were, for a recording that is never replayed. Its paths
    may join with `joins` (see `program_graph.py`). With `ties`, calls may be given tensors that the
    model holds itself.
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
        patches = global_state.monkeypatches
        writer = CheckWriter(recording, self.analysis, ignored, ties, patches)
        self._asks_for_patches = writer.asks_for_patches
        self.check_code: Code = Code(writer.write(), "check")
        self.checks: list[Check] = writer.checks
        self._check = self.check_code.function
        self.ignored = ignored
        self.latest: Any = None  # how the ignored parts were found before the latest live run
        self.same = 0  # for how many in a row
        self.live_only: bool = bool(ignored or recording.tape.blockers)
        self.serial: int = next(_serials)  # counts programs in the order in which they were made
        # For a run that can only be run live, how often that was done; else None.
        self.live: RecordedPath | None = RecordedPath(recording, 1) if self.live_only else None
        self.graph: ProgramGraph | None = None  # states that runs were in; None if all run live
        self.is_lifted: bool = False  # whether counters of loops are lifted in its runs
        self.lifts_at: int = _MANY  # from so many segments on, they are to be lifted
        self._pieces = 0  # how many there were before the latest run
        self._changes = 0  # of the paths
        self._recordings: tuple[int, list[Recording]] | None = None
        self.excluded: frozenset[varying.Counter] = frozenset()  # those that are not
        self.places: frozenset[Place] = recording.places  # where numbers stay traced in its runs
        self.follows_lists: bool = recording.follows_lists
        if self.live_only:
            return
        direct = not (global_state.modes or global_state.monkeypatches)
        self.graph = ProgramGraph(
            recording, global_state.context, direct, self.analysis, joins=joins
        )
        self.root: Stretch = Stretch(recording, 1)  # the first run, if it can be replayed
        self.graph.first.owner = self.root
        assert self.graph.beginning.code

    @property
    def wants_lifting(self) -> bool:
        """Return whether the next call is to be recorded with the counters of its loops lifted."""
        return self._pieces >= self.lifts_at and not self.is_lifted

    def lifting(self, counters: bool = False, lists: bool = False) -> varying.Lifting | None:
        """Return the lifting of numbers in the runs so far; None if there is none.

        With `counters`, those are lifted in any case that count rounds of loops; with `lists`,
        lists of loops are followed in any case.
        """
        inputs = self.recording.environment.lifted
        if not (counters or self.is_lifted or self.places or inputs):
            return None
        excluded = self.excluded if counters or self.is_lifted else None
        return varying.Lifting(excluded, False, inputs, self.places, lists or self.follows_lists)

    def traces_numbers_unlike(self, other: Program) -> bool:
        """Return whether runs of two programs guard, and trace, different numbers.

        A run that is resumed asks where its own program does, so it can follow no other one.
        """
        one, two = (
            (each.places, each.follows_lists, each.is_lifted and each.excluded)
            for each in (self, other)
        )
        return one != two

    def follows(self, other: Program, begins: bool) -> None:
        """Take the place of another program.

        With `begins`, counters of loops are lifted from now on. The calls that were counted before
        remain so.
        """
        self.is_lifted, self.excluded = begins or other.is_lifted, other.excluded
        if begins and self.graph is not None and other.graph is not None:
            self.graph.retired += [*other.graph.retired, *other.graph.pieces()]

    def failing(self, arguments: tuple[Any, ...]) -> Check | None:
        """Return the first input guard that does not hold, or None if all do."""
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
        """Return whether all input guards hold."""
        if not self.global_state.is_current(self._asks_for_patches):
            return False
        try:
            return self._check(arguments) is None
        except NameError:  # a fault of the check itself
            raise
        except Exception:  # see `failing`
            return False

    def value_now(self, guard: Guard, arguments: tuple[Any, ...]) -> Any:
        """Compute the value that an input guard tests, for other arguments."""
        ops = self.recording.tape.ops
        source = GeneratedSource()
        source.begin("value(A)")
        needed = sorted(dependencies_of(ops, tested_ops(guard, ops)))
        source.take(ops[index].target for index in needed if ops[index].is_given)
        for index in needed:
            define(source, ops[index])
        is_count = asks_for_slices(guard, ops)
        now = slice_count(source, ops[guard.index]) if is_count else guard.finding
        source.line(f"return {now}")
        return Code(source, "value").function(arguments)

    def run(
        self,
        arguments: tuple[Any, ...],
        first: bool = False,
        compiled: bool = False,
        splicer: ExitWriter | None = None,
        since: tuple[Divergence, Exit] | None = None,
    ) -> FinishedReplay | Divergence:
        """Replay, along known paths as far as they go.

        With `first`, it goes no other way than the first run did; with `compiled`, it uses what is
        compiled of segments. In the code of a `splicer`, values are passed through something.
        `since` is where an earlier walk of the same call ended, and where it goes on, since the
        answer is known by now.

        Raises:
            Exception: what an op raises where the model has no handler for it: the model
                itself would have raised the same at the same point.
            Unfit: something cannot be spliced in.
        """
        model = self.recording.environment.function
        if not needs_agreement(model, self.recording.tape):
            return self._walk(arguments, first, compiled, since, splicer)
        with joint_call(model, goes_on=since is not None) as joint:
            result = self._walk(arguments, first, compiled, since, splicer, joint)
            if joint is not None and isinstance(result, FinishedReplay):
                joint.ends(result.output)
            elif joint is not None:
                joint.leaves(result)
            return result

    def go_on(
        self, divergence: Divergence, arguments: tuple[Any, ...], splicer: ExitWriter | None = None
    ) -> FinishedReplay | Divergence:
        """Continue a replay whose other side has become known since it diverged."""
        if divergence.computed is None:  # nothing was done that cannot be done again
            return self.run(arguments)
        exit = divergence.exit  # read once: another thread may forget it
        if exit is None or _exit_code(exit) is None:
            return divergence
        if splicer is not None:
            try:
                splicer(exit)
            except Unfit:
                return divergence
        return self.run(arguments, since=(divergence, exit), splicer=splicer)

    def _walk(
        self,
        arguments: tuple[Any, ...],
        first: bool,
        compiled: bool,
        since: tuple[Divergence, Exit] | None,
        splicer: ExitWriter | None,
        joint: collectives.JointCall | None = None,
    ) -> FinishedReplay | Divergence:
        """Replay from state to state (see `run`); `joint` makes ranks agree on what they do."""
        graph = self.graph
        assert graph is not None
        trips: list[Trip] = []
        exit: Exit | None = graph.beginning
        hold = Hold() if since is None else since[0].hold
        holes = Holes(graph.may_grow and not compiled and since is None, hold)
        if since is not None:
            earlier, exit = since
            assert earlier.computed is not None
            trips = earlier.trips
            holes += earlier.computed.values()
        assert exit is not None
        piece, entered = exit.piece, exit.number
        if splicer is not None:
            code = splicer(exit)
        else:
            code = (exit.compiled if compiled else None) or exit.written or exit.code
        while True:
            error: Any = None
            asked, node = 0, None
            values: dict[int, Any] | None
            if joint is not None:
                joint.follows(piece.recording.tape)
            if piece.casts:
                hold.take()
            try:
                result = code.function(arguments, holes)
            except Exception as raised:
                holes.put_back()
                if isinstance(raised, Interrupted):
                    stop: Stop = AfterOp(raised.position - 1)
                    has_acted = _have_acted([*trips, (piece, entered, stop)])
                    if raised.unfit is not None and not has_acted:
                        hold.release()
                        raise raised.unfit from None
                    raised.hand_on()
                    if hold.block is not None:
                        hold.block.stops(raised.position, raised.guards)
                    frame, _ = frame_of(raised, code)
                    assert frame is not None
                    answer, asked = None, raised.guards
                    values = values_in(frame.f_locals)
                    del frame
                else:
                    departure = departure_by(raised, piece.recording, code)
                    if departure is None:
                        hold.release()
                        raise
                    stop, answer = departure.stop, departure.outcome
                    assert isinstance(stop, AfterOp)
                    values = values_in(departure.values)
                    error = values.pop(stop.index)
                    del departure
            except BaseException:
                holes.put_back()
                hold.release()
                raise
            else:
                if type(result) is not Departure:
                    hold.release()
                    trips.append((piece, entered, None))
                    _count_pieces(trips)
                    return FinishedReplay(result, piece.owner, trips)
                stop, answer = result.stop, result.outcome
                assert isinstance(stop, int)
                if hold.block is not None:
                    hold.block.stops(piece.recording.tape.guards[stop].position, stop)
                node = None if first else piece.nodes.get(stop)
                if node is not None:
                    if answer is True:  # a call less than `after`, for nearly all questions
                        exit = node.yes
                    elif answer is False:
                        exit = node.no
                    else:
                        exit = node.after(answer)
                    found = None
                    if exit is not None and splicer is None:
                        found = exit.written or _exit_code(exit)
                    elif exit is not None and splicer is not None:
                        try:
                            found = splicer(exit)
                        except Unfit:
                            pass
                    if exit is not None and found is not None:
                        if compiled:
                            found = exit.compiled or found
                        if holes.grown and not holes.may_enter(
                            exit.piece.growths.values(), found.places
                        ):
                            holes.put_back()
                        trips.append((piece, entered, stop))
                        piece, entered, code = exit.piece, exit.number, found
                        continue
                    if splicer is None:
                        graph.is_broken = graph.is_broken or exit is not None
                if type(answer) is list:  # which the model is given, and may change
                    answer = copy.deepcopy(answer)
                state = piece.recording.tape.states.get(stop)
                values = None if state is None else dict(zip(state.holes, holes, strict=True))
                holes.put_back()
            trips.append((piece, entered, stop))
            if node is not None:
                piece, stop = node.piece, node.number
            return Divergence(
                piece.owner,
                piece.recording,
                stop,
                answer,
                hold,
                trips,
                values,
                error,
                comparison.Following(graph.node) if graph.joins else None,
                asked,
            )

    def stretches(self) -> Iterator[tuple[Stretch, Stretch | None]]:
        """Yield all code with the code that it branches off, parents before children."""
        waiting: list[tuple[Stretch, Stretch | None]] = []
        if not self.live_only:
            waiting.append((self.root, None))
        while waiting:
            stretch, parent = waiting.pop()
            yield stretch, parent
            for side in reversed(_all_sides(stretch)):
                if side.target is not None:
                    waiting.append((side.target, stretch))

    def path_end(self, finished: FinishedReplay) -> Stretch | None:
        """Return the end of the run that a replay followed throughout.

        It is None if a replay has gone along parts that no single run combined in this way.
        """
        assert self.graph is not None
        piece = self.graph.run_along(tuple(finished.way))
        return None if piece is None else piece.owner

    def paths(self) -> list[RecordedPath]:
        """Return all paths, the first one first, those that can only be run live included."""
        if self.live is not None:
            return [self.live]
        found: list[RecordedPath] = []
        for stretch, _ in self.stretches():
            found.append(stretch)
            found += [side.live for side in _all_sides(stretch) if side.live is not None]
        return found

    def recordings(self) -> list[Recording]:
        """Return all runs that went into the program, the first one first: not to be changed."""
        changes, cached = self._changes, self._recordings
        if cached is None or cached[0] != changes:  # read before, as another thread may change it
            found = list(dict.fromkeys(path.recording for path in self.paths()))
            cached = self._recordings = changes, found
        return cached[1]

    # What follows changes the tree: under the lock of the `TraceTree`.

    def grow(
        self, recording: Recording, divergence: Divergence | None = None, hits: int = 1
    ) -> bool:
        """Add the path that a resumed run took after `divergence`, which may not be known.

        As many calls as `hits` have taken it. Return whether it fits in: if not, the program is to
        be replaced.
        """
        self.recording.environment.filled_caches.update(recording.environment.filled_caches)
        fits = self._add(recording, divergence, hits)
        self._changes += 1
        return fits

    def _add(self, recording: Recording, divergence: Divergence | None, hits: int) -> bool:
        if not recording.tape.blockers:
            return self.join(recording, hits)
        if divergence is None:
            return True
        side = divergence.stretch.make_side(divergence.number, divergence.outcome)
        if side.target is not None or side.live is not None:
            target = side.target or side.live  # another thread was faster
            assert target is not None
            target.hits += hits
        else:
            side.live = RecordedPath(recording, hits)
        return True

    def add_live(self, leaves: tuple[int, Any], path: RecordedPath) -> None:
        """Add a path that can only be run live, by the guard where it leaves the first run."""
        self.root.make_side(*leaves).live = path
        self._changes += 1

    def join(self, recording: Recording, hits: int = 1) -> bool:
        """Add the new part of a run, whose path `hits` calls took; return whether it fits in."""
        graph = self.graph
        if graph is None or graph.is_broken:
            return False
        has_begun_anew, count = graph.has_begun_anew, len(graph.pieces())
        pieces = graph.add(recording, hits)
        if pieces is None:
            return False
        if graph.has_begun_anew and not has_begun_anew:
            self.root.sides.clear()
            self.root._by_outcome.clear()
        self._pieces = count if graph.joins else 0
        self.root.recording = graph.first.recording
        for node, piece in pieces:
            guard = recording.tape.guards[piece.after]
            exit = node.after(guard.answer)
            assert exit is not None
            parent: Stretch = node.piece.owner
            piece.owner = Stretch(recording, hits, parent=parent)
            parent.make_side(node.number, exit.answer).target = piece.owner
        self._changes += 1
        return True

    def forget(self, path: RecordedPath) -> None:
        """Drop a path that none branches off."""
        self._forget(path)
        self._changes += 1

    def _forget(self, path: RecordedPath) -> None:
        if self.graph is not None:
            self.graph.forget(path)
        for stretch, _ in self.stretches():
            for number, sides in list(stretch.sides.items()):
                kept = tuple(side for side in sides if path not in (side.target, side.live))
                if len(kept) < len(sides):
                    stretch.sides[number] = kept
                    stretch._by_outcome.pop(number, None)
                    return


def _all_sides(stretch: Stretch) -> list[GuardSide]:
    return [side for sides in list(stretch.sides.values()) for side in sides]


def _have_acted(trips: list[Trip]) -> bool:
    """Return whether a call may have done something that must not be done twice."""
    return any(piece.has_acted(left) for piece, _, left in trips if left is not None)


def _count_pieces(trips: list[Trip]) -> None:
    """Count a call by the pieces that it went along."""
    for piece, entered, left in trips:
        times, trip = piece.trips, (entered, left)
        try:
            times[trip] += 1
        except KeyError:
            times[trip] = 1
        piece.owner.hits += 1


def _exit_code(exit: Exit) -> Code | None:
    """Return the code of an exit; None if it needs a value that the state does not hold."""
    try:
        return exit.code
    except Unlinked:
        return None


ENDS.add(Program.run.__code__)


# Errors that ops of generated code raise.


def departure_by(error: Exception, recording: Recording, code: Code) -> Departure | None:
    """Turn the error of an op into a departure; None for other errors."""
    # The traceback has the frame of the replay with all values so far. A `try` around each op in
    # the generated code would have to list the values that are alive there.
    place = error_place(error, code)
    if place is None:
        return None
    index, frame = place
    values = {**frame.f_locals, f"v{index}": error.with_traceback(None)}
    return Departure(AfterOp(index), describe_raised(recording.tape.ops[index], error), values)


def values_in(names: dict[str, Any]) -> dict[int, Any]:
    """Return the values of ops among the variables of generated code."""
    return {
        int(name[1:]): value
        for name, value in names.items()
        if name[0] == "v" and name[1:].isdecimal()
    }


def error_place(error: Exception, code: Code) -> tuple[int, FrameType] | None:
    """Return which op of some code raised an error, and the frame that it was in."""
    frame, line = frame_of(error, code)
    index = code.op_of_line.get(line)
    return None if frame is None or index is None else (index, frame)


def frame_of(error: Exception, code: Code) -> tuple[FrameType | None, int]:
    """Return the frame of some code that an error came from, and the line there."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not code.function.__code__:
        traceback = traceback.tb_next
    return (None, 0) if traceback is None else (traceback.tb_frame, traceback.tb_lineno)
