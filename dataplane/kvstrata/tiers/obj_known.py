"""What an obj tier knows of its store, and how it comes to know it: every answer of the store is
taken up here, every chunk that is gone dropped and announced.

Requests for one chunk may cross each other, and be carried out in another order than they are
answered. What this node removes is not believed in for that: see `drops`. Between nodes there is
no order, so that a chunk which another node removed is believed in until it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.drops import Drops
from kvstrata.tiers.obj_batches import LATE, Batches, Done
from kvstrata.tiers.obj_health import Health
from kvstrata.tiers.obj_index import Index
from kvstrata.tiers.obj_options import ObjOptions

__all__ = ["Known"]

_log = logging.getLogger(__name__)

_KEPT = (Outcome.STORED, Outcome.PRESENT)


class Known:
    def __init__(
        self,
        name: str,
        options: ObjOptions,
        context: TierContext,
        calls: Calls,
        batches: Batches,
        health: Health,
    ) -> None:
        """`name` is the tier's, for log lines."""
        self.drops = Drops(calls)
        self.index = Index(
            context.clock, options.known_for, options.missing_for, options.exclusive, self.drops
        )
        self.claimed = 0
        """Bytes, by stores that have not settled."""
        self.counters = dict.fromkeys(
            (
                *("stored", "loaded", "evicted", "corrupt", "errors"),
                *("store_bytes", "load_bytes", "orphans"),
            ),
            0,
        )
        self._name = name
        self._options = options
        self._on_removed = context.on_removed
        self._batches = batches
        self._health = health

    async def ask(self, call: Call, keys: Sequence[Key]) -> list[Done]:
        """Ask the store for chunks and learn the answers."""
        mark = self.drops.mark()
        done = await self._batches.probe(call, keys)
        gone, held = [], []
        for key, d in zip(keys, done, strict=True):
            if d.outcome is Outcome.PRESENT and not self.drops.since(key, mark):
                held.append((key, d.nbytes))
            elif d.outcome is Outcome.MISSING and self._missed(key, mark):
                gone.append(key)
        self.index.hold(held)
        self.announce(gone)
        self.report(done)
        return done

    async def settle_store(
        self, call: Call, sizes: Mapping[Key, int], outcomes: Mapping[Key, Outcome], mark: int
    ) -> dict[Key, Outcome]:
        """Take up what a store that began at `mark` found or put there, of `sizes` in bytes; its
        outcomes as they are to be answered, at once."""

        async def there(keys: list[Key]) -> list[bool]:
            return [d.outcome is Outcome.PRESENT for d in await self._batches.probe(call, keys)]

        kept = [key for key, outcome in outcomes.items() if outcome in _KEPT]
        gone = await self.drops.gone(kept, mark, there)
        # Of what was known all along the index has no news.
        news = [k for k in kept if outcomes[k] is Outcome.STORED or self.index.there(k) is not True]
        news = [key for key in news if key not in gone]
        self.index.hold([(key, sizes[key]) for key in news])
        for key in news:
            self.drops.note_held(key)
        # Whoever is told of the removal first must not be told then that it is there.
        return {**outcomes, **dict.fromkeys(gone, Outcome.FAILED)}

    def _missed(self, key: Key, mark: int) -> bool:
        """A call that began at `mark` did not find it: drop it; whether it was held."""
        if self.drops.held_since(key, mark):
            self.index.doubt([key])  # it may have looked before the store that ended first
            return False
        return self.index.drop(key)

    def settle_load(
        self, items: Sequence[Item], done: Sequence[Done], known: Collection[Key], mark: int
    ) -> None:
        """Take up what a load that began at `mark` found; `known` were held then."""
        held, gone = [], []
        for item, d in zip(items, done, strict=True):
            if d.outcome is Outcome.LOADED:
                held.append((item.key, d.nbytes))
                self.counters["loaded"] += 1
                self.counters["load_bytes"] += d.nbytes
            elif d.outcome is Outcome.CORRUPT:
                # Once, however many loads came upon it.
                if self.index.drop(item.key) or item.key not in known:
                    gone.append(item.key)
                    self.counters["corrupt"] += 1
            elif d.outcome is Outcome.MISSING and self._missed(item.key, mark):
                gone.append(item.key)
        # Removed since, or found damaged by another of this batch: not held.
        self.index.hold([(key, n) for key, n in held if not self.drops.since(key, mark)])
        self.announce(gone)
        self.report(done)

    async def remove(self, call: Call, keys: list[Key]) -> dict[Key, None]:
        """Delete; those that we believed to be there, in order."""
        done = await self._batches.remove(call, keys)
        self.report(done)
        removed: dict[Key, None] = {}
        for key, d in zip(keys, done, strict=True):
            if d.outcome is Outcome.MISSING:
                if self.index.drop(key):
                    removed[key] = None
            else:
                # What can't be deleted must not be the first victim of every store. It may have
                # been for all that: a request whose answer is lost is carried out now and then.
                self.index.touch([key])
                self.index.doubt([key])
        self.counters["evicted"] += len(removed)
        return removed

    def victims(self, asked: int, keep: Collection[Key]) -> list[Key]:
        """What to evict, oldest first, before `asked` more bytes are claimed."""
        capacity = self._options.capacity
        wanted = self.index.used_bytes + self.claimed + asked
        if capacity is None or wanted <= capacity * self._options.high_watermark:
            return []
        return self.index.oldest(wanted - capacity * self._options.low_watermark, keep)

    def announce(self, removed: Collection[Key]) -> None:
        if removed:
            self._on_removed(list(removed))

    def report(self, done: Sequence[Done]) -> None:
        """Count errors, log the first of a batch, and judge the store's health."""
        errors = [d for d in done if d.error]
        if errors:
            self.counters["errors"] += sum(d.outcome is not Outcome.CORRUPT for d in errors)
            told = "%s tier: %d chunks, first of them: %s"
            _log.warning(told, self._name, len(errors), errors[0].error)
        faults = [d.fault for d in errors if d.fault is not None]
        if any(not d.error and d is not LATE for d in done):
            self._health.succeeded()
        elif faults:
            self._health.failed(faults[0])
