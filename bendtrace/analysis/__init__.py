"""Analysers: statistics of what comes by at nodes, in memory that does not grow."""
