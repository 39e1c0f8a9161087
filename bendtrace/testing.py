"""Assertions for tests of models.

>>> import torch, bendtrace as bt
>>> reference = bt.trace(torch.relu, torch.ones(3))
>>> bt.testing.assert_same_structure(reference, bt.trace(torch.relu, torch.zeros(3)))
"""

from __future__ import annotations

import math
import os

from bendtrace._trace import load
from bendtrace.log.run_log import RunLog
from bendtrace.show.difference import diff

__all__ = ["assert_same_structure"]
__dir__ = __all__.copy


def assert_same_structure(reference: RunLog | str | os.PathLike[str], run: RunLog) -> None:
    """Raise if a run does other ops, or takes other decisions, than a reference.

    The structure is what `ModelHistory.hash` covers: ops with their arguments, shapes, dtypes,
    modules and parameters, and flow steps with their answers. Values, times, devices and lines may
    differ, so a reference that was saved on one machine holds on others.

    Args:
        reference: the log of an earlier run, or the directory that it was saved to.
        run: the run to test, such as what `bendtrace.trace` returns.

    Raises:
        AssertionError: the structures differ; the message is the report of `bendtrace.diff`.
        LoadError: the directory holds no saved log.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return x * 2 if x.sum() > 0 else -x
        >>> reference = bt.trace(model, torch.ones(3))
        >>> try:
        ...     bt.testing.assert_same_structure(reference, bt.trace(model, -torch.ones(3)))
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        the run has another structure than its reference:
    """
    expected = reference if isinstance(reference, RunLog) else load(reference)
    if expected.hash != run.hash:
        report = diff(expected, run, atol=math.inf)  # about values, it has nothing to say
        raise AssertionError(f"the run has another structure than its reference:\n{report}")
