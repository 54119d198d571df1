"""Drains, and transfers that evict nothing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drains",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("incarnation", sa.String(length=128), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("in_force", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("detail", sa.String(length=2000), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drains")),
    )
    with op.batch_alter_table("drains", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_drains_ended"), ["ended"], unique=False)
        batch_op.create_index(batch_op.f("ix_drains_in_force"), ["in_force"], unique=False)
        batch_op.create_index(batch_op.f("ix_drains_node"), ["node"], unique=False)
    # Added without a copy of the table, which transfer_chunks refers to.
    op.add_column(
        "transfers",
        sa.Column("free_only", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    op.drop_column("transfers", "free_only")
    with op.batch_alter_table("drains", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_drains_node"))
        batch_op.drop_index(batch_op.f("ix_drains_in_force"))
        batch_op.drop_index(batch_op.f("ix_drains_ended"))
    op.drop_table("drains")
