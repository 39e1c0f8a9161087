"""The work of DDP and FSDP around the forward of a module, as ops of a run.

Both leave the forward itself unchanged. What they do before and after it - synchronise buffers,
gather and release parameters, prepare for the backward pass - each replay does as well, as an op
that receives the module and its input or output tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel

from bendtrace.source.internals import internal, pytree
from bendtrace.tape.watchers import current_watcher

__all__ = [
    "JOINT",
    "entries_of_ddp",
    "gathered_by",
    "gathered_names",
    "has_joint_hooks",
    "hidden_of",
    "is_joint_hook",
    "tensors_in",
    "with_joint_hooks",
]

# DDP

# Without them, runs are reported not to be repeatable.
_before: Any = internal("torch.nn.parallel.DistributedDataParallel._pre_forward", None)
_after: Any = internal("torch.nn.parallel.DistributedDataParallel._post_forward", None)
_forward: Any = DistributedDataParallel.forward
# All else that a DDP module has is read only in what is one op here.
_OF_COMPOSABLE = "__composable_api_"  # what `fully_shard` and `replicate` keep in a module
_READ_BY_FORWARD = frozenset({"training", "_delay_all_reduce_all_params", "_use_python_reducer"})


def hidden_of(module: nn.Module) -> frozenset[str]:
    """Return the attributes of a module that its forward does not depend on."""
    if isinstance(module, DistributedDataParallel):
        return frozenset(vars(module)) - _READ_BY_FORWARD
    if "torch.distributed._composable.contract" not in sys.modules:
        return frozenset()
    return frozenset(name for name in vars(module) if name.startswith(_OF_COMPOSABLE))


def entries_of_ddp() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements during recording: owner, attribute and replacement."""
    if _before is None or _after is None:
        yield DistributedDataParallel, "forward", _reported_forward
        return
    yield DistributedDataParallel, "_pre_forward", _before_ddp
    yield DistributedDataParallel, "_post_forward", _after_ddp


def _reported_forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    watcher = current_watcher()
    if watcher is not None:
        watcher.unseen("DistributedDataParallel")
    return _forward(module, *inputs, **kwargs)


def prepare_forward(module: Any, *tensors: Tensor) -> Any:
    """Do DDP's work before the forward; return the tensors on the right device."""
    args, _ = _before(module, *tensors)
    return tuple(args) if tensors else None


def prepare_backward(module: Any, *tensors: Tensor) -> Any:
    """Do DDP's work after the forward; return the output tensors."""
    out = _after(module, tuple(tensors))
    return tuple(out) if tensors else None


def _before_ddp(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Replaces `DistributedDataParallel._pre_forward`."""
    watcher = current_watcher()
    if watcher is None:
        return _before(module, *inputs, **kwargs)
    if not module.device_ids and module.mixed_precision is None:
        watcher.opaque_call(prepare_forward, (module,), {})
        return inputs, kwargs
    tensors, rebuilt = _apart((inputs, kwargs))
    return rebuilt(watcher.opaque_call(prepare_forward, (module, *tensors), {}))


def _after_ddp(module: Any, output: Any) -> Any:
    """Replaces `DistributedDataParallel._post_forward`."""
    watcher = current_watcher()
    if watcher is None:
        return _after(module, output)
    if not (module.find_unused_parameters or module.static_graph):
        watcher.opaque_call(prepare_backward, (module,), {})
        return output
    tensors, rebuilt = _apart(output)
    return rebuilt(watcher.opaque_call(prepare_backward, (module, *tensors), {}))


# FSDP2


def _states() -> Any:
    return sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")


def _hook_of_fsdp(hooks: Mapping[int, Any], name: str) -> tuple[int, Any] | None:
    """Return the hook of FSDP's in a table, with its number."""
    states = _states()
    if states is None:
        return None
    for number, hook in hooks.items():
        inner = hook.hook if isinstance(hook, _JointHook) else hook
        method = inner
        while not hasattr(method, "__self__") and hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        owner = getattr(method, "__self__", None)
        if isinstance(owner, states.FSDPState) and getattr(method, "__name__", "") == name:
            return number, inner
    return None


_BEFORE, _AFTER = "_pre_forward", "_post_forward"


def is_joint_hook(hook: Any) -> bool:
    """Return whether a forward hook on a module is FSDP's."""
    return any(_hook_of_fsdp({0: hook}, name) is not None for name in (_BEFORE, _AFTER))


def gathered_names(module: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yield the locations of each parameter that FSDP gathers when a module is called.

    These are modules and names; between calls they hold shards.
    """
    for parameter in gathered_by(module):
        info = parameter._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        yield [(info.module, info.param_name), *shared]


def gathered_by(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP's record of each parameter that it gathers when a module is called."""
    states = _states()
    if states is None or type(module).__hash__ is None:  # FSDP finds modules by their hash
        return
    for group in _groups_of(states._get_module_fsdp_state(module)):
        yield from group.fsdp_params


def _groups_of(state: Any) -> list[Any]:
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.10 there was one at most
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def gather_parameters(module: nn.Module, *tensors: Tensor) -> Any:
    """Do FSDP's work before the forward; return the tensors for it, and the parameters."""
    found = _hook_of_fsdp(module._forward_pre_hooks, _BEFORE)
    assert found is not None
    args, _ = found[1](module, tensors, {})
    return (*args, *(places[0][0]._parameters[places[0][1]] for places in gathered_names(module)))


def release_parameters(module: nn.Module, *tensors: Tensor) -> Any:
    """Do FSDP's work after the forward; return the output tensors."""
    found = _hook_of_fsdp(module._forward_hooks, _AFTER)
    assert found is not None
    return tuple(found[1](module, (), tensors))


class _JointHook:
    """Stands in for a hook of FSDP's while a module is called in a run."""

    def __init__(self, hook: Callable[..., Any], shards: list[_Shard]) -> None:
        self.hook = hook
        self.shards = shards


# A shard, and where it was found.
_Shard = tuple[dict[str, Any], str, Any]


class _Before(_JointHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return self.hook(module, args, kwargs)
        tensors, rebuilt = _apart((args, kwargs))
        given = watcher.opaque_call(gather_parameters, (module, *tensors), {})
        for places, parameter in zip(gathered_names(module), given[len(tensors) :], strict=True):
            for holder, name in places:
                held = holder._parameters
                # A resumed run reaches what was done before: FSDP has the shards back in place.
                if held[name] is not parameter:
                    self.shards.append((held, name, held[name]))
                    held[name] = parameter
        return rebuilt(given[: len(tensors)])


class _After(_JointHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        watcher = current_watcher()
        if watcher is None:
            return self.hook(module, args, output)
        tensors, rebuilt = _apart(output)
        given = watcher.opaque_call(release_parameters, (module, *tensors), {})
        _put_back(self.shards)
        return rebuilt(given)


def _put_back(shards: list[_Shard]) -> None:
    for held, name, shard in shards:
        held[name] = shard
    shards.clear()


def has_joint_hooks(module: nn.Module) -> bool:
    """Return whether FSDP may act around the forward of a module."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    return bool(hooked) and _states() is not None


@contextmanager
def with_joint_hooks(module: nn.Module) -> Iterator[None]:
    """Record FSDP's work around the forward of a module, within the context."""
    exchanged: list[tuple[Any, int, Any]] = []
    shards: list[_Shard] = []
    for hooks, name, kind in (
        (module._forward_pre_hooks, _BEFORE, _Before),
        (module._forward_hooks, _AFTER, _After),
    ):
        found = _hook_of_fsdp(hooks, name)
        if found is not None and not isinstance(hooks[found[0]], _JointHook):
            exchanged.append((hooks, *found))
            hooks[found[0]] = kind(found[1], shards)
    try:
        yield
    finally:
        _put_back(shards)
        for hooks, number, hook in exchanged:
            if number in hooks:
                hooks[number] = hook


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in the kinds of containers that models return."""
    return _apart(value)[0]


# Whatever of torch.distributed does something with all tensors of a value uses it.
_apply_to_tensors: Any = internal(
    "torch.distributed.utils._apply_to_tensors",
    lambda function, value: pytree.tree_map_only(Tensor, function, value),
)


def _apart(value: Any) -> tuple[list[Tensor], Callable[[Any], Any]]:
    """Return the tensors in a value, and what puts others in their places.

    In the kinds of containers that FSDP and DDP look for tensors in.
    """
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _apply_to_tensors(taken, value)

    def rebuilt(others: Any) -> Any:
        given = tuple(others or ())
        if all(new is old for new, old in zip(given, tensors, strict=True)):
            return value
        rest = iter(given)
        return _apply_to_tensors(lambda _: next(rest), value)

    return tensors, rebuilt


# Ops that read of a module what only they and the backward pass change.
JOINT: frozenset[Any] = frozenset(
    {prepare_forward, prepare_backward, gather_parameters, release_parameters}
)
