"""Results of analysers as plain numbers and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bendtrace._later import required_pandas
from bendtrace.errors import InputError

if TYPE_CHECKING:
    import pandas

__all__ = ["data_frame", "plain_results"]


def plain_results(value: Any) -> Any:
    """Return results with numbers and lists in the place of tensors.

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
        results: dicts in dicts, the innermost of which hold numbers and tensors by name.
        levels: what the keys of the outer ones are.
        per_unit: whether there is a row for each element of the tensors, which have to be of one
            shape within a node; else tensors of more than one element are arrays in the cells.

    Raises:
        InputError: tensors of one node are of different shapes.
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
    pandas = required_pandas()
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
        pandas.MultiIndex.from_tuples(keys, names=names)
        if len(names) > 1 and keys
        else pandas.Index([key[0] for key in keys], name=names[0])
    )
    columns = pandas.Index(list(dict.fromkeys(name for row in rows for name in row)), dtype=object)
    return pandas.DataFrame(rows, index=index, columns=columns)  # type: ignore[no-any-return]


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
            f"results of {key[0]!r} are of different shapes, so there is no row for each unit: "
            f"{listed}"
        )
    shape = shapes.pop() if shapes else ()
    flat = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    others = {name: _cell(value) for name, value in found.items() if name not in tensors}
    for number, unit in enumerate(product(*map(range, shape))):
        own = {name: values[number] for name, values in flat.items()}
        row = {name: own.get(name, others.get(name)) for name in found}
        yield ((unit[0] if len(unit) == 1 else unit or 0),), row
