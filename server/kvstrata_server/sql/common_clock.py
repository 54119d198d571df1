"""One time for all servers that share a database: its own.

Deadlines of transfers and the ages of what servers tell each other are numbers in SQL. A host whose
clock is wrong, or stood still while its machine was suspended, would end what others just began.
"""

from __future__ import annotations

import asyncio
import logging

from kvstrata.errors import Busy
from kvstrata_server.clock import Clock, SteadyClock
from kvstrata_server.sql.changes import now_there
from kvstrata_server.sql.database import Database

__all__ = ["CommonClock"]

log = logging.getLogger(__name__)

_EVERY = 30.0
_MOST = 1.0
"""Seconds of difference that nobody has to care about."""


class CommonClock:
    """`begin` sets a server's clock by the database's, `run` (to be supervised) goes on looking.

    Only a `SteadyClock` is looked at, and only of a shared database. One that falls behind is set
    forward; one that is ahead can't go back while the server runs, and is a `problem`.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self.problem = ""
        self._database = database
        self._clock = clock if database.shared and isinstance(clock, SteadyClock) else None

    async def begin(self) -> None:
        """Before anybody goes by the clock. Raises `Busy`."""
        if self._clock is None:
            return
        ahead = await self._ahead(self._clock)
        self._clock.correct(-ahead)
        if abs(ahead) > _MOST:
            log.warning(
                "this host's clock is %s the database's: this server goes by that one",
                _told(ahead),
            )

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_EVERY)

    async def look(self) -> None:
        """Compare, and correct what can be."""
        if self._clock is None:
            return
        try:
            ahead = await self._ahead(self._clock)
        except Busy:
            return  # others say so
        if ahead < -_MOST:
            self._clock.correct(-ahead)
            log.warning("this server's clock was %s the database's: set forward", _told(ahead))
        problem = ""
        if ahead > _MOST:
            problem = (
                f"this server's clock is {_told(ahead)} the database's, so deadlines pass too "
                "early: have the clocks of both hosts set, and restart this server"
            )
        if problem and not self.problem:
            log.error("%s", problem)
        self.problem = problem

    async def _ahead(self, clock: SteadyClock) -> float:
        """Seconds, as far as the time that asking took leaves no doubt."""
        asked = clock()
        [row] = await self._database.rows(now_there())
        there, answered = float(row[0]), clock()
        return max(0.0, asked - there) + min(0.0, answered - there)


def _told(ahead: float) -> str:
    return f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}"
