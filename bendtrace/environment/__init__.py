"""What a run can read before it begins, and whether it is still the same."""
