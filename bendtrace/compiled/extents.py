"""How many things a run has picked, where that depends on values: as tensors.

A compiled graph has such sizes as symbols, and a compiler may come to take a symbol for what the
code makes of it (broadcast with three, it has to be three). A guard must not be tested with what
was taken for granted. So it is tested with the number itself, counted anew in the mask that the
things were picked with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bendtrace.compiled.probing import Findings
from bendtrace.recording.functions import name_of
from bendtrace.recording.recorder import Recording
from bendtrace.recording.structure import Instance
from bendtrace.recording.tape import Op, OpKind, Ref, TensorMeta
from bendtrace.recording.writes import works_in_place

__all__ = ["Extents", "Unknown"]


class Unknown(Exception):
    """A size depends on values in a way that is not followed."""


class Extents:
    """Follows sizes back to the masks that they were counted in.

    Args:
        recording: the run.
        findings: what a probe found out about it.

    Attributes:
        varying: ops whose result has a size, or is a number, that depends on values, or may.
    """

    def __init__(self, recording: Recording, findings: Findings) -> None:
        self._ops = recording.tape.ops
        self._findings = findings
        self.varying: set[int] = set()
        for op in self._ops:
            if op.index in findings.roots or self._varies(op):
                self.varying.add(op.index)

    def _varies(self, op: Op) -> bool:
        refs = op.operands
        if _gives_back_its_first(op):
            refs = refs[:1]  # it gives that one back, whatever was added to it
        return any(index in self.varying for index in refs)

    def mask(self, root: int) -> int:
        """Return the op whose nonzero elements a root has picked.

        Raises:
            Unknown: it picks in another way.
        """
        op = self._ops[root]
        name = name_of(op.target)
        refs = [value.index for value in op.args if type(value) is Ref]
        if name in ("nonzero", "argwhere") or (name == "where" and len(op.args) == 1):
            return refs[0]
        if (
            name == "masked_select"
            and len(refs) == 2
            and self._shape(refs[0]) == self._shape(refs[1])
        ):
            return refs[1]
        if self._is_masked(op):
            return refs[1]
        raise Unknown(f"how many things {name} gives depends on values")

    def origin(self, index: int, dim: int) -> int | None:
        """Return the root that a dimension has its size from; None if it does not depend on values.

        Raises:
            Unknown: it is not followed that far.
        """
        if index not in self.varying:
            return None
        op = self._ops[index]
        dim %= max(1, len(self._shape(index)))
        if index in self._findings.roots:
            self.mask(index)
            return index if dim == 0 else None
        name = name_of(op.target)
        given = op.args[0].index if op.args and type(op.args[0]) is Ref else None
        if given is None:
            raise Unknown(f"the size of what {name} gives depends on values")
        if op.kind is OpKind.SCALAR:
            return self._of_element(given, dim)
        shape = self._shape(given)
        if name in ("squeeze", "unsqueeze") and len(op.args) == 2 and type(op.args[1]) is int:
            at = op.args[1] % (len(shape) + (name == "unsqueeze"))
            if name == "unsqueeze":
                return None if dim == at else self.origin(given, dim - (dim > at))
            if len(shape) == len(self._shape(index)):
                return self.origin(given, dim)
            if self.origin(given, at) is None:
                return self.origin(given, dim + (dim >= at))
        elif name in ("__getitem__", "getitem", "select"):
            return self._of_index(op, given, dim)
        elif _gives_back_its_first(op):
            return self.origin(given, dim)
        elif name in _ALIKE and not any(type(value) is Ref for value in op.args[1:]):
            return self.origin(given, dim)
        elif name == "linear" and dim < len(shape) - 1:
            return self.origin(given, dim)
        raise Unknown(f"the size of what {name} gives depends on values")

    def _of_element(self, whole: int, dim: int) -> int | None:
        """The origin of an element of what an op gave."""
        op = self._ops[whole]
        name = name_of(op.target)
        if whole in self._findings.roots:
            self.mask(whole)
            return whole
        if name == "unbind" and type(op.args[0]) is Ref:
            at = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
            if type(at) is int:
                at %= len(self._shape(op.args[0].index))
                if self.origin(op.args[0].index, at) is None:
                    return self.origin(op.args[0].index, dim + (dim >= at))
        raise Unknown(f"the size of what {name} gives depends on values")

    def _of_index(self, op: Op, given: int, dim: int) -> int | None:
        key = op.args[1]
        if type(key) is Ref:  # rows picked by their numbers
            picked = self._shape(key.index)
            if len(picked) == 1 and not self._is_masked(op):
                return self.origin(key.index, 0) if dim == 0 else self.origin(given, dim)
        keys = key.items if isinstance(key, Instance) else key
        keys = keys if isinstance(keys, (tuple, list)) else (keys,)
        if all(k is None or type(k) is int or k == slice(None) for k in keys):
            at = gone = 0
            for k in keys:
                if type(k) is int:
                    if self.origin(given, gone) is not None:
                        break
                    gone += 1
                    continue
                if at == dim:
                    return None if k is None else self.origin(given, gone)
                at, gone = at + 1, gone + (k is not None)
            else:
                return self.origin(given, dim - at + gone)
        raise Unknown("the size of what an index gives depends on values")

    def _is_masked(self, op: Op) -> bool:
        if op.target is not Tensor.__getitem__ or type(op.args[1]) is not Ref:
            return False
        meta = self._ops[op.args[1].index].meta
        return isinstance(meta, TensorMeta) and meta.dtype in (torch.bool, torch.uint8)

    def _shape(self, index: int) -> tuple[Any, ...]:
        meta = self._ops[index].meta
        if not isinstance(meta, TensorMeta):
            raise Unknown("the size of what is no tensor depends on values")
        return meta.shape


def _gives_back_its_first(op: Op) -> bool:
    first = op.args[0] if op.args else None
    return works_in_place(op) and "out" not in op.kwargs and type(first) is Ref


# What gives a tensor of the same sizes as its first argument.
_ALIKE = frozenset(
    {
        "abs", "add", "bool", "clone", "contiguous", "cpu", "cuda", "detach", "div", "double", "eq",
        "float", "ge", "gelu", "gt", "int", "le", "logical_not", "long", "lt", "mul", "ne", "neg",
        "relu", "sigmoid", "silu", "softmax", "sub", "tanh", "to",
    }
)  # fmt: skip
