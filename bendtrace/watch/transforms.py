"""The transforms of torch.func, and hooks on tensors: functions of functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from bendtrace.python.internals import internal
from bendtrace.tape.watchers import current_watcher

P = ParamSpec("P")
R = TypeVar("R")


_NAMES = (
    "func", "functorch", "vmap", "grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd",
    "hessian", "linearize",
)  # fmt: skip
apis: Any = internal("torch._functorch.apis", None, "torch.func", *_NAMES)
eager_transforms: Any = internal("torch._functorch.eager_transforms", None, "torch.func", *_NAMES)


# The transforms of torch.func: functions of functions, so each is one op.
#
# Most give tensors. `vjp` and `linearize` also give a function, which holds what they computed: the
# tape has a tensor without content that carries it, and each of its calls is an op of that.


def as_one_op(function: Callable[P, R]) -> Callable[P, R]:
    """Record a function as one op wherever a run calls it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        watcher = current_watcher()
        if watcher is None:
            return function(*args, **kwargs)
        result: R = watcher.opaque_call(function, args, kwargs)
        return result

    return call


def entries_of_transforms() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    # What most come down to, whichever way the model reached them.
    for owner, name in (
        (apis, "vmap_impl"), (eager_transforms, "grad_impl"),
        (eager_transforms, "grad_and_value_impl"), (eager_transforms, "_jvp_with_argnums"),
    ):  # fmt: skip
        if hasattr(owner, name):
            yield owner, name, as_one_op(getattr(owner, name))
    if eager_transforms is None:
        return
    if hasattr(eager_transforms, "_vjp_with_argnums"):
        pulled = _with_function(eager_transforms._vjp_with_argnums, "vjp")
        yield eager_transforms, "_vjp_with_argnums", pulled
    for name, ours in (
        ("jacrev", _jacrev), ("linearize", _with_function(torch.func.linearize, "linearize")),
    ):  # fmt: skip
        yield torch.func, name, ours
        yield eager_transforms, name, ours
    if hasattr(eager_transforms, "lazy_dynamo_disallow"):  # of a `linearize` taken before the run
        yield eager_transforms, "lazy_dynamo_disallow", _traces_unseen


def _with_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return one that does the same in two ops: one for its values, one that calls its function."""

    def values(*args: Any, **kwargs: Any) -> Any:
        output, linear, *more = function(*args, **kwargs)
        carrier = torch.empty(0)
        carrier.linear = linear  # type: ignore[attr-defined]
        return (output, carrier, *more)

    values.__name__ = values.__qualname__ = name

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return function(*args, **kwargs)
        output, carrier, *more = watcher.opaque_call(values, args, kwargs)

        def linear(*tangents: Any, **options: Any) -> Any:
            return _applied(carrier, *tangents, **options)

        return (output, linear, *more)

    return call


def _apply(carrier: Any, *tangents: Any, **options: Any) -> Any:
    return carrier.linear(*tangents, **options)


_apply.__name__ = _apply.__qualname__ = "linear_map"
_applied = as_one_op(_apply)
_original_jacrev = torch.func.jacrev


def _jacrev(func: Callable[..., Any], *options: Any, **named: Any) -> Callable[..., Any]:
    checked = _original_jacrev(func, *options, **named)

    @functools.wraps(func)
    def wrapper(*args: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return checked(*args)
        return watcher.opaque_call(_jacobian, (func, options, named, args), {})

    return wrapper


def _jacobian(func: Any, options: Any, named: Any, args: Any) -> Any:
    return _original_jacrev(func, *options, **named)(*args)


_jacobian.__name__ = _jacobian.__qualname__ = "jacrev"


def _traces_unseen(function: Callable[..., Any]) -> Any:
    watcher = current_watcher()
    if watcher is None or function is not _make_fx:
        return _disallow(function)
    watcher.unseen("torch.func.linearize, taken before the run,")

    def traces(traced: Callable[..., Any]) -> Callable[..., Any]:
        made = _disallow(_make_fx)(traced)

        def call(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():  # else numbers of the run get into the graph
                return made(*args)

        return call

    return traces


_make_fx: Any = getattr(eager_transforms, "make_fx", None)
_disallow: Any = getattr(eager_transforms, "lazy_dynamo_disallow", None)


# Hooks that a model puts on tensors that it computes, which each replay puts on its own.
#
# `tensor.register_hook(function)` returns a handle, which can remove the hook again. The tape
# has a tensor without content that carries it, and taking it away is an op of that.


REGISTERS: frozenset[Any] = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
)


@functools.cache
def registers(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return an equivalent of one of `REGISTERS` that returns a tensor with the handle."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        carrier = torch.empty(0)
        carrier.handle = function(*args, **kwargs)  # type: ignore[attr-defined]
        return carrier

    call.__name__ = call.__qualname__ = function.__name__
    return call


@as_one_op
def remove_hook(carrier: Any) -> None:
    """Remove the hook that a carrier holds the handle of."""
    carrier.handle.remove()


remove_hook.gives_nothing = True  # type: ignore[attr-defined]


class HandleOfRun(RemovableHandle):
    """The handle of a hook that a model receives while it is recorded; the carrier has the hook.

    While a run follows a script, something else is in the place of the carrier.
    """

    def __init__(self, carrier: Any) -> None:
        if hasattr(carrier, "handle"):
            self.__dict__.update(vars(carrier.handle))
        self._carrier = carrier

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook(self._carrier)

    def __getstate__(self) -> Any:
        return self._carrier.handle.__getstate__()
