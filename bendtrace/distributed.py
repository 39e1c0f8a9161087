"""Models on several processes: DDP, FSDP2, DTensors, the model's own collectives.

They are traced, replayed and accept insertions like other models; ranks agree before they
communicate.

>>> import torch, bendtrace as bt
>>> bt.distributed.whole({"loss": torch.ones(2)})
{'loss': tensor([1., 1.])}
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from bendtrace.errors import InputError
from bendtrace.module import BendedModule
from bendtrace.python.internals import pytree
from bendtrace.watch import rank_sync as core
from bendtrace.watch.collectives import group_of, ranks_of_process

__all__ = ["Agreement", "Traffic", "agree", "agreement", "traffic", "whole"]
__dir__ = __all__.copy


# Which calls ranks agree on, and the cost of agreeing.


class Agreement:
    """An agreement that is active until removed: a handle, and a context manager.

    Example:
        >>> import bendtrace as bt
        >>> with bt.distributed.agreement(enabled=False) as setting:
        ...     print(setting)
        <ranks do not agree>
        >>> print(setting)
        <ranks do not agree, removed>
    """

    def __init__(self, text: str, undo: Callable[[], None]) -> None:
        self._text = text
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """End the agreement; further calls have no effect."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self._text}{'' if self._undo is not None else ', removed'}>"


def agree(model: Callable[..., Any], group: Any = None) -> Agreement:
    """Make ranks agree at the end of each call of a model, in any case.

    Calls that reach a collective are agreed on anyway (see `docs/distributed.md`). This function is
    for models that may communicate in ways that bendtrace cannot see: then a rank that takes
    another branch is detected at the end of that very call. All ranks have to call it, and have to
    call the model equally often from then on.

    Args:
        model: a `BendedModule`, a module, or a function.
        group: the process group whose ranks have to agree; None for all ranks.

    Returns:
        A handle, which is also a context manager.

    Raises:
        InputError: no process group has been initialised, this rank is not in the group, or `model`
            or `group` has an unsupported type.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.distributed.agree(bt.BendedModule(torch.nn.Linear(2, 2)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bendtrace.errors.InputError: ranks can agree only after torch.distributed is ...
    """
    inner = model.model if isinstance(model, BendedModule) else model
    if not core.is_attachable(inner):
        raise InputError(
            f"ranks can agree on the calls of a module or a function, not of {type(model)!r}"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "ranks can agree only after torch.distributed is initialised: call "
            "torch.distributed.init_process_group first"
        )
    chosen: Any = dist.group.WORLD if group is None else group
    if group is not None and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not a member of the process group")
    if not isinstance(chosen, dist.ProcessGroup):
        raise InputError(
            f"`group` has to be a process group, not {type(group)!r}; those of a mesh are "
            "`mesh.get_all_groups()`"
        )
    members = group_of(chosen)
    name = type(inner).__name__ if isinstance(inner, nn.Module) else repr(inner)
    text = f"ranks {members.ranks} agree at the end of each call of {name}"
    return Agreement(text, core.ask(inner, members))


def agreement(*, enabled: bool | None = None, timeout: float | None = None) -> Agreement:
    """Configure how ranks agree, in this process, from now on or within a context.

    All ranks have to use the same settings, at the same point.

    Args:
        enabled: whether ranks agree before collectives at all; otherwise they are assumed to do the
            same, as without bendtrace. None keeps the setting.
        timeout: the number of seconds to wait for a missing rank; then all waiting ranks raise.
            None keeps the setting, initially half an hour.

    Returns:
        A handle, which is also a context manager that restores the earlier settings at its end.

    Raises:
        InputError: `timeout` is not a positive number, or `enabled` is not a bool.

    Example:
        >>> import bendtrace as bt
        >>> with bt.distributed.agreement(timeout=60.0) as setting:
        ...     setting
        <ranks agree, and wait for 60 s>
        >>> setting
        <ranks agree, and wait for 60 s, removed>
    """
    if enabled is not None and not isinstance(enabled, bool):
        raise InputError(f"`enabled` has to be a bool, not {enabled!r}")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0
    ):
        raise InputError(f"`timeout` has to be a positive number of seconds, not {timeout!r}")
    settings = core.settings
    before = settings.enabled, settings.timeout
    if enabled is not None:
        settings.enabled = enabled
    if timeout is not None:
        settings.timeout = float(timeout)

    def undo() -> None:
        settings.enabled, settings.timeout = before

    how = f"agree, and wait for {settings.timeout:g} s" if settings.enabled else "do not agree"
    return Agreement(f"ranks {how}", undo)


class Traffic(NamedTuple):
    """The cost of agreeing so far, on this rank.

    Attributes:
        meetings: how often ranks have exchanged what they are about to do.
        messages: requests to the store for that. Collectives are not counted.

    Example:
        >>> import torch, bendtrace as bt
        >>> _ = bt.BendedModule(torch.nn.ReLU())(torch.ones(2))
        >>> bt.distributed.traffic()  # one process has nobody to agree with
        Traffic(meetings=0, messages=0)
    """

    meetings: int
    messages: int


def traffic() -> Traffic:
    """Return the cost of agreeing so far, on this rank.

    Example:
        >>> import bendtrace as bt
        >>> bt.distributed.traffic()
        Traffic(meetings=0, messages=0)
    """
    if not dist.is_available() or not dist.is_initialized():
        return Traffic(0, 0)
    ranks = ranks_of_process()
    return Traffic(sum(ranks.events.values()), ranks.messages)


# Values of a model that is distributed over ranks, assembled.


def whole(value: Any) -> Any:
    """Return a value with each DTensor in it replaced by its full tensor.

    All ranks of the tensors' meshes have to call it, since they send each other their parts. In an
    interjection this is one of the collectives that ranks agree on.

    Args:
        value: a tensor of any shape, or tuples, lists and dicts (and other containers that torch
            knows) that contain tensors. Values that are not DTensors stay as they are.

    Returns:
        The same structure. Gradients flow back to the parts.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.distributed.whole([torch.ones(2), "as it is"])
        [tensor([1., 1.]), 'as it is']
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # nobody has made a DTensor
        return value

    def put_together(item: Any) -> Any:
        return item.full_tensor() if isinstance(item, module.DTensor) else item

    if isinstance(value, torch.Tensor):
        return put_together(value)
    return pytree.tree_map(put_together, value)
