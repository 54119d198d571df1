"""Transfers as they are told of: in memory, on their way to SQL, or there.

A server that shares its database tells what SQL has, since others write there, too. One that has
its database alone tells of those that go on from memory, which is the truth a moment earlier. An
end either tells once SQL has it: it would deny it after a restart.
"""

from __future__ import annotations

import asyncio

from kvstrata import api
from kvstrata.errors import Busy, Missing
from kvstrata_server import history
from kvstrata_server.database import Database
from kvstrata_server.problems import Conflict
from kvstrata_server.transfer import Transfer
from kvstrata_server.unended import Unended
from kvstrata_server.writer import Writer
from kvstrata_server.writes import Write

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
        self._ended: dict[str, Transfer] = {}
        """Those that this server ended and SQL doesn't say so yet."""
        self._by_key: dict[str, Transfer] = {}
        """By idempotency key those that SQL may not have yet, of a server that is alone."""

    def put(self, transfer_id: str, write: Write) -> None:
        self._writer.put(write)
        self._unwritten[transfer_id] = self._writer.position

    def begun(self, transfer: Transfer) -> None:
        """Before SQL has it, for who asks again."""
        if self._alone and transfer.idempotency_key is not None:
            self._by_key[transfer.idempotency_key] = transfer

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
                if ended is not None:
                    self._by_key.pop(ended.idempotency_key or "", None)

    async def flushed(self) -> None:
        """Until SQL has all that was put. Raises `Busy` if it doesn't take it."""
        await self._writer.flushed(_COMMIT_TIMEOUT)

    async def written(self, transfer_id: str) -> None:
        """Until SQL has what this server knows of it."""
        if self._unwritten.get(transfer_id, 0) > self._writer.committed:
            await self.flushed()

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

    async def page(self, after: str | None, limit: int) -> api.TransferList:
        if not self._alone:
            await self.flushed()
            return await history.page(self._database, after, limit)
        page = await history.page(self._database, after, limit)
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
