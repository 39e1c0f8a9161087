"""The search: from inputs that came to a question, to one that gives it the other answer."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bendtrace._checks import required_int, required_number
from bendtrace.errors import InputError
from bendtrace.exploring.distance import Asked, Course
from bendtrace.exploring.domain import Candidate, Space
from bendtrace.exploring.plain import Formula
from bendtrace.exploring.result import Exploration, Find, Unfound
from bendtrace.exploring.subject import CandidateRun, Key, Subject
from bendtrace.recording.run import Signature
from bendtrace.replay.tree import TraceTree
from bendtrace.view.outline.coverage import Taken, sides_seen
from bendtrace.view.outline.source import Choice, choices_in, loops_around

__all__ = ["explore"]

# The module whose forward asks, and the iteration of each loop around the question.
_Turn = tuple[str, tuple[int, ...]]
_BASES = 4  # inputs kept that come to a question
_ROUNDS = 64  # steps of one descent at most; the first ones are shorter
_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25, 0.1, 0.03, 0.01, 0.001)


def explore(
    model: Callable[..., Any], tree: TraceTree, inputs: Any, domain: Mapping[str, Any],
    seconds: float | None, tries: int | None, seed: int,
) -> Exploration:  # fmt: skip
    """Find inputs that take sides never taken; see `BendedModule.explore`."""
    required_number("seconds", seconds, or_none=True, finite=True)
    required_int("tries", tries, 1, or_none=True)
    required_int("seed", seed, 0)
    if seconds is None and tries is None:
        raise InputError("a search needs an end: give seconds= or tries=")
    space = Space(domain, Signature(model), seed)
    starts = [space.candidate(*call) for call in _calls(inputs)]
    with Subject(model, space) as subject:
        return _Search(space, subject, tree, seconds, tries).result(starts)


def _calls(inputs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the calls that inputs stand for."""
    calls = [_call(given) for given in (inputs if isinstance(inputs, list) else [inputs])]
    if not calls:
        raise InputError("a search begins at inputs of the model: the list has none")
    return calls


def _call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(getattr(given, "kwargs", None), Mapping):  # a `Call`
        return tuple(given.args), dict(given.kwargs)
    if isinstance(given, Mapping):
        return (), dict(given)
    if type(given) is not tuple:
        return (given,), {}
    if len(given) == 2 and type(given[0]) is tuple and type(given[1]) is dict:
        return given[0], dict(given[1])
    return given, {}


class _OutOfBudget(Exception):
    """The search has had its time, or its runs."""


class _Search:
    def __init__(
        self, space: Space, subject: Subject, tree: TraceTree, seconds: float | None,
        tries: int | None,
    ) -> None:  # fmt: skip
        self._space, self._subject = space, subject
        self._began = time.perf_counter()
        self._seconds, self._tries, self._runs = seconds, tries, 0
        functions, taken, self._asked = sides_seen(tree)
        subject.functions.update(dict.fromkeys(functions))
        self._taken: dict[Choice, dict[_Turn, set[bool]]] = {}
        for choice, path, iteration, side in taken:
            self._taken.setdefault(choice, {}).setdefault((path, iteration), set()).add(side)
        self._finds: list[Find] = []
        self._reached: dict[Key, dict[bool, list[CandidateRun]]] = {}
        self._attempts: Counter[tuple[Key, bool]] = Counter()
        self._corpus: list[Candidate] = []
        self._unread: Counter[Choice] = Counter()  # how often a condition could not be read

    def result(self, starts: list[Candidate]) -> Exploration:
        try:
            runs = [self._run(start, is_given=True) for start in starts]
            if all(run.recording is None for run in runs):
                raise InputError(
                    f"the model raises a {runs[0].raised} with the inputs that the search is to "
                    "begin at: give some that it returns from"
                )
            self._search()
        except _OutOfBudget:
            pass
        read = {key[0] for key in self._reached if type(key[0]) is Choice}
        watched = self._asked | read
        left = [
            Unfound(
                choice.kind,
                choice.text,
                choice.file,
                choice.line,
                side,
                path,
                iteration,
                choice in watched,
            )
            for choice, path, iteration, side in sorted(self._missing(), key=_place_of)
        ]
        return Exploration(self._finds, left, self._runs, time.perf_counter() - self._began)

    def _search(self) -> None:
        chance = self._space.chance
        while missing := self._missing():
            target = self._next_target(missing)
            if target is None or chance.random() < 0.05:
                base = chance.choice(self._corpus)
                other = chance.choice(self._corpus)
                sizes = list(self._space.resized(base)) if chance.random() < 0.3 else []
                made = (
                    chance.choice(sizes) if sizes
                    else self._space.drawn(base) if chance.random() < 0.5
                    else self._space.mutated(base, other)
                )  # fmt: skip
                self._run(made)
            if target is not None:
                self._attempts[target] += 1
                self._attempt(*target)

    def _missing(self) -> set[Taken]:
        """The sides of known branches that were not taken."""
        missing: set[Taken] = set()
        for file, function in self._subject.functions:
            for choice in choices_in(file, function):
                if choice.kind in ("and", "or") and choice not in self._asked:
                    continue  # part of a condition that has sides of its own
                known = self._taken.get(choice, {("", ()): set()})
                for turn, sides in known.items():
                    for side in {True, False} - sides:
                        # Where nothing stands under a side, only a question shows that it is taken.
                        if choice in self._asked or (choice.if_true if side else choice.if_false):
                            missing.add((choice, *turn, side))
        return missing

    def _read_formulas(self, run: CandidateRun) -> None:
        """Look in the source for the conditions that no question decides."""
        for file, function in self._subject.functions:
            for choice in choices_in(file, function):
                is_part = choice.kind in ("and", "or")
                if is_part or choice in self._asked or self._unread[choice] >= _BASES:
                    continue
                for side in (True, False):
                    known = self._reached.get((choice, function), {}).get(not side, [])
                    if self._is_missing(choice, side) and len(known) < _BASES:
                        if run.asked((choice, function)) is not None:
                            answers = self._reached.setdefault((choice, function), {})
                            answers.setdefault(not side, []).append(run)
                        else:
                            self._unread[choice] += 1

    def _is_missing(self, choice: Choice, side: bool) -> bool:
        """Whether a branch that no question decides is not known to have taken a side."""
        spans = choice.if_true if side else choice.if_false
        return bool(spans) and not any(side in s for s in self._taken.get(choice, {}).values())

    def _is_met(self, key: Key, answer: bool) -> bool:
        """Whether a question has been answered in some way."""
        if type(key[0]) is Choice:
            return not self._is_missing(key[0], answer)
        return answer in self._reached[key]

    def _next_target(self, missing: set[Taken]) -> tuple[Key, bool] | None:
        """Return the question, and the answer to it, that was tried least."""
        best, least = None, float("inf")
        for key, answers in self._reached.items():
            for answer in (True, False):
                if not answers.get(not answer) or self._is_met(key, answer):
                    continue
                asked = answers[not answer][0].questions.get(key)
                is_wanted = asked is None or any(side in missing for side in asked.sides(answer))
                weight = 1.0 if is_wanted else 2.0 if len(key) < 3 or key[2] == 1 else 3.0
                rank = (1 + self._attempts[key, answer]) * weight
                if rank < least:
                    best, least = (key, answer), rank
        return best

    def _run(self, candidate: Candidate, is_given: bool = False) -> CandidateRun:
        """Run the model, and note all that is new."""
        if not is_given and (
            (self._tries is not None and self._runs >= self._tries)
            or (self._seconds is not None
                and time.perf_counter() - self._began >= self._seconds)
        ):  # fmt: skip
            raise _OutOfBudget
        run = self._subject.run(candidate)
        self._runs += 1
        self._asked.update(choice for choice, *_ in run.taken)
        is_new, given = is_given, None
        for choice, path, iteration, side in sorted(
            {*run.taken, *self._inferred(run)}, key=_place_of
        ):
            sides = self._taken.setdefault(choice, {}).setdefault((path, iteration), set())
            if side not in sides:
                sides.add(side)
                is_new = True
                if not is_given:
                    given = given or candidate.copied()
                    self._finds.append(Find(
                        choice.kind, choice.text, choice.file, choice.line, side, path, iteration,
                        True, *given, run.raised, self._runs,
                    ))  # fmt: skip
        for key, question in run.questions.items():
            answer = bool(question.guard.expected)
            known = self._reached.setdefault(key, {})
            is_new = is_new or answer not in known
            runs = known.setdefault(answer, [])
            if len(runs) < _BASES:
                runs.append(run)
        if is_new:
            self._corpus.append(candidate)
        if run.recording is not None:
            if is_given:
                self._read_sides(run)
            self._read_formulas(run)
        return run

    def _read_sides(self, run: CandidateRun) -> None:
        """Note the sides that a run takes by conditions in the source, where it did nothing else.

        A find is always shown by what the model did; but a side that the start takes is no find.
        """
        assert run.recording is not None
        tape = run.recording.tape
        for file, function in self._subject.functions:
            for choice in choices_in(file, function):
                is_read = choice.kind not in ("and", "or") and choice not in self._asked
                asked = run.asked((choice, function)) if is_read else None
                if not isinstance(asked, Formula) or not asked.is_exact or loops_around(choice):
                    continue
                courses = {side: Course(tape, [(asked, side)]) for side in (True, False)}
                sides = [
                    side
                    for side, course in courses.items()
                    if course.is_repeatable and self._distance(course, run.candidate) == 0
                ]
                if len(sides) == 1 and (choice, asked.path, not sides[0]) not in run.under:
                    turns = self._taken.setdefault(choice, {})
                    turns.setdefault((asked.path, ()), set()).update(sides)

    def _inferred(self, run: CandidateRun) -> Iterator[Taken]:
        """Yield the sides that are known from what happened under them alone."""
        for choice, path, side in sorted(run.under, key=_place_of):
            if choice not in self._asked or not loops_around(choice):
                yield choice, path, (), side
            elif run.raised:  # its questions are not known
                turns = [turn for turn in self._taken.get(choice, {}) if turn[0] == path]
                left = [turn for turn in turns if side not in self._taken[choice][turn]]
                if left and len(left) == len(turns):
                    yield choice, *left[-1], side

    # One question

    def _attempt(self, key: Key, answer: bool) -> None:
        """Try to have a question answered in a way that was never seen."""
        chance, tried = self._space.chance, self._attempts[key, answer]
        runs = self._reached[key][not answer]
        run = runs[(tried - 1) % len(runs)]
        if tried > len(runs) or (tried > 1 and chance.random() < 0.5):
            other = chance.choice(self._corpus)
            for _ in range(4):
                made = (
                    self._space.drawn(run.candidate) if chance.random() < 0.6
                    else self._space.mutated(run.candidate, other)
                )  # fmt: skip
                moved = self._run(made)
                if self._is_met(key, answer):
                    return
                if moved.asked(key) is not None:
                    run = moved
                    break
        self._descend(run, key, answer)

    def _descend(self, run: CandidateRun, key: Key, answer: bool) -> None:
        """Come nearer to an answer, step by step, and ask the model from time to time."""
        course, candidate, stuck, since = self._course(run, key, answer), run.candidate, 0, 0
        distance, slopes, tokens = self._slopes(course, candidate)
        for _ in range(min(_ROUNDS, 8 * 2 ** self._attempts[key, answer])):
            if distance == 0:  # the model itself does not agree
                return
            best, least = candidate, distance
            moves = list(self._moves(candidate, distance, slopes, tokens)) if not stuck else []
            if not moves or stuck:
                other = self._space.chance.choice(self._corpus)
                moves += [self._space.mutated(candidate, other) for _ in range(12 * (1 + stuck))]
                if course.reads_sizes:
                    moves += self._space.resized(candidate)
            for move in moves:
                now = self._distance(course, move)
                if now < least:
                    best, least = move, now
                    if now == 0:
                        break
            self._require_time()
            since += 1
            if least < distance:
                candidate, stuck = best, 0
            else:
                stuck += 1
            if least == 0 or since >= 10 or (stuck > 3 and candidate is not run.candidate):
                since = 0
                run = self._run(candidate)
                if self._is_met(key, answer) or run.asked(key) is None:
                    return
                course = self._course(run, key, answer)
            elif stuck > 3:
                return
            if not stuck:
                distance, slopes, tokens = self._slopes(course, candidate)

    def _course(self, run: CandidateRun, key: Key, answer: bool) -> Course:
        """Return the way to a question, past those that it depends on."""
        target = run.asked(key)
        assert run.recording is not None
        assert target is not None
        wanted: list[tuple[Asked, bool]] = [(target, answer)]
        for question in run.questions.values():
            if question is target or question.guard.position > max(target.roots) + 1:
                break
            if question.leads_to(target):
                wanted.append((question, bool(question.guard.expected)))
        return Course(run.recording.tape, wanted)

    def _require_time(self) -> None:
        if self._seconds is not None and time.perf_counter() - self._began >= self._seconds:
            raise _OutOfBudget

    def _distance(self, course: Course, candidate: Candidate) -> float:
        with warnings.catch_warnings(action="ignore"), torch.inference_mode(False):
            twins = {label: _numeric(value, False) for label, value in candidate.free.items()}
            try:
                made = self._space.replaced(candidate, twins)
                return float(course.distance(self._space.arguments(made)).detach())
            except Exception:  # the run could not go this way with such inputs
                return float("inf")

    def _slopes(
        self, course: Course, candidate: Candidate
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """Return the distance, its gradients, and for tokens those of each that might be there."""
        with warnings.catch_warnings(action="ignore"), torch.inference_mode(False):
            twins = {label: _numeric(value, True) for label, value in candidate.free.items()}
            try:
                made = self._space.replaced(candidate, twins)
                distance = course.distance(self._space.arguments(made))
                if distance.requires_grad:
                    distance.backward()
            except Exception:
                return float("inf"), {}, {}
        slopes = {
            label: torch.nan_to_num(twin.grad)
            for label, twin in twins.items()
            if isinstance(twin, Tensor) and twin.grad is not None
        }
        tokens = {
            label: hot.grad
            for label, (hot, _) in course.tokens.items()
            if hot.grad is not None and label in twins
        }
        return float(distance.detach()), slopes, tokens

    def _moves(
        self, base: Candidate, distance: float, slopes: dict[str, Tensor],
        tokens: dict[str, Tensor],
    ) -> Iterator[Candidate]:  # fmt: skip
        """Yield inputs that gradients point to."""
        free: dict[str, Tensor] = {}
        for label, slope in slopes.items():
            value = torch.as_tensor(base.free[label]).detach()
            low, high = self._space.domains[label].bounds(False)
            ends = ((value <= low) & (slope > 0)) | ((value >= high) & (slope < 0))
            free[label] = torch.where(ends, 0, slope)
        total = sum(float(slope.double().square().sum()) for slope in free.values())
        if total > 0 and distance < float("inf"):
            for factor in _FACTORS:  # to where a straight line would have no distance
                step = factor * distance / total
                yield self._moved(base, {label: -step * slope for label, slope in free.items()})
            for part in (0.3, 0.1, 0.03, 0.003):
                yield self._moved(base, {
                    label: -part * self._width(label) * slope.sign()
                    for label, slope in free.items()
                })  # fmt: skip
            for label, slope in free.items():
                flat = slope.flatten()
                for place in flat.abs().topk(min(4, flat.numel())).indices.tolist():
                    if flat[place]:
                        for by in (distance / float(flat[place]), float(flat[place].sign())):
                            alone = torch.zeros_like(flat)
                            alone[place] = -by
                            yield self._moved(base, {label: alone.view(slope.shape)})
        for label, slope in tokens.items():
            yield from self._exchanged(base, label, slope)

    def _width(self, label: str) -> float:
        low, high = self._space.domains[label].bounds(False)
        return high - low

    def _moved(self, base: Candidate, steps: dict[str, Tensor]) -> Candidate:
        made: dict[str, Any] = {}
        for label, step in steps.items():
            value, domain = base.free[label], self._space.domains[label]
            if isinstance(value, Tensor):
                moved = value.detach() + step.to(value.device)
                if not value.dtype.is_floating_point:
                    moved = moved.round()
                moved = domain.put(moved.to(value.dtype))
                made[label] = moved.requires_grad_(value.requires_grad)
            else:
                low, high = domain.bounds(type(value) is int)
                number = value + float(step)
                number = round(number) if type(value) is int else number
                made[label] = type(value)(min(max(number, low), high))
        return self._space.replaced(base, made)

    def _exchanged(self, base: Candidate, label: str, slope: Tensor) -> Iterator[Candidate]:
        """Yield inputs with other tokens, first each of the best alone, then several."""
        value = base.free[label]
        domain = self._space.domains[label]
        now = slope.gather(-1, value.unsqueeze(-1))
        gain = (slope - now).flatten(0, -2)
        allowed = torch.zeros(gain.shape[-1], dtype=torch.bool)
        if domain.values is not None:
            allowed[torch.tensor(domain.values)] = True
        else:
            low, high = (int(bound) for bound in domain.bounds(True))
            allowed[max(0, low) : high + 1] = True
        gain = gain.masked_fill(~allowed, float("inf"))
        best = gain.flatten().topk(min(8, gain.numel()), largest=False).indices.tolist()
        for spot in best:
            yield self._with_tokens(base, label, [divmod(spot, gain.shape[-1])])
        each, places = gain.min(-1), gain.min(-1).values.argsort().tolist()
        for count in {len(places), (len(places) + 1) // 2, 2}:
            pairs = [(place, int(each.indices[place])) for place in places[:count]]
            yield self._with_tokens(base, label, pairs)

    def _with_tokens(
        self, base: Candidate, label: str, pairs: Iterable[tuple[int, int]]
    ) -> Candidate:
        value = base.free[label].detach().clone()
        for place, token in pairs:
            value.view(-1)[place] = token
        return self._space.replaced(base, {label: value})


def _place_of(taken: tuple[Any, ...]) -> tuple[Any, ...]:
    choice, *turn, side = taken
    return choice.file, choice.span, choice.kind, *turn, not side


def _numeric(value: Any, has_slope: bool) -> Any:
    """Return numbers that can have gradients in place of what has none."""
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            return value
        twin = value.detach()
        twin = twin.clone() if twin.is_floating_point() else twin.float()
        return twin.requires_grad_(has_slope)
    if type(value) in (int, float):
        return torch.tensor(float(value), dtype=torch.float64, requires_grad=has_slope)
    return value
