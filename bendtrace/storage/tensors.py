"""A tensor as bytes: which tensors can be stored, in which form, and how they come back.

The bits of a tensor are stored, never converted: the payload of a NaN, the sign of a zero and
types that torch can hardly compute with come back as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Layout", "bits_of", "code_of", "layout_of", "stored_shape", "tensor_of", "why_not"]

# The types that every version of the safetensors package knows. Complex numbers are stored as
# pairs of what they consist of, all others as bytes.
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # bytes copied to the CPU at a time


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        strides: its strides, in elements. Gaps between elements are closed when it is stored; the
            order of the dimensions, and those it was expanded along (stride 0), are kept.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def expanded(self) -> tuple[int, ...]:
        """The dimensions along which all elements are the same ones in memory."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(d for d, (size, stride) in enumerate(pairs) if stride == 0 and size > 1)

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape without what it was expanded by."""
        expanded = self.expanded
        return tuple(1 if d in expanded else size for d, size in enumerate(self.shape))

    @property
    def nbytes(self) -> int:
        """The number of bytes that are stored."""
        count = self.dtype.itemsize
        for size in self.kept:
            count *= size
        return count


def why_not(tensor: Tensor) -> str | None:
    """Say why a tensor cannot be stored; None if it can be."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it belongs to a transform of functorch"
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"it is a {type(tensor).__qualname__}, a subclass of Tensor"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return f"it is quantised ({tensor.dtype})"
    if tensor.is_meta:
        return "it is on the meta device and has no content"
    if tensor.dtype.itemsize not in (*_INTEGERS, 16):
        return f"its elements have {tensor.dtype.itemsize} bytes ({tensor.dtype})"
    return None


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout that a tensor comes back with."""
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    expanded = Layout(tensor.dtype, shape, strides).expanded
    kept = tuple(1 if d in expanded else size for d, size in enumerate(shape))
    like = torch.empty_strided(kept, strides, dtype=torch.uint8, device="meta")
    dense = torch.empty_like(like).stride()
    restored = tuple(0 if d in expanded else stride for d, stride in enumerate(dense))
    return Layout(tensor.dtype, shape, restored)


def code_of(dtype: torch.dtype) -> str:
    """Return the name that a file has for the type of what is stored."""
    return _CODES.get(dtype.to_real() if dtype.is_complex else dtype, "U8")


def stored_shape(layout: Layout) -> tuple[int, ...]:
    """Return the shape in the file: complex numbers are pairs, unknown types single bytes."""
    kept = layout.kept
    if layout.dtype.is_complex:
        return (*kept, 2)
    return kept if layout.dtype in _CODES else (*kept, layout.dtype.itemsize)


def bits_of(tensor: Tensor, layout: Layout) -> Iterator[memoryview]:
    """Yield the content of a tensor in row-major order, piece by piece.

    Copy-on-write tensors stay so: they are only ever read by torch, into a buffer of ours. Each
    piece is valid until the next one is asked for.
    """
    if layout.nbytes == 0:
        return
    plain = tensor.detach().resolve_conj().resolve_neg()
    for dimension in layout.expanded:
        plain = plain.narrow(dimension, 0, 1)
    if plain._is_zerotensor():
        plain = plain.clone()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    dense = plain.view(_INTEGERS[plain.dtype.itemsize]).contiguous()
    # Not reshape: a single element can keep a stride of its own, which bars it from being viewed.
    bits = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    buffer = torch.empty(min(bits.numel(), _CHUNK), dtype=torch.uint8, device="cpu")
    raw = (ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK]
        buffer[: piece.numel()].copy_(piece)
        yield memoryview(raw).cast("B")[: piece.numel()]


def tensor_of(layout: Layout, stored: Tensor) -> Tensor:
    """Return the tensor that stored bytes (uint8 of one dimension) are the content of."""
    kept = layout.kept
    plain = stored.view(layout.dtype).reshape(kept)
    strides = tuple(
        plain.stride(d) if d in layout.expanded else stride
        for d, stride in enumerate(layout.strides)
    )
    if strides != plain.stride():
        integer = _INTEGERS.get(layout.dtype.itemsize, torch.complex128)
        strided = torch.empty_strided(kept, strides, dtype=integer, device="cpu")
        plain = strided.copy_(plain.view(integer)).view(layout.dtype)
    return plain.expand(layout.shape)
