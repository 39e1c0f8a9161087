"""Full backward hooks of modules, which each replay sets up on its own.

torch hooks the autograd nodes of a module's inputs and outputs, which no function mode sees. So
what it does before the forward and after it is one op each. The first gives a tensor without
content that carries torch's object, and the second is given it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.utils.hooks import BackwardHook

from bendtrace.tape.watchers import current_watcher

__all__ = ["entries_of_backward_hooks"]


def entries_of_backward_hooks() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if vars(modules).get("BackwardHook") is BackwardHook:
        yield modules, "BackwardHook", _RecordedHook


class _RecordedHook(BackwardHook):
    """Sets up the hooks of one call of a module by two ops."""

    _carrier: Tensor | None = None

    def setup_input_hook(self, args: Any) -> Any:
        """Return the arguments of the module, of which the gradients are hooked."""
        watcher = current_watcher()
        if watcher is None:
            return super().setup_input_hook(args)
        if not torch.is_grad_enabled():  # no node of the graph is made, so that none is hooked
            return args
        places, tensors = _tensors_of(args)
        self._carrier, *given = watcher.opaque_call(
            enter_hooked, (self.module, len(args), places, *tensors), {}
        )
        return _with(args, places, given)

    def setup_output_hook(self, args: Any) -> Any:
        """Return the output of the module, of which the gradients are hooked."""
        watcher = current_watcher()
        if watcher is not None and self._carrier is None and not torch.is_grad_enabled():
            return args
        if watcher is None or self._carrier is None:
            return super().setup_output_hook(args)
        outputs = args if isinstance(args, tuple) else (args,)
        places, tensors = _tensors_of(outputs)
        _, *given = watcher.opaque_call(
            leave_hooked, (self._carrier, len(outputs), places, *tensors), {}
        )
        found = _with(outputs, places, given)
        return found if isinstance(args, tuple) else found[0]


def enter_hooked(module: Any, count: int, places: tuple[int, ...], *tensors: Tensor) -> Any:
    """Hook the gradients of a module's inputs; replays call this as well."""
    carrier: Any = torch.empty(0)
    carrier.hook = BackwardHook(
        module, module._get_backward_hooks()[0], module._get_backward_pre_hooks()
    )
    given = carrier.hook.setup_input_hook(_with((None,) * count, places, tensors))
    return (carrier, *(given[place] for place in places))


def leave_hooked(carrier: Any, count: int, places: tuple[int, ...], *tensors: Tensor) -> Any:
    """Hook the gradients of a module's outputs; replays call this as well."""
    given = carrier.hook.setup_output_hook(_with((None,) * count, places, tensors))
    return (torch.empty(0), *(given[place] for place in places))


def _tensors_of(values: tuple[Any, ...]) -> tuple[tuple[int, ...], list[Tensor]]:
    places = tuple(n for n, value in enumerate(values) if isinstance(value, Tensor))
    return places, [values[place] for place in places]


def _with(values: tuple[Any, ...], places: tuple[int, ...], tensors: Any) -> Any:
    """Return values with other tensors in some places, in a tuple of the same type."""
    items = list(values)
    for place, tensor in zip(places, tensors, strict=True):
        items[place] = tensor
    kind: Any = type(values)
    return tuple(items) if kind is tuple else kind(*items)
