"""Intercepts: where the tracer steps in besides the function mode, and how it steps out again.

A function mode does not see the call of a module, nor an `autograd.Function`, a scripted function,
a transform such as vmap, or the seeding of torch's generator. While at least one recorder is
running in the process, the few entry points below are replaced by versions that first check whether
the *calling thread* is recording; when the last recorder ends, the originals are restored. They
were seen in torch 2.13 to 2.15; test_boundaries.py would notice a change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.autograd.forward_ad
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.hooks import BackwardHook

from bendtrace.python.internals import Never, TorchDispatchMode, disable_dynamo, internal
from bendtrace.python.lazy import LazyModule, errors
from bendtrace.tape.captured import PLAIN_TENSORS, PLAIN_TYPES
from bendtrace.tape.contexts import forget_casts
from bendtrace.tape.scalars import TRACED
from bendtrace.tape.tape import FunctionUse
from bendtrace.tape.watchers import _local, call_silently, current_watcher, note_call, set_watcher
from bendtrace.watch.draws import entries_of_numpys_draws, entries_of_pythons_draws, numpys_random
from bendtrace.watch.functions import GONE, ScriptFunction, ScriptMethod, entries_of_constructors
from bendtrace.watch.host_io import OFTEN_PATCHED, entries_of_outside
from bendtrace.watch.rank_sync import is_running
from bendtrace.watch.transforms import as_one_op, entries_of_transforms

if TYPE_CHECKING:
    from bendtrace.record.recorder import Recorder
    from bendtrace.watch import collectives
else:
    collectives = LazyModule("bendtrace.watch.collectives")

# Full backward hooks of modules, which each replay sets up on its own.
#
# torch hooks the autograd nodes of a module's inputs and outputs, which no function mode sees. So
# what it does before the forward and after it is one op each. The first gives a tensor without
# content that carries torch's object, and the second is given it.


def entries_of_backward_hooks() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if vars(modules).get("BackwardHook") is BackwardHook:
        yield modules, "BackwardHook", _RecordedHook


class _RecordedHook(BackwardHook):
    """Sets up the hooks of one call of a module by two ops."""

    _carrier: Tensor | None = None

    def setup_input_hook(self, args: Any) -> Any:
        """Return the arguments of the module, of which the gradients are hooked."""
        watcher = current_watcher()
        if watcher is None:
            return super().setup_input_hook(args)
        if not torch.is_grad_enabled():  # no node of the graph is made, so that none is hooked
            return args
        places, tensors = _tensors_of(args)
        self._carrier, *given = watcher.opaque_call(
            enter_hooked, (self.module, len(args), places, *tensors), {}
        )
        return _with_tensors(args, places, given)

    def setup_output_hook(self, args: Any) -> Any:
        """Return the output of the module, of which the gradients are hooked."""
        watcher = current_watcher()
        if watcher is not None and self._carrier is None and not torch.is_grad_enabled():
            return args
        if watcher is None or self._carrier is None:
            return super().setup_output_hook(args)
        outputs = args if isinstance(args, tuple) else (args,)
        places, tensors = _tensors_of(outputs)
        _, *given = watcher.opaque_call(
            leave_hooked, (self._carrier, len(outputs), places, *tensors), {}
        )
        found = _with_tensors(outputs, places, given)
        return found if isinstance(args, tuple) else found[0]


def enter_hooked(module: Any, count: int, places: tuple[int, ...], *tensors: Tensor) -> Any:
    """Hook the gradients of a module's inputs; replays call this as well."""
    carrier: Any = torch.empty(0)
    carrier.hook = BackwardHook(
        module, module._get_backward_hooks()[0], module._get_backward_pre_hooks()
    )
    given = carrier.hook.setup_input_hook(_with_tensors((None,) * count, places, tensors))
    return (carrier, *(given[place] for place in places))


def leave_hooked(carrier: Any, count: int, places: tuple[int, ...], *tensors: Tensor) -> Any:
    """Hook the gradients of a module's outputs; replays call this as well."""
    given = carrier.hook.setup_output_hook(_with_tensors((None,) * count, places, tensors))
    return (torch.empty(0), *(given[place] for place in places))


def _tensors_of(values: tuple[Any, ...]) -> tuple[tuple[int, ...], list[Tensor]]:
    places = tuple(n for n, value in enumerate(values) if isinstance(value, Tensor))
    return places, [values[place] for place in places]


def _with_tensors(values: tuple[Any, ...], places: tuple[int, ...], tensors: Any) -> Any:
    """Return values with other tensors in some places, in a tuple of the same type."""
    items = list(values)
    for place, tensor in zip(places, tensors, strict=True):
        items[place] = tensor
    kind: Any = type(values)
    return tuple(items) if kind is tuple else kind(*items)


P = ParamSpec("P")
R = TypeVar("R")


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Record a function as one op, whatever it does inside.

    For code that torch does not let a tracer see: foreign kernels, numpy code that creates tensors,
    C++ extensions. Each replay calls the function again, with the tensors and numbers of that call,
    and it changes them again. The op is guarded by its return value: its type, numbers as traced
    scalars, other plain values by value. Nothing inside it becomes a node or a flow step. Of the
    values that it reads besides its arguments, only numbers in globals and closures are guarded.

    Args:
        function: any callable; usable as a decorator, also for methods.

    Returns:
        A function that does the same, and is recorded as one op.

    Raises:
        InputError: `function` is not callable.

    Example:
        >>> import numpy, torch, bendtrace as bt
        >>> half = numpy.full(2, 0.5, dtype="float32")
        >>> @bt.opaque
        ... def smooth(x):
        ...     return torch.from_numpy(numpy.convolve(x.numpy(), half, "same"))
        >>> bended = bt.BendedModule(lambda x: smooth(x) * 2)
        >>> for value in (1.0, 3.0):
        ...     out = bended(torch.full((3,), value))
        >>> out, bended.stats.replays
        (tensor([3., 6., 6.]), 1)
    """
    if not callable(function):
        raise errors.InputError(f"only a callable can be opaque, not {function!r}")
    return as_one_op(function)


class _ModuleCall:
    """Stands in for `nn.Module._compiled_call_impl`, which `nn.Module.__call__` asks first.

    Unlike `__call__` itself, nothing keeps a reference to it (torch._dynamo, when it is
    imported, does to `__call__`). A data descriptor, so that modules that were compiled run
    as they are while they are traced.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return None
        watcher = current_watcher()
        if watcher is None:
            note_call(module)
            return module.__dict__.get("_compiled_call_impl")

        def call(*args: Any, **kwargs: Any) -> Any:
            return watcher.module_call(module, args, kwargs)

        return call

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["_compiled_call_impl"] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__["_compiled_call_impl"]


# Where `apply` of an autograd.Function is exchanged. Until torch 2.13 that is what Function.apply
# comes down to, so that one that was taken before the run (`relu = MyRelu.apply`) is met as well.
# Since 2.14 Function.apply is written in C, and such a one goes past what is exchanged here.
_Function = torch.autograd.Function
_APPLIES = (
    internal("torch.autograd.function._SingleLevelFunction", _Function)
    if isinstance(vars(_Function).get("apply"), classmethod)
    else _Function
)


_applies: Any = inspect.getattr_static(_APPLIES, "apply")


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an autograd function as one op, or as code of the model, while a run is recorded."""
    watcher = current_watcher()
    if watcher is None:
        return _applies.__get__(None, cls)(*args, **kwargs)
    if (
        not (torch.is_grad_enabled() or kwargs)
        and not all(isinstance(one, Tensor) or type(one) in PLAIN_TYPES for one in args)
        and _can_follow(cls, args)
    ):
        return _call_forward(cls, args)
    # Not `cls.apply`: where a class has its own, which calls torch's, only torch's is the op.
    bound = vars(_Function)["apply"].__get__(None, cls)
    return watcher.opaque_call(bound, args, kwargs)


# Autograd functions that a run follows: no gradient is computed, and they are given objects.
#
# Such a function may write to a list or a module that it is given, so that its call is no op.
# Without gradients nothing remains of the call but what its `forward` does, which runs as code of
# the model. The rest is done here as torch does it in C (seen in torch 2.13 to 2.15;
# tests/test_boundaries.py would notice a change).


def _can_follow(cls: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of an autograd function comes down to its `forward`."""
    return (
        not cls.__module__.startswith("torch.")
        and cls.setup_context is torch.autograd.Function.setup_context
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and all(type(one) in PLAIN_TENSORS for one in args if isinstance(one, Tensor))
    )


def _call_forward(cls: Any, args: tuple[Any, ...]) -> Any:
    """Call the `forward` of an autograd function, and return what `apply` returns."""
    context = call_silently(lambda: cls._backward_cls(), (), {})
    context.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    output = cls.forward(context, *args)
    watcher = current_watcher()
    if watcher is not None and context.dirty_tensors:  # whose versions torch counts up
        watcher.unseen(f"ctx.mark_dirty, in a call of {cls.__name__} without gradients,")
    if type(output) is not tuple:
        return _returned_by_forward(output, args) if isinstance(output, Tensor) else output
    return tuple(
        _returned_by_forward(one, args) if isinstance(one, Tensor) else one for one in output
    )


def _returned_by_forward(output: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Return what becomes of a tensor that `forward` returns: no argument is returned itself."""
    if any(output is one for one in args):
        return output.detach() if output.requires_grad else output.view_as(output)
    return output.detach_() if output.requires_grad and not output._is_view() else output


# Unlike other code of the tracer around that of a model, these hold what the function was given and
# has returned.
FOLLOWING = (_can_follow.__code__, _call_forward.__code__)

# What is bound to a class there: torch's own function, or the above where torch's is written in C.
_BOUND: Any = apply if _APPLIES is _Function else vars(_Function)["apply"].__func__


def is_function_apply(target: Any) -> bool:
    """Return whether the target of an op is the `apply` of an `autograd.Function`."""
    return getattr(target, "__func__", None) is _BOUND


def _class_attribute(cls: Any, name: str) -> Any:
    # Whatever makes a node of the backward pass asks for the node's class, also past `apply`.
    watcher = current_watcher() if name == "_backward_cls" else None
    if watcher is not None:
        watcher.unseen(f"{cls.__name__}.apply, taken before the run,")
    return type.__getattribute__(cls, name)


def _method_of_script(method: Any) -> Callable[..., Any]:
    """A scripted function is recorded as a call of itself: there is one `__call__` for all."""

    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return method(*args, **kwargs)
        return watcher.opaque_call(args[0], args[1:], kwargs)

    return call


_swap_tensors = torch.utils.swap_tensors


def _swaps(t1: torch.Tensor, t2: torch.Tensor) -> None:
    watcher = current_watcher()
    if watcher is not None:
        watcher.unseen("torch.utils.swap_tensors")
        watcher.forget(t1, t2)  # torch refuses to swap tensors that have weak references
    _swap_tensors(t1, t2)


def _reports(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes that a run calls `function`, and cannot be repeated."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = current_watcher()
        if watcher is not None:
            watcher.unseen(what)
        return function(*args, **kwargs)

    return call


class _WrappedNumber:
    """Puts the value of a traced scalar into the tensor that torch's C++ code makes of it.

    Where the function mode is switched off - inside an op, in another thread - the argument
    parser takes any symbolic number for a placeholder, 7777777, and marks the tensor that it
    makes with this attribute, so that a compiler could find the number. Seen in torch 2.13 and
    2.14; test_boundaries.py would notice a change.
    """

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        raise AttributeError("_wrapped_number")

    def __set__(self, tensor: torch.Tensor, number: Any) -> None:
        if type(number) in TRACED:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                tensor.fill_(number._consume(FunctionUse("torch")))
        else:
            tensor.__dict__["_wrapped_number"] = number


def _forgets_casts() -> None:
    # Leaving the outermost block of autocast comes down to this.
    watcher = current_watcher()
    if watcher is not None:
        watcher.forgot_casts()
    forget_casts()


_assert: Any = internal("torch._assert", None)


def _asserts(condition: Any, message: Any = "") -> None:
    try:
        _assert(condition, message)
    except AssertionError as error:
        watcher = current_watcher()
        if watcher is None or type(message) is not str or error.args != (message,):
            raise
        raise AssertionError(watcher.texts.guard_text(message)).with_traceback(
            error.__traceback__
        ) from None


_compile = torch.compile


def _compiles(*args: Any, **kwargs: Any) -> Any:
    if current_watcher() is not None:
        _run_compiled_code_eagerly()
    return _compile(*args, **kwargs)


# While a recorder runs, what torch.compile has compiled runs as it is: there is nothing to see in
# compiled code, and torch._dynamo would compile the recorder along with what it calls.
_stances: list[Any] = []


def _higher_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """Record `torch.cond` and its like as one op.

    They compile themselves, which has to go on as without a recorder.
    """

    def higher_order(*args: Any, **kwargs: Any) -> Any:
        stances, profile = _leave_compiled_code_alone(), sys.getprofile()
        watcher = set_watcher(None)
        sys.setprofile(None)
        try:
            with torch._C.DisableTorchFunction():
                return run(*args, **kwargs)
        finally:
            sys.setprofile(profile)
            set_watcher(watcher)
            if stances:
                _run_compiled_code_eagerly()

    return as_one_op(higher_order)


def _leave_compiled_code_alone() -> bool:
    found = bool(_stances)
    while _stances:
        _stances.pop().__exit__(None, None, None)
    return found


def _run_compiled_code_eagerly() -> None:
    if not _stances:
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        _stances.append(stance)


# Also in `blocks.py`, which most runs do not load.
_checkpointed: Any = internal(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", None
)


def _through_block(function: Any, *settings: Any, **kwargs: Any) -> Any:
    watcher = current_watcher()
    followed = None
    if watcher is not None and torch.is_grad_enabled():
        followed = watcher.checkpointed(function, *settings, **kwargs)
    return _checkpointed(function, *settings, **kwargs) if followed is None else followed


def _through_block_by_keywords(function: Any, args: Any, kwargs: Any, **settings: Any) -> Any:
    watcher = current_watcher()
    followed = None
    if watcher is not None and torch.is_grad_enabled():
        if settings.get("respect_saved_tensors_hooks") is None:
            given = (settings[name] for name in _SETTINGS if name in settings)
            followed = watcher.checkpointed(function, *given, *args, **kwargs)
    return _keywords_of_blocks(function, args, kwargs, **settings) if followed is None else followed


# Since torch 2.14, checkpoints call another generator, by keywords.
_BY_KEYWORDS = "_checkpoint_without_reentrant_generator_impl"
_keywords_of_blocks: Any = vars(torch.utils.checkpoint).get(_BY_KEYWORDS)
_SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


_SavedTensors = torch.autograd.graph.saved_tensors_hooks
_enters_hooks, _leaves_hooks = _SavedTensors.__enter__, _SavedTensors.__exit__


def _enters_saved(hooks: Any) -> None:
    watcher = current_watcher()
    if watcher is not None:
        watcher.unseen("a block under saved_tensors_hooks (of torch.utils.checkpoint, perhaps)")
        if isinstance(hooks, _Checkpointed):
            watcher.recomputed(True)
    _enters_hooks(hooks)


def _leaves_saved(hooks: Any, *args: object) -> None:
    watcher = current_watcher()
    if watcher is not None and isinstance(hooks, _Checkpointed):
        watcher.recomputed(False)
    _leaves_hooks(hooks, *args)


# Of use_reentrant=False.
_Checkpointed: Any = internal("torch.utils.checkpoint._checkpoint_hook", Never)
_UNFOLLOWED: tuple[tuple[Any, str, str], ...] = (
    (TorchDispatchMode, "__enter__", "a block under a dispatch mode"),
    (torch.autograd.forward_ad, "enter_dual_level", "forward-mode differentiation"),
    (threading.Thread, "start", "a thread that is started"),
    (ThreadPoolExecutor, "submit", "work that is given to a thread"),
    (torch, "set_default_device", "torch.set_default_device"),
)


# Has a function since torch 2.14.
_higher_order_utils: Any = internal("torch._higher_order_ops.utils", None)
_OF_CUDAS_GENERATORS = (
    "manual_seed", "manual_seed_all", "get_rng_state", "get_rng_state_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip


class _EntryPoint(NamedTuple):
    """An attribute of `owner`, its replacement, and its original."""

    owner: Any
    name: str
    ours: Any
    original: Any


_ABSENT = object()


def _entry_points() -> Iterator[_EntryPoint]:
    def entry(owner: Any, name: str, ours: Any) -> _EntryPoint:
        return _EntryPoint(owner, name, ours, vars(owner).get(name, _ABSENT))

    # First, so that it is gone before others are asked of classes of that kind.
    yield entry(type(_Function), "__getattribute__", _class_attribute)
    yield _EntryPoint(nn.Module, "_compiled_call_impl", _ModuleCall(), None)
    yield entry(_APPLIES, "apply", classmethod(apply))
    for owner, name, what in _UNFOLLOWED:
        if name in vars(owner):
            yield entry(owner, name, _reports(what, vars(owner)[name]))
    if _checkpointed is not None:
        yield entry(torch.utils.checkpoint, _checkpointed.__name__, _through_block)
        if _keywords_of_blocks is not None:
            yield entry(torch.utils.checkpoint, _BY_KEYWORDS, _through_block_by_keywords)
    yield entry(_SavedTensors, "__enter__", _enters_saved)
    yield entry(_SavedTensors, "__exit__", _leaves_saved)
    for script in (ScriptFunction, ScriptMethod):
        if "__call__" in vars(script):
            yield entry(script, "__call__", _method_of_script(script.__call__))
    yield entry(torch.utils, "swap_tensors", _swaps)
    yield entry(torch.Tensor, "set_", as_one_op(torch.Tensor.set_))
    yield entry(torch, "clear_autocast_cache", _forgets_casts)
    if _assert is not None:
        yield entry(torch, "_assert", _asserts)
    yield entry(torch, "compile", _compiles)
    if hasattr(_higher_order_utils, "_hop_compile_and_call"):
        ours = _higher_order(_higher_order_utils._hop_compile_and_call)
        yield entry(_higher_order_utils, "_hop_compile_and_call", ours)
    yield entry(torch.Tensor, "_wrapped_number", _WrappedNumber())
    for name in ("manual_seed", "get_rng_state", "set_rng_state"):
        ours = as_one_op(getattr(torch, name))
        yield entry(torch, name, ours)
        yield entry(torch.random, name, ours)
    for name in _OF_CUDAS_GENERATORS:
        ours = as_one_op(getattr(torch.cuda, name))
        yield entry(torch.cuda, name, ours)
        yield entry(torch.cuda.random, name, ours)
    for owner, name, ours in (
        *entries_of_outside(),
        *entries_of_pythons_draws(),
        *entries_of_backward_hooks(),
        *entries_of_constructors(),
        *entries_of_transforms(),
    ):
        yield entry(owner, name, ours)


_ENTRY_POINTS = list(_entry_points())
# Names of modules and classes, and of what is exchanged in them.
REPLACED = frozenset(
    (f"{entry.owner.__module__}.{entry.owner.__qualname__}", entry.name)
    if isinstance(entry.owner, type)
    else (entry.owner.__name__, entry.name)
    for entry in _ENTRY_POINTS
)


def _add_numpys() -> None:
    """Once numpy is there, what seeds its generator and draws from it are entry points as well."""
    numpy = numpys_random()
    if numpy is not None and all(entry.owner is not numpy for entry in _ENTRY_POINTS):
        for owner, name, ours in entries_of_numpys_draws(numpy):
            _ENTRY_POINTS.append(_EntryPoint(owner, name, ours, vars(owner)[name]))


def _add_joint() -> None:
    """Intercept what torch.distributed has imported so far; it imports some parts on first use."""
    if not is_running():
        return
    entries = {(id(entry.owner), entry.name) for entry in _ENTRY_POINTS}
    for entry in collectives.entries_of_ddp():
        if (id(entry[0]), entry[1]) not in entries:
            _ENTRY_POINTS.append(_EntryPoint(*entry, vars(entry[0])[entry[1]]))
    for owner, name in (*collectives.joint_functions(), *collectives.layout_properties()):
        if (id(owner), name) not in entries:
            original = vars(owner)[name]
            ours: Any
            if isinstance(original, property):
                ours = property(_as_read(original.fget))
            elif isinstance(original, staticmethod):
                ours = staticmethod(as_one_op(original.__func__))
            else:
                ours = as_one_op(original)
            _ENTRY_POINTS.append(_EntryPoint(owner, name, ours, original))


def _as_read(getter: Any) -> Callable[[torch.Tensor], Any]:
    """Return a getter that reports which property of a tensor is read past the function mode."""

    def read(tensor: torch.Tensor) -> Any:
        watcher = current_watcher()
        return getter(tensor) if watcher is None else watcher.read(getter, tensor)

    return read


_of_modules: list[types.CodeType] = [
    code
    for code in (
        internal("torch.nn.Module._wrapped_call_impl.__code__", None, "calls of modules", ""),
        internal("torch.nn.Module._call_impl.__code__", None, "calls of modules", ""),
    )
    if code is not None
]
INTERCEPT_CODES = frozenset(
    {
        *_of_modules,
        # The function in one that calls forward where there are hooks.
        *(c for code in _of_modules for c in code.co_consts if isinstance(c, types.CodeType)),
    }
)  # fmt: skip


def _install() -> None:
    if "torch._dynamo" in sys.modules:  # else nothing is compiled yet
        _run_compiled_code_eagerly()
    _add_numpys()
    _add_joint()
    # All originals are noted before the first is exchanged: an interrupt may come in between, and
    # `_uninstall` then restores what has been exchanged so far. They are read each time, since
    # others exchange some of them, too.
    _before[:] = [vars(entry.owner).get(entry.name, _ABSENT) for entry in _ENTRY_POINTS]
    for entry, now in zip(_ENTRY_POINTS, _before, strict=True):
        if entry.owner in OFTEN_PATCHED and now is not entry.ours:
            # What a class inherits is not among its own.
            entry.ours.__wrapped__ = getattr(entry.owner, entry.name) if now is _ABSENT else now
        if entry.ours is not GONE:
            setattr(entry.owner, entry.name, entry.ours)
        elif now is not _ABSENT:
            delattr(entry.owner, entry.name)
        if entry.name == "__getitem__" and isinstance(now, types.FunctionType):
            # CPython 3.13 gives a class a thousand versions. What is written to it after that does
            # not reach an instruction `x[key]` that has remembered a function, as long as this one
            # is of the same version; all that is written to a function gives it another one.
            now.__defaults__ = now.__defaults__


def _uninstall() -> None:
    for entry, value in zip(_ENTRY_POINTS, _before, strict=False):
        # What somebody else has put there during the run stays.
        current = vars(entry.owner).get(entry.name, GONE)
        if current is GONE and value is _ABSENT:
            continue
        if current is entry.ours and value is _ABSENT:
            delattr(entry.owner, entry.name)
        elif current is entry.ours:
            setattr(entry.owner, entry.name, value)
        elif getattr(current, "__wrapped__", None) is entry.ours:
            # torch._dynamo wraps manual_seed when it is imported, and that was during the run.
            setattr(entry.owner, entry.name, disable_dynamo(entry.original))
        if entry.name == "__getitem__" and isinstance(current, types.FunctionType):
            current.__defaults__ = current.__defaults__  # see `_install`
    _before.clear()
    if not _unrecorded:
        _leave_compiled_code_alone()


_lock = threading.Lock()
_running: set[object] = set()  # a token for each context that was entered and not left
_unrecorded: set[object] = set()  # as `_running`, for runs without a recorder
_before: list[Any] = []


@contextmanager
def reporting_to(watcher: Recorder | None) -> Iterator[None]:
    """Report the calling thread's module calls and opaque calls to `watcher`.

    An interrupt may come at any point; everything entered until then is left again.
    """
    outer, token = current_watcher(), object()
    try:
        with _lock:
            first = not _running
            _running.add(token)
            if first:
                _install()
        set_watcher(watcher)
        yield
    finally:
        _local.watcher = outer  # no call, which an interrupt could come before
        with _lock:
            if token in _running:
                _running.discard(token)
                if not _running:
                    _uninstall()


@contextmanager
def running_compiled_code() -> Iterator[None]:
    """Run what torch.compile has compiled as it is, as recorders do, so that a mode sees it."""
    token = object()
    try:
        with _lock:
            _unrecorded.add(token)
            _run_compiled_code_eagerly()
        yield
    finally:
        with _lock:
            _unrecorded.discard(token)
            if not (_running or _unrecorded):
                _leave_compiled_code_alone()
