"""The contract of a policy: which chunk the host tier gives up first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from kvstrata.keys import Key

__all__ = ["Policy"]


class Policy(ABC):
    """An order of eviction over the keys inserted and not removed.

    A policy orders keys; it owns no memory and knows nothing of leases. The host tier walks
    `victims()`, skips what is leased or busy, and says what it gave up with `evict`.

    Batches are chains in prefix order. The tail of a chain goes before its head, because a
    prefix without its start can't be hit: batches are ranked so that the head is the last to go.
    Between batches the host tier sees to it, whatever the policy says: it gives up what extends
    a chunk before the chunk.

    Admission is asked here too, and late: every chunk must pass through host memory to be read
    or to reach another tier, so none is refused a slot. A policy that holds a chunk not worth
    keeping puts it first among the victims.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the region's size in bytes."""
        self.capacity = capacity

    @abstractmethod
    def insert(self, keys: Sequence[Key], nbytes: int, after: Sequence[Key] = ()) -> None:
        """Chunks of `nbytes` each became readable. `after` are the readable chunks that `keys`
        extend, in prefix order, as far as known: their chain has grown, which is no use of it."""

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """They were used (found and leased), not merely probed. Unknown keys are ignored."""

    @abstractmethod
    def remove(self, keys: Sequence[Key]) -> None:
        """They are gone for a reason of their own: dropped or invalid. Unknown ones are ignored."""

    def evict(self, keys: Sequence[Key]) -> None:
        """They were given up for room. A policy with a memory learns from their return."""
        self.remove(keys)

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """All keys, first to give up first. The caller changes nothing while it iterates."""
