"""Bending: callbacks that change activations and weights, chosen by the names of these."""
