"""Facets: the parts of values that have a meaning, as places to look at and to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bendtrace._trace import Trace
from bendtrace.errors import InputError


@dataclass(frozen=True)
class Facet:
    """A part of the value of a node: some positions along one dimension, in equal groups.

    Attributes:
        name: "q", "k", "v" and "z" of an attention, z being what its heads return; "gate.i" and the
            like; "state.h", "state.c"; "router", "experts", "expert.0".
        path: path of the node, or of the parameter.
        scope: qualified name of the module whose code uses the part.
        dim: the dimension.
        index: for each group, such as a head or an expert, its positions; None for all positions.

    Example:
        >>> import torch, bendtrace as bt
        >>> q = bt.workflows.Facet("q", "qkv", "", -1, ((0, 1), (2, 3)))
        >>> q.value(torch.arange(6.0)[None]), q.part(1).slice
        (tensor([[[0., 1.],
                 [2., 3.]]]), (Ellipsis, slice(2, 4, None)))
    """

    name: str
    path: str
    scope: str
    dim: int
    index: tuple[tuple[int, ...], ...] | None

    @property
    def parts(self) -> int:
        """The number of groups: of heads, or of experts."""
        return 1 if self.index is None else len(self.index)

    def part(self, *numbers: int) -> Facet:
        """Return the facet of some groups alone: the second head is `q.part(1)`.

        Args:
            *numbers: groups, counted from 0.

        Raises:
            InputError: there is no such group.
        """
        groups = self.index
        if groups is None or not all(-len(groups) <= number < len(groups) for number in numbers):
            raise InputError(f"{self.name} at {self.path!r} has {self.parts} parts, not {numbers}")
        return replace(self, index=tuple(groups[number] for number in numbers))

    @property
    def slice(self) -> Any:
        """The part as an index of the whole value, as patches take it: `slice=facet.slice`."""
        if self.index is None:
            return ...
        flat = [position for group in self.index for position in group]
        start, stop = flat[0], flat[-1] + 1
        where: Any = slice(start, stop) if flat == list(range(start, stop)) else flat
        if self.dim >= 0:
            return (*[slice(None)] * self.dim, where)
        return (..., where, *[slice(None)] * (-1 - self.dim))

    def value(self, saved: Any) -> Any:
        """Return the part of a value.

        Args:
            saved: the value of the node, or what contains it by path or by layer: the result of
                `get_activations`, or a trace that saved it.

        Returns:
            The part. Instead of the dimension it has two, for the groups and for the positions in
            one, if there are several groups. Gradients pass through it.

        Raises:
            InputError: the value is not there, or is too small.
        """
        return self._taken(self._whole(saved, "tensor_contents"))

    def gradient(self, trace: Trace) -> Any:
        """Return the part of the gradient that a trace saved (`save_gradients=True`).

        Args:
            trace: the trace, after the backward pass.

        Raises:
            InputError: there is no gradient.
        """
        return self._taken(self._whole(trace, "grad_contents"))

    def edited(self, whole: Tensor, new: Any) -> Tensor:
        """Return a copy of the value of the node with another part.

        With `interject`: `bended.interject(q.path, lambda x: q.edited(x, f(q.value(x))))`.

        Args:
            whole: the value of the node.
            new: the new part, of the shape that `value` returns, or what broadcasts to it.

        Raises:
            InputError: the value is too small.
        """
        part = self._taken(whole)
        given = torch.as_tensor(new, dtype=whole.dtype, device=whole.device).expand(part.shape)
        if self.index is None:
            return given.clone()
        if self.parts > 1:
            dim = self.dim if self.dim >= 0 else whole.dim() + self.dim
            given = given.flatten(dim, dim + 1)
        made = whole.clone()
        made[self.slice] = given
        return made

    def _whole(self, saved: Any, field: str) -> Tensor:
        if isinstance(saved, Trace):
            entry = next((one for one in saved.entries if one.node_path == self.path), None)
            try:
                found = None if entry is None else getattr(entry, field)
            except (LookupError, ValueError) as error:
                raise InputError(f"the trace has not saved {self.path!r}: {error}") from error
        elif isinstance(saved, Mapping):
            if self.path not in saved:
                raise InputError(f"there is no {self.path!r} among these values: {list(saved)}")
            found = saved[self.path]
        else:
            found = saved
        if not isinstance(found, Tensor):
            raise InputError(f"{self.path!r} has no tensor here, but {found!r}")
        return found

    def _taken(self, whole: Tensor) -> Tensor:
        if self.index is None:
            return whole
        last = max(map(max, self.index))
        dim = self.dim if self.dim >= 0 else whole.dim() + self.dim
        if not 0 <= dim < whole.dim() or whole.shape[dim] <= last:
            raise InputError(
                f"{self.name} reaches position {last} of dimension {self.dim} at {self.path!r}, "
                f"and this value has shape {tuple(whole.shape)}"
            )
        part: Tensor = whole[self.slice]
        if self.parts > 1:
            part = part.unflatten(dim, (self.parts, len(self.index[0])))
        return part

    def __repr__(self) -> str:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"<facet {self.name} of {self.path or '<root>'}{parts}>"


class Facets(tuple[Facet, ...]):
    """The facets of a run, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(torch.nn.LSTMCell(2, 3), torch.ones(1, 2))
        >>> bt.workflows.facets(trace).named("gate.f")
        <facet gate.f of weight_ih>
        <facet gate.f of weight_hh>
        <facet gate.f of bias_ih>
        <facet gate.f of bias_hh>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no facets"

    def named(self, name: str, scope: str | None = None) -> Facets:
        """Return the facets with a name.

        Args:
            name: the name: "q", "gate.i", ...; "gate" stands for all gates.
            scope: qualified name of a module: only those in it.
        """
        return Facets(
            facet
            for facet in self
            if (facet.name == name or facet.name.startswith(f"{name}."))
            and (scope is None or f"{facet.scope}.".startswith(f"{scope}."))
        )
