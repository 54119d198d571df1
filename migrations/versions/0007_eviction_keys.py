"""Evictions have idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("evictions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("idempotency_key", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("request_digest", sa.LargeBinary(length=32), nullable=True))
        batch_op.create_unique_constraint(
            batch_op.f("uq_evictions_idempotency_key"), ["idempotency_key"]
        )


def downgrade() -> None:
    with op.batch_alter_table("evictions", schema=None) as batch_op:
        batch_op.drop_constraint(batch_op.f("uq_evictions_idempotency_key"), type_="unique")
        batch_op.drop_column("request_digest")
        batch_op.drop_column("idempotency_key")
