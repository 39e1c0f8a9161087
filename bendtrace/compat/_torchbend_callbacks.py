"""torchbend's callbacks, parameters and configurations, as those of `bendtrace.bends`."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from bendtrace import bends
from bendtrace.errors import InputError
from bendtrace.insert.bend import Value, value_of
from bendtrace.insert.bend_callbacks import mix_rows
from bendtrace.insert.interjection import Effect, NodePass
from bendtrace.tape.tape import TensorMeta

__all__ = [
    "Affine", "BendingCallback", "BendingConfig", "BendingParameter", "BendingParameterException",
    "Bias", "CallbackChain", "Capture", "InterpolateActivation", "InterpolationFromCapture",
    "Lambda", "Mask", "Normal", "OrderedMask", "Permute", "Scale", "ThresholdActivation",
    "ThresholdPermute",
]  # fmt: skip

C = TypeVar("C", bound=type)

# The method of the model that runs, and arguments of callbacks by callback and node path.
RUNNING: ContextVar[str] = ContextVar("running", default="forward")
_GIVEN: ContextVar[Mapping[tuple[int, str], dict[str, Any]] | None] = ContextVar("given")
_NEVER_CALLED = frozenset({"add_bending_target", "apply"})


class BendingParameterException(InputError):
    """A value that a `BendingParameter` cannot take.

    Example:
        >>> import bendtrace as bt
        >>> tb = bt.compat.torchbend
        >>> try:
        ...     tb.BendingParameter("gain", 0.5, range=(0, 1)).set_value(2.0)
        ... except tb.BendingParameterException as error:
        ...     print(error)
        2.0 is outside the range (0, 1) of parameter 'gain'; with clamp=True it would become the
        nearest value inside
    """


class BendingParameter(bends.BendingParameter):
    """A named number that callbacks read each time they run, of one type.

    Args:
        name: its name in `BendedModule.update` and in files.
        value: a bool, an int, a float or a complex number, or a tensor. All later numbers become of
            the same type.
        range: the least and the greatest value; None for either leaves it open.
        clamp: whether a value outside the range is moved to the nearest one inside, instead of
            raising.

    Raises:
        BendingParameterException: the value is not a number, is outside the range, or would lose
            something as a number of that type.

    Example:
        >>> import bendtrace as bt
        >>> steps = bt.compat.torchbend.BendingParameter("steps", 2)
        >>> steps.set_value(3.0)
        >>> steps.get_python_value()
        3
    """

    _kind: type | None = None

    def __init__(
        self, name: str, value: Value, range: tuple[Any, Any] | None = None, clamp: bool = False
    ) -> None:
        kinds = (bool, int, float, complex)
        self._kind = next((kind for kind in kinds if isinstance(value, kind)), None)
        super().__init__(name, value, range, clamp)

    def get_python_value(self) -> bool | int | float | complex:
        """Return the current value as a Python number."""
        value: Any = self.get_value()
        return value.item() if isinstance(value, Tensor) else value

    def _checked(self, value: Any) -> Value:
        kind = self._kind
        try:
            checked: Any = super()._checked(value)
        except InputError as error:
            raise BendingParameterException(str(error)) from None
        if kind is None or isinstance(checked, Tensor) or isinstance(checked, kind):
            return checked  # type: ignore[no-any-return]
        fits = kind in (float, complex) or (kind is int and checked == checked // 1)
        if kind is bool or isinstance(checked, complex) or not fits:
            raise BendingParameterException(
                f"parameter {self.name!r} was made with a value of type {kind.__name__}, and "
                f"{value!r} is none: make it with a {type(value).__name__}"
            )
        return kind(checked)  # type: ignore[no-any-return]


class _ControllableParams:
    """The arguments of a class that can be parameters."""

    def __get__(self, instance: Any, owner: type) -> dict[str, None]:
        arguments = inspect.signature(owner).parameters.values()
        return {one.name: None for one in arguments if "Expression" in str(one.annotation)}


class BendingCallback(bends.Bend):
    """A callback that changes a tensor, in torchbend's form.

    Subclasses override `bend_input(x, name)`, or `forward(x, name, ...)` with further arguments,
    which `from_activations` takes. Both are called for activations and for weights; what is drawn
    for a node is drawn there, when the node comes first. One that overrides `apply_to_param(idx,
    param, cache)` changes copies of weights by it, in place, after `update()`. State for what is
    bent is made in `register_activation(name, shape)` and `register_weight(parameter, name)`, which
    are called when it comes first.

    Args:
        seed: kept as an attribute.

    Attributes:
        controllable_params: the names of the arguments that can be a `BendingParameter`.
        jit_compatible: whether TorchScript can compile it: no callback can be.

    Example:
        >>> import torch, bendtrace as bt
        >>> tb = bt.compat.torchbend
        >>> class Square(tb.BendingCallback):
        ...     def bend_input(self, x, name=None):
        ...         return x * x
        >>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
        >>> _ = bended.bend(Square(), "0")
        >>> bended(torch.tensor([3.0]))
        tensor([9.])
        >>> tb.Affine.controllable_params
        {'bias': None, 'scale': None}
    """

    controllable_params: ClassVar[Any] = _ControllableParams()
    weight_compatible: ClassVar[bool] = True
    activation_compatible: ClassVar[bool] = True
    jit_compatible: ClassVar[bool] = False
    nntilde_compatible: ClassVar[bool] = False

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._met: dict[str, int] = {}  # the weights by name, and -1 for activations
        self._cache: list[Tensor] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if foreign := sorted(_NEVER_CALLED & vars(cls).keys()):
            raise InputError(
                f"{cls.__name__}.{foreign[0]} would never be called: a callback is given the "
                "values alone, in bend_input(x, name)"
            )

    @property
    def controllables(self) -> dict[str, bends.BendingParameter]:
        """The arguments that are parameters, by name."""
        found = {name: getattr(self, name) for name in self.controllable_params}
        return {k: v for k, v in found.items() if isinstance(v, bends.BendingParameter)}

    def get(self, name: str) -> Any:
        """Return the current value of an argument."""
        return value_of(getattr(self, name))

    def bend_input(self, x: Tensor, name: str | None = None) -> Tensor:
        """Return the new value of a tensor."""
        raise InputError(f"{type(self).__name__} has neither bend_input(x, name) nor forward")

    def forward(self, x: Tensor, name: str | None = None) -> Tensor:
        """Return the new value of a tensor."""
        return self.bend_input(x, name=name)

    def register_activation(self, name: str, shape: torch.Size) -> str:
        """Called when an activation comes first, with its name."""
        return name

    def register_weight(self, parameter: nn.Parameter, name: str = "", cache: bool = True) -> str:
        """Called when a weight comes first, with its name."""
        self._cache.append(parameter.data.clone())
        return name

    def get_cache(self, index: int) -> Tensor:
        """Return the first value of a weight, by its number."""
        return self._cache[index]

    def update(self) -> None:
        """Called before weights are bent, and may follow changes of parameters."""

    def apply_to_param(self, idx: int, param: Tensor, cache: Tensor | None) -> None:
        """Change a copy of a weight in place."""
        param.set_(self.bend_input(param))  # type: ignore[call-overload]

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the new value of a tensor."""
        name = at.path.replace(".", "_")
        kind, numbers = type(self), self.__dict__.setdefault("_met", {})
        is_weight = at.module is None and at.function is None
        if not is_weight or kind.apply_to_param is BendingCallback.apply_to_param:
            if not is_weight and numbers.setdefault(name, 0) == 0:
                numbers[name] = -1
                self.register_activation(name, tensor.shape)
            return self.forward(tensor, name=name, **arguments_at(self, at))
        with torch.no_grad():
            parameter = nn.Parameter(tensor.detach().clone(), requires_grad=False)
            if name not in numbers:
                numbers[name] = len(self._cache)
                self.register_weight(parameter, name=name, cache=True)
            self.update()
            self.apply_to_param(numbers[name], parameter, tensor.detach())
        return parameter.data

    def __rshift__(self, other: Any) -> bends.CallbackChain:
        if not isinstance(other, bends.Bend):
            return NotImplemented
        return CallbackChain(self, other)


def arguments_at(callback: bends.Bend, at: NodePass) -> dict[str, Any]:
    """Return the arguments that `from_activations` was given for a callback at a node."""
    return (_GIVEN.get(None) or {}).get((id(callback), at.path), {})


@contextmanager
def running(
    fn: str, given: Mapping[tuple[int, str], dict[str, Any]] | None = None
) -> Iterator[None]:
    """Within it, a method runs, and callbacks have some arguments."""
    names, values = RUNNING.set(fn), _GIVEN.set(given)
    try:
        yield
    finally:
        RUNNING.reset(names)
        _GIVEN.reset(values)


def further_arguments(callback: bends.Bend) -> list[str]:
    """Return the names of the arguments of a callback besides the tensor and its name."""
    forward = getattr(callback, "forward", None)
    if forward is None:
        return []
    return [name for name in inspect.signature(forward).parameters if name not in ("x", "name")]


def flat_callbacks(callback: bends.Bend) -> Iterator[bends.Bend]:
    """Yield the callbacks of a chain, or the one."""
    yield from getattr(callback, "callbacks", (callback,))


class _Drawing(bends.Bend):
    """Draws numbers for each activation of each method, and once for each weight."""

    dim: Any

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the new value of a tensor; one without dimensions has one element along each."""
        if tensor.dim() or self.dim is None:
            return super().bend(tensor, _in_method(at))
        dims = self.dim if isinstance(self.dim, tuple) else (self.dim,)
        sizes = (1,) * max(dim + 1 if dim >= 0 else -dim for dim in dims)
        return super().bend(tensor.reshape(sizes), _in_method(at)).reshape(())

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return its effect on a tensor."""
        if self.dim is not None and not len(like.shape):
            return "it treats a tensor without dimensions by itself"
        return super().effect_of_bend(_in_method(at), like)


def _in_method(at: NodePass) -> NodePass:
    fn = RUNNING.get()
    is_weight = at.module is None and at.function is None
    return at if fn == "forward" or is_weight else dataclasses.replace(at, path=f"{fn}:{at.path}")


def _rename_class(cls: C) -> C:
    """Return a class of ours as one of torchbend's callbacks."""
    bases = (_Drawing, cls) if hasattr(cls, "drawn") else (cls,)
    members = {"__doc__": cls.__doc__, "__module__": __name__}
    return type(cls.__name__, (*bases, BendingCallback), members)  # type: ignore[return-value]


Affine = _rename_class(bends.Affine)
Bias = _rename_class(bends.Bias)
CallbackChain = _rename_class(bends.CallbackChain)
Lambda = _rename_class(bends.Lambda)
Mask = _rename_class(bends.Mask)
Normal = _rename_class(bends.Normal)
OrderedMask = _rename_class(bends.OrderedMask)
Permute = _rename_class(bends.Permute)
Scale = _rename_class(bends.Scale)
ThresholdActivation = _rename_class(bends.ThresholdActivation)
ThresholdPermute = _rename_class(bends.ThresholdPermute)


class InterpolateActivation(bends.InterpolateActivation, BendingCallback):
    """Returns weighted sums of the examples in the batch; `from_activations` takes the weights.

    Args:
        interp_weights: one weight per example, or a row of weights per mixture; None leaves the
            batch as it is.
        softmax: whether to take the softmax of each row of weights.

    Example:
        >>> import torch, bendtrace as bt
        >>> tb = bt.compat.torchbend
        >>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> _ = bended.bend(tb.InterpolateActivation(), "0"), bended.trace(torch.ones(2, 1))
        >>> inputs = {"0": torch.zeros(2, 1), "input": torch.ones(2, 1)}
        >>> bended.from_activations("0", **inputs, interp_weights=torch.tensor([0.0, 1.0]))
        tensor([[0.]])
    """

    weight_compatible: ClassVar[bool] = False

    def forward(
        self,
        x: Tensor,
        name: str | None = None,
        interp_weights: Tensor | None = None,
        softmax: bool = False,
    ) -> Tensor:
        """Return the mixtures."""
        if interp_weights is None:
            return x
        return mix_rows(x, interp_weights, softmax, self, NodePass(name or ""))

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Return the mixtures."""
        given = arguments_at(self, at)
        if "interp_weights" not in given:
            return super().bend(tensor, at)
        return self.forward(tensor, at.path, **{"softmax": self.softmax, **given})

    def effect_of_bend(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return its effect on a tensor."""
        return "it is given weights" if arguments_at(self, at) else super().effect_of_bend(at, like)


class _Captures(dict[str, Tensor]):
    """Values by `method:activation`, or by activation if only one method has it."""

    def __missing__(self, name: str) -> Tensor:
        (found,) = [key for key in self if key.partition(":")[2] == name] or [""]
        if not found:
            raise KeyError(name)
        return self[found]


class _ByMethod(bends.Capture, BendingCallback):
    """Keeps values by the method that ran, too."""

    weight_compatible: ClassVar[bool] = False
    name_of: Callable[[str, str], str] | None = None  # of a path in a method

    @property
    def captures(self) -> dict[str, Tensor]:
        """The captured values by `method:activation`, concatenated along the first dimension."""
        names = {}
        for key in self.captured:
            fn, _, path = key.partition(":")
            name = None if self.name_of is None else self.name_of(fn, path)
            names[key] = f"{fn}:{name or path}"
        return _Captures({names[key]: value for key, value in super().captures.items()})

    _captures = captures

    @property
    def _is_initialized(self) -> bool:
        return bool(self.captured)

    def clear(self) -> None:
        """Forget the captured values."""
        self.reset()

    def bend(self, tensor: Tensor, at: NodePass) -> Tensor:
        """Keep a tensor under the method that runs, or return the tensor made of the kept ones."""
        return super().bend(tensor, dataclasses.replace(at, path=f"{RUNNING.get()}:{at.path}"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "name_of"}


def name_by(callback: bends.Bend, owner: Any) -> None:
    """Let callbacks that capture call activations as a `BendedModule` does."""
    owner_ref = weakref.ref(owner)

    def name_of(fn: str, path: str) -> str:
        module = owner_ref()
        return path if module is None else str(module.name_of_activation(path, fn))

    for one in flat_callbacks(callback):
        if isinstance(one, _ByMethod):
            one.name_of = name_of


class Capture(_ByMethod):
    """Keeps the outputs of nodes while it is capturing, by method and activation.

    Example:
        >>> import torch, bendtrace as bt
        >>> tb = bt.compat.torchbend
        >>> bended, seen = tb.BendedModule(torch.nn.Sequential(torch.nn.ReLU())), tb.Capture()
        >>> _ = bended.bend(seen, "0")
        >>> with bended.capture():
        ...     _ = bended(torch.zeros(1)), bended(torch.ones(1))
        >>> seen.captures
        {'forward:0': tensor([0., 1.])}
    """


class InterpolationFromCapture(_ByMethod, bends.InterpolationFromCapture):
    """Replaces the output of a node by mixtures of the values captured there.

    Args:
        weights: a weight for each captured example, or one row of weights per mixture. None uses
            the output of the node as the weights.
        softmax: whether to take the softmax of each row of weights.

    Example:
        >>> import torch, bendtrace as bt
        >>> mix = bt.compat.torchbend.InterpolationFromCapture(softmax=False)
        >>> with mix.capture():
        ...     _ = mix(torch.tensor([[2.0], [4.0]]))
        >>> mix(torch.tensor([[0.5, 0.5]]))
        tensor([[3.]])
    """

    observes = False


class BendingConfig(bends.BendingConfig):
    """The callbacks that bend a model, and what each of them bends, in order.

    Args:
        *bends: tuples of a callback and one or more patterns; or another configuration.
        module: a `BendedModule` to bind it to.

    Example:
        >>> import torch, bendtrace as bt
        >>> tb = bt.compat.torchbend
        >>> bended = tb.BendedModule(torch.nn.Sequential(torch.nn.Linear(1, 1)))
        >>> config = tb.BendingConfig((tb.Mask(0.3), ".*weight"), module=bended)
        >>> "0.weight" in config, config.op_from_key("0.weight")
        (True, [Mask()])
    """

    module: Any = None

    def __init__(self, *bends: Any, module: Any = None) -> None:
        if len(bends) == 1 and hasattr(bends[0], "bends"):
            bends = tuple(bends[0].bends)
        super().__init__(*bends)
        if module is not None:
            self.bind(module)

    def bind(self, module: Any, fn: str | None = None) -> None:
        """Look the patterns up in a `BendedModule`: in the methods traced so far, or in one.

        Args:
            module: the `BendedModule`.
            fn: the method.
        """
        self.module, self._fn = module, fn

    def __add__(self, other: Any) -> Self:
        made = super().__add__(other)
        if made is not NotImplemented and self.module is not None:
            if getattr(other, "module", None) not in (None, self.module):
                raise InputError("these configurations are bound to different models")
            made.bind(self.module, self._fn)
        return made

    @property
    def is_binded(self) -> bool:
        """Return whether it is bound to a `BendedModule`."""
        return self.module is not None

    def _by_key(self) -> dict[str, list[bends.Bend]]:
        if self.module is None:
            raise InputError("bind(module) says in which model to look the patterns up")
        found: dict[str, list[bends.Bend]] = {}
        for bend in self.bends:
            for key in self.module._keys_of(bend, self._fn):
                found.setdefault(key, []).append(bend.callback)
        return found

    def op_from_key(self, key: str) -> list[bends.Bend]:
        """Return the callbacks that bend a weight or `method:activation`."""
        return self._by_key()[key]

    def __contains__(self, what: object) -> bool:
        if isinstance(what, str):
            return what in self._by_key()
        return any(bend.callback is what for bend in self.bends)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BendingConfig) and self.is_binded and other.is_binded:
            return self._by_key() == other._by_key()
        return super().__eq__(other)

    __hash__ = None

    @classmethod
    def load(cls, path: Any, module: Any = None, **options: Any) -> BendingConfig:
        """Read it from a JSON file. No code in the file is run.

        Args:
            path: the file.
            module: a `BendedModule` to bind it to.
            **options: those of `bendtrace.bends.BendingConfig.load`.
        """
        return cls(*super().load(path, **options), module=module)
