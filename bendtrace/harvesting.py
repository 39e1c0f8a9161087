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

from bendtrace.research.filling import Condition, Path
from bendtrace.research.harvest import harvest
from bendtrace.research.reading import ActivationBuffer, Column, Harvest, Taken, save_for_sae_lens

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
