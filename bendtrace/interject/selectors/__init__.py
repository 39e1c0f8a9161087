"""Node selectors: values that say which nodes are meant."""
