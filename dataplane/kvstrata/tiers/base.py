"""The contract of a secondary tier.

A tier keeps chunks outside the host region. It is a cache: it may forget, it must never lie.
Calls take batches and answer per key, in order. They run on the node's event loop, so a tier
that blocks does its work in threads of its own. `kvstrata.testing.TierTests` is the contract
as a test suite; every tier, in tree or out, passes it.

Rules a tier keeps:
  - Bytes handed out are verified against the checksum they were stored with. A mismatch is
    `corrupt`: the object is set aside, counted, and missing from then on.
  - The memory of an item is read or written only while its call runs. A call that passes its
    deadline still returns only when nothing of it touches that memory any more. (The node
    doesn't wait for it: it counts the call as failed and keeps the memory from other use.)
  - What a store acknowledges and what `on_removed` says are believed in the order in which they
    come: a chunk that went while its batch was stored is not acknowledged.
  - Conditions of one key (missing, corrupt, full, failed) are outcomes, not exceptions.
  - After `close` every call raises `LinkBroken`.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import xxhash

from kvstrata.keys import Key, Namespace

__all__ = ["Item", "Outcome", "Tier", "TierContext", "Usage", "checksum", "complete"]

_T = TypeVar("_T")


class Outcome(enum.StrEnum):
    """What became of one key."""

    STORED = "stored"  # written now
    PRESENT = "present"  # was already there; nothing written
    LOADED = "loaded"  # the item's memory holds the verified bytes
    MISSING = "missing"  # not there
    CORRUPT = "corrupt"  # was there, failed verification, set aside
    NO_ROOM = "no_room"  # refused by capacity or a full device
    FAILED = "failed"  # an I/O error, a deadline, or gone again at once; may work later


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk and its memory: `view` is a writable, C-contiguous byte view of a slot.

    `offset` is where the view starts in the node's region (-1: it is not region memory).
    `checksum` is xxh3-64 of the payload where the node already knows it (stores only).
    `parent` is the chunk that this one extends, where the node knows it (stores only): a tier
    keeps the head of a chain longer than its tail.
    `exact` is False for loads that also take an object shorter than the view, into its first
    bytes: what is stored there says itself where it ends (wrappers that compress do).
    """

    key: Key
    view: memoryview
    offset: int = -1
    checksum: int | None = None
    parent: Key | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and chunks held now; `capacity_bytes` is None where the tier has no bound.

    `counters` are monotonic (`corrupt`, `evicted`, ...); `healthy` is False while the tier
    answers miss, or takes no stores, for a reason that `detail` tells.
    """

    used_bytes: int
    chunks: int
    capacity_bytes: int | None = None
    healthy: bool = True
    detail: str = ""
    counters: dict[str, int] = field(default_factory=dict)


def _ignore(keys: Sequence[Key]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a node hands to the tiers it opens.

    `namespace_of(digest)` is the document of a namespace the node knows, else None.
    `on_removed(keys)` must be called, on the event loop, when the tier drops chunks by itself
    (eviction, quarantine), so that the index does not offer them. `on_found(keys)` is the other
    way round, for chunks that a tier comes to know of while it is open and nobody stored through
    it: one whose start-up goes on beside the work.
    """

    node_id: str
    clock: Callable[[], float] = time.monotonic
    namespace_of: Callable[[bytes], Namespace | None] = lambda digest: None
    on_removed: Callable[[Sequence[Key]], None] = _ignore
    on_found: Callable[[Sequence[Key]], None] = _ignore


class Tier(ABC):
    """One secondary tier. `name` labels its metrics and log lines: the class says what kind it is,
    the node may give each of several of a kind its own. `store_id` is the location it reports.

    Two nodes whose tiers have the same `store_id` share one store (a mount, a bucket).
    Deadlines are in the context's clock, seconds; None means the tier's own default.
    """

    name: str
    writable: ClassVar[bool] = True
    """False for a tier that only reads (peers): nothing cascades to it, `store` is `NO_ROOM`."""
    store_id: str

    @classmethod
    @abstractmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        """Open it. Raises `ConfigError` on options that cannot work, saying what to change."""

    @abstractmethod
    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        """Whether each key can be loaded, as far as is known without reading payloads."""

    @abstractmethod
    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        """`STORED | PRESENT | NO_ROOM | FAILED` per item."""

    @abstractmethod
    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        """`LOADED | MISSING | CORRUPT | FAILED` per item. Only `LOADED` memory is meaningful."""

    @abstractmethod
    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        """Remove; whether each was there. `on_removed` is called for those."""

    @abstractmethod
    def keys(self) -> list[Key]:
        """What it holds, as far as this node knows: the tier's part of a snapshot. First to give
        up first, in a tier that has an order."""

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    async def drain(self, deadline: float | None = None) -> None:
        """Return when everything accepted so far is done, or raise `Expired`."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent. Returns when no call touches item memory."""


def complete(answers: Sequence[_T], count: int) -> Sequence[_T]:
    """What a tier answered to a batch of `count`. Raises `ValueError` if it is not one each."""
    if len(answers) != count:
        raise ValueError(f"a tier gave {len(answers)} answers for {count} keys")
    return answers


def checksum(view: memoryview) -> int:
    """xxh3-64 of a payload, the checksum every tier and transport verifies with."""
    return xxhash.xxh3_64_intdigest(view)
