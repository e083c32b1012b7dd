"""What speaks to a peer: one module a peer, that uses its public API and nothing else.

A module here runs in the peer's own environment: it imports the peer, `handler.py`, and nothing of pgqueue's bench.
It has a class `Peer` with these methods, each plain or async:

    setup()               install the schema, declare the queue
    open(), close()       the application's side: begin and end
    one(task, job)        enqueue one job, committed on return
    many(task, jobs)      enqueue these with the peer's best call for many
    work()                run one worker process until SIGTERM

There are three tasks. `noop(number)` does nothing. `application(number, text)` has 200 bytes of arguments and waits
1 ms. Both call `handler.ran(number)` first. `elsewhere(number)` goes to a queue that `work` does not serve.
"""
