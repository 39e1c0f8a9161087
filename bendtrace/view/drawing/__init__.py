"""Pictures of a run or a model, as boxes and arrows."""
