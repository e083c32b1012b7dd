"""The service that takes orders. It has an outbox in its own database, and no queue."""
