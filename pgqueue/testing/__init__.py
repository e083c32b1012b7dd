"""For tests of applications: run the jobs that a test has enqueued, look at jobs, set the clock.

    def test_an_order_sends_a_receipt(pgqueue_conn):
        order(pgqueue_conn, 7)
        assert_enqueued(pgqueue_conn, send_receipt, order_id=7)
        drain(pgqueue_conn).check()

Everything happens on the connection that the test gives, in its transaction: after a rollback nothing is left. Only
tests call this, never a worker or an application at work. The fixtures are in `pgqueue.pytest_plugin`.
"""

from pgqueue.testing.clock import Clock
from pgqueue.testing.drain import Drained, adrain, drain
from pgqueue.testing.flows import arun_flow, run_flow
from pgqueue.testing.handlers import arun, run
from pgqueue.testing.wait import (
    aassert_enqueued,
    aassert_not_enqueued,
    aenqueued,
    assert_enqueued,
    assert_not_enqueued,
    enqueued,
)

__all__ = [
    "Clock",
    "Drained",
    "aassert_enqueued",
    "aassert_not_enqueued",
    "adrain",
    "aenqueued",
    "arun",
    "arun_flow",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "enqueued",
    "run",
    "run_flow",
]
