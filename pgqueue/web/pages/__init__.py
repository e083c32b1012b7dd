"""The pages: each asks functions of pgqueue/admin, and returns plain data for a template or for JSON."""
