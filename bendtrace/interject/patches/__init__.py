"""Patches: values at nodes zeroed, added to, replaced, looked at or changed by a function."""
