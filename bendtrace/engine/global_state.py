"""The global state around a call, which a replay has to find as the recorded run found it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as _module

from bendtrace.python.internals import internal
from bendtrace.record.recorder import Recorder
from bendtrace.tape.contexts import (
    Context,
    any_autocast,
    current_context,
    current_settings,
    function_modes,
)
from bendtrace.watch.monkeypatches import Monkeypatches, monkeypatches


class GlobalState(NamedTuple):
    """Grad mode, autocast, default dtype, function modes, global hooks and the like."""

    context: Context  # what an op called now would run under
    dtype: torch.dtype  # the default dtype
    modes: tuple[Any, ...]  # active function modes, outermost first; a device context by its device
    hooked: bool  # whether hooks are registered for all modules of the process
    fast_attention: bool  # whether fused layers may take their fast path
    settings: tuple[Any, ...]  # other settings of torch's
    monkeypatches: Monkeypatches  # what stands in for functions of torch and the like

    @classmethod
    def current(cls) -> GlobalState:
        """Return the state now."""
        modes = _mode_key() if function_modes() else ()
        hooked, fast = any(_global_hooks()), _fast_attention()
        dtype, settings = torch.get_default_dtype(), current_settings()
        return cls(current_context(), dtype, modes, hooked, fast, settings, monkeypatches())

    def is_current(self, but_patches: bool = False) -> bool:
        """Return whether the state is the same now: `self == GlobalState.current()`, at less cost.

        Asked for at each call, and mostly by code that the processor has long forgotten: what
        counts is how much code that is. With `but_patches`, somebody else asks for the functions
        that were replaced.
        """
        context, dtype, modes, hooked, fast, settings, others = self
        if context.autocast or modes or any_autocast() or function_modes():
            return self == GlobalState.current()
        return (
            _is_grad_enabled() is context.grad
            and _is_inference_mode() is context.inference
            and current_settings() == settings
            and _default_dtype() is dtype
            and bool(
                _module._global_forward_hooks
                or _module._global_forward_pre_hooks
                or _module._global_backward_hooks
                or _module._global_backward_pre_hooks
            )
            is hooked
            and _mha._is_fastpath_enabled is fast
            and (but_patches or (now := monkeypatches()) is others or now == others)
        )

    def difference(self) -> str | None:
        """Describe the difference now; None if there is none."""
        for name, recorded, now in zip(self._fields, self, GlobalState.current(), strict=True):
            if recorded != now:
                if name == "monkeypatches":
                    return _other_functions(self.monkeypatches, monkeypatches())
                what = _NAMES[name]
                return f"{what} was {recorded} when traced and is {now} now"
        return None


_entered_modes: Callable[[], list[Any]] = internal(
    "torch.overrides._get_current_function_mode_stack", list, "function modes", ""
)
_default_dtype = torch.get_default_dtype
_mha = torch.backends.mha  # its global, seen in 2.13 to 2.15; test_global_state notices
_fast_attention = torch.backends.mha.get_fastpath_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode = torch.is_inference_mode_enabled


def _global_hooks() -> tuple[Any, ...]:
    return (
        _module._global_forward_hooks, _module._global_forward_pre_hooks,
        _module._global_backward_hooks, _module._global_backward_pre_hooks,
    )  # fmt: skip


_NAMES = {
    "context": "the grad, inference or autocast mode",
    "dtype": "the default dtype",
    "modes": "the active function modes",
    "hooked": "whether there are global module hooks",
    "fast_attention": "torch.backends.mha's fast path",
    "settings": "a setting of torch's (deterministic algorithms, precision, anomaly detection)",
}


def _other_functions(recorded: Monkeypatches, now: Monkeypatches) -> str:
    other = [patch for patch in recorded if patch not in now]
    other += [patch for patch in now if patch not in recorded]
    names = sorted({patch.name for patch in other})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "is a different function" if len(names) == 1 else "are different functions"
    return f"{', '.join(names[:3])}{more} {verb} than when traced"


def _mode_key() -> tuple[Any, ...]:
    # torch.set_default_device and `with torch.device(...)` push a DeviceContext.
    return tuple(
        getattr(mode, "device", None) or mode
        for mode in _entered_modes()
        if not isinstance(mode, Recorder)  # of a run around this one
    )
