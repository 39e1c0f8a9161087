"""Versions that nobody has tried are told of, once."""

from __future__ import annotations

import warnings

import pytest

import bendtrace as bt
from bendtrace.recording.tried import PYTHON, TORCH, warn_if_untried


def told(python: tuple[int, int], version: str) -> list[str]:
    """Return what is said of versions."""
    warn_if_untried.cache_clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_if_untried(python, version)
    assert all(warning.category is bt.errors.UntriedVersionWarning for warning in given)
    return [str(warning.message).partition(":")[0] for warning in given]


@pytest.mark.parametrize("python", PYTHON)
@pytest.mark.parametrize("torch", TORCH)
def test_nothing_is_said_of_what_was_tried(python: tuple[int, int], torch: tuple[int, int]) -> None:
    for rest in (".0", ".1+cpu", ".0a0+git1234", ".0.dev20260101"):
        assert told(python, ".".join(map(str, torch)) + rest) == []


def test_a_newer_one_is_named_once() -> None:
    after = (TORCH[1][0], TORCH[1][1] + 1)
    text = ".".join(map(str, after))
    said = f"bendtrace has not been tried with torch {text}, but with "
    assert [one.startswith(said) for one in told(PYTHON[0], f"{text}.0+cu130")] == [True]
    assert [one.startswith(said) for one in told(PYTHON[0], f"{text}.0.dev20260101")] == [True]


def test_a_newer_python_and_a_newer_torch_are_two_warnings() -> None:
    assert len(told((PYTHON[1][0], PYTHON[1][1] + 1), "99.0.0")) == 2
