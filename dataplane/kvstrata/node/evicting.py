"""Evictions that the control plane asked for: dropped once, and said until it is heard.

A command may come again, since its answer or ours may have been lost: what was dropped is kept for
a while to be posted again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from kvstrata import api
from kvstrata.errors import Busy, KVStrataError, LinkBroken
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, check_keys
from kvstrata.node.reported import Drop, Reported, Shed

__all__ = ["Evicting"]

_log = logging.getLogger(__name__)

_REMEMBERED = 256


class Evicting:
    """Executes `evict` and `shed` commands and posts what they dropped through
    `post(eviction, result)`."""

    def __init__(
        self,
        reported: Reported,
        post: Callable[[str, api.EvictionResult], Awaitable[object]],
    ) -> None:
        self._reported = reported
        self._post = post
        self._running: dict[str, asyncio.Task[None]] = {}
        self._results: OrderedDict[str, api.EvictionResult] = OrderedDict()

    def handle(self, commands: Sequence[api.Command]) -> None:
        """Start them; those that run already go on, those that are done are said again."""
        for command in commands:
            if command.transfer not in self._running:
                task = asyncio.create_task(self._execute(command), name=command.transfer)
                self._running[command.transfer] = task
                task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task.get_name(), None)

    async def _execute(self, command: api.Command) -> None:
        result = self._results.get(command.transfer)
        if result is None:
            result = await self._drop(command)
            self._results[command.transfer] = result
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        try:
            await self._post(command.transfer, result)
        except (Busy, LinkBroken) as e:
            # The command comes again, and with it the next try.
            _log.info("eviction %s is not told yet: %s", command.transfer, e)
        except KVStrataError as e:
            _log.warning("the result of eviction %s is refused: %s", command.transfer, e)

    async def _drop(self, command: api.Command) -> api.EvictionResult:
        incarnation = self._reported.registration().incarnation
        try:
            async with asyncio.timeout(max(0.0, command.deadline_in)):
                if command.kind == "shed":
                    dropped = await self._reported.shed(_shed(command))
                else:
                    dropped = await self._reported.drop(_drop(command))
        except TimeoutError:
            detail = "not done before its deadline"
        except Exception as e:
            # Whatever it was, nobody should have to wait for the deadline to learn of it.
            _log.warning("eviction %s failed", command.transfer, exc_info=True)
            detail = f"{type(e).__name__}: {e}"[:2000]
        else:
            return api.EvictionResult(incarnation=incarnation, dropped=dict(dropped))
        return api.EvictionResult(incarnation=incarnation, detail=detail)


def _drop(command: api.Command) -> Drop:
    return Drop(
        keys=check_keys(bytes.fromhex(key) for key in command.keys),
        digests=frozenset(_digest(text) for text in command.digests),
        tiers=tuple(command.tiers),
    )


def _shed(command: api.Command) -> Shed:
    sizes = {bytes.fromhex(text): size for text, size in command.sizes.items()}
    if any(len(each) != DIGEST_BYTES + GROUP_BYTES or sizes[each] < 1 for each in sizes):
        raise ValueError("`sizes` are of namespaces with their groups, and of a byte or more")
    return Shed(sizes, command.amounts)


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"{text[:80]!r} is no namespace digest")
    return digest
