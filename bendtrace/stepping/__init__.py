"""A run to experiment in: go to any op, question or line, look, change something, and go on."""
