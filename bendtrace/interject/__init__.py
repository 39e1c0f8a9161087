"""Cutting in: user code at the nodes of a model, in every way its runs can take."""
