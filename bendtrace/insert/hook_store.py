"""The parts of a `HookManager`: functions and handles by name, and the code that calls them.

A hook is an interjection at the calls of one module: an insertion in a `BendedModule`, or attached
to a plain module. It sees all tensors of a call as flat tuples.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, get_args

from torch import Tensor, nn

from bendtrace.errors import HookNameError, InputError
from bendtrace.insert.gradients import ChecksGradients, Gradients
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass
from bendtrace.insert.leaves import all_tensors_in, with_tensors
from bendtrace.insert.native import AttachedInterjection
from bendtrace.python.checks import similar
from bendtrace.tape.tape import meta_of
from bendtrace.watch.functions import ScriptModule

if TYPE_CHECKING:
    from bendtrace.hooks import HookManager

Category = Literal["forward_hook", "forward_pre_hook", "backward_hook"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_T = TypeVar("_T")
_orders = itertools.count()


@dataclass(eq=False)
class HookedModule:
    """A module that hooks are registered on."""

    module: nn.Module
    name: str
    is_given: bool  # whether a user chose the name; if not, the first user-chosen name replaces it


class ModuleTable(Mapping[nn.Module, "HookHandle"]):
    """Handles by module, compared by identity."""

    def __init__(self, handles: dict[int, HookHandle]) -> None:
        self._handles = handles

    def __getitem__(self, module: nn.Module) -> HookHandle:
        return self._handles[id(module)]

    def __contains__(self, module: object) -> bool:
        return id(module) in self._handles

    def __iter__(self) -> Iterator[nn.Module]:
        return (handle.module for handle in self._handles.values())

    def __len__(self) -> int:
        return len(self._handles)

    def __repr__(self) -> str:
        entries = (f"<{one.module_name}>: {one!r}" for one in self._handles.values())
        return f"{{{', '.join(entries)}}}"


class HookFunction:
    """A function that was registered as a hook of some kind. `HookManager` creates these.

    Attributes:
        function: the registered function.
        hook_type: the kind: "forward_hook", "forward_pre_hook" or "backward_hook".
        name: its id.
        module_to_handle: the handles by module.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> hook = manager.register_forward_hook(print, hook_fn_name="show", first=linear)
        >>> hook
        <HookFunction show: forward_hook on first>
        >>> hook.module_to_handle[linear]
        <HookHandle show[first]: active>
    """

    def __init__(
        self, function: Callable[..., Any], hook_type: Category, name: str, is_given: bool
    ) -> None:
        self.function = function
        self.hook_type: Category = hook_type
        self.name = name
        self.is_given = is_given
        self._handles: dict[int, HookHandle] = {}
        self.module_to_handle: ModuleTable = ModuleTable(self._handles)

    @property
    def handles(self) -> tuple[HookHandle, ...]:
        """The handles, in the order of registration."""
        return tuple(self._handles.values())

    def activate(self) -> None:
        """Activate the function on all modules that it is registered on."""
        for handle in self.handles:
            handle.activate()

    def deactivate(self) -> None:
        """Deactivate the function on all modules that it is registered on."""
        for handle in self.handles:
            handle.deactivate()

    def __call__(self, *args: Any) -> Any:
        """Call the function itself."""
        return self.function(*args)

    def __repr__(self) -> str:
        modules = ", ".join(handle.module_name for handle in self.handles) or "no module"
        return f"<HookFunction {self.name}: {self.hook_type} on {modules}>"


class HookHandle:
    """One function that is registered on one module. `HookManager` creates these.

    Attributes:
        hook_fn: the function, as a `HookFunction`.
        module: the module.
        module_name: the id of the module.
        order: its position among all registrations.
        placed: the object through which the module calls it.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> def show(module, inputs, outputs):
        ...     print(module.name, tuple(outputs[0].shape))
        >>> _ = manager.register_forward_hook(show, hook_fn_name="show", first=linear)
        >>> handle = manager.name_to_hookhandle["show[first]"]
        >>> _ = linear(torch.ones(2, 1))
        first (2, 1)
        >>> handle.deactivate()
        >>> _ = linear(torch.ones(2, 1))
        >>> handle
        <HookHandle show[first]: inactive>
    """

    def __init__(self, hook_fn: HookFunction, registered: HookedModule, owner: HookManager) -> None:
        self.hook_fn = hook_fn
        self.module: nn.Module = registered.module
        self.order: int = next(_orders)
        self._registered = registered
        self.placed: Insertion | AttachedInterjection = owner.place(self)
        self._owner: HookManager | None = owner
        self._active = False
        hook_fn._handles[id(self.module)] = self

    @property
    def module_name(self) -> str:
        """The id of the module."""
        return self._registered.name

    @property
    def name(self) -> str:
        """Its id, made from those of the function and of the module: `function[module]`."""
        return f"{self.hook_fn.name}[{self.module_name}]"

    @property
    def active(self) -> bool:
        """Return whether the function is called when the module is."""
        return self._active and self.placed.active

    @property
    def removed(self) -> bool:
        """Return whether it was removed from its manager, and cannot be activated any more."""
        return self._owner is None

    def is_active(self) -> bool:
        """Return whether the function is called when the module is."""
        return self.active

    def activate(self) -> None:
        """Make the module call the function.

        Raises:
            InputError: the hook was removed.
        """
        if self._owner is None:
            raise InputError(f"{self.described} was removed: register it again")
        if not self.active:
            self._owner.activate(self)
            self._active = True

    def deactivate(self) -> None:
        """Stop the module from calling the function for now."""
        if self._active:
            self._active = False
            self.placed.remove()

    def remove(self) -> None:
        """Deactivate it for good, and remove it from the tables of its manager."""
        if self._owner is not None:
            self._owner = None
            self.deactivate()
            del self.hook_fn._handles[id(self.module)]

    @property
    def described(self) -> str:
        """The start of a sentence about it."""
        kind = self.hook_fn.hook_type.replace("_", " ")
        return f"{kind} {self.hook_fn.name!r} on module {self.module_name!r}"

    def __repr__(self) -> str:
        state = "removed" if self._owner is None else "active" if self.active else "inactive"
        return f"<HookHandle {self.name}: {state}>"


# What calls hooks


class _Hook(Interjection):
    """Calls a hook for the calls of a module."""

    checks_itself = True

    def __init__(self, handle: HookHandle) -> None:
        self.handle = handle

    @property
    def _code(self) -> Any:
        return self.handle.hook_fn.function

    @property
    def label(self) -> str:
        """The name of the hook, or of its function if the user did not name it."""
        hook, name = self.handle.hook_fn, getattr(self.handle.hook_fn.function, "__name__", "")
        return f"{hook.name if hook.is_given or not name else name}[{self.handle.module_name}]"

    def _call(
        self, at: NodePass, seen: tuple[Any, ...], given: tuple[Any, ...], what: str
    ) -> tuple[Any, ...]:
        """Return the result of the hook for some tensors, if it is active; messages name these.

        Its arguments are those seen, and these tensors.
        """
        handle = self.handle
        if not handle.active:
            return given
        with named(at.module or handle.module, handle.module_name):
            returned = handle.hook_fn.function(at.module or handle.module, *seen, given)
        if returned is None:
            return given
        self._require(returned, len(given), what, Tensor)
        return returned  # type: ignore[no-any-return]

    def _require(self, returned: Any, count: int, what: str, *kinds: type) -> None:
        """Raise an error if the result is not a tuple of the same number of tensors."""
        if (
            type(returned) is not tuple
            or len(returned) != count
            or not all(isinstance(item, kinds) for item in returned)
        ):
            plural = "" if count == 1 else "s"
            raise InputError(
                f"{self.handle.described} has to return None, or the {what} as a tuple of {count} "
                f"tensor{plural}; it returned {_kind_text(returned)}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self  # like functions: a copied module has the same hooks

    def __reduce__(self) -> NoReturn:
        raise InputError(
            f"a module with active hooks cannot be pickled: deactivate {self.handle.name} first"
        )


class _PreHook(_Hook):
    def before(self, at: NodePass, inputs: Inputs) -> Inputs | None:
        value = tuple(inputs), inputs.kwargs
        tensors = tuple(all_tensors_in(value))
        new = self._call(at, (), tensors, "inputs")
        return None if new is tensors else Inputs(*with_tensors(value, new))


class _ForwardHook(_Hook):
    wants_inputs = True
    _sees_writes = True

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        seen, tensors = (
            tuple(all_tensors_in((inputs, inputs.kwargs))),
            tuple(all_tensors_in(output)),
        )
        new = self._call(at, (seen,), tensors, "outputs")
        return None if new is tensors else with_tensors(output, new)


class _BackwardHook(_Hook, ChecksGradients):
    def backward(self, at: NodePass, grad_input: Gradients, grad_output: Gradients) -> Any:
        handle = self.handle
        if not handle.active:
            return None
        given = [gradient for gradient in (*grad_input, *grad_output) if gradient is not None]
        versions = [gradient._version for gradient in given]
        with named(at.module or handle.module, handle.module_name):
            returned = handle.hook_fn.function(at.module or handle.module, grad_input, grad_output)
        if [gradient._version for gradient in given] != versions:
            raise InputError(
                f"{handle.described} changed a gradient in place, which other code may use as "
                "well: return a tuple of new gradients of the inputs instead"
            )
        return returned

    def checked_gradients(
        self,
        result: Any,
        before: Gradients,
        passing: frozenset[int],
        shapes: Sequence[Sequence[int]],
    ) -> Gradients:
        self._require(result, len(before), "gradients of the inputs", Tensor, type(None))
        for place, (old, new, shape) in enumerate(zip(before, result, shapes, strict=True)):
            if new is not None and meta_of(new).shape != shape:
                raise InputError(
                    f"{self.handle.described} returned a gradient of shape {meta_of(new).shape} "
                    f"for input {place}, which has shape {tuple(shape)}"
                )
            if old is not new and place not in passing:
                raise InputError(
                    f"{self.handle.described} returned another gradient for input {place}, but "
                    "that input passes no gradient on"
                )
        return result  # type: ignore[no-any-return]


_KINDS: dict[Category, type[_Hook]] = {
    "forward_hook": _ForwardHook, "forward_pre_hook": _PreHook, "backward_hook": _BackwardHook,
}  # fmt: skip


def interjection_of(handle: HookHandle) -> Interjection:
    """Return the interjection that calls a hook at the calls of its module."""
    return _KINDS[handle.hook_fn.hook_type](handle)


def _kind_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(item).__name__ for item in value)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    return f"a {type(value).__name__}"


class HookContext(Generic[_T]):
    """A context in which hooks are active; it restores their earlier state at the end.

    Contexts can be nested, and one can be entered several times. The hooks are looked up on entry.
    A hook that is removed in the meantime stays removed.

    Example:
        >>> import torch, bendtrace as bt
        >>> linear, manager = torch.nn.Linear(1, 1), bt.HookManager()
        >>> hook = manager.register_forward_hook(print, first=linear, activate=False)
        >>> with manager.hook_all_context():
        ...     hook.handles[0].active
        True
        >>> hook.handles[0].active
        False
    """

    def __init__(self, manager: _T, select: Callable[[], Iterable[HookHandle]]) -> None:
        self._manager = manager
        self._select = select
        self._before: list[list[tuple[HookHandle, bool]]] = []

    def __enter__(self) -> _T:
        handles = list(self._select())
        self._before.append([(handle, handle.active) for handle in handles])
        for handle in handles:
            handle.activate()
        return self._manager

    def __exit__(self, *error: object) -> None:
        for handle, was_active in self._before.pop():
            if was_active and not handle.removed:
                handle.activate()
            elif not was_active:
                handle.deactivate()


# Names


class NameTable(dict[str, _T]):
    """Objects by name.

    Example:
        >>> NameTable("module", {"layer1": 1})["layer2"]
        Traceback (most recent call last):
        bendtrace.errors.HookNameError: no module is registered as 'layer2'; \
registered: 'layer1'
    """

    def __init__(self, what: str, things: Mapping[str, _T]) -> None:
        super().__init__(things)
        self._what = what

    def __missing__(self, name: object) -> NoReturn:
        near = tuple(similar(name, self))
        suggestions = near or tuple(self)[:5]
        choices = (
            f"registered: {', '.join(map(repr, suggestions))}"
            if suggestions
            else "nothing is registered"
        )
        raise HookNameError(f"no {self._what} is registered as {name!r}; {choices}", name, near)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


_lock = threading.Lock()
# By id of the module: it, and its current names, in any thread; the last one shows.
_shown: dict[int, tuple[nn.Module, list[str]]] = {}


class named:
    """Set `module.name` temporarily, unless the module already has a `name`.

    An existing attribute, parameter, buffer, submodule or property `name` is never touched, so that
    other computations of the module, in this thread or another, are not disturbed.

    Example:
        >>> linear = nn.Linear(1, 1)
        >>> with named(linear, "first"):
        ...     linear.name
        'first'
        >>> hasattr(linear, "name")
        False
    """

    __slots__ = ("_module", "_name", "_names")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._names: list[str] | None = None

    def __enter__(self) -> None:
        # No lock is held while the hook runs: it may start a backward pass in another thread that
        # reaches hooks of the same module. So threads share what is shown.
        with _lock:
            found = _shown.get(id(self._module))
            if found is None and _has_own_name(self._module):
                return
            self._names = _shown.setdefault(id(self._module), (self._module, []))[1]
            self._names.append(self._name)
            vars(self._module)["name"] = self._name

    def __exit__(self, *error: object) -> None:
        if self._names is not None:
            with _lock:
                _restore_name(self._module, self._names, self._name)


def _restore_name(module: nn.Module, names: list[str], name: str) -> None:
    attributes = vars(module)
    is_shown = any(attributes.get("name") is one for one in names)  # else a hook has set another
    names.reverse()
    names.remove(name)  # the latest of that name
    names.reverse()
    if not names:
        del _shown[id(module)]
    if is_shown and names:
        attributes["name"] = names[-1]
    elif is_shown:
        del attributes["name"]


def _has_own_name(module: nn.Module) -> bool:
    if "name" in vars(module) or hasattr(type(module), "name"):
        return True
    if type(module).__getattr__ is nn.Module.__getattr__:
        tables = module._parameters, module._buffers, module._modules
        return any("name" in table for table in tables)
    return hasattr(module, "name")  # a wrapper may pass it on from what it wraps


# What is checked


def is_same(one: Any, other: Any) -> bool:
    """Return whether two functions are the same. Each lookup of a method creates a new object."""
    if one is other:
        return True
    methods = (types.MethodType, types.BuiltinMethodType)
    return (
        type(one) is type(other)
        and isinstance(one, methods)
        and one.__self__ is other.__self__
        and one == other
    )


def check_module(module: object, where: str) -> None:
    """Raise an `InputError` if hooks cannot be registered on an object."""
    if not isinstance(module, nn.Module):
        raise InputError(f"hooks are registered on modules; {where} is a {type(module).__name__}")
    if isinstance(module, ScriptModule):
        raise InputError(
            f"hooks cannot be registered on a scripted module; {where} is a scripted module"
        )


def check_category(category: object) -> None:
    """Raise an `InputError` if the category of hooks does not exist."""
    if category != "all" and category not in CATEGORIES:
        choices = ", ".join(map(repr, ("all", *CATEGORIES)))
        raise InputError(f"there is no hook category {category!r}: choose one of {choices}")


def short(thing: object) -> str:
    """Return the beginning of the text of something, on one line."""
    text = " ".join(repr(thing).split())
    return text if len(text) <= 80 else text[:77] + "..."
