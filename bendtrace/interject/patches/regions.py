"""The part of a value that a patch changes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import InputError, PatchError
from bendtrace.interject.effects import can_cast
from bendtrace.interject.patches.base import described

__all__ = [
    "Index",
    "Number",
    "added",
    "check_index",
    "check_value",
    "edited",
    "is_constant_index",
    "replaced",
]

Number = bool | int | float | complex
IndexItem = int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...] | None
# Valid indices of a tensor. A list counts as a tuple if it contains more than numbers, and None as
# the whole tensor.
Index = IndexItem | tuple[IndexItem, ...] | list[IndexItem]


def check_index(index: Any) -> None:
    """Raise if something is not a valid index of a tensor.

    Raises:
        InputError: it is not an index expression.
    """
    items = index if isinstance(index, (list, tuple)) else (index,)
    for item in items:
        if isinstance(item, (list, tuple)):
            check_index(item)
        elif isinstance(item, Tensor):
            if item.is_floating_point() or item.is_complex():
                raise InputError(
                    f"slice={described(index)}: a tensor of {item.dtype} is not a valid index"
                )
        elif item is not None and item is not ... and not _indexes(item):
            raise InputError(
                f"slice={described(index)}: {item!r} is not a valid index of a tensor; write "
                "x[:, 2] as slice=(slice(None), 2)"
            )


def is_constant_index(index: Any) -> bool:
    """Whether an index is made of plain numbers alone, which its text shows in full."""
    if isinstance(index, (list, tuple)):
        return all(map(is_constant_index, index))
    if type(index) is slice:
        return all(map(is_constant_index, (index.start, index.stop, index.step)))
    return index is None or index is ... or type(index) in (bool, int, range)


def _indexes(item: Any) -> bool:
    if isinstance(item, (slice, range)) or type(item).__module__ == "numpy":
        return True
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def check_value(value: Any) -> None:
    """Raise if something can neither be added to a tensor nor replace it.

    Raises:
        InputError: it is neither a tensor nor a number.
    """
    if not isinstance(value, (Tensor, bool, int, float, complex)):
        raise InputError(
            f"value has to be a tensor or a number, not {described(value)} ({type(value).__name__})"
        )


def _check_number(original: Any, value: Any) -> None:
    """Raise for values that are neither tensors nor numbers, and for tensors that replace numbers.

    Raises:
        PatchError: the node holds, or is to hold, an unsupported type.
    """
    if not isinstance(original, (bool, int, float, complex)):
        raise PatchError(
            f"the value is {described(original)} ({type(original).__name__}), neither a tensor "
            "nor a number: give the path of a part of it, or use a CustomPatch",
            expected="Tensor", got=type(original).__name__,
        )  # fmt: skip
    if isinstance(value, Tensor):
        raise PatchError(
            f"the value is the number {original!r}, which {described(value)} cannot replace",
            expected=type(original).__name__, got=described(value),
        )  # fmt: skip


def edited(original: Any, index: Index, edit: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a tensor with one part changed.

    Args:
        original: the tensor; it is not changed.
        index: the part.
        edit: returns the new part for the present one.

    Raises:
        PatchError: the part does not exist, or the new part does not fit.
    """
    new = edit(_part_of(original, index))
    made = original.clone()
    made[_key(index)] = new
    return made


def added(original: Any, index: Index, value: Any) -> Any:
    """Return a value with something added to a part of it.

    Args:
        original: a tensor or a number; it is not changed.
        index: the part; None for all of it.
        value: the summand.

    Raises:
        PatchError: the part does not exist, or the value cannot hold the sum.
    """
    if index is not None:
        return edited(original, index, lambda part: added(part, None, value))
    if not isinstance(original, Tensor):
        _check_number(original, value)
        return _as_number(original, original + value, value)
    if isinstance(value, Tensor):
        _check_shape(original, value)
        value = value.to(original.device)
    made = original + value
    if made.dtype is not original.dtype:
        if not can_cast(made.dtype, original.dtype):
            raise _unfit_type(original, value)
        made = made.to(original.dtype)
    return made if made.shape == original.shape else made.reshape(original.shape)


def replaced(original: Any, index: Index, value: Any) -> Any:
    """Return a value with a part of it replaced.

    Args:
        original: a tensor or a number; it is not changed.
        index: the part; None for all of it.
        value: the new part.

    Raises:
        PatchError: the part does not exist, or cannot hold the value.
    """
    if index is None and not isinstance(original, Tensor):
        _check_number(original, value)
        return _as_number(original, value, value)
    part = original if index is None else _part_of(original, index)
    if isinstance(value, Tensor):
        _check_shape(part, value)
        fits = can_cast(value.dtype, part.dtype)
        value = value.to(part.device)
    else:
        fits = _holds(part.dtype, value)
    if not fits:
        raise _unfit_type(part, value)
    # Not a new tensor, even if nothing of the old one is left: as in graphpatch, earlier nodes get
    # zero gradients, not none.
    made = original.clone()
    made[... if index is None else _key(index)] = value
    return made


def _part_of(original: Any, index: Index) -> Tensor:
    """Return a part of a tensor.

    Raises:
        PatchError: the part does not exist.
    """
    if not isinstance(original, Tensor):
        raise PatchError(
            f"only tensors can be sliced, and the value is {described(original)}",
            expected="Tensor", got=described(original),
        )  # fmt: skip
    try:
        return original[_key(index)]
    except (IndexError, TypeError, ValueError) as error:
        raise PatchError(
            f"{_of_shape(original.shape)} has no part [{_shown(index)}]: {_first_line(error)}",
            got=_of_shape(original.shape),
        ) from error


def _key(index: Index) -> Any:
    """Return the index for the brackets.

    torch once took lists of more than numbers for tuples, and graphpatch's documents say so.
    """
    if isinstance(index, (list, tuple)):
        items = [list(item) if isinstance(item, range) else item for item in index]
        if isinstance(index, tuple) or not all(_is_plain(item) for item in items):
            return tuple(items)
        return items
    return list(index) if isinstance(index, range) else index


def _is_plain(item: Any) -> bool:
    return isinstance(item, int) or type(item).__module__ == "numpy"


def _check_shape(part: Tensor, value: Tensor) -> None:
    """Raise if a value does not broadcast to the shape of its target."""
    sizes = list(value.shape)
    while len(sizes) > part.dim() and sizes[0] == 1:
        del sizes[0]  # as in `part[...] = value`
    wanted = part.shape[part.dim() - len(sizes) :]
    if len(sizes) > part.dim() or any(
        size not in (1, there) for size, there in zip(sizes, wanted, strict=True)
    ):
        raise PatchError(
            f"the value has to be {_of_shape(part.shape)}, or broadcast to that, but is "
            f"{_of_shape(value.shape)}",
            expected=_of_shape(part.shape), got=_of_shape(value.shape),
        )  # fmt: skip


def _unfit_type(part: Tensor, value: Any) -> PatchError:
    got = str(value.dtype) if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
    return PatchError(
        f"the node holds {part.dtype}, which cannot hold {got}", expected=str(part.dtype), got=got
    )


def _holds(dtype: torch.dtype, number: Number) -> bool:
    """Return whether tensors of a dtype can hold a number, apart from rounding."""
    if isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_complex or dtype.is_floating_point:
        return True
    if dtype is torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and number == int(number)


def _as_number(original: Number, made: Number, value: Number) -> Number:
    """Return a number converted to the type of another, if possible."""
    kind = next(kind for kind in (bool, int, float, complex) if isinstance(original, kind))
    fits = {
        bool: made in (0, 1),
        int: isinstance(made, int) or (isinstance(made, float) and made.is_integer()),
        float: not isinstance(made, complex),
        complex: True,
    }
    if not fits[kind]:
        raise PatchError(
            f"the node holds {kind.__name__}, which cannot hold {made!r} (the value is {value!r})",
            expected=kind.__name__, got=repr(made),
        )  # fmt: skip
    return kind(made)  # type: ignore[arg-type]  # complex ones were refused


def _of_shape(shape: torch.Size) -> str:
    return f"Tensor({', '.join(map(str, shape))})"


def _shown(index: Index) -> str:
    """Return an index as users write it in brackets."""
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join(_shown_item(item) for item in items)


def _shown_item(item: Any) -> str:
    if not isinstance(item, slice):
        return "..." if item is ... else described(item)
    parts = ["" if part is None else str(part) for part in (item.start, item.stop, item.step)]
    return ":".join(parts[:2] + ([parts[2]] if parts[2] else []))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
