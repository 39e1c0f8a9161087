"""Python's side: source text, syntax trees, bytecode, running frames; helpers for all.

Private names of torch are read by one function, `internal` in `internals.py`. If one is missing,
it gives an equivalent, or switches off what needs it. `tests/test_internals.py` finds modules
that read such names in another way, and runs models without each of them.

At the first trace of a process, `record/self_test.py` checks that Python and torch behave as all of
this assumes: it reads snippets, and records the tiny models of `record/self_test_models.py`.
Features that fail the check are switched off in `internals.py`.
"""
