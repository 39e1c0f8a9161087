"""Suffixes of recorded runs that start from given activations: computed once, and cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bendtrace._places import place_text
from bendtrace.errors import DivergenceError, InputError, NodePathError, NotReplayableError
from bendtrace.history.copies import copied
from bendtrace.interject.cut_points import (
    Spot,
    is_named,
    path_in,
    spots_of,
    values_for,
)
from bendtrace.interject.resolver import node_meant
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.paths.view import Tree, find
from bendtrace.recording.recorder import Recording
from bendtrace.replay.analysis import Analysis
from bendtrace.replay.check import CheckWriter
from bendtrace.replay.cut_points import Cut, Lack, argument_of
from bendtrace.replay.explain import explain_check
from bendtrace.replay.program import Program
from bendtrace.replay.source import Code
from bendtrace.replay.suffix import Rest, Suffix, write_rest
from bendtrace.replay.tree import TraceTree
from bendtrace.tape.captured import Access, Captured
from bendtrace.tape.tape import OpKind

__all__ = ["KnownRun", "KnownRuns", "Prepared", "Suffixes", "own"]


_MOST = 64  # things that are kept for each model


@dataclass(frozen=True)
class KnownRun:
    """A recorded run that may have the required rest.

    Attributes:
        program: the program that it belongs to.
        recording: the run.
        arguments: the arguments of the call, by position; None for missing ones.
        missing: positions of the missing ones.
    """

    program: Program
    recording: Recording
    arguments: tuple[Any, ...]
    missing: frozenset[int] = frozenset()


@dataclass
class Prepared:
    """The rest of a recorded run, ready to run.

    Attributes:
        recording: the run.
        spots: where on its tape the value of each node is given.
        cuts: the same, by op.
        rest: the required ops.
        code: the same as code; None if it cannot be run.
    """

    recording: Recording
    spots: dict[str, tuple[Spot, ...]]
    cuts: list[Cut]
    rest: Suffix
    code: Rest | None = None


class Suffixes:
    """The rests of a model's runs after the values of some nodes.

    Args:
        model: the `BendedModule`.
        given: the values, by node path.
        bended: whether the values replace those after the insertions at the nodes.
    """

    def __init__(self, model: Any, given: Mapping[str, Any], bended: bool) -> None:
        self._model = model
        self._given = given
        self._bended = bended

    def tree_of(self, recording: Recording) -> Tree:
        """Return the tree of a run."""
        tree: Tree = self._model._known.run(recording).tree
        return tree

    def of(
        self,
        run: KnownRun,
        start: int = 0,
        available: frozenset[int] = frozenset(),
        passed: frozenset[Any] = frozenset(),
    ) -> Prepared:
        """Return the rest of a run.

        Args:
            run: the run.
            start: the first op that has not been run yet.
            available: the ops before it that were run.
            passed: the tests that were made before.

        Raises:
            NodePathError: the run has not reached a node.
            InputError: the value of a node cannot be given.
        """
        key = (
            "rest", id(run.recording), run.missing, tuple(self._given), self._bended, start,
            available, passed,
        )  # fmt: skip
        prepared: Prepared = kept(
            self._model, key, lambda: self._prepared(run, start, available, passed)
        )
        return prepared

    def _prepared(
        self, run: KnownRun, start: int, available: frozenset[int], passed: frozenset[Any]
    ) -> Prepared:
        program, recording = run.program, run.recording
        tree = self.tree_of(recording)
        for text in self._given:
            self._require_same(tree, text)
        spots = {text: spots_of(recording, tree, text, bended=self._bended) for text in self._given}
        cuts = [
            Cut(spot.index, spot.start, self._slot(text, spot), spot.call)
            for text, listed in spots.items()
            for spot in listed
        ]
        is_first = recording is program.recording
        analysis = program.analysis if is_first else Analysis(recording.tape)
        rest = Suffix(
            recording, analysis, cuts, run.missing, is_checked=is_first and not run.missing,
            start=start, available=available, passed=passed,
        )  # fmt: skip
        prepared = Prepared(recording, spots, cuts, rest)
        if not (rest.unclear or rest.lacks or rest.is_too_late()):
            prepared.code = write_rest(rest, analysis, program.global_state.context)
        return prepared

    def _require_same(self, tree: Tree, text: str) -> None:
        """Raise for a path that is an alias here but the path of another node elsewhere."""
        found, _ = find(tree.data, path_in(tree, text))
        if is_named(found, text):
            return
        meant = node_meant(self._model, text)
        if meant is not None and is_named(meant._data, text):
            raise NodePathError(
                f"no node {text!r} in this run: {found.path!r} is a different node",
                text,
                (found.path,),
            )

    def _slot(self, text: str, spot: Spot) -> int:
        """Return the number of a given value: the same for all runs of the model."""
        numbers: dict[Any, int] = kept(self._model, "slots", dict)
        return numbers.setdefault((text, spot.keys), len(numbers))

    def values_for(self, prepared: Prepared) -> dict[str, Any]:
        """Return the given values in the form that the code of a rest takes.

        Raises:
            InputError: the structure of one differs from that of its node's value.
        """
        values: dict[str, Any] = {}
        rest = prepared.rest
        for text, spots in prepared.spots.items():
            dug = values_for(text, self._given[text], spots)
            for spot, value in zip(spots, dug, strict=True):
                slot = self._slot(text, spot)
                # The other path may treat it in any way.
                is_written = slot in rest.written or not rest.is_straight
                values.setdefault(f"s{slot}", own(value) if is_written else value)
        return values

    def explained(self, prepared: Prepared, lack: Lack) -> str:
        """Return what is missing, and what needs it."""
        recording = prepared.recording
        ops, tree = recording.tape.ops, self.tree_of(recording)
        name = _argument(lack.part).label
        shown = name if lack.part.label == name else f"{name} ({lack.part.label})"
        user, source = None, None
        for index in lack.chain:
            if ops[index].kind in (OpKind.INPUT, OpKind.STATE):
                continue
            if prepared.rest.is_after_cuts(index):
                user = index
                break
            source = index
        said = [_told(tree, recording, index) for index in (user, source) if index is not None]
        if not said:
            need = "the output of the model, or a condition, depends on it"
        elif user is None:
            need = f"the rest uses {said[0]}, which is computed from it"
        elif source is None:
            need = f"{said[0]} uses it"
        else:
            need = f"{said[0]} uses {said[1]}, which is computed from it"
        return f"the argument {shown} is needed as well: {need}. Pass it, or an activation between"


def own(value: Any) -> Any:
    """Return a copy of a value that the model may write to."""
    shape, found = take_apart(value)
    return assemble(shape, [copied(v) if isinstance(v, Tensor) else v for v in found])


def _argument(part: Captured) -> Captured:
    while part.parent is not None:
        part = part.parent
    return part


def _told(tree: Tree, recording: Recording, index: int) -> str:
    """Return the path and the place of an op."""
    path, site = tree.path_of(index), recording.tape.ops[index].site
    where = ""
    if site is not None:
        place = site.place
        where = f"{place_text(place.file, place.line)} `{place.text}`"
    if path:
        return f"{path!r} ({where})" if where else repr(path)
    return where or "an operation"


_KEPT: MutableMapping[Any, OrderedDict[Any, Any]] = WeakIdKeyDictionary()


def kept(model: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Return a cached result for a key, or compute it and cache it for the life of the model.

    A cached result has to keep alive the objects that its key identifies by id.
    """
    found = _KEPT.setdefault(model, OrderedDict())
    if key not in found:
        found[key] = make()
        while len(found) > _MOST:
            found.popitem(last=False)
    found.move_to_end(key)
    return found[key]


class KnownRuns:
    """The recorded runs that fit the arguments of a call, the latest first.

    Args:
        model: the `BendedModule`.
        tree: its paths, with the current insertions.
        bound: the arguments by name, as far as they were passed.
        form: how they were passed, where the model may see that.

    Attributes:
        is_whole: whether the model can be called with these arguments.

    Raises:
        InputError: no runs are known, and no arguments are given.
    """

    def __init__(
        self, model: Any, tree: TraceTree, bound: Mapping[str, Any], form: tuple[str, ...]
    ) -> None:
        self._model = model
        self._bound = bound
        names = tuple(bound)
        programs = sorted(tree.programs(), key=lambda program: program.serial, reverse=True)
        self._same = list(tree.programs((*names, *form)))
        self._wider = [p for p in programs if set(names) < set(_names_of(p))]
        self.is_whole: bool = bool(self._same) or (bool(names) and not self._wider)
        if not (self.is_whole or self._wider):
            raise InputError(
                "nothing has been traced yet"
                + (" with the current insertions" if model._board else "")
                + ": call the module, or its trace(), first"
            )

    def __iter__(self) -> Iterator[KnownRun]:
        """Yield the runs.

        Raises:
            DivergenceError: arguments are missing, and no run fits.
        """
        return iter(self._admitting() if self.is_whole else self._fitting())

    def _admitting(self) -> list[KnownRun]:
        arguments = tuple(self._bound.values())
        return [
            KnownRun(program, recording, arguments)
            for program in self._same
            if not program.live_only and program.admits(arguments)
            for recording in self._latest_first(program)
        ]

    def _fitting(self) -> list[KnownRun]:
        """Return the runs that fit, judging by the available arguments."""
        found: list[KnownRun] = []
        reasons: list[str] = []
        for program in self._wider:
            names = _names_of(program)
            missing = frozenset(i for i, name in enumerate(names) if name not in self._bound)
            arguments = tuple(self._bound.get(name) for name in names)
            reason = self._misfit(program, arguments, missing)
            if reason is None:
                found += [
                    KnownRun(program, recording, arguments, missing)
                    for recording in self._latest_first(program)
                ]
            else:  # those that differ in the last question are nearest
                is_near = program.global_state.difference() is None
                reasons.insert(0 if is_near else len(reasons), reason)
        if not found:
            raise DivergenceError(
                f"no recorded run fits: {reasons[0]}; call the module as it is now, or pass "
                "all its arguments"
            )
        return sorted(found, key=lambda run: run.recording is not self._latest)

    def _latest_first(self, program: Program) -> list[Recording]:
        found = [r for r in reversed(program.recordings()) if not r.tape.blockers]
        return sorted(found, key=lambda recording: recording is not self._latest)

    @property
    def _latest(self) -> Recording | None:
        """The run of the latest call, if known."""
        dispatcher = self._model._dispatcher
        latest: Recording | None = dispatcher.latest_run
        trace = dispatcher.latest
        return latest if latest is not None or trace is None else trace._recording

    def _misfit(
        self, program: Program, arguments: tuple[Any, ...], missing: frozenset[int]
    ) -> str | None:
        """Return why a recorded run would not be repeated now; None if it may."""
        if program.live_only:
            return str(NotReplayableError(program.recording.tape.blockers))
        different = program.global_state.difference()
        if different is not None:
            return different

        def written() -> tuple[Program, Code, list[Any]]:
            parts = program.recording.environment.parts
            ignored = frozenset(part for part in parts if argument_of(part) in missing)
            writer = CheckWriter(program.recording, program.analysis, ignored)
            return program, Code(writer.write(), "check"), writer.checks

        _, code, checks = kept(self._model, ("check", id(program), missing), written)
        try:
            number = code.function(arguments)
        except NameError:  # an error of the check itself
            raise
        except Exception as error:  # as in `Program.failing`
            return f"{type(error).__name__}: {error}"
        if number is None:
            return None
        return explain_check(checks[number], program, arguments)().reason


def _names_of(program: Program) -> tuple[str, ...]:
    """Return the names of the arguments that a program was recorded with."""
    parts = program.recording.environment.parts
    return tuple(p.label for p in parts if p.is_argument and p.access is Access.ROOT)
