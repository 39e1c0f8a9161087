"""What the function mode does not see: each border with models on it."""
