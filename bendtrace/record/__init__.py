"""Running a model on real inputs, and recording what happens."""
