"""A bound on bytes in flight, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Budget"]


class Budget:
    """At most `capacity` bytes are taken at a time. A taker of more waits until it is alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for room for `nbytes`, hold it inside the block."""
        nbytes = min(nbytes, self.capacity)
        if self._queue or self.taken + nbytes > self.capacity:
            turn = asyncio.get_running_loop().create_future()
            entry = (nbytes, turn)
            self._queue.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give(nbytes)
                else:
                    self._queue.remove(entry)
                raise
        else:
            self.taken += nbytes
        try:
            yield
        finally:
            self._give(nbytes)

    def _give(self, nbytes: int) -> None:
        self.taken -= nbytes
        while self._queue and self.taken + self._queue[0][0] <= self.capacity:
            size, turn = self._queue.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)
