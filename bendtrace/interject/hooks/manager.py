"""HookManager: which hooks are registered where, and which of them are active."""

from __future__ import annotations

from typing import Self

from torch import nn

from bendtrace.errors import InputError
from bendtrace.interject.hooks.context import HookContext
from bendtrace.interject.hooks.function import Category, HookFunction
from bendtrace.interject.hooks.handle import HookHandle
from bendtrace.interject.hooks.registry import (
    Filter,
    Function,
    HookTypes,
    Registry,
    check_category,
)
from bendtrace.interject.hooks.tables import NameTable

__all__ = ["HookManager"]


class HookManager:
    """Registers hooks on modules, switches them on and off together, and removes them.

    - A forward pre-hook `hook(module, inputs)` is called before the module's forward.
    - A forward hook `hook(module, inputs, outputs)` is called after it.
    - A backward hook `hook(module, grad_in, grad_out)` is called once in each backward pass for
      each call of the module, with the gradients that passed through this call alone.

    All of these are tuples of tensors: those among what the module is given and gives, in order,
    however deep in tuples, lists, dicts and dataclasses; keyword arguments come last. A gradient
    stands where its tensor stands, and is None if there is none. Each hook may return such a
    tuple to be used instead (backward hooks: of new `grad_in`), or None. While it runs,
    `module.name` is the name that the module was registered under, unless the module has a
    `name` of its own.

    The manager is a context, at the end of which all its hooks are removed. The names are those of
    TackleBox.

    Args:
        model: modules that are given without a name are called by their names in this.

    Raises:
        InputError: `model` is no module.

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
        self._registry = Registry(model)

    @property
    def name_to_module(self) -> NameTable[nn.Module]:
        """The registered modules."""
        return self._registry.modules

    @property
    def name_to_hookfn(self) -> NameTable[HookFunction]:
        """The registered functions."""
        return self._registry.functions

    @property
    def name_to_hookhandle(self) -> NameTable[HookHandle]:
        """What is registered where, by `function[module]`."""
        return self._registry.handles

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

        A pair of function and module is registered once: registering it again changes nothing,
        except that with `activate` it is activated.

        Args:
            function: called with `(module, inputs, outputs)`.
            *modules: modules that get the name which they have in the manager's model, or else
                their `repr`.
            hook_fn_name: name of the function; the default is its `repr`.
            activate: whether to activate the hooks.
            **named_modules: modules by the name to give to them.

        Returns:
            The function, as a `HookFunction`.

        Raises:
            InputError: if something has another name already, or a name is taken.

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

        Everything else is as with `register_forward_hook`.

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

        It sees the calls that begin, and their backward passes as far as they end, while it is
        active. Everything else is as with `register_forward_hook`.

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
            raise InputError(f"a hook has to be callable; {function!r} is not")
        if type(activate) is not bool:
            raise InputError(
                f"activate= says whether to activate the hooks; {activate!r} is no bool. A module "
                "of that name has to be given without a name, to a HookManager(model)"
            )
        if not (name is None or isinstance(name, str)):
            raise InputError(f"hook_fn_name= has to be a string, not {name!r}")
        hook, handles = self._registry.add(category, function, modules, name, named_modules)
        for handle in handles:
            if activate:
                handle.activate()
        return hook

    def name_of(self, module: nn.Module) -> str:
        """Return the name that a module is registered under.

        Raises:
            InputError: if it is not registered.

        Example:
            >>> import torch, bendtrace as bt
            >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
            >>> _ = manager.register_forward_hook(print, first=linear)
            >>> manager.name_of(linear)
            'first'
        """
        return self._registry.name_of(module)

    # Activating

    def activate_all_hooks(self, *, hook_types: HookTypes = None, category: Filter = "all") -> None:
        """Activate hooks on all modules.

        Args:
            hook_types: functions: only these.
            category: "forward_hook", "forward_pre_hook" or "backward_hook": only those.

        Raises:
            InputError: if a function is not registered, or there is no such category.
        """
        for handle in self._registry.select(None, hook_types, category):
            handle.activate()

    activate_all_hook = activate_all_hooks  # written so once where it is explained

    def deactivate_all_hooks(
        self, *, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Deactivate hooks on all modules; the arguments are those of `activate_all_hooks`.

        Example:
            >>> import torch, bendtrace as bt
            >>> relu, manager = torch.nn.ReLU(), bt.HookManager()
            >>> _ = manager.register_forward_hook(lambda *_: print("called"), relu=relu)
            >>> _ = relu(torch.ones(2))
            called
            >>> manager.deactivate_all_hooks(category="forward_hook")
            >>> _ = relu(torch.ones(2))
        """
        for handle in self._registry.select(None, hook_types, category):
            handle.deactivate()

    def activate_module_hooks(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Activate hooks on some modules.

        Args:
            *modules: the modules.
            hook_types: functions: only these.
            category: "forward_hook", "forward_pre_hook" or "backward_hook": only those.

        Raises:
            InputError: if something is not registered, or there is no such category.
        """
        for handle in self._registry.select(modules, hook_types, category):
            handle.activate()

    def deactivate_module_hooks(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> None:
        """Deactivate hooks on some modules; arguments as for `activate_module_hooks`."""
        for handle in self._registry.select(modules, hook_types, category):
            handle.deactivate()

    def hook_all_context(
        self, *, hook_types: HookTypes = None, category: Filter = "all"
    ) -> HookContext:
        """Return a context in which hooks are active; arguments as for `activate_all_hooks`.

        At its end each of them is what it was before: one that was active stays so.

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
        self._registry.select(None, hook_types, category)
        return HookContext(self, lambda: self._registry.select(None, hook_types, category))

    def hook_module_context(
        self, *modules: nn.Module, hook_types: HookTypes = None, category: Filter = "all"
    ) -> HookContext:
        """Return a context in which hooks are active; arguments as for `activate_module_hooks`.

        At its end each of them is what it was before: one that was active stays so.
        """
        self._registry.select(modules, hook_types, category)
        return HookContext(self, lambda: self._registry.select(modules, hook_types, category))

    # Removing

    def remove_hook(self, handle: HookHandle) -> None:
        """Remove a function from a module.

        Raises:
            InputError: it is not one of this manager.
        """
        if self.name_to_hookhandle[handle.name] is not handle:
            raise InputError(f"{handle!r} is not one of this manager")
        handle.remove()

    def remove_hook_by_name(self, name: str) -> None:
        """Remove a function from a module, by the `function[module]` of the two.

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
            category: the kind of hook that it is removed as, if it is registered as several.

        Raises:
            InputError: if it is not registered.
        """
        check_category(category)
        for hook in self._registry.hooks_of([function]):
            if category in ("all", hook.hook_type):
                self._registry.remove_function(hook)

    def remove_hook_function_by_name(self, name: str) -> None:
        """Remove the function of a name from all modules.

        Raises:
            KeyError: if there is none of that name.
        """
        self._registry.remove_function(self.name_to_hookfn[name])

    def remove_module(self, module: nn.Module) -> None:
        """Remove all functions from a module, and forget it.

        Raises:
            InputError: if it is not registered.
        """
        self._registry.remove_module(self.name_of(module))

    def remove_module_by_name(self, name: str) -> None:
        """Remove all functions from the module of a name, and forget it.

        Raises:
            KeyError: if there is none of that name.
        """
        self._registry.remove_module(name)

    def remove_all_hooks(self) -> None:
        """Remove all functions from all modules, and forget them."""
        for name in list(self.name_to_module):
            self._registry.remove_module(name)
        for hook in list(self.name_to_hookfn.values()):
            self._registry.remove_function(hook)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove_all_hooks()

    def __repr__(self) -> str:
        lines = [repr(handle)[1:-1] for handle in self._registry.all_of()]
        return "\n  ".join([f"<HookManager: {len(lines) or 'no'} hooks", *lines]) + ">"
