"""Captures the values that a run can read before it begins, and compares them later."""
