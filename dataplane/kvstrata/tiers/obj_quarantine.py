"""Damaged objects: set aside for people to look at, or at least not believed any more.

An object is known by its tag, so that one which was stored anew under the same name stays. What
can neither be moved nor removed, because the store refuses, is remembered: it counts as missing,
and the next store of the chunk overwrites it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import OrderedDict

from kvstrata.errors import Missing
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_client import ObjectClient, same_tag
from kvstrata.tiers.obj_conditions import AlreadyThere, Fault, Unsupported
from kvstrata.tiers.obj_format import QUARANTINE_OBJECTS, Names
from kvstrata.tiers.obj_pace import Retry

__all__ = ["Quarantine"]

_log = logging.getLogger(__name__)

_MOST_REMEMBERED = 65_536


class Quarantine:
    """Of one store; in the loop that talks to it."""

    def __init__(self, client: ObjectClient, retry: Retry, names: Names) -> None:
        self._client = client
        self._retry = retry
        self._names = names
        self._places = itertools.count(random.randrange(QUARANTINE_OBJECTS))  # noqa: S311
        self._one_at_a_time = asyncio.Lock()
        self._damaged: OrderedDict[str, str] = OrderedDict()

    async def set_aside(self, call: Call, name: str, tag: str) -> None:
        """Move the object of this name and tag away."""
        client, place = self._client, self._names.quarantine(next(self._places))
        async with self._one_at_a_time:  # whoever comes second finds nothing
            try:
                await self._retry.run(call, lambda: client.copy(name, place, tag))
            except (Missing, AlreadyThere):
                return
            except (Fault, Unsupported) as e:
                _log.warning("obj tier: %s can't be set aside, only removed: %s", name, e)
            try:
                await self._retry.run(call, lambda: client.delete_exactly(name, tag))
            except (Missing, AlreadyThere):
                return
            except (Fault, Unsupported) as e:
                _log.warning("obj tier: %s is damaged, and stays until it is replaced: %s", name, e)
                self._damaged[name] = tag
                self._damaged.move_to_end(name)
                if len(self._damaged) > _MOST_REMEMBERED:
                    self._damaged.popitem(last=False)

    def has(self, name: str, tag: str) -> bool:
        """Whether the object of this name and tag is damaged, as far as is remembered."""
        return name in self._damaged and same_tag(self._damaged[name], tag)

    def replaced(self, name: str) -> None:
        """Another object has this name now."""
        self._damaged.pop(name, None)
