"""Recording one call of a module or function: binding its arguments, running it, cleaning up."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from bendtrace.python.lazy import errors
from bendtrace.record.recorder import Recorder, Recording
from bendtrace.record.self_test import look_once
from bendtrace.tape.captured import Access, Captured, CaptureKind
from bendtrace.watch.environment import Environment
from bendtrace.watch.mode_queries import seeing_modes, without
from bendtrace.watch.owners import states_of
from bendtrace.watch.rank_sync import ENDS, joint_recording

if TYPE_CHECKING:
    from bendtrace.insert.inserter import Inserter
    from bendtrace.log.capture import ValueCapture
    from bendtrace.record.script import Script
    from bendtrace.record.varying import Lifting


class Signature:
    """Gives arguments the same names however they were passed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function.forward if isinstance(function, nn.Module) else function
        self._function = function
        self._called = getattr(called, "__func__", called)
        # True if it may see more than this: which arguments are passed by position, and the order
        # of the others. So may a wrapper with the signature of what it calls.
        self.sees_forms: bool = _sees_forms(function)
        self._forms: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}
        self._arranged: dict[int | tuple[int | str, ...], _Arrangement] = {}
        try:
            parameters = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):  # a builtin: positions have no names
            parameters = []
        gathering = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        # `*a` names no argument `a`: with `**others`, that is one like others.
        named = [p.name for p in parameters if p.kind not in gathering]
        self.parameters: frozenset[str] = frozenset(named)  # that can be passed by name
        self._order = {name: position for position, name in enumerate(named)}
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a name for each positional and then each keyword argument."""
        form = (len(args), tuple(kwargs))
        names = self._forms.get(form)
        if names is None:
            given = self._positional[: len(args)]
            rest = [f"{self._rest}[{i}]" for i in range(len(args) - len(given))]
            # A positional-only parameter leaves its name free for a keyword, and a dict can have
            # any text as a key.
            reserved = ("**", f"{self._rest}[")
            named = (
                f"**{name}" if name in given or name.startswith(reserved) else name
                for name in kwargs
            )
            names = self._forms[form] = (*given, *rest, *named)
        return names

    def notice_changes(self) -> bool:
        """Return whether the function sees the forms of calls only now: forward was replaced."""
        if self.sees_forms:
            return False
        if isinstance(self._function, nn.Module):
            called = self._function.forward
            self.sees_forms = getattr(called, "__func__", called) is not self._called
        self.sees_forms = self.sees_forms or _sees_forms(self._function)
        return self.sees_forms

    def form(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_seen: bool = False
    ) -> tuple[str, ...]:
        """Return how arguments are passed, as far as somebody may see it; () if nobody can.

        With `is_seen`, something inserted receives them as they are passed.
        """
        return (f"{len(args)} by position", *kwargs) if is_seen or self.sees_forms else ()

    def named_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_seen: bool = False
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return the names of the arguments, with their form, and the values (see `form`)."""
        names, values = self.arrange(args, kwargs)
        if is_seen or self.sees_forms:
            names = (*names, *self.form(args, kwargs, is_seen))
        return names, values

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, in an order independent of how they were passed."""
        return dict(zip(*self.arrange(args, kwargs), strict=True))

    def arrange(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values of the arguments, in the order of `bind`."""
        form: int | tuple[int | str, ...] = (len(args), *kwargs) if kwargs else len(args)
        arranged = self._arranged.get(form)
        if arranged is None:
            arranged = self._arranged[form] = self._arrangement(args, kwargs)
        names, pick = arranged
        values = (*args, *kwargs.values()) if kwargs else args
        return names, values if pick is None else pick(values)

    def _arrangement(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Arrangement:
        names = self.names(args, kwargs)
        positions = {name: position for position, name in enumerate(names)}
        last = len(self._order)
        # Keyword arguments that the signature does not name keep their order.
        ordered = tuple(sorted(positions, key=lambda name: self._order.get(name, last)))
        if not kwargs or ordered == names:
            return names, None
        picked = [positions[name] for name in ordered]
        if len(picked) == 1:  # a getter of a single one would not return a tuple
            return ordered, operator.itemgetter(slice(picked[0], picked[0] + 1))
        return ordered, operator.itemgetter(*picked)


# Names of arguments, and a getter that puts their values into the same order, unless they are in
# it.
_Arrangement = tuple[tuple[str, ...], Callable[[tuple[Any, ...]], tuple[Any, ...]] | None]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: Signature,
    script: Script | None = None,
    observer: ValueCapture | None = None,
    inserter: Inserter | None = None,
    reads_states: bool = False,
    keeps_errors: bool = False,
    lifting: Lifting | None = None,
) -> Recording:
    """Run `function(*args, **kwargs)`, a module, bound method or function, and record what happens.

    The script of a resumed run says what was done before; the observer is shown the values of the
    run; the inserter puts its own ops into it. With `reads_states`, it reads all states in which
    the run asks for values. With `keeps_errors`, a run that raises is recorded up to there, instead
    of raising.

    Raises:
        Uninitialized: there are parameters that the first call makes.
        Exception: whatever the function raises, unchanged.
    """
    around = seeing_modes()  # which see the model, and not the library
    with without(around):
        look_once()
        code = {} if inserter is None else inserter.code
        inputs = frozenset() if lifting is None else lifting.inputs
        arguments, goes_on = signature.bind(args, kwargs), script is not None
        environment = Environment(function, arguments, code, inputs, goes_on)
        if not environment.is_repeated and (environment.is_lazy or has_lazy_modules(function)):
            raise errors.Uninitialized(function)
        for tensor in () if script is None else script.cached:
            environment.find_cached(tensor)  # so that the run reads what its program reads
        recorder = Recorder(
            function, environment, script, observer, inserter, reads_states, keeps_errors,
            lifting,
        )  # fmt: skip
        recorder.around = around
        received, positional = _received_arguments(recorder), len(args)
        given = [received[name] for name in signature.names(args, kwargs)]
        try:
            with joint_recording(
                function, environment.names, recorder.tape, goes_on=script is not None
            ) as joint:
                recording = recorder.run(
                    tuple(given[:positional]), dict(zip(kwargs, given[positional:], strict=True))
                )
                is_seen = inserter is not None and inserter.sees_inputs
                recording.form = signature.form(args, kwargs, is_seen)
                if joint is not None:
                    joint.ends(recording.result)
                return recording
        finally:
            environment.release()


def _sees_forms(function: Any) -> bool:
    """Return whether a function may see whether an argument is passed by position or by name."""
    if isinstance(function, nn.Module):
        if type(function).__call__ is not nn.Module.__call__:
            return True
        function = function.forward
    while True:
        if hasattr(function, "__signature__") or hasattr(function, "__wrapped__"):
            return True
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            break
    if isinstance(function, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    call = inspect.getattr_static(type(function), "__call__", None)
    return isinstance(call, types.FunctionType) and _sees_forms(call)


def has_lazy_modules(function: Callable[..., Any]) -> bool:
    """Return whether a model has lazy modules that have not been called yet."""
    return isinstance(function, nn.Module) and any(
        is_lazy(tensor) for _, tensor in states_of(function)
    )


def _received_arguments(recorder: Recorder) -> dict[str, Any]:
    """Record the arguments; return what the model receives by name: numbers become traced."""
    parts, stand_in = recorder.environment.arguments, recorder.environment.stand_in
    children: dict[int, list[Captured]] = {}
    traced: dict[int, Any] = {}
    for part in parts:
        if part.parent is not None:
            children.setdefault(part.parent.index, []).append(part)
        if part.kind in (CaptureKind.TENSOR, CaptureKind.NUMBER):
            traced[part.index] = recorder.argument(part, part.value)

    return {
        part.label: _received_argument(part, children, traced, stand_in)
        for part in parts
        if part.access is Access.ROOT
    }


# No function within the one above: it would refer to itself, and keep the arguments alive.
def _received_argument(
    part: Captured,
    children: dict[int, list[Captured]],
    traced: dict[int, Any],
    stand_in: Callable[[Any], Any],
) -> Any:
    if part.kind is CaptureKind.NUMBER:
        return traced[part.index]
    if part.kind is CaptureKind.ALIAS:
        return stand_in(part.value.value)
    if part.type is not tuple or part.index not in children:  # a large tuple is compared as a whole
        return stand_in(part.value)
    items = tuple(
        _received_argument(child, children, traced, stand_in) for child in children[part.index]
    )
    same = all(new is old for new, old in zip(items, part.value, strict=True))
    return part.value if same else items


ENDS.add(record.__code__)
