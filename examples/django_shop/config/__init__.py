"""The project: its settings and its addresses."""
