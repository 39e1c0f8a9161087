"""Redirects the calls of a module while one of its methods runs."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from bendtrace.record.module_proxy import REDIRECTING

_lock = threading.Lock()


class _Redirection:
    """The object that is called instead of a module."""

    def __init__(self, module: nn.Module, before: Any) -> None:
        self.module = module
        self.before = before
        self.users = 0
        # By thread: what its methods in progress have called, the innermost last.
        self.calls: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.current()
        return (self.itself() if call is None else call)(*args, **kwargs)

    def current(self) -> Callable[..., Any] | None:
        """Return what the calling thread calls; None where none of its methods is running."""
        calls = self.calls.get(threading.get_ident())
        if calls:
            return calls[-1]
        # A thread that such a method has made belongs to it; all others have the module itself.
        taken_along = vars(threading.current_thread()).get(_TAKEN_ALONG, ())
        return next((call for redirection, call in taken_along if redirection is self), None)

    def itself(self) -> Callable[..., Any]:
        """Return the call of the module without this."""
        return self.before or vars(nn.Module)["_call_impl"].__get__(self.module)  # type: ignore[no-any-return]


_TAKEN_ALONG = "_bendtrace_served"
_active: list[_Redirection] = []
_make_thread: Any = threading.Thread.__init__


@functools.wraps(_make_thread)
def _make_thread_of_method(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
    _make_thread(thread, *args, **kwargs)
    calls = ((redirection, redirection.current()) for redirection in tuple(_active))
    vars(thread)[_TAKEN_ALONG] = [pair for pair in calls if pair[1] is not None]


_made_of_method: Any = _make_thread_of_method


@contextmanager
def redirect_calls(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Redirect `module(...)` to `call(...)` within the context.

    This thread is redirected, and the threads that it makes. Others call the module itself, or
    what they redirect it to.
    """
    attributes = vars(module)
    thread = threading.get_ident()
    with _lock:
        before = attributes.get(REDIRECTING)
        redirection = before if isinstance(before, _Redirection) else _Redirection(module, before)
        attributes[REDIRECTING] = redirection
        if not redirection.users:
            if not _active and threading.Thread.__init__ is _make_thread:
                threading.Thread.__init__ = _made_of_method  # type: ignore[method-assign]
            _active.append(redirection)
        redirection.users += 1
        redirection.calls.setdefault(thread, []).append(call)
    try:
        yield
    finally:
        with _lock:
            calls = redirection.calls[thread]
            calls.pop()
            if not calls:
                del redirection.calls[thread]
            redirection.users -= 1
            if not redirection.users:
                _active.remove(redirection)
                if not _active and threading.Thread.__init__ is _made_of_method:
                    threading.Thread.__init__ = _make_thread  # type: ignore[method-assign]
                if attributes.get(REDIRECTING) is redirection:
                    if redirection.before is None:
                        del attributes[REDIRECTING]
                    else:
                        attributes[REDIRECTING] = redirection.before


def redirect_target(module: Any) -> object | None:
    """Return the current target for the calls of a module; None if it is the module itself.

    It is the same object for as long as one of the methods of a `BendedModule` runs, such as
    `generate`.
    """
    redirection = vars(module).get(REDIRECTING) if isinstance(module, nn.Module) else None
    return redirection if isinstance(redirection, _Redirection) else None


def call_redirected(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a module without the redirection, if its calls are redirected."""
    redirection = redirect_target(module)
    if not isinstance(redirection, _Redirection):
        return module(*args, **kwargs)
    return redirection.itself()(*args, **kwargs)


def in_steps(result: Any, within: Callable[[], AbstractContextManager[None]]) -> Any:
    """Return what a method has returned that runs later: each of its steps is run within a context.

    A generator, coroutine or asynchronous generator that has not begun does so; all else is
    returned as it is.
    """
    if type(result) is types.GeneratorType:
        is_new = inspect.getgeneratorstate(result) == inspect.GEN_CREATED
        return _run_in_steps(result, within) if is_new else result
    if type(result) is types.CoroutineType:
        is_new = inspect.getcoroutinestate(result) == inspect.CORO_CREATED
        return _awaited(result, within) if is_new else result
    if type(result) is types.AsyncGeneratorType:
        return _asynchronous_steps(result, within)
    return result


def _run_in_steps(made: Any, within: Callable[[], AbstractContextManager[None]]) -> Any:
    step = functools.partial(made.send, None)
    try:
        while True:
            with within():
                try:
                    value = step()
                except StopIteration as end:
                    return end.value
            try:
                step = functools.partial(made.send, (yield value))
            except GeneratorExit:
                raise
            except BaseException as error:
                step = functools.partial(made.throw, error)
    finally:
        with within():
            made.close()


class _ContextAwaitable:
    """Awaits what has the methods of a generator, within a context."""

    def __init__(self, made: Any, within: Callable[[], AbstractContextManager[None]]) -> None:
        self._made, self._within = made, within

    def __await__(self) -> Any:
        return _run_in_steps(self._made, self._within)


async def _awaited(made: Any, within: Callable[[], AbstractContextManager[None]]) -> Any:
    return await _ContextAwaitable(made, within)


async def _asynchronous_steps(
    made: types.AsyncGeneratorType[Any, Any], within: Callable[[], AbstractContextManager[None]]
) -> Any:
    step: Any = made.asend(None)
    try:
        while True:
            try:
                value = await _ContextAwaitable(step, within)
            except StopAsyncIteration:
                return
            try:
                step = made.asend((yield value))
            except GeneratorExit:
                raise
            except BaseException as error:
                step = made.athrow(error)
    finally:
        await _ContextAwaitable(made.aclose(), within)
