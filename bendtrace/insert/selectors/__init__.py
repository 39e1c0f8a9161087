"""Node selectors: values that select nodes."""
