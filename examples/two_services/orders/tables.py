"""The table of orders: `python -m orders.tables` makes it."""

import os

import psycopg

TABLE = "CREATE TABLE IF NOT EXISTS shop_order (id bigserial PRIMARY KEY, item text NOT NULL CHECK (length(item) < 40))"

if __name__ == "__main__":
    with psycopg.connect(os.environ["ORDERS_DSN"]) as conn:
        conn.execute(TABLE)
