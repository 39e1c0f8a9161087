"""Names of layers: `conv2d_3_7` is the third convolution, and the seventh layer of all."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from bendtrace.recording.functions import METADATA, SHAPES, name_of
from bendtrace.recording.tape import Op, OpKind, TensorMeta

__all__ = ["Layer", "Namer", "layer_type", "nbytes_of", "number_type", "tensors_of"]


@dataclass(slots=True)
class Layer:
    """What has one name: all passes of one op, at one place of one module.

    Attributes:
        layer_type: what it is called after.
        number: how many layers of that type came before it, plus 1.
        position: how many layers came before it; None for numbers, which are no layers.
        passes: how often it has been passed so far.
    """

    layer_type: str
    number: int
    position: int | None
    passes: int = 0

    @property
    def short_name(self) -> str:
        """The name without the position."""
        return f"{self.layer_type}_{self.number}"

    @property
    def name(self) -> str:
        """The name."""
        return self.short_name if self.position is None else f"{self.short_name}_{self.position}"


class Namer:
    """Names what ops give, in the order in which they do.

    Attributes:
        count: how many layers have been named, each pass counting for one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._layers: dict[Any, Layer] = {}
        self._of_type: dict[str, int] = {}
        self._positions = 0

    def name(self, op: Op, element: tuple[Any, ...] = ()) -> tuple[Layer, int]:
        """Return the layer of a tensor that an op gave, and which pass of it this is."""
        return self._pass(op, layer_type(op), element, is_layer=True)

    def name_number(self, op: Op, kind: str) -> tuple[Layer, int]:
        """Return how a number is called, and which pass this is."""
        # Of a shape that was read once, several sizes can be used.
        element = op.args[1:] if op.target is operator.getitem else ()
        return self._pass(op, kind, element, is_layer=False)

    def name_output(self) -> tuple[Layer, int]:
        """Return the layer of the next output of the run."""
        return self._pass(None, "output", (), is_layer=True)

    def _pass(
        self, op: Op | None, kind: str, element: tuple[Any, ...], *, is_layer: bool
    ) -> tuple[Layer, int]:
        self.count += is_layer
        key: Any = object()
        if op is not None and op.site is not None:
            key = (kind, id(op.scope.module), op.scope.path, op.site.identity, element)
        layer = self._layers.get(key)
        if layer is None:
            number = self._of_type[kind] = self._of_type.get(kind, 0) + 1
            layer = self._layers[key] = Layer(kind, number, self._positions if is_layer else None)
            self._positions += is_layer
        layer.passes += 1
        return layer, layer.passes


def layer_type(op: Op) -> str:
    """Return what a tensor is called after: the function that gave it, as one word."""
    if op.kind is OpKind.INPUT:
        return "input"
    if op.kind is OpKind.UNKNOWN:
        return "unknown"
    return "".join(char for char in name_of(op.target).lower() if char.isalnum()) or "op"


def number_type(op: Op, ops: list[Op]) -> str | None:
    """Return what a number is called after; None for what is none, or not worth a name."""
    if type(op.meta) not in (int, float, bool, complex):
        return None
    if op.kind is OpKind.INPUT:
        return "input"
    if op.kind is OpKind.CALL:
        return None if op.target in METADATA else layer_type(op)
    if op.kind is not OpKind.SCALAR:
        return None
    source = op
    while source.kind is OpKind.SCALAR and source.target is operator.getitem:
        source = ops[source.args[0].index]
    if source is op:
        return f"{type(op.meta).__name__}{layer_type(op)}"
    return "size" if source.target in SHAPES else layer_type(source)


def tensors_of(meta: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], TensorMeta]]:
    """Return the tensors in what is kept of an op's result, with the keys that lead to them."""
    if isinstance(meta, TensorMeta):
        return [(path, meta)]
    found = []
    if isinstance(meta, tuple):
        for position, item in enumerate(meta):
            found += tensors_of(item, (*path, position))
    return found


def nbytes_of(meta: TensorMeta) -> int:
    """Return how many bytes a tensor takes; dimensions that are ragged do not count."""
    count = 1
    for size in meta.shape:
        count *= size if type(size) is int and size >= 0 else 1
    return count * meta.dtype.itemsize
