"""Interjections: user code at the nodes of a model, on every path that its runs can take."""
