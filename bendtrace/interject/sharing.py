"""A copy of a model's structure that shares its parameters and buffers, and what is put in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bendtrace.errors import InputError

__all__ = ["replaced", "shared_copy"]

Create = Callable[[nn.Module], Any]


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model but for its parameters and buffers, which the copy has, too.

    Training one trains the other. What is put in the place of a module, or set as an attribute,
    concerns the copy alone.

    Raises:
        InputError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
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
    """Put other modules in the place of some of a model's, wherever it refers to them.

    Inner modules come first: what is called for an outer one is given it with its new parts. New
    modules are put in the training mode of what they take the place of.

    Args:
        model: the model, which is changed.
        targets: which of its modules.
        create: called with each of them; returns what takes its place, which may contain it.

    Returns:
        The model, or what takes its place.

    Raises:
        InputError: something that is to take a module's place is no module.
    """
    wanted = {id(module) for module in targets}
    known = {id(module): module for module in _inside_out(model, set())}
    new: dict[int, nn.Module] = {}
    for module in known.values():
        if id(module) not in wanted:
            continue
        _exchange((part for part in module.modules() if id(part) in known), new)
        made = create(module)
        if not isinstance(made, nn.Module):
            raise InputError(
                f"what takes the place of a {type(module).__name__} has to be a module; "
                f"create_replacement returned {made!r}"
            )
        for part in made.modules():
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
    for child in module.children():
        yield from _inside_out(child, seen)
    yield module


def _exchange(modules: Iterable[nn.Module], new: Mapping[int, nn.Module]) -> None:
    """Exchange what modules refer to: their submodules, and modules in plain attributes."""
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
