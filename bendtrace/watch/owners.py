"""Finds the modules, parameters and buffers that belong to a callable model."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bendtrace.python.lazy import LazyModule, errors

if TYPE_CHECKING:
    from bendtrace.python import checks
else:
    checks = LazyModule("bendtrace.python.checks")


def required_model(model: Any) -> Any:
    """Return a model, which has to be an object that can be called.

    A class can be called as well, and would be taken for a model whose output is a module.
    """
    if isinstance(model, type):
        raise errors.InputError(
            f"{model.__name__} is a class, which makes models: pass an object of it, as in "
            f"{model.__name__}(...)"
        )
    if not callable(model):
        raise errors.InputError(f"a model has to be callable; {checks.shown(model)} is not")
    return model


def module_of(model: Any) -> nn.Module | None:
    """Return the module that has what a model has, under the names that paths begin with.

    That is the module itself, the one that the method is of, or a new module that has those of the
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
    attributes = getattr(model, "__dict__", {})
    modules = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}
    if not modules:
        return None
    made = nn.Module()
    made.training = any(getattr(module, "training", False) for module in modules.values())
    for name, module in modules.items():
        made._modules[name] = module
    return made


def is_leaf_module(module: nn.Module) -> bool:
    """Return whether torch.fx would leave a module whole: one of torch.nn, not a container."""
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)


def named_modules(
    module: nn.Module, prefix: str = "", *, again: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all in it with their qualified names.

    As `nn.Module.named_modules`, but for models that compare modules by anything else than
    identity, or have another attribute of that name. With `again`, a module is yielded under each
    of its names, not only under the first one.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module, frozenset[int]]] = [(prefix, module, frozenset())]
    while waiting:
        name, this, around = waiting.pop()
        if id(this) in (around if again else seen):  # a part may have the whole as a part
            continue
        seen.add(id(this))
        yield name, this
        within = around | {id(this)} if again else around
        inner = [(f"{name}.{key}" if name else key, part) for key, part in this._modules.items()]
        waiting += [(key, part, within) for key, part in reversed(inner) if part is not None]


def module_tree(module: nn.Module) -> list[nn.Module]:
    """Return a module and all in it, each once."""
    return [part for _, part in named_modules(module)]


def modules_in(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a model by all their qualified names, "" for itself."""
    owner = module_of(model)
    return {} if owner is None else dict(named_modules(owner, again=True))


def states_of(model: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a model, under all their names."""
    named = modules_in(model).items()
    return [
        (f"{name}.{key}" if name else key, tensor)
        for tables in (
            [(name, part._parameters) for name, part in named],
            [(name, part._buffers) for name, part in named],
        )
        for name, table in tables
        for key, tensor in table.items()
        if tensor is not None
    ]
