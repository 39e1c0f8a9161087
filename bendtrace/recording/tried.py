"""The versions of Python and torch that the tests were run with."""

from __future__ import annotations

import functools
import sys
import warnings

import torch

from bendtrace.errors import UntriedVersionWarning

__all__ = ["PYTHON", "TORCH", "warn_if_untried"]

PYTHON = (3, 11), (3, 13)
TORCH = (2, 13), (2, 14)


@functools.cache
def warn_if_untried(
    python: tuple[int, int] = sys.version_info[:2], version: str = str(torch.__version__)
) -> None:
    """Warn, once, of versions that are newer than any that was tried.

    Older ones are refused when the package is installed.

    Args:
        python: the version of Python, major and minor.
        version: the version of torch.
    """
    major, minor = version.split(".")[:2]
    for name, found, (first, last) in (
        ("Python", python, PYTHON),
        ("torch", (int(major), int(minor)), TORCH),
    ):
        if found > last:
            warnings.warn(
                UntriedVersionWarning(
                    f"bendtrace has not been tried with {name} {_text(found)}, but with "
                    f"{_text(first)} to {_text(last)}: what it leans on may have changed without a "
                    "word, so compare with the model itself, or run bendtrace's tests, before you "
                    "rely on what comes out"
                ),
                stacklevel=2,
            )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
