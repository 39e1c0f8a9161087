"""Pictures: what a run or a model did, as boxes and arrows."""
