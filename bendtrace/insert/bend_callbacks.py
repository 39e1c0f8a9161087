"""The callbacks that scale, shift, mask, permute, mix, keep, draw or compute values."""

from __future__ import annotations

import hashlib
import numbers
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bendtrace.errors import BendError, BendShapeError, InputError
from bendtrace.insert.bend import Bend, Expression, Value, fit_to_tensor, value_of
from bendtrace.insert.interjection import (
    Effect,
    NodePass,
    chain_effects,
    depends_on,
    effect_of_value,
    keep_unchanged,
    number_operand,
    takes,
)
from bendtrace.insert.purity import effect_of_function
from bendtrace.python.checks import refuse_without_arguments
from bendtrace.tape.tape import TensorMeta


class Bias(Bend):
    """Adds a number.

    Args:
        bias: a number, a parameter, or a tensor that broadcasts with the value.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Bias(1.0)(torch.zeros(2))
        tensor([1., 1.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0) -> None:
        self.bias: Any = required_value("bias", bias)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor plus the number."""
        made: Tensor = tensor + fit_to_tensor(self.bias, tensor)
        return made

    @depends_on("bias")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _bend_effect(operator.add, self.bias, like)


class Scale(Bend):
    """Multiplies by a number.

    Args:
        scale: a number, a parameter, or a tensor that broadcasts with the value.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Scale(-2.0)(torch.ones(2))
        tensor([-2., -2.])
    """

    self_contained = True

    def __init__(self, scale: Value | Expression = 1.0) -> None:
        self.scale: Any = required_value("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times the number."""
        made: Tensor = tensor * fit_to_tensor(self.scale, tensor)
        return made

    @depends_on("scale")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        return _bend_effect(operator.mul, self.scale, like)


class Affine(Bend):
    """Multiplies by one number and adds another.

    Args:
        bias: the summand.
        scale: the factor, applied first.

    Raises:
        InputError: an argument is not a number, parameter or tensor.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Affine(bias=1.0, scale=3.0)(torch.ones(2))
        tensor([4., 4.])
    """

    self_contained = True

    def __init__(self, bias: Value | Expression = 0.0, scale: Value | Expression = 1.0) -> None:
        self.bias: Any = required_value("bias", bias)
        self.scale: Any = required_value("scale", scale)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor times `scale`, plus `bias`."""
        made: Tensor = tensor * fit_to_tensor(self.scale, tensor) + fit_to_tensor(self.bias, tensor)
        return made

    @depends_on("bias", "scale")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        scaled = _bend_effect(operator.mul, self.scale, like)
        moved = _bend_effect(operator.add, self.bias, like)
        if isinstance(scaled, str) or isinstance(moved, str):
            return scaled if isinstance(scaled, str) else moved
        if isinstance(value_of(self.scale), Tensor):
            return "a scale that is a tensor may change the dtype before the bias is fitted to it"
        return chain_effects(scaled, moved)


def _bend_effect(compute: Callable[[Any, Any], Any], value: Any, like: TensorMeta) -> Effect | str:
    operand = value_of(value)
    fit = fit_to_tensor if isinstance(operand, Tensor) else number_operand
    return effect_of_value(
        lambda tensor, given: compute(tensor, fit(given, tensor)), operand, like, compute
    )


def required_value(name: str, value: Any) -> Any:
    """Return an argument that has to be a number, a tensor or an expression."""
    if not isinstance(value, (numbers.Number, Tensor, Expression)):
        raise InputError(
            f"{name} has to be a number, a tensor or a BendingParameter, not {value!r} "
            f"({type(value).__name__})"
        )
    return value


# Random numbers of callbacks: drawn with their own generators, and kept for each node.

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


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
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise InputError(f"seed has to be an int or None, not {seed!r}")
        self.seed: int | None = seed
        self.dim: int | tuple[int, ...] | None = _check_dim(dim)
        self.entropy: bytes = os.urandom(16)
        self._numbers: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the tensors they were drawn for

    def reset(self) -> None:
        """Forget the numbers drawn so far. With a seed, the same numbers are drawn again."""
        self.entropy = os.urandom(16)
        self._numbers, self._shapes = {}, {}

    def numbers_of(self, tensor: Tensor, at: NodePass, draw: Draw) -> Tensor:
        """Return the numbers of a node, broadcastable to a tensor; they are drawn the first time.

        Args:
            tensor: the tensor.
            at: the node.
            draw: draws numbers of some sizes with a generator.

        Raises:
            BendShapeError: the numbers were drawn for other sizes.
        """
        numbers = self._numbers.get(at.path)
        if numbers is None:
            numbers = self._draw(tensor, at, draw)
        if sizes_of(tensor, self.dim, self, at) != tuple(numbers.shape):
            raise self._misfit(numbers, tensor, at)
        if numbers.device != tensor.device:
            with torch.inference_mode(False):
                numbers = self._numbers[at.path] = numbers.to(tensor.device)
        return along(numbers, tensor, self.dim)

    def drawn(self, at: NodePass, like: TensorMeta) -> Tensor | str:
        """Return the numbers of a node, or why there are none for tensors like some."""
        numbers = self._numbers.get(at.path)
        if numbers is None:
            return "it has drawn no numbers for the node so far"
        if numbers.device != like.device:
            return "its numbers are on another device"
        return numbers

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

    def _draw(self, tensor: Tensor, at: NodePass, draw: Draw) -> Tensor:
        sizes = sizes_of(tensor, self.dim, self, at)
        # Tensors made in inference mode could never be part of a backward pass.
        with torch.inference_mode(False):
            numbers = draw(sizes, self._generator(at.path, 0))
        self._shapes.setdefault(at.path, tuple(tensor.shape))
        return self._numbers.setdefault(at.path, numbers)

    def _generator(self, path: str, number: int) -> torch.Generator:
        source = self.entropy + path.encode() if self.seed is None else b"%d" % self.seed
        digest = hashlib.blake2b(b"%d " % number + source, digest_size=8).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(digest))

    def _misfit(self, numbers: Tensor, tensor: Tensor, at: NodePass) -> BendShapeError:
        old, new = self._shapes[at.path], tuple(tensor.shape)
        same = _in_common(old, new)
        what = type(self).__name__
        if self.dim is None:
            expected = f"shape {old}"
        else:
            expected = f"the sizes {tuple(numbers.shape)} along dim={self.dim} of shape {old}"
        message = (
            f"{what} at {at.path!r} drew its numbers for {expected}, and now received shape {new}"
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
    found = {_counted_dimension(tensor, one, callback, at) for one in dims}
    return tuple(tensor.shape[one] for one in sorted(found))


def _counted_dimension(tensor: Tensor, dim: int, callback: Bend, at: NodePass) -> int:
    """Return a dimension of a tensor, counted from the first one."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise BendError(
            f"{callback!r} has dim={dim}, but the tensor at {at.path!r} has shape "
            f"{tuple(tensor.shape)}",
            at.path,
        )
    return dim % tensor.dim()


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


def _check_dim(dim: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if dim is None or (isinstance(dim, int) and not isinstance(dim, bool)):
        return dim
    dims: tuple[Any, ...] = tuple(dim) if isinstance(dim, Sequence) else ()
    if not dims or not all(isinstance(one, int) and not isinstance(one, bool) for one in dims):
        raise InputError(f"dim has to be an int, several ints or None, not {dim!r}")
    return dims


def random_order(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return the numbers from 0 on in a random order, in a shape."""
    count = torch.Size(sizes).numel()
    return torch.randperm(count, generator=generator, device="cpu").reshape(sizes)


# Choosing channels by their mean.


class Chosen(NamedTuple):
    """Some channels of each example."""

    indices: Tensor  # their indices along the last dimension, the highest rank first
    shape: tuple[int, ...]  # dimensions up to the channels, with an element for each channel
    wide: tuple[int, ...]  # the same with ones after it, which broadcasts to the tensor


def choose_by_score(
    tensor: Tensor, share: Value, dim: int | None, invert: bool, callback: Bend, at: NodePass
) -> Chosen:
    """Choose the share of the channels of a tensor with the greatest mean.

    The share, from 0 to 1, is rounded to whole channels. They lie along a dimension; for None, all
    elements are one row. With `invert`, those with the smallest mean are chosen.
    """
    values = tensor.detach()
    values = values.abs() if values.is_complex() else values
    if dim is None:
        scores = values.reshape(-1)
        wide = tuple(tensor.shape)
    else:
        place = _counted_dimension(tensor, dim, callback, at)
        after = tuple(range(place + 1, tensor.dim()))
        scores = values.mean(after) if after else values
        wide = tuple(scores.shape) + (1,) * len(after)
    order = torch.argsort(scores, dim=-1, descending=not invert, stable=True)
    count = round(float(share) * scores.shape[-1])  # type: ignore[arg-type]
    return Chosen(order[..., :count], tuple(scores.shape), wide)


# Callbacks that set elements to zero.


class Mask(DrawingBend):
    """Keeps each element with some probability, and sets the others to zero.

    The elements are chosen once per node, on its first use. A higher probability keeps further
    elements in addition to those kept before.

    Args:
        prob: probability with which an element is kept.
        seed: makes the choice reproducible, and equal for all nodes.
        dim: dimensions along which to choose, so that whole channels are kept or zeroed; the other
            sizes may then change. None chooses single elements, and the shape must not change.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Mask(0.5, seed=3, dim=-2)(torch.ones(4, 2))
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.],
                [1., 1.]])
    """

    def __init__(
        self,
        prob: Value | Expression = 0.3,
        seed: int | None = None,
        dim: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed, dim)
        self.prob: Any = required_value("prob", prob)
        fraction("prob", prob, self)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with the other elements set to zero."""
        return tensor.masked_fill(~self.mask(tensor, at), 0)

    def mask(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return which elements are kept, in a shape that broadcasts to the tensor."""
        numbers = self.numbers_of(tensor, at, _uniform)
        kept: Tensor = numbers < fraction("prob", self.prob, self, at)
        return kept

    @depends_on("prob", "dim", "_numbers")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor, with the numbers that it has drawn."""
        drawn = self.drawn(at, like)
        if isinstance(drawn, str):
            return drawn
        limit = self._limit(drawn, at)
        if type(limit) not in (int, float) or not drawn.dim():
            return "its share is not a number"
        dim, sizes = self.dim, tuple(drawn.shape)

        def masked(tensor: Tensor, numbers: Tensor, limit: Tensor) -> Tensor:
            if sizes_of(tensor, dim, self, at) != sizes:
                raise ValueError("drawn for other sizes")
            return tensor.masked_fill(~(along(numbers, tensor, dim) < limit), 0)

        wide = drawn.dtype if drawn.dtype is torch.int64 else torch.float64
        limits = torch.tensor(limit, dtype=wide)
        return Effect(masked, (drawn, limits), (Mask, dim, sizes, drawn.dtype))

    def _limit(self, drawn: Tensor, at: NodePass) -> Any:
        """Return what the numbers of kept elements are less than."""
        return fraction("prob", self.prob, self, at)


class OrderedMask(Mask):
    """Keeps a share of the elements, and sets the others to zero.

    Unlike with `Mask`, the number of kept elements is fixed: the share times their number, rounded.

    Args:
        prob: share of the elements that is kept.
        seed: makes the choice reproducible, and equal for all nodes.
        dim: dimensions along which to choose; None chooses single elements.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.OrderedMask(0.5)(torch.ones(100)).sum()
        tensor(50.)
    """

    def mask(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return which elements are kept, in a shape that broadcasts to the tensor."""
        order = self.numbers_of(tensor, at, random_order)
        share = float(fraction("prob", self.prob, self, at))
        kept: Tensor = order < round(share * order.numel())
        return kept

    def _limit(self, drawn: Tensor, at: NodePass) -> Any:
        share = float(fraction("prob", self.prob, self, at))
        return round(share * drawn.numel())


class ThresholdActivation(Bend):
    """Keeps the share of channels with the greatest mean, and sets the others to zero.

    Each example is treated separately: the mean is over all dimensions after `dim`. It stores no
    numbers, so every size may change.

    Args:
        threshold: share of the channels that is kept.
        dim: the dimension of the channels. None compares all elements of the tensor.
        invert: whether to keep the channels with the smallest mean instead.

    Raises:
        InputError: an argument is invalid, such as a share outside 0 to 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.ThresholdActivation(0.5, dim=-1)(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
        tensor([[0., 4., 3., 0.]])
    """

    self_contained = True

    def __init__(
        self, threshold: Value | Expression = 0.5, dim: int | None = None, invert: bool = False
    ) -> None:
        self.threshold: Any = required_value("threshold", threshold)
        fraction("threshold", threshold, self)
        self.dim = dim
        self.invert = invert

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with the other channels set to zero."""
        share = fraction("threshold", self.threshold, self, at)
        chosen = choose_by_score(tensor, share, self.dim, self.invert, self, at)
        mask = torch.zeros(chosen.shape, dtype=torch.bool, device=tensor.device)
        mask = mask.scatter(-1, chosen.indices, True).reshape(chosen.wide)
        return tensor.masked_fill(~mask, 0)


def fraction(name: str, value: Any, callback: Bend, at: NodePass | None = None) -> Any:
    """Return the value of an argument that has to be from 0 to 1."""
    share: Any = value_of(value)
    if isinstance(share, Tensor):
        fits = not share.is_complex() and bool(((share >= 0) & (share <= 1)).all())
    else:
        fits = not isinstance(share, complex) and 0 <= share <= 1
    if not fits:
        where = f" at {at.path!r}" if at is not None else ""
        raise BendError(
            f"{name} of {type(callback).__name__}{where} has to be a share from 0 to 1, not "
            f"{share!r}",
            "" if at is None else at.path,
        )
    return share


def _uniform(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(sizes, generator=generator, dtype=torch.float32, device="cpu")


# Callbacks that add noise.


class Normal(DrawingBend):
    """Adds normal noise, or multiplies by it.

    Each use of a node draws new noise. With a seed, the sequence of noise at a node is the same
    after each `reset`.

    Args:
        std: standard deviation of the noise.
        seed: makes the noise reproducible from each `reset` on, and equal for all nodes.
        dim: dimensions along which the noise differs; None for each element.
        op: "add" adds the noise, "mul" multiplies by it.
        fresh: whether to draw new noise on each use. If not, it is drawn once per node; then only
            the sizes outside `dim` may change, and without `dim` none.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> noise = bt.bends.Normal(0.1, seed=4)
        >>> first, second = noise(torch.zeros(2)), noise(torch.zeros(2))
        >>> noise.reset()
        >>> torch.equal(noise(torch.zeros(2)), first), torch.equal(first, second)
        (True, False)
    """

    def __init__(
        self,
        std: Value | Expression = 0.3,
        seed: int | None = None,
        dim: int | Sequence[int] | None = None,
        op: Literal["add", "mul"] = "add",
        fresh: bool = True,
    ) -> None:
        super().__init__(seed, dim)
        if op not in ("add", "mul"):
            raise InputError(f"op of Normal has to be 'add' or 'mul', not {op!r}")
        self.std: Any = required_value("std", std)
        self.op = op
        self.fresh = fresh
        self._times: dict[str, int] = {}

    def reset(self) -> None:
        """Start the noise again. With a seed, the same noise follows."""
        super().reset()
        self._times = {}

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with noise."""
        draw = _complex if tensor.is_complex() else _real
        if self.fresh:
            number = self._times[at.path] = self._times.get(at.path, 0) + 1
            noise = self.once(tensor, at, draw, number)
        else:
            noise = self.numbers_of(tensor, at, draw)
        scaled: Tensor = noise.to(tensor.dtype) * fit_to_tensor(self.std, tensor)
        return tensor + scaled if self.op == "add" else tensor * scaled


def _real(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")


def _complex(sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.complex64, device="cpu")


# Callbacks that move elements.


class Permute(DrawingBend):
    """Permutes the channels, in an order drawn once per node, on its first use.

    Args:
        dim: the dimension of the channels; all other sizes may change.
        seed: makes the order reproducible, and equal for all nodes.

    Raises:
        InputError: `dim` is not an int.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Permute(-1, seed=1)(torch.arange(4.0))
        tensor([2., 3., 0., 1.])
    """

    dim: int

    def __init__(self, dim: int, seed: int | None = None) -> None:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InputError(f"dim of Permute has to be an int, not {dim!r}")
        super().__init__(seed, dim)

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with its channels in the other order."""
        order = self.numbers_of(tensor, at, random_order)
        return tensor.index_select(self.dim, order.reshape(-1))

    @depends_on("dim", "_numbers")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor, with the order that it has drawn."""
        drawn = self.drawn(at, like)
        if isinstance(drawn, str):
            return drawn
        dim, sizes = self.dim, tuple(drawn.shape)

        def permuted(tensor: Tensor, order: Tensor) -> Tensor:
            if sizes_of(tensor, dim, self, at) != sizes:
                raise ValueError("drawn for other sizes")
            return tensor.index_select(dim, order.reshape(-1))

        return Effect(permuted, (drawn,), (Permute, dim, sizes))


class ThresholdPermute(DrawingBend):
    """Permutes the channels with the greatest mean among each other.

    Each example is treated separately, as in `ThresholdActivation`; the other channels stay in
    place. The permutation is drawn once per node.

    Args:
        threshold: share of the channels that move.
        dim: the dimension of the channels; all other sizes may change. None compares all elements
            of the tensor, whose shape then must not change.
        invert: whether to move the channels with the smallest mean instead.
        seed: makes the permutation reproducible, and equal for all nodes.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.ThresholdPermute(0.5, dim=-1, seed=1)(torch.tensor([1.0, 8.0, 2.0, 9.0]))
        tensor([1., 9., 2., 8.])
    """

    dim: int | None

    def __init__(
        self,
        threshold: Value | Expression = 0.5,
        dim: int | None = None,
        invert: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed, dim)
        if isinstance(self.dim, tuple):
            raise InputError(f"dim of ThresholdPermute has to be an int or None, not {dim!r}")
        self.threshold: Any = required_value("threshold", threshold)
        fraction("threshold", threshold, self)
        self.invert = invert

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor with some of its channels permuted."""
        share = fraction("threshold", self.threshold, self, at)
        rank = self.numbers_of(tensor, at, random_order).reshape(-1)
        chosen = choose_by_score(tensor, share, self.dim, self.invert, self, at)
        places = chosen.indices.sort(dim=-1).values
        sources = places.gather(-1, rank[places].argsort(dim=-1))
        index = torch.arange(rank.numel(), device=tensor.device)
        index = index.expand(chosen.shape).scatter(-1, places, sources)
        if self.dim is None:
            return tensor.reshape(-1).gather(0, index).reshape(tensor.shape)
        index = index.reshape(chosen.wide).expand(tensor.shape)
        return tensor.gather(self.dim, index)


# Callbacks that mix the examples of a batch.


class InterpolateActivation(Bend):
    """Returns weighted sums of the examples in the batch.

    Args:
        interp_weights: a tensor, or a parameter that holds one, with one weight per example, for
            one mixture; or a row of weights for each of several mixtures. None leaves the batch as
            it is. The attribute can be set between calls.
        softmax: whether to take the softmax of each row of weights.

    Raises:
        InputError: the weights are neither a tensor nor a parameter.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.InterpolateActivation(torch.tensor([0.25, 0.75]))(torch.tensor([[4.0], [8.0]]))
        tensor([[7.]])
    """

    self_contained = True

    def __init__(
        self, interp_weights: Tensor | Expression | None = None, softmax: bool = False
    ) -> None:
        self.interp_weights: Any = required_weights(interp_weights)
        self.softmax = softmax

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the mixtures, one example for each row of weights."""
        if self.interp_weights is None:
            return tensor
        return mix_rows(tensor, value_of(self.interp_weights), self.softmax, self, at)

    @depends_on("interp_weights", "softmax")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what it does to a tensor."""
        weights = value_of(self.interp_weights)
        if weights is None:
            return Effect(keep_unchanged, (), InterpolateActivation)
        if not isinstance(weights, Tensor):
            return "its weights are not a tensor"
        softmax = self.softmax
        return effect_of_value(
            lambda tensor, weights: mix_rows(tensor, weights, softmax, self, at), weights, like,
            InterpolateActivation, softmax,
        )  # fmt: skip


def required_weights(weights: Any) -> Any:
    """Return weights that have to be a tensor, an expression or None."""
    if weights is not None and not isinstance(weights, (Tensor, Expression)):
        raise InputError(
            "weights have to be a tensor, a BendingParameter that holds one, or None, not "
            f"{weights!r}"
        )
    return weights


def mix_rows(examples: Tensor, weights: Any, softmax: bool, callback: Bend, at: NodePass) -> Tensor:
    """Return weighted sums of the rows of a tensor of shape `(n, ...)`.

    The weights are of shape `(n,)` or `(rows, n)`; with `softmax`, each row of them is replaced by
    its softmax.
    """
    fits = isinstance(weights, Tensor) and weights.dim() in (1, 2) and examples.dim() > 0
    if not fits or weights.shape[-1] != examples.shape[0]:
        shown = tuple(weights.shape) if isinstance(weights, Tensor) else repr(weights)
        count = examples.shape[0] if examples.dim() else 0
        raise BendError(
            f"{type(callback).__name__} at {at.path!r} mixes {count} examples and needs "
            f"weights of shape ({count},) or (rows, {count}), not {shown}",
            at.path,
        )
    rows = weights.to(examples).reshape(-1, examples.shape[0])
    rows = rows.softmax(-1) if softmax else rows
    made: Tensor = torch.tensordot(rows, examples, dims=1)
    return made


# Callbacks that keep the values they see, and use them later.


class Capture(Bend):
    """Keeps the outputs of nodes while it is capturing, and never changes them.

    Attributes:
        captured: for each node path, snapshots of its outputs, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> seen = bt.bends.Capture()
        >>> with seen.capture():
        ...     _ = seen(torch.ones(1, 2), "layer"), seen(torch.zeros(1, 2), "layer")
        >>> seen.captures["layer"]
        tensor([[1., 1.],
                [0., 0.]])
    """

    observes = True
    self_contained = True
    deferrable = True

    def __init__(self) -> None:
        self.captured: dict[str, list[Tensor]] = {}
        self._capturing = False

    @property
    def is_capturing(self) -> bool:
        """Return whether it is capturing."""
        return self._capturing

    def capture(self) -> AbstractContextManager[Capture]:
        """Start capturing, until `stop` or the end of a `with` statement."""
        self._capturing = True
        return self._until_stopped()

    @contextmanager
    def _until_stopped(self) -> Iterator[Capture]:
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop capturing. Captured values stay."""
        self._capturing = False

    def reset(self) -> None:
        """Forget the captured values."""
        self.captured = {}

    @property
    def captures(self) -> dict[str, Tensor]:
        """For each node path, the values captured there, concatenated along the first dimension.

        Raises:
            BendError: the outputs of a node cannot be concatenated; `captured` has them one by one.
        """
        return {path: _join_tensors(kept, path) for path, kept in self.captured.items()}

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the tensor itself."""
        if self._capturing:
            # Tensors made in inference mode could never be part of a backward pass.
            kept = self.captured.setdefault(at.path, [])
            if takes(tensor):
                kept.append(tensor)
                return tensor
            with torch.inference_mode(False), torch.no_grad():
                kept.append(tensor.detach().clone())
        return tensor


class InterpolationFromCapture(Capture):
    """Replaces the output of a node by mixtures of the values captured there.

    While it captures, it changes nothing.

    Args:
        weights: a tensor, or a parameter that holds one: a weight for each captured example, or one
            row of weights per mixture. None uses the output of the node as the weights, so that
            they can be passed in as an activation.
        softmax: whether to take the softmax of each row of weights.

    Raises:
        InputError: the weights are neither a tensor nor a parameter.

    Example:
        >>> import torch, bendtrace as bt
        >>> mix = bt.bends.InterpolationFromCapture(torch.tensor([0.5, 0.5]), softmax=False)
        >>> with mix.capture():
        ...     _ = mix(torch.tensor([[2.0], [4.0]]))
        >>> mix(torch.tensor([[9.0]]))
        tensor([[3.]])
    """

    observes = False

    def __init__(self, weights: Tensor | Expression | None = None, softmax: bool = True) -> None:
        super().__init__()
        self.weights: Any = required_weights(weights)
        self.softmax = softmax

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return a mixture of the captured tensors."""
        if self._capturing:
            return super().bend(tensor, at)
        kept = self.captured.get(at.path)
        if kept is None:
            raise BendError(
                f"{self!r} has captured nothing at {at.path!r}: first run the model within "
                "`with callback.capture():`",
                at.path,
            )
        examples = _join_tensors(kept, at.path).to(tensor)
        weights = tensor if self.weights is None else value_of(self.weights)
        return mix_rows(examples, weights, self.softmax, self, at)


def _join_tensors(kept: list[Tensor], path: str) -> Tensor:
    shapes = sorted({tuple(tensor.shape[1:]) for tensor in kept})
    if len(shapes) > 1:
        raise BendError(
            f"the values captured at {path!r} cannot be concatenated along the first "
            f"dimension: the other sizes are {' and '.join(map(str, shapes))}",
            path,
        )
    return torch.cat([tensor if tensor.dim() else tensor.reshape(1) for tensor in kept])


# Callbacks made from functions.


class Lambda(Bend):
    """Bends with a function.

    Args:
        fn: a function that takes the tensor and returns the new value. It can use parameters like
            numbers.

    Raises:
        InputError: `fn` cannot be called.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.bends.Lambda(lambda x: x.clamp(0, 1))(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        if not callable(fn):
            raise InputError(f"Lambda takes a function of a tensor, not {fn!r}")
        refuse_without_arguments(fn)
        self.fn = fn

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the result of the function."""
        made: Tensor = self.fn(tensor)
        return made

    @depends_on("fn")
    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what the function does, if a check finds that it does nothing else."""
        return effect_of_function(self.fn)

    def __repr__(self) -> str:
        return f"Lambda({getattr(self.fn, '__name__', repr(self.fn))})"
