"""When writes that were begun are overdue.

Writes are watched by the batch in which they began, and looked at when its time has passed: most
are done by then. Batches of which nothing is under way any more are let go of in between.
"""

from __future__ import annotations

import heapq

from kvstrata.chunks import Chunk, State

__all__ = ["Overdue"]

_WRITING = State.WRITING

# Writes looked after until they would be overdue, though most are soon committed.
_MOST_WATCHED = 65_536


class Overdue:
    """All writes of a host tier. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, list[Chunk]]] = []
        self._watched = 0
        self._most_watched = _MOST_WATCHED
        self._sequence = 0

    def watch(self, chunks: list[Chunk], expires: float) -> None:
        """These writes, started together, are overdue when `expires` passes."""
        self._sequence += 1
        heapq.heappush(self._heap, (expires, self._sequence, chunks))
        self._watched += len(chunks)
        if self._watched > self._most_watched:
            self._forget_done()

    def due(self, now: float) -> list[Chunk]:
        """Those that are under way, and overdue now; told once."""
        overdue: list[Chunk] = []
        while self._heap and self._heap[0][0] < now:
            watched = heapq.heappop(self._heap)[2]
            self._watched -= len(watched)
            overdue += [c for c in watched if _under_way(c) and c.expires < now]
        return overdue

    def _forget_done(self) -> None:
        left = [
            (expires, sequence, under_way)
            for expires, sequence, chunks in self._heap
            if (under_way := [chunk for chunk in chunks if _under_way(chunk)])
        ]
        heapq.heapify(left)
        self._heap = left
        self._watched = sum(len(chunks) for _, _, chunks in left)
        self._most_watched = 2 * self._watched + _MOST_WATCHED


def _under_way(chunk: Chunk) -> bool:
    return chunk.visible and chunk.state is _WRITING
