"""A shop on Flask, whose jobs are in its own database."""
