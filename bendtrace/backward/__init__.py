"""Recording the backward pass of a run."""
