"""Tests of bendtrace."""
