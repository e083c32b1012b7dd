"""From the claimed job to its outcome."""
