"""Recorded paths as compiled graphs that are run speculatively."""
