"""Chunks with numbers, the change log, hot prefixes, and views for people.

Placements are soft state and are not converted: every node is made to look as if its reports had
been lost, so it sends a snapshot.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_HEX = {"sqlite": "lower(hex({0}))", "postgresql": "encode({0}, 'hex')"}
_FIELD = {
    "sqlite": "json_extract(CAST({0} AS TEXT), '$.{1}')",
    "postgresql": "(convert_from({0}, 'UTF8')::json ->> '{1}')",
}
_GROUP = {
    # The number of a group is four bytes, of which people seldom need more than one.
    "sqlite": "lower(hex(substr({0}, 1, 4)))",
    "postgresql": "encode(substr({0}, 1, 4), 'hex')",
}

_BY_NODE = """
CREATE VIEW placements_by_node AS
SELECT l.node_id AS node, coalesce(l.store_id, 'host') AS location,
       coalesce(s.tier, 'host') AS tier, l.attached AS attached, n.gone AS gone,
       count(p.chunk_id) AS chunks
FROM locations l
JOIN nodes n ON n.id = l.node_id
LEFT JOIN stores s ON s.id = l.store_id
LEFT JOIN placements p ON p.location_id = l.id
GROUP BY l.node_id, l.store_id, s.tier, l.attached, n.gone
"""

_BY_NAMESPACE = """
CREATE VIEW placements_by_namespace AS
SELECT {digest} AS namespace, {model} AS model, {revision} AS revision, {tenant} AS tenant,
       held.chunks AS chunks, held.placements AS placements, held.nodes AS nodes
FROM namespaces n
JOIN (
    SELECT c.namespace AS namespace, count(DISTINCT c.id) AS chunks, count(*) AS placements,
           count(DISTINCT l.node_id) AS nodes
    FROM placements p
    JOIN chunks c ON c.id = p.chunk_id
    JOIN locations l ON l.id = p.location_id
    GROUP BY c.namespace
) held ON held.namespace = n.digest
"""

_HOTTEST = """
CREATE VIEW hottest_prefixes AS
SELECT {namespace} AS namespace, {model} AS model, {group} AS group_hex, {hash} AS hash,
       h.chunks AS chunks, h.nodes AS nodes, h.hits AS hits, h.last_hit AS last_hit
FROM hot_prefixes h
LEFT JOIN namespaces n ON n.digest = h.namespace
ORDER BY h.hits DESC
"""

_VIEWS = ("placements_by_node", "placements_by_namespace", "hottest_prefixes")


def upgrade() -> None:
    op.execute("UPDATE nodes SET next_seq = 0")
    op.drop_table("placements")
    with op.batch_alter_table("locations", schema=None) as batch_op:
        batch_op.alter_column("id", existing_type=sa.Integer(), type_=sa.BigInteger())
    op.create_table(
        "chunks",
        sa.Column("id", _BIG_ID, autoincrement=False, nullable=False),
        sa.Column("namespace", sa.LargeBinary(length=16), nullable=False),
        sa.Column("chunk", sa.LargeBinary(length=36), nullable=False),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.digest"], name=op.f("fk_chunks_namespace")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
    )
    op.create_table(
        "placements",
        sa.Column("location_id", sa.BigInteger(), nullable=False),
        sa.Column("chunk_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["location_id"], ["locations.id"], name=op.f("fk_placements_location_id")
        ),
        sa.PrimaryKeyConstraint("location_id", "chunk_id", name=op.f("pk_placements")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "hot_prefixes",
        sa.Column("namespace", sa.LargeBinary(length=16), nullable=False),
        sa.Column("chunk", sa.LargeBinary(length=36), nullable=False),
        sa.Column("chunks", sa.BigInteger(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("last_hit", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "chunk", name=op.f("pk_hot_prefixes")),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("hot_prefixes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_hot_prefixes_last_hit"), ["last_hit"], unique=False)
    op.create_table(
        "change_log",
        sa.Column("id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("server", sa.String(length=32), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("entry", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_change_log")),
    )
    with op.batch_alter_table("change_log", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_change_log_time"), ["time"], unique=False)
    _create_views(op.get_bind().dialect.name)


def _create_views(dialect: str) -> None:
    as_hex, field, group = _HEX[dialect], _FIELD[dialect], _GROUP[dialect]
    op.execute(_BY_NODE)
    op.execute(
        _BY_NAMESPACE.format(
            digest=as_hex.format("n.digest"),
            model=field.format("n.document", "model"),
            revision=field.format("n.document", "revision"),
            tenant=field.format("n.document", "tenant"),
        )
    )
    op.execute(
        _HOTTEST.format(
            namespace=as_hex.format("h.namespace"),
            model=field.format("n.document", "model"),
            group=group.format("h.chunk"),
            hash=as_hex.format("substr(h.chunk, 5)"),
        )
    )


def downgrade() -> None:
    for view in _VIEWS:
        op.execute(f"DROP VIEW {view}")
    op.execute("UPDATE nodes SET next_seq = 0")
    with op.batch_alter_table("change_log", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_change_log_time"))
    op.drop_table("change_log")
    with op.batch_alter_table("hot_prefixes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_hot_prefixes_last_hit"))
    op.drop_table("hot_prefixes")
    op.drop_table("placements")
    op.drop_table("chunks")
    # Numbers of locations may be too large for the older type; registering makes new ones.
    op.execute("DELETE FROM locations")
    with op.batch_alter_table("locations", schema=None) as batch_op:
        batch_op.alter_column("id", existing_type=sa.BigInteger(), type_=sa.Integer())
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
