"""N worker processes, started again when one ends: `pgqueue work --processes`.

- `fleet` decides which processes to start and end, without I/O.
- `process` is one worker process in the supervisor, `worker_end` the other end of its pipe, in the worker.
- `orders` has the connection to the database, `reloader` watches files.
- `supervisor` connects them, and handles signals.

Called by `pgqueue work`. The supervisor imports no code of the application: each process it starts has the newest code.
"""
