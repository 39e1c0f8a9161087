"""The command line, `python -m bendtrace`."""
