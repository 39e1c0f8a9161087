"""Playing with a generator: bends whose parameters change between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from bendtrace.debug.calls import Call, own_copy
from bendtrace.errors import InputError
from bendtrace.insert.bend import Bend, BendingParameter, Value
from bendtrace.insert.bend_catalogue import BendHandle
from bendtrace.module import BendedModule, bended_of


@dataclass(frozen=True)
class Sweep:
    """The outputs of a model for each value of a parameter.

    Attributes:
        parameter: the name of the parameter.
        values: its values.
        outputs: the output of the model for each.
        traces: the number of paths that were traced for them.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
        >>> gain = bt.bends.BendingParameter("gain", 1.0)
        >>> _ = bended.bend(bt.bends.Scale(gain), "0$")
        >>> found = bt.workflows.sweep(bended, torch.tensor([3.0]), gain, [0.0, 0.5, 2.0])
        >>> found
        Sweep(parameter='gain', values=(0.0, 0.5, 2.0), traces=1)
        >>> dict(found)[0.5], found.stack().shape
        (tensor([1.5000]), torch.Size([3, 1]))
    """

    parameter: str
    values: tuple[Any, ...]
    outputs: tuple[Any, ...] = field(repr=False)
    traces: int = 0

    def stack(self) -> Tensor:
        """Return the outputs along a new first axis.

        Raises:
            InputError: they are not tensors with equal shapes.
        """
        if not all(isinstance(out, Tensor) for out in self.outputs):
            raise InputError("only tensors can be stacked: take them from outputs")
        shapes = {tuple(out.shape) for out in self.outputs}
        if len(shapes) > 1:
            raise InputError(f"the outputs have different shapes: {sorted(shapes)}")
        return torch.stack(self.outputs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.values, self.outputs, strict=True)

    def __len__(self) -> int:
        return len(self.values)


def sweep(
    model: Callable[..., Any],
    inputs: Any,
    parameter: BendingParameter | str,
    values: Iterable[Value],
    *,
    seed: int | None = None,
) -> Sweep:
    """Call a model once for each value of a parameter of its bends.

    Args:
        model: a `BendedModule` with bends (or steering vectors, or functions) that read the
            parameter.
        inputs: its inputs; see `Call.of`.
        parameter: the parameter, or the name of a parameter of the model's bends. Its value is
            restored afterwards.
        values: numbers, or tensors.
        seed: seed of torch's random numbers, set before each call, so that the calls differ only in
            the parameter; the global generators are restored afterwards. None leaves them alone.

    Returns:
        A `Sweep`.

    Raises:
        InputError: the parameter does not exist, or one of the values is not valid for it; then no
            call was made.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
        >>> gain = bt.bends.BendingParameter("gain", 1.0)
        >>> _ = bended.bend(bt.bends.Scale(gain), "0$")
        >>> bt.workflows.sweep(bended, torch.tensor([3.0]), gain, [0.0, 0.5, 2.0]).stack().flatten()
        tensor([0.0000, 1.5000, 6.0000])
        >>> gain.value
        1.0
    """
    call, bended = Call.of(inputs), bended_of(model)
    found = _named_parameter(bended, parameter)
    listed = tuple(values)
    if not listed:
        raise InputError("values= is empty")
    before, traces = found.value, bended.stats.traces
    outputs = []
    try:
        for value in listed:  # all are looked at before the first call
            found.value = value
        for value in listed:
            found.value = value
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                outputs.append(own_copy(call, keeps_graph=True).to(bended))
    finally:
        found.value = before
    return Sweep(found.name, listed, tuple(outputs), bended.stats.traces - traces)


def _named_parameter(bended: BendedModule, parameter: BendingParameter | str) -> BendingParameter:
    if isinstance(parameter, BendingParameter):
        return parameter
    controllables = bended.bending.controllables
    if not isinstance(parameter, str) or parameter not in controllables:
        listed = ", ".join(map(repr, controllables)) or "none"
        raise InputError(f"no bend has a parameter {parameter!r}; there are {listed}")
    return controllables[parameter]


@dataclass(eq=False, repr=False)
class BendingSession:
    """Bends of a model whose parameters change between calls; a context manager.

    At its end it removes its bends; other insertions stay.

    Attributes:
        model: the `BendedModule`.
        parameters: the parameters of its bends, by name.

    Example:
        >>> import torch, bendtrace as bt
        >>> gain = bt.bends.BendingParameter("gain", 1.0)
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> with bt.workflows.bending_session(model, {"0$": bt.bends.Scale(gain)}) as session:
        ...     print(session)
        ...     session.set(gain=3.0)
        ...     session(torch.ones(2))
        <BendingSession: 1 bend, gain=1.0>
        tensor([3., 3.])
        >>> session.model(torch.ones(2))
        tensor([1., 1.])
    """

    model: BendedModule
    _handles: tuple[BendHandle, ...]
    parameters: dict[str, BendingParameter]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the current parameters."""
        return self.model(*args, **kwargs)

    def set(self, **values: Value) -> None:
        """Set parameters for the next calls.

        Raises:
            InputError: a parameter does not exist, or a value is not valid for it; then all stay
                unchanged.
        """
        found = {name: self[name] for name in values}
        before = {name: parameter.value for name, parameter in found.items()}
        try:
            for name, parameter in found.items():
                parameter.value = values[name]
        except InputError:
            for name, parameter in found.items():
                parameter.value = before[name]
            raise

    def __getitem__(self, name: str) -> BendingParameter:
        if name not in self.parameters:
            listed = ", ".join(map(repr, self.parameters)) or "none"
            raise InputError(f"there is no parameter {name!r}; there are {listed}")
        return self.parameters[name]

    def sweep(
        self, inputs: Any, name: str, values: Iterable[Value], *, seed: int | None = None
    ) -> Sweep:
        """Call the model once for each value of a parameter (see `sweep`)."""
        return sweep(self.model, inputs, self[name], values, seed=seed)

    def remove(self) -> None:
        """Remove its bends. A second call does nothing."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={p.value!r}" for name, p in self.parameters.items())
        bends = "1 bend" if len(self._handles) == 1 else f"{len(self._handles)} bends"
        return f"<BendingSession: {bends}, {shown or 'no parameters'}>"


def bending_session(model: Callable[..., Any], bends: Mapping[Any, Any]) -> BendingSession:
    """Bend a model, and return the parameters of the bends.

    Network bending after Broad, Leymarie and Grierson, "Network Bending" (2021): a trained
    generator is changed inside while it runs.

    Args:
        model: a `BendedModule`, or a module; then call the `.model` of the session.
        bends: for each pattern of names (see `BendedModule.bend`), or any other way to select
            nodes, one callback or several; each number in a callback can be a `BendingParameter`.

    Returns:
        A `BendingSession`.

    Raises:
        InputError: an argument is invalid, or two parameters have the same name. Then nothing is
            bent.

    Example:
        >>> import torch, bendtrace as bt
        >>> amount = bt.bends.BendingParameter("amount", 0.0, range=(0, 1))
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())
        >>> with bt.workflows.bending_session(model, {"0$": bt.bends.Bias(amount)}) as session:
        ...     for value in (0.0, 0.5, 1.0):
        ...         session.set(amount=value)
        ...         print(round(session(torch.zeros(1)).item(), 4))
        ...     session.model.stats.traces
        0.0
        0.4621
        0.7616
        1
    """
    if not isinstance(bends, Mapping) or not bends:
        raise InputError("bends= has to be a non-empty mapping from patterns to callbacks")
    bended = bended_of(model)
    handles: list[BendHandle] = []
    parameters: dict[str, BendingParameter] = {}
    try:
        for where, callbacks in bends.items():
            several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            for callback in several:
                handles.append(bended.bend(callback, where))
                if isinstance(callback, Bend):
                    parameters |= {found.name: found for found in callback.parameters}
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return BendingSession(bended, tuple(handles), parameters)
