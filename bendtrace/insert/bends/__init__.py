"""Bending: callbacks that change activations and weights, selected by name."""
