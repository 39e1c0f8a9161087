"""Activations of a data set, streamed to files.

Example:
    >>> from bendtrace.harvesting import Harvest
    >>> Harvest.open  # doctest: +ELLIPSIS
    <bound method Harvest.open of <class '...Harvest'>>
"""

from __future__ import annotations

from bendtrace.errors import HarvestError
from bendtrace.harvesting.column import Column
from bendtrace.harvesting.harvest import harvest
from bendtrace.harvesting.paths import Condition, Path
from bendtrace.harvesting.reading import Harvest
from bendtrace.harvesting.taken import Taken

__all__ = ["Column", "Condition", "Harvest", "HarvestError", "Path", "Taken", "harvest"]
