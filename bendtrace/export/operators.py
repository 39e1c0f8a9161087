"""`cond` and `while_loop`, as programs call them while torch.export traces these.

Both take tensors and open sizes; all other operands never change. A size that values decide is
passed on as a tensor, and read where it is used: so a side may require something of it that holds
only there, and a round of a loop may change it. A tensor of such a size is passed on as a whole,
with zeros behind what is left of it in a loop, and cut where it is used:

    before the loop     a round                              behind the loop
    [5, 2, 7], 3   ->   [5, 2, 7] -> [2, 7] -> [2, 7, 0], 2   ...   ->   [2, 7]

By themselves, both would check before they begin what a side or a round requires of sizes, and no
round could change one (torch 2.13; the tests of shrinking loops notice a change).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bendtrace.source.internals import internal

_NOTHING: Mapping[str, int] = MappingProxyType({})


def cond(asked: Tensor, yes: Any, no: Any, operands: tuple[Any, ...]) -> Any:
    """Call `torch.cond`.

    Args:
        asked: the answer.
        yes: the side where it is True.
        no: the other side.
        operands: what both are called with.
    """
    passed = _Operands(operands)
    sides = map(passed.read_by, (yes, no))
    return torch.ops.higher_order.cond(asked, *sides, passed.given)


def while_loop(
    test: Any, step: Any, carried: tuple[Any, ...], operands: tuple[Any, ...],
    varying: Sequence[tuple[int, ...] | None],
) -> Any:  # fmt: skip
    """Call `torch.while_loop`.

    Args:
        test: the function that says whether there is a further round.
        step: a round.
        carried: what a round changes.
        operands: what both functions are called with besides.
        varying: for each that a round changes, the dimensions that it makes smaller; None for none.
    """
    passed, count = _Operands(operands), len(carried)
    dims = [
        (place, dim)
        for place, known in enumerate(varying)
        if known is not None
        for dim in sorted({*known, *_varying_in(carried[place])})
    ]
    whole = {place: carried[place].contiguous() for place, _ in dims}
    carried = tuple(whole.get(place, value) for place, value in enumerate(carried))

    def cut(values: Sequence[Any]) -> list[Any]:
        found = list(values[:count])
        for (place, dim), size in zip(dims, values[count:], strict=True):
            found[place] = _first(found[place], dim, _read(size))
        return found

    def among(given: tuple[Any, ...]) -> list[Any]:
        own = count + len(dims)
        return [*cut(given[:own]), *passed.read(given[own:])]

    def one_round(*given: Any) -> tuple[Any, ...]:
        made = list(step(*among(given)))
        sizes = [_as_tensor(made[place].size(dim)) for place, dim in dims]
        for place, dim in dims:
            made[place] = _fill(made[place], dim, given[place].size(dim))
        return *made, *sizes

    sizes = tuple(_as_tensor(carried[place].size(dim)) for place, dim in dims)
    begin = (*carried, *sizes)
    loop = torch.ops.higher_order.while_loop
    return cut(loop(lambda *given: test(*among(given)), one_round, begin, passed.given))


def fit(values: tuple[Any, ...], holds: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return values as a side of a question may take them that was not known to be asked for.

    Args:
        values: tensors, and sizes.
        holds: whether the side is the one to take: otherwise, its results are not used, but it must
            be able to compute them.
        shapes: what it can compute with: the shapes of tensors, and `(n,)` for sizes.
    """
    passed = _Operands(values)
    known = {
        str(size): number
        for value, shape in zip(values, shapes, strict=True)
        for size, number in zip(_sizes_of(value), shape, strict=True)
    }
    sizes = {
        text: _read(torch.where(holds, passed.given[place + len(passed.places)], known[text]))
        for text, place in passed.sizes.items()
    }
    return [_resize(value, sizes, known) for value in values]


class _Operands:
    """Operands, and how they are passed on.

    Args:
        values: the operands.

    Attributes:
        given: what is passed: tensors and open sizes, and behind them the sizes that values decide.
        places: the numbers of the operands that are passed.
        sizes: the places of the sizes that values decide, by their expressions.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        # A size that has turned out to be fixed is no operand: ONNX takes no number for one (2.13).
        self._values = [int(v) if _is_fixed(v) else v for v in values]
        self.sizes: dict[str, int] = {}
        sizes: list[Tensor] = []
        for size in (size for value in self._values for size in _sizes_of(value)):
            if _is_varying(size) and str(size) not in self.sizes:
                self.sizes[str(size)] = len(sizes)
                sizes.append(_as_tensor(size))
        self.places = [n for n, v in enumerate(self._values) if self._is_passed(v)]
        self.given = (*(self._values[place] for place in self.places), *sizes)

    def _is_passed(self, value: Any) -> bool:
        is_open = isinstance(value, torch.SymInt) and str(value) not in self.sizes
        return is_open or isinstance(value, Tensor)

    def read_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is called with what is passed."""
        return lambda *given: function(*self.read(given))

    def read(self, given: Sequence[Any]) -> Iterator[Any]:
        """Return the operands where they are used.

        Args:
            given: what a function has received.
        """
        values = list(self._values)
        for place, value in zip(self.places, given, strict=False):
            values[place] = value
        numbers = map(_read, given[len(self.places) :])
        sizes = dict(zip(self.sizes, numbers, strict=True))
        return (_resize(value, sizes) for value in values)


def _resize(value: Any, sizes: Mapping[str, Any], known: Mapping[str, int] = _NOTHING) -> Any:
    """Return a size as another one, or a tensor with as many elements; other values as they are.

    Args:
        value: the value.
        sizes: the sizes, by the expressions of those that they stand for.
        known: how many zeros are behind those elements that there are.
    """
    if isinstance(value, torch.SymInt):
        return sizes.get(str(value), value)
    found = value
    for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        if (text := str(size)) in sizes:
            if text in known:
                rest = [*found.shape[:dim], known[text], *found.shape[dim + 1 :]]
                found = torch.cat([found, found.new_zeros(rest)], dim)
            found = _first(found, dim, sizes[text])
    return found


def _sizes_of(value: Any) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, torch.SymInt) else ()


def _is_fixed(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and value.node.maybe_as_int() is not None


def _is_varying(size: Any) -> bool:
    symbols: Callable[[Any], Any] = internal(
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols"
    )
    return isinstance(size, torch.SymInt) and bool(symbols(size))


def _varying_in(value: Tensor) -> Iterator[int]:
    return (dim for dim, size in enumerate(value.shape) if _is_varying(size))


def _as_tensor(size: Any) -> Tensor:
    return torch.scalar_tensor(size, dtype=torch.int64)


def _read(size: Tensor) -> Any:
    number = size.item()
    torch._check(number >= 0)
    return number


def _first(value: Tensor, dim: int, size: Any) -> Tensor:
    """Return the first slices of a tensor."""
    return value.index_select(dim, torch.arange(size, device=value.device))


def _fill(value: Tensor, dim: int, size: Any) -> Tensor:
    """Return a tensor with zeros behind it."""
    whole = value.new_zeros([*value.shape[:dim], size, *value.shape[dim + 1 :]])
    return whole.index_copy(dim, torch.arange(value.size(dim), device=value.device), value)
