"""Random programs: models whose Python does what models do, and calls that take other paths."""

from .program import Call, Program, Unlike, check
from .source import programs

__all__ = ["Call", "Program", "Unlike", "check", "programs"]
