"""What may take long, without holding the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvstrata_server.placement.batches import KeyBatch
from kvstrata_server.placement.held import Held, Reach
from kvstrata_server.placement.index import PlacementIndex

__all__ = ["apart", "found"]

T = TypeVar("T")

# Keys, or keys by places, of which some milliseconds are made: more than a change of threads costs.
_MUCH = 1 << 16


async def apart(effort: int, work: Callable[[], T]) -> T:
    """Done on another thread if it is much. It changes nothing that others use, and reads nothing
    that they change."""
    return await asyncio.to_thread(work) if effort >= _MUCH else work()


async def found(index: PlacementIndex, keys: KeyBatch, reach: Reach) -> Held:
    """`PlacementIndex.held`, between whose steps others have their turns."""
    finding = index.finding(keys, reach)
    while True:
        try:
            next(finding)
        except StopIteration as end:
            held: Held = end.value
            return held
        await asyncio.sleep(0)
