"""The layer log: every tensor of a run with its properties, and how to look it up."""
