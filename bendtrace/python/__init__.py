"""Python's side: source text, syntax trees, bytecode and running frames."""
