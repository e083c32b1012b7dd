"""What an application declares and calls: tasks, enqueue, schedules, results."""
