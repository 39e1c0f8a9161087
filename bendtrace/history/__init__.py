"""The layer log: every tensor of a run with what is known of it, and how to find it."""
