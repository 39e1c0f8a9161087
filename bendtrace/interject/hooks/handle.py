"""HookHandle: one function on one module, which can be switched on and off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.interject.hooks.naming import named
from bendtrace.interject.hooks.station import activate, deactivate

if TYPE_CHECKING:
    from bendtrace.interject.hooks.function import HookFunction

__all__ = ["HookHandle"]

_T = TypeVar("_T", bound=Tensor | None)
_orders = itertools.count()


class HookHandle:
    """One function that is registered on one module. A `HookManager` makes these.

    Attributes:
        hook_fn: the function, as a `HookFunction`.
        module: the module.
        module_name: the id of the module.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> def show(module, inputs, outputs):
        ...     print(module.name, tuple(outputs[0].shape))
        >>> _ = manager.register_forward_hook(show, hook_fn_name="show", first=linear)
        >>> handle = manager.name_to_hookhandle["show[first]"]
        >>> _ = linear(torch.ones(2, 1))
        first (2, 1)
        >>> handle.deactivate()
        >>> _ = linear(torch.ones(2, 1))
        >>> handle
        <HookHandle show[first]: inactive>
    """

    def __init__(
        self,
        hook_fn: HookFunction,
        module: nn.Module,
        module_name: str,
        remove: Callable[[HookHandle], None],
    ) -> None:
        self.hook_fn = hook_fn
        self.module = module
        self.module_name = module_name
        self._order = next(_orders)
        self._remove: Callable[[HookHandle], None] | None = remove
        self._active = False

    @property
    def name(self) -> str:
        """Its id: those of the function and of the module, as `function[module]`."""
        return f"{self.hook_fn.name}[{self.module_name}]"

    @property
    def active(self) -> bool:
        """Whether the function is called when the module is."""
        return self._active

    @property
    def removed(self) -> bool:
        """Whether it was removed from its manager, and cannot be activated any more."""
        return self._remove is None

    def is_active(self) -> bool:
        """Whether the function is called when the module is."""
        return self._active

    def activate(self) -> None:
        """Have the function called when the module is.

        Raises:
            InputError: if the hook was removed.
        """
        if self._remove is None:
            raise InputError(f"{self.described} was removed: register it anew")
        if not self._active:
            self._active = True
            activate(self)

    def deactivate(self) -> None:
        """Have the function not called for now."""
        if self._active:
            self._active = False
            deactivate(self)

    def remove(self) -> None:
        """Deactivate it for good, and purge it from the tables of its manager."""
        if self._remove is not None:
            remove, self._remove = self._remove, None
            self.deactivate()
            remove(self)

    # What the calls of the module use

    @property
    def order(self) -> int:
        """Its place among all that was registered."""
        return self._order

    @property
    def described(self) -> str:
        """The start of a sentence about it."""
        kind = self.hook_fn.hook_type.replace("_", " ")
        return f"{kind} {self.hook_fn.name!r} on module {self.module_name!r}"

    def call(self, module: nn.Module, *values: Any) -> Any:
        """Call the function for a module: its own, or a copy of it."""
        with named(module, self.module_name):
            return self.hook_fn.function(module, *values)

    def checked(
        self,
        returned: Any,
        given: tuple[_T, ...],
        what: str,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> tuple[_T, ...]:
        """Return what a hook returned, or what it was given if that is None.

        Args:
            returned: what the hook returned.
            given: what may be replaced by it.
            what: what that is called.
            shapes: of gradients: their shapes; they may be None.

        Raises:
            InputError: if that is not a tuple of as many tensors.
        """
        if returned is None:
            return given
        if (
            type(returned) is not tuple
            or len(returned) != len(given)
            or not all(
                isinstance(item, Tensor) or (shapes is not None and item is None)
                for item in returned
            )
        ):
            plural = "" if len(given) == 1 else "s"
            raise InputError(
                f"{self.described} has to return None, or the {what} as a tuple of {len(given)} "
                f"tensor{plural}; it returned {_kind(returned)}"
            )
        for place, shape in enumerate(shapes or ()):
            new = returned[place]
            if new is not None and new.shape != shape:
                raise InputError(
                    f"{self.described} returned a gradient of shape {tuple(new.shape)} for input "
                    f"{place}, which has shape {tuple(shape)}"
                )
        return returned

    def __repr__(self) -> str:
        state = "removed" if self._remove is None else "active" if self._active else "inactive"
        return f"<HookHandle {self.name}: {state}>"


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    return f"a {type(value).__name__}"
