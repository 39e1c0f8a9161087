"""TackleBox: `HookManager`, with its rule for names.

>>> import torch, bendtrace as bt
>>> first, other = torch.nn.ReLU(), torch.nn.ReLU()
>>> manager = bt.compat.tacklebox.HookManager()
>>> _ = manager.register_forward_hook(print, hook_fn_name="show", first=first)
>>> _ = manager.register_forward_hook(print, hook_fn_name="tell", second=first, first=other)
>>> list(manager.name_to_hookhandle)
['show[first]', 'show[first_1]']
"""

from __future__ import annotations

from collections.abc import Iterable

from bendtrace import hooks
from bendtrace.hooks import HookFunction, HookHandle
from bendtrace.interject.hooks import free_name

__all__ = ["HookFunction", "HookHandle", "HookManager"]


class HookManager(hooks.HookManager):
    """A `bendtrace.HookManager` that accepts every name.

    A second name for a module or function is ignored, and a name that is taken gets a number.
    Everything else is as in `bendtrace.HookManager`: contexts restore the active hooks,
    `module.name` exists while a hook runs, and gradients are those of one call.

    Args:
        model: modules registered without a name get their name in this model; hooks on the modules
            of a `BendedModule` are insertions.

    Example:
        >>> import torch, bendtrace as bt
        >>> relu, manager = torch.nn.ReLU(), bt.compat.tacklebox.HookManager()
        >>> _ = manager.register_forward_hook(lambda module, *values: print(module.name), a=relu)
        >>> _ = manager.register_forward_hook(lambda module, *values: None, b=relu)
        >>> manager.name_of(relu)
        'a'
    """

    def _second_name(self, known: str, wish: str, what: str) -> str:
        return known

    def _free_name(self, wish: str, by: str, taken: Iterable[str]) -> str:
        return free_name(wish, taken)
