"""What is peculiar to torch: what escapes a function mode, writes, draws, communicates."""
