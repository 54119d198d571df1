"""The stream of changes: what became of the index since a reader last looked.

Changes are numbered from 1 in each *epoch*, which is a server's run (or what it knows since it last
had to begin anew); a cursor is `epoch:number`. The latest are kept for readers that come back, up
to a number of keys in all, and each reader goes through them at its own pace. One that falls
behind what is kept has lost some, as has one of another epoch: it takes a snapshot and goes on from
the cursor that this bears. Applying a change twice does no harm, so a snapshot need not be of one
moment.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvstrata.errors import Expired, Malformed
from kvstrata_server.placement.batches import KeyBatch
from kvstrata_server.placement.index import HOST, LocationId, PlacementIndex
from kvstrata_server.placement.places import PlaceChange, Places
from kvstrata_server.sql.writes import Write

__all__ = ["Change", "Feed", "NodeChange", "Placed", "Voided", "WatchedPlaces"]

_MOST_KEYS = 1_000_000
_MOST_CHANGES = 100_000


@dataclass(frozen=True, slots=True)
class Placed:
    """Chunks left and came to what `node` reports of `location`, `host` or a store's id."""

    node: str
    location: str
    removed: KeyBatch
    added: KeyBatch

    def __len__(self) -> int:
        return len(self.removed) + len(self.added)


@dataclass(frozen=True, slots=True)
class Voided:
    """Nothing is at this location any more."""

    node: str
    location: str

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node is in service with these stores (id -> tier), or (None) has left it."""

    node: str
    stores: Mapping[str, str] | None

    def __len__(self) -> int:
        return 1


Change = Placed | Voided | NodeChange


class Feed:
    """`wait` is how readers learn of more; `close` ends them."""

    def __init__(self, most_keys: int = _MOST_KEYS, most_changes: int = _MOST_CHANGES) -> None:
        self.closed = False
        self._most_keys = most_keys
        self._most_changes = most_changes
        self._more = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        self._epoch = secrets.token_hex(8)
        self._changes: deque[Change] = deque()
        self._first = 1
        self._keys = 0

    @property
    def cursor(self) -> str:
        """After the last change."""
        return self.cursor_at(self._first + len(self._changes) - 1)

    def cursor_at(self, number: int) -> str:
        return f"{self._epoch}:{number}"

    def number_of(self, cursor: str) -> int:
        """Of the change that the reader saw last. Raises `Expired` if what came after it is kept
        no longer, `Malformed` for what is no cursor."""
        epoch, colon, number = cursor.partition(":")
        if not colon or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            raise Malformed(f"{cursor[:100]!r} is not a cursor of this stream")
        seen = int(number)
        if epoch != self._epoch or not self._first - 1 <= seen < self._first + len(self._changes):
            raise Expired(
                "what changed since then is no longer known: take GET /v1/snapshot, and go on from "
                "its `cursor`"
            )
        return seen

    def publish(self, change: Change) -> None:
        self._changes.append(change)
        self._keys += len(change)
        while len(self._changes) > 1 and (
            self._keys > self._most_keys or len(self._changes) > self._most_changes
        ):
            self._keys -= len(self._changes.popleft())
            self._first += 1
        self._wake()

    def restart(self) -> None:
        """What was known is forgotten, so changes of it mean nothing."""
        self._begin()
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def after(self, cursor: str) -> tuple[int, Change] | None:
        """The change after the one seen last, and its number; None: not yet. Raises `Expired`."""
        seen = self.number_of(cursor)
        place = seen + 1 - self._first
        return (seen + 1, self._changes[place]) if place < len(self._changes) else None

    async def wait(self, seconds: float) -> None:
        """Until something is published, or so long."""
        more = self._more
        try:
            async with asyncio.timeout(seconds):
                await more.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class WatchedPlaces(Places):
    """Places whose changes go into a feed."""

    def __init__(self, index: PlacementIndex, feed: Feed) -> None:
        super().__init__(index)
        self._feed = feed

    def clear(self) -> None:
        super().clear()
        self._feed.restart()

    def attach(self, node: str, stores: Mapping[str, str]) -> list[Write]:
        writes = super().attach(node, stores)
        self._feed.publish(NodeChange(node, dict(stores)))
        return writes

    def left(self, node: str) -> None:
        self._feed.publish(NodeChange(node, None))

    def void_host(self, node: str) -> list[Write]:
        writes = super().void_host(node)
        self._feed.publish(Voided(node, HOST))
        return writes

    def apply(self, changes: Iterable[PlaceChange]) -> list[Write]:
        changes = list(changes)
        writes = super().apply(changes)
        for change in changes:
            self._placed(change.location, change.removed, change.added)
        return writes

    def replace(
        self,
        node: str,
        held: Mapping[LocationId, KeyBatch],
        attached: Callable[[str, str], bool],
        rewrite: bool = False,
    ) -> list[Write]:
        writes = super().replace(node, held, attached, rewrite)
        nothing = self.index.families.of_keys(())
        for location in self.locations(node).values():
            self._voided(location)
            if location in held:
                self._placed(location, nothing, held[location])
        return writes

    def forget(self, node: str, attached: Callable[[str, str], bool]) -> list[Write]:
        stores = [store for store in self.locations(node) if store is not None]
        writes = super().forget(node, attached)
        self._feed.publish(NodeChange(node, None))
        # Another one has inherited what was known of its stores; which, is not told.
        nothing = self.index.families.of_keys(())
        for location in (at for store in stores for at in self.sharing(store)):
            self._placed(location, nothing, self.index.batch_at(location))
        return writes

    def _gone_from(self, location: LocationId, keys: KeyBatch) -> None:
        self._placed(location, keys, self.index.families.of_keys(()))

    def _clear(self, location: LocationId, rewrite: bool) -> list[Write]:
        self._voided(location)
        return super()._clear(location, rewrite)

    def _placed(self, location: LocationId, removed: KeyBatch, added: KeyBatch) -> None:
        if len(removed) or len(added):
            node, store = self.describe(location)
            self._feed.publish(Placed(node, store or HOST, removed, added))

    def _voided(self, location: LocationId) -> None:
        node, store = self.describe(location)
        self._feed.publish(Voided(node, store or HOST))
