"""Chunks given up by the byte: the coldest of some namespaces, as much as was asked for.

Each place has its own order, and the first to go is what it would evict first anyway: in host
memory by the policy (or, where few of the coldest are wanted, by when they were used), what extends
a chunk before the chunk; in a tier as its `keys()` come. What is leased in host memory stays, there
and in the tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvstrata.errors import Malformed
from kvstrata.host import HostTier
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Key
from kvstrata.node.guard import Guard
from kvstrata.node.reported import Shed

__all__ = ["shed"]

_PREFIX_BYTES = DIGEST_BYTES + GROUP_BYTES
_HOST = "host"
_HOST_KEYS = 1024
# About a millisecond.
_LOOKED_AT = 4096
_TIER_KEYS = 1024


async def shed(host: HostTier, guards: Sequence[Guard], asked: Shed) -> dict[str, int]:
    """How many chunks went, by tier. Raises `Malformed` on locations that are not here."""
    by_store = {guard.store_id: guard for guard in guards if guard.tier.writable}
    unknown = asked.amounts.keys() - by_store.keys() - {_HOST}
    if unknown:
        raise Malformed(
            f"this node has {sorted((_HOST, *by_store))}, and not {sorted(unknown)[0]!r}"
        )
    gone: dict[str, int] = {}
    for location, nbytes in asked.amounts.items():
        guard = by_store.get(location)
        if guard is None:
            gone[_HOST] = await _shed_host(host, asked.sizes, nbytes)
        else:
            gone[guard.name] = await _shed_tier(guard, host, asked.sizes, nbytes)
    return gone


async def _shed_host(host: HostTier, sizes: Mapping[bytes, int], nbytes: int) -> int:
    count = 0
    for part in host.order(sizes, _LOOKED_AT) if nbytes > 0 else ():
        for start in range(0, len(part), _HOST_KEYS):
            gone = host.drop_coldest(part[start : start + _HOST_KEYS], nbytes)
            nbytes -= sum(chunk.nbytes for chunk in gone)
            count += len(gone)
            if nbytes <= 0:
                return count
            await asyncio.sleep(0)  # engines wait
        if not part:
            await asyncio.sleep(0)
    return count


async def _shed_tier(guard: Guard, host: HostTier, sizes: Mapping[bytes, int], nbytes: int) -> int:
    candidates = iter(await _of(guard.keys(), sizes))
    count = 0
    while nbytes > 0:
        batch: list[Key] = []
        left = nbytes
        for key in candidates:
            chunk = host.get(key)
            if chunk is None or not chunk.readers:
                batch.append(key)
                left -= sizes[key[:_PREFIX_BYTES]]
            if left <= 0 or len(batch) == _TIER_KEYS:
                break
        if not batch:
            break
        gone = [k for k, was in zip(batch, await guard.evict(batch), strict=True) if was]
        if not gone:
            break  # it does not answer, or others were at it: what is left is asked for again
        nbytes -= sum(sizes[key[:_PREFIX_BYTES]] for key in gone)
        count += len(gone)
    return count


async def _of(keys: list[Key], sizes: Mapping[bytes, int]) -> list[Key]:
    """Those that begin as one of `sizes` does, in order. There may be millions: in a thread, and
    key by key, so that the loop has its turns meanwhile."""
    return await asyncio.to_thread(lambda: [k for k in keys if k[:_PREFIX_BYTES] in sizes])
