"""What a handler may write: transactional tasks and the connections of handlers."""
