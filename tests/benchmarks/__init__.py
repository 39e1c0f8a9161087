"""Speed, as ratios to eager in one process. Run as scripts; tests never assert on time."""
