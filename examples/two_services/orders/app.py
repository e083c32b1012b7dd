"""The endpoint of orders."""

import os

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import pgqueue

send_receipt = pgqueue.remote("mailing.send_receipt", queue="mail")  # a task of another service: its name, no code


def order(request: Request) -> Response:
    """Take an order: 201. The order and the staged job are one commit."""
    with psycopg.connect(os.environ["ORDERS_DSN"]) as conn:
        (number,) = conn.execute("SELECT nextval('shop_order_id_seq')").fetchone() or (0,)
        send_receipt.enqueue(pgqueue.Outbox(conn), order=number, item=request.path_params["item"])
        try:
            conn.execute("INSERT INTO shop_order (id, item) VALUES (%s, %s)", [number, request.path_params["item"]])
        except psycopg.errors.CheckViolation:
            conn.rollback()
            return JSONResponse({"detail": "no such item"}, status_code=422)
    return JSONResponse({"order": number}, status_code=201)


app = Starlette(routes=[Route("/orders/{item}", order, methods=["POST"])])
