"""Activations of a data set, streamed to files.

>>> import tempfile, torch, bendtrace as bt
>>> data = torch.arange(4.0).reshape(2, 2, 1).unbind()
>>> with tempfile.TemporaryDirectory() as directory:
...     _ = bt.harvest(torch.exp, data, where="exp", out=directory, progress=False)
...     bt.harvesting.Harvest.open(directory)
Harvest of 4 samples in 1 shard
  <exp: float32[4, 1]>
"""

from __future__ import annotations

from bendtrace.harvesting.column import Column, Taken
from bendtrace.harvesting.feeding import ActivationBuffer, save_for_sae_lens
from bendtrace.harvesting.harvest import harvest
from bendtrace.harvesting.paths import Condition, Path
from bendtrace.harvesting.reading import Harvest

__all__ = [
    "ActivationBuffer",
    "Column",
    "Condition",
    "Harvest",
    "Path",
    "Taken",
    "harvest",
    "save_for_sae_lens",
]
__dir__ = __all__.copy
