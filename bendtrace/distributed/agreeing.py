"""Which calls ranks agree upon, and what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import nn

from bendtrace.errors import InputError
from bendtrace.module import BendedModule
from bendtrace.recording import rank_sync as core
from bendtrace.torch_rules.collectives import group_of

__all__ = ["Agreement", "Traffic", "agree", "agreement", "traffic"]


class Agreement:
    """What was agreed, until it is taken back: a handle, and a context manager.

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
        """Take it back; a second time does nothing."""
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
    """Have ranks agree at the end of each call of a model, whatever is known of the model.

    Calls that come to a collective are agreed upon without that (see `docs/distributed.md`). This
    is for models of which nothing tells that they may communicate: then a rank that takes another
    branch is noticed at the end of that very call. All ranks have to ask for it, and have to call
    the model equally often from then on.

    Args:
        model: a `BendedModule`, a module, or a function.
        group: the process group that has to agree; None for all ranks.

    Returns:
        A handle, which is also a context manager.

    Raises:
        InputError: no process group has been initialised, this rank is not in the group, or
            `model` or `group` is something else.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.distributed.agree(bt.BendedModule(torch.nn.Linear(2, 2)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bendtrace.errors.InputError: ranks can agree only once torch.distributed is initialised: ...
    """
    inner = model.model if isinstance(model, BendedModule) else model
    if not core.can_be_known(inner):
        raise InputError(
            f"ranks can agree upon the calls of a module or a function, not of {type(model)!r}"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "ranks can agree only once torch.distributed is initialised: call "
            "torch.distributed.init_process_group first"
        )
    chosen: Any = dist.group.WORLD if group is None else group
    if group is not None and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not a member of the process group that is to agree")
    if not isinstance(chosen, dist.ProcessGroup):
        raise InputError(
            f"`group` has to be a process group, not {type(group)!r}; those of a mesh are "
            "`mesh.get_all_groups()`"
        )
    known = group_of(chosen)
    name = type(inner).__name__ if isinstance(inner, nn.Module) else repr(inner)
    text = f"ranks {known.ranks} agree at the end of each call of {name}"
    return Agreement(text, core.ask(inner, known))


def agreement(*, enabled: bool | None = None, timeout: float | None = None) -> Agreement:
    """Set how ranks agree, in this process, from now on or within a context.

    All ranks have to set the same, at the same point.

    Args:
        enabled: whether ranks agree before collectives at all; otherwise they rely on doing the
            same, as without bendtrace. None leaves it as it is.
        timeout: after how many seconds a rank that did not come is given up, which is an error
            on all those that wait for it. None leaves it as it is: half an hour.

    Returns:
        A handle, which is also a context manager: what was set before comes back at its end.

    Raises:
        InputError: `timeout` is not a positive number, or `enabled` is no bool.

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
    settings = core.settings()
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
    """What agreeing has taken so far, on this rank.

    Attributes:
        meetings: how often ranks have told each other what they are about to do.
        messages: requests to the store for that. Collectives are none among them.

    Example:
        >>> import torch, bendtrace as bt
        >>> _ = bt.BendedModule(torch.nn.ReLU())(torch.ones(2))
        >>> bt.distributed.traffic()  # one process has nobody to agree with
        Traffic(meetings=0, messages=0)
    """

    meetings: int
    messages: int


def traffic() -> Traffic:
    """Return what agreeing has taken so far, on this rank.

    Example:
        >>> import bendtrace as bt
        >>> bt.distributed.traffic()
        Traffic(meetings=0, messages=0)
    """
    if not dist.is_available() or not dist.is_initialized():
        return Traffic(0, 0)
    ranks = core.ranks_of_process()
    return Traffic(sum(ranks.events.values()), ranks.messages)
