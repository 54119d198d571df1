"""Evictions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evictions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("what", sa.JSON(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evictions")),
    )
    with op.batch_alter_table("evictions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_evictions_ended"), ["ended"], unique=False)
        batch_op.create_index(batch_op.f("ix_evictions_state"), ["state"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("evictions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_evictions_state"))
        batch_op.drop_index(batch_op.f("ix_evictions_ended"))
    op.drop_table("evictions")
