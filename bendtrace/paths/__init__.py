"""Node paths: names for everything a run computed, as a tree that prints and completes."""
