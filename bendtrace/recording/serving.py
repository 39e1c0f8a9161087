"""Redirects the calls of a module while one of its methods runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bendtrace.recording.rank_sync import ENDS, is_joint, joint_call

__all__ = ["call_itself", "served_by", "serving"]

_KEY = "_compiled_call_impl"  # nn.Module.__call__ checks it first, as in `intercepts`
_lock = threading.Lock()


class _Server:
    """What is called instead of a module."""

    def __init__(self, call: Callable[..., Any], before: Any) -> None:
        self.call = call
        self.before = before
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@contextmanager
def serving(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Redirect `module(...)` to `call(...)` within the context, in all threads."""
    attributes = vars(module)
    with _lock:
        before = attributes.get(_KEY)
        server = before if isinstance(before, _Server) else _Server(call, before)
        attributes[_KEY] = server
        server.users += 1
    try:
        yield
    finally:
        with _lock:
            server.users -= 1
            if not server.users and attributes.get(_KEY) is server:
                if server.before is None:
                    del attributes[_KEY]
                else:
                    attributes[_KEY] = server.before


def served_by(module: Any) -> object | None:
    """Return the current target for the calls of a module; None if it is the module itself.

    It is the same object for as long as one of the methods of a `BendedModule` runs, such as
    `generate`.
    """
    server = vars(module).get(_KEY) if isinstance(module, nn.Module) else None
    return server if isinstance(server, _Server) else None


def call_itself(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a model itself, without the redirection."""
    if not is_joint(model):
        # Usually only the call: this is the whole overhead for a model that runs plainly.
        server = vars(model).get(_KEY) if isinstance(model, nn.Module) else None
        if not isinstance(server, _Server):
            return model(*args, **kwargs)
        return _call_itself(model, args, kwargs)
    with joint_call(model) as joint:
        output = _call_itself(model, args, kwargs)
        if joint is not None:
            joint.ends(output)
        return output


def _call_itself(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    server = served_by(model)
    if not isinstance(server, _Server):
        return model(*args, **kwargs)
    return (server.before or vars(nn.Module)["_call_impl"].__get__(model))(*args, **kwargs)


ENDS.add(call_itself.__code__)
