"""Models and helpers of the tests of compiled paths."""
