"""Interjections on plain modules, by torch's own hooks."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError
from bendtrace.interject.gradients import Through
from bendtrace.interject.insertion import as_interjection
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.passes import Passes
from bendtrace.interject.plan import Entry, Place, forms_of
from bendtrace.interject.sharing import shared_copy
from bendtrace.interject.structure import Mismatch, assemble, collect, take_apart
from bendtrace.recording.recorder import Recording

__all__ = ["interject_natively"]


def interject_natively(
    model: nn.Module,
    target_class: type[nn.Module],
    what: Any,
    clone: bool = True,
    allow_none: bool = False,
) -> nn.Module:
    """Insert something at the calls of modules of a class; see `interject_by_module_class_native`.

    Raises:
        InputError: something given makes no sense.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"hooks are for modules; {model!r} is none")
    if not (isinstance(target_class, type) and issubclass(target_class, nn.Module)):
        raise InputError(f"a class of modules has to be given, not {target_class!r}")
    interjection = as_interjection(what)
    if "instead" in forms_of(interjection):
        raise InputError(
            f"{interjection.label} works in place of a node, which no hook can: insert it with "
            "BendedModule.interject, or use replace_module_native"
        )
    model = shared_copy(model) if clone else model
    targets = {
        name: module for name, module in model.named_modules() if isinstance(module, target_class)
    }
    if not targets and not allow_none:
        raise InputError(f"the model has no {target_class.__name__}")
    counts = _Counts()
    model.register_forward_pre_hook(counts.begin)
    for name, module in targets.items():
        hooks = _Hooks(name, interjection, counts)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(hooks.leave, with_kwargs=True, always_call=True)
    return model


class _Counts:
    """How often each module was called in the call of the model that a thread is in."""

    def __init__(self) -> None:
        self._passes: dict[tuple[int, str], int] = {}

    def begin(self, model: nn.Module, args: Any) -> None:
        thread = threading.get_ident()
        for key in [key for key in self._passes if key[0] == thread]:
            del self._passes[key]

    def next(self, name: str) -> int:
        key = threading.get_ident(), name
        number = self._passes.get(key, 0)
        self._passes[key] = number + 1
        return number


class _Untold:
    """Stands for an insertion that there is no handle for."""

    passes = Passes()
    allow_none = True

    def fired(self, at: NodePass, changed: bool) -> None:
        """Note nothing."""

    def failed(self) -> None:
        """Note nothing."""

    def fired_backward(self, at: NodePass) -> None:
        """Note nothing."""

    def ran(self, recording: Recording) -> None:
        """Note nothing."""

    def is_known_to_change(self, path: str) -> bool:
        """Say that nothing is known."""
        return False


class _Call(NamedTuple):
    """A call that has begun.

    Attributes:
        at: which.
        through: what takes note of its gradients; None if nobody wants them.
        written: for a module that works in place, the tensor that it was given a copy of.
    """

    at: NodePass
    through: Through | None = None
    written: Tensor | None = None


class _Hooks:
    """The hooks of one module.

    Args:
        name: qualified name of the module.
        what: what is called.
        counts: counts the passes.
    """

    def __init__(self, name: str, what: Interjection, counts: _Counts) -> None:
        self._name = name
        self._what = what
        self._counts = counts
        self._entry = Entry(_Untold(), what, Place("node", name))
        # By thread: the calls that have begun, the innermost last. No threading.local, since
        # models are copied and pickled.
        self._running: dict[int, list[_Call]] = {}

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Called before all else that a call of the module does."""
        running = self._running.setdefault(threading.get_ident(), [])
        call = _Call(NodePass(self._name, self._counts.next(self._name), module))
        running.append(call)  # first of all: whatever is raised, `leave` is called
        if self._entry.before:
            given = self._what.before(call.at, Inputs(args, kwargs))
            if given is not None:
                args, kwargs = tuple(given), getattr(given, "kwargs", kwargs)
        if self._entry.backward:
            through = Through([self._entry], call.at)
            shape, found = take_apart((args, kwargs))
            numbers = [i for i, value in enumerate(found) if isinstance(value, Tensor)]
            first = found[numbers[0]] if numbers else None
            for i, tensor in zip(numbers, through.enter([found[i] for i in numbers]), strict=True):
                found[i] = tensor
            written = None
            if getattr(module, "inplace", False) and numbers:
                # No alias can be written to.
                written, found[numbers[0]] = first, found[numbers[0]].clone()
            running[-1] = _Call(call.at, through, written)
            args, kwargs = assemble(shape, found)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Called after all else, without an output if something was raised."""
        at, through, written = self._running[threading.get_ident()].pop()
        if output is None:
            return None
        shape, found = take_apart(output)
        if through is not None:
            through.watch([value for value in found if isinstance(value, Tensor)])
        given = None
        if self._entry.after:
            given = self._what.after(at, Inputs(args, kwargs), output)
        if given is not None:
            try:
                collect(shape, given, found)
            except Mismatch as error:
                raise InterjectionError(
                    f"{self._what.label} at {at.path or '<root>'} gave what cannot take the place "
                    f"of the module's value: {error}",
                    at.path,
                ) from None
        if written is not None:
            return written.copy_(output if given is None else given)
        return given
