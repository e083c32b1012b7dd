"""A checker of links whose worker is a part of its own event loop."""
