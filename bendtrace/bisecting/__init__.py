"""Finding the op that makes two runs differ."""
