"""One eviction, and what is written of it. SQL decides what became of it: see `transfer_writes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata import api
from kvstrata.api import EvictionState
from kvstrata_server.sql.changes import EvictionAnswered, EvictionEnded, EvictionMade, tell
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import EvictionRow

__all__ = [
    "AnswerEviction",
    "Eviction",
    "ExpireEviction",
    "ForgetEvictions",
    "PutEviction",
    "Shed",
    "read_infos",
    "running",
    "what_to_shed",
]

# Not what is to be dropped: that may be large.
_SHOWN = (
    EvictionRow.id,
    EvictionRow.state,
    EvictionRow.created,
    EvictionRow.deadline,
    EvictionRow.ended,
    EvictionRow.nodes,
)


@dataclass(slots=True)
class Eviction:
    """One that runs, for handing it out."""

    id: str
    deadline: float
    what: dict[str, Any]
    """`keys`, `digests` and `tiers` of the command. Or of a tenant that holds too much: its name,
    and by node the `amounts` and `sizes` of a command to shed."""
    waiting: set[str]
    """Nodes that have not answered."""
    offered: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Node -> when, and to which incarnation."""

    @property
    def tenant(self) -> str | None:
        """Who holds too much; None: somebody asked for it."""
        return self.what.get("tenant")

    def command(self, node: str, now: float) -> api.Command:
        """What a node is to do."""
        command = api.Command(kind="evict", transfer=self.id, deadline_in=self.deadline - now)
        if self.tenant is None:
            named = {name: self.what[name] for name in ("keys", "digests", "tiers")}
            return command.model_copy(update=named)
        # Of another kind, so that a node of a version that knows no amounts does not drop all.
        return command.model_copy(update={"kind": "shed", **self.what["shed"][node]})


@dataclass(frozen=True, slots=True)
class Shed:
    """What one node should give up; both as in `api.Command`."""

    amounts: dict[str, int]
    sizes: dict[str, int]


def what_to_shed(tenant: str, nodes: Mapping[str, Shed]) -> dict[str, Any]:
    return {
        "keys": [],
        "tenant": tenant,
        "shed": {n: {"amounts": shed.amounts, "sizes": shed.sizes} for n, shed in nodes.items()},
    }


@dataclass(slots=True)
class PutEviction:
    """A new one, unless there is one with its idempotency key."""

    info: api.EvictionInfo
    what: dict[str, Any]
    idempotency_key: str | None
    request_digest: bytes
    log_as: str
    rows: int = 1
    kept: str | None = field(default=None, init=False)
    """Id of the one that SQL has: this, or that with the same key. None: not written yet."""

    async def apply(self, connection: AsyncConnection) -> None:
        same: ColumnElement[bool] = EvictionRow.id == self.info.id
        if self.idempotency_key is not None:
            same = or_(same, EvictionRow.idempotency_key == self.idempotency_key)
        self.kept = await connection.scalar(select(EvictionRow.id).where(same))
        if self.kept is not None:
            return
        row = {
            "id": self.info.id,
            "state": self.info.state.value,
            "created": self.info.created,
            "deadline": self.info.deadline,
            "ended": None,
            "what": self.what,
            "nodes": [node.model_dump() for node in self.info.nodes],
            "idempotency_key": self.idempotency_key,
            "request_digest": self.request_digest,
        }
        await connection.execute(insert(EvictionRow).values(row))
        await tell(connection, self.log_as, EvictionMade(self.info.id))
        self.kept = self.info.id


@dataclass(slots=True)
class AnswerEviction:
    """What a node dropped; the last answer ends it. Again, or too late: nothing changes."""

    id: str
    answer: api.NodeEviction
    time: float
    log_as: str
    rows: int = 1
    info: api.EvictionInfo | None = field(default=None, init=False)
    """As SQL has it then. None: not written yet, or SQL doesn't know it."""

    async def apply(self, connection: AsyncConnection) -> None:
        mine = EvictionRow.id == self.id
        row = (await connection.execute(select(*_SHOWN).where(mine))).first()
        self.info = None if row is None else _info(row)
        if self.info is None or self.info.state.ended:
            return
        node = self.answer.node
        if not any(_waits(at) and at.node == node for at in self.info.nodes):
            return
        nodes = [self.answer if at.node == node else at for at in self.info.nodes]
        values: dict[str, Any] = {"nodes": [at.model_dump() for at in nodes]}
        shown: dict[str, Any] = {"nodes": nodes}
        if not any(map(_waits, nodes)):
            failed = any(at.dropped is None for at in nodes)
            state = EvictionState.PARTIAL if failed else EvictionState.DONE
            values |= _ended(state, self.time)
            shown |= {"state": state, "ended": self.time}
        await connection.execute(update(EvictionRow).where(mine).values(values))
        await tell(connection, self.log_as, EvictionAnswered(self.id, node))
        self.info = self.info.model_copy(update=shown)


@dataclass(frozen=True, slots=True)
class ExpireEviction:
    """It is over, unless it was."""

    id: str
    time: float
    log_as: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        found = await connection.execute(
            update(EvictionRow)
            .where(EvictionRow.id == self.id, EvictionRow.ended.is_(None))
            .values(_ended(EvictionState.EXPIRED, self.time))
        )
        if found.rowcount:
            await tell(connection, self.log_as, EvictionEnded(self.id))


@dataclass(frozen=True, slots=True)
class ForgetEvictions:
    """Those that ended before a time."""

    before: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(delete(EvictionRow).where(EvictionRow.ended < self.before))


async def running(database: Database, among: Sequence[str] | None = None) -> list[Eviction]:
    """Of those with these ids; None: all."""
    condition: ColumnElement[bool] = EvictionRow.ended.is_(None)
    if among is not None:
        condition = condition & EvictionRow.id.in_(among)
    found = select(EvictionRow.id, EvictionRow.deadline, EvictionRow.what, EvictionRow.nodes)
    return [
        Eviction(row.id, row.deadline, row.what, {at.node for at in _nodes(row) if _waits(at)})
        for row in await database.rows(found.where(condition))
    ]


async def read_infos(
    database: Database, condition: ColumnElement[bool], limit: int
) -> list[api.EvictionInfo]:
    """In order of creation."""
    found = select(*_SHOWN).where(condition).order_by(EvictionRow.id).limit(limit)
    return [_info(row) for row in await database.rows(found)]


def _ended(state: EvictionState, time: float) -> dict[str, Any]:
    # What was asked for is of no use once it is over, and may be large.
    return {"state": state.value, "ended": time, "what": {}}


def _waits(at: api.NodeEviction) -> bool:
    return at.dropped is None and not at.detail


def _nodes(row: Any) -> list[api.NodeEviction]:
    return [api.NodeEviction.model_validate(node) for node in row.nodes]


def _info(row: Any) -> api.EvictionInfo:
    return api.EvictionInfo(
        id=row.id,
        state=EvictionState(row.state),
        created=row.created,
        deadline=row.deadline,
        ended=row.ended,
        nodes=_nodes(row),
    )
