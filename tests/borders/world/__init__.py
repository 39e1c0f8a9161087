"""Programs that keep state where people keep it: outside of the modules that they call."""
