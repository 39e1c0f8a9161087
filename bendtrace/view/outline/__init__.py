"""What is known of a model's paths, as its source has it: a program, a picture, coverage."""
