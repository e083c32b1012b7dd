"""What may hold a job up: locks, limits and rates."""
