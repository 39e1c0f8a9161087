"""The search: from inputs that came to a question, to one that gives it the other answer."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.debug.calls import Call, own_copy
from bendtrace.debug.distance import (
    Course,
    Formula,
    Margin,
    Recorded,
    Truth,
    formula_of,
    latest_ops,
)
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.engine.tree import TraceTree
from bendtrace.errors import InputError
from bendtrace.log.entries import Listing, counted
from bendtrace.python.checks import required_int, required_number
from bendtrace.python.lazy import tabulate
from bendtrace.python.sites import PACKAGE, TORCH, InstructionPlace, Site, place_at, place_text
from bendtrace.record.finish import Recording
from bendtrace.record.iterations import running_code, user_code
from bendtrace.record.recorded_call import Signature, record
from bendtrace.show.outline import Answers, is_standard, observed_sides
from bendtrace.show.walks import (
    Choice,
    PathEvents,
    choices_in,
    choices_of,
    function_of,
    loops_around,
)
from bendtrace.tape.guards import TruthGuard
from bendtrace.tape.tape import ModuleCall, Use, argument_leaves
from bendtrace.watch.collectives import alone

if TYPE_CHECKING:
    from bendtrace.module import BendedModule

# The domain of a search: which inputs may differ, and in which values and sizes.


class Domain:
    """The values that one input of a model may have.

    Args:
        low: the least number, of a tensor's elements or of a number.
        high: the greatest number; it is included.
        values: what may be there, in place of a range: elements of a tensor, or for all else the
            values themselves.
        sizes: for each dimension of a tensor whose size may differ, the least and the greatest
            size, `{1: (1, 16)}`; with a name before them, `{1: ("length", 1, 16)}`, dimensions of
            several tensors keep the same size.

    Raises:
        InputError: an argument makes no sense.

    Example:
        >>> import bendtrace as bt
        >>> bt.Domain(0, 999, sizes={1: (1, 16)})
        Domain(0, 999, sizes={1: (1, 16)})
    """

    high: float | None
    low: float | None

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        values: Sequence[Any] | None = None,
        sizes: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> None:
        if (low is None) is not (high is None) or (low is not None and values is not None):
            raise InputError("a domain has low and high, or values, or sizes alone")
        for number in (low, high):
            if number is not None and (not _is_int_or_float(number) or not math.isfinite(number)):
                raise InputError(f"low and high of a domain are finite numbers, not {number!r}")
        if low is not None and high is not None and low > high:
            raise InputError(f"a domain from {low} to {high} has nothing in it")
        if values is not None and (isinstance(values, str) or not list(values)):
            raise InputError(f"values= is a list of what may be there, not {values!r}")
        self.low, self.high = low, high
        self.values: list[Any] | None = None if values is None else list(values)
        self.sizes: dict[int, tuple[Any, ...]] = dict(sizes or {})
        for dim, bounds in self.sizes.items():
            numbers = bounds[-2:] if isinstance(bounds, tuple) else ()
            named = isinstance(bounds, tuple) and len(bounds) == 3 and isinstance(bounds[0], str)
            if (
                type(dim) is not int or len(numbers) != 2 or not (named or len(bounds) == 2)
                or any(type(n) is not int for n in numbers) or not 0 <= numbers[0] <= numbers[1]
            ):  # fmt: skip
                raise InputError(
                    "sizes= has for a dimension the least and the greatest size, as in "
                    f'{{1: (1, 16)}} or {{1: ("length", 1, 16)}}, not {{{dim!r}: {bounds!r}}}'
                )
        if low is None and values is None and not self.sizes:
            raise InputError("a domain needs low and high, values or sizes: this one has none")

    @classmethod
    def of(cls, given: Any) -> Domain:
        """Return a domain, which may be given as a pair of the least and greatest number."""
        if isinstance(given, cls):
            return given
        if isinstance(given, tuple) and len(given) == 2:
            return cls(*given)
        raise InputError(f"a domain is a Domain or a pair (low, high), not {given!r}")

    @property
    def has_numbers(self) -> bool:
        """True if it says more than sizes."""
        return self.low is not None or self.values is not None

    def require(self, label: str, value: Any) -> None:
        """Check that a given input lies in it.

        Raises:
            InputError: it does not, or it is nothing that has such a domain.
        """
        if not isinstance(value, Tensor):
            if self.sizes:
                raise InputError(f"{label} has no sizes: it is {value!r}")
            if self.low is not None and (type(value) is bool or not _is_int_or_float(value)):
                raise InputError(
                    f"{label} is not a number, so its domain has to be values=[...]: it is "
                    f"{value!r}"
                )
            inside = value in self.values if self.values is not None else self.holds(value)
            if not inside:
                raise InputError(f"{label} is {value!r}, which is outside of {self!r}")
            return
        if value.is_complex() or value.layout is not torch.strided:
            raise InputError(f"{label} has no domain: it is not a dense tensor of real numbers")
        for dim, bounds in self.sizes.items():
            if not -value.dim() <= dim < value.dim():
                raise InputError(f"{label} has {value.dim()} dimensions, and none is {dim}")
            if not bounds[-2] <= value.shape[dim] <= bounds[-1]:
                raise InputError(
                    f"dimension {dim} of {label} has size {value.shape[dim]}, outside of {self!r}"
                )
        if self.values is not None and not all(map(_is_int_or_float, self.values)):
            raise InputError(f"values= of a tensor, {label}, are numbers, not {self.values!r}")
        if self.low is not None and value.numel() and value.dtype is not torch.bool:
            least, most = value.min().item(), value.max().item()
            if not (self.holds(least) and self.holds(most)):
                raise InputError(f"{label} has elements from {least} to {most}, outside of {self}")
        if self.values is not None and value.dtype is not torch.bool:
            allowed = torch.tensor(self.values, device=value.device).to(value.dtype)
            if not torch.isin(value.detach(), allowed).all():
                raise InputError(f"{label} has elements outside of {self!r}")

    def holds(self, number: float) -> bool:
        """Return whether a number lies between low and high."""
        low, high = self.bounds(False)
        # Bounds are compared as the tensor stores them: 0.1 is not a float32.
        slack = 1e-6 * max(abs(low), abs(high)) if type(number) is float else 0
        return low - slack <= number <= high + slack

    def bounds(self, is_whole: bool) -> tuple[float, float]:
        """Return the least and the greatest number."""
        low, high = (min(self.values), max(self.values)) if self.values else (self.low, self.high)
        assert low is not None
        assert high is not None
        return (math.ceil(low), math.floor(high)) if is_whole else (low, high)

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
        """Return random elements."""
        if like.dtype is torch.bool:
            drawn = torch.randint(0, 2, shape, generator=generator)
        elif self.values is not None:
            picked = torch.randint(0, len(self.values), shape, generator=generator)
            drawn = torch.tensor(self.values)[picked]
        elif like.dtype.is_floating_point:
            low, high = self.bounds(False)
            drawn = low + (high - low) * torch.rand(shape, generator=generator)
        else:
            low, high = self.bounds(True)
            drawn = torch.randint(int(low), int(high) + 1, shape, generator=generator)
        return drawn.to(like.device, like.dtype)

    def put(self, value: Tensor) -> Tensor:
        """Return a tensor with the elements moved into the domain."""
        if value.dtype is torch.bool or not self.has_numbers:
            return value
        if self.values is None:
            return value.clamp(*self.bounds(not value.dtype.is_floating_point))
        allowed = torch.tensor(self.values, device=value.device).to(value.dtype)
        return allowed[(value.unsqueeze(-1) - allowed).abs().argmin(-1)]

    def __repr__(self) -> str:
        arguments = [] if self.low is None else [repr(self.low), repr(self.high)]
        arguments += [] if self.values is None else [f"values={self.values!r}"]
        arguments += [f"sizes={self.sizes!r}"] if self.sizes else []
        return f"Domain({', '.join(arguments)})"


def _is_int_or_float(value: Any) -> bool:
    return isinstance(value, (int, float))


class TrialInput(NamedTuple):
    """One input: arguments, and by its label each part of them that has a domain."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    free: dict[str, Any]

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of its arguments, which a model may write to."""
        args, kwargs = own_copy(Call(self.args, self.kwargs))
        return args, kwargs


class Space:
    """All inputs that a search may try."""

    def __init__(self, domains: Mapping[str, Any], signature: Signature, seed: int) -> None:
        if not isinstance(domains, Mapping) or not domains:
            raise InputError(
                'a domain says which inputs may differ, as in {"x": (-1.0, 1.0)}, not '
                f"{domains!r}"
            )
        self.domains: dict[str, Domain] = {
            label: Domain.of(domain) for label, domain in domains.items()
        }
        self._signature = signature
        self.chance: random.Random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.numbers: dict[float, None] = {0: None, 1: None}  # constants of the model's code

    def candidate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrialInput:
        """Return an input that is given."""
        parts = dict(self._parts(args, kwargs))
        for label, domain in self.domains.items():
            if label not in parts:
                raise InputError(
                    f"the inputs have no part {label!r} to have a domain; there are: "
                    + ", ".join(parts)
                )
            domain.require(label, parts[label])
        sizes: dict[Any, int] = {}
        for key, _, _, places in self._sizes(parts):
            for label, dim in places:
                size = parts[label].shape[dim]
                if sizes.setdefault(key, size) != size:
                    raise InputError(f"size {key!r} is {sizes[key]}, and {size} in {label}")
        made = TrialInput(args, kwargs, {label: parts[label] for label in self.domains})
        return TrialInput(*made.copied(), {}) if not made.free else self.replaced(made, {})

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in self._signature.bind(args, kwargs).items():
            yield from _label_items(name, value)

    def replaced(self, base: TrialInput, values: Mapping[str, Any]) -> TrialInput:
        """Return a candidate with other values in some places."""
        names = self._signature.names(base.args, base.kwargs)
        free = {**base.free, **values}
        given = (*base.args, *base.kwargs.values())
        made = [_with(name, value, free) for name, value in zip(names, given, strict=True)]
        count = len(base.args)
        return TrialInput(tuple(made[:count]), dict(zip(base.kwargs, made[count:], strict=True)),
                         free)  # fmt: skip

    def arguments(self, candidate: TrialInput) -> tuple[Any, ...]:
        """Return the arguments as a run binds them."""
        return self._signature.arrange(candidate.args, candidate.kwargs)[1]

    # Other inputs

    def tensors(self, candidate: TrialInput) -> Iterator[tuple[str, Domain, Tensor]]:
        """Yield the tensors whose elements may differ."""
        for label, value in candidate.free.items():
            if isinstance(value, Tensor) and self.domains[label].has_numbers and value.numel():
                yield label, self.domains[label], value

    def drawn(self, base: TrialInput) -> TrialInput:
        """Return random values, of the sizes that the base has."""
        made: dict[str, Any] = {}
        for label, domain, value in self.tensors(base):
            made[label] = _detached_like(
                value, domain.draw(tuple(value.shape), value, self._generator)
            )
            if self.chance.random() < 0.3 and value.dtype.is_floating_point:
                scale = 10 ** -self.chance.uniform(0, 3)
                noise = made[label].detach() * scale
                made[label] = _detached_like(value, domain.put(value.detach() + noise))
        made.update((label, self._other(label, value)) for label, value in self._plain(base))
        return self.replaced(base, made)

    def mutated(self, base: TrialInput, other: TrialInput) -> TrialInput:
        """Return the base with a few elements changed, or crossed with another one."""
        made: dict[str, Any] = {}
        tensors, plain = list(self.tensors(base)), list(self._plain(base))
        if plain and (not tensors or self.chance.random() < 0.3):
            label, value = self.chance.choice(plain)
            made[label] = self._other(label, value)
        elif tensors:
            label, domain, value = self.chance.choice(tensors)
            flat, count = value.detach().clone().flatten(), self.chance.choice((1, 1, 1, 2, 3, 8))
            places = [self.chance.randrange(len(flat)) for _ in range(count)]
            twin = other.free.get(label)
            way = self.chance.random()
            if way < 0.2 and isinstance(twin, Tensor) and twin.shape == value.shape:
                begin, end = sorted((places[0], self.chance.randrange(len(flat) + 1)))
                flat[begin:end] = twin.detach().flatten()[begin:end]
            elif way < 0.3:
                flat[places] = flat[self.chance.randrange(len(flat))].clone()
            elif value.dtype is torch.bool:
                flat[places] = ~flat[places]
            elif way < 0.65:
                number = self.chance.choice(list(self.numbers)) + self.chance.choice((0, 0, 1, -1))
                flat[places] = torch.as_tensor(number).to(flat.dtype)
            else:
                flat[places] = domain.draw((len(places),), value, self._generator)
            made[label] = _detached_like(value, domain.put(flat.view(value.shape)))
        return self.replaced(base, made)

    def _plain(self, base: TrialInput) -> Iterator[tuple[str, Any]]:
        for label, value in base.free.items():
            if not isinstance(value, Tensor):
                yield label, value

    def _other(self, label: str, value: Any) -> Any:
        """Return another value for an input that is not a tensor."""
        domain = self.domains[label]
        if domain.values is not None:
            return self.chance.choice(domain.values)
        low, high = domain.bounds(type(value) is int)
        candidates = [n for n in self.numbers if low <= n <= high and type(n) is type(value)]
        if candidates and self.chance.random() < 0.5:
            near = self.chance.choice(candidates) + self.chance.choice((0, 1, -1))
            return type(value)(min(max(near, low), high))
        if type(value) is int:
            return self.chance.randint(int(low), int(high))
        return self.chance.uniform(low, high)

    def _sizes(
        self, values: Mapping[str, Any]
    ) -> Iterator[tuple[Any, int, int, list[tuple[str, int]]]]:
        """Yield each size that may differ: its key, its bounds, and the dimensions that have it."""
        found: dict[Any, tuple[int, int, list[tuple[str, int]]]] = {}
        for label, domain in self.domains.items():
            for dim, bounds in domain.sizes.items():
                key = bounds[0] if len(bounds) == 3 else f"{label}.shape[{dim}]"
                low, high, places = found.setdefault(key, (*bounds[-2:], []))
                if (low, high) != tuple(bounds[-2:]):
                    raise InputError(f"size {key!r} is from {low} to {high}, and {bounds[-2:]}")
                places.append((label, dim % values[label].dim()))
        for key, (low, high, places) in found.items():
            yield key, low, high, places

    def resized(self, base: TrialInput) -> Iterator[TrialInput]:
        """Yield the base with each of some other sizes, nearest first."""
        for _, low, high, places in self._sizes(base.free):
            now = base.free[places[0][0]].shape[places[0][1]]
            named = [int(n) + step for n in self.numbers if abs(n) < 1e9 for step in (-1, 0, 1)]
            sizes = [*range(now - 3, now + 4), 2 * now, now // 2, *named, low, high]
            sizes.append(self.chance.randint(low, high))
            for size in dict.fromkeys(sorted(sizes, key=lambda size: abs(size - now))):
                if low <= size <= high and size != now:
                    made = dict(base.free)
                    for label, dim in places:
                        made[label] = self._with_size(label, made[label], dim, size)
                    yield self.replaced(base, made)

    def _with_size(self, label: str, value: Tensor, dim: int, size: int) -> Tensor:
        plain, domain = value.detach(), self.domains[label]
        if size > plain.shape[dim]:
            shape = (*plain.shape[:dim], size - plain.shape[dim], *plain.shape[dim + 1 :])
            if domain.has_numbers or not plain.shape[dim]:
                more = (
                    domain.draw(shape, plain, self._generator) if domain.has_numbers
                    else plain.new_zeros(shape)
                )  # fmt: skip
            else:
                more = plain.narrow(dim, plain.shape[dim] - 1, 1).expand(shape)
            plain = torch.cat([plain, more], dim)
        return _detached_like(value, plain.narrow(dim, 0, size).clone())


def _label_items(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (tuple, list, dict):
        for key, item in value.items() if type(value) is dict else enumerate(value):
            yield from _label_items(f"{label}[{key!r}]", item)
    else:
        yield label, value


def _with(label: str, value: Any, values: Mapping[str, Any]) -> Any:
    if type(value) is dict:
        return {key: _with(f"{label}[{key!r}]", item, values) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with(f"{label}[{i}]", item, values) for i, item in enumerate(value))
    return values.get(label, value)


def _detached_like(old: Tensor, new: Tensor) -> Tensor:
    return new.detach().to(old.dtype).requires_grad_(old.requires_grad)


# The module whose forward asks, and the iteration of each loop around the question.
_Turn = tuple[str, tuple[int, ...]]
_BASES = 4  # inputs kept that come to a question
_ROUNDS = 64  # steps of one descent at most; the first ones are shorter
_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25, 0.1, 0.03, 0.01, 0.001)


def explore(
    bended: BendedModule[Any], /, inputs: Any, domain: Mapping[str, Any], *,
    seconds: float | None = 10.0, tries: int | None = None, seed: int = 0,
) -> Exploration:  # fmt: skip
    """Search for inputs that take the sides of branches that no call has taken.

    The search starts from inputs that reach a question, and changes them: along gradients of
    the tested value if it has any, otherwise by changing elements, tokens, numbers and sizes.
    A find is an input with which the model itself has taken the side. The state of the model is
    restored after each run. Inputs that the search does not find may still exist.

    Args:
        bended: the model.
        inputs: where the search begins: a tuple of positional arguments, a dict of keyword
            arguments, a pair (args, kwargs), or a list of several such inputs.
        domain: which inputs may differ, by the name of the argument or of a part of one
            (`"batch['ids']"`): each has a `Domain`, or a pair of the least and the greatest
            number. All other inputs stay as they are.
        seconds: how long to search at most; None for no limit.
        tries: how often to run the model at most; None for no limit. A search with the same
            seed and tries, and without a limit in seconds, finds the same inputs again.
        seed: the seed of the random choices.

    Returns:
        An `Exploration`: a list of finds that prints as a table. The model can be called with
        its `inputs`.

    Raises:
        InputError: the domain or another argument makes no sense; something is inserted; the
            model holds objects that cannot be restored, or raises with each of the inputs.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x * 2 if x.sum() > 25 else x)
        >>> found = bended.explore(torch.zeros(3), {"x": (0.0, 10.0)})
        >>> [(find.text, find.side) for find in found]
        [('x.sum() > 25', True)]
        >>> for args, kwargs in found.inputs:
        ...     print(bool(args[0].sum() > 25))
        True
    """
    if bended._inserted:
        raise InputError("a search runs the model itself: take away what is inserted first")
    required_number("seconds", seconds, or_none=True, finite=True)
    required_int("tries", tries, 1, or_none=True)
    required_int("seed", seed, 0)
    if seconds is None and tries is None:
        raise InputError("a search needs an end: give seconds= or tries=")
    calls = [Call.of(one) for one in (inputs if isinstance(inputs, list) else [inputs])]
    if not calls:
        raise InputError("a search begins at inputs of the model: the list has none")
    model = bended.model
    space = Space(domain, Signature(model), seed)
    starts = [space.candidate(*call) for call in calls]
    with alone("a search for inputs"), PreservedState(model) as before:
        search = _InputSearch(
            space, Subject(model, space, before), bended._trees.plain, seconds, tries
        )
        return search.result(starts)


class _OutOfBudget(Exception):
    """The search has had its time, or its runs."""


class _InputSearch:
    def __init__(
        self, space: Space, subject: Subject, tree: TraceTree, seconds: float | None,
        tries: int | None,
    ) -> None:  # fmt: skip
        self._space, self._subject = space, subject
        self._began = time.perf_counter()
        self._seconds, self._tries, self._runs = seconds, tries, 0
        functions, taken, self._asked = observed_sides(tree)
        subject.functions.update(dict.fromkeys(functions))
        self._taken: dict[Choice, dict[_Turn, set[bool]]] = {}
        for choice, path, iteration, side in taken:
            self._taken.setdefault(choice, {}).setdefault((path, iteration), set()).add(side)
        self._finds: list[Find] = []
        self._reached: dict[Key, dict[bool, list[CandidateRun]]] = {}
        self._attempts: Counter[tuple[Key, bool]] = Counter()
        self._corpus: list[TrialInput] = []
        self._unread: Counter[Choice] = Counter()  # how often a condition could not be read

    def result(self, starts: list[TrialInput]) -> Exploration:
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
            Unfound(*_side_of(answers), answers[0] in watched)
            for answers in sorted(self._missing(), key=_place_of)
        ]
        return Exploration(self._finds, left, self._runs, time.perf_counter() - self._began)

    def _search(self) -> None:
        chance = self._space.chance
        while missing := self._missing():
            # The question, and the answer to it, that was tried least.
            best, least = None, float("inf")
            for key, answers in self._reached.items():
                for answer in (True, False):
                    if not answers.get(not answer) or self._is_answered(key, answer):
                        continue
                    asked = answers[not answer][0].questions.get(key)
                    is_wanted = asked is None or any(
                        side in missing for side in asked.sides(answer)
                    )
                    weight = 1.0 if is_wanted else 2.0 if len(key) < 3 or key[2] == 1 else 3.0
                    rank = (1 + self._attempts[key, answer]) * weight
                    if rank < least:
                        best, least = (key, answer), rank
            if best is None or chance.random() < 0.05:
                base = chance.choice(self._corpus)
                other = chance.choice(self._corpus)
                sizes = list(self._space.resized(base)) if chance.random() < 0.3 else []
                made = (
                    chance.choice(sizes) if sizes
                    else self._space.drawn(base) if chance.random() < 0.5
                    else self._space.mutated(base, other)
                )  # fmt: skip
                self._run(made)
            if best is not None:
                self._attempts[best] += 1
                self._attempt(*best)

    def _missing(self) -> set[Answers]:
        """The sides of known branches that were not taken."""
        missing: set[Answers] = set()
        for file, function in self._subject.functions:
            for choice in choices_in(file, function):
                if choice.kind in ("and", "or") and choice not in self._asked:
                    continue  # part of a condition that has its own sides
                sides_of_turn = self._taken.get(choice, {("", ()): set()})
                for turn, sides in sides_of_turn.items():
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
                    attempts = self._reached.get((choice, function), {}).get(not side, [])
                    if self._is_missing(choice, side) and len(attempts) < _BASES:
                        if run.question_of((choice, function)) is not None:
                            answers = self._reached.setdefault((choice, function), {})
                            answers.setdefault(not side, []).append(run)
                        else:
                            self._unread[choice] += 1

    def _is_missing(self, choice: Choice, side: bool) -> bool:
        """Return whether a branch that no question decides is not known to have taken a side."""
        spans = choice.if_true if side else choice.if_false
        return bool(spans) and not any(side in s for s in self._taken.get(choice, {}).values())

    def _is_answered(self, key: Key, answer: bool) -> bool:
        """Return whether a question has been answered in some way."""
        if type(key[0]) is Choice:
            return not self._is_missing(key[0], answer)
        return answer in self._reached[key]

    def _run(self, candidate: TrialInput, is_given: bool = False) -> CandidateRun:
        """Run the model, and note everything new."""
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
        for answers in sorted({*run.taken, *self._inferred(run)}, key=_place_of):
            choice, path, iteration, side = answers
            sides = self._taken.setdefault(choice, {}).setdefault((path, iteration), set())
            if side not in sides:
                sides.add(side)
                is_new = True
                if not is_given:
                    given = given or candidate.copied()
                    find = Find(*_side_of(answers), True, *given, run.raised, self._runs)
                    self._finds.append(find)
        for key, question in run.questions.items():
            answer = question.guard.answer
            runs_of = self._reached.setdefault(key, {})
            is_new = is_new or answer not in runs_of
            runs = runs_of.setdefault(answer, [])
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

        A run of the model shows each find; but a side that the start takes is not a find.
        """
        assert run.recording is not None
        tape = run.recording.tape
        for file, function in self._subject.functions:
            for choice in choices_in(file, function):
                is_read = choice.kind not in ("and", "or") and choice not in self._asked
                asked = run.question_of((choice, function)) if is_read else None
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

    def _inferred(self, run: CandidateRun) -> Iterator[Answers]:
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
                if self._is_answered(key, answer):
                    return
                if moved.question_of(key) is not None:
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
            if self._seconds is not None and time.perf_counter() - self._began >= self._seconds:
                raise _OutOfBudget
            since += 1
            if least < distance:
                candidate, stuck = best, 0
            else:
                stuck += 1
            if least == 0 or since >= 10 or (stuck > 3 and candidate is not run.candidate):
                since = 0
                run = self._run(candidate)
                if self._is_answered(key, answer) or run.question_of(key) is None:
                    return
                course = self._course(run, key, answer)
            elif stuck > 3:
                return
            if not stuck:
                distance, slopes, tokens = self._slopes(course, candidate)

    def _course(self, run: CandidateRun, key: Key, answer: bool) -> Course:
        """Return the way to a question, past those that it depends on."""
        target = run.question_of(key)
        assert run.recording is not None
        assert target is not None
        wanted: list[tuple[Truth, bool]] = [(target, answer)]
        for question in run.questions.values():
            if question is target or question.guard.position > max(target.roots) + 1:
                break
            if question.leads_to(target):
                wanted.append((question, question.guard.answer))
        return Course(run.recording.tape, wanted)

    def _distance(self, course: Course, candidate: TrialInput) -> float:
        return self._slopes(course, candidate, False)[0]

    def _slopes(
        self, course: Course, candidate: TrialInput, has_slopes: bool = True
    ) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        """Return the distance, its gradients, and for tokens those of each that might be there."""
        with warnings.catch_warnings(action="ignore"), torch.inference_mode(False):
            free = candidate.free.items()
            twins = {label: _numeric(value, has_slopes) for label, value in free}
            try:
                made = self._space.replaced(candidate, twins)
                distance = course.distance(self._space.arguments(made))
                if has_slopes and distance.requires_grad:
                    distance.backward()
            except Exception:  # the run could not go this way with such inputs
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
        self, base: TrialInput, distance: float, slopes: dict[str, Tensor],
        tokens: dict[str, Tensor],
    ) -> Iterator[TrialInput]:  # fmt: skip
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
            signs = {}
            for label, slope in free.items():
                low, high = self._space.domains[label].bounds(False)
                signs[label] = slope.sign(), high - low
            for part in (0.3, 0.1, 0.03, 0.003):
                yield self._moved(base, {k: -part * wide * s for k, (s, wide) in signs.items()})
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

    def _moved(self, base: TrialInput, steps: dict[str, Tensor]) -> TrialInput:
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

    def _exchanged(self, base: TrialInput, label: str, slope: Tensor) -> Iterator[TrialInput]:
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
        exchanges = [[divmod(spot, gain.shape[-1])] for spot in best]
        each, places = gain.min(-1), gain.min(-1).values.argsort().tolist()
        for count in {len(places), (len(places) + 1) // 2, 2}:
            exchanges.append([(place, int(each.indices[place])) for place in places[:count]])
        for pairs in exchanges:
            made = value.detach().clone()
            for place, token in pairs:
                made.view(-1)[place] = token
            yield self._space.replaced(base, {label: made})


def _place_of(taken: tuple[Any, ...]) -> tuple[Any, ...]:
    choice, *turn, side = taken
    return choice.file, choice.span, choice.kind, *turn, not side


def _side_of(taken: Answers) -> tuple[str, str, str, int, bool, str, tuple[int, ...]]:
    """Return the fields of `Unfound` that tell a side."""
    choice, path, iteration, side = taken
    return choice.kind, choice.text, choice.file, choice.line, side, path, iteration


def _numeric(value: Any, has_slope: bool) -> Any:
    """Return numbers that can have gradients in place of values without any."""
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            return value
        twin = value.detach()
        twin = twin.clone() if twin.is_floating_point() else twin.float()
        return twin.requires_grad_(has_slope)
    if type(value) in (int, float):
        return torch.tensor(float(value), dtype=torch.float64, requires_grad=has_slope)
    return value


# What a search has found.


@dataclass(frozen=True)
class Unfound:
    """A side of a branch that no input is known to take; that does not say that there is none.

    Attributes:
        kind: "if", "while", "assert", ...; see `BranchCoverage`.
        text: source of the condition.
        file: the file it is in.
        line: its line, counted from 1.
        side: which side, True or False.
        module_path: the module whose forward asks; "" for the model itself.
        iteration: in loops over things, the iteration of each loop around it, counted from 0.
        watched: whether something that the inputs decide leads to it. Else plain Python values
            decide it, or no run has come to it.
    """

    kind: str
    text: str
    file: str
    line: int
    side: bool
    module_path: str
    iteration: tuple[int, ...]
    watched: bool

    def _row(self) -> tuple[str, ...]:
        text = shorten(self.text, 60, placeholder=" ...")
        where = place_text(self.file, self.line)
        iteration = ".".join(map(str, self.iteration))
        return (self.kind, text, where, self.module_path, iteration, str(self.side))


@dataclass(frozen=True, eq=False)
class Find(Unfound):
    """A side of a branch, and an input with which the model has taken it."""

    args: tuple[Any, ...]  # the positional arguments
    kwargs: dict[str, Any]  # the keyword arguments
    raised: str  # the name of the error that the model raised with them; "" for none
    run: int  # the number of the run that took it, counted from 1


_SHOWN = 40


class Exploration(Listing[Find]):
    """The result of a search: a list of finds that prints as a table.

    Attributes:
        not_found: the sides that are left. That an input was not found does not say that there is
            none.
        runs: how often the model was run.
        seconds: how long the search took.
    """

    def __init__(
        self, finds: Sequence[Find], not_found: Sequence[Unfound], runs: int, seconds: float
    ) -> None:
        super().__init__(finds)
        self.not_found: list[Unfound] = list(not_found)
        self.runs = runs
        self.seconds = seconds

    @property
    def inputs(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The inputs, as (args, kwargs), each once, without those with which the model raises."""
        found = {find.run: (find.args, find.kwargs) for find in self if not find.raised}
        return list(found.values())

    @property
    def _head(self) -> str:
        sides = counted(len(self) + sum(left.watched for left in self.not_found), "side")
        return (
            f"inputs found for {len(self)} of {sides} never taken "
            f"({counted(self.runs, 'run')} of the model)"
        )

    def _tables(self, form: str) -> list[tuple[str, str]]:
        names = ("branch", "source", "at", "module", "iteration", "side")
        found = [(*find._row(), f"raises {find.raised}" if find.raised else "") for find in self]
        tables = []
        for title, columns, rows in (
            ("found", (*names, ""), found),
            ("not found, which does not say that no input takes them", names,
             [left._row() for left in self.not_found if left.watched]),
        ):  # fmt: skip
            if rows:
                kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
                cells = [[row[i] for i in kept] for row in rows[:_SHOWN]]
                heads = [columns[i] for i in kept]
                text = tabulate.tabulate(cells, heads, tablefmt=form, disable_numparse=True)
                more = len(rows) - _SHOWN
                tables.append((title, f"{text}\n... and {more} more" if more > 0 else str(text)))
        return tables

    @property
    def _foot(self) -> list[str]:
        """Return a line about the rows that are not listed."""
        count = sum(not left.watched for left in self.not_found)
        which = "that plain Python values decide, or that no run has come to"
        return [f"not found either: {counted(count, 'side')} {which}"] if count else []

    def __str__(self) -> str:
        parts = [f"{title}:\n{table}" for title, table in self._tables("simple")]
        return "\n\n".join([self._head, *parts, *self._foot])

    def _repr_html_(self) -> str:
        parts = [f"<p>{title}</p>{table}" for title, table in self._tables("html")]
        foot = [f"<p>{line}</p>" for line in self._foot]
        return "".join([f"<p>{self._head}</p>", *parts, *foot])


# The model that is searched: a copy that runs on candidates, and what its runs show.

_OCCURRENCES = 64  # of one question in one module and run; a loop asks it again and again

# What makes questions of several runs the same one.
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class AskedTruth:
    """A truth that a run asked for."""

    key: Key  # the same in all runs that asked it at the same place, as often before
    guard: TruthGuard  # what was recorded of it
    # The places that led to it, with the keys of the running functions.
    around: tuple[tuple[InstructionPlace, object], ...]
    path: str  # the module whose forward asked
    # Which iteration of each loop around it that was, as far as that is counted.
    iteration: tuple[int, ...]
    # True if the answer decides a branch. Comparing containers asks as well.
    decides: bool

    @property
    def roots(self) -> tuple[int, ...]:
        """The op that is asked."""
        return (self.guard.index,)

    def truth(self, course: Course) -> Margin:
        """Return the distance, given a course that has come to it."""
        return course.truth(course.value(self.guard.index))

    def sides(self, answer: bool) -> list[Answers]:
        """Return the sides that an answer decides."""
        decided = choices_of(self.around[0][0], answer) if self.decides else ()
        return [
            (choice, self.path, self.iteration[: loops_around(choice)], side)
            for choice, side in decided
        ]

    def leads_to(self, other: AskedTruth | Formula) -> bool:
        """Return whether a later question is only asked because of the answer to this one."""
        mine, running = self.around[0]
        if mine == other.around[0][0] and running == other.around[0][1]:
            return True  # a loop has come to it again
        spans = [
            span
            for choice, side in choices_of(mine, self.guard.answer)
            for span in (choice.if_true if side else choice.if_false)
        ]
        return any(
            place.file == mine.file and key == running and any(s.holds(place.span) for s in spans)
            for place, key in other.around
        )


@dataclass(eq=False)
class CandidateRun:
    """The result of running the model on a candidate."""

    candidate: TrialInput  # the input
    recording: Recording | None = None  # the run; None if it raised
    raised: str = ""  # the name of the error
    # The truths that it asked for, in order.
    questions: dict[Key, AskedTruth] = field(default_factory=dict)
    taken: set[Answers] = field(default_factory=set)  # the sides that questions decided
    # The sides under which something happened, as the source has it; their iterations are not
    # known.
    under: set[tuple[Choice, str, bool]] = field(default_factory=set)
    # Conditions that were read from the source.
    formulas: dict[Key, Formula | None] = field(default_factory=dict)
    _recorded: Recorded | None = None

    def question_of(self, key: Key) -> AskedTruth | Formula | None:
        """Return a question; None if the run did not come to it."""
        if self.recording is None or type(key[0]) is not Choice:
            return self.questions.get(key)
        if key not in self.formulas:
            self._recorded = self._recorded or latest_ops(self.recording)
            self.formulas[key] = formula_of(key[0], key[1], self.recording, self._recorded)
        return self.formulas[key]


class Subject:
    """A model, which each run finds as it was at the beginning."""

    def __init__(self, model: Callable[..., Any], space: Space, before: PreservedState) -> None:
        self._model, self._space, self._before = model, space, before
        self._signature = Signature(model)
        self._sites: dict[tuple[int, str], tuple[Site, set[tuple[Choice, str, bool]]]] = {}
        self._codes: set[CodeType] = set()
        self.functions: dict[tuple[str, Any], None] = {}

    def run(self, candidate: TrialInput) -> CandidateRun:
        """Run the model itself on a candidate, and see which sides it takes."""
        self._before.rewind()
        args, kwargs = candidate.copied()
        run = CandidateRun(candidate)
        try:
            recording = record(self._model, args, kwargs, self._signature)
            recording.result = None
            self._read(run, recording)
        except InputError:
            raise
        except Exception as error:
            run.raised = type(error).__name__
            run.under |= self._under_at(error)
        return run

    def _read(self, run: CandidateRun, recording: Recording) -> None:
        run.recording, tape = recording, recording.tape
        asked: dict[Key, int] = {}
        events = {event.number: event for event in PathEvents(recording).events}
        for number, guard in enumerate(tape.guards):
            self._see(run, guard.scope, guard.site)
            if not isinstance(guard, TruthGuard) or guard.site is None:
                continue
            if guard.use in (Use.RESULT, Use.METADATA, Use.TYPE):
                continue
            key = (guard.site.identity, guard.scope.path)
            asked[key] = asked.get(key, 0) + 1
            around = tuple(running_code(guard.scope, guard.site))
            if not around or asked[key] > _OCCURRENCES:
                continue
            place, running, scope = user_code(guard.scope, guard.site)
            event = events.get(number)
            decides = event is not None and event.is_condition
            question = AskedTruth(
                (*key, asked[key]), guard, ((place, running), *around[1:]), scope.path,
                event.iteration if event is not None else (), decides,
            )  # fmt: skip
            run.questions[question.key] = question
            run.taken.update(question.sides(guard.answer))
        for op in tape.ops:
            self._see(run, op.scope, op.site)
            for value in argument_leaves((op.args, op.kwargs)) if op.is_work else ():
                if type(value) in (int, float) and len(self._space.numbers) < 256:
                    self._space.numbers[value] = None
        for call in tape.calls:
            if call.parent is not None:
                self._see(run, call.parent, call.site)

    def _see(self, run: CandidateRun, scope: ModuleCall, site: Site | None) -> None:
        """Note the sides under which something at a site happened."""
        if site is None:
            return
        cached = self._sites.get((id(site), scope.path))
        if cached is None:
            taken: set[tuple[Choice, str, bool]] = set()
            for (code, _), place in zip(site.chain, site.places, strict=True):
                if not place.in_torch:
                    taken |= self._under(place, scope.path)
                    if code not in self._codes:
                        self._codes.add(code)
                        numbers: Iterator[Any] = (
                            n for n in code.co_consts if type(n) in (int, float)
                        )
                        self._space.numbers.update(dict.fromkeys(numbers))
            cached = self._sites[id(site), scope.path] = site, taken
        run.under |= cached[1]

    def _under(self, place: InstructionPlace, path: str) -> set[tuple[Choice, str, bool]]:
        function = None if is_standard(place.file) else function_of(place)
        if function is None:
            return set()
        self.functions[place.file, function] = None
        return {
            (choice, path, side)
            for choice in choices_in(place.file, function)
            for side in (True, False)
            if any(s.holds(place.span) for s in (choice.if_true if side else choice.if_false))
        }

    def _under_at(self, error: Exception) -> set[tuple[Choice, str, bool]]:
        """Return the sides under which an error was raised."""
        taken: set[tuple[Choice, str, bool]] = set()
        trace, path = error.__traceback__, ""
        modules = {}
        if isinstance(self._model, nn.Module):
            modules = {id(module): name for name, module in self._model.named_modules()}
        while trace is not None:
            code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
            path = modules.get(id(owner), path)
            place = place_at(code, trace.tb_lasti)
            if not place.file.startswith((TORCH, PACKAGE)):
                taken |= self._under(place, path)
                function = function_of(place)
                if trace.tb_next is None and function and isinstance(error, AssertionError):
                    taken |= {
                        (choice, path, False)
                        for choice in choices_in(place.file, function)
                        if choice.kind == "assert" and place.line == choice.line
                    }
            trace = trace.tb_next
        return taken
