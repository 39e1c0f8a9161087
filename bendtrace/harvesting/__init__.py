"""Activations of a data set, streamed to files."""
