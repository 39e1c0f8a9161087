"""Patches: values at nodes zeroed, added to, replaced, observed or changed by a function."""
