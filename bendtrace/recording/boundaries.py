"""Where the tracer steps in besides the function mode, and how it steps out again.

A function mode does not see the call of a module, nor an `autograd.Function`, nor the seeding
of torch's generator. While at least one recorder is running in the process, the few entry
points below are exchanged for ones that first look whether the *calling thread* is recording;
when the last recorder ends, the originals are put back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["BOUNDARY_CODES", "Watcher", "current_watcher", "watching"]


class Watcher(Protocol):
    """What the entry points report to."""

    def module_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call as a scope."""

    def opaque_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` as one op."""


class _Local(threading.local):
    watcher: Watcher | None = None


_local = _Local()
_lock = threading.Lock()
_running = 0

_function_apply = torch.autograd.Function.__dict__["apply"]
_has_torch_function = torch.overrides.has_torch_function
_manual_seed = torch.random.manual_seed
_set_rng_state = torch.set_rng_state


def current_watcher() -> Watcher | None:
    """Return the recorder of the calling thread, if it is recording."""
    return _local.watcher


class _ModuleCall:
    """Stands in for `nn.Module._compiled_call_impl`, which `nn.Module.__call__` asks first.

    Unlike `__call__` itself, nothing keeps a reference to it (torch._dynamo, when it is
    imported, does to `__call__`). A data descriptor, so that modules that were compiled run
    as they are while they are traced. Seen in torch 2.6 to 2.13; test_boundaries.py notices.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return None
        watcher = _local.watcher
        if watcher is None:
            return module.__dict__.get("_compiled_call_impl")

        def call(*args: Any, **kwargs: Any) -> Any:
            return watcher.module_call(module, args, kwargs)

        return call

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["_compiled_call_impl"] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__["_compiled_call_impl"]


def _watched_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    apply = _function_apply.__get__(None, cls)
    watcher = _local.watcher
    return apply(*args, **kwargs) if watcher is None else watcher.opaque_call(apply, args, kwargs)


def _watched_has_torch_function(arguments: Any) -> bool:
    # Modules ask this to choose a fused path (nn.TransformerEncoderLayer in torch 2.5 to
    # 2.13). The recorder itself must not change their choice; tensor subclasses still do.
    if _local.watcher is None:
        return _has_torch_function(arguments)
    with torch._C.DisableTorchFunction():
        return any(
            type(argument).__torch_function__ is not torch._C._disabled_torch_function_impl
            for argument in arguments
            if isinstance(argument, torch.Tensor) and type(argument) not in _TENSORS
        )


_TENSORS = frozenset({torch.Tensor, nn.Parameter})


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = _local.watcher
        if watcher is None:
            return function(*args, **kwargs)
        return watcher.opaque_call(function, args, kwargs)

    return call


_seed = _watched(_manual_seed)
_set_state = _watched(_set_rng_state)

_ENTRY_POINTS: tuple[tuple[Any, str, Any, Any], ...] = (
    (nn.Module, "_compiled_call_impl", None, _ModuleCall()),
    (torch.autograd.Function, "apply", _function_apply, classmethod(_watched_apply)),
    (torch.overrides, "has_torch_function", _has_torch_function, _watched_has_torch_function),
    (torch, "manual_seed", _manual_seed, _seed),
    (torch.random, "manual_seed", _manual_seed, _seed),
    (torch, "set_rng_state", _set_rng_state, _set_state),
    (torch.random, "set_rng_state", _set_rng_state, _set_state),
)

BOUNDARY_CODES = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


def _enter() -> list[Any]:
    before = [vars(owner)[name] for owner, name, _, _ in _ENTRY_POINTS]
    for owner, name, _, ours in _ENTRY_POINTS:
        setattr(owner, name, ours)
    return before


def _leave(before: list[Any]) -> None:
    for (owner, name, original, ours), value in zip(_ENTRY_POINTS, before, strict=True):
        current = vars(owner)[name]
        if current is ours:
            setattr(owner, name, value)
        elif getattr(current, "__wrapped__", None) is ours:
            # torch._dynamo wraps manual_seed when it is imported, and that was during the run.
            setattr(owner, name, torch._disable_dynamo(original))  # type: ignore[attr-defined]


_before: list[Any] = []


@contextmanager
def watching(watcher: Watcher | None) -> Iterator[None]:
    """Report the calling thread's module calls and opaque calls to `watcher`."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _before[:] = _enter()
    outer, _local.watcher = _local.watcher, watcher
    try:
        yield
    finally:
        _local.watcher = outer
        with _lock:
            _running -= 1
            if _running == 0:
                _leave(_before)
