"""The behaviour of an insertion at a node: the base of interjections, patches and bends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.tape.tape import TensorMeta


class Inputs(tuple[Any, ...]):
    """The inputs of a node: the positional arguments, as a tuple.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments; None for none.

    Attributes:
        kwargs: the keyword arguments.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Halved(bt.Interjection):
        ...     def before(self, at, inputs):
        ...         print(inputs[1:], inputs.kwargs)
        ...         return bt.Inputs((inputs[0] / 2, *inputs[1:]), inputs.kwargs)
        >>> bended = bt.BendedModule(lambda x: torch.softmax(x, -1, dtype=torch.float64))
        >>> with bended.interject("softmax", Halved()):
        ...     _ = bended(torch.ones(2))
        (-1,) {'dtype': torch.float64}
    """

    kwargs: dict[str, Any]

    def __new__(cls, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Inputs:
        """Create one from positional and keyword arguments."""
        made = super().__new__(cls, args)
        made.kwargs = {} if kwargs is None else kwargs
        return made


NO_INPUTS = Inputs(())


@dataclass(frozen=True)
class NodePass:
    """One execution of a node, as an interjection sees it.

    Attributes:
        path: node path: `layers_0.mlp.relu`; of a part of a container `output|sub_0`.
        number: the pass of the node in this call of the model, counted from 0.
        module: the module called; None for functions, methods, parameters and inputs.
        function: the torch function; None for calls of modules, parameters and inputs.
        scope: qualified name of the module whose code runs the node.
        place: the source location, including those of the calls around it: the same text for the
            same node in other processes. "" for parameters and the like.
        qualified_name: of the module called; for functions and methods, the name of the module
            around them and their name; "" if `path` is one already.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     for _ in range(2):
        ...         x = torch.relu(x - 1)
        ...     return x
        >>> bended = bt.BendedModule(model)
        >>> def tell(value, at):
        ...     print(at.path, at.number, at.function.__name__)
        >>> with bended.interject("relu", tell):
        ...     _ = bended(torch.ones(2))
        relu 0 relu
        relu 1 relu
    """

    path: str
    number: int = 0
    module: nn.Module | None = field(default=None, compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)
    scope: str = ""
    place: str = field(default="", compare=False, repr=False)
    qualified_name: str = field(default="", compare=False, repr=False)

    def __repr__(self) -> str:
        fields = [f"path={self.path!r}", f"number={self.number}"]
        if self.module is not None:
            fields.append(f"module={type(self.module).__name__}")
        if self.function is not None:
            fields.append(f"function={getattr(self.function, '__name__', self.function)}")
        return f"NodePass({', '.join(fields)})"


class Interjection:
    """User code at a node. Subclasses override one or several of the methods.

    One object can be inserted in several places. Methods that are not overridden cost nothing. Each
    method runs as one op of the trace, in replays as in other runs, under the grad mode and
    autocast of the node. The torch operations that it calls are not recorded.

    Attributes:
        observes: whether it promises to keep every value as it is. An observer that gives
            another value raises.
        wants_inputs: whether `after` receives the inputs of the node.
        blind: whether `before` only learns that the node was reached, and receives no inputs.
        late: whether it is called after all others at a node whenever it was inserted, and
            before them by `before`.
        self_contained: whether it promises to read nothing of the model but its arguments.
            Otherwise, where the model's forward assigns attributes whose names are in its code,
            calls are run live, since a replay assigns them at its end.
        deferrable: whether an observer may be called after the run as well, with the outputs of the
            nodes, without a graph of autograd: it only keeps copies, and asks for no gradients.
            With a `backend`, calls with such observers are compiled.
        pure: whether it promises that `after` returns a new tensor that depends on nothing but the
            node's tensor and its own attributes, and does nothing else. With a `backend`, it is
            compiled with the model.
        needs_paths: whether it asks which path each call has taken. Paths do not join then, and
            each is recorded by itself.
        label: what reports and graphs call it.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Clipped(bt.Interjection):
        ...     def after(self, at, inputs, output):
        ...         return output.clamp(max=1)
        ...     def backward(self, at, grad_input, grad_output):
        ...         print(at.path, [grad.tolist() for grad in grad_output])
        >>> bended = bt.BendedModule(lambda x: torch.exp(x) * 2)
        >>> with bended.interject("exp", Clipped()):
        ...     out = bended(torch.tensor([-1.0, 1.0], requires_grad=True))
        >>> out.detach()
        tensor([0.7358, 2.0000])
        >>> out.sum().backward()
        exp [[2.0, 0.0]]
    """

    _only_outputs: bool = False  # whether it may not replace the input of a module
    _sees_writes: bool = False  # whether its inputs are what the node left, as for torch's hooks
    observes: bool = False
    wants_inputs: bool = False
    blind: bool = False
    late: bool = False
    self_contained: bool = False
    deferrable: bool = False
    needs_paths: bool = False
    pure: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A promise of one of our classes need not hold for its subclasses elsewhere.
        if "self_contained" not in vars(cls) and not cls.__module__.startswith(_OURS):
            cls.self_contained = False
        if not cls.__module__.startswith(_PACKAGE):
            if "deferrable" not in vars(cls):
                cls.deferrable = False
            if "effect" not in vars(cls):
                cls.effect = Interjection.effect  # type: ignore[method-assign]

    @property
    def _code(self) -> Any:
        """The object that holds its code, and everything that the code reads."""
        return self

    @property
    def label(self) -> str:
        """The name in reports and graphs: by default the name of the class."""
        return type(self).__name__

    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        """Called with the inputs of the node; may return other inputs with the same structure."""

    def instead(self, at: NodePass, call: Callable[..., Any], inputs: Inputs) -> Any:
        """Called instead of the node; the return value is the node's output.

        `call(*inputs, **inputs.kwargs)` runs the node itself. Only for functions and methods.
        """

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        """Called with the output of the node; may return another value with the same structure.

        `inputs` is empty unless `wants_inputs` is set. They have the values from before the node,
        also where the node works in place.
        """

    def backward(
        self, at: NodePass, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Called in the backward pass with the gradients of this execution of the node alone.

        There is one gradient for each tensor among the inputs and outputs, in order; None for a
        tensor without a gradient. May return other gradients for the inputs.
        """

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return what `after` does to a tensor now, as a function that can be compiled.

        Args:
            at: the pass.
            like: the metadata of the tensor.

        Returns:
            The effect; why there is none; or None if that is not known.
        """

    def _backward_of_call(self) -> Callable[..., Any]:
        """Return the `backward` of the call of the model that runs now."""
        return self.backward

    @classmethod
    def _overrides(cls, name: str) -> bool:
        return getattr(cls, name) is not getattr(Interjection, name)

    def _forms(self) -> frozenset[str]:
        """Return the forms to call; a wrapper has those of the wrapped one."""
        forms = ("before", "instead", "after", "backward")
        return frozenset(form for form in forms if type(self)._overrides(form))


_OURS = __name__.rpartition(".")[0]
_PACKAGE = __name__.partition(".")[0] + "."


# The passes of a node in which an insertion is called.

# Numbers counted from 0, or from the end if negative; a predicate of the number; None for all.
PassNumbers: TypeAlias = int | Iterable[int] | Callable[[int], bool] | None


class Passes:
    """Selects passes of a node.

    Their numbers are counted from 0, or from the end if negative; a predicate of the number selects
    as well, None all. With `every`, only each n-th pass is selected, beginning with the first. The
    option is the name of the argument that has the numbers, for errors. Raises `InputError` if an
    argument is invalid.
    """

    def __init__(
        self, numbers: PassNumbers = None, every: int | None = None, option: str = "passes"
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise InputError(f"every= has to be a positive int, not {every!r}")
        self._every = every or 1
        self._predicate: Callable[[int], bool] | None = None
        self._numbers: frozenset[int] | range | None = None
        if callable(numbers):
            self._predicate = numbers
        elif isinstance(numbers, range):
            self._numbers = numbers
        elif numbers is not None:
            self._numbers = frozenset(_ints(numbers, option))
        # True if a user function decides, which may decide differently the next time.
        self.is_asked: bool = callable(numbers)
        self.admits_all: bool = numbers is None and every in (None, 1)  # it selects every pass
        # True if the total number of passes has to be known.
        self.needs_total: bool = self._numbers is not None and any(
            number < 0 for number in self._numbers
        )

    def admits(self, number: int, total: int | None) -> bool:
        """Return whether a pass is selected, of a total number of passes, if that is known."""
        if number % self._every:
            return False
        if self._predicate is not None:
            return bool(self._predicate(number))
        if self._numbers is None or number in self._numbers:
            return True
        return self.needs_total and total is not None and number - total in self._numbers

    def __repr__(self) -> str:
        every = f", every {self._every}" if self._every > 1 else ""
        if self._predicate is not None:
            return f"passes by {self._predicate!r}{every}"
        if self._numbers is None:
            return f"all passes{every}"
        return f"passes {sorted(self._numbers)}{every}"


def _ints(numbers: Any, option: str) -> list[int]:
    listed = [numbers] if isinstance(numbers, int) else numbers
    try:
        listed = list(listed)
    except TypeError:
        listed = [listed]
    for number in listed:
        if type(number) is not int:
            raise InputError(
                f"{option}= takes numbers of {option}, or a function from the number to a bool, "
                f"not {number!r}"
            )
    return listed


# Effects: the change of a tensor by an insertion, as a function of tensors to be compiled.


class Effect(NamedTuple):
    """The change of a tensor by an insertion in one call."""

    # Given the tensor and `tensors`, returns the new tensor, or None to keep it. With `keep` it
    # returns a tuple of that and of the tensors to keep.
    function: Callable[..., Any]
    # The other tensors that it needs. They are inputs of compiled graphs, so that one graph serves
    # calls with different tensors.
    tensors: tuple[Tensor, ...]
    key: Hashable  # the rest that it depends on: effects with equal keys do the same
    keep: Callable[[tuple[Tensor, ...]], None] | None = None  # keeps tensors after the run
    kept: int = 0  # their number
    check: Callable[..., str | None] | None = None  # see `engine.splices.SpliceStep`


_Method = TypeVar("_Method", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")


def depends_on(*names: str) -> Callable[[_Method], _Method]:
    """Mark a method whose result depends on these attributes of an object only.

    It is a method that decides what an object does: `effect`, `effect_of_bend` or `get_value`. As
    long as the attributes are the same, it is not called again.
    """

    def mark(method: _Method) -> _Method:
        method.reads = names  # type: ignore[attr-defined]
        return method

    return mark


def reads_of(cls: type) -> tuple[str, ...] | None:
    """Return the attributes that decide what objects of a class do; None if there may be others."""
    for name in _DECIDING:
        method = getattr(cls, name, None)
        if method is not None:
            reads: tuple[str, ...] | None = getattr(method, "reads", None)
            return reads
    return None


_DECIDING = ("effect_of_bend", "effect", "get_value")


def _number_or_tensor(value: Any, like: TensorMeta) -> Tensor | str | None:
    """Return an operand as a tensor that gives the same results with another operand.

    None for a constant of the graph; or why it can be neither.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return "it computes with a tensor other than a plain dense one"
        return value
    if type(value) is float and like.dtype.is_floating_point and like.shape:
        # torch does the same to a number next to a tensor that has dimensions.
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (bool, int, float, complex):
        return None
    return f"it computes with {value!r}"


def effect_of_value(
    compute: Callable[[Any, Any], Any], value: Any, like: TensorMeta, *key: Hashable
) -> Effect | str:
    """Return the effect of a function of a tensor and one value, a number or tensor.

    Given both, `compute` returns the new tensor; the key is everything that it depends on.
    """
    given = _number_or_tensor(value, like)
    if isinstance(given, str):
        return given
    if given is None:
        return Effect(lambda tensor: compute(tensor, value), (), (*key, type(value), repr(value)))
    return Effect(compute, (given,), (*key, "number" if type(value) is float else "tensor"))


def number_operand(number: Any, tensor: Tensor) -> Any:
    """Return an operand of a tensor, which was a number before it became an input.

    Next to a tensor without dimensions it would influence the dtype of the result, unlike a number.
    """
    if tensor.dim() or not isinstance(number, Tensor):
        return number
    if tensor.dtype not in (torch.float32, torch.float64):  # torch computes in a wider one
        raise ValueError(f"a number is computed with one element of {tensor.dtype}")
    return number.to(tensor.dtype)


def chain_effects(first: Effect, second: Effect) -> Effect:
    """Return the effect of one effect after another."""
    count, one, two = len(first.tensors), first.function, second.function

    def both(tensor: Tensor, *tensors: Tensor) -> Any:
        made = one(tensor, *tensors[:count])
        tensor = tensor if made is None else made
        made = two(tensor, *tensors[count:])
        return tensor if made is None else made

    return Effect(both, first.tensors + second.tensors, (first.key, second.key))


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch casts one dtype to another; compilers do not follow `torch.can_cast`."""
    if source.is_complex and not target.is_complex:
        return False
    if source.is_floating_point and not (target.is_floating_point or target.is_complex):
        return False
    return source is torch.bool or target is not torch.bool


def keep_unchanged(tensor: Tensor) -> None:
    """Keep a tensor as it is."""


# Values that an observer may keep without copying them. Observers that are called after a compiled
# run receive tensors that the graph returned for them. If nobody else has such a tensor, nor its
# memory, the first observer that wants a copy takes it as it is.


class _FreeValues(threading.local):
    identities: set[int] = frozenset()  # type: ignore[assignment]


_handed = _FreeValues()


def hand_over(values: Iterable[Tensor]) -> None:
    """Let observers that this thread calls take some tensors, and no other ones.

    The caller keeps them alive as long, and takes them back with `hand_over(())`.
    """
    _handed.identities = {*map(id, values)}


def takes(value: Any) -> bool:
    """Return whether the caller may keep a value without a copy; from now on, nobody else may."""
    found = _handed.identities
    if id(value) not in found:
        return False
    found.discard(id(value))
    return True


def subclasses_of(kind: type[_Kind]) -> Iterator[type[_Kind]]:
    """Yield the classes that there are below a class."""
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses_of(inner)
