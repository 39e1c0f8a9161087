"""Statistics of a stream of values, in memory that does not grow with it."""
