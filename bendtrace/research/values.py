"""The values of nodes as rows of samples, and results as plain numbers and tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bendtrace.errors import InputError
from bendtrace.log.nodes import identifier
from bendtrace.python.lazy import required_pandas
from bendtrace.tape.scalars import TRACED, plain

if TYPE_CHECKING:
    import pandas

Keep = int | tuple[int, ...] | Literal["units"]


def parts_of(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Split a value into tensors, with their paths.

    Args:
        path: path of the node that returned it.
        value: a tensor, a number (one sample without dimensions), or a nested tuple, list, mapping
            or dataclass of such values. Parts of containers have the paths that insertions use for
            them: `max|values`, `lstm.output|sub_1.sub_0`. None, strings and other objects in
            containers are left out.

    Raises:
        InputError: it contains neither a tensor nor a number, or two parts have the same path.

    Example:
        >>> import torch
        >>> [path for path, _ in parts_of("lstm", (torch.ones(2), {"h": torch.ones(1)}, None))]
        ['lstm|sub_0', 'lstm|sub_1.h']
    """
    found = list(_parts(path, value))
    if not found and not _is_empty(value):
        raise InputError(
            f"an analyser needs tensors or numbers; {path!r} returned a "
            f"{type(value).__qualname__} without any"
        )
    if len({part for part, _ in found}) < len(found):
        counts = Counter(part for part, _ in found)
        twice = next(part for part, count in counts.items() if count > 1)
        raise InputError(
            f"two parts of the {type(value).__qualname__} that {path!r} returned have the same "
            f"path, {twice!r}: analyse the nodes that return them"
        )
    yield from found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if type(value) in TRACED:
        value = plain(value)
    if isinstance(value, Tensor):
        yield path, _readable(path, value)
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    else:
        for name, item in _items(value):
            yield from _parts(f"{path}{'.' if '|' in path else '|'}{name}", item)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield identifier(str(key)), item
    elif isinstance(value, (tuple, list)):
        # Those of named tuples, and of what torch returns, such as `torch.return_types.max`.
        names = getattr(type(value), "_fields", getattr(type(value), "__match_args__", ()))
        for number, item in enumerate(value):
            yield (names[number] if number < len(names) else f"sub_{number}"), item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


def _is_empty(value: Any) -> bool:
    if value is None:
        return True
    is_container = isinstance(value, (Mapping, tuple, list)) or dataclasses.is_dataclass(value)
    return is_container and all(_is_empty(item) for _, item in _items(value))


def _readable(path: str, value: Tensor) -> Tensor:
    value = value.detach()
    whole = getattr(value, "full_tensor", None)
    if callable(whole):  # a DTensor, which each process has a part of
        value = whole()
    if value.is_complex():
        raise InputError(
            f"{path!r} returned complex numbers, which have no order and several variances: "
            "analyse `torch.view_as_real` or the absolute value of it, at a node after it"
        )
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise InputError(
            f"{path!r} returned a tensor of layout {value.layout}, nested or quantized; an "
            "analyser needs dense tensors"
        )
    if value.dtype == torch.uint64:
        raise InputError(
            f"{path!r} returned uint64, which few operations support: convert it to int64"
        )
    # Those that torch has hardly any operations for (2.13), as what holds all their values.
    value = value.to(_WIDER.get(value.dtype, value.dtype))
    # Of an inference tensor nothing could be kept, not even a view.
    return value.clone() if value.is_inference() else value


_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64} | {
    dtype: torch.float32
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
}


def check_keep(keep: Any) -> Keep:
    """Return the dimensions with separate statistics, as an int, a tuple or `"units"`."""
    if keep == "units" or (type(keep) is int and keep != 0):
        return keep  # type: ignore[no-any-return]
    if isinstance(keep, Sequence) and not isinstance(keep, str):
        dims = tuple(keep)
        if all(type(dim) is int and dim != 0 for dim in dims) and len(set(dims)) == len(dims):
            return dims
    raise InputError(
        f"keep={keep!r}: pass a dimension with separate statistics (1 for channels, -1 for the "
        'last), several, () for none, or "units" for all but the first; dimension 0 counts '
        "the samples"
    )


def rows_of(value: Tensor, keep: Keep) -> Tensor:
    """Return a value as rows: one for each sample and each position that is not kept.

    Args:
        value: (batch, ...); a tensor without dimensions is one sample.
        keep: the dimensions to keep, in that order; `"units"` for all but the first. A tensor with
            fewer than two dimensions has none to keep, whatever `keep` is.

    Returns:
        (n, *kept), with the samples in order, and the positions of a sample in order.

    Raises:
        InputError: the value does not have the dimension, or it is the batch dimension.

    Example:
        >>> import torch
        >>> image = torch.zeros(8, 3, 5, 5)
        >>> [tuple(rows_of(image, keep).shape) for keep in (1, -1, "units", ())]
        [(200, 3), (120, 5), (8, 3, 5, 5), (600,)]
    """
    if value.dim() == 0:
        return value.reshape(1)
    if value.dim() == 1:
        return value
    if keep == "units":
        return value
    dims = (keep,) if isinstance(keep, int) else tuple(keep)
    found = [dim + value.dim() if dim < 0 else dim for dim in dims]
    if any(not 0 < dim < value.dim() for dim in found) or len(set(found)) != len(found):
        raise InputError(
            f"keep={keep!r} does not fit a value of shape {tuple(value.shape)}, whose first "
            "dimension counts the samples"
        )
    others = [dim for dim in range(value.dim()) if dim not in found]
    shape = [value.shape[dim] for dim in found]
    moved = value.permute(*others, *found)
    count = 1
    for dim in others:
        count *= value.shape[dim]
    return moved.reshape(count, *shape)


def accumulator(rows: Tensor) -> Tensor:
    """Return rows in the precision for sums: float64, or float32 if the device has no float64.

    Integers are exact up to 2**53, and bools count as 0 and 1.
    """
    return rows.detach().to(torch.float32 if rows.device.type == "mps" else torch.float64)


def plain_results(value: Any) -> Any:
    """Return results as numbers and lists instead of tensors.

    Example:
        >>> import torch
        >>> plain_results({"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)})
        {'mean': [1.0, 2.0], 'count': 3}
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_results(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_results(item) for item in value]
    return value


def data_frame(
    results: Mapping[Any, Any], levels: tuple[str, ...], *, per_unit: bool = False
) -> pandas.DataFrame:
    """Return a table of results, with a row for each innermost dict.

    Args:
        results: nested dicts, the innermost of which map names to numbers and tensors.
        levels: the kinds of keys of the outer ones.
        per_unit: whether there is a row for each element of the tensors, which need equal shapes
            within a node; else tensors with more than one element are arrays in the cells.

    Raises:
        InputError: tensors of one node have different shapes.
        ImportError: pandas is not installed.

    Example:
        >>> import torch
        >>> data_frame({"relu": {"count": 4, "mean": torch.tensor([1.0, 2.0])}}, ("node",),
        ...            per_unit=True)
                   count  mean
        node unit
        relu 0         4   1.0
             1         4   2.0
    """
    frames = required_pandas()
    keys: list[tuple[Any, ...]] = []
    rows: list[dict[Any, Any]] = []
    for key, found in _innermost(results, len(levels)):
        for unit, row in (
            _units(key, found)
            if per_unit
            else [((), {name: _cell(value) for name, value in found.items()})]
        ):
            keys.append((*key, *unit))
            rows.append(row)
    names = (*levels, "unit") if per_unit else levels
    index = (
        frames.MultiIndex.from_tuples(keys, names=names)
        if len(names) > 1 and keys
        else frames.Index([key[0] for key in keys], name=names[0])
    )
    columns = frames.Index(list(dict.fromkeys(name for row in rows for name in row)), dtype=object)
    return frames.DataFrame(rows, index=index, columns=columns)  # type: ignore[no-any-return]


def _innermost(
    results: Mapping[Any, Any], depth: int, key: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Mapping[Any, Any]]]:
    if depth == 0:
        yield key, results
        return
    for name, inner in results.items():
        yield from _innermost(inner, depth - 1, (*key, name))


def _cell(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.dim() == 0 else value.cpu().numpy()


def _units(
    key: tuple[Any, ...], found: Mapping[Any, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[Any, Any]]]:
    tensors = {name: v for name, v in found.items() if isinstance(v, Tensor) and v.dim() > 0}
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if len(shapes) > 1:
        listed = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            f"results of {key[0]!r} have different shapes, so there is no row for each unit: "
            f"{listed}"
        )
    shape = shapes.pop() if shapes else ()
    flat = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    others = {name: _cell(value) for name, value in found.items() if name not in tensors}
    for number, unit in enumerate(product(*map(range, shape))):
        own = {name: values[number] for name, values in flat.items()}
        row = {name: own.get(name, others.get(name)) for name in found}
        yield ((unit[0] if len(unit) == 1 else unit or 0),), row
