"""Research workflows: patching, tracing causes, ablation, steering, lenses."""
