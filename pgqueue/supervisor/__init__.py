"""N worker processes, kept at N whatever happens: the command's `--processes`.

`fleet` decides, without I/O; `process` is one worker process seen from here, `child` its end of the pipe there;
`orders` is the one connection, `signals` and `watching` what else tells us to do something; `keeper` lets them meet.
Called by `pgqueue work`; imports no code of the application, so that each process it starts has the newest.
"""
