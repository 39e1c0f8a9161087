"""Which modules, parameters and buffers belong to what is called as a model."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn

__all__ = ["is_leaf_module", "module_of", "modules_in", "states_of"]


def module_of(model: Any) -> nn.Module | None:
    """Return the module that has what a model has, under the names that paths begin with.

    Args:
        model: a module, a method of one, or another object that holds modules.

    Returns:
        The module itself, the one that the method is of, or a new module that has those of the
        object as its parts. None if there are none.
    """
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, types.MethodType):
        model = model.__self__
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return None
    held = getattr(model, "__dict__", {})
    modules = {name: value for name, value in held.items() if isinstance(value, nn.Module)}
    if not modules:
        return None
    made = nn.Module()
    made.training = any(getattr(module, "training", False) for module in modules.values())
    for name, module in modules.items():
        made._modules[name] = module
    return made


def is_leaf_module(module: nn.Module) -> bool:
    """Whether torch.fx would leave a module whole: one of torch.nn's own, not a container."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)


def modules_in(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a model by all their qualified names, "" for itself."""
    owner = module_of(model)
    return {} if owner is None else dict(owner.named_modules(remove_duplicate=False))


def states_of(model: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a model, under all their names."""
    owner = module_of(model)
    if owner is None:
        return []
    return [
        *owner.named_parameters(remove_duplicate=False),
        *owner.named_buffers(remove_duplicate=False),
    ]
