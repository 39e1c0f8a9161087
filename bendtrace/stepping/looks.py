"""What is seen at the positions of a run, as text, within a budget."""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bendtrace.tape.scalars import TracedScalar, plain

__all__ = ["FrameText", "Looks", "text_of"]

_LONGEST = 400  # letters of a text
_MOST = 8  # items of a list, and first values of a large tensor
_WHOLE = 24  # elements of a tensor that is shown whole
_DEEPEST = 4

_PLAIN = frozenset({type(None), bool, int, float, complex, bytes, range, type(...)})
_TORCH = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})


class FrameText(NamedTuple):
    """A running function of the model, with its variables as text.

    Attributes:
        function: its name.
        file: its file.
        line: the line that it had come to.
        variables: pairs of a name and a text.
    """

    function: str
    file: str
    line: int
    variables: tuple[tuple[str, str], ...]


class Looks:
    """Keeps the frames of positions as text. Where there are too many, the farthest go.

    Args:
        budget: how many characters they may take together; what positions share counts once.
        centre: the position around which positions are kept.

    Attributes:
        frames: the frames of each position that was kept, innermost first.
        results: the results of ops, by the number of the event.
        size: how many characters they take.
    """

    size: int

    def __init__(self, budget: int, centre: int) -> None:
        self.frames: dict[int, tuple[FrameText, ...]] = {}
        self.results: dict[int, str] = {}
        self.size = 0
        self._budget, self._centre = budget, centre
        self._next = 0
        self._is_full = False
        self._order: deque[int] = deque()
        self._counts: Counter[Any] = Counter()  # how often each frame and each text is used

    def take(self, number: int, frames: Iterable[FrameType]) -> None:
        """Keep what is seen at a position; positions come in order."""
        if self._is_full or number < self._next:
            return
        for skipped in range(self._next, number):  # inside of an op, where no visit can stop
            self._keep(skipped, ())
        self._next = number + 1
        self._keep(number, tuple(map(_frame_text, frames)))

    def _keep(self, number: int, found: tuple[FrameText, ...]) -> None:
        self.frames[number] = found
        self._order.append(number)
        for frame in found:
            self._count(frame, 1)
        self._make_room()

    def end(self, count: int) -> None:
        """Note how many events the run had."""
        if not self._is_full:
            for skipped in range(self._next, count):
                self._keep(skipped, ())

    def gave(self, number: int, result: Any) -> None:
        """Keep the result of an op, if its position was kept."""
        if number in self.frames:
            self.results[number] = text = text_of(result)
            self._count(text, 1)
            self._make_room()

    def _make_room(self) -> None:
        while self.size > self._budget:
            first, last = self._order[0], self._order[-1]
            if self._centre - first > last - self._centre:
                self._order.popleft()
                self._drop(first)
            else:
                self._order.pop()
                self._drop(last)
                self._is_full |= last >= self._centre

    def _drop(self, number: int) -> None:
        for frame in self.frames.pop(number):
            self._count(frame, -1)
        if number in self.results:
            self._count(self.results.pop(number), -1)

    def _count(self, what: FrameText | str, by: int) -> None:
        is_used = self._counts[what] > 0
        self._counts[what] += by
        if is_used == (self._counts[what] > 0):
            return
        if isinstance(what, str):
            self.size += by * len(what)
            return
        self.size += by * (len(what.function) + sum(len(name) for name, _ in what.variables))
        for _, text in what.variables:
            self._count(text, by)


def _frame_text(frame: FrameType) -> FrameText:
    code, variables = frame.f_code, dict(frame.f_locals)
    # In the order of the code: that of the dict depends on when it was read before.
    ordered = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars, *variables))
    return FrameText(
        code.co_qualname,
        code.co_filename,
        frame.f_lineno,
        tuple((name, text_of(variables[name])) for name in ordered if name in variables),
    )


def text_of(value: Any) -> str:
    """Return a value as text, without running code of the model or of the value's own class.

    Tensors have their shape, dtype and first values, and large ones their range; objects of other
    classes have the name of their class.

    Args:
        value: a value as it is during a run, or the copy of one.

    Example:
        >>> import torch
        >>> text_of([torch.tensor([1.0, 2.5]), "a", {"n": 3}])
        "[tensor (2,) float32: [1, 2.5], 'a', {'n': 3}]"
        >>> text_of(torch.arange(100.0).view(10, 10))
        'tensor (10, 10) float32: 0, 1, 2, 3, 4, 5, 6, 7, ... from 0 to 99'
        >>> text_of(torch.nn.ReLU())
        'ReLU(...)'
    """
    text = _text(value, 0)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _text(value: Any, depth: int) -> str:
    kind = type(value)  # not __class__, which the run would notice
    if issubclass(kind, TracedScalar):
        value = plain(value)
        kind = type(value)
    if kind is str:
        return repr(value[:_LONGEST])
    if kind is int and value.bit_length() > _LONGEST:
        return f"an int of {value.bit_length()} bits"
    if kind in _PLAIN:
        return repr(value[:_LONGEST] if kind is bytes else value)
    if kind in _TORCH:
        return str(value)
    if kind is Tensor or kind is nn.Parameter:
        return _tensor(value)
    if kind is torch.Size:
        return f"torch.Size({_items(list(value), list, depth)})"
    if kind in (list, tuple, set, frozenset, dict) or (
        issubclass(kind, tuple) and hasattr(kind, "_fields")
    ):
        return _items(value, kind, depth)
    if kind.__module__ == "torch.return_types":  # what topk returns, say; copies are tuples
        return _items(tuple(value), tuple, depth)
    if kind is slice:
        parts = (_text(part, depth + 1) for part in (value.start, value.stop, value.step))
        return f"slice({', '.join(parts)})"
    return _named(value, kind)


def _items(value: Any, kind: type, depth: int) -> str:
    if depth == _DEEPEST:
        return f"{kind.__name__} of {len(value)}"

    def inner(items: Iterable[Any], show: Callable[[Any], str]) -> str:
        shown = [show(item) for item in islice(items, _MOST)]
        more = [f"... {len(value) - _MOST} more"] if len(value) > _MOST else []
        return ", ".join(shown + more)

    def one(item: Any) -> str:
        return _text(item, depth + 1)

    if kind is dict:
        return f"{{{inner(value.items(), lambda pair: f'{one(pair[0])}: {one(pair[1])}')}}}"
    if kind is list:
        return f"[{inner(value, one)}]"
    if kind is set or kind is frozenset:
        return f"{kind.__name__}({{{inner(value, one)}}})" if value else f"{kind.__name__}()"
    if kind is tuple:
        return f"({inner(value, one)}{',' if len(value) == 1 else ''})"
    named = zip(kind._fields, tuple.__iter__(value), strict=False)  # type: ignore[attr-defined]
    return f"{kind.__name__}({inner(named, lambda pair: f'{pair[0]}={one(pair[1])}')})"


def _named(value: Any, kind: type) -> str:
    if issubclass(kind, type):
        return f"class {type.__getattribute__(value, '__qualname__')}"
    if issubclass(kind, nn.Module):
        return f"{kind.__qualname__}(...)"
    if issubclass(kind, Enum):
        return f"{kind.__qualname__}.{value._name_}"
    if kind is types.FunctionType or kind is types.BuiltinFunctionType:
        return f"function {value.__qualname__}"
    if kind is types.MethodType:
        return f"method {getattr(value.__func__, '__name__', '?')}"
    if kind is types.ModuleType:
        return f"module {types.ModuleType.__repr__(value).split(chr(39))[1]}"
    return f"{kind.__qualname__} object"


def _tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    told = f"tensor {tuple(tensor.shape)} {dtype}"
    if tensor.device.type != "cpu":
        told += f" {tensor.device}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{told} {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_meta or not tensor.numel():
        return told
    try:
        return f"{told}: {_values(tensor.detach())}"
    except RuntimeError:  # inside a transform, such as torch.vmap, and of dtypes without numbers
        return f"{told}: its values cannot be read here"


def _values(tensor: Tensor) -> str:
    if tensor.numel() <= _WHOLE:
        return _nested(tensor.tolist())
    first = tensor
    while first.dim() > 1 and first[0].numel() >= _MOST:
        first = first[0]
    shown = ", ".join(map(_number, first.reshape(-1)[:_MOST].tolist()))
    if tensor.is_complex():
        return f"{shown}, ..."
    low, high = (each.item() for each in (tensor.aminmax() if tensor.dim() else (tensor, tensor)))
    return f"{shown}, ... from {_number(low)} to {_number(high)}"


def _nested(value: Any) -> str:
    return f"[{', '.join(map(_nested, value))}]" if type(value) is list else _number(value)


def _number(value: Any) -> str:
    return f"{value:.5g}" if type(value) in (float, complex) else str(value)
