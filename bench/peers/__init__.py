"""How fast is it beside other job queues: each peer from its own package, in turn, on one PostgreSQL.

    python -m bench peers --install              put the peers into a folder, at the versions of peers.toml
    python -m bench peers                        every scenario, three rounds, in an hour
    python -m bench peers --minutes 30           smaller samples, then fewer
    python -m bench peers --only pgqueue,pg-boss --scenarios one,bulk
    python -m bench peers --quick                tiny: shows that each peer runs, its figures mean nothing
    python -m bench peers --resume               go on with a run that was interrupted, or whose minutes were over
    python -m bench peers --minutes 20 --resume  the same again and again: the hour in pieces
    python -m bench report FILE --to FOLDER      the same as Markdown and charts
    python -m bench report FILE --write          into bench/results, README.md and docs/compare.md

In the order of reading:
  peers.toml    every peer: versions, settings, what counts as done, history, durability, more and less
  peer.py       a peer as read from that file
  install.py    the folder with a virtual environment or a node_modules for each peer
  adapters/     what speaks to a peer, in its own language, and only through its public API
  child.py      a process of a peer: it enqueues, or it works
  broker.py     what a stage asks of a server that keeps jobs in place of PostgreSQL: redis.py, rabbitmq.py with amqp.py
  stage.py      one peer on a fresh database, with its processes
  size.py       how much of everything a sample takes
  drain.py      the drain that several scenarios share
  starts.py     from commit to start, at rest and beside other jobs
  curves.py     what depth and an old snapshot do
  scenarios.py  all that is measured, and how
  plan.py       which samples a run takes, in which order, how large they are, and when one is given up
  paths.py      no path of this machine gets into a record
  record.py     every sample of a run, written down as soon as it is taken
  bars.py       what pgqueue must reach beside the peers
  chart.py      a scenario as SVG
  report.py     the record as Markdown
  quotes.py     what README.md and docs/compare.md quote of the last whole run
  command.py    the command
"""
