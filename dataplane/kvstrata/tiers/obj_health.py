"""Whether an object store is worth asking.

A store that is away, refuses us or has no bucket is left alone at once, one that is overloaded
after several failures in a row. While it cools off every call is answered without it; a probe
finds out when it is back, at growing intervals, so that nothing but the cause has to end.

    well ──failure──▶ cooling off ──the probe succeeds──▶ well
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstrata.backoff import Backoff
from kvstrata.tiers.obj_conditions import Condition, Fault

__all__ = ["Health"]

_log = logging.getLogger(__name__)

_PASSING_IN_A_ROW = 3


class Health:
    """Of one store. `probe()` asks it for as little as possible and raises `Fault` if it fails.

    Use it on one event loop.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        backoff: Backoff,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._probe = probe
        self._backoff = backoff
        self._sleep = sleep
        self._in_a_row = 0
        self._cooling: asyncio.Task[None] | None = None
        self.detail = ""
        """What is wrong while it cools off; empty while it is well."""

        self.condition: Condition | None = None

    @property
    def well(self) -> bool:
        return self._cooling is None

    def succeeded(self) -> None:
        """A request was answered."""
        self._in_a_row = 0

    def failed(self, fault: Fault) -> None:
        """A request failed, tries included."""
        self._in_a_row += fault.condition.passing
        if fault.condition.lasting or self._in_a_row >= _PASSING_IN_A_ROW:
            self.cool_off(fault)

    def cool_off(self, fault: Fault) -> None:
        """Leave it alone, whatever it was, until a probe succeeds."""
        if self._cooling is None:
            self._is(fault)
            _log.warning("obj tier answers miss until its store is back: %s", fault)
            self._cooling = asyncio.get_running_loop().create_task(self._until_well())

    async def close(self) -> None:
        if self._cooling is not None:
            self._cooling.cancel()
            await asyncio.wait([self._cooling])

    async def _until_well(self) -> None:
        while True:
            await self._sleep(self._backoff.next())
            try:
                await self._probe()
            except Fault as e:
                self._is(e)
            except Exception as e:
                _log.exception("probing the store of an obj tier")
                self.detail = f"probe: {e}"
            else:
                break
        self._backoff.reset()
        self._in_a_row = 0
        self.detail, self.condition = "", None
        self._cooling = None
        _log.info("obj tier: the store is back")

    def _is(self, fault: Fault) -> None:
        self.condition, self.detail = fault.condition, str(fault)
