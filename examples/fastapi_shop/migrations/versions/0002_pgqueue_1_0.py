"""pgqueue 1.0"""

from alembic import op

from pgqueue.integrations import alembic

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    alembic.upgrade(op, to=1)


def downgrade() -> None:
    alembic.downgrade(op, to=0)
