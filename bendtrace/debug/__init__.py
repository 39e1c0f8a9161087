"""Stepped runs: go to any op, question or line, look, change values, and continue."""
