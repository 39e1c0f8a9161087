"""What people look at: pictures, the viewer, the tree of a model, differences of runs."""
