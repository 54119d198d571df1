"""A bound on bytes in flight, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Budget"]


class Budget:
    """At most `capacity` bytes are taken at a time. A taker of more waits until it is alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.taken = 0
        self._queue: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._closed = False

    async def take(self, nbytes: int, seconds: float) -> int:
        """Wait for room for `nbytes`, at most `seconds`; the bytes taken, to be given back, or 0
        if there was none in time."""
        nbytes = min(nbytes, self.capacity)
        if self._closed:
            return 0
        if not self._queue and self.taken + nbytes <= self.capacity:
            self.taken += nbytes
            return nbytes
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[int] = loop.create_future()
        entry = (nbytes, turn)
        self._queue.append(entry)
        timer = loop.call_later(max(0.0, seconds), _answer, turn, 0)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(turn.result())
            raise
        finally:
            timer.cancel()
            # One that gave up may have stood in the way of smaller ones behind it.
            if entry in self._queue:
                self._queue.remove(entry)
                self._serve()

    def give(self, taken: int) -> None:
        """Give back what `take` returned."""
        self.taken -= taken
        self._serve()

    def close(self) -> None:
        """Nobody gets any more: not those who wait, nor those who come."""
        self._closed = True
        for _, turn in self._queue:
            _answer(turn, 0)

    def _serve(self) -> None:
        while self._queue and self.taken + self._queue[0][0] <= self.capacity:
            nbytes, turn = self._queue.popleft()
            if not turn.done():
                self.taken += nbytes
                turn.set_result(nbytes)


def _answer(turn: asyncio.Future[int], taken: int) -> None:
    if not turn.done():
        turn.set_result(taken)
