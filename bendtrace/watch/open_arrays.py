"""Arrays of numpy in a model's state whose content is an input, and not compared.

A histogram that forward adds to, a ring buffer or a running mean has another content in each call.
Once a run was found to change an array, it is an open one (`TraceTree.compare_numbers`): its layout
is guarded, and what code does with it is recorded as ops (`record/arrays.py`), which each replay
carries out on the array itself.

This is right only if nothing else that a run can read is in the array's memory, since the content
of other arrays is guarded and taken for constant. Nor may any code but the user's know a name that
leads to the array: what code of packages does is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from bendtrace.tape.captured import Captured, CaptureKind, is_array
from bendtrace.watch.findings import ScanResult
from bendtrace.watch.growing import is_known_to_user_only, owners_in
from bendtrace.watch.writes import memory_extent, overlap


def untied_arrays(candidates: list[Captured], found: ScanResult) -> dict[int, Any]:
    """Return the arrays among some parts that can be open ones, by identity.

    Args:
        candidates: the parts.
        found: what a run can read.
    """
    owners, parts = owners_in(found), found.parts
    tensors = [part.value for part in parts if part.kind is CaptureKind.TENSOR]
    arrays = [part.value for part in parts if part.kind in _ARRAYS and is_array(part.value)]
    return {
        id(part.value): part.value
        for part in candidates
        if is_known_to_user_only(part, owners, found)
        and (
            part.kind is CaptureKind.PLAIN
            or (part.kind is CaptureKind.ARRAY and not is_tied(part.value, tensors, arrays))
        )
    }


def is_tied(array: Any, tensors: Iterable[Tensor], arrays: Iterable[Any]) -> bool:
    """Return whether some tensors, or other arrays, may have memory that an array has."""
    begin, end = memory_extent(array)
    extents = (memory_extent(other) for other in arrays if other is not array and other.nbytes)
    return bool(overlap(tensors, (array,))) or any(
        first < end and begin < last for first, last in extents
    )


def is_unshared(references: int, array: Any) -> bool:
    """Return whether nothing else has the memory of an array, as far as references show.

    Tensors, views and buffers in its memory refer to it.

    Args:
        references: what `sys.getrefcount` gives the caller.
        array: the array, which only the caller's variable and its holder are to refer to.
    """
    base = array.base
    if references > _HELD_TWICE:
        return False
    if base is None:
        return bool(array.flags.owndata)
    is_root = type(base) is type(array) and base.base is None and base.flags.owndata
    return is_root and sys.getrefcount(base) <= _HELD_TWICE


def _references_of_item(holder: dict[str, Any]) -> int:
    item = holder["item"]
    return sys.getrefcount(item)


# What `sys.getrefcount` gives for what one container holds, and one variable.
_HELD_TWICE = _references_of_item({"item": object()})


# The code of checks


def write_apart(
    source: Any,
    opened: list[Captured],
    tensors: list[Captured],
    arrays: list[Captured],
    note: Callable[[str, Captured], int],
) -> None:
    """Write `apart(A)`: None if nothing is in the memory of open arrays, or the failing check.

    Args:
        source: receives the lines.
        opened: the open arrays.
        tensors: all tensors that a run can read.
        arrays: all arrays.
        note: gives the number of a new check.
    """
    source.begin("apart(A)")
    source.names.update(is_tied=is_tied, is_unshared=is_unshared, held=sys.getrefcount)
    source.take((*tensors, *arrays))
    for name, parts in (("tensors", tensors), ("arrays", arrays)):
        source.line(f"{name} = ({''.join(f'{source.part(part)}, ' for part in parts)})")
    for part in opened:
        number = note(f"something is in the memory of {part.label} now", part)
        source.line(f"if is_tied({source.part(part)}, tensors, arrays): return {number}")
    source.line("return None")


def ask_apart(source: Any, opened: list[Captured]) -> None:
    """Write the test whether open arrays are in no other memory, which references show first."""
    source.take(opened)
    names = map(source.part, opened)
    apart = " and ".join(f"is_unshared(held({name}), {name})" for name in names)
    source.line(f"number = None if {apart} else apart(A)")
    source.line("if number is not None: return number")


_ARRAYS = (CaptureKind.ARRAY, CaptureKind.OPEN_ARRAY)
