"""Comparing values bit by bit, for the tests of storage."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> bytes:
    """The content of a tensor in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    flat = (
        tensor.view(INTEGERS[tensor.dtype.itemsize])
        .flatten()
        .clone(memory_format=torch.contiguous_format)
    )
    return bytes(flat.view(torch.uint8).tolist())


def assert_same(read: Tensor, tensor: Tensor) -> None:
    assert type(read) is Tensor
    assert not read.requires_grad
    assert (read.shape, read.dtype, read.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert raw(read) == raw(tensor)


def of_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bits, so with all kinds of NaN."""
    count = math.prod(shape) * dtype.itemsize
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return content.view(dtype).reshape(shape)


def exact(value: Any) -> Any:
    """Something that is equal only for the same values of the same types, bit by bit."""
    if type(value) is float:
        return float, struct.pack(">d", value)
    if type(value) is complex:
        return complex, struct.pack(">dd", value.real, value.imag)
    if type(value) in (list, tuple):
        return type(value), list(map(exact, value))
    if type(value) is dict:
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if type(value) is slice:
        return slice, exact([value.start, value.stop, value.step])
    return type(value), value


class FullDisk:
    """Stands for `os.write` when there is room for some bytes only."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, fd: int, content: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.write(fd, content[: self.room])
        self.room -= written
        return written
