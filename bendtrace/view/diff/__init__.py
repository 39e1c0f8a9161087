"""Where two runs diverge, and how they differ."""
