"""Speed, of ours and of others: `python -m tools.benchmarks`. Tests never assert on time."""
