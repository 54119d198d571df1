"""The numbered batches of one publisher, as many as are worth keeping for readers that lost some.

Numbers grow by one a batch and start at the microseconds since the epoch. vLLM starts at 0; a
reader that knew the publisher before a restart then takes what comes for old news (Dynamo drops
it until the numbers have caught up), while a jump ahead makes every reader ask for a replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Batch", "EventLog"]

SEQ_BYTES = 8


@dataclass(frozen=True, slots=True)
class Batch:
    seq: int
    payload: bytes


class EventLog:
    """Keeps the latest `most_batches` of at most `most_bytes` in all, the last one always."""

    def __init__(self, first_seq: int, most_batches: int, most_bytes: int) -> None:
        self.next_seq = first_seq
        self._most_batches = most_batches
        self._most_bytes = most_bytes
        self._bytes = 0
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest(self) -> int:
        """Number of the oldest batch kept; the next one's if there is none."""
        return self._batches[0].seq if self._batches else self.next_seq

    def append(self, payload: bytes) -> Batch:
        batch = Batch(self.next_seq, payload)
        self.next_seq += 1
        self._batches.append(batch)
        self._bytes += len(payload)
        while len(self._batches) > 1 and (
            len(self._batches) > self._most_batches or self._bytes > self._most_bytes
        ):
            self._bytes -= len(self._batches.popleft().payload)
        return batch

    def since(self, seq: int) -> Iterator[Batch]:
        """Those kept from `seq` on, as they are now."""
        return iter([batch for batch in self._batches if batch.seq >= seq])
