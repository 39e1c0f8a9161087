"""Attribution to the values of nodes, with the methods of captum (an extra)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace._lazy import required
from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError, SiteError
from bendtrace.interject.resolver import describe_where
from bendtrace.interject.structure import describe
from bendtrace.interject.where import Where
from bendtrace.preserved_state import PreservedState, no_model
from bendtrace.workflows._sites import At, Key, Sites, unlike


class NodeFunction:
    """The output of a model as a function of the value of a node, as captum's methods take it.

    Each call runs the model with the inputs that it was made with, and replaces the value of the
    node. The value may have more rows than the inputs have examples, as when captum puts many
    points into one batch: then the model runs several times, each time with as many examples as the
    inputs have. So branches on a batch stay branches on this batch.

    As a context manager, it keeps the insertion in the model from call to call, which is faster.

    Args:
        model: a module, a function, or a `BendedModule`, whose insertions stay active.
        where: one node; see `BendedModule.interject`. Its first axis is that of the examples.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.
        output: a function from the output of the model to a tensor with a row for each example, or
            one number; None for the output itself.
        at: whether the value is the output of the node, or its first input.

    Attributes:
        value: the value of the node for the inputs: (examples, ...), without gradients.
        index: the example of each row of `value`: (examples,). Pass it to captum as
            `additional_forward_args`, so that each row keeps its example if captum repeats rows.

    Raises:
        NodePathError: `where` matches no node.
        SiteError: it matches several, or a node that runs several times.
        InputError: the value has no rows of floating point numbers.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x, factor):
        ...     return x.exp() * factor
        >>> function = bt.workflows.NodeFunction(model, "exp", (torch.zeros(2, 1), 3.0))
        >>> function.value.flatten(), function(torch.tensor([[5.0], [7.0]])).flatten()
        (tensor([1., 1.]), tensor([15., 21.]))
    """

    value: Tensor
    index: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        where: Where,
        inputs: Any,
        *,
        output: Callable[[Any], Tensor] | None = None,
        at: At = "output",
    ) -> None:
        self._bended = bended_of(model)
        self._where = where
        self._call = Call.of(inputs)
        self._output = output
        self._at = at
        self._open: Sites | None = None
        self._stack = ExitStack()
        said = describe_where(where)
        with torch.no_grad(), self._sites() as there:
            _, seen = there.seen(self._call)
            keys = [key for row in there.rows(seen) for key in row.keys]
        if len(keys) != 1 or len(seen[keys[0]]) != 1:
            found = ", ".join(f"{path} ({len(seen[n, path])} times)" for n, path in keys)
            raise SiteError(f"{said} stands for several values: {found}; name one of them", said)
        self._key = keys[0]
        (self.value,) = seen[self._key].values()
        if self.value.dim() == 0 or not self.value.is_floating_point():
            raise InputError(
                f"{said} is {describe(self.value)}, but rows of floating point numbers are needed"
            )
        self.index = torch.arange(len(self.value), device=self.value.device)

    def __call__(self, value: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the output of the model with another value at the node.

        Args:
            value: rows like those of `self.value`.
            index: the example that each row belongs to; None if there is a row for each example.

        Returns:
            A row of the output for each row; or, if the output is one number, a number for each
            run: (runs,).

        Raises:
            InputError: the rows have another shape, or the output is no row for each example.
        """
        if index is None:
            index = self.index
        if value.shape[1:] != self.value.shape[1:] or len(value) != len(index):
            raise InputError(
                f"the value has shape {tuple(value.shape)} and {len(index)} examples, but "
                f"{describe_where(self._where)} is {describe(self.value)}"
            )
        if self._open is None:
            with self:
                return self(value, index)
        # The n-th row of an example goes into the n-th run.
        turns = torch.zeros_like(index)
        for example in range(len(self.index)):
            rows = index == example
            turns[rows] = torch.arange(int(rows.sum()), device=index.device)
        made: list[Tensor] = []
        order: list[Tensor] = []
        for turn in range(int(turns.max()) + 1 if len(turns) else 0):
            rows = (turns == turn).nonzero().flatten()
            # A new tensor, which the model may write to.
            given = self.value.index_copy(0, index[rows], value[rows].to(self.value.dtype))
            found = self._run(self._open, given)
            if found.dim():
                found, order = found[index[rows]], [*order, rows]
            made.append(found)
        if not order:
            return torch.stack(made)  # captum looks for the first of the outputs
        return torch.cat(made)[torch.cat(order).argsort()]

    def _run(self, there: Sites, given: Tensor) -> Tensor:
        reached: list[int] = []

        def act(key: Key, number: int, value: Tensor) -> Tensor:
            why = unlike(given, value) if key == self._key and not reached else "another node"
            if why:
                raise SiteError(f"{key[1]}: where the value is replaced, it is {why}", key[1])
            reached.append(number)
            return given

        with PreservedState(no_model):  # the generators, which captum draws from between the runs
            found = there.run(self._call, act)
        if not reached:
            raise SiteError(f"the run no longer reached {self._key[1]}", self._key[1])
        if self._output is not None:
            found = self._output(found)
        if not isinstance(found, Tensor) or (found.dim() and len(found) != len(self.index)):
            raise InputError(
                f"a row for each of the {len(self.index)} examples is needed, or one number, but "
                f"the output is {describe(found)}; pass output=, a function of it"
            )
        return found

    def _sites(self) -> Sites:
        return Sites(self._bended, [self._where], [self._call], at=self._at, label="NodeFunction")

    def __enter__(self) -> Self:
        self._open = self._stack.enter_context(self._sites())
        return self

    def __exit__(self, *error: object) -> None:
        self._open = None
        with PreservedState(no_model):
            self._stack.close()

    def __repr__(self) -> str:
        return f"<NodeFunction of {self._key[1]}: {describe(self.value)}>"


def attribute(
    model: Callable[..., Any],
    where: Where,
    inputs: Any,
    method: str | Callable[[Any], Any] = "IntegratedGradients",
    *,
    output: Callable[[Any], Tensor] | None = None,
    at: At = "output",
    **options: Any,
) -> Any:
    """Attribute an output of a model to the value of a node, with a method of captum.

    Args:
        model: as for `NodeFunction`.
        where: as for `NodeFunction`.
        inputs: as for `NodeFunction`.
        method: the name of a class in `captum.attr` that takes a function; or what makes the object
            from the function, such as a class, or `lambda f: NoiseTunnel(Saliency(f))`.
        output: as for `NodeFunction`.
        at: as for `NodeFunction`.
        **options: of the method's `attribute`, such as `target=` and `baselines=`.

    Returns:
        What captum returns: a tensor with the shape of the value.

    Raises:
        InputError: captum has no such method, or it needs the modules of a model.
        ImportError: captum is not installed.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.workflows.attribute(  # doctest: +SKIP
        ...     lambda x: x.exp().sum(-1), "exp", torch.zeros(1, 3), "InputXGradient"
        ... )
        tensor([[1., 1., 1.]])
    """
    methods = required("captum.attr", "attribute")
    make = getattr(methods, method, None) if isinstance(method, str) else method
    if not callable(make):
        raise InputError(f"method= has to be the name of a class in captum.attr, not {method!r}")
    needed = list(inspect.signature(make).parameters) if inspect.isclass(make) else []
    if {"model", "layer"} & set(needed):
        raise InputError(
            f"{make.__name__} needs the modules of a model, and not a function of the value of a "
            f"node: pass it bended.model, as in captum.attr.{make.__name__}({', '.join(needed)})"
        )
    if "additional_forward_args" in options:
        raise InputError("additional_forward_args are the inputs of the model: pass these")
    with NodeFunction(model, where, inputs, output=output, at=at) as function:
        value = function.value.clone().requires_grad_()
        return make(function).attribute(value, additional_forward_args=(function.index,), **options)
