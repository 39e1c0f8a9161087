"""Commands for developers: benchmarks, the scoreboard, random programs, models of transformers."""
