"""One registry of programs; the files of `tests/modes/` run each of them in one mode."""
