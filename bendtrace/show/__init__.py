"""Views for people: pictures, the viewer, the tree of a model, differences of runs."""
