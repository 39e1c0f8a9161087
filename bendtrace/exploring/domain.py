"""The domain of a search: which inputs may differ, and in which values and sizes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.recording.run import Signature


class Domain:
    """Which values one input of a model may have.

    Args:
        low: the least number, of a tensor's elements or of a number.
        high: the greatest number; it is included.
        values: what may be there, in place of a range: elements of a tensor, or for all else the
            values themselves.
        sizes: for each dimension of a tensor whose size may differ, the least and the greatest
            size, `{1: (1, 16)}`; with a name before them, `{1: ("length", 1, 16)}`, dimensions of
            several tensors keep the same size.

    Raises:
        InputError: something makes no sense.

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
            if number is not None and (not _is_number(number) or not math.isfinite(number)):
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
        """Whether it says more than sizes."""
        return self.low is not None or self.values is not None

    def require(self, label: str, value: Any) -> None:
        """Check that a given input lies in it.

        Raises:
            InputError: it does not, or it is nothing that has such a domain.
        """
        if not isinstance(value, Tensor):
            if self.sizes:
                raise InputError(f"{label} has no sizes: it is {value!r}")
            if self.low is not None and (type(value) is bool or not _is_number(value)):
                raise InputError(
                    f"{label} is no number, so its domain has to be values=[...]: it is {value!r}"
                )
            inside = value in self.values if self.values is not None else self.holds(value)
            if not inside:
                raise InputError(f"{label} is {value!r}, which is outside of {self!r}")
            return
        if value.is_complex() or value.layout is not torch.strided:
            raise InputError(f"{label} has no domain: it is no dense tensor of real numbers")
        for dim, bounds in self.sizes.items():
            if not -value.dim() <= dim < value.dim():
                raise InputError(f"{label} has {value.dim()} dimensions, and none is {dim}")
            if not bounds[-2] <= value.shape[dim] <= bounds[-1]:
                raise InputError(
                    f"dimension {dim} of {label} has size {value.shape[dim]}, outside of {self!r}"
                )
        if self.values is not None and not all(map(_is_number, self.values)):
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
        """Whether a number lies between low and high."""
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
        said = [] if self.low is None else [repr(self.low), repr(self.high)]
        said += [] if self.values is None else [f"values={self.values!r}"]
        said += [f"sizes={self.sizes!r}"] if self.sizes else []
        return f"Domain({', '.join(said)})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


class Candidate:
    """One input: arguments, and by its label each part of them that has a domain."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], free: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.free = free

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of its arguments, which a model may write to."""
        memo: dict[int, Any] = {}
        _note_copies((self.args, self.kwargs), memo)
        args, kwargs = copy.deepcopy((self.args, self.kwargs), memo)
        return args, kwargs


def _note_copies(value: Any, memo: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    elif type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            _note_copies(item, memo)


class Space:
    """All inputs that a search may try.

    Args:
        domains: by the name of the argument, or of the part of one, `batch['ids']`.
        signature: gives arguments their names.
        seed: for random numbers.

    Raises:
        InputError: a domain makes no sense.
    """

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

    def candidate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Candidate:
        """Return an input that is given.

        Raises:
            InputError: it is outside of the domain.
        """
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
        made = Candidate(args, kwargs, {label: parts[label] for label in self.domains})
        return Candidate(*made.copied(), {}) if not made.free else self.replaced(made, {})

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in self._signature.bind(args, kwargs).items():
            yield from _labelled(name, value)

    def replaced(self, base: Candidate, values: Mapping[str, Any]) -> Candidate:
        """Return a candidate with other values in some places."""
        names = self._signature.names(base.args, base.kwargs)
        free = {**base.free, **values}
        given = (*base.args, *base.kwargs.values())
        made = [_with(name, value, free) for name, value in zip(names, given, strict=True)]
        count = len(base.args)
        return Candidate(tuple(made[:count]), dict(zip(base.kwargs, made[count:], strict=True)),
                         free)  # fmt: skip

    def arguments(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return the arguments as a run binds them."""
        return self._signature.arrange(candidate.args, candidate.kwargs)[1]

    # Other inputs

    def tensors(self, candidate: Candidate) -> Iterator[tuple[str, Domain, Tensor]]:
        """Yield the tensors whose elements may differ."""
        for label, value in candidate.free.items():
            if isinstance(value, Tensor) and self.domains[label].has_numbers and value.numel():
                yield label, self.domains[label], value

    def drawn(self, base: Candidate) -> Candidate:
        """Return random values, of the sizes that the base has."""
        made: dict[str, Any] = {}
        for label, domain, value in self.tensors(base):
            made[label] = _like(value, domain.draw(tuple(value.shape), value, self._generator))
            if self.chance.random() < 0.3 and value.dtype.is_floating_point:
                scale = 10 ** -self.chance.uniform(0, 3)
                noise = made[label].detach() * scale
                made[label] = _like(value, domain.put(value.detach() + noise))
        made.update((label, self._other(label, value)) for label, value in self._plain(base))
        return self.replaced(base, made)

    def mutated(self, base: Candidate, other: Candidate) -> Candidate:
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
            made[label] = _like(value, domain.put(flat.view(value.shape)))
        return self.replaced(base, made)

    def _plain(self, base: Candidate) -> Iterator[tuple[str, Any]]:
        for label, value in base.free.items():
            if not isinstance(value, Tensor):
                yield label, value

    def _other(self, label: str, value: Any) -> Any:
        """Return another value of what is no tensor."""
        domain = self.domains[label]
        if domain.values is not None:
            return self.chance.choice(domain.values)
        low, high = domain.bounds(type(value) is int)
        known = [n for n in self.numbers if low <= n <= high and type(n) is type(value)]
        if known and self.chance.random() < 0.5:
            near = self.chance.choice(known) + self.chance.choice((0, 1, -1))
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

    def resized(self, base: Candidate) -> Iterator[Candidate]:
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
        return _like(value, plain.narrow(dim, 0, size).clone())


def _labelled(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (tuple, list, dict):
        for key, item in value.items() if type(value) is dict else enumerate(value):
            yield from _labelled(f"{label}[{key!r}]", item)
    else:
        yield label, value


def _with(label: str, value: Any, values: Mapping[str, Any]) -> Any:
    if type(value) is dict:
        return {key: _with(f"{label}[{key!r}]", item, values) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with(f"{label}[{i}]", item, values) for i, item in enumerate(value))
    return values.get(label, value)


def _like(old: Tensor, new: Tensor) -> Tensor:
    return new.detach().to(old.dtype).requires_grad_(old.requires_grad)
