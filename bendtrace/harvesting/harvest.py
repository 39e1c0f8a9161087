"""Stream activations of a data set to files."""

from typing import Any

__all__ = ["harvest"]


def harvest(model: Any, loader: Any) -> None:
    """Not there yet."""
    raise NotImplementedError
