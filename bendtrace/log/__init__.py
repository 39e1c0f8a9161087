"""Node paths: names for every value in a run, as a tree that prints and completes."""
