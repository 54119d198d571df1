"""Background loops that may not die in silence.

Each loop is restarted with growing back-off when it fails, and its state can be read: `running`,
`restarting: <error>`, `ended`. A node's health is made of these. A loop that needs five seconds to
fail, again and again, is not well in between: it is `running` again after twice that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


class Supervisor:
    """Runs named loops until `stop`. A loop that returns has ended for good."""

    def __init__(
        self, sleep: Sleep = asyncio.sleep, first_delay: float = 0.1, most: float = 10.0
    ) -> None:
        self.states: dict[str, str] = {}
        self.restarts = 0
        self._sleep = sleep
        self._first_delay = first_delay
        self._most = most
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        self.states[name] = "running"
        self._tasks[name] = asyncio.get_running_loop().create_task(self._keep(name, loop))

    @property
    def failing(self) -> dict[str, str]:
        return {name: s for name, s in self.states.items() if s.startswith("restarting")}

    async def stop(self) -> None:
        """Cancel all loops and wait for them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        delay, now = self._first_delay, asyncio.get_running_loop().time
        well: asyncio.TimerHandle | None = None
        while True:
            started = now()
            try:
                await loop()
            except Exception as e:
                if well is not None:
                    well.cancel()
                _log.exception("%s failed; restarting", name)
                self.states[name] = f"restarting: {type(e).__name__}: {e}"
                self.restarts += 1
            else:
                self.states[name] = "ended"
                return
            ran = now() - started
            if ran > self._most:
                delay = self._first_delay
            await self._sleep(delay)
            delay = min(2 * delay, self._most)
            well = asyncio.get_running_loop().call_later(min(2 * ran, self._most), self._well, name)

    def _well(self, name: str) -> None:
        if name in self._tasks and not self._tasks[name].done():
            self.states[name] = "running"
