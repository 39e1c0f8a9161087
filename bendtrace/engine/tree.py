"""The trace tree: all recorded paths of one model."""

from __future__ import annotations

import copy
import operator
import os
import threading
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.guard_kinds import GuardKind
from bendtrace.engine.program import ExitWriter, Program
from bendtrace.engine.stretches import Divergence, Failure, FinishedReplay, RecordedPath, Stretch
from bendtrace.python.lazy import LazyModule, errors
from bendtrace.python.sites import users_level
from bendtrace.record.recorder import Recording
from bendtrace.tape.captured import (
    PLAIN_TENSORS,
    PLAIN_TYPES,
    Access,
    Captured,
    CaptureKind,
    EnvironmentChange,
    holds_number,
    identical,
    is_cache,
)
from bendtrace.tape.guards import Place, TruthGuard, ValueGuard, number_place
from bendtrace.tape.tape import AfterOp, Op, OpKind, Ref
from bendtrace.watch.functions import name_of

if TYPE_CHECKING:
    from bendtrace.python import results
    from bendtrace.record import varying
    from bendtrace.watch import containers
    from bendtrace.watch.environment import Environment
else:
    containers = LazyModule("bendtrace.watch.containers")
    results = LazyModule("bendtrace.python.results")
    varying = LazyModule("bendtrace.record.varying")

# Calls in a row without a change after which a value is taken to change no more. Of those that
# come after a wait (see `Floor`), each counts for several: the waits differ in length, so that a
# value which comes round again does not look the same.
_STABLE, _WAITED = 16, 4
# How often calls are live before they are recorded again: each power of 2 up to the first number,
# then not the next one, and at the latest after the second number.
_OFTEN, _RARELY = 16, 2048
# So many programs are looked at one by one; among more, what served such arguments goes first.
_FEW, _MOST_KINDS = 4, 4096
# After this many runs that each changed what the next one was checked for, a value is taken to
# change on every call (a counter), and the model to be run live.
_EVOLVING = 4

# Up to so many items, a list that gets longer may have its full length soon: so may a deque that
# holds no more than the second number.
_SHORT, _SMALL = 10, 32

# After it was another one so many times when a run was recorded, a number is an input.
_MOVING, _NUMBERS = 2, (int, float)

_MOST_WHILES = 10  # after which the while gets no longer

# After so many numbers at one place, numbers stay traced there.
_VARYING = 4

# Errors are not noted for more outcomes of one guard than this.
_MOST_SIDES = 64

# A guard, and an outcome of it that leads elsewhere.
Departing = tuple[int, Any]

_NOT_THE_MODEL = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep,
)  # fmt: skip


class TraceTree:
    """Programs by the names of the arguments they were given, the latest first.

    At most `limit` paths are kept. When there are more, those go first that were used least of
    late: the calls that took each path are counted, and count for half after each time that
    another path had to go. A path that others branch off stays as long as they do.

    Threads may read while one changes something: what they read is exchanged, never changed.

    Args:
        limit: how many paths to keep; None for all.
        culprit: says what makes the model diverge so often, for the warning given when the
            limit is reached for the first time.
        joins: whether paths may join.
        is_plain: whether nothing is inserted that its runs have ops of. Only then may calls of a
            `functools.lru_cache` be ops, and lists of loops be values.

    Attributes:
        is_plain: as given.
        lifts: whether runs may begin to lift counters of loops.
        varying: the places where numbers differ from run to run, and the loops whose rounds do.
    """

    def __init__(
        self,
        limit: int | None = None,
        culprit: Callable[[TraceTree], str | None] | None = None,
        joins: bool = True,
        is_plain: bool = False,
    ) -> None:
        self.is_plain: bool = is_plain
        self.limit = limit
        self._joins = joins
        self.forgotten: int = 0
        self.lifts: bool = True
        self.varying: frozenset[Place] = frozenset()
        self._asked: defaultdict[Place, set[Any]] = defaultdict(set)  # for which numbers
        self._steady: set[Place] = set()  # where numbers are better guarded
        # Programs that guard numbers which are going to stay traced, with what is asked there.
        self._aside: list[tuple[tuple[str, ...], Program]] = []
        self.failures: Counter[Failure] = Counter()
        self._culprit = culprit
        self._programs: dict[tuple[str, ...], tuple[Program, ...]] = {}
        # What served arguments of a kind before, the latest first: where to look first, no more.
        self._served: dict[tuple[Any, ...], tuple[Program, ...]] = {}
        self._indices: dict[tuple[str, ...], ProgramIndex] = {}
        # What was another one when a program, or a value, did not fit any more.
        self._outdated: dict[tuple[tuple[str, ...], str], set[Any]] = {}
        self._relapses: Counter[tuple[str, ...]] = Counter()  # how often that did not last
        self._ties = False  # whether a call was given what the model holds
        self._inputs: frozenset[str] = frozenset()  # the numbers and containers that are inputs
        self._excluded: frozenset[str] = frozenset()  # those that Python needs by value
        self._moved: Counter[str] = Counter()  # how often each was another one in a new run
        self._misses: dict[str, int] = {}  # of caches, when the latest run had ended
        self._needed: Counter[str] = Counter()  # how many runs needed it by value
        self._lock = threading.RLock()

    def programs(self, names: tuple[str, ...] | None = None) -> Iterator[Program]:
        """Yield the programs, or those for some argument names."""
        for key, listed in list(self._programs.items()):
            if names is None or key == names:
                yield from listed

    def find(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> Program | None:
        """Return a program whose input guards hold."""
        listed = self._programs.get(names, ())
        if len(listed) <= _FEW:
            for program in listed:
                if program.admits(arguments):
                    return program
            return None
        kind = names, *map(_argument_kind, arguments)
        served = self._served.get(kind, ())
        found = next((program for program in served if program.admits(arguments)), None)
        if found is None:
            others = (p for p in self._indices[names].candidates(arguments) if p not in served)
            found = next((program for program in others if program.admits(arguments)), None)
        if found is not None and not (served and found is served[0]):
            if len(self._served) >= _MOST_KINDS:
                self._served.clear()
            before = [program for program in served if program is not found]
            self._served[kind] = (found, *before[: _FEW - 1])
        return found

    def add(
        self,
        names: tuple[str, ...],
        recording: Recording,
        global_state: GlobalState,
        evolving: frozenset[str],
    ) -> Program:
        """Keep a new run.

        Args:
            names: names of its arguments.
            recording: the run.
            global_state: the global state it ran under.
            evolving: labels of what changes on every call (see `outdated`).
        """
        written = [change for change in recording.changes if _evolving(change) in evolving]
        ignored = frozenset(
            part
            for part in (recording.environment.parts if written else ())
            if any(change.covers(part) for change in written)
        )
        if written:
            for label in sorted({change.label for change in written}):
                place = recording.environment.place_of(label)
                see = f" (see {place})" if place else ""
                recording.tape.block(f"{label} changes on every call{see}")
        program = Program(recording, global_state, ignored, self._joins, self._ties)
        with self._lock:
            self._insert(names, program)
            self._notice(recording, program)
            self._count_needed(recording)
            self._count_containers(recording)
            self.note_caches(recording.environment)
        self._keep_to_limit()
        return program

    def lifting(self) -> varying.Lifting | None:
        """Return the lifting of numbers in a run of a new program; None if there is none."""
        if not (self._inputs or self.varying):
            return None
        return varying.Lifting(None, False, self._inputs, self.varying, self.is_plain)

    def _notice(self, recording: Recording, program: Program) -> None:
        """Note which numbers a run has asked for, and where.

        Where there are many, the programs that guard them are dropped: the next run keeps the
        numbers traced. If that is of no use, these programs come back.
        """
        self._add_inputs(
            part.label
            for part in recording.environment.parts
            if part.label not in self._excluded and _is_keyed(part, recording.keyed)
        )
        steady = recording.useless | recording.guarded
        if steady:
            self._steady |= steady
            self.varying -= steady
            if recording.useless:
                for names, listed in list(self._programs.items()):
                    lifted = [one for one in listed if not one.places.isdisjoint(recording.useless)]
                    self._drop(names, *lifted)
        if recording.places and self._aside:
            for names, one in self._aside:
                assert one.graph is not None
                if _asks_at(one, steady) and not _asks_at(one, self.varying):
                    self._insert(names, one)
                elif program.graph is not None:
                    program.graph.retired += [*one.graph.retired, *one.graph.pieces()]
            self._aside.clear()
        answers = _rounds_asked(program) if program.recording is recording else {}
        for guard in recording.tape.guards:
            place = number_place(guard)
            if place is not None:
                answers.setdefault(place, []).append(guard.answer)
        asked = answers.keys() - self._steady
        for place in asked:
            found = answers[place]  # of comparisons, all together tell an order
            self._asked[place].update([tuple(found)] if type(found[0]) is bool else found)
        new = {place for place in asked if len(self._asked[place]) >= _VARYING}
        if new - self.varying and results.can_exchange() and self._joins:
            self.varying |= new
            for names, listed in list(self._programs.items()):
                asking = [one for one in listed if one.graph is not None and _asks_at(one, new)]
                self._drop(names, *asking)
                self._aside += [(names, one) for one in asking]

    def _program(self, recording: Recording, global_state: GlobalState) -> Program:
        # What is inserted may need an item of a list, which no state has.
        joins = self._joins and (self.is_plain or not recording.follows_lists)
        return Program(recording, global_state, joins=joins, ties=self._ties)

    def _insert(self, names: tuple[str, ...], program: Program) -> None:
        self._indices.setdefault(names, ProgramIndex()).add(program)
        self._programs[names] = (program, *self._programs.get(names, ()))

    def grow(
        self, program: Program, recording: Recording, divergence: Divergence | None = None
    ) -> None:
        """Keep the path that a resumed run took.

        Args:
            program: the program that it left.
            recording: the run.
            divergence: where it did; None if that is not known to the program.
        """
        with self._lock:
            first = program.recording.environment
            ties_more = recording.environment.ties_more_than(first)
            self._ties |= ties_more
            more = ties_more or recording.environment.sees_more_than(first)
            blocked = bool(recording.tape.blockers)  # which is run live, whatever it sees
            if more and not blocked:
                other = self._program(recording, program.global_state)
                other.follows(program, False)
                self._exchange(program, other)
            elif program.grow(recording, divergence):
                self._notice(recording, program)
            else:
                runs = (program.root.recording, recording)
                if any(run.tape.counters for run in runs):
                    self._stop_lifting(program)
                else:
                    one, two = map(_with_own_states, runs)
                    others = [Program(one, program.global_state, joins=False)]
                    if not others[0].join(two):
                        others.append(Program(two, program.global_state, joins=False))
                    self._exchange(program, *others)
            self._count_containers(recording)
            self.note_caches(recording.environment)
        self._keep_to_limit()

    def compare_numbers(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
        """Make inputs of the numbers and containers in the state that differ in new runs.

        Args:
            names: names of the arguments.
            arguments: the bound arguments in order.
        """
        latest = next(self.programs(names), None)
        if latest is None:
            return
        environment = latest.recording.environment
        labels = self._inputs | self._excluded
        for part in environment.parts:
            if part.label in labels or not _has_moved(part, arguments):
                continue
            is_written = part.kind is CaptureKind.ARRAY and latest.live_only
            with self._lock:
                self._moved[part.label] += _MOVING if is_written else 1
                if self._moved[part.label] >= _MOVING:
                    self._add_inputs([part.label])
        # A container that is replaced is no input: its identity decides.
        replaced = (
            part.label
            for part in environment.parts
            if part.kind is CaptureKind.IDENTITY
            and id(part.value) in environment.watched_containers
            and _read_part(part, arguments) is not part.value
        )
        self.exclude(frozenset(replaced))

    def note_caches(self, environment: Environment) -> None:
        """Make inputs of caches that are filled again and again, and drop what looks into them.

        Where calls of a cache can be no ops, and it is full, programs last until the next fill. So
        such a cache counts as well, and runs that fill it are live from then on.

        Args:
            environment: what the latest run could read.
        """
        misses: Counter[str] = Counter()
        for part in environment.parts:
            if is_cache(part) and containers.caches_tensors(part.value):
                info = part.value.cache_info()
                is_op = self.is_plain and containers.can_be_watched(part)
                if is_op or info.currsize == info.maxsize:
                    misses[part.label] += info.misses
        if not misses:
            return
        with self._lock:
            changed = {
                label for label in misses if self._misses.get(label, misses[label]) != misses[label]
            }
            self._misses.update(misses)
            self._moved.update(changed)
            # One that is too small for a single run is filled by each run.
            small = environment.displaced & misses.keys() - self._inputs
            often = {one for one in changed if self._moved[one] == _MOVING} | small
            often -= self._excluded
            if not often:
                return
            self._add_inputs(often)
            for names, listed in list(self._programs.items()):
                looking = (
                    one
                    for one in listed
                    if any(
                        is_cache(p) and p.label in often for p in one.recording.environment.parts
                    )
                )
                self._drop(names, *looking)

    def _add_inputs(self, labels: Iterable[str]) -> None:
        for label in labels:
            self._inputs |= {label}
            for key in [*self._outdated]:
                if f"{label}[".startswith((f"{key[1]}[", f"{key[1]}.")):
                    del self._outdated[key]

    def exclude(self, labels: frozenset[str]) -> None:
        """Let containers be guarded by their content again, and drop what took them for inputs."""
        if not labels:
            return
        with self._lock:
            self._excluded |= labels
            self._inputs -= labels
            for names, listed in list(self._programs.items()):
                lifted = (one.recording.environment.lifted for one in listed)
                pairs = zip(listed, lifted, strict=True)
                self._drop(names, *(one for one, inputs in pairs if inputs & labels))

    def _count_needed(self, recording: Recording) -> None:
        """Let a number be a constant of paths again if each new path needs it by value."""
        if not recording.tape.counters:  # among which the numbers in the state are
            return
        guards = (one for one in recording.tape.guards if number_place(one) not in self.varying)
        for label in varying.required_numbers(recording.tape, guards):
            self._needed[label] += 1
            if self._needed[label] == _EVOLVING:
                self._excluded |= {label}
                self._inputs -= {label}

    def _count_containers(self, recording: Recording) -> None:
        """Compare a container by its content again if each new path needs floats in it by value.

        They rarely come twice.
        """
        for label in varying.required_containers(recording.tape) if self._inputs else ():
            self._needed[label] += 1
            if self._needed[label] == _EVOLVING:
                self.exclude(frozenset({label}))

    def lift(self, program: Program, recording: Recording, lifting: varying.Lifting) -> None:
        """Restart a program with a run in which what differs between rounds of loops is lifted.

        Args:
            program: the program.
            recording: the run.
            lifting: what lifted them.
        """
        with self._lock:
            if recording.tape.blockers or not lifting.has_lifted:
                program.lifts_at *= 2
                if not recording.tape.blockers:
                    program.join(recording)
                return
            program.excluded |= lifting.needed_counters(recording.tape)
            if not program.excluded.isdisjoint(lifting.lifted.values()):
                return  # the next run keeps the numbers that Python needs
            other = self._program(recording, program.global_state)
            other.follows(program, True)
            self._exchange(program, other)
        self._keep_to_limit()

    def _stop_lifting(self, program: Program) -> None:
        """Drop a program whose paths cannot join: runs that are resumed lift no counters."""
        self.lifts = False
        self._steady |= {*filter(varying.is_loop, self.varying)}
        self.varying -= self._steady
        for names, listed in list(self._programs.items()):
            if program in listed:
                self._drop(names, program)

    def _exchange(self, program: Program, *others: Program) -> None:
        """Replace a program whose paths cannot join by a program for each path."""
        others[0].root.hits = program.root.hits
        for names, listed in self._programs.items():
            if program in listed:
                self._drop(names, program)
                for other in others:
                    self._insert(names, other)
                return

    def ran_live(self, program: Program, divergence: Divergence | None = None) -> None:
        """Count a call that could only be run live, from the start or after `divergence`."""
        live = program.live
        if divergence is not None:
            side = divergence.stretch.side(divergence.number, divergence.outcome)
            live = None if side is None else side.live
        if live is not None:
            live.hits += 1

    def looks_again(self, program: Program) -> bool:
        """Return whether to record the next call of a program that runs live.

        Where values decide, it may go a way that can be replayed. The more calls were live, the
        less often that is tried: the 2nd, 4th, 8th and 16th time, the 64th, and so on. (After the
        16th, most calls run the model itself and are not counted here, see `Floor`.)
        """
        if program.live is None or program.ignored or not program.analysis.needs_values:
            return False
        return _is_due(program.live.hits)

    def looks_again_after(self, divergence: Divergence) -> bool:
        """Return whether to record the next call along a side that runs live."""
        side = divergence.stretch.side(divergence.number, divergence.outcome)
        return side is not None and side.live is not None and _is_due(side.live.hits)

    def replace(
        self, names: tuple[str, ...], live: Program, recording: Recording, global_state: GlobalState
    ) -> tuple[Program, Departing | None]:
        """Keep a run that can be replayed instead of a program that was only run live.

        Returns:
            The new program, and where the old run leaves it: a side of it that is live, if the
            two can be told apart by a guard.
        """
        program = self._program(recording, global_state)
        assert live.live is not None
        leaves = _first_departure(recording, live.recording)
        with self._lock:
            if leaves is not None:
                program.add_live(leaves, live.live)
            if live in self._programs.get(names, ()):  # else another thread was faster
                self._drop(names, live)
            self._insert(names, program)
        self._keep_to_limit()
        return program, leaves

    def settles(
        self, names: tuple[str, ...], program: Program, arguments: tuple[Any, ...],
        has_waited: bool = False,
    ) -> bool:  # fmt: skip
        """Return whether a value that seemed to change on every call has not changed for a while.

        The program is dropped then, and later calls are recorded again. If it changes again after
        that, the next while is twice as long.

        Args:
            names: names of the arguments.
            program: the program.
            arguments: the bound arguments in order.
            has_waited: whether calls before this one have run the model itself.
        """
        if not program.ignored:
            return False
        # Numbers in a list that got no longer can be inputs.
        now = [
            _glance(part, arguments)
            for part in program.ignored
            if not (_is_list_item(part) and holds_number(part) and part.label not in self._excluded)
        ]
        if now != program.latest:
            program.latest, program.same = now, 0
            return False
        program.same += _WAITED if has_waited else 1
        if program.same < _STABLE << min(self._relapses[names], _MOST_WHILES):
            return False
        with self._lock:
            self._relapses[names] += 1
            listed = self._programs.get(names, ())
            self._drop(names, *(program for program in listed if program.ignored))
            for key in [key for key in self._outdated if key[0] == names]:
                del self._outdated[key]
        return True

    def failed(self, error: BaseException, divergence: Divergence | None = None) -> None:
        """Note that the model raised, from the start or after `divergence`."""
        found = self.failures
        with self._lock:
            if divergence is not None:
                stretch, number = divergence.stretch, divergence.number
                if len(stretch.sides.get(number, ())) >= _MOST_SIDES:
                    return
                found = stretch.make_side(number, divergence.outcome).failures
            found[_failure(error)] += 1

    def _keep_to_limit(self) -> None:
        warning = None
        if self.limit is None:
            return
        with self._lock:
            paths = self._paths()
            while len(paths) > self.limit:
                if not self.forgotten:
                    warning = self._warning()
                self._forget_one()
                for path in paths:
                    path.age()
                paths = self._paths()
        if warning is not None:
            warnings.warn(warning, stacklevel=users_level())

    def _paths(self) -> list[RecordedPath]:
        return [path for program in self.programs() for path in program.paths()]

    def _forget_one(self) -> None:
        ends: list[tuple[int, tuple[str, ...], Program, RecordedPath]] = []
        for names, listed in self._programs.items():
            # Of equals the one traced first goes first; the latest program is listed first.
            for program in reversed(listed):
                for path in program.paths():
                    if not (isinstance(path, Stretch) and _has_sides(path)):
                        ends.append((path.uses, names, program, path))
        _, names, program, least = min(ends, key=lambda end: end[0])
        if least is (program.root if program.live is None else program.live):
            self._drop(names, program)
        else:
            program.forget(least)
        self.forgotten += 1

    def _drop(self, names: tuple[str, ...], *programs: Program) -> None:
        kept = tuple(other for other in self._programs[names] if other not in programs)
        self._programs[names] = kept
        self._served.clear()
        for program in programs:
            self._indices[names].remove(program)

    def _warning(self) -> errors.TraceLimitWarning:
        culprit = None if self._culprit is None else self._culprit(self)
        often = "" if culprit is None else f" What most of them differ by is {culprit}."
        return errors.TraceLimitWarning(
            f"the model has taken more than {self.limit} paths: from now on the least used are "
            f"forgotten, and traced again when they come up.{often} If that differs on nearly "
            "every call, keep it in tensors (torch.where, masking) or call the model itself; if "
            "there are just more paths than that, raise BendedModule's max_traces"
        )

    def outdated(self, names: tuple[str, ...], arguments: tuple[Any, ...]) -> frozenset[str]:
        """Say which values change on every call, from the programs that do not fit any more.

        A run that changes what it was itself checked for (a counter) fits once only.
        """
        programs = self._programs.get(names, ())
        lifted = {label for one in programs for label in one.recording.environment.lifted}
        lifted -= self._excluded
        for program in programs:
            if not program.recording.changes:
                continue
            failed = program.failing(arguments)
            part = None if failed is None else failed.part
            if part is None or part.is_argument:  # the caller gives another one each time
                continue
            if part.label in lifted:  # it is of another type than a number, of which there are few
                continue
            change = next((c for c in program.recording.changes if c.covers(part)), None)
            if change is not None:
                now = _read_part(part, arguments)
                # A constant that comes back, such as None, fits again.
                constants = [now, *([part.value] if part.kind is CaptureKind.PLAIN else [])]
                plain = ((type(one), one) for one in constants if type(one) in PLAIN_TYPES)
                seen = next(plain, program.serial)
                if not _fills(now):
                    with self._lock:
                        self._outdated.setdefault((names, _evolving(change)), set()).add(seen)
                break
        return frozenset(
            label
            for (key, label), seen in list(self._outdated.items())
            if key == names and len(seen) >= _EVOLVING
        )

    def replay(
        self, names: tuple[str, ...], program: Program, arguments: tuple[Any, ...],
        compiled: bool = False, splicer: ExitWriter | None = None,
    ) -> FinishedReplay | Divergence:  # fmt: skip
        """Run a program, going over to paths that are known from other programs."""
        result = program.run(arguments, compiled=compiled, splicer=splicer)
        while isinstance(result, Divergence) and not result.continues_live:
            if splicer is not None and result.computed is None:
                break  # nothing may be done again
            elsewhere = self._find_elsewhere(names, program, result, arguments)
            if elsewhere is None:
                break
            with self._lock:
                try:
                    has_grown = program.grow(elsewhere, result, hits=0)
                except errors.NondeterminismError:  # it was given something else
                    has_grown = False
            if not has_grown:
                break
            result = program.go_on(result, arguments, splicer)
            self._keep_to_limit()
        return result

    def _find_elsewhere(
        self, names: tuple[str, ...], program: Program, divergence: Divergence,
        arguments: tuple[Any, ...],
    ) -> Recording | None:  # fmt: skip
        """Find a recorded run that is the same up to a divergence and then took its side."""
        is_apart = program.graph is None or not program.graph.joins
        if divergence.guard is None or is_apart or not program.analysis.fixed_metadata:
            return None  # the arguments are not any more what the other programs check
        index = self._indices.get(names)
        for other in () if index is None else index.candidates(arguments):
            if other is program or other.live_only or not other.admits(arguments):
                continue
            if other.traces_numbers_unlike(program):
                continue
            for recording in other.recordings():
                seen, first = recording.environment, program.recording.environment
                more = seen.sees_more_than(first) or seen.ties_more_than(first)
                more = more or seen.lifted != first.lifted  # what is an input is not checked
                more = more or first.ties_more_than(seen)  # runs are compared by names
                if not (more or recording.tape.blockers) and _goes_on_from(recording, divergence):
                    return recording
        return None


def _asks_at(program: Program, places: Set[Place]) -> bool:
    """Return whether a run of a program has asked for a number at one of some places."""
    guards = (guard for recording in program.recordings() for guard in recording.tape.guards)
    return not places.isdisjoint([*_rounds_asked(program), *map(number_place, guards)])


def _rounds_asked(program: Program) -> dict[Place, list[Any]]:
    """Return how often each `while` loop has asked what inputs decide."""
    pairs = zip(program.recording.tape.guards, program.analysis.kinds, strict=True)
    asked = [one for one, kind in pairs if kind is GuardKind.INPUT and isinstance(one, TruthGuard)]
    return {} if program.graph is None or len(asked) < 2 else varying.rounds_of_loops(asked)


def _is_due(hits: int) -> bool:
    """Return whether a call that was live so often is recorded next time (see `looks_again`)."""
    tried = hits + 1
    is_power = tried & (tried - 1) == 0
    return (is_power and (tried <= _OFTEN or tried > 2 * _OFTEN)) or tried % _RARELY == 0


def _argument_kind(argument: Any) -> Any:
    """Return properties that arguments of the same program are likely to share."""
    kind = type(argument)
    if kind is torch.Tensor:
        return argument.dtype, None if argument.is_nested else tuple(argument.shape)
    if kind in (tuple, list) and len(argument) <= _FEW:
        return kind, *map(_argument_kind, argument)
    return (kind, argument) if kind in (int, bool, str) else kind


def _has_sides(stretch: Stretch) -> bool:
    return any(
        side.target is not None or side.live is not None
        for sides in stretch.sides.values()
        for side in sides
    )


def _failure(error: BaseException) -> Failure:
    """Say where the model's own code raised an error, as far as that can be told."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_NOT_THE_MODEL)] or frames
    file, line = (own[-1].filename, own[-1].lineno or 0) if own else ("", 0)
    return type(error).__name__, file, line


def _read_part(part: Captured, arguments: tuple[Any, ...]) -> Any:
    try:
        return part.read(arguments)
    except (LookupError, AttributeError, TypeError):
        return None


def _has_moved(part: Captured, arguments: tuple[Any, ...]) -> bool:
    """Return whether a number, or a container of keys, differs from the one that a run found."""
    if holds_number(part):
        now = _read_part(part, arguments)
        return type(now) in _NUMBERS and not identical(now, part.value)
    if is_cache(part) or not containers.can_be_watched(part):
        return False  # (of a cache, its runs tell)
    return not containers.has_content(part, _read_part(part, arguments))


def _is_keyed(part: Captured, keyed: frozenset[str]) -> bool:
    """Return whether a part is a dict with some label, or a number in a list with one."""
    if part.label in keyed:
        return containers.can_be_watched(part)
    holder = part.parent
    return (
        holder is not None and holder.label in keyed and _is_list_item(part) and holds_number(part)
    )


def _is_list_item(part: Captured) -> bool:
    return part.parent is not None and part.parent.kind is CaptureKind.LIST


def _evolving(change: EnvironmentChange) -> str:
    """Return the label under which a change counts: the label of the list, for its items."""
    return change.part.label if change.part.kind is CaptureKind.LIST else change.label


def _fills(value: Any) -> bool:
    """Return whether a value is a list or deque that may soon have its full length."""
    if isinstance(value, deque) and value.maxlen is not None:
        return len(value) < value.maxlen <= _SMALL
    return isinstance(value, (list, deque)) and len(value) <= _SHORT


def _glance(part: Captured, arguments: tuple[Any, ...]) -> Any:
    value = _read_part(part, arguments)
    if part.kind is CaptureKind.PLAIN and type(value) is part.type:
        return value
    # What it held before is looked at as well, but not what was added to it.
    return len(value) if isinstance(value, (list, dict, set, deque)) else id(value)


def _first_departure(recording: Recording, other: Recording) -> Departing | None:
    """Return the first guard of a run that another run, the same so far, found otherwise."""
    pairs = zip(recording.tape.guards, other.tape.guards, strict=False)
    for number, (mine, its) in enumerate(pairs):
        if (mine.position, mine.key) != (its.position, its.key):
            return None
        if not identical(mine.answer, its.answer):
            return number, its.answer
    return None


def _goes_on_from(recording: Recording, divergence: Divergence) -> bool:
    """Return whether a run was in the state of a divergence, and found the same answer there."""
    states, tape = divergence.recording.tape.states, recording.tape
    number = divergence.number
    state = None if isinstance(number, AfterOp) else states.get(number)
    return state is not None and any(
        other.key == state.key and identical(tape.guards[number].answer, divergence.outcome)
        for number, other in tape.states.items()
    )


def _with_own_states(recording: Recording) -> Recording:
    """Return a copy of a run with its own states: others may still read the old ones."""
    found = copy.copy(recording)
    found.tape = copy.copy(recording.tape)
    return found


class FixedNumber(NamedTuple):
    """A number that a program insists on.

    Attributes:
        argument: which of the arguments, in order, it is about.
        dim: of which dimension it is the size; None where the argument is the number itself.
    """

    argument: int
    dim: int | None

    def read(self, arguments: tuple[Any, ...]) -> Any:
        """Return the number among other arguments; None if there is no such number."""
        argument = arguments[self.argument]
        if self.dim is None:
            return argument if type(argument) is int else None
        if type(argument) not in PLAIN_TENSORS or argument.is_nested:
            return None  # what a subclass does when it is asked is the model's
        return argument.size(self.dim) if -argument.dim() <= self.dim < argument.dim() else None


class ProgramIndex:
    """Programs by the numbers that they insist on.

    Programs that insist on the same sizes, and on the same numbers among the arguments, are in one
    table, by the values of these; to find what may serve some arguments takes a look into each
    table. Programs that are left out require other values. The rest is asked whether its guards
    hold.

    Threads may read while one adds or removes: what they read is exchanged, never changed.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[FixedNumber, ...], dict[tuple[Any, ...], tuple[Program, ...]]] = {}

    def add(self, program: Program) -> None:
        """Take a program in."""
        fixed = _numbers_fixed(program)
        table = self._tables.get(tuple(fixed), {})
        values = tuple(fixed.values())
        table[values] = (program, *table.get(values, ()))
        self._tables = {**self._tables, tuple(fixed): table}

    def remove(self, program: Program) -> None:
        """Leave a program out."""
        for table in self._tables.values():
            for values, programs in list(table.items()):
                if program in programs:
                    table[values] = tuple(other for other in programs if other is not program)

    def candidates(self, arguments: tuple[Any, ...]) -> Iterator[Program]:
        """Yield the programs that may serve some arguments, the latest first in each table."""
        for fixed, table in self._tables.items():
            yield from table.get(tuple(one.read(arguments) for one in fixed), ())


def _numbers_fixed(program: Program) -> dict[FixedNumber, int]:
    """Return the numbers that a program insists on, in an order that only depends on which."""
    tape = program.recording.tape
    found: dict[FixedNumber, int] = {}
    if program.ignored:  # parts of it are not looked at
        return found
    for guard, kind in zip(tape.guards, program.analysis.kinds, strict=True):
        if kind is GuardKind.INPUT and isinstance(guard, ValueGuard) and type(guard.answer) is int:
            fixed = _fixed_number(tape.ops, tape.ops[guard.index])
            if fixed is not None:
                found[fixed] = guard.answer
    return dict(sorted(found.items(), key=lambda item: (item[0].argument, str(item[0].dim))))


def _fixed_number(ops: list[Op], op: Op) -> FixedNumber | None:
    """Say which number of the arguments an op gives, if it is one."""
    if op.kind is OpKind.INPUT:
        position = _argument_position(op)
        return None if position is None else FixedNumber(position, None)
    dim: Any = None
    if op.target is operator.getitem and type(op.args[0]) is Ref:
        op, dim = ops[op.args[0].index], op.args[1]
    asked = name_of(op.target) if op.kind is OpKind.CALL else ""
    if op.kwargs or asked not in ("shape", "size") or type(op.args[0]) is not Ref:
        return None
    if asked == "size" and len(op.args) == 2:
        dim = op.args[1]
    elif len(op.args) != 1:
        return None
    given = ops[op.args[0].index]
    position = _argument_position(given)
    if position is None or given.target.type not in PLAIN_TENSORS:
        return None
    return None if type(dim) is not int else FixedNumber(position, dim)


def _argument_position(op: Op) -> int | None:
    """Return which argument an op gives, if it is one of them and not a part of one."""
    part = op.target
    if op.kind is OpKind.INPUT and isinstance(part, Captured) and part.access is Access.ROOT:
        return int(part.key)
    return None
