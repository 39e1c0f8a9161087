"""The tensor in what a node gives or is given, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

from bendtrace.errors import SiteError
from bendtrace.interject.interjection import Inputs
from bendtrace.interject.structure import Leaf, Shape, assemble, describe, take_apart

__all__ = ["differing", "each_exchanged", "exchanged", "first_exchanged", "unlike"]


def exchanged(value: Any, path: str, said: str, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Exchange the one tensor in what a node gives.

    Args:
        value: what it gives.
        path: the node.
        said: how the site was given.
        change: makes another tensor, or returns None.

    Returns:
        The value with the other tensor, or None.

    Raises:
        SiteError: there is not one tensor in it.
    """
    if isinstance(value, Tensor):
        return change(value)
    shape, found = take_apart(value)
    tensors = [i for i, item in enumerate(found) if isinstance(item, Tensor)]
    if len(tensors) != 1:
        which = f"{len(tensors)} tensors in it" if tensors else "no tensor in it"
        raise SiteError(
            f"{said} gives {describe(value)} with {which}: say which part is meant, as in "
            f"'{path}.output|sub_0' for the call of a module, '{path}|sub_0' for an op",
            said,
        )
    made = change(found[tensors[0]])
    if made is None:
        return None
    found[tensors[0]] = made
    return assemble(shape, found)


def first_exchanged(
    inputs: Inputs, path: str, change: Callable[[Tensor], Tensor | None]
) -> Inputs | None:
    """Exchange the first tensor that a node is given.

    Raises:
        SiteError: there is none.
    """
    shape, found = take_apart((tuple(inputs), inputs.kwargs))
    first = next((i for i, value in enumerate(found) if isinstance(value, Tensor)), None)
    if first is None:
        raise SiteError(f"{path or 'the model'} is given no tensor", path)
    made = change(found[first])
    if made is None:
        return None
    found[first] = made
    return Inputs(*assemble(shape, found))


def each_exchanged(value: Any, path: str, change: Callable[[str, Tensor], Tensor | None]) -> Any:
    """Exchange tensors in what a node gives, each of which is known by the path of the part."""
    shape, found = take_apart(value)
    changed = False
    for i, name in enumerate(_names(shape, ())):
        if isinstance(found[i], Tensor):
            made = change(f"{path}|{name}", found[i])
            if made is not None:
                found[i], changed = made, True
    return assemble(shape, found) if changed else None


def _names(shape: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of what is in a container, as node paths have them."""
    if isinstance(shape, Leaf):
        yield ".".join(path)
    elif isinstance(shape, Shape):
        fields = getattr(shape.kind, "_fields", None) or _fields_of(shape.kind)
        for key, item in zip(shape.keys, shape.items, strict=True):
            name = f"sub_{key}" if isinstance(key, int) else str(key)
            name = fields[key] if fields else name
            yield from _names(item, (*path, name))
        for name, item in zip(shape.names, shape.attributes, strict=True):
            yield from _names(item, (*path, str(name)))


def _fields_of(kind: type) -> list[str]:
    """Return the names of the fields of what torch's functions return, such as `max`."""
    if not issubclass(kind, tuple) or not hasattr(kind, "n_sequence_fields"):
        return []
    return [name for name, held in vars(kind).items() if type(held) is MemberDescriptorType]


def differing(source: Mapping[int, Tensor] | None, target: Mapping[int, Tensor] | None) -> str:
    """Say why what a node gave in one run cannot take the place of what it gave in another.

    Args:
        source: the passes in the one; None where it did not come by.
        target: those in the other.

    Returns:
        The reason, with `{source}` and `{target}` for the names of the runs; "" if it can.
    """
    if not source or not target:
        return (
            "the {source} run did not come by it"
            if not source
            else ("the {target} run did not come by it")
        )
    if source.keys() != target.keys():
        return (
            f"it came up {len(source)} times in the {{source}} run and {len(target)} times in the "
            "{target} run; name a pass, as in 'relu:1'"
        )
    for number, value in source.items():
        if why := unlike(value, target[number]):
            return f"in the {{source}} run it is {why} in the {{target}} run"
    return ""


def unlike(source: Tensor, target: Tensor) -> str:
    """Say how two tensors are not of the same kind; "" if they are."""
    if source.shape != target.shape:
        return f"of shape {tuple(source.shape)}, and {tuple(target.shape)}"
    if source.dtype != target.dtype:
        return f"of {source.dtype}, and of {target.dtype}"
    if source.device != target.device:
        return f"on {source.device}, and on {target.device}"
    return ""
