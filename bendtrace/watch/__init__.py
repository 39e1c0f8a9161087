"""The peculiarities of torch: what escapes a function mode, writes, draws, communicates."""
