"""Speed, of ours and of others: `python -m tests.benchmarks`. Tests never assert on time."""
