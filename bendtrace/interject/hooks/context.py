"""Hooks that are active for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from bendtrace.interject.hooks.handle import HookHandle

if TYPE_CHECKING:
    from bendtrace.interject.hooks.manager import HookManager

__all__ = ["HookContext"]


class HookContext:
    """A context in which hooks are active; each is afterwards what it was before.

    Contexts can be nested, and one can be entered several times. Which hooks are meant is looked
    up when it is entered. A hook that is removed meanwhile stays removed.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> hook = manager.register_forward_hook(print, first=linear, activate=False)
        >>> with manager.hook_all_context():
        ...     hook.handles[0].active
        True
        >>> hook.handles[0].active
        False
    """

    def __init__(self, manager: HookManager, select: Callable[[], Iterable[HookHandle]]) -> None:
        self._manager = manager
        self._select = select
        self._before: list[list[tuple[HookHandle, bool]]] = []

    def __enter__(self) -> HookManager:
        handles = list(self._select())
        self._before.append([(handle, handle.active) for handle in handles])
        for handle in handles:
            handle.activate()
        return self._manager

    def __exit__(self, *error: object) -> None:
        for handle, was_active in self._before.pop():
            if was_active and not handle.removed:
                handle.activate()
            elif not was_active:
                handle.deactivate()
