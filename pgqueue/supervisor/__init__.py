"""N worker processes, kept at N whatever happens: the command's `--processes`.

`fleet` decides, without I/O; `process` is one worker process seen from here, `worker_end` its end of the pipe there;
`orders` is the one connection, `signals` and `reloader` what else tells us to do something; `supervisor` lets them
meet. Called by `pgqueue work`; imports no code of the application, so that each process it starts has the newest.
"""
