"""Every architecture of an installed `transformers`, made small, with inputs for it."""
