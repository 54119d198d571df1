"""Quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("max_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_transfers", sa.BigInteger(), nullable=True),
        sa.Column("max_transfer_bytes", sa.BigInteger(), nullable=True),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_quotas")),
    )


def downgrade() -> None:
    op.drop_table("quotas")
