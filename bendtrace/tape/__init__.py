"""The records of one run: ops, guards, captured values, traced scalars.

The model receives sizes, `.item()` and other numbers that were read from tensors as **traced
scalars**: instances of subclasses of `torch.SymInt`, `SymFloat` and `SymBool` that carry the real
value and answer `__class__` with `int`, `float` or `bool`. torch's argument parser accepts them
everywhere, and arithmetic on them is recorded (`record/numbers.py`). Whenever Python itself needs
the value - in `if`, `range`, indexing, hashing, formatting - it calls one of their methods, which
adds a `Guard`. Code that is not known to ask them (`plain_numbers.py` has the table, and reads
instructions) receives plain ones, and so do functions of other packages when they begin
(`record/recorder.py`).

Where numbers differ from call to call (`TraceTree` counts them by place), `record/varying.py`
keeps them traced: `python/results.py` puts a traced scalar in place of the plain result of
`int(n)`, and has the functions for which this holds; a loop over `range(n)` becomes one that asks
for its next round.
"""
