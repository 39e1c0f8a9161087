"""Running a model on real inputs and writing down what happens."""
