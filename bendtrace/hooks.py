"""Hooks on modules, managed in one place: `HookManager` and the objects it returns.

>>> import torch, bendtrace as bt
>>> model = torch.nn.ReLU()
>>> manager = bt.hooks.HookManager()
>>> _ = manager.register_forward_hook(lambda module, inputs, outputs: (outputs[0] + 1,), relu=model)
>>> model(torch.tensor([-1.0, 2.0]))
tensor([1., 3.])
>>> manager.remove_all_hooks()
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, Literal, Self, TypeAlias

from torch import nn

from bendtrace.errors import InputError
from bendtrace.insert.hook_store import (
    Category,
    HookContext,
    HookedModule,
    HookFunction,
    HookHandle,
    NameTable,
    check_category,
    check_module,
    interjection_of,
    is_same,
    short,
)
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.native import AttachedInterjection
from bendtrace.insert.registry import InsertionRegistry
from bendtrace.log.entries import counted
from bendtrace.python.checks import free_name
from bendtrace.record.module_proxy import ModuleProxy
from bendtrace.watch import owners

__all__ = ["HookFunction", "HookHandle", "HookManager"]
__dir__ = __all__.copy

Function = Callable[..., Any]
# One or several functions, as they were registered or as `HookFunction`s.
HookTypes: TypeAlias = Function | Iterable[Function] | None
Filter = Literal["all"] | Category


class HookManager:
    """Registers hooks on modules, activates and deactivates them together, and removes them.

    - A forward pre-hook `hook(module, inputs)` is called before the module's forward.
    - A forward hook `hook(module, inputs, outputs)` is called after it.
    - A backward hook `hook(module, grad_in, grad_out)` is called once per backward pass for each
      call of the module, with the gradients that passed through this call alone.

    These arguments are tuples of tensors: those among the module's inputs or outputs, in order,
    however deeply nested in tuples, lists, dicts and dataclasses; keyword arguments come last. A
    gradient has the position of its tensor, and is None if there is none. A hook may return such a
    tuple to replace them (a backward hook: to replace `grad_in`), or None. While a hook runs,
    `module.name` is the name under which the module was registered, unless the module already has a
    `name`.

    The manager is a context manager that removes all its hooks at the end. The names are those of
    TackleBox.

    Args:
        model: modules registered without a name get their name in this model. In a `BendedModule`
            hooks are insertions, and replays call them as well.

    Raises:
        InputError: `model` is not a module.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(inplace=True))
        >>> def show(module, inputs, outputs):
        ...     print(module.name, *(tuple(tensor.shape) for tensor in outputs))
        >>> with bt.HookManager() as manager:
        ...     _ = manager.register_forward_hook(show, linear=model[0], relu=model[1])
        ...     manager.deactivate_module_hooks(model[1])
        ...     _ = model(torch.ones(4, 2))
        linear (4, 3)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(f"a model has to be a module, not a {type(model).__name__}")
        self._insertion_registry: InsertionRegistry | None = (
            model._insertion_registry if isinstance(model, ModuleProxy) else None
        )
        self._model = owners.module_of(model.model) if isinstance(model, ModuleProxy) else model
        self._modules: list[HookedModule] = []
        self._functions: list[HookFunction] = []

    @property
    def name_to_module(self) -> NameTable[nn.Module]:
        """The registered modules."""
        return NameTable("module", {one.name: one.module for one in self._modules})

    @property
    def name_to_hookfn(self) -> NameTable[HookFunction]:
        """The registered functions."""
        return NameTable("hook function", {hook.name: hook for hook in self._functions})

    @property
    def name_to_hookhandle(self) -> NameTable[HookHandle]:
        """The registered pairs, by `function[module]`."""
        return NameTable("hook", {handle.name: handle for handle in self._all_of()})

    # Registering

    def register_forward_hook(
        self,
        function: Function,
        /,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> HookFunction:
        """Register a function to be called after the forward of modules.

        A pair of function and module is registered once. Registering it again has no effect, except
        that `activate` activates it.

        Args:
            function: called with `(module, inputs, outputs)`.
            *modules: modules; each gets its name in the manager's model, or else its `repr`.
            hook_fn_name: name of the function; its `repr` by default.
            activate: whether to activate the hooks.
            **named_modules: modules by the names to register them under.

        Returns:
            The function, as a `HookFunction`.

        Raises:
            InputError: an object is registered under another name, or a name is taken.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, manager = torch.nn.ReLU(), bt.HookManager()
            >>> def doubled(module, inputs, outputs):
            ...     return (outputs[0] * 2,)
            >>> manager.register_forward_hook(doubled, hook_fn_name="doubled", first=relu)
            <HookFunction doubled: forward_hook on first>
            >>> relu(torch.ones(2))
            tensor([2., 2.])
        """
        return self._register(
            "forward_hook", function, modules, hook_fn_name, activate, named_modules
        )

    def register_forward_pre_hook(
        self,
        function: Function,
        /,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> HookFunction:
        """Register a function to be called with `(module, inputs)` before the forward of modules.

        Everything else works as in `register_forward_hook`.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu = torch.nn.ReLU()
            >>> def raised(module, inputs):
            ...     return (inputs[0] + 1,)
            >>> with bt.HookManager() as manager:
            ...     _ = manager.register_forward_pre_hook(raised, relu=relu)
            ...     relu(torch.zeros(2))
            tensor([1., 1.])
            >>> relu(torch.zeros(2))
            tensor([0., 0.])
        """
        return self._register(
            "forward_pre_hook", function, modules, hook_fn_name, activate, named_modules
        )

    def register_backward_hook(
        self,
        function: Function,
        /,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        **named_modules: nn.Module,
    ) -> HookFunction:
        """Register a function to be called with `(module, grad_in, grad_out)` in backward passes.

        It sees the calls that begin while it is active, and those of their backward passes that end
        while it is active. Everything else works as in `register_forward_hook`.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, x = torch.nn.ReLU(), torch.ones(2, requires_grad=True)
            >>> with bt.HookManager() as manager:
            ...     _ = manager.register_backward_hook(
            ...         lambda module, grad_in, grad_out: (grad_out[0] * 10,), relu=relu
            ...     )
            ...     relu(x).sum().backward()
            >>> x.grad
            tensor([10., 10.])
        """
        return self._register(
            "backward_hook", function, modules, hook_fn_name, activate, named_modules
        )

    def _register(
        self,
        category: Category,
        function: Function,
        modules: tuple[nn.Module, ...],
        name: str | None,
        activate: bool,
        named_modules: dict[str, nn.Module],
    ) -> HookFunction:
        if not callable(function):
            raise InputError(f"a hook has to be callable, and {function!r} is not")
        if type(activate) is not bool:
            raise InputError(
                "activate= says whether to activate the hooks; it has to be a bool, not "
                f"{activate!r}. Pass a module of that name without a name, to a "
                "HookManager(model)"
            )
        if not (name is None or isinstance(name, str)):
            raise InputError(f"hook_fn_name= has to be a string, not {name!r}")
        names = self._names_for(modules, named_modules)
        hook, name = self._registered_form(category, function, name)
        # Nothing has been changed up to here; nothing fails from here on.
        if hook is None:
            shown = name or free_name(repr(function), self.name_to_hookfn)
            hook = HookFunction(function, category, shown, name is not None)
            self._functions.append(hook)
        elif name is not None and name != hook.name:
            hook.name, hook.is_given = name, True
        for module, module_name, is_given in names:
            hooked = self._registered(module)
            if hooked is None:
                hooked = HookedModule(module, module_name, is_given)
                self._modules.append(hooked)
            elif hooked.name != module_name:
                hooked.name, hooked.is_given = module_name, True
            handle = hook.module_to_handle.get(module) or HookHandle(hook, hooked, self)
            if activate:
                handle.activate()
        return hook

    def _names_for(
        self, modules: tuple[nn.Module, ...], named_modules: dict[str, nn.Module]
    ) -> list[tuple[nn.Module, str, bool]]:
        """Find a name for each module, and whether somebody gave it."""
        found: dict[int, tuple[nn.Module, str, bool]] = {}
        existing = self.name_to_module

        def name_of(module: nn.Module) -> str | None:
            if id(module) in found:
                return found[id(module)][1]
            first = self._registered(module)
            return first.name if first is not None and first.is_given else None

        for name, module in named_modules.items():
            check_module(module, f"{name}=")
            taken, first = existing.get(name, module), name_of(module)
            if taken is not module:
                given = {*existing, *(one for _, one, _ in found.values())}
                name = self._free_name(name, f"another module, {short(taken)}", given)
            if first is not None and first != name:
                name = self._second_name(first, f"module {name!r}", "the module")
            found[id(module)] = module, name, True
        whole = self._model if modules else None
        named = () if whole is None else owners.named_modules(whole)
        own = {id(part): name for name, part in named}
        for module in modules:
            check_module(module, "a positional argument")
            if id(module) not in found:
                made_up = self._registered(module)
                given = {*existing, *(one for _, one, _ in found.values())}
                name = free_name(own.get(id(module)) or repr(module), given)
                found[id(module)] = module, name if made_up is None else made_up.name, False
        return list(found.values())

    def _registered_form(
        self, category: Category, function: Function, name: str | None
    ) -> tuple[HookFunction | None, str | None]:
        """Return the registered form of a function, if it has one, and its name."""
        hooks = (hook for hook in self._functions if hook.hook_type == category)
        hook = next((hook for hook in hooks if is_same(hook.function, function)), None)
        if name is None:
            return hook, None
        taken = self.name_to_hookfn.get(name, hook)
        if taken is not None and taken is not hook:
            by = f"the {taken.hook_type} {short(taken.function)}"
            name = self._free_name(name, by, self.name_to_hookfn)
        if hook is not None and hook.name != name and hook.is_given:
            name = self._second_name(hook.name, f"the {category} {name!r}", "the function")
        return hook, name

    def _second_name(self, first: str, wish: str, what: str) -> str:
        """Return the name of an object that already has one."""
        raise InputError(
            f"{wish} is already registered as {first!r}: use that name, or remove {what} first"
        )

    def _free_name(self, wish: str, by: str, taken: Container[str]) -> str:
        """Return a free name in place of one that is taken."""
        raise InputError(
            f"the name {wish!r} is taken by {by}: choose another name, or remove it first"
        )

    # Looking up

    def name_of(self, module: nn.Module) -> str:
        """Return the name under which a module is registered.

        Raises:
            InputError: if it is not registered.

        Example:
            >>> import torch, bendtrace as bt
            >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
            >>> _ = manager.register_forward_hook(print, first=linear)
            >>> manager.name_of(linear)
            'first'
        """
        check_module(module, "what was given")
        hooked = self._registered(module)
        if hooked is None:
            names = ", ".join(map(repr, self.name_to_module)) or "no module"
            raise InputError(f"{short(module)} is not registered; {names} is")
        return hooked.name

    def _registered(self, module: nn.Module) -> HookedModule | None:
        return next((one for one in self._modules if one.module is module), None)

    def _all_of(self, module: nn.Module | None = None) -> list[HookHandle]:
        """Return the handles, or those of a module, in the order of registration."""
        handles = (handle for hook in self._functions for handle in hook.handles)
        found = [one for one in handles if module is None or one.module is module]
        return sorted(found, key=lambda handle: handle.order)

    def _select(
        self, modules: tuple[nn.Module, ...] | None, hook_types: HookTypes, category: Filter
    ) -> list[HookHandle]:
        """Return the handles that pass all filters, in the order of registration."""
        check_category(category)
        functions = None if hook_types is None else self._hooks_of(hook_types)
        names = None if modules is None else [self.name_of(module) for module in modules]
        return [
            handle
            for handle in self._all_of()
            if category in ("all", handle.hook_fn.hook_type)
            and (functions is None or handle.hook_fn in functions)
            and (names is None or handle.module_name in names)
        ]

    def _hooks_of(self, hook_types: Function | Iterable[Function]) -> list[HookFunction]:
        """Return what functions are registered as."""
        found: list[HookFunction] = []
        for function in [hook_types] if callable(hook_types) else list(hook_types):
            own = [
                hook
                for hook in self._functions
                if hook is function or is_same(hook.function, function)
            ]
            if not own:
                listed = ", ".join(self.name_to_hookfn) or "none"
                raise InputError(
                    f"{short(function)} is not registered as a hook; these are: {listed}"
                )
            found += own
        return found

    # Activating

    def activate_all_hooks(self, *, hook_types: HookTypes = None, category: Filter = "all") -> None:
        """Activate hooks on all modules.

        Args:
            hook_types: functions; only their hooks.
            category: "forward_hook", "forward_pre_hook" or "backward_hook"; only these hooks.

        Raises:
            InputError: a function is not registered, or the category does not exist.
        """
        for handle in self._select(None, hook_types, category):
            handle.activate()

    activate_all_hook = activate_all_hooks  # written so once where it is explained

    def deactivate_all_hooks(
        self, *, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Deactivate hooks on all modules; takes the arguments of `activate_all_hooks`.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, manager = torch.nn.ReLU(), bt.HookManager()
            >>> _ = manager.register_forward_hook(lambda *_: print("called"), relu=relu)
            >>> _ = relu(torch.ones(2))
            called
            >>> manager.deactivate_all_hooks(category="forward_hook")
            >>> _ = relu(torch.ones(2))
        """
        for handle in self._select(None, hook_types, category):
            handle.deactivate()

    def activate_module_hooks(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Activate hooks on some modules.

        Args:
            *modules: the modules.
            hook_types: functions; only their hooks.
            category: "forward_hook", "forward_pre_hook" or "backward_hook"; only these hooks.

        Raises:
            InputError: a module or function is not registered, or the category does not exist.
        """
        for handle in self._select(modules, hook_types, category):
            handle.activate()

    def deactivate_module_hooks(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Deactivate hooks on some modules; takes the arguments of `activate_module_hooks`."""
        for handle in self._select(modules, hook_types, category):
            handle.deactivate()

    def hook_all_context(
        self, *, hook_types: HookTypes = None, category: Filter = "all"
    ) -> HookContext[Self]:
        """Return a context in which hooks are active; takes the arguments of `activate_all_hooks`.

        At its end each hook returns to its earlier state: an active hook stays active.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, manager = torch.nn.ReLU(), bt.HookManager()
            >>> def tell(module, inputs, outputs):
            ...     print("called")
            >>> _ = manager.register_forward_hook(tell, activate=False, relu=relu)
            >>> _ = relu(torch.ones(2))
            >>> with manager.hook_all_context():
            ...     _ = relu(torch.ones(2))
            called
        """
        self._select(None, hook_types, category)
        return HookContext(self, lambda: self._select(None, hook_types, category))

    def hook_module_context(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> HookContext[Self]:
        """Return a context with active hooks; takes the arguments of `activate_module_hooks`.

        At its end each hook returns to its earlier state: an active hook stays active.
        """
        self._select(modules, hook_types, category)
        return HookContext(self, lambda: self._select(modules, hook_types, category))

    # Removing

    def remove_hook(self, handle: HookHandle) -> None:
        """Remove a function from a module.

        Raises:
            InputError: it does not belong to this manager.
        """
        if self.name_to_hookhandle[handle.name] is not handle:
            raise InputError(f"{handle!r} does not belong to this manager")
        handle.remove()

    def remove_hook_by_name(self, name: str) -> None:
        """Remove a function from a module, by their `function[module]` name.

        Raises:
            KeyError: if there is none of that name.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, tanh, manager = torch.nn.ReLU(), torch.nn.Tanh(), bt.HookManager()
            >>> _ = manager.register_forward_hook(print, hook_fn_name="show", relu=relu, tanh=tanh)
            >>> list(manager.name_to_hookhandle)
            ['show[relu]', 'show[tanh]']
            >>> manager.remove_hook_by_name("show[relu]")
            >>> list(manager.name_to_hookhandle)
            ['show[tanh]']
        """
        self.name_to_hookhandle[name].remove()

    def remove_hook_function(self, function: Function, *, category: Filter = "all") -> None:
        """Remove a function from all modules.

        Args:
            function: the function, or its `HookFunction`.
            category: the kind of hook to remove, if the function is registered as several.

        Raises:
            InputError: if it is not registered.
        """
        check_category(category)
        for hook in self._hooks_of([function]):
            if category in ("all", hook.hook_type):
                self._remove_function(hook)

    def remove_hook_function_by_name(self, name: str) -> None:
        """Remove the function with a name from all modules.

        Raises:
            KeyError: if there is none of that name.
        """
        self._remove_function(self.name_to_hookfn[name])

    def remove_module(self, module: nn.Module) -> None:
        """Remove all functions from a module, and forget it.

        Raises:
            InputError: if it is not registered.
        """
        self.remove_module_by_name(self.name_of(module))

    def remove_module_by_name(self, name: str) -> None:
        """Remove all functions from the module with a name, and forget it.

        Raises:
            KeyError: if there is none of that name.
        """
        for handle in self._all_of(self.name_to_module[name]):
            handle.remove()
        self._modules = [one for one in self._modules if one.name != name]

    def remove_all_hooks(self) -> None:
        """Remove all functions from all modules, and forget them."""
        for name in list(self.name_to_module):
            self.remove_module_by_name(name)
        for hook in self._functions:
            self._remove_function(hook)

    def _remove_function(self, hook: HookFunction) -> None:
        for handle in hook.handles:
            handle.remove()
        self._functions = [one for one in self._functions if one is not hook]

    # What handles ask for

    def place(self, handle: HookHandle) -> Insertion | AttachedInterjection:
        """Make the module call a hook."""
        module, what = handle.module, interjection_of(handle)
        if self._insertion_registry is not None and self._model is not None:
            if any(module is part for part in owners.module_tree(self._model)):
                return self._insertion_registry.make(module, what)
        return AttachedInterjection(module, what, handle.module_name)

    def activate(self, handle: HookHandle) -> None:
        """Make the module call a hook, in the order of registration."""
        placed, kind = handle.placed, handle.hook_fn.hook_type
        if isinstance(placed, AttachedInterjection):
            placed.install()
            return
        assert self._insertion_registry is not None
        self._insertion_registry.add(placed)
        # Of several, the one that was inserted last is given the inputs first.
        is_reversed = kind == "forward_pre_hook"
        later = [
            one.placed
            for one in self._all_of(handle.module)
            if one.active
            and one.hook_fn.hook_type == kind
            and isinstance(one.placed, Insertion)
            and (one.order < handle.order) == is_reversed
        ]
        later = later[::-1] if is_reversed else later
        self._insertion_registry.remove(*later)
        self._insertion_registry.add(*later)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove_all_hooks()

    def __repr__(self) -> str:
        lines = [repr(handle)[1:-1] for handle in self._all_of()]
        head = counted(len(lines), "hook") if lines else "no hooks"
        return "\n  ".join([f"<HookManager: {head}", *lines]) + ">"
