"""Programs of our own, after what issues of others describe: results that were wrong, silently."""

from __future__ import annotations

from tests.registry.issues import aliasing, captures, modes, python, stale
from tests.registry.issues._issue import REGISTRY, Issue

ISSUES: tuple[Issue, ...] = tuple(REGISTRY.values())

__all__ = ["ISSUES", "Issue", "aliasing", "captures", "modes", "python", "stale"]
