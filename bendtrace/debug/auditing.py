"""Doing replays again by the model itself, and comparing the two bit for bit."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bendtrace._trace import trace
from bendtrace.errors import AuditError, InputError
from bendtrace.python.compare import same_bits
from bendtrace.record.finish import Recording
from bendtrace.record.module_proxy import call_itself
from bendtrace.tape.captured import PLAIN_TYPES, Captured, CaptureKind
from bendtrace.tape.tape import Op, OpKind, refs_in
from bendtrace.watch.draws import RandomStates
from bendtrace.watch.functions import display_name
from bendtrace.watch.owners import module_tree
from bendtrace.watch.writes import storage_of

if TYPE_CHECKING:
    from bendtrace.module import BendedModule

P = ParamSpec("P")
R = TypeVar("R")


class Auditor:
    """Chooses replays to be done again."""

    def __init__(self, model: Callable[..., Any], share: float) -> None:
        self._model = model
        self._share = share
        self._chance = random.Random()  # its own: a model's random numbers stay what they are

    def begin(
        self, recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Audit | None:
        """Copy the inputs of a call and the state of the model, if the call is chosen."""
        if self._chance.random() >= self._share:
            return None
        return Audit(self._model, recording, args, kwargs)


class Audit:
    """One call: its inputs, and the state of the model before it.

    Tensors that the recorded run does not write to are not copied.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        recording: Recording,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._given = (model, args, dict(kwargs))
        shared = _unwritten(recording)
        try:
            with _Copying():
                memo = dict(shared)
                self._copies: Any = _deep_copy(self._given, memo)
                self._spare: Any = _deep_copy(self._given, dict(shared))
        except Exception as error:
            raise InputError(
                f"the model or its inputs cannot be copied, so no call can be audited: {error!r}"
            ) from error
        own = {id(vars(module)) for module in _modules_of(model)}
        for part in (change.part for change in recording.changes):
            if not {id(part.value), id(_part_value(part))} & (memo.keys() | own):
                raise InputError(
                    f"a call changes {part.label}, which is outside of the model and its inputs "
                    "and would be changed twice: such calls cannot be audited"
                )
        self._versions = [(tensor, tensor._version) for tensor in shared.values()]
        # Of closures and globals, which a copy shares with the model.
        environment = recording.environment
        self._generators = [
            part.value
            for part in (*environment.generators, *environment.host_generators)
            if part.value is not None and id(part.value) not in memo
        ]
        self._before = RandomStates(self._generators)

    def compare(self, recording: Recording, output: Any) -> None:
        """Let the model itself repeat a replay; raise if something is different."""
        after, wanted = RandomStates(self._generators), self._copies
        self._before.restore()
        try:
            result = call_itself(*self._copies)
            random_numbers = RandomStates(self._generators).states
        except Exception as error:
            raise self._error(recording, f"the model raises {error!r}") from error
        finally:
            after.restore()
        model, args, kwargs = self._given
        for what, given, native in (
            ("output", output, result),
            ("arguments", (args, kwargs), wanted[1:]),
            ("state", _module_state(model), _module_state(wanted[0])),
            ("random numbers", after.states, random_numbers),
        ):
            if not same_bits(given, native):
                raise self._error(recording, f"the model's own {what} {_WOULD_BE[what]} different")
        if any(tensor._version != version for tensor, version in self._versions):
            raise self._error(recording, "the model writes to a tensor that the replay left")

    def _error(self, recording: Recording, what: str) -> AuditError:
        after = RandomStates(self._generators)
        self._before.restore()
        try:
            anew = trace(self._spare[0], *self._spare[1], **self._spare[2])._recording
        except Exception as error:
            return AuditError(f"a replay was wrong: {what}; a new recording of it raises {error!r}")
        finally:
            after.restore()
        return AuditError(f"a replay was wrong: {what}; {_first_difference(recording, anew)}")


_WOULD_BE = {"output": "is", "arguments": "are", "state": "is", "random numbers": "are"}


class _Copying(TorchFunctionMode):
    """Lets tensors be copied that come from autograd."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                with torch.enable_grad():
                    memo[id(tensor)] = tensor.detach().requires_grad_().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _deep_copy(given: Any, memo: dict[int, Any]) -> Any:
    copies = copy.deepcopy(given, memo)
    for module in _modules_of(given[0]):
        for parameter in module.parameters(recurse=False):  # torch copies them without `grad`
            made = memo.get(id(parameter), parameter)
            if made is not parameter and parameter.grad is not None:
                made.grad = copy.deepcopy(parameter.grad, memo)
    return copies


def _unwritten(recording: Recording) -> dict[int, Tensor]:
    """Return the model's tensors that a run does not write to, as a memo for copying."""
    ops = recording.tape.ops
    written: set[int] = set()
    waiting = [index for op in ops for index in op.writes]
    while waiting:  # what is written may be a view of any of the arguments
        index = waiting.pop()
        if index not in written:
            written.add(index)
            waiting += [ref.index for ref in refs_in((ops[index].args, ops[index].kwargs))]
    states = {ops[index].target for index in written if ops[index].kind is OpKind.STATE}
    tensors: dict[Captured, Tensor] = {}
    for part in recording.environment.parts:
        if part.kind is CaptureKind.TENSOR and not part.is_argument:
            tensor = _part_value(part)
            if isinstance(tensor, Tensor):
                tensors[part] = tensor
    storages = {0, *(storage_of(tensors[part]) for part in states & tensors.keys())}
    # A backward pass inside of the run adds to `grad`, which is no write of an op.
    collects = not recording.environment.names.isdisjoint(("backward", "grad"))
    return {
        id(tensor): tensor
        for tensor in tensors.values()
        if tensor.is_leaf
        and storage_of(tensor) not in storages
        and not (collects and tensor.requires_grad)
    }


def _part_value(part: Captured) -> Any:
    try:
        return part.read(())
    except (LookupError, AttributeError, TypeError, ValueError):  # it is not there any more
        return None


def _modules_of(model: Any) -> Iterator[nn.Module]:
    while isinstance(model, functools.partial):
        model = model.func
    model = getattr(model, "__self__", model)
    return iter(module_tree(model) if isinstance(model, nn.Module) else ())


def _module_state(model: Any) -> list[Any]:
    """Return the state of a model's modules, without objects that only identity tells apart."""
    return [
        {key: value for key, value in _state_attributes(module).items() if _has_content(value)}
        for module in _modules_of(model)
    ]


def _state_attributes(module: nn.Module) -> dict[str, Any]:
    if not isinstance(module, torch.jit.ScriptModule):
        return vars(module)
    # A copy has other attributes than these, and parameters that are not leaves.
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {**{name: tensor.detach() for name, tensor in tensors}, "training": module.training}


def _has_content(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_has_content, value))
    if isinstance(value, dict):
        return all(map(_has_content, (*value.keys(), *value.values())))
    return isinstance(value, Tensor) or type(value) in PLAIN_TYPES


def _first_difference(replayed: Recording, anew: Recording) -> str:
    """Say where the model now leaves the run that was repeated."""
    for old, new in zip_longest(replayed.tape.ops, anew.tape.ops):
        if old is None:
            return f"first, it calls {_op_text(new)} as well"
        if new is None:
            return f"first, it does not call {_op_text(old)}"
        if old.does_the_same_as(new) or _are_of_one_name(old, new):
            continue
        if old.kind is not new.kind or str(old.target) != str(new.target):
            return f"first, it calls {_op_text(new)}, not {_op_text(old)}"
        pairs = zip_longest(_operands_of_op(old), _operands_of_op(new))
        given = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        return f"first, it gives {_op_text(new)} {given[1]!r}, not {given[0]!r}"
    return "it calls the same ops with the same arguments"


def _are_of_one_name(old: Op, new: Op) -> bool:
    """Return whether both return the value that two models have under one name."""
    return old.is_given and old.kind is new.kind and str(old.target) == str(new.target)


def _operands_of_op(op: Op) -> list[Any]:
    return [*op.args, *op.kwargs.values()]


def _op_text(op: Op) -> str:
    name = str(op.target) if op.kind in (OpKind.INPUT, OpKind.STATE) else display_name(op.target)
    places = () if op.site is None else op.site.places
    place = next((place for place in places if not place.in_torch), None)
    return name if place is None else f"{name} at {place} `{place.text}`"


def audit(bended: BendedModule[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the model; if the call is a replay, let the model itself repeat it, and compare.

    The model runs on copies of the inputs and of its state, with the same random numbers.
    Output, inputs, state and random numbers are compared bit by bit, gradients are not. If the
    model prints or sends something, it does so twice.

    Args:
        bended: the model.
        *args: positional arguments of the model.
        **kwargs: keyword arguments of the model.

    Returns:
        The output.

    Raises:
        AuditError: the model and the replay differ.
        InputError: something is inserted, or cannot be copied, or the model changes something
            outside of itself.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Dropout())
        >>> _ = bended(torch.ones(2)), bended.audit(torch.ones(2))
        >>> bended.stats.replays
        1
    """
    if bended._inserted:
        raise InputError("the model itself has nothing inserted: take that away first")
    auditor = Auditor(bended.model, 1.0)
    output: R = bended._dispatcher.call(args, kwargs, None, auditor)
    return output
