"""Hooks on modules, kept in one place: registered, activated and removed by name or by kind."""
