"""A copy of a model's structure that shares its parameters and buffers, with replaced modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bendtrace.errors import InputError
from bendtrace.torch_rules.owners import parts_of

__all__ = ["replaced", "shared_copy"]

Create = Callable[[nn.Module], Any]


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model without its parameters and buffers, which the copy shares.

    Training one trains the other. Replaced modules and new attributes affect the copy alone.

    Raises:
        InputError: a part of the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in parts_of(model):
        for table in (module._parameters, module._buffers):
            memo.update((id(tensor), tensor) for tensor in table.values() if tensor is not None)
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # which copy.deepcopy refuses
                memo[id(value)] = value
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied ({type(error).__name__}: {error}); with clone=False the "
            "native functions work on the model itself"
        ) from error


def replaced(model: nn.Module, targets: Collection[nn.Module], create: Create) -> nn.Module:
    """Replace some modules of a model, in all references to them.

    Inner modules come first: the function for an outer module sees its new parts. New modules get
    the training mode of the modules they replace.

    Args:
        model: the model, which is changed in place.
        targets: the modules to replace.
        create: called with each of them; returns the replacement, which may contain the module.

    Returns:
        The model, or its replacement.

    Raises:
        InputError: a replacement is not a module.
    """
    wanted = {id(module) for module in targets}
    known = {id(module): module for module in _inside_out(model, set())}
    new: dict[int, nn.Module] = {}
    for module in known.values():
        if id(module) not in wanted:
            continue
        _exchange((part for part in parts_of(module) if id(part) in known), new)
        made = create(module)
        if not isinstance(made, nn.Module):
            raise InputError(
                f"the replacement of a {type(module).__name__} has to be a module, but "
                f"create_replacement returned {made!r}"
            )
        for part in parts_of(made):
            if id(part) not in known:
                part.training = module.training
        new[id(module)] = made
    _exchange(known.values(), new)
    return new.get(id(model), model)


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and all in it, each after all that is in it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module._modules.values():
        if child is not None:
            yield from _inside_out(child, seen)
    yield module


def _exchange(modules: Iterable[nn.Module], new: Mapping[int, nn.Module]) -> None:
    """Replace references to modules: submodules, and modules in plain attributes."""
    for module in list(modules) if new else ():
        seen: set[int] = set()
        for name, value in list(vars(module).items()):
            other = _exchanged(value, new, seen)
            if other is not value:
                vars(module)[name] = other


def _exchanged(value: Any, new: Mapping[int, nn.Module], seen: set[int]) -> Any:
    if isinstance(value, nn.Module):
        return new.get(id(value), value)
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in list(value.items()):
            other = _exchanged(item, new, seen)
            if other is not item:
                value[key] = other
        return value
    items = [_exchanged(item, new, seen) for item in value]
    if all(other is item for other, item in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        value[:] = items
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
