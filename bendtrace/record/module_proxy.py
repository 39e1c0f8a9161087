"""A module that represents another one: it has its names, tensors, methods and modes."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, Self

from torch import nn
from typing_extensions import TypeVar

from bendtrace.python.lazy import LazyModule
from bendtrace.watch.owners import module_of
from bendtrace.watch.rank_sync import ENDS, is_joint, joint_call

if TYPE_CHECKING:
    from bendtrace.record import redirection
else:
    redirection = LazyModule("bendtrace.record.redirection")

ModelT = TypeVar("ModelT", bound=Callable[..., Any], covariant=True, default=Any)

# `nn.Module.__call__` asks for it first (see `watch/intercepts.py`), so that it can redirect calls.
REDIRECTING = "_compiled_call_impl"


def call_itself(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a model itself, without the redirection of one of its methods."""
    if not is_joint(model):
        # Usually only the call: this is the whole overhead for a model that runs plainly.
        if not isinstance(model, nn.Module) or vars(model).get(REDIRECTING) is None:
            return model(*args, **kwargs)
        return redirection.call_redirected(model, args, kwargs)
    with joint_call(model) as joint:
        if isinstance(model, nn.Module):
            output = redirection.call_redirected(model, args, kwargs)
        else:
            output = model(*args, **kwargs)
        if joint is not None:
            joint.ends(output)
        return output


ENDS.add(call_itself.__code__)


def _presentation(proxy: Any) -> type:
    """Return the class of a proxy, with a `forward` that has the signature of the model's.

    Trainers look at the class of a model to see what its batches hold.
    """
    own: Any = type(proxy)
    model = proxy.__dict__.get("_model")
    kind: Any = type(model)
    return _class_for(own, kind) if isinstance(model, nn.Module) else own


def _change_class(proxy: Any, cls: type) -> None:
    vars(object)["__class__"].__set__(proxy, cls)


@functools.lru_cache(maxsize=256)  # bounded: it keeps the classes of models alive
def _class_for(cls: Any, model: Any) -> type:
    forward = inspect.getattr_static(cls, "forward")
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "forward": SignedMethod(forward.function, model),
    }
    made: type = type(cls.__name__, (cls,), body)
    return made


if TYPE_CHECKING:

    class _Presented: ...
else:
    # In a class statement, the name would be what `super()` looks for.
    _Presented = type("_Presented", (), {"__class__": property(_presentation, _change_class)})


class ModuleProxy(nn.Module, _Presented, Generic[ModelT]):
    """A module that is called its own way, and in all else is the model that it has.

    Attributes:
        training: as the model's.
    """

    # Attributes that a trace of a module around this one must not depend on.
    _untraced: frozenset[str] = frozenset({"__orig_class__"})
    # Attributes that are set on this one only.
    _own: frozenset[str] = frozenset(
        {"__orig_class__", "_compiled_call_impl", "_is_full_backward_hook"}
    )
    _model: ModelT

    def _stand_in_for(self, model: Callable[..., Any], shared: Iterable[str] = ()) -> None:
        """Take over a model."""
        object.__setattr__(self, "_model", model)
        owner = module_of(model)
        if owner is None:
            return
        # The very tables of the model: names, state dict keys and tensors are its own.
        for table in _TABLES:
            object.__setattr__(self, table, getattr(owner, table))
        if owner is module_of(model):  # the module itself, whose mode is asked for each time
            del self.__dict__["training"]
        else:
            object.__setattr__(self, "training", owner.training)
        if not issubclass(type(model), nn.Module):  # a wrapper may say that it is one
            return
        overridden = self._overridden(type(model))
        overridden |= {name for name in shared if hasattr(type(model), name)}
        for name in overridden:
            object.__setattr__(self, name, self._method(getattr(model, name)))
        object.__setattr__(self, "_untraced", self._untraced | overridden)

    def _overridden(self, cls: type[Any]) -> frozenset[str]:
        """The methods of nn.Module that a model has its own of, besides those dealt with here."""
        return frozenset(
            name
            for name, method in vars(nn.Module).items()
            if not name.startswith("_")
            and isinstance(method, types.FunctionType)
            and inspect.getattr_static(type(self), name) is method
            and (own := inspect.getattr_static(cls, name)) is not method
            and isinstance(own, types.FunctionType)
        )

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Hooks for all modules are called for the modules of the model, and not once more for this.
        if (
            self._forward_hooks or self._forward_pre_hooks
            or self._backward_hooks or self._backward_pre_hooks
        ):  # fmt: skip
            return super()._call_impl(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        if "training" in self.__dict__:
            object.__setattr__(self, "training", mode)
        owner = module_of(self._model)
        if owner is not None:
            owner.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, under its own keys."""
        owner = module_of(self._model)
        own = super().state_dict if owner is None else owner.state_dict
        return own(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model."""
        owner = module_of(self._model)
        own = super().load_state_dict if owner is None else owner.load_state_dict
        return own(*args, **kwargs)

    # What a module around this one calls when it loads a state dict, past `load_state_dict`.

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        owner = module_of(self._model)
        own = super()._load_from_state_dict if owner is None else owner._load_from_state_dict
        own(*args, **kwargs)

    def _register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        owner = module_of(self._model)
        own: Any = super() if owner is None else owner
        return own._register_load_state_dict_pre_hook(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the model, also one that has the name of a method of this class."""
        owner = module_of(self._model)
        return (
            super().get_submodule(target)
            if not target or owner is None
            else (owner.get_submodule(target))
        )

    def _fill_tables(self, model: Any, memo: dict[int, Any]) -> None:
        """Copy the tables of the model ahead, where a copy of it has only begun: it holds this."""
        if isinstance(model, nn.Module) and not vars(model):
            vars(model).update(
                {name: copy.deepcopy(getattr(self._model, name), memo) for name in _TABLES}
            )

    def _own_hooks(self) -> dict[str, Any]:
        """Return the tables of the hooks on this module, apart from those of the model."""
        return {name: self.__dict__[name] for name in _HOOKS}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # What .to(), .half() and the like come down to; some modules do more than the default.
        owner = module_of(self._model)
        if owner is not None:
            owner._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None:
                raise
        if name == "training" and (owner := module_of(model)) is not None:
            return owner.training
        try:
            found = getattr(model, name)
        except AttributeError as error:
            if error.obj is model:  # Python suggests near names of `obj` where it prints the error
                error.obj = self
            raise
        return self._method(found)

    def _method(self, method: Any) -> Any:
        """Return a method of the model whose calls of the model go along recorded paths."""
        model = self._model
        if not (
            isinstance(method, types.MethodType)
            and method.__self__ is model
            and isinstance(model, nn.Module)
        ):
            return method
        # Around a call of the model's own, it is that call that recorded paths stand for.
        is_served = type(model).__call__ is nn.Module.__call__

        @contextmanager
        def within() -> Iterator[None]:
            with (
                redirection.redirect_calls(model, self) if is_served else nullcontext(),
                self._redirect_parts(method),
            ):
                yield

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with within():
                result = method(*args, **kwargs)
            # What `eval` and the like return; and generators, which run later.
            return self if result is model else redirection.in_steps(result, within)

        return call

    def _redirect_parts(self, method: types.MethodType) -> AbstractContextManager[object]:
        """Within it, parts of the model may be answered for, too, that a method of it calls."""
        return nullcontext()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # of this object alone: `fully_shard` makes a subclass of it
            object.__setattr__(self, name, value)
            return
        # What the model's forward reads has to reach the model.
        model = self.__dict__.get("_model")
        owner: Any = model
        if name == "training" and name not in self.__dict__ and model is not None:
            owner = module_of(model)
        if name not in self._own and isinstance(owner, nn.Module):
            setattr(owner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        model = self.__dict__.get("_model")
        if isinstance(model, nn.Module) and name not in self.__dict__:
            delattr(model, name)
        else:
            super().__delattr__(name)

    def __bool__(self) -> bool:
        return bool(self._model)

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        model: Any = self._model
        return iter(model)

    def __contains__(self, item: Any) -> bool:
        return item in self._model  # type: ignore[operator]

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply a function to the model and all its submodules."""
        owner = module_of(self._model)
        if owner is not None:
            owner.apply(fn)
        return self


class _Forward(functools.partial[Any]):
    """The `forward` of one module, with the signature of its model."""

    __slots__ = ()

    @property
    def __signature__(self) -> inspect.Signature:
        model = self.args[0].model
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0]


class SignedMethod:
    """A method that has the signature of the model where it is looked up on a module.

    Trainers read it to see which columns of a data set a model takes. Where it is looked up on a
    class, it stands for the `forward` of `model`.
    """

    def __init__(self, function: Callable[..., Any], model: type[nn.Module] | None = None) -> None:
        self.function: Callable[..., Any] = function
        self.__doc__ = function.__doc__
        self._of_class = function
        if model is not None:
            self._of_class = functools.wraps(function)(functools.partial(function))
            with suppress(ValueError, TypeError):  # it may be a function written in C
                self._of_class.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]

    def __get__(self, module: Any, owner: type | None = None) -> Callable[..., Any]:
        return self._of_class if module is None else _Forward(self.function, module)


_TABLES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip
