"""Measurements: each returns a frozen dataclass of numbers with labels, units and where they come from."""
