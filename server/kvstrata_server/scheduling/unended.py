"""The transfers that have not ended, as one server has them in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvstrata_server.clock import Clock
from kvstrata_server.scheduling.outgoing import Outgoing
from kvstrata_server.scheduling.transfer import Transfer

__all__ = ["Unended"]

# What was read from SQL may be older than an end that was heard of so long ago.
_REMEMBERED = 60.0


class Unended:
    """What is in here waits for its target, too."""

    def __init__(self, outgoing: Outgoing, clock: Clock) -> None:
        self.keys = 0
        """Of all of them."""
        self._outgoing = outgoing
        self._clock = clock
        self._transfers: dict[str, Transfer] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._over: dict[str, float] = {}
        """Those that ended lately, and when this server heard of it."""

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._transfers

    def __iter__(self) -> Iterator[str]:
        return iter(self._transfers)

    def get(self, transfer_id: str) -> Transfer | None:
        return self._transfers.get(transfer_id)

    def add(self, transfer: Transfer) -> None:
        """Unless it is there or, as this server heard after it was read, over."""
        if transfer.id in self._transfers or transfer.id in self._over:
            return
        self._transfers[transfer.id] = transfer
        self.keys += len(transfer.keys)
        heapq.heappush(self._deadlines, (transfer.deadline, transfer.id))
        self._outgoing.add(transfer)

    def remove(self, transfer_id: str) -> None:
        """It has ended, whether it was here or not."""
        self._over[transfer_id] = self._clock()
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self.keys -= len(transfer.keys)
            self._outgoing.remove(transfer)

    def late(self) -> Iterator[Transfer]:
        """Those past their deadlines, each once."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id = heapq.heappop(self._deadlines)
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                yield transfer

    def forget_old(self) -> None:
        now = self._clock()
        self._over = {t: at for t, at in self._over.items() if now - at < _REMEMBERED}
