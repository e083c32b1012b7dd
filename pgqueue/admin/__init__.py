"""What people look at and do by hand: jobs, queues, limits, locks, workers."""
