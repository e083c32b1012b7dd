"""How fast is it: pgqueue beside hand-written SQL, measured in the same run on the same server.

    python -m bench                      every scenario, full size (about an hour)
    python -m bench drain-uvloop idle    some of them
    python -m bench --json FILE --resume go on with those that the file does not have
    python -m bench --quick              all of them, tiny: shows that the harness works, its figures mean nothing
    python -m bench peers                beside other job queues: see peers/

How it measures, in the order of reading:
  server.py     a PostgreSQL of its own with real durability; every sample gets a fresh database
  processes.py  whoever is measured is a process of its own; the one that measures only waits
  worker.py     the worker under test: pgqueue's public Worker in a plain process, with the handlers of tasks.py
  client.py     the application's side: enqueues, and runs the floors of floors.py
  track.py      one drain: its start signal, its end, and the CPU both sides used
  samples.py    sides take turns (AB BA AB …); what is compared is the median of the rounds' own ratios
  figures.py    a figure, its goal, the table
The scenarios are drain.py, writing.py, enqueueing.py, latency.py, flat.py, idle.py, claims.py, history.py, reading.py,
load.py, restarting.py, locks.py, limits.py, rates.py and ticks.py; the docstring of each says what is measured, what is
left out, and why the comparison is fair.
"""
