"""The records of one run, and the values that they refer to."""
