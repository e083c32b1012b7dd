"""purchases"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "purchase",
        sa.Column("id", sa.BigInteger, primary_key=True),
        sa.Column("item", sa.Text, nullable=False),
        sa.Column("charged", sa.Boolean, nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    op.drop_table("purchase")
