"""One command for a machine with a GPU: `python -m tests.cuda`; docs/cuda.md has what it found."""
