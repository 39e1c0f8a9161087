"""How calls were served, and how others would be."""

from __future__ import annotations

from dataclasses import dataclass

from bendtrace._trace import Trace
from bendtrace.replay.explain import Mismatch

__all__ = ["Explanation", "Stats"]


@dataclass
class Stats:
    """How the calls of a `BendedModule` were served.

    Attributes:
        traces: paths recorded.
        replays: calls served from recorded paths alone.
        retraces: calls that led down a path not recorded before, after the first trace.
        resumes: those of them that took over what a replay had computed already.
        live: calls for which the model's own Python ran because no guard could watch it.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
        >>> for value in (1.0, 2.0, -1.0, -2.0):
        ...     _ = bended(torch.tensor([value]))
        >>> bended.stats
        Stats(traces=2, replays=2, retraces=1, resumes=1, live=0)
    """

    traces: int = 0
    replays: int = 0
    retraces: int = 0
    resumes: int = 0
    live: int = 0


@dataclass(frozen=True)
class Explanation:
    """Which traces could serve some inputs, judging by the input guards alone.

    Attributes:
        serving: traces whose input guards all hold.
        nearest: if there are none: what fails in the trace that comes nearest.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.mean(0) if x.shape[0] > 2 else x.sum(0))
        >>> _ = bended(torch.ones(4, 2))
        >>> bended.explain(torch.ones(3, 2)).serving
        (<Trace of <lambda>: 5 ops, 2 flow steps>,)
        >>> print(bended.explain(torch.ones(2, 2)))  # doctest: +ELLIPSIS
        would be traced anew: conditional expression `x.shape[0] > 2` at ...:1 was True when traced
        and is False now
    """

    serving: tuple[Trace, ...]
    nearest: Mismatch | None

    def __str__(self) -> str:
        if self.serving:
            return "could be served by " + ", ".join(map(repr, self.serving))
        if self.nearest is None:
            return "nothing has been traced for these arguments yet"
        return f"would be traced anew: {self.nearest}"
