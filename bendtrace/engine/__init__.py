"""Running a trace instead of the model: generated code, guards, and the tree of known paths."""
