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

import functools
import threading
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bendtrace import hooks
from bendtrace.errors import InputError
from bendtrace.hooks import HookFunction, HookHandle
from bendtrace.insert.hook_store import HookContext
from bendtrace.python.checks import free_name

__all__ = ["HookFunction", "HookHandle", "HookManager", "ModuleTracker", "TrackingProtocol"]
__dir__ = __all__.copy

Result = TypeVar("Result")


def _by_names(method: Callable[..., Result]) -> Callable[..., Result]:
    """Return a method that takes names of modules in their place."""

    @functools.wraps(method)
    def by_names(self: Any, *module_names: str, **options: Any) -> Result:
        return method(self, *map(self.name_to_module.__getitem__, module_names), **options)

    return by_names


class HookManager(hooks.HookManager):
    """A `bendtrace.HookManager` that accepts every name.

    A second name for a module or function is ignored, and a name that is taken gets a number.
    At the end of a context, its hooks are inactive, also those that were active before. Everything
    else is as in `bendtrace.HookManager`: `module.name` exists while a hook runs, and gradients are
    those of one call.

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

    def _second_name(self, first: str, wish: str, what: str) -> str:
        return first

    def _free_name(self, wish: str, by: str, taken: Container[str]) -> str:
        return free_name(wish, taken)

    def register_backward_hook(  # type: ignore[override]  # has one option more
        self,
        function: Callable[..., Any],
        /,
        *modules: nn.Module,
        hook_fn_name: str | None = None,
        activate: bool = True,
        retain_forward_cache: bool = False,
        **named_modules: nn.Module,
    ) -> HookFunction:
        """Register a function to be called in backward passes.

        Args:
            function: called with `(module, grad_in, grad_out)`.
            *modules: modules; each gets its name in the manager's model, or else its `repr`.
            hook_fn_name: name of the function; its `repr` by default.
            activate: whether to activate the hooks.
            retain_forward_cache: whether to call it with `(module, grad_in, grad_out, inputs,
                outputs)`, the last two as forward hooks receive them: what the model writes to
                these tensors afterwards is visible. A module may then be called once before each
                backward pass: for several calls it would not be known which values belong to which
                gradients.
            **named_modules: modules by the names to register them under.

        Raises:
            InputError: an argument is invalid. With `retain_forward_cache`, the backward pass
                raises it if the module was called several times.
        """
        if not retain_forward_cache:
            return super().register_backward_hook(
                function, *modules, hook_fn_name=hook_fn_name, activate=activate, **named_modules
            )
        cached = _WithForward(function)
        shown = hook_fn_name or repr(function)
        self.register_forward_hook(
            cached.keep, *modules, hook_fn_name=f"{shown} (forward)",
            activate=activate, **named_modules,
        )  # fmt: skip
        return super().register_backward_hook(
            cached, *modules, hook_fn_name=shown, activate=activate, **named_modules
        )

    def _hooks_of(self, hook_types: Any) -> list[HookFunction]:
        """Return the registered forms of functions, with the hooks that keep values for them."""
        given = [hook_types] if callable(hook_types) else list(hook_types)
        for hook in self._functions:
            if isinstance(hook.function, _WithForward) and hook.function.function in given:
                given += [hook.function, hook.function.keep]
                given.remove(hook.function.function)
        return super()._hooks_of(given) if given else []

    def hook_all_context(self, **options: Any) -> Any:
        """Return a context in which hooks are active, and at whose end they are inactive.

        Args:
            **options: `hook_types` and `category`, as for `activate_all_hooks`.

        Returns:
            The context. Others can be added to it: `manager.hook_all_context() + torch.no_grad()`.
        """
        return _Contexts(_Deactivating(super().hook_all_context(**options)))

    def hook_module_context(self, *modules: nn.Module, **options: Any) -> Any:
        """Return a context in which hooks of modules are active; see `hook_all_context`."""
        return _Contexts(_Deactivating(super().hook_module_context(*modules, **options)))

    def get_module_hooks(
        self,
        module: nn.Module,
        hook_types: Any = (),
        category: Any = "all",
        include_active: bool = True,
        include_inactive: bool = True,
    ) -> Iterator[HookHandle]:
        """Iterate over the hooks of a module.

        Args:
            module: the module.
            hook_types: functions; only their hooks, if there are any.
            category: "forward_hook", "forward_pre_hook" or "backward_hook"; only these hooks.
            include_active: whether to include active hooks.
            include_inactive: whether to include the others.

        Raises:
            InputError: the module or a function is not registered.
        """
        for handle in self._select((module,), hook_types or None, category):
            if include_active if handle.active else include_inactive:
                yield handle

    def activate_hook_by_name(self, hook_name: str) -> None:
        """Activate one hook, `function[module]`."""
        self.name_to_hookhandle[hook_name].activate()

    def deactivate_hook_by_name(self, hook_name: str) -> None:
        """Deactivate one hook, `function[module]`."""
        self.name_to_hookhandle[hook_name].deactivate()

    get_module_hooks_by_name = _by_names(get_module_hooks)
    activate_module_hooks_by_name = _by_names(hooks.HookManager.activate_module_hooks)
    deactivate_module_hooks_by_name = _by_names(hooks.HookManager.deactivate_module_hooks)
    hook_module_context_by_name = _by_names(hook_module_context)


class _Deactivating(HookContext[Any]):
    """A context that leaves no hook active that it selects."""

    def __init__(self, context: HookContext[Any]) -> None:
        super().__init__(context._manager, context._select)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self._select():
            handle.deactivate()


class _Contexts:
    """Contexts that are entered one after the other."""

    def __init__(self, *contexts: Any) -> None:
        self._contexts = contexts
        self._stacks: list[ExitStack] = []

    def __add__(self, other: Any) -> _Contexts:
        return _Contexts(*self._contexts, other)

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            entered = [stack.enter_context(context) for context in self._contexts]
            self._stacks.append(stack.pop_all())
        return entered[0]

    def __exit__(self, *error: Any) -> bool | None:
        return self._stacks.pop().__exit__(*error)


class _WithForward:
    """Calls a backward hook with the values of the forward pass as well."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._calls: dict[int, list[tuple[Any, Any]]] = {}
        self._lock = threading.Lock()

    def keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            with self._lock:
                self._calls.setdefault(id(module), []).append((inputs, outputs))

    def __call__(self, module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
        with self._lock:
            calls = self._calls.pop(id(module), [])
        if len(calls) != 1:
            raise InputError(
                f"retain_forward_cache needs one call of {module!r} before each backward pass; "
                f"there were {len(calls)}"
            )
        return self.function(module, grad_in, grad_out, *calls[0])


_VARS = ("inp", "out", "inp_grad", "out_grad")


class TrackingProtocol:
    """The variables of modules that a `ModuleTracker` keeps.

    Args:
        *vars_: "inp", "out", "inp_grad", "out_grad"; all of them if none is given.
        record_every: keep the values of every n-th pass.
        buffer_len: how many passes to keep; the oldest are discarded.

    Raises:
        InputError: there is no such variable, or a number is not positive.

    Example:
        >>> import bendtrace as bt
        >>> bt.compat.tacklebox.TrackingProtocol("out", buffer_len=3).vars
        ('out',)
    """

    def __init__(self, *vars_: str, record_every: int = 1, buffer_len: int = 1) -> None:
        for name in vars_:
            if name not in _VARS:
                raise InputError(f"there is no {name!r}; these can be tracked: {', '.join(_VARS)}")
        if record_every < 1 or buffer_len < 1:
            raise InputError("record_every and buffer_len have to be positive")
        self.vars: tuple[str, ...] = vars_ or _VARS
        self.record_every = record_every
        self.buffer_len = buffer_len


class ModuleTracker:
    """Keeps the first input and output of modules, and their gradients, on the CPU.

    Args:
        *modules: modules, known by their `repr`.
        protocol: what to keep; a `TrackingProtocol`.
        hook_manager: where to register the hooks; a new manager by default.
        **named_modules: modules by name.

    Attributes:
        hook_manager: the manager of the hooks.
        data_buffer: the values kept so far: by module, by variable, one for each pass.

    Example:
        >>> import torch, bendtrace as bt
        >>> relu = torch.nn.ReLU()
        >>> tracker = bt.compat.tacklebox.ModuleTracker(relu=relu)
        >>> with tracker.track():
        ...     relu(torch.tensor([[-1.0, 2.0]], requires_grad=True)).sum().backward()
        ...     found = tracker.gather()
        >>> found["relu"]["out"], found["relu"]["inp_grad"]
        (tensor([[0., 2.]]), tensor([[0., 1.]]))
    """

    def __init__(
        self,
        *modules: nn.Module,
        protocol: TrackingProtocol | None = None,
        hook_manager: HookManager | None = None,
        **named_modules: nn.Module,
    ) -> None:
        self.protocol: TrackingProtocol = protocol or TrackingProtocol()
        self.hook_manager: HookManager = hook_manager or HookManager()
        self.modules: dict[str, Any] = {
            **named_modules,
            **{repr(module): module for module in modules},
        }
        self.data_buffer: dict[str, dict[str, list[Tensor]]] = {}
        self._passes: dict[tuple[str, str], int] = {}
        self.clear_data_buffer_all()
        manager, name = self.hook_manager, type(self).__name__
        manager.register_forward_hook(
            self.forward_hook, hook_fn_name=f"{name}.forward_hook", activate=False, **self.modules
        )
        manager.register_backward_hook(
            self.backward_hook, hook_fn_name=f"{name}.backward_hook", activate=False, **self.modules
        )

    def forward_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep the first input and the first output of a call."""
        self._keep(module, "inp", inputs)
        self._keep(module, "out", outputs)

    def backward_hook(self, module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        """Keep their gradients."""
        self._keep(module, "inp_grad", grad_in)
        self._keep(module, "out_grad", grad_out)

    def _keep(self, module: nn.Module, var: str, values: tuple[Tensor | None, ...]) -> None:
        value = values[0] if values else None
        if var not in self.protocol.vars or value is None:
            return
        name = next(name for name, other in self.modules.items() if other is module)
        number = self._passes.get((name, var), 0)
        self._passes[name, var] = number + 1
        if number % self.protocol.record_every:
            return
        kept = self.data_buffer[name][var]
        kept.append(value.detach().cpu().clone())
        if len(kept) > self.protocol.buffer_len:
            warnings.warn(
                f"more than {self.protocol.buffer_len} passes of {name!r}: the oldest {var} is "
                "discarded",
                stacklevel=2,
            )
            del kept[0]

    @contextmanager
    def track(self, clear_on_exit: bool = True) -> Iterator[ModuleTracker]:
        """Return a context in which values are kept.

        Args:
            clear_on_exit: whether to discard them at the end.
        """
        hooks = [self.forward_hook, self.backward_hook]
        with ExitStack() as stack:
            stack.enter_context(self.hook_manager.hook_all_context(hook_types=hooks))
            try:
                yield self
            finally:
                self._passes.clear()
                if clear_on_exit:
                    self.clear_data_buffer_all()

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """Return the values by module and variable, those of several passes concatenated."""
        return {name: self.gather_module(name) for name in self.modules}

    def gather_module(self, module_name: str) -> dict[str, Tensor]:
        """Return the values of a module by variable; without a pass, an empty tensor."""
        return {
            var: torch.cat(kept) if kept else torch.empty(0)
            for var, kept in self.data_buffer[module_name].items()
        }

    def gather_var(self, var_name: str) -> dict[str, Tensor]:
        """Return the values of a variable by module."""
        return {name: self.gather_module(name)[var_name] for name in self.modules}

    def gather_module_var(self, module_name: str, var_name: str) -> Tensor:
        """Return the values of a variable of a module."""
        return self.gather_module(module_name)[var_name]

    def clear_data_buffer_all(self) -> None:
        """Discard all values."""
        self.data_buffer = {name: {var: [] for var in self.protocol.vars} for name in self.modules}
