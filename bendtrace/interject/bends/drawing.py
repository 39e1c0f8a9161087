"""Random numbers of callbacks: drawn with their own generators, and kept for each node."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bendtrace.errors import BendError, BendShapeError, InputError
from bendtrace.interject.bends.bend import Bend
from bendtrace.interject.interjection import NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = ["DrawingBend", "along", "shuffled", "sizes_of"]

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass
class _Drawn:
    """The numbers of one node.

    Attributes:
        shape: shape of the tensor that they were drawn for.
        sizes: the sizes in it that they depend on.
        numbers: the numbers, with these sizes.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    numbers: Tensor


class DrawingBend(Bend):
    """A callback that draws random numbers for each node separately.

    The numbers come from its own generators: torch's global generators are neither read nor
    advanced. With a seed, the numbers depend only on the seed and the sizes. Without a seed, they
    differ from node to node, and change after `reset`.

    Args:
        seed: makes the numbers reproducible.
        dim: dimensions along which numbers differ; None for all, with a number for each element.

    Attributes:
        seed: the seed; None for none.
        dim: the dimensions; None for all.
        entropy: what the numbers depend on if there is no seed, besides the node and the sizes.
    """

    self_contained = True

    def __init__(self, seed: int | None, dim: int | Sequence[int] | None) -> None:
        self.seed: int | None = _checked_seed(seed)
        self.dim: int | tuple[int, ...] | None = _checked_dim(dim)
        self.entropy: bytes = os.urandom(16)
        self._drawn: dict[str, _Drawn] = {}

    def reset(self) -> None:
        """Forget the numbers drawn so far. With a seed, the same numbers are drawn again."""
        self.entropy = os.urandom(16)
        self._drawn = {}

    def kept(self, tensor: Tensor, at: NodePass, draw: Draw) -> Tensor:
        """Return the numbers of a node, broadcastable to a tensor; they are drawn the first time.

        Args:
            tensor: the tensor.
            at: the node.
            draw: draws numbers of some sizes with a generator.

        Raises:
            BendShapeError: the numbers were drawn for other sizes.
        """
        drawn = self._drawn.get(at.path)
        if drawn is None:
            drawn = self._draw(tensor, at, draw)
        sizes = sizes_of(tensor, self.dim, self, at)
        if sizes != drawn.sizes:
            raise self._misfit(drawn, tensor, at)
        if drawn.numbers.device != tensor.device:
            with torch.inference_mode(False):
                drawn.numbers = drawn.numbers.to(tensor.device)
        return along(drawn.numbers, tensor, self.dim)

    def drawn(self, at: NodePass, like: TensorMeta) -> Tensor | str:
        """Return the numbers of a node, or why there are none for tensors like some."""
        drawn = self._drawn.get(at.path)
        if drawn is None:
            return "it has drawn no numbers for the node so far"
        if drawn.numbers.device != like.device:
            return "its numbers are on another device"
        return drawn.numbers

    def once(self, tensor: Tensor, at: NodePass, draw: Draw, number: int) -> Tensor:
        """Return fresh numbers, broadcastable to a tensor, for a single use.

        Args:
            tensor: the tensor.
            at: the node.
            draw: draws numbers of some sizes with a generator.
            number: how many times this was called before.
        """
        sizes = sizes_of(tensor, self.dim, self, at)
        numbers = draw(sizes, self._generator(at.path, number))
        return along(numbers.to(tensor.device), tensor, self.dim)

    def _draw(self, tensor: Tensor, at: NodePass, draw: Draw) -> _Drawn:
        sizes = sizes_of(tensor, self.dim, self, at)
        # Tensors made in inference mode could never be part of a backward pass.
        with torch.inference_mode(False):
            numbers = draw(sizes, self._generator(at.path, 0))
        return self._drawn.setdefault(at.path, _Drawn(tuple(tensor.shape), sizes, numbers))

    def _generator(self, path: str, number: int) -> torch.Generator:
        source = self.entropy + path.encode() if self.seed is None else b"%d" % self.seed
        digest = hashlib.blake2b(b"%d " % number + source, digest_size=8).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(digest))

    def _misfit(self, drawn: _Drawn, tensor: Tensor, at: NodePass) -> BendShapeError:
        old, new = drawn.shape, tuple(tensor.shape)
        same = _in_common(old, new)
        what = type(self).__name__
        if self.dim is None:
            known = f"shape {old}"
        else:
            known = f"the sizes {drawn.sizes} along dim={self.dim} of shape {old}"
        message = (
            f"{what} at {at.path!r} drew its numbers for {known}, and now received shape {new}"
        )
        if same:
            choices = " or ".join(f"dim={dim} (size {new[dim]} in both)" for dim in same)
            message += f": pass {what} {choices}, so that other sizes may change, or call reset()"
        else:
            message += ": no size is the same in both, so only reset() makes it draw new numbers"
        return BendShapeError(message, at.path, old, new, same)


def sizes_of(
    tensor: Tensor, dim: int | tuple[int, ...] | None, callback: Bend, at: NodePass
) -> tuple[int, ...]:
    """Return the sizes of a tensor along some dimensions, in the order of the dimensions."""
    if dim is None:
        return tuple(tensor.shape)
    dims = (dim,) if isinstance(dim, int) else dim
    for one in dims:
        if not -tensor.dim() <= one < tensor.dim():
            raise BendError(
                f"{callback!r} has dim={one}, but the tensor at {at.path!r} has shape "
                f"{tuple(tensor.shape)}",
                at.path,
            )
    return tuple(tensor.shape[one] for one in sorted({one % tensor.dim() for one in dims}))


def along(numbers: Tensor, tensor: Tensor, dim: int | tuple[int, ...] | None) -> Tensor:
    """Return numbers for some dimensions of a tensor in a shape that broadcasts to it."""
    if dim is None:
        return numbers
    dims = {one % tensor.dim() for one in ((dim,) if isinstance(dim, int) else dim)}
    shape = [size if place in dims else 1 for place, size in enumerate(tensor.shape)]
    return numbers.reshape(shape)


def _in_common(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions, counted from the end, with the same size in both shapes."""
    count = min(len(old), len(new))
    return tuple(dim for dim in range(-count, 0) if old[dim] == new[dim])


def _checked_seed(seed: int | None) -> int | None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise InputError(f"seed has to be an int or None, not {seed!r}")
    return seed


def _checked_dim(dim: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if dim is None or (isinstance(dim, int) and not isinstance(dim, bool)):
        return dim
    dims: tuple[Any, ...] = tuple(dim) if isinstance(dim, Sequence) else ()
    if not dims or not all(isinstance(one, int) and not isinstance(one, bool) for one in dims):
        raise InputError(f"dim has to be an int, several ints or None, not {dim!r}")
    return dims


def shuffled(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the numbers from 0 on in a random order, in a shape."""
    count = torch.Size(sizes).numel()
    return torch.randperm(count, generator=generator, device="cpu").reshape(sizes)
