"""Operations on all jobs that fit a filter: cancel, retry, discard and reschedule them in steps."""
