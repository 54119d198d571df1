"""The server's clock: seconds since the epoch, as a monotonic clock counts them."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "SteadyClock"]

Clock = Callable[[], float]


class SteadyClock:
    """Starts at the wall clock and never goes back: heartbeats and deadlines survive a time step.

    It reads as seconds since the epoch so that deadlines in SQL mean something after a restart,
    and to other servers.
    """

    def __init__(
        self, wall: Clock = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        return self._offset + self._monotonic()

    def correct(self, seconds: float) -> None:
        """Read so much later (or earlier: only as long as nobody has gone by it)."""
        self._offset += seconds
