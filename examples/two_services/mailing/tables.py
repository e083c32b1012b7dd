"""The table of mailing: `python -m mailing.tables` makes it."""

import os

import psycopg

TABLE = "CREATE TABLE IF NOT EXISTS receipt (shop_order bigint PRIMARY KEY, text text NOT NULL)"

if __name__ == "__main__":
    with psycopg.connect(os.environ["MAILING_DSN"]) as conn:
        conn.execute(TABLE)
