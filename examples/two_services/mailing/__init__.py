"""The service that sends mails. The queue is in its database."""
