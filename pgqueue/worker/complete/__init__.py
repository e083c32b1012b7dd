"""From the outcome to the row."""
