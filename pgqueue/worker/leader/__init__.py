"""The duties of the worker that leads: promotion, cron, pruning, jobs of unknown tasks."""
