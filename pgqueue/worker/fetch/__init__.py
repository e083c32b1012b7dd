"""From the row to the worker: claims, and what wakes them."""
