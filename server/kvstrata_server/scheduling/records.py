"""Transfers as they are told of: in memory, on their way to SQL, or there.

A server that shares its database tells what SQL has, since others write there, too. One that has
its database alone tells of those that go on from memory, which is the truth a moment earlier. An
end either tells once SQL has it: it would deny it after a restart.
"""

from __future__ import annotations

import asyncio

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata.errors import Busy, Missing
from kvstrata_server.problems import Conflict
from kvstrata_server.scheduling import history
from kvstrata_server.scheduling.transfer import Transfer
from kvstrata_server.scheduling.unended import Unended
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import Write

__all__ = ["Records"]

_COMMIT_TIMEOUT = 10.0


class Records:
    """`alone`: no other server uses the database."""

    def __init__(self, database: Database, writer: Writer, unended: Unended, alone: bool) -> None:
        self._database = database
        self._writer = writer
        self._unended = unended
        self._alone = alone
        self._unwritten: dict[str, int] = {}
        """Transfer -> the position of the writer with which SQL has all of it."""
        self._last = 0
        """Of all of them, with those that SQL has."""
        self._ended: dict[str, Transfer] = {}
        """Those that this server ended and SQL doesn't say so yet."""
        self._by_key: dict[str, Transfer] = {}
        """By idempotency key those that this server was asked for and SQL may not have yet; of a
        server that is alone, until they end."""
        self._keys: dict[str, str] = {}
        """Transfer -> its idempotency key, as long as that is in the other."""

    def put(self, transfer_id: str, write: Write) -> None:
        self._writer.put(write)
        self._unwritten[transfer_id] = self._last = self._writer.position

    def begun(self, transfer: Transfer) -> None:
        """Before SQL has it, for who asks again."""
        if transfer.idempotency_key is not None:
            self._by_key[transfer.idempotency_key] = transfer
            self._keys[transfer.id] = transfer.idempotency_key

    def ended(self, transfer: Transfer) -> None:
        """After its end was put."""
        if self._alone:
            self._ended[transfer.id] = transfer

    def sweep(self) -> None:
        """Let go of what SQL has by now."""
        for transfer_id, position in list(self._unwritten.items()):
            if self._writer.committed >= position:
                del self._unwritten[transfer_id]
                ended = self._ended.pop(transfer_id, None)
                if ended is not None or not self._alone:
                    self._drop_key(transfer_id)

    def _drop_key(self, transfer_id: str) -> None:
        key = self._keys.pop(transfer_id, None)
        if key is not None and (known := self._by_key.get(key)) and known.id == transfer_id:
            del self._by_key[key]

    def is_sure(self, transfer: Transfer) -> bool:
        """Whether SQL has it for its idempotency key: another server may have been first."""
        return self._alone or transfer.id not in self._keys

    async def settled(self, transfer: Transfer) -> Transfer:
        """What SQL has for its idempotency key, when it was written: this, or what was first."""
        self._drop_key(transfer.id)
        found = await self.same_request(transfer.idempotency_key, transfer.request_digest)
        if found is None:
            raise Busy("the database did not keep this transfer: ask again; the log says why")
        return found

    async def standing(self, transfer_id: str) -> tuple[str, TransferState]:
        """Its target, and its state. Raises `Missing`."""
        known = self._unended.get(transfer_id) or self._ended.get(transfer_id)
        await self.written(transfer_id)
        if known is not None and self._alone:
            return known.target, known.state
        found = await history.standing(self._database, transfer_id)
        if found is None:
            raise _missing(transfer_id)
        return found

    async def flushed(self) -> None:
        """Until SQL has all that was put here. Raises `Busy` if it doesn't take it."""
        await self._writer.flushed(_COMMIT_TIMEOUT, self._last)

    async def written(self, transfer_id: str) -> None:
        """Until SQL has what this server knows of it. Raises `Busy` if it doesn't take it."""
        position = self._unwritten.get(transfer_id, 0)
        if position > self._writer.committed:
            await self._writer.flushed(_COMMIT_TIMEOUT, position)

    async def find(self, transfer_id: str) -> Transfer:
        """Raises `Missing`."""
        live = self._unended.get(transfer_id)
        if self._alone and live is not None:
            return live
        ended = self._ended.get(transfer_id)
        await self.written(transfer_id)
        found = ended or await history.by_id(self._database, transfer_id)
        if found is None:
            raise _missing(transfer_id)
        return found

    async def summary(self, transfer_id: str) -> api.TransferSummary:
        """Counts instead of keys. Raises `Missing`."""
        if self._alone:
            return (await self.find(transfer_id)).summary()
        await self.written(transfer_id)
        found = await history.summary(self._database, transfer_id)
        if found is None:
            raise _missing(transfer_id)
        return found

    async def page(self, after: str | None, limit: int, wanted: history.Wanted) -> api.TransferList:
        if not self._alone or wanted.states is not None:
            # As SQL has them: those that were chosen by their state are in it.
            await self.flushed()
            return await history.page(self._database, after, limit, wanted)
        page = await history.page(self._database, after, limit, wanted)
        return api.TransferList(
            transfers=[
                live.summary() if (live := self._unended.get(row.id)) else row
                for row in page.transfers
            ],
            next=page.next,
        )

    async def same_request(self, idempotency_key: str | None, digest: bytes) -> Transfer | None:
        """What was made for it. Raises `Conflict` where the key was used for another request."""
        if idempotency_key is None:
            return None
        found = self._by_key.get(idempotency_key)
        if found is None:
            try:
                async with asyncio.timeout(_COMMIT_TIMEOUT):
                    found = await history.by_idempotency_key(self._database, idempotency_key)
            except TimeoutError:  # others wait for their turn to create
                raise Busy("the database does not answer: see /healthz") from None
        if found is not None and found.request_digest != digest:
            raise Conflict(
                f"this Idempotency-Key was used for transfer {found.id}, which asks for something "
                "else: use another key"
            )
        return found


def _missing(transfer_id: str) -> Missing:
    return Missing(f"no transfer {transfer_id!r}, or it ended too long ago")
