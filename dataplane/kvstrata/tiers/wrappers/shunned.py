"""Objects of the tier within that are no good: not offered, and removed as soon as it can be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstrata.keys import Key
from kvstrata.tiers.base import Tier, complete

__all__ = ["Shunned"]

_log = logging.getLogger(__name__)

_MOST = 65_536


class Shunned:
    """Keys, at most 65,536: the oldest is forgotten first, and found out again when loaded."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._evictions: dict[asyncio.Task[None], set[Key]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[Key]) -> None:
        self._keys |= dict.fromkeys(keys)
        while len(self._keys) > _MOST:
            del self._keys[next(iter(self._keys))]

    def discard(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    async def retire(self, tier: Tier, keys: Sequence[Key], seconds: float) -> None:
        """Shun them, and evict them; returns after `seconds` at the latest, while that goes on.

        Those that it removed are no longer shunned: another may be stored in their place.
        """
        self.add(keys)
        await self._evict_soon(tier, keys, seconds)

    async def make_way(self, tier: Tier, keys: Sequence[Key], seconds: float) -> None:
        """Before these are stored: evict what is shunned of them. An eviction under way is waited
        for, since it must not meet what is stored now."""
        wanted = set(keys)
        running = {task for task, evicted in self._evictions.items() if evicted & wanted}
        if running:
            await asyncio.wait(running, timeout=seconds)
        await self._evict_soon(tier, [key for key in keys if key in self], seconds)

    async def _evict_soon(self, tier: Tier, keys: Sequence[Key], seconds: float) -> None:
        under_way = set().union(*self._evictions.values())
        wanted = [key for key in dict.fromkeys(keys) if key not in under_way]
        if not wanted:
            return
        task = asyncio.create_task(self._evict(tier, wanted))
        self._evictions[task] = set(wanted)
        task.add_done_callback(self._evictions.pop)
        await asyncio.wait({task}, timeout=seconds)

    async def close(self) -> None:
        """Return when no eviction runs."""
        if self._evictions:
            await asyncio.wait(set(self._evictions))

    async def _evict(self, tier: Tier, keys: list[Key]) -> None:
        try:
            gone = complete(await tier.evict(keys), len(keys))
        except Exception as e:
            _log.warning("tier %s: %d bad objects stay: %s", tier.name, len(keys), e)
            return
        # What was not there (another's store may follow at any time) needs no shunning either,
        # unless the tier only failed to remove it: then a lookup still finds it.
        rest = [key for key, was in zip(keys, gone, strict=True) if not was]
        self.discard([key for key, was in zip(keys, gone, strict=True) if was])
        if rest:
            try:
                found = complete(await tier.lookup(rest), len(rest))
            except Exception:
                return
            self.discard([key for key, here in zip(rest, found, strict=True) if not here])
