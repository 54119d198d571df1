"""How a node is taken apart: last part first, in bounded time, whatever hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

__all__ = ["Ending"]

_log = logging.getLogger(__name__)

# However late it is, each part is given this long.
_LEAST_SECONDS = 0.5


class Ending:
    """Takes down what was put up, in about `seconds` from the call of `close` on."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.stuck: list[str] = []
        """Parts that did not end, and may go on for ever."""
        self._clock = clock
        self._seconds = seconds
        self._ends = 0.0
        self._stack = contextlib.AsyncExitStack()

    @property
    def time_left(self) -> float:
        return max(_LEAST_SECONDS, self._ends - self._clock())

    def add(self, what: str, end: Callable[[], Awaitable[object]]) -> None:
        """At the end call `end`, and wait for it as long as there is time."""

        async def bounded() -> None:
            ending = asyncio.ensure_future(end())
            await asyncio.wait({ending}, timeout=self.time_left)
            if ending.done():
                ending.result()
            else:
                self.stuck.append(what)
                _log.error("%s did not end in time", what)

        self._stack.push_async_callback(bounded)

    def add_quick(self, end: Callable[[], object]) -> None:
        """At the end call what takes no time."""
        self._stack.callback(end)

    async def close(self) -> None:
        """Idempotent. What one part raises is raised when the others are down."""
        self._ends = self._clock() + self._seconds
        await self._stack.aclose()
