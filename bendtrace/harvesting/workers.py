"""The processes of a harvest: one, or those of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bendtrace.errors import BendtraceError

__all__ = ["Workers"]


class Workers:
    """The processes that harvest together. An error of one becomes an error of all.

    Attributes:
        rank: number of this process.
        world: how many there are.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if several else 0
        self.world: int = dist.get_world_size() if several else 1

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Carry out a step in each process, and return what all of them gave.

        Raises:
            BendtraceError: the step has raised somewhere. Here it is raised as it is.
        """
        if self.world == 1:
            return [step()]
        error: Exception | None = None
        given: Any = None
        try:
            given = step()
        except Exception as raised:
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        all_told: list[Any] = [None] * self.world
        dist.all_gather_object(all_told, (told, given if error is None else None))
        if error is not None:
            raise error
        failed = {rank: told for rank, (told, _) in enumerate(all_told) if told is not None}
        if failed:
            listed = "; ".join(f"process {rank}: {told}" for rank, told in failed.items())
            raise BendtraceError(f"another process of the harvest has failed: {listed}")
        return [given for _, given in all_told]

    def first(self, step: Callable[[], Any]) -> None:
        """Carry out a step in the first process while the others wait.

        Raises:
            BendtraceError: it has raised there.
        """
        self.together(step if self.rank == 0 else _nothing)


def _nothing() -> None:
    return None
