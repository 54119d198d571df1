"""Chunks that the control plane wants in a store: written back once, and told until it is heard.

A command may come again, since its answer or ours may have been lost: what became of the keys is
kept for a while to be posted again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.errors import Busy, KVStrataError, LinkBroken
from kvstrata.keys import check_keys
from kvstrata.node.reported import Reported, WriteBack, Written

__all__ = ["Storing"]

_log = logging.getLogger(__name__)

_REMEMBERED = 32


class Storing:
    """Executes `store` commands and posts what became of their keys through
    `post(order, result)`."""

    def __init__(
        self,
        reported: Reported,
        post: Callable[[str, api.StoreResult], Awaitable[object]],
    ) -> None:
        self._reported = reported
        self._post = post
        self._running: dict[str, asyncio.Task[None]] = {}
        self._results: OrderedDict[str, api.StoreResult] = OrderedDict()

    def handle(self, commands: Sequence[api.Command]) -> None:
        """Start them; those that run already go on, those that are done are said again."""
        for command in commands:
            if command.transfer not in self._running:
                task = asyncio.create_task(self._execute(command), name=command.transfer)
                self._running[command.transfer] = task
                task.add_done_callback(lambda task: self._running.pop(task.get_name(), None))

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute(self, command: api.Command) -> None:
        order = command.transfer
        result = self._results.get(order)
        if result is None:
            result = await self._write_back(command)
            self._results[order] = result
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        try:
            await self._post(order, result)
        except (Busy, LinkBroken) as e:
            # The command comes again, and with it the next try.
            _log.info("order %s is not told yet: %s", order, e)
        except KVStrataError as e:
            _log.warning("the result of order %s is refused: %s", order, e)

    async def _write_back(self, command: api.Command) -> api.StoreResult:
        written, detail = Written(), ""
        try:
            keys = check_keys(bytes.fromhex(key) for key in command.keys)
            asked = WriteBack(command.transfer, keys, command.stores)
            async with asyncio.timeout(max(0.0, command.deadline_in)):
                await self._reported.write_back(asked, written)
        except TimeoutError:
            detail = "not done before its deadline"
        except Exception as e:
            # Whatever it was, nobody should have to wait for the deadline to learn of it.
            _log.warning("order %s failed", command.transfer, exc_info=True)
            detail = f"{type(e).__name__}: {e}"[:2000]
        told = {key.hex(): outcome for key, outcome in written.outcomes.items()}
        return api.StoreResult(
            incarnation=self._reported.registration().incarnation,
            outcomes={key: told.get(key, Outcome.FAILED) for key in command.keys} if told else told,
            stores={key.hex(): store for key, store in written.stores.items()},
            detail=detail,
        )
