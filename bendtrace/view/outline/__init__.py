"""The known paths of a model, folded into its source: a program, a picture, coverage."""
