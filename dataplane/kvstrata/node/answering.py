"""Commands that are executed once each, and answered until the answer is heard.

A command may come again, since its answer or ours may have been lost: what came of it is kept for
a while to be posted again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from kvstrata import api
from kvstrata.errors import Busy, KVStrataError, LinkBroken

__all__ = ["Answering"]

_log = logging.getLogger(__name__)

R = TypeVar("R")


class Answering(ABC, Generic[R]):
    """Executes commands of some kind side by side, and posts what came of each through
    `post(id, result)`. `what` they are is for the log; so many results are `remembered`."""

    def __init__(
        self, what: str, post: Callable[[str, R], Awaitable[object]], remembered: int
    ) -> None:
        self._what = what
        self._post = post
        self._remembered = remembered
        self._running: dict[str, asyncio.Task[None]] = {}
        self._results: OrderedDict[str, R] = OrderedDict()

    @abstractmethod
    async def _execute(self, command: api.Command) -> R:
        """What came of it; what failed is said there, too."""

    def handle(self, commands: Sequence[api.Command]) -> None:
        """Start them; those that run already go on, those that are done are said again."""
        for command in commands:
            if command.transfer not in self._running:
                task = asyncio.create_task(self._answer(command), name=command.transfer)
                self._running[command.transfer] = task
                task.add_done_callback(lambda task: self._running.pop(task.get_name(), None))

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, command: api.Command) -> None:
        result = self._results.get(command.transfer)
        if result is None:
            result = await self._execute(command)
            self._results[command.transfer] = result
            while len(self._results) > self._remembered:
                self._results.popitem(last=False)
        try:
            await self._post(command.transfer, result)
        except (Busy, LinkBroken) as e:
            # The command comes again, and with it the next try.
            _log.info("%s %s is not told yet: %s", self._what, command.transfer, e)
        except KVStrataError as e:
            _log.warning("the result of %s %s is refused: %s", self._what, command.transfer, e)
