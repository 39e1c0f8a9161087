"""HookFunction: a function, the kind of hook that it is, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

if TYPE_CHECKING:
    from bendtrace.interject.hooks.handle import HookHandle

__all__ = ["CATEGORIES", "Category", "HookFunction", "ModuleTable"]

Category = Literal["forward_hook", "forward_pre_hook", "backward_hook"]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class ModuleTable(Mapping[nn.Module, "HookHandle"]):
    """Handles by module: by which object it is, however it compares or prints."""

    def __init__(self) -> None:
        self._handles: dict[int, HookHandle] = {}

    def _add(self, handle: HookHandle) -> None:
        self._handles[id(handle.module)] = handle

    def _remove(self, handle: HookHandle) -> None:
        del self._handles[id(handle.module)]

    def __getitem__(self, module: nn.Module) -> HookHandle:
        return self._handles[id(module)]

    def __contains__(self, module: object) -> bool:
        return id(module) in self._handles

    def __iter__(self) -> Iterator[nn.Module]:
        return (handle.module for handle in self._handles.values())

    def __len__(self) -> int:
        return len(self._handles)

    def __repr__(self) -> str:
        entries = (f"<{one.module_name}>: {one!r}" for one in self._handles.values())
        return f"{{{', '.join(entries)}}}"


class HookFunction:
    """A function that was registered as a hook of some kind. A `HookManager` makes these.

    Attributes:
        function: what was registered.
        hook_type: the kind: "forward_hook", "forward_pre_hook" or "backward_hook".
        name: its id.
        module_to_handle: the handles by module.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> hook = manager.register_forward_hook(print, hook_fn_name="show", first=linear)
        >>> hook
        <HookFunction show: forward_hook on first>
        >>> hook.module_to_handle[linear]
        <HookHandle show[first]: active>
    """

    def __init__(self, function: Callable[..., Any], hook_type: Category, name: str) -> None:
        self.function = function
        self.hook_type: Category = hook_type
        self.name = name
        self.module_to_handle = ModuleTable()

    @property
    def handles(self) -> tuple[HookHandle, ...]:
        """The handles, in the order of registration."""
        return tuple(self.module_to_handle.values())

    def activate(self) -> None:
        """Activate the function on all modules that it is registered on."""
        for handle in self.handles:
            handle.activate()

    def deactivate(self) -> None:
        """Deactivate the function on all modules that it is registered on."""
        for handle in self.handles:
            handle.deactivate()

    def __call__(self, *args: Any) -> Any:
        """Call the function itself."""
        return self.function(*args)

    def __repr__(self) -> str:
        modules = ", ".join(handle.module_name for handle in self.handles) or "no module"
        return f"<HookFunction {self.name}: {self.hook_type} on {modules}>"
