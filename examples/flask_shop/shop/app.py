"""The application: a pool of connections, and the endpoints."""

import atexit
import os
from typing import Any

import click
import psycopg
from flask import Flask, current_app, jsonify, url_for
from flask.typing import ResponseReturnValue
from psycopg_pool import ConnectionPool

import pgqueue
from shop.tasks import charge

TABLE = """
CREATE TABLE IF NOT EXISTS shop_order (
    id bigserial PRIMARY KEY, item text NOT NULL CHECK (length(item) < 40), charged boolean NOT NULL DEFAULT false
)
"""


def create_app(dsn: str | None = None) -> Flask:
    """Make the application on this database, else on that of SHOP_DSN."""
    app = Flask("shop")
    app.extensions["pool"] = ConnectionPool(dsn or os.environ["SHOP_DSN"], min_size=1, max_size=10, open=True)
    atexit.register(app.extensions["pool"].close)  # else its threads may delay the end of the program by 20 seconds
    app.add_url_rule("/orders/<item>", view_func=order, methods=["POST"])
    app.add_url_rule("/jobs/<int:id>", view_func=job_status)
    app.register_error_handler(pgqueue.JobNotFound, no_such_job)
    app.register_error_handler(psycopg.errors.CheckViolation, no_such_item)
    app.cli.command("tables")(tables)
    return app


def pool() -> Any:
    """The pool of the application that answers."""
    return current_app.extensions["pool"]


def order(item: str) -> ResponseReturnValue:
    """Order something: 202, and where to look for its job. The block is one transaction."""
    with pool().connection() as conn:
        (number,) = conn.execute("SELECT nextval('shop_order_id_seq')").fetchone()
        job = charge.enqueue(conn, number)
        conn.execute("INSERT INTO shop_order (id, item) VALUES (%s, %s)", [number, item])
    return "", 202, {"Location": url_for("job_status", id=job.id)}


def job_status(id: int) -> ResponseReturnValue:
    """Where the job stands: what a customer may see of it."""
    with pool().connection() as conn:
        job = pgqueue.get(conn, id)
    return jsonify(id=job.id, state=job.state, result=job.result)


def no_such_job(error: Exception) -> ResponseReturnValue:
    """A job that is unknown is 404 everywhere."""
    return jsonify(detail="no such job"), 404


def no_such_item(error: Exception) -> ResponseReturnValue:
    """What the table refuses: neither the order nor its job is there."""
    return jsonify(detail="no such item"), 422


def tables() -> None:
    """Make the table of the shop."""
    with pool().connection() as conn:
        conn.execute(TABLE)
    click.echo("the table is there")
