"""Namespaces, nodes, stores, placements and transfers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "namespaces",
        sa.Column("digest", sa.LargeBinary(length=16), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_namespaces")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("incarnation", sa.String(length=128), nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("peer_address", sa.String(length=255), nullable=True),
        sa.Column("transports", sa.JSON(), nullable=False),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gone", sa.Boolean(), nullable=False),
        sa.Column("registered", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "stores",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("tier", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stores")),
    )
    op.create_table(
        "locations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("store_id", sa.String(length=128), nullable=True),
        sa.Column("attached", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_locations_node_id")),
        sa.ForeignKeyConstraint(["store_id"], ["stores.id"], name=op.f("fk_locations_store_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_locations")),
        sa.UniqueConstraint("node_id", "store_id", name=op.f("uq_locations_node_id_store_id")),
    )
    op.create_table(
        "transfers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("hold", sa.Double(), nullable=False),
        sa.Column("byte_budget", sa.BigInteger(), nullable=True),
        sa.Column("moved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.String(length=2000), nullable=False),
        sa.Column("hints", sa.JSON(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("request_digest", sa.LargeBinary(length=32), nullable=False),
        sa.ForeignKeyConstraint(["target"], ["nodes.id"], name=op.f("fk_transfers_target")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transfers")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_transfers_idempotency_key")),
    )
    with op.batch_alter_table("transfers", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_transfers_ended"), ["ended"], unique=False)
        batch_op.create_index(batch_op.f("ix_transfers_state"), ["state"], unique=False)

    op.create_table(
        "placements",
        sa.Column("location_id", sa.Integer(), nullable=False),
        sa.Column("namespace", sa.LargeBinary(length=16), nullable=False),
        sa.Column("chunk", sa.LargeBinary(length=36), nullable=False),
        sa.ForeignKeyConstraint(
            ["location_id"], ["locations.id"], name=op.f("fk_placements_location_id")
        ),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.digest"], name=op.f("fk_placements_namespace")
        ),
        sa.PrimaryKeyConstraint("location_id", "namespace", "chunk", name=op.f("pk_placements")),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("placements", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_placements_namespace_chunk"), ["namespace", "chunk"], unique=False
        )

    op.create_table(
        "transfer_chunks",
        sa.Column("transfer_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("key", sa.LargeBinary(length=52), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=True),
        sa.ForeignKeyConstraint(
            ["transfer_id"],
            ["transfers.id"],
            name=op.f("fk_transfer_chunks_transfer_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("transfer_id", "position", name=op.f("pk_transfer_chunks")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("transfer_chunks")
    with op.batch_alter_table("placements", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_placements_namespace_chunk"))

    op.drop_table("placements")
    with op.batch_alter_table("transfers", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_transfers_state"))
        batch_op.drop_index(batch_op.f("ix_transfers_ended"))

    op.drop_table("transfers")
    op.drop_table("locations")
    op.drop_table("stores")
    op.drop_table("nodes")
    op.drop_table("namespaces")
