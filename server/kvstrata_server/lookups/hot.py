"""Which prefixes lookups find most: counted here, added up in SQL for people to look at.

A prefix is named by its last chunk, whose hash covers all before it: per lookup that is the last
one the best node has. Counting costs a lookup one entry of a dict; writing is bounded to the
hottest of each interval, so that a stream of prefixes that nobody repeats leaves few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from kvstrata.keys import Key
from kvstrata_server.clock import Clock
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import CountHits, Hit

__all__ = ["HotPrefixes"]

_INTERVAL = 5.0
_MOST_COUNTED = 50_000
_MOST_WRITTEN = 200
_RETENTION = 86400.0


@dataclass(slots=True)
class _Count:
    chunks: int
    nodes: int
    hits: int


class HotPrefixes:
    """`found` at each lookup, `flush` now and then."""

    def __init__(self, writer: Writer, clock: Clock) -> None:
        self._writer = writer
        self._clock = clock
        self._counts: dict[Key, _Count] = {}
        self._flushed = clock()

    def found(self, last: Key, chunks: int, nodes: int) -> None:
        """`nodes` can serve this prefix of so many chunks that ends with `last`."""
        count = self._counts.get(last)
        if count is not None:
            count.hits += 1
            count.nodes = nodes
        elif len(self._counts) < _MOST_COUNTED:
            self._counts[last] = _Count(chunks, nodes, 1)

    def flush(self, force: bool = False) -> None:
        """Hand the hottest to the writer, if it is time."""
        now = self._clock()
        if not self._counts or (now - self._flushed < _INTERVAL and not force):
            return
        counts, self._counts, self._flushed = self._counts, {}, now
        hottest = nlargest(_MOST_WRITTEN, counts.items(), key=lambda item: item[1].hits)
        hits = [Hit(key, c.chunks, c.nodes, c.hits, now) for key, c in hottest]
        self._writer.put(CountHits(hits, now - _RETENTION))
