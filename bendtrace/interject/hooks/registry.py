"""What is registered: functions, modules and pairs of the two, by their names."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from bendtrace.errors import InputError
from bendtrace.interject.hooks.function import CATEGORIES, Category, HookFunction
from bendtrace.interject.hooks.handle import HookHandle
from bendtrace.interject.hooks.tables import NameTable, free_name

__all__ = ["Filter", "Function", "HookTypes", "Registry", "check_category"]

Function = Callable[..., Any]
# One or several functions, as they were registered or as `HookFunction`s.
HookTypes: TypeAlias = Function | Iterable[Function] | None
Filter = Literal["all"] | Category


class Registry:
    """Finds names for what is registered, and what is registered by its name.

    Args:
        model: modules that are given without a name are called by their names in this.

    Attributes:
        modules: the modules.
        functions: the functions.
        handles: the pairs of both.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._made_up: set[str] = set()  # names of functions that nobody gave
        self._made_up_modules: set[str] = set()
        self.modules: NameTable[nn.Module] = NameTable("module")
        self.functions: NameTable[HookFunction] = NameTable("hook function")
        self.handles: NameTable[HookHandle] = NameTable("hook")

    def add(
        self,
        category: Category,
        function: Function,
        modules: tuple[nn.Module, ...],
        name: str | None,
        named_modules: dict[str, nn.Module],
    ) -> tuple[HookFunction, list[HookHandle]]:
        """Register a function on modules; return it, and the handles on these modules.

        Raises:
            InputError: if something has another name already, or a name is taken.
        """
        names = self._names_for(modules, named_modules)
        hook = self._known(category, function, name)
        # Nothing has been changed up to here; nothing fails from here on.
        if hook is None:
            hook = HookFunction(
                function, category, name or free_name(repr(function), self.functions)
            )
            self.functions._things[hook.name] = hook
            if name is None:
                self._made_up.add(hook.name)
        elif name is not None and name != hook.name:
            self._rename_function(hook, name)
        handles: list[HookHandle] = []
        for module, module_name, is_given in names:
            known = self._name_of(module)
            if known is None:
                self.modules._things[module_name] = module
                if not is_given:
                    self._made_up_modules.add(module_name)
            elif known != module_name:
                self._rename_module(module, known, module_name)
            handles.append(self._handle(hook, module, module_name))
        return hook, handles

    def _handle(self, hook: HookFunction, module: nn.Module, name: str) -> HookHandle:
        if module in hook.module_to_handle:
            return hook.module_to_handle[module]
        handle = HookHandle(hook, module, name, self._forget)
        hook.module_to_handle._add(handle)
        self.handles._things[handle.name] = handle
        return handle

    def _names_for(
        self, modules: tuple[nn.Module, ...], named_modules: dict[str, nn.Module]
    ) -> list[tuple[nn.Module, str, bool]]:
        """Find a name for each module, and whether somebody gave it."""
        found: dict[int, tuple[nn.Module, str, bool]] = {}
        for name, module in named_modules.items():
            _check_module(module, f"{name}=")
            taken = self.modules._things.get(name, module)
            if taken is not module:
                raise InputError(
                    f"the name {name!r} is taken by another module, {_short(taken)}: choose "
                    "another, or remove that one first"
                )
            known = self._name_of(module)
            if id(module) in found:
                known = found[id(module)][1]
            elif known in self._made_up_modules:
                known = None
            if known not in (None, name):
                raise InputError(
                    f"module {name!r} is registered as {known!r} already, and has one name: use "
                    "that, or remove the module first"
                )
            found[id(module)] = module, name, True
        own = self._own_names() if modules else {}
        for module in modules:
            _check_module(module, "a positional argument")
            if id(module) in found:
                continue
            known = self._name_of(module)
            if known is None:
                taken_names = {*self.modules, *(name for _, name, _ in found.values())}
                known = free_name(own.get(id(module)) or repr(module), taken_names)
            found[id(module)] = module, known, False
        return list(found.values())

    def _own_names(self) -> dict[int, str]:
        if self._model is None:
            return {}
        return {id(module): name for name, module in self._model.named_modules()}

    def _known(
        self, category: Category, function: Function, name: str | None
    ) -> HookFunction | None:
        """Return what a function is registered as, if it is, and may be called by a name."""
        hooks = (hook for hook in self.functions.values() if hook.hook_type == category)
        hook = next((hook for hook in hooks if _is_same(hook.function, function)), None)
        if name is None:
            return hook
        taken = self.functions._things.get(name)
        if taken is not None and taken is not hook:
            raise InputError(
                f"the name {name!r} is taken by the {taken.hook_type} {_short(taken.function)}: "
                "choose another, or remove that one first"
            )
        if hook is not None and hook.name not in (name, *self._made_up):
            raise InputError(
                f"the {category} {name!r} is registered as {hook.name!r} already, and has one "
                "name: use that, or remove the function first"
            )
        return hook

    def _rename_function(self, hook: HookFunction, name: str) -> None:
        self._made_up.discard(hook.name)
        _rename(self.functions, hook.name, name)
        before = [handle.name for handle in hook.handles]
        hook.name = name
        for old, handle in zip(before, hook.handles, strict=True):
            _rename(self.handles, old, handle.name)

    def _rename_module(self, module: nn.Module, old: str, name: str) -> None:
        self._made_up_modules.discard(old)
        _rename(self.modules, old, name)
        for handle in self.all_of(module):
            before, handle.module_name = handle.name, name
            _rename(self.handles, before, handle.name)

    # Looking up

    def name_of(self, module: nn.Module) -> str:
        """Return the name that a module is registered under.

        Raises:
            InputError: if it is not registered.
        """
        _check_module(module, "what was given")
        name = self._name_of(module)
        if name is None:
            known = ", ".join(map(repr, self.modules)) or "no module"
            raise InputError(f"{_short(module)} is not registered; {known} is")
        return name

    def _name_of(self, module: nn.Module) -> str | None:
        things = self.modules._things.items()
        return next((name for name, known in things if known is module), None)

    def all_of(self, module: nn.Module | None = None) -> list[HookHandle]:
        """Return the handles, or those of a module, in the order of registration."""
        handles = self.handles.values()
        found = [one for one in handles if module is None or one.module is module]
        return sorted(found, key=lambda handle: handle.order)

    def select(
        self, modules: tuple[nn.Module, ...] | None, hook_types: HookTypes, category: Filter
    ) -> list[HookHandle]:
        """Return the handles that pass all filters, in the order of registration.

        Raises:
            InputError: if something is not registered, or there is no such category.
        """
        check_category(category)
        functions = None if hook_types is None else self.hooks_of(hook_types)
        names = None if modules is None else [self.name_of(module) for module in modules]
        return [
            handle
            for handle in self.all_of()
            if category in ("all", handle.hook_fn.hook_type)
            and (functions is None or handle.hook_fn in functions)
            and (names is None or handle.module_name in names)
        ]

    def hooks_of(self, hook_types: Function | Iterable[Function]) -> list[HookFunction]:
        """Return what functions are registered as.

        Raises:
            InputError: if one is not registered.
        """
        found: list[HookFunction] = []
        for function in [hook_types] if callable(hook_types) else list(hook_types):
            own = [
                hook
                for hook in self.functions.values()
                if hook is function or _is_same(hook.function, function)
            ]
            if not own:
                known = ", ".join(self.functions) or "none"
                raise InputError(
                    f"{_short(function)} is not registered as a hook; these are: {known}"
                )
            found += own
        return found

    # Removing

    def remove_function(self, hook: HookFunction) -> None:
        """Remove a function from all modules, and forget it."""
        for handle in hook.handles:
            handle.remove()
        del self.functions._things[hook.name]
        self._made_up.discard(hook.name)

    def remove_module(self, name: str) -> None:
        """Remove all functions from a module, and forget it.

        Raises:
            KeyError: if there is none of that name.
        """
        for handle in self.all_of(self.modules[name]):
            handle.remove()
        del self.modules._things[name]
        self._made_up_modules.discard(name)

    def _forget(self, handle: HookHandle) -> None:
        del self.handles._things[handle.name]
        handle.hook_fn.module_to_handle._remove(handle)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one. A method is another object each time it is looked up."""
    if one is other:
        return True
    methods = (types.MethodType, types.BuiltinMethodType)
    return (
        type(one) is type(other)
        and isinstance(one, methods)
        and one.__self__ is other.__self__
        and one == other
    )


def _rename(table: NameTable[Any], old: str, new: str) -> None:
    items = [(new if name == old else name, thing) for name, thing in table._things.items()]
    table._things.clear()
    table._things.update(items)


def _check_module(module: object, where: str) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(f"hooks are registered on modules; {where} is a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"a scripted module takes no hooks; {where} is one")


def check_category(category: object) -> None:
    """Raise an `InputError` if there is no such category of hooks."""
    if category != "all" and category not in CATEGORIES:
        choices = ", ".join(map(repr, ("all", *CATEGORIES)))
        raise InputError(f"there is no hook category {category!r}: choose one of {choices}")


def _short(thing: object) -> str:
    text = " ".join(repr(thing).split())
    return text if len(text) <= 80 else text[:77] + "..."
